"""The state that several ingresses follow, without an actor around it."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from gateway.cluster import control
from gateway.cluster.control import ControlState, SharedControl
from gateway.errors import BackendFailed

pytestmark = pytest.mark.ray
CHANGES = (("m", True), ("n", True), ("o", False))


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
        await state.report("publishes", state._version, {})
        assert await publishing == []


def test_publish_returns_when_every_follower_has_reported() -> None:
    async def test() -> None:
        state = ControlState(lambda: 0)
        followers = [asyncio.create_task(state.follow(name, 0)) for name in ("a", "b")]
        await asyncio.sleep(0)
        publishing = asyncio.create_task(state.publish("a", "m", False))
        assert [await follower for follower in followers] == [(1, {"m": False})] * 2
        next_calls = [asyncio.create_task(state.follow(name, 1)) for name in ("a", "b")]
        await state.report("a", 1, {})
        await asyncio.sleep(0)
        assert not publishing.done()
        await state.report("b", 1, {"m": "no memory left"})
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
        await state.report("a", 1, {})
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
        await state.report("a", 1, {"m": "no memory left"})
        assert await asyncio.gather(first, *joined) == [["no memory left"]] * 21
        anew = asyncio.create_task(state.publish("a", "m", True))
        await asyncio.sleep(0)
        assert await state.follow("a", 1) == (2, {"m": 2})
        await state.report("a", 2, {})
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
        await state.report("a", 1, {})
        await state.report("a", 2, {"m": "stuck"})
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
        await state.report("old", 1, {})
        assert await publishing == []
        publishing = asyncio.create_task(state.publish("old", "m", True))
        assert await following == (2, {"m": 2})
        await state.report("old", 2, {})
        await asyncio.sleep(0)
        assert not publishing.done()
        await state.report("new", 2, {"m": "no memory left"})
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
        await state.report("a", 9, {})
        assert await publishing == []
        assert await state.remind("b", 8, {"m": 0, "n": 7, "o": 3}) == (9, {"n": 0})

    run(test)


@pytest.mark.parametrize("now_ms", [0, 1000])
def test_what_is_published_where_nobody_follows_any_more_waits_for_the_ingresses_and_reaches_them(
    now_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_FOLLOW_S", 0.3)
    monkeypatch.setattr(control, "_GONE_AFTER_S", 0.3)

    async def test() -> None:
        state = ControlState(lambda: now_ms)  # made anew, and its clock may be behind
        publishing = asyncio.create_task(state.publish("a", "m", True))
        await asyncio.sleep(0.01)
        version, changes = await state.remind("a", 500, {"m": 500})
        assert changes == {"m": version}
        assert version > 500
        assert await state.remind("b", 500, {"m": 500}) == (version, changes)
        following = [asyncio.create_task(follow_on(state, name, version)) for name in ("a", "b")]
        await state.report("a", version, {})
        await asyncio.sleep(0.01)
        assert not publishing.done()
        await state.report("b", version, {"m": "no memory left"})
        assert await publishing == ["no memory left"]
        for call in following:
            call.cancel()

    run(test)


def test_each_change_is_told_its_own_end_though_one_report_is_on_several() -> None:
    async def test() -> None:
        now_ms = iter((1_000, 9_000, 9_001))
        state = ControlState(lambda: next(now_ms))
        for name in ("a", "b"):
            await state.join(name)
        failing, other, unloading = (asyncio.create_task(state.publish("a", *change)) for change in CHANGES)
        await asyncio.sleep(0)
        await state.report("a", 1_000, {"m": "no memory left"})
        await state.report("a", 9_001, {})
        await state.report("b", 9_001, {"m": "no such file"})
        assert (await failing, await other, await unloading) == (["no memory left", "no such file"], [], [])
        assert await state.asked() == (9_001, {"n": 9_000, "o": 0})

    run(test)


def test_who_is_killed_while_the_load_that_it_asked_for_runs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_GONE_AFTER_S", 0.05)

    async def test() -> None:
        state = ControlState(lambda: 0)
        for name in ("killed", "b"):
            await state.join(name)
        publishing = asyncio.create_task(state.publish("killed", "m", True))
        following = asyncio.create_task(follow_on(state, "b", 1))
        await state.report("b", 1, {})
        assert await publishing == []
        assert await state.follow("new", 0) == (1, {"m": 1})
        following.cancel()

    run(test)


def test_who_stood_still_comes_back_with_what_it_has_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_GONE_AFTER_S", 0.05)

    async def test() -> None:
        state = ControlState(lambda: 0)
        for name in ("a", "b"):
            await state.join(name)
        following = [asyncio.create_task(follow_on(state, "b", 1))]
        publishing = asyncio.create_task(state.publish("b", "m", True))
        await asyncio.sleep(0)
        await state.report("a", 1, {"m": "no memory left"})
        await asyncio.sleep(0.2)
        await state.join("c")  # what is long gone is looked at then
        following += [asyncio.create_task(follow_on(state, name, 1)) for name in ("a", "c")]
        for name in ("b", "c"):
            await state.report(name, 1, {})
        assert await publishing == ["no memory left"]
        for call in following:
            call.cancel()

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


@pytest.mark.parametrize("before", [(), (True,), (False,), (True, False)])
def test_who_starts_after_a_load_that_failed_begins_with_what_was_before(before: tuple[bool, ...]) -> None:
    async def test() -> None:
        state = ControlState(lambda: 0)
        await publish(state, *(("m", loaded) for loaded in before))
        _, good = await state.asked()
        for _ in range(2):
            publishing = asyncio.create_task(state.publish("publishes", "m", True))
            await asyncio.sleep(0)
            version, changes = await state.follow("publishes", state._version - 1)
            assert changes == {"m": version}
            await state.report("publishes", version, {"m": "no such file"})
            assert await publishing == ["no such file"]
            assert await state.asked() == (version, good)

    run(test)


class LocalActor:
    """The state as its actor's handle shows it, `died` in place of a call that Ray fails."""

    def __init__(self, state: ControlState) -> None:
        self.state, self.died = state, False

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(self._call, method))

    def _call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._answer(method, arguments))

    async def _answer(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if self.died:
            raise RayActorError
        return await getattr(self.state, method)(*arguments)


def test_a_load_that_failed_is_forgotten_by_those_that_remind_an_actor_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_FOLLOW_S", 0.1), ("_RETRY_S", 0.01), ("_GONE_AFTER_S", 0.05)):
        monkeypatch.setattr(control, name, seconds)

    async def apply(model: str, loaded: bool) -> None:
        if bad:
            raise BackendFailed("no such file")

    async def test() -> None:
        nonlocal bad
        actor = LocalActor(ControlState(lambda: 0))
        ingress = SharedControl("gateway", runtime_env={})
        monkeypatch.setattr(ingress, "_actor", lambda: actor)
        await ingress.asked()
        await ingress.follow(apply, {"m", "n"})
        await ingress.publish("m", True)
        bad = True
        for model in "mn":
            with pytest.raises(BackendFailed, match="no such file"):
                await ingress.publish(model, True)
        assert (ingress.load_of("m"), ingress.load_of("n")) == (1, 0)
        lost, actor = actor, LocalActor(ControlState(lambda: 0))
        lost.died = True
        bad = False
        await ingress.publish("n", False)  # ends once it was reminded
        assert await actor.state.asked() == (4, {"m": 1, "n": 0})
        await ingress.close()

    bad = False
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
