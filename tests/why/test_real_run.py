"""Decisions of a real run, on real threads and by the real clock, come out the same."""

import asyncio
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from gateway.batching.recorded_file import unpacked
from gateway.batching.replay import replay
from gateway.errors import GatewayError
from gateway.types import InferRequest
from gateway.why.causes import diagnose
from tests.engine.repositories import repository_of
from tests.why.recorded import learned_of

CONFIG = """
models:
  - name: m
    slo: {p99_ms: 30}
    batching: {record_mib: 16}
    backends: [{kind: synthetic, fixed_ms: 1.0, row_ms: 0.05, sessions: 2}]
"""
REQUESTS = 12_000


@pytest.mark.slow
def test_ten_thousand_decisions_of_a_real_run_come_out_the_same(tmp_path: Path) -> None:
    async def run() -> bytes:
        async with repository_of(CONFIG, tmp_path) as repository:
            served = repository.model("m")
            inputs = {"INPUT0": np.zeros((1, 16), np.float32)}
            done = asyncio.Event()
            left = REQUESTS

            def answered(outcome: object) -> None:
                nonlocal left
                left -= 1
                if not left:
                    done.set()

            for index in range(REQUESTS):
                request = InferRequest("m", "1", str(index), inputs, 1, time.monotonic_ns())
                try:
                    place = repository.infer(served, request, answered)
                    if not index % 97:
                        place.cancel()
                except GatewayError as exc:
                    answered(exc)
                if not index % 16:
                    await asyncio.sleep(0.001)
            await done.wait()
            return repository.why("m")

    (lane,) = unpacked(asyncio.run(run()), "here")[0].lanes
    history = replay(lane.recorded())
    assert history.difference is None, str(history.difference)
    assert history.decisions >= 10_000
    assert len(history.requests) == REQUESTS
    diagnose(history, lane.settings, partial(learned_of, lane))
