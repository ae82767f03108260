"""What is told of a replica, and one batch's call to it: how long it may take where its answer comes in parts."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import msgspec
import pytest

from backends.base import ModelSpec
from gateway.cluster.channel import Channel, OnPart, Question
from gateway.cluster.link import Call, _attendance_decoder, attend_answer
from gateway.protocols.tensors import Buffer
from gateway.runner import PARTS_AHEAD
from tests.simulation import SimulatedClock, run_simulated

pytestmark = pytest.mark.ray  # the package imports it


class Wire:
    """A channel to nowhere: keeps what is told to the replica; the test gives the parts and the answer."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.part: OnPart
        self.answer: asyncio.Future[Buffer]

    def ask(self, pieces: Sequence[Buffer], on_part: OnPart | None = None) -> Question:
        self.answer = asyncio.get_running_loop().create_future()
        if on_part is not None:
            self.part = on_part
        return Question(self.answer, lambda: self.told.append("cancel"), lambda: self.told.append("taken"))


def simulated(test: Callable[[Wire], Coroutine[Any, Any, None]]) -> None:
    async def main(_: SimulatedClock) -> None:
        await test(Wire())

    run_simulated(main)


def begun(call: Call, wire: Wire) -> "asyncio.Task[Buffer]":
    return asyncio.ensure_future(call.by(cast(Channel, wire), (b"frame",)))


def test_a_replica_of_another_version_is_understood_where_it_says_less_or_more() -> None:
    spec = ["python", [], [], 8, [], True]
    for fields, decoupled in ((spec, False), ([*spec, True], True), ([*spec, True, "and more"], True)):
        answer = msgspec.msgpack.encode((2, "content", fields, ""))
        slots, content, found, fault = _attendance_decoder.decode(answer)
        assert (slots, content, fault) == (2, "content", "")
        assert (found.max_rows, found.decoupled) == (8, decoupled)
    spec_of_ours = ModelSpec("python", (), (), 8, decoupled=True)
    _, _, found, _ = _attendance_decoder.decode(attend_answer(2, "content", spec_of_ours))
    assert ModelSpec(*msgspec.structs.astuple(found)) == spec_of_ours


def test_the_limit_of_a_call_is_for_each_next_part_and_rests_while_the_client_is_slow() -> None:
    async def test(wire: Wire) -> None:
        parts: list[Buffer] = []
        call = Call(10.0)
        call.on_part = parts.append
        running = begun(call, wire)
        for _ in range(PARTS_AHEAD):
            await asyncio.sleep(9.0)
            wire.part(b"part")
        await asyncio.sleep(1000.0)
        call.taken()
        for _ in range(3):
            await asyncio.sleep(9.0)
            wire.part(b"part")
            call.taken()
        assert not running.done()
        assert len(parts) == PARTS_AHEAD + 3
        await asyncio.sleep(9.9)
        assert not running.done()
        await asyncio.sleep(0.2)
        with pytest.raises(TimeoutError):
            await running
        call.taken()  # too late
        assert wire.told == ["taken"] * 4

    simulated(test)


def test_a_client_that_reads_from_within_a_part_is_not_slow() -> None:
    async def test(wire: Wire) -> None:
        call = Call(10.0)
        call.on_part = lambda part: call.taken()
        running = begun(call, wire)
        for _ in range(3 * PARTS_AHEAD):
            await asyncio.sleep(1.0)
            wire.part(b"part")
        await asyncio.sleep(11.0)
        with pytest.raises(TimeoutError):
            await running

    simulated(test)


def test_a_call_that_is_cancelled_before_it_is_sent_is_cancelled_then() -> None:
    async def test(wire: Wire) -> None:
        call = Call(10.0)
        running = begun(call, wire)
        call.cancel()
        await asyncio.sleep(1.0)
        assert wire.told == ["cancel"]
        wire.answer.set_result(b"answer")
        assert await running == b"answer"

    simulated(test)
