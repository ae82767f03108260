"""What is counted arrives in the exposition, also that of another process of the node, in both text formats."""

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from gateway.config import ModelSection, parse_config
from gateway.engine import recorders
from gateway.engine.dispatcher import Dispatcher
from gateway.engine.lane_opener import LaneOpener
from gateway.engine.metric_blocks import FIELDS
from gateway.engine.metric_files import NodeFiles, written
from gateway.engine.metric_table import BY_NAME, TRITON_TABLE
from gateway.engine.metrics import FLUSH_INTERVAL_S, Metrics
from gateway.engine.process_facts import Used
from gateway.engine.recorders import LaneGauges
from gateway.engine.runner import Execution
from gateway.errors import BackendFailed, Code
from loadtest.verdict.statistics import percentiles
from tests.engine.simulated_runner import SimulatedRunner
from tests.simulation import SimulatedClock, run_simulated

MS = 1_000_000

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def exposed(metrics: Metrics) -> Samples:
    return samples(metrics.expose()[1].decode())


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def models(**slo_ms: float) -> tuple[ModelSection, ...]:
    listed = [{"name": name, "slo": {"p99_ms": limit}, "backends": [{"kind": "synthetic"}]} for name, limit in slo_ms.items()]
    return parse_config({"models": listed}, source="test").models


def batch(rows: int = 3, *, reason: str = "idle", closed_ns: int = 5 * MS, expected_ns: int = 0) -> Any:
    part = SimpleNamespace(request=SimpleNamespace(arrival_ns=closed_ns - 2 * MS))
    return SimpleNamespace(
        reason=reason, rows=rows, padded_rows=rows + 1, closed_ns=closed_ns, parts=[part] * rows, expected_ns=expected_ns
    )


def count_all(metrics: Metrics) -> None:
    """Something on every recorder."""
    lane = metrics.lane("m", "1", "cpu", max_rows=32)
    learned = (("64", 1, 0.001, 0.002), ("64", 32, 0.01, 0.02))
    lane.watch(lambda: LaneGauges(3, 2, 4, 1, service_s=learned, oldest_ns=7 * MS, shifts=1, cold_start_ns=9_000 * MS))
    lane.batch_done(batch(expected_ns=MS), Execution(6 * MS, 9 * MS), 10 * MS, failed=False)
    lane.batch_done(batch(), Execution(6 * MS, 9 * MS, error=BackendFailed("")), 10 * MS, failed=True)
    lane.retried()
    lane.dropped()
    routing = metrics.routing("m", "1")
    routing.routed("cpu", "cheapest")
    routing.copied("cpu", "shadow", "match")
    routing.busy("cpu", 0.5)
    routing.ejected("cpu")
    endpoint = metrics.endpoint("m", "1", "rest")
    endpoint.done(0, 10_000, 2 * MS, 2 * MS + 20_000, b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
    endpoint.failed(Code.OVERLOADED, 0, 1_000)
    endpoint.part(None)
    endpoint.part(1_000)
    endpoint.streamed(0, 0, 0, 1_000)
    cost = metrics.cost("m", "1", "cpu", 3.6, 4)
    cost.measure(lambda: 1_000)
    cost.hold()
    metrics.watch_models(lambda: [("m", "1", True)])
    metrics.watch_spans(lambda: {"sent": 3})


def test_every_metric_of_the_table_is_told_in_both_formats_of_the_types_and_units_it_has_there() -> None:
    metrics = Metrics(models(m=42), triton_names=True)
    count_all(metrics)
    metrics.watch_spans(lambda: {"exported": 7, "dropped": 1, "failed": 2})
    metrics.watch_certificates(lambda: {"certificate": 1.8e9})
    metrics._process.lagged(MS)  # what `keep_publishing` does once a second
    content_type, text = metrics.expose()
    assert content_type.startswith("text/plain; version=0.0.4")
    told = {family.name: family for family in text_string_to_metric_families(text.decode())}
    for name, metric in BY_NAME.items():
        family = told.pop(name.removesuffix("_total"))
        assert (family.type, family.documentation) == (metric.kind, metric.meaning)
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert labels == set(metric.labels), name
    assert {family.name for family in told.values()} == {metric.name for metric in TRITON_TABLE}

    content_type, text = metrics.expose(openmetrics=True)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert text.endswith(b"\n# EOF\n")
    found = {family.name: family for family in openmetrics_families(text.decode())}
    for name, metric in BY_NAME.items():
        family = found[name.removesuffix("_total")]
        assert family.type == metric.kind
        assert family.unit == (metric.unit if family.name.endswith(f"_{metric.unit}") else "")
    assert found["nv_inference_count"].type == "unknown"


def test_requests_are_counted_by_model_protocol_and_code() -> None:
    metrics = Metrics()
    endpoint = metrics.endpoint("m", "1", "rest")
    endpoint.done(0, 10_000, 2_000_000, 2_020_000)
    endpoint.failed(Code.OVERLOADED, 0, 1_000)
    found = exposed(metrics)
    labels = {"model": "m", "version": "1", "protocol": "rest"}
    assert found[key("gateway_requests_total", code="ok", **labels)] == 1
    assert found[key("gateway_requests_total", code="overloaded", **labels)] == 1
    assert found[key("gateway_request_duration_seconds_sum", **labels)] == 0.00202
    assert found[key("gateway_stage_duration_seconds_bucket", stage="decode", le="1e-05", **labels)] == 1


def test_a_models_own_slo_is_a_bucket_edge_and_no_others() -> None:
    metrics = Metrics(models(m=42, n=7))
    for name in ("m", "n", "without"):
        metrics.endpoint(name, "1", "rest").done(0, 0, 0, 42 * MS)
    found = exposed(metrics)
    edges = {name: {dict(labels)["le"] for family, labels in found if family.endswith("duration_seconds_bucket")
                    and dict(labels)["model"] == name and "stage" not in dict(labels)} for name in "mn"}  # fmt: skip
    assert edges["m"] ^ edges["n"] == {"0.042", "0.007"}
    labels = {"model": "m", "version": "1", "protocol": "rest"}
    assert found[key("gateway_request_duration_seconds_bucket", le="0.042", **labels)] == 1
    assert found[key("gateway_request_duration_seconds_bucket", le="0.025", **labels)] == 0


def test_attainment_counts_late_and_failed_ones_as_missed_and_what_the_client_got_wrong_as_neither() -> None:
    metrics = Metrics(models(m=42))
    endpoint = metrics.endpoint("m", "1", "grpc")
    endpoint.done(0, 0, 0, 42 * MS)
    endpoint.done(0, 0, 0, 42 * MS + 1)
    for code in Code:
        endpoint.failed(code, 0, MS)
    found = exposed(metrics)
    labels = {"model": "m", "version": "1", "protocol": "grpc"}
    assert found[key("gateway_slo_requests_total", result="met", **labels)] == 1
    assert found[key("gateway_slo_requests_total", result="missed", **labels)] == 1 + 7
    metrics.endpoint("without", "1", "grpc").done(0, 0, 0, 1)
    assert not [
        labels for name, labels in exposed(metrics) if name == "gateway_slo_requests_total" and "without" in str(labels)
    ]


def test_an_answer_in_parts_counts_once_and_when_it_has_ended_by_its_first_part() -> None:
    metrics = Metrics(models(m=42))
    endpoint = metrics.endpoint("m", "1", "grpc")
    labels = {"model": "m", "version": "1", "protocol": "grpc"}

    def told() -> tuple[float, ...]:
        found = exposed(metrics)
        met, missed = (found[key("gateway_slo_requests_total", result=result, **labels)] for result in ("met", "missed"))
        timed = found.get(key("gateway_request_duration_seconds_count", **labels), 0)
        assert timed == found[key("gateway_requests_total", code="ok", **labels)]
        return met, missed, found[key("gateway_parts_total", **labels)]

    endpoint.part(None)
    assert told() == (0, 0, 1)
    endpoint.streamed(0, 0, 0, 40 * MS)
    assert told() == (1, 0, 1)
    endpoint.part(None)
    endpoint.part(MS)
    endpoint.streamed(0, 0, 0, 50 * MS)
    assert told() == (1, 1, 3)
    before = exposed(metrics)
    for code in (Code.BACKEND_FAILED, Code.CANCELLED):
        endpoint.part(None)
        endpoint.failed(code, 0, 60 * MS)
    assert told() == (1, 2, 5)  # nobody waited for the end of one
    for name in ("gateway_request_duration_seconds_sum", "gateway_last_inference_timestamp_seconds"):
        assert exposed(metrics)[key(name, **labels)] == before[key(name, **labels)]


def test_when_a_stream_has_ended_is_when_the_last_request_was_answered() -> None:
    metrics = Metrics()
    endpoint = metrics.endpoint("m", "1", "grpc")
    last = key("gateway_last_inference_timestamp_seconds", model="m", version="1", protocol="grpc")
    began_ns, before_s = time.monotonic_ns() - 100_000 * MS, time.time()
    endpoint.streamed(began_ns, began_ns, began_ns, began_ns + MS)
    assert exposed(metrics)[last] >= before_s
    endpoint.done(began_ns, began_ns, began_ns, began_ns + MS)
    assert exposed(metrics)[last] >= before_s


def test_a_quantile_of_the_histogram_lies_in_the_bucket_of_loadtests() -> None:
    metrics = Metrics(models(m=42))
    took_ns = np.random.default_rng(7).lognormal(np.log(30 * MS), 0.7, 5000).astype(np.int64)
    endpoint = metrics.endpoint("m", "1", "rest")
    for one_ns in took_ns.tolist():
        endpoint.done(0, 0, 0, one_ns)
    name = "gateway_request_duration_seconds_bucket"
    buckets = {float(dict(labels)["le"]): count for (family, labels), count in exposed(metrics).items() if family == name}
    seen = percentiles(took_ns)
    for share, seen_ms in ((0.5, seen.p50), (0.9, seen.p90), (0.95, seen.p95), (0.99, seen.p99), (0.999, seen.p999)):
        edges = sorted(buckets)
        ours = next(edge for edge in edges if buckets[edge] >= share * len(took_ns))
        assert ours == next(edge for edge in edges if seen_ms / 1e3 <= edge)


def test_what_a_lane_did_is_told_by_backend() -> None:
    metrics = Metrics()
    count_all(metrics)
    found = exposed(metrics)
    lane = {"model": "m", "version": "1", "backend": "cpu"}
    assert found[key("gateway_batch_rows_bucket", le="4.0", **lane)] == 2
    assert found[key("gateway_batch_rows_bucket", le="2.0", **lane)] == 0
    assert key("gateway_batch_rows_bucket", le="64.0", **lane) not in found  # no batch can have so many
    assert found[key("gateway_batch_rows_sum", **lane)] == 6
    assert found[key("gateway_padding_rows_total", **lane)] == 2
    assert found[key("gateway_executions_total", **lane)] == 2
    assert found[key("gateway_failed_executions_total", **lane)] == 1
    assert found[key("gateway_compute_seconds_total", **lane)] == 0.006
    assert found[key("gateway_worker_busy_seconds_total", **lane)] == 0.01
    assert found[key("gateway_service_seconds_total", time="actual", **lane)] == 0.005
    assert found[key("gateway_queue_age_seconds", **lane)] == 0.007
    assert found[key("gateway_stage_duration_seconds_count", stage="queue", **lane)] == 6
    assert found[key("gateway_service_time_seconds", bucket="64", rows="32", estimate="p90", **lane)] == 0.02


def test_a_closed_lane_counts_on_with_the_one_that_follows_it_and_shows_no_state() -> None:
    metrics = Metrics()
    lane = {"model": "m", "version": "1", "backend": "cpu"}
    for _ in range(2):
        count_all(metrics)
        metrics._lanes[0].watch(None)
    found = exposed(metrics)
    assert found[key("gateway_executions_total", **lane)] == 4
    assert key("gateway_workers", **lane) not in found


def test_shifts_do_not_go_back_when_what_was_learned_of_a_shape_is_forgotten() -> None:
    metrics = Metrics()
    shifts = [3, 1]
    metrics.lane("m", "1", "cpu").watch(lambda: LaneGauges(0, 0, 1, 0, shifts=shifts.pop(0)))
    told = key("gateway_service_shifts_total", model="m", version="1", backend="cpu")
    assert [exposed(metrics)[told] for _ in range(2)] == [3, 3]


def test_labels_may_hold_anything_a_name_may() -> None:
    metrics = Metrics()
    name = 'a "quoted" 100 % \\ ü {x}'
    metrics.endpoint(name, "1", "rest").done(0, 0, 0, 1)
    assert exposed(metrics)[key("gateway_requests_total", model=name, version="1", protocol="rest", code="ok")] == 1
    assert list(openmetrics_families(metrics.expose(openmetrics=True)[1].decode()))


def test_a_traced_request_is_an_exemplar_of_its_bucket_in_openmetrics_only() -> None:
    metrics = Metrics()
    count_all(metrics)
    assert b"trace_id" not in metrics.expose()[1]
    found = [
        sample
        for family in openmetrics_families(metrics.expose(openmetrics=True)[1].decode())
        for sample in family.samples
        if sample.exemplar
    ]
    (sample,) = found
    assert (sample.name, sample.labels["le"]) == ("gateway_request_duration_seconds_bucket", "0.0025")
    assert sample.exemplar.labels == {"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"}
    assert sample.exemplar.value == 0.00202


def test_an_exemplar_stands_with_its_own_model_beside_others() -> None:
    metrics = Metrics(models(m=42))
    for name in ("idle", "m", "without", "n"):
        endpoint = metrics.endpoint(name, "1", "rest")
        if name != "idle":
            endpoint.done(0, 0, 0, 2 * MS, f"00-{name * 32}-{name * 16}-01".encode() if name in "mn" else b"")
    families = openmetrics_families(metrics.expose(openmetrics=True)[1].decode())
    found = [sample for family in families for sample in family.samples if sample.exemplar]
    assert [(one.labels["model"], one.labels["le"], one.exemplar.labels["trace_id"]) for one in found] == [
        ("m", "0.0025", "m" * 32),
        ("n", "0.0025", "n" * 32),
    ]


def test_switched_off_nothing_is_counted_or_told() -> None:
    metrics = Metrics(models(m=42), enabled=False)
    count_all(metrics)
    assert metrics.expose()[1] == b""
    assert not metrics.statistics({("m", "1")})


def test_tritons_names_have_tritons_labels_units_and_reasons() -> None:
    metrics = Metrics(triton_names=True)
    count_all(metrics)
    metrics.endpoint("m", "1", "grpc").failed(Code.CANCELLED, 0, MS)
    text = metrics.expose()[1].decode()  # whose names prometheus_client's parser would give a _total
    found = {name: float(value) for name, value in re.findall(r"^(nv_\S+) (\S+)$", text, re.MULTILINE)}
    model = 'model="m",version="1"'
    assert found[f"nv_inference_request_success{{{model}}}"] == 2
    assert found[f'nv_inference_request_failure{{{model},reason="REJECTED"}}'] == 1
    assert found[f'nv_inference_request_failure{{{model},reason="CANCELED"}}'] == 1
    assert found[f"nv_inference_count{{{model}}}"] == 3
    assert found[f"nv_inference_exec_count{{{model}}}"] == 2
    assert found[f"nv_inference_queue_duration_us{{{model}}}"] == 12_000
    assert found[f"nv_inference_pending_request_count{{{model}}}"] == 2


# cost


def told_usd(metrics: Metrics) -> tuple[float, float]:
    found = exposed(metrics)
    labels = {"model": "m", "version": "1", "backend": "cpu"}
    busy, idle = (found[key("gateway_cost_usd_total", state=state, **labels)] for state in ("busy", "idle"))
    return busy, idle


@pytest.mark.parametrize(
    ("backend", "usd_per_hour"),
    [({"kind": "triton", "url": "gpu:8001", "model": "m"}, 6.0), ({"kind": "synthetic"}, 18.0)],
)
def test_another_server_costs_once_whichever_processes_ask_it(
    backend: dict[str, Any], usd_per_hour: float, tmp_path: Path
) -> None:
    model = ModelSection.model_validate(
        {"name": "m", "batching": {"probe_s": 0}, "backends": [{**backend, "name": "b", "usd_per_hour": 6.0}]}
    )
    processes = [Metrics(directory=tmp_path) for _ in range(3)]

    async def main(clock: SimulatedClock) -> None:
        for metrics in processes:
            opener = LaneOpener(lambda *_: SimulatedRunner(clock, fixed_ns=MS), metrics=metrics, clock=clock, processes=3)
            lanes, _ = await opener.open(model)
            dispatcher = Dispatcher(lanes, model, metrics, clock, processes=3)
            (candidate,) = dispatcher.router.candidates
            recorded = lanes[0].batcher.ring.settings
            assert candidate.worker_usd_per_hour == recorded.session_usd_per_hour == pytest.approx(usd_per_hour / 3)
            metrics.flush()

    run_simulated(main)
    found = exposed(processes[0])
    assert found[key("gateway_cost_usd_per_hour", model="m", version="1", backend="b")] == pytest.approx(usd_per_hour)


@pytest.mark.parametrize(
    ("placement", "processes", "lent"), [("replicas", 2, True), ("replicas", 1, False), ("embedded", 2, False)]
)
def test_the_recording_knows_whether_other_processes_use_the_sessions_too(placement: str, processes: int, lent: bool) -> None:
    backend = {"kind": "synthetic", "placement": placement}
    model = ModelSection.model_validate({"name": "m", "batching": {"probe_s": 0}, "backends": [backend]})

    async def main(clock: SimulatedClock) -> None:
        opener = LaneOpener(lambda *_: SimulatedRunner(clock, fixed_ns=MS), metrics=Metrics(), clock=clock, processes=processes)
        lanes, _ = await opener.open(model)
        assert lanes[0].batcher.ring.settings.lent is lent

    run_simulated(main)


def test_a_changed_price_counts_from_then_on() -> None:
    metrics = Metrics()
    metrics.started()
    cost = metrics.cost("m", "1", "cpu", 3600.0, 1)  # a dollar a second
    busy_ns = 0
    cost.measure(lambda: busy_ns)
    cost.hold()
    since_ns = time.monotonic_ns()
    busy_ns = 2_000 * MS
    cost.reprice(7200.0, since_ns + 10_000 * MS)
    busy_ns += 3_000 * MS
    told, per_hour, _ = cost.state(since_ns + 15_000 * MS)
    assert told["busy"] == pytest.approx(2 + 3 * 2)
    assert sum(told.values()) == pytest.approx(10 + 5 * 2, abs=0.1)
    assert per_hour == 7200.0


def test_what_is_held_from_the_start_costs_since_the_process_began_through_a_reload_and_until_it_is_let_go() -> None:
    began_s = process_began_s(os.getpid())
    metrics = Metrics()
    cost = metrics.cost("m", "1", "cpu", 3600.0, 2)  # a dollar a second
    cost.hold()
    metrics.started()
    lane = metrics.lane("m", "1", "cpu")
    lane.watch(lambda: LaneGauges(0, 0, 2, 1, running_ns=500 * MS))
    lane.batch_done(batch(), Execution(6 * MS, 9 * MS), 505 * MS, failed=False)
    busy, idle = told_usd(metrics)
    assert busy == pytest.approx(0.5)  # half of it is one of two sessions for a second: what ended, and what runs
    assert busy + idle == pytest.approx(uptime_s() - began_s, rel=0.01)
    cost.hold()  # the new lane of a reload, beside the old
    lane.watch(None)
    assert sum(told_usd(metrics)) == pytest.approx(uptime_s() - began_s, rel=0.01)
    cost.release()
    held = sum(told_usd(metrics))
    assert sum(told_usd(metrics)) == held
    assert exposed(metrics)[key("gateway_cost_usd_per_hour", model="m", version="1", backend="cpu")] == 0


def uptime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def process_began_s(pid: int) -> float:
    """As the operating system has it, after the machine's start."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")


# several processes

PROGRAM = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from gateway.engine.metrics import Metrics
    from gateway.engine.recorders import LaneGauges
    metrics = Metrics(directory=Path(sys.argv[1]))
    metrics.endpoint("m", "1", "rest").done(0, 0, 0, 1000)
    lane = metrics.lane("m", "1", "cpu")
    lane.watch(lambda: LaneGauges(0, 0, 1, 0))
    metrics.flush()
    print("ready", flush=True)
    time.sleep(60)
""")


@pytest.fixture
def others(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that have counted a request each, have a worker each, and live."""
    started = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    yield started
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_process_answers_for_all_of_its_node_and_those_that_were_killed_count_on(
    others: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    metrics = Metrics(directory=tmp_path)
    metrics.endpoint("m", "1", "rest").done(0, 0, 0, 1000)
    requests = key("gateway_requests_total", model="m", version="1", protocol="rest", code="ok")
    workers = key("gateway_workers", model="m", version="1", backend="cpu")
    processes = key("gateway_processes", role="ingress")
    found = exposed(metrics)
    assert (found[requests], found[workers], found[processes]) == (3, 2, 3)
    others[0].send_signal(signal.SIGKILL)
    others[0].wait()
    found = exposed(metrics)
    assert (found[requests], found[workers], found[processes]) == (3, 1, 2)
    others[1].kill()
    others[1].wait()
    again = Metrics(directory=tmp_path)  # which makes one file of theirs
    assert len(list(tmp_path.glob("*.blocks"))) == 2
    metrics.endpoint("m", "1", "rest").done(0, 0, 0, 1000)
    metrics.flush()
    for each in (metrics, again):
        found = exposed(each)
        assert found[requests] == 4
        assert workers not in found
        assert found[key("gateway_request_duration_seconds_sum", model="m", version="1", protocol="rest")] == 4e-6


@pytest.mark.parametrize("folded", [False, True])
def test_after_an_slo_has_changed_no_latency_of_before_counts_under_its_edge(tmp_path: Path, folded: bool) -> None:
    def ended(slo_ms: float) -> None:
        metrics = Metrics(models(m=slo_ms), directory=tmp_path)
        for took_ms in (20, 33, 45, 20_000):
            metrics.endpoint("m", "1", "rest").done(0, 0, 0, took_ms * MS)
        metrics.flush()
        assert metrics._files is not None
        metrics._files.close()  # as if the process had ended

    for slo_ms in (40, 30, 35) if folded else (40,):
        ended(slo_ms)
    times = 3 if folded else 1
    labels = {"model": "m", "version": "1", "protocol": "rest"}
    buckets = "gateway_request_duration_seconds_bucket"
    for own in (0, 1):  # a process that has not been asked yet, and one that has
        metrics = Metrics(models(m=30), directory=tmp_path)
        for _ in range(own):
            metrics.endpoint("m", "1", "rest").done(0, 0, 0, 33 * MS)
        found = exposed(metrics)
        assert key(buckets, le="0.04", **labels) not in found
        assert found[key(buckets, le="0.025", **labels)] == found[key(buckets, le="0.03", **labels)] == times
        assert found[key(buckets, le="0.05", **labels)] == 3 * times + own
        assert found[key(buckets, le="+Inf", **labels)] == 4 * times + own
        met = key("gateway_slo_requests_total", result="met", **labels)
        assert found[met] == (2 + 1 + 2 if folded else 2)  # as each process has counted them
    strange = exposed(Metrics(directory=tmp_path))  # does not know the model
    assert strange[key(buckets, le="0.05", **labels)] == 3 * times + 1
    assert key(buckets, le="0.03", **labels) not in strange


def test_processor_time_of_sessions_does_not_go_back_while_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no longer asked for, and has not been waited for yet."""
    living = {7: Used(5_000 * MS, 100)}
    monkeypatch.setattr(recorders, "used_by", lambda pids: [living[pid] for pid in pids])
    monkeypatch.setattr(recorders, "ended_children_cpu_ns", lambda: 0)
    metrics = Metrics(session_pids=lambda: tuple(living))
    spent = key("gateway_process_cpu_seconds_total", role="session")
    assert exposed(metrics)[spent] == 5
    living.clear()
    found = exposed(metrics)
    assert (found[spent], found[key("gateway_processes", role="session")]) == (5, 0)


def test_what_a_node_is_stands_there_once_though_replicas_publish_beside(tmp_path: Path) -> None:
    Metrics(directory=tmp_path, role="replica").flush()
    metrics = Metrics(directory=tmp_path, instance_type="c7i.large")
    found = [dict(labels) for name, labels in exposed(metrics) if name == "gateway_info"]
    assert [labels["instance_type"] for labels in found] == ["c7i.large"]


def test_a_process_that_makes_one_file_of_several_holds_nobody_up(tmp_path: Path) -> None:
    metrics, other, starting = Metrics(directory=tmp_path), Metrics(directory=tmp_path), NodeFiles(tmp_path)
    requests = key("gateway_requests_total", model="m", version="1", protocol="rest", code="ok")
    other.endpoint("m", "1", "rest").done(0, 0, 0, 1000)
    other.flush()
    assert exposed(metrics)[requests] == 1
    with starting.folding():
        assert exposed(metrics)[requests] == 1


def test_files_are_kept_from_those_who_remove_what_is_old(tmp_path: Path) -> None:
    ended = NodeFiles(tmp_path)
    list(ended.publish([]))
    ended.close()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    for path, mtime_ns in before.items():
        os.utime(path, ns=(0, mtime_ns))
    list(NodeFiles(tmp_path).publish([]))
    now_s = time.time()
    assert len(before) == 3
    assert all(path.stat().st_atime > now_s - 60 for path in before)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_statistics_are_of_the_models_that_are_asked_for_and_of_all_processes(tmp_path: Path) -> None:
    metrics, other = Metrics(directory=tmp_path), Metrics(directory=tmp_path)
    for each in (metrics, other):
        count_all(each)
        each.endpoint("n", "1", "rest").done(0, 0, 0, 1)
        each.flush()
    found = metrics.statistics({("m", "1")})["m", "1"]
    assert (found.success.count, found.rows, found.stages["queue"].count) == (4, 6, 12)
    assert found.executions_by_rows[3].count == 4


def test_a_directory_that_cannot_be_used_is_told_and_this_process_counts_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics(directory=tmp_path / "missing")
    assert "do not see each other's metrics" in caplog.text
    metrics.endpoint("m", "1", "rest").done(0, 0, 0, 1)
    assert exposed(metrics)[key("gateway_requests_total", model="m", version="1", protocol="rest", code="ok")] == 1


def test_what_cannot_be_written_for_others_is_told_once_and_written_when_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, away = tmp_path / "metrics", tmp_path / "away"
    directory.mkdir()
    metrics, other = Metrics(directory=directory), Metrics(directory=directory)
    metrics.endpoint("m", "1", "rest").done(0, 0, 0, 1000)
    directory.rename(away)
    for _ in range(2):
        metrics.flush()
    assert caplog.text.count("other processes see old metrics") == 1
    assert exposed(other)[key("gateway_processes", role="ingress")] == 1  # its own
    away.rename(directory)
    metrics.flush()
    assert exposed(other)[key("gateway_requests_total", model="m", version="1", protocol="rest", code="ok")] == 1


PROMETHEUS = (  # as Prometheus 3.5 sends it
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        (PROMETHEUS, True),
        ("application/openmetrics-text", True),
        ("Application/OpenMetrics-Text; Version=1.0.0; q=0.5, */*;q=0.5", True),
        ("application/openmetrics-text;q=0.4, text/plain;q=0.3", True),
        ("application/openmetrics-text;version=0.0.1", True),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=0, */*", False),
        ("application/openmetrics-text;q=0.3, text/plain;q=0.4", False),
        ("application/openmetrics-text;version=2.0.0, text/plain;q=0.5", False),
        ("application/openmetrics-text;q=high, */*", False),
        ("application/openmetrics-textual", False),
        ("*/*", False),
        ("", False),
    ],
)
def test_a_scrape_is_in_the_format_that_its_client_likes_best(accept: str, openmetrics: bool) -> None:
    content_type, body = asyncio.run(Metrics().scrape(accept.encode()))
    assert content_type.startswith("application/openmetrics-text; version=1.0.0" if openmetrics else "text/plain; ")
    assert body.endswith(b"# EOF\n") == openmetrics


# in slices


def test_a_scrape_is_what_there_is_and_those_who_come_meanwhile_share_the_next() -> None:
    metrics = Metrics(models(m=42))

    async def main() -> None:
        count_all(metrics)
        for number in range(500):  # more than fits into a slice
            metrics.endpoint(f"m{number}", "1", "rest").done(0, 0, 0, 1)
        first, second, third = await asyncio.gather(*(metrics.scrape(b"*/*") for _ in range(3)))
        assert second[1].count(b"\n") == metrics.expose()[1].count(b"\n")
        assert second[1] is third[1]
        assert (await metrics.scrape(b"application/openmetrics-text; version=1.0.0"))[1].endswith(b"# EOF\n")
        assert first[0].startswith("text/plain")

    asyncio.run(main())


def test_text_that_has_not_changed_is_not_made_again() -> None:
    metrics = Metrics(models(m=42))
    count_all(metrics)
    other = metrics.endpoint("n", "1", "rest")
    metrics.expose()
    pages = [page for kind in ("edge", "lane", "model") for page in metrics._text._pages[kind]]
    before = [list(page.texts) for page in pages]
    other.failed(Code.OVERLOADED, 0, 1)
    metrics.expose()
    changed = [
        (page.keys[0].kind, FIELDS[page.keys[0].kind][index].name)
        for page, then in zip(pages, before, strict=True)
        for index, text in enumerate(page.texts)
        if text is not then[index]
    ]
    assert changed == [("edge", "gateway_requests_total"), ("edge", "gateway_failed_request_seconds_total")]


def test_models_that_come_and_go_leave_the_text_of_the_others_as_it_was() -> None:
    metrics, fresh = Metrics(models(m=42)), Metrics(models(m=42))

    def told(metrics: Metrics) -> list[str]:
        lines = metrics.expose()[1].decode().splitlines()
        return sorted(line for line in lines if 'model="' in line)

    for number in range(100):  # more than a page has
        metrics.endpoint(f"m{number}", "1", "rest").done(0, 0, 0, MS)
    metrics.expose()
    for number in range(100):
        if number != 50:
            metrics.forget(f"m{number}")
    metrics.expose()
    metrics.endpoint("m7", "1", "rest").failed(Code.OVERLOADED, 0, MS)
    metrics.endpoint("m50", "1", "rest").done(0, 0, 0, MS)
    for _ in range(2):
        fresh.endpoint("m50", "1", "rest").done(0, 0, 0, MS)
    fresh.endpoint("m7", "1", "rest").failed(Code.OVERLOADED, 0, MS)
    drop = "gateway_last_inference_timestamp_seconds"
    assert [one for one in told(metrics) if drop not in one] == [one for one in told(fresh) if drop not in one]
    assert sum(len(page.keys) for page in metrics._text._pages["edge"]) == 2


def test_a_model_that_comes_again_with_another_slo_has_its_edges() -> None:
    metrics = Metrics(models(m=42))
    for limit in (42, 43):
        metrics.forget("m")
        metrics.add(models(m=limit))
        metrics.endpoint("m", "1", "rest").done(0, 0, 0, limit * MS)
        found = exposed(metrics)
        labels = {"model": "m", "version": "1", "protocol": "rest", "le": f"{limit / 1e3}"}
        assert found[key("gateway_request_duration_seconds_bucket", **labels)] == 1


def test_others_have_their_turns_during_a_scrape() -> None:
    metrics = Metrics()
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> None:
        for number in range(500):
            metrics.endpoint(f"m{number}", "1", "rest").done(0, 0, 0, 1)
        running = asyncio.create_task(others())
        await metrics.scrape(b"")
        running.cancel()

    asyncio.run(main())
    assert turns > 10  # of some 30 ms, a quarter of one at a time


def test_what_a_scrape_keeps_is_nothing_to_the_garbage_collector(tmp_path: Path) -> None:
    metrics, other = Metrics(directory=tmp_path), Metrics(directory=tmp_path)
    count_all(metrics)
    count_all(other)
    other.flush()
    blocks = asyncio.run(metrics.counted())
    gc.collect()
    assert {key.kind for key in blocks} == FIELDS.keys()
    assert not [(key.kind, value) for key, state in blocks.items() for value in state if gc.is_tracked(value)]


def test_no_look_for_garbage_goes_through_all_that_a_scrape_makes(tmp_path: Path) -> None:
    metrics = Metrics(directory=tmp_path)
    young: list[int] = []

    async def main() -> None:
        for number in range(1000):
            metrics.endpoint(f"m{number}", "1", "rest").done(0, 0, 0, 1)
        await metrics.scrape(b"")
        usual = gc.get_threshold()
        gc.set_threshold(700, 10, 10)  # whatever a test before has left: a gateway that was started here looks less often
        gc.collect()  # what was made before is not of the scrape
        gc.callbacks.append(note)
        try:
            await metrics.scrape(b"")
        finally:
            gc.callbacks.remove(note)
            gc.set_threshold(*usual)

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            young.append(len(gc.get_objects(generation=0)))

    asyncio.run(main())
    assert 0 < max(young) < 2000, "of some 7000"


def test_the_files_of_processes_are_written_and_read_a_block_at_a_time(tmp_path: Path) -> None:
    files, other = NodeFiles(tmp_path), NodeFiles(tmp_path)
    blocks = [("edge", (f"m{number}", "1", "rest"), ({"ok": number}, (1, 2, 3), None)) for number in range(500)]
    assert len(list(other.publish(blocks))) == 500
    reading = files.others()
    slices = 0
    while True:
        try:
            next(reading)
        except StopIteration as end:
            (published,) = end.value
            break
        slices += 1
    assert slices == 500
    assert published.blocks == blocks
    assert len(list(files.others())) == 0  # it has not changed


def test_a_file_of_another_process_that_is_damaged_is_left_out(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path)
    (tmp_path / "ingress-1-a.blocks").write_bytes(
        written([("edge", ("m", "1", "rest"), ({"ok": 1},))]).replace(b"rest", b"re\xcet")
    )
    metrics = Metrics(directory=tmp_path)
    list(files.publish([("edge", ("m", "1", "rest"), ({"ok": 2}, *[None] * 9))]))
    assert exposed(metrics)[key("gateway_requests_total", model="m", version="1", protocol="rest", code="ok")] == 2


def test_what_was_counted_earlier_is_not_published_over_what_was_later(tmp_path: Path) -> None:
    metrics, files = Metrics(directory=tmp_path), NodeFiles(tmp_path)
    requests = key("gateway_requests_total", model="m", version="1", protocol="rest", code="ok")
    earlier = files.publish([("edge", ("m", "1", "rest"), ({"ok": 1}, *[None] * 9))])
    next(earlier)
    list(files.publish([("edge", ("m", "1", "rest"), ({"ok": 2}, *[None] * 9))]))
    list(earlier)
    assert exposed(metrics)[requests] == 2


def test_lag_is_measured_while_it_publishes() -> None:
    metrics = Metrics()

    async def main() -> None:
        publishing = asyncio.create_task(metrics.keep_publishing(0.0))
        for _ in range(10):
            await asyncio.sleep(0)
        publishing.cancel()

    asyncio.run(main())
    assert FLUSH_INTERVAL_S >= 1
    assert exposed(metrics)[key("gateway_loop_lag_seconds_count", role="ingress")] >= 1
