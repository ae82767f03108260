"""What a load would refuse, as far as it can be known without one: no model is opened, and no device is touched.

`checked` gives every mistake at once, each at the key that makes it. A first look (files, the names in Python files, installed
libraries, devices) takes milliseconds and runs none of the user's code. A thorough one also imports the code that is named, and
reads the tensors of ONNX and torch.export files.
"""

import ast
import contextlib
import difflib
import importlib.util
import inspect
import json
import os
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import backends.python
import backends.synthetic
from backends.artifacts import ORT, UNKNOWN, identify
from backends.base import BackendError, LoadFailed, ModelSpec, TensorSpec, words_of
from backends.datatypes import NUMPY
from backends.not_known import NOT_KNOWN, NotKnown, as_far_as_known
from backends.signatures import Signature
from backends.source import is_source, load_object, misfits

Place = tuple[str | int, ...]

# Seen without any library: NVIDIA's driver makes one for each GPU that this system (or container) may use.
_GPU_FILES: Final = re.compile(r"nvidia\d+")
# Of GPUs that have no such file (WSL, AMD, Jetson): how many there are is then not known.
_OTHER_GPU_FILES: Final = ("dxg", "kfd", "nvhost-gpu", "nvgpu")

_OF_TENSOR: Final = ("name", "datatype", "shape", "optional", "labels")


@dataclass(frozen=True, slots=True)
class Mistake:
    """at: keys below the backend; of_model: below its model instead. The rest as in `gateway.documents.faults.Fault`."""

    at: Place
    found: str = ""
    expected: str = ""
    remedy: str = ""
    of_model: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be checked; NOT_KNOWN for what is at fault in itself.

    options: as for `backends.load`. build: how the artifact is made, if that is said. inputs, outputs, max_rows: as declared.
    here: whether it will run on this machine. thorough: see the module.
    """

    kind: str
    options: Mapping[str, Any]
    here: bool
    thorough: bool
    build: Mapping[str, Any] | None = None
    inputs: tuple[TensorSpec, ...] = NOT_KNOWN
    outputs: tuple[TensorSpec, ...] = NOT_KNOWN
    max_rows: int = NOT_KNOWN

    @property
    def model(self) -> str:
        return str(self.options["model"])

    @property
    def file(self) -> Path:
        return Path(self.model).absolute()

    @property
    def tensors(self) -> tuple[tuple[str, tuple[TensorSpec, ...]], ...]:
        return ("inputs", self.inputs), ("outputs", self.outputs)

    @property
    def declared(self) -> ModelSpec:
        """Raises: NotKnown, unless all of it is known."""
        values = [getattr(tensor, key) for _, tensors in self.tensors for tensor in tensors for key in _OF_TENSOR]
        if any(value is NOT_KNOWN for value in (*values, self.max_rows)):
            raise NotKnown
        return ModelSpec("", self.inputs, self.outputs, self.max_rows)


def checked(wanted: Wanted) -> list[Mistake]:
    """Every mistake that is found."""
    found: list[Mistake] = []
    for check in (_library, *_CHECKS[wanted.kind]):
        try:
            found += list(as_far_as_known(check(wanted)))
        except OSError as exc:  # the name is too long, or a folder of it may not be read
            remedy = "name a file that this user can read"
            found.append(Mistake(("model",), f"cannot be looked at: {exc.strerror}", remedy=remedy))
    return list(dict.fromkeys(found))


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
            yield Mistake(("device",), lacks, remedy="pip install onnxruntime-gpu, or set device: cpu")


def _onnx(wanted: Wanted) -> Iterator[Mistake]:
    faults = list(as_far_as_known(_no_file(wanted, "onnxruntime")))
    yield from faults
    if faults or not wanted.thorough or not _installed("onnx") or identify(wanted.file) == ORT:
        return
    try:
        inputs, outputs = onnx_tensors(wanted.file)
    except LoadFailed as exc:
        yield Mistake(
            ("model",), str(exc), expected="an ONNX file", remedy="export the model to ONNX again, or set another kind"
        )
    else:
        yield from as_far_as_known(
            _closed_rows(wanted, inputs, outputs),
            _unlike_file(wanted, "inputs", wanted.inputs, inputs),
            _unlike_file(wanted, "outputs", wanted.outputs, outputs),
        )


def _torch(wanted: Wanted) -> Iterator[Mistake]:
    if is_source(wanted.model):
        yield from _source(wanted, ("model",), wanted.model, "a factory of an nn.Module", ("factory_options",))
        return
    faults = list(as_far_as_known(_no_file(wanted, "torch")))
    yield from faults
    if not faults and wanted.thorough and (tensors := exported_tensors(wanted.file)) is not None:
        inputs, outputs = tensors
        yield from as_far_as_known(
            _unlike_program(wanted, "inputs", wanted.inputs, inputs),
            _unlike_program(wanted, "outputs", wanted.outputs, outputs),
        )


def _quantised_at_load(wanted: Wanted) -> Iterator[Mistake]:
    if wanted.options["precision"] == "int8" and not is_source(wanted.model):
        remedy = "quantise the model when you export it, or name its factory: path/to/file.py:factory"
        yield Mistake(("precision",), "an artifact is not quantised when it is loaded", expected="fp32 or bf16", remedy=remedy)


def _torch_tensors(wanted: Wanted) -> Iterator[Mistake]:
    for key, tensors in wanted.tensors:
        yield from as_far_as_known(_unfit_for_torch(key, tensors))


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


def _unlike_program(
    wanted: Wanted, key: str, declared: tuple[TensorSpec, ...], found: tuple[TensorSpec, ...]
) -> Iterator[Mistake]:
    """Held against a file of torch.export by position: names are the configuration's own."""
    if not declared:
        return
    if len(found) != len(declared):
        expected = f"{len(found)}, in the order of the file: {_listed(found)}"
        yield Mistake((key,), f"{len(declared)} are listed", expected, f"list all {key}", of_model=True)
        return
    for index, (theirs, ours) in enumerate(zip(found, declared, strict=True)):
        yield from _unlike(key, index, ours, theirs, wanted.max_rows)


def _python(wanted: Wanted) -> Iterator[Mistake]:
    code: list[Any] = []
    yield from _source(wanted, ("model",), wanted.model, _CLASS, loaded=code.append)
    if code:
        yield from as_far_as_known(_python_code(wanted, code[0]))


def _python_code(wanted: Wanted, code: Any) -> Iterator[Mistake]:
    yield from as_far_as_known(_python_options(wanted, code))
    stated = [mistake for key, tensors in wanted.tensors for mistake in as_far_as_known(_stated(key, tensors, code))]
    yield from stated
    if stated:
        return
    try:
        signature = backends.python.called_as(wanted.model, code)
    except BackendError as exc:
        yield _of_code(wanted, exc)
        return
    for key, tensors in wanted.tensors:
        yield from as_far_as_known(
            _denied(wanted, signature, key, tensors), _told_nowhere(wanted, signature, key, tensors, code)
        )


def _python_options(wanted: Wanted, code: Any) -> Iterator[Mistake]:
    options = wanted.options["class_options"]
    if inspect.isclass(code):
        yield from _misfits(code, options, ("class_options",))
    elif options:
        yield Mistake(("class_options",), "only a class takes options, this is a function", remedy="remove them")


def _told_nowhere(
    wanted: Wanted, signature: Signature, key: str, declared: tuple[TensorSpec, ...], code: Any
) -> Iterator[Mistake]:
    """Tensors that nothing says, and inputs that the code does not take."""
    try:
        tensors = backends.python.tensors_of(wanted.model, key, declared, code, signature, wanted.max_rows)
        if key == "inputs":
            backends.python.check_parameters(wanted.model, signature, tensors)
    except BackendError as exc:
        yield _of_code(wanted, exc)


def _of_code(wanted: Wanted, exc: BackendError) -> Mistake:
    found = str(exc).removeprefix(f"{wanted.model}: ")
    return Mistake(("model",), found, remedy="correct the code, or what is said of it here")


def _denied(wanted: Wanted, signature: Signature, key: str, ours: tuple[TensorSpec, ...]) -> Iterator[Mistake]:
    """What is declared, and type hints say otherwise."""
    for index, tensor in enumerate(ours):
        with contextlib.suppress(NotKnown):
            for theirs in filter(None, backends.python.said_of(signature, key, (tensor,))):
                yield from _unlike(key, index, tensor, theirs, wanted.max_rows, "code")


def _stated(key: str, declared: tuple[TensorSpec, ...], code: Any) -> Iterator[Mistake]:
    """What a class says of its tensors, where nothing is declared."""
    stated = getattr(code, key, None)
    if declared or not stated:
        return
    for entry in stated if isinstance(stated, list | tuple) else [stated]:
        try:
            name, datatype, shape, *_ = entry
            fits = isinstance(name, str) and datatype in NUMPY and all(isinstance(size, int) for size in shape)
        except (TypeError, ValueError):
            fits = False
        if not fits:
            expected = f"(name, datatype, shape) in `{key}` of the class, the datatype one of {', '.join(NUMPY)}"
            yield Mistake(("model",), f"its `{key}` have {entry!r}", expected, "correct the class")


def _triton(wanted: Wanted) -> Iterator[Mistake]:
    url = wanted.options["url"]
    many = not isinstance(url, str)
    for index, address in enumerate(url if many else [url]):
        at: Place = ("url", index) if many else ("url",)
        if re.match(r"https?://", address):
            host = re.sub(r"^https?://([^/:]*).*", r"\1", address)
            remedy = f"write {host}:8001: gRPC has another port than HTTP"
            yield Mistake(at, expected="host:port of Triton's gRPC, without http://", remedy=remedy)
        elif not re.match(r"(unix|dns|ipv4|ipv6|xds):", address) and not re.fullmatch(
            r"(\[[^\]]+\]|[^\s:/]+):\d{1,5}", address
        ):
            yield Mistake(
                at, expected="host:port of Triton's gRPC", remedy=f"write {address.partition(':')[0] or 'localhost'}:8001"
            )


def _neuron_folder(wanted: Wanted) -> Iterator[Mistake]:
    folder = wanted.file
    if not folder.is_dir() or not (folder / "manifest.json").is_file():
        found = "no such directory" if not folder.exists() else "not a directory of Neuron artifacts: it has no manifest.json"
        yield Mistake(("model",), f"{found} ({folder})", remedy=_compiles(wanted) or "set `build`, and run `gateway compile`")


def _neuron_device(wanted: Wanted) -> Iterator[Mistake]:
    if wanted.here and not list(Path("/dev").glob("neuron*")):
        remedy = "use another kind, or place it where one is: placement: replicas, resources: {neuron_cores: 1}"
        yield Mistake(("kind",), "this machine has no Neuron device (/dev/neuron0)", remedy=remedy)


def _synthetic(wanted: Wanted) -> Iterator[Mistake]:
    try:
        backends.synthetic.load(wanted.declared, output=wanted.options["output"])  # which is free: there is no model
    except LoadFailed as exc:
        yield Mistake((), str(exc))


# kind -> the library it needs, and how to get it.
_LIBRARIES: Final = {
    "torch": ("torch", "pip install 'serving-gateway[torch]'"),
    "onnxruntime": ("onnxruntime", "pip install 'serving-gateway[onnx]'"),
    "triton": ("tritonclient", "pip install 'tritonclient[grpc]'"),
    "tensorrt": ("tensorrt", "install NVIDIA's tensorrt, and PyTorch built for CUDA"),
    "neuron": ("torch", "install torch-neuronx from AWS's Neuron repository"),
}


# libraries and devices


def _library(wanted: Wanted) -> Iterator[Mistake]:
    name, remedy = _LIBRARIES.get(wanted.kind, ("", ""))
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
    "torch": (_gpu, _torch, _quantised_at_load, _torch_tensors),
    "onnxruntime": (_gpu, _graphs_on_cpu, _onnxruntime_cuda, _onnx),
    "python": (_python,),
    "triton": (_triton,),
    "tensorrt": (_gpu, _onnx),
    "neuron": (_neuron_folder, _neuron_device),
}
# files


def _no_file(wanted: Wanted, kind: str) -> Iterator[Mistake]:
    """kind: onnxruntime or torch: of which the file must be."""
    at, path = ("model",), wanted.file
    if path.is_dir():
        yield Mistake(at, f"a directory ({path})", expected="a file", remedy="name the file in it")
        return
    if kind == "torch" and path.suffix == ".py":
        offered = _offered(path, "a factory of an nn.Module")
        remedy = f"add `:{offered}`" if offered else "add `:` and the name of the factory"
        yield Mistake(at, "code, without the name in it", "path/to/file.py:factory", remedy)
        return
    if not path.is_file():
        yield Mistake(at, f"no such file ({path})", remedy=_compiles(wanted) or near_file(path))
        yield from _build_source(wanted)
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


def near_file(path: Path) -> str:
    """A file that may have been meant: of a like name, in a folder of a like name, or the only one of its kind. Empty: none."""
    folder = _near_folder(path.parent)
    if folder is None:
        return f"there is no directory {path.parent} either"
    # As it is to be written in place of the wanted one, from the folder that both have in common.
    there = os.path.relpath(folder, next(parent for parent in path.parents if parent.is_dir()))
    beside = {Path(name).stem: name for name in (file.name for file in folder.glob(f"*{path.suffix}"))}
    near = difflib.get_close_matches(path.stem, beside, n=1)  # an ending in common makes no names alike
    if near:
        return f"did you mean `{os.path.normpath(os.path.join(there, beside[near[0]]))}`, which is there?"
    if folder != path.parent:
        return f"there is no directory {path.parent} either; did you mean `{there}`?"
    return f"there is only `{next(iter(beside.values()))}`" if len(beside) == 1 else ""


def _near_folder(folder: Path) -> Path | None:
    """The folder, or the one that may have been meant."""
    if folder.is_dir() or folder == folder.parent:
        return folder
    around = _near_folder(folder.parent)
    if around is None:
        return None
    if (around / folder.name).is_dir():
        return around / folder.name
    near = difflib.get_close_matches(folder.name, [entry.name for entry in around.glob("*/")], n=1)
    return around / near[0] if near else None


def _compiles(wanted: Wanted) -> str:
    return "`gateway compile` with this configuration makes it" if wanted.build is not None else ""


def _build_source(wanted: Wanted) -> Iterator[Mistake]:
    """Of an artifact that is still to be made."""
    if wanted.build is not None:
        source = str(wanted.build["source"])
        yield from _source(wanted, ("build", "source"), source, "a factory of an nn.Module", static=True)


# code


_IMPORTABLE: Final = "what it imports must be installed, and work, here"
_CLASS: Final = "a class or function"


def _source(
    wanted: Wanted,
    at: Place,
    source: str,
    what: str,
    options_at: Place = (),
    loaded: Callable[[Any], object] = lambda _: None,
    *,
    static: bool = False,
) -> Iterator[Mistake]:
    """Of `module:name` or `path/to/file.py:name`.

    options_at: where the options stand that it is called with; empty: they are not looked at. loaded: gets the object, if it is
    imported. static: it never is.
    """
    name_of = "Class" if what == _CLASS else "factory"
    place, _, name = source.rpartition(":")
    if not is_source(source):
        if source.endswith(".py") and not Path(source).is_file():
            remedy = near_file(Path(source).absolute())
            yield Mistake(at, f"no such file ({Path(source).absolute()})", remedy=remedy)
        remedy = (
            f"add `:{_offered(Path(source), what) or name_of}`" if source.endswith(".py") else "name the code, or another kind"
        )
        yield Mistake(at, f"does not name {what}", f"path/to/file.py:{name_of} or module:{name_of}", remedy)
        return
    file: Path | None
    if place.endswith(".py"):
        file = Path(place).absolute()
        if not file.is_file():
            yield Mistake(at, f"no such file ({file})", remedy=near_file(file))
            return
    else:
        # To find what is in a package, the package is imported: a first look is for the package itself.
        looked = place if wanted.thorough else place.partition(".")[0]
        try:
            found = importlib.util.find_spec(looked)
        except KeyboardInterrupt:
            raise
        except BaseException as exc:  # of the package's own code, unless it is the module that is not found
            absent = isinstance(exc, ModuleNotFoundError) and f"{looked}.".startswith(f"{exc.name}.")
            if looked and not looked.startswith(".") and not absent:
                package = looked.rpartition(".")[0] or looked
                yield Mistake(at, f"{package!r} cannot be imported: {words_of(exc)}", remedy=_IMPORTABLE)
                return
            found = None
        if found is None:
            remedy = f"install it in {sys.prefix}, or name the file: path/to/{place.rpartition('.')[2]}.py:{name}"
            yield Mistake(at, f"there is no module {place!r}", remedy=remedy)
            return
        file = Path(found.origin) if looked == place and found.origin and found.origin.endswith(".py") else None
    if file is not None:
        try:
            known = _names_in(file)
        except (SyntaxError, ValueError) as exc:
            line = f":{exc.lineno}" if isinstance(exc, SyntaxError) else ""
            yield Mistake(at, f"not Python: {getattr(exc, 'msg', exc)} ({file}{line})", remedy="correct that line")
            return
        if known and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            offered = [each for each, is_class in known.items() if is_class == (what == _CLASS)]
            hint = (
                f"did you mean `{near[0]}`?" if near else f"it has {', '.join(offered)}" if offered else f"write {what} there"
            )
            yield Mistake(at, f"{file} has no {name!r}", remedy=hint)
            return
    if not wanted.thorough or static:
        return
    try:
        code = backends.python.load_code(source) if what == _CLASS else load_object(source)
    except BackendError as exc:
        yield Mistake(at, str(exc).removeprefix(f"{source!r}: "), remedy=_IMPORTABLE)
        return
    if not callable(code):
        yield Mistake(at, f"{name!r} is a {type(code).__name__}", expected=what, remedy="name another")
        return
    loaded(code)
    if options_at:
        options: Any = wanted.options
        for key in options_at:
            options = options[key]
        yield from _misfits(code, options, options_at)


def _misfits(code: Callable[..., Any], options: Mapping[str, Any], at: Place) -> Iterator[Mistake]:
    for misfit in misfits(code, options, key=str(at[-1])):
        yield Mistake((*at, misfit.option) if misfit.option else at, misfit.found, remedy=misfit.remedy)


def _offered(file: Path, what: str) -> str:
    """The first class or function that a file defines at its top for others; of the two what is wanted, if there is any."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # told once it is named
        return ""
    defined = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")]
    wanted = [node for node in defined if isinstance(node, ast.ClassDef) == (what == _CLASS)]
    return next((node.name for node in wanted or defined), "")


def _names_in(file: Path) -> dict[str, bool]:
    """The names that a file binds at its top, and whether each is a class; empty if only running it would tell.

    Raises: SyntaxError; ValueError, for what is no text.
    """
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except OSError:
        return {}
    found: dict[str, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            return {}
        if isinstance(node, ast.ImportFrom | ast.Import):
            found |= {(alias.asname or alias.name).partition(".")[0]: False for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.setdefault(node.id, False)
    for node in ast.walk(tree):  # within `if` and `try` as well
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = isinstance(node, ast.ClassDef)
    return {} if "__getattr__" in found or "globals" in {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} else found


# tensors


def onnx_tensors(path: Path) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs as an ONNX file states them; needs the package onnx. Raises: LoadFailed, if it is none."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        graph = onnx.load(str(path), load_external_data=False).graph
    except DecodeError as exc:
        raise LoadFailed(f"not an ONNX file ({path})") from exc
    if not graph.output:
        raise LoadFailed(f"not an ONNX file ({path})")
    weights = {tensor.name for tensor in graph.initializer}
    kinds = onnx.TensorProto.DataType

    def found(tensors: Iterable[Any]) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(
                tensor.name,
                _ONNX_DATATYPES.get(
                    kinds.Name(tensor.type.tensor_type.elem_type), kinds.Name(tensor.type.tensor_type.elem_type)
                ),
                tuple(size.dim_value if size.HasField("dim_value") else -1 for size in tensor.type.tensor_type.shape.dim),
            )
            for tensor in tensors
        )

    return found(tensor for tensor in graph.input if tensor.name not in weights), found(graph.output)


def exported_tensors(path: Path) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]] | None:
    """Inputs and outputs in order, as a torch.export file (.pt2) states them; None, if it does not tell.

    AOTInductor's packages do not, nor does a schema that is not known here. Source: torch/_export/serde/schema.py, version 8.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            program = json.loads(archive.read(next(name for name in archive.namelist() if _PROGRAM.search(name))))
        graph = program["graph_module"]["graph"]
        signature = program["graph_module"]["signature"]
        inputs = [spec["user_input"]["arg"] for spec in signature["input_specs"] if "user_input" in spec]
        outputs = [spec["user_output"]["arg"] for spec in signature["output_specs"] if "user_output" in spec]

        def found(arguments: list[Any]) -> tuple[TensorSpec, ...]:
            names = [argument["as_tensor"]["name"] for argument in arguments]
            return tuple(TensorSpec(name, *_exported(graph["tensor_values"][name])) for name in names)

        return found(inputs), found(outputs)
    except (StopIteration, KeyError, TypeError, ValueError, zipfile.BadZipFile):
        return None


def _exported(meta: Any) -> tuple[str, tuple[int, ...]]:
    return _TORCH_DATATYPES[meta["dtype"]], tuple(size.get("as_int", -1) for size in meta["sizes"])


_PROGRAM: Final = re.compile(r"(^|/)models/[^/]+\.json$")
_TORCH_DATATYPES: Final = {
    1: "UINT8", 2: "INT8", 3: "INT16", 4: "INT32", 5: "INT64", 6: "FP16", 7: "FP32", 8: "FP64", 12: "BOOL", 13: "BF16",
    28: "UINT16", 34: "UINT32", 35: "UINT64",
}  # fmt: skip
_ONNX_DATATYPES: Final = {"FLOAT": "FP32", "DOUBLE": "FP64", "FLOAT16": "FP16", "BFLOAT16": "BF16", "STRING": "BYTES"}


def _closed_rows(wanted: Wanted, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> Iterator[Mistake]:
    """A file that takes other batches than are declared."""
    odd = {tensor.shape[0] if tensor.shape else None for tensor in (*inputs, *outputs)} - {-1, wanted.max_rows}
    if wanted.max_rows and odd:
        expected = "an open first dimension in every tensor"
        fixed = next((size for size in odd if size), None)
        remedy = "export the file so" + (f", or set max_rows: {fixed}" if fixed else ", or set max_rows: 0")
        yield Mistake(("max_rows",), f"the file has {_listed((*inputs, *outputs))}", expected, remedy, of_model=True)


def _unlike_file(
    wanted: Wanted, key: str, declared: tuple[TensorSpec, ...], found: tuple[TensorSpec, ...]
) -> Iterator[Mistake]:
    """What is declared, and differs from what the file states by name."""
    by_name = {tensor.name: tensor for tensor in found}
    names = [tensor.name for tensor in declared]
    known = [name for name in names if name is not NOT_KNOWN]
    missing = [tensor.name for tensor in found if tensor.name not in known]
    for index, (name, tensor) in enumerate(zip(names, declared, strict=True)):
        if name is NOT_KNOWN:
            continue
        if name in by_name:
            yield from as_far_as_known(_unlike(key, index, tensor, by_name[name], wanted.max_rows))
            continue
        near = difflib.get_close_matches(name, missing or by_name, n=1) or missing[:1]
        hint = f"did you mean `{near[0]}`?" if near else f"remove it, or leave out all {key}: they are read from the file"
        expected = f"one of the file's {key}, {', '.join(by_name)}"
        yield Mistake((key, index, "name"), expected=expected, remedy=hint, of_model=True)
    if names and key == "inputs" and len(missing) > sum(name is NOT_KNOWN or name not in by_name for name in names):
        remedy = f"add {', '.join(missing)}, or leave out all inputs: they are read from the file"
        yield Mistake((key,), f"the file also needs {', '.join(missing)}", remedy=remedy, of_model=True)


def _unlike(
    key: str, index: int, ours: TensorSpec, theirs: TensorSpec, max_rows: int, where: str = "file"
) -> Iterator[Mistake]:
    return as_far_as_known(
        _unlike_datatype((key, index, "datatype"), ours, theirs, where),
        _unlike_shape((key, index, "shape"), ours, theirs, max_rows, where),
    )


def _unlike_datatype(at: Place, ours: TensorSpec, theirs: TensorSpec, where: str) -> Iterator[Mistake]:
    if ours.datatype != theirs.datatype:
        yield Mistake(at, expected=f"{theirs.datatype}, as in the {where}", remedy=f"write {theirs.datatype}", of_model=True)


def _unlike_shape(at: Place, ours: TensorSpec, theirs: TensorSpec, max_rows: int, where: str) -> Iterator[Mistake]:
    shape = (-1, *theirs.shape[1:]) if max_rows and theirs.shape else theirs.shape
    agrees = len(ours.shape) == len(shape) and all(
        -1 in pair or pair[0] == pair[1] for pair in zip(ours.shape, shape, strict=True)
    )
    if not agrees:
        remedy = f"write {list(shape)}; -1 stands for any size"
        yield Mistake(at, expected=f"{list(shape)}, as in the {where}", remedy=remedy, of_model=True)


def _listed(tensors: Iterable[TensorSpec]) -> str:
    return ", ".join(f"{tensor.name} {tensor.datatype} {list(tensor.shape)}" for tensor in tensors)
