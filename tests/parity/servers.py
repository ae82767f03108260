"""The two servers with the same models, and one face for tritonclient's four clients."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
import yaml

from tests.parity.models import PAIRS
from tests.triton_server import triton_server

CLIENTS = ("http", "grpc", "http.aio", "grpc.aio")


@dataclass(frozen=True, slots=True)
class Server:
    """http, grpc: host:port."""

    http: str
    grpc: str


@contextlib.contextmanager
def both_servers(directory: Path) -> Iterator[dict[str, Server]]:
    """A gateway and a Triton, each with PAIRS."""
    with _gateway(directory) as gateway, _triton(directory / "triton") as triton:
        yield {"gateway": gateway, "triton": triton}


@contextlib.contextmanager
def _gateway(directory: Path) -> Iterator[Server]:
    config = directory / "gateway.yaml"
    models = [pair.gateway_config() for pair in PAIRS]
    server = {"http_port": 0, "grpc_port": 0, "drain_timeout_s": 2, "model_control": True}
    config.write_text(yaml.safe_dump({"server": server, "models": models}))
    command = [sys.executable, "-m", "gateway.cli", "serve", "--no-ray", str(config)]
    with (directory / "gateway.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        words = process.stdout.readline().split()  # "gateway ready http=… grpc=…"
        if words[:2] != ["gateway", "ready"]:
            raise RuntimeError(f"the gateway did not come up:\n{(directory / 'gateway.log').read_text()[-4000:]}")
        ports = dict(word.split("=", 1) for word in words[2:])
        yield Server(ports["http"], ports["grpc"])
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=5)
        process.stdout.close()


@contextlib.contextmanager
def _triton(directory: Path) -> Iterator[Server]:
    for pair in PAIRS:
        pair.write_for_triton(directory / "models")
    started = [pair.name for pair in PAIRS if pair.load_at_start]
    with triton_server(directory, load=started) as server:
        yield Server(server.http_url, server.grpc_url)


class Client:
    """One of tritonclient's clients; its coroutines are run to their end, so that a case reads the same for all four."""

    def __init__(self, kind: str, server: Server) -> None:
        """kind: one of CLIENTS."""
        self.kind = kind
        self.protocol = kind.removesuffix(".aio")
        self.server = server
        self.module: Any = tritonclient.http if self.protocol == "http" else tritonclient.grpc
        self._runner = asyncio.Runner() if kind.endswith(".aio") else None
        url = server.http if self.protocol == "http" else server.grpc
        make: Callable[..., Any] = self.module.InferenceServerClient
        if self._runner is None:
            self._client = make(url)
        else:
            make = (tritonclient.http.aio if self.protocol == "http" else tritonclient.grpc.aio).InferenceServerClient
            self._client = self._runner.run(_made(make, url))

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the client and wait for its outcome."""
        result = getattr(self._client, method)(*arguments, **options)
        return result if self._runner is None else self._runner.run(result)

    def stream(self, requests: list[dict[str, Any]]) -> list[tuple[Any, Exception | None]]:
        """Send requests over ModelStreamInfer; gives one (result, error) per answer. gRPC only."""
        if self._runner is not None:
            return self._runner.run(_streamed(self._client, requests))
        answers: list[tuple[Any, Exception | None]] = []
        self._client.start_stream(lambda result, error: answers.append((result, error)))
        for request in requests:
            self._client.async_stream_infer(**request)
        self._client.stop_stream()  # waits for the answers
        return answers

    def close(self) -> None:
        if self._runner is None:
            self._client.close()
        else:
            self._runner.run(self._client.close())
            self._runner.close()


async def _made(make: Callable[..., Any], url: str) -> Any:
    # The asyncio clients bind themselves to the running loop.
    return make(url)


async def _streamed(client: Any, requests: list[dict[str, Any]]) -> list[tuple[Any, Exception | None]]:
    async def given() -> Any:
        for request in requests:
            yield request

    return [answer async for answer in client.stream_infer(given())]
