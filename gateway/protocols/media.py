"""What the headers of an invocation say of its body and of the answer that is wanted, pure.

SageMaker passes few headers on: Content-Type, Accept and some of its own. So Content-Type says there how much of a body is JSON
before binary tensors, as in Triton's container: `application/vnd.sagemaker-triton.binary+json;json-header-size=N`.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

from gateway.errors import InvalidArgument

TRITON: Final = "application/vnd.sagemaker-triton.binary+json"

TAKEN: Final = {
    "application/json": "json",
    TRITON: "v2",
    "text/csv": "csv",
    "application/x-npy": "npy",
    "application/octet-stream": "raw",
    "text/plain": "text",
}
"""Content-Type -> kind of body."""

GIVEN: Final = {
    "application/json": "json",
    TRITON: "json",
    "text/csv": "csv",
    "application/x-npy": "npy",
    "application/octet-stream": "raw",
    "text/plain": "text",
    "text/event-stream": "events",
}
"""Accept -> kind of answer."""

_ANY: Final = {"": "", "*/*": "", "application/*": "", "text/*": "csv"}
_BYTES: Final = frozenset(("image", "audio", "video"))  # whatever they hold, the model reads it
_HEADER_SIZE: Final = "json-header-size"
_LONGEST: Final = 1 << 10  # of an Accept, or of Custom-Attributes, as SageMaker's API has it: to read 30 kB takes up to 31 ms

ATTRIBUTES: Final = frozenset(("model", "version", "request_id", "traceparent"))
"""The keys of Custom-Attributes that mean something here."""


class Form(NamedTuple):
    """How a body is written.

    kind: a value of TAKEN; "v1": JSON that is no v2. header: what says how many bytes of JSON are before binary tensors; None:
    nothing does. titled: CSV with names in its first line.
    """

    kind: str
    header: bytes | None = None
    titled: bool = False


@lru_cache(maxsize=128)  # clients send the same ones with every request
def form_of(content_type: bytes) -> Form | None:
    """What a Content-Type says; none is JSON. None: it is not taken."""
    media, _, rest = content_type.decode("latin-1").partition(";")
    media = media.strip().lower()
    kind = "raw" if media.partition("/")[0] in _BYTES else TAKEN.get(media or "application/json")
    if kind is None:
        return None
    parameters = _parameters(rest)
    size = parameters.get(_HEADER_SIZE) if kind == "v2" else None
    return Form(kind, None if size is None else size.encode("latin-1"), parameters.get("header", "").lower() == "present")


@lru_cache(maxsize=128)
def answer_of(accept: bytes) -> str | None:
    """What an Accept header likes most of GIVEN; "": anything will do. None: it takes nothing that is given."""
    best, liked = None, 0.0
    for media, _, likes in ranges(accept):
        kind = _ANY.get(media, GIVEN.get(media))
        if kind is not None and likes > liked:
            best, liked = kind, likes
    return best


def ranges(accept: bytes) -> Iterator[tuple[str, dict[str, str], float]]:
    """Each media range of an Accept header, in lower case, with its parameters and how well it is liked: 0, where that cannot
    be read. RFC 9110, 12.5.1. One of no sane length says nothing.
    """
    for entry in accept.decode("latin-1").split(",") if len(accept) <= _LONGEST else ("",):
        media, _, rest = entry.partition(";")
        parameters = _parameters(rest)
        yield media.strip().lower(), parameters, _quality(parameters.get("q", "1"))


def attributes_of(value: bytes) -> dict[str, str]:
    """What Custom-Attributes says: `model=linear,version=2`, also with semicolons. What is none of ATTRIBUTES is left alone.

    Raises: InvalidArgument, if it is longer than SageMaker lets it be.
    """
    if len(value) > _LONGEST:
        raise InvalidArgument(
            f"X-Amzn-SageMaker-Custom-Attributes has {len(value)} bytes: expected at most {_LONGEST}, which SageMaker allows"
        )
    found: dict[str, str] = {}
    for part in re.split("[,;]", value.decode("utf-8", "replace")):
        key, _, text = part.partition("=")
        if (key := key.strip().lower()) in ATTRIBUTES:
            found[key] = text.strip()
    return found


def _parameters(text: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in text.split(";"))
    return {name.strip().lower(): value.strip().strip('"') for name, _, value in pairs}


def _quality(text: str) -> float:
    return float(text) if re.fullmatch(r"[01](\.\d{0,3})?", text) else 0.0
