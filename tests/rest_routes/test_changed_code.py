"""A load takes the code that a model's files have now, and what cannot be loaded leaves the old to answer."""

import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.model_folders import forget_code
from tests.rest_routes.serving import Served, serving

pytestmark = pytest.mark.slow

TENSORS = "inputs: [{name: x, datatype: FP32, shape: [-1, 1]}], outputs: [{name: y, datatype: FP32, shape: [-1, 1]}]"
FUNCTION = """
import numpy as np
import numpy.typing as npt
from typing import Annotated
from helper import K
Rows = Annotated[npt.NDArray[np.float32], (-1, 1)]
def predict(x: Rows) -> Rows:
    import late
    return x + K + late.K + 0
"""
CLASS = """
import helper
class Model:
    inputs, outputs = [("x", "FP32", (-1, 1))], [("y", "FP32", (-1, 1))]
    def predict(self, arrays):
        import late
        return {"y": arrays["x"] + helper.K + late.K + 0}
"""
TRITON = """
import triton_python_backend_utils as pb_utils
from helper import K
class TritonPythonModel:
    def execute(self, requests):
        import late
        given = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x + K + late.K + 0)]) for x in given]
"""
TORCH = """
import torch
from helper import K
class Net(torch.nn.Module):
    def forward(self, x):
        import late
        return x + K + late.K + 0
def make(): return Net()
"""
KINDS = {
    "function": ("python", FUNCTION, "predict"),
    "class": ("python", CLASS, "Model"),
    "triton": ("python", TRITON, "TritonPythonModel"),
    "torch": ("torch", TORCH, "make"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "helper.py").write_text("K = 100\n")
    (tmp_path / "late.py").write_text("K = 1000\n")
    yield tmp_path
    forget_code(tmp_path)


def models(folder: Path, kind: str, text: str, name: str, *names: str) -> str:
    (folder / "model.py").write_text(text)
    backend = f"backends: [{{kind: {kind}, model: '{folder}/model.py:{name}'}}]"
    listed = "".join(f"\n  - {{name: {each}, {TENSORS}, {backend}}}" for each in names or ("m",))
    return f"server: {{model_control: true}}\nmodels:{listed}"


def post(served: Served, path: str, body: str = "") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(served.url, timeout=30)
    try:
        connection.request("POST", path, body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def load(served: Served, name: str = "m", verb: str = "load") -> tuple[int, str]:
    status, body = post(served, f"/v2/repository/models/{name}/{verb}")
    return status, body.decode()


def answer(served: Served, name: str = "m") -> float:
    request = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
    status, body = post(served, f"/v2/models/{name}/infer", json.dumps(request))
    assert status == 200, body
    return float(json.loads(body)["outputs"][0]["data"][0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_takes_code_that_has_changed_and_its_neighbours(folder: Path, kind: str) -> None:
    with serving(folder, models(folder, *KINDS[kind])) as served:
        assert answer(served) == 1101
        for file, now, expected in (
            ("model.py", KINDS[kind][1].replace("+ 0", "+ 20000"), 21101),
            ("helper.py", "K = 30000\n", 51001),
            ("late.py", "K = 400000\n", 450001),
        ):
            (folder / file).write_text(now)
            assert answer(served) != expected
            assert load(served) == (200, "")
            assert answer(served) == expected
        (folder / "helper.py").write_text("K = 5000000\n")
        assert load(served, verb="unload")[0] == load(served)[0] == 200
        assert answer(served) == 5420001


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damaged", ["model.py", "helper.py"])
def test_code_that_cannot_be_loaded_leaves_the_old_to_answer(folder: Path, kind: str, damaged: str) -> None:
    with serving(folder, models(folder, *KINDS[kind])) as served:
        for file, now in (("late.py", "K = 'nothing to add'\n"), (damaged, "def damaged(:\n")):
            (folder / file).write_text(now)
        for _ in range(2):
            status, said = load(served)
            assert (status, "SyntaxError" in said, answer(served)) == (500, True, 1101)
        (folder / "late.py").write_text("K = 2000\n")
        (folder / "helper.py").write_text("K = 200\n")
        (folder / "model.py").write_text(KINDS[kind][1])
        assert load(served) == (200, "")
        assert answer(served) == 2201


def test_what_fails_once_it_runs_leaves_the_old_with_what_that_imports(folder: Path) -> None:
    fails = CLASS + "    def load(self):\n        import late\n        raise ValueError('no weights')\n"
    with serving(folder, models(folder, "python", CLASS, "Model")) as served:
        assert answer(served) == 1101
        (folder / "late.py").write_text("K = 'nothing to add'\n")
        (folder / "model.py").write_text(fails)
        status, said = load(served)
        assert (status, "no weights" in said, answer(served)) == (500, True, 1101)


def test_another_model_keeps_the_code_that_it_has_until_it_is_loaded_itself(folder: Path) -> None:
    with serving(folder, models(folder, "python", CLASS, "Model", "m", "n")) as served:
        assert (answer(served), answer(served, "n")) == (1101, 1101)
        (folder / "helper.py").write_text("K = 20000\n")
        (folder / "late.py").write_text("K = 300000\n")
        assert load(served) == (200, "")
        assert (answer(served), answer(served, "n")) == (320001, 1101)
        assert load(served, "n") == (200, "")
        assert answer(served, "n") == 320001


def test_code_that_has_not_changed_is_run_once(folder: Path) -> None:
    ran = folder / "ran"
    counts = f"with open({str(ran)!r}, 'a') as file: file.write('.')\n"
    (folder / "helper.py").write_text(f"{counts}K = 100\n")
    with serving(folder, models(folder, "python", counts + CLASS, "Model", "m", "n")) as served:
        assert answer(served, "n") == 1101
        assert load(served) == (200, "")
        assert (answer(served), ran.read_text()) == (1101, "..")


def test_compiled_code_that_has_changed_is_refused(folder: Path) -> None:
    compiled = folder / "pack"
    compiled.mkdir()
    (compiled / "__init__.py").write_text("K = 100\n")
    (compiled / "fast.so").write_bytes(b"")
    stands_in = (
        f"import sys\nsys.modules['pack.fast'] = fast = type(sys)('pack.fast')\nfast.__file__ = {str(compiled / 'fast.so')!r}\n"
    )
    text = "from pack import K\n" + stands_in + CLASS.replace("import helper", "").replace("helper.K", "K")
    with serving(folder, models(folder, "python", text, "Model")) as served:
        (folder / "model.py").write_text(text.replace("+ 0", "+ 20000"))
        assert load(served) == (200, "")  # which leaves the package as it is
        assert answer(served) == 21101
        os.utime(compiled / "fast.so", (1, 1))
        status, said = load(served)
        assert (status, answer(served)) == (500, 21101)
        assert "fast.so: has changed since this process imported it" in said
