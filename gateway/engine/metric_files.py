"""The counts of the other processes of a node: each publishes its own in a file, and reads those of the others.

Several ingress processes share one port, so a scrape reaches any of them, and each answers for all. A file is replaced whole,
so that no half of one is read. Its owner holds a lock beside it for as long as it lives, which no recycled process number can
feign: of those whose owner has ended the counters count on, and the gauges do not. A process that starts adds the files of the
ended into one, so that a node on which many have come and gone stays cheap to read.

What takes long is done in slices: the methods that give a generator are to be run to its end, and its value is the result.

A full disk costs others what is new here, until there is room; nothing of it reaches a request.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from gateway.engine.metric_blocks import State
from gateway.wire.tensors import Buffer

FORMAT: Final = 2
_ENDED: Final = "ended"
_TOUCHED_S: Final = 3600.0

log = logging.getLogger(__name__)

Block = tuple[str, tuple[str, ...], State]
"""Kind, label values, and the values of the kind's fields."""

_encode: Final = msgspec.msgpack.Encoder().encode
_split: Final = msgspec.msgpack.Decoder(tuple[int, list[msgspec.Raw]]).decode
_Number = int | float  # told apart: an int above 2**53 stays what it is
_Written = tuple[str, tuple[str, ...], tuple[tuple[_Number, ...] | dict[str, _Number] | _Number | None, ...]]
_decode: Final = msgspec.msgpack.Decoder(_Written).decode
_decode_all: Final = msgspec.msgpack.Decoder(tuple[int, list[_Written]]).decode


_Content = tuple[tuple[int, int], bytes | list[Block]]
"""What tells this state of a file from others, and what is in it: the blocks, if it was read before."""


def written(blocks: Sequence[Block]) -> bytes:
    """Blocks as they stand in a file."""
    return _encode((FORMAT, blocks))


def read(content: Buffer) -> list[Block] | None:
    """What `written` gave; None: of another format."""
    try:
        number, blocks = _decode_all(content)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return list(blocks) if number == FORMAT else None


class Published(NamedTuple):
    """What one process, or all that have ended together, had counted."""

    blocks: list[Block]
    lives: bool


class NodeFiles:
    """See the module. One per process. directory: this user's alone, of all gateway processes of one application on a node."""

    def __init__(self, directory: Path, role: str = "ingress") -> None:
        """role: of this process. Raises: OSError."""
        self._directory = directory
        self._name = f"{role}-{os.getpid()}-{secrets.token_hex(4)}"
        self._written = b""
        self._encodings = self._written_by = 0
        self._told = False  # that a file could not be written
        self._seen: list[Published] | None = None  # of the others, when it was looked last
        self._young_until_s = 0.0
        # name -> what told this state of it from others, and it
        self._read: dict[str, tuple[tuple[int, int], list[Block]]] = {}
        self._lock = self._locked(f"{self._name}.lock")

    def publish(self, blocks: Sequence[Block]) -> Generator[None, None, None]:
        """Replace what the others see of this process, if it has changed."""
        self._keep_young()
        self._encodings = number = self._encodings + 1
        encoded = []
        for block in blocks:
            encoded.append(msgspec.Raw(_encode(block)))
            yield
        content = _encode((FORMAT, encoded))
        if content == self._written or number < self._written_by:  # one that began later was done first
            return
        self._written_by = number
        path = self._directory / f"{self._name}.blocks"
        try:
            _replace(path, content)
        except OSError as exc:
            if not self._told:
                self._told = True
                log.warning("other processes see old metrics of this one, as %s cannot be written: %s", path, exc.strerror)
        else:
            self._written = content

    def others(self) -> Generator[None, None, list[Published]]:
        """What every other process has published, those that have ended among them."""
        # What was seen before, while one that starts makes one file of several: it may take long, or be stopped.
        how = fcntl.LOCK_SH if self._seen is None else fcntl.LOCK_SH | fcntl.LOCK_NB
        with contextlib.suppress(OSError):
            with self._whole(how):  # and not while it is decoded: who starts waits for it
                names = self._names()
                contents = [(name, self._content(name), name != _ENDED and self._lives(name)) for name in names]
            found = []
            for name, content, lives in contents:
                blocks = yield from self._blocks(name, content)
                if blocks is not None:
                    found.append(Published(blocks, lives))
            for gone in self._read.keys() - names:
                del self._read[gone]
            self._seen = found
        return self._seen or []

    def ended(self) -> Generator[None, None, list[tuple[str, list[Block]]]]:
        """Names and blocks of the processes that have ended. While `folding`."""
        found = []
        for name in self._names():
            if name == _ENDED or not self._lives(name):
                blocks = yield from self._blocks(name, self._content(name))
                if blocks is not None:
                    found.append((name, blocks))
        return found

    def fold(self, names: Sequence[str], blocks: Sequence[Block]) -> None:
        """Put one file in the place of those of ended processes. While `folding`. Raises: OSError."""
        _replace(self._directory / f"{_ENDED}.blocks", written(blocks))
        for name in names:
            if name != _ENDED:
                self._remove(name)

    def forget_ended(self) -> None:
        """Remove what processes have left that have ended. Raises: OSError."""
        with self.folding():
            for name in self._names():
                if not self._lives(name):
                    self._remove(name)

    @contextlib.contextmanager
    def folding(self) -> Iterator[None]:
        """Nobody folds meanwhile, and what others read is from before."""
        with self._whole(fcntl.LOCK_EX):
            yield

    def live(self, role: str) -> bool:
        """Whether another process of this role lives on the node."""
        with os.scandir(self._directory) as entries:
            names = {entry.name.removesuffix(".lock") for entry in entries if entry.name.endswith(".lock")}
        return any(name.startswith(f"{role}-") and self._lives(name) for name in names - {self._name})

    def close(self) -> None:
        """As if the process had ended."""
        os.close(self._lock)

    @contextlib.contextmanager
    def _whole(self, how: int) -> Iterator[None]:
        handle = os.open(self._directory / "all.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, how)
            yield
        finally:
            os.close(handle)

    def _locked(self, name: str) -> int:
        with self.folding():  # or it could be taken for one of the ended before it is locked
            handle = os.open(self._directory / name, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(handle, fcntl.LOCK_EX)
        return handle

    def _keep_young(self) -> None:
        """Touch what is here, now and then: what nobody has for days, as locks, is removed from /tmp by some systems."""
        if time.monotonic() < self._young_until_s:
            return
        self._young_until_s = time.monotonic() + _TOUCHED_S
        for path in self._directory.glob("*.*"):
            with contextlib.suppress(OSError):
                os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))  # which tells readers what is new

    def _names(self) -> set[str]:
        found = {entry.name.removesuffix(".blocks") for entry in os.scandir(self._directory) if entry.name.endswith(".blocks")}
        return found - {self._name}

    def _lives(self, name: str) -> bool:
        try:
            handle = os.open(self._directory / f"{name}.lock", os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
        return False

    def _remove(self, name: str) -> None:
        for suffix in ("blocks", "lock"):
            (self._directory / f"{name}.{suffix}").unlink(missing_ok=True)

    def _content(self, name: str) -> _Content | None:
        """None: it is no longer there."""
        path = self._directory / f"{name}.blocks"
        try:
            status = path.stat()
            told = (status.st_ino, status.st_mtime_ns)
            known = self._read.get(name)
            return told, known[1] if known is not None and known[0] == told else path.read_bytes()
        except OSError:
            return None

    def _blocks(self, name: str, content: _Content | None) -> Generator[None, None, list[Block] | None]:
        """None: of another format, or no longer there."""
        if content is None:
            return None
        told, encoded = content
        if isinstance(encoded, list):
            return encoded
        try:
            number, parts = _split(encoded)
            if number != FORMAT:
                return None
            blocks = []
            for part in parts:
                yield
                blocks.append(_decode(part))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
        self._read[name] = (told, blocks)
        return blocks


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_suffix(".draft")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
