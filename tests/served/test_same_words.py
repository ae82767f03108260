"""The same mistake gets the same words, whichever client makes it: curl's JSON, binary REST, typed and raw gRPC, a gRPC stream,
tritonclient over both; and in this process the test client and a loaded model."""

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import grpc
import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc
import tritonclient.http
import yaml
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

import gateway
from backends.datatypes import datatype_of
from gateway.config import parse_config
from gateway.wire.http_errors import STATUS
from gateway.wire.tensors import tensor_to_bytes

pytestmark = pytest.mark.slow

TIMEOUT_S = 20.0
FILE = Path(__file__)
MODELS = f"""
server: {{drain_timeout_s: 2}}
models:
  - name: pair
    max_rows: 4
    batching: {{max_queue_rows: 16}}
    inputs: [{{name: A, datatype: FP32, shape: [-1, 2]}}, {{name: B, datatype: UINT8, shape: [-1, 2]}}]
    outputs: [{{name: C, datatype: FP32, shape: [-1, 2]}}, {{name: D, datatype: UINT8, shape: [-1, 2]}}]
    backends: [{{kind: synthetic, fixed_ms: 0, row_ms: 0}}]
  - name: words
    inputs: [{{name: TEXT, datatype: BYTES, shape: [-1, 1]}}]
    outputs: [{{name: SAME, datatype: BYTES, shape: [-1, 1]}}]
    backends: [{{kind: synthetic, fixed_ms: 0, row_ms: 0}}]
  - {{name: fails, max_rows: 8, backends: [{{kind: python, model: "{FILE}:Fails"}}]}}
  - {{name: fails apart, max_rows: 8, backends: [{{kind: python, model: "{FILE}:Fails", isolation: process}}]}}
  - {{name: scaled, max_rows: 8, backends: [{{kind: python, model: "{FILE}:scaled"}}]}}
  - {{name: later, load_at_start: false, backends: [{{kind: synthetic}}]}}
"""


class Fails:
    """Raises on 3, with a path of the server; gives the wrong rows on 4."""

    inputs = (("A", "FP32", (-1, 2)),)
    outputs = (("C", "FP32", (-1, 2)),)

    def predict(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        a = inputs["A"]
        if (a == 3).any():
            raise ValueError("no threes in /srv/models/weights.bin\n(see the manual)")
        return {"C": a[1:] if (a == 4).any() else a}


def scaled(A: Annotated[npt.NDArray[np.float32], (-1, 2)], factor: float = 2.0) -> Annotated[npt.NDArray[np.float32], (-1, 2)]:
    return A * np.float32(factor)


@dataclass(frozen=True, slots=True)
class Given:
    """An input as it is sent: elements that may be others than datatype and shape promise. raw: bytes instead of them."""

    name: str
    array: np.ndarray
    datatype: str = "FP32"
    shape: tuple[int, ...] | None = None
    raw: bytes | None = None
    parameters: dict[str, Any] = field(default_factory=dict)

    @property
    def stated(self) -> list[int]:
        return list(self.array.shape if self.shape is None else self.shape)

    @property
    def bytes(self) -> bytes:
        return bytes(tensor_to_bytes(self.array)) if self.raw is None else self.raw


A = Given("A", np.ones((1, 2), np.float32))
B = Given("B", np.ones((1, 2), np.uint8), "UINT8")
THREE_ROWS = Given("B", np.ones((3, 2), np.uint8), "UINT8")
TEXT = Given("TEXT", np.array([[b"a"]], object), "BYTES")


@dataclass(frozen=True, slots=True)
class Mistake:
    """words: begin the answer. by: the clients that can make it; None: all."""

    words: str
    status: int
    code: grpc.StatusCode
    inputs: tuple[Given, ...] = (A, B)
    model: str = "pair"
    version: str = ""
    outputs: tuple[str, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)
    output_parameters: dict[str, Any] = field(default_factory=dict)
    by: tuple[str, ...] | None = None


BAD = (400, grpc.StatusCode.INVALID_ARGUMENT)
UNKNOWN = (404, grpc.StatusCode.NOT_FOUND)
FAILED = (500, grpc.StatusCode.INTERNAL)
RAW_HTTP, RAW_GRPC = ("json", "binary"), ("typed", "raw", "stream")
WRITTEN = ("json", "typed")
AS_BYTES = ("binary", "raw", "stream")
SMALLEST_PAIR = (
    '{"inputs":[{"name":"A","datatype":"FP32","shape":[1,2],"data":[1.0,1.0]},'
    '{"name":"B","datatype":"UINT8","shape":[1,2],"data":[1,1]}]}'
)
OWN = (*RAW_HTTP, *RAW_GRPC)
ON_THE_WIRE = (*OWN, "tritonclient.http", "tritonclient.grpc")  # a loaded model is there already
LOADED = ("pair", "words", "fails", "scaled")

MISTAKES = {
    "unknown model": Mistake(
        "Request for unknown model: 'par' is not found; did you mean 'pair'? models here: 'pair', 'words', 'fails', ",
        *UNKNOWN, model="par", by=ON_THE_WIRE,
    ),
    "unknown version": Mistake(
        "Request for unknown model: 'pair' version 7 is not found; versions here: '1'", *UNKNOWN, version="7", by=ON_THE_WIRE,
    ),
    "a version that is no number": Mistake(
        "Request for unknown model: 'pair' version new is not found; versions here: '1'",
        *UNKNOWN, version="new", by=ON_THE_WIRE,
    ),
    "a model that is not loaded": Mistake(
        "Request for unknown model: 'later' has no available versions (unavailable)",
        503, grpc.StatusCode.UNAVAILABLE, model="later", by=ON_THE_WIRE,
    ),
    "no inputs": Mistake(
        f"expected 2 inputs but got 0 inputs for model 'pair': missing 'A', 'B'; the smallest request: {SMALLEST_PAIR}",
        *BAD, inputs=(),
    ),
    "an input is missing": Mistake(
        f"expected 2 inputs but got 1 inputs for model 'pair': missing 'B'; the smallest request: {SMALLEST_PAIR}",
        *BAD, inputs=(A,),
    ),
    "unknown input": Mistake(
        "unexpected inference input 'AA' for model 'pair'; did you mean 'A'? its inputs: 'A', 'B'",
        *BAD, inputs=(Given("AA", A.array), B),
    ),
    "an input twice": Mistake("input 'A' already exists in request for model 'pair'", *BAD, inputs=(A, A), by=OWN),
    "wrong datatype": Mistake(
        "input 'B' of model 'pair': expected UINT8 [-1, 2], got FP32 [1, 2]", *BAD, inputs=(A, Given("B", A.array))
    ),
    "unknown datatype": Mistake(
        "input 'A' of model 'pair': expected FP32 [-1, 2], got FLOAT [1, 2]", *BAD,
        inputs=(Given("A", A.array, "FLOAT"), B), by=OWN,
    ),
    "wrong dimensions": Mistake(
        "input 'A' of model 'pair': expected FP32 [-1, 2], got FP32 [2]", *BAD, inputs=(Given("A", A.array[0]), B)
    ),
    "wrong width": Mistake(
        "input 'A' of model 'pair': expected FP32 [-1, 2], got FP32 [1, 3]",
        *BAD, inputs=(Given("A", np.ones((1, 3), np.float32)), B),
    ),
    "too many rows": Mistake(
        "model 'pair': ", 413, grpc.StatusCode.INVALID_ARGUMENT,
        inputs=(Given("A", np.ones((9, 2), np.float32)), Given("B", np.ones((9, 2), np.uint8), "UINT8")),
    ),
    "no rows": Mistake(
        "model 'pair': a request needs at least 1 row, got 0", *BAD,
        inputs=(Given("A", np.ones((0, 2), np.float32)), Given("B", np.ones((0, 2), np.uint8), "UINT8")),
        by=("json", "binary", "raw", "stream", "predict"),
    ),
    "rows differ": Mistake(
        "input 'B' of model 'pair' has 3 rows, but input 'A' has 1: all inputs of a request need the same first dimension",
        *BAD, inputs=(A, THREE_ROWS),
    ),
    "unknown output": Mistake(
        "unexpected inference output 'E' for model 'pair'; its outputs: 'C', 'D'", *BAD, outputs=("E",)
    ),
    "too few elements": Mistake(
        "input 'A': got 2 elements, expected 4 for FP32 [2, 2]", *BAD, inputs=(Given("A", A.array, shape=(2, 2)), B), by=WRITTEN
    ),
    "too few bytes": Mistake(
        "unexpected total byte size 8 for input 'A', expecting 16 (FP32 [2, 2])",
        *BAD, inputs=(Given("A", A.array, shape=(2, 2)), B), by=AS_BYTES,
    ),
    "a value out of range": Mistake(
        "input 'B': element 1 is 300, expected UINT8 (0 to 255)",
        *BAD, inputs=(A, Given("B", np.array([[1, 300]]), "UINT8")), by=(*WRITTEN, "predict"),
    ),
    "BYTES that end too soon": Mistake(
        "input 'TEXT': BYTES element 0 of 1 has length 9, but only 1 bytes are left",
        *BAD, model="words", inputs=(Given("TEXT", TEXT.array, "BYTES", raw=b"\x09\0\0\0a"),), by=AS_BYTES,
    ),
    "BYTES that go on": Mistake(
        "input 'TEXT': 1 bytes are left after the 1 BYTES elements of its shape",
        *BAD, model="words", inputs=(Given("TEXT", TEXT.array, "BYTES", raw=b"\x01\0\0\0ab"),), by=AS_BYTES,
    ),
    "a wrong priority": Mistake(
        "request: parameter 'priority': got -1, expected an integer from 0 to 2^62", *BAD, parameters={"priority": -1},
        by=(*OWN, "predict"),
    ),
    "a timeout that is no number": Mistake(
        "request: parameter 'timeout': got 'soon', expected an integer from 0 to 2^62", *BAD,
        parameters={"timeout": "soon"}, by=(*OWN, "predict"),
    ),
    "a misspelt parameter": Mistake(
        "request: parameter 'timout': unknown; did you mean 'timeout'?", *BAD, parameters={"timout": 5}, by=(*OWN, "predict"),
    ),
    "a misspelt parameter for a class that reads none": Mistake(
        "request: parameter 'Priority': unknown; did you mean 'priority'?", *BAD, model="fails", inputs=(A,),
        parameters={"Priority": 1}, by=(*OWN, "predict"),
    ),
    "a parameter that the model has a value of its own for": Mistake(
        "request: parameter 'factor': the model has a value of its own for it, which no request sets: leave it out; ", *BAD,
        model="scaled", inputs=(A,), parameters={"factor": 3}, by=(*OWN, "predict"),
    ),
    "a misspelt parameter of an input": Mistake(
        "input 'A': parameter 'shared_memory_ofset': unknown; did you mean 'shared_memory_offset'?", *BAD,
        inputs=(Given("A", A.array, parameters={
            "shared_memory_region": "r", "shared_memory_byte_size": 8, "shared_memory_ofset": 8,
        }), B), by=OWN,
    ),
    "a misspelt parameter of an output": Mistake(
        "output 'C': parameter 'clasification': unknown; did you mean 'classification'?", *BAD, outputs=("C",),
        output_parameters={"clasification": 2}, by=OWN,
    ),
    "classes that are no number": Mistake(
        "output 'C': parameter 'classification': got 'two', expected an integer from 0 to 2^62", *BAD, outputs=("C",),
        output_parameters={"classification": "two"}, by=OWN,
    ),
    "an output's size without its region": Mistake(
        "output 'C': parameter 'shared_memory_region' is missing beside 'shared_memory_byte_size'", *BAD, outputs=("C",),
        output_parameters={"shared_memory_byte_size": 8}, by=OWN,
    ),
    "a reserved parameter": Mistake(
        "parameter 'gateway.x': keys starting with 'gateway.' are reserved", *BAD, parameters={"gateway.x": 1},
        by=(*OWN, "predict"),
    ),
    "a region without its size": Mistake(
        "input 'A': parameter 'shared_memory_byte_size' is missing beside 'shared_memory_region'",
        *BAD, inputs=(Given("A", A.array, parameters={"shared_memory_region": "r"}), B), by=OWN,
    ),
    "a model that raises": Mistake(
        "fails:1/python: ValueError: no threes in weights.bin (see the manual)",
        *FAILED, model="fails", inputs=(Given("A", A.array * 3),),
    ),
    "a model apart that raises": Mistake(
        "fails apart:1/python: ValueError: no threes in weights.bin (see the manual)",
        *FAILED, model="fails apart", inputs=(Given("A", A.array * 3),), by=ON_THE_WIRE,
    ),
    "a model whose answer is not as declared": Mistake(
        "fails:1/python: output 'C': expected shape [-1, 2] with 1 row, the model gave shape [0, 2]",
        *FAILED, model="fails", inputs=(Given("A", A.array * 4),),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Served:
    """http, grpc: "host:port" of a server. client, loaded: the same models in this process, these by name."""

    http: str
    grpc: str
    client: gateway.TestClient
    loaded: dict[str, gateway.LoadedModel]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    config = parse_config(yaml.safe_load(MODELS), source="x.yaml")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(gateway.run(config))
        client = stack.enter_context(gateway.TestClient(config))
        loaded = {name: stack.enter_context(gateway.load(config, model=name)) for name in LOADED}
        yield Served(server.rest_url.removeprefix("http://"), server.grpc_target, client, loaded)


Told = tuple[int | grpc.StatusCode | None, str]  # the stream has no code


def http_request(mistake: Mistake, *, binary: bool) -> tuple[str, bytes, dict[str, str]]:
    inputs, tail = [], b""
    for given in mistake.inputs:
        entry = {"name": given.name, "datatype": given.datatype, "shape": given.stated}
        if "shared_memory_region" in given.parameters:
            entry["parameters"] = given.parameters
        elif binary:
            entry["parameters"] = {"binary_data_size": len(given.bytes)}
            tail += given.bytes
        else:
            entry["data"] = [item.decode() if isinstance(item, bytes) else item for item in given.array.ravel().tolist()]
        inputs.append(entry)
    body = {"inputs": inputs, "parameters": mistake.parameters, "outputs": []}
    body["outputs"] = [{"name": name, "parameters": mistake.output_parameters} for name in mistake.outputs]
    head = json.dumps(body).encode()
    version = f"/versions/{mistake.version}" if mistake.version else ""
    headers = {"Inference-Header-Content-Length": str(len(head))} if binary else {}
    return f"/v2/models/{quote(mistake.model)}{version}/infer", head + tail, headers


def ask_http(served: Served, mistake: Mistake, *, binary: bool) -> Told:
    connection = http.client.HTTPConnection(served.http, timeout=TIMEOUT_S)
    try:
        connection.request("POST", *http_request(mistake, binary=binary))
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())["error"]
    finally:
        connection.close()


def ask_http_in_memory(served: Served, mistake: Mistake, *, binary: bool) -> Told:
    path, body, headers = http_request(mistake, binary=binary)
    answer = served.client.post(path, content=body, headers=headers)
    return answer.status_code, answer.json()["error"]


CONTENTS = {"FP32": "fp32_contents", "UINT8": "uint_contents", "BYTES": "bytes_contents", "FLOAT": "fp32_contents"}


def message_of(mistake: Mistake, *, typed: bool) -> Any:
    def parameter(value: Any) -> Any:
        return pb.InferParameter(**{"int64_param" if isinstance(value, int) else "string_param": value})

    message = pb.ModelInferRequest(model_name=mistake.model, model_version=mistake.version)
    for given in mistake.inputs:
        tensor = message.inputs.add(name=given.name, datatype=given.datatype, shape=given.stated)
        for key, value in given.parameters.items():
            tensor.parameters[key].CopyFrom(parameter(value))
        if "shared_memory_region" in given.parameters:
            continue
        if typed:
            getattr(tensor.contents, CONTENTS[given.datatype]).extend(given.array.ravel().tolist())
        else:
            message.raw_input_contents.append(given.bytes)
    for name in mistake.outputs:
        output = message.outputs.add(name=name)
        for key, value in mistake.output_parameters.items():
            output.parameters[key].CopyFrom(parameter(value))
    for key, value in mistake.parameters.items():
        message.parameters[key].CopyFrom(parameter(value))
    return message


def ask_grpc(channel: grpc.Channel, mistake: Mistake, *, typed: bool) -> Told:
    with channel:
        try:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message_of(mistake, typed=typed), timeout=TIMEOUT_S)
        except grpc.RpcError as exc:
            return exc.code(), exc.details()  # type: ignore[attr-defined]  # of a call, which it is
    raise AssertionError("it was served")


def ask_stream(channel: grpc.Channel, mistake: Mistake) -> Told:
    with channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        (answer,) = stub.ModelStreamInfer(iter([message_of(mistake, typed=False)]), timeout=TIMEOUT_S)
    return None, answer.error_message


def ask_loaded(served: Served, mistake: Mistake) -> Told:
    """Elements of another datatype are given as lists, as somebody would who cannot make an array of them."""
    inputs = {
        given.name: given.array if datatype_of(given.array) == given.datatype else given.array.tolist()
        for given in mistake.inputs
    }
    try:
        served.loaded[mistake.model].predict(inputs, outputs=mistake.outputs, parameters=mistake.parameters)
    except gateway.GatewayError as exc:
        return STATUS[exc.code], exc.words
    raise AssertionError("it was served")


def ask_triton(address: str, mistake: Mistake, module: Any) -> Told:
    inputs = []
    for given in mistake.inputs:
        tensor = module.InferInput(given.name, given.stated, given.datatype)
        tensor.set_data_from_numpy(given.array)
        inputs.append(tensor)
    outputs = [module.InferRequestedOutput(name) for name in mistake.outputs] or None
    with module.InferenceServerClient(address) as client:
        try:
            client.infer(mistake.model, inputs, model_version=mistake.version, outputs=outputs)
        except InferenceServerException as exc:
            text = exc.status()
            name = text.removeprefix("StatusCode.")
            return (int(text) if text.isdigit() else grpc.StatusCode[name]), exc.message()
    raise AssertionError("it was served")


def channel(served: Served) -> grpc.Channel:
    return grpc.insecure_channel(served.grpc)


CLIENTS: dict[str, Callable[[Served, Mistake], Told]] = {
    "json": lambda served, mistake: ask_http(served, mistake, binary=False),
    "binary": lambda served, mistake: ask_http(served, mistake, binary=True),
    "typed": lambda served, mistake: ask_grpc(channel(served), mistake, typed=True),
    "raw": lambda served, mistake: ask_grpc(channel(served), mistake, typed=False),
    "stream": lambda served, mistake: ask_stream(channel(served), mistake),
    "tritonclient.http": lambda served, mistake: ask_triton(served.http, mistake, tritonclient.http),
    "tritonclient.grpc": lambda served, mistake: ask_triton(served.grpc, mistake, tritonclient.grpc),
    "predict": ask_loaded,
}
IN_MEMORY: dict[str, Callable[[Served, Mistake], Told]] = {
    "json": lambda served, mistake: ask_http_in_memory(served, mistake, binary=False),
    "binary": lambda served, mistake: ask_http_in_memory(served, mistake, binary=True),
    "typed": lambda served, mistake: ask_grpc(served.client.channel, mistake, typed=True),
    "raw": lambda served, mistake: ask_grpc(served.client.channel, mistake, typed=False),
    "stream": lambda served, mistake: ask_stream(served.client.channel, mistake),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_every_client_is_told_the_same(name: str, served: Served) -> None:
    mistake = MISTAKES[name]
    makers = mistake.by or CLIENTS
    told = {client: CLIENTS[client](served, mistake) for client in makers}
    told |= {f"{client} in memory": ask(served, mistake) for client, ask in IN_MEMORY.items() if client in makers}
    assert len({words for _, words in told.values()}) == 1, told
    for client, (status, words) in told.items():
        assert words.startswith(mistake.words), client
        assert status in (mistake.status, mistake.code, None), client
        assert len(words) < 1000, client


def test_a_body_that_is_no_request_is_told_so(served: Served) -> None:
    for body, words in (
        (b"", f"failed to parse the request JSON: the body is empty; the smallest request: {SMALLEST_PAIR}"),
        (b"{bad", "failed to parse the request JSON: "),
        (b'{"instances":[[1,2]]}', "expected 2 inputs but got 0 inputs for model 'pair': missing 'A', 'B'; the smallest "),
        (b'{"inputs":{"A":[1,2]}}', "malformed inference request: Expected `array`, got `object` - at `$.inputs`"),
    ):
        connection = http.client.HTTPConnection(served.http, timeout=TIMEOUT_S)
        connection.request("POST", "/v2/models/pair/infer", body)
        answer = connection.getresponse()
        assert answer.status == 400
        assert json.loads(answer.read())["error"].startswith(words)
        connection.close()


def test_the_smallest_request_that_an_error_shows_is_served(served: Served) -> None:
    for model in ("pair", "words", "fails"):
        for body in (b"{}", b""):
            connection = http.client.HTTPConnection(served.http, timeout=TIMEOUT_S)
            connection.request("POST", f"/v2/models/{model}/infer", body)
            shown = json.loads(connection.getresponse().read())["error"].partition("the smallest request: ")[2]
            connection.request("POST", f"/v2/models/{model}/infer", shown)
            assert connection.getresponse().status == 200
            connection.close()
