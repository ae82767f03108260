"""What a change costs: server CPU per request of `linear` in two checkouts, in pairs that take turns.

    git worktree add ../before REVISION
    python -m benchmarks.before_after ../before . --pairs 10 --requests 200000 [--protocol grpc]

    python -m benchmarks.before_after . . --after-config FILE      one checkout, two configurations
    python -m benchmarks.before_after . . --after-config FILE --after-ca ca.pem --after-key KEY      where it has TLS, asks keys

Each pair starts `gateway serve --no-ray configs/examples/linear.yaml` of both checkouts, each in a process of its own
(artifacts and interpreter are this one's), asks each for a hundredth of the requests to warm it up, then for all of them, a
twentieth from the one and a twentieth from the other, so that a machine that gets slower does so for both. It asks over REST
with JSON or bytes, or over gRPC, each connection one at a time, and reads the CPU time of the server and its children: what it
does while the other is asked counts as well. Which of a pair comes first alternates.
CPU time per request wanders less than requests per second, but do not run anything beside it.
"""

import argparse
import asyncio
import json
import os
import re
import ssl
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import psutil
import uvloop
from scipy.stats import t as student
from tritonclient.grpc import service_pb2 as pb

from gateway.wire.http2_client import ClientConnection
from gateway.wire.http2_headers import Headers, header_block

BODY = json.dumps(
    {"inputs": [{"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "data": [round(n * 0.37, 2) for n in range(16)]}]}
).encode()
REQUEST = b"POST /v2/models/linear/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
_ABOUT = json.dumps(
    {
        "inputs": [{"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "parameters": {"binary_data_size": 64}}],
        "parameters": {"binary_data_output": True},
    }
).encode()
BINARY_REQUEST = (
    b"POST /v2/models/linear/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n%b"
    % (len(_ABOUT), len(_ABOUT) + 64, _ABOUT + bytes(64))
)
_TENSOR = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, 16])
_INFER = pb.ModelInferRequest(model_name="linear", inputs=[_TENSOR], raw_input_contents=[bytes(64)]).SerializeToString()
GRPC_MESSAGE = b"\0" + len(_INFER).to_bytes(4) + _INFER
GRPC_HEADERS = header_block(
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/inference.GRPCInferenceService/ModelInfer"),
    (b":authority", b"x"),
    (b"content-type", b"application/grpc"),
    (b"te", b"trailers"),
)


class Asking(asyncio.Protocol):
    """One connection: asks while there are requests left."""

    request = REQUEST

    def __init__(self, left: list[int], done: asyncio.Future[None], key: bytes) -> None:
        """key: shown with each request, unless it is empty."""
        if key:
            self.request = self.request.replace(b"Host: x\r\n", b"Host: x\r\nX-Api-Key: %b\r\n" % key)
        self._left = left
        self._done = done
        self._answer = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's
        self._ask()

    def _ask(self) -> None:
        if self._left[0] <= 0:
            self._transport.close()
            return
        self._left[0] -= 1
        self._transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, separator, body = self._answer.partition(b"\r\n\r\n")
        length = re.search(rb"Content-Length: (\d+)", head)
        if separator and length is not None and len(body) == int(length[1]):
            assert head.startswith(b"HTTP/1.1 200 "), self._answer
            self._answer = b""
            self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


class AskingBinary(Asking):
    """The same with tensors as bytes."""

    request = BINARY_REQUEST


class AskingGrpc(asyncio.Protocol):
    """The same over gRPC."""

    def __init__(self, left: list[int], done: asyncio.Future[None], key: bytes) -> None:
        self._headers = GRPC_HEADERS + (header_block((b"x-api-key", key)) if key else b"")
        self._left = left
        self._done = done
        self._core = ClientConnection(self, self._flush)
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's
        self._flush()
        self._ask()

    def _flush(self) -> None:
        self._transport.write(b"".join(self._core.take()))

    def _ask(self) -> None:
        if self._left[0] <= 0:
            self._transport.close()
            return
        self._left[0] -= 1
        self._core.ask(self._headers, GRPC_MESSAGE)

    def data_received(self, data: bytes) -> None:
        self._core.receive(data)
        assert not self._core.fault, self._core.fault
        if self._core.out:
            self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)

    # what the connection tells

    def headers(self, number: int, headers: Headers, ended: bool) -> None:
        if ended:
            assert headers[b"grpc-status"] == b"0", headers
            self._ask()

    def data_ended(self, number: int) -> None:
        raise AssertionError("an answer without trailers")

    def reset(self, number: int, code: int) -> None:
        raise AssertionError(f"a call was reset: {code}")

    def going_away(self, last: int) -> None:
        raise AssertionError("the gateway goes away")

    def room(self) -> None: ...


_SLICES: Final = 20
ASKING: Final = {"rest-json": Asking, "rest-binary": AskingBinary, "grpc": AskingGrpc}


class Locks(NamedTuple):
    """What a client needs of a gateway that is locked. ca: of its certificate; None: it speaks no TLS."""

    ca: Path | None
    key: str

    def tls(self, protocol: str) -> ssl.SSLContext | None:
        if self.ca is None:
            return None
        context = ssl.create_default_context(cafile=self.ca)
        context.set_alpn_protocols(["h2" if protocol == "grpc" else "http/1.1"])
        return context


async def ask(protocol: str, host: str, port: int, locks: Locks, requests: int, connections: int) -> None:
    asking, tls, key = ASKING[protocol], locks.tls(protocol), locks.key.encode()
    loop = asyncio.get_running_loop()
    left = [requests]
    ends = [loop.create_future() for _ in range(connections)]
    for end in ends:
        await loop.create_connection(lambda end=end: asking(left, end, key), host, port, ssl=tls)  # type: ignore[misc]
    await asyncio.gather(*ends)


class Gateway:
    """A gateway that is asked."""

    def __init__(self, checkout: Path, config: Path, locks: Locks, protocol: str, connections: int) -> None:
        """Raises: RuntimeError, if the gateway does not start."""
        command = [sys.executable, "-m", "gateway.cli", "serve", "--no-ray", "--http-port", "0", "--grpc-port", "0"]
        here = Path.cwd()
        self._locks, self._protocol, self._connections = locks, protocol, connections
        self._server = subprocess.Popen(
            [*command, str(here / config)],
            cwd=here,
            env=os.environ | {"PYTHONPATH": str(checkout.resolve()), "PYTHONSAFEPATH": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._server.stdout is not None
        ready = re.search(rf"{'grpc' if protocol == 'grpc' else 'http'}=([\d.]+):(\d+)", self._server.stdout.readline())
        if ready is None:
            self.stop()
            raise RuntimeError(f"the gateway of {checkout} did not start")
        self._address = ready[1], int(ready[2])

    def ask(self, requests: int) -> None:
        uvloop.run(ask(self._protocol, *self._address, self._locks, requests, self._connections))

    def cpu_s(self) -> float:
        """So far, with its children."""
        processes = [psutil.Process(self._server.pid), *psutil.Process(self._server.pid).children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    def stop(self) -> None:
        self._server.terminate()
        self._server.wait(30)
        assert self._server.stdout is not None
        self._server.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    linear = Path("configs/examples/linear.yaml")
    parser.add_argument("--before-config", type=Path, default=linear, help="which serves the model linear")
    parser.add_argument("--after-config", type=Path, default=linear)
    for name in ("before", "after"):
        parser.add_argument(f"--{name}-ca", type=Path, help="the authority of its certificate, where it speaks TLS")
        parser.add_argument(f"--{name}-key", default="", help="the key that is shown, where one is asked for")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--protocol", choices=sorted(ASKING), default="rest-json")
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--connections", type=int, default=16)
    arguments = parser.parse_args()
    ratios = []
    for pair in range(arguments.pairs):
        order = ("before", "after") if pair % 2 == 0 else ("after", "before")
        with ExitStack() as running:
            gateways = {}
            for name in order:
                gateways[name] = Gateway(
                    getattr(arguments, name),
                    getattr(arguments, f"{name}_config"),
                    Locks(getattr(arguments, f"{name}_ca"), getattr(arguments, f"{name}_key")),
                    arguments.protocol,
                    arguments.connections,
                )
                running.callback(gateways[name].stop)
                gateways[name].ask(arguments.requests // 100)
            before_s = {name: gateway.cpu_s() for name, gateway in gateways.items()}
            for _ in range(_SLICES):
                for gateway in gateways.values():
                    gateway.ask(arguments.requests // _SLICES)
            cost = {
                name: (gateway.cpu_s() - before_s[name]) / (arguments.requests // _SLICES * _SLICES) * 1e6
                for name, gateway in gateways.items()
            }
        ratios.append(cost["after"] / cost["before"])
        print(
            f"pair {pair + 1}: before {cost['before']:.1f} us, after {cost['after']:.1f} us, ratio {ratios[-1]:.3f}", flush=True
        )
    mean = statistics.mean(ratios)
    if len(ratios) > 1:
        margin = student.ppf(0.975, len(ratios) - 1) * statistics.stdev(ratios) / len(ratios) ** 0.5
        print(f"mean ratio {mean:.3f}, 95 % interval {mean - margin:.3f} to {mean + margin:.3f}")


if __name__ == "__main__":
    main()
