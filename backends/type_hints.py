"""How a function of the user's is called, and what its type hints say of its tensors.

    def predict(x: Annotated[npt.NDArray[np.float32], (-1, 4)]) -> npt.NDArray[np.int64]    arrays, a whole batch at a time
    def predict(x: np.ndarray[tuple[int, Literal[4]], np.dtype[np.float32]])                the same in numpy's own words
    def predict(text: Annotated[np.ndarray, "BYTES", (-1, 1)])                              the protocol's datatype as text
    def predict(width: float, colour: str) -> float                                         one row at a time
    def predict(inputs)                                                                     a dict of arrays by input name
    def predict(inputs, parameters)                                                         and the parameters of the request

A shape has the rows in front, -1 for any size. Parameters that have a default are no inputs. A return type may be a tuple
(output_0, output_1, …), a NamedTuple or a TypedDict (each output by its field or key, all required). A function that yields
answers in parts: `Iterator[…]` of what a part is, such as `def predict(text: str) -> Iterator[str]`. One that returns what
another yields says so by that type alone.
"""

import inspect
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from types import GenericAlias, UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import numpy as np

from backends.base import LoadFailed, words_of
from backends.datatypes import NUMPY, datatype_of
from backends.signatures import ANY_OUTPUT, FORM, ROW, Hint, Signature, goes_with
from backends.source import PARAMETERS, takes_parameters

_SCALARS: Final = {float: "FP64", int: "INT64", bool: "BOOL", str: "BYTES", bytes: "BYTES"}
_MARKS: Final = (Required, NotRequired)  # of keys of a TypedDict


class _UnknownDatatype(LoadFailed):
    """Other text in capitals beside a type."""


def signature_of(function: Callable[..., Any], *, method: bool, names: Set[str] = frozenset()) -> Signature:
    """method: `function` is one of a class and gets `self` first. names: of the inputs, as far as they are known.

    Raises: LoadFailed, for hints that contradict each other, and for a function that cannot be called as a plain one.
    """
    plain = inspect.unwrap(function)
    if inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain):
        raise LoadFailed(f"{function.__name__} is async: write a plain function (`def`): it runs in a thread of its session")
    try:
        parameters = list(inspect.signature(function).parameters.values())[1 if method else 0 :]
    except ValueError:  # compiled code may not tell
        return Signature("dict", {}, None)
    untold = ""
    try:
        hints = _hints(_hinted(function))
    except Exception as exc:  # an annotation may name what only a type checker imports
        hints = {}
        if inspect.isroutine(function):  # other callables have none
            untold = f"its type hints cannot be read ({words_of(exc)})"
    wanted = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    inputs = {parameter.name: _hint_of(hints.get(parameter.name)) for parameter in wanted}
    of_no_tensor = {
        name: inspect.formatannotation(hints[name], function.__module__)
        for name, hint in inputs.items()
        if hint is None and name in hints and hints[name] is not Any and not _is_mapping(hints[name])
    }
    whys = [f"the hint of {name}, {hint}, is of no tensor" for name, hint in of_no_tensor.items()]
    defaults = tuple(p.name for p in parameters if p.default is not p.empty)
    if not wanted:
        hinted = [name for name in defaults if _hint_of(hints.get(name))]
        whys += [f"{name} has a default, so it is no input (leave the default out)" for name in hinted]
    untold = untold or "; ".join(whys)
    returned = hints.get("return")
    in_parts = inspect.isgeneratorfunction(plain) or (get_origin(returned) or returned) in (Iterator, Generator)
    given = get_args(returned)[0] if in_parts and get_args(returned) else returned
    said, keys = _by_output(given), _keys(given)
    outputs = _whole_hints(said)
    if not any(inputs.values()) and (method or _takes_dict(hints, list(inputs), names)):
        reads = takes_parameters(function, 3 if method else 2)
        own = () if reads else tuple(p.name for p in parameters[1:] if p.default is not p.empty)
        called = Signature("dict", {}, outputs, in_parts, reads_parameters=reads, defaults=own)
        return replace(called, keys=keys, of_lists=_of_lists(said), untold=untold)
    if nameless := [p.name for p in wanted if p.kind is p.POSITIONAL_ONLY]:
        raise LoadFailed(f"parameter {', '.join(nameless)} is positional-only, but inputs go by name: leave the `/` out")
    scalars = [name for name, hint in inputs.items() if hint is not None and hint.scalar is not None]
    if any(inputs.values()) and None in inputs.values():
        hintless = [name for name, hint in inputs.items() if hint is None]
        bare = [f"{name} ({of_no_tensor[name]})" if name in of_no_tensor else name for name in hintless]
        form = "such as `x: float`" if scalars else FORM
        raise LoadFailed(f"parameter {', '.join(bare)}: no type that says what tensor it is, {form}")
    if scalars and len(scalars) < len(inputs):
        arrays = [name for name in inputs if name not in scalars]
        raise LoadFailed(
            f"parameters {', '.join(scalars)} take one row's value, {', '.join(arrays)} a batch's array: give all of them "
            f"types of one kind, {FORM} for a batch"
        )
    if outputs is not None and any((hint.scalar is not None) != bool(scalars) for hint in outputs.values()):
        outputs = None  # one value of a whole batch, or an array of one row: what that gives is seen by running it
    any_inputs = not inputs and any(p.kind is p.VAR_KEYWORD for p in parameters)
    style: Literal["rows", "names"] = "rows" if scalars else "names"
    return Signature(
        style, inputs, outputs, in_parts, any_inputs, keys=keys, of_lists=_of_lists(said, of_rows=bool(scalars)),
        in_sequence=_is_sequence_of_values(given), defaults=defaults, untold=untold,
    )  # fmt: skip


def _hinted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Where the type hints of a callable stand."""
    while isinstance(function, partial):
        function = function.func
    call = type(function).__call__  # of an object of the user's; one around a function has the hints of that
    return call if inspect.isfunction(call) and not hasattr(function, "__wrapped__") else function


def _hints(of: Any) -> dict[str, Any]:
    """The type hints of a function or class. Raises whatever evaluating them raises."""
    return {name: _spelt_out(hint) for name, hint in get_type_hints(of, include_extras=True).items()}


def _spelt_out(hint: Any, within: Set[Any] = frozenset()) -> Any:
    """A type with what its aliases stand for: `type Row = float`, and on Python 3.12 numpy 2.5's own `npt.NDArray`.

    within: the aliases that it is part of; one within itself stays.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    alias = hint if origin is None else origin
    if origin in (Literal, Union, UnionType):  # of values, and of no tensor
        return hint
    first = arguments[:1] if origin is Annotated else arguments
    spelt = tuple(_spelt_out(argument, within) for argument in first) + arguments[len(first) :]
    if type(alias).__name__ == "TypeAliasType" and alias not in within:  # of typing or typing_extensions
        value = alias.__value__
        if spelt:  # a tuple takes the arguments in the alias's order, and fills in `value` by the way
            value = get_args(GenericAlias(tuple, (*alias.__type_params__, value))[spelt])[-1]
        return _spelt_out(value, {*within, alias})
    return hint if spelt == arguments else origin[spelt if len(spelt) > 1 else spelt[0]]


def _takes_dict(hints: Mapping[str, Any], names: list[str], known: Set[str]) -> bool:
    if names[:1] == ["inputs"] and all(name in PARAMETERS for name in names[1:]):
        return names == ["inputs"] or not known >= set(names)
    return len(names) in (1, 2) and _is_mapping(hints.get(names[0]))


def _is_mapping(hint: Any) -> bool:
    origin = get_origin(hint) or hint
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _by_output(hint: Any) -> dict[str, Any]:
    """What a return type says of each output, in its own words; of ANY_OUTPUT where it names none."""
    if is_typeddict(hint):
        hints = _hints_of_fields(hint)
        said = {name: get_args(own)[0] if get_origin(own) in _MARKS else own for name, own in hints.items()}
        return said or {ANY_OUTPUT: None}
    if isinstance(hint, type) and issubclass(hint, tuple) and (fields := getattr(hint, "_fields", ())):
        hints = _hints_of_fields(hint)
        return {name: hints.get(name) for name in fields}
    arguments = get_args(hint)
    if get_origin(hint) is tuple:
        if Ellipsis in arguments:
            return {ANY_OUTPUT: arguments[0]}
        return {f"output_{index}": own for index, own in enumerate(arguments)}
    if _is_mapping(hint) and len(arguments) == 2:
        return {ANY_OUTPUT: arguments[1]}
    return {"output": hint}


def _hints_of_fields(hint: Any) -> dict[str, Any]:
    try:
        return _hints(hint)
    except Exception:  # as of a function
        return {}


def _whole_hints(outputs: Mapping[str, Any]) -> Mapping[str, Hint] | None:
    """outputs: of `_by_output`. None, where it leaves one open."""
    if ANY_OUTPUT in outputs:
        return None
    found = {name: _hint_of(own, "outputs") for name, own in outputs.items()}
    known = {name: own for name, own in found.items() if own is not None}
    return known if len(known) == len(found) else None


def _of_lists(outputs: Mapping[str, Any], *, of_rows: bool = False) -> dict[str, Hint]:
    """outputs: of `_by_output`. of_rows: each has a list of what they say of one row."""
    found = {name: _of_list(GenericAlias(list, own) if of_rows else own) for name, own in outputs.items()}
    return {name: hint for name, hint in found.items() if hint is not None and (hint.datatype or hint.shape)}


def _of_list(hint: Any) -> Hint | None:
    """What a type such as `list[tuple[float, float]]` says of the array that numpy makes of it."""
    origin, own = get_origin(hint), set(get_args(hint)) - {Ellipsis}
    if isinstance(origin, type) and issubclass(origin, Sequence) and len(own) == 1:
        element = _of_list(own.pop())
        return element and replace(element, shape=None if element.shape is None else (-1, *element.shape))
    try:
        found = _hint_of(hint, "outputs")
    except _UnknownDatatype:  # as a unit is, of what is in a list or a dict
        return None
    return found if found is None or found.scalar is None else replace(found, shape=())


def _is_sequence_of_values(hint: Any) -> bool:
    """Whether it is `Sequence[float]` or its like: of arrays, lists or anything, what a tuple holds are several outputs."""
    if get_origin(hint) is not Sequence or not get_args(hint):
        return False
    element = _of_list(get_args(hint)[0])
    return element is not None and element.scalar is not None and element.shape == ()


def _keys(hint: Any) -> dict[str, bool]:
    """Of a TypedDict, and whether each is required; of another type, none."""
    if not is_typeddict(hint):
        return {}
    marks = {name: get_origin(own) for name, own in _hints_of_fields(hint).items()}
    return {name: mark is Required if mark in _MARKS else name in hint.__required_keys__ for name, mark in marks.items()}


def _hint_of(hint: Any, key: str = "inputs") -> Hint | None:
    """What one annotation says of a tensor; None: it is none of a tensor. key: `inputs` or `outputs`.

    Raises: LoadFailed, for an unknown datatype, and for one that does not go with the type of one row's value.
    """
    datatype: str | None = None
    shape: tuple[int, ...] | None = None
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        for extra in extras:
            if isinstance(extra, str) and extra.isupper():
                if extra not in NUMPY:
                    raise _UnknownDatatype(f"datatype {extra!r} in a type hint: expected one of {', '.join(NUMPY)}")
                datatype = extra
            elif isinstance(extra, tuple | list) and all(isinstance(size, int) and size >= -1 for size in extra):
                shape = tuple(extra)
    if get_origin(hint) in (Union, UnionType):
        return None
    if isinstance(hint, type) and (hint in _SCALARS or issubclass(hint, np.generic)) and shape is None:
        own = _SCALARS.get(hint) or _datatype(hint)
        if datatype and own and not goes_with(hint, own, datatype, key):
            fitting = ", ".join(name for name in NUMPY if goes_with(hint, own, name, key))
            raise LoadFailed(f"datatype {datatype!r} in a type hint of {hint.__name__}: expected one of {fitting}")
        scalar = datatype or own
        return Hint(scalar, ROW, hint) if scalar else None
    if hint is np.ndarray:
        return Hint(datatype, shape)
    if get_origin(hint) is np.ndarray:
        sizes, dtype = (*get_args(hint), Any)[:2]
        element = (*get_args(dtype), None)[0]
        shape = _shape(sizes) if shape is None else shape
        return Hint(datatype or _datatype(element), shape, as_text=element is np.str_)
    return None


def _datatype(scalar: Any = None) -> str | None:
    if not isinstance(scalar, type) or not issubclass(scalar, np.generic):
        return None
    if issubclass(scalar, np.object_ | np.str_ | np.bytes_):
        return "BYTES"
    try:
        return datatype_of(np.empty(0, scalar))
    except (KeyError, TypeError):
        return None


def _shape(sizes: Any) -> tuple[int, ...] | None:
    if get_origin(sizes) is not tuple or Ellipsis in get_args(sizes):
        return None
    return tuple(get_args(size)[0] if get_origin(size) is Literal else -1 for size in get_args(sizes))
