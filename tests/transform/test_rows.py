"""What is read of files, and how far they are, which is what a progress bar shows."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gateway.transform.rows import Bare, chunks
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


@pytest.mark.parametrize("permutation", [None, [1, 0]])
def test_tensors_of_a_fixed_shape_may_be_null_and_have_elements_that_are(tmp_path: Path, permutation: list[int] | None) -> None:
    kind = pa.fixed_shape_tensor(pa.int64(), (2, 3), permutation=permutation)
    whole, holed = [0, 1, 2, 3, 4, 5], [0, None, 2, 3, 4, 5]
    storage = pa.array([whole, None, holed], kind.storage_type)
    pq.write_table(pa.table({"x": pa.ExtensionArray.from_storage(kind, storage)}), tmp_path / "in.parquet")
    pq.write_table(pa.table({"x": pa.ExtensionArray.from_storage(kind, storage[:1])}), tmp_path / "whole.parquet")
    store = Store.at(str(tmp_path))
    (chunk,) = chunks(store, store.found(), 8, lambda _: False)
    shaped = [[0, 1, 2], [3, 4, 5]] if permutation is None else [[0, 3], [1, 4], [2, 5]]
    first, null, third, alone = chunk.rows
    for row in (first, alone):
        assert isinstance(row, dict)
        np.testing.assert_array_equal(row["x"], shaped)
    assert null == {}
    assert third == {"x": [[element if element != 1 else None for element in row] for row in shaped]}


def test_lines_are_whole_however_long_they_are(tmp_path: Path) -> None:
    mib = 1 << 20  # which is read at once
    lines = ["a" * mib, "b" * (mib - 1), "", "c", "d" * (3 * mib + 5), "e" * (mib - 6), "f" * (mib - 1), "g"]
    for end in ("", "\n"):
        (tmp_path / "in.txt").write_text("\n".join(lines) + end)
        store = Store.at(str(tmp_path / "in.txt"))
        (chunk,) = chunks(store, store.found(), 100, lambda _: False)
        assert [row.value for row in chunk.rows if isinstance(row, Bare)] == lines
