"""What a search has measured so far, one JSON line per event: append-only, so that an interruption loses at most one of them.

The first line names the question: a journal is resumed only if it answers the same one (candidates, prices, SLO, payload,
model; a budget may grow). The last line of a search that came to its end says so; after it a new search begins, unless it is to
go on.
"""

import contextlib
import hashlib
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec

from loadtest.errors import UsageError
from loadtest.load.live_log import try_lock
from loadtest.search.events import Agreed, Entry, Measured, Paid, Predicted, Profiled, Question, TakenBack

KINDS: Final[dict[str, type[Entry]]] = {
    "agreed": Agreed,
    "profiled": Profiled,
    "predicted": Predicted,
    "measured": Measured,
    "taken back": TakenBack,
    "paid": Paid,
}
_CHANGED: Final = "candidates, prices, SLO, payload or model changed"
KEPT: Final = "what is there is kept, and the same command goes on from it, without --fresh"
FINISHED: Final = b'{"finished":true}\n'
NAMES: Final = {kind: name for name, kind in KINDS.items()}


class Journal:
    """Life: open, append any number of events, finish if the search did, close. events: found when opened, oldest first.
    is_empty: nothing that was measured is there.

    While it is open no other search has it: the kernel holds a lock on the file, until this process has ended at the latest.
    """

    def __init__(self, path: Path, question: Question, *, fresh: bool = False, resume: bool = False) -> None:
        """fresh: forget what is there. resume: go on even if that search came to its end.

        Raises: UsageError, if another search has it open, it belongs to another question, or there is nothing to go on from.
        """
        self._path = path
        if resume and not path.exists():
            raise UsageError(_nothing_to_resume(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as refused:
            self._file: FileIO = refused.enter_context(path.open("a+b", buffering=0))
            self.events = self._begin(question, fresh=fresh, resume=resume)
            self.is_empty = all(isinstance(event, Paid) for event in self.events)
            refused.pop_all()

    def _begin(self, question: Question, *, fresh: bool, resume: bool) -> tuple[Entry, ...]:
        path = self._path
        if not try_lock(self._file.fileno()):
            raise UsageError(f"{path}: another search writes here: wait for its end, or name another folder by --out")
        self._file.seek(0)
        lines = [] if fresh else self._file.readall().splitlines(keepends=True)
        head = msgspec.json.encode({"question": fingerprint(question)}) + b"\n"
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()  # the write that an interruption cut short
        if lines and lines[-1] == FINISHED:
            lines = lines[:-1] if resume else []
        if lines and lines[0] != head:
            raise UsageError(f"{path}: belongs to another question ({_CHANGED}): --fresh starts anew")
        if resume and len(lines) < 2:
            raise UsageError(_nothing_to_resume(path))
        events = tuple(_read(line, path, number) for number, line in enumerate(lines[1:], start=2))
        self._file.truncate(sum(map(len, lines)))  # and not written anew: there may be no room for what is there
        if not lines:
            self._write(head)
        return events

    def append(self, event: Entry) -> None:
        self._write(msgspec.json.encode({"event": NAMES[type(event)], "data": event}) + b"\n", told=f": {KEPT}")
        self.is_empty = self.is_empty and isinstance(event, Paid)

    def finish(self) -> None:
        self._write(FINISHED, told=f": {KEPT}")

    def close(self) -> None:
        self._file.close()

    def _write(self, line: bytes, *, told: str = "") -> None:
        """Raises: UsageError; half of a line is left out by who goes on."""
        left = memoryview(line)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as exc:
            raise UsageError(f"{self._path}: cannot be written: {exc.strerror}{told}") from exc


def fingerprint(question: Question) -> str:
    """Equal for equal questions, whatever their budgets, and however many instances can be had."""
    entrants = tuple(replace(entrant, max_count=None, pool="") for entrant in question.entrants)
    asked = replace(question, entrants=entrants, seconds=0.0, max_usd=None, parallel=1, start_s=0.0, beside_usd_per_hour=0.0)
    return hashlib.sha256(msgspec.json.encode(asked)).hexdigest()[:16]


def _nothing_to_resume(path: Path) -> str:
    return f"--resume: {path} has no measurement to go on from: leave --resume out"


def _read(line: bytes, path: Path, number: int) -> Entry:
    try:
        record = msgspec.json.decode(line)
        event: Entry = msgspec.convert(record["data"], KINDS[record["event"]], str_keys=True)
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError) as exc:
        raise UsageError(f"{path}: line {number} is no event: {exc}; --fresh starts anew") from exc
    return event
