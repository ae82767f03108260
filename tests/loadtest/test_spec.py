from pathlib import Path
from typing import Any

import onnx
import pytest
import yaml

from gateway.config import parse_config
from loadtest.errors import UsageError
from loadtest.prices.catalogue import Catalogue, load_catalogue
from loadtest.question.spec import parse_search_spec, read_search_spec
from tests.loadtest.examples import changed, example_spec

ROOT = Path(__file__).parents[2]
CANDIDATE = changed()["candidates"][0]


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_catalogue()


def test_candidates_are_instances_times_settings(catalogue: Catalogue) -> None:
    settings = {"sessions": [1, 2], "max_rows": [4, 8]}
    spec = example_spec(catalogue, candidates=[{**CANDIDATE, "settings": settings}])
    assert len(spec.candidates) == 2 * 2 * 2
    first = spec.candidates[0]
    assert first.name == "c7i.large synthetic (sessions 1, max_rows 4)"
    assert (first.usd_per_hour, first.sessions, first.max_rows, first.cpus) == (0.08925, 1, 4, (0, 1))


def test_candidates_that_differ_in_sessions_and_batch_cap_share_a_profile(catalogue: Catalogue) -> None:
    spec = example_spec(catalogue, candidates=[{**CANDIDATE, "settings": {"sessions": [1, 2], "max_rows": [4, 8]}}])
    assert len({candidate.group for candidate in spec.candidates}) == 2  # the two instance types


def test_every_candidates_configuration_can_be_deployed(catalogue: Catalogue) -> None:
    for candidate in example_spec(catalogue).candidates:
        config = parse_config(candidate.document, source="candidate")
        assert config.models[0].slo is not None
        assert config.models[0].slo.p99_ms == 50
        assert config.models[0].backends[0].usd_per_hour == candidate.usd_per_hour


def test_of_several_objectives_the_strictest_percentile_is_what_the_gateway_promises(catalogue: Catalogue) -> None:
    spec = example_spec(catalogue, slo="p50<20ms,p99<200ms,errors<1%")
    assert [candidate.document["models"][0]["slo"] for candidate in spec.candidates] == [{"p99_ms": 200}] * 4


def test_a_model_and_its_backend_can_be_named_in_a_gateway_file(catalogue: Catalogue, tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(yaml.safe_dump({"models": [{**changed()["model"], "backends": [CANDIDATE["backend"]]}]}))
    spec = example_spec(
        catalogue, gateway=str(path), model="adder", candidates=[{"instances": ["c7i.large"], "backend": "synthetic"}]
    )
    assert spec.candidates[0].document["models"][0]["backends"][0]["fixed_ms"] == 4


def test_a_model_that_the_gateway_file_builds_is_told_to_be_built(catalogue: Catalogue, tmp_path: Path) -> None:
    backend = {"kind": "onnxruntime", "model": str(tmp_path / "m.onnx")}
    path = tmp_path / "gateway.yaml"
    path.write_text(yaml.safe_dump({"models": [{**changed()["model"], "backends": [{**backend, "build": {"source": "m:f"}}]}]}))
    (told,) = faults_of(
        catalogue, gateway=str(path), model="adder", candidates=[{"instances": ["c7i.large"], "backend": backend}]
    )
    assert told.endswith(f"backend: no file '{tmp_path}/m.onnx'; `gateway compile {path}` makes it")


def test_a_price_of_ones_own_needs_no_instance_type(catalogue: Catalogue) -> None:
    own = {"backend": CANDIDATE["backend"], "usd_per_hour": 0.03, "price_source": "electricity and depreciation"}
    (candidate,) = example_spec(catalogue, candidates=[own]).candidates
    assert candidate.price is not None
    assert (candidate.usd_per_hour, candidate.basis, candidate.price.source) == (0.03, "own", own["price_source"])
    assert candidate.price.date is None


def test_running_servers_may_leave_their_instance_type_to_be_asked(catalogue: Catalogue) -> None:
    document = changed(launcher={"kind": "url"}, model="adder", candidates=[{"url": "http://127.0.0.1:8000/"}])
    (candidate,) = parse_search_spec(document, catalogue, source="s").candidates
    assert (candidate.url, candidate.price) == ("http://127.0.0.1:8000", None)


def test_a_local_run_that_stands_for_an_instance_type_is_reported(catalogue: Catalogue) -> None:
    warnings = example_spec(catalogue).odd
    assert warnings[0] == (
        "c7i.large, c8g.large: not measured itself: by `stands_for` of the spec this machine's cores 0, 1 stand for it; "
        "measure there before you rely on it"
    )


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "loadtests").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_are_valid_but_for_models_that_are_not_built_yet(catalogue: Catalogue, path: Path) -> None:
    faults = ""
    try:
        read_search_spec(path, catalogue)
    except UsageError as exc:
        faults = str(exc)
    wheel = f"launcher.wheel: '{ROOT}/serving_gateway-"
    unbuilt = (f"backend: no file '{ROOT}/models/", f"payload {ROOT}/models/", wheel)
    assert [line for line in faults.splitlines() if not any(text in line for text in unbuilt)] == []


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown instance": (
        {"candidates": [{**CANDIDATE, "instances": ["c7i.lrge"]}]},
        r"s\.yaml: candidates\[0\]: instances: unknown instance type 'c7i\.lrge'; the nearest are c7i\.large",
    ),
    "missing price": (
        {"price": "sagemaker", "candidates": [{**CANDIDATE, "instances": ["t3.medium"]}]},
        r"candidates\[0\]: instances: SageMaker does not host t3\.medium, which is on EC2 only",
    ),
    "no price at all": ({"candidates": [{"backend": CANDIDATE["backend"]}]}, r"candidates\[0\]: no price: name `instances`"),
    "price without source": (
        {"candidates": [{"backend": CANDIDATE["backend"], "usd_per_hour": 1}]},
        r"price_source: missing, expected where 1 USD/h comes from",
    ),
    "price of zero": (
        {"candidates": [{**CANDIDATE, "usd_per_hour": 0}]},
        r"candidates\[0\]\.usd_per_hour: 0: .*greater than 0",
    ),
    "slo without number": ({"slo": {"p99_ms": None}}, r"s\.yaml: SLO: p99_ms: expected a number, got None"),
    "slo beyond a day": ({"slo": {"p99_ms": 1e8}}, r"s\.yaml: SLO: p99<1e\+08ms: expected a limit of a day at most"),
    "slo of another kind": ({"slo": {"p99": 5}}, r"SLO: unknown key 'p99'"),
    "slo without latency": ({"slo": {"max_error_rate": 0.1}}, r"slo: a recommendation needs a latency objective"),
    "not standing for": (
        {"launcher": {"kind": "local"}, "candidates": [{**CANDIDATE, "instances": ["c7i.large"]}]},
        r"c7i\.large is not measured by running on this machine.*stands_for: \{c7i\.large: \[0, 1\]\}",
    ),
    "unknown launcher": ({"launcher": {"kind": "remote"}}, r"s\.yaml: launcher\.kind: 'remote': expected one of local, url"),
    "unknown key": ({"budgets": {"minutes": 1}}, r"s\.yaml: budgets: unknown key; did you mean `budget`\?"),
    "unknown key below": (
        {"candidates": [{**CANDIDATE, "setings": {}}]},
        r"candidates\[0\]\.setings: unknown key; did you mean `settings`\?",
    ),
    "gateway's name with a null byte": ({"gateway": "a\0b", "model": "m"}, r"gateway: .*cannot be read: embedded null byte"),
    "unknown setting": (
        {"candidates": [{**CANDIDATE, "settings": {"session": [1]}}]},
        r"candidates\[0\]: settings: session: 1: unknown key; did you mean `sessions`\?",
    ),
    "setting without values": (
        {"candidates": [{**CANDIDATE, "settings": {"session": [], "sessions": [1]}}]},
        r"^s\.yaml: candidates\[0\]\.settings\.session: \[\]: expected a list of at least 1; add one$",
    ),
    "setting out of range": (
        {"candidates": [{**CANDIDATE, "settings": {"sessions": [0]}}]},
        r"candidates\[0\]: settings: sessions: 0: expected a whole number from 1 to 256",
    ),
    "no device": (
        {"candidates": [{"instances": ["c7i.large"], "backend": {"kind": "torch", "model": "m:f", "device": "cuda"}}]},
        r"c7i\.large has no device 'cuda'",
    ),
    "no file": (
        {"candidates": [{**CANDIDATE, "backend": {"kind": "onnxruntime", "model": "none.onnx"}, "settings": {}}]},
        r"backend: no file 'none\.onnx'",
    ),
    "no file of a class": (
        {"candidates": [{**CANDIDATE, "backend": {"kind": "python", "model": "flowr.py:Flower"}, "settings": {}}]},
        r"candidates\[0\]: backend\.model: 'flowr\.py:Flower': no such file \(.*; paths count from the spec's folder",
    ),
    "no file of a factory": (
        {"candidates": [{**CANDIDATE, "backend": {"kind": "torch", "model": "none.py:make"}, "settings": {}}]},
        r"candidates\[0\]: backend\.model: 'none\.py:make': no such file",
    ),
    "no such class": (
        {"candidates": [{**CANDIDATE, "backend": {"kind": "python", "model": f"{__file__}:Flower"}, "settings": {}}]},
        r"candidates\[0\]: backend\.model: '.*test_spec\.py:Flower': .*Flower",
    ),
    "twice": (
        {"candidates": [CANDIDATE, CANDIDATE]},
        r"s\.yaml: candidates: listed twice: c7i\.large synthetic \(sessions 1\), ",
    ),
    "no candidates": ({"candidates": []}, r"s\.yaml: candidates: "),
    "no url": ({"launcher": {"kind": "url"}, "candidates": [{}]}, r"candidates\[0\]: url: missing"),
    "url for local": ({"candidates": [{"url": "http://x"}]}, r"url: only for `launcher: \{kind: url\}`"),
    "budget": ({"budget": {"minutes": 0}}, r"s\.yaml: budget\.minutes: 0: .*greater than 0"),
    "budget of true": ({"budget": {"minutes": True}}, r"s\.yaml: budget\.minutes: true: expected a number"),
    "price of true": (
        {"candidates": [{**CANDIDATE, "usd_per_hour": True, "price_source": "me"}]},
        r"candidates\[0\]\.usd_per_hour: true: expected a number",
    ),
    "seed of false": ({"seed": False}, r"^s\.yaml: seed: false: expected a whole number"),
    "core of true": (
        {"launcher": {"kind": "local", "stands_for": {"c7i.large": [True, 1]}}},
        r"launcher\.stands_for\.c7i\.large\[0\]: true: expected a whole number",
    ),
    "unknown model name": ({"model": "other"}, r"gateway: missing, expected the configuration"),
}


@pytest.mark.parametrize(("keys", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_spec_is_refused_with_one_clear_error(catalogue: Catalogue, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        parse_search_spec(changed(**keys), catalogue, source="s.yaml")
    assert len(str(raised.value).splitlines()) == 1


def test_a_model_larger_than_the_instance_is_refused(catalogue: Catalogue, tmp_path: Path) -> None:
    model = tmp_path / "huge.onnx"
    with model.open("wb") as file:
        file.truncate(5 << 30)  # sparse
    huge = {"instances": ["c7i.large"], "backend": {"kind": "onnxruntime", "model": str(model)}}
    with pytest.raises(UsageError, match=r"huge\.onnx has 5\.0 GiB, c7i\.large only 4 GiB of memory"):
        parse_search_spec(changed(candidates=[huge]), catalogue, source="s.yaml")


@pytest.mark.parametrize("kind", ["onnxruntime", "neuron"])
def test_a_model_is_as_large_as_all_its_files(catalogue: Catalogue, tmp_path: Path, kind: str) -> None:
    model = tmp_path / "m.onnx"
    large = tmp_path / "weights" if kind == "onnxruntime" else model / "1x8.pt"
    if kind == "onnxruntime":
        tensor = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, (64,), bytes(256), raw=True)
        onnx.save_model(
            onnx.helper.make_model(onnx.helper.make_graph([], "g", [], [], [tensor])),
            str(model), save_as_external_data=True, location=large.name, size_threshold=0,
        )  # fmt: skip
    else:
        model.mkdir()
    with large.open("ab") as file:
        file.truncate(5 << 30)  # sparse
    huge = {"instances": ["c7i.large"], "backend": {"kind": kind, "model": str(model)}}
    with pytest.raises(UsageError, match=r"m\.onnx has 5\.0 GiB, c7i\.large only 4 GiB of memory"):
        parse_search_spec(changed(candidates=[huge]), catalogue, source="s.yaml")


def test_all_faults_are_told_at_once(catalogue: Catalogue) -> None:
    bad = [{**CANDIDATE, "instances": ["c7i.lrge"]}, {**CANDIDATE, "settings": {"session": [1]}}]
    with pytest.raises(UsageError) as raised:
        parse_search_spec(changed(candidates=bad), catalogue, source="s.yaml")
    assert len(str(raised.value).splitlines()) == 2


def faults_of(catalogue: Catalogue, **keys: Any) -> list[str]:
    with pytest.raises(UsageError) as raised:
        parse_search_spec(changed(**keys), catalogue, source="s")
    return str(raised.value).splitlines()


def test_each_flag_in_a_list_of_numbers_is_told_and_nothing_else(catalogue: Catalogue) -> None:
    told = faults_of(catalogue, launcher={"kind": "local", "stands_for": {"c7i.large": [True, False]}})
    assert [line.partition(": ")[2].partition(": expected")[0] for line in told] == [
        "launcher.stands_for.c7i.large[0]: true",
        "launcher.stands_for.c7i.large[1]: false",
    ]


def test_faults_of_every_kind_are_told_together(catalogue: Catalogue, tmp_path: Path) -> None:
    assert faults_of(
        catalogue,
        slo={"p99": 5, "p50_ms": None, "min_agreement": 2},
        budget={"minutes": 0, "usds": 1},
        launcher={"kind": "local", "stands_for": {"c7i.large": [0, 1]}, "nise": 3},
        payload={"protocol": "rest-bin"},
        agreement={"statistic": 5},
        colour="blue",
        candidates=[
            {**CANDIDATE, "instances": ["c7i.lrge", "c7i.large"], "settings": {"sessions": [0, 1], "row_ms": [-1]}},
            {"instances": ["c7i.large"], "setings": {}, "backend": {"kind": "torch", "model": "m:f", "device": "cuda"}},
            {"instances": ["c7i.large"], "backend": 5},
        ],
    ) == [
        "s: launcher.nise: 3: unknown key; did you mean `nice`?",
        "s: payload.protocol: 'rest-bin': expected one of rest-json, rest-binary, grpc, invocations; "
        "did you mean `rest-binary`?",
        "s: agreement.statistic: 5: expected text or a mapping, each value text",
        "s: candidates[1].setings: unknown key; did you mean `settings`?",
        "s: candidates[2].backend: 5: expected text or a mapping, or null",
        "s: budget.minutes: 0: expected a number greater than 0, at most 1440; left out, it is 45",
        "s: budget.usds: 1: unknown key; did you mean `usd`?",
        "s: colour: 'blue': unknown key; known here: model, gateway, slo, target_rps, price, launcher, payload, agreement, "
        "candidates, budget, seed",
        "s: slo: min_agreement: 2: expected 0 to 1, or null to allow any answers",
        "s: SLO: unknown key 'p99', expected such as p99_ms or max_error_rate",
        "s: SLO: p50_ms: expected a number, got None",
        "s: candidates[0]: instances: unknown instance type 'c7i.lrge'; the nearest are c7i.large, c7i.xlarge, c7i.8xlarge: "
        f"`loadtest prices list` shows all {len(catalogue.instances)}",
        "s: candidates[0]: settings: sessions: 0: expected a whole number from 1 to 256; left out, it is 1",
        "s: candidates[0]: settings: row_ms: -1: expected a number from 0 to 3600000; left out, it is 0.1",
        "s: candidates[1]: c7i.large has no device 'cuda': no accelerator",
    ]


def test_a_fault_in_a_list_is_told_with_its_place_and_the_rest(catalogue: Catalogue) -> None:
    assert faults_of(
        catalogue,
        launcher={"kind": "local", "stands_for": {"c7i.large": [0, -1], "c8g.large": ["one", 2.5]}, "cpus": [-2]},
        payload={"files": [5], "values": "x"},
        agreement={"requests": [{}]},
        candidates=[{**CANDIDATE, "instances": [5, "c7i.large"]}, 7, {**CANDIDATE, "instances": ["c7i.lrge"]}],
        budget=[],
    ) == [
        "s: launcher.cpus[0]: -2: expected a whole number of at least 0",
        "s: launcher.stands_for.c7i.large[1]: -1: expected a whole number of at least 0",
        "s: launcher.stands_for.c8g.large[0]: 'one': expected a whole number of at least 0",
        "s: launcher.stands_for.c8g.large[1]: 2.5: expected a whole number of at least 0",
        "s: payload.values: 'x': expected a list, each item text; write it as a list: [x]",
        's: payload.files[0]: 5: expected text; put it in quotes: "5"',
        "s: agreement.requests[0]: expected text; add one",
        's: candidates[0].instances[0]: 5: expected text; put it in quotes: "5"',
        "s: candidates[1]: 7: expected a mapping with `instances`, `backend`, `settings`, `url`, `usd_per_hour`, "
        "`price_source`, …",
        "s: budget: []: expected a mapping with `minutes`, `usd`; add one",
        "s: candidates[2]: instances: unknown instance type 'c7i.lrge'; the nearest are c7i.large, c7i.xlarge, c7i.8xlarge: "
        f"`loadtest prices list` shows all {len(catalogue.instances)}",
    ]


def test_an_slo_that_is_missing_is_told_with_one_that_would_do(catalogue: Catalogue) -> None:
    document = changed()
    del document["slo"]
    with pytest.raises(UsageError, match=r"^s: slo: missing, expected what is asked; add `slo: p99<50ms`$"):
        parse_search_spec(document, catalogue, source="s")
    with pytest.raises(UsageError, match=r"^s: slos: 'p99<50ms': unknown key; did you mean `slo`\?$"):
        parse_search_spec(document | {"slos": "p99<50ms"}, catalogue, source="s")


def test_what_is_missing_is_told_with_the_rest(catalogue: Catalogue) -> None:
    document = {"slo": "p99<50mss,errors<0.1%,throughput", "budget": {"minutes": -1}}
    with pytest.raises(UsageError) as raised:
        parse_search_spec(document, catalogue, source="s")
    assert str(raised.value).splitlines() == [
        "s: model: missing, expected text or a mapping; add `model: …`",
        "s: launcher: missing, expected a mapping with `kind`, one of local, url, sagemaker, ec2; add `launcher: …`",
        "s: candidates: missing, expected a list of at least 1, each item a mapping with `instances`, `backend`, `settings`, "
        "`url`, `usd_per_hour`, `price_source`, …; add `candidates: …`",
        "s: budget.minutes: -1: expected a number greater than 0, at most 1440; left out, it is 45",
        's: SLO: cannot read "p99<50mss", expected such as "p99<50ms" or "errors<0.1%"',
        's: SLO: cannot read "throughput", expected such as "p99<50ms" or "errors<0.1%"',
    ]


def test_faults_of_the_model_are_its_own_and_told_beside_others(catalogue: Catalogue, tmp_path: Path) -> None:
    model = {"name": "a/b", "inputs": [{"name": "x", "datatype": "FP31", "shape": [-1, 4]}]}
    found = faults_of(catalogue, model=model, slo={"max_error_rate": 0.1})
    assert [line.split(": ")[1] for line in found] == ["slo", "model", "model"]
    path = tmp_path / "gateway.yaml"
    path.write_text(yaml.safe_dump({"models": [{"name": "m", "max_rows": -1, "backends": [{"kind": "torche"}]}]}))
    found = faults_of(catalogue, model="m", gateway=str(path), slo={"max_error_rate": 0.1})
    assert len(found) == 4  # the SLO, and the file's three


@pytest.mark.parametrize("text", ["", "- a list", "a: [unclosed", "\x00"])
def test_a_file_that_is_no_spec_says_so(catalogue: Catalogue, tmp_path: Path, text: str) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"spec\.yaml(:1:\d+|: expected a mapping)"):
        read_search_spec(path, catalogue)


def test_paths_of_a_spec_count_from_its_folder(catalogue: Catalogue, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "model.onnx").write_bytes(b"")
    (tmp_path / "gateway.yaml").write_text(
        "models: [{name: m, backends: [{kind: onnxruntime, model: model.onnx}, {kind: torch, model: 'own.module:factory'}]}]"
    )
    path = tmp_path / "inner" / "spec.yaml"
    own = [{"backend": name, "usd_per_hour": 1, "price_source": "own"} for name in ("onnxruntime", "torch")]
    third = {"backend": {"kind": "tensorrt", "model": "../model.onnx"}, "usd_per_hour": 1, "price_source": "own"}
    slo = {"p99_ms": 100, "min_agreement": None}
    spec = changed(gateway="../gateway.yaml", model="m", slo=slo, candidates=[*own, third])
    path.write_text(yaml.safe_dump(spec))
    models = [
        candidate.document["models"][0]["backends"][0]["model"] for candidate in read_search_spec(path, catalogue).candidates
    ]
    assert models == [str(tmp_path / "model.onnx"), "own.module:factory", str(tmp_path / "model.onnx")]
