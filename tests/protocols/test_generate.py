"""The generate extension's codec: bytes in, requests out; answers and parts in, JSON out."""

import json
import math
from typing import Any

import numpy as np
import pytest

from backends.base import ModelSpec, TensorSpec
from gateway.errors import InvalidArgument
from gateway.protocols.generate import GenerateCodec
from gateway.types import InferRequest, InferResponse, RegionRef


def model(*inputs: TensorSpec, outputs: tuple[TensorSpec, ...] = (), max_rows: int = 8, **more: Any) -> GenerateCodec:
    outputs = outputs or (TensorSpec("OUT", "BYTES", (-1, 1)),)
    return GenerateCodec("m", "1", ModelSpec("test", inputs, outputs, max_rows, **more), None, 4)


TEXT = model(TensorSpec("text_input", "BYTES", (-1, 1)), TensorSpec("count", "INT32", (-1, 1), optional=True))


def decode(codec: GenerateCodec, **fields: Any) -> InferRequest:
    return codec.decode(json.dumps(fields).encode(), 1000)


def refusal(codec: GenerateCodec, body: bytes | None = None, **fields: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        codec.decode(json.dumps(fields).encode() if body is None else body, 0)
    return str(caught.value)


def no_region(ref: RegionRef, data: Any, asked_ns: int) -> None:
    raise AssertionError("no region was asked for")


def test_keys_that_are_inputs_are_inputs_and_the_others_are_parameters() -> None:
    request = decode(TEXT, text_input="é", temperature=0.5, parameters={"count": 3, "stream": True, "stop": "x"}, id="7")
    assert request.inputs["text_input"].tolist() == [["é".encode()]]
    assert request.inputs["count"].tolist() == [[3]]
    assert request.inputs["count"].dtype == np.int32
    assert request.parameters == {"temperature": 0.5, "stream": True, "stop": "x"}
    assert (request.id, request.model, request.version, request.rows, request.outputs) == ("7", "m", "1", 1, ())


def test_more_parameters_than_a_request_may_have_are_refused() -> None:
    many = dict.fromkeys(map(str, range(4096)), 1)
    assert decode(TEXT, text_input="a" * (1 << 20), **many).parameters == many
    assert (
        refusal(TEXT, text_input="a", one="more", parameters=many)
        == "parameters: got 4097, expected at most 4096 in one request"
    )
    long = refusal(TEXT, text_input="a", system="é" * (256 << 10))
    assert long.startswith("parameters: got 262150 characters of names and text, 262150 of them in 'system', expected at most")


def test_timeout_and_priority_are_ours_as_in_infer() -> None:
    request = decode(TEXT, text_input="a", parameters={"timeout": 5}, priority=2)
    assert (request.deadline_ns, request.priority, request.parameters) == (1000 + 5000, 2, {})
    assert decode(TEXT, text_input="a", timeout_ms=5).parameters == {"timeout_ms": 5}  # the model reads it
    deaf = model(TensorSpec("text_input", "BYTES", (-1, 1)), reads_parameters=False)
    assert "'timeout_ms': unknown; did you mean 'timeout'" in refusal(deaf, text_input="a", timeout_ms=5)
    deaf = model(TensorSpec("text_input", "BYTES", (-1, 1)), reads_parameters=False, own_arguments=("n",))
    assert "parameter 'n': the model has a value of its own for it" in refusal(deaf, text_input="a", n=5)
    assert "integer from 0" in refusal(TEXT, text_input="a", timeout="soon")
    assert "JSON only" in refusal(TEXT, text_input="a", binary_data_output=True)
    assert "64 bits" in refusal(TEXT, text_input="a", seed=1 << 70)
    assert "starting with 'triton_' are reserved" in refusal(TEXT, text_input="a", triton_x=1)
    assert "starting with 'gateway.' are reserved" in refusal(TEXT, text_input="a", parameters={"gateway.traceparent": "x"})


# Of Triton 2.51: an element or a flat list goes to the innermost open size.
@pytest.mark.parametrize(
    ("shape", "max_rows", "given", "expected"),
    [
        ((-1, 1), 8, 5, (1, 1)),
        ((-1, 1), 8, [5], (1, 1)),
        ((-1, 1), 8, [5, 6], (2, 1)),
        ((-1, -1), 8, [5, 6], (1, 2)),
        ((-1, -1), 8, 5, (1, 1)),
        ((-1, 2, -1), 8, [1, 2, 3, 4], (1, 2, 2)),
        ((-1, 4), 8, [1, 2, 3, 4, 5, 6, 7, 8], (2, 4)),
        ((1,), 0, 5, (1,)),
        ((1, 1), 0, 5, (1, 1)),
        ((-1,), 0, [5, 6, 7], (3,)),
        ((-1, -1), 8, [], (1, 0)),
        # not of Triton's, which takes no nested lists
        ((-1, -1), 8, [[1, 2], [3, 4]], (2, 2)),
        ((-1, 1), 8, [[5]], (1, 1)),
        ((-1, -1, -1), 8, [[1, 2], [3, 4], [5, 6]], (1, 3, 2)),
    ],
)
def test_elements_fill_the_shape(shape: tuple[int, ...], max_rows: int, given: Any, expected: tuple[int, ...]) -> None:
    codec = model(TensorSpec("x", "INT64", shape), max_rows=max_rows)
    tensor = decode(codec, x=given).inputs["x"]
    assert tensor.shape == expected
    assert tensor.ravel().tolist() == np.ravel(given).tolist()


@pytest.mark.parametrize(
    ("shape", "given", "words"),
    [
        ((-1, 4), [1, 2, 3], "3 elements cannot be made INT64 [-1, 4]"),
        ((-1, 4), 1, "1 element cannot be made INT64 [-1, 4]"),
        ((-1, 2), [[1, 2, 3]], "expected INT64 [-1, 2], got INT64 [1, 3]"),
        ((-1,), [[1], [2]], "expected INT64 [-1], got INT64 [2, 1]"),
        ((-1, -1), [[1, 2], [3]], "lists of 1 and of 2 side by side"),
        ((-1, -1), [[1, 2], 3], "expected lists of one depth everywhere, got a whole number at data[1]"),
        ((-1, -1), [[[[[1]]]]], "nested 5 deep"),
        ((-1, 1), "text", "expected INT64 elements, got text"),
        ((-1, 1), 1.5, "expected INT64 elements"),
        ((-1, 1), None, "got null"),
        ((-1, 1), {"a": 1}, "got an object"),
        ((-1, 1), [], "at least 1 row"),
        ((-1, 1), 1 << 70, "INT64"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(shape: tuple[int, ...], given: Any, words: str) -> None:
    message = refusal(model(TensorSpec("x", "INT64", shape)), x=given)
    assert words in message
    assert "'x'" in message or "row" in words


def test_what_is_missing_is_named_with_the_smallest_request() -> None:
    smallest = """the smallest request: {"text_input":"1"}"""
    assert smallest in refusal(TEXT, b"")
    assert smallest in refusal(TEXT)
    message = refusal(TEXT, text_inpt="a")
    assert "missing 'text_input'" in message
    assert "taken as parameters: 'text_inpt'" in message
    wide = model(TensorSpec("x", "FP32", (-1, 100)), TensorSpec("y", "FP32", (-1, 2)))
    assert """{"x":[1.0, … 100 of them],"y":[1.0,1.0]}""" in refusal(wide)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"text_inpt": ["a"]}, "did you mean 'text_input'"),
        ({"text_input": "a", "stop": ["a", "b"]}, "parameter 'stop': got a list, expected text, a number, true or false"),
        ({"text_input": "a", "stop": None}, "got null"),
        ({"text_input": "a", "parameters": {"deep": {"a": 1}}}, "parameter 'deep': got an object"),
        ({"text_input": "a", "parameters": {"text_input": "b"}}, "'text_input' is given twice"),
        ({"text_input": "a", "x": 1, "parameters": {"x": 2}}, "'x' is given twice"),
        ({"text_input": "a", "parameters": 1}, "'parameters': expected an object"),
        ({"text_input": "a", "parameters": None}, "'parameters': expected an object"),
        ({"text_input": "a", "id": 7}, "'id': got 7, expected text"),
    ],
)
def test_what_is_no_request_is_refused(fields: dict[str, Any], words: str) -> None:
    assert words in refusal(TEXT, **fields)


@pytest.mark.parametrize(
    "body",
    [
        *(b"[]", b"{", b'"x"', b'{"text_input": "\xff"}', b'{"text_input": "\xed\xa0\x80", "x": NaN}'),
        *(b"[" * 100_000, b'{"text_input":' + b"[" * 100_000),
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    assert refusal(TEXT, body)


def test_the_words_that_json_lacks_are_read_and_written() -> None:
    codec = model(TensorSpec("x", "FP32", (-1, -1)), outputs=(TensorSpec("y", "FP32", (-1, -1)),))
    request = codec.decode(b'{"x": [NaN, 1, -Infinity], "parameters": {"a": [1]}}'.replace(b"[1]", b"true"), 0)
    assert request.inputs["x"][0].tolist()[1:] == [1.0, -math.inf]
    assert request.parameters == {"a": True}
    answer = InferResponse("m", "1", "", {"y": np.array([[np.nan]], np.float32)})
    assert codec.encode(request, answer, no_region) == [b'{"model_name":"m","model_version":"1","y":NaN}']


def test_an_answer_is_a_flat_object() -> None:
    outputs = TensorSpec("text", "BYTES", (-1, 1)), TensorSpec("many", "FP32", (-1, 2)), TensorSpec("ok", "BOOL", (-1,))
    codec, decoupled = (model(TensorSpec("x", "FP32", (-1,)), outputs=outputs, decoupled=parts) for parts in (False, True))
    answer = {
        "text": np.array([[b'line\n"two"']], object),
        "many": np.array([[0.1, 2], [3, 4]], np.float32),
        "ok": np.zeros(0, bool),
    }
    request = decode(codec, x=1, id="7")
    (written,) = codec.encode(request, InferResponse("m", "1", "7", answer, {"n": 1, "model_name": "not"}), no_region)
    assert json.loads(written) == {
        "id": "7", "model_name": "m", "model_version": "1", "n": 1,
        "text": 'line\n"two"', "many": [0.1, 2.0, 3.0, 4.0], "ok": [],
    }  # fmt: skip
    assert b"\n" not in written  # an event ends at one
    way = "UTF-8 text: ask by infer with binary data, or over gRPC"
    for each, words in ((codec, way), (codec.at_leisure(), way), (decoupled, "UTF-8 text: ask by ModelStreamInfer over gRPC")):
        with pytest.raises(InvalidArgument, match=words):
            each.encode(request, InferResponse("m", "1", "", {"text": np.array([[b"\xff"]], object)}), no_region)


def test_what_json_cannot_hold_is_asked_for_elsewhere() -> None:
    half = TensorSpec("h", "FP16", (-1, 1))
    assert "'h' is FP16, which JSON lacks: ask by infer with binary data, or over gRPC" in refusal(model(half), h=1)
    assert "JSON lacks: ask by ModelStreamInfer over gRPC" in refusal(model(half, decoupled=True), h=1)  # infer sends it here
    assert "'h' is FP16" in refusal(model(TensorSpec("x", "FP32", (-1,)), outputs=(half,)), x=1)
    optional = model(TensorSpec("x", "FP32", (-1,)), TensorSpec("h", "FP16", (-1, 1), optional=True))
    assert decode(optional, x=1).rows == 1
    assert "'h'" in refusal(optional, x=1, h=1)


def test_inputs_may_have_the_names_of_fields() -> None:
    assert decode(model(TensorSpec("id", "BYTES", (-1, 1))), id="a").inputs["id"].tolist() == [[b"a"]]
    assert "'parameters'" in refusal(model(TensorSpec("parameters", "FP32", (-1, 1))), parameters={})
