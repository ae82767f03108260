import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from loadtest.errors import UsageError
from loadtest.lab.journal import Journal, fingerprint
from loadtest.lab.recommender import question_of
from loadtest.load.request_log import RequestLog, write_csv
from loadtest.prices.catalogue import Catalogue, load_catalogue
from loadtest.question.subject import subject_of
from loadtest.search.events import Entrant, Measured, Predicted, Profiled, Question, Timing
from tests.file_limit import no_file_longer_than
from tests.loadtest.examples import DOCUMENT, example_spec

QUESTION = Question((Entrant("a", "g", 1.0, 1, 8),), 0.99, 50, 600)
EVENTS = (
    Profiled("g", (Timing(1, 1, 5.0, 0.1),), 0.5, 7.0),
    Predicted("a", 120.0),
    Measured("a", "peak", 100.0, "pass", ((200, 199), (210, 210)), 21.0, batch_rows={1: 5, 8: 7}, notes=("busy",)),
)


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


def write(path: Path, *, finish: bool = False) -> None:
    journal = Journal(path, QUESTION)
    for event in EVENTS:
        journal.append(event)
    if finish:
        journal.finish()
    journal.close()


def reopened(path: Path, question: Question = QUESTION, *, fresh: bool = False) -> tuple[object, ...]:
    journal = Journal(path, question, fresh=fresh)
    journal.close()
    return journal.events


def test_events_come_back_as_they_were(tmp_path: Path) -> None:
    write(tmp_path / "journal.jsonl")
    assert reopened(tmp_path / "journal.jsonl") == EVENTS


def test_a_line_cut_short_by_an_interruption_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path)
    path.write_bytes(path.read_bytes()[:-20])
    assert reopened(path) == EVENTS[:2]
    assert reopened(path) == EVENTS[:2]  # and the file is whole again


def test_a_full_disk_costs_no_event_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path)
    size_bytes = path.stat().st_size
    with no_file_longer_than(size_bytes // 2):
        assert reopened(path) == EVENTS
    with no_file_longer_than(size_bytes + 10):
        journal = Journal(path, QUESTION)
        with pytest.raises(UsageError, match=f"{path}: cannot be written: File too large: what is there is kept"):
            journal.append(EVENTS[0])
        journal.close()
    assert path.stat().st_size == size_bytes + 10
    assert reopened(path) == EVENTS


def test_a_full_disk_leaves_no_half_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    log = RequestLog(500, -1)
    write_csv(path, log, used=np.arange(500))
    assert len(path.read_text().splitlines()) == 501
    with no_file_longer_than(1000), pytest.raises(UsageError, match=r"the log cannot be written: .*File too large"):
        write_csv(path, log, used=np.arange(500))
    assert not path.exists()


def test_one_search_at_a_time_writes_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, QUESTION)
    journal.append(EVENTS[0])
    for fresh in (False, True):
        with pytest.raises(UsageError, match=f"{path}: another search writes here"):
            Journal(path, QUESTION, fresh=fresh)
    # A process that was started meanwhile does not keep it.
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False) as child:
        assert child.stdout is not None
        child.stdout.readline()
        journal.append(EVENTS[1])
        journal.close()
        assert reopened(path) == EVENTS[:2]
        child.communicate(b"\n")


def test_what_is_refused_is_free_for_others(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with pytest.raises(UsageError, match="no measurement to go on from"):
        Journal(path, QUESTION, resume=True)
    assert not path.exists()
    write(path)
    with pytest.raises(UsageError) as refused:  # held, and with it all that its frames hold
        Journal(path, dataclasses.replace(QUESTION, limit_ms=40))
    assert reopened(path) == EVENTS
    assert "another question" in str(refused.value)


def test_a_finished_search_is_not_resumed(tmp_path: Path) -> None:
    write(tmp_path / "journal.jsonl", finish=True)
    assert reopened(tmp_path / "journal.jsonl") == ()


def test_fresh_forgets_what_is_there(tmp_path: Path) -> None:
    write(tmp_path / "journal.jsonl")
    assert reopened(tmp_path / "journal.jsonl", fresh=True) == ()


def test_the_journal_of_another_question_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "journal.jsonl")
    with pytest.raises(UsageError, match=r"belongs to another question .*--fresh starts anew"):
        reopened(tmp_path / "journal.jsonl", dataclasses.replace(QUESTION, limit_ms=40))


def asked(catalogue: Catalogue, **keys: Any) -> str:
    spec = example_spec(catalogue, **keys)
    return fingerprint(dataclasses.replace(question_of(spec, paid=False), subject=subject_of(spec)))


@pytest.mark.parametrize(
    "other",
    [
        {"slo": "p99<50ms,errors<0.1%"},
        {"slo": "p99<50ms,p99.9<500ms"},
        {"slo": "p99<50ms,service.p50<5ms"},
        {"payload": {"rows": 8}},
        {"payload": {"protocol": "grpc"}},
        {"payload": {"length": "512"}},
        {"payload": {"values": ["x=0:9"]}},
        {"model": {**DOCUMENT["model"], "name": "other"}},
        {"model": {**DOCUMENT["model"], "max_rows": 4}},
        {"launcher": {**DOCUMENT["launcher"], "nice": 0}},
        {"candidates": [{**DOCUMENT["candidates"][0], "backend": {"kind": "synthetic", "fixed_ms": 5, "row_ms": 1}}]},
    ],
    ids=str,
)
def test_what_a_measured_rate_depends_on_is_part_of_the_question(catalogue: Catalogue, other: dict[str, Any]) -> None:
    assert asked(catalogue, **other) != asked(catalogue)


@pytest.mark.parametrize(
    "other",
    [
        {"budget": {"minutes": 5, "usd": 3}},
        {"seed": 7},
        {"launcher": {**DOCUMENT["launcher"], "start_timeout_s": 5}},
        {"candidates": [{**DOCUMENT["candidates"][0], "max_count": 3}]},
    ],
    ids=str,
)
def test_what_it_does_not_depend_on_is_not(catalogue: Catalogue, other: dict[str, Any]) -> None:
    assert asked(catalogue, **other) == asked(catalogue)


def test_files_are_told_apart_by_what_is_in_them(catalogue: Catalogue, tmp_path: Path) -> None:
    payload, code, model = tmp_path / "one.json", tmp_path / "own.py", tmp_path / "model.onnx"
    request = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0, 0, 0, 0]}]}

    def now() -> str:
        backends = {"kind": "python", "model": f"{code}:Own"}, {"kind": "onnxruntime", "model": str(model)}
        candidates = [{"instances": ["c7i.large"], "backend": backend} for backend in backends]
        return asked(
            catalogue,
            slo={"p99_ms": 50, "min_agreement": None},
            payload={"files": [str(payload)]},
            candidates=candidates,
        )

    payload.write_text(json.dumps(request))
    code.write_text("class Own: ...\n")
    model.write_bytes(b"one")
    seen = {now()}
    for path, content in (
        (payload, json.dumps(request).replace("0]", "1]")),
        (code, "class Own:\n    b = 1\n"),
        (model, "two"),
    ):
        path.write_text(content)
        seen.add(now())
    assert len(seen) == 4
    assert now() in seen


def test_models_in_several_files_are_told_apart_by_all_of_them(catalogue: Catalogue, tmp_path: Path) -> None:
    model, weights, folder = tmp_path / "model.onnx", tmp_path / "model.weights", tmp_path / "compiled"
    tensor = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, (64,), np.zeros(64, np.float32).tobytes(), raw=True)
    onnx.save_model(
        onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], [tensor])),
        str(model), save_as_external_data=True, location=weights.name, size_threshold=0,
    )  # fmt: skip
    (folder / "rows-1").mkdir(parents=True)

    def now() -> str:
        backends = {"kind": "onnxruntime", "model": str(model)}, {"kind": "neuron", "model": str(folder)}
        candidates = [{"instances": ["inf2.xlarge"], "backend": backend} for backend in backends]
        launcher = {"kind": "local", "stands_for": {"inf2.xlarge": [0]}}
        return asked(catalogue, slo={"p99_ms": 50, "min_agreement": None}, candidates=candidates, launcher=launcher)

    seen = {now()}
    for path in (weights, folder / "rows-1" / "model.neff"):
        path.write_bytes(bytes(300 - len(seen)))
        seen.add(now())
    assert len(seen) == 3


@pytest.mark.parametrize(
    "line",
    [b"{}\n", b"garbage\n", b'{"event":"\xce"}\n', b'{"event":"measured","data":{}}\n', b'{"event":"other","data":{}}\n'],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    write(path)
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(UsageError, match="line 5 is no event"):
        reopened(path)


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"something else\n")
    with pytest.raises(UsageError, match="belongs to another question"):
        reopened(path)
