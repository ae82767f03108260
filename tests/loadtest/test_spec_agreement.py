"""What a spec says of accuracy: what is asked, whom answers are compared with, and on which requests."""

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.errors import UsageError
from loadtest.prices.catalogue import Catalogue, load_catalogue
from loadtest.question.numerics import full_precision, numerics_of
from loadtest.question.preflight import Reason
from loadtest.question.spec import UNSURE, AgreementTest, SearchSpec, parse_search_spec, without
from loadtest.question.subject import subject_of
from loadtest.search.events import EXPECTED
from loadtest.search.standing import Name
from tests.loadtest.examples import changed

TORCH = {"kind": "torch", "model": "m:f"}


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


def requests_file(folder: Path, count: int, *, rows: int = 1, expected: bool | None = False) -> str:
    """expected: None: only in the first line."""
    lines = []
    for number in range(count):
        data = [float(number), *[0.0] * (4 * rows - 1)]
        document: dict[str, Any] = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [rows, 4], "data": data}]}
        if expected or (expected is None and not number):
            document["expected"] = {"outputs": [{"name": "y", "datatype": "FP32", "shape": [rows, 4], "data": data}]}
        lines.append(json.dumps(document))
    path = folder / f"{count}x{rows}.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def parsed(catalogue: Catalogue, precisions: list[str], **keys: Any) -> SearchSpec:
    settings = {"precision": precisions, "threads": [1, 2]}
    candidates = [{"instances": ["c7i.large"], "backend": TORCH, "settings": settings}]
    return parse_search_spec(changed(**{"candidates": candidates, **keys}), catalogue, source="s")


def refused(catalogue: Catalogue, precisions: list[str], **keys: Any) -> str:
    with pytest.raises(UsageError) as raised:
        parsed(catalogue, precisions, **keys)
    return str(raised.value)


def test_an_agreement_of_0999_is_the_default(catalogue: Catalogue, tmp_path: Path) -> None:
    files = [requests_file(tmp_path, 300)]
    spec = parsed(catalogue, ["int8", "fp32"], payload={"files": files})
    assert spec.min_agreement == 0.999
    assert spec.agreement_test == AgreementTest(
        tuple(files), {}, True, "c7i.large torch (precision fp32, threads 1)", stand_ins=()
    )  # the first of full precision, though another is listed before it


@pytest.mark.parametrize(
    ("slo", "expected"),
    [
        ({"p99_ms": 50, "min_agreement": 0.9}, 0.9),
        ({"p99_ms": 50, "min_agreement": None}, None),
        ({"p99_ms": 50}, 0.999),
        ("p99<50ms,agreement>=0.95,errors<1%", 0.95),
        ("p99<50ms, agreement > 1", 1.0),
    ],
)
def test_an_slo_may_ask_for_an_agreement(catalogue: Catalogue, slo: Any, expected: float | None) -> None:
    spec = parse_search_spec(changed(slo=slo), catalogue, source="s")
    assert spec.min_agreement == expected
    assert spec.slo.tightest_ms == 50
    assert "agreement" not in str(spec.slo)


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        ({"p99_ms": 50, "min_agreement": 1.5}, "slo: min_agreement: 1.5: expected 0 to 1, or null"),
        ({"p99_ms": 50, "min_agreement": True}, "slo: min_agreement: True: expected 0 to 1"),
        ({"min_agreement": 0.9}, "an SLO needs at least one objective"),
        ("p99<50ms,agreement<0.9", 'slo: cannot read "agreement<0.9", expected such as "agreement>=0.999"'),
        ("p99<50ms,agreement>=2", 'slo: cannot read "agreement>=2"'),
        ("agreement>=0.9", "an SLO needs at least one objective"),
    ],
)
def test_an_agreement_that_makes_no_sense_is_refused(catalogue: Catalogue, slo: Any, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_search_spec(changed(slo=slo), catalogue, source="s")
    assert message in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_made_up_requests_do_not_serve_to_compare(catalogue: Catalogue) -> None:
    assert refused(catalogue, ["fp32", "int8"]) == (
        "s: payload.files: 2 kinds of candidates compute differently (precision, file or backend), and made-up requests cannot "
        "tell whether their answers agree: name files of at least 300 real requests; or allow any answers with "
        "slo: {min_agreement: null}"
    )


def test_candidates_that_all_compute_the_same_need_no_comparison(catalogue: Catalogue, tmp_path: Path) -> None:
    assert parsed(catalogue, ["fp32"]).agreement_test is None
    assert parsed(catalogue, ["fp32"], payload={"files": [requests_file(tmp_path, 3)]}).agreement_test is None


def test_where_any_answers_are_allowed_nothing_need_be_compared_but_it_is_said(catalogue: Catalogue, tmp_path: Path) -> None:
    slo = {"p99_ms": 50, "min_agreement": None}
    for payload in ({}, {"files": [requests_file(tmp_path, 299)]}):
        spec = parsed(catalogue, ["fp32", "int8"], slo=slo, payload=payload)
        assert spec.agreement_test is None
        assert any(line.startswith("2 kinds of candidates compute differently") for line in spec.odd)
    assert parsed(catalogue, ["fp32", "int8"], slo=slo, payload={"files": [requests_file(tmp_path, 300)]}).agreement_test


def test_too_few_requests_are_refused_with_how_many_there_are(catalogue: Catalogue, tmp_path: Path) -> None:
    path = requests_file(tmp_path, 299)
    Path(path).write_text(Path(path).read_text() + "\n" + Path(path).read_text())  # each twice: no more inputs
    told = refused(catalogue, ["fp32", "int8"], payload={"files": [path]})
    assert f"299 different requests are in {path}, 300 are needed" in told


def test_other_requests_than_the_payloads_may_be_compared_on(catalogue: Catalogue, tmp_path: Path) -> None:
    files = [requests_file(tmp_path, 300, rows=2)]
    spec = parsed(catalogue, ["fp32", "int8"], agreement={"requests": files, "statistic": "top-1"})
    assert spec.agreement_test is not None
    assert (spec.agreement_test.files, spec.agreement_test.statistics) == (tuple(files), {"": "top-1"})


def test_requests_that_bring_their_answers_need_no_reference(catalogue: Catalogue, tmp_path: Path) -> None:
    files = [requests_file(tmp_path, 300, expected=True)]
    spec = parsed(catalogue, ["int8"], payload={"files": files})  # even one candidate can be compared with them
    assert spec.agreement_test is not None
    assert spec.agreement_test.reference == EXPECTED
    named = parsed(catalogue, ["fp32", "int8"], payload={"files": files}, agreement={"reference": "torch"})
    assert named.agreement_test is not None
    assert named.agreement_test.reference == "c7i.large torch (precision fp32, threads 1)"


def test_too_few_expected_answers_are_refused_too(catalogue: Catalogue, tmp_path: Path) -> None:
    told = refused(catalogue, ["fp32"], payload={"files": [requests_file(tmp_path, 3, expected=True)]})
    assert "answers are to be compared with the expected ones, and 3 different requests are in" in told
    slo = {"p99_ms": 50, "min_agreement": None}
    assert parsed(catalogue, ["fp32"], slo=slo, payload={"files": [requests_file(tmp_path, 3, expected=True)]}).warnings


def test_either_all_requests_bring_their_answers_or_none(catalogue: Catalogue, tmp_path: Path) -> None:
    path = requests_file(tmp_path, 300, expected=None)
    told = refused(catalogue, ["fp32", "int8"], payload={"files": [path]})
    assert told == f"s: {path}: line 2: expected an `expected` answer, as other requests have one"


def test_a_reference_is_named_as_a_candidate_or_its_backend(catalogue: Catalogue, tmp_path: Path) -> None:
    payload = {"files": [requests_file(tmp_path, 300)]}
    name = "c7i.large torch (precision int8, threads 2)"
    spec = parsed(catalogue, ["fp32", "int8"], payload=payload, agreement={"reference": name})
    assert spec.agreement_test is not None
    assert (spec.agreement_test.reference, spec.agreement_test.stand_ins) == (name, ())
    told = refused(catalogue, ["fp32", "int8"], payload=payload, agreement={"reference": "torsch"})
    assert told == (
        "s: agreement.reference: 'torsch': expected the name of a candidate or of its backend; did you mean 'torch'?"
    )


def test_others_of_full_precision_may_stand_in_for_the_reference(catalogue: Catalogue, tmp_path: Path) -> None:
    both = [
        {
            "instances": ["c7i.large"],
            "backend": {**TORCH, "name": name, "model": model},
            "settings": {"precision": ["fp32", "bf16"]},
        }
        for name, model in (("one", "m:f"), ("two", "m:g"))
    ]
    spec = parsed(catalogue, [], candidates=both, payload={"files": [requests_file(tmp_path, 300)]})
    assert spec.agreement_test is not None
    assert spec.agreement_test.reference == "c7i.large one (precision fp32)"
    assert spec.agreement_test.stand_ins == ("c7i.large two (precision fp32)",)


def test_running_servers_are_compared_with_the_first(catalogue: Catalogue, tmp_path: Path) -> None:
    servers = [{"url": f"http://127.0.0.1:{port}", "instances": ["c7i.large"]} for port in (1, 2)]
    keys = {"launcher": {"kind": "url"}, "model": "m"}
    spec = parsed(catalogue, [], candidates=servers, payload={"files": [requests_file(tmp_path, 300)]}, **keys)
    assert spec.agreement_test is not None
    assert spec.agreement_test.reference == "c7i.large http://127.0.0.1:1"
    assert spec.warnings == ((UNSURE, "c7i.large http://127.0.0.1:1"),)
    assert isinstance(spec.warnings[0][1], Name)
    gone = {spec.candidates[0].name: (Reason("quota", "0", "room for 1"),)}
    assert without(spec, gone).warnings == ((UNSURE, "c7i.large http://127.0.0.1:2"),)
    assert "made-up requests" in refused(catalogue, [], candidates=servers, **keys)
    assert parsed(catalogue, [], candidates=servers[:1], **keys).agreement_test is None
    told = refused(catalogue, [], candidates=servers[:1], payload={"protocol": "grpc"}, **keys)
    assert told == "s: payload.protocol: grpc: servers that run already are asked over REST"


def test_a_payload_file_is_read_before_anything_is_started(catalogue: Catalogue, tmp_path: Path) -> None:
    assert "none.jsonl: cannot be read" in refused(catalogue, ["fp32"], payload={"files": ["none.jsonl"]})
    told = refused(catalogue, ["fp32"], payload={"files": [requests_file(tmp_path, 3, rows=2)]})
    assert "payload.files: " in told
    assert "line 1: expected requests of one row, got 2: payload.rows joins them" in told
    told = refused(catalogue, ["fp32"], agreement={"statistic": {"y": "cosinus"}})
    assert told.startswith("s: agreement.statistic: 'cosinus': expected cosine, equality")


def test_how_lengths_are_padded_is_taken_from_the_model(catalogue: Catalogue) -> None:
    model = {**changed()["model"], "ragged": {"pad": {"x": 0}}}
    assert parse_search_spec(changed(model=model), catalogue, source="s").pad == ("x=0",)
    assert parse_search_spec(changed(), catalogue, source="s").pad == ()


@pytest.mark.parametrize(("at", "known"), [((16 << 20) - 14, False), (16 << 20, None)])
def test_operators_are_looked_for_before_the_weights(tmp_path: Path, at: int, known: bool | None) -> None:
    path = tmp_path / "m.onnx"
    with path.open("wb") as file:
        file.seek(at)
        file.write(b"QuantizeLinear")
    assert full_precision("onnxruntime", {"model": str(path)}) is known


def test_threads_and_a_made_up_cost_change_no_answer_but_precision_does() -> None:
    fast = numerics_of("torch", {"model": "m:f", "precision": "fp32", "threads": 1})
    assert fast == numerics_of("torch", {"precision": "fp32", "model": "m:f", "threads": 2})
    assert fast != numerics_of("torch", {"model": "m:f", "precision": "bf16", "threads": 1})
    assert fast != numerics_of("onnxruntime", {"model": "m:f", "precision": "fp32", "threads": 1})


def test_precision_is_known_from_settings_the_record_of_the_build_or_the_operators(tmp_path: Path) -> None:
    def onnx(name: str, operators: bytes, built: str | None = None) -> bool | None:
        path = tmp_path / name
        path.write_bytes(b"\x08\x0a" + operators)
        if built:
            (tmp_path / f"{name}.build.json").write_text(json.dumps({"build": {"precision": built}}))
        return full_precision("onnxruntime", {"model": str(path)})

    assert onnx("plain.onnx", b"MatMul") is None
    assert onnx("quantised.onnx", b"MatMul DynamicQuantizeLinear") is False
    assert onnx("built.onnx", b"MatMul", "fp32") is True
    assert onnx("half.onnx", b"MatMul", "fp16") is False
    assert full_precision("torch", {"model": "m:f", "precision": "fp32"}) is True
    assert full_precision("torch", {"model": "m:f", "precision": "bf16"}) is False
    assert full_precision("torch", {"model": "m.pt2"}) is None
    assert full_precision("python", {"model": "m:C"}) is None
    assert full_precision("synthetic", {"output": "echo"}) is True
    assert full_precision("onnxruntime", {"model": "none.onnx"}) is None


def test_a_statistic_of_ones_own_is_told_apart_by_what_is_in_its_file(catalogue: Catalogue, tmp_path: Path) -> None:
    code, payload = tmp_path / "own.py", {"files": [requests_file(tmp_path, 300)]}
    subjects = set()
    for text in ("def own(a, b): ...\n", "def own(a, b):\n    return 1\n"):
        code.write_text(text)
        spec = parsed(catalogue, ["fp32", "bf16"], payload=payload, agreement={"statistic": {"y": f"{code}:own"}})
        assert spec.agreement_test is not None
        subjects.add(subject_of(spec))
    assert len(subjects) == 2
