"""What gRPC asks of a call's headers, as far as its C core refuses a call for them, and the answer to one that is refused.

Source: gRPC over HTTP2 (grpc/doc/PROTOCOL-HTTP2.md). Values are not looked at, as in the C core: nothing here passes them on.
"""

import re
from typing import Final

from gateway.wire.http2_headers import Headers, header_block

INTERNAL: Final = 13
RESOURCE_EXHAUSTED: Final = 8

_NAME: Final = re.compile(rb"[a-z0-9._-]+")
_PSEUDO: Final = frozenset((b":method", b":scheme", b":path", b":authority", b":status"))
_BASE64: Final = rb"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}(?:==)?|[A-Za-z0-9+/]{3}=?)?"
_BINARY: Final = re.compile(_BASE64 + rb"(?:, ?" + _BASE64 + rb")*")  # several values may be joined
_LONGEST_SHOWN: Final = 100


def fault(headers: Headers) -> str:
    """Why a call with these is refused; empty: it is not."""
    for name, value in headers.items():
        if _NAME.fullmatch(name) is None and name not in _PSEUDO:
            return f"illegal header name {_shown(name)}: expected a-z, 0-9, `-`, `_` and `.`"
        if name.endswith(b"-bin") and _BINARY.fullmatch(value) is None:
            return f"header {_shown(name)}: {_shown(value)} is not base64"
    te = headers.get(b"te", b"trailers")
    if te != b"trailers":
        return f"header 'te': {_shown(te)}, expected 'trailers'"
    return ""


def refusal(status: int, text: str) -> bytes:
    """The whole answer to a call that is refused. text: ASCII that can be printed."""
    message = text.replace("%", "%25").encode("ascii")
    return header_block(
        (b"content-type", b"application/grpc"), (b"grpc-status", b"%d" % status), (b"grpc-message", message), status=200
    )


def _shown(text: bytes) -> str:
    return ascii(text[:_LONGEST_SHOWN].decode("latin-1"))
