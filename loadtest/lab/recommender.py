"""Answers what a search asks for: has candidates started, and measures them.

The search decides (loadtest.search, pure), launchers start, the generator measures, `loadtest.lab.driver` asks; here it waits.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psutil

from backends.base import Tensors
from gateway.config import Batching, parse_config
from gateway.process.credentials import NOTHING_SHOWN, Credentials
from loadtest.errors import Interrupted, LoadtestError
from loadtest.lab.answers import compared, spread
from loadtest.lab.finding import finding
from loadtest.lab.generating import AnswersJob, GeneratorLost, LoadJob, ProfileJob
from loadtest.lab.here import Here, Measure
from loadtest.lab.launchers.launcher import Launcher, RunningCandidate, StartFailed, TakenAway, Unaffordable
from loadtest.lab.profiling import ProfileFailed, slowdown
from loadtest.lab.runs_folder import keep, remove_from
from loadtest.lab.up import UpCandidates
from loadtest.load.payloads import distinct, length_of, read_requests
from loadtest.measuring.progress import Progress
from loadtest.measuring.reference import ReferenceKernel
from loadtest.question.candidates import CandidateSetup
from loadtest.question.spec import SearchSpec
from loadtest.results import LoadSpec, RunResult
from loadtest.search.events import (
    CUT_OFF,
    EXPECTED,
    NO_REFERENCE,
    NOT_STARTED,
    UNREACHED,
    Agree,
    Agreed,
    Event,
    Experiment,
    Load,
    Measured,
    Predict,
    Predicted,
    Profile,
    Profiled,
    Question,
    TakenBack,
    cut_off,
)
from loadtest.search.prediction import Lengths, predicted_rps

_GONE_S: Final = 5.0  # after so long in which every request found nobody, nobody will come
_SATURATED_SHARE: Final = 0.95  # of what closed-loop users are answered: open traffic has longer queues
_FAST_RPS: Final = 4000.0  # from here on, what the load generator can offer is looked at
WRAP_UP_S: Final = 10.0  # after the budget's end a run is given up, and what it measured until then is kept
_REMOVAL_S: Final = 60.0  # of a candidate that is paid for, until it costs no more
HARD_END_S: Final = 20.0  # and so much after it whatever still waits
_QUIET_SHARE: Final = 0.1  # of the cores: less other work than that disturbs no profile
_AGAIN_SHARE: Final = 0.2  # of the time that is left: so much a second profile may take
_QUIET_WAIT_S: Final = 20.0  # at most, before what was disturbed is measured again
MOST_TAKEN_BACK: Final = 2  # times that a candidate is started again whose machine its platform took back


def question_of(spec: SearchSpec, *, paid: bool, parallel: int = 1, start_s: float = 0.0) -> Question:
    """What the search needs to know of a spec whose candidates are all priced.

    paid: whether running them costs money. parallel: how many may be up at once. start_s: of one that is paid for.
    Its subject is not told: for that all files are read (`subject_of`).
    """
    strictest = spec.slo.strictest
    assert strictest is not None  # parse_search_spec refuses such an SLO
    return Question(
        entrants=tuple(candidate.entrant for candidate in spec.candidates),
        required=strictest.percentile / 100,
        limit_ms=strictest.limit_ms,
        seconds=spec.budget.minutes * 60,
        target_rps=spec.target_rps,
        max_usd=spec.budget.usd if paid else None,
        min_agreement=spec.min_agreement if spec.agreement_test else None,
        reference=spec.agreement_test.reference if spec.agreement_test else "",
        stand_ins=spec.agreement_test.stand_ins if spec.agreement_test else (),
        parallel=parallel,
        start_s=start_s if paid else 0.0,
        longest_ms=spec.slo.longest_ms or 0.0,
    )


class Lab:
    """Answers the search's experiments by measuring. Life: begin, any number of `answer`, then close.

    Several may be answered at the same time; of their candidates as many are up as the launcher allows.
    measure: `loadtest.measuring.generator.measure`.
    runs: where each run's full result is kept; None: nowhere. on_progress: told about twice a second how a load goes.
    shown: to candidates whose doors are locked, besides by measure.
    """

    def __init__(
        self,
        spec: SearchSpec,
        launcher: Launcher,
        measure: Measure,
        *,
        runs: Path | None = None,
        on_progress: Callable[[Load, Progress], None] | None = None,
        shown: Credentials = NOTHING_SHOWN,
    ) -> None:
        self._spec = spec
        self._candidates = {candidate.name: candidate for candidate in spec.candidates}
        self._launcher = launcher
        self._generating = launcher.generating or Here(measure, shown)
        self._taken_back: Counter[str] = Counter()
        self._runs = runs
        self._on_progress = on_progress
        self._kernel = ReferenceKernel()
        self._profiles: dict[str, Profiled] = {}
        self._slowdown: dict[str, float] = {}
        self._results: dict[str, RunResult] = {}  # of runs that have ended, until they are kept
        self._answers: dict[str, list[Tensors | None]] = {}  # of the reference, by its name
        self._up = UpCandidates(launcher)
        self._earlier_usd = 0.0
        self._count = 0
        self._disturbed = False
        self._sizes: tuple[int, ...] = ()  # lengths of the payload's requests, once they were needed

    def __repr__(self) -> str:
        return f"<Lab with {self._up!r}, {self._count} runs so far>"

    def begin(self, earlier: Sequence[Event], *, spent_usd: float) -> None:
        """earlier: events of the search that goes on. spent_usd: by it, of the same money. Raises: OSError."""
        for event in earlier:
            self.remember(event)
        self._count = sum(isinstance(event, Measured) and not cut_off(event) for event in earlier)
        if self._runs is not None:
            remove_from(self._runs, self._count)
        self._earlier_usd = spent_usd
        self._up = UpCandidates(self._launcher, spent_usd=spent_usd)

    @property
    def paid(self) -> bool:
        """Whether running candidates costs money."""
        return self._launcher.paid

    @property
    def paid_usd(self) -> float:
        """What they have cost since it began, those included that are up."""
        return self._launcher.purse.usd

    def remember(self, event: Event) -> None:
        """Take note of an event: predictions need profiles, and what was disturbed is measured again when it is quiet."""
        if isinstance(event, TakenBack):
            self._taken_back[event.entrant] += 1
        elif isinstance(event, Profiled) and not event.failure:
            self._profiles[event.group] = event.beside(self._profiles.get(event.group))
        elif isinstance(event, Measured):
            self._disturbed = not event.valid
            if event.valid and not event.failure:
                self._slowdown[event.entrant] = event.slowdown

    async def answer(self, experiment: Experiment, *, left_s: float = math.inf) -> Event:
        """left_s: of the budget; soon after it everything ends, whatever it waits for."""
        began_s = time.monotonic()
        candidate = self._candidates[experiment.entrant]
        self._results.pop(experiment.entrant, None)  # of one that came to nothing after all
        if isinstance(experiment, Predict):
            rps, why = await asyncio.to_thread(self._predict, candidate)
            ceiling_rps = await self._generating.limit_rps(self._spec.payload.protocol) if rps > _FAST_RPS else None
            rps = min(rps, ceiling_rps or math.inf)
            disturbed = not rps and self._profiles[candidate.group].disturbed
            return Predicted(experiment.entrant, rps, time.monotonic() - began_s, why, ceiling_rps, disturbed)
        try:
            end_s = min(left_s + HARD_END_S, self._payable_s())
            async with asyncio.timeout(end_s if math.isfinite(end_s) else None):
                if self._disturbed:
                    await self._quiet(min(_QUIET_WAIT_S, left_s / 10))
                if isinstance(experiment, Agree):
                    event: Event = await self._agree(experiment, candidate)
                else:
                    event = await self._answer(experiment, candidate, left_s - (time.monotonic() - began_s))
        except (StartFailed, TakenAway, TimeoutError) as exc:
            event = self._failed(experiment, exc)
        event = replace(event, seconds=time.monotonic() - began_s)
        if isinstance(event, Profiled | Measured) and event.failure.startswith(CUT_OFF) and candidate not in self._up:
            event = replace(event, start_s=event.seconds)
        self.remember(event)
        return event

    def keep(self, event: Event) -> None:
        """Keep a run's full result, behind those of the runs before it, once the journal has the event. Raises: OSError."""
        if not isinstance(event, Measured) or cut_off(event):  # that is no run of the report either
            return
        number, self._count = self._count, self._count + 1  # as runs end: several may be under way
        if (result := self._results.pop(event.entrant, None)) is not None and self._runs is not None:
            keep(self._runs, number, result)

    def _failed(self, experiment: Agree | Profile | Load, exc: Exception) -> Event:
        """What to say of an experiment that came to no end. Whose machine was taken back may be started again, and whom the
        budget's end cut off when there is more of it.
        """
        times = self._taken_back[experiment.entrant]
        if isinstance(exc, TakenAway) and times < MOST_TAKEN_BACK:
            return TakenBack(experiment.entrant, str(exc))
        if isinstance(exc, TakenAway):
            failure = f"{exc}; so it was {times} times before"
        elif isinstance(exc, StartFailed):
            failure = f"{NOT_STARTED}: {exc}" + f": {UNREACHED}" * isinstance(exc, Unaffordable)
        else:
            failure = f"{CUT_OFF} {'money' if self._payable_s() <= 0 else 'time'} ended: {UNREACHED}"
        if isinstance(experiment, Agree):
            return Agreed(experiment.entrant, failure=failure, reference=experiment.reference)
        if isinstance(experiment, Profile):
            return Profiled(experiment.group, failure=failure, entrant=experiment.entrant)
        return Measured(experiment.entrant, experiment.purpose, experiment.rps, "fail", (), 0.0, failure=failure)

    def _payable_s(self) -> float:
        """For so long the rest of the money pays for all that may be up, and for its removal."""
        if not self.paid:
            return math.inf
        prices = sorted((candidate.usd_per_hour for candidate in self._candidates.values()), reverse=True)
        dearest = sum(prices[: self._launcher.parallel]) + self._launcher.beside_usd_per_hour
        purse = self._launcher.purse
        if purse.max_usd is None:
            return math.inf
        return max(0.0, (purse.max_usd - self._earlier_usd - purse.usd) / dearest * 3600 - _REMOVAL_S)

    async def _answer(self, experiment: Profile | Load, candidate: CandidateSetup, left_s: float) -> Profiled | Measured:
        start_s = time.monotonic()
        async with self._up.held(candidate) as running:
            start_s = time.monotonic() - start_s
            before_ms = await self._reference_ms(candidate)
            if isinstance(experiment, Profile):
                event: Profiled | Measured = await self._profile(experiment, candidate, running, left_s - start_s)
            else:
                event = await self._load(experiment, candidate, running, left_s - start_s)
            after_ms = await self._reference_ms(candidate)
            await running.look()
            if not event.failure and (died := running.failure()):
                event = replace(event, failure=died)
        return replace(event, start_s=start_s, reference_ms=(before_ms + after_ms) / 2)

    async def _reference_ms(self, candidate: CandidateSetup) -> float:
        """What the reference kernel takes on the candidate's cores; 0 of those that are paid for, as they are elsewhere."""
        return 0.0 if self.paid else await self._kernel.time_ms(candidate.cpus)

    async def _quiet(self, most_s: float) -> None:
        """Wait until other work leaves the machine alone, at most so long. What runs of ours is idle."""
        until_s = time.monotonic() + most_s
        psutil.cpu_percent()
        while time.monotonic() < until_s:
            await asyncio.sleep(min(1.0, most_s))
            if psutil.cpu_percent() < 100 * _QUIET_SHARE:
                return

    async def close(self) -> None:
        """Stop everything."""
        try:
            await self._kernel.close()
        finally:
            try:
                await self._up.close()
            finally:
                await self._launcher.close()

    def _predict(self, candidate: CandidateSetup) -> tuple[float, str]:
        """The rate, and why it is 0."""
        profiled = self._profiles[candidate.group]
        slower, batching = self._slowdown.get(candidate.name, 1.0), batching_of(candidate)
        rps = predicted_rps(
            tuple(replace(timing, ms=timing.ms * slower) for timing in profiled.timings),
            overhead_ms=profiled.overhead_ms,
            slo=self._spec.slo,
            batching=batching,
            sessions=candidate.sessions,
            max_rows=candidate.max_rows,
            rows_per_request=self._spec.payload.rows,
            lengths=self._lengths_of(candidate),
            seed=self._spec.seed,
        )
        rps = min(rps, _SATURATED_SHARE * (profiled.saturated_rps or math.inf))
        delay_ms = batching.max_delay_ms if batching.policy == "fixed" else 0.0
        alone_ms = profiled.timings[0].ms + profiled.overhead_ms + delay_ms
        if not rps and profiled.disturbed:
            return rps, "could not be measured: other work on the machine disturbed its profile"
        return rps, "" if rps else f"one request alone takes {alone_ms:.3g} ms, and {self._spec.slo} is asked"

    def _lengths_of(self, candidate: CandidateSetup) -> Lengths | None:
        model = parse_config(candidate.document, source=candidate.name).models[0] if candidate.document else None
        ragged = model.ragged.on(model.backends[0]) if model is not None and model.ragged is not None else None
        if ragged is None or not ragged.pad or not self._spec.payload.files:
            return None  # made-up requests of one run may differ in length, but not in what is known of them here
        if not self._sizes:
            self._sizes = tuple(length_of(request, ragged.pad) for request in read_requests(self._spec.payload.files))
        return Lengths(ragged, self._sizes)

    async def _agree(self, experiment: Agree, candidate: CandidateSetup) -> Agreed:
        """The reference is asked twice: it must agree with itself. Its answers are kept for the others."""
        test = self._spec.agreement_test
        assert test is not None  # else question_of asks for no agreement
        requests = spread(distinct(await asyncio.to_thread(read_requests, test.files)))
        failure = ""
        if experiment.reference == EXPECTED:
            self._answers[EXPECTED] = [request.expected for request in requests]
        elif experiment.reference not in self._answers:
            # It is the candidate itself, but where an interrupted search goes on.
            failure, answers = await self._ask(self._candidates[experiment.reference], test.files, experiment.seconds)
            if failure and experiment.entrant != experiment.reference:
                failure = f"{NO_REFERENCE} {failure}"
            self._answers |= {} if failure else {experiment.reference: answers}
        if not failure:
            failure, theirs = await self._ask(candidate, test.files, experiment.seconds)
        if failure:
            event = Agreed(experiment.entrant, failure=failure, reference=experiment.reference)
            return replace(event, short_s=experiment.seconds if cut_off(event) else 0.0)
        ours = self._answers[experiment.reference]
        if experiment.reference == EXPECTED:  # whoever wrote them down need not have done so for every output
            theirs = [
                answer and {name: array for name, array in answer.items() if name in (wanted or ())}
                for answer, wanted in zip(theirs, ours, strict=True)
            ]
        found = await asyncio.to_thread(compared, requests, ours, theirs, statistics=test.statistics, batched=test.batched)
        event = Agreed(experiment.entrant, found.agreement, found.inputs, found.statistic, failure=found.failure)
        return replace(event, reference=experiment.reference, short_s=experiment.seconds if cut_off(event) else 0.0)

    async def _ask(self, candidate: CandidateSetup, files: tuple[str, ...], seconds: float) -> tuple[str, list[Tensors | None]]:
        """Why a candidate cannot be asked, else "" and its answers. Raises: TakenAway, GeneratorLost."""
        running: RunningCandidate | None = None
        try:
            # What is paid for is not started twice.
            async with self._up.held(candidate if self.paid else _unhurried(candidate)) as running:
                try:
                    return "", await self._generating.answers(AnswersJob(self._run_spec(running), files, seconds))
                finally:
                    await running.look()
        except (TakenAway, Unaffordable, GeneratorLost):
            raise
        except StartFailed as exc:
            return f"{NOT_STARTED}: {exc}", []
        except LoadtestError as exc:
            return (running.failure() if running else "") or str(exc), []

    async def _profile(
        self, experiment: Profile, candidate: CandidateSetup, running: RunningCandidate, left_s: float
    ) -> Profiled:
        """What other work disturbed is profiled once more, when it is quiet, if there is time."""
        began_s = time.monotonic()
        found, disturbed = await self._profile_once(experiment, running)
        took_s = time.monotonic() - began_s
        if disturbed and took_s < _AGAIN_SHARE * left_s:
            await self._quiet(min(_QUIET_WAIT_S, left_s / 10))
            found, disturbed = await self._profile_once(experiment, running)
        return replace(found, disturbed=disturbed, entrant=experiment.entrant)

    async def _profile_once(self, experiment: Profile, running: RunningCandidate) -> tuple[Profiled, bool]:
        lengths = self._lengths_of(candidate := self._candidates[experiment.entrant])
        job = ProfileJob(
            self._run_spec(running),
            rows=experiment.rows,
            sessions=experiment.sessions,
            seconds=experiment.seconds,
            limit_ms=self._spec.slo.strictest.limit_ms if self._spec.slo.strictest else 0.0,
            lengths=f"{min(lengths.typical)}-{max(lengths.typical)}" if lengths is not None else "",
            statistics=_statistics(running),
            simulated=bool(candidate.document),
            meter=not self.paid,  # work on this machine disturbs no candidate that is elsewhere
        )
        try:
            told = await self._generating.profile(job)
        except GeneratorLost:
            raise
        except (ProfileFailed, LoadtestError) as exc:
            return Profiled(experiment.group, failure=running.failure() or f"no profile: {exc}"), False
        found, disturbed = told.findings, (told.others or 0.0) > _QUIET_SHARE
        return Profiled(experiment.group, found.timings, found.overhead_ms, saturated_rps=found.saturated_rps), disturbed

    async def _load(self, experiment: Load, candidate: CandidateSetup, running: RunningCandidate, left_s: float) -> Measured:
        began_at = datetime.now(UTC).isoformat(timespec="seconds")
        running.usage()
        wanted = replace(
            self._run_spec(running), rate_rps=experiment.rps, duration_s=experiment.seconds, label=experiment.entrant
        )
        stop = asyncio.Event()
        alarm = asyncio.get_running_loop().call_later(left_s + WRAP_UP_S, stop.set) if math.isfinite(left_s) else None
        gone = ""

        def look(progress: Progress) -> None:
            nonlocal gone
            if self._on_progress is not None:
                self._on_progress(experiment, progress)
            if progress.gone_s >= _GONE_S:
                gone = f"the target went away: for {progress.gone_s:.0f} s every request found nobody"
            if gone or running.failure():
                stop.set()

        job = LoadJob(
            wanted, _statistics(running), until_decided=experiment.until_decided, or_lost=experiment.purpose == "peak"
        )
        try:
            loaded = await self._generating.load(job, stop=stop, on_progress=look)
        except GeneratorLost:
            raise
        except LoadtestError as exc:
            if isinstance(exc, Interrupted) and not running.failure():
                raise TimeoutError from exc  # as nothing was sent before the budget's end
            failure = running.failure() or str(exc)
            return Measured(experiment.entrant, experiment.purpose, experiment.rps, "fail", (), 0.0, failure=failure)
        finally:
            if alarm is not None:
                alarm.cancel()
        result, batches = loaded.result, loaded.batches
        self._results[experiment.entrant] = result
        slower = 1.0
        if self._lengths_of(candidate) is None:  # else the server does not tell how long its batches were
            timings = self._profiles.get(candidate.group, Profiled(candidate.group)).timings
            slower = slowdown(timings, batches, candidate.sessions, result.warmup_s + result.window_s)
        return finding(
            experiment,
            wanted,
            result,
            usage=running.usage(),
            failure=running.failure() or gone,
            batch_rows={rows: count for rows, (count, _) in batches.by_rows.items()},
            slowdown=slower,
            endpoint=running.name,
            began_at=began_at,
        )

    def _run_spec(self, running: RunningCandidate) -> LoadSpec:
        payload = self._spec.payload
        target = running.invocations or (running.grpc if payload.protocol == "grpc" else running.rest)
        return LoadSpec(
            target=target,
            protocol="invocations" if running.invocations else payload.protocol,
            sigv4=running.sigv4,
            model=self._spec.model,
            seed=self._spec.seed,
            slo=self._spec.slo,
            timeout_s=max(1.0, 20 * (self._spec.slo.longest_ms or 0.0) / 1e3),
            rows=str(payload.rows),
            length=payload.length,
            payloads=payload.files,
            values=payload.values,
            pad=self._spec.pad,
        )


def _statistics(running: RunningCandidate) -> str:
    """Where it keeps them; "" if it is asked for nothing but invocations."""
    return "" if running.invocations else running.rest


def _unhurried(candidate: CandidateSetup) -> CandidateSetup:
    """The same without an SLO, for which its gateway would refuse what would be late, as on a busy machine much would be."""
    if not candidate.document:
        return candidate
    models = [{key: value for key, value in model.items() if key != "slo"} for model in candidate.document["models"]]
    return replace(candidate, name=f"{candidate.name}, without SLO", document={**candidate.document, "models": models})


def batching_of(candidate: CandidateSetup) -> Batching:
    """How the candidate batches; of a server that is not ours, the gateway's default is assumed."""
    if not candidate.document:
        return Batching()
    return parse_config(candidate.document, source=candidate.name).models[0].batching
