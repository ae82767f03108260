"""SageMaker's multi-model API over the wire, with `gateway sagemaker` run as its multi-model endpoints start a container."""

import contextlib
import http.client
import json
import re
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import psutil
import pytest
import yaml
from openapi_spec_validator import OpenAPIV31SpecValidator

from gateway.access.rules import digest_of
from tests.backends.sagemaker_cases import write_package
from tests.containers.test_sagemaker import CODE, KILLED_S, MODEL, Container, container
from tests.waiting import until

LINEAR = Path(__file__).parent.parent.parent / "models" / "linear.onnx"
ROW = json.dumps({"instances": [list(range(16))]})
ECHO = """
import json, os

def model_fn(model_dir):
    return os.getpid()

def predict_fn(data, model):
    return data

def input_fn(body, content_type):
    return json.loads(body)

def output_fn(prediction, accept):
    return json.dumps(prediction)
"""
WAITS = """
import os, pathlib, time

def wait(folder, what):
    (folder / f"{what}-begun").touch()
    while not (folder / f"{what}-go").exists():
        time.sleep(0.005)

def model_fn(model_dir):
    folder = pathlib.Path(model_dir)
    wait(folder, "load")
    return folder

def transform_fn(model, body, content_type, accept):
    wait(model, "run")
    return body, content_type
"""
LONG_NAME = "0123456789abcdef" * 4
TIMEOUT_S = 30.0


@contextlib.contextmanager
def multi_model(tmp_path: Path, **settings: Any) -> Iterator[Container]:
    """settings: of its gateway.yaml, beside the root of the models."""
    settings.setdefault("multi_model", {})["root"] = str(tmp_path / "models")
    (tmp_path / "gateway.yaml").write_text(yaml.safe_dump(settings))
    with container(tmp_path, SAGEMAKER_MULTI_MODEL="true") as running:
        yield running


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """A container for the tests that neither end it nor set anything."""
    folder = tmp_path_factory.mktemp("container")
    settings = {"multi_model": {"root": str(tmp_path_factory.getbasetemp())}}  # in which each test's own folder is
    (folder / "gateway.yaml").write_text(yaml.safe_dump(settings))
    with container(folder, SAGEMAKER_MULTI_MODEL="true") as running:
        yield running


@pytest.fixture
def running(shared: Container) -> Iterator[Container]:
    """The shared one, with no model in it before and after."""
    yield shared
    while models := json.loads(shared.ask("GET", "/models")[1])["models"]:
        for model in models:
            assert shared.ask("DELETE", f"/models/{quote(model['modelName'])}")[0] == 200


def unpacked(tmp_path: Path, name: str, *, inference: str = "", **files: str) -> Path:
    """The folder of a model, as SageMaker has it: of linear.onnx, if nothing is said. files: by name, with `_` for the dot."""
    folder = tmp_path / "models" / name / "model"
    folder.mkdir(parents=True)
    if inference:
        (folder / "code").mkdir()
        (folder / "code" / "inference.py").write_text(inference)
    for file, text in files.items():
        (folder / file.replace("_", ".")).write_text(text)
    if not inference and not files:
        shutil.copy(LINEAR, folder)
    return folder


def load(running: Container, name: str, folder: Path | str, **headers: str) -> tuple[int, bytes]:
    return running.ask("POST", "/models", json.dumps({"model_name": name, "url": str(folder)}), **headers)


def invoke(running: Container, name: str, body: str = ROW, **headers: str) -> tuple[int, bytes]:
    return running.ask("POST", f"/models/{name}/invoke", body, Content_Type="application/json", **headers)


@pytest.mark.slow
def test_models_are_loaded_told_invoked_and_unloaded(running: Container, tmp_path: Path) -> None:
    linear, echo = unpacked(tmp_path, "linear"), unpacked(tmp_path, "echo", inference=ECHO)
    assert running.ask("GET", "/ping") == (200, b"")
    assert running.ask("GET", "/models") == (200, b'{"models":[]}')
    assert invoke(running, "none")[0] == 404
    assert running.ask("POST", "/invocations", ROW)[0] == 404

    assert load(running, LONG_NAME, linear, X_Amzn_SageMaker_Target_Model="a/linear.tar.gz") == (200, b"")
    assert load(running, "echo", echo) == (200, b"")
    assert load(running, "echo", echo) == (409, b'{"error":"model \'echo\' is loaded already"}')
    listed = [{"modelName": LONG_NAME, "modelUrl": str(linear)}, {"modelName": "echo", "modelUrl": str(echo)}]
    status, body = running.ask("GET", "/models")
    assert (status, json.loads(body)) == (200, {"models": listed})
    status, body = running.ask("GET", "/models/echo")
    assert (status, json.loads(body)) == (200, listed[1])

    status, body = invoke(running, LONG_NAME)
    assert (status, np.shape(json.loads(body)["predictions"])) == (200, (1, 4))
    # The header tells what the client called it, for the log: the path names the model.
    assert invoke(running, "echo", "[1]", X_Amzn_SageMaker_Target_Model="a/linear.tar.gz") == (200, b"[1]")
    for target in ("a/linear.tar.gz", LONG_NAME):
        assert running.ask("POST", "/invocations", ROW, X_Amzn_SageMaker_Target_Model=target) == (200, body)
    assert running.ask("POST", "/invocations", "[2]", X_Amzn_SageMaker_Target_Model="echo") == (200, b"[2]")
    status, body = running.ask("POST", "/invocations", ROW, X_Amzn_SageMaker_Target_Model="")
    assert (status, b"which of 2 models" in body) == (400, True)
    assert running.ask("GET", f"/v2/models/{LONG_NAME}/ready")[0] == 200
    assert running.ask("POST", f"/v2/repository/models/{LONG_NAME}/unload")[0] == 501

    api = json.loads(running.ask("GET", "/openapi.json")[1])
    OpenAPIV31SpecValidator(api).validate()
    assert {path: set(api["paths"][path]) for path in api["paths"] if path.startswith("/models")} == {
        "/models": {"get", "post"},
        "/models/{model}": {"get", "delete"},
        "/models/{model}/invoke": {"post"},
    }

    assert running.ask("DELETE", "/models/echo") == (200, b"")
    assert running.ask("DELETE", "/models/echo") == (404, b'{"error":"model \'echo\' is not loaded"}')
    assert running.ask("GET", "/models/echo")[0] == 404
    # Whatever is sent: it is loaded anew then.
    assert running.ask("POST", "/models/echo/invoke", "x", Content_Type="a/b")[0] == 404
    assert load(running, "echo", echo)[0] == 200
    assert running.ask("GET", "/ping")[0] == 200


def not_found(running: Container) -> int:
    told = re.search(
        rb'^gateway_requests_total{code="not_found",model="",.*} (\d+)', running.ask("GET", "/metrics")[1], re.MULTILINE
    )
    return int(told[1]) if told else 0


@pytest.mark.slow
def test_what_asks_for_an_unknown_model_counts_whatever_it_sends(running: Container) -> None:
    before = not_found(running)
    for form in ("application/json", "a/b"):
        assert running.ask("POST", "/models/none/invoke", "{}", Content_Type=form)[0] == 404
    assert not_found(running) - before == 2


@pytest.mark.slow
def test_a_load_that_is_not_asked_well_is_told_so(running: Container, tmp_path: Path) -> None:
    two = yaml.safe_dump({"models": [MODEL, {**MODEL, "name": "other"}]})
    folder = unpacked(tmp_path, "two", gateway_yaml=two)
    for body, said in {
        "": "missing required field `model_name`",
        '{"model_name": "a"}': "missing required field `url`",
        '{"model_name": 1, "url": "/"}': "Expected `str`, got `int` - at `$.model_name`",
        "[": "failed to parse the request JSON",
        json.dumps({"model_name": "a/b", "url": "/"}): "expected 1 to 128 characters",
        json.dumps({"model_name": "a", "url": "/etc"}): "(multi_model.root)",
        json.dumps({"model_name": "a", "url": str(folder)}): "2 models ('echo', 'other'), expected one",
        json.dumps({"model_name": "a", "url": str(folder.parent)}): "no model in this folder",
    }.items():
        status, answer = running.ask("POST", "/models", body)
        assert (status, said in json.loads(answer)["error"]) == (400, True), answer
    assert running.ask("POST", "/models", '{"model_name": "' + "a" * (2 << 20) + '"}')[0] == 413
    assert running.ask("PUT", "/models")[0] == running.ask("POST", "/models/a")[0] == 405
    assert running.ask("GET", "/models") == (200, b'{"models":[]}')


@pytest.mark.slow
def test_all_models_are_listed_page_by_page(running: Container, tmp_path: Path) -> None:
    folder = unpacked(tmp_path, "echo", gateway_yaml=yaml.safe_dump({"models": [{**MODEL, "batching": {"probe_s": 0.001}}]}))
    names = [f"m {index:03}+&" for index in range(105)]
    for name in names:
        assert load(running, name, folder)[0] == 200
    pages, token = [], ""
    while token or not pages:
        status, body = running.ask("GET", "/models" + (f"?next_page_token={token}" if token else ""))
        assert status == 200
        page = json.loads(body)
        pages.append([model["modelName"] for model in page["models"]])
        token = page.get("nextPageToken", "")
    for odd in ("xyz", "m", "ff"):
        status, body = running.ask("GET", f"/models?next_page_token={odd}")
        assert (status, b"expected a nextPageToken of an answer" in body) == (400, True), body
    assert pages == [names[:100], names[100:]]


@pytest.mark.slow
def test_memory_that_does_not_suffice_is_507_until_another_is_unloaded(tmp_path: Path) -> None:
    size = LINEAR.stat().st_size
    folders = {name: unpacked(tmp_path, name) for name in "abc"}
    with multi_model(tmp_path, multi_model={"memory_bytes": 2 * size}) as running:
        assert [load(running, name, folders[name])[0] for name in "ab"] == [200, 200]
        status, body = load(running, "c", folders["c"])
        assert (status, f"of multi_model.memory_bytes {2 * size} the 2 models here leave" in body.decode()) == (507, True)
        assert running.ask("DELETE", "/models/a")[0] == 200
        assert load(running, "c", folders["c"])[0] == 200
        assert invoke(running, "c")[0] == 200


@pytest.mark.slow
def test_what_is_spared_of_the_containers_memory_is_not_given_to_models(tmp_path: Path) -> None:
    folder = unpacked(tmp_path, "a")
    with multi_model(tmp_path, multi_model={"spare_bytes": 1 << 60}) as running:
        status, body = load(running, "a", folder)
        assert (status, b"for requests (multi_model.spare_bytes)" in body) == (507, True), body


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise MemoryError", 507),
        ("import numpy; numpy.ones(1 << 45)", 507),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 507),  # as the kernel does where memory is short
        ("raise ValueError('no such file')", 500),
        ("import os; os._exit(1)", 500),
    ],
)
def test_a_load_that_fails_for_want_of_memory_is_507(running: Container, tmp_path: Path, code: str, status: int) -> None:
    folder = unpacked(tmp_path, "a", inference=f"def model_fn(model_dir):\n    {code}\n")
    for _ in range(2):
        told = load(running, "a", folder)
        assert (told[0], "error" in json.loads(told[1])) == (status, True), told
    assert running.ask("GET", "/models") == (200, b'{"models":[]}')
    assert running.ask("GET", "/ping")[0] == 200


@pytest.mark.slow
def test_other_models_answer_while_one_is_loaded_and_unloaded(running: Container, tmp_path: Path) -> None:
    linear, waits = unpacked(tmp_path, "linear"), unpacked(tmp_path, "waits", inference=WAITS)
    with ThreadPoolExecutor(3) as beside:
        assert load(running, "linear", linear)[0] == 200
        loading = beside.submit(load, running, "waits", waits)
        until((waits / "load-begun").exists)
        assert {invoke(running, "linear")[0] for _ in range(50)} == {200}
        assert running.ask("GET", "/ping")[0] == 200
        status, body = invoke(running, "waits")
        assert (status, b"loading" in body) == (503, True), body
        assert running.ask("GET", "/models/waits")[0] == 404
        assert (load(running, "other", linear)[0], running.ask("DELETE", "/models/other")[0]) == (200, 200)
        (waits / "load-go").touch()
        assert loading.result(TIMEOUT_S) == (200, b"")

        running_one = beside.submit(invoke, running, "waits", "[1]")
        until((waits / "run-begun").exists)
        unloading = beside.submit(running.ask, "DELETE", "/models/waits")
        while running.ask("GET", "/models/waits")[0] != 404:
            assert not unloading.done()
        again = beside.submit(load, running, "waits", waits)  # waits its turn
        assert (load(running, "other", linear)[0], running.ask("DELETE", "/models/other")[0]) == (200, 200)
        assert {invoke(running, "linear")[0] for _ in range(50)} == {200}
        assert [call.done() for call in (running_one, unloading, again)] == [False] * 3
        (waits / "run-go").touch()
        assert running_one.result(TIMEOUT_S) == (200, b"[1]")
        assert unloading.result(TIMEOUT_S) == (200, b"")
        assert again.result(TIMEOUT_S) == (200, b"")


@pytest.mark.slow
def test_loads_unloads_and_invocations_of_one_name_each_end_in_one_answer(running: Container, tmp_path: Path) -> None:
    folder = unpacked(tmp_path, "a")

    def many(turn: int) -> list[int]:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=TIMEOUT_S)
        asked = json.dumps({"model_name": "a", "url": str(folder)})
        calls = [("POST", "/models", asked), ("POST", "/models/a/invoke", ROW), ("DELETE", "/models/a", None)]
        found = []
        with contextlib.closing(connection):
            for index in range(60):
                connection.request(*calls[(index + turn) % 3], {"Content-Type": "application/json"})
                answer = connection.getresponse()
                json.loads(answer.read() or b"{}")
                found.append(answer.status)
        return found

    with ThreadPoolExecutor(6) as clients:
        statuses = [status for found in clients.map(many, range(6)) for status in found]
    assert set(statuses) <= {200, 404, 409, 503}
    assert {200, 404, 409} <= set(statuses)
    load(running, "a", folder)
    assert invoke(running, "a")[0] == 200


def used(process: psutil.Process) -> tuple[int, int, int]:
    return process.num_threads(), process.num_fds(), len(process.children(recursive=True))


@pytest.mark.slow
def test_models_that_come_and_go_leave_nothing_behind(tmp_path: Path) -> None:
    names = [f"{LONG_NAME[:60]}{index:02}" for index in range(22)]
    folders = {name: unpacked(tmp_path, name, **({} if index % 2 else {"inference": ECHO})) for index, name in enumerate(names)}
    with multi_model(tmp_path) as running:
        process = psutil.Process(running.process.pid)
        seen = []
        for name in names:
            assert load(running, name, folders[name])[0] == 200
            assert invoke(running, name)[0] == 200
            assert running.ask("DELETE", f"/models/{name}")[0] == 200
            seen.append((used(process), process.memory_info().rss))
        steady = seen[1]  # what both kinds of model leave the first time: imported modules
        # Threads of sessions end behind the answer.
        until(lambda: not any(map(int.__gt__, used(process), steady[0])), told=lambda: (used(process), steady))
        assert seen[-1][1] - steady[1] < 12 << 20, seen
        assert running.ask("GET", "/models") == (200, b'{"models":[]}')


@pytest.mark.slow
def test_where_doors_are_locked_models_are_controlled_with_a_key_for_that(tmp_path: Path) -> None:
    folder = unpacked(tmp_path, "a")
    secrets = {"admin": "k-admin-0123456789abcdef", "user": "k-user-0123456789abcdef0"}
    keys = [
        {"name": "admin", "hash": f"sha256:{digest_of(secrets['admin'].encode()).hex()}", "scopes": ["admin"]},
        {"name": "user", "hash": f"sha256:{digest_of(secrets['user'].encode()).hex()}", "scopes": ["infer"], "models": ["a"]},
    ]
    (tmp_path / "keys.yaml").write_text(yaml.safe_dump({"keys": keys}))
    with multi_model(tmp_path, server={"access": {"keys": "keys.yaml"}}) as running:
        asked = json.dumps({"model_name": "a", "url": str(folder)})
        calls = [("POST", "/models", asked), ("GET", "/models", ""), ("GET", "/models/a", ""), ("DELETE", "/models/a", "")]
        for secret, status in (("", 401), (secrets["user"], 403)):
            for method, path, body in calls:
                assert running.ask(method, path, body, X_Api_Key=secret)[0] == status, (path, secret)
        admin = {"X_Api_Key": secrets["admin"]}
        assert [running.ask(*call, **admin)[0] for call in calls[:3]] == [200, 200, 200]
        assert running.ask("GET", "/ping")[0] == 200
        assert invoke(running, "a")[0] == 401
        assert invoke(running, "b", X_Api_Key=secrets["user"])[0] == 403
        assert invoke(running, "a", X_Api_Key=secrets["user"])[0] == 200
        assert running.ask("DELETE", "/models/a", **admin)[0] == 200


@pytest.mark.slow
def test_a_container_that_ends_breaks_a_load_off_and_answers_it(tmp_path: Path) -> None:
    folder = unpacked(tmp_path, "waits", inference=WAITS)
    with multi_model(tmp_path) as running, ThreadPoolExecutor(1) as beside:
        loading = beside.submit(load, running, "waits", folder)
        until((folder / "load-begun").exists)
        asked_s = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        status, body = loading.result(TIMEOUT_S)
        assert (status, b"shutting down" in body) == (503, True), body
        running.process.wait(KILLED_S)
        assert time.monotonic() - asked_s < KILLED_S / 2


@pytest.mark.slow
def test_without_the_environment_there_is_no_such_api(tmp_path: Path) -> None:
    (tmp_path / "double.py").write_text(CODE)
    with container(tmp_path, SAGEMAKER_MULTI_MODEL="false") as running:
        for method, path in (("GET", "/models"), ("POST", "/models"), ("DELETE", "/models/double"), ("GET", "/models/double")):
            assert running.ask(method, path)[0] == 404
        assert running.ask("POST", "/models/double/invoke", "{}")[0] == 404
        paths = json.loads(running.ask("GET", "/openapi.json")[1])["paths"]
        assert not [path for path in paths if path.startswith("/models")]


@pytest.mark.slow
def test_a_package_as_gateway_package_makes_it_and_one_of_the_pytorch_container(running: Container, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    pytorch = write_package(tmp_path / "models" / "own", "own")
    own = unpacked(tmp_path, "yaml", gateway_yaml=yaml.safe_dump({"server": {"http_port": 1}, "models": [MODEL]}))
    altered = unpacked(
        tmp_path, "altered", gateway_yaml=yaml.safe_dump({"models": [MODEL]}), SHA256SUMS="0" * 64 + "  gateway.yaml\n"
    )
    assert load(running, "own", pytorch) == (200, b"")
    status, body = running.ask("POST", "/models/own/invoke", "1,2,3,4", Content_Type="text/csv", Accept="text/csv")
    assert (status, bool(body)) == (200, True), body
    assert load(running, "yaml", own) == (200, b"")
    assert invoke(running, "yaml", '{"instances": [[1, 2]]}') == (200, b'{"predictions":[[1.0,2.0]]}')
    assert load(running, "altered", altered)[0] == 400
