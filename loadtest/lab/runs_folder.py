"""Where a search keeps the full result of each run."""

from pathlib import Path

from gateway.documents.whole_file import write_whole
from loadtest.results import RunResult, to_json


def file_of(folder: Path, number: int) -> Path:
    """number: of the run in its search, from 0."""
    return folder / f"{number:03}.json"


def keep(folder: Path, number: int, result: RunResult | None) -> None:
    """None: it has no result, and what an earlier search left there goes. Raises: OSError."""
    path = file_of(folder, number)
    if result is None:
        path.unlink(missing_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, to_json(result))
