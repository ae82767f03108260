"""AWS for a launcher's tests: moto behind the launcher's own door, with faults on request and time that only its pauses spend.

What crosses the door is boto3, so that each call's parameters pass botocore's own validators. `dies_at`: the n-th call is the
last that reaches AWS, before or after it took effect, as when the process is killed: neither it nor any later one is answered.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import boto3
from moto import mock_aws

from gateway.deploying.sagemaker import PackedModel
from loadtest.lab.launchers.aws.door import Aws, AwsRefused, Boto

REGION: Final = "us-east-1"
BUCKET: Final = "models-of-tests"
ROLE: Final = "arn:aws:iam::123456789012:role/endpoint"
IMAGE_ID: Final = "ami-03cf127a"  # moto's first
IMAGE: Final = f"123456789012.dkr.ecr.{REGION}.amazonaws.com/gateway:cpu"

_BOTO: Final = Boto(REGION)  # its clients serve all tests: to make one takes a tenth of a second

Fault = Callable[[str, Mapping[str, Any]], "dict[str, Any] | None"]


class Killed(BaseException):
    """The process is dead: nothing that it still does reaches anybody."""


class FakeAws:
    """Life: within `moto`. fault: is shown each call, and may answer instead of AWS, or raise."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls: list[str] = []
        self.fault: Fault = lambda operation, parameters: None
        self.dies_at: int | None = None
        self.takes_effect = True
        self.dead = False
        self._one = threading.Lock()
        self.on_pause: Callable[[], None] = lambda: None

    @property
    def door(self) -> Aws:
        return Aws(REGION, asked=self._ask, pause=self._pause, clock=self.clock)

    @property
    def living_door(self) -> Aws:
        """Of another process."""
        return Aws(REGION, asked=_BOTO, pause=self._pause, clock=self.clock)

    def clock(self) -> float:
        return self.now_s

    async def _pause(self, seconds: float) -> None:
        self.now_s += seconds
        self.on_pause()
        if self.dead:
            raise Killed
        await asyncio.sleep(0)

    def _ask(self, service: str, operation: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        if self.dead:
            raise Killed
        self.calls.append(operation)
        dies = self.dies_at is not None and len(self.calls) >= self.dies_at
        if dies and not self.takes_effect:
            self.dead = True
            raise Killed
        answer = self.fault(operation, parameters)
        with self._one:  # what another thread has begun takes effect before the end, or not at all
            if self.dead:
                raise Killed
            answer = answer or self.carried_out(service, operation, parameters)
            if dies:
                self.dead = True
                raise Killed
        return answer

    def carried_out(self, service: str, operation: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """By moto."""
        return _BOTO(service, operation, parameters)

    def answer(self, service: str, operation: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """As AWS would answer another process."""
        answered = _BOTO(service, operation, parameters)
        return {key: value for key, value in answered.items() if key not in ("ResponseMetadata", "Body")}

    def left(self) -> list[str]:
        """All that is there of any run."""
        found = [each["EndpointName"] for each in seen("sagemaker", "list_endpoints")["Endpoints"]]
        found += [each["EndpointConfigName"] for each in seen("sagemaker", "list_endpoint_configs")["EndpointConfigs"]]
        found += [each["ModelName"] for each in seen("sagemaker", "list_models")["Models"]]
        found += [each["Key"] for each in seen("s3", "list_objects_v2", Bucket=BUCKET).get("Contents", [])]
        return [*found, *(each["logGroupName"] for each in seen("logs", "describe_log_groups")["logGroups"])]


def seen(service: str, operation: str, **parameters: Any) -> dict[str, Any]:
    """What is there, asked by nobody of the test."""
    return _BOTO(service, operation, parameters)


@contextmanager
def moto() -> Iterator[None]:
    """An account with a bucket and nothing else."""
    from moto.ec2.models import amis

    # Of moto's thousands of images, which each account has made anew, one will do.
    image = [each for each in amis.AMIS if each["ami_id"] == IMAGE_ID]
    with mock_aws(), patch.object(amis, "AMIS", image), patch.object(amis, "load_resource", lambda path: []):
        boto3.client("s3", region_name=REGION).create_bucket(Bucket=BUCKET)
        yield


async def packed(document: Mapping[str, Any], folder: Path, bucket: str, apart: Sequence[Path]) -> PackedModel:
    """Without a process: any archive does."""
    archive = folder / "model.tar.gz"
    archive.write_bytes(b"an archive")
    return PackedModel(archive, archive.stat().st_size, 64 * "ab", bucket)


def refused(code: str, message: str) -> AwsRefused:
    return AwsRefused(f"sagemaker: {code}: {message}", code)
