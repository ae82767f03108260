"""`gateway compile CONFIG`: make the artifacts that the configuration's backends name and say how to build.

What an artifact was built from is recorded beside it, in ARTIFACT.build.json; one whose record still holds is left alone, so a
second run only compares. A file without such a record is the user's own and is never replaced.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import backends
from backends.base import BackendError
from gateway.config import Build, Config, ModelSection, NeuronBuild
from gateway.errors import ConfigError, NotFound

_NEURON: Final = ("torch-neuronx", "neuronx-cc")
_ONNX: Final = ("onnxruntime", "onnxscript")
_FUSED: Final = 2  # to be raised where `backends.onnxruntime_export` makes another file of the same code


def compile_config(config: Config, *, names: Iterable[str] = (), report: Callable[[str], None] = print) -> None:
    """Build what is missing or no longer what the configuration says. names: only these models; empty: all.

    Raises: NotFound, ConfigError (the artifact cannot be built as configured).
    """
    wanted = set(names)
    unknown = wanted - {model.name for model in config.models}
    if unknown:
        raise NotFound(f"no model {', '.join(sorted(unknown))} in the configuration")
    for model in config.models:
        for backend in model.backends:
            build: Build | NeuronBuild | None = getattr(backend, "build", None)
            if build is not None and (not wanted or model.name in wanted):
                report(_compiled(model, backend, build))


def _compiled(model: ModelSection, backend: Any, build: Build | NeuronBuild) -> str:
    artifact = Path(backend.model)
    record_path = artifact.with_name(artifact.name + ".build.json")
    record = _record(model, backend.kind, build)
    if artifact.exists():
        if not record_path.exists():
            return f"{artifact}: not built by this command, left as it is"
        with contextlib.suppress(ValueError):  # a record that was cut short is no record
            if json.loads(record_path.read_text(encoding="utf-8")) == record:
                return f"{artifact}: up to date"
    lengths = model.ragged.buckets if model.ragged else ()
    try:
        line = backends.build(backend.kind, artifact, model.declared(), lengths=lengths, **build.model_dump())
    except BackendError as exc:
        raise ConfigError(f"{model.name}: {backend.label}: {exc}") from exc
    record_path.write_text(json.dumps(record, indent=1), encoding="utf-8")
    return line


def _record(model: ModelSection, kind: str, build: Build | NeuronBuild) -> dict[str, Any]:
    """All that the artifact depends on, as JSON gives it back."""
    compiled = isinstance(build, NeuronBuild)
    record: dict[str, Any] = {
        "build": build.model_dump() | {"source": _name_of_code(build.source)},
        "source_sha256": _sha256_of_code(build.source),
        "inputs": [tensor.model_dump() for tensor in model.inputs or ()],
        "outputs": [tensor.model_dump() for tensor in model.outputs or ()],
        "batched": model.max_rows > 0,
        "lengths": model.ragged.buckets if compiled and model.ragged else (),  # others keep open lengths open
        "libraries": {name: _version(name) for name in ("torch", *(_NEURON if compiled else _ONNX))},
    }
    if kind == "onnxruntime" and isinstance(build, Build) and build.precision == "fp32":
        record["fused"] = _FUSED
    return dict(json.loads(json.dumps(record)))


def _name_of_code(source: str) -> str:
    """The source, without the folder of its file: a checkout may be moved, and the file's content is recorded."""
    place, _, name = source.rpartition(":")
    return f"{Path(place).name}:{name}" if place.endswith(".py") else source


def _sha256_of_code(source: str) -> str | None:
    """Of the file that `source` names, found without running it; None where there is none, which the build will tell."""
    place = source.rpartition(":")[0]
    try:
        found = None if place.endswith(".py") or not place else find_spec(place)
    except ModuleNotFoundError:
        return None
    code = Path(found.origin if found and found.origin else place)
    return hashlib.sha256(code.read_bytes()).hexdigest() if code.is_file() else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
