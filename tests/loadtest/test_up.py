"""Which candidates are up, and whose turn it is to be asked; what they cost by the clock."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from loadtest.lab.launchers.launcher import GENERATOR, Quota, StartFailed
from loadtest.lab.up import UpCandidates
from loadtest.prices.catalogue import Price
from loadtest.prices.purse import Purse
from loadtest.question.candidates import CandidateSetup
from tests.loadtest.examples import example_spec
from tests.loadtest.test_recommender import FakeLauncher, FakeRunning


class PaidLauncher(FakeLauncher):
    """Any number at once; says in which order they were started and stopped."""

    paid = True
    start_s = 0.0

    def __init__(self, parallel: int = 2, max_usd: float = 1.0) -> None:
        super().__init__()
        self.parallel = parallel
        self.purse = Purse(max_usd, clock=lambda: 0.0)
        self.most = 0
        self.quotas: dict[str, Quota] = {}

    def quota(self, candidate: CandidateSetup) -> Quota | None:
        return self.quotas.get(candidate.name)

    async def start(self, candidate: CandidateSetup) -> FakeRunning:
        await asyncio.sleep(0)
        self.running.add(candidate.name)
        self.started.append(candidate.name)
        self.most = max(self.most, len(self.running))
        return FakeRunning(self, candidate.name)


def candidates(count: int, usd_per_hour: float = 1.0) -> list[CandidateSetup]:
    (one, *_) = example_spec().candidates
    return [
        replace(one, name=f"c{number}", price=Price(usd_per_hour=usd_per_hour + number, source="-", date=None))
        for number in range(count)
    ]


def test_no_more_are_up_than_may_be_and_the_idle_one_makes_room() -> None:
    launcher = PaidLauncher(2)
    launcher.start_s = 3600.0  # nobody is idle for too long
    launcher.purse.max_usd = None

    async def scenario() -> None:
        up = UpCandidates(launcher)
        a, b, c = candidates(3)
        for each in (a, b, a, c, a):
            async with up.held(each) as running:
                assert running.name == each.name
        assert launcher.started == ["c0", "c1", "c2"]  # c1 was idle longest when c2 came
        assert launcher.running == {"c0", "c2"}
        await up.close()

    asyncio.run(scenario())
    assert launcher.most == 2
    assert launcher.running == set()


def test_a_quota_that_is_taken_holds_back_those_of_its_kind_until_one_of_them_has_left() -> None:
    launcher = PaidLauncher(3)
    launcher.start_s = 3600.0
    launcher.purse.max_usd = None
    a, b, c = candidates(3)
    launcher.quotas = {a.name: Quota("ml.c7i.large", 4, 3), b.name: Quota("ml.c7i.large", 4, 2)}
    together: list[set[str]] = []

    async def scenario() -> None:
        up = UpCandidates(launcher)

        async def ask(candidate: CandidateSetup) -> None:
            async with up.held(candidate):
                together.append(set(launcher.running))

        await asyncio.gather(ask(a), ask(b), ask(c))
        await up.close()

    asyncio.run(scenario())
    assert sorted(launcher.started) == ["c0", "c1", "c2"]
    assert {"c0", "c2"} in together
    assert not any({"c0", "c1"} <= running for running in together)


def test_who_is_idle_for_longer_than_a_start_takes_is_stopped_when_another_is_asked() -> None:
    launcher = PaidLauncher(3)

    async def scenario() -> None:
        up = UpCandidates(launcher)
        a, b = candidates(2)
        async with up.held(a):
            pass
        async with up.held(b):
            assert launcher.running == {"c1"}
        await up.close()

    asyncio.run(scenario())


def test_one_is_asked_at_a_time_the_cheapest_of_those_who_wait_first() -> None:
    launcher = PaidLauncher(4)
    asked: list[str] = []

    async def scenario() -> None:
        up = UpCandidates(launcher)
        first, *others = candidates(4)
        free = asyncio.Event()

        async def ask(candidate: CandidateSetup, waits: bool = False) -> None:
            async with up.held(candidate):
                asked.append(candidate.name)
                await (free.wait() if waits else asyncio.sleep(0))
                assert asked[-1] == candidate.name, "nobody was asked meanwhile"

        tasks = [asyncio.create_task(ask(first, True))]
        await asyncio.sleep(0.01)
        tasks += [asyncio.create_task(ask(each)) for each in reversed(others)]
        await asyncio.sleep(0.01)
        cancelled = asyncio.create_task(ask(first))
        await asyncio.sleep(0)
        cancelled.cancel()
        free.set()
        await asyncio.gather(*tasks)
        await up.close()

    asyncio.run(scenario())
    assert asked == ["c0", "c1", "c2", "c3"]


def test_a_start_that_the_money_does_not_pay_for_is_refused() -> None:
    launcher = PaidLauncher(max_usd=1.0)
    launcher.start_s = 600.0
    (one,) = candidates(1, usd_per_hour=4.0)

    async def scenario(spent_usd: float) -> Any:
        up = UpCandidates(launcher, spent_usd=spent_usd)
        async with up.held(one):
            pass
        await up.close()

    asyncio.run(scenario(0.2))  # 660 s at 4 $/h are 0.73 $
    with pytest.raises(StartFailed, match=r"its start could exceed --max-usd: \$0\.700 is left, at \$4\.00/h"):
        asyncio.run(scenario(0.3))


def test_a_generator_that_runs_is_counted_once() -> None:
    launcher = PaidLauncher(max_usd=1.0)
    launcher.start_s = 600.0
    launcher.beside_usd_per_hour = 2.0
    (one,) = candidates(1, usd_per_hour=3.0)

    async def scenario(spent_usd: float) -> Any:
        up = UpCandidates(launcher, spent_usd=spent_usd)
        async with up.held(one):
            pass
        await up.close()

    for _ in range(2):
        asyncio.run(scenario(0.05))  # 660 s at 5 $/h are 0.92 $
        with pytest.raises(StartFailed, match=r"its start could exceed --max-usd: \$0\.900 is left, at \$5\.00/h"):
            asyncio.run(scenario(0.1))
        launcher.purse.begin(GENERATOR, launcher.beside_usd_per_hour)


def test_a_purse_counts_from_the_beginning_of_each_until_its_end() -> None:
    now_s = 0.0
    purse = Purse(3.0, clock=lambda: now_s)
    assert purse.left_s() == float("inf")  # nothing runs
    purse.begin("a", 1.0)
    assert purse.runs("a")
    now_s = 1800.0
    purse.begin("b", 2.0)
    now_s = 3600.0
    assert purse.usd == pytest.approx(1.0 + 1.0)
    assert purse.left_s() == pytest.approx(1200.0)  # 1 $ at 3 $/h
    assert purse.left_s(besides_usd=0.5, also_usd_per_hour=3.0) == pytest.approx(300.0)
    purse.end("a")
    purse.end("a")
    now_s = 7200.0
    assert purse.usd == pytest.approx(1.0 + 3.0)
    assert purse.left_s() < 0
    purse.end("b")
    now_s = 9000.0
    assert purse.usd == pytest.approx(4.0)
    assert Purse().left_s(also_usd_per_hour=5.0) == float("inf")
