"""What the PyTorch backend does beyond the contract."""

import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import backends
import gateway
from backends import torch_discovery
from backends.base import ExecutionFailed, InputRefused, LoadFailed, ModelSpec, OutputsRefused, TensorSpec
from backends.check import checked
from backends.mistakes import Wanted
from tests.backends.contract import LINEAR, SPEC, expected

torch = pytest.importorskip("torch", reason="torch is not installed")

BF16 = np.dtype(ml_dtypes.bfloat16)


def halves() -> Any:
    """A factory: a module that answers by name."""

    class Halves(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return {"low": x / 2, "more": x.sum(1), "ignored": x}

    return Halves()


def noted_threads() -> Any:
    """A factory: a module that gives the number of threads it runs with."""

    class Threads(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.full((x.shape[0],), torch.get_num_threads())

    return Threads()


def of_a_new_thread() -> int:
    with ThreadPoolExecutor(1) as other:
        return int(other.submit(torch.get_num_threads).result())


def noted_threads_beside() -> Any:
    """A factory: its own number, and that of a thread which it begins."""

    class Threads(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.tensor([[torch.get_num_threads(), of_a_new_thread()]])

    return Threads()


def spec(inputs: tuple[TensorSpec, ...], *outputs: TensorSpec) -> ModelSpec:
    return ModelSpec("", inputs, outputs, 8)


X = (TensorSpec("x", "FP32", (-1, -1)),)


def test_bf16_passes_both_ways() -> None:
    both = spec((TensorSpec("x", "BF16", (-1, -1)),), TensorSpec("low", "BF16", (-1, -1)), TensorSpec("more", "BF16", (-1,)))
    session = backends.load("torch", {"model": f"{__file__}:halves"}, both).open_session(0)
    outputs = session.run({"x": np.array([[1, 2.5], [4, 8]], BF16)}, {})
    assert outputs["low"].dtype == BF16
    np.testing.assert_array_equal(outputs["low"].astype(np.float32), [[0.5, 1.25], [2, 4]])
    np.testing.assert_array_equal(outputs["more"].astype(np.float32), [3.5, 12])


def test_outputs_are_taken_by_name_where_the_module_names_them() -> None:
    two = spec(X, TensorSpec("more", "FP32", (-1,)), TensorSpec("low", "FP32", (-1, -1)))
    outputs = (
        backends.load("torch", {"model": f"{__file__}:halves"}, two).open_session(0).run({"x": np.ones((2, 3), np.float32)}, {})
    )
    assert (outputs["more"].tolist(), outputs["low"].shape) == ([3, 3], (2, 3))


class SumAndProduct(NamedTuple):
    sum: torch.Tensor
    product: torch.Tensor


class Both(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> SumAndProduct:
        return SumAndProduct(x + y, x * y)


@pytest.mark.parametrize("scripted", [False, True])
@pytest.mark.parametrize(
    ("outputs", "found"),
    [
        (("sum", "product"), {"sum": 13, "product": 30}),
        (("product", "sum"), {"sum": 13, "product": 30}),
        (("output_0", "output_1"), {"output_0": 13, "output_1": 30}),
        (("product",), {"product": 30}),
    ],
)
def test_fields_of_a_named_tuple_are_taken_by_name_where_they_are_declared(
    outputs: tuple[str, ...], found: dict[str, float], scripted: bool, tmp_path: Path
) -> None:
    model = f"{__file__}:Both"
    if scripted:
        model = str(tmp_path / "m.pt")
        torch.jit.script(Both()).save(model)
    example = {"x": np.full((1, 2), 3, np.float32), "y": np.full((1, 2), 10, np.float32)}
    assert [tensor.name for tensor in backends.read("torch", model, example=example).outputs] == ["sum", "product"]
    inputs = tuple(TensorSpec(name, "FP32", (-1, 2)) for name in "xy")
    declared = spec(inputs, *(TensorSpec(name, "FP32", (-1, 2)) for name in outputs))
    answer = backends.load("torch", {"model": model}, declared).open_session(0).run(example, {})
    assert {name: array[0, 0] for name, array in answer.items()} == found


def test_an_output_the_module_does_not_give_fails_the_batch() -> None:
    absent = spec(X, TensorSpec("absent", "FP32", (-1,)))
    session = backends.load("torch", {"model": f"{__file__}:halves"}, absent).open_session(0)
    with pytest.raises(ExecutionFailed, match=r"without the outputs \['absent'\]"):
        session.run({"x": np.ones((2, 3), np.float32)}, {})


def test_each_session_has_its_own_number_of_threads() -> None:
    noted = spec(X, TensorSpec("n", "INT64", (-1,)))
    found: dict[int, int] = {}
    both_open = threading.Barrier(2)

    def work(threads: int) -> None:
        session = backends.load("torch", {"model": f"{__file__}:noted_threads", "threads": threads}, noted).open_session(0)
        both_open.wait(20)
        found[threads] = int(session.run({"x": np.ones((1, 1), np.float32)}, {})["n"][0])

    workers = [threading.Thread(target=work, args=(threads,)) for threads in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert found == {1: 1, 2: 2}


@pytest.fixture
def threads_of_the_host() -> Iterator[int]:
    """Of PyTorch, for all threads to come."""
    before, number = of_a_new_thread(), 3
    torch.set_num_threads(number)
    yield number
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize(("isolation", "beside"), [("thread", 3), ("process", 1)])
def test_a_process_that_loads_a_model_keeps_its_number_of_threads(
    threads_of_the_host: int, isolation: str, beside: int
) -> None:
    backend = {"kind": "torch", "model": f"{__file__}:noted_threads_beside", "threads": 1, "isolation": isolation}
    declared = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 1]}],
        "outputs": [{"name": "n", "datatype": "INT64", "shape": [-1, 2]}],
    }
    with gateway.load({"models": [{"name": "noted", **declared, "max_rows": 1, "backends": [backend]}]}) as model:
        assert model.predict({"x": [[0]]})["n"].tolist() == [[1, beside]]
        assert (torch.get_num_threads(), of_a_new_thread()) == (threads_of_the_host, threads_of_the_host)
    assert (torch.get_num_threads(), of_a_new_thread()) == (threads_of_the_host, threads_of_the_host)


@pytest.mark.parametrize(
    ("options", "declared", "message"),
    [
        ({"model": LINEAR}, ModelSpec("", (), (), 8), "set `inputs` and `outputs`"),
        ({"model": LINEAR}, spec((TensorSpec("t", "BYTES", (-1, 1)),), *SPEC.outputs), "'t' is BYTES: use a python model"),
        ({"model": "absent.pt", "precision": "int8"}, SPEC, "int8 quantises a factory's module"),
        ({"model": LINEAR, "precision": "int8", "device": "cuda"}, SPEC, "dynamic quantisation is for the CPU"),
        ({"model": LINEAR, "cuda_graphs": True}, SPEC, "cuda_graphs: expected false where device is 'cpu'"),
        ({"model": f"{__file__}:halves", "factory_options": {"x": 1}}, SPEC, r"options\.x: halves takes no .*py:\d+"),
        ({"model": "configs/examples/linear.py:nothing"}, SPEC, "has no 'nothing'"),
        ({"model": "backends.nothing:x"}, SPEC, r"cannot be imported.*backends\.nothing"),
        ({"model": "builtins:dict"}, SPEC, "expected an nn.Module from the factory, got dict"),
    ],
)
def test_what_cannot_be_loaded_is_told(options: dict[str, Any], declared: ModelSpec, message: str) -> None:
    with pytest.raises(LoadFailed, match=message):
        backends.load("torch", options, declared)


def test_a_pt2_file_that_is_no_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.pt2").write_bytes(b"nothing")
    with pytest.raises(LoadFailed, match=r"bad\.pt2: a text, no model, where TorchScript"):
        backends.load("torch", {"model": str(tmp_path / "bad.pt2")}, SPEC)


def test_cuda_without_a_device_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(LoadFailed, match="sees no CUDA device"):
        backends.load("torch", {"model": LINEAR, "device": "cuda"}, SPEC)


@pytest.mark.slow
def test_a_compiled_module_takes_any_number_of_rows() -> None:
    session = backends.load("torch", {"model": LINEAR, "compile": True}, SPEC).open_session(0)
    for count in (3, 8):
        x = np.random.default_rng(count).standard_normal((count, 16)).astype(np.float32)
        np.testing.assert_allclose(session.run({"INPUT0": x}, {})["OUTPUT0"], expected(x), rtol=1e-5, atol=1e-5)


def optional_between() -> Any:
    """A factory."""

    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, scale: torch.Tensor | None = None) -> torch.Tensor:
            if mask is not None:
                x = x + 1000 * mask
            return x if scale is None else x * scale

    return Scaled()


def scripted(folder: Path) -> str:
    torch.jit.script(optional_between()).save(folder / "scaled.pt")
    return str(folder / "scaled.pt")


@pytest.mark.parametrize("order", [("x", "scale"), ("scale", "x")])
@pytest.mark.parametrize("model_of", [scripted, lambda folder: f"{__file__}:optional_between"])
def test_inputs_go_to_the_parameters_of_their_names(model_of: Any, order: tuple[str, ...], tmp_path: Path) -> None:
    model = model_of(tmp_path)
    example = {"x": np.ones((1, 4), np.float32), "scale": np.full((1, 4), 3, np.float32)}
    found = backends.read("torch", model, example={name: example[name] for name in order})
    assert [tensor.name for tensor in found.inputs] == ["x", "scale"]
    declared = ModelSpec("", tuple(TensorSpec(name, "FP32", (-1, 4)) for name in order), found.outputs, 8)
    session = backends.load("torch", {"model": model}, declared).open_session(0)
    assert session.run(example, {})["output"].tolist() == [[3] * 4]


@pytest.mark.parametrize("order", [("x", "isTaken"), ("isTaken", "x"), ("istaken", "x")])
def test_inputs_of_an_exported_program_are_those_of_their_names(order: tuple[str, ...], tmp_path: Path) -> None:
    class Less(torch.nn.Module):
        def forward(self, x: torch.Tensor, isTaken: torch.Tensor) -> torch.Tensor:
            return x - isTaken

    torch.export.save(torch.export.export(Less(), (torch.ones(1, 4), torch.ones(1, 4))), tmp_path / "less.pt2")
    declared = spec(tuple(TensorSpec(name, "FP32", (-1, 4)) for name in order), TensorSpec("y", "FP32", (-1, 4)))
    session = backends.load("torch", {"model": f"{tmp_path}/less.pt2"}, declared).open_session(0)
    inputs = {name: np.full((1, 4), 5 if name == "x" else 1, np.float32) for name in order}
    assert session.run(inputs, {})["y"].tolist() == [[4] * 4]


@pytest.mark.slow
def test_output_indices_are_held_against_an_exported_program(tmp_path: Path) -> None:
    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.long(), x * 2

    torch.export.save(torch.export.export(Two(), (torch.ones(1, 4),)), tmp_path / "two.pt2")
    in_order = "in the order of the file: to INT64 [1, 4], mul FP32 [1, 4]"
    for indices, told in (
        ([], [f"1 are listed, expected 2, {in_order}: list all outputs"]),
        ([0], [", expected INT64, as in the file: write INT64"]),
        ([1], []),
        ([2], [f", expected 0 to 1, {in_order}: "]),
        ([0, 1], ["has 2, of 1 outputs, expected : write one for each, in their order"]),
    ):
        assert faults_of(tmp_path / "two.pt2", "x", max_rows=0, output_indices=indices) == told


def test_what_only_one_device_has_is_not_set_for_the_other() -> None:
    model = Path(f"{__file__}:optional_between")
    assert faults_of(model, "x", max_rows=8, cuda_graphs=True) == [
        ", expected false where device is cpu: set device: cuda, or remove it"
    ]
    assert faults_of(model, "x", max_rows=8, precision="int8", device="cuda")[-1:] == [
        "PyTorch's dynamic quantisation is for the CPU, expected fp32 or bf16 on a GPU: set one of them, or device: cpu"
    ]


def test_inputs_with_names_of_their_own_go_by_position() -> None:
    declared = spec(tuple(TensorSpec(name, "FP32", (-1, 4)) for name in ("INPUT0", "INPUT1")), TensorSpec("y", "FP32", (-1, 4)))
    session = backends.load("torch", {"model": f"{__file__}:optional_between"}, declared).open_session(0)
    ones = np.ones((1, 4), np.float32)
    assert session.run({"INPUT0": ones, "INPUT1": ones}, {})["y"].tolist() == [[1001] * 4]


class Given(torch.nn.Module):
    def __init__(self, result: str) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: Any) -> Any:
        return {
            "mapping": {"logits": x, "cache": ((x, x), (x, x)), "loss": None},
            "nested": (x, (x, x)),
            "none": (x, None),
            "two": (x, x * 2),
            "number": 3,
            "no tensors": {"cache": (x, x)},
            "unresolved": torch.fft.fft(x).conj().imag,
        }[self.result]


def given(result: str = "mapping") -> Any:
    """A factory."""
    return Given(result)


def given_by(result: str, *outputs: str, output_indices: Sequence[int] = ()) -> backends.Session:
    declared = spec(X, *(TensorSpec(name, "FP32", (-1, -1)) for name in outputs))
    options = {"model": f"{__file__}:given", "factory_options": {"result": result}, "output_indices": output_indices}
    return backends.load("torch", options, declared).open_session(0)


@pytest.mark.parametrize(
    ("result", "outputs", "message"),
    [
        ("mapping", ("logits", "cache"), "output 'cache': expected a tensor, the module gave tuple: return a tensor for each"),
        ("nested", ("a", "b"), "output 'b': expected a tensor, the module gave tuple"),
        ("none", ("a", "b"), "output 'b': expected a tensor, the module gave NoneType"),
        ("number", ("a",), "output 'a': expected a tensor, the module gave int"),
        ("none", ("a",), "the module returned 2 results, the spec has 1 outputs"),
    ],
)
def test_a_result_that_is_no_tensor_is_named(result: str, outputs: tuple[str, ...], message: str) -> None:
    with pytest.raises(OutputsRefused, match=message):
        given_by(result, *outputs).run({"x": np.ones((1, 3), np.float32)}, {})


@pytest.mark.parametrize(
    ("outputs", "indices", "factors"),
    [
        (("y__1", "y__0"), [], (1, 2)),
        (("a__0", "b__0"), [], (1, 2)),
        (("a", "b"), [1, 0], (2, 1)),
        (("b",), [1], (2,)),
        (("a", "b"), [0, 0], (1, 1)),
    ],
)
def test_outputs_are_the_results_in_order_or_those_of_output_indices(
    outputs: tuple[str, ...], indices: list[int], factors: tuple[int, ...]
) -> None:
    found = given_by("two", *outputs, output_indices=indices).run({"x": np.ones((1, 3), np.float32)}, {})
    assert [(name, array[0, 0]) for name, array in found.items()] == list(zip(outputs, factors, strict=True))


def test_an_output_index_that_the_module_has_no_result_for_is_told() -> None:
    told = (
        r"^output 'b': expected result 2, counted from 0 \(`output_indices`; of a Triton repository the number in its name\), "
        r"the module returned 2: correct that number$"
    )
    with pytest.raises(OutputsRefused, match=told):
        given_by("two", "a", "b", output_indices=[0, 2]).run({"x": np.ones((1, 3), np.float32)}, {})
    with pytest.raises(backends.LoadFailed, match="output_indices: has 1, of 2 outputs: write one for each, in their order"):
        given_by("two", "a", "b", output_indices=[0])


def test_what_pytorch_is_still_to_negate_is_an_output() -> None:
    x = np.array([[1, 2, 4]], np.float32)
    found = given_by("unresolved", "y").run({"x": x}, {})["y"]
    np.testing.assert_allclose(found, -np.fft.fft(x).imag, rtol=1e-5, atol=1e-5)


def test_what_a_module_gives_beside_tensors_is_left_out_and_told() -> None:
    found = backends.read("torch", f"{__file__}:given", example={"x": np.ones((1, 3), np.float32)})
    assert [tensor.name for tensor in found.outputs] == ["logits"]
    assert found.notes[-1] == "what it gives beside tensors is left out: cache (tuple), loss (NoneType)"


@pytest.mark.parametrize(
    ("result", "message"),
    [("nested", "output 'output_1': .* gave tuple"), ("number", "output 'output': .* gave int"), ("no tensors", "'cache'")],
)
def test_a_model_that_gives_what_is_no_tensor_cannot_be_read(result: str, message: str) -> None:
    example = {"x": np.ones((1, 3), np.float32)}
    with pytest.raises(OutputsRefused, match=message):
        torch_discovery.read(model=f"{__file__}:given", example=example, factory_options={"result": result})


class Listed(torch.nn.Module):
    def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
        return xs[0]


class Defaulted(torch.nn.Module):
    def forward(
        self,
        x: torch.Tensor,
        scale: tuple[float, float] = (2.0, 1.0),
        sizes: tuple[int, int] = (4, 0),
    ) -> torch.Tensor:
        return x * scale[0] + sizes[0]


def faults_of(file: Path, *inputs: str, max_rows: int = 8, **options: Any) -> list[str]:
    """What `gateway check` finds."""
    declared = tuple(TensorSpec(name, "FP32", (-1, 4)) for name in inputs)
    options = backends.defaults("torch") | {"model": str(file)} | options
    wanted = Wanted("torch", options, here=True, thorough=True, inputs=declared, outputs=SPEC.outputs, max_rows=max_rows)
    return [f"{fault.found}, expected {fault.expected}: {fault.remedy}" for fault in checked(wanted)]


@pytest.mark.parametrize(
    ("module", "inputs", "told"),
    [
        (Listed, ("xs",), "input 'xs' is List[Tensor], expected a tensor: script a forward whose inputs are tensors"),
        (Listed, ("INPUT0",), "input 'xs' is List[Tensor], expected a tensor: script a forward whose inputs are tensors"),
        (Defaulted, ("x",), ""),
        (Defaulted, ("INPUT0",), ""),
        (Defaulted, ("x", "sizes"), "input 'sizes' is Tuple[int, int], expected a tensor: script a forward whose"),
        (Defaulted, ("a", "b"), "input 'scale' is Tuple[float, float], expected a tensor: script a forward whose"),
    ],
)
def test_a_scripted_module_that_takes_no_tensor_for_an_input_is_refused(
    module: Any, inputs: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    file = tmp_path / "m.pt"
    torch.jit.script(module()).save(file)
    declared = spec(tuple(TensorSpec(name, "FP32", (-1, 4)) for name in inputs), TensorSpec("y", "FP32", (-1, 4)))
    example = {name: np.ones((1, 4), np.float32) for name in inputs}
    if not told:
        assert backends.load("torch", {"model": str(file)}, declared).open_session(0).run(example, {})["y"].tolist() == [
            [6] * 4
        ]
        assert faults_of(file, *inputs) == []
        return
    with pytest.raises(LoadFailed, match=re.escape(f"m.pt: {told}")):
        backends.load("torch", {"model": str(file)}, declared)
    with pytest.raises(LoadFailed, match=re.escape(f"m.pt: {told}")):
        backends.read("torch", str(file), example=example)
    (fault,) = faults_of(file, *inputs)
    assert fault.startswith(told)


def test_a_scripted_module_is_read_without_what_has_a_default(tmp_path: Path) -> None:
    torch.jit.script(Defaulted()).save(tmp_path / "m.pt")
    found = backends.read("torch", str(tmp_path / "m.pt"), example={"x": np.ones((1, 4), np.float32)})
    assert [tensor.name for tensor in found.inputs] == ["x"]


@pytest.mark.slow
def test_a_program_whose_outputs_are_of_a_type_that_is_not_known_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one of a model of Transformers, whose outputs that library makes known to PyTorch."""

    @dataclass
    class Output:
        logits: Any

    class Answers(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return Output(x + 1)

    torch.export.register_dataclass(Output, serialized_type_name="test_torch.Output")
    torch.export.save(torch.export.export(Answers(), (torch.ones(2, 4),)), tmp_path / "m.pt2")
    monkeypatch.delitem(torch.utils._pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE, "test_torch.Output")
    with pytest.raises(LoadFailed, match=r"takes or returns a test_torch\.Output, which .* returns a tuple or dict of them"):
        backends.read("torch", f"{tmp_path}/m.pt2")
    assert [record.name for record in caplog.records if record.exc_info] == []


class Embedded(torch.nn.Module):
    """Token by token; or each with the mean of all in front, behind a layer norm."""

    def __init__(self, *, mixed: bool) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(9, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.mixed = mixed

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(ids)) * lengths.unsqueeze(1).unsqueeze(2) / lengths.log().isfinite().all()
        return x - x.mean(0) if self.mixed else x


@pytest.mark.parametrize("lengths", [[2, 1, 2], [1, 1, 1]])
@pytest.mark.parametrize("mixed", [False, True])
def test_rows_of_a_traced_file_that_change_each_other_are_seen(mixed: bool, lengths: list[int], tmp_path: Path) -> None:
    example = (torch.tensor([[1, 5], [7, 2], [3, 3]]), torch.tensor(lengths))
    torch.jit.trace(Embedded(mixed=mixed), example).save(tmp_path / "m.pt")
    found = backends.read("torch", str(tmp_path / "m.pt"))
    assert found.max_rows == (0 if mixed else 32)
    assert found.inputs[0].shape == (3 if mixed else -1, 2)
    given = {"ids": example[0].numpy(), "lengths": example[1].numpy()}
    assert backends.read("torch", str(tmp_path / "m.pt"), example=given).max_rows == found.max_rows


class Counted(torch.nn.Module):
    """Changes what it answers by, or only what nothing looks at."""

    def __init__(self, *, used: bool = True) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1))
        self.register_buffer("unset", torch.full((2,), torch.nan))
        self.used = used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.sum()
        return x + self.total if self.used else x + 1


@pytest.mark.parametrize("form", ["traced", pytest.param("exported", marks=pytest.mark.slow), "factory"])
@pytest.mark.parametrize("used", [True, False])
def test_a_module_that_changes_a_buffer_is_told_and_not_batched(form: str, used: bool, tmp_path: Path) -> None:
    x = torch.ones(2, 4)
    model, options = str(tmp_path / "m.pt"), {}
    if form == "traced":
        torch.jit.trace(Counted(used=used), (x,), check_trace=False).save(model)
    elif form == "exported":
        rows = torch.export.Dim("rows")
        torch.export.save(torch.export.export(Counted(used=used), (x,), dynamic_shapes=({0: rows},)), model + "2")
        model += "2"
    else:
        model, options = f"{__file__}:Counted", {"used": used}
    found = torch_discovery.read(model=model, example=None if form == "exported" else {"x": x.numpy()}, factory_options=options)
    assert (found.max_rows, found.notes[-1].partition(", so ")[0]) == (0, "its forward changes 'total'")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "max_rows", "note"),
    [
        ({"max": 5}, 5, "it was exported for 5 rows at most"),
        ({"min": 3, "max": 40}, 0, "it was exported for 3 to 40 rows, so each request runs alone"),
        ({"min": 2}, 0, "it was exported for 2 rows and more, so each request runs alone"),
    ],
)
def test_a_program_that_was_exported_for_some_numbers_of_rows_has_no_others(
    limits: dict[str, int], max_rows: int, note: str, tmp_path: Path
) -> None:
    program = torch.export.export(
        torch.nn.Linear(4, 3), (torch.ones(3, 4),), dynamic_shapes=({0: torch.export.Dim("b", **limits)},)
    )
    torch.export.save(program, tmp_path / "m.pt2")
    found = torch_discovery.read(model=f"{tmp_path}/m.pt2")
    assert (found.max_rows, found.notes) == (max_rows, (note,))
    if most := limits.get("max", 0):
        declared = ModelSpec("", found.inputs, found.outputs, 0)
        session = backends.load("torch", {"model": f"{tmp_path}/m.pt2"}, declared).open_session(0)
        with pytest.raises(InputRefused, match=rf"it was exported for inputs with \w+\.size\(\)\[0\] <= {most}"):
            session.run({found.inputs[0].name: np.ones((most + 1, 4), np.float32)}, {})
        fault = rf"m\.pt2: exported for {most} rows at most, and max_rows is 50: set max_rows: {most}, or"
        with pytest.raises(LoadFailed, match=fault):
            backends.load("torch", {"model": f"{tmp_path}/m.pt2"}, replace(declared, max_rows=50, rows_wanted=most + 1))
        for wanted in (0, most):
            served = replace(declared, max_rows=50, rows_wanted=wanted)
            assert backends.load("torch", {"model": f"{tmp_path}/m.pt2"}, served).spec.max_rows == most


@pytest.mark.slow
def test_a_result_of_a_program_that_is_no_tensor_is_named(tmp_path: Path) -> None:
    class Others(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None, int]:
            return x + 1, None, 3

    torch.export.save(torch.export.export(Others(), (torch.ones(2, 4),)), tmp_path / "m.pt2")
    with pytest.raises(LoadFailed, match=r"result 1 of `forward` is None: export a forward that returns tensors only"):
        torch_discovery.read(model=f"{tmp_path}/m.pt2")


class Holding(torch.nn.Module):
    """A buffer of a layout that `isclose` does not take; counts: its forward changes it."""

    def __init__(self, layout: str, *, counts: bool = False) -> None:
        super().__init__()
        self.layout, self.counts = layout, counts
        self.register_buffer("held", self.made_of(torch.eye(4)))

    def made_of(self, dense: torch.Tensor) -> torch.Tensor:
        if self.layout == "quantised":
            return torch.quantize_per_tensor(dense, 0.5, 0, torch.quint8)
        return {"coo": dense.to_sparse_coo, "csr": dense.to_sparse_csr, "bsr": lambda: dense.to_sparse_bsr((2, 2))}[
            self.layout
        ]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.counts:
            dense = self.held.dequantize() if self.layout == "quantised" else self.held.to_dense()
            self.held = self.made_of(dense + torch.eye(4))
        return x + 1


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # PyTorch's, of these layouts
@pytest.mark.parametrize("layout", ["coo", "csr", "bsr", "quantised"])
@pytest.mark.parametrize("counts", [False, True])
def test_buffers_of_every_layout_are_compared(layout: str, counts: bool) -> None:
    found = torch_discovery.read(
        model=f"{__file__}:Holding",
        example={"x": np.ones((1, 4), np.float32)},
        factory_options={"layout": layout, "counts": counts},
    )
    assert (found.max_rows, any("changes 'held'" in note for note in found.notes)) == ((0, True) if counts else (32, False))


class Writing(torch.nn.Module):
    """What it writes into its buffer when it is first run: a table, or what tells of that run's numbers.

    Of a table that is noted, it knows elsewhere that it is there.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what: str = what
        self.written = False
        self.inner = torch.nn.Module()
        self.inner.register_buffer("kept", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what == "largest" and self.inner.kept.numel() > 0:
            self.inner.kept = torch.maximum(self.inner.kept, x.max())
        if self.inner.kept.numel() == 0 and not (self.what == "noted" and self.written):
            self.inner.kept = x.max().reshape(1) if self.what in ("first", "largest") else torch.arange(4.0)
            self.written = True
        return x + self.inner.kept[-1]


@pytest.mark.parametrize(("what", "max_rows"), [("table", 32), ("noted", 32), ("first", 0), ("largest", 0)])
@pytest.mark.parametrize("scripted", [False, True])
def test_a_buffer_that_is_only_a_memo_is_no_state(what: str, max_rows: int, scripted: bool, tmp_path: Path) -> None:
    model, options = f"{__file__}:Writing", {"what": what}
    if scripted:
        model, options = str(tmp_path / "m.pt"), {}
        torch.jit.script(Writing(what)).save(model)
    found = torch_discovery.read(model=model, example={"x": np.ones((2, 4), np.float32)}, factory_options=options)
    assert (found.max_rows, any("changes 'inner.kept'" in note for note in found.notes)) == (max_rows, max_rows == 0)
