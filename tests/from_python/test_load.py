"""`gateway.load`: a model called as a function, in this process."""

import asyncio
import copy
import gc
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gateway
from backends.source import load_object
from gateway.errors import DeadlineExceeded, GatewayError, InvalidArgument, NotReady
from gateway.from_python import hosted
from tests.from_python.models import Gate, Letters, Once, Told, by_example, double, half, outer, texts
from tests.waiting import until

ROOT = Path(__file__).parent.parent.parent
TWO_MODELS = {
    "models": [
        {"name": "a", "backends": [{"kind": "synthetic"}]},
        {"name": "b", "version": "3", "backends": [{"kind": "synthetic"}]},
        {"name": "b", "version": "12", "backends": [{"kind": "synthetic", "placement": "replicas"}]},
    ]
}


@pytest.fixture(scope="module")
def model() -> Iterator[gateway.LoadedModel]:
    with gateway.load(double) as loaded:
        yield loaded


@pytest.mark.parametrize(
    "given",
    [[[1, 2], [4, 5]], ((1, 2), (4, 5)), np.array([[1, 2], [4, 5]], np.float32), [np.array([1.0, 2.0]), np.array([4, 5])]],
    ids=["lists", "tuples", "array", "list of arrays"],
)
def test_arrays_and_nested_lists_are_taken(given: Any, model: gateway.LoadedModel) -> None:
    answer = model.predict({"x": given})
    assert list(answer) == ["output"]
    assert answer["output"].dtype == np.float32
    assert answer["output"].tolist() == [[2, 4], [8, 10]]


def test_a_class_that_states_its_tensors_is_made_once() -> None:
    before = Once.made
    with gateway.load(Once) as model:
        model.predict({"x": [[1, 2]]})
    assert Once.made - before == 1


def test_an_answer_is_the_callers_own(model: gateway.LoadedModel) -> None:
    answer = model.predict({"x": [[1, 2]]})["output"]
    answer += 1  # no view, and none that may not be written
    assert answer.base is None


def test_what_is_no_number_passes_as_it_is(model: gateway.LoadedModel) -> None:
    answer = model.predict({"x": [[float("nan"), float("inf")]]})["output"]
    assert np.isnan(answer[0, 0])
    assert answer[0, 1] == np.inf


@pytest.mark.parametrize(
    "given",
    [
        [["a"], ["bcd"]], [[b"a"], ["bcd"]], np.array([["a"], ["bcd"]]), [[np.str_("a")], [np.bytes_(b"b\0\0")]],
        [[np.bytes_(b"\0")], [np.str_("bc\0")]],
    ],
)  # fmt: skip
def test_text_is_given_as_text_or_bytes(given: Any) -> None:
    with gateway.load(Letters) as letters:
        assert letters.predict({"text": given})["output"].tolist() == [[1], [3]]
        assert (letters.name, letters.version, letters.outputs[0].datatype) == ("letters", "1", "INT64")


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_texts_of_an_answer_are_of_the_kind_that_the_model_gave(isolation: str) -> None:
    backend = {"kind": "python", "model": f"{texts.__module__}:texts", "isolation": isolation}
    with gateway.load({"models": [{"name": "texts", "backends": [backend]}]}) as model:
        answer = model.predict({"text": ["a", "ü"]})
    assert {name: array.tolist() for name, array in answer.items()} == {"text": ["a", "ü"], "raw": [b"a", "ü".encode()]}


def test_lists_of_several_depths_are_told(model: gateway.LoadedModel) -> None:
    with pytest.raises(InvalidArgument, match="expected lists of one depth everywhere, got a list at data"):
        model.predict({"x": [1, [2]]})


def test_half_precision_is_taken_from_lists_and_given() -> None:
    with gateway.load(half) as model:
        assert model.predict({"x": [[1, 2]]})["output"].dtype == np.float16
        with pytest.raises(InvalidArgument, match="input 'x': element 1 is 1000000, which FP16 cannot hold"):
            model.predict({"x": [[1, 1_000_000]]})
        with pytest.raises(InvalidArgument, match="got 3 elements, expected 4 for FP16"):
            model.predict({"x": [[1, 2], [3]]})


@pytest.mark.parametrize("strange", [None, "1", b"2", True])
def test_lists_of_half_precision_hold_what_those_of_others_do(strange: Any, model: gateway.LoadedModel) -> None:
    """Which JSON cannot: those of FP32 are."""
    told = []
    with gateway.load(half) as halves:
        for each in (halves, model):
            with pytest.raises(InvalidArgument) as raised:
                each.predict({"x": [[1, strange]]})
            told.append(str(raised.value))
        with pytest.raises(InvalidArgument, match=r"expected FP16 \[-1, 2\], got FP16 \[\]"):
            halves.predict({"x": 1.0})
        with pytest.raises(InvalidArgument, match="input 'x': data: expected FP16 elements: Number out of range"):
            halves.predict({"x": [[1, 10**400]]})
    assert told[0].startswith("input 'x': data: expected FP16 elements, got ")
    if strange != b"2":  # which JSON has not
        assert told[0] == told[1].replace("FP32", "FP16")


@pytest.mark.parametrize(
    ("element", "words"),
    [
        (np.datetime64("2020-01-01", "ns"), "datetime64[ns]"),
        (np.datetime64("NaT", "ns"), "datetime64[ns]"),
        (np.datetime64("2020-01-01", "us"), "datetime64[us]"),
        (np.timedelta64(5, "ns"), "timedelta64[ns]"),
        (np.array(["2020-01-01"], "M8[ns]"), "datetime64[ns]"),
        (np.array([np.timedelta64(5, "ns")], object), "timedelta64[ns]"),
        (np.complex128(5), "complex128"),
        (np.longdouble(5), str(np.dtype(np.longdouble))),
    ],
    ids=str,
)
def test_an_element_of_numpys_that_python_has_not_is_refused(element: Any, words: str, model: gateway.LoadedModel) -> None:
    with pytest.raises(InvalidArgument, match=f"^input 'x': got {re.escape(words)}, expected an array, or lists of numbers"):
        model.predict({"x": [[element, 1]]})


def test_elements_of_numpys_that_python_has_are_taken(model: gateway.LoadedModel) -> None:
    for one in (np.int8(1), np.uint64(1), np.float16(1), np.array(1, ">f4"), ml_dtypes.bfloat16(1), np.array(1, object)):
        assert model.predict({"x": [[one, 2]]})["output"].tolist() == [[2, 4]]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"x": np.ones((1, 2))}, r"input 'x' of model 'double': expected FP32 \[-1, 2\], got FP64 \[1, 2\]"),
        ({"x": np.ones((1, 2), np.complex64)}, r"expected FP32 \[-1, 2\], got complex64 \[1, 2\]"),
        ({"x": 3.0}, r"expected FP32 \[-1, 2\], got FP32 \[\]"),
        ({"x": [["a", "b"]]}, r"input 'x': data: expected FP32 elements, got text at data\[0\]\[0\]"),
        ({"x": "2"}, r"input 'x': data: expected FP32 elements, got text at data\[0\]$"),
        ({"x": ["[1, 2]"]}, r"input 'x': data: expected FP32 elements, got text at data\[0\]$"),
        ({"x": {"a": 1}}, "input 'x': got dict, expected an array, or lists of numbers"),
        ({"x": [[1, 10**5000]]}, "input 'x': element 1 is an integer of 16610 bits, expected FP32"),
        ({"x": [[1, b"2"]]}, "input 'x': element 1 is bytes, expected FP32"),
        ({"y": [[1, b"2"]]}, "unexpected inference input 'y' for model 'double'; its inputs: 'x'"),
        ({b"x": [[1, 2]]}, "inputs: got a name of bytes, expected text"),
        ({"y": [[1, 2]]}, "unexpected inference input 'y' for model 'double'; its inputs: 'x'"),
        ({}, "expected 1 inputs but got 0 inputs for model 'double': missing 'x'; the smallest request: "),
        ({"x": [[[[[[1, 2]]]]]]}, r"got FP32 \[1, 1, 1, 1, 1, 2\]"),
    ],
)
def test_a_mistake_is_told_as_over_the_wire(given: Any, words: str, model: gateway.LoadedModel) -> None:
    with pytest.raises(InvalidArgument, match=words):
        model.predict(given)


def test_lists_nested_beyond_all_sense_are_refused(model: gateway.LoadedModel) -> None:
    nested: Any = [1]
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(InvalidArgument, match="nested too deep"):
        model.predict({"x": nested})


class NeedsGradient:
    """As a tensor of PyTorch's that does."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


def test_what_gives_no_array_is_refused(model: gateway.LoadedModel) -> None:
    words = r"input 'x': got NeedsGradient, which gives no array: RuntimeError: Can't call numpy\(\) on Tensor"
    with pytest.raises(InvalidArgument, match=words):
        model.predict({"x": NeedsGradient()})  # type: ignore[dict-item]


def test_an_array_with_masked_elements_is_refused(model: gateway.LoadedModel) -> None:
    masked = np.ma.masked_array(np.ones((1, 2), np.float32), mask=[[False, True]])
    with pytest.raises(
        InvalidArgument, match=r"input 'x': elements are masked, expected values in their place, as by `.filled"
    ):
        model.predict({"x": masked})
    with pytest.raises(InvalidArgument, match=r"expected FP32 elements, got null at data\[0\]\[1\]"):
        model.predict({"x": list(masked)})
    for whole in (masked.filled(2), np.ma.masked_array(masked.data)):
        assert model.predict({"x": whole})["output"][0, 0] == 2


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_loaded_model_says_that_it_cannot_be_copied(copied: Any, model: gateway.LoadedModel) -> None:
    with pytest.raises(TypeError, match=r"a loaded model cannot be copied or pickled: call `gateway\.load` where it is used"):
        copied(model)


def test_text_that_is_none_is_refused() -> None:
    with gateway.load(Letters) as letters, pytest.raises(InvalidArgument, match="element 0 is of int, expected bytes or str"):
        letters.predict({"text": np.array([[5]], object)})


def test_what_the_model_raises_is_told_and_the_next_call_is_answered(model: gateway.LoadedModel) -> None:
    with pytest.raises(gateway.GatewayError, match="ValueError: no threes in /srv/models/weights") as told:
        model.predict({"x": [[3, 3]]})
    assert told.value.words == "double:1/python: ValueError: no threes in weights.bin"
    assert model.predict({"x": [[1, 1]]})["output"].tolist() == [[2, 2]]


def test_parameters_are_the_protocols(model: gateway.LoadedModel) -> None:
    with pytest.raises(InvalidArgument, match="parameter 'priority': got -1"):
        model.predict({"x": [[1, 2]]}, parameters={"priority": -1})
    with pytest.raises(InvalidArgument, match="unexpected inference output 'outptu'"):
        model.predict({"x": [[1, 2]]}, outputs=["outptu"])


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_parameter_like_one_of_ours_reaches_the_model_that_reads_parameters(isolation: str) -> None:
    backend = {"kind": "python", "model": f"{Told.__module__}:Told", "isolation": isolation}
    with gateway.load({"models": [{"name": "told", "backends": [backend]}]}) as told:
        assert told.predict({"x": [1]}, parameters={"timeout_s": 3})["y"].tolist() == [3]
    backend["model"] = f"{Gate.__module__}:scaled"
    with gateway.load({"models": [{"name": "untold", "backends": [backend]}]}) as untold:
        with pytest.raises(InvalidArgument, match="request: parameter 'timeout_s': unknown; did you mean 'timeout'"):
            untold.predict({"x": [1]}, parameters={"timeout_s": 3})
        with pytest.raises(InvalidArgument, match="request: parameter 'factor': the model has a value of its own for it"):
            untold.predict({"x": [1]}, parameters={"factor": 3})
        assert untold.predict({"x": [1]}, parameters={"trace": "7"})["output"].tolist() == [2]


def test_calls_at_the_same_time_share_batches_and_a_cancelled_one_leaves() -> None:
    async def ask() -> list[int]:
        one = np.ones((1, 1), np.float32)
        first = asyncio.ensure_future(model.predict_async({"x": one}))
        await asyncio.to_thread(Gate.entered.wait, 10)
        waiting = [asyncio.ensure_future(model.predict_async({"x": one})) for _ in range(4)]
        await asyncio.sleep(0)  # they are begun, in their order
        waiting.pop().cancel()
        await asyncio.sleep(0)
        with pytest.raises(InvalidArgument):  # answered at once: all that came before it has been seen
            await model.predict_async({})
        Gate.opened.set()
        answers = await asyncio.gather(first, *waiting)
        return [int(answer["rows"][0, 0]) for answer in answers]

    Gate.opened.set()
    with gateway.load(Gate) as model:
        Gate.opened.clear()
        Gate.entered.clear()
        assert asyncio.run(ask()) == [1, 3, 3, 3]


def test_it_works_under_a_running_loop_as_in_a_notebook() -> None:
    async def cell() -> list[list[float]]:
        async with gateway.load(double) as model:
            here = model.predict({"x": [[1, 2]]})["output"].tolist()
            assert (await model.predict_async({"x": [[1, 2]]}))["output"].tolist() == here
            return list(here)

    assert asyncio.run(cell()) == [[2, 4]]


def test_a_function_without_hints_is_told_by_an_example() -> None:
    with gateway.load(by_example, example={"x": [[1.0, 2.0]]}) as model:
        assert (model.name, model.predict({"x": [[1, 2]]})["y"].tolist()) == ("by_example", [[2, 3]])


def test_a_file_is_served_as_gateway_serve_would(tmp_path: Path) -> None:
    (tmp_path / "area.py").write_text("def predict(width: float, height: float) -> float:\n    return width * height\n")
    with gateway.load(tmp_path / "area.py") as model:
        assert model.predict({"width": [2, 3], "height": [4, 5]})["output"].tolist() == [8, 15]
        assert repr(model) == "<LoadedModel 'area' version 1>"


def test_code_of_the_script_itself_is_refused_to_a_process_of_its_own() -> None:
    backend = {"kind": "python", "model": "__main__:triple", "isolation": "process"}
    words = "'__main__:triple' is defined in the script or notebook that runs, which a process of its own cannot import: put it"
    with pytest.raises(GatewayError, match=words):
        gateway.load({"models": [{"name": "triple", "backends": [backend]}]})


def test_of_several_models_one_is_named() -> None:
    with gateway.load(TWO_MODELS, model="b") as model:
        assert (model.name, model.version) == ("b", "12")
    with gateway.load(TWO_MODELS, model="b", version="3") as model:
        assert model.version == "3"


@pytest.mark.parametrize(
    ("what", "options", "words"),
    [
        (TWO_MODELS, {}, "several models: name one, such as model='a'; models here: 'a', 'b'"),
        (TWO_MODELS, {"model": "c"}, "no model 'c'; models here: 'a', 'b'"),
        (TWO_MODELS, {"model": "b", "version": "4"}, "no version 4 of model 'b'; versions here: '3', '12'"),
        (TWO_MODELS, {"model": "a", "example": {"x": [1]}}, "example: only for a model: a configuration states its inputs"),
        ({"models": [{"name": "a", "backend": []}]}, {}, "unknown key; did you mean `backends`?"),
        ("nothing.onnx", {}, "nothing.onnx: no such file; expected an .onnx"),
        ("nothing.yaml", {}, "nothing.yaml: cannot be read: no such file"),
        (
            outer(),
            {},
            "outer.<locals>.inner: expected a class or function that its module has under this name: define it at the top ",
        ),
        (lambda x: x, {}, "<lambda>: expected a class or function"),
        (Letters().predict, {}, "Letters.predict: expected a class or function that its module has under this name"),
        (
            partial(double),
            {},
            "got an object of partial: expected a class or function of a module's top level",
        ),
        (TWO_MODELS, {"model": 3}, "model: got int, expected a name"),
        (TWO_MODELS, {"model": "b", "version": 1.5}, "version: got float, expected text or an integer"),
        (TWO_MODELS, {"model": "b", "version": True}, "version: got bool, expected text or an integer"),
        (double, {"example": 3}, "example: got int, expected one request: a file, or a dict of arrays by input name"),
        (double, {"example": [1, 2]}, "example: got list, expected one request"),
        (double, {"example": b"x"}, "example: got bytes, expected one request"),
    ],
)
def test_what_cannot_be_loaded_is_told(what: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(gateway.ConfigError) as told:
        gateway.load(what, **options)
    assert words in str(told.value)


ONE_ROW = """
import time

class Model:
    inputs = [("x", "FP32", (-1, 4))]
    outputs = [("y", "FP32", (-1, 4))]

    def predict(self, inputs):
        time.sleep(0.01)
        x = inputs["x"]
        BODY
"""


@pytest.mark.parametrize("door", [gateway.load, gateway.TestClient])
def test_a_model_that_fails_only_for_batches_is_told_as_serve_tells_it(
    door: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "one_row.py").write_text(ONE_ROW.replace("BODY", "return {'y': x[:1]}"))
    with pytest.raises(GatewayError, match=r"every batch of 32 rows would fail: output 'y'.*; .* set max_rows: 1 \(it is 32\)"):
        door(f"{tmp_path}/one_row.py")
    (tmp_path / "reshapes.py").write_text(ONE_ROW.replace("BODY", "return {'y': x.reshape(1, 4)}"))
    door(f"{tmp_path}/reshapes.py").close()
    assert "every batch of 32 rows will fail: ValueError: cannot reshape" in caplog.text


def test_of_several_lengths_a_load_runs_the_shortest(tmp_path: Path) -> None:
    (tmp_path / "lengths.py").write_text(
        "class Model:\n"
        "    inputs = [('x', 'FP32', (-1, -1))]\n"
        "    outputs = [('y', 'FP32', (-1, -1))]\n"
        "    seen = []\n\n"
        "    def predict(self, inputs):\n"
        "        self.seen.append(inputs['x'].shape)\n"
        "        return {'y': inputs['x']}\n"
    )
    model = {
        "name": "m", "max_rows": 8, "ragged": {"pad": {"x": 0}, "buckets": [16, 32]},
        "backends": [{"kind": "python", "model": f"{tmp_path}/lengths.py:Model"}],
    }  # fmt: skip
    gateway.load({"models": [model]}).close()
    assert set(load_object(f"{tmp_path}/lengths.py:Model").seen) == {(1, 16), (8, 16)}


def test_after_close_nothing_can_be_asked() -> None:
    model = gateway.load(double)
    model.close()
    model.close()
    with pytest.raises(NotReady, match="it has been closed: nothing more can be asked of it"):
        model.predict({"x": [[1, 2]]})


def test_close_waits_for_what_is_in_flight() -> None:
    Gate.opened.set()
    model = gateway.load(Gate)
    Gate.opened.clear()
    Gate.entered.clear()
    with ThreadPoolExecutor() as others:
        asked = others.submit(model.predict, {"x": [[1]]})
        assert Gate.entered.wait(10)
        closing = others.submit(model.close)
        Gate.opened.set()
        assert asked.result(10)["rows"].tolist() == [[1]]
        closing.result(10)


def test_what_close_does_not_wait_for_is_told_with_the_time_that_is_over(caplog: pytest.LogCaptureFixture) -> None:
    Gate.opened.set()
    document = {"name": "gate", "backends": [{"kind": "python", "model": "tests.from_python.models:Gate"}]}
    model = gateway.load({"models": [document], "server": {"drain_timeout_s": 0.05}})
    Gate.opened.clear()
    Gate.entered.clear()
    with ThreadPoolExecutor() as others:
        asked = others.submit(model.predict, {"x": [[1]]})
        assert Gate.entered.wait(10)
        model.close()
        Gate.opened.set()
        with pytest.raises(DeadlineExceeded, match="it may have run"):
            asked.result(10)
    assert "1 requests are answered with an error: drain_timeout_s 0.05 is over" in caplog.messages


@pytest.mark.slow
def test_what_was_cancelled_before_close_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def ask(model: gateway.LoadedModel) -> None:
        asked = asyncio.ensure_future(model.predict_async({"x": [[1, 2]]}))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked])
        model.close()

    for _ in range(8):  # it shows where both come to the gateway's loop in one turn
        asyncio.run(ask(gateway.load(double)))
    assert not caplog.messages


INTERRUPTED = """
import os, signal, sys, threading, time, traceback
import gateway

def hangs(x: float) -> float:
    if x == 77:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(600)
    return x

def interrupt() -> None:
    global began_s
    closes = False  # before that, a second press would be no other than the first
    while not closes:
        time.sleep(0.1)
        stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
        closes = any(each.name == "run" and each.filename.endswith("hosted.py") for each in stack)
    began_s = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)

try:
    with gateway.load(hangs) as model:
        try:
            model.predict({"x": [77]})
        finally:
            threading.Thread(target=interrupt, daemon=True).start()
finally:
    print(time.monotonic() - began_s)
"""


@pytest.mark.slow
def test_a_second_interrupt_ends_the_close_in_order(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (-signal.SIGINT, "KeyboardInterrupt")
    assert float(done.stdout) < 8  # without ten seconds' wait for what has no end


@pytest.mark.slow
def test_a_host_whose_standard_files_are_closed_is_served() -> None:
    # Else pipes to the model's process stand in their place, and the end of the loop aborts the host.
    backend = {"kind": "python", "model": f"{double.__module__}:double", "isolation": "process"}
    config = {"models": [{"name": "double", "backends": [backend]}]}
    script = f"import gateway\nwith gateway.load({config}) as model: model.predict({{'x': [[1, 2]]}})"
    closed = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", sys.executable, "-c", script]
    assert subprocess.run(closed, cwd=ROOT, timeout=60, check=False).returncode == 0


def gateway_threads() -> int:
    return sum(thread.name.startswith(("gateway", "double:1/python")) for thread in threading.enumerate())


def test_a_model_that_nobody_holds_is_closed_by_itself(model: gateway.LoadedModel) -> None:
    before = gateway_threads()
    assert gateway.load(double).predict({"x": [[1, 2]]})["output"].tolist() == [[2, 4]]
    gc.collect()
    until(lambda: gateway_threads() <= before)


@pytest.mark.parametrize("waits", ["wait", "_result"])
def test_an_interrupted_close_frees_the_model(model: gateway.LoadedModel, waits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = gateway_threads()
    loaded = gateway.load(double)
    presses = iter([KeyboardInterrupt()])
    whole = getattr(hosted, waits)

    def interrupted(*given: Any) -> Any:
        for press in presses:
            if waits == "_result":
                given[0].cancel()
            raise press
        return whole(*given)

    monkeypatch.setattr(hosted, waits, interrupted)
    with pytest.raises(KeyboardInterrupt):
        loaded.close()
    assert gateway_threads() == before


def test_a_load_that_fails_leaves_no_thread(model: gateway.LoadedModel) -> None:
    before = gateway_threads()
    failing = {"models": [{"name": "m", "backends": [{"kind": "synthetic", "fail_opens": 99}]}]}
    with pytest.raises(gateway.GatewayError, match="m:1/synthetic: failed to load"):
        gateway.load(failing)
    assert gateway_threads() == before


CIRCULAR: list[Any] = []
CIRCULAR.append(CIRCULAR)


def test_parameters_may_be_numpys(model: gateway.LoadedModel) -> None:
    given: dict[str, Any] = {
        "timeout": np.int64(20_000_000),
        "own": np.float32(1),
        "flag": np.bool_(True),
        "text": np.str_("a"),
    }
    assert model.predict({"x": [[1, 2]]}, parameters=given)["output"].tolist() == [[2, 4]]
    with pytest.raises(InvalidArgument, match="parameter 'priority': got -1"):
        model.predict({"x": [[1, 2]]}, parameters={"priority": np.int8(-1)})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"outputs": "output"}, "outputs: got str, expected a list of names"),
        ({"outputs": 5}, "outputs: got int, expected a list of names"),
        ({"parameters": [1]}, "parameters: got list, expected a dict"),
        ({"parameters": "x"}, "parameters: got str, expected a dict"),
        ({"outputs": [object()]}, "outputs: got object in the list, expected names"),
        ({"parameters": {(1, 2): 3}}, "parameters: got a name of tuple, expected text"),
        ({"parameters": {"own": object()}}, "parameter 'own': got object, expected true or false, a number or text"),
        ({"parameters": {"own": CIRCULAR}}, "parameter 'own': got list, expected true or false, a number or text"),
        ({"parameters": {"own": np.complex64(1)}}, "parameter 'own': got complex64, expected true or false"),
        ({"parameters": {"timeout": 10**5000}}, "parameter 'timeout': got an integer of 16610 bits, expected true or false"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_told_by_its_name(
    options: dict[str, Any], words: str, model: gateway.LoadedModel
) -> None:
    with pytest.raises(InvalidArgument, match=words):
        model.predict({"x": [[1, 2]]}, **options)


def test_a_version_may_be_an_integer() -> None:
    with gateway.load(TWO_MODELS, model="b", version=3) as loaded:
        assert loaded.version == "3"
    with gateway.load(TWO_MODELS, model="b", version=None) as loaded:
        assert loaded.version == "12"


def test_what_is_no_dict_and_what_is_no_model_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "area.py").write_text("def predict(width: float) -> float:\n    return width * 2\n")
    with gateway.load(str(tmp_path / "area.py")) as model:
        with pytest.raises(InvalidArgument, match=r"got ndarray, expected a dict of arrays by input name, such as \{'width'"):
            model.predict(np.ones(2))  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match=r"expected FP64 elements, got text at data\[1\]$"):
            model.predict({"width": [1.0, "a"]})
    with pytest.raises(gateway.ConfigError, match="got an object of object: expected a path, a configuration"):
        gateway.load(object())  # type: ignore[arg-type]
