"""`gateway batch`, as it is typed: what comes in, what goes out, each row once, whatever happens in between."""

import csv
import datetime
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gateway.cli import main
from gateway.commands.batch import _digest
from gateway.config import Config, parse_config
from gateway.errors import ConfigError
from gateway.transform.rows import chunks
from gateway.transform.storage import FoundFile, Store
from gateway.transform.work import Files, RowsJob, alone, begin
from gateway.transform.writing import write_bad

MODELS = Path(__file__).parent / "models.py"
ROWS = [{"id": f"r{number}", "x": [float(number), 0.5]} for number in range(70)]


def configuration(folder: Path, name: str = "twice", **more: Any) -> Path:
    path = folder / "gateway.yaml"
    backend = {"kind": "python", "model": f"{MODELS}:{name}"}
    path.write_text(json.dumps({"models": [{"name": name, "max_rows": 8, "backends": [backend]} | more]}))
    return path


def written(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=30)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(
                {name: json.dumps(value) if isinstance(value, list) else value for name, value in row.items()} for row in rows
            )
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        found: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return found
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return [
                {name: json.loads(cell) if cell[0] in "[0123456789" else cell for name, cell in row.items()}
                for row in csv.DictReader(file)
            ]
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(*words: object) -> int:
    return main(["batch", *map(str, words)])


def test_without_its_extra_it_says_which_one_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("gateway.transform")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert run(configuration(tmp_path), "twice", written(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl") == 2
    assert "pip install 'serving-gateway[batch]'" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("given", ["jsonl", "csv", "parquet"])
def test_each_row_is_answered_once_and_in_order(tmp_path: Path, given: str, ending: str) -> None:
    source, output = written(tmp_path / f"in.{given}", ROWS), tmp_path / f"out.{ending}"
    assert run(configuration(tmp_path), "twice", source, output, "--chunk-rows", 16) == 0
    assert read(output) == [{"_row": n, "id": f"r{n}", "output": [2.0 * n, 1.0]} for n in range(70)]
    assert {path.name for path in tmp_path.iterdir()} == {"gateway.yaml", source.name, output.name}


def test_rows_without_an_answer_are_told_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps(row) for row in ROWS[:20]]
    lines[3] = '{"id": "r3", "x": [1, 2, 3]}'
    lines[5] = '{"id": "r5", "x": ["a", 2]}'
    lines[7] = '{"id": "r7", "x": [-1, 2]}'
    lines[9] = "{"
    lines[11] = '{"id": "r11"}'
    lines[13] = '{"id": "r13", "x": [[1], [2, 3]]}'
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    output = tmp_path / "out.jsonl"
    assert run(configuration(tmp_path), "twice", tmp_path / "in.jsonl", output) == 0
    bad = {row["_row"]: row["error"] for row in read(tmp_path / "out.jsonl.bad.jsonl")}
    assert sorted(bad) == [3, 5, 7, 9, 11, 13]
    for number, word in {
        3: "got FP32 [1, 3]",
        5: "'x'",
        7: "a negative row",
        9: "no JSON",
        11: "missing 'x'",
        13: "'x'",
    }.items():
        assert word in bad[number]
    assert [row["_row"] for row in read(output)] == [n for n in range(20) if n not in bad]
    assert "6 without an answer" in capsys.readouterr().out


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_nan_goes_in(ending: str, tmp_path: Path) -> None:
    rows = [{"x": [float("nan"), 1.0]}, {"x": [2.0, float("inf")]}, {"x": [3.0, 4.0]}]
    source = written(tmp_path / f"in.{ending}", rows)
    assert run(configuration(tmp_path), "twice", source, tmp_path / "out.jsonl") == 0
    assert [row["output"] for row in read(tmp_path / "out.jsonl")] == [[None, 2.0], [4.0, None], [6.0, 8.0]]


def test_numbers_of_every_width_that_are_not_finite_are_the_same_in_csv(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", [{"x": float(x)} for x in ("inf", "-inf", "nan", "0.1")])
    assert run(configuration(tmp_path, "widths"), "widths", source, tmp_path / "out.csv") == 0
    cells = [line.split(",")[1:] for line in (tmp_path / "out.csv").read_text().splitlines()]
    assert cells == [["fp64", "fp32", "fp16"], ["inf"] * 3, ["-inf"] * 3, ["nan"] * 3, ["0.1", "0.1", "0.099975586"]]


def test_a_lone_surrogate_beside_nan_is_no_row(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"x": [1, NaN]}\n{"x": [1, NaN], "id": "\\ud800"}\n')
    assert run(configuration(tmp_path), "twice", tmp_path / "in.jsonl", tmp_path / "out.jsonl") == 0
    (bad,) = read(tmp_path / "out.jsonl.bad.jsonl")
    assert (bad["_row"], bad["error"][:8]) == (1, "no JSON:")


def test_lines_of_text_and_rows_of_many_lengths(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("bread\n\n12\nmüsli")
    assert run(configuration(tmp_path, "upper"), "upper", tmp_path / "in.txt", tmp_path / "out.parquet") == 0
    assert [row["output"] for row in read(tmp_path / "out.parquet")] == ["BREAD", "", "12", "MüSLI"]  # of bytes
    lengths = [{"x": [1.0] * (1 + n % 5)} for n in range(30)]
    source = written(tmp_path / "lengths.parquet", lengths)
    assert run(configuration(tmp_path, "total"), "total", source, tmp_path / "sums.jsonl", "--chunk-rows", 7) == 0
    assert [row["output"] for row in read(tmp_path / "sums.jsonl")] == [1 + n % 5 for n in range(30)]


def test_a_number_that_would_change_is_refused(tmp_path: Path) -> None:
    source = written(tmp_path / "in.csv", [{"x": "5", "note": "12"}, {"x": "300", "note": "a"}, {"x": "1.5", "note": "b"}])
    output = tmp_path / "out.csv"
    assert run(configuration(tmp_path, "small"), "small", source, output) == 0
    with output.open() as file:
        assert list(csv.DictReader(file)) == [{"_row": "0", "note": "12", "output": "5"}]
    assert [row["_row"] for row in read(tmp_path / "out.csv.bad.jsonl")] == [1, 2]


@pytest.mark.parametrize("given", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize(("model", "beyond", "largest"), [("twice", 1e300, 1e38), ("half", 70000.0, 60000.0)])
def test_a_number_beyond_a_float_is_refused(tmp_path: Path, given: str, model: str, beyond: float, largest: float) -> None:
    source = written(tmp_path / f"in.{given}", [{"x": [largest, 0.3]}, {"x": [beyond, 1.0]}, {"x": [-1.0 * beyond, 1.0]}])
    assert run(configuration(tmp_path, model), model, source, tmp_path / "out.jsonl") == 0
    (row,) = read(tmp_path / "out.jsonl")
    assert row["output"][0] == pytest.approx(largest * (2 if model == "twice" else 1), rel=1e-3)
    bad = read(tmp_path / "out.jsonl.bad.jsonl")
    assert [row["_row"] for row in bad] == [1, 2]
    assert f"element 0 is {beyond}" in bad[0]["error"]


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint64(), pa.int8()])
def test_integers_of_parquet_are_taken_where_they_stay_the_same(tmp_path: Path, kind: pa.DataType) -> None:
    odd = {"int64": -1, "uint64": (1 << 64) - 1, "int8": -1}[str(kind)]
    pq.write_table(pa.table({"x": pa.array([[1, 2, 3], [1, odd, 3]], pa.list_(kind))}), tmp_path / "in.parquet")
    assert run(configuration(tmp_path, "pixels"), "pixels", tmp_path / "in.parquet", tmp_path / "out.jsonl") == 0
    assert read(tmp_path / "out.jsonl") == [{"_row": 0, "output": [1, 2, 3]}]
    (bad,) = read(tmp_path / "out.jsonl.bad.jsonl")
    assert bad["error"] == f"input 'x': element 1 is {odd}, which UINT8 cannot hold"


def test_cells_are_read_as_tables_have_numbers(tmp_path: Path) -> None:
    """As pandas and numpy write them, and as we do."""
    source = written(tmp_path / "in.csv", [{"width": x, "height": 2} for x in ["inf", "-inf", "nan", ".5", "+1", "1_0"]])
    assert run(configuration(tmp_path, "area"), "area", source, tmp_path / "out.csv") == 0
    assert [row["output"] for row in read(tmp_path / "out.csv")] == ["inf", "-inf", "nan", 1.0, 2.0]
    (bad,) = read(tmp_path / "out.csv.bad.jsonl")
    assert bad["error"].startswith("input 'width': got '1_0', expected JSON")

    source = written(tmp_path / "in.csv", [{"flag": x} for x in ["True", "FALSE", "yes"]])
    assert run(configuration(tmp_path, "opposite"), "opposite", source, tmp_path / "out.jsonl") == 0
    assert [row["output"] for row in read(tmp_path / "out.jsonl")] == [False, True]


def test_a_cell_that_is_no_json_is_told_what_is(tmp_path: Path) -> None:
    source = written(tmp_path / "in.csv", [{"x": 1}, {"x": "True"}])
    assert run(configuration(tmp_path, "small"), "small", source, tmp_path / "out.jsonl") == 0
    (bad,) = read(tmp_path / "out.jsonl.bad.jsonl")
    assert bad["error"].startswith("input 'x': got 'True', expected JSON, as true, 12, 0.5, NaN, Infinity or [1, 2]: ")


@pytest.mark.parametrize("given", ["jsonl", "csv", "parquet"])
def test_whole_numbers_may_be_held_as_floats(tmp_path: Path, given: str) -> None:
    numbers = [1.0, 3e0, -128.0, 2.5, 128.0, float("nan")]
    source = written(tmp_path / f"in.{given}", [{"x": json.dumps(x) if given == "csv" else x} for x in numbers])
    assert run(configuration(tmp_path, "small"), "small", source, tmp_path / "out.jsonl") == 0
    assert [row["output"] for row in read(tmp_path / "out.jsonl")] == [1, 3, -128]
    assert [row["error"] for row in read(tmp_path / "out.jsonl.bad.jsonl")] == [
        "input 'x': 2.5 is no whole number, expected INT8",
        "input 'x': got 128.0, expected INT8 (-128 to 127)",
        "input 'x': nan is no whole number, expected INT8",
    ]


@pytest.mark.parametrize("given", ["jsonl", "csv", "parquet"])
def test_whole_numbers_of_lists_may_be_held_as_floats(tmp_path: Path, given: str) -> None:
    large = float(1 << 62)
    lists = [[1.0, 2.0], [large, -large], [2 * large, 1.0], [1.0, 2.5], [1.0, None]]
    source = written(tmp_path / f"in.{given}", [{"x": x} for x in lists])
    words = (configuration(tmp_path, "pair"), "pair", source, tmp_path / "out.jsonl")
    assert run(*words) == 0
    assert [row["output"] for row in read(tmp_path / "out.jsonl")] == [[1, 2], [1 << 62, -(1 << 62)]]
    bad = [row["error"] for row in read(tmp_path / "out.jsonl.bad.jsonl")]
    assert bad[:2] == [
        "input 'x': got 9.223372036854776e+18, expected INT64 (-9223372036854775808 to 9223372036854775807)",
        "input 'x': 2.5 is no whole number, expected INT64",
    ]
    assert len(bad) == 3


def test_columns_can_be_named_and_kept(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", [{"features": [1.0, 2.0], "id": 1 << 70, "more": None}])
    words = ("--column", "x=features", "--keep", "id,x,features", "--bad", tmp_path / "bad.jsonl")
    assert run(configuration(tmp_path), "twice", source, tmp_path / "out.jsonl", *words) == 0
    assert read(tmp_path / "out.jsonl") == [{"_row": 0, "id": 1 << 70, "x": [1, 2], "features": [1, 2], "output": [2, 4]}]


@pytest.mark.parametrize(("kept", "text"), [(1 << 70, str(1 << 70)), ({}, "{}"), ({"a": [{}]}, '{"a":[{}]}')])
def test_what_parquet_has_no_type_for_is_json_there(tmp_path: Path, kept: Any, text: str) -> None:
    source = written(tmp_path / "in.jsonl", [{"x": [1.0, 2.0], "more": kept}, {"x": [1.0, 2.0]}])
    assert run(configuration(tmp_path), "twice", source, tmp_path / "out.parquet") == 0
    assert [row["more"] for row in read(tmp_path / "out.parquet")] == [text, None]


def test_large_integers_of_parquet_are_kept(tmp_path: Path) -> None:
    source = tmp_path / "in.parquet"
    ids = [1 << 63, 7, None]
    pq.write_table(pa.table({"x": [[1.0, 2.0]] * 3, "id": pa.array(ids, pa.uint64())}), source)
    for rows in (1, 3):
        output = tmp_path / f"out{rows}.parquet"
        assert run(configuration(tmp_path), "twice", source, output, "--chunk-rows", rows) == 0
        assert [row["id"] for row in read(output)] == ids


@pytest.mark.parametrize(
    ("ids", "texts"),
    [
        (((1 << 53) + 1, 2.5), ("9007199254740993", "2.5")),
        ((1, "a"), ("1", '"a"')),
        ((True, 1), ("true", "1")),
        ((1, [2]), ("1", "[2]")),
        (({"a": 1}, {"a": "b"}), ('{"a":1}', '{"a":"b"}')),
        (("a", 1 << 70), ('"a"', str(1 << 70))),
        ((-1, 1 << 63), ("-1", str(1 << 63))),
        ((0.5, 1 << 63), ("0.5", str(1 << 63))),
        ((1.5, True), ("1.5", "true")),
        (([1.5], [True]), ("[1.5]", "[true]")),
        (({"a": [{"b": 1.5}]}, {"a": [{"b": True}]}), ('{"a":[{"b":1.5}]}', '{"a":[{"b":true}]}')),
    ],
)
def test_a_column_of_several_types_is_json_wherever_chunks_end(
    tmp_path: Path, ids: tuple[Any, Any], texts: tuple[str, str]
) -> None:
    source = written(tmp_path / "in.jsonl", [{"x": [1.0, 2.0], "id": each} for each in (*ids, None)])
    for rows in (1, 2):
        output = tmp_path / f"out{rows}.parquet"
        assert run(configuration(tmp_path), "twice", source, output, "--chunk-rows", rows) == 0
        assert [row["id"] for row in read(output)] == [*texts, None]


def test_one_column_may_be_two_inputs_and_a_missing_one_is_not_another(tmp_path: Path) -> None:
    area = configuration(tmp_path, "area")
    source = written(tmp_path / "in.jsonl", [{"x": 3.0}, {"x": 2.0, "width": 5.0, "id": 7}])
    assert run(area, "area", source, tmp_path / "out.jsonl", "--column", "width=x", "--column", "height=x") == 0
    assert [row["output"] for row in read(tmp_path / "out.jsonl")] == [9, 4]
    source = written(tmp_path / "swapped.jsonl", [{"width": 3.0, "height": 4.0, "w": 5.0}, {"width": 3.0, "height": 4.0}])
    assert run(area, "area", source, tmp_path / "swapped.out.jsonl", "--column", "height=width", "--column", "width=w") == 0
    assert [row["output"] for row in read(tmp_path / "swapped.out.jsonl")] == [15]
    (bad,) = read(tmp_path / "swapped.out.jsonl.bad.jsonl")
    assert "missing 'width'" in bad["error"]


TIMES = {
    "time": (pa.timestamp("ns", "UTC"), 1500, "1970-01-01T00:00:00.000001500+00:00"),
    "before": (pa.timestamp("ns"), -1, "1969-12-31T23:59:59.999999999"),
    "whole": (pa.timestamp("ns"), 10**9, "1970-01-01T00:00:01"),
    "day": (pa.time64("ns"), 1, "00:00:00.000000001"),
    "long": (pa.duration("ns"), 10**9 + 1, "0:00:01.000000001"),
    "several": (pa.list_(pa.timestamp("ns")), [1, None], ["1970-01-01T00:00:00.000000001", None]),
    "within": (
        pa.struct([("at", pa.list_(pa.time64("ns"), 1)), ("n", pa.int8())]),
        {"at": [7], "n": 1},
        {"at": ["00:00:00.000000007"], "n": 1},
    ),
    "named": (pa.map_(pa.string(), pa.timestamp("ns")), [("a", 1)], [["a", "1970-01-01T00:00:00.000000001"]]),
}


def timed(path: Path) -> Path:
    columns = {name: pa.array([value, None, value], kind) for name, (kind, value, _) in TIMES.items()}
    pq.write_table(pa.table({"x": [[1.0, 2.0], [3.0, 4.0], [5.0]], **columns}), path)
    return path


def test_nanoseconds_are_kept(tmp_path: Path) -> None:
    source = timed(tmp_path / "in.parquet")
    assert run(configuration(tmp_path), "twice", source, tmp_path / "out.jsonl") == 0
    told = {name: text for name, (_, _, text) in TIMES.items()}
    assert read(tmp_path / "out.jsonl") == [{"_row": 0, **told, "output": [2, 4]}, {"_row": 1, "output": [6, 8]}]
    (bad,) = read(tmp_path / "out.jsonl.bad.jsonl")
    assert bad["found"] == {"x": [5.0], **told}
    keep = "time,before,whole,day,long,several,within"
    assert run(configuration(tmp_path), "twice", source, tmp_path / "out.parquet", "--keep", keep) == 0
    (given, written) = (pq.read_table(path) for path in (source, tmp_path / "out.parquet"))
    for name in keep.split(",")[:-1]:
        assert written[name].combine_chunks() == given[name].combine_chunks()[:2]


@pytest.mark.parametrize("model", ["total", "upper", "pixels"])
@pytest.mark.parametrize("column", ["time", "several", "within"])
def test_nanoseconds_are_no_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, column: str) -> None:
    source, name = timed(tmp_path / "in.parquet"), "text" if model == "upper" else "x"
    words = ("--keep", "", "--column", f"{name}={column}")
    assert run(configuration(tmp_path, model), model, source, tmp_path / "out.jsonl", *words) == 2
    assert "none of the first 3 rows has an answer" in capsys.readouterr().err


def test_of_parquet_only_columns_that_are_wanted_are_read(tmp_path: Path) -> None:
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"x": [[1.0, 2.0]], "a.b": [1], "c": [2], "d": [3]}), source)
    store = Store.at(str(source))
    (chunk,) = chunks(store, store.found(), 8, lambda _: False, {"a.b", "d", "z"})
    assert chunk.rows == [{"a.b": 1, "d": 3}]
    (chunk,) = chunks(store, store.found(), 8, lambda _: False, {"z"})
    assert chunk.rows == [{}]


def test_a_column_called_as_one_of_the_output_is_refused_in_whichever_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configuration(tmp_path)
    for name in ("in.csv", "in.parquet"):
        source = written(tmp_path / name, [{"x": [1.0, 2.0], "output": None}, {"x": [1.0, 2.0], "output": "mine"}])
        assert run(config, "twice", source, tmp_path / "out.jsonl") == 2
        assert f"{name}: a column is called as one of the output (output): --keep others" in capsys.readouterr().err
    rows = [{"x": [1.0, 2.0]}, {"x": [3.0, 4.0], "_row": 77}, {"x": [5.0, 6.0], "output": 1}]
    assert run(config, "twice", written(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl") == 0
    assert read(tmp_path / "out.jsonl") == [{"_row": 0, "output": [2, 4]}]
    assert [(row["_row"], row["error"], row["found"]) for row in read(tmp_path / "out.jsonl.bad.jsonl")] == [
        (1, "a column is called as one of the output (_row): --keep others", rows[1]),
        (2, "a column is called as one of the output (output): --keep others", rows[2]),
    ]


def test_a_first_row_need_not_have_what_its_file_has(tmp_path: Path) -> None:
    source = written(tmp_path / "in.csv", [{"x": None, "id": 1}, {"x": [1.0, 2.0], "id": None}])
    (tmp_path / "0.csv").touch()
    assert run(configuration(tmp_path), "twice", tmp_path / "*.csv", tmp_path / "out.jsonl", "--keep", "id") == 0
    assert read(tmp_path / "out.jsonl") == [{"_row": 1, "output": [2, 4]}]
    assert source.exists()


@pytest.mark.parametrize("name", ["in.jsonl", "in.csv", "in.parquet"])
@pytest.mark.parametrize(
    ("words", "said", "told_of_lines"),
    [
        (("--column", "xx=y"), "--column: xx=y: the model has no input 'xx'; did you mean 'x'? its inputs: 'x'", True),
        (("--column", "x=feature"), "has no 'feature'; did you mean 'features'? its columns: 'features', 'id'", False),
        (("--column", "x=features", "--keep", "idd"), "has no 'idd'; did you mean 'id'? its columns: 'id', 'x'", False),
        ((), "has 'features', 'id', and the model needs 'x': rename what is meant, as by --column", True),
    ],
)
def test_columns_that_are_not_there_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: tuple[str, ...], said: str, told_of_lines: bool
) -> None:
    source = written(tmp_path / name, [{"features": [1.0, 2.0], "id": 1}])
    code = run(configuration(tmp_path), "twice", source, tmp_path / "out.csv", *words)
    if told_of_lines or name != "in.jsonl":
        assert code == 2
        assert said in capsys.readouterr().err


def test_nan_beside_a_large_integer_is_null(tmp_path: Path) -> None:
    rows = [{"x": -1, "id": 1 << 70, "more": {"list": [1.5, "a", None, True]}}]
    source = written(tmp_path / "in.jsonl", rows)
    for ending in ("jsonl", "csv"):
        assert run(configuration(tmp_path, "root"), "root", source, tmp_path / f"out.{ending}") == 0
    assert read(tmp_path / "out.jsonl") == [{"_row": 0, "id": 1 << 70, "more": rows[0]["more"], "output": [None, None]}]
    assert "NaN" not in (tmp_path / "out.csv").read_text()


def test_a_line_is_the_same_beside_a_large_integer(tmp_path: Path) -> None:
    kept = {
        "time": datetime.datetime(2026, 11, 28, 12, tzinfo=datetime.UTC),
        "day": datetime.date(2026, 11, 28),
        "at": datetime.time(12, 30),
        "bytes": b"\xff",
        "list": [float("inf"), 2.5, np.float32(1.5), np.arange(3.0)],
    }
    store = Store.at(str(tmp_path / "bad"))
    write_bad(store, [(0, "", kept), (1, "", kept | {"id": 1 << 70})])
    first, second = read(tmp_path / "bad")
    assert second["found"] == first["found"] | {"id": 1 << 70}


@pytest.mark.parametrize("name", ["in.csv", "in.jsonl", "in.txt"])
def test_a_byte_order_mark_is_no_part_of_a_name_or_a_row(tmp_path: Path, name: str) -> None:
    lines = {"in.csv": "text,id\nbread,1\n", "in.jsonl": '{"text": "bread", "id": "1"}\n', "in.txt": "bread\n"}[name]
    (tmp_path / name).write_text(lines, "utf-8-sig")
    assert run(configuration(tmp_path, "upper"), "upper", tmp_path / name, tmp_path / "out.jsonl") == 0
    assert read(tmp_path / "out.jsonl") == [{"_row": 0, **({} if name == "in.txt" else {"id": "1"}), "output": "BREAD"}]


def test_several_files_are_one_input(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    for number in range(3):
        written(tmp_path / "parts" / f"{number}.parquet", ROWS[number * 20 : number * 20 + 20])
    assert run(configuration(tmp_path), "twice", tmp_path / "parts", tmp_path / "out.jsonl", "--chunk-rows", 32) == 0
    assert run(configuration(tmp_path), "twice", tmp_path / "parts" / "[12].parquet", tmp_path / "two.jsonl") == 0
    assert [row["id"] for row in read(tmp_path / "out.jsonl")] == [f"r{n}" for n in range(60)]
    assert [row["id"] for row in read(tmp_path / "two.jsonl")] == [f"r{n}" for n in range(20, 60)]


def test_another_store(tmp_path: Path) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    files = MemoryFileSystem()
    files.pipe("/store/in.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS).encode())
    assert run(configuration(tmp_path), "twice", "memory://store/in.jsonl", "memory://store/out.jsonl", "--chunk-rows", 16) == 0
    assert [json.loads(line)["id"] for line in files.cat("/store/out.jsonl").splitlines()] == [row["id"] for row in ROWS]
    assert sorted(path.rpartition("/")[2] for path in files.find("/store")) == ["in.jsonl", "out.jsonl"]


@pytest.mark.slow
def test_killed_again_and_again_and_gone_on_with_each_row_is_there_once(tmp_path: Path) -> None:
    rows = [{"x": [float(number), 0.0]} for number in range(600)]
    source, output = written(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet"
    config, seen = configuration(tmp_path, "slow", batching={"probe_s": 0}), tmp_path / "seen"
    command = [
        sys.executable,
        "-m",
        "gateway.cli",
        "batch",
        str(config),
        "slow",
        str(source),
        str(output),
        "--chunk-rows",
        "40",
    ]
    kills = 0
    while not output.exists():
        partial = tmp_path / "out.parquet.partial"
        before = len(list(partial.glob("*.rows"))) if partial.exists() else 0
        process = subprocess.Popen(command, env=os.environ | {"SEEN": str(seen)}, stderr=subprocess.DEVNULL)
        while process.poll() is None and kills < 3:
            if len(list(partial.glob("*.rows"))) >= before + 3:
                process.send_signal(signal.SIGKILL)
                process.wait()
                kills += 1
            time.sleep(0.005)
        assert process.wait(60) in (0, -signal.SIGKILL)
    assert kills == 3
    assert [row["_row"] for row in read(output)] == list(range(600))
    asked = [int(line) for line in seen.read_text().splitlines()]
    assert set(range(600)) <= set(asked)
    assert len(asked) <= 600 + 3 * 3 * 40 + 4 * 20  # two chunks at work and one read, three times; and the runs at load


def test_what_is_done_is_not_taken_for_another_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = written(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    config = configuration(tmp_path)
    partial = tmp_path / "out.jsonl.partial"
    partial.mkdir()
    (partial / "strange").touch()
    assert run(config, "twice", source, output, "--restart") == 2
    assert "a folder of something else" in capsys.readouterr().err
    (partial / "strange").unlink()
    (partial / "00000000.rows").touch()
    for damaged in (b"{}", b'{"model": "\xce"}'):
        (partial / "job.json").write_bytes(damaged)
        assert run(config, "twice", source, output) == 2
        assert "--restart begins anew" in capsys.readouterr().err
    assert run(config, "twice", source, output, "--restart") == 0
    assert run(config, "twice", source, output) == 2
    assert "out.jsonl: exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("in.jsonl", "out.xlsx"), "out.xlsx: expected a name that ends in .jsonl, .csv or .parquet"),
        (("in.jsonl", "out.txt"), "expected a name that ends in .jsonl, .csv or .parquet"),
        (("none.jsonl", "out.jsonl"), "no such file or folder"),
        (("in.jsonl", "out.jsonl", "--chunk-rows", "0"), "--chunk-rows: 0: expected 1 to 1000000"),
        (("in.jsonl", "out.jsonl", "--column", "x"), "--column: x: expected INPUT=COLUMN"),
        (("in.jsonl", "out.jsonl", "--keep", "_row"), "_row is what a row's number is called"),
        (("in.jsonl", "out.jsonl.gz"), "expected a name that ends in .jsonl, .csv or .parquet"),
        (("again.jsonl", "out.jsonl"), "a column is called as one of the output (_row, output): --keep others"),
        (("in.jsonl", "out.jsonl", "--bad", "in.jsonl"), "in.jsonl: exists"),
        (("other.jsonl", "out.jsonl"), "its first row has 'y', and the model needs 'x'"),
        (("wrong.jsonl", "out.jsonl"), "none of the first 2 rows has an answer"),
        (("wrong.parquet", "out.jsonl"), "no Parquet file"),
        (("ftp0://x/in.jsonl", "out.jsonl"), "cannot be reached"),
    ],
)
def test_what_cannot_be_done_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "in.jsonl", ROWS)
    written(tmp_path / "other.jsonl", [{"y": 1}])
    written(tmp_path / "again.jsonl", [{"_row": 1, "x": [1, 2], "output": 2}])
    written(tmp_path / "wrong.jsonl", [{"x": [1]}, {"x": 2}])
    (tmp_path / "wrong.parquet").write_text("{}")
    assert run(configuration(tmp_path), "twice", *words) == 2
    assert said in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out.")]


def test_two_do_not_work_on_one_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = written(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    with alone(Files(Store.at(str(output)), Store.at(f"{output}.bad"))):
        assert run(configuration(tmp_path), "twice", source, output) == 2
    assert "another `gateway batch` is at work there" in capsys.readouterr().err
    assert run(configuration(tmp_path), "twice", source, output) == 0


def test_a_model_without_a_batch_dimension_and_bf16(tmp_path: Path) -> None:
    declared = [{"name": "INPUT0", "datatype": "BF16", "shape": [3]}]
    synthetic = {
        "name": "whole",
        "max_rows": 0,
        "inputs": declared,
        "outputs": [{"name": "OUTPUT0", "datatype": "BF16", "shape": [3]}],
    }
    path = tmp_path / "gateway.yaml"
    path.write_text(json.dumps({"models": [{**synthetic, "backends": [{"kind": "synthetic", "fixed_ms": 0, "row_ms": 0}]}]}))
    source = written(tmp_path / "in.jsonl", [{"INPUT0": [float(n), 1.0, 2.0]} for n in range(9)])
    for ending in ("jsonl", "parquet"):
        assert run(path, "whole", source, tmp_path / f"out.{ending}") == 0
        assert np.shape([row["OUTPUT0"] for row in read(tmp_path / f"out.{ending}")]) == (9, 3)


JOB = RowsJob(inputs=[FoundFile("in.jsonl", 8, 1)], model="a", chunk_rows=8, written_as="jsonl", columns={}, keep=None)


def begun(folder: Path) -> Files:
    """A job of which a chunk is done."""
    files = Files(Store.at(str(folder / "out.jsonl")), Store.at(str(folder / "bad.jsonl")))
    assert begin(files, JOB, restart=False) == set()
    Path(files.part(0, "rows").path).touch()
    return files


def test_options_may_change_while_nothing_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = written(tmp_path / "in.csv", [{"y": [1.0, 2.0]}]), tmp_path / "out.jsonl"
    assert run(configuration(tmp_path), "twice", source, output) == 2
    assert "as by --column INPUT=COLUMN" in capsys.readouterr().err
    assert run(configuration(tmp_path), "twice", source, output, "--column", "x=y") == 0
    assert read(output) == [{"_row": 0, "output": [2, 4]}]


def test_a_job_does_not_go_on_where_rows_are_stated_that_were_the_default() -> None:
    model = {"name": "m", "backends": [{"kind": "triton", "url": "h:8001", "model": "m"}]}
    configs = [parse_config({"models": [{**model, **rows}]}, source="x.yaml") for rows in ({}, {"max_rows": 32})]
    assert _digest(configs[0]) != _digest(configs[1])  # where a Triton says that there are no batches, the default is none


def test_a_job_does_not_go_on_with_other_weights(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"graph")
    config = of_backend(kind="onnxruntime", model=str(tmp_path / "m.onnx"))
    model = config.models[0]
    alone = f"{model.model_dump_json()}{model.rows_stated}{hashlib.sha256(b'graph').hexdigest()}"
    digests = [hashlib.sha256(alone.encode()).hexdigest()]  # as gateways knew jobs that did not look beside the file
    assert _digest(config) == digests[0]
    for name in ("m.onnx", "m.onnx.data"):
        digests.append(_digest(config))
        (tmp_path / name).write_bytes(b"retrained")
    assert len({*digests[1:], _digest(config)}) == 3


def test_a_job_goes_on_whatever_a_run_writes_where_names_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    configs = [
        of_backend(kind="triton", url="h:8001", model="place"),
        of_backend(kind="python", model="place:Model"),
        of_backend(kind="neuron", model="compiled"),
    ]
    (tmp_path / "compiled").mkdir()
    before = [_digest(config) for config in configs]
    for name in ("place/__pycache__", "compiled/__pycache__"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "model.pyc").touch()
    assert [_digest(config) for config in configs] == before
    (tmp_path / "compiled" / "manifest.json").touch()
    assert _digest(configs[2]) != before[2]


def of_backend(**backend: Any) -> Config:
    return parse_config({"models": [{"name": "m", "backends": [backend]}]}, source="x.yaml")


@pytest.mark.parametrize("restart", [False, True])
def test_what_is_thrown_away_leaves_the_lock(tmp_path: Path, restart: bool) -> None:
    files = begun(tmp_path)
    if not restart:
        Path(files.part(0, "rows").path).unlink()
    with alone(files):
        assert begin(files, JOB, restart=restart) == set()
        with pytest.raises(ConfigError, match="another `gateway batch`"), alone(files):
            pass


@pytest.mark.parametrize("bad", ["out.jsonl", "link/out.jsonl", "out.jsonl.partial/00000000.rows"])
def test_rows_without_an_answer_have_a_file_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bad: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    written(tmp_path / "in.jsonl", [*ROWS, {"x": []}])
    assert run(configuration(tmp_path), "twice", "in.jsonl", "out.jsonl", "--bad", bad) == 2
    assert f"{bad}: expected another file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["out.jsonl", "bad.jsonl", "important.jsonl"])
def test_what_came_while_a_job_was_broken_off_is_not_replaced(tmp_path: Path, name: str) -> None:
    files = begun(tmp_path)
    if name == "important.jsonl":
        files = files._replace(bad=Store.at(str(tmp_path / name)))
    assert begin(files, JOB, restart=False) == {0}
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=rf"{name}: exists"):
        begin(files, JOB, restart=False)


def test_what_came_while_a_job_ran_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = written(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    monkeypatch.setenv("SEEN", str(output))  # which the model writes
    config = configuration(tmp_path, "slow", batching={"probe_s": 0})
    assert run(config, "slow", source, output) == 2
    assert "out.jsonl: exists" in capsys.readouterr().err
    assert "69\n" in output.read_text()
    output.unlink()
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    assert run(config, "slow", source, output) == 0
    assert len(read(output)) == 70


def test_one_that_goes_on_at_a_chunk_that_begins_with_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = written(tmp_path / "in.jsonl", [*ROWS[:16], {"id": "bad"}, *ROWS[16:]]), tmp_path / "out.jsonl"
    words = (configuration(tmp_path, "slow", batching={"probe_s": 0}), "slow", source, output, "--chunk-rows", 16)
    monkeypatch.setenv("SEEN", str(output))  # which the model writes: the parts are not joined
    assert run(*words) == 2
    output.unlink()
    for part in sorted((tmp_path / "out.jsonl.partial").glob("*.rows"))[1:]:
        part.unlink()
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    assert run(*words) == 0
    assert [row["_row"] for row in read(output)] == [n for n in range(71) if n != 16]


def test_what_was_bad_in_a_chunk_that_was_not_done_is_not_kept(tmp_path: Path) -> None:
    files = begun(tmp_path)
    for number in (0, 1):
        Path(files.part(number, "bad").path).touch()
    assert begin(files, JOB, restart=False) == {0}
    assert files.part(0, "bad").exists()
    assert not files.part(1, "bad").exists()


def test_a_job_that_was_broken_off_while_its_parts_were_joined_goes_on(tmp_path: Path) -> None:
    files = begun(tmp_path)
    Path(files.joining.path).write_text(files.bad.path)
    for store in files:
        Path(store.path).touch()
    assert begin(files, JOB, restart=False) == {0}
    (tmp_path / "important.jsonl").touch()
    with pytest.raises(ConfigError, match=r"important.jsonl: exists"):
        begin(files._replace(bad=Store.at(str(tmp_path / "important.jsonl"))), JOB, restart=False)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"model": "another"}, "the model or its configuration"),
        ({"chunk_rows": 7}, "--chunk-rows"),
        ({"columns": {"x": "y"}}, "--column"),
        ({"keep": []}, "--keep"),
        ({"written_as": "csv"}, "the output's format"),
        ({"inputs": [FoundFile("in.jsonl", 9, 1)]}, "the input files"),
    ],
)
def test_what_is_different_is_named(tmp_path: Path, other: dict[str, Any], said: str) -> None:
    files = begun(tmp_path)
    with pytest.raises(ConfigError, match=rf"of another job \({said} differ\): --restart"):
        begin(files, msgspec.structs.replace(JOB, **other), restart=False)
    assert begin(files, msgspec.structs.replace(JOB, **other), restart=True) == set()


def test_a_file_that_a_models_options_name_is_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source, log = written(tmp_path / "in.jsonl", ROWS), tmp_path / "log"
    factor, draft = tmp_path / "factor.pt", tmp_path / ".out.jsonl.draft"
    backend = {"kind": "python", "model": f"{MODELS}:Scaled", "class_options": {"path": str(factor), "log": str(log)}}
    tensors = {
        f"{way}puts": [{"name": name, "datatype": "FP32", "shape": [-1, 2]}] for way, name in (("in", "x"), ("out", "y"))
    }
    words = (configuration(tmp_path, "Scaled", backends=[backend], **tensors), "Scaled", source, "out.jsonl")
    factor.write_text("2")
    log.touch()
    draft.mkdir()  # so that all is done, and not joined
    assert run(*words) == 1
    draft.rmdir()
    factor.write_text("3")
    assert run(*words) == 2
    assert "of another job (the model or its configuration differ): --restart" in capsys.readouterr().err
    factor.write_text("2")
    assert run(*words) == 0
    assert read(tmp_path / "out.jsonl")[1] == {"_row": 1, "id": "r1", "y": [2, 1]}
