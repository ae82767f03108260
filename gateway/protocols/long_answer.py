"""A long REST answer: its text is made a slice at a time, as it is asked for."""

from collections.abc import Iterator, Mapping

import numpy as np

from gateway.protocols.json_data import slices_to_json


class Slices:
    """The text of a long answer, a slice at a time. held_bytes: of the tensors that it is made of."""

    def __init__(self, slices: Iterator[bytes], held_bytes: int) -> None:
        self._slices = slices
        self.held_bytes = held_bytes

    def __iter__(self) -> Iterator[bytes]:
        return self._slices

    def __next__(self) -> bytes:
        return next(self._slices)


def pieces_of(
    head: bytes, entries: list[bytes], long: Mapping[int, np.ndarray], texts: Mapping[int, list[bytes]]
) -> Iterator[bytes]:
    """The text of a long answer. entries: of its outputs, whole but for those in `long` and `texts`."""
    text = b'%b,"outputs":[' % head
    for index, entry in enumerate(entries):
        text += b"," + entry if index else entry
        if index in long or index in texts:
            for piece in texts[index] if index in texts else slices_to_json(long[index]):
                yield text + piece
                text = b""
            text = b"}"
    yield text + b"]}"
