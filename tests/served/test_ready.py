"""A plain `gateway serve`, from its first word to its last: steps, the ready line, the command it prints, and Ctrl-C."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from backends.base import ModelSpec, TensorSpec
from gateway.config import parse_config
from gateway.process.announcement import ReadyModel, curl_command
from tests.served.gateway_process import ROOT, served

pytestmark = pytest.mark.slow

FREE_PORTS = ("--http-port", "0", "--grpc-port", "0")


def tensor(datatype: str, *shape: int, name: str = "x") -> dict[str, object]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}


def echo(name: str, *tensors: dict[str, object], **more: object) -> dict[str, object]:
    outputs = [one | {"name": f"{one['name']} out"} for one in tensors]
    return {"name": name, "inputs": list(tensors), "outputs": outputs, "backends": [{"kind": "synthetic"}], **more}


MODELS = [
    echo("plain", tensor("FP32", -1, 16)),
    echo("it's a name?", tensor("INT64", -1, 2, name='a "quoted" $name')),
    echo("several", tensor("BYTES", -1, 1, name="a"), tensor("BOOL", -1, 40, name="b"), tensor("UINT8", -1, 3, name="c")),
    echo("image", tensor("FP32", -1, 3, 224, 224)),
    echo("half", tensor("FP16", -1, 8)),
    echo("half-and-text", tensor("BF16", -1, 40, name="a"), tensor("BYTES", -1, 40, name="b")),
    echo("without-rows", tensor("FP64", -1, 20), max_rows=0),
    echo("ragged", tensor("INT64", -1, -1), ragged={"pad": {"x": 0}, "buckets": [16, 32]}),
]


@contextlib.contextmanager
def started(config: Path, *options: str, temporary: Path | None = None) -> Iterator["subprocess.Popen[str]"]:
    """What nobody has waited for yet; killed at the end. temporary: where it is to put what lasts as long as itself."""
    command = [sys.executable, "-m", "gateway.cli", "serve", str(config), *FREE_PORTS, *options]
    env = os.environ | ({"TMPDIR": str(temporary)} if temporary is not None else {})
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    return path


def one_model(tmp_path: Path, *, server: str = "{}", **backend: object) -> Path:
    return written(
        tmp_path, f"server: {server}\nmodels: [{{name: m, backends: [{json.dumps({'kind': 'synthetic', **backend})}]}}]"
    )


@pytest.mark.debian("curl")
def test_the_printed_request_is_answered_by_a_model_of_any_shape(tmp_path: Path) -> None:
    document = {"models": MODELS}
    config = parse_config(document, source="test")
    counts = {"kind": "python", "model": f"{ROOT}/tests/rest_routes/test_generate.py:Counts"}
    in_parts = [{"name": "counts", "max_rows": 0, "backends": [counts]}]
    with served(written(tmp_path, yaml.safe_dump({"models": MODELS + in_parts})), "--no-ray") as gateway:
        for model in config.models:
            spec: ModelSpec = model.declared()
            command = curl_command(f"http://{gateway.http}", ReadyModel(model.name, "1", spec, True), config.server)
            assert command is not None, model.name
            assert asked(command, tmp_path) == "200", command
        inputs = (TensorSpec("text", "BYTES", (1,)), TensorSpec("n", "INT32", (1,)))
        decoupled = ModelSpec("", inputs, (TensorSpec("said", "BYTES", (1,)),), 0, decoupled=True)
        streaming = curl_command(f"http://{gateway.http}", ReadyModel("counts", "1", decoupled, True), config.server)
        assert streaming is not None
        assert asked(streaming, tmp_path) == "200", streaming


def asked(command: str, folder: Path) -> str:
    """The HTTP status that a command, run literally, was answered with."""
    script = command.replace("curl -sS", r"curl -sS -w '\n%{http_code}'")
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines()[-1]


@pytest.mark.debian("curl")
def test_it_is_one_process_that_says_what_it_loads_where_it_is_and_how_to_ask(tmp_path: Path) -> None:
    with started(one_model(tmp_path, load_ms=1500)) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready.startswith("gateway ready http=127.0.0.1:")
        assert process.stdout.readline() == "models: m\n"
        assert process.stdout.readline() == f"what goes on, in a browser: http://{ready.split()[2].removeprefix('http=')}/\n"
        assert process.stdout.readline() == "try it:\n"
        assert asked(process.stdout.readline().strip(), tmp_path) == "200"
        assert not any("raylet" in child.name() for child in psutil.Process(process.pid).children(recursive=True))
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr is not None
        said = process.stderr.read().splitlines()
    assert "loading m …" in said
    assert said[-1] == "stopping"


def test_quiet_it_only_says_that_it_is_ready(tmp_path: Path) -> None:
    with started(one_model(tmp_path, load_ms=1200), "--quiet") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("gateway ready http=127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert (process.stdout.read(), process.stderr.read()) == ("", "")


def test_it_serves_on_when_nobody_reads_what_it_says(tmp_path: Path) -> None:
    with started(one_model(tmp_path, load_ms=300)) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        for line in process.stderr:
            if "is ready on" in line:
                break
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert "Traceback" not in process.stderr.read()


def test_ctrl_c_says_what_it_waits_for_and_a_second_one_ends_at_once(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    config = one_model(tmp_path, server="{drain_timeout_s: 30}", faults={"hang": 7.0})
    with started(config, temporary=temporary) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().split()[2].removeprefix("http=")
        assert list(temporary.glob("gateway-*"))
        body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "data": [7.0] * 16}]}

        def ask() -> None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://{address}/v2/models/m/infer", json.dumps(body).encode(), timeout=60)

        asking = threading.Thread(target=ask)
        asking.start()
        while not pending(address):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        line = next(line for line in process.stderr if line.startswith("stopping"))
        assert line == "stopping: 1 in flight, which has up to 30 s; Ctrl-C again ends at once\n"
        time.sleep(0.6)  # else it is the same press
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 130
        assert process.stderr.readlines()[-1] == "ended at once: requests in flight are lost\n"
        asking.join()
    assert not list(temporary.iterdir())


def pending(address: str) -> int:
    with urllib.request.urlopen(f"http://{address}/v2/models/m/route?rows=1", timeout=10) as response:
        found: int = json.load(response)["lanes"][0]["pending"]
        return found
