"""CPU per request within the gateway, without sockets: what one change to the path of a request saves, to a microsecond.

    git worktree add ../before REVISION
    python -m benchmarks.stations ../before . [--paths rest-json instances] [--connections 1 16] [--rounds 5]
    python -m benchmarks.stations . --profile instances       # cProfile of one path
    python -m benchmarks.stations . --with neither ring traces both [--instructions]
    python -m benchmarks.stations ../before . --paths rest-json --connections 64 --models 200 --max-rows 1
    python -m benchmarks.stations ../before . --paths rest-json grpc --connections 16 --ids

Each run starts the ingress of one checkout in a process of its own, with the model `linear` in it, and hands the bytes of
requests to real connections, which all ask again when all are answered. What is counted is the CPU time of the
process, its worker's thread included: chunks of requests are timed. Of all chunks of all rounds, in which the checkouts take
turns, the median is told, and in brackets what a tenth of them stay below: that wanders least beside other work.

--with: `ring` is the example as it is, with the ring of `gateway why`; `neither` goes without, and `traces` and `both` trace
exactly one request of a hundred, for a collector beside. What sends spans works once for many chunks: there the mean counts, of
all chunks until all spans are sent, which is told last.

--ids: each request has a `traceparent` of its own, which is not sampled, and an `x-request-id`, as behind a proxy.

--models: so many times `linear`, which the connections ask in turn (`rest-json`, `rest-binary`, `grpc`). --max-rows: of a
batch, 0 for as the example has it.

--instructions: not the time, but what callgrind counts, all threads included. The clock goes on by 20 µs whenever it is read.
"""

import argparse
import asyncio
import cProfile
import functools
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, count, cycle, islice, product, repeat
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.callgrind import Counter, command

CONFIG: Final = Path("configs/examples/linear.yaml")
ROW: Final = [round(n * 0.37, 2) for n in range(16)]
CHUNK: Final = 240
_ABOUT: Final = json.dumps(
    {
        "inputs": [{"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "parameters": {"binary_data_size": 64}}],
        "parameters": {"binary_data_output": True},
    }
).encode()


def _post(path: str, body: bytes, headers: str = "") -> bytes:
    fields = f"Host: localhost\r\nContent-Type: application/json\r\n{headers}Content-Length: {len(body)}"
    head = f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n"
    return head.encode() + body


_V2: Final = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "data": ROW}]}).encode()
_INSTANCES: Final = json.dumps({"instances": [ROW]}).encode()
_BINARY: Final = f"Inference-Header-Content-Length: {len(_ABOUT)}\r\n"
REST: Final = {
    "rest-json": _post("/v2/models/linear/infer", _V2),
    "instances": _post("/invocations", _INSTANCES),
    "rest-binary": _post("/v2/models/linear/infer", _ABOUT + bytes(64), _BINARY),
    "predict": _post("/v1/models/linear:predict", _INSTANCES),
    "columns": _post("/invocations", json.dumps({"inputs": {"INPUT0": [ROW]}}).encode()),
    "invocations-v2": _post("/invocations", _V2),
    "csv": _post("/invocations", ",".join(map(str, ROW)).encode()).replace(b"application/json", b"text/csv"),
    "outputs": _post(
        "/v2/models/linear/infer",
        _V2[:-1] + b', "id": "7", "outputs": [{"name": "OUTPUT0", "parameters": {"classification": 2}}],'
        b' "parameters": {"timeout": 5000000}}',
    ),
}  # fmt: skip
PATHS: Final = (*REST, "grpc")
WITH: Final = {"neither": (False, False), "ring": (True, False), "traces": (False, True), "both": (True, True)}
_IDS: Final = 2000
SKIPPED: Final = 4  # chunks, at first
COUNTED: Final = 29_280  # requests: of 292 of them the spans are as many as leave at once


class Asking(asyncio.Transport):
    """One connection of HTTP/1.1: the transport of the gateway's side, which asks again when an answer is written."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, requests: Iterator[bytes], answered: Callable[["Asking"], None]
    ) -> None:
        super().__init__()
        self._loop = loop
        self._answered = answered
        self._checked = self._closed = False
        self.requests = requests
        self.connection: Any

    def ask(self) -> None:
        request, connection = next(self.requests), self.connection
        connection.get_buffer(-1)[: len(request)] = request
        connection.buffer_updated(len(request))

    def write(self, data: Any) -> None:
        if not self._checked:
            assert bytes(data).startswith(b"HTTP/1.1 200 "), bytes(data)
            self._checked = True
        self._answered(self)

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.call_soon(self.connection.connection_lost, None)

    write_eof = close

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class AskingGrpc(Asking):
    """One of gRPC. request: the message with its frame's head, which is every call's but for the stream's number."""

    number = -1
    headers: Iterator[bytes]

    def ask(self) -> None:
        self.number += 2
        number, request, headers = self.number.to_bytes(4), next(self.requests), next(self.headers)
        call = (
            len(headers).to_bytes(3), b"\x01\x04", number, headers,
            len(request).to_bytes(3), b"\x00\x01", number, request,
        )  # fmt: skip
        self.connection.data_received(b"".join(call))

    def write(self, data: Any) -> None:
        if b"grpc-status" in data:
            if not self._checked:
                assert b"\x0bgrpc-status\x010" in data, data
                self._checked = True
            self._answered(self)


async def ingress_of(
    which: str = "ring", collector: str = "", *, port: int | None = None, models: int = 1, max_rows: int = 0
) -> tuple[Any, Any]:
    """One that has started, and its ports. which: of WITH. collector: its endpoint. port: None listens nowhere, 0 anywhere.

    models: one is `linear`; more are `linear1` and so on. max_rows: of a batch; 0: as the example has it.
    """
    from gateway.config import Tracing, load_config
    from gateway.garbage import leave_out
    from gateway.ingress import Ingress

    ring, traces = WITH[which]
    config = load_config(str(CONFIG))
    update: dict[str, Any] = {"server": config.server.model_copy(update={"http_port": port, "grpc_port": port})}
    (model,) = config.models
    if not ring:
        model = model.model_copy(update={"batching": model.batching.model_copy(update={"record_mib": 0.0})})
    if max_rows:
        model = model.model_copy(update={"max_rows": max_rows})
    update["models"] = tuple(model.model_copy(update={"name": name}) for name in _names(models))
    if traces:
        from gateway.tracing.sampler import Sampler

        # Where it draws how many are left out, the same comes each time: 99.
        assert Sampler.__init__.__kwdefaults__ is not None
        Sampler.__init__.__kwdefaults__["chance"] = lambda: 1 - 0.99**99.5
        update["tracing"] = Tracing(endpoint=collector, sample_ratio=0.01)
    ingress = Ingress(config.model_copy(update=update), run_dir=Path(tempfile.mkdtemp()))
    ports = await ingress.start()
    leave_out()
    return ingress, ports


def _names(models: int) -> list[str]:
    return ["linear"] if models == 1 else [f"linear{number}" for number in range(models)]


async def all_sent(ingress: Any) -> None:
    """Wait until all spans are with the collector."""
    tracer = ingress._tracer
    if tracer is None:
        return
    exporter = tracer.close.__self__
    exporter._due.set()
    while exporter._taken < exporter._put or exporter._sending:  # noqa: ASYNC110  # it is another thread that sends
        await asyncio.sleep(0.05)
    assert not exporter.failed, exporter.spans()


@contextmanager
def collecting() -> Iterator[str]:
    """Takes spans, and does nothing with them. Its endpoint."""
    import grpc

    def take(_: bytes, __: Any) -> bytes:
        return b""

    server = grpc.server(ThreadPoolExecutor(1))
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(service, {"Export": grpc.unary_unary_rpc_method_handler(take)})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}"
    server.stop(None)


def _ids(number: int) -> tuple[tuple[bytes, bytes], ...]:
    return (b"traceparent", b"00-%032x-%016x-00" % (number, number)), (b"x-request-id", b"%032x" % number)


@functools.cache  # made while it warms up, and not counted
def _with_ids(request: bytes) -> list[bytes]:
    lines = [b"".join(b"%b: %b\r\n" % field for field in _ids(number)) for number in range(1, _IDS)]
    return [request.replace(b"Content-Length:", line + b"Content-Length:", 1) for line in lines]


@functools.cache
def _blocks_with_ids(block: bytes) -> list[bytes]:
    from gateway.wire.http2_headers import header_block

    return [block + header_block(*_ids(number)) for number in range(1, _IDS)]


def _connections(
    ingress: Any, path: str, count: int, answered: Callable[[Asking], None], models: int = 1, *, ids: bool = False
) -> list[Asking]:
    loop = asyncio.get_running_loop()
    asking: list[Asking] = []
    if path != "grpc":
        from gateway.edges.http_server import HttpConnection

        server = ingress.rest_listener()
        requests = cycle([REST[path].replace(b"/linear/", f"/{name}/".encode()) for name in _names(models)])
        if ids:
            requests = chain.from_iterable(
                zip(*[cycle(_with_ids(request)) for request in islice(requests, models)], strict=True)
            )
        for _ in range(count):
            transport = Asking(loop, requests, answered)
            transport.connection = HttpConnection(server, loop)
            transport.connection.connection_made(transport)
            asking.append(transport)
        return asking
    from tritonclient.grpc import service_pb2 as pb

    from gateway.wire.http2_frames import PREFACE, settings
    from gateway.wire.http2_headers import header_block

    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, 16])
    messages = [
        pb.ModelInferRequest(model_name=name, inputs=[tensor], raw_input_contents=[bytes(64)]).SerializeToString()
        for name in _names(models)
    ]
    block = header_block(
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/inference.GRPCInferenceService/ModelInfer"),
        (b":authority", b"x"), (b"content-type", b"application/grpc"), (b"te", b"trailers"),
    )  # fmt: skip
    requests = cycle([b"\0" + len(message).to_bytes(4) + message for message in messages])
    listener = ingress.grpc_listener()
    for _ in range(count):
        call = AskingGrpc(loop, requests, answered)
        call.headers = cycle(_blocks_with_ids(block)) if ids else repeat(block)
        call.connection = listener._connect()
        call.connection.connection_made(call)
        call.connection.data_received(
            PREFACE + settings({4: (1 << 31) - 1}) + b"\x00\x00\x04\x08\x00\x00\x00\x00\x00\x7f\xff\x00\x00"
        )
        asking.append(call)
    return asking


async def _drive(
    ingress: Any,
    path: str,
    connections: int,
    requests: int,
    profile: cProfile.Profile | None = None,
    *,
    models: int = 1,
    ids: bool = False,
) -> list[float]:
    """The CPU time of each chunk, in microseconds per request; last the mean of them all, until all spans are sent."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    left = requests
    begun_s = at_s = 0.0
    times: list[float] = []

    def answered(_: Asking) -> None:
        nonlocal left, at_s
        left -= 1
        if left % CHUNK == 0:
            now_s = time.process_time()
            times.append((now_s - at_s) / CHUNK * 1e6)
            at_s = now_s
        if left % connections == 0:  # together, so that every batch is of as many
            if left > 0:
                ask()
            else:
                done.set_result(None)

    def ask() -> None:
        for each in asking:
            loop.call_soon(each.ask)

    asking = _connections(ingress, path, connections, answered, models, ids=ids)
    begun_s = at_s = time.process_time()
    if profile is not None:
        profile.enable()
    ask()
    await done
    if profile is not None:
        profile.disable()
    await all_sent(ingress)
    times.append((time.process_time() - begun_s) / requests * 1e6)
    await asyncio.sleep(0.05)
    return times[SKIPPED:]


async def _measure(ingress: Any, arguments: argparse.Namespace) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for path, number in product(arguments.paths, arguments.connections):
        await _drive(ingress, path, number, _warming(arguments.models), models=arguments.models, ids=arguments.ids)
        found[f"{path} {number}"] = await _drive(
            ingress, path, number, arguments.requests, models=arguments.models, ids=arguments.ids
        )
    return found


async def _count(ingress: Any, arguments: argparse.Namespace) -> dict[str, list[float]]:
    counter = Counter(arguments.folder)
    found: dict[str, list[float]] = {}
    for path, number in product(arguments.paths, arguments.connections):
        await _drive(ingress, path, number, _warming(arguments.models), models=arguments.models, ids=arguments.ids)
        counter.start()
        await _drive(ingress, path, number, arguments.requests, models=arguments.models, ids=arguments.ids)
        counter.stop()
        found[f"{path} {number}"] = [counter.told(f"{path} {number}") / arguments.requests]
    return found


def _warming(models: int) -> int:
    """Requests after which each model has moved to the loop, and its lane has learned how long it takes."""
    return CHUNK * (4 + models // 8)


async def _run(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """What one process measures."""
    if arguments.instructions:  # what is learned of times, and so the way through the code, is to be the same in each run
        time.monotonic_ns = count(1 << 50, 20_000).__next__
        time.thread_time_ns = count(1 << 50, 20_000).__next__
    ingress, _ = await ingress_of(arguments.which[0], arguments.collector, models=arguments.models, max_rows=arguments.max_rows)
    found = await (_count if arguments.instructions else _measure)(ingress, arguments)
    await ingress.drain()
    return found


async def _profile(path: str, count: int, requests: int) -> None:
    ingress, _ = await ingress_of()
    await _drive(ingress, path, count, requests)
    profile = cProfile.Profile()
    await _drive(ingress, path, count, requests, profile)
    pstats.Stats(profile).sort_stats("tottime").print_stats(60)
    await ingress.drain()


class Column(NamedTuple):
    """What is measured beside others: a checkout, and what goes on in it beside."""

    checkout: Path
    which: str

    def run(self, arguments: argparse.Namespace, collector: str, connections: list[int]) -> dict[str, list[float]]:
        """In a process of its own."""
        with tempfile.TemporaryDirectory() as folder:
            return self._run(arguments, collector, connections, Path(folder))

    def _run(
        self, arguments: argparse.Namespace, collector: str, connections: list[int], folder: Path
    ) -> dict[str, list[float]]:
        program = [
            sys.executable, __file__, "--here", "--requests", str(arguments.requests), "--with", self.which, "--collector",
            collector, "--paths", *arguments.paths, "--connections", *map(str, connections), "--models", str(arguments.models),
            "--max-rows", str(arguments.max_rows), *(["--ids"] if arguments.ids else []),
        ]  # fmt: skip
        if arguments.instructions:
            program = command(folder, [*program, "--instructions", "--folder", str(folder)])
        path = os.pathsep.join((str(self.checkout.resolve()), str(Path(__file__).parent.parent)))
        environ = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0"}
        ran = subprocess.run(program, env=environ, stdout=subprocess.PIPE, check=True)
        found: dict[str, list[float]] = json.loads(ran.stdout.splitlines()[-1])
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="*")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=["rest-json", "instances", "rest-binary", "grpc"])
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--models", type=int, default=1)
    parser.add_argument("--max-rows", type=int, default=0)
    parser.add_argument("--ids", action="store_true", help="each request has its own")
    parser.add_argument("--requests", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--with", dest="which", nargs="+", choices=WITH, default=["ring"])
    parser.add_argument("--instructions", action="store_true")
    parser.add_argument("--profile", choices=PATHS)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--collector", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    timed = not (arguments.instructions or arguments.profile)
    if timed and arguments.requests is not None and arguments.requests < (SKIPPED + 1) * CHUNK:
        parser.error(f"--requests {arguments.requests}: expected at least {(SKIPPED + 1) * CHUNK}: one chunk behind the first")
    arguments.requests = arguments.requests or (COUNTED if arguments.instructions else 9600)
    arguments.rounds = arguments.rounds or (1 if arguments.instructions else 5)
    import uvloop

    if arguments.profile:
        uvloop.run(_profile(arguments.profile, arguments.connections[-1], arguments.requests))
        return
    if arguments.here:
        print(json.dumps(uvloop.run(_run(arguments))))
        return
    columns = list(enumerate(Column(*each) for each in product(arguments.checkouts, arguments.which)))
    found: list[dict[str, list[list[float]]]] = [{} for _ in columns]
    # What was learned from one number of connections would decide how those of another are batched.
    groups = [[each] for each in arguments.connections] if arguments.instructions else [arguments.connections]
    with collecting() as collector:
        for number in range(arguments.rounds):
            for index, column in columns if number % 2 == 0 else columns[::-1]:
                for connections in groups:
                    for key, figures in column.run(arguments, collector, connections).items():
                        found[index].setdefault(key, []).append(figures)
    _print([column for _, column in columns], found)


def _print(columns: list[Column], found: list[dict[str, list[list[float]]]]) -> None:
    """found: by path and connections, the figures of each round."""
    print("path, connections".ljust(20) + "".join(f"{f'{each.checkout} {each.which}'[-27:]:>28}" for each in columns))
    for key in found[0]:
        rows = []
        for each in found:
            chunks = sorted(chunk for figures in each[key] for chunk in figures[:-1])
            mean = statistics.median(figures[-1] for figures in each[key])
            rows.append((statistics.median(chunks), chunks[len(chunks) // 10], mean) if chunks else (mean,))
        cells = [f"{row[0]:.1f} ({row[1]:.1f}) {row[2]:.1f}" if len(row) == 3 else f"{row[0]:.0f}" for row in rows]
        print(key.ljust(20) + "".join(cell.rjust(28) for cell in cells))
        if len(rows) > 1:
            ratios = [tuple(mine / first for mine, first in zip(row, rows[0], strict=True)) for row in rows]
            cells = [f"{row[0]:.3f} ({row[1]:.3f}) {row[2]:.3f}" if len(row) == 3 else f"{row[0]:.4f}" for row in ratios]
            print("".ljust(20) + "".join(cell.rjust(28) for cell in cells))


if __name__ == "__main__":
    main()
