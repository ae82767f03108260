"""What is known of each candidate from the events so far, and what all of it comes to."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from loadtest.prices.fleet import Fleet
from loadtest.search.events import SEARCHING, UNREACHED, Agreed, Entrant, Measured, Predicted, Profiled
from loadtest.verdict.statistics import falling

_NEAR_LIMIT: Final = 0.9  # of the SLO's limit: a server whose p99 comes so near, and holds it, is at its peak
_STALLED: Final = 0.9  # of the required share: a short run between the two may have met a stall
_LIKELY_ERROR: Final = 0.1  # of an estimate that nothing bounds from above
# Of a rate at which a server answers hardly anybody in time: the middle of where its peak may be, as rates are tried by
# predictions, good to 25 %. The oftener that was wrong, the less they are worth.
_COLLAPSED: Final = 0.87
_BURST: Final = 0.95  # of a rate that a burst of misses may have spoilt; no more is expected of one that failed


class Name(str):
    """An entrant's, within a sentence: a report puts its letter there. What else is said is shown as it is."""

    __slots__ = ()


Sentence = tuple[str, ...]
"""In parts, of which each entrant is a `Name`."""


@dataclass(slots=True, eq=False)
class Standing:
    """What is known of one entrant so far.

    required, limit_ms: as in Question. out: why it is no candidate any more, "" while it is one; in the
        outcome, also why it was not measured. untried: of whom that is told, as whose server failed; "": of itself.
    stale: its latest prediction, if any, does not know of its first run under load.
    agreement: with the reference; measured on one entrant of its numerics; None if nothing was compared.
    bias: nearest rate in the brackets of others, over what was predicted of them: what one prediction leaves out of account,
        all do.
    """

    entrant: Entrant
    required: float
    limit_ms: float
    predictions: list[Predicted] = field(default_factory=list)
    stale: bool = True
    bias: float = 1.0
    runs: list[Measured] = field(default_factory=list)
    out: str = ""
    untried: str = ""
    agreement: Agreed | None = None

    @property
    def predicted_rps(self) -> float:
        """By the latest prediction; 0 before the first."""
        return self.predictions[-1].rps if self.predictions else 0.0

    @property
    def ceiling_rps(self) -> float:
        """The most that the load generator can offer."""
        return (self.predictions[-1].ceiling_rps if self.predictions else None) or math.inf

    @property
    def evidence(self) -> list[Measured]:
        """Valid runs that say something about the peak. A rate measured again is judged by its last run.

        A single stall makes a short run miss an SLO that it else holds: then it says nothing.
        """
        return list({run.rps: run for run in self._told if not self._unclear(run)}.values())

    @property
    def _told(self) -> list[Measured]:
        """Valid runs that sought its peak and were answered."""
        return [run for run in self.runs if run.purpose in SEARCHING and run.valid and not run.failure and run.requests]

    @property
    def unclear(self) -> Measured | None:
        """The last valid run, where all were so short that a stall may have made them miss; else None."""
        return self._told[-1] if self._told and not self.evidence else None

    def _unclear(self, run: Measured) -> bool:
        return run.purpose == "round" and _STALLED * self.required <= run.share(self.required) < self.required

    @property
    def broken(self) -> bool:
        """It did not start, or died while its peak was sought."""
        return any(run.failure for run in self.runs if run.purpose in SEARCHING)

    @property
    def unreached(self) -> bool:
        """Time or money ended before anything was known of it: it may carry any rate."""
        return self.out.endswith(UNREACHED)

    @property
    def trials(self) -> list[Measured]:
        """The evidence that could prove a rate."""
        return [run for run in self.evidence if run.purpose == "peak"]

    @property
    def tries(self) -> int:
        """How many valid runs sought a proof, repeated ones included."""
        return sum(run.purpose == "peak" and run.valid and not run.failure for run in self.runs)

    def lasted_s(self, rps: float) -> float:
        """How long its runs at that rate were together; 0 if there was none."""
        return sum(run.seconds - run.start_s for run in self._told if run.rps == rps)

    @property
    def invalid_runs(self) -> list[Measured]:
        """INVALID runs since the last valid one, while its peak was sought."""
        searching = [run for run in self.runs if run.purpose in SEARCHING]
        valid = [index for index, run in enumerate(searching) if run.valid or run.failure]
        return searching[valid[-1] + 1 :] if valid else searching

    @property
    def unknown(self) -> bool:
        """Measuring it was tried, and told nothing."""
        disturbed = bool(self.predictions) and self.predictions[-1].disturbed
        return not self.evidence and (disturbed or bool(self.invalid_runs))

    @property
    def peak_rps(self) -> float:
        """The highest rate that passes below the lowest that fails; 0 if there is none."""
        failed = min((run.rps for run in self.evidence if run.verdict == "fail"), default=math.inf)
        return max((run.rps for run in self.trials if run.verdict == "pass" and run.rps < failed), default=0.0)

    @property
    def failing_rps(self) -> float | None:
        """The lowest rate that fails, or that a full-length trial could not show to pass; None if there is none.

        What a trial could not show, one at a higher rate may have shown.
        """
        peak_rps = self.peak_rps
        stuck = (run.rps for run in self.trials if run.verdict == "undecided" and run.rps > peak_rps)
        failed = (run.rps for run in self.evidence if run.verdict == "fail")
        return min((*stuck, *failed), default=None)

    @property
    def held_rps(self) -> float:
        """The highest rate at which the SLO held in the sample, proven or not; 0 if there is none."""
        return max(self.peak_rps, *(rps for rps in self._shares if rps < self.missed_rps), 0.0)

    @property
    def claimed_rps(self) -> float:
        """The rate claimed for it: what was proven, else what held in the sample; 0 if nothing did."""
        return self.peak_rps or self.held_rps

    @property
    def missed_rps(self) -> float:
        """The lowest rate at which it did not; infinite if there is none."""
        failed = (run.rps for run in self.evidence if run.verdict == "fail")
        return min((*failed, *(rps for rps, share in self._shares.items() if share < self.required)), default=math.inf)

    @property
    def _shares(self) -> dict[float, float]:
        """Rate -> share that met the SLO, made to fall with the rate, as it must: a stall in one short run is not the peak."""
        runs = sorted(self.evidence, key=lambda run: run.rps)
        if not runs:
            return {}
        shares = falling([run.share(self.required) for run in runs], [run.requests for run in runs])
        return {run.rps: float(share) for run, share in zip(runs, shares, strict=True)}

    @property
    def estimated_rps(self) -> float:
        """The best guess of the peak: the middle of its bracket, else what load says, else the prediction."""
        held, missed = self.held_rps, self.missed_rps
        if missed == math.inf:
            # Of what a stall may have slowed, too: as likely it was the rate, and a challenge above it stays open.
            last = {run.rps: run for run in self._told}.values()
            full = [run.rps for run in last if run.rps >= held and run.p99_ms > _NEAR_LIMIT * self.limit_ms]
            return max(held, min(self.predicted_rps * self.bias, self.ceiling_rps, *full))
        # A server that sheds serves about its capacity in time; one that collapses says only that the rate was too high.
        collapses = [run.rps for run in self.evidence if run.verdict == "fail" and run.share(self.required) < _COLLAPSED]
        below = min(_BURST, max(_COLLAPSED ** len(collapses), self._shares[missed])) if missed in collapses else _BURST
        return max(below * missed, math.sqrt(held * missed))  # what holds never lowers it

    @property
    def likely_rps(self) -> float:
        """The highest peak that is likely."""
        return min(self.missed_rps, self.estimated_rps * (1 + _LIKELY_ERROR), self.ceiling_rps)


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """standings: in the order of the entrants. winner, runner_up: entrants' names. verified: None if there was no time to.

    floor: if nobody meets the SLO, the best that could be had, at hardly any load.
    needed_seconds: how much more budget should prove a rate; None if one is proven, or nobody is near. needed_usd: what that
    costs of machines that are paid for. needed_at_least: it is of one of whom nothing is known, at the rate that takes least.
    reference: whom agreement was measured with: the question's, or the one that stood in for it; "" if nothing was compared.
    hoped: a fleet for the target rate that would cost less than the proven one, at rates that time or money did not suffice to
    prove; None if there is none.
    lacking: what was not measured for want of time or money, in words behind how long the search ended before its budget; empty
    if nothing was left that could change the answer.
    """

    standings: tuple[Standing, ...]
    profiles: dict[str, Profiled]
    winner: str | None
    runner_up: str | None
    verified: bool | None
    floor: Measured | None
    seconds: float
    usd: float
    notes: tuple[Sentence, ...]
    needed_seconds: float | None = None
    needed_usd: float = 0.0
    needed_at_least: bool = False
    reference: str = ""
    hoped: Fleet | None = None
    lacking: tuple[Sentence, ...] = ()


def listed(names: Iterable[str]) -> Sentence:
    """Several entrants, with commas."""
    return tuple(part for name in names for part in (", ", Name(name)))[1:]


def misses(agreed: Agreed, min_agreement: float | None) -> str:
    """Why an entrant may not win, by its agreement with the reference; "" if it may."""
    if min_agreement is None:
        return ""
    if agreed.agreement is None or agreed.failure:
        return agreed.failure
    if agreed.agreement < min_agreement:
        return f"agrees {agreement_text(agreed.agreement)} with the reference, {min_agreement:g} is asked"
    return ""


def agreement_text(agreement: float) -> str:
    """With as many digits as tell it from 1, and never rounded up to what it does not reach: 0.94, 0.9989, 0.999982, 1."""
    digits = min(6, 1 - math.floor(math.log10(max(1 - agreement, 1e-6))))
    return f"{math.floor(agreement * 10**digits + 1e-4) / 10**digits:g}"  # 1e-4: floats of 32 bits are off by so little
