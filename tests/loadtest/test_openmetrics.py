"""Runs as OpenMetrics: what prometheus_client and promtool read of it is what was measured."""

import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

import gateway
from loadtest.cli import main
from loadtest.errors import ExitCode
from loadtest.load.patterns import schedule
from loadtest.load.request_log import OK, TIMEOUT, RequestLog
from loadtest.load.worker import SenderReport
from loadtest.reports.openmetrics import named, render
from loadtest.reports.recommendation import to_json as recommendation_json
from loadtest.results import LoadSpec, RunResult, SloSpec, to_json
from loadtest.verdict.analysis import Ended, summarise
from loadtest.verdict.blocks import LATENCY_EDGES_MS
from tests.loadtest.examples import example_recommendation

SECONDS, RATE = 25, 100
SPEC = LoadSpec(
    "http://there", model="m", pattern="constant", rate_rps=RATE, duration_s=SECONDS, slo=SloSpec.parse("p99<40ms"), label="a"
)
BEGAN = "2026-11-22T20:00:00.250+00:00"


def measured(spec: LoadSpec = SPEC, *, took_ms: float = 12.0, began: str = BEGAN) -> RunResult:
    """Every tenth request takes 45 ms, every hundredth is answered 503, one times out; the first five seconds are warm-up."""
    plan = schedule(spec.pattern, rate_rps=spec.rate_rps, duration_s=spec.duration_s, seed=0)
    count = len(plan.intended_ns)
    log = RequestLog(count)
    took_ns = np.full(count, took_ms * 1e6)
    took_ns[::10] = 45e6
    for column, times in ((log.intended, plan.intended_ns), (log.dispatched, plan.intended_ns), (log.sent, plan.intended_ns)):
        np.asarray(column)[:] = times
    np.asarray(log.done)[:] = plan.intended_ns + took_ns.astype(np.int64)
    np.asarray(log.status)[:] = OK
    np.asarray(log.status)[5::100] = 503
    log.status[count // 2] = TIMEOUT
    report = SenderReport(count, 1.0, spec.duration_s, 0.1, 8, {}, busy=0.1)
    ended = Ended(began, "2026-11-22T20:00:25.300+00:00", plan.duration_ns, False)
    return summarise(replace(spec, warmup_s=5.0), plan, log, np.arange(count), [report], ended, None, None)


def documents(text: str) -> Iterator[str]:
    """What the parser can read of the file: it takes a histogram's second moment for a repetition of its first, and leaves most
    of it out. So each moment of it is a document of its own.
    """
    lines = text.splitlines()
    assert lines.pop() == "# EOF"
    own = [line for line in lines if "loadtest_request_duration_seconds" in line and not line.startswith("# HELP")]
    yield "\n".join([*(line for line in lines if line not in own), "# EOF\n"])
    for _, points in groupby(own[1:], key=lambda line: (line.partition('run="')[2].partition('"')[0], line.split()[-1])):
        yield "\n".join([own[0], *points, "# EOF\n"])


@cache
def parsed(text: str) -> dict[str, list[Sample]]:
    """By name, in the order of the file, which the parser has checked."""
    found: dict[str, list[Sample]] = defaultdict(list)
    for family in (family for document in documents(text) for family in text_string_to_metric_families(document)):
        for sample in family.samples:
            found[sample.name].append(sample)
    return found


def samples(text: str, name: str, **labels: str) -> list[Sample]:
    """Of one name and those labels."""
    return [sample for sample in parsed(text)[name] if labels.items() <= sample.labels.items()]


def last(text: str, name: str, **labels: str) -> float:
    return float(samples(text, name, **labels)[-1].value)


def times(found: Sequence[Sample]) -> list[float]:
    return [float(sample.timestamp) for sample in found]


def test_totals_are_those_of_the_run_with_its_warm_up() -> None:
    result = measured()
    text = render([named(result)])
    everything = result.requests + result.warmup_requests
    outcomes = {kind: last(text, "loadtest_requests_total", outcome=kind) for kind in ("ok", "http 503", "timeout")}
    assert sum(outcomes.values()) == everything == SECONDS * RATE
    assert (outcomes["http 503"], outcomes["timeout"]) == (SECONDS, 1)
    assert last(text, "loadtest_request_duration_seconds_count") == outcomes["ok"]
    assert last(text, "loadtest_request_duration_seconds_bucket", le="+Inf") == outcomes["ok"]
    met, missed = (last(text, "loadtest_slo_requests_total", result=kind) for kind in ("met", "missed"))
    assert (met, met + missed) == (sum(block.met for block in result.blocks), everything)
    # 45 ms are above the SLO's own edge of 40, and below the next.
    assert last(text, "loadtest_request_duration_seconds_bucket", le="0.04") == met
    assert last(text, "loadtest_request_duration_seconds_bucket", le="0.05") == outcomes["ok"]
    late = outcomes["ok"] - met
    assert last(text, "loadtest_request_duration_seconds_sum") == pytest.approx(met * 0.012 + late * 0.045)


def test_counters_begin_at_0_with_the_run_and_rise_at_the_end_of_each_block() -> None:
    result = measured()
    text = render([named(result)])
    began_s = datetime.fromisoformat(BEGAN).timestamp()
    for labels in ({"outcome": "ok"}, {"outcome": "timeout"}):
        found = samples(text, "loadtest_requests_total", **labels)
        assert found[0].value == 0
        assert [sample.value for sample in found] == sorted(sample.value for sample in found)
        assert times(found) == [pytest.approx(began_s + n, abs=2e-3) for n in range(SECONDS + 1)]
        assert {(sample.labels["run"], sample.labels["model"], sample.labels["protocol"]) for sample in found} == {
            ("a", "m", "rest-json")
        }


def test_the_rate_the_limit_and_the_verdict_are_there() -> None:
    result = measured()
    text = render([named(result)])
    assert {sample.value for sample in samples(text, "loadtest_target_requests_per_second")} == {RATE}
    assert {sample.value for sample in samples(text, "loadtest_slo_seconds", objective="p99<40ms")} == {0.04}
    assert {sample.labels["verdict"] for sample in samples(text, "loadtest_run_info")} == {"fail"}
    p99s = samples(text, "loadtest_request_duration_percentile_seconds", percentile="99")
    assert {sample.value for sample in p99s} == {0.045}
    rising = measured(replace(SPEC, pattern="ramp:from=0,to=200"))
    rates = [sample.value for sample in samples(render([named(rising)]), "loadtest_target_requests_per_second")]
    assert rates[0] < 20 < 180 < rates[-1]
    closed = replace(measured(replace(SPEC, slo=None)), started_at=BEGAN)
    told = render([named(replace(closed, blocks=tuple(replace(block, asked=0) for block in closed.blocks)))])
    assert not samples(told, "loadtest_target_requests_per_second")  # users ask when they are answered
    assert not samples(told, "loadtest_slo_requests_total")


def test_a_run_without_a_label_is_named_by_when_it_began() -> None:
    text = render([named(measured(replace(SPEC, label="")))])
    assert {sample.labels["run"] for sample in samples(text, "loadtest_requests_total")} == {BEGAN}


def test_the_edges_are_those_of_the_gateways_own_latency() -> None:
    model = {
        "name": "m", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1]}], "slo": {"p99_ms": 40},
        "backends": [{"kind": "synthetic"}],
    }  # fmt: skip
    with gateway.TestClient({"models": [model]}) as client:
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
        assert client.post("/v2/models/m/infer", json=body).status_code == 200
        page = client.get("/metrics").content.decode()
    served = [line for line in page.splitlines() if line.startswith("gateway_request_duration_seconds_bucket{")]
    edges = [line.partition('le="')[2].partition('"')[0] for line in served if 'model="m"' in line]
    ours = samples(render([named(measured())]), "loadtest_request_duration_seconds_bucket")
    assert edges == list(dict.fromkeys(sample.labels["le"] for sample in ours))
    assert len(edges) == len(LATENCY_EDGES_MS) + 2  # the SLO's, and infinity


example = cache(example_recommendation)  # a whole search is simulated


def search_folder(folder: Path, runs: int) -> Path:
    """As a search leaves it: a report, and each run's result; one more of an earlier search, and a file of somebody else."""
    found = example()
    (folder / "runs").mkdir(parents=True)
    (folder / "report.json").write_text(recommendation_json(found))
    count = sum(len(candidate.runs) for candidate in found.candidates)
    for number in (*range(runs), count):
        spec = replace(SPEC, label=f"candidate {number % 2}")
        began = f"2026-11-22T20:{number:02}:00+00:00"
        (folder / "runs" / f"{number:03}.json").write_text(to_json(measured(spec, began=began)))
    (folder / "runs" / "mine.json").touch()
    return folder / "report.json"


@pytest.mark.slow
def test_the_runs_of_a_search_are_one_file_each_with_its_candidate(tmp_path: Path) -> None:
    report, out = search_folder(tmp_path / "mine", 3), tmp_path / "runs.om"
    assert main(["report", str(report), "--format", "openmetrics", "--out", str(out)]) == 0
    text = out.read_text()
    runs = {(sample.labels["run"], sample.labels["candidate"]) for sample in samples(text, "loadtest_run_info")}
    assert runs == {("mine 000", "candidate 0"), ("mine 001", "candidate 1"), ("mine 002", "candidate 0")}
    for run, _ in runs:
        assert last(text, "loadtest_requests_total", run=run, outcome="ok") == SECONDS * RATE - SECONDS - 1


@pytest.mark.slow
def test_a_report_without_its_runs_is_told_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    report.write_text(recommendation_json(example()))
    assert main(["report", str(report), "--format", "openmetrics"]) == ExitCode.USAGE
    assert "no runs in" in capsys.readouterr().err


def test_a_saved_run_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = measured()
    (tmp_path / "r.json").write_text(to_json(result))
    assert main(["report", str(tmp_path / "r.json"), "--format", "openmetrics"]) == 0
    assert capsys.readouterr().out == render([named(result)])


def test_standard_output_takes_one_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "127.0.0.1:1", "--json", "-", "--openmetrics", "-"]) == ExitCode.USAGE
    assert "--json and --openmetrics: standard output takes one of them" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus's promtool is not here")
def test_promtool_takes_it_in(tmp_path: Path) -> None:
    file, blocks = tmp_path / "run.om", tmp_path / "blocks"
    result = measured()
    file.write_text(render([named(result), named(measured(replace(SPEC, label="b"), began="2026-11-22T21:59:50+00:00"))]))
    made = subprocess.run(
        ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(file), str(blocks)], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    (blocks / "wal").mkdir()  # a data directory has one
    dump = subprocess.run(["promtool", "tsdb", "dump", str(blocks)], capture_output=True, text=True, check=True).stdout
    rows = [line.rsplit(" ", 2) for line in dump.splitlines() if "loadtest_requests_total" in line and 'outcome="ok"' in line]
    values = {name: [] for name in ("a", "b")}  # type: dict[str, list[tuple[int, float]]]
    for labels, value, at_ms in rows:
        values["a" if 'run="a"' in labels else "b"].append((int(at_ms), float(value)))
    began_ms = round(datetime.fromisoformat(BEGAN).timestamp() * 1e3)
    assert sorted(values["a"])[0] == (began_ms, 0.0)
    assert sorted(values["a"])[-1] == (began_ms + SECONDS * 1000, SECONDS * RATE - SECONDS - 1)
    assert len(values["a"]) == len(values["b"]) == SECONDS + 1


def test_a_report_that_is_damaged_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(b'{"schema": "\xce"}')
    assert main(["report", str(path)]) == ExitCode.USAGE
    assert "r.json: cannot be read: " in capsys.readouterr().err
