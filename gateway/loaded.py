"""`gateway.load`: a model in this process, called as a function. No sockets, no Ray."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from backends.base import TensorSpec
from gateway.config import Config
from gateway.errors import GatewayError
from gateway.guess import Example
from gateway.hosted import Hosted, Source, configuration, only
from gateway.protocols.rest import ModelCodec
from gateway.protocols.values import request_body
from gateway.repository import Repository
from gateway.types import InferResponse, ParameterValue

Outputs = dict[str, npt.NDArray[Any]]


def load(what: Source, *, model: str | None = None, version: str = "", example: Example | None = None) -> "LoadedModel":
    """Load one model into this process; blocks until it can be called.

    what: what `gateway serve` takes (model.onnx, FILE.py:name, gateway.yaml, …), a configuration as a dict or `Config`, or a
    class or function. model, version: which one, where there are several; without a version the highest. example: one request
    (a file, or arrays by input name), of a model that does not say its inputs.
    Raises: ConfigError, for what is none; GatewayError, if it cannot be loaded.
    """
    return LoadedModel(only(configuration(what, example=example, whole=False), model, version))


class LoadedModel:
    """A model in this process. Life: made by `load` -> predict … -> close, as a context manager or by itself.

    May be called from any thread and any event loop, also at the same time: such calls share batches.
    """

    def __init__(self, config: Config) -> None:
        """config: of this model alone."""
        self._hosted = Hosted(config)
        (one,) = config.models
        spec = self._hosted.ingress.repository.model(one.name).spec
        self._codec = ModelCodec(one.name, one.version, spec, one.ragged, config.server.limits.json_depth)

    def __repr__(self) -> str:
        return f"<LoadedModel {self.name!r} version {self.version}>"

    @property
    def name(self) -> str:
        return self._codec.model

    @property
    def version(self) -> str:
        return self._codec.version

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What it takes; shapes with the rows in front, -1 for any size."""
        return self._codec.spec.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self._codec.spec.outputs

    def predict(
        self,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        outputs: Sequence[str] = (),
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> Outputs:
        """Ask it once; blocks until it has answered.

        inputs: by name. Arrays have the datatype that the model declares; nested lists are taken as such. Shapes: (rows, …), as
        declared. outputs: only these; none means all. parameters: as in a v2 request: `timeout` in microseconds, `priority`,
        and what the model knows. Returns copies, by name. Raises: GatewayError, in the words a server would use (`words`).
        """
        return self._hosted.run(_asked(self._hosted.ingress.repository, self._codec, inputs, outputs, parameters))

    async def predict_async(
        self,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        outputs: Sequence[str] = (),
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> Outputs:
        """The same for a running event loop, which goes on meanwhile. Cancelled, the request leaves the queue."""
        work = _asked(self._hosted.ingress.repository, self._codec, inputs, outputs, parameters)
        return await asyncio.wrap_future(self._hosted.submit(work))

    def close(self) -> None:
        """Answer what is in flight, and free the model. A second call does nothing."""
        self._hosted.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.to_thread(self.close)


async def _asked(
    repository: Repository,
    codec: ModelCodec,
    inputs: Mapping[str, object],
    outputs: Sequence[str],
    parameters: Mapping[str, ParameterValue] | None,
) -> Outputs:
    # As a REST client would write it: what reads and refuses it is what reads and refuses his.
    binary: dict[str, ParameterValue] = {**(parameters or {}), "binary_data_output": True}
    body, json_bytes = request_body(inputs, codec.spec.input_by_name, outputs=outputs, parameters=binary)
    request = codec.decode(body, json_bytes, time.monotonic_ns(), repository.regions.read)
    answered: asyncio.Future[InferResponse | GatewayError | None] = asyncio.get_running_loop().create_future()

    def done(outcome: InferResponse | GatewayError | None) -> None:
        if not answered.done():
            answered.set_result(outcome)

    place = repository.infer(repository.model(codec.model, codec.version), request, done)
    try:
        outcome = await answered
    except asyncio.CancelledError:
        place.cancel()
        raise
    if isinstance(outcome, GatewayError):
        raise outcome.with_traceback(None)
    assert outcome is not None
    return {name: np.array(array) for name, array in outcome.outputs.items()}
