"""Loaded models, whatever runs them: one contract (`base`), one module per library, imported when it is asked for."""

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from backends.base import (
    NO_OPTIONS,
    BackendError,
    Device,
    ExecutionFailed,
    LoadFailed,
    Model,
    ModelSpec,
    Session,
    Tensors,
    are_exact,
    checked_outputs,
    exact_outputs,
    words_of,
)
from backends.digests import check_digest
from backends.early_failure import EarlyFailure
from backends.source import check_unchanged

if TYPE_CHECKING:
    from backends.discovery import Found


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of backend: its modules, "" where there is none, and its library.

    loads: whose `load(declared, **options) -> Model` is called. It imports the library only inside load; a LoadFailed says
    what to install where that is missing. The defaults of the options stand in its signature, for the configuration as well.
    reads: whose `read(model=…, example=…, **options) -> Found` says what a model takes and gives, and, of a kind that runs
    files, whose `tried(model=…, stated=…) -> Found` whether the rows of one that is stated are independent.
    builds: whose `build(artifact, declared, **how)` makes the artifact that the kind loads.
    library: what has to be installed, and how; two empty texts: nothing.
    """

    loads: str
    reads: str = ""
    builds: str = ""
    library: tuple[str, str] = ("", "")


BACKENDS: Final[dict[str, Kind]] = {
    "synthetic": Kind("backends.synthetic"),
    "torch": Kind(
        "backends.torch",
        reads="backends.torch_discovery",
        builds="backends.torch_export",
        library=("torch", "pip install 'serving-gateway[torch]'"),
    ),
    "onnxruntime": Kind(
        "backends.onnxruntime",
        reads="backends.onnxruntime",
        builds="backends.onnxruntime_export",
        library=("onnxruntime", "pip install 'serving-gateway[onnx]'"),
    ),
    "python": Kind("backends.python", reads="backends.python_discovery"),
    "triton": Kind("backends.triton", library=("tritonclient", "pip install 'tritonclient[grpc]'")),
    "tensorrt": Kind(
        "backends.tensorrt",
        builds="backends.onnx_export",
        library=("tensorrt", "install NVIDIA's tensorrt, and PyTorch built for CUDA"),
    ),
    "neuron": Kind(
        "backends.neuron",
        builds="backends.neuron_compile",
        library=("torch", "install torch-neuronx from AWS's Neuron repository"),
    ),
}

_SHARED: Final = {"cast_outputs": True, "sha256": None}  # options of `load` below, whatever the kind


def defaults(kind: str) -> dict[str, Any]:
    """The options of a kind that may be left out, with what they are then."""
    parameters = signature(import_module(BACKENDS[kind].loads).load).parameters.values()
    found = {each.name: each.default for each in parameters if each.default is not each.empty}
    return _SHARED | {name: {} if default is NO_OPTIONS else default for name, default in found.items()}


def load(kind: str, options: Mapping[str, Any], spec: ModelSpec | None = None, *, max_rows: int = 32) -> Model:
    """Load a model into this process; its sessions' outputs are checked against its spec.

    options: the backend's own, `gateway.config.Backend.options()`. `cast_outputs` among them, true by default: outputs of
    another datatype are brought to the declared one where that is safe. `sha256`: of the file that `model` names, which is
    looked at before anything of it is run; None: of any.
    spec: what the operator declared; inputs or outputs left empty, and everything if None, are read from the artifact. What is
    declared is checked against the artifact where that can tell. Its platform is ignored.
    max_rows: the most rows one execution takes, where no spec says so.
    Raises: LoadFailed.
    """
    if kind not in BACKENDS:
        raise LoadFailed(f"unknown backend kind {kind!r}, expected one of {', '.join(BACKENDS)}")
    options = dict(options)
    cast = bool(options.pop("cast_outputs", _SHARED["cast_outputs"]))
    sha256 = options.pop("sha256", None)
    declared = spec if spec is not None else ModelSpec(platform="", inputs=(), outputs=(), max_rows=max_rows)
    if sha256 is not None:
        check_digest(options["model"], sha256)
    if isinstance(named := options.get("model"), str):
        check_unchanged(named)
    try:
        model: Model = import_module(BACKENDS[kind].loads).load(declared, **options)
    except BackendError:
        raise
    except Exception as exc:  # whatever an artifact or a user's code throws while loading is a fault of the load
        raise LoadFailed(f"{kind}: {words_of(exc)}") from exc
    return _Checked(model, cast=cast)


def read(kind: str, model: str, *, example: Mapping[str, object] | None = None, **options: Any) -> "Found":
    """What a model takes and gives, where nobody has stated it.

    example: one request, of arrays or nested lists; needed where neither the artifact nor type hints say it. options: of the
    kind's own reader.
    Raises: LoadFailed, with what to do.
    """
    return _found(kind, "read", model, example=example, **options)


def tried(kind: str, model: str, stated: ModelSpec, **options: Any) -> "Found":
    """What is stated of a model, with its `max_rows` or 0: whether the rows of a batch change each other's answers.

    stated: by who says nothing of batches of several requests. options: of the backend, those that change what the outputs are.
    Raises: LoadFailed, where the model cannot be run here.
    """
    return _found(kind, "tried", model, stated=stated, **options)


def _found(kind: str, how: str, model: str, **given: Any) -> "Found":
    try:
        found: Found = getattr(import_module(BACKENDS[kind].reads), how)(model=model, **given)
    except (LoadFailed, KeyboardInterrupt):
        raise
    except BaseException as exc:  # of a user's code, which may call sys.exit(); a backend's other errors are of the example
        raise LoadFailed(f"{model}: {words_of(exc)}") from exc
    return found


def build(kind: str, artifact: Path, spec: ModelSpec, **how: Any) -> str:
    """Make the artifact that a backend of this kind loads, verified; answers with one line for the operator.

    how: `gateway.config.Build`'s keys, and `lengths`, the padded lengths it will be run with. Raises: LoadFailed.
    """
    built = [each for each, of in BACKENDS.items() if of.builds]
    if kind not in built:
        raise LoadFailed(f"nothing is built for kind {kind!r}, only for {', '.join(built)}")
    try:
        return str(import_module(BACKENDS[kind].builds).build(artifact, spec, **how))
    except (BackendError, KeyboardInterrupt):
        raise
    except BaseException as exc:  # exporters raise whatever they like, and what they run may end with sys.exit()
        raise LoadFailed(f"{artifact}: cannot be built from {how.get('source')}: {type(exc).__name__}: {exc}") from exc


class _Checked:
    """A model whose outputs are checked in one place, so that no backend and no caller can forget to."""

    def __init__(self, model: Model, *, cast: bool) -> None:
        self._model = model
        self._cast = cast
        self.spec: ModelSpec = model.spec
        self.device: Device = model.device

    @property
    def memory_bytes(self) -> int:
        return self._model.memory_bytes

    def open_session(self, index: int) -> Session:
        return _CheckedSession(self._model.open_session(index), self.spec, cast=self._cast)

    def close(self) -> None:
        self._model.close()


class _CheckedSession:
    __slots__ = ("_cast", "_close", "_exact", "_run", "_spec", "_stream", "cancel")

    def __init__(self, session: Session, spec: ModelSpec, *, cast: bool) -> None:
        self._run = session.run
        self._stream: Any = getattr(session, "stream", None)  # of a StreamingSession
        self._close = session.close
        self.cancel: Callable[[], None] | None = getattr(session, "cancel", None)  # of a CancellableSession
        self._spec = spec
        self._cast = cast
        self._exact = exact_outputs(spec)

    def run(self, inputs: Tensors, parameters: Mapping[str, object]) -> Tensors:
        outputs = self._run(inputs, parameters)
        if self._exact is not None and are_exact(self._exact, inputs, outputs):
            return outputs
        return checked_outputs(self._spec, inputs, outputs, cast=self._cast)

    def stream(self, inputs: Tensors, parameters: Mapping[str, object]) -> Generator[Tensors, None, None]:
        with closing(self._stream(inputs, parameters)) as parts:
            for outputs in parts:
                if not isinstance(outputs, EarlyFailure):
                    try:
                        outputs = checked_outputs(self._spec, inputs, outputs, cast=self._cast)
                    except ExecutionFailed as exc:
                        yield EarlyFailure(exc)
                        raise
                yield outputs

    def close(self) -> None:
        self._close()
