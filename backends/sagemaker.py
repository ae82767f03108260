"""A package as made for SageMaker's PyTorch container, as a class of the python backend: `code/inference.py:SageMakerHandlers`.

Its functions are the handlers: `model_fn`, and `input_fn`, `predict_fn`, `output_fn`, or `transform_fn` in place of these
three; `pre_model_fn` and `model_warmup_fn` as well. Each may have a last parameter `context`. Where one is missing, that of the
old container is taken: see `backends.sagemaker_defaults`. The model is a raw one (`ModelSpec.raw`).

A request runs alone, unless the file says `max_batch_size = N`. Then `predict_fn` gets a list of what `input_fn` gave for each
request, and returns a list of as many predictions, one for each call of `output_fn`; nothing knows of headers then but the
content type and what is accepted.

What a handler raises is the model's fault, except where it is about the type of the content: see `_refused`.

Source: sagemaker-inference 1.10 (transformer) of PyPI; TorchServe 0.12, ts/protocol and ts/context.
"""

import ast
import inspect
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any, ClassVar, Final

import numpy as np

from backends import sagemaker_defaults as defaults
from backends.base import (
    RAW_INPUTS,
    RAW_OUTPUTS,
    BackendError,
    ExecutionFailed,
    InputRefused,
    LoadFailed,
    Tensors,
    TensorSpec,
    words_of,
)
from backends.refusals import Refusal
from backends.regular_file import file_bytes
from backends.sagemaker_lent import lend
from backends.source import line_of, load_object, not_python

CLASS: Final = ":SageMakerHandlers"  # how what names one ends

_BATCHES: Final = "max_batch_size"
_MOST_ROWS: Final = 1 << 20
_ANY: Final = "*/*"
_REFUSALS: Final[dict[int, Refusal]] = {  # by status; of the others from 400 to 499 each is an invalid argument
    404: "not_found", 415: "unsupported_media_type", 429: "limited", 503: "backend_unreachable",
}  # fmt: skip
_HEADERS: Final = "x-amzn-sagemaker-"  # parameters of a request that are headers of its

log = logging.getLogger(__name__)


def adapted(model: str) -> type:
    """A class with `predict` around the handlers of the file that `model` names. Raises: LoadFailed."""
    place = Path(model.removesuffix(CLASS)).absolute()
    rows = batch_size(place)
    inputs, outputs = tensors(rows)

    class Handlers(_Batching if rows else _Single):  # type: ignore[misc]  # it is one of two
        file = place

    Handlers.inputs = [(each.name, each.datatype, each.shape, each.optional) for each in inputs]
    Handlers.outputs = [(each.name, each.datatype, each.shape) for each in outputs]
    return Handlers


def tensors(rows: int) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The inputs and outputs of a package. rows: the most in one batch; 0: it takes one request at a time."""
    shape = (-1,) if rows else (1,)
    inputs = tuple(TensorSpec(name, "BYTES", shape, optional=name != "body") for name in RAW_INPUTS)
    return inputs, tuple(TensorSpec(name, "BYTES", shape) for name in RAW_OUTPUTS)


def batch_size(file: Path) -> int:
    """What a file of handlers says of batches, without running it; 0: nothing. Raises: LoadFailed."""
    try:
        body = ast.parse(file_bytes(file), filename=str(file)).body
    except OSError as exc:
        raise LoadFailed(f"{file}: cannot be read: {exc.strerror}") from exc
    except (SyntaxError, ValueError) as exc:
        raise LoadFailed(not_python(file, exc)) from exc
    for node in body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == _BATCHES for target in targets):
            rows = node.value.value if isinstance(node.value, ast.Constant) else None
            if type(rows) is not int or not 1 <= rows <= _MOST_ROWS:
                raise LoadFailed(f"{file}:{node.lineno}: {_BATCHES}: expected a number from 1 to {_MOST_ROWS}, written out")
            return rows
    return 0


class _Handlers:
    """The handlers of one package, and the model that they have loaded. For one session."""

    file: ClassVar[Path]
    inputs: ClassVar[Sequence[tuple[Any, ...]]]
    outputs: ClassVar[Sequence[tuple[Any, ...]]]

    def __init__(
        self, *, model_dir: str = "", model_name: str = "", default_accept: str = defaults.JSON, packages: str = ""
    ) -> None:
        """model_dir: empty: the folder above that of the file. model_name: as the context has it; empty: model_dir's own.
        default_accept: where a client accepts anything.

        packages: a folder of what the handlers import, behind all that is installed. Raises: LoadFailed.
        """
        if packages and packages not in sys.path:
            if not Path(packages).is_dir():
                make = f"pip install --target {quote(packages)} -r {quote(str(self.file.with_name('requirements.txt')))}"
                raise LoadFailed(
                    f"{self.file}: packages: no such folder: {packages}: make it by `{make}`, or start from the model"
                )
            sys.path.append(packages)
        lend()
        self._default_accept = default_accept
        try:
            module = sys.modules[load_object(f"{self.file}:__name__")]
        except LoadFailed as exc:
            raise LoadFailed(str(exc).replace(f"{self.file}:__name__", str(self.file))) from exc
        # Which asks PyTorch for a GPU, once it is imported.
        self.context = Context(model_dir or str(self.file.parent.parent), model_name)
        self._own: dict[str, Any] = {name: found for name in _ARGUMENTS if (found := getattr(module, name, None)) is not None}
        if "transform_fn" in self._own and (others := sorted(self._own.keys() & {"input_fn", "predict_fn", "output_fn"})):
            raise LoadFailed(f"{self.file}: transform_fn stands for {', '.join(others)}: keep it, or them")
        self._handlers = {name: self._handler(name) for name in _ARGUMENTS}
        self._begin("pre_model_fn")
        self._model = self._begin("model_fn")
        self._begin("model_warmup_fn", self._model)

    def _handler(self, name: str) -> Callable[..., Any]:
        """A handler that is called without the context, whether it has that or not. Raises: LoadFailed."""
        function: Callable[..., Any] = self._own[name] if name in self._own else getattr(defaults, name, _nothing)
        arguments = _ARGUMENTS[name]
        try:
            taken = len(inspect.signature(function).parameters) if function is not _nothing else arguments
        except (TypeError, ValueError):
            taken = arguments
        if taken == arguments:
            return function
        if taken == arguments + 1:
            return lambda *given: function(*given, self.context)
        raise LoadFailed(f"{self.file}: {name}: takes {taken} arguments, expected {arguments}, or `context` behind them")

    def _begin(self, name: str, *given: Any) -> Any:
        """Call what is called once, before any request. Raises: LoadFailed."""
        try:
            return self._handlers[name](self.context.model_dir, *given)
        except (BackendError, KeyboardInterrupt):
            raise
        except BaseException as exc:  # it may end with sys.exit()
            raise LoadFailed(f"{self.file}: {name} raised {words_of(exc)} ({line_of(exc, str(self.file))})") from exc

    def _read(self, body: bytes, content_type: str) -> tuple[bytes | str, str | None]:
        """A body as handlers get it, and its type; None: it has none. Raises: InputRefused."""
        if content_type not in defaults.TEXTS:
            return body, content_type or None
        try:
            return body.decode(), content_type
        except UnicodeDecodeError as exc:
            raise InputRefused(f"the body is {content_type}, but no UTF-8: {exc}") from exc

    def _input(self, data: bytes | str, content_type: str | None) -> Any:
        with _refused("input_fn", content_type):
            return self._handlers["input_fn"](data, content_type)

    def _output(self, prediction: Any, accept: str) -> tuple[bytes, str]:
        with _refused("output_fn", accept):
            return _answer(self._handlers["output_fn"](prediction, accept), accept)

    def _accepted(self, accept: str) -> str:
        return self._default_accept if accept in ("", _ANY) else accept


class _Single(_Handlers):
    """One request at a time."""

    def predict(self, inputs: Tensors, parameters: Mapping[str, object]) -> Tensors:
        headers = {name: str(value) for name, value in parameters.items() if name.startswith(_HEADERS)}
        return _columns([self._one(headers, *row) for row in _rows(inputs)])

    def _one(self, headers: Mapping[str, str], body: bytes, content_type: str, accept: str) -> tuple[bytes, str]:
        self.context.begin({"content-type": content_type, "accept": accept, **headers})
        data, kind = self._read(body, content_type)
        accept = self._accepted(accept)
        if "transform_fn" in self._own:
            with _refused("transform_fn", kind, accept):
                answer = _answer(self._handlers["transform_fn"](self._model, data, kind, accept), accept)
        else:
            answer = self._output(self._handlers["predict_fn"](self._input(data, kind), self._model), accept)
        self.context.check_status()
        return answer


class _Batching(_Handlers):
    """As many requests at a time as come together."""

    def __init__(
        self, *, model_dir: str = "", model_name: str = "", default_accept: str = defaults.JSON, packages: str = ""
    ) -> None:
        super().__init__(model_dir=model_dir, model_name=model_name, default_accept=default_accept, packages=packages)
        if "predict_fn" not in self._own:
            raise LoadFailed(f"{self.file}: {_BATCHES}: is of a `predict_fn` that takes lists, and there is none")

    def predict(self, inputs: Tensors) -> Tensors:
        rows = _rows(inputs)
        data = [self._input(*self._read(body, content_type)) for body, content_type, _ in rows]
        predictions = self._handlers["predict_fn"](data, self._model)
        if not isinstance(predictions, list | tuple) or len(predictions) != len(rows):
            given = f"{len(predictions)}" if isinstance(predictions, list | tuple) else type(predictions).__name__
            raise ExecutionFailed(f"predict_fn: expected a list of {len(rows)} predictions, as {_BATCHES} is set, got {given}")
        accepted = [self._accepted(accept) for _, _, accept in rows]
        return _columns([self._output(each, accept) for each, accept in zip(predictions, accepted, strict=True)])


def _nothing(*given: Any, **named: Any) -> None:
    """In place of a handler that a package may leave out, or of what counts."""


# How many arguments the old container gives each, before `context`.
_ARGUMENTS: Final = {
    "pre_model_fn": 1, "model_fn": 1, "model_warmup_fn": 2,
    "transform_fn": 4, "input_fn": 2, "predict_fn": 2, "output_fn": 2,
}  # fmt: skip


@contextmanager
def _refused(handler: str, *types: str | None) -> Iterator[None]:
    """Tell what a handler raises about the type of the content, or as a client's error, from what is the model's fault.

    That is an UnsupportedFormatError, as the old container's own handlers raise; what has a status from 400 to 499, as
    sagemaker_inference's errors have; and what names one of the types in its words: ValueError(f"unsupported: {content_type}").
    Raises: InputRefused.
    """
    try:
        yield
    except (BackendError, MemoryError):
        raise
    except Exception as exc:
        code = _refusal(getattr(exc, "status_code", None))
        said = words_of(exc, traced=True)
        named = any("/" in name and name in said for name in types if name)
        if named or type(exc).__name__ == "UnsupportedFormatError":
            code = "unsupported_media_type"
        if code is not None:
            raise InputRefused(f"{handler}: {' '.join(said.split())}", code=code) from exc
        raise


def _refusal(status: object) -> Refusal | None:
    """What a status means that a handler gives, in words that have it as theirs; None: no error, or the model's own."""
    if not isinstance(status, int):
        return None
    return _REFUSALS.get(status, "invalid_argument" if 400 <= status < 500 else None)


def _rows(inputs: Tensors) -> list[tuple[bytes, str, str]]:
    """Body, content type and accept of each request."""
    bodies = [_bytes(body) for body in inputs["body"]]
    content_types, accepts = (
        [_bytes(each).decode("latin-1") for each in inputs[name]] if name in inputs else [""] * len(bodies)
        for name in RAW_INPUTS[1:]
    )
    return list(zip(bodies, content_types, accepts, strict=True))


def _bytes(element: Any) -> bytes:
    return element.encode() if isinstance(element, str) else bytes(element)


def _columns(answers: Sequence[tuple[bytes, str]]) -> Tensors:
    bodies, types = np.empty(len(answers), object), np.empty(len(answers), object)
    bodies[:] = [body for body, _ in answers]
    types[:] = [content_type.encode("latin-1", "replace") for _, content_type in answers]
    return dict(zip(RAW_OUTPUTS, (bodies, types), strict=True))


def _answer(given: Any, accept: str) -> tuple[bytes, str]:
    """What a handler gave as TorchServe sends it, and its type. Raises: ExecutionFailed."""
    content_type = accept
    if isinstance(given, tuple):
        if len(given) != 2:
            raise ExecutionFailed(f"expected an answer, or a tuple of it and its content type, got {len(given)} values")
        given, content_type = given
    if isinstance(given, bytes | bytearray | memoryview):
        return bytes(given), str(content_type or "")
    if isinstance(given, str):
        return given.encode(), str(content_type or "")
    try:
        return json.dumps(given, indent=2).encode(), str(content_type or "")
    except (TypeError, ValueError) as exc:
        raise ExecutionFailed(f"got {type(given).__name__}: expected bytes, text, or what JSON can hold") from exc


class _HeaderNames(dict[str, str]):
    """Headers by name, whose case is all the same."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        super().__init__({name.lower(): value for name, value in headers.items()})

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name.lower() if isinstance(name, str) else name)

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)


class _NoMetrics:
    """In place of TorchServe's metrics: takes what handlers add, and drops it."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith("add_"):
            raise AttributeError(f"context.metrics has no {name!r} here, only add_…, which is left aside")
        return _nothing


class Context:
    """What a handler can ask of its surroundings, as TorchServe's context has it. Its request is the one that is at hand."""

    def __init__(self, model_dir: str, model_name: str = "") -> None:
        self.model_dir = model_dir
        self.model_name = model_name or Path(model_dir).name
        self.manifest: dict[str, Any] = {}
        self.system_properties = {
            "model_dir": model_dir, "gpu_id": _gpu(), "batch_size": 1, "server_name": "gateway", "server_version": "1",
        }  # fmt: skip
        self.request_processor = [self]
        self.metrics = _NoMetrics()
        self._headers = _HeaderNames({})
        self._status: tuple[int, str] = (200, "")
        self._told = False

    def begin(self, headers: Mapping[str, str]) -> None:
        """Of the next request."""
        self._headers, self._status = _HeaderNames({name: value for name, value in headers.items() if value}), (200, "")

    def check_status(self) -> None:
        """Raises: InputRefused or ExecutionFailed, if a handler has set one that is an error."""
        code, phrase = self._status
        why = _refusal(code)
        if why is not None:
            raise InputRefused(phrase or f"the model answers with status {code}", code=why)
        if code >= 500:
            raise ExecutionFailed(phrase or f"the model answers with status {code}")

    # as TorchServe calls them

    def get_request_properties(self) -> Mapping[str, str]:
        return self._headers

    def get_request_property(self, key: str) -> str | None:
        return self._headers.get(key)  # type: ignore[no-any-return]  # texts are all that it holds

    def get_all_request_header(self, idx: int = 0) -> Mapping[str, str]:
        return self._headers

    def get_request_header(self, idx: int, key: str) -> str | None:
        return self.get_request_property(key)

    def get_request_id(self, idx: int = 0) -> str:
        return self.get_request_property(f"{_HEADERS}inference-id") or ""

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        self._status = (code, phrase)

    def report_status(self, code: int, reason_phrase: str | None = None) -> None:
        self.set_response_status(code, reason_phrase or "")

    def set_response_content_type(self, idx: int, value: str) -> None:
        """Nothing: the old container sets it once more, behind the handlers. A handler returns it beside its answer."""

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        if not self._told:
            self._told = True
            log.warning("%s: headers of answers are left aside, such as %s", self.model_dir, key)


def _gpu() -> int | None:
    torch = sys.modules.get("torch")
    return 0 if torch is not None and torch.cuda.is_available() else None
