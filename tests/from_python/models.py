"""Models of a user's, as they stand in a module of his."""

import threading
from collections.abc import Iterator
from typing import Annotated, TypedDict

import numpy as np
import numpy.typing as npt

import gateway

Rows = Annotated[npt.NDArray[np.float32], (-1, 2)]


@gateway.model
def double(x: Rows) -> Rows:
    if (x == 3).any():
        raise ValueError("no threes in /srv/models/weights.bin")
    return x * 2


@gateway.model(name="letters", max_rows=8)
class Letters:
    """Counts them."""

    def predict(self, text: Annotated[npt.NDArray[np.object_], (-1, 1)]) -> Annotated[npt.NDArray[np.int64], (-1, 1)]:
        return np.array([[len(row[0])] for row in text])


class Gate:
    """Answers once it is opened, with the rows of its batch."""

    inputs = (("x", "FP32", (-1, 1)),)
    outputs = (("rows", "INT64", (-1, 1)),)
    opened = threading.Event()
    entered = threading.Event()

    def predict(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.entered.set()
        self.opened.wait(10)
        rows = len(inputs["x"])
        return {"rows": np.full((rows, 1), rows)}


class Once:
    """As one that takes a port."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1

    def predict(self, x: Rows) -> Rows:
        return x


class Untold:
    inputs = (("x", "FP32", (-1,)),)
    outputs = (("y", "FP32", (-1,)),)

    def predict(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": inputs["x"]}


class Told(Untold):
    def predict(self, inputs: dict[str, np.ndarray], parameters: dict[str, float]) -> dict[str, np.ndarray]:  # type: ignore[override]
        return {"y": inputs["x"] * parameters.get("timeout_s", 0.0)}


def scaled(x: float, factor: float = 2.0) -> float:
    return x * factor


def half(x: Annotated[npt.NDArray[np.float16], (-1, 2)]) -> Annotated[npt.NDArray[np.float16], (-1, 2)]:
    return x


class Texts(TypedDict):
    text: str
    raw: bytes


def texts(text: str) -> Texts:
    return {"text": text, "raw": text.encode()}


def by_example(x):  # type: ignore[no-untyped-def]  # as users write it
    return {"y": x + 1}


def outer() -> object:
    def inner(x: float) -> float:
        return x

    return inner


class Tokens:
    """Counts up to its input, for ever if that is 0; what it made and whether it was stopped is seen from outside."""

    made = 0
    stopped = threading.Event()

    def predict(self, count: int) -> Iterator[int]:
        Tokens.made = 0
        try:
            number = 0
            while not count or number < count:
                if number == 13:
                    raise ValueError("13 is bad luck")
                Tokens.made += 1
                yield number
                number += 1 if count else 0
        finally:
            self.stopped.set()


@gateway.model
def letters_of(text: str) -> Iterator[str]:
    yield from text
