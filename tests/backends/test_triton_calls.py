"""What the Triton backend sends and when it hangs up, against a double of the server's gRPC service that notes every call."""

import fcntl
import mmap
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

import backends
from backends.base import (
    DEADLINE_NS,
    TRACEPARENT,
    TRACESTATE,
    ExecutionFailed,
    InputRefused,
    LoadFailed,
    Model,
    ModelSpec,
    OutputsRefused,
    RunCancelled,
    SessionLost,
    Tensors,
    TensorSpec,
)
from backends.datatypes import datatype_of
from backends.early_failure import EarlyFailure
from backends.triton_shared_memory import WORTH_BYTES

TIMEOUT_S = 10.0
SPEC = ModelSpec("", (TensorSpec("X", "FP32", (-1, 2)),), (TensorSpec("Y", "FP32", (-1, 2)),), 8)
WORDS = ModelSpec("", (TensorSpec("X", "BYTES", (-1, 2)),), (TensorSpec("Y", "BYTES", (-1, 2)),), 8)
X = np.array([[1, 2]], np.float32)
LARGE = WORTH_BYTES // 4  # elements of FP32
NONE: Mapping[str, object] = MappingProxyType({})


class Double(service_pb2_grpc.GRPCInferenceServiceServicer):
    """An echo of one input. calls: of either kind, with the time that each client left for it, and its metadata."""

    def __init__(self) -> None:
        self.ready = True
        self.before_ready: Callable[[], object] = lambda: None
        self.port = 0
        self.calls: list[service_pb2.ModelInferRequest] = []
        self.left_s: list[float] = []
        self.metadata: list[dict[str, str]] = []
        self.before_answer: Callable[[], None] = lambda: None
        self.refusal: tuple[grpc.StatusCode, str] | None = None  # of any call: of a stream the server's, not the model's
        self.datatype = "FP32"
        self.raw: Callable[[bytes], bytes] = lambda given: given  # the bytes of an answer, by those of its input
        self.inputs = {"X": [-1, 2]}
        self.shapes = {"Y": [-1, 2]}  # of the outputs
        self.answer: Tensors = {}  # in place of the echo
        self.regions: dict[str, mmap.mmap] = {}
        self.in_use = 0  # so many times is a region found to be
        self.decoupled = False
        self.config = model_config_pb2.ModelConfig(max_batch_size=8)
        self.configs: dict[str, model_config_pb2.ModelConfig] = {}  # of others, by name
        self.versions_asked: dict[str, str] = {}  # for the configurations
        self.configs_asked = 0
        self.parts: list[float | str | None] = []  # of a stream's answer: a value, an error, or the empty end
        self.rows = 1  # of a part
        self.parts_sent = 0
        self.before_part: Callable[[], None] = lambda: None
        self.hung_up = threading.Event()  # the client of a stream has

    def ModelReady(self, request: Any, context: Any) -> Any:
        self.before_ready()
        return service_pb2.ModelReadyResponse(ready=self.ready)

    def ModelMetadata(self, request: Any, context: Any) -> Any:
        def tensors(shapes: dict[str, list[int]]) -> list[Any]:
            tensor = service_pb2.ModelMetadataResponse.TensorMetadata
            return [tensor(name=name, datatype=self.datatype, shape=shape) for name, shape in shapes.items()]

        inputs, outputs = tensors(self.inputs), tensors(self.shapes)
        return service_pb2.ModelMetadataResponse(name=request.name, inputs=inputs, outputs=outputs)

    def ModelConfig(self, request: Any, context: Any) -> Any:
        self.versions_asked[request.name] = request.version
        self.configs_asked += 1
        self.config.model_transaction_policy.decoupled = self.decoupled
        return service_pb2.ModelConfigResponse(config=self.configs.get(request.name, self.config))

    def ModelInfer(self, request: Any, context: Any) -> Any:
        self.calls.append(request)
        self.left_s.append(context.time_remaining())
        self.metadata.append(dict(context.invocation_metadata()))
        self.before_answer()
        if self.refusal is not None:
            context.abort(*self.refusal)
        for output in request.outputs:
            region = dict(output.parameters).get("shared_memory_region")
            if region is not None and region.string_param not in self.regions:  # the words of Triton 2.51
                context.abort(grpc.StatusCode.NOT_FOUND, f"Unable to find shared memory region: '{region.string_param}'")
        response = service_pb2.ModelInferResponse(model_name=request.model_name)
        if not self.answer:
            response.outputs.add(name="Y", datatype=self.datatype, shape=request.inputs[0].shape)
            response.raw_output_contents.append(self.raw(request.raw_input_contents[0]))
        for name, array in self.answer.items():
            response.outputs.add(name=name, datatype=datatype_of(array), shape=array.shape)
            (asked,) = (output.parameters for output in request.outputs if output.name == name)
            response.raw_output_contents.append(self._left_of(array.tobytes(), name, asked, context))
        return response

    def _left_of(self, raw: bytes, name: str, asked: Any, context: Any) -> bytes:
        """What of an output's bytes the message has, as with Triton 2.51: nothing of one that goes to a region."""
        if "shared_memory_region" not in asked:
            return raw
        at, size = asked["shared_memory_offset"].int64_param, asked["shared_memory_byte_size"].int64_param
        if len(raw) > size:
            words = f"request for output '{name}' ({size} bytes) should be at least {len(raw)} bytes to hold the results"
            context.abort(grpc.StatusCode.INTERNAL, f"shared memory size specified with the {words}")
        self.regions[asked["shared_memory_region"].string_param][at : at + len(raw)] = raw
        return b""

    def SystemSharedMemoryRegister(self, request: Any, context: Any) -> Any:
        with open(f"/dev/shm{request.key}", "r+b") as file:
            self.regions[request.name] = mmap.mmap(file.fileno(), request.byte_size)
        return service_pb2.SystemSharedMemoryRegisterResponse()

    def SystemSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        status = service_pb2.SystemSharedMemoryStatusResponse()
        for name in self.regions:
            status.regions[name].name = name
        return status

    def SystemSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        if self.in_use:  # the words of Triton 2.50 and 2.51
            self.in_use -= 1
            words = f"Cannot unregister shared memory region '{request.name}', it is currently in use."
            context.abort(grpc.StatusCode.INTERNAL, words)
        self.regions.pop(request.name).close()
        return service_pb2.SystemSharedMemoryUnregisterResponse()

    def ModelStreamInfer(self, requests: Any, context: Any) -> Any:
        context.add_callback(self.hung_up.set)
        for request in requests:
            self.calls.append(request)
            self.metadata.append(dict(context.invocation_metadata()))
            if self.refusal is not None:
                context.abort(*self.refusal)
            for part in self.parts:
                self.before_part()
                if not context.is_active():
                    return
                message = service_pb2.ModelStreamInferResponse()
                message.infer_response.parameters["triton_final_response"].bool_param = part is None
                if isinstance(part, str):
                    message.error_message = part
                elif part is not None:
                    message.infer_response.outputs.add(name="Y", datatype="FP32", shape=[self.rows, 2])
                    message.infer_response.raw_output_contents.append(np.full((self.rows, 2), part, np.float32).tobytes())
                self.parts_sent += 1
                yield message

    def connected(self, connections: int) -> bool:
        """Wait until so many clients are connected."""
        until = time.monotonic() + TIMEOUT_S
        while self._connections() != connections:
            if time.monotonic() > until:
                return False
            time.sleep(0.005)
        return True

    def _connections(self) -> int:
        found = psutil.Process().net_connections("tcp")
        return sum(
            bool(each.laddr) and each.laddr.port == self.port and each.status == psutil.CONN_ESTABLISHED for each in found
        )


@contextmanager
def serving() -> Iterator[Double]:
    with ThreadPoolExecutor(8) as threads:
        server = grpc.server(threads)
        double = Double()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(double, server)
        double.port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield double
        finally:
            server.stop(0).wait(TIMEOUT_S)
            for region in double.regions:
                lock_of(region).unlink(missing_ok=True)


def lock_of(region: str) -> Path:
    return Path(f"/dev/shm/{region}.lock")


@pytest.fixture
def double() -> Iterator[Double]:
    with serving() as double:
        yield double


def load(double: Double, **options: Any) -> Model:
    return backends.load("triton", {"url": f"127.0.0.1:{double.port}", "model": "m", **options}, SPEC)


def test_parameters_arrive_as_what_they_are(double: Double) -> None:
    session = load(double).open_session(0)
    session.run({"X": X}, {"flag": True, "count": 3, "negative": -1, "share": 0.5, "word": "3"})
    session.close()
    sent = {name: (value.WhichOneof("parameter_choice"), value) for name, value in double.calls[0].parameters.items()}
    assert {name: (kind, getattr(value, kind)) for name, (kind, value) in sent.items()} == {
        "flag": ("bool_param", True),
        "count": ("int64_param", 3),
        "negative": ("int64_param", -1),
        "share": ("double_param", 0.5),
        "word": ("string_param", "3"),
    }


def test_what_triton_takes_for_itself_is_ours_and_the_time_that_is_left(double: Double) -> None:
    session = load(double).open_session(0)
    deadline_ns = time.monotonic_ns() + 5_000_000_000
    own = {"own": 2, "headers": "x", "binary_data_output": True}  # which Triton hands on, too
    session.run({"X": X}, {"priority": 1, "timeout": 9, "triton_x": 1, DEADLINE_NS: deadline_ns, **own})
    session.close()
    sent = double.calls[0].parameters
    assert sorted(sent) == sorted([*own, "timeout"])
    assert 4_000_000 < sent["timeout"].int64_param <= 5_000_000  # µs that are left, and not the client's 9


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_model_is_told_of_the_sequence(double: Double, decoupled: bool) -> None:
    double.decoupled, double.parts = decoupled, [None]
    session = load(double).open_session(0)
    for told in ({"sequence_id": 5, "sequence_start": True}, {"sequence_id": "five", "sequence_end": True}):
        answer(session, decoupled, told)
    session.close()
    first, second = (call.parameters for call in double.calls)
    assert (first["sequence_id"].int64_param, first["sequence_start"].bool_param) == (5, True)
    assert (second["sequence_id"].string_param, second["sequence_end"].bool_param) == ("five", True)


@pytest.mark.parametrize(("urls", "sessions", "told"), [(1, 1, 0), (1, 2, 1), (2, 1, 1)])
def test_a_warning_says_once_that_requests_of_a_sequence_overtake_each_other(
    double: Double, urls: int, sessions: int, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(double, url=[f"127.0.0.1:{double.port}"] * urls)
    opened = [model.open_session(index) for index in range(sessions)]
    opened[0].run({"X": X}, {"sequence_id": 0})
    assert "sequences" not in caplog.text
    for _ in range(2):
        opened[0].run({"X": X}, {"sequence_id": 5})
        opened.append(model.open_session(sessions - 1))
    assert caplog.text.count("m gets requests of sequences, which overtake each other") == told
    for session in opened:
        session.close()


def test_an_ensemble_of_a_model_that_batches_sequences_is_refused_as_the_model_is(double: Double) -> None:
    steps = {"m": [("tokens", -1), ("inner", 2)], "inner": [("counter", -1)]}
    for name, called in steps.items():
        config = double.configs[name] = model_config_pb2.ModelConfig(max_batch_size=8)
        for step, version in called:
            config.ensemble_scheduling.step.add(model_name=step, model_version=version)
    load(double)
    assert double.versions_asked == {"m": "", "tokens": "", "inner": "2", "counter": ""}
    double.configs["counter"] = model_config_pb2.ModelConfig(sequence_batching={})
    with pytest.raises(LoadFailed, match="'m' calls 'inner', which calls 'counter', which batches sequences, whose requests"):
        load(double)


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_server_is_told_of_the_trace_as_a_header_is(double: Double, decoupled: bool) -> None:
    double.decoupled, double.parts = decoupled, [None]
    session = load(double).open_session(0)
    for told in ({TRACEPARENT: "00-a-b-01", TRACESTATE: "vendor=1"}, {TRACEPARENT: "00-a-c-01"}, {}):
        answer(session, decoupled, told)
    session.close()
    names = ("traceparent", "tracestate")
    assert [[sent.get(name) for name in names] for sent in double.metadata] == [
        ["00-a-b-01", "vendor=1"],
        ["00-a-c-01", None],
        [None, None],
    ]
    assert not any("gateway" in name for call in double.calls for name in call.parameters)


@pytest.mark.parametrize(("deadline_s", "left_s"), [(None, 20.0), (5.0, 5.0), (60.0, 20.0)])
def test_the_server_is_told_how_long_there_is(double: Double, deadline_s: float | None, left_s: float) -> None:
    session = load(double, timeout_s=20.0).open_session(0)
    session.run({"X": X}, {DEADLINE_NS: time.monotonic_ns() + round(deadline_s * 1e9)} if deadline_s else {})
    session.close()
    assert double.left_s[0] == pytest.approx(left_s, abs=2.0)


def test_model_version_and_tensors_are_named(double: Double) -> None:
    session = load(double, model_version="7").open_session(0)
    outputs = session.run({"X": X}, {})
    session.close()
    (call,) = double.calls
    assert (call.model_name, call.model_version) == ("m", "7")
    assert [(each.name, each.datatype, list(each.shape)) for each in call.inputs] == [("X", "FP32", [1, 2])]
    assert [each.name for each in call.outputs] == ["Y"]
    assert list(call.raw_input_contents) == [X.tobytes()]
    np.testing.assert_array_equal(outputs["Y"], X)


KEPT_APART = (
    "keeps the rows of several requests apart, which share a batch here: if they change each other's answers, set max_rows"
)


@pytest.mark.parametrize(
    ("config", "max_rows", "told"),
    [
        ("", 8, True),
        ("dynamic_batching {}", 8, False),
        ('backend: "python" dynamic_batching {}', 8, True),
        ("", 0, False),
        ("model_transaction_policy { decoupled: true }", 8, False),
    ],
)
def test_a_model_whose_requests_triton_keeps_apart_is_told_and_run_a_request_at_a_time_if_asked(
    double: Double, config: str, max_rows: int, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    text_format.Merge(config, double.config)
    double.decoupled = double.config.model_transaction_policy.decoupled
    with caplog.at_level("INFO"):
        model = backends.load("triton", {"url": f"127.0.0.1:{double.port}", "model": "m"}, replace(SPEC, max_rows=max_rows))
    assert (KEPT_APART in caplog.text) == told
    assert model.spec.max_rows == max_rows
    if not double.decoupled:
        session = model.open_session(0)
        assert session.run({"X": np.repeat(X, 3, 0)}, {})["Y"].shape == (3, 2)
        session.close()


@pytest.mark.parametrize("stated", [False, True])
def test_an_open_first_dimension_is_of_rows_where_triton_or_the_operator_says_so(
    double: Double, stated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    double.config.max_batch_size = 0
    with caplog.at_level("INFO"):
        model = backends.load("triton", {"url": f"127.0.0.1:{double.port}", "model": "m"}, replace(SPEC, rows_stated=stated))
    assert model.spec.max_rows == (8 if stated else 0)
    assert ("'m' has max_batch_size 0: each request is a call of its own, whole" in caplog.text) != stated
    session = model.open_session(0)
    assert session.run({"X": np.repeat(X, 40, 0)}, {})["Y"].shape == (40, 2)
    session.close()


@pytest.mark.parametrize("labels", [(), ("cat", "dog")])
def test_labels_that_only_the_server_has_are_told_to_be_missing(
    double: Double, labels: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    double.config.output.add(name="Y", label_filename="labels.txt")
    spec = replace(SPEC, outputs=(replace(SPEC.outputs[0], labels=labels),))
    model = backends.load("triton", {"url": f"127.0.0.1:{double.port}", "model": "m"}, spec)
    assert ("has files of labels for ['Y'], which are not read from there" in caplog.text) == (not labels)
    assert model.spec.outputs[0].labels == labels


def test_words_come_back_as_they_went(double: Double) -> None:
    double.datatype = "BYTES"
    words = np.array([[b"a", b""], [b"\xff" * 300, b"\x00"]], object)
    model = backends.load("triton", {"url": f"127.0.0.1:{double.port}", "model": "m"}, WORDS)
    session = model.open_session(0)
    assert session.run({"X": words}, {})["Y"].tolist() == words.tolist()
    session.close()


@pytest.mark.parametrize(
    ("spec", "inputs", "raw"),
    [
        (SPEC, X, b"\0" * 7),
        (WORDS, np.array([[b"ab", b"cd"]], object), b"\2\0\0\0ab\5\0\0\0cd"),  # a length that is not there
        (WORDS, np.array([[b"ab", b"cd"]], object), b"\2\0\0\0ab\2\0\0\0cd\0"),
        (WORDS, np.array([[b"ab", b"cd"]], object), b"\2\0\0\0ab\2\0"),
    ],
    ids=["numbers", "a word cut off", "one byte more", "a length cut off"],
)
def test_bytes_that_are_not_those_of_the_shape_fail_the_run(
    double: Double, spec: ModelSpec, inputs: np.ndarray, raw: bytes
) -> None:
    double.datatype = spec.outputs[0].datatype
    double.raw = lambda _: raw
    session = backends.load("triton", {"url": f"127.0.0.1:{double.port}", "model": "m"}, spec).open_session(0)
    with pytest.raises(ExecutionFailed, match=rf"output 'Y': the {len(raw)} bytes that came are no {double.datatype} \[1, 2\]"):
        session.run({"X": inputs}, {})
    session.close()


def sharing(double: Double) -> Any:
    """A session of `sharing_model`."""
    return sharing_model(double).open_session(0)


def sharing_model(double: Double) -> Model:
    """Its output BIG passes through shared memory, and SMALL, behind it, in the message."""
    double.shapes = {"BIG": [-1, LARGE], "SMALL": [-1, 1]}
    spec = replace(SPEC, outputs=())
    options = {"url": f"127.0.0.1:{double.port}", "model": "m", "shared_memory": True}
    return backends.load("triton", options, spec)


def test_an_output_in_the_message_may_come_behind_one_in_shared_memory(double: Double) -> None:
    session = sharing(double)
    for value in (1, 2):
        double.answer = {"BIG": np.full((1, LARGE), value, np.float32), "SMALL": np.full((1, 1), -value, np.float32)}
        outputs = session.run({"X": X}, {})
        assert all((outputs[name] == array).all() for name, array in double.answer.items())
    double.answer = {name: double.answer[name] for name in ("SMALL", "BIG")}
    assert session.run({"X": X}, {})["SMALL"].tolist() == [[-2]]
    double.in_use = 2  # by the call that was just answered
    session.close()
    assert not double.regions


def test_what_the_model_gives_is_read_from_shared_memory_and_not_what_it_declares(double: Double) -> None:
    session = sharing(double)
    double.answer = {"BIG": np.full((1, LARGE), 9, np.float32), "SMALL": np.zeros((1, 1), np.float32)}
    session.run({"X": X}, {})  # of another client
    double.answer["BIG"] = np.full((1, LARGE), 3, np.float16)
    assert session.run({"X": X}, {})["BIG"].tolist() == [[3] * LARGE]
    double.answer["BIG"] = np.full((1, 7), 3, np.float32)
    with pytest.raises(OutputsRefused, match=r"'BIG': expected shape .* the model gave shape \[1, 7\]"):
        session.run({"X": X}, {})
    double.answer["BIG"] = np.full((1, 7), b"word", object)
    with pytest.raises(OutputsRefused, match=r"'BIG': expected FP32, the model gave object: .* or declare BYTES"):
        session.run({"X": X}, {})
    session.close()


@pytest.mark.parametrize(
    ("code", "details", "regions"),
    [
        ("INVALID_ARGUMENT", "no such user", 1),
        ("INTERNAL", "no luck", 1),
        ("INTERNAL", "Received RST_STREAM with error code 2", 3),
        ("UNKNOWN", "no luck", 3),
    ],
)
def test_a_region_serves_again_where_the_server_has_ended_the_call(
    double: Double, code: str, details: str, regions: int
) -> None:
    session = sharing(double)
    double.refusal = grpc.StatusCode[code], details
    for _ in range(3):
        with pytest.raises(ExecutionFailed, match=details):
            session.run({"X": X}, {})
    assert len(double.regions) == regions
    session.close()


def test_a_region_that_another_client_has_unregistered_is_reserved_anew(double: Double) -> None:
    session = sharing(double)
    double.answer = {"BIG": np.full((1, LARGE), 9, np.float32), "SMALL": np.zeros((1, 1), np.float32)}
    session.run({"X": X}, {})
    (first,) = double.regions
    double.regions.clear()
    outputs = session.run({"X": X}, {"own": 2, DEADLINE_NS: time.monotonic_ns() + 5_000_000_000})
    assert (outputs["BIG"] == 9).all()
    assert first not in double.regions
    _, refused, again = double.calls
    assert sorted(again.parameters) == sorted(refused.parameters) == ["own", "timeout"]
    assert max(double.left_s[1:]) < 6  # of timeout_s: 30
    double.before_answer = double.regions.clear  # again and again
    with pytest.raises(SessionLost, match="Unable to find shared memory region"):
        session.run({"X": X}, {})
    assert len(double.calls) == 5
    session.close()


def test_what_a_session_leaves_registered_is_unregistered_by_those_after_it_or_told(
    double: Double, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0
    monkeypatch.setattr("backends.triton_shared_memory.time", SimpleNamespace(monotonic=lambda: now_s))
    model = sharing_model(double)

    def lose() -> None:
        """A session, whose call may go on at the server."""
        session = model.open_session(0)
        double.refusal = grpc.StatusCode.UNKNOWN, "no luck"
        with pytest.raises(ExecutionFailed, match="no luck"):
            session.run({"X": X}, {})
        session.close()

    lose()
    (first,) = double.regions
    now_s = 61.0
    double.in_use = 1  # that call takes longer still
    model.open_session(0).close()
    assert [*double.regions] == [first]
    now_s = 122.0
    model.open_session(0).close()
    assert not double.regions
    lose()
    (second,) = double.regions
    model.close()
    assert f"triton 127.0.0.1:{double.port}: regions {second} of shared memory stay registered there" in caplog.text
    assert first not in caplog.text
    caplog.clear()
    model = sharing_model(double)  # loaded again by the same process
    lose()
    now_s = 183.0
    lose()
    assert second not in double.regions
    (lock,) = map(lock_of, double.regions)
    double.regions.clear()  # as the server was started again
    model.close()
    assert "stay registered" not in caplog.text
    assert not lock.exists()


def test_what_a_process_that_is_gone_has_left_registered_is_unregistered_when_its_calls_have_ended(
    double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr("backends.triton_shared_memory.time", SimpleNamespace(monotonic=lambda: now_s))
    gone, alive, unknown, anothers = (f"{kind}-1-{secrets.token_hex(6)}" for kind in (*["gateway"] * 3, "client"))
    double.regions = {name: mmap.mmap(-1, 1) for name in (gone, alive, unknown, anothers)}
    double.answer = {"BIG": np.full((1, LARGE), 9, np.float32), "SMALL": np.zeros((1, 1), np.float32)}
    url = f"127.0.0.1:{double.port}"
    forgotten, elsewhere, made = (f"gateway-1-{secrets.token_hex(6)}" for _ in range(3))  # which the server does not list
    for name in (gone, anothers, forgotten):
        lock_of(name).write_text(url)
    lock_of(elsewhere).write_text("elsewhere:8001")
    lock_of(made).touch()
    with lock_of(alive).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(url)
        lock.flush()
        session = sharing(double)
        session.run({"X": X}, {})
        (own,) = {*double.regions} - {gone, alive, unknown, anothers}
        assert not lock_of(forgotten).exists()
        now_s = 59.0
        session.run({"X": X}, {})
        assert gone in double.regions
        now_s = 61.0
        session.run({"X": X}, {})
        assert {*double.regions} == {alive, unknown, anothers, own}
        assert not lock_of(gone).exists()
    now_s = 122.0
    double.answer = {name: np.repeat(array, 2, 0) for name, array in double.answer.items()}
    session.run({"X": np.repeat(X, 2, 0)}, {})  # takes a larger region: looks again
    now_s = 183.0
    session.close()
    assert {*double.regions} == {unknown, anothers}
    for name in (elsewhere, made):
        lock_of(name).unlink()
    assert not lock_of(own).exists()


def test_an_output_that_is_larger_than_declared_is_refused_by_name(double: Double) -> None:
    session = sharing(double)
    double.answer = {"BIG": np.zeros((1, LARGE)), "SMALL": np.zeros((1, 1), np.float32)}
    told = rf"output 'BIG' \({LARGE * 4} bytes\) .* the model gives more than FP32 \[-1, {LARGE}\]: have it give that, or set"
    with pytest.raises(OutputsRefused, match=told):
        session.run({"X": X}, {})
    session.close()
    session = sharing(double)
    double.shapes = {"BIG": [-1, 2 * LARGE], "SMALL": [-1, 1]}
    with pytest.raises(SessionLost, match=rf"load it again: output 'BIG' is FP32 \[-1, {2 * LARGE}\]"):
        session.run({"X": X}, {})
    session.close()


def test_a_session_has_a_connection_of_its_own_and_hangs_up_when_it_is_closed(double: Double) -> None:
    model = load(double)
    assert double.connected(0)  # reading the spec needs none any more
    sessions = [model.open_session(index) for index in range(2)]
    assert double.connected(2)
    sessions[0].close()
    assert double.connected(1)
    with pytest.raises(SessionLost, match="closed"):
        sessions[0].run({"X": X}, {})
    sessions[0].close()
    np.testing.assert_array_equal(sessions[1].run({"X": X}, {})["Y"], X)
    sessions[1].close()
    assert double.connected(0)


def test_a_server_that_is_not_ready_is_hung_up_on() -> None:
    with serving() as first, serving() as second:
        model = load(second, url=[f"127.0.0.1:{first.port}", f"127.0.0.1:{second.port}"])
        first.ready = False
        session = model.open_session(0)
        assert first.connected(0)
        session.run({"X": X}, {})
        assert (len(first.calls), len(second.calls)) == (0, 1)
        session.close()
        second.ready = False
        with pytest.raises(LoadFailed) as failed:
            model.open_session(1)
        assert str(first.port) in str(failed.value)
        assert str(second.port) in str(failed.value)
        assert first.connected(0)
        assert second.connected(0)


def test_a_cancelled_call_hangs_up_and_leaves_one_connection(double: Double) -> None:
    session: Any = load(double).open_session(0)
    double.before_answer = session.cancel
    with pytest.raises(RunCancelled):
        session.run({"X": X}, {})
    double.before_answer = lambda: None
    np.testing.assert_array_equal(session.run({"X": X}, {})["Y"], X)
    assert double.connected(1)
    session.close()
    assert double.connected(0)


REFUSALS = {
    "INVALID_ARGUMENT": "invalid_argument",
    "NOT_FOUND": "not_found",
    "ALREADY_EXISTS": "already_exists",
    "UNIMPLEMENTED": "unsupported",
    "CANCELLED": "cancelled",
    "UNAVAILABLE": "backend_unreachable",
}


@pytest.mark.parametrize("code", REFUSALS)
def test_a_refusal_of_the_model_has_its_code_and_costs_no_session(double: Double, code: str) -> None:
    double.refusal = grpc.StatusCode[code], "no such user"
    session = load(double).open_session(0)
    with pytest.raises(InputRefused, match="no such user") as refused:
        answer(session, False)
    assert refused.value.code == REFUSALS[code]
    double.refusal = None
    answer(session, False)
    session.close()


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "a shape": ({"inputs": {"X": [-1, 6]}}, "input 'X' is FP32 [-1, 6], and was FP32 [-1, 2]"),
    "a datatype": ({"datatype": "INT32"}, "input 'X' is INT32 [-1, 2], and was FP32 [-1, 2]; output 'Y' is INT32"),
    "a name": ({"inputs": {"Z": [-1, 2]}}, "input 'X' is missing, and was FP32 [-1, 2]; input 'Z' is FP32 [-1, 2]"),
    "rows": ({"config": model_config_pb2.ModelConfig(max_batch_size=2)}, "it takes 2 rows at most, and took 8"),
    "no rows": ({"config": model_config_pb2.ModelConfig(), "inputs": {"X": [2]}}, "has max_batch_size 0 and a tensor without"),
    "rows that nobody stated": ({"config": model_config_pb2.ModelConfig()}, "it has no batch dimension any more"),
    "a size of an output": ({"shapes": {"Y": [-1, 3]}}, "output 'Y' is FP32 [-1, 3], and was FP32 [-1, 2]"),
    "parts": ({"decoupled": True}, "it answers in parts now, and did not"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_on_the_server_loses_its_sessions_until_it_is_as_it_was(
    double: Double, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    values, told = CHANGES[change]
    before = {name: getattr(double, name) for name in values}
    declared = replace(SPEC, inputs=(), outputs=(), rows_stated=change != "rows that nobody stated")
    model = backends.load("triton", {"url": f"127.0.0.1:{double.port}", "model": "m"}, declared)
    sessions = [model.open_session(index) for index in range(2)]
    vars(double).update(values)
    double.refusal = grpc.StatusCode.INVALID_ARGUMENT, "unexpected"
    for session in sessions:
        with pytest.raises(SessionLost, match=f"m is not what was loaded here, load it again: .*{re.escape(told)}"):
            session.run({"X": X}, {})
        session.close()
    with pytest.raises(LoadFailed, match=re.escape(told)):
        model.open_session(0)
    assert caplog.text.count("is not what was loaded here") == 1
    vars(double).update(before, refusal=None)
    session = model.open_session(0)
    answer(session, False)
    session.close()


@pytest.mark.parametrize("decoupled", [False, True])
def test_an_answer_that_is_not_as_declared_tells_of_a_model_that_was_changed(double: Double, decoupled: bool) -> None:
    double.decoupled, double.parts = decoupled, [1.0, None]
    double.shapes = {"Y": [-1, 3]}
    options = {"url": f"127.0.0.1:{double.port}", "model": "m"}
    session = backends.load("triton", options, replace(SPEC, outputs=())).open_session(0)
    double.shapes = {"Y": [-1, 2]}
    with pytest.raises(SessionLost, match=r"load it again: output 'Y' is FP32 \[-1, 2\], and was FP32 \[-1, 3\]"):
        answer(session, decoupled)
    session.close()


@pytest.mark.parametrize(("was", "now"), [(-1, 2), (2, -1)])
def test_what_calls_do_not_depend_on_may_change_on_the_server_and_is_not_read_at_each_refusal(
    double: Double, was: int, now: int
) -> None:
    double.shapes = {"Y": [-1, was]}
    model = backends.load("triton", {"url": f"127.0.0.1:{double.port}", "model": "m"}, replace(SPEC, inputs=(), outputs=()))
    double.inputs, double.shapes = {"X": [-1, -1], "MORE": [-1, 1]}, {"Y": [-1, now], "SCORE": [-1, 1]}
    optional = [{"name": name, "optional": True} for name in double.inputs]
    double.config = model_config_pb2.ModelConfig(max_batch_size=16, input=optional)
    session = model.open_session(0)
    double.refusal, asked = (grpc.StatusCode.INVALID_ARGUMENT, "no such user"), double.configs_asked
    for _ in range(3):
        with pytest.raises(InputRefused, match="no such user"):
            session.run({"X": X}, {})
    assert double.configs_asked == asked + 1  # 2 s later the next time
    session.close()


def test_a_session_passes_over_a_server_that_has_another_model_of_that_name() -> None:
    with serving() as first, serving() as second:
        first.inputs = {"X": [-1, 6]}
        model = load(second, url=[f"127.0.0.1:{each.port}" for each in (second, first)])
        session = model.open_session(1)
        answer(session, False)
        assert len(second.calls) == 1
        session.close()


@pytest.mark.parametrize("code", ["UNKNOWN", "INTERNAL"])
def test_a_model_that_failed_costs_no_session(double: Double, code: str) -> None:
    double.refusal = grpc.StatusCode[code], "no luck"
    session = load(double).open_session(0)
    with pytest.raises(ExecutionFailed, match="no luck") as failed:
        answer(session, False)
    assert not isinstance(failed.value, InputRefused)
    session.close()


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("code", ["NOT_FOUND", "CANCELLED", "UNAVAILABLE", "UNKNOWN"])
def test_the_same_codes_of_a_server_without_the_model_lose_the_session(double: Double, code: str, decoupled: bool) -> None:
    double.decoupled, double.parts = decoupled, [1.0]
    double.refusal = grpc.StatusCode[code], "no such thing"
    session = load(double).open_session(0)
    double.ready = False
    with pytest.raises(SessionLost, match="no such thing") as lost:
        answer(session, decoupled)
    assert lost.value.begun  # for all that is known
    session.close()


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_call_for_which_there_is_no_connection_has_not_begun(decoupled: bool) -> None:
    with serving() as gone:
        gone.decoupled, gone.parts = decoupled, [None]
        session: Any = load(gone).open_session(0)
        answer(session, decoupled)
    session._run.__self__._connection.cancel()  # the next call opens a connection
    with pytest.raises(SessionLost, match="UNAVAILABLE") as lost:
        answer(session, decoupled)
    assert not lost.value.begun
    session.close()


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_server_that_does_not_say_whether_it_has_the_model_costs_no_more_time(double: Double, decoupled: bool) -> None:
    go_on = threading.Event()
    double.decoupled = decoupled
    double.refusal = grpc.StatusCode.UNAVAILABLE, "overloaded"
    session = load(double).open_session(0)
    double.before_ready = lambda: go_on.wait(TIMEOUT_S)
    began_s = time.monotonic()
    with pytest.raises(SessionLost, match="overloaded"):
        answer(session, decoupled, {DEADLINE_NS: time.monotonic_ns() + 200_000_000})
    assert time.monotonic() - began_s < 3  # without an end it would be 5
    go_on.set()
    session.close()


@pytest.mark.parametrize(
    ("code", "details"),
    [
        ("NOT_FOUND", "Request for unknown model: 'm' has no available versions"),
        ("UNAVAILABLE", "Server is stopping, scheduler for model has stopped accepting new inference requests"),
        ("UNAUTHENTICATED", "who is there"),
    ],
)
def test_a_server_that_says_that_it_is_to_blame_loses_the_session(double: Double, code: str, details: str) -> None:
    double.refusal = grpc.StatusCode[code], details
    session = load(double).open_session(0)
    with pytest.raises(SessionLost, match=details):
        answer(session, False)
    session.close()


def answer(session: Any, decoupled: bool, parameters: Mapping[str, object] = NONE) -> None:
    if decoupled:
        list(session.stream({"X": X}, parameters))
    else:
        session.run({"X": X}, parameters)


# a decoupled model


@pytest.fixture
def in_parts(double: Double) -> Double:
    double.decoupled = True
    return double


def opened(double: Double, **options: Any) -> Any:
    return load(double, **options).open_session(0)


def values(parts: Iterator[Tensors]) -> list[float]:
    return [float(part["Y"][0, 0]) for part in parts]


def test_an_answer_in_parts_ends_with_the_empty_final_response(in_parts: Double) -> None:
    in_parts.parts = [1.0, 2.0, 3.0, None]
    model = load(in_parts)
    assert model.spec.decoupled
    session: Any = model.open_session(0)
    assert values(session.stream({"X": X}, {"own": 2, "triton_x": 1})) == [1.0, 2.0, 3.0]
    assert values(session.stream({"X": X}, {})) == [1.0, 2.0, 3.0]
    session.close()
    (first, _) = in_parts.calls
    assert sorted(first.parameters) == ["own", "triton_enable_empty_final_response"]
    assert list(first.raw_input_contents) == [X.tobytes()]


def test_an_answer_may_have_no_parts(in_parts: Double) -> None:
    in_parts.parts = [None]
    session = opened(in_parts)
    assert values(session.stream({"X": X}, {})) == []
    session.close()


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("no luck", ExecutionFailed),
        ("Stub process 'm_0_0' is not healthy.", SessionLost),
        ("Request for unknown model: 'm' is not found", SessionLost),
    ],
)
def test_an_error_among_the_parts_ends_the_answer(in_parts: Double, message: str, error: type[Exception]) -> None:
    in_parts.parts = [1.0, message, 2.0, None]
    go_on = threading.Event()
    in_parts.before_part = lambda: in_parts.parts_sent == 2 and go_on.wait(TIMEOUT_S)  # type: ignore[assignment]
    session = opened(in_parts)
    parts = session.stream({"X": X}, {})
    assert float(next(parts)["Y"][0, 0]) == 1.0
    if error is ExecutionFailed:
        told = next(parts)
        assert isinstance(told, EarlyFailure)
        assert message in str(told.error)
        assert in_parts.parts_sent == 2
    go_on.set()
    with pytest.raises(error, match=message) as failed:
        next(parts)
    assert in_parts.parts_sent == 4  # hung up on before the end, Triton may die
    assert not isinstance(failed.value, InputRefused)
    assert "triton_grpc_error" not in in_parts.metadata[0]  # Triton may die of it
    session.close()


@pytest.mark.parametrize("second", ["no luck", 2.0], ids=["after its error", "after it was left"])
@pytest.mark.parametrize("limit", ["timeout_s", "drain_s"])
def test_an_answer_that_goes_on_is_hung_up_on(in_parts: Double, second: float | str, limit: str) -> None:
    go_on = threading.Event()
    in_parts.parts = [1.0, second, 3.0, None]
    in_parts.before_part = lambda: in_parts.parts_sent == 2 and go_on.wait(TIMEOUT_S)  # type: ignore[assignment]
    session = opened(in_parts, **{limit: 0.2})
    parts = session.stream({"X": X}, {})
    next(parts), next(parts)
    parts.close()
    assert in_parts.parts_sent == 2  # it was not waited for
    assert in_parts.hung_up.wait(TIMEOUT_S)
    go_on.set()
    session.close()


def test_a_part_that_is_not_as_declared_is_told_before_the_rest_is_read(in_parts: Double) -> None:
    go_on = threading.Event()
    in_parts.shapes, in_parts.parts = {"Y": [-1, 3]}, [1.0, 2.0, None]
    in_parts.before_part = lambda: in_parts.parts_sent == 1 and go_on.wait(TIMEOUT_S)  # type: ignore[assignment]
    options = {"url": f"127.0.0.1:{in_parts.port}", "model": "m"}
    session: Any = backends.load("triton", options, replace(SPEC, outputs=())).open_session(0)
    parts = session.stream({"X": X}, {})
    assert isinstance(next(parts), EarlyFailure)
    go_on.set()
    with pytest.raises(OutputsRefused, match=r"'Y': expected shape \[-1, 3\], the model gave shape \[1, 2\]"):
        next(parts)
    assert in_parts.parts_sent == 3
    session.close()


def test_a_server_that_goes_among_the_parts_loses_the_session(in_parts: Double) -> None:
    in_parts.parts = [1.0, 2.0]

    def go() -> None:
        if in_parts.parts_sent:
            in_parts.ready = False
            raise OSError

    in_parts.before_part = go
    session = opened(in_parts)
    parts = session.stream({"X": X}, {})
    next(parts)
    with pytest.raises(SessionLost, match="UNKNOWN"):
        next(parts)
    session.close()


def test_what_is_left_of_an_answer_is_not_read_where_that_is_said(in_parts: Double) -> None:
    in_parts.parts = [1.0, 2.0, 3.0, None]
    in_parts.before_part = lambda: time.sleep(0.05 * in_parts.parts_sent)
    session = opened(in_parts, drain_s=0)
    parts = session.stream({"X": X}, {})
    next(parts)
    parts.close()
    session.close()
    assert in_parts.parts_sent < 4


def test_what_is_left_of_an_answer_is_read_to_its_end_and_dropped(in_parts: Double) -> None:
    in_parts.parts = [*map(float, range(1000)), None]
    session = opened(in_parts)
    parts = session.stream({"X": X}, {})
    next(parts)
    parts.close()
    assert in_parts.parts_sent == 1001  # hung up on before the end, Triton may die
    in_parts.parts = [2.0, None]
    assert values(session.stream({"X": X}, {})) == [2.0]
    session.close()


@pytest.mark.slow
def test_parts_wait_at_the_server_until_they_are_asked_for(in_parts: Double) -> None:
    in_parts.parts = [1.0] * 400
    in_parts.rows = 8192  # 64 KiB
    session = opened(in_parts)
    parts = session.stream({"X": X}, {})
    next(parts)
    sent = -1
    while sent != in_parts.parts_sent:  # until the window is full
        sent = in_parts.parts_sent
        time.sleep(0.2)
    assert sent < 200
    parts.close()
    session.close()


def test_a_cancelled_answer_is_not_hung_up_on(in_parts: Double) -> None:
    waits, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        if in_parts.parts_sent == 1:
            waits.set()
            go_on.wait(TIMEOUT_S)

    in_parts.parts = [1.0, 2.0, 3.0, None]
    in_parts.before_part = hold
    session = opened(in_parts)
    session.cancel()  # nothing runs
    with ThreadPoolExecutor(1) as thread:
        parts = session.stream({"X": X}, {})
        next(parts)
        following = thread.submit(next, parts)
        assert waits.wait(TIMEOUT_S)
        session.cancel()
        go_on.set()
        assert following.result(TIMEOUT_S)["Y"][0, 0] == 2
    parts.close()
    assert in_parts.parts_sent == 4
    session.close()


@pytest.mark.slow
def test_a_part_that_does_not_come_loses_the_session_and_the_time_of_the_client_does_not_count(in_parts: Double) -> None:
    go_on = threading.Event()
    in_parts.parts = [1.0, 2.0, 3.0, None]
    in_parts.before_part = lambda: in_parts.parts_sent == 2 and go_on.wait(TIMEOUT_S)  # type: ignore[assignment]
    session = opened(in_parts, timeout_s=0.5)
    parts = session.stream({"X": X}, {})
    next(parts)
    time.sleep(0.7)
    next(parts)
    with pytest.raises(SessionLost, match=r"no part of the answer within timeout_s 0\.5"):
        next(parts)
    go_on.set()
    session.close()


def test_a_deadline_that_passes_before_the_first_part_hangs_up_on_nothing(in_parts: Double) -> None:
    in_parts.parts = [1.0, None]
    in_parts.before_part = lambda: time.sleep(max(0.0, soon_s - time.monotonic()))
    session = opened(in_parts)
    soon_s = time.monotonic() + 0.1
    assert values(session.stream({"X": X}, {DEADLINE_NS: round((soon_s - 0.02) * 1e9)})) == [1.0]
    with pytest.raises(ExecutionFailed, match="the deadline passed before the call"):
        next(session.stream({"X": X}, {DEADLINE_NS: time.monotonic_ns()}))
    session.close()
