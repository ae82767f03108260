"""`gateway.load`: a model in this process, called as a function. No sockets, no Ray."""

import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from threading import local
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from backends.base import ModelSpec, TensorSpec
from backends.guest import be_guest
from gateway.config import Config
from gateway.configuring.guess import Example
from gateway.engine.place import OnAnswer, OnAnswerPart, Place
from gateway.engine.repository import Repository
from gateway.errors import Cancelled, GatewayError, InvalidArgument, NotReady
from gateway.from_python.hosted import Hosted, Source, configuration, only
from gateway.protocols.rest import RestCodec
from gateway.protocols.values import request_body
from gateway.types import InferRequest, InferResponse, ParameterValue

Outputs = dict[str, npt.NDArray[Any]]


def load(
    what: Source, *, model: str | None = None, version: str | int | None = None, example: Example | None = None
) -> "LoadedModel":
    """Load one model into this process; blocks until it can be called.

    what: what `gateway serve` takes (model.onnx, FILE.py:name, gateway.yaml, …), a configuration as a dict or `Config`, or a
    class or function. model, version: which one, where there are several; without a version the highest. example: one request
    (a file, or arrays by input name), of a model that does not say its inputs.
    Raises: ConfigError, for what is none; GatewayError, if it cannot be loaded.
    """
    be_guest()
    return LoadedModel(only(configuration(what, example=example, whole=False), model, version))


class LoadedModel:
    """A model in this process. Life: made by `load` -> predict or stream … -> close, as a context manager or by itself.

    May be called from any thread and any event loop, also at the same time: such calls share batches.
    """

    def __init__(self, config: Config) -> None:
        """config: of this model alone."""
        self._hosted = Hosted(config)
        (one,) = config.models
        spec = self._hosted.ingress.repository.model(one.name).spec
        self._codec = RestCodec(one.name, one.version, spec, one.ragged, config.server.limits.json_depth)
        self._streams: weakref.WeakSet[_Parts] = weakref.WeakSet()

    def __reduce__(self) -> str:
        raise TypeError("a loaded model cannot be copied or pickled: call `gateway.load` where it is used")

    def __repr__(self) -> str:
        return f"<LoadedModel {self.name!r} version {self.version}>"

    @property
    def name(self) -> str:
        return self._codec.model

    @property
    def version(self) -> str:
        return self._codec.version

    @property
    def spec(self) -> ModelSpec:
        return self._codec.spec

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
        return self._hosted.run(_whole(self._asks(inputs, outputs, parameters)))

    async def predict_async(
        self,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        outputs: Sequence[str] = (),
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> Outputs:
        """The same for a running event loop, which goes on meanwhile. Cancelled, the request leaves the queue."""
        return await asyncio.wrap_future(self._hosted.submit(_whole(self._asks(inputs, outputs, parameters))))

    def stream(
        self,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        outputs: Sequence[str] = (),
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> "AnswerParts":
        """Ask it once, and give each part of its answer when it is there; of a model that gives one answer, that.

        It is asked when the first part is; the model makes a few parts ahead, and waits for the caller then. Closed early, as
        where a loop over it is left, the model is stopped at its next part. Arguments and errors: as of `predict`; an error may
        come after parts.
        """
        parts = self._parts(self._asks(inputs, outputs, parameters))
        return AnswerParts(lambda: self._hosted.run(parts.next()), lambda: self._end(parts))

    async def stream_async(
        self,
        inputs: Mapping[str, npt.ArrayLike],
        *,
        outputs: Sequence[str] = (),
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> AsyncGenerator[Outputs, None]:
        """The same for a running event loop, with `async for`; a loop that is left early closes it with `aclose`."""
        parts = self._parts(self._asks(inputs, outputs, parameters))
        try:
            while (part := await asyncio.wrap_future(self._hosted.submit(parts.next()))) is not None:
                yield part
        finally:
            self._end(parts)

    def _asks(
        self, inputs: Mapping[str, object], outputs: Sequence[str], parameters: Mapping[str, ParameterValue] | None
    ) -> "_Stated":
        return _Stated(self._hosted.ingress.repository, self._codec, inputs, outputs, parameters)

    def _parts(self, asked: "_Stated") -> "_Parts":
        parts = _Parts(asked)
        self._streams.add(parts)
        return parts

    def _end(self, parts: "_Parts") -> None:
        with contextlib.suppress(NotReady):  # it is closed, and the model with it
            self._hosted.submit(parts.close())

    def close(self) -> None:
        """Answer what is in flight, end the streams that are still open, and free the model. A second call does nothing."""
        for parts in list(self._streams):
            self._end(parts)
        self._hosted.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.to_thread(self.close)


class AnswerParts(Iterator[Outputs]):
    """What `stream` gives: the parts of one answer, by name. Read by one thread; `close` may be called from any."""

    def __init__(self, read: Callable[[], Outputs | None], end: Callable[[], None]) -> None:
        self._read = read
        self._end = end
        self._closed = local()  # by this thread; others may get its number once it has ended

    def __next__(self) -> Outputs:
        """The next part. Raises: GatewayError, as `predict`; Cancelled, if another thread closed it before the last part."""
        try:
            part = None if hasattr(self._closed, "here") else self._read()  # who closed it knows that there is no more
        except BaseException:  # Ctrl-C too
            self.close()
            raise
        if part is None:
            raise StopIteration
        return part

    def close(self) -> None:
        """Stop the model at its next part, and free its session. Does nothing once the last part is made."""
        self._closed.here = True
        self._end()

    def __del__(self) -> None:
        self._end()


class _Stated(NamedTuple):
    """A request as the caller states it."""

    repository: Repository
    codec: RestCodec
    inputs: Mapping[str, object]
    outputs: Sequence[str]
    parameters: Mapping[str, ParameterValue] | None

    def infer(self, done: OnAnswer, on_part: OnAnswerPart | None = None) -> Place:
        """Raises: GatewayError."""
        request = self._request()
        return self.repository.infer(self.repository.model(self.codec.model, self.codec.version), request, done, on_part)

    def _request(self) -> InferRequest:
        # As a REST client would write it: what reads and refuses it is what reads and refuses his.
        given = self.parameters
        if not isinstance(given, Mapping | None):
            raise InvalidArgument(f"parameters: got {type(given).__name__}, expected a dict, such as {{'timeout': 50000}}")
        binary: dict[str, ParameterValue] = {**(given or {}), "binary_data_output": True}
        codec = self.codec
        body, json_bytes = request_body(self.inputs, codec.spec.input_by_name, outputs=self.outputs, parameters=binary)
        return codec.decode(body, json_bytes, time.monotonic_ns(), self.repository.regions.read)


class _Parts:
    """The answer to one request, part by part. On the gateway's loop."""

    def __init__(self, asked: _Stated) -> None:
        self._asked = asked
        self._arrived: asyncio.Queue[InferResponse | GatewayError | None] = asyncio.Queue()
        self._place: Place | None = None
        self._begun = False

    async def next(self) -> Outputs | None:
        """The next part; None: there is none. Raises: GatewayError."""
        if not self._begun:
            self._begun = True
            self._place = self._asked.infer(self._done, self._arrived.put_nowait)
        arrived = await self._arrived.get()
        if arrived is None or isinstance(arrived, GatewayError):
            self._arrived.put_nowait(None)  # for who asks once more
        if isinstance(arrived, GatewayError):
            try:
                raise arrived.without_frames()
            finally:
                del arrived  # or it and this frame would hold each other, and the request
        if arrived is None:
            return None
        if self._place is not None:
            self._place.taken()
        return _copied(arrived)

    def _done(self, outcome: InferResponse | GatewayError | None) -> None:
        self._place = None
        if isinstance(outcome, InferResponse):  # its one answer
            self._arrived.put_nowait(outcome)
            outcome = None
        self._arrived.put_nowait(outcome)

    async def close(self) -> None:
        """Nobody waits for more."""
        if not self._begun:
            self._begun = True
            self._arrived.put_nowait(Cancelled("it was closed before its first part was asked for"))
        if self._place is not None:
            self._place.cancel()


def _copied(response: InferResponse) -> Outputs:
    return {name: np.array(array) for name, array in response.outputs.items()}


async def _whole(asked: _Stated) -> Outputs:
    """The answer. Raises: GatewayError."""
    if (codec := asked.codec).spec.decoupled:
        raise InvalidArgument(f"model '{codec.model}' is decoupled: it answers in parts; call `stream`, and iterate over it")
    answered: asyncio.Future[InferResponse | GatewayError | None] = asyncio.get_running_loop().create_future()

    def done(outcome: InferResponse | GatewayError | None) -> None:
        if not answered.done():
            answered.set_result(outcome)

    place = asked.infer(done)
    try:
        outcome = await answered
    except asyncio.CancelledError:
        place.cancel()
        raise
    if isinstance(outcome, GatewayError):
        try:
            raise outcome.without_frames()
        finally:
            del outcome  # likewise
    assert outcome is not None
    return _copied(outcome)
