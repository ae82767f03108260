"""Scheduled actions of Application Auto Scaling: what of one is to come. One that has something past is refused. Pure."""

import datetime
import re
import zoneinfo
from collections.abc import Mapping
from typing import Any, Final

_ONCE: Final = re.compile(r"at\((.+)\)")  # a schedule


def to_come(action: Mapping[str, Any], now: datetime.datetime) -> Mapping[str, Any] | None:
    """The parameters of put_scheduled_action that hold now: without a start that is past. None: it does nothing any more."""
    once = _time_of(action)
    if (once is not None and once <= now) or ("EndTime" in action and action["EndTime"] <= now):
        return None
    past = "StartTime" in action and action["StartTime"] <= now
    return {key: value for key, value in action.items() if not (past and key == "StartTime")}


def _time_of(action: Mapping[str, Any]) -> datetime.datetime | None:
    """When it happens. None: more than once, or in a time zone that is not known here: AWS knows then."""
    once = _ONCE.fullmatch(action["Schedule"])
    if once is None:
        return None
    try:
        zone = zoneinfo.ZoneInfo(action.get("Timezone", "UTC"))
    except zoneinfo.ZoneInfoNotFoundError:
        return None
    return datetime.datetime.fromisoformat(once[1]).replace(tzinfo=zone)
