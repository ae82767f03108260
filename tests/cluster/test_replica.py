"""A backend's replica by itself, without a cluster: what it answers ingresses, and how it leases them its sessions."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from backends.base import ModelSpec, Tensors, TensorSpec
from backends.early_failure import EarlyFailure
from backends.triton_python import lend_utils
from gateway.cluster.channel import Channel
from gateway.cluster.control import ClientsWish
from gateway.cluster.hosted_model import HostedModel
from gateway.cluster.remote import _execution, _part_of
from gateway.cluster.replica import Replica, Terms
from gateway.config import parse_config
from gateway.engine.runner import PARTS_AHEAD
from gateway.errors import BackendFailed, BackendUnreachable, GatewayError, UnsupportedMediaType
from gateway.wire.frames import decode_frame, encode_frame
from gateway.wire.tensors import Buffer
from tests.engine.misbehaving import value_of
from tests.engine.pools import children, until_true
from tests.triton_server import write_model

lend_utils()
from tests import decoupled_model  # noqa: E402  # it imports what was lent

pytestmark = [pytest.mark.ray, pytest.mark.slow]


OPEN = ModelSpec("", (), (), 8)
STREAMING = f"{Path(__file__).parent / 'streaming.py'}:Model"
MISBEHAVING = f"{Path(__file__).parent.parent / 'engine' / 'misbehaving.py'}:Model"


async def open_replica(
    *,
    declared: ModelSpec = OPEN,
    load_at_start: bool = True,
    metrics_dir: Path | None = None,
    asked: Callable[[], Awaitable[ClientsWish]] | None = None,
    **backend: Any,
) -> Replica:
    model_document = {
        "name": "m",
        "max_rows": declared.max_rows,
        "load_at_start": load_at_start,
        "backends": [{"kind": "synthetic", **backend}],
    }
    document = {"models": [model_document]}
    model = parse_config(document, source="test").models[0]
    replica = Replica.__new__(Replica)
    given = {"metrics_dir": metrics_dir and (lambda: metrics_dir)} | ({"asked": asked} if asked is not None else {})
    try:
        await replica.__init__(model, model.backends[0], declared, "content", **given)  # type: ignore[misc]  # as Serve does
    except GatewayError:
        await replica.close()  # as Serve does as well
        raise
    return replica


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))  # a hang; one test makes 2 GiB, which takes seconds on a busy machine


def frame(value: float = 1.0, *, ingress: str = "a", left_rows: int = 0) -> bytes:
    inputs = {"INPUT0": np.full((2, 16), value, dtype=np.float32)}
    about = {"rows": 2, "batched": True, "left_rows": left_rows, "ingress": ingress, "parameters": {}}
    return b"".join(encode_frame(inputs, about))


async def attend(replica: Replica, ingress: str, known: int | None, platform: str = "synthetic", load: int = 0) -> int:
    answer = await replica.attend(msgspec.msgpack.encode((ingress, known, load)))
    slots, content, spec, fault, *_ = msgspec.msgpack.decode(answer)
    assert (content, fault) == ("content", "")
    assert spec[0] == platform
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


def test_an_input_that_the_model_does_not_take_is_the_clients_fault_here_too(tmp_path: Path) -> None:
    handlers = "def model_fn(folder): ...\n\ndef input_fn(body, content_type):\n    raise ValueError(content_type)\n"
    (tmp_path / "inference.py").write_text(handlers)

    async def test() -> None:
        replica = await open_replica(kind="python", model=f"{tmp_path}/inference.py:SageMakerHandlers")
        inputs = {name: np.array([b"text/x"], object) for name in ("body", "content_type", "accept")}
        about = {"rows": 1, "batched": True, "left_rows": 0, "ingress": "a", "parameters": {}}
        answer = await replica.run(b"".join(encode_frame(inputs, about)))
        sent: Any = SimpleNamespace(sent_ns=0, on_part=None)
        assert isinstance(_execution(sent, answer, 1).error, UnsupportedMediaType)
        await replica.close()

    run(test)


def test_a_replica_that_has_closed_publishes_its_counts_no_more(tmp_path: Path) -> None:
    async def test() -> None:
        before = asyncio.all_tasks()
        replica = await open_replica(metrics_dir=tmp_path)
        await replica.run(frame())
        await replica.close()
        assert asyncio.all_tasks() == before

    run(test)
    assert list(tmp_path.glob("replica-*.blocks"))  # what it has counted


def test_a_batch_past_the_sessions_waits_for_one_that_is_free() -> None:
    async def test() -> None:
        replica = await open_replica(fixed_ms=5.0, sessions=2)
        runs = [asyncio.create_task(replica.run(frame(float(i)))) for i in range(6)]
        await asyncio.sleep(0)
        runs.pop(4).cancel()  # its ingress has gone
        answers = [decode_frame(answer) for answer in await asyncio.gather(*runs)]
        assert [outputs["OUTPUT0"][0, 0] for outputs, _ in answers] == [0, 1, 2, 3, 5]
        first, second, third = (answers[turn][1]["waited_ns"] for turn in (0, 2, 4))  # two at a time
        assert first < second < third
        stats = await replica.record_autoscaling_stats()
        assert 0.0 < stats["busy"] <= 2.0
        assert stats["queued"] == 0
        assert not replica._early
        await replica.close()

    run(test)


def test_a_batch_past_the_sessions_is_given_back_not_begun_once_they_are_lost() -> None:
    async def test() -> None:
        replica = await open_replica(fixed_ms=5.0, faults={"lose": 102.0})
        answers = await asyncio.gather(replica.run(frame(102.0)), replica.run(frame(1.0)))
        sent: Any = SimpleNamespace(sent_ns=0, first_part_ns=None)
        lost, given_back = [_execution(sent, answer, 1) for answer in answers]
        assert isinstance(given_back.error, BackendUnreachable)
        assert given_back.error.message.endswith("is lost")
        assert (given_back.session_lost, given_back.self_inflicted) == (True, False)
        assert (lost.begun, given_back.begun) == (True, False)
        await replica.close()

    run(test)


@pytest.mark.parametrize(("by_channel", "passed"), [(True, 1), (False, 0)])
def test_a_slot_passes_with_the_end_of_a_batch_that_came_as_what_its_ingress_is_told_does(
    by_channel: bool, passed: int
) -> None:
    async def test() -> None:
        replica = await open_replica(fixed_ms=20.0)
        attendance, ended = replica._attendance, asyncio.get_running_loop().create_future()
        known = attendance.let_in("a", lambda *told: None).known
        attendance.enter("a", None)
        known(attendance.leases.of["a"].number)
        replica._begin(frame(), ended.set_result, (lambda pieces: None) if by_channel else None)
        attendance.enter("b", None)
        attendance.wanted("b", 1.0)
        await ended
        assert (attendance.slots("a"), attendance.slots("b")) == (0, passed)
        known(attendance.leases.of["a"].number)
        assert attendance.slots("b") == 1
        await replica.close()

    run(test)


def test_a_wish_behind_running_batches_hides_no_backlog_that_they_told_of() -> None:
    async def test() -> None:
        replica = await open_replica(fixed_ms=20.0)
        attendance = replica._attendance
        attendance.enter("a", None)
        lease = attendance.leases.begin("a", 36.0, 0)
        attendance.wanted("a", 0.1)
        assert lease.wants == 36.0
        attendance.leases.begin("a", 0.0, 0)
        attendance.wanted("a", 0.1)
        assert lease.wants == 0.1
        await replica.close()

    run(test)


def test_an_ingress_learns_its_slots_when_they_change() -> None:
    async def test() -> None:
        replica = await open_replica(sessions=4)
        assert await attend(replica, "a", None) == 4
        first = asyncio.create_task(attend(replica, "a", 4))
        await asyncio.sleep(0)
        assert await attend(replica, "b", None) == 0  # a may have sent batches, until it knows
        assert await first == 2  # nobody has anything to do: even parts
        second = asyncio.create_task(attend(replica, "a", 2))
        assert await attend(replica, "b", 0) == 2
        open_call = asyncio.create_task(attend(replica, "b", 2))
        await asyncio.sleep(0)
        open_call.cancel()  # as when the connection of b ends
        assert await second == 4
        await replica.close()

    run(test)


def test_slots_follow_the_load_and_come_back_to_an_ingress_that_wants_one() -> None:
    async def test() -> None:
        replica = await open_replica(sessions=4, fixed_ms=10.0)
        await attend(replica, "a", None)
        await attend(replica, "b", None)
        assert await attend(replica, "a", 4) == 2
        busy = asyncio.create_task(attend(replica, "a", 2))
        idle = asyncio.create_task(attend(replica, "b", 0))
        while not busy.done():
            await asyncio.gather(*(replica.run(frame(ingress="a", left_rows=8)) for _ in range(2)))
            if idle.done():
                idle = asyncio.create_task(attend(replica, "b", await idle))
        assert await busy == 4
        less = asyncio.create_task(attend(replica, "a", 4))
        runs = [asyncio.create_task(replica.run(frame(ingress="a", left_rows=8))) for _ in range(4)]
        await asyncio.sleep(0)
        assert (await replica.record_autoscaling_stats())["queued"] == 4  # 8 rows in batches of 2
        await asyncio.gather(*runs)
        await asyncio.sleep(0.01)
        assert (await replica.record_autoscaling_stats())["queued"] == 0  # it has slots, and does not use them
        await replica.want(msgspec.msgpack.encode(("b", 1.0)))
        left = await less
        assert left < 4
        less = asyncio.create_task(attend(replica, "a", left))
        assert await idle == 4 - left
        less.cancel()
        await replica.close()

    run(test)


def test_one_of_the_ingresses_counts_the_sessions_for_all_wherever_they_are_leased() -> None:
    async def test() -> None:
        replica = await open_replica(sessions=2, faults={"lose": 102.0})

        async def counted(ingress: str, known: int | None) -> int:
            *_, count = msgspec.msgpack.decode(await replica.attend(msgspec.msgpack.encode((ingress, known))))
            return int(count)

        assert [await counted(ingress, None) for ingress in ("a", "b")] == [2, 0]
        await replica.run(frame(102.0))
        assert await counted("a", 2) == 1
        await until_true(lambda: replica._hosted.pool.sessions == 2)
        await until_true(lambda: replica._attendance.standing("a").counted == 2)
        left = asyncio.create_task(counted("b", replica._attendance.slots("b")))
        await asyncio.sleep(0)
        await replica.release(b"a")
        assert await left == 2
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
        loaded = replica._hosted.pool
        await replica.release(b"a")
        assert replica._hosted.pool is loaded
        await replica.release(b"b")
        assert replica._hosted.pool is not loaded
        assert (loaded.free_slots, replica._hosted.pool.free_slots) == (0, 0)
        await replica.check_health()  # an unloaded model is no reason to be replaced
        assert await asyncio.gather(attend(replica, "a", None), attend(replica, "b", None)) == [1, 0]
        outputs, _ = decode_frame(await replica.run(frame(3.0)))
        assert outputs["OUTPUT0"].tolist() == [[3.0] * 16] * 2
        await replica.close()

    run(test)


WEIGHS = """
import pathlib, time

FOLDER = pathlib.Path("{folder}")

def weights():
    return [float(text) for text in (FOLDER / "weights").read_text().split()]

class Outputs:
    def __get__(self, instance, owner):
        return (("INPUT0", "FP32", (-1, 16 * len(weights()))),)

class Weighs:
    inputs = (("INPUT0", "FP32", (-1, 16)),)
    outputs = Outputs()

    def __init__(self):
        self.weight = weights()[0]
        with open(FOLDER / "opened", "a") as file:
            file.write(".")

    def predict(self, inputs):
        while inputs["INPUT0"][0, 0] == 99 and not (FOLDER / "gate").exists():
            time.sleep(0.01)
        return {{"INPUT0": 0 * inputs["INPUT0"] + self.weight}}
"""


def test_a_load_of_a_client_reads_a_loaded_model_anew_once_and_what_it_had_goes_on_where_that_fails(tmp_path: Path) -> None:
    (tmp_path / "weighs.py").write_text(WEIGHS.format(folder=tmp_path))
    weights, opened = tmp_path / "weights", tmp_path / "opened"

    async def test() -> None:
        async def asked() -> ClientsWish:
            return ClientsWish(3)

        async def answered(value: float) -> float:
            outputs, _ = decode_frame(await replica.run(frame(value)))
            return float(outputs["INPUT0"][0, 0])

        async def fault(load: int) -> str:
            slots, _, _, found, *_ = msgspec.msgpack.decode(await replica.attend(msgspec.msgpack.encode(("new", None, load))))
            assert slots == 0
            return str(found)

        weights.write_text("1")
        replica = await open_replica(kind="python", model=f"{tmp_path}/weighs.py:Weighs", asked=asked)
        await attend(replica, "a", None, "python", load=3)  # asked for before the replica has begun
        assert opened.read_text() == "."
        running = asyncio.create_task(answered(99.0))
        await until_true(lambda: replica._hosted.pool.busy)
        weights.write_text("7")
        await asyncio.gather(*(attend(replica, ingress, None, "python", load=4) for ingress in ("a2", "b2")))
        await replica.release(b"a")
        assert await answered(1.0) == 7.0
        assert replica._hosted.sessions == (1, 1)
        await attend(replica, "c2", None, "python", load=4)  # late
        await attend(replica, "d", None, "python")  # one that has begun since
        (tmp_path / "gate").touch()
        assert await running == 1.0
        assert opened.read_text() == ".."
        for text, words in (("broken", "could not convert string to float"), ("1 2", "unload the model, then load it")):
            weights.write_text(text)
            assert words in await fault(5)
            await replica.release(b"new")
            assert await answered(1.0) == 7.0
        weights.write_text("8")
        await attend(replica, "new", None, "python", load=5)
        assert await answered(1.0) == 8.0
        await replica.close()

    run(test)


@pytest.mark.parametrize("when", [0, 1])
def test_a_replica_that_starts_while_clients_have_the_model_unloaded_does_not_keep_it(when: int) -> None:
    async def test() -> None:
        wishes = iter([ClientsWish(5)] * when + [ClientsWish(6, unloaded=True)])

        async def asked() -> ClientsWish:
            return next(wishes)

        replica = await open_replica(asked=asked)
        assert (replica._hosted.loaded, replica._hosted.pool.free_slots) == (False, 0)
        assert await attend(replica, "a", None, load=7) == 1
        await replica.close()

    run(test)


def test_a_load_is_not_refused_for_what_was_read_for_an_earlier_one() -> None:
    async def test() -> None:
        broken, opened = asyncio.Event(), list[Mock]()

        async def open_pool() -> ModelSpec:
            if len(opened) == 2:
                await broken.wait()
                raise BackendFailed("no such file")
            return ModelSpec("", (), (), 0)

        def new_pool() -> Any:
            opened.append(Mock(open=open_pool, close=lambda: asyncio.sleep(0)))
            return opened[-1]

        hosted = HostedModel(new_pool, "m", lambda: None)
        hosted.loaded = True
        earlier = asyncio.create_task(hosted.load(5))
        await asyncio.sleep(0.01)
        later = asyncio.create_task(hosted.load(6))
        await asyncio.sleep(0.01)
        broken.set()
        assert (await earlier, await later, len(opened)) == ("no such file", "", 3)

    run(test)


def test_an_open_call_of_an_ingress_that_releases_the_model_does_not_keep_it() -> None:
    async def test() -> None:
        replica = await open_replica()
        assert await attend(replica, "a", None) == 1
        open_call = asyncio.create_task(attend(replica, "a", 1))
        await asyncio.sleep(0)
        await replica.release(b"a")
        assert replica._hosted.pool.free_slots == 0
        open_call.cancel()  # its connection ends later
        with pytest.raises(asyncio.CancelledError):
            await open_call
        assert await attend(replica, "b", None) == 1
        await replica.close()

    run(test)


def test_a_model_that_is_not_loaded_at_start_is_loaded_when_an_ingress_attends_and_a_failure_is_told() -> None:
    async def test() -> None:
        replica = await open_replica(load_at_start=False, fail_opens=1)
        slots, _, _, fault, *_ = msgspec.msgpack.decode(await replica.attend(msgspec.msgpack.encode(("a", None))))
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
            with pytest.raises(BackendFailed, match=r"m:1/python: failed to load: .*: load raised SystemExit: 3"):
                await open_replica(**backend)
            return
        replica = await open_replica(load_at_start=False, **backend)
        for _ in range(2):
            slots, _, _, fault, *_ = msgspec.msgpack.decode(await replica.attend(msgspec.msgpack.encode(("a", None))))
            assert slots == 0
            assert re.match("m:1/python: failed to load: .*: load raised SystemExit: 3", fault)
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


CLOSES = """
import pathlib, time

class Closes:
    inputs = outputs = (("INPUT0", "FP32", (-1, 16)),)

    def predict(self, inputs):
        return inputs

    def close(self):
        folder = pathlib.Path("{folder}")
        (folder / "closing").touch()
        while not (folder / "gate").exists():
            time.sleep(0.01)
        (folder / "closed").touch()
"""


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_model_may_close_at_the_end_and_meanwhile_ingresses_are_told_what_that_costs(isolation: str, tmp_path: Path) -> None:
    (tmp_path / "closes.py").write_text(CLOSES.format(folder=tmp_path))

    async def test() -> None:
        replica = await open_replica(kind="python", model=f"{tmp_path}/closes.py:Closes", isolation=isolation)
        endpoints = await replica._channel.start()
        ending = asyncio.ensure_future(replica._end())
        await until_true(lambda: ending.done() or (tmp_path / "closing").exists())
        channel = await Channel.connect(replica._channel.token, unix=endpoints.unix)
        channel.keep("account", 0)
        await until_true(lambda: replica._teller._tell)
        _, extra = decode_frame(await replica.run(frame()))
        assert extra["message"].endswith("is lost")
        (tmp_path / "gate").touch()
        await ending
        assert (tmp_path / "closed").exists()
        channel.close()

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


# answers in parts


class Asked:
    """A frame that a replica runs, as its channel has it run, and what has come of it. most: parts that there is memory for."""

    def __init__(self, replica: Replica, *, most: int = 1000, **parameters: Any) -> None:
        inputs = {"INPUT0": np.full((1, 16), parameters.get("value", 0.0), dtype=np.float32)}
        about = {"rows": 1, "batched": True, "left_rows": 0, "ingress": "a", "parameters": parameters, "in_parts": True}
        self.parts: list[float] = []
        self._most = most
        self.answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.running = replica._begin(b"".join(encode_frame(inputs, about)), self._answered, self._part)

    def _part(self, pieces: Sequence[Buffer]) -> None:
        assert not self.answer.done()
        if len(self.parts) == self._most:
            raise MemoryError
        outputs, _ = decode_frame(b"".join(pieces))
        self.parts.append(float(outputs["OUTPUT0"][0, 0]))

    def _answered(self, pieces: Sequence[Buffer]) -> None:
        self.answer.set_result(decode_frame(b"".join(pieces))[1])

    async def made(self, count: int) -> None:
        """Wait until so many parts are there and no more come."""
        await until_true(lambda: len(self.parts) >= count)
        await asyncio.sleep(0.05)
        assert len(self.parts) == count


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_an_answer_in_parts_is_so_far_ahead_of_what_was_taken_and_tells_when_the_first_was_there(isolation: str) -> None:
    async def test() -> None:
        replica = await open_replica(kind="python", model=STREAMING, isolation=isolation)
        asked = Asked(replica, parts=PARTS_AHEAD + 3, value=5.0)
        await asked.made(PARTS_AHEAD)
        asked.running.taken()
        await asked.made(PARTS_AHEAD + 1)
        await asyncio.sleep(0.1)
        for _ in range(3):
            asked.running.taken()
        extra = await asked.answer
        assert asked.parts == [5.0 + index for index in range(PARTS_AHEAD + 3)]
        assert "error" not in extra
        assert 0 < extra["first_part_ns"] < extra["computed_ns"] - 100_000_000
        asked.running.taken()  # too late
        await replica.close()

    run(test)


def test_a_long_stream_counts_as_busy_while_it_runs_and_is_waited_for_at_the_end() -> None:
    async def test() -> None:
        replica = await open_replica(kind="python", model=STREAMING, sessions=2)
        assert await attend(replica, "a", None, platform="python") == 2
        endpoints = await replica._channel.start()
        channel = await Channel.connect(replica._channel.token, unix=endpoints.unix)
        parameters = {"parts": 2 * PARTS_AHEAD}
        about = {"rows": 1, "batched": True, "left_rows": 0, "ingress": "a", "parameters": parameters, "in_parts": True}
        parts: list[Buffer] = []
        question = channel.ask(encode_frame({"INPUT0": np.zeros((1, 16), np.float32)}, about), parts.append)
        await until_true(lambda: len(parts) == PARTS_AHEAD)
        await replica.record_autoscaling_stats()
        await asyncio.sleep(0.3)
        assert (await replica.record_autoscaling_stats())["busy"] == pytest.approx(1.0, abs=0.01)
        assert await attend(replica, "b", None, platform="python") == 0
        assert replica._attendance.leases.of["a"].told == 2  # though nothing of its has ended yet, it has all the work
        ending = asyncio.ensure_future(replica._end())
        await asyncio.sleep(0.05)
        assert not ending.done()
        for _ in range(PARTS_AHEAD):
            question.taken()
        await until_true(lambda: len(parts) == 2 * PARTS_AHEAD)
        question.taken()
        assert "error" not in decode_frame(await question.answer)[1]
        await ending
        channel.close()

    run(test)


def test_the_end_waits_only_so_long_for_what_runs() -> None:
    async def test() -> None:
        replica = await open_replica(fixed_ms=20_000.0)
        await replica.reconfigure(Terms(usd_per_hour=None, slo_p99_ms=None, drain_s=0.05))
        await attend(replica, "a", None)
        endpoints = await replica._channel.start()
        channel = await Channel.connect(replica._channel.token, unix=endpoints.unix)
        about = {"rows": 1, "batched": True, "left_rows": 0, "ingress": "a", "parameters": {}}
        question = channel.ask(encode_frame({"INPUT0": np.zeros((1, 16), np.float32)}, about))
        await until_true(lambda: replica._hosted.pool.busy == 1)
        await asyncio.wait_for(replica._end(), 5)
        await asyncio.wait([question.answer])
        channel.close()

    run(test)


@pytest.mark.parametrize("how", ["cancelled", "lost"])
def test_a_stream_that_nobody_wants_any_more_frees_its_session_though_it_waits_for_its_client(how: str) -> None:
    async def test() -> None:
        replica = await open_replica(kind="python", model=STREAMING)
        endpoints = await replica._channel.start()
        channel = await Channel.connect(replica._channel.token, unix=endpoints.unix)
        about = {"rows": 1, "batched": True, "left_rows": 0, "ingress": "a", "parameters": {"parts": 99}, "in_parts": True}
        parts: list[Buffer] = []
        question = channel.ask(encode_frame({"INPUT0": np.zeros((1, 16), np.float32)}, about), parts.append)
        await until_true(lambda: len(parts) == PARTS_AHEAD)
        if how == "cancelled":
            question.cancel()
            assert decode_frame(await question.answer)[1]["error"] == "Cancelled"
        else:
            channel.abort()
        await until_true(lambda: replica._hosted.pool.free_slots == 1)
        channel.close()
        await replica.close()

    run(test)


@pytest.mark.parametrize(
    ("then", "words"), [("raises", "ValueError: a bad value"), ("gives 2 GiB", "outputs that cannot be sent")]
)
def test_a_fault_after_parts_is_the_answer_and_the_next_stream_is_whole(then: str, words: str) -> None:
    async def test() -> None:
        replica = await open_replica(kind="python", model=STREAMING)
        asked = Asked(replica, parts=2, then=then)
        extra = await asked.answer
        assert (asked.parts, extra["error"], extra["session_lost"]) == ([0.0, 1.0], "BackendFailed", False)
        assert words in extra["message"]
        asked = Asked(replica, parts=4)
        assert "error" not in await asked.answer
        assert len(asked.parts) == 4
        await replica.close()

    run(test)


def test_a_failure_that_is_told_early_reaches_the_ingress_while_the_run_goes_on(tmp_path: Path) -> None:
    write_model(tmp_path, "parts", decoupled_model.CONFIG, Path(decoupled_model.__file__).read_text())

    spec = ModelSpec("", (TensorSpec("SCRIPT", "BYTES", (1,)),), (TensorSpec("VALUE", "INT32", (-1,)),), 0)

    async def test() -> None:
        replica = await open_replica(kind="python", model=f"{tmp_path}/parts/1/model.py:TritonPythonModel", declared=spec)
        about = {"rows": 1, "batched": True, "left_rows": 0, "ingress": "a", "parameters": {}, "in_parts": True}
        parts: list[Tensors] = []
        answer: asyncio.Future[Buffer] = asyncio.get_running_loop().create_future()
        replica._begin(
            b"".join(encode_frame({"SCRIPT": np.array([b"error s300 !"], object)}, about)),
            lambda pieces: answer.set_result(b"".join(pieces)),
            lambda pieces: parts.append(_part_of(b"".join(pieces))),
        )
        await until_true(lambda: bool(parts))
        assert not answer.done()
        (told,) = parts
        assert isinstance(told, EarlyFailure)
        assert isinstance(told.error, BackendFailed)
        assert decode_frame(await answer)[1]["message"] == told.error.message
        await replica.close()

    run(test)


def test_a_part_that_there_is_no_memory_to_send_is_not_left_out_but_ends_its_stream() -> None:
    async def test() -> None:
        replica = await open_replica(kind="python", model=STREAMING)
        asked = Asked(replica, most=2, parts=4)
        extra = await asked.answer
        assert (asked.parts, extra["error"]) == ([0.0, 1.0], "BackendFailed")
        assert "outputs that cannot be sent: MemoryError" in extra["message"]
        await replica.close()

    run(test)


def test_who_cannot_get_the_answer_as_the_model_gives_it_is_told_so() -> None:
    async def test() -> None:
        replica = await open_replica(kind="python", model=STREAMING)
        _, extra = decode_frame(await replica.run(frame()))
        assert (extra["error"], extra["session_lost"]) == ("InternalError", False)
        assert (
            extra["message"] == "m:1/python: the model answers in parts, which a call of Serve's cannot carry, only a channel"
        )
        answers: list[Sequence[Buffer]] = []
        replica._begin(frame(), answers.append, answers.append)
        (answer,) = answers
        expected = "the model answers in parts, its ingress expects that it does at once: load it again"
        assert expected in decode_frame(b"".join(answer))[1]["message"]
        await replica.close()
        replica = await open_replica()
        extra = await Asked(replica).answer
        assert "the model answers at once, its ingress expects that it does in parts" in extra["message"]
        await replica.close()

    run(test)
