"""Files that are written whole or not at all, by all commands that write one."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.documents.whole_file import asked_by, write_whole
from loadtest.commands.outputs import write
from loadtest.errors import UsageError
from tests.served.gateway_process import ROOT
from tests.why.recorded import Scene

LIMIT_BYTES = 64


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes the first bytes of a file and no more."""

    def write_some(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:LIMIT_BYTES])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_some)


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_whole(path, "é\n")
    assert path.read_bytes() == "é\n".encode()
    path.chmod(0o640)
    (tmp_path / "link").symlink_to(path)
    write_whole(tmp_path / "link", b"2")
    assert path.read_bytes() == b"2"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["a", "link"]


@pytest.mark.usefixtures("full")
def test_what_there_is_no_room_for_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("before")
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        write_whole(path, b"x" * 100)
    assert path.read_text() == "before"
    with pytest.raises(UsageError, match=f"{path}: cannot be written: .*No space left"):
        write(path, "x" * 100)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [("init", "models/linear.onnx", "-o"), ("package", "configs/examples/linear.yaml", "--out"), ("examples", "iris", "--out")],
    ids=lambda command: command[0],
)
def test_commands_leave_no_half_and_name_the_file(tmp_path: Path, command: tuple[str, ...]) -> None:
    name = {"init": "x.yaml", "package": "x.tar.gz", "examples": "x"}[command[0]]
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, *command, str(tmp_path / name)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert f"File too large: '{tmp_path / name}" in done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    "typed",
    [
        (f"init {ROOT}/tests/transform/models.py:twice -o", "x.yaml"),
        (f"package {ROOT}/configs/examples/iris.yaml --out", "x.tar.gz"),
        ("examples iris --out", "x"),
        ("why RECORDED --save", "x.msgpack"),
        (
            f"deploy kubernetes {ROOT}/configs/examples/linear.yaml --no-ray --image r/g --models pvc:m --memory 1Gi --output",
            "x",
        ),
    ],
    ids=lambda typed: typed[0].split()[0],
)
def test_the_option_of_a_file_that_cannot_be_written_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: tuple[str, str]
) -> None:
    command, name = typed
    (tmp_path / "file").touch()
    (tmp_path / "recorded").write_bytes(Scene(seconds=1.0).packed(1))
    output = tmp_path / "file" / name
    assert main([*command.replace("RECORDED", str(tmp_path / "recorded")).split(), str(output)]) == 2
    said = capsys.readouterr().err
    assert f"{command.split()[-1]}: {output}" in said
    told = "file, new or not, in a folder that may be written to" if "." in name else "folder, new or not, whose files may be"
    assert f": cannot be written: Not a directory: expected a {told}" in said


def test_a_failure_that_names_no_file_is_not_taken_for_one_of_the_option() -> None:
    with pytest.raises(OSError, match="too many open files"), asked_by("-o"):
        raise OSError(errno.EMFILE, "too many open files")


_LIMITED = f"""
import resource, signal, sys
from gateway.cli import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({LIMIT_BYTES}, {LIMIT_BYTES}))
sys.dont_write_bytecode = True
sys.exit(main(sys.argv[1:]))
"""
