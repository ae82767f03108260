"""The `Date` of answers, which a server with a clock must send (RFC 9110, 6.6.1): formatted once a second."""

import time
from email.utils import formatdate

_second = -1
_line = b""


def date_line() -> bytes:
    """The header with its CRLF."""
    global _second, _line
    now = int(time.time())
    if now != _second:
        _line = b"Date: %b\r\n" % formatdate(now, usegmt=True).encode()
        _second = now
    return _line
