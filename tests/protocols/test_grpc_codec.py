"""gRPC messages in, requests out, and back. The reference for well-formed messages is tritonclient's own encoder."""

import contextlib
import re
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from grpc import StatusCode
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import InferInput, InferRequestedOutput, InferResult
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc._utils import _get_inference_request

from backends.base import ModelSpec, TensorSpec
from backends.datatypes import NUMPY
from gateway.errors import Code, GatewayError, InvalidArgument, Limited, NotFound, Overloaded
from gateway.protocols.grpc import STATUS, GrpcCodec, LongReply, ShortReply, parse, parts_of, trailers
from gateway.protocols.tensors import TakesLong, shape_key
from gateway.types import InferRequest, InferResponse, OutputRequest, RegionRef
from gateway.wire.tensors import Buffer

Tensor = pb.ModelInferRequest.InferInputTensor
Wish = pb.ModelInferRequest.InferRequestedOutputTensor

ADD_SUB = ModelSpec(
    "test",
    (TensorSpec("INPUT0", "FP32", (-1, 4)), TensorSpec("INPUT1", "FP32", (-1, 4))),
    (TensorSpec("OUTPUT0", "FP32", (-1, 4), labels=("zero", "one", "")), TensorSpec("OUTPUT1", "FP32", (-1, 4))),
    max_rows=8,
)
ROW = np.arange(4, dtype=np.float32)
RAW = ROW.tobytes()
LONG_TEXT = bytes(5_000_000)


def identity(datatype: str, *, max_rows: int = 8) -> ModelSpec:
    return ModelSpec(
        "test", (TensorSpec("INPUT0", datatype, (-1, -1)),), (TensorSpec("OUTPUT0", datatype, (-1, -1)),), max_rows
    )


def no_region(ref: RegionRef, asked_ns: int) -> Buffer:
    raise NotFound(f"Unable to find shared memory region: '{ref.region}'")


def read(message: pb.ModelInferRequest, spec: ModelSpec = ADD_SUB, **options: Any) -> InferRequest:
    given = {"arrival_ns": 1_000, "remaining_s": None, "read_region": no_region, **options}
    return GrpcCodec("m", "1", spec, given.pop("ragged", None)).decode(message, **given)


def write(response: InferResponse, request: InferRequest, spec: ModelSpec = ADD_SUB) -> pb.ModelInferResponse:
    reply = GrpcCodec("m", "1", spec, None).encode(request, response, lambda ref, buffer, asked_ns: None)
    assert not isinstance(reply, LongReply)
    return reply.message() if isinstance(reply, ShortReply) else reply


def pair(**fields: Any) -> pb.ModelInferRequest:
    """A good request for ADD_SUB, with fields replaced."""
    inputs = [Tensor(name=name, datatype="FP32", shape=[1, 4]) for name in ("INPUT0", "INPUT1")]
    return pb.ModelInferRequest(**{"inputs": inputs, "raw_input_contents": [RAW, RAW], **fields})


def parameter(value: bool | int | float | str) -> pb.InferParameter:
    kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
    return pb.InferParameter(**{kind: value})


def samples(datatype: str) -> np.ndarray:
    """Shape (2, 3)."""
    if datatype == "BYTES":
        return np.array([[b"", b"a", b"\0\xff"], ["ö".encode(), b"x" * 300, b"5"]], dtype=object)
    if datatype == "BOOL":
        return np.array([[True, False, True], [False, False, True]])
    return np.array([[0, 1, 2], [3, 100, 127]]).astype(NUMPY[datatype])


@pytest.mark.parametrize("datatype", [name for name in NUMPY if name != "BF16"])  # the client makes BF16 of FP32
def test_what_the_client_encodes_is_decoded(datatype: str) -> None:
    array = samples(datatype)
    tensor = InferInput("INPUT0", list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    message = _get_inference_request(
        model_name="m",
        inputs=[tensor],
        model_version="",
        request_id="7",
        outputs=None,
        sequence_id=0,
        sequence_start=False,
        sequence_end=False,
        priority=0,
        timeout=None,
        parameters=None,
    )
    request = read(message, identity(datatype))
    assert request.id == "7"
    assert request.rows == 2
    assert request.inputs["INPUT0"].dtype == NUMPY[datatype]
    assert request.inputs["INPUT0"].tolist() == array.tolist()


def test_bf16_is_two_bytes_per_element() -> None:
    array = samples("BF16")
    message = pb.ModelInferRequest(
        inputs=[Tensor(name="INPUT0", datatype="BF16", shape=[2, 3])], raw_input_contents=[array.tobytes()]
    )
    assert read(message, identity("BF16")).inputs["INPUT0"].tolist() == array.tolist()


@pytest.mark.parametrize(
    ("datatype", "field"),
    [
        ("BOOL", "bool_contents"), ("INT8", "int_contents"), ("INT16", "int_contents"), ("INT32", "int_contents"),
        ("INT64", "int64_contents"), ("UINT8", "uint_contents"), ("UINT16", "uint_contents"), ("UINT32", "uint_contents"),
        ("UINT64", "uint64_contents"), ("FP32", "fp32_contents"), ("FP64", "fp64_contents"), ("BYTES", "bytes_contents"),
    ],
)  # fmt: skip
def test_typed_contents_are_decoded(datatype: str, field: str) -> None:
    array = samples(datatype)
    tensor = Tensor(name="INPUT0", datatype=datatype, shape=[2, 3])
    getattr(tensor.contents, field).extend(array.reshape(-1).tolist())
    request = read(pb.ModelInferRequest(inputs=[tensor]), identity(datatype))
    assert request.inputs["INPUT0"].dtype == NUMPY[datatype]
    assert request.inputs["INPUT0"].tolist() == array.tolist()


@pytest.mark.parametrize("datatype", list(NUMPY))
def test_what_is_encoded_the_client_decodes(datatype: str) -> None:
    array = samples(datatype)
    request = InferRequest("m", "1", "7", {}, 2, 0)
    message = write(InferResponse("m", "1", "7", {"OUTPUT0": array}), request, identity(datatype))
    result = InferResult(pb.ModelInferResponse.FromString(message.SerializeToString()))
    assert (message.model_name, message.model_version, message.id) == ("m", "1", "7")
    assert message.outputs[0].datatype == datatype
    assert result.as_numpy("OUTPUT0").tolist() == array.tolist()


def test_numeric_inputs_are_views_of_the_message() -> None:
    array = read(pair()).inputs["INPUT0"]
    assert array.base is not None
    assert not array.flags.writeable


def test_outputs_are_answered_once_and_in_the_models_order() -> None:
    request = read(pair(outputs=[Wish(name="OUTPUT1"), Wish(name="OUTPUT0"), Wish(name="OUTPUT1")]))
    assert request.outputs == (OutputRequest("OUTPUT0"), OutputRequest("OUTPUT1"))


def test_an_output_asked_for_in_two_ways_is_refused() -> None:
    regions = [Wish(name="OUTPUT1", parameters=shared(shared_memory_region=r, shared_memory_byte_size=16)) for r in "ab"]
    for twice in (regions, [regions[0], Wish(name="OUTPUT1")], [Wish(name="OUTPUT1"), regions[0]]):
        with pytest.raises(InvalidArgument, match="output 'OUTPUT1' is asked for twice, in two ways: expected once"):
            read(pair(outputs=twice))
    assert len(read(pair(outputs=[regions[0], regions[0]])).outputs) == 1


def test_the_clients_outputs_and_parameters_are_understood() -> None:
    shared, classes = InferRequestedOutput("OUTPUT1"), InferRequestedOutput("OUTPUT0", class_count=2)
    shared.set_shared_memory("r", 16, 32)
    message = _get_inference_request(
        model_name="m",
        inputs=[],
        model_version="",
        request_id="",
        outputs=[shared, classes],
        sequence_id=5,
        sequence_start=True,
        sequence_end=False,
        priority=2,
        timeout=7,
        parameters={"top_k": 3, "ratio": 0.5, "note": "x", "on": True},
    )
    message.inputs.extend(pair().inputs)
    message.raw_input_contents.extend([RAW, RAW])
    request = read(message)
    assert request.outputs == (
        OutputRequest("OUTPUT0", classification=2),
        OutputRequest("OUTPUT1", region=RegionRef("r", 32, 16)),
    )
    assert request.priority == 2
    assert request.deadline_ns == 1_000 + 7_000
    assert request.parameters == {
        "top_k": 3, "ratio": 0.5, "note": "x", "on": True, "sequence_id": 5, "sequence_start": True, "sequence_end": False,
    }  # fmt: skip
    assert request.shape_key == shape_key(ADD_SUB, None, request.inputs, request.parameters) != read(pair()).shape_key


@pytest.mark.parametrize(
    ("timeout_us", "remaining_s", "deadline_ns"),
    [
        (None, None, None),
        (None, 0.5, 1_000 + 500_000_000),
        (7, None, 1_000 + 7_000),
        (7, 0.5, 1_000 + 7_000),
        (600_000, 0.5, 1_000 + 500_000_000),
        (0, None, None),
        (-1, None, None),
        ((1 << 63) - 1, None, None),
    ],
)
def test_the_deadline_is_the_earlier_of_the_calls_and_the_parameters(
    timeout_us: int | None, remaining_s: float | None, deadline_ns: int | None
) -> None:
    parameters = {} if timeout_us is None else {"timeout": parameter(timeout_us)}
    assert read(pair(parameters=parameters), remaining_s=remaining_s).deadline_ns == deadline_ns


def test_shared_memory_inputs_take_no_raw_entry() -> None:
    shared = {
        "shared_memory_region": parameter("r"),
        "shared_memory_byte_size": parameter(16),
        "shared_memory_offset": parameter(8),
    }
    message = pair(raw_input_contents=[RAW])
    for key, value in shared.items():
        message.inputs[0].parameters[key].CopyFrom(value)
    seen: list[tuple[RegionRef, int]] = []

    def read_region(ref: RegionRef, asked_ns: int) -> Buffer:
        seen.append((ref, asked_ns))
        return bytes(16)

    request = read(message, read_region=read_region)
    assert seen == [(RegionRef("r", 8, 16), 1_000)]
    assert request.inputs["INPUT0"].tolist() == [[0, 0, 0, 0]]
    assert request.inputs["INPUT1"].tolist() == [ROW.tolist()]


def test_a_region_of_another_size_is_not_read() -> None:
    message = pair(raw_input_contents=[RAW])
    message.inputs[0].parameters["shared_memory_region"].CopyFrom(parameter("r"))
    message.inputs[0].parameters["shared_memory_byte_size"].CopyFrom(parameter(3 << 30))
    with pytest.raises(InvalidArgument, match="unexpected total byte size 3221225472 for input 'INPUT0', expecting 16"):
        read(message)


def tensor(name: str = "INPUT1", datatype: str = "FP32", shape: tuple[int, ...] = (1, 4), **fields: Any) -> Any:
    return Tensor(name=name, datatype=datatype, shape=shape, **fields)


def shared(**parameters: bool | int | float | str) -> dict[str, pb.InferParameter]:
    return {key: parameter(value) for key, value in parameters.items()}


FIRST = tensor("INPUT0")
TYPED = pb.InferTensorContents(fp32_contents=[1, 2, 3, 4])
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"inputs": [], "raw_input_contents": []}, "expected 2 inputs but got 0 inputs for model 'm'"),
    "one input": (
        {"inputs": [FIRST], "raw_input_contents": [RAW]},
        "expected 2 inputs but got 1 inputs for model 'm'.*'INPUT1'",
    ),
    "unknown input": ({"inputs": [FIRST, tensor("X")]}, "unexpected inference input 'X' for model 'm'"),
    "input twice": ({"inputs": [FIRST, FIRST]}, "input 'INPUT0' already exists"),
    "wrong datatype": ({"inputs": [FIRST, tensor(datatype="INT32")]}, "expected FP32 .* got INT32"),
    "no datatype": ({"inputs": [FIRST, tensor(datatype="")]}, "expected FP32"),
    "wrong dimension": ({"inputs": [FIRST, tensor(shape=(1, 5))]}, r"expected FP32 \[-1, 4\], got FP32 \[1, 5\]"),
    "wrong rank": ({"inputs": [FIRST, tensor(shape=(4,))]}, r"got FP32 \[4\]"),
    "negative dimension": ({"inputs": [FIRST, tensor(shape=(-1, 4))]}, r"got FP32 \[-1, 4\]"),
    "huge dimension": ({"inputs": [FIRST, tensor(shape=((1 << 63) - 1, 4))]}, "unexpected total byte size 16"),
    "rows differ": (
        {"inputs": [FIRST, tensor(shape=(2, 4))], "raw_input_contents": [RAW, RAW * 2]},
        "2 rows, but input 'INPUT0' has 1",
    ),
    "no rows": (
        {"inputs": [tensor("INPUT0", shape=(0, 4)), tensor(shape=(0, 4))], "raw_input_contents": [b"", b""]},
        "at least 1 row",
    ),
    "truncated": ({"raw_input_contents": [RAW, RAW[:-1]]}, "unexpected total byte size 15 for input 'INPUT1', expecting 16"),
    "too long": ({"raw_input_contents": [RAW, RAW + RAW]}, "unexpected total byte size 32"),
    "too few raw": ({"raw_input_contents": [RAW]}, "unable to find data for input tensor 'INPUT1' for model 'm'"),
    "too many raw": ({"raw_input_contents": [RAW] * 3}, "3 entries, but only 2 inputs"),
    "no data": ({"raw_input_contents": []}, "unable to find data for input tensor 'INPUT0' for model 'm'"),
    "raw and typed": (
        {"inputs": [FIRST, tensor(contents=TYPED)]},
        "contents field must not be specified when using raw_input_contents",
    ),
    "typed too few": (
        {"inputs": [tensor("INPUT0", contents=pb.InferTensorContents(fp32_contents=[1])), tensor()], "raw_input_contents": []},
        "got 1 elements, expected 4 for FP32",
    ),
    "typed wrong field": (
        {
            "inputs": [tensor("INPUT0", contents=pb.InferTensorContents(fp64_contents=[1] * 4)), tensor()],
            "raw_input_contents": [],
        },
        "expected FP32 in fp32_contents, got fp64_contents",
    ),
    "typed two fields": (
        {
            "inputs": [tensor("INPUT0", contents=pb.InferTensorContents(fp32_contents=[1] * 4, int_contents=[1])), tensor()],
            "raw_input_contents": [],
        },
        "got int_contents, fp32_contents",
    ),
    "unknown output": ({"outputs": [Wish(name="X")]}, "unexpected inference output 'X' for model 'm'"),
    "many outputs": ({"outputs": [Wish(name="OUTPUT0")] * 4097}, "outputs: got 4097, expected at most 4096 in one request"),
    "many parameters": (
        {"parameters": dict.fromkeys(map(str, range(4097)), parameter(1))},
        "parameters: got 4097, expected at most 4096 in one request",
    ),
    "no classes": (
        {"outputs": [Wish(name="OUTPUT0", parameters=shared(classification=0))]},
        "output 'OUTPUT0': parameter 'classification': got 0, expected an integer from 1",
    ),
    "classes as text": (
        {"outputs": [Wish(name="OUTPUT0", parameters=shared(classification="2"))]},
        "output 'OUTPUT0': parameter 'classification': got '2', expected an integer",
    ),
    "classes into a region": (
        {
            "outputs": [
                Wish(name="OUTPUT0", parameters=shared(classification=1, shared_memory_region="r", shared_memory_byte_size=16))
            ]
        },
        "output 'OUTPUT0': shared memory and classification exclude each other",
    ),
    "region without size": (
        {"inputs": [FIRST, tensor(parameters=shared(shared_memory_region="r"))]},
        "input 'INPUT1': parameter 'shared_memory_byte_size' is missing beside 'shared_memory_region'",
    ),
    "size without region": (
        {"inputs": [FIRST, tensor(parameters=shared(shared_memory_byte_size=16))]},
        "input 'INPUT1': parameter 'shared_memory_region' is missing beside 'shared_memory_byte_size'",
    ),
    "region as number": (
        {"inputs": [FIRST, tensor(parameters=shared(shared_memory_region=1, shared_memory_byte_size=16))]},
        "input 'INPUT1': parameter 'shared_memory_region': got 1, expected a string",
    ),
    "size as text": (
        {"inputs": [FIRST, tensor(parameters=shared(shared_memory_region="r", shared_memory_byte_size="16"))]},
        "input 'INPUT1': parameter 'shared_memory_byte_size': got '16', expected an integer",
    ),
    "region and contents": (
        {"inputs": [FIRST, tensor(contents=TYPED, parameters=shared(shared_memory_region="r", shared_memory_byte_size=16))]},
        "unexpected 'content' provided when using shared memory",
    ),
    "timeout as text": (
        {"parameters": shared(timeout="1")},
        "request: parameter 'timeout': got '1', expected an integer from 0",
    ),
    "timeout as float": ({"parameters": shared(timeout=1.5)}, "'timeout': got 1.5, expected an integer"),
    "priority as text": ({"parameters": shared(priority="1")}, "'priority': got '1', expected an integer"),
    "priority as truth": ({"parameters": shared(priority=True)}, "'priority': got True, expected an integer"),
    "negative priority": ({"parameters": shared(priority=-1)}, "'priority': got -1, expected an integer from 0"),
    "start as number": ({"parameters": shared(sequence_start=1)}, "invalid value type for 'sequence_start'"),
    "reserved key": ({"parameters": shared(triton_x=True)}, "keys starting with 'triton_' are reserved"),
    "our own key": (
        {"parameters": shared(**{"gateway.deadline_ns": "x"})},
        "parameter 'gateway.deadline_ns': keys starting with 'gateway.' are reserved",
    ),
    "final flag as number": ({"parameters": shared(triton_enable_empty_final_response=1)}, "expected bool_param"),
    "no value": ({"parameters": {"x": pb.InferParameter()}}, "invalid value type for 'x' parameter"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_an_invalid_argument(case: str) -> None:
    fields, message = BAD[case]
    with pytest.raises(InvalidArgument, match=message):
        read(pair(**fields))


@pytest.mark.parametrize(
    ("datatype", "value"), [("INT8", 128), ("INT8", -129), ("INT16", 1 << 15), ("UINT8", 256), ("UINT16", 1 << 16)]
)
def test_a_typed_value_out_of_range_is_refused(datatype: str, value: int) -> None:
    tensor = Tensor(name="INPUT0", datatype=datatype, shape=[1, 1])
    field = tensor.contents.uint_contents if datatype.startswith("U") else tensor.contents.int_contents
    field.append(value)
    with pytest.raises(InvalidArgument, match=f"input 'INPUT0': element 0 is {value}, expected {datatype} "):
        read(pb.ModelInferRequest(inputs=[tensor]), identity(datatype))


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_has_no_typed_form(datatype: str) -> None:
    tensor = Tensor(name="INPUT0", datatype=datatype, shape=[1, 1], contents=pb.InferTensorContents(fp32_contents=[1]))
    with pytest.raises(InvalidArgument, match="use raw_input_contents"):
        read(pb.ModelInferRequest(inputs=[tensor]), identity(datatype))


@pytest.mark.parametrize("datatype", ["BOOL", "FP16", "BF16", "BYTES"])
def test_only_numbers_are_classified(datatype: str) -> None:
    request = InferRequest("m", "1", "", {}, 2, 0, outputs=(OutputRequest("OUTPUT0", classification=1),))
    with pytest.raises(InvalidArgument, match=f"unsupported type '{datatype}'"):
        write(InferResponse("m", "1", "", {"OUTPUT0": samples(datatype)}), request, identity(datatype))


def test_the_best_classes_are_answered_with_their_labels() -> None:
    request = read(pair(outputs=[Wish(name="OUTPUT0", parameters=shared(classification=3))]))
    message = write(InferResponse("m", "1", "", {"OUTPUT0": np.array([[0.5, 2, -1, 0.5]], np.float32)}), request)
    assert message.outputs[0].datatype == "BYTES"
    assert list(message.outputs[0].shape) == [1, 3]
    # equal scores: the lower index first; labels are there for 0, 1 and 2 only, and that of 2 is empty
    assert InferResult(message).as_numpy("OUTPUT0").tolist() == [[b"2.000000:1:one", b"0.500000:0:zero", b"0.500000:3"]]
    message = write(InferResponse("m", "1", "", {"OUTPUT0": np.array([[0, 0, 1, 0]], np.float32)}), request)
    assert InferResult(message).as_numpy("OUTPUT0").tolist() == [[b"1.000000:2", b"0.000000:0:zero", b"0.000000:1:one"]]


@pytest.mark.parametrize(
    ("datatype", "scores", "order"),
    [
        ("INT64", [2**53, 2**53 + 1, 2**53 + 1, 2**53 + 2], [3, 1, 2, 0]),
        ("INT64", [-(2**63), 2**63 - 1, 0, -1], [1, 2, 3, 0]),
        ("UINT64", [2**64 - 2, 2**64 - 1, 0, 0], [1, 0, 2, 3]),
        ("INT8", [-128, 127, 0, 127], [1, 3, 2, 0]),
        ("UINT8", [0, 255, 1, 255], [1, 3, 2, 0]),
        ("FP64", [-np.inf, 2**53, 2**53 + 2, np.inf], [3, 2, 1, 0]),
        ("FP32", [np.nan, 1, -0.0, 0], [1, 2, 3, 0]),
    ],
)
def test_classes_are_in_the_order_of_their_scores(datatype: str, scores: list[float], order: list[int]) -> None:
    request = InferRequest("m", "1", "", {}, 1, 0, outputs=(OutputRequest("OUTPUT0", classification=4),))
    message = write(InferResponse("m", "1", "", {"OUTPUT0": np.array([scores], NUMPY[datatype])}), request, identity(datatype))
    assert [int(text.split(b":")[1]) for text in InferResult(message).as_numpy("OUTPUT0")[0]] == order


def test_an_output_for_a_region_leaves_an_empty_raw_entry() -> None:
    request = InferRequest("m", "1", "", {}, 1, 7, outputs=(OutputRequest("OUTPUT0", region=RegionRef("r", 8, 16)),))
    written: list[tuple[RegionRef, bytes, int]] = []
    response = InferResponse("m", "1", "", {"OUTPUT0": ROW[None], "OUTPUT1": ROW[None]})
    codec = GrpcCodec("m", "1", ADD_SUB, None)
    message = codec.encode(request, response, lambda ref, buffer, asked_ns: written.append((ref, bytes(buffer), asked_ns)))
    assert written == [(RegionRef("r", 8, 16), RAW, 7)]
    assert list(message.raw_output_contents) == [b"", RAW]


def test_parameters_of_a_response_keep_their_kind() -> None:
    response = InferResponse("m", "1", "", {}, {"a": True, "b": 1, "c": 0.5, "d": "x"})
    message = write(response, InferRequest("m", "1", "", {}, 1, 0))
    kinds = {key: choice.WhichOneof("parameter_choice") for key, choice in message.parameters.items()}
    assert kinds == {"a": "bool_param", "b": "int64_param", "c": "double_param", "d": "string_param"}


def test_every_code_has_a_status() -> None:
    assert set(STATUS) == set(Code)
    assert StatusCode.OK not in STATUS.values()


def test_an_overload_tells_when_to_come_back() -> None:
    assert trailers(Overloaded("full", retry_after_s=0.25)) == (("retry-after", "0.25"), ("grpc-retry-pushback-ms", "250"))
    assert trailers(Overloaded("full")) == (("retry-after", "1"), ("grpc-retry-pushback-ms", "1000"))  # it is unknown
    assert dict(trailers(Overloaded("full", retry_after_s=0.0)))["grpc-retry-pushback-ms"] == "1"


@pytest.mark.parametrize("after_s", [0.0000123, 0.0014, 0.0123454999, 0.07, 1234.5674, 1234567.0])
def test_a_client_that_waits_as_long_as_it_is_told_is_not_too_early(after_s: float) -> None:
    told = dict(trailers(Limited("the key may ask 100 requests/s", after_s)))
    assert after_s <= float(told["retry-after"]) < after_s + 0.001 + 1e-9
    assert re.fullmatch(r"\d+(\.\d+)?", told["retry-after"])  # as over HTTP: no exponent
    assert after_s * 1000 <= int(told["grpc-retry-pushback-ms"]) < after_s * 1000 + 1
    assert trailers(NotFound("x")) == ()


# Properties: whatever a client sends, the answer is a request or an error of ours.

int64 = st.integers(-(1 << 63), (1 << 63) - 1)
parameters = st.dictionaries(
    st.sampled_from(
        ["timeout", "priority", "sequence_id", "sequence_start", "classification", "shared_memory_region", "triton_x", "x",
         "gateway.x", "shared_memory_byte_size", "shared_memory_offset", "triton_enable_empty_final_response"]
    ),
    st.one_of(
        st.builds(parameter, st.one_of(st.booleans(), int64, st.floats(), st.text(max_size=3))),
        st.just(pb.InferParameter()),
    ),
    max_size=3,
)  # fmt: skip
contents = st.one_of(
    st.just(pb.InferTensorContents()),
    st.builds(
        pb.InferTensorContents,
        fp32_contents=st.lists(st.floats(width=32), max_size=5),
        int_contents=st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=5),
        bytes_contents=st.lists(st.binary(max_size=4), max_size=5),
    ),
)
tensors = st.builds(
    lambda name, datatype, shape, parameters, contents: Tensor(
        name=name, datatype=datatype, shape=shape, parameters=parameters, **({} if contents is None else {"contents": contents})
    ),
    st.sampled_from(["INPUT0", "INPUT1", "X", ""]),
    st.sampled_from([*NUMPY, "FP99", ""]),
    st.lists(st.one_of(st.integers(-1, 5), int64), max_size=3),
    parameters,
    st.one_of(st.none(), contents),
)
messages = st.builds(
    pb.ModelInferRequest,
    id=st.text(max_size=3),
    parameters=parameters,
    inputs=st.lists(tensors, max_size=3),
    outputs=st.lists(st.builds(Wish, name=st.sampled_from(["OUTPUT0", "OUTPUT1", "X"]), parameters=parameters), max_size=3),
    raw_input_contents=st.lists(st.one_of(st.binary(max_size=40), st.just(RAW)), max_size=3),
)
specs = st.one_of(
    st.just(ADD_SUB),
    st.builds(
        lambda datatype, max_rows: identity(datatype, max_rows=max_rows), st.sampled_from(list(NUMPY)), st.sampled_from([0, 8])
    ),
)


@pytest.mark.slow
@settings(max_examples=400, derandomize=True)
@given(messages, specs)
def test_any_message_is_a_request_or_an_error_of_ours(message: pb.ModelInferRequest, spec: ModelSpec) -> None:
    with contextlib.suppress(GatewayError):
        request = read(message, spec, read_region=lambda ref, asked_ns: bytes(max(0, min(ref.byte_size, 64))))
        for name, array in request.inputs.items():
            assert array.dtype == NUMPY[spec.input_by_name[name].datatype]
            assert spec.max_rows == 0 or array.shape[0] == request.rows


@pytest.mark.slow
@settings(max_examples=300, derandomize=True)
@given(st.binary(max_size=60), st.integers(0, 200))
def test_any_bytes_are_no_message_or_a_request_or_an_error_of_ours(noise: bytes, at: int) -> None:
    good = pair().SerializeToString()
    at = min(at, len(good))
    for data in (noise, good[:at], good[:at] + noise + good[at + len(noise) :]):
        # What is no message at all is refused before.
        with contextlib.suppress(GatewayError, DecodeError):
            read(pb.ModelInferRequest.FromString(data))


# what further on would be a fault of ours


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_a_shape_that_no_tensor_can_have_is_refused(datatype: str, typed: bool) -> None:
    tensor = Tensor(name="INPUT0", datatype=datatype, shape=[1 << 62, 0])
    if typed:
        tensor.contents.SetInParent()
    message = pb.ModelInferRequest(inputs=[tensor], raw_input_contents=[] if typed else [b""])
    with pytest.raises(InvalidArgument, match="larger than a tensor can be"):
        read(message, identity(datatype))


def test_an_integer_of_more_than_64_bits_with_its_sign_is_no_parameter() -> None:
    given = {"a": pb.InferParameter(uint64_param=1 << 63)}
    with pytest.raises(InvalidArgument, match="parameter 'a': got 9223372036854775808, expected an integer of 64 bits"):
        read(pair(parameters=given))
    assert read(pair(parameters={"a": pb.InferParameter(uint64_param=5)})).parameters == {"a": 5}


@pytest.mark.parametrize("remaining_s", [99_999_999 * 3600.0, 1e10])
def test_a_deadline_of_centuries_is_none(remaining_s: float) -> None:
    assert read(pair(), remaining_s=remaining_s).deadline_ns is None


# long messages


LONG_TENSOR = Tensor(name="X", datatype="FP32", shape=[1], contents=pb.InferTensorContents(fp32_contents=[0.5] * 70_000))


@pytest.mark.slow
@settings(max_examples=100, derandomize=True)
@given(messages, st.text(max_size=5), st.sampled_from(["", "1"]))
def test_the_head_of_a_long_message_is_all_but_its_tensors(message: pb.ModelInferRequest, name: str, version: str) -> None:
    message.model_name, message.model_version = name, version
    message.raw_input_contents.append(bytes(300_000))
    parts = parts_of(message.SerializeToString())
    assert list(map(bytes, parts.raw)) == list(message.raw_input_contents)
    assert not parts.long
    message.ClearField("raw_input_contents")
    assert parse(parts.head) == message
    message.inputs.append(LONG_TENSOR)
    parts = parts_of(message.SerializeToString())
    assert parts.long
    for field in ("inputs", "outputs"):
        message.ClearField(field)
    assert parse(parts.head) == message


# Of field 31, which there is not; but for two that have the number of `raw_input_contents`.
UNKNOWN = {
    "varint": b"\xf8\x01\x96\x01",
    "64 bits": b"\xf9\x01" + bytes(8),
    "bytes": b"\xfa\x01\x02ab",
    "group": b"\xfb\x01\x3a\x01a\x3b\x08\x01\x3c\xfc\x01",
    "32 bits": b"\xfd\x01" + bytes(4),
    "known number": b"\x38\x01",
    "group of a known number": b"\x3b\x3a\x01a\x3c",
}
BROKEN = {
    "no end of a group": b"\xfb\x01",
    "no begin of a group": b"\xfc\x01",
    "end of another group": b"\xfb\x01\x3c",
    "no kind": b"\xfe\x01",
    "no more bytes": b"\xf9\x01a",
    "no end of a varint": b"\xf8\x01\x96",
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_long_message_may_have_fields_that_are_not_known_as_a_short_one_may(name: str) -> None:
    message = pair(id="x")
    message.raw_input_contents.append(bytes(300_000))
    data = UNKNOWN[name] + message.SerializeToString() + UNKNOWN[name]
    parts, whole = parts_of(data), parse(data)
    assert [*map(bytes, parts.raw)] == list(whole.raw_input_contents) == list(message.raw_input_contents)
    whole.ClearField("raw_input_contents")
    assert parse(parts.head) == whole


@pytest.mark.parametrize("name", BROKEN)
def test_a_field_that_is_broken_makes_no_message_long_or_short(name: str) -> None:
    data = pair().SerializeToString() + BROKEN[name]
    with pytest.raises(InvalidArgument, match=r"is no inference\.ModelInferRequest"):
        parse(data)
    with pytest.raises(InvalidArgument, match=r"is no inference\.ModelInferRequest"):
        parse(parts_of(data).head)


def test_raw_contents_of_a_long_message_are_read_where_they_are() -> None:
    message = pb.ModelInferRequest(raw_input_contents=[np.arange(100_000, dtype=np.float32).tobytes()])
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 100_000])
    data = message.SerializeToString()
    parts = parts_of(data)
    codec = GrpcCodec("m", "1", identity("FP32"), None)
    tensor = codec.decode(parse(parts.head), 0, None, no_region, parts.raw).inputs["INPUT0"]
    np.testing.assert_array_equal(tensor, np.arange(100_000, dtype=np.float32).reshape(1, -1))
    assert np.shares_memory(tensor, np.frombuffer(data, np.uint8))


def test_a_long_answer_is_the_message_that_a_short_one_would_be() -> None:
    codec = GrpcCodec("m", "1", identity("FP32"), None)
    outputs = {"OUTPUT0": np.arange(1 << 18, dtype=np.float32).reshape(1, -1)}
    request = InferRequest("m", "1", "", {}, 1, 0, ())
    reply = codec.encode(request, InferResponse("m", "1", "seven", outputs), no_region)  # type: ignore[arg-type]  # there is none to write to
    assert isinstance(reply, LongReply)
    reply.message.parameters["a"].bool_param = True
    data = b"".join(reply.parts())
    whole = pb.ModelInferResponse.FromString(data)
    assert (whole.id, whole.parameters["a"].bool_param) == ("seven", True)
    assert whole.raw_output_contents[0] == outputs["OUTPUT0"].tobytes()
    streamed = pb.ModelStreamInferResponse.FromString(b"".join(reply.streamed()))
    assert streamed.infer_response == whole


@pytest.mark.slow
@settings(max_examples=300, derandomize=True)
@given(st.binary(max_size=60), st.integers(0, 200))
def test_the_head_of_any_bytes_is_one_or_an_error_of_ours(noise: bytes, at: int) -> None:
    good = pair(id="x").SerializeToString()
    for data in (noise, good[:at] + noise, good[:at] + noise + good[at:]):
        with contextlib.suppress(InvalidArgument):
            parts_of(data)


def test_many_texts_and_long_regions_take_long_in_haste() -> None:
    text = identity("BYTES", max_rows=0)
    many = pb.ModelInferRequest(raw_input_contents=[bytes(4 * 70_000)])
    many.inputs.add(name="INPUT0", datatype="BYTES", shape=[1, 70_000])
    assert read(many, text).inputs["INPUT0"].size == 70_000
    with pytest.raises(TakesLong):
        GrpcCodec("m", "1", text, None, in_haste=True).decode(many, 0, None, no_region)
    one = pb.ModelInferRequest(raw_input_contents=[len(LONG_TEXT).to_bytes(4, "little") + LONG_TEXT])
    one.inputs.add(name="INPUT0", datatype="BYTES", shape=[1, 1])
    assert read(one, text).inputs["INPUT0"].tolist() == [[LONG_TEXT]]
    with pytest.raises(TakesLong):
        GrpcCodec("m", "1", text, None, in_haste=True).decode(one, 0, None, no_region)
    long = pb.ModelInferRequest()
    tensor = long.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 10_000_000])
    for key, value in shared(shared_memory_region="r", shared_memory_byte_size=40_000_000).items():
        tensor.parameters[key].CopyFrom(value)
    with pytest.raises(TakesLong):
        GrpcCodec("m", "1", identity("FP32"), None, in_haste=True).decode(long, 0, None, no_region)
    with pytest.raises(NotFound):
        read(long, identity("FP32"))


def test_short_answers_alike_are_written_as_protobuf_writes_them() -> None:
    codec = GrpcCodec("m", "1", ADD_SUB, None)
    request = InferRequest("m", "1", "", {}, 1, 0)
    for rows in (1, 3, 1, 0, 200, 3):
        array = np.arange(rows * 4, dtype=ROW.dtype).reshape(4, rows).T
        reply = codec.encode(request, InferResponse("m", "1", "", {"OUTPUT0": array}), no_region)  # type: ignore[arg-type]  # there is none to write to
        expected = pb.ModelInferResponse(model_name="m", model_version="1", raw_output_contents=[array.tobytes()])
        expected.outputs.add(name="OUTPUT0", datatype="FP32" if ROW.dtype == np.float32 else "INT32", shape=[rows, 4])
        assert isinstance(reply, ShortReply)
        assert reply.data == expected.SerializeToString()
        assert reply.message() == expected
