"""By which id a client and the log speak of one request."""

import pytest

from gateway.wire.request_ids import request_id


@pytest.mark.parametrize("own", [b"order-17", b"7f3a:1/2", b"x" * 128, b"~!#"])
def test_a_clients_own_is_kept(own: bytes) -> None:
    assert request_id(own) == own


@pytest.mark.parametrize(
    "own", [None, b"", b"two words", b"x" * 129, b"a\r\nSet-Cookie: b", b"\xc3\xa9", b"one, other", b"\x7f"]
)
def test_one_that_cannot_stand_in_a_header_and_a_log_is_replaced(own: bytes | None) -> None:
    made = request_id(own)
    assert made != own
    assert request_id(made) == made


def test_none_is_made_twice() -> None:
    assert len({request_id(None) for _ in range(1000)}) == 1000
