import json
import math
from pathlib import Path

import pytest

from loadtest.errors import UsageError
from loadtest.results import LoadSpec, Objective, SloSpec, json_schema, read_load_spec, run_from_json, to_json
from tests.loadtest.made_results import run_result


def test_an_slo_is_read_from_text() -> None:
    slo = SloSpec.parse("p99<50ms, service.p50<=500us, p99.9<1s, errors<0.1%")
    assert slo.objectives == (
        Objective("latency", 99, 50),
        Objective("service", 50, 0.5),
        Objective("latency", 99.9, 1000),
    )
    assert slo.max_error_rate == pytest.approx(0.001)
    assert (slo.tightest_ms, slo.longest_ms) == (0.5, 1000)
    assert slo.strictest == Objective("latency", 99.9, 1000)
    assert SloSpec.parse(str(slo)) == slo


def test_of_equal_percentiles_the_tightest_is_the_strictest() -> None:
    assert SloSpec.parse("p99<50ms,service.p99<20ms,p50<5ms").strictest == Objective("service", 99, 20)
    only_errors = SloSpec.parse("errors<1%")
    assert (only_errors.strictest, only_errors.longest_ms) == (None, None)


def test_an_slo_is_read_from_yaml() -> None:
    assert SloSpec.from_yaml({"p99_ms": 50, "service_p50_ms": 5, "max_error_rate": 0.01}) == SloSpec.parse(
        "p99<50ms,service.p50<5ms,errors<1%"
    )
    assert SloSpec.from_yaml("p99<50ms") == SloSpec.parse("p99<50ms")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one"),
        ("p99", '"p99"'),
        ("p99<50", "p99<50"),
        ("p99<fast", "p99<fast"),
        ("p0<5ms", "between 0 and 100"),
        ("p100<5ms", "between 0 and 100"),
        ("p99<0ms", "above 0"),
        (f"p99<{'9' * 400}s", "SLO: p99: limit inf ms: expected a number above 0"),
        ("errors<200%", "below 1"),
        ("errors>1%", "errors>1%"),
    ],
)
def test_an_slo_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SloSpec.parse(text)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"p99_ms": "fast"},
        {"p99_ms": True},
        {"p99": 5},
        {},
        {"p99_ms": math.inf},
        {"p99_ms": 10**400},
        {"max_error_rate": -(10**400)},
    ],
)
def test_a_yaml_slo_that_cannot_be_read_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match="SLO"):
        SloSpec.from_yaml(value)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema": "other"}', '{"spec": 3}', "\x00"])
def test_a_file_that_is_no_result_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"base\.json"):
        run_from_json(text, source="base.json")


def test_a_spec_goes_to_json_without_header_values() -> None:
    assert "secret" not in to_json(LoadSpec("http://x", headers=(("Authorization", "secret"),)))


def test_a_result_from_before_the_hiccup_meter_is_read() -> None:
    document = json.loads(to_json(run_result(succeeded=100)))
    del document["machine"], document["stalls"]
    for block in document["blocks"]:
        del block["marked"]
    found = run_from_json(json.dumps(document), source="old.json")
    assert (found.machine, found.stalls, found.blocks[0].marked) == (None, (), 0)


def test_a_result_with_a_limit_that_is_no_longer_asked_for_is_read() -> None:
    result = run_result(LoadSpec("http://x", slo=SloSpec.parse("p99<86401s")), succeeded=100)
    assert run_from_json(to_json(result), source="old.json") == result


def test_the_schema_of_a_result_is_published() -> None:
    definitions = json_schema()["$defs"]
    assert {"RunResult", "Block", "LoadSpec", "ObjectiveResult"} <= set(definitions)


def test_the_published_schema_is_the_current_one() -> None:
    # To write it anew: json.dumps(json_schema(), indent=2, ensure_ascii=False)
    published = Path(__file__).parents[2] / "docs" / "schemas" / "run.json"
    assert json.loads(published.read_text(encoding="utf-8")) == json.loads(json.dumps(json_schema()))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rate": 500}, r"spec.json: rate: unknown; did you mean 'rate_rps'\? Fields: 'target'"),
        ({"warmup": 5}, "spec.json: warmup: unknown; did you mean 'warmup_s'"),
        ({"slo": {"objectives": [], "max_errors": 0.01}}, r"slo.max_errors: unknown; did you mean 'max_error_rate'\? Fields:"),
        ({"slo": {"objectives": [{"metric": "latency", "percent": 99}]}}, "slo.objectives.percent: unknown; did you mean"),
    ],
)
def test_a_field_of_a_spec_that_nobody_knows_is_refused(tmp_path: Path, fields: dict[str, object], words: str) -> None:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps({"target": "http://x", **fields}))
    with pytest.raises(UsageError, match=words):
        read_load_spec(path)


def test_a_spec_that_was_written_is_read(tmp_path: Path) -> None:
    spec = LoadSpec("http://x", slo=SloSpec.parse("p99<50ms,service.p50<5ms,errors<1%"), payloads=("a", "b"), warmup_s=3.0)
    path = tmp_path / "spec.json"
    path.write_text(to_json(spec))
    assert read_load_spec(path) == (spec, frozenset(LoadSpec.__dataclass_fields__))
    path.write_text("[]")
    with pytest.raises(UsageError, match="no load spec"):
        read_load_spec(path)
