"""The recommendation as one HTML page: its charts, and what the template is given. A caption names only what is drawn."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import yaml
from markupsafe import Markup

from loadtest.prices.costs import HOURS_PER_MONTH, break_even_rps, cost_per_million, fleet_usd_per_hour
from loadtest.reports import pages, tables
from loadtest.reports.charts import Axis, AxisSpan, Bar, Chart, Line, Point, Series, draw, stacked_bars
from loadtest.reports.headline import cliff_told, facts, headline, price_told, question, reservations, spent
from loadtest.reports.pages import PALETTE
from loadtest.reports.recommendation import CandidateReport, Recommendation, held_points
from loadtest.reports.states import SIGNALS
from loadtest.search.curves import CurvePoint
from loadtest.search.events import Measured
from loadtest.search.standing import agreement_text
from loadtest.wording import attained, counted, ms, percent, rate, slo_in_words, usd

Card = tuple[str, str, Markup]
_OFFERED: Final = Axis("offered requests per second", zero=False)
_COST: Final = Axis("USD per million requests", zero=False)
_ROOM: Final = 3  # break-even points that are looked for among so many pairs of neighbours
_STEPS: Final = 200  # of the stairs of one candidate's fleet: more are not seen


def render(found: Recommendation) -> str:
    """The whole page."""
    shown = [candidate for candidate in found.candidates if candidate.curve]
    colours = {candidate.name: min(place, PALETTE - 1) for place, candidate in enumerate(shown)}
    scaled = found.fleet.autoscaling_per_minute if found.fleet else {}
    if not scaled and found.winner and found.autoscaling_invocations_per_minute:
        scaled = {found.winner: found.autoscaling_invocations_per_minute}
    count = sum(len(candidate.runs) for candidate in found.candidates)
    return pages.render(
        "recommendation.html",
        title=question(found),
        found=found,
        signal=SIGNALS[found.state],
        headline=headline(found),
        facts=[(fact.value, fact.label) for fact in facts(found)],
        candidates=tables.candidates(found),
        candidates_note=_candidates_note(found),
        apart=tables.apart(found),
        apart_title=tables.APART,
        colours={candidate.letter: colours[candidate.name] for candidate in shown},
        main_charts=_main_charts(found, shown, colours),
        more_charts=_more_charts(found, shown, colours),
        fleets=tables.fleets(found),
        fleets_note=(
            f"Whole instances, mixes included, each loaded to {percent(found.headroom)} of the rate at which it kept the SLO. "
            + " ".join(
                f"Autoscaling of {found.candidate(name).letter}: begin with {target:,.0f} invocations per instance and minute."
                for name, target in scaled.items()
            )
        ),
        runs=tables.runs(found),
        runs_summary=f"{count} measurement{'' if count == 1 else 's'} behind the answer",
        notes=reservations(found),
        prices=_prices(found),
        configuration=yaml.safe_dump(found.configuration, sort_keys=False, allow_unicode=True) if found.configuration else "",
        foot=f"{found.created_at} · {found.source} · launcher {found.launcher} · {found.machine} · {spent(found)}",
    )


def _candidates_note(found: Recommendation) -> str:
    told = []
    if any(candidate.held_rps and not candidate.max_rps for candidate in found.candidates):
        told.append("(in brackets): kept the SLO while it was measured, not proven.")
    if any(candidate.price.flags for candidate in found.candidates):
        told.append("* a price to be doubted: see below.")
    return " ".join(told)


def _prices(found: Recommendation) -> list[str]:
    """Where each price comes from, once."""
    by_source: dict[str, list[str]] = {}
    for candidate in found.candidates:
        by_source.setdefault(f"{price_told(candidate.price)} ({candidate.price.source})", []).append(candidate.letter)
    return [f"{', '.join(letters)}: {source}" for source, letters in by_source.items()]


def _main_charts(found: Recommendation, shown: Sequence[CandidateReport], colours: dict[str, int]) -> list[Card]:
    cards = [
        *(_latency_card(found, candidate, colours[candidate.name]) for candidate in shown[:1]),
        _all_latencies(found, shown, colours),
        _goodput(shown, colours),
        _cost_by_latency(found, shown, colours),
        _cost_by_agreement(found, shown, colours),
        _demand(found, shown, colours),
    ]
    return [card for card in cards if card[2]]


def _more_charts(found: Recommendation, shown: Sequence[CandidateReport], colours: dict[str, int]) -> list[Card]:
    cards = [
        *(_latency_card(found, candidate, colours[candidate.name]) for candidate in shown[1:]),
        _batches(shown, colours),
        _split(shown, colours),
        _profiles(found, colours),
    ]
    return [card for card in cards if card[2]]


def _latency_card(found: Recommendation, candidate: CandidateReport, colour: int) -> Card:
    """p50, p95 and p99 of one candidate, the interval of the p99, the SLO and the cliff."""
    points = candidate.curve
    with_interval = any(point.p99_high_ms > 0 for point in points)
    series = [
        Series(colour, [_mark(candidate, p, p.p50_ms) for p in points if p.p50_ms > 0], name="p50", dashes=2),
        Series(colour, [_mark(candidate, p, p.p95_ms) for p in points if p.p95_ms > 0], name="p95", dashes=1),
        Series(colour, [_mark(candidate, p, p.p99_ms, interval=True) for p in points], name="p99"),
    ]
    cliff = candidate.cliff
    spans = [AxisSpan(cliff.below_rps, cliff.above_rps, "cliff")] if cliff else []
    told = ["Of each rate that was offered; filled: the SLO passed, hollow: it failed or was left open."]
    if with_interval:
        told.append("The band is the 95 % interval of the p99.")
    told.append(f"{cliff_told(candidate)}." if cliff else "No cliff was seen.")
    chart = Chart(_OFFERED, Axis("latency, ms", log=True), series, _limits(found), spans=spans)
    return f"{candidate.letter}: latency against rate", " ".join(told), Markup(draw(chart))


def _all_latencies(found: Recommendation, shown: Sequence[CandidateReport], colours: dict[str, int]) -> Card:
    if len(shown) < 2:
        return "", "", Markup()
    series = [Series(colours[c.name], [_mark(c, point, point.p99_ms) for point in c.curve], name=c.letter) for c in shown]
    chart = Chart(_OFFERED, Axis("p99 latency, ms", log=True), series, _limits(found))
    return (
        "p99 of every candidate against rate",
        "Filled: the SLO passed. Hollow: it failed, or was left open.",
        Markup(draw(chart)),
    )


def _goodput(shown: Sequence[CandidateReport], colours: dict[str, int]) -> Card:
    series = [
        Series(
            colours[c.name], [_mark(c, p, p.goodput_rps, told=f"goodput {rate(p.goodput_rps)}") for p in c.curve], name=c.letter
        )
        for c in shown
    ]
    chart = Chart(Axis("offered requests per second"), Axis("goodput per second"), series, diagonal="all that is offered")
    text = "Answers within the SLO per second of offered time. Below the dotted line requests are late, or fail."
    return "Goodput against rate", text, Markup(draw(chart))


def _cost_by_latency(found: Recommendation, shown: Sequence[CandidateReport], colours: dict[str, int]) -> Card:
    series = []
    for c in shown:
        points = [
            Point(p.p99_ms, cost, f"{c.letter} at {rate(p.offered_rps)}: p99 {ms(p.p99_ms)}, {usd(cost)}", p.verdict == "pass")
            for p in held_points(c)
            if (cost := cost_per_million(c.price.usd_per_hour, p.offered_rps))
        ]
        series.append(Series(colours[c.name], points, joined=False, name=c.letter))
    front = [Point(point.value, point.usd_per_million) for point in found.pareto_p99]
    chart = Chart(Axis("p99 latency, ms", zero=False), _COST, series, front=front)
    text = "Every rate at which the SLO was kept." + _front_told(front, "quicker")
    return "Cost against latency", text, Markup(draw(chart))


def _cost_by_agreement(found: Recommendation, shown: Sequence[CandidateReport], colours: dict[str, int]) -> Card:
    series = []
    for c in shown:
        agreed, cost = c.agreement, c.cost_per_million_usd
        if agreed is not None and agreed.value is not None and cost:
            hint = f"{c.letter}: agreement {agreement_text(agreed.value)}, {usd(cost)} at {rate(c.claimed_rps)}"
            series.append(Series(colours[c.name], [Point(agreed.value, cost, hint)], name=c.letter))
    if len({point.x for one in series for point in one.points}) < 2:
        return "", "", Markup()
    front = [Point(point.value, point.usd_per_million) for point in found.pareto_agreement]
    chart = Chart(Axis("agreement with the reference", zero=False), _COST, series, front=front)
    text = "Each candidate at the rate that is claimed of it." + _front_told(front, "closer to the reference")
    return "Cost against agreement", text, Markup(draw(chart))


def _front_told(front: Sequence[Point], better: str) -> str:
    return f" The broad line is the Pareto front: nothing measured is both cheaper and {better}." if len(front) > 1 else ""


def _demand(found: Recommendation, shown: Sequence[CandidateReport], colours: dict[str, int]) -> Card:
    priced = [c for c in shown if c.claimed_rps and (c.max_rps or found.state != "proven")]
    peaks = {c.name: c.claimed_rps * found.headroom for c in priced}
    if not peaks:
        return "", "", Markup()
    low, high = min(peaks.values()) / 4, max(max(peaks.values()) * 8, 1.2 * (found.target_rps or 0.0))
    series = []
    for c in priced:
        most = min(high, _most_rps(c, peaks[c.name]))
        steps = [n * peaks[c.name] for n in range(1, math.floor(most / peaks[c.name]) + 1)][:_STEPS]
        rates = [low, *(at for at in steps if at > low), most]
        points = [Point(at, _monthly(c, at, peaks[c.name])) for at in sorted(set(rates))]
        series.append(Series(colours[c.name], points, marks=False, stairs=True, name=c.letter))
    rings = []
    for one, other in pairwise(priced[: _ROOM + 1]):
        most = min(high, *(_most_rps(c, peaks[c.name]) for c in (one, other)))
        at = break_even_rps(one.price.usd_per_hour, peaks[one.name], other.price.usd_per_hour, peaks[other.name], most)
        if at is not None:
            hint = f"{one.letter} and {other.letter} change places at {rate(at)}"
            rings.append(Point(at, _monthly(one, at, peaks[one.name]), hint))
    text = f"Whole instances of one kind, loaded to {percent(found.headroom)} of the rate that is claimed of them."
    if rings:
        text += f" {'Rings' if len(rings) > 1 else 'Ring'}: {'; '.join(ring.hint for ring in rings)}."
    chart = Chart(Axis("requests per second", log=True), Axis("USD per month", log=True), series, rings=rings)
    return "Monthly cost against demand", text, Markup(draw(chart))


def _most_rps(candidate: CandidateReport, peak_rps: float) -> float:
    """That as many as can be had carry."""
    return math.inf if candidate.max_count is None else candidate.max_count * peak_rps


def _monthly(candidate: CandidateReport, rps: float, peak_rps: float) -> float:
    return HOURS_PER_MONTH * fleet_usd_per_hour(candidate.price.usd_per_hour, rps, peak_rps)


def _batches(shown: Sequence[CandidateReport], colours: dict[str, int]) -> Card:
    series = []
    for c in shown:
        run = _at_claimed(c)
        total = sum(run.batch_rows.values()) if run else 0
        if run and total:
            points = [
                Point(rows, 100 * count / total, f"{c.letter}: {counted(rows, 'row')}, {percent(count / total)}")
                for rows, count in run.batch_rows.items()
            ]
            series.append(Series(colours[c.name], points, name=c.letter))
    chart = Chart(Axis("rows of a batch"), Axis("share of executions, %"), series)
    return "Rows per batch", "Share of executions by their rows, at the rate that is claimed.", Markup(draw(chart))


def _split(shown: Sequence[CandidateReport], colours: dict[str, int]) -> Card:
    bars = []
    for c in shown:
        run = _at_claimed(c)
        if run and run.queue_ms is not None and run.compute_ms is not None:
            bars.append(Bar(c.letter, colours[c.name], (run.queue_ms, run.compute_ms, run.overhead_ms or 0.0)))
    text = "Means per request at the rate that is claimed, from the server's own statistics."
    return "Where the time goes", text, Markup(stacked_bars(bars))


def _profiles(found: Recommendation, colours: dict[str, int]) -> Card:
    series, seen = [], set()
    for c in found.candidates:
        if c.name in colours and c.timings not in seen:
            seen.add(c.timings)
            points = [
                Point(t.rows, t.ms, f"{c.letter}: {counted(t.rows, 'row')} {ms(t.ms)}") for t in c.timings if t.concurrency == 1
            ]
            series.append(Series(colours[c.name], points, name=c.letter))
    text = "The profile, one batch at a time. Candidates that share one are drawn once."
    return "Model time against rows", text, Markup(draw(Chart(Axis("rows of a batch"), Axis("ms"), series)))


def _limits(found: Recommendation) -> list[Line]:
    return [Line(found.limit_ms, f"SLO: {slo_in_words(found.slo)}")]


def _mark(c: CandidateReport, point: CurvePoint, y: float, *, told: str = "", interval: bool = False) -> Point:
    told = told or f"p50 {ms(point.p50_ms)}, p95 {ms(point.p95_ms)}, p99 {ms(point.p99_ms)}"
    kept = f"{attained(point.attainment)} in the SLO ({attained(point.attainment_low)} to {attained(point.attainment_high)})"
    hint = f"{c.letter} at {rate(point.offered_rps)}: {told}; {kept}: {point.verdict}"
    known = interval and point.p99_high_ms > 0
    low, high = (point.p99_low_ms or point.p99_ms, point.p99_high_ms) if known else (None, None)
    return Point(point.offered_rps, y, hint, point.verdict == "pass", low, high)


def _at_claimed(candidate: CandidateReport) -> Measured | None:
    return next((run for run in reversed(candidate.runs) if run.rps == candidate.claimed_rps and run.valid), None)
