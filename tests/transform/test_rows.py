"""How far a job's files are read, which is what a progress bar shows."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gateway.transform.rows import chunks
from gateway.transform.storage import Store

ROWS = [{"x": number, "of": f"row {number}"} for number in range(40_000)]


def written(folder: Path, ending: str) -> None:
    half = len(ROWS) // 2
    for name, rows in (("1", ROWS[:half]), ("2", ROWS[half:])):
        path = folder / f"{name}.{ending}"
        if ending == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=512)
        else:
            lines = [json.dumps(row) for row in rows] if "jsonl" in ending else [f"{row['x']},{row['of']}" for row in rows]
            data = "\n".join(["x,of", *lines] if ending == "csv" else lines).encode()
            path.write_bytes(gzip.compress(data) if ending.endswith(".gz") else data)


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "csv", "txt", "parquet"])
def test_each_chunk_tells_how_much_of_the_files_was_read_for_it(tmp_path: Path, ending: str) -> None:
    written(tmp_path, ending)
    store = Store.at(str(tmp_path))
    files = store.found()
    whole = sum(file.size_bytes for file in files)
    seen = list(chunks(store, files, 1_000, lambda number: number == 3))
    shares = [chunk.read_bytes / whole for chunk in seen]
    assert shares == sorted(shares)
    # Read a MiB, or what of it is unpacked, ahead: a file of this size at once, its rows a chunk at a time.
    assert 0.4 < shares[18] <= 0.6  # 20 000 of 40 000 rows are of the first file; one chunk is left out
    assert shares[-1] == 1.0
    assert [chunk.first for chunk in seen] == [1_000 * number for number in range(40) if number != 3]
