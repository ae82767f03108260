"""What all connections together can make a gateway hold: `server.limits.memory_bytes`, whatever they send."""

import contextlib
import http.client
import socket
from collections.abc import Iterator

import pytest

from tests.hostile.bench import Address, Bench, attacked
from tests.hostile.test_grpc import DATA, END_HEADERS, HEADERS, block, connected, frame

pytestmark = pytest.mark.slow

MIB = 1 << 20
BODY_BYTES = 8 * MIB
MEMORY_BYTES = 48 * MIB
MOST_MORE_BYTES = MEMORY_BYTES + 40 * MIB  # with what threads, pools and eighty connections take
SERVER = f"server: {{limits: {{body_bytes: {BODY_BYTES}, memory_bytes: {MEMORY_BYTES}}}}}\n"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with attacked(tmp_path_factory.mktemp("hostile"), SERVER) as bench:
        yield bench


def large(megabytes: int) -> tuple[bytes, int]:
    """A request with a tensor of so many MiB, and how much of it is JSON."""
    size = megabytes * MIB
    tensor = b'{"name":"INPUT0","datatype":"FP32","shape":[1,%d],"parameters":{"binary_data_size":%d}}' % (size // 4, size)
    said = b'{"inputs":[%b],"parameters":{"binary_data_output":true}}' % tensor
    return said + bytes(size), len(said)


def infer(address: Address, megabytes: int) -> http.client.HTTPResponse:
    body, said = large(megabytes)
    connection = http.client.HTTPConnection(*address, timeout=60)
    connection.request("POST", "/v2/models/wide/infer", body, {"Inference-Header-Content-Length": str(said)})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer


def said(talking: socket.socket) -> bytes:
    """All that has come."""
    talking.settimeout(0.01)
    came = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        while data := talking.recv(4096):
            came += data
    return came


def test_many_bodies_that_never_end(bench: Bench) -> None:
    head = b"POST /v2/models/wide/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % BODY_BYTES

    def attack(http: Address, rpc: Address) -> None:
        with contextlib.ExitStack() as closing:
            hogs = [closing.enter_context(socket.create_connection(http, timeout=30)) for _ in range(60)]
            for hog in hogs:
                with contextlib.suppress(ConnectionError):
                    hog.sendall(head + bytes(6 * MIB))
            assert infer(http, 4).status == 200, "a request that asks for less than one of them"
            told = []
            for hog in hogs:
                hog.settimeout(0.01)
                with contextlib.suppress(TimeoutError, ConnectionError):
                    told.append(hog.recv(4096))
            told = [each for each in told if each]
            assert len(told) >= 60 - MEMORY_BYTES // (6 * MIB)
            assert all(b" 503 " in each and b"\r\nRetry-After: 1\r\n" in each for each in told)

    bench.withstands(attack, MOST_MORE_BYTES)


def test_many_messages_that_never_end(bench: Bench) -> None:
    piece = frame(DATA, 0, 1, bytes(1 << 15))
    begin = frame(HEADERS, END_HEADERS, 1, block()) + frame(DATA, 0, 1, b"\0" + (6 * MIB).to_bytes(4))

    def attack(http: Address, rpc: Address) -> None:
        with contextlib.ExitStack() as closing:
            hogs = [closing.enter_context(connected(rpc)) for _ in range(20)]
            for hog in hogs:
                with contextlib.suppress(ConnectionError):
                    hog.sendall(begin + piece * (5 * MIB // (1 << 15)))
            assert infer(http, 4).status == 200
            told = [said(hog) for hog in hogs]
            assert sum(b"memory_bytes" in each and b"retry-after" in each for each in told) >= 10

    bench.withstands(attack, MOST_MORE_BYTES)


def test_answers_that_nobody_takes(bench: Bench) -> None:
    body, said = large(4)
    head = b"POST /v2/models/wide/infer HTTP/1.1\r\nHost: localhost\r\nInference-Header-Content-Length: %d\r\n" % said
    asked = head + b"Content-Length: %d\r\n\r\n" % len(body) + body

    def attack(http: Address, rpc: Address) -> None:
        with contextlib.ExitStack() as closing:
            for _ in range(60):
                reader = closing.enter_context(socket.socket())
                reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                reader.settimeout(30)
                reader.connect(http)
                with contextlib.suppress(ConnectionError):
                    reader.sendall(asked)
                    reader.recv(1)
            answer = infer(http, 4)
            assert answer.status == 200 or answer.headers["Retry-After"] == "1", "what was accepted is not given up for it"

    bench.withstands(attack, MOST_MORE_BYTES)
