"""The REST paths as an OpenAPI 3.1 document, with what each model takes and gives as JSON Schema (2020-12)."""

import re
from collections.abc import Sequence
from math import prod
from typing import Any, Final
from urllib.parse import quote

import numpy as np

from backends.base import ModelSpec, TensorSpec
from backends.datatypes import NUMPY
from gateway import __version__
from gateway.protocols.media import GIVEN, TAKEN
from gateway.protocols.smallest import WITHOUT_JSON, needed_inputs, smallest_generate, smallest_request, smallest_shape

Schema = dict[str, Any]

_JSON: Final = "application/json"
_BINARY: Final = "application/octet-stream"
_EXAMPLE_ELEMENTS: Final = 1024
_PARAMETER: Final = {"type": ["boolean", "integer", "number", "string"]}
_ERROR: Final = {"$ref": "#/components/responses/Error"}

# Path -> method, what it is for, the schema of the answer ("": it has no body).
_SERVER: Final = {
    "/": ("get", "What is here", "Object"),
    "/openapi.json": ("get", "This document", "Object"),
    "/ping": ("get", "Whether every model that should be is ready, by the status alone", ""),
    "/execution-parameters": ("get", "How SageMaker's batch transform had best send its records", "Object"),
    "/v1/models": ("get", "The names of all models, as KServe v1 lists them", "Object"),
    "/v1/models/{model}": ("get", "Whether a model is ready, as KServe v1 and TF Serving say it", "Object"),
    "/v1/models/{model}/versions/{version}": ("get", "The same of one version", "Object"),
    "/v2": ("get", "Name, version and extensions of the server", "Object"),
    "/v2/health/live": ("get", "Whether the server runs", "Object"),
    "/v2/health/ready": ("get", "Whether every model that should be is ready", "Object"),
    "/v2/models": ("get", "Every model, its versions and their states", "Object"),
    "/v2/status": ("get", "Counts and states of all models and their backends, as the status page shows them", "Object"),
    "/v2/models/stats": ("get", "The statistics of every ready model", "Object"),
    "/v2/repository/index": ("post", "Every model version and its state", "List"),
    "/v2/repository/models/{model}/load": ("post", "Load a model; needs server.model_control", ""),
    "/v2/repository/models/{model}/unload": ("post", "Unload a model; needs server.model_control", ""),
    "/v2/systemsharedmemory/status": ("get", "The registered regions of shared memory", "List"),
    "/v2/systemsharedmemory/unregister": ("post", "Forget all regions", ""),
    "/v2/systemsharedmemory/region/{region}/status": ("get", "A registered region", "List"),
    "/v2/systemsharedmemory/region/{region}/register": ("post", "Register a region", ""),
    "/v2/systemsharedmemory/region/{region}/unregister": ("post", "Forget a region", ""),
    "/v2/cudasharedmemory/status": ("get", "No regions: CUDA shared memory is not offered", "List"),
    "/v2/cudasharedmemory/unregister": ("post", "Does nothing: there are no regions", ""),
    "/v2/cudasharedmemory/region/{region}/status": ("get", "Not offered", "List"),
    "/v2/cudasharedmemory/region/{region}/register": ("post", "Not offered", ""),
    "/v2/cudasharedmemory/region/{region}/unregister": ("post", "Does nothing: there are no regions", ""),
    "/v2/logging": ("get", "Not offered", "Object"),
    "/v2/trace/setting": ("get", "Not offered", "Object"),
}
# The same behind /v2/models/{model} and /v2/models/{model}/versions/{version}.
_MODEL: Final = {
    "": ("get", "Versions, inputs and outputs of a model", "Object"),
    "/ready": ("get", "Whether the model is ready", "Object"),
    "/config": ("get", "The model's configuration, in Triton's words", "Object"),
    "/stats": ("get", "The model's statistics", "Object"),
    "/route": ("get", "Which backend a request would go to now, and why", "Object"),
    "/why": ("get", "The last decisions, as msgpack, for `gateway why`", "Recording"),
    "/infer": ("post", "Inference", "InferenceResponse"),
    "/generate": ("post", "Inference with flat JSON objects: Triton's generate extension", "Object"),
    "/generate_stream": ("post", "The same, with a server-sent event for each part of the answer", "Events"),
    "/trace/setting": ("get", "Not offered", "Object"),
}


def describe_api(models: Sequence[tuple[str, str, ModelSpec]], *, metrics: bool, multi_model: bool = False) -> dict[str, Any]:
    """The document. models: name, version and tensors of those that are ready, of each name the version that is the default
    first. metrics: whether there is /metrics. multi_model: whether SageMaker loads and unloads models."""
    paths: dict[str, Any] = {path: _path(path, *operation) for path, operation in _SERVER.items()}
    paths["/ping"] |= _path("/ping", "post", "The same, for SageMaker", "")
    paths["/invocations"] = _invocation("/invocations", "Inference, as SageMaker asks for it")
    for path in ("/v1/models/{model}:predict", "/v1/models/{model}/versions/{version}:predict"):
        paths[path] = _invocation(path, "Inference, as KServe v1 and TF Serving ask for it")
    if multi_model:
        paths |= _multi_model()
    if metrics:
        paths["/metrics"] = {"get": {"summary": "Metrics, for Prometheus", "responses": {"200": _text(), "default": _ERROR}}}
    for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        paths |= {f"{prefix}{end}": _path(f"{prefix}{end}", *operation) for end, operation in _MODEL.items()}
    schemas = _common_schemas()
    unversioned: set[str] = set()
    for name, version, spec in models:
        key = f"{len(unversioned)}-{re.sub(r'[^A-Za-z0-9._-]', '_', name)}-{version}"
        at = f"/v2/models/{quote(name, safe='')}"
        described = [(f"{at}/versions/{version}", f"{name} {version}")]
        if name not in unversioned:
            unversioned.add(name)
            described.append((at, name))
        if not spec.decoupled:
            schemas[f"{key}-request"] = _request(name, version, spec)
            schemas[f"{key}-response"] = _response(name, version, spec)
            paths |= {f"{path}/infer": _infer(name, version, spec, key, f"infer {what}") for path, what in described}
        if not any(tensor.datatype in WITHOUT_JSON for tensor in (*spec.inputs, *spec.outputs)):
            schemas[f"{key}-generate"] = _generate_request(name, version, spec)
            schemas[f"{key}-generated"] = _generated(name, version, spec)
            schemas[f"{key}-event"] = {"anyOf": [_ref(f"{key}-generated"), _ref("Error")]}
            for path, what in described:
                for verb, answer in (("generate", _answer(f"{key}-generated")), ("generate_stream", _events(f"{key}-event"))):
                    paths[f"{path}/{verb}"] = _generate(name, version, spec, key, f"{verb} {what}", answer)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "serving-gateway",
            "version": __version__,
            "description": "The Open Inference Protocol v2 over REST; beside it SageMaker's container contract, and KServe v1.",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {"Error": {"description": "What was wrong", "content": {_JSON: {"schema": _ref("Error")}}}},
        },
    }


def _path(path: str, method: str, summary: str, answer: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "Done"}, "default": _ERROR},
    }
    if answer:
        if answer == "Recording":
            content = {"application/msgpack": {"schema": {"type": "string", "format": "binary"}}}
            operation["responses"]["200"] = {"description": "Done", "content": content}
        else:
            operation["responses"]["200"] = _events("Object") if answer == "Events" else _answer(answer)
    parameters = _path_parameters(path)
    if path.endswith("/route"):
        parameters.append({"name": "rows", "in": "query", "required": False, "schema": {"type": "integer", "minimum": 1}})
    if parameters:
        operation["parameters"] = parameters
    if method == "post":
        body = "InferenceRequest" if path.endswith("/infer") else "Object"
        needed = path.endswith(("/infer", "/generate", "/generate_stream"))
        operation["requestBody"] = {"required": needed, "content": {_JSON: {"schema": _ref(body)}}}
    return {method: operation}


def _invocation(path: str, summary: str) -> dict[str, Any]:
    """By any form of body and answer."""
    request, response = [_ref("V1Request")], [_ref("V1Response")]
    parameters = _path_parameters(path)
    if not path.endswith(":predict"):
        request.append(_ref("InferenceRequest"))
        response.append(_ref("InferenceResponse"))
        headers = ["X-Amzn-SageMaker-Custom-Attributes", "X-Amzn-SageMaker-Inference-Id"]
        if not parameters:
            headers.insert(0, "X-Amzn-SageMaker-Target-Model")
        parameters += [{"name": name, "in": "header", "required": False, "schema": {"type": "string"}} for name in headers]
    taken: dict[str, Any] = {media: {} for media in TAKEN} | {_JSON: {"schema": {"anyOf": request}}}
    given: dict[str, Any] = {media: {} for media in GIVEN} | {_JSON: {"schema": {"anyOf": response}}}
    refused = {"415": "Content-Type is not taken", "406": "Nothing of Accept is given", "503": "Too full, or too late"}
    error = {_JSON: {"schema": _ref("Error")}}
    return {
        "post": {
            "summary": summary,
            "parameters": parameters,
            "requestBody": {"required": True, "content": taken},
            "responses": {"200": {"description": "The answer", "content": given}, "default": _ERROR}
            | {status: {"description": words, "content": error} for status, words in refused.items()},
        }
    }


def _multi_model() -> dict[str, Any]:
    """By which SageMaker loads and unloads."""
    path, token = "/models/{model}", {"name": "next_page_token", "in": "query", "required": False, "schema": {"type": "string"}}
    many = _path("/models", "get", "The loaded models, by pages", "Object")
    many["get"]["parameters"] = [token]
    many |= _path("/models", "post", "Load a model: 409, it is loaded already; 507, memory does not suffice", "")
    many["post"]["requestBody"] = {"required": True, "content": {_JSON: {"schema": _ref("LoadModel")}}}
    one = _path(path, "get", "A loaded model", "Object") | _path(path, "delete", "Unload a model", "")
    invoke = _invocation(f"{path}/invoke", "Inference, as SageMaker asks a model for it")
    return {"/models": many, path: one, f"{path}/invoke": invoke}


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in re.findall("{(.*?)}", path)
    ]


def _infer(name: str, version: str, spec: ModelSpec, key: str, operation: str) -> dict[str, Any]:
    body: dict[str, Any] = {"schema": _ref(f"{key}-request")}
    in_json = not any(tensor.datatype in WITHOUT_JSON for tensor in (*spec.inputs, *spec.outputs))
    if in_json and sum(prod(smallest_shape(tensor)) for tensor in needed_inputs(spec)) <= _EXAMPLE_ELEMENTS:
        body["example"] = smallest_request(spec)
    return {
        "post": {
            "operationId": operation,
            "summary": f"Inference with {name}, version {version}",
            "requestBody": {"required": True, "content": {_JSON: body, _BINARY: {}}},
            "responses": {"200": _answer(f"{key}-response"), "default": _ERROR},
        }
    }


def _generate(name: str, version: str, spec: ModelSpec, key: str, operation: str, answer: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"schema": _ref(f"{key}-generate")}
    if sum(prod(smallest_shape(tensor)) for tensor in needed_inputs(spec)) <= _EXAMPLE_ELEMENTS:
        body["example"] = smallest_generate(spec)
    return {
        "post": {
            "operationId": operation,
            "summary": f"Inference with {name}, version {version}, by flat JSON objects",
            "requestBody": {"required": True, "content": {_JSON: body}},
            "responses": {"200": answer, "default": _ERROR},
        }
    }


def _events(schema: str) -> dict[str, Any]:
    """OpenAPI has a word for what an event holds from 3.2 on: `itemSchema`."""
    text = {"type": "string", "description": "Server-sent events: `data: `, a JSON object (x-itemSchema), an empty line"}
    return {"description": "The parts", "content": {"text/event-stream": {"schema": text, "x-itemSchema": _ref(schema)}}}


def _answer(schema: str) -> dict[str, Any]:
    return {"description": "The answer", "content": {_JSON: {"schema": _ref(schema)}}}


def _text() -> dict[str, Any]:
    return {"description": "The answer", "content": {"text/plain": {"schema": {"type": "string"}}}}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _common_schemas() -> dict[str, Schema]:
    name = {"name": {"type": "string"}, "datatype": {"type": "string"}, "shape": _shape(None), "parameters": _ref("Parameters")}
    tensor = {
        "type": "object",
        "required": ["name", "datatype", "shape"],
        "properties": name | {"data": {"type": "array"}},
    }
    schemas: dict[str, Schema] = {
        "Object": {"type": "object"},
        "List": {"type": "array"},
        "Error": {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}},
        "Parameters": {"type": "object", "additionalProperties": _PARAMETER},
        "Tensor": tensor,
        "InferenceRequest": {
            "type": "object",
            "required": ["inputs"],
            "properties": {
                "id": {"type": "string"},
                "inputs": {"type": "array", "items": _ref("Tensor")},
                "outputs": {"type": "array", "items": {"type": "object", "required": ["name"]}},
                "parameters": _ref("Parameters"),
            },
        },
        "InferenceResponse": {
            "type": "object",
            "required": ["model_name", "model_version", "outputs"],
            "properties": {"outputs": {"type": "array", "items": _ref("Tensor")}},
        },
        "LoadModel": {
            "type": "object",
            "required": ["model_name", "url"],
            "properties": {"model_name": {"type": "string"}, "url": {"type": "string", "description": "Its folder"}},
        },
        "V1Request": {
            "type": "object",
            "description": "Rows, or columns: the one input, or objects by input",
            "anyOf": [{"required": ["instances"]}, {"required": ["inputs"]}],
            "properties": {"instances": {"type": "array"}, "inputs": {}},
        },
        "V1Response": {
            "type": "object",
            "anyOf": [{"required": ["predictions"]}, {"required": ["outputs"]}],
            "properties": {"predictions": {"type": "array"}, "outputs": {}},
        },
    }
    return schemas | {datatype: _data(datatype) for datatype in NUMPY if datatype not in WITHOUT_JSON}


def _data(datatype: str) -> Schema:
    """Elements, flat or in nested lists."""
    dtype = NUMPY[datatype]
    element: Schema
    if datatype == "BOOL":
        element = {"type": "boolean"}
    elif datatype == "BYTES":
        element = {"type": "string"}
    elif dtype.kind == "f":
        element = {"type": "number"}
    else:
        bounds = np.iinfo(dtype)
        element = {"type": "integer", "minimum": int(bounds.min), "maximum": int(bounds.max)}
    return {"type": "array", "items": {"anyOf": [element, _ref(datatype)]}}


def _shape(declared: Sequence[int] | None) -> Schema:
    """None: any."""
    size = {"type": "integer", "minimum": 0}
    if declared is None:
        return {"type": "array", "items": size}
    schema: Schema = {"type": "array", "minItems": len(declared), "maxItems": len(declared), "description": str(list(declared))}
    if declared:
        schema["prefixItems"] = [size if wanted < 0 else {"const": wanted} for wanted in declared]
    return schema


def _tensor(tensor: TensorSpec) -> Schema:
    properties: dict[str, Any] = {
        "name": {"const": tensor.name},
        "datatype": {"const": tensor.datatype},
        "shape": _shape(tensor.shape),
        "parameters": _ref("Parameters"),
    }
    if tensor.datatype not in WITHOUT_JSON:
        properties["data"] = _ref(tensor.datatype)
    return {"type": "object", "title": tensor.name, "required": ["name", "datatype", "shape"], "properties": properties}


def _request(name: str, version: str, spec: ModelSpec) -> Schema:
    needed = [tensor.name for tensor in spec.inputs if not tensor.optional]
    inputs: Schema = {"type": "array", "items": {"anyOf": [_tensor(tensor) for tensor in spec.inputs]}}
    if needed:
        inputs["minItems"] = len(needed)
        inputs["allOf"] = [
            {"contains": {"type": "object", "required": ["name"], "properties": {"name": {"const": one}}}} for one in needed
        ]
    output = {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"enum": [tensor.name for tensor in spec.outputs]}, "parameters": _ref("Parameters")},
    }
    return {
        "title": f"A request for {name}, version {version}",
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "inputs": inputs,
            "outputs": {"type": "array", "description": "Those asked for; none: all", "items": output},
            "parameters": _ref("Parameters"),
        },
    }


def _generate_request(name: str, version: str, spec: ModelSpec) -> Schema:
    return {
        "title": f"A generate request for {name}, version {version}",
        "description": "An element or a flat list fills the model's shape; nested lists state it. Other keys are parameters.",
        "type": "object",
        "required": [tensor.name for tensor in spec.inputs if not tensor.optional],
        "properties": {"id": {"type": "string"}, "parameters": _ref("Parameters")}
        | {tensor.name: _elements(tensor) for tensor in spec.inputs},
        "additionalProperties": _PARAMETER,
    }


def _generated(name: str, version: str, spec: ModelSpec) -> Schema:
    return {
        "title": f"What {name}, version {version}, generates: an answer, or a part of one",
        "type": "object",
        "required": ["model_name", "model_version"],
        "properties": {tensor.name: _elements(tensor) for tensor in spec.outputs}
        | {"id": {"type": "string"}, "model_name": {"const": name}, "model_version": {"const": version}},
    }


def _elements(tensor: TensorSpec) -> Schema:
    """One, or lists of them."""
    return {"title": f"{tensor.name}: {tensor.datatype} {list(tensor.shape)}", **_data(tensor.datatype)["items"]}


def _response(name: str, version: str, spec: ModelSpec) -> Schema:
    classes = {  # of the classification extension, in place of an output's own elements
        "type": "object",
        "required": ["name", "datatype", "shape"],
        "properties": {
            "name": {"enum": [tensor.name for tensor in spec.outputs]},
            "datatype": {"const": "BYTES"},
            "shape": _shape(None),
            "data": _ref("BYTES"),
        },
    }
    return {
        "title": f"An answer of {name}, version {version}",
        "type": "object",
        "required": ["model_name", "model_version", "outputs"],
        "properties": {
            "model_name": {"const": name},
            "model_version": {"const": version},
            "id": {"type": "string"},
            "parameters": _ref("Parameters"),
            "outputs": {"type": "array", "items": {"anyOf": [*(_tensor(tensor) for tensor in spec.outputs), classes]}},
        },
    }
