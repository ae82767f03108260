"""`gateway serve` in this process, which may be one of several on the same ports."""

import asyncio
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from gateway.config import Config
from gateway.garbage import collecting_seldom, leave_out, take_in
from gateway.process.announcement import Announce
from gateway.process.code_pages import give_back, libraries
from gateway.process.console import step
from gateway.process.forks import keep_signals_from_forks
from gateway.process.interrupts import Interrupts, end_at_once, say_stopping, stop_signals
from gateway.process.prints import never_raise
from gateway.process.run_dir import hold_run_dir

if TYPE_CHECKING:
    from gateway.engine.multi_model import MultiModel
    from gateway.engine.repository import Repository
    from gateway.ingress import Ingress

MakeMultiModel: TypeAlias = "Callable[[Repository], MultiModel] | None"


@dataclass(frozen=True, slots=True)
class Beside:
    """How a process is one of several on the same ports.

    owner: of the ports; None: it is not. bound: sockets to listen on, by protocol. ending: called when it begins to drain.
    """

    owner: str | None = None
    bound: Mapping[str, Sequence[socket.socket]] = field(default_factory=dict)
    ending: Callable[[], None] = lambda: None


def run(
    config: Config, run_dir: Path, announce: Announce, *, beside: Beside | None = None, multi_model: MakeMultiModel = None
) -> None:
    """Serve in this process until a signal ends it. beside: how it is one of several; None: it is the only one."""
    import uvloop

    never_raise()
    keep_signals_from_forks(stop_signals())  # before the event loop takes some
    with hold_run_dir(run_dir):
        uvloop.run(_serve_until_signal(config, run_dir, announce, beside or Beside(), multi_model))


async def _serve_until_signal(
    config: Config, run_dir: Path, announce: Announce, beside: Beside, multi_model: MakeMultiModel
) -> None:
    with step("starting"), collecting_seldom():
        from gateway.ingress import Ingress

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    interrupts = Interrupts()
    ingress = Ingress(
        config, run_dir=run_dir, owner=beside.owner, bound=beside.bound, on_leave=take_in, multi_model=multi_model
    )

    def interrupted(number: int) -> None:
        meaning = interrupts.meaning(number, time.monotonic())
        if meaning == "stop":
            if beside.owner is None:
                say_stopping(ingress.repository.pending, config.server.drain_timeout_s)
            beside.ending()
            stop.set()
        elif meaning == "end":
            if config.server.run_dir is None and beside.owner is None:
                shutil.rmtree(run_dir, ignore_errors=True)
            end_at_once()

    numbers = stop_signals()
    for number in numbers:
        loop.add_signal_handler(number, interrupted, number)
    try:
        await _serve_until(stop, ingress, announce)
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)  # it is ending: the same press once more must not change how


async def _serve_until(stop: asyncio.Event, ingress: "Ingress", announce: Announce) -> None:
    stay = libraries()
    started = asyncio.ensure_future(ingress.start())
    stopped = asyncio.ensure_future(stop.wait())
    with collecting_seldom():
        await asyncio.wait((started, stopped), return_when=asyncio.FIRST_COMPLETED)
    if started.done():
        try:
            announce(*started.result(), ingress.ready_models())
            await asyncio.sleep(0)  # who has asked meanwhile has the answer first
            leave_out()
            threading.Thread(target=give_back, args=(stay,), name="code pages", daemon=True).start()
            await stopped
        finally:
            stopped.cancel()
            await ingress.drain()
    else:
        started.cancel()
        await asyncio.gather(started, return_exceptions=True)
        await ingress.drain()
