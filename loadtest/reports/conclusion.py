"""From the outcome of a search to the recommendation: who wins, how surely, at what cost, and what is to be said of it."""

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from loadtest.prices.costs import (
    HOURS_PER_MONTH,
    autoscaling_invocations_per_minute,
    cost_per_inference,
    cost_per_million,
    replicas_for,
    requests_per_dollar,
)
from loadtest.prices.fleet import Fleet, FleetOption, NoFleet, cheapest_fleet
from loadtest.question.candidates import CandidateSetup
from loadtest.question.spec import MIN_AGREEMENT, SearchSpec
from loadtest.reports import headline
from loadtest.reports.recommendation import (
    AgreementReport,
    CandidateReport,
    EndpointConfiguration,
    EnvironmentParameter,
    FleetAtRate,
    Floor,
    InferenceRecommendation,
    ModelConfiguration,
    PriceReport,
    Recommendation,
    RecommendationMetrics,
    Status,
    held_points,
)
from loadtest.reports.states import RecommendationState
from loadtest.search.budget import LEAST_SECONDS
from loadtest.search.curves import FrontPoint, cliff, curve, front
from loadtest.search.events import Agreed, Measured, Question
from loadtest.search.knowledge import MOST_INVALID
from loadtest.search.next_load import MOST_VAIN, PRECISION
from loadtest.search.ranking import rank
from loadtest.search.standing import Name, SearchOutcome, Sentence, Standing, agreement_text, listed, misses
from loadtest.wording import clock, differences, letters, percent, rate

_CURVE_POINTS: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)  # of the best peak: rates of the table of fleets
_SPARE_SHARE: Final = 0.05  # of the budget: what is left over without a word


def build(
    spec: SearchSpec,
    question: Question,
    outcome: SearchOutcome,
    *,
    now: datetime.datetime,
    machine: str,
    paid: bool,
    asked_with: Sequence[str] = (),
) -> Recommendation:
    """Put the outcome of a search into a document. asked_with: options that ask the same question again."""
    today = now.date()
    configured = {candidate.name: candidate for candidate in spec.candidates}
    standings = {standing.entrant.name: standing for standing in outcome.standings}
    winner = standings[outcome.winner] if outcome.winner else None
    ranked = [standing for standing in standings.values() if standing.claimed_rps and not standing.broken]
    # Beside a proven rate, one that only held in a sample carries no fleet.
    sure = [standing for standing in ranked if standing.peak_rps or not (winner and winner.peak_rps)]
    options = [
        FleetOption(s.entrant.name, s.entrant.usd_per_hour, s.claimed_rps, s.entrant.max_count, s.entrant.pool) for s in sure
    ]
    fleet = question.fleet((standing.entrant, standing.claimed_rps) for standing in sure)
    alone = question.fleet([(winner.entrant, winner.claimed_rps)]) if winner else None
    if fleet and alone and (len(fleet.counts) == 1 or math.isclose(alone.usd_per_hour, fleet.usd_per_hour)):
        fleet = alone  # no mix where it saves nothing, and no other kind than the winner's
    hoped = outcome.hoped
    if fleet is None or (hoped and hoped.usd_per_hour > fleet.usd_per_hour / PRECISION):
        hoped = None  # beside a fleet of rates that only held, it may be none
    limited = tuple(standing.entrant.name for standing in outcome.standings if standing.unknown)
    state = _state(question, outcome, limited, carried=fleet is not None or spec.target_rps is None)
    short = _short(question, sure) if spec.target_rps and options and fleet is None else ""
    early = ended_early(question, outcome)
    if state == "no candidate":  # which nothing that was left to try can change
        outcome, winner = replace(outcome, winner=None, runner_up=None, lacking=()), None
    runner_up = standings[outcome.runner_up] if outcome.runner_up else None
    mix = list(fleet.counts) if fleet and winner and len(fleet.counts) > 1 else []
    answering = [standings[name] for name in mix] or ([winner] if winner else [])
    # Whose configuration is deployed: of a mix without the winner, whoever carries most of it.
    lead = winner
    if fleet and winner not in answering:
        lead = max(answering, key=lambda standing: fleet.counts[standing.entrant.name] * standing.claimed_rps, default=None)
    reports = _named(
        [_candidate(configured[name], standing, outcome, question, today, mix) for name, standing in standings.items()], outcome
    )
    ranking = rank(question, outcome, seed=spec.seed)
    letter_of = {report.name: report.letter for report in reports}
    notes = [_in_letters(note, letter_of) for note in outcome.notes]
    for standing in answering:
        decisive = next(run for run in reversed(standing.evidence) if run.rps == standing.claimed_rps)
        notes += [f"the run behind {letter_of[standing.entrant.name]}'s rate: {note}" for note in decisive.notes]
    configurations = {name: configured[name].document for name in mix if configured[name].document}
    if configurations and lead:
        notes.append(
            f"`gateway.yaml` is of {letter_of[lead.entrant.name]} alone: "
            "those of all of the fleet stand under `configurations` in report.json"
        )
    notes += [_in_letters(note, letter_of) for note in early]
    if short and state != "no candidate":  # there it is the answer
        notes.append(short)
    floor = outcome.floor
    if floor and floor.valid and floor.unanswered:
        notes.append(f"{letter_of[floor.entrant]}, hardly loaded with {rate(floor.rps)}: {floor.unanswered}")
    found = Recommendation(
        created_at=now.isoformat(timespec="seconds"),
        source=spec.source,
        model=spec.model,
        slo=str(spec.slo),
        limit_ms=question.limit_ms,
        required_share=question.required,
        target_rps=spec.target_rps,
        headroom=question.headroom,
        state=state,
        needed=f"{short}: raise `max_count`, or ask for less" if short and state == "no candidate" else "",
        command="",
        answer="",
        winner=outcome.winner,
        runner_up=outcome.runner_up,
        proven=state == "proven",
        verified=outcome.verified,
        margin=ranking.margin if ranking else None,
        margin_resolved=bool(winner and runner_up and _told_apart(question, winner, runner_up)),
        probability_cheapest=ranking.probability_cheapest if ranking else None,
        flip_usd_per_hour=ranking.flip_usd_per_hour if ranking else None,
        autoscaling_invocations_per_minute=autoscaling_invocations_per_minute(lead.claimed_rps) if lead else None,
        fleet=fleet,
        fleets=_fleets(options, question.headroom),
        hoped_fleet=hoped,
        candidates=reports,
        InferenceRecommendations=tuple(
            _aws(configured[s.entrant.name], s, question, fleet) for s in sorted(ranked, key=_aws_order)
        ),
        floor=Floor(floor.entrant, floor.rps, floor.p50_ms, floor.p95_ms, floor.p99_ms) if floor and floor.p99_ms else None,
        generator_limited=limited,
        configuration=configured[lead.entrant.name].document if lead else {},
        configuration_of=lead.entrant.name if lead else None,
        configurations=configurations,
        launcher=spec.launcher.kind,
        machine=machine,
        seconds_spent=outcome.seconds,
        seconds_budget=question.seconds,
        usd_spent=outcome.usd if paid else 0.0,
        warnings=(
            *_loss(reports, mix or [outcome.winner], letter_of),
            *(_in_letters(warning, letter_of) for warning in spec.warnings),
            *_price_warnings(reports),
        ),
        notes=tuple(notes),
        pareto_p99=_pareto_p99(reports),
        pareto_agreement=_pareto_agreement(reports),
        min_agreement=question.min_agreement,
        reference=outcome.reference,
        refused=spec.refused,
    )
    if state == "not proven":
        left_usd = math.inf if question.max_usd is None else question.max_usd - outcome.usd
        more_usd = outcome.needed_usd if outcome.needed_usd > left_usd else 0.0
        max_usd = spec.budget.usd if paid else None
        words, command = headline.needed(
            found,
            outcome.needed_seconds,
            asked_with,
            at_least=outcome.needed_at_least,
            more_usd=more_usd,
            max_usd=max_usd,
        )
        found = replace(found, needed=words, command=command)
    return replace(found, answer=headline.answer(found))


def _state(question: Question, outcome: SearchOutcome, limited: Sequence[str], *, carried: bool) -> RecommendationState:
    """carried: whether a fleet of what is claimed carries the target rate, if there is one."""
    by_name = {standing.entrant.name: standing for standing in outcome.standings}
    if outcome.winner is not None:
        possible = ((s.entrant, max(s.claimed_rps, s.likely_rps)) for s in outcome.standings if not s.broken)
        open_ = limited or any(standing.unreached for standing in outcome.standings)
        if not carried and not open_ and not question.carries(possible):
            return "no candidate"
        return "proven" if carried and by_name[outcome.winner].peak_rps else "not proven"
    if limited or (outcome.floor is not None and not outcome.floor.valid) or _incomparable(outcome):
        return "invalid"
    hopeful = (s for s in outcome.standings if s.unreached or (s.predicted_rps and not s.broken))
    undecided = any(all(run.verdict != "fail" for run in standing.evidence) for standing in hopeful)
    kept = outcome.floor is not None and outcome.floor.verdict == "pass"  # though its profile said that it could not be
    return "not proven" if undecided or kept or _is_open(outcome) else "no candidate"


def _is_open(outcome: SearchOutcome) -> bool:
    """Whether, without a winner, something was left to try that may find one: no rate is below that of the floor."""
    missed = outcome.floor is not None and outcome.floor.verdict == "fail"
    return outcome.winner is None and bool(outcome.lacking) and not missed


def _incomparable(outcome: SearchOutcome) -> bool:
    """No candidate's answers could be compared, and time or money would not help: nothing is known of any."""
    if any(standing.unreached for standing in outcome.standings):
        return False
    agreements = (standing.agreement for standing in outcome.standings)
    compared = [agreed for agreed in agreements if agreed is not None]
    return bool(compared) and all(agreed.agreement is None for agreed in compared)


def _told_apart(question: Question, winner: Standing, runner_up: Standing) -> bool:
    """Whether what was measured of both leaves no doubt which costs less."""
    ours, theirs = (_costs(question, standing) for standing in (winner, runner_up))
    return ours[1] < theirs[0] or theirs[1] < ours[0]


def _costs(question: Question, standing: Standing) -> tuple[float, float]:
    """The least and the most it may cost: at the lowest rate that it missed, or as estimated, and at the claimed one."""
    claimed, missed = standing.claimed_rps, standing.missed_rps
    most = missed if math.isfinite(missed) else standing.estimated_rps
    return question.usd(standing.entrant, max(most, claimed)), question.usd(standing.entrant, claimed)


def _pareto_p99(reports: Sequence[CandidateReport]) -> tuple[FrontPoint, ...]:
    """Over every rate at which the SLO held: less load is quicker, and dearer."""
    return front(
        FrontPoint(report.name, point.offered_rps, cost_per_million(report.price.usd_per_hour, point.offered_rps), point.p99_ms)
        for report in reports
        for point in held_points(report)
    )


def _pareto_agreement(reports: Sequence[CandidateReport]) -> tuple[FrontPoint, ...]:
    return front(
        (
            FrontPoint(report.name, report.claimed_rps, report.cost_per_million_usd, report.agreement.value)
            for report in reports
            if report.cost_per_million_usd and report.agreement is not None and report.agreement.value is not None
        ),
        rising=True,
    )


def _named(reports: list[CandidateReport], outcome: SearchOutcome) -> tuple[CandidateReport, ...]:
    """In order of rank, each with its letter and with what tells it from the others."""
    told = dict(zip((report.name for report in reports), differences(reports), strict=True))
    whose = {each.entrant.name: f"not tried, as {told[each.untried]} failed: " for each in outcome.standings if each.untried}
    named = [replace(report, differs=told[report.name], out=whose.get(report.name, "") + report.out) for report in reports]
    ranked = sorted(named, key=lambda report: (report.name != outcome.winner, *_order(report)))
    named = [replace(report, letter=letters(place)) for place, report in enumerate(ranked)]
    return tuple(named)


def _candidate(
    candidate: CandidateSetup,
    standing: Standing,
    outcome: SearchOutcome,
    question: Question,
    today: datetime.date,
    mix: Sequence[str],
) -> CandidateReport:
    price = candidate.price
    assert price is not None  # as question_of saw
    claimed_rps = standing.claimed_rps
    profiled = outcome.profiles.get(candidate.group)
    at_max = [run for run in standing.evidence if run.rps == claimed_rps]
    points = curve(standing.runs)
    return CandidateReport(
        name=candidate.name,
        status=_status(standing, outcome, mix),
        instance_type=candidate.instance_type,
        backend=candidate.backend,
        settings=candidate.settings,
        price=PriceReport(
            price.usd_per_hour,
            candidate.basis,
            price.source,
            price.date.isoformat() if price.date else None,
            price.flags(today),
        ),
        predicted_rps=standing.predicted_rps,
        max_rps=standing.peak_rps,
        failing_rps=standing.missed_rps if math.isfinite(standing.missed_rps) else None,
        held_rps=standing.held_rps,
        estimated_rps=standing.estimated_rps,
        cost_per_million_usd=cost_per_million(price.usd_per_hour, claimed_rps) if claimed_rps else None,
        requests_per_dollar=requests_per_dollar(price.usd_per_hour, claimed_rps) if claimed_rps else None,
        p99_ms_at_max=at_max[-1].p99_ms if at_max else None,
        out=standing.out,
        runs=tuple(standing.runs),
        timings=profiled.timings if profiled else (),
        overhead_ms=profiled.overhead_ms if profiled else 0.0,
        curve=points,
        cliff=cliff(points),
        max_count=candidate.max_count,
        agreement=_agreement(standing.agreement, outcome.reference, question.min_agreement),
    )


def _agreement(agreed: Agreed | None, reference: str, min_agreement: float | None) -> AgreementReport | None:
    if agreed is None:
        return None
    met = not misses(agreed, min_agreement)
    return AgreementReport(agreed.agreement, agreed.inputs, agreed.statistic, reference, agreed.entrant, met, agreed.failure)


def _loss(reports: Sequence[CandidateReport], answering: Sequence[str | None], letter_of: Mapping[str, str]) -> list[str]:
    """At what loss those win that the answer is of, where it is one that the default would not allow."""
    losses = []
    for report in reports:
        found = report.agreement
        if report.name not in answering or found is None or (found.value is not None and found.value >= MIN_AGREEMENT):
            continue
        reference = letter_of.get(found.reference, found.reference)  # the expected answers have none
        told = f"agree only {agreement_text(found.value or 0.0)} with those of {reference}"
        if found.value is None:
            told = f"could not be judged: {found.failure}"
        whose = "the winner's answers" if len(answering) == 1 else f"answers of {report.letter}"
        losses.append(f"{whose} {told}; the spec allows it")
    return losses


def _status(standing: Standing, outcome: SearchOutcome, mix: Sequence[str]) -> Status:
    name = standing.entrant.name
    if name in mix:
        return "in the fleet"
    if name == outcome.winner:
        return "cheapest alone" if mix else "winner"
    if name == outcome.runner_up:
        return "runner-up"
    if standing.claimed_rps:
        return "measured" if standing.out else "finalist"
    # At a lower rate it may keep the SLO, or in a run that no stall disturbs.
    left = standing.invalid_runs or (_is_open(outcome) and standing.tries < MOST_VAIN)
    if standing.predicted_rps and not standing.broken and (standing.unclear or (standing.evidence and left)):
        return "undecided"
    if standing.unknown:
        return "not measurable"
    if standing.unreached:
        return "not reached"
    return "predicted" if standing.predicted_rps and not standing.runs else "rejected"


_ORDER: Final[tuple[Status, ...]] = (
    *("winner", "cheapest alone", "in the fleet", "runner-up", "finalist"),
    *("measured", "undecided", "not measurable", "predicted", "not reached", "rejected"),
)


def _order(report: CandidateReport) -> tuple[int, float]:
    predicted = report.price.usd_per_hour / report.predicted_rps if report.predicted_rps else math.inf
    return _ORDER.index(report.status), report.cost_per_million_usd or predicted


def _in_letters(sentence: Sentence, letter_of: Mapping[str, str]) -> str:
    return "".join(letter_of[part] if isinstance(part, Name) else part for part in sentence)


def ended_early(question: Question, outcome: SearchOutcome) -> list[Sentence]:
    """Why the search left some of its budget, in a sentence; none if it did not, or hardly."""
    left_s = question.seconds - outcome.seconds
    if left_s < max(LEAST_SECONDS, _SPARE_SHARE * question.seconds):
        return []
    ended = f"the search ended {clock(left_s)} (minutes:seconds) before its budget"
    if outcome.lacking:
        return [(f"{ended}: ", *tuple(part for each in outcome.lacking for part in ("; ", *each))[1:])]
    tried = [standing for standing in outcome.standings if standing.estimated_rps and not standing.broken]
    if not tried:
        return [(f"{ended}: no candidate was left that could be measured",)]
    if vain := listed(standing.entrant.name for standing in tried if len(standing.invalid_runs) >= MOST_INVALID):
        told = " were INVALID, and no other could change the answer"
        return [(f"{ended}: the last {MOST_INVALID} runs of ", *vain, told)]
    if any(standing.tries >= MOST_VAIN and not standing.peak_rps for standing in tried) and not outcome.winner:
        return [(f"{ended}: {MOST_VAIN} runs, ever further down, showed of no rate that it keeps the SLO",)]
    return [(f"{ended}: nothing was left to try that could change the answer",)]


def _short(question: Question, claimed: Sequence[Standing]) -> str:
    """What is said where no fleet of these carries the target rate."""
    most_rps = question.carried_rps((standing.entrant, standing.claimed_rps) for standing in claimed)
    kept = "proven" if all(standing.peak_rps for standing in claimed) else "measured"
    told = f"as many instances as can be had carry {rate(most_rps)} of {rate(question.target_rps or 0.0)}"
    return f"{told}, loaded to {percent(question.headroom)} of what is {kept} of each"


def _fleets(options: list[FleetOption], headroom: float) -> tuple[FleetAtRate, ...]:
    found = []
    best = max((option.max_rps for option in options), default=0.0)
    for times in _CURVE_POINTS if options else ():
        rps = float(f"{times * best:.2g}")
        try:
            fleet = cheapest_fleet(options, rps, headroom=headroom)
        except NoFleet:
            break
        found.append(FleetAtRate(rps, fleet.counts, fleet.usd_per_hour * HOURS_PER_MONTH))
    return tuple(found)


def _aws(candidate: CandidateSetup, standing: Standing, question: Question, fleet: Fleet | None) -> InferenceRecommendation:
    max_rps = standing.claimed_rps
    run = next(run for run in reversed(standing.runs) if run.rps == max_rps)
    alone = replicas_for(question.target_rps, max_rps, question.headroom) if question.target_rps else 1
    count = fleet.counts.get(candidate.name, alone) if fleet else alone
    settings = tuple(EnvironmentParameter(key, "String", str(value)) for key, value in candidate.settings.items())
    return InferenceRecommendation(
        RecommendationId=candidate.name,
        Metrics=RecommendationMetrics(
            CostPerHour=candidate.usd_per_hour,
            CostPerInference=cost_per_inference(candidate.usd_per_hour, max_rps * 60),
            MaxInvocations=int(max_rps * 60),
            ModelLatency=_model_latency_ms(run),
            CpuUtilization=run.cpu_percent,
            MemoryUtilization=run.memory_percent,
        ),
        EndpointConfiguration=EndpointConfiguration(
            InstanceType=f"ml.{candidate.instance_type.removeprefix('ml.')}" if candidate.instance_type else "",
            InitialInstanceCount=min(count, candidate.max_count or count),
        ),
        ModelConfiguration=ModelConfiguration(settings),
    )


def _model_latency_ms(run: Measured) -> float:
    if run.model_latency_ms is not None:
        return run.model_latency_ms
    return run.mean_ms if run.queue_ms is None or run.compute_ms is None else run.queue_ms + run.compute_ms


def _aws_order(standing: Standing) -> float:
    return cost_per_million(standing.entrant.usd_per_hour, standing.claimed_rps)


def _price_warnings(reports: Sequence[CandidateReport]) -> list[str]:
    """One line per doubtful price, with all the types whose price it is the same with."""
    types: dict[tuple[str, str, str | None, tuple[str, ...]], list[CandidateReport]] = {}
    for report in reports:
        if report.price.flags:
            key = (report.price.basis, report.price.source, report.price.date, report.price.flags)
            types.setdefault(key, []).append(report)
    return [
        headline.price_reservation(
            " ".join(sorted({same.instance_type for same in group if same.instance_type})), group[0].price
        )
        for _, group in sorted(types.items(), key=str)
    ]
