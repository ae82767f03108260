"""A real Triton that is killed, or whose model's process is: then it calls itself ready, and calls take a second and fail."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks.ports import free_port
from gateway.config import parse_config
from gateway.engine.repository import Repository
from gateway.errors import GatewayError
from gateway.ingress import Ingress
from gateway.types import InferRequest, InferResponse
from tests.backends.conftest import write_linear
from tests.triton_server import TritonServer, require_triton, triton_server

pytestmark = [pytest.mark.slow, pytest.mark.triton]


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    require_triton()
    folder = tmp_path_factory.mktemp("triton")
    write_linear(folder)
    with triton_server(folder) as server:
        yield server


def config_of(triton: TritonServer, *, repair: bool) -> str:
    return f"""
server: {{http_port: 0, grpc_port: null}}
models:
  - name: m
    slo: {{p99_ms: 2500}}
    inputs: [{{name: INPUT0, datatype: FP32, shape: [-1, 16]}}]
    outputs: [{{name: OUTPUT0, datatype: FP32, shape: [-1, 4]}}]
    max_rows: 8
    backends:
      - kind: triton
        url: "{triton.grpc_url}"
        model: linear
        sessions: 2
        usd_per_hour: 0.1
        repair: {str(repair).lower()}
        timeout_s: 2  # a call may hang for good whose model is unloaded under it
      - {{kind: synthetic, output: sum, fixed_ms: 2, usd_per_hour: 100.0}}
"""


class Traffic:
    """A request every 20 ms, and what became of each."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository
        self.outcomes: list[InferResponse | GatewayError] = []
        self.sent = 0
        self._stop = False

    def send(self, first: float = 1.0) -> None:
        inputs = np.ones((1, 16), np.float32)
        inputs[0, 0] = first
        self.sent += 1
        self.repository.infer(
            self.repository.model("m"),
            InferRequest("m", "1", "", {"INPUT0": inputs}, 1, time.monotonic_ns()),
            self.outcomes.append,
        )

    async def run(self) -> None:
        while not self._stop:
            self.send()
            await asyncio.sleep(0.02)
        await asyncio.sleep(3)  # past every deadline

    def stop(self) -> None:
        self._stop = True

    def health(self) -> str:
        """Of the Triton backend: live, ejected or unavailable."""
        (lane,) = (lane for lane in self.repository.explain("m")["lanes"] if lane["backend"] == "triton")
        return str(lane["health"]).split()[0].rstrip(",") if lane["available"] else "unavailable"

    def out(self) -> bool:
        return self.health() in ("ejected", "unavailable")

    def live(self) -> bool:
        return self.health() == "live"

    async def until(self, condition: Callable[[], bool], limit_s: float) -> None:
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < limit_s, f"still {self.health()} after {limit_s:g} s"
            await asyncio.sleep(0.02)

    def assert_all_served(self) -> None:
        assert len(self.outcomes) == self.sent
        assert [outcome for outcome in self.outcomes if not isinstance(outcome, InferResponse)] == []


@pytest.mark.parametrize("repair", [True, False], ids=["repaired by us", "repaired by hand"])
def test_it_is_ejected_costs_no_request_and_is_back_once_repaired(
    triton: TritonServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, repair: bool
) -> None:
    def being_replaced() -> bool:
        return "unloading and loading" in caplog.text

    async def main() -> None:
        config = parse_config(yaml.safe_load(config_of(triton, repair=repair)), source="x.yaml")
        ingress = Ingress(config, run_dir=tmp_path)
        await ingress.start()
        try:
            traffic = Traffic(ingress.repository)

            def broken() -> bool:
                # A backend that was slow until now may be repaired before it has failed often enough to be ejected.
                if traffic.out() or being_replaced():
                    return True
                traffic.send(-666.0)  # ends the process of the model; unless the other gets it, as Triton seems slow
                return False

            running = asyncio.ensure_future(traffic.run())
            await asyncio.sleep(1)
            assert traffic.health() == "live"
            # Within 2 s, where nothing else keeps Triton, its models' processes and us from two cores.
            await traffic.until(broken, 60.0)
            if not repair:
                await asyncio.to_thread(reload, triton)
            await traffic.until(traffic.live, 60.0)
            await asyncio.sleep(0.5)
            traffic.stop()
            await running
            traffic.assert_all_served()
        finally:
            await ingress.drain()

    asyncio.run(main())


def test_a_server_that_is_killed_costs_no_request_and_is_back_within_ten_seconds_of_running_again(tmp_path: Path) -> None:
    require_triton()
    for name in ("first", "second"):
        write_linear(tmp_path / name)
    port = free_port()

    def start(name: str) -> TritonServer:
        server = servers.enter_context(triton_server(tmp_path / name, options=(f"--grpc-port={port}",)))
        return dataclasses.replace(server, grpc_url=f"127.0.0.1:{port}")

    async def main() -> None:
        first = start("first")
        config = parse_config(yaml.safe_load(config_of(first, repair=True)), source="x.yaml")
        ingress = Ingress(config, run_dir=tmp_path)
        await ingress.start()
        try:
            traffic = Traffic(ingress.repository)
            running = asyncio.ensure_future(traffic.run())
            await asyncio.sleep(1)
            os.kill(first.pid, signal.SIGKILL)
            await traffic.until(traffic.out, 2.0)
            await asyncio.to_thread(start, "second")
            await traffic.until(traffic.live, 10.0)
            await asyncio.sleep(0.5)
            traffic.stop()
            await running
            traffic.assert_all_served()
        finally:
            await ingress.drain()

    with contextlib.ExitStack() as servers:
        asyncio.run(main())


def reload(triton: TritonServer) -> None:
    import tritonclient.grpc

    client = tritonclient.grpc.InferenceServerClient(triton.grpc_url)
    client.unload_model("linear")
    client.load_model("linear")
    client.close()
