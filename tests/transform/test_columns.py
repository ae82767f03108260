"""`gateway batch`: what the columns of files may be called."""

from pathlib import Path

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
