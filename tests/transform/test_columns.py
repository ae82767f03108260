"""`gateway batch`: what the columns of files may be called."""

import csv
import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.transform.test_batch import configuration, read, run


@pytest.mark.parametrize("name", ["in.csv", "in.jsonl", "in.parquet"])
def test_a_column_without_a_name_is_one_like_others(tmp_path: Path, name: str) -> None:
    """As pandas writes its index."""
    source = tmp_path / name
    if name == "in.parquet":
        pq.write_table(pa.table({"": ["0"], "text": ["bread"]}), source)
    else:
        source.write_text(",text\n0,bread\n" if name == "in.csv" else '{"": "0", "text": "bread"}\n')
    for ending in ("jsonl", "csv", "parquet"):
        output = tmp_path / f"out.{ending}"
        assert run(configuration(tmp_path, "upper"), "upper", source, output) == 0
        if ending != "csv":
            assert read(output) == [{"_row": 0, "": "0", "output": "BREAD"}]
    assert (tmp_path / "out.csv").read_text().splitlines() == ["_row,,output", "0,0,BREAD"]


def test_a_column_without_a_name_is_no_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in {"in.csv": ",id\nbread,1\n", "in.jsonl": '{"": "bread", "id": 1}\n'}.items():
        (tmp_path / name).write_text(text)
        assert run(configuration(tmp_path, "upper"), "upper", tmp_path / name, tmp_path / "out.jsonl") == 2
        assert "has '', 'id', and the model needs 'text'" in capsys.readouterr().err


def test_a_value_without_a_name_is_found_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('"bread"\n5\n')
    assert run(configuration(tmp_path, "upper"), "upper", tmp_path / "in.jsonl", tmp_path / "out.jsonl") == 0
    assert read(tmp_path / "out.jsonl") == [{"_row": 0, "output": "BREAD"}]
    (bad,) = read(tmp_path / "out.jsonl.bad.jsonl")
    assert (bad["_row"], bad["found"]) == (1, 5)


@pytest.mark.parametrize("name", ["in.csv", "in.jsonl"])
def test_true_is_no_number_beside_whatever_rows(tmp_path: Path, name: str) -> None:
    cells = ["[1, 2]", "[true, false]", "[3, true]", "[4, 5]"]
    lines = ["x", *(f'"{cell}"' for cell in cells)] if name == "in.csv" else [f'{{"x": {cell}}}' for cell in cells]
    (tmp_path / name).write_text("\n".join(lines))
    assert run(configuration(tmp_path), "twice", tmp_path / name, tmp_path / "out.jsonl") == 0
    assert [row["_row"] for row in read(tmp_path / "out.jsonl")] == [0, 3]
    bad = read(tmp_path / "out.jsonl.bad.jsonl")
    assert ["got true or false" in row["error"] for row in bad] == [True, True]


def test_a_first_line_that_is_no_utf_8_is_told_with_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.csv").write_bytes(b'x,caf\xe9\n"[1, 2]",a\n')
    for ending in ("jsonl", "csv", "parquet"):
        assert run(configuration(tmp_path), "twice", tmp_path / "in.csv", tmp_path / f"out.{ending}") == 2
        assert "in.csv: its first line: no UTF-8: x,caf?" in capsys.readouterr().err


def test_what_json_has_as_text_is_a_cell_without_quotes(tmp_path: Path) -> None:
    kept = {
        "price": (decimal.Decimal("1.50"), "1.50"),
        "day": (datetime.date(2026, 11, 29), "2026-11-29"),
        "at": (datetime.datetime(2026, 11, 29, 12, tzinfo=datetime.UTC), "2026-11-29T12:00:00+00:00"),
        "bytes": (b'a "b"', 'a "b"'),
        "days": ([datetime.date(2026, 11, 29)], '["2026-11-29"]'),
    }
    columns = {name: pa.array([value, value]) for name, (value, _) in kept.items()}
    ns = pa.array([1500, 1500], pa.timestamp("ns"))
    pq.write_table(pa.table({"x": [[1.0, 2.0], [3.0, 4.0]], **columns, "ns": ns}), tmp_path / "in.parquet")
    assert run(configuration(tmp_path), "twice", tmp_path / "in.parquet", tmp_path / "out.csv", "--chunk-rows", 1) == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        row, _ = csv.DictReader(file)
    told = {name: text for name, (_, text) in kept.items()}
    assert row == {"_row": "0", **told, "ns": "1970-01-01T00:00:00.000001500", "output": "[2.0,4.0]"}


@pytest.mark.parametrize("name", ["in.parquet", "*.parquet"])
def test_two_columns_of_parquet_with_one_name_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    pq.write_table(pa.table([[[1.0, 2.0]], [[3.0, 4.0]]], names=["x", "x"]), tmp_path / "in.parquet")
    if name == "*.parquet":
        pq.write_table(pa.table({"x": [[1.0, 2.0]]}), tmp_path / "a.parquet")
    assert run(configuration(tmp_path), "twice", tmp_path / name, tmp_path / "out.jsonl") == 2
    assert "in.parquet: two columns have one name: x, x" in capsys.readouterr().err


@pytest.mark.parametrize(
    "values", [({}, {"k": 1}), ({"k": 1}, {}), ({"k": [1.5]}, 1 << 70), (None, {}), ("a", {}), ({}, 5, None), ({}, {"a": {}})]
)
def test_what_parquet_has_no_type_for_in_a_chunk_is_json_in_all(tmp_path: Path, values: tuple[Any, ...]) -> None:
    rows = [json.dumps({"x": [1, 2], "more": value}) for value in values]
    (tmp_path / "in.jsonl").write_text("\n".join([*rows, '{"x": [1, 2]}']))
    words = (configuration(tmp_path), "twice", tmp_path / "in.jsonl", tmp_path / "out.parquet", "--chunk-rows", 1)
    assert run(*words) == 0
    told = [None if row["more"] is None else json.loads(row["more"]) for row in read(tmp_path / "out.parquet")]
    assert told == [*values, None]


@pytest.mark.parametrize("nested", [False, True])
def test_decimals_beside_a_chunk_of_fractions_keep_their_digits(tmp_path: Path, nested: bool) -> None:
    exact = "0.12345678901234567890"
    for name, value in (("1", decimal.Decimal(exact)), ("2", 1.5)):
        held = [{"a": value}] if nested else value
        pq.write_table(pa.table({"x": [[1.0, 2.0]], "more": [held]}), tmp_path / f"{name}.parquet")
    words = (configuration(tmp_path), "twice", tmp_path / "?.parquet", tmp_path / "out.parquet", "--chunk-rows", 1)
    assert run(*words) == 0
    told = [json.loads(row["more"]) for row in read(tmp_path / "out.parquet")]
    assert told == ([[{"a": exact}], [{"a": 1.5}]] if nested else [exact, 1.5])


def test_nanoseconds_beside_a_chunk_of_json_are_kept(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [[1.0, 2.0]], "more": pa.array([1500], pa.timestamp("ns"))}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"x": [[1.0, 2.0]], "more": pa.array([1 << 63], pa.uint64())}), tmp_path / "2.parquet")
    words = (configuration(tmp_path), "twice", tmp_path / "?.parquet", tmp_path / "out.parquet", "--chunk-rows", 1)
    assert run(*words) == 0
    told = [json.loads(row["more"]) for row in read(tmp_path / "out.parquet")]
    assert told == ["1970-01-01T00:00:00.000001500", 1 << 63]
