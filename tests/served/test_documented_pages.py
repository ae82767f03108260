"""Every fenced block of the documents is done as a reader does it, page by page from top to bottom, in one folder.

- A title is the name of a file: it is written, a configuration is checked too.
- Commands are run. A server stays until the page starts the next one, on ports of its own.
- `json` and `text` after a command are what it says; `…` stands for anything.
- `python` is run; a comment behind a `print` is what it prints.
- `yaml` is a configuration, or a part of one, or a spec of loadtest, and is valid.

What cannot be run here says why, in a comment before the block: <!-- not run: … -->. docs/testing.md lists those.
"""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import parse_config
from gateway.config.multi_model import multi_model_of
from gateway.documents.reader import Document
from loadtest.prices.catalogue import load_catalogue
from loadtest.question.spec import parse_search_spec
from tests.served.documents import DOCUMENTS, ROOT, Block, blocks
from tests.served.test_documented_commands import LISTED
from tests.served.warm import started

pytestmark = [pytest.mark.slow, pytest.mark.debian("curl")]

HELD_ELSEWHERE = {"docs/troubleshooting.md": "tests/test_mistakes.py", "docs/python.md": "tests/from_python/test_documented.py"}
"""Pages that have a test of their own."""

FENCED = {path.relative_to(ROOT).as_posix(): path for path in DOCUMENTS if path.suffix == ".md" and blocks(path)}
PAGES = {name: path for name, path in FENCED.items() if name not in HELD_ELSEWHERE}

SYNTHETIC = [{"kind": "synthetic"}]
READY = re.compile(r"gateway ready http=127\.0\.0\.1:(\d+) grpc=127\.0\.0\.1:(\d+)\n")
READY_S = 60.0
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


class Reader:
    """Does what one page says, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said = ""  # by the last command
        self._server: ForkServerProcess | None = None
        self._ports = {"8000": "8000", "8001": "8001"}

    def do(self, block: Block, *, page: str) -> None:
        if block.title:
            path = self.folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        if block.language == "python":
            code = compile(self._with_ports(block.text), f"{page}:{block.line}", "exec")
            if not block.title and not block.not_run:
                printed = executed(code)
                assert printed == re.findall(r"^ *print\(.*\)  # (.+)$", block.text, re.MULTILINE)
        elif block.language == "yaml":
            valid(yaml.safe_load(block.text), source=f"{page}:{block.line}")
        elif block.language == "json":
            assert json.loads(block.text) == json.loads(self.said)
        elif block.language == "text":
            if not block.title:
                for line in block.text.splitlines():
                    assert re.search(re.escape(line).replace("…", ".*"), self.said), f"{line}\n{self.said}"
        else:
            assert block.language == "sh", f"a block of {block.language or 'no language'}: nobody knows how to run it"
            for command in () if block.not_run else block.commands():
                if command not in LISTED:  # those are run by test_documented_commands
                    self._type(self._with_ports(command))

    def close(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.join(30)
            code = self._server.exitcode
            self._server.kill()
            assert code == 0

    def _with_ports(self, text: str) -> str:
        return re.sub(r"(127\.0\.0\.1|localhost):(8000|8001)\b", lambda found: f"{found[1]}:{self._ports[found[2]]}", text)

    def _type(self, command: str) -> None:
        words = shlex.split(command)
        if words[:2] == ["gateway", "serve"]:
            self._serve(words)
        elif words[0] in ("gateway", "python") and "<<<" not in words:
            process = self._start(words)
            process.join(60)
            self.said = (self.folder / "stdout").read_text()
            assert process.exitcode == 0, f"{command}\n{(self.folder / 'stderr').read_text()}"
        else:
            done = subprocess.run(
                ["bash", "-c", command], env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False
            )
            self.said = done.stdout
            assert done.returncode == 0, f"{command}\n{done.stderr}"
            assert self.said, command

    def _start(self, words: Sequence[str]) -> ForkServerProcess:
        return started(words, self.folder, stdout=self.folder / "stdout", stderr=self.folder / "stderr")

    def _serve(self, words: Sequence[str]) -> None:
        self.close()
        self._server = self._start((*words, "--http-port", "0", "--grpc-port", "0"))
        until = time.monotonic() + READY_S
        while not (ports := READY.match((self.folder / "stdout").read_text())):
            self.said = (self.folder / "stderr").read_text()
            assert self._server.is_alive(), self.said
            assert time.monotonic() < until, self.said
            time.sleep(0.02)
        self._ports = {"8000": ports[1], "8001": ports[2]}
        self.said = (self.folder / "stderr").read_text()


def executed(code: Any) -> list[str]:
    """The lines that it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as written:
        exec(code, {"__name__": "__main__"})
    return written.getvalue().splitlines()


def valid(document: Any, *, source: str) -> None:
    """A configuration, or what could stand in one: `models`, one model, its backends, or keys beside the models.

    Also the settings of what serves what a platform loads.
    """
    if isinstance(document, dict) and "launcher" in document:
        with contextlib.chdir(ROOT / "configs" / "loadtests"):  # where the page says that it is
            parse_search_spec(document, load_catalogue(), source=source)
        return
    if "multi_model" in document:
        multi_model_of(Document(source, document))
        return
    if isinstance(document, list):
        document = {"models": document} if "name" in document[0] else {"backends": document}
    if not {"models", "server"} & set(document):
        document = {"models": [{"name": "m", **document}]}
    models = [{"backends": SYNTHETIC, **model} for model in document.get("models", [{"name": "m"}])]
    parse_config({**document, "models": models}, source=source)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_what_it_says(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("models", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    reader = Reader(tmp_path)
    try:
        for block in blocks(PAGES[page]):
            reader.do(block, page=page)
    finally:
        reader.close()


def test_what_is_not_run_is_told_in_testing_md() -> None:
    told = (ROOT / "docs" / "testing.md").read_text()
    reasons = {f"| {name} | {block.not_run} |" for name, path in FENCED.items() for block in blocks(path) if block.not_run}
    assert not {line for line in reasons if line not in told}
    assert len(reasons) == told.count("\n| docs/"), "testing.md lists blocks that are run, or are gone"
