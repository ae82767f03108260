"""The state that several ingresses follow, without an actor around it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from gateway.cluster import control
from gateway.cluster.control import ControlState

pytestmark = pytest.mark.ray


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 10))


async def follow_on(state: ControlState, ingress: str, version: int) -> None:
    while True:
        await state.follow(ingress, version)


async def publish(state: ControlState, *changes: tuple[str, bool]) -> None:
    """As an ingress of its own does, which applies it at once."""
    await state.join("publishes")
    for model, loaded in changes:
        publishing = asyncio.create_task(state.publish("publishes", model, loaded))
        await asyncio.sleep(0)
        await state.report("publishes", state._version, "")
        assert await publishing == []


def test_publish_returns_when_every_follower_has_reported() -> None:
    async def test() -> None:
        state = ControlState(lambda: 0)
        followers = [asyncio.create_task(state.follow(name, 0)) for name in ("a", "b")]
        await asyncio.sleep(0)
        publishing = asyncio.create_task(state.publish("a", "m", False))
        assert [await follower for follower in followers] == [(1, {"m": False})] * 2
        next_calls = [asyncio.create_task(state.follow(name, 1)) for name in ("a", "b")]
        await state.report("a", 1, "")
        await asyncio.sleep(0)
        assert not publishing.done()
        await state.report("b", 1, "no memory left")
        assert await publishing == ["no memory left"]
        for call in next_calls:
            call.cancel()

    run(test)


def test_who_has_joined_is_waited_for_though_it_does_not_follow_yet() -> None:
    async def test() -> None:
        state = ControlState(lambda: 0)
        await state.join("a")
        publishing = asyncio.create_task(state.publish("a", "m", False))
        await asyncio.sleep(0.1)
        assert not publishing.done()
        assert await state.follow("a", 0) == (1, {"m": False})
        await state.report("a", 1, "")
        assert await publishing == []

    run(test)


def test_a_change_to_the_same_state_joins_the_one_under_way() -> None:
    async def test() -> None:
        state = ControlState(lambda: 0)
        following = asyncio.create_task(state.follow("a", 0))
        await asyncio.sleep(0)
        first = asyncio.create_task(state.publish("a", "m", True))
        assert await following == (1, {"m": 1})
        joined = [asyncio.create_task(state.publish("a", "m", True)) for _ in range(20)]
        await asyncio.sleep(0)
        await state.report("a", 1, "no memory left")
        assert await asyncio.gather(first, *joined) == [["no memory left"]] * 21
        anew = asyncio.create_task(state.publish("a", "m", True))
        await asyncio.sleep(0)
        assert await state.follow("a", 1) == (2, {"m": 2})
        await state.report("a", 2, "")
        assert await anew == []

    run(test)


def test_a_change_to_another_state_follows_the_one_under_way_and_gets_its_own_end() -> None:
    async def test() -> None:
        state = ControlState(lambda: 0)
        following = asyncio.create_task(state.follow("a", 0))
        await asyncio.sleep(0)
        loading = asyncio.create_task(state.publish("a", "m", True))
        await following
        unloading = asyncio.create_task(state.publish("a", "m", False))
        await asyncio.sleep(0)
        assert await state.follow("a", 1) == (2, {"m": False})
        await state.report("a", 1, "")
        await state.report("a", 2, "stuck")
        assert (await loading, await unloading) == ([], ["stuck"])

    run(test)


def test_a_late_follower_gets_all_that_is_wanted_at_once() -> None:
    async def test() -> None:
        state = ControlState(lambda: 0)
        await publish(state, ("m", False), ("n", False), ("n", True))
        assert await state.follow("a", 0) == (3, {"m": 0, "n": 3})
        assert await state.follow("a", 2) == (3, {"n": 3})

    run(test)


def test_a_follower_ahead_of_a_restarted_state_begins_anew() -> None:
    async def test() -> None:
        state = ControlState(lambda: 0)
        await publish(state, ("m", False))
        assert await state.follow("a", 7) == (1, {"m": False})

    run(test)


def test_who_has_begun_with_what_was_asked_has_reported_on_it_and_follows_from_there() -> None:
    async def test() -> None:
        state = ControlState(lambda: 0)
        await state.join("old")
        publishing = asyncio.create_task(state.publish("old", "m", False))
        await asyncio.sleep(0)
        assert await state.asked() == (1, {"m": False})
        await state.join("new", 1)
        following = asyncio.create_task(state.follow("new", 1))
        await state.report("old", 1, "")
        assert await publishing == []
        publishing = asyncio.create_task(state.publish("old", "m", True))
        assert await following == (2, {"m": 2})
        await state.report("old", 2, "")
        await asyncio.sleep(0)
        assert not publishing.done()
        await state.report("new", 2, "no memory left")
        assert await publishing == ["no memory left"]

    run(test)


def test_what_one_has_begun_with_says_nothing_to_a_restarted_state() -> None:
    async def test() -> None:
        state = ControlState(lambda: 0)
        await state.join("a", 7)
        publishing = asyncio.create_task(state.publish("a", "m", False))
        await asyncio.sleep(0.1)
        assert not publishing.done()
        publishing.cancel()

    run(test)


def test_an_actor_that_was_made_anew_is_reminded_and_what_it_knows_counts_more() -> None:
    async def test() -> None:
        state = ControlState(lambda: 0)
        assert await state.remind("a", 7, {"m": 0, "n": 7}) == (8, {})
        assert await state.asked() == (8, {"m": 0, "n": 7})  # no number is new: nothing is read for that
        following = asyncio.create_task(state.follow("a", 8))
        publishing = asyncio.create_task(state.publish("a", "n", False))
        assert await following == (9, {"n": 0})
        await state.report("a", 9, "")
        assert await publishing == []
        assert await state.remind("b", 8, {"m": 0, "n": 7, "o": 3}) == (9, {"n": 0})

    run(test)


@pytest.mark.parametrize("now_ms", [0, 1000])
def test_what_is_published_where_nobody_follows_any_more_waits_for_the_ingresses_and_reaches_them(
    now_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_FOLLOW_S", 0.3)

    async def test() -> None:
        state = ControlState(lambda: now_ms)  # made anew, and its clock may be behind
        publishing = asyncio.create_task(state.publish("a", "m", True))
        await asyncio.sleep(0.01)
        version, changes = await state.remind("a", 500, {"m": 500})
        assert changes == {"m": version}
        assert version > 500
        assert await state.remind("b", 500, {"m": 500}) == (version, changes)
        following = [asyncio.create_task(follow_on(state, name, version)) for name in ("a", "b")]
        await state.report("a", version, "")
        await asyncio.sleep(0.01)
        assert not publishing.done()
        await state.report("b", version, "no memory left")
        assert await publishing == ["no memory left"]
        for call in following:
            call.cancel()

    run(test)


def test_a_failure_is_told_though_other_models_were_loaded_long_after_it() -> None:
    async def test() -> None:
        now_ms = iter((1_000, 9_000))
        state = ControlState(lambda: next(now_ms))
        for name in ("a", "b"):
            await state.join(name)
        failing, other = (asyncio.create_task(state.publish("a", model, True)) for model in "mn")
        await asyncio.sleep(0)
        await state.report("a", 1_000, "no memory left")
        await state.report("a", 9_000, "")
        await state.report("b", 9_000, "")
        assert (await failing, await other) == (["no memory left"], [])

    run(test)


def test_a_load_where_nobody_but_one_follows_any_more_is_a_new_one() -> None:
    async def test() -> None:
        for publisher in ("a", "b"):
            state = ControlState(lambda: 0)
            assert await state.remind("a", 7, {"m": 7}) == (8, {})
            publishing = asyncio.create_task(state.publish(publisher, "m", True))
            await asyncio.sleep(0)
            assert await state.follow("a", 8) == (9, {"m": 9})
            publishing.cancel()

    run(test)


def test_who_starts_after_a_load_that_failed_begins_with_the_one_before() -> None:
    async def test() -> None:
        state = ControlState(lambda: 0)
        await publish(state, ("m", True))
        publishing = asyncio.create_task(state.publish("publishes", "m", True))
        await asyncio.sleep(0)
        assert await state.follow("publishes", 1) == (2, {"m": 2})
        await state.report("publishes", 2, "no such file")
        assert await publishing == ["no such file"]
        assert await state.asked() == (2, {"m": 1})

    run(test)


def test_what_was_asked_for_models_that_an_upgrade_has_removed_is_forgotten() -> None:
    async def test() -> None:
        state = ControlState(lambda: 0)
        await publish(state, ("m", False), ("gone", False))
        await state.join("a", 0, {"m", "new"})
        assert await state.asked() == (2, {"m": False})

    run(test)


def test_it_ends_once_though_several_ask_for_that_and_not_while_an_ingress_that_has_asked_loads_its_models() -> None:
    async def test() -> None:
        state = ControlState(lambda: 0)
        ending = asyncio.create_task(state.end_when_unfollowed())
        await asyncio.sleep(0)
        await state.end_when_unfollowed()
        assert not ending.done()
        ending.cancel()
        assert await state.unfollowed()
        await state.asked()
        assert not await state.unfollowed()

    run(test)
