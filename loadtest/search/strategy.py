"""Which measurement next: the search of docs/loadtest.md, as a generator that waits for nothing.

It yields one `Command`, is sent the `Event` that answers it, and returns the `Outcome`. It reads no clock and no file and draws
no random number: what is known decides what is asked next. So a search is tested against a simulated laboratory in no time, and
one that was interrupted, or proved nothing yet, goes on from the events it is given.

Agreement with the reference -> profile t(n, k) per group -> predict each candidate -> then, as long as time allows, the load
that does most for the answer: a short run of each that may be the cheapest; a proven rate of the cheapest, near its peak; the
others at the rate that would make them cheaper, if they may reach it; closer brackets -> overload and recovery of the winner.
"""

import math
from collections.abc import Generator, Iterable, Sequence

from loadtest.search.events import (
    EXPECTED,
    SEARCHING,
    Agree,
    Agreed,
    Command,
    Entrant,
    Event,
    Load,
    Measured,
    Predict,
    Predicted,
    Profile,
    Profiled,
    Purpose,
    Question,
    Spent,
)
from loadtest.search.standing import Outcome, Standing, agreement_text, misses

SHORTLIST = 5  # candidates that see real load
KEEP_ABOVE = 0.85  # of the best per dollar, as predicted: the prediction is good to 15 %
FINALISTS = 2
LOAD_FACTOR = 0.9  # of the prediction, in the first short run of each
SCOUT_SECONDS, SCOUT_SHARE = 20.0, 0.03  # of that run: at most, and of the budget
SURE = 0.8  # of an estimated peak: the first rate to prove. It is raised then, where there is time
PROOF = 3.0  # times the shortest probe that can pass: it takes so long to show a rate near the peak in 9 of 10 runs
TWO = 1.5 * PROOF  # times that: with less there is one probe, as long as can be
PATIENT = 0.5  # of the time left, for a probe that raises the cheapest claim
CHEAPER = 1.01  # a candidate is tried at so much more than the rate at which it would cost the same
UNPROVEN = 0.8  # what a rate that only held in the sample counts for beside a proven one
STEP = 1.1  # from a rate that passes to the next to try above, while nothing fails; and down, while nothing passes
PRECISION = 1.04  # highest failing over highest passing rate at which a peak is known well enough
MOST_PROBES = 10  # per candidate
MOST_VAIN = 4  # that prove nothing, ever further down; then the next candidate is tried
MOST_INVALID = 3  # runs in a row; then the others come first
EASIER = 0.8  # of a rate that the load generator did not keep up with twice
OVERLOAD, SAFE = 1.5, 0.8  # of the claimed peak
VERIFY_SHARE = 0.05  # of the budget, for each of those two
LEAST_SECONDS = 4.0  # a shorter run tells nothing
AGREE_SECONDS, AGREE_SHARE = 60.0, 0.2  # at most, of one comparison: in all, and of what is left; a quiet machine takes a few
AGREE_MOST = 0.5  # of the budget, after which nobody new is compared: who has been must still be measured
BLOCKS, BLOCK_SLOS, BLOCK_REQUESTS = 20, 10, 200  # a decisive probe: 20 blocks of at least 10 SLOs and 200 requests
HURRIED = 0.6  # of a decisive probe's time: what is tried while no rate is proven; it may do, and there is nothing to lose
WARMED_BLOCKS = 25  # with a fifth of the run dropped as warm-up


Steps = Generator[Command, Event, None]


def search(question: Question, known: Sequence[Event] = ()) -> Generator[Command, Event, Outcome]:
    """Run the whole search. Send each event in answer to the command before it.

    known: what an earlier search for the same candidates found, oldest first; it counts as if it had been asked for here, and
    its time and money as spent.
    """
    return (yield from _Search(question, known).run())


def decisive_seconds(limit_ms: float, rps: float) -> float:
    """How long a probe must last before it can pass."""
    return WARMED_BLOCKS * max(BLOCK_SLOS * limit_ms / 1e3, BLOCK_REQUESTS / rps)


def agree_seconds(left_s: float) -> float:
    """How long one comparison may take, with so much of the budget left."""
    return min(AGREE_SECONDS, max(LEAST_SECONDS, AGREE_SHARE * left_s))


def verify_seconds(question: Question) -> float:
    """Of each of the two runs that check the winner."""
    return max(LEAST_SECONDS, min(20.0, VERIFY_SHARE * question.seconds))


def profile_seconds(question: Question, groups: int) -> float:
    """Of each group's profile: together a tenth of the budget. Beyond 30 s a profile gets no better."""
    return min(30.0, max(2.0, question.seconds / 10 / groups))


def powers_up_to(most: int) -> tuple[int, ...]:
    """1, 2, 4, … and `most` itself."""
    return tuple(sorted({*(2**n for n in range(most.bit_length())), most}))


class _Search:
    def __init__(self, question: Question, known: Sequence[Event]) -> None:
        self._question = question
        self._standings = {
            entrant.name: Standing(entrant, question.required, question.limit_ms) for entrant in question.entrants
        }
        self._profiles: dict[str, Profiled] = {}
        self._spent = Spent(question)
        self._start_s = 0.0  # what the last start took, as far as it is known
        self._up = ""  # the entrant that runs
        self._notes: list[str] = []
        self._reference = question.reference
        self._agreed: dict[str, Agreed] = {}
        for event in known:
            self._take(event)
        self._up = ""

    def run(self) -> Generator[Command, Event, Outcome]:
        yield from self._agree()
        yield from self._profile()
        yield from self._predict()
        while probe := self._next_probe():
            yield from self._ask(probe)
            yield from self._predict()
        if ranked := self._ranked():
            if ranked[0].peak_rps:
                yield from self._verify(ranked[0])
        elif not any(standing.unknown for standing in self._standings.values()):
            yield from self._seek_floor()
        return self._outcome()

    # What is known.

    def _take(self, event: Event) -> None:
        """Add an event to what is known."""
        self._spent.add(event)
        if isinstance(event, Profiled):
            self._profiles[event.group] = event
            members = [s for s in self._standings.values() if s.entrant.group == event.group]
            for standing in members:
                standing.out = standing.out or event.failure
            self._started(_widest(standing.entrant for standing in members), event)
            return
        standing = self._standings[event.entrant]
        if isinstance(event, Agreed):
            self._agreed[event.entrant] = event
            self._up = event.entrant
            return
        if isinstance(event, Predicted):
            standing.predictions.append(event)
            standing.stale = False
            if event.rps <= 0:
                standing.out = event.why or "by its profile it misses the SLO even alone"
            return
        standing.runs.append(event)
        told = [run for run in standing.runs if run.purpose in SEARCHING and run.valid and not run.failure]
        standing.stale = told == [event]
        self._started(standing.entrant, event)
        if event.failure and event.purpose in SEARCHING:
            standing.out = event.failure

    def _started(self, entrant: Entrant, event: Profiled | Measured) -> None:
        self._up = "" if event.failure else entrant.name
        self._start_s = event.start_s or self._start_s

    def _ask(self, command: Command) -> Steps:
        self._take((yield command))

    def _outcome(self) -> Outcome:
        ranked = self._ranked()
        winner = ranked[0] if ranked else None
        verified = self._verified(winner) if winner else None
        needed_s = self._needed_seconds(winner)
        for standing in self._in():
            standing.out = self._why_not(standing, winner)
        floor = [run for standing in self._standings.values() for run in standing.runs if run.purpose == "floor"]
        return Outcome(
            standings=tuple(self._standings.values()),
            profiles=self._profiles,
            winner=winner.entrant.name if winner else None,
            runner_up=ranked[1].entrant.name if len(ranked) > 1 else None,
            verified=verified,
            floor=floor[-1] if floor and not winner else None,
            seconds=self._spent.seconds,
            usd=self._spent.usd,
            notes=tuple(self._notes),
            needed_seconds=needed_s,
            reference=self._reference,
        )

    def _why_not(self, standing: Standing, winner: Standing | None) -> str:
        """In a few words why it is not ranked; "" if it is."""
        if standing.claimed_rps:
            return ""
        if standing.invalid_runs:
            return f"could not be measured: {'; '.join(standing.invalid_runs[-1].notes)}"
        if standing.evidence:
            return f"misses the SLO at {min(run.rps for run in standing.evidence):.4g}/s, the lowest rate that was tried"
        worth = self._cost(winner) / self._cost(standing) if winner else 1.0
        if worth < KEEP_ABOVE:
            return f"predicted at {worth:.0%} of the best per dollar"
        return "the budget ended before it was tried"

    def _needed_seconds(self, winner: Standing | None) -> float | None:
        nearest = winner or min(self._in(), key=self._cost, default=None)
        if nearest is None or nearest.peak_rps or not nearest.estimated_rps:
            return None
        proof_s = PROOF * self._decisive_s(SURE * nearest.estimated_rps)
        return proof_s + 2 * (self._start_s + self._verify_seconds())

    # Agreement, profiles and predictions: what is known of a candidate before it sees traffic.

    def _agree(self) -> Steps:
        """Compare the answers of each numerics with the reference's, before anything else is spent on it."""
        if not self._reference:
            return
        groups: dict[str, list[Entrant]] = {}
        for entrant in self._question.entrants:
            groups.setdefault(entrant.numerics or entrant.name, []).append(entrant)
        reference = yield from self._settle_reference()
        for entrants in groups.values():
            widest = _widest(entrants)
            known = (self._standings[entrant.name].agreement for entrant in entrants)
            event = next((agreed for agreed in known if agreed), None)  # of the reference, or of one that failed as such
            if event is None and reference is not None and reference.failure:
                event = Agreed(
                    widest.name, failure=f"cannot be compared: the reference {reference.entrant} {reference.failure}"
                )
            elif event is None:
                event = yield from self._compare(widest)
            for entrant in entrants:
                standing = self._standings[entrant.name]
                standing.agreement = event
                standing.out = standing.out or misses(event, self._question.min_agreement)

    def _settle_reference(self) -> Generator[Command, Event, Agreed | None]:
        """Ask the reference, or whoever stands in for it; the last of them, if all fail. None: the requests bring answers."""
        if self._reference == EXPECTED:
            return None
        asked = (self._question.reference, *self._question.stand_ins)
        for place, name in enumerate(asked):
            self._reference = name
            event = yield from self._compare(self._standings[name].entrant)
            self._standings[name].agreement = event
            if not event.failure:
                break
            if place + 1 < len(asked):
                self._notes.append(f"the reference {name} {event.failure}: {asked[place + 1]} stands in for it")
        if event.agreement is not None and misses(event, self._question.min_agreement):
            told = f"agrees only {agreement_text(event.agreement)} with itself: its answers differ from one time to the next"
            self._notes.append(f"the reference {event.entrant} {told}")
        return event

    def _compare(self, entrant: Entrant) -> Generator[Command, Event, Agreed]:
        if entrant.name not in self._agreed:
            seconds = agree_seconds(self._left_seconds())
            spent = self._spent.seconds > AGREE_MOST * self._question.seconds
            if spent or not self._affords(LEAST_SECONDS, entrant):
                return Agreed(entrant.name, failure="was not compared: the budget did not reach it")
            yield from self._ask(Agree(entrant.name, self._reference, seconds))
        return self._agreed[entrant.name]

    def _profile(self) -> Steps:
        groups: dict[str, list[Entrant]] = {}
        for standing in self._in():
            groups.setdefault(standing.entrant.group, []).append(standing.entrant)
        seconds = profile_seconds(self._question, max(1, len(groups)))
        for group, entrants in groups.items():
            if group in self._profiles:
                continue
            widest = _widest(entrants)
            rows = powers_up_to(max(entrant.max_rows for entrant in entrants))
            if self._affords(seconds + self._start_s, widest):
                yield from self._ask(Profile(widest.name, group, rows, widest.sessions, seconds))
            else:
                for entrant in entrants:
                    self._standings[entrant.name].out = "the budget did not reach it"

    def _predict(self) -> Steps:
        for standing in self._in():
            if standing.stale:
                yield from self._ask(Predict(standing.entrant.name))

    # Which load next. Derived from what is known alone, so that a search goes on from its journal as if it had not stopped.

    def _next_probe(self) -> Load | None:
        """The load that does most for the answer; None if there is nothing left to do, or no time for it."""
        self._carry_over_bias()
        ranked = sorted((s for s in self._in() if s.estimated_rps and not self._unmeasured(s)), key=self._cost)
        shortlist = [
            standing
            for place, standing in enumerate(ranked[:SHORTLIST])
            # The runner-up is measured too: else how far it is behind is a guess.
            if place < FINALISTS or self._cost(ranked[0]) / self._cost(standing) >= KEEP_ABOVE
        ]
        return (
            self._again(shortlist)
            or self._scout(shortlist)
            or self._prove(shortlist)
            or self._raise(shortlist)
            or self._challenge(shortlist)
            or self._refine(shortlist, 1)
            or self._challenge(shortlist, likely=True)
            or self._refine(shortlist, FINALISTS)
        )

    def _again(self, shortlist: list[Standing]) -> Load | None:
        """What an INVALID run did not tell: the same once more, then at a rate that asks less of the load generator."""
        for standing in shortlist:
            if invalid := standing.invalid_runs:
                last = invalid[-1]
                rps = last.rps if len(invalid) == 1 or last.disturbed else EASIER * last.rps
                if last.purpose == "round":
                    return self._load(standing, rps, self._scout_seconds(), "round")
                return self._decisive(standing, rps)
        return None

    def _scout(self, shortlist: list[Standing]) -> Load | None:
        """A short run each: how much slower batches are under load than by the profile corrects the prediction."""
        for standing in shortlist if len(shortlist) > 1 else ():
            # To prove one rate comes first.
            rps, seconds = LOAD_FACTOR * standing.estimated_rps, self._scout_seconds()
            spare_s = self._left_seconds() - self._start_s - (1 if standing is shortlist[0] else 2) * self._decisive_s(rps)
            if not standing.runs and spare_s > seconds + self._start_of(standing):
                return self._load(standing, rps, seconds, "peak" if seconds >= self._decisive_s(rps) else "round")
        return None

    def _prove(self, shortlist: list[Standing]) -> Load | None:
        """The first proven rate of the cheapest. From below: a rate that passes is an answer, one that fails is none."""
        for standing in shortlist:
            if standing.peak_rps:
                return None
            rps = standing.estimated_rps * SURE
            if standing.failing_rps:  # the more often it failed, the further down
                rps = min(rps, standing.failing_rps / STEP ** max(1, standing.tries - 1))
            if rps < self._leading_rps(standing, shortlist):
                continue  # proven there, it would still be dearer than another
            share = 1.0 if self._hurried(standing, standing.estimated_rps) else 0.0
            if standing.tries < MOST_VAIN and (probe := self._decisive(standing, rps, share=share)):
                return probe
        return None

    def _raise(self, shortlist: list[Standing]) -> Load | None:
        """What the cheapest claims comes near its estimated peak."""
        leader = next((standing for standing in shortlist if standing.peak_rps), None)
        if leader is None or leader.tries >= MOST_PROBES:
            return None
        rps = math.sqrt(leader.peak_rps * min(leader.estimated_rps, leader.missed_rps))
        share = 1.0 if self._hurried(leader, rps) else PATIENT
        if leader.failing_rps and leader.failing_rps <= rps:
            again = self._decisive(leader, leader.failing_rps, share=share)
            if again is not None and again.seconds > leader.lasted_s(leader.failing_rps):  # it may only have lacked time
                rps = leader.failing_rps
            else:
                rps = math.sqrt(leader.peak_rps * leader.failing_rps)
        return self._decisive(leader, rps, share=share) if rps > PRECISION * leader.peak_rps else None

    def _challenge(self, shortlist: list[Standing], *, likely: bool = False) -> Load | None:
        """Whoever should be cheaper than the cheapest claim is tried at the rate that would make it so.

        likely: also who is estimated below that rate, by no more than the usual error.
        """
        claims = self._claims(shortlist)
        for standing in shortlist if claims else ():
            if standing is claims[0] or standing.tries >= MOST_PROBES:
                continue
            rps, reach_rps = self._leading_rps(standing, claims), standing.likely_rps if likely else standing.estimated_rps
            if standing.peak_rps < rps <= reach_rps and rps < (standing.failing_rps or math.inf):
                return self._decisive(standing, rps)
        return None

    def _refine(self, shortlist: list[Standing], count: int) -> Load | None:
        """Closer brackets of so many that claim the cheapest."""
        for standing in self._claims(shortlist)[:count]:
            passing, failing = standing.peak_rps, standing.failing_rps
            if standing.tries >= MOST_PROBES or passing >= standing.ceiling_rps:
                continue
            if failing is None:
                above_rps = standing.estimated_rps if passing < standing.estimated_rps / PRECISION else passing * STEP
                return self._decisive(standing, above_rps)
            if failing / passing > PRECISION:
                return self._decisive(standing, math.sqrt(passing * failing))
        return None

    def _hurried(self, standing: Standing, rps: float) -> bool:
        """Whether what is left does for one probe only, near the peak."""
        return self._left_seconds() - self._reserved_seconds() < TWO * (self._start_of(standing) + self._decisive_s(rps))

    def _decisive(self, standing: Standing, rps: float, *, share: float = 0.0) -> Load | None:
        """A probe that can decide; None, if there is no time left for it.

        Where there is plenty, it has PROOF times that; share: of the time left, or so much of it, if that is more.
        """
        rps = min(rps, standing.ceiling_rps)
        decisive_s = self._decisive_s(rps)
        left_s = self._left_seconds() - self._start_of(standing) - self._reserved_seconds()
        if left_s < decisive_s * (1 if self._reserved_seconds() else HURRIED) and any(s.evidence for s in self._in()):
            return None
        return self._load(standing, rps, max(decisive_s, min(PROOF * decisive_s, left_s / 2), share * left_s), "peak")

    def _load(self, standing: Standing, rps: float, seconds: float, purpose: Purpose, *, decide: bool = True) -> Load | None:
        """None, if the budget does not allow it."""
        start_s = self._start_of(standing)
        seconds = min(seconds, self._left_seconds() - start_s, self._payable_seconds(standing.entrant) - start_s)
        if seconds < LEAST_SECONDS:
            return None
        return Load(standing.entrant.name, min(rps, standing.ceiling_rps), seconds, purpose, decide)

    def _carry_over_bias(self) -> None:
        """What the brackets found so far say of predictions, for those that have none."""
        ratios = [
            min(max(standing.predicted_rps, standing.held_rps), standing.missed_rps) / standing.predicted_rps
            for standing in self._in()
            if standing.probes and standing.predicted_rps
        ]
        for standing in self._in():
            if not standing.probes:
                standing.bias = math.prod(ratios) ** (1 / len(ratios)) if ratios else 1.0

    # After the peaks.

    def _verify(self, winner: Standing) -> Steps:
        """Overload, and what is left of it afterwards."""
        if self._verified(winner) is not None:
            return
        peak_rps, half_s = winner.claimed_rps, (self._left_seconds() - self._start_of(winner)) / 2
        seconds = min(max(self._verify_seconds(), min(60.0, 0.4 * self._left_seconds())), half_s)
        if winner.ceiling_rps > peak_rps / SAFE and (
            probe := self._load(winner, OVERLOAD * peak_rps, seconds, "overload", decide=False)
        ):
            yield from self._ask(probe)
        if probe := self._load(winner, SAFE * peak_rps, seconds, "recovery"):
            yield from self._ask(probe)

    def _verified(self, winner: Standing) -> bool | None:
        """Whether it serves its claimed rate after an overload; None if that was not seen."""
        after = [run for run in winner.runs if run.purpose in ("overload", "recovery")]
        if died := next((run.failure for run in after if run.failure), ""):
            self._note(f"under overload {winner.entrant.name} failed: {died}")
            return False
        if not after or after[-1].purpose != "recovery" or not after[-1].valid:
            return None
        if not math.isclose(after[-1].rps, min(SAFE * winner.claimed_rps, winner.ceiling_rps)):
            return None  # another rate was claimed then
        if after[-1].verdict == "fail":
            self._note(f"after an overload {winner.entrant.name} misses the SLO at {SAFE:g} of its claimed peak")
        return after[-1].verdict != "fail"

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def _seek_floor(self) -> Steps:
        """Nobody meets the SLO: measure what the quickest can do with hardly any load."""
        best: tuple[float, Standing] | None = None
        for standing in self._standings.values():
            profile = self._profiles.get(standing.entrant.group)
            alone = [timing.ms for timing in profile.timings if timing.rows == 1] if profile else []
            if profile and alone and (best is None or min(alone) + profile.overhead_ms < best[0]):
                best = min(alone) + profile.overhead_ms, standing
        if best and (probe := self._load(best[1], 100 / best[0], 20.0, "floor", decide=False)):  # a tenth of one session
            yield from self._ask(probe)

    # What it comes to.

    def _cost(self, standing: Standing) -> float:
        return self._question.cost(standing.entrant, standing.estimated_rps)

    def _claimed_cost(self, standing: Standing) -> float:
        """A proven, cheaper rate always wins; one that only held in the sample wins if it is much cheaper."""
        return self._question.cost(standing.entrant, standing.peak_rps or UNPROVEN * standing.held_rps)

    def _claims(self, shortlist: Sequence[Standing]) -> list[Standing]:
        """Those with a proven rate, the cheapest at that first."""
        return sorted((standing for standing in shortlist if standing.peak_rps), key=self._claimed_cost)

    def _leading_rps(self, standing: Standing, shortlist: Sequence[Standing]) -> float:
        """The rate from which it is cheaper than the cheapest claim; 0, if there is none."""
        claims = self._claims(shortlist)
        return CHEAPER * self._rate_at_cost(standing.entrant, self._claimed_cost(claims[0])) if claims else 0.0

    def _rate_at_cost(self, entrant: Entrant, cost: float) -> float:
        """The least rate at which the entrant costs no more: fleets cost in steps, so it is searched for."""
        low, high = 1e-3, 1e7
        while high / low > 1.0001:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self._question.cost(entrant, middle) <= cost else (middle, high)
        return high

    def _ranked(self) -> list[Standing]:
        """Those whose SLO held at some rate, cheapest first at the rates claimed for them."""
        held = [standing for standing in self._standings.values() if not standing.out and standing.claimed_rps]
        return sorted(held, key=self._claimed_cost)

    def _unmeasured(self, standing: Standing) -> bool:
        return len(standing.invalid_runs) >= MOST_INVALID

    def _in(self) -> Sequence[Standing]:
        return [standing for standing in self._standings.values() if not standing.out]

    def _decisive_s(self, rps: float) -> float:
        return decisive_seconds(self._question.limit_ms, rps)

    def _scout_seconds(self) -> float:
        return min(SCOUT_SECONDS, max(LEAST_SECONDS, SCOUT_SHARE * self._question.seconds))

    def _reserved_seconds(self) -> float:
        """For the last two runs; nothing, while no rate is proven: that comes first."""
        return 2 * self._verify_seconds() if any(standing.peak_rps for standing in self._in()) else 0.0

    def _verify_seconds(self) -> float:
        return verify_seconds(self._question)

    def _start_of(self, standing: Standing) -> float:
        return 0.0 if self._up == standing.entrant.name else self._start_s

    def _left_seconds(self) -> float:
        return max(0.0, self._question.seconds - self._spent.seconds)

    def _payable_seconds(self, entrant: Entrant) -> float:
        if self._question.max_usd is None:
            return math.inf
        return (self._question.max_usd - self._spent.usd) / entrant.usd_per_hour * 3600

    def _affords(self, seconds: float, entrant: Entrant) -> bool:
        return seconds <= min(self._left_seconds(), self._payable_seconds(entrant))


def _widest(entrants: Iterable[Entrant]) -> Entrant:
    return max(entrants, key=lambda entrant: entrant.sessions)
