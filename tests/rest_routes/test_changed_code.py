"""A load after a model's code has changed: refused where this process has imported it, and the new code in one of its own."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.model_folders import forget_code
from tests.rest_routes.serving import Served, serving

pytestmark = pytest.mark.slow

CLASS = """
import helper
class Model:
    inputs, outputs = [("x", "FP32", (-1, 1))], [("y", "FP32", (-1, 1))]
    def predict(self, arrays):
        return {"y": arrays["x"] + helper.K + 0}
"""
TRITON = """
import triton_python_backend_utils as pb_utils
from helper import K
class TritonPythonModel:
    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x + K + 0)]) for x in given]
"""
TORCH = """
import torch
from helper import K
class Net(torch.nn.Module):
    def forward(self, x):
        return x + K + 0
def make(): return Net()
"""
KINDS = {
    "class": ("python", CLASS, "Model"),
    "triton": ("python", TRITON, "TritonPythonModel"),
    "torch": ("torch", TORCH, "make"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "helper.py").write_text("K = 100\n")
    yield tmp_path
    forget_code(tmp_path)


def configuration(folder: Path, kind: str, text: str, name: str, more: str = "") -> str:
    (folder / "model.py").write_text(text)
    tensors = "inputs: [{name: x, datatype: FP32, shape: [-1, 1]}], outputs: [{name: y, datatype: FP32, shape: [-1, 1]}]"
    backend = f"backends: [{{kind: {kind}, model: '{folder}/model.py:{name}'{more}}}]"
    return f"server: {{model_control: true}}\nmodels: [{{name: m, {tensors}, {backend}}}]"


def post(served: Served, path: str, body: str = "") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(served.url, timeout=30)
    try:
        connection.request("POST", path, body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def load(served: Served, verb: str = "load") -> tuple[int, str]:
    status, body = post(served, f"/v2/repository/models/m/{verb}")
    return status, body.decode()


def answer(served: Served) -> float:
    request = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
    status, body = post(served, "/v2/models/m/infer", json.dumps(request))
    assert status == 200, body
    return float(json.loads(body)["outputs"][0]["data"][0])


@pytest.mark.parametrize("kind", KINDS)
def test_code_that_has_changed_is_not_taken_for_what_was_imported(folder: Path, kind: str) -> None:
    text = KINDS[kind][1]
    with serving(folder, configuration(folder, *KINDS[kind])) as served:
        for file, before, now in (("model.py", text, text.replace("+ 0", "+ 1")), ("helper.py", "K = 100\n", "K = 200\n")):
            (folder / file).write_text(now)
            status, said = load(served)
            assert status == 500
            assert f": {file}: has changed since this process imported it: restart the process" in said
            assert answer(served) == 101
            (folder / file).write_text(before)
            assert load(served) == (200, "")
            assert answer(served) == 101


def test_a_process_of_its_own_takes_code_that_has_changed(folder: Path) -> None:
    with serving(folder, configuration(folder, *KINDS["class"], ", isolation: process")) as served:
        assert answer(served) == 101
        (folder / "helper.py").write_text("K = 2000\n")  # of another size: Python looks at that and at whole seconds
        assert load(served) == (200, "")
        assert answer(served) == 2001
