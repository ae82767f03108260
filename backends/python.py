"""The user's own class or function: tokenisers, image decoding, whatever is no artifact of a library.

    class Model:
        inputs = [("text", "BYTES", (-1, 1))]              # optional: name, datatype, shape with the batch dimension
        outputs = [("length", "INT64", (-1, 1))]

        def __init__(self, **class_options): ...
        def load(self): ...                                # optional: on the thread that will predict
        def predict(self, inputs): ...                     # or predict(self, inputs, parameters); dict of arrays in and out
        def close(self): ...                               # optional

A `predict` that yields answers in parts, each such a dict: the model is decoupled. So does one that says
`-> Iterator[…]` and returns what another function yields.

`predict` may have a typed parameter for each input instead, and a plain function may stand for the class: see
`backends.type_hints`. A class with `execute` is one of Triton's Python backend: see `backends.triton_python`; a
file of handlers, as SageMaker has them: see `backends.sagemaker`.

Each session is an instance of its own. What `predict` raises fails its batch; a MemoryError, and what is no Exception (as
SystemExit), its session.
"""

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np

from backends import sagemaker, triton_python
from backends.base import (
    NO_OPTIONS,
    BackendError,
    Device,
    ExecutionFailed,
    LastPart,
    LoadFailed,
    ModelSpec,
    OutputsRefused,
    SessionLost,
    SpecMismatch,
    Tensors,
    TensorSpec,
    agree,
    words_of,
    writeable,
)
from backends.datatypes import NUMPY
from backends.early_failure import EarlyFailure
from backends.signatures import (
    ANY_OUTPUT,
    Hint,
    Signature,
    call_by_name,
    parts_of,
    refuse_lost,
    refuse_nothing,
    refuse_uncallable,
    single_value,
    stream_by_name,
    widened,
)
from backends.source import check_options, line_of, load_object, make, takes_parameters

_OF_LITSERVE: Final = ("decode_request", "encode_response")


def load(declared: ModelSpec, *, model: str, class_options: Mapping[str, Any] = NO_OPTIONS) -> "PythonModel":
    """model: `module:Class` or `path/to/file.py:Class`, or a function in place of the class."""
    code = load_code(model)
    signature = called_as(model, code, [tensor.name for tensor in declared.inputs])
    options = dict(class_options)
    if inspect.isclass(code):
        check_options(model, code, options, key="class_options")
    elif options:
        raise LoadFailed(f"{model}: class_options: {', '.join(options)}: only a class takes options, this is a function")
    rows = declared.max_rows
    for key, ours in (("inputs", declared.inputs), ("outputs", declared.outputs)):
        for tensor, theirs in zip(ours, said_of(signature, key, ours), strict=True):
            if theirs is not None and not agree(tensor, theirs, rows):
                raise SpecMismatch(
                    f"{model}: {key[:-1]} {tensor.name!r}: the code says {theirs.datatype} {list(theirs.shape)}, "
                    f"the configuration says {tensor.datatype} {list(tensor.shape)}"
                )
    inputs = tensors_of(model, "inputs", declared.inputs, code, signature, rows)
    outputs = tensors_of(model, "outputs", declared.outputs, code, signature, rows)
    check_parameters(model, signature, inputs)
    check_keys(model, signature, outputs)
    if signature.in_parts and signature.style == "rows":
        rows = min(rows, 1)  # the parts are of one row's values
    spec = ModelSpec(
        "python", inputs, outputs, rows, declared.row_sizes, reads_parameters=signature.reads_parameters,
        decoupled=signature.in_parts, own_arguments=signature.defaults,
        requests_apart=not signature.in_parts and inspect.isclass(code) and issubclass(code, triton_python.ExecuteAdapter),
    )  # fmt: skip
    return PythonModel(model, spec, code, options, signature)


def load_code(model: str) -> Any:
    """The class or function that `model` names; of what is made for another server, ours around it. Raises: LoadFailed."""
    if model.endswith(sagemaker.CLASS):
        return sagemaker.adapted(model)
    if model.endswith(triton_python.CLASS):
        return triton_python.adapted(model)
    return load_object(model)


def called_as(model: str, code: Any, names: Iterable[str] = ()) -> Signature:
    """How a class or function is called, and what its type hints say. Raises: LoadFailed.

    model: for messages. names: of the inputs that are declared or in an example.
    """
    from backends.type_hints import signature_of  # only where there is a python model

    if inspect.isclass(code):
        if hooks := [name for name in _OF_LITSERVE if callable(getattr(code, name, None))]:
            raise LoadFailed(
                f"{model}: has {', '.join(hooks)} of LitServe, which nothing calls here: have `predict` take and give what its "
                "type hints say, and remove them (docs/moving.md, From LitServe)"
            )
        predict = getattr(code, "predict", None)
        if not callable(predict):
            raise LoadFailed(f"{model}: expected a class with a method `predict(inputs)`")
        static = inspect.getattr_static(code, "predict")
        function, method = predict, hasattr(static, "__get__") and not isinstance(static, staticmethod | classmethod)
    elif callable(code):
        function, method = code, False
    else:
        raise LoadFailed(f"{model}: expected a class with a method `predict(inputs)`, or a function, got {type(code).__name__}")
    try:
        signature = signature_of(
            function, method=method, names={*names, *(own.name for own in stated_by(model, code, "inputs") or ())}
        )
        if not inspect.isclass(code):
            refuse_uncallable(signature, function, of_class=False)
    except LoadFailed as exc:
        raise LoadFailed(f"{model}: {exc}") from exc
    return signature


def said_of(signature: Signature, key: str, ours: tuple[TensorSpec, ...]) -> list[TensorSpec | None]:
    """What type hints say of each declared tensor, in its own words where they are silent; None: nothing.

    key: `inputs` or `outputs`. A datatype of outputs that theirs may be cast to is as good as theirs.
    """
    hints = (signature.inputs if key == "inputs" else signature.outputs) or {}
    found: list[TensorSpec | None] = []
    for tensor in ours:
        theirs: TensorSpec | None = None
        hint = hints.get(tensor.name)
        if hint is not None and hint.scalar is not None:
            theirs = single_value(hint, tensor, key)
        elif hint is not None:
            shape = tensor.shape if hint.shape is None else hint.shape
            theirs = replace(tensor, datatype=hint.datatype or tensor.datatype, shape=shape)
            if key == "outputs" and _kind(theirs) == _kind(tensor):
                theirs = replace(theirs, datatype=tensor.datatype)
        found.append(theirs)
    return found


def tensors_of(
    model: str, key: str, declared: tuple[TensorSpec, ...], code: Any, signature: Signature, max_rows: int
) -> tuple[TensorSpec, ...]:
    """What is declared, else stated by the code, else hinted at; key: `inputs` or `outputs`. Raises: LoadFailed, if none is."""
    found = declared or stated_by(model, code, key, max_rows) or hinted_by(model, signature, key)
    if not found:
        why = f" ({signature.untold})" if key == "inputs" and signature.untold else ""
        raise LoadFailed(
            f"{model}: neither an attribute `{key}` nor type hints say its {key}{why}: set `{key}` of the model in the "
            "configuration (`gateway init` finds them)"
        )
    return found


def hinted_by(model: str, signature: Signature, key: str) -> tuple[TensorSpec, ...] | None:
    """The tensors that type hints say. Raises: LoadFailed, for outputs that may be missing by them."""
    if key == "inputs":
        return signature.input_specs()
    if optional := ", ".join(repr(name) for name, required in signature.keys.items() if not required):
        raise LoadFailed(
            f"{model}: {optional} may be missing by the return type, but each answer has all outputs: leave out NotRequired or "
            'total=False, and give "" or NaN where there is none'
        )
    return signature.output_specs()


def check_keys(model: str, signature: Signature, outputs: tuple[TensorSpec, ...]) -> None:
    """Raises: LoadFailed, if a return type has other keys than the outputs. Those that may be missing need not be listed."""
    names, keys = {tensor.name for tensor in outputs}, signature.keys
    if keys and not {name for name, required in keys.items() if required} <= names <= keys.keys():
        raise LoadFailed(
            f"{model}: its outputs are {sorted(names)}, but the keys of its return type are {sorted(keys)}: name them alike"
        )


def check_parameters(model: str, signature: Signature, inputs: tuple[TensorSpec, ...]) -> None:
    """Raises: LoadFailed, if a function's parameters are called otherwise than the inputs."""
    if signature.style == "dict" or signature.any_inputs:
        return
    if {tensor.name for tensor in inputs} != set(signature.inputs):
        raise LoadFailed(
            f"{model}: its inputs are {sorted(tensor.name for tensor in inputs)}, but the parameters of the function are "
            f"{sorted(signature.inputs)}: name them alike"
        )


def _kind(tensor: TensorSpec) -> str:
    return "int" if "INT" in tensor.datatype else "float" if tensor.datatype.startswith("FP") else tensor.datatype


def stated_by(model: str, code: Any, attribute: str, max_rows: int = 0) -> tuple[TensorSpec, ...] | None:
    """The tensors that an attribute states; None: there is no such attribute. max_rows: 0 holds nothing against their rows."""
    stated = getattr(code, attribute, None)
    tensors = []
    for entry in stated or ():
        try:
            name, datatype, shape, *rest = entry
            tensor = TensorSpec(name, datatype, tuple(int(size) for size in shape), *rest)
        except (TypeError, ValueError):
            raise LoadFailed(f"{model}: `{attribute}`: got {entry!r}, expected (name, datatype, shape)") from None
        if not isinstance(datatype, str) or datatype not in NUMPY:
            raise LoadFailed(f"{model}: `{attribute}`: {name!r} has datatype {datatype!r}, expected one of {', '.join(NUMPY)}")
        if max_rows and (not tensor.shape or (tensor.shape[0] > 1 and tensor.shape[0] != max_rows)):
            raise LoadFailed(
                f"{model}: `{attribute}`: {name!r} has shape {list(tensor.shape)}: the first dimension is that of a batch's "
                "rows, expected -1 there (or set max_rows: 0 where the model has no such dimension)"
            )
        tensors.append(tensor)
    return tuple(tensors) or None


class PythonModel:
    def __init__(self, model: str, spec: ModelSpec, code: Any, options: dict[str, Any], signature: Signature) -> None:
        self.spec = spec
        self.device = Device("cpu")
        self.memory_bytes = 0
        self._model = model
        self._code = code
        self._options = options
        self._signature = signature

    def open_session(self, index: int) -> "PythonSession":
        if not inspect.isclass(self._code):
            return PythonSession(self._code, None, self._signature, self.spec)
        code = self._code.numbered(index) if issubclass(self._code, triton_python.ExecuteAdapter) else self._code
        instance = make(self._model, code, self._options, key="class_options")
        if hasattr(instance, "load"):
            try:
                instance.load()
            except (BackendError, KeyboardInterrupt):
                raise
            except BaseException as exc:  # it may end with sys.exit()
                raise LoadFailed(f"{self._model}: load raised {words_of(exc)} ({line_of(exc, self._code)})") from exc
        try:
            refuse_uncallable(self._signature, instance.predict, of_class=True)  # which may be another than its class's
        except LoadFailed as exc:
            raise LoadFailed(f"{self._model}: {exc}") from exc
        return PythonSession(instance.predict, instance, self._signature, self.spec)

    def close(self) -> None:
        pass


class PythonSession:
    def __init__(self, predict: Callable[..., Any], instance: Any, signature: Signature, spec: ModelSpec) -> None:
        """instance: whose method `predict` is; None: nobody's. spec: without outputs, they are not known yet."""
        self._predict: Callable[..., Any] | None = predict
        self._instance = instance
        self._signature = signature
        self._outputs = spec.output_by_name or None
        # Of other classes, methods of these names may be anything.
        execute = instance if isinstance(instance, triton_python.ExecuteAdapter) else None
        self._declared = execute.declared if execute is not None else None
        self._parameters_of: Callable[[Mapping[str, Any]], Mapping[str, object]] | None = None
        if signature.style == "dict" and takes_parameters(predict, 2):
            from backends.parameters import parameters_of  # what few gateways need

            self._parameters_of = parameters_of if execute is None else dict
        self.cancel = execute.cancel if execute is not None else None

    def run(self, inputs: Tensors, parameters: Mapping[str, object]) -> Tensors:
        predict = self._open()
        with _told():
            outputs = self._asked(predict, call_by_name, inputs, parameters)
        return _copied(self._kept(_checked(outputs)))

    def stream(self, inputs: Tensors, parameters: Mapping[str, object]) -> Generator[Tensors, None, None]:
        predict = self._open()
        with _told(), parts_of(self._asked(predict, stream_by_name, inputs, parameters)) as parts:
            for outputs in parts:
                failed = isinstance(outputs, EarlyFailure)
                yield outputs if failed else _copied(self._kept(_checked(outputs, "yielded")))

    def _asked(
        self, predict: Callable[..., Any], by_name: Callable[..., Any], inputs: Tensors, parameters: Mapping[str, object]
    ) -> Any:
        """What it gives. by_name: calls one of another style than `dict`."""
        inputs = self._given(inputs)
        if self._signature.style != "dict":
            return by_name(predict, self._signature, inputs, self._outputs)
        return predict(inputs) if self._parameters_of is None else predict(inputs, self._parameters_of(parameters))

    def declare(self, outputs: Mapping[str, TensorSpec]) -> None:
        self._outputs = outputs

    def _kept(self, outputs: Tensors) -> Tensors:
        if self._outputs is None:
            return outputs
        if self._declared is not None:
            return self._declared(outputs, self._outputs)
        return _of_lists(outputs, self._outputs, self._signature.of_lists)

    def _open(self) -> Callable[..., Any]:
        if self._predict is None:
            raise SessionLost("the session is closed")
        return self._predict

    def _given(self, inputs: Tensors) -> Tensors:
        if self._signature.style == "rows":
            return inputs  # of which it gets the values only
        return {name: writeable(array) for name, array in inputs.items()}

    def close(self) -> None:
        instance, self._instance, self._predict = self._instance, None, None
        if hasattr(instance, "close"):
            instance.close()


def _copied(outputs: Tensors) -> Tensors:
    """Outputs leave while the model makes the next, perhaps in the same arrays. 0.5 µs; 23 µs of 600 KB (2026-11, 2 cores)."""
    copies = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in outputs.items()}
    return LastPart(copies) if isinstance(outputs, LastPart) else copies


def _of_lists(outputs: Tensors, declared: Mapping[str, TensorSpec], hints: Mapping[str, Hint]) -> Tensors:
    """As declared what numpy cannot tell of a list: of an empty one the datatype and the sizes behind the first, and what hints
    say of whole numbers and truth values."""
    made: Tensors = {}
    for name, array in outputs.items():
        tensor, hint = declared.get(name), hints.get(name) or hints.get(ANY_OUTPUT)
        if not isinstance(array, np.ndarray) or tensor is None:
            continue
        if widened(array.dtype.kind, hint) == tensor.datatype:
            made[name] = array.astype(NUMPY[tensor.datatype])
        elif not array.size:
            shape = (*array.shape, *(max(size, 0) for size in tensor.shape[array.ndim :]))
            made[name] = np.empty(shape, NUMPY[tensor.datatype] if array.dtype == np.float64 else array.dtype)
    return (LastPart if isinstance(outputs, LastPart) else dict)({**outputs, **made}) if made else outputs


@contextmanager
def _told() -> Iterator[None]:
    """What a model raises, as what a session does."""
    try:
        yield
    except BackendError:
        raise
    except MemoryError as exc:
        raise SessionLost(words_of(exc, traced=True), self_inflicted=True) from exc
    except Exception as exc:
        raise ExecutionFailed(words_of(exc, traced=True)) from exc


def _checked(outputs: Any, did: str = "returned") -> Tensors:
    if not isinstance(outputs, dict):
        refuse_nothing(outputs, did)
        raise OutputsRefused(f"predict: expected a dict of arrays by output name, got {type(outputs).__name__}")
    return refuse_lost(outputs)
