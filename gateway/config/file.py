"""The whole configuration, and how it is read."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from backends.not_known import NotKnown
from backends.source import is_source
from gateway.config.fields import Strict
from gateway.config.model import ModelSection
from gateway.config.server import MetricsSection, Ray, ServerSection
from gateway.config.tracing import Tracing
from gateway.documents.faults import ConfigFaults, Unfit
from gateway.documents.lenient import Seen, as_far_as_valid, validated
from gateway.documents.reader import Document, read


class Config(Strict):
    """A whole configuration file."""

    server: ServerSection = ServerSection()
    metrics: MetricsSection = MetricsSection()
    ray: Ray = Ray()
    tracing: Tracing | None = None  # None: no request is traced
    models: tuple[ModelSection, ...] = Field(min_length=1)

    def together(self) -> Iterable[Iterator[Unfit]]:
        return (self._same_models(), self._artifacts_of_two())

    def _same_models(self) -> Iterator[Unfit]:
        seen = set()
        for index, model in enumerate(self.models):
            with contextlib.suppress(NotKnown):
                if (model.name, model.version) in seen:
                    remedy = "choose another, or give each a `version` of its own"
                    found = f"version {model.version} of it is listed twice"
                    yield Unfit(found, remedy=remedy, at=("models", index, "name"))
                seen.add((model.name, model.version))

    def _artifacts_of_two(self) -> Iterator[Unfit]:
        """One artifact that two backends build in two ways: each `gateway compile` would replace what the last has made."""
        first: dict[str, tuple[str, object]] = {}
        for index, model in enumerate(self.models):
            for number, backend in enumerate(model.backends):
                with contextlib.suppress(NotKnown):
                    if (build := getattr(backend, "build", None)) is None:
                        continue
                    path = os.path.normpath(backend.model)  # type: ignore[union-attr]  # beside each `build`
                    way = (build, model.inputs, model.outputs, model.max_rows > 0)
                    name, before = first.setdefault(path, (model.name, way))
                    if before != way:
                        found = f"model {name!r} builds the same file in another way ({path})"
                        at = ("models", index, "backends", number, "model")
                        yield Unfit(found, expected="one build, and the same tensors", remedy="choose another file", at=at)


def load_config(path: str | Path) -> Config:
    """Read and validate a YAML file, "-" being standard input; its relative paths count from its folder.

    Raises: ConfigFaults.
    """
    return config_of(read(path))


def listening(server: ServerSection, given: Mapping[str, object], *, called: Callable[[str], str] = str) -> ServerSection:
    """The server with another host or other ports. called: what messages call a key. Raises: ConfigFaults."""
    try:
        return validated(ServerSection, Document("", {**server.model_dump(), **given}))
    except ConfigFaults as exc:  # a remedy speaks of files, and null can stand in them alone
        raise ConfigFaults(
            replace(fault, path=called(fault.path), expected=fault.expected.removesuffix(", or null"), remedy="")
            for fault in exc.faults
        ) from None


def located(document: object, folder: Path) -> object:
    """A configuration as it was read, with its relative paths counted from `folder`, which is that of its file.

    A new document; what validation is going to refuse stays as it is. `class_options` and `factory_options` are the user's own.
    """
    if not isinstance(document, dict):
        return document
    found = dict(document)
    if "server" in found:
        found["server"] = server = _counted(found["server"], ("run_dir", "state_dir"), folder)
        if isinstance(server, dict):
            files = {"tls": ("certificate", "key", "client_ca"), "access": ("keys",)}
            parts = {part: _counted(server[part], keys, folder) for part, keys in files.items() if part in server}
            found["server"] = server | parts
    if isinstance(models := found.get("models"), list):
        found["models"] = [
            {**model, "backends": [located_backend(backend, folder) for backend in model["backends"]]}
            if isinstance(model, dict) and isinstance(model.get("backends"), list)
            else model
            for model in models
        ]
    return found


def located_backend(backend: object, folder: Path) -> Any:
    """As `located`, for one entry of a model's backends."""
    if not isinstance(backend, dict) or backend.get("kind") == "triton":  # whose model is a name on another server
        return backend
    found = _counted(backend, ("model", "engines"), folder)
    return found | {"build": _counted(backend["build"], ("source",), folder)} if "build" in backend else found


def _counted(mapping: Any, keys: tuple[str, ...], folder: Path) -> Any:
    if not isinstance(mapping, dict):
        return mapping
    values = {key: mapping[key] for key in keys if isinstance(mapping.get(key), str) and mapping[key]}
    paths = {key: value for key, value in values.items() if not is_source(value) or ".py:" in value}  # not `module:name`
    return mapping | {key: os.path.normpath(folder / value) for key, value in paths.items()}


def parse_config(document: object, *, source: str) -> Config:
    """Validate a parsed document. source: what messages call it. Raises: ConfigFaults."""
    return config_of(Document(source, document))


def config_of(document: Document) -> Config:
    """Relative paths count from the document's folder, if it has one. Raises: ConfigFaults."""
    seen = config_as_far_as_valid(document)
    if seen.faults:
        raise ConfigFaults(seen.faults)
    return seen.found


def config_as_far_as_valid(document: Document) -> Seen[Config]:
    """The configuration, with NOT_KNOWN for what is at fault in it; and every fault."""
    folder = document.folder
    return as_far_as_valid(Config, document, (lambda value: value) if folder is None else partial(located, folder=folder))
