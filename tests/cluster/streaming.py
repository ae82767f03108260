"""A user's model that answers in parts, as a request's parameters say. Loaded by file, as users' models are."""

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np


class Model:
    """Parameters: parts, how many; pause_ms, before each but the first; then, what comes after the last part."""

    inputs = (("X", "FP32", (-1, 4)),)
    outputs = (("Y", "FP32", (-1, 4)), ("MADE", "INT64", (-1, 1)), ("PID", "INT64", (-1, 1)))

    def __init__(self, bytes_each: int = 0) -> None:
        """bytes_each: a part's Y has so many more."""
        self._rows = 1 + bytes_each // 16

    def predict(self, inputs: dict[str, np.ndarray], parameters: dict[str, Any]) -> Iterator[dict[str, np.ndarray]]:
        for index in range(parameters.get("parts", 3)):
            if index:
                time.sleep(parameters.get("pause_ms", 0) / 1e3)
            yield self._part(inputs["X"] + index, index + 1)
        match parameters.get("then"):
            case "raises":
                raise ValueError("a bad value")
            case "hangs":
                time.sleep(600)

    def _part(self, values: np.ndarray, made: int) -> dict[str, np.ndarray]:
        return {
            "Y": np.repeat(values, self._rows, axis=0),
            "MADE": np.full((1, 1), made, np.int64),
            "PID": np.full((1, 1), os.getpid(), np.int64),
        }
