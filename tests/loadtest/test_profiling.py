import asyncio
import dataclasses

import pytest

from loadtest.events import Timing
from loadtest.profiling import Executions, Findings, ProfileFailed, executions, profile, slowdown
from loadtest.results import LoadSpec, RunResult
from tests.loadtest.made_results import run_result

BASE = LoadSpec(target="http://nowhere", model="m")


class Server:
    """Takes 4 + rows ms for a batch, 1.5 times that if another runs beside it, and 0.5 ms around it.

    traffic: how much slower it is while requests arrive that nobody waits for.
    """

    def __init__(self, *, statistics: bool = True, fails: bool = False, traffic: float = 1.0) -> None:
        self._counts: dict[int, tuple[int, int]] = {}
        self._statistics = statistics
        self._fails = fails
        self._traffic = traffic
        self.visits: list[tuple[int, int]] = []

    async def measure(self, spec: LoadSpec) -> RunResult:
        open_loop = not spec.pattern.startswith("users")
        rows, users = int(spec.rows), 0 if open_loop else int(spec.pattern.removeprefix("users:count="))
        self.visits.append((rows, users))
        if self._fails:
            return run_result(errors={"http 500": 3})
        ms = (4 + rows) * (self._traffic if open_loop else 1.5 if users > 1 else 1)
        count, ns = self._counts.get(rows, (0, 0))
        self._counts[rows] = count + 10, ns + round(10 * ms * 1e6)
        return run_result(succeeded=10, service_ms=ms + 0.5)

    async def look(self) -> Executions:
        return Executions(dict(self._counts) if self._statistics else {})


def run(server: Server, rows: tuple[int, ...] = (1, 2, 4), sessions: int = 1, limit_ms: float = 100.0) -> Findings:
    return asyncio.run(
        profile(BASE, rows=rows, sessions=sessions, seconds=1, limit_ms=limit_ms, measure=server.measure, look=server.look)
    )


def test_model_time_comes_from_the_server_and_the_rest_is_overhead() -> None:
    found = run(Server())
    assert [(t.rows, t.concurrency) for t in found.timings] == [(1, 1), (2, 1), (4, 1)]
    assert [t.ms for t in found.timings] == pytest.approx([5, 6, 8])
    assert found.overhead_ms == pytest.approx(0.5)


def test_without_statistics_the_clients_time_is_taken() -> None:
    found = run(Server(statistics=False))
    assert [t.ms for t in found.timings] == pytest.approx([5.5, 6.5, 8.5])
    assert found.overhead_ms == 0


def test_concurrency_is_measured_for_itself() -> None:
    timings = run(Server(), rows=(1,), sessions=3).timings
    assert [(t.concurrency, t.ms) for t in timings] == [
        (n, pytest.approx(ms, rel=0.02)) for n, ms in ((1, 5), (2, 7.5), (3, 7.5))
    ]


def test_batches_of_two_users_say_nothing_of_one_users_size() -> None:
    server = Server()

    async def measure(spec: LoadSpec) -> RunResult:
        return await server.measure(dataclasses.replace(spec, rows="8") if spec.pattern.endswith("=2") else spec)

    found = asyncio.run(profile(BASE, rows=(1, 4), sessions=2, seconds=1, limit_ms=100, measure=measure, look=server.look))
    assert [(t.rows, t.concurrency) for t in found.timings] == [(1, 1), (4, 1)]


def test_sizes_are_visited_up_and_down_after_a_warm_up_and_at_last_there_is_a_crowd_and_open_traffic() -> None:
    server = Server()
    run(server)
    assert server.visits == [(1, 1), (1, 1), (2, 1), (4, 1), (4, 1), (2, 1), (1, 1), (1, 4), (1, 0)]


def test_all_times_are_raised_by_how_much_open_traffic_slows_them() -> None:
    assert [t.ms for t in run(Server(traffic=1.2)).timings] == pytest.approx([6, 7.2, 9.6])


def test_slowdown_takes_sessions_to_be_busy_beside_each_other_as_often_as_they_are() -> None:
    timings = (Timing(1, 1, 10.0), Timing(1, 2, 20.0))
    # 100 batches in 1.8 s of two sessions' time: each finds the other busy in 0.9 of the second, and should take 19 ms.
    assert slowdown(timings, Executions({1: (100, 1_800_000_000)}), 2, 1.0) == pytest.approx(18 / 19)
    assert slowdown(timings, Executions({1: (100, 2_400_000_000)}), 2, 1.0) == pytest.approx(24 / 20)
    assert slowdown(timings, Executions({}), 2, 1.0) == 1


def test_sizes_that_break_the_slo_alone_are_left_out() -> None:
    timings = run(Server(), rows=(1, 2, 4, 8, 16, 32), limit_ms=10).timings
    assert max(t.rows for t in timings) == 8  # 12 ms: the first that takes longer


def test_users_together_are_not_asked_for_what_would_be_shed() -> None:
    server = Server()
    run(server, rows=(1, 2, 4, 8, 16), sessions=2, limit_ms=16)  # 8 rows take 12 ms, two users' 18
    assert (8, 1) in server.visits
    assert (8, 2) not in server.visits


def test_a_size_that_does_not_end_in_several_limits_is_left_out() -> None:
    server = Server()

    async def measure(spec: LoadSpec) -> RunResult:
        return {"8": run_result(), "4": shed}.get(spec.rows) or await server.measure(spec)

    async def found(rows: tuple[int, ...]) -> list[int]:
        found = await profile(BASE, rows=rows, sessions=1, seconds=1, limit_ms=100, measure=measure, look=server.look)
        return [t.rows for t in found.timings]

    shed = run_result(errors={"http 503": 9})
    assert asyncio.run(found((1, 2, 8, 16))) == [1, 2]
    assert asyncio.run(found((1, 2, 4, 16))) == [1, 2]


def test_a_server_that_fails_has_no_profile() -> None:
    with pytest.raises(ProfileFailed, match="3 × http 500"):
        run(Server(fails=True))


def test_the_v2_statistics_are_read_by_batch_size() -> None:
    entry = {"batch_size": 4, "compute_infer": {"count": 2, "ns": 30_000_000}, "compute_input": {"count": 2, "ns": 1}}
    found = executions({"model_stats": [{"name": "m", "version": "1", "batch_stats": [entry]}]})
    assert found.mean_ms(4) == 15
    assert found.since(Executions({4: (1, 10_000_000)})).mean_ms(4) == 20
    assert executions({}).by_rows == {}


def test_the_specs_payload_is_kept() -> None:
    seen: list[LoadSpec] = []
    server = Server()

    async def measure(spec: LoadSpec) -> RunResult:
        seen.append(spec)
        return await server.measure(spec)

    base = dataclasses.replace(BASE, length="32", protocol="grpc")
    asyncio.run(profile(base, rows=(1,), sessions=1, seconds=1, limit_ms=100, measure=measure, look=server.look))
    assert {(spec.length, spec.protocol) for spec in seen} == {("32", "grpc")}
