"""What `gateway deploy ec2` plans: AWS would take each call, nobody reaches the machine unasked, and no secret is told."""

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.cli import main
from gateway.deploying import machine_setup
from gateway.deploying.calls import Call
from gateway.deploying.ec2 import IMAGES, partition
from gateway.deploying.on_machine import moved
from gateway.deploying.packing import packed
from gateway.documents.reader import read
from tests.deploying import service_models
from tests.deploying.fake_metadata import fake_aws
from tests.deploying.made_configs import SYNTHETIC
from tests.deploying.planned_ec2 import BUCKET, IRIS, WHEEL, command, files, plan, planned

NEURON = {"kind": "synthetic", "resources": {"neuron_cores": 1}}
GPU = {"kind": "synthetic", "resources": {"num_gpus": 1}}
LOCKED = {
    "server": {
        "http_port": 8443,
        "tls": {"certificate": "c.pem", "key": "k.pem"},
        "access": {"keys": "keys.yaml"},
        "state_dir": "state",
        "run_dir": "run",
    }
}
SECRETS = (
    "--secret", "tls.crt=ssm:/of/mine/crt", "--secret", "tls.key=secretsmanager:/of/mine/key",
    "--secret", "keys.yaml=secretsmanager:arn:aws:secretsmanager:us-east-1:111122223333:secret:keys-AbCdEf",
)  # fmt: skip


def written(tmp_path: Path, *backends: dict[str, Any], **sections: Any) -> Path:
    path = tmp_path / "x.yaml"
    model = SYNTHETIC | ({"backends": [*backends]} if backends else {})
    path.write_text(yaml.safe_dump({"models": [model], **sections}))
    return path


def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, *options: str, config: Path = IRIS) -> str:
    assert main(command(tmp_path, *options, config=config)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.mark.parametrize("options", [(), ("--allow", "10.0.0.0/16", "--spot", "--volume-gib", "40")], ids=["closed", "open"])
def test_every_call_is_what_aws_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path, options: tuple[str, ...]) -> None:
    called = {}
    for call in plan(capsys, tmp_path, *options):
        ((name, asked),) = call.items()
        called[name] = asked
        service, _, operation = name.partition(".")
        if name == "s3.put_object":
            asked["Body"] = b""
        assert service_models.faults(Call(service, operation, asked, "")) == []
    assert ("ec2.authorize_security_group_ingress" in called) is bool(options)
    assert ("InstanceMarketOptions" in called["ec2.run_instances"]) is bool(options)


def test_nobody_reaches_the_machine_and_its_disk_is_encrypted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    calls = planned(capsys, tmp_path)
    assert not {name for name in calls if "authorize" in name}
    started = calls["ec2.run_instances"]
    assert "KeyName" not in started
    assert started["MetadataOptions"]["HttpTokens"] == "required"
    assert [each["Ebs"]["Encrypted"] for each in started["BlockDeviceMappings"]] == [True]
    assert "serve /opt/gateway/model --host 127.0.0.1\n" in started["UserData"]
    tagged = {each["ResourceType"]: {tag["Key"]: tag["Value"] for tag in each["Tags"]} for each in started["TagSpecifications"]}
    assert {kind: tags["serving-gateway:name"] for kind, tags in tagged.items()} == dict.fromkeys(
        ("instance", "volume", "network-interface"), "iris"
    )


def test_allow_opens_the_gateways_ports_to_that_network_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = written(tmp_path, server={"http_port": 8080, "grpc_port": 9000})
    calls = planned(capsys, tmp_path, "--allow", "10.0.0.0/16", config=config)
    rules = calls["ec2.authorize_security_group_ingress"]["IpPermissions"]
    assert {(rule["FromPort"], rule["ToPort"]) for rule in rules} == {(8080, 8080), (9000, 9000)}
    assert [rule["IpRanges"] for rule in rules] == [[{"CidrIp": "10.0.0.0/16"}]] * 2
    assert "serve /opt/gateway/model --host 0.0.0.0\n" in calls["ec2.run_instances"]["UserData"]
    for world in ("0.0.0.0/0", "0.0.0.0/1"):
        assert f"--allow: {world}: open to the world" in refused(capsys, tmp_path, "--allow", world)
    assert "expected a network of IPv4" in refused(capsys, tmp_path, "--allow", "10.0.0.1/16")
    nowhere = written(tmp_path, server={"http_port": 0, "grpc_port": None})
    assert "server.http_port: 0: no port that could be opened" in refused(
        capsys, tmp_path, "--allow", "10.0.0.0/16", config=nowhere
    )


@pytest.mark.parametrize(("port", "may"), [(443, "CAP_NET_BIND_SERVICE"), (1024, "")])
def test_the_service_may_listen_below_1024_where_it_is_to(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, port: int, may: str
) -> None:
    config = written(tmp_path, server={"http_port": None, "grpc_port": port})
    told = planned(capsys, tmp_path, "--allow", "10.0.0.0/16", config=config)["ec2.run_instances"]["UserData"]
    assert f"CapabilityBoundingSet={may}\n" in told
    assert f"AmbientCapabilities={may}\n" in told


def test_the_role_reads_what_the_machine_runs_and_nothing_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = written(tmp_path, **LOCKED)
    calls = planned(capsys, tmp_path, *SECRETS, config=config)
    statements = json.loads(calls["iam.put_role_policy"]["PolicyDocument"])["Statement"]
    allowed = {each["Action"]: each["Resource"] for each in statements}
    assert set(allowed) == {"s3:GetObject", "ssm:GetParameter", "secretsmanager:GetSecretValue"}
    assert allowed["ssm:GetParameter"] == ["arn:aws:ssm:us-east-1:*:parameter/of/mine/crt"]
    assert allowed["secretsmanager:GetSecretValue"] == [
        "arn:aws:secretsmanager:us-east-1:*:secret:/of/mine/key-??????",
        "arn:aws:secretsmanager:us-east-1:111122223333:secret:keys-AbCdEf",
    ]
    assert len(allowed["s3:GetObject"]) == 3
    assert all(arn.startswith(f"arn:aws:s3:::{BUCKET}/serving-gateway-ec2/m/") for arn in allowed["s3:GetObject"])
    assert main(command(tmp_path, *SECRETS, "--instance-profile", "mine", config=config)) == 0
    told = capsys.readouterr().err
    assert "Note: the role in mine must be allowed to open sessions (AmazonSSMManagedInstanceCore), and this:\n" in told
    assert calls["iam.put_role_policy"]["PolicyDocument"] in told.splitlines()


def test_no_secret_is_told_and_the_service_finds_each(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("c.pem", "k.pem", "keys.yaml"):
        (tmp_path / name).write_text("SECRET")
    config = written(tmp_path, **LOCKED)
    text = planned(capsys, tmp_path, *SECRETS, config=config)["ec2.run_instances"]["UserData"]
    assert "SECRET" not in text
    on_machine = yaml.safe_load(packed(moved(read(str(config)), "c7i.large")).configuration)["server"]
    named = {*on_machine["tls"].values(), on_machine["access"]["keys"]}
    loaded = {line.split(":")[0] for line in text.split("LoadCredential=")[1:]}
    assert named == {f"/run/credentials/gateway.service/{name}" for name in loaded}
    assert on_machine["state_dir"] == "/var/lib/gateway/state"
    assert on_machine["instance_type"] == "c7i.large"
    assert "run_dir" not in on_machine
    told = refused(capsys, tmp_path, *SECRETS[:-2], "--secret", "other=ssm:x", config=config)
    assert "--secret: keys.yaml: not given: expected keys.yaml=secretsmanager:NAME" in told
    assert "--secret: other: expected one of tls.crt, tls.key, keys.yaml" in told
    assert "expected NAME=secretsmanager:NAME" in refused(capsys, tmp_path, "--secret", "tls.crt=SECRET", config=config)
    by_variable = written(tmp_path, server={"access": {"keys_variable": "KEYS"}})
    assert "server.access.keys_variable: 'KEYS': a variable that the service does not have" in refused(
        capsys, tmp_path, config=by_variable
    )


def test_arns_are_those_of_the_regions_partition() -> None:
    regions = (
        "us-east-1",
        "cn-north-1",
        "us-gov-west-1",
        "us-iso-west-1",
        "us-isob-east-1",
        "eu-isoe-west-1",
        "eusc-de-east-1",
    )
    found = [partition(region) for region in regions]
    assert found == ["aws", "aws-cn", "aws-us-gov", "aws-iso", "aws-iso-b", "aws-iso-e", "aws-eusc"]


def test_an_engine_is_kept_where_the_service_may_write(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"\x08\x0a\x3a\x00")  # a version, and a graph
    backends = [{"kind": "tensorrt", "model": "m.onnx", **more} for more in ({}, {"name": "b", "engines": "/mnt/engines"})]
    on_machine = yaml.safe_load(packed(moved(read(str(written(tmp_path, *backends))), "g6.xlarge")).configuration)
    kept = [backend["engines"] for backend in on_machine["models"][0]["backends"]]
    assert kept == ["/var/lib/gateway/engines", "/mnt/engines"]


@pytest.mark.parametrize(
    ("backend", "instance_type", "image"),
    [
        ({"kind": "synthetic"}, "c7i.large", ("cpu", "amd64")),
        ({"kind": "synthetic"}, "c7g.large", ("cpu", "arm64")),
        (GPU, "g6.xlarge", ("cuda", "amd64")),
        (GPU, "g5g.xlarge", ("cuda", "arm64")),
        (NEURON, "inf2.xlarge", ("neuron", "amd64")),
    ],
    ids=str,
)
def test_the_image_is_the_newest_for_the_machine(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, backend: dict[str, Any], instance_type: str, image: Any
) -> None:
    options = ("--instance-type", instance_type)
    started = planned(capsys, tmp_path, *options, config=written(tmp_path, backend))["ec2.run_instances"]
    assert started["ImageId"] == f"resolve:ssm:{IMAGES[image]}"
    settings = started["UserData"]
    assert ("aws_neuronx_venv" in settings) is (image[0] == "neuron")


def test_what_is_missing_is_told_at_once_with_where_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "ec2", str(IRIS)]) == 2
    told = capsys.readouterr().err
    for flag, where in (
        ("--region", "us-east-1"),
        ("--instance-type", "`loadtest prices list`"),
        ("--subnet", "`aws ec2 describe-subnets`"),
        ("--bucket", "`aws s3 mb s3://NAME"),
        ("--wheel", "`pip wheel --no-deps .`"),
        ("--lock", "docker/requirements-cpu.lock"),
    ):
        (line,) = (line for line in told.splitlines() if line.startswith(f"{flag}: not given: expected "))
        assert where in line


def test_a_lock_has_what_the_wheel_requires_and_its_hash(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files(tmp_path)
    required = ("ray[serve]==2.60.0", "ml_dtypes>=0.5", "orjson", "torch>=2.13; extra == 'torch'")
    metadata = "".join(f"Requires-Dist: {each}\n" for each in required)
    with zipfile.ZipFile(tmp_path / WHEEL, "w") as archive:
        archive.writestr("serving_gateway-0.1.0.dist-info/METADATA", metadata)
    lock = tmp_path / "mine.lock"
    lock.write_text("# orjson==1\nray==2.60.0 \\\n    --hash=sha256:00\nml-dtypes==0.5.4\n")
    told = refused(capsys, tmp_path, "--lock", str(lock))
    assert "--lock: installs no orjson: expected what the gateway's wheel requires: " in told
    assert "--lock: names libraries without their hashes: expected --hash=sha256:… of each: " in told
    assert len(told.splitlines()) == 2


def test_an_empty_wheel_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / WHEEL).touch()
    assert f"--wheel: {tmp_path / WHEEL}: expected the gateway's wheel: `pip wheel" in refused(capsys, tmp_path)


@pytest.mark.parametrize(
    ("backend", "options", "expected"),
    [
        (GPU, (), "--instance-type: c7i.large has no accelerator: expected an NVIDIA GPU"),
        (NEURON, ("--instance-type", "inf1.xlarge"), "expected Inferentia2 or Trainium"),
        ({"kind": "synthetic"}, ("--instance-type", "c7i.larg"), "expected a type of the catalogue, such as c7i.large"),
        (
            {"kind": "synthetic"},
            ("--memory", "64Gi"),
            "c7i.large has 4 GiB: expected 64 GiB: as --memory says: choose a larger type\n",
        ),
        ({"kind": "synthetic"}, ("--volume-gib", "8"), "--volume-gib: 8: expected 30 or more"),
        ({"kind": "synthetic"}, ("--node", "a=b"), "--node: a=b: expected none without --cluster: leave it out"),
        ({"kind": "synthetic"}, ("--security-group", "sg-1"), "--security-group: sg-1: expected none without --cluster"),
        ({"kind": "synthetic"}, ("--name", "No"), "--name: 'No': expected 1 to 40 of a-z"),
        ({"kind": "torch", "model": "m.pt"}, (), "--lock: installs no torch: expected it, for the backends of kind torch"),
    ],
    ids=str,
)
def test_what_could_not_work_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, backend: dict[str, Any], options: tuple[str, ...], expected: str
) -> None:
    assert expected in refused(capsys, tmp_path, *options, config=written(tmp_path, backend))


def test_all_processes_that_listen_on_the_machine_are_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    elsewhere = {"kind": "triton", "url": "triton:8001", "model": "m"}
    several = written(tmp_path, elsewhere, server={"ingress_replicas": 8})
    assert "c7i.large has 4 GiB: expected 8 GiB" in refused(capsys, tmp_path, config=several)
    # One for two of its 16 cores, beside 28 replicas.
    replicas = {"kind": "synthetic", "placement": "replicas", "replicas": 28}
    by_cores = written(tmp_path, replicas, server={"ingress_replicas": "auto"})
    told = refused(capsys, tmp_path, "--instance-type", "c7i.4xlarge", config=by_cores)
    assert "c7i.4xlarge has 32 GiB: expected 36 GiB" in told


def test_the_price_of_a_month_has_its_source_and_its_date(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(command(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "# Price of c7i.large: 0.08925 USD an hour each. A month: 65.15 USD with 1 instance." in out
    assert "#   Source: aws/karpenter-provider-aws@1d927085d" in out
    assert "2026-07-20" in out


def test_a_file_that_was_replaced_in_the_bucket_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_setup, "WAIT_S", 0)
    with fake_aws({f"{BUCKET}/a key/+": b"other"}) as aws:
        for name, value in aws.variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit, match=r"SHA-256 \w+: expected 00"):
            machine_setup.fetch(BUCKET, "a key/+", "00", str(tmp_path / "file"), "us-east-1")
        aws.refuse = 3  # the role is new
        found = hashlib.sha256(b"other").hexdigest()
        machine_setup.fetch(BUCKET, "a key/+", found, str(tmp_path / "file"), "us-east-1")
        assert aws.refuse == 0
        aws.refuse = 99
        with pytest.raises(SystemExit, match="403 the role is not known here yet"):
            machine_setup.fetch(BUCKET, "a key/+", found, str(tmp_path / "file"), "us-east-1")


def test_what_was_cut_on_its_way_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_setup, "WAIT_S", 0)
    body = b"a model " * 1000
    with fake_aws({f"{BUCKET}/model.tar.gz": body}) as aws:
        for name, value in aws.variables.items():
            monkeypatch.setenv(name, value)
        aws.secrets = {"secretsmanager:of/mine": "a secret"}
        aws.cut = 2
        found = hashlib.sha256(body).hexdigest()
        machine_setup.fetch(BUCKET, "model.tar.gz", found, str(tmp_path / "file"), "us-east-1")
        assert (tmp_path / "file").read_bytes() == body
        aws.cut = 2
        assert machine_setup.secret("secretsmanager:of/mine", "us-east-1") == b"a secret"
        aws.cut = 99
        with pytest.raises(SystemExit, match=r"model\.tar\.gz: ConnectionError: it ended 4000 bytes early"):
            machine_setup.fetch(BUCKET, "model.tar.gz", found, str(tmp_path / "file"), "us-east-1")
        assert aws.cut == 99 - machine_setup.TRIES
