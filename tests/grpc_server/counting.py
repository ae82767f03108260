"""A model that answers in parts as its request says, and what it has done so far."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from backends.base import LastPart

ENDLESS = 1e6
WIDTH = 4096  # 16 kB a part

made: dict[int, int] = {}  # parts, by the request's first value
closed: dict[int, threading.Event] = {}
goes_on: dict[int, threading.Event] = {}


class Counts:
    """Gives as many parts as its input says, numbered; `waits`: the second only once the test lets it; `fails_after`;
    `says_last`: the last says that it is."""

    inputs = (("INPUT0", "FP32", (-1, 4)),)
    outputs = (("OUTPUT0", "FP32", (-1, WIDTH)),)

    def predict(self, inputs: dict[str, np.ndarray], parameters: dict[str, Any]) -> Iterator[dict[str, np.ndarray]]:
        key = parameters.get("key", 0)
        try:
            for number in range(int(inputs["INPUT0"][0, 0])):
                if number == parameters.get("fails_after"):
                    raise ValueError("a bad part")
                if number == 1 and "waits" in parameters:
                    goes_on[key].wait(20)
                made[key] = number + 1
                part = {"OUTPUT0": np.full((1, WIDTH), number, np.float32)}
                last = "says_last" in parameters and number == inputs["INPUT0"][0, 0] - 1
                yield LastPart(part) if last else part
        finally:
            if key in closed:
                closed[key].set()
