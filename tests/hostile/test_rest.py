"""What clients can do to others over REST, within the default limits."""

import contextlib
import gzip
import http.client
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.hostile.bench import Address, Bench, attacked

pytestmark = pytest.mark.slow

INFER = "/v2/models/wide/infer"
MIB = 1 << 20


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with attacked(tmp_path_factory.mktemp("hostile")) as bench:
        yield bench


def post(address: Address, body: bytes, path: str = INFER, **headers: str) -> int:
    """The status of the answer."""
    connection = http.client.HTTPConnection(*address, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        answer.read()
        return answer.status


def head(body_bytes: int, path: str = INFER) -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path.encode(), body_bytes)


def infer(data: bytes, shape: str = "1,16") -> bytes:
    return b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[%b],"data":%b}]}' % (shape.encode(), data)


def filled(begin: bytes, element: bytes, end: bytes, size: int = 16 * MIB) -> bytes:
    return begin + b",".join([element] * (size // (len(element) + 1))) + end


BOMBS: dict[str, Callable[[], bytes]] = {
    "lists of one": lambda: infer(filled(b"[", b"[1]", b"]", 32 * MIB)),
    "numbers": lambda: infer(filled(b"[", b"1", b"]")),
    "numbers, as many as said": lambda: infer(filled(b"[", b"1", b"]", 8 * MIB), f"1,{4 * MIB}"),
    "NaN": lambda: infer(filled(b"[", b"NaN", b"]")),
    "text": lambda: infer(filled(b"[", b'""', b"]")),
    "depth": lambda: infer(b"[" * (16 * MIB)),
    "unknown": lambda: filled(b'{"x":[', b"[1]", b"]}"),
    "equal keys": lambda: filled(b"{", b'"id":"a"', b"}"),
    "parameters": lambda: b'{"parameters":{%b}}' % b",".join(b'"%x":1' % key for key in range(1_000_000)),
    "outputs": lambda: filled(b'{"outputs":[', b'{"name":"y"}', b"]}"),
    "inputs": lambda: filled(b'{"inputs":[', b'{"name":"x","datatype":"FP32","shape":[]}', b"]}"),
    "sizes": lambda: infer(b"[1]", "1," * (4 * MIB) + "1"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_json_bomb(bench: Bench, name: str) -> None:
    body = BOMBS[name]()

    def attack(http: Address, grpc: Address) -> None:
        for path in (INFER, "/v2/models/wide/generate", "/v2/repository/index"):
            assert post(http, body, path) in (200, 400, 413)

    bench.withstands(attack)


def test_a_body_of_a_thousand_times_its_bytes(bench: Bench) -> None:
    packed = gzip.compress(b" " * (63 * MIB) + infer(b"[1]"))

    def attack(http: Address, grpc: Address) -> None:
        for _ in range(4):
            assert post(http, packed, Content_Encoding="gzip") == 400
        assert post(http, gzip.compress(b" " * (65 * MIB)), Content_Encoding="gzip") == 413

    bench.withstands(attack)


def test_many_long_bodies_at_once(bench: Bench) -> None:
    body = infer(filled(b"[", b"[1]", b"]", 16 * MIB))

    def attack(http: Address, grpc: Address) -> None:
        asking = [threading.Thread(target=post, args=(http, body)) for _ in range(8)]
        for each in asking:
            each.start()
        for each in asking:
            each.join()

    bench.withstands(attack)


def test_clients_that_leave_in_the_middle_of_their_bodies(bench: Bench) -> None:
    body = infer(filled(b"[", b"[1]", b"]", MIB))
    reset = struct.pack("ii", 1, 0)

    def attack(http: Address, grpc: Address) -> None:
        for sent in [10, 1000, len(body) // 2, len(body)] * 50:
            with socket.create_connection(http) as leaving:
                leaving.sendall(head(len(body)) + body[:sent])
                leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)

    bench.withstands(attack)


def test_half_closed_connections(bench: Bench) -> None:
    body = infer(b"[1, 2]", "1,2")

    def attack(http: Address, grpc: Address) -> None:
        for _ in range(300):
            with socket.create_connection(http) as half:
                half.sendall(head(len(body)) + body)
                half.shutdown(socket.SHUT_WR)
                while half.recv(1 << 16):
                    pass

    bench.withstands(attack)


def test_slow_writers(bench: Bench) -> None:
    request = head(16)

    def attack(http: Address, grpc: Address) -> None:
        with contextlib.ExitStack() as closing:
            writers = [closing.enter_context(socket.create_connection(http)) for _ in range(200)]
            for at in range(len(request)):
                for writer in writers:
                    writer.sendall(request[at : at + 1])

    bench.withstands(attack)


def test_slow_readers(bench: Bench) -> None:
    data = json.dumps(
        {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 20_000], "data": [0.5] * 20_000}]}
    ).encode()

    def attack(http: Address, grpc: Address) -> None:
        with contextlib.ExitStack() as closing:
            for _ in range(40):
                reader = closing.enter_context(socket.socket())
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                reader.connect(http)
                for _ in range(3):
                    reader.sendall(head(len(data)) + data)
                assert reader.recv(1)

    bench.withstands(attack)


def test_a_flood_of_connections(bench: Bench) -> None:
    def attack(http: Address, grpc: Address) -> None:
        with contextlib.ExitStack() as closing:
            for _ in range(800):
                closing.enter_context(socket.create_connection(http))
        for _ in range(2000):
            socket.create_connection(http).close()

    bench.withstands(attack)


def test_requests_without_a_pause(bench: Bench) -> None:
    body = infer(b"[1, 2]", "1,2")
    many = (head(len(body)) + body) * 2000

    def attack(http: Address, grpc: Address) -> None:
        with socket.create_connection(http) as asking:
            sending = threading.Thread(target=asking.sendall, args=(many,))
            sending.start()
            answered = b""
            count = 0
            while count < 2000:
                answered += asking.recv(1 << 20)
                count += answered.count(b"HTTP/1.1 200")
                answered = answered[-11:]
            sending.join()

    bench.withstands(attack)


def test_noise(bench: Bench) -> None:
    def attack(http: Address, grpc: Address) -> None:
        for noise in [b"\x00" * 1000, b"\xff" * 300_000, b"GET " + b"/" * 300_000, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"] * 25:
            with socket.create_connection(http) as talking, contextlib.suppress(ConnectionError):
                talking.sendall(noise)
                while talking.recv(1 << 16):
                    pass

    bench.withstands(attack)


def test_gzip_of_many_members(bench: Bench) -> None:
    packed = gzip.compress(b" ") * (2 * MIB // len(gzip.compress(b" ")))

    def attack(http: Address, grpc: Address) -> None:
        for _ in range(2):
            assert post(http, packed, Content_Encoding="gzip") in (400, 413)

    bench.withstands(attack)


def test_pipelined_scrapes(bench: Bench) -> None:
    def attack(http: Address, grpc: Address) -> None:
        with socket.create_connection(http) as asking:
            asking.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3000)
            assert asking.recv(1)

    bench.withstands(attack)


def test_long_paths(bench: Bench) -> None:
    def attack(http: Address, grpc: Address) -> None:
        with socket.create_connection(http) as asking, asking.makefile("rb") as answers:
            for number in range(4095):
                asking.sendall(b"GET /v2/models/wide?%05d%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (number, b"a" * 30_000))
                asking.sendall(b"GET /v2/models/wide%05d%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (number, b"a" * 30_000))
                for _ in range(2):
                    length = 0
                    while (line := answers.readline()) != b"\r\n":
                        if line.lower().startswith(b"content-length:"):
                            length = int(line.split(b":")[1])
                    answers.read(length)

    bench.withstands(attack)


def test_inflated_bodies_behind_an_answer_that_nobody_takes(bench: Bench) -> None:
    """Each of 64 kB, and of 64 MB once it is inflated."""
    asked = infer(filled(b"[", b"0.5", b"]", 80_000), "1,20000")
    packed = gzip.compress(b" " * (63 * MIB) + infer(b"[1]"))
    one = head(len(packed)).replace(b"Host", b"Content-Encoding: gzip\r\nHost") + packed

    def attack(http: Address, grpc: Address) -> None:
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(http)
            for _ in range(20):
                reader.sendall(head(len(asked)) + asked)
            reader.settimeout(5)
            with contextlib.suppress(TimeoutError):
                for _ in range(10):
                    reader.sendall(one)

    bench.withstands(attack)


def test_long_answers_of_what_is_no_number_and_to_be_compressed(bench: Bench) -> None:
    raw = b"\x00\x00\xc0\x7f" * (4 * MIB)  # NaN
    said = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,%d],"parameters":{"binary_data_size":%d}}]}'
    body = (said % (4 * MIB, len(raw))) + raw
    size = str(len(body) - len(raw))

    def attack(http: Address, grpc: Address) -> None:
        for accepted in ("identity", "gzip"):
            assert post(http, body, Accept_Encoding=accepted, Inference_Header_Content_Length=size) == 200

    bench.withstands(attack)


def behind(json: bytes, raw: bytes) -> tuple[bytes, str]:
    """A body of JSON with tensors behind it, and how long the JSON is."""
    return json + raw, str(len(json))


@pytest.mark.parametrize("binary", [b"true", b"false"], ids=["binary", "JSON"])
def test_long_answers_of_text(bench: Bench, binary: bytes) -> None:
    raw = b"\4\0\0\0text" * (MIB // 4)
    said = b'{"inputs":[{"name":"INPUT0","datatype":"BYTES","shape":[1,%d],"parameters":{"binary_data_size":%d}}],'
    said += b'"parameters":{"binary_data_output":%b}}'
    body, size = behind(said % (MIB // 4, len(raw), binary), raw)

    def attack(http: Address, grpc: Address) -> None:
        for _ in range(2):
            assert post(http, body, "/v2/models/text/infer", Inference_Header_Content_Length=size) == 200

    bench.withstands(attack)


def test_one_long_text(bench: Bench) -> None:
    element = b"\x01\xc3\xa4" * (5 * MIB)
    raw = len(element).to_bytes(4, "little") + element
    said = b'{"inputs":[{"name":"INPUT0","datatype":"BYTES","shape":[1,1],"parameters":{"binary_data_size":%d}}]}' % len(raw)
    body, size = behind(said, raw)

    def attack(http: Address, grpc: Address) -> None:
        for accepted in ("identity", "gzip"):
            assert (
                post(http, body, "/v2/models/text/infer", Accept_Encoding=accepted, Inference_Header_Content_Length=size) == 200
            )

    bench.withstands(attack)


@pytest.mark.parametrize("classes", [2, 250_000])
def test_classes_of_long_answers(bench: Bench, classes: int) -> None:
    raw = bytes(16 * MIB)
    said = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,%d],"parameters":{"binary_data_size":%d}}],'
    said += b'"outputs":[{"name":"OUTPUT0","parameters":{"classification":%d}}]}'
    body, size = behind(said % (4 * MIB, len(raw), classes), raw)

    def attack(http: Address, grpc: Address) -> None:
        assert post(http, body, Inference_Header_Content_Length=size) == 200

    bench.withstands(attack)


def test_long_answers_to_generate(bench: Bench) -> None:
    numbers = b'{"INPUT0":%b}' % filled(b"[", b"0.5", b"]", 8 * MIB)
    texts = b'{"INPUT0":%b}' % filled(b"[", b'"text"', b"]", MIB)

    def attack(http: Address, grpc: Address) -> None:
        for verb in ("generate", "generate_stream"):
            assert post(http, numbers, f"/v2/models/wide/{verb}") == 200
            assert post(http, texts, f"/v2/models/text/{verb}") == 200

    bench.withstands(attack)
