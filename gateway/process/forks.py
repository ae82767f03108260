"""Keeping what ends when this process closes it, such as a listener, from the forks of this process.

A fork holds a copy of each descriptor. What it copied would go on for as long as it lives: a port be taken, a client wait on a
connection that nobody reads, a child not learn that it is to end.
"""

import asyncio
import contextlib
import os
import weakref
from collections.abc import Iterable
from typing import Final, Protocol


class HoldsDescriptors(Protocol):
    def descriptors(self) -> Iterable[int]:
        """Those that it holds now; -1 for one that is closed."""


_holders: Final["weakref.WeakSet[HoldsDescriptors]"] = weakref.WeakSet()


def keep_from_forks(holder: HoldsDescriptors) -> None:
    """Of what it holds a fork has nothing, as long as the holder lives."""
    _holders.add(holder)


def descriptor_of(transport: asyncio.BaseTransport | None) -> int:
    sock = None if transport is None else transport.get_extra_info("socket")
    return -1 if sock is None else int(sock.fileno())


def _let_go() -> None:
    """In a fork. The numbers stay taken: whoever closes one there would close somebody else's by then."""
    with contextlib.suppress(OSError):  # no number is left, even for this
        nothing = os.open(os.devnull, os.O_RDWR)
        for holder in list(_holders):
            for number in holder.descriptors():
                if number >= 0:
                    os.dup2(nothing, number, inheritable=False)
        os.close(nothing)
    _holders.clear()


os.register_at_fork(after_in_child=_let_go)
