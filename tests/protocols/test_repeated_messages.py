"""Messages that repeat the last ones, but for their raw contents."""

from random import Random
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from backends.base import ModelSpec, TensorSpec
from gateway.protocols.grpc import GrpcCodec, parse
from gateway.protocols.repeated_messages import RepeatedMessages
from gateway.types import InferRequest, RegionRef
from gateway.wire.tensors import Buffer

SPEC = ModelSpec(
    "test", (TensorSpec("A", "FP32", (-1, 2)), TensorSpec("B", "INT32", (-1, 2))), (TensorSpec("C", "FP32", (-1, 2)),), 8
)
CODEC = GrpcCodec("m", "1", SPEC, None)


def no_region(ref: RegionRef, asked_ns: int) -> Buffer:
    raise AssertionError("no region was asked for")


def message(a: Any, b: Any, **fields: Any) -> pb.ModelInferRequest:
    rows = len(a) // 2
    asked = pb.ModelInferRequest(model_name="m", **fields)
    for name, datatype, values in (("A", "FP32", np.array(a, np.float32)), ("B", "INT32", np.array(b, np.int32))):
        asked.inputs.add(name=name, datatype=datatype, shape=[rows, 2])
        asked.raw_input_contents.append(values.tobytes())
    return asked


def read(data: bytes, codec: GrpcCodec = CODEC) -> InferRequest:
    return codec.decode(parse(data), 0, None, no_region)


def remembered(*data: bytes) -> RepeatedMessages:
    repeated = RepeatedMessages()
    for each in data:
        repeated.remember(each, parse(each), CODEC, read(each))
    return repeated


def test_other_elements_in_the_same_message_are_known() -> None:
    repeated = remembered(message([1, 2], [3, 4], id="x").SerializeToString())
    data = message([5, 6], [7, 8], id="x").SerializeToString()
    known = repeated.find(data)
    assert known is not None
    assert known.codec is CODEC
    assert (known.message.id, list(known.message.raw_input_contents)) == ("x", [])
    again, whole = known.request(data, 1000, 2.0), CODEC.decode(parse(data), 1000, 2.0, no_region)
    for name in ("A", "B"):
        np.testing.assert_array_equal(again.inputs[name], whole.inputs[name])
        assert again.inputs[name].dtype == whole.inputs[name].dtype
    assert (again.id, again.rows, again.deadline_ns, again.shape_key) == (whole.id, whole.rows, whole.deadline_ns, None)
    assert known.request(data, 1000, None).deadline_ns is None


def test_what_is_not_the_same_is_not_known() -> None:
    repeated = remembered(message([1, 2], [3, 4], id="x").SerializeToString())
    others = (
        message([1, 2], [3, 4], id="y"),
        message([1, 2], [3, 4]),
        message([1, 2, 3, 4], [3, 4, 5, 6], id="x"),
        message([1, 2], [3, 4], id="x", model_version="1"),
    )
    for other in others:
        assert repeated.find(other.SerializeToString()) is None
    data = message([1, 2], [3, 4], id="x").SerializeToString()
    assert repeated.find(bytearray(data)) is None
    # The sizes of both are moved, all in all it is as long.
    sizes = data.replace(b"\x3a\x08", b"\x3a\x07", 1)
    assert len(sizes) == len(data)
    assert repeated.find(sizes) is None
    last = data[:-10] + b"\x3a\x07" + data[-8:]
    assert repeated.find(last) is None


def test_a_message_that_only_looks_as_if_it_ended_with_its_raw_contents_is_not_remembered() -> None:
    asked = pb.ModelInferRequest(model_name="m")
    asked.inputs.add(name="A", datatype="FP32", shape=[1, 2])
    raw = np.array([1, 2], np.float32).tobytes()
    asked.raw_input_contents.append(raw)
    tail = b"\x3a\x08" + raw
    data = asked.SerializeToString() + b"\x1a" + bytes([len(tail)]) + tail  # the id, which ends like raw contents
    codec = GrpcCodec("m", "1", ModelSpec("test", SPEC.inputs[:1], SPEC.outputs, 8), None)
    parsed = pb.ModelInferRequest.FromString(data.replace(raw, b"\0" * 8))
    assert parsed.id == "\x3a\x08" + "\0" * 8
    data = data.replace(raw, b"\0" * 8)
    repeated = RepeatedMessages()
    repeated.remember(data, parse(data), codec, codec.decode(parse(data), 0, None, no_region))
    assert repeated.find(data) is None


def test_parameters_and_typed_contents_are_read_each_time() -> None:
    with_parameter = message([1, 2], [3, 4])
    with_parameter.parameters["timeout"].int64_param = 5
    typed = pb.ModelInferRequest(model_name="m")
    typed.inputs.add(name="A", datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([1, 2])
    typed.inputs.add(name="B", datatype="INT32", shape=[1, 2]).contents.int_contents.extend([1, 2])
    for asked in (with_parameter, typed):
        data = asked.SerializeToString()
        assert remembered(data).find(data) is None


def test_a_message_without_inputs_is_read_each_time() -> None:
    optional = TensorSpec("A", "FP32", (2,), optional=True)
    codec = GrpcCodec("m", "1", ModelSpec("test", (optional,), SPEC.outputs, 0), None)
    data = pb.ModelInferRequest(model_name="m").SerializeToString()
    repeated = RepeatedMessages()
    repeated.remember(data, parse(data), codec, read(data, codec))
    assert repeated.find(data) is None


def test_of_those_that_never_come_again_few_are_remembered() -> None:
    repeated = remembered(*(message([1, 2], [3, 4], id=f"n{number}").SerializeToString() for number in range(20)))
    assert repeated.find(message([1, 2], [3, 4], id="n19").SerializeToString()) is None
    assert repeated.find(message([1, 2], [3, 4], id="n15").SerializeToString()) is not None
    data = message([1, 2], [3, 4]).SerializeToString()
    for _ in range(300):
        repeated.remember(data, parse(data), CODEC, read(data))
    assert repeated.find(data) is not None


def test_whatever_came_before_a_message_is_the_same_request() -> None:
    random = Random(0)
    for _ in range(300):
        bodies = [
            message(random.choices(range(9), k=2 * rows), random.choices(range(9), k=2 * rows), id=random.choice(("", "a")))
            for rows in random.choices((1, 2), k=6)
        ]
        data = [body.SerializeToString() for body in bodies]
        repeated = remembered(*data[:3])
        for each in data:
            changed = bytearray(each)
            if random.random() < 0.5:
                changed[random.randrange(len(changed))] = random.randrange(256)
            known = repeated.find(bytes(changed))
            if known is not None:
                again, whole = known.request(bytes(changed), 0, None), read(bytes(changed))
                assert (again.id, again.rows, again.model, again.outputs) == (whole.id, whole.rows, whole.model, whole.outputs)
                for name, array in whole.inputs.items():
                    assert again.inputs[name].tobytes() == array.tobytes()
