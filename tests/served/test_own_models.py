"""A model of one's own, without a configuration: typed as docs/models.md says, in a folder that is not this checkout."""

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import termios
import time
import urllib.request
from array import array
from pathlib import Path

import onnx
import pytest
import yaml

from gateway.config import load_config
from tests.served.gateway_process import AS_ANYBODY, ROOT, served

pytestmark = pytest.mark.slow

BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "models.md").read_text(), re.MULTILINE | re.DOTALL)


def gateway(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [*AS_ANYBODY, sys.executable, "-m", "gateway.cli", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def ask(address: str, model: str, *inputs: object) -> dict[str, list[object]]:
    body = json.dumps({"inputs": inputs}).encode()
    with urllib.request.urlopen(f"http://{address}/v2/models/{model}/infer", data=body, timeout=30) as answer:
        return {output["name"]: output["data"] for output in json.load(answer)["outputs"]}


def test_a_folder_of_the_documents_examples_is_served(tmp_path: Path) -> None:
    area, best = BLOCKS[:2]
    (tmp_path / "area.py").write_text(area)
    (tmp_path / "best.py").write_text(best)
    log = tmp_path / "log"
    with served(tmp_path, "--no-ray", log=log) as running:
        sides = [
            {"name": name, "datatype": "FP64", "shape": [2], "data": data}
            for name, data in (("width", [2, 3]), ("height", [4, 5]))
        ]
        assert ask(running.http, "area", *sides) == {"output": [8, 15]}
        rows = {"name": "x", "datatype": "FP32", "shape": [2, 4], "data": [0, 1, 0, 0, 0, 0, 0, 1]}
        assert ask(running.http, "best", rows) == {"output": [1, 3]}
    told = log.read_text()
    assert f"# `gateway init {tmp_path}` writes this configuration:" in told
    assert "  - name: area\n" in told


def test_init_writes_what_serve_says(tmp_path: Path) -> None:
    (tmp_path / "area.py").write_text(f"import os\nos.chdir('/tmp')\n{BLOCKS[0]}")
    (tmp_path / "configs").mkdir()
    shown = gateway(tmp_path, "init", "--quiet", "area.py:predict")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert yaml.safe_load(shown.stdout)["models"][0]["backends"] == [{"kind": "python", "model": "area.py:predict"}]
    command = ("init", "area.py:predict", "-o", "configs/area.yaml")
    assert gateway(tmp_path, *command).stdout == ""
    model = load_config(tmp_path / "configs" / "area.yaml").models[0]
    assert model.backends[0].options()["model"] == f"{tmp_path}/area.py:predict"
    again = gateway(tmp_path, *command)
    assert (again.returncode, again.stderr) == (
        2,
        f"-o: {tmp_path}/configs/area.yaml: exists: name another file, or remove it\n",
    )


def test_ctrl_c_ends_at_once_while_a_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import sys, time\nprint('reading', flush=True)\ntry:\n    time.sleep(60)\nexcept BaseException:\n    print('caught')\n"
    )
    command = [sys.executable, "-m", "gateway.cli", "init", "--quiet", "slow.py:predict"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "reading\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "gateway: ended by Ctrl-C\n")
        assert process.returncode == 130


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("who", ["main", "another"])
def test_ctrl_c_ends_what_waits_for_somebody_to_read_what_a_model_prints(tmp_path: Path, who: str, unbuffered: str) -> None:
    prints = "print('x' * 1_000_000)"
    if who == "another":
        prints = f"import threading, time\nthreading.Thread(target=lambda: {prints}).start()\ntime.sleep(60)"
    (tmp_path / "loud.py").write_text(prints)
    command = [sys.executable, "-m", "gateway.cli", "init", "--quiet", "loud.py:predict"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        until_s = time.monotonic() + 30
        while (held := waiting_in(process.stderr.fileno())) < 1 << 16 and time.monotonic() < until_s:
            time.sleep(0.01)
        assert held == 1 << 16
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def waiting_in(pipe: int) -> int:
    """Bytes."""
    held = array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, held)
    return held[0]


@pytest.mark.parametrize("repository", [False, True])
def test_a_folder_that_may_not_be_entered_is_left_aside(tmp_path: Path, repository: bool) -> None:
    """As `lost+found`, which each volume of ext4 has at its top."""
    (tmp_path / "lost+found").mkdir(mode=0)
    model = tmp_path / "m" / "1" / "model.onnx" if repository else tmp_path / "m.onnx"
    model.parent.mkdir(parents=True, exist_ok=True)
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 2]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "g", [x], [y])
    onnx.save(onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 18)]), model)
    done = gateway(tmp_path, "init", ".")
    assert (done.returncode, done.stderr) == (0, "")
    (noted, *_) = done.stdout.splitlines()
    assert "left aside" in noted
    assert "lost+found" in noted
    assert [each["name"] for each in yaml.safe_load(done.stdout)["models"]] == ["m"]


def test_check_says_how_a_model_gets_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\x08\x0a\x12\x07pytorch\xff")
    done = gateway(tmp_path, "check", "model.onnx")
    assert done.returncode == 2
    assert "of a model, `gateway init model.onnx` writes a configuration" in done.stderr


def test_a_port_that_is_taken_is_told_before_the_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("raise RuntimeError('read')\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = gateway(tmp_path, "serve", "slow.py:predict", "--http-port", port, "--grpc-port", "0")
    assert done.returncode == 1
    assert f"server.http_port: {port}: taken by another process" in done.stderr
    assert "RuntimeError" not in done.stderr


def test_what_is_no_model_ends_at_once_with_the_way_on(tmp_path: Path) -> None:
    (tmp_path / "model.pkl").write_bytes(b"\x80\x04.")
    done = gateway(tmp_path, "serve", "model.pkl", "--no-ray", "--http-port", "0", "--grpc-port", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{tmp_path}/model.pkl: a pickle: loading one runs the code in it")
    assert "serve FILE.py:Class" in done.stderr
