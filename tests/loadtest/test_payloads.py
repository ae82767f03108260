import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from gateway.process.credentials import Credentials
from loadtest.errors import UsageError
from loadtest.load.payloads import Request, distinct, from_files, grpc_requests, http_requests, joined, read_requests, synthetic
from loadtest.load.target import Address
from loadtest.results import LoadSpec

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


def test_a_host_that_is_asked_for_is_the_only_one() -> None:
    spec = replace(SPEC, headers=(("host", "other"),))
    request = http_requests(spec, Address.of(spec), "m", synthetic(spec, INPUTS)[:1])[0]
    head = request.split(b"\r\n\r\n", 1)[0].lower()
    assert head.count(b"\r\nhost:") == 1
    assert b"\r\nhost: other\r\n" in head


@pytest.mark.parametrize("protocol", ["rest-json", "rest-binary"])
def test_a_header_that_is_asked_for_replaces_ours_however_it_is_written(protocol: Any) -> None:
    spec = replace(SPEC, protocol=protocol, headers=(("content-TYPE", "text/csv"), ("AUTHORIZATION", "mine")))
    address = replace(Address.of(spec), shown=Credentials(api_key="theirs"))
    head = http_requests(spec, address, "m", synthetic(spec, INPUTS)[:1])[0].split(b"\r\n\r\n", 1)[0]
    assert [line for line in head.split(b"\r\n") if line.lower().startswith((b"content-type", b"authorization"))] == [
        b"content-TYPE: text/csv", b"AUTHORIZATION: mine",
    ]  # fmt: skip


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


ASKED: dict[str, Any] = {
    "id": "a",
    "parameters": {"sequence_id": 7, "priority": 18446744073709551615, "share": 0.5, "last": True, "who": "me"},
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2], "parameters": {"k": 1}}],
    "outputs": [{"name": "small", "parameters": {"classification": 2}}],
}


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "expected.json", "rows"])
@pytest.mark.parametrize("protocol", ["rest-json", "rest-binary", "grpc"])
def test_what_a_request_says_beside_its_tensors_is_sent_in_every_protocol(tmp_path: Path, name: str, protocol: Any) -> None:
    document = ASKED | ({"expected": {"outputs": []}} if name == "expected.json" else {})
    path = tmp_path / ("a.jsonl" if name == "rows" else name)
    path.write_text(json.dumps(document))
    spec = replace(SPEC, payloads=(str(path),), protocol=protocol, rows="2" if name == "rows" else "1")
    (made,) = from_files(spec, Address.of(SPEC), "m")
    if protocol != "grpc":
        head = json.JSONDecoder().raw_decode(body(made).decode(errors="replace"))[0]
        own = head["inputs"][0]["parameters"]
        assert {key: head["parameters"][key] for key in ASKED["parameters"]} == ASKED["parameters"]
        assert (head["id"], head["outputs"], own["k"]) == ("a", ASKED["outputs"], 1)
        return
    message = pb.ModelInferRequest.FromString(made)
    told = {key: value.WhichOneof("parameter_choice") for key, value in message.parameters.items()}
    assert told == {
        "sequence_id": "int64_param", "priority": "uint64_param", "share": "double_param", "last": "bool_param",
        "who": "string_param",
    }  # fmt: skip
    assert message.parameters["priority"].uint64_param == ASKED["parameters"]["priority"]
    assert (message.id, message.inputs[0].parameters["k"].int64_param) == ("a", 1)
    assert (message.outputs[0].name, message.outputs[0].parameters["classification"].int64_param) == ("small", 2)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"note": "mine"}, r"a\.jsonl: line 1: cannot be said over gRPC: 'note' is none of id, parameters, outputs"),
        ({"model_name": "other"}, "'model_name' is none of"),
        ({"parameters": {"k": [1]}}, "parameter 'k': \\[1\\] is no true or false, number or text"),
        ({"parameters": {"k": 1 << 64}}, "line 1: not a v2 inference request: .*64"),
        ({"parameters": {"binary_data_output": True}}, "'binary_data_output' is of REST's binary form"),
        ({"outputs": [{"name": "y", "data": []}]}, "'data' is none of name, parameters"),
    ],
)
def test_what_a_protocol_cannot_carry_is_refused(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ASKED | more))
    with pytest.raises(UsageError, match=words):
        from_files(replace(SPEC, payloads=(str(path),), protocol="grpc"), Address.of(SPEC), "m")


@pytest.mark.parametrize("rows", ["1", "2"])
@pytest.mark.parametrize("protocol", ["rest-json", "rest-binary", "grpc"])
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"parameters": [1]}, r"parameters \[1\]: expected an object"),
        ({"parameters": "ab"}, "parameters 'ab': expected an object"),
        ({"parameters": {"k": "\ud800"}}, r"parameters \{'k': '\\ud800'\}: expected what JSON can say: .*surrogates"),
        (
            {"parameters": {"k": -(1 << 70)}},
            r"parameters \{'k': -1180591620\d+\}: expected what JSON can say: .*64-bit",
        ),
        ({"parameters": {"k": float("nan")}}, r"parameters \{'k': nan\}: expected what JSON can say: "),
        ({"outputs": "y"}, "outputs: 'y': expected a list of tensors"),
        ({"outputs": [5]}, "outputs: 5: expected an object with name"),
        ({"outputs": [{"name": 5}]}, "outputs: name 5: expected text of whole characters"),
        ({"outputs": [{"name": "y", "parameters": 1}]}, "outputs 'y': parameters 1: expected an object"),
        ({"id": 7}, "id 7: expected text of whole characters"),
        ({"id": "\ud800"}, r"id '\\ud800': expected text of whole characters"),
    ],
)
def test_what_stands_beside_the_tensors_is_checked_as_it_is_read(
    tmp_path: Path, more: dict[str, Any], words: str, protocol: Any, rows: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ASKED | more))
    spec = replace(SPEC, payloads=(str(path),), protocol=protocol, rows=rows)
    with pytest.raises(UsageError, match=f"line 1: not a v2 inference request: {words}"):
        from_files(spec, Address.of(SPEC), "m")


@pytest.mark.parametrize("ending", ["json", "jsonl"])
@pytest.mark.parametrize("protocol", ["rest-json", "rest-binary", "grpc"])
def test_a_byte_order_mark_is_not_sent(tmp_path: Path, protocol: Any, ending: str) -> None:
    made = []
    for name, mark in (("plain", ""), ("marked", "\ufeff")):
        path = tmp_path / f"{name}.{ending}"
        path.write_text(mark + json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}))
        made.append(from_files(replace(SPEC, payloads=(str(path),), protocol=protocol), Address.of(SPEC), "m"))
    assert made[0] == made[1]


@pytest.mark.parametrize(("ending", "rows"), [("json", "1"), ("jsonl", "1"), ("jsonl", "2")])
@pytest.mark.parametrize("protocol", ["rest-json", "rest-binary", "grpc"])
def test_a_field_that_is_null_is_none(tmp_path: Path, protocol: Any, ending: str, rows: str) -> None:
    made = []
    for name, nothing in (("null", {"id": None, "parameters": None, "outputs": None}), ("none", {})):
        path = tmp_path / f"{name}.{ending}"
        inputs = [
            {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]} | {key: None for key in nothing if key[0] == "p"}
        ]
        path.write_text(json.dumps({"inputs": inputs} | nothing))
        spec = replace(SPEC, payloads=(str(path),), protocol=protocol, rows=rows)
        made.append(from_files(spec, Address.of(SPEC), "m"))
    assert made[0] == made[1]
    path = tmp_path / "output.jsonl"
    output = {"inputs": [], "outputs": [{"name": "y", "parameters": None}]}
    path.write_text(json.dumps(output))
    (asked,) = read_requests([str(path)])
    assert asked.extras.fields == {"outputs": [{"name": "y"}]}


def test_requests_that_ask_for_other_things_are_neither_joined_nor_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(ASKED | {"outputs": [{"name": name}], "id": name}) for name in ("y", "z", "z")))
    requests = read_requests([str(path)])
    assert len(distinct(requests)) == 2
    assert {(str(made.extras.fields["outputs"]), made.rows) for made in joined(requests, 2, 2, {})} == {
        ("[{'name': 'y'}]", 2), ("[{'name': 'z'}]", 2),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "a.json"),
        ("a.json", '{"inputs": [{"name": "x"}]}', "datatype"),
        ("a.json", '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1]}]}', "a shape of 1 value"),
        ("a.bin", "abc", "json"),
    ],
)
def test_a_payload_file_that_cannot_be_sent_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message):
        from_files(replace(SPEC, payloads=(str(tmp_path / name),)), Address.of(SPEC), "m")


def line(*ids: int, expected: float | None = None) -> str:
    shape = [1, len(ids)]
    document: dict[str, Any] = {
        "inputs": [
            {"name": "ids", "datatype": "INT64", "shape": shape, "data": list(ids)},
            {"name": "mask", "datatype": "INT64", "shape": shape, "data": [1] * len(ids)},
        ]
    }
    if expected is not None:
        outputs = [{"name": "y", "datatype": "FP32", "shape": [1, 1], "data": [expected]}]
        document["expected"] = {"outputs": outputs}
    return json.dumps(document)


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join([line(1, 2, 3, expected=0.5), "", line(4), line(5, 6)]) + "\n")
    return path


@pytest.mark.parametrize("protocol", ["rest-json", "rest-binary", "grpc", "invocations"])
def test_each_line_of_a_jsonl_file_is_a_request(lines: Path, protocol: Any) -> None:
    spec = replace(SPEC, protocol=protocol, payloads=(str(lines),))
    made = from_files(spec, Address.of(SPEC), "m")
    assert len(made) == 3
    assert not any(b"expected" in request for request in made)
    if protocol == "grpc":
        assert list(pb.ModelInferRequest.FromString(made[0]).inputs[0].shape) == [1, 3]
    elif protocol != "rest-binary":
        assert json.loads(body(made[0]))["inputs"][0]["data"] == [1, 2, 3]


def test_an_expected_answer_stands_beside_its_request(lines: Path) -> None:
    first, second, _ = read_requests([str(lines)])
    assert first.expected is not None
    assert first.expected["y"].tolist() == [[0.5]]
    assert second.expected is None
    assert second.source.endswith("requests.jsonl: line 3")
    assert (first.rows, second.rows) == (1, 1)


def test_an_expected_answer_is_not_sent(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(line(1, expected=0.5))
    spec = replace(SPEC, payloads=(str(path),))
    assert b"expected" not in from_files(spec, Address.of(spec), "m")[0]


def test_a_json_file_goes_over_rest_as_json_as_it_is_written_but_for_what_is_not_sent(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    spec = replace(SPEC, payloads=(str(path),))
    inputs = '"inputs": [{"datatype": "FP16", "name": "expected", "shape": [1, 2],  "data": [[0.10000, NaN]]}]'
    path.write_text(f"{{ {inputs} }}")
    assert body(from_files(spec, Address.of(spec), "m")[0]).decode() == f"{{ {inputs} }}"
    path.write_text(f'{{{inputs}, "id": "a", "expected": {{"outputs": []}}}}')
    (made,) = from_files(spec, Address.of(spec), "m")
    (told,) = json.loads(body(made))["inputs"]
    assert json.loads(body(made)).keys() == {"id", "inputs"}
    assert (told["name"], told["datatype"], told["shape"], str(told["data"])) == ("expected", "FP16", [1, 2], "[[0.1, nan]]")


def test_an_expected_answer_that_is_null_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(json.loads(line(1)) | {"expected": None}))
    assert read_requests([str(path)])[0].expected is None
    assert b"expected" not in from_files(replace(SPEC, payloads=(str(path),)), Address.of(SPEC), "m")[0]


def test_a_request_that_comes_twice_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([line(1, 2), line(3), line(1, 2)]))
    assert len(distinct(read_requests([str(path)]))) == 2


def test_requests_are_joined_to_rows_with_their_neighbours_in_length(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(line(*[length] * length) for length in (9, 1, 8, 2)))
    pad = {"ids": 0.0, "mask": 0.0}
    made = joined(read_requests([str(path)]), 2, 2, pad)
    assert len(made) == 4  # each of them leads one
    shapes = {request.inputs["ids"].shape for request in made}
    assert shapes <= {(2, 2), (2, 8), (2, 9)}
    short = next(request for request in made if request.inputs["ids"].shape == (2, 2))
    assert short.inputs["ids"].tolist() == [[1, 0], [2, 2]]
    assert short.inputs["mask"].tolist() == [[1, 0], [1, 1]]


def test_what_is_not_padded_is_joined_only_with_its_like(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([line(1, 2), line(3), line(4, 5)]))
    made = joined(read_requests([str(path)]), 3, 3, {})
    assert sorted(request.inputs["ids"].tolist() for request in made) == [
        [[1, 2], [4, 5], [1, 2]], [[1, 2], [4, 5], [1, 2]], [[3], [3], [3]],
    ]  # fmt: skip


def test_joined_requests_have_exactly_the_rows_that_are_asked() -> None:
    three = Request({"x": np.ones((3, 2), np.float32)}, {"x": "FP32"})
    assert [request.inputs["x"].shape for request in joined([three], 4, 4, {})] == [(4, 2)]
    rows = {request.rows for request in joined([three] * 64, 2, 5, {})}
    assert rows == {2, 3, 4, 5}
    with pytest.raises(UsageError, match="no common first dimension"):
        joined([Request({"x": np.float32(1).reshape(())}, {"x": "FP32"}, source="a.json")], 2, 2, {})


def test_rows_join_the_requests_of_files(lines: Path) -> None:
    spec = replace(SPEC, payloads=(str(lines),), rows="4", pad=("ids=0", "mask=0"))
    for request in from_files(spec, Address.of(spec), "m"):
        assert json.loads(body(request))["inputs"][0]["shape"] == [4, 3]


def tensor(**more: Any) -> str:
    """A request of one input, of which something is otherwise."""
    return json.dumps({"inputs": [{"name": "x", "datatype": "UINT8", "shape": [2], "data": [1, 2], **more}]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"inputs": []', r"a\.jsonl: line 2: not a v2 inference request: it is no JSON: Expecting ',' delimiter"),
        ("[" * 100_000, "lists or objects lie too deep"),
        ('{"text": "a b"}', 'expected the field "inputs", got text; --protocol invocations sends a .json file of any form'),
        ("[1, 2]", r'\[1, 2\]: expected an object with "inputs"; --protocol invocations'),
        ('{"inputs": {"x": 1}}', r"inputs: \{'x': 1\}: expected a list of tensors"),
        ('{"inputs": [5]}', "inputs: 5: expected an object with name, datatype, shape, data"),
        ('{"inputs": [{"name": "x"}]}', r"inputs: \{'name': 'x'\}: expected an object with name, datatype, shape, data"),
        ('{"inputs": [], "expected": {}}', 'expected the field "outputs", got none'),
        ('{"inputs": [], "expected": 1}', '1: expected an object with "outputs"'),
        (tensor(datatype="F32"), "inputs 'x': datatype 'F32': expected one of BOOL, UINT8"),
        (tensor(datatype=["FP32"]), r"inputs 'x': datatype \['FP32'\]: expected one of BOOL, UINT8"),
        (tensor(data=[1, 300]), r"inputs 'x': data \[1, 300\]: expected UINT8: .*300"),
        (tensor(data=[1, "a"]), r"inputs 'x': data \[1, 'a'\]: expected UINT8: .*'a'"),
        (tensor(datatype="BYTES", data=["a", 1]), r"inputs 'x': data \['a', 1\]: expected BYTES: 1 is no text"),
        (tensor(shape=[1, 16]), r"inputs 'x': shape \[1, 16\]: expected a shape of 2 values, as many as data has"),
        (tensor(shape="2"), "inputs 'x': shape '2': expected a shape of 2 values"),
        (tensor(shape=[-1, 2]), r"inputs 'x': shape \[-1, 2\]: expected a shape of 2 values"),
        (tensor(shape=[True, 2]), r"inputs 'x': shape \[True, 2\]: expected a shape of 2 values"),
        (tensor(shape=2), "inputs 'x': shape 2: expected a shape of 2 values"),
        (tensor(data=[1.5, 2]), r"inputs 'x': data \[1\.5, 2\]: expected UINT8: 1\.5 is no whole number"),
        (tensor(data=[[2], [1.0]]), r"inputs 'x': data \[\[2\], \[1\.0\]\]: expected UINT8: 1\.0 is no whole number"),
        (tensor(data=["12", 2]), r"inputs 'x': data \['12', 2\]: expected UINT8: '12' is no whole number"),
        (tensor(data=[True, 1]), r"inputs 'x': data \[True, 1\]: expected UINT8: True is no whole number"),
        (tensor(data=[[1], [2, 3]]), r"inputs 'x': data \[\[1\], \[2, 3\]\]: expected UINT8: \[1\] is no whole number"),
        (tensor(data=1, shape=[]), "inputs 'x': data 1: expected UINT8: it is no list"),
        (tensor(datatype="BOOL", data=["false", 0]), r"inputs 'x': data .*: expected BOOL: 'false' is no true or false"),
        (tensor(datatype="BOOL", data=[True, 0]), r"inputs 'x': data .*: expected BOOL: 0 is no true or false"),
        (tensor(datatype="FP32", data=["1", 2]), r"inputs 'x': data .*: expected FP32: '1' is no number"),
        (tensor(datatype="FP32", data=[None, 2]), r"inputs 'x': data .*: expected FP32: None is no number"),
        (tensor(datatype="BF16", data=[True, 2]), r"inputs 'x': data .*: expected BF16: True is no number"),
        (tensor(datatype="FP32", data=[1e300, 2]), r"inputs 'x': data \[1e\+300, 2\]: expected FP32: overflow"),
        (tensor(datatype="BF16", data=[1e300, 2]), r"inputs 'x': data \[1e\+300, 2\]: expected BF16: overflow"),
        (tensor(datatype="FP64", data=[10**400, 2]), r"inputs 'x': data .*: expected FP64: int too large"),
        (
            '{"inputs": [' + ", ".join([json.dumps(json.loads(tensor())["inputs"][0])] * 2) + "]}",
            "inputs 'x': expected one of each name, got two",
        ),
        (tensor(parameters=3), "inputs 'x': parameters 3: expected an object"),
        (tensor(parameters={"k": "\udc00"}), r"inputs 'x': parameters \{'k': '\\udc00'\}: expected what JSON can say"),
        (tensor(name=5), "inputs: name 5: expected text of whole characters"),
        (tensor(name="\ud800"), r"inputs: name '\\ud800': expected text of whole characters"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{line(1)}\n{text}\n")
    with pytest.raises(UsageError, match=message):
        read_requests([str(path)])


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("BOOL", [True, False]), ("UINT64", [(1 << 64) - 1, 0]), ("INT64", [-(1 << 63), 1]), ("FP32", [1, 0.5]),
        ("BF16", [-2, 1.0]), ("FP16", [65504, float("-inf")]), ("FP64", [1e300, 3]), ("BYTES", ["a", ""]),
    ],
)  # fmt: skip
def test_elements_are_read_as_they_are_written(tmp_path: Path, datatype: str, data: list[Any]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(tensor(datatype=datatype, data=data))
    (request,) = read_requests([str(path)])
    assert [each.decode() if isinstance(each, bytes) else each for each in request.inputs["x"].tolist()] == data


def test_nan_and_infinity_are_sent_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(tensor(datatype="FP32", data=[float("nan"), float("-inf")]))
    (made,) = from_files(replace(SPEC, payloads=(str(path),)), Address.of(SPEC), "m")
    assert b'"data": [NaN, -Infinity]' in body(made)


def test_an_empty_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    path.touch()
    with pytest.raises(UsageError, match=r"e\.json: not a v2 inference request: it is empty"):
        read_requests([str(path)])


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")
    (tmp_path / "a.bin").write_text("x")
    spec = replace(SPEC, payloads=(str(tmp_path / "a.jsonl"),))
    with pytest.raises(UsageError, match="no request in it"):
        from_files(spec, Address.of(spec), "m")
    with pytest.raises(UsageError, match="no request in it"):
        read_requests(spec.payloads)
    with pytest.raises(UsageError, match=r"expected v2 requests in \.json and \.jsonl files"):
        read_requests([str(tmp_path / "a.bin")])
    with pytest.raises(UsageError, match="cannot be read"):
        read_requests([str(tmp_path / "none.jsonl")])


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
