"""Loaded models, whatever runs them: one contract (`base`), one module per library, imported when it is asked for."""

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from backends.base import BackendError, Device, LoadFailed, Model, ModelSpec, Session, Tensors, checked_outputs, words_of
from backends.discovery import Found

# kind -> the module whose `load(declared, **options) -> Model` is called. A module imports its library only
# inside load, and says in a LoadFailed what to install where it is missing.
BACKENDS: Final[dict[str, str]] = {
    "synthetic": "backends.synthetic",
    "torch": "backends.torch",
    "onnxruntime": "backends.onnxruntime",
    "python": "backends.python",
    "triton": "backends.triton",
    "tensorrt": "backends.tensorrt",
    "neuron": "backends.neuron",
}

# kind -> the module whose `read(model=…, example=…, **options) -> Found` says what a model takes and gives.
READERS: Final[dict[str, str]] = {
    "torch": "backends.torch_discovery",
    "onnxruntime": "backends.onnxruntime",
    "python": "backends.python",
}

# kind -> the module whose `build(artifact, declared, **how)` makes the artifact that kind loads.
BUILDERS: Final[dict[str, str]] = {
    "onnxruntime": "backends.onnx_export",
    "tensorrt": "backends.onnx_export",
    "torch": "backends.torch_export",
    "neuron": "backends.neuron_compile",
}


def load(kind: str, options: Mapping[str, Any], spec: ModelSpec | None = None, *, max_rows: int = 32) -> Model:
    """Load a model into this process; its sessions' outputs are checked against its spec.

    options: the backend's own, `gateway.config.Backend.options()`. `cast_outputs` among them, true by default: outputs of
    another datatype are brought to the declared one where that is safe.
    spec: what the operator declared; inputs or outputs left empty, and everything if None, are read from the artifact. What is
    declared is checked against the artifact where that can tell. Its platform is ignored.
    max_rows: the most rows one execution takes, where no spec says so.
    Raises: LoadFailed.
    """
    if kind not in BACKENDS:
        raise LoadFailed(f"unknown backend kind {kind!r}, expected one of {', '.join(BACKENDS)}")
    options = dict(options)
    cast = bool(options.pop("cast_outputs", True))
    declared = spec if spec is not None else ModelSpec(platform="", inputs=(), outputs=(), max_rows=max_rows)
    try:
        model: Model = import_module(BACKENDS[kind]).load(declared, **options)
    except BackendError:
        raise
    except Exception as exc:  # whatever an artifact or a user's code throws while loading is a fault of the load
        raise LoadFailed(f"{kind}: {words_of(exc)}") from exc
    return _Checked(model, cast=cast)


def read(kind: str, model: str, *, example: Tensors | None = None) -> Found:
    """What a model takes and gives, where nobody has stated it.

    example: one request; needed where neither the artifact nor type hints say it. Raises: LoadFailed, with what to do.
    """
    try:
        found: Found = import_module(READERS[kind]).read(model=model, example=example)
    except (LoadFailed, KeyboardInterrupt):
        raise
    except BaseException as exc:  # of a user's code, which may call sys.exit(); a backend's other errors are of the example
        raise LoadFailed(f"{model}: {words_of(exc)}") from exc
    return found


def build(kind: str, artifact: Path, spec: ModelSpec, **how: Any) -> str:
    """Make the artifact that a backend of this kind loads, verified; answers with one line for the operator.

    how: `gateway.config.Build`'s keys, and `lengths`, the padded lengths it will be run with. Raises: LoadFailed.
    """
    if kind not in BUILDERS:
        raise LoadFailed(f"nothing is built for kind {kind!r}, only for {', '.join(BUILDERS)}")
    try:
        return str(import_module(BUILDERS[kind]).build(artifact, spec, **how))
    except BackendError:
        raise
    except Exception as exc:  # exporters raise whatever they like
        raise LoadFailed(f"{artifact}: cannot be built from {how.get('source')}: {type(exc).__name__}: {exc}") from exc


class _Checked:
    """A model whose outputs are checked in one place, so that no backend and no caller can forget to."""

    def __init__(self, model: Model, *, cast: bool) -> None:
        self._model = model
        self._cast = cast
        self.spec: ModelSpec = model.spec
        self.device: Device = model.device
        self.memory_bytes: int = model.memory_bytes

    def open_session(self, index: int) -> Session:
        return _CheckedSession(self._model.open_session(index), self.spec, cast=self._cast)

    def close(self) -> None:
        self._model.close()


class _CheckedSession:
    __slots__ = ("_cast", "_close", "_run", "_spec", "_stream", "cancel")

    def __init__(self, session: Session, spec: ModelSpec, *, cast: bool) -> None:
        self._run = session.run
        self._stream: Any = getattr(session, "stream", None)  # of a StreamingSession
        self._close = session.close
        self.cancel: Callable[[], None] | None = getattr(session, "cancel", None)  # of a CancellableSession
        self._spec = spec
        self._cast = cast

    def run(self, inputs: Tensors, parameters: Mapping[str, object]) -> Tensors:
        return checked_outputs(self._spec, inputs, self._run(inputs, parameters), cast=self._cast)

    def stream(self, inputs: Tensors, parameters: Mapping[str, object]) -> Generator[Tensors, None, None]:
        with closing(self._stream(inputs, parameters)) as parts:
            for outputs in parts:
                yield checked_outputs(self._spec, inputs, outputs, cast=self._cast)

    def close(self) -> None:
        self._close()
