import dataclasses
import importlib
import pkgutil

import pytest

import loadtest

MODULES = [module.name for module in pkgutil.walk_packages(loadtest.__path__, "loadtest.") if not module.ispkg]


@pytest.mark.parametrize("name", MODULES)
def test_values_are_frozen_and_have_slots(name: str) -> None:
    # What changes says so: eq=False, as it is compared by identity. Hash of what is frozen is that of its fields.
    module = importlib.import_module(name)
    for kind in vars(module).values():
        if dataclasses.is_dataclass(kind) and isinstance(kind, type) and kind.__module__ == module.__name__:
            assert "__slots__" in vars(kind), kind
            assert kind.__dataclass_params__.frozen or kind.__hash__ is object.__hash__, kind  # type: ignore[attr-defined]
