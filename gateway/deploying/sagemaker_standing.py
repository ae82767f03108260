"""What stands on SageMaker of one deployment: how it is removed, and what people are told of it. Pure."""

import datetime
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from gateway.deploying.calls import Call
from gateway.deploying.price import HOURS_A_MONTH, hourly, of_elsewhere, usd
from gateway.deploying.sagemaker import STOPPED_ANYHOW, scalable, until_gone
from gateway.instances.facts import InstanceTypes


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingEndpoint:
    """status: as SageMaker calls it; reason: why it failed. types: what its configuration asks for, in that order; ():
    SageMaker's own (serverless); None: that is not known.

    running: type -> instances, as far as it is told; "": of a type that is not. created, changed: in UTC. by: who deployed it.
    """

    status: str
    configuration: str
    created: datetime.datetime
    changed: datetime.datetime
    types: tuple[str, ...] | None
    running: dict[str, int]
    wanted: int
    by: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StandingScale:
    """Bounds of its instances, and the requests a minute that each is to have; None: by another measure.

    policies: what they are scaled by, as the parameters of put_scaling_policy; scheduled: when they have other bounds, as those
    of put_scheduled_action. suspended: what of it is switched off, as SuspendedState of register_scalable_target; {}: nothing.
    arns: of the policies, by name. alarms: the user's own, which set some of them off, by these ARNs: as the parameters of
    put_metric_alarm.
    """

    least: int
    most: int
    per_minute: float | None
    policies: tuple[dict[str, Any], ...] = ()
    scheduled: tuple[dict[str, Any], ...] = ()
    suspended: dict[str, bool] = field(default_factory=dict)
    _: KW_ONLY
    arns: dict[str, str] = field(default_factory=dict)
    alarms: tuple[dict[str, Any], ...] = ()

    def __str__(self) -> str:
        by = f", at {self.per_minute:g} requests a minute each" if self.per_minute is not None else ""
        names = ", ".join(action["ScheduledActionName"] for action in self.scheduled)
        scheduled = f", with the scheduled actions {names}" if names else ""
        return f"between {self.least} and {self.most}{by}{scheduled}{', suspended' if self.suspended else ''}"


@dataclass(frozen=True, slots=True)
class StandingAlarm:
    """asked: what it watches, as the parameters of put_metric_alarm. rings: it is in ALARM."""

    name: str
    asked: dict[str, Any]
    rings: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """All that has the tag of one deployment. jobs: transform jobs that run. objects: bucket and key.

    untagged: what is called as ours would be, and is somebody else's. elsewhere: what is of another region, in words.
    unseen: what could not be looked at, and why, and may stand; unseen_scaling: the same of how it is scaled, which goes with
    `scale`.
    """

    name: str
    region: str
    endpoint: StandingEndpoint | None = None
    scale: StandingScale | None = None
    alarms: tuple[StandingAlarm, ...] = ()
    configurations: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    objects: tuple[tuple[str, str], ...] = ()
    untagged: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    unseen_scaling: tuple[str, ...] = ()

    @property
    def nothing(self) -> bool:
        found = (self.endpoint, self.scale, self.alarms, self.configurations, self.models, self.jobs, self.objects)
        return not any(found)


def removal(standing: Deployed) -> list[Call]:
    """What costs goes first; nothing is removed while something that stands needs it. What costs nothing is alone."""
    calls = []
    for job in standing.jobs:
        named = {"TransformJobName": job}
        calls.append(Call("sagemaker", "stop_transform_job", named, f"Stop the job {job}", already="ValidationException"))
        calls.append(Call("sagemaker", "describe_transform_job", named, "Wait until it has stopped", until=STOPPED_ANYHOW))
    if standing.scale is not None:
        target = scalable(standing.name)
        calls.append(Call("application-autoscaling", "deregister_scalable_target", target, "Scale it no more", alone=True))
    if standing.endpoint is not None:
        named = {"EndpointName": standing.name}
        calls.append(Call("sagemaker", "delete_endpoint", named, f"Remove the endpoint {standing.name}, which costs"))
        calls.append(until_gone(standing.name))
    if standing.alarms:
        names = [alarm.name for alarm in standing.alarms]
        calls.append(Call("cloudwatch", "delete_alarms", {"AlarmNames": names}, "Remove its alarms", alone=True))
    for name in standing.configurations:
        why = f"Remove the endpoint's configuration {name}"
        calls.append(Call("sagemaker", "delete_endpoint_config", {"EndpointConfigName": name}, why, alone=True))
    for name in standing.models:
        calls.append(Call("sagemaker", "delete_model", {"ModelName": name}, f"Remove the model {name}", alone=True))
    for bucket, key in standing.objects:
        why = f"Remove the package s3://{bucket}/{key}"
        calls.append(Call("s3", "delete_object", {"Bucket": bucket, "Key": key}, why, alone=True))
    return calls


def told(standing: Deployed, types: InstanceTypes, now: datetime.datetime) -> Iterator[str]:
    """Lines for people."""
    endpoint = standing.endpoint
    if endpoint is None:
        yield f"{standing.name}: no endpoint {'seen ' if standing.unseen else ''}in {standing.region}"
    else:
        age = now - endpoint.created
        since = f"{endpoint.created:%Y-%m-%d %H:%M} UTC ({long(age)})"
        yield f"{standing.name}: {endpoint.status} in {standing.region}, since {since}"
        if endpoint.reason:
            yield f"  reason: {endpoint.reason}"
        state = endpoint.configuration or "not known"
        yield f"  state: {state}, by {endpoint.by}, changed {endpoint.changed:%Y-%m-%d %H:%M} UTC"
        yield f"  instances: {_instances(endpoint)}"
        if (scale := standing.scale) is not None:
            yield f"  scaled: {scale}"
        yield from (f"  {line}" for line in _cost(standing, endpoint, types, age))
    for what, names in (
        ("jobs", standing.jobs),
        ("configurations", standing.configurations),
        ("models", standing.models),
        ("alarms", tuple(alarm.name for alarm in standing.alarms)),
        ("packages", tuple(f"s3://{bucket}/{key}" for bucket, key in standing.objects)),
    ):
        if names:
            yield f"  {what}: {', '.join(names)}"


def _instances(endpoint: StandingEndpoint) -> str:
    if endpoint.types is None:
        return "not known"
    if not endpoint.types:
        return "SageMaker's (serverless)"
    running = ", ".join(f"{n} × {name or ' or '.join(endpoint.types)}" for name, n in endpoint.running.items() if n) or "none"
    return running if sum(endpoint.running.values()) == endpoint.wanted else f"{running}; {endpoint.wanted} wanted"


def _cost(standing: Deployed, endpoint: StandingEndpoint, types: InstanceTypes, age: datetime.timedelta) -> Iterator[str]:
    """Of its instances, at the known prices. Of how many it had before, nobody keeps account."""
    if endpoint.types is None:
        yield "cost: not known; Cost Explorer tells, by the tag serving-gateway:name"
        return
    if not endpoint.types:
        yield "cost: by request, as Cost Explorer tells"
        return
    prices = {name: hourly(name or endpoint.types[0], types) for name in endpoint.running}
    if any(price is None for price in prices.values()):
        yield "cost: the price of its type is not known here; Cost Explorer tells, by the tag serving-gateway:name"
        return
    now = sum(price.usd_per_hour * endpoint.running[name] for name, price in prices.items() if price is not None)
    hours = age.total_seconds() / 3600
    estimated = ", estimated" if any(price is not None and price.estimated for price in prices.values()) else ""
    yield f"cost: {usd(now)} an hour now, {usd(now * HOURS_A_MONTH)} a month{estimated}"
    if standing.scale is None:
        yield f"cost so far: about {usd(now * hours)}, had it always run as now"
    else:
        count = sum(endpoint.running.values()) or 1
        least, most = (now / count * n * hours for n in (standing.scale.least, standing.scale.most))
        yield f"cost so far: about {usd(now * hours)}, had it always run as now; {usd(least)} to {usd(most)}, as it is scaled"
    if line := of_elsewhere(standing.region, types):
        yield line
    yield "Cost Explorer has what is billed, by the tag serving-gateway:name, a day later"


def long(age: datetime.timedelta) -> str:
    minutes = max(0, round(age.total_seconds() / 60))
    days, hours = minutes // 1440, minutes // 60 % 24
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"
