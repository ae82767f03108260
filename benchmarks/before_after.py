"""What a change costs: server CPU per request of `linear` in two checkouts, in pairs that take turns.

    git worktree add ../before REVISION
    python -m benchmarks.before_after ../before . --pairs 10 --requests 200000 [--protocol grpc]

    python -m benchmarks.before_after . . --after-config FILE      one checkout, two configurations
    python -m benchmarks.before_after . . --after-locks tls,keys     the same configuration with TLS, and keys asked for

Each run starts `gateway serve --no-ray configs/examples/linear.yaml` of one checkout in a process of its own (artifacts and
interpreter are this one's), asks it for a hundredth of the requests to warm it up, then for all of them, over REST with JSON
or bytes, or over gRPC, each connection one at a time, and reads the CPU time of the server and its children. Which of a pair
comes first alternates.
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
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil
import uvloop
import yaml
from scipy.stats import t as student
from tritonclient.grpc import service_pb2 as pb

from gateway.access.rules import digest_of
from gateway.config import located
from gateway.wire.http2_client import ClientConnection
from gateway.wire.http2_headers import Headers, header_block
from tests.certificates import Authority

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


async def ask(protocol: str, host: str, port: int, locks: Locks, requests: int, connections: int) -> None:
    asking, tls, key = ASKING[protocol], locks.tls(protocol), locks.key.encode()
    loop = asyncio.get_running_loop()
    left = [requests]
    ends = [loop.create_future() for _ in range(connections)]
    for end in ends:
        await loop.create_connection(lambda end=end: asking(left, end, key), host, port, ssl=tls)  # type: ignore[misc]
    await asyncio.gather(*ends)


def cpu_us_per_request(checkout: Path, config: Path, locks: Locks, protocol: str, requests: int, connections: int) -> float:
    """One run. Raises: RuntimeError, if the gateway does not start."""
    command = [sys.executable, "-m", "gateway.cli", "serve", "--no-ray", "--http-port", "0", "--grpc-port", "0"]
    here = Path.cwd()
    server = subprocess.Popen(
        [*command, str(here / config)],
        cwd=here,
        env=os.environ | {"PYTHONPATH": str(checkout.resolve()), "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    try:
        ready = re.search(rf"{'grpc' if protocol == 'grpc' else 'http'}=([\d.]+):(\d+)", server.stdout.readline())
        if ready is None:
            raise RuntimeError(f"the gateway of {checkout} did not start")
        host, port = ready[1], int(ready[2])
        uvloop.run(ask(protocol, host, port, locks, requests // 100, connections))
        before_s = _cpu_s(server.pid)
        uvloop.run(ask(protocol, host, port, locks, requests, connections))
        return (_cpu_s(server.pid) - before_s) / requests * 1e6
    finally:
        server.terminate()
        server.wait(30)
        server.stdout.close()


def _cpu_s(pid: int) -> float:
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


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
    with tempfile.TemporaryDirectory() as folder:
        how = {
            "before": (arguments.before, arguments.before_config, Locks()),
            "after": (arguments.after, *locked(arguments.after_config, locks, Path(folder))),
        }
        for pair in range(arguments.pairs):
            order = ("before", "after") if pair % 2 == 0 else ("after", "before")
            cost = {
                name: cpu_us_per_request(*how[name], arguments.protocol, arguments.requests, arguments.connections)
                for name in order
            }
            ratios.append(cost["after"] / cost["before"])
            more_us.append(cost["after"] - cost["before"])
            print(
                f"pair {pair + 1}: before {cost['before']:.1f} us, after {cost['after']:.1f} us, ratio {ratios[-1]:.3f}",
                flush=True,
            )
    print(f"mean ratio {_interval(ratios, 3)}; more by {_interval(more_us, 1)} us")


def _interval(values: Sequence[float], digits: int) -> str:
    mean = statistics.mean(values)
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    margin = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:.{digits}f}, 95 % interval {mean - margin:.{digits}f} to {mean + margin:.{digits}f}"


if __name__ == "__main__":
    main()
