"""A decoupled `model.py` of Triton's Python backend, run here. Expectations are what Triton 2.51 does, unless they say more."""

import ast
import contextlib
import http.client
import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import yaml
from tritonclient.utils import serialize_byte_tensor

import backends
from backends import python_discovery
from backends import triton_python_backend_utils as pb_utils
from backends.base import (
    REQUEST_ROWS,
    ExecutionFailed,
    InputRefused,
    LastPart,
    LoadFailed,
    ModelSpec,
    OutputsRefused,
    RunCancelled,
    Tensors,
    TensorSpec,
)
from backends.early_failure import EarlyFailure
from backends.refusals import Refusal
from backends.triton_python import lend_utils, model_config
from gateway.engine.session_process import ProcessModel
from gateway.errors import Code
from tests.rest_routes.serving import serving
from tests.triton_server import write_model

lend_utils()
from tests import decoupled_model  # noqa: E402  # it imports what was lent

TIMEOUT_S = 10.0
SPEC = ModelSpec("", (TensorSpec("SCRIPT", "BYTES", (1,)),), (TensorSpec("VALUE", "INT32", (-1,)),), 0)


class Served:
    def __init__(self, folder: Path, code: str, config: str, spec: ModelSpec = SPEC) -> None:
        version = folder / "parts" / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(code)
        (version.parent / "config.pbtxt").write_text(config)
        self.notes_file = version / "notes"
        self.model = backends.load("python", {"model": f"{version}/model.py:TritonPythonModel"}, spec)
        self.session: Any = self.model.open_session(0)

    def stream(self, script: str) -> Iterator[Tensors]:
        answer: Iterator[Tensors] = self.session.stream({"SCRIPT": np.array([script.encode()], object)}, {})
        return answer

    def values(self, script: str) -> list[int]:
        return [int(part["VALUE"][0]) for part in self.stream(script)]

    @property
    def notes(self) -> list[str]:
        return self.notes_file.read_text().splitlines() if self.notes_file.exists() else []

    def noted(self, text: str) -> bool:
        until = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until:
            if any(text in line for line in self.notes):
                return True
            time.sleep(0.005)
        return False


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path, Path(decoupled_model.__file__).read_text(), decoupled_model.CONFIG)
    yield served
    served.session.close()
    assert served.noted("finalized")
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("thread", ["", "thread "])
@pytest.mark.parametrize(
    ("script", "values"),
    [("1 2 3 !", [1, 2, 3]), ("1 2 3!", [1, 2, 3]), ("!", []), ("twice !", [1, 2]), ("s20 7 s20 8!", [7, 8])],
)
def test_what_is_sent_comes_in_parts(served: Served, thread: str, script: str, values: list[int]) -> None:
    assert served.model.spec.decoupled
    assert served.values(thread + script) == values


def test_an_error_response_ends_the_answer(served: Served) -> None:
    parts = served.stream("thread 1 error 2 !")
    assert int(next(parts)["VALUE"][0]) == 1
    assert isinstance(next(parts), EarlyFailure)
    with pytest.raises(ExecutionFailed, match="no luck"):
        next(parts)
    assert served.values("3 !") == [3]


def test_an_error_response_is_told_before_the_model_has_returned_which_learns_that_nobody_waits(served: Served) -> None:
    parts = served.stream("error wait !")
    told = next(parts)
    assert isinstance(told, EarlyFailure)
    assert "no luck" in str(told.error)
    assert not served.notes
    with pytest.raises(ExecutionFailed, match="no luck"):
        next(parts)
    assert served.noted("cancelled: True True")


def test_what_the_model_raises_ends_the_answer(served: Served) -> None:
    parts = served.stream("1 raise")
    next(parts)
    with pytest.raises(ExecutionFailed, match="RuntimeError: the model raises"):
        next(parts)
    assert served.values("3 !") == [3]


@pytest.mark.parametrize("script", ["2", "thread 2"])
def test_a_model_that_lets_go_of_a_request_without_an_end_is_told_so(served: Served, script: str) -> None:
    """On Triton such a request never ends."""
    parts = served.stream(script)
    next(parts)
    with pytest.raises(ExecutionFailed, match="without TRITONSERVER_RESPONSE_COMPLETE_FINAL"):
        next(parts)


def test_a_sender_is_held_to_its_contract(served: Served) -> None:
    assert served.values("wrong nothing 1! 2 !") == [1]
    assert served.notes == [
        "wrong: TritonModelException: Unable to send response. Unsupported flag provided.",
        "nothing: TritonModelException: Inference Response object must be provided when the response flags is set to zero.",
        "2: TritonModelException: Unable to send response. Response sender has been closed.",
        "!: TritonModelException: Unable to send response. Response sender has been closed.",
    ]


def test_a_part_that_is_not_as_declared_is_refused(tmp_path: Path) -> None:
    code = Path(decoupled_model.__file__).read_text().replace('Tensor("VALUE", array)', 'Tensor("OTHER", array)')
    served = Served(tmp_path, code, decoupled_model.CONFIG)
    with pytest.raises(OutputsRefused, match="'VALUE' is missing"):
        list(served.stream("thread 1 2 !"))
    served.session.close()


@pytest.mark.parametrize("thread", ["", "thread "])
def test_a_model_waits_for_who_takes_its_parts(served: Served, thread: str) -> None:
    parts = served.stream(f"{thread}endless !")
    next(parts)
    time.sleep(0.1)
    parts.close()  # type: ignore[attr-defined]
    assert served.noted("endless: ")
    assert int(served.notes[0].removeprefix("endless: ")) <= 4  # taken, waiting, within send, and seen too late
    assert served.values("5 !") == [5]


def test_a_cancelled_run_is_told_to_the_model_and_ends_with_it(served: Served) -> None:
    served.session.cancel()  # nothing runs
    parts = served.stream("1 wait 2 3!")
    next(parts)
    with ThreadPoolExecutor(1) as thread:
        ended = thread.submit(next, parts)
        served.session.cancel()
        with pytest.raises(RunCancelled):
            ended.result(TIMEOUT_S)
    assert served.notes == ["cancelled: True True"]
    assert served.values("5 !") == [5]


ASYNC = """
import asyncio
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    async def execute(self, requests):
        sender = requests[0].get_response_sender()
        for value in (1, 2):
            await asyncio.sleep(0)
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("VALUE", [value])]), flags=value // 2)
"""


def test_execute_may_be_async(tmp_path: Path) -> None:
    served = Served(tmp_path, ASYNC, decoupled_model.CONFIG)
    assert served.values("any") == [1, 2]
    served.session.close()


@pytest.mark.parametrize("decoupled", [False, True])
def test_outputs_that_are_not_declared_are_dropped(tmp_path: Path, decoupled: bool, caplog: pytest.LogCaptureFixture) -> None:
    debug = '[pb_utils.Tensor("DEBUG", [[0.5]]), '
    code = (ASYNC if decoupled else AWAITS).replace('[pb_utils.Tensor("VALUE"', f'{debug}pb_utils.Tensor("VALUE"')
    served = Served(tmp_path, code, decoupled_model.CONFIG if decoupled else "max_batch_size: 0")
    inputs = {"SCRIPT": np.array([b"any"], object)}
    for _ in range(2):
        parts = list(served.stream("any")) if decoupled else [served.session.run(inputs, {})]
        assert [[*part] for part in parts] == [["VALUE"]] * len(parts)
    assert isinstance(parts[-1], LastPart) == decoupled
    served.session.close()
    assert caplog.messages == ["parts: the outputs ['DEBUG'] are dropped: no output of the model has that name"]


AWAITS = """
import asyncio
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    loop = None

    async def execute(self, requests):
        self.loop = self.loop or asyncio.get_running_loop()
        assert self.loop is asyncio.get_running_loop()  # to which a client of aiohttp, say, is bound
        await asyncio.sleep(0)
        if requests[0].parameters() != "{}":
            raise RuntimeError("the model raises")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("VALUE", [7])])]

    def finalize(self):
        assert not self.loop.is_closed()
"""


def test_execute_may_be_async_and_answer_whole(tmp_path: Path) -> None:
    served = Served(tmp_path, AWAITS, "max_batch_size: 0")
    inputs = {"SCRIPT": np.array([b"any"], object)}
    assert served.session.run(inputs, {})["VALUE"] == [7]
    with pytest.raises(ExecutionFailed, match="RuntimeError: the model raises"):
        served.session.run(inputs, {"a": 1})
    assert served.session.run(inputs, {})["VALUE"] == [7]
    served.session.close()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return [None]", "the model is decoupled: expected None"),
        ("return None", "without TRITONSERVER_RESPONSE_COMPLETE_FINAL"),
    ],
)
def test_what_execute_should_not_return_is_told(tmp_path: Path, body: str, says: str) -> None:
    served = Served(tmp_path, f"class TritonPythonModel:\n    def execute(self, requests): {body}\n", decoupled_model.CONFIG)
    with pytest.raises(ExecutionFailed, match=says):
        served.values("any")
    served.session.close()


def test_a_decoupled_model_that_fails_to_initialize_is_told(tmp_path: Path) -> None:
    code = "class TritonPythonModel:\n    def initialize(self, args): 1 / 0\n    def execute(self, requests): ...\n"
    with pytest.raises(LoadFailed, match="division by zero"):
        Served(tmp_path, code, decoupled_model.CONFIG)


def test_a_decoupled_model_that_fails_to_finalize_leaves_no_thread(tmp_path: Path) -> None:
    code = "class TritonPythonModel:\n    def execute(self, requests): ...\n    def finalize(self): 1 / 0\n"
    before = set(threading.enumerate())
    served = Served(tmp_path, code, decoupled_model.CONFIG)
    (thread,) = set(threading.enumerate()) - before
    with pytest.raises(ZeroDivisionError):
        served.session.close()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_outputs_are_not_read_from_an_answer_that_is_an_error(tmp_path: Path) -> None:
    write_model(tmp_path, "parts", decoupled_model.CONFIG, Path(decoupled_model.__file__).read_text())
    file = tmp_path / "parts" / "1" / "model.py"
    with pytest.raises(LoadFailed, match=r"model\.py:TritonPythonModel: no luck"):
        python_discovery.read(model=f"{file}:TritonPythonModel", example={"SCRIPT": np.array([b"error !"], object)})


SENDS = """
import threading
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        (script,) = request.inputs()[0].as_numpy()
        thread, *words = script.decode().split()
        sender = request.get_response_sender()

        def sends():
            for word in words:
                value = int(word.strip("!") or 0)
                response = pb_utils.InferenceResponse([pb_utils.Tensor("VALUE", [value])]) if value else None
                sender.send(response, flags=int(word[-1] == "!"))

        if thread == "thread":
            threading.Thread(target=sends).start()
        else:
            sends()
        return None if thread == "thread" else [None]
"""


@pytest.mark.parametrize("thread", ["thread", "here"])
@pytest.mark.parametrize("script", ["7!", "7 !", "7"])
def test_a_model_that_is_not_decoupled_may_answer_by_its_sender(tmp_path: Path, thread: str, script: str) -> None:
    served = Served(tmp_path, SENDS, "max_batch_size: 0")
    assert not served.model.spec.decoupled
    for _ in range(2):
        outputs = served.session.run({"SCRIPT": np.array([f"{thread} {script}".encode()], object)}, {})
        assert outputs["VALUE"].tolist() == [7]
    served.session.close()


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("here 7 8", "Non-decoupled model cannot send more than one response"),
        ("here !", "Non-decoupled model cannot send complete final before sending a response"),
        ("here 7! !", "Response sender has been closed"),
        ("here", "the model has let go of the request without TRITONSERVER_RESPONSE_COMPLETE_FINAL"),
        ("thread", "the model has let go of the request without TRITONSERVER_RESPONSE_COMPLETE_FINAL"),
    ],
)
def test_a_model_that_is_not_decoupled_sends_one_response(tmp_path: Path, script: str, told: str) -> None:
    served = Served(tmp_path, SENDS, "max_batch_size: 0")
    with pytest.raises(ExecutionFailed, match=told):
        served.session.run({"SCRIPT": np.array([script.encode()], object)}, {})
    served.session.close()


KEEPS = """
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    kept = None

    def execute(self, requests):
        (request,) = requests
        if self.kept is None:
            self.kept = request.get_response_sender()
            return None
        (script,) = request.inputs()[0].as_numpy()
        until = time.monotonic() + 10
        while script == b"wait" and not request.is_cancelled() and time.monotonic() < until:
            time.sleep(0.001)
        cancelled = [self.kept.is_cancelled(), request.is_cancelled()]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("VALUE", [int(each) for each in cancelled])])]
"""


def test_a_cancelled_run_of_a_model_that_keeps_its_sender_ends_and_one_that_goes_on_answers(tmp_path: Path) -> None:
    served = Served(tmp_path, KEEPS, "max_batch_size: 0")

    def cancelled(script: str) -> "Future[Tensors]":
        running: Future[Tensors] = Future()

        def run() -> None:
            try:
                running.set_result(served.session.run({"SCRIPT": np.array([script.encode()], object)}, {}))
            except BaseException as exc:
                running.set_exception(exc)

        threading.Thread(target=run, daemon=True).start()
        until = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until and not wait([running], 0.002).done:
            served.session.cancel()
        return running

    with pytest.raises(RunCancelled):
        cancelled("keep").result(0)
    assert cancelled("wait").result(0)["VALUE"].tolist() == [1, 1]
    served.session.cancel()  # nothing runs
    assert served.session.run({"SCRIPT": np.array([b"any"], object)}, {})["VALUE"].tolist() == [1, 0]
    served.session.close()


@pytest.mark.parametrize("returned", ["None", "[]", "[None]", "requests * 2"])
def test_what_execute_should_return_for_a_request_is_told(tmp_path: Path, returned: str) -> None:
    code = f"class TritonPythonModel:\n    def execute(self, requests): return {returned}\n"
    served = Served(tmp_path, code, "max_batch_size: 0")
    with pytest.raises(ExecutionFailed, match="expected a list of one response for each request, or None and one by its"):
        served.session.run({"SCRIPT": np.array([b"any"], object)}, {})
    served.session.close()


SCRIPTS = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request, len(requests)) for request in requests]

    def answer(self, request, together):
        script = pb_utils.get_input_tensor_by_name(request, "SCRIPT").as_numpy()
        word = script[0, 0].decode()
        tensors = [pb_utils.Tensor("OWN", np.full((2, 2), len(script)))] if word == "more" else []
        if word != "less":
            values = np.full((len(script), together), len(script), np.int64 if word == "int64" else np.int32)
            tensors.append(pb_utils.Tensor("VALUE", values))
        response = pb_utils.InferenceResponse(tensors, pb_utils.TritonError("no luck", 3) if word == "error" else None)
        if not word.startswith("send"):
            return response
        send = request.get_response_sender().send
        (threading.Timer(0.01, send, [response, 1]).start if word == "send later" else lambda: send(response, 1))()
"""
SCRIPTS_SPEC = ModelSpec("", (TensorSpec("SCRIPT", "BYTES", (-1, 1)),), (TensorSpec("VALUE", "INT32", (-1, -1)),), 8)


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("word", ["any", "more", "send", "send later", "error", "less", "int64"])
def test_execute_gets_a_request_of_each_client_and_its_answers_are_joined(tmp_path: Path, word: str, together: int) -> None:
    config = "max_batch_size: 8 dynamic_batching {}" if together > 1 else "max_batch_size: 8"
    served = Served(tmp_path, SCRIPTS, config, SCRIPTS_SPEC)
    assert served.model.spec.requests_apart
    texts = np.array([[b"any"], [word.encode()], [word.encode()], [b"any"]], object)

    def values() -> Any:
        return served.session.run({"SCRIPT": texts}, {REQUEST_ROWS: "1,2,1"})["VALUE"].tolist()

    failures = {"error": (InputRefused, "no luck"), "less": (OutputsRefused, "missing"), "int64": (OutputsRefused, "missing")}
    if word in failures:  # and each request runs alone then
        failure, says = failures[word]
        with pytest.raises(failure, match=says):
            values()
    else:
        assert values() == [[rows] * together for rows in (1, 2, 2, 1)]
    served.session.close()


@pytest.mark.slow
def test_a_decoupled_model_answers_from_a_process_of_its_own(tmp_path: Path) -> None:
    version = tmp_path / "parts" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(Path(decoupled_model.__file__).read_text())
    (version.parent / "config.pbtxt").write_text(decoupled_model.CONFIG)
    model = ProcessModel("python", {"model": f"{version}/model.py:TritonPythonModel"}, SPEC).load()
    session = model.open_session(0)
    try:
        assert model.spec.decoupled
        for script, last in (("2 3 !", False), ("thread 2 3!", True)):
            parts = list(session.stream({"SCRIPT": np.array([script.encode()], object)}, {}))
            assert [(int(part["VALUE"][0]), isinstance(part, LastPart)) for part in parts] == [(2, False), (3, last)]
        parts = session.stream({"SCRIPT": np.array([b"error wait !"], object)}, {})
        told = next(parts)
        assert isinstance(told, EarlyFailure)
        assert isinstance(told.error, ExecutionFailed)
        with pytest.raises(ExecutionFailed, match=str(told.error)):
            next(parts)
        parts = session.stream({"SCRIPT": np.array([b"endless !"], object)}, {})
        next(parts)
        parts.close()
        assert [int(part["VALUE"][0]) for part in session.stream({"SCRIPT": np.array([b"4!"], object)}, {})] == [4]
        assert [note.split(":")[0] for note in (version / "notes").read_text().splitlines()] == ["cancelled", "endless"]
    finally:
        session.close()
        model.close()


TELLS = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        groups = [(group["name"], group["kind"], group["count"]) for group in config["instance_group"]]
        self.told = json.dumps([args["model_name"], args["model_instance_name"], config["name"], groups])

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", np.array([self.told], object))])]
"""
TOLD = ModelSpec("", (TensorSpec("SCRIPT", "BYTES", (1,)),), (TensorSpec("TOLD", "BYTES", (1,)),), 0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("", ["parts", "parts_0", "parts", [["parts", "KIND_CPU", 1]]]),
        ('name: "own"', ["own", "own_0", "own", [["own", "KIND_CPU", 1]]]),
        ("instance_group [{ count: 2 }]", ["parts", "parts_0_0", "parts", [["parts_0", "KIND_CPU", 2]]]),
        (
            'instance_group [{ kind: KIND_CPU }, { name: "own" }]',
            ["parts", "parts_0_0", "parts", [["parts_0", "KIND_CPU", 1], ["own", "KIND_CPU", 1]]],
        ),
    ],
)
def test_what_the_configuration_leaves_out_is_filled_in_as_by_triton(tmp_path: Path, config: str, expected: list[Any]) -> None:
    served = Served(tmp_path, TELLS, config, TOLD)
    (told,) = served.session.run({"SCRIPT": np.array([b"any"], object)}, {})["TOLD"]
    assert json.loads(told) == expected
    served.session.close()


def test_objects_are_answered_as_texts_where_texts_are_listed(tmp_path: Path) -> None:
    objects = '[7, None, b"\\xff", "é", 1.5, True]'
    spec = replace(TOLD, outputs=(replace(TOLD.outputs[0], shape=(6,)),))
    served = Served(tmp_path, TELLS.replace("[self.told]", objects), "", spec)
    told = served.session.run({"SCRIPT": np.array([b"any"], object)}, {})["TOLD"]
    assert told.tolist() == ["7", "None", b"\xff", "é", "1.5", "True"]
    served.session.close()


@pytest.mark.parametrize("isolation", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_each_session_is_told_an_instance_of_its_own(tmp_path: Path, isolation: str) -> None:
    write_model(tmp_path, "parts", 'instance_group [{ count: 2 }, { passive: true }, { name: "own" }]', TELLS)
    options = {"model": f"{tmp_path}/parts/1/model.py:TritonPythonModel"}
    process = isolation == "process"
    model: Any = ProcessModel("python", options, TOLD).load() if process else backends.load("python", options, TOLD)
    sessions = [model.open_session(index) for index in (3, 0, 1, 2)]
    try:
        told = [json.loads(session.run({"SCRIPT": np.array([b"any"], object)}, {})["TOLD"][0])[1] for session in sessions]
        assert told == ["parts_0_3", "parts_0_0", "parts_0_1", "own_0"]
    finally:
        for session in sessions:
            session.close()
        model.close()


NUMBERS = """
input [{ name: "x" data_type: TYPE_FP32 dims: [-1, 2] }]
dynamic_batching {
  max_queue_delay_microseconds: 5000
  default_queue_policy { default_timeout_microseconds: 7 }
  priority_levels: 3
  priority_queue_policy { key: 1 value { default_timeout_microseconds: 8 } }
}
version_policy { specific { versions: [1, 3] } }
model_warmup [{ inputs { key: "x" value { dims: [1] } } }]
"""


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("", {}),
        ('default_model_filename: "own.py"', {"default_model_filename": "own.py"}),
        ("version_policy { specific { versions: [3] } }", {"version_policy": {"specific": {"versions": [3]}}}),
        ("max_batch_size: 8 dynamic_batching {}", {"preferred": [8]}),
        ("max_batch_size: 8 dynamic_batching { preferred_batch_size: [4] }", {"preferred": [4]}),
        (
            "optimization { output_pinned_memory {} priority: PRIORITY_MAX }",
            {"pinned": [True, False], "priority": "PRIORITY_MAX"},
        ),
    ],
)
def test_what_initialize_gets_has_what_triton_fills_in(tmp_path: Path, config: str, expected: dict[str, Any]) -> None:
    (tmp_path / "config.pbtxt").write_text(config)
    said = model_config(tmp_path / "config.pbtxt")
    optimization = said["optimization"]
    found = {
        "default_model_filename": said["default_model_filename"],
        "version_policy": said["version_policy"],
        "preferred": said.get("dynamic_batching", {}).get("preferred_batch_size"),
        "pinned": [optimization[f"{of}_pinned_memory"]["enable"] for of in ("input", "output")],
        "priority": optimization["priority"],
        "others": (optimization["gather_kernel_buffer_threshold"], optimization["eager_batching"]),
    }
    filled = {
        "default_model_filename": "model.py",
        "version_policy": {"latest": {"num_versions": 1}},
        "preferred": None,
        "pinned": [True, True],
        "priority": "PRIORITY_DEFAULT",
        "others": (0, False),
    }
    assert found == filled | expected


def test_numbers_of_64_bits_are_numbers_in_what_initialize_gets(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text(NUMBERS)
    config = model_config(tmp_path / "config.pbtxt")
    batching = config["dynamic_batching"]
    assert config["input"][0]["dims"] == [-1, 2]
    assert (batching["max_queue_delay_microseconds"], batching["priority_levels"]) == (5000, 3)
    assert batching["default_queue_policy"]["default_timeout_microseconds"] == 7
    assert batching["priority_queue_policy"]["1"]["default_timeout_microseconds"] == 8
    assert config["version_policy"]["specific"]["versions"] == [1, 3]
    assert config["model_warmup"][0]["inputs"]["x"]["dims"] == [1]


SEES = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        told = repr((request.correlation_id(), request.flags(), request.parameters()))
        response = pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", np.array([told], object))])
        return [response]
"""
IN_PARTS = SEES.replace("return [response]", "request.get_response_sender().send(response, flags=1)")


@pytest.mark.parametrize("decoupled", [False, True])
def test_what_is_said_of_a_sequence_is_no_parameter_of_the_model(tmp_path: Path, decoupled: bool) -> None:
    config = "model_transaction_policy { decoupled: true }" if decoupled else "max_batch_size: 0"
    served = Served(tmp_path, IN_PARTS if decoupled else SEES, config, TOLD)

    def told(**parameters: object) -> Any:
        inputs = {"SCRIPT": np.array([b"any"], object)}
        session = served.session
        answer = next(session.stream(inputs, parameters)) if decoupled else session.run(inputs, parameters)
        return ast.literal_eval(answer["TOLD"][0])

    assert told() == (0, 0, "{}")
    assert told(sequence_id=42, sequence_start=True, a=1) == (42, 1, '{"a": 1}')
    assert told(sequence_id="s", sequence_start=True, sequence_end=True) == ("s", 3, "{}")
    assert told(sequence_id=7, sequence_start=False, sequence_end=True) == (7, 2, "{}")
    assert told(sequence_id=-1) == (2**64 - 1, 0, "{}")  # as an int64_param of gRPC writes it
    with pytest.raises(InputRefused, match=r"'sequence_id': got 1\.5, expected an integer or a string"):
        told(sequence_id=1.5)
    with pytest.raises(InputRefused, match="'sequence_id': got True, expected an integer or a string"):
        told(sequence_id=True)
    with pytest.raises(InputRefused, match="'sequence_end': got 1, expected true or false"):
        told(sequence_end=1)
    served.session.close()


CODES = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request, len(requests)) for request in requests]

    def answer(self, request, together):
        elements = pb_utils.get_input_tensor_by_name(request, "CODE").as_numpy()
        codes = set(elements.ravel().tolist()) - {b"1", b""}
        if b"KEEP" in codes:
            self.kept = request.get_response_sender()
            return None
        if codes:
            code = getattr(pb_utils.TritonError, codes.pop().decode())
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("said so", code))
        left, one = np.full(elements.shape, request.timeout()), np.ones(elements.shape, np.int64)
        outputs = {"LEFT_US": left, "ROW": one.cumsum(0), "TOGETHER": one * together}
        return pb_utils.InferenceResponse([pb_utils.Tensor(*output) for output in outputs.items()])
"""
CODES_CONFIG = """
max_batch_size: 8
dynamic_batching {}
input [{ name: "CODE" data_type: TYPE_STRING dims: [1] }]
output [
  { name: "LEFT_US" data_type: TYPE_INT64 dims: [1] },
  { name: "ROW" data_type: TYPE_INT64 dims: [1] },
  { name: "TOGETHER" data_type: TYPE_INT64 dims: [1] }
]
"""

SPARE = """
import numpy as np


class Spare:
    def predict(self, inputs):
        return dict.fromkeys(("LEFT_US", "ROW", "TOGETHER"), np.zeros(inputs["CODE"].shape, np.int64))
"""

SUMS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        (request,) = requests
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        own, flags = request.correlation_id(), request.flags()
        before = 0 if flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START else self.sums[own]
        sums = before + x.cumsum(axis=0)
        self.sums[own] = sums[-1, 0]
        if flags & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
            del self.sums[own]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("SUM", sums)])]
"""
SUMS_CONFIG = """
max_batch_size: 8
input [{ name: "X" data_type: TYPE_INT64 dims: [1] }]
output [{ name: "SUM" data_type: TYPE_INT64 dims: [1] }]
"""


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of the model in a thread, in a process, and beside a backend that is dearer and takes all: `spared`.

    And of `sums`, which keeps a sum for each sequence.
    """
    folder = tmp_path_factory.mktemp("codes")
    write_model(folder, "codes", CODES_CONFIG, CODES)
    model = f"{folder}/codes/1/model.py:TritonPythonModel"
    (folder / "spare.py").write_text(SPARE)
    spare = {"kind": "python", "name": "spare", "model": f"{folder}/spare.py:Spare", "usd_per_hour": 9}
    tensors = {
        "inputs": [{"name": "CODE", "datatype": "BYTES", "shape": [-1, 1]}],
        "outputs": [{"name": name, "datatype": "INT64", "shape": [-1, 1]} for name in ("LEFT_US", "ROW", "TOGETHER")],
    }
    models = [
        {
            "name": name,
            "max_rows": 8,
            **tensors,
            "batching": {"policy": "fixed", "max_delay_ms": 50},
            "slo": {"p99_ms": 5000},
            "routing": {"ejection": {"consecutive_failures": 3}},
            "backends": [{"kind": "python", "model": model, "isolation": isolation, "usd_per_hour": 1}, *others],
        }
        for name, isolation, others in (("thread", "thread", ()), ("process", "process", ()), ("spared", "thread", (spare,)))
    ]
    write_model(folder, "sums", SUMS_CONFIG, SUMS)
    sums = {
        "name": "sums",
        "inputs": [{"name": "X", "datatype": "INT64", "shape": [-1, 1]}],
        "outputs": [{"name": "SUM", "datatype": "INT64", "shape": [-1, 1]}],
        "backends": [{"kind": "python", "model": f"{folder}/sums/1/model.py:TritonPythonModel"}],
    }
    with serving(folder, yaml.safe_dump({"models": [*models, sums]})) as served:
        yield served.url


def asked(url: str, model: str, code: str, *, rows: int = 1, **parameters: object) -> tuple[int, dict[str, Any]]:
    return posted(url, model, {"name": "CODE", "datatype": "BYTES", "shape": [rows, 1], "data": [code] * rows}, parameters)


def posted(url: str, model: str, tensor: dict[str, Any], parameters: dict[str, object]) -> tuple[int, dict[str, Any]]:
    body = {"inputs": [tensor], "parameters": parameters}
    connection = http.client.HTTPConnection(url, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request("POST", f"/v2/models/{model}/infer", json.dumps(body))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


REFUSALS = {"NOT_FOUND": 404, "INVALID_ARG": 400, "UNSUPPORTED": 501, "ALREADY_EXISTS": 400, "CANCELLED": 499}


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("code", [*REFUSALS, "UNAVAILABLE", "INTERNAL", "UNKNOWN"])
def test_an_error_is_of_the_request_that_it_is_said_of(codes: str, isolation: str, code: str) -> None:
    status = {"UNAVAILABLE": 503, **REFUSALS}.get(code, 500)
    with ThreadPoolExecutor() as pool:
        given = list(pool.map(lambda each: asked(codes, isolation, each), ["", code, ""]))
    assert [answer[0] for answer in given] == [200, status, 200], given
    assert "said so" in given[1][1]["error"]


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_each_client_is_a_request_of_its_own_in_one_call(codes: str, isolation: str) -> None:
    until, together = time.monotonic() + TIMEOUT_S, 1
    while together == 1:
        assert time.monotonic() < until
        with ThreadPoolExecutor() as pool:
            given = list(pool.map(lambda rows: asked(codes, isolation, "", rows=rows)[1]["outputs"], (1, 3, 2, 2)))
        assert [answer[1]["data"] for answer in given] == [[1], [1, 2, 3], [1, 2], [1, 2]]
        together = max(answer[2]["data"][0] for answer in given)


def test_a_refusal_is_for_the_client_and_no_fault_of_the_backend(codes: str) -> None:
    until = time.monotonic() + TIMEOUT_S
    while asked(codes, "spared", "NOT_FOUND")[0] != REFUSALS["NOT_FOUND"]:  # it was slow on a busy machine, and is ejected
        assert time.monotonic() < until
    assert [asked(codes, "spared", code)[0] for code in REFUSALS] == [*REFUSALS.values()]


@pytest.mark.parametrize("code", ["UNAVAILABLE", "INTERNAL", "UNKNOWN"])
def test_what_another_backend_may_do_is_done_there(codes: str, code: str) -> None:
    assert asked(codes, "spared", code)[0] == 200


def test_a_request_tells_what_time_is_left(codes: str) -> None:
    def left_us(**parameters: int) -> int:
        return int(asked(codes, "process", "", **parameters)[1]["outputs"][0]["data"][0])

    assert left_us() == 0
    assert 0 < left_us(timeout=5_000_000) < 5_000_000


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_model_that_keeps_its_sender_is_left_at_the_deadline(codes: str, isolation: str) -> None:
    status, answer = asked(codes, isolation, "KEEP", timeout=200_000)
    assert (status, answer["error"].split(",")[0]) == (504, f"{isolation}:1/python: still running at the deadline")
    assert asked(codes, isolation, "")[0] == 200


def test_a_model_keeps_a_state_for_each_sequence(codes: str) -> None:
    def summed(sequence: int | str, x: int, **flags: object) -> tuple[int, dict[str, Any]]:
        tensor = {"name": "X", "datatype": "INT64", "shape": [1, 1], "data": [x]}
        return posted(codes, "sums", tensor, {"sequence_id": sequence, **flags})

    given = [
        summed(1, 1, sequence_start=True),
        summed("two", 10, sequence_start=True, sequence_end=False),
        summed(1, 2),
        summed("two", 20, sequence_end=True),
        summed(1, 3),
        summed(1, 5, sequence_start=True),
    ]
    # 1 + 2 + 3, then anew; 10 + 20
    assert [answer["outputs"][0]["data"] for _, answer in given] == [[1], [10], [3], [30], [6], [5]]
    assert summed("two", 1)[0] == 500  # it has ended
    status, answer = summed(1, 1, sequence_start="yes")
    assert status == 400
    assert "parameter 'sequence_start': got 'yes', expected true or false" in answer["error"]
    many = {"name": "X", "datatype": "INT64", "shape": [33, 1], "data": [*range(33)]}  # each part would begin, or end, it
    for flag in ("sequence_start", "sequence_end"):
        status, answer = posted(codes, "sums", many, {"sequence_id": 3, flag: True})
        assert (status, answer) == (400, {"error": f"parameter '{flag}': got 33 rows, expected at most 32 (max_rows) with it"})


def test_refusals_are_errors_of_the_gateway() -> None:
    assert set(get_args(Refusal)) <= {code.value for code in Code}


def test_a_code_that_is_none_is_refused() -> None:
    assert pb_utils.TritonError("x", 3).code() is pb_utils.TritonError.INVALID_ARG
    assert pb_utils.TritonError("x").code() is pb_utils.TritonError.INTERNAL
    with pytest.raises(ValueError, match="99"):
        pb_utils.TritonError("x", 99)


@pytest.mark.parametrize("elements", [[b"a", b"\0\0", b""], ["text", 7]])
def test_bytes_are_written_as_triton_does(elements: list[Any]) -> None:
    written = pb_utils.serialize_byte_tensor(np.array(elements, object))
    read = pb_utils.deserialize_bytes_tensor(written)
    assert read.tolist() == [each if isinstance(each, bytes) else str(each).encode() for each in elements]
    assert written == serialize_byte_tensor(np.array(elements, object)).item()


def test_what_a_request_tells_is_of_the_types_that_triton_gives() -> None:
    x = pb_utils.Tensor("x", np.zeros((2, 3)))
    assert x.shape() == [2, 3]
    assert pb_utils.Tensor("texts", [b"a\0", b"b"]).as_numpy().tolist() == [b"a\0", b"b"]
    request = pb_utils.InferenceRequest([x], ["y", "z"])
    assert request.requested_output_names() == {"y", "z"}
    assert request.requested_output_names() & {"y"}


def test_types_are_named_as_by_triton() -> None:
    assert [pb_utils.numpy_to_triton_type(each) for each in (np.bool_, np.float32, np.object_)] == [1, 11, 13]
    assert pb_utils.triton_to_numpy_type(11) is np.float32
    assert pb_utils.TRITON_STRING_TO_NUMPY["TYPE_STRING"] is np.object_


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "bfloat16"])
@pytest.mark.parametrize("as_capsule", [True, False])
def test_tensors_go_to_torch_and_come_from_it_by_dlpack(dtype: str, as_capsule: bool) -> None:
    torch = pytest.importorskip("torch")
    given = torch.tensor([[1, 0], [3, 2]], dtype=getattr(torch, dtype))
    ours = pb_utils.Tensor.from_dlpack("y", torch.utils.dlpack.to_dlpack(given) if as_capsule else given)
    assert (ours.name(), str(ours.as_numpy().dtype)) == ("y", dtype)
    back = torch.utils.dlpack.from_dlpack(ours.to_dlpack() if as_capsule else ours)
    assert back.dtype == given.dtype
    assert back.tolist() == given.tolist()
