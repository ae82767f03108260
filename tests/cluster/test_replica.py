"""A backend's replica by itself, without a cluster: what it answers ingresses, and how it leases them its sessions."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from backends.base import ModelSpec
from gateway.cluster.replica import Replica
from gateway.config import parse_config
from gateway.errors import BackendFailed, GatewayError
from gateway.frames import decode_frame, encode_frame
from tests.engine.misbehaving import value_of
from tests.engine.pools import children, until_true

pytestmark = [pytest.mark.ray, pytest.mark.slow]


MISBEHAVING = f"{Path(__file__).parent.parent / 'engine' / 'misbehaving.py'}:Model"


async def open_replica(*, load_at_start: bool = True, **backend: Any) -> Replica:
    model_document = {
        "name": "m",
        "max_rows": 8,
        "load_at_start": load_at_start,
        "backends": [{"kind": "synthetic", **backend}],
    }
    document = {"models": [model_document]}
    model = parse_config(document, source="test").models[0]
    replica = Replica.__new__(Replica)
    try:
        await replica.__init__(model, model.backends[0], ModelSpec("", (), (), 8), "content")  # type: ignore[misc]  # as Serve does
    except GatewayError:
        await replica.close()  # as Serve does as well
        raise
    return replica


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 10))


def frame(value: float = 1.0, *, ingress: str = "a", left_rows: int = 0) -> bytes:
    inputs = {"INPUT0": np.full((2, 16), value, dtype=np.float32)}
    about = {"rows": 2, "batched": True, "left_rows": left_rows, "ingress": ingress, "parameters": {}}
    return b"".join(encode_frame(inputs, about))


async def attend(replica: Replica, ingress: str, known: int | None) -> int:
    answer = await replica.attend(msgspec.msgpack.encode((ingress, known)))
    slots, content, spec, fault = msgspec.msgpack.decode(answer)
    assert (content, fault) == ("content", "")
    assert spec[0] == "synthetic"
    return int(slots)


def test_a_batch_comes_back_with_its_outputs_and_times() -> None:
    async def test() -> None:
        replica = await open_replica(fixed_ms=5.0)
        outputs, extra = decode_frame(await replica.run(frame(3.0)))
        assert outputs["OUTPUT0"].tolist() == [[3.0] * 16] * 2
        assert extra["computed_ns"] >= 5_000_000
        assert extra["waited_ns"] >= 0
        await replica.close()

    run(test)


@pytest.mark.parametrize(
    ("value", "error", "lost"),
    [(101.0, "BackendFailed", False), (102.0, "BackendUnreachable", True), (None, "InternalError", False)],
)
def test_an_error_is_data(value: float | None, error: str, lost: bool) -> None:
    async def test() -> None:
        replica = await open_replica(faults={"fail": 101.0, "lose": 102.0})
        outputs, extra = decode_frame(await replica.run(frame(value) if value else b"no frame"))
        assert (outputs, extra["error"], extra["session_lost"]) == ({}, error, lost)
        await replica.close()

    run(test)


def test_batches_past_the_sessions_wait_their_turn() -> None:
    async def test() -> None:
        replica = await open_replica(fixed_ms=5.0, sessions=2)
        answers = await asyncio.gather(*(replica.run(frame(float(i))) for i in range(6)))
        assert [decode_frame(answer)[0]["OUTPUT0"][0, 0] for answer in answers] == [0, 1, 2, 3, 4, 5]
        stats = await replica.record_autoscaling_stats()
        assert 1.0 < stats["busy"] <= 2.0
        assert stats["queued"] == 0
        await replica.close()

    run(test)


def test_an_ingress_learns_its_slots_when_they_change() -> None:
    async def test() -> None:
        replica = await open_replica(sessions=4)
        assert await attend(replica, "a", None) == 4
        first = asyncio.create_task(attend(replica, "a", 4))
        await asyncio.sleep(0)
        assert await attend(replica, "b", None) == 2  # nobody has anything to do: even parts
        assert await first == 2
        second = asyncio.create_task(attend(replica, "a", 2))
        open_call = asyncio.create_task(attend(replica, "b", 2))
        await asyncio.sleep(0)
        open_call.cancel()  # as when the connection of b ends
        assert await second == 4
        await replica.close()

    run(test)


def test_slots_follow_the_load_and_an_idle_ingress_keeps_one() -> None:
    async def test() -> None:
        replica = await open_replica(sessions=4, fixed_ms=10.0)
        await attend(replica, "a", None)
        await attend(replica, "b", None)
        busy = asyncio.create_task(attend(replica, "a", 2))
        while not busy.done():
            await asyncio.gather(*(replica.run(frame(ingress="a", left_rows=8)) for _ in range(2)))
        assert await busy == 4
        assert await attend(replica, "b", None) == 1
        assert (await replica.record_autoscaling_stats())["queued"] == 4  # 8 rows in batches of 2
        await replica.close()

    run(test)


def test_a_lost_session_takes_its_slot_until_it_is_rebuilt() -> None:
    async def test() -> None:
        replica = await open_replica(sessions=2, faults={"lose": 102.0})
        assert await attend(replica, "a", None) == 2
        await replica.run(frame(102.0))
        assert await attend(replica, "a", 2) == 1
        assert await attend(replica, "a", 1) == 2
        await replica.check_health()
        await replica.close()

    run(test)


def test_the_model_is_freed_when_the_last_ingress_releases_it_and_loaded_when_one_attends_again() -> None:
    async def test() -> None:
        replica = await open_replica()
        await attend(replica, "a", None)
        await attend(replica, "b", None)
        loaded = replica._pool
        await replica.release(b"a")
        assert replica._pool is loaded
        await replica.release(b"b")
        assert replica._pool is not loaded
        assert (loaded.free_slots, replica._pool.free_slots) == (0, 0)
        await replica.check_health()  # an unloaded model is no reason to be replaced
        assert await asyncio.gather(attend(replica, "a", None), attend(replica, "b", None)) == [1, 1]
        outputs, _ = decode_frame(await replica.run(frame(3.0)))
        assert outputs["OUTPUT0"].tolist() == [[3.0] * 16] * 2
        await replica.close()

    run(test)


def test_an_open_call_of_an_ingress_that_releases_the_model_does_not_keep_it() -> None:
    async def test() -> None:
        replica = await open_replica()
        assert await attend(replica, "a", None) == 1
        open_call = asyncio.create_task(attend(replica, "a", 1))
        await asyncio.sleep(0)
        await replica.release(b"a")
        assert replica._pool.free_slots == 0
        open_call.cancel()  # its connection ends later
        with pytest.raises(asyncio.CancelledError):
            await open_call
        assert await attend(replica, "b", None) == 1
        await replica.close()

    run(test)


def test_a_model_that_is_not_loaded_at_start_is_loaded_when_an_ingress_attends_and_a_failure_is_told() -> None:
    async def test() -> None:
        replica = await open_replica(load_at_start=False, fail_opens=1)
        slots, _, _, fault = msgspec.msgpack.decode(await replica.attend(msgspec.msgpack.encode(("a", None))))
        assert (slots, "failed to load" in fault) == (0, True)
        await replica.close()

    run(test)


def misbehaving(**options: Any) -> dict[str, Any]:
    return {"kind": "python", "model": MISBEHAVING, **options}


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("load_at_start", [True, False])
def test_a_model_that_exits_when_it_loads_is_a_failed_load(isolation: str, load_at_start: bool) -> None:
    backend = misbehaving(isolation=isolation, class_options={"at_load": "exits"})

    async def test() -> None:
        if load_at_start:
            with pytest.raises(BackendFailed, match="m:1/python: failed to load: SystemExit: 3"):
                await open_replica(**backend)
            return
        replica = await open_replica(load_at_start=False, **backend)
        for _ in range(2):
            slots, _, _, fault = msgspec.msgpack.decode(await replica.attend(msgspec.msgpack.encode(("a", None))))
            assert (slots, fault) == (0, "m:1/python: failed to load: SystemExit: 3")
        await replica.close()

    run(test)


@pytest.mark.parametrize(("act", "own"), [("exits", True), ("runs out of memory", True), ("is killed", False)])
def test_an_error_says_whether_the_run_itself_ended_its_session(act: str, own: bool) -> None:
    async def test() -> None:
        replica = await open_replica(**misbehaving(isolation="process"))
        _, extra = decode_frame(await replica.run(frame(value_of(act))))
        assert (extra["session_lost"], extra["self_inflicted"]) == (True, own)
        await replica.close()

    run(test)


def test_an_ingress_is_told_when_an_idle_session_dies() -> None:
    async def test() -> None:
        replica = await open_replica(isolation="process", sessions=2)
        assert await attend(replica, "a", None) == 2
        children()[0].kill()
        assert await attend(replica, "a", 2) == 1
        assert await attend(replica, "a", 1) == 2
        await replica.close()

    run(test)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_replica_that_is_closed_waits_for_no_run(isolation: str) -> None:
    async def test() -> None:
        replica = await open_replica(**misbehaving(isolation=isolation))
        running = asyncio.ensure_future(replica.run(frame(value_of("hangs"))))
        await asyncio.sleep(0.1)
        await asyncio.wait_for(replica.close(), 5)
        _, extra = decode_frame(await running)
        assert (extra["error"], extra["session_lost"], extra["self_inflicted"]) == ("BackendUnreachable", True, False)
        await until_true(lambda: not children())

    run(test)


def test_a_replica_that_is_closed_while_it_loads_leaves_nothing() -> None:
    async def test() -> None:
        backend = misbehaving(isolation="process", class_options={"at_load": "hangs"})
        replica = await open_replica(load_at_start=False, **backend)
        attending = asyncio.ensure_future(replica.attend(msgspec.msgpack.encode(("a", None))))
        await until_true(children)
        await asyncio.wait_for(replica.close(), 5)
        await until_true(lambda: not children())
        await asyncio.gather(attending, return_exceptions=True)

    run(test)
