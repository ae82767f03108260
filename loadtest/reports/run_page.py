"""One run of `loadtest run` as an HTML page: the verdict, latency over time and as a distribution, and what went wrong."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from markupsafe import Markup

from loadtest.reports import pages
from loadtest.reports.charts import Axis, AxisSpan, Bar, Chart, Line, Point, Series, draw, stacked_bars
from loadtest.reports.tables import Column, table
from loadtest.reports.terminal import remedy
from loadtest.results import Block, RunResult
from loadtest.wording import attained, counted, figures, ms, percent, rate, slo_in_words

P50, P99, GOOD = 0, 1, 2  # colours
SIGNALS: Final = {
    "pass": ("SLO PASS", "good", "The SLO is kept"),
    "fail": ("SLO FAIL", "bad", "The SLO is missed"),
    "undecided": ("SLO UNDECIDED", "open", "The run is too short to tell whether the SLO is kept"),
    None: ("MEASURED", "good", "No SLO was asked for"),
}
INVALID: Final = ("INVALID", "bad", "What was asked was not offered: the figures say nothing about the server")
_DISTURBED: Final = (
    "INVALID",
    "bad",
    "Other work on this machine may have decided it: the figures say nothing about the server",
)


def render(result: RunResult) -> str:
    """The whole page."""
    spec = result.spec
    word, kind, headline = SIGNALS[result.verdict] if result.valid else _DISTURBED if result.disturbed else INVALID
    return pages.render(
        "run.html",
        title=f"How does {spec.model or spec.target} answer {_load(result)}?",
        word=word,
        kind=kind,
        headline=headline + (f": {slo_in_words(str(spec.slo))}" if spec.slo and result.valid else ""),
        reasons=() if result.valid else (*result.reasons, f"What to do: {remedy(result)}"),
        facts=_facts(result),
        charts=_charts(result),
        objectives=_objectives(result) if result.valid else [],
        errors=_errors(result),
        stalls=_stalls(result),
        machine=_machine(result),
        notes=(*(("Ended early: the figures are of what was done until then.",) if result.partial else ()), *result.warnings),
        foot=" · ".join(
            filter(
                None,
                (
                    spec.label,
                    spec.target,
                    spec.protocol,
                    spec.pattern,
                    f"{result.started_at} to {result.ended_at}",
                    f"seed {spec.seed}",
                    f"{result.generator.processes} sending process(es)",
                ),
            )
        ),
    )


def _load(result: RunResult) -> str:
    within = f" within {slo_in_words(str(result.spec.slo))}" if result.spec.slo else ""
    return f"{rate(result.asked_rps)}{within}"


def _facts(result: RunResult) -> list[tuple[str, str]]:
    own = result.generator
    told = []
    if result.attainment is not None and result.valid:
        kept = result.attainment
        told.append((attained(kept.estimate), f"of requests within the SLO ({attained(kept.lower)} to {attained(kept.upper)})"))
    good = "goodput: answers within the SLO" if result.spec.slo else "answered"
    if result.succeeded and result.valid:
        told += [
            (ms(result.latency.p99), "p99 latency, from the intended send time"),
            (ms(result.latency.p95), "p95 latency"),
            (ms(result.latency.p50), "p50 latency"),
        ]
    told += [
        *([(rate(result.goodput_rps), good)] if result.valid else ()),
        (rate(result.sent_rps), f"sent, of {rate(result.asked_rps)} asked"),
        (percent(result.error_rate), f"of {result.requests - result.overdue:,} requests failed"),
        (ms(own.send_lag_p99_ms), f"send lag p99 of the load generator, at most {ms(own.send_lag_limit_ms)} is allowed"),
    ]
    return told


def _charts(result: RunResult) -> list[tuple[str, str, Markup]]:
    blocks = [block for block in result.blocks if block.requests]
    strictest = result.spec.slo.strictest if result.spec.slo else None
    limits = [Line(strictest.limit_ms, f"SLO: {slo_in_words(str(result.spec.slo))}")] if strictest else []
    time = Axis("seconds since the start")
    latency = [_over_time(blocks, P50, "p50_ms", "p50"), _over_time(blocks, P99, "p99_ms", "p99")]
    rates = [
        Series(P50, [Point(b.start_s, b.requests / b.duration_s, counted(b.requests, "request")) for b in blocks], name="all"),
        Series(GOOD, [Point(b.start_s, b.met / b.duration_s, f"{b.met} within the SLO") for b in blocks], name="good"),
    ]
    stalls = [AxisSpan(stall.start_s, stall.start_s + stall.duration_ms / 1e3, "") for stall in result.stalls]
    stalled = " Shaded: stalls, listed below." if stalls else ""
    warmup = " Hollow: warm-up, not counted." if any(block.warmup for block in blocks) else ""
    good = (
        "Requests, and those of them within the SLO." if result.spec.slo else "Requests, and those of them that were answered."
    )
    server = result.server
    bars = [Bar("mean request", P50, (server.queue_ms, server.compute_ms, server.overhead_ms))] if server else []
    cards = [
        (
            "Latency over time",
            f"p50 and p99 of each block.{warmup}{stalled}",
            draw(Chart(time, Axis("ms", log=True), latency, limits, spans=stalls)),
        ),
        ("Distribution", "Successes only: 10 is the p90, 100 the p99, 1000 the p99.9.", draw(_distribution(result, limits))),
        ("Rate over time", good, draw(Chart(time, Axis("per second"), rates))),
        (
            "Where the time goes",
            f"Means per request, from the server's own statistics{', warm-up included' * bool(result.warmup_requests)}.",
            stacked_bars(bars),
        ),
    ]
    return [(title, text, Markup(drawing)) for title, text, drawing in cards if drawing]  # charts escape what they write


def _over_time(blocks: Sequence[Block], colour: int, field: str, name: str) -> Series:
    points = []
    for block in blocks:
        value = getattr(block, field)
        if value:
            points.append(
                Point(block.start_s, value, f"{name} {ms(value)} of {counted(block.requests, 'request')}", not block.warmup)
            )
    return Series(colour, points, name=name)


def _distribution(result: RunResult, limits: Sequence[Line]) -> Chart:
    """Latency over 1 / (1 - share), logarithmic in both, as HDR histograms are drawn: 10 is p90, 100 p99, 1000 p99.9."""
    cells = result.latency_histogram
    total = sum(count for _, count in cells)
    points = []
    for (edge_ns, _), below in zip(cells, accumulate(count for _, count in cells), strict=True):
        rest = max(1 - below / total, 0.5 / total)
        points.append(Point(1 / rest, edge_ns / 1e6, f"{below / total:.4%} up to {ms(edge_ns / 1e6)}"))
    step = max(1, math.ceil(len(points) / 300))  # more would not be seen; the tail is kept whole
    shown = [*points[:-50:step], *points[-50:]]
    return Chart(
        Axis("1 / share of slower requests", log=True), Axis("ms", log=True), [Series(P50, shown, marks=False)], limits
    )


def _objectives(result: RunResult) -> list[Column]:
    return table(
        result.objectives,
        [
            ("objective", False, lambda found: slo_in_words(found.objective)),
            ("required", True, lambda found: attained(found.required)),
            ("within", True, lambda found: attained(found.attainment.estimate)),
            ("95 % interval", True, lambda found: f"{attained(found.attainment.lower)} to {attained(found.attainment.upper)}"),
            ("verdict", False, lambda found: found.verdict),
            ("requests that weigh as one", True, lambda found: figures(found.design_effect)),
            ("more requests needed", True, lambda found: f"{found.requests_needed:,}" if found.requests_needed else ""),
        ],
    )


def _stalls(result: RunResult) -> list[Column]:
    return table(
        result.stalls,
        [
            ("at", True, lambda stall: f"{stall.start_s:.1f} s"),
            ("nobody was answered for", True, lambda stall: ms(stall.duration_ms)),
            ("whose it was", False, lambda stall: stall.whose),
            ("other work took", True, lambda stall: ms(stall.machine_ms) if stall.machine_ms else ""),
            ("the load generator took", True, lambda stall: ms(stall.generator_ms) if stall.generator_ms else ""),
        ],
    )


def _machine(result: RunResult) -> str:
    """What other work on this machine did to the run; empty where that cannot be seen."""
    machine = result.machine
    if machine is None:
        return ""
    told = [f"Other work had a core that the server wanted for {percent(machine.taken_share)} of the time."]
    if machine.steal_share:
        told.append(f"The hypervisor gave {percent(machine.steal_share)} of it to other machines.")
    if machine.others:
        busiest = ", ".join(f"{name} ({figures(cores, 2)} cores)" for name, cores in machine.others[:3])
        told.append(f"Most went to {busiest}.")
    if machine.marked and result.spec.slo:
        without = f": without them the SLO is {machine.without_marked}" if machine.without_marked else ""
        told.append(f"{machine.marked:,} requests ({percent(machine.marked_share)}) were late for that alone{without}.")
    return " ".join(told)


def _errors(result: RunResult) -> list[Column]:
    return table(
        result.errors.items(),
        [
            ("requests", True, lambda error: f"{error[1]:,}"),
            ("kind", False, lambda error: error[0]),
            ("one message", False, lambda error: result.error_samples.get(error[0], "")),
        ],
    )
