"""Header blocks of HTTP/2."""

import random

import hpack
import pytest

from gateway.wire.http2_headers import LONGEST_REMEMBERED, SIZE_UPDATE, HeaderReader, Headers, header_block


@pytest.mark.parametrize("length", [0, 1, 126, 127, 128, 254, 255, 300, 70_000])
def test_header_blocks_are_what_hpack_reads(length: int) -> None:
    headers = [(b":path", b"/a"), (b"x", b"v" * length)]
    assert hpack.Decoder(max_header_list_size=1 << 20).decode(header_block(*headers), raw=True) == headers
    assert HeaderReader(1 << 20).read(header_block(*headers)) == dict(headers)


@pytest.mark.parametrize("status", [100, 200, 415, 503])
def test_a_response_begins_with_its_status(status: int) -> None:
    assert hpack.Decoder().decode(header_block(status=status), raw=True) == [(b":status", b"%d" % status)]


_PATH = [(b":path", b"/a"), (b"te", b"trailers")]


def _asked(reader: HeaderReader, block: bytes) -> Headers | None:
    """As a connection asks."""
    return reader.known.get(block) or reader.alike(block) or reader.read(block)


def test_a_block_with_other_ids_is_not_decoded_again() -> None:
    reader = HeaderReader(1 << 12)
    for number in range(3):
        headers = [*_PATH, (b"traceparent", b"00-%032x-01" % number), (b"key", b"k"), (b"x-request-id", b"%04d" % number)]
        assert _asked(reader, header_block(*headers)) == dict(headers)
        reader._decoder = None  # type: ignore[assignment]  # nobody asks it
    assert not reader.known


def test_what_others_are_is_forgotten_when_the_table_changes_or_it_is_asked() -> None:
    reader = HeaderReader(1 << 12)
    encoder = hpack.Encoder()
    indexed = encoder.encode([(b"key", b"k")], huffman=False)
    again = encoder.encode([(b"key", b"k")])
    assert len(again) == 1

    def block(number: int) -> bytes:
        return again + header_block((b"x-request-id", b"%04d" % number))

    reader.read(indexed)
    assert reader.read(block(1)) == {b"key": b"k", b"x-request-id": b"0001"}
    assert reader.alike(block(2)) == {b"key": b"k", b"x-request-id": b"0002"}
    reader.forget(block(2))
    assert reader.alike(block(2)) is None
    reader.read(block(1))
    reader.read(encoder.encode([(b"other", b"o")]))
    assert reader.alike(block(2)) is None
    assert reader.read(block(2)) == {b"other": b"o", b"x-request-id": b"0002"}


def test_an_id_that_is_there_twice_is_decoded_each_time() -> None:
    reader = HeaderReader(1 << 12)
    for number in range(2):
        twice = [(b"b3", b"%04d" % number), (b"b3", b"%04d" % (number + 7))]
        assert _asked(reader, header_block(*twice)) == dict(twice)


def test_a_block_that_is_alike_means_what_it_would_mean_decoded() -> None:
    draw = random.Random(3)
    names = (b"b3", b"traceparent", b"x-request-id", b"x", b"key")
    in_a_value = header_block((b"traceparent", b"value%02d"))
    alike = 0
    for _ in range(400):
        reader, decoder, encoder, has_table = HeaderReader(1 << 12), hpack.Decoder(), hpack.Encoder(), True
        plan: list[tuple[bytes, bytes]] = []
        for _ in range(8):
            block = b""
            if not draw.randrange(9):
                block, has_table = SIZE_UPDATE, False
            if not plan or not draw.randrange(4):
                forms = (b"%02d", b"%030d", in_a_value)
                plan = [(draw.choice(names), draw.choice(forms)) for _ in range(draw.randrange(1, 4))]
            for name, form in plan:
                value = form % draw.randrange(99)
                if has_table and not draw.randrange(20):
                    block += encoder.encode([(name, value)], huffman=bool(draw.randrange(2)))
                else:
                    block += header_block((name, value))
            expected = dict(decoder.decode(block, raw=True))
            alike += reader.alike(block) is not None
            assert _asked(reader, block) == expected
    assert alike > 100


def test_blocks_with_ids_take_bounded_memory() -> None:
    reader = HeaderReader(1 << 12)
    for number in range(1000):
        reader.read(header_block((b"x", b"%d" % number), (b"b3", b"1")))
        reader.read(header_block((b"x", b"y" * (number % 7)), (b"b3", b"1" * (number % 50))))
        assert len(reader.known) + len(reader._alike) <= 256
        assert len(reader._shapes) <= 4
    reader.read(header_block((b"x", b"y" * LONGEST_REMEMBERED), (b"b3", b"1")))
    assert reader.alike(header_block((b"x", b"y" * LONGEST_REMEMBERED), (b"b3", b"2"))) is None
