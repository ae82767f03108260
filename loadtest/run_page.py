"""One run of `loadtest run` as an HTML page: the verdict, latency over time and as a distribution, and what went wrong."""

import math
from collections.abc import Sequence
from html import escape
from itertools import accumulate

from loadtest.charts import Axis, Bar, Chart, Line, Point, Series, draw, stacked_bars
from loadtest.html import chart_grid, facts, notes, page
from loadtest.results import Block, RunResult

P50, P99, OFFERED, GOOD = 0, 1, 0, 2  # colours


def render(result: RunResult) -> str:
    """The whole page."""
    spec = result.spec
    sections = [
        _verdict(result),
        notes((*result.reasons, *result.warnings)),
        _charts(result),
        _objectives(result),
        _errors(result),
    ]
    title = " · ".join(filter(None, (spec.label, spec.model, spec.target, spec.protocol, spec.pattern)))
    foot = f"{result.started_at} to {result.ended_at} · seed {spec.seed} · {result.generator.processes} sending process(es)"
    return page(title, sections, foot)


def _verdict(result: RunResult) -> str:
    told = {"pass": "SLO met", "fail": "SLO missed", "undecided": "Undecided", None: "No SLO asked"}[result.verdict]
    kind = {"pass": "", "fail": " no"}.get(result.verdict or "", " open")
    if not result.valid:
        told, kind = "INVALID: the generator could not do what was asked", " no"
    figures = [
        (f"{result.latency.p99:.3g} ms", "p99 latency, from the intended send time"),
        (f"{result.latency.p50:.3g} ms", "p50 latency"),
        (f"{result.sent_rps:.4g}/s", f"sent, of {result.asked_rps:.4g}/s asked"),
        (f"{result.goodput_rps:.4g}/s", "goodput: within the SLO" if result.spec.slo else "answered"),
        (f"{result.error_rate:.2%}", f"of {result.requests:,} requests failed"),
        (f"{result.generator.send_lag_p99_ms:.3g} ms", f"send lag p99, at most {result.generator.send_lag_limit_ms:.3g} ms"),
    ]
    if result.attainment is not None:
        share = result.attainment
        figures.insert(0, (f"{share.estimate:.2%}", f"within the SLO, {share.lower:.2%} to {share.upper:.2%}"))
    slo = f" ({result.spec.slo})" if result.spec.slo else ""
    return f'<div class="card answer{kind}"><p class="name">{escape(told + slo)}</p>{facts(figures)}</div>'


def _charts(result: RunResult) -> str:
    blocks = [block for block in result.blocks if block.requests]
    limit_ms = result.spec.slo.tightest_ms if result.spec.slo else None
    limits = [Line(limit_ms, f"SLO {result.spec.slo}")] if limit_ms else []
    time = Axis("seconds since the start")
    latency = [_over_time(blocks, P50, "p50_ms", "p50"), _over_time(blocks, P99, "p99_ms", "p99")]
    rates = [
        Series(OFFERED, [Point(b.start_s, b.requests / b.duration_s, f"{b.requests} requests") for b in blocks]),
        Series(GOOD, [Point(b.start_s, b.met / b.duration_s, f"{b.met} within the SLO") for b in blocks]),
    ]
    server = result.server
    bars = [Bar("mean request", P50, (server.queue_ms, server.compute_ms, server.overhead_ms))] if server else []
    cards = [
        (
            "Latency over time",
            "p50 (blue) and p99 (orange) of each block. Hollow: warm-up.",
            draw(Chart(time, Axis("ms", log=True), latency, limits)),
        ),
        ("Distribution", "Successes only: 10 is the p90, 100 the p99, 1000 the p99.9.", draw(_distribution(result, limits))),
        ("Rate over time", "Requests (blue) and those within the SLO (green).", draw(Chart(time, Axis("per second"), rates))),
        (
            "Where the time goes",
            "Means per request, from the server's own statistics.",
            stacked_bars(bars, ("queue", "compute", "overhead"), "ms"),
        ),
    ]
    return f"<h2>At a glance</h2>{chart_grid(cards)}"


def _over_time(blocks: Sequence[Block], colour: int, field: str, name: str) -> Series:
    points = []
    for block in blocks:
        value = getattr(block, field)
        if value:
            points.append(Point(block.start_s, value, f"{name} {value:.3g} ms of {block.requests} requests", not block.warmup))
    return Series(colour, points)


def _distribution(result: RunResult, limits: Sequence[Line]) -> Chart:
    """Latency over 1 / (1 - share), logarithmic in both, as HDR histograms are drawn: 10 is p90, 100 p99, 1000 p99.9."""
    cells = result.latency_histogram
    total = sum(count for _, count in cells)
    points = []
    for (edge_ns, _), below in zip(cells, accumulate(count for _, count in cells), strict=True):
        rest = max(1 - below / total, 0.5 / total)
        points.append(Point(1 / rest, edge_ns / 1e6, f"{below / total:.4%} up to {edge_ns / 1e6:.3g} ms"))
    step = max(1, math.ceil(len(points) / 300))  # more would not be seen; the tail is kept whole
    shown = [*points[:-50:step], *points[-50:]]
    return Chart(
        Axis("1 / share of slower requests", log=True), Axis("ms", log=True), [Series(P50, shown, marks=False)], limits
    )


def _objectives(result: RunResult) -> str:
    if not result.objectives:
        return ""
    columns = ("objective", "required", "within", "95 % interval", "if independent", "design effect", "verdict", "still needed")
    head = "".join(f"<th>{column}</th>" for column in columns)
    rows = ""
    for found in result.objectives:
        style = {"pass": "good", "fail": "bad"}.get(found.verdict, "soft")
        share, naive = found.attainment, found.binomial
        needed = "" if not found.requests_needed else f"{found.requests_needed:,} requests"
        cells = (f"{found.required:.2%}", f"{share.estimate:.3%}", f"{share.lower:.3%} to {share.upper:.3%}",
                 f"{naive.lower:.3%} to {naive.upper:.3%}", f"{found.design_effect:.3g}")  # fmt: skip
        shown = "".join(f"<td>{cell}</td>" for cell in cells)
        rows += f'<tr><td>{escape(found.objective)}</td>{shown}<td class="{style}">{found.verdict}</td><td>{needed}</td></tr>'
    return f'<h2>Objectives</h2><div class="card scroll"><table><tr>{head}</tr>{rows}</table></div>'


def _errors(result: RunResult) -> str:
    if not result.errors:
        return ""
    rows = "".join(
        f'<tr><td class="n">{count:,}</td><td>{escape(kind)}</td><td>{escape(result.error_samples.get(kind, ""))}</td></tr>'
        for kind, count in result.errors.items()
    )
    head = '<tr><th class="n">requests</th><th>kind</th><th>one message</th></tr>'
    return f'<h2>Errors</h2><div class="card scroll"><table>{head}{rows}</table></div>'
