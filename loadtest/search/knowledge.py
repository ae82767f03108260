"""What a search knows by now: where each entrant stands, what it costs, and how much of the budget is left."""

import copy
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final

from loadtest.search.budget import AGREE_MOST, PROFILE_MOST, agree_seconds, decisive_seconds, verify_seconds
from loadtest.search.events import (
    EXPECTED,
    NO_REFERENCE,
    NOT_STARTED,
    SEARCHING,
    Agreed,
    Entrant,
    Entry,
    Event,
    Measured,
    Paid,
    Predicted,
    Profiled,
    Question,
    Spent,
    TakenBack,
    cut_off,
    of_one,
)
from loadtest.search.standing import Standing, misses

_UNPROVEN: Final = 0.8  # what a rate that only held in the sample counts for beside a proven one
_CHEAPER: Final = 1.01  # a candidate is tried at so much more than the rate at which it would cost the same
MOST_INVALID: Final = 3  # runs in a row; then the others come first


class Knowledge:
    """All that the events so far tell. It is a function of them alone, so that a search goes on from its journal.

    standings: by entrant. profiles: by group. agreed: by entrant and reference, as far as answers were compared. failed: by
    group and kin, whose servers failed and how, until one shows that it was by chance. taken_back: how often the entrant's
    machine was.
    """

    def __init__(self, question: Question, events: Sequence[Entry]) -> None:
        """events: of an earlier search for the same candidates, oldest first; nothing of it runs any more."""
        self.question = question
        self.standings = {
            entrant.name: Standing(entrant, question.required, question.limit_ms) for entrant in question.entrants
        }
        self.profiles: dict[str, Profiled] = {}
        self._profiled: dict[str, list[Entrant]] = {}  # by group, who was
        self.agreed: dict[tuple[str, str], Agreed] = {}
        self.failed: defaultdict[object, list[tuple[Entrant, str]]] = defaultdict(list)
        self.short: dict[str, Agreed] = {}  # entrant -> the last comparison of its answers, of those that were too short
        self.taken_back: Counter[str] = Counter()
        self.spent = Spent(question)
        self.start_s = question.start_s  # what the last start took, as far as it is known
        self._up: dict[str, None] = {}  # the entrants that run, the last one that was asked for behind
        self._ended: set[str] = set()  # entrants of whom no more is asked, as the end of time or money cut them off
        for event in events:
            gone = isinstance(event, Agreed) and event.failure.startswith(NO_REFERENCE)
            if isinstance(event, Paid) or not (cut_off(event) or gone):
                self.take(event)
            else:  # there may be more of either now, or the reference may start
                self._pay(event)
        self._up.clear()

    def take(self, event: Entry) -> None:
        """Add an event to what is known."""
        self._pay(event)
        if isinstance(event, Paid):
            return
        if cut_off(event):
            self._end(event)
            return
        if isinstance(event, TakenBack):
            self.taken_back[event.entrant] += 1
            self._is_up(event.entrant, False)
            return
        if isinstance(event, Profiled):
            members = (entrant for entrant in self.question.entrants if entrant.group == event.group)
            entrant = self.standings[event.entrant or widest(members).name].entrant
            if event.failure:
                self._fail(entrant, event.failure, lambda other: other.group)
            else:
                self.profiles[event.group] = event.beside(self.profiles.get(event.group))
                self._profiled.setdefault(event.group, []).append(entrant)
                for key in (event.group, kin(entrant)):
                    self.failed[key] = [each for each in self.failed[key] if not fits(each[0], entrant)]
            self._started(entrant, event)
            return
        standing = self.standings[event.entrant]
        if isinstance(event, Agreed):
            self.agreed[event.entrant, self._compared_with(event)] = event
            self._is_up(event.entrant, True)
            if not event.failure:
                self.failed[kin(standing.entrant)] = []
            elif of_one(event) and (self.question.min_agreement is not None or event.failure.startswith(NOT_STARTED)):
                self._fail(standing.entrant, event.failure, kin)
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

    def _fail(self, entrant: Entrant, failure: str, alike: Callable[[Entrant], object]) -> None:
        """Its server failed: so would those that are alike, of as many sessions and rows, where a narrower one is left.

        That may need less memory; where there is none, another may by its settings, or this one failed by chance. What nothing
        mends fails twice in the same way, or three times, and is tried no more.
        """
        standing = self.standings[entrant.name]
        standing.out = standing.out or failure
        others = [each for each in self.standings.values() if alike(each.entrant) == alike(entrant)]
        before = self.failures(entrant)
        decided = len(before) > 1 or any(in_general(why) == in_general(failure) for _, why in before)
        narrower = any(not each.out and width(each.entrant) < width(entrant) for each in others)
        failed = [entrant] * (decided or narrower) + [each for each, _ in before if decided]
        for other in others:
            if any(fits(each, other.entrant) for each in failed) and not (other.runs or other.out):
                other.out, other.untried = failure, entrant.name
        self.failed[alike(entrant)].append((entrant, failure))

    def failures(self, entrant: Entrant) -> list[tuple[Entrant, str]]:
        """Of servers like its own."""
        return self.failed[entrant.group] + self.failed[kin(entrant)]

    def share_agreements(self) -> None:
        """What is known of one of a numerics holds for all of it. Where its server failed another is asked, unless nothing
        depends on it.
        """
        standings = self.standings
        for entrants in by_numerics(self.question.entrants):
            known = [agreed for entrant in entrants if (agreed := standings[entrant.name].agreement)]
            shared = next((agreed for agreed in known if not of_one(agreed)), None)
            if known and shared is None and self.question.min_agreement is None:
                shared = replace(known[0], failure=f"another that computes the same {known[0].failure}")
            for standing in (standings[entrant.name] for entrant in entrants):
                standing.agreement = standing.agreement or shared
                if standing.agreement:
                    standing.out = standing.out or misses(standing.agreement, self.question.min_agreement)

    def _pay(self, event: Entry) -> None:
        self.spent.add(event)
        if isinstance(event, Profiled | Measured) and cut_off(event):
            self.start_s = max(self.start_s, event.start_s)  # it takes longer
        if isinstance(event, Agreed) and event.short_s:
            self.short[event.entrant] = event

    def _end(self, event: Event) -> None:
        if isinstance(event, Profiled):
            for standing in self.standings.values():
                if standing.entrant.group == event.group and self.lacks_profile(standing):
                    standing.out = standing.out or event.failure
            return
        if isinstance(event, Agreed):
            self.agreed[event.entrant, self._compared_with(event)] = event
            if event.short_s:  # of its share alone: where its answers decide nothing, it is measured all the same
                self._is_up(event.entrant, True)
                return
        self._ended.add(event.entrant)

    def _compared_with(self, event: Agreed) -> str:
        """The reference; where an older journal does not name it, the first that could be asked, by what came before."""
        if event.reference:
            return event.reference
        for name in (self.question.reference, *self.question.stand_ins):
            itself = self.agreed.get((name, name))
            if name in (EXPECTED, event.entrant) or (itself is not None and not itself.failure):
                return name
        return event.entrant

    def _started(self, entrant: Entrant, event: Profiled | Measured) -> None:
        self._is_up(entrant.name, not event.failure)
        self.start_s = event.start_s or self.start_s

    def _is_up(self, name: str, up: bool) -> None:
        self._up.pop(name, None)
        if up:
            self._up[name] = None
        while len(self._up) > self.question.parallel:
            del self._up[next(iter(self._up))]

    def carry_over_bias(self) -> None:
        """Correct the predictions of entrants that have no bracket by what the others' brackets say of theirs."""
        ratios = [
            min(max(standing.predicted_rps, standing.held_rps), standing.missed_rps) / standing.predicted_rps
            for standing in self.contenders
            if standing.trials and standing.predicted_rps
        ]
        for standing in self.contenders:
            if not standing.trials:
                standing.bias = math.prod(ratios) ** (1 / len(ratios)) if ratios else 1.0

    # Who may win, and for how much.

    @property
    def contenders(self) -> list[Standing]:
        """Those that may still win."""
        return [standing for standing in self.standings.values() if not standing.out]

    def ranked(self) -> list[Standing]:
        """Those whose SLO held at some rate, cheapest first at the rates claimed for them. A proven, cheaper rate always wins;
        beside one, what only held in the sample wins if it is much cheaper.
        """
        claimed = [standing for standing in self.contenders if standing.claimed_rps]
        held = _UNPROVEN if self.claims(claimed) else 1.0
        return sorted(claimed, key=lambda each: self.question.cost(each.entrant, each.peak_rps or held * each.held_rps))

    def lacks_profile(self, standing: Standing) -> bool:
        """Whether its group has none, or none of as many sessions and rows, and nothing was predicted for it yet."""
        profiled = self._profiled.get(standing.entrant.group, ())
        covered = any(fits(standing.entrant, each) for each in profiled)
        return not profiled or not (covered or standing.predictions)

    def profile_stage(self, entrant: Entrant, seconds: float, *, last: bool) -> int | None:
        """When one that lacks a profile is asked for it: 0, first of its group; 1, as such a server failed; 2, as its group has
        one of another size, which else predicts it; None: not now. last: all that could be loaded was.

        To prove a rate of those that have a profile comes first.
        """
        stage = 2 if entrant.group in self.profiles else int(bool(self.failures(entrant)))
        if stage == 2 and self.spent.seconds > PROFILE_MOST * self.question.seconds:
            return None
        if stage == 0 or (stage == 1 and (last or not self.profiles)):
            return stage
        proof_s = self.decisive_seconds(math.inf) + 2 * verify_seconds(self.question)
        return stage if self.affords(2 * self.start_s + seconds + proof_s, entrant) else None

    def claims(self, shortlist: Sequence[Standing]) -> list[Standing]:
        """Those with a proven rate, the cheapest at that first."""
        return sorted((standing for standing in shortlist if standing.peak_rps), key=self.claimed_cost)

    def cost(self, standing: Standing) -> float:
        """At its estimated peak."""
        return self.question.cost(standing.entrant, standing.estimated_rps)

    def claimed_cost(self, standing: Standing) -> float:
        """At its proven rate."""
        return self.question.cost(standing.entrant, standing.peak_rps)

    def leading_rps(self, standing: Standing, shortlist: Sequence[Standing]) -> float:
        """The rate from which it is cheaper than the cheapest claim; 0, if there is none."""
        claims = self.claims(shortlist)
        return _CHEAPER * self._rate_at_cost(standing.entrant, self.claimed_cost(claims[0])) if claims else 0.0

    def _rate_at_cost(self, entrant: Entrant, cost: float) -> float:
        """The least rate at which the entrant costs no more: fleets cost in steps, so it is searched for."""
        low, high = 1e-3, 1e7
        while high / low > 1.0001:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if self.question.cost(entrant, middle) <= cost else (middle, high)
        return high

    def is_carried(self, standings: Iterable[Standing]) -> bool:
        """Whether the proven rates of these together carry the target rate, if there is one."""
        return self.question.carries((standing.entrant, standing.peak_rps) for standing in standings)

    def is_unmeasurable(self, standing: Standing) -> bool:
        """For now: too many of its runs in a row were INVALID."""
        return len(standing.invalid_runs) >= MOST_INVALID

    # What is left.

    def with_budget(self, seconds: float, max_usd: float | None) -> "Knowledge":
        """The same, had there been so much in all."""
        other = copy.copy(self)
        other.question = replace(self.question, seconds=seconds, max_usd=max_usd)
        other._ended = set()
        return other

    def left_seconds(self) -> float:
        return max(0.0, self.question.seconds - self.spent.seconds)

    def payable_seconds(self, entrant: Entrant, *, besides_usd_per_hour: float = 0.0) -> float:
        """For so long the rest of the money pays; infinite, if none is spent. besides: what runs at the same time.

        0 of whom the end of time or money cut off: it would again.
        """
        if entrant.name in self._ended:
            return 0.0
        if self.question.max_usd is None:
            return math.inf
        per_hour = entrant.usd_per_hour + besides_usd_per_hour + self.question.beside_usd_per_hour
        return (self.question.max_usd - self.spent.usd) / per_hour * 3600

    def affords(self, seconds: float, entrant: Entrant, *, besides_usd_per_hour: float = 0.0) -> bool:
        return seconds <= min(self.left_seconds(), self.payable_seconds(entrant, besides_usd_per_hour=besides_usd_per_hour))

    def reserved_seconds(self) -> float:
        """For the last two runs; nothing, while no rate is proven: that comes first."""
        return 2 * verify_seconds(self.question) if any(standing.peak_rps for standing in self.contenders) else 0.0

    def start_seconds(self, standing: Standing) -> float:
        """What its start will take; nothing, if it runs."""
        return 0.0 if standing.entrant.name in self._up else self.start_s

    def agree_seconds(self, entrant: Entrant) -> float:
        """As `budget.agree_seconds`."""
        short = self.short.get(entrant.name)
        return agree_seconds(self.left_seconds(), short.short_s if short else 0.0)

    @property
    def has_compared_enough(self) -> bool:
        """Whether so much of the budget is spent that nobody new is compared."""
        return self.spent.seconds > AGREE_MOST * self.question.seconds

    def has_longer(self, entrant: Entrant, short_s: float) -> bool:
        """Whether another comparison of its answers would have more time than that."""
        seconds = self.agree_seconds(entrant)
        return seconds > short_s and not self.has_compared_enough and self.affords(seconds, entrant)

    def decisive_seconds(self, rps: float) -> float:
        """As `budget.decisive_seconds`, for this question's SLO."""
        return decisive_seconds(max(self.question.limit_ms, self.question.longest_ms), rps)


def widest(entrants: Iterable[Entrant]) -> Entrant:
    """The one with most sessions, and rows: a profile of it serves its group."""
    return max(entrants, key=width)


def in_general(failure: str) -> str:
    """Without its numbers: times, ports and sizes differ from one time to the next."""
    return re.sub(r"\d+", "", failure)


def width(entrant: Entrant) -> tuple[int, int]:
    return entrant.sessions, entrant.max_rows


def fits(entrant: Entrant, other: Entrant) -> bool:
    """Whether the other has at least as many sessions and rows: the entrant needs no more memory, and shares its profile."""
    return entrant.sessions <= other.sessions and entrant.max_rows <= other.max_rows


def profiles_of(entrants: Iterable[Entrant], groups: Collection[str]) -> int:
    """How many profiles serve these groups where no server fails: of each that no other has the sessions and rows of."""
    sizes = {(each.group, *width(each)): each for each in entrants if each.group in groups}.values()
    return sum(not any(fits(each, other) for other in sizes if other.group == each.group and other != each) for each in sizes)


def narrowest(entrants: Iterable[Entrant], failed: Collection[str] = ()) -> Entrant:
    """The one with the fewest sessions, and rows: it may start where others do not. failed: groups that are to be last."""
    return min(entrants, key=lambda entrant: (entrant.sessions, entrant.group in failed, entrant.max_rows))


def numerics(entrant: Entrant) -> str:
    """Equal for all that compute the same."""
    return entrant.numerics or entrant.name


def by_numerics(entrants: Sequence[Entrant]) -> Iterable[list[Entrant]]:
    """Those that compute the same together, in the order of the first of each."""
    found: dict[str, list[Entrant]] = {}
    for entrant in entrants:
        found.setdefault(numerics(entrant), []).append(entrant)
    return found.values()


def kin(entrant: Entrant) -> tuple[str, str]:
    """Equal for all that compute the same on the same instance type: as a server, one fails as another does."""
    return numerics(entrant), entrant.pool or entrant.group
