"""When a process that serves looks for garbage.

What it has loaded stays, and Python goes through all of it every hundred thousand requests or so: for 40 ms with ONNX Runtime,
110 ms with scikit-learn. Meanwhile nothing runs, and hundreds of requests are late. So what is there once the models are
loaded is left out. Only for processes of our own: it is a setting of the whole interpreter.
"""

import gc
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Look for garbage less often: importing and loading leave little, and where PyTorch is, looking takes long."""
    usual = gc.get_threshold()
    gc.set_threshold(50_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


class _Pause:
    """Several may ask for it at once, on any thread: it is over when the last one is done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._askers = 0
        self._usual = True

    def __enter__(self) -> None:
        with self._lock:
            if not self._askers:
                self._usual = gc.isenabled()
                gc.disable()
            self._askers += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._askers -= 1
            if not self._askers and self._usual:
                gc.enable()


collecting_nothing: Final = _Pause()
"""Within it nothing looks for garbage: what makes many lists, none of them garbage, would pay for going through them all."""


def leave_out() -> None:
    """From now on, look only through what comes after this call, which takes no time."""
    gc.freeze()


def take_in() -> None:
    """Look through everything once more, when that is due by itself, and then leave out what is there.

    To be called when models have come or gone: what an unloaded one has left is freed then.
    """
    gc.unfreeze()
    if _looked not in gc.callbacks:
        gc.callbacks.append(_looked)


def _looked(phase: str, info: Mapping[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2:
        gc.callbacks.remove(_looked)
        leave_out()
