"""Has it become slower? Two results of the same load, compared.

Results of the same seed and duration are compared block by block: block 7 of both was offered the very same requests, so what
the traffic did to both cancels out. Others are compared as two samples (Welch). A change counts if its interval excludes zero
and its estimate is beyond the tolerance; the intervals together hold at 95 % (Bonferroni over the metrics).

A queue that drains slowly carries over from block to block, and with it what chance did to one of the runs: near the knee two
equal servers differ for seconds. So the error of a mean allows for what neighbouring blocks share (`statistics.mean_error`).
Not that of the rate of a closed loop, where no more wait than there are users, nor that of the share that succeeded: failures
do not queue. There one outage, however long, would be one event, and tell nothing. One that slows is told by the SLO's verdict.
"""

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal
from xml.etree import ElementTree

import numpy as np
from scipy import special

from loadtest.errors import UsageError
from loadtest.load.patterns import is_closed, parse
from loadtest.load.payload_limits import range_of, values_of
from loadtest.results import Block, LoadSpec, RunResult
from loadtest.verdict.decision import CONFIDENCE
from loadtest.verdict.statistics import event_error, independent_error, mean_error

Change = Literal["regression", "improvement", "same", "undecided"]

_SUCCEEDED: Final = "succeeded"
_SHARES: Final = ("attainment", _SUCCEEDED)  # metrics that are shares
_ANSWERED: Final = "answered (1/s)"
_MIN_BLOCKS: Final = 5
_DUST: Final = 1e-9  # of floats: what lies so near to a tolerance is not beyond it
_CASES: Final = "loadtest.compare"  # CI knows cases again by it: no module's path
_ERRORS: Final = {_SUCCEEDED: event_error, _ANSWERED: independent_error}  # of a metric's mean, where not `mean_error`
_LOAD: Final = ("pattern", "rate_rps", "duration_s", "slo", "rows", "length", "values")  # what must be equal to compare
# Digests of traces, best first, and the options of a pattern in whose place they count. Older results have no arrivals.
_TRACES: Final = {"arrivals": ("file", "column"), "traces": ("file",)}
_NOTED: Final = (
    *("pattern", "protocol", "model", "version", "connections", "processes", "payloads", "content_type", "lengths", "pad"),
    "timeout_s",
)


@dataclass(frozen=True, slots=True)
class ComparedMetric:
    """One line of a comparison. change, lower, upper: relative (0.1 is 10 % more), or a difference of shares for _SHARES.

    None where there are too few blocks to tell, or nothing to be relative to.
    """

    name: str
    base: float | None
    new: float | None
    change: float | None
    lower: float | None
    upper: float | None
    tolerance: float
    verdict: Change


@dataclass(frozen=True, slots=True)
class Comparison:
    """paired: block by block. notes: what to keep in mind. lost_slo: why an SLO is a regression by itself, or ""."""

    verdict: Change
    paired: bool
    blocks: int
    metrics: tuple[ComparedMetric, ...]
    notes: tuple[str, ...]
    lost_slo: str = ""


def compare(base: RunResult, new: RunResult, *, tolerance: float = 0.05, share_tolerance: float = 0.005) -> Comparison:
    """Compare two valid runs. tolerance: of relative changes; share_tolerance: of _SHARES.

    Raises: UsageError, if their loads differ.
    """
    closed = is_closed(base.spec.pattern)
    alike = not closed and base.spec.seed == new.spec.seed and _grid(base) == _grid(new)
    traces = next((kind for kind in _TRACES if all(kind in result.digests for result in (base, new))), "")
    meant = [{name: _meant(result.spec, name, apart=_TRACES.get(traces, ())) for name in _LOAD} for result in (base, new)]
    different = [f"{name} {_both(base, new, name)}" for name in _LOAD if meant[0][name] != meant[1][name]]
    if not different and (_differ(base, new, traces) or (alike and _due_otherwise(base, new))):
        different.append(f"pattern {_both(base, new, 'pattern')} (with requests due at other times)")
    other_requests = _differ(base, new, "requests")
    if other_requests and (base.spec.payloads or new.spec.payloads):
        different.append(f"payloads {_both(base, new, 'payloads')} (with other requests in them)")
    if different:
        raise UsageError(f"compare: the runs had different loads: {', '.join(different)}")
    paired = alike and not other_requests
    first = max(_first(base), _first(new)) if paired else 0
    before = [block for block in base.blocks if not block.warmup and block.index >= first]
    after = [block for block in new.blocks if not block.warmup and block.index >= first]
    if paired:
        before, after = before[: len(after)], after[: len(before)]
    compared = [
        _Compared(
            f"latency {name} (ms)",
            _known(base, getattr(base.latency, name)),
            _known(new, getattr(new.latency, name)),
            lambda block, field=f"{name}_ms": _logarithm(getattr(block, field)),  # type: ignore[misc]  # no type for it
            more_is_better=False,
            tolerance=tolerance,
        )
        for name in ("p50", "p99", "mean")
    ]
    if base.attainment and new.attainment:
        attained = base.attainment.estimate, new.attainment.estimate
        compared.append(_Compared("attainment", *attained, _share_met, more_is_better=True, tolerance=share_tolerance))
    shares = _succeeded(base), _succeeded(new)
    compared.append(_Compared(_SUCCEEDED, *shares, _share_succeeded, more_is_better=True, tolerance=share_tolerance))
    if closed:
        rates = base.succeeded_rps, new.succeeded_rps
        compared.append(_Compared(_ANSWERED, *rates, _answered, more_is_better=True, tolerance=tolerance))
    confidence = 1 - (1 - CONFIDENCE) / len(compared)
    metrics = tuple(_metric(each, before, after, paired=paired, confidence=confidence) for each in compared)
    lost_slo = _turned(base, new) if _slo_is_lost(base, new, before, after, paired=paired) else ""
    verdicts = {metric.verdict for metric in metrics}
    verdict: Change = "undecided" if "undecided" in verdicts else "same"
    if lost_slo or "regression" in verdicts:
        verdict = "regression"
    elif "improvement" in verdicts or _slo_is_lost(new, base, after, before, paired=paired):
        verdict = "improvement"
    notes = _notes(base, new, paired=paired)
    return Comparison(verdict, paired, min(len(before), len(after)), metrics, notes, lost_slo)


def _differ(base: RunResult, new: RunResult, kind: str) -> bool:
    """Whether these digests do; not where a result does not tell."""
    return len({result.digests[kind] for result in (base, new) if kind in result.digests}) > 1


def _due_otherwise(base: RunResult, new: RunResult) -> bool:
    """Whether blocks of the same length asked for other numbers of requests; not where a result does not tell."""
    pairs = zip(base.blocks, new.blocks, strict=True)
    asked = [(old.asked, now.asked) for old, now in pairs if old.duration_s == now.duration_s]
    return all(map(any, zip(*asked, strict=True))) and any(old != now for old, now in asked)


def _both(base: RunResult, new: RunResult, name: str) -> str:
    return f"{_told(getattr(base.spec, name))} and {_told(getattr(new.spec, name))}"


def _meant(spec: LoadSpec, name: str, *, apart: Collection[str]) -> object:
    """What a field asks for, in whatever way it is written. apart: options of a pattern that do not count."""
    if name == "pattern":
        phases = parse(spec.pattern, rate_rps=1.0, duration_s=1.0)
        return [(each.kind, {key: value for key, value in each.options.items() if key not in apart}) for each in phases]
    if name in ("rows", "length"):
        return range_of(f"--{name}", getattr(spec, name))
    return values_of("--values", spec.values, ()) if name == "values" else getattr(spec, name)


@dataclass(frozen=True, slots=True)
class _Compared:
    """What is compared. of: of one block, the two whose sums over all blocks are divided; None where the block has none."""

    name: str
    base: float | None
    new: float | None
    of: Callable[[Block], tuple[float, float] | None]
    more_is_better: bool
    tolerance: float


def _share_met(block: Block) -> tuple[float, float] | None:
    return (block.met, block.requests) if block.requests else None


def _share_succeeded(block: Block) -> tuple[float, float] | None:
    return (block.succeeded, ended) if (ended := block.succeeded + block.failed) else None


def _answered(block: Block) -> tuple[float, float]:
    return block.succeeded, block.duration_s


def _logarithm(value: float | None) -> tuple[float, float] | None:
    return (math.log(value), 1) if value else None


def _known(result: RunResult, value: float) -> float | None:
    return value if result.latency.count else None


def _succeeded(result: RunResult) -> float | None:
    return 1 - result.error_rate if result.requests > result.overdue else None


def _grid(result: RunResult) -> tuple[float, int]:
    return (result.blocks[0].duration_s, len(result.blocks)) if result.blocks else (0.0, 0)


def _first(result: RunResult) -> int:
    return sum(block.warmup for block in result.blocks)


def _metric(
    compared: _Compared, before: Sequence[Block], after: Sequence[Block], *, paired: bool, confidence: float
) -> ComparedMetric:
    name, base, new, tolerance = compared.name, compared.base, compared.new, compared.tolerance
    found = _difference(compared.of, before, after, _ERRORS.get(name, mean_error), paired=paired, confidence=confidence)
    unknown = ComparedMetric(name, base, new, None, None, None, tolerance, "undecided")
    if found is None:
        return unknown
    was, change, reach = found
    lower, upper = change - reach, change + reach
    if name in _SHARES:
        lower, upper = max(lower, -1.0), min(upper, 1.0)
    elif name != _ANSWERED:  # from logarithms
        change, lower, upper = math.expm1(change), math.expm1(lower), math.expm1(upper)
    elif was > 0:
        change, lower, upper = change / was, max(lower / was, -1.0), upper / was
    else:
        return unknown
    verdict = _decide(change, lower, upper, tolerance, compared.more_is_better)
    return ComparedMetric(name, base, new, change, lower, upper, tolerance, verdict)


def _difference(
    of: Callable[[Block], tuple[float, float] | None],
    before: Sequence[Block],
    after: Sequence[Block],
    error_of: Callable[[np.ndarray], tuple[float, float]],
    *,
    paired: bool,
    confidence: float,
) -> tuple[float, float, float] | None:
    """What the ratio was, by how much it changed, and how far its interval reaches; None where there are too few blocks."""
    olds, news = [of(block) for block in before], [of(block) for block in after]
    if paired:
        both = [(old, now) for old, now in zip(olds, news, strict=True) if old is not None and now is not None]
        olds, news = [old for old, _ in both], [now for _, now in both]
    first, second = [old for old in olds if old is not None], [now for now in news if now is not None]
    if min(len(first), len(second)) < _MIN_BLOCKS:
        return None
    was, old_rest = _ratio(first)
    now_is, new_rest = _ratio(second)
    if paired:
        error, freedom = error_of(new_rest - old_rest)
    else:
        errors = error_of(old_rest), error_of(new_rest)
        error, freedom = math.hypot(errors[0][0], errors[1][0]), _welch(*errors)
    return was, now_is - was, float(special.stdtrit(freedom, 1 - (1 - confidence) / 2)) * error


def _ratio(values: Sequence[tuple[float, float]]) -> tuple[float, np.ndarray]:
    """A ratio of sums, and by how much each block moves it: (n,), of mean 0 (Cochran, Sampling Techniques, 1977, 2.11)."""
    above, below = np.array(values, np.float64).T
    ratio = float(above.sum() / below.sum())
    return ratio, (above - ratio * below) / below.mean()


def _welch(*errors: tuple[float, float]) -> float:
    """The degrees of freedom of a difference. errors: (standard error, degrees of freedom) of both means."""
    total = sum(error**2 for error, _ in errors)
    if total == 0:
        return sum(freedom for _, freedom in errors)
    return total**2 / sum(error**4 / freedom for error, freedom in errors)


def _decide(change: float, lower: float, upper: float, tolerance: float, more_is_better: bool) -> Change:
    tolerance += _DUST
    if abs(change) > tolerance and not lower <= 0 <= upper:
        return "improvement" if (change > 0) == more_is_better else "regression"
    return "same" if -tolerance <= lower and upper <= tolerance else "undecided"


def _slo_is_lost(base: RunResult, new: RunResult, before: Sequence[Block], after: Sequence[Block], *, paired: bool) -> bool:
    """Whether it fails in `new`, held in the sample of `base`, and less of an objective is kept than by chance.

    The last is asked as one server fails in some of its runs and holds in others: where few misses are allowed, or they come in
    bursts, that would be 6 to 15 % of pairs. Blocks are taken as of events: a burst within one is one, an outage is many.
    """
    held = bool(base.objectives) and all(objective.overrun <= 1 for objective in base.objectives)
    if not held or new.verdict != "fail" or base.partial or new.partial:
        return False
    failed = {objective.objective for objective in new.objectives if objective.verdict == "fail"}
    shares = {_share_succeeded if name.startswith("errors<") else _share_met for name in failed}
    found = (_difference(of, before, after, event_error, paired=paired, confidence=CONFIDENCE) for of in shares)
    return any(difference is not None and difference[1] + difference[2] < 0 for difference in found)


def _notes(base: RunResult, new: RunResult, *, paired: bool) -> tuple[str, ...]:
    notes: list[str] = []
    if not paired:
        closed = is_closed(base.spec.pattern)
        reason = "users send when they are answered" if closed else "seeds, blocks or requests differ"
        notes.append(f"not paired: {reason}, so differences in traffic count as noise")
    if _differ(base, new, "requests"):
        notes.append("requests differ: the models state other inputs")
    for name in _NOTED:
        if getattr(base.spec, name) != getattr(new.spec, name):
            notes.append(f"{name} differs: {_both(base, new, name)}")
    if _differ(base, new, "headers"):
        old, now = (_told(tuple(name for name, _ in result.spec.headers)) for result in (base, new))
        notes.append(f"headers differ, or what they say: {old} and {now}")
    for name, result in (("base", base), ("new", new)):
        if result.partial:
            notes.append(f"{name} is PARTIAL: it ended early, so whether its SLO was lost is not told")
    if base.verdict != new.verdict:
        notes.append(_turned(base, new))
    return tuple(notes)


def _turned(base: RunResult, new: RunResult) -> str:
    return f"the SLO's verdict was {base.verdict} and is {new.verdict}"


def _told(value: object) -> str:
    """A field of a spec."""
    return str(", ".join(value) if isinstance(value, tuple) else value) if value else "(none)"


def markdown(comparison: Comparison, base: RunResult, new: RunResult) -> str:
    """A table for a pull request."""
    way = f"{comparison.blocks} blocks, {'paired' if comparison.paired else 'not paired'}"
    lines = [
        f"### loadtest: {comparison.verdict}",
        "",
        f"{_code(_title(base))} → {_code(_title(new))}, {way}",
        "",
        "| metric | base | new | change of blocks | 95 % interval | verdict |",
        "|---|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(cells(metric))} |" for metric in comparison.metrics]
    lines += ["", *(f"- {note}" for note in comparison.notes)] if comparison.notes else []
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    """A code span: within more backticks than it has in a row, a space apart from its own (CommonMark 0.31, 6.1)."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}"


def _title(result: RunResult) -> str:
    return result.spec.label or result.spec.target


def cells(metric: ComparedMetric) -> tuple[str, ...]:
    points = metric.name in _SHARES

    def value(number: float | None) -> str:
        return "-" if number is None else f"{number:.3%}" if points else f"{number:.3f}"

    def change(number: float | None) -> str:
        return "-" if number is None else f"{number * 100:+.2f} points" if points else f"{number:+.1%}"

    interval = f"{change(metric.lower)} to {change(metric.upper)}"
    return metric.name, value(metric.base), value(metric.new), change(metric.change), interval, metric.verdict


def junit(comparison: Comparison) -> str:
    """One test case per metric: a regression fails, an undecided one is skipped. One more fails where the SLO is lost."""
    lost = bool(comparison.lost_slo)
    failures = sum(metric.verdict == "regression" for metric in comparison.metrics) + lost
    skipped = sum(metric.verdict == "undecided" for metric in comparison.metrics)
    attributes = {"tests": len(comparison.metrics) + lost, "failures": failures, "skipped": skipped, "errors": 0}
    suite = ElementTree.Element(
        "testsuite", {"name": "loadtest compare"} | {key: str(count) for key, count in attributes.items()}
    )
    for metric in comparison.metrics:
        case = ElementTree.SubElement(suite, "testcase", classname=_CASES, name=metric.name)
        text = " | ".join(cells(metric)[1:])
        if metric.verdict == "regression":
            ElementTree.SubElement(case, "failure", message=text)
        elif metric.verdict == "undecided":
            ElementTree.SubElement(case, "skipped", message=text)
        else:
            ElementTree.SubElement(case, "system-out").text = text
    if lost:
        case = ElementTree.SubElement(suite, "testcase", classname=_CASES, name="SLO")
        ElementTree.SubElement(case, "failure", message=comparison.lost_slo)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
