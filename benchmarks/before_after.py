"""What a change costs: server CPU per request of `linear` in two checkouts, in pairs that take turns.

    git worktree add ../before REVISION
    python -m benchmarks.before_after ../before . --pairs 10 --requests 200000 [--protocol grpc]

    python -m benchmarks.before_after . . --after-config FILE      one checkout, two configurations
    python -m benchmarks.before_after . . --after-locks tls,keys     the same configuration with TLS, and keys asked for

Each pair starts `gateway serve --no-ray configs/examples/linear.yaml` of both checkouts, each in a process of its own
(artifacts and interpreter are this one's), asks each for a hundredth of the requests to warm it up, then for all of them, a
twentieth from the one and a twentieth from the other, so that a machine that gets slower does so for both. It asks over REST
with JSON or bytes, or over gRPC, each connection one at a time and kept open, and reads the CPU time of the server and its
children: what it does while the other is asked counts as well. Which of a pair comes first alternates.
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
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil
import uvloop
import yaml
from scipy.stats import t as student
from tritonclient.grpc import service_pb2 as pb

from benchmarks.processor_time import cpu_between, cpu_s
from gateway.access.rules import digest_of
from gateway.config import located
from gateway.wire.http2_client import ClientConnection
from gateway.wire.http2_headers import Headers, header_block
from tests.certificates import Authority

BODY = json.dumps(
    {"inputs": [{"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "data": [round(n * 0.37, 2) for n in range(16)]}]}
).encode()
REQUEST = b"POST /v2/models/linear/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
_ABOUT = json.dumps(
    {
        "inputs": [{"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "parameters": {"binary_data_size": 64}}],
        "parameters": {"binary_data_output": True},
    }
).encode()
BINARY_REQUEST = (
    b"POST /v2/models/linear/infer HTTP/1.1\r\nHost: localhost\r\n"
    b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n%b" % (len(_ABOUT), len(_ABOUT) + 64, _ABOUT + bytes(64))
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


class Slice:
    """Requests that the connections of a client ask together."""

    def __init__(self) -> None:
        self._left = 0
        self._asking = 0
        self._done: asyncio.Future[None]

    async def asked(self, requests: int, connections: "Sequence[Asking | AskingGrpc]") -> None:
        self._left, self._asking = requests, len(connections)
        self._done = asyncio.get_running_loop().create_future()
        for connection in connections:
            connection.ask()
        await self._done

    def take(self) -> bool:
        """Whether there is one more to ask; if not, the connection that takes it rests."""
        if self._left:
            self._left -= 1
            return True
        self._asking -= 1
        if not self._asking:
            self._done.set_result(None)
        return False


class Asking(asyncio.Protocol):
    """One connection: asks while there are requests left."""

    request = REQUEST

    def __init__(self, part: Slice, key: bytes) -> None:
        """key: shown with each request, unless it is empty."""
        if key:
            self.request = self.request.replace(b"Host: localhost\r\n", b"Host: localhost\r\nX-Api-Key: %b\r\n" % key)
        self._part = part
        self._answer = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's

    def ask(self) -> None:
        if self._part.take():
            self._transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, separator, body = self._answer.partition(b"\r\n\r\n")
        length = re.search(rb"Content-Length: (\d+)", head)
        if separator and length is not None and len(body) == int(length[1]):
            assert head.startswith(b"HTTP/1.1 200 "), self._answer
            self._answer = b""
            self.ask()


class AskingBinary(Asking):
    """The same with tensors as bytes."""

    request = BINARY_REQUEST


class AskingGrpc(asyncio.Protocol):
    """The same over gRPC."""

    def __init__(self, part: Slice, key: bytes) -> None:
        self._headers = GRPC_HEADERS + (header_block((b"x-api-key", key)) if key else b"")
        self._part = part
        self._core = ClientConnection(self, self._flush)
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's
        self._flush()

    def _flush(self) -> None:
        self._transport.write(b"".join(self._core.take()))

    def ask(self) -> None:
        if self._part.take():
            self._core.ask(self._headers, GRPC_MESSAGE)

    def data_received(self, data: bytes) -> None:
        self._core.receive(data)
        assert not self._core.fault, self._core.fault
        if self._core.out:
            self._flush()

    # what the connection tells

    def headers(self, number: int, headers: Headers, ended: bool) -> None:
        if ended:
            assert headers[b"grpc-status"] == b"0", headers
            self.ask()

    def data_ended(self, number: int) -> None:
        raise AssertionError("an answer without trailers")

    def reset(self, number: int, code: int) -> None:
        raise AssertionError(f"a call was reset: {code}")

    def going_away(self, last: int) -> None:
        raise AssertionError("the gateway goes away")

    def room(self) -> None: ...


_SLICES: Final = 20
ASKING: Final = {"rest-json": Asking, "rest-binary": AskingBinary, "grpc": AskingGrpc}


LOCKS: Final = ("tls", "mutual-tls", "keys", "limits")


class Locks(NamedTuple):
    """What a client needs of a gateway that is locked.

    authority: of its certificate; None: it speaks no TLS. shown: the client's certificate and its key. key: shown with each
    request; empty: none.
    """

    authority: Authority | None = None
    shown: tuple[Path, Path] | None = None
    key: str = ""

    def tls(self, protocol: str) -> ssl.SSLContext | None:
        if self.authority is None:
            return None
        context = self.authority.trusted(self.shown)
        context.set_alpn_protocols(["h2" if protocol == "grpc" else "http/1.1"])
        return context


def locked(config: Path, locks: Sequence[str], folder: Path) -> tuple[Path, Locks]:
    """The same configuration behind locks, written into a folder, and what opens them."""
    if not locks:
        return config, Locks()
    document: Any = located(yaml.safe_load(config.read_text()), config.parent.absolute())
    server = document["server"] = dict(document.get("server") or {})
    opens = Locks()
    if "tls" in locks or "mutual-tls" in locks:
        authority = Authority(folder)
        certificate, private = authority.issue("server")
        server["tls"] = {"certificate": str(certificate), "key": str(private)}
        opens = Locks(authority)
        if "mutual-tls" in locks:
            server["tls"]["client_ca"] = str(authority.path)
            opens = Locks(authority, authority.issue("client", client=True))
    if "keys" in locks or "limits" in locks:
        opens = opens._replace(key="a-key")
        limits = {"requests_per_s": 1e6, "concurrent": 1_000_000} if "limits" in locks else {}
        key = {"name": "own", "hash": f"sha256:{digest_of(opens.key.encode()).hex()}", "models": ["linear"], **limits}
        (folder / "keys.yaml").write_text(yaml.safe_dump({"keys": [key]}))
        server["access"] = {"keys": str(folder / "keys.yaml")}
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump(document))
    return path, opens


class Client:
    """Connections to one gateway that ask together."""

    def __init__(self, protocol: str, host: str, port: int, locks: Locks, connections: int) -> None:
        self._loop = uvloop.new_event_loop()
        self._part = Slice()
        self._asking = [self._connected(protocol, host, port, locks) for _ in range(connections)]

    def _connected(self, protocol: str, host: str, port: int, locks: Locks) -> Asking | AskingGrpc:
        def made() -> Asking | AskingGrpc:
            return ASKING[protocol](self._part, locks.key.encode())

        connecting = self._loop.create_connection(made, host, port, ssl=locks.tls(protocol))
        return self._loop.run_until_complete(connecting)[1]

    def ask(self, requests: int) -> None:
        self._loop.run_until_complete(self._part.asked(requests, self._asking))


class Gateway:
    """A gateway that is asked."""

    def __init__(self, checkout: Path, config: Path, locks: Locks, protocol: str, connections: int) -> None:
        """Raises: RuntimeError, if the gateway does not start."""
        command = [sys.executable, "-m", "gateway.cli", "serve", "--no-ray", "--http-port", "0", "--grpc-port", "0"]
        here = Path.cwd()
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
        self.ask = Client(protocol, ready[1], int(ready[2]), locks, connections).ask

    def cpu_s(self) -> dict[psutil.Process, float]:
        """So far, with its children."""
        processes = [psutil.Process(self._server.pid), *psutil.Process(self._server.pid).children(recursive=True)]
        return cpu_s(processes)

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
    parser.add_argument("--after-locks", default="", help=f"with commas between, of {', '.join(LOCKS)}")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--protocol", choices=sorted(ASKING), default="rest-json")
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--connections", type=int, default=16)
    arguments = parser.parse_args()
    locks = [lock for lock in arguments.after_locks.split(",") if lock]
    if unknown := set(locks) - set(LOCKS):
        parser.error(f"--after-locks: {', '.join(unknown)}: expected of {', '.join(LOCKS)}")
    ratios, more_us = [], []
    for pair in range(arguments.pairs):
        order = ("before", "after") if pair % 2 == 0 else ("after", "before")
        with ExitStack() as running:
            folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
            how = {
                "before": (arguments.before, arguments.before_config, Locks()),
                "after": (arguments.after, *locked(arguments.after_config, locks, folder)),
            }
            gateways = {}
            for name in order:
                gateways[name] = Gateway(*how[name], arguments.protocol, arguments.connections)
                running.callback(gateways[name].stop)
                gateways[name].ask(arguments.requests // 100)
            before = {name: gateway.cpu_s() for name, gateway in gateways.items()}
            for _ in range(_SLICES):
                for gateway in gateways.values():
                    gateway.ask(arguments.requests // _SLICES)
            cost = {
                name: cpu_between(before[name], gateway.cpu_s()) / (arguments.requests // _SLICES * _SLICES) * 1e6
                for name, gateway in gateways.items()
            }
        ratios.append(cost["after"] / cost["before"])
        more_us.append(cost["after"] - cost["before"])
        print(
            f"pair {pair + 1}: before {cost['before']:.1f} us, after {cost['after']:.1f} us, ratio {ratios[-1]:.3f}", flush=True
        )
    print(f"mean ratio {interval(ratios, 3)}; more by {interval(more_us, 1)} us")


def interval(values: Sequence[float], digits: int) -> str:
    """Their mean, and where it lies with 95 % confidence."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    margin = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:.{digits}f}, 95 % interval {mean - margin:.{digits}f} to {mean + margin:.{digits}f}"


if __name__ == "__main__":
    main()
