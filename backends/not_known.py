"""A value that is not known, because what stands for it in the user's file is at fault.

Whoever reads it is told so by an exception: what would be concluded from it is left alone, the rest is still looked at.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Final, NoReturn, TypeVar

Found = TypeVar("Found")


class NotKnown(BaseException):
    """Raised where such a value is read. No Exception: nobody who expects a mistake of the user may take it for one."""


class _Value:
    """It can be passed on and told by `is`; anything else is a reading."""

    def _refuse(self, *_: object) -> NoReturn:
        raise NotKnown

    __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = __getattr__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse
    __str__ = __int__ = __float__ = __fspath__ = __add__ = __radd__ = __mul__ = __rmul__ = __call__ = _refuse


NOT_KNOWN: Final[Any] = _Value()


def as_far_as_known(*checks: Iterable[Found]) -> Iterator[Found]:
    """What each of several checks finds. One that reads what is not known ends there; what it has found before counts."""
    for check in checks:
        with contextlib.suppress(NotKnown):
            yield from check
