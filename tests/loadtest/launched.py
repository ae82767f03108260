"""One `recommend` over candidates that are paid for, without its command line: the real launcher, lab, search and journal; what
they would measure is made up.
"""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from loadtest.lab import recommender
from loadtest.lab.driver import SearchStep, run_search
from loadtest.lab.journal import FINISHED, Journal
from loadtest.lab.launchers.aws.endpoints import TAG_CANDIDATE
from loadtest.lab.launchers.launcher import Launcher
from loadtest.lab.recommender import Lab, question_of
from loadtest.question.spec import SearchSpec
from loadtest.results import LoadSpec, RunResult
from loadtest.search.events import Spent
from loadtest.search.prediction import predicted_rps
from loadtest.search.standing import SearchOutcome
from tests.loadtest.fake_aws import FakeAws
from tests.loadtest.made_results import run_result

PEAK_RPS: Final = 150.0
# By what was asked: the simulation is seeded, and tests ask the same again and again.
_predicted: Final[dict[str, float]] = {}


def _predict(*asked: Any, **options: Any) -> float:
    key = repr((asked, options))
    if key not in _predicted:
        _predicted[key] = predicted_rps(*asked, **options)
    return _predicted[key]


class LaunchedSearch:
    """service_ms: of one request alone."""

    def __init__(self, aws: FakeAws, spec: SearchSpec, launcher: Launcher, folder: Path) -> None:
        self.aws = aws
        self.spec = spec
        self.question = question_of(spec, paid=True, parallel=launcher.parallel)
        self.journal = folder / "journal.jsonl"
        self.service_ms = 60.0  # beyond the limit nobody is loaded, which would take most of a search's time here
        self.measured: list[LoadSpec] = []
        self.steps: list[SearchStep] = []
        self.on_step: Callable[[SearchStep], None] = self.steps.append
        self._launcher = launcher

    async def measure(self, spec: LoadSpec, **options: Any) -> RunResult:
        self.measured.append(spec)
        self.aws.now_s += spec.duration_s
        await asyncio.sleep(0)
        if spec.pattern.startswith("users"):
            return run_result(spec, succeeded=round(1000 * spec.duration_s), service_ms=self.service_ms + int(spec.rows))
        good = spec.rate_rps <= PEAK_RPS
        told: dict[str, Any] = {"service_ms": 30, "verdict": "pass"} if good else {"service_ms": 80, "verdict": "fail"}
        return run_result(spec, succeeded=round(spec.rate_rps * 20), met_share=1.0 if good else 0.5, **told)

    async def run(self) -> SearchOutcome:
        journal = Journal(self.journal, self.question)
        try:
            lab = Lab(self.spec, self._launcher, self.measure)
            with patch.object(recommender, "predicted_rps", _predict):
                return await run_search(self.question, lab, journal, on_step=self.on_step)
        finally:
            journal.close()

    @property
    def journaled_usd(self) -> float:
        spent = Spent(self.question)
        finished = self.journal.read_bytes().endswith(FINISHED)
        journal = Journal(self.journal, self.question, resume=finished)
        journal.close()
        for entry in journal.events:
            spent.add(entry)
        return spent.usd


def of(parameters: Mapping[str, Any]) -> str:
    """The candidate that a call is about, by its tags."""
    told = [*parameters.get("Tags", ()), *(tag for each in parameters.get("TagSpecifications", ()) for tag in each["Tags"])]
    return next((tag["Value"] for tag in told if tag["Key"] == TAG_CANDIDATE), "")
