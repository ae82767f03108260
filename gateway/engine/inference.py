"""One inference, from its first decoded byte to its last encoded one: one life for all protocols.

It is resolved once, decoded, submitted, cancelled where it is, answered, encoded, counted, and ended exactly once, whatever
raises. A protocol gives what is its own: how a request is read, how an answer is written, and where either goes.

It takes no task and no future: decoded, it is handed to a lane, whose answer comes back through a callback. A decoupled model
answers in parts: each is encoded and sent when it is there, and where the client does not keep up, the model waits.

What takes long to encode is encoded on a thread, beside the loop. Parts that come meanwhile wait behind it: they leave in their
order.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from gateway.access.rules import INFER
from gateway.engine.failed_requests import FailedRequests
from gateway.engine.place import OnAnswerPart, Place
from gateway.engine.recorders import EndpointMetrics
from gateway.engine.repository import Repository
from gateway.engine.served_model import ServedModel
from gateway.engine.shared_memory import SharedMemoryRegions
from gateway.errors import Cancelled, Code, GatewayError, InternalError, NotFound, NotReady, Unsupported, shortened
from gateway.protocols.tensors import TakesLong
from gateway.tracing.context import TRACEPARENT
from gateway.types import Attributes, Caller, InferRequest, InferResponse, RegionRef, RequestEnd, RequestTrace
from gateway.wire.tensors import Buffer

if TYPE_CHECKING:
    from gateway.access.doors import Doors

log = logging.getLogger(__name__)

Reply_co = TypeVar("Reply_co", covariant=True)
Reply = TypeVar("Reply")


class Codec(Protocol[Reply_co]):
    """Reads the requests for one model version and writes its answers."""

    def encode(
        self, request: InferRequest, response: InferResponse, write_region: Callable[[RegionRef, Buffer, int], None]
    ) -> Reply_co:
        """Raises: InvalidArgument, and what write_region raises; TakesLong, in haste."""
        ...

    def at_leisure(self) -> "Codec[Reply_co]":
        """The same, not in haste."""
        ...


C = TypeVar("C", bound=Codec[Any])


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[C]):
    """A model version that is ready, as one protocol speaks of it."""

    served: ServedModel
    codec: C
    metrics: EndpointMetrics
    attributes: Attributes
    """What a trace says of it."""


class Endpoints(Generic[C]):
    """The models of a repository for one protocol: each is looked for once, until a model is loaded or unloaded."""

    def __init__(
        self, repository: Repository, protocol: str, codec: Callable[[ServedModel], C], doors: "Doors | None" = None
    ) -> None:
        """protocol: what its requests are counted under. doors: who asks for keys; None: nobody."""
        self.repository = repository
        self.protocol = protocol
        self.sampler = repository.tracer.sampler if repository.tracer is not None else None
        self.failures = FailedRequests()
        self.doors = doors
        self._codec = codec
        self._found: dict[tuple[str, str], Endpoint[C]] = {}
        self._generation = -1
        # Not counted under the name that was asked for: a client could fill the memory with names.
        self.nowhere = repository.metrics.endpoint("", "", protocol)

    def find(self, name: str, version: str, caller: Caller) -> Endpoint[C]:
        """version: empty means the highest that is ready. Raises: NotFound, NotReady; what the doors raise."""
        if self.doors is not None:
            self.doors.check(caller, INFER, name)
        repository = self.repository
        if repository.generation != self._generation:
            self._found.clear()
            self._generation = repository.generation
        found = self._found.get((name, version))
        if found is None:
            try:
                served = repository.model(name, version)
            except NotFound as exc:
                raise exc if self.doors is None else self.doors.veiled(caller, exc) from None
            metrics = self.metrics_of(served.name, served.version)
            attributes = _attributes(served.name, served.version)
            found = self._found[name, version] = Endpoint(served, self._codec(served), metrics, attributes)
        return found

    def metrics_of(self, name: str, version: str) -> EndpointMetrics:
        """Of a model of the configuration. Both empty: `nowhere`."""
        return self.repository.metrics.endpoint(name, version, self.protocol)

    def refused(self, error: GatewayError, caller: Caller, arrival_ns: int) -> None:
        """Count a request, and tell the log of it, that was answered with an error before it was known what it asks."""
        now_ns = time.monotonic_ns()
        self.nowhere.failed(error.code, arrival_ns, now_ns)
        took_ns = now_ns - arrival_ns
        self.failures.tell(
            error, model="", version="", protocol=self.protocol, caller=caller, trace=None, took_ns=took_ns, now_ns=now_ns
        )


def _attributes(name: str, version: str) -> Attributes:
    return (("gateway.model", name), ("gateway.version", version)) if name else ()


class Inference(ABC, Generic[C, Reply]):
    """See the module. Life: made -> start -> `answer` or `refuse`, once, perhaps within start. On the event loop's thread.

    caller: who asks.
    """

    operation: ClassVar[str]
    """What a trace calls it: of a few words, without the model's name."""

    __slots__ = (
        "_arrival_ns", "_decoded_ns", "_endpoint", "_endpoints", "_give_up_decoding", "_leave", "_place", "_request", "_trace",
        "caller",
    )  # fmt: skip

    def __init__(self, endpoints: Endpoints[C], caller: Caller, arrival_ns: int) -> None:
        self.caller = caller
        self._endpoints = endpoints
        self._arrival_ns = arrival_ns
        self._decoded_ns = 0
        self._endpoint: Endpoint[C] | None = None
        self._request: InferRequest | None = None
        self._place: Place | None = None
        self._give_up_decoding: Callable[[], object] | None = None  # or encoding
        self._trace: RequestTrace | None = None
        self._leave: Callable[[], None] | None = None  # tells that it is over, where its key is counted

    # what a protocol gives

    @abstractmethod
    def about(self, code: Code | None) -> tuple[str, int]:
        """What a trace says of it in the protocol's own terms: an attribute. code: of its error; None: it went well."""

    @abstractmethod
    def find(self, endpoints: Endpoints[C]) -> Endpoint[C]:
        """The model that is asked. Raises: GatewayError."""

    @abstractmethod
    def decode(self, codec: C, read_region: Callable[[RegionRef, int], Buffer]) -> InferRequest | Callable[[], None]:
        """What it is asked. Raises: GatewayError.

        Where that takes long, it is told to `decoded` later, and this returns what gives up finding out.
        """

    @abstractmethod
    def answer(self, reply: Reply) -> None:
        """Send what the codec has encoded. Raises: GatewayError, if it cannot be sent."""

    @abstractmethod
    def refuse(self, error: GatewayError) -> None:
        """Send an error instead, or behind what `answer` has sent before it raised."""

    # its life

    def start(self, decoded: InferRequest | None = None) -> None:
        """decoded: what was begun before."""
        endpoints = self._endpoints
        repository = endpoints.repository
        caller = self.caller
        try:
            sampler = endpoints.sampler
            # The last is what `begin` would find for nearly every request, at a quarter of the price.
            if sampler is not None and decoded is None and (TRACEPARENT in caller.headers or next(sampler.others, True)):
                self._trace = sampler.begin(caller)
            endpoint = self.find(endpoints)
            if endpoint is not self._endpoint:  # or models have changed meanwhile: begin anew
                decoded = None
            self._endpoint = endpoint
            if endpoints.doors is not None and self._leave is None:
                self._leave = endpoints.doors.enter(caller)
            on_answer_part = self._parts(endpoint) if endpoint.served.spec.decoupled else None
            request = decoded or self.decode(endpoint.codec, repository.regions.read)
            if not isinstance(request, InferRequest):
                self._give_up_decoding = request
                return
            self._request = request
            caller.ran = True
            request.caller, request.trace = caller, self._trace
            self._decoded_ns = time.monotonic_ns()
            self._place = repository.infer(endpoint.served, request, self._done, on_answer_part)
        except GatewayError as exc:
            self._done(exc.without_frames())  # its frames hold this, which may hold it
        except BaseException:
            log.exception("an inference failed before it was with a lane")
            self._done(InternalError("internal error"))

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        if self._place is not None:
            self._place.cancel()
        elif self._give_up_decoding is not None:
            self._give_up_decoding()
            self._done(Cancelled("the client cancelled the request"))

    def decoded(self, outcome: InferRequest | GatewayError) -> None:
        """Go on with what took long to decode."""
        self._give_up_decoding = None
        if isinstance(outcome, InferRequest):
            self.start(outcome)
        else:
            self._done(outcome)

    def _parts(self, endpoint: Endpoint[C]) -> OnAnswerPart:
        """What gets the parts of a decoupled model's answer. Raises: Unsupported, where they cannot be sent."""
        raise Unsupported(
            f"model '{endpoint.served.name}' is decoupled: it answers in parts; ask it by ModelStreamInfer over gRPC, or by "
            f"POST /v2/models/{endpoint.served.name}/generate_stream"
        )

    def _done(self, outcome: InferResponse | GatewayError | None) -> None:
        encoding_ns = time.monotonic_ns()
        self._place = None  # or this and its place would hold each other until the cyclic collector comes
        self._give_up_decoding = None
        endpoint = self._endpoint
        if isinstance(outcome, InferResponse):
            assert endpoint is not None
            assert self._request is not None
            try:
                self.answer(endpoint.codec.encode(self._request, outcome, self._endpoints.repository.regions.write))
            except TakesLong:
                self._encode_beside(outcome, partial(self._give, endpoint, encoding_ns))
                return
            except GatewayError as exc:
                outcome = exc.without_frames()
            except BaseException:  # must cost this request only, not the batch that it came back with
                log.exception("an answer of model %s could not be given", self._request.model)
                outcome = InternalError("internal error")
            else:
                self._answered(endpoint, encoding_ns)
                return
        assert outcome is not None
        self._fail(outcome, encoding_ns)

    def _answered(self, endpoint: Endpoint[C], encoding_ns: int) -> None:
        if self._leave is not None:
            self._over()
        encoded_ns = time.monotonic_ns()
        trace = self._trace
        if trace is None:
            endpoint.metrics.done(self._arrival_ns, self._decoded_ns, encoding_ns, encoded_ns)
            return
        endpoint.metrics.done(self._arrival_ns, self._decoded_ns, encoding_ns, encoded_ns, trace.own)
        self._end_trace(trace, None, encoding_ns, encoded_ns)

    def _over(self) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def _fail(self, outcome: GatewayError, encoding_ns: int) -> None:
        self._over()
        endpoint = self._endpoint
        metrics = self._endpoints.metrics_of(*self._model_asked(outcome)) if endpoint is None else endpoint.metrics
        metrics.failed(outcome.code, self._arrival_ns, encoding_ns)
        self.refuse(outcome)
        self._tell(outcome, encoding_ns)

    def _model_asked(self, error: GatewayError | None) -> tuple[str, str]:
        """Name and version of the model that a failed request was for; empty, where it named none there is."""
        if self._endpoint is not None:
            return self._endpoint.served.name, self._endpoint.served.version
        return error.model if isinstance(error, NotReady) else ("", "")

    def _tell(self, error: GatewayError, known_ns: int) -> None:
        """Leave a failed request in its trace and in the log. known_ns: when its outcome was known."""
        now_ns = time.monotonic_ns()
        if self._trace is not None:
            self._end_trace(self._trace, error, known_ns, now_ns)
        model, version = self._model_asked(error)
        of = {"model": model, "version": version, "protocol": self._endpoints.protocol}
        self._endpoints.failures.tell(
            error, **of, caller=self.caller, trace=self._trace, took_ns=now_ns - self._arrival_ns, now_ns=now_ns
        )

    def _end_trace(self, trace: RequestTrace, error: GatewayError | None, encoding_ns: int, ended_ns: int) -> None:
        request, endpoint = self._request, self._endpoint
        code = None if error is None else error.code
        trace.end = RequestEnd(
            operation=self.operation,
            error="" if code is None else code.value,
            status=self.about(code),
            model=_attributes(*self._model_asked(error)) if endpoint is None else endpoint.attributes,
            rows=0 if request is None else request.rows,
            request_id=self.caller.request_id,
            id="" if request is None or not request.id else shortened(request.id),
            arrival_ns=self._arrival_ns,
            decoded_ns=self._decoded_ns,
            encoding_ns=encoding_ns,
            ended_ns=ended_ns,
        )
        for batch in trace.batches:
            if batch.end is None and batch.ended is None:  # it runs on without its request
                batch.ended = trace.ended
        trace.ended(trace)

    def _encode_beside(self, response: InferResponse, encoded: Callable[[Reply | GatewayError], None]) -> None:
        """Encode what takes long on a thread, which lets others have their turns. encoded: gets it later, or the error."""
        endpoint, request = self._endpoint, self._request
        assert endpoint is not None
        assert request is not None
        codec = endpoint.codec.at_leisure()

        def encode(regions: SharedMemoryRegions) -> Reply:
            reply: Reply = codec.encode(request, response, regions.write)
            return reply

        def done(outcome: Reply | GatewayError) -> None:
            self._give_up_decoding = None
            encoded(outcome)

        try:
            self._give_up_decoding = self._endpoints.repository.long_bodies.on_thread(encode, done)
        except GatewayError as exc:
            encoded(exc.without_frames())

    def _give(self, endpoint: Endpoint[C], encoding_ns: int, encoded: Reply | GatewayError) -> None:
        """Answer with what took long to encode."""
        try:
            if isinstance(encoded, GatewayError):
                raise encoded
            self.answer(encoded)
        except GatewayError as exc:
            self._fail(exc.without_frames(), encoding_ns)
        except BaseException:
            log.exception("an answer of model %s could not be given", endpoint.served.name)
            self._fail(InternalError("internal error"), encoding_ns)
        else:
            self._answered(endpoint, encoding_ns)


class _Made(NamedTuple):
    """A part, and when it was there."""

    response: InferResponse
    at_ns: int


class StreamedInference(Inference[C, Reply]):
    """An inference whose protocol can send an answer in parts.

    A decoupled model (in_parts): `part` …, then `finish`, or `refuse`, which may come behind parts. Any other: `answer` or
    `refuse`.
    """

    __slots__ = (
        "_behind", "_encoding", "_fault", "_first_ns", "_last", "_outcome", "_outcome_waits", "_part_ns", "_untaken",
        "in_parts",
    )  # fmt: skip

    def __init__(self, endpoints: Endpoints[C], caller: Caller, arrival_ns: int) -> None:
        super().__init__(endpoints, caller, arrival_ns)
        self.in_parts = False

    def _parts(self, endpoint: Endpoint[C]) -> OnAnswerPart:
        self.in_parts = True  # only then is there what comes next: most answers are whole
        self._encoding = False  # a part takes long
        self._behind: list[_Made] = []  # parts that wait for that one: as many at most as a model may be ahead
        self._outcome_waits = False  # behind those: `_outcome` says how
        self._outcome: InferResponse | GatewayError | None = None
        self._fault: GatewayError | None = None  # why the rest of the parts is not wanted
        self._first_ns: tuple[int, int] | None = None  # when the first part was there, and encoded
        self._last = False  # the model has said that the part in hand is its last
        self._part_ns = 0  # when the last part was there
        self._untaken = 0  # parts that wait for the client
        return self._part

    @abstractmethod
    def part(self, reply: Reply) -> bool:
        """Send a part. Whether it has left; if not, it waits for the client: call `drained` when it has.

        Raises: GatewayError, if it cannot be sent.
        """

    @abstractmethod
    def finish(self) -> None:
        """There are no more parts. Raises: GatewayError, if what was sent is no answer."""

    def drained(self) -> None:
        """All that was sent has left."""
        if not self.in_parts:
            return
        untaken, self._untaken = self._untaken, 0
        for _ in range(untaken):
            if self._place is not None:
                self._place.taken()

    def _part(self, response: InferResponse) -> None:
        made = _Made(response, time.monotonic_ns())
        if self._encoding:
            self._behind.append(made)
        else:
            self._send_part(made)

    def _send_part(self, made: _Made, encoded: Reply | GatewayError | None = None) -> None:
        """encoded: the part, or why it could not be; None: it is to be encoded."""
        endpoint, request = self._endpoint, self._request
        assert endpoint is not None
        assert request is not None
        self._last = made.response.last
        try:
            if isinstance(encoded, GatewayError):
                raise encoded
            write_region = self._endpoints.repository.regions.write
            reply: Reply = endpoint.codec.encode(request, made.response, write_region) if encoded is None else encoded
            left = self.part(reply)
        except TakesLong:
            self._encoding = True
            self._encode_beside(made.response, partial(self._part_encoded, made))
            return
        except GatewayError as exc:
            self._break_off(exc.without_frames())
            return
        except BaseException:
            log.exception("a part of an answer of model %s could not be given", request.model)
            self._break_off(InternalError("internal error"))
            return
        if self._first_ns is None:
            self._first_ns = made.at_ns, time.monotonic_ns()
            endpoint.metrics.part(None)
        else:
            endpoint.metrics.part(made.at_ns - self._part_ns)
        self._part_ns = made.at_ns
        if not left:
            self._untaken += 1
        elif self._place is not None:  # the model makes more
            self._place.taken()

    def _part_encoded(self, made: _Made, encoded: Reply | GatewayError) -> None:
        """Send what took long, then what waits behind it."""
        self._encoding = False
        self._send_part(made, encoded)
        while self._behind and not self._encoding:
            self._send_part(self._behind.pop(0))
        if self._outcome_waits and not self._encoding:
            self._done(self._outcome)

    def _break_off(self, fault: GatewayError) -> None:
        """Want no more parts."""
        self._fault = fault
        self._behind.clear()
        if self._place is not None:
            self._place.cancel()

    def _done(self, outcome: InferResponse | GatewayError | None) -> None:
        if not self.in_parts:
            super()._done(outcome)
            return
        if self._encoding:
            if not isinstance(outcome, Cancelled):  # it comes behind the parts
                self._place = None
                self._outcome_waits, self._outcome = True, outcome
                return
            self._encoding = False
            if self._give_up_decoding is not None:
                self._give_up_decoding()
        self._behind.clear()
        self._outcome_waits = False
        if outcome is None and self._fault is None:
            assert self._endpoint is not None
            try:
                self.finish()
            except GatewayError as exc:
                self._fault = exc.without_frames()
            except BaseException:
                log.exception("the end of an answer of model %s could not be given", self._endpoint.served.name)
                self._fault = InternalError("internal error")
            else:
                self._place = None
                self._over()
                now_ns, trace = time.monotonic_ns(), self._trace
                stamps_ns = self._arrival_ns, self._decoded_ns, *(self._first_ns or (now_ns, now_ns))
                self._endpoint.metrics.streamed(*stamps_ns, b"" if trace is None else trace.own)
                if trace is not None:
                    self._end_trace(trace, None, now_ns, now_ns)
                return
        super()._done(self._fault or outcome)
