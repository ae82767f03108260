"""SHA256SUMS: what the files of a package were when it was made, as `sha256sum` writes and checks it.

It shows what was cut short, mixed up or edited on the way. Who can write to the folder can write to it as well: it is no
signature.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Final

from backends.regular_file import opened_file
from gateway.documents.faults import Fault

SUMS: Final = "SHA256SUMS"
_LINE: Final = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_MOST_BYTES: Final = 4 << 20
_AGAIN: Final = "copy or unpack the package again, whole"


def as_text(hashes: Mapping[str, str]) -> str:
    """hashes: SHA-256 in hexadecimal, by path from the folder of the file."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(hashes.items()))


def altered(configuration: Path) -> Iterator[Fault]:
    """What is no longer as a SHA256SUMS beside a configuration says; nothing, where there is none that lists it.

    Reads every file that it lists.
    """
    folder = configuration.parent
    try:
        with opened_file(folder / SUMS) as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return
    except OSError as exc:
        yield Fault(str(folder / SUMS), found=f"cannot be read: {exc.strerror}", remedy=_AGAIN)
        return
    if configuration.name.encode() not in data:  # of something else
        return
    try:
        hashes = _read(data)
    except ValueError as exc:
        yield Fault(str(folder / SUMS), found=f"no list of SHA-256 sums: {exc}", remedy=_AGAIN)
        return
    if configuration.name in hashes:
        for name, digest in hashes.items():
            yield from _compared(folder / name, digest)


def _read(data: bytes) -> dict[str, str]:
    """Raises: ValueError."""
    if len(data) > _MOST_BYTES:
        raise ValueError(f"longer than {_MOST_BYTES >> 20} MiB")
    hashes = {}
    for number, line in enumerate(data.decode().removesuffix("\n").split("\n"), 1):
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(f"line {number} is no sum and name")
        path = PurePosixPath(found[2])
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"line {number} names a file outside of the package")
        hashes[found[2]] = found[1]
    return hashes


def _compared(path: Path, digest: str) -> Iterator[Fault]:
    try:
        with opened_file(path) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        yield Fault(str(path), found=f"is missing, though {SUMS} lists it", remedy=_AGAIN)
    except OSError as exc:
        yield Fault(str(path), found=f"cannot be read: {exc.strerror}", remedy=_AGAIN)
    else:
        if found != digest:
            remedy = f"{_AGAIN}; if you have changed it, remove {SUMS}"
            yield Fault(str(path), found=f"is not as it was packed: SHA-256 is {found}, expected {digest}", remedy=remedy)
