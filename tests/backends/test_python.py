"""What the python backend does beyond the contract."""

import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Annotated, Any, NotRequired, TypedDict, cast

import numpy as np
import numpy.typing as npt
import pytest

import backends
import gateway
from backends import python_discovery
from backends.base import (
    DEADLINE_NS,
    TRACEPARENT,
    TRACESTATE,
    BackendError,
    ExecutionFailed,
    LoadFailed,
    ModelSpec,
    OutputsRefused,
    SessionLost,
    SpecMismatch,
    StreamingSession,
    Tensors,
    TensorSpec,
    checked_outputs,
    example_inputs,
    trace_of,
    words_of,
)
from backends.check import checked
from backends.datatypes import NUMPY, datatype_of
from backends.discovery import Found
from backends.mistakes import Wanted
from backends.source import load_object

UNSTATED = ModelSpec("", (), (), 8)
STATED = ModelSpec("", (TensorSpec("x", "FP32", (-1,)),), (TensorSpec("y", "FP32", (-1,)),), 8)


class Scaled:
    inputs = (("x", "FP32", (-1,)),)
    outputs = (("y", "FP32", (-1,)),)

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor
        self.loaded = False

    def load(self) -> None:
        self.loaded = True

    def predict(self, inputs: Tensors, parameters: dict[str, Any]) -> Tensors:
        assert self.loaded
        return {"y": inputs["x"] * np.float32(parameters.get("factor", self.factor))}


class Unstated:
    def predict(self, inputs: Tensors) -> Any:
        if inputs["x"][0] == 1:
            raise ValueError("no ones")
        if inputs["x"][0] == 2:
            raise MemoryError("no twos")
        if inputs["x"][0] == 3:
            return [inputs["x"]]
        return {"y": inputs["x"]}


class Unloadable:
    inputs = outputs = (("x", "FP32", (-1,)),)

    def load(self) -> None:
        raise OSError("no weights")

    def predict(self, inputs: Tensors) -> Tensors:
        return inputs


def load(name: str, spec: ModelSpec = UNSTATED, **options: Any) -> backends.Model:
    return backends.load("python", {"model": f"{__file__}:{name}", "class_options": options}, spec)


def x(*values: float) -> Tensors:
    return {"x": np.array(values, np.float32)}


def test_the_class_states_its_tensors_and_gets_options_and_parameters() -> None:
    model = load("Scaled", factor=3.0)
    assert [tensor.name for tensor in (*model.spec.inputs, *model.spec.outputs)] == ["x", "y"]
    session = model.open_session(0)
    assert session.run(x(1, 2), {})["y"].tolist() == [3, 6]
    assert session.run(x(1, 2), {"factor": 10})["y"].tolist() == [10, 20]


class Handing(Scaled):
    """Hands its parameters on by name, and keeps what it is told beside them."""

    told: tuple[object, ...] = ()

    def predict(self, inputs: Tensors, parameters: gateway.Parameters) -> Tensors:
        Handing.told = parameters.deadline_ns, parameters.traceparent, parameters.tracestate
        return self.generate(inputs, **parameters)

    def generate(self, inputs: Tensors, factor: float = 2.0) -> Tensors:
        return {"y": inputs["x"] * np.float32(factor)}


class HandingInParts(Handing):
    def predict(self, inputs: Tensors, parameters: gateway.Parameters) -> Iterator[Tensors]:  # type: ignore[override]
        yield super().predict(inputs, parameters)


@pytest.mark.parametrize("code", [Handing, HandingInParts])
@pytest.mark.parametrize(
    ("beside", "told"),
    [
        ({}, (None, None, None)),
        ({DEADLINE_NS: 7, TRACEPARENT: "00-a-b-01", TRACESTATE: "vendor=1"}, (7, "00-a-b-01", "vendor=1")),
    ],
)
def test_parameters_are_the_clients_and_what_the_gateway_knows_is_beside_them(
    code: type[Handing], beside: dict[str, object], told: tuple[object, ...]
) -> None:
    session = backends.load("python", {"model": f"{__name__}:{code.__name__}"}).open_session(0)
    given = {"factor": 3.0, **beside}
    if code is Handing:
        outputs = session.run(x(1), given)
    else:
        (outputs,) = cast(StreamingSession, session).stream(x(1), given)
    assert outputs["y"].tolist() == [3]
    assert Handing.told == told


class AsStatic(Scaled):
    @staticmethod
    def predict(inputs: Tensors, parameters: dict[str, Any]) -> Tensors:  # type: ignore[override]
        return {"y": inputs["x"]}


class ByAnyArguments(Scaled):
    def predict(self, *given: Any) -> Tensors:
        return {"y": given[0]["x"]}


class ByDefault(Scaled):
    def predict(self, inputs: Tensors, parameters: dict[str, Any] | None = None) -> Tensors:
        return {"y": inputs["x"]}


class ByName(Scaled):
    def predict(self, inputs: Tensors, parameters: Any = (), *, factor: float = 1.0) -> Tensors:
        return {"y": inputs["x"] * np.float32(dict(parameters).get("factor", factor))}


class WithAKeyword(Scaled):
    def predict(self, inputs: Tensors, *, factor: float = 1.0) -> Tensors:  # type: ignore[override]
        return {"y": inputs["x"]}


class WithAThreshold(Scaled):
    def predict(self, inputs: Tensors, threshold: float = 0.5) -> Tensors:  # type: ignore[override]
        return {"y": inputs["x"] * np.float32(threshold)}


class Deaf(Scaled):
    def predict(self, inputs: Tensors) -> Tensors:  # type: ignore[override]
        return {"y": inputs["x"]}


def plain(x: Annotated[npt.NDArray[np.float32], (-1,)]) -> Annotated[npt.NDArray[np.float32], (-1,)]:
    return x


def scaled(inputs, parameters):  # type: ignore[no-untyped-def]  # as a user may write it
    return {"y": inputs["x"] * np.float32(parameters["factor"])}


scaled.inputs, scaled.outputs = Scaled.inputs, Scaled.outputs  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("model", "reads", "own"),
    [
        (Scaled, True, ()),
        (AsStatic, True, ()),
        (ByAnyArguments, True, ()),
        (ByDefault, True, ()),
        (ByName, True, ()),
        (WithAKeyword, False, ("factor",)),
        (WithAThreshold, False, ("threshold",)),
        (Deaf, False, ()),
        (plain, False, ()),
        (scaled, True, ()),
    ],
)
def test_it_is_known_whether_parameters_reach_a_model(model: Any, reads: bool, own: tuple[str, ...]) -> None:
    loaded = backends.load("python", {"model": f"{__name__}:{model.__name__}"})
    assert (loaded.spec.reads_parameters, loaded.spec.own_arguments) == (reads, own)
    factor = 2 if model in (Scaled, ByName, scaled) else 0.5 if model is WithAThreshold else 1
    assert [y.tolist() for y in loaded.open_session(0).run(x(1), {"factor": 2}).values()] == [[factor]]


def test_each_session_is_an_instance_that_is_closed_once(tmp_path: Path) -> None:
    file, log = tmp_path / "model.py", tmp_path / "log"
    file.write_text(
        "class Model:\n    def predict(self, inputs): return {'y': inputs['x']}\n"
        f"    def close(self):\n        with open({str(log)!r}, 'a') as log: log.write('closed ')\n"
    )
    model = backends.load("python", {"model": f"{file}:Model"}, STATED)
    for session in (model.open_session(0), model.open_session(1)):
        session.close()
        session.close()
    assert log.read_text() == "closed closed "


class Hinted:
    def predict(self, x: Annotated[npt.NDArray[np.float32], (-1, 4)]) -> npt.NDArray[np.float32]:
        return x.sum(axis=1) * np.float64(0.5) + np.zeros(1)  # float64, as scikit-learn gives


def by_example(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return x.astype(np.float64)


@pytest.mark.parametrize(
    ("datatype", "shape", "says"),
    [("FP64", (-1, 4), r"the configuration says FP64 \[-1, 4\]"), ("FP32", (-1, 5), r"the code says FP32 \[-1, 4\]")],
)
def test_tensors_that_contradict_the_type_hints_fail_the_load(datatype: str, shape: tuple[int, ...], says: str) -> None:
    declared = ModelSpec("", (TensorSpec("x", datatype, shape),), (TensorSpec("output", "FP32", (-1,)),), 8)
    with pytest.raises(SpecMismatch, match=f"input 'x': .*{says}"):
        load("Hinted", declared)


def single(n: int, x: float, sure: bool, name: str, half: np.float16, wide: np.int32) -> tuple[float, int, bool, str]:
    return x, n, sure, name


SINGLE_IN = {"n": "INT32", "x": "FP32", "sure": "BOOL", "name": "BYTES", "half": "FP16", "wide": "UINT16"}
SINGLE_OUT = {"output_3": "BYTES", "output_0": "FP32", "output_1": "INT8", "output_2": "UINT8"}


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (TensorSpec("n", "FP64", (-1,)), "INT64 [-1]"),
        (TensorSpec("x", "BYTES", (-1,)), "FP64 [-1]"),
        (TensorSpec("x", "FP64", (-1, 3)), "FP64 [-1]"),
        (TensorSpec("sure", "BYTES", (-1,)), "BOOL [-1]"),
        (TensorSpec("name", "FP32", (-1,)), "BYTES [-1]"),
        (TensorSpec("half", "FP32", (-1,)), "FP16 [-1]"),
        (TensorSpec("half", "INT16", (-1,)), "FP16 [-1]"),
        (TensorSpec("wide", "UINT32", (-1,)), "INT32 [-1]"),
        (TensorSpec("output_0", "INT32", (-1,)), "FP64 [-1]"),
        (TensorSpec("output_0", "FP64", (-1, 3)), "FP64 [-1]"),
        (TensorSpec("output_1", "BOOL", (-1,)), "INT64 [-1]"),
        (TensorSpec("output_1", "BYTES", (-1,)), "INT64 [-1]"),
        (TensorSpec("output_3", "INT64", (-1,)), "BYTES [-1]"),
    ],
)
def test_tensors_that_contradict_the_type_of_a_single_value_fail_the_load(tensor: TensorSpec, says: str) -> None:
    inputs, outputs = (
        tuple(tensor if tensor.name == name else TensorSpec(name, datatype, (-1,)) for name, datatype in of.items())
        for of in (SINGLE_IN, SINGLE_OUT)
    )
    said = f"the code says {says}, the configuration says {tensor.datatype} {[*tensor.shape]}"
    with pytest.raises(SpecMismatch, match=f"put {tensor.name!r}: {re.escape(said)}$"):
        load("single", ModelSpec("", inputs, outputs, 8))


def test_single_values_take_the_width_and_numbered_outputs_the_order_that_are_declared() -> None:
    inputs = tuple(TensorSpec(name, datatype, (-1, 1)) for name, datatype in {**SINGLE_IN, "x": "INT32"}.items())
    outputs = tuple(TensorSpec(name, datatype, (-1,)) for name, datatype in SINGLE_OUT.items())
    spec = ModelSpec("", inputs, outputs, 8)
    given = load("single", spec).open_session(0).run(example_inputs(spec, 2) | {"x": np.full((2, 1), 5, np.int32)}, {})
    assert {name: array.tolist() for name, array in given.items()} == {
        "output_3": ["1", "1"],
        "output_0": [5, 5],
        "output_1": [1, 1],
        "output_2": [1, 1],
    }


class Answer(TypedDict):
    a: float
    b: float
    why: NotRequired[str]


def answer(x: float) -> Answer:
    return {"a": x, "b": x}


@pytest.mark.parametrize(
    ("outputs", "told"),
    [
        ("ab", ""),
        (("a", "b", "why"), ""),
        ("a", "its outputs are ['a'], but the keys of its return type are ['a', 'b', 'why']: name them alike"),
        ("abc", "its outputs are ['a', 'b', 'c'], but the keys of its return type are ['a', 'b', 'why']: name them alike"),
        ((), "'why' may be missing by the return type, but each answer has all outputs: leave out NotRequired or"),
    ],
)
def test_outputs_are_held_against_the_keys_of_the_return_type(outputs: Sequence[str], told: str) -> None:
    named = tuple(TensorSpec(name, "BYTES" if name == "why" else "FP64", (-1,)) for name in outputs)
    options = backends.defaults("python") | {"model": f"{__file__}:answer"}
    wanted = Wanted("python", options, here=True, thorough=True, inputs=(), outputs=named, max_rows=8)
    found = [mistake.found for mistake in checked(wanted)]
    if not told:
        assert load("answer", replace(UNSTATED, outputs=named)).spec.outputs == named
        assert found == []
        return
    with pytest.raises(LoadFailed, match=re.escape(f"{__file__}:answer: {told}")):
        load("answer", replace(UNSTATED, outputs=named))
    assert [mistake.startswith(told) for mistake in found] == [True]
    if not outputs:
        with pytest.raises(LoadFailed, match=re.escape(f"{__file__}:answer: {told}")):
            backends.read("python", f"{__file__}:answer")


def test_a_hint_without_a_shape_still_says_the_datatype() -> None:
    (output,) = backends.read("python", f"{__file__}:Hinted").outputs
    assert (output.datatype, output.shape) == ("FP32", (-1,))
    found = backends.read("python", f"{__file__}:by_example", example={"x": [[1, 2]]})
    assert [tensor.datatype for tensor in (*found.inputs, *found.outputs)] == ["FP32", "FP32"]


def test_outputs_of_requests_that_run_alone_have_as_many_rows_as_hinted_inputs() -> None:
    found = backends.read("python", f"{__file__}:running", example={"x": [1, 5, 2]})
    assert (found.max_rows, found.inputs[0].shape, found.outputs[0].shape) == (0, (-1,), (-1,))


def of_requests(name: str, **given: Any) -> Found:
    return backends.read("python", f"{__file__}:{name}", **given)


Scores = Annotated[npt.NDArray[np.float64], (-1,)]
Ranks = Annotated[npt.NDArray[np.int64], (-1,)]


def rank(score: Scores) -> Ranks:
    return np.argsort(np.argsort(-score))


def rank_of_unstated(score: Scores):  # type: ignore[no-untyped-def]
    return rank(score)


def rank_of_low(score: Scores) -> Ranks:
    if (score < 2).any():
        raise ValueError("too low")
    return rank(score)


def repeats(text: Annotated[np.ndarray, "BYTES", (-1,)]) -> Annotated[np.ndarray, "BOOL", (-1,)]:
    return np.array([each in text[:index] for index, each in enumerate(text)])


def one_of(score: Scores) -> Scores:
    return np.full(len(score), score.item())


def of_largest(score: Scores) -> Scores:
    return score / score.max()


def halvings(score: Scores) -> Ranks:
    return np.array([halvings_of(each) for each in score])


def halvings_or_none(score: Scores) -> Ranks:
    found = []
    for each in score:
        try:
            found.append(halvings_of(each))
        except BaseException:
            found.append(-1)
    return np.array(found)


def halvings_of(score: float) -> int:
    count = 0
    while score != 1:
        score, count = (score / 2, count + 1) if score > 1 else (score, count)
    return count


PARTS: dict[str, float] = {}


def loads_once(score: Scores) -> Scores:
    if not PARTS:
        PARTS["first"] = 1.0
        time.sleep(0.3)
        PARTS["last"] = 2.0
    return score * PARTS["last"]


def quits(score: Scores) -> Scores:
    sys.exit("no licence")


class Once:
    inputs = outputs = (("x", "FP32", (-1, 3)),)
    example = MappingProxyType({"x": ((1, 2, 3),)})

    def __init__(self) -> None:
        pytest.fail("made")

    def predict(self, inputs: Tensors) -> Tensors: ...


class Ranked:
    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def predict(self, score: Scores):  # type: ignore[no-untyped-def]
        assert score[0] == 1  # as of ones
        return rank(score)


UNTRIED = "its rows are taken to be independent, and not tried, as "
TELL = "; if they change each other's answers, set max_rows: 0"


@pytest.mark.parametrize("name", ["rank", "rank_of_unstated", "repeats", "of_largest"])
def test_rows_of_a_function_are_tried_on_drawn_ones(name: str) -> None:
    found = of_requests(name)
    assert (found.max_rows, found.inputs[0].shape[0], found.outputs[0].shape[0]) == (0, -1, -1)
    why, *of_int8 = found.notes
    assert why.startswith(f"the other rows of a batch change a row's answer in {found.outputs[0].name!r},")
    assert [note.partition(" where")[0] for note in of_int8] == ["an int8 model shows the same"] * (name == "of_largest")
    assert of_requests(name, try_rows=False).max_rows == 32


def test_rows_of_a_function_that_states_all_are_tried_on_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    for scores in ([3, 4, 7], [7]):  # of one row, too: a request may have several, which are ranked together
        found = of_requests("rank_of_low", example={"score": scores})
        assert (found.max_rows, found.inputs[0].shape, len(found.notes)) == (0, (-1,), 1)
    assert of_requests("one_of", example={"score": [7]}).max_rows == 1
    for scores in ([1], [[1], [2, 3]]):
        found = of_requests("rank_of_low", example={"score": scores})
        assert (found.max_rows, found.notes) == (32, (f"{UNTRIED}it fails on those of its example{TELL}",))
    code = load_object(f"{__file__}:rank_of_low")
    for other in ("text", {"text": [1]}, lambda: pytest.fail("called")):  # no example of what is stated
        monkeypatch.setattr(code, "example", other, raising=False)
        assert of_requests("rank_of_low").max_rows == 32
    monkeypatch.setattr(code, "example", {"score": [3, 4, 7]})
    assert of_requests("rank_of_low").max_rows == 0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("rank_of_low", "it fails on drawn ones"),
        ("quits", "it fails on drawn ones"),
        ("halvings", "it does not end on drawn ones in 0.02 s"),
        ("halvings_or_none", "it does not end on drawn ones in 0.02 s"),
    ],
)
def test_rows_of_a_function_that_fails_or_never_ends_on_drawn_ones_are_batched(
    name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "does not end" in why:
        monkeypatch.setattr(python_discovery, "_LIMIT_S", 0.02)
    found = of_requests(name)
    assert (found.max_rows, found.notes) == (32, (f"{UNTRIED}{why}{TELL}",))


def test_a_first_call_that_is_ended_leaves_nothing_half_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_discovery, "_LIMIT_S", 0.1)
    found = of_requests("loads_once")
    assert (found.max_rows, found.notes) == (32, (f"{UNTRIED}it does not end on drawn ones in 0.1 s{TELL}",))
    code = load_object(f"{__file__}:loads_once")
    assert code.__globals__["PARTS"] == {}
    assert code(np.ones(2)).tolist() == [2, 2]


def test_a_function_is_tried_by_the_main_thread_alone() -> None:
    with ThreadPoolExecutor() as threads:
        found = threads.submit(of_requests, "rank").result()
    assert (found.max_rows, found.notes) == (32, (f"{UNTRIED}that is done in the main thread only{TELL}",))


def test_a_class_is_not_made_to_try_its_rows() -> None:
    ranked = load_object(f"{__file__}:Ranked")
    for name, makes in (("Once", 0), ("Ranked", 1)):  # which does not say what it gives
        before = ranked.made
        found = of_requests(name)
        assert ranked.made - before == makes
        (note,) = found.notes
        told = "it is a class; if they change each other's answers, mark it with @gateway.model(max_rows=0)"
        assert (found.max_rows, note) == (32, UNTRIED + told)
        assert of_requests(name, try_rows=False).notes == ()


@pytest.mark.parametrize(
    ("name", "datatype"), [("summed", "FP64"), ("summed_array", "INT64"), ("summed_of_row", "FP64"), ("numbered", "INT64")]
)
def test_a_list_is_of_fractions_where_other_rows_than_the_examples_show_some(name: str, datatype: str) -> None:
    example = {name: np.array([2.0, 6, 10]) for name in ("x", "y")}
    found = backends.read("python", f"{__file__}:{name}", example=example)
    assert (found.max_rows, found.outputs[0].datatype) == (32, datatype)


def test_a_model_that_ends_the_program_on_other_sizes_is_read_with_those_of_its_example() -> None:
    found = backends.read("python", f"{__file__}:ends_on_others", example={"x": np.ones((1, 8))})
    assert (found.max_rows, found.outputs[0].shape) == (32, (-1, 8))
    with pytest.raises(LoadFailed, match=r"SystemExit: too long"):
        backends.read("python", f"{__file__}:ends_on_others", example={"x": np.ones((1, 9))})


def test_an_example_may_hold_texts_of_both_types() -> None:
    found = backends.read("python", f"{__file__}:found_in", example={"text": ["ä@b", "ü@c".encode()]})
    assert [tensor.datatype for tensor in (*found.inputs, *found.outputs)] == ["BYTES", "BYTES"]


def summed(x, y):  # type: ignore[no-untyped-def]
    return [int(value) if value % 1 == 0 else value for value in (x + y).tolist()]


def summed_array(x, y):  # type: ignore[no-untyped-def]
    return np.array(summed(x, y))


def numbered(x, y):  # type: ignore[no-untyped-def]
    return [(1 << 60) + int(value) if value % 1 == 0 else float("nan") for value in (x + y).tolist()]


def summed_of_row(x: float, y: float):  # type: ignore[no-untyped-def]
    return summed(np.array([x]), np.array([y]))[0]


def ends_on_others(x: Annotated[npt.NDArray[np.float32], (-1, -1)]):  # type: ignore[no-untyped-def]
    if x.shape[1] != 8:
        sys.exit("too long")
    return x * 2


def running(x: Annotated[npt.NDArray[np.float32], (-1,)]):  # type: ignore[no-untyped-def]  # as a user may write it
    return x.cumsum()


def found_in(text: str) -> list[str]:
    return [word for word in text.split() if "@" in word]


def boxes_of(count: int) -> list[tuple[int, int]]:
    return [(index, 2 * index) for index in range(2, count)]


def outliers(x: Annotated[npt.NDArray[np.float32], (-1,)]) -> list[str]:
    return [f"{value:g}" for value in x if value > 3]


def halves_of(x: float) -> list[float]:
    return [int(x / 2) if x % 2 == 0 else x / 2, int(x)]


def counted(text: str) -> dict[str, list[str]]:
    found = defaultdict[str, list[str]](list)
    found["words"] += text.split()
    return found


def named(x: float) -> dict[str, float]:
    return {"output": int(x) if x % 1 == 0 else x}


def shares_of(x: float) -> Mapping[str, list[float]]:
    return {"output": [1, 2] if x < 3 else [x / 2, 1]}


def sequence(x: float) -> Sequence[float]:
    return (1, 2) if x < 3 else [x / 2, 1]


def known(x: Annotated[npt.NDArray[np.float32], (-1,)]) -> list[int]:
    return [value > 2 and int(value) for value in x.tolist()]


def rounded(x: Annotated[npt.NDArray[np.float32], (-1,)]) -> list[list[float]]:
    return [[int(value) if value % 1 == 0 else float(value), 1] for value in x]


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        ("halves_of", 3, [[1.5, 3]]),
        ("halves_of", 4, [[2, 4]]),
        ("named", 1.5, [1.5]),
        ("named", 2, [2]),
        ("shares_of", 5, [[2.5, 1]]),
        ("sequence", 5, [[2.5, 1]]),
        ("sequence", 2, [[1, 2]]),
        ("rounded", 1.5, [[1.5, 1]]),
        ("rounded", 1, [[1, 1]]),
        ("known", 1, [0]),
        ("known", 5, [5]),
        ("found_in", b"a@b or c@d", [["a@b", "c@d"]]),
        ("found_in", b"none", [[]]),
        ("boxes_of", 4, [[[2, 4], [3, 6]]]),
        ("boxes_of", 1, [[]]),
        ("outliers", np.float32(5), ["5"]),
        ("outliers", np.float32(2), []),
    ],
)
def test_a_list_may_be_empty_or_of_whole_numbers_on_ones_and_in_any_answer(name: str, value: Any, answer: Any) -> None:
    found = backends.read("python", f"{__file__}:{name}")
    spec = ModelSpec("", found.inputs, found.outputs, found.max_rows)
    (tensor,), (output,) = spec.inputs, spec.outputs
    inputs = {tensor.name: np.array([value], NUMPY[tensor.datatype])}
    given = checked_outputs(spec, inputs, load(name, spec).open_session(0).run(inputs, {}))["output"]
    assert (given.tolist(), given.dtype, given.ndim) == (answer, NUMPY[output.datatype], len(output.shape))


class Asynchronous(Scaled):
    async def predict(self, inputs: Tensors) -> Tensors:  # type: ignore[override]
        return inputs


class Forgetful(Scaled):
    def predict(self, inputs: Tensors) -> Any:  # type: ignore[override]
        self.last = inputs


class Hidden(Scaled):
    def predict(self, inputs: Tensors) -> Any:  # type: ignore[override]
        return Asynchronous().predict(inputs)


def forgetful(x: Annotated[npt.NDArray[np.float32], (-1,)]) -> None: ...


def test_an_async_predict_is_refused_in_words() -> None:
    with pytest.raises(LoadFailed, match="Asynchronous: predict is async: write a plain function"):
        load("Asynchronous")
    with pytest.raises(LoadFailed, match="predict is async"):
        backends.read("python", f"{__file__}:Asynchronous")
    with pytest.raises(OutputsRefused, match="predict returned a coroutine: write a plain function"):
        load("Hidden").open_session(0).run(x(1), {})


def test_a_predict_that_returns_nothing_is_told_so() -> None:
    with pytest.raises(OutputsRefused, match="predict returned None"):
        load("Forgetful").open_session(0).run(x(1), {})
    with pytest.raises(LoadFailed, match="predict returned None"):
        backends.read("python", f"{__file__}:forgetful")
    declared = ModelSpec("", (), (TensorSpec("y", "FP32", (-1,)),), 8)
    with pytest.raises(OutputsRefused, match="predict returned None"):
        load("forgetful", declared).open_session(0).run(x(1), {})


def by_default(text: str = "an example") -> str:
    return text


def test_tensors_that_nobody_states_are_asked_for() -> None:
    with pytest.raises(LoadFailed, match="set `inputs` of the model"):
        load("Unstated")
    with pytest.raises(
        LoadFailed, match=r"say its inputs \(text has a default, so it is no input \(leave .*\)\): set `inputs`"
    ):
        load("by_default")


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (1, ExecutionFailed, "^ValueError: no ones$"),
        (2, SessionLost, "no twos"),
        (3, ExecutionFailed, "expected a dict of arrays by output name, got list"),
    ],
)
def test_what_the_class_raises_is_told_and_traced_to_its_line(value: float, error: type[BackendError], message: str) -> None:
    session = load("Unstated", STATED).open_session(0)
    with pytest.raises(error, match=message) as caught:
        session.run(x(value), {})
    assert ("in predict\n" in trace_of(caught.value)) == (value != 3)  # that one is no line's of the class
    assert session.run(x(0, 5), {})["y"].tolist() == [0, 5]


def test_a_class_that_cannot_load_fails_the_opening() -> None:
    with pytest.raises(LoadFailed, match="OSError: no weights"):
        load("Unloadable").open_session(0)


def test_a_class_without_predict_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("class Model: pass")
    with pytest.raises(LoadFailed, match=r"expected a class with a method `predict\(inputs\)`"):
        backends.load("python", {"model": f"{tmp_path}/model.py:Model"}, STATED)


@pytest.mark.parametrize("hooks", [("decode_request",), ("decode_request", "encode_response")])
def test_a_class_made_for_litserve_is_refused(tmp_path: Path, hooks: tuple[str, ...]) -> None:
    methods = "".join(f"    def {name}(self, given): return given\n" for name in hooks)
    (tmp_path / "model.py").write_text(f"class Model:\n{methods}    def predict(self, x: float) -> float: return x\n")
    with pytest.raises(LoadFailed, match=rf"Model: has {', '.join(hooks)} of LitServe, .* \(docs/moving.md, From LitServe\)$"):
        backends.load("python", {"model": f"{tmp_path}/model.py:Model"}, STATED)


def test_a_file_that_fails_to_import_is_told_and_can_be_mended(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("import nothing_of_this_name")
    with pytest.raises(LoadFailed, match="nothing_of_this_name"):
        backends.load("python", {"model": f"{file}:Model"}, STATED)
    file.write_text("class Model:\n    def predict(self, inputs): return {'y': inputs['x']}")
    assert backends.load("python", {"model": f"{file}:Model"}, STATED).open_session(0).run(x(4), {})["y"].tolist() == [4]


@pytest.mark.parametrize("source", ["model.py", ":Model", "model:", "model:not-a-name"])
def test_what_names_no_code_is_refused(source: str) -> None:
    with pytest.raises(LoadFailed, match="expected `module:name` or"):
        backends.load("python", {"model": source}, STATED)


def load_file(file: Path, source: str, **options: Any) -> backends.Session:
    file.write_text(source)
    return backends.load("python", {"model": f"{file}:Model", "class_options": options}, STATED).open_session(0)


TAKES = """class Model:
    def __init__(self, threshold, *, path="a"):
        self.rate = 1 / threshold
    def predict(self, inputs): ...
"""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"thresold": 1}, "class_options.thresold: Model takes no such option; did you mean `threshold`? ({file}:2)"),
        ({"threshold": 1, "zzz": 2}, "class_options.zzz: Model takes no such option; it takes threshold, path ({file}:2)"),
        (
            {"path": "b"},
            "class_options.threshold: missing: Model needs it; add `class_options: {{threshold: …}}`, or give it a default",
        ),
        ({"threshold": 0}, "raised ZeroDivisionError: division by zero ({file}:3); class_options: threshold"),
    ],
)
def test_what_the_constructor_refuses_points_at_its_line_and_at_class_options(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.py"
    with pytest.raises(LoadFailed) as failed:
        load_file(file, TAKES, **options)
    assert words.format(file=file) in str(failed.value)


def test_options_of_a_function_are_refused(tmp_path: Path) -> None:
    (tmp_path / "area.py").write_text("def predict(width: float) -> float:\n    return width\n")
    with pytest.raises(LoadFailed, match="class_options: unit: only a class takes options, this is a function"):
        backends.load("python", {"model": f"{tmp_path}/area.py:predict", "class_options": {"unit": 1}})


def test_a_fault_in_a_library_points_at_the_users_own_line(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    source = "import json\nclass Model:\n    def load(self):\n        json.loads('{')\n    def predict(self, inputs): ...\n"
    with pytest.raises(LoadFailed, match=r"load raised JSONDecodeError: .* \(.*model\.py:4\)$"):
        load_file(file, source)


@pytest.mark.parametrize("hook", ["load", "__init__"])
def test_a_model_that_ends_the_program_as_it_is_loaded_is_told_with_its_line(tmp_path: Path, hook: str) -> None:
    file = tmp_path / "model.py"
    source = (
        f"import sys\nclass Model:\n    def {hook}(self):\n        sys.exit('no GPU')\n    def predict(self, inputs): ...\n"
    )
    with pytest.raises(LoadFailed, match=r"raised SystemExit: no GPU \(.*model\.py:4\)$"):
        load_file(file, source)


@pytest.mark.parametrize(("source", "line"), [("x = 1\ny = 2 +\n", 2), ("import json\njson.loads('{')\n", 2)])
def test_a_file_that_cannot_be_imported_is_told_with_its_line(source: str, line: int, tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=rf"\(.*model\.py:{line}\)$"):
        load_file(tmp_path / "model.py", source)


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ("['y']", "`inputs`: got 'y', expected (name, datatype, shape)"),
        ("[('x', 'float32', (-1,))]", "`inputs`: 'x' has datatype 'float32', expected one of BOOL, "),
        ("[('x', 'FP32', 4)]", "expected (name, datatype, shape)"),
        ("[('x', 'FP32', (4,))]", "'x' has shape [4]: the first dimension is that of a batch's rows, expected -1 there"),
        ("[('x', 'FP32', ())]", "'x' has shape []: the first dimension"),
    ],
)
def test_tensors_that_are_stated_wrong_are_told(stated: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        f"class Model:\n    inputs = {stated}\n    outputs = [('y', 'FP32', (-1,))]\n    def predict(self, x): ...\n"
    )
    with pytest.raises(LoadFailed) as failed:
        backends.load("python", {"model": f"{file}:Model"}, UNSTATED)
    assert words in str(failed.value)


def two_arrays(inputs, params):  # type: ignore[no-untyped-def]  # as a user may write it
    return inputs + params


two_arrays.example = {"inputs": [1.0], "params": [2.0]}  # type: ignore[attr-defined]


def test_inputs_of_the_names_of_a_dict_and_parameters_go_by_name() -> None:
    model = f"{__name__}:two_arrays"
    found = backends.read("python", model)
    arrays = {"inputs": np.ones(1), "params": np.ones(1)}
    assert [tensor.name for tensor in found.inputs] == [*arrays]
    session = load("two_arrays", ModelSpec("", found.inputs, found.outputs, 8)).open_session(0)
    assert session.run(arrays, {}) == {"output": [2]}


CALLABLES = """
from functools import partial

class Doubled:
    def __call__(self, inputs): return {"y": 2 * inputs["x"]}

class OfPartial(Tensors):
    predict = staticmethod(partial(lambda by, inputs: {"y": by * inputs["x"]}, 2))

class OfObject(Tensors):
    predict = Doubled()

class OfInstance(Tensors):
    def __init__(self): self.predict = Doubled()
    def predict(self): ...
"""


@pytest.mark.parametrize("name", ["OfPartial", "OfObject", "OfInstance"])
def test_what_an_instance_calls_predict_need_not_be_a_method(name: str, tmp_path: Path) -> None:
    stated = 'class Tensors:\n    inputs, outputs = [("x", "FP32", (-1, 1))], [("y", "FP32", (-1, 1))]\n'
    (tmp_path / "m.py").write_text(stated + CALLABLES)
    session = backends.load("python", {"model": f"{tmp_path}/m.py:{name}"}).open_session(0)
    assert session.run({"x": np.ones((1, 1), np.float32)}, {})["y"].tolist() == [[2]]


@pytest.mark.parametrize("signature", ["self", "self, *, inputs", "self, inputs, *, parameters", "self, a, b, c"])
def test_a_predict_that_cannot_be_called_is_told_with_its_line(signature: str, tmp_path: Path) -> None:
    function = signature.removeprefix("self, ")
    if function.startswith(("inputs", "*")):
        with pytest.raises(LoadFailed, match=r"predict cannot be called, expected predict\(inputs\) or .* \(.*py:1\)$"):
            load_file(tmp_path / "function.py", f"def Model({function}): ...\n")
    with pytest.raises(LoadFailed, match=r"predict cannot be called, expected predict\(self, inputs\) or .* \(.*py:2\)$"):
        load_file(tmp_path / "model.py", f"class Model:\n    def predict({signature}): ...\n")


@pytest.mark.parametrize(
    "signature",
    ["self, inputs", "self, inputs, **more", "self, inputs, parameters=None", "self, inputs, size=2", "self, *both, size=2"],
)
def test_every_predict_that_can_be_called_is(signature: str, tmp_path: Path) -> None:
    first = "both[0]" if "both" in signature else "inputs"
    file = tmp_path / "model.py"
    factor = " * size / 2" if "size" in signature else ""
    session = load_file(file, f"class Model:\n    def predict({signature}): return {{'y': {first}['x']{factor}}}\n")
    assert session.run(x(1, 2), {})["y"].tolist() == [1, 2]


class Gives:
    """Whatever the test has put here, as `y`."""

    inputs = (("x", "FP32", (-1,)),)
    gives: Any = None

    def predict(self, inputs: Tensors) -> Any:
        return {"y": self.gives}


def given(array: np.ndarray, datatype: str, **options: Any) -> np.ndarray:
    spec = ModelSpec("", STATED.inputs, (TensorSpec("y", datatype, (-1,)),), 8)
    session = backends.load("python", {"model": f"{__file__}:Gives", **options}, spec).open_session(0)
    load_object(f"{__file__}:Gives").gives = array
    return session.run({"x": np.zeros(len(array), np.float32)}, {})["y"]


def test_an_array_with_masked_elements_is_refused() -> None:
    with pytest.raises(ExecutionFailed, match="output 'y': elements are masked, expected values in their place"):
        given(np.ma.masked_array([1.0, 2.0], mask=[False, True]), "FP32")
    assert given(np.ma.masked_array([1.0, 2.0]), "FP32").tolist() == [1, 2]


def of_torch(**said: object) -> object:
    return SimpleNamespace(
        **{"requires_grad": False, "device": "cpu", "dtype": "torch.float32", "layout": "torch.strided"} | said
    )


@pytest.mark.parametrize(
    ("value", "way"),
    [
        ([1, 2], "return it as numpy.asarray(…)"),
        (of_torch(), "return it as ….numpy()"),
        (of_torch(requires_grad=True, device="cuda:0"), "return it as ….detach().cpu().numpy()"),
        (of_torch(layout="torch.sparse_coo", dtype="torch.bfloat16"), "return it as ….to_dense().float().numpy()"),
        (of_torch(device="meta"), "it is on the device meta, where tensors have no values"),
        (np.ones(2, np.complex64), "expected FP32, the model gave complex64: return `.real` and `.imag` as two outputs"),
    ],
)
def test_what_is_no_array_of_the_protocols_is_told_with_what_makes_it_one(value: Any, way: str) -> None:
    with pytest.raises(OutputsRefused, match=f"output 'y': .*{re.escape(way)}"):
        checked_outputs(ModelSpec("", (), (TensorSpec("y", "FP32", (-1,)),), 0), {}, {"y": value})


@pytest.mark.parametrize(
    ("given_as", "datatype"),
    [
        ("float64", "FP32"), ("float64", "FP16"), ("float64", "BF16"), ("float32", "FP64"), ("float16", "FP32"),
        ("int64", "INT32"), ("int64", "UINT8"), ("int32", "INT64"), ("uint8", "INT64"),
    ],
)  # fmt: skip
def test_what_numpy_computes_in_by_default_is_brought_to_the_declared_datatype(given_as: str, datatype: str) -> None:
    array = given(np.array([0, 1, 2], given_as), datatype)
    assert (array.dtype, array.tolist()) == (NUMPY[datatype], [0, 1, 2])
    with pytest.raises(OutputsRefused, match=f"expected {datatype}, the model gave {given_as}: return it with .astype"):
        given(np.array([0, 1, 2], given_as), datatype, cast_outputs=False)


def test_what_is_not_finite_is_cast_as_it_is() -> None:
    array = given(np.array([np.nan, np.inf, -np.inf]), "FP32")
    np.testing.assert_array_equal(array, np.array([np.nan, np.inf, -np.inf], np.float32))


@pytest.mark.parametrize(
    ("array", "datatype", "words"),
    [
        (np.array([1e300]), "FP32", "a value of the model's float64 is too large for FP32"),
        (np.array([3.4e38, np.inf]), "BF16", "a value of the model's float64 is too large for BF16"),
        (np.array([1, 300]), "UINT8", "the model gave 300, which UINT8 cannot hold"),
        (np.array([-1, 3]), "UINT64", "the model gave -1, which UINT64 cannot hold"),
    ],
)
def test_a_value_that_the_declared_datatype_cannot_hold_is_told(array: np.ndarray, datatype: str, words: str) -> None:
    with pytest.raises(ExecutionFailed, match=words) as failed:
        given(array, datatype)
    assert not isinstance(failed.value, OutputsRefused)  # other inputs may well do


@pytest.mark.parametrize(
    ("given_as", "datatype"),
    [("int64", "FP32"), ("float64", "INT64"), ("float32", "FP16"), ("bool", "INT32"), ("object", "FP32")],
)
def test_datatypes_that_do_not_go_together_are_refused(given_as: str, datatype: str) -> None:
    array = np.array([0, 1]).astype(given_as)
    way = "" if given_as == "object" else f", or declare {datatype_of(array)}"  # its numbers are no BYTES
    words = rf'expected {datatype}, the model gave {given_as}: return it with .astype\("{NUMPY[datatype]}"\){way}$'
    with pytest.raises(OutputsRefused, match=words):
        given(array, datatype)


class Worded:
    """BYTES in and out, without a batch dimension."""

    inputs = (("x", "FP32", (-1,)),)
    outputs = (("text", "BYTES", (-1, 2)), ("fixed", "FP32", (3,)))

    def predict(self, inputs: Tensors) -> Any:
        case = int(inputs["x"][0])
        text = np.array([[b"a", "b"], ["ü", np.str_("d")]], object)
        fixed = np.zeros(3, np.float32)
        if case == 1:
            text = np.array([[b"a", b"b"]])  # which would lose the zeros at the end of bytes
        elif case == 2:
            text = np.array([[b"a", bytearray(b"b")]], object)
        elif case == 3:
            text = text.T[:1]  # a view that is not contiguous
        elif case == 4:
            fixed = fixed[:2]
        elif case == 5:
            text = np.empty((0, 2), object)
        elif case == 7:
            text = np.array([["a", "ü"]])
        elif case == 6:
            return {"text": text, "fixed": fixed, 7: fixed}
        return {"text": text, "fixed": fixed}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (1, "output 'text': the model gave \\|S1: it has lost the zeros at the end of its elements: make it with dtype=object"),
        (2, "output 'text': expected bytes or str in BYTES, the model gave bytearray"),
        (4, r"output 'fixed': expected shape \[3\], the model gave shape \[2\]"),
        (6, r"the model gave \['7'\] beside its outputs \['fixed', 'text'\]: declare or omit them"),
    ],
)
def test_outputs_of_a_model_without_a_batch_dimension_are_held_to_what_is_declared(case: int, message: str) -> None:
    session = load("Worded", ModelSpec("", (), (), 0)).open_session(0)
    with pytest.raises(ExecutionFailed, match=message):
        session.run(x(case), {})


def one_more_above_2(x: np.float32) -> dict[str, float]:
    return {"a": x} if x <= 2 else {"a": x, "b": 1.0}


def one_more_above_2_in_parts(x: np.float32) -> Iterator[dict[str, float]]:
    yield one_more_above_2(x)


def test_an_undeclared_output_of_single_values_is_refused() -> None:
    declared = ModelSpec("", (), (TensorSpec("a", "FP32", (-1,)),), 8)
    session = load("one_more_above_2", declared).open_session(0)
    assert session.run(x(1, 2), {})["a"].tolist() == [1, 2]
    with pytest.raises(OutputsRefused, match=r"the model gave \['b'\] beside its outputs \['a'\]: declare or omit them"):
        session.run(x(3), {})
    with pytest.raises(ExecutionFailed, match=r"the function gave \['a'\] for one row, \['a', 'b'\] for another"):
        session.run(x(1, 3), {})
    parts = cast(StreamingSession, load("one_more_above_2_in_parts", declared).open_session(0))
    with pytest.raises(OutputsRefused, match=r"gave \['b'\] beside"):
        list(parts.stream(x(3), {}))


@pytest.mark.parametrize(("case", "shape"), [(0, (2, 2)), (3, (1, 2)), (5, (0, 2)), (7, (1, 2))])
def test_text_may_be_bytes_or_str_in_any_layout(case: int, shape: tuple[int, ...]) -> None:
    session = load("Worded", ModelSpec("", (), (), 0)).open_session(0)
    text = session.run(x(case), {})["text"]
    assert (text.dtype, text.shape) == (object, shape)


class Wordless(Exception):
    def __str__(self) -> str:
        raise SystemExit("not even this")


class Mute(ExecutionFailed):
    """Of a model that raises errors of its own making."""

    def __str__(self) -> str:
        raise SystemExit("not even this")


@pytest.mark.parametrize(
    ("exc", "words"),
    [
        (ValueError("odd"), "ValueError: odd"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (ExecutionFailed("no"), "no"),
        (Wordless(), "Wordless: (its __str__ raised SystemExit)"),
        (ValueError("\ud800"), "ValueError: \\ud800"),
        (ExecutionFailed("x" * 2500), "x" * 2500),
        (ExecutionFailed("x" * 2501), "x" * 2000 + "… (cut, of 2501 characters)"),
    ],
)
def test_the_words_of_an_exception_can_be_sent_on(exc: BaseException, words: str) -> None:
    assert words_of(exc) == words


def test_the_log_has_more_of_a_message_that_was_cut(caplog: pytest.LogCaptureFixture) -> None:
    words_of(ValueError("x" * 10_000))
    (record,) = caplog.records
    assert record.getMessage().count("x") > 9_000
    words_of(ValueError("x" * 5_000_000))
    assert len(caplog.records[1].getMessage()) < 20_000


def test_what_is_traced_is_not_logged_once_more(caplog: pytest.LogCaptureFixture) -> None:
    exc = ExecutionFailed("x" * 10_000)
    words_of(exc, traced=True)
    assert not caplog.records
    assert trace_of(exc).count("x") > 9_000
    assert trace_of(ExecutionFailed("short")) == ""
    assert trace_of(Mute()) == ""
