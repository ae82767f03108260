"""What Content-Encoding asks of a request: its body is inflated, where that holds nobody up, or refused."""

from collections.abc import Callable
from functools import partial
from typing import Final

from gateway.errors import GatewayError, TooLarge
from gateway.wire.compression import WINDOW_BITS, Outcome, inflate, outcome_of
from gateway.wire.exchange import Exchange, Run
from gateway.wire.http_errors import STATUS

Refuse = Callable[[Exchange, int, str, bytes], None]
"""Answers with a status, a message and headers."""
_INLINE_BYTES: Final = 4 << 10  # a longer body, or one of which comes more than so much, is inflated off the loop
_INFLATED_INLINE_BYTES: Final = 64 << 10


def is_coded(exchange: Exchange) -> bool:
    return _coding(exchange) not in (b"", b"identity")


def _coding(exchange: Exchange) -> bytes:
    """In small letters, for a coding's name may have any (RFC 9110, 8.4.1); empty: there is none."""
    return exchange.headers.get(b"content-encoding", b"").strip().lower()


def inflate_body(exchange: Exchange, most_bytes: int, run: Run, done: Callable[[Exchange], None], refuse: Refuse) -> None:
    """Inflate a coded body, then call done, which may be at once; or refuse it for what is wrong with it."""
    encoding = _coding(exchange).removeprefix(b"x-")
    if encoding not in WINDOW_BITS:
        message = f"unsupported Content-Encoding {encoding.decode('latin-1')!r}, expected gzip or deflate"
        refuse(exchange, 501, message, b"Accept-Encoding: gzip, deflate\r\n")
        return
    body = exchange.body
    if len(body) <= _INLINE_BYTES:
        outcome = outcome_of(partial(inflate, encoding, body, min(most_bytes, _INFLATED_INLINE_BYTES)))
        if not isinstance(outcome, TooLarge):
            _take(exchange, done, refuse, outcome)
            return
    work = partial(inflate, encoding, body, most_bytes, lambda: exchange.connection is not None)
    run(work, partial(_take, exchange, done, refuse))


def _take(exchange: Exchange, done: Callable[[Exchange], None], refuse: Refuse, outcome: Outcome) -> None:
    if isinstance(outcome, GatewayError):
        refuse(exchange, STATUS[outcome.code], outcome.message, b"")
    elif exchange.connection is not None:
        exchange.body = outcome
        exchange.headers = {name: value for name, value in exchange.headers.items() if name != b"content-encoding"}
        done(exchange)
