"""SageMaker's /ping and /invocations, and KServe v1, over the wire: every form of body and answer, and who refuses what."""

import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from gateway.protocols.tensors import LONG_JSON_BYTES
from tests.npy import npy
from tests.rest_routes.serving import FAST, Served, serving
from tests.rest_routes.test_generate import events
from tests.rest_routes.test_routes import Answer, ask

MODELS = f"""
server: {{limits: {{body_bytes: 26214400, json_depth: 8}}}}
models:
  - name: echo
    max_rows: 8
    inputs: [{{name: INPUT0, datatype: FP32, shape: [-1, 4]}}]
    outputs: [{{name: OUTPUT0, datatype: FP32, shape: [-1, 4]}}]
    backends: [{{kind: synthetic, fixed_ms: 0, row_ms: 0, faults: {{fail: 666}}}}]
  - name: pair
    version: "2"
    inputs: [{{name: A, datatype: FP32, shape: [-1, 2]}}, {{name: B, datatype: INT32, shape: [-1]}}]
    outputs: [{{name: C, datatype: FP32, shape: [-1, 2]}}, {{name: D, datatype: INT32, shape: [-1]}}]
    {FAST}
  - {{name: pair, version: "1", {FAST}}}
  - name: text
    inputs: [{{name: IN, datatype: BYTES, shape: [-1, 1]}}]
    outputs: [{{name: OUT, datatype: BYTES, shape: [-1, 1]}}]
    {FAST}
  - name: image
    inputs: [{{name: IN, datatype: BYTES, shape: [-1]}}]
    outputs: [{{name: out_bytes, datatype: BYTES, shape: [-1]}}]
    {FAST}
  - name: half
    inputs: [{{name: IN, datatype: FP16, shape: [-1, 2]}}]
    outputs: [{{name: OUT, datatype: FP16, shape: [-1, 2]}}]
    {FAST}
  - name: brain
    inputs: [{{name: IN, datatype: BF16, shape: [-1, 2]}}]
    outputs: [{{name: OUT, datatype: BF16, shape: [-1, 2]}}]
    {FAST}
  - name: whole
    max_rows: 0
    inputs: [{{name: IN, datatype: INT64, shape: [2]}}]
    outputs: [{{name: OUT, datatype: INT64, shape: [2]}}]
    {FAST}
  - name: flags
    inputs: [{{name: IN, datatype: BOOL, shape: [-1, 2]}}]
    outputs: [{{name: OUT, datatype: BOOL, shape: [-1, 2]}}]
    {FAST}
  - name: wide
    inputs: [{{name: IN, datatype: FP32, shape: [-1, -1]}}]
    outputs: [{{name: OUT, datatype: FP32, shape: [-1, -1]}}]
    {FAST}
  - name: slow
    max_rows: 1
    batching: {{max_queue_rows: 3}}
    inputs: [{{name: INPUT0, datatype: FP32, shape: [-1, 4]}}]
    outputs: [{{name: OUTPUT0, datatype: FP32, shape: [-1, 4]}}]
    backends: [{{kind: synthetic, fixed_ms: 150, row_ms: 0}}]
  - {{name: later, load_at_start: false, {FAST}}}
  - {{name: counts, max_rows: 0, backends: [{{kind: python, model: "tests/rest_routes/test_generate.py:Counts"}}]}}
  - {{name: bounds, max_rows: 8, backends: [{{kind: python, model: "tests/containers/test_invocations.py:Bounds"}}]}}
"""


class Bounds:
    """Gives its outputs in another order than it declares them in."""

    inputs = (("x", "FP32", (-1, 1)),)
    outputs = (("low", "FP32", (-1, 1)), ("high", "FP32", (-1, 1)))

    def predict(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"high": inputs["x"] + 1, "low": inputs["x"] - 1}


ROW = [1.0, 2.0, 3.0, 4.0]
BYTES = np.array(ROW, "<f4").tobytes()
JSON, CSV, NPY, RAW, TEXT = "application/json", "text/csv", "application/x-npy", "application/octet-stream", "text/plain"
CSV_GIVEN, TEXT_GIVEN = f"{CSV}; charset=utf-8", f"{TEXT}; charset=utf-8"
TRITON = "application/vnd.sagemaker-triton.binary+json"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("containers"), MODELS) as running:
        yield running


def invoke(served: Served, model: str, body: Any, content_type: str = JSON, **headers: str) -> Answer:
    more = {"X_Amzn_SageMaker_Target_Model": model} if model else {}
    return ask(served, "POST", "/invocations", body, Content_Type=content_type, **more, **headers)


def v2(name: str, values: np.ndarray, datatype: str = "FP32", **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": name, "datatype": datatype, "shape": list(values.shape), "data": values.tolist()}], **more}


# /ping


def test_ping_says_by_its_status_whether_all_is_ready(served: Served) -> None:
    for method in ("GET", "POST"):
        answer = ask(served, method, "/ping")
        assert (answer.status, answer.body) == (200, b"")


# JSON


def test_a_v2_body_gets_a_v2_answer(served: Served) -> None:
    answer = invoke(served, "echo", v2("INPUT0", np.array([ROW]), id="seven"))
    assert answer.status == 200
    assert (answer.json()["id"], answer.json()["outputs"][0]["data"]) == ("seven", ROW)


@pytest.mark.parametrize(
    ("model", "asked", "answered"),
    [
        ("echo", {"instances": [ROW, ROW[::-1]]}, {"predictions": [ROW, ROW[::-1]]}),
        ("echo", {"signature_name": "serving_default", "instances": [{"INPUT0": ROW}]}, {"predictions": [ROW]}),
        ("echo", {"inputs": [ROW, ROW]}, {"outputs": [ROW, ROW]}),
        ("echo", {"inputs": {"INPUT0": [ROW]}}, {"outputs": [ROW]}),
        (
            "pair",
            {"instances": [{"A": [1, 2], "B": 3}, {"B": 6, "A": [4, 5]}]},
            {"predictions": [{"C": [1.0, 2.0], "D": 3}, {"C": [4.0, 5.0], "D": 6}]},
        ),
        ("pair", {"inputs": {"A": [[1, 2]], "B": [3]}}, {"outputs": {"C": [[1.0, 2.0]], "D": [3]}}),
        ("text", {"instances": ["é", "b"]}, {"predictions": [["é"], ["b"]]}),
        ("text", {"instances": [{"b64": "aGk="}, "b"]}, {"predictions": [["hi"], ["b"]]}),
        ("text", {"instances": [{"IN": {"b64": "aGk="}}]}, {"predictions": [["hi"]]}),
        ("text", {"inputs": {"IN": {"b64": "aGk="}}}, {"outputs": [["hi"]]}),
        ("text", {"inputs": [{"b64": "aGk="}]}, {"outputs": [["hi"]]}),
        ("image", {"instances": [{"b64": "/9j/"}]}, {"predictions": [{"b64": "/9j/"}]}),
        ("half", {"instances": [[0.5, 1]]}, {"predictions": [[0.5, 1.0]]}),
        ("brain", {"instances": [[0.5, 1]]}, {"predictions": [[0.5, 1.0]]}),
        ("whole", {"instances": [[1, 2]]}, {"predictions": [[1, 2]]}),
        ("whole", {"inputs": [1, 2]}, {"outputs": [1, 2]}),
        ("flags", {"instances": [[True, False]]}, {"predictions": [[True, False]]}),
    ],
)  # fmt: skip
def test_rows_get_predictions_and_columns_outputs(served: Served, model: str, asked: Any, answered: Any) -> None:
    answer = invoke(served, model, asked)
    assert (answer.status, answer.json()) == (200, answered)
    at = ask(served, "POST", f"/v1/models/{model}:predict", asked)
    assert (at.status, at.json()) == (200, answered)


def test_a_byte_order_mark_before_the_json_is_passed_over(served: Served) -> None:
    for path in ("/invocations", "/v1/models/echo:predict"):
        for body in ({"instances": [ROW]}, {"instances": [{"INPUT0": ROW}]}):
            answer = ask(
                served, "POST", path, "\ufeff".encode() + json.dumps(body).encode(), X_Amzn_SageMaker_Target_Model="echo"
            )
            assert (answer.status, answer.json()) == (200, {"predictions": [ROW]})


def test_numbers_that_json_lacks_come_and_go_as_words(served: Served) -> None:
    answer = invoke(served, "echo", b'{"instances": [[NaN, Infinity, -Infinity, 1]]}')
    assert answer.body == b'{"predictions":[[NaN,Infinity,-Infinity,1.0]]}'
    rows = b'{"instances": [{"A": [NaN, 1], "B": 1}]}'
    assert invoke(served, "pair", rows).body == b'{"predictions":[{"C":[NaN,1.0],"D":1}]}'


@pytest.mark.parametrize(
    ("model", "asked", "said"),
    [
        ("echo", b"", "the body is empty"),
        ("echo", b"{bad", "failed to parse"),
        ("echo", b"[[1, 2, 3, 4]]", "malformed"),
        ("text", b'{"instances": ["\xed\xa0\x80"], "x": NaN}', "failed to parse"),
        ("echo", {}, "missing 'INPUT0'"),
        ("wide", {"instances": []}, "at least 1 row"),
        ("echo", {"instances": [[1, 2]]}, "expected FP32 [-1, 4]"),
        ("echo", {"instances": [ROW, [1]]}, "side by side"),
        ("echo", {"instances": [["1", "2", "3", "4"]]}, "expected FP32 elements"),
        ("echo", {"instances": [[1e60, 2, 3, 4]]}, "FP32"),
        ("echo", {"instances": [ROW], "inputs": [ROW]}, "got both"),
        ("echo", {"instances": [{"INPUT": ROW}]}, "did you mean 'INPUT0'"),
        ("pair", {"instances": [[1, 2]]}, "has 2 inputs"),
        ("pair", {"instances": [{"A": [1, 2], "B": 3}, {"A": [1, 2]}]}, "number 1"),
        ("pair", {"instances": [{"A": [1, 2]}]}, """'B'; the smallest request: {"instances":[{"A":[1.0,1.0],"B":1}]}"""),
        ("pair", {"inputs": {"B": [1]}}, """'A'; the smallest request: {"inputs":{"A":[[1.0,1.0]],"B":[1]}}"""),
        ("half", {"instances": [[1e9, 1]]}, "FP16 cannot hold"),
        ("half", {"instances": [[1, 1e39]]}, "element 1 is 1e+39, which FP16 cannot hold"),
        ("brain", {"instances": [[1e39, 1]]}, "element 0 is 1e+39, which BF16 cannot hold"),
        ("half", {"instances": [["1", 1]]}, "expected FP16 elements"),
        ("text", {"instances": [{"b64": "?"}]}, "b64"),
        ("text", {"instances": [{"b64": "aGk="}, 3]}, "expected text"),
        ("whole", {"instances": [[1, 2], [3, 4]]}, "expected a list with 1 instance, got 2"),
        ("whole", {"instances": []}, "expected a list with 1 instance, got 0"),
        ("whole", {"instances": 1}, "expected a list with 1 instance, got no list"),
        ("whole", b'{"instances": 1, "x": NaN}', "expected a list with 1 instance, got no list"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_400_with_a_sentence(served: Served, model: str, asked: Any, said: str) -> None:
    answer = invoke(served, model, asked)
    assert (answer.status, answer.headers["content-type"]) == (400, JSON)
    assert said in answer.error


@pytest.mark.parametrize("beside", ["", ', "x": NaN'])
@pytest.mark.parametrize("model", ["echo", "pair", "text"])
def test_a_body_of_v2_is_told_where_to_go(served: Served, model: str, beside: str) -> None:
    tensor = b'{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}'
    answer = ask(served, "POST", f"/v1/models/{model}:predict", b'{"inputs": [%b]%b}' % (tensor, beside.encode()))
    assert answer.status == 400
    assert answer.error == f"malformed request: 'inputs': this is a body of v2: send it to /v2/models/{model}/infer"
    other = ask(served, "POST", f"/v1/models/{model}:predict", b'{"inputs": [{"name": "a", "shape": [1]}]%b}' % beside.encode())
    assert (other.status, "v2" in other.error) == (400, False)


@pytest.mark.parametrize("body", [b"{}", b"", b'{"instances": [{}]}', b'{"inputs": {}}'])
@pytest.mark.parametrize("model", ["pair", "half", "whole"])
def test_the_smallest_request_that_an_error_of_v1_shows_is_served(served: Served, model: str, body: bytes) -> None:
    shown = ask(served, "POST", f"/v1/models/{model}:predict", body).error.partition("the smallest request: ")[2]
    assert ask(served, "POST", f"/v1/models/{model}:predict", shown.encode()).status == 200, shown


# other forms


@pytest.mark.parametrize("media", [RAW, TRITON])
def test_binary_tensors_say_in_the_content_type_or_in_a_header_where_they_begin(served: Served, media: str) -> None:
    values = np.array([ROW, ROW], np.float32)
    entry = {"name": "INPUT0", "datatype": "FP32", "shape": [2, 4], "parameters": {"binary_data_size": values.nbytes}}
    head = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    if media == RAW:
        answer = invoke(served, "echo", head + values.tobytes(), media, Inference_Header_Content_Length=str(len(head)))
    else:
        answer = invoke(served, "echo", head + values.tobytes(), f"{media};json-header-size={len(head)}")
    assert answer.status == 200, answer.body
    told, _, size = answer.headers["content-type"].partition(";json-header-size=")
    assert told == TRITON
    assert size == answer.headers["inference-header-content-length"]
    assert answer.body[int(size) :] == values.tobytes()
    assert invoke(served, "echo", head, f"{TRITON};json-header-size=9999").status == 400
    assert invoke(served, "echo", v2("INPUT0", values), TRITON).json()["outputs"][0]["shape"] == [2, 4]


@pytest.mark.parametrize(
    ("model", "content_type", "asked", "accept", "answered", "told"),
    [
        ("echo", CSV, b"1,2,3,4\n5,6,7,8\r\n", CSV, b"1.0,2.0,3.0,4.0\n5.0,6.0,7.0,8.0\n", CSV_GIVEN),
        ("echo", CSV, b"1,2,3,4", "", b'{"predictions":[[1.0,2.0,3.0,4.0]]}', JSON),
        ("echo", "text/csv; header=present", b"a,b,c,d\n1,2,3,4", "*/*", b'{"predictions":[[1.0,2.0,3.0,4.0]]}', JSON),
        ("echo", CSV, b"nan,inf,-1e3,.5", CSV, b"NaN,Infinity,-1000.0,0.5\n", CSV_GIVEN),
        ("pair", CSV, b"1,2,3.0\n4,5,6", CSV, b"1.0,2.0,3\n4.0,5.0,6\n", CSV_GIVEN),
        ("bounds", CSV, b"5", CSV, b"4.0,6.0\n", CSV_GIVEN),
        ("bounds", CSV, b"5", "", b'{"predictions":[{"low":[4.0],"high":[6.0]}]}', JSON),
        ("text", CSV, b'"a,""b"\nc', CSV, b'"a,""b"\nc\n', CSV_GIVEN),
        ("text", CSV, b'"a,b"', TEXT, b"a,b\n", TEXT_GIVEN),
        ("half", CSV, b"0.5,2", CSV, b"0.5,2.0\n", CSV_GIVEN),
        ("flags", CSV, b"true,0", CSV, b"true,false\n", CSV_GIVEN),
        ("whole", CSV, b"1,2", CSV, b"1,2\n", CSV_GIVEN),
        ("text", TEXT, "é".encode(), TEXT, "é\n".encode(), TEXT_GIVEN),
        ("text", TEXT, b"hi", "", b'{"predictions":[["hi"]]}', JSON),
        ("image", "image/png", b"\x89PNG", RAW, b"\x89PNG", RAW),
        ("image", RAW, b"\xff", JSON, b'{"predictions":[{"b64":"/w=="}]}', JSON),
        ("echo", RAW, BYTES * 2, RAW, BYTES * 2, RAW),
        ("wide", RAW, BYTES, "", b'{"predictions":[[1.0,2.0,3.0,4.0]]}', JSON),
        ("echo", JSON, {"instances": [ROW]}, "text/csv;q=0.5, application/octet-stream", BYTES, RAW),
        ("echo", JSON, v2("INPUT0", np.array([ROW])), CSV, b"1.0,2.0,3.0,4.0\n", CSV_GIVEN),
    ],
)  # fmt: skip
def test_forms_are_read_by_content_type_and_written_by_accept(
    served: Served, model: str, content_type: str, asked: Any, accept: str, answered: bytes, told: str
) -> None:
    answer = invoke(served, model, asked, content_type, **({"Accept": accept} if accept else {}))
    assert (answer.status, answer.body, answer.headers["content-type"]) == (200, answered, told)


@pytest.mark.parametrize(
    "array",
    [
        np.array([ROW, ROW], np.float32),
        np.array([ROW, ROW], ">f4"),
        np.array([ROW, ROW], np.float64),
        np.array([ROW, ROW], np.int64),
        np.asfortranarray(np.array([ROW, ROW[::-1]], np.float32)),
        np.array(ROW, np.float32),
    ],
)
def test_an_npy_is_read_and_written_as_numpy_does(served: Served, array: np.ndarray) -> None:
    answer = invoke(served, "echo", npy(array), NPY, Accept=NPY)
    assert answer.status == 200, answer.body
    got = np.load(io.BytesIO(answer.body), allow_pickle=False)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, np.atleast_2d(array).astype(np.float32))


def test_an_npy_of_text_and_of_what_numpy_has_no_name_for(served: Served) -> None:
    answer = invoke(served, "text", npy(np.array([["é"], ["b"]])), NPY)
    assert answer.json() == {"predictions": [["é"], ["b"]]}
    answer = invoke(served, "brain", npy(np.ones((1, 2), np.float32)), NPY, Accept=NPY)
    np.testing.assert_array_equal(np.load(io.BytesIO(answer.body)), np.ones((1, 2), np.float32))


@pytest.mark.parametrize(
    ("model", "content_type", "asked", "accept", "said"),
    [
        ("echo", CSV, b"", "", "no line of values"),
        ("echo", CSV, b"1,2,3", "", "cannot be made"),
        ("echo", CSV, b"1,2,3,4\n1,2", "", "line 2 has 2 columns"),
        ("echo", CSV, b"1,2,3,4\n1,2,x,4", "", "line 2, column 3: got 'x', expected FP32"),
        ("echo", CSV, b"1,2,1e39,4", "", "FP32 cannot hold"),
        ("half", CSV, b"1,1e39", "", "element 1 is 1e+39, which FP16 cannot hold"),
        ("echo", CSV, b"1,nan,-1e400,4", "", "line 1, column 3: got '-1e400', expected FP32"),
        ("brain", CSV, b"1,%b.5" % (b"9" * 400), "", "line 1, column 2"),
        ("echo", CSV, b"\xff", "", "no UTF-8"),
        ("echo", CSV, b'"1', "", CSV),
        ("whole", CSV, b"1.5,2", "", "expected INT64"),
        ("pair", CSV, b"1,2", "", "got 2 columns, expected 3: 2 of 'A', 1 of 'B'"),
        ("echo", NPY, b"no", "", "no npy"),
        ("echo", NPY, npy(np.array([[{}]]), allow_pickle=True), "", "object"),
        ("echo", NPY, npy(np.ones((1, 4), np.float32))[:-1], "", "expected 16"),
        ("echo", NPY, npy(np.ones((1, 5), np.float32)), "", "expected FP32 [-1, 4]"),
        ("echo", NPY, npy(np.full((1, 4), 1e60)), "", "cannot hold"),
        ("whole", NPY, npy(np.ones(2, np.float32)), "", "expected INT64"),
        ("pair", NPY, npy(np.ones((1, 2), np.float32)), "", "has 2 inputs"),
        ("echo", RAW, b"123", "", "byte size"),
        ("echo", TEXT, b"1,2,3,4", "", "expected text/csv or JSON"),
        ("pair", JSON, {"inputs": {"A": [[1, 2]], "B": [3]}}, NPY, "2 outputs"),
        ("text", TEXT, b"hi", NPY, "no npy form"),
        ("text", JSON, {"instances": ["a", "b"]}, RAW, "2 elements"),
    ],
)  # fmt: skip
def test_what_a_form_cannot_hold_is_400_with_a_sentence(
    served: Served, model: str, content_type: str, asked: Any, accept: str, said: str
) -> None:
    answer = invoke(served, model, asked, content_type, **({"Accept": accept} if accept else {}))
    assert answer.status == 400
    assert said in answer.error


# long bodies


@pytest.mark.slow
def test_long_bodies_of_every_form_are_answered(served: Served) -> None:
    sent = np.random.default_rng(1).standard_normal((64, 8192)).astype(np.float32)
    rows = json.dumps({"instances": sent.tolist()}).encode()
    table = b"\n".join([b",".join([b"%r" % value for value in row]) for row in sent.tolist()])
    assert len(rows) > 8 << 20 > LONG_JSON_BYTES
    for content_type, body in (
        (JSON, rows),
        (JSON, json.dumps({"inputs": {"IN": sent.tolist()}}).encode()),
        (JSON, json.dumps(v2("IN", sent)).encode()),
        (CSV, table),
        (NPY, npy(sent.astype(np.float64))),
    ):
        answer = invoke(served, "wide", body, content_type, Accept=NPY)
        assert answer.status == 200, answer.body
        np.testing.assert_array_equal(np.load(io.BytesIO(answer.body)), sent)
    nothing = np.full((1, 20_000), np.nan, np.float32)  # shorter, but Python's reader must read it
    answer = invoke(served, "wide", json.dumps({"instances": nothing.tolist()}).encode(), JSON, Accept=NPY)
    np.testing.assert_array_equal(np.load(io.BytesIO(answer.body)), nothing)
    columns = invoke(served, "wide", npy(sent), NPY)
    np.testing.assert_array_equal(np.array(columns.json()["predictions"], np.float32), sent)
    lines = invoke(served, "wide", npy(sent), NPY, Accept=CSV)
    np.testing.assert_array_equal(np.loadtxt(io.BytesIO(lines.body), np.float32, delimiter=","), sent)
    words = b"word " * (200 << 10)
    assert invoke(served, "text", words, CSV, Accept=CSV).body == words + b"\n"
    refused = invoke(served, "wide", table + b",x", CSV)
    assert (refused.status, "line 64 has 8193 columns" in refused.error) == (400, True)


# which model


def test_a_model_is_named_by_a_header_or_by_custom_attributes(served: Served) -> None:
    body = {"inputs": {"A": [[1, 2]], "B": [3]}}
    for attributes in ("model=pair", "X=1; Model = pair ;version=2", "model=pair"):
        answer = invoke(served, "", body, X_Amzn_SageMaker_Custom_Attributes=attributes)
        assert answer.status == 200
        assert answer.headers["x-amzn-sagemaker-custom-attributes"] == attributes
    assert invoke(served, "pair.tar.gz", body).status == 200
    assert invoke(served, "pair", body, X_Amzn_SageMaker_Custom_Attributes="model=echo").status == 200
    for missing in ("pear", "pair/1"):
        answer = invoke(served, missing, body)
        assert (answer.status, "is not found" in answer.error) == (404, True)
    answer = invoke(served, "", body, X_Amzn_SageMaker_Custom_Attributes="model=pair;version=7")
    assert answer.status == 404


def test_of_several_models_one_must_be_named(served: Served) -> None:
    answer = invoke(served, "", {"instances": [ROW]})
    assert answer.status == 400
    assert "which of 12 models" in answer.error
    assert "X-Amzn-SageMaker-Target-Model" in answer.error


def test_the_only_model_needs_no_name(tmp_path_factory: pytest.TempPathFactory) -> None:
    text = f"models: [{{name: later, load_at_start: false, {FAST}}}, {{name: only, {FAST}}}]"
    with serving(tmp_path_factory.mktemp("only"), text) as alone:
        answer = invoke(alone, "", {"instances": [[0.0] * 16]})
        assert (answer.status, answer.json()) == (200, {"predictions": [[0.0] * 16]})


def test_ids_and_traces_travel_both_ways(served: Served) -> None:
    answer = invoke(served, "echo", {"instances": [ROW]}, X_Amzn_SageMaker_Inference_Id="event-7")
    assert answer.headers["x-amzn-sagemaker-inference-id"] == answer.headers["x-request-id"] == "event-7"
    answer = invoke(served, "echo", {"instances": [ROW]}, X_Amzn_SageMaker_Custom_Attributes="request_id=mine")
    assert answer.headers["x-request-id"] == "mine"


def test_batch_transform_is_told_to_send_many_requests_at_a_time(served: Served) -> None:
    told = ask(served, "GET", "/execution-parameters").json()
    assert told["MaxConcurrentTransforms"] * told["MaxPayloadInMB"] <= 100
    assert (told["MaxConcurrentTransforms"], told["BatchStrategy"]) == (16, "SINGLE_RECORD")


# refusals


@pytest.mark.parametrize("told", ["application/x-www-form-urlencoded", "Application/X-WWW-Form-Urlencoded; charset=utf-8"])
def test_what_curl_calls_a_form_is_json_to_predict(told: str, served: Served) -> None:
    """`curl -d '{"instances": …}' -X POST …/v1/models/M:predict` is the first command of TF Serving's documentation."""
    answer = ask(served, "POST", "/v1/models/echo:predict", json.dumps({"instances": [ROW]}).encode(), Content_Type=told)
    assert (answer.status, len(answer.json()["predictions"])) == (200, 1)


def test_a_content_type_that_is_not_taken_is_415_and_says_which_are(served: Served) -> None:
    answer = invoke(served, "echo", b"x=1", "application/x-www-form-urlencoded")
    assert answer.status == 415
    assert CSV in answer.error
    assert ask(served, "POST", "/v1/models/echo:predict", b"<a/>", Content_Type="text/xml").status == 415


def test_an_answer_that_cannot_be_given_is_406_and_says_which_can(served: Served) -> None:
    answer = invoke(served, "echo", {"instances": [ROW]}, Accept="image/png, text/html")
    assert answer.status == 406
    assert NPY in answer.error


def test_what_is_too_large_is_413(served: Served) -> None:
    answer = invoke(served, "echo", b" " * 26214401)
    assert (answer.status, "expected at most 26214400 bytes" in answer.error) == (413, True)


def test_too_full_and_too_late_are_503_with_a_time_to_come_back(served: Served) -> None:
    body = v2("INPUT0", np.array([ROW]))
    with ThreadPoolExecutor(8) as others:
        asked = [others.submit(invoke, served, "slow", body) for _ in range(8)]
        answers = [future.result(10) for future in asked]
        late = invoke(served, "slow", {**body, "parameters": {"timeout": 1000}})
    assert {answer.status for answer in answers} == {200, 503}
    unloaded = invoke(served, "later", {"instances": [[0] * 16]})
    answers = [late, unloaded, *(answer for answer in answers if answer.status == 503)]
    assert {answer.status for answer in answers} == {503}
    assert all(int(answer.headers["retry-after"]) >= 1 and answer.error for answer in answers)


def test_a_failing_model_is_500(served: Served) -> None:
    assert invoke(served, "echo", {"instances": [[666, 0, 0, 0]]}).status == 500


def test_another_method_is_405(served: Served) -> None:
    answer = ask(served, "GET", "/invocations")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")


# parts


def test_a_model_that_answers_in_parts_is_asked_for_events(served: Served) -> None:
    body = {"inputs": {"text": ["a"], "n": [2]}}
    answer = invoke(served, "counts", body, Accept="text/event-stream")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert events(answer.body) == [{"outputs": {"said": [f"a {index}"], "index": [index]}} for index in range(2)]
    entries = [
        {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]},
        {"name": "n", "datatype": "INT32", "shape": [1], "data": [3]},
    ]
    parts = {"inputs": entries, "parameters": {"fails_at": 1}}
    first, last = events(invoke(served, "counts", parts, Accept="text/event-stream").body)
    assert first["outputs"][0]["data"] == ["a 0"]
    assert "error" in last
    whole = invoke(served, "counts", {"inputs": {"text": ["a"], "n": [1]}})
    assert whole.json() == {"outputs": {"said": ["a 0"], "index": [0]}}
    for count in (0, 2):
        answer = invoke(served, "counts", {"inputs": {"text": ["a"], "n": [count]}})
        assert (answer.status, "text/event-stream" in answer.error) == (400, True)


def test_an_answer_that_is_whole_is_one_event(served: Served) -> None:
    answer = invoke(served, "echo", {"instances": [ROW]}, Accept="text/event-stream")
    assert events(answer.body) == [{"predictions": [ROW]}]
    binary = v2("INPUT0", np.array([ROW]), parameters={"binary_data_output": True})
    assert invoke(served, "echo", binary, Accept="text/event-stream").status == 400


# KServe v1


def test_models_are_listed_and_described_as_kserve_and_tf_serving_do(served: Served) -> None:
    assert "echo" in ask(served, "GET", "/v1/models").json()["models"]
    found = ask(served, "GET", "/v1/models/pair").json()
    assert (found["name"], found["ready"]) == ("pair", True)
    assert [(row["version"], row["state"]) for row in found["model_version_status"]] == [("2", "AVAILABLE"), ("1", "AVAILABLE")]
    assert ask(served, "GET", "/v1/models/pair/versions/2").json()["model_version_status"][0]["version"] == "2"
    assert ask(served, "GET", "/v1/models/later").json()["ready"] is False
    for path in ("/v1/models/none", "/v1/models/pair/versions/9"):
        assert ask(served, "GET", path).status == 404


@pytest.mark.parametrize("verb", ["explain", "classify", "regress"])
def test_other_verbs_of_v1_are_told_to_be_none_of_ours(served: Served, verb: str) -> None:
    for at in ("/v1/models/echo", "/v1/models/pair/versions/2"):
        answer = ask(served, "POST", f"{at}:{verb}", {"instances": [ROW]})
        assert (answer.status, answer.error) == (501, f"':{verb}' is not supported, expected ':predict'")
    assert ask(served, "GET", f"/v1/models/echo:{verb}").status == 404


def test_a_version_is_predicted_with(served: Served) -> None:
    body = {"inputs": {"A": [[1, 2]], "B": [3]}}
    assert ask(served, "POST", "/v1/models/pair/versions/2:predict", body).status == 200
    assert ask(served, "POST", "/v1/models/pair/versions/9:predict", body).status == 404
    assert ask(served, "POST", "/v1/models/echo:predict", v2("INPUT0", np.array([ROW]))).status == 400  # which is v2
