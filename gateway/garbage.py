"""When a process that serves looks for garbage.

What it has loaded stays, and Python goes through all of it every hundred thousand requests or so: for 40 ms with ONNX Runtime,
110 ms with scikit-learn. Meanwhile nothing runs, and hundreds of requests are late. So what is there once the models are
loaded is left out. Only for processes of our own: it is a setting of the whole interpreter.
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Look for garbage less often: importing and loading leave little, and where PyTorch is, looking takes long."""
    usual = gc.get_threshold()
    gc.set_threshold(50_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


@contextmanager
def collecting_nothing() -> Iterator[None]:
    """Look for no garbage meanwhile: what makes many lists, none of them garbage, would pay for going through them all."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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
