"""CPU per request within the gateway, without sockets: what one change to the path of a request saves, to a microsecond.

    git worktree add ../before REVISION
    python -m benchmarks.stations ../before . [--paths rest-json instances] [--connections 1 16] [--rounds 5]
    python -m benchmarks.stations . --profile instances       # cProfile of one path

Each run starts the ingress of one checkout in a process of its own, with the model `linear` in it, and hands the bytes of
requests to real connections, which all ask again when all are answered. What is counted is the CPU time of the
process, its worker's thread included: chunks of requests are timed. Of all chunks of all rounds, in which the checkouts take
turns, the median is told, and in brackets what a tenth of them stay below: that wanders least beside other work.
"""

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

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
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
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


class Asking(asyncio.Transport):
    """One connection of HTTP/1.1: the transport of the gateway's side, which asks again when an answer is written."""

    def __init__(self, loop: asyncio.AbstractEventLoop, request: bytes, answered: Callable[["Asking"], None]) -> None:
        super().__init__()
        self._loop = loop
        self._answered = answered
        self._checked = self._closed = False
        self.request = request
        self.connection: Any

    def ask(self) -> None:
        request, connection = self.request, self.connection
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
    headers: bytes

    def ask(self) -> None:
        self.number += 2
        number = self.number.to_bytes(4)
        call = (
            len(self.headers).to_bytes(3), b"\x01\x04", number, self.headers,
            len(self.request).to_bytes(3), b"\x00\x01", number, self.request,
        )  # fmt: skip
        self.connection.data_received(b"".join(call))

    def write(self, data: Any) -> None:
        if b"grpc-status" in data:
            if not self._checked:
                assert b"\x0bgrpc-status\x010" in data, data
                self._checked = True
            self._answered(self)


async def _ingress() -> Any:
    from gateway.config import load_config
    from gateway.garbage import leave_out
    from gateway.ingress import Ingress

    config = load_config(str(CONFIG))
    config = config.model_copy(update={"server": config.server.model_copy(update={"http_port": None, "grpc_port": None})})
    ingress = Ingress(config, run_dir=Path(tempfile.mkdtemp()))
    await ingress.start()
    leave_out()
    return ingress


def _connections(ingress: Any, path: str, count: int, answered: Callable[[Asking], None]) -> list[Asking]:
    loop = asyncio.get_running_loop()
    asking: list[Asking] = []
    if path != "grpc":
        from gateway.edges.http_server import HttpConnection

        server = ingress.rest_listener()
        for _ in range(count):
            transport = Asking(loop, REST[path], answered)
            transport.connection = HttpConnection(server, loop)
            transport.connection.connection_made(transport)
            asking.append(transport)
        return asking
    from tritonclient.grpc import service_pb2 as pb

    from gateway.wire.http2_frames import PREFACE, settings
    from gateway.wire.http2_headers import header_block

    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, 16])
    message = pb.ModelInferRequest(model_name="linear", inputs=[tensor], raw_input_contents=[bytes(64)]).SerializeToString()
    listener = ingress.grpc_listener()
    for _ in range(count):
        call = AskingGrpc(loop, b"\0" + len(message).to_bytes(4) + message, answered)
        call.headers = header_block(
            (b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/inference.GRPCInferenceService/ModelInfer"),
            (b":authority", b"x"), (b"content-type", b"application/grpc"), (b"te", b"trailers"),
        )  # fmt: skip
        call.connection = listener._connect()
        call.connection.connection_made(call)
        call.connection.data_received(
            PREFACE + settings({4: (1 << 31) - 1}) + b"\x00\x00\x04\x08\x00\x00\x00\x00\x00\x7f\xff\x00\x00"
        )
        asking.append(call)
    return asking


async def _drive(ingress: Any, path: str, connections: int, requests: int, profile: cProfile.Profile | None) -> list[float]:
    """The CPU time of each chunk, in microseconds per request."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    left = requests
    at_s = 0.0
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

    asking = _connections(ingress, path, connections, answered)
    at_s = time.process_time()
    if profile is not None:
        profile.enable()
    ask()
    await done
    if profile is not None:
        profile.disable()
    await asyncio.sleep(0.05)
    return times[4:]


async def _measure(paths: list[str], connections: list[int], requests: int) -> dict[str, list[float]]:
    ingress = await _ingress()
    found: dict[str, list[float]] = {}
    for path in paths:
        for count in connections:
            found[f"{path} {count}"] = await _drive(ingress, path, count, requests, None)
    await ingress.drain()
    return found


async def _profile(path: str, count: int, requests: int) -> None:
    ingress = await _ingress()
    await _drive(ingress, path, count, requests, None)
    profile = cProfile.Profile()
    await _drive(ingress, path, count, requests, profile)
    pstats.Stats(profile).sort_stats("tottime").print_stats(60)
    await ingress.drain()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="*")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=["rest-json", "instances", "rest-binary", "grpc"])
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--requests", type=int, default=9600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", choices=PATHS)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    import uvloop

    if arguments.profile:
        uvloop.run(_profile(arguments.profile, arguments.connections[-1], arguments.requests))
        return
    if arguments.here:
        print(json.dumps(uvloop.run(_measure(arguments.paths, arguments.connections, arguments.requests))))
        return
    found: list[dict[str, list[float]]] = [{} for _ in arguments.checkouts]
    for number in range(arguments.rounds):
        turns = list(enumerate(arguments.checkouts))
        for index, checkout in turns if number % 2 == 0 else turns[::-1]:
            ran = subprocess.run(
                [
                    sys.executable, __file__, "--here", "--requests", str(arguments.requests),
                    "--paths", *arguments.paths, "--connections", *map(str, arguments.connections),
                ],
                env=os.environ | {"PYTHONPATH": str(checkout.resolve()), "PYTHONSAFEPATH": "1"},
                stdout=subprocess.PIPE, check=True,
            )  # fmt: skip
            for key, times in json.loads(ran.stdout.splitlines()[-1]).items():
                found[index].setdefault(key, []).extend(times)
    print(f"{'path, connections':24}" + "".join(f"{str(checkout)[-20:]:>22}" for checkout in arguments.checkouts) + "   ratio")
    for key in found[0]:
        medians = [statistics.median(each[key]) for each in found]
        least = [sorted(each[key])[len(each[key]) // 10] for each in found]
        cells = "".join(f"{median:12.1f} ({best:6.1f})" for median, best in zip(medians, least, strict=True))
        print(f"{key:24}{cells}   {medians[-1] / medians[0]:.3f} ({least[-1] / least[0]:.3f})")


if __name__ == "__main__":
    main()
