"""One run over all rows: what of it is done lies in a folder beside the output, and is not done again.

`OUTPUT.partial` holds `job.json`, which says what the job is, and for each chunk of rows that is done `N.rows`, the answers,
and `N.bad`, the rows without one, where there are any. `N.rows` is written last: with it the chunk is done. When all are, they
are joined, and the folder is removed. Before, `joining` says where the bad rows go: what lies there and at the output from then
on is this job's, where it is what is joined.
"""

import asyncio
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import msgspec

from backends.base import ModelSpec
from gateway.errors import ConfigError
from gateway.transform.asking import Answer, Asker
from gateway.transform.columns import Columns
from gateway.transform.rows import Bare, Chunk, Row, Unread, chunks, columns_of, format_of
from gateway.transform.storage import DRAFT, FoundFile, Store
from gateway.transform.writing import NUMBER, Done, join, write_bad, write_part

_FORMAT: Final = 1
_JOB: Final = "job.json"
_JOINING: Final = "joining"
_JOINED: Final = "joined"  # the output is there, and all that is left to do is to remove the folder
_LOCK: Final = "lock"
_AT_ONCE: Final = 2  # chunks, so that the end of one does not leave sessions idle


class RowsJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done: another job's parts are not taken for this one's. model: a digest of all that makes its answers."""

    format: int = _FORMAT
    inputs: list[FoundFile]
    model: str
    chunk_rows: int
    written_as: str
    columns: dict[str, str]
    keep: list[str] | None


class Files(NamedTuple):
    """Where a job's results go. bad: the rows without an answer; written only if there are some."""

    output: Store
    bad: Store

    @property
    def partial(self) -> Store:
        return self.output.beside(f"{self.output.path}.partial")

    @property
    def joining(self) -> Store:
        return self.output.beside(f"{self.partial.path}/{_JOINING}")

    def part(self, number: int, kind: str) -> Store:
        return self.output.beside(f"{self.partial.path}/{number:08}.{kind}")


def begin(files: Files, job: RowsJob, *, restart: bool) -> set[int]:
    """The chunks that are done already. restart: throw away what there is. Raises: ConfigError, where it is another job's."""
    partial = files.partial
    there = {name for name in partial.names() - {_LOCK} if not name.endswith(DRAFT)}
    if there and not there & {_JOB, _JOINED}:
        raise ConfigError(f"{partial.path}: a folder of something else: expected none, or one of `gateway batch`")
    done = _numbers(there, "rows")
    if there and (restart or _JOINED in there or not done):  # with nothing done, options may change
        _clear(partial, _LOCK)
        done = set()
    if done:
        _check_same(job, partial.beside(f"{partial.path}/{_JOB}").read(), partial.path)
        for number in _numbers(there, "bad") - done:  # of one that was broken off before it was done
            files.part(number, "bad").remove()
    _check_free(files)
    files.bad.check_writable()
    if not done:
        with partial.beside(f"{partial.path}/{_JOB}").written() as file:
            file.write(msgspec.json.format(msgspec.json.encode(job)))
    return done


def bad_before(files: Files, done: set[int]) -> int:
    """How many rows of chunks that are done already have no answer."""
    with_bad = done & _numbers(files.partial.names(), "bad")
    return sum(files.part(number, "bad").read().count(b"\n") for number in with_bad)


def _numbers(names: set[str], kind: str) -> set[int]:
    return {int(name.partition(".")[0]) for name in names if name.endswith(f".{kind}")}


def _check_free(files: Files) -> None:
    """Raises: ConfigError, where something lies at the places of the results that is not this job's."""
    output, bad, partial = (store.resolved() for store in (files.output, files.bad, files.partial))
    if bad.files == output.files and (bad.path == output.path or bad.path.startswith(f"{partial.path}/")):
        raise ConfigError(f"{files.bad.path}: expected another file than OUTPUT for rows without an answer")
    joining = files.joining.read().decode() if files.joining.exists() else None
    if joining is None and files.output.exists():
        raise ConfigError(f"{files.output.path}: exists: name another file, or remove it")
    if joining != bad.path and files.bad.exists():
        raise ConfigError(f"{files.bad.path}: exists: name another file, or remove it")


def _check_same(job: RowsJob, told: bytes, where: str) -> None:
    try:
        before = msgspec.json.decode(told, type=RowsJob)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{where}/{_JOB}: not readable ({exc}): --restart begins anew") from exc
    differ = [name for name in job.__struct_fields__ if getattr(job, name) != getattr(before, name)]
    if differ:
        words = ", ".join(_CALLED.get(name, name) for name in differ)
        raise ConfigError(f"{where}: what is done there is of another job ({words} differ): --restart throws it away")


_CALLED: Final = {
    "inputs": "the input files", "model": "the model or its configuration", "written_as": "the output's format",
    "chunk_rows": "--chunk-rows", "columns": "--column", "keep": "--keep",
}  # fmt: skip


@contextmanager
def alone(files: Files) -> Iterator[None]:
    """Nobody else on this machine works on the same output meanwhile. Raises: ConfigError, if somebody does."""
    if not files.output.local:
        yield
        return
    files.output.check_writable()
    folder = files.partial.path
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/{_LOCK}", "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder}: another `gateway batch` is at work there") from None
        try:
            yield
        finally:
            if (names := files.partial.names()) and names <= {_LOCK, _JOB}:  # nothing is done
                files.partial.remove_folder()


class RowsWork:
    """Asks for the rows of a job that are not done. Life: made -> run, on an event loop."""

    def __init__(
        self,
        job: RowsJob,
        source: Store,
        files: Files,
        spec: ModelSpec,
        asker: Asker,
        done: set[int],
        told: Callable[[int, int, float], None],
    ) -> None:
        """told: rows that are finished, how many of them are bad, and how much of the input was read for them and those before
        them, as a share; chunk by chunk, as they end. Raises: ConfigError, for an input that the model has not.
        """
        self._job = job
        self._source = source
        self._files = files
        self._spec = spec
        self._asker = asker
        self._columns = Columns(spec, job.columns, job.keep)
        self._done = done
        self._told = told
        self._bytes = max(1, sum(file.size_bytes for file in job.inputs))

    async def run(self) -> None:
        """Finish every chunk, and join them. Raises: ConfigError, Unavailable, OSError; what is done stays then."""
        checked = await asyncio.to_thread(self._check_columns)
        rows = chunks(self._source, self._job.inputs, self._job.chunk_rows, self._done.__contains__, self._columns.wanted)
        at_work: set[asyncio.Task[None]] = set()
        first = True
        try:
            while (chunk := await asyncio.to_thread(next, rows, None)) is not None:
                for row in chunk.rows:
                    if isinstance(row, dict):
                        self._columns.rename(row)
                if chunk.number == 0 and not checked and isinstance(chunk.rows[0], dict):
                    self._columns.check_row(chunk.rows[0], self._job.inputs[0].path)
                at_work.add(asyncio.create_task(self._finish(chunk, first=first)))
                if first or len(at_work) >= _AT_ONCE:
                    ended, at_work = await asyncio.wait(at_work, return_when=asyncio.FIRST_COMPLETED)
                    for task in ended:
                        task.result()
                first = False
            for task in list(at_work):
                await task
        finally:
            for task in at_work:
                task.cancel()
            await asyncio.gather(*at_work, return_exceptions=True)
        await asyncio.to_thread(self._join)

    async def _finish(self, chunk: Chunk, *, first: bool) -> None:
        answers = [
            (self._columns.clash(row) if isinstance(row, dict) else "") or answer
            for row, answer in zip(chunk.rows, await self._asker.answers(chunk), strict=True)
        ]
        if first and not self._done and all(isinstance(answer, str) for answer in answers):
            raise ConfigError(f"none of the first {len(answers)} rows has an answer; the first: {answers[0]}")
        bad = await asyncio.to_thread(self._write, chunk, answers)
        self._told(len(answers), bad, chunk.read_bytes / self._bytes)

    def _write(self, chunk: Chunk, answers: Sequence[Answer | str]) -> int:
        """Gives how many are bad."""
        good: list[Done] = []
        bad: list[tuple[int, str, Row | Bare | Unread]] = []
        for number, (row, answer) in enumerate(zip(chunk.rows, answers, strict=True), chunk.first):
            if isinstance(answer, str):
                bad.append((number, answer, row))
            else:
                good.append(Done(number, self._columns.kept(row) if isinstance(row, dict) else {}, answer))
        if bad:
            write_bad(self._files.part(chunk.number, "bad"), bad)
        write_part(self._files.part(chunk.number, "rows"), self._job.written_as, good, self._spec)
        return len(bad)

    def _check_columns(self) -> bool:
        """By the first file that says what its columns are; whether one does. Raises: ConfigError, OSError."""
        for file in self._job.inputs:
            if names := columns_of(self._source.beside(file.path)):
                self._columns.check_file(names, file.path)
                return True
        return False

    def _join(self) -> None:
        files = self._files
        names = sorted(files.partial.names())
        parts = [files.partial.beside(f"{files.partial.path}/{name}") for name in names if name.endswith(".rows")]
        bad = [files.partial.beside(f"{files.partial.path}/{name}") for name in names if name.endswith(".bad")]
        _check_free(files)
        with files.joining.written() as file:
            file.write(files.bad.resolved().path.encode())
        if bad:
            join(files.bad, "jsonl", bad)
        join(files.output, self._job.written_as, parts)
        with files.partial.beside(f"{files.partial.path}/{_JOINED}").written():
            pass
        _clear(files.partial, _JOINED)
        files.partial.remove_folder()


def _clear(partial: Store, but: str) -> None:
    """Whenever that is broken off, what is left says whose it is, and whether the output is there: they go last."""
    for name in sorted(partial.names() - {but}, key=lambda name: (name == _JOINED, name == _JOB, name)):
        partial.beside(f"{partial.path}/{name}").remove()


def job_of(
    source: Store, model: str, *, chunk_rows: int, output: str, columns: dict[str, str], keep: list[str] | None
) -> RowsJob:
    """Raises: ConfigError."""
    inputs = source.found()
    endings = {format_of(seen.path) for seen in inputs}
    if len(endings) > 1:
        raise ConfigError(f"{source.path}: files of several formats: {', '.join(sorted(endings))}: name them by a pattern")
    if not output.lower().endswith((".jsonl", ".ndjson", ".csv", ".parquet")):
        raise ConfigError(f"{output}: expected a name that ends in .jsonl, .csv or .parquet")
    written_as = format_of(output)
    if keep is not None and NUMBER in keep:
        raise ConfigError(f"--keep: {NUMBER} is what a row's number is called there")
    return RowsJob(inputs=inputs, model=model, chunk_rows=chunk_rows, written_as=written_as, columns=columns, keep=keep)
