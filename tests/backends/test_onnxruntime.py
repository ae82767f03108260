"""What the ONNX backend reads from files, refuses, and exports."""

import ctypes
import functools
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import backends
from backends import defaults, onnx_export, onnxruntime_export
from backends.base import ExecutionFailed, LoadFailed, ModelSpec, SpecMismatch, TensorSpec
from backends.check import checked
from backends.mistakes import Wanted
from backends.onnx_file import has_fp16
from backends.onnxruntime_cuda import GraphRuns
from gateway.config import load_config
from gateway.configuring.check import check
from tests.backends.contract import LINEAR, SPEC, expected

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
onnx_ir = pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")


def identity(path: Path, datatype: int, shape: list[Any]) -> str:
    """A file that gives its input back, both of this shape; a name in a shape is an open size."""
    helper = onnx.helper
    tensors = [helper.make_tensor_value_info(name, datatype, shape) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", tensors[:1], tensors[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), str(path))
    return str(path)


def unstated(max_rows: int) -> ModelSpec:
    return ModelSpec("", (), (), max_rows)


def normalised(path: Path, layers: int, width: int) -> str:
    """A file with so many residual layers, as transformers have them: x + relu(x), normalised."""
    helper = onnx.helper
    one = onnx.numpy_helper.from_array(np.ones(width, np.float32), "one")
    nodes, last = [], "x"
    for layer in range(layers):
        names = [f"{name}{layer}" for name in ("relu", "sum", "y")]
        nodes.append(helper.make_node("Relu", [last], names[:1]))
        nodes.append(helper.make_node("Add", [names[0], last], names[1:2]))
        nodes.append(helper.make_node("LayerNormalization", [names[1], "one", "one"], names[2:]))
        last = names[2]
    tensors = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", "tokens", width]) for name in ("x", last)]
    graph = helper.make_graph(nodes, "g", tensors[:1], tensors[1:], [one])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))
    return str(path)


def test_a_fusion_that_takes_longer_than_what_it_stands_for_is_left_out(tmp_path: Path) -> None:
    import onnxruntime

    path = normalised(tmp_path / "residual.onnx", 8, 768)
    given = np.random.default_rng(0).normal(size=(1, 64, 768)).astype(np.float32)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    plain = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    session = backends.load("onnxruntime", {"model": path}, unstated(8)).open_session(0)
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(15):
        for ours in times:
            began = time.thread_time()
            found = session.run({"x": given}, {}).popitem()[1] if ours else plain.run(None, {"x": given})[0]
            times[ours].append(time.thread_time() - began)
            np.testing.assert_allclose(found, plain.run(None, {"x": given})[0], atol=1e-4)
    assert min(times[True]) < 0.7 * min(times[False])  # 0.2 times; if they are alike, onnxruntime's kernel has become as fast


LOADED = """
import sys, numpy as np, backends
from backends.base import ModelSpec
for model in sys.argv[1:]:
    session = backends.load("onnxruntime", {"model": model}, ModelSpec("", (), (), 0)).open_session(0)
    found = session.run({"x": np.arange(8, dtype=np.float16).reshape(2, 1, 4)}, {})
    print(found["y"].tolist())
"""


def test_a_file_of_half_precision_that_onnx_runtime_crashes_on_is_served(tmp_path: Path) -> None:
    helper = onnx.helper
    half, single = (onnx.numpy_helper.from_array(np.eye(4, dtype=of), "w") for of in (np.float16, np.float32))
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT16, ["n", 1, 4])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT16, [1, "n", 4])
    last = [helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0, 2]), helper.make_node("MatMul", ["t", "w"], ["y"])]
    kinds: dict[str, tuple[list[Any], list[Any]]] = {
        "initializer": (last, [half]),
        "constant": ([helper.make_node("Constant", [], ["w"], value=half), *last], []),
        "cast": ([helper.make_node("Cast", ["w32"], ["w"], to=onnx.TensorProto.FLOAT16), *last], [single]),
    }
    single.name = "w32"
    paths = [str(tmp_path / f"{kind}.onnx") for kind in kinds]
    for path, (nodes, weights) in zip(paths, kinds.values(), strict=True):
        graph = helper.make_graph(nodes, "g", [x], [y], weights)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)

    child = subprocess.run([sys.executable, "-c", LOADED, *paths], capture_output=True, text=True, check=False)

    assert (child.returncode, child.stdout.splitlines()) == (0, [str([np.arange(8.0).reshape(2, 4).tolist()])] * 3), (
        child.stderr
    )
    assert not has_fp16(Path(normalised(tmp_path / "single.onnx", 1, 4)))  # which keeps the fusion


def test_a_model_takes_its_file_and_the_weights_that_this_names(tmp_path: Path) -> None:
    helper = onnx.helper
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 64]) for name in ("x", "y"))
    weights = helper.make_tensor("w", onnx.TensorProto.FLOAT, (64,), np.ones(64, np.float32).tobytes(), raw=True)
    graph = helper.make_graph([helper.make_node("Mul", ["x", "w"], ["y"])], "g", [x], [y], [weights])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path = tmp_path / "m.onnx"
    onnx.save_model(made, str(path), save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "m.onnx.build.json").write_text("{}")
    assert backends.load("onnxruntime", {"model": str(path)}, unstated(8)).memory_bytes == path.stat().st_size + 256


def test_strings_pass_as_bytes(tmp_path: Path) -> None:
    model = backends.load(
        "onnxruntime", {"model": identity(tmp_path / "s.onnx", onnx.TensorProto.STRING, ["n", 1])}, unstated(8)
    )
    session = model.open_session(0)
    given = np.array([["naïve 東京".encode()], [b""]], object)
    np.testing.assert_array_equal(session.run({"x": given}, {})["y"], given)
    with pytest.raises(ExecutionFailed, match="'x': ONNX strings are UTF-8"):
        session.run({"x": np.array([[b"\xff"]], object)}, {})


def test_a_file_with_fixed_rows_is_padded_to_them(tmp_path: Path) -> None:
    path = identity(tmp_path / "fixed.onnx", onnx.TensorProto.FLOAT, [4, 3])
    spec = backends.load("onnxruntime", {"model": path}, unstated(4)).spec
    assert (spec.row_sizes, spec.inputs[0].shape) == ((4,), (-1, 3))
    with pytest.raises(LoadFailed, match=r"max_rows 8 needs a first dimension that is open .* x \[4, 3\]"):
        backends.load("onnxruntime", {"model": path}, unstated(8))


def test_without_rows_every_shape_is_the_files_own(tmp_path: Path) -> None:
    path = identity(tmp_path / "fixed.onnx", onnx.TensorProto.FLOAT, [4, 3])
    spec = backends.load("onnxruntime", {"model": path}, unstated(0)).spec
    assert (spec.row_sizes, spec.inputs[0].shape) == ((), (4, 3))


def test_a_datatype_that_cannot_pass_is_named(tmp_path: Path) -> None:
    path = identity(tmp_path / "b.onnx", onnx.TensorProto.BFLOAT16, ["n", 3])
    with pytest.raises(LoadFailed, match=r"input 'x' is tensor\(bfloat16\), .*: export the model in FP32 or FP16"):
        backends.load("onnxruntime", {"model": path}, unstated(8))


def with_more_outputs(path: Path) -> str:
    """x [n, 3] as y, its label as skl2onnx has it, with probabilities that are no tensor, and the sum of all as total."""
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("Identity", ["x"], ["y"]),
        helper.make_node("ArgMax", ["x"], ["label"], axis=1, keepdims=0),
        helper.make_node("ZipMap", ["y"], ["prob"], domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2]),
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
    ]
    of_map = helper.make_map_type_proto(onnx.TensorProto.INT64, helper.make_tensor_type_proto(floats, []))
    outputs = [
        helper.make_tensor_value_info("y", floats, ["n", 3]),
        helper.make_tensor_value_info("label", onnx.TensorProto.INT64, ["n"]),
        helper.make_value_info("prob", helper.make_sequence_type_proto(of_map)),
        helper.make_tensor_value_info("total", floats, []),
    ]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", floats, ["n", 3])], outputs)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), str(path))
    return str(path)


LABEL = "{name: label, datatype: INT64, shape: [-1]}"
ZIPMAP = 'convert the model with options={"zipmap": False}'


@pytest.mark.parametrize(
    ("outputs", "loaded", "checked"),
    [
        (f"[{LABEL}]", "", ""),
        (f"[{LABEL}, {{name: y, datatype: FP32, shape: [-1, 3]}}]", "", ""),
        (
            "[{name: total, datatype: FP32, shape: [-1]}]",
            "got x [-1, 3], total []",
            "has x FP32 [-1, 3], total FP32 [], expected",
        ),
        (f"[{LABEL}, {{name: prob, datatype: FP32, shape: [-1, 3]}}]", f"cannot pass: {ZIPMAP}", f"cannot pass; {ZIPMAP}"),
        ("[]", f"cannot pass: {ZIPMAP}", f"prob is sequence of map in the file, which cannot pass; {ZIPMAP}"),
        ("[{name: z, datatype: FP32, shape: [-1]}]", "only ['label', 'prob', 'total', 'y']", "one of the file's outputs"),
    ],
)
def test_only_outputs_that_are_listed_are_judged_by_load_and_check_alike(
    tmp_path: Path, outputs: str, loaded: str, checked: str
) -> None:
    path, config = with_more_outputs(tmp_path / "m.onnx"), tmp_path / "gateway.yaml"
    config.write_text(f"models:\n  - name: m\n    outputs: {outputs}\n    backends: [{{kind: onnxruntime, model: m.onnx}}]\n")
    faults = [str(fault) for fault in check(config).faults]
    (model,) = load_config(config).models
    specs = tuple(TensorSpec(tensor.name, tensor.datatype, tuple(tensor.shape)) for tensor in model.outputs)
    if not loaded:
        assert faults == []
        session = backends.load("onnxruntime", {"model": path}, ModelSpec("", (), specs, 8)).open_session(0)
        given = np.array([[1, 3, 2], [5, 4, 0]], np.float32)
        answer = session.run({"x": given}, {})
        assert list(answer) == [spec.name for spec in specs]
        assert answer["label"].tolist() == [1, 0]
        return
    assert any(checked in fault for fault in faults)
    with pytest.raises(LoadFailed, match=re.escape(loaded)):
        backends.load("onnxruntime", {"model": path}, ModelSpec("", (), specs, 8))


def test_a_sequence_that_no_zipmap_makes_is_told_without_it(tmp_path: Path) -> None:
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    x, y = (helper.make_tensor_value_info(name, floats, ["n", 3]) for name in "xy")
    parts = helper.make_tensor_sequence_value_info("parts", floats, None)
    nodes = [helper.make_node("SplitToSequence", ["x"], ["parts"]), helper.make_node("Identity", ["x"], ["y"])]
    graph = helper.make_graph(nodes, "g", [x], [y, parts])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), str(path))
    with pytest.raises(LoadFailed, match=r"cannot pass: list only the other outputs under `outputs`$"):
        backends.load("onnxruntime", {"model": str(path)}, unstated(8))
    (tmp_path / "gateway.yaml").write_text("models: [{name: m, backends: [{kind: onnxruntime, model: m.onnx}]}]")
    (fault,) = (str(fault) for fault in check(tmp_path / "gateway.yaml").faults)
    assert "parts is sequence of FP32 in the file, which cannot pass; list only the other outputs" in fault


def test_check_tells_bfloat16_which_onnx_runtime_does_not_pass(tmp_path: Path) -> None:
    identity(tmp_path / "b.onnx", onnx.TensorProto.BFLOAT16, ["n", 3])
    config = tmp_path / "gateway.yaml"
    config.write_text("models: [{name: m, backends: [{kind: onnxruntime, model: b.onnx}]}]")
    faults = [str(fault) for fault in check(config).faults]
    assert [fault.partition("'b.onnx': ")[2].partition(";")[0] for fault in faults] == [
        "x is BF16 in the file, which cannot pass",
        "y is BF16 in the file, which cannot pass",
    ]


def of_unknown_rank(path: Path, *, input_shape: Any = ("n", 4)) -> str:
    """y is x without its sizes of 1 in a shape that only a run shows; total is the sum of all, without a shape in the file."""
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("NonZero", ["shape"], ["at"]),
        helper.make_node("Squeeze", ["at"], ["flat"]),
        helper.make_node("Gather", ["shape", "flat"], ["kept"]),
        helper.make_node("Reshape", ["x", "kept"], ["y"]),
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
    ]
    inputs = [helper.make_tensor_value_info("x", floats, input_shape)]
    outputs = [helper.make_tensor_value_info("y", floats, None), helper.make_tensor_value_info("total", floats, None)]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), str(path))
    return str(path)


X, Y = TensorSpec("x", "FP32", (-1, 4)), TensorSpec("y", "FP32", (-1, 4))
GIVEN = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.mark.parametrize("input_shape", [("n", 4), None])
def test_a_rank_that_the_file_does_not_say_is_what_is_declared(tmp_path: Path, input_shape: Any) -> None:
    path = of_unknown_rank(tmp_path / "m.onnx", input_shape=input_shape)
    model = backends.load("onnxruntime", {"model": path}, ModelSpec("", (X,), (Y,), 8))
    assert (model.spec.inputs, model.spec.outputs, model.spec.max_rows) == ((X,), (Y,), 8)
    np.testing.assert_array_equal(model.open_session(0).run({"x": GIVEN}, {})["y"], GIVEN)
    with pytest.raises(SpecMismatch, match="'y': the model has FP32"):
        backends.load("onnxruntime", {"model": path}, ModelSpec("", (X,), (TensorSpec("y", "FP64", (-1, 4)),), 8))


def test_a_rank_of_outputs_that_nothing_says_is_seen_in_runs(tmp_path: Path) -> None:
    path = of_unknown_rank(tmp_path / "m.onnx")
    found = backends.read("onnxruntime", path)
    assert (found.inputs, found.outputs, found.max_rows) == ((X,), (Y, TensorSpec("total", "FP32", ())), 0)
    model = backends.load("onnxruntime", {"model": path}, ModelSpec("", (X,), (), 0))
    assert model.spec.outputs == found.outputs
    answer = model.open_session(0).run({"x": GIVEN}, {})
    assert (answer["y"].tolist(), answer["total"]) == (GIVEN.tolist(), 28)


def test_a_rank_of_inputs_that_nothing_says_is_asked_for(tmp_path: Path) -> None:
    path, config = of_unknown_rank(tmp_path / "m.onnx", input_shape=None), tmp_path / "gateway.yaml"
    for ask in (lambda: backends.read("onnxruntime", path), lambda: backends.load("onnxruntime", {"model": path})):
        with pytest.raises(LoadFailed, match="does not say the rank of input 'x': state `inputs`"):
            ask()
    config.write_text("models: [{name: m, backends: [{kind: onnxruntime, model: m.onnx}]}]")
    (fault,) = check(config).faults
    assert "does not say the rank of input x; state `inputs`" in str(fault)
    tensors = "inputs: [{name: x, datatype: FP32, shape: [-1, 4]}], outputs: [{name: y, datatype: FP32, shape: [-1, 4]}]"
    config.write_text(f"models: [{{name: m, {tensors}, backends: [{{kind: onnxruntime, model: m.onnx}}]}}]")
    assert check(config).faults == ()


def test_outputs_that_no_run_shows_are_asked_for(tmp_path: Path) -> None:
    helper, floats = onnx.helper, onnx.TensorProto.FLOAT
    inputs = [
        helper.make_tensor_value_info("x", floats, ["n", 4]), helper.make_tensor_value_info("s", onnx.TensorProto.INT64, ["k"])
    ]  # fmt: skip
    outputs = [helper.make_tensor_value_info("y", floats, None)]
    graph = helper.make_graph([helper.make_node("Reshape", ["x", "s"], ["y"])], "g", inputs, outputs)
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), str(path))
    with pytest.raises(LoadFailed, match="does not say the rank of output 'y': state `outputs`"):
        backends.read("onnxruntime", str(path))


@pytest.mark.parametrize("declared", [(), (TensorSpec("x", "FP32", ()),)])
def test_a_scalar_of_the_file_is_one(tmp_path: Path, declared: tuple[TensorSpec, ...]) -> None:
    path = identity(tmp_path / "m.onnx", onnx.TensorProto.FLOAT, [])
    model = backends.load("onnxruntime", {"model": path}, ModelSpec("", declared, (), 0))
    assert [tensor.shape for tensor in (*model.spec.inputs, *model.spec.outputs)] == [(), ()]
    assert model.open_session(0).run({"x": np.array(3, np.float32)}, {})["y"] == 3
    with pytest.raises(SpecMismatch, match=r"'x': the model has FP32 \[\]"):
        backends.load("onnxruntime", {"model": path}, ModelSpec("", (TensorSpec("x", "FP32", (1,)),), (), 0))


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ((TensorSpec("x", "FP64", (-1, 3)),), (), r"'x': the model has FP32 \[-1, 3\], the configuration says FP64"),
        ((TensorSpec("x", "FP32", (-1, 4)),), (), r"the configuration says FP32 \[-1, 4\]"),
        ((TensorSpec("z", "FP32", (-1, 3)),), (), r"also needs \['x'\]"),
        ((), (TensorSpec("z", "FP32", (-1, 3)),), r"'z': the model has none of that name, only \['y'\]"),
    ],
)
def test_what_is_declared_is_held_against_the_file(
    tmp_path: Path, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], message: str
) -> None:
    path = identity(tmp_path / "m.onnx", onnx.TensorProto.FLOAT, ["n", 3])
    with pytest.raises(LoadFailed, match=message):
        backends.load("onnxruntime", {"model": path}, ModelSpec("", inputs, outputs, 8))


def test_a_declared_size_stands_for_an_open_one(tmp_path: Path) -> None:
    path = identity(tmp_path / "m.onnx", onnx.TensorProto.FLOAT, ["n", "length"])
    declared = (TensorSpec("x", "FP32", (-1, 7)),)
    assert backends.load("onnxruntime", {"model": path}, ModelSpec("", declared, (), 8)).spec.inputs == declared


def test_a_file_that_is_no_onnx_is_a_failed_load(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"not protobuf")
    with pytest.raises(LoadFailed, match=r"bad\.onnx"):
        backends.load("onnxruntime", {"model": str(tmp_path / "bad.onnx")}, unstated(8))


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("fp16", 5e-3), ("int8", 0.1)])
def test_a_smaller_precision_keeps_inputs_and_outputs(tmp_path: Path, precision: str, tolerance: float) -> None:
    path = tmp_path / f"{precision}.onnx"
    line = backends.build("onnxruntime", path, SPEC, source=LINEAR, options={}, precision=precision)
    assert line.startswith(f"{path}: {precision} from {LINEAR}")
    model = backends.load("onnxruntime", {"model": str(path)}, unstated(8))
    assert (model.spec.inputs, model.spec.outputs) == (SPEC.inputs, SPEC.outputs)
    x = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    np.testing.assert_allclose(model.open_session(0).run({"INPUT0": x}, {})["OUTPUT0"], expected(x), atol=tolerance)


def fickle() -> Any:
    """A factory of a module that computes something else each time."""
    import torch

    class Fickle(torch.nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x[:, :4] * self.calls

    return Fickle()


@pytest.mark.slow
def test_an_export_that_computes_something_else_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="the export differs"):
        backends.build("onnxruntime", tmp_path / "f.onnx", SPEC, source=f"{__file__}:fickle", options={})
    assert list(tmp_path.iterdir()) == []


TOKENS = ModelSpec("", (TensorSpec("tokens", "INT64", (-1, -1)),), (TensorSpec("mean", "FP32", (-1, 32)),), 8)


def encoder() -> Any:
    """A factory of one layer of a transformer."""
    import torch

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.rows = torch.nn.Embedding(9, 32)
            self.to_all = torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(3)])
            self.wide, self.narrow = torch.nn.Linear(32, 128), torch.nn.Linear(128, 32)
            self.normal = torch.nn.LayerNorm(32)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.normal(self.rows(tokens))
            query, key, value = (each(x).view(*tokens.shape, 4, 8).transpose(1, 2) for each in self.to_all)
            mask = (tokens > 0)[:, None, None, :]
            mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            x = self.normal(x + mixed.transpose(1, 2).reshape(x.shape))
            found: torch.Tensor = self.normal(x + self.narrow(torch.nn.functional.gelu(self.wide(x))))
            return found.mean(1)

    return Encoder().eval()


def operators(path: Path) -> set[str]:
    return {node.op_type for node in onnx.load(str(path)).graph.node}


@pytest.mark.slow
def test_an_export_has_one_kernel_for_several_operators_where_onnx_runtime_has_it(tmp_path: Path) -> None:
    for kind in ("onnxruntime", "tensorrt"):
        line = backends.build(
            kind, tmp_path / kind, TOKENS, source=f"{__file__}:encoder", options={}, integers_below={"tokens": 9}
        )
        assert line.endswith(", fused for ONNX Runtime") == (kind == "onnxruntime")
    fused, plain = operators(tmp_path / "onnxruntime"), operators(tmp_path / "tensorrt")
    assert {"Gemm", "Gelu"} <= fused
    assert fused & {"Attention", "MultiHeadAttention"}
    assert not fused & {"Erf", "Softmax", "SkipLayerNormalization"}
    assert {"Erf", "Softmax"} <= plain


def products(bias: list[int], into: str, outputs: list[str]) -> onnx.ModelProto:
    """y = (x @ w + bias) @ narrow + one, the first sum made by `into`, for x of three dimensions."""
    helper, values = onnx.helper, {}
    values["w"], values["bias"] = np.arange(32).reshape(4, 8) / 32, np.arange(8).reshape(bias) / 8
    values["narrow"], values["one"] = np.arange(16).reshape(8, 2) / 16, np.ones(2)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node(into, ["product", "bias"], ["sum"], domain="" if into == "Add" else "com.microsoft"),
        helper.make_node("MatMul", ["sum", "narrow"], ["end"]),
        helper.make_node("Add", ["end", "one"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["a", "b", 4])],
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs],
        [onnx.numpy_helper.from_array(value.astype(np.float32), name) for name, value in values.items()],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def computed(model: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, {"x": x})
    return found


@pytest.mark.parametrize(
    ("bias", "into", "outputs", "folded"),
    [
        ([8], "Add", ["y"], 2),
        ([8], "BiasGelu", ["y"], 2),
        ([1, 8], "Add", ["y"], 1),
        ([8], "Add", ["y", "product"], 1),
        ([8], "Add", ["y", "sum"], 2),
    ],
)
def test_a_bias_is_added_by_the_product_that_is_wanted_for_nothing_else(
    bias: list[int], into: str, outputs: list[str], folded: int
) -> None:
    before = products(bias, into, outputs)
    model = onnx_ir.serde.deserialize_model(before)
    onnxruntime_export.add_in_products(model)
    after = onnx_ir.serde.serialize_model(model)
    kinds = [node.op_type for node in after.graph.node]
    assert (kinds.count("Gemm"), kinds.count("MatMul")) == (folded, 2 - folded)
    assert [output.name for output in after.graph.output] == outputs
    x = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
    for want, got in zip(computed(before, x), computed(after, x), strict=True):
        assert want.shape == got.shape
        assert np.allclose(want, got, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("gives", ["nothing", "another model", "an error"])
def test_an_export_that_cannot_be_fused_stays_as_it_is(tmp_path: Path, gives: str) -> None:
    def fused(path: Path) -> Path | None:
        if gives == "an error":
            raise ValueError("a graph of a kind it does not know")
        if gives == "nothing":
            return None
        return Path(identity(tmp_path / "other.onnx", onnx.TensorProto.FLOAT, ["n", 16]))

    line = onnx_export.build(tmp_path / "f.onnx", SPEC, source=LINEAR, options={}, fused=fused)
    assert "fused" not in line
    assert backends.load("onnxruntime", {"model": str(tmp_path / "f.onnx")}, unstated(8)).spec.inputs == SPEC.inputs


def test_an_export_needs_its_tensors_stated(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="`inputs` and `outputs` stated"):
        backends.build("onnxruntime", tmp_path / "f.onnx", unstated(8), source=LINEAR, options={})


def test_an_export_says_which_libraries_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)  # as where it is not installed
    with pytest.raises(LoadFailed, match=r"an export needs onnxscript: pip install 'serving-gateway\[torch,onnx\]'"):
        backends.build("onnxruntime", tmp_path / "f.onnx", SPEC, source=LINEAR, options={})


def test_runs_over_bound_tensors_give_what_plain_runs_give(tmp_path: Path) -> None:
    # Here on the CPU, which records nothing: what is tested is the binding and the way of shapes and values.
    import onnxruntime

    path = identity(tmp_path / "f.onnx", onnx.TensorProto.FLOAT, ["n", 3])
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    bound: list[object] = []
    with_binding = session.run_with_iobinding
    session.run_with_iobinding = lambda *call: (bound.append(call), with_binding(*call))
    runs = GraphRuns(session, ["y"], "cpu")
    random = np.random.default_rng(0)
    for rows in (2, 5, 2, 5, 2):
        given = np.asfortranarray(random.standard_normal((rows, 3)).astype(np.float32))
        (found,) = runs.run({"x": given})
        np.testing.assert_array_equal(found, given)
    assert len(bound) == 5  # the first run of a shape records it as well


def test_graphs_are_refused_where_they_cannot_be(tmp_path: Path) -> None:
    path = identity(tmp_path / "f.onnx", onnx.TensorProto.FLOAT, ["n", 3])
    with pytest.raises(LoadFailed, match="cuda_graphs: expected false where device is 'cpu'"):
        backends.load("onnxruntime", {"model": path, "cuda_graphs": True}, unstated(8))


class Fallen:
    """A session that was to be on CUDA, as ONNX Runtime gives it where that cannot be loaded."""

    def __init__(self, *_: Any, providers: list[Any], **__: Any) -> None:
        self.asked = providers

    def get_providers(self) -> list[str]:
        return ["CPUExecutionProvider"]


@pytest.fixture
def with_cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """ONNX Runtime as its build for CUDA is where no CUDA is. Gives what was called of it, in order."""
    import onnxruntime

    from backends import onnxruntime_libraries

    calls: list[str] = []

    def preload() -> None:
        calls.append("preload")
        print("Failed to load libcublasLt.so.13: libcublasLt.so.13: cannot open shared object file: No such file or directory")

    def opened(*given: Any, **options: Any) -> Fallen:
        calls.append("open")
        return Fallen(*given, **options)

    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(onnxruntime, "preload_dlls", preload)
    monkeypatch.setattr(onnxruntime, "InferenceSession", opened)
    # Anew, as in a process that has loaded nothing, and again as it was.
    monkeypatch.setattr(onnxruntime_libraries, "_preload", functools.cache(onnxruntime_libraries._preload.__wrapped__))
    return calls


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "libcublasLt.so.13: cannot open shared object file: No such file or directory",
            r"m\.onnx: ONNX Runtime fell back to the CPU: libcublasLt\.so\.13 is missing: "
            r"pip install 'onnxruntime-gpu\[cuda,cudnn\]'$",
        ),
        (
            "libcuda.so.1: cannot open shared object file: No such file or directory",
            r"libcuda\.so\.1 of the NVIDIA driver is missing: run it where a GPU is",
        ),
        ("/x/libonnxruntime_providers_cuda.so: undefined symbol: Provider_GetHost", "standard error has what it said; "),
    ],
)
def test_a_session_that_fell_back_from_cuda_says_what_it_missed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    with_cuda: list[str],
    said: str,
    message: str,
) -> None:
    def refused(path: str) -> None:
        raise OSError(said)

    monkeypatch.setattr(ctypes, "CDLL", refused)
    (tmp_path / "m.onnx").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(LoadFailed, match=message):
            backends.load("onnxruntime", {"model": str(tmp_path / "m.onnx"), "device": "cuda"}, unstated(8))
    assert with_cuda == ["preload", "open", "open"]
    assert capfd.readouterr().out == ""


def test_cudas_libraries_are_left_alone_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: pytest.fail("loaded"))
    backends.load("onnxruntime", {"model": identity(tmp_path / "m.onnx", onnx.TensorProto.FLOAT, ["n", 3])}, unstated(8))


def test_an_optional_input_is_refused_as_the_file_takes_all(tmp_path: Path) -> None:
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["x", "y"], ["z"])],
        "g",
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["rows", 4]) for name in "xy"],
        [onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, ["rows", 4])],
    )
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9), tmp_path / "m.onnx"
    )
    x, y, z = (TensorSpec(name, "FP32", (-1, 4), optional=name == "y") for name in "xyz")
    with pytest.raises(LoadFailed, match="input 'y' is optional, but the file takes it in every request"):
        backends.load("onnxruntime", {"model": str(tmp_path / "m.onnx")}, ModelSpec("", (x, y), (z,), 4))
    wanted = Wanted(
        "onnxruntime", defaults("onnxruntime") | {"model": str(tmp_path / "m.onnx")}, here=True, thorough=True,
        inputs=(x, y), outputs=(z,), max_rows=4,
    )  # fmt: skip
    assert [mistake.at for mistake in checked(wanted)] == [("inputs", 1, "optional")]
