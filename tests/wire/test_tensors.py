"""Raw bytes of BYTES elements: what is long is copied little by little, and comes out the same."""

import numpy as np
import pytest

from backends.datatypes import NUMPY
from gateway.wire import tensors
from gateway.wire.tensors import joined, tensor_from_bytes, tensor_to_bytes

MIB = 1 << 20


def counted(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    pauses: list[None] = []
    monkeypatch.setattr(tensors, "pause", lambda: pauses.append(None))
    return pauses


@pytest.mark.parametrize("sizes", [(), (0,), (5,), (MIB,), (MIB - 1, 2), (3 * MIB + 7, 1, 2 * MIB), (MIB // 2,) * 9])
def test_pieces_are_joined(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = counted(monkeypatch)
    pieces = [np.random.default_rng(size).bytes(size) for size in sizes]
    assert joined(pieces) == joined([memoryview(piece) for piece in pieces]) == b"".join(pieces)
    assert len(pauses) >= 2 * (sum(sizes) // (2 * MIB))


def test_long_elements_are_read_and_written_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = counted(monkeypatch)
    array = np.empty(3, NUMPY["BYTES"])
    array[:] = [b"a" * (9 * MIB), b"", "ä" * MIB]
    raw = tensor_to_bytes(array)
    assert len(raw) == 11 * MIB + 12
    assert len(pauses) >= 10
    pauses.clear()
    read = tensor_from_bytes("x", "BYTES", [3], raw)
    assert read.tolist() == [b"a" * (9 * MIB), b"", ("ä" * MIB).encode()]
    assert len(pauses) >= 10
