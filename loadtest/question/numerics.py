"""Which candidates compute the same, and which of them in full precision, as far as configurations and model files tell."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

# Options that say how fast, but not what: where an answer depends on them all the same (a sum over threads, in the last bits),
# it does so far below what is asked of an agreement.
_NOT_NUMERIC: Final = frozenset({"threads", "fixed_ms", "row_ms", "spin", "load_ms", "fail_opens", "faults", "cuda_graphs"})
_QUANTISED: Final = (b"QuantizeLinear", b"MatMulInteger", b"ConvInteger", b"QLinearMatMul", b"MatMulNBits")  # ONNX operators
_HEAD_BYTES: Final = 16 << 20  # of an ONNX file: its operators come before its weights


def numerics_of(kind: str, options: Mapping[str, Any]) -> str:
    """Equal for backends that run the same file or code in the same precision on the same kind of device."""
    telling = {key: value for key, value in options.items() if key not in _NOT_NUMERIC}
    return f"{kind} {json.dumps(telling, sort_keys=True, default=str)}"


def full_precision(kind: str, options: Mapping[str, Any]) -> bool | None:
    """Whether it computes with the model's own floats; None if that cannot be known."""
    if options.get("precision", "fp32") != "fp32":
        return False
    model = options.get("model")
    if kind in ("onnxruntime", "torch") and isinstance(model, str):
        built = _built_precision(Path(f"{model}.build.json"))
        if built is not None:
            return built == "fp32"
        if kind == "onnxruntime":
            return False if _is_quantised(Path(model)) else None
        return True if ":" in model else None  # a factory's module, as it is; an artifact may be anything
    return True if kind == "synthetic" else None


def _built_precision(record: Path) -> str | None:
    """What `gateway compile` noted beside the artifact that it made."""
    try:
        found = json.loads(record.read_bytes())["build"]["precision"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(found)


def _is_quantised(model: Path) -> bool:
    try:
        with model.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False
    return any(name in head for name in _QUANTISED)
