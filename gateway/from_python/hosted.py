"""An ingress in a thread of somebody else's process, and the configuration of whatever he names.

The loop has a thread of its own, so it is all the same whether the caller runs one (a notebook, an asyncio program, a test) or
none. What is left open is closed when nobody holds it any more, at the latest when the interpreter ends.
"""

import asyncio
import contextlib
import inspect
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import uvloop

from gateway.config import Config, load_config, parse_config
from gateway.configuring.argument import is_configuration, opened
from gateway.configuring.check import servable
from gateway.configuring.decoration import mark_of
from gateway.configuring.guess import Example, guess
from gateway.errors import ConfigError, NotReady, instead, shortened
from gateway.ingress import Ingress, Ports
from gateway.process.console import hold_standard_files
from gateway.process.run_dir import new_run_dir

T = TypeVar("T")

Source: TypeAlias = str | os.PathLike[str] | Config | Mapping[str, Any] | Callable[..., Any]
"""What can be loaded or served: a path as `gateway serve` takes it, a configuration, or a class or function of a module."""

_ENDING_S: Final = 10.0  # for tasks that end by themselves, when the loop does
_INTERRUPTED_S: Final = 1.0  # for runs that end by themselves, when a close is interrupted

log = logging.getLogger(__name__)


def configuration(what: Source, *, example: Example | None = None, whole: bool = True) -> Config:
    """The configuration that is named, or that serves the model that is.

    example: one request, of a model that does not say its inputs. whole: whether all models of a file are to be served, so that
    what is known to fail is told first. Raises: ConfigError.
    """
    if not isinstance(what, str | os.PathLike | Config | Mapping) and not callable(what):
        raise ConfigError(
            f"got an object of {type(what).__name__}: expected a path, a configuration, or a class or function: write a class "
            "whose `predict` calls that object"
        )
    if not isinstance(example, str | os.PathLike | Mapping | None):
        raise ConfigError(
            f"example: got {type(example).__name__}, expected one request: a file, or a dict of arrays by input name"
        )
    if isinstance(what, str | os.PathLike):
        what = opened(os.fspath(what))
    if isinstance(what, Config | Mapping) or (not callable(what) and is_configuration(os.fspath(what))):
        if example is not None:
            raise ConfigError("example: only for a model: a configuration states its inputs")
        if isinstance(what, Config):
            return what
        if isinstance(what, Mapping):
            return parse_config(what, source="configuration")
        return servable(os.fspath(what), here=True) if whole else load_config(os.fspath(what))
    place = _place(what) if callable(what) else os.fspath(what)
    found = guess(place, example=example)
    for note in found.notes:
        log.info("%s", note)
    document = found.document
    if callable(what):
        document["models"][0]["name"] = mark_of(what).name or what.__name__
    return parse_config(document, source=place)


def _place(code: Callable[..., Any]) -> str:
    """`module:name` of a class or function. Raises: ConfigError, if nothing is found there, or something else is."""
    if not inspect.isclass(code) and not inspect.isroutine(code):
        raise ConfigError(f"got an object of {type(code).__name__}: expected a class or function of a module's top level")
    module, name = code.__module__, code.__qualname__
    if getattr(sys.modules.get(module), name, None) is not code:
        raise ConfigError(
            f"{name}: expected a class or function that its module has under this name: define it at the top level, outside of "
            "functions and classes"
        )
    return f"{module}:{name}"


def only(config: Config, name: str | None, version: str | int | None = None) -> Config:
    """One model of a configuration, to be loaded here and now, without listeners; of its versions the highest.

    name: None, where there is one model. Nothing is learned of its speed beforehand. Raises: ConfigError.
    """
    if not isinstance(name, str | None):
        raise ConfigError(f"model: got {type(name).__name__}, expected a name")
    if isinstance(version, bool) or not isinstance(version, str | int | None):
        raise ConfigError(f"version: got {type(version).__name__}, expected text or an integer")
    version = "" if version is None else str(version)
    names = list(dict.fromkeys(model.name for model in config.models))
    if name is None:
        if len(names) > 1:
            raise ConfigError(f"several models: name one, such as model={names[0]!r}{instead('', names, 'models here')}")
        name = names[0]
    models = [model for model in config.models if model.name == name and version in ("", model.version)]
    if not models:
        if name in names:
            known = sorted((model.version for model in config.models if model.name == name), key=int)
            raise ConfigError(f"no version {shortened(version)} of model '{name}'{instead('', known, 'versions here')}")
        raise ConfigError(f"no model '{shortened(name)}'{instead(name, names, 'models here')}")
    one = max(models, key=lambda model: int(model.version)).model_copy(update={"load_at_start": True})
    return without_listeners(config.model_copy(update={"models": (one,)}))


def without_listeners(config: Config) -> Config:
    """The same, to be asked in this process: nothing is kept of what is learned."""
    server = config.server.model_copy(update={"http_port": None, "grpc_port": None, "state_dir": None})
    return config.model_copy(update={"server": server})


class LoopThread:
    """An event loop in a daemon thread. Life: made -> stop."""

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def here(self) -> bool:
        """Whether the caller runs on it."""
        return threading.current_thread() is self._thread

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin it. Cancelling the future cancels the work."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it, and wait for its end; Ctrl-C cancels it."""
        return _result(self.submit(work))

    def stop(self) -> None:
        """End, after what was begun has ended; not from the thread itself."""
        self.run(self._ended())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _ended(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            _, left = await asyncio.wait(others, timeout=_ENDING_S)
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left, timeout=_ENDING_S)
        with contextlib.suppress(RuntimeError):  # at the end of the interpreter no thread can be started
            await self._loop.shutdown_default_executor()


def _result(future: "Future[T]") -> T:
    """Wait for it; who breaks that off, as Ctrl-C does, wants it no more."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


class Hosted:
    """An ingress on a loop thread. Life: made (models are loaded, listeners listen) -> close. From any thread."""

    def __init__(self, config: Config) -> None:
        """Blocks until all is ready. Without listeners models are run with one length of inputs when they load, and not with
        each: that is soon done, and tells as much of a model's mistakes. Raises: GatewayError; OSError, if a port is taken.
        """
        hold_standard_files()  # of a host that has closed them, for good: nothing of ours may ever take their place
        run_dir, held = new_run_dir()
        self._thread = thread = LoopThread("gateway")
        try:
            self.ingress, self.ports = thread.run(_started(config, run_dir))
        except BaseException:
            thread.stop()
            held.close()
            raise
        self._pending: set[Future[Any]] = set()
        end = _End(thread, self.ingress, self._pending, config.server.drain_timeout_s, held, os.getpid())
        self._closing = weakref.finalize(self, end)
        self._pid = os.getpid()

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin something on the ingress's loop. It should not hold what holds this. Raises: NotReady, once closed."""
        fault = ""
        if os.getpid() != self._pid:
            fault = "it was loaded by another process, of which this is a fork: load it here"
        elif not self._closing.alive:
            fault = "it has been closed: nothing more can be asked of it"
        if fault:
            work.close()
            raise NotReady(fault)
        future = self._thread.submit(work)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something there, and wait for its end. Raises: likewise."""
        return _result(self.submit(work))

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._thread.loop

    def close(self) -> None:
        """Answer what is in flight, within server.drain_timeout_s, and free the models. A second call does nothing."""
        self._closing()


async def _started(config: Config, run_dir: Path) -> tuple[Ingress, Ports]:
    listens = config.server.http_port is not None or config.server.grpc_port is not None
    ingress = Ingress(config, run_dir=run_dir, probe_every_length=listens)
    try:
        return ingress, await ingress.start()
    except BaseException:
        await ingress.drain()
        raise


async def _drained(ingress: Ingress, *, late: bool) -> None:
    cancelled = {task for task in asyncio.all_tasks() if task.cancelling()}
    if cancelled:  # what they have asked leaves its queue first
        await asyncio.wait(cancelled, timeout=_ENDING_S)
    await ingress.drain(late=late)


@dataclass(frozen=True, slots=True)
class _End:
    """What is done when a `Hosted` is closed, or is no more; it may not hold that."""

    thread: LoopThread
    ingress: Ingress
    pending: "set[Future[Any]]"
    drain_timeout_s: float
    run_dir: contextlib.ExitStack
    pid: int

    def __call__(self) -> None:
        if os.getpid() != self.pid:  # a fork has none of the threads, and the directory is not its own
            return
        if self.thread.here:  # the collector came by there
            threading.Thread(target=self).start()
            return
        try:
            late = bool(wait(set(self.pending), self.drain_timeout_s).not_done)
            self.thread.run(_drained(self.ingress, late=late))
        except BaseException:  # Ctrl-C: what is in flight is given up, but nobody else could free the models any more
            with contextlib.suppress(TimeoutError):
                self.thread.run(asyncio.wait_for(_drained(self.ingress, late=False), _INTERRUPTED_S))
            raise
        finally:
            self.thread.stop()
            self.run_dir.close()
