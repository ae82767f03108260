"""The words the gateway's parts speak to each other in: requests, responses, and what is asked of an output."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec

from backends.base import Tensors

ParameterValue = bool | int | float | str
Attributes = tuple[tuple[str, str | int], ...]
"""What a trace says of a request, a batch or a span, by name."""
ALONE: Final = "alone"
"""In the shape key of a request that shares no batch."""


def of_sequence(parameters: Mapping[str, ParameterValue]) -> bool:
    """Whether they say that a request is of a sequence, by which a model may keep state. 0, "" and false say nothing."""
    return bool(parameters.get("sequence_id") or parameters.get("sequence_start") or parameters.get("sequence_end"))


class RegionRef(NamedTuple):
    """A slice of a registered system shared memory region."""

    region: str
    offset: int
    byte_size: int


@dataclass(frozen=True, slots=True)
class OutputRequest:
    """One output a client asked for.

    classification: k > 0 asks for the k best classes instead of the tensor ("score:index[:label]" as BYTES).
    binary: REST only, tensor bytes behind the JSON instead of a JSON list.
    region: where to put the bytes instead of into the response.
    """

    name: str
    classification: int = 0
    binary: bool = False
    region: RegionRef | None = None


class Caller(Protocol):
    """A request as it came over the wire, and the way to its answer. key: whose it is, where keys are asked for: `access`.

    ran: set once a model may have run for it.
    """

    key: Any
    ran: bool

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        """Names in lower case."""
        ...

    @property
    def request_id(self) -> bytes:
        """By which it is known in its answer and in the log."""
        ...

    def tell(self, name: bytes, value: bytes) -> None:
        """Give the answer a header, before it is begun."""
        ...


class _RequestHead(msgspec.Struct, eq=False):
    """What may be given by position."""

    model: str
    version: str
    id: str
    inputs: Tensors
    rows: int
    arrival_ns: int
    outputs: tuple[OutputRequest, ...] = ()


class InferRequest(_RequestHead, kw_only=True, eq=False):
    """One validated inference request.

    inputs: by name; (rows, *per_row), views on the request's bytes where the wire format allows. For a model without a
    batch dimension the whole tensor, and rows is 1.
    outputs: empty means every output of the model.
    arrival_ns, deadline_ns: `Clock.now_ns`; the deadline is the client's own (timeout parameter, gRPC deadline),
    None when it gave none. The lane adds the model's SLO.
    priority: 0 is the model's default, 1 the highest.
    shape_key: requests with equal keys may share a batch, unless these hold `ALONE`.
    form: how its answer is written, for protocols that know several; empty: as the request is.
    caller: who asks, for the log; None: nobody does over a wire. trace: what is noted of it where it is traced.
    plain: it is `unmarked`, of a model that is not ragged, was decoded as it arrived, and no other arrived at the same time.
    False says nothing.
    copied: routing has made it of another, to learn from; nobody reads its answer.
    ran: it has, in a lane that it has left.
    Compared by identity: two equal requests are still two requests.
    """

    parameters: dict[str, ParameterValue] = msgspec.field(default_factory=dict)
    deadline_ns: int | None = None
    priority: int = 0
    shape_key: Hashable = None
    form: str = ""
    caller: Caller | None = None
    trace: "RequestTrace | None" = None
    plain: bool = False
    copied: bool = False
    ran: bool = False

    @property
    def of_sequence(self) -> bool:
        """See `of_sequence`: it is not run again."""
        return bool(self.parameters) and of_sequence(self.parameters)

    @property
    def unmarked(self) -> bool:
        """Whether nothing but its times, its inputs and its parameters tells it from others of its model."""
        marked = self.id or self.priority or self.deadline_ns is not None or self.shape_key is not None
        return self.rows == 1 and not marked


class InferResponse(msgspec.Struct, eq=False):
    """The answer to one request. outputs: those asked for, in that order; (rows, *per_row), views on the batch's outputs.

    last: of a decoupled model, which has said that no part follows this one.
    """

    model: str
    version: str
    id: str
    outputs: Tensors
    parameters: dict[str, ParameterValue] = msgspec.field(default_factory=dict)
    last: bool = False


class SpanContext(msgspec.Struct, frozen=True):
    """A span as other processes name it. trace_id, span_id: 32 and 16 hexadecimal digits. state: `tracestate`, as it came."""

    trace_id: str
    span_id: str
    state: str = ""


class BatchEnd(msgspec.Struct, eq=False, gc=False):
    """How a batch ended: started_ns to finished_ns: of its session; returned_ns: when its outputs were here. `Clock.now_ns`.

    error: a `Code`'s value; empty: it went well. about: what else is told of it, as `spans` names it.
    """

    started_ns: int
    finished_ns: int
    returned_ns: int
    error: str = ""
    about: tuple[str | int, ...] = ()


class _BatchTraceHead(msgspec.Struct, eq=False, gc=False):
    """What may be given by position."""

    parent: bytes
    state: str
    ended: "TraceEnded | None"
    name: str
    closed_ns: int


class BatchTrace(_BatchTraceHead, kw_only=True, eq=False, gc=False):
    """What is noted of a batch with a traced request among its own, in the process that closed it or in a replica that ran it.

    parent: the span in which it is, as `traceparent` names it. ended: takes this once it is all noted; None: the trace of its
    one traced request has it with it. links: each traced request in it, likewise; none: only its parent is, or that is in
    another process. ids: 16 hexadecimal digits of its own span and 16 of its session's within it; empty: nobody was told.
    told: how the latter is named among the parameters of `Session.run`; None: it is not. kind: client, where another process
    runs it, which tells of its session itself; server: there. end: None, while it runs.
    """

    links: tuple[bytes, ...] = ()
    ids: str = ""
    told: Mapping[str, str] | None = None
    kind: Literal["internal", "client", "server"] = "internal"
    end: BatchEnd | None = None


class RequestEnd(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """How a traced request ended.

    operation: as its protocol calls it. error: a `Code`'s value; empty: it went well. status, model: attributes, of its answer
    and of the model that was found. rows: 0, if it never was decoded. request_id, id: the gateway's, and its client's own for
    it. decoded_ns: 0, if it never was. encoding_ns: when its outcome was known.
    """

    operation: str
    error: str
    status: tuple[str, int]
    model: Attributes
    rows: int
    request_id: bytes
    id: str
    arrival_ns: int
    decoded_ns: int
    encoding_ns: int
    ended_ns: int


class RequestTrace(msgspec.Struct, eq=False, gc=False):
    """What is noted of a traced request, until its spans are made of it.

    own: its span, as `traceparent` names it. ended: takes this once it is all noted. parent_id: the span's in which it was
    sent; empty: it begins its trace. state: `tracestate`. batches: that it was part of, in their order.
    """

    own: bytes
    ended: "TraceEnded"
    parent_id: str = ""
    state: str = ""
    batches: list[BatchTrace] = msgspec.field(default_factory=list)
    end: RequestEnd | None = None


TraceEnded = Callable[[RequestTrace | BatchTrace], None]
