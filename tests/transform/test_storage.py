"""`gateway batch`: where files are, what they are called, and what is said of those that fail."""

import errno
import functools
import gzip
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gateway.errors import ConfigError
from gateway.transform.storage import Store
from gateway.transform.writing import join
from tests.transform.test_batch import configuration, read, run

LINE = '{"x": [1, 2], "id": "%s"}\n'


class Files(http.server.SimpleHTTPRequestHandler):
    """One that is called `cut` ends before it is whole."""

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if "cut" not in self.path:
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(LINE.encode())


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Of a server of `tmp_path`."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_file_that_is_called_as_a_pattern_is_no_pattern(tmp_path: Path) -> None:
    (tmp_path / "d[1]").mkdir()
    for name in ("d1.jsonl", "d[1].jsonl", "d[1]/a.jsonl", "d[1]/b.jsonl"):
        (tmp_path / name).write_text(LINE % name)
    config = configuration(tmp_path)
    for number, (name, ids) in enumerate(
        {
            "d[1].jsonl": ["d[1].jsonl"],
            "d[1-9].jsonl": ["d1.jsonl"],
            "d[1]/a.jsonl": ["d[1]/a.jsonl"],
            "d[1]": ["d[1]/a.jsonl", "d[1]/b.jsonl"],
            "d[1]/[ab].jsonl": ["d[1]/a.jsonl", "d[1]/b.jsonl"],
        }.items()
    ):
        assert run(config, "twice", tmp_path / name, tmp_path / f"out{number}.jsonl") == 0
        assert [row["id"] for row in read(tmp_path / f"out{number}.jsonl")] == ids


def test_a_pattern_is_none_of_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(configuration(tmp_path), "twice", tmp_path / "d[1]" / "in.jsonl", tmp_path / "out.jsonl") == 2
    assert "a pattern is taken for the files of one folder only" in capsys.readouterr().err


def test_a_url_may_be_signed(tmp_path: Path, url: str) -> None:
    (tmp_path / "in.jsonl").write_text(LINE % "a")
    assert run(configuration(tmp_path), "twice", f"{url}/in.jsonl?Signature=a.b/c&Key=*", tmp_path / "out.jsonl") == 0
    assert [row["id"] for row in read(tmp_path / "out.jsonl")] == ["a"]


@pytest.mark.parametrize(
    ("name", "remote"),
    [
        ("cut.jsonl", True),
        *((name, far) for name in ("cut.jsonl.gz", "none.jsonl.gz", "corrupt.parquet") for far in (False, True)),
    ],
)
def test_a_file_that_cannot_be_read_to_its_end_is_named(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str], name: str, remote: bool
) -> None:
    whole = gzip.compress((LINE * 1000).encode())
    (tmp_path / "cut.jsonl").write_text(LINE * 1000)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-20])
    (tmp_path / "none.jsonl.gz").write_text(LINE)
    pq.write_table(pa.table({"x": [[1.0, 2.0]] * 1000, "id": [str(n) for n in range(1000)]}), tmp_path / "corrupt.parquet")
    table = bytearray((tmp_path / "corrupt.parquet").read_bytes())
    table[40:600] = bytes(560)
    (tmp_path / "corrupt.parquet").write_bytes(table)
    place = f"{url}/{name}" if remote else str(tmp_path / name)
    assert run(configuration(tmp_path), "twice", place, tmp_path / "out.jsonl") == 1
    assert f"gateway: {place}: " in capsys.readouterr().err


def test_a_place_that_cannot_be_reached_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(configuration(tmp_path), "twice", "hdfs://127.0.0.1:1/in.jsonl", tmp_path / "out.jsonl") == 2
    assert "hdfs://127.0.0.1:1/in.jsonl: cannot be reached: " in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    store = Store.at(str(tmp_path / "out.jsonl"))
    with pytest.raises(OSError, match=f"^{tmp_path}/out.jsonl: No space left$"), store.written():
        raise OSError(errno.ENOSPC, "No space left")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_came_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    output, part = tmp_path / "out.jsonl", Store.at(str(tmp_path / "part"))
    with part.written() as file:
        file.write(b"ours\n")
    with pytest.raises(ConfigError, match=r"out.jsonl: exists"), Store.at(str(output)).written(replace=False):
        output.write_text("theirs\n")
    assert output.read_text() == "theirs\n"
    output.unlink()
    for _ in range(2):  # as a run does again that was broken off behind it
        join(Store.at(str(output)), "jsonl", [part])
    assert output.read_text() == "ours\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "part"]


def test_what_a_run_was_killed_at_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(LINE % "a")
    before = tmp_path / "before.jsonl"
    before.write_text("whole\n")
    (tmp_path / ".out.jsonl.draft").hardlink_to(before)  # killed as it had its name, and this one still
    partial = tmp_path / "out.jsonl.partial"
    partial.mkdir()
    (partial / ".job.json.draft").write_text("{")
    assert run(configuration(tmp_path), "twice", "in.jsonl", "out.jsonl") == 0
    assert before.read_text() == "whole\n"
    assert [row["id"] for row in read(tmp_path / "out.jsonl")] == ["a"]


@pytest.mark.parametrize("output", ["out.jsonl", "out.parquet"])
def test_a_run_that_was_broken_off_between_its_results_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], output: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(LINE % "a" + '{"id": "b"}\n' + LINE % "c")
    words = (configuration(tmp_path), "twice", "in.jsonl", output)
    in_the_way = tmp_path / f".{output}.draft"
    in_the_way.mkdir()
    assert run(*words) == 1
    in_the_way.rmdir()
    assert [row["_row"] for row in read(tmp_path / f"{output}.bad.jsonl")] == [1]
    (tmp_path / output).write_text("theirs")
    assert run(*words) == 2
    assert f"{output}: exists: name another file" in capsys.readouterr().err
    assert (tmp_path / output).read_text() == "theirs"
    (tmp_path / output).unlink()
    assert run(*words) == 0
    assert f"/s, and 1 without an answer before; why: {tmp_path}/{output}.bad.jsonl" in capsys.readouterr().out
    assert [row["id"] for row in read(tmp_path / output)] == ["a", "c"]
    assert not (tmp_path / f"{output}.partial").exists()


def test_a_place_for_bad_rows_that_cannot_be_written_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text(LINE)
    (tmp_path / "file").touch()
    bad = tmp_path / "file" / "folder" / "bad.jsonl"
    words = (configuration(tmp_path), "twice", tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert run(*words, "--bad", bad) == 2
    said = f"{bad}: cannot be written: {tmp_path}/file: expected a folder that may be written to"
    assert said in capsys.readouterr().err
    assert run(*words[:-1], bad) == 2  # as the output
    assert said in capsys.readouterr().err
    assert run(*words, "--bad", tmp_path / "new" / "folder" / "bad.jsonl") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "gateway.yaml", "in.jsonl", "out.jsonl"]
