"""Requests to AWS, signed by Signature Version 4 as they are sent.

A signature counts for five minutes, and for the second in it that is written into it, so requests cannot be signed before the
run. What does not change is: the key of a day, and all of a request's canonical form but the time. What is left costs a few
microseconds (`python -m benchmarks.signed`). Source: AWS, "Create a signed AWS API request"; botocore's signer is the judge in
the tests.
"""

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple, overload
from urllib.parse import quote

import orjson

from loadtest.errors import UsageError
from loadtest.results import LoadSpec

SERVICE: Final = "sagemaker"
_UNSIGNED: Final = frozenset(("authorization", "connection", "content-length", "expect", "transfer-encoding", "user-agent"))
_OURS: Final = frozenset(("authorization", "x-amz-date", "x-amz-security-token"))
_STAMP: Final = r"\d{8}T\d{6}Z"
_SKEW: Final = re.compile(rf"Signature (expired|not yet current): ({_STAMP}).*?\(({_STAMP}) ([-+]) (\d+) min\.\)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Keys:
    """What requests are signed with. token: of a session, which ends; "" for a user's own keys."""

    access_key: str
    secret_key: str = field(repr=False)
    token: str = field(default="", repr=False)


class _Parsed(NamedTuple):
    """One request, as far as it depends on nobody's keys.

    opening: the request line. values: of the headers to sign. digest: of the body. rest: headers and body as they are.
    """

    opening: str
    values: dict[str, str]
    digest: str
    rest: bytes

    @classmethod
    def of(cls, request: bytes) -> "_Parsed":
        head, _, body = request.partition(b"\r\n\r\n")
        opening, *lines = head.decode("latin-1").split("\r\n")
        values: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(":")
            if (name := name.strip().lower()) not in _UNSIGNED:
                values[name] = " ".join(value.split())
        rest = "".join(f"{line}\r\n" for line in lines).encode("latin-1") + b"\r\n" + body
        return cls(opening, values, hashlib.sha256(body).hexdigest(), rest)


class _Template(NamedTuple):
    """One request, but for its time and signature.

    before, after: of its canonical form, beside the time. opening: the request line. rest: what stands behind the signature.
    """

    before: bytes
    after: bytes
    signed: bytes
    opening: bytes
    rest: bytes


class SignedRequests(Sequence[bytes]):
    """Whole requests, each signed at the moment at which it is asked for; bodies are hashed before. On one thread.

    keys: those that count now. clock: seconds since the epoch.
    """

    def __init__(
        self, requests: Sequence[bytes], region: str, keys: Callable[[], Keys], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._requests = [_Parsed.of(request) for request in requests]
        self._region = region
        self._keys = keys
        self._clock = clock
        self._shown = keys()
        self._templates: dict[int, _Template] = {}
        self._second = -1
        self._stamp = b""
        self._scope = b""
        self._day_key = b""
        self._signer: Keys | None = None  # whose key of the day that is

    def __len__(self) -> int:
        return len(self._requests)

    @overload
    def __getitem__(self, number: int) -> bytes: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[bytes]: ...
    def __getitem__(self, number: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        second, keys = int(self._clock()), self._keys()
        if keys is not self._shown:
            self._shown = keys
            self._templates.clear()
            self._second = -1
        if second != self._second:
            self._turn(second)
        template = self._templates.get(number)
        if template is None:
            template = self._templates[number] = _template(self._requests[number], keys.token)
        canonical = hashlib.sha256(template.before + self._stamp + template.after).hexdigest().encode()
        told = b"AWS4-HMAC-SHA256\n%b\n%b\n%b" % (self._stamp, self._scope, canonical)
        signature = hmac.digest(self._day_key, told, "sha256").hex().encode()
        return b"%bX-Amz-Date: %b\r\nAuthorization: AWS4-HMAC-SHA256 Credential=%b/%b, SignedHeaders=%b, Signature=%b\r\n%b" % (
            template.opening, self._stamp, self._shown.access_key.encode(), self._scope, template.signed, signature,
            template.rest,
        )  # fmt: skip

    def _turn(self, second: int) -> None:
        """Another second has begun, perhaps another day."""
        self._second = second
        self._stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second)).encode()
        day = self._stamp[:8].decode()
        scope = f"{day}/{self._region}/{SERVICE}/aws4_request".encode()
        if scope == self._scope and self._signer is self._shown:
            return
        self._scope, self._signer = scope, self._shown
        key = b"AWS4" + self._shown.secret_key.encode()
        for part in (day, self._region, SERVICE, "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        self._day_key = key


def signed_headers(path: str, headers: Mapping[str, str], body: bytes, region: str, keys: Keys) -> dict[str, str]:
    """The headers of a POST, with those of its signature. headers: Host among them."""
    lines = (f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()))
    request = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
    head = SignedRequests((request,), region, lambda: keys)[0].partition(b"\r\n\r\n")[0].decode()
    return dict(line.split(": ", 1) for line in head.split("\r\n")[1:])


def _template(request: _Parsed, token: str) -> _Template:
    method, target, _ = request.opening.split(" ", 2)
    path, _, query = target.partition("?")
    values = {**request.values, "x-amz-date": "\0", **({"x-amz-security-token": token} if token else {})}
    ordered = sorted(values)
    pairs = sorted(tuple(pair.partition("=")[::2]) for pair in query.split("&")) if query else []
    canonical = "\n".join(
        (
            method,
            quote(path, safe="/~"),
            "&".join(f"{name}={value}" for name, value in pairs),
            *(f"{name}:{values[name]}" for name in ordered),
            "",
            ";".join(ordered),
            request.digest,
        )
    ).encode("latin-1")
    before, _, after = canonical.partition(b"\0")
    added = f"X-Amz-Security-Token: {token}\r\n" if token else ""
    return _Template(
        before, after, ";".join(ordered).encode(), f"{request.opening}\r\n".encode(), added.encode() + request.rest
    )


def check_region(option: str, region: str) -> None:
    """Raises: UsageError, if it is none of AWS's, by its form."""
    if not re.fullmatch(r"[a-z]{2,}(-[a-z]+)+-\d+", region):
        raise UsageError(f"{option} {region!r}: expected a region of AWS, such as us-east-1")


def check_signed(spec: LoadSpec) -> None:
    """Raises: UsageError, if what it describes cannot be signed for an endpoint of SageMaker."""
    check_region("--sigv4", spec.sigv4)
    if spec.protocol != "invocations" or not spec.target.startswith("https://"):
        where = f"https://runtime.sagemaker.{spec.sigv4}.amazonaws.com/endpoints/NAME/invocations"
        raise UsageError(f"--sigv4: {spec.target!r} by {spec.protocol}: expected {where} by --protocol invocations")
    if not spec.payloads:
        raise UsageError("--sigv4: an endpoint does not tell what its model takes: give requests with --payload")
    for name, _ in spec.headers:
        if name.lower() in _OURS:
            raise UsageError(f"--header {name!r}: --sigv4 signs each request with its own: leave one of them out")


def refusal(status: int, answer: str) -> str:
    """What a 401 or 403 of AWS means here, and what to do. answer: its body, or words of it."""
    words = _words(answer)
    skew = _SKEW.search(answer)
    if skew is not None:
        signed_at, server = _moment(skew[2]), _moment(skew[3])
        apart_s = abs((signed_at - server).total_seconds())
        behind = "behind" if skew[1] == "expired" else "ahead of"
        return (
            f"{status}: this machine's clock is {timedelta(seconds=apart_s)} {behind} AWS's, which takes {skew[5]} minutes: "
            f"set it by NTP ({words})"
        )
    if "expired" in words and "token" in words:
        return f"{status}: the session's credentials have expired, and no new ones were to be had: log in again ({words})"
    if "signature" in words.lower():
        return f"{status}: AWS computes another signature: is the secret key the access key's? ({words})"
    return f"{status}: AWS does not let these credentials in: they need sagemaker:InvokeEndpoint ({words})"


def _words(answer: str) -> str:
    """AWS's own, in one line: its JSON has them under `message` or `Message`."""
    try:
        document = orjson.loads(answer)
        answer = str(document.get("message") or document.get("Message") or answer)
    except (ValueError, AttributeError):
        pass
    return " ".join(answer[:300].split())


def _moment(stamp: str) -> datetime:
    return datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
