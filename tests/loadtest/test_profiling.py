import asyncio
import dataclasses
import math

import pytest

from loadtest.lab.profiling import BatchStatistics, Findings, ProfileFailed, batch_statistics, profile, slowdown
from loadtest.results import LoadSpec, RunResult, SloSpec
from loadtest.search.events import Timing
from tests.loadtest.made_results import run_result

BASE = LoadSpec(target="http://nowhere", model="m")


class Server:
    """Takes 4 + rows ms for a batch, 1.5 times that if another runs beside it, and 0.5 ms around it.

    traffic: how much slower it is while requests arrive that nobody waits for. delay_ms: what each waits for a batch.
    """

    def __init__(self, *, statistics: bool = True, fails: bool = False, traffic: float = 1.0, delay_ms: float = 0.0) -> None:
        self._delay_ms = delay_ms
        self._queue = (0, 0)
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
            failed = run_result(errors={"http 500": 3, "timeout": 1})
            return dataclasses.replace(failed, error_samples={"http 500": "x: expected 4 columns", "timeout": ""})
        ms = (4 + rows) * (self._traffic if open_loop else 1.5 if users > 1 else 1)
        count, ns = self._counts.get(rows, (0, 0))
        self._counts[rows] = count + 10, ns + round(10 * ms * 1e6)
        self._queue = self._queue[0] + 10, self._queue[1] + round(10 * self._delay_ms * 1e6)
        return run_result(succeeded=10, service_ms=self._delay_ms + ms + 0.5)

    async def look(self) -> BatchStatistics:
        return BatchStatistics(dict(self._counts), self._queue) if self._statistics else BatchStatistics({})


def run(
    server: Server, rows: tuple[int, ...] = (1, 2, 4), sessions: int = 1, limit_ms: float = 100.0, *, simulated: bool = True
) -> Findings:
    asked = {"rows": rows, "sessions": sessions, "seconds": 1, "limit_ms": limit_ms, "simulated": simulated}
    return asyncio.run(profile(BASE, **asked, measure=server.measure, look=server.look))  # type: ignore[arg-type]


def test_model_time_comes_from_the_server_and_the_rest_is_overhead() -> None:
    found = run(Server())
    assert [(t.rows, t.concurrency) for t in found.timings] == [(1, 1), (2, 1), (4, 1)]
    assert [t.ms for t in found.timings] == pytest.approx([5, 6, 8])
    assert found.overhead_ms == pytest.approx(0.5)


def test_what_a_batcher_waits_on_purpose_is_no_overhead() -> None:
    """Its wait is simulated; another candidate of the group has another."""
    assert run(Server(delay_ms=24)) == run(Server())
    whose_batching_is_unknown = run(Server(delay_ms=24), simulated=False)
    assert whose_batching_is_unknown.overhead_ms == pytest.approx(24.5)


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
    assert slowdown(timings, BatchStatistics({1: (100, 1_800_000_000)}), 2, 1.0) == pytest.approx(18 / 19)
    assert slowdown(timings, BatchStatistics({1: (100, 2_400_000_000)}), 2, 1.0) == pytest.approx(24 / 20)
    assert slowdown(timings, BatchStatistics({}), 2, 1.0) == 1


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
    with pytest.raises(ProfileFailed, match=r"^3 × http 500: x: expected 4 columns, 1 × timeout$"):
        run(Server(fails=True))


def test_the_v2_statistics_are_read_by_batch_size() -> None:
    entry = {"batch_size": 4, "compute_infer": {"count": 2, "ns": 30_000_000}, "compute_input": {"count": 2, "ns": 1}}
    found = batch_statistics({"model_stats": [{"name": "m", "version": "1", "batch_stats": [entry]}]})
    assert found.mean_ms(4) == 15
    assert found.since(BatchStatistics({4: (1, 10_000_000)})).mean_ms(4) == 20
    assert batch_statistics({}).by_rows == {}


def test_the_specs_payload_is_kept() -> None:
    seen: list[LoadSpec] = []
    server = Server()

    async def measure(spec: LoadSpec) -> RunResult:
        seen.append(spec)
        return await server.measure(spec)

    base = dataclasses.replace(BASE, length="32", protocol="grpc")
    asyncio.run(profile(base, rows=(1,), sessions=1, seconds=1, limit_ms=100, measure=measure, look=server.look))
    assert {(spec.length, spec.protocol) for spec in seen} == {("32", "grpc")}


def specs_of(server: Server, *, base: LoadSpec = BASE, seconds: float = 15, **how: object) -> tuple[list[LoadSpec], Findings]:
    """Every run that a profile asks for. how: further arguments of `profile`."""
    seen: list[LoadSpec] = []

    async def measure(spec: LoadSpec) -> RunResult:
        seen.append(spec)
        return await server.measure(spec)

    asked = {"rows": (1, 2, 4), "sessions": 1, "limit_ms": 100.0} | how
    return seen, asyncio.run(profile(base, seconds=seconds, measure=measure, look=server.look, **asked))  # type: ignore[arg-type]


def test_the_time_is_shared_out_over_all_visits_the_crowd_and_open_traffic() -> None:
    seen, _ = specs_of(Server())  # three sizes up and down, a warm-up, and four visits' time for each of the two at the end
    assert [spec.duration_s for spec in seen] == [pytest.approx(1)] * 7 + [pytest.approx(4)] * 2
    seen, _ = specs_of(Server(), rows=(1, 2), sessions=3, seconds=21)  # alone, two and three at once
    assert [spec.duration_s for spec in seen[:13]] == [pytest.approx(1)] * 13
    hurried, _ = specs_of(Server(), seconds=1)
    assert {spec.duration_s for spec in hurried[:7]} == {0.3}


def test_visits_have_no_warm_up_and_nothing_to_judge() -> None:
    base = dataclasses.replace(BASE, slo=SloSpec.parse("p99<100ms"), warmup_s=3.0)
    seen, _ = specs_of(Server(), base=base, lengths="17-32")
    crowd = seen.pop(-2)
    assert {(spec.warmup_s, spec.slo, spec.lengths) for spec in seen} == {(0.0, None, "17-32")}
    assert (crowd.slo, crowd.lengths) == (None, "")  # as all requests are


def test_the_crowd_fills_all_sessions_and_open_traffic_offers_four_fifths_of_that() -> None:
    seen, found = specs_of(Server(), sessions=2)
    assert seen[-2].pattern == "users:count=8"
    crowd_rps = 10 / BASE.duration_s  # as the double answers, whoever asks: less than its batches would carry
    assert found.saturated_rps == crowd_rps
    assert seen[-1].pattern == BASE.pattern
    assert seen[-1].rate_rps == pytest.approx(0.8 * crowd_rps)
    wide, _ = specs_of(Server(), sessions=2, base=dataclasses.replace(BASE, rows="2"))
    assert wide[-2].pattern == "users:count=4"


def test_open_traffic_offers_what_the_best_size_would_carry_where_saturation_carries_more() -> None:
    server = Server()

    async def measure(spec: LoadSpec) -> RunResult:
        found = await server.measure(spec)
        crowd = spec.pattern.startswith("users") and spec.duration_s > 2
        seen.append(spec)
        return dataclasses.replace(found, succeeded_rps=1e6) if crowd else found

    async def rate(rows: str, sessions: int) -> float:
        base = dataclasses.replace(BASE, rows=rows)
        how = {"rows": (1, 2, 4), "sessions": sessions, "limit_ms": 100.0, "measure": measure, "look": server.look}
        await profile(base, seconds=15 if sessions == 1 else 21, **how)  # type: ignore[arg-type]
        return seen[-1].rate_rps

    seen: list[LoadSpec] = []
    assert asyncio.run(rate("1", 1)) == pytest.approx(0.8 * 4 / 8e-3)
    assert asyncio.run(rate("2", 1)) == pytest.approx(0.8 * 4 / 8e-3 / 2)
    assert asyncio.run(rate("1", 2)) == pytest.approx(0.8 * 2 * 4 / 12e-3)  # with both at work


@pytest.mark.parametrize(("shed", "users"), [(0, [16]), (1, [16]), (2, [16, 8, 4, 2, 1])])
def test_a_crowd_that_is_refused_more_than_a_twentieth_is_halved(shed: int, users: list[int]) -> None:
    server = Server()
    crowds: list[int] = []

    async def measure(spec: LoadSpec) -> RunResult:
        if spec.duration_s > 2 and spec.pattern.startswith("users"):
            crowds.append(int(spec.pattern.removeprefix("users:count=")))
            found = run_result(succeeded=20 - shed, errors={"http 503": shed})
            return dataclasses.replace(found, succeeded_rps=100.0 * len(crowds) % 400)
        return await server.measure(spec)

    how = {"rows": (1, 2, 4), "sessions": 4, "limit_ms": 100.0, "measure": measure, "look": server.look}
    found = asyncio.run(profile(BASE, seconds=27, **how))  # type: ignore[arg-type]
    assert crowds == users
    assert found.saturated_rps == (300 if len(users) > 1 else 100)  # the most of all


def test_where_no_crowd_is_answered_saturation_is_not_known() -> None:
    server = Server()

    async def measure(spec: LoadSpec) -> RunResult:
        crowd = spec.pattern.startswith("users") and spec.duration_s > 2
        return run_result(errors={"http 503": 9}) if crowd else await server.measure(spec)

    how = {"rows": (1,), "sessions": 1, "limit_ms": 100.0, "measure": measure, "look": server.look}
    assert asyncio.run(profile(BASE, seconds=11, **how)).saturated_rps is None  # type: ignore[arg-type]


def changing(*times_ms: float, spread: float = 0.0) -> Findings:
    """Of one size; times: of each visit, the warm-up included; without statistics, so that they are the client's."""
    left = list(times_ms)

    async def measure(spec: LoadSpec) -> RunResult:
        ms = left.pop(0) if len(left) > 1 else left[0]
        found = run_result(succeeded=10, service_ms=ms)
        return dataclasses.replace(found, service=dataclasses.replace(found.service, p50=ms, p90=ms * math.exp(spread)))

    async def look() -> BatchStatistics:
        return BatchStatistics({})

    how = {"rows": (1,), "sessions": 1, "limit_ms": 100.0, "measure": measure, "look": look}
    return asyncio.run(profile(BASE, seconds=1, **how))  # type: ignore[arg-type]


def test_a_time_is_the_mean_of_the_visits_and_the_warm_up_is_none() -> None:
    assert changing(90, 10, 12).timings == (Timing(1, 1, 11.0, 0.0),)
    assert changing(90, 10, 15).timings[0].ms == 12.5  # 1.5 times: no third visit


def test_of_visits_that_differ_much_a_third_tells_which_was_disturbed() -> None:
    assert changing(90, 10, 16, 11).timings[0].ms == 10.5
    assert changing(90, 10, 16, 15).timings[0].ms == 15.5
    assert changing(90, 16, 10, 17).timings[0].ms == 16.5
    assert changing(90, 10, 21, 20).timings[0].ms == 20.5


def test_the_scatter_is_taken_from_where_nine_in_ten_are() -> None:
    assert changing(10, 10, spread=1.2816 * 0.3).timings[0].spread == pytest.approx(0.3)
    assert changing(10, 10, spread=-0.5).timings[0].spread == 0


def test_visits_weigh_by_their_requests() -> None:
    counts, times = [5, 10, 30], [90.0, 10.0, 14.0]

    async def measure(spec: LoadSpec) -> RunResult:
        count, ms = (counts.pop(0), times.pop(0)) if times else (10, 10.0)
        return run_result(succeeded=count, service_ms=ms)

    async def look() -> BatchStatistics:
        return BatchStatistics({})

    how = {"rows": (1,), "sessions": 1, "limit_ms": 100.0, "measure": measure, "look": look}
    assert asyncio.run(profile(BASE, seconds=1, **how)).timings[0].ms == 13  # type: ignore[arg-type]


def test_a_visit_without_an_answer_is_repeated_once_for_several_limits() -> None:
    durations: list[float] = []

    async def measure(spec: LoadSpec) -> RunResult:
        durations.append(spec.duration_s)
        return run_result()

    async def look() -> BatchStatistics:
        return BatchStatistics({})

    for limit_ms, patience_s in ((1000.0, 5.0), (100.0, 3.0)):  # five limits, or three visits if that is more
        durations.clear()
        how = {"rows": (1,), "sessions": 1, "limit_ms": limit_ms, "measure": measure, "look": look}
        with pytest.raises(
            ProfileFailed, match=f"one request alone is not answered within 5 times the limit of {limit_ms:g} ms"
        ):
            asyncio.run(profile(BASE, seconds=11, **how))  # type: ignore[arg-type]
        assert durations == [pytest.approx(1), pytest.approx(patience_s)]


@pytest.mark.parametrize(
    ("errors", "told"),
    [({}, ""), ({"timeout": 2}, ""), ({"http 503": 90, "timeout": 1}, "90 × http 503: full, 1 × timeout")],
)
def test_a_server_that_refuses_or_stops_answering_has_no_profile(errors: dict[str, int], told: str) -> None:
    server = Server()
    silent = dataclasses.replace(run_result(errors=errors), error_samples={"http 503": "full"})

    async def measure(spec: LoadSpec) -> RunResult:
        return await server.measure(spec) if not server.visits else silent

    how = {"rows": (1,), "sessions": 1, "limit_ms": 100.0, "measure": measure, "look": server.look}
    later = "requests that were answered at first were so no longer" + f": {told}" * bool(told)
    never = told or "one request alone is not answered within 5 times the limit of 100 ms"
    for words in (later, never):
        with pytest.raises(ProfileFailed, match=f"^{words}$"):
            asyncio.run(profile(BASE, seconds=1, **how))  # type: ignore[arg-type]


def test_users_are_asked_for_what_others_beside_them_leave_time_for() -> None:
    server = Server()
    run(server, rows=(1, 2, 4, 8, 16), sessions=4, limit_ms=18)  # 8 rows take 12 ms; two or four users' 18: just the limit
    assert {(8, 2), (8, 4)} <= set(server.visits)
    assert (16, 1) in server.visits
    assert (16, 2) not in server.visits


def test_statistics_are_added_up_over_models_and_what_was_before_is_left_out() -> None:
    def entry(size: int, count: int, ns: int) -> dict[str, object]:
        return {"batch_size": size, "compute_infer": {"count": count, "ns": ns}}

    queue = {"inference_stats": {"queue": {"count": 3, "ns": 9_000_000}}}
    models = [{"batch_stats": [entry(4, 2, 30), entry(1, 5, 10)], **queue}, {"batch_stats": [entry(4, 1, 6)], **queue}, {}]
    found = batch_statistics({"model_stats": models})
    assert (found.queue, found.queue_ms) == ((6, 18_000_000), 3)
    assert found.since(BatchStatistics({}, (4, 8_000_000))).queue_ms == 5
    assert found.by_rows == {4: (3, 36), 1: (5, 10)}
    assert found.since(BatchStatistics({4: (1, 6), 1: (5, 10)})).by_rows == {4: (2, 30)}
    assert found.mean_ms(2) is None
    assert batch_statistics({"model_stats": "none"}).by_rows == {}
