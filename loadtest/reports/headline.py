"""The answer in words: one signal per state, and figures that agree because each is made here, once, for every output."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.documents.reader import STANDARD_INPUT, STANDARD_INPUT_NAME
from loadtest.prices.costs import HOURS_PER_MONTH, replicas_for
from loadtest.reports.recommendation import CandidateReport, PriceReport, Recommendation
from loadtest.reports.states import SIGNALS
from loadtest.search.budget import MOST_MINUTES
from loadtest.search.events import NOT_STARTED, UNREACHED
from loadtest.search.standing import agreement_text
from loadtest.wording import chance, clock, minutes, ms, percent, rate, slo_in_words, usd

_SURE: Final = 0.9  # probability from which the cheapest is called so without more ado


@dataclass(frozen=True, slots=True)
class Fact:
    """One figure of the headline. key: what it is in the document. label: what it is, in words that need no other.
    candidate: the name of whose it is; "": the winner's, or nobody's.
    """

    key: str
    value: str
    label: str
    candidate: str = ""


def question(found: Recommendation) -> str:
    """What was asked, in words."""
    at = f" at {rate(found.target_rps)}" if found.target_rps is not None else ""
    return f"What is the cheapest way to serve {found.model}{at} with {slo_in_words(found.slo)}?"


def headline(found: Recommendation, *, command: bool = False) -> str:
    """What follows the state's word: the answer, or what it would take to have one. command: with the command for that, which
    else stands on a line of its own.
    """
    winner = found.winner_report
    slo = slo_in_words(found.slo)
    mix = fleet_told(found, found.fleet.counts) if found.fleet is not None and found.mix else ""
    told = "; ".join(f"{each.letter} is {each.differs}" for each in found.mix)
    if found.state == "proven" and mix:
        return f"{mix} are the cheapest fleet that was proven: {told}"
    if found.state == "proven" and winner is not None:
        return f"{winner.letter} {_standing(found)}: {winner.differs}"
    if found.state == "not proven":
        ahead = f". So far {winner.letter} is ahead: {winner.differs}" if winner is not None else ""
        ahead = f". So far {mix} are ahead: {told}" if mix else ahead
        return found.needed + (f": {found.command}" if command else "") + ahead
    if found.state == "no candidate" and found.needed:
        return found.needed
    if found.state == "no candidate":
        missed = any(candidate.agreement is not None and not candidate.agreement.met for candidate in found.candidates)
        return f"not one was seen to keep {slo}" + (" with answers like the reference's" if missed else "")
    remedy = "Stop what else runs here, or leave the load generator a core of its own, and run it again"
    if not found.generator_limited and (failed := _reference_failed(found)):
        told = f"nothing can be said about {slo}: no answers could be compared with the reference's: {failed}"
        return told if NOT_STARTED in failed else f"{told}. {remedy}"
    unknown = [candidate for candidate in found.candidates if candidate.name in found.generator_limited]
    letters = ", ".join(candidate.letter for candidate in unknown) or "any candidate"
    why = f"{letters} could not be measured on this machine"
    if any(run.disturbed for candidate in unknown for run in candidate.runs):
        why = f"other work on this machine disturbed what was measured of {letters}"
    return f"nothing can be said about {slo}: {why}. {remedy}"


def _reference_failed(found: Recommendation) -> str:
    """Why the reference could not be asked; empty if it could."""
    reference = next((candidate for candidate in found.candidates if candidate.name == found.reference), None)
    if reference is None or reference.agreement is None or not reference.agreement.failure:
        return ""
    return f"{reference.letter} {reference.agreement.failure}"


def _standing(found: Recommendation) -> str:
    """How the winner stands to the rest, as far as that is known."""
    if len(found.candidates) == 1:
        return f"is the only candidate, and keeps {slo_in_words(found.slo)}"
    if found.runner_up is None:
        return "is the only one that was seen to keep the SLO"
    if not found.margin_resolved:
        return "is as cheap as any, within what was measured"
    if found.hoped_fleet is not None:
        return "is the cheapest that was proven"
    sure = (found.probability_cheapest or 0.0) >= _SURE and not _unreached(found)
    return "is the cheapest" if sure else "is the cheapest that was found"


def _unreached(found: Recommendation) -> bool:
    """Whether nothing is known of one of them, for want of time or money."""
    return any(candidate.out.endswith(UNREACHED) for candidate in found.candidates)


def needed(
    found: Recommendation,
    seconds: float | None,
    options: Sequence[str],
    *,
    at_least: bool = False,
    more_usd: float = 0.0,
    max_usd: float | None = None,
) -> tuple[str, str]:
    """What a proof would take, and the command for it. seconds: of budget on top; None: cannot be told. options: of the
    command, beside its budget. at_least: it may take more. more_usd: of money on top, where what is left does not do. max_usd:
    what one command may spend; None: nothing is paid for.
    """
    piped = found.source == STANDARD_INPUT_NAME
    command = shlex.join(("loadtest", "recommend", STANDARD_INPUT if piped else found.source, *options))
    again = "this spec on standard input again"
    # It is spent anew by whoever goes on.
    money = "" if max_usd is None else f" --max-usd {max(max_usd, math.ceil(100 * more_usd) / 100):g}"
    if seconds is None:
        enough = f"{minutes(found.seconds_budget)} of measuring did not suffice" + f"; with {again}" * piped
        return enough, f"{command} --budget-minutes {min(2 * found.seconds_budget / 60, MOST_MINUTES):g}{money}"
    about = "at least" if at_least else "about"
    more = f"needs {about} {minutes(seconds, 'more ')}" + f" and {usd(more_usd)}" * bool(more_usd) + f", and {again}" * piped
    resume = " --resume" if found.seconds_spent else ""  # else there is nothing to go on from
    return more, f"{command}{resume} --budget-minutes {min(max(1, math.ceil(seconds / 60)), MOST_MINUTES)}{money}"


def facts(found: Recommendation) -> list[Fact]:
    """The figures of the answer, each once."""
    winner = found.winner_report
    if winner is None:
        return _missed(found)
    return [*(_of_mix(found, winner) if found.mix else _of_winner(found, winner)), *_of_rest(found, winner)]


def answer(found: Recommendation, *, command: bool = True) -> str:
    """The whole answer as sentences, for where there is no layout. command: as in `headline`."""
    told = "; ".join(f"{fact.value} {fact.label}" for fact in facts(found))
    return f"{SIGNALS[found.state].word}: {headline(found, command=command)}." + (f" {told}." if told else "")


def price_told(price: PriceReport) -> str:
    """Basis, date and age: `EC2 on demand, price of 2026-07-21, 124 days old`."""
    basis = {"ec2": "EC2 on demand", "spot": "EC2 spot", "sagemaker": "SageMaker", "own": "your own price"}[price.basis]
    told = [basis, f"price of {price.date}" if price.date else "price without a date", *price.flags]
    return ", ".join(part for part in told if part != "undated")


def price_reservation(types: str, price: PriceReport) -> str:
    """What to do about a price that is estimated, undated, old or of a day to come."""
    own = price.basis == "own"
    anew = "set `usd_per_hour` anew" if price.date else "set `price_date` beside it, such as 2026-11-22"
    if "in the future" in price.flags:
        anew = "set `price_date` to the day it is of"
    remedy = anew if own else f"`loadtest prices refresh {types}` fetches today's"
    return f"{types or 'a candidate'}: {price_told(price)} ({price.source}): {remedy}"


def reservations(found: Recommendation) -> list[str]:
    """What to keep in mind, each with what to do where something can be done."""
    refused = [f"refused before it was paid for: {each.name}: {reason}" for each in found.refused for reason in each.reasons]
    return [*refused, *found.warnings, *found.notes]


def fleet_told(found: Recommendation, counts: dict[str, int]) -> str:
    """`2 × A + 1 × B`."""
    return " + ".join(f"{count} × {found.candidate(name).letter}" for name, count in counts.items())


def cliff_told(candidate: CandidateReport) -> str:
    """Where p99 jumps, in words; empty if it was not seen to."""
    cliff = candidate.cliff
    if cliff is None:
        return ""
    return (
        f"{candidate.letter} has a cliff between {rate(cliff.below_rps)} and {rate(cliff.above_rps)}: "
        f"p99 about {ms(cliff.below_p99_ms)} below it, {ms(cliff.above_p99_ms)} above"
    )


def _of_winner(found: Recommendation, winner: CandidateReport) -> list[Fact]:
    told = [_kept(found, winner)]
    if winner.p99_ms_at_max is not None:
        told.append(Fact("p99_ms_at_max", ms(winner.p99_ms_at_max), "p99 at that rate"))
    told += [
        Fact("cost_per_million_usd", usd(winner.cost_per_million_usd or 0.0), "per million requests at that rate"),
        Fact("usd_per_hour", usd(winner.price.usd_per_hour), f"an hour of {winner.letter}: {price_told(winner.price)}"),
    ]  # fmt: skip
    return [*told, *_of_fleet(found), *_agreed(found, winner)]


def _of_mix(found: Recommendation, winner: CandidateReport) -> list[Fact]:
    """The same of each that is in it, then of all, and what the winner, the cheapest alone, costs beside it."""
    told = []
    for each in found.mix:
        told.append(_kept(found, each, f" on each {each.letter}"))
        if each.p99_ms_at_max is not None:
            told.append(Fact("p99_ms_at_max", ms(each.p99_ms_at_max), f"p99 of {each.letter} at that rate", each.name))
        price = f"an hour of {each.letter}: {price_told(each.price)}"
        told += [
            Fact("usd_per_hour", usd(each.price.usd_per_hour), price, each.name),
            *_agreed(found, each, f" of {each.letter}"),
        ]
    told += _of_fleet(found)
    if found.fleet is not None and found.target_rps is not None:
        count = replicas_for(found.target_rps, winner.claimed_rps, found.headroom)
        if winner.max_count is None or count <= winner.max_count:
            month = usd(count * winner.price.usd_per_hour * HOURS_PER_MONTH)
            told.append(Fact("alone", month, f"a month is what {count} × {winner.letter} costs, the cheapest alone"))
    return told


def _kept(found: Recommendation, candidate: CandidateReport, on: str = "") -> Fact:
    kept = f"kept {slo_in_words(found.slo)}{on}"
    kept += ", proven at 95 % confidence" if candidate.max_rps else " while it was measured, not proven"
    higher = any(run.rps > candidate.claimed_rps for run in candidate.runs)
    more = "" if higher else "; the highest that was tried"
    return Fact("claimed_rps", rate(candidate.claimed_rps), kept + more, candidate.name)


def _of_fleet(found: Recommendation) -> list[Fact]:
    if found.fleet is None or found.target_rps is None:
        return []
    month = usd(found.fleet.usd_per_hour * HOURS_PER_MONTH)
    fleet = fleet_told(found, found.fleet.counts)
    return [Fact("usd_per_month", month, f"a month for {rate(found.target_rps)}: {fleet}, loaded to {percent(found.headroom)}")]


def _agreed(found: Recommendation, candidate: CandidateReport, of: str = "") -> list[Fact]:
    agreed = candidate.agreement
    if agreed is None or agreed.value is None or agreed.measured_on == agreed.reference:
        return []
    names = {each.name: each.letter for each in found.candidates}
    label = f"agreement{of} with {names.get(agreed.reference, agreed.reference)} ({agreed.statistic}, {agreed.inputs} inputs)"
    return [Fact("agreement", agreement_text(agreed.value), label, candidate.name)]


def _of_rest(found: Recommendation, winner: CandidateReport) -> list[Fact]:
    runner_up = next((candidate for candidate in found.candidates if candidate.name == found.runner_up), None)
    told = []
    if found.fleet is not None and found.hoped_fleet is not None:
        less = percent(1 - found.hoped_fleet.usd_per_hour / found.fleet.usd_per_hour)
        mix = fleet_told(found, found.hoped_fleet.counts)
        told.append(Fact("hoped_fleet", f"{less} less", f"is what {mix} may cost, at rates that are not all proven"))
    if runner_up is None:
        return told
    letter = runner_up.letter
    unproven = "" if runner_up.max_rps else ", which is not proven"
    if found.margin is None:
        told.append(
            Fact("margin", "too few", f"can be had of {letter}, the runner-up, to carry {rate(found.target_rps or 0.0)} alone")
        )
    elif not found.margin_resolved:
        told.append(Fact("margin", "the same", f"is what {letter}, the runner-up, costs, within what was measured{unproven}"))
    else:
        more = f"{percent(abs(found.margin))} {'more' if found.margin > 0 else 'less'}"
        compared = f"is what {letter}, the runner-up, costs at {rate(runner_up.claimed_rps)}"
        if found.target_rps is not None:
            compared = (
                f"is what {letter} alone, the runner-up, costs for {rate(found.target_rps)}, against {winner.letter} alone"
            )
        told.append(Fact("margin", more, f"{compared}{unproven}"))
        if found.flip_usd_per_hour is not None and found.margin > 0:
            flip = f"an hour of {winner.letter} is where {letter} becomes the cheaper"
            told.append(Fact("flip_usd_per_hour", usd(found.flip_usd_per_hour), flip))
    if found.probability_cheapest is not None:
        none = f"none{' of those that the budget reached' * _unreached(found)}{' alone' * (found.target_rps is not None)}"
        label = f"is the chance that {none} costs less than {winner.letter}"
        told.append(Fact("probability_cheapest", chance(found.probability_cheapest), label))
    return told


def _missed(found: Recommendation) -> list[Fact]:
    floor = found.floor
    if floor is None or found.state != "no candidate":
        return []
    letter = found.candidate(floor.candidate).letter
    return [
        Fact("floor.p99_ms", ms(floor.p99_ms), f"p99 of {letter}, the quickest, hardly loaded with {rate(floor.rps)}"),
        Fact("floor.p95_ms", ms(floor.p95_ms), "p95 there"),
        Fact("floor.p50_ms", ms(floor.p50_ms), "p50 there"),
    ]


def spent(found: Recommendation) -> str:
    """Time and money, in words."""
    money = f", {usd(found.usd_spent)}" if found.usd_spent else ""
    return f"Measured for {clock(found.seconds_spent)} of {clock(found.seconds_budget)} (minutes:seconds){money}."
