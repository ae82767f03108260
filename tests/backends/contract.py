"""The backends the contract test runs on, each serving the same Linear(16, 4)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.base import ModelSpec, Tensors, TensorSpec
from tests.triton_server import VENV

MAX_ROWS = 8
ROW_SIZES = (1, 2, 8)  # of backends that compile for fixed ones
SPEC = ModelSpec("", (TensorSpec("INPUT0", "FP32", (-1, 16)),), (TensorSpec("OUTPUT0", "FP32", (-1, 4)),), MAX_ROWS)
LINEAR = "configs/examples/linear.py:linear"


@dataclass(frozen=True)
class Case:
    """One backend. options: given a directory to put artifacts in, and pytest's request for fixtures it needs.

    skip: why it cannot run here, or None.

    bad: an input it fails on. tolerance: of its outputs to the module's, relative to their size.
    """

    kind: str
    options: Callable[[Path, pytest.FixtureRequest], dict[str, Any]]
    skip: Callable[[], str | None] = lambda: None
    bad: Tensors = field(default_factory=lambda: {"INPUT0": np.ones((2, 15), np.float32)})
    tolerance: float = 1e-5
    slow: bool = False


def expected(inputs: np.ndarray) -> np.ndarray:
    """What Linear(16, 4) gives, computed by numpy."""
    from backends.source import load_object

    module = load_object(LINEAR)()
    weight, bias = (parameter.detach().numpy() for parameter in (module.weight, module.bias))
    return inputs @ weight.T + bias


class Linear:
    """The model as a user's Python class."""

    inputs = (("INPUT0", "FP32", (-1, 16)),)
    outputs = (("OUTPUT0", "FP32", (-1, 4)),)

    def predict(self, inputs: Tensors) -> Tensors:
        return {"OUTPUT0": expected(inputs["INPUT0"])}


def torchscript(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    import torch

    from backends.source import load_object

    path = folder / "linear.pt"
    torch.jit.trace(load_object(LINEAR)(), torch.zeros(2, 16)).save(path)
    return {"model": str(path)}


def exported(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    import torch

    path = folder / "linear.pt2"
    torch.export.save(_program(), path)
    return {"model": str(path)}


def aot_inductor(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    import torch

    path = folder / "linear-aoti.pt2"
    quick = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
    torch._inductor.aoti_compile_and_package(_program(), package_path=str(path), inductor_configs=quick)
    return {"model": str(path)}


def _program() -> Any:
    import torch

    from backends.source import load_object

    rows = torch.export.Dim("rows", min=1, max=MAX_ROWS)
    return torch.export.export(load_object(LINEAR)(), (torch.zeros(2, 16),), dynamic_shapes=({0: rows},))


def onnx(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    import backends

    path = folder / "linear.onnx"
    if not path.exists():
        backends.build("onnxruntime", path, SPEC, source=LINEAR, options={})
    return {"model": str(path)}


def triton(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"url": request.getfixturevalue("triton").grpc_url, "model": "linear"}


def no_triton() -> str | None:
    return None if (VENV / "bin" / "python").exists() else "no Triton server in .venv-triton: run `make triton`"


def neuron(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    import backends

    request.getfixturevalue("neuron_double")
    how = {"source": LINEAR, "options": {}, "row_sizes": ROW_SIZES, "target": "inf2"}
    backends.build("neuron", folder / "linear", SPEC, **how)
    return {"model": str(folder / "linear")}


def needs(module: str) -> Callable[[], str | None]:
    from importlib.util import find_spec

    return lambda: None if find_spec(module) else f"{module} is not installed"


def no_cuda(package: str) -> Callable[[], str | None]:
    def why() -> str | None:
        if not Path("/dev/nvidia0").exists():
            return "no NVIDIA GPU on this machine"
        try:
            distribution(package)
        except PackageNotFoundError:
            return f"{package} is not installed"
        return None

    return why


CASES: dict[str, Case] = {
    "synthetic": Case(
        "synthetic",
        lambda folder, request: {"fixed_ms": 0, "row_ms": 0, "output": "sum", "faults": {"fail": -7}},
        bad={"INPUT0": np.full((2, 16), -7, np.float32)},
    ),
    "python": Case("python", lambda folder, request: {"model": f"{__file__}:Linear"}),
    "onnxruntime": Case("onnxruntime", onnx, needs("onnxruntime")),
    "onnxruntime-2-threads": Case(
        "onnxruntime", lambda folder, request: {**onnx(folder, request), "threads": 2}, needs("onnxruntime")
    ),
    "torch": Case("torch", lambda folder, request: {"model": LINEAR}, needs("torch")),
    "torch-bf16": Case("torch", lambda folder, request: {"model": LINEAR, "precision": "bf16"}, needs("torch"), tolerance=0.02),
    "torch-int8": Case("torch", lambda folder, request: {"model": LINEAR, "precision": "int8"}, needs("torch"), tolerance=0.05),
    "torch-torchscript": Case("torch", torchscript, needs("torch")),
    "torch-export": Case("torch", exported, needs("torch"), slow=True),
    "torch-aot-inductor": Case("torch", aot_inductor, needs("torch"), slow=True),
    "triton": Case("triton", triton, no_triton, slow=True),
    "triton-shared-memory": Case(
        "triton", lambda folder, request: {**triton(folder, request), "shared_memory": True}, no_triton, slow=True
    ),
    "tensorrt": Case("tensorrt", onnx, needs("tensorrt")),
    "torch-cuda": Case("torch", lambda folder, request: {"model": LINEAR, "device": "cuda"}, no_cuda("torch")),
    "torch-cuda-graphs": Case(
        "torch", lambda folder, request: {"model": LINEAR, "device": "cuda", "cuda_graphs": True}, no_cuda("torch")
    ),
    "onnxruntime-cuda": Case(
        "onnxruntime", lambda folder, request: {**onnx(folder, request), "device": "cuda"}, no_cuda("onnxruntime-gpu")
    ),
    "onnxruntime-cuda-graphs": Case(
        "onnxruntime",
        lambda folder, request: {**onnx(folder, request), "device": "cuda", "cuda_graphs": True},
        no_cuda("onnxruntime-gpu"),
    ),
    "neuron-double": Case("neuron", neuron, needs("torch")),
}  # fmt: skip
