"""SageMaker's runtime as far as a client sees it: TLS, signatures, delays, its own shapes of errors. A process of its own.

    python -m tests.loadtest.fake_endpoint CERTIFICATE KEY '{"delay_ms": 5, "statuses": [200, 429]}'

It prints its port, and serves until its standard input ends; then it prints what it saw as JSON. botocore's signer computes
each signature anew; one that was right counts again for the same bytes. `skew_s`: how far its clock is ahead of this machine's.
`tokens`: of sessions that it takes; without them only keys of a user. `delay_ms`: of every answer; `statuses`: of the answers,
in turn.
"""

import asyncio
import datetime
import itertools
import json
import ssl
import sys
from collections import Counter
from typing import Any, Final

import httptools
import uvloop
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

ACCESS_KEY: Final = "AKIDEXAMPLE"
SECRET_KEY: Final = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
REGION: Final = "us-east-1"
_WINDOW: Final = datetime.timedelta(minutes=5)
_FORMAT: Final = "%Y%m%dT%H%M%SZ"
_OK: Final = b'{"outputs":[{"name":"y","datatype":"FP32","shape":[1,1],"data":[0.0]}]}'

# Status -> the error's type and its body. Source: sagemaker-runtime's model in botocore 1.44.5, and AWS's common errors.
ERRORS: Final[dict[int, tuple[str, dict[str, Any]]]] = {
    400: ("ThrottlingException", {"message": "Rate exceeded"}),
    424: (
        "ModelError",
        {
            "ErrorCode": "CLIENT_ERROR_FROM_MODEL",
            "LogStreamArn": "",
            "Message": 'Received client error (400) from primary with message "no input x"',
            "OriginalMessage": "no input x",
            "OriginalStatusCode": 400,
        },
    ),
    429: ("ModelNotReadyException", {"Message": "Model is not ready for inference yet"}),
    500: ("InternalFailure", {"Message": "An internal failure occurred"}),
    503: ("ServiceUnavailable", {"Message": "The service is unavailable"}),
    530: ("InternalDependencyException", {"Message": "A dependency failed"}),
}


class FakeEndpoint:
    """What it was told, and what it saw."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.delay_s = told.get("delay_ms", 0) / 1e3
        self.statuses = itertools.cycle(told.get("statuses", [200]))
        self.skew = datetime.timedelta(seconds=told.get("skew_s", 0))
        self.tokens = told.get("tokens")
        self.seen: Counter[str] = Counter()
        self.ages: Counter[int] = Counter()  # seconds between signature and arrival
        self._right: dict[bytes, datetime.datetime] = {}

    def answer(self, head: bytes, method: str, url: str, headers: dict[str, str], body: bytes) -> bytes:
        stamp = headers.get("x-amz-date", "")
        now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None) + self.skew
        kind, told = self._refused(head, method, url, headers, body, stamp, now)
        if kind:
            self.seen[kind] += 1
            return _written(403, kind, {"message": told})
        self.ages[int((now - datetime.datetime.strptime(stamp, _FORMAT)).total_seconds())] += 1
        self.seen["right"] += 1
        status = next(self.statuses)
        return _GOOD if status == 200 else _written(status, *ERRORS[status])

    def _refused(
        self, head: bytes, method: str, url: str, headers: dict[str, str], body: bytes, stamp: str, now: datetime.datetime
    ) -> tuple[str, str]:
        if not stamp or "authorization" not in headers:
            return "MissingAuthenticationTokenException", "Missing Authentication Token"
        at = datetime.datetime.strptime(stamp, _FORMAT)
        if now - at > _WINDOW:
            words = f"is now earlier than {now - _WINDOW:{_FORMAT}} ({now:{_FORMAT}} - 5 min.)"
            return "InvalidSignatureException", f"Signature expired: {stamp} {words}"
        if at - now > _WINDOW:
            words = f"is still later than {now + _WINDOW:{_FORMAT}} ({now:{_FORMAT}} + 5 min.)"
            return "InvalidSignatureException", f"Signature not yet current: {stamp} {words}"
        token = headers.get("x-amz-security-token")
        if self.tokens is not None and token not in self.tokens:
            return "ExpiredTokenException", "The security token included in the request is expired"
        if self._right.get(head + body) != at:
            if _authorization(method, url, headers, body, stamp, token) != headers["authorization"]:
                return (
                    "InvalidSignatureException",
                    "The request signature we calculated does not match the signature you provided.",
                )
            self.seen["computed"] += 1
            if len(self._right) > 10_000:
                self._right.clear()
            self._right[head + body] = at
        return "", ""


def _authorization(method: str, url: str, headers: dict[str, str], body: bytes, stamp: str, token: str | None) -> str:
    named = headers["authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(";")
    sent = {name: headers[name] for name in named if not name.startswith("x-amz-")}
    request = AWSRequest(method, f"https://{headers['host']}{url}", headers=sent, data=body)
    request.context["timestamp"] = stamp
    signer = SigV4Auth(Credentials(ACCESS_KEY, SECRET_KEY, token), "sagemaker", REGION)
    signer._modify_request_before_signing(request)
    signer._inject_signature_to_request(
        request, signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request)
    )
    return str(request.headers["Authorization"])


def _written(status: int, kind: str, document: dict[str, Any]) -> bytes:
    body = json.dumps(document).encode()
    lines = (
        f"HTTP/1.1 {status} -",
        f"x-amzn-ErrorType: {kind}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join((*lines, "", "")).encode() + body


_GOOD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(_OK), _OK)


class _Connection(asyncio.Protocol):
    def __init__(self, endpoint: FakeEndpoint) -> None:
        self._endpoint = endpoint
        self._parser = httptools.HttpRequestParser(self)
        self._data = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # TCP gives no other
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url, self._body, self._headers = b"", b"", {}

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        head = self._data.partition(b"\r\n\r\n")[0]
        self._data = b""
        method = self._parser.get_method().decode()
        answer = self._endpoint.answer(head, method, self._url.decode(), self._headers, self._body)
        if self._endpoint.delay_s:
            asyncio.get_running_loop().call_later(self._endpoint.delay_s, self._transport.write, answer)
        else:
            self._transport.write(answer)


async def _serve(certificate: str, key: str, told: dict[str, Any]) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    endpoint = FakeEndpoint(told)
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(endpoint), "127.0.0.1", 0, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    print(json.dumps({"seen": endpoint.seen, "ages": endpoint.ages}), flush=True)
    server.close()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}))
