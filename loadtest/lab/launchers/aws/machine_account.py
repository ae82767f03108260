"""What an account has to say of machines on EC2.

Before any is paid for: the subnet's zone, what is to be had there, quotas. After a call that was not answered: what it made.
"""

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from loadtest.errors import UsageError
from loadtest.lab.launchers.aws.door import Aws, AwsRefused
from loadtest.lab.launchers.aws.removal import pages
from loadtest.question.machine_preflight import VcpuQuota, vcpu_quotas

_LOOKS: Final = 6  # in a minute: EC2 lists a machine some seconds after it has started it
_LOOK_S: Final = 10.0
_NO_SUBNET: Final = "InvalidSubnetID.NotFound"


async def zone_of(aws: Aws, subnet: str) -> str:
    """ "": it may not be asked. Raises: UsageError, if there is no such subnet."""
    try:
        told = await aws.call("ec2", "describe_subnets", SubnetIds=[subnet])
    except AwsRefused as exc:
        if exc.code == _NO_SUBNET:
            raise UsageError(f"launcher.subnet: {subnet}: there is none in {aws.region}: expected one of yours") from exc
        return ""
    return str(told["Subnets"][0]["AvailabilityZone"])


async def offered_in(aws: Aws, zone: str) -> frozenset[str] | None:
    """The types that are to be had in a zone; None: it is not known, or this may not be asked."""
    if not zone:
        return None
    filters = [{"Name": "location", "Values": [zone]}]
    try:
        offers = pages(
            aws,
            "ec2",
            "describe_instance_type_offerings",
            "InstanceTypeOfferings",
            LocationType="availability-zone",
            Filters=filters,
        )
        return frozenset([each["InstanceType"] async for each in offers])
    except AwsRefused:
        return None


async def vcpu_quotas_of(aws: Aws, *, spot: bool) -> list[VcpuQuota] | None:
    """With what is used of each; None: this may not be asked."""
    try:
        listed = pages(aws, "service-quotas", "list_service_quotas", "Quotas", ServiceCode="ec2")
        quotas = vcpu_quotas({each["QuotaName"]: each["Value"] async for each in listed}, spot=spot)
        used = await _running(aws, spot=spot)
    except AwsRefused:
        return None
    held = [replace(each, used=sum(n for name, n in used.items() if each.holds(name))) for each in quotas]
    return held or None


async def machine_named(aws: Aws, name: str) -> dict[str, Any] | None:
    """One that has just been asked for, by its tag, as EC2 describes it; None: there is none within a minute."""
    for _ in range(_LOOKS):
        await aws.pause(_LOOK_S)
        with suppress(AwsRefused):
            told = await aws.call("ec2", "describe_instances", Filters=[{"Name": "tag:Name", "Values": [name]}])
            for held in told["Reservations"]:
                return dict(held["Instances"][0])
    return None


async def _running(aws: Aws, *, spot: bool) -> Counter[str]:
    """vCPUs by instance type."""
    found: Counter[str] = Counter()
    states = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    async for held in pages(aws, "ec2", "describe_instances", "Reservations", Filters=states):
        for each in held["Instances"]:
            if (each.get("InstanceLifecycle") == "spot") == spot:
                cores = each.get("CpuOptions", {})
                found[each["InstanceType"]] += cores.get("CoreCount", 1) * cores.get("ThreadsPerCore", 1)
    return found
