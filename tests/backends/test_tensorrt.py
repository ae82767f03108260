"""What the TensorRT backend keeps on disk, and records. TensorRT and CUDA are fakes: an engine is a text, or a doubling."""

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backends import tensorrt
from backends.base import LoadFailed, ModelSpec, TensorSpec
from backends.cuda_graphs import capturing

TENSORS = {"x": True, "y": False}  # its name -> whether it goes in
SPEC = ModelSpec("tensorrt", *((TensorSpec(name, "FP32", (-1, 4)),) for name in TENSORS), 8)


class Fake:
    """Of the library. built: how often it built an engine. shapes: least, usual and greatest, of its profiles."""

    def __init__(self) -> None:
        self.built = 0
        self.shapes: list[tuple[Any, ...]] = []
        network = SimpleNamespace(num_inputs=1, get_input=lambda i: SimpleNamespace(name="x", shape=(-1, -1)))
        config = SimpleNamespace(set_memory_pool_limit=lambda *_: None, add_optimization_profile=lambda _: None)
        self.builder = SimpleNamespace(
            create_network=lambda _: network,
            create_builder_config=lambda: config,
            create_optimization_profile=lambda: SimpleNamespace(set_shape=lambda *shapes: self.shapes.append(shapes)),
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
            device_memory_size_v2=64,
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


def test_an_engine_is_built_for_rows_only_where_there_are_some(library: Fake, model: Path) -> None:
    for max_rows in (8, 0):
        tensorrt.load(ModelSpec("", (), (), max_rows), model=str(model), longest=64)
    assert library.shapes == [("x", (1, 1), (4, 16), (8, 64)), ("x", (1, 1), (16, 16), (64, 64))]


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


class Context:
    """An execution context of y = 2 x. memory: where its activations are. ran_on: the first number of each x."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()
        self.memory: tuple[int, int] | None = None
        self.addresses: dict[str, int] = {}
        self.ran_on: list[float] = []

    def set_device_memory(self, pointer: int, size: int) -> None:
        self.memory = (pointer, size)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shape = shape
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shape

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def execute_async_v3(self, stream: int) -> bool:
        if Graph.recorded is not None:
            Graph.recorded.of = self
            Graph.recorded.state = (self.shape, dict(self.addresses))
            return True
        self.ran_on.append(ctypes.c_float.from_address(self.addresses["x"]).value)
        size = int(np.prod(self.shape))
        x, y = ((ctypes.c_float * size).from_address(self.addresses[name]) for name in ("x", "y"))
        y[:] = [2 * each for each in x]
        return True


class Graph:
    """A recorded launch, which is good for as long as its context is as it was."""

    recorded: "Graph | None" = None
    of: Context
    state: tuple[Any, ...]

    def replay(self) -> None:
        assert self.state == (self.of.shape, self.of.addresses)
        self.of.execute_async_v3(1)

    @staticmethod
    @contextlib.contextmanager
    def capture(graph: "Graph", **_: Any) -> Iterator[None]:
        assert capturing.locked()  # it waits for all of the device, which spoils another's
        Graph.recorded = graph
        yield
        Graph.recorded = None


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> list[Context]:
    """Contexts that the engine has given."""
    torch = pytest.importorskip("torch")
    given: list[Context] = []
    cpu, empty = torch.device("cpu"), torch.empty
    stream = SimpleNamespace(cuda_stream=1, synchronize=lambda: None)
    monkeypatch.setattr(torch, "device", lambda *_: cpu)
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **options: empty(*sizes, **options))
    for name, fake in (("Stream", lambda _: stream), ("CUDAGraph", Graph), ("graph", Graph.capture)):
        monkeypatch.setattr(torch.cuda, name, fake)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    strategies = SimpleNamespace(USER_MANAGED="user")
    monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(ExecutionContextAllocationStrategy=strategies))
    return given


def opened(given: list[Context], *, graphs: bool = True, most: int = 9) -> tensorrt.TensorRtSession:
    """most: so many contexts fit into the GPU's memory."""

    def create_execution_context(strategy: str) -> Context | None:
        assert strategy == "user"
        if len(given) == most:
            return None
        given.append(Context())
        return given[-1]

    made = SimpleNamespace(device_memory_size_v2=64, create_execution_context=create_execution_context)
    return tensorrt.TensorRtModel(SPEC, made, None, 0, graphs).open_session(0)


def doubles(session: tensorrt.TensorRtSession, *rows: int) -> None:
    for count in rows:
        x = np.full((count, 4), count, np.float32)
        np.testing.assert_array_equal(session.run({"x": x}, {})["y"], 2 * x)


@pytest.mark.parametrize("graphs", [True, False])
def test_each_recording_has_a_context_of_its_own_on_memory_that_all_share(engine: list[Context], graphs: bool) -> None:
    session = opened(engine, graphs=graphs)
    doubles(session, 4, 2, 4, 2)
    assert len(engine) == (3 if graphs else 1)
    assert len({context.memory for context in engine}) == 1
    assert {number for context in engine for number in context.ran_on} == {4, 2}
    session.close()


@pytest.mark.parametrize("told", ["TensorRT gives no execution context; its log says why", "RuntimeError: capture failed"])
def test_shapes_that_cannot_be_recorded_run_without_and_are_told_once(
    engine: list[Context], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, told: str
) -> None:
    session = opened(engine, most=2 if told.startswith("TensorRT") else 9)
    doubles(session, 4)
    monkeypatch.setattr("torch.cuda.graph", fails)
    doubles(session, 2, 1, 4, 2, 1)
    assert [record.getMessage() for record in caplog.records] == [
        f"batches of {{'x': [{rows}, 4]}} stay unrecorded, and are slower: {told}" for rows in (2, 1)
    ]


@contextlib.contextmanager
def fails(*_: Any, **__: Any) -> Iterator[None]:
    yield
    raise RuntimeError("capture failed")


def test_a_session_is_closed_when_what_it_began_has_ended(engine: list[Context], monkeypatch: pytest.MonkeyPatch) -> None:
    session, bound = opened(engine), []
    doubles(session, 4)
    monkeypatch.setattr(session._stream, "synchronize", lambda: bound.append(len(session._bound)))
    session.close()
    assert bound == [1]
    assert not session._bound


def test_a_session_on_a_full_gpu_is_not_opened(engine: list[Context]) -> None:
    full = SimpleNamespace(device_memory_size_v2=64, create_execution_context=lambda strategy: None)
    with pytest.raises(LoadFailed, match="session 3: no execution context, the GPU's memory is full"):
        tensorrt.TensorRtModel(SPEC, full, None, 0, True).open_session(3)
