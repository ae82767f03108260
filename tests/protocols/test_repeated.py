"""Bodies that repeat the last ones, but for their tensors' elements."""

import json
from itertools import count
from typing import Any

import numpy as np
import pytest

from backends.base import ModelSpec, TensorSpec
from gateway.errors import InvalidArgument
from gateway.protocols import rest
from gateway.protocols.rest import RestCodec
from gateway.types import InferRequest, RegionRef
from gateway.wire.tensors import Buffer

SPEC = ModelSpec("test", (TensorSpec("IN", "FP32", (-1, 4)),), (TensorSpec("OUT", "FP32", (-1, 4)),), 8)
INTEGERS = ModelSpec("test", (TensorSpec("IN", "UINT8", (-1, 2)),), (TensorSpec("OUT", "UINT8", (-1, 2)),), 8)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The bodies that were read in full: what is remembered shows in what is not."""
    bodies: list[bytes] = []
    whole = rest.parse

    def parse(message: Any, *told: Any, in_haste: bool) -> Any:
        bodies.append(bytes(message))
        return whole(message, *told, in_haste=in_haste)

    monkeypatch.setattr(rest, "parse", parse)
    return bodies


def no_region(ref: RegionRef, asked_ns: int) -> Buffer:
    raise AssertionError("no region was asked for")


def codec(spec: ModelSpec = SPEC) -> RestCodec:
    return RestCodec("m", "1", spec, None, 32)


def body(data: Any, shape: tuple[int, ...] = (1, 4), datatype: str = "FP32", **fields: Any) -> bytes:
    return json.dumps({"inputs": [{"name": "IN", "shape": shape, "datatype": datatype, "data": data}], **fields}).encode()


def decode(codec: RestCodec, body: bytes, header_bytes: int | None = None, at_ns: int = 0) -> InferRequest:
    return codec.decode(body, header_bytes, at_ns, no_region)


def test_other_elements_in_the_same_text_are_not_read_in_full(read: list[bytes]) -> None:
    one = codec()
    decode(one, body([1, 2, 3, 4]))
    again = decode(one, body([5.5, -6, 7e3, 8]), at_ns=7)
    assert len(read) == 1
    assert again.inputs["IN"].tolist() == [[5.5, -6, 7e3, 8]]
    assert again.inputs["IN"].dtype == np.float32
    assert (again.rows, again.arrival_ns, again.deadline_ns, again.parameters) == (1, 7, None, {})


def test_what_is_asked_beside_the_elements_is_asked_again() -> None:
    one = codec()
    asked = {"id": "a", "parameters": {"timeout": 3, "priority": 1, "own": 2.5}, "outputs": [{"name": "OUT"}]}
    first = decode(one, body([1, 2, 3, 4], **asked), at_ns=1000)
    again = decode(one, body([4, 3, 2, 1], **asked), at_ns=5000)
    assert first.deadline_ns == 4000
    assert again.deadline_ns == 8000
    assert (again.id, again.priority, again.outputs, again.shape_key) == ("a", 1, first.outputs, first.shape_key)
    assert again.parameters == {"own": 2.5}
    again.parameters["own"] = 3  # one's own, whoever changes it
    assert decode(one, body([4, 3, 2, 1], **asked)).parameters == {"own": 2.5}


def test_lists_within_lists_of_one_are_remembered_and_others_are_read(read: list[bytes]) -> None:
    one = codec()
    decode(one, body([[1, 2, 3, 4]]))
    assert decode(one, body([[5, 6, 7, 8]])).inputs["IN"].tolist() == [[5, 6, 7, 8]]
    assert len(read) == 1
    for _ in range(2):
        rows = decode(one, body([[1, 2, 3, 4], [5, 6, 7, 8]], (2, 4)))
        assert rows.inputs["IN"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert len(read) == 3


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ([1, 2, 3], "got 3 elements, expected 4"),
        ([1, 2, 3, 4, 5], "got 5 elements, expected 4"),
        ([1, 2, 3, "4"], "expected FP32 elements, got text"),
        ([1, 2, 3, None], "expected FP32 elements, got null"),
        ([1, 2, 3, 1e300], "element 3 is 1e\\+300"),
        (4, "got no list"),
    ],
)
def test_wrong_elements_in_text_that_is_known_are_told_as_ever(data: Any, why: str) -> None:
    one = codec()
    decode(one, body([1, 2, 3, 4]))
    with pytest.raises(InvalidArgument, match=why):
        decode(one, body(data))


def test_integers_that_do_not_fit_are_refused_where_the_text_is_known() -> None:
    one = codec(INTEGERS)
    decode(one, body([1, 2], (1, 2), "UINT8"))
    for data, why in (([1, 256], "element 1 is 256"), ([1.5, 2], "got a float")):
        with pytest.raises(InvalidArgument, match=why):
            decode(one, body(data, (1, 2), "UINT8"))


def test_words_that_json_lacks_are_read_where_the_text_is_known() -> None:
    one = codec()
    decode(one, body([1, 2, 3, 4]))
    assert np.isnan(decode(one, body([1, 2, 3, float("nan")])).inputs["IN"][0, 3])


def test_text_that_closes_what_it_stands_in_is_no_list(read: list[bytes]) -> None:
    one = codec()
    decode(one, body([1, 2, 3, 4]))
    inner = b'[1,2,3,4]}, {"name": "IN", "shape": [1, 4], "datatype": "FP32", "data": [1,2,3,4]'
    with pytest.raises(InvalidArgument, match="already exists"):
        decode(one, body([9, 9, 9, 9]).replace(b"[9, 9, 9, 9]", inner))


def test_elements_that_look_like_the_shape_are_not_taken_for_it() -> None:
    one = codec()
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="got 2 elements"):
            decode(one, body([1, 4]))
    wide = codec(ModelSpec("test", (TensorSpec("IN", "FP32", (-1,)),), (TensorSpec("OUT", "FP32", (-1,)),), 8))
    decode(wide, body([1], (1,)))  # the shape's text and the data's are the same
    with pytest.raises(InvalidArgument, match="got 1 elements, expected 3"):
        decode(wide, body([1], (3,)))
    assert decode(wide, body([3], (1,))).inputs["IN"].tolist() == [3]


def test_bytes_behind_the_same_json_are_not_read_in_full(read: list[bytes]) -> None:
    one = codec()
    tensor = {"name": "IN", "shape": [2, 4], "datatype": "FP32", "parameters": {"binary_data_size": 32}}
    about = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    for number in range(3):
        array = np.arange(8, dtype=np.float32).reshape(2, 4) + number
        request = decode(one, about + array.tobytes(), len(about))
        np.testing.assert_array_equal(request.inputs["IN"], array)
        assert request.rows == 2
        assert request.outputs[0].binary
    assert len(read) == 1
    for tail, why in ((31, "expecting 1 additional bytes"), (33, "1 bytes after those of its inputs")):
        with pytest.raises(InvalidArgument, match=why):
            decode(one, about + bytes(tail), len(about))
    with pytest.raises(InvalidArgument):
        decode(one, about + bytes(32), None)


def test_a_client_that_never_repeats_itself_is_hardly_remembered(read: list[bytes]) -> None:
    one = codec()
    for number in range(40):
        decode(one, body([1, 2, 3, 4], id=f"n{number}"))
    decode(one, body([1, 2, 3, 4], id="n39"))
    assert len(read) == 41


def test_a_client_that_begins_to_repeat_itself_is_remembered_in_the_end(read: list[bytes]) -> None:
    one = codec()
    for number in range(100):
        decode(one, body([1, 2, 3, 4], id=f"n{number}"))
    for _ in range(400):
        decode(one, body([1, 2, 3, 4]))
    assert len(read) < 400


def test_several_shapes_in_turn_are_all_remembered(read: list[bytes]) -> None:
    one = codec()
    for rows, number in zip((1, 2, 3, 4) * 3, count(), strict=False):
        request = decode(one, body([number] * 4 * rows, (rows, 4)))
        assert request.inputs["IN"].tolist() == [[number] * 4] * rows
    assert len(read) == 4
