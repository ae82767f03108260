"""From a model's file to the configuration that serves it: what kind of thing it is, what it takes, and under which name.

`guess` reads files and may run the model on an example; what it gives is a document as it could stand in a YAML file, and
`written` is that file. A file that is no model is refused by what it is, with the way on.
"""

import contextlib
import inspect
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any, Final, TypeAlias

import numpy as np
import yaml

import backends
from backends.artifacts import MODEL_FILES, UNKNOWN, Artifact, identify
from backends.base import NO_OPTIONS, LoadFailed
from backends.datatypes import NUMPY, normalised
from backends.near_file import near_file
from backends.regular_file import absent, special
from backends.source import is_source, load_object
from gateway.configuring.archive import unpacked, unpacked_to_stay
from gateway.configuring.argument import ARCHIVES, CONFIGURATIONS, is_archive, kept
from gateway.configuring.code_models import models_of
from gateway.configuring.decoration import mark_of
from gateway.configuring.sagemaker_package import is_package, is_ray_package, ray_package_refused, read_package
from gateway.configuring.triton_repository import check_entry, is_model, is_repository, plain, read_model
from gateway.errors import ConfigError
from gateway.process.announcement import named

Example: TypeAlias = str | os.PathLike[str] | Mapping[str, object]
"""One request: a file that holds it, or its arrays (or lists) by input name."""

EXAMPLES: Final = (".example.json", ".example.npz")  # beside a model's file, in place of the file's suffix
# Beside models in a folder, and not worth a word.
_BESIDE: Final = (".md", ".txt", ".json", ".npz", ".npy", ".csv", ".data", ".onnx_data", ".log", *CONFIGURATIONS)
_FORMS: Final = (
    "an .onnx, .pt or .pt2 file, FILE.py:Class, FILE.py:function, a folder of these, a Triton model repository, a package as "
    "made for SageMaker, or a .yaml"
)


@dataclass(frozen=True, slots=True)
class Guess:
    """document: a configuration, its paths absolute. notes: what was taken for granted or left aside, one sentence each."""

    document: dict[str, Any]
    notes: tuple[str, ...] = field(default=())


def guess(
    what: str, *, example: Example | None = None, environment: Mapping[str, str] = NO_OPTIONS, beside: Path | None = None
) -> Guess:
    """The configuration that serves a model, told from the model.

    what: a path, or `FILE.py:name` / `module:name`. example: one request, where the model does not say its inputs.
    environment: in which SAGEMAKER_ variables may say more of a package that is made for SageMaker. beside: the file that is
    going to say it, beside which an archive is unpacked; None: there is none, and it is unpacked for as long as it is used.
    Raises: ConfigError, with what to do; OSError, if there is no room beside it.
    """
    request = _request(example) if example is not None else None
    place, _, name = what.rpartition(":")
    if is_source(what) and not Path(what).exists():
        file = Path(place).absolute()
        if place.endswith(".py") and not file.is_file():
            raise ConfigError(_absent(file))
        source = f"{file}:{name}" if place.endswith(".py") else what
        if name == "TritonPythonModel":
            raise ConfigError(f"{file}: is one version of a model of Triton's: serve its folder, {file.parent.parent}")
        stem = file.stem if place.endswith(".py") else place.rpartition(".")[2]
        return _configuration([_of_code(stem, source, request or _beside(file))])
    if not what:  # which as a path is the folder that this was started in
        raise ConfigError(f"MODEL: '': expected {_FORMS}")
    path = Path(os.path.normpath(Path(what).absolute()))
    if what.endswith(".py:"):
        raise ConfigError(f"{what}: no name behind the colon: expected {place}:Class, {place}:function, or {place}")
    if not path.exists() or special(path):
        raise ConfigError(_absent(path))
    called = "" if request is None else _called(example)
    if is_archive(path):
        return _of_archive(path, beside, environment, called)
    if not path.is_dir():
        return _configuration([_of_file(path, request)])
    return _of_directory(path, path.name, environment, called)


def _of_archive(archive: Path, beside: Path | None, environment: Mapping[str, str], example: str) -> Guess:
    name = archive.name[: -len(next(suffix for suffix in ARCHIVES if archive.name.lower().endswith(suffix)))]
    with contextlib.ExitStack() as failed:
        if beside is None:
            folder = unpacked(archive, kept())
            where = f"{folder}, which is removed when it is not used: `gateway init {quote(str(archive))} -o FILE` unpacks it "
            where += "beside FILE, to stay"
        elif beside.name == name:
            raise ConfigError(f"-o: {beside}: the folder that {archive} is unpacked in has this name: choose another")
        else:
            folder, where = beside.parent / name, f"{name}, beside this file"
            failed.enter_context(unpacked_to_stay(archive, kept(), folder))
        try:
            found = _of_directory(folder, name, environment, example)
        except ConfigError as exc:
            told = _packed_too_high(archive, folder, environment) or exc.message.replace(str(folder), str(archive))
            raise ConfigError(told) from exc
    return replace(found, notes=(f"{archive.name} is unpacked in {where}", *found.notes))


def _packed_too_high(archive: Path, folder: Path, environment: Mapping[str, str]) -> str:
    """Of an archive whose only folder has what it is to have itself; empty: it is another fault."""
    only, *others = [entry for entry in folder.iterdir() if not entry.name.startswith(".")] or [folder]
    with contextlib.suppress(ConfigError):
        if not others and only != folder and only.is_dir() and is_package(only, environment):
            pack = f"tar czf {quote(archive.name)} -C {quote(only.name)} ."
            return f"{archive}: no model in it: all of it is in the folder {only.name}, a package: pack its content: {pack}"
    return ""


def _called(example: Example | None) -> str:
    return "example" if isinstance(example, Mapping) else f"--example: {example}"


def _of_directory(path: Path, name: str, environment: Mapping[str, str], example: str) -> Guess:
    """name: of the model, where the folder is one. example: how one was given that is of one model; empty: none was."""
    if is_package(path, environment):
        model, notes = read_package(path, name=name, environment=environment, kept=kept)
        return _configuration([_Entry(model, notes)])
    if is_ray_package(path):
        raise ray_package_refused(path)
    if is_model(path):
        return _of_triton([path])
    if is_repository(path):
        return _of_triton(sorted(entry for entry in path.iterdir() if entry.is_dir()))
    if example:
        raise ConfigError(f"{example}: is of one model, but {path} is a folder: put it beside a model, as NAME{EXAMPLES[0]}")
    return _of_folder(path)


def written(found: Guess, folder: Path) -> str:
    """The document as YAML, its paths counted from `folder`, which the file is going to be in; the notes as comments."""
    models = [
        {**model, "backends": [{**backend, "model": _relative(backend["model"], folder)} for backend in model["backends"]]}
        for model in found.document["models"]
    ]
    notes = "".join(f"# {note}\n" for note in found.notes)
    return notes + yaml.dump(_laid_out({**found.document, "models": models}), Dumper=_Dumper, sort_keys=False, width=10_000)


def _request(example: Example) -> Mapping[str, object]:
    if isinstance(example, Mapping):
        return {str(name): value for name, value in example.items()}
    path = Path(example)
    if not path.exists() or special(path):
        raise ConfigError(f"{path.absolute()}: {absent(path)}; expected one request, as the example")
    return read_example(path)


def _absent(path: Path) -> str:
    return f"{path}: {absent(path)}; {near_file(path) or f'expected {_FORMS}'}"


def read_example(path: Path) -> Mapping[str, object]:
    """One request: arrays of a v2 request in JSON or of an .npz, or the elements by input name in JSON, as nested lists.

    Raises: ConfigError.
    """
    try:
        if path.suffix == ".npz":
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        given = json.loads(path.read_text(encoding="utf-8-sig"))
        if not isinstance(given, dict) or not given:
            raise ValueError("it is no object with inputs")
        if isinstance(given.get("inputs"), list):
            return {tensor["name"]: _array(tensor) for tensor in given["inputs"]}
        arrays = normalised(given)
        if odd := [name for name, array in arrays.items() if array.dtype.kind == "O" and not _is_text(array)]:
            raise ValueError(f"{', '.join(odd)}: neither numbers nor text in lists of equal length")
        return given
    except Exception as exc:  # whatever numpy, zipfile and json make of a file that is none
        raise ConfigError(
            f'{path.absolute()}: no example ({type(exc).__name__}: {exc}): expected a request, {{"inputs": [{{"name": "x", '
            '"datatype": "FP32", "shape": [1, 4], "data": [0, 0, 0, 0]}]}, {"x": [[0, 0]]}, or an .npz of arrays by input name'
        ) from exc


def _is_text(array: np.ndarray) -> bool:
    """Whether it is of texts, beside which numbers are texts too."""
    return all(np.isscalar(element) for element in array.flat) and any(isinstance(element, str) for element in array.flat)


def _array(tensor: dict[str, Any]) -> np.ndarray:
    datatype = tensor["datatype"]
    if datatype not in NUMPY:
        raise ValueError(f"datatype {datatype!r} is none of {', '.join(NUMPY)}")
    flat = np.array(tensor["data"], NUMPY[datatype]).reshape(tensor["shape"])
    if datatype == "BYTES":
        return np.array([text.encode() for text in flat.flat], object).reshape(tensor["shape"])
    return flat


@dataclass(frozen=True, slots=True)
class _Entry:
    """One of `models`, and what is to be said of it."""

    model: dict[str, Any]
    notes: tuple[str, ...] = ()


def _configuration(entries: list[_Entry], notes: tuple[str, ...] = ()) -> Guess:
    """Raises: ConfigError."""
    for entry in entries:
        check_entry(entry.model, entry.model["backends"][0]["model"])
    of_models = tuple(f"{entry.model['name']}: {note}" for entry in entries for note in entry.notes)
    return Guess({"models": [entry.model for entry in entries]}, of_models + notes)


def _of_file(path: Path, example: Mapping[str, object] | None) -> _Entry:
    if path.suffix == ".py":
        return _of_code(path.stem, f"{path}:{_the_model_in(path)}", example or _beside(path))
    artifact = _identified(path)
    if not artifact.kind:
        named = f"; the name of a configuration ends in {CONFIGURATIONS[0]}" if artifact == UNKNOWN else ""
        raise ConfigError(f"{path}: {artifact.what}: {artifact.way}{named}")
    return _read(path.stem, artifact.kind, str(path), example or _beside(path))


def _identified(path: Path) -> Artifact:
    try:
        return identify(path)
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc


def _of_code(name: str, source: str, example: Mapping[str, object] | None) -> _Entry:
    """A class with predict, a function; or what makes an nn.Module: its class, or a function without parameters."""
    try:
        code = load_object(source)
    except LoadFailed as exc:
        raise ConfigError(str(exc)) from exc
    mark = mark_of(code)
    name = mark.name or name
    entry = (
        _read(name, "torch", source, example)
        if _makes_a_module(code)
        else _read(name, "python", source, example, try_rows=mark.max_rows is None)
    )
    return entry if mark.max_rows is None else replace(entry, model={**entry.model, "max_rows": mark.max_rows})


def _makes_a_module(code: Any) -> bool:
    """Told without PyTorch: whose modules have `forward` and `state_dict`, and whose makers say or show it."""
    if isinstance(code, type):
        return hasattr(code, "forward") and hasattr(code, "state_dict") and not hasattr(code, "predict")
    if not inspect.isfunction(code):
        return False
    try:
        parameters = inspect.signature(code).parameters.values()
    except ValueError:  # it wraps compiled code, which may not tell
        return False
    return all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in parameters)


def _read(name: str, kind: str, model: str, example: Mapping[str, object] | None, **options: Any) -> _Entry:
    try:
        found = backends.read(kind, model, example=example, **options)
    except LoadFailed as exc:
        raise ConfigError(str(exc)) from exc
    tensors = {"inputs": [plain(t) for t in found.inputs], "outputs": [plain(t) for t in found.outputs]}
    return _Entry(
        {"name": name, **tensors, "max_rows": found.max_rows, "backends": [{"kind": kind, "model": model}]}, found.notes
    )


def _beside(path: Path) -> Mapping[str, object] | None:
    for suffix in EXAMPLES:
        if (beside := path.with_name(path.stem + suffix)).is_file():
            return read_example(beside)
    return None


def _the_model_in(path: Path) -> str:
    """The one model of a Python file, which is read and not run. Raises: ConfigError."""
    names = models_of(path)
    if len(names) == 1:
        return names[0]
    if not names:
        raise ConfigError(f"{path}: no model in it: expected a class with a method `predict`, or a function `predict`")
    choice = ", ".join(f"{path.name}:{name}" for name in names)
    raise ConfigError(f"{path}: which of {choice}? Name one, or mark one alone with `@gateway.model`")


def _of_triton(folders: list[Path]) -> Guess:
    models: list[dict[str, Any]] = []
    notes: list[str] = []
    faults: list[str] = []
    for folder in folders:
        if not is_model(folder):
            notes.append(f"{folder} is left aside: it has neither a config.pbtxt nor a version")
            continue
        try:
            entries, told = read_model(folder)
        except ConfigError as exc:
            faults.append(exc.message)
            continue
        models += entries
        notes += told
    if faults:
        raise ConfigError("\n".join(faults))
    return Guess({"models": models}, tuple(notes))


def _of_folder(folder: Path) -> Guess:
    """Each file a model; what is none is told. Raises: ConfigError, with all faults."""
    models, notes, faults = _models_in(folder)
    if faults:  # which is known before any model is loaded
        raise ConfigError("\n".join(faults))
    if not models:
        raise ConfigError("\n".join([f"{folder}: no model in this folder: expected {_FORMS}", *notes]))
    entries: list[_Entry] = []
    for path in models:
        try:
            entries.append(_of_file(path, None))
        except ConfigError as exc:
            faults.append(exc.message)
    if faults:
        raise ConfigError("\n".join(faults))
    return _configuration(entries, tuple(notes))


def _models_in(folder: Path) -> tuple[list[Path], list[str], list[str]]:
    """The files that are models, notes of what is left aside, and faults."""
    models: dict[str, Path] = {}
    notes: list[str] = []
    faults: list[str] = []
    without: list[str] = []
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith((".", "__")))
    for path in (entry for entry in entries if entry.is_file() and not entry.name.lower().endswith(_BESIDE)):
        try:
            if path.suffix == ".py":
                if not models_of(path, in_folder=True):
                    without.append(path.name)
                    continue
            else:
                artifact = _identified(path)
                if not artifact.kind and path.with_suffix(".py").is_file():
                    continue  # what that code loads
                if artifact.damaged and path.suffix.lower() in MODEL_FILES:
                    faults.append(f"{path}: {artifact.what}: {artifact.way}")
                    continue
                if not artifact.kind:
                    notes.append(f"{path.name} is left aside, it is {artifact.what}: {artifact.way}")
                    continue
        except ConfigError as exc:
            faults.append(exc.message)
            continue
        first = models.setdefault(path.stem, path)
        if first != path:
            faults.append(
                f"{path}: a second model named {path.stem!r}, beside {first.name}: rename one of them or move it away"
            )
    if without:
        notes.append(
            f"left aside, without a class with `predict` or a `predict` of their own: {named(without)}; "
            "to serve another function, name it: FILE.py:function"
        )
    if no_files := [entry.name for entry in entries if special(entry)]:
        notes.append(f"left aside, neither files nor folders: {named(no_files)}")
    folders = [f"{entry.name}/" for entry in entries if entry.is_dir()]
    if folders:
        notes.append(f"left aside, folders: {named(folders)}; to serve what is in one, name it")
    return list(models.values()), notes, faults


def _relative(model: str, folder: Path) -> str:
    """From a folder; as it is, where that would only climb to the root; `module:name` as it is."""
    if not os.path.isabs(model):
        return model
    relative = os.path.relpath(model, folder)
    return model if relative.startswith(os.path.join("..", "..", "..")) else relative


class _Line(dict[str, Any]):
    """What YAML writes on one line."""


class _Dumper(yaml.SafeDumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # items of a list stand in from its key
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:  # who edits one tensor does not mean another
        return True


_Dumper.add_representer(_Line, lambda dumper, data: dumper.represent_mapping("tag:yaml.org,2002:map", data, flow_style=True))


def _laid_out(document: dict[str, Any]) -> dict[str, Any]:
    models = [
        {
            key: [_Line(entry) for entry in value] if key in ("inputs", "outputs", "backends") else value
            for key, value in model.items()
        }
        for model in document["models"]
    ]
    return {**document, "models": models}
