"""What is removed stays asked for until it is gone, whatever AWS answers meanwhile, and what its answers mean."""

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import boto3
import botocore.session
import pytest
from botocore.exceptions import NoCredentialsError
from botocore.model import OperationModel

from loadtest.lab.launchers.aws.door import Aws, AwsRefused
from loadtest.lab.launchers.aws.removal import NotRemoved, Piece, remove

MACHINE = Piece("instance", "i-0123456789abcdef0")
PACKAGE = Piece("package", "models/key", "bucket")


class Account:
    """boto3 by which each call is refused so many times, with this code and status; then there is nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: str, status: int, times: int) -> None:
        self.calls: list[str] = []
        self.pauses_s: list[float] = []
        self._code, self._status, self._times = code, status, times
        session = botocore.session.Session()
        session.set_credentials("of", "nobody")
        session.register("before-call", self._call)
        monkeypatch.setattr(boto3, "DEFAULT_SESSION", boto3.session.Session(botocore_session=session))

    @property
    def door(self) -> Aws:
        return Aws("us-east-1", pause=self._pause, clock=lambda: sum(self.pauses_s))

    async def _pause(self, seconds: float) -> None:
        self.pauses_s.append(seconds)

    def _call(self, model: OperationModel, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.calls.append(model.name)
        if self.calls.count(model.name) > self._times:
            return SimpleNamespace(status_code=200), {"Reservations": []}
        error = {"Error": {"Code": self._code, "Message": "as the test wants it"}}
        return SimpleNamespace(status_code=self._status), error | {"ResponseMetadata": {"HTTPStatusCode": self._status}}


@pytest.mark.parametrize(
    ("piece", "operation", "code"),
    [(MACHINE, "TerminateInstances", "RequestLimitExceeded"), (PACKAGE, "DeleteObject", "SlowDown")],
)
def test_throttling_is_waited_out_also_where_its_status_is_503(
    monkeypatch: pytest.MonkeyPatch, piece: Piece, operation: str, code: str
) -> None:
    account = Account(monkeypatch, code, 503, times=9)  # more than one call is patient with
    asyncio.run(remove(account.door, [piece]))
    assert account.calls.count(operation) == 10


@pytest.mark.parametrize(("times", "asked"), [(1, 2), (99, 7)])
def test_a_machine_that_ec2_does_not_know_yet_is_asked_to_end_for_a_minute(
    monkeypatch: pytest.MonkeyPatch, times: int, asked: int
) -> None:
    account = Account(monkeypatch, "InvalidInstanceID.NotFound", 400, times)
    asyncio.run(remove(account.door, [MACHINE]))
    assert account.calls.count("TerminateInstances") == asked
    assert sum(account.pauses_s) == 10 * (asked - 1)


def test_what_nobody_answers_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    account = Account(monkeypatch, "InternalError", 500, times=3)
    asyncio.run(remove(account.door, [MACHINE]))
    assert account.calls == 4 * ["TerminateInstances"] + 4 * ["DescribeInstances"]


def test_what_nobody_answers_for_three_minutes_is_told_and_the_others_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    account = Account(monkeypatch, "InternalError", 500, times=99)
    with pytest.raises(NotRemoved, match=r"instance i-0123456789abcdef0: .*InternalError.*; package s3://bucket/models/key: "):
        asyncio.run(remove(account.door, [MACHINE, PACKAGE]))
    assert account.calls == 19 * ["TerminateInstances"] + ["DeleteObject"]
    assert sum(account.pauses_s) == 180


def test_the_three_minutes_hold_what_the_calls_take() -> None:
    now_s = 0.0

    def asked(service: str, operation: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal now_s
        now_s += 45
        raise AwsRefused("Connect timeout")

    async def pause(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    with pytest.raises(NotRemoved, match=f"could not be removed: {MACHINE}: Connect timeout; {PACKAGE}: Connect timeout"):
        asyncio.run(remove(Aws("us-east-1", asked=asked, pause=pause, clock=lambda: now_s), [MACHINE, PACKAGE]))
    assert now_s == 4 * 45 + 3 * 10 + 45  # the fourth call ends after 180 s; then the other piece is tried once


def test_a_machine_that_does_not_go_within_a_quarter_of_an_hour_is_told() -> None:
    waited: list[float] = []

    def asked(service: str, operation: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        return {"Reservations": [{"Instances": [{"State": {"Name": "shutting-down"}}]}]}

    async def pause(seconds: float) -> None:
        waited.append(seconds)

    with pytest.raises(NotRemoved, match=f"could not be removed: {MACHINE}: is still there after 15 min: expected it gone"):
        asyncio.run(remove(Aws("us-east-1", asked=asked, pause=pause), [MACHINE]))
    assert sum(waited) == 15 * 60


def test_what_is_no_machine_is_gone_where_it_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    account = Account(monkeypatch, "NoSuchKey", 404, times=99)
    asyncio.run(remove(account.door, [PACKAGE]))
    assert account.calls == ["DeleteObject"]


@pytest.mark.parametrize("code", ["InsufficientInstanceCapacity", "InsufficientCapacity", "InternalError"])
def test_what_ec2_has_none_left_of_it_has_answered_although_its_status_is_500(
    monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    account = Account(monkeypatch, code, 500, times=99)
    with pytest.raises(AwsRefused, match=code) as raised:
        asyncio.run(account.door.call("ec2", "run_instances", MinCount=1, MaxCount=1))
    assert raised.value.code == (code if code.startswith("Insufficient") else "")  # which may be done all the same
    assert account.calls == ["RunInstances"]


def test_without_credentials_nobody_is_asked_and_none_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    account = Account(monkeypatch, "", 200, times=0)

    def unsigned(**_: Any) -> None:
        raise NoCredentialsError

    boto3.DEFAULT_SESSION.events.register_first("before-call", unsigned)
    with pytest.raises(NotRemoved, match="no credentials"):
        asyncio.run(remove(account.door, [MACHINE]))
    assert account.pauses_s == []
