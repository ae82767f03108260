"""When a process that serves looks for garbage.

What it has loaded stays, and Python goes through all of it every hundred thousand requests or so: for 40 ms with ONNX Runtime,
110 ms with scikit-learn. Meanwhile nothing runs, and hundreds of requests are late. So what is there once the models are
loaded is left out, and what comes then and stays. Only for processes of our own: it is a setting of the whole interpreter.
"""

import gc
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Look for garbage hardly ever, and afterwards through nothing that came meanwhile.

    Importing and loading make hundreds of thousands of objects, which stay: a look goes through all that have come since the
    last, and took a tenth of the time until the first answer. With PyTorch there are a million.
    """
    usual = gc.get_threshold()
    gc.set_threshold(500_000, 20, 50)
    try:
        yield
    finally:
        gc.freeze()  # else the next look, which is due at once, goes through it all
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


_OFTEN: Final = (2500, 1, 2)
"""With Python's own, which are 700, 10 and 10, several times as much has come when it looks through all of it.

64 requests of as many models are 1100 objects at once, which are gone when they are answered: with 700 it went through each
request's, for nothing and in 6 µs.
"""

_FEW: Final = 3000
"""Objects that it goes through in 1 to 2 ms."""


class _LeftOut:
    """What is not looked through."""

    def __init__(self) -> None:
        self._objects: int | None = None  # when everything was looked through; None: it is to be
        self._added = 0  # since, at most

    def leave_out(self) -> None:
        gc.freeze()
        self._objects, self._added = gc.get_freeze_count(), 0
        if self._looked not in gc.callbacks:
            gc.callbacks.append(self._looked)
            gc.set_threshold(*_OFTEN)

    def take_in(self) -> None:
        gc.unfreeze()
        self._objects = None

    def _looked(self, phase: str, info: Mapping[str, int]) -> None:
        if phase != "stop" or info["generation"] != 2:
            return
        if self._objects is None:
            self.leave_out()
            return
        stayed = len(gc.get_objects(generation=2))
        if stayed < _FEW:
            return
        gc.freeze()
        self._added += stayed
        if self._added > self._objects / 2:
            self._added = gc.get_freeze_count() - self._objects  # to count them takes milliseconds
            if self._added > self._objects / 2:
                self.take_in()


_left_out: Final = _LeftOut()


def leave_out() -> None:
    """From now on, look only through what comes after this call.

    Whenever thousands of objects have outlived a look through all that came, they are left out as well: so no look takes long,
    however much is kept. What of them becomes garbage that only a look finds is freed once what is left out has grown by half:
    then everything is looked through.
    """
    _left_out.leave_out()


def take_in() -> None:
    """Look through everything once more, when that is due by itself, and then leave out what is there.

    To be called when models have gone: what they have left is freed then.
    """
    _left_out.take_in()
