"""What a model takes on disk: its file with its weights, or all of a folder."""

from pathlib import Path

from backends.artifact_digests import weights_of
from backends.files_below import files_below


def artifact_bytes(path: Path) -> int | None:
    """Of a file with the weights beside it, or of all files of a folder; None: there are none. Raises: OSError."""
    if not path.is_file():
        return sum(file.stat().st_size for file in files_below(path)) or None
    try:
        weights = weights_of(path)
    except (IndexError, ValueError, RecursionError):  # a damaged file, which others tell
        weights = []
    return sum(file.stat().st_size for file in (path, *weights) if file.is_file())
