"""A factory's nn.Module to an .onnx file for ONNX Runtime: where that has one kernel for several operators, with the one.

Attention with its projections, GELU with its bias: ONNX Runtime looks for them as it loads a file, but does not know them as
torch.onnx's exporter writes them (onnxruntime 1.32, torch 2.13). onnxscript, which is part of that exporter, does.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends import onnx_export
from backends.base import NO_OPTIONS, ModelSpec

if TYPE_CHECKING:
    import onnx_ir


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
) -> str:
    """As `onnx_export.build`. What is quantised or halved is left as it is exported."""
    return onnx_export.build(
        artifact,
        declared,
        source=source,
        options=options,
        precision=precision,
        opset=opset,
        integers_below=integers_below,
        lengths=lengths,
        fused=_fused if precision == "fp32" else None,
    )


def _fused(path: Path) -> Path | None:
    import onnx_ir
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    model, found = optimize_for_ort(onnx_ir.load(path))
    if not any(found.values()):
        return None
    _part_skips(model.graph)
    target = path.parent / "fused" / path.name
    target.parent.mkdir()
    onnx_ir.save(model, target)
    return target


def _part_skips(graph: "onnx_ir.Graph") -> None:
    """Leave sums apart from what normalises them: on the CPU the kernel for both is slower (`backends.onnxruntime`)."""
    import onnx_ir

    for node in [node for node in graph if node.op_type == "SkipLayerNormalization"]:
        one, other, scale, shift, *bias = node.inputs
        sums = [onnx_ir.node("Add", [one, *bias])] if bias else []
        sums.append(onnx_ir.node("Add", [sums[0].outputs[0] if bias else one, other]))
        total = sums[-1].outputs[0]
        normal = onnx_ir.node(
            "LayerNormalization", [total, scale, shift], {"axis": -1, "epsilon": node.attributes["epsilon"].as_float()}
        )
        old, new = [node.outputs[0], *node.outputs[3:]], [normal.outputs[0], total][: 1 + len(node.outputs[3:])]
        onnx_ir.convenience.replace_nodes_and_values(graph, node, [node], [*sums, normal], old, new)
