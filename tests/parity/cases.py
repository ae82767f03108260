"""What is compared between the gateway and Triton: each case does one thing with one client and says what it saw.

An observation is plain data: of an answer its names, shapes, datatypes, bytes and keys, of an error its status. Texts of
errors are not compared, beyond there being one. Where the gateway differs on purpose, the case says why (`differs`).
"""

import contextlib
import http.client
import json
import struct
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.utils import InferenceServerException

from backends.datatypes import NUMPY
from tests.parity.models import DATATYPES
from tests.parity.servers import CLIENTS, Client

HTTP = ("http", "http.aio")
GRPC = ("grpc", "grpc.aio")
ROW = np.array([[1, 4, 2, 3]], dtype=np.float32)
RAW = ROW.tobytes()


@dataclass(frozen=True, slots=True)
class Case:
    """differs: why the gateway's answer is another one on purpose; empty: both must be equal."""

    name: str
    run: Callable[[Client], Any]
    clients: tuple[str, ...] = CLIENTS
    differs: str = ""


def observe(case: Case, client: Client) -> Any:
    """What the client saw: data, or the status of the error."""
    try:
        return case.run(client)
    except InferenceServerException as exc:
        return {"error": str(exc.status()), "text": exc.message()}


def alike(ours: Any, theirs: Any) -> bool:
    """Whether two observations are the same; of the texts of errors, only that both have one."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and "error" in ours and "error" in theirs:
        return ours["error"] == theirs["error"] and bool(ours["text"]) == bool(theirs["text"])
    return bool(ours == theirs)


# what the clients see


def seen(result: Any, client: Client) -> dict[str, Any]:
    """An inference's answer, outputs by name."""
    response = result.get_response()
    if client.protocol == "http":
        keys = sorted(response)
        outputs = {
            output["name"]: (
                output["datatype"],
                output["shape"],
                sorted(set(output) - {"data"}),
                sorted(output.get("parameters", {})),
            )
            for output in response.get("outputs", [])
        }
        head = (response["model_name"], response["model_version"], response.get("id"), response.get("parameters"))
    else:
        keys = sorted(field.name for field, _ in response.ListFields())
        outputs = {output.name: (output.datatype, list(output.shape), sorted(output.parameters)) for output in response.outputs}
        head = (response.model_name, response.model_version, response.id, sorted(response.parameters))
    return {"head": head, "keys": keys, "outputs": {name: (*form, content(result, name)) for name, form in outputs.items()}}


def content(result: Any, name: str) -> Any:
    try:
        array = result.as_numpy(name)
    except (KeyError, ValueError):  # tritonclient's, of an output whose data is in shared memory
        return "no data"
    if array is None:
        return None
    return array.tolist() if array.dtype == object else array.tobytes()


def tensor(client: Client, array: np.ndarray, datatype: str = "FP32", name: str = "INPUT0", *, binary: bool = True) -> Any:
    given = client.module.InferInput(name, list(array.shape), datatype)
    if client.protocol == "http":
        given.set_data_from_numpy(array, binary_data=binary)
    else:
        given.set_data_from_numpy(array)
    return given


def wish(client: Client, name: str, *, binary: bool = True, classes: int = 0) -> Any:
    if client.protocol == "http":
        return client.module.InferRequestedOutput(name, binary_data=binary, class_count=classes)
    return client.module.InferRequestedOutput(name, class_count=classes)


def no_classes(client: Client) -> dict[str, Any]:
    """Of no classes. Of gRPC: tritonclient leaves a 0 out; see "JSON fault: classification 0" for HTTP."""
    wanted = wish(client, "OUTPUT0", classes=1)
    wanted._output.parameters["classification"].int64_param = 0
    return add_sub(client, outputs=[wanted])


def infer(client: Client, model: str, inputs: list[Any], **options: Any) -> dict[str, Any]:
    return seen(client.call("infer", model, inputs, **options), client)


def add_sub(client: Client, a: np.ndarray = ROW, b: np.ndarray = ROW, **options: Any) -> dict[str, Any]:
    return infer(client, "add_sub", [tensor(client, a), tensor(client, b, name="INPUT1")], **options)


def names_in_order(client: Client, outputs: list[Any]) -> list[str]:
    inputs = [tensor(client, ROW), tensor(client, ROW, name="INPUT1")]
    response = client.call("infer", "add_sub", inputs, outputs=outputs).get_response()
    if client.protocol == "http":
        return [output["name"] for output in response["outputs"]]
    return [output.name for output in response.outputs]


def as_dict(client: Client, method: str, *arguments: Any) -> Any:
    return client.call(method, *arguments, **({"as_json": True} if client.protocol == "grpc" else {}))


def samples(datatype: str) -> np.ndarray:
    """Shape (2, 3)."""
    if datatype == "BYTES":
        return np.array([[b"", b"a", b"bc"], ["ö".encode(), b"x" * 300, b"5"]], dtype=object)
    if datatype == "BOOL":
        return np.array([[True, False, True], [False, False, True]])
    if datatype.startswith("FP"):
        return np.array([[0, 1.5, -2.25], [3.125, 1e4, 1e-4]]).astype(NUMPY[datatype])
    info = np.iinfo(NUMPY[datatype])
    return np.array([[0, 1, info.max], [info.min, 100, 7]], dtype=NUMPY[datatype])


def keys_of(value: Any, path: str = "") -> set[str]:
    """Every key path of nested JSON."""
    if isinstance(value, dict):
        return {found for key, inner in value.items() for found in {f"{path}{key}"} | keys_of(inner, f"{path}{key}.")}
    if isinstance(value, list):
        return {found for inner in value for found in keys_of(inner, f"{path}[].")}
    return set()


# state and metadata


def server_metadata(client: Client) -> Any:
    metadata = as_dict(client, "get_server_metadata")
    return {"keys": sorted(metadata), "extensions": sorted(set(metadata["extensions"]) - NOT_OFFERED - NOT_TOLD)}


NO_STATISTICS = ("memory_usage", "response_stats")  # of models in Triton's memory, and of decoupled models
NOT_TOLD = {"generate"}  # by Triton, which has it
NOT_OFFERED = {"sequence", "model_repository(unload_dependents)", "cuda_shared_memory", "trace", "logging"}


def model_config(client: Client) -> Any:
    config = as_dict(client, "get_model_config", "add_sub")
    config = config.get("config", config)
    parts = ("name", "data_type", "dims")
    return {
        "name": config["name"],
        "max_batch_size": config["max_batch_size"],
        "input": [{part: tensor[part] for part in parts} for tensor in config["input"]],
        "output": [{part: tensor[part] for part in parts} for tensor in config["output"]],
        "instances": [(group["kind"], group["count"]) for group in config["instance_group"]],
        "keys": {"version_policy", "instance_group", "backend"} <= set(config),
    }


def statistics(client: Client) -> Any:
    add_sub(client)
    time.sleep(0.1)  # Triton counts a batch after it has answered
    found = as_dict(client, "get_inference_statistics", "add_sub")["model_stats"]
    # Protobuf's JSON leaves zeros out: over gRPC the parts are compared, over HTTP every key.
    depth = 99 if client.protocol == "http" else 2
    keys = {key for key in keys_of(found) if key.count(".") < depth and not any(part in key for part in NO_STATISTICS)}
    return len(found), found[0]["name"], found[0]["version"], sorted(keys)


def statistics_count(client: Client) -> Any:
    def counts() -> tuple[int, int, int]:
        found = as_dict(client, "get_inference_statistics", "add_sub")["model_stats"][0]
        executions = int(found["execution_count"])
        return int(found["inference_count"]), executions, int(found["inference_stats"]["success"]["count"])

    add_sub(client)
    time.sleep(0.1)
    before = counts()
    add_sub(client, np.tile(ROW, (3, 1)), np.tile(ROW, (3, 1)))
    time.sleep(0.1)
    return [after - earlier for after, earlier in zip(counts(), before, strict=True)]


# shared memory


@contextlib.contextmanager
def segment(client: Client, byte_size: int = 64) -> Iterator[tuple[str, str, Path]]:
    """A registered region that starts with ROW; gives its name, key and file.

    The name is a new one each time: Triton frees a region only some time after the last answer that used it.
    """
    name = uuid.uuid4().hex
    path = Path(f"/dev/shm/gateway-parity-{name}")
    path.write_bytes(RAW + bytes(byte_size - len(RAW)))
    try:
        client.call("register_system_shared_memory", name, f"/{path.name}", byte_size)
        yield name, f"/{path.name}", path
    finally:
        client.call("unregister_system_shared_memory", name)
        path.unlink()


def shared_tensor(client: Client, region: str, byte_size: int = 16, offset: int = 0) -> Any:
    given = client.module.InferInput("INPUT0", [1, 4], "FP32")
    given.set_shared_memory(region, byte_size, offset)
    return given


def shared_infer(client: Client, given: tuple[int, int] | None = (16, 0), out: tuple[int, int] | None = None) -> Any:
    """given, out: byte size and offset in the region."""
    with segment(client) as (region, _, path):
        outputs = [wish(client, "OUTPUT0"), wish(client, "OUTPUT1")]
        if out is not None:
            outputs[0].set_shared_memory(region, *out)
        first = tensor(client, ROW) if given is None else shared_tensor(client, region, *given)
        second = tensor(client, ROW, name="INPUT1")
        answer = infer(client, "add_sub", [first, second], outputs=outputs)
        return json.loads(json.dumps(answer, default=repr).replace(region, "REGION")), path.read_bytes()


def in_two_regions(client: Client) -> Any:
    with segment(client) as (region, _, _), segment(client) as (other, _, _):
        outputs = [wish(client, "OUTPUT0"), wish(client, "OUTPUT0")]
        outputs[0].set_shared_memory(region, 16, 16)
        outputs[1].set_shared_memory(other, 16, 16)
        add_sub(client, outputs=outputs)
        return "answered"


def shared_status(client: Client) -> Any:
    with segment(client) as (region, key, _):
        alone = as_dict(client, "get_system_shared_memory_status", region)
        return json.loads(json.dumps(alone).replace(key, "KEY").replace(region, "REGION"))


def shared_statuses(client: Client) -> Any:
    with segment(client) as (region, _, _), segment(client) as (other, _, _):
        found = as_dict(client, "get_system_shared_memory_status")
        regions = found["regions"].values() if isinstance(found, dict) else found
        return {region, other} <= {entry["name"] for entry in regions}


def register(client: Client, *, key: str | None = None, byte_size: int = 64, offset: int = 0, again: bool = False) -> Any:
    with segment(client) as (region, made, _):
        name = region if again else f"{region}-2"
        try:
            return client.call("register_system_shared_memory", name, made if key is None else key, byte_size, offset)
        finally:
            if not again:
                client.call("unregister_system_shared_memory", name)


# load and unload


def unloaded(client: Client, look: Callable[[], Any]) -> Any:
    """What is seen while `whole` is unloaded."""
    client.call("unload_model", "whole")
    try:
        deadline = time.monotonic() + 20
        while index_of(client)["whole"][0] == "UNLOADING" and time.monotonic() < deadline:
            time.sleep(0.05)
        return look()
    finally:
        client.call("load_model", "whole")


def index_of(client: Client) -> dict[str, tuple[str, str]]:
    index = as_dict(client, "get_model_repository_index")
    models = index["models"] if isinstance(index, dict) else index
    return {
        model["name"]: (model.get("state", ""), model.get("reason", "")) for model in models if model["name"] != "unloadable"
    }


def unloaded_and_loaded(client: Client) -> Any:
    while_unloaded = unloaded(client, lambda: (client.call("is_model_ready", "whole"), index_of(client)["whole"]))
    return while_unloaded, client.call("is_model_ready", "whole"), infer(client, "whole", [tensor(client, ROW)])


def infer_unloaded(client: Client) -> Any:
    attempt = Case("", lambda client: infer(client, "whole", [tensor(client, ROW)]))
    return unloaded(client, lambda: observe(attempt, client))


# streams


def stream(client: Client, *requests: tuple[str, str], **options: Any) -> Any:
    """requests: model and id."""
    inputs = [tensor(client, ROW), tensor(client, ROW, name="INPUT1")]
    given = [{"model_name": model, "inputs": inputs, "request_id": key, **options} for model, key in requests]
    answers = client.stream(given)
    return [("error", bool(str(error))) if error is not None else seen(result, client) for result, error in answers]


# plain HTTP and gRPC, for what tritonclient would not send


def plain(
    client: Client,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
    *,
    text: bool = False,
) -> Any:
    """Status, and of a JSON body the keys, or itself."""
    host, port = client.server.http.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        data = response.read()
    finally:
        connection.close()
    try:
        parsed = json.loads(data) if data else None
    except ValueError:
        parsed = "no JSON"
    if text:
        return response.status, parsed
    return response.status, sorted(parsed) if isinstance(parsed, dict) else type(parsed).__name__


def post(client: Client, body: Any, model: str = "add_sub", *, text: bool = True, **headers: str) -> Any:
    """Infer with a body that is made here; a dict becomes JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    status, parsed = plain(client, "POST", f"/v2/models/{model}/infer", data, named, text=True)
    if status != 200:
        return status, sorted(parsed) if isinstance(parsed, dict) else parsed
    return status, parsed


def json_input(
    data: Any, datatype: str = "FP32", shape: tuple[int, ...] = (1, 4), name: str = "INPUT0", **more: Any
) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape), "data": data, **more}


def one(data: Any, datatype: str, shape: tuple[int, ...] = (1, 2)) -> dict[str, Any]:
    return {"inputs": [json_input(data, datatype, shape)]}


FOUR = [1, 2, 3, 4]
PAIR = {"inputs": [json_input(FOUR), json_input(FOUR, name="INPUT1")]}


def with_binary(header: Any, tail: bytes, model: str = "add_sub", *, length: str | None = None) -> Callable[[Client], Any]:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = str(len(data)) if length is None else length
    return lambda client: post(client, data + tail, model, Inference_Header_Content_Length=size)


def binary_pair(first: Any = 16, second: Any = 16) -> dict[str, Any]:
    def given(name: str, size: Any) -> dict[str, Any]:
        return {"name": name, "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": size}}

    return {"inputs": [given("INPUT0", first), given("INPUT1", second)], "outputs": [{"name": "OUTPUT0"}]}


def elements(*parts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


BODY = "a body that breaks the protocol is the client's fault, 400, not 500"
UNKNOWN_STATISTICS = "an unknown model is NOT_FOUND in every call, not INVALID_ARGUMENT in this one"
ANY_VERSION = "a version that is no number is one that is not found"
UNLOADED = "a configured model that is not loaded is not ready, UNAVAILABLE and safe to retry, rather than unknown"
MORE_ROWS = "the batcher splits requests with more rows than one execution takes"
SEGMENT = "a segment that does not exist or is too short is the client's fault, INVALID_ARGUMENT, not INTERNAL"
TIMEOUT = "Triton ignores the timeout unless the model sets a default queue timeout; here it is the request's deadline"
NO_CONFIG = "a load cannot change the configuration: UNIMPLEMENTED"
QUOTED = "quoted names are unquoted over HTTP; Triton takes them literally"
WRAPPED = "a value that the datatype cannot hold is refused, not wrapped around"
READY_BODY = "a JSON body tells the model and that it is ready"

CASES: tuple[Case, ...] = (
    # state and metadata
    Case("server live", lambda c: c.call("is_server_live")),
    Case("server metadata", server_metadata),
    *(
        Case(f"model ready {model!r} {version!r}", lambda c, m=model, v=version: c.call("is_model_ready", m, v))  # type: ignore[misc]
        for model, version in (("add_sub", ""), ("add_sub", "1"), ("add_sub", "9"), ("nobody", ""), ("unloadable", ""))
    ),
    Case("model ready, quoted name", lambda c: c.call("is_model_ready", "at@home"), differs=QUOTED),
    *(
        Case(f"model metadata {model!r} {version!r}", lambda c, m=model, v=version: as_dict(c, "get_model_metadata", m, v))  # type: ignore[misc]
        for model, version in (
            ("add_sub", ""),
            ("add_sub", "1"),
            ("add_sub", "9"),
            ("nobody", ""),
            ("whole", ""),
            ("identity_bytes", ""),
        )
    ),
    Case("model metadata of version 'x'", lambda c: as_dict(c, "get_model_metadata", "add_sub", "x"), differs=ANY_VERSION),
    Case("model config", model_config),
    Case("model config of an unknown model", lambda c: as_dict(c, "get_model_config", "nobody")),
    Case("statistics keys", statistics),
    Case("statistics count rows, executions, requests", statistics_count),
    Case(
        "statistics of an unknown model", lambda c: as_dict(c, "get_inference_statistics", "nobody"), differs=UNKNOWN_STATISTICS
    ),
    # every datatype
    *(
        Case(
            f"infer {datatype} {'binary' if binary else 'JSON'} in and out",
            lambda c, d=datatype, b=binary: infer(  # type: ignore[misc]
                c, f"identity_{d.lower()}", [tensor(c, samples(d), d, binary=b)], outputs=[wish(c, "OUTPUT0", binary=b)]
            ),
            clients=CLIENTS if binary else HTTP,
        )
        for datatype in DATATYPES
        for binary in (True, False)
        if binary or datatype != "FP16"
    ),
    Case(
        "infer FP16 binary in, JSON out",
        lambda c: infer(c, "identity_fp16", [tensor(c, samples("FP16"), "FP16")], outputs=[wish(c, "OUTPUT0", binary=False)]),
        clients=HTTP,
    ),
    # inputs and outputs
    Case("infer all outputs", add_sub),
    Case("infer one output", lambda c: add_sub(c, outputs=[wish(c, "OUTPUT1")])),
    Case("infer outputs, the last first", lambda c: names_in_order(c, [wish(c, "OUTPUT1"), wish(c, "OUTPUT0")])),
    Case("infer an output twice", lambda c: add_sub(c, outputs=[wish(c, "OUTPUT1"), wish(c, "OUTPUT1")])),
    Case(
        "infer outputs, one binary, one JSON",
        lambda c: add_sub(c, outputs=[wish(c, "OUTPUT0"), wish(c, "OUTPUT1", binary=False)]),
        HTTP,
    ),
    Case("infer three rows", lambda c: add_sub(c, np.tile(ROW, (3, 1)), np.tile(ROW, (3, 1)))),
    Case(
        "infer more rows than the model takes",
        lambda c: add_sub(c, np.tile(ROW, (9, 1)), np.tile(ROW, (9, 1))),
        differs=MORE_ROWS,
    ),
    Case("infer without a batch dimension", lambda c: infer(c, "whole", [tensor(c, np.tile(ROW, (3, 1)))])),
    Case("infer an empty dimension", lambda c: infer(c, "identity_fp32", [tensor(c, np.zeros((1, 0), np.float32))])),
    Case("infer, quoted name", lambda c: infer(c, "at@home", [tensor(c, ROW)]), differs=QUOTED),
    Case("infer with version", lambda c: add_sub(c, model_version="1")),
    Case("infer with id", lambda c: add_sub(c, request_id="my-id 1")),
    Case("infer with parameters", lambda c: add_sub(c, parameters={"a": 1, "b": "x", "c": True}, priority=1)),
    Case("infer with a reserved parameter", lambda c: add_sub(c, parameters={"triton_x": 1})),
    Case("infer as a sequence", lambda c: add_sub(c, sequence_id=5, sequence_start=True, sequence_end=True)),
    Case("infer with a generous timeout", lambda c: add_sub(c, timeout=20_000_000)),
    Case("infer with a timeout that passes", lambda c: infer(c, "sleeps", [tensor(c, ROW)], timeout=1), differs=TIMEOUT),
    Case("infer past the client's deadline", lambda c: infer(c, "sleeps", [tensor(c, ROW)], client_timeout=0.1), GRPC),
    Case("infer of a model that fails", lambda c: infer(c, "fails", [tensor(c, ROW)])),
    *(
        Case(
            f"infer compressed {algorithm}",
            lambda c, a=algorithm: add_sub(c, np.tile(ROW, (8, 1)), np.tile(ROW, (8, 1)), compression_algorithm=a),
            GRPC,
        )  # type: ignore[misc]
        for algorithm in ("gzip", "deflate")
    ),
    *(
        Case(
            f"infer compressed {there or 'not'} there, {back or 'not'} back",
            lambda c, t=there, b=back: add_sub(  # type: ignore[misc]
                c, np.tile(ROW, (8, 1)), np.tile(ROW, (8, 1)), request_compression_algorithm=t, response_compression_algorithm=b
            ),
            HTTP,
        )
        for there in (None, "gzip", "deflate")
        for back in (None, "gzip", "deflate")
        if there or back
    ),
    # bad input
    Case("infer an unknown model", lambda c: infer(c, "nobody", [tensor(c, ROW)])),
    Case("infer an unknown version", lambda c: add_sub(c, model_version="9")),
    Case("infer with an input missing", lambda c: infer(c, "add_sub", [tensor(c, ROW)])),
    Case(
        "infer with an input too many",
        lambda c: infer(c, "add_sub", [tensor(c, ROW, name=n) for n in ("INPUT0", "INPUT1", "INPUT2")]),
    ),
    Case("infer with a wrong input", lambda c: infer(c, "add_sub", [tensor(c, ROW), tensor(c, ROW, name="X")])),
    Case("infer with an input twice", lambda c: infer(c, "add_sub", [tensor(c, ROW), tensor(c, ROW)])),
    Case(
        "infer with a wrong datatype",
        lambda c: infer(c, "add_sub", [tensor(c, ROW), tensor(c, ROW.astype(np.int32), "INT32", "INPUT1")]),
    ),
    Case("infer with a wrong dimension", lambda c: add_sub(c, ROW, np.zeros((1, 5), np.float32))),
    Case("infer with a wrong rank", lambda c: add_sub(c, ROW, np.zeros(4, np.float32))),
    Case("infer with rows that differ", lambda c: add_sub(c, ROW, np.tile(ROW, (2, 1)))),
    Case("infer with no rows", lambda c: add_sub(c, np.zeros((0, 4), np.float32), np.zeros((0, 4), np.float32))),
    Case("infer with an unknown output", lambda c: add_sub(c, outputs=[wish(c, "X")])),
    Case("infer without a batch dimension, wrong rank", lambda c: infer(c, "whole", [tensor(c, np.zeros(4, np.float32))])),
    # classification
    *(
        Case(
            f"classify {classes} of 4",
            lambda c, k=classes: add_sub(c, outputs=[wish(c, name, classes=k) for name in ("OUTPUT0", "OUTPUT1")]),
        )  # type: ignore[misc]
        for classes in (1, 3, 9)
    ),
    Case("classify 0 of 4", no_classes, ("grpc",)),
    Case(
        "classify rows",
        lambda c: add_sub(
            c,
            np.array([[3, 1, 2, 0], [0, 0, 5, 5]], np.float32),
            np.zeros((2, 4), np.float32),
            outputs=[wish(c, "OUTPUT0", classes=2)],
        ),
    ),
    Case(
        "classify NaN",
        lambda c: add_sub(c, np.array([[np.nan, 3, 1, 2]], np.float32), outputs=[wish(c, "OUTPUT0", classes=4)]),
        differs="a NaN is the last class; Triton has it before or among the others, by its place in the output",
    ),
    Case("classify in JSON", lambda c: add_sub(c, outputs=[wish(c, "OUTPUT0", binary=False, classes=2)]), HTTP),
    *(
        Case(
            f"classify {datatype}",
            lambda c, d=datatype: infer(
                c, f"identity_{d.lower()}", [tensor(c, samples(d), d)], outputs=[wish(c, "OUTPUT0", classes=2)]
            ),  # type: ignore[misc]
        )
        for datatype in DATATYPES
        if datatype != "BYTES"  # Triton 2.51 crashes; here it is an INVALID_ARGUMENT
    ),
    Case(
        "classify without a batch dimension",
        lambda c: infer(
            c, "whole", [tensor(c, np.array([[3, 1], [2, 0]], np.float32))], outputs=[wish(c, "OUTPUT0", classes=3)]
        ),
    ),
    # shared memory
    Case("shared memory status", shared_status),
    Case("shared memory status of all", shared_statuses),
    Case("shared memory status of an unknown region", lambda c: as_dict(c, "get_system_shared_memory_status", "nobody")),
    Case("shared memory in", shared_infer),
    Case("shared memory in at an offset", lambda c: shared_infer(c, (16, 16))),
    Case("shared memory out", lambda c: shared_infer(c, None, (16, 32))),
    Case("shared memory in and out", lambda c: shared_infer(c, (16, 0), (16, 48))),
    Case(
        "shared memory out, of one output in two regions",
        in_two_regions,
        differs="an output that is asked for in two ways is refused; Triton leaves one of two regions unwritten",
    ),
    Case("shared memory out, larger than needed", lambda c: shared_infer(c, None, (32, 16))),
    Case(
        "shared memory out, too small",
        lambda c: shared_infer(c, None, (8, 16)),
        differs="a region too small for the output is the client's fault, not INTERNAL",
    ),
    Case("shared memory in, outside of the region", lambda c: shared_infer(c, (16, 56))),
    Case("shared memory in, too small", lambda c: shared_infer(c, (8, 0))),
    Case("shared memory in, too large", lambda c: shared_infer(c, (32, 0))),
    Case(
        "shared memory in, unknown region",
        lambda c: infer(c, "add_sub", [shared_tensor(c, "nobody"), tensor(c, ROW, name="INPUT1")]),
    ),
    Case(
        "register a part of a segment",
        lambda c: register(c, byte_size=32),
        differs="a part of a segment can be registered; Triton answers 500",
    ),
    Case("register again", lambda c: register(c, again=True)),
    Case("register what does not exist", lambda c: register(c, key="/gateway-parity-none"), differs=SEGMENT),
    Case("register more than there is", lambda c: register(c, byte_size=65), differs=SEGMENT),
    Case("unregister an unknown region", lambda c: c.call("unregister_system_shared_memory", "nobody")),
    Case("unregister all", lambda c: c.call("unregister_system_shared_memory")),
    # repository
    Case("repository index", index_of),
    Case("unload and load", unloaded_and_loaded, ("http.aio", "grpc.aio")),
    Case("infer an unloaded model", infer_unloaded, ("http", "grpc"), UNLOADED),
    Case(
        "load an unknown model",
        lambda c: c.call("load_model", "nobody"),
        differs="a name in no configuration is the client's fault, not INTERNAL",
    ),
    Case(
        "unload an unknown model",
        lambda c: c.call("unload_model", "nobody"),
        differs="a name in no configuration is an error, as in load",
    ),
    Case("load with a configuration", lambda c: c.call("load_model", "whole", config="{"), differs=NO_CONFIG),
    # streams
    Case("stream", lambda c: stream(c, ("add_sub", "1"), ("add_sub", "2")), GRPC),
    Case("stream with errors", lambda c: stream(c, ("add_sub", "1"), ("nobody", "2"), ("whole", "3"), ("add_sub", "4")), GRPC),
    Case("stream with final responses", lambda c: stream(c, ("add_sub", "1"), enable_empty_final_response=True), GRPC),
    # plain HTTP
    *(
        Case(f"GET {path}", lambda c, p=path: plain(c, "GET", p), ("http",))  # type: ignore[misc]
        for path in (
            "/v2",
            "/v2/models/add_sub",
            "/v2/models/add_sub/versions/1",
            "/v2/models/add_sub/versions/9",
            "/v2/models/nobody",
            "/v2/models/nobody/ready",
            "/v2/models/add_sub/stats",
            "/v2/models/stats",
            "/v2/models/nobody/config",
            "/v2/systemsharedmemory/status",
            "/v2/systemsharedmemory/region/x/status",
            "/nowhere",
            "/v2/nowhere",
            "/v2/models/add_sub/infer",
            "/v2/repository/index",
        )
    ),
    Case("GET /v2/", lambda c: plain(c, "GET", "/v2/"), ("http",), "/v2/ is /v2"),
    Case("GET /v2/models/add_sub/ready", lambda c: plain(c, "GET", "/v2/models/add_sub/ready"), ("http",), READY_BODY),
    Case(
        "GET /v2/models/add_sub/config",
        lambda c: plain(c, "GET", "/v2/models/add_sub/config"),
        ("http",),
        "only those parts of a model configuration that have a meaning here",
    ),
    *(
        Case(f"POST {path}", lambda c, p=path: plain(c, "POST", p, b""), ("http",))  # type: ignore[misc]
        for path in ("/v2", "/v2/health/live", "/v2/models/add_sub/ready", "/v2/models/add_sub/infer", "/v2/repository/index")
    ),
    *(
        Case(f"GET {path}", lambda c, p=path: plain(c, "GET", p)[0], ("http",))
        for path in ("/v2/health/live", "/v2/health/ready")
    ),  # type: ignore[misc]
    # JSON bodies
    Case("JSON", lambda c: post(c, PAIR), ("http",)),
    Case(
        "JSON, nested data",
        lambda c: post(c, {"inputs": [json_input([FOUR]), json_input([[1, 2], [3, 4]], name="INPUT1")]}),
        ("http",),
    ),
    Case("JSON, id and parameters", lambda c: post(c, PAIR | {"id": "7", "parameters": {"x": 1, "y": "z"}}), ("http",)),
    Case(
        "JSON, classification",
        lambda c: post(c, PAIR | {"outputs": [{"name": "OUTPUT0", "parameters": {"classification": 2}}]}),
        ("http",),
    ),
    Case("JSON, BYTES", lambda c: post(c, one(["a", "ö"], "BYTES"), "identity_bytes"), ("http",)),
    Case("JSON, BOOL", lambda c: post(c, one([True, False], "BOOL"), "identity_bool"), ("http",)),
    Case("JSON, an integer for FP32", lambda c: post(c, one([1, 2.5], "FP32"), "identity_fp32"), ("http",)),
    Case("JSON, INT64 extremes", lambda c: post(c, one([-(1 << 63), (1 << 63) - 1], "INT64"), "identity_int64"), ("http",)),
    Case("JSON, UINT64 extremes", lambda c: post(c, one([0, (1 << 64) - 1], "UINT64"), "identity_uint64"), ("http",)),
    *(
        Case(f"JSON fault: {name}", lambda c, b=body, m=model: post(c, b, m), ("http",), reason)  # type: ignore[misc]
        for name, body, model, reason in (
            ("not JSON", b"{", "add_sub", BODY),
            ("empty body", b"", "add_sub", ""),
            ("a list", [], "add_sub", BODY),
            ("no inputs", {}, "add_sub", BODY),
            ("inputs are no list", {"inputs": 1}, "add_sub", BODY),
            ("an input is no object", {"inputs": [1]}, "add_sub", ""),
            ("input without name", {"inputs": [{"datatype": "FP32", "shape": [1, 4], "data": FOUR}]}, "add_sub", BODY),
            ("input without shape", {"inputs": [{"name": "INPUT0", "datatype": "FP32", "data": FOUR}]}, "add_sub", BODY),
            ("input without datatype", {"inputs": [{"name": "INPUT0", "shape": [1, 4], "data": FOUR}]}, "add_sub", BODY),
            ("input without data", {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 2]}]}, "identity_fp32", ""),
            ("too few elements", one([1], "FP32"), "identity_fp32", BODY),
            ("too many elements", one([1, 2, 3], "FP32"), "identity_fp32", BODY),
            ("text for FP32", one(["a", "b"], "FP32"), "identity_fp32", BODY),
            ("null", one([None, 1], "FP32"), "identity_fp32", BODY),
            ("truth for FP32", one([True, 1], "FP32"), "identity_fp32", BODY),
            ("a fraction for INT32", one([1.5, 1], "INT32"), "identity_int32", BODY),
            ("out of range for INT32", one([1 << 31, 1], "INT32"), "identity_int32", WRAPPED),
            ("negative for UINT32", one([-1, 1], "UINT32"), "identity_uint32", BODY),
            ("out of range for INT8", one([128, 1], "INT8"), "identity_int8", WRAPPED),
            ("out of range for UINT64", one([1 << 64, 1], "UINT64"), "identity_uint64", BODY),
            ("a number for BYTES", one([1, 2], "BYTES"), "identity_bytes", BODY),
            ("a number for BOOL", one([1, 0], "BOOL"), "identity_bool", BODY),
            ("FP16", one([1, 2], "FP16"), "identity_fp16", ""),
            ("unknown datatype", one([1, 2], "FP99"), "identity_fp32", ""),
            ("negative shape", one([1, 2], "FP32", (-1, 2)), "identity_fp32", BODY),
            ("shape of text", {"inputs": [json_input([1, 2], shape=("1", "2"))]}, "identity_fp32", BODY),  # type: ignore[arg-type]
            ("outputs are no list", PAIR | {"outputs": 1}, "add_sub", BODY),
            ("output without name", PAIR | {"outputs": [{}]}, "add_sub", BODY),
            ("classification 0", PAIR | {"outputs": [{"name": "OUTPUT0", "parameters": {"classification": 0}}]}, "add_sub", ""),
            ("id is a number", PAIR | {"id": 7}, "add_sub", BODY),
            ("parameters are no object", PAIR | {"parameters": 1}, "add_sub", BODY),
            ("a parameter is a list", PAIR | {"parameters": {"x": [1]}}, "add_sub", ""),
            ("timeout is text", PAIR | {"parameters": {"timeout": "x"}}, "add_sub", BODY),
            ("priority is negative", PAIR | {"parameters": {"priority": -1}}, "add_sub", BODY),
        )
    ),
    # binary bodies
    Case("binary", with_binary(binary_pair(), RAW * 2), ("http",)),
    Case("binary, one JSON input", with_binary({"inputs": [json_input(FOUR), binary_pair()["inputs"][1]]}, RAW), ("http",)),
    Case("raw request", lambda c: post(c, RAW, "identity_fp32", Inference_Header_Content_Length="0")[0], ("http",)),
    Case("raw request of two inputs", lambda c: post(c, RAW, Inference_Header_Content_Length="0"), ("http",)),
    Case(
        "raw request of BYTES",
        lambda c: post(c, elements(b"abc"), "identity_bytes", Inference_Header_Content_Length="0")[0],
        ("http",),
        "the body is one element for any model; for Triton its shape must be [1]",
    ),
    *(
        Case(f"binary fault: {name}", run, ("http",), reason)
        for name, run, reason in (
            ("size too small", with_binary(binary_pair(8), RAW * 2), ""),
            ("size too large", with_binary(binary_pair(24), RAW * 2), ""),
            ("short body", with_binary(binary_pair(), RAW), ""),
            ("long body", with_binary(binary_pair(), RAW * 3), ""),
            ("negative size", with_binary(binary_pair(-1), RAW * 2), BODY),
            ("size is text", with_binary(binary_pair("16"), RAW * 2), BODY),
            ("header longer than the body", with_binary(binary_pair(), RAW * 2, length="100000"), ""),
            ("header length is negative", with_binary(binary_pair(), RAW * 2, length="-1"), ""),
            ("header length is text", with_binary(binary_pair(), RAW * 2, length="x"), ""),
            ("header length too short", with_binary(binary_pair(), RAW * 2, length="10"), BODY),
            (
                "raw request of a wrong size",
                lambda c: post(c, RAW[:-1], "identity_fp32", Inference_Header_Content_Length="0"),
                "",
            ),
            (
                "BYTES cut short",
                with_binary(
                    {
                        "inputs": [
                            {"name": "INPUT0", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 6}}
                        ]
                    },
                    elements(b"abc")[:-1],
                    "identity_bytes",
                ),
                "",
            ),
            ("unknown encoding", lambda c: post(c, PAIR, Content_Encoding="br"), ""),
            ("not gzip", lambda c: post(c, PAIR, Content_Encoding="gzip"), ""),
        )
    ),
    # last: Triton is not ready from here on
    Case(
        "load what cannot be loaded",
        lambda c: c.call("load_model", "unloadable"),
        ("http", "grpc"),
        "a model that fails to load is the model's fault, INTERNAL, not INVALID_ARGUMENT",
    ),
)
