"""An ingress on a loop and thread of its own, for tests that ask it as clients do."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from gateway.config import parse_config
from gateway.ingress import Ingress, Ports

_TIMEOUT_S = 30.0


@contextmanager
def hosted(config: dict[str, Any], run_dir: Path) -> Iterator[tuple[Ingress, Ports, asyncio.AbstractEventLoop]]:
    """At its end it is drained, which has to be done in time."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[Ingress, Ports]:
        ingress = Ingress(parse_config(config, source="test"), run_dir=run_dir)
        return ingress, await ingress.start()

    ingress, ports = asyncio.run_coroutine_threadsafe(start(), loop).result(_TIMEOUT_S)
    yield ingress, ports, loop
    asyncio.run_coroutine_threadsafe(ingress.drain(), loop).result(_TIMEOUT_S)
    asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result(_TIMEOUT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(_TIMEOUT_S)
    loop.close()
