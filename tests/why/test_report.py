"""What is said of a recording."""

import pytest

from gateway.batching.recorded_file import packed, unpacked
from gateway.batching.recording import LaneSettings, RecordedBatcher, Ring
from gateway.errors import InVain, Overloaded, TooLarge
from gateway.routing.replay import Unserved
from gateway.types import InferRequest
from gateway.why.causes import Cause
from gateway.why.report import Answer, answer, as_json, life_told, of_request, told
from gateway.why.unserved import cause_of
from tests.why.recorded import MIB, MS, S


def lane(
    label: str, max_queue_rows: int, usd_per_hour: float = 0.0, *, lent: bool = False, policy: str = "greedy", max_rows: int = 1
) -> RecordedBatcher:
    settings = LaneSettings(
        label=label,
        policy=policy,
        max_rows=max_rows,
        max_queue_rows=max_queue_rows,
        slo_ns=50 * MS,
        session_usd_per_hour=usd_per_hour,
        lent=lent,
    )
    batcher = settings.batcher(Ring(MIB, settings))
    assert isinstance(batcher, RecordedBatcher)
    batcher.service.probe(None, max_rows, [10 * MS] * 2)
    batcher.record()
    return batcher


def request(own_id: str, arrival_ns: int, rows: int = 1) -> InferRequest:
    return InferRequest("m", "1", own_id, {}, rows, arrival_ns)


def test_what_another_backend_takes_over_is_no_miss_of_the_first() -> None:
    first, second = lane("first", 1), lane("second", 8)
    first.add(request("waits", S), S)
    shed = request("shed", S + 1)
    with pytest.raises(Overloaded):
        first.add(shed, S + 1)
    second.add(shed, S + 1)
    (batch,) = second.step(S + 1, 1).batches
    second.finished(batch, S + 5 * MS, 4 * MS, True)
    lost = request("lost", S + 2)
    with pytest.raises(Overloaded):
        first.add(lost, S + 2)
    rings = [batcher.ring for batcher in (first, second) if batcher.ring is not None]
    data = packed("m", "1", rings, process="p", processes=1, now_ns=S + 20 * MS, unix_s=0.0)
    found = answer(unpacked(data, "here")[0], "here")
    missed = {miss.request.own_id for each in found.lanes for miss in each.diagnosis.misses}
    assert missed == {"lost"}
    fates = [(life["backend"], life["fate"], life["cause"]) for life in of_request([found], "shed")]
    assert fates == [("first", "handed over", None), ("second", "answered", None)]
    said = told([found])
    assert "m version 1 on first: 2 requests" in said
    assert "handed over to others: 1, which" in said
    assert "late or refused: 1 (50.0%)" in said
    assert found.lanes[0].cases[0].in_time == 0.5  # of the two that stayed


def test_what_two_backends_did_not_serve_is_a_miss_of_the_last() -> None:
    first, second, third = lane("first", 1), lane("second", 1), lane("third", 8)
    first.add(request("waits", S), S)
    second.add(request("waits too", S), S)
    fails = request("fails", S + 1)
    for full in (first, second):
        with pytest.raises(Overloaded):
            full.add(fails, S + 1)
    third.add(fails, S + 2)
    (batch,) = third.step(S + 2, 1).batches
    third.finished(batch, S + 5 * MS, 4 * MS, False)
    given_up = request("given up", S + 3)
    third.add(given_up, S + 3)
    third.cancel(given_up)
    with pytest.raises(Overloaded):
        second.add(given_up, S + 20 * MS)
    rings = [batcher.ring for batcher in (third, first, second) if batcher.ring is not None]
    data = packed("m", "1", rings, process="p", processes=1, now_ns=S + 20 * MS, unix_s=0.0)
    found = answer(unpacked(data, "here")[0], "here")
    missed = [(each.diagnosis.settings.label, miss.request.own_id) for each in found.lanes for miss in each.diagnosis.misses]
    assert missed == [("second", "given up")]
    fates = {life["backend"]: life["fate"] for life in of_request([found], "fails")}
    assert fates == {"first": "handed over", "second": "handed over", "third": "failed"}


def test_streams_that_keep_a_session_are_no_stall_and_nothing_is_simulated_of_them() -> None:
    settings = LaneSettings(label="streams", policy="greedy", max_rows=0, slo_ns=50 * MS, decoupled=True)
    batcher = settings.batcher(Ring(MIB, settings))
    assert isinstance(batcher, RecordedBatcher)
    batcher.record()
    for at in range(60):  # one comes in 25 ms; each keeps the only session for 30, and its first part comes after 4, once 12
        begin_ns, first_ns = S + at * 30 * MS, (12 if at == 20 else 4) * MS
        came = [S + index * 25 * MS for index in range(200) if begin_ns <= S + index * 25 * MS < begin_ns + 30 * MS]
        if at == 0:
            batcher.add(request("0", S), S)
            came = came[1:]
        step = batcher.step(begin_ns, 1)
        for arrival_ns in came:
            batcher.add(request(str(arrival_ns), arrival_ns), arrival_ns)
            batcher.step(arrival_ns, 0)
        for batch in step.batches:
            batcher.finished(batch, begin_ns + first_ns, first_ns, True)
    assert batcher.ring is not None
    data = packed("m", "1", [batcher.ring], process="p", processes=1, now_ns=4 * S, unix_s=0.0)
    found = answer(unpacked(data, "here")[0], "here")
    (streams,) = found.lanes
    causes = streams.diagnosis.by_cause
    assert causes[Cause.QUEUE] > 0.9 * causes.total() > 10  # but for the one whose own first part took 12
    assert [case.name for case in streams.cases] == ["as it was"]
    said = told([found])
    assert "what would have been (" not in said
    assert "it answers in parts: times are to the first one. What would have been is not simulated" in said


def test_a_stream_that_runs_is_late_if_its_first_part_was() -> None:
    settings = LaneSettings(label="streams", policy="greedy", max_rows=0, slo_ns=50 * MS, decoupled=True)
    batcher = settings.batcher(Ring(MIB, settings))
    assert isinstance(batcher, RecordedBatcher)
    batcher.record()
    asked = {}
    for at, own_id in enumerate([*map(str, range(10)), "left", "runs", "late"]):
        arrival_ns = S + at * 100 * MS
        asked[own_id] = request(own_id, arrival_ns)
        asked[own_id].deadline_ns = arrival_ns + 90 * MS if own_id == "left" else None
        batcher.add(asked[own_id], arrival_ns)
        (batch,) = batcher.step(arrival_ns, 1).batches
        first_ns = arrival_ns + (60 if own_id == "late" else 4) * MS
        batcher.begun(batch, first_ns)
        if own_id.isdecimal():
            batcher.finished(batch, first_ns, first_ns - arrival_ns, True)
    batcher.add(request("waits", arrival_ns + S), arrival_ns + S)
    batcher.cancel(asked["left"], now_ns=asked["left"].arrival_ns + 95 * MS)
    assert batcher.ring is not None
    data = packed("m", "1", [batcher.ring], process="p", processes=1, now_ns=arrival_ns + S, unix_s=0.0)
    (streams,) = answer(unpacked(data, "here")[0], "here").lanes
    assert [(miss.request.own_id, miss.cause) for miss in streams.diagnosis.misses] == [("late", Cause.STALL)]


def test_two_requests_of_one_moment_are_both_misses() -> None:
    first, second = lane("first", 1), lane("second", 1)
    for batcher in (first, second):
        batcher.add(request("", S), S)
    for _ in range(2):
        with pytest.raises(Overloaded):
            second.add(request("", S + 1), S + 1)
    rings = [batcher.ring for batcher in (first, second) if batcher.ring is not None]
    data = packed("m", "1", rings, process="p", processes=1, now_ns=S + 20 * MS, unix_s=0.0)
    found = answer(unpacked(data, "here")[0], "here")
    assert sum(len(each.diagnosis.misses) for each in found.lanes) == 2


def test_what_is_handed_over_counts_for_the_backend_that_took_it_alone() -> None:
    first, second = lane("first", 1), lane("second", 8)
    for at in range(10):
        own, moved = (request(f"{what}{at}", S + at * 10 * MS) for what in ("own", "moved"))
        first.add(own, own.arrival_ns)
        with pytest.raises(Overloaded):
            first.add(moved, moved.arrival_ns)
        second.add(moved, moved.arrival_ns)
        for batcher in (first, second):
            (batch,) = batcher.step(own.arrival_ns, 1).batches
            batcher.finished(batch, own.arrival_ns + 4 * MS, 4 * MS, True)
    rings = [batcher.ring for batcher in (first, second) if batcher.ring is not None]
    data = packed("m", "1", rings, process="p", processes=1, now_ns=2 * S, unix_s=0.0)
    found = answer(unpacked(data, "here")[0], "here")
    for each in found.lanes:
        assert {case.in_time for case in each.cases} == {1.0}
        assert len({round(case.goodput_rps) for case in each.cases}) == 1
    assert [(told["requests"], told["handed_over"]) for told in as_json([found])] == [(10, 10), (10, 0)]
    lives = {life["backend"]: life for life in of_request([found], "moved3")}
    assert lives["first"]["would_have"] == {}
    (own,) = of_request([found], "own3")
    for life in (lives["second"], own):
        assert life["would_have"]["the same, simulated"] == {"ended_ms": 4.0, "in_time": True, "left": False}


def test_what_sessions_cost_that_are_lent_to_each_process_in_turn_is_told_of_none() -> None:
    first, second = lane("lent", 8, 2.5, lent=True), lane("own", 8, 2.5)
    for batcher in (first, second):
        batcher.add(request("a", S), S)
        (batch,) = batcher.step(S, 1).batches
        batcher.finished(batch, S + 4 * MS, 4 * MS, True)
    rings = [batcher.ring for batcher in (first, second) if batcher.ring is not None]
    data = packed("m", "1", rings, process="p", processes=2, now_ns=2 * S, unix_s=0.0)
    found = answer(unpacked(data, "here")[0], "here")
    usd = [{case.name: case.usd_per_hour for case in each.cases} for each in found.lanes]
    assert {key: usd[0][key] for key in ("as it was", "one more session", "all on own")} == {
        "as it was": None,
        "one more session": None,
        "all on own": 2.5,
    }
    assert {key: usd[1][key] for key in ("as it was", "one more session", "all on lent")} == {
        "as it was": 2.5,
        "one more session": 5.0,
        "all on lent": None,
    }
    assert told([found]).count("USD: all processes use these sessions") == 1


def test_what_still_hangs_and_what_is_shed_behind_it_are_late_by_a_stall() -> None:
    batcher = lane("only", 8)
    for at in range(10):
        batcher.add(request(str(at), S + at * 10 * MS), S + at * 10 * MS)
        (batch,) = batcher.step(S + at * 10 * MS, 1).batches
        batcher.finished(batch, S + at * 10 * MS + 4 * MS, 4 * MS, True)
    begin_ns = S + 100 * MS
    batcher.add(request("hangs", begin_ns), begin_ns)
    batcher.step(begin_ns, 1)
    assert batcher.ring is not None

    def found(now_ns: int) -> Answer:
        assert batcher.ring is not None
        data = packed("m", "1", [batcher.ring], process="p", processes=1, now_ns=now_ns, unix_s=0.0)
        return answer(unpacked(data, "here")[0], "here")

    def named(told: Answer) -> list[tuple[str, Cause]]:
        return [(miss.request.own_id, miss.cause) for miss in told.lanes[0].diagnosis.misses]

    assert named(found(begin_ns + 40 * MS)) == []  # in time so far
    first = found(begin_ns + S)
    assert named(first) == [("hangs", Cause.STALL)]
    for own_id, at_ns in (("first", begin_ns + S), ("second", begin_ns + 2 * S)):
        batcher.add(request(own_id, at_ns), at_ns)
        batcher.step(at_ns + 51 * MS, 0)
    last = found(begin_ns + 3 * S)
    assert named(last) == [("hangs", Cause.STALL), ("first", Cause.STALL), ("second", Cause.STALL)]
    for each in (first, last):
        was, same = each.lanes[0].cases[:2]
        assert (same.in_time, same.p99_ms) == (was.in_time, was.p99_ms)
    refused = Unserved("", begin_ns + 2 * S, begin_ns + 2 * S, None, 1, "late", ())
    assert cause_of(refused, [last.lanes[0].diagnosis]) is Cause.STALL


def test_of_one_request_that_left_it_is_said_that_it_would_have_left() -> None:
    batcher = lane("only", 8)
    for at in range(8):
        batcher.add(request(str(at), S + at * 30 * MS), S + at * 30 * MS)
        (batch,) = batcher.step(S + at * 30 * MS, 1).batches
        if at == 5:
            batcher.cancel(batch.parts[0].request, now_ns=S + at * 30 * MS + 2 * MS)
        batcher.finished(batch, S + at * 30 * MS + 4 * MS, 4 * MS, True)
    assert batcher.ring is not None
    data = packed("m", "1", [batcher.ring], process="p", processes=1, now_ns=2 * S, unix_s=0.0)
    (life,) = of_request([answer(unpacked(data, "here")[0], "here")], "5")
    assert life["would_have"]["the same, simulated"] == {"ended_ms": None, "in_time": False, "left": True}
    told_of_it = life_told(life)
    assert "\n  cancelled after 2.0 ms\n" in told_of_it
    assert "the same, simulated: left (simulated)" in told_of_it


@pytest.mark.parametrize(("answered", "share"), [(0, 0.0), (1, 0.5)])
def test_what_the_model_failed_was_not_in_time_and_would_not_have_been(answered: int, share: float) -> None:
    batcher = lane("only", 8, usd_per_hour=0.5)
    for at, own_id in enumerate(["first", "second"]):
        arrival_ns = S + at * 10 * MS
        batcher.add(request(own_id, arrival_ns), arrival_ns)
        (batch,) = batcher.step(arrival_ns, 1).batches
        batcher.finished(batch, arrival_ns + 4 * MS, 4 * MS, at < answered)
    assert batcher.ring is not None
    data = packed("m", "1", [batcher.ring], process="p", processes=1, now_ns=2 * S, unix_s=0.0)
    found = answer(unpacked(data, "here")[0], "here")
    cases = found.lanes[0].cases
    assert [case.in_time for case in cases] == [share] * len(cases)
    assert {case.goodput_rps > 0 for case in cases} == {case.usd_per_million is not None for case in cases} == {answered > 0}
    failed = 2 - answered
    assert f"failed: {failed} ({failed / 2:.1%}): the server's log says why" in told([found])
    assert as_json([found])[0]["failed"] == failed
    (life,) = of_request([found], "second")
    assert (life["fate"], life["would_have"]) == ("failed", {})


def test_what_was_given_up_in_part_is_late_and_what_is_too_large_neither_that_nor_in_time() -> None:
    batcher = lane("only", 64, policy="adaptive", max_rows=8)
    large = request("large", S, 32)  # four batches of 10 ms, within 50
    batcher.add(large, S)
    (batch,) = batcher.step(S, 1).batches
    batcher.finished(batch, S + 10 * MS, 10 * MS, True)
    ((shed, error),) = batcher.step(S + 30 * MS, 1).shed
    assert (shed, type(error)) == (large, InVain)
    with pytest.raises(TooLarge):
        batcher.add(request("too large", S + 40 * MS, 33), S + 40 * MS)
    batcher.add(request("small", S + 50 * MS), S + 50 * MS)
    (batch,) = batcher.step(S + 50 * MS, 1).batches
    batcher.finished(batch, S + 60 * MS, 10 * MS, True)
    assert batcher.ring is not None
    data = packed("m", "1", [batcher.ring], process="p", processes=1, now_ns=2 * S, unix_s=0.0)
    found = answer(unpacked(data, "here")[0], "here")
    assert [miss.request.own_id for miss in found.lanes[0].diagnosis.misses] == ["large"]
    assert found.lanes[0].cases[0].in_time == pytest.approx(1 / 3)
    (life,) = of_request([found], "large")
    assert "\n  refused after 30.0 ms (InVain)\n" in life_told(life)
