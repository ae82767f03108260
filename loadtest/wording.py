"""Figures and names as people read them: the same everywhere, never more digits than were measured, never an exponent."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

_COMPARED: Final = re.compile(r"(?P<name>[\w. ]+)<(?P<limit>[\d.]+)(?P<unit>ms|%)")


def rate(rps: float) -> str:
    """Requests per second: `467`, `12,400`, `0.5`."""
    return f"{figures(rps)}/s"


def usd(amount: float) -> str:
    """`$0.0531`, `$195`."""
    return f"${figures(amount)}"


def ms(value: float) -> str:
    """`48.0 ms`, `0.50 ms`."""
    return f"{figures(value, 3 if value >= 1 else 2)} ms"


def percent(share: float) -> str:
    """`9 %`, `0.5 %`: two figures, whole above 10."""
    return f"{figures(100 * share, 2)} %"


def attained(share: float) -> str:
    """The share of requests that kept an SLO: `99.87 %`, never rounded up."""
    return f"{math.floor(share * 1e4 + 1e-6) / 100:.2f} %"


def chance(probability: float) -> str:
    """A probability that was estimated: never 100 % or 0 %."""
    if probability > 0.99:
        return "over 99 %"
    return "under 1 %" if probability < 0.01 else f"{probability:.0%}".replace("%", " %")


def counted(count: int, noun: str) -> str:
    """`1 row`, `2,000 rows`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def failures(errors: Mapping[str, int], samples: Mapping[str, str]) -> str:
    """Failed requests by kind, each with a message if there is one: `240 × http 500: boom, 3 × timeout`."""
    said = {kind: f": {words}" for kind, words in samples.items() if words}
    return ", ".join(f"{count:,} × {kind}{said.get(kind, '')}" for kind, count in errors.items())


def minutes(seconds: float, adjective: str = "") -> str:
    """`1 minute`, `12 more minutes`: rounded up."""
    whole = max(1, math.ceil(seconds / 60))
    return f"{whole} {adjective}minute{'' if whole == 1 else 's'}"


def clock(seconds: float) -> str:
    """`02:13`."""
    return f"{int(seconds) // 60:02}:{int(seconds) % 60:02}"


def slo_in_words(slo: str) -> str:
    """`p99<50ms,errors<0.1%` as `p99 under 50 ms and errors under 0.1 %`; what it does not know stays as it is."""
    return _COMPARED.sub(r"\g<name> under \g<limit> \g<unit>", slo).replace(",", " and ")


class Described(Protocol):
    """What a candidate and its report have in common."""

    @property
    def name(self) -> str: ...
    @property
    def instance_type(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def settings(self) -> Mapping[str, Any]: ...


def differences(candidates: Sequence[Described]) -> list[str]:
    """Of each candidate what tells it from the others: `c7i.large, sessions 2`; the name where that does not tell."""
    parts = [
        {"": one.instance_type, " ": one.backend, **{key: f"{key} {value}" for key, value in one.settings.items()}}
        for one in candidates
    ]
    keys = [key for key in dict.fromkeys(key for part in parts for key in part) if len({part.get(key) for part in parts}) > 1]
    told = [", ".join(part[key] for key in keys if part.get(key)) for part in parts]
    return told if all(told) and len(set(told)) == len(told) else [one.name for one in candidates]


def letters(place: int) -> str:
    """A, B, … Z, AA, AB: names for places from 0."""
    return (letters(place // 26 - 1) if place >= 26 else "") + chr(ord("A") + place % 26)


def figures(value: float, significant: int = 3) -> str:
    """Without an exponent, and with so many significant digits; all digits before the point."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, significant - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"
