"""The report as one HTML file: style and charts are in it, so that it opens without a network, a server or a script."""

import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from itertools import pairwise

import yaml

from loadtest.charts import Axis, Bar, Chart, Line, Point, Series, draw, stacked_bars
from loadtest.costs import HOURS_PER_MONTH, break_even_rps, fleet_usd_per_hour
from loadtest.recommendation import CandidateReport, Recommendation
from loadtest.search import Measured

PALETTE = 8  # colours in the style sheet; further candidates share the last


def _style() -> str:
    """The style sheet, and one class per colour: c fills, s strokes, b is a background."""
    sheet = files("loadtest").joinpath("report.css").read_text(encoding="utf-8")
    colours = (f".c{i}{{fill:var(--p{i})}}.s{i}{{stroke:var(--p{i})}}.b{i}{{background:var(--p{i})}}" for i in range(PALETTE))
    return "".join((sheet, *colours))


def render(found: Recommendation) -> str:
    """The whole page."""
    shown = [candidate for candidate in found.candidates if candidate.runs]
    colours = {candidate.name: min(index, PALETTE - 1) for index, candidate in enumerate(shown)}
    sections = [
        _answer(found),
        notes((*found.warnings, *found.notes)),
        _charts(found, shown, colours) if shown else "",
        _table(found),
        _fleet_table(found),
        _evidence(shown),
        _configuration(found),
    ]
    foot = (
        f"{found.created_at} · {found.source} · launcher {found.launcher} · {found.machine} · "
        f"{found.seconds_spent / 60:.1f} of {found.seconds_budget / 60:.1f} minutes"
        + (f", ${found.usd_spent:.2f}" if found.usd_spent else "")
    )
    return page(f"Cheapest way to serve {found.model} within {found.slo}", sections, foot)


def page(title: str, sections: Sequence[str], foot: str) -> str:
    """The whole file around some sections (HTML); title and foot are plain text."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>loadtest: {escape(title)}</title><style>{_style()}</style></head><body><main><h1>{escape(title)}</h1>"
        f"{''.join(sections)}<footer>{escape(foot)}</footer></main></body></html>\n"
    )


def notes(lines: Sequence[str]) -> str:
    """What a reader should keep in mind, as a section; nothing without lines."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<h2>Keep in mind</h2><div class="card"><ul class="notes">{items}</ul></div>' if lines else ""


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Large figures, each over what it is."""
    shown = "".join(f'<div class="fact"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for value, label in pairs)
    return f'<div class="facts">{shown}</div>'


def chart_grid(cards: Sequence[tuple[str, str, str]]) -> str:
    """Charts in a grid: title, a sentence, the drawing. Those with nothing to draw are left out."""
    drawn = "".join(
        f'<div class="card chart"><h3>{escape(title)}</h3><p>{escape(text)}</p>{svg}</div>' for title, text, svg in cards if svg
    )
    return f'<div class="grid2">{drawn}</div>'


def _answer(found: Recommendation) -> str:
    if found.winner is None:
        return (
            '<div class="card answer no"><p class="name">No candidate meets the SLO</p>'
            f'<p class="why">{escape(found.answer)}</p></div>'
        )
    winner = found.candidate(found.winner)
    rate = winner.max_rps or winner.held_rps
    proof = (
        '<span class="badge good">passed at 95 %</span>' if found.proven else '<span class="badge bad">held, not proven</span>'
    )
    if found.verified is not None:
        proof += (
            ' <span class="badge good">recovers from overload</span>'
            if found.verified
            else ' <span class="badge bad">not verified</span>'
        )
    figures = [
        (_usd(winner.cost_per_million_usd), "per million requests, fully used"),
        (f"{rate:.4g}/s", "sustained within the SLO"),
        (_ms(winner.p99_ms_at_max), "p99 at that rate"),
        (
            f"{_usd(winner.price.usd_per_hour)}/h",
            f"{winner.price.basis} price" + (f" ({', '.join(winner.price.flags)})" if winner.price.flags else ""),
        ),
        (
            f"{found.probability_cheapest:.0%}" if found.probability_cheapest is not None else "–",
            "probability that none is cheaper",
        ),
    ]
    if found.margin is not None:
        figures.append((f"{found.margin:+.1%}", f"runner-up: {found.runner_up}"))
    if found.flip_usd_per_hour is not None:
        figures.append((f"{_usd(found.flip_usd_per_hour)}/h", "price of the winner at which that flips"))
    if found.fleet is not None:
        counts = " + ".join(f"{count} × {name}" for name, count in found.fleet.counts.items())
        figures.append((f"{_usd(found.fleet.usd_per_hour * HOURS_PER_MONTH)}/month", f"for {found.target_rps:g}/s: {counts}"))
    kind = "" if found.proven and found.verified is not False else " open"
    return (
        f'<div class="card answer{kind}"><p class="name">{escape(winner.name)}</p><p>{proof}</p>'
        f'<p class="why">{escape(found.answer)}</p>{facts(figures)}</div>'
    )


def _charts(found: Recommendation, shown: Sequence[CandidateReport], colours: dict[str, int]) -> str:
    legend = "".join(f'<span><i class="b{colours[c.name]}"></i>{escape(c.name)}</span>' for c in shown)
    priced = [candidate for candidate in shown if candidate.cost_per_million_usd]
    cards = [
        (
            "Latency against offered rate",
            "p99 of each run. Filled: the SLO passed. Hollow: it failed, or was left undecided.",
            latency_chart(found, shown, colours),
        ),
        (
            "Cost against latency",
            "Every rate at which the SLO held. The band is the Pareto front: nothing is both cheaper and faster.",
            cost_chart(shown, colours),
        ),
        (
            "Monthly cost against demand",
            f"Whole instances, loaded to {found.headroom:.0%} of their peak. Rings: where another becomes the cheaper one.",
            demand_chart(found, priced, colours),
        ),
        ("Rows per batch at the peak", "Share of executions by their rows.", batch_chart(priced, colours)),
        (
            "Where the time goes at the peak",
            "Means per request, from the server's own statistics.",
            split_chart(priced, colours),
        ),
        ("Model time against rows", "The profile t(n), one batch at a time.", profile_chart(shown, colours)),
    ]
    return f'<h2>Evidence at a glance</h2><div class="legend">{legend}</div>{chart_grid(cards)}'


def latency_chart(found: Recommendation, shown: Sequence[CandidateReport], colours: dict[str, int]) -> str:
    series = [
        Series(colours[c.name], [Point(r.rps, r.p99_ms, f"{c.name}: {_run(r)}", r.verdict == "pass") for r in _telling(c)])
        for c in shown
    ]
    return draw(
        Chart(
            Axis("offered requests per second"),
            Axis("p99 latency, ms", log=True),
            series,
            [Line(found.limit_ms, f"SLO {found.slo}")],
        )
    )


def cost_chart(shown: Sequence[CandidateReport], colours: dict[str, int]) -> str:
    series, every = [], []
    for c in shown:
        held = [run for run in _telling(c) if run.verdict != "fail" and run.rps <= max(c.max_rps, c.held_rps)]
        points = [
            Point(r.p99_ms, c.price.usd_per_hour / (3600 * r.rps) * 1e6, f"{c.name}: {_run(r)}", r.verdict == "pass")
            for r in held
        ]
        series.append(Series(colours[c.name], points, joined=False))
        every += points
    return draw(
        Chart(Axis("p99 latency, ms", zero=False), Axis("USD per million requests", zero=False), series, front=pareto(every))
    )


def pareto(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in both x and y, from left to right."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (p.x, p.y)):
        if not front or point.y < front[-1].y:
            front.append(point)
    return front


def demand_chart(found: Recommendation, priced: Sequence[CandidateReport], colours: dict[str, int]) -> str:
    peaks = {c.name: (c.max_rps or c.held_rps) * found.headroom for c in priced}
    if not peaks:
        return draw(Chart(Axis(""), Axis(""), []))
    low, high = min(peaks.values()) / 4, max(max(peaks.values()) * 8, 1.2 * (found.target_rps or 0.0))
    series = []
    for c in priced:
        steps = [n * peaks[c.name] for n in range(1, math.floor(high / peaks[c.name]) + 1)][:200]
        rates = [low, *(rate for rate in steps if rate > low), high]
        points = [Point(rate, _monthly(c, rate, peaks[c.name])) for rate in sorted(set(rates))]
        series.append(Series(colours[c.name], points, marks=False, stairs=True))
    rings = []
    for one, other in pairwise(priced[:4]):
        rate = break_even_rps(one.price.usd_per_hour, peaks[one.name], other.price.usd_per_hour, peaks[other.name], high)
        if rate is not None:
            hint = f"{one.name} and {other.name} change places at {rate:.4g}/s"
            rings.append(Point(rate, _monthly(one, rate, peaks[one.name]), hint))
    return draw(Chart(Axis("requests per second", log=True), Axis("USD per month", log=True), series, rings=rings))


def _monthly(candidate: CandidateReport, rps: float, peak_rps: float) -> float:
    return HOURS_PER_MONTH * fleet_usd_per_hour(candidate.price.usd_per_hour, rps, peak_rps)


def batch_chart(priced: Sequence[CandidateReport], colours: dict[str, int]) -> str:
    series = []
    for c in priced:
        run = _at_peak(c)
        total = sum(run.batch_rows.values()) if run else 0
        if run and total:
            points = [
                Point(rows, 100 * count / total, f"{c.name}: {rows} rows, {count / total:.1%}")
                for rows, count in run.batch_rows.items()
            ]
            series.append(Series(colours[c.name], points))
    return draw(Chart(Axis("rows of a batch"), Axis("share of executions, %"), series))


def split_chart(priced: Sequence[CandidateReport], colours: dict[str, int]) -> str:
    bars = []
    for c in priced:
        run = _at_peak(c)
        if run and run.queue_ms is not None and run.compute_ms is not None:
            bars.append(Bar(c.name, colours[c.name], (run.queue_ms, run.compute_ms, run.overhead_ms or 0.0)))
    return stacked_bars(bars, ("queue", "compute", "overhead"), "ms")


def profile_chart(shown: Sequence[CandidateReport], colours: dict[str, int]) -> str:
    series, seen = [], set()
    for c in shown:
        if c.timings not in seen:
            seen.add(c.timings)
            points = [Point(t.rows, t.ms, f"{c.name}: {t.rows} rows {t.ms:.3g} ms") for t in c.timings if t.concurrency == 1]
            series.append(Series(colours[c.name], points))
    return draw(Chart(Axis("rows of a batch"), Axis("ms"), series))


def _table(found: Recommendation) -> str:
    columns = (
        "candidate",
        "",
        "USD/h",
        "predicted/s",
        "max/s",
        "fails at/s",
        "peak about/s",
        "measured/pred.",
        "p99 ms",
        "USD/million",
        "requests/USD",
        "why not",
    )
    head = "".join(f'<th class="{"n" if 1 < i < 11 else ""}">{name}</th>' for i, name in enumerate(columns))
    rows = []
    for c in found.candidates:
        rate = c.max_rps or c.held_rps
        ratio = f"{c.estimated_rps / c.predicted_rps:.0%}" if c.held_rps and c.failing_rps else ""
        style = {"winner": "good", "rejected": "bad"}.get(c.status, "soft")
        cells = [
            _usd(c.price.usd_per_hour) + ("*" if c.price.flags else ""),
            _rate(c.predicted_rps),
            _rate(rate) if c.max_rps or not rate else f"({_rate(rate)})",
            _rate(c.failing_rps),
            _rate(c.estimated_rps) if rate else "",
            ratio,
            f"{c.p99_ms_at_max:.3g}" if c.p99_ms_at_max else "",
            _usd(c.cost_per_million_usd) if c.cost_per_million_usd else "",
            f"{c.requests_per_dollar:,.0f}" if c.requests_per_dollar else "",
        ]
        numbers = "".join(f'<td class="n">{cell}</td>' for cell in cells)
        badge = f'<span class="badge {style}">{c.status}</span>'
        rows.append(f"<tr><td>{escape(c.name)}</td><td>{badge}</td>{numbers}<td>{escape(c.out)}</td></tr>")
    sources = sorted({f"{c.price.basis}: {c.price.source}, {c.price.date or 'undated'}" for c in found.candidates})
    priced = "".join(f"<li>{escape(source)}</li>" for source in sources)
    return (
        f'<h2>Candidates</h2><div class="card scroll"><table><tr>{head}</tr>{"".join(rows)}</table>'
        '<p class="soft">(held in the sample, not proven) * estimated, undated or stale. Prices:</p>'
        f'<ul class="notes soft">{priced}</ul></div>'
    )


def _fleet_table(found: Recommendation) -> str:
    if not found.fleets:
        return ""
    rows = "".join(
        f'<tr><td class="n">{fleet.rps:,.0f}</td><td class="n">${fleet.usd_per_month:,.0f}</td>'
        f"<td>{escape(' + '.join(f'{n} × {name}' for name, n in fleet.counts.items()))}</td></tr>"
        for fleet in found.fleets
    )
    head = '<tr><th class="n">requests/s</th><th class="n">USD/month</th><th>fleet</th></tr>'
    target = found.autoscaling_invocations_per_minute or 0
    return (
        f'<h2>Cheapest fleets</h2><div class="card scroll"><table>{head}{rows}</table>'
        f'<p class="soft">Mixes included; instances loaded to {found.headroom:.0%} of their peak. '
        f"Autoscaling target to begin with: {target:,.0f} invocations per instance and minute.</p></div>"
    )


def _evidence(shown: Sequence[CandidateReport]) -> str:
    if not shown:
        return ""
    columns = (
        "candidate",
        "run",
        "offered/s",
        "in the SLO",
        "verdict",
        "p50",
        "p95",
        "p99 ms",
        "goodput/s",
        "errors",
        "blocks",
        "CPU",
        "s",
    )
    head = "".join(f'<th class="{"n" if i > 1 and i != 4 else ""}">{name}</th>' for i, name in enumerate(columns))
    rows = []
    for c in shown:
        for run in c.runs:
            style = {"pass": "good", "fail": "bad"}.get(run.verdict, "soft")
            share = f"{run.attainment:.2%}" if run.attainment is not None else "–"
            verdict = run.failure or (run.verdict if run.valid else "INVALID")
            cpu = f"{run.cpu_percent:.0f} %" if run.cpu_percent is not None else ""
            after = [_rate(v) for v in (run.p50_ms, run.p95_ms, run.p99_ms, run.goodput_rps)]
            cells = [*after, f"{run.error_rate:.1%}", str(len(run.blocks)), cpu, f"{run.seconds:.0f}"]
            numbers = "".join(f'<td class="n">{cell}</td>' for cell in cells)
            rows.append(
                f'<tr><td>{escape(c.name)}</td><td>{run.purpose}</td><td class="n">{_rate(run.rps)}</td>'
                f'<td class="n">{share}</td><td class="{style}">{escape(verdict)}</td>{numbers}</tr>'
            )
    return (
        '<h2>Every run</h2><div class="card scroll"><details open><summary>Measurements behind the answer</summary>'
        f"<table><tr>{head}</tr>{''.join(rows)}</table></details></div>"
    )


def _configuration(found: Recommendation) -> str:
    if not found.configuration:
        return ""
    text = yaml.safe_dump(found.configuration, sort_keys=False, allow_unicode=True)
    return f'<h2>Configuration to deploy</h2><div class="card"><pre>{escape(text)}</pre></div>'


def _telling(candidate: CandidateReport) -> list[Measured]:
    return [run for run in candidate.runs if run.valid and run.requests and run.p99_ms > 0 and run.purpose != "overload"]


def _at_peak(candidate: CandidateReport) -> Measured | None:
    rate = candidate.max_rps or candidate.held_rps
    return next((run for run in reversed(candidate.runs) if run.rps == rate), None)


def _run(run: Measured) -> str:
    return f"{run.rps:.4g}/s, p99 {run.p99_ms:.3g} ms, {run.verdict}, {run.attainment or 0:.2%} in the SLO"


def _rate(value: float | None) -> str:
    return "" if not value else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g} ms"


def _usd(amount: float | None) -> str:
    return (
        "–" if amount is None else f"${amount:,.0f}" if amount >= 100 else f"${amount:.3g}" if amount >= 1 else f"${amount:.4f}"
    )
