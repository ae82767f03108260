"""A model.tar.gz, unpacked: an archive is somebody else's, and what is in it may name files outside of it.

Only files, folders and links among them are taken; none below a link, and none by an absolute path. What the archive says of
owners and rights is left aside, as tarfile's filter `data` has it.
"""

import bz2
import contextlib
import filecmp
import gzip
import hashlib
import lzma
import os
import posixpath
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, cast

from gateway.errors import ConfigError
from gateway.process.kept_folders import making, put_in_place, take

_MOST_MEMBERS: Final = 100_000
_MOST_BYTES: Final = 64 << 30
_DEEPEST: Final = 64  # folders within each other
_MOST_HEADER_BYTES: Final = 1 << 20  # which tarfile reads as one: a gigabyte of it is a megabyte in the archive
_COMPRESSED: Final[dict[bytes, Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}


def unpacked(archive: Path, kept: Path, *, most_members: int = _MOST_MEMBERS, most_bytes: int = _MOST_BYTES) -> Path:
    """The folder in `kept` that has what is in the archive; it is unpacked once, until it is another file.

    Raises: ConfigError, for an archive that cannot be read, names what is not in it, or is too large; nothing is left of it.
    """
    try:
        status = archive.stat()
        seen = f"{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}"
        folder = kept / f"{_short_digest(str(archive.resolve()))}-{_short_digest(seen)}"
        if not take(folder):
            with making(kept) as made:
                _unpack(archive, made, most_members, min(most_bytes, shutil.disk_usage(kept).free))
                put_in_place(made, folder)
    except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as exc:
        again = "" if isinstance(exc, OSError) and exc.errno else "; copy or download it again, whole"
        raise ConfigError(f"{archive}: cannot be unpacked: {exc}{again}") from exc
    return folder


@contextlib.contextmanager
def unpacked_to_stay(archive: Path, kept: Path, folder: Path) -> Iterator[None]:
    """All of an archive in a folder of its own, which is removed again if what is done meanwhile fails.

    One that is there already, and holds the same, is left as it is. Raises: ConfigError, OSError.
    """
    made = unpacked(archive, kept)
    if os.path.lexists(folder):
        if not _same(made, folder):
            raise ConfigError(f"{folder}: is there already, and not as {archive} has it: move it away, or write elsewhere")
        yield
        return
    try:
        shutil.copytree(made, folder, symlinks=True)
        folder.chmod(0o755)  # the other is this user's alone
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _same(one: Path, other: Path) -> bool:
    names = _names_in(one)
    return names == _names_in(other) and all(
        filecmp.cmp(one / name, other / name, shallow=False) for name in names if (one / name).is_file()
    )


def _names_in(folder: Path) -> set[str]:
    names = {path.relative_to(folder) for path in folder.rglob("*")}
    return {str(name) for name in names if "__pycache__" not in name.parts}  # which comes about where it is used


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


class _Archived:
    """What an archive holds, which is never read as much of at once as its headers may say."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size_bytes: int) -> bytes:
        if size_bytes > _MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size_bytes} bytes")
        return self._file.read(size_bytes)


def _unpack(archive: Path, into: Path, most_members: int, most_bytes: int) -> None:
    """Raises: ConfigError; tarfile.TarError, OSError, EOFError, ValueError, zlib.error, lzma.LZMAError."""
    members = written = 0
    links: set[str] = set()
    with archive.open("rb") as file:
        begins = file.read(6)
    how = next((how for magic, how in _COMPRESSED.items() if begins.startswith(magic)), open)
    with how(archive, "rb") as file, tarfile.open(archive, "r:", fileobj=cast(IO[bytes], _Archived(file))) as tar:
        for member in tar:
            members += 1
            written += member.size if member.isreg() else 0
            if members > most_members:
                raise ConfigError(f"{archive}: more than {most_members} files: unpack it yourself, and serve the folder")
            if written > most_bytes:
                raise ConfigError(f"{archive}: more than {most_bytes} bytes when unpacked, which is what there is room for")
            if fault := _fault_of(member, links):
                raise ConfigError(f"{archive}: {member.name!r}: {fault}")
            _extract(tar, member, into)
        while rest := file.read(_MOST_HEADER_BYTES):  # to the sum behind it, which tells whether all of it is as it was
            if (written := written + len(rest)) > most_bytes:
                raise ConfigError(f"{archive}: more than {most_bytes} bytes when unpacked, which is what there is room for")


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, into: Path) -> None:
    if hasattr(tarfile, "data_filter"):
        tar.extract(member, into, filter="data")
        return
    # Before Python 3.11.4, as Debian 12 has it: the same rights, of a member in which no fault was found.
    tar.extract(member, into, set_attrs=False)
    if member.isreg():
        executable = 0o755 if member.mode & 0o100 else 0o644
        (into / member.name).chmod(member.mode & executable | 0o600)
        os.utime(into / member.name, (member.mtime, member.mtime))


def _fault_of(member: tarfile.TarInfo, links: set[str]) -> str:
    """Why a member is not taken; empty: it is. links: the symbolic ones before it, to which it is added."""
    name = posixpath.normpath(member.name)
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        return "neither a file nor a folder nor a link"
    if _leaves(member.name) or name.count("/") >= _DEEPEST:
        return "expected a path within the archive"
    if any(each in links for each in _parents(name)) or (name in links and not member.issym()):
        return "below a link"
    if member.islnk():
        target = posixpath.normpath(member.linkname)
        if _leaves(member.linkname) or any(each in links for each in (*_parents(target), target)):
            return f"a link to {member.linkname!r}, expected one to a file of the archive"
    if member.issym():
        # No `..` behind a name: that name may yet become a link, and then lead elsewhere than it looks.
        if _leaves(posixpath.join(posixpath.dirname(name), member.linkname)) or _climbs_late(member.linkname):
            return f"a link to {member.linkname!r}, expected one within the archive"
        links.add(name)
    return ""


def _leaves(name: str) -> bool:
    return posixpath.isabs(name) or posixpath.normpath(name).split("/")[0] == ".." or "\0" in name


def _climbs_late(linkname: str) -> bool:
    parts = [part for part in linkname.split("/") if part not in ("", ".")]
    return ".." in parts[next((at for at, part in enumerate(parts) if part != ".."), len(parts)) :]


def _parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]
