"""Loads and unloads that are asked for: one is carried out for all who ask for the same meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from gateway.errors import GatewayError


@dataclass(slots=True, eq=False)
class _Change:
    """A load or unload of a model. Its task ends with the error that it met, and raises none."""

    loaded: bool
    task: asyncio.Task[GatewayError | None] = field(init=False)


class Changes:
    """Loads and unloads that are not done, each a task of its own: who asked for it only waits for its end, and may go away.

    Whoever asks for what was asked for last joins that. Whoever asks for what waits before it joins that, and puts it last. So
    of a model one is carried out and two wait, at most, however many ask for loads and unloads in turn.
    """

    def __init__(
        self, carry_out: Callable[[str, bool], Awaitable[GatewayError | None]], turn: Callable[[str], asyncio.Lock]
    ) -> None:
        """carry_out: of a model's name, and whether it is to be loaded. turn: of a model, held meanwhile."""
        self._carry_out = carry_out
        self._turn = turn
        self._changes: dict[str, list[_Change]] = {}  # by model, in order; the first is carried out, or comes next

    async def ask(self, name: str, loaded: bool) -> None:
        """Raises: GatewayError, as carry_out gave it."""
        changes = self._changes.setdefault(name, [])
        if not changes or changes[-1].loaded != loaded:
            change = next((each for each in changes[1:] if each.loaded == loaded), None)
            if change is None:
                change = _Change(loaded)
                change.task = asyncio.get_running_loop().create_task(self._run(name, change))
            else:
                changes.remove(change)
            changes.append(change)
        error = await asyncio.shield(changes[-1].task)
        if error is not None:
            raise error.with_traceback(None)  # several may raise it

    def tasks(self) -> Iterator[asyncio.Task[GatewayError | None]]:
        for changes in self._changes.values():
            for change in changes:
                yield change.task

    async def _run(self, name: str, change: _Change) -> GatewayError | None:
        changes = self._changes[name]
        try:
            while True:
                async with self._turn(name):
                    if changes[0] is change:  # else it was put behind that, which waits for its turn
                        return await self._carry_out(name, change.loaded)
        finally:
            changes.remove(change)
            if not changes:
                del self._changes[name]
