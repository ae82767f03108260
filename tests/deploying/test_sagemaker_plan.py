"""`gateway deploy sagemaker` without --yes: calls that AWS would take, in order, and what is refused before any."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.cli import main
from gateway.commands import deploy_sagemaker
from gateway.deploying.machine_data import Sent
from gateway.deploying.packing import packed
from gateway.deploying.sagemaker import Hosting, PackedModel, creation, scalable
from gateway.deploying.sagemaker_standing import Deployed, StandingAlarm, StandingScale
from gateway.deploying.sagemaker_update import update
from gateway.deploying.sagemaker_ways import Asynchronous, BatchTransform, Instances, RealTime, Serverless, Way
from gateway.documents.reader import Document
from loadtest.reports.recommendation import to_json
from tests.deploying import planned_ec2
from tests.deploying.made_configs import SYNTHETIC, written
from tests.deploying.service_models import faults
from tests.loadtest.examples import example_recommendation

ROOT = Path(__file__).parents[2]
IRIS = ROOT / "configs" / "examples" / "iris.yaml"
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/gateway:cpu"
ROLE = "arn:aws:iam::123456789012:role/service-role/Gateway"
PLACE = ("--image", IMAGE, "--role-arn", ROLE, "--bucket", "my-models")
HOSTING = Hosting(
    name="iris",
    region="us-east-1",
    image=IMAGE,
    role_arn=ROLE,
    package=PackedModel(Path("model.tar.gz"), 1 << 20, "ab" * 32, "my-models"),
    way=RealTime(Instances(("ml.c7i.large",), 1, 4), 6000.0),
)
ONE = Instances(("ml.m5.large",), 1, 1)
WAYS: dict[str, Way] = {
    "one type": RealTime(Instances(("ml.c7i.large",), 1, 1)),
    "scaled": RealTime(Instances(("ml.c7i.large",), 2, 4), 1234.56),
    "five types": RealTime(
        Instances(tuple(f"ml.{family}.xlarge" for family in ("c7i", "c6i", "m7i", "m6i", "c5")), 1, 9), 10.0
    ),
    "gpu": RealTime(Instances(("ml.g6.xlarge",), 1, 1, "al2023-ami-sagemaker-inference-gpu-4-1")),
    "asynchronous": Asynchronous(ONE, "s3://my-models/answers", 64),
    "asynchronous, scaled": Asynchronous(Instances(("ml.m5.large", "ml.m6i.large"), 1, 4), "s3://b-1/a", 1000, 900.0),
    "serverless": Serverless(6144, 200),
    "csv": BatchTransform(ONE, "s3://my-models/in/", "s3://my-models/out", "text/csv", "2026-11-24T04:00:00+00:00"),
    "json": BatchTransform(ONE, "s3://my-models/in/", "s3://my-models/out", "application/json", "2026-11-24T05:00:00+00:00"),
}
IN_A_VPC = replace(HOSTING, subnets=("subnet-0123456789abcdef0",), security_groups=("sg-0123456789abcdef0",))
UPLOADED = replace(HOSTING, package="s3://my-models/iris.tar.gz", metrics=False)
HOSTINGS = {
    "usual": HOSTING,
    "vpc": IN_A_VPC,
    "uploaded": UPLOADED,
    **{name: replace(HOSTING, way=way) for name, way in WAYS.items()},
}


POLICY = {"PolicyName": "iris", **scalable("iris"), "PolicyType": "TargetTrackingScaling"}
ALARM = StandingAlarm(
    "iris-errors", {"AlarmName": "iris-errors", "EvaluationPeriods": 1, "ComparisonOperator": "LessThanThreshold"}
)
ACTION = {"ScheduledActionName": "nightly", **scalable("iris"), "Schedule": "cron(0 22 * * ? *)"}
SUSPENDED = {"DynamicScalingInSuspended": True}
SCALE = StandingScale(1, 2, 9.0, ({**POLICY, "PolicyName": "mine"},), ({**ACTION},), SUSPENDED)
SCALED = Deployed(name="iris", region="us-east-1", scale=SCALE, alarms=(ALARM,))


def printed(capsys: pytest.CaptureFixture[str], config: Path, *options: str) -> dict[str, dict[str, Any]]:
    """The calls, by service and operation, of which there is one each."""
    assert main(["deploy", "sagemaker", str(config), *options]) == 0
    out, err = capsys.readouterr()
    assert err.endswith("Nothing was called: --yes makes these calls.\n")
    calls = [next(iter(call.items())) for call in yaml.safe_load(out)]
    assert len(dict(calls)) == len(calls)
    return dict(calls)


def refused(capsys: pytest.CaptureFixture[str], config: Path, *options: str) -> str:
    assert main(["deploy", "sagemaker", str(config), *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err.strip()


def reported(tmp_path: Path, **changes: Any) -> Path:
    """Of `loadtest recommend`, as it writes it: c7i.large with 2 sessions wins."""
    value = json.loads(to_json(example_recommendation()))
    path = tmp_path / "report.json"
    path.write_text(json.dumps(value | changes))
    return path


@pytest.mark.parametrize("hosting", HOSTINGS.values(), ids=HOSTINGS)
def test_every_call_and_what_takes_it_back_is_one_that_aws_takes(hosting: Hosting) -> None:
    calls = creation(hosting)
    if not isinstance(hosting.way, BatchTransform):
        calls += update(replace(hosting, limit_ms=50), SCALED)
    undone = [back for call in calls for back in call.undo]
    assert [fault for call in (*calls, *undone) for fault in faults(call)] == []


@pytest.mark.parametrize("hosting", HOSTINGS.values(), ids=HOSTINGS)
def test_whatever_is_made_is_tagged_and_can_be_taken_back(hosting: Hosting) -> None:
    marked = {"serving-gateway:name": "iris", "serving-gateway:config": hosting.digest}
    for call in creation(hosting):
        tagged = call.parameters.get("Tags", {})
        if isinstance(tagged, list):
            tagged = {tag["Key"]: tag["Value"] for tag in tagged}
        if call.operation == "put_object":
            tagged = dict(pair.split("=") for pair in call.parameters["Tagging"].replace("%3A", ":").split("&"))
        makes = call.until is None and not call.operation.startswith("delete")
        assert bool(call.undo) == makes
        if call.operation != "put_scaling_policy":  # which goes with its target
            assert (marked.items() <= tagged.items()) == makes, call.named


def test_nothing_is_named_before_it_was_made() -> None:
    made: list[str] = []
    order = ["put_object", "create_model", "create_endpoint_config", "create_endpoint", "describe_endpoint"]
    for call in creation(HOSTING):
        made.append(call.operation)
    assert made == [*order, "register_scalable_target", "put_scaling_policy"]


def test_the_same_package_under_the_same_options_has_the_same_name_and_any_other_has_not() -> None:
    elsewhere = PackedModel(Path("/tmp/elsewhere.tar.gz"), 1 << 20, "ab" * 32, "my-models")
    assert replace(HOSTING, package=elsewhere).state == HOSTING.state
    assert replace(HOSTING, way=WAYS["one type"]).state == HOSTING.state  # but for its scaling
    other = PackedModel(Path("model.tar.gz"), 1 << 20, "cd" * 32, "my-models")
    changed = [
        *(replace(HOSTING, way=way) for way in WAYS.values()),
        replace(HOSTING, package=other),
        replace(HOSTING, image=f"{IMAGE}-2"),
        replace(HOSTING, role_arn=f"{ROLE}2"),
        replace(HOSTING, metrics=False),
        IN_A_VPC,
    ]
    assert len({hosting.state for hosting in changed}) == len(changed)


def test_the_longest_name_still_leaves_room_for_the_digest() -> None:
    longest = replace(HOSTING, name="a" * 40)
    assert [fault for call in creation(longest) for fault in faults(call)] == []


def test_one_type_is_asked_for_as_such_and_several_in_their_order() -> None:
    def variant(way: Way) -> dict[str, Any]:
        calls = {call.operation: call for call in creation(replace(HOSTING, way=way))}
        found: dict[str, Any] = calls["create_endpoint_config"].parameters["ProductionVariants"][0]
        return found

    assert variant(WAYS["one type"])["InstanceType"] == "ml.c7i.large"
    assert "InstancePools" not in variant(WAYS["one type"])
    pools = variant(WAYS["five types"])
    assert "InstanceType" not in pools
    assert [pool["Priority"] for pool in pools["InstancePools"]] == [1, 2, 3, 4, 5]
    assert pools["InstancePools"][1]["InstanceType"] == "ml.c6i.xlarge"


def test_a_dry_run_prints_the_calls_of_the_plan_and_the_price_of_a_month(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["deploy", "sagemaker", str(IRIS), *PLACE, "--instance-type", "c7i.large", "--instances", "2"]) == 0
    out, _ = capsys.readouterr()
    calls = yaml.safe_load(out)
    assert [next(iter(call)) for call in calls] == [
        "s3.put_object",
        "sagemaker.create_model",
        "sagemaker.create_endpoint_config",
        "sagemaker.create_endpoint",
        "sagemaker.describe_endpoint",
    ]
    key = calls[0]["s3.put_object"]["Key"]
    assert calls[1]["sagemaker.create_model"]["PrimaryContainer"]["ModelDataUrl"] == f"s3://my-models/{key}"
    # 2 × 0.1071 × 730 = 156.37
    assert "# Price of ml.c7i.large: 0.1071 USD an hour each. A month: 156.37 USD with 2 instances." in out
    assert re.search(r"#   Source: .+, 2026-07-20; estimated", out)


def test_an_update_is_watched_by_alarms_of_errors_and_of_the_slo(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--update", "--instance-type", "c7i.large", "--instances", "2", "--bake-minutes", "10")
    assert main(["deploy", "sagemaker", str(IRIS), *PLACE, *options]) == 0
    calls = [next(iter(call.items())) for call in yaml.safe_load(capsys.readouterr().out)]
    alarms = {call["AlarmName"]: call for name, call in calls if name == "cloudwatch.put_metric_alarm"}
    assert set(alarms) == {"iris-errors", "iris-late"}
    assert alarms["iris-late"]["Threshold"] == 50_000  # the SLO's 50 ms, in microseconds
    assert (alarms["iris-late"]["MetricName"], alarms["iris-late"]["ExtendedStatistic"]) == ("ModelLatency", "p99")
    shift = dict(calls)["sagemaker.update_endpoint"]["DeploymentConfig"]
    assert {alarm["AlarmName"] for alarm in shift["AutoRollbackConfiguration"]["Alarms"]} == set(alarms)
    routing = shift["BlueGreenUpdatePolicy"]["TrafficRoutingConfiguration"]
    assert routing == {
        "Type": "CANARY",
        "CanarySize": {"Type": "INSTANCE_COUNT", "Value": 1},
        "WaitIntervalInSeconds": 600,
    }
    names = [name for name, _ in calls]
    assert max(n for n, name in enumerate(names) if "alarm" in name) < names.index("sagemaker.update_endpoint")


def test_of_one_instance_no_part_can_be_tried_first() -> None:
    routing = {
        hosting.way.instances.least: call.parameters["DeploymentConfig"]["BlueGreenUpdatePolicy"]["TrafficRoutingConfiguration"]
        for hosting in (HOSTING, replace(HOSTING, way=WAYS["scaled"]))
        if isinstance(hosting.way, RealTime)
        for call in update(hosting)
        if call.operation == "update_endpoint"
    }
    assert {least: each["Type"] for least, each in routing.items()} == {1: "ALL_AT_ONCE", 2: "CANARY"}


@pytest.mark.parametrize(
    ("variant", "options", "there"),
    [
        ("asynchronous", ["--instance-type", "m5.large"], "sagemaker.create_endpoint"),
        ("serverless", ["--memory", "2Gi"], "sagemaker.create_endpoint"),
        (
            "batch-transform",
            ["--instance-type", "m5.large", "--input", "s3://my-models/in/", "--output", "s3://my-models/out/"],
            "sagemaker.create_transform_job",
        ),
    ],
)
def test_each_variant_is_the_same_container_and_tells_its_price(
    capsys: pytest.CaptureFixture[str], variant: str, options: Sequence[str], there: str
) -> None:
    calls = printed(capsys, IRIS, *PLACE, "--variant", variant, *options)
    assert there in calls
    assert calls["sagemaker.create_model"]["PrimaryContainer"]["Image"] == IMAGE
    assert main(["deploy", "sagemaker", str(IRIS), *PLACE, "--variant", variant, *options]) == 0
    told = {
        "asynchronous": "# Price of ml.m5.large: 0.115 USD an hour each. A month: 83.95 USD with 1 instance.",  # 0.115 × 730
        "serverless": "# Price: by request and by the time that it takes, nothing while nobody asks; not known here.",
        "batch-transform": "An hour, while it runs: 0.115 USD with 1 instance.",
    }
    assert told[variant] in capsys.readouterr().out


def test_an_asynchronous_endpoint_gets_two_batches_of_each_session_and_is_scaled_by_what_waits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = written(tmp_path, SYNTHETIC | {"backends": [{"kind": "synthetic", "sessions": 3}]})
    options = ("--variant", "asynchronous", "--instance-type", "m5.large", "--requests-per-second", "10", "--name", "later")
    calls = printed(capsys, config, *PLACE, *options)
    told = calls["sagemaker.create_endpoint_config"]["AsyncInferenceConfig"]
    assert told["ClientConfig"]["MaxConcurrentInvocationsPerInstance"] == 2 * 8 * 3
    assert told["OutputConfig"]["S3OutputPath"] == "s3://my-models/serving-gateway-answers/later/answers"
    policy = calls["application-autoscaling.put_scaling_policy"]["TargetTrackingScalingPolicyConfiguration"]
    assert policy["TargetValue"] == 300  # half of what it does in a minute: 10 × 60 × 0.5
    seldom = printed(capsys, config, *PLACE, *options, "--requests-per-second", "0.001")
    policy = seldom["application-autoscaling.put_scaling_policy"]["TargetTrackingScalingPolicyConfiguration"]
    assert policy["TargetValue"] == 0.03
    metric = policy["CustomizedMetricSpecification"]
    assert (metric["MetricName"], metric["Dimensions"]) == (
        "ApproximateBacklogSizePerInstance",
        [{"Name": "EndpointName", "Value": "later"}],
    )


def test_serverless_gets_the_whole_gigabytes_that_the_models_need(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    calls = printed(capsys, written(tmp_path), *PLACE, "--variant", "serverless", "--max-concurrency", "5")
    variant = calls["sagemaker.create_endpoint_config"]["ProductionVariants"][0]
    assert variant["ServerlessConfig"] == {"MemorySizeInMB": 1024, "MaxConcurrency": 5}
    assert "InstanceType" not in variant


@pytest.mark.parametrize(("content_type", "split"), [("text/csv", "Line"), ("application/json", "None")])
def test_a_batch_transform_cuts_lines_where_its_files_have_them_and_removes_what_only_it_needed(
    capsys: pytest.CaptureFixture[str], content_type: str, split: str
) -> None:
    options = ("--input", "s3://my-models/in/", "--output", "s3://my-models/out/", "--content-type", content_type)
    calls = printed(capsys, IRIS, *PLACE, "--variant", "batch-transform", "--instance-type", "m5.large", *options)
    job = calls["sagemaker.create_transform_job"]
    assert job["TransformInput"]["SplitType"] == job["TransformOutput"]["AssembleWith"] == split
    assert [*calls][-3:] == ["sagemaker.describe_transform_job", "sagemaker.delete_model", "s3.delete_object"]


def test_prices_of_another_region_are_said_to_be_others(capsys: pytest.CaptureFixture[str]) -> None:
    image = IMAGE.replace("us-east-1", "eu-central-1")
    assert main(["deploy", "sagemaker", str(IRIS), *PLACE, "--image", image, "--instance-type", "ml.c7i.large"]) == 0
    assert "# These are prices of us-east-1; eu-central-1 has its own." in capsys.readouterr().out


def test_all_that_is_missing_is_told_at_once_with_where_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    lines = refused(capsys, IRIS).splitlines()
    assert [line.split(":")[0] for line in lines] == ["--image", "--role-arn", "--bucket", "--instance-type"]
    for line, where in zip(
        lines, ("docs/deploy-sagemaker.md", "aws iam list-roles", "aws s3 mb", "loadtest prices list"), strict=True
    ):
        assert "not given: expected" in line
        assert where in line


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--image", "gateway:cpu"], "--image: 'gateway:cpu': expected ACCOUNT.dkr.ecr.REGION.amazonaws.com"),
        (["--image", IMAGE.removesuffix(":cpu")], "--image: "),  # latest would change what runs
        (["--region", "eu-west-1"], "is in us-east-1: expected one in eu-west-1, as --region says"),
        (["--region", "Frankfurt"], "--region: 'Frankfurt': expected a region of AWS"),
        (["--role-arn", "Gateway"], "--role-arn: 'Gateway': expected arn:aws:iam::ACCOUNT:role/ROLE"),
        (["--bucket", "s3://my-models"], "--bucket: 's3://my-models': expected the name of a bucket"),
        (["--model-data", "s3://my-models/m.tar.gz"], "--bucket: my-models: expected none beside --model-data"),
        (["--subnets", "subnet-12345678"], "--security-groups: not given: expected sg-ID, as a VPC takes both"),
        (["--subnets", "vpc-12345678", "--security-groups", "sg-12345678"], "--subnets: 'vpc-12345678': expected subnet-ID"),
        (["--instances", "0"], "--instances: 0: expected 1 or more"),
        (["--instances", "3", "--max-instances", "2"], "--max-instances: 2: expected 3 or more"),
        (["--max-instances", "3"], "--max-instances: 3: expected a rate to scale at"),
        (["--requests-per-second", "0"], "--requests-per-second: 0: expected 0.001 to 1000000"),
        (["--requests-per-second", "nan"], "--requests-per-second: nan: expected 0.001 to 1000000"),
        (["--requests-per-second", "2e6"], "--requests-per-second: 2e+06: expected 0.001 to 1000000"),
        (["--role-arn", ROLE.replace("aws:", "aws-cn:")], "role/Gateway: expected a role of aws, which has us-east-1: "),
        (["--bucket", "my..b"], "--bucket: 'my..b': expected the name of a bucket"),
        (["--model-data", "s3://my-.b/m.tar.gz"], "--model-data: 's3://my-.b/m.tar.gz': expected s3://BUCKET/KEY.tar.gz"),
        (["--memory", "4"], "--memory: '4': expected an amount such as"),
        (["--memory", "5Gi"], "c7i.large has 4 GiB: expected 5 GiB"),
        (["--name", "Iris"], "--name: 'Iris': expected"),
        (["--instance-type", "c9i.large"], "--instance-type: ml.c9i.large: expected a type of the catalogue"),
        (["--instance-type", "c9g.xlarge"], "c9g.xlarge, which is on EC2 only: expected a type that SageMaker hosts"),
        (["--instance-type", "c7g.xlarge"], "c7g.xlarge is arm64: expected amd64, as the image is"),
        (["--architecture", "arm64"], "c7i.large is amd64: expected arm64, as the image is"),
        ([f"--instance-type=m7i.{size}xlarge" for size in ("", 2, 4, 8, 12)], "6 of them: expected 5 at most"),
        (["--bake-minutes", "5"], "--bake-minutes: 5: expected none without --update"),
        (["--update", "--bake-minutes", "61"], "--bake-minutes: 61: expected 0 to 60"),
        (["--update", "--variant", "batch-transform"], "--update: expected none with --variant batch-transform"),
        (["--input", "s3://my-models/in"], "--input: s3://my-models/in: expected none with --variant real-time: leave it out"),
        (["--variant", "serverless"], "--instance-type: ml.c7i.large: expected none with --variant serverless"),
        (["--variant", "serverless"], "--memory: not given: expected 1Gi to 6Gi"),
        (["--variant", "serverless", "--memory", "7Gi"], "--memory: 7Gi is what it takes: expected 1Gi to 6Gi"),
        (["--variant", "serverless", "--memory", "1Gi", "--architecture", "arm64"], "arm64, and serverless runs amd64"),
        (
            ["--variant", "serverless", "--memory", "1Gi", "--max-concurrency", "201"],
            "--max-concurrency: 201: expected 1 to 200",
        ),
        (["--variant", "asynchronous", "--output", "answers"], "--output: 'answers': expected a prefix of S3"),
        (["--variant", "batch-transform"], "--input: not given: expected a prefix of S3, such as s3://BUCKET/FOLDER/"),
        (["--variant", "batch-transform"], "--output: not given: expected a prefix of S3"),
        (["--variant", "batch-transform", "--instance-type", "m5.large"], "2 of them: expected one: a job takes no others"),
    ],
)
def test_what_is_malformed_or_cannot_work_is_refused(
    capsys: pytest.CaptureFixture[str], options: Sequence[str], told: str
) -> None:
    assert told in refused(capsys, IRIS, *PLACE, "--instance-type", "ml.c7i.large", *options)


def test_a_type_that_sagemaker_has_for_endpoints_only_runs_no_job(capsys: pytest.CaptureFixture[str]) -> None:
    files = ("--input", "s3://my-models/in/", "--output", "s3://my-models/out/", "--variant", "batch-transform")
    told = refused(capsys, IRIS, *PLACE, *files, "--instance-type", "g7.2xlarge")
    assert "g7.2xlarge, which SageMaker has for endpoints only: expected a type of batch transform" in told


@pytest.mark.parametrize(
    ("backend", "instance_type", "told"),
    [
        (
            {"kind": "torch", "model": "m.pt", "device": "cuda"},
            "c7i.large",
            "c7i.large has no accelerator: expected an NVIDIA GPU",
        ),
        ({"kind": "torch", "model": "m.pt", "device": "cuda:1"}, "g6.xlarge", "g6.xlarge has 1 × l4: expected 2 GPUs"),
        ({"kind": "torch", "model": "m.pt", "device": "cuda"}, "inf2.xlarge", "expected an NVIDIA GPU"),
        ({"kind": "neuron", "model": "m"}, "g6.xlarge", "expected Inferentia2 or Trainium"),
        ({"kind": "neuron", "model": "m"}, "inf1.xlarge", "expected Inferentia2 or Trainium"),
        ({"kind": "neuron", "model": "m", "sessions": 3}, "inf2.xlarge", "2 NeuronCores: expected 3, one for each session"),
    ],
)
def test_a_machine_without_what_the_model_computes_on_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, backend: dict[str, Any], instance_type: str, told: str
) -> None:
    config = written(tmp_path, SYNTHETIC | {"backends": [backend]})
    assert told in refused(capsys, config, *PLACE, "--instance-type", instance_type)


def test_a_driver_that_does_not_run_the_images_cuda_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = written(tmp_path, SYNTHETIC | {"backends": [{"kind": "torch", "model": "m.pt", "device": "cuda"}]})
    options = ("--instance-type", "g6.xlarge", "--ami", "al2-ami-sagemaker-inference-gpu-3-1")
    assert "runs CUDA 12.4: expected one that runs CUDA 13.0" in refused(capsys, config, *PLACE, *options)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"server": {"ingress_replicas": 2}}, "needs Ray, but a container is one process"),
        ({"server": {"tls": {"certificate": "/c", "key": "/k"}}}, "server.tls: SageMaker speaks HTTP to the container"),
        ({"server": {"access": {"keys": "/k"}}}, "server.access: SageMaker shows no key to the container"),
    ],
)
def test_what_no_container_of_sagemaker_can_serve_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, sections: dict[str, Any], told: str
) -> None:
    assert told in refused(capsys, written(tmp_path, **sections), *PLACE, "--instance-type", "c7i.large")


def test_all_processes_that_listen_are_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    elsewhere = SYNTHETIC | {"backends": [{"kind": "triton", "url": "triton:8001", "model": "m"}]}
    config = written(tmp_path, elsewhere, server={"ingress_replicas": 8})
    assert "c7i.large has 4 GiB: expected 8 GiB" in refused(capsys, config, *PLACE, "--instance-type", "c7i.large")


def test_a_report_says_on_what_and_at_which_rate_it_is_scaled(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = reported(tmp_path)
    found = json.loads(report.read_text())
    calls = printed(capsys, report, *PLACE)
    variant = calls["sagemaker.create_endpoint_config"]["ProductionVariants"][0]
    assert variant["InstanceType"] == "ml.c7i.large"
    assert calls["sagemaker.create_endpoint"]["EndpointName"] == "adder"
    target = calls["application-autoscaling.put_scaling_policy"]["TargetTrackingScalingPolicyConfiguration"]["TargetValue"]
    assert target == pytest.approx(found["autoscaling_invocations_per_minute"], rel=1e-5)
    assert calls["application-autoscaling.register_scalable_target"]["MaxCapacity"] == 2 * variant["InitialInstanceCount"]


def test_a_reports_folder_is_that_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    reported(tmp_path)
    (tmp_path / "gateway.yaml").write_text("models: []")  # `loadtest recommend` writes one beside
    assert printed(capsys, tmp_path, *PLACE)["sagemaker.create_endpoint"]["EndpointName"] == "adder"


def test_a_fleet_of_several_kinds_is_asked_for_in_pools(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = json.loads(reported(tmp_path).read_text())
    other = next(each["name"] for each in found["candidates"] if each["instance_type"] == "c8g.large")
    candidates = [each | {"instance_type": each["instance_type"].replace("c8g", "c6i")} for each in found["candidates"]]
    fleet = {"counts": {found["winner"]: 2, other: 1}, "usd_per_hour": 1, "capacity_rps": 9, "target_rps": 5,
             "headroom": 0.7, "autoscaling_per_minute": {}}  # fmt: skip
    report = reported(tmp_path, fleet=fleet, candidates=candidates)
    variant = printed(capsys, report, *PLACE)["sagemaker.create_endpoint_config"]["ProductionVariants"][0]
    assert [pool["InstanceType"] for pool in variant["InstancePools"]] == ["ml.c7i.large", "ml.c6i.large"]
    assert variant["InitialInstanceCount"] == 3


def test_a_mix_without_the_winner_is_deployed_on_its_own_types(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = json.loads(reported(tmp_path).read_text())
    one, other = (each["name"] for each in found["candidates"] if each["instance_type"] == "c8g.large")
    candidates = [each | {"instance_type": each["instance_type"].replace("c8g", "c6i")} for each in found["candidates"]]
    fleet = {"counts": {one: 2, other: 1}, "usd_per_hour": 1, "capacity_rps": 9, "target_rps": 5,
             "headroom": 0.7, "autoscaling_per_minute": {}}  # fmt: skip
    report = reported(tmp_path, fleet=fleet, candidates=candidates, configuration_of=other)
    assert main(["deploy", "sagemaker", str(report), *PLACE]) == 0
    out, err = capsys.readouterr()
    assert "ml.c6i.large" in out
    assert "ml.c7i.large" not in out
    assert f"the fleet is 2 × {one} + 1 × {other}, each with its own configuration: this is that of {other}" in err


def test_a_rate_of_one_type_is_not_taken_for_another(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = reported(tmp_path)
    assert main(["deploy", "sagemaker", str(report), *PLACE, "--instance-type", "ml.m7i.large"]) == 0
    out, err = capsys.readouterr()
    assert "application-autoscaling" not in out
    assert "measured c7i.large, and not ml.m7i.large: it is not scaled by that rate" in err


def test_what_is_not_proven_is_told_apart_from_a_rate_that_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["deploy", "sagemaker", str(reported(tmp_path, state="not proven")), *PLACE]) == 0
    assert "the fleet is not proven: the rates that are do not carry what was asked for" in capsys.readouterr().err
    candidates = [each | {"max_rps": 0} for each in json.loads(reported(tmp_path).read_text())["candidates"]]
    assert main(["deploy", "sagemaker", str(reported(tmp_path, state="not proven", candidates=candidates)), *PLACE]) == 0
    assert "the rate is not proven: it held in the sample only" in capsys.readouterr().err


def test_the_other_places_take_a_report_as_well(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = reported(tmp_path)
    found = json.loads(report.read_text())
    ec2 = ["deploy", "ec2", str(report), *planned_ec2.PLACE, *planned_ec2.files(tmp_path)]
    assert main(ec2) == 0
    (started,) = (each["ec2.run_instances"] for each in yaml.safe_load(capsys.readouterr().out) if "ec2.run_instances" in each)
    assert started["InstanceType"] == "c7i.large"  # the winner's
    fleet = {"counts": {found["winner"]: 4}, "usd_per_hour": 1, "capacity_rps": 9, "target_rps": 5, "headroom": 0.7,
             "autoscaling_per_minute": {}}  # fmt: skip
    reported(tmp_path, fleet=fleet)
    assert main(ec2) == 0
    assert "Note: the fleet is of 4 machines: this is one of them" in capsys.readouterr().err
    options = ("--no-ray", "--image", "registry/gateway:cpu", "--models", "image:/models", "--memory", "2Gi")
    assert main(["deploy", "kubernetes", str(report), *options]) == 0
    manifests = list(yaml.safe_load_all(capsys.readouterr().out))
    (data,) = (each["data"] for each in manifests if each["kind"] == "ConfigMap")
    assert yaml.safe_load(data["gateway.yaml"])["models"][0]["name"] == found["configuration"]["models"][0]["name"]


def test_a_container_keeps_its_state_where_it_may_write(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, server={"state_dir": "/var/lib/state", "run_dir": "/run/gateway", "grpc_port": None})
    packages = []

    def archive(document: Document, path: Path, remedy: str) -> Sent:
        packages.append(packed(document))
        return Sent(path, path.name, 1, "ab" * 32)

    monkeypatch.setattr(deploy_sagemaker, "archive", archive)
    printed(capsys, path, *PLACE, "--instance-type", "ml.c7i.large")
    (package,) = packages
    assert package.value["server"] == {"state_dir": "/tmp/state", "grpc_port": None}


def test_json_may_be_a_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"models": [SYNTHETIC]}))
    assert "sagemaker.create_endpoint" in printed(capsys, path, *PLACE, "--instance-type", "ml.c7i.large")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"winner": None, "state": "no candidate"}, "state: no candidate: expected a winner"),
        ({"configuration": {}}, "configuration: empty: expected a configuration"),
        ({"schema": "loadtest.recommendation/2"}, "schema: loadtest.recommendation/2: expected loadtest.recommendation/1"),
        ({"candidates": "none"}, "expected a report of `loadtest recommend`"),
        ({"configuration_of": "gone"}, "candidates: no gone: expected it, as it is of the fleet"),
    ],
)
def test_a_report_that_names_nothing_to_deploy_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    assert told in refused(capsys, reported(tmp_path, **changes), *PLACE)
