"""What the TensorRT backend keeps on disk. TensorRT and CUDA are fakes here: an engine is the text that it was built as."""

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backends import tensorrt
from backends.base import ModelSpec, TensorSpec

TENSORS = {"x": True, "y": False}  # its name -> whether it goes in
SPEC = ModelSpec("tensorrt", *((TensorSpec(name, "FP32", (-1, 4)),) for name in TENSORS), 8)


class Fake:
    """Of the library. built: how often it built an engine."""

    def __init__(self) -> None:
        self.built = 0
        network = SimpleNamespace(num_inputs=0)
        config = SimpleNamespace(set_memory_pool_limit=lambda *_: None, add_optimization_profile=lambda _: None)
        self.builder = SimpleNamespace(
            create_network=lambda _: network,
            create_builder_config=lambda: config,
            create_optimization_profile=lambda: None,
            build_serialized_network=self._build,
        )
        self.runtime = SimpleNamespace(logger=None, deserialize_cuda_engine=self._engine)

    def _build(self, network: Any, config: Any) -> memoryview:
        self.built += 1
        return memoryview(b"plan")

    def _engine(self, plan: Any) -> Any:
        assert bytes(plan) == b"plan"
        return SimpleNamespace(
            num_io_tensors=len(TENSORS),
            get_tensor_name=lambda i: [*TENSORS][i],
            get_tensor_dtype=lambda name: SimpleNamespace(name="FLOAT"),
            get_tensor_mode=lambda name: TENSORS[name],
            get_tensor_shape=lambda name: (-1, 4),
        )


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake()
    modules: dict[str, Any] = {
        "tensorrt": SimpleNamespace(
            __version__="10.0",
            Logger=type("Logger", (), {"WARNING": 0, "__init__": lambda self, level: None}),
            Runtime=lambda logger: fake.runtime,
            Builder=lambda logger: fake.builder,
            NetworkDefinitionCreationFlag=SimpleNamespace(STRONGLY_TYPED=0),
            OnnxParser=lambda network, logger: SimpleNamespace(parse_from_file=lambda path: True),
            MemoryPoolType=SimpleNamespace(WORKSPACE=0),
            TensorIOMode=SimpleNamespace(INPUT=True),
        ),
        "torch": SimpleNamespace(
            cuda=SimpleNamespace(
                is_available=lambda: True, device=lambda number: contextlib.nullcontext(), get_device_name=lambda: "A GPU"
            )
        ),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return fake


def field(number: int, content: bytes) -> bytes:
    """Of a protobuf message: of fewer than 128 bytes."""
    return bytes([number << 3 | 2, len(content)]) + content


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """An ONNX file of one tensor, whose weights are beside it, in `weights`."""
    tensor = field(13, field(1, b"location") + field(2, b"weights"))
    (tmp_path / "m.onnx").write_bytes(b"\x08\x0a" + field(7, field(5, tensor)))
    (tmp_path / "weights").write_bytes(b"weights")
    return tmp_path / "m.onnx"


def test_an_engine_is_built_once_and_kept(library: Fake, model: Path) -> None:
    for _ in range(2):
        assert tensorrt.load(SPEC, model=str(model)).spec.max_rows == 8
    assert library.built == 1
    (kept,) = (model.parent / "engines").iterdir()
    assert kept.read_bytes() == b"plan"
    assert kept.name.startswith("m-A-GPU-trt10.0-")


def test_an_engine_is_built_anew_where_the_model_or_its_weights_changed(library: Fake, model: Path) -> None:
    for built, changed in enumerate((model, model.with_name("weights")), 2):
        tensorrt.load(SPEC, model=str(model))
        changed.write_bytes(changed.read_bytes()[::-1] if changed != model else b"\x08\x09" + model.read_bytes()[2:])
        tensorrt.load(SPEC, model=str(model))
        assert library.built == built


def test_an_engine_that_cannot_be_kept_runs_all_the_same(library: Fake, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    for engines in (model / "engines", None):  # below a file, and where a file is: not even root makes a folder there
        (model.parent / "engines").touch()
        tensorrt.load(SPEC, model=str(model), engines=engines and str(engines))
    assert library.built == 2
    assert sorted(path.name for path in model.parent.iterdir()) == ["engines", "m.onnx", "weights"]
    below, beside = (record.getMessage() for record in caplog.records)
    assert "the engine cannot be kept, and each load builds it: NotADirectoryError: " in below
    assert "the engine cannot be kept, and each load builds it: FileExistsError: " in beside
    assert below.endswith(": name a folder in `engines` that can be written")
