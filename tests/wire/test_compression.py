"""Bodies are inflated whole, in linear time, and never beyond their bound."""

import gzip
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import InvalidArgument, TooLarge
from gateway.wire.compression import inflate


@settings(max_examples=100, derandomize=True)
@given(
    st.lists(
        st.builds(lambda data, times: data * times, st.binary(max_size=40), st.integers(1, 20_000)), min_size=1, max_size=8
    )
)
def test_members_of_any_sizes_are_joined(members: list[bytes]) -> None:
    packed = b"".join(map(gzip.compress, members))
    whole = b"".join(members)
    assert inflate(b"gzip", memoryview(packed), len(whole)) == whole
    with pytest.raises(TooLarge):
        inflate(b"gzip", packed, len(whole) - 1)
    with pytest.raises(InvalidArgument, match="ends within"):
        inflate(b"gzip", packed[:-1], len(whole))


def test_a_body_of_millions_of_members_is_refused() -> None:
    member = gzip.compress(b"")
    assert inflate(b"gzip", member * 10_000, 100) == b""
    with pytest.raises(InvalidArgument, match="10000 gzip members"):
        inflate(b"gzip", member * 200_000, 100)  # 4 MB, which took 10 s when each member copied the rest


def test_deflate_has_one_member() -> None:
    with pytest.raises(InvalidArgument, match="11 bytes follow the deflate data"):
        inflate(b"deflate", zlib.compress(b"abc") * 2, 100)
