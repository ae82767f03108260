"""System shared memory regions that clients registered: tensors that come and go outside of the message.

Several ingress processes of a node share a port, so a registration made through one of them must hold in all: each region
is one small JSON file in a directory they share, created and removed atomically, and every use looks there first. Each
process keeps the regions it has used open; a registration that was taken back or renewed is seen by its file's identity. One
whose name is not used again is looked for whenever others are opened, or descriptors, and memory without a name, would pile up.

A name may be another client's region by the time that a request is read or its answer written, so each use says when the
request came, and gets no region that was registered since.

Bytes are copied out and in with pread and pwrite instead of being mapped: a client that truncates its segment while a model
reads the mapping would kill the process (SIGBUS). The copy of a batch's rows would be made anyway.
"""

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from gateway.errors import AlreadyExists, InternalError, InvalidArgument, NotFound, Unsupported
from gateway.process.run_dir import private_directory
from gateway.types import RegionRef
from gateway.wire.tensors import Buffer

_SEGMENTS: Final = "/dev/shm"  # where shm_open(3) keeps POSIX shared memory objects on Linux
_MOST_REGIONS: Final = 1024  # each may hold a file descriptor in every ingress process
_LONGEST_NAME: Final = 1024
_LONGEST_KEY: Final = 255  # bytes, of a file's name
_TOUCHED_S: Final = 3600.0
_LOOKED_AT: Final = 16  # files of regions that are open, for each further one


@dataclass(frozen=True, slots=True)
class Region:
    """One registration, as the client stated it. key: the name of the POSIX shared memory object.

    registered_ns: `time.monotonic_ns`, which all processes of a node share.
    """

    name: str
    key: str
    offset: int
    byte_size: int
    registered_ns: int = 0

    def stated(self) -> dict[str, object]:
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.byte_size}


@dataclass(frozen=True, slots=True)
class _Open:
    """A region this process has used. identity: of its registration's file."""

    region: Region
    identity: tuple[int, int]
    descriptor: int


class SharedMemoryRegions:
    """The regions registered on this node. One instance per process; all work on the same directory."""

    def __init__(self, directory: str | Path, *, enabled: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        """directory: made if it is not there, and this user's alone. Raises: ConfigError.

        enabled: False answers everything but a status of all with Unsupported.
        """
        self.directory = Path(directory)
        self.enabled = enabled
        self._open: dict[str, _Open] = {}
        self._opens_left = 0  # before those taken back are looked for
        self._clock = clock
        self._young_until_s = clock() + _TOUCHED_S
        if enabled:
            self.directory = private_directory(self.directory)

    def __repr__(self) -> str:
        return f"<SharedMemoryRegions in {self.directory}: {len(self._open)} open here>"

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Name byte_size bytes of the object `key`, from offset on.

        Raises: InvalidArgument (no such object, not one of ours to open, or shorter than that), AlreadyExists.
        """
        self._require_enabled()
        path = self._path(name)
        region = Region(name, key, offset, byte_size, time.monotonic_ns())
        os.close(_open_segment(region))
        if not path.exists() and sum(1 for _ in self.directory.glob("*.json")) >= _MOST_REGIONS:
            raise InvalidArgument(f"unable to register shared memory region '{name}': {_MOST_REGIONS} are registered already")
        # A link appears whole, and fails where the name is taken: no reader sees half a file, no two writers both win.
        draft = self.directory / f"{path.stem}.{os.getpid()}.draft"
        try:
            draft.write_text(json.dumps(asdict(region)), encoding="utf-8")
            # The file's own time is that of the last tick, some ms ago, and its number may be that of one just taken back.
            os.utime(draft, ns=(time.time_ns(), time.time_ns()))
            os.link(draft, path)
        except FileExistsError:
            raise AlreadyExists(f"shared memory region '{name}' already in manager") from None
        except OSError as exc:
            raise InternalError(f"shared memory region '{name}' cannot be kept (server.run_dir): {exc.strerror}") from exc
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()

    def unregister(self, name: str = "") -> None:
        """Forget a region; "" forgets all. One that is not registered is no error. Raises: InternalError."""
        self._require_enabled()
        for path in [self._path(name)] if name else list(self.directory.glob("*.json")):
            try:
                path.unlink(missing_ok=True)
            except OSError as exc:
                raise InternalError(f"a shared memory region cannot be taken back (server.run_dir): {exc.strerror}") from exc
        for each in [name] if name else list(self._open):
            self._forget(each)

    def status(self, name: str = "") -> list[dict[str, object]]:
        """Name, key, offset and byte_size of a region, or of all by name. Raises: NotFound, InternalError."""
        if name:
            self._require_enabled()
            path = self._path(name)
            try:
                return [_read(path).stated()]
            except FileNotFoundError:
                raise NotFound(f"Unable to find system shared memory region: '{name}'") from None
        regions = []
        for path in self.directory.glob("*.json"):
            try:
                regions.append(_read(path).stated())
            except FileNotFoundError:
                continue  # taken back between the listing and the read
        return sorted(regions, key=lambda region: str(region["name"]))

    def read(self, ref: RegionRef, asked_ns: int) -> memoryview:
        """Copy a slice of a region. asked_ns: when the request came, as `time.monotonic_ns`.

        Raises: NotFound (region), InvalidArgument (outside of the region or of the object), InternalError (the system's fault).
        """
        use, at = self._resolve(ref, asked_ns)
        copy = memoryview(np.empty(ref.byte_size, np.uint8))  # type: ignore[arg-type]  # an ndarray is a buffer
        left = copy
        while left:
            try:
                got = os.preadv(use.descriptor, [left], at)  # at most 2 GiB at once
            except OSError as exc:
                raise InternalError(_fault(ref, use, "read", exc)) from exc
            if not got:
                raise InvalidArgument(
                    f"shared memory region '{ref.region}': object '{use.region.key}' is shorter than registered"
                )
            at += got
            left = left[got:]
        return copy

    def write(self, ref: RegionRef, buffer: Buffer, asked_ns: int) -> None:
        """Copy a buffer to the start of a slice of a region. asked_ns: as `read` takes it.

        Raises: NotFound (region), InvalidArgument (slice outside of the region, or the buffer is longer than the slice),
        InternalError (the system's fault: memory is full).
        """
        use, at = self._resolve(ref, asked_ns)
        data = memoryview(buffer)
        if not data.nbytes:
            return
        data = data.cast("B")
        if len(data) > ref.byte_size:
            raise InvalidArgument(
                f"shared memory size specified with the request for region '{ref.region}' ({ref.byte_size} bytes) should be at "
                f"least {len(data)} bytes to hold the results"
            )
        try:
            if os.fstat(use.descriptor).st_size < at + len(data):
                raise InvalidArgument(
                    f"shared memory region '{ref.region}': object '{use.region.key}' is shorter than registered"
                )
            while data:
                written = os.pwrite(use.descriptor, data, at)
                at += written
                data = data[written:]
        except OSError as exc:
            raise InternalError(_fault(ref, use, "written", exc)) from exc

    @contextlib.contextmanager
    def for_a_thread(self) -> "Iterator[SharedMemoryRegions]":
        """The same regions for another thread, which may not use these."""
        regions = SharedMemoryRegions(self.directory, enabled=self.enabled)
        try:
            yield regions
        finally:
            regions.close()

    def close(self) -> None:
        """Close what this process holds open; registrations stay."""
        for name in list(self._open):
            self._forget(name)

    def _require_enabled(self) -> None:
        if not self.enabled:
            raise Unsupported("system shared memory is switched off on this server (server.system_shared_memory)")

    def _path(self, name: str) -> Path:
        """Raises: InvalidArgument, for what is no name."""
        if not 0 < len(name) <= _LONGEST_NAME or not _is_text(name):
            raise InvalidArgument(
                f"shared memory region name: expected 1 to {_LONGEST_NAME} characters of Unicode text, got "
                f"{len(name)} of them: {name[:32]!r}"
            )
        # A client's name may hold any character; its digest is a file name.
        return self.directory / f"{hashlib.sha256(name.encode()).hexdigest()}.json"

    def _resolve(self, ref: RegionRef, asked_ns: int) -> tuple[_Open, int]:
        """The open region and where in its object the slice starts."""
        self._require_enabled()
        if self._clock() >= self._young_until_s:
            self._young_until_s = self._clock() + _TOUCHED_S
            self._keep_young()
        path = self._path(ref.region)
        try:
            identity = _identity(path)
            use = self._open.get(ref.region)
            if use is None or use.identity != identity:
                self._forget(ref.region)
                self._forget_taken_back()
                region = _read(path)
                use = _Open(region, identity, _open_segment(region))
                self._open[ref.region] = use
        except FileNotFoundError:
            self._forget(ref.region)
            raise NotFound(f"Unable to find shared memory region: '{ref.region}'") from None
        except OSError as exc:
            raise InternalError(f"shared memory region '{ref.region}' (server.run_dir): {exc.strerror}") from exc
        if use.region.registered_ns > asked_ns:
            raise NotFound(
                f"shared memory region '{ref.region}' was registered after the request came: the one that it was for is gone"
            )
        if ref.offset < 0 or ref.byte_size < 0 or ref.offset + ref.byte_size > use.region.byte_size:
            raise InvalidArgument(
                f"Invalid offset + byte size for shared memory region: '{ref.region}': {ref.offset} + {ref.byte_size} is "
                f"outside of its {use.region.byte_size} bytes"
            )
        return use, use.region.offset + ref.offset

    def _keep_young(self) -> None:
        """Touch all registrations: what nobody has for days is removed from /tmp by some systems."""
        for path in self.directory.glob("*.json"):
            with contextlib.suppress(OSError), path.open("rb") as file:
                os.utime(file.fileno(), ns=(time.time_ns(), os.fstat(file.fileno()).st_mtime_ns))  # of its identity

    def _forget_taken_back(self) -> None:
        """Close what others have taken back or renewed, before one more is opened. No read or write is under way then."""
        self._opens_left -= 1
        if self._opens_left > 0:
            return
        for name, use in list(self._open.items()):
            try:
                kept = _identity(self._path(name)) == use.identity
            except FileNotFoundError:
                kept = False
            if not kept:
                self._forget(name)
        self._opens_left = len(self._open) // _LOOKED_AT

    def _forget(self, name: str) -> None:
        use = self._open.pop(name, None)
        if use is not None:
            os.close(use.descriptor)


def _read(path: Path) -> Region:
    """Raises: FileNotFoundError, InternalError."""
    try:
        return Region(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError) as exc:
        raise InternalError(
            f"a registration of a shared memory region is unusable (server.run_dir): {path.name}: {exc}"
        ) from exc


def _is_text(name: str) -> bool:
    """Whether it has no lone surrogates, which no encoding has."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _fault(ref: RegionRef, use: _Open, done: str, exc: OSError) -> str:
    return f"shared memory region '{ref.region}': object '{use.region.key}' cannot be {done}: {exc.strerror}"


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def _open_segment(region: Region) -> int:
    """Open the object of a region for reading and writing. Raises: InvalidArgument, also if it is shorter than the region."""
    # shm_open(3): a name is one leading slash and no other, so it can never leave the directory.
    leaf = region.key.removeprefix("/")
    unfit = not leaf or "/" in leaf or "\0" in leaf or leaf in (".", "..")
    if unfit or not _is_text(leaf) or len(leaf.encode()) > _LONGEST_KEY:
        raise InvalidArgument(
            f"Unable to open shared memory region: {region.key[:_LONGEST_KEY]!r}: expected a name like '/name'"
        )
    try:
        descriptor = os.open(f"{_SEGMENTS}/{leaf}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise InvalidArgument(f"Unable to open shared memory region: '{region.key}': {exc.strerror}") from exc
    status = os.fstat(descriptor)
    fault = ""
    if not stat.S_ISREG(status.st_mode):
        fault = "not a shared memory object"
    elif region.offset < 0 or region.byte_size < 1 or region.offset + region.byte_size > status.st_size:
        fault = f"offset {region.offset} and byte size {region.byte_size} are outside of its {status.st_size} bytes"
    if fault:
        os.close(descriptor)
        raise InvalidArgument(f"failed to register shared memory region '{region.name}' ('{region.key}'): {fault}")
    return descriptor
