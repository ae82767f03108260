"""Plain HTTP to a raw model: a body and its headers to a request, and its outputs to a body."""

import numpy as np
import pytest

from backends.base import ModelSpec, TensorSpec
from backends.sagemaker import tensors
from gateway.errors import BackendFailed
from gateway.protocols.raw_body import answer_of, request_of
from gateway.types import InferResponse

ONE = ModelSpec("python", *tensors(0), 0)
MANY = ModelSpec("python", *tensors(8), 8, reads_parameters=False)
HEADERS = {
    b"content-type": b"image/png",
    b"accept": b"text/csv",
    b"x-amzn-sagemaker-custom-attributes": b"trace=7",
    b"host": b"localhost",
}


def answer(body: object, content_type: object) -> InferResponse:
    outputs = {"body": np.array([body], object), "content_type": np.array([content_type], object)}
    return InferResponse("m", "1", "", outputs)


@pytest.mark.parametrize("body", [b"", b"\x00\xff", bytes(70_000)])
def test_a_body_is_one_element_with_its_types_beside_it(body: bytes) -> None:
    request = request_of(ONE, "m", "1", memoryview(body), HEADERS, 5)
    assert (request.model, request.version, request.rows, request.arrival_ns) == ("m", "1", 1, 5)
    assert {name: (array.shape, array.tolist()) for name, array in request.inputs.items()} == {
        "body": ((1,), [body]), "content_type": ((1,), [b"image/png"]), "accept": ((1,), [b"text/csv"]),
    }  # fmt: skip
    assert type(request.inputs["body"][0]) is bytes


def test_headers_that_are_not_there_are_empty() -> None:
    request = request_of(ONE, "m", "1", b"x", {}, 0)
    assert (request.inputs["content_type"].item(), request.inputs["accept"].item(), request.parameters) == (b"", b"", {})


def test_what_sagemaker_tells_more_is_a_parameter_and_nothing_else() -> None:
    assert request_of(ONE, "m", "1", b"x", HEADERS, 0).parameters == {"x-amzn-sagemaker-custom-attributes": "trace=7"}


def test_requests_of_other_headers_share_a_batch_where_the_model_reads_none() -> None:
    plain = request_of(MANY, "m", "1", b"x", {}, 0)
    other = request_of(MANY, "m", "1", b"y", HEADERS, 0)
    assert other.parameters == {}
    assert plain.shape_key == other.shape_key


def test_an_answer_is_the_body_and_its_content_type() -> None:
    assert answer_of(answer(b"\x00", b"image/png")) == (b"\x00", "image/png")
    assert answer_of(answer("täxt", "text/plain")) == ("täxt".encode(), "text/plain")
    assert answer_of(answer(b"x", b"")) == (b"x", "application/octet-stream")


@pytest.mark.parametrize("content_type", [b"text/plain\r\nSet-Cookie: a", b"\xff", b"a" * 257])
def test_a_content_type_that_no_header_holds_is_the_models_fault(content_type: bytes) -> None:
    with pytest.raises(BackendFailed, match="printable characters of ASCII"):
        answer_of(answer(b"x", content_type))


def test_a_raw_model_is_known_by_the_names_of_its_tensors() -> None:
    assert ONE.raw
    assert MANY.raw
    text = TensorSpec("body", "BYTES", (1,))
    assert not ModelSpec("", (text,), (text,), 0).raw
    assert not ModelSpec("", ONE.inputs[::-1], ONE.outputs, 0).raw
    numbers = tuple(TensorSpec(each.name, "UINT8", (1,)) for each in ONE.inputs)
    assert not ModelSpec("", numbers, ONE.outputs, 0).raw
