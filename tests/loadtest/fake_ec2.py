"""EC2 for a launcher's tests: moto, whose images and consoles are replaced, and a load generator that answers at once.

What a job came to is made up here, with the lab's own code above it: it stands in for `loadtest serve-jobs` on its machine.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from loadtest.errors import LoadtestError
from loadtest.lab.generating import LoadJob, ProfileJob
from loadtest.lab.here import Here
from loadtest.lab.jobs import Job, done, read, told_error, told_value
from loadtest.lab.launchers.aws.endpoints import OURS, PATH
from loadtest.lab.profiling import ProfileFailed
from loadtest.results import RunResult
from tests.loadtest.fake_aws import BUCKET, IMAGE_ID, FakeAws, seen

SAID: Final = "[   21.0] cloud-init[999]: gateway-setup: ready\r\n"
_REQUEST: Final = "sir-0123456a"
WHEEL: Final = "serving_gateway-0.1.0-py3-none-any.whl"


class FakeEc2(FakeAws):
    """says: instance -> its console, where it is not ready. before_job: is told each job before it is done.

    measure: what makes up a run's result. started: what run_instances was asked, as it was.
    """

    def __init__(self) -> None:
        super().__init__()
        self.says: dict[str, str] = {}
        self.before_job: Callable[[Job], None] = lambda job: None
        self.measure: Callable[..., Awaitable[RunResult]] | None = None
        self.started: list[dict[str, Any]] = []
        self.jobs: list[Job] = []
        self._tagging = ""

    def _ask(self, service: str, operation: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        if operation == "run_instances":
            self.started.append(dict(parameters))
        return super()._ask(service, operation, parameters)

    def carried_out(self, service: str, operation: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        if operation == "run_instances":
            parameters = {**parameters, "ImageId": IMAGE_ID}  # moto resolves none of AWS's own
        if operation == "get_console_output":
            return {"Output": self.says.get(parameters["InstanceId"], SAID)}
        if operation == "describe_spot_instance_requests":
            return {"SpotInstanceRequests": [{"Status": {"Code": "fulfilled"}}]}
        if operation == "head_object" and parameters["Key"].endswith("/ready"):
            self._put(parameters["Key"], b"", self._tagging)
        if operation == "put_object":
            self._tagging = parameters["Tagging"]  # its machine was told the same
        answer = super().carried_out(service, operation, parameters)
        if operation == "run_instances" and "InstanceMarketOptions" in parameters:
            answer["Instances"][0]["SpotInstanceRequestId"] = _REQUEST  # moto does not tell
        if operation == "put_object" and "/jobs/" in parameters["Key"]:
            self._work(parameters["Key"], parameters["Body"])
        return answer

    def _work(self, key: str, text: bytes) -> None:
        order = read(text)
        assert self.measure is not None
        job = order.job
        self.jobs.append(job)
        self.before_job(job)
        options = {"stop": asyncio.Event()} if isinstance(job, LoadJob) else {}
        if isinstance(job, LoadJob | ProfileJob):
            job = replace(job, statistics="")  # nobody is there to be asked
        try:
            outcome = told_value(asyncio.run(done(job, Here(self.measure), **options)))
        except (LoadtestError, ProfileFailed) as exc:
            outcome = told_error(exc)
        self._put(key.replace("/jobs/", "/results/"), outcome, order.tagging)

    def _put(self, key: str, body: bytes, tagging: str) -> None:
        super().carried_out("s3", "put_object", {"Bucket": BUCKET, "Key": key, "Body": body, "Tagging": tagging})

    def left(self) -> list[str]:
        states = [{"Name": "instance-state-name", "Values": ["pending", "running", "shutting-down", "stopping", "stopped"]}]
        held = seen("ec2", "describe_instances", Filters=states)["Reservations"]
        found = [each["InstanceId"] for reservation in held for each in reservation["Instances"]]
        found += [each["VolumeId"] for each in seen("ec2", "describe_volumes")["Volumes"]]
        groups = seen("ec2", "describe_security_groups")["SecurityGroups"]
        found += [each["GroupId"] for each in groups if each["GroupName"].startswith(OURS)]
        profiles = seen("iam", "list_instance_profiles", PathPrefix=PATH)["InstanceProfiles"]
        found += [each["InstanceProfileName"] for each in profiles]
        found += [each["RoleName"] for each in seen("iam", "list_roles", PathPrefix=PATH)["Roles"]]
        return [*found, *super().left()]


def subnet() -> str:
    """One that moto has by itself."""
    found: str = seen("ec2", "describe_subnets")["Subnets"][0]["SubnetId"]
    return found


def kit(folder: Path) -> dict[str, str]:
    """Keys of the launcher: a wheel, and locks that install nothing."""
    folder.mkdir(exist_ok=True)
    (folder / WHEEL).write_bytes(b"PK\x05\x06" + bytes(18))  # an archive of nothing
    for name in ("cpu", "aws"):
        (folder / f"requirements-{name}.lock").write_text(f"# nothing for {name}\n")
    return {"wheel": str(folder / WHEEL), "locks": str(folder)}
