"""A factory's nn.Module to an .onnx file with open rows and lengths, checked against the module it came from."""

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.base import NO_OPTIONS, LoadFailed, ModelSpec, Tensors, example_inputs, words_of
from backends.datatypes import NUMPY
from backends.source import made_from

if TYPE_CHECKING:
    import torch

TOLERANCE = 1e-4  # between the module and its fp32 export, element by element
_LEAST_COSINE = {"fp16": 0.999, "int8": 0.9}  # between all outputs of the two as one vector, on random inputs
_DRAWS = 4  # of random inputs for each shape: an unlikely one alone makes even a good int8 look bad
_PROTOBUF_LIMIT_BYTES = 2 << 30

log = logging.getLogger(__name__)


def build(
    artifact: Path,
    declared: ModelSpec,
    *,
    source: str,
    options: Mapping[str, Any],
    precision: str = "fp32",
    opset: int = 18,
    integers_below: Mapping[str, int] = NO_OPTIONS,
    lengths: tuple[int, ...] = (),
    fused: Callable[[Path], Path | None] | None = None,
) -> str:
    """Export, verify, and only then put the file in its place. Answers with one line for the operator.

    source: `module:factory` or `path/to/file.py:factory`; its module takes the declared inputs by position.
    precision: fp32; fp16 with inputs and outputs left as they are; or int8, dynamically quantised matrix products.
    integers_below: by integer input, above the values to verify with; of those not named: 0 and 1, tokens and masks alike.
    lengths: open sizes to verify with.
    fused: makes a faster file of one that was verified, or none; it is used if it computes the same.
    Raises: LoadFailed, if the export fails or computes something else than the module.
    """
    if not declared.inputs or not declared.outputs:
        raise LoadFailed(f"{artifact}: an export needs the model's `inputs` and `outputs` stated")
    integers = {tensor.name for tensor in declared.inputs if NUMPY[tensor.datatype].kind in "iu"}
    if strange := [name for name in integers_below if name not in integers]:
        raise LoadFailed(f"{artifact}: build.integers_below names {', '.join(strange)}, expected integer inputs of the model")
    if missing := [name for name in ("torch", "onnx", "onnxscript") if find_spec(name) is None]:
        raise LoadFailed(f"{artifact}: an export needs {', '.join(missing)}: pip install 'serving-gateway[torch,onnx]'")
    module = made_from(source, options, key="build.options").eval().requires_grad_(False)
    artifact.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=artifact.parent, prefix=".export-") as folder:
        exported = Path(folder) / artifact.name
        _export(module, declared, exported, opset)
        if precision != "fp32":
            exported = _quantised(exported) if precision == "int8" else _halved(exported)
        difference, cosine = _compare(module, exported, declared, lengths, integers_below)
        if precision == "fp32" and not difference <= TOLERANCE:
            raise LoadFailed(f"{artifact}: the export differs from {source} by {difference:.2g}, more than {TOLERANCE:g}")
        if precision != "fp32" and not cosine >= _LEAST_COSINE[precision]:
            raise LoadFailed(
                f"{artifact}: {precision} keeps a cosine of {cosine:.4f} to {source}, less than {_LEAST_COSINE[precision]:g}"
                + ("; name likelier tokens in build.integers_below" if integers - {*integers_below} else "")
            )
        note = ""
        if fused is not None and (found := _try_fused(fused, module, exported, declared, lengths, integers_below)):
            exported, difference, cosine = found
            note = ", fused for ONNX Runtime"
        for file in exported.parent.iterdir():
            if file.name.startswith(exported.name):
                os.replace(file, artifact.parent / file.name.replace(exported.name, artifact.name, 1))
    return f"{artifact}: {precision} from {source}, max abs difference {difference:.1e}, cosine {cosine:.6f}{note}"


def _export(module: "torch.nn.Module", declared: ModelSpec, path: Path, opset: int) -> None:
    import torch

    # Sizes that differ from each other and from 1, so that the exporter takes none for a constant or for another.
    example = example_inputs(declared, 3, 7)
    arguments = tuple(torch.from_numpy(array) for array in example.values())
    open_sizes = tuple(
        {axis: torch.export.Dim.AUTO for axis, size in enumerate(tensor.shape) if size < 0} for tensor in declared.inputs
    )
    weights_bytes = sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())
    with _quiet():
        program: Any = torch.onnx.export(
            module,
            arguments,
            dynamo=True,
            verbose=False,
            input_names=list(declared.input_by_name),
            output_names=list(declared.output_by_name),
            dynamic_shapes=open_sizes,
            opset_version=opset,
        )
    # An operator's own value can have the name an output is given, which makes the file invalid (torch 2.13: "embedding").
    names = {*declared.input_by_name, *declared.output_by_name}
    ends = set(map(id, program.model.graph.outputs))
    for node in program.model.graph:
        for value in node.outputs:
            if value.name in names and id(value) not in ends:
                value.name += "_inner"
    program.save(str(path), external_data=weights_bytes > 0.9 * _PROTOBUF_LIMIT_BYTES)


def _try_fused(
    fused: Callable[[Path], Path | None],
    module: "torch.nn.Module",
    path: Path,
    declared: ModelSpec,
    lengths: tuple[int, ...],
    integers_below: Mapping[str, int],
) -> tuple[Path, float, float] | None:
    """The faster file, and how it compares. None: there is nothing to fuse, it cannot, or computes something else."""
    if len(list(path.parent.iterdir())) > 1:
        return None  # its weights are in files of their own
    try:
        with _quiet():
            faster = fused(path)
        if faster is None:
            return None
        difference, cosine = _compare(module, faster, declared, lengths, integers_below)
    except Exception as exc:  # whatever a graph of somebody's makes it raise: the file as it was exported will do
        log.warning("%s: is not fused: %s", path.name, words_of(exc))
        return None
    return (faster, difference, cosine) if difference <= TOLERANCE else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what exporters warn of: deprecated functions of their own, packages they would register if they were there."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _quantised(path: Path) -> Path:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # The quantiser transposes the weights of Gemm, and then trips over the shapes noted for the old ones (onnxruntime 1.31).
    model = onnx.load(str(path))
    del model.graph.value_info[:]
    onnx.save(model, str(path))
    target = path.parent / "int8" / path.name
    target.parent.mkdir()
    with _quiet():
        quantize_dynamic(
            str(path),
            str(target),
            weight_type=QuantType.QInt8,
            per_channel=True,
            op_types_to_quantize=["MatMul"],
            # Weights of 7 bits: without VNNI, sums of products of 8 overflow 16 bits, and answers are wrong.
            reduce_range=True,
        )
    return target


def _halved(path: Path) -> Path:
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    target = path.parent / "fp16" / path.name
    target.parent.mkdir()
    with _quiet():
        onnx.save(convert_float_to_float16(onnx.load(str(path)), keep_io_types=True), str(target))
    return target


def _compare(
    module: "torch.nn.Module",
    path: Path,
    declared: ModelSpec,
    lengths: tuple[int, ...],
    integers_below: Mapping[str, int],
) -> tuple[float, float]:
    """The greatest absolute difference, and the least cosine of an output over all draws, for several rows and lengths."""
    import torch

    from backends.onnxruntime import load

    session = load(declared, model=str(path)).open_session(0)
    generator = np.random.default_rng(0)
    greatest = 0.0
    products = {tensor.name: np.zeros(3) for tensor in declared.outputs}  # want · got, want · want, got · got
    for rows in {1, min(3, declared.max_rows) or 1}:
        for length in (lengths or (5, 16)) * _DRAWS:
            inputs = _random_inputs(declared, rows, length, integers_below, generator)
            with torch.inference_mode():
                results = module(*(torch.from_numpy(array) for array in inputs.values()))
            expected = [results] if isinstance(results, torch.Tensor) else list(results)
            outputs = session.run(inputs, {})
            for tensor, given in zip(declared.outputs, expected, strict=True):
                want, got = given.double().numpy().ravel(), outputs[tensor.name].astype(np.float64).ravel()
                greatest = max(greatest, float(np.abs(want - got).max()))
                products[tensor.name] += (want @ got, want @ want, got @ got)
    return greatest, min(float(both / max(np.sqrt(one * other), 1e-30)) for both, one, other in products.values())


def _random_inputs(
    declared: ModelSpec, rows: int, length: int, integers_below: Mapping[str, int], generator: np.random.Generator
) -> Tensors:
    """Floats around 0; integers that begin with 1, as every sequence has a token that is attended to."""
    inputs = example_inputs(declared, rows, length)
    for name, array in inputs.items():
        if array.dtype.kind == "f":
            array[...] = generator.standard_normal(array.shape)
        elif array.dtype.kind in "iu":
            below = min(integers_below.get(name, 2), np.iinfo(array.dtype).max)
            array[..., 1:] = generator.integers(0, below, array[..., 1:].shape)
    return inputs
