"""What SageMaker's PyTorch container does where a package has no function of its own: TorchScript, and JSON, CSV and npy.

Byte for byte, with two exceptions, which both go better here: an npy body that holds pickled objects is refused, as reading it
would run what a client sends; and a body that cannot be read is the client's fault, not the server's.

Source: sagemaker-inference 1.10 (decoder, encoder) and sagemaker-pytorch-inference 2.0 (default handler), of PyPI.
"""

import io
import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np

from backends.base import InputRefused, LoadFailed, words_of
from backends.regular_file import special

JSON: Final = "application/json"
CSV: Final = "text/csv"
NPY: Final = "application/x-npy"
TEXTS: Final = (JSON, CSV)
"""Types whose bodies handlers get as text."""

_USUAL_FILE: Final = "model.pt"


def model_fn(model_dir: str) -> Any:
    """The one TorchScript file of a package, on the GPU if there is one. Raises: LoadFailed."""
    folder = Path(model_dir)
    path = folder / _USUAL_FILE
    if not path.exists():
        found = sorted(file for file in folder.iterdir() if not file.is_dir() and file.suffix in (".pt", ".pth"))
        if len(found) != 1:
            names = ", ".join(file.name for file in found) or "none"
            raise LoadFailed(f"{folder}: expected one .pt or .pth file, got {names}: or write `model_fn(model_dir)`")
        (path,) = found
    if what := special(path):
        raise LoadFailed(f"{path}: {what}")
    import torch

    try:
        model = torch.jit.load(str(path), map_location=_device())  # type: ignore[no-untyped-call]  # untyped in torch 2.13
        return model.to(_device())
    except RuntimeError as exc:
        raise LoadFailed(f"{path}: not TorchScript: export it with torch.jit.trace, or write `model_fn(model_dir)`") from exc


def input_fn(body: bytes | str, content_type: str | None) -> Any:
    """A tensor, on the device of the model. Raises: InputRefused."""
    read = READ.get(content_type or "")
    if read is None:
        raise unsupported("content type", content_type, READ)
    import torch

    try:
        array = read(body)
        tensor = torch.FloatTensor(array) if content_type in TEXTS else torch.from_numpy(array)
    except (TypeError, ValueError, RecursionError, OverflowError) as exc:
        said = words_of(exc, traced=True)
        raise InputRefused(f"the body cannot be read as {content_type}: expected numbers: {said}") from exc
    return tensor.to(_device())


def predict_fn(data: Any, model: Any) -> Any:
    import torch

    with torch.no_grad():
        model = model.to(_device())
        data = data.to(_device())
        model.eval()
        return model(data)


def output_fn(prediction: Any, accept: str) -> bytes | str:
    """Raises: InputRefused."""
    import torch

    if type(prediction) is torch.Tensor:
        prediction = prediction.detach().cpu().numpy().tolist()
    for content_type in accept.replace(" ", "").split(","):
        if content_type in WRITTEN:
            return WRITTEN[content_type](prediction)
    raise unsupported("accept", accept, WRITTEN)


def unsupported(what: str, given: str | None, known: Any) -> InputRefused:
    """what: `content type` or `accept`."""
    return InputRefused(f"{what} {given!r} is none that the model knows: {', '.join(known)}", code="unsupported_media_type")


def _device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _from_json(text: Any) -> np.ndarray:
    return np.array(json.loads(text))


def _from_csv(text: Any) -> np.ndarray:
    return np.genfromtxt(io.StringIO(text), dtype=None, delimiter=",")


def _from_npy(body: Any) -> np.ndarray:
    """Raises: ValueError, also for one that says it is longer than it is: to make room for that may end a session."""
    file = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
        wanted = prod(shape) * dtype.itemsize
        if not dtype.hasobject and wanted > len(body) - file.tell():  # of objects the rest is a pickle, which is refused
            raise ValueError(f"{len(body) - file.tell()} bytes behind its head, expected {wanted} ({dtype} {shape})")
        array: np.ndarray = np.load(io.BytesIO(body), allow_pickle=False)
    except (ArithmeticError, MemoryError, TypeError) as exc:
        raise ValueError(f"no npy file: {exc}") from exc
    return array


def _to_json(prediction: Any) -> str:
    def plain(value: Any) -> Any:
        if hasattr(value, "tolist"):
            return value.tolist()
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")

    return json.dumps(prediction, default=plain)


def _to_csv(prediction: Any) -> str:
    stream = io.StringIO()
    np.savetxt(stream, prediction, delimiter=",", fmt="%s")
    return stream.getvalue()


def _to_npy(prediction: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, prediction)
    return buffer.getvalue()


READ: Final[dict[str, Callable[[Any], np.ndarray]]] = {JSON: _from_json, CSV: _from_csv, NPY: _from_npy}
"""Bodies to arrays, by content type."""
WRITTEN: Final[dict[str, Callable[[Any], bytes | str]]] = {JSON: _to_json, CSV: _to_csv, NPY: _to_npy}
"""And back."""
