"""Whether a model is the one that is meant, or that something was made from: by SHA-256."""

import hashlib
import hmac
from pathlib import Path

from backends.artifacts import ONNX, identify
from backends.base import LoadFailed
from backends.onnx_file import weights_beside
from backends.regular_file import opened_file
from backends.source import is_source


def digest(model: str) -> str:
    """Of the file that `model` names, in hexadecimal. Raises: OSError."""
    path = model.rpartition(":")[0] if is_source(model) else model
    with opened_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_digest(model: str, wanted: str) -> None:
    """Raises: LoadFailed, for another file than that of this digest."""
    try:
        found = digest(model)
    except OSError as exc:
        raise LoadFailed(f"{model!r}: its sha256 cannot be known: {exc.strerror}; expected a file that can be read") from exc
    if not hmac.compare_digest(found, wanted):
        raise LoadFailed(
            f"{model!r}: its sha256 is {found}, expected {wanted}: it is not the file that is meant; put that there, or "
            "correct `sha256` of the backend"
        )


def artifact_digest(path: Path) -> str:
    """Of a file with its weights where they are beside it, or of all files of a folder. Raises: OSError."""
    if path.is_dir():
        files = sorted(path.rglob("*"))
    else:
        named = weights_beside(path) if identify(path) == ONNX else ()
        # torch.onnx calls them so.
        files = sorted({path, path.with_name(f"{path.name}.data"), *(path.parent / name for name in named)})
    return hashlib.sha256(repr([(file.name, file_digest(file)) for file in files]).encode()).hexdigest()


def file_digest(path: Path) -> str | None:
    """In hexadecimal; None: there is no such file. Raises: OSError."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
