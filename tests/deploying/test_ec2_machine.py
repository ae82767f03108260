"""What a machine on EC2 is told: cloud-init and systemd take it, and run here its script makes a gateway that answers."""

import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.ports import free_port
from tests.containers.test_entry import ask
from tests.deploying.machine_here import UNIT, machine, written
from tests.deploying.planned_ec2 import IRIS, WHEEL, planned

ROWS = '{"inputs": [{"name": "measurements", "datatype": "FP32", "shape": [1, 4], "data": [5.1, 3.5, 1.4, 0.2]}]}'
TENSORS = {side: [{"name": side, "datatype": "FP32", "shape": [-1, 1]}] for side in ("inputs", "outputs")}
SLOW_MS = 700
SLOW: dict[str, Any] = {"name": "slow", "max_rows": 1, **TENSORS, "backends": [{"kind": "synthetic", "fixed_ms": SLOW_MS}]}
SLOW_ROW = '{"inputs": [{"name": "inputs", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}'
GPU: dict[str, Any] = {"name": "m", "max_rows": 8, "backends": [{"kind": "synthetic", "resources": {"num_gpus": 1}}]}


def told(capsys: pytest.CaptureFixture[str], tmp_path: Path, *options: str, config: Path = IRIS) -> str:
    text: str = planned(capsys, tmp_path, *options, config=config)["ec2.run_instances"]["UserData"]
    return text


def schema(path: Path) -> "subprocess.CompletedProcess[str]":
    command = ["cloud-init", "schema", "--config-file", path]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.slow
@pytest.mark.debian("cloud-init")
def test_cloud_inits_own_schema_takes_the_user_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = told(capsys, tmp_path)
    (tmp_path / "good").write_text(text)
    done = schema(tmp_path / "good")
    assert done.returncode == 0, done.stderr
    (tmp_path / "bad").write_text(text.replace("permissions", "permission"))
    assert "'permission' was unexpected" in schema(tmp_path / "bad").stderr


def verified(tmp_path: Path, unit: str) -> str:
    """What systemd complains of. The program of the unit has to be there."""
    program, path = tmp_path / "gateway-program", tmp_path / "gateway.service"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    path.write_text(unit.replace("/opt/gateway/environment/bin/gateway", str(program)))
    command = ["systemd-analyze", "verify", "--man=no", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stderr + done.stdout + ("" if done.returncode == 0 else f"exit code {done.returncode}")


@pytest.mark.slow
@pytest.mark.debian("systemd")
@pytest.mark.parametrize("options", [(), ("--instance-type", "g6.xlarge", "--allow", "10.0.0.0/16")], ids=["cpu", "gpu"])
def test_systemd_takes_the_unit_and_finds_it_harmless(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: tuple[str, ...]
) -> None:
    config = IRIS
    if options:
        config = tmp_path / "x.yaml"
        config.write_text(yaml.safe_dump({"server": {"http_port": 443}, "models": [GPU]}))
    unit = written(told(capsys, tmp_path, *options, config=config))[UNIT]
    assert ("PrivateDevices=yes" in unit) is (not options)
    assert "Unknown key" in verified(tmp_path, unit.replace("OOMPolicy", "OutOfMemoryPolicy"))
    assert verified(tmp_path, unit) == ""
    # In tenths: 100 is without any protection, and up to 25 systemd calls it OK.
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=25", tmp_path / "gateway.service"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The example, at free ports, and a model that takes its time."""
    value = yaml.safe_load(IRIS.read_text())
    value["server"] = {"http_port": free_port(), "grpc_port": free_port()}
    value["models"].append(SLOW)
    (tmp_path / "iris.yaml").write_text(yaml.safe_dump(value, sort_keys=False))
    (tmp_path / "iris.py").write_bytes((IRIS.parent / "iris.py").read_bytes())
    return tmp_path / "iris.yaml"


def busy(at: tuple[str, int]) -> bool:
    """Whether the slow model runs a batch."""
    families = text_string_to_metric_families(ask(at, "GET", "/metrics")[1].decode())
    samples = [sample for family in families for sample in family.samples if sample.name == "gateway_busy_workers"]
    return any(sample.labels["model"] == "slow" and sample.value for sample in samples)


@pytest.mark.slow
def test_the_machines_script_makes_a_gateway_that_answers_and_drains(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: Path
) -> None:
    text = told(capsys, tmp_path, config=config)
    with machine(tmp_path / "machine", config, text, tmp_path / WHEEL, tmp_path / "requirements.lock") as here:
        here.settings["secrets"] = {"keys.yaml": "secretsmanager:of/mine", "tls.key": "ssm:/of/mine"}
        here.aws.secrets |= {"secretsmanager:of/mine": "a secret", "ssm:/of/mine": "another"}
        done = here.set_up()
        assert done.stdout.splitlines()[-1:] == ["gateway-setup: ready"], done.stdout + done.stderr
        assert here.said("systemctl-asked").splitlines() == ["daemon-reload", "enable --now gateway.service"]
        for name, value in (("keys.yaml", "a secret"), ("tls.key", "another")):
            kept = here.folder / "secrets" / name
            assert kept.read_text() == value
            assert kept.stat().st_mode & 0o777 == 0o400
        at = ("127.0.0.1", yaml.safe_load(config.read_text())["server"]["http_port"])
        assert ask(at, "POST", "/v2/models/iris/infer", ROWS)[0] == 200
        answers: list[int] = []
        asking = threading.Thread(target=lambda: answers.append(ask(at, "POST", "/v2/models/slow/infer", SLOW_ROW)[0]))
        asking.start()
        while not busy(at):
            assert asking.is_alive()
        (stop_s,) = (line.partition("=")[2] for line in written(text)[UNIT].splitlines() if line.startswith("TimeoutStopSec"))
        began_s = time.monotonic()
        assert here.stopped(float(stop_s)) == 0
        asking.join()
        assert answers == [200]  # it was in flight
        assert time.monotonic() - began_s < SLOW_MS / 1000 + 5
