"""Which load next: the one that does most for the answer, by what is known, in the time that is left.

In this order: a short run of each candidate that may be the cheapest; a proven rate of the cheapest, near its peak; the others
at the rate that would make them, or a fleet with them, cheaper, if they may reach it; closer brackets. A *trial* is a load that
may prove a rate.
"""

import math
from typing import Final

from loadtest.prices.fleet import Fleet
from loadtest.search.budget import LEAST_SECONDS, scout_seconds
from loadtest.search.events import Load, Purpose
from loadtest.search.knowledge import Knowledge
from loadtest.search.standing import Standing

SHORTLIST: Final = 5  # candidates that see real load
KEEP_ABOVE: Final = 0.85  # of the best per dollar, as predicted: the prediction is good to 15 %
FINALISTS: Final = 2
_LOAD_FACTOR: Final = 0.9  # of the prediction, in the first short run of each
SURE: Final = 0.8  # of an estimated peak: the first rate to prove. It is raised then, where there is time
PROOF: Final = 3.0  # times the shortest trial that can pass: it takes so long to show a rate near the peak in 9 of 10 runs
TWO: Final = 1.5 * PROOF  # times that: with less there is one trial, as long as can be
_PATIENT: Final = 0.5  # of the time left, for a trial that raises the cheapest claim
STEP: Final = 1.1  # from a rate that passes to the next to try above, while nothing fails; and down, while nothing passes
PRECISION: Final = 1.04  # highest failing over highest passing rate at which a peak is known well enough
_MOST_TRIALS: Final = 10  # per candidate
MOST_VAIN: Final = 4  # that prove nothing, ever further down; then the next candidate is tried
_EASIER: Final = 0.8  # of a rate that the load generator did not keep up with twice
# Of a decisive trial's time: so long one is tried while no rate is proven. It shows what holds, and proves none.
_HURRIED: Final = 0.6


def next_load(known: Knowledge) -> Load | None:
    """None if there is nothing left to do, or no time for it."""
    known.carry_over_bias()
    shortlist = _shortlist(known)
    return (
        _again(known, shortlist)
        or _scout(known, shortlist)
        or _prove(known, shortlist)
        or _raise(known, shortlist)
        or _challenge(known, shortlist)
        or _save(known, shortlist)
        or _challenge(known, shortlist, likely=True)
        or _refine(known, shortlist, FINALISTS if known.is_carried(shortlist) else len(shortlist))
    )


def first_loads(known: Knowledge) -> list[Load]:
    """A short run each of those that may be the cheapest, where several can be up at once: none of them has seen load."""
    if known.question.parallel == 1:
        return []
    known.carry_over_bias()
    found: list[Load] = []
    per_hour, seconds = 0.0, scout_seconds(known.question)
    for standing in _shortlist(known)[: known.question.parallel]:
        asked = known.start_seconds(standing) + seconds
        if not standing.runs and known.affords(asked, standing.entrant, besides_usd_per_hour=per_hour):
            rps = _LOAD_FACTOR * standing.estimated_rps
            purpose: Purpose = "peak" if seconds >= known.decisive_seconds(rps) else "round"
            if load := load_of(known, standing, rps, seconds, purpose):
                found.append(load)
                per_hour += standing.entrant.usd_per_hour
    return found


def load_of(
    known: Knowledge, standing: Standing, rps: float, seconds: float, purpose: Purpose, *, decide: bool = True
) -> Load | None:
    """At most so long; None, if the budget does not allow it."""
    start_s = known.start_seconds(standing)
    seconds = min(seconds, known.left_seconds() - start_s, known.payable_seconds(standing.entrant) - start_s)
    if seconds < LEAST_SECONDS:
        return None
    return Load(standing.entrant.name, min(rps, standing.ceiling_rps), seconds, purpose, decide)


def _shortlist(known: Knowledge) -> list[Standing]:
    ranked = sorted((s for s in known.contenders if s.estimated_rps and not known.is_unmeasurable(s)), key=known.cost)
    ranked.sort(key=lambda s: not s.peak_rps and s.tries >= MOST_VAIN)  # last: nothing more is tried of them
    near = [
        standing
        for place, standing in enumerate(ranked[:SHORTLIST])
        # The runner-up is measured too: else how far it is behind is a guess.
        if place < FINALISTS or known.cost(ranked[0]) / known.cost(standing) >= KEEP_ABOVE
    ]
    # And as many as a fleet needs, where there are few instances of each.
    while len(near) < len(ranked) and not known.question.carries((s.entrant, s.estimated_rps) for s in near):
        near.append(ranked[len(near)])
    return near


def _again(known: Knowledge, shortlist: list[Standing]) -> Load | None:
    """What an INVALID run did not tell: the same once more, then at a rate that asks less of the load generator."""
    for standing in shortlist:
        if invalid := standing.invalid_runs:
            last = invalid[-1]
            rps = last.rps if len(invalid) == 1 or last.disturbed else _EASIER * last.rps
            if last.purpose == "round":
                return load_of(known, standing, rps, scout_seconds(known.question), "round")
            return _trial(known, standing, rps)
    return None


def _scout(known: Knowledge, shortlist: list[Standing]) -> Load | None:
    """A short run each: how much slower batches are under load than by the profile corrects the prediction."""
    for standing in shortlist if len(shortlist) > 1 else ():
        # To prove one rate comes first.
        rps, seconds = _LOAD_FACTOR * standing.estimated_rps, scout_seconds(known.question)
        decisive_s = known.decisive_seconds(rps)
        spare_s = known.left_seconds() - known.start_s - (1 if standing is shortlist[0] else 2) * decisive_s
        if not standing.runs and spare_s > seconds + known.start_seconds(standing):
            return load_of(known, standing, rps, seconds, "peak" if seconds >= decisive_s else "round")
    return None


def _prove(known: Knowledge, shortlist: list[Standing]) -> Load | None:
    """The first proven rate of the cheapest, and of as many as it takes where too few of it can be had.

    From below: a rate that passes is an answer, one that fails is none.
    """
    carried = known.is_carried(shortlist)
    for standing in shortlist:
        if standing.peak_rps and carried:
            return None
        if standing.peak_rps:
            continue
        if _outdone(standing, shortlist):
            continue
        rps = _sure_rps(standing)
        if carried and rps < known.leading_rps(standing, shortlist):
            continue  # proven there, it would still be dearer than another
        share = 1.0 if _hurried(known, standing, standing.estimated_rps) else 0.0
        if standing.tries < MOST_VAIN and (trial := _trial(known, standing, rps, share=share)):
            return trial
    return None


def _sure_rps(standing: Standing) -> float:
    """The first rate to prove of it; the more often it failed, the further down."""
    rps = standing.estimated_rps * SURE
    return min(rps, standing.failing_rps / STEP ** max(1, standing.tries - 1)) if standing.failing_rps else rps


def _outdone(standing: Standing, shortlist: list[Standing]) -> bool:
    """Whether another of its pool is proven at what it may reach: then it adds nothing to what the pool carries."""
    pool = standing.entrant.pool
    return bool(pool) and any(other.entrant.pool == pool and other.peak_rps >= standing.estimated_rps for other in shortlist)


def _raise(known: Knowledge, shortlist: list[Standing]) -> Load | None:
    """What the cheapest claims comes near its estimated peak."""
    leader = next((standing for standing in shortlist if standing.peak_rps), None)
    if leader is None or leader.tries >= _MOST_TRIALS:
        return None
    rps = math.sqrt(leader.peak_rps * min(leader.estimated_rps, leader.missed_rps))
    share = 1.0 if _hurried(known, leader, rps) else _PATIENT
    if leader.failing_rps and leader.failing_rps <= rps:
        again = _trial(known, leader, leader.failing_rps, share=share)
        if again is not None and again.seconds > leader.lasted_s(leader.failing_rps):  # it may only have lacked time
            rps = leader.failing_rps
        else:
            rps = math.sqrt(leader.peak_rps * leader.failing_rps)
    return _trial(known, leader, rps, share=share) if rps > PRECISION * leader.peak_rps else None


def _challenge(known: Knowledge, shortlist: list[Standing], *, likely: bool = False) -> Load | None:
    """Whoever should be cheaper than the cheapest claim is tried at the rate that would make it so.

    likely: also who is estimated below that rate, by no more than the usual error.
    """
    claims = known.claims(shortlist)
    for standing in shortlist if claims else ():
        if standing is claims[0] or standing.tries >= _MOST_TRIALS:
            continue
        rps, reach_rps = known.leading_rps(standing, claims), standing.likely_rps if likely else standing.estimated_rps
        if standing.peak_rps < rps <= reach_rps and rps < (standing.failing_rps or math.inf):
            return _trial(known, standing, rps)
    return None


def _save(known: Knowledge, shortlist: list[Standing]) -> Load | None:
    """A closer bracket of the cheapest, or whoever would make a fleet cheaper than the proven one: first what saves more in the
    time that it takes.
    """
    closer, hoped = _refine(known, shortlist, 1), hoped_fleet(known)
    if hoped is None:
        return closer
    fleet, rates = hoped
    missing = {known.standings[name]: rates[name] for name in fleet.counts if rates[name] > known.standings[name].peak_rps}
    if closer is not None:
        leader = known.standings[closer.entrant]
        proven = {standing.entrant: standing.peak_rps for standing in known.contenders}
        now, raised = (known.question.fleet(rates.items()) for rates in (proven, proven | {leader.entrant: closer.rps}))
        if raised is not None and (
            now is None
            or (now.usd_per_hour - raised.usd_per_hour) / _proof_seconds(known, {leader: closer.rps})
            >= (now.usd_per_hour - fleet.usd_per_hour) / _proof_seconds(known, missing)
        ):
            return closer
    for standing, rps in missing.items():
        if closer is not None and standing.entrant.name == closer.entrant:
            return closer
        # By less it is not known anyway.
        rps = max(rps, min(PRECISION * standing.peak_rps, hoped_rps(known, standing)))
        if trial := _trial(known, standing, rps):
            return trial
    return closer


def _proof_seconds(known: Knowledge, rates: dict[Standing, float]) -> float:
    """The least time to prove these."""
    return sum(known.start_seconds(standing) + known.decisive_seconds(rps) for standing, rps in rates.items())


def hoped_fleet(known: Knowledge) -> tuple[Fleet, dict[str, float]] | None:
    """A fleet that would cost less than the proven one, by more than a peak is known to, and the rates at which it would: as
    little above what is proven, or sure to be, as makes it so. None, if no such rates are likely.
    """
    question, claims = known.question, known.claims(known.contenders)
    if question.target_rps is None or not claims:
        return None
    proven = question.fleet((standing.entrant, standing.peak_rps) for standing in claims)
    enough = proven.usd_per_hour / PRECISION if proven else math.inf
    spans: dict[Standing, tuple[float, float]] = {}
    for standing in known.contenders:
        if (most := hoped_rps(known, standing)) > 0:
            spans[standing] = standing.peak_rps or min(most, _sure_rps(standing)), most

    def at(share: float) -> tuple[Fleet, dict[str, float]] | None:
        rates = {standing: least * (most / least) ** share for standing, (least, most) in spans.items()}
        fleet = question.fleet((standing.entrant, rps) for standing, rps in rates.items())
        if fleet is None or fleet.usd_per_hour > enough:
            return None
        return fleet, {standing.entrant.name: rps for standing, rps in rates.items()}

    low, high = 0.0, 1.0
    found = at(high)
    if found and (surest := at(low)):
        return surest
    while found and high - low > 0.01:
        middle = (low + high) / 2
        if nearer := at(middle):
            high, found = middle, nearer
        else:
            low = middle
    return found


def hoped_rps(known: Knowledge, standing: Standing) -> float:
    """What may yet be proven of it: as estimated, below what failed; no more than is, where it was tried often enough."""
    if known.is_unmeasurable(standing) or standing.tries >= (_MOST_TRIALS if standing.peak_rps else MOST_VAIN):
        return standing.peak_rps
    return max(standing.peak_rps, min(standing.estimated_rps, (standing.failing_rps or math.inf) / PRECISION))


def _refine(known: Knowledge, shortlist: list[Standing], count: int) -> Load | None:
    """Closer brackets of so many that claim the cheapest."""
    for standing in known.claims(shortlist)[:count]:
        passing, failing = standing.peak_rps, standing.failing_rps
        if standing.tries >= _MOST_TRIALS or passing >= standing.ceiling_rps:
            continue
        if failing is None:
            above_rps = standing.estimated_rps if passing < standing.estimated_rps / PRECISION else passing * STEP
            return _trial(known, standing, above_rps)
        if failing / passing > PRECISION:
            return _trial(known, standing, math.sqrt(passing * failing))
    return None


def _hurried(known: Knowledge, standing: Standing, rps: float) -> bool:
    """Whether what is left does for one trial only, near the peak."""
    needed_s = known.start_seconds(standing) + known.decisive_seconds(rps)
    return known.left_seconds() - known.reserved_seconds() < TWO * needed_s


def _trial(known: Knowledge, standing: Standing, rps: float, *, share: float = 0.0) -> Load | None:
    """A load that can decide; None, if there is no time left for it.

    Where there is plenty, it has PROOF times that; share: of the time left, or so much of it, if that is more.
    """
    rps = min(rps, standing.ceiling_rps)
    decisive_s, reserved_s = known.decisive_seconds(rps), known.reserved_seconds()
    left_s = known.left_seconds() - known.start_seconds(standing) - reserved_s
    if left_s < decisive_s * (1 if reserved_s else _HURRIED) and any(s.evidence for s in known.contenders):
        return None
    return load_of(known, standing, rps, max(decisive_s, min(PROOF * decisive_s, left_s / 2), share * left_s), "peak")
