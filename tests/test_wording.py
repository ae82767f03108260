"""No word of the library that validates reaches the user, whatever is wrong in whichever field."""

import copy
import datetime
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import Config, parse_config
from gateway.documents.faults import ConfigFaults, Fault, Location, path_of
from loadtest.errors import UsageError
from loadtest.prices.catalogue import load_catalogue
from loadtest.question.spec import parse_search_spec
from tests.loadtest.examples import changed as example_of_a_spec

REFERENCE = yaml.safe_load((Path(__file__).parent.parent / "configs" / "gateway.yaml").read_text())
WRONG: tuple[Any, ...] = (
    None, True, -7, 0, 10**30, 2.5, float("inf"), float("nan"), "", "word", "a: b", [], [None], [[]], [-7], ["word"], {},
    {"word": None}, {"word": -7}, {3: 4}, {"kind": "word"}, datetime.date(2026, 11, 22), b"\xff",
)  # fmt: skip
THEIRS = re.compile(
    r"[Ii]nput should|[Ii]nput was|discriminator|[Vv]alue error|[Ee]xtra inputs|[Ff]ield required|"
    r"(Tuple|List|Dictionary|String|Keys) should|"
    r"unable to|[Uu]nable|after validation|pydantic|valid (tuple|integer|number|string|boolean|dictionary|list|date)|"
    r"\bdict\b|\btuple\b|NoneType|<class|function-|constrained|Ellipsis|PydanticUndefined"
)


def places(value: Any, location: Location = ()) -> Iterator[Location]:
    """Every place of a document."""
    yield location
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*location, key))


def changed(location: Location, value: Any, document: Any = REFERENCE) -> Any:
    """The reference with something else in one place."""
    if not location:
        return value
    around = document.copy()
    around[location[0]] = changed(location[1:], value, document[location[0]])
    return around


def faults(document: Any) -> tuple[Fault, ...]:
    try:
        parse_config(document, source="x.yaml")
    except ConfigFaults as exc:
        return exc.faults
    return ()


def check(document: Any, location: Location) -> int:
    """Hold the faults to what each must say. Gives how many there are."""
    found = faults(document)
    for fault in found:
        told = str(fault).replace(fault.value, "", 1)
        assert not THEIRS.search(told), told
        assert fault.expected or fault.remedy, told
        assert fault.path or not location, told
    return len(found)


def test_the_reference_is_right() -> None:
    assert isinstance(parse_config(REFERENCE, source="x.yaml"), Config)


@pytest.mark.slow
def test_whatever_stands_wherever_is_told_in_our_words() -> None:
    told = 0
    for number, location in enumerate(places(REFERENCE)):
        for value in WRONG[number % 2 :: 2]:
            told += check(changed(location, value), location)
    assert told > 500


def test_an_unknown_key_or_a_missing_one_is_told_in_our_words_everywhere() -> None:
    told = 0
    for location in places(REFERENCE):
        around = copy.deepcopy(REFERENCE)
        stands: Any = around
        for part in location:
            stands = stands[part]
        if isinstance(stands, dict):
            stands["a key that nobody knows"] = 1
            told += check(around, location)
        if location:
            missing = changed(location, None)
            holder: Any = missing
            for part in location[:-1]:
                holder = holder[part]
            del holder[location[-1]]
            told += check(missing, location)
    assert told > 20


@pytest.mark.slow
def test_whatever_stands_wherever_in_a_spec_of_loadtest_is_told_in_our_words() -> None:
    catalogue = load_catalogue()
    spec = example_of_a_spec(payload={"values": ["x"]}, agreement={"statistic": {"y": "cosine"}}, target_rps=5)
    spec["launcher"]["cpus"] = [0]
    told = 0
    for location in places(spec):
        for value in WRONG:
            try:
                parse_search_spec(changed(location, value, spec), catalogue, source="spec.yaml")
            except UsageError as exc:
                told += 1
                theirs = THEIRS.search(str(exc).replace(repr(value), ""))
            else:
                theirs = None
            assert theirs is None, (location, value)
    assert told > 500


def test_a_fault_names_the_place_that_was_changed() -> None:
    for location in (("server", "http_port"), ("models", 0, "batching", "policy"), ("models", 0, "backends", 3, "url")):
        (fault,) = faults(changed(location, {"word": 1}))
        assert fault.path == path_of(location)


def test_a_fault_of_any_of_several_types_is_told_once() -> None:
    (fault,) = faults(changed(("models", 0, "backends", 3, "url"), 5))
    assert str(fault) == "x.yaml: models[0].backends[3].url: 5: expected text or a list, each item text"
