"""Processes that serve side by side on the same ports, and the one that begins them, and others in their places.

This process binds the sockets, a set for each seat, and listens on none; whoever has the seat does. The kernel spreads
connections over the sockets that are listened on. A socket outlives who has its seat: what has come to it when a process ends
waits there for the next. So a process that is replaced in order costs nobody a request, and one that is killed costs what it
had read.

A process says SERVING when it answers, and ENDING when it begins to drain; the next in its seat is begun then. One that ended
before it served closes its seat to clients until another one tries: they come to the others meanwhile.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from gateway.config import ServerSection
from gateway.process import ports
from gateway.process.console import words
from gateway.process.interrupts import Interrupts, end_at_once, say_stopping
from gateway.process.supervisor import ENDING, SERVING, woken_by_signals

_MARGIN_S: Final = 2.5  # beside the drain, of the 3 s that are promised
_LEAST_WAIT_S: Final = 0.1
_MOST_WAIT_S: Final = 5.0
_STEADY_S: Final = 10.0  # who has served for so long has not ended because of how it was begun

Bound = dict[str, list[socket.socket]]
"""Sockets by protocol."""

Begin = Callable[[Bound, int, bool], "subprocess.Popen[bytes]"]
"""Starts a process that listens on these, and tells by this descriptor; whether it is the first of all."""


def bind(server: ServerSection) -> Bound:
    """Sockets that may share their ports with others of this user. Not listened on. Raises: OSError."""
    found: Bound = {}
    try:
        for protocol, port in (("http", server.http_port), ("grpc", server.grpc_port)):
            if port is not None:
                found[protocol] = ports.bind(server.host, port, shared=True)
    except OSError:
        close(found)
        raise
    return found


def close(bound: Bound) -> None:
    for sockets in bound.values():
        for each in sockets:
            each.close()


class _Process:
    """One that was begun in a seat. told: what it says is read from there; None: it says no more."""

    def __init__(self, child: "subprocess.Popen[bytes]", told: int, seat: "_Seat") -> None:
        self.child = child
        self.told: int | None = told
        self.seat = seat
        self.began_s = time.monotonic()
        self.serving = False
        self.ending = False

    def says(self) -> list[str]:
        """Lines that it has said."""
        if self.told is None:
            return []
        said = os.read(self.told, 4096).decode()
        if not said:
            self.deaf()
        return said.splitlines()

    def deaf(self) -> None:
        """Hear it no more."""
        if self.told is not None:
            os.close(self.told)
            self.told = None


class _Seat:
    """bound: the sockets; None: they are closed. due_s: when the next process is to be begun in it."""

    def __init__(self, bound: Bound | None, due_s: float | None) -> None:
        self.bound = bound
        self.due_s = due_s
        self.wait_s = _LEAST_WAIT_S

    def close(self) -> None:
        close(self.bound or {})
        self.bound = None


class Siblings:
    """See the module. On the main thread. Life: run, once."""

    def __init__(self, server: ServerSection, begin: Begin) -> None:
        """server: with the ports that were bound."""
        self._server = server
        self._begin_one = begin
        self._seats = [_Seat(None, 0.0 if number == 0 else None) for number in range(server.ingresses)]
        self._processes: list[_Process] = []
        self._interrupts = Interrupts()
        self._served = False  # by the first; the others are begun then
        self._until_s: float | None = None  # the end of the drain

    def run(self) -> int:
        """Returns the exit code, once all have ended; does not return after a second Ctrl-C."""
        with woken_by_signals() as woken:
            try:
                return self._run(woken)
            finally:
                for process in self._processes:
                    process.child.kill()
                    process.child.wait()
                    process.deaf()
                for seat in self._seats:
                    seat.close()

    def _run(self, woken: int) -> int:
        while True:
            if self._until_s is None:
                self._begin_due()
            elif not self._processes:
                return 0
            told = [each.told for each in self._processes if each.told is not None]
            ready, _, _ = select.select([woken, *told], [], [], self._wait_s())
            for process in [each for each in self._processes if each.told in ready]:
                self._hear(process)
            if woken in ready:
                for number in os.read(woken, 64):
                    self._signalled(number)
            if self._until_s is not None and time.monotonic() >= self._until_s:
                words.error(
                    "ended by force: processes still ran %g s after drain_timeout_s %g", _MARGIN_S, self._server.drain_timeout_s
                )
                return 0
            code = self._reap()
            if code is not None:
                return code

    def _wait_s(self) -> float | None:
        times = [seat.due_s for seat in self._seats if seat.due_s is not None] if self._until_s is None else [self._until_s]
        return max(0.0, min(times) - time.monotonic()) if times else None

    # processes

    def _begin_due(self) -> None:
        now_s = time.monotonic()
        for seat in self._seats:
            if seat.due_s is not None and seat.due_s <= now_s:
                seat.due_s = None
                try:
                    self._begin(seat)
                except OSError as exc:
                    if not self._served:
                        raise
                    words.error("no process could be begun: %s; it is tried again in %g s", exc, _MOST_WAIT_S)
                    seat.due_s = now_s + _MOST_WAIT_S

    def _begin(self, seat: _Seat) -> None:
        if seat.bound is None:
            seat.bound = bind(self._server)
        told, tell = os.pipe()
        try:
            child = self._begin_one(seat.bound, tell, not self._served)
        except BaseException:
            os.close(told)
            raise
        finally:
            os.close(tell)
        self._processes.append(_Process(child, told, seat))

    def _hear(self, process: _Process) -> None:
        for line in process.says():
            if line == SERVING:
                process.serving = True
                if not self._served:
                    self._served = True
                    for seat in self._seats[1:]:
                        seat.due_s = 0.0
            elif line == ENDING and not process.ending:
                process.ending = True
                if self._until_s is None:
                    words.info("process %d ends: another takes its place", process.child.pid)
                    process.seat.due_s = 0.0

    def _reap(self) -> int | None:
        """Take in who has ended. Returns an exit code, if that is the end of all."""
        for process in list(self._processes):
            code = process.child.poll()
            if code is None:
                continue
            self._hear(process)  # its last words
            process.deaf()
            self._processes.remove(process)
            if self._until_s is not None or process.ending:
                continue
            if not self._served:
                return code if code > 0 else 1
            self._replace(process, code)
        return None

    def _replace(self, process: _Process, code: int) -> None:
        seat, now_s = process.seat, time.monotonic()
        if process.serving and now_s - process.began_s >= _STEADY_S:
            seat.wait_s = _LEAST_WAIT_S
        if not process.serving:  # clients would wait for one that may not come
            seat.close()
        seat.due_s = now_s + seat.wait_s
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        words.error("process %d %s: another takes its place in %.1f s", process.child.pid, how, seat.wait_s)
        seat.wait_s = min(2 * seat.wait_s, _MOST_WAIT_S)

    # signals

    def _signalled(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return
        meaning = self._interrupts.meaning(number, time.monotonic())
        if meaning == "end":
            for process in self._processes:
                process.child.kill()
            end_at_once()
        if meaning == "stop":
            say_stopping(None if self._served else 0, self._server.drain_timeout_s)
            self._until_s = time.monotonic() + self._server.drain_timeout_s + _MARGIN_S
            for seat in self._seats:  # or the kernel would still take connections, once those who listen have closed theirs
                seat.close()
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError):
                    process.child.terminate()


def sockets_of(bound: Mapping[str, Sequence[int]]) -> Bound:
    """In the process that was begun: the sockets by their descriptors."""
    return {protocol: [socket.socket(fileno=number) for number in numbers] for protocol, numbers in bound.items()}
