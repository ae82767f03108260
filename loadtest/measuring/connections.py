"""How many connections a run may open: what was asked, what its users need, and what this machine allows."""

import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Final

from gateway.process.machine import allow_files
from loadtest.errors import UsageError
from loadtest.results import GeneratorReport, LoadSpec

MOST: Final = 60_000
_DEFAULT: Final = 256
_GRPC_DEFAULT: Final = 4  # one HTTP/2 connection is served by one thread in most servers
_OTHER_FILES: Final = 32  # what a run opens beside its connections
_FILES_OF_A_PROCESS: Final = 4
_PORTS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def settled(spec: LoadSpec, users: int) -> LoadSpec:
    """The spec with how many connections each process may open. The soft limit of open files is raised as far as they need it.

    users: 0 for an open loop. Raises: UsageError, for fewer than the users need, or more than can be opened here.
    """
    processes = min(spec.processes, users or spec.processes)
    own_users = -(-users // processes)  # of the process that has most
    over_grpc = spec.protocol == "grpc"
    wanted = spec.connections or (_GRPC_DEFAULT if over_grpc else max(_DEFAULT, own_users))
    if not over_grpc and wanted < own_users:
        raise UsageError(
            f"--connections {wanted}: {own_users} users of one process would wait for each other's: "
            f"ask for {own_users}, or leave it out"
        )
    needed = wanted if over_grpc or not users else own_users
    files = _files(needed, processes)
    if files < needed:
        if spec.connections is None and not users and files > 0:
            return replace(spec, connections=files)
        raise UsageError(
            f"{_asked(spec, users)}: this process may open {max(files, 0)} connections, {needed} are needed: "
            f"raise its limit of open files ({resource.getrlimit(resource.RLIMIT_NOFILE)[1]}, ulimit -Hn), "
            "or ask for more --processes or less"
        )
    ports = _ports()
    if needed * processes > ports:
        raise UsageError(
            f"{_asked(spec, users)}: this machine has ports for {ports} connections to one address ({_PORTS}), "
            f"{needed * processes} are needed"
        )
    return replace(spec, connections=wanted)


def waited(spec: LoadSpec, found: GeneratorReport) -> tuple[str, ...]:
    """A warning, if requests waited because all connections were in use. spec: `settled`."""
    most = (spec.connections or 0) * found.processes
    if found.connections < most or found.connection_wait_p99_ms <= found.send_lag_limit_ms:
        return ()
    return (
        f"requests waited for a connection of the generator (p99 {found.connection_wait_p99_ms:.3g} ms), "
        f"all {found.connections} were in use: latency has this wait in it, service has not",
    )


def _asked(spec: LoadSpec, users: int) -> str:
    return f"--pattern {spec.pattern}" if users else f"--connections {spec.connections or _DEFAULT}"


def _files(needed: int, processes: int) -> int:
    """For how many connections this process may open files; it has then raised its own limit, where that has to be."""
    taken = len(os.listdir("/dev/fd")) + _OTHER_FILES + _FILES_OF_A_PROCESS * processes
    return min(MOST, allow_files(taken + needed) - taken)


def _ports() -> int:
    """That connections to one address can begin at."""
    try:
        low, high = map(int, _PORTS.read_text().split())
    except (OSError, ValueError):  # no Linux
        return MOST
    return high - low + 1
