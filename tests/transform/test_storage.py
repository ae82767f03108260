"""`gateway batch`: where files are, what they are called, and what is said of those that fail."""

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.transform.test_batch import configuration, read, run

LINE = '{"x": [1, 2], "id": "%s"}\n'


class Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


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
