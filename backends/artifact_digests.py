"""What something was made from, or makes answers, by SHA-256: a model's file with its weights, or all of a folder."""

import hashlib
from pathlib import Path

from backends.artifacts import ONNX, identify
from backends.onnx_file import weights_beside


def artifact_digest(path: Path) -> str:
    """Of a file with its weights where they are beside it, or of all files of a folder. Raises: OSError."""
    if path.is_dir():
        files = [file for file in path.rglob("*") if "__pycache__" not in file.relative_to(path).parts]
    else:
        files = [path, *weights_of(path)]
    return hashlib.sha256(repr([(file.name, file_digest(file)) for file in sorted(files)]).encode()).hexdigest()


def weights_of(path: Path) -> list[Path]:
    """Where a model's file may keep weights beside it, in order: not all need be there. Raises: OSError."""
    named = weights_beside(path) if path.is_file() and identify(path) == ONNX else ()
    beside = {path.with_name(f"{path.name}.data"), *(path.parent / name for name in named)}  # torch.onnx calls them so
    return sorted(beside - {path})


def file_digest(path: Path) -> str | None:
    """In hexadecimal; None: there is no such file. Raises: OSError."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
