"""Accuracy as a user meets it: real gateways, real answers, the real command."""

import asyncio
import http.server
import json
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from backends.base import Tensors
from loadtest.cli import main
from loadtest.lab.generating import AnswersJob
from loadtest.lab.launchers.local import Local
from loadtest.lab.launchers.url import price_by_metadata
from loadtest.lab.recommender import Lab, question_of
from loadtest.measuring import generator
from loadtest.prices.catalogue import load_catalogue
from loadtest.question.spec import parse_search_spec
from loadtest.results import LoadSpec, RunResult
from loadtest.search.events import EXPECTED, Agree, Agreed, cut_off
from tests.loadtest.made_results import run_result
from tests.loadtest.test_recommender import FakeLauncher, answer

pytestmark = pytest.mark.slow

MODEL = """
import time
import numpy as np

class Turner:
    def __init__(self, cosine=1.0, ms=0.0, width=2, wobble=0.0):
        self.turn = np.array([[cosine, (1 - cosine**2) ** 0.5], [-((1 - cosine**2) ** 0.5), cosine]], np.float32)
        self.ms, self.width, self.wobble = ms, width, wobble

    def predict(self, inputs):
        time.sleep(self.ms / 1e3)
        y = inputs["x"] @ self.turn
        y += self.wobble * np.random.default_rng().standard_normal(y.shape).astype(np.float32)
        return {"y": np.repeat(y, self.width // 2, axis=1)}
"""


def document(folder: Path, *options: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """A spec of one Turner for each of the options: `a`, `b`, …, each at half the time of the one before."""
    (folder / "turner.py").write_text(MODEL)
    lines = []
    for number in range(300):
        angle = number / 300 * math.tau
        data = [math.cos(angle), math.sin(angle)]
        request = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": data}]}
        request["expected"] = {"outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": data}]}
        lines.append(json.dumps(request if keys.get("expected") else {"inputs": request["inputs"]}))
    (folder / "requests.jsonl").write_text("\n".join(lines))
    keys.pop("expected", None)
    backend = {"kind": "python", "model": f"{folder}/turner.py:Turner"}
    candidates = [
        {
            "instances": ["c7i.large"],
            "backend": {**backend, "name": "abcd"[at], "class_options": {"ms": 4 / 2**at, **own}},
        }
        for at, own in enumerate(options)
    ]
    return {
        "model": {
            "name": "turner",
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, -1]}],
            "max_rows": 8,
        },
        "slo": {"p99_ms": 100},
        "launcher": {"kind": "local", "stands_for": {"c7i.large": [0]}},
        "payload": {"protocol": "rest-binary", "files": [f"{folder}/requests.jsonl"]},
        "candidates": candidates,
        "budget": {"minutes": 0.2},
        **keys,
    }


def agreed(wanted: dict[str, Any], *asked: tuple[str, str]) -> list[Agreed]:
    """The events that answer Agree for these pairs of candidate and reference, by the names of their backends."""
    spec = parse_search_spec(wanted, load_catalogue(), source="spec")
    names = {candidate.backend: candidate.name for candidate in spec.candidates} | {EXPECTED: EXPECTED}
    lab = Lab(spec, Local(start_timeout_s=60), measure=None)  # type: ignore[arg-type]  # agreement loads nothing

    async def ask() -> list[Any]:
        try:
            return [await lab.answer(Agree(names[entrant], names[reference], 30.0)) for entrant, reference in asked]
        finally:
            await lab.close()

    return asyncio.run(ask())


def test_answers_of_real_gateways_are_compared_or_it_is_said_why_not(tmp_path: Path) -> None:
    wanted = document(tmp_path, {}, {"cosine": 0.94}, {"width": 4}, {"unknown": 1})
    itself, turned, wider, broken = agreed(wanted, *((name, "a") for name in "abcd"))
    assert (itself.agreement, itself.inputs, itself.statistic, itself.failure) == (pytest.approx(1.0), 300, "cosine", "")
    assert turned.agreement == pytest.approx(0.94, abs=1e-4)
    assert wider.agreement is None
    assert wider.failure == "cannot be compared: in answer 1 its output y is FP32 [1, 4], the reference's FP32 [1, 2]"
    assert broken.failure.startswith("did not start: ")
    assert "unknown" in broken.failure
    assert {each.reference for each in (itself, turned, wider, broken)} == {itself.entrant}


def test_after_an_interruption_the_reference_is_asked_anew(tmp_path: Path) -> None:
    wanted = document(tmp_path, {}, {"cosine": 0.94})
    wanted["payload"]["protocol"] = "grpc"
    (turned,) = agreed(wanted, ("b", "a"))
    assert turned.agreement == pytest.approx(0.94, abs=1e-4)
    broken = document(tmp_path, {"unknown": 1}, {})
    (other,) = agreed(broken, ("b", "a"))
    assert other.failure.startswith("cannot be compared: the reference did not start: ")


def test_expected_answers_are_compared_with(tmp_path: Path) -> None:
    (turned,) = agreed(document(tmp_path, {}, {"cosine": 0.94}, expected=True), ("b", EXPECTED))
    assert turned.agreement == pytest.approx(0.94, abs=1e-4)


def test_a_comparison_whose_time_ran_out_is_no_evidence(tmp_path: Path) -> None:
    class Late:
        async def answers(self, job: AnswersJob) -> list[Tensors | None]:
            return [None] * 300

    spec = parse_search_spec(document(tmp_path, {}, {"cosine": 0.94}), load_catalogue(), source="spec")
    launcher, name = FakeLauncher(), spec.candidates[0].name
    launcher.generating = Late()  # type: ignore[assignment]  # no more is asked of it
    event = answer(Lab(spec, launcher, None), Agree(name, name, 7.0))  # type: ignore[arg-type]  # agreement loads nothing
    assert cut_off(event)
    assert event.short_s == 7.0


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles are measured, briefly. What is served under load is made up: 150 requests/s are met, on a busy machine too."""
    real = generator.measure

    async def measure(spec: LoadSpec, **options: Any) -> RunResult:
        if spec.slo is None:
            return await real(replace(spec, duration_s=min(spec.duration_s, 0.5)), **options)
        good = spec.rate_rps <= 150
        told: dict[str, Any] = {"verdict": "pass"} if good else {"verdict": "fail", "met_share": 0.5}
        return run_result(spec, succeeded=round(spec.rate_rps * 20), service_ms=5, **told)

    monkeypatch.setattr(generator, "measure", measure)


@pytest.mark.usefixtures("brief")
def test_a_candidate_twice_as_fast_that_agrees_at_094_is_never_loaded_nor_wins(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    wanted = document(tmp_path, {}, {"cosine": 0.94}, slo={"p99_ms": 2000})  # a busy machine's profile says 60 ms of 4
    wanted["model"]["max_rows"] = 1  # a profile of one size
    wanted["budget"] = {"minutes": 10}  # of the clock: a busy machine starts the first for 20 s
    path.write_text(yaml.safe_dump(wanted))
    assert main(["recommend", str(path), "--out", str(tmp_path / "results")]) == 0
    found = json.loads((tmp_path / "results" / "report.json").read_text())
    assert (found["min_agreement"], found["reference"]) == (0.999, "c7i.large a")
    exact, fast = (next(c for c in found["candidates"] if c["backend"] == name) for name in "ab")
    assert exact["agreement"]["met"]
    assert exact["timings"]
    assert fast["agreement"]["value"] == pytest.approx(0.94, abs=1e-4)
    assert not fast["agreement"]["met"]
    assert (fast["status"], fast["out"]) == ("rejected", "agrees 0.94 with the reference, 0.999 is asked")
    assert not fast["timings"]
    assert not fast["runs"]
    assert found["winner"] == exact["name"]


def test_a_reference_keeps_its_place_when_its_instance_type_is_asked_from_it(tmp_path: Path) -> None:
    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b'{"instance_type": "c7i.large"}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            urls = [f"http://127.0.0.1:{server.server_port}", f"http://localhost:{server.server_port}"]
            candidates = [{"url": url} for url in urls]
            wanted = document(tmp_path, {}, candidates=candidates, launcher={"kind": "url"}, model="turner")
            catalogue = load_catalogue()
            spec = asyncio.run(price_by_metadata(parse_search_spec(wanted, catalogue, source="spec"), catalogue))
        finally:
            server.shutdown()
            thread.join()
    question = question_of(spec, paid=False)
    assert (question.reference, question.stand_ins) == (f"c7i.large {urls[0]}", (f"c7i.large {urls[1]}",))
    assert {entrant.name for entrant in question.entrants} == {question.reference, *question.stand_ins}
