"""Where a search keeps the full result of each run."""

from pathlib import Path

from gateway.documents.whole_file import write_whole
from loadtest.results import RunResult, to_json


def file_of(folder: Path, number: int) -> Path:
    """number: of the run in its search, from 0."""
    return folder / f"{number:03}.json"


def keep(folder: Path, number: int, result: RunResult) -> None:
    """Raises: OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(file_of(folder, number), to_json(result))


def remove_from(folder: Path, number: int) -> None:
    """Remove what an earlier search has kept as this run and those after it: it would pass for what this one cannot keep.

    Raises: OSError.
    """
    for path in folder.glob("*.json"):
        if path.stem.isdecimal() and int(path.stem) >= number and path == file_of(folder, int(path.stem)):
            path.unlink()
