"""A whole search over machines of EC2, on moto: whatever goes wrong, nothing is left behind, and its cost is known."""

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.cli import main
from loadtest.commands.reap import reap
from loadtest.errors import LoadtestError, UsageError
from loadtest.lab.generating import GeneratorLost, LoadJob
from loadtest.lab.journal import Journal
from loadtest.lab.launchers.aws.endpoints import TAG_CANDIDATE, TAG_EXPIRES, TAG_RUN
from loadtest.lab.launchers.aws.machines import GENERATOR_UNIT
from loadtest.lab.launchers.aws.removal import NotRemoved
from loadtest.lab.launchers.ec2 import Ec2
from loadtest.lab.launchers.launcher import GENERATOR, StartFailed
from loadtest.prices.catalogue import Catalogue, load_catalogue
from loadtest.question.spec import SearchSpec
from loadtest.question.spec_file import Ec2Launcher
from loadtest.search.events import Measured, Profiled, TakenBack
from tests.deploying.machine_here import written
from tests.deploying.test_ec2_machine import schema, verified
from tests.loadtest.examples import example_spec
from tests.loadtest.fake_aws import BUCKET, IMAGE_ID, REGION, Killed, moto, packed, refused, seen
from tests.loadtest.fake_ec2 import FakeEc2, kit, subnet
from tests.loadtest.launched import LaunchedSearch, of

TYPES = ("c5.large", "m5.large", "c7a.xlarge")  # the last one is not on SageMaker


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


@pytest.fixture(scope="module")
def account() -> Iterator[None]:
    with moto():
        yield


@pytest.fixture
def aws(account: None) -> Iterator[FakeEc2]:
    """In an account in which nothing of ours is, neither before nor behind a test."""
    fake = FakeEc2()
    yield fake
    assert fake.left() == []


def keys_of(folder: Path, **launcher: Any) -> dict[str, Any]:
    place = {"kind": "ec2", "region": REGION, "subnet": subnet(), "bucket": BUCKET}
    return {**place, **kit(folder / "kit"), "parallel": 3, **launcher}


def spec_of(catalogue: Catalogue, folder: Path, **launcher: Any) -> SearchSpec:
    candidates = [{"instances": list(TYPES), "backend": {"kind": "synthetic"}}]
    budget = {"minutes": 60, "usd": 5}
    return example_spec(catalogue, candidates=candidates, launcher=keys_of(folder, **launcher), budget=budget)


class Search(LaunchedSearch):
    """Over machines."""

    def __init__(self, aws: FakeEc2, catalogue: Catalogue, folder: Path, **launcher: Any) -> None:
        spec = spec_of(catalogue, folder, **launcher)
        assert isinstance(spec.launcher, Ec2Launcher)
        self.launcher = Ec2(spec.launcher, catalogue, spec.budget, aws=aws.door, pack=packed, clock=aws.clock)
        super().__init__(aws, spec, self.launcher, folder)
        aws.measure = self.measure

    def events(self, kind: type) -> list[Any]:
        return [step.event for step in self.steps if isinstance(step.event, kind)]


class Faulty:
    """m5.large fails to start, c7a.xlarge is throttled for good."""

    def __init__(self, aws: FakeEc2) -> None:
        self._aws = aws
        self._failing = False

    def __call__(self, operation: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        if operation != "run_instances":
            return None
        if of(parameters).startswith("c7a.xlarge"):
            raise refused("RequestLimitExceeded", "Request limit exceeded.")
        if of(parameters).startswith("m5.large"):
            answer = self._aws.carried_out("ec2", operation, parameters)
            said = "pip: no space left on device\ngateway-setup: failed: pip returned 1\n"
            self._aws.says[answer["Instances"][0]["InstanceId"]] = said
            return answer
        return None


def test_a_search_goes_on_without_those_that_do_not_start_and_removes_all_that_it_made(
    aws: FakeEc2, catalogue: Catalogue, tmp_path: Path
) -> None:
    aws.fault = Faulty(aws)
    search = Search(aws, catalogue, tmp_path)
    search.service_ms = 4.0
    outcome = asyncio.run(search.run())
    assert outcome.winner == "c5.large synthetic"
    outs = {standing.entrant.name.split()[0]: standing.out for standing in outcome.standings}
    assert outs["m5.large"] == (
        "did not start: its setup failed: pip: no space left on device / gateway-setup: failed: pip returned 1"
    )
    assert outs["c7a.xlarge"] == "did not start: sagemaker: RequestLimitExceeded: Request limit exceeded."
    assert aws.left() == []
    assert search.launcher.left_behind == []
    assert outcome.usd == pytest.approx(search.launcher.purse.usd) == pytest.approx(search.journaled_usd)
    # Of the generator too, which was up all the time.
    assert outcome.usd > 0
    assert sum("generator" in str(each["TagSpecifications"]) for each in aws.started) == 1


class Packing:
    """`children`, for a command that is carried out here, and is then said to have failed: that is enough."""

    returncode = 1

    async def begin(self, *command: str, **options: object) -> "Packing":
        assert main([*command[3:]]) == 0
        return self

    async def communicate(self) -> tuple[bytes, bytes]:
        return b"", b""

    async def end(self, process: "Packing") -> None:
        pass


async def nothing_shared(launcher: Ec2) -> None:
    pass


def test_no_package_of_a_search_has_what_locks_the_doors_and_its_report_names_it(
    aws: FakeEc2, catalogue: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tls.crt", "tls.key", "keys.yaml", "code/inference.py"):
        (tmp_path / "m" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "m" / name).write_text("")
    tensors = {key: [{"name": key, "datatype": "FP32", "shape": [-1, 1]}] for key in ("inputs", "outputs")}
    backends = [{"kind": "python", "model": "m/code/inference.py:SageMakerHandlers"}]
    doors = {"tls": {"certificate": "m/tls.crt", "key": "m/tls.key"}, "access": {"keys": "m/keys.yaml"}}
    gateway = {"server": doors, "models": [{"name": "m", "max_rows": 4, **tensors, "backends": backends}]}
    (tmp_path / "gateway.yaml").write_text(yaml.safe_dump(gateway))
    candidates = [{"instances": ["c5.large"], "backend": "python"}]
    named = {"gateway": str(tmp_path / "gateway.yaml"), "model": "m", "budget": {"minutes": 60, "usd": 5}}
    spec = example_spec(catalogue, candidates=candidates, launcher=keys_of(tmp_path), **named)
    assert isinstance(spec.launcher, Ec2Launcher)
    monkeypatch.setattr("loadtest.lab.launchers.aws.packing.children", Packing())
    monkeypatch.setattr(Ec2, "_share", nothing_shared)
    launcher = Ec2(spec.launcher, catalogue, spec.budget, aws=aws.door, clock=aws.clock)
    with pytest.raises(StartFailed):
        asyncio.run(launcher.start(spec.candidates[0]))
    assert capsys.readouterr().out.split()[-3:] == ["gateway.yaml", "m/code/inference.py", "SHA256SUMS"]
    absolute = {part: {key: str(tmp_path / name) for key, name in files.items()} for part, files in doors.items()}
    assert spec.candidates[0].document["server"] == absolute  # as `gateway deploy` then has it


def test_what_is_measured_is_measured_beside_the_candidate(aws: FakeEc2, catalogue: Catalogue, tmp_path: Path) -> None:
    search = Search(aws, catalogue, tmp_path, parallel=1)
    search.service_ms = 4.0
    outcome = asyncio.run(search.run())
    assert outcome.winner == "c5.large synthetic"
    assert {type(job).__name__ for job in aws.jobs} == {"ProfileJob", "LoadJob"}
    loads = [job for job in aws.jobs if isinstance(job, LoadJob)]
    assert {job.spec.protocol for job in loads} == {"rest-binary"}
    assert all(job.spec.target.startswith(("http://10.", "http://172.")) and job.spec.target.endswith(":8000") for job in loads)
    assert all(job.statistics == job.spec.target for job in loads)


@pytest.mark.parametrize("seed", range(4))
def test_an_interrupt_in_the_middle_leaves_nothing_behind_and_tells_what_was_spent(
    aws: FakeEc2, catalogue: Catalogue, tmp_path: Path, seed: int
) -> None:
    aws.fault = Faulty(aws)
    search = Search(aws, catalogue, tmp_path)
    moment = random.Random(seed).randint(2, 60)

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
    if "run_instances" in aws.calls:
        assert search.journaled_usd == pytest.approx(search.launcher.purse.usd)


@pytest.mark.parametrize(
    ("dies_at", "takes_effect"),
    # Each kind of piece is made, candidates are measured, and each kind is deleted.
    [*((each, True) for each in (2, 4, 7, 8, 13, 17, 31, 41, 45, 56)), (22, False), (30, False)],
)
def test_what_a_killed_search_leaves_behind_is_found_and_removed_by_its_tags(
    aws: FakeEc2, catalogue: Catalogue, tmp_path: Path, dies_at: int, takes_effect: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    aws.dies_at, aws.takes_effect = dies_at, takes_effect
    search = Search(aws, catalogue, tmp_path)
    with pytest.raises((Killed, BaseExceptionGroup)):
        asyncio.run(search.run())
    assert aws.dead
    left = aws.left()
    run = search.launcher.run_id
    if dies_at == 31:
        assert asyncio.run(reap(aws.living_door, run, [BUCKET], yes=False)) == 0
        assert asyncio.run(reap(aws.living_door, None, [BUCKET], yes=True)) == 0
        assert aws.left() == left  # dry by default; and its time is not over
    capsys.readouterr()
    asyncio.run(reap(aws.living_door, run, [BUCKET], yes=True))
    shown = capsys.readouterr().out
    assert all(name in shown for name in left)
    assert aws.left() == []


# Spot.


def taken_back(aws: FakeEc2, candidate: str, times: int) -> Callable[[str, Mapping[str, Any]], dict[str, Any] | None]:
    """EC2 takes a candidate's machine back, under load, so many times."""
    instances: dict[str, str] = {}
    gone: set[str] = set()
    loaded = 0

    def before_job(job: Any) -> None:
        nonlocal loaded
        if isinstance(job, LoadJob) and job.spec.label.startswith(candidate) and loaded < times:
            loaded += 1
            gone.add(list(instances)[-1])

    def fault(operation: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        if operation == "run_instances" and of(parameters).startswith(candidate):
            answer = aws.carried_out("ec2", operation, parameters)
            instances[answer["Instances"][0]["InstanceId"]] = candidate
            return answer
        if operation == "describe_instances" and (named := parameters.get("InstanceIds", [""])[0]) in gone:
            code = "Server.SpotInstanceTermination"
            reason = {"Code": code, "Message": f"{code}: Spot instance termination"}
            state = {"Name": "terminated", "Code": 48}
            return {"Reservations": [{"Instances": [{"InstanceId": named, "State": state, "StateReason": reason}]}]}
        return None

    aws.before_job = before_job
    return fault


def test_a_spot_machine_taken_back_in_mid_run_is_no_evidence_and_is_started_again(
    aws: FakeEc2, catalogue: Catalogue, tmp_path: Path
) -> None:
    aws.fault = taken_back(aws, "c5.large", 1)
    search = Search(aws, catalogue, tmp_path, spot=True)
    search.service_ms = 4.0
    outcome = asyncio.run(search.run())
    (lost,) = search.events(TakenBack)
    assert lost.entrant == "c5.large synthetic"
    assert lost.why == "EC2 took its spot machine back: Server.SpotInstanceTermination: Spot instance termination"
    standing = next(standing for standing in outcome.standings if standing.entrant.name == lost.entrant)
    assert not standing.out.startswith("did")
    assert standing.runs
    assert all(not run.failure for run in standing.runs)
    told = "the machine of ", "c5.large synthetic", " was taken back 1 time, and another was started"
    assert told in outcome.notes
    assert sum(of(each).startswith("c5.large") for each in aws.started) == 2
    assert aws.left() == []
    for each in aws.started:  # who measures is not on spot
        assert ("InstanceMarketOptions" in each) is (of(each) != "generator")
    assert outcome.usd == pytest.approx(search.launcher.purse.usd) == pytest.approx(search.journaled_usd)
    journal = Journal(search.journal, search.question, resume=True)
    journal.close()
    assert lost in journal.events
    assert {candidate.basis for candidate in search.spec.candidates} == {"spot"}


def test_who_is_taken_back_again_and_again_is_left_out(aws: FakeEc2, catalogue: Catalogue, tmp_path: Path) -> None:
    aws.fault = taken_back(aws, "c5.large", 99)
    search = Search(aws, catalogue, tmp_path, spot=True)
    search.service_ms = 4.0
    outcome = asyncio.run(search.run())
    assert len(search.events(TakenBack)) == 2
    standing = next(standing for standing in outcome.standings if standing.entrant.name.startswith("c5.large"))
    assert standing.out.endswith("Spot instance termination; so it was 2 times before")
    assert outcome.winner is not None
    assert not outcome.winner.startswith("c5.large")
    assert outcome.usd == pytest.approx(search.journaled_usd)


def test_the_notice_two_minutes_before_counts_as_well(aws: FakeEc2, catalogue: Catalogue, tmp_path: Path) -> None:
    told: list[int] = []

    def fault(operation: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        if operation == "describe_spot_instance_requests" and not told:
            told.append(1)
            return {"SpotInstanceRequests": [{"Status": {"Code": "marked-for-termination"}}]}
        return None

    aws.fault = fault
    search = Search(aws, catalogue, tmp_path, spot=True, parallel=1)
    asyncio.run(search.run())
    (lost,) = search.events(TakenBack)
    assert lost.why == "EC2 takes its spot machine back, and has given two minutes' notice"
    assert len(search.events(Profiled)) == 3


def test_a_machine_that_ends_for_another_reason_is_told_so(aws: FakeEc2, catalogue: Catalogue, tmp_path: Path) -> None:
    fault = taken_back(aws, "c5.large", 1)

    def other(operation: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        answer = fault(operation, parameters)
        if answer and operation == "describe_instances":
            answer["Reservations"][0]["Instances"][0]["StateReason"] = {"Code": "Client.UserInitiatedShutdown", "Message": "X"}
        return answer

    aws.fault = other
    search = Search(aws, catalogue, tmp_path, parallel=1)
    search.service_ms = 4.0
    outcome = asyncio.run(search.run())
    assert search.events(TakenBack) == []
    assert any(run.failure == "its machine is terminated: X" for run in search.events(Measured))
    assert outcome.usd == pytest.approx(search.journaled_usd)


def test_a_machine_whose_start_was_not_answered_is_asked_for_again(aws: FakeEc2, catalogue: Catalogue, tmp_path: Path) -> None:
    answers: dict[str, dict[str, Any]] = {}

    def fault(operation: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        if operation != "run_instances":
            return None
        token = parameters["ClientToken"]
        if token not in answers:
            answers[token] = aws.carried_out("ec2", operation, parameters)
            raise refused("", "Read timeout")
        return answers[token]

    aws.fault = fault
    outcome = asyncio.run(Search(aws, catalogue, tmp_path).run())
    assert not any(standing.out.startswith("did not start") for standing in outcome.standings)
    assert len(aws.started) == 2 * len(answers) == 2 * (len(TYPES) + 1)
    assert aws.left() == []


@pytest.mark.parametrize("then", ["", "RequestLimitExceeded"])
def test_a_machine_whose_start_was_never_answered_is_found_and_used(
    aws: FakeEc2, catalogue: Catalogue, tmp_path: Path, then: str
) -> None:
    asked: set[str] = set()

    def fault(operation: str, parameters: Mapping[str, Any]) -> None:
        if operation != "run_instances":
            return
        code = then
        if parameters["ClientToken"] not in asked:
            asked.add(parameters["ClientToken"])
            aws.carried_out("ec2", operation, parameters)
            code = ""
        raise refused(code, "Read timeout")

    aws.fault = fault  # type: ignore[assignment]  # it answers nothing
    outcome = asyncio.run(Search(aws, catalogue, tmp_path).run())
    assert not any(standing.out.startswith("did not start") for standing in outcome.standings)
    assert len(asked) == len(TYPES) + 1
    assert aws.left() == []


@pytest.mark.parametrize("operation", ["describe_instances", "head_object"])
def test_machines_that_start_while_nobody_answers_for_a_while_are_measured(
    aws: FakeEc2, catalogue: Catalogue, tmp_path: Path, operation: str
) -> None:
    def fault(asked: str, parameters: Mapping[str, Any]) -> None:
        if asked == operation and aws.now_s < 120:
            raise refused("", "Connect timeout")

    aws.fault = fault  # type: ignore[assignment]  # it answers nothing
    outcome = asyncio.run(Search(aws, catalogue, tmp_path).run())
    assert not any(standing.out.startswith("did not start") for standing in outcome.standings)
    assert aws.left() == []


@pytest.mark.parametrize("operation", ["describe_instances", "head_object"])
def test_machines_are_waited_for_no_longer_where_nobody_answers(
    aws: FakeEc2, catalogue: Catalogue, tmp_path: Path, operation: str
) -> None:
    def fault(asked: str, parameters: Mapping[str, Any]) -> None:
        if asked == operation and not aws.calls.count("terminate_instances"):
            aws.now_s += 45  # four tries of boto3's, each with ten seconds to connect
            raise refused("", "Connect timeout")

    async def of_one_candidate() -> None:
        with pytest.raises(LoadtestError, match=r"did not answer within launcher\.start_timeout_s 600|does not ask for jobs"):
            await search.launcher.start(search.spec.candidates[0])
        took_s = aws.now_s
        await search.launcher.close()
        assert took_s <= 2 * (600 + 10 + 45 + 10)  # of two machines, whose pauses add up on this clock

    aws.fault = fault  # type: ignore[assignment]  # it answers nothing
    search = Search(aws, catalogue, tmp_path, start_timeout_s=600)
    asyncio.run(of_one_candidate())
    assert aws.left() == []


def test_a_machine_that_no_call_has_started_is_waited_for_no_longer_than_a_minute(
    aws: FakeEc2, catalogue: Catalogue, tmp_path: Path
) -> None:
    def fault(operation: str, parameters: Mapping[str, Any]) -> None:
        if operation == "run_instances" and of(parameters).startswith("m5.large"):
            raise refused("", "Read timeout")

    aws.fault = fault  # type: ignore[assignment]  # it answers nothing
    search = Search(aws, catalogue, tmp_path, parallel=1)
    outcome = asyncio.run(search.run())
    outs = {standing.entrant.name.split()[0]: standing.out for standing in outcome.standings}
    assert "Read timeout" in outs["m5.large"]
    assert [name for name in ("c5.large", "c7a.xlarge") if outs[name].startswith("did not start")] == []
    assert outcome.usd == pytest.approx(search.journaled_usd)


# The load generator.


def test_a_generator_that_does_not_start_ends_the_search_and_nothing_is_left(
    aws: FakeEc2, catalogue: Catalogue, tmp_path: Path
) -> None:
    def fault(operation: str, parameters: Mapping[str, Any]) -> None:
        if operation == "run_instances" and of(parameters) == "generator":
            raise refused("InsufficientInstanceCapacity", "no c7i.xlarge is to be had")

    aws.fault = fault  # type: ignore[assignment]  # it answers nothing
    search = Search(aws, catalogue, tmp_path)
    with pytest.raises(GeneratorLost, match=r"the load generator did not start: .*no c7i.xlarge is to be had"):
        asyncio.run(search.run())
    assert aws.left() == []
    assert search.journaled_usd == pytest.approx(search.launcher.purse.usd)


def test_a_generator_that_falls_silent_ends_the_search(aws: FakeEc2, catalogue: Catalogue, tmp_path: Path) -> None:
    def fault(operation: str, parameters: Mapping[str, Any]) -> None:
        if operation == "get_object" and "/results/" in parameters["Key"]:
            raise refused("NoSuchKey", "there is none")

    aws.fault = fault  # type: ignore[assignment]  # it answers nothing
    search = Search(aws, catalogue, tmp_path)
    with pytest.raises(GeneratorLost, match="the load generator did not answer within"):
        asyncio.run(search.run())
    assert aws.left() == []


# Guard rails.


def test_everything_has_the_tags_of_its_run_with_an_expiry(aws: FakeEc2, catalogue: Catalogue, tmp_path: Path) -> None:
    seen: dict[str, list[dict[str, str]]] = {}

    def fault(operation: str, parameters: Mapping[str, Any]) -> None:
        for each in parameters.get("TagSpecifications", ()):
            seen.setdefault(each["ResourceType"], []).append({tag["Key"]: tag["Value"] for tag in each["Tags"]})
        if operation.startswith("create_") and "Tags" in parameters:
            seen.setdefault(operation, []).append({tag["Key"]: tag["Value"] for tag in parameters["Tags"]})
        if operation == "put_object":
            tagged = dict(pair.split("=") for pair in parameters["Tagging"].split("&"))
            seen.setdefault(operation, []).append({key.replace("%3A", ":"): value for key, value in tagged.items()})

    aws.fault = fault  # type: ignore[assignment]  # it answers nothing
    search = Search(aws, catalogue, tmp_path, spot=True)
    asyncio.run(search.run())
    kinds = {"security-group", "instance", "volume", "network-interface", "spot-instances-request"}
    assert set(seen) == kinds | {"put_object", "create_role", "create_instance_profile"}
    for tags in (tags for each in seen.values() for tags in each):
        assert tags[TAG_RUN] == search.launcher.run_id
        assert {TAG_EXPIRES, TAG_CANDIDATE} <= set(tags)
    ends = datetime.fromisoformat(seen["instance"][0][TAG_EXPIRES])
    assert timedelta(hours=2) < ends - datetime.now(UTC) < timedelta(hours=4)  # an hour's budget, and two
    assert {tags[TAG_CANDIDATE].split()[0] for tags in seen["instance"]} == {"generator", *TYPES}


def test_a_machine_ends_itself_when_nobody_is_left(aws: FakeEc2, catalogue: Catalogue, tmp_path: Path) -> None:
    search = Search(aws, catalogue, tmp_path)
    asyncio.run(search.run())
    assert len(aws.started) == 4
    for each in aws.started:
        assert each["InstanceInitiatedShutdownBehavior"] == "terminate"
        document = yaml.safe_load(each["UserData"])
        ((*timer, on_active, _, _),) = document["bootcmd"]
        assert timer[0] == "systemd-run"
        seconds = int(on_active.removeprefix("--on-active="))
        assert 3 * 3600 - 600 < seconds <= 3 * 3600
        assert document["runcmd"][0] == ["shutdown", "-P", f"+{-(-seconds // 60)}"]
        assert "KeyName" not in each
        assert each["MetadataOptions"]["HttpTokens"] == "required"


def test_the_machines_reach_each_other_and_nobody_else_reaches_them(aws: FakeEc2, catalogue: Catalogue, tmp_path: Path) -> None:
    rules: list[Mapping[str, Any]] = []
    policies: list[str] = []

    def fault(operation: str, parameters: Mapping[str, Any]) -> None:
        if operation == "authorize_security_group_ingress":
            rules.append(parameters)
        if operation == "put_role_policy":
            policies.append(parameters["PolicyDocument"])

    aws.fault = fault  # type: ignore[assignment]  # it answers nothing
    search = Search(aws, catalogue, tmp_path)
    asyncio.run(search.run())
    (asked,) = rules
    (rule,) = asked["IpPermissions"]
    assert rule["UserIdGroupPairs"] == [{"GroupId": asked["GroupId"]}]
    assert (rule["FromPort"], rule["ToPort"]) == (8000, 8001)
    assert not {"IpRanges", "Ipv6Ranges", "PrefixListIds"} & set(rule)
    for each in aws.started:
        assert each["SecurityGroupIds"] == [asked["GroupId"]]
    (statements,) = (json.loads(text)["Statement"] for text in policies)
    assert statements[0]["Resource"] == f"arn:aws:s3:::{BUCKET}/serving-gateway/loadtest-{search.launcher.run_id}-ec2/*"


@pytest.mark.slow
@pytest.mark.debian("cloud-init")
@pytest.mark.debian("systemd")
def test_cloud_init_and_systemd_take_what_both_are_told(aws: FakeEc2, catalogue: Catalogue, tmp_path: Path) -> None:
    search = Search(aws, catalogue, tmp_path, parallel=1)
    asyncio.run(search.run())
    told = {of(each).split()[0]: each["UserData"] for each in aws.started}
    for name in ("generator", "c5.large"):
        (tmp_path / name).write_text(told[name])
        done = schema(tmp_path / name)
        assert done.returncode == 0, done.stderr
    unit = written(told["generator"])[f"/etc/systemd/system/{GENERATOR_UNIT}"]
    assert verified(tmp_path, unit.replace("/bin/loadtest", "/bin/gateway")) == ""
    assert "%%3A" in unit  # as systemd reads a percent sign
    assert "IPAddressDeny=169.254.169.254" not in unit  # it asks for the role's keys
    assert "IPAddressDeny=169.254.169.254" in told["c5.large"]


def test_what_could_exceed_the_money_is_not_started_the_generator_counted(
    aws: FakeEc2, catalogue: Catalogue, tmp_path: Path
) -> None:
    search = Search(aws, catalogue, tmp_path)
    # 360 s of c5.large alone at $0.085/h would cost $0.0085, with the generator at $0.1785/h $0.026
    search.launcher.purse.max_usd = 0.02
    outcome = asyncio.run(search.run())
    assert "run_instances" not in aws.calls
    assert all("its start could exceed --max-usd" in standing.out for standing in outcome.standings)


def test_a_start_that_takes_too_long_is_ended_with_what_its_console_said(
    aws: FakeEc2, catalogue: Catalogue, tmp_path: Path
) -> None:
    def fault(operation: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        if operation == "run_instances" and of(parameters) != "generator":
            answer = aws.carried_out("ec2", operation, parameters)
            aws.says[answer["Instances"][0]["InstanceId"]] = "installing\n"
            return answer
        return None

    aws.fault = fault
    search = Search(aws, catalogue, tmp_path, start_timeout_s=300, parallel=1)
    outcome = asyncio.run(search.run())
    assert outcome.standings[0].out == "did not start: did not answer within launcher.start_timeout_s 300: installing"
    assert aws.left() == []


def test_what_cannot_be_removed_is_told_with_the_command_that_tries_again(
    aws: FakeEc2, catalogue: Catalogue, tmp_path: Path
) -> None:
    def fault(operation: str, parameters: Mapping[str, Any]) -> None:
        if operation == "delete_security_group":
            raise refused("UnauthorizedOperation", "not authorized to perform ec2:DeleteSecurityGroup")

    aws.fault = fault  # type: ignore[assignment]  # it answers nothing
    search = Search(aws, catalogue, tmp_path)
    asyncio.run(search.run())
    (told,) = search.launcher.left_behind
    assert told.endswith(f"`{search.launcher.reaped_by}` tries again")
    (group,) = aws.left()
    assert group in told
    asyncio.run(reap(aws.living_door, search.launcher.run_id, [BUCKET], yes=True))
    assert aws.left() == []


def test_a_machine_whose_removal_is_not_answered_counts_on_until_it_is_gone(
    aws: FakeEc2, catalogue: Catalogue, tmp_path: Path
) -> None:
    search = Search(aws, catalogue, tmp_path)
    launcher = search.launcher

    def silent(operation: str, parameters: Mapping[str, Any]) -> None:
        if operation == "terminate_instances":
            raise refused("", "Connect timeout")

    async def of_one_candidate() -> None:
        started = await launcher.start(search.spec.candidates[0])
        aws.fault = silent  # type: ignore[assignment]  # it answers nothing
        await started.stop()
        names = [f"loadtest-{launcher.run_id}-001", GENERATOR]
        assert [launcher.purse.runs(name) for name in names] == [True, True]
        await launcher.close()
        assert [launcher.purse.runs(name) for name in names] == [True, True]
        aws.fault = lambda operation, parameters: None
        await launcher.close()
        assert [launcher.purse.runs(name) for name in names] == [False, False]

    asyncio.run(of_one_candidate())
    assert launcher.left_behind == []
    assert aws.left() == []


def test_a_search_with_a_profile_of_ones_own_needs_no_rights_of_iam(aws: FakeEc2, catalogue: Catalogue, tmp_path: Path) -> None:
    def fault(operation: str, parameters: Mapping[str, Any]) -> None:
        if "role" in operation or "instance_profile" in operation:
            raise refused("AccessDenied", f"not authorized to perform {operation}")

    aws.fault = fault  # type: ignore[assignment]  # it answers nothing
    search = Search(aws, catalogue, tmp_path, instance_profile="mine")
    asyncio.run(search.run())
    assert search.launcher.left_behind == []
    assert aws.left() == []


def test_a_service_that_does_not_answer_at_the_end_is_told_and_the_others_are_cleared(
    aws: FakeEc2, catalogue: Catalogue, tmp_path: Path
) -> None:
    def fault(operation: str, parameters: Mapping[str, Any]) -> None:
        if operation == "describe_volumes":
            raise refused("", "Read timeout")

    aws.fault = fault  # type: ignore[assignment]  # it answers nothing
    search = Search(aws, catalogue, tmp_path)
    asyncio.run(search.run())
    (told,) = search.launcher.left_behind
    assert told.startswith("what is left in EC2 could not be listed: ")
    assert told.endswith(f"`{search.launcher.reaped_by}` tries again")
    assert aws.left() == []


def test_reap_says_what_it_may_not_look_at_and_goes_on(aws: FakeEc2, caplog: pytest.LogCaptureFixture) -> None:
    def fault(operation: str, parameters: Mapping[str, Any]) -> None:
        if operation == "describe_instances":
            raise refused("UnauthorizedOperation", "not authorized")

    aws.fault = fault  # type: ignore[assignment]  # it answers nothing
    assert asyncio.run(reap(aws.door, "abc1", [BUCKET], yes=True)) == 0
    assert "list_roles" in aws.calls


def standing(run: str) -> str:
    """A machine of a run whose time is over, which costs money. Returns its id."""
    tags = [{"Key": TAG_RUN, "Value": run}, {"Key": TAG_EXPIRES, "Value": "2020-01-01T00:00:00+00:00"}]
    tagged = [{"ResourceType": "instance", "Tags": tags}]
    asked = {"ImageId": IMAGE_ID, "MinCount": 1, "MaxCount": 1, "InstanceType": "m5.large"}
    found: str = seen("ec2", "run_instances", **asked, TagSpecifications=tagged)["Instances"][0]["InstanceId"]
    return found


@pytest.mark.parametrize("run", ["1111aaaa", None])
def test_what_others_remove_while_it_is_looked_at_keeps_nothing_from_removal(aws: FakeEc2, run: str | None) -> None:
    machine = standing("1111aaaa")
    model, role, key = "loadtest-2222bbbb-001-abc", "loadtest-2222bbbb", "serving-gateway/loadtest-2222bbbb-ec2/ready"
    gone = {
        "list_endpoint_configs": {"EndpointConfigs": [{"EndpointConfigName": model, "EndpointConfigArn": 30 * "arn:"}]},
        "list_tags": ("ValidationException", "Could not find it."),
        "list_instance_profiles": {"InstanceProfiles": [{"InstanceProfileName": role}]},
        "get_instance_profile": ("NoSuchEntity", "It cannot be found."),
        "list_roles": {"Roles": [{"RoleName": role}]},
        "get_role": ("NoSuchEntity", "It cannot be found."),
        "list_objects_v2": {"Contents": [{"Key": key}]},
        "get_object_tagging": ("NoSuchKey", "The specified key does not exist."),
    }

    def fault(operation: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        answer = gone.get(operation)
        if isinstance(answer, tuple):
            raise refused(*answer)
        return answer

    aws.fault = fault
    assert machine in aws.left()
    assert asyncio.run(reap(aws.door, run, [BUCKET], yes=True)) == 0
    assert aws.left() == []
    assert ("get_role" in aws.calls) == (run is None)  # else its name says that it is another run's


@pytest.mark.parametrize("operation", ["list_endpoints", "describe_volumes", "list_roles", "list_objects_v2"])
def test_what_is_found_is_removed_also_where_a_service_does_not_answer(
    aws: FakeEc2, capsys: pytest.CaptureFixture[str], operation: str
) -> None:
    standing("1111aaaa")

    def fault(asked: str, parameters: Mapping[str, Any]) -> None:
        if asked == operation:
            raise refused("", "Read timeout")

    aws.fault = fault  # type: ignore[assignment]  # it answers nothing
    with pytest.raises(NotRemoved, match="what is left there is not known"):
        asyncio.run(reap(aws.door, "1111aaaa", [BUCKET], yes=True))
    assert aws.left() == []
    with pytest.raises(NotRemoved, match="what is left there is not known"):
        asyncio.run(reap(aws.door, "1111aaaa", [BUCKET], yes=True))
    assert "nothing of run" not in capsys.readouterr().out


# Before anything is paid for.


def test_only_what_the_account_lets_run_in_the_subnets_zone_is_started(
    aws: FakeEc2, catalogue: Catalogue, tmp_path: Path
) -> None:
    name = "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances"

    def fault(operation: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        if operation == "list_service_quotas":
            return {"Quotas": [{"QuotaName": name, "Value": 5.0}]}
        if operation == "describe_instance_type_offerings":
            return {"InstanceTypeOfferings": [{"InstanceType": name} for name in ("c5.large", "m5.large", "c7i.xlarge")]}
        return None

    aws.fault = fault
    search = Search(aws, catalogue, tmp_path)
    found = {name.split()[0]: [*map(str, why)] for name, why in search.launcher.preflight(search.spec.candidates).items()}
    zone = seen("ec2", "describe_subnets", SubnetIds=[subnet()])["Subnets"][0]["AvailabilityZone"]
    quota = (
        "quota: 5 vCPUs, expected room for the 2 vCPUs of c5.large, and 4 of the load generator: "
        f"ask for more: Service Quotas, EC2, {name}"
    )
    assert found["c5.large"] == [quota]
    offer = f"instances: c7a.xlarge is not offered in {zone}, where launcher.subnet is, expected a type that is: another subnet"
    assert found["c7a.xlarge"][0].startswith(offer)
    assert set(aws.calls) <= {
        "describe_subnets", "describe_instance_type_offerings", "list_service_quotas", "describe_instances"
    }  # fmt: skip


def test_a_subnet_that_there_is_not_is_the_specs_fault(aws: FakeEc2, catalogue: Catalogue, tmp_path: Path) -> None:
    search = Search(aws, catalogue, tmp_path, subnet="subnet-0123456789abcdef0")
    with pytest.raises(UsageError, match=r"launcher.subnet: subnet-0123456789abcdef0: there is none in us-east-1"):
        search.launcher.preflight(search.spec.candidates)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"subnet": "net"}, "launcher.subnet: 'net': expected subnet-ID"),
        ({"bucket": ""}, "launcher.bucket: missing, expected the name of a bucket"),
        ({"wheel": "none.whl"}, "launcher.wheel: 'none.whl': expected the gateway's wheel"),
        ({"locks": ""}, "launcher.locks: missing, expected the folder docker"),
        ({"locks": "/"}, "launcher.locks: '/': no requirements-cpu.lock: expected the folder docker"),
        ({"generator": "c7.none"}, "launcher.generator: 'c7.none': expected a type such as c7i.xlarge"),
        ({"spot": True, "price": "ec2"}, "price: ec2: machines on spot cost EC2's price: expected spot"),
    ],
)
def test_a_spec_at_fault_is_told_before_aws_is_asked(
    account: None, catalogue: Catalogue, tmp_path: Path, keys: dict[str, Any], told: str
) -> None:
    rest = {"price": keys.pop("price")} if "price" in keys else {}
    launcher = keys_of(tmp_path, **keys)
    candidates = [{"instances": ["c5.large"], "backend": {"kind": "synthetic"}}]
    with pytest.raises(UsageError) as raised:
        example_spec(catalogue, candidates=candidates, launcher=launcher, **rest)
    assert told in str(raised.value)
