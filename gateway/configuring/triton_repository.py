"""A model repository of Triton, or one model of it, as entries of a configuration; config.pbtxt is read as Triton reads it.

What changes answers and has no meaning here is refused by name (`_refuse`); what only tunes Triton is left aside and told, with
what to use here (`_left_aside`). Source: Triton, docs/user_guide/model_repository.md, model_configuration.md.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import backends
from backends.artifacts import TORCHSCRIPT, identify
from backends.base import LoadFailed, ModelSpec, TensorSpec
from backends.check import gpus as gpus_here
from backends.discovery import untried
from backends.regular_file import file_bytes, special
from backends.torch_discovery import forward_arguments
from backends.triton_python import CLASS, completed, read_pbtxt
from gateway.config import ModelSection
from gateway.documents.faults import ConfigFaults
from gateway.documents.lenient import validated
from gateway.documents.reader import Document
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
    """Whether a folder is a model of a repository: it has a config.pbtxt, or a version with a file that Triton would find.

    One that may not be entered, such as `lost+found` of a volume, is none.
    """
    try:
        if (folder / _CONFIG).exists():
            return True
        return any((version / file).exists() for version in _numbered(folder) for _, file in _RUNS.values())
    except PermissionError:
        return False


def is_repository(folder: Path) -> bool:
    return any(entry.is_dir() and is_model(entry) for entry in folder.iterdir())


def read_model(folder: Path, *, gpus: int | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """The entries of `models`, one for each version that is served, and what was left aside, one sentence each.

    gpus: of this machine; None looks. Raises: ConfigError.
    """
    try:
        return _read_model(folder, has_gpu=bool(gpus_here() if gpus is None else gpus))
    except LoadFailed as exc:
        raise ConfigError(str(exc)) from exc


def _read_model(folder: Path, *, has_gpu: bool) -> tuple[list[dict[str, Any]], list[str]]:
    path = folder / _CONFIG
    where = str(path) if path.exists() else str(folder)
    config = read_pbtxt(path) if path.exists() else None
    versions = _numbered(folder)
    if not versions:
        raise ConfigError(
            f"{where}: no version: expected a folder named by a number, such as {folder.name}/1, with the model in it"
        )
    kind, file = _backend(where, config, versions)
    if config is None and kind == "python":
        config = read_pbtxt(path)  # which is empty, for `auto_complete_config` to fill
    if config is None:
        return _from_files(folder.name, kind, file, versions)
    _refuse(where, config, kind)
    notes = [
        f"{folder.name}: {fields} is left aside: {instead}" for fields, instead in _left_aside(config, kind, has_gpu=has_gpu)
    ]
    sessions = min(_instances(config), _MOST_SESSIONS)
    backend: dict[str, Any] = {"kind": kind}
    if kind != "python" and any(map(_on_gpu, config.instance_group)):
        gpus = _gpus(config)
        backend["device"] = f"cuda:{gpus[0]}" if kind == "torch" and len(gpus) == 1 and gpus[0] else "cuda"
    if kind != "python" and (threads := _threads(config)):
        backend["threads"] = threads
    options = _output_indices(config) if kind == "torch" else {}
    entries = []
    for version in _wanted(where, config, versions):
        model = _file_of(version, kind, config.default_model_filename or file)
        if not model.exists():
            raise ConfigError(f"{where}: no file {model}")
        entry: dict[str, Any] = {"name": config.name or folder.name}
        if version.name != "1":
            entry["version"] = version.name
        if kind == "onnxruntime" and not (config.input or config.output or config.max_batch_size):
            found, told = _of_file(kind, model)
        else:
            own = completed(config, model) if kind == "python" else config
            found, told = _tensors_and_rows(where, own, kind, folder, model), ()
            if kind != "python" and _apart_on_triton(own):
                found["max_rows"], told = _rows_tried(kind, str(model), found, options)
        entry |= found
        notes += [f"{folder.name}: {note}" for note in told]
        place = f"{model}{CLASS}" if kind == "python" else str(model)
        entry["backends"] = [{**backend, "model": place, **options} | ({"sessions": sessions} if sessions > 1 else {})]
        check_entry(entry, where, lambda key: _in_pbtxt(key, config))
        entries.append(entry)
    return entries, notes


def _file_of(version: Path, kind: str, file: str) -> Path:
    """A version's model, which may not be there. Raises: ConfigError, for what is neither file nor folder."""
    model = version / file
    if kind == "onnxruntime" and model.is_dir():  # with the files of its weights (Triton, docs/user_guide/model_repository.md)
        model /= _RUNS[kind][1]
    if what := special(model):
        raise ConfigError(f"{model}: {what}")
    return model


def _tensors_and_rows(where: str, config: Any, kind: str, folder: Path, model: Path) -> dict[str, Any]:
    """folder: of the model. model: the file of a version."""
    batched = config.max_batch_size > 0
    inputs = _tensors(where, config.input, batched)
    outputs = _tensors(where, config.output, batched, folder)
    if not inputs or not outputs:
        if kind == "python":
            raise ConfigError(
                f"{where}: input, output: missing: state them in a {_CONFIG}, or by auto_complete_config in {model}"
            )
        if kind == "torch":
            raise ConfigError(f"{where}: input, output: missing: a PyTorch file does not tell them, so state them")
    passed = _as_arguments(where, model, inputs) if kind == "torch" else inputs
    found: dict[str, Any] = {key: tensors for key, tensors in (("inputs", passed), ("outputs", outputs)) if tensors}
    return found | {"max_rows": config.max_batch_size}


def _apart_on_triton(config: Any) -> bool:
    """Whether Triton lets a model of a file have rows, but keeps those of several requests apart.

    Source: Triton, docs/user_guide/batcher.md.
    """
    return config.max_batch_size > 1 and not config.HasField("dynamic_batching")


def _rows_tried(kind: str, model: str, stated: dict[str, Any], options: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
    """The rows of a batch here, where those of several requests share one, and what is to be told of them.

    model, stated, options: as in an entry.
    """
    inputs, outputs = (
        tuple(TensorSpec(t["name"], t["datatype"], tuple(t["shape"]), t.get("optional", False)) for t in stated.get(key, ()))
        for key in ("inputs", "outputs")
    )
    try:
        found = backends.tried(kind, model, ModelSpec("", inputs, outputs, stated["max_rows"]), **options)
    except LoadFailed as exc:
        return stated["max_rows"], (untried(f"as it cannot be run here ({' '.join(str(exc).split())})"),)
    return found.max_rows, found.notes


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


def _refuse(where: str, config: Any, kind: str) -> None:
    """Raises: ConfigError, for what would be answered otherwise than by Triton."""
    if config.max_batch_size < 0:
        raise ConfigError(
            f"{where}: max_batch_size: {config.max_batch_size}: expected the most rows of a batch, or 0: no batch dimension"
        )
    set_here = {field.name for field, _ in config.ListFields()}
    for key, instead in _REFUSED.items():
        if key in set_here:
            before = ", whose clients call it directly" if key == "sequence_batching" else " with `kind: triton`"
            raise ConfigError(f"{where}: {key}: not supported: {instead}, or serve it on Triton{before}")
    if config.model_transaction_policy.decoupled and kind != "python":
        raise ConfigError(
            f"{where}: model_transaction_policy: decoupled: not supported: of the models that are read here only Python ones "
            "answer in parts, or serve it on Triton with `kind: triton`"
        )
    if kind == "torch" and config.runtime.endswith(".py"):
        instead = "name what makes the module in a configuration: `kind: torch`, `model: FILE.py:make`"
        raise ConfigError(f"{where}: runtime: {config.runtime!r}: not supported: {instead}")
    for tensor in (*config.input, *config.output):
        fields = {field.name for field, _ in tensor.ListFields()}
        for key, instead in _REFUSED_OF_TENSORS.items():
            if key in fields and (key, kind) != ("allow_ragged_batch", "python"):  # which gets one shape at a time here
                raise ConfigError(f"{where}: {tensor.name}: {key} is not supported: {instead}")


_REFUSED: Final = {
    "ensemble_scheduling": "put the steps into one class (`kind: python`)",
    "sequence_batching": "keep the state at the client",
    "batch_input": "compute it in the model",
    "batch_output": "compute it in the model",
    "model_operations": "no library of operators is loaded here: export the model without them",
    "model_repository_agents": "put the files as the agent would leave them into the repository, and remove it",
}
_REFUSED_OF_TENSORS: Final = {
    "reshape": "state the dims that the model has",
    "is_shape_tensor": "give its values by a tensor",
    "is_non_linear_format_io": "export the model with linear formats",
    "allow_ragged_batch": "a configuration's `ragged` pads requests; without it each is batched with those of its shape",
}


def _left_aside(config: Any, kind: str, *, has_gpu: bool) -> Iterator[tuple[str, str]]:
    """The fields that only tune Triton, with what is set in them, and what is to be used here instead."""
    for field, value in config.ListFields():
        message = hasattr(value, "ListFields")
        parts = _set_in(value) if message else []
        if field.name in _ASIDE and (parts or not message):
            yield _named(field.name, parts), _ASIDE[field.name]
    if config.HasField("dynamic_batching"):
        parts = _set_in(config.dynamic_batching)
        ways = ["batches are formed to the SLO (`slo`)", *(_QUEUE[part] for part in parts if part in _QUEUE)]
        yield _named("dynamic_batching", parts), ", ".join(dict.fromkeys(ways))
    parts = list(dict.fromkeys(part for group in config.instance_group for part in _set_in(group)))
    if tuned := [part for part in parts if part in _TUNES_INSTANCES]:
        yield _named("instance_group", tuned), "`server.shared_workers` limits what runs at once"
    if (count := _instances(config)) > _MOST_SESSIONS:
        yield f"instance_group (count: {count})", f"a backend has {_MOST_SESSIONS} `sessions` at most, and gets them"
    if kind == "python" and any(map(_on_gpu, config.instance_group)):
        yield "instance_group (KIND_GPU)", "`initialize` is told that it is on a CPU"
    elif (
        kind != "python" and has_gpu and not any(_kind_of(group) in ("KIND_GPU", "KIND_CPU") for group in config.instance_group)
    ):
        yield "instance_group (KIND_AUTO)", "without KIND_GPU it is on the CPU; `device: cuda` puts it on a GPU"
    elif len(gpus := _gpus(config)) > 1 or (gpus and gpus[0] and kind == "onnxruntime"):
        yield "instance_group (gpus)", _ONE_GPU[kind]
    used = _THREADS if _threads(config) else ()
    if names := sorted(
        name for name in config.parameters if (name == "EXECUTION_ENV_PATH" if kind == "python" else name not in used)
    ):
        yield _named("parameters", names), _OF_PARAMETERS[kind == "python"]


def _set_in(message: Any) -> list[str]:
    return [field.name for field, _ in message.ListFields()]


def _named(field: str, parts: list[str]) -> str:
    return f"{field} ({', '.join(parts)})" if parts else field


def _instances(config: Any) -> int:
    return sum(max(group.count, 1) for group in config.instance_group if not group.passive) or 1


def _kind_of(group: Any) -> str:
    return str(group.Kind.Name(group.kind))


def _on_gpu(group: Any) -> bool:
    return _kind_of(group) == "KIND_GPU"


def _gpus(config: Any) -> list[int]:
    return sorted({gpu for group in config.instance_group if _on_gpu(group) for gpu in group.gpus})


def _threads(config: Any) -> int:
    """Of one run; 0: not said."""
    given = [config.parameters[name].string_value for name in _THREADS if name in config.parameters]
    return int(given[0]) if given and given[0].isdecimal() else 0


_THREADS: Final = ("intra_op_thread_count", "INTRA_OP_THREAD_COUNT")  # of Triton's onnxruntime and pytorch backends
_TUNES_INSTANCES: Final = ("rate_limiter", "secondary_devices", "host_policy")
_ONE_GPU: Final = {
    "torch": "it is on one GPU here: write a backend for each, with `device: cuda:1`",
    "onnxruntime": "it is on the first GPU that CUDA_VISIBLE_DEVICES names",
}
_OF_PARAMETERS: Final = {
    True: "install what the model imports beside the gateway",
    False: "what tunes a backend are keys of it",
}
_ASIDE: Final = {
    "optimization": "a backend has `cuda_graphs` and `precision`; `kind: tensorrt` runs an ONNX file",
    "model_warmup": "every model is run before traffic, on inputs of ones",
    "response_cache": "every request is computed; cache at the client",
    "metric_tags": "metrics have the labels model, version and backend",
    "model_metrics": "metrics have the labels model, version and backend",
    "cc_model_filenames": "the file is the one of `default_model_filename`, whatever the GPU",
}
_QUEUE: Final = {
    "preserve_ordering": "each request is answered when it is done",
    "priority_levels": "a request's `priority` counts from 1 to 4",
    "default_priority_level": "a request's `priority` counts from 1 to 4",
    "default_queue_policy": "`batching.max_queue_rows` and a request's `timeout` bound the queue",
    "priority_queue_policy": "`batching.max_queue_rows` and a request's `timeout` bound the queue",
}


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
                entry["labels"] = _lines(file_bytes(folder / tensor.label_filename).decode("utf-8"))
            except (OSError, UnicodeDecodeError) as exc:
                raise ConfigError(f"{where}: {tensor.name}: label_filename: {exc}") from exc
        found.append(entry)
    return found


def _lines(text: str) -> list[str]:
    """Each ends at \\n, as in Triton's label files; a \\r before it is dropped. `splitlines` splits at other characters too."""
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def _place_in(name: str) -> int | None:
    """Of a tensor of PyTorch: of `NAME__2`, 2. Source: README of triton-inference-server/pytorch_backend."""
    number = name.partition("__")[2]
    return int(number) if number.isdecimal() else None


def _output_indices(config: Any) -> dict[str, Any]:
    """The option of that name, where the names of all outputs say which results they are."""
    places = [_place_in(tensor.name) for tensor in config.output]
    return {} if None in places else {"output_indices": places}


def _as_arguments(where: str, model: Path, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In the order of TorchScript's `forward`, where all are named as its arguments; else by the places that their names say.

    So does Triton, whose names say them as NAME__0, NAME__1.
    Raises: ConfigError, if an argument before one of them is no input, and has no default, or there is a gap in the places.
    """
    by_place = {_place_in(tensor["name"]): tensor for tensor in inputs}
    if by_place.keys() == {*range(len(inputs))}:
        return [by_place[place] for place in range(len(inputs))]
    if len(inputs) < 2 and None in by_place:
        return inputs
    arguments = forward_arguments(str(model)) if identify(model) == TORCHSCRIPT else []
    order = [argument.name for argument in arguments]
    if any(tensor["name"] not in order for tensor in inputs):
        if None in by_place:
            return inputs
        named = ", ".join(tensor["name"] for tensor in inputs)
        raise ConfigError(
            f"{where}: input: {named}: expected the places of the arguments, 0 to {len(inputs) - 1}, at the ends of the names"
        )
    passed = sorted(inputs, key=lambda tensor: order.index(tensor["name"]))
    names = [tensor["name"] for tensor in passed]
    for index, argument in enumerate(arguments[: order.index(names[-1])]):
        if argument.name not in names and not argument.has_default:
            behind = next(name for name in order[index:] if name in names)
            raise ConfigError(
                f"{where}: input: {argument.name!r}: missing, which `forward({', '.join(order)})` of {model} takes before "
                f"{behind!r}: state it, with `optional: true` where it may be left out"
            )
    return passed


def _in_pbtxt(key: str, config: Any) -> str:
    """What a key of an entry is called in config.pbtxt."""
    if key.endswith(".threads"):
        return _named("parameters", [name for name in _THREADS if name in config.parameters])
    for ours, theirs in _FIELDS.items():
        key = re.sub(ours, theirs, key)
    batched = config.max_batch_size > 0
    return re.sub(r"\.shape\[(\d+)\]", lambda place: f".dims[{int(place[1]) - batched}]", key)


_FIELDS: Final = {
    "^(in|out)puts": r"\1put",
    r"\.shape$": ".dims",
    r"\.labels.*": ".label_filename",
    "^max_rows$": "max_batch_size",
}


def _from_files(name: str, kind: str, file: str, versions: list[Path]) -> tuple[list[dict[str, Any]], list[str]]:
    """Of a model without config.pbtxt, which Triton too would complete from its file."""
    model = _file_of(versions[-1], kind, file)
    found, notes = _of_file(kind, model)
    version = {} if versions[-1].name == "1" else {"version": versions[-1].name}
    entry = {"name": name, **version, **found, "backends": [{"kind": kind, "model": str(model)}]}
    check_entry(entry, str(model))
    return [entry], [f"{name}: {note}" for note in notes]


def _of_file(kind: str, model: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Tensors and rows, and what is to be told of them."""
    found = backends.read(kind, str(model))
    tensors = {"inputs": [plain(tensor) for tensor in found.inputs], "outputs": [plain(tensor) for tensor in found.outputs]}
    return tensors | {"max_rows": found.max_rows}, found.notes


def check_entry(entry: dict[str, Any], where: str, called: Callable[[str], str] = str) -> None:
    """Raises: ConfigError, for what no configuration may say of a model. where, called: it, and its keys, in messages."""
    try:
        validated(ModelSection, Document(where, entry))
    except ConfigFaults as exc:  # whose remedies are of configurations
        raise ConfigFaults(replace(fault, path=called(fault.path), remedy="") for fault in exc.faults) from None


def plain(tensor: TensorSpec) -> dict[str, Any]:
    """A tensor as a configuration states it."""
    found: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
    return found | ({"optional": True} if tensor.optional else {}) | ({"labels": list(tensor.labels)} if tensor.labels else {})
