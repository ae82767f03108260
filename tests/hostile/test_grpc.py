"""What clients can do to others over gRPC, within the default limits."""

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.hostile.bench import Address, Bench, attacked
from tests.varint import varint

pytestmark = pytest.mark.slow

MIB = 1 << 20
INFER = "/inference.GRPCInferenceService/ModelInfer"
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets

# RFC 9113: frame types, flags, settings
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS = 1, 4
INITIAL_WINDOW_SIZE = 4
ANSWERS = (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with attacked(tmp_path_factory.mktemp("hostile")) as bench:
        yield bench


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def setting(key: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, struct.pack(">HI", key, value))


def block(path: str = INFER, **more: str) -> bytes:
    """A header block whose fields are all literal (RFC 7541, section 6.2.2)."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
    fields |= {"content-type": "application/grpc", **{name.replace("_", "-"): value for name, value in more.items()}}
    texts = (text.encode() for each in fields.items() for text in each)
    return b"".join((b"" if index % 2 else b"\0") + bytes([len(text)]) + text for index, text in enumerate(texts))


def message(data: bytes, flag: int = 0) -> bytes:
    return bytes([flag]) + struct.pack(">I", len(data)) + data


def request(count: int = 4) -> bytes:
    asked = pb.ModelInferRequest(model_name="wide", raw_input_contents=[bytes(4 * count)])
    asked.inputs.add(name="INPUT0", datatype="FP32", shape=[1, count])
    return asked.SerializeToString()


def call(stream: int, data: bytes, **headers: str) -> bytes:
    """The frames of a unary call. data: of one frame."""
    return frame(HEADERS, END_HEADERS, stream, block(**headers)) + frame(DATA, END_STREAM, stream, data)


@contextlib.contextmanager
def connected(address: Address, *, settings: bytes = b"") -> Iterator[socket.socket]:
    """A connection that has said its preface, and may be closed by the server at any time."""
    with socket.create_connection(address, timeout=30) as talking, contextlib.suppress(ConnectionError):
        talking.sendall(PREFACE + frame(SETTINGS, 0, 0) + settings)
        yield talking


def field(number: int, content: bytes) -> bytes:
    """A field of a protobuf message that has a length."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def tensor(datatype: str, count: int, contents: bytes = b"") -> bytes:
    """An input of a ModelInferRequest. contents: an InferTensorContents."""
    declared = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype=datatype, shape=[1, count])
    return field(5, declared.SerializeToString() + (field(5, contents) if contents else b""))


def classes(count: int) -> bytes:
    """An output that is asked for as so many of its best."""
    output = pb.ModelInferRequest.InferRequestedOutputTensor(name="OUTPUT0")
    output.parameters["classification"].int64_param = count
    return field(6, output.SerializeToString())


BOMBS: dict[str, Callable[[], bytes]] = {
    "inputs": lambda: field(1, b"wide") + b"\x2a\0" * (16 * MIB),
    "raw contents": lambda: field(1, b"wide") + b"\x3a\0" * (16 * MIB),
    "parameters": lambda: field(1, b"wide") + b"\x22\0" * (16 * MIB),
    "parameters of an input": lambda: field(1, b"wide") + field(5, b"\x22\0" * (8 * MIB)),
    "shape": lambda: field(1, b"wide") + field(5, field(3, b"\1" * (16 * MIB))),
    "numbers": lambda: field(1, b"wide") + tensor("FP32", 16, field(2, b"\1" * (16 * MIB))),
    "numbers, as many as said": lambda: field(1, b"wide") + tensor("FP32", 2 * MIB, field(6, bytes(8 * MIB))),
    "texts": lambda: field(1, b"text") + tensor("BYTES", 16, b"\x42\0" * (8 * MIB)),
    "raw texts": lambda: field(1, b"text") + tensor("BYTES", 8 * MIB) + field(7, bytes(32 * MIB)),
    "raw texts, as many as may be": lambda: field(1, b"text") + tensor("BYTES", MIB // 4) + field(7, bytes(MIB)),
    "numbers that are answered": lambda: field(1, b"wide") + tensor("FP32", 15 * MIB) + field(7, bytes(60 * MIB)),
    "texts that are answered": lambda: field(1, b"text") + tensor("BYTES", MIB // 4) + field(7, b"\4\0\0\0text" * (MIB // 4)),
    "classes": lambda: field(1, b"wide") + tensor("FP32", 4 * MIB) + classes(250_000) + field(7, bytes(16 * MIB)),
    "name": lambda: field(1, b"a" * (32 * MIB)),
    "noise": lambda: b"\xff" * (16 * MIB),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_message_bomb(bench: Bench, name: str) -> None:
    bomb = BOMBS[name]()

    def attack(http: Address, rpc: Address) -> None:
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        with grpc.insecure_channel(f"{rpc.host}:{rpc.port}", options=options) as channel:
            ask = channel.unary_unary(INFER)
            for _ in range(2):
                assert ask.future(bomb, timeout=60).code() in ANSWERS

    bench.withstands(attack)


def test_messages_of_a_thousand_times_their_bytes(bench: Bench) -> None:
    large = field(1, b"wide") + field(7, bytes(60 * MIB))

    def attack(http: Address, rpc: Address) -> None:
        options = [("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(f"{rpc.host}:{rpc.port}", options=options) as channel:
            ask = channel.unary_unary(INFER)
            asking = [ask.future(large, timeout=60, compression=grpc.Compression.Gzip) for _ in range(6)]
            for each in asking:
                assert each.code() is grpc.StatusCode.INVALID_ARGUMENT

    bench.withstands(attack)


@pytest.mark.parametrize(
    "flood",
    [
        setting(INITIAL_WINDOW_SIZE, 1 << 20) + setting(INITIAL_WINDOW_SIZE, 1 << 16),
        frame(PING, 0, 0, bytes(8)),
        frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)),
        frame(0xEE, 0, 0, b"unknown"),
    ],
    ids=["settings", "ping", "window", "unknown"],
)
def test_a_flood_of_small_frames(bench: Bench, flood: bytes) -> None:
    def attack(http: Address, rpc: Address) -> None:
        with connected(rpc) as talking:
            for _ in range(20):
                talking.sendall(flood * 1000)
                talking.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while talking.recv(1 << 20):
                        pass
                talking.settimeout(30)

    bench.withstands(attack)


def test_calls_that_are_reset_at_once(bench: Bench) -> None:
    def attack(http: Address, rpc: Address) -> None:
        with connected(rpc) as talking:
            for stream in range(1, 20_001, 2):
                talking.sendall(call(stream, message(request())) + frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))

    bench.withstands(attack)


def test_calls_that_never_say_what_they_ask(bench: Bench) -> None:
    def attack(http: Address, rpc: Address) -> None:
        with contextlib.ExitStack() as closing:
            for _ in range(20):
                talking = closing.enter_context(connected(rpc))
                for stream in range(1, 401, 2):
                    talking.sendall(frame(HEADERS, END_HEADERS, stream, block()) + frame(DATA, 0, stream, b"\0\0\0\1\0ab"))

    bench.withstands(attack)


def test_calls_whose_answers_nobody_takes(bench: Bench) -> None:
    data = message(request(2000))

    def attack(http: Address, rpc: Address) -> None:
        with contextlib.ExitStack() as closing:
            for _ in range(20):
                talking = closing.enter_context(connected(rpc, settings=setting(INITIAL_WINDOW_SIZE, 0)))
                for stream in range(1, 101, 2):
                    talking.sendall(call(stream, data))

    bench.withstands(attack)


def test_header_blocks_that_never_end(bench: Bench) -> None:
    def attack(http: Address, rpc: Address) -> None:
        for _ in range(20):
            with connected(rpc) as talking:
                talking.sendall(frame(HEADERS, 0, 1, block()))
                for _ in range(500):
                    talking.sendall(frame(CONTINUATION, 0, 1, b"\0\1a\1b" * 100))

    bench.withstands(attack)


def test_clients_that_leave_in_the_middle(bench: Bench) -> None:
    data = call(1, message(request(2000)))

    def attack(http: Address, rpc: Address) -> None:
        for sent in [1, 20, 500, len(data) // 2, len(data)] * 60:
            with connected(rpc) as talking:
                talking.sendall(data[:sent])
                talking.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        for _ in range(100):
            with connected(rpc) as talking:
                talking.sendall(data)
                talking.shutdown(socket.SHUT_WR)
                while talking.recv(1 << 16):
                    pass

    bench.withstands(attack)


def test_slow_writers_and_a_flood_of_connections(bench: Bench) -> None:
    data = PREFACE + frame(SETTINGS, 0, 0) + call(1, message(request()))

    def attack(http: Address, rpc: Address) -> None:
        with contextlib.ExitStack() as closing:
            writers = [closing.enter_context(socket.create_connection(rpc)) for _ in range(200)]
            for at in range(len(data) - 1):
                for writer in writers:
                    writer.sendall(data[at : at + 1])
        for _ in range(1000):
            socket.create_connection(rpc).close()

    bench.withstands(attack)


def test_noise(bench: Bench) -> None:
    def attack(http: Address, rpc: Address) -> None:
        for noise in [bytes(1000), b"\xff" * 300_000, b"GET / HTTP/1.1\r\n\r\n" * 100, PREFACE + b"\xff" * 300_000] * 25:
            with socket.create_connection(rpc) as talking, contextlib.suppress(ConnectionError):
                talking.sendall(noise)
                while talking.recv(1 << 16):
                    pass

    bench.withstands(attack)
