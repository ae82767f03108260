"""`gateway predict`, as a user types it."""

import contextlib
import io
import json
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from gateway.commands.predict import ask, lines_over_the_wire, over_the_wire, read_input
from gateway.process.credentials import Credentials
from tests.rest_routes.serving import Served, serving
from tests.router.test_explain import answering, answering_grpc

CONFIG = """
models:
  - name: double
    max_rows: 8
    backends: [{{kind: python, model: "{file}:Double"}}]
  - name: words
    max_rows: 1
    backends: [{{kind: python, model: "{file}:words"}}]
  - name: halves
    max_rows: 8
    backends: [{{kind: python, model: "{file}:Halves"}}]
"""
DOUBLE = """
class Double:
    inputs = [("x", "FP32", (-1, 2)), ("flag", "BOOL", (-1, 1), True)]
    outputs = [("y", "FP32", (-1, 2))]

    def predict(self, inputs):
        if inputs["x"][0, 0] == 3:
            raise ValueError("no threes")
        return {"y": inputs["x"] * 2.0}


from collections.abc import Iterator

import ml_dtypes
import numpy as np

class Halves:
    inputs = [("x", "FP32", (-1, 2))]
    outputs = [("y", "FP16", (-1, 2)), ("b", "BF16", (-1, 1)), ("f", "FP32", (-1, 1)), ("t", "BYTES", (-1, 1))]

    def predict(self, inputs):
        x = inputs["x"]
        texts = np.array([[b"\\xff" if row[0] > 1 else b"low"] for row in x], object)
        return {"y": np.float16(x / 10), "b": x[:, :1].astype(ml_dtypes.bfloat16), "f": x[:, :1] / 3, "t": texts}


def words(text: str) -> Iterator[str]:
    for word in text.split():
        if word == "three":
            raise ValueError("no threes")
        yield word
"""


def configured(folder: Path) -> str:
    """The text of a configuration, whose model is written into the folder."""
    (folder / "model.py").write_text(DOUBLE)
    return CONFIG.format(file=folder / "model.py")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(configured(tmp_path))
    return tmp_path / "config.yaml"


def predict(capsys: pytest.CaptureFixture[str], where: object, model: str, given: Path, *options: str) -> tuple[int, str, str]:
    code = main(["predict", str(where), model, "--input", str(given), *options])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def outputs(answer: str) -> list[Any]:
    return [(output["name"], output["shape"], output["data"]) for output in json.loads(answer)["outputs"]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("predict")
    with serving(folder, configured(folder)) as running:
        yield running


PLAIN = '{"x": [[1, 2], [4, 5]]}'
WHOLE = '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 4, 5]}]}'


@pytest.mark.parametrize("text", [PLAIN, WHOLE])
def test_a_configurations_model_answers(text: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.json").write_text(text)
    code, out, _ = predict(capsys, config, "double", tmp_path / "in.json")
    assert (code, outputs(out)) == (0, [("y", [2, 2], [2, 4, 8, 10])])


def test_a_byte_order_mark_is_no_part_of_a_request(tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text(PLAIN, encoding="utf-8-sig")
    assert read_input(str(tmp_path / "in.json")) == json.loads(PLAIN)


def test_nan_goes_in_and_comes_out(served: Served, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = '{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [NaN, -Infinity]}]}'
    for text in ('{"x": [[NaN, -Infinity]]}', whole):
        (tmp_path / "in.json").write_text(text)
        for where in (config, served.url):
            code, out, err = predict(capsys, where, "double", tmp_path / "in.json")
            assert (code, out.count("[NaN,-Infinity]")) == (0, 1), out + err


HALVES = [("y", [1, 2], [0.1, 0.2]), ("b", [1, 1], [1.0]), ("f", [1, 1], [0.33333334]), ("t", [1, 1], ["low"])]


def test_what_json_does_not_hold_is_asked_for_as_bytes_and_shown_as_numbers(
    served: Served, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.json").write_text('{"x": [[1, 2]]}')
    for where in (config, served.url):
        code, out, err = predict(capsys, where, "halves", tmp_path / "in.json")
        assert code == 0, err
        assert outputs(out) == HALVES
        assert "parameters" not in out


def test_an_answer_that_was_asked_for_as_bytes_is_shown_as_json(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for first, text in ((1, "low"), (2, {"b64": "/w=="})):  # which is no UTF-8
        x = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [first, 2]}
        (tmp_path / "in.json").write_text(json.dumps({"inputs": [x], "parameters": {"binary_data_output": True}}))
        code, out, err = predict(capsys, served.url, "halves", tmp_path / "in.json")
        assert code == 0, err
        assert (outputs(out)[3], first == 2 or outputs(out) == HALVES) == (("t", [1, 1], [text]), True)


def test_a_models_file_answers_as_its_configuration_does(tmp_path: Path) -> None:
    (tmp_path / "area.py").write_text("def predict(width: float) -> float:\n    return width * 2\n")
    (tmp_path / "in.json").write_text('{"width": [2.0]}')
    with contextlib.redirect_stdout(io.StringIO()) as out:  # which takes no bytes, as where it is called from Python
        code = main(["predict", str(tmp_path / "area.py"), "area", "--input", str(tmp_path / "in.json")])
    assert (code, outputs(out.getvalue())) == (0, [("output", [1], [4.0])])


def test_an_address_without_a_port_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.json").write_text(PLAIN)
    for where in ("localhost", "127.0.0.1"):
        code, _, err = predict(capsys, where, "double", tmp_path / "in.json")
        assert (code, f"{where}: no port: write {where}:8000" in err) == (2, True), err


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_a_server_answers_what_comes_from_standard_input(
    scheme: str, served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PLAIN.encode())))
    code = main(["predict", f"{scheme}{served.url}", "double", "--input", "-"])
    assert (code, outputs(capsys.readouterr().out)) == (0, [("y", [2, 2], [2, 4, 8, 10])])


@pytest.mark.parametrize(
    ("model", "text", "words"),
    [
        ("double", '{"z": [[1, 2]]}', "unexpected inference input 'z' for model 'double'; its inputs: 'x', 'flag'"),
        ("double", '{"x": [[1, 2, 3]]}', "input 'x' of model 'double': expected FP32 [-1, 2], got FP32 [1, 3]"),
        ("double", "{}", "missing 'x'; the smallest request: "),
        ("double", '{"x": [[3, 3]]}', "double:1/python: ValueError: no threes"),
        ("doubel", PLAIN, "did you mean 'double'? models here: 'double'"),
    ],
)
def test_the_same_mistakes_are_told_here_and_by_a_server(
    model: str, text: str, words: str, served: Served, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.json").write_text(text)
    for where in (config, served.url):
        code, out, err = predict(capsys, where, model, tmp_path / "in.json")
        failed = 2 if where is config and model == "doubel" else 1  # the command names what the configuration lacks
        assert (code, out, words in err) == (failed, "", True), (where, err)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "got a list, expected an object"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        (None, "No such file or directory"),
    ],
)
def test_an_input_that_is_none_is_told(
    text: str | None, words: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "in.json").write_text(text)
    code, _, err = predict(capsys, config, "double", tmp_path / "in.json")
    assert (code, words in err) == (2, True), err


def test_a_server_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.json").write_text(PLAIN)
    code, _, err = predict(capsys, "127.0.0.1:1", "double", tmp_path / "in.json")
    assert code == 1
    assert err == (
        "gateway: http://127.0.0.1:1: no gateway answers (Connection refused): start one, `gateway serve CONFIG`, or name the "
        "address of one that runs\n"
    )


@pytest.mark.parametrize(
    ("status", "body"), [(200, b"<html>"), (200, b"{}"), (200, b"[]"), (200, b'{"inputs": [{}]}'), (500, b"<html>")]
)
def test_what_is_no_server_of_the_protocol_is_told_with_its_address(
    status: int, body: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.json").write_text(PLAIN)
    with answering(status, body) as answers:
        code, _, err = predict(capsys, f"127.0.0.1:{answers.port}", "double", tmp_path / "in.json")
    assert (code, status == 200 or err.endswith(": '<html>'\n")) == (1, True), err
    assert "/v2/models/double: " in err
    assert "no answer of the Open Inference Protocol v2" in err


def test_the_port_of_grpc_and_an_address_that_is_none_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.json").write_text(PLAIN)
    with answering_grpc() as port:
        code, _, err = predict(capsys, f"127.0.0.1:{port}", "double", tmp_path / "in.json")
    assert (code, f"http://127.0.0.1:{port}: no answer in HTTP: name" in err) == (1, True), err
    assert "8001 is gRPC" in err
    for url, words in (("http://127.0.0.1:abc", "nonnumeric port: 'abc'"), ("http://[::1", "Invalid IPv6 URL")):
        code, _, err = predict(capsys, url, "double", tmp_path / "in.json")
        assert (code, f"{url}: no gateway answers ({words})" in err) == (1, True), err


@pytest.mark.parametrize("over_the_wire", [False, True])
def test_an_answer_in_parts_is_a_line_for_each(
    over_the_wire: bool, served: Served, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = f"localhost:{served.port}" if over_the_wire else config
    (tmp_path / "in.json").write_text('{"text": ["one by one"]}')
    code, out, _ = predict(capsys, where, "words", tmp_path / "in.json")
    assert (code, [json.loads(line)["output"] for line in out.splitlines()]) == (0, ["one", "by", "one"])
    (tmp_path / "in.json").write_text('{"text": ["one two three"]}')
    code, out, err = predict(capsys, where, "words", tmp_path / "in.json")
    assert (code, len(out.splitlines())) == (1, 2)
    assert "ValueError: no threes" in err


def test_a_server_is_told_what_a_body_is(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """KServe's, and MLServer, refuse one that is called a form, as urllib calls it."""
    told: list[tuple[str, str | None]] = []
    opened = Credentials.opened

    def noted(shown: Credentials, url: str, **asked: Any) -> Any:
        told.append((url.rpartition("/")[2], asked["headers"].get("Content-Type")))
        return opened(shown, url, **asked)

    monkeypatch.setattr(Credentials, "opened", noted)
    url = f"http://{served.url}"
    list(ask(partial(over_the_wire, url), partial(lines_over_the_wire, url), "words", "", {"text": ["one"]}))
    for headers in ({}, {"Inference-Header-Content-Length": str(len(WHOLE))}):
        over_the_wire(url, "/v2/models/double/infer", WHOLE.encode(), headers)
    json_body, binary = "application/json", "application/octet-stream"
    assert told == [
        ("words", None), ("config", None), ("generate_stream", json_body), ("infer", json_body), ("infer", binary),
    ]  # fmt: skip


def test_an_answer_in_parts_that_is_cut_off_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As where its server is killed: the last chunk does not come."""
    about = {"inputs": [], "model_transaction_policy": {"decoupled": True}}
    part = b'data: {"model_name":"words","output":"one"}\n\n'

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(json.dumps(about))))
            self.end_headers()
            self.wfile.write(json.dumps(about).encode())
            self.close_connection = True

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            self.close_connection = True

        def log_message(self, *args: object) -> None: ...

    (tmp_path / "in.json").write_text("{}")
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        code, out, err = predict(capsys, f"127.0.0.1:{server.server_address[1]}", "words", tmp_path / "in.json")
        server.shutdown()
        thread.join()
    assert (code, [json.loads(line)["output"] for line in out.splitlines()]) == (1, ["one"])
    assert "/v2/models/words/generate_stream: the answer broke off" in err


def test_a_request_as_it_stands_of_a_model_that_answers_in_parts_is_told_where_to_go(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}
    (tmp_path / "in.json").write_text(json.dumps(asked))
    code, _, err = predict(capsys, f"localhost:{served.port}", "words", tmp_path / "in.json")
    assert code == 1
    assert "generate_stream" in err
