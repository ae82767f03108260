"""What a load would refuse, as far as it can be known without one: no model is opened, and no device is touched.

`checked` gives every mistake at once, each at the key that makes it. A first look (files, the names in Python files, installed
libraries, devices) takes milliseconds and runs none of the user's code. A thorough one also imports the code that is named, and
reads the tensors of ONNX, torch.export and TorchScript files.
"""

import contextlib
import importlib.util
import logging
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import backends.synthetic
from backends import BACKENDS
from backends.artifacts import ORT, TORCHSCRIPT, UNKNOWN, identify
from backends.base import LoadFailed, TensorSpec
from backends.check_code import FACTORY, named_code, offered, python_code
from backends.check_tensors import closed_rows, not_passed, ranked, unlike_file, unlike_program
from backends.digests import digest
from backends.file_tensors import exported_tensors, onnx_tensors
from backends.mistakes import Mistake, Place, Wanted
from backends.near_file import near_file
from backends.neuron import INF1_ENDED, OPEN_REMEDY, open_behind
from backends.not_known import NOT_KNOWN, NotKnown, as_far_as_known
from backends.onnx_file import ONE_NAME, OTHER_NAME, of_unknown_rank, with_rows
from backends.regular_file import absent
from backends.required import REMEDY
from backends.source import is_source

log = logging.getLogger(__name__)

# Seen without any library: NVIDIA's driver makes one for each GPU that this system (or container) may use.
_GPU_FILES: Final = re.compile(r"nvidia\d+")
# Of GPUs that have no such file (WSL, AMD, Jetson): how many there are is then not known.
_OTHER_GPU_FILES: Final = ("dxg", "kfd", "nvhost-gpu", "nvgpu")
_GRPC_ADDRESS: Final = re.compile(r"(\w+://)?(\[[^\]]+\]|[^\s:/]*)(?::(\d{1,5}))?")


def checked(wanted: Wanted) -> list[Mistake]:
    """Every mistake that is found."""
    found: list[Mistake] = []
    sha256 = wanted.options.get("sha256")
    if sha256 is not None and wanted.thorough:
        found += as_far_as_known(_other_file(wanted, sha256))
        if found or sha256 is NOT_KNOWN:
            wanted = replace(wanted, thorough=False)  # no code is run of a file that may not be the one that is meant
    for check in (_library, *_CHECKS.get(wanted.kind, ())):
        try:
            for mistake in as_far_as_known(check(wanted)):
                found.append(mistake)
        except OSError as exc:  # the name is too long, or a folder of it may not be read
            remedy = "name a file that this user can read"
            found.append(Mistake(("model",), f"cannot be looked at: {exc.strerror}", remedy=remedy))
    return list(dict.fromkeys(found))


def _other_file(wanted: Wanted, sha256: str) -> Iterator[Mistake]:
    """Where there is none that can be read, the checks of its kind tell."""
    place = wanted.model.rpartition(":")[0]
    if is_source(wanted.model) and not place.endswith(".py"):
        remedy = "name a file, FILE.py:Class, or remove this"
        yield Mistake(("sha256",), f"of a module ({place}), which is no one file", remedy=remedy)
        return
    with contextlib.suppress(OSError):
        found = digest(wanted.model)
        if found != sha256:
            remedy = "put the file there that is meant, or correct this"
            yield Mistake(("sha256",), f"another file: its SHA-256 is {found} ({wanted.model})", remedy=remedy)


def gpus() -> int | None:
    """How many NVIDIA GPUs this machine has; None: it may have some, and how many is not known."""
    devices = Path("/dev")
    count = sum(bool(_GPU_FILES.fullmatch(file.name)) for file in devices.glob("nvidia*"))
    unknown = sys.platform != "linux" or any((devices / name).exists() for name in _OTHER_GPU_FILES)
    return None if count == 0 and unknown else count


# kinds


def _graphs_on_cpu(wanted: Wanted) -> Iterator[Mistake]:
    if wanted.options["cuda_graphs"] and wanted.options["device"] == "cpu":
        yield Mistake(("cuda_graphs",), expected="false where device is cpu", remedy="set device: cuda, or remove it")


def _onnxruntime_cuda(wanted: Wanted) -> Iterator[Mistake]:
    if wanted.options["device"] == "cuda" and wanted.here and wanted.thorough and gpus() != 0 and _installed("onnxruntime"):
        from backends.onnxruntime import without_cuda

        if lacks := without_cuda():
            yield Mistake(("device",), lacks, remedy="pip install 'onnxruntime-gpu[cuda,cudnn]', or set device: cpu")


def _onnx(wanted: Wanted) -> Iterator[Mistake]:
    faults = list(as_far_as_known(_no_file(wanted, "onnxruntime")))
    yield from faults
    if faults or not wanted.thorough or not _installed("onnx") or identify(wanted.file) == ORT:
        return
    try:
        inputs, outputs = onnx_tensors(wanted.file)
        unknown = of_unknown_rank(wanted.file)
    except (LoadFailed, ValueError) as exc:
        yield Mistake(
            ("model",), str(exc), expected="an ONNX file", remedy="export the model to ONNX again, or set another kind"
        )
    else:
        faults = list(as_far_as_known(not_passed(wanted, "inputs", inputs), not_passed(wanted, "outputs", outputs)))
        yield from faults
        if unknown:
            inputs, outputs = ranked(inputs, wanted.inputs, unknown), ranked(outputs, wanted.outputs, unknown)
        if unknown and not wanted.inputs and (untold := [tensor.name for tensor in inputs if tensor.name in unknown]):
            told = f"the file does not say the rank of input {', '.join(untold)}"
            yield Mistake(("model",), told, remedy="state `inputs` of the model, with their shapes")
            return
        if not faults:
            outputs = with_rows(inputs, outputs, wanted.outputs)
            yield from as_far_as_known(
                closed_rows(wanted, inputs, outputs),
                unlike_file(wanted, "inputs", wanted.inputs, inputs),
                unlike_file(wanted, "outputs", wanted.outputs, outputs),
            )


def _torch(wanted: Wanted) -> Iterator[Mistake]:
    if is_source(wanted.model):
        yield from named_code(wanted, ("model",), wanted.model, FACTORY, ("factory_options",))
        return
    faults = list(as_far_as_known(_no_file(wanted, "torch")))
    yield from faults
    if faults or not wanted.thorough:
        return
    if identify(wanted.file) == TORCHSCRIPT:
        from backends.script_arguments import WAY, nested, stated_arguments

        names = [tensor.name for tensor in wanted.inputs]
        known = () if any(name is NOT_KNOWN for name in names) else names
        if refused := nested(stated_arguments(wanted.file), known):
            yield Mistake(("model",), f"input {refused.name!r} is {refused.type}", expected="a tensor", remedy=WAY)
        return
    from backends.aot_inductor import compiled_for

    if (compiled := compiled_for(wanted.file)) is not None:
        inputs = tuple(each.named(f"input_{index}") for index, each in enumerate(compiled.inputs))
        faults = list(as_far_as_known(unlike_program(wanted, "inputs", wanted.inputs, inputs)))
        yield from faults
        names = [tensor.name for tensor in wanted.inputs]
        for warning in () if faults else compiled.warnings(names, wanted.max_rows != 0):
            log.warning("%s: %s", wanted.file, warning)
    elif (tensors := exported_tensors(wanted.file)) is not None:
        inputs, outputs = tensors
        yield from as_far_as_known(
            unlike_program(wanted, "inputs", wanted.inputs, inputs),
            unlike_program(wanted, "outputs", wanted.outputs, outputs),
        )


def _quantised_at_load(wanted: Wanted) -> Iterator[Mistake]:
    if wanted.options["precision"] == "int8" and not is_source(wanted.model):
        remedy = "quantise the model when you export it, or name its factory: path/to/file.py:factory"
        yield Mistake(("precision",), "an artifact is not quantised when it is loaded", expected="fp32 or bf16", remedy=remedy)


def _quantised_on_cpu(wanted: Wanted) -> Iterator[Mistake]:
    if wanted.options["precision"] == "int8" and wanted.options["device"] != "cpu":
        found = "PyTorch's dynamic quantisation is for the CPU"
        yield Mistake(("precision",), found, expected="fp32 or bf16 on a GPU", remedy="set one of them, or device: cpu")


def _torch_tensors(wanted: Wanted) -> Iterator[Mistake]:
    for key, tensors in wanted.tensors:
        yield from as_far_as_known(_unfit_for_torch(key, tensors))
    indices = wanted.options["output_indices"]
    if indices and len(indices) != len(wanted.outputs):
        found = f"has {len(indices)}, of {len(wanted.outputs)} outputs"
        yield Mistake(("output_indices",), found, remedy="write one for each, in their order")


def _unfit_for_torch(key: str, tensors: tuple[TensorSpec, ...]) -> Iterator[Mistake]:
    if not tensors:
        remedy = f"set {key}: [{{name: …, datatype: FP32, shape: [-1, …]}}]; `gateway init` finds them"
        yield Mistake((key,), "missing: PyTorch models do not tell their tensors", remedy=remedy, of_model=True)
    for index, tensor in enumerate(tensors):
        with contextlib.suppress(NotKnown):
            if tensor.datatype == "BYTES":
                remedy = "put a python backend before it, which makes numbers of texts"
                at = (key, index, "datatype")
                yield Mistake(at, "PyTorch has no texts", expected="another", remedy=remedy, of_model=True)


def _triton(wanted: Wanted) -> Iterator[Mistake]:
    url = wanted.options["url"]
    many = not isinstance(url, str)
    for index, address in enumerate(url if many else [url]):
        at: Place = ("url", index) if many else ("url",)
        found = _GRPC_ADDRESS.match(address)
        assert found is not None  # each part may be empty
        scheme, host, port = found.groups()
        if scheme in ("http://", "https://"):
            remedy = f"write {host or 'localhost'}:8001: gRPC has another port than HTTP"
            yield Mistake(at, expected="host:port of Triton's gRPC, without http://", remedy=remedy)
        elif not re.match(r"(unix|dns|ipv4|ipv6|xds):", address) and not (host and address == f"{host}:{port}"):
            remedy = f"write {host or 'localhost'}:{port or 8001}"
            yield Mistake(at, expected="host:port of Triton's gRPC", remedy=remedy)


def _neuron_folder(wanted: Wanted) -> Iterator[Mistake]:
    folder = wanted.file
    if not folder.is_dir() or not (folder / "manifest.json").is_file():
        found = "no such directory" if not folder.exists() else "not a directory of Neuron artifacts: it has no manifest.json"
        yield Mistake(("model",), f"{found} ({folder})", remedy=_compiles(wanted) or "set `build`, and run `gateway compile`")


def _required(wanted: Wanted) -> Iterator[Mistake]:
    for index, tensor in enumerate(wanted.inputs):
        with contextlib.suppress(NotKnown):
            if tensor.optional:
                yield Mistake(("inputs", index, "optional"), "the file takes it in every request", remedy=REMEDY, of_model=True)


def _built_names(wanted: Wanted) -> Iterator[Mistake]:
    if wanted.build is None:
        return
    inputs = [tensor.name for tensor in wanted.inputs if tensor.name is not NOT_KNOWN]
    for index, tensor in enumerate(wanted.outputs):
        with contextlib.suppress(NotKnown):
            if tensor.name in inputs:
                yield Mistake(("outputs", index, "name"), ONE_NAME, remedy=OTHER_NAME, of_model=True)


def _neuron_shapes(wanted: Wanted) -> Iterator[Mistake]:
    for index, tensor in enumerate(wanted.inputs):
        with contextlib.suppress(NotKnown):
            if open_behind(tensor):
                found = "open behind the second dimension"
                yield Mistake(("inputs", index, "shape"), found, remedy=OPEN_REMEDY, of_model=True)


def _neuron_target(wanted: Wanted) -> Iterator[Mistake]:
    if wanted.build is not None and wanted.build["target"] == "inf1" and not _installed("torch_neuron"):
        yield Mistake(("build", "target"), INF1_ENDED, expected="inf2 or trn1", remedy="choose an instance of these")


def _neuron_device(wanted: Wanted) -> Iterator[Mistake]:
    if wanted.here and not list(Path("/dev").glob("neuron*")):
        remedy = "use another kind, or place it where one is: placement: replicas, resources: {neuron_cores: 1}"
        yield Mistake(("kind",), "this machine has no Neuron device (/dev/neuron0)", remedy=remedy)


def _synthetic(wanted: Wanted) -> Iterator[Mistake]:
    try:
        backends.synthetic.load(wanted.declared, output=wanted.options["output"])  # which is free: there is no model
    except LoadFailed as exc:
        yield Mistake((), str(exc))


# libraries and devices


def _library(wanted: Wanted) -> Iterator[Mistake]:
    name, remedy = BACKENDS[wanted.kind].library
    if name and wanted.here and not _installed(name):
        yield Mistake(("kind",), f"{name} is not installed in {sys.prefix}", remedy=remedy)


def _installed(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


def _gpu(wanted: Wanted) -> Iterator[Mistake]:
    """device: cuda and cuda:N of torch, cuda of onnxruntime, N of tensorrt."""
    device = wanted.options["device"]
    count = gpus()
    if not wanted.here or count is None or device == "cpu":
        return
    number = device if isinstance(device, int) else int(device.partition(":")[2] or 0)
    if count == 0:
        yield Mistake(
            ("device",), "this machine has no NVIDIA GPU", remedy="use the CPU, or place it where one is: placement: replicas"
        )
    elif number >= count:
        yield Mistake(("device",), f"this machine has {count} GPU{'s' if count > 1 else ''}", expected=f"0 to {count - 1}")


# Each is a check for itself: what one cannot know keeps no other from its finding.
_CHECKS: Final[dict[str, tuple[Callable[[Wanted], Iterator[Mistake]], ...]]] = {
    "synthetic": (_synthetic,),
    "torch": (_gpu, _graphs_on_cpu, _torch, _quantised_at_load, _quantised_on_cpu, _torch_tensors),
    "onnxruntime": (_gpu, _graphs_on_cpu, _onnxruntime_cuda, _onnx, _required, _built_names),
    "python": (python_code,),
    "triton": (_triton,),
    "tensorrt": (_gpu, _onnx, _required, _built_names),
    "neuron": (_neuron_folder, _neuron_target, _neuron_device, _neuron_shapes, _required),
}


# files


def _no_file(wanted: Wanted, kind: str) -> Iterator[Mistake]:
    """kind: onnxruntime or torch: of which the file must be."""
    at, path = ("model",), wanted.file
    if path.is_dir():
        yield Mistake(at, f"a directory ({path})", expected="a file", remedy="name the file in it")
        return
    if kind == "torch" and path.suffix == ".py":
        name = offered(path, FACTORY)
        remedy = f"add `:{name}`" if name else "add `:` and the name of the factory"
        yield Mistake(at, "code, without the name in it", "path/to/file.py:factory", remedy)
        return
    if not path.is_file():
        yield Mistake(at, f"{absent(path)} ({path})", remedy=_compiles(wanted) or near_file(path))
        yield from _build_code(wanted)
        return
    try:
        artifact = identify(path)
    except OSError as exc:
        yield Mistake(at, f"cannot be read: {exc.strerror} ({path})", expected=_FILES[kind])
        return
    if artifact.kind != kind and (artifact != UNKNOWN or kind == "torch"):
        remedy = f"set kind: {artifact.kind}" if artifact.kind else artifact.way
        yield Mistake(at, f"{artifact.what} ({path})", _FILES[kind], remedy)


_FILES: Final = {"onnxruntime": "an ONNX file", "torch": "a file of TorchScript, torch.export or AOTInductor"}


def _compiles(wanted: Wanted) -> str:
    return "`gateway compile` with this configuration makes it" if wanted.build is not None else ""


def _build_code(wanted: Wanted) -> Iterator[Mistake]:
    """Of an artifact that is still to be made."""
    if wanted.build is not None:
        source = str(wanted.build["source"])
        yield from named_code(wanted, ("build", "source"), source, FACTORY, static=True)
