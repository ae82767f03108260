"""What dies under load costs no request its answer."""

import asyncio
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.http as httpclient
import tritonclient.http.aio as aioclient
import yaml

from tests.served.gateway_process import served

pytestmark = pytest.mark.slow

KILLS = 3
CONCURRENT = 8
RECOVERY_S = 5.0
CONFIG = {
    "models": [
        {
            "name": "m",
            "max_rows": 8,
            "backends": [{"kind": "synthetic", "isolation": "process", "sessions": 2, "fixed_ms": 5}],
        }
    ]
}


def test_killed_worker_processes_cost_no_request_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(CONFIG))
    answered: list[float] = []

    async def main(address: str, gateway_pid: int) -> None:
        async with aioclient.InferenceServerClient(address, conn_limit=CONCURRENT) as client:
            loading = True

            async def user(number: int) -> None:
                tensor = httpclient.InferInput("INPUT0", [1, 16], "FP32")
                values = np.full((1, 16), number, np.float32)
                tensor.set_data_from_numpy(values)
                while loading:
                    result = await client.infer("m", [tensor])  # raises on any error status
                    assert np.array_equal(result.as_numpy("OUTPUT0"), values)
                    answered.append(time.monotonic())

            users = [asyncio.ensure_future(user(number)) for number in range(CONCURRENT)]
            for _ in range(KILLS):
                await asyncio.sleep(0.5)
                sessions = await sessions_of(gateway_pid, 2)
                sessions[0].kill()
            await sessions_of(gateway_pid, 2)
            asked_again = len(answered) + 2 * CONCURRENT
            async with asyncio.timeout(RECOVERY_S):
                while len(answered) < asked_again:  # noqa: ASYNC110  # by users that stop for no event
                    await asyncio.sleep(0.01)
            loading = False
            await asyncio.wait_for(asyncio.gather(*users), 30)

    with served(path, "--no-ray") as gateway:
        asyncio.run(main(gateway.http, gateway.process.pid))
    assert np.diff(answered).max() < RECOVERY_S


async def sessions_of(pid: int, count: int) -> list[psutil.Process]:
    """The gateway's session processes, once there are so many. Bounded by RECOVERY_S."""
    until = time.monotonic() + RECOVERY_S
    while True:
        found = [child for child in psutil.Process(pid).children() if child.status() != psutil.STATUS_ZOMBIE]
        if len(found) == count:
            return found
        assert time.monotonic() < until, f"{len(found)} of {count} session processes after {RECOVERY_S} s"
        await asyncio.sleep(0.05)
