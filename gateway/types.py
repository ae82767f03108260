"""The words the gateway's parts speak to each other in: requests, responses, and what is asked of an output."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from backends.base import Tensors

ParameterValue = bool | int | float | str


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
    shape_key: requests with equal keys may share a batch.
    Compared by identity: two equal requests are still two requests.
    """

    parameters: dict[str, ParameterValue] = msgspec.field(default_factory=dict)
    deadline_ns: int | None = None
    priority: int = 0
    shape_key: Hashable = None


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
