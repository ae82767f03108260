"""What a server answers to each of many requests, so that two servers can be compared.

Outside measured time: a few threads that wait for one answer each. Everything is bounded: the requests at once, the time of
all, and how often a server that is busy, or hung up, is asked again.
"""

import contextlib
import http.client
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from backends.base import Tensors
from gateway.errors import InvalidArgument
from gateway.process.credentials import with_status
from gateway.wire.tensors import tensor_from_bytes
from loadtest.errors import TargetError
from loadtest.load.aws_keys import AwsKeys
from loadtest.load.payloads import Request, encode_body, grpc_request, infer_path
from loadtest.load.signing import signed_headers
from loadtest.load.target import Address
from loadtest.load.v2_json import array_of, brief, checked, listed, named, parameters_of, parsed
from loadtest.results import LoadSpec
from loadtest.search.events import INCOMPARABLE, UNREACHED
from loadtest.verdict.agreement import LEAST_INPUTS, agreement, described, difference, of_all

MOST_INPUTS: Final = 500  # of a larger payload, evenly spread: more tell the 1st percentile hardly better
_AT_ONCE: Final = 4  # so that batches form, as they will
_PAUSE_S: Final = 0.05  # before a server that is busy, or hung up, is asked again; doubles up to
_LONGEST_PAUSE_S: Final = 0.4
_HANG_UPS: Final = 6  # in a row: then nobody is there
_LONGEST_S: Final = 10.0  # one answer
_MAX_ANSWER_BYTES: Final = 64 << 20
_BUSY: Final = frozenset({429, 503, 504})


class _Busy(Exception):
    """The server refuses for now; the message says in which words."""


class _HungUp(Exception):
    """There is no connection, or no longer."""


class _BlockingClient(Protocol):
    """Asks one server, from one thread."""

    def ask(self, request: Request) -> Tensors:
        """Raises: TargetError; _Busy; _HungUp."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Compared:
    """agreement: None if nothing could be compared, and `failure` says why. statistic: in words."""

    agreement: float | None = None
    inputs: int = 0
    statistic: str = ""
    failure: str = ""


def spread(requests: Sequence[Request]) -> list[Request]:
    """At most MOST_INPUTS of them, evenly."""
    count = min(len(requests), MOST_INPUTS)
    return [requests[index * len(requests) // count] for index in range(count)]


def answers_of(
    spec: LoadSpec, address: Address, model: str, requests: Sequence[Request], *, seconds: float, stop: threading.Event
) -> list[Tensors | None]:
    """The server's answer to each, in their order; None where there was none when `seconds` had passed or `stop` was set.

    Blocks. A request that finds the server busy is sent again, alone, until it is answered: a gateway that sheds what would be
    late for its SLO still runs a single one. Raises: TargetError, for the first request that is not answered well, or if too
    few are in time because the server was busy.
    """
    until_s = time.monotonic() + seconds
    answers: list[Tensors | None] = [None] * len(requests)
    todo = iter(range(len(requests)))
    taking, alone = threading.Lock(), threading.Lock()
    refusals: list[str] = []

    def work() -> None:
        with contextlib.closing(_client_of(spec, address, model)) as client:
            while not stop.is_set() and time.monotonic() < until_s:
                with taking:
                    index = next(todo, None)
                if index is None:
                    return
                try:
                    try:
                        answers[index] = client.ask(requests[index])
                    except (_Busy, _HungUp):
                        with alone:
                            answers[index] = _insist(client, requests[index], until_s, stop)
                except _Busy as exc:
                    refusals.append(str(exc))
                except BaseException:
                    stop.set()  # the others need not go on
                    raise

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="answers") as pool:
        for done in [pool.submit(work) for _ in range(min(_AT_ONCE, len(requests)))]:
            done.result()
    answered = sum(answer is not None for answer in answers)
    if refusals and answered < LEAST_INPUTS:
        told = f"answered only {answered} of {len(requests)} requests in {seconds:.0f} s, {LEAST_INPUTS} are needed"
        more = f": {UNREACHED}" * (answered > 0)  # with more time; who refuses all of them will refuse them again
        raise TargetError(f"{told}: {refusals[-1]}{more}")
    return answers


def _insist(client: _BlockingClient, request: Request, until_s: float, stop: threading.Event) -> Tensors:
    """Raises: TargetError, if nobody is there; _Busy, if the server still is when time is up."""
    hung_up, pause_s = 1, _PAUSE_S
    while True:
        late = stop.wait(pause_s) or time.monotonic() >= until_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        try:
            return client.ask(request)
        except _Busy:
            if late:
                raise
        except _HungUp as exc:
            hung_up += 1
            if late or hung_up >= _HANG_UPS:
                raise TargetError(f"did not answer: {exc}") from exc


def compared(
    requests: Sequence[Request],
    reference: Sequence[Tensors | None],
    candidate: Sequence[Tensors | None],
    *,
    statistics: dict[str, str],
    batched: bool,
) -> Compared:
    """What both answered. batched: whether the first dimension of inputs and outputs is rows. Raises: UsageError, see
    `agreement.compare_of`.
    """
    both = [(r, a, b) for r, a, b in zip(requests, reference, candidate, strict=True) if a is not None and b is not None]
    if len(both) < LEAST_INPUTS:
        told = f"answered only {len(both)} of {len(requests)} requests in the time there was, {LEAST_INPUTS} are needed"
        return Compared(inputs=len(both), failure=f"{told}: {UNREACHED}")
    outputs = ", ".join(sorted(both[0][1]))
    if unknown := sorted(set(statistics) - {"", *both[0][1]}):
        return Compared(failure=f"{INCOMPARABLE}: agreement.statistic names {', '.join(unknown)}, the outputs are {outputs}")
    found = []
    for number, (request, ours, theirs) in enumerate(both, start=1):
        if differs := difference(ours, theirs):
            return Compared(inputs=len(both), failure=f"{INCOMPARABLE}: in answer {number} {differs}")
        found.append(agreement(ours, theirs, rows=request.rows if batched else None, statistics=statistics))
    return Compared(of_all(found), len(found), described(both[0][1], statistics, batched=batched))


def _client_of(spec: LoadSpec, address: Address, model: str) -> _BlockingClient:
    return _BlockingGrpcClient(spec, address, model) if spec.protocol == "grpc" else _BlockingRestClient(spec, address, model)


class _BlockingRestClient:
    def __init__(self, spec: LoadSpec, address: Address, model: str) -> None:
        self._spec = spec
        self._headers = address.headers(spec)
        self._path = infer_path(spec, address, model)
        self._connection = address.http_connection(_LONGEST_S)
        self._authority = address.authority
        self._keys = AwsKeys.find() if spec.sigv4 else None

    def ask(self, request: Request) -> Tensors:
        body, headers = encode_body(self._spec, request.inputs, request.datatypes, request.extras)
        headers |= self._headers
        if self._keys is not None:
            keys = self._keys.current()
            headers = signed_headers(self._path, {"Host": self._authority} | headers, body, self._spec.sigv4, keys)
        try:
            self._connection.request("POST", self._path, body, headers)
            response = self._connection.getresponse()
            answer = response.read(_MAX_ANSWER_BYTES + 1)
        except ConnectionError as exc:  # as a server may do with a connection that was idle
            self._connection.close()
            raise _HungUp(f"{type(exc).__name__}: {exc}") from exc
        except (OSError, http.client.HTTPException) as exc:
            self._connection.close()
            raise TargetError(f"did not answer: {type(exc).__name__}: {exc}") from exc
        if len(answer) > _MAX_ANSWER_BYTES:
            self._connection.close()
            raise TargetError(f"answered more than {_MAX_ANSWER_BYTES >> 20} MiB to one request")
        if response.status != 200:
            words = with_status(response.status, answer)
            if response.status in _BUSY:
                raise _Busy(words)
            raise TargetError(f"answered {words}")
        return decode_answer(answer, response.headers.get("Inference-Header-Content-Length"))

    def close(self) -> None:
        self._connection.close()


class _BlockingGrpcClient:
    def __init__(self, spec: LoadSpec, address: Address, model: str) -> None:
        from tritonclient.grpc import service_pb2_grpc

        self._spec = spec
        self._model = model
        self._channel = address.grpc_channel()
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._metadata = address.call_metadata(spec)

    def ask(self, request: Request) -> Tensors:
        import grpc
        from tritonclient.grpc import service_pb2

        message = grpc_request(self._spec, self._model, request.inputs, request.datatypes, request.extras)
        try:
            answer = self._stub.ModelInfer(
                service_pb2.ModelInferRequest.FromString(message), timeout=_LONGEST_S, metadata=self._metadata
            )
        except grpc.RpcError as exc:
            words = f"{exc.code().name}: {exc.details()}"
            if exc.code() is grpc.StatusCode.UNAVAILABLE and "connect" in words:
                raise _HungUp(words) from exc
            if exc.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
                raise _Busy(words) from exc
            raise TargetError(f"answered {words}") from exc
        raw = iter(answer.raw_output_contents)
        return {tensor.name: _grpc_array(tensor, raw) for tensor in answer.outputs}

    def close(self) -> None:
        self._channel.close()


def decode_answer(body: bytes, header_bytes: str | None) -> Tensors:
    """The outputs of a v2 REST answer. header_bytes: of its JSON, with the binary extension; None: all of it is JSON.

    Raises: TargetError.
    """
    arrays: Tensors = {}
    try:
        at = head = len(body) if header_bytes is None else int(header_bytes)
        for each in listed(parsed(body[:head]), "outputs"):
            tensor = checked(each, "outputs", ("name", "datatype", "shape"))
            name, taken = str(tensor["name"]), parameters_of(tensor, f"{named(tensor, 'outputs')}: ").get("binary_data_size")
            if taken is None:
                arrays[name] = array_of(tensor, "outputs")
                continue
            shape, taken = _sizes(tensor, taken)
            arrays[name] = tensor_from_bytes(name, tensor["datatype"], shape, body[at : at + taken])
            at += taken
    except InvalidArgument as exc:
        raise TargetError(f"answered what is no v2 response: {exc.message}") from exc
    except ValueError as exc:
        raise TargetError(f"answered what is no v2 response: {exc}") from exc
    return arrays


def _sizes(tensor: Mapping[str, Any], taken: object) -> tuple[list[int], int]:
    """The shape and the bytes of a binary output. Raises: ValueError."""
    try:
        return [int(size) for size in tensor["shape"]], int(taken)  # type: ignore[call-overload]  # what is none is told
    except (ValueError, TypeError, OverflowError) as exc:
        said = f"shape {brief(tensor['shape'])}, binary_data_size {brief(taken)}"
        raise ValueError(f"{named(tensor, 'outputs')}: {said}: expected whole numbers") from exc


def _grpc_array(tensor: Any, raw: Iterator[bytes]) -> np.ndarray:
    """One output of a ModelInferResponse: raw, or in the typed fields."""
    shape = list(tensor.shape)
    try:
        if tensor.HasField("contents"):
            (values,) = [list(field) for _, field in tensor.contents.ListFields()] or [[]]
            data = [value.decode() for value in values] if tensor.datatype == "BYTES" else values
            return array_of({"name": tensor.name, "datatype": tensor.datatype, "shape": shape, "data": data}, "outputs")
        return tensor_from_bytes(tensor.name, tensor.datatype, shape, next(raw, b""))
    except InvalidArgument as exc:
        raise TargetError(f"answered what is no v2 response: {exc.message}") from exc
    except ValueError as exc:
        raise TargetError(f"answered what is no v2 response: {exc}") from exc
