"""A raw model (`ModelSpec.raw`) over plain HTTP, by any route, pure: a body and its headers to an `InferRequest`, and back.

The model gets the body as it came, with its Content-Type and Accept. The headers by which SageMaker tells more are parameters
of the request, by their names in lower case, where the model reads any.
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from backends.base import RAW_INPUTS, ModelSpec, Tensors
from gateway.errors import BackendFailed
from gateway.protocols.tensors import shape_key
from gateway.types import InferRequest, InferResponse, ParameterValue, RegionRef
from gateway.wire.tensors import Buffer

_OF_SAGEMAKER: Final = b"x-amzn-sagemaker-"
_UNKNOWN: Final = "application/octet-stream"
_MOST_TYPE_CHARS: Final = 256


class RawCodec:
    """Of one version of a raw model."""

    def __init__(self, model: str, version: str, spec: ModelSpec) -> None:
        self.model = model
        self.version = version
        self.spec = spec

    def at_leisure(self) -> "RawCodec":
        return self

    def decode(self, body: Buffer, headers: Mapping[bytes, bytes], arrival_ns: int) -> InferRequest:
        """As `request_of`."""
        return request_of(self.spec, self.model, self.version, body, headers, arrival_ns)

    def encode(
        self, request: InferRequest, response: InferResponse, write_region: Callable[[RegionRef, Buffer, int], None]
    ) -> tuple[bytes, str]:
        """As `answer_of`."""
        return answer_of(response)


def request_of(
    spec: ModelSpec, model: str, version: str, body: Buffer, headers: Mapping[bytes, bytes], arrival_ns: int
) -> InferRequest:
    """spec: of a raw model. headers: names in lower case."""
    given = bytes(body), headers.get(b"content-type", b""), headers.get(b"accept", b"")
    inputs = {name: _element(value) for name, value in zip(RAW_INPUTS, given, strict=True)}
    parameters: dict[str, ParameterValue] = {}
    if spec.reads_parameters:
        parameters = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items() if name.startswith(_OF_SAGEMAKER)
        }
    key = shape_key(spec, None, inputs, parameters)
    return InferRequest(model, version, "", inputs, 1, arrival_ns, parameters=parameters, shape_key=key)


def answer_of(response: InferResponse) -> tuple[bytes, str]:
    """The body of the answer and its content type. Raises: BackendFailed, for a content type that no header can hold."""
    content_type = _text(response.outputs, "content_type") or _UNKNOWN
    if len(content_type) > _MOST_TYPE_CHARS or not (content_type.isascii() and content_type.isprintable()):
        raise BackendFailed(
            f"model '{response.model}': content type {content_type[:_MOST_TYPE_CHARS]!r}: expected at most {_MOST_TYPE_CHARS} "
            "printable characters of ASCII"
        )
    body = response.outputs["body"].item()
    return body.encode() if isinstance(body, str) else bytes(body), content_type


def _element(value: bytes) -> np.ndarray:
    array = np.empty(1, object)
    array[0] = value
    return array


def _text(outputs: Tensors, name: str) -> str:
    value = outputs[name].item()
    return value if isinstance(value, str) else bytes(value).decode("latin-1")
