"""The entries of `models`."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator

from backends.base import ModelSpec, TensorSpec
from backends.datatypes import NUMPY
from backends.not_known import NOT_KNOWN, NotKnown
from gateway.config.backends import AnyBackend, Backend
from gateway.config.fields import Milliseconds, ModelName, Rows, Seconds, Strict, Version
from gateway.config.other_names import DATATYPES
from gateway.documents.faults import Location, Unfit, did_you_mean


class DeclaredTensor(Strict):
    """One input or output as the operator states it. shape: with the batch dimension; -1 is any size."""

    name: str = Field(min_length=1)
    datatype: str
    shape: tuple[Annotated[int, Field(ge=-1, le=(1 << 31) - 1)], ...]
    optional: bool = False
    labels: tuple[str, ...] = ()

    @field_validator("datatype")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in NUMPY:
            meant = DATATYPES.get(value.lower().removeprefix("type_"), value)
            raise Unfit("unknown datatype", expected=f"one of {', '.join(NUMPY)}", remedy=did_you_mean(meant, NUMPY))
        return value


def tensor_specs(tensors: tuple[DeclaredTensor, ...] | None) -> tuple[TensorSpec, ...]:
    """What the operator states, for backends; what is NOT_KNOWN stays so."""
    listed: tuple[Any, ...] = tensors or ()
    return tuple(
        each if each is NOT_KNOWN else TensorSpec(each.name, each.datatype, each.shape, each.optional, each.labels)
        for each in listed
    )


class Ragged(Strict):
    """Inputs whose length differs between requests, and how they are padded to share a batch.

    pad: inputs whose axis 1 is that length -> the value that fills. text: inputs of BYTES, whose length is that of the longest
    text in bytes; they are not padded, the model does what it does with texts of several lengths.
    buckets: lengths a batch is padded to, ascending; empty: to its longest, as always on backends that run any length as it
    comes.
    crop: outputs whose axis 1 is the padded one and is cut back to each request's own length; None: those in which that is
    open, and as long as an input was padded to.
    """

    pad: dict[str, Annotated[float, Field(allow_inf_nan=True)]] = Field(default={})
    text: tuple[str, ...] = ()
    buckets: tuple[Rows, ...] = ()
    crop: tuple[str, ...] | None = None

    def together(self) -> Iterable[Iterator[Unfit]]:
        return self._of_something(), self._padding_of_nothing()

    def _of_something(self) -> Iterator[Unfit]:
        if not self.pad and not self.text:
            yield Unfit(
                "no input is named",
                expected="`pad` (inputs to be padded) or `text` (inputs of BYTES)",
                remedy="write `pad: {input_ids: 0}` or `text: [text]`",
            )

    def _padding_of_nothing(self) -> Iterator[Unfit]:
        for key in ("buckets", "crop") if self.text and not self.pad else ():
            if getattr(self, key):
                yield Unfit("texts are not padded", expected="inputs to be padded beside it", remedy="remove it", at=(key,))

    def on(self, backend: Backend) -> "Ragged":
        """As it is for this backend."""
        return self.model_copy(update={"buckets": ()}) if backend.any_length else self

    @field_validator("buckets")
    @classmethod
    def _ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted(set(value)):
            raise Unfit(expected="ascending lengths without repetition", remedy=f"write {sorted(set(value))}")
        return value


class Slo(Strict):
    """What is promised to callers."""

    @classmethod
    def called_here(cls, key: str) -> tuple[str, str] | None:
        if re.fullmatch(r"p(?!99_?ms)\d+_?ms|mean_?ms", key):
            return "p99_ms", "write `p99_ms`, the one promise there is: 99 of 100 answers within so many milliseconds"
        return super().called_here(key)

    p99_ms: Milliseconds


class Batching(Strict):
    """How requests become batches. max_delay_ms is the `fixed` policy's only."""

    policy: Literal["adaptive", "greedy", "fixed"] = "adaptive"
    max_rows: Rows | None = None  # None: what the model takes
    max_delay_ms: float = Field(default=5.0, ge=0, le=60_000)
    max_queue_rows: Rows = 4096
    probe_s: float = Field(default=3.0, ge=0, le=600)  # at most so long, each backend is warmed up and timed when it loads
    trace: bool = False  # log one line per batch: its life and why it closed
    record_mib: float = Field(default=4.0, ge=0, le=64)  # of memory for the last decisions, for `gateway why`; 0: none


class Ejection(Strict):
    """When a backend that fails gets no more requests, and for how long before it is tried with copies."""

    consecutive_failures: int = Field(default=3, ge=1)
    failed_share: float = Field(default=0.5, gt=0, le=1)  # of the last 20 executions
    pause_s: Seconds = 1.0  # doubles with every ejection in a row
    max_pause_s: Seconds = 8.0
    max_share: float = Field(default=0.75, ge=0, le=1)  # of a model's backends, but one at least; 0: none; never the last one

    def together(self) -> Iterable[Iterator[Unfit]]:
        return (self._out_of_order(),)

    def _out_of_order(self) -> Iterator[Unfit]:
        if self.pause_s > self.max_pause_s:
            yield Unfit(f"above max_pause_s, {self.max_pause_s:g}", remedy="raise that, or lower this", at=("pause_s",))


class Routing(Strict):
    """Which of a model's backends gets a request."""

    policy: Literal["cheapest", "least_eta", "shortest_queue", "power_of_two", "round_robin"] = "cheapest"
    spill_share: float = Field(
        default=0.5, gt=0, le=1
    )  # `cheapest`: of the SLO; a backend predicted to take longer is passed over
    equivalent: tuple[tuple[str, ...], ...] = ()  # groups that may stand in for each other after a failure; empty: all may
    shadow_tolerance: float = Field(default=1e-3, ge=0)  # relative; a copy's outputs that differ more are counted as different
    ejection: Ejection = Ejection()


class ModelSection(Strict):
    """One model name and version, and the backends that can serve it.

    inputs, outputs: may be left out where the backend can tell (ONNX); then they are read when it loads.
    max_rows: the most rows one execution takes; 0: the model has no batch dimension.
    """

    name: ModelName
    version: Version = "1"
    slo: Slo | None = None
    inputs: tuple[DeclaredTensor, ...] | None = None
    outputs: tuple[DeclaredTensor, ...] | None = None
    max_rows: int = Field(default=32, ge=0, le=1 << 20)
    ragged: Ragged | None = None
    batching: Batching = Batching()
    routing: Routing = Routing()
    share_weight: float = Field(default=1.0, gt=0)  # of server.shared_workers, beside other models'; each embedded backend's
    load_at_start: bool = True
    backends: tuple[AnyBackend, ...] = Field(min_length=1)

    def declared(self) -> ModelSpec:
        """What the operator states of the model's tensors; empty where it is left to the artifact."""
        inputs, outputs = tensor_specs(self.inputs), tensor_specs(self.outputs)
        wanted = min(self.max_rows, self.batching.max_rows or self.max_rows) if "max_rows" in self.model_fields_set else 0
        return ModelSpec("", inputs, outputs, self.max_rows, rows_stated=self.rows_stated, rows_wanted=wanted)

    @property
    def rows_stated(self) -> bool:
        """Whether the operator says that there are batches, or that there are none; else max_rows is the default."""
        return "max_rows" in self.model_fields_set or self.ragged is not None

    @field_validator("name")
    @classmethod
    def _unlike_a_path(cls, value: str) -> str:
        if value in (".", "..", "stats"):  # /v2/models/stats; clients shorten dots away
            raise Unfit("means something else in a path", expected="another name")
        return value

    def together(self) -> Iterable[Iterator[Unfit]]:
        tensors = (("inputs", self.inputs), ("outputs", self.outputs))
        return (
            self._same_labels(),
            self._only_canaries(),
            self._too_many_canaries(),
            self._unknown_equivalents(),
            *(self._same_tensors(key, listed) for key, listed in tensors),
            self._padding_without_batches(),
            self._recorded_lengths(),
            self.unfit_lengths("pad", self.inputs),
            self.unfit_lengths("text", self.inputs),
            self.unfit_lengths("crop", self.outputs),
        )

    def _same_labels(self) -> Iterator[Unfit]:
        seen = set()
        for index, backend in enumerate(self.backends):
            with contextlib.suppress(NotKnown):
                if backend.label in seen:
                    remedy = "give each a `name` of its own" if backend.name is None else "choose another"
                    found = f"{backend.label!r} is the name of another backend too"
                    yield Unfit(found, remedy=remedy, at=("backends", index, "name"))
                seen.add(backend.label)

    def _only_canaries(self) -> Iterator[Unfit]:
        if all(backend.canary_share or backend.shadow_share for backend in self.backends):
            found = "every backend is a canary or a shadow"
            yield Unfit(found, expected="at least one for the rest of the requests", remedy="add one", at=("backends",))

    def _too_many_canaries(self) -> Iterator[Unfit]:
        shares = {}
        for index, backend in enumerate(self.backends):
            with contextlib.suppress(NotKnown):
                shares[index] = backend.canary_share or 0.0
        if (whole := sum(shares.values())) > 1:
            last = max(index for index, share in shares.items() if share)
            found = f"with it all canary shares sum to {whole:g}"
            yield Unfit(found, expected="at most 1", remedy="lower them", at=("backends", last, "canary_share"))

    def _unknown_equivalents(self) -> Iterator[Unfit]:
        labels = list(dict.fromkeys(backend.label for backend in self.backends))
        for number, group in enumerate(self.routing.equivalent):
            for index, label in enumerate(group):
                if label not in labels:
                    expected = f"a backend of this model, one of {', '.join(labels)}"
                    at = ("routing", "equivalent", number, index)
                    yield Unfit(expected=expected, remedy=did_you_mean(label, labels), at=at)

    def _same_tensors(self, key: str, tensors: tuple[DeclaredTensor, ...] | None) -> Iterator[Unfit]:
        first: dict[str, int] = {}
        told = set()
        for index, tensor in enumerate(tensors or ()):
            with contextlib.suppress(NotKnown):
                before = first.setdefault(tensor.name, index)
                if before != index and before not in told:
                    told.add(before)
                    yield Unfit("listed twice", remedy="each tensor has a name of its own", at=(key, before, "name"))

    def _padding_without_batches(self) -> Iterator[Unfit]:
        if self.max_rows == 0 and self.ragged is not None:
            found = "requests are padded to share a batch, but max_rows 0 says that there is none"
            yield Unfit(found, remedy="remove `ragged`, or set max_rows", at=("ragged",))

    def _recorded_lengths(self) -> Iterator[Unfit]:
        for index, backend in enumerate(self.backends):
            with contextlib.suppress(NotKnown):
                if self.ragged is not None and self.ragged.pad and not self.ragged.buckets and backend.records:
                    yield Unfit(
                        "each length would be recorded for itself, and most batches run unrecorded",
                        expected="ragged.buckets, the lengths to record, beside it",
                        remedy="write `buckets: [16, 32, 64, 128]`, up to the longest that the model takes",
                        at=("backends", index, "cuda_graphs"),
                    )

    def unfit_lengths(self, key: str, tensors: Sequence[DeclaredTensor | TensorSpec] | None) -> Iterator[Unfit]:
        """What stands under `pad`, `text` or `crop` of `ragged` and is no tensor with a length, or cannot be padded so.

        tensors: the model's inputs, its outputs for `crop`; None or empty: not known yet, nothing is found.
        """
        known = {tensor.name: tensor for tensor in tensors or ()}
        if not known or self.ragged is None:
            return
        kind = "output" if key == "crop" else "input"
        named = getattr(self.ragged, key) or ()
        for place, name in zip(named, named, strict=True) if isinstance(named, dict) else enumerate(named):
            at = ("ragged", key, place)
            with contextlib.suppress(NotKnown):
                if name not in known:
                    expected = f"an {kind} of the model, one of {', '.join(known)}"
                    yield Unfit(expected=expected, remedy=did_you_mean(name, known), at=at)
                elif key == "text":
                    if (datatype := known[name].datatype) != "BYTES":
                        yield Unfit(f"the input is {datatype}", expected="an input of BYTES", remedy="others: `pad`", at=at)
                elif len(known[name].shape) < 2:
                    found = f"the {kind} has shape [{', '.join(map(str, known[name].shape))}]"
                    yield Unfit(found, expected="at least 2 dimensions, of which the second is the length", at=at)
                elif key == "pad":
                    yield from _unfit_padding(named[name], known[name].datatype, at)


def _unfit_padding(value: float, datatype: str, at: Location) -> Iterator[Unfit]:
    """Why an input of this datatype cannot hold what it is padded with."""
    dtype = NUMPY[datatype]
    if dtype.kind == "O":
        yield Unfit("the input is BYTES", expected="an input of numbers", remedy="those of BYTES: `text`", at=at)
    elif dtype.kind in "biu":
        least, most = (0, 1) if dtype.kind == "b" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
        if not (value.is_integer() and least <= value <= most):
            yield Unfit(expected=f"a whole number from {least} to {most}, as the input is {datatype}", at=at)
