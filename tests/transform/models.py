"""Models of the tests of `gateway batch`."""

import os
import time
from typing import Annotated, TypedDict

import numpy as np
import numpy.typing as npt

Row = Annotated[npt.NDArray[np.float32], (-1, 2)]
Any = Annotated[npt.NDArray[np.float32], (-1, -1)]
One = Annotated[npt.NDArray[np.int8], (-1,)]
Pair = Annotated[npt.NDArray[np.int64], (-1, 2)]
Root = Annotated[npt.NDArray[np.float32], (-1, 2)]
Half = Annotated[npt.NDArray[np.float16], (-1, 2)]
Pixels = Annotated[npt.NDArray[np.uint8], (-1, 3)]
Text = Annotated[npt.NDArray[np.object_], (-1,)]


def twice(x: Row) -> Row:
    """Fails where a row is negative."""
    if (x < 0).any():
        raise ValueError("a negative row")
    return 2 * x


def area(width: float, height: float) -> float:
    return width * height


def opposite(flag: bool) -> bool:
    return not flag


def total(x: Any) -> Annotated[npt.NDArray[np.float32], (-1,)]:
    return x.sum(axis=1)


def small(x: One) -> One:
    return x


def pair(x: Pair) -> Pair:
    return x


def half(x: Half) -> Half:
    return x


def root(x: One) -> Root:
    """NaN, of what is negative."""
    with np.errstate(invalid="ignore"):
        return np.sqrt(np.stack([x, x], 1).astype(np.float32))


def pixels(x: Pixels) -> Pixels:
    return x


def upper(text: Text) -> Text:
    return np.array([each.upper() for each in text], object)


class Widths(TypedDict):
    fp64: Annotated[npt.NDArray[np.float64], (-1,)]
    fp32: Annotated[npt.NDArray[np.float32], (-1,)]
    fp16: Annotated[npt.NDArray[np.float16], (-1,)]


def widths(x: Annotated[npt.NDArray[np.float64], (-1,)]) -> Widths:
    return {"fp64": x, "fp32": x.astype(np.float32), "fp16": x.astype(np.float16)}


def slow(x: Row) -> Row:
    """Tells each row that it has seen, and takes a while."""
    with open(os.environ["SEEN"], "a") as seen:
        seen.writelines(f"{int(row[0])}\n" for row in x)
    time.sleep(0.02)
    return x


class Scaled:
    """By the number in a file. log: is written to by each call."""

    def __init__(self, path: str, log: str) -> None:
        with open(path) as file:
            self._factor = float(file.read())
        self._log = log

    def predict(self, inputs: dict[str, npt.NDArray[np.float32]]) -> dict[str, npt.NDArray[np.float32]]:
        with open(self._log, "a") as log:
            log.write(f"{len(inputs['x'])}\n")
        return {"y": np.float32(self._factor) * inputs["x"]}
