"""A model.tar.gz, unpacked: an archive is somebody else's, and what is in it may name files outside of it.

Only files, folders and links among them are taken; none below a link, and none by an absolute path. What the archive says of
owners and rights is left aside, as tarfile's filter `data` has it.
"""

import hashlib
import os
import posixpath
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Final

from gateway.errors import ConfigError

SUFFIXES: Final = (".tar.gz", ".tgz")

_MOST_MEMBERS: Final = 100_000
_MOST_BYTES: Final = 64 << 30
_DEEPEST: Final = 64  # folders within each other


def is_archive(path: Path) -> bool:
    return path.is_file() and path.name.lower().endswith(SUFFIXES)


def unpacked(archive: Path, kept: Path, *, most_members: int = _MOST_MEMBERS, most_bytes: int = _MOST_BYTES) -> Path:
    """The folder in `kept` that has what is in the archive; it is unpacked once, until it is another file.

    Raises: ConfigError, for an archive that cannot be read, names what is not in it, or is too large; nothing is left of it.
    """
    try:
        status = archive.stat()
        seen = f"{archive.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}"
        folder = kept / hashlib.sha256(seen.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        if folder.is_dir():
            return folder
        made = Path(tempfile.mkdtemp(prefix="unpacking-", dir=kept))
    except OSError as exc:
        raise ConfigError(f"{archive}: cannot be unpacked: {exc}") from exc
    try:
        _unpack(archive, made, most_members, min(most_bytes, shutil.disk_usage(kept).free))
        return put_in_place(made, folder)
    except (tarfile.TarError, OSError, EOFError, ValueError) as exc:
        raise ConfigError(f"{archive}: cannot be unpacked: {exc}") from exc
    finally:
        shutil.rmtree(made, ignore_errors=True)


def put_in_place(made: Path, folder: Path) -> Path:
    """Give a folder its name at once, unless another process has been faster. Raises: OSError."""
    try:
        os.rename(made, folder)
    except OSError:
        if not folder.is_dir():
            raise
    return folder


def _unpack(archive: Path, into: Path, most_members: int, most_bytes: int) -> None:
    """Raises: ConfigError; tarfile.TarError, OSError, EOFError, ValueError."""
    if not hasattr(tarfile, "data_filter"):
        raise ConfigError(f"{archive}: unpacking it needs Python 3.11.4 or later: unpack it (`tar -xf`), and serve the folder")
    members = written = 0
    links: set[str] = set()
    with tarfile.open(archive, "r:*") as tar:
        for member in tar:
            members += 1
            written += member.size if member.isreg() else 0
            if members > most_members:
                raise ConfigError(f"{archive}: more than {most_members} files: unpack it yourself, and serve the folder")
            if written > most_bytes:
                raise ConfigError(f"{archive}: more than {most_bytes} bytes when unpacked, which is what there is room for")
            if fault := _fault_of(member, links):
                raise ConfigError(f"{archive}: {member.name!r}: {fault}")
            tar.extract(member, into, filter="data")


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
