"""The whole state of a batcher or a router as plain values, and back: what a recording begins with, to be replayed from there.

Objects are taken apart by their attributes, whatever these are: a field that is new is kept without a word here. What is
referred to from several places is one object again, as the policy knows a waiting request by its entry. Requests leave their
tensors behind; of ragged ones the shapes stay, which decide what shares a batch.

A value is itself (number, text, None), or a list: what it is, then what it is made of. Reading makes objects of
gateway.batching and gateway.routing only, calls none of their methods, and so may be done with what a stranger wrote.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from importlib import import_module
from operator import attrgetter
from random import Random
from typing import Any, Final

import msgspec
import numpy as np

from gateway import errors
from gateway.batching.batch import text_length
from gateway.config import Ejection, Ragged
from gateway.errors import GatewayError, Unavailable
from gateway.types import InferRequest

BATCHING: Final = "gateway.batching."
ROUTING: Final = "gateway.routing."  # a state of its objects may hold some of batching's, too
_SETTINGS: Final[dict[str, Any]] = {"Ragged": Ragged, "Ejection": Ejection}
_ATOMS: Final = frozenset((int, float, str, bool, type(None)))
_NUMBERS: Final = frozenset((int, float))
_LONGEST_ID: Final = 64  # characters of a client's own id that are kept

Widths = list[tuple[str, tuple[int, ...], str]]
"""Name, shape and datatype (numpy's) of the inputs whose lengths decide what shares a batch."""


def freeze(state: object, home: str = BATCHING) -> Any:
    """Take a value apart. home: BATCHING or ROUTING. Raises: TypeError, for an object that is not of there."""
    return _Freezer(home).of(state)


def thaw(frozen: Any, home: str = BATCHING) -> tuple[Any, dict[int, Any]]:
    """Put together what `freeze` gave. Also each object of it, by the number (`id`) it had.

    Raises: ValueError, if it is something else.
    """
    thawer = _Thawer(home)
    try:
        return thawer.of(frozen), thawer.known
    except (AttributeError, ImportError, IndexError, KeyError, RecursionError, TypeError) as exc:
        raise ValueError(f"not a state: {type(exc).__name__}: {exc}") from exc


def own_id(request: InferRequest) -> str:
    """What a client called its request, as far as it is kept."""
    text = request.id
    return text if len(text) <= _LONGEST_ID else text[:_LONGEST_ID]


def widths_of(request: InferRequest, ragged: Ragged) -> Widths:
    """The shapes, and sizes of texts, that decide what is joined with what."""
    inputs = request.inputs
    return [(name, inputs[name].shape, _kind(inputs[name])) for name in (*ragged.pad, *ragged.text) if name in inputs]


def _kind(array: np.ndarray) -> str:
    return f"|S{max(1, text_length(array))}" if array.dtype == object else array.dtype.str


@lru_cache(256)  # a text's may take thousands of bytes
def _one_of(kind: str) -> np.ndarray:
    return np.zeros((), np.dtype(kind))


def request_like(
    arrival_ns: int, rows: int, deadline_ns: int | None, priority: int, shape_key: Hashable, own: str, widths: Widths | None
) -> InferRequest:
    """A request that is batched as the one of which this was kept. Its tensors take no memory. Raises: ValueError."""
    if not isinstance(own, str):
        raise ValueError(f"a request whose own id is {own!r}, expected text")
    inputs = {name: np.broadcast_to(_one_of(kind), tuple(shape)) for name, shape, kind in widths or ()}
    return InferRequest("", "", own, inputs, rows, arrival_ns, deadline_ns=deadline_ns, priority=priority, shape_key=shape_key)


class _Freezer:
    """known: objects that were met, which live as long as this runs."""

    def __init__(self, home: str) -> None:
        self.known: set[int] = set()
        self._homes = (BATCHING, home)
        self._layouts: dict[type, tuple[int, Callable[[Any], Sequence[Any]]]] = {}

    def of(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        taken = _CONTAINERS.get(kind)
        if taken is not None:
            if kind is tuple and value and type(value[-1]) is InferRequest:  # an entry: who waits is known by it
                return self._once(value, lambda: ["e", id(value), [self.of(each) for each in value]])
            tag, head = taken
            # What begins and ends with a number holds atoms only: most of a service model, which need not be looked through.
            items = list(value)
            if items and not (_is_number(items[0]) and _is_number(items[-1])):
                if _holds_numbers(items[0]) and _holds_numbers(items[-1]):
                    tag = tag.upper()
                else:
                    items = [self.of(each) for each in items]
            return [tag, items, *head(value)]
        if kind is dict:
            return ["m", [[self.of(key), self.of(each)] for key, each in value.items()]]
        if kind is InferRequest:
            return self._once(value, lambda: self._request(value))
        if kind.__name__ in _SETTINGS and kind is _SETTINGS[kind.__name__]:
            return ["g", kind.__name__, value.model_dump()]
        if kind is frozenset:
            return ["f", [self.of(each) for each in sorted(value)]]
        if kind is Random:
            return ["y", self.of(value.getstate())]
        if isinstance(value, GatewayError):
            return ["x", kind.__name__, value.message, value.retry_after_s if isinstance(value, Unavailable) else None]
        if isinstance(value, tuple):
            return ["n", self._name(kind), [self.of(each) for each in value]]
        return self._once(value, lambda: self._object(value))

    def _once(self, value: object, take: Callable[[], list[Any]]) -> list[Any]:
        number = id(value)
        if number in self.known:
            return ["r", number]
        self.known.add(number)
        return take()

    def _object(self, value: Any) -> list[Any]:
        """By the place of its kind among those that were met, or by its name and its attributes' if it is the first of it."""
        kind = type(value)
        layout = self._layouts.get(kind)
        if layout is None:
            name, names = self._name(kind), _names(value)
            place, values_of = layout = self._layouts[kind] = (len(self._layouts), _getter(names))
            head: list[Any] = ["k", id(value), name, names]
        else:
            place, values_of = layout
            head = ["o", id(value), place]
        of = self.of
        head.append([each if type(each) in _ATOMS else of(each) for each in values_of(value)])
        return head

    def _name(self, kind: type) -> str:
        if not kind.__module__.startswith(self._homes):
            raise TypeError(f"{kind.__module__}.{kind.__qualname__} is no part of a state that can be kept")
        return f"{kind.__module__}:{kind.__qualname__}"

    def _request(self, request: InferRequest) -> list[Any]:
        shapes: Widths = [(name, array.shape, _kind(array)) for name, array in request.inputs.items()]
        return [
            "q",
            id(request),
            request.arrival_ns,
            request.rows,
            request.deadline_ns,
            request.priority,
            self.of(request.shape_key),
            own_id(request),
            shapes,
        ]


class _Thawer:
    def __init__(self, home: str) -> None:
        self.known: dict[int, Any] = {}
        self._homes = (BATCHING, home)
        self._layouts: list[tuple[type, list[str]]] = []

    def of(self, frozen: Any) -> Any:
        if not isinstance(frozen, list):
            return frozen
        tag = frozen[0]
        if tag == "r":
            return self.known[frozen[1]]
        if tag == "o":
            _, number, place, values = frozen
            return self._object(number, *self._layouts[place], values)
        if tag == "k":
            _, number, name, names, values = frozen
            if any(key.startswith("__") for key in names):
                raise TypeError(f"{', '.join(names)}: these are no attributes of a state")
            self._layouts.append((_class(name, self._homes), names))
            return self._object(number, *self._layouts[-1], values)
        if tag == "n":
            kind = _class(frozen[1], self._homes)
            return kind(*[self.of(each) for each in frozen[2]])
        if tag == "m":
            return {self.of(key): self.of(each) for key, each in frozen[1]}
        if tag == "e":
            entry = self.known[frozen[1]] = tuple(self.of(each) for each in frozen[2])
            return entry
        if tag == "q":
            _, number, arrival_ns, rows, deadline_ns, priority, key, own, widths = frozen
            request = request_like(arrival_ns, rows, deadline_ns, priority, self.of(key), own, widths)
            self.known[number] = request
            return request
        if tag == "g":
            return _SETTINGS[frozen[1]].model_validate(frozen[2])
        if tag == "f":
            return frozenset(self.of(each) for each in frozen[1])
        if tag == "y":
            source = Random()
            source.setstate(self.of(frozen[1]))
            return source
        if tag == "x":
            kind = getattr(errors, frozen[1])
            if not (isinstance(kind, type) and issubclass(kind, GatewayError)):
                raise TypeError(f"{frozen[1]} is no error")
            return kind(frozen[2], frozen[3]) if issubclass(kind, Unavailable) else kind(frozen[2])
        items = frozen[1]
        return _MADE[tag](items if tag in "TLD" else [self.of(each) for each in items], *frozen[2:])

    def _object(self, number: int, kind: type, names: list[str], values: list[Any]) -> Any:
        made: Any
        if issubclass(kind, msgspec.Struct):  # made at once only: none refers to itself
            made = self.known[number] = kind(**dict(zip(names, map(self.of, values), strict=True)))
            return made
        made = self.known[number] = object.__new__(kind)
        for name, frozen in zip(names, values, strict=True):
            object.__setattr__(made, name, self.of(frozen))
        return made


_CONTAINERS: Final[dict[type, tuple[str, Callable[[Any], tuple[Any, ...]]]]] = {
    tuple: ("t", lambda value: ()),
    list: ("l", lambda value: ()),
    deque: ("d", lambda value: (value.maxlen,)),
}
# A capital: of plain tuples.
_MADE: Final[dict[str, Callable[..., Any]]] = {
    "t": tuple,
    "l": list,
    "d": deque,
    "T": lambda items: tuple(tuple(each) for each in items),
    "L": lambda items: [tuple(each) for each in items],
    "D": lambda items, most: deque((tuple(each) for each in items), most),
}


def _is_number(value: object) -> bool:
    return type(value) in _NUMBERS


def _holds_numbers(value: object) -> bool:
    return type(value) is tuple and bool(value) and _is_number(value[0]) and _is_number(value[-1])


_NAMES: Final[dict[type, tuple[str, ...]]] = {}


def learn_attributes(*twins: object) -> None:
    """Note which attributes objects have, from others of their kinds that nobody uses.

    The `__dict__` of one in use would make every access to it slower from then on, 1.2 µs for a request (CPython 3.11, which
    keeps attributes in the object until somebody asks for their dict).
    """
    for twin in twins:
        if hasattr(twin, "__dict__"):
            _NAMES[type(twin)] = tuple(vars(twin))


def _names(value: Any) -> tuple[str, ...]:
    """Of the attributes that are kept: all but those that its class has in NOT_KEPT."""
    kind = type(value)
    names = _NAMES.get(kind)
    if names is None and isinstance(value, msgspec.Struct):
        names = value.__struct_fields__
    if names is None:
        slots = [name for each in reversed(kind.__mro__) for name in getattr(each, "__slots__", ())]
        names = tuple(vars(value) if hasattr(value, "__dict__") else slots)
    left_out: frozenset[str] = getattr(kind, "NOT_KEPT", frozenset())
    return tuple(name for name in names if name not in left_out)


def _getter(names: tuple[str, ...]) -> Callable[[Any], Sequence[Any]]:
    return attrgetter(*names) if len(names) > 1 else lambda value: [getattr(value, name) for name in names]


def _class(name: str, homes: tuple[str, ...]) -> type:
    """Raises: TypeError, if it is not of there."""
    module, _, qualname = name.partition(":")
    if not module.startswith(homes) or not all(part.isidentifier() for part in module.split(".")):
        raise TypeError(f"{name} names nothing of {' or '.join(homes)}")
    kind = getattr(import_module(module), qualname)
    if not isinstance(kind, type) or not kind.__module__.startswith(homes):
        raise TypeError(f"{name} names no class of {' or '.join(homes)}")
    return kind
