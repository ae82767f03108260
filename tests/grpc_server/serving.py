"""A gRPC listener over a real repository of synthetic models, on the loop of the test."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import numpy as np
import pytest
import uvloop
import yaml
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from gateway.config import parse_config
from gateway.edges.grpc_server import GrpcServer
from gateway.engine.repository import Repository, RepositoryControl
from gateway.process.certificates import Certificates
from tests.engine.repositories import new_repository

CONTROLLED = "server: {model_control: true}\n"  # before the models: clients may load and unload them
MODELS = """
models:
  - name: echo
    max_rows: 8
    inputs: [{name: INPUT0, datatype: FP32, shape: [-1, 4]}]
    outputs: [{name: OUTPUT0, datatype: FP32, shape: [-1, 4], labels: [zero, one, two, three]}]
    backends: [{kind: synthetic, fixed_ms: 0.1, row_ms: 0, faults: {fail: 666}}]
  - name: later
    load_at_start: false
    max_rows: 0
    inputs: [{name: INPUT0, datatype: BYTES, shape: [-1]}]
    outputs: [{name: OUTPUT0, datatype: BYTES, shape: [-1]}]
    backends: [{kind: synthetic, fixed_ms: 0, row_ms: 0}]
"""
SLOW = (
    MODELS
    + """\
  - name: slow
    max_rows: 1
    batching: {max_queue_rows: 3, probe_s: 0}
    inputs: [{name: INPUT0, datatype: FP32, shape: [-1, 4]}]
    outputs: [{name: OUTPUT0, datatype: FP32, shape: [-1, 4]}]
    backends: [{kind: synthetic, fixed_ms: 200, row_ms: 0}]
  - name: hangs
    max_rows: 1
    inputs: [{name: INPUT0, datatype: FP32, shape: [-1, 4]}]
    outputs: [{name: OUTPUT0, datatype: FP32, shape: [-1, 4]}]
    backends: [{kind: synthetic, fixed_ms: 0, faults: {hang: 77}, hang_timeout_s: 1}]
"""
)


LONG = """
models:
  - {name: long, max_rows: 8, backends: [{kind: python, model: "tests/grpc_server/serving.py:Long", sessions: 1}]}
"""


class Long:
    """Gives 20 kB for each row, after `sleep_ms`; fails with a long text on 3, and with one that is none on 4."""

    inputs = (("INPUT0", "FP32", (-1, 4)),)
    outputs = (("OUTPUT0", "FP32", (-1, 6000)),)

    def predict(self, inputs: dict[str, np.ndarray], parameters: dict[str, Any]) -> dict[str, np.ndarray]:
        if (inputs["INPUT0"] == 3).any():
            raise ValueError("ä" * 5_000_000)
        if (inputs["INPUT0"] == 4).any():
            raise ValueError("\ud800" * 5000)
        time.sleep(parameters.get("sleep_ms", 0) / 1e3)
        return {"OUTPUT0": np.zeros((len(inputs["INPUT0"]), 6000), np.float32)}


class Breaks:
    """A control that raises what nobody expects of it."""

    def __init__(self, fault: type[BaseException]) -> None:
        self.fault = fault

    async def publish(self, name: str, loaded: bool) -> None:
        await asyncio.sleep(0)
        raise self.fault("out of order")  # a new one: it holds what it passed through


@dataclass(frozen=True, slots=True)
class Served:
    """url: host:port, as tritonclient takes it."""

    url: str
    repository: Repository
    server: GrpcServer
    channel: grpc.aio.Channel
    stub: Any


@asynccontextmanager
async def serving(
    text: str = MODELS,
    *,
    control: RepositoryControl | None = None,
    certificates: Certificates | None = None,
    credentials: grpc.ChannelCredentials | None = None,
) -> AsyncIterator[Served]:
    """credentials: of the channel, where the server has certificates."""
    with TemporaryDirectory() as directory:
        config = parse_config(yaml.safe_load(text), source="models.yaml")
        repository = new_repository(config, Path(directory), control=control)
        await repository.start()
        server = GrpcServer(repository, config.server.limits)
        port = await server.start("127.0.0.1", 0, certificates=certificates)
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        address = f"127.0.0.1:{port}"
        made = (
            grpc.aio.insecure_channel(address, options=options)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, options=options)
        )
        async with made as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            try:
                yield Served(f"127.0.0.1:{port}", repository, server, channel, stub)
            finally:
                await server.drain(0.1)
                await asyncio.wait_for(repository.close(), 10)
                repository.regions.close()


async def failure(call: grpc.aio.Call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine test on uvloop, as the gateway runs, for at most 30 s."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(asyncio.wait_for(test(*args, **kwargs), 30))

    return run


def infer_request(
    model: str = "echo", value: float = 0.0, *, rows: int = 1, request_id: str = "", **parameters: int
) -> pb.ModelInferRequest:
    """rows of four values."""
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[rows, 4])
    return pb.ModelInferRequest(
        model_name=model,
        id=request_id,
        inputs=[tensor],
        raw_input_contents=[np.full((rows, 4), value, np.float32).tobytes()],
        parameters={key: pb.InferParameter(int64_param=given) for key, given in parameters.items()},
    )
