"""gRPC as bytes on a socket: what no client library would send."""

import asyncio
import contextlib
import gc
import gzip
import random
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import grpc
import hpack
import pytest
from grpc import StatusCode
from grpc_reflection.v1alpha import reflection_pb2
from tritonclient.grpc import service_pb2 as pb

from gateway.config import Limits
from gateway.edges import grpc_call, http_server
from gateway.edges.grpc_server import GrpcServer
from gateway.engine.repository import Repository
from gateway.wire import compression
from gateway.wire.http2_frames import PREFACE, frame_head
from gateway.wire.http2_receiver import NOBODY, Receiver
from tests.grpc_server.serving import MODELS, Served, infer_request, on_loop, serving

pytestmark = pytest.mark.slow

DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
END_STREAM, END_HEADERS = 0x1, 0x4
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
LIVE = "/inference.GRPCInferenceService/ServerLive"
REFLECTION = "grpc.reflection.{}.ServerReflection"
GOOD = infer_request(value=7, request_id="x").SerializeToString()


@dataclass
class Answer:
    """fields: of the headers and the trailers together."""

    fields: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    reset: int | None = None

    @property
    def status(self) -> StatusCode:
        return next(status for status in StatusCode if str(status.value[0]) == self.fields["grpc-status"])

    @property
    def text(self) -> str:
        return unquote(self.fields.get("grpc-message", ""))


def framed(message: bytes, flag: int = 0) -> bytes:
    return bytes((flag,)) + len(message).to_bytes(4) + message


async def ask(served: Served, *pieces: bytes, path: str = INFER, ends: bool = True, **headers: str) -> Answer:
    """Send the pieces as DATA frames of one call; ends: the last of them ends the stream."""
    host, port = served.url.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    given = {"content-type": "application/grpc", "te": "trailers"} | {key.replace("_", "-"): v for key, v in headers.items()}
    block = hpack.Encoder().encode([(":method", "POST"), (":scheme", "http"), (":path", path), *given.items()])
    writer.write(PREFACE + frame_head(0, SETTINGS, 0, 0))
    writer.write(frame_head(len(block), HEADERS, END_HEADERS | (0 if pieces else END_STREAM), 1) + block)
    for i, piece in enumerate(pieces):
        writer.write(frame_head(len(piece), DATA, END_STREAM if ends and i == len(pieces) - 1 else 0, 1) + piece)
    answer, decoder = Answer(), hpack.Decoder()
    async with asyncio.timeout(10):
        while True:
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3]))
            if head[3] == HEADERS:
                answer.fields |= dict(decoder.decode(payload))
            elif head[3] == DATA:
                answer.body += payload
            elif head[3] == RST_STREAM:
                answer.reset = int.from_bytes(payload)
            if head[3] in (HEADERS, DATA) and head[4] & END_STREAM:
                break
    writer.close()
    return answer


@on_loop
async def test_a_message_in_any_pieces_is_one_message() -> None:
    async with serving() as served:
        message = framed(GOOD)
        for pieces in ([message], [message[:3], message[3:]], [message[:9], message[9:40], message[40:]], [message, b""]):
            answer = await ask(served, *pieces)
            assert answer.status is StatusCode.OK
            assert pb.ModelInferResponse.FromString(answer.body[5:]).id == "x"


@on_loop
async def test_compressed_messages_are_read() -> None:
    async with serving() as served:
        for encoding, compress in (("gzip", gzip.compress), ("deflate", zlib.compress)):
            answer = await ask(served, framed(compress(GOOD), 1), grpc_encoding=encoding)
            assert answer.status is StatusCode.OK


@on_loop
async def test_a_message_that_inflates_beyond_the_limit_is_refused() -> None:
    async with serving(f"server: {{limits: {{body_bytes: 100000}}}}\n{MODELS}") as served:
        gc.collect()
        gc.disable()
        try:
            answer = await ask(served, framed(gzip.compress(bytes(10_000_000)), 1), grpc_encoding="gzip")
            assert not [each for each in gc.get_objects() if type(each) is compression._Collected], "waits for the collector"
        finally:
            gc.enable()
        assert answer.status is StatusCode.INVALID_ARGUMENT
        assert "expected at most 100000 bytes" in answer.text


@on_loop
async def test_a_message_for_which_there_is_no_memory_once_inflated_may_be_sent_again() -> None:
    def inflate(*about: object) -> bytes:
        raise MemoryError

    async with serving() as served:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grpc_call, "inflate", inflate)
            for message in (GOOD, random.Random(1).randbytes(10_000)):  # on the loop, and beside it
                answer = await ask(served, framed(gzip.compress(message), 1), grpc_encoding="gzip")
                assert answer.status is StatusCode.UNAVAILABLE
                assert "no memory" in answer.text
                assert answer.fields["retry-after"] == "1"


@pytest.mark.parametrize(
    ("pieces", "headers", "status", "text"),
    [
        ((), {}, StatusCode.INVALID_ARGUMENT, "takes one message, got none"),
        ((framed(GOOD) * 2,), {}, StatusCode.INVALID_ARGUMENT, "takes one message, got more"),
        ((framed(GOOD)[:-1],), {}, StatusCode.INVALID_ARGUMENT, "ends within a message"),
        ((b"\0\0",), {}, StatusCode.INVALID_ARGUMENT, "ends within a message"),
        ((framed(GOOD, 1),), {}, StatusCode.INTERNAL, "flagged as compressed, but its call has no grpc-encoding"),
        ((framed(GOOD, 1),), {"grpc_encoding": "identity"}, StatusCode.INTERNAL, "flagged as compressed"),
        ((framed(GOOD, 9),), {}, StatusCode.INVALID_ARGUMENT, "flag 9"),
        ((framed(b"\xff" * 9),), {}, StatusCode.INVALID_ARGUMENT, "the request is no inference.ModelInferRequest"),
        ((framed(b"\xff" * 20, 1),), {"grpc_encoding": "gzip"}, StatusCode.INVALID_ARGUMENT, "no valid gzip data"),
        ((framed(GOOD),), {"grpc_encoding": "snappy"}, StatusCode.UNIMPLEMENTED, "expected identity, gzip or deflate"),
        ((framed(GOOD),), {"grpc_timeout": "soon"}, StatusCode.INVALID_ARGUMENT, "grpc-timeout 'soon'"),
        ((framed(GOOD),), {"grpc_timeout": "123456789S"}, StatusCode.INVALID_ARGUMENT, "grpc-timeout"),
        ((framed(GOOD),), {"grpc_timeout": "0S"}, StatusCode.DEADLINE_EXCEEDED, "had passed when it came: grpc-timeout 0S"),
        ((framed(b""),), {"grpc_timeout": "0n", "path": LIVE}, StatusCode.DEADLINE_EXCEEDED, "grpc-timeout 0n"),
        ((framed(GOOD),), {"grpc_timeout": "1n"}, StatusCode.DEADLINE_EXCEEDED, "the request came after its deadline"),
        ((framed(b""),), {"grpc_timeout": "1s", "path": LIVE}, StatusCode.INVALID_ARGUMENT, "grpc-timeout '1s'"),
        ((framed(GOOD),), {"path": "/inference.GRPCInferenceService/Nothing"}, StatusCode.UNIMPLEMENTED, "unknown method"),
        ((framed(b""),), {}, StatusCode.NOT_FOUND, "Request for unknown model: '' is not found; models here: 'echo', 'later'"),
        ((b"\0\xff\xff\xff\xff",), {"ends": False}, StatusCode.INVALID_ARGUMENT, "a message of 4294967295 bytes"),
    ],
)
def test_what_is_no_call_is_refused(pieces: tuple[bytes, ...], headers: dict[str, str], status: StatusCode, text: str) -> None:
    @on_loop
    async def run() -> None:
        async with serving() as served:
            answer = await ask(served, *pieces, **headers)  # type: ignore[arg-type]
            assert answer.status is status
            assert text in answer.text
            assert (await ask(served, framed(GOOD))).status is StatusCode.OK

    run()


@on_loop
async def test_what_is_not_grpc_gets_an_http_status() -> None:
    async with serving() as served:
        answer = await ask(served, b"{}", content_type="application/json")
        assert (answer.fields[":status"], answer.fields["content-type"]) == ("415", "text/plain")
        assert b"expected a POST of application/grpc" in answer.body


@on_loop
async def test_a_timeout_of_the_call_is_read_in_every_unit() -> None:
    async with serving() as served:
        for timeout in ("1H", "1M", "9S", "9000m", "9000000u", "99999999n"):
            assert (await ask(served, framed(GOOD), grpc_timeout=timeout)).status in (
                StatusCode.OK,
                StatusCode.DEADLINE_EXCEEDED,
            )


@on_loop
async def test_texts_of_errors_survive_the_header() -> None:
    async with serving() as served:
        answer = await ask(served, framed(pb.ModelInferRequest(model_name="ünknown 100%\n").SerializeToString()))
        assert answer.text == "Request for unknown model: 'ünknown 100%\n' is not found; models here: 'echo', 'later'"
        answer = await ask(served, framed(pb.ModelInferRequest(model_name="x" * 50_000).SerializeToString()))
        assert answer.status is StatusCode.NOT_FOUND
        assert len(answer.fields["grpc-message"]) <= 4096


@on_loop
async def test_corrupted_bytes_do_no_harm() -> None:
    rng = random.Random(0)
    encoder = hpack.Encoder()
    block = encoder.encode([(":method", "POST"), (":scheme", "http"), (":path", INFER), ("content-type", "application/grpc")])
    call = frame_head(len(block), HEADERS, END_HEADERS, 1) + block
    message = framed(GOOD)
    good = PREFACE + frame_head(0, SETTINGS, 0, 0) + call + frame_head(len(message), DATA, END_STREAM, 1) + message
    async with serving() as served:
        host, port = served.url.split(":")
        for _ in range(300):
            bad = bytearray(good)
            for _ in range(rng.randint(1, 4)):
                bad[rng.randrange(len(PREFACE), len(bad))] = rng.randrange(256)
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(bad[: rng.randint(len(PREFACE), len(bad))])
            writer.write_eof()
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 10)
            writer.close()
        assert (await ask(served, message)).status is StatusCode.OK
        assert served.repository.pending == 0


@on_loop
async def test_several_listeners_share_a_port() -> None:
    async with serving() as served:
        first, second = (GrpcServer(served.repository, Limits()) for _ in range(2))
        port = await first.start("127.0.0.1", 0, reuse_port=True)
        assert await second.start("127.0.0.1", port, reuse_port=True) == port
        for server in (first, second):
            async with grpc.aio.insecure_channel(
                f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]
            ) as channel:
                infer = channel.unary_unary(INFER)
                assert pb.ModelInferResponse.FromString(await infer(GOOD)).id == "x"
            await server.drain(1)


@on_loop
async def test_connections_over_the_limit_are_closed() -> None:
    async with serving(f"server: {{limits: {{connections: 3}}}}\n{MODELS}") as served:
        host, port = served.url.split(":")
        kept = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 5)
        assert reader.at_eof()
        for _, each in [*kept, (reader, writer)]:
            each.close()


@on_loop
async def test_a_connection_for_which_there_is_hardly_a_file_is_refused() -> None:
    async with serving() as served:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(http_server, "_kept", lambda most: most)
            reader, writer = await asyncio.open_connection(*served.url.split(":"))
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 5)
            writer.close()
        assert (await ask(served, framed(GOOD))).status is StatusCode.OK


@on_loop
async def test_what_is_over_is_freed_without_the_collector() -> None:
    def alive() -> list[str]:
        ours = (
            "gateway.edges.http2",
            "gateway.wire.http2",
            "gateway.wire.http2_sending",
            "gateway.wire.http2_server",
            "gateway.wire.http2_headers",
            "gateway.edges.grpc_call",
            "gateway.edges.grpc_server",
            "gateway.edges.grpc_inference",
            "gateway.edges.grpc_services",
        )
        return [type(each).__qualname__ for each in gc.get_objects() if type(each).__module__ in ours]

    async with serving() as served:
        await ask(served, framed(GOOD))
        await asyncio.sleep(0.05)
        gc.collect()
        before = sorted(alive())
        gc.disable()
        try:
            for pieces in ((framed(GOOD),), (framed(b""),), (framed(GOOD)[:5], framed(GOOD)[5:]), (b"\0\0",)):
                await ask(served, *pieces)
            await ask(
                served, framed(GOOD), framed(b"\xff"), framed(GOOD), path="/inference.GRPCInferenceService/ModelStreamInfer"
            )
            await ask(served, framed(b""), path="/inference.GRPCInferenceService/ServerLive")
            await asyncio.sleep(0.05)
            assert sorted(alive()) == before
        finally:
            gc.enable()


@on_loop
async def test_answers_and_errors_say_which_compressions_are_read() -> None:
    async with serving() as served:
        for answer in (await ask(served, framed(GOOD)), await ask(served, framed(GOOD), grpc_encoding="snappy")):
            assert answer.fields["grpc-accept-encoding"] == "identity,deflate,gzip"


@on_loop
async def test_a_stream_that_fails_on_bad_bytes_is_forgotten() -> None:
    async with serving() as served:
        for pieces in ((framed(GOOD, 9),), (framed(GOOD), b"\0\xff\xff\xff\xff"), (framed(GOOD)[:9],), (framed(GOOD, 1),)):
            assert (await ask(served, *pieces, path=STREAM_INFER)).status is not StatusCode.OK
        assert not served.server._streams


@on_loop
async def test_reflection_is_there_in_both_versions() -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    async with serving() as served:
        for version in ("v1", "v1alpha"):
            answer = await ask(served, framed(request), path=f"/{REFLECTION.format(version)}/ServerReflectionInfo")
            reply = reflection_pb2.ServerReflectionResponse.FromString(answer.body[5:])
            names = {service.name for service in reply.list_services_response.service}
            assert {REFLECTION.format("v1"), REFLECTION.format("v1alpha")} < names


class SlowStream:
    """Its client reads when a test says so."""

    def __init__(self, path: str, **headers: str) -> None:
        self.headers = {b":method": b"POST", b":path": path.encode(), b"content-type": b"application/grpc"}
        self.headers |= {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
        self.receiver: Receiver = NOBODY
        self.backlog = False
        self.reads = True
        self.sent: list[bytes] = []
        self.over = False
        self.turns_ended = 0

    def send_headers(self, block: bytes, *, end: bool = False) -> None:
        self.over |= end

    def send_data(self, data: bytes) -> None:
        self.sent.append(data)
        self.backlog = not self.reads

    def try_send_whole(self, block: bytes, data: bytes, trailers: bytes) -> bool:
        return False

    def finish(self, trailers: bytes) -> None:
        self.over = True

    def end(self) -> None:
        self.over = True

    def credit(self, size: int) -> None: ...

    def end_turn(self) -> None:
        self.turns_ended += 1

    def reserve(self, size: int, again: Callable[[], None]) -> bool:
        return True

    def settle(self, reserved: int, size: int) -> bool:
        return True

    def give_back(self, size: int) -> None: ...


@on_loop
async def test_reflection_waits_for_a_client_that_does_not_read() -> None:
    request = framed(reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString())
    async with serving() as served:
        stream = SlowStream(f"/{REFLECTION.format('v1alpha')}/ServerReflectionInfo")
        stream.reads = False
        served.server.open(stream)
        stream.receiver.take(request * 1000, False)
        stream.receiver.take(request, True)
        assert len(stream.sent) == 1
        stream.backlog = False
        stream.receiver.drained()
        assert len(stream.sent) == 2
        stream.backlog, stream.reads = False, True
        stream.receiver.drained()
        while not stream.over:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0)
        assert len(stream.sent) == 1001


@on_loop
async def test_a_call_that_takes_a_task_lets_others_in_behind_it() -> None:
    async with serving() as served:
        for path, message, turns in ((LIVE, b"", 1), (INFER, GOOD, 0)):
            stream = SlowStream(path)
            served.server.open(stream)
            stream.receiver.take(framed(message), True)
            assert stream.turns_ended == turns
            while not stream.over:  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.001)


@on_loop
async def test_many_short_messages_let_others_in_between() -> None:
    asked = framed(reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString())
    async with serving() as served:
        for path, request in ((f"/{REFLECTION.format('v1')}/ServerReflectionInfo", asked), (STREAM_INFER, framed(b""))):
            stream = SlowStream(path)
            served.server.open(stream)
            stream.receiver.take(request * 5000, True)
            turns = 1
            while not stream.over:
                assert len(stream.sent) <= 128 * turns
                turns += 1
                await asyncio.sleep(0)
            assert len(stream.sent) == 5000
            assert turns > 5000 // 128


@on_loop
async def test_what_a_stream_cannot_begin_stays_in_the_bytes_it_came_in() -> None:
    """A message of five bytes is a hundred as an object: the client's window bounds the bytes."""
    async with serving() as served:
        stream = SlowStream(STREAM_INFER)
        stream.backlog = True
        served.server.open(stream)
        stream.receiver.take(framed(b"") * 100_000, False)
        (call,) = served.server._streams
        tracemalloc.start()
        stream.receiver.take(framed(b"") * 100_000, False)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held < 1_000_000
        stream.receiver.reset()
        assert call not in served.server._streams


@on_loop
async def test_a_message_that_may_take_long_to_inflate_is_inflated_off_the_loop() -> None:
    async with serving() as served:
        for size, at_once in ((1000, True), (50_000_000, False)):
            stream = SlowStream(INFER, grpc_encoding="gzip")
            served.server.open(stream)
            stream.receiver.take(framed(gzip.compress(bytes(size)), 1), True)
            assert stream.over is at_once
            while not stream.over:  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(0.001)


@on_loop
async def test_messages_behind_one_that_is_inflated_keep_their_order() -> None:
    async with serving() as served:
        big = framed(gzip.compress(bytes(50_000_000)), 1)
        stream = SlowStream(STREAM_INFER, grpc_encoding="gzip")
        served.server.open(stream)
        stream.receiver.take(framed(GOOD) + big + framed(GOOD) + framed(gzip.compress(GOOD), 1), False)
        stream.receiver.take(framed(GOOD), True)
        while not stream.over:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.001)
        replies = [pb.ModelStreamInferResponse.FromString(data[5:]) for data in stream.sent]
        assert [reply.infer_response.id for reply in replies] == ["x", "", "x", "x", "x"]


class Counted:
    """A repository that counts how often it is asked whether it is ready."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self.asked = 0
        self.is_ready = True

    def ready(self) -> bool:
        self.asked += 1
        return self.is_ready

    def __getattr__(self, name: str) -> Any:
        return getattr(self._repository, name)


@on_loop
async def test_watchers_of_the_health_cost_nothing_while_it_does_not_change() -> None:
    async with serving() as served:
        repository = Counted(served.repository)
        server = GrpcServer(repository, Limits())  # type: ignore[arg-type]
        streams = [SlowStream("/grpc.health.v1.Health/Watch") for _ in range(500)]
        for stream in streams:
            server.open(stream)
            stream.receiver.take(framed(b""), True)
        assert all(len(stream.sent) == 1 for stream in streams)
        repository.asked = 0
        await asyncio.sleep(0.6)
        assert 1 <= repository.asked <= 4
        repository.is_ready = False
        await asyncio.sleep(0.4)
        assert all(len(stream.sent) == 2 for stream in streams)
        for stream in streams:
            stream.receiver.reset()
        assert not server._watches


@on_loop
async def test_a_message_that_does_not_end_in_time_fails_its_call_and_a_silent_stream_goes_on() -> None:
    async with serving() as served:
        for path, came, fails in (
            (INFER, b"", True),
            (INFER, framed(GOOD)[:9], True),
            (INFER, framed(GOOD), True),
            (STREAM_INFER, framed(GOOD)[:9], True),
            (STREAM_INFER, b"", False),
            (STREAM_INFER, framed(GOOD), False),
        ):
            stream = SlowStream(path)
            served.server.open(stream)
            stream.receiver.take(came, False)
            stream.receiver.late()
            assert stream.over is fails
            stream.receiver.reset()
        assert served.repository.pending == 0


@on_loop
async def test_a_call_says_which_message_it_has_in_part() -> None:
    """By which a message that drips in is told from several that follow one another."""
    message = framed(GOOD)
    async with serving() as served:
        stream = SlowStream(STREAM_INFER)
        served.server.open(stream)
        seen = []
        for piece in (b"", message[:3], message[3:9], message[9:], message, message[:3], message[3:] + message[:9]):
            stream.receiver.take(piece, False)
            seen.append(stream.receiver.unfinished)
        first, again, later, next_one = seen[1], seen[2], seen[5], seen[6]
        assert [number > 0 for number in seen] == [False, True, True, False, False, True, True]
        assert first == again != later != next_one
        stream.receiver.reset()


@on_loop
async def test_a_call_that_does_not_go_on_ends_with_the_deadline_of_bodies() -> None:
    async with serving(f"server: {{limits: {{body_timeout_s: 0.2}}}}\n{MODELS}") as served:
        answer = await ask(served, framed(GOOD)[:9], ends=False)
        assert answer.status is StatusCode.DEADLINE_EXCEEDED
        assert "server.limits.body_timeout_s" in answer.text
