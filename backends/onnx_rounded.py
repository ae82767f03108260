"""An ONNX model of half precision, as one that computes on a CPU what it gives where half precision is computed.

ONNX Runtime has no fp16 on the CPU: it computes in fp32, and leaves out that what one node gives the next is rounded, and is
infinite beyond 65504. Casts that stand in the file it keeps (onnxruntime 1.32), so here they stand around each node.
"""

from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx


def rounded(path: Path) -> Path:
    """A file beside, of the same name, with each result that is fp16 rounded to it."""
    import onnx

    target = path.parent / "rounded" / path.name
    target.parent.mkdir()
    model = onnx.load(str(path))
    _put_in_order(model.graph)
    del model.graph.value_info[:]  # which has fp16 also for what was left in fp32, as the scales of Resize
    model = onnx.shape_inference.infer_shapes(model)
    graph = model.graph
    half = {tensor.name for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT16} | {
        value.name
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    }
    nodes = [each for node in graph.node for each in _around(node, half)]
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.save(model, str(target))
    return target


def _put_in_order(graph: "onnx.GraphProto") -> None:
    """As types are inferred: the casts that made it fp16 are at its end."""
    nodes = list(graph.node)
    maker = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    makers = {index: [maker[name] for name in node.input if name in maker] for index, node in enumerate(nodes)}
    del graph.node[:]
    graph.node.extend(nodes[index] for index in TopologicalSorter(makers).static_order())


def _around(node: "onnx.NodeProto", half: set[str]) -> list["onnx.NodeProto"]:
    """A node between casts from fp16 and to it, if it is one that computes."""
    import onnx

    inner = any(attribute.HasField("g") for attribute in node.attribute)  # what is inside takes values by their names
    if node.op_type == "Cast" or inner or not half.intersection(node.input):
        return [node]
    before, behind = [], []
    for index, name in enumerate(node.input):
        if name in half:
            node.input[index] = f"{node.output[0]}/wide/{index}"
            before.append(onnx.helper.make_node("Cast", [name], [node.input[index]], to=onnx.TensorProto.FLOAT))
    for index, name in enumerate(node.output):
        if name in half:
            node.output[index] = f"{name}/computed"
            behind.append(onnx.helper.make_node("Cast", [node.output[index]], [name], to=onnx.TensorProto.FLOAT16))
    return [*before, node, *behind]
