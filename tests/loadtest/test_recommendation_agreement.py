"""What a recommendation says of accuracy."""

from pathlib import Path
from typing import Any

import pytest

from loadtest.reports.recommendation import Recommendation, read, to_json
from tests.loadtest.examples import example_recommendation
from tests.loadtest.simulated_lab import Truth
from tests.loadtest.test_spec_agreement import requests_file

EXACT, FAST = "c7i.large echo", "c7i.large sum"
EXACT_TRUTH = Truth(200)


def recommended(
    folder: Path, min_agreement: float | None, fast: Truth, *, exact: Truth = EXACT_TRUTH, minutes: float = 30
) -> Recommendation:
    """Of an exact candidate, and one that is twice as fast."""
    backend = {"kind": "synthetic", "fixed_ms": 4, "row_ms": 1}
    candidates: list[dict[str, Any]] = [
        {"instances": ["c7i.large"], "backend": {**backend, "name": output, "output": output}} for output in ("echo", "sum")
    ]
    return example_recommendation(
        {EXACT: exact, FAST: fast},
        candidates=candidates,
        payload={"files": [requests_file(folder, 300)]},
        slo={"p99_ms": 50, "min_agreement": min_agreement},
        budget={"minutes": minutes},
    )


def test_who_does_not_agree_is_rejected_with_his_figure(tmp_path: Path) -> None:
    found = recommended(tmp_path, 0.999, Truth(400, agreement=0.94))
    assert (found.winner, found.runner_up) == (EXACT, None)
    assert (found.min_agreement, found.reference) == (0.999, EXACT)
    rejected = found.candidate(FAST)
    assert rejected.status == "rejected"
    assert rejected.out == "agrees 0.94 with the reference, 0.999 is asked"
    assert rejected.agreement is not None
    assert (rejected.agreement.value, rejected.agreement.inputs, rejected.agreement.met) == (0.94, 400, False)
    winner = found.candidate(EXACT).agreement
    assert winner is not None
    assert winner.met
    assert not any("answers agree" in warning for warning in found.warnings)


@pytest.mark.parametrize("least", [0.9, None])
def test_who_wins_where_it_is_allowed_wins_with_its_loss_told_first(tmp_path: Path, least: float | None) -> None:
    found = recommended(tmp_path, least, Truth(400, agreement=0.94))
    assert found.winner == FAST
    assert found.warnings[0] == "the winner's answers agree only 0.94 with those of B; the spec allows it"
    agreement = found.candidate(FAST).agreement
    assert agreement is not None
    assert agreement.met


def test_who_could_not_be_compared_wins_only_where_any_answers_are_allowed(tmp_path: Path) -> None:
    other = Truth(400, agreement=None)
    assert recommended(tmp_path, 0.5, other).winner == EXACT
    allowed = recommended(tmp_path, None, other)
    assert allowed.winner == FAST
    assert allowed.warnings[0].startswith(
        "the winner's answers could not be judged: cannot be compared: its output y is FP32 [1, 3]"
    )


def test_a_reference_that_the_budget_did_not_reach_is_not_proven_yet(tmp_path: Path) -> None:
    broken = Truth(200, failure="did not start: no module named foo")
    found = recommended(tmp_path, 0.999, Truth(400), exact=broken, minutes=0.15)
    assert found.state == "not proven"
    assert "--resume --budget-minutes" in found.command
    assert "Stop what else runs here" not in found.answer
    assert found.notes[0] == "the reference B did not start: no module named foo: A stands in for it"


def test_the_document_keeps_agreements(tmp_path: Path) -> None:
    found = recommended(tmp_path, 0.999, Truth(400, agreement=0.94))
    path = tmp_path / "report.json"
    path.write_text(to_json(found))
    assert read(path).candidates == found.candidates


def test_nothing_is_said_where_nothing_was_compared() -> None:
    found = example_recommendation()
    assert (found.min_agreement, found.reference) == (None, "")
    assert all(candidate.agreement is None for candidate in found.candidates)
