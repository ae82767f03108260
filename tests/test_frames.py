"""Tensors survive the private channels between our processes unchanged."""

import ml_dtypes
import numpy as np
import pytest

from gateway.errors import InvalidArgument
from gateway.wire.frames import decode_frame, encode_frame


def test_every_datatype_comes_back_equal() -> None:
    tensors = {
        "b": np.array([[True], [False]]),
        "i": np.arange(6, dtype=np.int16).reshape(2, 3),
        "h": np.ones((2, 2), np.float16),
        "bf": np.ones((1, 2), ml_dtypes.bfloat16),
        "d": np.zeros((0, 4)),
        "s": np.array([[b"a\x00b"], [b""]], dtype=object),
    }
    frame = b"".join(encode_frame(tensors, {"n": 7}))
    decoded, extra = decode_frame(frame)
    assert extra == {"n": 7}
    for name, array in tensors.items():
        assert decoded[name].dtype == array.dtype
        assert np.array_equal(decoded[name], array)


def test_decoded_tensors_are_views_on_the_frame() -> None:
    frame = bytearray(b"".join(encode_frame({"x": np.zeros(4, np.float32)}, {})))
    decoded, _ = decode_frame(frame)
    frame[-4:] = np.float32(5).tobytes()
    assert decoded["x"][3] == 5


def test_a_short_frame_is_an_error() -> None:
    frame = b"".join(encode_frame({"x": np.zeros(4, np.float32)}, {}))
    with pytest.raises(InvalidArgument):
        decode_frame(frame[:-1])
