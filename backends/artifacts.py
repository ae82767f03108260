"""What a file is, told from its first bytes and the names in its archive: nothing is unpickled, no library imported."""

import lzma
import pickletools
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from backends.onnx_file import AGAIN, LFS_POINTER, damage
from backends.regular_file import opened_file

_HEAD_BYTES: Final = 512
_MOST_PICKLE_BYTES: Final = 64 << 20  # a module's pickle is its structure: the weights are other members of the archive

# What a state_dict's pickle calls on, beside the storages: of torch.save, and of numpy for scalars in it.
_OF_WEIGHTS: Final = ("collections.", "torch._utils.", "torch._tensor.", "torch.storage.", "torch.serialization.", "numpy.",
                      "torch.Size", "torch.device", "torch.dtype", "_codecs.", "builtins.")  # fmt: skip

_OF_CHECKPOINTS: Final = ("model_state_dict", "state_dict")  # keys under which trainers keep the weights

# What reading a damaged archive raises: also for a name that is no UTF-8, or a place before the file's beginning.
ARCHIVE_FAULTS: Final = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError, RuntimeError, ValueError,
)  # fmt: skip

_OF_PYTORCH: Final = (".pt", ".pt2", ".pth")
MODEL_FILES: Final = (".onnx", ".ort", *_OF_PYTORCH)
_OF_TEXT: Final = frozenset(b"\t\n\r" + bytes(range(0x20, 0x7F)))

_EXPORT: Final = "where the module is: torch.jit.trace(module.eval(), example).save('model.pt'), and serve model.pt"
_CLASS: Final = "write a class that loads it in __init__ and has predict(), and serve FILE.py:Class"
_RUNS_CODE: Final = "loading one runs the code in it, so that is yours to do"


@dataclass(frozen=True, slots=True)
class Artifact:
    """kind: of the backend that runs it; empty: none does. format: within it. what: in words. way: on, where none does.

    damaged: it is not what it was when it was written, or stands in for what it should be.
    """

    kind: str
    format: str
    what: str
    way: str = ""
    damaged: bool = False


ONNX: Final = Artifact("onnxruntime", "onnx", "an ONNX model")
ORT: Final = Artifact("onnxruntime", "ort", "a model in ONNX Runtime's own format")
TORCHSCRIPT: Final = Artifact("torch", "torchscript", "a TorchScript archive")
EXPORTED: Final = Artifact("torch", "export", "a program of torch.export")
AOT_INDUCTOR: Final = Artifact("torch", "aot_inductor", "an AOTInductor package")
UNKNOWN: Final = Artifact("", "", "no model that the gateway knows", f"export it to ONNX; or {_CLASS}")


def identify(path: Path) -> Artifact:
    """Say what a file is. Raises: OSError."""
    with opened_file(path) as file:
        head = file.read(_HEAD_BYTES)
    if not head:
        return _damaged("an empty file")
    if head.startswith(LFS_POINTER):
        return _damaged("a pointer of Git LFS, not the file itself", "`git lfs pull` brings the file")
    if _is_archive(path):
        return _archive(path)
    for magic, at, artifact in _MAGIC:
        if head[at : at + len(magic)] == magic:
            return artifact
    if head.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
        return _damaged("an HTML page", "download the file itself: this is the page about it, or an error")
    suffix = path.suffix.lower()
    if suffix in MODEL_FILES and (what := _not_binary(head)):
        return _damaged(what, "copy or download the model itself")
    if suffix == ".onnx":
        found = damage(path)
        return ONNX if found is None else _damaged(*found)
    if (len(head) > 1 and head[0] == 0x80 and head[1] <= 5) or suffix in (".pkl", ".pickle", ".joblib"):
        return Artifact("", "", "a pickle", f"{_RUNS_CODE}: {_CLASS}")
    if suffix in _BY_SUFFIX:
        return _BY_SUFFIX[suffix]
    # An ONNX ModelProto begins with ir_version, then the producer's name.
    if head[:1] == b"\x08" and b"\x12" in head[2:4] and damage(path) is None:
        return ONNX
    if suffix in _OF_PYTORCH:
        return _damaged("no file of PyTorch, or a damaged one")
    return UNKNOWN


def torn(path: Path) -> str:
    """Which member of a zip archive is not as it was written; empty: none. Reads all of it."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() or ""
    except ARCHIVE_FAULTS as exc:
        return str(exc) or type(exc).__name__


def _damaged(what: str, way: str = AGAIN) -> Artifact:
    return Artifact("", "", what, way, damaged=True)


def _not_binary(head: bytes) -> str:
    """What a file is by its first bytes that no model begins with; empty: it may be one."""
    if not any(head):
        return "nothing but zero bytes where a model begins"
    return "a text, no model" if set(head) <= _OF_TEXT else ""


def _with_code(loads: str) -> str:
    return (
        "serve FILE.py:make, a function without parameters that builds the module, loads these weights into it "
        f"({loads}) and returns it, with `--example FILE`, one request, for it does not say its inputs; or, {_EXPORT}"
    )


def _is_archive(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:
        return True  # of several disks, by its end: damaged


def _archive(path: Path) -> Artifact:
    """What a zip archive is, by the names of its members."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            inner = [name.partition("/")[2] or name for name in names]  # PyTorch puts all under the file's name
            if any("data/aotinductor/" in name for name in names):
                return AOT_INDUCTOR
            if any(name.endswith("serialized_exported_program.json") for name in names) or (
                "archive_format" in inner and any(name.startswith("models/") for name in inner)
            ):
                return EXPORTED
            if "constants.pkl" in inner and any(name.startswith("code/") for name in inner):
                return TORCHSCRIPT
            pickles = [name for name in names if name.endswith("/data.pkl")]
            if pickles and archive.getinfo(pickles[0]).file_size <= _MOST_PICKLE_BYTES:
                return _saved(archive.read(pickles[0]))
    except ARCHIVE_FAULTS as exc:
        return _damaged(f"a damaged archive ({exc})")
    if "MAR-INF/MANIFEST.json" in names:
        return Artifact("", "", "a TorchServe archive", f"unzip it, and serve the model that is in it; its handler: {_CLASS}")
    if "config.json" in names and any(name.endswith(".weights.h5") for name in names):
        return _BY_SUFFIX[".h5"]
    if names and all(name.endswith(".npy") for name in names):
        return Artifact("", "", "arrays of numpy, no model", _CLASS)
    return Artifact("", "", "a zip archive without a model that the gateway knows", "unzip it, and serve what is in it")


def _saved(pickled: bytes) -> Artifact:
    """What torch.save wrote: weights alone, or a module with its classes by name."""
    found, texts = _contents(pickled)
    strange = [name for name in found if not name.startswith(_OF_WEIGHTS) and not name.endswith("Storage")]
    key = next((key for key in _OF_CHECKPOINTS if key in texts), None)
    lightning = "pytorch-lightning_version" in texts
    if key is not None and (lightning or not strange):
        what = f"a checkpoint{' of Lightning' if lightning else ''}, whose weights are its {key!r}"
        return Artifact("", "", what, _with_code(f"torch.load(…, weights_only={not strange})[{key!r}]"))
    if not strange:
        return Artifact(
            "", "", "a state_dict: weights without the code of a model", _with_code("torch.load(…, weights_only=True)")
        )
    return Artifact("", "", f"a pickled module ({strange[0]})", f"{_RUNS_CODE}: {_EXPORT}")


def _contents(pickled: bytes) -> tuple[list[str], list[str]]:
    """The classes and functions that a pickle names, `module.name`, and its texts, without running it."""
    found: list[str] = []
    words: list[str] = []
    try:
        for operation, argument, _ in pickletools.genops(pickled):
            if operation.name == "GLOBAL" and isinstance(argument, str):
                found.append(argument.replace(" ", "."))
            elif operation.name == "STACK_GLOBAL" and len(words) >= 2:
                found.append(".".join(words[-2:]))
            elif isinstance(argument, str):
                words.append(argument)
    except ValueError:
        pass  # what is damaged further on is named by what could be read
    return found, words


_KERAS: Final = Artifact("", "", "a Keras model", f"model.export('model.onnx', format='onnx') in Keras; or {_CLASS}")
_TFLITE: Final = Artifact(
    "", "", "a TensorFlow Lite model", f"`python -m tf2onnx.convert --tflite FILE --output model.onnx`; or {_CLASS}"
)
_ENGINE: Final = Artifact(
    "", "", "a TensorRT engine", "name the ONNX file that it was built from in a configuration, with `kind: tensorrt`"
)
_SAFETENSORS: Final = Artifact(
    "", "", "weights (safetensors) without the code of a model", _with_code("safetensors.torch.load_file")
)
_PACKED: Final = Artifact("", "", "an archive", "unpack it (`tar -xf`), and serve what is in it")

_BY_SUFFIX: Final[dict[str, Artifact]] = {
    ".h5": _KERAS, ".tflite": _TFLITE, ".plan": _ENGINE, ".engine": _ENGINE, ".safetensors": _SAFETENSORS,
}  # fmt: skip

# magic bytes, where they stand, what they tell
_MAGIC: Final = (
    (b"\x89HDF", 0, _KERAS),
    (b"TFL3", 4, _TFLITE),
    (b"ORTM", 4, ORT),
    (b"GGUF", 0, Artifact("", "", "a GGUF language model", "llama.cpp or vLLM serve these, not this gateway")),
    (b"ET12", 4, Artifact("", "", "an ExecuTorch program", f"it is for devices; {_EXPORT}")),
    (b"PK\x03\x04", 0, _damaged("a damaged archive: its end is missing")),
    (b"\x1f\x8b", 0, _PACKED),
    (b"ustar", 257, _PACKED),
    # torch.save before PyTorch 1.6 begins with this number as a pickle
    (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19", 0,
     Artifact("", "", "a file of torch.save as before PyTorch 1.6", f"{_RUNS_CODE}: {_EXPORT}")),
)  # fmt: skip
