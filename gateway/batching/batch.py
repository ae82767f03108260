"""One closed batch: which rows of which requests, joined to the model's inputs and cut back from its outputs."""

from collections.abc import Collection, Hashable, Mapping
from math import prod
from typing import ClassVar, Final

import msgspec
import numpy as np

from backends.base import DEADLINE_NS, REQUEST_ROWS, Tensors
from gateway.config import Ragged
from gateway.errors import BackendFailed
from gateway.types import BatchTrace, InferRequest

_MOST_PADDING_BYTES: Final = 16 << 20


class Part(msgspec.Struct):
    """Rows `start` to `start + rows` of one request; the whole request unless it is larger than a batch may be."""

    request: InferRequest
    start: int
    rows: int

    @property
    def whole(self) -> bool:
        return self.rows == self.request.rows


class Batch(msgspec.Struct, kw_only=True, eq=False):
    """Requests that run in one execution, in the order they were dispatched.

    Life: closed by the batcher (`closed_ns`, `reason`), concat and split on a worker's thread, then given back to
    `Batcher.finished`. `str()` is its trace.

    padded_rows: the rows the model sees. group: what the batcher keyed its queue by. left_rows: what was left waiting.
    expected_ns: predicted service time, 0 if the policy does not predict. busy: workers that run with it, its own included.
    batched: False for a model without a batch dimension, whose one request passes through untouched.
    trace: where one of its requests is traced. apart: the model is told which rows are whose.
    """

    NOT_KEPT: ClassVar = frozenset(("trace", "apart"))  # by a recording: they decide nothing

    parts: list[Part]
    rows: int
    padded_rows: int
    reason: str
    closed_ns: int
    group: Hashable = None
    left_rows: int = 0
    expected_ns: int = 0
    ragged: Ragged | None = None
    batched: bool = True
    busy: int = 1
    trace: BatchTrace | None = None
    apart: bool = False

    @property
    def oldest_ns(self) -> int:
        """The earliest arrival among the parts."""
        return min([part.request.arrival_ns for part in self.parts])

    def __str__(self) -> str:
        return (
            f"closed={self.reason} requests={len(self.parts)} rows={self.rows} padded={self.padded_rows} left={self.left_rows} "
            f"waited_ms={(self.closed_ns - self.oldest_ns) / 1e6:.3f} expected_ms={self.expected_ns / 1e6:.3f} "
            f"group={self.group}"
        )

    def concat(self, *, kept: bool = True) -> Tensors:
        """Join the parts' inputs.

        Shapes: (padded_rows, *per_row); ragged inputs padded along axis 1 to the smallest bucket that holds the longest.
        Padding rows repeat the last row: always a valid input, which zeros need not be.
        Ownership: views on the request for a single part that needs no padding, else new arrays. kept: these views are
        read-only, as the request may run again. Thread: the worker's.
        Raises: ValueError (numpy's), if the requests' shapes do not fit together although their shape keys are equal.
        """
        parts = self.parts
        first = parts[0]
        inputs = first.request.inputs
        if kept and len(parts) == 1:
            inputs = _read_only(inputs)
        if not self.batched:
            return inputs
        missing_rows = self.padded_rows - self.rows
        if len(parts) == 1 and not missing_rows and self.ragged is None:
            if first.whole:
                return inputs
            end = first.start + first.rows
            return {name: array[first.start : end] for name, array in inputs.items()}
        joined: Tensors = {}
        for name in inputs:
            pieces = [
                array if part.rows == part.request.rows else array[part.start : part.start + part.rows]
                for part in parts
                for array in ((inputs if part is first else part.request.inputs)[name],)
            ]
            if missing_rows:
                pieces.append(np.repeat(pieces[-1][-1:], missing_rows, axis=0))
            if self.ragged is not None and name in self.ragged.pad:
                joined[name] = _join_ragged(pieces, self.ragged, name, self.padded_rows)
            else:
                joined[name] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return joined

    def asked(self) -> Mapping[str, object]:
        """The parameters of its requests, which are the same, and the rows of each for a model that answers them apart."""
        parameters = self.parts[0].request.parameters
        return {**parameters, REQUEST_ROWS: ",".join([str(part.rows) for part in self.parts])} if self.apart else parameters

    def parameters(self) -> Mapping[str, object]:
        """What the model is told beside the tensors: what the requests ask, until when anyone waits, and the trace."""
        first = self.parts[0].request
        parameters = self.asked() if self.apart else first.parameters
        if self.trace is not None and self.trace.told is not None:
            parameters = {**parameters, **self.trace.told}
        if first.deadline_ns is None:
            return parameters
        deadlines_ns = [part.request.deadline_ns for part in self.parts if part.request.deadline_ns is not None]
        if len(deadlines_ns) < len(self.parts):
            return parameters
        return {**parameters, DEADLINE_NS: max(deadlines_ns)}

    def split(self, outputs: Tensors, open_outputs: Collection[str] = ()) -> list[Tensors]:
        """Cut the model's outputs back into one set per part, in order.

        Shapes: every output is (at least rows, *per_row); padding rows are dropped, `ragged.crop` outputs cut along axis 1 to
        the request's own length. open_outputs: those to cut where they are as long as an input was padded to, of what `crop`
        says nothing. Ownership: views. Raises: BackendFailed, if an output has fewer rows than the batch.
        """
        if not self.batched:
            return [outputs]
        for name, array in outputs.items():
            shape = array.shape
            if not shape or shape[0] < self.rows:
                raise BackendFailed(f"output '{name}' has shape {list(array.shape)}, expected {self.rows} rows as in the batch")
        if len(self.parts) == 1 and self.padded_rows == self.rows and self.ragged is None:
            return [outputs]
        own_lengths = self._own_lengths(outputs, open_outputs)
        pieces: list[Tensors] = []
        at = 0
        if len(outputs) == 1 and not own_lengths:  # as mostly: at half the price
            ((name, array),) = outputs.items()
            for part in self.parts:
                end = at + part.rows
                pieces.append({name: array[at:end]})
                at = end
            return pieces
        for index, part in enumerate(self.parts):
            end = at + part.rows
            piece = {name: array[at:end] for name, array in outputs.items()}
            for name, lengths in own_lengths.items():
                piece[name] = piece[name][:, : lengths[index]]
            pieces.append(piece)
            at = end
        return pieces

    def _own_lengths(self, outputs: Tensors, open_outputs: Collection[str]) -> dict[str, list[int]]:
        """By output that is cut along axis 1: each part's length."""
        ragged = self.ragged
        if ragged is None:
            return {}
        if ragged.crop is not None:
            return {
                name: [ragged_length(part.request, ragged) for part in self.parts] for name in ragged.crop if name in outputs
            }
        if not any(name in outputs for name in open_outputs):
            return {}
        found: dict[str, list[int]] = {}
        given = {
            name: [part.request.inputs[name].shape[1] for part in self.parts]
            for name in ragged.pad
            if name in self.parts[0].request.inputs
        }
        for name in open_outputs:
            shape = outputs[name].shape if name in outputs else ()
            # Where inputs of several lengths were padded alike, the longest: nothing is lost of what may be the other's.
            alike = [
                lengths for lengths in given.values() if len(shape) > 1 and bucket_of(max(lengths), ragged.buckets) == shape[1]
            ]
            if alike:
                found[name] = [max(lengths) for lengths in zip(*alike, strict=True)]
        return found


def _read_only(inputs: Tensors) -> Tensors:
    for array in inputs.values():
        if array.flags.writeable:
            break
    else:
        return inputs  # as mostly
    views = {name: array.view() for name, array in inputs.items()}
    for view in views.values():
        view.flags.writeable = False
    return views


class Padding:
    """The bytes that a batch of ragged requests is padded with, while it is formed: bounded, whatever lengths come together.

    Requests in one bucket of lengths need none: they are padded by no more than the model's buckets ask for.
    """

    def __init__(self, ragged: Ragged, parts: list[Part]) -> None:
        """parts: what is in the batch already."""
        self._ragged = ragged
        self._rows = 0
        self._widest = dict.fromkeys(ragged.pad, 0)
        self._given_bytes = 0
        for part in parts:
            self._add(*self._with(part.request, part.rows)[:3])

    def takes(self, request: InferRequest, rows: int) -> bool:
        """Add rows of a request, if they are the first or do not make it too much padding."""
        all_rows, widest, given_bytes, padded_bytes = self._with(request, rows)
        if self._rows and padded_bytes - given_bytes > _MOST_PADDING_BYTES:
            return False
        self._add(all_rows, widest, given_bytes)
        return True

    def _with(self, request: InferRequest, rows: int) -> tuple[int, dict[str, int], int, int]:
        """All rows, the widest of each input, and bytes without and with padding, if these rows were added."""
        all_rows = self._rows + rows
        widest = dict(self._widest)
        given_bytes, padded_bytes = self._given_bytes, 0
        for name, width in self._widest.items():
            array = request.inputs.get(name)
            if array is not None:
                step_bytes = array.itemsize * prod(array.shape[2:])
                widest[name] = width = max(width, array.shape[1])
                given_bytes += rows * array.shape[1] * step_bytes
                padded_bytes += all_rows * bucket_of(width, self._ragged.buckets) * step_bytes
        return all_rows, widest, given_bytes, padded_bytes

    def _add(self, rows: int, widest: dict[str, int], given_bytes: int) -> None:
        self._rows, self._widest, self._given_bytes = rows, widest, given_bytes


def ragged_length(request: InferRequest, ragged: Ragged | None) -> int:
    """The longest axis 1 among a request's padded inputs, or text in bytes; 0 if it has none."""
    if ragged is None:
        return 0
    inputs = request.inputs
    lengths = [inputs[name].shape[1] for name in ragged.pad if name in inputs]
    lengths += [text_length(inputs[name]) for name in ragged.text if name in inputs]
    return max(lengths, default=0)


def text_length(array: np.ndarray) -> int:
    """Bytes of the longest text; array: of objects, or what stands for it in a replay, which has their size."""
    return max(map(len, array.flat), default=0) if array.dtype == object else array.itemsize


def bucket_of(length: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `length`; the length itself where no bucket does."""
    for bucket in buckets:
        if length <= bucket:
            return bucket
    return length


def _join_ragged(pieces: list[np.ndarray], ragged: Ragged, name: str, rows: int) -> np.ndarray:
    width = bucket_of(max(piece.shape[1] for piece in pieces), ragged.buckets)
    first = pieces[0]
    if all(piece.shape[1] == width for piece in pieces):
        return first if len(pieces) == 1 else np.concatenate(pieces)
    joined = np.full((rows, width, *first.shape[2:]), ragged.pad[name], dtype=first.dtype)
    at = 0
    for piece in pieces:
        end = at + piece.shape[0]
        joined[at:end, : piece.shape[1]] = piece
        at = end
    return joined
