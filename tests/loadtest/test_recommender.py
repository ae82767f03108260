import asyncio
import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtest.errors import Interrupted, TargetError
from loadtest.lab.driver import SearchStep, run_search
from loadtest.lab.journal import FINISHED, Journal
from loadtest.lab.launchers.launcher import StartFailed, TakenAway, Unaffordable, Unpaid, Usage
from loadtest.lab.recommender import HARD_END_S, WRAP_UP_S, Lab, question_of
from loadtest.measuring.progress import Progress
from loadtest.prices.catalogue import Catalogue, load_catalogue
from loadtest.question.candidates import CandidateSetup
from loadtest.question.preflight import Refusals
from loadtest.question.spec import SearchSpec
from loadtest.results import LoadSpec, RunResult, read_run
from loadtest.search.budget import decisive_seconds
from loadtest.search.events import CUT_OFF, UNREACHED, Load, Measured, Predict, Profile, Profiled, Timing, cut_off
from loadtest.search.knowledge import Knowledge
from loadtest.verdict.decision import JudgedRequests, judge
from tests.file_limit import no_file_longer_than
from tests.loadtest.examples import example_spec
from tests.loadtest.made_results import run_result

PEAK_RPS = 150.0
RATED = {"c7i.large synthetic (sessions 1)": 1.0, "c7i.large synthetic (sessions 2)": 1.6}


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


@pytest.fixture
def spec(catalogue: Catalogue) -> SearchSpec:
    candidate = {"instances": ["c7i.large"], "backend": {"kind": "synthetic"}, "settings": {"sessions": [1, 2]}}
    return example_spec(catalogue, candidates=[candidate], launcher={"kind": "local", "stands_for": {"c7i.large": [0]}})


class FakeRunning:
    rest = "http://127.0.0.1:9"  # nobody listens: no statistics
    grpc = "127.0.0.1:9"
    invocations = sigv4 = ""

    def __init__(self, launcher: "FakeLauncher", name: str) -> None:
        self._launcher = launcher
        self.name = name

    def failure(self) -> str:
        return self._launcher.died.get(self.name, "")

    async def look(self) -> None:
        if self._launcher.taken_back.pop(self.name, False):
            self._launcher.died[self.name] = "taken back"
            raise TakenAway("taken back")

    def usage(self) -> Usage:
        return Usage(80.0, 10.0)

    async def stop(self) -> None:
        self._launcher.running.discard(self.name)


class FakeLauncher(Unpaid):
    start_s = 0.0

    def __init__(self) -> None:
        self.left_behind: list[str] = []
        self.taken_back: dict[str, bool] = {}
        self.closed = False
        self.running: set[str] = set()
        self.started: list[str] = []
        self.broken: set[str] = set()
        self.died: dict[str, str] = {}

    def preflight(self, candidates: Sequence[CandidateSetup]) -> Refusals:
        return {}

    async def close(self) -> None:
        self.closed = True

    async def start(self, candidate: CandidateSetup) -> FakeRunning:
        if candidate.name in self.broken:
            raise StartFailed("ended with code 1 before it was ready: no such model")
        assert not self.running, "one candidate at a time"
        if self.died.get(candidate.name) == "taken back":
            del self.died[candidate.name]
        self.running.add(candidate.name)
        self.started.append(candidate.name)
        return FakeRunning(self, candidate.name)

    @property
    def now(self) -> str:
        (name,) = self.running
        return name


class FakeMeasure:
    """A model that takes 4 + rows ms; the SLO holds up to a peak per candidate."""

    def __init__(self, launcher: FakeLauncher, *, raises: Exception | None = None) -> None:
        self._launcher = launcher
        self._raises = raises
        self.specs: list[LoadSpec] = []
        self.may_give_up: list[bool] = []

    async def __call__(self, spec: LoadSpec, *, until_decided: bool = False, or_lost: bool = False, **how: Any) -> RunResult:
        self.specs.append(spec)
        self.may_give_up.append(or_lost)
        if spec.pattern.startswith("users"):
            return run_result(spec, succeeded=round(1000 * spec.duration_s), service_ms=4 + int(spec.rows))
        if self._raises:
            raise self._raises
        good = spec.rate_rps <= PEAK_RPS * RATED[self._launcher.now]
        requests = round(spec.rate_rps * 20)
        return run_result(
            spec,
            succeeded=requests,
            service_ms=30 if good else 80,
            verdict="pass" if good else "fail",
            met_share=1.0 if good else 0.5,
        )


def searched(spec: SearchSpec, launcher: FakeLauncher, measure: Any, folder: Path, on_step: Any = lambda step: None) -> Any:
    question = question_of(spec, paid=False)
    journal = Journal(folder / "journal.jsonl", question)
    try:
        lab = Lab(spec, launcher, measure, runs=folder / "runs")
        return asyncio.run(run_search(question, lab, journal, on_step=on_step))
    finally:
        journal.close()


@pytest.mark.slow
def test_a_whole_search_measures_predicts_and_finds_the_better(spec: SearchSpec, tmp_path: Path) -> None:
    launcher = FakeLauncher()
    steps: list[SearchStep] = []
    outcome = searched(spec, launcher, FakeMeasure(launcher), tmp_path, steps.append)
    assert outcome.winner == "c7i.large synthetic (sessions 2)"
    assert launcher.running == set()
    assert launcher.started[0] == "c7i.large synthetic (sessions 2)"  # the widest is profiled, for both
    standing = outcome.standings[1]
    assert [profiled.entrant for profiled in outcome.profiles.values()] == [standing.entrant.name]
    assert 0.9 * 1.6 * PEAK_RPS <= standing.peak_rps <= 1.6 * PEAK_RPS
    assert len(list((tmp_path / "runs").glob("*.json"))) == sum(len(s.runs) for s in outcome.standings)
    # Every step says what was spent so far.
    assert (steps[0].seconds, steps[0].usd) == (0.0, 0.0)
    assert (steps[-1].seconds, steps[-1].usd) == pytest.approx((outcome.seconds, outcome.usd))


@pytest.mark.slow
def test_an_interrupted_search_measures_only_what_is_missing_though_its_folder_takes_no_more_files(
    spec: SearchSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = FakeLauncher()
    measure = FakeMeasure(launcher)

    class Interrupted(Exception):
        pass

    def interrupt(step: SearchStep) -> None:
        if isinstance(step.event, Measured):
            raise Interrupted

    with pytest.raises(Interrupted):
        searched(spec, launcher, measure, tmp_path, interrupt)
    assert launcher.running == set()  # stopped all the same
    before = len(measure.specs)
    shutil.rmtree(tmp_path / "runs")
    (tmp_path / "runs").touch()  # as if there were no room
    monkeypatch.setattr(Journal, "finish", lambda journal: journal._write(FINISHED * 10_000))
    with no_file_longer_than(100_000):
        outcome = searched(spec, launcher, measure, tmp_path)
    runs = outcome.standings[0].runs + outcome.standings[1].runs
    assert len(runs) > 1
    assert outcome.notes[-2:] == (
        (f"{len(runs) - 1} runs could not be kept in `runs/`: File exists",),
        (f"{tmp_path / 'journal.jsonl'}: cannot be written: File too large",),
    )
    assert not any(later.pattern.startswith("users") for later in measure.specs[before:])


def answer(lab: Lab, experiment: Any) -> Any:
    async def main() -> Any:
        try:
            event = await lab.answer(experiment)
            lab.keep(event)
            return event
        finally:
            await lab.close()

    return asyncio.run(main())


def test_a_run_without_a_result_leaves_none_of_an_earlier_search(spec: SearchSpec, tmp_path: Path) -> None:
    launcher, kept = FakeLauncher(), tmp_path / "runs" / "000.json"
    one, two = (candidate.name for candidate in spec.candidates)
    answer(Lab(spec, launcher, FakeMeasure(launcher), runs=kept.parent), Load(one, 100.0, 4.0, "peak"))
    assert read_run(kept).spec.label == one
    for name in ("001.json", "7.json", "mine.json"):
        shutil.copy(kept, kept.with_name(name))
    lab = Lab(spec, launcher, FakeMeasure(launcher), runs=kept.parent)
    lab.begin([Measured(one, "peak", 100.0, "pass", ((200, 200),), 9.0)], spent_usd=0.0)
    assert {path.name for path in kept.parent.iterdir()} == {"000.json", "7.json", "mine.json"}
    lab.begin([], spent_usd=0.0)
    launcher.broken.add(two)
    answer(lab, Load(two, 100.0, 4.0, "peak"))
    assert {path.name for path in kept.parent.iterdir()} == {"7.json", "mine.json"}


def test_the_number_of_a_run_is_its_place_among_those_of_the_report(spec: SearchSpec, tmp_path: Path) -> None:
    launcher, name = FakeLauncher(), spec.candidates[0].name
    lab = Lab(spec, launcher, FakeMeasure(launcher), runs=tmp_path)
    cut = Measured(name, "peak", 100.0, "fail", (), 9.0, failure=f"{CUT_OFF} time ended: {UNREACHED}")
    lab.begin([Measured(name, "peak", 90.0, "pass", ((200, 200),), 9.0), cut], spent_usd=0.0)
    lab.keep(cut)
    answer(lab, Load(name, 100.0, 4.0, "peak"))
    assert [path.name for path in tmp_path.iterdir()] == ["001.json"]


def test_what_does_not_start_is_an_event_and_no_exception(spec: SearchSpec) -> None:
    launcher = FakeLauncher()
    name = spec.candidates[0].name
    launcher.broken.add(name)
    lab = Lab(spec, launcher, FakeMeasure(launcher))
    profiled = answer(lab, Profile(name, "g", (1,), 1, 1.0))
    measured = answer(lab, Load(name, 10, 5, "peak"))
    assert isinstance(profiled, Profiled)
    assert profiled.failure == measured.failure == "did not start: ended with code 1 before it was ready: no such model"
    assert profiled.entrant == name
    # Nor is the profile lost that another of the group has.
    group = spec.candidates[0].group
    for event in (Profiled(group, (Timing(1, 1, 400.0),)), dataclasses.replace(profiled, group=group)):
        lab.remember(event)
    assert answer(lab, Predict(name)).why.startswith("one request alone takes 400 ms")
    candidate = spec.candidates[0]
    model = candidate.document["models"][0] | {"batching": {"policy": "fixed", "max_delay_ms": 90}}
    waiting = dataclasses.replace(candidate, document={"models": [model]})
    lab = Lab(dataclasses.replace(spec, candidates=(waiting,)), launcher, FakeMeasure(launcher))
    lab.remember(Profiled(group, (Timing(1, 1, 400.0),)))
    assert answer(lab, Predict(name)).why.startswith("one request alone takes 490 ms")


def test_what_dies_in_mid_run_is_out_with_its_last_words(spec: SearchSpec) -> None:
    launcher = FakeLauncher()
    name = spec.candidates[0].name
    launcher.died[name] = "ended with code -9 while it was measured"
    measured = answer(Lab(spec, launcher, FakeMeasure(launcher, raises=TargetError("no metadata"))), Load(name, 10, 5, "peak"))
    assert measured.failure == "ended with code -9 while it was measured"


@pytest.mark.parametrize(("purpose", "given_up"), [("peak", True), ("round", False), ("recovery", False)])
def test_only_a_trial_is_given_up_once_it_cannot_pass(spec: SearchSpec, purpose: Any, given_up: bool) -> None:
    launcher = FakeLauncher()
    measure = FakeMeasure(launcher)
    answer(Lab(spec, launcher, measure), Load(spec.candidates[0].name, 10, 5, purpose))
    assert measure.may_give_up == [given_up]


def answer_late(lab: Lab, experiment: Any, late_s: float) -> Any:
    """Asked so long after the end of the budget."""

    async def main() -> Any:
        try:
            return await lab.answer(experiment, left_s=-late_s)
        finally:
            await lab.close()

    return asyncio.run(main())


def test_soon_after_the_budget_a_run_is_stopped_and_what_it_measured_is_kept(spec: SearchSpec) -> None:
    async def measure(wanted: LoadSpec, *, stop: asyncio.Event, **how: Any) -> RunResult:
        await stop.wait()
        return run_result(wanted, succeeded=100, verdict="undecided")

    measured = answer_late(Lab(spec, FakeLauncher(), measure), Load(spec.candidates[0].name, 10, 500, "peak"), WRAP_UP_S)
    assert (measured.failure, measured.requests) == ("", 100)


@pytest.mark.parametrize("experiment", [Load, Profile])
def test_what_never_answers_ends_with_the_budget_all_the_same(spec: SearchSpec, experiment: type) -> None:
    async def measure(wanted: LoadSpec, **how: Any) -> RunResult:
        await asyncio.Event().wait()
        raise AssertionError

    name = spec.candidates[0].name
    asked = Load(name, 10, 500, "peak") if experiment is Load else Profile(name, "g", (1,), 1, 1.0)
    measured = answer_late(Lab(spec, FakeLauncher(), measure), asked, HARD_END_S - 0.2)
    assert measured.failure == f"did not answer before the time ended: {UNREACHED}"
    assert measured.start_s == 0  # it was up


def test_a_load_that_the_budgets_end_stops_before_anything_was_sent_is_no_failure_of_the_candidate(spec: SearchSpec) -> None:
    async def measure(wanted: LoadSpec, *, stop: asyncio.Event, **how: Any) -> RunResult:
        await stop.wait()
        raise Interrupted("ended before anything was sent")

    measured = answer_late(Lab(spec, FakeLauncher(), measure), Load(spec.candidates[0].name, 10, 500, "peak"), WRAP_UP_S)
    assert measured.failure == f"did not answer before the time ended: {UNREACHED}"


@pytest.mark.parametrize("experiment", [Load, Profile])
def test_a_start_that_the_budgets_end_cut_off_took_so_long_at_least(spec: SearchSpec, experiment: type) -> None:
    class NeverUp(FakeLauncher):
        async def start(self, candidate: CandidateSetup) -> FakeRunning:
            await asyncio.Event().wait()
            raise AssertionError

    launcher, name = NeverUp(), spec.candidates[0].name
    asked = Load(name, 10, 500, "peak") if experiment is Load else Profile(name, "g", (1,), 1, 1.0)
    measured = answer_late(Lab(spec, launcher, FakeMeasure(launcher)), asked, HARD_END_S - 0.2)
    assert measured.failure == f"did not answer before the time ended: {UNREACHED}"
    assert measured.start_s == measured.seconds >= 0.2


def test_a_start_that_the_rest_of_the_money_does_not_pay_for_is_no_failure_of_the_candidate(spec: SearchSpec) -> None:
    class Dear(FakeLauncher):
        async def start(self, candidate: CandidateSetup) -> FakeRunning:
            raise Unaffordable("its start could exceed --max-usd: $0.100 is left, at $5.00/h")

    launcher, name = Dear(), spec.candidates[0].name
    for asked in (Profile(name, "g", (1,), 1, 1.0), Load(name, 10, 5, "peak")):
        event = answer(Lab(spec, launcher, FakeMeasure(launcher)), asked)
        assert event.failure.startswith("did not start: its start could exceed --max-usd: ")
        assert cut_off(event)


def test_a_target_that_nobody_answers_at_is_lost(spec: SearchSpec) -> None:
    launcher = FakeLauncher()

    async def measure(wanted: LoadSpec, **how: Any) -> RunResult:
        return run_result(wanted, succeeded=10, errors={"refused": 90}, verdict="fail")

    measured = answer(Lab(spec, launcher, measure), Load(spec.candidates[0].name, 10, 5, "peak"))
    assert measured.failure == "the target went away: 90 of 100 requests found nobody"
    assert measured.errors == {"refused": 90}


@pytest.mark.parametrize(
    ("seconds", "blocks", "purpose", "verdict"),
    [
        (10, 20, "peak", "pass"),  # at 1000/s ten limits of 50 ms are longer than 200 requests: 20 of 0.5 s
        (9.9, 20, "peak", "undecided"),
        (10, 19, "peak", "undecided"),
        (9.9, 20, "recovery", "pass"),
    ],
)
def test_only_a_run_of_enough_blocks_that_are_long_enough_proves_its_rate(
    spec: SearchSpec, seconds: float, blocks: int, purpose: Any, verdict: str
) -> None:
    async def measure(wanted: LoadSpec, **how: Any) -> RunResult:
        return run_result(wanted, succeeded=1000, verdict="pass", blocks=blocks)

    measured = answer(Lab(spec, FakeLauncher(), measure), Load(spec.candidates[0].name, 1000, seconds, purpose))
    assert measured.verdict == verdict


@pytest.mark.parametrize("tells", [True, False])
def test_a_target_that_dies_is_loaded_no_longer(spec: SearchSpec, tells: bool) -> None:
    name, launcher = spec.candidates[0].name, FakeLauncher()
    looks: list[int] = []

    async def measure(
        wanted: LoadSpec, *, stop: asyncio.Event, on_progress: Callable[[Progress], None], **how: Any
    ) -> RunResult:
        for second in range(1, 60):
            if second == 10 and tells:
                launcher.died[name] = "ended with code -9"
            looks.append(second)
            on_progress(Progress(second, 10, 10, 0, 10.0, 4.0, 9.0, 0.0 if tells else max(0.0, second - 10)))
            if stop.is_set():
                break
        return run_result(wanted, succeeded=100, errors={"refused": 50}, verdict="fail")

    measured = answer(Lab(spec, launcher, measure), Load(name, 10, 60, "peak"))
    told = "ended with code -9" if tells else "the target went away: for 5 s every request found nobody"
    assert (looks[-1], measured.failure) == (10 if tells else 15, told)


def test_an_invalid_run_says_why(spec: SearchSpec) -> None:
    async def measure(wanted: LoadSpec, **how: Any) -> RunResult:
        return run_result(wanted, succeeded=100, valid=False)

    measured = answer(Lab(spec, FakeLauncher(), measure), Load(spec.candidates[0].name, 10, 5, "peak"))
    assert not measured.valid
    assert measured.notes == ("send lag p99 9 ms is above 0.5 ms",)


def test_a_display_is_told_what_runs_and_how_it_goes(spec: SearchSpec) -> None:
    looked = Progress(1.0, 10, 10, 0, 10.0, 4.0, 9.0)

    async def measure(wanted: LoadSpec, *, on_progress: Callable[[Progress], None], **how: Any) -> RunResult:
        on_progress(looked)
        return run_result(wanted, succeeded=100, verdict="pass")

    told: list[tuple[Load, Progress]] = []
    load = Load(spec.candidates[0].name, 10, 5, "peak")
    answer(Lab(spec, FakeLauncher(), measure, on_progress=lambda load, progress: told.append((load, progress))), load)
    assert told == [(load, looked)]


def test_the_payload_of_the_spec_is_what_is_sent(catalogue: Catalogue) -> None:
    payload = {"protocol": "grpc", "rows": 3, "length": "32", "values": ["x=0:9"]}
    spec = example_spec(catalogue, payload=payload)
    launcher = FakeLauncher()
    measure = FakeMeasure(launcher)
    answer(Lab(spec, launcher, measure), Load("c7i.large synthetic (sessions 1)", 10, 5, "peak"))
    (sent,) = measure.specs
    assert (sent.target, sent.protocol, sent.rows, sent.length, sent.values) == ("127.0.0.1:9", "grpc", "3", "32", ("x=0:9",))
    assert (sent.rate_rps, sent.duration_s, sent.slo) == (10, 5, spec.slo)


def test_money_is_limited_only_where_it_is_spent(spec: SearchSpec) -> None:
    spending = dataclasses.replace(spec, budget=spec.budget.model_copy(update={"usd": 2.0}))
    assert question_of(spending, paid=True).max_usd == 2.0
    assert question_of(spending, paid=False).max_usd is None


def test_of_several_objectives_the_strictest_tells_the_limit_and_the_longest_how_long_runs_take(catalogue: Catalogue) -> None:
    asked = question_of(example_spec(catalogue, slo="p50<20ms,p99<200ms,service.p90<500ms"), paid=False)
    assert (asked.required, asked.limit_ms, asked.longest_ms) == (0.99, 200, 500)
    assert Knowledge(asked, ()).decisive_seconds(1e6) == decisive_seconds(500, 1e6)


def test_a_request_is_waited_for_as_long_as_the_longest_limit_allows(catalogue: Catalogue) -> None:
    launcher = FakeLauncher()
    spec = example_spec(catalogue, slo="p50<20ms,p99<2s")
    measure = FakeMeasure(launcher)
    answer(Lab(spec, launcher, measure), Load(spec.candidates[0].name, 10, 5, "peak"))
    assert measure.specs[0].timeout_s == 40


@pytest.mark.parametrize(("slo", "overrun"), [("p99<50ms,errors<0.1%", pytest.approx(6.0)), ("p99<50ms", None)])
def test_a_run_tells_how_far_its_worst_objective_was_missed(catalogue: Catalogue, slo: str, overrun: Any) -> None:
    launcher = FakeLauncher()
    spec = example_spec(catalogue, slo=slo)

    class Failing(FakeMeasure):
        async def __call__(self, spec: LoadSpec, **how: Any) -> RunResult:
            index = np.arange(5000)
            requests = JudgedRequests(np.ones(5000), np.ones(5000), index % 500 < 3, index // 250)
            assert spec.slo is not None
            return dataclasses.replace(await super().__call__(spec, **how), objectives=judge(spec.slo, requests))

    measured = answer(Lab(spec, launcher, Failing(launcher)), Load(spec.candidates[0].name, 10, 5, "peak"))
    assert measured.overrun == overrun
