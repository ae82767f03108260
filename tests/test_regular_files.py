"""What is named as a file and is a pipe, a socket or a device is refused, and its name told: nobody waits for it."""

import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from backends.base import LoadFailed
from backends.regular_file import file_bytes, opened_file, special
from backends.sagemaker_defaults import model_fn
from gateway.access.doors import keys_of
from gateway.cli import main
from gateway.config import AccessSection
from gateway.configuring.check import check
from gateway.configuring.guess import guess
from gateway.errors import ConfigError

ROOT = Path(__file__).parent.parent
PIPE = "it is a named pipe, not a file"
HANDLERS = "def model_fn(model_dir): ...\ndef predict_fn(data, model): return data\n"
PYTHON = 'backend: "python" input {name: "I" data_type: TYPE_FP32 dims: 4} output {name: "O" data_type: TYPE_FP32 dims: 4}'
LABELLED = 'backend: "onnxruntime" output {name: "OUTPUT0" data_type: TYPE_FP32 dims: 4 label_filename: "labels.txt"}'


@pytest.fixture(autouse=True)
def nobody_waits() -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("it was waited for")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def laid_out(folder: Path, pipe: str, files: dict[str, str]) -> Path:
    """A folder with files, of which one is a pipe."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.endswith(".onnx"):
            shutil.copy(text, path)
        else:
            path.write_text(text)
    (folder / pipe).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(folder / pipe)
    return folder


def test_what_is_no_file_is_named_for_what_it_is(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "made"))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for path, what in (("made", "a socket"), ("pipe", "a named pipe"), ("link", "a named pipe"), ("/dev/zero", "a device")):
        with pytest.raises(OSError, match=f"it is {what}, not a file"):
            opened_file(tmp_path / path)
    (tmp_path / "file").write_text("text")
    assert file_bytes(tmp_path / "file") == b"text"
    assert special("no\0path") == special(tmp_path / "absent") == special(tmp_path) == ""


@pytest.mark.parametrize(
    ("pipe", "files"),
    [
        ("m/config.pbtxt", {"m/1/model.onnx": str(ROOT / "models" / "linear.onnx")}),
        ("m/1/model.onnx", {}),
        ("m/1/model.py", {"m/config.pbtxt": PYTHON}),
        ("m/labels.txt", {"m/1/model.onnx": str(ROOT / "models" / "linear.onnx"), "m/config.pbtxt": LABELLED}),
        ("code/inference.py", {}),
        ("code/requirements.txt", {"code/inference.py": HANDLERS}),
    ],
)
def test_a_pipe_in_a_package_is_refused(tmp_path: Path, pipe: str, files: dict[str, str]) -> None:
    folder = laid_out(tmp_path / "package", pipe, files)
    with pytest.raises(ConfigError, match=PIPE) as refused:
        guess(str(folder), environment={})
    assert pipe in refused.value.message


@pytest.mark.parametrize("name", ["m.onnx", "m.pt", "m.py", "m.tar.gz"])
def test_a_pipe_in_place_of_a_model_is_refused(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name}: {PIPE}"):
        guess(str(tmp_path / name), environment={})
    with pytest.raises(ConfigError, match=f"left aside, neither files nor folders: {name}"):
        guess(str(tmp_path), environment={})


def test_a_pipe_in_place_of_weights_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.pt")
    with pytest.raises(LoadFailed, match=f"model.pt: {PIPE}"):
        model_fn(str(tmp_path))


@pytest.mark.parametrize("more", ["", f"sha256: '{'0' * 64}'"], ids=["", "with its hash"])
@pytest.mark.parametrize(
    ("kind", "model"), [("onnxruntime", "m.onnx"), ("torch", "m.pt"), ("python", "m.py:M"), ("torch", "m.py")]
)
def test_a_pipe_in_a_configuration_is_refused(
    tmp_path: Path, kind: str, model: str, more: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(f"models: [{{name: m, backends: [{{kind: {kind}, model: '{model}', {more}}}]}}]\n")
    os.mkfifo(tmp_path / model.partition(":")[0])
    told = [fault.found for fault in check(path).faults if fault.path == "models[0].backends[0].model"]
    assert any(PIPE in each for each in told) or model == "m.py"  # of which the name of the code is missing
    assert main(["package", str(path), "--out", str(tmp_path / "out.tar.gz")]) == 2


@pytest.mark.parametrize("pipe", ["SHA256SUMS", "more"])
def test_a_pipe_among_what_is_hashed_is_refused(tmp_path: Path, pipe: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("models: [{name: m, backends: [{kind: synthetic}]}]\n")
    if pipe != "SHA256SUMS":
        (tmp_path / "SHA256SUMS").write_text("".join(f"{'0' * 64}  {name}\n" for name in ("gateway.yaml", pipe)))
    os.mkfifo(tmp_path / pipe)
    with pytest.raises(ConfigError, match=f"{pipe}: cannot be read: {PIPE}"):
        check(path)


def test_a_pipe_in_place_of_keys_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "keys.yaml")
    with pytest.raises(ConfigError, match=f"server.access.keys: '.*keys.yaml': {PIPE}"):
        keys_of(AccessSection(keys=str(tmp_path / "keys.yaml")), {})


def test_a_configuration_may_come_by_a_pipe(tmp_path: Path) -> None:
    """As of `gateway check <(envsubst < gateway.yaml)`: who names one wants to wait for it."""
    reading, writing = os.pipe()
    os.write(writing, b"models: [{name: m, backends: [{kind: synthetic}]}]\n")
    os.close(writing)
    try:
        assert check(f"/dev/fd/{reading}").faults == ()
    finally:
        os.close(reading)
