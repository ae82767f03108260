"""SageMaker's front end, as far as its API and its documents tell of it: between the AWS SDK and a container.

It passes on the headers that SageMaker passes on and no others, answers with a ModelError where the container does not answer
with 200, and puts each piece of a streamed answer in an event of AWS's event streams.
"""

import contextlib
import http.client
import json
import struct
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

_OF: Final = "X-Amzn-SageMaker-"
_NAMES: Final = (
    "Custom-Attributes", "Target-Model", "Target-Variant", "Target-Container-Hostname", "Inference-Id", "Inference-Component",
    "Session-Id", "Prefix-Aware-Id", "Enable-Explanations",
)  # fmt: skip
_PASSED: Final = ("Content-Type", "Accept", *(_OF + name for name in _NAMES))
_BACK: Final = tuple(_OF + name for name in ("Custom-Attributes", "New-Session-Id", "Closed-Session-Id"))
_ARN: Final = "arn:aws:logs:us-east-1:0:log-group:/aws/sagemaker/Endpoints/none"


class _FrontEnd(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    container = ""

    def do_POST(self) -> None:
        streams = self.path.endswith("/invocations-response-stream")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        headers = {name: value for name in _PASSED if (value := self.headers.get(name)) is not None}
        if streams and (accept := self.headers.get(f"{_OF}Accept")) is not None:
            headers["Accept"] = accept
        with contextlib.closing(http.client.HTTPConnection(self.container, timeout=60)) as connection:
            connection.request("POST", "/invocations", body, headers)
            answer = connection.getresponse()
            if answer.status != 200:
                self._model_error(answer)
            elif streams:
                self._stream(answer)
            else:
                self._answer(200, answer.read(), dict(self._back(answer)) | {"Content-Type": answer.headers["Content-Type"]})

    def _back(self, answer: http.client.HTTPResponse) -> Iterator[tuple[str, str]]:
        yield "x-Amzn-Invoked-Production-Variant", "AllTraffic"
        for name in _BACK:
            if (value := answer.headers.get(name)) is not None:
                yield name, value

    def _model_error(self, answer: http.client.HTTPResponse) -> None:
        said = answer.read().decode()
        told = {"Message": f"Received error ({answer.status}) from primary", "OriginalStatusCode": answer.status}
        body = json.dumps(told | {"OriginalMessage": said, "LogStreamArn": _ARN}).encode()
        self._answer(424, body, {"Content-Type": "application/json", "x-amzn-ErrorType": "ModelError"})

    def _stream(self, answer: http.client.HTTPResponse) -> None:
        self.send_response(200)
        for name, value in self._back(answer):
            self.send_header(name, value)
        self.send_header("Content-Type", "application/vnd.amazon.eventstream")
        self.send_header(f"{_OF}Content-Type", answer.headers["Content-Type"])
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while piece := answer.read1(1 << 16):
            event = _event({":message-type": "event", ":event-type": "PayloadPart"}, piece)
            self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
        self.wfile.write(b"0\r\n\r\n")

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def _event(headers: dict[str, str], payload: bytes) -> bytes:
    """A message of AWS's event streams: lengths, their sum, headers, payload, the sum of all."""
    said = b"".join(
        struct.pack(">B", len(name)) + name.encode() + struct.pack(">BH", 7, len(value)) + value.encode()
        for name, value in headers.items()
    )
    begin = struct.pack(">II", 16 + len(said) + len(payload), len(said))
    begin += struct.pack(">I", zlib.crc32(begin))
    message = begin + said + payload
    return message + struct.pack(">I", zlib.crc32(message))


@contextlib.contextmanager
def before(container: str) -> Iterator[str]:
    """container: "host:port". Gives the address of the front end, as a URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Of", (_FrontEnd,), {"container": container}))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
