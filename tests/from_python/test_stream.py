"""Models that answer in parts, from Python: `LoadedModel.stream`, and gRPC in memory."""

import _thread
import asyncio
import gc
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

import gateway
from gateway.edges.grpc_call_in_memory import _UNREAD
from gateway.engine.runner import PARTS_AHEAD
from gateway.errors import Cancelled, GatewayError, InvalidArgument, NotReady
from tests.from_python.models import Tokens, double, letters_of

PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def model() -> Iterator[gateway.LoadedModel]:
    with gateway.load(Tokens) as loaded:
        yield loaded


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Tokens.stopped.clear()


def numbers(parts: Any) -> list[int]:
    return [int(part["output"][0]) for part in parts]


def until_still() -> int:
    """How many parts were made, once no more are."""
    seen = -1
    while Tokens.made != seen:
        seen = Tokens.made
        time.sleep(0.05)
    return seen


def test_parts_come_one_by_one_and_are_the_callers_own(model: gateway.LoadedModel) -> None:
    parts = list(model.stream({"count": [3]}))
    assert numbers(parts) == [0, 1, 2]
    assert all(part["output"].base is None for part in parts)


def test_a_function_that_yields_is_a_model_as_well() -> None:
    with gateway.load(letters_of) as loaded:
        assert [part["output"].tolist() for part in loaded.stream({"text": ["abc"]})] == [["a"], ["b"], ["c"]]
        with pytest.raises(InvalidArgument, match="2 rows in one request, expected at most 1 of a model that answers in parts"):
            next(loaded.stream({"text": ["abc", "d"]}))


def test_a_model_of_one_answer_streams_that_one() -> None:
    with gateway.load(double) as loaded:
        assert [part["output"].tolist() for part in loaded.stream({"x": [[1, 2]]})] == [[[2, 4]]]
        with pytest.raises(GatewayError, match="no threes"):
            list(loaded.stream({"x": [[3, 3]]}))


def test_predict_says_what_to_call(model: gateway.LoadedModel) -> None:
    with pytest.raises(InvalidArgument, match="model 'Tokens' is decoupled: it answers in parts; call `stream`"):
        model.predict({"count": [3]})
    with pytest.raises(InvalidArgument, match="call `stream`"):
        asyncio.run(model.predict_async({"count": [3]}))


def test_an_error_comes_behind_the_parts_before_it(model: gateway.LoadedModel) -> None:
    parts = model.stream({"count": [20]})
    assert numbers(next(parts) for _ in range(13)) == list(range(13))
    with pytest.raises(GatewayError, match="ValueError: 13 is bad luck"):
        next(parts)
    assert numbers(model.stream({"count": [2]})) == [0, 1]


def test_inputs_are_refused_when_the_first_part_is_asked_for(model: gateway.LoadedModel) -> None:
    parts = model.stream({"number": [3]})
    with pytest.raises(InvalidArgument, match="number"):
        next(parts)
    assert list(parts) == []


def test_whoever_reads_it_may_close_it_between_two_parts(model: gateway.LoadedModel) -> None:
    parts, read = model.stream({"count": [0]}), 0
    for _ in parts:
        read += 1
        if read == 2:
            parts.close()
    assert read == 2
    assert Tokens.stopped.wait(PATIENCE_S)


def test_the_model_waits_for_who_reads_slowly(model: gateway.LoadedModel) -> None:
    parts = model.stream({"count": [0]})
    next(parts)
    assert until_still() == PARTS_AHEAD + 1
    assert numbers(next(parts) for _ in range(100)) == [0] * 100
    assert until_still() == PARTS_AHEAD + 101
    parts.close()
    assert Tokens.stopped.wait(PATIENCE_S)


def test_a_loop_that_is_left_frees_the_session(model: gateway.LoadedModel) -> None:
    for _ in model.stream({"count": [0]}):
        break
    assert Tokens.stopped.wait(PATIENCE_S)
    assert numbers(model.stream({"count": [2]})) == [0, 1]
    model.stream({"count": [0]})  # nothing was asked yet
    assert numbers(model.stream({"count": [2]})) == [0, 1]


@pytest.mark.parametrize("read", [0, 1])
def test_it_can_be_closed_while_another_thread_reads_it(model: gateway.LoadedModel, read: int) -> None:
    parts = model.stream({"count": [0]})
    for _ in range(read):
        next(parts)
    with ThreadPoolExecutor(1) as threads:
        closing = threads.submit(parts.close)
        with pytest.raises(Cancelled):
            list(parts)
        closing.result()
    assert list(parts) == []
    assert not read or Tokens.stopped.wait(PATIENCE_S)
    assert numbers(model.stream({"count": [2]})) == [0, 1]


@pytest.mark.parametrize("read", [0, 1])
def test_whoever_reads_what_another_closed_before_is_told(model: gateway.LoadedModel, read: int) -> None:
    parts = model.stream({"count": [0]})
    for _ in range(read):
        next(parts)
    parts.close()
    with ThreadPoolExecutor(1) as threads, pytest.raises(Cancelled):
        threads.submit(list, parts).result()
    assert list(parts) == []


def test_a_thread_of_another_library_is_told_what_one_before_it_with_its_number_closed(model: gateway.LoadedModel) -> None:
    parts = model.stream({"count": [0]})
    next(parts)
    told: queue.Queue[Any] = queue.Queue()

    def close() -> None:
        parts.close()
        told.put(_thread.get_ident())

    def read(number: int) -> None:
        if _thread.get_ident() != number:
            told.put(None)
            return
        try:
            told.put(list(parts))
        except Cancelled as exc:
            told.put(exc)

    _thread.start_new_thread(close, ())
    number, found = told.get(timeout=PATIENCE_S), None
    for _ in range(1000):
        if found is None:
            _thread.start_new_thread(read, (number,))
            found = told.get(timeout=PATIENCE_S)
    assert isinstance(found, Cancelled | None)  # None: no thread got that number


def test_the_same_on_a_running_loop(model: gateway.LoadedModel) -> None:
    async def main() -> None:
        assert [int(part["output"][0]) async for part in model.stream_async({"count": [3]})] == [0, 1, 2]
        parts = model.stream_async({"count": [0]})
        await anext(parts)
        await parts.aclose()
        assert await asyncio.to_thread(Tokens.stopped.wait, PATIENCE_S)
        reading = asyncio.ensure_future(anext(model.stream_async({"count": [5]})))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert [int(part["output"][0]) async for part in model.stream_async({"count": [2]})] == [0, 1]

    asyncio.run(main())


def test_closing_the_model_ends_the_streams_that_are_open() -> None:
    loaded = gateway.load(Tokens)
    idle, read = loaded.stream({"count": [5]}), loaded.stream({"count": [0]})
    next(read)
    began_s = time.monotonic()
    loaded.close()
    assert time.monotonic() - began_s < 10
    assert Tokens.stopped.wait(PATIENCE_S)
    for parts in (idle, read):
        with pytest.raises(NotReady, match="it has been closed"):
            next(parts)


@pytest.mark.slow
def test_a_model_in_a_process_streams_as_well() -> None:
    config = {
        "models": [
            {
                "name": "tokens",
                "max_rows": 1,
                "backends": [{"kind": "python", "model": "tests.from_python.models:Tokens", "isolation": "process"}],
            }
        ]
    }
    with gateway.load(config) as loaded:
        assert numbers(loaded.stream({"count": [3]})) == [0, 1, 2]
        for _ in loaded.stream({"count": [0]}):
            break
        assert numbers(loaded.stream({"count": [3]})) == [0, 1, 2]


# gRPC in memory


@pytest.fixture(scope="module")
def stub() -> Iterator[Any]:
    with gateway.TestClient(Tokens) as client:
        yield service_pb2_grpc.GRPCInferenceServiceStub(client.channel)


def request(count: int, *, final: bool = False) -> pb.ModelInferRequest:
    tensor = pb.ModelInferRequest.InferInputTensor(name="count", datatype="INT64", shape=[1])
    asked = pb.ModelInferRequest(
        model_name="Tokens", id=str(count), inputs=[tensor], raw_input_contents=[np.array([count], np.int64).tobytes()]
    )
    if final:
        asked.parameters["triton_enable_empty_final_response"].bool_param = True
    return asked


def told(message: pb.ModelStreamInferResponse) -> str:
    if message.error_message:
        return message.error_message
    answer = message.infer_response
    star = "*" if answer.parameters["triton_final_response"].bool_param else ""
    if not answer.raw_output_contents:
        return f"end{star}"
    return f"{np.frombuffer(answer.raw_output_contents[0], np.int64)[0]}{star}"


def test_a_stub_gets_parts_and_their_end(stub: Any) -> None:
    assert [told(message) for message in stub.ModelStreamInfer(iter([request(3, final=True)]))] == ["0", "1", "2", "end*"]
    assert [told(message) for message in stub.ModelStreamInfer(iter([request(2)]))] == ["0", "1"]
    *parts, last = (told(message) for message in stub.ModelStreamInfer(iter([request(20)])))
    assert parts == [str(number) for number in range(13)]
    assert last == "Tokens:1/python: ValueError: 13 is bad luck"
    with pytest.raises(grpc.RpcError, match="is decoupled: it answers in parts; ask it by ModelStreamInfer"):
        stub.ModelInfer(request(3))


def test_a_stub_that_reads_slowly_makes_the_model_wait(stub: Any) -> None:
    answers = stub.ModelStreamInfer(iter([request(0)]))
    next(answers)
    assert until_still() <= 1 + _UNREAD + 1 + PARTS_AHEAD
    assert {told(next(answers)) for _ in range(200)} == {"0"}
    assert until_still() > 200
    answers.cancel()
    assert Tokens.stopped.wait(PATIENCE_S)


def test_a_stream_that_is_dropped_before_it_is_read_frees_the_session(stub: Any) -> None:
    answers = stub.ModelStreamInfer(iter([request(0)]))
    answers.initial_metadata()  # the model has begun
    del answers
    assert Tokens.stopped.wait(PATIENCE_S)
    assert [told(message) for message in stub.ModelStreamInfer(iter([request(2)]), timeout=PATIENCE_S)] == ["0", "1"]


def test_a_stream_that_has_failed_is_kept_by_nobody(stub: Any) -> None:
    answers = stub.ModelStreamInfer(iter([request(0)]), timeout=0.01)
    kept = weakref.ref(answers)
    with pytest.raises(grpc.RpcError):
        list(answers)
    del answers
    end_s = time.monotonic() + PATIENCE_S
    while kept() is not None and time.monotonic() < end_s:  # the loop's thread may still be at its end
        gc.collect()
    assert kept() is None


def test_what_a_stream_has_asked_is_answered_while_the_client_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    client = gateway.TestClient(letters_of)
    text = pb.ModelInferRequest.InferInputTensor(name="text", datatype="BYTES", shape=[1])
    text.contents.bytes_contents.append(b"a" * 100)
    asked = pb.ModelInferRequest(model_name="letters_of", inputs=[text])
    answers = service_pb2_grpc.GRPCInferenceServiceStub(client.channel).ModelStreamInfer(iter([asked]))
    next(answers)
    watch = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest())
    next(watch)
    closing = threading.Thread(target=client.close)
    closing.start()
    with pytest.raises(grpc.RpcError):  # the drain has begun
        list(watch)
    assert [(answer.error_message, answer.infer_response.raw_output_contents[0][4:]) for answer in answers] == [("", b"a")] * 99
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert "drain_timeout_s" not in caplog.text


@pytest.mark.slow
def test_streams_that_do_not_end_are_cut_off_at_the_end_of_the_drain() -> None:
    opened = threading.Event()

    def nothing() -> Iterator[bytes]:
        opened.wait()
        yield from ()

    backend = {"kind": "python", "model": "tests.from_python.models:Tokens"}
    config = {"server": {"drain_timeout_s": 0.4}, "models": [{"name": "Tokens", "max_rows": 1, "backends": [backend]}]}
    with gateway.TestClient(config) as client:
        answers = service_pb2_grpc.GRPCInferenceServiceStub(client.channel).ModelStreamInfer(iter([request(0)]))
        assert told(next(answers)) == "0"
        idle = client.channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")(nothing())
        began_s = time.monotonic()
    assert time.monotonic() - began_s > 0.2  # it was waited for
    *parts, last = (told(message) for message in answers)
    assert (set(parts), last) == ({"0"}, "the server is shutting down, and had no time left for this: it may have run")
    with pytest.raises(grpc.RpcError) as raised:
        next(idle)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    opened.set()


@pytest.fixture(scope="module", params=["in memory", "on the wire"])
def either(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A stub on the test client's channel, and one on grpc's own, whose calls are what the others are held to."""
    if request.param == "in memory":
        with gateway.TestClient(Tokens) as client:
            yield service_pb2_grpc.GRPCInferenceServiceStub(client.channel)
    else:
        with gateway.run(Tokens) as server, grpc.insecure_channel(server.grpc_target) as channel:
            yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def test_a_stream_tells_what_became_of_its_call(either: Any) -> None:
    answers = either.ModelStreamInfer(iter([request(2)]), metadata=(("x-request-id", "mine"),))
    assert dict(answers.initial_metadata()) == {"x-request-id": "mine"}
    assert [told(message) for message in answers] == ["0", "1"]
    assert (answers.code(), answers.details(), answers.is_active()) == (grpc.StatusCode.OK, "", False)
    assert (tuple(answers.trailing_metadata()), answers.time_remaining()) == ((), None)
    assert not answers.cancel()
    assert not answers.add_callback(lambda: None)


def test_a_stream_can_be_cancelled(either: Any) -> None:
    ended = threading.Event()
    answers = either.ModelStreamInfer(iter([request(0)]), timeout=PATIENCE_S)
    assert told(next(answers)) == "0"
    assert answers.is_active()
    assert 0 < answers.time_remaining() <= PATIENCE_S
    assert answers.add_callback(ended.set)
    assert answers.cancel()
    assert ended.wait(PATIENCE_S)
    for _ in range(2):
        with pytest.raises(grpc.RpcError) as raised:
            next(answers)
        assert raised.value.code() is grpc.StatusCode.CANCELLED
    assert (answers.code(), answers.details()) == (grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
    assert Tokens.stopped.wait(PATIENCE_S)
    assert not answers.cancel()


def test_a_future_tells_what_became_of_its_call(either: Any) -> None:
    future = either.ModelInfer.future(pb.ModelInferRequest(model_name="no"), metadata=(("x-request-id", "mine"),))
    assert future.code() is grpc.StatusCode.NOT_FOUND
    assert future.details().startswith("Request for unknown model: 'no'")
    assert (future.done(), future.running(), future.is_active(), future.cancel()) == (True, False, False, False)
    error = future.exception(PATIENCE_S)
    assert isinstance(error, grpc.Call)
    for call in (future, error):
        assert (tuple(call.initial_metadata()), dict(call.trailing_metadata())) == ((), {"x-request-id": "mine"})
    with pytest.raises(grpc.RpcError):
        future.result(PATIENCE_S)


def test_a_stub_that_reads_only_at_the_end_gets_all_answers() -> None:
    """Of a stream whose answers do not fit into the window."""
    with gateway.TestClient(double) as client:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(client.channel)
        sent = threading.Event()

        def requests() -> Iterator[pb.ModelInferRequest]:
            tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 2])
            for number in range(100):
                raw = np.full((1, 2), number + 4, np.float32).tobytes()
                yield pb.ModelInferRequest(model_name="double", inputs=[tensor], raw_input_contents=[raw])
            sent.set()

        answers = stub.ModelStreamInfer(requests())
        assert sent.wait(PATIENCE_S)
        values = [np.frombuffer(answer.infer_response.raw_output_contents[0], np.float32)[0] for answer in answers]
        assert values == [2 * (number + 4) for number in range(100)]


def test_a_stream_keeps_its_shared_worker_until_its_end() -> None:
    backend = {"kind": "python", "placement": "embedded"}
    config = {
        "server": {"shared_workers": 1},
        "models": [
            {"name": "Tokens", "max_rows": 1, "backends": [{**backend, "model": "tests.from_python.models:Tokens"}]},
            {"name": "double", "max_rows": 8, "backends": [{**backend, "model": "tests.from_python.models:double"}]},
        ],
    }
    asked: dict[str, Any] = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
    with gateway.TestClient(config) as client:
        answers = service_pb2_grpc.GRPCInferenceServiceStub(client.channel).ModelStreamInfer(iter([request(0)]))
        next(answers)
        answer = client.post("/v2/models/double/infer", json={**asked, "parameters": {"timeout": 100_000}})
        assert answer.status_code == 504, answer.text
        answers.cancel()
        assert client.post("/v2/models/double/infer", json=asked).status_code == 200
