"""curl at both ports, by every version of HTTP that it speaks."""

import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.served.gateway_process import Served

pytestmark = [pytest.mark.slow, pytest.mark.debian("curl")]

INFER = "/v2/models/echo/infer"
QUESTION = '{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,4],"data":[1,2,3,4]}]}'
ANSWER = '"data":[1.0,2.0,3.0,4.0]'


class Said(NamedTuple):
    """status: of HTTP, 0 for none; several, of several answers. text: heads and bodies as they came. code: of curl itself."""

    status: list[int]
    text: str
    code: int


def curl(address: str, path: str, *options: str | Path) -> Said:
    command = ["curl", "-sSi", "--max-time", "20", "-w", r"\n%{http_code}|\n", *options, f"http://{address}{path}"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=False)
    status = [int(line[:-1]) for line in done.stdout.splitlines() if line.endswith("|") and line[:-1].isdigit()]
    return Said(status, done.stdout + done.stderr, done.returncode)


@pytest.mark.parametrize(
    "options",
    [
        ("--http1.0",),
        ("--http1.0", "-H", "Connection: keep-alive"),
        ("--http1.1",),
        ("--http2",),  # an Upgrade to h2c, which is passed over
        ("--http0.9",),
        ("-H", "Expect: 100-continue", "--expect100-timeout", "15"),
        ("-H", "Transfer-Encoding: chunked"),
        ("-H", "Transfer-Encoding: chunked", "-H", "Expect: 100-continue", "--expect100-timeout", "15"),
        ("--compressed",),
        ("--tr-encoding",),
        ("--path-as-is",),
        ("-H", "X-Empty;"),
        ("-H", "X-Long: " + "x" * 20_000),
        ("-H", "Range: bytes=0-3"),
        ("-H", "If-None-Match: *"),
        ("-H", "Accept: text/html"),
        ("-H", "Accept;"),
        ("-H", "Content-Type: text/plain; charset=utf-8"),
        ("-H", "Content-Type:"),
        ("-H", "TE: trailers"),
        ("-H", "Connection: close"),
        ("-H", "Cookie: a=b; c=d", "-H", "Authorization: Bearer x", "-H", "X-Forwarded-For: 1.2.3.4"),
        ("--limit-rate", "2k"),
        ("--no-keepalive",),
    ],
    ids=" ".join,
)
def test_an_inference_over_rest(gateway: Served, options: tuple[str, ...]) -> None:
    said = curl(gateway.http, INFER, *options, "-d", QUESTION)
    assert said.status == [200], said.text
    assert ANSWER in said.text


def test_long_bodies_of_every_kind(gateway: Served, tmp_path: Path) -> None:
    count = 100_000  # of numbers: 200 kB, and the answer 400 kB
    body = tmp_path / "body.json"
    data = ",".join(["7"] * count)
    body.write_text(f'{{"inputs":[{{"name":"INPUT0","datatype":"FP32","shape":[1,{count}],"data":[{data}]}}]}}')
    for options in ((), ("--http1.0",), ("-H", "Transfer-Encoding: chunked"), ("--compressed",), ("-H", "Expect:")):
        said = curl(gateway.http, INFER, *options, "--data-binary", f"@{body}")
        assert said.status == [200], said.text[:1000]
        assert said.text.count("7.0") == count


def test_several_requests_on_one_connection(gateway: Served) -> None:
    url = f"http://{gateway.http}{INFER}"
    said = curl(gateway.http, INFER, "-v", "-d", QUESTION, url, url, url)
    assert said.status == [200] * 4
    assert said.text.count("Re-using existing connection") == 3


def test_requests_in_parallel(gateway: Served) -> None:
    url = f"http://{gateway.http}{INFER}"
    said = curl(gateway.http, INFER, "--parallel", "-d", QUESTION, *[url] * 19)
    assert said.status == [200] * 20


@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        (("-X", "OPTIONS", "--request-target", "*"), 200, "Allow"),
        (("-X", "OPTIONS"), 405, "Allow"),
        (("-I",), 405, "Allow"),
        (("-T", "/dev/null"), 405, "Allow"),
        (("-X", "CONNECT"), 501, "CONNECT"),
        (("-X", "BREW"), 400, "malformed HTTP request"),
        (("-d", "{"), 400, "error"),
        (("-d", QUESTION, "-H", "Host:"), 400, "Host"),
        (("-d", QUESTION, "-H", "Host;"), 200, ANSWER),
        (("-d", QUESTION, "-H", "Expect: more"), 417, "100-continue"),
        (("-d", QUESTION, "-H", "Transfer-Encoding: gzip, chunked"), 501, "Transfer-Encoding"),
        (("-d", QUESTION, "-H", "Content-Encoding: br"), 501, "Accept-Encoding"),
        (("-d", QUESTION, "-H", "Content-Length: 1000000000"), 413, "server.limits.body_bytes"),
        (("-d", QUESTION, "-H", "Content-Length: -1"), 400, "malformed HTTP request"),
        (("-d", QUESTION, "-H", "X: " + "x" * 40_000), 431, "server.limits.header_bytes"),
        (("-d", QUESTION, *(word for i in range(150) for word in ("-H", f"X-{i}: 1"))), 431, "server.limits.header_count"),
    ],
)
def test_what_rest_refuses_is_said(gateway: Served, options: tuple[str, ...], status: int, text: str) -> None:
    said = curl(gateway.http, INFER, *options)
    assert said.status == [status], said.text
    assert text in said.text


def test_http2_with_prior_knowledge_at_the_port_of_rest_ends_at_once(gateway: Served) -> None:
    said = curl(gateway.http, "/v2", "--http2-prior-knowledge")
    assert said.code in (16, 52, 56), said.text  # it makes nothing of HTTP/1.1


# The port of gRPC


@pytest.fixture(scope="module")
def message(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, 4])
    raw = np.full((1, 4), 7, np.float32).tobytes()
    data = pb.ModelInferRequest(model_name="echo", inputs=[tensor], raw_input_contents=[raw]).SerializeToString()
    path = tmp_path_factory.mktemp("curl") / "message"
    path.write_bytes(b"\0" + len(data).to_bytes(4) + data)
    return path


GRPC = ("--http2-prior-knowledge", "-H", "content-type: application/grpc", "-H", "te: trailers")
PATH = "/inference.GRPCInferenceService/"


def test_an_inference_over_grpc(gateway: Served, message: Path) -> None:
    said = curl(gateway.grpc, PATH + "ModelInfer", *GRPC, "--data-binary", f"@{message}")
    assert said.status == [200], said.text
    assert "grpc-status: 0" in said.text
    assert "OUTPUT0" in said.text


@pytest.mark.parametrize(
    ("path", "options", "status", "text"),
    [
        ("ModelInfer", ("--http2-prior-knowledge",), 415, "a POST of application/grpc"),
        ("ModelInfer", ("--http2-prior-knowledge", "-X", "POST"), 415, "a POST of application/grpc"),
        ("ModelInfer", ("--http2-prior-knowledge", "-I"), 415, "text/plain"),
        ("ModelInfer", (*GRPC, "-d", QUESTION), 200, "grpc-status: 3"),
        ("Nothing", (*GRPC, "-X", "POST"), 200, "grpc-status: 12"),
        ("ModelInfer", (*GRPC, "-X", "POST", "-H", "X: " + "x" * 40_000), 200, "server.limits.header_bytes"),
        ("ModelInfer", ("--http1.1", "-d", QUESTION), 400, "gRPC"),
        ("ModelInfer", ("--http1.0",), 400, "gRPC"),
        ("ModelInfer", ("--http2",), 400, "gRPC"),
    ],
)
def test_what_is_no_call_is_told(gateway: Served, path: str, options: tuple[str, ...], status: int, text: str) -> None:
    said = curl(gateway.grpc, PATH + path, *options)
    assert said.status == [status], said.text
    assert text in said.text
