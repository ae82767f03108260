"""A document read in spite of its faults, so that all of them are told at once.

What is misspelt is read as it was probably meant; what is at fault is NOT_KNOWN, which ends what would be concluded from it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from backends.not_known import NOT_KNOWN, as_far_as_known
from gateway.documents.faults import ConfigFaults, Fault, Location, Refused, Unfit, nearest
from gateway.documents.reader import Document
from gateway.documents.validation import (
    FaultPlace,
    called_elsewhere,
    faults_of,
    flags_of,
    kind_of,
    known_below,
    place_of,
    probably_meant,
    tags_of,
    value_fault,
    without_short_lists,
)

Validated = TypeVar("Validated", bound=BaseModel)

# id -> the annotation itself, so that no other gets its id; what it takes. Few, as models have: making one takes 0.3 ms.
_ADAPTERS: Final[dict[int, tuple[Any, TypeAdapter[Any]]]] = {}


def validated(model: type[Validated], document: Document) -> Validated:
    """Raises: ConfigFaults, with every fault, also what the reader found."""
    seen = as_far_as_valid(model, document)
    if seen.faults:
        raise ConfigFaults(seen.faults)
    return seen.found


class Seen(NamedTuple, Generic[Validated]):
    """found: NOT_KNOWN stands for what is at fault. faults: by line. document: to place further faults in."""

    found: Validated
    faults: tuple[Fault, ...]
    document: Document


def as_far_as_valid(
    model: type[Validated], document: Document, counted: Callable[[Any], Any] = lambda value: value
) -> Seen[Validated]:
    """What a document says. counted: makes what is held against the model of what is written.

    Misspelt keys and kinds are told, and read as they were probably meant. Each key is held against its field. Then each part
    is asked what is `Unfit` among its keys together, if its model has a method `together`: it gives an iterator for each check,
    and a check that reads what is not known ends there.
    """
    faults = [*document.faults]
    document, meant, misspelt = _respelt(model, document)
    faults += misspelt
    flags = list(flags_of(meant, FaultPlace((), model)))
    value = counted(meant)
    if (errors := _errors(model, value)) or flags:
        faults += [*faults_of(errors, model, document), *(value_fault(place, document) for place in flags)]
        found: Validated = _filled(model, value, (), _gaps(errors, flags, model))
    else:
        found = model.model_validate(value)
    for location, unfit in _unfit_together(found, ()):
        faults.append(document.fault((*location, *unfit.at), unfit.found, expected=unfit.expected, remedy=unfit.remedy))
    return Seen(found, tuple(sorted(dict.fromkeys(faults), key=lambda fault: fault.line or 0)), document)


def _respelt(model: type[BaseModel], document: Document) -> tuple[Document, Any, list[Fault]]:
    """The document and its value with misspelt keys and kinds as they were probably meant, and what is told of them."""
    faults: list[Fault] = []
    value = document.value
    while True:
        corrected = value
        told: list[Any] = []
        misspelt: dict[Location, str] = {}
        for error in _errors(model, value):
            place = place_of(error["loc"], model)
            if error["type"] == "union_tag_invalid" and (
                kind := nearest(_at(value, place.location)["kind"], tags_of(kind_of(place)))
            ):
                corrected = _with(corrected, place.location, {**_at(corrected, place.location), "kind": kind})
                told.append(error)
            elif error["type"] == "extra_forbidden" and (key := _respelt_key(place, model, _at(value, place.location))):
                around = _at(corrected, place.location[:-1])
                if key not in around:
                    named = {key if name == place.location[-1] else name: item for name, item in around.items()}
                    corrected = _with(corrected, place.location[:-1], named)
                    misspelt[*place.location[:-1], key] = str(place.location[-1])
                    told.append(error)
        if not told:
            return document, value, faults
        faults += faults_of(told, model, document)
        document, value = replace(document, misspelt={**document.misspelt, **misspelt}), corrected


def _respelt_key(place: FaultPlace, model: type[BaseModel], value: Any) -> str:
    """The key that an unknown one stands for, with this value; empty: it belongs elsewhere, or nobody knows."""
    key = place.location[-1]
    if not isinstance(key, str) or ":" in key or place.owner is None:
        return ""
    if called := called_elsewhere(place):
        field = place.owner.model_fields.get(called[0])
        return called[0] if field is not None and _fits(field.annotation, value) else ""
    return "" if known_below(key, model) else str(probably_meant(place)[-1])


def _fits(annotation: Any, value: Any) -> bool:
    try:
        _adapter(annotation).validate_python(value)
    except ValidationError:
        return False
    return True


def _adapter(annotation: Any) -> TypeAdapter[Any]:
    if id(annotation) not in _ADAPTERS:
        _ADAPTERS[id(annotation)] = annotation, TypeAdapter(annotation)
    return _ADAPTERS[id(annotation)][1]


def _errors(model: type[BaseModel], value: Any) -> list[Any]:
    try:
        model.model_validate(value)
    except ValidationError as exc:
        return list(exc.errors())
    return []


def _at(value: Any, location: Location) -> Any:
    for part in location:
        value = value[part]
    return value


def _with(value: Any, location: Location, new: Any) -> Any:
    """A copy with something else at one place only: an anchor may have put what stands there at others too."""
    if not location:
        return new
    changed: Any = dict(value) if isinstance(value, dict) else list(value)
    changed[location[0]] = _with(value[location[0]], location[1:], new)
    return changed


@dataclass(frozen=True, slots=True)
class _Gaps:
    """What is not known. places: of values. keys: of entries whose key is at fault. strays: of keys that belong elsewhere."""

    places: frozenset[Location]
    keys: frozenset[Location]
    strays: frozenset[Location]

    def within(self, location: Location) -> bool:
        """Whether anything is at or below a place, or may have been meant to be."""
        return any(gap[: len(location)] == location for gap in self.places | self.keys) or any(
            stray[: len(location)] == location or location[: len(stray) - 1] == stray[:-1] for stray in self.strays
        )

    def may_be_meant(self, location: Location) -> bool:
        """Whether a key that is not there stands above or below its place instead."""
        around = location[:-1]
        return any(
            stray[-1] == location[-1] and (stray[:-1] == around[: len(stray) - 1] or around == stray[: len(around)])
            for stray in self.strays
        )


def _gaps(errors: Sequence[Any], flags: Sequence[FaultPlace], model: type[BaseModel]) -> _Gaps:
    places, keys, strays = {place.location for place in flags}, set(), set()
    for error in without_short_lists(errors):
        place = place_of(error["loc"], model)
        if error["type"] == "extra_forbidden":
            strays.add(place.location)
            if not known_below(str(place.location[-1]), model):
                strays.add(probably_meant(place))  # which could not be respelt
        elif error["type"] == "value_error":
            exc = error["ctx"]["error"]
            unfit = exc.unfit if isinstance(exc, Refused) else [exc]
            places |= {(*place.location, *getattr(each, "at", ())) for each in unfit}
        elif place.is_key or error["type"] == "invalid_key":
            keys.add(place.location)
        else:
            places.add(place.location)
    return _Gaps(frozenset(places), frozenset(keys), frozenset(strays))


def _filled(annotation: Any, value: Any, at: Location, gaps: _Gaps) -> Any:
    """What stands at a place, with NOT_KNOWN in its gaps."""
    if at in gaps.places:
        return NOT_KNOWN
    if not gaps.within(at):
        return _adapter(annotation).validate_python(value)
    kind = kind_of(FaultPlace(at, annotation))
    if isinstance(value, dict) and (tags := tags_of(kind)):
        kind = tags.get(str(value.get("kind")))
    if isinstance(value, dict) and isinstance(kind, type) and issubclass(kind, BaseModel):
        fields = {name: _field(name, field, value, at, gaps) for name, field in kind.model_fields.items()}
        return kind.model_construct(_fields_set=fields.keys() & value.keys(), **fields)
    arguments = get_args(kind)
    if isinstance(value, list | tuple) and get_origin(kind) is tuple:
        return tuple(_filled(arguments[0], item, (*at, index), gaps) for index, item in enumerate(value))
    if isinstance(value, dict) and get_origin(kind) is dict:
        known = {key: item for key, item in value.items() if (*at, key) not in gaps.keys}
        return {key: _filled(arguments[1], item, (*at, key), gaps) for key, item in known.items()}
    return _adapter(annotation).validate_python(value)


def _field(name: str, field: FieldInfo, value: dict[Any, Any], at: Location, gaps: _Gaps) -> Any:
    here = (*at, name)
    if name in value:
        return _filled(field.annotation, value[name], here, gaps)
    return NOT_KNOWN if field.is_required() or gaps.may_be_meant(here) else field.get_default(call_default_factory=True)


def _unfit_together(part: Any, at: Location) -> Iterator[tuple[Location, Unfit]]:
    if isinstance(part, BaseModel):
        for unfit in as_far_as_known(*getattr(part, "together", tuple)()):
            yield at, unfit
        for name in type(part).model_fields:
            yield from _unfit_together(getattr(part, name), (*at, name))
    elif isinstance(part, tuple):
        for index, item in enumerate(part):
            yield from _unfit_together(item, (*at, index))
