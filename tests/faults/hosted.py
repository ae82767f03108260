"""An ingress on a loop and thread of its own, for tests that ask it as clients do."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gateway.config import parse_config
from gateway.ingress import Ingress, Ports
from tests.running_loop import running_loop

_TIMEOUT_S = 30.0


@contextmanager
def hosted(config: dict[str, Any], run_dir: Path) -> Iterator[tuple[Ingress, Ports, asyncio.AbstractEventLoop]]:
    """At its end it is drained, which has to be done in time."""

    async def start() -> tuple[Ingress, Ports]:
        ingress = Ingress(parse_config(config, source="test"), run_dir=run_dir)
        return ingress, await ingress.start()

    with running_loop() as loop:
        ingress, ports = asyncio.run_coroutine_threadsafe(start(), loop).result(_TIMEOUT_S)
        try:
            yield ingress, ports, loop
        finally:
            asyncio.run_coroutine_threadsafe(ingress.drain(), loop).result(_TIMEOUT_S)
