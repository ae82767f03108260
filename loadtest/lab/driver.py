"""Drives a search: has a lab answer what the search asks for, one experiment or several at a time, and writes the journal.

Of a volley, each event goes to the journal when it has ended, whatever the order; what time they share counts once. What is
paid beyond their own seconds (others that were up, removals) goes with the next event, so that the journal adds up to what the
launcher's purse says.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from loadtest.errors import UsageError
from loadtest.lab.journal import Journal
from loadtest.lab.recommender import Lab
from loadtest.search.events import Entry, Event, Experiment, Paid, Predicted, Question, Spent, Volley
from loadtest.search.standing import SearchOutcome
from loadtest.search.strategy import search
from loadtest.wording import counted


@dataclass(frozen=True, slots=True)
class SearchStep:
    """What a live display is told: before a measurement (event None) and after it. seconds, usd: spent so far."""

    experiment: Experiment
    event: Event | None
    seconds: float
    usd: float


async def run_search(
    question: Question, lab: Lab, journal: Journal, *, on_step: Callable[[SearchStep], None] = lambda step: None
) -> SearchOutcome:
    """The whole search, from where the journal stops. The journal is left open; the lab is closed in every case."""
    run = _SearchRun(question, lab, journal, on_step)
    try:
        outcome = await run.execute()
    finally:
        try:
            await lab.close()
        finally:
            run.settle()
    notes = list(outcome.notes)
    if run.unkept:
        notes.append((f"{counted(len(run.unkept), 'run')} could not be kept in `runs/`: {run.unkept[-1]}",))
    try:
        journal.finish()
    except UsageError as exc:
        notes.append((str(exc),))
    return replace(outcome, usd=run.spent.usd, notes=tuple(notes))


class _SearchRun:
    def __init__(self, question: Question, lab: Lab, journal: Journal, on_step: Callable[[SearchStep], None]) -> None:
        self._question = question
        self._lab = lab
        self._journal = journal
        self._on_step = on_step
        self.spent = Spent(question)
        self.unkept: list[str] = []  # why, for each run whose result could not be kept
        for entry in journal.events:
            self.spent.add(entry)
        self._earlier_usd = self.spent.usd
        lab.begin([entry for entry in journal.events if not isinstance(entry, Paid)], spent_usd=self._earlier_usd)

    async def execute(self) -> SearchOutcome:
        steps = search(self._question, self._journal.events)
        try:
            asked = next(steps)
            while True:
                if isinstance(asked, Volley):
                    asked = steps.send(await self._answer_all(asked))
                else:
                    asked = steps.send(await self._answer(asked, self._question.seconds - self.spent.seconds))
        except StopIteration as stop:
            outcome: SearchOutcome = stop.value
            return outcome

    def settle(self) -> None:
        """Write down what was paid since the last event."""
        if self._lab.paid and (rest_usd := self._unaccounted_usd()) > 1e-6:
            paid = Paid(rest_usd)
            self.spent.add(paid)
            self._journal.append(paid)

    async def _answer(self, experiment: Experiment, left_s: float) -> Event:
        self._on_step(SearchStep(experiment, None, self.spent.seconds, self.spent.usd))
        return self._take(experiment, await self._lab.answer(experiment, left_s=left_s), 0.0)

    async def _answer_all(self, volley: Volley) -> tuple[Event, ...]:
        left_s, counted_s = self._question.seconds - self.spent.seconds, time.monotonic()
        for experiment in volley.experiments:
            self._on_step(SearchStep(experiment, None, self.spent.seconds, self.spent.usd))
        tasks = {asyncio.create_task(self._lab.answer(each, left_s=left_s)): each for each in volley.experiments}
        events: list[Event] = []
        try:
            open_ones = set(tasks)
            while open_ones:
                done, open_ones = await asyncio.wait(open_ones, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    now_s = time.monotonic()
                    event = task.result()
                    events.append(self._take(tasks[task], event, event.seconds - (now_s - counted_s)))
                    counted_s = now_s
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return tuple(events)

    def _take(self, experiment: Experiment, event: Event, overlap_s: float) -> Event:
        if not isinstance(event, Predicted):
            event = replace(event, overlap_s=max(0.0, overlap_s))
            if self._lab.paid:
                event = replace(event, beside_usd=self._unaccounted_usd() - self.spent.own_usd(event))
        self._journal.append(event)
        try:
            self._lab.keep(event)
        except OSError as exc:
            self.unkept.append(exc.strerror or str(exc))
        self.spent.add(event)
        self._on_step(SearchStep(experiment, event, self.spent.seconds, self.spent.usd))
        return event

    def _unaccounted_usd(self) -> float:
        return self._earlier_usd + self._lab.paid_usd - self.spent.usd


def extended(question: Question, entries: Sequence[Entry]) -> Question:
    """The question with its budget on top of what these have spent."""
    spent = Spent(question)
    for entry in entries:
        spent.add(entry)
    usd = None if question.max_usd is None else question.max_usd + spent.usd
    return replace(question, seconds=question.seconds + spent.seconds, max_usd=usd)
