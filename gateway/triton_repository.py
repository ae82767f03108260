"""A model repository of Triton, or one model of it, as entries of a configuration; config.pbtxt is read as Triton reads it.

What changes answers and has no meaning here is refused by name (ensembles, sequences, decoupled models, reshapes); what only
tunes Triton is left aside and told. Source: Triton docs/user_guide/model_repository.md and model_configuration.md.
"""

from pathlib import Path
from typing import Any, Final

import backends
from backends.base import LoadFailed, TensorSpec
from backends.triton_python import read_pbtxt
from gateway.errors import ConfigError

_CONFIG: Final = "config.pbtxt"
# backend, or platform -> ours, and the file of a version
_RUNS: Final = {
    "onnxruntime": ("onnxruntime", "model.onnx"),
    "onnxruntime_onnx": ("onnxruntime", "model.onnx"),
    "pytorch": ("torch", "model.pt"),
    "pytorch_libtorch": ("torch", "model.pt"),
    "torch_aoti": ("torch", "model.pt2"),
    "python": ("python", "model.py"),
}
_MOST_SESSIONS: Final = 256


def is_model(folder: Path) -> bool:
    """Whether a folder is a model of a repository: it has a config.pbtxt, or a version with a file that Triton would find."""
    if (folder / _CONFIG).is_file():
        return True
    return any((version / file).exists() for version in _numbered(folder) for _, file in _RUNS.values())


def is_repository(folder: Path) -> bool:
    return any(entry.is_dir() and is_model(entry) for entry in folder.iterdir())


def read_model(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The entries of `models`, one for each version that is served, and what was left aside, one sentence each.

    Raises: ConfigError.
    """
    try:
        return _read_model(folder)
    except LoadFailed as exc:
        raise ConfigError(str(exc)) from exc


def _read_model(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    path = folder / _CONFIG
    where = str(path) if path.is_file() else str(folder)
    config = read_pbtxt(path) if path.is_file() else None
    versions = _numbered(folder)
    if not versions:
        raise ConfigError(
            f"{where}: no version: expected a folder named by a number, such as {folder.name}/1, with the model in it"
        )
    kind, file = _backend(where, config, versions)
    if config is None:
        return _from_files(folder.name, kind, file, versions)
    _refuse(where, config)
    notes = []
    if config.HasField("dynamic_batching"):
        notes.append(f"{folder.name}: dynamic_batching is left aside: batches are formed to the SLO (`slo`)")
    sessions = sum(max(group.count, 1) for group in config.instance_group) or 1
    backend: dict[str, Any] = {"kind": kind}
    if kind != "python" and any(group.Kind.Name(group.kind) == "KIND_GPU" for group in config.instance_group):
        backend["device"] = "cuda"
    batched = config.max_batch_size > 0
    inputs = _tensors(where, config.input, batched)
    outputs = _tensors(where, config.output, batched, folder)
    if kind == "torch":
        inputs, outputs = _ordered(inputs), _ordered(outputs)
    if not inputs or not outputs:
        if kind == "python":
            raise ConfigError(f"{where}: input, output: missing: state them, as auto_complete_config is not called here")
        if kind == "torch":
            raise ConfigError(f"{where}: input, output: missing: a PyTorch file does not tell them, so state them")
    entries = []
    for version in _wanted(where, config, versions):
        model = version / (config.default_model_filename or file)
        if not model.exists():
            raise ConfigError(f"{where}: no file {model}")
        entry: dict[str, Any] = {"name": config.name or folder.name}
        if version.name != "1":
            entry["version"] = version.name
        entry |= {key: tensors for key, tensors in (("inputs", inputs), ("outputs", outputs)) if tensors}
        entry["max_rows"] = config.max_batch_size
        place = f"{model}:TritonPythonModel" if kind == "python" else str(model)
        entry["backends"] = [
            {**backend, "model": place} | ({"sessions": min(sessions, _MOST_SESSIONS)} if sessions > 1 else {})
        ]
        entries.append(entry)
    return entries, notes


def _numbered(folder: Path) -> list[Path]:
    found = [
        entry for entry in folder.iterdir() if entry.is_dir() and entry.name.isdecimal() and not entry.name.startswith("0")
    ]
    return sorted(found, key=lambda entry: int(entry.name))


def _wanted(where: str, config: Any, versions: list[Path]) -> list[Path]:
    """By the version policy; without one, the highest. Raises: ConfigError, if it leaves none."""
    policy = config.version_policy
    if policy.HasField("all"):
        return versions
    if policy.HasField("specific"):
        found = [version for version in versions if int(version.name) in policy.specific.versions]
        if not found:
            raise ConfigError(
                f"{where}: version_policy: {list(policy.specific.versions)}: there are {[v.name for v in versions]}"
            )
        return found
    return versions[-(policy.latest.num_versions or 1) :]


def _backend(where: str, config: Any, versions: list[Path]) -> tuple[str, str]:
    named = (config.backend or config.platform) if config is not None else ""
    if named in _RUNS:
        return _RUNS[named]
    if config is not None and config.platform == "ensemble":
        raise ConfigError(f"{where}: platform: 'ensemble': not supported: put the steps into one class (`kind: python`)")
    if not named:  # Triton tells it from the file
        for kind, file in dict.fromkeys(_RUNS.values()):
            if any((version / file).exists() for version in versions):
                return kind, file
    supported = "onnxruntime, pytorch, torch_aoti, python"
    raise ConfigError(
        f"{where}: backend: {named!r}: not one that is read here ({supported}): serve it on Triton, and name that server in a "
        "configuration with `kind: triton`"
    )


def _refuse(where: str, config: Any) -> None:
    """Raises: ConfigError, for what would be answered otherwise than by Triton."""
    for key, instead in (
        ("ensemble_scheduling", "put the steps into one class (`kind: python`)"),
        ("sequence_batching", "keep the state at the client"),
    ):
        if config.HasField(key):
            raise ConfigError(f"{where}: {key}: not supported: {instead}, or serve it on Triton with `kind: triton`")
    if config.model_transaction_policy.decoupled:
        raise ConfigError(f"{where}: model_transaction_policy: decoupled: not supported: a request has one response here")
    for tensor in (*config.input, *config.output):
        if tensor.HasField("reshape"):
            raise ConfigError(f"{where}: {tensor.name}: reshape is not supported: state the dims that the model has")


def _tensors(where: str, tensors: Any, batched: bool, folder: Path | None = None) -> list[dict[str, Any]]:
    """folder: of the model, where its outputs' label files are."""
    found = []
    for tensor in tensors:
        datatype = tensor.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number[tensor.data_type].name
        datatype = datatype.removeprefix("TYPE_").replace("STRING", "BYTES")
        if datatype == "INVALID":
            raise ConfigError(f"{where}: {tensor.name}: data_type: missing, expected one such as TYPE_FP32")
        entry: dict[str, Any] = {"name": tensor.name, "datatype": datatype, "shape": [-1] * batched + list(tensor.dims)}
        if getattr(tensor, "optional", False):
            entry["optional"] = True
        if folder is not None and tensor.label_filename:
            try:
                entry["labels"] = (folder / tensor.label_filename).read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as exc:
                raise ConfigError(f"{where}: {tensor.name}: label_filename: {exc}") from exc
        found.append(entry)
    return found


def _ordered(tensors: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By position, where Triton's names for PyTorch say it: NAME__0, NAME__1."""
    indices = [tensor["name"].rpartition("__")[2] for tensor in tensors]
    if not all(index.isdecimal() for index in indices):
        return tensors
    return sorted(tensors, key=lambda tensor: int(tensor["name"].rpartition("__")[2]))


def _from_files(name: str, kind: str, file: str, versions: list[Path]) -> tuple[list[dict[str, Any]], list[str]]:
    """Of a model without config.pbtxt, which Triton too would complete from its file."""
    if kind == "python":
        raise ConfigError(f"{versions[-1].parent}: no {_CONFIG}: a Python model needs one that states its input and output")
    model = versions[-1] / file
    found = backends.read(kind, str(model))
    version = {} if versions[-1].name == "1" else {"version": versions[-1].name}
    return [
        {
            "name": name, **version, "inputs": [plain(tensor) for tensor in found.inputs],
            "outputs": [plain(tensor) for tensor in found.outputs],
            "max_rows": found.max_rows, "backends": [{"kind": kind, "model": str(model)}],
        }
    ], [f"{name}: {note}" for note in found.notes]  # fmt: skip


def plain(tensor: TensorSpec) -> dict[str, Any]:
    """A tensor as a configuration states it."""
    found: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
    return found | ({"optional": True} if tensor.optional else {}) | ({"labels": list(tensor.labels)} if tensor.labels else {})
