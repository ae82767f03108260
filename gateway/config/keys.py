"""A file of API keys: who may ask what, how much of it, and until when. It holds no key, only what a key is known by."""

import contextlib
import datetime
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from gateway.config.fields import ModelName, Strict
from gateway.documents.faults import Unfit

PREFIX: Final = "gwk_"  # of keys, by which scanners for secrets find them
_NOT_HERE: Final = "the key itself is not written here"
_LONGEST_S: Final = 1e9  # whose nanoseconds an integer of 64 bits holds
_MOMENT: Final = "a date such as 2027-01-31, or 2027-01-31T12:00:00Z"
Scope = Literal["infer", "metrics", "status", "admin"]


def _name(value: object) -> object:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_.@-]{1,64}", value):
        raise Unfit(expected="1 to 64 letters, digits, and characters of _.@-")
    if value.startswith(PREFIX):
        raise Unfit(expected="whose key it is", remedy=_NOT_HERE)
    return value


def _hash(value: object) -> object:
    if not isinstance(value, str) or not re.fullmatch(r"sha256:[0-9a-f]{64}", value):
        raise Unfit(expected="sha256: and 64 digits, as `gateway key` prints it", remedy=_NOT_HERE)
    return value


def _moment(value: object) -> object:
    """A date is its first moment. In UTC, as messages tell it."""
    if isinstance(value, datetime.datetime):
        with contextlib.suppress(OverflowError):  # of the first or the last hours of all years
            return value.astimezone(datetime.UTC) if value.tzinfo is not None else value.replace(tzinfo=datetime.UTC)
        raise Unfit(expected=_MOMENT)
    if isinstance(value, datetime.date):
        return datetime.datetime(value.year, value.month, value.day, tzinfo=datetime.UTC)
    if value is None:
        return None
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return _moment(datetime.datetime.fromisoformat(value))
    raise Unfit(expected=_MOMENT)


class KeySection(Strict):
    """One key."""

    name: Annotated[str, BeforeValidator(_name)]  # in messages and logs
    hash: Annotated[str, BeforeValidator(_hash)]
    models: tuple[ModelName, ...] | None = None  # None: all
    scopes: tuple[Scope, ...] = Field(default=("infer",), min_length=1)
    expires: Annotated[datetime.datetime | None, BeforeValidator(_moment)] = None  # from then on it is none
    requests_per_s: float | None = Field(default=None, ge=1e-6, le=1e6)  # None: without a limit
    burst: int | None = Field(default=None, ge=1, le=1_000_000)  # at once, after a pause; None: what comes in a second
    concurrent: int | None = Field(default=None, ge=1, le=1_000_000)  # in flight

    def together(self) -> Iterable[Iterator[Unfit]]:
        """For `gateway.documents.lenient`, as all of this name."""
        return (self._burst_of_nothing(),)

    def _burst_of_nothing(self) -> Iterator[Unfit]:
        if self.burst is None:
            return
        if self.requests_per_s is None:
            yield Unfit("there is no requests_per_s beside it", remedy="set that, or remove this", at=("burst",))
        elif self.burst > _LONGEST_S * self.requests_per_s:
            most = int(_LONGEST_S * self.requests_per_s)
            yield Unfit("takes longer than 30 years to be regained", expected=f"at most {most}", at=("burst",))


class KeyFile(Strict):
    """A whole file."""

    keys: tuple[KeySection, ...] = Field(max_length=4096)

    def together(self) -> Iterable[Iterator[Unfit]]:
        return (self._twice("name"), self._twice("hash"))

    def _twice(self, what: str) -> Iterator[Unfit]:
        seen = set()
        for index, key in enumerate(self.keys):
            value = getattr(key, what)
            if value in seen:
                yield Unfit("another key has it too", remedy="each key is listed once", at=("keys", index, what))
            seen.add(value)
