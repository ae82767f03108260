"""Code that a configuration names: `module:name`, or `path/to/file.py:name` for a file that is in no package."""

import hashlib
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from backends.base import LoadFailed, words_of


def is_source(model: str) -> bool:
    """Whether `model` names code rather than an artifact's path."""
    place, colon, name = model.rpartition(":")
    return bool(colon) and bool(place) and name.isidentifier()


def load_object(source: str) -> Any:
    """The object `source` names. A file is executed once per process. Raises: LoadFailed."""
    place, _, name = source.rpartition(":")
    if not is_source(source):
        raise LoadFailed(f"{source!r}: expected `module:name` or `path/to/file.py:name`")
    try:
        module = _module_of_file(Path(place)) if place.endswith(".py") else import_module(place)
    except LoadFailed:
        raise
    except Exception as exc:
        raise LoadFailed(f"{source!r}: cannot be imported: {words_of(exc)}") from exc
    try:
        return getattr(module, name)
    except AttributeError as exc:
        raise LoadFailed(f"{source!r}: {place} has no {name!r}") from exc


def _module_of_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise LoadFailed(f"{path}: no such file")
    # Two files of one name are two modules; and a class in it can be found again by its module's name (pickle, dataclasses).
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LoadFailed(f"{path}: not a Python file")
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
