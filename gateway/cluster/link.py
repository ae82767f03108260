"""The connection of an ingress to one replica: its channel for batches, and the calls of Serve's that are seldom made."""

import asyncio
import contextlib
import logging
import math
import pickle
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Final, cast

import grpc
import msgspec
import ray
from ray._private.grpc_utils import init_grpc_channel
from ray.serve._private.common import RequestMetadata, RunningReplicaInfo
from ray.serve.generated.serve_pb2 import ASGIRequest  # type: ignore[attr-defined]  # made at run time by protobuf
from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub

from backends.base import ModelSpec, words_of
from gateway.cluster.answers import attendance_decoder, channel_decoder
from gateway.cluster.channel import Channel, ChannelLost, OnFramePart, PendingAnswer, Standing
from gateway.engine.runner import PARTS_AHEAD
from gateway.errors import InternalError
from gateway.wire.tensors import Buffer

# A replica answers `attend` after this long even if nothing changed, so that neither side waits for ever on a lost connection.
ATTEND_S: Final = 20.0
_RETRY_ATTEND_S: Final = 0.2
_RETRY_LOAD_S: Final = 5.0  # when the replica could not load its model again
_RELEASE_S: Final = 30.0
_PING_S: Final = 3.0
_LOOK_S: Final = 0.1  # how late it is told that a call has taken too long, at most
_LOOK_MOST_S: Final = 1.0
# A batch that ends sooner frees a slot before another ingress's could come; also how often what waits is looked after.
_BRIEF_S: Final = 0.005
# What waits behind a batch that took all has come since: how much of a batch, is not known here. It is to start no replica.
_SOME: Final = 0.1
# On top of the hang timeout that the replica itself keeps: for its queue and the way.
CALL_MARGIN_S: Final = 10.0
_UNKNOWN: Final = Standing()
_NO_ANSWER: Final = "it does not answer: frozen, or its node is gone"

log = logging.getLogger(__name__)


KeepAccount = Callable[[bytes, str, int], None]
"""Gets the token, host and port of a replica of another node, which may have nobody else to tell what it counts."""


class LinkLost(Exception):
    """The replica did not answer: it ended, is ending, or cannot be reached."""


class NotSent(LinkLost):
    """It was not asked."""


Outcome = Buffer | Exception
"""The frame that answers a batch, or why there is none: LinkLost, InternalError, or what taking a part raised."""


class BatchCall:
    """A batch on its way to a replica and back, as whoever started it steers it.

    due_s: by when its answer, or the next part of it, has to be there, by the loop's time.
    """

    __slots__ = ("_on_part", "_pending", "_timeout_s", "_untaken", "due_s", "on_end")

    def __init__(self, timeout_s: float, on_end: Callable[[Outcome], None], on_part: OnFramePart | None) -> None:
        self.due_s = math.inf
        self.on_end = on_end
        self._timeout_s = timeout_s
        self._on_part = on_part
        self._pending: PendingAnswer | None = None  # if it was sent by a channel
        self._untaken = 0

    def send(self, channel: Channel, frame: Sequence[Buffer]) -> "asyncio.Future[Buffer]":
        self._expect()
        self._pending = channel.ask(frame, self._part if self._on_part is not None else None)
        return self._pending.answer

    def cancel(self) -> None:
        """Have it end early, if that can be done."""
        if self._pending is not None:
            self._pending.cancel()

    def taken(self) -> None:
        """A part has left for the client."""
        if self._pending is not None:
            self._untaken -= 1
            if self._untaken == PARTS_AHEAD - 1:
                self._expect()
            self._pending.taken()

    def drop(self) -> None:
        """Want no answer any more."""
        if self._pending is not None:
            self._pending.answer.cancel()

    def _part(self, part: Buffer) -> None:
        self._untaken += 1
        if self._untaken < PARTS_AHEAD:
            self._expect()
        else:
            self.due_s = math.inf  # the replica waits for the client
        assert self._on_part is not None
        self._on_part(part)

    def _expect(self) -> None:
        self.due_s = asyncio.get_running_loop().time() + self._timeout_s


@dataclass(slots=True, eq=False)
class Link:
    """The connection to one replica.

    load: as `RemoteRunner` has it. busy: batches of ours there. used_s: when the last one ended, made_s: when this was made, by
    the loop's time. leased: how many it lets us have. standing: what else it has told. up: it answers. listed: Serve means it
    to stay. fault: why it could not load its model, if so. no_channel: why there is none, where the model needs one: each
    batch fails for it.

    Life: made on the running loop -> start … -> retire or close.
    """

    replica: RunningReplicaInfo
    ingress: str
    on_change: Callable[[], None]
    _: KW_ONLY
    load: int = 0
    keep_account: KeepAccount = lambda token, host, port: None
    busy: int = 0
    used_s: float = 0.0
    up: bool = False
    listed: bool = True
    fault: str = ""
    no_channel: str = ""
    leased: int = 0
    standing: Standing = _UNKNOWN
    content: str = ""
    spec: ModelSpec = field(init=False)
    made_s: float = field(init=False)
    _wanted: bool = False  # the replica knows that something waits here
    _begun_s: float = 0.0  # when a batch of ours last went there, by the loop's time
    _looking: asyncio.TimerHandle | None = None  # after what waits behind our batches
    _left: bool = False  # what becomes of the replica is no news any more
    _lost: bool = False
    _serve_channel: grpc.aio.Channel = field(init=False)
    _channel: Channel | None = None
    _opening: asyncio.Task[None] | None = None  # a channel
    _told_of_channel: bool = False  # that there is none
    _handle: Any = field(init=False)  # the generated stub's method, which is not typed
    _attending: asyncio.Task[None] = field(init=False)
    _staying: asyncio.Task[None] | None = None
    _wanting: set[asyncio.Task[None]] = field(default_factory=set)
    _calls: set[BatchCall] = field(default_factory=set)
    _watchdog: asyncio.TimerHandle | None = None  # over calls by the channel
    _requests: set[Any] = field(default_factory=set)  # grpc.aio calls
    _drained: asyncio.Event | None = None

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.made_s = loop.time()
        # Ray's own helper adds its authentication token and TLS.
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        address = f"{self.replica.node_ip}:{self.replica.port}"
        self._serve_channel = init_grpc_channel(address, options=options, asynchronous=True)
        self._handle = ASGIServiceStub(self._serve_channel).HandleRequest  # type: ignore[no-untyped-call]  # generated
        self._attending = loop.create_task(self._attend())
        self._staying = loop.create_task(self._stay())

    def __repr__(self) -> str:
        by = (self._channel.kind if self._channel is not None else "") or "calls of Serve's"
        return f"<{self.replica_id}: {'up' if self.up else 'down'}, {self.busy} of {self.slots} busy, by {by}>"

    @property
    def replica_id(self) -> str:
        return str(self.replica.replica_id.unique_id)

    @property
    def slots(self) -> int:
        return self.leased if self.up else 0

    @property
    def sessions(self) -> int:
        """That we are to count."""
        return self.standing.counted if self.up else 0

    @property
    def free(self) -> int:
        return max(0, self.slots - self.busy)

    def fill(self, left_rows: int) -> None:
        """A batch takes a slot. left_rows: what waits behind it, which it tells the replica."""
        self.busy += 1
        self._begun_s = asyncio.get_running_loop().time()
        self._wanted = left_rows > 0

    def vacate(self) -> None:
        """A batch has ended. What the replica was told stays so until the next one takes the slot."""
        self.busy -= 1
        self.used_s = asyncio.get_running_loop().time()

    def want(self) -> None:
        """Something waits, and no slot here is free. Behind batches of ours it is told once for each, unless that is brief."""
        if not self.up or self.free or self._wanted:
            return
        loop = asyncio.get_running_loop()
        if self.leased and loop.time() < self._begun_s + _BRIEF_S:
            if self._looking is None:
                self._look_later()
            return
        self._wanted = True
        batches = _SOME if self.leased else 1.0
        if self._channel is not None and self._channel.is_open:
            self._channel.want(self.ingress, batches)
        else:
            task = loop.create_task(self._want_by_serve(batches))
            self._wanting.add(task)
            task.add_done_callback(self._wanting.discard)

    def _look_later(self) -> None:
        """Have it looked at what waits, once no batch has begun for a moment."""
        loop = asyncio.get_running_loop()
        in_s = self._begun_s + _BRIEF_S - loop.time()
        self._looking = loop.call_later(in_s, self._look_later) if in_s > 0 else None
        if self._looking is None:
            self.on_change()

    async def _want_by_serve(self, batches: float) -> None:
        try:
            await self._request(_WANT, msgspec.msgpack.encode((self.ingress, batches)), _PING_S)
        except (LinkLost, InternalError):  # `attend` finds out as well
            self._wanted = False

    def _told_slots(self, slots: int, standing: Standing) -> None:
        self.leased, self.standing, self._wanted = slots, standing, False  # it may have forgotten us, and what we wanted
        self.on_change()

    def start(
        self, frame: Sequence[Buffer], timeout_s: float, on_end: Callable[[Outcome], None], on_part: OnFramePart | None = None
    ) -> BatchCall:
        """Have the replica run a batch: by the channel, or by a call of Serve's where there is none.

        frame: in pieces, which must not change any more. timeout_s: for the answer, or for each next part of it, while the
        replica does not wait for the client. on_end: called once, on the loop, never within this; on_part before it.

        Whatever it raises (there may be no memory for a copy), on_end is not called.
        """
        call = BatchCall(timeout_s, on_end, on_part)
        future: asyncio.Future[Buffer]
        if self._channel is not None and self._channel.is_open and not self.no_channel:
            future = call.send(self._channel, frame)
            if self._watchdog is None:
                self._set_watchdog(timeout_s)
        else:
            future = asyncio.get_running_loop().create_task(self._by_serve(b"".join(frame), timeout_s))
        self._calls.add(call)
        future.add_done_callback(partial(self._answered, call))
        return call

    async def _by_serve(self, frame: bytes, timeout_s: float) -> Buffer:
        """Which `BatchCall.cancel` does not reach. Raises: LinkLost, NotSent, InternalError."""
        if self.no_channel:
            raise NotSent(self.no_channel)
        return await self._request(_RUN, frame, timeout_s)

    def _answered(self, call: BatchCall, future: "asyncio.Future[Buffer]") -> None:
        outcome: Outcome
        if future.cancelled():
            outcome = LinkLost("was given up before it has answered")
        elif (fault := future.exception()) is None:
            outcome = future.result()
        else:
            outcome = LinkLost(str(fault)) if isinstance(fault, ChannelLost) else cast(Exception, fault)
        if isinstance(outcome, LinkLost) and call in self._calls and not (future.cancelled() or self.no_channel):
            self._doubt()
        self._end(call, outcome)

    def _end(self, call: BatchCall, outcome: Outcome) -> None:
        if call in self._calls:
            self._calls.discard(call)
            try:
                call.on_end(outcome)
            finally:
                self._check_drained()

    def give_up(self, call: BatchCall, why: str) -> None:
        """Wait for a call no longer."""
        asyncio.get_running_loop().call_soon(self._end, call, LinkLost(why))
        call.drop()

    def _set_watchdog(self, in_s: float) -> None:
        # One timer for all calls: one for each would cost more than its call.
        self._watchdog = asyncio.get_running_loop().call_later(in_s, self._give_up_late)

    def _give_up_late(self) -> None:
        self._watchdog = None
        now_s = asyncio.get_running_loop().time()
        for call in [call for call in self._calls if call.due_s <= now_s]:
            self.give_up(call, "no answer in time")
            self._doubt()
        due_s = min((call.due_s for call in self._calls), default=math.inf)
        if self._calls:
            self._set_watchdog(min(max(due_s - now_s, _LOOK_S), _LOOK_MOST_S))

    def _doubt(self) -> None:
        """Send nothing there, though the lane may try again at once, until the replica is known to answer."""
        if self._left:
            return
        self._set_up(False)
        self._attending.cancel()
        self._attending = asyncio.get_running_loop().create_task(self._attend())

    async def retire(self) -> None:
        """Let what runs there end, then let go of the replica: it ends then, or has ended already."""
        self.on_change = lambda: None
        self._left = True
        self._attending.cancel()
        if self._staying is not None:
            self._staying.cancel()
        if (self._calls or self._requests) and not await self._answers():
            # It is frozen, or its node has gone without closing our connection: the calls would only time out.
            self._lost = True
            for request in self._requests:
                request.cancel()
            for call in list(self._calls):
                self.give_up(call, _NO_ANSWER)
        if self._calls or self._requests:
            self._drained = asyncio.Event()
            await self._drained.wait()
        await self.close()

    async def close(self, *, release: bool = False) -> None:
        """release: the model is unloaded: the replica, if no other ingress uses it, frees it before this returns."""
        self._left = True
        for task in (self._attending, self._staying, self._opening, *self._wanting):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        if release:
            try:  # also while the replica is in doubt: it may live, and only this frees the model
                await self._request(_RELEASE, self.ingress.encode(), _RELEASE_S if self.up else _PING_S)
            except (LinkLost, InternalError) as exc:
                log.warning("%s may keep an unloaded model: %s", self.replica_id, exc)
        for timer in (self._watchdog, self._looking):
            if timer is not None:
                timer.cancel()
        if self._channel is not None:
            self._channel.close()
        await self._serve_channel.close(None)

    async def _attend(self) -> None:
        known: int | None = None
        while True:
            question = msgspec.msgpack.encode((self.ingress, known, self.load))
            try:
                answer = await self._request(_ATTEND, question, ATTEND_S + CALL_MARGIN_S)
                told = attendance_decoder.decode(answer)
                self.content, self.fault = told.content, told.fault
            except (LinkLost, InternalError, msgspec.MsgspecError, UnicodeDecodeError) as exc:
                log.debug("%s: %s", self.replica_id, exc)
                known = None
                self._set_up(False)
                await asyncio.sleep(_RETRY_ATTEND_S)
                continue
            if self.fault:
                log.warning("%s: %s", self.replica_id, self.fault)
                known = None
                self._set_up(False, changed=True)
                await asyncio.sleep(_RETRY_LOAD_S)
                continue
            known = told.slots
            self.spec = ModelSpec(**msgspec.structs.asdict(told.spec))
            has_channel = self._channel is not None and self._channel.is_open
            if not has_channel:
                self.leased, self.standing, self._wanted = told.slots, Standing(told.lives, told.counted), False
            if not has_channel and (self._opening is None or self._opening.done()):
                self._opening = asyncio.get_running_loop().create_task(self._open_channel())
                if self.spec.decoupled and not self.no_channel:
                    await self._opening
            self._set_up(True, changed=True)

    async def _stay(self) -> None:
        """Attend with a second call, half a turn later: Serve would end a replica off its lists, did it look between two."""
        question = msgspec.msgpack.encode((self.ingress, 0, self.load))
        while True:
            await asyncio.sleep(ATTEND_S / 2)
            while self.up and self._channel is not None and self._channel.is_open:  # else it would be answered at once
                try:
                    await self._request(_ATTEND, question, ATTEND_S + CALL_MARGIN_S)
                except (LinkLost, InternalError):  # `_attend` finds out as well
                    break

    async def _open_channel(self) -> None:
        """Until then, and where there is none, batches go by Serve's gRPC server, which cannot carry an answer in parts."""
        node = str(ray.get_runtime_context().get_node_id())
        try:
            answer = await self._request(_CHANNEL, node.encode(), _PING_S)
            token, endpoints = channel_decoder.decode(answer)
            if endpoints.host:
                self.keep_account(token, endpoints.host, endpoints.port)
                self._channel = await Channel.connect(token, host=endpoints.host, port=endpoints.port)
            else:
                self._channel = await Channel.connect(token, unix=endpoints.unix)
            self._channel.on_end = self._doubt
            self._channel.on_slots = self._told_slots
            self._wanted = False
            self._channel.want(self.ingress, 0.0)
            if self.no_channel:
                self.no_channel = ""
                self.on_change()
        except (LinkLost, InternalError, ChannelLost, msgspec.MsgspecError, UnicodeDecodeError) as exc:
            self._channel = None
            level = logging.DEBUG if self._told_of_channel else logging.WARNING
            self._told_of_channel = True
            if self.spec.decoupled:
                self.no_channel = f"its model answers in parts, which need a channel to it, and none can be opened: {exc}"
                log.log(level, "%s: %s", self.replica_id, self.no_channel)
            else:
                log.log(level, "%s: batches go by Serve's gRPC server, which is slower: %s", self.replica_id, exc)

    def _set_up(self, up: bool, *, changed: bool = False) -> None:
        changed |= up != self.up
        self.up = up
        if changed:
            self.on_change()

    async def _request(self, metadata: bytes, argument: bytes, timeout_s: float) -> bytes:
        """Call a method of the replica's deployment class with one byte string; it answers with one."""
        # The envelope is Serve's and is pickled; the byte string in it is ours and names no code.
        request = ASGIRequest(
            pickled_request_metadata=metadata,
            request_args=pickle.dumps((argument,), pickle.HIGHEST_PROTOCOL),
            request_kwargs=_NO_KWARGS,
        )
        call = self._handle(request, timeout=timeout_s)
        try:
            async with self._counted(call):
                response = await call
        except grpc.aio.AioRpcError as exc:
            raise LinkLost(f"{exc.code().name.lower()}: {exc.details()}") from exc
        answer = pickle.loads(response.serialized_message)  # noqa: S301  # Serve's envelope, on the cluster's authenticated network
        if response.is_error:
            raise InternalError(f"replica {self.replica_id}: {words_of(answer)}")
        return answer  # type: ignore[no-any-return]  # all of the methods return bytes

    @contextlib.asynccontextmanager
    async def _counted(self, call: Any) -> AsyncIterator[None]:
        """For as long as a call runs, `retire` waits for it, or cancels it. Raises: LinkLost."""
        self._requests.add(call)
        try:
            yield
        except asyncio.CancelledError:
            if self._lost:
                raise LinkLost(_NO_ANSWER) from None
            raise
        finally:
            self._requests.discard(call)
            self._check_drained()

    def _check_drained(self) -> None:
        if self._drained is not None and not self._calls and not self._requests:
            self._drained.set()

    async def _answers(self) -> bool:
        question = msgspec.msgpack.encode((self.ingress, None, self.load))
        try:
            await self._request(_ATTEND, question, _PING_S)
        except (LinkLost, InternalError):
            return False
        return True


def _metadata(method: str) -> bytes:
    """Serve's pickled head of a call. The same for every call: Serve uses the ids only for logs and calls made in turn."""
    return pickle.dumps(
        RequestMetadata(
            request_id="gateway",
            internal_request_id="gateway",
            call_method=method,
            _by_reference=False,
            _on_separate_loop=False,
            request_serialization="pickle",
            response_serialization="pickle",
        )
    )


_RUN: Final = _metadata("run")
_ATTEND: Final = _metadata("attend")
_WANT: Final = _metadata("want")
_RELEASE: Final = _metadata("release")
_CHANNEL: Final = _metadata("channel")
_NO_KWARGS: Final = pickle.dumps({})
