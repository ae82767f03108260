"""What `gateway deploy kubernetes` prints: Kubernetes would take it, its parts fit each other, and no secret is in it."""

import itertools
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._private import ray_constants
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.serve._private.build_app import build_app
from ray.serve.schema import ServeDeploySchema

from gateway.app import build
from gateway.cli import main
from gateway.config import parse_config
from gateway.deploying.contents import as_yaml
from gateway.deploying.packing import packed
from gateway.deploying.ray_groups import RAY_VERSION
from gateway.documents.reader import read
from tests.deploying.made_configs import written
from tests.deploying.schemas_of import CRDS, faults, faults_by_its_operator

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted(
    path for path in (ROOT / "configs" / "examples").glob("*.yaml") if "models" in yaml.safe_load(path.read_text())
)
IMAGE = ("--image", "registry.example.com/gateway:cpu")
KINDS = {
    "no-ray": ("--no-ray", "--models", "pvc:models/of-mine"),
    "ray": ("--models", "s3://bucket/of-mine", "--fetcher", "registry.example.com/aws-cli"),
    "kserve": ("--kserve", "--models", "s3://bucket/of-mine"),
}
NEEDS_RAY = {"fleet"}
OPERATORS = {"RayService", "ServingRuntime", "InferenceService", "PodMonitor"}

Manifests = dict[str, dict[str, Any]]


def deployed(capsys: pytest.CaptureFixture[str], config: Path, *options: str) -> Manifests:
    """By kind, of which there is one each."""
    code = main(["deploy", "kubernetes", str(config), *IMAGE, *options])
    out, err = capsys.readouterr()
    assert code == 0, err
    found = list(yaml.safe_load_all(out))
    assert len({manifest["kind"] for manifest in found}) == len(found)
    return {manifest["kind"]: manifest for manifest in found}


def refused(capsys: pytest.CaptureFixture[str], config: Path, *options: str) -> str:
    assert main(["deploy", "kubernetes", str(config), *IMAGE, *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.strip()


def pods(manifests: Manifests) -> Iterator[dict[str, Any]]:
    """Their templates, KServe's put together of its two halves."""
    if "Deployment" in manifests:
        yield manifests["Deployment"]["spec"]["template"]
    elif "RayService" in manifests:
        cluster = manifests["RayService"]["spec"]["rayClusterConfig"]
        yield from (group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]))
    else:
        runtime = manifests["ServingRuntime"]["spec"]
        predictor = manifests["InferenceService"]["spec"]["predictor"]
        labels = {"serving.kserve.io/inferenceservice": manifests["InferenceService"]["metadata"]["name"]}
        halves = predictor | {"containers": runtime["containers"], "volumes": runtime["volumes"]}
        yield {"metadata": {"labels": labels}, "spec": halves}


def all_of(manifests: Manifests, key: str) -> Iterator[Any]:
    """What stands under a key, wherever."""

    def walk(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            yield from (part for name, part in value.items() if name == key)
            value = list(value.values())
        if isinstance(value, list):
            for part in value:
                yield from walk(part)

    return walk(list(manifests.values()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_manifest_of_every_example_is_what_kubernetes_takes(
    capsys: pytest.CaptureFixture[str], example: Path, kind: str
) -> None:
    options = (*KINDS[kind], "--memory", "4Gi", "--name", "mine", "--namespace", "serving", "--service-account", "reader")
    if example.stem in NEEDS_RAY and kind != "ray":
        assert "backend neuron has placement replicas, which needs Ray" in refused(capsys, example, *options)
        return
    manifests = deployed(capsys, example, *options)
    assert [fault for manifest in manifests.values() for fault in faults(manifest)] == []
    expected = {
        "no-ray": {"ConfigMap", "Deployment", "Service", "HorizontalPodAutoscaler"},
        "ray": {"RayService", "Service", "NetworkPolicy"},
        "kserve": {"ConfigMap", "ServingRuntime", "InferenceService", "HorizontalPodAutoscaler"},
    }
    assert set(manifests) == expected[kind] | {"PodDisruptionBudget", "PodMonitor"}
    for manifest in manifests.values():
        assert manifest["metadata"]["namespace"] == "serving"  # nothing is the cluster's: each namespace may have one of a name


@pytest.mark.skipif(not CRDS.is_dir(), reason="KUBERNETES_CRDS is not set: those of KubeRay, KServe and prometheus-operator")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_definitions_that_operators_publish_take_it(capsys: pytest.CaptureFixture[str], example: Path) -> None:
    for kind in ("ray", "kserve"):
        if kind == "ray" or example.stem not in NEEDS_RAY:
            for manifest in deployed(capsys, example, *KINDS[kind], "--memory", "4Gi").values():
                if manifest["kind"] in OPERATORS:
                    assert faults_by_its_operator(manifest) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_manifest_is_noticed(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """Else the test above would say nothing: each mapping gets a field that there is not, each text a number."""
    manifests = deployed(capsys, ROOT / "configs" / "examples" / "iris.yaml", *KINDS[kind], "--memory", "4Gi")
    free = ("labels", "annotations", "matchLabels", "selector", "data", "requests", "limits", "rayStartParams")
    spoiled = 0
    for manifest in manifests.values():
        for path in itertools.chain([()], paths(manifest)):
            if not any(part in free for part in path if manifest["kind"] != "PodMonitor" or part != "selector"):
                copy = json.loads(json.dumps(manifest))
                place = copy
                for part in path:
                    place = place[part]
                if isinstance(place, dict):
                    place["nonesuch"] = 1
                    assert faults(copy), (manifest["kind"], path)
                    spoiled += 1
    assert spoiled > 30


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*at, key)
        yield from paths(part, (*at, key))


@pytest.mark.parametrize("kind", KINDS)
def test_its_parts_fit_each_other(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    server = {"tls": {"certificate": "c.pem", "key": "k.pem"}, "access": {"keys": "keys.yaml"}}
    manifests = deployed(capsys, written(tmp_path, server=server), *KINDS[kind])
    templates = [*pods(manifests)]
    serving = [pod for pod in templates if {"http", "serve"} & set(port_names(pod))]
    for pod in templates:
        mounted = {mount["name"] for each in containers(pod) for mount in each["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in pod["spec"]["volumes"]}
        for each in containers(pod):
            for name in ("startupProbe", "livenessProbe", "readinessProbe"):
                port = each.get(name, {"httpGet": {"port": 0}})["httpGet"]["port"]
                assert isinstance(port, int) or port in {known["name"] for known in each["ports"]}
    for kind_of, key in (("Service", "selector"), ("PodDisruptionBudget", "matchLabels"), ("PodMonitor", "matchLabels")):
        if kind_of in manifests:
            spec = manifests[kind_of]["spec"]
            selected = spec[key] if key == "selector" else spec["selector"][key]
            chosen = [pod for pod in templates if selected.items() <= pod["metadata"]["labels"].items()]
            assert len(chosen) == 1
            assert chosen[0] in serving
    monitor = manifests["PodMonitor"]["spec"]["podMetricsEndpoints"][0]
    assert monitor["port"] in port_names(serving[-1])
    assert monitor["scheme"] == "https"
    assert monitor["relabelings"] == [{"action": "replace", "targetLabel": "job", "replacement": "gateway-m"}]
    assert monitor["authorization"]["credentials"] == {"name": "m-metrics-key", "key": "key"}


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def port_names(pod: dict[str, Any]) -> list[str]:
    return [port["name"] for each in pod["spec"]["containers"] for port in each.get("ports", ())]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_may_do_nothing_but_serve(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    manifests = deployed(capsys, ROOT / "configs" / "examples" / "iris.yaml", *KINDS[kind], "--memory", "4Gi")
    for pod in pods(manifests):
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert pod["spec"]["securityContext"].items() >= {"runAsNonRoot": True, "runAsUser": 1000}.items()
        for each in containers(pod):
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }
            assert each["resources"]["limits"]["memory"] == each["resources"]["requests"]["memory"]
            assert "cpu" not in each["resources"]["limits"]  # a batch that waits for its share of a core is late


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_may_listen_below_1024_where_it_is_to(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    for port, expected in ((443, [{"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}]), (8443, None)):
        manifests = deployed(capsys, written(tmp_path, server={"http_port": port}), *KINDS[kind])
        assert all(pod["spec"]["securityContext"].get("sysctls") == expected for pod in pods(manifests))
        assert [fault for manifest in manifests.values() for fault in faults(manifest)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_secrets_are_named_and_never_written(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    for name in ("server.pem", "server.key", "keys.yaml"):
        (tmp_path / name).write_text("hush-hush")
    server = {
        "tls": {"certificate": "server.pem", "key": "server.key"},
        "access": {"keys": "keys.yaml", "keys_variable": "KEYS"},
    }
    manifests = deployed(capsys, written(tmp_path, server=server), *KINDS[kind])
    assert "hush-hush" not in json.dumps(manifests)
    assert {each["secretName"] for each in all_of(manifests, "secret") if "secretName" in each} == {"m-tls", "m-keys"}
    assert {(each["name"], each["key"]) for each in all_of(manifests, "secretKeyRef")} == {("m-keys", "keys.yaml")}
    held = configuration(manifests)["server"]
    assert held["tls"] == {"certificate": "/etc/gateway-tls/tls.crt", "key": "/etc/gateway-tls/tls.key"}
    assert held["access"] == {"keys": "/etc/gateway-keys/keys.yaml", "keys_variable": "KEYS"}
    assert str(tmp_path) not in json.dumps(manifests)


def configuration(manifests: Manifests) -> Any:
    """As it stands in the pods; it is valid."""
    if "RayService" in manifests:
        held = yaml.safe_load(manifests["RayService"]["spec"]["serveConfigV2"])["applications"][0]["args"]
    else:
        held = yaml.safe_load(manifests["ConfigMap"]["data"]["gateway.yaml"])
    parse_config(held, source="pod")
    return held


def test_the_configuration_has_the_pods_paths_and_what_it_listens_at(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "w.npy").write_text("")
    options = {"weights": "../weights/w.npy", "mode": "best"}
    code = {"kind": "python", "name": "code", "model": "code/a.py:A", "class_options": options}
    absolute = {"kind": "python", "name": "absolute", "model": "/opt/b.py:B"}
    module = {"kind": "python", "name": "module", "model": "package.module:C"}
    other = {"kind": "triton", "url": "triton:8001", "model": "there"}
    models = {"name": "m", "backends": [code, absolute, module, other]}
    path = written(tmp_path, models, server={"http_port": 8080, "run_dir": "run", "state_dir": "state"})
    held = configuration(deployed(capsys, path, *KINDS["no-ray"], "--memory", "1Gi"))
    assert held["server"] == {"http_port": 8080, "host": "0.0.0.0", "grpc_port": 8001, "state_dir": "/tmp/state"}
    found = {entry.get("name", "triton"): entry["model"] for entry in held["models"][0]["backends"]}
    assert found == {
        "code": "/mnt/models/code/a.py:A",
        "absolute": "/opt/b.py:B",
        "module": "package.module:C",
        "triton": "there",
    }
    assert held["models"][0]["backends"][0]["class_options"] == options  # which counts from the code, as before
    in_image = configuration(deployed(capsys, path, "--no-ray", "--models", "image:/srv/models", "--memory", "1Gi"))
    assert in_image["models"][0]["backends"][0]["model"] == "/srv/models/code/a.py:A"


def test_files_lie_to_each_other_as_in_a_package(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("code/a.py", "code/helper.py", "more/b.py", "weights/w.npy", "m/1/model.py", "m/config.pbtxt"):
        (tmp_path / "models" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "models" / name).write_text("import helper\n")
    options = {"weights": "../weights/w.npy"}
    tensors = {name: [{"name": name, "datatype": "FP32", "shape": [-1, 2]}] for name in ("inputs", "outputs")}
    code = {"kind": "python", "model": "models/code/a.py:A", "class_options": options}
    of_triton = {"kind": "python", "model": "models/m/1/model.py:TritonPythonModel"}
    for backends in ([code], [code, {"kind": "python", "name": "b", "model": "models/more/b.py:B"}], [of_triton]):
        path = written(tmp_path, {"name": "m", **tensors, "max_rows": 8, "backends": backends})
        assert main(["deploy", "kubernetes", str(path), *IMAGE, *KINDS["no-ray"], "--memory", "1Gi"]) == 0
        out, told = capsys.readouterr()
        held = configuration({manifest["kind"]: manifest for manifest in yaml.safe_load_all(out)})
        package = packed(read(path))
        in_package = yaml.safe_load(package.configuration)
        assert told.splitlines()[1:] == [f"  {name}" for name in package.files]
        assert [entry["model"].removeprefix("/mnt/models/") for entry in held["models"][0]["backends"]] == [
            entry["model"] for entry in in_package["models"][0]["backends"]
        ]


def test_what_a_pod_asks_for_follows_the_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(bytes(100 << 20))
    model = {"kind": "torch", "model": "m.pt", "sessions": 2, "threads": 3}
    manifests = deployed(capsys, written(tmp_path, {"name": "m", "backends": [model]}), *KINDS["no-ray"])
    # One core listens, 2 × 3 compute. A gibibyte for the process and twice the file for each session, in steps of 256 MiB:
    # 1024 + 2 × 100 × 2 = 1424, which is 6 steps.
    assert next(iter(all_of(manifests, "resources")))["requests"] == {"cpu": "7", "memory": "1536Mi"}
    manifests = deployed(
        capsys, written(tmp_path, {"name": "m", "backends": [model | {"device": "cuda:1"}]}), *KINDS["no-ray"], "--cpu", "500m"
    )
    assert next(iter(all_of(manifests, "resources")))["limits"] == {"memory": "1536Mi", "nvidia.com/gpu": 2}
    assert next(iter(all_of(manifests, "resources")))["requests"]["cpu"] == "500m"
    assert next(iter(all_of(manifests, "tolerations")))[0]["key"] == "nvidia.com/gpu"
    deadline_s = manifests["Deployment"]["spec"]["progressDeadlineSeconds"]
    startup = next(all_of(manifests, "startupProbe"))
    assert deadline_s > startup["periodSeconds"] * startup["failureThreshold"]  # else a rollout fails before its pods do
    for kind, expected in (("torch", "2048Mi"), ("onnxruntime", "1792Mi")):  # 2 × 256 MiB more, 2 × 64
        isolated = {**model, "kind": kind, "isolation": "process"}
        manifests = deployed(capsys, written(tmp_path, {"name": "m", "backends": [isolated]}), *KINDS["no-ray"])
        assert next(iter(all_of(manifests, "resources")))["limits"] == {"memory": expected}


def test_a_pod_has_the_time_that_its_gateway_takes_to_end(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for kind, least_s in (("no-ray", 5 + 40 + 3), ("kserve", 5 + 40 + 3), ("ray", 5 + 2 * 40 + 10)):
        manifests = deployed(capsys, written(tmp_path, server={"drain_timeout_s": 40}), *KINDS[kind])
        assert min(all_of(manifests, "terminationGracePeriodSeconds")) > least_s
    head, *others = pods(manifests)  # at SIGTERM `ray start` ends all after 30 s, unless it is told another time
    for pod in others:
        (drains_s,) = (each["value"] for each in pod["spec"]["containers"][0]["env"] if "DRAIN_TIMEOUT" in each["name"])
        assert (ray_constants.RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, drains_s) == (30, "90")
    assert "DRAIN_TIMEOUT" not in json.dumps(head)  # it uses up all of it, and serves nothing


def test_pods_are_replaced_when_their_configuration_changes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def told(kind: str, **sections: Any) -> Any:
        return [*all_of(deployed(capsys, written(tmp_path, **sections), *KINDS[kind]), "serving-gateway/configuration")]

    for kind in ("no-ray", "kserve"):
        assert len(told(kind)) == 1
        assert told(kind) == told(kind) != told(kind, server={"drain_timeout_s": 19})


@pytest.mark.parametrize("kind", ["no-ray", "kserve"])
@pytest.mark.parametrize(("processes", "least"), [(3, 3), ("auto", 2)])
def test_pods_are_the_processes_that_listen(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str, processes: int | str, least: int
) -> None:
    elsewhere = {"name": "m", "backends": [{"kind": "triton", "url": "triton:8001", "model": "m"}]}
    manifests = deployed(capsys, written(tmp_path, elsewhere, server={"ingress_replicas": processes}), *KINDS[kind])
    assert manifests["HorizontalPodAutoscaler"]["spec"]["minReplicas"] == least
    assert "ingress_replicas" not in configuration(manifests)["server"]
    assert next(iter(all_of(manifests, "resources")))["requests"] == {"cpu": "1", "memory": "1024Mi"}


def test_ray_puts_each_replica_where_its_pod_was_made_for_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Ray may put a replica that asks for nothing anywhere: so each asks for what only its own pods have."""
    scaled = {"min_replicas": 1, "max_replicas": 5}
    neuron = {"kind": "neuron", "model": "/opt/n", "placement": "replicas", "replicas": 2, "sessions": 2, "surge": False}
    onnx = {"kind": "onnxruntime", "model": "/opt/m.onnx", "threads": 2, "placement": "replicas", "autoscaling": scaled}
    gpu = {"kind": "torch", "name": "gpu", "model": "/opt/m.pt", "device": "cuda"}
    path = written(tmp_path, {"name": "m", "backends": [neuron, onnx, gpu]}, server={"ingress_replicas": 3})
    manifests = deployed(capsys, path, "--models", "image:/opt", "--memory", "2Gi")
    assert [fault for manifest in manifests.values() for fault in faults(manifest)] == []
    spec = manifests["RayService"]["spec"]
    serve = yaml.safe_load(spec["serveConfigV2"])
    ServeDeploySchema.model_validate(serve)
    head, groups = spec["rayClusterConfig"]["headGroupSpec"], spec["rayClusterConfig"]["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    ingress, on_neuron, on_cpu = groups
    assert [group["groupName"] for group in groups] == ["ingress", "m-1-neuron", "m-1-onnxruntime"]
    assert (ingress["replicas"], ingress["rayStartParams"]) == (3, {"num-cpus": "0", "resources": "'{\"gateway_ingress\": 1}'"})
    assert [(group["minReplicas"], group["maxReplicas"]) for group in groups] == [(3, 3), (2, 2), (1, 6)]
    limits = [group["template"]["spec"]["containers"][0]["resources"]["limits"] for group in groups]
    assert (limits[0]["nvidia.com/gpu"], limits[1]["aws.amazon.com/neuroncore"]) == (1, 2)
    assert on_neuron["rayStartParams"] == {"num-cpus": "2", "resources": "'{\"neuron_cores\": 2}'"}
    assert on_cpu["rayStartParams"] == {"num-cpus": "2"}
    held = configuration(manifests)
    assert held["server"]["ingress_resources"] == {"gateway_ingress": 1, "num_gpus": 1}
    assert (held["server"]["ingress_replicas_per_node"], held["server"]["ingress_surge"]) == (1, False)
    assert [backend.get("resources") for backend in held["models"][0]["backends"]] == [
        {"num_cpus": 2, "neuron_cores": 2},
        {"num_cpus": 2},
        None,
    ]
    # The cluster's autoscaler speaks to Kubernetes from the head; nobody else does.
    assert "automountServiceAccountToken" not in head["template"]["spec"]
    assert all(group["template"]["spec"]["automountServiceAccountToken"] is False for group in groups)


def test_rays_autoscaler_knows_a_pod_for_each_replica(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As its reader of KubeRay's clusters takes what they offer, and Serve what replicas ask for."""
    asked = {"my-label": 0.5, "memory": 3 << 30, "num_cpus": 1.5, "num_gpus": 0.5}
    apart = [
        {"kind": "neuron", "model": "/opt/n", "placement": "replicas"},
        {"kind": "synthetic", "placement": "replicas", "resources": asked},
    ]
    embedded = [
        {"kind": "synthetic", "name": "a", "resources": {"special": 1.5, "num_cpus": 3}},
        {"kind": "synthetic", "name": "b", "resources": {"special": 0.2}},
        {"kind": "torch", "name": "c", "model": "/opt/m.pt", "device": "cuda", "resources": {"num_gpus": 0.5}},
    ]
    tensors = {name: [{"name": name, "datatype": "FP32", "shape": [-1, 2]}] for name in ("inputs", "outputs")}
    server = {"ingress_replicas": 2, "ingress_resources": {"front": 0.001, "num_cpus": 1, "memory": 5 << 30}}
    model = {"name": "m", "max_rows": 8, **tensors, "backends": [*apart, *embedded]}
    manifests = deployed(capsys, written(tmp_path, model, server=server), "--models", "image:/opt", "--memory", "2Gi")
    spec = manifests["RayService"]["spec"]
    cluster = {"metadata": {"name": "c", "namespace": "n"}, "spec": spec["rayClusterConfig"]}
    kinds = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    offers = {name: kind["resources"] for name, kind in kinds.items()}
    assert offers == {
        "headgroup": {"CPU": 0, "memory": 4 << 30},
        "ingress": {"CPU": 0, "GPU": 1, "memory": 10 << 30, "gateway_ingress": 1, "front": 1, "special": 4},
        "m-1-neuron": {"CPU": 1, "memory": 2 << 30, "neuron_cores": 1},
        "m-1-synthetic": {"CPU": 2, "GPU": 1, "memory": 3 << 30, "my-label": 1},
    }
    deployments = build_app(build(configuration(manifests)), name="m").deployments
    assert {each.name for each in deployments} == {*offers} - {"headgroup"}
    for each in deployments:
        beside = 2 if each.name == "ingress" else 1  # an upgrade's new one
        wanted = {key: each.ray_actor_options.get(key, 0) for key in ("num_cpus", "num_gpus", "memory")}
        for key, amount in (wanted | each.ray_actor_options["resources"]).items():
            if not key.startswith("node:"):  # of which each node has 1
                assert offers[each.name].get({"num_cpus": "CPU", "num_gpus": "GPU"}.get(key, key), 0) >= beside * amount


def test_pods_that_listen_have_memory_for_an_upgrade_or_the_user_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "m.pt").write_bytes(b"0")
    torch = {"kind": "torch", "model": "m.pt"}
    note = "Note: an upgrade ends ingresses before it starts their successors, so that 2 of 3 answer meanwhile"
    given = ("--memory", "3Gi")
    for backend, server, options, expected in (
        (torch, {}, (), 2 * 1280 + 1024),
        (torch, {}, given, 3072),
        (torch | {"surge": False}, {}, (), 1280 + 1024),
        (torch, {"ingress_surge": False}, (), 1280 + 1024),
        (torch | {"device": "cuda"}, {}, (), 1280 + 1024),
        (torch | {"resources": {"memory": 2 << 30}}, {}, given, 4096),
    ):
        path = written(tmp_path, {"name": "m", "backends": [backend]}, server=server)
        arguments = [*IMAGE, *KINDS["ray"], "--replicas", "3", *options]
        assert main(["deploy", "kubernetes", str(path), *arguments]) == 0
        out, told = capsys.readouterr()
        manifests = {each["kind"]: each for each in yaml.safe_load_all(out)}
        _, ingress = pods(manifests)
        assert ingress["spec"]["containers"][0]["resources"]["limits"]["memory"] == f"{expected}Mi"
        surge = configuration(manifests)["server"]["ingress_surge"]
        assert (note in told) is not surge
        assert surge is (expected in (2 * 1280 + 1024, 3072, 4096))


@pytest.mark.parametrize("name", ["gateway_ingress", "node:__internal_head__"])
def test_names_that_nodes_have_by_themselves_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    told = f"'{name}': is a name that nodes have by themselves: expected another"
    for placement in ("embedded", "replicas"):
        model = {"name": "m", "backends": [{"kind": "synthetic", "placement": placement, "resources": {name: 0.001}}]}
        assert refused(capsys, written(tmp_path, model), *KINDS["ray"]) == f"model 'm': backend synthetic: resources: {told}"
    path = written(tmp_path, server={"ingress_resources": {name: 0.001}})
    assert refused(capsys, path, *KINDS["ray"]) == f"server.ingress_resources: {told}"


def test_a_number_of_ingresses_that_pods_are_not_made_for_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told = refused(capsys, written(tmp_path, server={"ingress_replicas_per_node": 3}), *KINDS["ray"])
    assert told.startswith("server.ingress_replicas_per_node: 3: expected 1 or null, as nodes are made for one:")


def test_pods_that_do_not_listen_get_no_secrets(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    server = {"tls": {"certificate": "c", "key": "k"}, "access": {"keys": "k.yaml", "keys_variable": "KEYS"}}
    apart = {"name": "m", "backends": [{"kind": "synthetic", "placement": "replicas"}]}
    templates = pods(deployed(capsys, written(tmp_path, apart, server=server), *KINDS["ray"], "--service-account", "reader"))
    for pod in templates:
        listens = pod["metadata"]["labels"]["app.kubernetes.io/component"] == "ingress"
        found = [volume["name"] for volume in pod["spec"]["volumes"] if "secret" in volume]
        assert found == (["tls", "keys"] if listens else [])
        assert ("KEYS" in json.dumps(pod)) == listens
        serves = pod["metadata"]["labels"]["app.kubernetes.io/component"] != "head"
        assert pod["spec"].get("serviceAccountName") == ("reader" if serves else None)


def test_nobody_reaches_rays_own_ports(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    policy = deployed(capsys, written(tmp_path), *KINDS["ray"])["NetworkPolicy"]["spec"]
    labels = {"app.kubernetes.io/part-of": "serving-gateway", "app.kubernetes.io/instance": "m"}
    own, others = policy["ingress"]
    assert own == {"from": [{"podSelector": {"matchLabels": labels}}]}
    assert [port["port"] for port in others["ports"]] == [8000, 8001, 8265]  # the operator asks the dashboard
    for key, port in (("http_port", 8080), ("grpc_port", 12000)):
        told = f"server.{key}: {port}: Ray's own on its nodes: expected another, such as 8000, or --no-ray"
        assert refused(capsys, written(tmp_path, server={key: port}), *KINDS["ray"]) == told


def test_kuberay_finds_the_head_and_its_dashboard(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It makes the head's Service of the ports that the head lists, and selects by labels of its own."""
    head, *others = pods(deployed(capsys, written(tmp_path), *KINDS["ray"]))
    ports = {port["name"]: port["containerPort"] for port in head["spec"]["containers"][0]["ports"]}
    assert ports == {"serve": 8000, "grpc": 8001, "gcs-server": 6379, "dashboard": 8265, "client": 10001}
    for pod in (head, *others):
        own = ("ray.io/", "app.kubernetes.io/name", "app.kubernetes.io/created-by")
        assert not [key for key in pod["metadata"]["labels"] if key.startswith(own)]


def test_groups_of_backends_have_names_of_their_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one = {"kind": "synthetic", "placement": "replicas", "resources": {"num_cpus": 0.5, "bob s": 0.5}}
    models = [{"name": "x" * 60 + end, "backends": [{**one, "name": "A b"}, {**one, "name": "a.b"}]} for end in "yz"]
    path = written(tmp_path, *models)
    groups = deployed(capsys, path, *KINDS["ray"])["RayService"]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    plain = "x" * 36
    assert [group["groupName"] for group in groups] == ["ingress", plain, f"{plain}-2", f"{plain}-3", f"{plain}-4"]
    assert shlex.split(groups[0]["rayStartParams"]["resources"]) == ['{"gateway_ingress": 1}']  # as the pod's shell reads it
    assert shlex.split(groups[1]["rayStartParams"]["resources"]) == ['{"bob s": 1}']
    one["resources"] = {"bob's": 1}
    told = refused(capsys, written(tmp_path, {"name": "m", "backends": [one]}), *KINDS["ray"])
    assert told.startswith("""resources: "bob's": expected a name without quotes""")


def test_ray_is_told_its_version() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"ray[serve]=={RAY_VERSION}" in dependencies


def test_the_number_of_pods_is_stated_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Beside an autoscaler, each `kubectl apply` would put it back to what a Deployment states."""
    scaled = deployed(capsys, written(tmp_path), *KINDS["no-ray"])
    assert "replicas" not in scaled["Deployment"]["spec"]
    assert scaled["HorizontalPodAutoscaler"]["spec"]["minReplicas"] == 2
    fixed = deployed(capsys, written(tmp_path), *KINDS["no-ray"], "--max-replicas", "2")
    assert fixed["Deployment"]["spec"]["replicas"] == 2
    assert "HorizontalPodAutoscaler" not in fixed


def test_the_autoscaler_asks_for_what_the_adapter_makes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for options, metric, value in (
        ((), "gateway_busy_share", "700m"),
        (("--requests-per-second", "120.5"), "gateway_requests_per_second", "120500m"),
    ):
        out = tmp_path / metric
        assert (
            main(["deploy", "kubernetes", str(written(tmp_path)), *IMAGE, *KINDS["no-ray"], *options, "--output", str(out)])
            == 0
        )
        capsys.readouterr()
        scaler = yaml.safe_load((out / "horizontalpodautoscaler.yaml").read_text())["spec"]
        rules = yaml.safe_load((out / "prometheus-adapter-rules.yaml").read_text())["rules"]
        asked = scaler["metrics"][0]["pods"]
        assert (asked["metric"]["name"], asked["target"]["averageValue"]) == (metric, value)
        assert [rule["name"]["as"] for rule in rules] == [metric]
    off = written(tmp_path, metrics=False)
    told = "metrics: off: expected on, as the autoscaler reads them; set that, or --max-replicas 2"
    assert refused(capsys, off, *KINDS["no-ray"]) == told
    assert "PodMonitor" not in deployed(capsys, off, *KINDS["no-ray"], "--max-replicas", "2")


@pytest.mark.debian("prometheus")
@pytest.mark.parametrize(
    ("options", "value"),
    # In half of each minute two of the four sessions of p are busy: 2 × 30 / 60 / 4. 600 requests a minute are 10 a second.
    [((), {"p": 0.25, "q": 0}), (("--requests-per-second", "9"), {"p": 10, "q": 0})],
    ids=["busy share", "requests per second"],
)
def test_what_the_adapter_asks_of_prometheus_is_told_of_each_pod(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: tuple[str, ...], value: dict[str, float]
) -> None:
    assert (
        main(["deploy", "kubernetes", str(written(tmp_path)), *IMAGE, *KINDS["no-ray"], *options, "--output", str(tmp_path)])
        == 0
    )
    (rule,) = yaml.safe_load((tmp_path / "prometheus-adapter-rules.yaml").read_text())["rules"]
    query = rule["metricsQuery"].replace("<<.LabelMatchers>>", 'namespace="n",pod=~"p|q"').replace("<<.GroupBy>>", "pod")
    of = 'namespace="n",model="m",version="1"'
    told = {
        **{f'gateway_worker_busy_seconds_total{{{of},backend="{name}",pod="p"}}': "0+30x10" for name in "ab"},
        **{f'gateway_workers{{{of},backend="{name}",pod="{pod}"}}': "2+0x10" for name in "ab" for pod in "pq"},
        f'gateway_worker_busy_seconds_total{{{of},backend="a",pod="q"}}': "7+0x10",
        f'gateway_requests_total{{{of},protocol="rest",code="ok",pod="p"}}': "0+600x10",
        f'gateway_requests_total{{{of},protocol="rest",code="ok",pod="q"}}': "5+0x10",
    }
    expected = [{"labels": f'{{pod="{pod}"}}', "value": each} for pod, each in value.items()]
    test = {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in told.items()],
        "promql_expr_test": [{"expr": query, "eval_time": "5m", "exp_samples": expected}],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"tests": [test]}))
    done = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "test.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


OTHERWISE = (
    *("y", "Y", "n", "N", "yes", "No", "on", "OFF", "true", "False", "null", "Null", "~", "<<", "="),
    *("0", "7", "-7", "+7", "017", "0o17", "-0o17", "0x1F", "0X_1f", "0b11", "-0B1", "1_000", "+_1", "-1_0", "0_x1F"),
    *("1.", ".5", "-.5", "1.5", "1e3", "1E3", "-1e-3", "1.e+3", ".5e3", "1e_3", "9272102816862e99", "0123456789012389"),
    *(".inf", "-.Inf", "+.INF", ".nan", ".NaN", "1:30", "0:30", "190:20:30", "1:30.5"),
    *("2001-01-01", "2001-1-1", "2001-1-1 1:2:3", "2001-12-14T21:59:43.10-05:00", "2001-1-1t1:2:3Z"),
)
ITSELF = ("iris", "yes-man", "nn", "yn", "0.0.0.0", "10.0.0.0/16", "gateway:cpu", "4Gi", "500m", "1e3x", "0xfg", "1-2", "v1")


def test_other_readers_of_yaml_take_no_text_for_something_else() -> None:
    for text in OTHERWISE:
        assert as_yaml({text: [text]}) == f"'{text}':\n- '{text}'\n"
    for text in ITSELF:
        assert as_yaml({text: [text]}) == f"{text}:\n- {text}\n"
    values = {1: [1, -1, 1.5, 1e20, 1e-7, True, None, float("inf")]}
    assert as_yaml(values) == "1:\n- 1\n- -1\n- 1.5\n- 1.0e+20\n- 1.0e-07\n- true\n- null\n- .inf\n"


def test_a_folder_is_what_kustomize_reads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, out = written(tmp_path), tmp_path / "out"
    for kind in ("no-ray", "ray", "kserve"):
        printed = deployed(capsys, path, *KINDS[kind])
        for _ in range(2):  # what stands there is replaced
            assert main(["deploy", "kubernetes", str(path), *IMAGE, *KINDS[kind], "--output", str(out / kind)]) == 0
        names = [Path(line).name for line in capsys.readouterr().out.splitlines()]
        listed = yaml.safe_load((out / kind / "kustomization.yaml").read_text())
        assert {*listed["resources"], "kustomization.yaml"} <= set(names) == {each.name for each in (out / kind).iterdir()}
        assert [yaml.safe_load((out / kind / name).read_text()) for name in listed["resources"]] == [*printed.values()]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, for its kustomize")
@pytest.mark.parametrize("kind", KINDS)
def test_kustomize_builds_it(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    base, overlay = tmp_path / "base", tmp_path / "overlay"
    assert main(["deploy", "kubernetes", str(written(tmp_path)), *IMAGE, *KINDS[kind], "--output", str(base)]) == 0
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text("resources: [../base]\nnamePrefix: mine-\n")
    done = subprocess.run(["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = list(yaml.safe_load_all(done.stdout))
    assert {each["kind"] for each in found} == {
        yaml.safe_load(path.read_text())["kind"] for path in base.glob("[!kp]*.yaml")
    } | {
        "PodDisruptionBudget",
        "PodMonitor",
    }
    assert all(each["metadata"]["name"].startswith("mine-") for each in found)


def test_what_is_written_is_no_part_of_the_models_and_what_lies_beside_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for name, text in {"m/1/model.py": "import helper\n", "m/1/helper.py": "", "m/config.pbtxt": ""}.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    tensors = {name: [{"name": name, "datatype": "FP32", "shape": [-1, 2]}] for name in ("inputs", "outputs")}
    for config, model in ((tmp_path, "out/m/1/model.py"), (out, "m/1/model.py")):
        backend = {"kind": "python", "model": f"{model}:TritonPythonModel"}
        path = written(config, {"name": "m", **tensors, "max_rows": 8, "backends": [backend]})
        asked = ["deploy", "kubernetes", str(path), *IMAGE, *KINDS["no-ray"], "--memory", "1Gi", "--output", str(out / "m")]
        for _ in range(2):
            assert main(asked) == 0
            told = capsys.readouterr().err.splitlines()
            assert told[1:] == ["  m/1/helper.py", "  m/1/model.py", "  m/config.pbtxt"]
        assert (out / "m" / "deployment.yaml").exists()


def test_where_models_are_is_no_variable_of_kubernetes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    place = ("--no-ray", "--models", "s3://bucket/$(HOME)$", "--fetcher", "registry.example.com/aws-cli")
    (pod,) = pods(deployed(capsys, written(tmp_path), *place))
    assert pod["spec"]["initContainers"][0]["args"][-2] == "s3://bucket/$$(HOME)$$"


WRONG = {
    "image": (("--image", "two words", *KINDS["no-ray"]), r"--image: 'two words': expected an image"),
    "models": (("--no-ray", "--models", "nfs:x"), r"--models: nfs:x: expected image:FOLDER, pvc:CLAIM\[/FOLDER\] or s3:"),
    "folder": (("--no-ray", "--models", "image:models"), r"--models: 'models': expected image:FOLDER, an absolute path"),
    "claim": (("--no-ray", "--models", "pvc:My_Claim"), r"--models: 'My_Claim': expected pvc:CLAIM"),
    "above": (("--no-ray", "--models", "pvc:claim/../x"), r"--models: pvc:claim/../x: expected a folder of the claim"),
    "kserve": (("--kserve", "--models", "pvc:x"), r"--models: 'pvc:x': expected a URI that KServe copies"),
    "fetcher": (("--no-ray", "--models", "s3://bucket/x"), r"--fetcher: not given: expected an image that has `aws`"),
    "no fetcher": ((*KINDS["no-ray"], "--fetcher", "x"), r"--fetcher: x: expected none"),
    "name": ((*KINDS["no-ray"], "--name", "My_Model"), r"--name: 'My_Model': expected 1 to 40 of a-z"),
    "namespace": ((*KINDS["no-ray"], "--namespace", "a b"), r"--namespace: 'a b': expected 1 to 63 of a-z"),
    "dots": ((*KINDS["no-ray"], "--namespace", "a.b"), r"--namespace: 'a.b': expected 1 to 63 of a-z, 0-9 and -"),
    "long": ((*KINDS["no-ray"], "--namespace", "a" * 64), r"--namespace: 'a{64}': expected 1 to 63 of"),
    "account": ((*KINDS["no-ray"], "--service-account", "a b"), r"--service-account: 'a b': expected a name of Kubernetes"),
    "replicas": ((*KINDS["no-ray"], "--replicas", "0"), r"--replicas: 0: expected 1 or more"),
    "most": ((*KINDS["no-ray"], "--replicas", "3", "--max-replicas", "2"), r"--max-replicas: 2: expected 3 or more"),
    "rate": ((*KINDS["no-ray"], "--requests-per-second", "nan"), r"--requests-per-second: nan: expected 0.001 to"),
    "too much": ((*KINDS["no-ray"], "--requests-per-second", "2e9"), r"--requests-per-second: 2e\+09: .* to 1000000000$"),
    "bucket": (("--no-ray", "--models", "s3://192.168.0.1/x"), r"--models: 's3://192.168.0.1/x': expected s3://BUCKET"),
    "on ray": ((*KINDS["ray"], "--max-replicas", "9"), r"--max-replicas: 9: expected none without --no-ray or --kserve"),
    "no cores": ((*KINDS["no-ray"], "--cpu", "0.0"), r"--cpu: '0.0': expected cores"),
    "cpu": ((*KINDS["no-ray"], "--cpu", "many"), r"--cpu: 'many': expected cores, such as 4, 0.5 or 500m"),
    "memory": ((*KINDS["no-ray"], "--memory", "4GB"), r"--memory: '4GB': expected an amount such as 512Mi or 4Gi"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_asked_wrongly_is_refused_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path, case: str) -> None:
    options, told = WRONG[case]
    assert re.match(told, refused(capsys, written(tmp_path), *options))


@pytest.mark.parametrize(
    ("server", "told"),
    [
        ({"http_port": None}, "server.http_port: null: expected a port, 1 to 65535; that is where a cluster asks"),
        ({"http_port": 0}, "server.http_port: 0: expected a port, 1 to 65535"),
        ({"grpc_port": 0}, "server.grpc_port: 0: expected a port, 1 to 65535, or null"),
        (
            {"tls": {"certificate": "c", "key": "k", "client_ca": "a"}},
            "server.tls.client_ca: 'a': the cluster's probes show no",
        ),
    ],
    ids=str,
)
def test_what_no_pod_can_serve_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, server: dict[str, Any], told: str
) -> None:
    assert told in refused(capsys, written(tmp_path, server=server), *KINDS["no-ray"])


def test_memory_that_cannot_be_told_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, ROOT / "configs" / "examples" / "iris.yaml", *KINDS["no-ray"])
    assert told == ("--memory: model 'iris': what backend python takes cannot be told here; expected an amount such as 4Gi")
