"""Models of no configuration, which SageMaker loads and unloads by name: its multi-model endpoints.

A model is a folder, as SageMaker unpacks it. What is in it is read on a thread, then the repository loads it, as it does for
clients of v2. Loads and unloads of one name wait for each other, in the order they came; each is answered for itself.

Whether the memory suffices is decided before a model is loaded: what it needs are the bytes of its files, and session_bytes for
each process that runs code of its own. That is held against memory_bytes, less what the others need that are here, and against
what the container has left, less spare_bytes and what is being loaded. A load that fails for want of memory all the same is
told likewise, and so is one that fails for want of disk, of descriptors or of threads.

Code of a package runs in processes of its own: it ends with the model, and two packages do not share their modules.

Source: AWS, "Custom Containers Contract for Multi-Model Endpoints".
"""

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from backends.base import LoadFailed
from backends.model_folders import forget_code
from backends.source import is_source
from gateway.config import Backend, ModelSection
from gateway.config.fields import LONGEST_NAME, is_name
from gateway.config.multi_model import MultiModelSection
from gateway.engine import threads
from gateway.engine.repository import Repository
from gateway.errors import (
    AlreadyExists,
    BackendFailed,
    ConfigError,
    GatewayError,
    InvalidArgument,
    NotFound,
    NotReady,
    Overloaded,
    shortened,
)
from gateway.process.kept_folders import let_go, noting
from gateway.process.machine import memory_left_bytes

ReadPackage = Callable[[Path], Sequence[ModelSection]]
"""What a folder is served as. Raises: ConfigError. On a thread."""

PAGE: Final = 100  # models
_SERIES_KEPT: Final = 64  # models that are gone, whose metrics stand on
_LONGEST_URL: Final = 4096
_MIB: Final = 1 << 20
_SHORTAGE: Final = re.compile(
    r"MemoryError|bad_alloc|out of memory|cannot allocate memory|can't allocate memory|status -9\b"
    r"|no space left on device|quota exceeded|too many open files|can't start new thread|resource temporarily unavailable",
    re.IGNORECASE,
)

T = TypeVar("T")

log = logging.getLogger(__name__)


class Listed(NamedTuple):
    """A model that is loaded. url: its folder, as it was given."""

    name: str
    url: str


@dataclass(slots=True)
class _Placed:
    """A model that is loaded, or about to be, or no more. target: what clients call it, if SageMaker has said that.

    kept: folders that were made for it.
    """

    url: str
    target: str
    needs_bytes: int = 0
    ready: bool = False
    kept: list[Path] = field(default_factory=list)


class MultiModel:
    """See the module. On the event loop's thread."""

    def __init__(
        self,
        repository: Repository,
        section: MultiModelSection,
        read: ReadPackage,
        left_bytes: Callable[[], int] = memory_left_bytes,
    ) -> None:
        """left_bytes: what the container has left."""
        self._repository = repository
        self._section = section
        self._read = read
        self._left_bytes = left_bytes
        self._back = threads.WayBack(asyncio.get_running_loop())
        self._placed: dict[str, _Placed] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._reading: set[asyncio.Future[Any]] = set()
        self._gone: dict[str, None] = {}  # in the order in which they went
        self._loads_ended = False

    async def load(self, name: str, url: str, target: str = "") -> None:
        """Load the model of a folder. target: what clients call it; empty: SageMaker has not said that.

        Raises: InvalidArgument, AlreadyExists; Overloaded, if memory does not suffice; BackendFailed, NotReady.
        """
        if not is_name(name):
            got = shortened(name)
            raise InvalidArgument(
                f"model_name: got {got!r}, expected 1 to {LONGEST_NAME} characters, none of them '/' or a control character"
            )
        async with self._turn(name):
            if name in self._placed:
                raise AlreadyExists(f"model '{name}' is loaded already")
            placed = self._placed[name] = _Placed(url, target)
            try:
                await self._load(name, placed)
            except BaseException as exc:
                self._remove(name)
                log.warning("model %s (%s) is not loaded: %s", name, target or "of no target", exc)
                raise
            placed.ready = True
        log.info("model %s (%s) is loaded from %s", name, target or "of no target", url)

    async def unload(self, name: str) -> None:
        """Unload a model, once what was accepted is answered. Raises: NotFound, BackendFailed."""
        async with self._turn(name):
            placed = self._placed.get(name)
            if placed is None:
                raise _unknown(name)
            placed.ready = False
            try:
                await self._repository.apply(name, False)
            finally:
                self._forget(name)
                self._remove(name)

    def get(self, name: str) -> Listed:
        """Raises: NotFound."""
        placed = self._placed.get(name)
        if placed is None or not placed.ready:
            raise _unknown(name)
        return Listed(name, placed.url)

    def page(self, behind: str = "", most: int = PAGE) -> tuple[list[Listed], str]:
        """The loaded models behind a name, in their order, and behind which name the next page is; empty: there is none."""
        names = sorted(name for name, placed in self._placed.items() if placed.ready and name > behind)
        page = [Listed(name, self._placed[name].url) for name in names[:most]]
        return page, names[most - 1] if len(names) > most else ""

    def named(self, target: str) -> str:
        """The name of a model that clients call so; what was asked for, if none is."""
        placed = reversed(self._placed.items())  # the last one, of several
        return next((name for name, each in placed if each.target == target and each.ready), target)

    def end_loads(self) -> None:
        """Refuse loads from now on, and break off those under way. Before the repository's."""
        self._loads_ended = True
        for reading in self._reading:
            reading.cancel()

    # a load

    def _turn(self, name: str) -> asyncio.Lock:
        return self._turns.setdefault(name, asyncio.Lock())

    async def _load(self, name: str, placed: _Placed) -> None:
        folder, files_bytes = await self._beside(name, lambda: _found(placed.url, self._section.root))
        self._reserve(name, placed, files_bytes, 0)
        models = await self._beside(name, lambda: _models_in(folder, name, self._read, placed.kept))
        sessions = sum(b.sessions for model in models for b in model.backends if b.isolation == "process")
        self._reserve(name, placed, files_bytes, sessions)
        self._gone.pop(name, None)
        self._repository.metrics.forget(name)  # its objective may be another now
        self._repository.metrics.add(models)
        self._repository.add(models)
        try:
            await self._repository.apply(name, True)
        except GatewayError as exc:
            with contextlib.suppress(GatewayError):  # of versions that were loaded; the log has it
                await self._repository.apply(name, False)
            self._forget(name)
            raise _shortage(name, exc) or exc from None

    async def _beside(self, name: str, work: Callable[[], T | GatewayError]) -> T:
        """What it gives, on a thread. Raises: what it gives, if that is an error."""
        if self._loads_ended:
            raise NotReady("the server is shutting down", retry_after_s=1.0)
        reading = threads.call(self._back, f"{name} package", work)
        self._reading.add(reading)
        try:
            outcome = await reading
        except asyncio.CancelledError:
            if self._loads_ended and reading.cancelled():
                raise NotReady("the server is shutting down", retry_after_s=1.0) from None
            raise
        except LoadFailed as exc:  # whatever it raised
            error = BackendFailed(f"failed to load '{name}': {exc}")
            raise _shortage(name, error) or error from exc
        finally:
            self._reading.discard(reading)
        if isinstance(outcome, GatewayError):
            raise outcome
        return outcome

    def _reserve(self, name: str, placed: _Placed, files_bytes: int, sessions: int) -> None:
        """Raises: Overloaded."""
        section = self._section
        needs = files_bytes + sessions * section.session_bytes
        others = [each for each in self._placed.values() if each is not placed]
        of = f"model '{name}' needs {needs / _MIB:.1f} MiB ({files_bytes / _MIB:.1f} of files"
        of += f", {sessions} processes of {section.session_bytes / _MIB:.1f})" if sessions else ")"
        if section.memory_bytes is not None:
            left = section.memory_bytes - sum(each.needs_bytes for each in others)
            if needs > left:
                limit = f"multi_model.memory_bytes {section.memory_bytes}"
                raise Overloaded(f"{of}, and of {limit} the {len(others)} models here leave {left / _MIB:.1f} MiB")
        left = self._left_bytes() - section.spare_bytes - sum(each.needs_bytes for each in others if not each.ready)
        if needs > left:
            spared = f"without {section.spare_bytes / _MIB:.1f} for requests (multi_model.spare_bytes)"
            raise Overloaded(f"{of}, and the container has {max(0, left) / _MIB:.1f} MiB left, {spared}")
        placed.needs_bytes = needs

    def _remove(self, name: str) -> None:
        for folder in self._placed.pop(name).kept:
            let_go(folder)

    def _forget(self, name: str) -> None:
        """The repository knows it no more; its series stand until many others have gone."""
        self._repository.forget(name)
        self._gone[name] = None
        if len(self._gone) > _SERIES_KEPT:
            oldest = next(iter(self._gone))
            del self._gone[oldest]
            self._repository.metrics.forget(oldest)


def _unknown(name: str) -> NotFound:
    return NotFound(f"model '{shortened(name)}' is not loaded")


def _shortage(name: str, error: GatewayError) -> Overloaded | None:
    """What a load that has failed for want of what others hold is told as; None: it has failed for another reason."""
    if any(isinstance(each, MemoryError) for each in _causes(error)) or _SHORTAGE.search(error.message):
        return Overloaded(f"model '{name}' could not be loaded for want of memory, disk or the like: {error.words}")
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


# on a thread


def _found(url: str, root: str) -> tuple[Path, int] | InvalidArgument:
    """The folder, and the bytes of its files."""
    got = f"url: got {shortened(url)!r}"
    if not os.path.isabs(url) or len(url) > _LONGEST_URL or "\0" in url:
        return InvalidArgument(f"{got}, expected the path of a folder in {root}")
    allowed, folder = Path(os.path.realpath(root)), Path(os.path.realpath(url))  # which say nothing of links in a circle
    if allowed not in folder.parents:
        return InvalidArgument(f"{got}, expected a folder in {root} (multi_model.root)")
    if not os.path.isdir(folder):  # which also takes what is too long
        there = "no folder" if os.path.exists(folder) else "nothing there"
        return InvalidArgument(f"{got}: {there}; expected the folder of an unpacked model")
    files_bytes = 0
    for where, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                files_bytes += os.stat(os.path.join(where, file)).st_size
    return folder, files_bytes


def _models_in(folder: Path, name: str, read: ReadPackage, kept: list[Path]) -> list[ModelSection] | GatewayError:
    """The versions of the one model in it, by its name here. kept: to which the folders are added that are made for it."""
    try:
        with noting(kept):
            models = read(folder)
    except ConfigError as exc:
        return _shortage(name, exc) or InvalidArgument(f"url: no model that can be served: {exc.words}")
    finally:
        forget_code(folder)
    names = dict.fromkeys(model.name for model in models)
    if len(names) > 1:
        listed = ", ".join(map(repr, names))
        return InvalidArgument(f"url: {len(names)} models ({listed}), expected one: make a package of each")
    return [model.model_copy(update={"name": name, "backends": tuple(map(_apart, model.backends))}) for model in models]


def _apart(backend: Backend) -> Backend:
    """With its sessions in processes, if the package's own code runs in them."""
    if backend.computes_here and is_source(getattr(backend, "model", "")):
        return backend.model_copy(update={"isolation": "process"})
    return backend
