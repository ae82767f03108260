"""The tensors that a file states, read without loading it as a model."""

import json
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from backends.artifacts import ARCHIVE_FAULTS
from backends.base import LoadFailed, TensorSpec


def onnx_tensors(path: Path) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs as an ONNX file states them; needs the package onnx. Raises: LoadFailed, if it is none.

    datatype: ONNX's own word for what no tensor of the protocol is, such as `map`, or `sequence of` it.
    """
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

    def datatype(of: Any) -> str:
        if (kind := of.WhichOneof("value")) == "sequence_type":
            return f"sequence of {datatype(of.sequence_type.elem_type)}"
        if kind != "tensor_type":
            return str(kind).removesuffix("_type")
        name = kinds.Name(of.tensor_type.elem_type)
        return _ONNX_DATATYPES.get(name, name)

    def found(tensors: Iterable[Any]) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(
                tensor.name,
                datatype(tensor.type),
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
    except (StopIteration, LookupError, AttributeError, TypeError, ValueError):
        return None  # of another schema
    except ARCHIVE_FAULTS:
        return None  # damaged


def _exported(meta: Any) -> tuple[str, tuple[int, ...]]:
    return _TORCH_DATATYPES[meta["dtype"]], tuple(size.get("as_int", -1) for size in meta["sizes"])


_PROGRAM: Final = re.compile(r"(^|/)models/[^/]+\.json$")
_TORCH_DATATYPES: Final = {
    1: "UINT8", 2: "INT8", 3: "INT16", 4: "INT32", 5: "INT64", 6: "FP16", 7: "FP32", 8: "FP64", 12: "BOOL", 13: "BF16",
    28: "UINT16", 34: "UINT32", 35: "UINT64",
}  # fmt: skip
_ONNX_DATATYPES: Final = {"FLOAT": "FP32", "DOUBLE": "FP64", "FLOAT16": "FP16", "BFLOAT16": "BF16", "STRING": "BYTES"}
