"""CUDA's libraries for ONNX Runtime, where PyPI's packages put them: its loader looks there only after its `preload_dlls`.

`import torch` loads them too, but a model in ONNX needs none.
"""

import contextlib
import ctypes
import functools
import io
import re
import threading
from pathlib import Path
from types import ModuleType
from typing import Final

WITH_CUDA: Final = "pip install 'onnxruntime-gpu[cuda,cudnn]'"

_DRIVER: Final = "libcuda.so.1"
_MISSED: Final = re.compile(r"(lib\S+): cannot open shared object file")
_printing: Final = threading.Lock()  # sys.stdout is one for all threads


def preload(onnxruntime: ModuleType) -> None:
    """Load them, once in a process. What cannot be loaded is told by `why_not_cuda`."""
    with _printing:
        _preload(onnxruntime)


@functools.cache
def _preload(onnxruntime: ModuleType) -> None:
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does not find, where others may write answers
        onnxruntime.preload_dlls()


def why_not_cuda(onnxruntime: ModuleType) -> str:
    """Why a session is on the CPU that was opened for CUDA, and what helps."""
    missed = _missed(onnxruntime)
    if missed == _DRIVER:
        return f"{missed} of the NVIDIA driver is missing: run it where a GPU is (a container needs --gpus)"
    if missed:
        return f"{missed} is missing: {WITH_CUDA}"
    return f"standard error has what it said; its libraries come with {WITH_CUDA}"


def _missed(onnxruntime: ModuleType) -> str:
    """The library that the provider lacks, as the system's loader says it; empty if that is not why."""
    provider = Path(str(onnxruntime.__file__)).parent / "capi" / "libonnxruntime_providers_cuda.so"
    try:
        ctypes.CDLL(str(provider))
    except OSError as exc:
        if found := _MISSED.match(str(exc)):
            return found[1]
    return ""
