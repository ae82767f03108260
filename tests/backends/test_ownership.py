"""Whose the arrays are: what a model gave stays what it was, and what a request brought stays for whoever else runs it."""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pytest

import backends
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
