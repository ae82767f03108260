"""The figures that routing promises, over the fleet of docs/routing.md: four CPU, two Inf2, one GPU, SLO 60 ms."""

import asyncio
import random

import numpy as np
import pytest

from gateway.errors import BackendFailed, BackendUnreachable
from tests.router.fleet import FLEET, MS, Device, Fault, Fleet, Kind, Result, S, drive, failing, poisson, simulate, slower
from tests.simulation import SimulatedClock, run_simulated

GPU = 6
LYING: Fault = (BackendFailed("says it is ready"), False, 1 * S)  # as Triton with a dead python stub
BROKEN: Fault = (BackendFailed("wrong model"), False, 3 * MS)
GONE: Fault = (BackendUnreachable("connection refused"), True, 1 * MS)


@pytest.mark.slow
def test_the_cheapest_in_time_serves_6000_requests_per_second_at_two_fifths_less_than_the_least_eta() -> None:
    arrivals = poisson(lambda second: 6000.0, 1.2, seed=1)
    ours = simulate(FLEET, arrivals)
    least = simulate(FLEET, arrivals, routing={"policy": "least_eta"})
    queue = simulate(FLEET, arrivals, routing={"policy": "power_of_two"})
    assert ours.in_slo() >= 0.995
    assert least.in_slo() >= 0.995
    assert ours.usd_per_million <= 0.59 * least.usd_per_million
    assert queue.in_slo() < 0.9


@pytest.mark.slow
def test_after_overload_all_is_in_time_again_at_once() -> None:
    arrivals = poisson(lambda second: 16000.0 if 0.5 <= second < 1.5 else 5000.0, 2.5, seed=2)
    result = simulate(FLEET, arrivals)
    assert result.in_slo(0.6, 1.5) >= 0.45  # capacity is 8400: 8400/16000 = 0.52
    assert result.in_slo(1.6, 2.5) >= 0.995


@pytest.mark.slow
@pytest.mark.parametrize("factor", [3.0, 30.0])
def test_a_backend_that_slows_down_costs_only_what_it_was_running(factor: float) -> None:
    arrivals = poisson(lambda second: 1500.0, 4.0, seed=3)
    result = simulate(FLEET, arrivals, [(1.0, slower(GPU, factor)), (2.0, slower(GPU, 1.0))])
    assert np.sum(result.latencies_ns > 60 * MS) <= 20  # of one batch
    assert result.lost() <= 2
    assert result.in_slo(1.5, 4.0) >= 0.999


@pytest.mark.slow
@pytest.mark.parametrize("fault", [LYING, BROKEN, GONE], ids=["lying", "broken", "gone"])
def test_a_backend_that_fails_costs_only_what_it_held_too_long(fault: Fault) -> None:
    arrivals = poisson(lambda second: 1500.0, 5.0, seed=4)
    result = simulate(FLEET, arrivals, [(1.0, failing(GPU, fault)), (3.0, failing(GPU, None))])
    assert result.lost() <= (20 if fault is LYING else 0)
    assert result.lost(from_s=1.5) == 0
    assert result.shares["gpu"] > 0.25  # of five seconds, two without
    assert np.all(result.answers == 1)


def test_a_cheaper_backend_that_was_out_is_used_again_although_its_times_scatter() -> None:
    kinds = (Kind("cheap", 8.0, 0.0, 1.0), Kind("dear", 8.0, 0.0, 1.4))

    async def main(clock: SimulatedClock) -> list[int]:
        fleet, luck = Fleet(clock, kinds, slo_ms=400.0), random.Random(3)
        ran = []
        for at in range(600):
            if at % 50 == 0:
                ran.append(sum(fleet.sessions[0].batches.values()))
            fleet.sessions[0].fault = lambda batch, out=100 <= at < 150: BROKEN if out else None
            for sessions in fleet.sessions:
                sessions.factor = 0.5 if luck.random() < 0.8 else 3.0  # 1 on average
            await fleet.send()
            await asyncio.sleep(0.05)
        return ran

    ran = run_simulated(main)
    assert ran[4] - ran[2] < 60  # of 100: while it was out, and soon after
    assert ran[-1] - ran[6] > 125  # of 250


def test_a_run_is_the_same_each_time() -> None:
    arrivals = poisson(lambda second: 2000.0, 0.3, seed=5)
    one, other = (simulate(FLEET, arrivals, [(0.1, failing(GPU, GONE))]) for _ in range(2))
    assert np.array_equal(one.latencies_ns, other.latencies_ns)
    assert one.shares == other.shares


@pytest.mark.slow
def test_ingress_processes_that_do_not_see_each_other_share_the_same_devices_well() -> None:
    arrivals = [poisson(lambda second: 1400.0, 1.5, seed=seed) for seed in (6, 7, 8)]

    async def main(clock: SimulatedClock) -> list[Result]:
        devices = [Device() for _ in FLEET]
        fleets = [Fleet(clock, FLEET, seed=seed) for seed in range(3)]
        for fleet in fleets:
            for sessions, device in zip(fleet.sessions, devices, strict=True):
                sessions.device = device
        return list(await asyncio.gather(*(drive(fleet, times) for fleet, times in zip(fleets, arrivals, strict=True))))

    for result in run_simulated(main):
        assert result.in_slo(0.3) >= 0.99
