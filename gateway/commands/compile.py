"""`gateway compile CONFIG`: make the artifacts that the configuration's backends name and say how to build.

What an artifact was built from is recorded beside it, in ARTIFACT.build.json; one whose record still holds is left alone, so a
second run only compares. A file without such a record is the user's own and is never replaced.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import backends
import gateway
from backends.artifact_digests import artifact_digest, file_digest
from backends.base import BackendError
from gateway.config import Build, Config, ModelSection, NeuronBuild
from gateway.errors import ConfigError
from gateway.process.interrupts import ctrl_c_is_kept

_NEURON: Final = ("torch-neuronx", "neuronx-cc")
_ONNX: Final = ("onnxruntime", "onnxscript")
_INSTALLED: Final = frozenset(("site-packages", "dist-packages"))  # recorded by their versions, as far as they matter
_OURS: Final = tuple(Path(package.__file__ or "").resolve().parent for package in (backends, gateway))
_FUSED: Final = 2  # to be raised where `backends.onnxruntime_export` makes another file of the same code
_GUARDS: Final = 1  # the same of `backends.torch_export`


def compile_config(config: Config, *, names: Iterable[str] = (), report: Callable[[str], None] = print) -> None:
    """Build what is missing or no longer what the configuration says. names: only these models; empty: all.

    Raises: ConfigError, for an unknown model; once all others are built, with each artifact that cannot be built as configured.
    """
    wanted = set(names)
    unknown = wanted - {model.name for model in config.models}
    if unknown:
        raise ConfigError(f"no model {', '.join(sorted(unknown))} in the configuration")
    backends = [(model, each) for model in config.models if not wanted or model.name in wanted for each in model.backends]
    builds = [(model, each, build) for model, each in backends if (build := getattr(each, "build", None)) is not None]
    if not builds:
        report("nothing to build: no backend has `build`")
    failed: list[str] = []
    for model, backend, build in builds:
        try:
            report(_compiled(model, backend, build))
        except ConfigError as exc:
            failed.append(exc.message)
    if failed:
        raise ConfigError("\n".join(failed))


def _compiled(model: ModelSection, backend: Any, build: Build | NeuronBuild) -> str:
    artifact = Path(backend.model)
    record_path = artifact.with_name(artifact.name + ".build.json")
    record = _record(model, backend.kind, build)
    if artifact.exists():
        if not record_path.exists():
            return f"{artifact}: not built by this command, left as it is"
        with contextlib.suppress(ValueError):  # a record that was cut short is no record
            if _holds(json.loads(record_path.read_text(encoding="utf-8")), record, artifact, build.source):
                return f"{artifact}: up to date"
    lengths = model.ragged.buckets if model.ragged else ()
    try:
        artifact.parent.mkdir(parents=True, exist_ok=True)
        record_path.write_text("", encoding="utf-8")  # of whatever comes to be there from now on, until it is whole
        with ctrl_c_is_kept():
            line = backends.build(backend.kind, artifact, model.declared(), lengths=lengths, **build.model_dump())
        record |= {"modules": _modules(build.source), "artifact": artifact_digest(artifact)}
        record_path.write_text(json.dumps(record, indent=1), encoding="utf-8")
    except BackendError as exc:
        raise ConfigError(f"{model.name}: {backend.label}: {exc}") from exc
    except OSError as exc:
        raise ConfigError(f"{model.name}: {backend.label}: {exc.filename or artifact}: {exc.strerror or exc}") from exc
    finally:
        if not artifact.exists():
            record_path.unlink(missing_ok=True)
    return line


def _holds(recorded: Any, record: Mapping[str, Any], artifact: Path, source: str) -> bool:
    """Whether what is recorded of an artifact is what is there and what would be built."""
    if not isinstance(recorded, dict):
        return False
    if recorded.get("artifact") not in (None, artifact_digest(artifact)):  # None: older records do not tell
        return False
    folder = _folder_of_code(source)
    for name, sha256 in recorded.get("modules", {}).items():
        if folder is None or file_digest(folder / name) != sha256:
            return False
    built_from = {key: value for key, value in recorded.items() if key not in ("artifact", "modules")}
    build = built_from.get("build")
    if isinstance(build, dict) and isinstance(rows := build.get("row_sizes"), list):
        built_from["build"] = build | {"row_sizes": sorted(set(rows))}  # older records have them as they were written
    return built_from == record


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
    if kind == "torch":
        record["guards"] = _GUARDS
    return dict(json.loads(json.dumps(record)))


def _name_of_code(source: str) -> str:
    """The source, without the folder of its file: a checkout may be moved, and the file's content is recorded."""
    place, _, name = source.rpartition(":")
    return f"{Path(place).name}:{name}" if place.endswith(".py") else source


def _sha256_of_code(source: str) -> str | None:
    """Of the file that `source` names, found without running it; None where there is none, which the build will tell."""
    code = _file_of_code(source)
    return file_digest(code) if code is not None else None


def _file_of_code(source: str) -> Path | None:
    place = source.rpartition(":")[0]
    try:
        found = None if place.endswith(".py") or not place else find_spec(place)
    except ModuleNotFoundError:
        return None
    return Path(found.origin if found and found.origin else place).resolve()


def _folder_of_code(source: str) -> Path | None:
    """Where its neighbours are: the folder of a file, or the package of a module; None: it is a module by itself."""
    place, code = source.rpartition(":")[0], _file_of_code(source)
    if code is None or place.endswith(".py"):
        return code and code.parent
    levels = place.count(".") + (code.name == "__init__.py")
    return code.parents[levels - 1] if levels else None


def _modules(source: str) -> dict[str, str | None]:
    """SHA-256 of the modules that this process has imported from the folder of the code, by their paths below it."""
    folder = _folder_of_code(source)
    files = {Path(file).resolve() for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))}
    found = {
        file.relative_to(folder)
        for file in files
        if folder is not None
        and file.is_relative_to(folder)
        and file.is_file()  # some modules of PyTorch name one that is not
        and not _INSTALLED.intersection(file.relative_to(folder).parts)
        and not any(file.is_relative_to(own) for own in _OURS)
    }
    return {path.as_posix(): file_digest(folder / path) for path in sorted(found)} if folder is not None else {}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
