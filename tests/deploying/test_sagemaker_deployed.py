"""`gateway deploy sagemaker --yes`, `status` and `undeploy`, on an AWS in memory: nothing is left behind unsaid."""

import copy
import datetime
import json
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import boto3
import pytest
import yaml
from botocore.exceptions import (
    BotoCoreError,
    CredentialRetrievalError,
    NoCredentialsError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)

from gateway.aws.client import Aws
from gateway.aws.deployment import Deploying
from gateway.aws.standing import standing
from gateway.cli import main
from gateway.deploying.sagemaker import creation
from gateway.deploying.sagemaker_standing import removal
from gateway.deploying.sagemaker_update import update
from gateway.errors import PlatformRefused
from tests.deploying.fake_aws import LOST, NOW, REPEATED, RUNNING, FakeAws, Refused
from tests.deploying.test_sagemaker_plan import HOSTING, IRIS, PLACE, ROOT

SCALED = (*PLACE, "--instance-type", "ml.c7i.large", "--requests-per-second", "200", "--yes")
OBJECTS = ["put_object", "create_model", "create_endpoint_config", "create_endpoint"]
MADE = [*OBJECTS, "register_scalable_target", "put_scaling_policy"]
LISTING = {"s3:ListObjectsV2", "s3:HeadBucket"}  # of s3:ListBucket
DENIED = Refused("AccessDeniedException", "User: arn:aws:iam::123456789012:user/me is not authorized to perform that")


@pytest.fixture
def aws() -> Iterator[FakeAws]:
    with FakeAws().serving() as fake:
        yield fake


def said(capsys: pytest.CaptureFixture[str], *typed: str, code: int = 0) -> str:
    """Standard output and standard error of a command."""
    assert main([*typed]) == code
    out, err = capsys.readouterr()
    return out + err


def deployed(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> str:
    return said(capsys, "deploy", "sagemaker", str(IRIS), *SCALED, *options, code=code)


def test_what_was_planned_is_made_in_that_order_and_told(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    told = deployed(capsys)
    assert aws.changed == MADE
    assert "iris: InService in us-east-1, since 2026-11-24 04:00 UTC" in told
    assert "instances: 1 × ml.c7i.large" in told
    assert "scaled: between 1 and 2, at 6000 requests a minute each" in told
    assert "cost: 0.1071 USD an hour now, 78.18 USD a month, estimated\n" in told
    assert "These are prices" not in told
    assert "`gateway undeploy iris --region us-east-1 --on sagemaker --bucket my-models --yes` removes it." in told


def test_what_it_costs_in_another_region_is_told_as_prices_of_the_known_one(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeAws().serving("eu-central-1") as aws:
        aws.buckets = {"my-models": "eu-central-1"}
        image = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/gateway:cpu"
        told = deployed(capsys, "--image", image, "--region", "eu-central-1")
        assert told.count("These are prices of us-east-1; eu-central-1 has its own") == 2  # before and behind
        assert "  These are prices of us-east-1; eu-central-1 has its own\n" in said(capsys, "status", "iris")


def test_the_package_in_the_bucket_is_the_one_that_the_model_names(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    deployed(capsys)
    ((bucket, key),) = aws.objects
    (model,) = aws.models.values()
    assert model["PrimaryContainer"]["ModelDataUrl"] == f"s3://{bucket}/{key}"
    assert aws.objects[bucket, key]["body"][:2] == b"\x1f\x8b"  # gzip


def test_undeploy_removes_all_of_it_and_nothing_else(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    deployed(capsys, "--name", "iris-2")
    others = aws.standing
    deployed(capsys)
    told = said(capsys, "undeploy", "iris")
    assert "Nothing was removed: --yes makes these calls." in told
    assert len(aws.standing) == 2 * len(others)
    said(capsys, "undeploy", "iris", "--yes")
    assert aws.standing == others
    assert "iris: nothing stands of it in us-east-1." in said(capsys, "undeploy", "iris", "--yes")


REMOVALS = {
    "deregister_scalable_target": "Scale it no more",
    "delete_alarms": "Remove its alarms",
    "delete_endpoint_config": "Remove the endpoint's configuration iris-",
    "delete_model": "Remove the model iris-",
    "delete_object": "Remove the package s3://my-models/",
}


@pytest.mark.parametrize("failing", REMOVALS)
def test_a_removal_that_is_refused_keeps_nothing_else_and_is_named(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], failing: str
) -> None:
    deployed(capsys)
    deployed(capsys, *UPDATE)
    aws.refuse[failing] = DENIED
    told = said(capsys, "undeploy", "iris", "--yes", code=1)
    again = "gateway undeploy iris --region us-east-1 --bucket my-models --yes"
    assert re.search(rf"Not done, as far as is known: {REMOVALS[failing]}[^;]*(; {REMOVALS[failing]}[^;]*)?\. `{again}`", told)
    assert aws.endpoints == {}
    aws.refuse.clear()
    said(capsys, *again.split()[1:])
    assert aws.standing == []


def test_what_an_endpoint_needs_that_cannot_be_removed_is_left_and_named(
    aws: FakeAws, capsys: pytest.CaptureFixture[str]
) -> None:
    deployed(capsys)
    aws.refuse["delete_endpoint"] = DENIED
    told = said(capsys, "undeploy", "iris", "--yes", code=1)
    assert aws.changed[len(MADE) :] == ["deregister_scalable_target", "delete_endpoint"]
    whys = "Remove the endpoint iris, which costs; Remove the endpoint's configuration iris-.*; Remove the model iris-.*; "
    assert re.search(f"Not done, as far as is known: {whys}Remove the package s3://.*. `gateway undeploy iris", told)


@pytest.mark.parametrize("failing", ["deregister_scalable_target", "delete_endpoint"])
def test_a_service_that_does_not_answer_keeps_no_endpoint_of_another(aws: FakeAws, failing: str) -> None:
    carrying_out(aws)
    calls = removal(standing(Aws(), "iris"))
    aws.refuse[failing] = Refused("InternalFailure", "x", 500)
    time = Time()
    with pytest.raises(PlatformRefused, match=r"Not done, as far as is known: .*\. `undeploy` removes what is left\."):
        Deploying(Aws(), sleep=time.sleep, now_s=lambda: time.now_s).remove(calls, remedy="`undeploy`")
    assert list(aws.endpoints) == ["iris"] * (failing == "delete_endpoint")
    assert time.now_s == 300  # the rest would not be answered either


def test_a_session_that_ends_while_all_is_removed_says_what_is_left(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    def signed_out() -> None:
        raise NoCredentialsError

    deployed(capsys)
    aws.before["delete_endpoint"] = signed_out
    told = said(capsys, "undeploy", "iris", "--yes", code=1)
    assert "no credentials" in told
    assert "Not done, as far as is known: Remove the endpoint iris, which costs; Remove the endpoint's configuration" in told
    assert aws.changed[-1] == "delete_endpoint"


@pytest.mark.parametrize("operation", ["delete_endpoint", "describe_endpoint"])
def test_ctrl_c_while_all_is_removed_says_what_may_be_left(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], operation: str
) -> None:
    deployed(capsys)
    aws.before["deregister_scalable_target"] = lambda: interrupted(aws, operation)
    told = said(capsys, "undeploy", "iris", "--yes", code=130)
    whys = "Remove the endpoint iris, which costs; Remove the endpoint's configuration iris-.*; Remove the model iris-.*; "
    assert re.search(
        rf"Ended by Ctrl-C\. Not done, as far as is known: {whys}Remove the package .*`gateway undeploy iris", told
    )


QUESTIONS = (
    "list_models", "describe_model", "list_endpoint_configs", "describe_endpoint_config", "describe_scalable_targets",
    "describe_alarms", "list_transform_jobs", "list_objects_v2", "get_object_tagging", "head_bucket",
)  # fmt: skip


@pytest.mark.parametrize("denied", QUESTIONS)
def test_whichever_question_is_denied_the_endpoint_is_told_and_removed(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], denied: str
) -> None:
    deployed(capsys)
    aws.refuse[denied] = DENIED
    told = said(capsys, "status", "iris")
    assert "iris: InService in us-east-1" in told
    assert re.search(rf"not looked at: .*{denied}: AccessDeniedException", told)
    told = said(capsys, "undeploy", "iris", "--yes", code=1)
    assert "What was seen of iris is removed from us-east-1. What was not looked at may stand." in told
    assert aws.endpoints == {}
    aws.refuse.clear()
    said(capsys, "undeploy", "iris", "--bucket", "my-models", "--yes")
    assert aws.standing == []


@pytest.mark.parametrize("denied", ["describe_scaling_policies", "describe_scheduled_actions"])
def test_who_may_not_see_how_an_endpoint_is_scaled_removes_all_of_it_and_updates_nothing(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], denied: str
) -> None:
    deployed(capsys)
    scaled_by_hand(aws)
    before = aws.standing
    aws.refuse[denied] = DENIED
    assert re.search(rf"not looked at: .*{denied}: AccessDeniedException", said(capsys, "status", "iris"))
    assert denied in deployed(capsys, *UPDATE, code=1)
    assert "stands already" in deployed(capsys, code=2)
    assert aws.standing == before
    told = said(capsys, "undeploy", "iris", "--yes")
    assert "iris is removed from us-east-1." in told
    assert "ot looked at" not in told
    assert aws.standing == ["busy"]  # an alarm of somebody's own


@pytest.mark.parametrize("denied", ["list_endpoints", "list_tags"])
def test_of_an_endpoint_that_cannot_be_seen_nothing_is_removed(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], denied: str
) -> None:
    deployed(capsys)
    before = aws.standing
    aws.refuse[denied] = DENIED
    assert "iris: no endpoint seen in us-east-1" in said(capsys, "status", "iris", code=1)
    told = said(capsys, "undeploy", "iris", "--yes", code=1)
    assert "iris: nothing was seen of it in us-east-1. What was not looked at may stand." in told
    assert aws.standing == before
    assert denied in deployed(capsys, "--update", code=1)


def test_an_endpoint_that_may_only_be_listed_is_told_and_removed(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    deployed(capsys)
    aws.refuse["describe_endpoint"] = DENIED
    told = said(capsys, "status", "iris")
    assert "iris: InService in us-east-1, since 2026-11-24 04:00 UTC" in told
    assert "instances: not known" in told
    said(capsys, "undeploy", "iris", "--yes", code=1)
    assert aws.endpoints == {}


def test_packages_in_a_bucket_of_another_region_are_left_alone(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    deployed(capsys)
    before = aws.standing
    there = ("iris", "--region", "eu-west-1", "--bucket", "my-models")
    for kind in (kinds := (aws.models, aws.configurations, aws.endpoints, aws.targets)):
        kind.clear()
    told = said(capsys, "undeploy", *there, "--yes")
    assert "Left alone: s3://my-models, which is in us-east-1." in told
    assert "iris: nothing stands of it in eu-west-1." in told
    assert "not in this region: s3://my-models, which is in us-east-1" in said(capsys, "status", *there, code=1)
    assert set(aws.standing) < set(before)
    assert aws.objects
    assert not any(kinds)


def test_who_may_look_at_sagemaker_alone_removes_an_endpoint_by_what_is_printed(
    aws: FakeAws, capsys: pytest.CaptureFixture[str]
) -> None:
    aws.refuse["describe_instances"] = DENIED
    (remedy,) = re.findall("`gateway (undeploy .*)` removes it", deployed(capsys))
    said(capsys, *remedy.split())
    assert aws.standing == []


def test_a_bucket_that_is_gone_keeps_no_endpoint(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    deployed(capsys)
    aws.buckets.clear()
    aws.objects.clear()
    assert "iris: InService" in said(capsys, "status", "iris")
    said(capsys, "undeploy", "iris", "--yes")
    assert aws.standing == []


GONE = {
    "describe_model": Refused("ValidationException", "Could not find model"),
    "list_tags": Refused("ValidationException", "Could not find model"),
    "list_objects_v2": Refused("NoSuchBucket", "The specified bucket does not exist", 404),
    "get_object_tagging": Refused("NoSuchKey", "The specified key does not exist.", 404),
}


@pytest.mark.parametrize("question", GONE)
def test_what_is_gone_since_it_was_listed_is_not_there(aws: FakeAws, capsys: pytest.CaptureFixture[str], question: str) -> None:
    deployed(capsys)
    aws.refuse[question] = GONE[question]
    told = said(capsys, "undeploy", "iris", "--yes")
    assert "Left alone" not in told
    assert "Not looked at" not in told
    assert (aws.endpoints == {}) == (question != "list_tags")


def test_status_of_nothing_ends_with_1(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    assert "iris: no endpoint in us-east-1" in said(capsys, "status", "iris", code=1)


def test_what_has_another_tag_or_none_is_left_alone(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    deployed(capsys)
    for kind in (aws.models, aws.configurations, aws.endpoints):
        for each in kind.values():
            each["Tags"] = [{"Key": "serving-gateway:name", "Value": "other"}]
    aws.targets.clear()
    aws.objects.clear()
    before = aws.standing
    told = said(capsys, "undeploy", "iris", "--yes")
    assert "Left alone: the endpoint iris, which has not the tag." in told
    assert aws.standing == before
    assert "not ours: the endpoint iris" in said(capsys, "status", "iris", code=1)
    assert "--name: iris: taken by the endpoint iris" in deployed(capsys, code=2)


def test_a_name_that_stands_already_is_refused_before_anything_is_made(
    aws: FakeAws, capsys: pytest.CaptureFixture[str]
) -> None:
    deployed(capsys)
    before = len(aws.changed)
    told = deployed(capsys, code=2)
    assert "--name: iris: stands already: `gateway undeploy iris --region us-east-1 --on sagemaker --bucket my-models" in told
    assert len(aws.changed) == before


def test_what_is_printed_dry_is_what_is_called(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "sagemaker", str(IRIS), *SCALED[:-1]]) == 0
    planned = [next(iter(call.items())) for call in yaml.safe_load(capsys.readouterr().out)]
    deployed(capsys)
    made = [(name, asked) for name, asked in aws.calls if name in MADE]
    assert len(made) + 1 == len(planned)  # and one question
    for (name, asked), (_, parameters) in zip(
        made, (call for call in planned if not call[0].endswith("describe_endpoint")), strict=True
    ):
        asked.pop("Body", None), parameters.pop("Body", None)
        assert asked == parameters, name


@pytest.mark.parametrize("last", [*MADE[1:], "describe_endpoint"])
def test_what_a_process_left_that_was_killed_undeploy_finds(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], last: str
) -> None:
    def killed() -> None:
        raise SystemExit

    aws.before[last] = killed
    with pytest.raises(SystemExit):
        deployed(capsys)
    assert aws.standing
    if last != "create_model":  # the package alone is in nobody's way
        assert "stands already" in deployed(capsys, code=2)
    said(capsys, "undeploy", "iris", "--bucket", "my-models", "--yes")
    assert aws.standing == []


@pytest.mark.parametrize(
    ("buckets", "told"),
    [
        ({}, "--bucket: my-models: there is no such bucket: `aws s3 mb s3://my-models --region us-east-1` makes it"),
        ({"my-models": "eu-west-1"}, "--bucket: my-models: is in eu-west-1: expected one in us-east-1"),
    ],
)
def test_a_bucket_that_does_not_do_is_refused_before_anything_is_made(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], buckets: dict[str, str], told: str
) -> None:
    aws.buckets = buckets
    assert told in deployed(capsys, code=2)
    assert aws.changed == []


@pytest.mark.parametrize(
    ("status", "told"),
    [
        ((400, "Bad Request"), "--bucket: my-models: S3 answered 400: the credentials may have expired: sign in again"),
        (
            (403, "Forbidden"),
            "--bucket: my-models: S3 answered 403: expected a bucket of yours, credentials that are",
        ),
    ],
)
def test_a_bucket_that_s3_refuses_by_its_status_alone_is_named_with_what_that_may_mean(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], status: tuple[int, str], told: str
) -> None:
    code, message = status
    aws.refuse["head_bucket"] = Refused(str(code), message, code)
    assert told in deployed(capsys, code=2)
    assert aws.changed == []


def test_a_quota_that_is_used_up_says_where_to_ask_for_more(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    message = "The account-level service limit 'ml.c7i.large for endpoint usage' is 0 Instances"
    aws.refuse["create_endpoint"] = Refused("ResourceLimitExceeded", message)
    told = deployed(capsys, code=1)
    assert f"ResourceLimitExceeded: {message}: ask for more in the console of Service Quotas" in told
    assert aws.standing == []


@pytest.mark.parametrize("failing", MADE)
def test_whichever_call_is_refused_all_that_was_made_before_is_taken_back(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], failing: str
) -> None:
    aws.refuse[failing] = DENIED
    told = deployed(capsys, code=1)
    assert aws.standing == []
    assert "AccessDeniedException" in told
    assert "docs/deploy-sagemaker.md has the rights that it takes" in told
    assert "nothing of it is left, and nothing of it costs." in told


@pytest.mark.parametrize("failing", MADE)
def test_whichever_answer_is_lost_what_may_have_been_made_is_taken_back_or_said(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], failing: str
) -> None:
    aws.refuse[failing] = LOST
    told = deployed(capsys, code=1)
    if failing == "put_object":  # may be an earlier deployment's
        assert "Left are: s3.put_object: whether it did something is not known." in told
        assert "`gateway undeploy iris --region us-east-1 --on sagemaker --bucket my-models --yes` removes them." in told
        said(capsys, "undeploy", "iris", "--bucket", "my-models", "--yes")
    else:
        assert "nothing of it is left, and nothing of it costs." in told
    assert aws.standing == []


def test_what_somebody_else_makes_at_the_same_time_is_not_taken_from_him(
    aws: FakeAws, capsys: pytest.CaptureFixture[str]
) -> None:
    aws.before["create_endpoint"] = lambda: aws.endpoints.update(iris={"status": "Creating", "EndpointConfigName": "x"})
    told = deployed(capsys, code=1)
    assert "Left are: sagemaker.create_endpoint_config, which was made; sagemaker.create_model, which was made;" in told
    assert aws.changed == OBJECTS


@pytest.mark.parametrize("failing", ["delete_endpoint", "delete_endpoint_config", "delete_model", "delete_object"])
def test_what_cannot_be_taken_back_is_named(aws: FakeAws, capsys: pytest.CaptureFixture[str], failing: str) -> None:
    aws.refuse = {"register_scalable_target": DENIED, failing: DENIED}
    told = deployed(capsys, code=1)
    kind = failing.removeprefix("delete_")
    made = "put_object" if kind == "object" else f"create_{kind}"
    assert re.search(rf"Left are: .*{made}, as AWS: \w+\.{failing}: AccessDeniedException", told)
    assert aws.standing
    aws.refuse.clear()
    said(capsys, "undeploy", "iris", "--bucket", "my-models", "--yes")
    assert aws.standing == []


def test_an_endpoint_that_fails_says_why_and_is_taken_back(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    aws.becomes, aws.reason = "Failed", "The container did not pass the ping health check."
    told = deployed(capsys, code=1)
    assert "AWS: iris is Failed: The container did not pass the ping health check." in told
    assert "/aws/sagemaker/Endpoints/iris" in told
    assert aws.standing == []


def test_ctrl_c_leaves_what_is_there_and_says_how_to_remove_it(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    def typed() -> None:
        raise KeyboardInterrupt

    aws.before["describe_endpoint"] = typed
    told = deployed(capsys, code=130)
    assert "Ended by Ctrl-C: what was made goes on, and costs. `gateway undeploy iris" in told
    assert [name for name in aws.standing if "iris" in name]
    aws.refuse.clear()
    said(capsys, "undeploy", "iris", "--yes")
    assert aws.standing == []


def test_ctrl_c_during_the_first_call_says_that_it_may_be_done(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    interrupted(aws, "put_object")
    told = deployed(capsys, code=130)
    call = "s3.put_object: whether it did something is not known."
    assert f"Ended by Ctrl-C: {call} `gateway undeploy iris --region us-east-1 --on sagemaker --bucket my-models --yes`" in told


def test_ctrl_c_while_the_scaling_is_changed_says_how_it_is_scaled_again(
    aws: FakeAws, capsys: pytest.CaptureFixture[str]
) -> None:
    deployed(capsys)
    interrupted(aws, "register_scalable_target")
    told = deployed(capsys, "--update", "--requests-per-second", "300", code=130)
    call = "application-autoscaling.register_scalable_target: whether it did something is not known."
    assert f"Ended by Ctrl-C: {call} `gateway status iris --region us-east-1" in told
    assert "the same --update scales it again." in told


def interrupted(aws: FakeAws, operation: str) -> None:
    def typed() -> None:
        raise KeyboardInterrupt

    aws.before[operation] = typed


def test_ctrl_c_while_all_is_taken_back_says_why_it_was_and_what_is_left(
    aws: FakeAws, capsys: pytest.CaptureFixture[str]
) -> None:
    aws.becomes, aws.reason = "Failed", "No capacity"
    interrupted(aws, "delete_endpoint_config")
    told = deployed(capsys, code=130)
    assert "AWS: iris is Failed: No capacity" in told
    left = "sagemaker.create_endpoint_config; sagemaker.create_model; s3.put_object. `gateway undeploy iris"
    assert f"Ended by Ctrl-C while that was taken back. Left are: {left}" in told
    said(capsys, "undeploy", "iris", "--yes")
    assert aws.standing == []


@pytest.fixture
def signals() -> Iterator[None]:
    """Whatever is not taken ends the test, not its process."""

    def ended(number: int, _frame: object) -> None:
        pytest.fail(f"{signal.Signals(number).name} was not taken", pytrace=False)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, ended) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] in ([ended, ended], [ended, signal.SIG_IGN])
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.usefixtures("signals")
def test_who_is_ended_by_a_signal_says_what_goes_on_and_leaves_no_package(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, code: int
) -> None:
    def twice() -> None:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(signal.SIGTERM)  # by a wrapper, which tells its child and then the group

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    aws.before["describe_endpoint"] = twice
    told = deployed(capsys, code=code)
    name = signal.Signals(number).name
    assert f"Ended by {name}: what was made goes on, and costs. `gateway undeploy iris" in told
    assert f"gateway: ended by {name}" in told
    assert list(tmp_path.iterdir()) == []
    aws.before["delete_model"] = twice
    assert f"gateway: ended by {name}" in said(capsys, "undeploy", "iris", "--yes", code=code)
    aws.becomes, aws.reason = "Failed", "No capacity"
    aws.before["delete_endpoint_config"] = twice
    assert f"Ended by {name} while that was taken back. Left are: " in deployed(capsys, "--name", "other", code=code)


@pytest.mark.usefixtures("signals")
def test_by_nohup_a_terminal_that_closes_ends_no_deployment(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    aws.before["describe_endpoint"] = lambda: signal.raise_signal(signal.SIGHUP)
    deployed(capsys)
    assert aws.changed == MADE


def test_ctrl_c_once_an_update_has_settled_says_what_goes_on(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    deployed(capsys)
    interrupted(aws, "register_scalable_target")
    told = deployed(capsys, *UPDATE, code=130)
    assert "Ended by Ctrl-C: what was made goes on, and costs. `gateway status iris --region us-east-1" in told
    assert "the same --update scales it again." in told


def test_a_package_that_is_there_already_is_not_taken_back(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    aws.refuse["create_model"] = DENIED
    aws.refuse["delete_object"] = DENIED
    deployed(capsys, code=1)
    del aws.refuse["delete_object"]
    deployed(capsys, code=1)
    assert len(aws.objects) == 1  # of the first
    assert aws.calls[-1][0] != "delete_object"


FOUND = 'Found there, and left: what "Put the package into the bucket, unless it is there" makes '
FOUND += "(an earlier deployment's, or this one's)."


@pytest.mark.parametrize(
    ("failing", "taken"), [("create_model", "Nothing else was made. "), ("create_endpoint", "All else was taken back. ")]
)
def test_a_package_that_the_client_put_twice_is_told_as_what_stays(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], failing: str, taken: str
) -> None:
    aws.refuse = {"put_object": REPEATED, failing: DENIED}
    told = deployed(capsys, code=1)
    assert f"{taken}{FOUND} `gateway undeploy" in told
    assert "nothing of it costs" not in told
    assert len(aws.standing) == 1
    said(capsys, "undeploy", "iris", "--bucket", "my-models", "--yes")
    assert aws.standing == []


def test_a_package_that_the_client_put_twice_is_told_beside_what_is_left(
    aws: FakeAws, capsys: pytest.CaptureFixture[str]
) -> None:
    aws.refuse = {"put_object": REPEATED, "create_endpoint": DENIED, "delete_endpoint_config": DENIED}
    left = deployed(capsys, code=1).partition("Left are: sagemaker.create_endpoint_config, as ")[2]
    assert f"sagemaker.create_model. {FOUND} `gateway undeploy" in left


UPDATE = ("--update", "--instance-type", "ml.m7i.large")  # beside ml.c7i.large
UPDATED = ["put_object", "create_model", "create_endpoint_config", "put_metric_alarm", "put_metric_alarm"]
UPDATED = [*UPDATED, "deregister_scalable_target", "update_endpoint", "register_scalable_target", "put_scaling_policy"]


def test_an_update_gives_the_endpoint_another_configuration_and_keeps_the_former(
    aws: FakeAws, capsys: pytest.CaptureFixture[str]
) -> None:
    deployed(capsys)
    (former,) = aws.configurations
    told = deployed(capsys, *UPDATE)
    assert aws.changed[len(MADE) :] == UPDATED
    assert aws.endpoints["iris"]["EndpointConfigName"] != former
    assert f"Its former configuration, {former}, is kept, to go back to." in told
    assert "instances: 1 × ml.c7i.large" in told  # pools: the first
    assert len(aws.configurations) == len(aws.models) == len(aws.objects) == 2
    said(capsys, "undeploy", "iris", "--yes")
    assert aws.standing == []


OF_THE_DOCUMENT = (*PLACE, "--update", "--instance-type", "ml.m7i.large", "--yes")


def test_an_update_that_names_no_rate_stays_scaled_as_it_was(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    deployed(capsys, "--max-instances", "4")
    target, policies = *aws.targets.values(), dict(aws.policies)
    told = said(capsys, "deploy", "sagemaker", str(IRIS), *OF_THE_DOCUMENT)
    assert aws.changed[len(MADE) :] == UPDATED
    assert {key: aws.targets[target["ResourceId"]][key] for key in ("MinCapacity", "MaxCapacity")} == {
        "MinCapacity": 1,
        "MaxCapacity": 4,
    }
    assert aws.policies == policies
    (asked,) = (asked for name, asked in aws.calls if name == "update_endpoint")
    assert asked["RetainAllVariantProperties"]
    assert "Note: it stays scaled between 1 and 4, at 6000 requests a minute each: --requests-per-second" in told
    assert "instances: 1 × ml.m7i.large" in told
    assert "A month: 88.33 USD with 1 instance, 353.32 USD with 4 instances." in told


def test_an_update_without_a_rate_has_as_many_instances_as_it_names(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    deployed(capsys)

    def bounds() -> tuple[int, int]:
        (target,) = aws.targets.values()
        return target["MinCapacity"], target["MaxCapacity"]

    update = ("deploy", "sagemaker", str(IRIS), *OF_THE_DOCUMENT)
    told = said(capsys, *update, "--instances", "3")
    assert bounds() == (3, 3)
    assert "scaled between 1 and 2, at 6000 requests a minute each, and will not be any more: it has 3 then" in told
    said(capsys, *update)
    assert bounds() == (3, 3)
    made = len(aws.changed)
    told = said(capsys, *update, "--instances", "1")
    assert "Note: it stays scaled between 1 and 3" in told
    assert "both fleets" not in told
    assert "former configuration" not in told
    assert aws.changed[made:] == ["register_scalable_target", "put_scaling_policy"]  # what it runs is the same
    assert bounds() == (1, 3)
    assert "there is nothing to change" in said(capsys, *update, "--instances", "1", code=2)
    said(capsys, *update, "--instances", "2")
    said(capsys, *update, "--instances", "1")
    assert bounds() == (1, 3)


@pytest.mark.parametrize(
    ("former", "options", "routing"),
    [
        (("--instances", "3", "--max-instances", "6"), (), "CANARY"),
        (("--instances", "1", "--max-instances", "4"), ("--instances", "2"), "ALL_AT_ONCE"),  # and two once it is scaled
        ((), ("--instances", "2", "--max-instances", "4", "--requests-per-second", "200"), "ALL_AT_ONCE"),
        (("--instances", "2", "--max-instances", "2"), (), "ALL_AT_ONCE"),  # not scaled: it has one
        (("--instances", "1", "--max-instances", "1"), ("--instances", "2"), "CANARY"),
    ],
)
def test_one_instance_goes_first_where_the_new_fleet_has_several(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], former: tuple[str, ...], options: tuple[str, ...], routing: str
) -> None:
    deployed(capsys, *former)
    said(capsys, "deploy", "sagemaker", str(IRIS), *OF_THE_DOCUMENT, *options)
    (asked,) = (asked for name, asked in aws.calls if name == "update_endpoint")
    assert asked["DeploymentConfig"]["BlueGreenUpdatePolicy"]["TrafficRoutingConfiguration"]["Type"] == routing


BUSY = {
    "AlarmName": "busy",
    "Namespace": "/aws/sagemaker/Endpoints",
    "MetricName": "CPUUtilization",
    "Statistic": "Average",
    "Dimensions": [{"Name": "EndpointName", "Value": "iris"}, {"Name": "VariantName", "Value": "AllTraffic"}],
    "Period": 60,
    "EvaluationPeriods": 3,
    "Threshold": 70.0,
    "ComparisonOperator": "GreaterThanThreshold",
    "OKActions": [],
    "InsufficientDataActions": [],
    "Tags": [{"Key": "team", "Value": "us"}],
}


def scaled_by_hand(aws: FakeAws) -> None:
    """Beside what was made: a policy, scheduled actions, and scaling in switched off."""
    (target,) = aws.targets.values()
    place = {key: target[key] for key in ("ServiceNamespace", "ResourceId", "ScalableDimension")}
    target["SuspendedState"] = {**RUNNING, "DynamicScalingInSuspended": True}
    asked = {**place, "PolicyName": "mine", "PolicyType": "StepScaling"}
    arn = boto3.client("application-autoscaling").put_scaling_policy(**asked)["PolicyARN"]
    aws.alarms["busy"] = {**BUSY, "AlarmActions": ["arn:aws:sns:us-east-1:123456789012:me", arn]}
    action = {**place, "Schedule": "cron(0 22 * * ? *)", "ScalableTargetAction": {"MinCapacity": 2}}
    aws.scheduled["nightly"] = {**action, "ScheduledActionName": "nightly", "StartTime": NOW}
    aws.scheduled["once"] = {**action, "ScheduledActionName": "once", "Schedule": "at(2999-01-01T00:00:00)"}


@pytest.mark.parametrize("options", [(), ("--requests-per-second", "100")])
@pytest.mark.parametrize("rolled_back", [False, True])
def test_an_update_keeps_what_else_scales_the_endpoint(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], rolled_back: bool
) -> None:
    deployed(capsys)
    scaled_by_hand(aws)
    place = {key: next(iter(aws.targets.values()))[key] for key in ("ServiceNamespace", "ResourceId", "ScalableDimension")}
    before = (list(aws.policies), list(aws.scheduled))
    former = aws.arns["mine"]
    tokyo = {"Schedule": once(aws.now() + datetime.timedelta(hours=8)), "Timezone": "Asia/Tokyo"}  # an hour ago there
    for name, each in (("ended", {"EndTime": NOW, "Schedule": "rate(1 day)"}), ("was once", tokyo)):
        aws.scheduled[name] = {**place, "ScheduledActionName": name, **each}
    aws.reason = "One or more configured alarm(s) are in alarm: iris-late" if rolled_back else ""
    told = said(capsys, "deploy", "sagemaker", str(IRIS), *OF_THE_DOCUMENT, *options, code=int(rolled_back))
    assert (list(aws.policies), list(aws.scheduled)) == before
    assert aws.arns["mine"] != former
    assert aws.alarms["busy"] == {**BUSY, "AlarmActions": ["arn:aws:sns:us-east-1:123456789012:me", aws.arns["mine"]]}
    (target,) = aws.targets.values()
    assert target["SuspendedState"] == {**RUNNING, "DynamicScalingInSuspended": True}
    assert target["MinCapacity"] == 1
    if not options:
        kept = "it stays scaled between 1 and 2, at 6000 requests a minute each, with the scheduled actions nightly, once"
        assert f"{kept}, suspended: --requests" in told


@pytest.mark.parametrize("rolled_back", [False, True])
def test_an_alarm_that_sets_two_policies_off_sets_both_off_after_an_update(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], rolled_back: bool
) -> None:
    deployed(capsys)
    scaled_by_hand(aws)
    fewer = {**aws.policies["mine"], "PolicyName": "fewer"}
    aws.alarms["busy"]["OKActions"] = [boto3.client("application-autoscaling").put_scaling_policy(**fewer)["PolicyARN"]]
    former = dict(aws.arns)
    aws.reason = "One or more configured alarm(s) are in alarm: iris-late" if rolled_back else ""
    said(capsys, "deploy", "sagemaker", str(IRIS), *OF_THE_DOCUMENT, code=int(rolled_back))
    assert aws.arns["mine"] != former["mine"]
    assert aws.arns["fewer"] != former["fewer"]
    assert aws.alarms["busy"]["OKActions"] == [aws.arns["fewer"]]
    assert aws.alarms["busy"]["AlarmActions"] == ["arn:aws:sns:us-east-1:123456789012:me", aws.arns["mine"]]
    puts = [asked["AlarmName"] for name, asked in aws.calls if name == "put_metric_alarm"]
    assert puts.count("busy") == 1


@pytest.mark.parametrize("rolled_back", [False, True])
def test_a_policy_that_is_refused_after_an_update_is_named_and_keeps_no_other_off(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rolled_back: bool
) -> None:
    deployed(capsys)
    scaled_by_hand(aws)
    fewer = {**aws.policies["mine"], "PolicyName": "fewer"}
    aws.alarms["busy"]["OKActions"] = [boto3.client("application-autoscaling").put_scaling_policy(**fewer)["PolicyARN"]]
    put = aws._put_scaling_policy

    def refusing(**asked: Any) -> dict[str, Any]:
        if asked["PolicyName"] == "fewer":
            raise Refused("LimitExceededException", "no more")
        return put(**asked)

    monkeypatch.setattr(aws, "_put_scaling_policy", refusing)
    aws.reason = "One or more configured alarm(s) are in alarm: iris-late" if rolled_back else ""
    told = said(capsys, "deploy", "sagemaker", str(IRIS), *OF_THE_DOCUMENT, code=1)
    assert list(aws.policies) == ["iris", "mine"]
    assert aws.alarms["busy"]["AlarmActions"] == ["arn:aws:sns:us-east-1:123456789012:me", aws.arns["mine"]]
    assert aws.alarms["busy"]["OKActions"] == []  # there is nothing that it could set off
    assert list(aws.scheduled) == ["nightly", "once"]
    refused = "Scale it again by its policy fewer, as the alarm busy asks for"
    left = f"Left are: application-autoscaling.deregister_scalable_target, as this failed: {refused}: AWS: "
    assert (left if rolled_back else f"Failed: {refused}. All else was done.") in told


def once(time: datetime.datetime) -> str:
    """A schedule."""
    return f"at({time:%Y-%m-%dT%H:%M:%S})"


@pytest.mark.parametrize("rolled_back", [False, True])
def test_a_scheduled_action_that_is_refused_is_named_and_keeps_no_other_off(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], rolled_back: bool
) -> None:
    deployed(capsys)
    scaled_by_hand(aws)
    aws.reason = "One or more configured alarm(s) are in alarm: iris-late" if rolled_back else ""
    refused_once(aws, "put_scheduled_action", Refused("ValidationException", "A scheduled action cannot be in the past"))
    told = said(capsys, "deploy", "sagemaker", str(IRIS), *OF_THE_DOCUMENT, code=1)
    assert list(aws.scheduled) == ["once"]
    refused = "Put back the scheduled action nightly: AWS: application-autoscaling.put_scheduled_action: ValidationException"
    assert refused in told
    left = f"Left are: application-autoscaling.deregister_scalable_target, as this failed: {refused}"
    assert (left if rolled_back else "Failed: Put back the scheduled action nightly. All else was done.") in told


@pytest.mark.parametrize("options", [("--variant", "asynchronous"), ("--requests-per-second", "9", "--max-instances", "1")])
def test_an_update_says_where_it_is_not_scaled_any_more(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    deployed(capsys)
    told = said(capsys, "deploy", "sagemaker", str(IRIS), *OF_THE_DOCUMENT, *options)
    assert "Note: it is scaled between 1 and 2, at 6000 requests a minute each, and will not be any more." in told
    assert aws.targets == {}


def test_an_update_without_a_rate_that_is_broken_off_says_how_it_was_scaled(
    aws: FakeAws, capsys: pytest.CaptureFixture[str]
) -> None:
    deployed(capsys)
    aws.refuse["register_scalable_target"] = DENIED
    told = said(capsys, "deploy", "sagemaker", str(IRIS), *OF_THE_DOCUMENT, code=1)
    assert "It was scaled between 1 and 2, at 6000 requests a minute each: --update with --requests-per-second" in told


def test_going_back_to_the_former_configuration_makes_nothing_twice(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    deployed(capsys)
    (former,) = aws.configurations
    deployed(capsys, *UPDATE)
    deployed(capsys, "--update")
    assert aws.endpoints["iris"]["EndpointConfigName"] == former
    assert aws.changed[-len(UPDATED) + 3 :] == UPDATED[3:]
    assert "there is nothing to change" in deployed(capsys, "--update", code=2)


def test_an_update_that_is_rolled_back_says_why_and_leaves_all_as_it_was(
    aws: FakeAws, capsys: pytest.CaptureFixture[str]
) -> None:
    deployed(capsys)
    before = aws.standing
    aws.reason = "One or more configured alarm(s) are in alarm: iris-late"
    told = deployed(capsys, *UPDATE, code=1)
    assert f"iris has EndpointConfigName {next(iter(aws.configurations))}: One or more configured alarm(s) are in alarm" in told
    assert "nothing of it is left" in told
    assert aws.standing == before
    assert aws.targets  # scaled as it was


def test_an_update_tells_of_an_alarm_that_rings_already(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    deployed(capsys)
    assert "is in ALARM" not in deployed(capsys, *UPDATE)
    aws.ringing = ["iris-late"]
    told = deployed(capsys, "--update", "--instance-type", "ml.m5.large")
    assert "The alarm iris-late is in ALARM, by what runs now: SageMaker may roll this back: docs/deploy-sagemaker.md" in told
    assert "iris-errors is in" not in told
    told = said(capsys, "deploy", "sagemaker", str(IRIS), *OF_THE_DOCUMENT, "--variant", "asynchronous")
    assert "is in ALARM" not in told  # the other alone watches it


@pytest.mark.parametrize("failing", ["update_endpoint", "rolled back"])
def test_an_update_that_fails_leaves_the_alarms_of_the_one_before(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], failing: str
) -> None:
    deployed(capsys)
    deployed(capsys, *UPDATE)
    aws.alarms["iris-late"]["Threshold"] = 70_000.0  # as of another SLO
    before, made = copy.deepcopy(aws.alarms), len(aws.changed)
    if failing == "rolled back":
        aws.reason = "One or more configured alarm(s) are in alarm: iris-late"
    aws.refuse[failing] = DENIED
    assert "nothing of it is left" in deployed(capsys, "--update", "--instance-type", "ml.m5.large", code=1)
    assert aws.changed[made:].count("put_metric_alarm") == 4  # two, and back
    assert aws.alarms == before


@pytest.mark.parametrize("failing", dict.fromkeys(UPDATED))
def test_whichever_call_of_an_update_is_refused_all_is_as_it_was(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], failing: str
) -> None:
    deployed(capsys)
    before, count = aws.standing, len(aws.calls)
    aws.refuse[failing] = DENIED
    told = deployed(capsys, *UPDATE, code=1)
    if failing in ("register_scalable_target", "put_scaling_policy"):  # the endpoint has its new configuration by then
        assert "What was made before is in use. `gateway status iris --region us-east-1 --on sagemaker` tells what runs" in told
        assert "If it was scaled, the same --update scales it again." in told
        aws.refuse.clear()
        deployed(capsys, *UPDATE)
        assert aws.policies
    else:
        assert aws.standing == before
        assert "nothing of it is left" in told
    assert count < len(aws.calls)


@pytest.mark.parametrize("failing", dict.fromkeys(UPDATED))
def test_whichever_answer_of_an_update_is_lost_it_goes_on_or_is_taken_back_or_said(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], failing: str
) -> None:
    deployed(capsys)
    before, (former,) = aws.standing, aws.configurations
    aws.refuse[failing] = LOST
    told = deployed(capsys, *UPDATE, code=0 if failing == "update_endpoint" else 1)
    aws.refuse.clear()
    if failing == "update_endpoint":
        assert aws.changed[len(MADE) :] == UPDATED
        assert aws.endpoints["iris"]["EndpointConfigName"] != former
    elif failing in ("register_scalable_target", "put_scaling_policy"):
        assert "What was made before is in use." in told
        deployed(capsys, *UPDATE)
    elif failing == "put_object":
        assert "Left are: s3.put_object: whether it did something is not known." in told
    else:
        assert aws.standing == before
        assert "nothing of it is left" in told
    assert aws.policies


def test_an_update_that_the_client_asked_for_twice_goes_on(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    deployed(capsys)
    (former,) = aws.configurations
    aws.refuse = dict.fromkeys(("put_object", "deregister_scalable_target", "update_endpoint"), REPEATED)
    deployed(capsys, *UPDATE)
    assert aws.changed[len(MADE) :] == UPDATED
    assert aws.endpoints["iris"]["EndpointConfigName"] != former
    assert aws.policies


def test_scaling_that_the_client_took_off_twice_is_put_back(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    deployed(capsys)
    before = aws.standing
    aws.refuse = {"deregister_scalable_target": REPEATED, "update_endpoint": DENIED}
    assert "nothing of it is left" in deployed(capsys, *UPDATE, code=1)
    assert aws.standing == before


def test_an_update_beside_another_is_taken_back_once_the_other_has_settled(
    aws: FakeAws, capsys: pytest.CaptureFixture[str]
) -> None:
    deployed(capsys)
    (former,) = aws.configurations
    deployed(capsys, *UPDATE)
    before = aws.standing
    other = {"EndpointName": "iris", "EndpointConfigName": former}
    watched = {"AutoRollbackConfiguration": {"Alarms": [{"AlarmName": name} for name in aws.alarms]}}
    aws.before["update_endpoint"] = lambda: aws._update_endpoint(**other, DeploymentConfig=watched)
    told = deployed(capsys, "--update", "--instance-type", "ml.m5.large", code=1)
    assert "AWS: sagemaker.update_endpoint: ValidationException: Cannot update in-progress endpoint\n" in told
    assert f"AWS: iris has EndpointConfigName {former}" in told
    assert "nothing of it is left" in told
    assert aws.standing == before


def test_an_update_that_was_interrupted_is_completed_by_the_same_again(
    aws: FakeAws, capsys: pytest.CaptureFixture[str]
) -> None:
    def typed() -> None:
        raise KeyboardInterrupt

    deployed(capsys)
    aws.before["update_endpoint"] = lambda: aws.before.update(describe_endpoint=typed)
    told = deployed(capsys, *UPDATE, code=130)
    assert "`gateway status iris --region us-east-1 --on sagemaker` tells what runs" in told
    assert not aws.targets
    aws._describe_endpoint("iris")  # it goes on by itself
    deployed(capsys, *UPDATE)
    assert aws.changed[-2:] == ["register_scalable_target", "put_scaling_policy"]
    assert "there is nothing to change" in deployed(capsys, *UPDATE, code=2)


@pytest.mark.parametrize("operation", ["describe_endpoint", "put_scaling_policy"])  # not scaled, or by nothing
def test_an_update_without_a_rate_that_was_interrupted_says_how_it_is_scaled_again(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], operation: str
) -> None:
    deployed(capsys)
    update = ("deploy", "sagemaker", str(IRIS), *OF_THE_DOCUMENT)
    aws.before["update_endpoint"] = lambda: interrupted(aws, operation)
    said(capsys, *update, code=130)
    aws._describe_endpoint("iris")  # it goes on by itself
    remedy = "It is not scaled: --requests-per-second with --max-instances scales it"
    assert f"there is nothing to change. {remedy}" in said(capsys, *update, code=2)
    said(capsys, *update, "--requests-per-second", "200", "--max-instances", "2")
    assert aws.policies
    told = said(capsys, *update, "--requests-per-second", "200", "--max-instances", "2", code=2)
    assert "there is nothing to change" in told
    assert remedy not in told


def test_an_update_of_the_scaling_alone_shifts_nothing(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    deployed(capsys, "--max-instances", "4")
    scaled_by_hand(aws)
    made = len(aws.changed)
    told = deployed(capsys, "--update", "--max-instances", "4", "--requests-per-second", "100")
    assert "scaled: between 1 and 4, at 3000 requests a minute each, with the scheduled actions nightly, once" in told
    assert "both fleets" not in told
    deployed(capsys, "--update", "--max-instances", "6", "--requests-per-second", "100")
    again = ["register_scalable_target", *["put_scaling_policy"] * 2, *["put_scheduled_action"] * 2]
    assert aws.changed[made:] == 2 * again
    assert "there is nothing to change" in deployed(
        capsys, "--update", "--max-instances", "6", "--requests-per-second", "100", code=2
    )
    aws.refuse["put_scaling_policy"] = DENIED
    told = deployed(capsys, "--update", "--max-instances", "4", code=1)
    assert "Left are: application-autoscaling.register_scalable_target." in told
    assert aws.policies
    told = deployed(capsys, "--update", "--max-instances", "1")
    assert "with the scheduled actions nightly, once, suspended, and will not be any more." in told
    assert aws.changed[-1] == "deregister_scalable_target"


def test_what_is_not_there_or_not_in_service_is_not_updated(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--update: there is no endpoint iris in us-east-1: leave --update out" in deployed(capsys, *UPDATE, code=2)
    deployed(capsys)
    aws.endpoints["iris"]["status"] = "RollingBack"
    assert "--update: iris is RollingBack: expected InService" in deployed(capsys, *UPDATE, code=2)


VARIANTS = {
    "asynchronous": ("--instance-type", "m5.large", "--requests-per-second", "9"),
    "serverless": ("--memory", "2Gi"),
}
JOB = ("--variant", "batch-transform", "--instance-type", "m5.large", "--input", "s3://my-models/in/")
JOB = (*JOB, "--output", "s3://my-models/out/", "--yes")


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_told_and_removed_like_the_first(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], variant: str
) -> None:
    typed = ("deploy", "sagemaker", str(IRIS), *PLACE, "--variant", variant, *VARIANTS[variant], "--yes")
    told = said(capsys, *typed)
    assert "iris: InService" in told
    cost = {"asynchronous": "cost: 0.115 USD an hour now", "serverless": "cost: by request, as Cost Explorer tells"}
    assert cost[variant] in told
    assert ("scaled: between 1 and 2" in told) == (variant == "asynchronous")
    said(capsys, "undeploy", "iris", "--yes")
    assert aws.standing == []


def test_a_job_leaves_nothing_but_its_answers(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    told = said(capsys, "deploy", "sagemaker", str(IRIS), *PLACE, *JOB)
    assert re.search(r"iris-[0-9a-f]{12}: done; the answers are under s3://my-models/out\n", told)
    assert aws.standing == []
    assert [job["status"] for job in aws.jobs.values()] == ["Completed"]


def test_a_job_beside_an_endpoint_of_its_name_takes_nothing_from_it(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    deployed(capsys)
    before = aws.standing
    said(capsys, "deploy", "sagemaker", str(IRIS), *PLACE, *JOB)
    assert aws.standing == before


def test_a_job_that_fails_says_why_and_leaves_nothing(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    aws.becomes, aws.reason = "Failed", "ClientError: no file under s3://my-models/in/"
    told = said(capsys, "deploy", "sagemaker", str(IRIS), *PLACE, *JOB, code=1)
    assert "is Failed: ClientError: no file under s3://my-models/in/" in told
    assert "/aws/sagemaker/TransformJobs" in told
    assert aws.standing == []


def test_what_is_named_to_remove_a_job_takes_no_endpoint_of_its_name(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    deployed(capsys)
    before = set(aws.models)
    interrupted(aws, "describe_transform_job")
    told = said(capsys, "deploy", "sagemaker", str(IRIS), *PLACE, *JOB, code=130)
    (state,) = set(aws.models) - before
    assert "undeploy" not in told
    assert re.findall("`(aws .*?)`", told) == [
        f"aws sagemaker stop-transform-job --region us-east-1 --transform-job-name {state}",
        f"aws sagemaker delete-model --region us-east-1 --model-name {state}",
        f"aws s3 rm {aws.models[state]['PrimaryContainer']['ModelDataUrl']} --region us-east-1",
    ]


def test_what_a_job_that_failed_could_not_take_back_is_named_with_what_removes_it(
    aws: FakeAws, capsys: pytest.CaptureFixture[str]
) -> None:
    aws.becomes, aws.reason = "Failed", "No file"
    aws.refuse["delete_model"] = DENIED
    told = said(capsys, "deploy", "sagemaker", str(IRIS), *PLACE, *JOB, code=1)
    assert "Left are: sagemaker.create_model, as AWS: sagemaker.delete_model: AccessDeniedException" in told
    (state,) = aws.models
    assert f"`aws sagemaker delete-model --region us-east-1 --model-name {state}`" in told
    assert "undeploy" not in told


def test_a_job_that_runs_on_is_stopped_by_undeploy(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    def typed() -> None:
        raise KeyboardInterrupt

    aws.before["describe_transform_job"] = typed
    said(capsys, "deploy", "sagemaker", str(IRIS), *PLACE, *JOB, code=130)
    assert "jobs: iris-" in said(capsys, "status", "iris")
    said(capsys, "undeploy", "iris", "--yes")
    assert aws.standing == []
    assert [job["status"] for job in aws.jobs.values()] == ["Stopped"]


class Time:
    """Passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def carrying_out(aws: FakeAws, **changes: Any) -> Time:
    """The plan, in time that is made."""
    package = Path(__file__)  # any file
    hosting = replace(HOSTING, package=replace(HOSTING.package, path=package), **changes)  # type: ignore[type-var]
    time = Time()
    Deploying(Aws(), sleep=time.sleep, now_s=lambda: time.now_s).carry_out(creation(hosting), remedy="`undeploy`")
    return time


def test_a_scheduled_time_that_passes_while_an_update_runs_is_left_out(aws: FakeAws) -> None:
    carrying_out(aws)
    scaled_by_hand(aws)
    began = aws.now()
    passes = began + datetime.timedelta(seconds=60)
    nightly = aws.scheduled["nightly"]
    nightly["StartTime"] = passes
    there = {"Schedule": once(passes.astimezone(ZoneInfo("America/New_York"))), "Timezone": "America/New_York"}
    aws.scheduled["soon"] = {**aws.scheduled["once"], "ScheduledActionName": "soon", **there}
    aws.scheduled["ends"] = {**nightly, "ScheduledActionName": "ends", "EndTime": passes}
    stands = standing(Aws(), "iris")
    assert stands.scale is not None
    assert [action["ScheduledActionName"] for action in stands.scale.scheduled] == [*aws.scheduled]
    aws.patience, time = 20, Time()
    aws.now = lambda: began + datetime.timedelta(seconds=time.now_s)
    package = replace(HOSTING.package, path=Path(__file__))  # type: ignore[type-var]
    calls = update(replace(HOSTING, package=package, metrics=False), stands)
    Deploying(Aws(), sleep=time.sleep, now_s=lambda: time.now_s, now=aws.now).carry_out(calls, remedy="`undeploy`")
    assert list(aws.scheduled) == ["nightly", "once"]
    assert "StartTime" not in aws.scheduled["nightly"]


def test_it_waits_until_the_endpoint_is_in_service_and_says_how_far_it_is(
    aws: FakeAws, caplog: pytest.LogCaptureFixture
) -> None:
    aws.patience = 20
    with caplog.at_level("INFO", logger="gateway.process.console"):
        time = carrying_out(aws)
    assert time.now_s == 20 * 15
    assert [line for line in caplog.messages if "Creating" in line] == [f"iris is Creating, {n} min" for n in range(5)]


def test_a_network_that_is_away_for_a_while_costs_no_deployment(aws: FakeAws) -> None:
    aws.patience = 3
    aws.refuse["describe_endpoint"] = LOST
    aws.before["describe_endpoint"] = lambda: aws.before.__setitem__("describe_endpoint", aws.refuse.clear)
    carrying_out(aws)
    assert aws.endpoints["iris"]["status"] == "InService"


def test_a_network_that_stays_away_is_told_and_named_at_last(aws: FakeAws, caplog: pytest.LogCaptureFixture) -> None:
    aws.refuse["describe_endpoint"] = LOST
    lost = "AWS: sagemaker.describe_endpoint: Could not connect to the endpoint URL"
    with caplog.at_level("INFO", logger="gateway.process.console"), pytest.raises(PlatformRefused) as raised:
        carrying_out(aws)
    assert f"AWS: iris is not to be asked for 60 min: expected less: {lost}" in raised.value.message
    assert any(line.startswith(f"iris is not to be asked, 0 min: {lost}") for line in caplog.messages)


ENDED = [
    UnauthorizedSSOTokenError(),
    TokenRetrievalError(provider="sso", error_msg="Token has expired and refresh failed"),
    CredentialRetrievalError(provider="custom-process", error_msg="signed out"),
]


@pytest.mark.parametrize("ended", ENDED, ids=lambda each: type(each).__name__)
def test_a_session_that_ends_while_an_endpoint_starts_ends_the_wait_and_says_so(aws: FakeAws, ended: BotoCoreError) -> None:
    def signed_out() -> None:
        aws.before = dict.fromkeys(("describe_endpoint", "delete_endpoint"), signed_out)
        raise ended

    aws.before["describe_endpoint"] = signed_out
    with pytest.raises(PlatformRefused) as raised:
        carrying_out(aws)
    told = f"{ended}: expected those of an account: `aws configure`, `aws sso login`, or AWS_PROFILE\n"
    assert raised.value.message.startswith(f"AWS: sagemaker.describe_endpoint: {told}Left are: sagemaker.create_endpoint, as")
    assert [name for name, _ in aws.calls].count("describe_endpoint") == 1


def refused_once(aws: FakeAws, operation: str, refusal: Refused) -> None:
    aws.refuse[operation] = refusal
    aws.before[operation] = lambda: aws.before.__setitem__(operation, aws.refuse.clear)


def throttled_once(aws: FakeAws, operation: str) -> None:
    refused_once(aws, operation, Refused("ThrottlingException", "Rate exceeded"))


def test_a_question_that_is_throttled_costs_no_deployment(aws: FakeAws) -> None:
    aws.patience = 3
    throttled_once(aws, "describe_endpoint")
    carrying_out(aws)
    assert aws.endpoints["iris"]["status"] == "InService"


@pytest.mark.parametrize("throttled", ["put_object", "create_endpoint", "put_scaling_policy"])
def test_a_call_that_is_throttled_is_made_again(aws: FakeAws, throttled: str) -> None:
    throttled_once(aws, throttled)
    assert carrying_out(aws).now_s == 15
    assert aws.endpoints["iris"]["status"] == "InService"


def test_a_call_that_is_throttled_for_five_minutes_ends_the_deployment(aws: FakeAws) -> None:
    aws.refuse["create_endpoint"] = Refused("ThrottlingException", "Rate exceeded")
    with pytest.raises(PlatformRefused, match=r"ThrottlingException(.|\n)*nothing of it is left"):
        carrying_out(aws)
    assert aws.standing == []


@pytest.mark.parametrize("throttled", ["delete_endpoint", "delete_model", "describe_endpoint"])
def test_throttling_ends_no_removal(aws: FakeAws, throttled: str) -> None:
    carrying_out(aws)
    calls = removal(standing(Aws(), "iris"))
    throttled_once(aws, throttled)
    time = Time()
    Deploying(Aws(), sleep=time.sleep, now_s=lambda: time.now_s).remove(calls, remedy="`undeploy`")
    assert aws.standing == []
    assert time.now_s == 15


@pytest.mark.parametrize("throttled", ["delete_endpoint", "delete_model", "describe_endpoint"])
def test_throttling_leaves_nothing_when_all_is_taken_back(aws: FakeAws, throttled: str) -> None:
    aws.becomes, aws.reason = "Failed", "no capacity"
    aws.before["delete_endpoint"] = lambda: throttled_once(aws, throttled)
    with pytest.raises(PlatformRefused, match=r"no capacity(.|\n)*nothing of it is left"):
        carrying_out(aws)
    assert aws.standing == []


def test_an_endpoint_that_takes_more_than_an_hour_is_given_up_and_taken_back(aws: FakeAws) -> None:
    aws.patience, aws.busy = 250, True
    with pytest.raises(PlatformRefused, match="iris is Creating for 60 min"):
        carrying_out(aws)
    assert aws.standing == []  # removed when it no longer was in progress


def test_the_documented_rights_are_those_that_it_takes(aws: FakeAws, capsys: pytest.CaptureFixture[str]) -> None:
    deployed(capsys)
    scaled_by_hand(aws)
    deployed(capsys, *UPDATE)
    aws.refuse["put_scaling_policy"] = LOST
    deployed(capsys, "--name", "other", code=1)  # and takes it back
    aws.before["describe_transform_job"] = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    said(capsys, "deploy", "sagemaker", str(IRIS), *PLACE, *JOB, code=130)
    said(capsys, "undeploy", "iris", "--yes")
    page = (ROOT / "docs" / "deploy-sagemaker.md").read_text()
    policy = re.search(r'title="deployer-policy.json"\n(.+?)```', page, re.DOTALL)
    assert policy is not None
    allowed = {action for statement in json.loads(policy[1])["Statement"] for action in statement["Action"]}
    taken = {"iam:PassRole", "iam:CreateServiceLinkedRole", "sagemaker:AddTags", "s3:PutObjectTagging", "s3:GetObject"}
    taken |= {"application-autoscaling:TagResource", "cloudwatch:TagResource", "s3:ListBucket"}
    taken |= {"sagemaker:UpdateEndpointWeightsAndCapacities"}  # with which it is scaled
    looked = [(service, operation) for service, operation in aws.asked if service not in ("ec2", "iam")]  # else it says so
    taken |= {action for service, operation in looked if (action := f"{service}:{operation}") not in LISTING}
    assert allowed == taken


def test_without_boto3_it_is_said_what_to_install(
    aws: FakeAws, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    told = "boto3 is not installed: expected it for AWS: pip install 'serving-gateway[aws]'"
    assert told in deployed(capsys, code=2)
    assert told in said(capsys, "status", "iris", code=2)
    assert main(["deploy", "sagemaker", str(IRIS), *SCALED[:-1]]) == 0  # dry


def test_an_account_without_credentials_is_told_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("AWS_EC2_METADATA_DISABLED", "true"), ("AWS_CONFIG_FILE", "/none"), ("HOME", "/none")):
        monkeypatch.setenv(name, value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    assert "no credentials: expected those of an account: `aws configure`" in deployed(capsys, code=2)
