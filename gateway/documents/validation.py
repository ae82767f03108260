"""A document held against a pydantic model. Each fault is told by what the field takes, in our words.

pydantic says where a value does not fit. Its sentences speak of discriminators, tuples and literals, and tell each type of a
union by itself. Here one sentence, made from the field's annotation, serves all that may be wrong with a value. Validators of
ours raise `Unfit` or `Refused`, whose words are told as they are.
"""

import datetime
import json
import math
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gateway.documents.faults import Fault, Location, Refused, Unfit, did_you_mean, nearest, shown
from gateway.documents.reader import Document

_KEY: Final = "[key]"  # pydantic's word for the key of a mapping, in the place of a fault
_SIMPLE: Final[dict[Any, str]] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    datetime.date: "a date such as 2026-11-22",
    Any: "any value",
    object: "any value",
}
_KEYS_LISTED: Final = 6


def flags_of(value: Any, place: "FaultPlace") -> Iterator["FaultPlace"]:
    """Where true or false stands for a number: pydantic takes it for 1 or 0, and YAML reads on, off, yes and no as such."""
    annotation = kind_of(place)
    arguments, tags = get_args(annotation), tags_of(annotation)
    if isinstance(value, bool):
        if annotation in (int, float):
            yield place
    elif isinstance(value, list) and get_origin(annotation) is tuple:
        for index, item in enumerate(value):
            yield from flags_of(item, FaultPlace((*place.location, index), arguments[0]))
    elif isinstance(value, dict) and get_origin(annotation) is dict:
        for key, item in value.items():
            yield from flags_of(item, FaultPlace((*place.location, key), arguments[1]))
    elif isinstance(value, dict) and (tags or isinstance(annotation, type)):
        model = tags.get(str(value.get("kind"))) if tags else annotation
        fields = model.model_fields if model is not None and issubclass(model, BaseModel) else {}
        for key, item in value.items():
            if field := fields.get(str(key)):
                yield from flags_of(item, FaultPlace((*place.location, key), field.annotation, tuple(field.metadata), model))


def faults_of(errors: Sequence[Any], model: type[BaseModel], document: Document) -> Iterator[Fault]:
    """errors: what pydantic's ValidationError of this document lists."""
    told: set[tuple[Location, str]] = set()
    # A key that is misspelt is not missing as well.
    meant = {probably_meant(place_of(error["loc"], model)) for error in errors if error["type"] == "extra_forbidden"}
    for error in without_short_lists(errors):
        place = place_of(error["loc"], model)
        if error["type"] == "missing" and place.location in meant:
            continue
        # Each type of a union is tried, and faults of each are told: one sentence says what any of them would be.
        kind = error["type"] if error["type"] in ("missing", "extra_forbidden", "value_error") else "value"
        if kind == "value_error" or (place.location, kind) not in told:
            told.add((place.location, kind))
            yield from _faults(error, place, model, document)


def without_short_lists(errors: Sequence[Any]) -> list[Any]:
    """pydantic also calls a list too short if its items are at fault."""
    around = {error["loc"][:length] for error in errors for length in range(len(error["loc"]))}
    return [error for error in errors if error["type"] != "too_short" or error["loc"] not in around]


def words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """What a field takes, such as `a whole number from 0 to 65535, or null`."""
    annotation, metadata = _unwrapped(annotation, metadata)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        tags = tags_of(annotation)
        kinds = [part for part in arguments if part is not types.NoneType]
        null = ", or null" if len(kinds) < len(arguments) else ""
        if tags:
            return f"a mapping with `kind`, one of {', '.join(tags)}{null}"
        return " or ".join(words(part, metadata) for part in kinds) + null
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}" if len(arguments) > 1 else shown(arguments[0])
    if origin in (tuple, dict):
        whole, part, of = ("a list", "item", arguments[0]) if origin is tuple else ("a mapping", "value", arguments[1])
        least = next((f" of at least {item.min_length}" for item in metadata if isinstance(item, MinLen)), "")
        return f"{whole}{least}" if of is Any else f"{whole}{least}, each {part} {words(of)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        required = [name for name, field in annotation.model_fields.items() if field.is_required()]
        some = (required or list(annotation.model_fields))[:_KEYS_LISTED]
        more = ", …" if len(some) < len(annotation.model_fields) else ""
        return f"a mapping with {', '.join(f'`{name}`' for name in some)}{more}"
    return f"{_SIMPLE.get(annotation, 'another value')}{_range(metadata)}"


@dataclass(frozen=True, slots=True)
class FaultPlace:
    """Where a fault is, in the user's file, and what may stand there. owner: the model whose field it is, or is not."""

    location: Location
    annotation: Any = Any
    metadata: tuple[Any, ...] = ()
    owner: type[BaseModel] | None = None
    is_key: bool = False

    @property
    def field(self) -> FieldInfo | None:
        return self.owner.model_fields.get(str(self.location[-1])) if self.owner and self.location else None


def place_of(loc: Location, model: type[BaseModel]) -> FaultPlace:
    """Follow pydantic's path, in which also stand the kind of a backend and the type of a union that was tried."""
    place = FaultPlace((), model)
    for part in loc:
        annotation = kind_of(place)
        arguments = get_args(annotation)
        if get_origin(annotation) in (Union, types.UnionType):
            tagged = tags_of(annotation).get(str(part))
            if tagged is None:
                return place  # one of its types: the whole union is told
            place = FaultPlace(place.location, tagged)
        elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
            field = annotation.model_fields.get(str(part))
            kind, about = (field.annotation, tuple(field.metadata)) if field else (Any, ())
            place = FaultPlace((*place.location, part), kind, about, annotation)
        elif get_origin(annotation) is tuple:
            place = FaultPlace((*place.location, part), arguments[0])
        elif get_origin(annotation) is dict:
            if part == _KEY:
                place = FaultPlace(place.location, arguments[0], is_key=True)
            else:
                # The fault of a key has the key in its path as well, then `[key]`.
                keyed = loc[-1] == _KEY and part == loc[-2]
                place = FaultPlace((*place.location, part), annotation if keyed else arguments[1])
        else:
            return place
    return place


def _faults(error: Any, place: FaultPlace, model: type[BaseModel], document: Document) -> Iterator[Fault]:
    location, kind = place.location, error["type"]
    if kind == "value_error":
        exc = error["ctx"]["error"]
        unfit = exc.unfit if isinstance(exc, Refused) else [exc if isinstance(exc, Unfit) else Unfit(str(exc))]
        for each in unfit:
            at = (*location, *each.at)
            quoted = each.fits_in_quotes is not None and each.fits_in_quotes(document.text(at))
            remedy = f'write "{document.text(at)}"' if quoted else each.remedy
            yield document.fault(at, each.found, expected=each.expected, remedy=remedy)
    elif kind == "missing":
        key = str(location[-1])
        yield document.fault(
            location, "missing", expected=words(place.annotation, place.metadata), remedy=f"add `{key}: …`", value=False
        )
    elif kind == "extra_forbidden":
        yield _unknown_key(place, model, document)
    elif kind == "invalid_key":
        yield document.fault(
            location, "a key that is no text", expected="text as the key", remedy="put it in quotes", value=False
        )
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        yield _kind(place, document)
    elif place.is_key:
        known = [str(word) for word in get_args(place.annotation)]
        hint = did_you_mean(location[-1], known)
        fault = document.fault(
            location, "unknown key", expected=words(place.annotation, place.metadata), remedy=hint, value=False
        )
        yield fault
    else:
        yield value_fault(place, document)


def value_fault(place: FaultPlace, document: Document) -> Fault:
    """A value that its field does not take."""
    value = document.at(place.location)
    inner = kind_of(place)
    expected = words(place.annotation, place.metadata)
    remedy = ""
    if isinstance(value, float) and not math.isfinite(value):
        expected = expected.replace("a number", "a finite number")
    if isinstance(inner, type) and issubclass(inner, BaseModel) and isinstance(value, str) and ":" in value:
        key, _, rest = value.partition(":")
        remedy = f"a space is missing after the colon: `{key}: {rest}`"
    elif inner is str and value is not None and not isinstance(value, list | dict):
        remedy = f'put it in quotes: "{document.text(place.location)}"'
    elif not place.location and isinstance(inner, type) and issubclass(inner, BaseModel):
        required = next((name for name, field in inner.model_fields.items() if field.is_required()), "")
        remedy = f"begin with `{required}:`" if required else ""
    elif value in ([], {}):
        remedy = "add one"
    elif get_origin(inner) is tuple and not isinstance(value, list):
        item = _as_item(value) if isinstance(value, str) else document.text(place.location)
        remedy = f"write it as a list: [{'…' if value is None or isinstance(value, dict) else item}]"
    elif get_origin(inner) is Literal:
        of_digits = not any(map(str.isalpha, str(value)))  # a number that is near another is hardly meant as that
        remedy = "" if of_digits else did_you_mean(value, map(str, get_args(inner)))
    return document.fault(
        place.location,
        "" if place.location else f"got {_type(value)}",
        expected=expected,
        remedy=remedy or _without(place),
    )


def _as_item(text: str) -> str:
    """Of a list of YAML: in quotes, where it would be read as another value."""
    try:
        is_plain = yaml.safe_load(f"[{text}]") == [text]
    except yaml.YAMLError:
        is_plain = False
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def _without(place: FaultPlace) -> str:
    """What leaving a key out means, where that can be said in a word."""
    field = place.field
    if field is None or field.is_required():
        return ""
    default = field.get_default()
    if default is None or default in ((), {}):
        return ""
    if isinstance(default, BaseModel):
        return "left out, it has its defaults"
    if isinstance(default, float):
        return f"left out, it is {default:g}"
    return f"left out, it is {default if isinstance(default, str) else shown(default)}"


def _kind(place: FaultPlace, document: Document) -> Fault:
    """Of a mapping whose `kind` says what it is."""
    tags = tags_of(kind_of(place))
    value = document.at(place.location)
    expected = f"one of {', '.join(tags)}"
    if not isinstance(value, dict):
        return document.fault(place.location, expected=f"a mapping with `kind`, {expected}", remedy="write {kind: …}")
    location = (*place.location, "kind")
    if "kind" not in value:
        return document.fault(location, "missing", expected=expected, remedy=f"add `kind: {next(iter(tags))}`, for instance")
    return document.fault(location, expected=expected, remedy=did_you_mean(value["kind"], tags))


def probably_meant(place: FaultPlace) -> Location:
    """The key that an unknown one was probably to be."""
    if called := called_elsewhere(place):
        return (*place.location[:-1], called[0])
    return (*place.location[:-1], nearest(place.location[-1], place.owner.model_fields if place.owner else ()))


def called_elsewhere(place: FaultPlace) -> tuple[str, str] | None:
    """What a key of others is here, and what to write, if its model has a method `called_here` that says so."""
    called: Callable[[str], tuple[str, str] | None] = getattr(place.owner, "called_here", lambda _: None)
    return called(str(place.location[-1]))


def _unknown_key(place: FaultPlace, model: type[BaseModel], document: Document) -> Fault:
    key = str(place.location[-1])
    assert place.owner is not None  # of the model that forbids it
    known = list(place.owner.model_fields)
    remedy = did_you_mean(key, known)
    name, colon, value = key.partition(":")
    if called := called_elsewhere(place):
        remedy = called[1]
    elif colon and name in known:
        remedy = f"a space is missing after the colon: `{name}: {value}`"
    elif key not in known and (elsewhere := list(dict.fromkeys(known_below(key, model)))):
        belongs = f"it belongs to {' or '.join(f'`{path}`' for path in elsewhere)}"
        remedy = f"{belongs}; or {remedy}" if remedy else belongs
    elif not remedy:
        remedy = f"known here: {', '.join(known)}"
    return document.fault(place.location, "unknown key", remedy=remedy)


def known_below(key: str, model: type[BaseModel], path: str = "") -> list[str]:
    """The paths below which this key is known."""
    found = [path] if path and key in model.model_fields else []
    for name, field in model.model_fields.items():
        inner, _ = _unwrapped(field.annotation, ())
        inner = _not_null(inner)
        many = get_origin(inner) is tuple
        if many:
            inner, _ = _unwrapped(get_args(inner)[0], ())
        for each in tags_of(inner).values() or (inner,):
            if isinstance(each, type) and issubclass(each, BaseModel):
                found += known_below(key, each, f"{path}.{name}{'[]' if many else ''}".lstrip("."))
    return found


def _unwrapped(annotation: Any, metadata: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """Without `Annotated`, whose constraints go to the metadata."""
    about = tuple(metadata)
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        about += tuple(part for item in more for part in (item.metadata if isinstance(item, FieldInfo) else (item,)))
    return annotation, about


def kind_of(place: FaultPlace) -> Any:
    """What may stand there, without constraints, and without null."""
    annotation, _ = _unwrapped(place.annotation, ())
    return _not_null(annotation)


def _not_null(annotation: Any) -> Any:
    """What else than null may stand, if that is one type."""
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [part for part in get_args(annotation) if part is not types.NoneType]
        if len(rest) == 1:
            return _unwrapped(rest[0], ())[0]
    return annotation


def tags_of(annotation: Any) -> dict[str, type[BaseModel]]:
    """The models of a union by what their `kind` says; empty, if they are not told apart by it."""
    found: dict[str, type[BaseModel]] = {}
    for part in get_args(annotation):
        if not (isinstance(part, type) and issubclass(part, BaseModel) and "kind" in part.model_fields):
            return {}
        found |= {str(tag): part for tag in get_args(part.model_fields["kind"].annotation)}
    return found


def _range(metadata: Sequence[Any]) -> str:
    low = next((item for item in metadata if isinstance(item, Ge | Gt)), None)
    high = next((item for item in metadata if isinstance(item, Le | Lt)), None)
    if any(isinstance(item, MinLen) for item in metadata):
        return ", not empty"
    if isinstance(low, Ge) and isinstance(high, Le):
        return f" from {low.ge} to {high.le}"
    above = f" of at least {low.ge}" if isinstance(low, Ge) else f" greater than {low.gt}" if isinstance(low, Gt) else ""
    below = f"at most {high.le}" if isinstance(high, Le) else f"less than {high.lt}" if isinstance(high, Lt) else ""
    return ", ".join(filter(None, (above, below if above else f" of {below}" if below else "")))


def _type(value: object) -> str:
    names = {type(None): "nothing", dict: "a mapping", list: "a list", str: "text"}
    return names.get(type(value), f"{value!r}")
