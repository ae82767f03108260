"""How much load can one process offer, honestly? Against a null server beside it.

The null server takes a core of its own, so a machine that only sends can offer at least this much.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from loadtest.errors import LoadtestError
from loadtest.measuring import children
from loadtest.results import LoadSpec, Protocol, RunResult

LEAST_LIMIT_RPS: Final = 5_000.0  # any machine that is not busy otherwise sends that from one process
_LIMIT_S: Final = 2.0  # for `generator_limit_rps`, the start of the null server included
_LIMIT_USERS: Final = 64  # enough to keep the generator busy
_LIMIT_RUN_S: Final = 0.3
_HONEST_SHARES: Final = (0.8, 0.6, 0.45)  # of what users can get out of one process, offered as an open loop
_NULL_SERVER: Final = (sys.executable, "-m", "loadtest.load.nullserver")
_limits: dict[bool, float] = {}  # by whether it is gRPC; measured once per process


@dataclass(frozen=True, slots=True)
class NullServer:
    """Where it listens. tls: whether it speaks that."""

    http_port: int
    grpc_port: int
    tls: bool = False

    @classmethod
    def told(cls, line: str, *, tls: bool = False) -> Self:
        """From the first line that its process writes. Raises: LoadtestError."""
        ports = line.split()
        if len(ports) != 2:
            raise LoadtestError("the null server did not start: see its message above")
        return cls(int(ports[0]), int(ports[1]), tls)

    def target(self, protocol: Protocol) -> str:
        scheme, port = ("grpc", self.grpc_port) if protocol == "grpc" else ("http", self.http_port)
        return f"{scheme}{'s' * self.tls}://127.0.0.1:{port}"


@contextmanager
def null_server(*files: Path) -> Iterator[NullServer]:
    """Run the null server as a process of its own. files: a certificate for 127.0.0.1 and its key, to speak TLS by."""
    with subprocess.Popen(
        (*_NULL_SERVER, *map(str, files)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield NullServer.told(process.stdout.readline(), tls=bool(files))
        # Leaving closes its standard input, which ends it.


async def generator_limit_rps(protocol: Protocol) -> float:
    """The rate that one process can offer honestly on this machine: in time, against a server that costs nothing.

    Measured once per process for REST and for gRPC, in about two seconds; on a machine that is busy it comes out lower, but
    never below LEAST_LIMIT_RPS. More than that is no question to ask a candidate: the answer would be about the generator.
    """
    grpc = protocol == "grpc"
    if grpc not in _limits:
        found = LEAST_LIMIT_RPS
        with suppress(TimeoutError):  # so busy is the machine
            async with asyncio.timeout(2 * _LIMIT_S):
                found = max(found, await _find_limit("grpc" if grpc else "rest-json"))
        _limits[grpc] = found
    return _limits[grpc]


async def _find_limit(protocol: Protocol) -> float:
    from loadtest.measuring.generator import measure

    began_s = time.monotonic()
    async with _null_server_beside() as server:
        spec = LoadSpec(
            server.target(protocol), protocol=protocol, model="null", duration_s=_LIMIT_RUN_S, timeout_s=0.3, warmup_s=0.0
        )
        busy = await measure(replace(spec, pattern=f"users:count={_LIMIT_USERS}"))
        for share in _HONEST_SHARES:
            offered = await measure(replace(spec, rate_rps=max(1000.0, share * busy.succeeded_rps)))
            if offered.valid and keeps_up(offered):
                return offered.asked_rps
            if time.monotonic() - began_s > _LIMIT_S:
                break
    return share * busy.succeeded_rps


@asynccontextmanager
async def _null_server_beside() -> AsyncIterator[NullServer]:
    """`null_server` that does not keep the event loop waiting, and ends when it is cancelled."""
    process = await children.begin(*_NULL_SERVER)
    assert process.stdout is not None
    try:
        yield NullServer.told((await process.stdout.readline()).decode())
    finally:
        await children.end(process)


def keeps_up(result: RunResult) -> bool:
    """Whether what was asked was sent and answered without a growing backlog, however late each request was."""
    backlog_s = result.latency.p99 / 1e3
    return (
        result.sent_rps >= 0.99 * result.asked_rps and result.succeeded == result.requests and backlog_s < 0.2 * result.window_s
    )
