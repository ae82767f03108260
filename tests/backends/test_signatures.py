"""What type hints say of tensors, and how a function of each form is called."""

import re
import threading
import typing
from array import array as buffer
from collections import UserList, deque, namedtuple
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from multiprocessing.sharedctypes import RawArray
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple, Required, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
import typing_extensions

from backends.base import ExecutionFailed, InputRefused, LoadFailed, OutputsRefused, TensorSpec
from backends.datatypes import NUMPY, as_array
from backends.signatures import ANY_OUTPUT, Hint, Signature, call_by_name, stream_by_name
from backends.type_hints import signature_of

HINTS: list[tuple[Any, TensorSpec | None]] = [
    (Annotated[npt.NDArray[np.float32], (-1, 4)], TensorSpec("x", "FP32", (-1, 4))),
    (Annotated[np.ndarray, "BYTES", (-1, 1)], TensorSpec("x", "BYTES", (-1, 1))),
    (Annotated[np.ndarray, "a comment", "BF16", (3,)], TensorSpec("x", "BF16", (3,))),
    (np.ndarray[tuple[int, Literal[4]], np.dtype[np.int8]], TensorSpec("x", "INT8", (-1, 4))),
    (np.ndarray[tuple[int, int, int], np.dtype[np.bool_]], TensorSpec("x", "BOOL", (-1, -1, -1))),
    (Annotated[npt.NDArray[np.str_], (-1,)], TensorSpec("x", "BYTES", (-1,))),
    (float, TensorSpec("x", "FP64", (-1,))),
    (int, TensorSpec("x", "INT64", (-1,))),
    (bool, TensorSpec("x", "BOOL", (-1,))),
    (str, TensorSpec("x", "BYTES", (-1,))),
    (np.float32, TensorSpec("x", "FP32", (-1,))),
    (Annotated[float, "FP32"], TensorSpec("x", "FP32", (-1,))),
    (npt.NDArray[np.float32], None),  # no shape
    (np.ndarray, None),
    (Annotated[npt.NDArray[np.complex64], (-1,)], None),
    (dict[str, np.ndarray], None),
    (float | None, None),
    (Any, None),
    (None, None),
]


@pytest.mark.parametrize(("hint", "spec"), HINTS, ids=lambda value: str(value)[:60])
def test_a_hint_says_datatype_and_shape(hint: Any, spec: TensorSpec | None) -> None:
    found = hinted(x=hint).inputs.get("x")
    assert (found.spec("x") if found is not None else None) == spec


def hinted(**hints: Any) -> Signature:
    def predict(x): ...  # type: ignore[no-untyped-def]

    predict.__annotations__ = {"return" if name == "returned" else name: hint for name, hint in hints.items()}
    return signature_of(predict, method=False)


ALIAS_TYPES = {typing_extensions.TypeAliasType, getattr(typing, "TypeAliasType", typing_extensions.TypeAliasType)}


@pytest.mark.parametrize("alias", ALIAS_TYPES, ids=lambda alias: alias.__module__)
def test_an_alias_of_a_type_says_what_the_type_says(alias: Any) -> None:
    T = TypeVar("T")
    U = TypeVar("U")
    Array = alias("Array", np.ndarray[tuple[Any, ...], np.dtype[T]], type_params=(T,))  # as numpy 2.5 has NDArray
    Rows = alias("Rows", Annotated[Array[np.float32], (-1, 4)])
    for hint in (Rows, Annotated[Array[np.float32], (-1, 4)], Annotated[Annotated[Array[np.int8], "FP32"], (-1, 4)]):
        assert hinted(x=hint).input_specs() == (TensorSpec("x", "FP32", (-1, 4)),)
    Four, Single = alias("Four", Literal[4]), alias("Single", np.float32)
    sized = hinted(x=np.ndarray[alias("Shape", tuple[int, Four]), np.dtype[Single]])
    assert sized.input_specs() == (TensorSpec("x", "FP32", (-1, 4)),)
    Row, Pair = alias("Row", Single), alias("Pair", tuple[T, U], type_params=(U, T))
    by_row = hinted(x=Row, returned=alias("Parts", Iterator[Pair[Row, str]]))
    assert (by_row.style, by_row.in_parts, by_row.input_specs()) == ("rows", True, (TensorSpec("x", "FP32", (-1,)),))
    assert [spec.datatype for spec in by_row.output_specs() or ()] == ["BYTES", "FP32"]
    Lists = alias("Lists", list[Row])

    class Answer(TypedDict, total=False):
        a: Required[Row]
        b: Lists

    by_key = hinted(x=Row, returned=alias("Alias", Answer))
    assert (by_key.keys, by_key.of_lists["b"].shape) == ({"a": True, "b": False}, (-1, -1))
    assert hinted(x=alias("Inputs", dict[str, Rows])).style == "dict"
    assert hinted(x=Rows, returned=alias("Values", Sequence[Row])).in_sequence
    assert not hinted(x=alias("Anything", Any)).untold
    assert hinted(x=Rows, returned=alias("Maybe", float | None)).outputs is None


class TypeAliasType:
    """As the statement `type` makes it: what it stands for is evaluated when it is asked for."""

    def __init__(self, value: Callable[[], Any]) -> None:
        self._value = value

    @property
    def __value__(self) -> Any:
        return self._value()


def test_an_alias_within_itself_says_no_tensor() -> None:
    tree: Any = TypeAliasType(lambda: list[tree])
    signature = hinted(x=float, returned=tree)
    assert (signature.outputs, signature.of_lists) == (None, {})


def test_an_alias_that_cannot_be_evaluated_is_named() -> None:
    row = TypeAliasType(lambda: nothing_of_this_name)  # type: ignore[name-defined]  # noqa: F821
    assert hinted(x=row).untold == "its type hints cannot be read (NameError: name 'nothing_of_this_name' is not defined)"


@pytest.mark.parametrize(
    ("scalar", "datatype", "fitting"),
    [
        (int, "FP32", "one of UINT8, UINT16, UINT32, UINT64, INT8, INT16, INT32, INT64$"),
        (bool, "INT64", "one of BOOL$"),
        (str, "INT64", "one of BYTES$"),
        (float, "BYTES", "one of UINT8, .*, FP16, BF16, FP32, FP64$"),
        (np.float32, "FP64", "one of UINT8, UINT16, INT8, INT16, FP16, BF16, FP32$"),
        (np.float16, "BF16", "one of UINT8, INT8, FP16$"),
        (np.float32, "BOOL", "one of UINT8, "),
    ],
)
def test_a_datatype_whose_values_a_single_value_cannot_be_is_refused(scalar: Any, datatype: str, fitting: str) -> None:
    with pytest.raises(LoadFailed, match=f"datatype '{datatype}' in a type hint of {scalar.__name__}: expected {fitting}"):
        hinted(x=Annotated[scalar, datatype])


@pytest.mark.parametrize(
    ("scalar", "datatypes"),
    [
        (np.float16, "UINT8 INT8"),
        (np.float32, "UINT8 UINT16 INT8 INT16 FP16 BF16"),
        (np.float64, "UINT32 INT32 BF16 FP32"),
        (np.int32, "UINT16 INT8"),
    ],
)
def test_a_type_of_numpys_takes_each_datatype_whose_values_it_holds(scalar: Any, datatypes: str) -> None:
    for datatype in datatypes.split():
        given: list[Any] = []
        largest = np.iinfo(datatype.lower()).max if "INT" in datatype else 1.5

        def predict(x: Any) -> int:
            given.append(x)  # noqa: B023  # run at once
            return 0

        predict.__annotations__["x"] = Annotated[scalar, datatype]
        signature = signature_of(predict, method=False)
        assert signature.input_specs() == (TensorSpec("x", datatype, (-1,)),)
        call_by_name(predict, signature, {"x": np.array([largest], NUMPY[datatype])}, None)
        assert given == [largest]
        assert type(given[0]) is scalar


def test_a_single_value_goes_into_a_wider_datatype_of_an_output() -> None:
    for scalar, datatype in ((int, "FP32"), (bool, "INT8"), (np.float32, "FP64"), (float, "FP16"), (int, "INT8")):
        assert hinted(x=int, returned=Annotated[scalar, datatype]).output_specs() == (TensorSpec("output", datatype, (-1,)),)
    for scalar, datatype in ((float, "INT64"), (str, "INT64"), (int, "BOOL"), (float, "BYTES")):
        with pytest.raises(LoadFailed, match=f"datatype '{datatype}' in a type hint of {scalar.__name__}: expected one of"):
            hinted(x=int, returned=Annotated[scalar, datatype])
        for within in (list[Annotated[scalar, datatype]], dict[str, Annotated[scalar, datatype]]):  # type: ignore[valid-type]
            with pytest.raises(LoadFailed, match=f"datatype '{datatype}' in a type hint of {scalar.__name__}: expected one of"):
                hinted(x=int, returned=within)


def test_an_unknown_datatype_in_a_hint_is_named() -> None:
    with pytest.raises(LoadFailed, match="datatype 'FLOAT32' in a type hint: expected one of BOOL"):
        hinted(x=Annotated[np.ndarray, "FLOAT32", (1,)])


Rows = Annotated[npt.NDArray[np.float32], (-1, 2)]


class Both(TypedDict):
    total: Annotated[npt.NDArray[np.float32], (-1,)]
    twice: Rows


def by_array(x: Rows, y: Rows, scale: float = 2.0) -> tuple[Rows, Rows]:
    return x * np.float32(scale), y


def by_key(x: Rows) -> Both:
    return {"total": x.sum(1), "twice": x * 2}


class Fields(NamedTuple):
    mean: float
    spread: float


def by_field(a: float, b: float) -> Fields:
    return Fields(mean=(a + b) / 2, spread=a - b)


Untyped = namedtuple("Untyped", "mean spread")  # as a user may write it


def by_untyped_field(a: float, b: float) -> Untyped:
    return Untyped(mean=(a + b) / 2, spread=a - b)


def fields_in_parts(a: float, b: float) -> Iterator[Fields]:
    yield by_field(a, b)


def by_row(width: float, name: str) -> str:
    return f"{name}{width:g}"


def by_dict(inputs: Any) -> Any:
    return inputs


def by_dict_and_parameters(inputs, params):  # type: ignore[no-untyped-def]  # as a user may write it
    return inputs


def by_mapping(given: dict[str, np.ndarray], parameters: dict[str, Any]) -> Any:
    return given


def untyped(x, y):  # type: ignore[no-untyped-def]  # as a user may write it
    return x + y


def half_typed(x: Rows, y) -> Any:  # type: ignore[no-untyped-def]
    return x


def mixed(x: Rows, y: float) -> Any:
    return x


@pytest.mark.parametrize(
    ("function", "style", "inputs", "outputs"),
    [
        (by_array, "names", ("x", "y"), ("output_0", "output_1")),
        (by_key, "names", ("x",), ("total", "twice")),
        (by_field, "rows", ("a", "b"), ("mean", "spread")),
        (fields_in_parts, "rows", ("a", "b"), ("mean", "spread")),
        (by_untyped_field, "rows", ("a", "b"), None),
        (by_row, "rows", ("width", "name"), ("output",)),
        (by_dict, "dict", None, None),
        (by_dict_and_parameters, "dict", None, None),
        (by_mapping, "dict", None, None),
        (untyped, "names", None, None),
    ],
)
def test_a_function_is_called_as_its_parameters_say(function: Any, style: str, inputs: Any, outputs: Any) -> None:
    signature = signature_of(function, method=False)
    found = [specs and tuple(spec.name for spec in specs) for specs in (signature.input_specs(), signature.output_specs())]
    assert (signature.style, *found) == (style, inputs, outputs)


class Several(TypedDict):
    words: Required[list[str]]
    boxes: Sequence[tuple[float, float]]
    scores: list[npt.NDArray[np.float32]]
    nested: tuple[tuple[int, ...], ...]
    mixed: tuple[int, str]
    unsaid: list[Any]
    bare: list  # type: ignore[type-arg]  # as a user may write it


def several(text: str) -> Several:
    return {}  # type: ignore[typeddict-item]


def several_of_arrays(x: Rows) -> Several:
    return {}  # type: ignore[typeddict-item]


def of_any_number(x: float) -> tuple[float, ...]:
    return (x,)


def of_any_names(x: Rows) -> dict[str, list[float]]:
    return {}


def test_a_type_of_lists_says_what_an_empty_one_is_of() -> None:
    of_batch = {"words": ("BYTES", (-1,)), "boxes": ("FP64", (-1, -1)), "scores": ("FP32", None), "nested": ("INT64", (-1, -1))}
    of_rows = {name: (datatype, shape and (-1, *shape)) for name, (datatype, shape) in of_batch.items()}
    for function, said in ((several, of_rows), (several_of_arrays, of_batch)):
        empty = signature_of(function, method=False).of_lists
        assert {name: (hint.datatype, hint.shape) for name, hint in empty.items()} == said
    for of_any in (of_any_number, of_any_names):
        signature = signature_of(of_any, method=False)
        assert (signature.of_lists, signature.outputs) == ({ANY_OUTPUT: Hint("FP64", (-1,), float)}, None)


@pytest.mark.parametrize(
    ("hint", "outputs"),
    [
        (Sequence[float], 1),
        (Sequence[np.float32], 1),
        (Sequence[np.ndarray], 2),
        (Sequence[npt.NDArray[np.float32]], 2),
        (Sequence[list[float]], 2),
        (Sequence[Any], 2),
        (typing.Sequence, 2),
        (Sequence[float | str], 2),
        (Sequence, 2),
    ],
)
def test_a_tuple_is_one_output_as_a_sequence_of_single_values_alone(hint: Any, outputs: int) -> None:
    def predict(x: Rows) -> Any:
        return x[:, 0].tolist(), x[:, 1].tolist()

    predict.__annotations__["return"] = hint
    assert len(call_by_name(predict, signature_of(predict, method=False), {"x": X}, None)) == outputs


@pytest.mark.parametrize("hint", [dict[str, Annotated[np.ndarray, "RGB"]], list[Annotated[float, "USD"]]])
def test_other_text_about_what_is_in_a_list_or_a_dict_says_nothing(hint: Any) -> None:
    def predict(x: Rows) -> Any: ...

    predict.__annotations__["return"] = hint
    signature = signature_of(predict, method=False)
    assert (signature.of_lists, signature.outputs) == ({}, None)


def test_a_method_without_types_gets_a_dict() -> None:
    class Model:
        def predict(self, x):  # type: ignore[no-untyped-def]
            return x

    assert signature_of(Model.predict, method=True).style == "dict"


def of_lists(text: str, tags: list[str]) -> Any:
    return text


def test_types_that_contradict_each_other_are_named() -> None:
    with pytest.raises(LoadFailed, match=r"parameter tags \(list\[str\]\): no type that says what tensor it is, such as"):
        signature_of(of_lists, method=False)
    with pytest.raises(LoadFailed, match="parameter y: no type that says what tensor it is, such as `x: Annotated"):
        signature_of(half_typed, method=False)
    with pytest.raises(LoadFailed, match="parameters y take one row's value, x a batch's array"):
        signature_of(mixed, method=False)


def by_position_only(x: float, /) -> float:
    return x


def a_dict_by_position(inputs, /):  # type: ignore[no-untyped-def]
    return inputs


def test_a_parameter_without_a_name_to_call_it_by_is_refused() -> None:
    with pytest.raises(LoadFailed, match="parameter x is positional-only, but inputs go by name: leave the `/` out"):
        signature_of(by_position_only, method=False)
    assert signature_of(a_dict_by_position, method=False).style == "dict"


def test_annotations_that_cannot_be_evaluated_are_no_hints() -> None:
    def predict(x: "nothing.of_this_name") -> None:  # type: ignore[name-defined]  # noqa: F821
        ...

    assert signature_of(predict, method=False).style == "names"

    Fields = TypedDict("Fields", {"y": "nothing.of_this_name"})  # type: ignore[name-defined]  # noqa: F821, UP013
    signature = hinted(x=float, returned=Fields)
    assert (signature.outputs, signature.keys) == (None, {})


X = np.ones((3, 2), np.float32)


def specs(*outputs: TensorSpec) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in outputs}


def test_arrays_go_by_name_and_results_come_in_order() -> None:
    signature = signature_of(by_array, method=False)
    outputs = call_by_name(by_array, signature, {"y": X, "x": X}, None)
    assert {name: array.sum() for name, array in outputs.items()} == {"output_0": 12, "output_1": 6}
    declared = specs(TensorSpec("a", "FP32", (-1, 2)))
    with pytest.raises(ExecutionFailed, match="gave 2 outputs, 1 are declared: a"):
        call_by_name(by_array, signature, {"y": X, "x": X}, declared)


def test_whole_numbers_of_a_list_stay_whole_where_only_some_are_beyond_int64() -> None:
    assert as_array([(1 << 63) + 1, 5]).tolist() == [(1 << 63) + 1, 5]
    assert as_array([1e19, 5]).dtype == as_array([(1 << 63) + 1, 5.5]).dtype == np.float64


@pytest.mark.parametrize("given", [[b"a\0\0", b"\0"], ["a\0", "ü", b"\xff\0"], [["low", 7.5], [b"high", 1]]])
def test_texts_in_lists_stay_what_they_are(given: list[Any]) -> None:
    def whole(x: Rows) -> Any:
        return given

    def in_parts(x: Rows) -> Iterator[Any]:
        yield {"output": given}

    (part,) = stream_by_name(in_parts, signature_of(in_parts, method=False), {"x": X}, None)
    for outputs in (call_by_name(whole, signature_of(whole, method=False), {"x": X}, None), part):
        assert outputs["output"].tolist() == given


@pytest.mark.parametrize("declared", [None, "BYTES"])
@pytest.mark.parametrize("form", [np.asarray, lambda array: [array, array], lambda array: [array[0], np.asarray(array[0])]])
def test_an_array_of_numpys_bytes_is_refused_as_it_has_lost_zeros(form: Callable[..., Any], declared: str | None) -> None:
    def whole(x: Rows) -> Any:
        return {"y": form(np.array([b"a\0\0", b"b"]))}

    def in_parts(x: Rows) -> Iterator[Any]:
        yield whole(x)

    def by_row(a: float) -> Any:
        return whole(X)

    outputs = declared and specs(TensorSpec("y", declared, (-1,)))
    words = r"output 'y': the model gave \|S[13]: it has lost the zeros at the end of its elements: make it with dtype=object"
    with pytest.raises(OutputsRefused, match=words):
        call_by_name(whole, signature_of(whole, method=False), {"x": X}, outputs)
    with pytest.raises(OutputsRefused, match=words):
        next(stream_by_name(in_parts, signature_of(in_parts, method=False), {"x": X}, outputs))
    with pytest.raises(OutputsRefused, match=words):
        call_by_name(by_row, signature_of(by_row, method=False), {"a": np.array([1.0, 2])}, outputs)


@pytest.mark.parametrize("declared", [None, specs(TensorSpec("output", "BYTES", (-1,)))])
def test_a_text_in_an_array_without_dimensions_is_a_text(declared: Any) -> None:
    def whole(x: Rows) -> Any:
        return [np.char.upper("a"), np.array("b"), b"c"]

    def by_row(a: float) -> Any:
        return np.char.upper("a")

    assert call_by_name(whole, signature_of(whole, method=False), {"x": X}, declared)["output"].tolist() == ["A", "b", b"c"]
    rows = {"a": np.array([1.0, 2])}
    assert call_by_name(by_row, signature_of(by_row, method=False), rows, declared)["output"].tolist() == ["A", "A"]


@pytest.mark.parametrize("function", [by_field, by_untyped_field])
@pytest.mark.parametrize(
    ("declared", "given"),
    [
        (("spread", "mean"), {"spread": [2], "mean": [4]}),
        (("output_0", "output_1"), {"output_0": [4], "output_1": [2]}),
        (("middle", "width"), {"middle": [4], "width": [2]}),
        (("width", "mean"), {"mean": [4], "spread": [2]}),  # which is refused, as `width` is missing
        (None, {"mean": [4], "spread": [2]}),
    ],
)
def test_fields_of_a_named_tuple_go_by_name_where_they_are_declared(function: Any, declared: Any, given: Any) -> None:
    outputs = declared and specs(*(TensorSpec(name, "FP64", (-1,)) for name in declared))
    inputs = {"a": np.array([5.0]), "b": np.array([3.0])}
    found = call_by_name(function, signature_of(function, method=False), inputs, outputs)
    assert {name: np.asarray(array).tolist() for name, array in found.items()} == given


def test_a_function_of_one_row_is_called_for_each() -> None:
    signature = signature_of(by_row, method=False)
    inputs = {"width": np.array([1.5, 2.0]), "name": np.array([b"a", "ü".encode()], object)}
    declared = specs(TensorSpec("text", "BYTES", (-1,)))
    assert call_by_name(by_row, signature, inputs, declared)["text"].tolist() == ["a1.5", "ü2"]
    assert call_by_name(by_row, signature, inputs, None)["output"].dtype == object
    with pytest.raises(ExecutionFailed, match=r"expected one value a row, got shape \[1, 2\]"):
        call_by_name(by_row, signature, {"width": np.ones((1, 2)), "name": np.array([b"a"], object)}, declared)


class GivesItsOwn:
    """As a tensor of PyTorch's, whose array is its own memory."""

    def __init__(self) -> None:
        self.kept = np.zeros(2)

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return self.kept

    def __setitem__(self, index: int, value: float) -> None:
        self.kept[index] = value


class PointsAt:
    """As `numpy.lib.stride_tricks.DummyArray`: its memory goes with it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.__array_interface__ = array, array.__array_interface__

    def __setitem__(self, index: int, value: float) -> None:
        self.array[index] = value


class InItsWay(list[float]):
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array([*self]) / 2


class OfAModel(UserList[float]):
    def __init__(self, values: list[float]) -> None:
        super().__init__(values)
        self.model = threading.Lock()  # which cannot be copied


class Itself(np.ndarray):
    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def copy(self, order: Any = None) -> Any:
        return self


def test_a_record_of_an_array_that_is_filled_again_is_kept() -> None:
    table = np.zeros(1, [("a", np.float64)])

    def predict(row: int) -> Any:
        table["a"] = row
        return table[0]

    found = call_by_name(predict, signature_of(predict, method=False), {"row": np.arange(3)}, None)
    assert [list(map(float, each.item())) for each in found["output"]] == [[0], [1], [2]]


FILLED_AGAIN: list[Any] = [
    np.zeros(2), np.ma.masked_array([0.0, 0.0], mask=[False, False]), np.zeros(2).view(Itself), [0.0, 0.0], deque([0.0, 0.0]),
    InItsWay([0.0, 0.0]), OfAModel([0.0, 0.0]), buffer("f", [0.0, 0.0]), RawArray("d", 2), GivesItsOwn(), PointsAt(np.zeros(2)),
    bytearray(2), memoryview(np.zeros(2)),
]  # fmt: skip


@pytest.mark.parametrize("declared", [None, "FP64"])
@pytest.mark.parametrize("filled", FILLED_AGAIN, ids=lambda filled: type(filled).__name__)
def test_each_row_keeps_its_values_while_a_function_fills_one_object_again(filled: Any, declared: str | None) -> None:
    forms: dict[str, Callable[[], Any]] = {
        "y": lambda: filled,
        "in_list": lambda: [filled],
        "in_tuple": lambda: (filled, filled),
        "in_fields": lambda: namedtuple("Pair", "first second")(filled, filled),
    }

    def predict(row: int) -> Any:
        filled[0] = filled[1] = row
        return {name: form() for name, form in forms.items()}

    outputs = declared and specs(*(TensorSpec(name, declared, (-1,)) for name in forms))
    rows = {"row": np.arange(1, 4)}
    signature = signature_of(predict, method=False)
    found = call_by_name(predict, signature, rows, outputs)
    alone = [call_by_name(predict, signature, {"row": rows["row"][[row]]}, outputs) for row in range(3)]
    for name, array in found.items():
        expected = np.concatenate([each[name] for each in alone])
        assert (array.tolist(), array.dtype) == (expected.tolist(), expected.dtype)
        assert len({str(row) for row in array}) == 3


@pytest.mark.parametrize("declared", [None, "FP64"])
def test_memory_that_goes_with_an_answer_is_read_before(declared: str | None) -> None:
    def predict(row: int) -> Any:
        return {"y": PointsAt(np.full(2, float(row)))}

    outputs = declared and specs(TensorSpec("y", declared, (-1, 2)))
    found = call_by_name(predict, signature_of(predict, method=False), {"row": np.arange(4)}, outputs)
    assert found["y"].tolist() == [[row, row] for row in range(4)]


def test_each_row_keeps_its_texts_in_an_array_that_is_filled_again() -> None:
    texts, inner = np.array(["", ""], object), np.array("?")
    texts[1] = inner

    def predict(row: int) -> Any:
        texts[0], inner[...] = "abc"[row], "def"[row]
        return texts

    declared = specs(TensorSpec("output", "BYTES", (-1, 2)))
    found = call_by_name(predict, signature_of(predict, method=False), {"row": np.arange(3)}, declared)
    assert found["output"].tolist() == [["a", "d"], ["b", "e"], ["c", "f"]]


Texts = Annotated[npt.NDArray[np.str_], (-1, 1)]


def upper(text: Texts) -> Texts:
    return np.char.upper(text)


def upper_in_parts(text: Texts) -> Iterator[Texts]:
    yield np.char.upper(text)


def test_a_function_of_numpys_text_gets_that() -> None:
    inputs = {"text": np.array([[b"a"], ["ü".encode()], ["c"]], object)}
    declared = specs(TensorSpec("output", "BYTES", (-1, 1)))
    whole = call_by_name(upper, signature_of(upper, method=False), inputs, declared)
    (part,) = stream_by_name(upper_in_parts, signature_of(upper_in_parts, method=False), inputs, declared)
    assert whole["output"].tolist() == part["output"].tolist() == [["A"], ["Ü"], ["C"]]


def first_character(text: str) -> str:
    return text[:1]


@pytest.mark.parametrize("function", [upper, first_character])
def test_what_is_no_utf_8_is_the_clients_fault(function: Callable[..., Any]) -> None:
    inputs = {"text": np.array([[b"a"], [b"\xff"]], object)}
    with pytest.raises(InputRefused, match=r"input 'text': element 1: invalid start byte, expected text in UTF-8"):
        call_by_name(function, signature_of(function, method=False), inputs, None)


def test_texts_that_would_all_take_the_room_of_a_long_one_are_refused() -> None:
    def arrays(longest: int) -> dict[str, np.ndarray]:
        return {"text": np.array([[b"a" * longest], *([b""] for _ in range(31))], object)}

    signature = signature_of(upper, method=False)
    assert call_by_name(upper, signature, arrays(1000), None)["output"].shape == (32, 1)
    with pytest.raises(InputRefused, match=r"its longest text has 8000000 characters; with all 32 as long, .* 976 MiB"):
        call_by_name(upper, signature, arrays(8_000_000), None)


def given_by_rows(values: list[Any], datatype: str) -> np.ndarray:
    def predict(row: int) -> tuple[Any, int]:
        return values[row], row

    declared = specs(TensorSpec("y", datatype, (-1,)), TensorSpec("z", "INT64", (-1,)))
    return call_by_name(predict, signature_of(predict, method=False), {"row": np.arange(len(values))}, declared)["y"]


def given_in_list(values: Any, datatype: str) -> np.ndarray:
    def predict(row: Annotated[npt.NDArray[np.int64], (-1,)]) -> Any:
        return values, row

    declared = specs(TensorSpec("y", datatype, (-1,)), TensorSpec("z", "INT64", (-1,)))
    return call_by_name(predict, signature_of(predict, method=False), {"row": np.arange(2)}, declared)["y"]


GIVEN = pytest.mark.parametrize("given", [given_by_rows, given_in_list])


@pytest.mark.parametrize(
    ("value", "datatype", "shown"),
    [
        (2.55, "INT64", "2.55 (float)"),
        (np.float32(2), "INT32", "np.float32(2.0) (float32)"),
        (None, "FP64", "None (NoneType)"),
        (None, "INT64", "None (NoneType)"),
        ("1.5", "FP32", "'1.5' (str)"),
        ("7", "INT64", "'7' (str)"),
        ("no", "BOOL", "'no' (str)"),
        (1, "BOOL", "1 (int): return bool(…), or declare INT64"),
        pytest.param(10**5000, "BOOL", "an integer of 16610 bits (int): return bool(…)", id="10**5000"),
        (np.array(1), "BOOL", 'array(1) (ndarray): return it with .astype("bool"), or declare INT64'),
        (1 + 2j, "FP64", "(1+2j) (complex): return `.real` and `.imag` as two outputs"),
        (Decimal("1.5"), "FP64", "Decimal('1.5') (Decimal)"),
    ],
)
@GIVEN
def test_a_value_of_another_type_than_declared_is_refused(given: Any, value: Any, datatype: str, shown: str) -> None:
    words = re.escape(f"output 'y': expected {datatype}, the function gave {shown}")
    with pytest.raises(OutputsRefused, match=words):
        given([True, value], datatype)


@GIVEN
def test_texts_of_both_types_are_refused_where_numbers_are_declared(given: Any) -> None:
    with pytest.raises(OutputsRefused, match=r"expected FP64, the function gave 'ä' \(str\)"):
        given([["ä"], ["ü".encode()]], "FP64")


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([bytearray(b"ab")], "a bytearray: return it as bytes(…)"),
        ([b"a", memoryview(b"")], "a memoryview: return it as bytes(…)"),
        ([bytearray()], "a bytearray: return it as bytes(…)"),
        (["a", None], "None (NoneType)"),
        ([1.5], "1.5 (float)"),
    ],
)
@GIVEN
def test_what_is_no_text_is_refused_where_bytes_is_declared(given: Any, values: list[Any], shown: str) -> None:
    with pytest.raises(OutputsRefused, match=re.escape(f"output 'y': expected BYTES, the function gave {shown}")):
        given(values, "BYTES")


@GIVEN
def test_a_bytearray_is_returned_as_bytes_where_bytes_is_declared_alone(given: Any) -> None:
    with pytest.raises(OutputsRefused, match=r"expected BOOL, the function gave bytearray\(b'a'\) \(bytearray\)$"):
        given([bytearray(b"a"), bytearray(b"b")], "BOOL")


def arrays_to_texts(row: Annotated[npt.NDArray[np.int64], (-1,)]) -> list[bytes]:
    return [bytearray(b"ab") for _ in row]  # type: ignore[misc]


def row_to_texts(row: int) -> list[bytes]:
    return [bytearray(b"ab")] * row  # type: ignore[list-item]


@pytest.mark.parametrize("function", [arrays_to_texts, row_to_texts])
def test_a_bytearray_where_the_type_says_bytes_is_no_row_of_numbers(function: Callable[..., Any]) -> None:
    with pytest.raises(OutputsRefused, match=r"'output': expected BYTES, the function gave a bytearray: return it as bytes"):
        call_by_name(function, signature_of(function, method=False), {"row": np.array([2])}, None)


@pytest.mark.parametrize(
    ("value", "datatype", "words"),
    [
        (300, "INT8", "gave 300, which INT8 cannot hold"),
        (np.int64(300), "INT8", "gave 300, which INT8 cannot hold"),
        (-1, "UINT64", "gave -1, which UINT64 cannot hold"),
        (1 << 63, "INT64", "gave 9223372036854775808, which INT64 cannot hold"),
        (1 << 70, "UINT64", "gave 1180591620717411303424, which UINT64 cannot hold"),
        (1e6, "FP16", "too large for FP16"),
        (1e300, "FP32", "too large for FP32"),
        (3.4e38, "BF16", "too large for BF16"),
        (np.array(3.4e38, np.float32), "BF16", "too large for BF16"),
        pytest.param(10**400, "FP64", "an integer too large for FP64", id="10**400"),
        pytest.param(10**400, "INT64", "gave an integer of 1329 bits, which INT64 cannot hold", id="10**400 in INT64"),
        pytest.param(10**5000, "INT64", "gave an integer of 16610 bits, which INT64 cannot hold", id="10**5000"),
    ],
)
@GIVEN
def test_a_number_that_does_not_fit_is_refused(given: Any, value: Any, datatype: str, words: str) -> None:
    with pytest.raises(ExecutionFailed, match=f"output 'y': .*{words}"):
        given([0, value], datatype)


@pytest.mark.parametrize(
    ("values", "datatype"),
    [
        ([7, True], "INT8"),
        ([(1 << 64) - 1, 1], "UINT64"),
        ([np.True_, False], "BOOL"),
        ([7, 0.5], "FP32"),
        ([True], "INT8"),
        ([False], "UINT64"),
        ([1 << 63, 1], "FP64"),
        ([1 << 70, 0.5], "FP64"),
        ([[1 << 64, 1]], "FP64"),
        ([True], "FP32"),
        ([np.float32(0.5), True], "FP16"),
        ([np.float64(0.5)], "BF16"),
        ([NUMPY["BF16"].type(0.5)], "FP32"),
        ([float("inf")], "FP16"),
        ([float("-inf"), 1.0], "BF16"),
        (deque([1 << 70, 1]), "FP64"),
    ],
)
@GIVEN
def test_a_number_goes_into_a_wider_kind(given: Any, values: list[Any], datatype: str) -> None:
    array = given(values, datatype)
    assert array.dtype == NUMPY[datatype]
    assert array.tolist() == [*values]


@pytest.mark.filterwarnings("ignore:.*converting a masked element to nan")
@GIVEN
def test_masked_elements_are_refused_as_in_a_request(given: Any) -> None:
    row, texts = (np.ma.masked_array(each, mask=[False, True]) for each in ([1, 2], np.array(["a", "b"], object)))
    for values in ([row[0], row[:1][0]], [[row[:1]]], [[1.0, float("nan")]]):
        np.testing.assert_array_equal(given(values, "FP64"), np.array(values))
    words = r"output 'y': elements are masked, expected values in their place, as by `.filled\(0\)`"
    in_lists: list[Any] = [[1.0, row[1]], [row[1:].reshape(())], [row[:1], row[1:]], [[[3, 4], row]], [[0.5, row[1]]]]
    for values in (*in_lists, [deque([row])], deque([row])):
        with pytest.raises(ExecutionFailed, match=words):
            given(values, "FP64")
    with pytest.raises(ExecutionFailed, match=words):
        given([texts], "BYTES")


class OfTorch(SimpleNamespace):
    """As a tensor of PyTorch's that numpy cannot read."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise TypeError("Got unsupported ScalarType BFloat16")


def test_a_tensor_that_numpy_cannot_read_is_told_with_what_makes_it_an_array() -> None:
    tensor = OfTorch(requires_grad=True, device="cpu", dtype="torch.bfloat16", layout="torch.strided", is_neg=lambda: True)
    words = re.escape("expected an array, the model gave OfTorch: return it as ….detach().resolve_neg().float().numpy()")
    for given, value in ((given_by_rows, [1.5, tensor]), (given_in_list, [[1.5, tensor]]), (given_in_list, tensor)):
        with pytest.raises(OutputsRefused, match=f"output 'y': {words}"):
            given(value, "FP64")


@pytest.mark.parametrize("values", [[["a", "b"], ["c"]], ["a", ["b"]], [np.array(["a", "b"]), np.array(["c"])]])
def test_texts_of_rows_of_other_sizes_are_refused_as_numbers_are(values: list[Any]) -> None:
    numbers = [[1] * np.size(row) if np.ndim(row) else 1 for row in values]
    for given, datatype in ((values, "BYTES"), (numbers, "FP64")):
        with pytest.raises(ExecutionFailed, match="other sizes for one row than for another: send one row a request"):
            given_by_rows(given, datatype)
    assert given_by_rows([["a", "b"], ["c", "d"]], "BYTES").tolist() == [["a", "b"], ["c", "d"]]


def test_a_number_of_pythons_takes_the_width_that_is_declared() -> None:
    def predict(x: float) -> float:
        return 1 if x > 1 else 0.5

    outputs = call_by_name(
        predict, signature_of(predict, method=False), {"x": np.array([0.0, 2.0])}, specs(TensorSpec("y", "FP32", (-1,)))
    )
    assert outputs["y"].dtype == np.float32
    assert outputs["y"].tolist() == [0.5, 1]


def test_whole_numbers_in_lists_take_the_floats_that_are_declared() -> None:
    def predict(x: Rows) -> Any:
        return [int(row.sum()) for row in x], x.astype(int)

    declared = specs(TensorSpec("a", "FP32", (-1,)), TensorSpec("b", "FP32", (-1, 2)))
    outputs = call_by_name(predict, signature_of(predict, method=False), {"x": X}, declared)
    assert [array.dtype.kind for array in outputs.values()] == ["f", "i"]  # an array is what it says
