"""Drives a search: starts candidates, measures what the search asks for, writes the journal.

The search decides (search.py, pure), launchers start, the generator measures; this module waits.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.config import Batching, parse_config
from loadtest.catalogue import Catalogue
from loadtest.errors import LoadtestError, UsageError
from loadtest.journal import Journal
from loadtest.launchers import Launcher, Running, StartFailed
from loadtest.launchers.url import get_json, instance_type_of
from loadtest.prediction import predicted_rps
from loadtest.profiling import Executions, ProfileFailed, executions, profile, slowdown
from loadtest.results import LoadSpec, RunResult, Slo, to_json
from loadtest.search import (
    Command,
    Entrant,
    Event,
    Load,
    Measured,
    Outcome,
    Predict,
    Predicted,
    Profile,
    Profiled,
    Question,
    search,
)
from loadtest.spec import Candidate, Spec, priced

Measure = Callable[..., Awaitable[RunResult]]
LOST_TARGET = ("refused", "reset")  # errors that mean that nobody is there


def question_of(spec: Spec, *, paid: bool) -> Question:
    """What the search needs to know of a spec whose candidates are all priced. paid: whether running them costs money."""
    assert spec.slo.tightest_ms is not None  # parse_spec refuses such an SLO
    entrants = tuple(Entrant(c.name, c.group, c.usd_per_hour, c.sessions, c.max_rows) for c in spec.candidates)
    return Question(
        entrants=entrants,
        required=required_share(spec.slo),
        limit_ms=spec.slo.tightest_ms,
        seconds=spec.budget.minutes * 60,
        target_rps=spec.target_rps,
        max_usd=spec.budget.usd if paid else None,
    )


def required_share(slo: Slo) -> float:
    """The share of requests that must meet every objective at once: at least what the most lenient percentile asks."""
    return min(objective.percentile for objective in slo.objectives) / 100


async def price_by_metadata(spec: Spec, catalogue: Catalogue) -> Spec:
    """Ask running servers without a stated instance type for it, so that every candidate has a price.

    Raises: TargetError, UsageError.
    """
    candidates = []
    for candidate in spec.candidates:
        if candidate.price is None:
            candidate = priced(candidate, await instance_type_of(candidate.url), catalogue, spec.basis)
        candidates.append(candidate)
    return replace(spec, candidates=tuple(candidates))


class Lab:
    """Answers the search's commands by measuring. Life: any number of `answer`, then close.

    One candidate runs at a time; it stays up until another is wanted. measure: `loadtest.generator.measure`.
    runs: where each run's full result is kept; None: nowhere.
    """

    def __init__(self, spec: Spec, launcher: Launcher, measure: Measure, *, runs: Path | None = None) -> None:
        self._spec = spec
        self._candidates = {candidate.name: candidate for candidate in spec.candidates}
        self._launcher = launcher
        self._measure = measure
        self._runs = runs
        self._profiles: dict[str, Profiled] = {}
        self._slowdown: dict[str, float] = {}
        self._running: Running | None = None
        self._running_name = ""
        self._count = 0

    def __repr__(self) -> str:
        return f"<Lab with {self._running_name or 'nothing'} running, {self._count} runs so far>"

    def remember(self, event: Event) -> None:
        """Take note of an event from the journal: predictions need profiles."""
        if isinstance(event, Profiled):
            self._profiles[event.group] = event
        elif isinstance(event, Measured):
            self._count += 1
            self._slowdown[event.entrant] = event.slowdown

    async def answer(self, command: Command) -> Event:
        candidate = self._candidates[command.entrant]
        started_s = time.monotonic()
        if isinstance(command, Predict):
            rps = await asyncio.to_thread(self._predict, candidate)
            return Predicted(command.entrant, rps, time.monotonic() - started_s)
        try:
            running = await self._ensure(candidate)
            if isinstance(command, Profile):
                event: Event = await self._profile(command, candidate, running, started_s)
            else:
                event = await self._load(command, candidate, running, started_s)
        except StartFailed as exc:
            seconds = time.monotonic() - started_s
            if isinstance(command, Profile):
                event = Profiled(command.group, seconds=seconds, failure=f"did not start: {exc}")
            else:
                failure = f"did not start: {exc}"
                event = Measured(command.entrant, command.purpose, command.rps, "fail", (), seconds, failure=failure)
        self.remember(event)
        return event

    async def close(self) -> None:
        if self._running is not None:
            await self._running.stop()
            self._running, self._running_name = None, ""

    async def _ensure(self, candidate: Candidate) -> Running:
        if self._running is not None and self._running_name == candidate.name and not self._running.failure():
            return self._running
        await self.close()
        self._running = await self._launcher.start(candidate)
        self._running_name = candidate.name
        return self._running

    def _predict(self, candidate: Candidate) -> float:
        profiled = self._profiles[candidate.group]
        slower = self._slowdown.get(candidate.name, 1.0)
        return predicted_rps(
            tuple(replace(timing, ms=timing.ms * slower) for timing in profiled.timings),
            overhead_ms=profiled.overhead_ms,
            slo=self._spec.slo,
            batching=batching_of(candidate),
            sessions=candidate.sessions,
            max_rows=candidate.max_rows,
            rows_per_request=self._spec.payload.rows,
            seed=self._spec.seed,
        )

    async def _profile(self, command: Profile, candidate: Candidate, running: Running, started_s: float) -> Profiled:
        try:
            found = await profile(
                self._load_spec(running),
                rows=command.rows,
                sessions=command.sessions,
                seconds=command.seconds,
                limit_ms=self._spec.slo.tightest_ms or 0.0,
                measure=self._measure,
                look=lambda: self._look(running),
            )
        except (ProfileFailed, LoadtestError) as exc:
            failure = running.failure() or f"no profile: {exc}"
            return Profiled(command.group, seconds=time.monotonic() - started_s, failure=failure)
        seconds = time.monotonic() - started_s
        return Profiled(command.group, found.timings, found.overhead_ms, seconds)

    async def _load(self, command: Load, candidate: Candidate, running: Running, started_s: float) -> Measured:
        before = await self._look(running)
        running.usage()
        wanted = replace(self._load_spec(running), rate_rps=command.rps, duration_s=command.seconds, label=command.entrant)
        try:
            result = await self._measure(wanted, until_decided=command.until_decided)
        except LoadtestError as exc:
            failure = running.failure() or str(exc)
            seconds = time.monotonic() - started_s
            return Measured(command.entrant, command.purpose, command.rps, "fail", (), seconds, failure=failure)
        usage = running.usage()
        batches = (await self._look(running)).since(before)
        self._keep(result)
        profiled = self._profiles.get(candidate.group, Profiled(candidate.group))
        return Measured(
            entrant=command.entrant,
            purpose=command.purpose,
            rps=command.rps,
            verdict=result.verdict or "undecided",
            blocks=tuple((block.requests, block.met) for block in result.blocks if not block.warmup and block.requests),
            seconds=time.monotonic() - started_s,
            valid=result.valid,
            failure=running.failure() or _lost(result),
            p50_ms=result.latency.p50,
            p95_ms=result.latency.p95,
            p99_ms=result.latency.p99,
            mean_ms=result.latency.mean,
            goodput_rps=result.goodput_rps,
            error_rate=result.error_rate,
            queue_ms=result.server.queue_ms if result.server else None,
            compute_ms=result.server.compute_ms if result.server else None,
            overhead_ms=result.server.overhead_ms if result.server else None,
            batch_rows={rows: count for rows, (count, _) in batches.by_rows.items()},
            cpu_percent=usage.cpu_percent,
            memory_percent=usage.memory_percent,
            notes=result.reasons if not result.valid else result.warnings,
            slowdown=slowdown(profiled.timings, batches, candidate.sessions, result.warmup_s + result.window_s),
        )

    def _load_spec(self, running: Running) -> LoadSpec:
        payload = self._spec.payload
        return LoadSpec(
            target=running.grpc if payload.protocol == "grpc" else running.rest,
            protocol=payload.protocol,
            model=self._spec.model,
            seed=self._spec.seed,
            slo=self._spec.slo,
            timeout_s=max(1.0, 20 * (self._spec.slo.tightest_ms or 0.0) / 1e3),
            rows=str(payload.rows),
            length=payload.length,
            payloads=payload.files,
            values=payload.values,
        )

    async def _look(self, running: Running) -> Executions:
        """What the server has counted so far; nothing, if it keeps no statistics."""
        try:
            return executions(await asyncio.to_thread(get_json, f"{running.rest}/v2/models/{self._spec.model}/stats"))
        except LoadtestError:
            return Executions({})

    def _keep(self, result: RunResult) -> None:
        if self._runs is not None:
            self._runs.mkdir(parents=True, exist_ok=True)
            (self._runs / f"{self._count:03}.json").write_text(to_json(result))


@dataclass(frozen=True, slots=True)
class Step:
    """What a live display is told: before a measurement (event None) and after it."""

    command: Command
    event: Event | None
    resumed: bool = False


async def run_search(
    question: Question, lab: Lab, journal: Journal, *, on_step: Callable[[Step], None] = lambda step: None
) -> Outcome:
    """The whole search, from where the journal stops. The journal is left open; the lab is closed in every case."""
    steps = search(question)
    known = list(journal.events)
    try:
        command = next(steps)
        while True:
            resumed = bool(known)
            if resumed:
                event = known.pop(0)
                lab.remember(event)
            else:
                on_step(Step(command, None))
                event = await lab.answer(command)
                journal.append(event)
            on_step(Step(command, event, resumed))
            try:
                command = steps.send(event)
            except StopIteration as stop:
                journal.finish()
                outcome: Outcome = stop.value
                return outcome
    finally:
        await lab.close()


def batching_of(candidate: Candidate) -> Batching:
    """How the candidate batches; of a server that is not ours, the gateway's default is assumed."""
    if not candidate.document:
        return Batching()
    return parse_config(candidate.document, source=candidate.name).models[0].batching


def limited(spec: Spec, *, minutes: float | None, usd: float | None, target_rps: float | None) -> Spec:
    """The spec with what the command line says instead. Raises: UsageError."""
    for name, value in (("--budget-minutes", minutes), ("--target-rps", target_rps)):
        if value is not None and value <= 0:
            raise UsageError(f"{name}: expected a number above 0, got {value:g}")
    if usd is not None and usd < 0:
        raise UsageError(f"--max-usd: expected at least 0, got {usd:g}")
    budget = spec.budget.model_copy(update={k: v for k, v in (("minutes", minutes), ("usd", usd)) if v is not None})
    return replace(spec, budget=budget, target_rps=target_rps or spec.target_rps)


def _lost(result: RunResult) -> str:
    gone = sum(result.errors.get(kind, 0) for kind in LOST_TARGET)
    if result.requests and gone > result.requests / 2:
        return f"the target went away: {gone} of {result.requests} requests found nobody"
    return ""
