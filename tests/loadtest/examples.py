"""A whole recommendation without hardware: a spec on made-up machines, and a simulated laboratory that answers for them."""

import copy
import datetime
from collections.abc import Mapping
from typing import Any

from loadtest.catalogue import Catalogue, load_catalogue
from loadtest.recommendation import Recommendation, build
from loadtest.recommender import question_of
from loadtest.spec import Spec, parse_spec
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


def example_spec(catalogue: Catalogue | None = None, **keys: Any) -> Spec:
    return parse_spec(changed(**keys), catalogue or load_catalogue(), source="example.yaml")


def example_recommendation(truths: Mapping[str, Truth] = TRUTHS, **keys: Any) -> Recommendation:
    spec = example_spec(**keys)
    question = question_of(spec, paid=False)
    outcome = SimulatedLab(question, truths).run()
    return build(spec, question, outcome, now=NOW, machine="a simulated machine", paid=False)
