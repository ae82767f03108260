"""The model of a replica: its worker pool, which a client's load opens anew, and a client's unload frees."""

import asyncio
from collections.abc import Callable
from typing import Any

from backends.base import ModelSpec
from gateway.engine.workers import WorkerPool
from gateway.errors import BackendFailed, GatewayError
from gateway.garbage import leave_out, take_in


class HostedModel:
    """On the replica's event loop. Life: open or load, free, load … -> close.

    pool: what runs batches from now on; those before end in the pool that they have begun in. loaded: whether it is open.
    """

    def __init__(self, new_pool: Callable[[], WorkerPool], name: str, on_change: Callable[[], None]) -> None:
        """new_pool: makes a pool that is not open. name: for messages. on_change: called when sessions come or go."""
        self.pool = new_pool()
        self.spec = ModelSpec("", (), (), 0)  # until it is loaded
        self.loaded = False
        self._new_pool = new_pool
        self._name = name
        self._on_change = on_change
        self._asked = 0  # the last load of a client that is known here
        self._tried = 0  # the one that it was read for last
        self._served = 0  # the one that it was read for, or after, and is served
        self._changing = asyncio.Lock()  # one load or release at a time
        self._loading: asyncio.Task[str] | None = None
        self._opening: WorkerPool | None = None
        self._ending: dict[WorkerPool, asyncio.Task[None]] = {}  # they end what they run

    @property
    def sessions(self) -> tuple[int, int]:
        """That are free, and that run a batch."""
        return self.pool.free_slots, self.pool.busy + sum(pool.busy for pool in self._ending)

    async def open(self, load: int = 0) -> None:
        """Read the model. load: the last one of a client before this. Raises: GatewayError: what was there before goes on."""
        load = self._asked = self._tried = max(load, self._asked)
        self._opening = pool = self._new_pool()
        pool.on_change = self._on_change
        try:
            spec = await pool.open()
            if self.loaded and _formed_by(spec) != _formed_by(self.spec):
                await pool.close()
                raise BackendFailed(
                    f"{self._name}: its inputs, outputs or limits have changed, and requests for the old ones are under way: "
                    "unload the model, then load it"
                )
        finally:
            self._opening = None
        if self.loaded:
            self._end(self.pool)
        self.pool, self.spec, self._served, self.loaded = pool, spec, load, True
        leave_out()
        self._on_change()

    async def load(self, load: int) -> str:
        """Have it loaded, once for all who ask. Gives what went wrong; empty: nothing.

        load: the number of a client's load, which what was read before it does not do for; 0: anything does.
        """
        self._asked = max(load, self._asked)
        fault = ""
        while not fault and not (self.loaded and load <= self._served):
            if self._loading is None:
                self._loading = asyncio.get_running_loop().create_task(self._load())
            fault = await asyncio.shield(self._loading)
            if self._tried < load:
                fault = ""  # of what was read before
        return fault

    async def _load(self) -> str:
        try:
            async with self._changing:
                if not self.loaded or self._served < self._asked:
                    await self.open()
        except GatewayError as exc:
            return exc.message
        finally:
            self._loading = None
        return ""

    async def free(self, unused: Callable[[], bool]) -> None:
        """Free the model, if it is unused once no load is under way: return when its memory is free."""
        async with self._changing:
            if self.loaded and unused():
                self.loaded = False
                self._end(self.pool)
                self.pool = self._new_pool()
                await asyncio.wait(self._ending.values())

    def _end(self, pool: WorkerPool) -> None:
        self._ending[pool] = asyncio.get_running_loop().create_task(self._close(pool))

    async def _close(self, pool: WorkerPool) -> None:
        try:
            await pool.close()
        finally:
            del self._ending[pool]
        take_in()

    async def close(self) -> None:
        """End the sessions. What runs or loads is given up; where nothing does, the model has its time to close."""
        if self._loading is not None:
            self._loading.cancel()
        pools = [self.pool] if self._opening is None else [self.pool, self._opening]
        for pool in (*pools, *self._ending):
            if pool.busy or pool is self._opening:
                pool.abort()
        await asyncio.gather(*(pool.close() for pool in pools), *self._ending.values())


def _formed_by(spec: ModelSpec) -> tuple[Any, ...]:
    """What an ingress checks requests against, and forms batches by."""
    return spec.inputs, spec.outputs, spec.max_rows, spec.row_sizes, spec.decoupled, spec.requests_apart
