"""What the manifests describe, run here: the container, with the ConfigMap's file; and Ray's nodes, with what runs on which."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.ports import free_port
from gateway.cli import main
from tests.containers.image import KSERVE, lacking, started
from tests.containers.test_entry import ask

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
ROWS = '{"inputs": [{"name": "measurements", "datatype": "FP32", "shape": [1, 4], "data": [5.1, 3.5, 1.4, 0.2]}]}'


@pytest.mark.skipif(bool(lacking()), reason=lacking())
@pytest.mark.parametrize("kind", ["no-ray", "kserve"])
def test_it_answers_where_the_cluster_asks_and_ends_in_time(tmp_path: Path, kind: str) -> None:
    config = yaml.safe_load((ROOT / "configs" / "examples" / "iris.yaml").read_text())
    config["server"] = {"http_port": free_port(), "grpc_port": free_port()}
    (tmp_path / "iris.yaml").write_text(yaml.safe_dump(config))
    model = tmp_path / "models"
    model.mkdir()
    for place in (model, tmp_path):
        (place / "iris.py").write_bytes((ROOT / "configs" / "examples" / "iris.py").read_bytes())
    out = tmp_path / "out"
    where = "pvc:models" if kind == "no-ray" else "s3://bucket/iris"
    options = ["--image", "gateway:cpu", "--models", where, "--memory", "1Gi", "--output", str(out)]
    assert main(["deploy", "kubernetes", str(tmp_path / "iris.yaml"), f"--{kind}", *options]) == 0
    container, grace_s = pod_of(out)
    held = tmp_path / "configuration"
    held.mkdir()
    for name, text in yaml.safe_load((out / "configmap.yaml").read_text())["data"].items():
        (held / name).write_text(text)
    variables = {each["name"]: each["value"] for each in container.get("env", ())}
    with started(tmp_path, model, container["args"], place=KSERVE, variables=variables, configuration=held) as running:
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert {name: address[1] for name, address in running.addresses().items()} == ports
        at = ("127.0.0.1", ports["http"])
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container[probe]["httpGet"]
            assert asked["port"] == "http"
            assert ask(at, "GET", asked["path"])[0] == 200
        assert ask(at, "POST", "/v2/models/iris/infer", ROWS)[0] == 200
        (endpoint,) = yaml.safe_load((out / "podmonitor.yaml").read_text())["spec"]["podMetricsEndpoints"]
        status, body = ask(("127.0.0.1", ports[endpoint["port"]]), "GET", endpoint["path"])
        assert status == 200
        told = {sample.name for family in text_string_to_metric_families(body.decode()) for sample in family.samples}
        (rule,) = yaml.safe_load((out / "prometheus-adapter-rules.yaml").read_text())["rules"]
        wanted = set(re.findall(r"gateway_\w+", rule["seriesQuery"] + rule["metricsQuery"]))
        assert wanted
        assert wanted <= told
        begun = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(grace_s) == 0
        sleep_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert time.monotonic() - begun + sleep_s < grace_s


def pod_of(out: Path) -> tuple[dict[str, Any], int]:
    if (out / "deployment.yaml").exists():
        pod = yaml.safe_load((out / "deployment.yaml").read_text())["spec"]["template"]["spec"]
    else:
        pod = yaml.safe_load((out / "inferenceservice.yaml").read_text())["spec"]["predictor"]
        pod |= yaml.safe_load((out / "servingruntime.yaml").read_text())["spec"]
    (container,) = pod["containers"]
    return container, pod["terminationGracePeriodSeconds"]


@pytest.mark.ray
def test_on_ray_each_replica_runs_in_the_pod_that_was_made_for_it(tmp_path: Path) -> None:
    tensors = {
        name: [{"name": tensor, "datatype": "FP32", "shape": [-1, 2]}] for name, tensor in (("inputs", "x"), ("outputs", "y"))
    }
    near = {"name": "near", "max_rows": 8, **tensors, "backends": [{"kind": "synthetic", "resources": {"special": 1}}]}
    far = {"name": "far", "max_rows": 8, **tensors, "backends": [{"kind": "synthetic", "placement": "replicas", "sessions": 2}]}
    config = {"server": {"http_port": free_port(), "grpc_port": None}, "models": [near, far]}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(config))
    options = ["--image", "gateway:cpu", "--models", "image:/models", "--replicas", "2", "--output", str(tmp_path)]
    assert main(["deploy", "kubernetes", str(tmp_path / "x.yaml"), *options]) == 0
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SERVE_"))}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        done = subprocess.run(
            [sys.executable, "-m", "tests.deploying.raylets", str(tmp_path / "rayservice.yaml"), str(tmp_path / "found.json")],
            env=environment | {"RAY_TMPDIR": directory, "RAY_USAGE_STATS_ENABLED": "0"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    placed = {
        "head": ["ServeController"],
        "ingress-0": ["ingress"],
        "ingress-1": ["ingress"],
        "far-1-synthetic-0": ["far-1-synthetic"],
    }
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == [placed, placed, {name: there for name, there in placed.items() if name != "ingress-1"}]
