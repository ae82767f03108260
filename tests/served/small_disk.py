"""A disk of a few megabytes that only one process and its children see: a tmpfs in a mount namespace of their own."""

import subprocess
from pathlib import Path

import pytest

_MOUNT = 'mount -t tmpfs -o size="$0" tmpfs "$1" && '
_BECOME = 'shift && exec "$@"'
_FILL = '{ dd if=/dev/zero of="$1/fill" bs=4k 2>/dev/null; true; } && '


def small_disk(at: Path, *, full: bool = False) -> list[str]:
    """The command that makes one of 2 MiB at a directory, then becomes what follows it. Skips where that is forbidden."""
    inside = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    possible = subprocess.run([*inside, _MOUNT + "true", "64k", str(at)], capture_output=True, text=True, check=False)
    if possible.returncode:
        pytest.skip(f"needs mount namespaces: {possible.stderr.strip()}")
    return [*inside, _MOUNT + (_FILL if full else "") + _BECOME, "2m", str(at)]


def seen_by(pid: int, at: Path) -> Path:
    """A directory as that process sees it."""
    return Path(f"/proc/{pid}/root{at}")


def fill(at: Path) -> Path:
    """Leave no block free; gives the file to remove."""
    file = at / "fill"
    with file.open("wb", buffering=0) as filling:
        try:
            while True:
                filling.write(bytes(4096))
        except OSError:
            return file
