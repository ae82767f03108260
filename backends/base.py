"""The contract every backend keeps.

A backend module offers `load(declared, **options) -> Model`; callers use `backends.load`. A `Model` is loaded once per
process and opens k `Session`s that run in parallel, each on a thread of its own. Life of a model: load -> open_session
(k times) -> warm-up by the worker pool -> run … -> close of every session -> close of the model.

Errors a backend may raise, each a fault of

    BackendError
    ├── LoadFailed             the configuration or the artifact: bad path, missing library, wrong device
    │   └── SpecMismatch       the configuration: it says other tensors than the artifact has; no later try can mend it
    ├── ExecutionFailed        the model, on this input: the session is still good
    │   ├── OutputsRefused     the model, on any input: what it gives is not what is declared of it
    │   └── InputRefused       mostly the client: the model says that it does not take this request
    ├── RunCancelled           nobody: `cancel` ended the run
    └── SessionLost            the session: process died, device lost, out of memory. It must be rebuilt

Foreign exceptions become one of these at one seam per library. Imports nothing of the gateway.
"""

import logging
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np

from backends.datatypes import NUMPY, integer_shown, remedy
from backends.refusals import Refusal

# Of what a model or a library says, so much reaches a client, and so much the log.
_MESSAGE_CHARS: Final = 2_000
_WORDS_AROUND: Final = 500  # what is put around a message that was cut, and does not have it cut again
_LOG_CHARS: Final = 16_000

_FLOATS: Final = frozenset(NUMPY[name] for name in ("FP16", "BF16", "FP32", "FP64"))
_INTEGERS: Final = frozenset(dtype for name, dtype in NUMPY.items() if "INT" in name)

# Of a raw model: see `ModelSpec.raw`.
RAW_INPUTS: Final = ("body", "content_type", "accept")
RAW_OUTPUTS: Final = ("body", "content_type")

log = logging.getLogger(__name__)


class BackendError(Exception):
    """What a backend raises. trace: where it began in a model's code, for the log, if that is not this process; else empty."""

    trace: str = ""


class LoadFailed(BackendError):
    """The model cannot be loaded as configured."""


class SpecMismatch(LoadFailed):
    """What was declared of the model is not what it is."""


class ExecutionFailed(BackendError):
    """The model failed on this batch; the session can run the next."""


class OutputsRefused(ExecutionFailed):
    """What the model gave is not what is declared of it; another input hardly mends that."""


class InputRefused(ExecutionFailed):
    """The model says that it does not take this request, and why: it has not failed."""

    def __init__(self, message: str = "", *, code: Refusal = "invalid_argument") -> None:
        super().__init__(message)
        self.code: Refusal = code


class RunCancelled(BackendError):
    """The run was ended by `CancellableSession.cancel`; the session can run the next."""


class SessionLost(BackendError):
    """The session is unusable and must be rebuilt.

    self_inflicted: by this run, which would end another session as well; not by something from outside.
    begun: False: the model has certainly not got this run.
    """

    def __init__(self, message: str = "", *, self_inflicted: bool = False, begun: bool = True) -> None:
        super().__init__(message)
        self.self_inflicted = self_inflicted
        self.begun = begun


def words_of(exc: BaseException, *, traced: bool = False) -> str:
    """What an exception says, in words that can be sent on: a BackendError's message, any other with its type in front.

    Never raises, whatever a foreign `__str__` does. Cut where it is long; the log then has more of it, unless it is `traced`:
    then `trace_of` has.
    """
    text = _said(exc)
    if not isinstance(exc, BackendError):
        text = f"{type(exc).__name__}: {text}" if text else type(exc).__name__
    if len(text) > _MESSAGE_CHARS + _WORDS_AROUND:
        if not traced:
            log.warning("an error message of %d characters is cut in the answer: %s", len(text), text[:_LOG_CHARS])
        text = f"{text[:_MESSAGE_CHARS]}… (cut, of {len(text)} characters)"
    return text.encode("utf-8", "backslashreplace").decode()  # a lone surrogate cannot be sent


def trace_of(exc: BaseException) -> str:
    """Where an exception came from, for the log: the traceback of what was raised first.

    Of what a backend itself says, its message, if `words_of` cuts it; else empty. Never raises, whatever a foreign `__str__`
    does.
    """
    if isinstance(exc, BackendError):
        if exc.trace:
            return exc.trace
        if exc.__cause__ is None and len(_said(exc)) <= _MESSAGE_CHARS + _WORDS_AROUND:
            return ""
    first = (exc.__cause__ or exc) if isinstance(exc, BackendError) else exc
    try:
        text = "".join(traceback.format_exception(first))
    except BaseException:
        text = "".join(traceback.format_tb(first.__traceback__))
    if len(text) > _LOG_CHARS:  # by what is said, at the end, or by a deep recursion
        text = f"{text[: _LOG_CHARS // 2]}… (cut, of {len(text)} characters) …{text[-_LOG_CHARS // 2 :]}"
    return text.encode("utf-8", "backslashreplace").decode()


def _said(exc: BaseException) -> str:
    try:
        return str(exc)
    except BaseException as failure:
        return f"(its __str__ raised {type(failure).__name__})"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of a model. shape: with the batch dimension, if the model has one; -1 means any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False
    labels: tuple[str, ...] = ()  # class names for the classification extension


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a model takes and gives.

    max_rows: the most rows one execution takes; 0 means that the model has no batch dimension (one request per execution).
    row_sizes: the only row counts the artifact accepts, ascending (compiled backends); empty means any up to max_rows.
    reads_parameters: whether the parameters of requests may reach the model; False: they surely do not.
    decoupled: it answers a request in parts, as many as it likes (`StreamingSession`); each execution is of one request.
    own_arguments: of a function that reads no parameters, the names that have a default, which no request sets.
    only_computes: a run takes the CPU of the thread that calls it and waits for nothing, so that any thread may call it.
    requests_apart: it is told which rows of a batch are whose (REQUEST_ROWS), as it answers each request by itself.
    """

    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_rows: int
    row_sizes: tuple[int, ...] = ()
    reads_parameters: bool = True
    decoupled: bool = False
    _: KW_ONLY
    own_arguments: tuple[str, ...] = ()
    only_computes: bool = False
    requests_apart: bool = False
    rows_stated: bool = True  # of a declared one: max_rows is the operator's, and not only the default
    rows_wanted: int = field(default=0, repr=False)  # likewise: in a batch, by who has set max_rows; no answer depends on it
    input_by_name: Mapping[str, TensorSpec] = field(init=False, repr=False, compare=False)
    output_by_name: Mapping[str, TensorSpec] = field(init=False, repr=False, compare=False)
    varying_inputs: tuple[str, ...] = field(init=False, repr=False, compare=False)  # of other shapes per row, or left out

    def __post_init__(self) -> None:
        object.__setattr__(self, "input_by_name", {spec.name: spec for spec in self.inputs})
        object.__setattr__(self, "output_by_name", {spec.name: spec for spec in self.outputs})
        varying = tuple(spec.name for spec in self.inputs if self.max_rows and (spec.optional or -1 in spec.shape[1:]))
        object.__setattr__(self, "varying_inputs", varying)

    @property
    def raw(self) -> bool:
        """Whether it takes the body of a request as it came and gives the body of its answer: told by its names alone.

        Inputs `body`, `content_type`, `accept` (optional ones may be left out), outputs `body`, `content_type`: each BYTES, one
        element for each request. The types are those of the headers Content-Type and Accept, empty where there was none.
        """
        named = tuple(tensor.name for tensor in self.inputs), tuple(tensor.name for tensor in self.outputs)
        tensors = (*self.inputs, *self.outputs)
        return named == (RAW_INPUTS, RAW_OUTPUTS) and all(each.datatype == "BYTES" and len(each.shape) == 1 for each in tensors)


@dataclass(frozen=True, slots=True)
class Device:
    """Where a model runs. kind: cpu, cuda, neuron, remote."""

    kind: str
    index: int = 0


Tensors = dict[str, np.ndarray]


class LastPart(Tensors):
    """A part of an answer that its model has said to be the last. The end of others is known only when it comes."""


ONE_AS_TEXT: Final = b"1"

# A parameter of `Session.run` beside the client's own: `time.monotonic_ns` after which nobody waits, for calls elsewhere.
DEADLINE_NS: Final = "gateway.deadline_ns"

# Likewise, where a request of the batch is traced: the span within which the session runs, as W3C Trace Context names it, so
# that what the session calls, or its code notes, joins it. TRACESTATE is there only if a client has sent one.
TRACEPARENT: Final = "gateway.traceparent"
TRACESTATE: Final = "gateway.tracestate"

# Likewise, for a model of `requests_apart`: how many rows of the batch each of its requests has, in order, as "1,1,3".
REQUEST_ROWS: Final = "gateway.request_rows"

NO_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType({})  # the default of an option that is a mapping


def writeable(array: np.ndarray) -> np.ndarray:
    """The array, or a copy of a read-only one, which may be needed again as it is: for code that may change its inputs."""
    return array if array.flags.writeable else array.copy()


class Session(Protocol):
    """One executable instance of a model. Used by one thread at a time, always the same unless it `only_computes`."""

    def run(self, inputs: Tensors, parameters: Mapping[str, object]) -> Tensors:
        """Execute one batch.

        Shapes: every input is (rows, *per_row) and every output has the same rows, unless max_rows is 0.
        parameters: those of the request if it runs alone, else empty; DEADLINE_NS beside them where it is known,
        TRACEPARENT and TRACESTATE where it is traced, REQUEST_ROWS where `requests_apart`.
        Ownership: inputs stay the caller's, but those that can be written to may be changed (`writeable`); outputs are the
        caller's, and not reused by a later run.
        Raises: ExecutionFailed (this batch), SessionLost (this session).
        """
        ...

    def close(self) -> None:
        """Free everything the session holds; a second call does nothing."""
        ...


class StreamingSession(Session, Protocol):
    """A session of a decoupled model. `run` is not called."""

    def stream(self, inputs: Tensors, parameters: Mapping[str, object]) -> Generator[Tensors, None, None]:
        """Execute one request and give its answer in parts, each when it is asked for.

        Shapes: inputs as in `run`; every part has every output, with any number of rows. Ownership: as in `run`; a part is the
        caller's; a `LastPart` may be the last of them, or an `EarlyFailure` in its place. The caller closes the generator
        before its end if nobody waits for the rest: the run ends then.
        Raises: as `run`.
        """
        ...


class CancellableSession(Session, Protocol):
    """A session whose run can be ended from outside, because what runs is elsewhere. Others are left to finish."""

    def cancel(self) -> None:
        """Make `run` raise RunCancelled soon. From any thread; at any other time than during `run` it changes nothing."""
        ...


class MortalSession(Session, Protocol):
    """A session in a process of its own, which can die while nothing runs and can be killed."""

    def watch(self, died: Callable[[str], None]) -> None:
        """Have `died` called once, from any thread, when the process has ended, with words that say how; at once if it has."""
        ...

    def kill(self) -> None:
        """End the process at once; a run in progress raises SessionLost. From any thread."""
        ...


class Model(Protocol):
    """A model loaded in this process."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def device(self) -> Device: ...

    @property
    def memory_bytes(self) -> int:
        """What the weights take, once per process however many sessions share them; 0: unknown."""
        ...

    def open_session(self, index: int) -> Session:
        """Open session `index` (0 .. k-1). Called on the thread that will run it. Raises: LoadFailed."""
        ...

    def close(self) -> None: ...


def checked_outputs(spec: ModelSpec, inputs: Tensors, outputs: Tensors, *, cast: bool = True) -> Tensors:
    """Hold a model to its spec: its outputs and no others, each of its datatype and shape, with as many rows as went in.

    In the order of the spec, whatever order the model gave them in.
    A part of a decoupled model's answer may have any number of rows.
    cast: bring arrays of another datatype to the declared one where only the precision of float64 is lost, or nothing.
    Raises: OutputsRefused, naming the output; ExecutionFailed, for a value or an element that the datatype cannot hold.
    """
    rows = None
    if spec.max_rows and not spec.decoupled:
        rows = next(iter(inputs.values())).shape[0] if inputs else 0
    made: Tensors = {}
    for expected in spec.outputs:
        array = outputs.get(expected.name)
        if not isinstance(array, np.ndarray):
            if expected.name in outputs:
                from backends.no_array import no_array  # what few gateways need

                raise OutputsRefused(f"output {expected.name!r}: {no_array(array)}")
            raise OutputsRefused(f"output {expected.name!r} is missing, the model gave {_names(outputs)}")
        if array.dtype != NUMPY[expected.datatype]:
            array = made[expected.name] = as_declared(expected, array, allowed=cast)
        if not _fits(array.shape, expected.shape, rows):
            with_rows = "" if rows is None else f" with {rows} {'row' if rows == 1 else 'rows'}"
            raise OutputsRefused(
                f"output {expected.name!r}: expected shape {list(expected.shape)}{with_rows}, "
                f"the model gave shape {list(array.shape)}"
            )
        if expected.datatype == "BYTES":
            _check_elements(expected.name, array)
    if len(outputs) != len(spec.outputs):
        undeclared = {name: array for name, array in outputs.items() if name not in spec.output_by_name}
        raise OutputsRefused(
            f"the model gave {_names(undeclared)} beside its outputs {_names(spec.output_by_name)}: declare or omit them"
        )
    if not made and [*outputs] == [*spec.output_by_name]:
        return outputs
    made = {name: made.get(name, outputs[name]) for name in spec.output_by_name}
    return LastPart(made) if isinstance(outputs, LastPart) else made


_Exact = tuple[tuple[str, "np.dtype[Any]", tuple[int, ...]], ...]


def exact_outputs(spec: ModelSpec) -> _Exact | None:
    """Of each output its name, dtype and shape behind the rows, where that says all there is to check; None: it does not."""
    if not spec.max_rows or spec.decoupled:
        return None
    outputs = tuple((output.name, NUMPY[output.datatype], tuple(output.shape[1:])) for output in spec.outputs)
    open_ = any(size < 0 for _, _, shape in outputs for size in shape) or not all(output.shape for output in spec.outputs)
    return None if open_ or any(dtype.hasobject for _, dtype, _ in outputs) else outputs


def are_exact(exact: _Exact, inputs: Tensors, outputs: Tensors) -> bool:
    """Whether `checked_outputs` would find nothing to do, at a third of its price. False says nothing."""
    if type(outputs) is not dict or len(outputs) != len(exact):
        return False
    rows = -1
    for array in inputs.values():
        rows = array.shape[0]
        break
    in_order = iter(outputs)
    for name, dtype, shape in exact:
        given = outputs.get(name)
        if type(given) is not np.ndarray or given.dtype is not dtype or given.shape != (rows, *shape) or next(in_order) != name:
            return False
    return True


def as_declared(expected: TensorSpec, array: np.ndarray, *, allowed: bool = True) -> np.ndarray:
    """The array in the declared datatype: a copy. numpy computes in float64 and int64 where nobody tells it otherwise.

    allowed: to bring numbers to it.
    Raises: OutputsRefused, where the datatypes do not go together; ExecutionFailed, for a value that does not fit.
    """
    dtype, given = NUMPY[expected.datatype], array.dtype
    what = f"output {expected.name!r}"
    if dtype.hasobject and given.kind == "U":
        return array.astype(object)
    if allowed and dtype in _FLOATS and (given == np.float64 or (given in _FLOATS and dtype.itemsize > given.itemsize)):
        try:
            with np.errstate(over="raise", under="ignore", invalid="ignore"):
                made = array.astype(dtype)
            if dtype == NUMPY["BF16"] and (np.isinf(made) != np.isinf(array)).any():  # which ml_dtypes does not tell
                raise FloatingPointError
            return made
        except FloatingPointError:
            raise ExecutionFailed(f"{what}: a value of the model's {given} is too large for {expected.datatype}") from None
    if allowed and dtype in _INTEGERS and given in _INTEGERS:
        return integers_as_declared(expected, array)
    raise OutputsRefused(f"{what}: expected {expected.datatype}, the model gave {given}: {remedy(array, dtype)}")


def integers_as_declared(expected: TensorSpec, array: np.ndarray) -> np.ndarray:
    """Integers, or an object array of Python's, in the declared datatype. Raises: ExecutionFailed, if one does not fit."""
    what, dtype = f"output {expected.name!r}", NUMPY[expected.datatype]
    if array.size:
        bounds = np.iinfo(dtype)
        for value in (int(array.min()), int(array.max())):
            if not bounds.min <= value <= bounds.max:
                raise ExecutionFailed(f"{what}: the model gave {integer_shown(value)}, which {expected.datatype} cannot hold")
    return array.astype(dtype)


def _fits(shape: tuple[int, ...], declared: tuple[int, ...], rows: int | None) -> bool:
    """rows: of the batch; None: the model has no batch dimension."""
    if len(shape) != len(declared):
        return False
    if rows is not None:
        if not shape or shape[0] != rows:
            return False
        shape, declared = shape[1:], declared[1:]
    for size, wanted in zip(shape, declared, strict=True):  # noqa: SIM110  # all() of a generator takes twice as long
        if size != wanted and wanted >= 0:
            return False
    return True


def _check_elements(name: str, array: np.ndarray) -> None:
    """Raises: OutputsRefused, if what is declared as BYTES has elements that are neither bytes nor text."""
    elements = array.ravel().tolist()
    kinds = set(map(type, elements))
    if kinds <= {bytes}:
        return
    for kind in kinds:
        if not issubclass(kind, bytes | str):
            raise OutputsRefused(f"output {name!r}: expected bytes or str in BYTES, the model gave {kind.__name__}")
    try:
        "".join(element for element in elements if isinstance(element, str)).encode()
    except UnicodeEncodeError as exc:
        raise ExecutionFailed(f"output {name!r}: an element is text that has no UTF-8: {exc.reason}") from exc


def _names(named: Mapping[str, object]) -> list[str]:
    return sorted(map(str, named))


def shape_in_batches(tensor: TensorSpec, max_rows: int) -> tuple[int, ...]:
    """A tensor's shape; its first size is open where the model takes batches (max_rows is not 0)."""
    return (-1, *tensor.shape[1:]) if max_rows and tensor.shape else tensor.shape


def shapes_agree(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two statements of one shape can both be true: -1 goes with any size."""
    return len(one) == len(other) and all(-1 in pair or pair[0] == pair[1] for pair in zip(one, other, strict=True))


def agree(ours: TensorSpec, theirs: TensorSpec, max_rows: int = 0) -> bool:
    """Whether two statements of one tensor can both be true. max_rows: as in `shape_in_batches`, of theirs."""
    return ours.datatype == theirs.datatype and shapes_agree(ours.shape, shape_in_batches(theirs, max_rows))


def narrowed(found: tuple[TensorSpec, ...], declared: tuple[TensorSpec, ...], what: str) -> tuple[TensorSpec, ...]:
    """The declared tensors, each held against the artifact's own; a declared size may stand for an open one.

    declared: empty means what was found. what: begins the messages, and ends with "input" or "output". Outputs may be left
    out, inputs only where they are optional. Raises: SpecMismatch.
    """
    if not declared:
        return found
    by_name = {tensor.name: tensor for tensor in found}
    if what.endswith("input"):
        missing = [tensor.name for tensor in found if not tensor.optional and tensor.name not in {t.name for t in declared}]
        if missing:
            raise SpecMismatch(f"{what}: the model also needs {missing}, which the configuration does not list")
    for tensor in declared:
        if (artifact := by_name.get(tensor.name)) is None:
            raise SpecMismatch(f"{what} {tensor.name!r}: the model has none of that name, only {sorted(by_name)}")
        if not agree(tensor, artifact):
            raise SpecMismatch(
                f"{what} {tensor.name!r}: the model has {artifact.datatype} {list(artifact.shape)}, "
                f"the configuration says {tensor.datatype} {list(tensor.shape)}"
            )
    return declared


def example_inputs(spec: ModelSpec, rows: int, length: int = 1) -> Tensors:
    """Inputs to warm up or compile with: `ones`, also for optional ones. Shapes: (rows, *per_row); `length` where else open."""
    inputs: Tensors = {}
    for tensor in spec.inputs:
        shape = [length if size < 0 else size for size in tensor.shape]
        if spec.max_rows:
            shape[0] = rows
        inputs[tensor.name] = ones(tensor.datatype, shape)
    return inputs


def ones(datatype: str, shape: Sequence[int]) -> np.ndarray:
    """What most models take, whatever they mean by it: a valid token, an attended position, a pixel, a number as text."""
    return np.full(shape, ONE_AS_TEXT if datatype == "BYTES" else 1, NUMPY[datatype])
