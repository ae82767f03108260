"""Answers that take long to write: refused in haste, and at leisure written as short ones are, slice by slice."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from backends.base import ModelSpec, TensorSpec
from gateway.errors import InvalidArgument
from gateway.protocols import grpc
from gateway.protocols.generate import GenerateCodec
from gateway.protocols.json_data import numbers_to_json, to_json
from gateway.protocols.rest import RestCodec
from gateway.protocols.tensors import TakesLong
from gateway.types import InferRequest, InferResponse, OutputRequest, RegionRef

SPEC = ModelSpec(
    "m",
    (TensorSpec("x", "FP32", (-1,)),),
    (TensorSpec("numbers", "FP32", (-1, -1)), TensorSpec("texts", "BYTES", (-1, -1)), TensorSpec("more", "FP32", (-1, -1))),
    max_rows=8,
)
REST = RestCodec("m", "1", SPEC, None, 32, in_haste=True)
GENERATE = GenerateCodec("m", "1", SPEC, None, 32, in_haste=True)
GRPC = grpc.GrpcCodec("m", "1", SPEC, None, in_haste=True)

Encode = Callable[..., Any]


def encoded(codec: Any, outputs: dict[str, np.ndarray], *asked: OutputRequest) -> Any:
    written: list[tuple[RegionRef, bytes]] = []
    request = InferRequest("m", "1", "", {}, 1, 0, asked, parameters={})
    reply = codec.encode(
        request, InferResponse("m", "1", "", outputs), lambda ref, data, asked_ns: written.append((ref, bytes(data)))
    )
    return reply, written


def whole(parts: Any) -> bytes:
    return b"".join(parts)


def texts(count: int, text: bytes = b"abc") -> np.ndarray:
    array = np.empty((1, count), object)
    array[:] = text
    return array


def scores(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.float32).reshape(1, -1)


LONG: list[tuple[str, Any, dict[str, np.ndarray], list[OutputRequest]]] = [
    ("JSON of many texts", REST, {"texts": texts(10_000)}, []),
    ("JSON of a long text", REST, {"texts": texts(1, b"a" * (2 << 20))}, []),
    ("bytes of many texts", REST, {"texts": texts(40_000)}, [OutputRequest("texts", binary=True)]),
    ("many classes", REST, {"numbers": scores(10_000)}, [OutputRequest("numbers", classification=9_000)]),
    ("few of many classes", REST, {"numbers": scores(100_000)}, [OutputRequest("numbers", classification=2)]),
    (
        "JSON beside bytes", REST, {"numbers": scores(200_000), "more": scores(2)},
        [OutputRequest("numbers"), OutputRequest("more", binary=True)],
    ),
    ("a region", REST, {"numbers": scores(9 << 20)}, [OutputRequest("numbers", region=RegionRef("r", 0, 36 << 20))]),
    ("generate of many numbers", GENERATE, {"numbers": scores(140_000)}, []),
    ("generate of many texts", GENERATE, {"texts": texts(10_000)}, []),
    ("gRPC of many texts", GRPC, {"texts": texts(40_000)}, []),
    ("gRPC of one long text", GRPC, {"texts": texts(1, bytes(5_000_000))}, []),
    ("bytes of one long text", REST, {"texts": texts(1, bytes(5_000_000))}, [OutputRequest("texts", binary=True)]),
    ("gRPC of many classes", GRPC, {"numbers": scores(10_000)}, [OutputRequest("numbers", classification=9_000)]),
    ("gRPC to a region", GRPC, {"numbers": scores(9 << 20)}, [OutputRequest("numbers", region=RegionRef("r", 0, 36 << 20))]),
]  # fmt: skip


@pytest.mark.parametrize(("codec", "outputs", "asked"), [each[1:] for each in LONG], ids=[each[0] for each in LONG])
def test_what_takes_long_is_refused_in_haste_and_written_at_leisure(
    codec: Any, outputs: dict[str, np.ndarray], asked: list[OutputRequest]
) -> None:
    with pytest.raises(TakesLong):
        encoded(codec, outputs, *asked)
    assert encoded(codec.at_leisure(), outputs, *asked)


@pytest.mark.parametrize("codec", [REST, GENERATE, GRPC])
def test_what_is_short_is_written_at_once(codec: Any) -> None:
    outputs = {"numbers": scores(1000), "texts": texts(1000)}
    (quick, *rest), (slow, *others) = encoded(codec, outputs), encoded(codec.at_leisure(), outputs)
    if codec is REST:
        quick, slow = (whole(parts) for parts, _ in (quick, slow))
    assert (quick, rest) == (slow, others)


def test_slices_make_the_same_json() -> None:
    numbers = np.arange(100_001, dtype=np.float32)
    numbers[[0, 50_000, 100_000]] = np.nan, np.inf, -np.inf
    text = numbers_to_json(numbers)
    assert text.startswith(b"[NaN,1.0,")
    np.testing.assert_array_equal(np.array(json.loads(text), np.float32), numbers)
    many = texts(10_001).reshape(-1)
    many[[0, 5000, 10_000]] = b"", 'ä"\n', b"\xc3\xa4" * 3
    assert json.loads(to_json("t", "BYTES", many)) == [
        each if isinstance(each, str) else each.decode() for each in many.tolist()
    ]
    long = texts(3, "ä\n".encode() * (1 << 20)).reshape(-1)
    assert json.loads(to_json("t", "BYTES", long)) == [each.decode() for each in long.tolist()]
    assert to_json("t", "BYTES", texts(0)) == numbers_to_json(np.empty(0, np.float32)) == b"[]"


def test_bytes_that_are_no_text_are_told_wherever_they_stand() -> None:
    many = texts(10_000).reshape(-1)
    many[9_999] = b"\xff"
    cut_short = texts(1, b"a" * (2 << 20) + b"\xc3").reshape(-1)
    for odd in (many, cut_short):
        with pytest.raises(InvalidArgument, match="output 't' holds bytes that are no UTF-8 text"):
            to_json("t", "BYTES", odd)


def test_several_outputs_that_are_long_together_come_in_slices() -> None:
    outputs = {"numbers": scores(100_000), "more": scores(100_000)}
    (parts, json_bytes), _ = encoded(REST, outputs)
    assert isinstance(parts, Iterator)
    assert json_bytes is None
    answer = json.loads(whole(parts))
    assert [output["data"] for output in answer["outputs"]] == 2 * [list(range(100_000))]


def test_classes_have_a_limit() -> None:
    with pytest.raises(InvalidArgument, match="classification of 1 rows: 300000 classes each, expected at most 262144 in all"):
        encoded(REST.at_leisure(), {"numbers": scores(300_000)}, OutputRequest("numbers", classification=1_000_000))
