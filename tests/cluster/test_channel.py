"""The socket between an ingress and a replica: frames whole and in order, strangers refused, an end that is told at once."""

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
import uvloop

from gateway.cluster import channel_connection as wire
from gateway.cluster.channel import (
    Addresses,
    Answer,
    Channel,
    ChannelLost,
    ChannelServer,
    Running,
    Standing,
    Tell,
    Tenant,
)
from gateway.cluster.channel_connection import check_size
from gateway.errors import BackendFailed
from gateway.wire.tensors import Buffer
from tests.engine.pools import until_true

pytestmark = pytest.mark.ray  # the package imports it


class Echo:
    """A replica that answers what it gets: at once, or when the test calls what is held, and gives parts."""

    def __init__(self, *, holds: bool = False, **limits: Any) -> None:
        self.server = ChannelServer(self._run, self._enter, **limits)
        self.entered: list[str] = []
        self.heard: list[object] = []
        self.tell: Tell
        self.frames: list[bytes] = []
        self.cancelled: list[bytes] = []
        self.held: list[Callable[[], None]] = []
        self.parts: list[Answer] = []
        self.taken: list[bytes] = []
        self._holds = holds

    def _enter(self, ingress: str, tell: Tell) -> Tenant:
        self.entered.append(ingress)
        self.tell = tell
        return Tenant(
            lambda batches: self.heard.append(("wants", batches)),
            lambda number: self.heard.append(("knows", number)),
            lambda: self.heard.append("gone"),
        )

    def _run(self, frame: Buffer, answer: Answer, part: Answer) -> Running:
        content = bytes(frame)
        self.frames.append(content)
        if self._holds:
            self.held.append(lambda: answer((content,)))
            self.parts.append(part)
        else:
            answer((frame,))
        return Running(lambda: self.cancelled.append(content), lambda: self.taken.append(content))


def on_both_loops(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    for run in (asyncio.run, uvloop.run):
        run(asyncio.wait_for(test(), 20))


def nobody_enters(ingress: str, tell: Tell) -> Tenant:
    raise AssertionError(ingress)


async def opened(echo: Echo, how: str = "unix") -> Channel:
    host = "127.0.0.1" if how == "tcp" else ""
    endpoints = await echo.server.start(host)
    if how == "tcp":
        return await Channel.connect(echo.server.token, host=endpoints.host, port=endpoints.port)
    return await Channel.connect(echo.server.token, unix=endpoints.unix)


async def closed(echo: Echo, *channels: Channel) -> None:
    for channel in channels:
        channel.close()
    await echo.server.close()


@pytest.mark.parametrize("how", ["unix", "tcp"])
def test_frames_of_any_size_come_back_each_to_its_question(how: str) -> None:
    async def test() -> None:
        echo = Echo()
        channel = await opened(echo, how)
        sizes = [0, 1, 100, 1 << 14, (1 << 18) - 13, (1 << 18) - 12, 1 << 18, 3_000_000, 5, 200_000] * 3
        contents = [os.urandom(size) for size in sizes]
        questions = [channel.ask((content[:7], content[7:])) for content in contents]
        for question, content in zip(questions, contents, strict=True):
            assert bytes(await question.answer) == content
        assert echo.frames == contents
        await asyncio.wait_for(echo.server.drained(), 1)
        await closed(echo, channel)

    on_both_loops(test)


def test_both_ends_notice_within_seconds_that_the_other_node_has_vanished() -> None:
    async def test() -> None:
        echo = Echo()
        channel = await opened(echo, "tcp")
        (incoming,) = echo.server._connections
        for end in (channel, incoming):
            connection = end._transport.get_extra_info("socket")
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 20_000  # what is sent
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1  # and where nothing is
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 5
        await closed(echo, channel)

    on_both_loops(test)


def test_large_frames_of_a_node_go_through_memory_that_is_used_again_and_what_is_kept_of_it_stays() -> None:
    kept: list[Buffer] = []

    async def test() -> None:
        echo = Echo()
        channel = await opened(echo)
        await channel.ask((bytes(3_000_000),)).answer  # by the socket: each side offers its memory with it
        contents = [bytes([number]) * 3_000_000 for number in range(1, 13)]
        kept.append(await channel.ask((contents[0],)).answer)
        for content in contents[1:]:
            assert bytes(await channel.ask((content,)).answer) == content
        (incoming,) = echo.server._connections
        for side in (channel, incoming):
            assert side._arena is not None
            blocks = len(side._arena._taken) + sum(map(len, side._arena._free.values()))
            assert 1 <= blocks <= 4
        distant = await opened(echo, "tcp")
        assert bytes(await distant.ask((contents[0],)).answer) == contents[0]
        assert (distant._arena, distant._window) == (None, None)
        await closed(echo, channel, distant)
        assert bytes(kept[-1]) == contents[0]

    on_both_loops(test)
    kept.clear()  # its connection has ended, and its loop, too


def test_a_frame_that_would_end_its_connection_is_refused_before() -> None:
    check_size((b"12", b"345"), 5)
    with pytest.raises(BackendFailed, match="tensors of 6 bytes, expected at most 5 between"):
        check_size((b"12", b"3456"), 5)


def test_an_answer_that_comes_late_goes_to_whoever_asked_for_it() -> None:
    async def test() -> None:
        echo = Echo(holds=True)
        channels = [await opened(echo), await opened(echo, "tcp")]
        questions = [channel.ask((b"%d" % number,)) for number in range(3) for channel in channels]
        await until_true(lambda: len(echo.held) == 6)
        assert not echo.server._idle.is_set()
        for release in reversed(echo.held):
            release()
        assert [bytes(await question.answer) for question in questions] == [b"0", b"0", b"1", b"1", b"2", b"2"]
        await asyncio.wait_for(echo.server.drained(), 1)
        await closed(echo, *channels)

    on_both_loops(test)


def test_slots_are_told_in_order_with_answers_and_known_once_they_could_be_used() -> None:
    async def test() -> None:
        echo = Echo(holds=True)
        channel = await opened(echo)
        told: list[object] = []
        channel.on_slots = lambda slots, standing: told.append((slots, standing))
        channel.want("me", 0.0)
        channel.want("me", 2.5)
        await until_true(lambda: len(echo.heard) == 2)
        assert (echo.entered, echo.heard) == (["me"], [("wants", 0.0), ("wants", 2.5)])
        question = channel.ask((b"batch",))
        question.answer.add_done_callback(lambda _: told.append("answer"))
        await until_true(lambda: echo.held)
        echo.tell(0, 7, Standing(True, 3))
        echo.held[0]()
        echo.tell(1, 8, Standing(False, 0))
        await until_true(lambda: len(echo.heard) == 4)
        first, second = (0, Standing(True, 3)), (1, Standing(False, 0))
        assert told in ([first, second, "answer"], [first, "answer", second])
        assert echo.heard[2:] == [("knows", 7), ("knows", 8)]
        channel.on_slots = lambda slots, standing: asyncio.get_running_loop().call_soon(channel.ask, (b"at once",)) and None
        echo.tell(1, 9, Standing(True, 0))
        await until_true(lambda: ("knows", 9) in echo.heard)
        assert echo.frames[-1] == b"at once"
        await closed(echo, channel)
        assert echo.heard[-1] == "gone"
        echo.tell(1, 10, Standing(True, 0))  # to nobody

    on_both_loops(test)


def test_a_cancelled_question_is_told_to_the_replica_and_a_late_answer_harms_nobody() -> None:
    async def test() -> None:
        echo = Echo(holds=True)
        channel = await opened(echo)
        kept, given_up, hurried = (channel.ask((name,)) for name in (b"kept", b"given up", b"hurried"))
        await until_true(lambda: len(echo.held) == 3)
        given_up.answer.cancel()
        hurried.cancel()
        await until_true(lambda: len(echo.cancelled) == 2)
        assert sorted(echo.cancelled) == [b"given up", b"hurried"]
        for release in echo.held:
            release()
        assert bytes(await kept.answer) == b"kept"
        assert bytes(await hurried.answer) == b"hurried"  # asked for early, it is an answer all the same
        hurried.cancel()  # too late: nothing happens
        await closed(echo, channel)

    on_both_loops(test)


@pytest.mark.parametrize("ends", ["replica", "ingress"])
def test_the_end_of_a_connection_is_told_at_once_on_both_sides(ends: str) -> None:
    async def test() -> None:
        echo = Echo(holds=True)
        channel = await opened(echo)
        ends_told: list[int] = []
        channel.on_end = lambda: ends_told.append(1)
        questions = [channel.ask((b"a",)), channel.ask((b"b",))]
        await until_true(lambda: len(echo.held) == 2)
        if ends == "replica":
            await echo.server.close()
        else:
            channel.abort()
        for question in questions:
            with pytest.raises(ChannelLost):
                await asyncio.wait_for(question.answer, 1)
        assert ends_told == [1]
        with pytest.raises(ChannelLost, match="closed"):
            await channel.ask((b"c",)).answer
        await asyncio.wait_for(echo.server.drained(), 1)
        assert echo.cancelled == [b"a", b"b"]
        for release in echo.held:
            release()  # to nobody
        await closed(echo)

    on_both_loops(test)


def test_what_is_never_connected_waits_for_no_greeting() -> None:
    async def test() -> None:
        assert Channel(bytes(32))._patience is None  # uvloop makes it before it knows whether anybody listens

    on_both_loops(test)


def test_a_run_that_raises_costs_its_connection_and_the_next_one_works(caplog: pytest.LogCaptureFixture) -> None:
    def run(frame: Buffer, answer: Answer, part: Answer) -> Running:
        if bytes(frame) == b"bad":
            raise ZeroDivisionError("injected")
        answer((frame,))
        return Running()

    async def test() -> None:
        server = ChannelServer(run, nobody_enters)
        endpoints = await server.start()
        channel = await Channel.connect(server.token, unix=endpoints.unix)
        with pytest.raises(ChannelLost):
            await channel.ask((b"bad",)).answer
        again = await Channel.connect(server.token, unix=endpoints.unix)
        assert bytes(await again.ask((b"good",)).answer) == b"good"
        await asyncio.wait_for(server.drained(), 1)
        again.close()
        await server.close()

    on_both_loops(test)
    assert "ZeroDivisionError: injected" in caplog.text


@pytest.mark.parametrize("ends", ["cancelled", "lost"])
def test_a_run_that_cannot_be_cancelled_costs_no_other(ends: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        held: list[Callable[[], None]] = []
        cancelled: list[bytes] = []

        def run(frame: Buffer, answer: Answer, part: Answer) -> Running:
            def cancel() -> None:
                if frame == b"bad":
                    raise ZeroDivisionError("injected")
                cancelled.append(bytes(frame))

            held.append(lambda: answer((frame,)))
            return Running(cancel)

        server = ChannelServer(run, nobody_enters)
        endpoints = await server.start()
        channel = await Channel.connect(server.token, unix=endpoints.unix)
        questions = [channel.ask((content,)) for content in (b"bad", b"good")]
        await until_true(lambda: len(held) == 2)
        if ends == "cancelled":
            for question in questions:
                question.cancel()
            await until_true(lambda: cancelled == [b"good"])
            for release in held:
                release()
            assert [bytes(await question.answer) for question in questions] == [b"bad", b"good"]
        channel.close()
        await asyncio.wait_for(server.drained(), 1)
        assert cancelled == [b"good"]
        for question in questions:
            question.answer.exception()
        await asyncio.wait_for(server.close(), 1)

    on_both_loops(test)
    assert "ZeroDivisionError: injected" in caplog.text


@pytest.mark.parametrize("how", ["unix", "tcp"])
def test_the_parts_of_an_answer_come_in_order_and_before_it_each_to_its_question(how: str) -> None:
    async def test() -> None:
        echo = Echo(holds=True)
        channel = await opened(echo, how)
        parts: dict[bytes, list[bytes]] = {b"a": [], b"b": []}
        questions = {name: channel.ask((name,), partial(keep, parts[name])) for name in parts}
        await until_true(lambda: len(echo.held) == 2)
        sizes = [0, 1, 1 << 14, (1 << 18) - 13, (1 << 18) - 12, 1 << 18, 3_000_000, 5]
        contents = {name: [name + os.urandom(size) for size in sizes] for name in parts}
        for index in range(len(sizes)):
            for name, part in zip(parts, echo.parts, strict=True):
                content = contents[name][index]
                part((content[:7], content[7:]))
        for release in echo.held:
            release()
        for name, question in questions.items():
            assert bytes(await question.answer) == name
            assert parts[name] == contents[name]
        echo.parts[0]((b"after the answer",))
        assert bytes(await asked_and_released(echo, channel)) == b"later"
        assert parts[b"a"] == contents[b"a"]
        await closed(echo, channel)

    on_both_loops(test)


def keep(kept: list[bytes], part: Buffer) -> None:
    kept.append(bytes(part))


async def asked_and_released(echo: Echo, channel: Channel) -> Buffer:
    count = len(echo.held)
    question = channel.ask((b"later",))
    await until_true(lambda: len(echo.held) > count)
    echo.held[-1]()
    return await question.answer


def test_what_was_taken_is_told_to_the_run_it_is_of_and_to_no_other() -> None:
    async def test() -> None:
        echo = Echo(holds=True)
        channel = await opened(echo)
        other = await opened(echo)
        kept: list[bytes] = []
        question, _ = channel.ask((b"a",), partial(keep, kept)), channel.ask((b"b",), partial(keep, kept))
        await until_true(lambda: len(echo.held) == 2)
        question.taken()  # before there was one
        channel._send(wire.TAKEN, 77, ())  # a number that nothing has
        other._send(wire.TAKEN, 1, ())  # what runs for another ingress
        await asyncio.sleep(0.05)
        assert echo.taken == []
        for _ in range(2):
            echo.parts[0]((b"part",))
        await until_true(lambda: len(kept) == 2)
        for _ in range(5):  # of two
            question.taken()
        await until_true(lambda: len(echo.taken) == 2)
        echo.held[0]()
        assert bytes(await question.answer) == b"a"
        question.taken()  # too late
        assert bytes(await asked_and_released(echo, channel)) == b"later"
        assert echo.taken == [b"a", b"a"]
        other.close()
        await closed(echo, channel)

    on_both_loops(test)


def test_a_part_that_cannot_be_taken_or_that_nobody_expects_costs_no_other() -> None:
    def refuse(part: Buffer) -> None:
        raise ZeroDivisionError("injected")

    async def test() -> None:
        echo = Echo(holds=True)
        channel = await opened(echo)
        bad, unary, good = channel.ask((b"bad",), refuse), channel.ask((b"unary",)), channel.ask((b"good",), kept.append)
        await until_true(lambda: len(echo.held) == 3)
        for part in echo.parts:
            for _ in range(2):
                part((b"part",))
        with pytest.raises(ZeroDivisionError):
            await bad.answer
        await until_true(lambda: echo.cancelled == [b"bad"])
        for release in echo.held:
            release()
        assert [bytes(await question.answer) for question in (unary, good)] == [b"unary", b"good"]
        assert kept == [b"part", b"part"]
        kept.clear()
        await closed(echo, channel)

    kept: list[Buffer] = []
    on_both_loops(test)


def said_by(endpoints: Addresses, *frames: bytes) -> bytes:
    """What the replica says to somebody who sends this and then waits for its end. Blocks: on another thread."""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(5)
        stranger.connect(f"\0{endpoints.unix}")
        stranger.sendall(b"".join(frames))
        heard = b""
        while True:
            try:
                piece = stranger.recv(1 << 16)
            except ConnectionResetError:
                return heard
            if not piece:
                return heard
            heard += piece


def frame(kind: int, payload: bytes, *, size: int | None = None) -> bytes:
    return struct.pack("<QIB", len(payload) if size is None else size, 0, kind) + payload


GREETING = struct.pack("<4sH32s", b"GWCH", wire.VERSION, bytes(32))
STRANGERS = {
    "http": [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
    "a wrong token": [frame(0, GREETING), frame(1, bytes(32))],
    "no proof": [frame(0, GREETING), frame(2, b"")],
    "a run first": [frame(2, b"payload")],
    "a taken part first": [frame(6, b"")],
    "two greetings": [frame(0, GREETING), frame(0, GREETING)],
    "a later version": [frame(0, struct.pack("<4sH32s", b"GWCH", wire.VERSION + 1, bytes(32)))],
    "an earlier version": [frame(0, struct.pack("<4sH32s", b"GWCH", wire.VERSION - 1, bytes(32)))],
    "another protocol": [frame(0, struct.pack("<4sH32s", b"HTTP", wire.VERSION, bytes(32)))],
    "a short greeting": [frame(0, GREETING[:-1])],
    "a long first frame": [frame(0, b"", size=65)],
    "a frame that never ends": [frame(0, b"", size=1 << 63)],
    "bytes": [bytes(range(256))],
}


@pytest.mark.parametrize("frames", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_is_refused_before_anything_is_run(frames: list[bytes]) -> None:
    async def test() -> None:
        echo = Echo()
        endpoints = await echo.server.start()
        heard = await asyncio.to_thread(said_by, endpoints, *frames)
        assert heard in (b"", heard[: 13 + 38])  # its greeting, which proves nothing, and no more
        channel = await opened(echo)
        assert bytes(await channel.ask((b"a",)).answer) == b"a"
        assert echo.frames == [b"a"]
        await closed(echo, channel)

    on_both_loops(test)


def test_a_connection_that_says_nothing_is_closed_and_too_many_of_them_are_refused() -> None:
    async def test() -> None:
        echo = Echo(greeting_s=0.5, most_unknown=3)
        endpoints = await echo.server.start()
        silent = []
        for _ in range(3):
            silent.append(socket.socket(socket.AF_UNIX))
            silent[-1].connect(f"\0{endpoints.unix}")
        await until_true(lambda: len(echo.server._connections) == 3)
        with pytest.raises(ChannelLost):
            await opened(echo)
        await until_true(lambda: not echo.server._connections)
        for one in silent:
            one.close()
        channel = await opened(echo)
        assert bytes(await channel.ask((b"a",)).answer) == b"a"
        await closed(echo, channel)

    on_both_loops(test)


def test_a_replica_that_is_not_there_or_is_an_impostor_is_no_channel() -> None:
    async def test() -> None:
        with pytest.raises(ChannelLost):
            await Channel.connect(bytes(32), unix="gateway-nobody")
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            with pytest.raises(ChannelLost):
                await Channel.connect(bytes(32), host="127.0.0.1", port=taken.getsockname()[1])

        async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(frame(0, GREETING) + frame(1, bytes(32)))  # without the token
            await reader.read()
            writer.close()

        server = await asyncio.start_server(impostor, "127.0.0.1", 0)
        with pytest.raises(ChannelLost):
            await Channel.connect(bytes(32), host="127.0.0.1", port=server.sockets[0].getsockname()[1])
        server.close()

    on_both_loops(test)
