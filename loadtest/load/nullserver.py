"""A server that does nothing, as fast as it can: it answers every inference with the same prepared bytes.

`selfcheck` finds the generator's own limit with it, and benchmarks the tools' own cost (as LoadGen's null system under test).
It speaks enough of the Open Inference Protocol v2 for the generator: metadata, statistics (none), infer, over REST and gRPC.
Requests are not parsed but counted by the length that their first one had, because clients of a null server repeat themselves.
"""

import asyncio
import ssl
import sys
from collections.abc import Callable, Sequence
from typing import Final

import uvloop
from tritonclient.grpc import service_pb2

from gateway.wire.http2 import Connection
from gateway.wire.http2_frames import (
    DATA,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MOST_WINDOW,
    PREFACE,
    Broken,
    frame,
    settings,
    window_update,
)
from gateway.wire.http2_headers import header_block
from gateway.wire.http2_sending import Stream

MODEL: Final = "null"

_METADATA: Final = (
    b'{"name":"null","versions":["1"],"platform":"null",'
    b'"inputs":[{"name":"x","datatype":"FP32","shape":[-1,16]}],"outputs":[{"name":"y","datatype":"FP32","shape":[-1,4]}]}'
)
_ANSWER: Final = (
    b'{"model_name":"null","model_version":"1",'
    b'"outputs":[{"name":"y","datatype":"FP32","shape":[1,4],"data":[0.0,0.0,0.0,0.0]}]}'
)


def _http(status: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


_INFER_RESPONSE: Final = _http(b"200 OK", _ANSWER)
_METADATA_RESPONSE: Final = _http(b"200 OK", _METADATA)
_NOT_FOUND: Final = _http(b"404 Not Found", b'{"error":"the null server has no statistics"}')


class _NullHttp(asyncio.Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # TCP gives no other
        self._transport = transport
        self._missing = 0

    def data_received(self, data: bytes) -> None:
        # The generator never pipelines: what arrives is one request or a part of it.
        if self._missing:
            self._missing -= len(data)
        elif data.startswith(b"POST"):
            head = data.find(b"\r\n\r\n") + 4
            at = data.find(b"Content-Length: ") + 16
            self._missing = int(data[at : data.find(b"\r", at)]) - (len(data) - head)
        else:
            self._transport.write(_METADATA_RESPONSE if data.startswith(b"GET /v2/models/null HTTP") else _NOT_FOUND)
            return
        if self._missing <= 0:
            self._missing = 0
            self._transport.write(_INFER_RESPONSE)


async def start_http(tls: ssl.SSLContext | None = None) -> asyncio.Server:
    """Listen on a free port of 127.0.0.1."""
    return await asyncio.get_running_loop().create_server(_NullHttp, "127.0.0.1", 0, ssl=tls)


async def start_grpc(tls: ssl.SSLContext | None = None) -> asyncio.Server:
    """Listen on a free port of 127.0.0.1."""
    infer = service_pb2.ModelInferResponse(model_name=MODEL, model_version="1")
    infer.outputs.add(name="y", datatype="FP32", shape=[1, 4])
    infer.raw_output_contents.append(bytes(16))
    metadata = service_pb2.ModelMetadataResponse(name=MODEL, versions=["1"], platform="null")
    metadata.inputs.add(name="x", datatype="FP32", shape=[-1, 16])
    metadata.outputs.add(name="y", datatype="FP32", shape=[-1, 4])
    answers = {b"": infer.SerializeToString(), b"ModelMetadata": metadata.SerializeToString()}
    return await asyncio.get_running_loop().create_server(lambda: _NullGrpc(answers), "127.0.0.1", 0, ssl=tls)


class _NullGrpc(asyncio.Protocol):
    def __init__(self, answers: dict[bytes, bytes]) -> None:
        self._core = _NullHttp2(answers, lambda: None)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # TCP gives no other
        self._transport = transport
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._core.receive(data)
        self._flush()

    def _flush(self) -> None:
        if out := self._core.take():
            self._transport.write(b"".join(out))
        if self._core.aborted:
            self._transport.abort()


class _NullHttp2(Connection):
    """Tells methods apart by their literal name in the header block (C-core's first call on a connection has it so)."""

    _HEAD: Final = header_block((b"content-type", b"application/grpc"), status=200)
    _TAIL: Final = header_block((b"grpc-status", b"0"))
    _UNIMPLEMENTED: Final = header_block((b"content-type", b"application/grpc"), (b"grpc-status", b"12"), status=200)
    _OPENING: Final = settings({HEADER_TABLE_SIZE: 0, INITIAL_WINDOW_SIZE: MOST_WINDOW})

    def __init__(self, answers: dict[bytes, bytes], wake: Callable[[], None]) -> None:
        super().__init__(wake, expected=PREFACE, header_bytes=1 << 20)
        self._answers = {name: b"\0" + len(answer).to_bytes(4, "big") + answer for name, answer in answers.items()}
        self._named: dict[int, bytes] = {}  # streams of other methods than infer
        self._received = 0
        self.out += (self._OPENING, window_update(0, MOST_WINDOW - DEFAULT_WINDOW))

    def _on_block(self, number: int, block: bytes, ended: bool) -> None:
        for method in (b"ModelMetadata", b"ModelStatistics", b"RepositoryIndex"):
            if method in block:
                self._named[number] = method

    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        self._received += len(payload)
        if flags & END_STREAM:
            self._answer(number)

    def _answer(self, stream: int) -> None:
        message = self._answers.get(self._named.pop(stream, b""))
        if message is None:
            self.write(frame(HEADERS, END_HEADERS | END_STREAM, stream, self._UNIMPLEMENTED))
            return
        self.write(
            frame(HEADERS, END_HEADERS, stream, self._HEAD)
            + frame(DATA, 0, stream, message)
            + frame(HEADERS, END_HEADERS | END_STREAM, stream, self._TAIL)
        )
        if self._received > MOST_WINDOW // 2:
            self.write(window_update(0, self._received))
            self._received = 0

    def _on_broken(self, fault: Broken) -> None:
        self.aborted = True

    def sent_all(self, stream: Stream) -> None: ...

    def forget(self, stream: Stream) -> None: ...


async def _serve(files: Sequence[str]) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH) if files else None
    if tls is not None:
        tls.load_cert_chain(*files)
        tls.set_alpn_protocols(["h2", "http/1.1"])
    http = await start_http(tls=tls)
    grpc = await start_grpc(tls=tls)
    print(http.sockets[0].getsockname()[1], grpc.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # the end of standard input is the end of the server
    http.close()
    grpc.close()


def main(argv: Sequence[str]) -> None:
    """Print "HTTP_PORT GRPC_PORT" and serve until standard input ends. argv: a certificate and its key, to speak TLS by."""
    uvloop.run(_serve(argv))


if __name__ == "__main__":
    main(sys.argv[1:])
