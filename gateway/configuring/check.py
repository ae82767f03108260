"""What is wrong with a configuration beside its own words: files, code, libraries, devices, tensors.

`check` looks at everything and tells all faults at once: what is at fault in itself is not known, and all that does not follow
from it is looked at. `servable` takes a first look before anything is started.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from backends.check import checked
from backends.mistakes import Mistake, Wanted
from backends.not_known import NOT_KNOWN, NotKnown, as_far_as_known
from gateway.config import (
    AccessSection,
    Backend,
    Config,
    DeclaredTensor,
    ModelSection,
    TlsSection,
    config_as_far_as_valid,
    tensor_specs,
)
from gateway.documents.faults import ConfigFaults, Fault, Location, Unfit
from gateway.documents.reader import Document, read
from gateway.errors import ConfigError

T = TypeVar("T")
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
    return looked_at(read(path))


def looked_at(document: Document) -> Checked:
    """As `check`, of a document that is read."""
    config, told, document = config_as_far_as_valid(document)
    found = [
        *as_far_as_known(_of_server(document, config)),
        *as_far_as_known(_of_tracing(document, config)),
        *as_far_as_known(_second_look(document, config)),
    ]
    faults = sorted(dict.fromkeys((*told, *found)), key=lambda fault: fault.line or 0)
    return Checked(document, None if told else config, tuple(faults))


def _second_look(document: Document, config: Config) -> Iterator[Fault]:
    """At every model and backend, wherever it is to run."""
    for index, model in enumerate(config.models):
        found = [
            _fault(document, part, mistake)
            for part in as_far_as_known(_parts(index, model))
            for mistake in checked(_wanted(part, thorough=True))
        ]
        yield from found
        places = {fault.path for fault in found}  # what a file or code says of a tensor says it better
        for location, tensor in as_far_as_known(_tensors(model, "inputs"), _tensors(model, "outputs")):
            for unfit in as_far_as_known(_without_batch(tensor, model)):
                at = ("models", index, *location, "shape")
                fault = document.fault(at, unfit.found, expected=unfit.expected, remedy=unfit.remedy)
                if fault.path not in places:
                    yield fault


def servable(path: str | Path, *, here: bool) -> Config:
    """The configuration, if no model of it is known to fail; what is seen at once, none of the user's code being run.

    here: whether this machine is to serve it, unless the configuration names a cluster. A model of which one backend may be
    well is left to be loaded: the others are tried again. Raises: ConfigFaults.
    """
    config, told, document = config_as_far_as_valid(read(path))
    faults = [*told, *(as_far_as_known(_first_look(document, config)) if here else ())]
    if faults:
        raise ConfigFaults(sorted(faults, key=lambda fault: fault.line or 0))
    return config


def _first_look(document: Document, config: Config) -> Iterator[Fault]:
    """At what this machine is to serve."""
    if config.ray.address not in (None, "local"):
        return
    for index, model in enumerate(config.models):
        yield from as_far_as_known(_hopeless(document, index, model))


def _hopeless(document: Document, index: int, model: ModelSection) -> Iterator[Fault]:
    """Of a model's backends, if each has some fault."""
    if not model.load_at_start:
        return
    parts = [*_parts(index, model)]
    own = [
        [_fault(document, part, mistake) for mistake in checked(_wanted(part, thorough=False))]
        if part.backend.placement == "embedded"
        else []
        for part in parts
    ]
    known = len(parts) == len(model.backends)
    if known and all(found or part.backend.shadow_share for part, found in zip(parts, own, strict=True)):
        yield from chain.from_iterable(own)


@dataclass(frozen=True, slots=True)
class _Part:
    """A backend to be looked at. index, number: of model and backend in the file."""

    index: int
    number: int
    model: ModelSection
    backend: Backend


def _parts(index: int, model: ModelSection) -> Iterator[_Part]:
    """Each backend of which something is known."""
    for number, backend in enumerate(model.backends):
        if backend is not NOT_KNOWN:
            yield _Part(index, number, model, backend)


def _wanted(part: _Part, *, thorough: bool) -> Wanted:
    model, options = part.model, dict(part.backend)
    build = options.get("build")
    own = options.keys() - Backend.model_fields.keys() - {"kind", "build"}
    return Wanted(
        options["kind"],
        {key: options[key] for key in own},
        build=dict(build) if build is not None and build is not NOT_KNOWN else build,
        inputs=_unless_unknown(lambda: tensor_specs(model.inputs)),
        outputs=_unless_unknown(lambda: tensor_specs(model.outputs)),
        max_rows=model.max_rows,
        here=_unless_unknown(lambda: part.backend.computes_here),
        thorough=thorough,
    )


def _unless_unknown(read: Callable[[], T]) -> T:
    try:
        return read()
    except NotKnown:
        return NOT_KNOWN  # type: ignore[no-any-return]  # it stands for anything


def _of_server(document: Document, config: Config) -> Iterator[Fault]:
    """Directories that cannot be made or written to; certificates and keys that cannot be used."""
    for key in ("run_dir", "state_dir"):
        yield from as_far_as_known(_of_directory(document, key, getattr(config.server, key)))
    yield from as_far_as_known(_of_tls(document, config.server.tls), _of_access(document, config.server.access))


def _of_tls(document: Document, tls: TlsSection | None) -> Iterator[Fault]:
    if tls is None:
        return
    from gateway.process.certificates import usable  # for `servable`, which starts a server, does without

    # What is NOT_KNOWN raises here, before a file is looked for.
    section = TlsSection(certificate=str(tls.certificate), key=str(tls.key), client_ca=tls.client_ca and str(tls.client_ca))
    try:
        usable(section)
    except ConfigError as exc:
        at, _, found = exc.message.partition(": ")
        yield document.fault(tuple(at.split(".")), found, value=False)


def _of_access(document: Document, access: AccessSection | None) -> Iterator[Fault]:
    """The file; the environment that is served in may be another."""
    if access is None or access.keys is None:
        return
    from gateway.access.doors import keys_of

    try:
        keys_of(AccessSection(keys=str(access.keys)), {})
    except ConfigError as exc:
        yield document.fault(("server", "access", "keys"), "; ".join(exc.message.splitlines()), value=False)


def _of_tracing(document: Document, config: Config) -> Iterator[Fault]:
    """OpenTelemetry's exporters, which come with an extra; variables of this environment that could not be followed."""
    tracing = config.tracing
    if tracing is None:
        return
    from gateway.tracing.opentelemetry import REMEDY, installed
    from gateway.tracing.settings import settings

    # Not set, it may be either, by the environment that is served in.
    protocols = (tracing.protocol,) if tracing.protocol is not None else ("grpc", "http")
    if not any(map(installed, protocols)):
        found = f"OpenTelemetry's exporter by {' or '.join(protocols)} is not installed"
        yield document.fault(("tracing",), found, remedy=REMEDY)
    try:
        settings(tracing, os.environ)
    except ConfigError as exc:
        yield document.fault(("tracing",), exc.message, value=False)


def _of_directory(document: Document, key: str, wanted: str | None) -> Iterator[Fault]:
    if wanted is None:
        return
    path = Path(str(wanted)).absolute()
    try:
        there = next(folder for folder in (path, *path.parents) if folder.exists())
    except OSError as exc:  # the name is too long, or a folder of it may not be read
        found = f"cannot be looked at: {exc.strerror}"
    else:
        if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
            return
        found = f"this user cannot write to {there}" if there.is_dir() else f"{there} is a file"
    yield document.fault(("server", key), found, expected="a directory, or a place to make one", remedy="choose another")


def _tensors(model: ModelSection, key: str) -> Iterator[tuple[Location, DeclaredTensor]]:
    for number, tensor in enumerate(getattr(model, key) or ()):
        yield (key, number), tensor


def _without_batch(tensor: DeclaredTensor, model: ModelSection) -> Iterator[Unfit]:
    """A declared shape that no batch can have."""
    if not model.rows_stated and all(backend.kind == "triton" for backend in model.backends):
        return  # whose server says whether there are batches
    if model.max_rows != 0 and (not tensor.shape or tensor.shape[0] not in (-1, model.max_rows)):
        remedy = f"write {[-1, *tensor.shape]} if that is one row, or set max_rows: 0 if there are no batches"
        yield Unfit(expected="-1 as the first dimension, which is that of the batch", remedy=remedy)


def _fault(document: Document, part: _Part, mistake: Mistake) -> Fault:
    model: Location = ("models", part.index)
    location = (*model, *mistake.at) if mistake.of_model else (*model, "backends", part.number, *mistake.at)
    told = not _MAY_BE_SECRET.intersection(mistake.at)
    return document.fault(location, mistake.found, expected=mistake.expected, remedy=mistake.remedy, value=told)
