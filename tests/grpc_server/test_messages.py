"""How messages are cut from the bytes of a call."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.edges.grpc_call import GrpcCall
from gateway.errors import GatewayError
from gateway.wire.http2_headers import Headers
from gateway.wire.http2_receiver import NOBODY, Receiver
from gateway.wire.tensors import Buffer


class Silent:
    """A stream that says nothing."""

    headers: Headers = {}  # noqa: RUF012  # never written to
    receiver: Receiver = NOBODY
    backlog = False

    def send_headers(self, block: bytes, *, end: bool = False) -> None: ...

    def send_data(self, data: bytes) -> None: ...

    def try_send_whole(self, block: bytes, data: bytes, trailers: bytes) -> bool:
        return False

    def send_parts(self, parts: list[Buffer]) -> None: ...

    def finish(self, trailers: bytes) -> None: ...

    def credit(self, size: int) -> None: ...

    def reserve(self, size: int, again: Callable[[], None]) -> bool:
        return True

    def settle(self, reserved: int, size: int) -> bool:
        return True

    def give_back(self, size: int) -> None: ...


class Told:
    """Keeps what it is told. one_at_a_time: it holds the call behind each message."""

    def __init__(self, call: GrpcCall, *, one_at_a_time: bool) -> None:
        self._call = call
        self._one_at_a_time = one_at_a_time
        self.messages: list[bytes] = []
        self.sizes: list[int] = []
        self.ended = False

    def message(self, data: Buffer, size: int) -> None:
        self.messages.append(bytes(data))
        self.sizes.append(size)
        if self._one_at_a_time:
            self._call.hold()

    def end(self) -> None:
        self.ended = True

    def cancel(self) -> None: ...

    def drained(self) -> None: ...

    def leave(self, error: GatewayError) -> None: ...


@settings(max_examples=150)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 300), st.integers(60_000, 300_000)), max_size=5),
    pieces=st.lists(st.one_of(st.integers(1, 20), st.integers(1000, 16_384), st.just(100_000)), min_size=1, max_size=10),
    one_at_a_time=st.booleans(),
)
def test_messages_come_out_as_they_went_in_however_they_are_cut(
    lengths: list[int], pieces: list[int], one_at_a_time: bool
) -> None:
    sent = [bytes([65 + number]) * length for number, length in enumerate(lengths)]
    wire = b"".join(b"\0" + len(message).to_bytes(4) + message for message in sent)
    call = GrpcCall(Silent(), 1 << 20)
    told = Told(call, one_at_a_time=one_at_a_time)
    call.listen(told)
    at = turn = 0
    while at < len(wire):
        piece = wire[at : at + pieces[turn % len(pieces)] * (1 + turn // 50)]  # no more turns than needed
        at += len(piece)
        turn += 1
        call.take(piece, at == len(wire))
        call.go_on()
    for _ in sent:
        call.go_on()
    assert told.messages == sent
    assert told.sizes == [len(message) + 5 for message in sent]
    assert told.ended or not sent
