"""configs/gateway.yaml is the reference of the configuration: it has every key, each explained, at its default."""

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from gateway import config

CONFIGS = Path(__file__).parent.parent / "configs"  # wherever pytest is started
REFERENCE = CONFIGS / "gateway.yaml"


def classes() -> list[type[BaseModel]]:
    sections = [
        value
        for name, value in vars(config).items()
        if isinstance(value, type) and issubclass(value, BaseModel) and value.__module__.startswith(config.__name__)
        if not name.startswith("_") and not issubclass(value, config.Backend)
    ]
    (kinds, _) = get_args(config.AnyBackend)
    return [*sections, *get_args(kinds)]


@pytest.fixture(scope="module")
def shown() -> dict[type[BaseModel], dict[str, Any]]:
    """The keys of each class that the reference has, with the values as they are in the file."""
    found: dict[type[BaseModel], dict[str, Any]] = {}

    def walk(value: BaseModel, raw: dict[str, Any]) -> None:
        found.setdefault(type(value), {}).update(raw)
        for key, part in raw.items():
            held = getattr(value, key)
            for inner, inner_raw in zip(held, part, strict=False) if isinstance(held, tuple) else [(held, part)]:
                if isinstance(inner, BaseModel):
                    walk(inner, inner_raw)

    walk(config.load_config(REFERENCE), yaml.safe_load(REFERENCE.read_text()))
    return found


def test_every_key_is_in_the_reference(shown: dict[type[BaseModel], dict[str, Any]]) -> None:
    shared = {key for kind in shown if issubclass(kind, config.Backend) for key in shown[kind]}
    for cls in classes():
        keys = set(cls.model_fields)
        if issubclass(cls, config.Backend):
            keys -= set(config.Backend.model_fields) & shared
        missing = keys - set(shown.get(cls, {}))
        assert not missing, f"{cls.__name__}: {sorted(missing)} are not in {REFERENCE}"


def test_every_key_is_explained() -> None:
    lines = REFERENCE.read_text().splitlines()
    values = [line for line in lines if ":" in line and not line.endswith(":") and "- {" not in line]
    bare = [line for line in values if "#" not in line]
    assert bare == []


def test_what_is_no_example_is_the_default(shown: dict[type[BaseModel], dict[str, Any]]) -> None:
    examples = {line.split(":")[0].strip(" -") for line in REFERENCE.read_text().splitlines() if "example" in line}
    for cls, raw in shown.items():
        for key, value in raw.items():
            field = cls.model_fields[key]
            simple = not isinstance(value, (dict, list)) and not get_args(field.annotation)
            if simple and key not in examples and not field.is_required():
                assert value == field.default, f"{cls.__name__}.{key}"


EXAMPLES = [
    path for path in sorted((CONFIGS / "examples").glob("*.yaml")) if "applications" not in yaml.safe_load(path.read_text())
]


def test_the_examples_are_found() -> None:
    assert {"linear.yaml", "minilm.yaml"} <= {path.name for path in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)  # what has `applications` is Ray Serve's own
def test_every_example_is_valid(path: Path) -> None:
    config.load_config(path)
