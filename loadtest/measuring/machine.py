"""Has the hiccup meter run beside a load test: finds whom to watch, starts it, reads what it recorded."""

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Self

import msgspec
import psutil

from loadtest.measuring import children, hiccups
from loadtest.verdict.stalls import Recording, RecordingReader

_READY_S: Final = 5.0
_END_S: Final = 2.0
# Whoever listens there only passes requests on, to where we cannot see: his processes do not stand for the server.
_FORWARDERS: Final = {
    "docker-proxy", "rootlessport", "rootlesskit", "slirp4netns", "pasta", "conmon", "kubectl", "ssh", "sshd", "socat",
    "nginx", "haproxy", "envoy", "traefik", "caddy",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Watched:
    """Whom the meter watches. candidate: the processes that everything of the server descends from; empty if not seen."""

    candidate: tuple[int, ...]
    candidate_cores: tuple[int, ...]
    generator: tuple[int, ...]
    generator_cores: tuple[int, ...]


class RecordingFile:
    """The file that a meter writes, for whoever reads it meanwhile: several may."""

    def __init__(self, fd: int, candidate_cores: tuple[int, ...], generator_cores: tuple[int, ...]) -> None:
        self._fd = fd
        self._reader = RecordingReader(candidate_cores, generator_cores)
        self._read = 0

    def follow(self) -> None:
        """Read what is new: often and little, so that nobody has to wait for all at once."""
        text = os.pread(self._fd, os.fstat(self._fd).st_size - self._read, self._read)
        text = text[: text.rfind(b"\n") + 1]
        self._read += len(text)
        self._reader.feed(text.decode(errors="replace").splitlines())

    def recording(self, origin_ns: int) -> Recording:
        """What was recorded so far, its times from origin_ns (`time.monotonic_ns`)."""
        self.follow()
        return self._reader.recording().since(origin_ns)


class Meter:
    """The meter beside one run, as a context. Where this system does not tell what is needed, it records nothing."""

    def __init__(self, host: str, port: int, *, wanted: bool = True) -> None:
        """host, port: the target's. wanted: False records nothing."""
        self._address = host, port
        self._process: asyncio.subprocess.Process | None = None
        self._file: IO[bytes] | None = None
        self._record: RecordingFile | None = None
        self.cores: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # of candidate and generator, while it records
        if wanted and Path("/proc/loadavg").exists():
            with tempfile.NamedTemporaryFile() as named:
                self._file = open(named.name, "ab+", buffering=0)  # noqa: SIM115  # appending: several processes write

    def __repr__(self) -> str:
        return f"<Meter beside {self._address}, pid {self.pid}>"

    def fileno(self) -> int:
        """Of the file that it writes; -1 if there is none."""
        return self._file.fileno() if self._file is not None else -1

    @property
    def pid(self) -> int | None:
        """Of the meter's process; None while there is none."""
        return self._process.pid if self._process is not None else None

    async def __aenter__(self) -> Self:
        if self._file is None:
            return self
        record = self._file.fileno()
        try:
            watched = await asyncio.to_thread(watched_for, *self._address)
            command = (sys.executable, "-I", "-S", str(Path(hiccups.__file__)), str(record))
            self._process = await children.begin(*command, pass_fds=(record,))
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(msgspec.json.encode(watched) + b"\n")
            async with asyncio.timeout(_READY_S):
                if await self._process.stdout.readline():
                    self.cores = watched.candidate_cores, watched.generator_cores
                    self._record = RecordingFile(record, *self.cores)
        except OSError:
            pass  # no process to be had, or none in time: the run goes on without
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            await self.end()
        finally:  # also of who is cancelled meanwhile
            if self._file is not None:
                self._file.close()

    async def end(self) -> None:
        """Have it write down the rest and end. A second call does nothing."""
        if self._process is not None:
            await children.end(self._process, within_s=_END_S)

    def follow(self) -> None:
        """As `RecordingFile.follow`."""
        if self._record is not None:
            self._record.follow()

    def recording(self, origin_ns: int) -> Recording | None:
        """As `RecordingFile.recording`; None where nothing is recorded."""
        return self._record.recording(origin_ns) if self._record is not None else None


def watched_for(host: str, port: int) -> Watched:
    """This process as the generator, and who serves that address, if that can be seen."""
    own = os.getpid()
    roots = _servers(host, port, own)
    return Watched(roots, tuple(sorted(_cores(roots, own))), (own,), tuple(sorted(os.sched_getaffinity(own))))


def _servers(host: str, port: int, own: int) -> tuple[int, ...]:
    """Whose descendants serve the address; () if it is not here, not visible, or within this very process."""
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        here = {address.address for each in psutil.net_if_addrs().values() for address in each}
        if not addresses & here:
            return ()
        connections = psutil.net_connections("inet")
    except (OSError, psutil.Error):
        return ()
    anywhere = addresses | {"0.0.0.0", "::"}
    listening = [each for each in connections if each.status == psutil.CONN_LISTEN and each.laddr.port == port]
    listeners = {each.pid for each in listening if each.laddr.ip in anywhere}
    pids = [pid for pid in listeners if pid]
    try:
        if len(pids) < len(listeners) or own in pids or any(psutil.Process(pid).name() in _FORWARDERS for pid in pids):
            return ()
        roots = {_root(pid, own) for pid in pids}
        # Who shares the work is connected with it: on Ray the replicas are nobody's children.
        family = {pid for root in roots for pid in _family(root, own)}
        owner = {(each.laddr.ip, each.laddr.port): each.pid for each in connections if each.status == psutil.CONN_ESTABLISHED}
        partners = {owner.get((each.raddr.ip, each.raddr.port)) for each in connections if each.pid in family and each.raddr}
    except (OSError, psutil.Error):
        return ()
    return tuple(sorted(roots | {pid for pid in partners if pid and pid not in family and pid != own}))


def _root(pid: int, own: int) -> int:
    """The oldest ancestor that was started together with it, and did not start us."""
    ours = {own, *(parent.pid for parent in psutil.Process(own).parents())}
    session = os.getsid(pid)
    root = pid
    for parent in psutil.Process(pid).parents():
        if parent.pid <= 1 or parent.pid in ours or os.getsid(parent.pid) != session:
            break
        root = parent.pid
    return root


def _family(root: int, own: int) -> Iterator[int]:
    if root != own:
        yield root
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(root).children():
                yield from _family(child.pid, own)


def _cores(roots: tuple[int, ...], own: int) -> set[int]:
    found: set[int] = set()
    for root in roots:
        for pid in _family(root, own):
            with contextlib.suppress(OSError):
                found |= os.sched_getaffinity(pid)
    return found
