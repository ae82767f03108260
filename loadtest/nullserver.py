"""A server that does nothing, as fast as it can: it answers every inference with the same prepared bytes.

`selfcheck` finds the generator's own limit with it, and benchmarks the tools' own cost (as LoadGen's null system under test).
It speaks enough of the Open Inference Protocol v2 for the generator: metadata, statistics (none), infer, over REST and gRPC.
Requests are not parsed but counted by the length that their first one had, because clients of a null server repeat themselves.
"""

import asyncio
import sys
from collections.abc import Sequence
from typing import Final

import grpc
import uvloop
from tritonclient.grpc import service_pb2

from loadtest.grpc_client import INFER

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


class _Connection(asyncio.Protocol):
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


async def start_http(port: int = 0) -> asyncio.Server:
    """Listen on 127.0.0.1; port 0 is any free one."""
    return await asyncio.get_running_loop().create_server(_Connection, "127.0.0.1", port)


async def start_grpc(port: int = 0) -> tuple[grpc.aio.Server, int]:
    """Listen on 127.0.0.1 and say on which port."""
    answer = service_pb2.ModelInferResponse(model_name=MODEL, model_version="1")
    answer.outputs.add(name="y", datatype="FP32", shape=[1, 4])
    answer.raw_output_contents.append(bytes(16))
    metadata = service_pb2.ModelMetadataResponse(name=MODEL, versions=["1"], platform="null")
    metadata.inputs.add(name="x", datatype="FP32", shape=[-1, 16])
    metadata.outputs.add(name="y", datatype="FP32", shape=[-1, 4])
    service, method = INFER[1:].split("/")
    server = grpc.aio.server()
    handlers = {method: _constant(answer.SerializeToString()), "ModelMetadata": _constant(metadata.SerializeToString())}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, bound


def _constant(answer: bytes) -> "grpc.RpcMethodHandler[bytes, bytes]":
    async def answer_it(request: bytes, context: object) -> bytes:
        return answer

    return grpc.unary_unary_rpc_method_handler(answer_it)


async def _serve() -> None:
    http = await start_http()
    server, grpc_port = await start_grpc()
    print(http.sockets[0].getsockname()[1], grpc_port, flush=True)
    await asyncio.to_thread(sys.stdin.read)  # the end of standard input is the end of the server
    http.close()
    await server.stop(None)


def main(argv: Sequence[str]) -> None:
    """Print "HTTP_PORT GRPC_PORT" and serve until standard input ends."""
    uvloop.run(_serve())


if __name__ == "__main__":
    main(sys.argv[1:])
