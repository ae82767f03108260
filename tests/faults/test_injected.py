"""An exception at every callback on the way of an inference: each request has its one answer, is counted, and nothing stays.

Both listeners over one process. At each seam the next call, or the next few, raise; then requests of all protocols run at
once, so that those of one batch, the lane, the slots and the counts are seen to survive. Sessions in threads and in processes.
"""

import asyncio
import functools
import importlib
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
import numpy as np
import orjson
import psutil
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from gateway.ingress import Ingress, Ports
from tests.faults.hosted import hosted
from tests.grpc_server.serving import infer_request

pytestmark = pytest.mark.slow

TIMEOUT_S = 30.0
EACH = 4  # requests per protocol at a time
STREAM_ENDED = "the stream ended: "
BACKEND = {"kind": "synthetic", "fixed_ms": 5, "row_ms": 0, "sessions": 2}
TENSORS = {
    "max_rows": 8,
    "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 4]}],
    "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 4]}],
}
PARTS = {"kind": "python", "model": "tests.grpc_server.counting:Counts", "sessions": 2}
CONFIG = {
    "server": {"http_port": 0, "grpc_port": 0, "drain_timeout_s": 4},
    "models": [
        {"name": "thread", **TENSORS, "slo": {"p99_ms": 2000}, "backends": [BACKEND]},
        {"name": "process", **TENSORS, "backends": [{**BACKEND, "isolation": "process"}]},
        {"name": "greedy", **TENSORS, "batching": {"policy": "greedy"}, "backends": [BACKEND]},
        {"name": "routed", **TENSORS, "backends": [{**BACKEND, "name": "a"}, {**BACKEND, "name": "b"}]},
        {"name": "parts", "max_rows": 8, "backends": [PARTS]},
        {"name": "parts-process", "max_rows": 8, "backends": [{**PARTS, "isolation": "process"}]},
    ],
}


class Seam(NamedTuple):
    """A function on the way of an inference, and of which models'."""

    where: str
    models: tuple[str, ...] = ("thread", "process", "routed")


SEAMS = [
    Seam("gateway.protocols.rest:RestCodec.decode"),
    Seam("gateway.protocols.rest:RestCodec.encode"),
    Seam("gateway.protocols.repeated:RepeatedBodies.request"),
    Seam("gateway.protocols.repeated:RepeatedBodies.remember_json"),
    Seam("gateway.protocols.grpc:GrpcCodec.decode"),
    Seam("gateway.protocols.grpc:GrpcCodec.encode"),
    Seam("gateway.protocols.repeated_messages:RepeatedMessages.find"),
    Seam("gateway.protocols.repeated_messages:RepeatedMessages.remember"),
    Seam("gateway.engine.inference:Endpoints.find"),
    Seam("gateway.edges.rest_inference:RestInference.answer"),
    Seam("gateway.edges.grpc_call:framed"),
    Seam("gateway.engine.repository:Repository.infer"),
    Seam("gateway.engine.dispatcher:Dispatcher.submit"),
    Seam("gateway.engine.dispatcher:Dispatcher.executed", ("routed",)),
    Seam("gateway.engine.dispatcher:Dispatcher.fall_back", ("routed",)),
    Seam("gateway.engine.dispatcher:Dispatcher._rescue", ("routed",)),
    Seam("gateway.engine.dispatcher:_Sent._falls_back", ("routed",)),
    Seam("gateway.routing.router:Router.route", ("routed",)),
    Seam("gateway.routing.router:Router.copies", ("routed",)),
    Seam("gateway.routing.router:Router.executed", ("routed",)),
    Seam("gateway.engine.lane:Lane.submit"),
    Seam("gateway.engine.reserve:Reserve.learn"),
    Seam("gateway.batching.batcher:Batcher.add"),
    Seam("gateway.batching.batcher:Batcher.step"),
    Seam("gateway.batching.batcher:Batcher._dispatch"),
    Seam("gateway.batching.adaptive:Adaptive.arrived"),
    Seam("gateway.batching.adaptive:Adaptive.decide"),
    Seam("gateway.batching.adaptive:Adaptive.finished"),
    Seam("gateway.batching.policies:Greedy.decide", ("greedy",)),
    Seam("gateway.batching.batch:Batch.concat"),
    Seam("gateway.batching.batch:Batch.split"),
    Seam("gateway.engine.workers:WorkerPool.start"),
    Seam("gateway.engine.recorders:LaneMetrics.batch_done"),
    Seam("gateway.engine.recorders:RoutingMetrics.routed", ("routed",)),
    Seam("gateway.engine.session_process:ProcessSession.run", ("process",)),
    Seam("gateway.engine.session_process:encode_frame", ("process",)),
    Seam("gateway.engine.session_process:decode_frame", ("process",)),
    Seam("backends.synthetic:SyntheticSession.run", ("thread", "greedy", "routed")),
]
PART_SEAMS = [
    Seam("gateway.protocols.grpc:GrpcCodec.decode", ("parts",)),
    Seam("gateway.protocols.grpc:GrpcCodec.encode", ("parts",)),
    Seam("gateway.edges.grpc_call:framed", ("parts",)),
    Seam("gateway.edges.grpc_inference:_Turn._parts", ("parts",)),
    Seam("gateway.edges.grpc_inference:_Turn.part", ("parts",)),
    Seam("gateway.edges.grpc_inference:_Turn.finish", ("parts",)),
    Seam("gateway.engine.inference:StreamedInference._part", ("parts",)),
    Seam("gateway.engine.lane:Lane.submit", ("parts",)),
    Seam("gateway.engine.lane:_Waiting.taken", ("parts",)),
    Seam("gateway.batching.recording:RecordedBatcher.begun", ("parts",)),
    Seam("gateway.engine.workers:WorkerPool.start", ("parts",)),
    Seam("gateway.engine.workers:WorkerPool.taken", ("parts",)),
    Seam("gateway.engine.recorders:EndpointMetrics.part", ("parts",)),
    Seam("gateway.engine.recorders:EndpointMetrics.streamed", ("parts",)),
    Seam("gateway.engine.session_process:ProcessSession.stream", ("parts-process",)),
    Seam("gateway.engine.session_process:encode_frame", ("parts-process",)),
    Seam("gateway.engine.session_process:decode_frame", ("parts-process",)),
    Seam("backends.python:_checked", ("parts",)),
]
RAISED = ((ValueError, 1), (SystemExit, 3), (asyncio.CancelledError, 2))


@dataclass
class Served:
    ingress: Ingress
    ports: Ports
    loop: asyncio.AbstractEventLoop

    def call(self, function: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(TIMEOUT_S)

    def counted(self, model: str) -> int:
        """Requests of a model that were counted, whatever became of them."""

        def count() -> int:
            self.ingress.metrics.flush()
            _, text = self.ingress.metrics.expose()
            found = re.findall(rf'^gateway_requests_total{{.*model="{model}".*}} (\S+)$', text.decode(), re.MULTILINE)
            return round(sum(map(float, found)))

        return int(self.call(count))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with hosted(CONFIG, tmp_path_factory.mktemp("run")) as served:
        yield Served(*served)


class Injected:
    """Has the next calls of a function raise."""

    def __init__(self, where: str, raised: type[BaseException], calls: int) -> None:
        module_name, _, path = where.partition(":")
        owner: Any = importlib.import_module(module_name)
        *parents, self._name = path.split(".")
        self._owner = functools.reduce(getattr, parents, owner)
        self._original = getattr(self._owner, self._name)
        self._raised = raised
        self._left = calls
        self._lock = threading.Lock()
        self.raised = 0

    def __enter__(self) -> "Injected":
        @functools.wraps(self._original)
        def raising(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                raises, self._left = self._left > 0, self._left - 1
                self.raised += raises
            if raises:
                raise self._raised("injected")
            return self._original(*args, **kwargs)

        setattr(self._owner, self._name, raising)
        return self

    def __exit__(self, *exc: object) -> None:
        setattr(self._owner, self._name, self._original)


def cases(seams: list[Seam], raised: tuple[tuple[type[BaseException], int], ...] = RAISED) -> list[Any]:
    return [
        pytest.param(seam.where, model, kind, calls, id=f"{seam.where.rpartition(':')[2]}-{model}-{kind.__name__}-{calls}")
        for seam in seams
        for model in seam.models
        for kind, calls in raised
    ]


@pytest.mark.parametrize(("where", "model", "raised", "calls"), cases(SEAMS))
def test_each_request_has_one_answer_whatever_raises(
    served: Served, where: str, model: str, raised: type[BaseException], calls: int
) -> None:
    before = served.counted(model)
    with Injected(where, raised, calls) as injected:
        answers = asyncio.run(ask_all(served.ports, model))
    assert len(answers) == 3 * EACH
    settled(served, model)
    if "metrics" not in where:
        # What fails before its model is known is no model's, nor is what a stream that ended had not read.
        unread = sum(answer.startswith(STREAM_ENDED) for answer in answers)
        assert served.counted(model) - before >= 3 * EACH - injected.raised - unread
    assert asyncio.run(ask_all(served.ports, model)) == ["ok"] * 3 * EACH  # and serves on
    settled(served, model)


@pytest.mark.parametrize(("where", "model", "raised", "calls"), cases(PART_SEAMS, RAISED[:2]))
def test_each_answer_in_parts_has_one_end_whatever_raises(
    served: Served, where: str, model: str, raised: type[BaseException], calls: int
) -> None:
    with Injected(where, raised, calls) as injected:
        asyncio.run(ask_for_parts(served.ports, model))
    assert injected.raised
    settled(served, model)
    before = served.counted(model)
    assert asyncio.run(ask_for_parts(served.ports, model)) == ["ok"] * 2 * EACH
    settled(served, model)
    assert served.counted(model) - before == 2 * EACH


def settled(served: Served, model: str) -> None:
    """Nothing waits, runs, or is held; sessions that were lost are back."""

    def states() -> list[tuple[int, int, int, int]]:
        lanes = served.ingress.repository.model(model).lanes
        return [
            (lane.pending, lane.batcher.queue_rows, lane.runner.slots - lane.runner.free_slots, ahead(lane)) for lane in lanes
        ]

    until_s = served.loop.time() + 10
    while any(any(state) for state in served.call(states)):
        assert served.loop.time() < until_s, f"something is left: {served.call(states)}"
        threading.Event().wait(0.02)


def ahead(lane: Any) -> int:
    """Batches that are taken to be running."""
    found = re.search(r"in_flight=(\d+)", repr(lane.batcher))
    assert found is not None
    return int(found[1])


fresh = itertools.count(step=EACH)  # the content of one that has ended a session is refused for a while


async def ask_all(ports: Ports, model: str) -> list[str]:
    """Requests of all protocols at once; gives how each ended: "ok", or its error."""
    async with asyncio.timeout(TIMEOUT_S):
        groups = await asyncio.gather(
            asyncio.gather(*(ask_rest(ports.http, model, value) for value in values())),
            asyncio.gather(*(ask_grpc(ports.grpc, model, value) for value in values())),
            ask_stream(ports.grpc, model, values()),
        )
    return [answer for group in groups for answer in group]


def values() -> range:
    first = next(fresh)
    return range(first, first + EACH)


async def ask_rest(port: int | None, model: str, value: float) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [value] * 4}
    body = orjson.dumps({"inputs": [tensor]})
    writer.write(
        b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
        % (model.encode(), len(body), body)
    )
    head = await reader.readuntil(b"\r\n\r\n")
    found = re.search(rb"Content-Length: (\d+)", head)
    assert found is not None
    answer = orjson.loads(await reader.readexactly(int(found[1])))
    writer.write_eof()
    assert await reader.read() == b"", "a second answer came"
    writer.close()
    await writer.wait_closed()
    if head.startswith(b"HTTP/1.1 200 "):
        assert answer["outputs"][0]["data"] == [value] * 4
        return "ok"
    return str(answer["error"])


async def ask_grpc(port: int | None, model: str, value: float) -> str:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        try:
            reply = await service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(infer_request(model, value), timeout=20)
        except grpc.aio.AioRpcError as exc:
            return f"{exc.code()}: {exc.details()}"
        return checked(reply, value)


async def ask_stream(port: int | None, model: str, values: range) -> list[str]:
    """A stream that fails as a whole ends each of its requests."""
    ends: list[str] = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(timeout=20)
        try:
            for value in values:
                await call.write(infer_request(model, value, request_id=str(value)))
            await call.done_writing()
            async for answer in call:
                assert answer.error_message or answer.infer_response.id == str(values[len(ends)])
                ends.append(answer.error_message or checked(answer.infer_response, values[len(ends)]))
        except grpc.aio.AioRpcError as exc:
            ends += [f"{STREAM_ENDED}{exc.code()}: {exc.details()}"] * (EACH - len(ends))
        except asyncio.InvalidStateError:  # grpc's word for a write into a stream that has ended
            ends += [f"{STREAM_ENDED}{await call.code()}: {await call.details()}"] * (EACH - len(ends))
    return ends


async def ask_for_parts(port: Ports, model: str) -> list[str]:
    """Two streams at once, of answers of three parts each; gives how each answer ended, whose parts are seen to be in order."""
    async with asyncio.timeout(TIMEOUT_S):
        groups = await asyncio.gather(*(ask_stream_for_parts(port.grpc, model) for _ in range(2)))
    return [end for group in groups for end in group]


async def ask_stream_for_parts(port: int | None, model: str) -> list[str]:
    ends: dict[str, str] = {}
    parts: dict[str, int] = {}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(timeout=20)
        try:
            for value in values():
                request = infer_request(model, request_id=str(value))
                request.raw_input_contents[0] = np.array([3, value, 0, 0], np.float32).tobytes()
                request.parameters["triton_enable_empty_final_response"].bool_param = True
                parts[request.id] = 0
                await call.write(request)
            await call.done_writing()
            async for message in call:
                answer = message.infer_response
                assert answer.id not in ends, "a second end came"
                if message.error_message:
                    assert answer.id in parts or not answer.id  # one that could not even be read
                    ends[answer.id or f"unread {len(ends)}"] = message.error_message
                elif answer.parameters["triton_final_response"].bool_param:
                    ends[answer.id] = "ok" if parts[answer.id] == 3 else f"{parts[answer.id]} parts"
                else:
                    assert np.frombuffer(answer.raw_output_contents[0], np.float32)[0] == parts[answer.id]
                    parts[answer.id] += 1
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return [*ends.values(), *[STREAM_ENDED] * (EACH - len(ends))]
    assert len(ends) == EACH, "a request had no end"
    return list(ends.values())


def checked(reply: pb.ModelInferResponse, value: float) -> str:
    assert np.array_equal(np.frombuffer(reply.raw_output_contents[0], np.float32), np.full(4, value, np.float32))
    return "ok"


def test_no_session_process_is_left_behind(served: Served) -> None:
    """Of all that were lost above: two live for each model in processes."""
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    assert sum("session_process" in " ".join(child.cmdline()) for child in alive) == 4
