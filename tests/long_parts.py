"""A model whose parts take long to encode, some of them, and an encoder that a test holds up meanwhile."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

LONG = 40_000  # elements of a part that takes long
_HELD_S = 5.0  # at most: below what a client waits for an answer

made: dict[int, int] = {}  # parts, by the request's `key`


class Mixed:
    """Gives a part for each of `counts`, of so many texts, the first of which is the part's number; then fails, if it is to."""

    inputs = (("counts", "INT32", (-1,)),)
    outputs = (("texts", "BYTES", (-1,)),)

    def predict(self, inputs: dict[str, np.ndarray], parameters: dict[str, Any]) -> Iterator[dict[str, np.ndarray]]:
        for number, count in enumerate(inputs["counts"]):
            made[parameters.get("key", 0)] = number + 1
            texts = np.empty(max(1, int(count)), object)
            texts[:] = b"x"
            texts[0] = b"%d" % number
            yield {"texts": texts}
        if "fails" in parameters:
            raise ValueError("a bad part")


class HeldEncoder:
    """Has what takes long encoded when `goes_on` is set. begun: something is to be. waited: for each, whether it was set."""

    def __init__(self, patch: pytest.MonkeyPatch, codec: Any) -> None:
        """codec: the class whose answers are held up."""
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self.waited: list[bool] = []
        at_leisure = codec.at_leisure

        def held(own: Any) -> Any:
            slow = at_leisure(own)
            encode = slow.encode

            def wait_and_encode(*arguments: Any) -> Any:
                self.begun.set()
                self.waited.append(self.goes_on.wait(_HELD_S))
                return encode(*arguments)

            slow.encode = wait_and_encode
            return slow

        patch.setattr(codec, "at_leisure", held)
