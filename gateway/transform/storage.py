"""Where files are: this machine, S3 and what else Arrow or fsspec can reach by a URI.

A file is there whole or not at all: on this machine it is renamed when it is written, a store of objects has it once it is
closed.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from filecmp import cmp
from fnmatch import fnmatchcase
from typing import IO, Any, Final, NamedTuple, Self

import pyarrow as pa
from pyarrow import fs

from gateway.errors import ConfigError, GatewayError

_GLOB: Final = frozenset("*?[")
DRAFT: Final = ".draft"  # how the name of a file ends that is being written
PACKED: Final = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
"""How a name ends -> how Arrow calls the packing."""


class FoundFile(NamedTuple):
    """A file as it was found: if that differs later, it is another. modified_ns: since 1970; 0: the store does not say."""

    path: str
    size_bytes: int
    modified_ns: int


class FileFailed(OSError):
    """What was wrong with a file, which the words begin with."""


def without_query(path: str) -> str:
    """A URL may be signed, behind its path."""
    return path.partition("?")[0] if "://" in path else path


class Store(NamedTuple):
    """A place in a file system. local: of this machine. path: in it, without a scheme."""

    files: Any
    path: str
    local: bool

    @classmethod
    def at(cls, place: str) -> Self:
        """place: a path, or a URI such as s3://bucket/folder/rows.jsonl. Raises: ConfigError."""
        if "://" not in place:
            return cls(fs.LocalFileSystem(), os.path.abspath(place), True)
        try:
            files, path = fs.FileSystem.from_uri(place)
        except (pa.ArrowException, OSError, ValueError) as exc:
            files, path = _by_fsspec(place, exc)
        return cls(files, path.rstrip("/"), isinstance(files, fs.LocalFileSystem))

    def beside(self, path: str) -> Self:
        return self._replace(path=path)

    def resolved(self) -> Self:
        """Without links: two names of one file are one."""
        return self._replace(path=os.path.realpath(self.path)) if self.local else self

    def exists(self) -> bool:
        return self._info().type is not fs.FileType.NotFound

    def found(self) -> list[FoundFile]:
        """The file here; of a folder or a pattern (`*.parquet`) all its files, by name. Hidden ones are left out.

        What has just this name is no pattern. Raises: ConfigError, if there is none.
        """
        folder, _, name = without_query(self.path).rpartition("/")
        info = self._info()
        if info.type is fs.FileType.File:
            return [_seen(info)]
        if info.type is fs.FileType.Directory:
            folder, name = self.path, "*"
        elif _GLOB & set(folder) and not self.beside(folder).exists():
            raise ConfigError(f"{self.path}: a pattern is taken for the files of one folder only, not for folders")
        elif not _GLOB & set(name):
            raise ConfigError(f"{self.path}: no such file or folder")
        infos = self.beside(folder)._within()
        seen = [_seen(info) for info in infos if info.type is fs.FileType.File and fnmatchcase(info.base_name, name)]
        seen = [each for each in seen if not each.path.rpartition("/")[2].startswith((".", "_"))]
        if not seen:
            raise ConfigError(f"{self.path}: no file there")
        return sorted(seen)

    def names(self) -> set[str]:
        """What is in this folder; nothing, if there is none."""
        return {info.base_name for info in self._within()}

    def read(self) -> bytes:
        with self.stream() as file:
            return bytes(file.read())

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """To read at any place of it, as Parquet does."""
        with self._named(), self.files.open_input_file(self.path) as file:
            yield file

    @contextmanager
    def stream(self) -> Iterator[IO[bytes]]:
        """To read from its beginning, as it is."""
        with self._named(), self.files.open_input_stream(self.path, compression=None) as file:
            yield file

    @contextmanager
    def unpacked(self) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
        """To read from its beginning: what is packed by gzip or the like, as its name says, is unpacked.

        With it comes how far it is read, in bytes as they are in the store.
        """
        with self.open() as file:
            name = without_query(self.path).lower()
            packing = next((PACKED[ending] for ending in PACKED if name.endswith(ending)), None)
            if packing is None:
                yield file, file.tell
            else:
                with pa.CompressedInputStream(file, packing) as opened:
                    yield opened, file.tell

    @contextmanager
    def written(self, *, replace: bool = True) -> Iterator[IO[bytes]]:
        """A file to write. Where that fails, there is none of it.

        replace: what is there already; else, on this machine, that stays. Raises: ConfigError, if it does and is another.
        """
        with self._named():
            yield from self._written(replace)

    def _written(self, replace: bool) -> Iterator[IO[bytes]]:
        folder, _, name = self.path.rpartition("/")
        if not self.local:
            sink = self.files.open_output_stream(self.path)
            try:
                yield sink
            except BaseException:
                sink.close()  # there is no other way to end it
                self.files.delete_file(self.path)
                raise
            sink.close()
            return
        os.makedirs(folder, exist_ok=True)
        draft = f"{folder}/.{name}{DRAFT}"
        try:
            with suppress(FileNotFoundError):  # of a run that was killed: it may be another name of its file
                os.unlink(draft)
            with open(draft, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if replace or not self._linked(draft):
                os.replace(draft, self.path)
        finally:
            if os.path.exists(draft):
                os.unlink(draft)

    def _linked(self, draft: str) -> bool:
        """Whether the file system can do so. Raises: ConfigError, where another file is."""
        try:
            os.link(draft, self.path)
        except OSError:
            # A run that was broken off here has made the same before.
            if os.path.lexists(self.path) and not (os.path.isfile(self.path) and cmp(draft, self.path, shallow=False)):
                raise ConfigError(f"{self.path}: exists: name another file, or remove it") from None
            return os.path.lexists(self.path)
        return True

    def check_writable(self) -> None:
        """By its folder, or the nearest there is; on this machine only. Raises: ConfigError."""
        folder = os.path.dirname(self.path)
        while self.local and not os.path.lexists(folder):
            folder = os.path.dirname(folder)
        if self.local and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
            raise ConfigError(f"{self.path}: cannot be written: {folder}: expected a folder that may be written to")

    def remove(self) -> None:
        with self._named():
            self.files.delete_file(self.path)

    def remove_folder(self) -> None:
        with self._named():
            self.files.delete_dir(self.path)

    def _info(self) -> Any:
        with self._named():
            return self.files.get_file_info(self.path)

    def _within(self) -> Any:
        with self._named():
            return self.files.get_file_info(fs.FileSelector(self.path, allow_not_found=True))

    @contextmanager
    def _named(self) -> Iterator[None]:
        """What fails there says of which file. Raises: FileFailed."""
        # What fsspec reaches has errors of many libraries, aiohttp's and botocore's among them.
        failures = Exception if isinstance(self.files, fs.PyFileSystem) else (OSError, pa.ArrowException)
        try:
            yield
        except (FileFailed, GatewayError):
            raise
        except failures as exc:
            said = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
            if said in ("", self.path):
                said = f"{type(exc).__name__} {exc.__cause__ or ''}".rstrip()
            raise FileFailed(said if self.path in said else f"{self.path}: {said}") from exc


def _seen(info: Any) -> FoundFile:
    return FoundFile(info.path, info.size, info.mtime_ns or 0)


def _by_fsspec(place: str, arrows: Exception) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs

        files, path = url_to_fs(place)
    except Exception as exc:  # of whichever library reaches it
        raise ConfigError(f"{place}: cannot be reached: {arrows}; nor by fsspec: {exc}") from exc
    return fs.PyFileSystem(fs.FSSpecHandler(files)), path
