"""Does a hostile client delay another one? Every attack of tests/hostile, beside a client that asks 1200 times a second.

    python -m benchmarks.hostile [--only memory,bomb] [--seconds 3] [--tls]

Each attack is made again and again for some seconds. The client that observes is a process of its own: it asks by REST and by
gRPC in turn when it is time to, whatever came of the requests before, and counts the delay from then. It asks a model of its
own, which shares no session with those that are attacked, and a sixth of the time an attacked one: that queue it shares with
whatever the attack has the model compute, so its delay is told and not judged. Attackers have a lower priority, so that they
do not take the processor from either. Where nobody attacks, the same is observed before, between and afterwards. Exit status 1:
under an attack one request of a thousand to its own model was delayed by 100 ms more than it is then.

--tls: the gateway, its client and its attackers speak TLS, and the attacks on TLS itself are made as well.

Nothing else may run on the machine: how much of the time the gateway's loop was ready and waited for a processor is told, too.
"""

import argparse
import array
import contextlib
import os
import selectors
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from tests.certificates import Authority
from tests.hostile import bench as attacked
from tests.hostile import over_tls, test_grpc, test_invocations, test_memory, test_rest, test_tls
from tests.hostile.bench import Address, Attack
from tests.served.gateway_process import ROOT, served

MOST_DELAY_S: Final = 0.1
ATTACKED: Final = "wide"  # the model whose queue attacks may fill: that it refuses a request is an answer, too
_RATES: Final = {"own": 1000, ATTACKED: 200}  # of requests, by model
_LANES: Final = 32  # connections of each protocol and model, so that one slow answer does not hold up the next request
_SETTLE_S: Final = 0.5
_SETTLED_S: Final = 0.05
_SETTLED_WITHIN_S: Final = 30.0
_ATTACKERS: Final = 10  # added to their nice value
_OBSERVER: Final = -10  # its nice value, if it may: else it is delayed itself where both processors are busy
MODULES: Final = (test_rest, test_invocations, test_grpc, test_memory)

BODY: Final = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,4],"data":[1,2,3,4]}]}'
REST: Final = b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"


# the client that observes


class RestLane:
    """One connection; one request at a time. due_s: of that."""

    def __init__(self, address: Address, model: str, sockets: Any) -> None:
        self.model = model
        self.socket = sockets.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.due_s = 0.0
        self._came = b""

    def ask(self, due_s: float) -> None:
        self.due_s = due_s
        self.socket.send(REST % (self.model.encode(), len(BODY), BODY))

    def answered(self) -> bool:
        """Read on; whether the answer is here. Raises: RuntimeError, if it is an error; BlockingIOError, if nothing came."""
        self._came += self.socket.recv(1 << 16)
        head, separator, body = self._came.partition(b"\r\n\r\n")
        if self.model != ATTACKED and not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"got {self._came!r}")
        if not separator or len(body) < int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]):
            return False
        self._came = b""
        return True


class GrpcLane:
    """Likewise. The window of what it is sent is as wide as can be, and what it sends is far from the server's."""

    def __init__(self, address: Address, model: str, sockets: Any) -> None:
        self.model = model
        self.socket = sockets.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(
            test_grpc.PREFACE
            + test_grpc.frame(test_grpc.SETTINGS, 0, 0)
            + test_grpc.frame(test_grpc.WINDOW_UPDATE, 0, 0, (2**31 - 1 - 65_535).to_bytes(4))
        )
        self.socket.setblocking(False)
        self.due_s = 0.0
        self._came = b""
        self._stream = -1
        asked = pb.ModelInferRequest(model_name=model, raw_input_contents=[bytes(16)])
        asked.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 4])
        self._message = test_grpc.message(asked.SerializeToString())

    def ask(self, due_s: float) -> None:
        self.due_s = due_s
        self._stream += 2
        self.socket.send(test_grpc.call(self._stream, self._message))

    def answered(self) -> bool:
        self._came += self.socket.recv(1 << 16)
        ended = False
        while len(self._came) >= 9 and len(self._came) >= (end := 9 + int.from_bytes(self._came[:3])):
            kind, flags, number = self._came[3], self._came[4], int.from_bytes(self._came[5:9])
            if kind == test_grpc.HEADERS and flags & test_grpc.END_STREAM and number == self._stream:
                if self.model != ATTACKED and b"grpc-status\x010" not in self._came[9:end]:
                    raise RuntimeError(f"got {self._came[9:end]!r}")
                ended = True
            elif kind in (test_grpc.RST_STREAM, 7):
                raise RuntimeError(f"got a frame of type {kind}")
            self._came = self._came[end:]
        return ended


def observe(http: Address, rpc: Address, path: str, authority: str) -> None:
    """Ask until killed. To the file: when each request was due, how long it took from then, in seconds, and whether it asked
    the model that is attacked, as doubles.

    authority: the file of who vouches for the server; empty: it speaks no TLS.
    """
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, _OBSERVER)
    sockets: Any = over_tls.Sockets(ssl.create_default_context(cafile=authority)) if authority else socket
    waiting = selectors.EpollSelector()
    free: dict[str, list[RestLane | GrpcLane]] = {}
    for model in _RATES:
        free[model] = [kind(at, model, sockets) for _ in range(_LANES) for kind, at in ((GrpcLane, rpc), (RestLane, http))]
        for lane in free[model]:
            waiting.register(lane.socket, selectors.EVENT_READ, lane)
    told_s = time.monotonic() + 0.1
    due_s = dict.fromkeys(_RATES, told_s)
    done = array.array("d")
    with open(path, "wb", buffering=0) as log:
        while True:
            now_s = time.monotonic()
            for model, rate in _RATES.items():
                while due_s[model] <= now_s and free[model]:
                    free[model].pop().ask(due_s[model])
                    due_s[model] += 1 / rate
            if now_s - told_s > 0.1:
                log.write(done.tobytes())
                done, told_s = array.array("d"), now_s
            next_s = min((due_s[model] for model in _RATES if free[model]), default=now_s + 0.1)
            for key, _ in waiting.select(max(0.0, next_s - time.monotonic())):
                lane = key.data
                with contextlib.suppress(BlockingIOError):  # a part of a record
                    if lane.answered():
                        done.extend((lane.due_s, time.monotonic() - lane.due_s, lane.model == ATTACKED))
                        free[lane.model].insert(0, lane)


# the attacks


@dataclass(frozen=True, slots=True)
class Delays:
    """What the client that observes was delayed by, where it asked its own model, and the attacked one. Seconds."""

    p999_s: float
    most_s: float
    attacked_p999_s: float
    waited: float  # the part of the time that the gateway's loop was ready and had no processor

    def __str__(self) -> str:
        return f"{1e3 * self.p999_s:8.1f} {1e3 * self.most_s:8.1f} {1e3 * self.attacked_p999_s:10.1f} {100 * self.waited:8.0f}"


@dataclass
class Bench:
    """What a test of tests/hostile takes: it attacks, and keeps what was observed meanwhile."""

    http: Address
    grpc: Address
    log: Path
    client: "subprocess.Popen[bytes]"
    seconds: float
    process: int
    seen: Delays = field(default_factory=lambda: Delays(0.0, 0.0, 0.0, 0.0))

    def withstands(self, attack: Attack, most_more_bytes: int = 0) -> None:
        begun_s, waited_s = time.monotonic(), self.waited_s()
        attack(self.http, self.grpc)
        while time.monotonic() < begun_s + self.seconds:
            attack(self.http, self.grpc)
        self.seen = self.delays(begun_s, waited_s)

    def idle(self) -> Delays:
        begun_s, waited_s = time.monotonic(), self.waited_s()
        time.sleep(self.seconds)
        return self.delays(begun_s, waited_s)

    def settle(self) -> None:
        """Wait until requests that an attack has delayed no longer delay others."""
        until_s = time.monotonic() + _SETTLED_WITHIN_S
        while time.monotonic() < until_s:
            begun_s, waited_s = time.monotonic(), self.waited_s()
            time.sleep(_SETTLE_S)
            seen = self.delays(begun_s, waited_s)
            if max(seen.most_s, seen.attacked_p999_s) < _SETTLED_S:
                return

    def waited_s(self) -> float:
        """For a processor, so far: of the gateway's main thread, which has the loop."""
        return int(Path(f"/proc/{self.process}/task/{self.process}/schedstat").read_text().split()[1]) / 1e9

    def delays(self, begun_s: float, waited_s: float) -> Delays:
        """Of the requests that waited between a time and now. waited_s: what `waited_s` was then."""
        ended_s = time.monotonic()
        waited = (self.waited_s() - waited_s) / (ended_s - begun_s)
        while True:
            if self.client.poll() is not None:
                raise RuntimeError("the client that observes was not answered")
            raw = self.log.read_bytes()
            seen = np.frombuffer(raw[: len(raw) // 24 * 24]).reshape(-1, 3)
            if all(
                _answered_until_s(seen[seen[:, 2] == at, 0], rate, begun_s) > ended_s for at, rate in enumerate(_RATES.values())
            ):
                break
            time.sleep(0.05)
        seen = seen[(seen[:, 0] + seen[:, 1] >= begun_s) & (seen[:, 0] <= ended_s)]
        own, attacked = seen[seen[:, 2] == 0, 1], seen[seen[:, 2] == 1, 1]
        return Delays(float(np.quantile(own, 0.999)), float(own.max()), float(np.quantile(attacked, 0.999)), waited)


def attacks(module: ModuleType) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """The tests of a module, with each of their parameters."""
    for name, test in vars(module).items():
        if not name.startswith("test_"):
            continue
        title = name.removeprefix("test_").replace("_", " ")
        marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
        if not marks:
            yield title, test
        for mark in marks:
            argument, values = mark.args
            for value, label in zip(values, mark.kwargs.get("ids") or values, strict=True):
                yield f"{title}: {label}", lambda bench, test=test, given={argument: value}: test(bench, **given)


@contextlib.contextmanager
def observed(server: str, seconds: float, authority: Authority | None) -> Iterator[Bench]:
    """A gateway with its defaults but for a section of its configuration, and the client that observes it."""
    server = server if authority is None else attacked.with_tls(server, authority)
    vouching = "" if authority is None else str(authority.path)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        config, log = directory / "gateway.yaml", directory / "observed"
        config.write_text(server + attacked.MODELS)
        with served(config, "--no-ray", log=directory / "gateway.log") as gateway:
            command = [sys.executable, "-m", "benchmarks.hostile", "--observe", gateway.http, gateway.grpc, str(log), vouching]
            client = subprocess.Popen(command, cwd=ROOT)
            try:
                while not log.exists() or not log.stat().st_size:
                    time.sleep(0.1)
                yield Bench(_address(gateway.http), _address(gateway.grpc), log, client, seconds, gateway.process.pid)
            finally:
                client.kill()
                client.wait()


def _answered_until_s(due_s: np.ndarray, rate: int, begun_s: float) -> float:
    """When the last was due before the first of those that are missing. due_s: of those that were answered."""
    due_s = np.sort(due_s[due_s >= begun_s])
    gaps = np.flatnonzero(np.diff(due_s, prepend=begun_s, append=np.inf) > 1.5 / rate)
    return float(due_s[gaps[0] - 1]) if gaps[0] else begun_s


def _address(text: str) -> Address:
    host, port = text.rsplit(":", 1)
    return Address(host, int(port))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="attacks in whose name one of these stands, with commas between")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each attack, at least")
    parser.add_argument("--tls", action="store_true", help="all speak TLS; with the attacks on that")
    parser.add_argument("--observe", nargs=4, metavar=("HTTP", "GRPC", "FILE", "AUTHORITY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.observe:
        http, rpc, path, vouching = arguments.observe
        observe(_address(http), _address(rpc), path, vouching)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as patched:
        if not arguments.tls:
            return attack_all(arguments, MODULES, None)
        authority = Authority(Path(folder))
        for module in MODULES:
            patched.enter_context(over_tls.speaking(module, authority))
        return attack_all(arguments, (*MODULES, test_tls), authority)


def attack_all(arguments: argparse.Namespace, modules: Sequence[ModuleType], authority: Authority | None) -> int:
    """Returns the exit code."""
    wanted = arguments.only.split(",")
    if not any(word in title for module in modules for title, _ in attacks(module) for word in wanted):
        print(f"--only: got {arguments.only!r}, expected words of attacks' names, with commas between", file=sys.stderr)
        return 2
    found: dict[str, Delays] = {}
    idle: list[Delays] = []
    failed: list[str] = []  # attacks that did not come to their end
    print(
        f"{'delays of others, ms; how long the loop waited for a processor':64} {'p99.9':>8} {'most':>8} "
        f"{'same model':>10} {'waited %':>8}"
    )
    for module in modules:
        chosen = [(title, test) for title, test in attacks(module) if any(word in title for word in wanted)]
        if not chosen:
            continue
        with observed(getattr(module, "SERVER", ""), arguments.seconds, authority) as bench:
            bench.settle()
            idle.append(bench.idle())
            print(f"{'nobody attacks':64} {idle[-1]}", flush=True)
            before = os.nice(0)
            os.setpriority(os.PRIO_PROCESS, 0, min(19, before + _ATTACKERS))
            for title, test in chosen:
                try:
                    test(bench)
                except (OSError, AssertionError) as exc:
                    failed.append(f"{module.__name__}: {title}: {exc!r}")
                    continue
                found[f"{module.__name__}: {title}"] = bench.seen
                print(f"{title[:64]:64} {bench.seen}", flush=True)
                bench.settle()
            with contextlib.suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, 0, before)
            idle.append(bench.idle())
            print(f"{'nobody attacks':64} {idle[-1]}", flush=True)
    allowed_s = max(each.p999_s for each in idle) + MOST_DELAY_S
    beyond = [title for title, delays in found.items() if delays.p999_s > allowed_s]
    most = max(found.values(), key=lambda delays: delays.p999_s)
    print(f"{len(found)} attacks; p99.9 at most {1e3 * most.p999_s:.1f} ms, allowed {1e3 * allowed_s:.1f} ms")
    for title in beyond:
        print(f"beyond it: {title}")
    for title in failed:
        print(f"failed: {title}")
    return int(bool(beyond or failed))


if __name__ == "__main__":
    sys.exit(main())
