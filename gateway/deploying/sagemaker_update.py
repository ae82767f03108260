"""The calls that give an endpoint that stands another configuration: a new fleet beside the old one, which stays if that fails.

The alarms are there before the traffic is shifted; SageMaker goes back to the old fleet by itself when one of them goes off.
What an endpoint is scaled by is taken off meanwhile, as AWS's guide asks for, and put back at the end, however it ends.
"""

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from gateway.deploying.calls import ANY, Answered, Call, Until
from gateway.deploying.sagemaker import (
    READY,
    VARIANT,
    Hosting,
    alarms_of,
    endpoint_configuration,
    listed,
    logs_of,
    model,
    scalable,
    scaling,
    tags,
)
from gateway.deploying.sagemaker_standing import Deployed, StandingScale
from gateway.deploying.sagemaker_ways import BACKLOG, INVOCATIONS, Asynchronous, RealTime, instances_of
from gateway.deploying.scheduled import to_come

_ACTIONS: Final = ("OKActions", "AlarmActions", "InsufficientDataActions")  # of an alarm
_ERRORS: Final = 0.01  # of the answers, in a minute
_PERIOD_S: Final = 60
_LATE_PERIODS: Final = 2  # a container that has just started may be late once
_US_A_MS: Final = 1000  # CloudWatch has ModelLatency in microseconds
_MOST_S: Final = 7200
_SETTLED: Final = ("InService", *READY.failed)


def update(hosting: Hosting, stands: Deployed | None = None, *, bake_s: int = 300) -> list[Call]:
    """stands: what is there; None: that is not known, and all is made. bake_s: how long the new fleet is watched.

    None, if it is as it is to be. Where only its scaling is missing, as after an update that was interrupted, or is to be
    another, that is made.
    """
    scale = kept_scale(hosting, stands)
    if stands is not None and stands.endpoint is not None and stands.endpoint.configuration == hosting.state:
        return _rescaled(hosting, stands, scale)
    made = [*model(hosting), endpoint_configuration(hosting)]
    if stands is not None and hosting.state in stands.models:  # it was deployed before
        made = made[-1:]
    if stands is not None and hosting.state in stands.configurations:
        made = made[:-1]
    scaled = _scaled_anew(hosting, stands) if scale is None else _scaled_by(hosting, scale)
    return [
        *made,
        *_alarms(hosting, stands),
        _unscaled(hosting, stands),
        *_shift(hosting, stands, bake_s, scaled=bool(scaled)),
        *scaled,
    ]


def kept_scale(hosting: Hosting, stands: Deployed | None) -> StandingScale | None:
    """What goes on scaling it, as no rate is asked for: as it stands, but for the fewest instances, where they are asked for.

    None: nothing does, or something else is asked for.
    """
    way = hosting.way
    if stands is None or stands.scale is None or not isinstance(way, RealTime | Asynchronous) or way.per_minute is not None:
        return None
    if _foreign(hosting, stands.scale.policies):
        return None
    least = way.instances.least if hosting.count_asked else max(stands.scale.least, way.instances.least)
    return replace(stands.scale, least=least, most=max(stands.scale.most, least))


def _alarms(hosting: Hosting, stands: Deployed | None) -> list[Call]:
    """Taken back, they watch again what they did."""
    former = {} if stands is None else {alarm.name: alarm.asked for alarm in stands.alarms}
    return [replace(call, undo=_before(call, former)) for call in _watching(hosting)]


def _before(alarm: Call, former: Mapping[str, Mapping[str, Any]]) -> tuple[Call, ...]:
    name = alarm.parameters["AlarmName"]
    if name in former:
        return (Call("cloudwatch", "put_metric_alarm", former[name], f"Have the alarm {name} watch what it did"),)
    return (Call("cloudwatch", "delete_alarms", {"AlarmNames": [name]}, f"Remove the alarm {name}"),)


def _watching(hosting: Hosting) -> list[Call]:
    errors, late = alarms_of(hosting.name)
    if isinstance(hosting.way, Asynchronous):
        failures = {"MetricName": "InvocationFailures", "Statistic": "Sum", "Threshold": 0.0}
        return [_alarm(hosting, errors, "any failed request", failures, 1, variant=False)]
    share = {"MetricName": "Invocation5XXErrors", "Statistic": "Average", "Threshold": _ERRORS}
    calls = [_alarm(hosting, errors, f"more than {_ERRORS:.0%} errors", share, 1)]
    if hosting.limit_ms is not None:
        p99 = {"MetricName": "ModelLatency", "ExtendedStatistic": "p99", "Threshold": hosting.limit_ms * _US_A_MS}
        calls.append(_alarm(hosting, late, f"a p99 above {hosting.limit_ms:g} ms", p99, _LATE_PERIODS))
    return calls


def _alarm(hosting: Hosting, name: str, what: str, metric: dict[str, Any], periods: int, *, variant: bool = True) -> Call:
    dimensions = {"EndpointName": hosting.name} | ({"VariantName": VARIANT} if variant else {})
    asked = {
        "AlarmName": name,
        "AlarmDescription": f"Rolls an update of {hosting.name} back: {what}.",
        "Namespace": "AWS/SageMaker",
        **metric,
        "Dimensions": [{"Name": key, "Value": value} for key, value in dimensions.items()],
        "Period": _PERIOD_S,
        "EvaluationPeriods": periods,
        "ComparisonOperator": "GreaterThanThreshold",
        "TreatMissingData": "notBreaching",  # nobody asks
        "Tags": listed(tags(hosting)),
    }
    return Call("cloudwatch", "put_metric_alarm", asked, f"Have {what} roll it back")


def _unscaled(hosting: Hosting, stands: Deployed | None) -> Call:
    """While an endpoint is scaled it cannot be given another instance type."""
    target = scalable(hosting.name)
    undo = () if stands is None or stands.scale is None else tuple(_scaled_by(hosting, stands.scale))
    why = "Do not scale it meanwhile, if it is"
    absent = "ObjectNotFoundException"
    named = ("application-autoscaling", "deregister_scalable_target", target, why)
    return Call(*named, undo=undo, already=absent, restores=bool(undo))


def _scaled_by(hosting: Hosting, scale: StandingScale) -> list[Call]:
    target = scalable(hosting.name)
    bounds = {"MinCapacity": scale.least, "MaxCapacity": scale.most, **_suspended(scale), "Tags": tags(hosting)}
    asked = {**target, **bounds}
    register = Call("application-autoscaling", "register_scalable_target", asked, "Scale it again as before")
    return [register, *_kept(scale, scale.policies)]


def _scaled_anew(hosting: Hosting, stands: Deployed | None) -> list[Call]:
    """By the rate that is asked for, and by what else scales it."""
    made = scaling(hosting)
    if not made or stands is None or stands.scale is None:
        return made
    register, *policies = made
    scale = stands.scale
    others = [each for each in scale.policies if each["PolicyName"] != hosting.name and not _foreign(hosting, [each])]
    register = replace(register, parameters={**register.parameters, **_suspended(scale)})
    return [register, *policies, *_kept(scale, others)]


def _rescaled(hosting: Hosting, stands: Deployed, kept: StandingScale | None) -> list[Call]:
    """Of an endpoint that is what it is to be, but for its scaling."""
    if stands.scale is None:
        return scaling(hosting)
    # Its policies are not taken off, so they keep their ARNs, and alarms name them as before.
    if kept is not None:
        return [] if kept == stands.scale else _scaled_by(hosting, replace(kept, alarms=()))
    unwatched = replace(stands, scale=replace(stands.scale, alarms=()))
    made = [replace(call, undo=()) for call in _scaled_anew(hosting, unwatched)]  # which would take the former away as well
    if not made:
        return [Call("application-autoscaling", "deregister_scalable_target", scalable(hosting.name), "Scale it no more")]
    return [] if _scaled_so(hosting, stands.scale) else made


def _scaled_so(hosting: Hosting, scale: StandingScale) -> bool:
    register, put = (call.parameters for call in scaling(hosting))
    if (scale.least, scale.most) != (register["MinCapacity"], register["MaxCapacity"]):
        return False
    key = "TargetTrackingScalingPolicyConfiguration"
    found = [each.get(key, {}).get("TargetValue") for each in scale.policies if each["PolicyName"] == put["PolicyName"]]
    return found == [put[key]["TargetValue"]]


def _kept(scale: StandingScale, policies: Iterable[Mapping[str, Any]]) -> Iterator[Call]:
    """policies: those of it that are kept. Put anew, each has another ARN, and its alarms would name the former.

    Of one that is refused there is none: its alarms do not set it off any more.
    """
    asking = "application-autoscaling"
    answered = {}
    for policy in policies:
        name = policy["PolicyName"]
        former = scale.arns.get(name, "")
        users = [alarm["AlarmName"] for alarm in scale.alarms if any(former in alarm.get(key, ()) for key in _ACTIONS)]
        why = f"Scale it again by its policy {name}" + f", as the alarm {' and '.join(users)} asks for" * bool(users)
        put = Call(asking, "put_scaling_policy", {**policy}, why, alone=True, label=name)
        if former:
            answered[former] = Answered(put.named, ("PolicyARN",))
        yield put
    for alarm in scale.alarms:
        actions: dict[str, Any] = {key: [answered.get(each, each) for each in alarm[key]] for key in _ACTIONS if key in alarm}
        asked = {**alarm, **actions}
        if asked != alarm:
            why = f"Have the alarm {alarm['AlarmName']} set off what it did"
            yield Call("cloudwatch", "put_metric_alarm", asked, why, as_of=_what_is_there, alone=True)
    for action in scale.scheduled:
        why = f"Put back the scheduled action {action['ScheduledActionName']}"
        yield Call(asking, "put_scheduled_action", {**action}, why, as_of=to_come, alone=True)


def _what_is_there(alarm: Mapping[str, Any], now: datetime.datetime) -> Mapping[str, Any]:
    """The alarm without actions whose policy was refused."""
    actions = {key: [each for each in alarm[key] if each is not None] for key in _ACTIONS if key in alarm}
    return {**alarm, **actions}


def _suspended(scale: StandingScale) -> dict[str, Any]:
    return {"SuspendedState": scale.suspended} if scale.suspended else {}


def _foreign(hosting: Hosting, policies: Sequence[Mapping[str, Any]]) -> bool:
    """Whether one is by what the endpoint is not measured by any more."""
    return (INVOCATIONS if isinstance(hosting.way, Asynchronous) else BACKLOG) in str(policies)


def _shift(hosting: Hosting, stands: Deployed | None, bake_s: int, *, scaled: bool) -> list[Call]:
    named = {"EndpointName": hosting.name}
    alarms = [alarm.parameters["AlarmName"] for alarm in _watching(hosting)]
    policy = {
        "TrafficRoutingConfiguration": _routing(_begins_with(hosting, stands, scaled=scaled), bake_s),
        "MaximumExecutionTimeoutInSeconds": _MOST_S,
    }
    asked = {
        **named,
        "EndpointConfigName": hosting.state,
        # Scaled, it may have more instances by now than it begins with.
        "RetainAllVariantProperties": scaled,
        "DeploymentConfig": {
            "BlueGreenUpdatePolicy": policy,
            "AutoRollbackConfiguration": {"Alarms": [{"AlarmName": name} for name in alarms]},
        },
    }
    question = ("sagemaker", "describe_endpoint", named)
    settled = Call(*question, "Wait until it has settled", until=Until("EndpointStatus", _SETTLED, most_s=_MOST_S))
    ready = Until(READY.key, READY.done, READY.failed, look=logs_of(hosting.name), most_s=_MOST_S, leave=True)
    took = Until("EndpointConfigName", (hosting.state,), (ANY,), look=logs_of(hosting.name), keep=True)
    return [
        Call(
            "sagemaker",
            "update_endpoint",
            asked,
            "Start the new fleet, and shift the traffic to it",
            undo=(settled,),
            told=True,
        ),
        Call(*question, "Wait for it", until=ready),
        Call(*question, "See that it was not rolled back", until=took),
    ]


def _begins_with(hosting: Hosting, stands: Deployed | None, *, scaled: bool) -> int:
    """How many instances the new fleet has. scaled: it keeps as many as there are. 0: they are SageMaker's."""
    instances = instances_of(hosting.way)
    if instances is None:
        return 0
    kept = stands.endpoint.wanted if scaled and stands is not None and stands.endpoint is not None else 0
    return kept or instances.least


def _routing(count: int, bake_s: int) -> dict[str, Any]:
    """One instance first, where there are several: it may have half of them at most."""
    if count < 2:
        return {"Type": "ALL_AT_ONCE", "WaitIntervalInSeconds": bake_s}
    return {"Type": "CANARY", "CanarySize": {"Type": "INSTANCE_COUNT", "Value": 1}, "WaitIntervalInSeconds": bake_s}
