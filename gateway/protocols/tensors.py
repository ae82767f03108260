"""What REST and gRPC share: tensor bytes to numpy views and back, and the checks of a request against its model.

Messages follow Triton's where clients search for them (PROTOCOL: "expected 2 inputs but got 1 inputs for model").
"""

import difflib
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from math import isfinite, prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from backends.base import ModelSpec, Tensors, TensorSpec
from backends.datatypes import NUMPY, datatype_of
from gateway.errors import InvalidArgument, instead, shortened
from gateway.protocols.smallest import smallest_request_text
from gateway.turns import SLICE, pause
from gateway.types import ALONE, OutputRequest, ParameterValue, RegionRef, of_sequence
from gateway.wire.tensors import Buffer, check_bytes

if TYPE_CHECKING:
    from gateway.config import Ragged

ReadRegion = Callable[[RegionRef, int], Buffer]  # int: when the request came, as `InferRequest.arrival_ns`
WriteRegion = Callable[[RegionRef, Buffer, int], None]  # likewise

# As in Triton: integers, FP32 and FP64.
_SCORES: Final = frozenset(dtype for name, dtype in NUMPY.items() if name not in ("BOOL", "BYTES", "FP16", "BF16"))
_FLOATS: Final = frozenset(("FP16", "BF16", "FP32", "FP64"))


# Parameters of the protocol and its extensions, of an input or output.
OF_TENSORS: Final = frozenset(
    ("binary_data", "binary_data_size", "classification", "shared_memory_region", "shared_memory_byte_size",
     "shared_memory_offset")
)  # fmt: skip
_OF_REQUESTS: Final = ("timeout", "priority", "binary_data_output")
_RESERVED: Final = ("triton_", "gateway.")  # the latter are what sessions are told beside a request's own (`backends.base`)
_LIKENESS: Final = 0.8  # `timeout_ms` is 0.82 like `timeout`; `property`, 0.75 like `priority`, may well be sent
_NAMES_HELD: Final = 16  # of a request's: comparing takes 20 us each
_LONGEST_HELD: Final = 40

# Each parameter, and each output that is asked for, takes 2 µs in which others wait, wherever the message is parsed.
_MOST_IN_REQUEST: Final = 4096
_MOST_PARAMETERS_CHARS: Final = 256 << 10  # of their names and texts

# What integers are held to wherever they come from: further on they cross processes, and reach protobuf's int64_param.
_INTEGERS: Final = 1 << 63
_LONGEST_TIMEOUT_US: Final = 1 << 52

# Each element of BYTES is an object of its own: 0.7 µs to make (2026-11-22, 2 cores), and 40 bytes beside its own.
_MANY_TEXTS: Final = 1 << 16
_MOST_TEXTS: Final = 1 << 18
# To be parsed while others wait: JSON of half a MiB takes 3 ms as a rule, 35 at worst; a quarter of one in protobuf 25 at worst
# (2026-11-22, 2 cores).
LONG_JSON_BYTES: Final = 512 << 10
LONG_BYTES: Final = 256 << 10
_LONG_REGION_BYTES: Final = 32 << 20  # to be read takes 10 ms
_LONG_TEXTS_BYTES: Final = 4 << 20  # to be copied takes up to 10 ms, into memory that is new
# Of an answer, what is written while others wait: 10 ms each.
_MANY_CLASSES: Final = 1 << 13
_MANY_SCORES: Final = 1 << 16
_MANY_WRITTEN: Final = 1 << 15


class TakesLong(Exception):
    """To decode this would hold others up for too long: it is to be done where it does not."""


class ParsesLong(Exception):
    """Likewise, on any thread: it is to be done in another process."""


def check_texts(name: str, shape: Sequence[int], *, in_haste: bool) -> None:
    """Raises: InvalidArgument, for more BYTES elements than one tensor may have; TakesLong, for many, in haste."""
    count = prod(shape)
    if count > _MOST_TEXTS:
        raise InvalidArgument(f"input '{name}': {count} BYTES elements, expected at most {_MOST_TEXTS} in one tensor")
    if in_haste and count > _MANY_TEXTS:
        raise TakesLong


def check_region(name: str, datatype: str, shape: Sequence[int], got: int, *, in_haste: bool) -> None:
    """Raises: InvalidArgument, if a region of so many bytes cannot hold the shape; TakesLong, for a long one, in haste."""
    check_bytes(name, datatype, shape, got)
    if in_haste and got > (_LONG_TEXTS_BYTES if datatype == "BYTES" else _LONG_REGION_BYTES):
        raise TakesLong


def check_raw(texts_bytes: int, *, in_haste: bool) -> None:
    """Of so many bytes of BYTES elements, which are copied. Raises: TakesLong, for many, in haste."""
    if in_haste and texts_bytes > _LONG_TEXTS_BYTES:
        raise TakesLong


def check_written(array: np.ndarray, *, in_haste: bool, region: bool = False) -> None:
    """Of an output that is written as bytes; region: to shared memory. Raises: TakesLong, for a long one, in haste."""
    if not in_haste:
        return
    if array.dtype.hasobject:
        long = array.size > _MANY_WRITTEN or sum(map(len, array.flat)) > _LONG_TEXTS_BYTES
    else:
        long = region and array.nbytes > _LONG_REGION_BYTES
    if long:
        raise TakesLong


def deadline_after(arrival_ns: int, timeout_us: float) -> int | None:
    """A deadline as `Clock.now_ns`; None for one of 142 years or more, which is none."""
    return arrival_ns + int(timeout_us * 1000) if timeout_us < _LONGEST_TIMEOUT_US else None


def check_parameter(key: str, value: object) -> None:
    """Of those that go to the model. Raises: InvalidArgument, for a reserved name, or an integer of more than 64 bits."""
    if key.startswith(_RESERVED):
        prefix = next(each for each in _RESERVED if key.startswith(each))
        raise InvalidArgument(f"parameter '{key}': keys starting with '{prefix}' are reserved")
    if type(value) is int and not -_INTEGERS <= value < _INTEGERS:
        raise InvalidArgument(
            f"parameter '{key}': got {value}, expected an integer of 64 bits with its sign, {-_INTEGERS} to {_INTEGERS - 1}"
        )


def check_own(given: Collection[str], own: tuple[str, ...]) -> None:
    """Raises: InvalidArgument, if a request names one of a model's own arguments, as if it could set that."""
    for name in own:
        if name in given:
            raise InvalidArgument(
                f"request: parameter '{name}': the model has a value of its own for it, which no request sets: leave it out; "
                "or have the model take it as an input, or read it from the parameters of `predict(inputs, parameters)`"
            )


def check_parameters(given: Collection[str], where: str, *, of_tensor: bool = False) -> None:
    """Hold names that are not ours against ours: the protocol lets clients send names that a server does not know.

    where: "request", "input 'x'". Raises: InvalidArgument, for a name so like one of ours that it was meant.
    """
    for name in islice(given, _NAMES_HELD):
        if len(name) <= _LONGEST_HELD and (meant := _meant(name, of_tensor)):
            raise InvalidArgument(f"{where}: parameter '{name}': unknown; did you mean '{meant}'?")


def check_most(what: str, count: int) -> None:
    """Of parameters, or outputs that are asked for. Raises: InvalidArgument, if one request may not have so many."""
    if count > _MOST_IN_REQUEST:
        raise InvalidArgument(f"{what}: got {count}, expected at most {_MOST_IN_REQUEST} in one request")


def check_length(parameters: Mapping[str, ParameterValue]) -> None:
    """Of a request's parameters. Raises: InvalidArgument, if their names and texts are too long all together."""
    chars = {key: len(key) + (len(value) if isinstance(value, str) else 0) for key, value in parameters.items()}
    if (count := sum(chars.values())) > _MOST_PARAMETERS_CHARS:
        longest = max(chars, key=chars.__getitem__)
        raise InvalidArgument(
            f"parameters: got {count} characters of names and text, {chars[longest]} of them in '{shortened(longest)}', "
            f"expected at most {_MOST_PARAMETERS_CHARS} in one request"
        )


@lru_cache(maxsize=1024)  # clients send the same ones with every request
def _meant(name: str, of_tensor: bool) -> str:
    ours = OF_TENSORS if of_tensor else _OF_REQUESTS
    return "".join(difflib.get_close_matches(name.lower(), ours, n=1, cutoff=_LIKENESS)) if name not in ours else ""


def check_count(name: str, datatype: str, shape: Sequence[int], got: int) -> int:
    """How many elements a shape has. Raises: InvalidArgument, if it is not so many as came."""
    count = prod(shape)
    if got != count:
        raise InvalidArgument(f"input '{name}': got {got} elements, expected {count} for {datatype} {list(shape)}")
    return count


def out_of_range(name: str, datatype: str, values: Iterable[Any]) -> InvalidArgument:
    """Name the element that its datatype cannot hold; there is one."""
    dtype = NUMPY[datatype]
    kind = float if dtype.kind == "f" else int
    bounds = np.finfo(dtype) if kind is float else np.iinfo(dtype)
    for index, value in enumerate(values):
        if (kind is int or isfinite(value)) and not kind(bounds.min) <= value <= kind(bounds.max):
            return InvalidArgument(
                f"input '{name}': element {index} is {value}, expected {datatype} ({bounds.min} to {bounds.max})"
            )
    raise AssertionError("every element fits")


def natural(value: object, key: str, where: str) -> int:
    """An integer from 0 that is a parameter of the protocol's. Raises: InvalidArgument."""
    if type(value) is int and 0 <= value <= 1 << 62:
        return value
    raise InvalidArgument(f"{where}: parameter '{key}': got {value!r}, expected an integer from 0 to 2^62")


def check_input(spec: ModelSpec, model: str, name: str, datatype: str, shape: Sequence[int]) -> TensorSpec:
    """Check one input's name, datatype and shape before its data is looked at. Raises: InvalidArgument."""
    expected = spec.input_by_name.get(name)
    if expected is None:
        others = instead(name, spec.input_by_name, "its inputs")
        raise InvalidArgument(f"unexpected inference input '{shortened(name)}' for model '{model}'{others}")
    want = expected.shape
    if datatype == expected.datatype and len(shape) == len(want):
        for dim, fixed in zip(shape, want, strict=True):
            if dim < 0 or (dim != fixed and fixed >= 0):
                break
        else:
            return expected
    raise InvalidArgument(
        f"input '{name}' of model '{model}': expected {expected.datatype} {list(want)}, got {datatype} {list(shape)}"
    )


def count_rows(
    spec: ModelSpec, model: str, inputs: Tensors, smallest: Callable[[ModelSpec], str] = smallest_request_text
) -> int:
    """The rows of a request, after every input passed `check_input`. smallest: writes a request as this one is written.

    Raises: InvalidArgument, if a required input is missing, inputs differ in rows, or there are none. More rows than
    `spec.max_rows` are fine, except for a decoupled model: the batcher splits them.
    """
    if len(inputs) != len(spec.inputs):
        missing = [tensor.name for tensor in spec.inputs if tensor.name not in inputs and not tensor.optional]
        if missing:
            raise InvalidArgument(
                f"expected {len(spec.inputs)} inputs but got {len(inputs)} inputs for model '{model}': missing "
                + ", ".join(f"'{name}'" for name in missing)
                + f"; the smallest request: {smallest(spec)}"
            )
    if spec.max_rows == 0:
        return 1
    rows = -1
    for name, array in inputs.items():
        if rows < 0:
            rows, first = array.shape[0], name
        elif array.shape[0] != rows:
            noun = "row" if array.shape[0] == 1 else "rows"
            raise InvalidArgument(
                f"input '{name}' of model '{model}' has {array.shape[0]} {noun}, but input '{first}' has {rows}: "
                "all inputs of a request need the same first dimension"
            )
    if rows < 1:
        raise InvalidArgument(f"model '{model}': a request needs at least 1 row, got {max(rows, 0)}")
    if spec.decoupled and rows > spec.max_rows:
        raise InvalidArgument(
            f"model '{model}': {rows} rows in one request, expected at most {spec.max_rows} of a model that answers in parts "
            "(max_rows, and 1 for a function of single values)"
        )
    return rows


def shape_key(
    spec: ModelSpec, ragged: "Ragged | None", inputs: Tensors, parameters: Mapping[str, ParameterValue] | None = None
) -> Hashable:
    """Say which requests of a model may share a batch: those with equal keys, unless these hold `ALONE`.

    The key holds the per-row shapes of the inputs that may differ between requests; axis 1 of a padded (ragged) input may
    differ within a batch and is left out. Parameters are handed to the model with the batch, so it holds them too. None, where
    every request of the model fits every other. Raises: InvalidArgument, where what begins or ends a sequence would be split.
    """
    if not parameters and not spec.varying_inputs:  # as of most models
        return None
    key: list[Hashable] = []
    padded: Mapping[str, float] = ragged.pad if ragged is not None else {}
    for name in spec.varying_inputs:
        if name in inputs:
            key.append((name, inputs[name].shape[2 if name in padded else 1 :]))
    if parameters:
        _check_whole(spec, inputs, parameters)
        # Told apart by how they are written, for true, 1 and 1.0 are equal, and so are 0.0 and -0.0.
        key.append(tuple(sorted((name, repr(value)) for name, value in parameters.items())))
        if of_sequence(parameters):  # as rows of one call, one would not see the state that another left
            key.append(ALONE)
    return tuple(key) or None


def _check_whole(spec: ModelSpec, inputs: Tensors, parameters: Mapping[str, ParameterValue]) -> None:
    """Each part of a request that is split has its parameters: its sequence would begin, or end, several times."""
    for name in ("sequence_start", "sequence_end"):
        if spec.max_rows and parameters.get(name) is True and (rows := len(next(iter(inputs.values())))) > spec.max_rows:
            raise InvalidArgument(f"parameter '{name}': got {rows} rows, expected at most {spec.max_rows} (max_rows) with it")


def check_outputs(spec: ModelSpec, model: str, names: Collection[str]) -> None:
    """Raises: InvalidArgument, naming an output the model does not have, or for too many."""
    check_most("outputs", len(names))
    for name in names:
        if name not in spec.output_by_name:
            others = instead(name, spec.output_by_name, "its outputs")
            raise InvalidArgument(f"unexpected inference output '{shortened(name)}' for model '{model}'{others}")


def want_once(wanted: dict[str, OutputRequest], output: OutputRequest) -> None:
    """Add to what is wanted, by name. Raises: InvalidArgument, if the output is already, in another way or place."""
    if wanted.setdefault(output.name, output) != output:
        raise InvalidArgument(f"output '{output.name}' is asked for twice, in two ways: expected once")


def classify(array: np.ndarray, k: int, labels: Sequence[str], *, batched: bool, in_haste: bool = False) -> np.ndarray:
    """The k best classes of each row as BYTES "score:index[:label]" (classification extension); an empty label is none.

    Shapes: (rows, *classes) -> (rows, min(k, classes)) if batched, else the whole array is one row and the result (min(k, n),).
    Order: score falling, then index rising. Raises: InvalidArgument, for a datatype that has no scores, or more classes than
    one answer may have; TakesLong, for many, in haste.
    """
    if array.dtype not in _SCORES:
        raise InvalidArgument(f"class result not available for output due to unsupported type '{datatype_of(array)}'")
    rows = array.reshape(array.shape[0], -1) if batched else array.reshape(1, -1)
    k = min(k, rows.shape[1])
    count = k * rows.shape[0]
    if count > _MOST_TEXTS:
        raise InvalidArgument(
            f"classification of {rows.shape[0]} rows: {k} classes each, expected at most {_MOST_TEXTS} in all"
        )
    if in_haste and (count > _MANY_CLASSES or rows.size > _MANY_SCORES):
        raise TakesLong
    # Integers with all bits turned are in reverse order: exactly, as floats of 64 bits are not, and with a sign or without.
    best = np.argsort(-rows if array.dtype.kind == "f" else ~rows, axis=1, kind="stable")[:, :k]
    out = np.empty(best.shape, dtype=object)
    for row in range(best.shape[0]):
        for column in range(k):
            if not (row * k + column) % SLICE:
                pause()
            index = int(best[row, column])
            label = f":{labels[index]}" if index < len(labels) and labels[index] else ""
            score = rows[row, index]
            text = f"{score:f}" if array.dtype.kind == "f" else f"{score}"
            out[row, column] = f"{text}:{index}{label}".encode()
    return out if batched else out[0]


def filled(shape: Sequence[int], count: int) -> list[int] | None:
    """A shape of so many elements: the innermost open size holds all, other open ones are 1. None: there is no such shape."""
    for size in shape:
        if size >= 0:
            if not size or count % size:
                return None
            count //= size
    filled = list(shape)
    for axis in reversed(range(len(shape))):
        if shape[axis] < 0:
            filled[axis] = count
            count = 1
    return filled if count == 1 else None


def cast(name: str, datatype: str, array: np.ndarray) -> np.ndarray:
    """An input's elements as its datatype has them, where each is the same value there; numbers with a fraction may be rounded.

    Raises: InvalidArgument.
    """
    want = NUMPY[datatype]
    if array.dtype == want:
        return array
    if datatype == "BYTES" and array.dtype.kind in "SU":
        elements = np.empty(array.size, want)
        elements[:] = [element.encode() if isinstance(element, str) else element for element in array.reshape(-1).tolist()]
        return elements.reshape(array.shape)
    fraction = datatype in _FLOATS
    if array.dtype.kind not in ("fiu" if fraction else "iu" if "INT" in datatype else ""):
        raise InvalidArgument(f"input '{name}': got {array.dtype}, expected {datatype}")
    with np.errstate(all="ignore"):
        made = array.astype(want)
    lost = np.isfinite(array) & ~np.isfinite(made) if fraction else made != array
    if lost.any():
        index = int(np.flatnonzero(lost)[0])
        raise InvalidArgument(f"input '{name}': element {index} is {array.reshape(-1)[index]}, which {datatype} cannot hold")
    return made
