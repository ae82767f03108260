"""What is wrong with a configuration beside its own words: files, code, libraries, devices, tensors.

`check` looks at everything and tells all faults at once; parts that are at fault in themselves are left out of it, the rest is
looked at. `servable` takes a first look before anything is started.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from backends.check import Mistake, Wanted, checked
from gateway.config import Backend, Config, Model, config_of
from gateway.documents.faults import ConfigFaults, Fault, Location, path_of
from gateway.documents.reader import Document, read

_MAY_BE_SECRET: Final = frozenset(("class_options", "factory_options"))


class Checked(NamedTuple):
    """config: None, if it is at fault in itself. faults: none if it can be served, as far as was seen."""

    document: Document
    config: Config | None
    faults: tuple[Fault, ...]


def check(path: str | Path) -> Checked:
    """Look at everything that can be seen without loading a model; code that is named is imported. "-": standard input.

    Raises: ConfigFaults, for a file that cannot be read as YAML.
    """
    document = read(path)
    config: Config | None = None
    told: tuple[Fault, ...] = ()
    try:
        config = config_of(document)
    except ConfigFaults as exc:
        told = exc.faults
    found = [
        _fault(document, part, mistake)
        for part in _parts(document, config, told)
        for mistake in [*_of_model(part), *checked(_wanted(part, thorough=True))]
    ]
    if config is not None:
        found += _of_server(document, config)
    faults = sorted(dict.fromkeys((*told, *found)), key=lambda fault: fault.line or 0)
    return Checked(document, config, tuple(faults))


def servable(path: str | Path, *, here: bool) -> Config:
    """The configuration, if no model of it is known to fail; what is seen at once, none of the user's code being run.

    here: whether this machine is to serve it, unless the configuration names a cluster. A model of which one backend may be
    well is left to be loaded: the others are tried again. Raises: ConfigFaults.
    """
    document = read(path)
    config = config_of(document)
    faults: list[Fault] = []
    here = here and config.ray.address in (None, "local")
    for index, model in enumerate(config.models):
        if not (here and model.load_at_start):
            continue
        own: dict[str, list[Fault]] = {}
        for number, backend in enumerate(model.backends):
            if backend.placement == "embedded":
                part = _Part(index, number, model, backend, whole=True)
                own[backend.label] = [_fault(document, part, mistake) for mistake in checked(_wanted(part, thorough=False))]
        if all(own.get(backend.label) or backend.shadow_share for backend in model.backends):
            faults += [fault for found in own.values() for fault in found]
    if faults:
        raise ConfigFaults(faults)
    return config


@dataclass(frozen=True, slots=True)
class _Part:
    """A backend to be looked at. index, number: of model and backend in the file. whole: whether the model is as meant."""

    index: int
    number: int
    model: Model
    backend: Backend
    whole: bool


def _parts(document: Document, config: Config | None, told: tuple[Fault, ...]) -> Iterator[_Part]:
    """Each backend that is not at fault in itself, beside whatever is."""
    models = document.value.get("models") if isinstance(document.value, dict) else None
    for index, raw in enumerate(models if isinstance(models, list) else ()):
        if config is not None:
            whole: Model | None = config.models[index]
        else:
            whole = None if _touched(("models", index), told) else _alone(document, raw)
        backends = raw.get("backends") if isinstance(raw, dict) else None
        for number, backend in enumerate(backends if isinstance(backends, list) else ()):
            if whole is not None:
                yield _Part(index, number, whole, whole.backends[number], whole=True)
            elif isinstance(backend, dict) and not _touched(("models", index, "backends", number), told):
                plain = {key: value for key, value in backend.items() if key not in ("canary_share", "shadow_share")}
                model = _alone(document, {"name": "m", "backends": [plain]})
                if model is not None:
                    yield _Part(index, number, model, model.backends[0], whole=False)


def _touched(location: Location, told: tuple[Fault, ...]) -> bool:
    path = path_of(location)
    return any(fault.path == path or fault.path.startswith((f"{path}.", f"{path}[")) for fault in told)


def _alone(document: Document, model: Any) -> Model | None:
    """A model as if it were the only one; None, if that is at fault."""
    with contextlib.suppress(ConfigFaults):
        return config_of(replace(document, value={"models": [model]}, node=None, faults=())).models[0]
    return None


def _wanted(part: _Part, *, thorough: bool) -> Wanted:
    backend = part.backend
    options: Mapping[str, Any] = backend.options()
    build = getattr(backend, "build", None)
    kind: str = backend.kind  # type: ignore[attr-defined]  # every kind adds its literal
    return Wanted(
        kind,
        {**options, "build": build.model_dump()} if build else options,
        part.model.declared() if part.whole else None,
        here=backend.computes_here,
        thorough=thorough,
    )


def _of_server(document: Document, config: Config) -> Iterator[Fault]:
    """Directories that cannot be made or written to."""
    for key in ("run_dir", "state_dir"):
        wanted = getattr(config.server, key)
        if wanted is None:
            continue
        path = Path(wanted).absolute()
        try:
            there = next(folder for folder in (path, *path.parents) if folder.exists())
        except OSError as exc:  # the name is too long, or a folder of it may not be read
            found = f"cannot be looked at: {exc.strerror}"
        else:
            if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
                continue
            found = f"this user cannot write to {there}" if there.is_dir() else f"{there} is a file"
        yield document.fault(("server", key), found, expected="a directory, or a place to make one", remedy="choose another")


def _of_model(part: _Part) -> Iterator[Mistake]:
    """Declared tensors that no batch can have."""
    model = part.model
    if not part.whole or model.max_rows == 0:
        return
    for key, tensors in (("inputs", model.inputs or ()), ("outputs", model.outputs or ())):
        for index, tensor in enumerate(tensors):
            if not tensor.shape or tensor.shape[0] not in (-1, model.max_rows):
                remedy = f"write {[-1, *tensor.shape]} if that is one row, or set max_rows: 0 if there are no batches"
                expected = "-1 as the first dimension, which is that of the batch"
                yield Mistake((key, index, "shape"), "", expected, remedy, of_model=True)


def _fault(document: Document, part: _Part, mistake: Mistake) -> Fault:
    model: Location = ("models", part.index)
    location = (*model, *mistake.at) if mistake.of_model else (*model, "backends", part.number, *mistake.at)
    told = not _MAY_BE_SECRET.intersection(mistake.at)
    return document.fault(location, mistake.found, expected=mistake.expected, remedy=mistake.remedy, value=told)
