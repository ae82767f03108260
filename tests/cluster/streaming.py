"""A user's model that answers in parts, as a request's parameters say. Loaded by file, as users' models are."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


class Model:
    """Parameters: parts, how many; pause_ms, before each but the first; rows, of each; then, what comes after the last one.

    marks: a file that gets a byte for each part that is made, and another at the end, however that comes.
    """

    inputs = (("INPUT0", "FP32", (-1, 16)),)
    outputs = (("OUTPUT0", "FP32", (-1, 16)), ("PID", "INT64", (-1, 1)))

    def predict(self, inputs: dict[str, np.ndarray], parameters: dict[str, Any]) -> Iterator[dict[str, np.ndarray]]:
        marks = Path(parameters.get("marks", os.devnull))
        rows = parameters.get("rows", 1)
        try:
            for index in range(parameters.get("parts", 3)):
                if index:
                    time.sleep(parameters.get("pause_ms", 0) / 1e3)
                with marks.open("ab") as made:
                    made.write(b".")
                yield {"OUTPUT0": np.repeat(inputs["INPUT0"] + index, rows, axis=0), "PID": np.full((1, 1), os.getpid())}
            match parameters.get("then"):
                case "raises":
                    raise ValueError("a bad value")
                case "gives 2 GiB":  # of which no page is touched
                    yield {"OUTPUT0": np.zeros((1 << 25, 16), np.float32), "PID": np.zeros((1, 1), np.int64)}
        finally:
            with marks.open("ab") as made:
                made.write(b"|")
