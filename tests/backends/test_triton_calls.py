"""What the Triton backend sends and when it hangs up, against a double of the server's gRPC service that notes every call."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

import backends
from backends.base import DEADLINE_NS, LoadFailed, Model, ModelSpec, RunCancelled, SessionLost, TensorSpec

TIMEOUT_S = 10.0
SPEC = ModelSpec("", (TensorSpec("X", "FP32", (-1, 2)),), (TensorSpec("Y", "FP32", (-1, 2)),), 8)
X = np.array([[1, 2]], np.float32)


class Double(service_pb2_grpc.GRPCInferenceServiceServicer):
    """An echo of one input. calls: of ModelInfer, with the time that each client left for it."""

    def __init__(self) -> None:
        self.ready = True
        self.port = 0
        self.calls: list[service_pb2.ModelInferRequest] = []
        self.left_s: list[float] = []
        self.before_answer: Callable[[], None] = lambda: None

    def ModelReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelReadyResponse(ready=self.ready)

    def ModelMetadata(self, request: Any, context: Any) -> Any:
        def tensor(name: str) -> Any:
            return service_pb2.ModelMetadataResponse.TensorMetadata(name=name, datatype="FP32", shape=[-1, 2])

        return service_pb2.ModelMetadataResponse(name=request.name, inputs=[tensor("X")], outputs=[tensor("Y")])

    def ModelConfig(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelConfigResponse(config=model_config_pb2.ModelConfig(name=request.name, max_batch_size=8))

    def ModelInfer(self, request: Any, context: Any) -> Any:
        self.calls.append(request)
        self.left_s.append(context.time_remaining())
        self.before_answer()
        response = service_pb2.ModelInferResponse(model_name=request.model_name)
        response.outputs.add(name="Y", datatype="FP32", shape=request.inputs[0].shape)
        response.raw_output_contents.append(request.raw_input_contents[0])
        return response

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


def test_what_triton_takes_for_itself_is_kept_from_it(double: Double) -> None:
    session = load(double).open_session(0)
    deadline_ns = time.monotonic_ns() + 5_000_000_000
    session.run({"X": X}, {"priority": 1, "timeout": 9, "sequence_id": 4, "triton_x": 1, DEADLINE_NS: deadline_ns, "own": 2})
    session.close()
    assert list(double.calls[0].parameters) == ["own"]


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
