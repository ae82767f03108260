"""Header blocks of HTTP/2."""

import hpack
import pytest

from gateway.wire.http2_headers import HeaderReader, header_block


@pytest.mark.parametrize("length", [0, 1, 126, 127, 128, 254, 255, 300, 70_000])
def test_header_blocks_are_what_hpack_reads(length: int) -> None:
    headers = [(b":path", b"/a"), (b"x", b"v" * length)]
    assert hpack.Decoder(max_header_list_size=1 << 20).decode(header_block(*headers), raw=True) == headers
    assert HeaderReader(1 << 20).read(header_block(*headers)) == dict(headers)


@pytest.mark.parametrize("status", [100, 200, 415, 503])
def test_a_response_begins_with_its_status(status: int) -> None:
    assert hpack.Decoder().decode(header_block(status=status), raw=True) == [(b":status", b"%d" % status)]
