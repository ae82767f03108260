"""What a router has decided can be done again, bit for bit, from what it kept of it."""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway import cli
from gateway.batching import checkpoint
from gateway.batching.recorded_file import packed, unpacked
from gateway.engine.dispatcher import Dispatcher
from gateway.errors import BackendFailed, BackendUnreachable, Overloaded
from gateway.routing.replay import RoutingHistory, replay_routing
from gateway.types import InferRequest, InferResponse
from gateway.why.causes import Cause
from gateway.why.report import answer, told
from gateway.why.unserved import cause_of
from tests.router.fleet import CPU, FLEET, GPU, INF2, MS, Fleet, Kind, S, drive, failing, poisson, slower
from tests.simulation import SimulatedClock, run_simulated

FAILS = (BackendFailed("told to"), False, 3 * MS)
CANARY = (("canary_share", 0.1),)
SHADOW = (("shadow_share", 0.2),)
MIXED = (CPU, GPU, replace(INF2, name="next", options=CANARY), replace(INF2, name="other", options=SHADOW))

CASES: dict[str, tuple[Any, float, Any, dict[str, Any]]] = {
    "the rule": (FLEET, 2000.0, (), {}),
    "overload": ((CPU, INF2), 4000.0, (), {}),
    "a backend fails and comes back": (FLEET, 1000.0, ((0.3, failing(6, FAILS)), (0.6, failing(6, None))), {}),
    "a backend slows down": (FLEET, 1000.0, ((0.3, slower(6, 30.0)), (1.0, slower(6, 1.0))), {}),
    "all slow down, and are fast again": (
        (CPU, GPU),
        300.0,
        ((0.2, slower(0, 300.0)), (0.2, slower(1, 300.0)), (0.9, slower(0, 1.0)), (0.9, slower(1, 1.0))),
        {},
    ),
    "canary and shadow": (MIXED, 300.0, (), {}),
    "round robin": (FLEET, 800.0, (), {"routing": {"policy": "round_robin"}}),
    "power of two": (FLEET, 800.0, (), {"routing": {"policy": "power_of_two"}, "seed": 7}),
    "least eta": (FLEET, 800.0, (), {"routing": {"policy": "least_eta"}}),
    "no SLO": ((CPU, GPU), 500.0, (), {"slo_ms": None}),
    "a canary without an SLO": (MIXED, 300.0, (), {"slo_ms": None}),
}


def recorded(kinds: Any, rps: float, events: Any, options: dict[str, Any]) -> RoutingHistory:
    async def main(clock: SimulatedClock) -> bytes:
        fleet = Fleet(clock, kinds, **options)
        await drive(fleet, poisson(lambda second: rps, 1.5, 3), events)
        fleet.dispatcher.explain()
        ring = fleet.dispatcher.ring
        assert ring is not None
        return packed("m", "1", [], process="p", processes=1, now_ns=clock.now_ns(), unix_s=0.0, routing=ring)

    (told,) = unpacked(run_simulated(main), "here")
    assert told.routing is not None
    return replay_routing(told.routing)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_replay_routes_the_same(case: str) -> None:
    kinds, rps, events, options = CASES[case]
    history = recorded(kinds, rps, events, options)
    assert not history.difference
    assert history.routed > 0.9 * rps * 1.5
    assert history.decisions > history.routed


def test_a_replay_passes_over_those_that_were_full() -> None:
    async def main(clock: SimulatedClock) -> bytes:
        kinds = (Kind("first", 100.0, 0.0, 0.1), Kind("next", 100.0, 0.0, 0.2), Kind("idle", 2.0, 0.0, 50.0))
        fleet = Fleet(clock, kinds, slo_ms=5000, queue_rows=256)
        await asyncio.gather(*(fleet.fill(at) for at in (0, 1)))
        await fleet.send()
        assert fleet.counted("gateway_routed_total", backend="idle1", reason="fallback") == 1
        return packed("m", "1", [], process="p", processes=1, now_ns=0, unix_s=0.0, routing=fleet.dispatcher.ring)

    (told,) = unpacked(run_simulated(main), "here")
    assert told.routing is not None
    events = [event for segment in told.routing["segments"] for chunk in segment["chunks"] for event in chunk]
    assert [event[6] for event in events if event[0] == 0] == [None, ["first1", "first1", "next1"]]
    assert not replay_routing(told.routing).difference


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_keeping_a_state_asks_no_object_of_routing_for_its_dict(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()
    monkeypatch.setattr(checkpoint, "vars", lambda value: asked.add(type(value).__module__) or value.__dict__, raising=False)
    kinds, rps, events, options = CASES[case]
    recorded(kinds, rps / 10, events, options)
    assert not {module for module in asked if module.startswith(checkpoint.ROUTING)}


@pytest.mark.slow
def test_what_is_refused_for_the_load_is_named() -> None:
    history = recorded(*CASES["overload"])
    causes = Counter(cause_of(refused, ()) for refused in history.unserved)
    assert len(history.unserved) > 1000
    assert causes[Cause.QUEUE] >= 0.95 * len(history.unserved), causes


def test_what_the_only_backend_refuses_at_zero_is_named() -> None:
    scaling = {"min_replicas": 0, "max_replicas": 1}
    kind = replace(CPU, options=(("placement", "replicas"), ("autoscaling", scaling)))

    async def main(clock: SimulatedClock) -> bytes:
        fleet = Fleet(clock, (kind,))
        (sessions,) = fleet.sessions
        sessions.to_zero = True
        for _ in range(2):
            sessions.live = 0
            sessions.on_change()
            for _ in range(5):
                assert isinstance(await fleet.send(), BackendUnreachable)
            await asyncio.sleep(3.0)
            sessions.live = 1
            sessions.on_change()
            await asyncio.sleep(1.0)
            assert isinstance(await fleet.send(), InferResponse)
        ring = fleet.dispatcher.ring
        assert ring is not None
        return packed("m", "1", [], process="p", processes=1, now_ns=clock.now_ns(), unix_s=0.0, routing=ring)

    (recording,) = unpacked(run_simulated(main), "here")
    found = answer(recording, "here")
    assert found.routing is not None
    assert not found.routing.difference
    assert [cause for _, cause in found.unserved] == [Cause.COLD_START] * 10
    assert "refused, as no backend would have been in time: 10" in told([found])


def test_a_request_that_routing_refused_is_found_by_its_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def main(clock: SimulatedClock) -> bytes:
        fleet = Fleet(clock, (CPU, GPU))
        await drive(fleet, poisson(lambda second: 200.0, 0.5, 3))
        for lane in fleet.lanes:
            lane.submit(fleet.request(), lambda answer: None)
        now_ns = clock.now_ns()
        request = InferRequest("m", "1", "mine", fleet.request(rows=2).inputs, 2, now_ns, deadline_ns=now_ns + 1000)
        with pytest.raises(Overloaded):
            fleet.dispatcher.submit(request, lambda answer: None)
        ring = fleet.dispatcher.ring
        assert ring is not None
        return packed("m", "1", [], process="p", processes=1, now_ns=now_ns + S, unix_s=0.0, routing=ring)

    file = tmp_path / "saved"
    file.write_bytes(run_simulated(main))
    assert cli.main(["why", str(file), "--request", "mine"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["mine: m version 1 with no backend, 1.0 s ago", "  refused after 0.0 ms (late)"]
    assert said[-1].startswith("  cause: cut-off; ")
    assert cli.main(["why", str(file), "--request", "mine", "--json"]) == 0
    (life,) = json.loads(capsys.readouterr().out)
    assert (life["backend"], life["rows"], life["limit_ms"]) == (None, 2, 0.001)
    assert cli.main(["why", str(file), "--request", "other"]) == 1
    assert "no request 'other' is among the 1 that" in capsys.readouterr().err


def test_a_changed_decision_is_found() -> None:
    async def main(clock: SimulatedClock) -> bytes:
        fleet = Fleet(clock, (CPU, GPU))
        await drive(fleet, poisson(lambda second: 200.0, 0.5, 3))
        ring = fleet.dispatcher.ring
        assert ring is not None
        return packed("m", "1", [], process="p", processes=1, now_ns=0, unix_s=0.0, routing=ring)

    (told,) = unpacked(run_simulated(main), "here")
    assert told.routing is not None
    event = next(event for event in told.routing["segments"][0]["chunks"][0] if event[0] == 0)
    event[-2] = "spill"  # its reason
    assert "(routed)" in replay_routing(told.routing).difference


def test_a_ring_keeps_within_its_memory_while_nothing_is_routed_as_one_backend_is_there() -> None:
    async def main(clock: SimulatedClock) -> None:
        fleet = Fleet(clock, (CPU, GPU))
        present, _ = fleet.lanes
        dispatcher = Dispatcher([present], fleet.model, fleet.metrics, clock)
        ring = dispatcher.ring
        assert ring is not None
        for number in range(3000):
            answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            dispatcher.submit(fleet.request(), answer.set_result)
            await answer
            assert len(ring.events) < 1000, number
        for _ in range(3000):
            dispatcher.explain()
            assert len(ring.events) < 1000
        (told,) = unpacked(packed("m", "1", [], process="p", processes=1, now_ns=0, unix_s=0.0, routing=ring), "here")
        assert told.routing is not None
        history = replay_routing(told.routing)
        assert not history.difference
        assert history.decisions > 3000

    run_simulated(main)
