"""A function of the user's: how it is called, and its outputs as arrays. What its type hints say: `backends.type_hints`."""

import inspect
import reprlib
import sys
from collections import UserString
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Final, Literal

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
)
from backends.datatypes import NUMPY, as_array, as_objects, datatype_of, fields_of, integer_shown, remedy
from backends.source import place_of, takes

_GOES_INTO: Final = {"b": "b", "i": "bui", "u": "bui"}  # by numpy's kinds; into floats, all numbers do, V being bfloat16
_NUMBERS: Final = frozenset("iufV")
_TAKES: Final = {float: "iufV", int: "iu", bool: "b"}  # the kinds of inputs whose every value one of Python's can be
ROW: Final = (-1,)
ANY_OUTPUT: Final = ""  # in place of a name: every output, whatever it is called
_TEXT_BYTES: Final = 64 << 20  # that numpy's text may take in any case
_TEXT_EXPANSION: Final = 16  # times its characters: 4 for the text itself
_ONE_VALUE: Final = (str, UserString, bytes, bytearray, memoryview, Mapping)  # although it has a length and elements
_NO_PART: Final = "predict yielded None: yield the outputs of a part, and `return` after the last"
_UNCHANGING: Final = frozenset((bool, int, float, str, bytes))
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


def widened(kind: str, hint: Hint | None) -> str | None:
    """The datatype of a list, where its type says more than the kind of array that numpy makes of it; None: it does not."""
    scalar = hint.scalar if hint is not None else None
    if scalar is float and kind in "bui":
        return "FP64"
    return "INT64" if scalar is int and kind == "b" else None


def single_value(hint: Hint, tensor: TensorSpec, key: str) -> TensorSpec:
    """What the type of one row's value says of a declared tensor, in its own words where they go together.

    A number of Python's has no width of its own, and one of numpy's may be wider than the input. key: `inputs` or `outputs`.
    """
    assert hint.datatype is not None  # as there is a scalar
    fits = goes_with(hint.scalar or object, hint.datatype, tensor.datatype, key)
    one_a_row = key == "inputs" and tensor.shape and all(size in (1, -1) for size in tensor.shape[1:])
    return replace(tensor, datatype=tensor.datatype if fits else hint.datatype, shape=tensor.shape if one_a_row else ROW)


def goes_with(scalar: type, own: str, datatype: str, key: str) -> bool:
    """Whether a type of one row's value takes each of a tensor's, or the tensor each of its. own: the datatype it is like."""
    kind, of_own = NUMPY[datatype].kind, NUMPY[own].kind
    if key == "outputs":
        return of_own in _kinds_into(kind)
    as_wide = {kind, of_own} <= _NUMBERS and np.can_cast(NUMPY[datatype], NUMPY[own])
    return datatype == own or as_wide or kind in _TAKES.get(scalar, "")


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
    of_lists: what the return type says of outputs such as lists, maybe empty or of whole numbers; None as a shape: any. What
    it says of ANY_OUTPUT is of those that it does not name.
    in_sequence: the return type is `Sequence[float]` or its like, so that a tuple is one output, as a list is.
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
    in_sequence: bool = False
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


def refuse_uncallable(signature: Signature, predict: Callable[..., Any], *, of_class: bool) -> None:
    """Raises: LoadFailed, if what is to get a dict cannot be called with one. predict: bound, where it is a method."""
    if signature.style == "dict" and not takes(predict, 1) and not takes(predict, 2):
        this = "self, " if of_class else ""
        raise LoadFailed(
            f"predict cannot be called, expected predict({this}inputs) or predict({this}inputs, parameters) "
            f"({place_of(predict)})"
        )


def call_by_name(
    function: Callable[..., Any], signature: Signature, inputs: Tensors, outputs: Mapping[str, TensorSpec] | None
) -> Tensors:
    """Call a function of style `names` or `rows`. outputs: those it should give, in order; None: not known yet.

    Raises: ExecutionFailed, if it gives more or fewer; what the function raises.
    """
    if signature.style == "names":
        return _of_batch(_named(function(**_given(signature, inputs)), signature, outputs), signature, outputs)
    columns = {name: _values(name, array, signature.inputs.get(name)) for name, array in inputs.items()}
    rows = len(next(iter(columns.values())))
    answers = []
    for row in range(rows):
        answer = _named(function(**{name: column[row] for name, column in columns.items()}), signature, outputs)
        if rows > 1:
            answer = {name: _as_now(name, value, signature, outputs) for name, value in answer.items()}
        answers.append(answer)
    return _gathered(answers, signature, outputs)


def stream_by_name(
    function: Callable[..., Any], signature: Signature, inputs: Tensors, outputs: Mapping[str, TensorSpec] | None
) -> Generator[Tensors, None, None]:
    """Call a function of style `names` or `rows` that yields the parts of an answer. outputs, errors: as `call_by_name`."""
    if signature.style == "names":
        with parts_of(function(**_given(signature, inputs))) as results:
            for result in results:
                yield _of_batch(_named(result, signature, outputs, "yielded"), signature, outputs)
        return
    columns = {name: _values(name, array, signature.inputs.get(name)) for name, array in inputs.items()}
    rows = len(next(iter(columns.values())))
    if rows != 1:
        raise ExecutionFailed(f"a function of one row's values that yields answers requests of one row, got {rows}")
    with parts_of(function(**{name: column[0] for name, column in columns.items()})) as results:
        for result in results:
            yield _gathered([_named(result, signature, outputs, "yielded")], signature, outputs)


def _as_now(name: str, value: Any, signature: Signature, outputs: Mapping[str, TensorSpec] | None) -> Any:
    """What is gathered of one row's value: an array of its own, or what cannot change while the next rows run.

    What numpy makes of a value it makes as of one row alone, errors too; a user's object cannot be copied otherwise.
    """
    kind = type(value)
    if kind in _UNCHANGING or (issubclass(kind, np.generic) and not issubclass(kind, np.void)):  # that is a view
        return value
    if kind is np.ndarray and (not value.dtype.hasobject or _UNCHANGING.issuperset(map(type, value.flat))):
        return value.copy()
    if outputs is None:
        return _seen(signature, name, [value])[0]
    if name not in outputs:
        return value  # it is refused
    declared = outputs[name]
    if NUMPY[declared.datatype].hasobject:
        of_texts = kind is list and _UNCHANGING.issuperset(map(type, value))
        return [*value] if of_texts else _texts(declared, [value])[0]
    array = _array(name, value if kind is list else [value])  # of its own, as numpy copies what is in a list
    if array.dtype.kind not in _kinds_into(NUMPY[declared.datatype].kind):
        return _column(declared, [value])[0]
    return array if kind is list else array[0]


def _of_batch(results: dict[str, Any], signature: Signature, outputs: Mapping[str, TensorSpec] | None) -> Tensors:
    """An array is what it says; a list, as one output of all rows is."""
    declared = outputs or {}
    made: Tensors = {}
    for name, value in results.items():
        if hasattr(value, "__array__"):
            made[name] = _array(name, value)
        else:
            made[name] = _column(declared[name], value) if name in declared else _seen(signature, name, value)
    return made


def _seen(signature: Signature, name: str, values: Any) -> np.ndarray:
    """A list of which nothing is declared. Raises: as `_array`; OutputsRefused, for a bytearray where its type says texts."""
    array, hint = _array(name, values), signature.of_lists.get(name) or signature.of_lists.get(ANY_OUTPUT)
    if hint is not None and hint.datatype == "BYTES" and array.dtype == np.uint8:  # as numpy takes a bytearray
        for value in _leaves(values):
            if isinstance(value, bytearray | memoryview):
                raise _odd(TensorSpec(name, "BYTES", ()), value)
    return array


def _gathered(answers: list[dict[str, Any]], signature: Signature, outputs: Mapping[str, TensorSpec] | None) -> Tensors:
    """The outputs of all rows of what the function gave for each."""
    other = next((answer for answer in answers if answer.keys() != answers[0].keys()), None)
    if other is not None:
        raise ExecutionFailed(f"the function gave {[*answers[0]]} for one row, {[*other]} for another")
    gathered: dict[str, Any] = {name: [answer[name] for answer in answers] for name in (answers[0] if answers else ())}
    try:
        if outputs is None:
            return {name: _seen(signature, name, column) for name, column in gathered.items()}
        return {name: _column(outputs[name], column) if name in outputs else column for name, column in gathered.items()}
    except ValueError as exc:
        if any(len({np.shape(value) for value in column}) > 1 for column in gathered.values()):
            raise ExecutionFailed("the function gave other sizes for one row than for another: send one row a request") from exc
        raise


def _column(declared: TensorSpec, values: Any) -> np.ndarray:
    """One output of all rows. A number of Python's has no width of its own: it takes the one that is declared.

    values: a list, maybe of lists or arrays; or one value, of an output without dimensions.
    Raises: OutputsRefused, for a value of another type; ExecutionFailed, for one that does not fit.
    """
    dtype = NUMPY[declared.datatype]
    if dtype.hasobject:
        return _texts(declared, values)
    array, kinds = _array(declared.name, values), _kinds_into(dtype.kind)
    if array.dtype == dtype:
        return array
    if array.size and array.dtype.kind not in kinds:
        for value in _leaves(values):
            if (dtype.kind == "b" or not isinstance(value, int)) and as_array(value).dtype.kind not in kinds:
                raise _odd(declared, value)
        array = np.asarray(values, object)  # of integers that numpy has no type for
    if dtype.kind in "iu":
        return integers_as_declared(declared, array)
    if dtype.kind == "b":
        return array
    try:
        floats = array.astype(np.float64)
    except OverflowError:
        raise ExecutionFailed(
            f"output {declared.name!r}: the function gave an integer too large for {declared.datatype}"
        ) from None
    return floats if dtype == np.float64 else as_declared(declared, floats)


def _texts(declared: TensorSpec, values: Any) -> np.ndarray:
    """One output of texts, as `_column`."""
    texts = _array(declared.name, values, as_objects)
    kinds = set(map(type, texts.ravel().tolist()))
    if any(issubclass(kind, np.ndarray) or _is_list(kind) for kind in kinds):
        raise ValueError(f"output {declared.name!r}: lists of other lengths make no array")  # as numpy raises it of numbers
    if not (kinds and all(issubclass(kind, bytes | str) for kind in kinds)):
        for value in _leaves(values):  # of a bytearray, numpy makes an array of its bytes, maybe of none
            if not isinstance(value, bytes | str) and not hasattr(value, "__array__"):
                raise _odd(declared, value)
    return texts


def _leaves(values: Any) -> Iterator[Any]:
    """What is in lists, or not in one."""
    if not _is_list(type(values)):
        yield values
        return
    for value in values:
        yield from _leaves(value)


def _is_list(kind: type) -> bool:
    """Whether numpy takes the elements of it, as of a list or a deque."""
    if kind is list:
        return True
    has_elements = hasattr(kind, "__len__") and hasattr(kind, "__getitem__") and not hasattr(kind, "__array__")
    return has_elements and not issubclass(kind, _ONE_VALUE)


def _odd(declared: TensorSpec, value: Any) -> OutputsRefused:
    """What is said of a value of another type than declared, and what to do where that is clear."""
    shown = integer_shown(value) if isinstance(value, int) else reprlib.repr(value)
    given = f"{shown} ({type(value).__name__})"
    dtype = NUMPY[declared.datatype]
    if dtype.hasobject:
        if isinstance(value, bytearray | memoryview):
            given = f"a {type(value).__name__}: return it as bytes(…)"
    elif as_array(value).dtype.kind == "c":
        given += ": return `.real` and `.imag` as two outputs"
    elif dtype.kind == "b" and isinstance(value, int | np.integer):
        given += ": return bool(…), or declare INT64"
    elif dtype.kind == "b" and isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        given += f': return it with .astype("bool"), or declare {datatype_of(value)}'
    return OutputsRefused(f"output {declared.name!r}: expected {declared.datatype}, the function gave {given}")


def _array(name: str, value: Any, made: Callable[[Any], np.ndarray] = as_array) -> np.ndarray:
    """What numpy makes of an output. Raises: ExecutionFailed, if elements are masked; OutputsRefused; what numpy raises."""
    if type(value) is np.ndarray:
        _refuse_bytes(name, value)
        return made(value)
    try:
        array = made(value)
    except Exception:
        if _masked((value,), sys.maxsize):
            raise _of_mask(name) from None
        for each in _leaves(value):
            if hasattr(each, "requires_grad"):
                _refuse_tensor(name, each)
        raise
    if array.dtype.hasobject:
        for each in _arrays((value,), array.ndim, np.ndarray):
            _refuse_bytes(name, each)
    if "numpy.ma" in sys.modules:
        # In the innermost lists, numpy makes NaN of what is masked. Who looks there for it alone spares all other numbers.
        innermost = array.dtype.hasobject or (array.dtype.kind == "f" and np.count_nonzero(np.isnan(array)) > 0)
        if _masked((value,), array.ndim if innermost else array.ndim - 1):
            raise _of_mask(name)
    return array


def _masked(values: Iterable[Any], levels: int) -> bool:
    """Whether elements of an array are masked, by which numpy gives what lies behind. levels: as of `_arrays`."""
    return any(each.mask.any() for each in _arrays(values, levels, np.ma.MaskedArray))


def _arrays(values: Iterable[Any], levels: int, of: type[np.ndarray]) -> Iterator[Any]:
    """The arrays of a kind that are among values. levels: of lists that are looked into."""
    kinds = set(map(type, values))
    if arrays := {kind for kind in kinds if issubclass(kind, of)}:
        yield from (each for each in values if type(each) in arrays)
    if lists := {kind for kind in kinds if _is_list(kind)} if levels > 0 else ():
        for each in values:
            if type(each) in lists:
                yield from _arrays(each, levels - 1, of)


def _refuse_bytes(name: str, array: np.ndarray) -> None:
    """Raises: OutputsRefused, of an array of numpy's own bytes."""
    if array.dtype.kind == "S":
        raise OutputsRefused(f"output {name!r}: the model gave {array.dtype}: {remedy(array, NUMPY['BYTES'])}")


def _of_mask(name: str) -> ExecutionFailed:
    return ExecutionFailed(f"output {name!r}: elements are masked, expected values in their place, as by `.filled(0)`")


def _refuse_tensor(name: str, tensor: Any) -> None:
    """Raises: OutputsRefused, if it is one of PyTorch's that gives no array."""
    from backends.no_array import no_array  # what few gateways need

    try:
        np.asarray(tensor)
    except (RuntimeError, TypeError) as exc:
        raise OutputsRefused(f"output {name!r}: {no_array(tensor)}") from exc


def _given(signature: Signature, inputs: Tensors) -> Tensors:
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


def _named(
    result: Any, signature: Signature, outputs: Mapping[str, TensorSpec] | None, did: str = "returned"
) -> dict[str, Any]:
    refuse_nothing(result, did)
    fields = fields_of(result)
    if fields and (outputs is None or not outputs.keys().isdisjoint(fields)):
        result = dict(zip(fields, result, strict=True))
    if isinstance(result, Mapping):
        return {str(name): value for name, value in result.items()}
    one = signature.in_sequence and (outputs is None or len(outputs) == 1)
    parts = result if isinstance(result, tuple) and not one else (result,)
    if outputs is not None and len(parts) != len(outputs):
        raise ExecutionFailed(f"the function gave {len(parts)} outputs, {len(outputs)} are declared: {', '.join(outputs)}")
    unnamed = ["output"] if len(parts) == 1 else [f"output_{index}" for index in range(len(parts))]
    names = unnamed if outputs is None or outputs.keys() == set(unnamed) else list(outputs)
    return dict(zip(names, parts, strict=True))


def refuse_lost(outputs: dict[str, Any]) -> dict[str, Any]:
    """The outputs. Raises: OutputsRefused, where one has lost zeros; ExecutionFailed, where elements are masked."""
    for name, value in outputs.items():
        if type(value) is np.ndarray:
            _refuse_bytes(name, value)
        elif _masked((value,), 0):
            raise _of_mask(name)
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
