"""What gRPC asks of a call's headers, as far as its C core refuses a call for them, and the answer to one that is refused.

Source: gRPC over HTTP2 (grpc/doc/PROTOCOL-HTTP2.md). Values are not looked at, as in the C core: nothing here passes them on.
"""

import re
from enum import IntEnum
from typing import Final

from gateway.wire.http2_headers import Headers, header_block
from gateway.wire.request_ids import NAME as REQUEST_ID


class CallStatus(IntEnum):
    """The codes of statuscodes.md that are used here."""

    OK = 0
    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


INTERNAL: Final = CallStatus.INTERNAL
RESOURCE_EXHAUSTED: Final = CallStatus.RESOURCE_EXHAUSTED

_LEGAL: Final = rb"(?::method|:scheme|:path|:authority|:status|[a-z0-9._-]+)"
_NAME: Final = re.compile(_LEGAL)
_NAMES: Final = re.compile(_LEGAL + rb"(?:\n" + _LEGAL + rb")*")
_BASE64: Final = rb"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}(?:==)?|[A-Za-z0-9+/]{3}=?)?"
_BINARY: Final = re.compile(_BASE64 + rb"(?:, ?" + _BASE64 + rb")*")  # several values may be joined
_LONGEST_SHOWN: Final = 100


def fault(headers: Headers) -> str:
    """Why a call with these is refused; empty: it is not."""
    names = b"\n".join(headers)  # one match of all takes half as long as one of each
    te = headers.get(b"te", b"trailers")
    if _NAMES.fullmatch(names) and names.count(b"\n") < len(headers) and b"-bin" not in names and te == b"trailers":
        return ""
    for name, value in headers.items():
        if _NAME.fullmatch(name) is None:
            return f"illegal header name {_shown(name)}: expected a-z, 0-9, `-`, `_` and `.`"
        if name.endswith(b"-bin") and _BINARY.fullmatch(value) is None:
            return f"header {_shown(name)}: {_shown(value)} is not base64"
    if te != b"trailers":
        return f"header 'te': {_shown(te)}, expected 'trailers'"
    return ""


def refusal(status: int, text: str, own_id: bytes) -> bytes:
    """The whole answer to a call that is refused. text: ASCII that can be printed. own_id: by which the log tells of it."""
    message = text.replace("%", "%25").encode("ascii")
    return header_block(
        (b"content-type", b"application/grpc"), (b"grpc-status", b"%d" % status), (b"grpc-message", message),
        (REQUEST_ID, own_id), status=200,
    )  # fmt: skip


def _shown(text: bytes) -> str:
    return ascii(text[:_LONGEST_SHOWN].decode("latin-1"))
