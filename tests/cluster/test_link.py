"""What is told of a replica, and one batch's call to it: how long it may take where its answer comes in parts."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import msgspec
import pytest

from backends.base import ModelSpec
from gateway.cluster.answers import attend_answer, attendance_decoder
from gateway.cluster.channel import Channel, ChannelLost, OnFramePart, PendingAnswer, Standing
from gateway.cluster.link import _RELEASE, ATTEND_S, Link, LinkLost, NotSent, Outcome
from gateway.cluster.remote import RemoteRunner
from gateway.config import parse_config
from gateway.engine.runner import PARTS_AHEAD
from gateway.errors import BackendFailed
from gateway.wire.tensors import Buffer
from tests.engine.pools import batch_of, start
from tests.simulation import SimulatedClock, run_simulated

pytestmark = pytest.mark.ray  # the package imports it


class Wire:
    """A channel to nowhere: keeps what is told to the replica; the test gives the parts and the answer."""

    is_open = True

    def __init__(self) -> None:
        self.told: list[str] = []
        self.part: OnFramePart
        self.answer: asyncio.Future[Buffer]
        self.on_end: Callable[[], None] = lambda: None

    def ask(self, pieces: Sequence[Buffer], on_part: OnFramePart | None = None) -> PendingAnswer:
        self.answer = asyncio.get_running_loop().create_future()
        if on_part is not None:
            self.part = on_part
        return PendingAnswer(self.answer, lambda: self.told.append("cancel"), lambda: self.told.append("taken"))

    def want(self, ingress: str, batches: float) -> None:
        self.told.append(f"want {batches:g}")

    def close(self) -> None: ...


class WireLink(Link):
    """A link whose channel is a `Wire`. doubts: how often it was to find out whether the replica answers."""

    def __post_init__(self) -> None:
        self.wire = Wire()
        self._channel = cast(Channel, self.wire)
        self.doubts = 0

    def _doubt(self) -> None:
        self.doubts += 1


def simulated(test: Callable[[WireLink], Coroutine[Any, Any, None]]) -> None:
    async def main(_: SimulatedClock) -> None:
        link = WireLink(cast(Any, None), "ingress", lambda: None)
        try:
            await test(link)
        finally:
            if link._watchdog is not None:
                link._watchdog.cancel()

    run_simulated(main)


def test_a_replica_of_another_version_is_understood_where_it_says_less_or_more() -> None:
    spec = ["python", [], [], 8, [], True]
    versions: list[tuple[list[Any], tuple[Any, ...], bool]] = [
        (spec, (), False),
        ([*spec, True], (3,), True),
        ([*spec, True, ["n"], True, "and more"], (3, "and more"), True),
    ]
    for fields, more, decoupled in versions:
        answer = msgspec.msgpack.encode((2, "content", fields, "", True, *more))
        told = attendance_decoder.decode(answer)
        assert (told.slots, told.content, told.fault, told.lives, told.counted) == (2, "content", "", True, 3 if more else 0)
        assert (told.spec.max_rows, told.spec.decoupled) == (8, decoupled)
    spec_of_ours = ModelSpec("python", (), (), 8, decoupled=True, own_arguments=("n",), requests_apart=True)
    told = attendance_decoder.decode(attend_answer(2, "content", spec_of_ours, "", Standing(True, 3)))
    assert ModelSpec(**msgspec.structs.asdict(told.spec)) == spec_of_ours
    assert (told.lives, told.counted) == (True, 3)


def test_the_limit_of_a_call_is_for_each_next_part_and_rests_while_the_client_is_slow() -> None:
    async def test(link: WireLink) -> None:
        parts: list[Buffer] = []
        ended: list[Outcome] = []
        call = link.start((b"frame",), 10.0, ended.append, parts.append)
        for _ in range(PARTS_AHEAD):
            await asyncio.sleep(9.0)
            link.wire.part(b"part")
        await asyncio.sleep(1000.0)
        call.taken()
        for _ in range(3):
            await asyncio.sleep(9.0)
            link.wire.part(b"part")
            call.taken()
        await asyncio.sleep(9.0)
        assert (len(parts), ended, link.doubts) == (PARTS_AHEAD + 3, [], 0)
        await asyncio.sleep(100.0)
        (end,) = ended
        assert isinstance(end, LinkLost)
        assert link.doubts == 1
        call.taken()  # too late
        assert link.wire.answer.cancelled()

    simulated(test)


def test_a_client_that_reads_from_within_a_part_is_not_slow() -> None:
    async def test(link: WireLink) -> None:
        ended: list[Outcome] = []
        call = link.start((b"frame",), 10.0, ended.append, lambda part: call.taken())
        for _ in range(3 * PARTS_AHEAD):
            await asyncio.sleep(1.0)
            link.wire.part(b"part")
        assert link.wire.told == ["taken"] * 3 * PARTS_AHEAD
        await asyncio.sleep(100.0)
        assert [type(end) for end in ended] == [LinkLost]

    simulated(test)


def test_a_replica_without_the_channel_that_its_model_needs_fails_each_call_and_is_not_asked_again_for_it() -> None:
    async def test(link: WireLink) -> None:
        link.no_channel = "no way to it"
        ended: list[Outcome] = []
        link.start((b"frame",), 10.0, ended.append, lambda part: None)
        await asyncio.sleep(1.0)
        assert [(type(end), str(end)) for end in ended] == [(NotSent, "no way to it")]
        assert link.doubts == 0

    simulated(test)


def test_a_wish_is_told_again_once_the_replica_has_told_anything_since() -> None:
    """It may have forgotten it: an ingress that it has not heard of for a while begins anew there, without wishes."""

    async def test(link: WireLink) -> None:
        link.up = True
        link.want()
        link.want()
        assert link.wire.told == ["want 1"]
        link._told_slots(0, Standing(True, 0))
        link.want()
        assert link.wire.told == ["want 1"] * 2
        link._told_slots(1, Standing(True, 0))
        link.want()
        assert link.wire.told == ["want 1"] * 2

    simulated(test)


def test_who_waits_behind_a_batch_that_lasts_says_so_once() -> None:
    async def test(link: WireLink) -> None:
        link.up, link.leased = True, 1
        link.on_change = link.want  # as a lane does while something waits
        link.fill(0)
        for _ in range(3):
            link.want()
        assert link.wire.told == []  # it may end in a moment
        await asyncio.sleep(1.0)
        link.want()
        assert link.wire.told == ["want 0.1"]
        link.vacate()
        link.fill(3)  # which tells the replica that more waits
        await asyncio.sleep(1.0)
        link.want()
        assert link.wire.told == ["want 0.1"]
        link.vacate()
        link.fill(0)  # which tells it that nothing does
        await asyncio.sleep(1.0)
        link.want()
        assert link.wire.told == ["want 0.1"] * 2

    simulated(test)


def test_a_replica_is_told_what_waits_without_a_slot_and_not_what_waits_behind_brief_batches() -> None:
    async def test(link: WireLink) -> None:
        link.up, link.leased = True, 1
        link.on_change = link.want
        for _ in range(1000):
            link.fill(0)
            link.want()
            await asyncio.sleep(0.004)
            link.want()
            link.vacate()
        assert link.wire.told == []
        link.fill(0)
        link._told_slots(0, Standing(True, 0))  # it passes on after this batch
        link.want()
        assert link.wire.told == ["want 1"]  # at once
        link.vacate()
        link.want()
        await asyncio.sleep(1.0)
        assert link.wire.told == ["want 1"]

    simulated(test)


def test_a_wish_that_did_not_get_there_by_a_call_is_told_again() -> None:
    async def test(link: WireLink) -> None:
        link.up, link._channel = True, None
        asked: list[bytes] = []

        async def lost(metadata: bytes, argument: bytes, timeout_s: float) -> bytes:
            asked.append(argument)
            raise LinkLost("unavailable")

        link._request = lost  # type: ignore[method-assign]
        for _ in range(2):
            link.want()
            link.want()
            await asyncio.sleep(1.0)
        assert asked == [msgspec.msgpack.encode(("ingress", 1.0))] * 2

    simulated(test)


class NoChannel:
    """Serve's, which nothing is asked by."""

    async def close(self, grace_s: float | None) -> None: ...


class LeavingLink(WireLink):
    """A link that can be left. asked: how often its replica was asked how it is. answering: whether that answers at the end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asked = 0
        self.answering = True
        self._serve_channel = cast(Any, NoChannel())
        self._attending = asyncio.get_running_loop().create_task(self._attend())

    def _doubt(self) -> None:
        Link._doubt(self)

    async def _attend(self) -> None:
        self.asked += 1
        await asyncio.Event().wait()

    async def _answers(self) -> bool:
        return self.answering


def test_what_becomes_of_a_replica_that_was_left_is_no_news() -> None:
    async def test(_: SimulatedClock) -> None:
        link = LeavingLink(cast(Any, None), "ingress", lambda: None)
        ended: list[Outcome] = []
        link.start((b"frame",), 10.0, ended.append)
        leaving = asyncio.create_task(link.retire())
        await asyncio.sleep(0.1)
        link.wire.on_end = link._doubt  # a channel that was opened only now
        link.wire.answer.set_exception(ChannelLost("its process has ended"))
        await leaving
        assert [type(end) for end in ended] == [LinkLost]
        link.wire.on_end()
        await asyncio.sleep(0.1)
        assert link.asked == 1

    run_simulated(test)


def test_of_a_replica_that_was_left_and_does_not_answer_is_told_what_may_be_the_matter() -> None:
    async def test(_: SimulatedClock) -> None:
        link = LeavingLink(cast(Any, None), "ingress", lambda: None)
        link.answering = False
        ended: list[Outcome] = []
        link.start((b"frame",), 10.0, ended.append)
        await link.retire()
        assert [str(end) for end in ended] == ["it does not answer: frozen, or its node is gone"]

    run_simulated(test)


@pytest.mark.parametrize("doubted", [False, True])
def test_a_replica_that_is_in_doubt_is_told_of_an_unload_too(doubted: bool) -> None:
    async def test(_: SimulatedClock) -> None:
        link = LeavingLink(cast(Any, None), "ingress", lambda: None)
        asked: list[bytes] = []

        async def request(metadata: bytes, argument: bytes, timeout_s: float) -> bytes:
            asked.append(metadata)
            return b""

        link.up, link._request = True, request  # type: ignore[method-assign]
        if doubted:
            link._doubt()
        await link.close(release=True)
        assert asked == [_RELEASE]

    run_simulated(test)


def test_a_replica_is_attended_at_every_moment() -> None:
    async def test(clock: SimulatedClock) -> None:
        link = WireLink(cast(Any, None), "ingress", lambda: None, up=True)
        open_calls = 0
        seen: list[int] = []

        async def request(metadata: bytes, argument: bytes, timeout_s: float) -> bytes:
            nonlocal open_calls
            open_calls += 1
            await asyncio.sleep(ATTEND_S)
            open_calls -= 1
            seen.append(open_calls)
            await asyncio.sleep(0.001)  # on the way
            return attend_answer(1, "content", ModelSpec("", (), (), 8), "", Standing(True, 1))

        link._request = request  # type: ignore[method-assign]
        tasks = [asyncio.create_task(link._attend()), asyncio.create_task(link._stay())]
        await asyncio.sleep(20 * ATTEND_S)
        for task in tasks:
            task.cancel()
        assert set(seen) == {1}, seen

    run_simulated(test)


class FullWire(Wire):
    def ask(self, pieces: Sequence[Buffer], on_part: OnFramePart | None = None) -> PendingAnswer:
        raise MemoryError


def test_a_batch_that_there_is_no_memory_to_send_has_its_one_end_and_gives_its_slot_back() -> None:
    async def test(clock: SimulatedClock) -> None:
        document = {"models": [{"name": "m", "max_rows": 8, "backends": [{"kind": "synthetic"}]}]}
        (backend,) = parse_config(document, source="test").models[0].backends
        runner = RemoteRunner(backend, "deployment", "application", content="", name="m:1/synthetic", clock=clock)
        runner._loop = asyncio.get_running_loop()
        link = WireLink(cast(Any, None), "ingress", lambda: None, up=True, leased=1)
        link._channel = cast(Channel, FullWire())
        runner._usable = [link]
        execution = await start(runner, batch_of(1.0))
        assert isinstance(execution.error, BackendFailed)
        assert "MemoryError" in execution.error.message
        assert (runner.free_slots, len(runner._running), len(link._calls)) == (1, 0, 0)

    run_simulated(test)


@pytest.mark.parametrize(("load", "opened"), [(0, [False, True, True]), (5, [False, False, True])])
def test_a_clients_load_is_done_once_every_replica_has_the_model_or_cannot_load_it(load: int, opened: list[bool]) -> None:
    async def test(clock: SimulatedClock) -> None:
        document = {"models": [{"name": "m", "max_rows": 8, "backends": [{"kind": "synthetic"}]}]}
        (backend,) = parse_config(document, source="test").models[0].backends
        runner = RemoteRunner(backend, "deployment", "application", content="", name="m:1/synthetic", clock=clock, load=load)
        runner._loop = asyncio.get_running_loop()
        runner._opened = runner._loop.create_future()
        links = [WireLink(cast(Any, None), "ingress", lambda: None, load=load) for _ in range(2)]
        runner._links = {str(number): link for number, link in enumerate(links)}
        seen = []
        for change in ({}, {"up": True, "spec": ModelSpec("", (), (), 8)}, {"fault": "no such file"}):
            for name, value in change.items():
                setattr(links["fault" in change], name, value)
            runner._link_changed()
            seen.append(runner._opened.done())
        assert seen == opened

    run_simulated(test)
