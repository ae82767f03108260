"""What `gateway deploy ec2 --cluster` writes: `ray up` would take it, and Ray's autoscaler finds each replica its machine."""

import json
import tarfile
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from moto import mock_aws
from ray.autoscaler._private.aws import node_provider
from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.serve._private.build_app import build_app
from ray.serve.schema import ServeDeploySchema

from gateway.app import build
from gateway.cli import main
from gateway.instances.facts import bundled
from tests.deploying.planned_ec2 import IRIS, ROOT, files

LOCKS = str(ROOT / "docker")  # each kind of machine has other libraries

TENSORS = {side: [{"name": side, "datatype": "FP32", "shape": [-1, 2]}] for side in ("inputs", "outputs")}
L4 = {"num_cpus": 2, "num_gpus": 1, "accelerator_type:L4": 0.001}
UNLIKE: dict[str, Any] = {
    "name": "m",
    "max_rows": 8,
    **TENSORS,
    "backends": [
        {"kind": "synthetic", "sessions": 2},
        {"kind": "synthetic", "name": "l4", "placement": "replicas", "resources": L4,
         "autoscaling": {"min_replicas": 0, "max_replicas": 3}},
        {"kind": "synthetic", "name": "inf2", "placement": "replicas", "replicas": 2, "surge": False,
         "resources": {"num_cpus": 2, "neuron_cores": 2}},
    ],
}  # fmt: skip
PLACE = ("--region", "us-east-1", "--subnet", "subnet-0123456789abcdef0", "--security-group", "sg-0123456789abcdef0")


def config(tmp_path: Path, *models: dict[str, Any], **sections: Any) -> Path:
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump({"models": [*models] or [UNLIKE], **sections}))
    return path


def written(tmp_path: Path, path: Path, *options: str) -> dict[str, Any]:
    out = tmp_path / "out"
    asked = [*PLACE, *files(tmp_path), "--lock", LOCKS, "--cluster", str(out), *options]
    assert main(["deploy", "ec2", str(path), *asked]) == 0
    found: dict[str, Any] = yaml.safe_load((out / "cluster.yaml").read_text())
    return found


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """configs/examples/fleet.yaml, beside what stands for its artifacts."""
    path = tmp_path / "configs" / "examples" / "fleet.yaml"
    models = tmp_path / "models"
    for folder in (path.parent, models / "minilm-inf2"):
        folder.mkdir(parents=True)
    (models / "minilm.onnx").write_bytes(b"\x08\x0a\x12\x07pytorch")
    (models / "minilm-inf2" / "manifest.json").write_text("{}")
    path.write_bytes((ROOT / "configs" / "examples" / "fleet.yaml").read_bytes())
    return path


def test_each_kind_of_machine_installs_what_its_own_backends_need(tmp_path: Path, fleet: Path) -> None:
    kinds = written(tmp_path, fleet, "--memory", "4Gi")["available_node_types"]
    assert [*kinds] == ["head", "minilm-1-neuron-spot", "minilm-1-neuron-on-demand"]
    for device in ("cpu", "neuron"):
        name = f"requirements-{device}.lock"
        assert (tmp_path / "out" / "gateway" / name).read_bytes() == (ROOT / "docker" / name).read_bytes()


def test_a_lock_that_lacks_what_its_machines_run_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, fleet: Path
) -> None:
    locks = tmp_path / "locks"
    locks.mkdir()
    for device in ("cpu", "neuron"):
        (locks / f"requirements-{device}.lock").write_text("tritonclient==2.73.0 --hash=sha256:00\n")
    asked = [*PLACE, *files(tmp_path), "--lock", str(locks), "--memory", "4Gi", "--cluster", str(tmp_path / "out")]
    assert main(["deploy", "ec2", str(fleet), *asked]) == 2
    assert capsys.readouterr().err == (
        f"--lock: {locks}/requirements-cpu.lock: installs no onnxruntime: expected it, for the backends of kind onnxruntime:"
        " docker/locks.sh makes one of your own\n"
    )


def prepared(cluster: dict[str, Any]) -> dict[str, Any]:
    """As `ray up` has it before it asks AWS."""
    found: dict[str, Any] = prepare_config(cluster)
    return found


def test_rays_own_schema_takes_it_and_every_file_that_it_names_is_there(tmp_path: Path) -> None:
    cluster = written(tmp_path, config(tmp_path))
    validate_config(prepared(cluster))
    with pytest.raises(Exception, match="'two' is not of type"):
        validate_config(
            prepared(cluster | {"available_node_types": {"head": {"resources": {"CPU": "two"}, "node_config": {}}}})
        )
    (folder,) = (Path(here) for there, here in cluster["file_mounts"].items() if there == "/home/ubuntu/gateway")
    commands = [*cluster["head_setup_commands"], *cluster["head_start_ray_commands"]]
    commands += [line for kind in cluster["available_node_types"].values() for line in kind["worker_setup_commands"]]
    named = {word.partition("/home/ubuntu/gateway/")[2].rstrip(";") for line in commands for word in line.split()} - {""}
    assert {name for name in named if not name.startswith("environment/")} <= {file.name for file in folder.iterdir()}
    for settings in folder.glob("settings-*.json"):
        told = json.loads(settings.read_text())
        assert {told["package"], told["wheel"], *told["locks"]} <= {file.name for file in folder.iterdir()}
    ServeDeploySchema.model_validate(yaml.safe_load((folder / "serve.yaml").read_text()))


def test_what_is_deployed_names_files_of_the_package_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here, elsewhere = tmp_path / "here and", tmp_path / "elsewhere"
    code = here / "out" / "gateway"  # where it is written to as well
    for path in (code / "m/1/model.py", code / "m/config.pbtxt", code / "m/1/helper.py", elsewhere / "absolute.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import helper")
    (here / "m.onnx").write_bytes(b"\x08\x0a\x3a\x00")  # a version, and a graph
    backends = [
        {"kind": "python", "name": "t", "model": "out/gateway/m/1/model.py:TritonPythonModel", "placement": "replicas"},
        {"kind": "python", "name": "a", "model": f"{elsewhere}/absolute.py:A", "placement": "replicas",
         "class_options": {"all": "../here and/out"}},
        {"kind": "tensorrt", "model": "m.onnx", "engines": "engines", "placement": "replicas"},
    ]  # fmt: skip
    path = config(here, {"name": "m", "max_rows": 8, **TENSORS, "backends": backends})
    locks = tmp_path / "locks"
    locks.mkdir()
    for device in ("cpu", "cuda"):
        (locks / f"requirements-{device}.lock").write_text("tensorrt==10.13.0 --hash=sha256:00\n")
    for _ in range(2):
        written(here, path, "--memory", "1Gi", "--lock", str(locks))
    deployed = yaml.safe_load((code / "serve.yaml").read_text())["applications"][0]["args"]
    named = [backend["model"].partition(":")[0] for backend in deployed["models"][0]["backends"]]
    with tarfile.open(code / "model.tar.gz") as archive:
        packed = archive.getnames()
    own = [f"here and/out/gateway/m/{name}" for name in ("1/helper.py", "1/model.py", "config.pbtxt")]
    assert packed == ["gateway.yaml", "elsewhere/absolute.py", "here and/m.onnx", *own, "SHA256SUMS"]
    told = capsys.readouterr().err
    assert f"&& ray up '{here}/out/cluster.yaml'` makes it" in told
    assert "model.tar.gz: 0.0 MiB, 7 files\n  gateway.yaml\n" in told
    assert {name.removeprefix("/home/ubuntu/gateway/model/") for name in named} <= {*packed}
    assert deployed["models"][0]["backends"][2]["engines"] == "/tmp/engines"  # none was built yet


def test_each_backend_gets_the_cheapest_machine_that_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = written(tmp_path, config(tmp_path))["available_node_types"]
    types = {name: kind["node_config"]["InstanceType"] for name, kind in kinds.items()}
    assert types["m-1-l4-spot"] == types["m-1-l4-on-demand"] == "g6.xlarge"  # g4dn.xlarge is cheaper, and has a T4
    assert types["m-1-inf2-spot"] == "inf2.xlarge"
    assert "A month, on demand: " in capsys.readouterr().out
    kinds = written(tmp_path, config(tmp_path), "--node", "m-1-l4=g6.2xlarge", "--node", "ingress=c7i.4xlarge")[
        "available_node_types"
    ]
    assert kinds["head"]["node_config"]["InstanceType"] == "c7i.4xlarge"
    assert kinds["m-1-l4-spot"]["node_config"]["InstanceType"] == "g6.2xlarge"


def test_the_head_has_what_an_ingress_asks_for(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"\x08\x0a\x3a\x00")  # a version, and a graph
    shared = [{"kind": "onnxruntime", "name": name, "model": "m.onnx", "device": "cuda"} for name in "ab"]
    model = UNLIKE | {"backends": [*shared, UNLIKE["backends"][-1]]}
    cluster = written(tmp_path, config(tmp_path, model, server={"ingress_resources": {"front": 0.5, "num_cpus": 1}}))
    has = {"CPU": 0, "gateway_ingress": 1, "GPU": 1, "front": 1}
    assert cluster["available_node_types"]["head"]["resources"] == has
    (held,) = yaml.safe_load((tmp_path / "out" / "gateway" / "serve.yaml").read_text())["applications"]
    assert held["args"]["server"]["ingress_resources"] == {"front": 0.5, "num_gpus": 1, "gateway_ingress": 1}
    assert [backend.get("resources") for backend in held["args"]["models"][0]["backends"][:2]] == [None, None]


def test_nodes_are_closed_as_one_machine_is(tmp_path: Path) -> None:
    for kind in written(tmp_path, config(tmp_path))["available_node_types"].values():
        node = kind["node_config"]
        assert node["SecurityGroupIds"] == ["sg-0123456789abcdef0"]  # else Ray makes one that opens port 22 to the world
        assert node["MetadataOptions"]["HttpTokens"] == "required"
        assert [volume["Ebs"]["Encrypted"] for volume in node["BlockDeviceMappings"]] == [True]


@pytest.mark.parametrize("port", [80, 8000])
def test_nodes_let_the_gateway_listen_where_it_is_to(tmp_path: Path, port: int) -> None:
    commands = written(tmp_path, config(tmp_path, server={"http_port": port}))["initialization_commands"]
    assert ("sudo sysctl -q net.ipv4.ip_unprivileged_port_start=0" in commands) is (port < 1024)


def launched(cluster: dict[str, Any], request: dict[str, float], replicas: int = 1, **availabilities: float) -> dict[str, int]:
    """Nodes that Ray's autoscaler would start for replicas' requests. availabilities: 0.0: EC2 has just not given one."""
    types = AutoscalingConfig(prepared(cluster), skip_content_hash=True).get_node_type_configs()
    asked = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=types,
        max_num_nodes=cluster["max_workers"],
        resource_requests=ResourceRequestUtil.group_by_count([ResourceRequestUtil.make(request)] * replicas),
        recoverable_resource_availabilities={name.replace("_", "-"): value for name, value in availabilities.items()},
    )
    reply = ResourceDemandScheduler().schedule(asked)
    assert not reply.infeasible_resource_requests
    return {each.instance_type: each.count for each in reply.to_launch}


def test_spot_is_asked_for_first_and_then_what_is_there(tmp_path: Path) -> None:
    cluster = written(tmp_path, config(tmp_path))
    gpu = {"CPU": 2, "GPU": 1, "accelerator_type:L4": 0.001}
    assert launched(cluster, gpu) == {"m-1-l4-spot": 1}
    assert launched(cluster, gpu, m_1_l4_spot=0.0) == {"m-1-l4-on-demand": 1}
    assert launched(cluster, {"CPU": 2, "neuron_cores": 2}) == {"m-1-inf2-spot": 1}
    assert launched(cluster, {"CPU": 2, "neuron_cores": 2}, m_1_inf2_spot=0.0) == {"m-1-inf2-on-demand": 1}


def test_each_ingress_gets_a_machine_of_its_own(tmp_path: Path) -> None:
    cluster = written(tmp_path, config(tmp_path, server={"ingress_replicas": 3}))
    (held,) = yaml.safe_load((tmp_path / "out" / "gateway" / "serve.yaml").read_text())["applications"]
    (asked,) = (each for each in build_app(build(held["args"]), name="m").deployments if each.name == "ingress")
    assert launched(cluster, asked.ray_actor_options["resources"], 2) == {"ingress": 2}


def as_aws_lists(name: str) -> dict[str, Any]:
    """An instance type, as far as Ray looks at it."""
    there = bundled().instances[name]
    found: dict[str, Any] = {
        "InstanceType": name,
        "VCpuInfo": {"DefaultVCpus": there.vcpu},
        "MemoryInfo": {"SizeInMiB": there.memory_gib * 1024},
    }
    if there.accelerator is not None and there.accelerator.vendor == "nvidia":
        gpus = {"Manufacturer": "NVIDIA", "Name": there.accelerator.name.upper(), "Count": int(there.accelerator.count)}
        found["GpuInfo"] = {"Gpus": [gpus]}
    return found


@pytest.mark.slow
def test_rays_own_preparation_for_aws_changes_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On moto, whose list of instance types lacks some, and takes seconds."""
    for name, value in (("HOME", str(tmp_path)), ("AWS_ACCESS_KEY_ID", "x"), ("AWS_SECRET_ACCESS_KEY", "x")):
        monkeypatch.setenv(name, value)
    listed = [as_aws_lists(name) for name in bundled().instances]
    monkeypatch.setattr(node_provider, "list_ec2_instances", lambda *_: listed)
    with mock_aws():
        ec2 = boto3.client("ec2", "us-east-1")
        (subnet, *_) = ec2.describe_subnets(Filters=[{"Name": "default-for-az", "Values": ["true"]}])["Subnets"]
        group = ec2.create_security_group(GroupName="a", Description="a", VpcId=subnet["VpcId"])["GroupId"]
        cluster = written(tmp_path, config(tmp_path), "--instance-profile", "mine")
        for kind in cluster["available_node_types"].values():
            kind["node_config"] |= {"SubnetIds": [subnet["SubnetId"]], "SecurityGroupIds": [group]}
        filled = AWSNodeProvider.fillout_available_node_types_resources(prepared(cluster))
        found = AWSNodeProvider.bootstrap_config(filled)
        validate_config({key: value for key, value in found.items() if key != "head_node"})
        for name, kind in cluster["available_node_types"].items():
            node = found["available_node_types"][name]
            assert kind["resources"].items() <= node["resources"].items()
            assert {key: node["node_config"][key] for key in kind["node_config"]} == kind["node_config"]
        assert ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["IpPermissions"] == []


@pytest.mark.parametrize(
    ("options", "sections", "expected"),
    [
        (("--allow", "10.0.0.0/8"), {}, "--allow: ['10.0.0.0/8']: expected none with --cluster"),
        (("--yes",), {}, "--yes: True: expected none with --cluster"),
        (("--node", "x=g6.xlarge"), {}, "--node: x: expected one of ingress, m-1-l4, m-1-inf2"),
        (("--node", "m-1-l4=g4dn.xlarge"), {}, "--node: m-1-l4=g4dn.xlarge: expected a type of the catalogue with 2 cores"),
        (
            ("--node", "ingress=c7i.large"),
            {},
            "ingress=c7i.large: expected a type of the catalogue with 4 cores of amd64, 7 GiB (for two ingresses, which an"
            " upgrade runs side by side; with server.ingress_surge: false for one)",
        ),
        ((), {"server": {"ingress_replicas_per_node": 2}}, "server.ingress_replicas_per_node: 2: expected 1 or null"),
        ((), {"server": {"http_port": 10500}}, "server.http_port: 10500: Ray's own on its nodes"),
        ((), {"server": {"ingress_resources": {"node:x": 1}}}, "server.ingress_resources: 'node:x': is a name that nodes have"),
        ((), {"server": {"access": {"keys": "k.yaml"}}}, "server.access: is not brought onto a cluster"),
    ],
    ids=str,
)
def test_what_could_not_work_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: tuple[str, ...], sections: dict[str, Any], expected: str
) -> None:
    asked = [*PLACE, *files(tmp_path), "--cluster", str(tmp_path / "out"), *options]
    assert main(["deploy", "ec2", str(config(tmp_path, **sections)), *asked]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written(tmp_path, config(tmp_path))
    (tmp_path / "file").touch()
    asked = [*PLACE, *files(tmp_path), "--lock", LOCKS, "--cluster", str(tmp_path / "file")]
    assert main(["deploy", "ec2", str(config(tmp_path)), *asked]) == 2
    assert (
        f"--cluster: {tmp_path}/file/gateway: cannot be written: Not a directory: expected a folder, new or not, whose"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "name", ["gateway/requirements-cpu.lock", "gateway/serve.yaml", "gateway/model.tar.gz", "cluster.yaml"]
)
def test_a_file_that_cannot_be_written_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    written(tmp_path, config(tmp_path))
    there = tmp_path / "out" / name
    there.unlink()
    there.mkdir()
    asked = [*PLACE, *files(tmp_path), "--lock", LOCKS, "--cluster", str(tmp_path / "out")]
    assert main(["deploy", "ec2", str(config(tmp_path)), *asked]) == 2
    assert f"--cluster: {there}: cannot be written: Is a directory" in capsys.readouterr().err


def test_what_one_machine_serves_needs_no_cluster(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["deploy", "ec2", str(IRIS), *PLACE, *files(tmp_path), "--cluster", str(tmp_path / "out")]) == 2
    assert "--cluster: the configuration needs no Ray" in capsys.readouterr().err
