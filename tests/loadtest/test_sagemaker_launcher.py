"""A whole search over endpoints of SageMaker, on moto: whatever goes wrong, nothing is left behind, and its cost is known."""

import asyncio
import contextlib
import fcntl
import itertools
import json
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from moto.servicequotas.responses import ServiceQuotasResponse

from loadtest.cli import main
from loadtest.commands.reap import reap
from loadtest.errors import ExitCode, LoadtestError, UsageError
from loadtest.lab.driver import SearchStep
from loadtest.lab.launchers.aws.door import AwsRefused
from loadtest.lab.launchers.aws.endpoints import TAG_EXPIRES, TAG_RUN
from loadtest.lab.launchers.aws.removal import left_over
from loadtest.lab.launchers.launcher import Quota, StartFailed
from loadtest.lab.launchers.sagemaker import SageMaker
from loadtest.lab.platform import with_platform, with_requests
from loadtest.prices.catalogue import Catalogue, load_catalogue
from loadtest.question.spec import SearchSpec
from loadtest.question.spec_file import SageMakerLauncher
from loadtest.search.events import Measured, Profiled
from tests.loadtest.examples import changed, example_spec
from tests.loadtest.fake_aws import BUCKET, IMAGE, REGION, ROLE, FakeAws, Killed, moto, packed, refused
from tests.loadtest.launched import LaunchedSearch, of

TYPES = ("c5.large", "m5.large", "c5.xlarge")
LAUNCHER = {"kind": "sagemaker", "role_arn": ROLE, "bucket": BUCKET, "images": [{"uri": IMAGE}], "parallel": 3}


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


@pytest.fixture(scope="module")
def account() -> Iterator[None]:
    with moto():
        yield


@pytest.fixture
def aws(account: None) -> Iterator[FakeAws]:
    """In an account in which nothing of ours is, neither before nor behind a test."""
    fake = FakeAws()
    yield fake
    assert fake.left() == []


def spec_of(catalogue: Catalogue, **launcher: Any) -> SearchSpec:
    candidates = [{"instances": list(TYPES), "backend": {"kind": "synthetic"}}]
    budget = {"minutes": 60, "usd": 5}
    return example_spec(catalogue, candidates=candidates, launcher={**LAUNCHER, **launcher}, budget=budget)


class Search(LaunchedSearch):
    """Over endpoints."""

    def __init__(self, aws: FakeAws, catalogue: Catalogue, folder: Path, **launcher: Any) -> None:
        spec = with_requests(spec_of(catalogue, **launcher), folder)
        assert isinstance(spec.launcher, SageMakerLauncher)
        self.launcher = SageMaker(spec.launcher, catalogue, spec.budget, aws=aws.door, pack=packed, clock=aws.clock)
        super().__init__(aws, spec, self.launcher, folder)


class Faulty:
    """m5.large fails to start, c5.xlarge is throttled for good."""

    def __init__(self) -> None:
        self.failing: set[str] = set()

    def __call__(self, operation: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        if operation == "create_endpoint" and of(parameters).startswith("m5.large"):
            self.failing.add(parameters["EndpointName"])
        if operation == "create_endpoint" and of(parameters).startswith("c5.xlarge"):
            raise refused("ThrottlingException", "Rate exceeded")
        if operation == "describe_endpoint" and parameters["EndpointName"] in self.failing:
            self.failing.discard(parameters["EndpointName"])  # then it is asked whether it is gone
            return {"EndpointStatus": "Failed", "FailureReason": "the primary container did not pass the ping health check"}
        return None


@pytest.mark.slow
@pytest.mark.usefixtures("aws")
def test_a_search_that_is_refused_a_folder_leaves_the_requests_of_the_other_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # moto has none of it.
    monkeypatch.setattr(ServiceQuotasResponse, "list_service_quotas", lambda quotas: '{"Quotas": []}', raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    candidates = [{"instances": list(TYPES), "backend": {"kind": "synthetic"}}]
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(changed(candidates=candidates, launcher=LAUNCHER, budget={"minutes": 60, "usd": 5})))
    (tmp_path / "requests.jsonl").write_text("of the other")
    with (tmp_path / "journal.jsonl").open("a") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        assert main(["recommend", str(spec), "--out", str(tmp_path)]) == ExitCode.USAGE
    assert "another search writes here" in capfd.readouterr().err
    assert (tmp_path / "requests.jsonl").read_text() == "of the other"


def test_a_search_goes_on_without_those_that_do_not_start_and_removes_all_that_it_made(
    aws: FakeAws, catalogue: Catalogue, tmp_path: Path
) -> None:
    aws.fault = Faulty()
    search = Search(aws, catalogue, tmp_path)
    search.service_ms = 4.0
    outcome = asyncio.run(search.run())
    assert outcome.winner == "c5.large synthetic"
    outs = {standing.entrant.name.split()[0]: standing.out for standing in outcome.standings}
    assert outs["m5.large"] == (
        "did not start: EndpointStatus Failed: the primary container did not pass the ping health check"
    )
    assert outs["c5.xlarge"].startswith("did not start: sagemaker: ThrottlingException: Rate exceeded")
    assert aws.left() == []
    assert search.launcher.left_behind == []
    assert outcome.usd == pytest.approx(search.launcher.purse.usd) == pytest.approx(search.journaled_usd)
    assert outcome.usd > 0


def test_candidates_start_together_the_cheapest_first_and_the_journal_holds_them_as_they_end(
    aws: FakeAws, catalogue: Catalogue, tmp_path: Path
) -> None:
    search = Search(aws, catalogue, tmp_path)
    search.service_ms = 4.0
    slow: list[str] = []
    others = threading.Event()

    def fault(operation: str, parameters: Mapping[str, Any]) -> None:
        if operation == "create_endpoint" and of(parameters).startswith("c5.large"):
            slow.append(parameters["EndpointName"])
        if operation == "describe_endpoint" and parameters["EndpointName"] in slow:
            assert others.wait(200)  # on a thread of its own; on a slow machine it takes a while

    def on_step(step: SearchStep) -> None:
        search.steps.append(step)
        if sum(isinstance(step.event, Profiled) for step in search.steps) == 2:
            others.set()

    search.on_step = on_step
    aws.fault = fault  # type: ignore[assignment]  # it answers nothing
    outcome = asyncio.run(search.run())
    asked = [step.experiment.entrant.split()[0] for step in search.steps if step.event is None][:3]
    assert asked == ["c5.large", "m5.large", "c5.xlarge"]  # by their prices
    profiled = [step.event.group.split()[0] for step in search.steps if isinstance(step.event, Profiled)]
    assert sorted(profiled) == sorted(asked)
    assert profiled[-1] == "c5.large"
    assert outcome.winner == "c5.large synthetic"
    # What they share counts once.
    lines = [json.loads(line) for line in search.journal.read_text().splitlines()[1:-1]]
    shared = [line["data"]["overlap_s"] for line in lines if line["event"] == "profiled"]
    assert sum(overlap > 0 for overlap in shared) >= 1
    assert aws.left() == []


def test_a_search_goes_on_from_its_journal_with_what_others_had_ended_in_it(
    aws: FakeAws, catalogue: Catalogue, tmp_path: Path
) -> None:
    first = Search(aws, catalogue, tmp_path)
    first.service_ms = 4.0

    async def until_one_has_ended() -> None:
        task = asyncio.create_task(first.run())
        while not any(isinstance(step.event, Profiled) for step in first.steps):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(until_one_has_ended())
    assert aws.left() == []
    known = [step.event.group for step in first.steps if isinstance(step.event, Profiled)]
    spent_usd = first.journaled_usd
    assert spent_usd == pytest.approx(first.launcher.purse.usd)
    second = Search(aws, catalogue, tmp_path)
    second.service_ms = 4.0
    outcome = asyncio.run(second.run())
    assert not {step.event.group for step in second.steps if isinstance(step.event, Profiled)} & set(known)
    assert outcome.winner == "c5.large synthetic"
    assert outcome.usd == pytest.approx(spent_usd + second.launcher.purse.usd)
    assert aws.left() == []


@pytest.mark.parametrize("seed", range(4))
def test_an_interrupt_in_the_middle_leaves_nothing_behind_and_tells_what_was_spent(
    aws: FakeAws, catalogue: Catalogue, tmp_path: Path, seed: int
) -> None:
    aws.fault = Faulty()
    search = Search(aws, catalogue, tmp_path)
    moment = random.Random(seed).randint(2, 34)

    async def interrupted() -> None:
        task = asyncio.create_task(search.run())
        while len(aws.calls) < moment and not task.done():  # noqa: ASYNC110
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupted())
    assert aws.left() == []
    assert search.launcher.left_behind == []
    if "create_endpoint" in aws.calls:
        assert search.journaled_usd == pytest.approx(search.launcher.purse.usd)


@pytest.mark.parametrize(
    ("dies_at", "takes_effect"),
    # Each kind of piece is made, a candidate is waited for, and each kind is deleted.
    [(3, True), (5, True), (9, True), (10, True), (12, False), (16, False), (17, True), (23, True), (27, True)],
)
def test_what_a_killed_search_leaves_behind_is_found_and_removed_by_its_tags(
    aws: FakeAws, catalogue: Catalogue, tmp_path: Path, dies_at: int, takes_effect: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    aws.dies_at, aws.takes_effect = dies_at, takes_effect
    search = Search(aws, catalogue, tmp_path)
    with pytest.raises((Killed, BaseExceptionGroup)):
        asyncio.run(search.run())
    assert aws.dead
    left = aws.left()
    run = search.launcher.run_id
    assert asyncio.run(reap(aws.living_door, run, [BUCKET], yes=False)) == 0
    assert aws.left() == left  # dry by default
    shown = capsys.readouterr().out
    assert all(name in shown for name in left)
    assert asyncio.run(reap(aws.living_door, None, [BUCKET], yes=True)) == 0
    assert aws.left() == left  # its time is not over
    asyncio.run(reap(aws.living_door, run, [BUCKET], yes=True))
    assert aws.left() == []


def test_only_what_is_ours_and_due_is_reaped(aws: FakeAws, catalogue: Catalogue, tmp_path: Path) -> None:
    client = boto3.client("sagemaker", region_name=REGION)
    container = {"PrimaryContainer": {"Image": IMAGE}, "ExecutionRoleArn": ROLE}
    over = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    tags = {TAG_RUN: "abc1", TAG_EXPIRES: over}
    for name, tagged in (("loadtest-abc1-001", tags), ("loadtest-abc2-001", {}), ("mine-loadtest-abc1-001", tags)):
        client.create_model(ModelName=name, **container, Tags=[{"Key": k, "Value": v} for k, v in tagged.items()])
    found = asyncio.run(left_over(aws.door, datetime.now(UTC), buckets=[BUCKET]))
    assert [str(piece) for piece in found.pieces] == ["model loadtest-abc1-001"]
    assert asyncio.run(left_over(aws.door, datetime.now(UTC), run="abc2")).pieces == []  # it has no tags: it is not ours
    asyncio.run(reap(aws.door, None, [], yes=True))
    assert aws.left() == ["loadtest-abc2-001", "mine-loadtest-abc1-001"]
    for name in aws.left():
        client.delete_model(ModelName=name)


@pytest.mark.parametrize(("days", "left"), [(-1, False), (2, True)])
def test_an_expiry_that_somebody_wrote_without_a_zone_is_of_utc(aws: FakeAws, days: int, left: bool) -> None:
    client = boto3.client("sagemaker", region_name=REGION)
    day = (datetime.now(UTC) + timedelta(days=days)).date().isoformat()
    tags = [{"Key": TAG_RUN, "Value": "abc1"}, {"Key": TAG_EXPIRES, "Value": day}]
    client.create_model(ModelName="loadtest-abc1-001", PrimaryContainer={"Image": IMAGE}, ExecutionRoleArn=ROLE, Tags=tags)
    asyncio.run(reap(aws.door, None, [], yes=True))
    assert aws.left() == ["loadtest-abc1-001"] * left
    asyncio.run(reap(aws.door, "abc1", [], yes=True))


def test_everything_has_the_tags_of_its_run_with_an_expiry(aws: FakeAws, catalogue: Catalogue, tmp_path: Path) -> None:
    seen: dict[str, dict[str, str]] = {}

    def fault(operation: str, parameters: Mapping[str, Any]) -> None:
        if operation.startswith("create_") and "Tags" in parameters:
            seen[operation] = {tag["Key"]: tag["Value"] for tag in parameters["Tags"]}
        if operation == "put_object":
            seen[operation] = dict(pair.split("=") for pair in parameters["Tagging"].split("&"))

    aws.fault = fault  # type: ignore[assignment]  # it answers nothing
    search = Search(aws, catalogue, tmp_path)
    asyncio.run(search.run())
    assert set(seen) == {"put_object", "create_model", "create_endpoint_config", "create_endpoint"}
    for tags in seen.values():
        assert tags.get(TAG_RUN, tags.get("loadtest%3Arun")) == search.launcher.run_id
    ends = datetime.fromisoformat(seen["create_model"][TAG_EXPIRES])
    assert timedelta(hours=2) < ends - datetime.now(UTC) < timedelta(hours=4)  # an hour's budget, and two


def test_requests_are_signed_invocations_of_the_endpoint(aws: FakeAws, catalogue: Catalogue, tmp_path: Path) -> None:
    search = Search(aws, catalogue, tmp_path)
    asyncio.run(search.run())
    spec = search.measured[0]
    assert (spec.protocol, spec.sigv4) == ("invocations", REGION)
    assert spec.target.startswith(
        f"https://runtime.sagemaker.{REGION}.amazonaws.com/endpoints/loadtest-{search.launcher.run_id}-"
    )
    assert json.loads(Path(spec.payloads[0]).read_text().splitlines()[0])["inputs"][0]["shape"] == [1, 4]


# Money.


def test_what_could_exceed_the_money_is_not_started(aws: FakeAws, catalogue: Catalogue, tmp_path: Path) -> None:
    search = Search(aws, catalogue, tmp_path)
    search.launcher.purse.max_usd = 0.001
    search.question = replace(search.question, max_usd=5)  # the search itself would go on
    outcome = asyncio.run(search.run())
    assert "create_endpoint" not in aws.calls
    assert all("its start could exceed --max-usd" in standing.out for standing in outcome.standings)


def test_a_start_that_takes_too_long_for_the_money_is_stopped(aws: FakeAws, catalogue: Catalogue, tmp_path: Path) -> None:
    search = Search(aws, catalogue, tmp_path, parallel=1)

    def fault(operation: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        if operation == "describe_endpoint" and not aws.calls.count("delete_endpoint"):
            return {"EndpointStatus": "Creating"}
        return None

    aws.fault = fault
    search.launcher.purse.max_usd = 0.04
    with_time = replace(search.question, max_usd=0.04)
    search.question = with_time
    outcome = asyncio.run(search.run())
    assert outcome.winner is None
    assert aws.left() == []
    assert search.launcher.purse.usd <= 0.15  # start_timeout_s at 0.10 to 0.23 $/h, and its removal


def test_a_role_or_a_quota_that_aws_refuses_is_the_reason_why_nothing_starts(
    aws: FakeAws, catalogue: Catalogue, tmp_path: Path
) -> None:
    def fault(operation: str, parameters: Mapping[str, Any]) -> None:
        if operation == "create_endpoint":
            raise refused("ResourceLimitExceeded", "The account-level service limit 'ml.c5.large for endpoint usage' is 0")

    aws.fault = fault  # type: ignore[assignment]  # it answers nothing
    outcome = asyncio.run(Search(aws, catalogue, tmp_path).run())
    assert outcome.winner is None
    assert "service limit 'ml.c5.large for endpoint usage' is 0" in outcome.standings[0].out
    assert aws.left() == []


def test_what_cannot_be_removed_is_told_with_the_command_that_tries_again(
    aws: FakeAws, catalogue: Catalogue, tmp_path: Path
) -> None:
    def fault(operation: str, parameters: Mapping[str, Any]) -> None:
        if operation == "delete_model":
            raise refused("AccessDeniedException", "not authorized to perform sagemaker:DeleteModel")

    aws.fault = fault  # type: ignore[assignment]  # it answers nothing
    search = Search(aws, catalogue, tmp_path)
    asyncio.run(search.run())
    assert len(search.launcher.left_behind) == 3
    assert search.launcher.left_behind[0].endswith(f"`{search.launcher.reaped_by}` tries again")
    assert all(name.count("-") == 3 for name in aws.left())  # the three models
    aws.fault = lambda operation, parameters: None
    asyncio.run(reap(aws.door, search.launcher.run_id, [BUCKET], yes=True))
    assert aws.left() == []


@pytest.mark.parametrize("operation", ["delete_endpoint", "describe_endpoint"])
def test_an_endpoint_whose_removal_is_not_answered_counts_on_until_it_is_gone(
    aws: FakeAws, catalogue: Catalogue, tmp_path: Path, operation: str
) -> None:
    launcher = Search(aws, catalogue, tmp_path).launcher

    def silent(asked: str, parameters: Mapping[str, Any]) -> None:
        if asked == operation:
            raise refused("", "Connect timeout")

    async def of_one_candidate() -> None:
        started = await launcher.start(spec_of(catalogue).candidates[0])
        aws.fault = silent  # type: ignore[assignment]  # it answers nothing
        await started.stop()
        assert aws.now_s == 180  # so long it is asked again
        assert started.name in launcher.left_behind[0]
        assert launcher.purse.runs(started.name)
        aws.fault = lambda operation, parameters: None
        await launcher.close()
        assert not launcher.purse.runs(started.name)

    asyncio.run(of_one_candidate())
    assert launcher.left_behind == []
    assert aws.left() == []


def test_an_endpoint_that_is_made_while_nobody_answers_for_a_while_is_measured(
    aws: FakeAws, catalogue: Catalogue, tmp_path: Path
) -> None:
    silent_until_s: dict[str, float] = {}

    def fault(operation: str, parameters: Mapping[str, Any]) -> None:
        if operation == "describe_endpoint":
            code = ("", "ThrottlingException")[len(aws.calls) % 2]
            if aws.now_s < silent_until_s.setdefault(parameters["EndpointName"], aws.now_s + 300):
                raise refused(code, "Connect timeout")

    aws.fault = fault  # type: ignore[assignment]  # it answers nothing
    outcome = asyncio.run(Search(aws, catalogue, tmp_path).run())
    assert not any(standing.out.startswith("did not start") for standing in outcome.standings)
    assert aws.left() == []


def test_an_endpoint_is_waited_for_no_longer_where_nobody_answers(aws: FakeAws, catalogue: Catalogue, tmp_path: Path) -> None:
    def fault(operation: str, parameters: Mapping[str, Any]) -> None:
        if operation == "describe_endpoint" and not aws.calls.count("delete_endpoint"):
            aws.now_s += 45  # four tries of boto3's, each with ten seconds to connect
            raise refused("", "Connect timeout")

    aws.fault = fault  # type: ignore[assignment]  # it answers nothing
    search = Search(aws, catalogue, tmp_path, start_timeout_s=600)
    with pytest.raises(StartFailed, match=r"not in service within launcher\.start_timeout_s 600: .*Connect timeout"):
        asyncio.run(search.launcher.start(search.spec.candidates[0]))
    assert aws.now_s <= 600 + 10 + 45  # the last call began before the time was over
    assert aws.left() == []


def test_a_session_that_ends_while_an_endpoint_is_made_is_told_at_once(
    aws: FakeAws, catalogue: Catalogue, tmp_path: Path
) -> None:
    def fault(operation: str, parameters: Mapping[str, Any]) -> None:
        if operation == "describe_endpoint" and not aws.calls.count("delete_endpoint"):
            raise refused("NotAsked", "no credentials")

    aws.fault = fault  # type: ignore[assignment]  # it answers nothing
    search = Search(aws, catalogue, tmp_path)
    with pytest.raises(StartFailed, match="no credentials"):
        asyncio.run(search.launcher.start(search.spec.candidates[0]))
    assert aws.now_s < 60


def test_what_was_made_before_the_same_call_was_throttled_is_removed(
    aws: FakeAws, catalogue: Catalogue, tmp_path: Path
) -> None:
    made: set[str] = set()

    def fault(operation: str, parameters: Mapping[str, Any]) -> None:
        if operation == "create_endpoint":
            if parameters["EndpointName"] not in made:
                made.add(parameters["EndpointName"])
                aws.carried_out("sagemaker", operation, parameters)  # and answered with 500, which boto3 asks again
            raise refused("ThrottlingException", "Rate exceeded")

    aws.fault = fault  # type: ignore[assignment]  # it answers nothing
    outcome = asyncio.run(Search(aws, catalogue, tmp_path).run())
    assert all("Rate exceeded" in standing.out for standing in outcome.standings)
    assert aws.left() == []


def test_what_was_refused_from_the_first_call_on_leaves_nothing_to_tell_of(
    aws: FakeAws, catalogue: Catalogue, tmp_path: Path
) -> None:
    def fault(operation: str, parameters: Mapping[str, Any]) -> None:
        raise refused("AccessDenied", f"not authorized to perform {operation}")

    aws.fault = fault  # type: ignore[assignment]  # it answers nothing
    search = Search(aws, catalogue, tmp_path)
    outcome = asyncio.run(search.run())
    assert outcome.standings[0].out.endswith("AccessDenied: not authorized to perform put_object")
    assert set(aws.calls) == {"put_object"}
    assert search.launcher.left_behind == []


@pytest.mark.parametrize("operation", ["create_model", "create_endpoint_config", "create_endpoint"])
def test_what_was_made_by_a_call_whose_answer_was_lost_is_used_and_removed(
    aws: FakeAws, catalogue: Catalogue, tmp_path: Path, operation: str
) -> None:
    def fault(asked: str, parameters: Mapping[str, Any]) -> None:
        if asked == operation and of(parameters).startswith("c5.large"):
            aws.carried_out("sagemaker", asked, parameters)
            raise refused("ValidationException", f"Cannot create already existing {operation.removeprefix('create_')}")

    aws.fault = fault  # type: ignore[assignment]  # it answers nothing
    outcome = asyncio.run(Search(aws, catalogue, tmp_path).run())
    assert not any(standing.out.startswith("did not start") for standing in outcome.standings)
    assert aws.left() == []


# What the platform measured.


def test_the_platforms_latencies_stand_beside_the_clients(aws: FakeAws, catalogue: Catalogue, tmp_path: Path) -> None:
    search = Search(aws, catalogue, tmp_path)
    search.service_ms = 4.0
    outcome = asyncio.run(search.run())
    runs = [run for standing in outcome.standings for run in standing.runs]
    cloudwatch = boto3.client("cloudwatch", region_name=REGION)
    told = runs[0]
    for metric, value in (("ModelLatency", 4_000.0), ("OverheadLatency", 1_500.0)):  # microseconds
        dimensions = [{"Name": "EndpointName", "Value": told.endpoint}, {"Name": "VariantName", "Value": "AllTraffic"}]
        data = {"MetricName": metric, "Dimensions": dimensions, "Timestamp": datetime.fromisoformat(told.began_at)}
        statistics = {"SampleCount": 100, "Sum": 100 * value, "Minimum": value, "Maximum": value}
        cloudwatch.put_metric_data(Namespace="AWS/SageMaker", MetricData=[{**data, "StatisticValues": statistics}])
    found = asyncio.run(with_platform(outcome, search.launcher))
    (run,) = [run for standing in found.standings for run in standing.runs if run.endpoint == told.endpoint][:1]
    assert isinstance(run, Measured)
    assert (run.model_latency_ms, run.overhead_latency_ms) == (4.0, 1.5)


# Before anything is paid for.


def test_candidates_that_cannot_work_are_refused_before_anything_is_made(aws: FakeAws, catalogue: Catalogue) -> None:
    candidates = [{"instances": ["c5.large", "c7g.large", "c8i.xlarge"], "backend": {"kind": "synthetic"}}]
    spec = example_spec(catalogue, candidates=candidates, launcher=LAUNCHER, budget={"usd": 5})
    assert isinstance(spec.launcher, SageMakerLauncher)
    quotas = {"c5.large": 2.0, "c7g.large": 1.0, "c8i.xlarge": 1.0}
    told = [{"QuotaName": f"ml.{name} for endpoint usage", "Value": value} for name, value in quotas.items()]
    aws.fault = lambda operation, parameters: {"Quotas": told} if operation == "list_service_quotas" else None
    launcher = SageMaker(spec.launcher, catalogue, spec.budget, aws=aws.door)
    found = {name.split()[0]: [each.field for each in reasons] for name, reasons in launcher.preflight(spec.candidates).items()}
    assert found == {"c5.large": [], "c7g.large": ["architecture"], "c8i.xlarge": ["instances", "price"]}
    assert not [call for call in aws.calls if not call.startswith("list_")]
    assert [launcher.quota(each) for each in spec.candidates] == [
        Quota(f"ml.{name}", most, 1) for name, most in zip(quotas, (2, 1, 1), strict=True)
    ]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (refused("404", "Not Found"), f"launcher.bucket: {BUCKET}: there is no such bucket: `aws s3 mb s3://{BUCKET} --region"),
        (
            refused("400", "Bad Request"),
            f"launcher.bucket: {BUCKET}: S3 answered 400: the credentials may have expired: sign in",
        ),
        (
            refused("403", "Forbidden"),
            f"launcher.bucket: {BUCKET}: S3 answered 403: expected a bucket of yours, credentials that",
        ),
        ({"BucketRegion": "eu-central-1"}, f"{BUCKET}: is in eu-central-1: expected one in launcher.region {REGION}"),
        (AwsRefused("AWS: s3.head_bucket: no credentials: expected those of an account"), "no credentials: expected those of"),
        ({"BucketRegion": REGION}, ""),
    ],
)
def test_a_search_begins_only_where_its_bucket_is_and_may_be_asked(
    aws: FakeAws, catalogue: Catalogue, tmp_path: Path, answer: AwsRefused | dict[str, Any], told: str
) -> None:
    def fault(operation: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        if isinstance(answer, AwsRefused):
            raise answer
        return answer

    aws.fault = fault
    launcher = Search(aws, catalogue, tmp_path).launcher
    with pytest.raises(LoadtestError, match=re.escape(told)) if told else contextlib.nullcontext():
        launcher.admit()
    assert set(aws.calls) == {"head_bucket"}


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"launcher": {**LAUNCHER, "role_arn": "me"}}, "launcher.role_arn: 'me'"),
        ({"launcher": {**LAUNCHER, "bucket": ""}}, "launcher.bucket: missing, expected the name of a bucket"),
        ({"launcher": {**LAUNCHER, "images": []}}, "launcher.images: missing, expected at least one"),
        ({"launcher": {**LAUNCHER, "subnets": ["s"]}}, "expected subnets and security_groups, or neither"),
        ({"payload": {"protocol": "grpc"}}, "payload.protocol: grpc: an endpoint is asked over HTTP"),
        ({"price": "ec2"}, "price: ec2: an endpoint costs SageMaker's price"),
        ({"model": {"name": "m"}}, "payload.files: missing: an endpoint does not tell what its model takes"),
        ({"candidates": [{"backend": {"kind": "synthetic"}}]}, "instances: missing, expected the types to launch"),
    ],
)
def test_a_spec_at_fault_is_told_before_aws_is_asked(catalogue: Catalogue, keys: dict[str, Any], told: str) -> None:
    candidates = [{"instances": ["c5.large"], "backend": {"kind": "synthetic"}}]
    with pytest.raises(UsageError) as raised:
        example_spec(catalogue, **({"candidates": candidates, "launcher": LAUNCHER} | keys))
    assert told in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1))
def test_a_process_that_is_killed_for_real_leaves_nothing_that_is_not_found(
    aws: FakeAws, account: None, tmp_path: Path, seed: int
) -> None:
    socket, run, last = str(tmp_path / "aws"), f"feed{seed}", random.Random(seed).randint(8, 28)
    command = [sys.executable, "-m", "tests.loadtest.sagemaker_process", socket, str(tmp_path), run]
    with Listener(socket, "AF_UNIX") as listener, subprocess.Popen(command) as process, listener.accept() as connection:
        for number in itertools.count(1):
            service, operation, parameters = connection.recv()
            try:
                answer: Any = aws.answer(service, operation, parameters)
            except AwsRefused as exc:
                answer = exc
            if number == last:
                process.kill()  # what it asked for took effect, and it never knew
                break
            connection.send(answer)
        assert process.wait() == -signal.SIGKILL
    assert aws.left() != []
    asyncio.run(reap(aws.living_door, run, [BUCKET], yes=True))
    assert aws.left() == []
