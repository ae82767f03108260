"""Memory shared by two processes: what is read is what was written, and a block is used again only once nobody reads it."""

import gc
import os
import subprocess
import sys

import numpy as np
import pytest

from gateway.cluster.arena import Arena, Offer, Window
from gateway.wire.frames import decode_frame, encode_frame

MIB = 1 << 20


def test_a_frame_is_read_as_it_was_written() -> None:
    arena = Arena()
    window = Window(arena.offer)
    for size in (1, 5000, 3 * MIB, 600_000):
        content = os.urandom(size)
        found = arena.put((content[:3], memoryview(content)[3:]))
        assert found is not None
        assert bytes(window.read(*found, lambda: None)) == content
    window.close()
    arena.close()


def test_a_block_is_its_readers_until_nothing_refers_to_it() -> None:
    arena = Arena()
    window = Window(arena.offer)
    tensors = {"x": np.arange(MIB, dtype=np.float32)}
    released = []
    found = arena.put(encode_frame(tensors, {}))
    assert found is not None
    read, _ = decode_frame(window.read(*found, lambda: released.append(True)))
    row = read["x"][5:6]
    del read
    gc.collect()
    assert not released
    del row
    assert released == [True]
    arena.release(found[0])
    again = arena.put(encode_frame(tensors, {}))
    assert again == found
    assert arena.put(encode_frame(tensors, {})) not in (None, found)
    with pytest.raises(KeyError):
        arena.release(12345)


def test_what_was_read_outlives_both_sides() -> None:
    arena = Arena()
    window = Window(arena.offer)
    found = arena.put((b"a" * MIB,))
    assert found is not None
    frame = window.read(*found, lambda: None)
    window.close()
    arena.close()
    assert bytes(frame) == b"a" * MIB


def test_an_arena_that_is_full_takes_nothing_more() -> None:
    arena = Arena(most_bytes=4 * MIB)
    blocks = [arena.put((bytes(MIB),)) for _ in range(4)]
    assert None not in blocks[:3]
    assert blocks[3] is None
    assert blocks[0] is not None
    arena.release(blocks[0][0])
    assert arena.put((bytes(MIB - 5),)) == (blocks[0][0], MIB - 5)
    arena.close()


def test_only_what_is_there_is_read_and_only_of_the_arena_that_was_offered() -> None:
    arena = Arena()
    window = Window(arena.offer)
    with pytest.raises(ValueError, match="buffer"):
        window.read(0, 1 << 30, lambda: None)
    pid, fd, nonce = arena.offer
    with pytest.raises(ValueError, match="another's"):
        Window(Offer(pid, fd, bytes(len(nonce))))
    with pytest.raises(OSError, match="No such file"):
        Window(Offer(pid, 9999, nonce))
    arena.close()


def test_another_process_reads_it() -> None:
    arena = Arena()
    found = arena.put((b"x" * (2 * MIB),))
    code = (
        "import sys; from gateway.cluster.arena import Offer, Window;"
        f"frame = Window(Offer(*{tuple(arena.offer)!r})).read(*{found!r}, lambda: None);"
        "print(len(frame), set(bytes(frame)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [str(2 * MIB), "{120}"]
    arena.close()
