"""A factory's nn.Module to an .onnx file for ONNX Runtime: where that has one kernel for several operators, with the one.

Attention with its projections, GELU: ONNX Runtime looks for them as it loads a file, but does not know them as torch.onnx's
exporter writes them (onnxruntime 1.32, torch 2.13). onnxscript, which is part of that exporter, does. Products with their
biases it leaves apart where there are more than two dimensions.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from backends import onnx_export
from backends.base import NO_OPTIONS, ModelSpec

if TYPE_CHECKING:
    import onnx_ir

_SHAPE_IN_PART: Final = 15  # the opset from which on Shape gives some of the sizes


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
    add_in_products(model)
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


def add_in_products(model: "onnx_ir.Model") -> None:
    """Have a bias added by the product that it is added to: Gemm does as it multiplies, where Add reads and writes all again.

    Gemm takes two dimensions: what comes with more is flattened, and stays so through GELU to the next product.
    """
    import numpy as np
    import onnx_ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    if model.opset_imports.get("", 0) < _SHAPE_IN_PART:
        return
    graph = model.graph

    def constant(*numbers: int) -> "onnx_ir.Node":
        return onnx_ir.node("Constant", [], {"value": onnx_ir.tensor(np.array(numbers, np.int64))})

    flat: dict[onnx_ir.Value, tuple[onnx_ir.Value, onnx_ir.Value]] = {}  # in two dimensions; and the sizes of all but the last
    for product in [node for node in graph if node.op_type == "MatMul"]:
        given, weights = product.inputs
        total = _added_to(product)
        if total is None or given is None or weights is None:
            continue
        bias = next(each for each in total.inputs if each is not product.outputs[0])
        assert weights.const_value is not None
        inner, outer = weights.const_value.shape.numpy()
        new = []
        if given in flat:
            rows, sizes = flat[given]
        else:
            new += [constant(-1, inner), onnx_ir.node("Shape", [given], {"start": 0, "end": -1})]
            new.append(onnx_ir.node("Reshape", [given, new[0].outputs[0]]))
            sizes, rows = (each.outputs[0] for each in new[1:])
        new.append(onnx_ir.node("Gemm", [rows, weights, bias]))
        if total.op_type == "BiasGelu":
            new.append(onnx_ir.node("Gelu", [new[-1].outputs[0]], domain="com.microsoft"))
        found = new[-1].outputs[0]
        new.append(constant(outer))
        new.append(onnx_ir.node("Concat", [sizes, new[-1].outputs[0]], {"axis": 0}))
        new.append(onnx_ir.node("Reshape", [found, new[-1].outputs[0]]))
        flat[new[-1].outputs[0]] = found, sizes
        onnx_ir.convenience.replace_nodes_and_values(graph, total, [total], new, [total.outputs[0]], [new[-1].outputs[0]])
        graph.remove(product, safe=True)
    RemoveUnusedNodesPass()(model)


def _added_to(product: "onnx_ir.Node") -> "onnx_ir.Node | None":
    """Of a product with weights, what adds a bias to it, if it is for nothing else."""
    weights, uses = product.inputs[1], product.outputs[0].uses()
    if weights is None or weights.const_value is None or len(weights.const_value.shape) != 2 or len(uses) != 1:
        return None
    (total, _), *_ = uses
    if total.op_type not in ("Add", "BiasGelu") or product.outputs[0].is_graph_output():
        return None
    biases = [each for each in total.inputs if each is not None and each is not product.outputs[0]]
    if len(biases) != 1 or biases[0].const_value is None:
        return None
    return total if tuple(biases[0].const_value.shape) == (weights.const_value.shape[1],) else None
