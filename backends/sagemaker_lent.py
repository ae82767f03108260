"""What handlers import from `sagemaker_inference`, as the old container has it: content types, decoder, encoder, errors.

It is lent where it is not installed. Source: sagemaker-inference 1.10 of PyPI.
"""

import importlib.util
import sys
from types import ModuleType
from typing import Any, Final

from backends import sagemaker_defaults as defaults

_NAME: Final = "sagemaker_inference"


class UnsupportedFormatError(Exception):
    """A type of content that is not known."""

    def __init__(self, content_type: object, **more: object) -> None:
        super().__init__(f"Content type {content_type} is not supported by this framework.")


class BaseInferenceToolkitError(Exception):
    """An error with the status that a client is to get."""

    def __init__(self, status_code: int, message: str, phrase: str) -> None:
        self.status_code, self.message, self.phrase = status_code, message, phrase
        super().__init__(status_code, message, phrase)


class GenericInferenceToolkitError(BaseInferenceToolkitError):
    """The same, with words of its own where none are given."""

    def __init__(self, status_code: int, message: str | None = None, phrase: str | None = None) -> None:
        message = message or "Invalid Request"
        super().__init__(status_code, message, phrase or message)


def lend() -> None:
    """Let handlers import it, unless it is installed."""
    if _NAME in sys.modules or importlib.util.find_spec(_NAME) is not None:
        return
    package = ModuleType(_NAME)
    package.__path__ = []  # it has parts
    for name, contents in _PARTS.items():
        part = ModuleType(f"{_NAME}.{name}")
        part.__dict__.update(contents)
        setattr(package, name, part)
        sys.modules[part.__name__] = part
    sys.modules[_NAME] = package


def _decode(obj: Any, content_type: str) -> Any:
    if content_type not in defaults.READ:
        raise UnsupportedFormatError(content_type)
    return defaults.READ[content_type](obj)


def _encode(array_like: Any, content_type: str) -> Any:
    if content_type not in defaults.WRITTEN:
        raise UnsupportedFormatError(content_type)
    return defaults.WRITTEN[content_type](array_like)


def _parse_accept(accept: str) -> list[str]:
    return accept.replace(" ", "").split(",")


_PARTS: Final[dict[str, dict[str, Any]]] = {
    "content_types": {
        "JSON": defaults.JSON, "CSV": defaults.CSV, "NPY": defaults.NPY, "NPZ": "application/x-npz", "ANY": "*/*",
        "OCTET_STREAM": "application/octet-stream", "UTF8_TYPES": list(defaults.TEXTS),
    },
    "decoder": {"decode": _decode},
    "encoder": {"encode": _encode, "SUPPORTED_CONTENT_TYPES": set(defaults.WRITTEN)},
    "errors": {
        each.__name__: each for each in (UnsupportedFormatError, BaseInferenceToolkitError, GenericInferenceToolkitError)
    },
    "utils": {"parse_accept": _parse_accept},
}  # fmt: skip
