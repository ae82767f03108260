"""A factory's nn.Module to an .onnx file with open rows and lengths, checked against the module it came from."""

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from backends.base import NO_OPTIONS, LoadFailed, ModelSpec, example_inputs, words_of
from backends.datatypes import NUMPY
from backends.likeness import TOLERANCE, Likeness
from backends.onnx_file import ONE_NAME, OTHER_NAME
from backends.onnx_rounded import rounded

if TYPE_CHECKING:
    from backends.module_to_build import ModuleToBuild

# Between all that an output gives of the two as one vector, on random inputs.
_LEAST_COSINE: Final = {"fp16": 0.999, "int8": 0.9}
_FURTHEST: Final = {"fp16": 0.05, "int8": 0.5}  # the length of the difference of these in parts of it, as such a cosine has it
_DRAWS: Final = 4  # of random inputs for each shape: an unlikely one alone makes even a good int8 look bad
_PROTOBUF_LIMIT_BYTES: Final = 2 << 30

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

    source: `module:factory` or `path/to/file.py:factory`; its module takes the declared inputs as with `kind: torch`.
    precision: fp32; fp16 with inputs and outputs left as they are; or int8, dynamically quantised matrix products.
    integers_below: by integer input, above the values to verify with; of those not named: 0 and 1, tokens and masks alike.
    lengths: open sizes to verify with.
    fused: makes a faster file of one that was verified, or none; it is used if it computes the same.
    Raises: LoadFailed, if the export fails or computes something else than the module.
    """
    integers = {tensor.name for tensor in declared.inputs if NUMPY[tensor.datatype].kind in "iu"}
    if strange := [name for name in integers_below if name not in integers]:
        raise LoadFailed(f"{artifact}: build.integers_below names {', '.join(strange)}, expected integer inputs of the model")
    if missing := [name for name in ("torch", "onnx", "onnxscript") if find_spec(name) is None]:
        raise LoadFailed(f"{artifact}: an export needs {', '.join(missing)}: pip install 'serving-gateway[torch,onnx]'")
    from backends.module_to_build import check_declared, exporting, module_to_build

    check_declared(artifact, declared)
    for tensor in (*declared.inputs, *declared.outputs):
        if tensor.datatype == "BF16":
            raise LoadFailed(f"{artifact}: ONNX Runtime does not pass BF16, which {tensor.name!r} is: declare FP32 or FP16")
    for tensor in declared.outputs:
        if tensor.name in declared.input_by_name:
            raise LoadFailed(f"{artifact}: output {tensor.name!r}: {ONE_NAME}: {OTHER_NAME}")
    # Sizes that differ from each other and from 1, so that the exporter takes none for a constant or for another.
    module = module_to_build(artifact, declared, source, options, rows=3, length=7)
    artifact.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=artifact.parent, prefix=".export-") as folder:
        exported = Path(folder) / artifact.name
        with exporting(artifact, source):
            _export(module, declared, exported, opset)
        if precision != "fp32":
            with _quiet():
                exported = _quantised(exported) if precision == "int8" else _halved(exported)
        like = _compare(module, exported, declared, lengths, integers_below)
        if precision == "fp32" and not like.difference <= TOLERANCE:
            raise LoadFailed(f"{artifact}: the export differs from {source} by {like.difference:.2g}, more than {TOLERANCE:g}")
        if precision != "fp32":
            _check_smaller(artifact, source, precision, like, likelier=bool(integers - {*integers_below}))
        if precision == "fp16" and (like_rounded := _try_rounded(module, exported, declared, lengths, integers_below)):
            _check_smaller(artifact, source, precision, like_rounded, likelier=bool(integers - {*integers_below}))
            like = like_rounded
        note = ""
        if fused is not None and (found := _try_fused(fused, module, exported, declared, lengths, integers_below)):
            exported, like = found
            note = ", fused for ONNX Runtime"
        for file in exported.parent.iterdir():
            if file.is_file() and file.name.startswith(exported.name):
                os.replace(file, artifact.parent / file.name.replace(exported.name, artifact.name, 1))
    return f"{artifact}: {precision} from {source}, max abs difference {like.difference:.1e}, cosine {like.cosine:.6f}{note}"


def _check_smaller(artifact: Path, source: str, precision: str, like: Likeness, *, likelier: bool) -> None:
    """likelier: there are integers to verify with that may be unlike a model's own. Raises: LoadFailed."""
    hint = "; name likelier tokens in build.integers_below" if likelier else ""
    relative, output = like.relative
    if not np.isfinite(relative):
        raise LoadFailed(f"{artifact}: {precision} gives NaN or infinity in output {output!r} where {source} gives none{hint}")
    if not like.cosine >= (least := _LEAST_COSINE[precision]):
        raise LoadFailed(f"{artifact}: {precision} keeps a cosine of {like.cosine:.4f} to {source}, less than {least:g}{hint}")
    if not relative <= _FURTHEST[precision]:
        raise LoadFailed(
            f"{artifact}: {precision} changes output {output!r} of {source} by {relative:.2g} of its length, more than "
            f"{_FURTHEST[precision]:g}{hint}"
        )


def _export(module: "ModuleToBuild", declared: ModelSpec, path: Path, opset: int) -> None:
    import torch

    from backends.module_to_build import arguments

    open_sizes = tuple(
        {axis: torch.export.Dim.AUTO for axis, size in enumerate(tensor.shape) if size < 0} for tensor in declared.inputs
    )
    weights_bytes = sum(tensor.numel() * tensor.element_size() for tensor in module.state_dict().values())
    with _quiet():
        program: Any = torch.onnx.export(
            module,
            arguments(declared, example_inputs(declared, 3, 7)),
            dynamo=True,
            verbose=False,
            input_names=list(declared.input_by_name),
            output_names=list(declared.output_by_name),
            dynamic_shapes=(open_sizes,),
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
    module: "ModuleToBuild",
    path: Path,
    declared: ModelSpec,
    lengths: tuple[int, ...],
    integers_below: Mapping[str, int],
) -> tuple[Path, Likeness] | None:
    """The faster file, and how it compares. None: there is nothing to fuse, it cannot, or computes something else."""
    if len(list(path.parent.iterdir())) > 1:
        return None  # its weights are in files of their own
    try:
        with _quiet():
            faster = fused(path)
        if faster is None:
            return None
        like = _compare(module, faster, declared, lengths, integers_below)
    except Exception as exc:  # whatever a graph of somebody's makes it raise: the file as it was exported will do
        log.warning("%s: is not fused: %s", path.name, words_of(exc))
        return None
    return (faster, like) if like.difference <= TOLERANCE else None


def _try_rounded(
    module: "ModuleToBuild", path: Path, declared: ModelSpec, lengths: tuple[int, ...], integers_below: Mapping[str, int]
) -> Likeness | None:
    """How a file of fp16 compares where it is computed so. None: it has something that cannot be followed on a CPU."""
    try:
        return _compare(module, rounded(path), declared, lengths, integers_below)
    except Exception as exc:  # the file is well, only that which stands for it is not
        log.warning("%s: is not checked for what goes beyond fp16 within: %s", path.name, words_of(exc))
        return None


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
    onnx.save(convert_float_to_float16(onnx.load(str(path)), keep_io_types=True), str(target))
    return target


def _compare(
    module: "ModuleToBuild",
    path: Path,
    declared: ModelSpec,
    lengths: tuple[int, ...],
    integers_below: Mapping[str, int],
) -> Likeness:
    """Over several rows and lengths."""
    from backends.module_to_build import random_inputs
    from backends.onnxruntime import load

    session = load(declared, model=str(path)).open_session(0)
    generator = np.random.default_rng(0)
    like = Likeness(tensor.name for tensor in declared.outputs)
    for rows in {1, min(3, declared.max_rows) or 1}:
        for length in (lengths or (5, 16)) * _DRAWS:
            inputs = random_inputs(declared, rows, length, integers_below, generator)
            module.compare(session, inputs, like)
    return like
