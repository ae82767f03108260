"""The page for whoever opens the gateway's address in a browser: one file, which asks nobody but the gateway.

It shows what `GET /v2/status` tells and sends requests as any client does; there is nothing else behind it. Its header forbids
it everything but its own script and style: no other address, no frame around it, and no text that becomes markup.
"""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import Final, NamedTuple

from gateway.protocols.media import ranges

HTML: Final = b"text/html; charset=utf-8"


class Page(NamedTuple):
    """headers: whole lines with their CRLF."""

    body: bytes
    headers: bytes


@cache
def page() -> Page:
    """The page, read once."""
    body = files("gateway.edges").joinpath("status.html").read_bytes()
    rules = {
        "default-src": "'none'",
        "script-src": _hashes(body, b"script"),
        "style-src": _hashes(body, b"style"),
        "connect-src": "'self'",
        "img-src": "data:",  # an empty icon, or browsers ask for /favicon.ico
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    policy = "; ".join(f"{name} {value}" for name, value in rules.items())
    headers = (
        f"Content-Security-Policy: {policy}\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n"
        "Cross-Origin-Opener-Policy: same-origin\r\nCache-Control: no-cache\r\nVary: Accept\r\n"
    )
    return Page(body, headers.encode())


def prefers_html(accept: bytes) -> bool:
    """Whether a client says that it likes HTML better than JSON: browsers do; curl and libraries take anything."""
    liked = {media: likes for media, _, likes in ranges(accept)}

    def of(*ranges: str) -> float:
        """Of the narrowest that it names."""
        return next((liked[each] for each in ranges if each in liked), 0.0)

    return of("text/html", "text/*") > of("application/json", "application/*", "*/*")


def _hashes(body: bytes, tag: bytes) -> str:
    """What allows the elements of this kind that stand in the page, and no others."""
    contents = re.findall(b"<%b>(.*?)</%b>" % (tag, tag), body, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in contents)
