"""The state that several ingresses follow, without an actor around it."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from gateway.cluster import control, control_state
from gateway.cluster.control import SharedControl
from gateway.cluster.control_state import MOST_UNDER_WAY, ControlState, ModelChange
from gateway.errors import BackendFailed, BackendUnreachable, NotReady

pytestmark = pytest.mark.ray

tokens = itertools.count()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, seconds in (
        (control_state, "_FOLLOW_S", 0.1),
        (control_state, "_GONE_AFTER_S", 0.05),
        (control, "_RETRY_S", 0.01),
    ):
        monkeypatch.setattr(module, name, seconds)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 10))


async def joined(*ingresses: str) -> ControlState:
    state = ControlState(lambda: 0)
    for ingress in ingresses:
        await state.join(ingress)
    return state


async def ask(state: ControlState, ingress: str, model: str, loaded: bool) -> asyncio.Task[list[str]]:
    asking = asyncio.create_task(_asked(state, ingress, model, loaded))
    await asyncio.sleep(0)
    return asking


async def _asked(state: ControlState, ingress: str, model: str, loaded: bool) -> list[str]:
    token = next(tokens)
    assert await state.ask(ingress, token, model, loaded)
    asked = state._waited[ingress][token]
    told = (await state.ended(ingress, [token]))[token]
    errors = asked.errors if asked.errors is not None else told  # which another call of this ingress may have been given
    assert errors is not None
    return errors


async def settle(state: ControlState, *changes: tuple[str, bool]) -> None:
    """As an ingress of its own does, which applies each at once."""
    await state.join("settles")
    for model, loaded in changes:
        publishing = await ask(state, "settles", model, loaded)
        await state.report("settles", state._newest, "")
        assert await publishing == []


@contextlib.asynccontextmanager
async def following(state: ControlState, *ingresses: str) -> AsyncIterator[None]:
    """They do nothing else meanwhile."""

    async def follow(ingress: str) -> None:
        while True:
            await state.follow(ingress, state._newest)

    tasks = [asyncio.create_task(follow(ingress)) for ingress in ingresses]
    await asyncio.sleep(0)
    yield
    for task in tasks:
        task.cancel()


def test_a_change_ends_when_every_follower_has_reported() -> None:
    async def test() -> None:
        state = await joined("a", "b")
        calls = [asyncio.create_task(state.follow(name, 0)) for name in ("a", "b")]
        publishing = await ask(state, "a", "m", False)
        assert [await call for call in calls] == [(1, [(1, "m", False)])] * 2
        async with following(state, "a", "b"):
            await state.report("a", 1, "")
            await asyncio.sleep(0)
            assert not publishing.done()
            await state.report("b", 1, "no memory left")
            assert await publishing == ["no memory left"]

    run(test)


def test_a_change_to_the_same_state_joins_the_one_under_way() -> None:
    async def test() -> None:
        state = await joined("a")
        first = await ask(state, "a", "m", True)
        more = [await ask(state, "a", "m", True) for _ in range(20)]
        assert await state.follow("a", 0) == (1, [(1, "m", True)])
        await state.report("a", 1, "no memory left")
        assert await asyncio.gather(first, *more) == [["no memory left"]] * 21
        anew = await ask(state, "a", "m", True)
        assert await state.follow("a", 1) == (3, [(2, "m", None), (3, "m", True)])
        await state.report("a", 3, "")
        assert await anew == []

    run(test)


def test_a_change_joins_none_that_has_ended_though_who_comes_later_has_not_applied_it(quick: None) -> None:
    async def test() -> None:
        state = await joined("a")
        begun, _ = await state.asked()
        await settle(state, ("m", True))
        await state.join("later", begun)
        second = await ask(state, "a", "m", True)
        assert await state.follow("a", 1) == (2, [(2, "m", True)])
        second.cancel()

    run(test)


def test_each_change_is_handed_on_and_is_told_its_own_end() -> None:
    async def test() -> None:
        state = await joined("a", "b")
        unloading, loading, other = [await ask(state, "a", *change) for change in (("m", False), ("m", True), ("n", True))]
        changes = [(1, "m", False), (2, "m", True), (3, "n", True)]
        assert await state.follow("a", 0) == await state.follow("b", 0) == (3, changes)
        assert await state.follow("b", 1) == (3, changes[1:])
        for name in ("a", "b"):
            for number, error in ((1, ""), (2, f"{name} broke"), (3, "")):
                await state.report(name, number, error)
        assert (await unloading, await loading, await other) == ([], ["a broke", "b broke"], [])
        assert await state.asked() == (3, [(1, "m", False), (3, "n", True)])

    run(test)


def test_who_starts_begins_with_what_is_settled_and_follows_what_is_under_way(quick: None) -> None:
    async def test() -> None:
        state = await joined("old")
        await settle(state, ("m", True), ("m", False), ("gone", False))
        async with following(state, "old"):
            loading = await ask(state, "old", "m", True)
            begun, settled = await state.asked()
            assert (begun, settled) == (3, [(2, "m", False), (3, "gone", False)])
            await state.join("new", begun, {"m"})
            assert await state.follow("new", begun) == (4, [(4, "m", True)])
            await state.report("old", 4, "")
            await state.report("settles", 4, "")
            await asyncio.sleep(0)
            assert not loading.done()
            await state.report("new", 4, "no memory left")
            assert await loading == ["no memory left"]

    run(test)


@pytest.mark.parametrize(
    ("before", "undone"), [((), [None]), ((True,), []), ((False,), [False]), ((True, False), [False]), ((False, True), [])]
)
def test_a_load_that_failed_leaves_what_was_before(before: tuple[bool, ...], undone: list[bool | None]) -> None:
    async def test() -> None:
        state = await joined()
        await settle(state, *(("m", loaded) for loaded in before))
        for _ in range(2):
            loading = await ask(state, "settles", "m", True)
            failed = state._newest
            await state.report("settles", failed, "no such file")  # it may have loaded other versions
            assert await loading == ["no such file"]
            _, changes = await state.follow("settles", failed) if undone else (0, [])
            assert [change.loaded for change in changes] == undone
            await state.report("settles", state._newest, "")
            begun, settled = await state.asked()
            assert (begun, [change.loaded for change in settled]) == (state._newest, [*before[-1:]] or [None])
            assert await state.newest("m") == (begun, before[-1:] == (False,))

    run(test)


def test_a_load_that_failed_somewhere_after_an_unload_is_undone_where_it_went_well(quick: None) -> None:
    async def test() -> None:
        state = await joined("a", "b")
        await settle(state, ("m", False))
        async with following(state, "a", "b", "settles"):
            loading = await ask(state, "a", "m", True)
            for name, error in (("a", "no such file"), ("b", ""), ("settles", "")):
                await state.report(name, 2, error)
            assert await loading == ["no such file"]
            assert await state.follow("b", 2) == (3, [(3, "m", False)])

    run(test)


def test_who_is_killed_while_the_load_that_it_asked_for_runs_is_not_waited_for(quick: None) -> None:
    async def test() -> None:
        state = await joined("killed", "b")
        loading = await ask(state, "killed", "m", True)
        async with following(state, "b"):
            await state.report("b", 1, "")
            assert await loading == []

    run(test)


def test_who_stood_still_comes_back_with_what_it_has_reported(quick: None) -> None:
    async def test() -> None:
        state = await joined("a", "b")
        async with following(state, "b"):
            loading = await ask(state, "b", "m", True)
            await state.report("a", 1, "no memory left")
            await asyncio.sleep(0.2)
            await state.join("c")  # what is long gone is looked at then
            async with following(state, "a", "c"):
                for name in ("b", "c"):
                    await state.report(name, 1, "")
                assert await loading == ["no memory left"]

    run(test)


def test_an_actor_made_anew_is_reminded_and_numbers_on(quick: None) -> None:
    async def test() -> None:
        state = await joined()
        assert await state.follow("a", 7) is None
        unload, load = ModelChange(5, "m", False), ModelChange(7, "n", True)
        assert await state.remind("a", 7, [unload, load], []) == (7, [])
        assert await state.asked() == (7, [unload, load])
        assert await state.remind("b", 9, [ModelChange(2, "m", True), unload, ModelChange(9, "o", False)], []) == (9, [load])
        assert await state.follow("a", 7) == (9, [(9, "o", False)])
        async with following(state, "b"):
            unloading = await ask(state, "a", "n", False)
            assert await state.follow("a", 9) == (10, [(10, "n", False)])
            for name in ("a", "b"):
                await state.report(name, 10, "")
            assert await unloading == []

    run(test)


def test_a_change_under_way_as_the_actor_is_lost_ends_as_those_say_that_apply_it(quick: None) -> None:
    async def test() -> None:
        for error, left in (("", [(7, "m", True)]), ("no such file", [(6, "m", True)])):
            state = await joined()
            await state.remind("a", 7, [ModelChange(6, "m", True)], [ModelChange(7, "m", True)])
            await state.remind("b", 7, [ModelChange(6, "m", True)], [ModelChange(7, "m", True)])
            assert await state.remind("done", 7, [ModelChange(7, "m", True)], []) == (7, [])
            assert await state.asked() == (6, [(6, "m", True)])
            await state.report("a", 7, "")
            await state.report("b", 7, error)
            assert await state.asked() == (7, left)
            assert await state.remind("late", 7, [ModelChange(6, "m", True)], [ModelChange(7, "m", True)])
            assert (await state.asked())[0] == (7 if not error else 6)

    run(test)


def test_what_is_asked_where_nobody_is_known_waits_for_the_ingresses_that_were_there(quick: None) -> None:
    async def test() -> None:
        state = await joined()
        loading = await ask(state, "a", "m", True)
        for name in ("a", "b"):
            assert await state.remind(name, 500, [ModelChange(500, "m", True)], []) == (500, [])
        call = asyncio.create_task(state.follow("b", 500))
        async with following(state, "a"):
            assert await call == (501, [(501, "m", True)])
            await state.report("a", 501, "")
            assert not loading.done()
            await state.report("b", 501, "no memory left")
            assert await loading == ["no memory left"]

    run(test)


def test_what_waits_for_reminders_is_numbered_in_the_order_in_which_it_was_asked_for(quick: None) -> None:
    async def test() -> None:
        state = await joined()
        asking = [await ask(state, "a", f"m{number}", True) for number in range(50)]
        await state.remind("a", 500, [], [])
        await asyncio.sleep(0.2)
        assert [asked.change.model for asked in state._asked] == [f"m{number}" for number in range(50)]
        for each in asking:
            each.cancel()

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


class LocalActor:
    """The state as its actor's handle shows it. died: calls fail, as those of Ray's do."""

    def __init__(self, state: ControlState) -> None:
        self.state, self.died, self.calls = state, asyncio.Event(), list[str]()

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(self._call, method))

    def _call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        self.calls.append(method)
        return asyncio.ensure_future(self._answer(method, arguments))

    async def _answer(self, method: str, arguments: tuple[Any, ...]) -> Any:
        call, died = (asyncio.ensure_future(each) for each in (getattr(self.state, method)(*arguments), self.died.wait()))
        await asyncio.wait((call, died), return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            call.cancel()
            raise RayActorError
        died.cancel()
        return call.result()


@pytest.mark.parametrize(("model", "again"), [("n", [(1001, "m", False)]), ("m", [])])
def test_what_was_under_way_is_asked_again_of_those_that_the_new_actor_has_given_later_changes(
    model: str, again: list[tuple[int, str, bool]]
) -> None:
    async def test() -> None:
        state = ControlState(lambda: 1000)
        await state.join("new")
        asking = await ask(state, "new", model, True)
        under_way = [ModelChange(5, "m", True), ModelChange(6, "m", False)]
        assert await state.remind("stood still", 6, [], under_way) == (1000 + len(again), [(1000, model, True), *again])
        assert (await state.follow("new", 1000) if again else (1000, [])) == (1000 + len(again), again)
        asking.cancel()

    run(test)


def test_a_load_that_failed_is_forgotten_by_those_that_remind_an_actor_made_anew(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def apply(model: str, loaded: bool | None) -> None:
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
        lost.died.set()
        bad = False
        await ingress.publish("n", False)  # ends once it was reminded
        assert await actor.state.asked() == (5, [(1, "m", True), (5, "n", False)])
        await ingress.close()

    bad = False
    run(test)


def test_a_load_that_failed_somewhere_is_undone_for_good_where_nothing_was_asked_before(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        actor = lost = LocalActor(await joined())
        applied: dict[str, list[bool | None]] = {"a": [], "b": []}
        ingresses = {}
        for name in applied:

            async def apply(model: str, loaded: bool | None, name: str = name) -> None:
                applied[name].append(loaded)
                if loaded and name == "a":
                    raise BackendFailed("no such file")

            ingresses[name] = ingress = SharedControl("gateway", runtime_env={})
            monkeypatch.setattr(ingress, "_actor", lambda: actor)
            await ingress.asked()
            await ingress.follow(apply, {"m", "n"})
        with pytest.raises(BackendFailed, match="no such file"):
            await ingresses["a"].publish("m", True)
        await ingresses["a"].publish("n", False)  # which comes behind
        assert applied == {"a": [True, None, False], "b": [True, None, False]}
        actor = LocalActor(ControlState(lambda: 0))
        lost.died.set()
        await ingresses["b"].publish("n", False)  # ends once it was reminded
        assert await actor.state.asked() == (4, [(2, "m", None), (4, "n", False)])
        later = SharedControl("gateway", runtime_env={})
        monkeypatch.setattr(later, "_actor", lambda: actor)
        assert await later.asked() == {"n": False}
        for ingress in ingresses.values():
            await ingress.close()

    run(test)


def test_a_load_that_fails_as_the_actor_is_lost_is_undone(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[bool | None] = []

    async def test() -> None:
        actor = LocalActor(await joined())

        async def apply(model: str, loaded: bool | None) -> None:
            nonlocal actor
            applied.append(loaded)
            if loaded:
                lost, actor = actor, LocalActor(ControlState(lambda: 0))
                lost.died.set()
                raise BackendFailed("no such file")

        ingress = SharedControl("gateway", runtime_env={})
        monkeypatch.setattr(ingress, "_actor", lambda: actor)
        await ingress.asked()
        await ingress.follow(apply, {"m", "n"})
        with pytest.raises(BackendUnreachable):
            await ingress.publish("m", True)
        await ingress.publish("n", False)  # ends once it was reminded
        assert applied == [True, None, False]
        await ingress.close()

    run(test)


def test_who_starts_waits_no_longer_than_a_while_for_an_actor_that_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def apply(model: str, loaded: bool | None) -> None: ...

    async def test() -> None:
        monkeypatch.setattr(control, "_ASKED_S", 0.01)
        actor = LocalActor(await joined())
        ingress = SharedControl("gateway", runtime_env={})
        monkeypatch.setattr(ingress, "_actor", lambda: actor)
        monkeypatch.setattr(actor, "_answer", lambda *_: asyncio.Event().wait())
        assert await ingress.asked() == {}
        await ingress.follow(apply, {"m"})
        await ingress.close()

    run(test)


def test_clients_of_an_ingress_wait_by_one_call_and_are_told_as_it_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = asyncio.Event()

    async def apply(model: str, loaded: bool | None) -> None:
        await loading.wait()

    async def test() -> None:
        actor = LocalActor(await joined())
        ingress = SharedControl("gateway", runtime_env={})
        monkeypatch.setattr(ingress, "_actor", lambda: actor)
        await ingress.asked()
        await ingress.follow(apply, {"m"})
        asking = [asyncio.create_task(ingress.publish("m", True)) for _ in range(2000)]
        asking[0].cancel()
        await asyncio.sleep(0.01)
        for more in range(1, MOST_UNDER_WAY):
            asking.append(asyncio.create_task(ingress.publish("m", more % 2 == 0)))
            await asyncio.sleep(0)
        with pytest.raises(NotReady, match="model 'm': 16 loads and unloads of it are under way, which is the most"):
            await ingress.publish("m", more % 2 != 0)
        assert actor.calls.count("ended") == 1
        await ingress.close()
        called = len(actor.calls)
        for each in (*asking[1:], ingress.publish("m", True)):
            with pytest.raises(NotReady, match="shutting down"):
                await each
        assert len(actor.calls) == called

    run(test)


def test_what_was_asked_for_last_comes_last_over_all_ingresses_also_where_clients_gave_up(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        actor, loading = LocalActor(await joined()), asyncio.Event()
        known = {"a": True, "b": True}
        ingresses = {}
        for name in known:

            async def apply(model: str, loaded: bool | None, name: str = name) -> None:
                await loading.wait()
                known[name] = loaded

            ingresses[name] = ingress = SharedControl("gateway", runtime_env={})
            monkeypatch.setattr(ingress, "_actor", lambda: actor)
            await ingress.asked()
            await ingress.follow(apply, {"m"})
        given_up = []
        for loaded in (True, False):
            given_up.append(asyncio.create_task(ingresses["a"].publish("m", loaded)))
            await asyncio.sleep(0.01)
        for each in given_up:
            each.cancel()
        last = asyncio.create_task(ingresses["b"].publish("m", True))
        await asyncio.sleep(0.01)
        loading.set()
        await last
        await asyncio.sleep(0.05)
        assert known == {"a": True, "b": True}
        assert [change.loaded for change in (await actor.state.asked())[1]] == [True]
        for ingress in ingresses.values():
            await ingress.close()

    run(test)


def test_who_waits_is_told_that_the_actor_was_lost(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def apply(model: str, loaded: bool | None) -> None:
        await asyncio.Event().wait()

    async def test() -> None:
        actor = lost = LocalActor(await joined())
        ingress = SharedControl("gateway", runtime_env={})
        monkeypatch.setattr(ingress, "_actor", lambda: actor)
        await ingress.asked()
        await ingress.follow(apply, {"m"})
        loading = asyncio.create_task(ingress.publish("m", True))
        await asyncio.sleep(0.01)
        actor = LocalActor(ControlState(lambda: 0))
        lost.died.set()
        with pytest.raises(BackendUnreachable, match="repository control gateway: "):
            await loading
        await ingress.close()

    run(test)
