"""Which measurement next: the search of docs/loadtest.md, as a generator that waits for nothing.

It yields one `Experiment` (or a `Volley` of them), is sent the `Event` that answers it, and returns the `SearchOutcome`. It
reads no clock and no file and draws no random number: what is known decides what is asked next. So a search is tested against
a simulated laboratory in no time, and one that was interrupted, or proved nothing yet, goes on from the events it is given.

Agreement with the reference -> profile t(n, k) per group -> predict each candidate -> loads, as long as time allows
(`next_load`) -> overload and recovery of the winner.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Final

from loadtest.search.budget import AGREE_MOST, AGREE_SHARE, LEAST_SECONDS, LONGER, profile_seconds, verify_seconds
from loadtest.search.events import (
    EXPECTED,
    NO_REFERENCE,
    UNREACHED,
    Agree,
    Agreed,
    Entrant,
    Entry,
    Event,
    Experiment,
    Load,
    Predict,
    Profile,
    Question,
    TakenBack,
    Volley,
    cut_off,
    of_one,
)
from loadtest.search.knowledge import Knowledge, by_numerics, kin, narrowest, numerics, profiles_of, widest
from loadtest.search.next_load import KEEP_ABOVE, PROOF, SURE, first_loads, hoped_fleet, hoped_rps, load_of, next_load
from loadtest.search.standing import Name, SearchOutcome, Sentence, Standing, agreement_text, listed, misses
from loadtest.wording import attained, counted, percent, rate, usd

_BOUNDLESS: Final = 1e9  # seconds: more than all that could be measured takes
OVERLOAD, SAFE = 1.5, 0.8  # of the claimed peak: the two runs that check the winner

Asked = Experiment | Volley
Answered = Event | tuple[Event, ...]
Steps = Generator[Asked, Answered, None]


def search(question: Question, known: Sequence[Entry] = ()) -> Generator[Asked, Answered, SearchOutcome]:
    """Run the whole search. Send each event in answer to the experiment before it; those of a volley together.

    A volley is asked for only where the question allows several entrants to be up.
    known: what an earlier search for the same candidates found, oldest first; it counts as if it had been asked for here, and
    its time and money as spent.
    """
    return (yield from _Search(Knowledge(question, known)).run())


def powers_up_to(most: int) -> tuple[int, ...]:
    """1, 2, 4, … and `most` itself."""
    return tuple(sorted({*(2**n for n in range(most.bit_length())), most}))


class _Search:
    def __init__(self, known: Knowledge) -> None:
        self._known = known
        self._question = known.question
        self._reference = known.question.reference
        self._notes: list[Sentence] = []
        self._unreached: dict[str, list[str]] = {}  # why, in words -> of whom nothing is known
        self._lacking: tuple[Sentence, ...] = ()

    def run(self) -> Generator[Asked, Answered, SearchOutcome]:
        if self._reference:
            yield from self._settle_reference()
        for again in (False, True):  # what failed is tried again when all others were tried
            yield from self._agree(again=again)
            yield from self._profile(again=again)
        yield from self._load()
        yield from self._profile(again=True, last=True)
        yield from self._load()
        self._lacking = self._what_lacks()
        if ranked := self._known.ranked():
            if ranked[0].peak_rps:
                yield from self._verify(ranked[0])
        elif not any(standing.unknown for standing in self._known.standings.values()):
            yield from self._seek_floor()
        return self._outcome()

    def _ask(self, experiment: Experiment) -> Steps:
        """Again, where it came to nothing: whoever answers says when that is too often."""
        while True:
            event = yield experiment
            assert not isinstance(event, tuple)  # as a volley is answered
            self._known.take(event)
            if not isinstance(event, TakenBack):
                return

    def _ask_all(self, experiments: Sequence[Agree | Profile | Load]) -> Steps:
        """At the same time, as far as the question allows it."""
        if self._question.parallel == 1 or len(experiments) == 1:
            for experiment in experiments:
                yield from self._ask(experiment)
            return
        events = yield Volley(tuple(experiments))
        assert isinstance(events, tuple)
        for event in events:
            self._known.take(event)
        lost = {event.entrant for event in events if isinstance(event, TakenBack)}
        if again := [experiment for experiment in experiments if experiment.entrant in lost]:
            yield from self._ask_all(again)

    # Agreement, profiles and predictions: what is known of a candidate before it sees traffic.

    def _agree(self, *, again: bool) -> Steps:
        """Compare the answers of each numerics with the reference's, before anything else is spent on it.

        again: also where that came to nothing before; else one of each.
        """
        known = self._known
        while asked := self._uncompared(again=again):
            yield from self._compare_all(asked)
            for entrant in asked:
                event = yield from self._compare(entrant, again=again)
                if again or not self._is_open(event):
                    known.standings[entrant.name].agreement = event
            known.share_agreements()
            if not again:
                return

    def _uncompared(self, *, again: bool) -> list[Entrant]:
        """Whom to ask, one of each numerics: the widest; where a server failed, the narrowest, which may start all the same."""
        known, found = self._known, []
        for entrants in by_numerics(self._question.entrants):
            left = [entrant for entrant in entrants if self._awaits_agreement(known.standings[entrant.name])]
            new = [entrant for entrant in left if not known.failed[kin(entrant)]]
            tried = any(known.failed[kin(each)] or each.name in known.short for each in entrants)
            if left and (again or not tried):
                failed = {entrant.group for entrant in entrants if known.standings[entrant.name].out}
                found.append(widest(new) if new else narrowest(left, failed))
        return found

    def _awaits_agreement(self, standing: Standing) -> bool:
        return bool(self._reference) and standing.agreement is None and not standing.out

    def _is_open(self, event: Agreed) -> bool:
        """Whether to ask again, once all others were asked: it had too little time, or it was the reference that failed."""
        short = event.short_s > 0 and self._question.min_agreement is not None  # else nothing depends on it
        return short or event.failure.startswith(NO_REFERENCE)

    def _settle_reference(self) -> Steps:
        """Ask the reference, or who stands in for it: first one that computes the same, that with the fewest sessions."""
        known, event = self._known, None
        names = () if self._reference == EXPECTED else (self._question.reference, *self._question.stand_ins)
        waiting = [known.standings[name].entrant for name in names]
        tried: set[str] = set()
        replaced: list[tuple[bool, Sentence]] = []
        while waiting:
            entrant = waiting[0]
            self._reference = entrant.name
            event = yield from self._compare(entrant, again=True)
            known.standings[entrant.name].agreement = event
            if not event.failure:
                break
            same = numerics(entrant)
            alike = [each for each in self._question.entrants if numerics(each) == same and each != entrant]
            alike = [each for each in alike if not known.standings[each.name].out]
            waiting = [each for each in waiting if numerics(each) != same]
            if alike and of_one(event) and same not in tried:
                waiting.insert(0, narrowest(alike))
            tried.add(same)
            if waiting:
                told = f" {event.failure}: "
                stands_in = ("the reference ", Name(entrant.name), told, Name(waiting[0].name), " stands in for it")
                replaced.append((cut_off(event), stands_in))
        if event is not None and (not event.failure or cut_off(event)):
            self._notes += [stands_in for cut, stands_in in replaced if not (cut and event.failure)]
        for name, standing in known.standings.items():
            standing.agreement = standing.agreement or known.agreed.get((name, self._reference))
            if event is not None and event.failure and standing.agreement is None:
                standing.agreement = Agreed(name, failure=f"{NO_REFERENCE} {event.failure}")
        known.share_agreements()
        if event is not None and event.agreement is not None and misses(event, self._question.min_agreement):
            told = f" agrees only {agreement_text(event.agreement)} with itself: its answers differ from one time to the next"
            self._notes.append(("the reference ", Name(event.entrant), told))

    def _compare_all(self, entrants: Sequence[Entrant]) -> Steps:
        """At the same time, where the question allows it; what is left is compared one by one."""
        known = self._known
        new = [entrant for entrant in entrants if (entrant.name, self._reference) not in known.agreed]
        parallel = self._question.parallel
        for at in range(0, len(new) if parallel > 1 else 0, parallel):
            together, per_hour = [], 0.0
            for entrant in new[at : at + parallel]:
                seconds = known.agree_seconds(entrant)
                if known.affords(seconds + known.start_s, entrant, besides_usd_per_hour=per_hour):
                    together.append(Agree(entrant.name, self._reference, seconds))
                    per_hour += entrant.usd_per_hour
            if len(together) > 1:
                yield from self._ask_all(together)

    def _compare(self, entrant: Entrant, *, again: bool) -> Generator[Asked, Answered, Agreed]:
        """With the reference of now: another one may have stood in for it in what is known. again: where that told nothing."""
        known, pair = self._known, (entrant.name, self._reference)
        agreed = known.agreed.get(pair)
        if agreed is None or (again and agreed.failure.startswith(NO_REFERENCE)):
            spent = known.has_compared_enough
            ended = spent or not known.affords(LEAST_SECONDS, entrant)
            if ended and entrant.name not in known.short:
                half = f"{percent(AGREE_MOST)} of it had gone to comparisons of answers before that of"
                if spent:
                    self._unreached.setdefault(half, []).append(entrant.name)
                else:
                    self._lack(LEAST_SECONDS, "a comparison of the answers of", [entrant.name])
                return Agreed(entrant.name, failure=f"was not compared: {UNREACHED}")
            agreed = known.short[entrant.name] if ended else (yield from self._compare_now(entrant))
        while again and agreed.short_s and self._is_open(agreed) and known.has_longer(entrant, agreed.short_s):
            agreed = yield from self._compare_now(entrant)
        if again and agreed.short_s and self._is_open(agreed):
            short = f"{agreed.short_s:.0f} s were too short for a comparison of the answers of"
            self._unreached.setdefault(short, []).append(entrant.name)
        elif cut_off(agreed) and not agreed.short_s:
            self._lack(LEAST_SECONDS, "a comparison of the answers of", [entrant.name])
        return agreed

    def _compare_now(self, entrant: Entrant) -> Generator[Asked, Answered, Agreed]:
        yield from self._ask(Agree(entrant.name, self._reference, self._known.agree_seconds(entrant)))
        return self._known.agreed[entrant.name, self._reference]

    def _profile(self, *, again: bool, last: bool = False) -> Steps:
        """again: also where that failed before; else one of each group. last: all that could be loaded was."""
        known, parallel = self._known, self._question.parallel
        groups = {standing.entrant.group for standing in known.contenders} | known.profiles.keys()
        groups |= {entrant.group for entrant in self._question.entrants if known.failed[entrant.group]}
        seconds = profile_seconds(self._question, profiles_of(self._question.entrants, groups))
        while left := self._unprofiled(seconds, again=again, last=last):
            together: list[Profile] = []
            per_hour = 0.0
            needed_s = seconds + known.start_s + known.reserved_seconds()
            for group, members in list(left.items())[:parallel]:
                entrants = [standing.entrant for standing in members]
                asked = widest(entrants)
                if known.failures(asked):  # with the fewest rows first, each failure puts out all of as many sessions
                    between = max(entrants, key=lambda each: (each.sessions, -each.max_rows))
                    asked = between if group in known.profiles else narrowest(entrants)
                if known.affords(needed_s, asked, besides_usd_per_hour=per_hour):
                    together.append(Profile(asked.name, group, powers_up_to(asked.max_rows), asked.sessions, seconds))
                    per_hour += asked.usd_per_hour
                elif not together:  # else the money may do for it alone
                    self._lack(needed_s, "a profile of", [standing.entrant.name for standing in members])
                    for standing in members:
                        standing.out = UNREACHED
            if together:
                yield from self._ask_all(together)
            for profile in together:
                if cut := [standing.entrant.name for standing in left[profile.group] if standing.unreached]:
                    self._lack(seconds + known.start_s, "a profile of", cut)

    def _unprofiled(self, seconds: float, *, again: bool, last: bool) -> dict[str, list[Standing]]:
        """By group, who is to be profiled next. First one of each group, its widest; then, where that failed, its narrowest,
        which may need less memory; and where that did not, those beside it, of most sessions and the fewest rows first.
        """
        known = self._known
        stages: list[dict[str, list[Standing]]] = [{}, {}, {}]
        lacking = (each for each in known.contenders if known.lacks_profile(each) and not self._awaits_agreement(each))
        for standing in lacking:
            if (stage := known.profile_stage(standing.entrant, seconds, last=last)) is not None:
                stages[stage].setdefault(standing.entrant.group, []).append(standing)
        left = next((stage for stage in stages[: 3 if again else 1] if stage), {})
        if self._question.parallel > 1:  # who is cheap is started first, and answers first
            return dict(sorted(left.items(), key=lambda each: each[1][0].entrant.usd_per_hour))
        return left

    def _predict(self) -> Steps:
        for standing in self._known.contenders:
            if standing.stale and standing.entrant.group in self._known.profiles:
                yield from self._ask(Predict(standing.entrant.name))

    def _load(self) -> Steps:
        """As long as there is something to load, and time."""
        yield from self._predict()
        if len(loads := first_loads(self._known)) > 1:
            yield from self._ask_all(loads)
            yield from self._predict()
        while load := next_load(self._known):
            yield from self._ask(load)
            yield from self._predict()

    # After the peaks.

    def _verify(self, winner: Standing) -> Steps:
        """Overload, and what is left of it afterwards."""
        if self._verified(winner) is not None:
            return
        known, peak_rps = self._known, winner.claimed_rps
        half_s = (known.left_seconds() - known.start_seconds(winner)) / 2
        seconds = min(max(verify_seconds(self._question), min(60.0, 0.4 * known.left_seconds())), half_s)
        if winner.ceiling_rps <= peak_rps / SAFE:
            return  # the load generator cannot overload it
        if load := load_of(known, winner, OVERLOAD * peak_rps, seconds, "overload", decide=False):
            yield from self._ask(load)
            if load := load_of(known, winner, SAFE * peak_rps, seconds, "recovery"):
                yield from self._ask(load)

    def _verified(self, winner: Standing) -> bool | None:
        """Whether it serves its claimed rate after an overload; None if that was not seen."""
        after = [run for run in winner.runs if run.purpose in ("overload", "recovery")]
        if died := next((run.failure for run in after if run.failure), ""):
            self._note("under overload ", Name(winner.entrant.name), f" failed: {died}")
            return False
        if [run.purpose for run in after[-2:]] != ["overload", "recovery"] or not after[-1].valid:
            return None
        last = after[-1]
        if not math.isclose(last.rps, min(SAFE * winner.claimed_rps, winner.ceiling_rps)):
            return None  # another rate was claimed then
        if last.verdict == "fail":
            told = f" misses the SLO at {SAFE:g} of its claimed peak"
            self._note("after an overload ", Name(winner.entrant.name), told)
            return False
        # One that was too short to decide, and missed the SLO in what was seen, tells neither.
        return True if last.verdict == "pass" or last.share(self._question.required) >= self._question.required else None

    def _note(self, *sentence: str) -> None:
        if sentence not in self._notes:
            self._notes.append(sentence)

    def _seek_floor(self) -> Steps:
        """Nobody meets the SLO: measure what the quickest can do with hardly any load."""
        best: tuple[float, Standing] | None = None
        for standing in self._known.standings.values():
            profile = self._known.profiles.get(standing.entrant.group)
            alone = [timing.ms for timing in profile.timings if timing.rows == 1] if profile else []
            if profile and alone and standing.predictions and (best is None or min(alone) + profile.overhead_ms < best[0]):
                best = min(alone) + profile.overhead_ms, standing
        if best and (load := load_of(self._known, best[1], 100 / best[0], 20.0, "floor", decide=False)):  # a tenth of a session
            known_s = (run.seconds - run.start_s for run in best[1].runs if run.purpose == "floor" and run.valid)
            if load.seconds > max(known_s, default=0.0):
                yield from self._ask(load)

    # What it comes to.

    def _lack(self, seconds: float, for_what: str, names: Sequence[str]) -> None:
        """Time or money is too little for so many seconds."""
        short = seconds > self._known.left_seconds()
        lacks = f"that is too short for {for_what}" if short else f"{self._money_short()} {for_what}"
        unreached = self._unreached.setdefault(lacks, [])
        unreached += [name for name in names if name not in unreached]

    def _what_lacks(self) -> tuple[Sentence, ...]:
        """As in SearchOutcome; when all loads are done but the check of the winner."""
        if self._unreached:
            return tuple((f"{lacks} ", *listed(names)) for lacks, names in self._unreached.items())
        known, asked = self._known, self._question
        for seconds, max_usd in ((asked.seconds, None), (_BOUNDLESS, asked.max_usd), (_BOUNDLESS, None)):
            if load := next_load(known.with_budget(seconds, max_usd)):
                run = Name(load.entrant), f" at {rate(load.rps)}"
                check = ", and for the check of the winner behind it" * (known.reserved_seconds() > 0)
                short = (("that is too short for a run of ", *run, check),) if seconds != asked.seconds else ()
                return short if max_usd == asked.max_usd else (*short, (f"{self._money_short()} a run of ", *run))
        return ()

    def _money_short(self) -> str:
        return f"the rest of {usd(self._question.max_usd or 0.0)} does not pay for"

    def _outcome(self) -> SearchOutcome:
        known = self._known
        ranked = known.ranked()
        winner = ranked[0] if ranked else None
        verified = self._verified(winner) if winner else None
        needed, at_least = self._needed(winner)
        hoped = hoped_fleet(known)
        for standing in known.contenders:
            standing.out = self._why_not(standing, winner)
        for name, times in known.taken_back.items():
            self._note("the machine of ", Name(name), f" was taken back {counted(times, 'time')}, and another was started")
        floor = [run for standing in known.standings.values() for run in standing.runs if run.purpose == "floor"]
        return SearchOutcome(
            standings=tuple(known.standings.values()),
            profiles=known.profiles,
            winner=winner.entrant.name if winner else None,
            runner_up=ranked[1].entrant.name if len(ranked) > 1 else None,
            verified=verified,
            floor=floor[-1] if floor and not winner else None,
            seconds=known.spent.seconds,
            usd=known.spent.usd,
            notes=tuple(self._notes),
            needed_seconds=self._needed_seconds(needed),
            needed_usd=sum((each.usd_per_hour + self._question.beside_usd_per_hour) * s / 3600 for each, s in needed),
            needed_at_least=at_least,
            reference=self._reference,
            hoped=hoped[0] if hoped else None,
            lacking=self._lacking,
        )

    def _why_not(self, standing: Standing, winner: Standing | None) -> str:
        """In a few words why it is not ranked; "" if it is."""
        if standing.claimed_rps:
            return ""
        seen = ""
        if standing.evidence:
            lowest = min(standing.evidence, key=lambda run: run.rps)
            seen = f"misses the SLO at {rate(lowest.rps)}, the lowest rate that was "
            seen += ("measured" if standing.invalid_runs else "tried") + f": {lowest.unanswered}" * bool(lowest.unanswered)
        elif run := standing.unclear:
            seen = f"{rate(run.rps)} was tried for a short time: {attained(run.attainment or 0.0)} in the SLO, {run.verdict}"
        if invalid := standing.invalid_runs:
            told = f"could not be measured: {'; '.join(invalid[-1].notes)}"
            return f"{seen}; {rate(invalid[-1].rps)} {told}" if seen else told
        why = "" if standing.evidence else self._why_no_more(standing, winner)
        return "; ".join(filter(None, (seen, why)))

    def _why_no_more(self, standing: Standing, winner: Standing | None) -> str:
        if standing.estimated_rps and not self._question.suffices(standing.entrant, standing.estimated_rps):
            return f"too few can be had: {counted(standing.entrant.max_count or 0, 'instance')}"
        dearer = self._known.cost(standing) / self._known.cost(winner) if winner else 1.0
        if KEEP_ABOVE * dearer > 1:
            target_rps = self._question.target_rps
            if target_rps is None:
                return f"predicted at {1 / dearer:.0%} of the best per dollar"
            return f"its fleet for {rate(target_rps)} is predicted to cost {dearer:.3g} times the best one's"
        return f"the budget ended before {'more' if standing.unclear else 'it was tried'}"

    def _needed(self, winner: Standing | None) -> tuple[list[tuple[Entrant, float]], bool]:
        """What a proof takes: who is to be up, and for how long, starts included. First the profiles that the budget did not
        reach, then a proof and the check behind it. Empty if there is none to be had. And whether the proof is of one of whom
        nothing is known.
        """
        known = self._known
        if winner is not None and winner.peak_rps and known.is_carried(known.contenders):
            return [], False
        by_sessions = sorted((s.entrant for s in known.standings.values() if s.unreached), key=lambda each: each.sessions)
        unreached = {entrant.group: entrant for entrant in by_sessions}.values()
        unproven = [s for s in known.contenders if not s.peak_rps and hoped_rps(known, s)]
        nearest = winner if winner in unproven else min(unproven, key=known.cost, default=None)
        provable = [(entrant, math.inf) for entrant in unreached]
        if nearest is not None:
            provable.append((nearest.entrant, SURE * nearest.estimated_rps))
        if not provable:
            return [], False
        proven, rps = min(provable, key=lambda each: (known.decisive_seconds(each[1]), each[0].usd_per_hour))
        groups = {entrant.group for entrant in (*unreached, *(s.entrant for s in known.contenders))}
        question = self._question
        while True:  # profiles and the check are the longer, the larger the budget: with what is needed
            profile_s = known.start_s + profile_seconds(question, profiles_of(question.entrants, groups))
            proof_s = PROOF * known.decisive_seconds(rps) + 2 * (known.start_s + verify_seconds(question))
            needed = [*((entrant, profile_s) for entrant in unreached), (proven, proof_s)]
            seconds = known.spent.seconds + (self._needed_seconds(needed) or 0.0)
            if seconds < question.seconds + 1:
                return needed, proven in unreached
            question = replace(question, seconds=seconds)

    def _needed_seconds(self, needed: Sequence[tuple[Entrant, float]]) -> float | None:
        """As in SearchOutcome. Where answers are left to compare, it has time that costs nothing: nobody new is compared in the
        last part of a budget.
        """
        known = self._known
        agreements = (standing.agreement for standing in known.standings.values() if standing.unreached)
        cut = [agreed for agreed in agreements if agreed is not None and agreed.failure.endswith(UNREACHED)]
        least_s = 0.0
        if needed and cut:
            longer_s = LONGER * max(agreed.short_s for agreed in cut)
            least_s = max((1 / AGREE_MOST - 1) * known.spent.seconds, longer_s / AGREE_SHARE)
        return max(least_s, sum(seconds for _, seconds in needed)) or None
