"""Bodies of REST inferences that repeat the last ones, but for their tensors' elements: what they mean is known.

Clients send bodies of one shape again and again. What is around the elements, byte by byte, says all of a request but them:
names, datatypes, shapes, what is asked of the outputs, the parameters. So once a body was read and found good, the text around
its elements is remembered with the request that it was. A body with the same text around what is a list of as many such
elements is that request with other elements: JSON knows no place where one list can stand and another of its kind cannot.
Where the elements are bytes behind the JSON, it is the JSON and their number that must be the same.

Only short bodies are remembered, a few of each model version, and one of many once many in a row were in vain. What does not
fit is read as if nothing were remembered, and so is what is wrong, which is where errors come from.
"""

import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import numpy as np

from backends.base import Tensors
from gateway.config import Ragged
from gateway.protocols.json_data import depth_of, numbers_from_json
from gateway.types import InferRequest

LONGEST_BYTES: Final = 16 << 10  # of a body that is remembered: of longer ones, reading the elements is nearly all of the work
_MOST: Final = 4
TRIES: Final = 16  # bodies in a row that are remembered in vain; then few are
SELDOM: Final = 256  # of so many one, until one comes again


class _AsJson(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A body with one tensor, as JSON. begin, end: the text before and behind the innermost list of its elements."""

    begin: bytes
    end: bytes
    request: InferRequest
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    elements: int
    read: Callable[[bytes], list[Any]]
    pack: Callable[..., bytes]


class _AsBytes(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A body with tensors behind its JSON, which is `begin`. tensors: with the places of their first bytes."""

    begin: bytes
    length: int
    request: InferRequest
    tensors: tuple[tuple[str, tuple[int, ...], np.dtype, int], ...]


class RepeatedBodies:
    """Those of one model version. What is remembered never changes, so any thread may look."""

    def __init__(self, ragged: Ragged | None) -> None:
        """ragged: of the model."""
        self._ragged = ragged
        self._json: tuple[_AsJson, ...] = ()
        self._bytes: tuple[_AsBytes, ...] = ()
        self._tries = TRIES

    def request(self, body: bytes, header_bytes: int | None, arrival_ns: int) -> InferRequest | None:
        """The request that a body is; None: it is to be read.

        header_bytes: of the JSON before the tensors; None: all is JSON.
        """
        if header_bytes is None:
            for known in self._json:
                begin, end = known.begin, known.end
                if body.startswith(begin) and body.endswith(end):
                    try:
                        elements = known.read(body[len(begin) : -len(end)])
                        if len(elements) == known.elements:
                            inputs = {known.name: np.ndarray(known.shape, known.dtype, known.pack(*elements))}
                            break
                    except (ValueError, struct.error, OverflowError):
                        continue
            else:
                return None
            like = known.request
        else:
            for text in self._bytes:
                if len(body) == text.length and len(text.begin) == header_bytes and body.startswith(text.begin):
                    inputs = {name: np.ndarray(shape, dtype, body, at) for name, shape, dtype, at in text.tensors}
                    break
            else:
                return None
            like = text.request
        self._tries = TRIES
        if like.deadline_ns is None and not like.parameters:  # as mostly
            return InferRequest(
                like.model, like.version, like.id, inputs, like.rows, arrival_ns, like.outputs, priority=like.priority,
                shape_key=like.shape_key, plain=like.plain,
            )  # fmt: skip
        return _again(like, inputs, arrival_ns)

    def remember_json(self, body: bytes, data: msgspec.Raw, name: str, datatype: str, request: InferRequest) -> None:
        """A body was read, and is this request. data: of its one tensor."""
        if not self._is_worth_it():
            return
        array = request.inputs[name]
        numbers = numbers_from_json(datatype, array.size) if array.size else None
        text = bytes(data)
        if numbers is None or body.count(text) != 1:  # else where in the body it stands would not be known
            return
        begin, _, end = body.partition(text)
        for _ in range(depth_of(data) - 1):  # a list that holds one list is a part of the text around that
            inner = text[1:-1].strip()
            head, _, tail = text.partition(inner)
            begin, end, text = begin + head, tail + end, inner
        read, pack = numbers
        try:
            if len(read(text)) != array.size:
                return
        except ValueError:  # there are several lists
            return
        known = _AsJson(
            begin=begin,
            end=end,
            request=self._like(request),
            name=name,
            shape=array.shape,
            dtype=array.dtype,
            elements=array.size,
            read=read,
            pack=pack,
        )
        self._json = (known, *self._json[: _MOST - 1])

    def remember_bytes(self, body: bytes, header_bytes: int, places: Mapping[str, int], request: InferRequest) -> None:
        """A body was read, and is this request. places: of the first bytes of its tensors, all of which are behind the JSON."""
        arrays = request.inputs
        if not self._is_worth_it() or any(array.dtype.hasobject or not array.size for array in arrays.values()):
            return
        tensors = tuple((name, array.shape, array.dtype, places[name]) for name, array in arrays.items())
        known = _AsBytes(begin=body[:header_bytes], length=len(body), request=self._like(request), tensors=tensors)
        self._bytes = (known, *self._bytes[: _MOST - 1])

    def _like(self, request: InferRequest) -> InferRequest:
        return msgspec.structs.replace(request, inputs={}, plain=request.unmarked and self._ragged is None)

    def _is_worth_it(self) -> bool:
        """Whether to remember the body that was just read."""
        self._tries -= 1
        return self._tries >= 0 or not self._tries % SELDOM


def _again(known: InferRequest, inputs: Tensors, arrival_ns: int) -> InferRequest:
    """The same request with other elements, at another time."""
    deadline_ns = known.deadline_ns
    return InferRequest(
        known.model, known.version, known.id, inputs, known.rows, arrival_ns, known.outputs,
        parameters=known.parameters.copy(),
        deadline_ns=None if deadline_ns is None else deadline_ns + arrival_ns - known.arrival_ns,
        priority=known.priority, shape_key=known.shape_key,
    )  # fmt: skip
