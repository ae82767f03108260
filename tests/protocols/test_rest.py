"""The REST codec: bytes in, requests out; responses in, bytes out.

Expected bytes are those of a real Triton 2.51, but where said.
"""

import codecs
import json
import math
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import ModelSpec, TensorSpec
from backends.datatypes import NUMPY
from gateway.config import Ragged
from gateway.errors import Code, GatewayError, InvalidArgument
from gateway.protocols.rest import RestCodec, header_length
from gateway.protocols.tensors import TakesLong, shape_key
from gateway.types import InferRequest, InferResponse, OutputRequest, RegionRef
from gateway.wire.http_errors import STATUS, error_body
from gateway.wire.tensors import Buffer

DATATYPES = list(NUMPY)
JSON_DATATYPES = [name for name in DATATYPES if name not in ("FP16", "BF16")]


def model(
    *inputs: TensorSpec, outputs: tuple[TensorSpec, ...] = (), max_rows: int = 8, ragged: Ragged | None = None
) -> RestCodec:
    outputs = outputs or tuple(TensorSpec(f"O{i}", each.datatype, each.shape) for i, each in enumerate(inputs))
    return RestCodec("m", "1", ModelSpec("test", inputs, outputs, max_rows), ragged, 32)


IDENTITY = model(TensorSpec("IN", "FP32", (-1, 4)))
TWO = model(
    TensorSpec("A", "FP32", (-1, 2)),
    TensorSpec("B", "INT32", (-1, 2)),
    outputs=(TensorSpec("C", "FP32", (-1, 2), labels=("cat", "dog")), TensorSpec("D", "INT32", (-1, 2))),
)


def no_region(ref: RegionRef, asked_ns: int) -> Buffer:
    raise AssertionError("no region was asked for")


def decode(codec: RestCodec, body: Buffer, header_bytes: int | None = None, **options: Any) -> InferRequest:
    return codec.decode(body, header_bytes, options.get("arrival_ns", 0), options.get("read_region", no_region))


def as_json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def one(data: Any, *, datatype: str = "FP32", shape: Any = (1, 4), name: str = "IN", **fields: Any) -> bytes:
    return as_json(inputs=[{"name": name, "datatype": datatype, "shape": list(shape), "data": data}], **fields)


def of(datatype: str, columns: int = 4) -> RestCodec:
    return model(TensorSpec("IN", datatype, (-1, columns)))


def binary(tensors: list[tuple[str, str, list[int], bytes]], **fields: Any) -> tuple[bytes, int]:
    """A request of the binary extension, and the length of its JSON."""
    inputs = [
        {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(raw)}}
        for name, datatype, shape, raw in tensors
    ]
    head = as_json(inputs=inputs, **fields)
    return head + b"".join(raw for *_, raw in tensors), len(head)


# JSON data


@pytest.mark.parametrize("data", [[1, 2.5, -3e-2, 4], [[1, 2.5, -3e-2, 4]], [[[1, 2.5], [-3e-2, 4]]]])
def test_data_may_be_flat_or_nested(data: Any) -> None:
    request = decode(IDENTITY, one(data))
    np.testing.assert_array_equal(request.inputs["IN"], np.array([[1, 2.5, -3e-2, 4]], np.float32), strict=True)
    assert (request.model, request.version, request.rows) == ("m", "1", 1)


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("UINT8", [0, 255]), ("UINT16", [0, 65535]), ("UINT32", [0, 2**32 - 1]), ("UINT64", [0, 2**64 - 1]),
        ("INT8", [-128, 127]), ("INT16", [-(2**15), 2**15 - 1]), ("INT32", [-(2**31), 2**31 - 1]),
        ("INT64", [-(2**63), 2**63 - 1]), ("BOOL", [True, False]),
        ("FP32", [0.1, 3.4028235e38]), ("FP64", [0.1, 1.7976931348623157e308]),
    ],
)  # fmt: skip
def test_every_datatype_holds_its_extremes(datatype: str, data: list[Any]) -> None:
    tensor = decode(of(datatype, 2), one(data, datatype=datatype, shape=(1, 2))).inputs["IN"]
    np.testing.assert_array_equal(tensor, np.array([data], NUMPY[datatype]), strict=True)


@pytest.mark.parametrize(
    ("datatype", "data", "words"),
    [
        ("UINT8", [1, 300], ("element 1", "300", "UINT8", "0 to 255")),
        ("UINT8", [-1, 0], ("element 0", "-1", "0 to 255")),
        ("INT64", [1, 2**63], ("element 1", str(2**63))),
        ("UINT64", [1, 2**64], ("element 1",)),
        ("INT32", [1, 2.0], ("INT32", "got a float at data[1]")),
        ("INT32", [1, float("nan")], ("got a float at data[1]",)),
        ("INT32", [True, 2], ("INT32", "got true or false at data[0]")),
        ("BOOL", [0, 1], ("BOOL", "got a whole number")),
        ("FP32", [True, 1], ("FP32", "got true or false")),
        ("FP32", ["1", 1], ("FP32", "got text at data[0]")),
        ("FP32", [None, 1], ("FP32", "got null")),
        ("FP32", [1e39, 1], ("element 0", "1e+39", "FP32")),  # Triton makes it infinite
        ("BYTES", ["a", 1], ("BYTES", "got a whole number at data[1]")),
        ("FP32", 5, ("no list",)),
        ("FP32", "text", ("no list",)),
        ("FP32", {"a": 1}, ("no list",)),
        ("FP32", [[1], 2], ("expected lists of one depth everywhere, got a whole number at data[1]",)),
        ("BYTES", ["a", ["b"]], ("expected lists of one depth everywhere, got a list at data[1]",)),
        ("FP32", [1], ("1 elements", "expected 2", "[1, 2]")),
        ("FP32", [[1, 2], [3, 4]], ("4 elements", "expected 2")),
        ("FP32", [[[[]]]], ("0 elements",)),
    ],
)
def test_a_wrong_element_is_named(datatype: str, data: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        decode(of(datatype, 2), one(data, datatype=datatype, shape=(1, 2)))
    for word in ("'IN'", *words):
        assert word in caught.value.message


def test_a_number_beyond_every_datatype_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"'IN'.*out of range"):
        decode(of("FP64", 1), b'{"inputs":[{"name":"IN","datatype":"FP64","shape":[1,1],"data":[1e999]}]}')
    with pytest.raises(InvalidArgument):
        decode(of("INT64", 1), b'{"inputs":[{"name":"IN","datatype":"INT64","shape":[1,1],"data":[' + b"9" * 5000 + b"]}]}")
    for number in (b"1e400", b"-1e400", b"9" * 400, b"9" * 400 + b".5", b"9" * 5000):
        for beside in (b"0", b"NaN", b"Infinity"):
            data = b"[%b,%b]" % (beside, number)
            with pytest.raises(InvalidArgument, match="out of range"):
                decode(of("FP64", 2), b'{"inputs":[{"name":"IN","datatype":"FP64","shape":[1,2],"data":%b}]}' % data)


def test_what_is_not_finite_is_read_as_its_word() -> None:
    body = b'{"id":"NaN","inputs":[{"name":"IN","datatype":"FP32","shape":[1,4],"data":[NaN,Infinity,-Infinity,1]}]}'
    request = decode(IDENTITY, body)
    np.testing.assert_array_equal(request.inputs["IN"], np.array([[np.nan, np.inf, -np.inf, 1]], np.float32))
    assert request.id == "NaN"
    with pytest.raises(InvalidArgument, match="INT32"):
        decode(of("INT32"), body.replace(b"FP32", b"INT32"))
    with pytest.raises(InvalidArgument, match="JSON"):
        decode(IDENTITY, b"NaN" + body)
    with pytest.raises(InvalidArgument, match="Expected `object`"):
        decode(IDENTITY, b"[NaN]")


def test_numbers_beside_a_nan_are_read_exactly() -> None:
    numbers = ["1e-400", "5e-324", "1.7976931348623157e308", "-0.0", "0.1", "123456789.123456789e-7"]
    data = ",".join(["NaN", *numbers]).encode()
    body = b'{"inputs":[{"name":"IN","datatype":"FP64","shape":[1,7],"data":[%b]}]}' % data
    tensor = decode(of("FP64", 7), body).inputs["IN"]
    assert repr(tensor[0, 1:].tolist()) == repr([float(text) for text in numbers])


def test_text_becomes_utf8_bytes() -> None:
    tensor = decode(of("BYTES", 1), one(["a", "é€😀", ""], datatype="BYTES", shape=(3, 1))).inputs["IN"]
    assert tensor.tolist() == [[b"a"], ["é€😀".encode()], [b""]]
    with pytest.raises(InvalidArgument):
        decode(of("BYTES", 1), b'{"inputs":[{"name":"IN","datatype":"BYTES","shape":[1,1],"data":["\xff"]}]}')


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_has_no_json_form(datatype: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{datatype} data via JSON.*binary.*'IN'"):
        decode(of(datatype), one([1, 2, 3, 4], datatype=datatype))


def test_depth_is_limited() -> None:
    deep: Any = [1, 2, 3, 4]
    for _ in range(31):
        deep = [deep]
    assert decode(IDENTITY, one(deep)).rows == 1
    with pytest.raises(InvalidArgument, match=r"33 deep.*at most 32"):
        decode(IDENTITY, one([deep]))
    for body in (
        b"[" * 100_000,
        b'{"inputs":' + b"[" * 100_000,
        b'{"x":' + b"[" * 100_000,
        one([]).replace(b"[]", b"[" * 100_000),
    ):
        with pytest.raises(InvalidArgument):
            decode(IDENTITY, body)
        with pytest.raises(InvalidArgument):
            decode(IDENTITY, body + b"NaN")


def test_empty_tensors_are_tensors() -> None:
    codec = model(TensorSpec("IN", "INT64", (-1, -1)), max_rows=0)
    assert decode(codec, one([], datatype="INT64", shape=(0, 2))).inputs["IN"].shape == (0, 2)


# the envelope


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "JSON"),
        (b"{bad", "JSON"),
        (b"[]", "expected `object`"),
        (b"{}", "inputs"),
        (b'{"inputs":{}}', "inputs"),
        (as_json(inputs=[]), "expected 1 inputs but got 0 inputs for model 'm'"),
        (as_json(inputs=[{"name": "IN"}]), "datatype"),
        (as_json(inputs=[{"name": "IN", "datatype": "FP32", "shape": [1, 4]}]), "'IN'.*But no field is set"),
        (one([1, 2, 3, 4], name="Z"), "unexpected inference input 'Z' for model 'm'"),
        (one([1, 2, 3, 4], datatype="INT32"), "'IN'.*expected FP32 .*got INT32"),
        (one([1, 2, 3, 4], datatype="XX"), "got XX"),
        (one([1, 2, 3, 4], shape=(4,)), r"expected FP32 \[-1, 4\], got FP32 \[4\]"),
        (one([1, 2, 3, 4, 5], shape=(1, 5)), r"got FP32 \[1, 5\]"),
        (one([], shape=(-1, 4)), "shape"),
        (one([], shape=(0, 4)), "at least 1 row"),
        (one([1], shape="x"), "shape"),
        (one([], shape=(2**62, 4)), "0 elements, expected 18446744073709551616"),
        (one([1, 2, 3, 4], id=5), "id"),
        (one([1, 2, 3, 4], outputs=[{"name": "X"}]), "unexpected inference output 'X' for model 'm'"),
        (one([1, 2, 3, 4], outputs=[{}]), "name"),
        (one([1, 2, 3, 4], parameters={"x": {"a": 1}}), r"malformed .*got `object` - at `\$\.parameters\['x'\]`"),
        (one([1, 2, 3, 4], parameters={"y": 1, "x": None}), r"malformed .*got `null` - at `\$\.parameters\['x'\]`"),
        (one([math.nan, 2, 3, 4], parameters={"y": 1, "x": None}), r"malformed .*got `null` - at `\$\.parameters\['x'\]`"),
        (
            one([1, 2, 3, 4], outputs=[{"name": "A"}, {"name": "B", "parameters": {"x": []}}]),
            r"outputs\[1\]\.parameters\['x'\]",
        ),
        (as_json(inputs=[{"name": "A", "datatype": "A", "shape": [], "parameters": {"x": None}}]), r"inputs\[0\]\..*\['x'\]"),
        (one([1, 2, 3, 4], parameters={"x": None})[:-1], r"\$\.parameters\[\.\.\.\]"),  # what is cut has no names to tell
        (b'{"outputs":[{"name":"A","parameters":{"x":null}}],"outputs":[]}', r"outputs\[0\]\.parameters\[\.\.\.\]"),
        (b'{"parameters":{"x":null},"parameters":null}', r"\$\.parameters\[\.\.\.\]"),
        (one([1, 2, 3, 4], parameters={"timeout": "x"}), "'timeout': got 'x'"),
        (one([1, 2, 3, 4], parameters={"timeout": -1}), "'timeout': got -1"),
        (one([1, 2, 3, 4], parameters={"timeout": True}), "'timeout': got True"),
        (one([1, 2, 3, 4], parameters={"priority": -1}), "'priority'"),
        (one([1, 2, 3, 4], parameters={"binary_data_output": "x"}), "'binary_data_output'"),
        (one([1, 2, 3, 4], parameters={"triton_x": 1}), "'triton_x': keys starting with 'triton_' are reserved"),
        (one([1, 2, 3, 4], parameters={"gateway.x": "x"}), "'gateway.x': keys starting with 'gateway.' are reserved"),
        (one([1, 2, 3, 4], outputs=[{"name": "O0", "parameters": {"classification": "x"}}]), "'O0'.*'classification'"),
        (one([1, 2, 3, 4], outputs=[{"name": "O0", "parameters": {"shared_memory_region": "r"}}]), "'shared_memory_byte_size'"),
    ],
)
def test_a_malformed_request_is_explained(body: bytes, words: str) -> None:
    with pytest.raises(InvalidArgument, match=f"(?i){words}" if words == "JSON" else f"(?i:{words})"):
        decode(IDENTITY, body)


def test_inputs_must_agree_and_come_once() -> None:
    a = {"name": "A", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
    b = {"name": "B", "datatype": "INT32", "shape": [2, 2], "data": [1, 2, 3, 4]}
    with pytest.raises(InvalidArgument, match=r"expected 2 inputs but got 1 inputs for model 'm'.*'B'"):
        decode(TWO, as_json(inputs=[a]))
    with pytest.raises(InvalidArgument, match="input 'A' already exists in request"):
        decode(TWO, as_json(inputs=[a, a]))
    with pytest.raises(InvalidArgument, match=r"'B'.*2 rows.*'A' has 1"):
        decode(TWO, as_json(inputs=[a, b]))


def test_unknown_fields_are_passed_over() -> None:
    assert decode(IDENTITY, one([1, 2, 3, 4], unknown={"a": [1]})).rows == 1


def test_parameters_that_are_ours_are_taken() -> None:
    request = decode(
        IDENTITY,
        one(
            [1, 2, 3, 4], parameters={"timeout": 1500, "priority": 2, "binary_data_output": True, "temperature": 0.5, "x": "y"}
        ),
        arrival_ns=7,
    )
    assert request.deadline_ns == 7 + 1_500_000
    assert request.priority == 2
    assert request.parameters == {"temperature": 0.5, "x": "y"}
    assert request.shape_key == shape_key(IDENTITY.spec, None, request.inputs, request.parameters)
    assert request.outputs == (OutputRequest("O0", binary=True),)
    assert decode(IDENTITY, one([1, 2, 3, 4], parameters={"timeout": 0})).deadline_ns is None


@pytest.mark.parametrize("key", ["timout", "Timeout", "time_out", "timeout_ms", "priorty", "binary_data_ouput"])
def test_a_name_like_one_of_ours_is_refused_where_the_model_reads_none(key: str) -> None:
    deaf = RestCodec("m", "1", replace(IDENTITY.spec, reads_parameters=False), None, 32)
    with pytest.raises(
        InvalidArgument, match=f"request: parameter '{key}': unknown; did you mean '(timeout|priority|binary_data_output)'"
    ):
        decode(deaf, one([1, 2, 3, 4], parameters={key: 1}))
    assert decode(IDENTITY, one([1, 2, 3, 4], parameters={key: 1})).parameters == {key: 1}  # it may be the model's own


@pytest.mark.parametrize(
    "key", ["timestamp", "property", "temperature", "content_type", "sequence_id", "seed", "id", "x" * 10_000]
)
def test_a_name_unlike_ours_passes(key: str) -> None:
    deaf = RestCodec("m", "1", replace(IDENTITY.spec, reads_parameters=False), None, 32)
    assert decode(deaf, one([1, 2, 3, 4], parameters={key: 1})).parameters == {key: 1}
    inputs = [{"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [1] * 4, "parameters": {key: 1}}]
    outputs = [{"name": "O0", "parameters": {key: 1, "binary_data_size": 3}}]
    assert decode(deaf, as_json(inputs=inputs, outputs=outputs)).outputs == (OutputRequest("O0"),)


def test_a_misspelt_parameter_of_a_tensor_is_refused() -> None:
    asked = [{"name": "O0", "parameters": {"binary_dat": True}}]
    with pytest.raises(InvalidArgument, match="output 'O0': parameter 'binary_dat': unknown; did you mean 'binary_data'"):
        decode(IDENTITY, one([1, 2, 3, 4], outputs=asked))
    given = {"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [1] * 4, "parameters": {"shared_memory_regoin": "r"}}
    with pytest.raises(InvalidArgument, match="input 'IN': parameter 'shared_memory_regoin': unknown; did you mean"):
        decode(IDENTITY, as_json(inputs=[given]))


def test_outputs_are_asked_for_once_and_in_the_models_order() -> None:
    inputs = [
        {"name": "A", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]},
        {"name": "B", "datatype": "INT32", "shape": [1, 2], "data": [1, 2]},
    ]
    wanted = [
        {"name": "D", "parameters": {"binary_data": True}},
        {"name": "C", "parameters": {"classification": 2}},
        {"name": "D", "parameters": {"binary_data": True}},
    ]
    assert decode(TWO, as_json(inputs=inputs, outputs=wanted)).outputs == (
        OutputRequest("C", classification=2),
        OutputRequest("D", binary=True),
    )
    default = as_json(inputs=inputs, outputs=[{"name": "C", "parameters": {"binary_data": False}}, {"name": "D"}],
                      parameters={"binary_data_output": True})  # fmt: skip
    assert decode(TWO, default).outputs == (OutputRequest("C"), OutputRequest("D", binary=True))
    where = [{"shared_memory_region": region, "shared_memory_byte_size": 16} for region in "ab"]
    for ways in (where, [where[0], {}], [{"binary_data": True}, {"binary_data": False}]):
        twice = [{"name": "D", "parameters": way} for way in ways]
        with pytest.raises(InvalidArgument, match="output 'D' is asked for twice, in two ways: expected once"):
            decode(TWO, as_json(inputs=inputs, outputs=twice))


def test_an_output_without_json_form_is_refused_before_the_queue() -> None:
    codec = model(TensorSpec("IN", "FP32", (-1, 4)), outputs=(TensorSpec("H", "FP16", (-1, 4)),))
    for body in (one([1, 2, 3, 4]), one([1, 2, 3, 4], outputs=[{"name": "H"}])):
        with pytest.raises(InvalidArgument, match=r"FP16 data via JSON.*binary.*'H'"):
            decode(codec, body)
    assert decode(codec, one([1, 2, 3, 4], parameters={"binary_data_output": True})).outputs[0].binary


def test_requests_of_different_shape_get_different_keys() -> None:
    codec = model(TensorSpec("IN", "FP32", (-1, -1)))
    assert decode(codec, one([1, 2], shape=(1, 2))).shape_key != decode(codec, one([1], shape=(1, 1))).shape_key
    ragged = model(TensorSpec("IN", "FP32", (-1, -1)), ragged=Ragged(pad={"IN": 0}))
    assert decode(ragged, one([1, 2], shape=(1, 2))).shape_key == decode(ragged, one([1], shape=(1, 1))).shape_key


# the binary extension


def test_binary_tensors_are_views_on_the_body() -> None:
    body, head = binary([("A", "FP32", [1, 2], struct.pack("<2f", 1, 2)), ("B", "INT32", [1, 2], struct.pack("<2i", 3, 4))])
    buffer = bytearray(body)
    request = decode(TWO, buffer, head)
    assert request.inputs["A"].tolist() == [[1, 2]]
    buffer[head : head + 4] = struct.pack("<f", 9)
    assert request.inputs["A"].tolist() == [[9, 2]]
    assert request.inputs["B"].tolist() == [[3, 4]]


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name != "BYTES"])
def test_every_datatype_is_read_from_bytes(datatype: str) -> None:
    array = np.array([[1, 0], [1, 1]]).astype(NUMPY[datatype])
    body, head = binary([("IN", datatype, [2, 2], array.tobytes())], parameters={"binary_data_output": True})
    np.testing.assert_array_equal(decode(of(datatype, 2), body, head).inputs["IN"], array, strict=True)


def test_byte_strings_are_read_with_their_lengths() -> None:
    raw = struct.pack("<I3sI", 3, b"\xff\x00a", 0)
    body, head = binary([("IN", "BYTES", [2, 1], raw)])
    assert decode(of("BYTES", 1), body, head).inputs["IN"].tolist() == [[b"\xff\x00a"], [b""]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body[:-1], "unexpected size for input 'IN', expecting 1 additional bytes for model 'm'"),
        (lambda body: body + b"x", "unexpected additional input data for model 'm'"),
    ],
)
def test_bytes_must_be_those_of_the_tensors(change: Callable[[bytes], bytes], words: str) -> None:
    body, head = binary([("IN", "FP32", [1, 4], bytes(16))])
    with pytest.raises(InvalidArgument, match=words):
        decode(IDENTITY, change(body), head)


def test_the_size_must_be_that_of_the_shape() -> None:
    body, head = binary([("IN", "FP32", [1, 4], bytes(12))])
    with pytest.raises(InvalidArgument, match="unexpected total byte size 12 for input 'IN', expecting 16"):
        decode(IDENTITY, body, head)
    huge = as_json(inputs=[{"name": "IN", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 2**62}}])
    with pytest.raises(InvalidArgument, match="additional bytes"):
        decode(IDENTITY, huge, len(huge))


def test_a_cut_header_is_malformed_json() -> None:
    body, head = binary([("IN", "FP32", [1, 4], bytes(16))])
    with pytest.raises(InvalidArgument, match="JSON"):
        decode(IDENTITY, body, head - 2)


def test_only_one_source_of_elements_may_be_given() -> None:
    both = {"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4], "parameters": {"binary_data_size": 16}}
    with pytest.raises(InvalidArgument, match="But set 'data' 'binary_data_size'"):
        decode(IDENTITY, as_json(inputs=[both]) + bytes(16), len(as_json(inputs=[both])))


@pytest.mark.parametrize("value", ["9", "-1", "abc", "", "1" * 30, "1.0"])
def test_a_header_length_out_of_range_is_refused(value: str) -> None:
    with pytest.raises(InvalidArgument, match=r"should be in range \(0, 8\), got: "):
        header_length(value.encode(), 8)


def test_the_header_length_may_be_missing_or_zero() -> None:
    assert header_length(None, 8) is None
    assert header_length(b"0", 8) == 0
    assert header_length(b"8", 8) == 8


# raw requests


def test_a_raw_body_is_the_one_input_with_one_row() -> None:
    request = decode(IDENTITY, struct.pack("<4f", 1, 2, 3, 4), 0)
    assert request.inputs["IN"].tolist() == [[1, 2, 3, 4]]
    assert request.outputs == (OutputRequest("O0", binary=True),)


def test_the_shape_of_a_raw_body_is_deduced() -> None:
    assert decode(model(TensorSpec("IN", "INT16", (-1, -1, 2))), bytes(12), 0).inputs["IN"].shape == (1, 3, 2)
    assert decode(model(TensorSpec("IN", "BYTES", (-1, 1))), b"hello", 0).inputs["IN"].tolist() == [[b"hello"]]
    assert decode(model(TensorSpec("IN", "BYTES", (-1, -1))), b"", 0).inputs["IN"].tolist() == [[b""]]


@pytest.mark.parametrize(
    ("codec", "body", "words"),
    [
        (IDENTITY, b"abc", "unexpected total byte size 3 for input 'IN', expecting 16"),
        (IDENTITY, bytes(32), "32"),
        (TWO, bytes(8), "only have 1 input.*2 inputs"),
        (model(TensorSpec("IN", "INT8", (-1, -1, -1))), bytes(8), "more than one variable-sized dimension"),
        (model(TensorSpec("IN", "INT16", (-1, -1))), bytes(3), "3"),
        (model(TensorSpec("IN", "BYTES", (-1, 2))), b"hello", "one BYTES element"),
        (model(TensorSpec("IN", "INT16", (-1, -1, 0))), bytes(4), "4"),
    ],
)
def test_a_raw_body_that_fits_no_shape_is_refused(codec: RestCodec, body: bytes, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        decode(codec, body, 0)


# long data


@pytest.mark.parametrize("element", [b"[1]", b"1", b"[ ], [1, 2]"])
def test_elements_are_counted_before_they_are_read(element: bytes) -> None:
    elements = b",".join([element] * (200_000 // len(element)))
    body = b'{"inputs":[{"name":"IN","datatype":"FP32","shape":[1,4],"data":[%b]}]}' % elements
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgument, match=f"got {elements.count(b'1') + elements.count(b'2')} elements, expected 4"):
            decode(IDENTITY, body)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(body)
    finally:
        tracemalloc.stop()


def test_long_data_with_empty_lists_in_it_is_counted_right() -> None:
    data = [[1.5] * 8_000] + [[]] * 5 + [[2.5]]
    request = decode(model(TensorSpec("IN", "FP32", (-1, -1))), one(data, shape=(1, 8_001)))
    assert request.inputs["IN"].sum() == 12_002.5


@pytest.mark.parametrize("odd", ["x", {}, {"a": 1}])
def test_what_is_no_number_in_long_data_is_named(odd: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"expected FP32 elements, got .* at data\[9000\]"):
        decode(IDENTITY, one([1] * 9_000 + [odd]))


def test_many_texts_and_long_regions_take_long_in_haste() -> None:
    def hasty(datatype: str, columns: int, raw: bytes = b"", **parameters: Any) -> None:
        spec = model(TensorSpec("IN", datatype, (-1, -1))).spec
        entry = {"name": "IN", "datatype": datatype, "shape": [1, columns], "parameters": parameters}
        head = as_json(inputs=[entry])
        RestCodec("m", "1", spec, None, 32, in_haste=True).decode(head + raw, len(head), 0, no_region)

    with pytest.raises(TakesLong):
        hasty("BYTES", 70_000, bytes(280_000), binary_data_size=280_000)
    with pytest.raises(TakesLong):
        hasty("BYTES", 1, bytes(5_000_000), binary_data_size=5_000_000)
    with pytest.raises(TakesLong):
        hasty("BYTES", 1, shared_memory_region="r", shared_memory_byte_size=5_000_000)
    one_text = model(TensorSpec("IN", "BYTES", (1,)), max_rows=0).spec
    with pytest.raises(TakesLong):
        RestCodec("m", "1", one_text, None, 32, in_haste=True).decode(bytes(5_000_000), 0, 0, no_region)
    with pytest.raises(TakesLong):
        hasty("FP32", 10_000_000, shared_memory_region="r", shared_memory_byte_size=40_000_000)
    with pytest.raises(InvalidArgument, match="300000 BYTES elements, expected at most 262144 in one tensor"):
        hasty("BYTES", 300_000, bytes(1_200_000), binary_data_size=1_200_000)


def test_a_byte_order_mark_before_the_json_is_passed_over() -> None:
    mark, body = codecs.BOM_UTF8, one([1, 2, 3, 4])
    expected = decode(IDENTITY, body).inputs["IN"].tolist()
    for _ in range(2):  # the second is known again
        assert decode(IDENTITY, mark + body).inputs["IN"].tolist() == expected
    assert np.isnan(decode(IDENTITY, mark + one([1, 2, 3, float("nan")])).inputs["IN"]).any()
    for wrong in (mark, mark + mark + body, mark + b"{", mark * 100_000):
        with pytest.raises(InvalidArgument, match="failed to parse the request JSON"):
            decode(IDENTITY, wrong)


# shared memory


def test_inputs_come_from_and_outputs_go_to_regions() -> None:
    asked: list[tuple[RegionRef, int]] = []
    written: list[tuple[RegionRef, bytes, int]] = []

    def read(ref: RegionRef, asked_ns: int) -> Buffer:
        asked.append((ref, asked_ns))
        return struct.pack("<4f", 1, 2, 3, 4)

    where = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
    body = as_json(
        inputs=[{"name": "IN", "datatype": "FP32", "shape": [1, 4], "parameters": {**where, "shared_memory_offset": 8}}],
        outputs=[{"name": "O0", "parameters": {**where, "binary_data": False}}],
    )
    request = decode(IDENTITY, body, read_region=read, arrival_ns=7)
    assert asked == [(RegionRef("r", 8, 16), 7)]
    answer = InferResponse("m", "1", "", {"O0": request.inputs["IN"]})
    parts, head = IDENTITY.encode(request, answer, lambda ref, buffer, asked_ns: written.append((ref, bytes(buffer), asked_ns)))
    assert json.loads(b"".join(parts))["outputs"] == [{"name": "O0", "datatype": "FP32", "shape": [1, 4]}]
    assert head is None
    assert written == [(RegionRef("r", 0, 16), struct.pack("<4f", 1, 2, 3, 4), 7)]


@pytest.mark.parametrize(
    ("datatype", "size", "words"),
    [("FP32", 3 << 30, "unexpected total byte size 3221225472 for input 'IN', expecting 16"), ("BYTES", 12, "12 bytes cannot")],
)
def test_a_region_of_another_size_is_not_read(datatype: str, size: int, words: str) -> None:
    where = {"shared_memory_region": "r", "shared_memory_byte_size": size}
    body = as_json(inputs=[{"name": "IN", "datatype": datatype, "shape": [1, 4], "parameters": where}])
    with pytest.raises(InvalidArgument, match=words):
        decode(model(TensorSpec("IN", datatype, (-1, 4))), body)


# encode


def encode(
    codec: RestCodec, outputs: dict[str, np.ndarray], wanted: tuple[OutputRequest, ...] = (), **fields: Any
) -> tuple[bytes, int | None]:
    request = InferRequest("m", "1", fields.get("id", ""), {}, 1, 0, wanted)
    parts, head = codec.encode(
        request, InferResponse("m", "1", fields.get("id", ""), outputs, fields.get("parameters", {})), no_write
    )
    return b"".join(parts), head


def no_write(ref: RegionRef, buffer: Buffer, asked_ns: int) -> None:
    raise AssertionError("no region was asked for")


C = np.array([[1.5, 0.25]], np.float32)
D = np.array([[3, 4]], np.int32)


def test_a_json_answer() -> None:
    assert encode(TWO, {"C": C, "D": D}, id="a\"b") == (
        b'{"id":"a\\"b","model_name":"m","model_version":"1","outputs":[{"name":"C","datatype":"FP32","shape":[1,2],"data":'
        b'[1.5,0.25]},{"name":"D","datatype":"INT32","shape":[1,2],"data":[3,4]}]}',
        None,
    )  # fmt: skip


def test_a_binary_answer() -> None:
    body, head = encode(TWO, {"C": C, "D": D}, (OutputRequest("C", binary=True), OutputRequest("D")))
    assert head is not None
    assert body[:head] == (
        b'{"model_name":"m","model_version":"1","outputs":[{"name":"C","datatype":"FP32","shape":[1,2],"parameters":'
        b'{"binary_data_size":8}},{"name":"D","datatype":"INT32","shape":[1,2],"data":[3,4]}]}'
    )
    assert body[head:] == struct.pack("<2f", 1.5, 0.25)


def test_a_binary_answer_that_is_not_short_shares_the_outputs_memory() -> None:
    big = np.zeros((1024, 2), np.float32)
    request = InferRequest("m", "1", "", {}, 1024, 0, (OutputRequest("C", binary=True),))
    parts, _ = TWO.encode(request, InferResponse("m", "1", "", {"C": big}), no_write)
    big[0, 0] = 1.5
    assert bytes(parts[1][:8]) == struct.pack("<2f", 1.5, 0)


def test_classes_are_named() -> None:
    body, head = encode(TWO, {"C": C}, (OutputRequest("C", classification=2),))
    assert json.loads(body)["outputs"] == [
        {"name": "C", "datatype": "BYTES", "shape": [1, 2], "data": ["1.500000:0:cat", "0.250000:1:dog"]}
    ]
    assert head is None
    body, head = encode(TWO, {"C": C}, (OutputRequest("C", classification=1, binary=True),))
    assert body[head:] == struct.pack("<I", 14) + b"1.500000:0:cat"


@pytest.mark.parametrize("datatype", JSON_DATATYPES)
def test_every_datatype_survives_json(datatype: str) -> None:
    codec = of(datatype, 3)
    if datatype == "BYTES":
        array = np.array([[b"a", "é".encode(), b""]], object)
    else:
        array = np.array([[0, 1, 100]]).astype(NUMPY[datatype])
    body, _ = encode(codec, {"O0": array})
    data = json.loads(body)["outputs"][0]["data"]
    again = decode(codec, one(data, datatype=datatype, shape=(1, 3))).inputs["IN"]
    np.testing.assert_array_equal(again, array, strict=True)


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_what_is_not_finite_is_written_as_its_word(datatype: str) -> None:
    array = np.array([[np.nan, np.inf, -np.inf, 0.1]], NUMPY[datatype])
    body, _ = encode(of(datatype), {"O0": array})
    assert b'"data":[NaN,Infinity,-Infinity,0.1]' in body
    again = decode(of(datatype), one(json.loads(body)["outputs"][0]["data"], datatype=datatype)).inputs["IN"]
    np.testing.assert_array_equal(again, array, strict=True)


def test_half_precision_is_written_as_bytes() -> None:
    array = np.array([[1, 2]], ml_dtypes.bfloat16)
    body, head = encode(of("BF16", 2), {"O0": array}, (OutputRequest("O0", binary=True),))
    assert body[head:] == array.tobytes()


def test_bytes_that_are_no_text_are_refused_as_json() -> None:
    array = np.array([[b"\xff"]], object)
    with pytest.raises(InvalidArgument, match=r"'O0'.*UTF-8.*binary"):
        encode(of("BYTES", 1), {"O0": array})
    body, head = encode(of("BYTES", 1), {"O0": array}, (OutputRequest("O0", binary=True),))
    assert body[head:] == b"\1\0\0\0\xff"


def test_outputs_need_not_be_contiguous() -> None:
    array = np.arange(8, dtype=np.float32).reshape(4, 2).T
    body, _ = encode(IDENTITY, {"O0": array})
    assert json.loads(body)["outputs"][0]["data"] == [0, 2, 4, 6, 1, 3, 5, 7]
    body, head = encode(IDENTITY, {"O0": array}, (OutputRequest("O0", binary=True),))
    assert body[head:] == np.ascontiguousarray(array).tobytes()


def test_response_parameters_are_written() -> None:
    assert json.loads(encode(TWO, {"C": C}, parameters={"a": 1})[0])["parameters"] == {"a": 1}


def test_names_are_escaped() -> None:
    codec = RestCodec(
        'm"\\', "1", ModelSpec("test", (TensorSpec("I", "INT8", (1,)),), (TensorSpec('o"', "INT8", (1,)),), 0), None, 32
    )
    answer = json.loads(encode(codec, {'o"': np.zeros(1, np.int8)})[0])
    assert (answer["model_name"], answer["outputs"][0]["name"]) == ('m"\\', 'o"')


def test_every_code_has_a_status() -> None:
    assert set(STATUS) == set(Code)
    assert all(400 <= status < 600 for status in STATUS.values())


def test_an_error_body_is_json_whatever_the_message() -> None:
    assert json.loads(error_body('a "b" \ud800')) == {"error": 'a "b" ?'}


# any bytes


BODY, HEAD = binary(
    [("A", "FP32", [1, 2], struct.pack("<2f", 1, 2)), ("B", "INT32", [1, 2], struct.pack("<2i", 3, 4))],
    id="x",
    outputs=[{"name": "C", "parameters": {"classification": 2}}, {"name": "D"}],
    parameters={"timeout": 5, "priority": 1},
)  # fmt: skip
ANY = settings(max_examples=300, derandomize=True)


def decode_or_refuse(codec: RestCodec, body: bytes, header_bytes: int | None) -> InferRequest | None:
    """None: refused, with an error of the client's and a message that can be sent. Anything else fails the test."""
    try:
        return decode(codec, body, header_bytes)
    except GatewayError as exc:
        status, message = STATUS[exc.code], error_body(exc.message)
    assert status == 400
    assert json.loads(message)
    return None


@ANY
@given(st.integers(0, len(BODY)), st.binary(max_size=6), st.integers(0, 6), st.integers(-3, 3))
def test_a_mutated_request_is_decoded_or_refused(at: int, insert: bytes, drop: int, shift: int) -> None:
    body = BODY[:at] + insert + BODY[at + drop :]
    request = decode_or_refuse(TWO, body, max(0, min(len(body), HEAD + shift)))
    assert request is None or request.inputs["A"].shape == (request.rows, 2)


FIELDS = ["inputs", "outputs", "parameters", "id", "name", "datatype", "shape", "data", "binary_data_size", "timeout"]
keys = st.sampled_from(FIELDS) | st.text(max_size=3)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(keys, children, max_size=5),
    max_leaves=6,
)
json_inputs = st.fixed_dictionaries(
    {
        "name": st.just("IN") | json_values,
        "datatype": st.sampled_from(["FP32", "BYTES"]) | json_values,
        "shape": st.just([1, 4]) | json_values,
        "data": json_values | st.lists(st.floats(), min_size=4, max_size=4),
    }
)
json_requests = st.fixed_dictionaries(
    {"inputs": st.lists(json_inputs, min_size=1, max_size=2) | json_values},
    optional={"outputs": json_values, "parameters": json_values, "id": json_values},
)


@ANY
@given(json_requests)
def test_any_json_is_decoded_or_refused(value: Any) -> None:
    body = json.dumps(value).encode()
    for header_bytes in (None, len(body)):
        request = decode_or_refuse(IDENTITY, body, header_bytes)
        assert request is None or request.inputs["IN"].shape == (1, 4)


@ANY
@given(st.sampled_from([name for name in JSON_DATATYPES if name != "BYTES"]), st.data())
def test_what_is_encoded_is_decoded_to_the_same(datatype: str, data: st.DataObject) -> None:
    dtype = NUMPY[datatype]
    raw = data.draw(st.binary(min_size=3 * dtype.itemsize, max_size=3 * dtype.itemsize))
    array = np.frombuffer(bytes(byte & 1 for byte in raw) if datatype == "BOOL" else raw, dtype).reshape(1, 3)
    body, _ = encode(of(datatype, 3), {"O0": array})
    values = json.loads(body)["outputs"][0]["data"]
    again = decode(of(datatype, 3), one(values, datatype=datatype, shape=(1, 3))).inputs["IN"]
    np.testing.assert_array_equal(again, array, strict=True)


# what further on would be a fault of ours

LONE = (rb"\ud800", "\ud800".encode(errors="surrogatepass"))  # half a character
BYTES = model(TensorSpec("IN", "BYTES", (-1, 1)))


@pytest.mark.parametrize(
    "where",
    [
        b'"id": "%b", "inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [NaN, 1, 1, 1]}]',
        b'"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 4], "data": [NaN, 1, 1, 1]}], "parameters": {"a": "%b"}',
        b'"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 4], "parameters": {"x": NaN, "shared_memory_region": "%b",'
        b' "shared_memory_byte_size": 16}}]',
        b'"inputs": [{"name": "IN", "datatype": "BYTES", "shape": [1, 1], "data": ["%b"], "parameters": {"x": NaN}}]',
    ],
)
@pytest.mark.parametrize("beside", [b"NaN", b"1"])
@pytest.mark.parametrize("lone", LONE)
def test_half_a_character_is_no_text_wherever_it_stands(where: bytes, beside: bytes, lone: bytes) -> None:
    body = b"{%b}" % (where.replace(b"NaN", beside) % lone)
    with pytest.raises(InvalidArgument, match=r"failed to parse|expected BYTES elements|malformed"):
        decode(BYTES if b"BYTES" in where else IDENTITY, body)


@pytest.mark.parametrize("beside", [b"NaN", b"1"])
@pytest.mark.parametrize(
    ("text", "half"),
    [
        (rb"\ud800", r"\ud800"),
        (rb"\udBFF and more", r"\udbff"),
        (rb"\uDC00", r"\udc00"),
        (rb"\ud83d\ude00\\\ud83e\u0041", r"\ud83e"),
    ],
)
def test_half_a_character_is_named(text: bytes, half: str, beside: bytes) -> None:
    body = b'{"id":"%b","inputs":[{"name":"IN","datatype":"FP32","shape":[1,4],"data":[%b,1,1,1]}]}' % (text, beside)
    with pytest.raises(InvalidArgument, match=rf"^failed to parse the request JSON: \{half} is half a character, expected its"):
        decode(IDENTITY, body)


@pytest.mark.parametrize("beside", [b"NaN", b"1"])
def test_what_looks_like_half_a_character_is_text(beside: bytes) -> None:
    text = rb"\\ud800\ud83d\ude00\u00e9\ud7ff"
    body = b'{"id":"%b","inputs":[{"name":"IN","datatype":"FP32","shape":[1,4],"data":[%b,1,1,1]}]}' % (text, beside)
    assert decode(IDENTITY, body).id == "\\ud800\N{GRINNING FACE}\xe9\ud7ff"


def test_a_whole_character_in_two_escapes_is_text_also_beside_a_nan() -> None:
    body = one([float("nan"), 1, 1, 1], id="\N{GRINNING FACE}")
    assert rb"\ud83d\ude00" in body
    assert decode(IDENTITY, body).id == "\N{GRINNING FACE}"


@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_a_shape_that_no_tensor_can_have_is_refused(datatype: str) -> None:
    codec = model(TensorSpec("IN", datatype, (-1, -1)))
    huge = [1 << 62, 0]
    with pytest.raises(InvalidArgument, match="larger than a tensor can be"):
        decode(codec, one([], datatype=datatype, shape=huge))
    body, head = binary([("IN", datatype, huge, b"")])
    with pytest.raises(InvalidArgument, match="larger than a tensor can be"):
        decode(codec, body, head)


@pytest.mark.parametrize("value", [1 << 63, 1 << 64, 10**30, -(1 << 63) - 1])
def test_an_integer_of_more_than_64_bits_is_no_parameter(value: int) -> None:
    with pytest.raises(InvalidArgument, match=f"parameter 'a': got {value}, expected an integer of 64 bits"):
        decode(IDENTITY, one([1, 2, 3, 4], parameters={"a": value}))


@pytest.mark.parametrize("value", [(1 << 63) - 1, -(1 << 63), True, 1e300, "9" * 30])
def test_other_parameters_reach_the_model_as_they_are(value: object) -> None:
    assert decode(IDENTITY, one([1, 2, 3, 4], parameters={"a": value})).parameters == {"a": value}


@pytest.mark.parametrize("timeout_us", [1 << 52, 1 << 62])
def test_a_timeout_of_centuries_is_none(timeout_us: int) -> None:
    assert decode(IDENTITY, one([1, 2, 3, 4], parameters={"timeout": timeout_us})).deadline_ns is None


def test_a_text_of_the_model_that_is_none_is_refused_as_json() -> None:
    with pytest.raises(InvalidArgument, match="no UTF-8 text"):
        encode(BYTES, {"O0": np.array([["\ud800"]], dtype=object)})


@pytest.mark.parametrize("fields", [{}, {"parameters": {"binary_data_output": True}}])
def test_answers_alike_are_the_same_text_whatever_was_answered_before(fields: dict[str, Any]) -> None:
    for rows, number in ((1, 1.5), (2, 2.5), (1, float("nan")), (2, -0.0), (0, 1.0)):
        answers = []
        for codec in (IDENTITY, model(TensorSpec("IN", "FP32", (-1, 4)))):
            request = decode(codec, one([1.0] * 4, **fields))
            for _ in range(2):
                outputs = {"O0": np.full((4, rows), number, np.float32).T}
                parts, json_bytes = codec.encode(request, InferResponse("m", "1", "", outputs), no_write)
                assert isinstance(parts, list)
                answers.append((b"".join(parts), json_bytes))
        assert answers == answers[:1] * 4
        text, json_bytes = answers[0]
        about = json.loads(text[:json_bytes])["outputs"][0]
        assert about["shape"] == [rows, 4]
        if fields:
            assert np.frombuffer(text[json_bytes:], np.float32).tobytes() == np.full(rows * 4, number, np.float32).tobytes()
        else:
            np.testing.assert_array_equal(about["data"], [number] * 4 * rows)
