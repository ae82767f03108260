import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from loadtest.errors import UsageError
from loadtest.payloads import from_files, grpc_requests, http_requests, synthetic
from loadtest.results import LoadSpec
from loadtest.target import Address

SPEC = LoadSpec("http://host:8000/prefix", model="m")
INPUTS: list[dict[str, Any]] = [
    {"name": "input_ids", "datatype": "INT64", "shape": ["-1", "-1"]},  # numbers as gRPC's JSON has them
    {"name": "attention_mask", "datatype": "INT64", "shape": [-1, -1]},
    {"name": "token_type_ids", "datatype": "INT64", "shape": [-1, -1]},
    {"name": "image", "datatype": "FP32", "shape": [-1, 3, 2]},
    {"name": "flag", "datatype": "BOOL", "shape": [-1, 1]},
    {"name": "text", "datatype": "BYTES", "shape": [-1, 1]},
]


def body(request: bytes) -> bytes:
    return request.split(b"\r\n\r\n", 1)[1]


def test_synthetic_inputs_fit_the_metadata_and_each_other() -> None:
    shapes = set()
    for arrays, datatypes in synthetic(replace(SPEC, rows="1-3", length="4-8"), INPUTS):
        rows, length = arrays["input_ids"].shape
        assert 1 <= rows <= 3
        assert 4 <= length <= 8
        shapes.add((rows, length))
        assert arrays["attention_mask"].shape == (rows, length)
        assert arrays["image"].shape == (rows, 3, 2)
        assert (arrays["attention_mask"] == 1).all()
        assert (arrays["token_type_ids"] == 0).all()
        assert ((arrays["input_ids"] >= 1) & (arrays["input_ids"] <= 99)).all()
        assert datatypes["text"] == "BYTES"
    assert len(shapes) > 5


def test_the_seed_decides_the_payloads() -> None:
    first, again, other = (synthetic(replace(SPEC, seed=seed), INPUTS)[0][0]["image"] for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_values_can_be_narrowed() -> None:
    arrays = synthetic(replace(SPEC, values=("input_ids=7:7", "image=2:3")), INPUTS)[0][0]
    assert (arrays["input_ids"] == 7).all()
    assert ((arrays["image"] >= 2) & (arrays["image"] <= 3)).all()


def test_json_requests_are_v2() -> None:
    made = synthetic(SPEC, INPUTS)[:1]
    request = http_requests(SPEC, Address.of(SPEC), "m/ü", made)[0]
    assert request.startswith(b"POST /prefix/v2/models/m%2F%C3%BC/infer HTTP/1.1\r\nHost: host:8000\r\n")
    tensors = {tensor["name"]: tensor for tensor in json.loads(body(request))["inputs"]}
    assert tensors["image"]["shape"] == [1, 3, 2]
    assert tensors["image"]["data"] == pytest.approx(made[0][0]["image"].reshape(-1).tolist())
    assert tensors["flag"]["data"] in ([True], [False])
    assert tensors["text"]["data"][0].startswith("word")


def test_types_without_a_json_form_ask_for_another_protocol() -> None:
    half = [{"name": "x", "datatype": "FP16", "shape": [-1, 4]}]
    with pytest.raises(UsageError, match="rest-binary"):
        http_requests(SPEC, Address.of(SPEC), "m", synthetic(SPEC, half))
    assert http_requests(replace(SPEC, protocol="rest-binary"), Address.of(SPEC), "m", synthetic(SPEC, half))


def test_grpc_requests_have_raw_contents() -> None:
    made = synthetic(SPEC, INPUTS)[:1]
    message = pb.ModelInferRequest.FromString(grpc_requests(SPEC, "m", made)[0])
    assert [tensor.name for tensor in message.inputs] == [tensor["name"] for tensor in INPUTS]
    assert np.frombuffer(message.raw_input_contents[3], np.float32) == pytest.approx(made[0][0]["image"].reshape(-1))


def test_one_json_file_serves_every_protocol() -> None:
    spec = replace(SPEC, payloads=(str(Path(__file__).parent / "payload.json"),))
    values = np.array([0, 1, 2, 3], np.float32).tobytes()
    address = Address.of(spec)
    assert json.loads(body(from_files(spec, address, "m")[0]))["inputs"][0]["name"] == "x"
    assert body(from_files(replace(spec, protocol="rest-binary"), address, "m")[0]).endswith(values)
    message = pb.ModelInferRequest.FromString(from_files(replace(spec, protocol="grpc"), address, "m")[0])
    assert message.raw_input_contents[0] == values


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "a.json"),
        ("a.json", '{"inputs": [{"name": "x"}]}', "datatype"),
        ("a.json", '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1]}]}', "reshape"),
        ("a.bin", "abc", "json"),
    ],
)
def test_a_payload_file_that_cannot_be_sent_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message):
        from_files(replace(SPEC, payloads=(str(tmp_path / name),)), Address.of(SPEC), "m")


@pytest.mark.parametrize(
    ("target", "protocol", "expected"),
    [
        ("host", "rest-json", ("host", 80, False, "")),
        ("https://host/a/", "rest-json", ("host", 443, True, "/a")),
        ("[::1]:8001", "grpc", ("::1", 8001, False, "")),
        ("grpcs://host", "grpc", ("host", 443, True, "")),
        ("http://host:8080", "invocations", ("host", 8080, False, "/invocations")),
        ("https://host/endpoints/e/invocations?x=1", "invocations", ("host", 443, True, "/endpoints/e/invocations?x=1")),
    ],
)
def test_targets_are_read(target: str, protocol: Any, expected: tuple[str, int, bool, str]) -> None:
    address = Address.of(LoadSpec(target, protocol=protocol))
    assert (address.host, address.port, address.tls, address.path) == expected
