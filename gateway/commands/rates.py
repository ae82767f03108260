"""What came between two looks at a gateway's status: rates, percentiles, shares, cost. Pure; the status page does the same.

A status is what `GET /v2/status` answers: counts that only rise, and states. `edges/status.html` has these functions in
JavaScript, by the same names, and a test holds the two together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final, TypeAlias

Told: TypeAlias = Mapping[str, Any]
"""A status, or a model or backend of one."""

_KEPT_S: Final = 70.0
_NOT_YET: Final[Told] = {}


@dataclass(frozen=True, slots=True)
class BackendFigures:
    """share: of the model's rows. batch_ms: an execution. None: nothing was run."""

    name: str
    share: float | None
    rows_per_batch: float | None
    batch_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one model. in_time: the share within the SLO, of the requests that count for it. None: nothing came, or there is none,
    or no price.

    p50_ms, p99_ms: interpolated within the histogram's bucket; inf: above its last bound. usd_per_million: of good answers.
    """

    span_s: float
    answered: int
    ok: int
    p50_ms: float | None
    p99_ms: float | None
    in_time: float | None
    rows_per_batch: float | None
    padding: float | None
    usd_per_million: float | None
    backends: tuple[BackendFigures, ...]

    @property
    def requests_per_s(self) -> float:
        return self.answered / self.span_s

    @property
    def failed_per_s(self) -> float:
        return (self.answered - self.ok) / self.span_s


def key_of(model: Told) -> tuple[str, str]:
    return model["name"], model["version"]


def between(then: Told | None, now: Told, span_s: float) -> Figures:
    """Of one model. then: None, if it was not there yet."""
    requests: Mapping[str, int] = then["requests"] if then else {}
    answered = sum(now["requests"].values()) - sum(requests.values())
    ok = now["requests"].get("ok", 0) - requests.get("ok", 0)
    bounds, took = now["latency"]["bounds_ms"], _grown(then["latency"]["counts"] if then else (), now["latency"]["counts"])
    slo, slo_before = now["slo_requests"], then["slo_requests"] if then else {}
    met, missed = (slo[result] - slo_before.get(result, 0) for result in ("met", "missed"))
    before = {backend["name"]: backend for backend in then["backends"]} if then else {}
    grown = [(backend, _since(before.get(backend["name"], _NOT_YET), backend)) for backend in now["backends"]]
    rows, batches, padded = (sum(since[key] for _, since in grown) for key in ("batch_rows", "batches", "padding_rows"))
    hourly = now["usd_per_hour"]
    return Figures(
        span_s=span_s,
        answered=answered,
        ok=ok,
        p50_ms=quantile(bounds, took, 0.5),
        p99_ms=quantile(bounds, took, 0.99),
        in_time=met / (met + missed) if met + missed else None,
        rows_per_batch=rows / batches if batches else None,
        padding=padded / (rows + padded) if rows + padded else None,
        usd_per_million=hourly / 3600 * span_s / ok * 1e6 if hourly is not None and ok > 0 else None,
        backends=tuple(
            BackendFigures(
                backend["name"],
                since["batch_rows"] / rows if rows else None,
                since["batch_rows"] / since["batches"] if since["batches"] else None,
                since["compute_ms"] / since["executions"] if since["executions"] else None,
            )
            for backend, since in grown
        ),
    )


def quantile(bounds: Sequence[float], counts: Sequence[int], q: float) -> float | None:
    """counts: in each bucket, with one more for what is above all bounds. inf: that is where it lies. None: there are none."""
    total = sum(counts)
    if not total:
        return None
    below = 0
    for index, count in enumerate(counts):
        if count and below + count >= q * total:
            if index == len(bounds):
                return inf
            low = bounds[index - 1] if index else 0.0
            return low + (bounds[index] - low) * (q * total - below) / count
        below += count
    return inf


class Statuses:
    """Statuses of one gateway, oldest first."""

    def __init__(self) -> None:
        self._kept: list[Told] = []

    @property
    def last(self) -> Told:
        """The youngest. Raises: IndexError, if there is none."""
        return self._kept[-1]

    def add(self, status: Told) -> None:
        """Take one in. One that was there before is nothing new: a gateway keeps each for half a second."""
        if self._kept and status["time_s"] == self.last["time_s"]:
            return
        if self._kept and (status["time_s"] < self.last["time_s"] or _restarted(self.last, status)):
            self._kept.clear()
        self._kept.append(status)
        while len(self._kept) > 2 and self._kept[1]["time_s"] <= status["time_s"] - _KEPT_S:
            del self._kept[0]

    def figures(self, model: Told, span_s: float) -> Figures | None:
        """Of a model of the last status, over so long, or as long as there is. None: it was looked at only once."""
        now_s = self.last["time_s"]
        others = [status for status in self._kept[:-1] if now_s - status["time_s"] <= 1.5 * span_s + 2]
        if not others:
            return None
        base = next((status for status in reversed(others) if now_s - status["time_s"] >= span_s - 0.05), others[0])
        return between(_by_key(base["models"]).get(key_of(model)), model, now_s - base["time_s"])


def _since(then: Told, now: Told) -> dict[str, float]:
    return {key: now[key] - then.get(key, 0) for key in ("batches", "batch_rows", "padding_rows", "executions", "compute_ms")}


def _grown(then: Sequence[int], now: Sequence[int]) -> list[int]:
    return [count - (then[index] if index < len(then) else 0) for index, count in enumerate(now)]


def _restarted(then: Told, now: Told) -> bool:
    """A count fell: other processes count now."""
    before = _by_key(then["models"])
    for model in now["models"]:
        was = before.get(key_of(model))
        if was is None:
            continue
        old, new = was["latency"]["counts"], model["latency"]["counts"]
        if old and len(old) != len(new):
            return True
        if sum(model["requests"].values()) < sum(was["requests"].values()) or any(
            n < o for o, n in zip(old, new, strict=False)
        ):
            return True
    return False


def _by_key(models: Iterable[Told]) -> dict[tuple[str, str], Told]:
    return {key_of(model): model for model in models}
