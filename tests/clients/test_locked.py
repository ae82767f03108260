"""A gateway that speaks TLS and asks for keys, and clients of all kinds before it."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

from gateway.access.rules import digest_of
from tests.certificates import Authority
from tests.served.gateway_process import Served, served

pytestmark = pytest.mark.slow

MODELS = """
models:
  - name: echo
    inputs: [{name: INPUT0, datatype: FP32, shape: [-1, 4]}]
    outputs: [{name: OUTPUT0, datatype: FP32, shape: [-1, 4]}]
    backends: [{kind: synthetic, fixed_ms: 0, row_ms: 0}]
  - name: other
    inputs: [{name: INPUT0, datatype: FP32, shape: [-1, 4]}]
    outputs: [{name: OUTPUT0, datatype: FP32, shape: [-1, 4]}]
    backends: [{kind: synthetic, fixed_ms: 0, row_ms: 0}]
"""
KEYS = f"""
keys:
- {{name: mine, hash: 'sha256:{digest_of(b"mine").hex()}', models: [echo]}}
- {{name: old, hash: 'sha256:{digest_of(b"old").hex()}', expires: 2020-01-31}}
- {{name: watcher, hash: 'sha256:{digest_of(b"w4tch").hex()}', scopes: [infer, status]}}
- {{name: few, hash: 'sha256:{digest_of(b"few").hex()}', requests_per_s: 0.001, burst: 2}}
"""
QUESTION = '{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,4],"data":[1,2,3,4]}]}'
BEARER = {"authorization": "Bearer mine"}


class Locked(NamedTuple):
    """folder: of `keys.yaml`."""

    gateway: Served
    authority: Authority
    folder: Path


def locked(folder: Path, **tls: str) -> Iterator[Locked]:
    authority = Authority(folder)
    certificate, key = authority.issue("server")
    section = {"certificate": str(certificate), "key": str(key), **tls}
    (folder / "keys.yaml").write_text(KEYS)
    server = {"tls": section, "access": {"keys": "keys.yaml"}, "limits": {"body_bytes": 1 << 20}}
    config = folder / "gateway.yaml"
    config.write_text(f"server: {json.dumps(server)}\n{MODELS}")
    with served(config, "--no-ray") as gateway:
        yield Locked(gateway, authority, folder)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    yield from locked(tmp_path_factory.mktemp("locked"))


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    folder = tmp_path_factory.mktemp("mutual")
    yield from locked(folder, client_ca=str(folder / "ca.pem"))


@pytest.mark.parametrize("host", ["", "gateway.internal", "*.example.internal"])
def test_the_command_that_is_printed_at_start_is_answered(tmp_path: Path, host: str) -> None:
    """With what is one's own where it says so."""
    authority = Authority(tmp_path)
    certificate, key = authority.issue("server", host=host)
    shown, its_key = authority.issue("me", client=True)
    (tmp_path / "keys.yaml").write_text(KEYS)
    tls = {"certificate": str(certificate), "key": str(key), "client_ca": str(authority.path)}
    config = tmp_path / "gateway.yaml"
    config.write_text(f"server: {json.dumps({'tls': tls, 'access': {'keys': 'keys.yaml'}})}\n{MODELS}")
    with served(config, "--no-ray") as gateway:
        assert gateway.process.stdout is not None
        *_, told, command = (gateway.process.stdout.readline() for _ in range(4))
        assert told == "try it, with a client's certificate, an API key of your own:\n"
        for ours, mine in (("--cert CERTIFICATE", f"--cert {shown}"), ("ITS_KEY", str(its_key)), ("Key: KEY", "Key: mine")):
            assert ours in command
            command = command.replace(ours, mine)
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
        assert "outputs" in json.loads(done.stdout or "{}"), (command, done)


class Said(NamedTuple):
    code: int
    status: int
    text: str


def curl(there: Locked, path: str, *options: str | Path, authority: Authority | None = None) -> Said:
    command = ["curl", "-sSi", "--max-time", "20", "-w", r"\n%{http_code}", "--cacert", (authority or there.authority).path]
    done = subprocess.run(
        [*command, *options, f"https://{there.gateway.http}{path}"], capture_output=True, text=True, timeout=60, check=False
    )
    return Said(done.returncode, int(done.stdout.splitlines()[-1]), done.stdout + done.stderr)


INFER = "/v2/models/echo/infer"


@pytest.mark.debian("curl")
@pytest.mark.parametrize("options", [(), ("--http2",), ("--http1.0",), ("--tlsv1.3",), ("--tls-max", "1.2")], ids=" ".join)
def test_curl_is_answered(here: Locked, options: tuple[str, ...]) -> None:
    said = curl(here, INFER, "-H", "Authorization: Bearer mine", "-d", QUESTION, *options)
    assert (said.code, said.status) == (0, 200), said.text
    assert '"data":[1.0,2.0,3.0,4.0]' in said.text
    assert curl(here, "/ping", *options).status == 200


@pytest.mark.debian("curl")
@pytest.mark.parametrize(
    ("path", "options", "status", "words"),
    [
        (INFER, (), 401, "a key is asked for"),
        (INFER, ("-H", "X-Api-Key: nobody"), 401, "none that is known here"),
        (INFER, ("-H", "X-Api-Key: old"), 401, "expired at 2020-01-31T00:00:00Z"),
        ("/v2/models/other/infer", ("-H", "X-Api-Key: mine"), 403, "the key 'mine' is not for model 'other'"),
        ("/metrics", ("-H", "X-Api-Key: mine"), 403, "expected one for metrics"),
    ],
)
def test_curl_is_refused_in_one_sentence(here: Locked, path: str, options: tuple[str, ...], status: int, words: str) -> None:
    said = curl(here, path, *options, *(("-d", QUESTION) if path != "/metrics" else ()))
    assert (said.code, said.status) == (0, status), said.text
    assert words in said.text


@pytest.mark.debian("curl")
def test_a_limit_and_a_body_that_is_too_long_are_refused(here: Locked) -> None:
    said = [curl(here, INFER, "-H", "X-Api-Key: few", "-d", QUESTION) for _ in range(3)]
    assert [each.status for each in said] == [200, 200, 429], said
    assert "Retry-After: " in said[2].text
    (here.folder / "long").write_bytes(bytes(2 << 20))
    long = curl(here, INFER, "-H", "X-Api-Key: mine", "-H", "Expect:", "--data-binary", f"@{here.folder / 'long'}")
    assert long.status == 413, long.text
    assert "server.limits.body_bytes" in long.text


@pytest.mark.debian("curl")
def test_curl_does_not_trust_another_authority(here: Locked, tmp_path: Path) -> None:
    assert curl(here, "/ping", authority=Authority(tmp_path, "another")).code == 60


@pytest.mark.debian("curl")
def test_mutual_tls_wants_a_certificate_of_its_authority(mutual: Locked, tmp_path: Path) -> None:
    certificate, key = mutual.authority.issue("client", client=True)
    assert curl(mutual, "/ping", "--cert", certificate, "--key", key).status == 200
    certificate, key = Authority(tmp_path).issue("client", client=True)
    for options in ((), ("--cert", certificate, "--key", key)):
        assert curl(mutual, "/ping", *options).code != 0


@pytest.mark.debian("nodejs")
def test_node_is_answered(here: Locked) -> None:
    script = """
    const https = require("https"), http2 = require("http2"), fs = require("fs");
    const [url, grpc, ca, body] = process.argv.slice(1);
    const options = {method: "POST", ca: fs.readFileSync(ca), headers: {Authorization: "Bearer mine"}};
    https.request(url, options, answer => {
      answer.on("data", text => console.log(answer.statusCode, String(text)));
      const session = http2.connect(grpc, {ca: options.ca});
      const call = session.request({":method": "POST", ":path": "/inference.GRPCInferenceService/ServerLive",
        "content-type": "application/grpc", te: "trailers"});
      call.on("trailers", told => { console.log("grpc", told["grpc-status"]); session.close(); });
      call.resume(); call.end(Buffer.alloc(5));
    }).end(body);
    """
    command = ["node", "-e", script, f"https://{here.gateway.http}{INFER}", f"https://{here.gateway.grpc}"]
    done = subprocess.run([*command, here.authority.path, QUESTION], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("200 "), done.stdout + done.stderr
    assert "grpc 0" in done.stdout, done.stdout + done.stderr


def asked(module: Any) -> list[Any]:
    tensor = module.InferInput("INPUT0", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
    return [tensor]


def test_tritonclient_over_rest(here: Locked) -> None:
    with tritonclient.http.InferenceServerClient(
        here.gateway.http, ssl=True, ssl_options={"ca_certs": str(here.authority.path)}, insecure=False
    ) as client:
        assert client.is_server_live()
        answer = client.infer("echo", asked(tritonclient.http), headers=dict(BEARER))
        assert answer.as_numpy("OUTPUT0").tolist() == [[1, 1, 1, 1]]
        for headers, words in (({}, "401"), ({"x-api-key": "old"}, "expired"), (BEARER, "not for model 'other'")):
            with pytest.raises(InferenceServerException, match=words):
                client.infer("other", asked(tritonclient.http), headers=dict(headers))


def test_tritonclient_over_grpc(here: Locked) -> None:
    with tritonclient.grpc.InferenceServerClient(
        here.gateway.grpc, ssl=True, root_certificates=str(here.authority.path)
    ) as client:
        assert client.is_server_live()
        answer = client.infer("echo", asked(tritonclient.grpc), headers=dict(BEARER))
        assert answer.as_numpy("OUTPUT0").tolist() == [[1, 1, 1, 1]]
        for headers, status in (({}, "UNAUTHENTICATED"), ({"x-api-key": "old"}, "UNAUTHENTICATED"), (BEARER, "PERMISSION")):
            with pytest.raises(InferenceServerException) as refused:
                client.infer("other", asked(tritonclient.grpc), headers=dict(headers))
            assert status in str(refused.value.status())


def test_grpc_with_mutual_tls_and_credentials_of_a_call(mutual: Locked) -> None:
    certificate, key = mutual.authority.issue("grpc-client", client=True)
    channel_credentials = grpc.ssl_channel_credentials(
        mutual.authority.path.read_bytes(), key.read_bytes(), certificate.read_bytes()
    )
    credentials = grpc.composite_channel_credentials(channel_credentials, grpc.access_token_call_credentials("mine"))
    tensor = pb.ModelInferRequest.InferInputTensor(name="INPUT0", datatype="FP32", shape=[1, 4])
    request = pb.ModelInferRequest(model_name="echo", inputs=[tensor], raw_input_contents=[bytes(16)])
    with grpc.secure_channel(mutual.gateway.grpc, credentials) as channel:
        infer = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        assert infer(request, timeout=10).raw_output_contents == [bytes(16)]


@pytest.mark.debian("curl")
def test_a_key_that_is_taken_back_is_none_any_more(here: Locked) -> None:
    path = here.folder / "keys.yaml"
    path.write_text(KEYS.replace("name: old", "name: new").replace(", expires: 2020-01-31", ""))
    try:
        for _ in range(100):  # the file is looked at once a second
            if (said := curl(here, INFER, "-H", "X-Api-Key: old", "-d", QUESTION)).status == 200:
                break
        assert said.status == 200, said.text
    finally:
        path.write_text(KEYS)
