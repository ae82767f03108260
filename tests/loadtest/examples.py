"""A whole recommendation without hardware: a spec on made-up machines, and a simulated laboratory that answers for them."""

import copy
import datetime
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from loadtest.lab.recommender import question_of
from loadtest.prices.catalogue import Catalogue, load_catalogue
from loadtest.question.spec import SearchSpec, parse_search_spec
from loadtest.reports.conclusion import build
from loadtest.reports.recommendation import AgreementReport, Recommendation
from loadtest.search.curves import FrontPoint
from loadtest.search.events import Agreed, Measured
from loadtest.search.standing import SearchOutcome, Standing
from tests.loadtest.simulated_lab import SimulatedLab, Truth

NOW = datetime.datetime(2026, 8, 1, 12, tzinfo=datetime.UTC)

DOCUMENT: Mapping[str, Any] = {
    "model": {
        "name": "adder",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}],
        "max_rows": 8,
    },
    "slo": {"p99_ms": 50},
    "launcher": {"kind": "local", "stands_for": {"c7i.large": [0, 1], "c8g.large": [0, 1]}},
    "candidates": [
        {
            "instances": ["c7i.large", "c8g.large"],
            "backend": {"kind": "synthetic", "fixed_ms": 4, "row_ms": 1},
            "settings": {"sessions": [1, 2]},
        }
    ],
    "budget": {"minutes": 30},
}

TRUTHS = {
    "c7i.large synthetic (sessions 1)": Truth(300, 1.08),
    "c7i.large synthetic (sessions 2)": Truth(480, 0.95),
    "c8g.large synthetic (sessions 1)": Truth(260, 0.93),
    "c8g.large synthetic (sessions 2)": Truth(400, 1.04),
}


def changed(**keys: Any) -> dict[str, Any]:
    """The document with other values under some keys."""
    return copy.deepcopy({**DOCUMENT, **keys})


def example_spec(catalogue: Catalogue | None = None, **keys: Any) -> SearchSpec:
    return parse_search_spec(changed(**keys), catalogue or load_catalogue(), source="example.yaml")


def example_outcome(spec: SearchSpec, truths: Mapping[str, Truth] = TRUTHS) -> SearchOutcome:
    return SimulatedLab(question_of(spec, paid=False), truths).run()


def told(spec: SearchSpec, outcome: SearchOutcome) -> Recommendation:
    return build(spec, question_of(spec, paid=False), outcome, now=NOW, machine="a simulated machine", paid=False)


def example_recommendation(truths: Mapping[str, Truth] = TRUTHS, **keys: Any) -> Recommendation:
    spec = example_spec(**keys)
    return told(spec, example_outcome(spec, truths))


def proven() -> Recommendation:
    """With the interval of every p99."""
    found = example_recommendation(target_rps=900)
    candidates = tuple(
        replace(
            candidate,
            curve=tuple(replace(p, p99_low_ms=0.9 * p.p99_ms, p99_high_ms=1.2 * p.p99_ms) for p in candidate.curve),
        )
        for candidate in found.candidates
    )
    return replace(found, candidates=candidates)


def not_proven() -> Recommendation:
    """Nothing that held was decided."""
    spec = example_spec()

    def undecided(run: Measured) -> Measured:
        return replace(run, verdict="undecided" if run.verdict == "pass" else run.verdict)

    return told(spec, replace(altered(example_outcome(spec), undecided), verified=None, needed_seconds=130.0))


def nobody() -> Recommendation:
    return example_recommendation({name: Truth(0) for name in TRUTHS})


def invalid() -> Recommendation:
    """The machine was busy in every run."""
    spec = example_spec()

    def disturbed(run: Measured) -> Measured:
        return replace(run, valid=False, verdict="undecided", notes=("send lag p99 9 ms is above 0.5 ms",))

    outcome = altered(example_outcome(spec), disturbed)
    return told(spec, replace(outcome, winner=None, runner_up=None, verified=None))


def incomparable(why: str = "did not answer") -> Recommendation:
    """Why the reference was not to be asked, so that nothing was compared, and nothing measured."""
    spec = example_spec()
    outcome = example_outcome(spec)
    reference = spec.candidates[0].name
    standings = []
    for standing in outcome.standings:
        failure = why if standing.entrant.name == reference else f"cannot be compared: the reference {why}"
        agreed = Agreed(standing.entrant.name, failure=failure)
        standings.append(Standing(standing.entrant, standing.required, standing.limit_ms, agreement=agreed, out=failure))
    silent = replace(outcome, standings=tuple(standings), winner=None, runner_up=None, verified=None, reference=reference)
    question = replace(question_of(spec, paid=False), min_agreement=0.999)
    return build(spec, question, silent, now=NOW, machine="a simulated machine", paid=False)


def inaccurate() -> Recommendation:
    """The cheapest by far answers otherwise than the reference: it was not measured any further."""
    found = example_recommendation({**TRUTHS, "c7i.large synthetic (sessions 1)": Truth(0)})
    reference = found.candidates[0].name
    candidates = []
    for candidate in found.candidates:
        met = candidate.status != "rejected"
        value = 1.0 if candidate.name == reference else 0.99987 if met else 0.9421
        agreement = AgreementReport(value, 300, "cosine", reference, candidate.name, met, "")
        out = candidate.out if met else "agrees 0.94 with the reference, 0.999 is asked"
        candidates.append(replace(candidate, agreement=agreement, out=out))
    pareto = tuple(
        FrontPoint(c.name, c.claimed_rps, c.cost_per_million_usd, c.agreement.value)
        for c in candidates[:2]
        if c.cost_per_million_usd and c.agreement and c.agreement.value
    )
    return replace(found, candidates=tuple(candidates), min_agreement=0.999, reference=reference, pareto_agreement=pareto)


def tie() -> Recommendation:
    equal = {"instances": ["c7i.large"], "backend": DOCUMENT["candidates"][0]["backend"], "settings": {"sessions": [1, 2]}}
    truths = {f"c7i.large synthetic (sessions {n})": Truth(480) for n in (1, 2)}
    return example_recommendation(truths, candidates=[equal])


def one() -> Recommendation:
    alone = {"instances": ["c7i.large"], "backend": DOCUMENT["candidates"][0]["backend"]}
    return example_recommendation({"c7i.large synthetic": Truth(480)}, candidates=[alone])


def twelve() -> Recommendation:
    many = {
        "instances": ["c7i.large", "c8g.large"],
        "backend": {"kind": "synthetic", "name": "a-backend-with-a-long-name", "fixed_ms": 4, "row_ms": 1},
        "settings": {"sessions": [1, 2], "max_rows": [4, 8, 16]},
    }
    spec = example_spec(candidates=[many])
    truths = {candidate.name: Truth(400 + 7 * place) for place, candidate in enumerate(spec.candidates)}
    return told(spec, example_outcome(spec, truths))


EXAMPLES: Mapping[str, Callable[[], Recommendation]] = {
    "proven": proven,
    "not proven": not_proven,
    "nobody": nobody,
    "invalid": invalid,
    "incomparable": incomparable,
    "inaccurate": inaccurate,
    "tie": tie,
    "one": one,
    "twelve": twelve,
}


def altered(outcome: SearchOutcome, change: Callable[[Measured], Measured]) -> SearchOutcome:
    """The outcome had its runs gone otherwise."""
    standings = tuple(replace(standing, runs=[change(run) for run in standing.runs]) for standing in outcome.standings)
    return replace(outcome, standings=standings)
