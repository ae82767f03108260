"""A user's model that does what an input of its tells it to, and what no model should. Loaded by file, as users' models are."""

import asyncio
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def raises(exc: BaseException) -> Callable[..., Any]:
    def act(inputs: dict[str, np.ndarray]) -> Any:
        raise exc

    return act


def outputs(**given: Callable[[np.ndarray], Any]) -> Callable[..., Any]:
    """Outputs by name, each made of INPUT0."""
    return lambda inputs: {name: make(inputs["INPUT0"]) for name, make in given.items()}


def echo(x: np.ndarray) -> np.ndarray:
    return x.copy()


def texts(x: np.ndarray) -> np.ndarray:
    return objects(x, b"text")


def objects(x: np.ndarray, element: object) -> np.ndarray:
    array = np.empty((len(x), 1), object)
    for row in range(len(x)):
        array[row, 0] = element
    return array


def prints(inputs: dict[str, np.ndarray]) -> Any:
    for stream in (sys.stdout, sys.stderr):
        for _ in range(5):
            stream.write("x" * (1 << 20))
        stream.flush()
    return good(inputs)


def forks(inputs: dict[str, np.ndarray]) -> Any:
    os.fork()
    return good(inputs)


def leaves_a_child(inputs: dict[str, np.ndarray]) -> Any:
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    return good(inputs)


def leaves_a_child_and_crashes(inputs: dict[str, np.ndarray]) -> Any:
    leaves_a_child(inputs)
    os._exit(5)


def eats_memory(inputs: dict[str, np.ndarray]) -> Any:
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
    hoard = []
    while True:
        hoard.append(np.ones(16 << 20, np.uint8))


def kills_itself(number: int) -> Callable[..., Any]:
    def act(inputs: dict[str, np.ndarray]) -> Any:
        os.kill(os.getpid(), number)
        time.sleep(600)

    return act


def closes_all_files(inputs: dict[str, np.ndarray]) -> Any:
    os.closerange(3, 256)
    return good(inputs)


def writes_to_its_socket(raw: bytes) -> Callable[..., Any]:
    def act(inputs: dict[str, np.ndarray]) -> Any:
        os.write(int(sys.argv[1]), raw)
        return good(inputs)

    return act


def hangs(inputs: dict[str, np.ndarray]) -> Any:
    time.sleep(600)


good = outputs(OUTPUT0=echo, TEXT=texts)

ACTS: dict[str, Callable[..., Any]] = {
    "good": good,
    # what the batch is to blame for
    "raises": raises(ValueError("a bad value")),
    "stops iteration": raises(StopIteration("enough")),
    "raises without words": raises(Unprintable()),
    "raises 5 MB": raises(ValueError("w" * 5_000_000)),
    "raises a surrogate": raises(ValueError("lone \ud800 surrogate")),
    "returns None": lambda inputs: None,
    "returns a list": lambda inputs: [inputs["INPUT0"]],
    "misses an output": outputs(OUTPUT0=echo),
    "gives another output": outputs(OUTPUT0=echo, TEXT=texts, EXTRA=echo),
    "gives another datatype": outputs(OUTPUT0=lambda x: x.astype(np.int64), TEXT=texts),
    "gives a list": outputs(OUTPUT0=lambda x: x.tolist(), TEXT=texts),
    "gives None": outputs(OUTPUT0=lambda x: None, TEXT=texts),
    "gives a row less": outputs(OUTPUT0=lambda x: x[1:], TEXT=texts),
    "gives a row more": outputs(OUTPUT0=lambda x: np.concatenate([x, x]), TEXT=texts),
    "gives a scalar": outputs(OUTPUT0=lambda x: x[0, 0, ...], TEXT=texts),
    "gives another width": outputs(OUTPUT0=lambda x: x[:, 1:], TEXT=texts),
    "gives another dimension": outputs(OUTPUT0=lambda x: x[..., None], TEXT=texts),
    "gives ints as text": outputs(OUTPUT0=echo, TEXT=lambda x: objects(x, 7)),
    "gives None as text": outputs(OUTPUT0=echo, TEXT=lambda x: objects(x, None)),
    "gives a list as text": outputs(OUTPUT0=echo, TEXT=lambda x: objects(x, [b"a"])),
    "gives a surrogate as text": outputs(OUTPUT0=echo, TEXT=lambda x: objects(x, "\ud800")),
    # what only looks bad
    "gives float64": outputs(OUTPUT0=lambda x: x.astype(np.float64), TEXT=texts),
    "gives text as str": outputs(OUTPUT0=echo, TEXT=lambda x: objects(x, "tëxt")),
    "prints 10 MB": prints,
    "forks": forks,
    "leaves a child": leaves_a_child,
    # what ends the session
    "exits": raises(SystemExit(3)),
    "is interrupted": raises(KeyboardInterrupt()),
    "is cancelled": raises(asyncio.CancelledError()),
    "ends a generator": raises(GeneratorExit("over")),
    "runs out of memory": raises(MemoryError("no more")),
    # and its process
    "exits at once": lambda inputs: os._exit(4),
    "leaves a child and crashes": leaves_a_child_and_crashes,
    "eats memory": eats_memory,
    "crashes": kills_itself(signal.SIGSEGV),
    "is killed": kills_itself(signal.SIGKILL),
    "is terminated": kills_itself(signal.SIGTERM),
    "closes all files": closes_all_files,
    "answers a size of nothing": writes_to_its_socket(b"\xff" * 8),
    "answers garbage": writes_to_its_socket((6).to_bytes(8, "little") + b"\x02\x00\x00\x00ab"),
    "hangs": hangs,
}


def value_of(act: str) -> float:
    """The input that has the model do so."""
    return float([*ACTS].index(act))


class Model:
    inputs = (("INPUT0", "FP32", (-1, 16)),)
    outputs = (("OUTPUT0", "FP32", (-1, 16)), ("TEXT", "BYTES", (-1, 1)))

    def __init__(self, at_load: str = "good", at_close: str = "good") -> None:
        self.at_load = at_load
        self.at_close = at_close

    def load(self) -> None:
        self._act(self.at_load, {"INPUT0": np.zeros((1, 16), np.float32)})

    def predict(self, inputs: dict[str, np.ndarray]) -> Any:
        return self._act([*ACTS][int(inputs["INPUT0"][0, 0])], inputs)

    def close(self) -> None:
        self._act(self.at_close, {"INPUT0": np.zeros((1, 16), np.float32)})

    def _act(self, act: str, inputs: dict[str, np.ndarray]) -> Any:
        return ACTS[act](inputs)
