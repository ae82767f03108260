"""Whole runs against real sockets: what a server can do to a load test, and what the result then says."""

import asyncio
import csv
import json
import resource
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from loadtest.errors import Interrupted, TargetError, UsageError
from loadtest.load.request_log import RequestLog, write_csv
from loadtest.measuring.generator import measure
from loadtest.measuring.progress import Progress
from loadtest.results import LoadSpec, Protocol, RunResult, SloSpec, run_from_json, to_json
from loadtest.verdict.statistics import histogram, nearest_rank
from tests.loadtest.scripted_server import ScriptedServer, scripted_server

pytestmark = pytest.mark.slow

SPEC = LoadSpec(
    "",
    model="m",
    pattern="constant",
    rate_rps=200,
    duration_s=0.5,
    timeout_s=2.0,
    warmup_s=0.0,
    slo=SloSpec.parse("p99<200ms,errors<1%"),
)

BUSY = ("the machine was busy with other work", "send lag p99 ", "only ", "requests waited ", "the generator took ")


def run(
    spec: LoadSpec = SPEC, script: Callable[[ScriptedServer], None] | None = None, **options: Any
) -> tuple[RunResult, ScriptedServer]:
    """Measure the scripted server. script: sets it up."""

    async def scenario() -> tuple[RunResult, ScriptedServer]:
        async with scripted_server() as server:
            if script:
                script(server)
            return await measure(replace(spec, target=server.url), **options), server

    return uvloop.run(scenario())


def missed(result: RunResult) -> bool:
    """Whether it missed its SLO in all: a fail, or no verdict where the machine was too busy for one, which is then told."""
    assert result.verdict == ("fail" if result.valid else None)
    assert all(reason.startswith(BUSY) for reason in result.reasons)
    return len(result.objectives) == 2 and all(each.attainment.estimate < each.required for each in result.objectives)


def test_every_request_of_the_schedule_is_sent_and_answered() -> None:
    result, server = run()
    assert (result.requests, result.succeeded, result.errors) == (100, 100, {})
    assert server.inferences == 100
    assert result.digests.keys() == {"requests", "headers"}
    assert result.asked_rps == pytest.approx(200)
    assert sum(block.requests for block in result.blocks) == 100
    assert sum(count for _, count in result.latency_histogram) == 100


def test_a_slow_server_is_seen_in_latency_and_service() -> None:
    def slow(server: ScriptedServer) -> None:
        server.delay_s = 0.1

    result, _ = run(script=slow)
    assert 100 <= result.service.p50 < 200
    assert 100 <= result.latency.p50 < 200


def test_a_stall_shows_in_the_p99_of_an_open_loop_and_hides_in_a_closed_one() -> None:
    def stall(server: ScriptedServer) -> None:
        def begin() -> None:
            server.stalled_until = asyncio.get_running_loop().time() + 1.0

        server.at_inference[100] = begin

    spec = replace(SPEC, duration_s=2.0, rate_rps=200, timeout_s=5.0)
    open_loop, _ = run(replace(spec, connections=1), stall)
    closed_loop, _ = run(replace(spec, pattern="users:count=1", rate_rps=0), stall)
    # Half of the requests are meant to go out during the stall; all but 3 % of them wait over 30 ms.
    assert open_loop.latency.p99 > 900
    assert open_loop.service.p99 < 500  # one connection: only one request really waited on the wire
    assert open_loop.attainment is not None
    assert open_loop.attainment.estimate < 0.7  # which is no verdict where the machine was busy
    assert closed_loop.latency.max > 900  # one request in thousands
    assert closed_loop.latency.p99 < 100
    assert closed_loop.verdict != "fail"


def test_a_server_that_is_down_gives_refused_requests() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]

    async def scenario(payload: Path) -> RunResult:
        return await measure(replace(SPEC, target=f"http://127.0.0.1:{port}", payloads=(str(payload),)))

    result = uvloop.run(scenario(Path(__file__).parent / "payload.json"))
    assert result.digests.keys() == {"requests", "headers"}
    assert result.errors == {"refused": 100}
    assert "refused" in result.error_samples
    assert missed(result)
    assert result.latency.count == 0
    assert any("no request succeeded" in warning for warning in result.warnings)


def test_without_payload_files_a_server_that_is_down_cannot_be_asked() -> None:
    async def scenario() -> None:
        await measure(replace(SPEC, target="http://127.0.0.1:1"))

    with pytest.raises(TargetError, match="cannot be asked"):
        uvloop.run(scenario())


def test_errors_are_counted_by_kind_with_a_sample() -> None:
    def shed(server: ScriptedServer) -> None:
        server.status = 503

    result, _ = run(script=shed)
    assert result.errors == {"http 503": 100}
    assert "as scripted" in result.error_samples["http 503"]
    assert result.goodput_rps == 0
    assert missed(result)


def test_a_server_that_disappears_fails_what_is_open_and_all_that_follows() -> None:
    def vanish(server: ScriptedServer) -> None:
        server.at_inference[40] = server.disappear

    result, _ = run(script=vanish)
    assert result.requests == 100
    assert 30 <= result.succeeded <= 60
    assert set(result.errors) <= {"reset", "refused"}
    assert missed(result)


def test_a_server_that_never_answers_gives_timeouts_and_the_run_ends() -> None:
    def hush(server: ScriptedServer) -> None:
        server.silent = True

    result, _ = run(replace(SPEC, timeout_s=0.3, rate_rps=200), hush)
    assert result.errors == {"timeout": 100}
    assert result.excluded == 0


PAGE = b"HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n<html>down</html>\n"


@pytest.mark.parametrize("protocol", ["rest-json", "rest-binary"])
def test_a_server_that_speaks_no_http_or_another_protocol_gives_malformed_answers(protocol: Protocol) -> None:
    def page(server: ScriptedServer) -> None:
        server.garbage = PAGE
        server.at_inference = {6: lambda: setattr(server, "garbage", b"this is no HTTP\r\n\r\n")}

    result, _ = run(replace(SPEC, rate_rps=20, protocol=protocol), page)
    assert result.errors == {"malformed": 10}
    assert result.error_samples == {"malformed": "no v2 response: <html>down</html>"}


def test_connections_that_the_server_closes_are_opened_again() -> None:
    def close(server: ScriptedServer) -> None:
        server.close_each = True

    result, _ = run(replace(SPEC, rate_rps=200), close)
    # A request may meet the connection just before its end is seen: that is the server's doing.
    assert result.succeeded + result.errors.get("reset", 0) == 100
    assert result.succeeded >= 50


def test_requests_beyond_the_connections_wait_and_the_wait_counts() -> None:
    def slow(server: ScriptedServer) -> None:
        server.delay_s = 0.05

    result, _ = run(replace(SPEC, rate_rps=40, duration_s=1, connections=1, timeout_s=5), slow)  # 40/s offered, 20/s possible
    assert result.generator.connections == 1
    assert result.latency.max > 500
    assert result.service.p50 < 150
    assert result.generator.connection_wait_p99_ms > 400


def test_stopping_gives_a_partial_result() -> None:
    async def scenario() -> RunResult:
        async with scripted_server() as server:
            stop = asyncio.Event()

            def once_under_way(progress: Progress) -> None:
                if progress.succeeded >= 20:
                    stop.set()

            spec = replace(SPEC, target=server.url, duration_s=30)
            return await measure(spec, stop=stop, on_progress=once_under_way)

    result = uvloop.run(scenario())
    assert result.partial
    assert 20 <= result.requests < result.spec.rate_rps * 15
    assert result.window_s < 15


@pytest.mark.parametrize("processes", [1, 2])
def test_stopping_excuses_no_server_that_hangs(processes: int) -> None:
    async def scenario() -> RunResult:
        async with scripted_server() as server:

            def hang() -> None:
                server.silent = True

            server.at_inference[100] = hang
            stop = asyncio.Event()

            def once_it_hangs(progress: Progress) -> None:
                if progress.elapsed_s > 1.5:
                    stop.set()

            slo = SloSpec.parse("p99<200ms,errors<1%")
            spec = replace(SPEC, target=server.url, duration_s=30, timeout_s=10, processes=processes, slo=slo)
            return await measure(spec, stop=stop, on_progress=once_it_hangs)

    result = uvloop.run(scenario())
    assert (result.partial, result.failed, result.succeeded) == (True, 0, pytest.approx(100, abs=2))
    assert result.overdue > 60  # of 200/s, for at least 0.8 s
    assert result.excluded < 60  # of 200/s, in the last 0.2 s
    assert result.verdict != "pass"
    assert [objective.attainment.estimate < 0.7 for objective in result.objectives] == [True, False]


def test_several_processes_share_the_schedule() -> None:
    result, server = run(replace(SPEC, processes=2))
    assert (result.requests, result.succeeded) == (100, 100)
    assert result.generator.processes == 2
    assert server.inferences == 100


def test_several_processes_share_the_users() -> None:
    result, _ = run(replace(SPEC, processes=2, pattern="users:count=3,think=0.01", rate_rps=0, duration_s=3.0))
    assert result.succeeded > 20
    assert result.errors == {}


def test_an_obvious_verdict_ends_early_when_asked_to() -> None:
    spec = replace(SPEC, rate_rps=2000, duration_s=20, slo=SloSpec.parse("p90<500ms"), warmup_s=None)
    result, _ = run(replace(spec, slo=SloSpec.parse("p90<10ms")), _delay_20_ms, until_decided=True)
    assert result.attainment is not None
    assert result.attainment.upper < 0.9  # which is no verdict where the machine was busy
    assert not result.partial
    assert result.window_s + result.warmup_s < 15


def test_a_run_that_cannot_pass_any_more_ends_early_when_asked_to() -> None:
    def stall(server: ScriptedServer) -> None:
        def begin() -> None:
            server.stalled_until = asyncio.get_running_loop().time() + 0.1

        server.at_inference[1000] = begin

    spec = replace(SPEC, rate_rps=2000, duration_s=8, slo=SloSpec.parse("p99<10ms"))
    result, _ = run(spec, stall, until_decided=True, or_lost=True)
    assert 2 <= result.window_s < 6  # 160 may miss, about 180 did; not sooner than a fail would be found
    assert result.attainment is not None
    assert result.attainment.estimate < 0.99
    assert not result.partial


def _delay_20_ms(server: ScriptedServer) -> None:
    server.delay_s = 0.02


def test_the_log_has_every_request_and_the_histogram_agrees_with_it(tmp_path: Path) -> None:
    def keep(log: RequestLog, used: np.ndarray) -> None:
        write_csv(tmp_path / "log.csv", log, used=used)

    result, _ = run(replace(SPEC, rate_rps=600), on_log=keep)
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 300
    latencies = np.array([int(row["done_ns"]) - int(row["intended_ns"]) for row in rows])
    for percentile, found in ((50, result.latency.p50), (99, result.latency.p99)):
        exact_ms = float(np.sort(latencies)[nearest_rank(percentile, len(latencies)) - 1]) / 1e6
        assert found == pytest.approx(exact_ms, rel=1e-9)
    assert result.latency_histogram == histogram(latencies)


def test_the_servers_own_statistics_split_the_latency() -> None:
    result, _ = run()
    assert result.server is not None
    assert result.server.queue_ms == pytest.approx(2)
    assert result.server.compute_ms == pytest.approx(2)
    assert result.server.rows_per_execution == 4


def test_binary_requests_carry_their_json_length(tmp_path: Path) -> None:
    _, server = run(replace(SPEC, protocol="rest-binary", rate_rps=20, rows="3"))
    head, body = server.heads[0], server.bodies[0]
    length = int(head.lower().split(b"inference-header-content-length: ")[1].split(b"\r\n")[0])
    document = json.loads(body[:length])
    assert document["inputs"][0]["shape"] == [3, 4]
    assert len(body) - length == 3 * 4 * 4  # rows · features · bytes of FP32


def test_an_invocations_url_gets_the_file_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"1,2,3")
    spec = replace(SPEC, protocol="invocations", model="", rate_rps=20, payloads=(str(tmp_path),), content_type="text/csv")
    result, server = run(spec, lambda server: setattr(server, "garbage", PAGE))
    assert result.succeeded == 10  # an endpoint answers as it likes
    assert set(server.bodies) == {b"1,2,3"}
    assert server.heads[0].startswith(b"POST /invocations HTTP/1.1")
    assert b"Content-Type: text/csv" in server.heads[0]


def test_the_only_model_of_a_server_needs_no_name() -> None:
    result, _ = run(replace(SPEC, model="", rate_rps=20))
    assert result.succeeded == 10


def test_a_result_survives_json_and_hides_header_values() -> None:
    result, server = run(replace(SPEC, rate_rps=20, headers=(("Authorization", "Bearer secret"),)))
    assert b"Authorization: Bearer secret" in server.heads[0]
    text = to_json(result)
    assert "secret" not in text
    assert run_from_json(text, source="here").latency == result.latency


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"duration_s": 0.0}, "--duration"),
        ({"connections": 0}, "--connections"),
        ({"processes": 10**400}, "--processes 1000"),
        ({"target": "ftp://x"}, "ftp://x"),
        ({"target": "http://x:99999"}, "99999"),
        ({"rate_rps": 0.0}, "--rate"),
        ({"pattern": "sometimes"}, "sometimes"),
        ({"slo": SloSpec.parse("p99<86401s")}, r"SLO: p99<8.6401e\+07ms: expected a limit of a day at most"),
        ({"payloads": ("/nowhere/x.json",)}, "/nowhere/x.json"),
        ({"rows": "8-1"}, "--rows"),
        ({"values": ("z=0:1",)}, "no input 'z'"),
        ({"headers": (("A", "b\r\nC: d"),)}, "one line"),
        ({"headers": (("A", "ü"),)}, "ASCII"),
        ({"headers": (("X Y", "1"),)}, "--header 'X Y': expected a name of letters, digits and "),
        ({"headers": (("content-length", "3"),)}, "--header 'content-length': it says how long a request is"),
        ({"headers": (("Transfer-Encoding", "chunked"),)}, "--header 'Transfer-Encoding': it says how long"),
        ({"protocol": "grpc", "headers": (("x|a", "1"),)}, r"--header 'x\|a': expected for gRPC a name of letters, digits and"),
        ({"protocol": "grpc", "headers": (("X-Bin", "aGk=,!!"),)}, "--header 'X-Bin': expected base64, as gRPC takes it"),
        ({"headers": (("X-A", "1"), ("x-a", "2"))}, "--header 'x-a': given more than once: expected once, with all"),
    ],
)
def test_a_wrong_spec_is_refused_before_anything_is_sent(change: dict[str, object], message: str) -> None:
    async def scenario() -> None:
        async with scripted_server() as server:
            spec = replace(SPEC, target=server.url)
            with pytest.raises(UsageError, match=message):
                await measure(replace(spec, **change))  # type: ignore[arg-type]
            assert server.inferences == 0

    uvloop.run(scenario())


def test_ending_while_connections_are_being_opened_does_not_hang() -> None:
    async def scenario() -> None:
        async with scripted_server() as server:
            server.silent = True
            for delay_s in (0.0, 0.001, 0.002, 0.005, 0.01):
                stop = asyncio.Event()
                spec = replace(SPEC, target=server.url, rate_rps=5000, duration_s=5)
                asyncio.get_running_loop().call_later(0.08 + delay_s, stop.set)
                try:
                    result = await asyncio.wait_for(measure(spec, stop=stop), 20)
                    assert result.partial
                except Interrupted:
                    pass  # before the first was sent

    uvloop.run(scenario())


def test_a_log_that_the_disk_has_no_room_for_is_said_so_before_anything_is_sent(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (tmp_path / "log").open("w+b") as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            with pytest.raises(UsageError, match="log of 1000000 requests needs 36 MiB"):
                RequestLog.shared(1_000_000, file.fileno())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
