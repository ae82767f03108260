"""Whose the arrays are: what a model gave stays what it was, and what a request brought stays for whoever else runs it."""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pytest

import backends
import gateway
from backends.base import ModelSpec, Tensors, TensorSpec

X = TensorSpec("x", "FP32", (-1, 4))
Y = TensorSpec("y", "FP32", (-1, 4))
SPEC = ModelSpec("", (X,), (Y,), 8)
Array = Annotated[npt.NDArray[np.float32], (-1, 4)]

TRITON = """
import numpy as np, triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args): self.kept = np.zeros((8, 4), np.float32)
    def execute(self, requests):
        x = pb_utils.get_input_tensor_by_name(requests[0], "x").as_numpy()
        x *= 2
        self.kept[: len(x)] = x
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", self.kept[: len(x)])])]
"""

kept = np.zeros((8, 4), np.float32)


class OfClass:
    """Each here doubles its input where it is, and gives an array that it uses again."""

    inputs = (("x", "FP32", (-1, 4)),)
    outputs = (("y", "FP32", (-1, 4)),)

    def __init__(self) -> None:
        self.kept = np.zeros((8, 4), np.float32)

    def predict(self, inputs: Tensors) -> Tensors:
        inputs["x"] *= 2
        self.kept[: len(inputs["x"])] = inputs["x"]
        return {"y": self.kept[: len(inputs["x"])]}


def of_function(x: Array) -> Array:
    x *= 2
    kept[: len(x)] = x
    return kept[: len(x)]


def of_torch() -> Any:
    """A factory."""
    import torch

    class Doubled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = torch.zeros(8, 4)

        def forward(self, x: Any) -> Any:
            rows = self.kept[: len(x)]
            return torch.add(x.mul_(2), 0, out=rows)

    return Doubled()


@pytest.fixture(params=["OfClass", "of_function", "triton", "of_torch"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> backends.Session:
    kind, model = "python", f"{__file__}:{request.param}"
    if request.param == "of_torch":
        pytest.importorskip("torch", reason="torch is not installed")
        kind = "torch"
    if request.param == "triton":
        (tmp_path / "1").mkdir()
        (tmp_path / "1" / "model.py").write_text(TRITON)
        model = f"{tmp_path}/1/model.py:TritonPythonModel"
    return backends.load(kind, {"model": model}, SPEC).open_session(0)


def test_outputs_stay_while_a_model_uses_their_arrays_again(session: backends.Session) -> None:
    first = session.run({"x": np.full((2, 4), 3, np.float32)}, {})["y"]
    session.run({"x": np.full((2, 4), 5, np.float32)}, {})
    assert first.tolist() == [[6] * 4] * 2


def test_a_read_only_input_stays_what_it_was(session: backends.Session) -> None:
    array = np.full((2, 4), 3, np.float32)
    array.flags.writeable = False
    assert session.run({"x": array}, {})["y"].tolist() == [[6] * 4] * 2
    assert array.tolist() == [[3] * 4] * 2


FAILING = """
def predict(texts: Annotated[np.ndarray, "BYTES", (-1,)]) -> Annotated[np.ndarray, "BYTES", (-1,)]:
    texts[:] = b"changed"
    raise ValueError("no")
"""
GOOD = """
def predict(texts: Annotated[np.ndarray, "BYTES", (-1,)]) -> Annotated[np.ndarray, "BYTES", (-1,)]:
    return texts
"""


def test_what_a_backend_did_to_its_inputs_does_not_reach_the_next(tmp_path: Path) -> None:
    for name, code in (("failing", FAILING), ("good", GOOD)):
        (tmp_path / f"{name}.py").write_text(f"from typing import Annotated\nimport numpy as np\n{code}")
    backend = "{{kind: python, name: {0}, model: '{0}.py:predict'}}"
    (tmp_path / "gateway.yaml").write_text(
        "models: [{name: m, routing: {policy: round_robin, ejection: {consecutive_failures: 1000, failed_share: 1.0}}, "
        f"backends: [{backend.format('failing')}, {backend.format('good')}]}}]"
    )
    with gateway.load(str(tmp_path / "gateway.yaml")) as model:
        answers = [model.predict({"texts": [b"asked"]})["output"].tolist() for _ in range(4)]
    assert answers == [[b"asked"]] * 4
