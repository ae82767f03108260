"""What a run's endpoints and machines are called and how they are tagged, so that whoever comes later finds all of it. Pure.

Names begin with `loadtest-RUN-`, and everything that takes tags has those of `tags_of`. What takes none is found by its name:
an endpoint's log group, which SageMaker makes.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

from gateway.deploying.calls import Call
from gateway.deploying.sagemaker import PREFIX as KEYS
from gateway.deploying.sagemaker import Hosting, creation

OURS: Final = "loadtest-"
TAG_RUN: Final = "loadtest:run"
TAG_EXPIRES: Final = "loadtest:expires"
TAG_CANDIDATE: Final = "loadtest:candidate"
LOGS: Final = "/aws/sagemaker/Endpoints/"
PATH: Final = "/loadtest/"  # of roles and instance profiles
_UNTAGGABLE: Final = re.compile(r"[^\w .:/=+@-]", re.ASCII)
_MOST_TAG: Final = 256
_RUN: Final = re.compile(rf"{OURS}([0-9a-f]+)-")


@dataclass(frozen=True, slots=True)
class Run:
    """One search. id: in hexadecimal. expires: from then on, whatever is left of it may be removed by anybody."""

    id: str
    expires: datetime

    @classmethod
    def lasting(cls, id: str, now: datetime, budget_s: float) -> "Run":
        """With time for starts and removals behind its budget."""
        return cls(id, now + timedelta(seconds=budget_s) + timedelta(hours=2))

    def named(self, number: int) -> str:
        """The endpoint of the run's n-th start."""
        return f"{OURS}{self.id}-{number:03}"

    def tags_of(self, candidate: str) -> dict[str, str]:
        expires = self.expires.replace(microsecond=0).isoformat()
        return {TAG_RUN: self.id, TAG_EXPIRES: expires, TAG_CANDIDATE: _UNTAGGABLE.sub("_", candidate)[:_MOST_TAG]}


def calls_of(hosting: Hosting, tags: Mapping[str, str]) -> list[Call]:
    """As `gateway deploy sagemaker` would make it, with these tags besides."""
    return [replace(call, parameters=_tagged(call.parameters, tags)) for call in creation(hosting)]


def _tagged(parameters: Mapping[str, Any], tags: Mapping[str, str]) -> dict[str, Any]:
    found = dict(parameters)
    if isinstance(listed := found.get("Tags"), Sequence):
        found["Tags"] = [*listed, *({"Key": key, "Value": value} for key, value in tags.items())]
    if isinstance(written := found.get("Tagging"), str):
        found["Tagging"] = urlencode(dict(parse_qsl(written)) | dict(tags))
    return found


def run_in(name: str) -> str:
    """The run that a name is of; "" if it is none of ours."""
    found = _RUN.match(name.removeprefix(LOGS).removeprefix(f"{KEYS}/"))
    return found[1] if found else ""


def due(tags: Mapping[str, str], now: datetime, run: str | None) -> bool:
    """Whether something may be removed: it is of that run; None: whose time is over. A time without a zone is UTC."""
    if run is not None:
        return tags.get(TAG_RUN) == run
    try:
        expires = datetime.fromisoformat(tags[TAG_EXPIRES])
    except (KeyError, ValueError):
        return False  # not ours, or nobody can tell
    return TAG_RUN in tags and (expires if expires.tzinfo else expires.replace(tzinfo=UTC)) < now
