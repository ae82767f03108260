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
import reprlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
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

from backends.base import (
    ExecutionFailed,
    InputRefused,
    LoadFailed,
    OutputsRefused,
    Tensors,
    TensorSpec,
    as_declared,
    integers_as_declared,
    words_of,
)
from backends.datatypes import NUMPY, datatype_of, fields_of, normalised
from backends.source import PARAMETERS, place_of, takes, takes_parameters

_SCALARS: Final = {float: "FP64", int: "INT64", bool: "BOOL", str: "BYTES", bytes: "BYTES"}
_GOES_INTO: Final = {"b": "b", "i": "bui", "u": "bui"}  # by numpy's kinds; into floats, all numbers do, V being bfloat16
_TAKES: Final = {float: "iufV", int: "iu", bool: "b"}  # the kinds of inputs whose every value one of Python's can be
_MARKS: Final = (Required, NotRequired)  # of keys of a TypedDict
_ROW: Final = (-1,)
_TEXT_BYTES: Final = 64 << 20  # that numpy's text may take in any case
_TEXT_EXPANSION: Final = 16  # times its characters: 4 for the text itself
_NO_PART: Final = "predict yielded None: yield the outputs of a part, and `return` after the last"
FORM: Final = "such as `x: Annotated[npt.NDArray[np.float32], (-1, 4)]`"


@dataclass(frozen=True, slots=True)
class Hint:
    """What a type says of a tensor. datatype, shape: None where it does not say. scalar: the Python type of one row's value.

    as_text: arrays are of numpy's own text, where those of BYTES are else of `bytes` objects.
    """

    datatype: str | None
    shape: tuple[int, ...] | None
    scalar: type | None = None
    as_text: bool = False

    def spec(self, name: str) -> TensorSpec | None:
        """None, if the type leaves something open."""
        return TensorSpec(name, self.datatype, self.shape) if self.datatype and self.shape is not None else None


def single_value(hint: Hint, tensor: TensorSpec, key: str) -> TensorSpec:
    """What the type of one row's value says of a declared tensor, in its own words where they go together.

    A number of Python's has no width of its own, and one of numpy's may be wider than the input. key: `inputs` or `outputs`.
    """
    assert hint.datatype is not None  # as there is a scalar
    kind, of_hint = NUMPY[tensor.datatype].kind, NUMPY[hint.datatype].kind
    if key == "outputs":
        fits = of_hint in _kinds_into(kind)
    else:
        of_one_kind = kind == of_hint == "f" or {kind, of_hint} <= {"i", "u"}
        as_wide = of_one_kind and np.can_cast(NUMPY[tensor.datatype], NUMPY[hint.datatype])
        fits = tensor.datatype == hint.datatype or as_wide or kind in _TAKES.get(hint.scalar or object, "")
    one_a_row = key == "inputs" and tensor.shape and all(size in (1, -1) for size in tensor.shape[1:])
    return replace(tensor, datatype=tensor.datatype if fits else hint.datatype, shape=tensor.shape if one_a_row else _ROW)


def _kinds_into(kind: str) -> str:
    """The kinds of values that an output of a kind takes."""
    return "O" if kind == "O" else _GOES_INTO.get(kind, "buifV")


@dataclass(frozen=True, slots=True)
class Signature:
    """style: `dict`: one dict of arrays; `names`: an array for each input; `rows`: a value for each input, for each row.

    inputs: by name; None where a parameter has no type. outputs: None where the return type says nothing.
    in_parts: the function yields, and what it yields are the parts of an answer; outputs are those of a part.
    any_inputs: it takes them as `**inputs`, whatever their names are; `inputs` is empty.
    reads_parameters: of style `dict`, the second argument gets the parameters of the request.
    keys: of a return type that is a TypedDict, and whether each is required; empty: it is none.
    of_lists: what the return type says of outputs such as lists, maybe empty or of whole numbers; None as a shape: any.
    defaults: the names of parameters that have one, which are no inputs; none where it reads those of the request.
    untold: why its type hints do not say what its inputs are, where it has some.
    """

    style: Literal["dict", "names", "rows"]
    inputs: Mapping[str, Hint | None]
    outputs: Mapping[str, Hint] | None
    in_parts: bool = False
    any_inputs: bool = False
    _: KW_ONLY
    reads_parameters: bool = False
    keys: Mapping[str, bool] = field(default_factory=dict)
    of_lists: Mapping[str, Hint] = field(default_factory=dict)
    defaults: tuple[str, ...] = ()
    untold: str = ""

    def input_specs(self) -> tuple[TensorSpec, ...] | None:
        return None if self.style == "dict" else _whole(self.inputs)

    def output_specs(self) -> tuple[TensorSpec, ...] | None:
        return None if self.outputs is None else _whole(self.outputs)


def _whole(hints: Mapping[str, Hint | None]) -> tuple[TensorSpec, ...] | None:
    specs = [hint.spec(name) if hint is not None else None for name, hint in hints.items()]
    found = tuple(spec for spec in specs if spec is not None)
    return found if specs and len(found) == len(specs) else None


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
        hints = get_type_hints(_hinted(function), include_extras=True)
    except Exception as exc:  # an annotation may name what only a type checker imports
        hints = {}
        if inspect.isroutine(function):  # other callables have none
            untold = f"its type hints cannot be read ({words_of(exc)})"
    wanted = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    inputs = {parameter.name: hint_of(hints.get(parameter.name)) for parameter in wanted}
    of_no_tensor = {
        name: inspect.formatannotation(hints[name], function.__module__)
        for name, hint in inputs.items()
        if hint is None and name in hints and hints[name] is not Any and not _is_mapping(hints[name])
    }
    whys = [f"the hint of {name}, {hint}, is of no tensor" for name, hint in of_no_tensor.items()]
    defaults = tuple(p.name for p in parameters if p.default is not p.empty)
    if not wanted:
        hinted = [name for name in defaults if hint_of(hints.get(name))]
        whys += [f"{name} has a default, so it is no input (leave the default out)" for name in hinted]
    untold = untold or "; ".join(whys)
    returned = hints.get("return")
    in_parts = inspect.isgeneratorfunction(plain) or (get_origin(returned) or returned) in (Iterator, Generator)
    given = get_args(returned)[0] if in_parts and get_args(returned) else returned
    by_output, keys = _by_output(given), _keys(given)
    outputs = _whole_hints(by_output)
    if not any(inputs.values()) and (method or _takes_dict(hints, list(inputs), names)):
        reads = takes_parameters(function, 3 if method else 2)
        own = () if reads else tuple(p.name for p in parameters[1:] if p.default is not p.empty)
        called = Signature("dict", {}, outputs, in_parts, reads_parameters=reads, defaults=own)
        return replace(called, keys=keys, of_lists=_of_lists(by_output), untold=untold)
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
    lists = _of_lists(by_output, of_rows=bool(scalars))
    return Signature(style, inputs, outputs, in_parts, any_inputs, keys=keys, of_lists=lists, defaults=defaults, untold=untold)


def _hinted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Where the type hints of a callable stand."""
    while isinstance(function, partial):
        function = function.func
    call = type(function).__call__  # of an object of the user's; one around a function has the hints of that
    return call if inspect.isfunction(call) and not hasattr(function, "__wrapped__") else function


def refuse_uncallable(signature: Signature, predict: Callable[..., Any], *, of_class: bool) -> None:
    """Raises: LoadFailed, if what is to get a dict cannot be called with one. predict: bound, where it is a method."""
    if signature.style == "dict" and not takes(predict, 1) and not takes(predict, 2):
        this = "self, " if of_class else ""
        raise LoadFailed(
            f"predict cannot be called, expected predict({this}inputs) or predict({this}inputs, parameters) "
            f"({place_of(predict)})"
        )


def _takes_dict(hints: Mapping[str, Any], names: list[str], known: Set[str]) -> bool:
    if names[:1] == ["inputs"] and all(name in PARAMETERS for name in names[1:]):
        return names == ["inputs"] or not known >= set(names)
    return len(names) in (1, 2) and _is_mapping(hints.get(names[0]))


def _is_mapping(hint: Any) -> bool:
    origin = get_origin(hint) or hint
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _by_output(hint: Any) -> dict[str, Any]:
    """What a return type says of each output, in its own words."""
    if is_typeddict(hint):
        hints = get_type_hints(hint, include_extras=True)
        return {name: get_args(own)[0] if get_origin(own) in _MARKS else own for name, own in hints.items()}
    if isinstance(hint, type) and issubclass(hint, tuple) and (fields := getattr(hint, "_fields", ())):
        try:
            hints = get_type_hints(hint, include_extras=True)
        except Exception:  # as of a function
            hints = {}
        return {name: hints.get(name) for name in fields}
    if get_origin(hint) is tuple and Ellipsis not in get_args(hint):
        return {f"output_{index}": own for index, own in enumerate(get_args(hint))}
    return {"output": hint}


def _whole_hints(by_output: Mapping[str, Any]) -> Mapping[str, Hint] | None:
    found = {name: hint_of(own) for name, own in by_output.items()}
    known = {name: own for name, own in found.items() if own is not None}
    return known if len(known) == len(found) else None


def _of_lists(by_output: Mapping[str, Any], *, of_rows: bool = False) -> dict[str, Hint]:
    found = {name: _of_list(GenericAlias(list, own) if of_rows else own) for name, own in by_output.items()}
    return {name: hint for name, hint in found.items() if hint is not None and hint.datatype}


def _of_list(hint: Any) -> Hint | None:
    """What a type such as `list[tuple[float, float]]` says of the array that numpy makes of it."""
    origin, own = get_origin(hint), set(get_args(hint)) - {Ellipsis}
    if isinstance(origin, type) and issubclass(origin, Sequence) and len(own) == 1:
        element = _of_list(own.pop())
        return element and replace(element, shape=None if element.shape is None else (-1, *element.shape))
    found = hint_of(hint)
    return found if found is None or found.scalar is None else replace(found, shape=())


def _keys(hint: Any) -> dict[str, bool]:
    if not is_typeddict(hint):
        return {}
    marks = {name: get_origin(own) for name, own in get_type_hints(hint, include_extras=True).items()}
    return {name: mark is Required if mark in _MARKS else name in hint.__required_keys__ for name, mark in marks.items()}


def hint_of(hint: Any) -> Hint | None:
    """What one annotation says of a tensor; None: it is none of a tensor. Raises: LoadFailed, for an unknown datatype."""
    datatype: str | None = None
    shape: tuple[int, ...] | None = None
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        for extra in extras:
            if isinstance(extra, str) and extra.isupper():
                if extra not in NUMPY:
                    raise LoadFailed(f"datatype {extra!r} in a type hint: expected one of {', '.join(NUMPY)}")
                datatype = extra
            elif isinstance(extra, tuple | list) and all(isinstance(size, int) and size >= -1 for size in extra):
                shape = tuple(extra)
    if get_origin(hint) in (Union, UnionType):
        return None
    if isinstance(hint, type) and (hint in _SCALARS or issubclass(hint, np.generic)) and shape is None:
        scalar = datatype or _SCALARS.get(hint) or _datatype(hint)
        return Hint(scalar, _ROW, hint) if scalar else None
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


def call_by_name(
    function: Callable[..., Any], signature: Signature, inputs: Tensors, outputs: Mapping[str, TensorSpec] | None
) -> Tensors:
    """Call a function of style `names` or `rows`. outputs: those it should give, in order; None: not known yet.

    Raises: ExecutionFailed, if it gives more or fewer; what the function raises.
    """
    if signature.style == "names":
        return normalised(_named(function(**_arrays(signature, inputs)), outputs))
    columns = {name: _values(name, array, signature.inputs.get(name)) for name, array in inputs.items()}
    rows = len(next(iter(columns.values())))
    answers = [_named(function(**{name: column[row] for name, column in columns.items()}), outputs) for row in range(rows)]
    return _gathered(answers, outputs)


def stream_by_name(
    function: Callable[..., Any], signature: Signature, inputs: Tensors, outputs: Mapping[str, TensorSpec] | None
) -> Generator[Tensors, None, None]:
    """Call a function of style `names` or `rows` that yields the parts of an answer. outputs, errors: as `call_by_name`."""
    if signature.style == "names":
        with parts_of(function(**_arrays(signature, inputs))) as results:
            for result in results:
                yield normalised(_named(result, outputs, "yielded"))
        return
    columns = {name: _values(name, array, signature.inputs.get(name)) for name, array in inputs.items()}
    rows = len(next(iter(columns.values())))
    if rows != 1:
        raise ExecutionFailed(f"a function of one row's values that yields answers requests of one row, got {rows}")
    with parts_of(function(**{name: column[0] for name, column in columns.items()})) as results:
        for result in results:
            yield _gathered([_named(result, outputs, "yielded")], outputs)


def _gathered(answers: list[dict[str, Any]], outputs: Mapping[str, TensorSpec] | None) -> Tensors:
    """The outputs of all rows of what the function gave for each."""
    other = next((answer for answer in answers if answer.keys() != answers[0].keys()), None)
    if other is not None:
        raise ExecutionFailed(f"the function gave {[*answers[0]]} for one row, {[*other]} for another")
    gathered: dict[str, Any] = {name: [answer[name] for answer in answers] for name in (answers[0] if answers else ())}
    try:
        if outputs is None:
            return normalised(gathered)
        return {name: _column(outputs[name], column) if name in outputs else column for name, column in gathered.items()}
    except ValueError as exc:
        if any(len({np.shape(value) for value in column}) > 1 for column in gathered.values()):
            raise ExecutionFailed("the function gave other sizes for one row than for another: send one row a request") from exc
        raise


def _column(declared: TensorSpec, values: list[Any]) -> np.ndarray:
    """One output of all rows. A number of Python's has no width of its own: it takes the one that is declared.

    Raises: OutputsRefused, for a value of another type; ExecutionFailed, for one that does not fit.
    """
    dtype = NUMPY[declared.datatype]
    if dtype.hasobject:
        texts = np.asarray(values, dtype)
        if any(isinstance(element, list | tuple | np.ndarray) for element in texts.flat):
            raise ValueError(f"output {declared.name!r}: lists of other lengths make no array")  # as numpy raises it of numbers
        return texts
    array, kinds = np.asarray(values), _kinds_into(dtype.kind)
    if array.size and array.dtype.kind not in kinds:
        for value in values:
            if np.asarray(value).dtype.kind not in kinds and (dtype.kind == "b" or not isinstance(value, int)):
                raise OutputsRefused(
                    f"output {declared.name!r}: expected {declared.datatype}, the function gave {reprlib.repr(value)} "
                    f"({type(value).__name__})"
                )
        array = np.asarray(values, object)  # of integers that numpy has no type for
    if dtype.kind in "iu":
        return integers_as_declared(declared, array)
    if dtype.kind == "b":
        return array
    try:
        return as_declared(declared, array.astype(np.float64))
    except OverflowError:
        raise ExecutionFailed(
            f"output {declared.name!r}: the function gave an integer too large for {declared.datatype}"
        ) from None


def _arrays(signature: Signature, inputs: Tensors) -> Tensors:
    """Inputs as a function of arrays gets them. Raises: InputRefused."""
    as_text = [name for name, hint in signature.inputs.items() if hint is not None and hint.as_text and name in inputs]
    return inputs if not as_text else {**inputs, **{name: _text_array(name, inputs[name]) for name in as_text}}


def _text_array(name: str, array: np.ndarray) -> np.ndarray:
    """In numpy's text each element takes the room of the longest. Raises: InputRefused, where that is out of proportion."""
    texts = _decoded(name, array.flat)
    longest = max(map(len, texts), default=0)
    size = 4 * longest * len(texts)
    if size > max(_TEXT_BYTES, _TEXT_EXPANSION * sum(map(len, texts))):
        raise InputRefused(
            f"input {name!r}: its longest text has {longest} characters; with all {len(texts)} as long, they would take "
            f"{size >> 20} MiB"
        )
    return np.array(texts, np.str_).reshape(array.shape)


def _values(name: str, array: np.ndarray, hint: Hint | None) -> list[Any]:
    scalar = hint.scalar if hint is not None else None
    flat = array.reshape(array.shape[0], -1)
    if flat.shape[1] != 1:
        raise ExecutionFailed(f"expected one value a row, got shape {list(array.shape)}")
    values = flat[:, 0].tolist()
    if scalar is not None and issubclass(scalar, str):
        return _decoded(name, values)
    as_declared: Callable[[Any], Any] | None = scalar
    return [as_declared(value) for value in values] if as_declared is not None else values


def _decoded(name: str, elements: Iterable[Any]) -> list[str]:
    """Raises: InputRefused."""
    texts = []
    for index, element in enumerate(elements):
        try:
            texts.append(element.decode() if isinstance(element, bytes) else element)
        except UnicodeDecodeError as exc:
            raise InputRefused(f"input {name!r}: element {index}: {exc.reason}, expected text in UTF-8") from exc
    return texts


def _named(result: Any, outputs: Mapping[str, TensorSpec] | None, did: str = "returned") -> dict[str, Any]:
    refuse_nothing(result, did)
    fields = fields_of(result)
    if fields and (outputs is None or not outputs.keys().isdisjoint(fields)):
        result = dict(zip(fields, result, strict=True))
    if isinstance(result, Mapping):
        return refuse_masked({str(name): value for name, value in result.items()})
    parts = result if isinstance(result, tuple) else (result,)
    if outputs is not None and len(parts) != len(outputs):
        raise ExecutionFailed(f"the function gave {len(parts)} outputs, {len(outputs)} are declared: {', '.join(outputs)}")
    unnamed = ["output"] if len(parts) == 1 else [f"output_{index}" for index in range(len(parts))]
    names = unnamed if outputs is None or outputs.keys() == set(unnamed) else list(outputs)
    return refuse_masked(dict(zip(names, parts, strict=True)))


def refuse_masked(outputs: dict[str, Any]) -> dict[str, Any]:
    """The outputs. Raises: ExecutionFailed, where elements of one are masked: numpy would give what lies behind the mask."""
    for name, value in outputs.items():
        if type(value) is not np.ndarray and isinstance(value, np.ma.MaskedArray) and value.mask.any():
            raise ExecutionFailed(f"output {name!r}: elements are masked, expected values in their place, as by `.filled(0)`")
    return outputs


@contextmanager
def parts_of(result: Any) -> Iterator[Iterator[Any]]:
    """What a function that yields gave, closed in the end. Raises: OutputsRefused, if that is no iterator."""
    if not isinstance(result, Iterator):
        if inspect.isasyncgen(result) or inspect.iscoroutine(result):
            refuse_nothing(result)
        kind = type(result).__name__
        raise OutputsRefused(f"predict returned {kind}: expected an iterator, as it yields or has the return type Iterator[…]")
    try:
        yield result
    finally:
        close = getattr(result, "close", None)  # a generator has it
        if close is not None:
            close()


def refuse_nothing(result: Any, did: str = "returned") -> None:
    """Raises: OutputsRefused, if a function gave None, what nobody awaits, or parts where none were announced."""
    if result is None:
        raise OutputsRefused(f"predict {did} None: end it with `return` and its outputs" if did == "returned" else _NO_PART)
    if inspect.iscoroutine(result):
        result.close()
        raise OutputsRefused(f"predict {did} a coroutine: write a plain function (`def`), which awaits nothing")
    if inspect.isasyncgen(result):
        raise OutputsRefused(f"predict {did} an async generator: write a plain one, `def` with `yield`, which awaits nothing")
    if isinstance(result, Iterator):
        raise OutputsRefused(
            f"predict {did} an iterator ({type(result).__name__}): to answer in parts, write `yield` in predict itself, or "
            "give it the return type Iterator[…]"
        )
