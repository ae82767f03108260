"""A gateway as a user starts it, with its defaults, a client that behaves, and what becomes of both during an attack."""

import contextlib
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.certificates import Authority
from tests.served.gateway_process import ROOT, served

MODELS = """
models:
  - name: wide
    inputs: [{name: INPUT0, datatype: FP32, shape: [-1, -1]}]
    outputs: [{name: OUTPUT0, datatype: FP32, shape: [-1, -1]}]
    backends: [{kind: synthetic, fixed_ms: 0, row_ms: 0}]
  - name: own
    inputs: [{name: INPUT0, datatype: FP32, shape: [-1, -1]}]
    outputs: [{name: OUTPUT0, datatype: FP32, shape: [-1, -1]}]
    backends: [{kind: synthetic, fixed_ms: 0, row_ms: 0}]
  - name: text
    inputs: [{name: INPUT0, datatype: BYTES, shape: [-1, -1]}]
    outputs: [{name: OUTPUT0, datatype: BYTES, shape: [-1, -1]}]
    backends: [{kind: synthetic, fixed_ms: 0, row_ms: 0}]
  - name: image
    inputs: [{name: INPUT0, datatype: BYTES, shape: [-1, -1]}]
    outputs: [{name: image_bytes, datatype: BYTES, shape: [-1, -1]}]
    backends: [{kind: synthetic, fixed_ms: 0, row_ms: 0}]
  - name: pair
    inputs: [{name: A, datatype: FP32, shape: [-1, 1]}, {name: B, datatype: INT32, shape: [-1, 1]}]
    outputs: [{name: C, datatype: FP32, shape: [-1, 1]}, {name: D, datatype: INT32, shape: [-1, 1]}]
    backends: [{kind: synthetic, fixed_ms: 0, row_ms: 0}]
"""
# What the gateway holds to is 100 ms. Tests share their machine, with attacks among others, and look for seconds, less the time
# for which others had all cores.
MOST_DELAY_S = 2.0
MOST_MORE_BYTES = 600 << 20
_IDLE_ASKED = 100
_SETTLE_S = 30.0


class Address(NamedTuple):
    """Of a listener."""

    host: str
    port: int


Attack = Callable[[Address, Address], None]
"""Gets the addresses of REST and gRPC. It leaves nothing behind: what it opened, it has closed."""


class Asked(NamedTuple):
    """A request of the client that behaves. waited_s: for how long of took_s others had the cores that it needed."""

    begun_s: float
    took_s: float
    waited_s: float

    @property
    def delay_s(self) -> float:
        """What it took by itself."""
        return self.took_s - self.waited_s


@dataclass(frozen=True)
class Bench:
    """idle_s: the longest delay of an answer of the idle gateway. idle_bytes, idle_files: what its process held then."""

    http: Address
    grpc: Address
    process: psutil.Process
    client: "subprocess.Popen[bytes]"
    log: Path
    idle_s: float
    idle_bytes: int
    idle_files: int
    tls: ssl.SSLContext | None = None

    def withstands(self, attack: Attack, most_more_bytes: int = MOST_MORE_BYTES) -> None:
        """Attack, and see that others were answered in time meanwhile, and that all is as before afterwards.

        most_more_bytes: than an idle gateway holds.
        """
        self.forget_most_bytes()
        begun_s = time.monotonic()
        attack(self.http, self.grpc)
        ended_s = time.monotonic()
        asked = asked_after(self.client, self.log, ended_s)
        slowest = max((each for each in asked if each.begun_s + each.took_s >= begun_s), key=lambda each: each.delay_s)
        told = f"the slowest answer to others took {slowest.delay_s:.3f} s, {self.idle_s:.3f} s where all was idle"
        told += f", and waited {slowest.waited_s:.3f} s for a core"
        print(told)  # shown by pytest -rP
        assert slowest.delay_s < self.idle_s + MOST_DELAY_S, told
        while (files := self.process.num_fds()) > self.idle_files + 16:  # a few are of what starts when it is needed
            assert time.monotonic() < ended_s + _SETTLE_S, f"{files} files are open, {self.idle_files} were"
            time.sleep(0.05)
        while (waiting := self.waiting()) > 0:
            assert time.monotonic() < ended_s + _SETTLE_S, f"{waiting} requests wait"
            time.sleep(0.05)
        most_bytes = self.most_bytes() - self.idle_bytes
        assert most_bytes < most_more_bytes, f"{most_bytes >> 20} MiB more than where all was idle"

    def forget_most_bytes(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def most_bytes(self) -> int:
        """What its process has held at most since then."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))

    def waiting(self) -> float:
        """Requests in the queues."""
        scheme = "http" if self.tls is None else "https"
        url = f"{scheme}://{self.http.host}:{self.http.port}/metrics"
        with urllib.request.urlopen(url, timeout=30, context=self.tls) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("gateway_queue_requests"))


def asked_after(client: "subprocess.Popen[bytes]", log: Path, moment_s: float, count: int = 2) -> list[Asked]:
    """All that the client has asked, once it has asked so often after a moment, and been answered."""
    while True:
        assert client.poll() is None, "the client that behaves was not answered"
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        asked = [Asked(*map(float, line.split())) for line in lines if line.endswith("\n")]
        if sum(each.begun_s >= moment_s for each in asked) >= count:
            return asked
        time.sleep(0.02)


def with_tls(server: str, authority: Authority) -> str:
    """A section `server` of a configuration, perhaps empty, with a certificate of an authority."""
    certificate, key = authority.issue("server")
    tls = f"tls: {{certificate: {certificate}, key: {key}}}"
    return server.replace("server: {", f"server: {{{tls}, ") if server else f"server: {{{tls}}}\n"


@contextlib.contextmanager
def attacked(directory: Path, server: str = "", authority: Authority | None = None) -> Iterator[Bench]:
    """server: its section of the configuration. authority: by which it speaks TLS; None: it does not."""
    config = directory / "gateway.yaml"
    config.write_text((server if authority is None else with_tls(server, authority)) + MODELS)
    log = directory / "asked"
    with served(config, "--no-ray", log=directory / "gateway.log") as gateway:
        command = [sys.executable, "-m", "tests.hostile.behaved", gateway.http, gateway.grpc]
        command += [str(gateway.process.pid), str(log)]
        command += [] if authority is None else [str(authority.path)]
        client = subprocess.Popen(command, cwd=ROOT)
        try:
            asked = asked_after(client, log, 0.0, _IDLE_ASKED)
            process = psutil.Process(gateway.process.pid)
            idle_s = max(each.delay_s for each in asked[10:])  # the first ones connect
            http, grpc = (Address(host, int(port)) for host, port in (a.rsplit(":", 1) for a in gateway[:2]))
            held = process.memory_info().rss, process.num_fds()
            yield Bench(http, grpc, process, client, log, idle_s, *held, None if authority is None else authority.trusted())
        finally:
            client.kill()
            client.wait()
