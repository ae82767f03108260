"""What stands on EC2 of one deployment: how it is removed, and what people are told of it. Pure."""

import datetime
from collections.abc import Iterator
from dataclasses import dataclass

from gateway.deploying.calls import Call
from gateway.deploying.ec2 import ended
from gateway.deploying.price import HOURS_A_MONTH, hourly, of_elsewhere, usd
from gateway.deploying.sagemaker_standing import long
from gateway.instances.facts import InstanceTypes


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingInstance:
    """started: in UTC. says: its gateway's state as its console has it; "": nothing yet. by: who deployed it."""

    number: str
    instance_type: str
    state: str
    zone: str
    started: datetime.datetime
    spot: bool
    says: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingMachine:
    """All that has the tag of one deployment. groups: security groups. role: with policies of its own, and those attached.

    profile: an instance profile, and the roles in it. objects: bucket and key. untagged: somebody else's of that name.
    elsewhere: what is of another region, in words. unseen: what could not be looked at, and why.
    """

    name: str
    region: str
    instances: tuple[StandingInstance, ...] = ()
    groups: tuple[str, ...] = ()
    role: str = ""
    policies: tuple[str, ...] = ()
    attached: tuple[str, ...] = ()
    profile: str = ""
    roles_in_profile: tuple[str, ...] = ()
    objects: tuple[tuple[str, str], ...] = ()
    untagged: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()

    @property
    def nothing(self) -> bool:
        return not (self.instances or self.groups or self.role or self.profile or self.objects)


def machine_removal(standing: StandingMachine) -> list[Call]:
    """What costs goes first; nothing is removed while something that stands needs it. What costs nothing is alone."""
    calls: list[Call] = []
    for each in standing.instances:
        calls += ended(each.number, f"End the machine {each.number}, which costs")
    profile = {"InstanceProfileName": standing.profile}
    for role in standing.roles_in_profile:
        why = "Take the role out of the instance profile"
        calls.append(Call("iam", "remove_role_from_instance_profile", {**profile, "RoleName": role}, why, alone=True))
    if standing.profile:
        calls.append(Call("iam", "delete_instance_profile", profile, "Remove the instance profile", alone=True))
    role_of = {"RoleName": standing.role}
    for arn in standing.attached:
        detached = {**role_of, "PolicyArn": arn}
        calls.append(Call("iam", "detach_role_policy", detached, "Take sessions from the role", alone=True))
    for policy in standing.policies:
        why = "Take from the role what it may read"
        calls.append(Call("iam", "delete_role_policy", {**role_of, "PolicyName": policy}, why, alone=True))
    if standing.role:
        calls.append(Call("iam", "delete_role", role_of, "Remove the role", alone=True))
    for group in standing.groups:
        why = f"Remove the security group {group}"
        calls.append(Call("ec2", "delete_security_group", {"GroupId": group}, why, again=("DependencyViolation",), alone=True))
    for bucket, key in standing.objects:
        calls.append(Call("s3", "delete_object", {"Bucket": bucket, "Key": key}, f"Remove s3://{bucket}/{key}", alone=True))
    return calls


def told_of_machine(standing: StandingMachine, types: InstanceTypes, now: datetime.datetime) -> Iterator[str]:
    """Lines for people."""
    if not standing.instances:
        yield f"{standing.name}: no machine {'seen ' if standing.unseen else ''}in {standing.region}"
    for each in standing.instances:
        age = now - each.started
        since = f"{each.started:%Y-%m-%d %H:%M} UTC ({long(age)})"
        runs = each.state in ("pending", "running")
        yield f"{standing.name}: {each.number} is {each.state} in {each.zone}, {'since' if runs else 'started'} {since}"
        if runs:
            yield f"  gateway: {each.says or 'its console says nothing of it yet'}"
        yield f"  type: {each.instance_type}{', on spot' if each.spot else ''}, by {each.by}"
        if not runs:
            yield f"  cost: nothing but its disk while it is {each.state}; Cost Explorer has what was billed before"
            continue
        price = hourly(each.instance_type, types, "ec2")
        if price is None:
            yield "  cost: the price of its type is not known here; Cost Explorer tells, by the tag serving-gateway:name"
            continue
        hours, an_hour = age.total_seconds() / 3600, price.usd_per_hour
        less = ", on demand; spot is less" if each.spot else ""
        estimated = ", estimated" if price.estimated else ""
        yield f"  cost: {usd(an_hour)} an hour, {usd(an_hour * HOURS_A_MONTH)} a month{estimated}{less}"
        yield f"  cost so far: about {usd(an_hour * hours)}, and its disk; Cost Explorer has what is billed, a day later"
        if line := of_elsewhere(standing.region, types):
            yield f"  {line}"
    for what, names in (
        ("security groups", standing.groups),
        ("role", (standing.role,)),
        ("instance profile", (standing.profile,)),
        ("files", tuple(f"s3://{bucket}/{key}" for bucket, key in standing.objects)),
    ):
        if any(names):
            yield f"  {what}: {', '.join(names)}"
