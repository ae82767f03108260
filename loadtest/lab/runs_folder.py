"""Where a search keeps the full result of each run."""

from pathlib import Path

from gateway.documents.whole_file import write_whole
from loadtest.results import RunResult, to_json


def keep(folder: Path, number: int, result: RunResult | None) -> None:
    """number: of the run in its search, from 0. None: it has no result, and what an earlier search left there goes."""
    path = folder / f"{number:03}.json"
    if result is None:
        path.unlink(missing_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, to_json(result))
