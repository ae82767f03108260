"""What an error is over HTTP: its status, and its body."""

from typing import Final

import orjson

from gateway import errors
from gateway.errors import Code, GatewayError

STATUS: Final[dict[Code, int]] = {
    Code.INVALID_ARGUMENT: 400,
    Code.ALREADY_EXISTS: 400,  # as Triton answers for a region of the same name
    Code.UNAUTHENTICATED: 401,
    Code.FORBIDDEN: 403,
    Code.NOT_FOUND: 404,
    Code.TOO_LARGE: 413,
    Code.LIMITED: 429,
    Code.UNSUPPORTED_MEDIA_TYPE: 415,
    Code.CANCELLED: 499,  # nobody is left to read it
    Code.BACKEND_FAILED: 500,
    Code.CONFIG: 500,
    Code.INTERNAL: 500,
    Code.UNSUPPORTED: 501,
    Code.NOT_READY: 503,
    Code.OVERLOADED: 503,
    Code.BACKEND_UNREACHABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}

FAULTS: Final[dict[int, type[GatewayError]]] = {
    400: errors.InvalidArgument,
    403: errors.Forbidden,
    408: errors.DeadlineExceeded,
    413: errors.TooLarge,
    417: errors.Unsupported,
    421: errors.Forbidden,
    431: errors.TooLarge,
    500: errors.InternalError,
    501: errors.Unsupported,
    503: errors.Overloaded,
    505: errors.Unsupported,
}
"""What a request is counted as that no handler gets, by the status of its answer."""

NO_TLS: Final = "this port speaks no TLS: ask by http:// (gRPC: an insecure channel), or set server.tls"


def begins_tls(data: bytes | memoryview) -> bool:
    """Whether what came first is a client's that speaks TLS: a record of a handshake (RFC 8446, section 5.1)."""
    return data[:2] == b"\x16\x03"


def error_body(message: str) -> bytes:
    """The body of every answer that is an error."""
    return orjson.dumps({"error": message.encode(errors="replace").decode()})
