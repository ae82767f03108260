"""Whether a model's file is the one that is meant: by its SHA-256."""

import hashlib
import hmac

from backends.base import LoadFailed
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
