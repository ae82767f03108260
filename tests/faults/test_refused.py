"""Requests that no model gets are counted as others are, by the code of the answer, and the log tells of them.

And what is counted stands at 0 before: a rate sees no step from nothing.
"""

import contextlib
import gzip
import http.client
import logging
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from gateway.ingress import Ports
from gateway.wire.http2_frames import END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame
from gateway.wire.http2_headers import header_block
from tests.faults.hosted import hosted
from tests.grpc_server.odd_bytes import FIELDS

Ask = Callable[[service_pb2_grpc.GRPCInferenceServiceStub, int], None]

TIMEOUT_S = 20.0
MIB = 1 << 20
MODEL = {"backends": [{"kind": "synthetic", "fixed_ms": 0, "row_ms": 0}]}
CONFIG = {
    "server": {
        "http_port": 0,
        "grpc_port": 0,
        "limits": {"body_bytes": MIB, "memory_bytes": 4 * MIB, "body_timeout_s": 0.4, "header_bytes": 4096, "connections": 20},
    },
    "models": [{"name": "one", **MODEL}, {"name": "two", "slo": {"p99_ms": 100}, **MODEL}],
}
INFER = b"POST /v2/models/one/infer HTTP/1.1\r\nHost: localhost\r\n"
INVOKE = b"POST /invocations HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
NO_BODY = b"Content-Length: 2\r\n\r\n{}"
OF_REST = {
    "a body that is too long": (INFER + b"Content-Length: 2000000\r\n\r\n", 413, "too_large"),
    "one that inflates to too much": (
        INFER + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b" % (len(long := gzip.compress(bytes(2 * MIB))), long),
        413,
        "too_large",
    ),
    "one that does not end": (INFER + b"Content-Length: 100\r\n\r\n{", 408, "deadline_exceeded"),
    "an unknown coding": (INFER + b"Content-Encoding: br\r\nContent-Length: 2\r\n\r\n{}", 501, "unsupported"),
    "what is no gzip": (INFER + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", 400, "invalid_argument"),
    "broken chunks": (INFER + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "invalid_argument"),
    "a head that is too long": (INFER + b"A: " + b"a" * 8000 + b"\r\n\r\n", 431, "too_large"),
    "an expectation": (INFER + b"Expect: this\r\n\r\n", 417, "unsupported"),
    "no model named, of two": (INVOKE + b"\r\n{}", 400, "invalid_argument"),
    "an unknown form": (
        INVOKE + b"X-Amzn-SageMaker-Target-Model: one\r\nContent-Type: a/b\r\n\r\n{}", 415, "unsupported_media_type",
    ),
    "a version that is no number": (INFER.replace(b"/infer", b"/versions/x/infer") + NO_BODY, 404, "not_found"),
    "what another page sends": (INFER + b"Sec-Fetch-Site: cross-site\r\n" + NO_BODY, 403, "forbidden"),
    "a name that is not the server's": (INFER.replace(b"localhost", b"evil.example") + NO_BODY, 421, "forbidden"),
    "a name that is no UTF-8": (INFER.replace(b"one", b"%ff") + NO_BODY, 400, "invalid_argument"),
}  # fmt: skip


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    with hosted(CONFIG, tmp_path_factory.mktemp("run")) as (_, ports, _):
        yield ports


def scraped(ports: Ports, by: http.client.HTTPConnection | None = None) -> str:
    connection = by or http.client.HTTPConnection("127.0.0.1", ports.http or 0, timeout=TIMEOUT_S)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    if by is None:
        connection.close()
    return text


def counted(ports: Ports, protocol: str, by: http.client.HTTPConnection | None = None) -> Counter[str]:
    """Requests that named no model, by code."""
    of = rf'^gateway_requests_total{{code="(\w+)",model="",protocol="{protocol}",version=""}} (\d+)'
    return Counter({code: int(number) for code, number in re.findall(of, scraped(ports, by), re.MULTILINE)})


def test_a_model_stands_at_0_for_both_protocols_before_it_is_asked(ports: Ports) -> None:
    of = r'^gateway_(requests|slo_requests)_total{.*model="two",protocol="(\w+)".*} 0$'
    assert Counter(re.findall(of, scraped(ports), re.MULTILINE)) == {
        (name, protocol): values for protocol in ("rest", "grpc") for name, values in (("requests", 4), ("slo_requests", 2))
    }


@contextlib.contextmanager
def sent(ports: Ports, data: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", ports.http or 0), timeout=TIMEOUT_S) as connection:
        with contextlib.suppress(ConnectionError):  # it may be refused before its end
            connection.sendall(data)
        yield connection


@pytest.mark.parametrize("what", OF_REST)
def test_what_a_rest_client_is_refused_is_counted(ports: Ports, what: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gateway.engine.failed_requests")
    data, status, code = OF_REST[what]
    before = counted(ports, "rest")
    with sent(ports, data) as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 %d " % status)
    assert counted(ports, "rest") - before == {code: 1}
    assert f"over rest: {code} after" in caplog.text


def test_bodies_that_find_no_memory_are_counted_as_overloaded(ports: Ports) -> None:
    before = counted(ports, "rest")
    part = INFER + b"Content-Length: %d\r\n\r\n" % MIB + bytes(MIB - 1000)
    with contextlib.ExitStack() as stack:
        all_of_them = [stack.enter_context(sent(ports, part)) for _ in range(8)]
        told = Counter(connection.recv(13) for connection in all_of_them)
    assert set(told) <= {b"HTTP/1.1 503 ", b"HTTP/1.1 408 "}
    assert told[b"HTTP/1.1 503 "] > 0
    more = counted(ports, "rest") - before
    assert more == {"overloaded": told[b"HTTP/1.1 503 "], "deadline_exceeded": told[b"HTTP/1.1 408 "]}


def long_request(size: int) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(model_name="one", raw_input_contents=[bytes(size)])


def alone(stub: service_pb2_grpc.GRPCInferenceServiceStub, size: int) -> None:
    stub.ModelInfer(long_request(size), timeout=TIMEOUT_S)


def in_a_stream(stub: service_pb2_grpc.GRPCInferenceServiceStub, size: int) -> None:
    list(stub.ModelStreamInfer(iter([long_request(size)]), timeout=TIMEOUT_S))


@pytest.mark.parametrize("ask", [alone, in_a_stream])
def test_a_grpc_message_that_is_too_long_is_counted(ports: Ports, ask: Ask, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gateway.engine.failed_requests")
    before = counted(ports, "grpc")
    with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel, pytest.raises(grpc.RpcError):
        ask(service_pb2_grpc.GRPCInferenceServiceStub(channel), 2 * MIB)
    assert counted(ports, "grpc") - before == {"too_large": 1}
    assert "over grpc: too_large after" in caplog.text


@pytest.mark.parametrize("ask", [alone, in_a_stream])
def test_grpc_messages_that_find_no_memory_are_counted_as_overloaded(ports: Ports, ask: Ask) -> None:
    before = counted(ports, "grpc")
    part = INFER + b"Content-Length: %d\r\n\r\n" % MIB + bytes(600_000)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(sent(ports, part))  # of which each holds less than the message would
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{ports.grpc}"))
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            ask(stub, MIB - 1000)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert counted(ports, "grpc") - before == {"overloaded": 1}


def test_a_call_whose_deadline_had_passed_is_counted(ports: Ports) -> None:
    before = counted(ports, "grpc")
    block = header_block(*FIELDS, (b"grpc-timeout", b"0S"))
    data = PREFACE + frame(SETTINGS, 0, 0, b"") + frame(HEADERS, END_HEADERS | END_STREAM, 1, block)
    with socket.create_connection(("127.0.0.1", ports.grpc or 0), timeout=TIMEOUT_S) as connection:
        connection.sendall(data)
        answer = b""
        while b"had passed when it came" not in answer:
            answer += connection.recv(4096)
    assert counted(ports, "grpc") - before == {"deadline_exceeded": 1}


def of_call(number: int, *fields: tuple[bytes, bytes]) -> bytes:
    return frame(HEADERS, END_HEADERS, number, header_block(*FIELDS, *fields))


OF_GRPC = {
    "metadata that is too long": (of_call(1, (b"a", b"a" * 5000)), b"metadata of more than 4096 bytes", "too_large"),
    "a field with an illegal name": (of_call(1, (b"A", b"a")), b"illegal header name", "invalid_argument"),
}


@pytest.mark.parametrize("what", OF_GRPC)
def test_what_a_grpc_connection_refuses_is_counted(ports: Ports, what: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gateway.engine.failed_requests")
    data, told, code = OF_GRPC[what]
    before = counted(ports, "grpc")
    with socket.create_connection(("127.0.0.1", ports.grpc or 0), timeout=TIMEOUT_S) as connection:
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + data)
        answer = b""
        while told not in answer:
            answer += connection.recv(4096)
    assert counted(ports, "grpc") - before == {code: 1}
    assert f"over grpc: {code} after" in caplog.text


@pytest.mark.parametrize("protocol", ["rest", "grpc"])
def test_connections_beyond_their_limit_are_counted(ports: Ports, protocol: str) -> None:
    port = (ports.http if protocol == "rest" else ports.grpc) or 0
    beyond = 260 if protocol == "rest" else 10  # of which REST tells 256 why
    before = counted(ports, protocol)
    with contextlib.ExitStack() as stack:
        scraper = stack.enter_context(contextlib.closing(http.client.HTTPConnection("127.0.0.1", ports.http or 0)))
        scraped(ports, scraper)
        for _ in range(20 + beyond):
            last = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S))
        with contextlib.suppress(ConnectionError):
            while last.recv(4096):
                pass
        more = counted(ports, protocol, scraper) - before
    assert set(more) == {"overloaded"}
    assert beyond <= more["overloaded"] <= beyond + 5  # the scraper's, and what others have not closed yet
