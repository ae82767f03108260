"""What is built of a factory's module: it computes what `kind: torch` computes of it, or is refused."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import backends
from backends.base import BackendError, ExecutionFailed, LoadFailed, ModelSpec, TensorSpec
from backends.likeness import Likeness
from backends.torch_tensors import exported_for

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed: pip install 'serving-gateway[onnx]'")


def spec(inputs: str, outputs: str, *, datatype: str = "FP32") -> ModelSpec:
    """Of rows of four numbers, max_rows 4."""
    found, given = (tuple(TensorSpec(name, datatype, (-1, 4)) for name in names.split()) for names in (inputs, outputs))
    return ModelSpec("", found, given, 4)


def built(kind: str, artifact: Path, declared: ModelSpec, factory: str, **how: Any) -> str:
    where = {"row_sizes": (4,), "target": "inf2"} if kind == "neuron" else {}
    return backends.build(kind, artifact, declared, source=f"{__file__}:{factory}", options={}, **where, **how)


def answers(kind: str, artifact: Path, declared: ModelSpec, **inputs: float | np.ndarray) -> dict[str, float]:
    """The first number of each output, of rows that are full of these numbers; an array goes as it is."""
    session = backends.load(kind, {"model": str(artifact)}, declared).open_session(0)
    arrays = {
        name: value if isinstance(value, np.ndarray) else np.full((4, 4), value, np.float32) for name, value in inputs.items()
    }
    outputs = session.run(arrays, {})
    return {name: float(array[0, 0]) for name, array in outputs.items()}


def optional_between() -> Any:
    """A factory: x + bias, or 10 · scale · x where there is a scale."""

    class Scaled(torch.nn.Module):
        def forward(self, x: Any, scale: Any = None, bias: Any = None) -> Any:
            x = x if scale is None else x * 10 * scale
            return x if bias is None else x + bias

    return Scaled()


def named() -> Any:
    """A factory of a module that gives its outputs by name, in another order than the configuration's."""

    class Named(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return {"more": x + 2, "less": x - 2}

    return Named()


ARTIFACTS = [("onnxruntime", "m.onnx"), ("neuron", "m"), ("torch", "m.pt2")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), ARTIFACTS)
def test_inputs_and_outputs_go_by_name_past_an_optional_one(kind: str, name: str, tmp_path: Path, neuron_double: Path) -> None:
    declared = spec("x bias", "y")
    built(kind, tmp_path / name, declared, "optional_between")
    assert answers(kind, tmp_path / name, declared, x=1, bias=5) == {"y": 6}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), ARTIFACTS)
def test_outputs_that_a_module_names_are_built_by_their_names(
    kind: str, name: str, tmp_path: Path, neuron_double: Path
) -> None:
    declared = spec("x", "less more")
    built(kind, tmp_path / name, declared, "named")
    assert answers(kind, tmp_path / name, declared, x=1) == {"less": -1, "more": 3}


def repeated() -> Any:
    """A factory: x · times, which is one integer."""

    class Repeated(torch.nn.Module):
        def forward(self, x: Any, times: Any) -> Any:
            return x * times

    return Repeated()


@pytest.mark.slow
def test_an_integer_without_a_dimension_is_an_input_of_what_is_built(tmp_path: Path) -> None:
    times = TensorSpec("times", "INT64", ())
    declared = ModelSpec("", (TensorSpec("x", "FP32", (-1, 4)), times), (TensorSpec("y", "FP32", (-1, 4)),), 0)
    built("onnxruntime", tmp_path / "m.onnx", declared, "repeated")
    assert answers("onnxruntime", tmp_path / "m.onnx", declared, x=2, times=np.array(3)) == {"y": 6}


def counting() -> Any:
    """A factory of a module that counts its runs."""

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("runs", torch.zeros(1))

        def forward(self, x: Any) -> Any:
            self.runs += 1
            return x * 2

    return Counting()


def in_place() -> Any:
    """A factory: (x - 0.5) · 4 where x is, and 1 more."""

    class Normalised(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            x -= 0.5
            x *= 4
            return x + 1

    return Normalised()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), ARTIFACTS)
@pytest.mark.parametrize(("factory", "y"), [("counting", 2), ("in_place", 3)])
def test_what_a_module_changes_in_forward_does_not_keep_it_from_being_built(
    kind: str, name: str, factory: str, y: float, tmp_path: Path, neuron_double: Path
) -> None:
    declared = spec("x", "y")
    built(kind, tmp_path / name, declared, factory)
    assert answers(kind, tmp_path / name, declared, x=1) == {"y": y}


@pytest.mark.parametrize(("kind", "name"), ARTIFACTS)
def test_what_a_module_does_not_give_is_told_before_it_is_exported(
    kind: str, name: str, tmp_path: Path, neuron_double: Path
) -> None:
    for declared, message in [
        (spec("x", "less other"), r"without the outputs \['other'\]"),
        (spec("", "y"), "an export needs the model's `inputs` and `outputs` stated"),
        (spec("x", "y", datatype="BYTES"), "PyTorch has no strings, but 'x' is BYTES"),
    ]:
        with pytest.raises(LoadFailed, match=message):
            built(kind, tmp_path / name, declared, "named")
    assert list(tmp_path.iterdir()) == []


def recurrent() -> Any:
    class Recurrent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.GRU(4, 4, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.layer(x)[0]

    return Recurrent()


def branching() -> Any:
    class Branching(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2 if x.sum() > 0 else x * 3

    return Branching()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what an export assigns
def test_a_size_that_an_export_has_kept_is_told(tmp_path: Path) -> None:
    open_length = ModelSpec("", *((TensorSpec(name, "FP32", (-1, -1, 4)),) for name in "xy"), 4)
    told = r":recurrent fails on x \[\d, 5, 4\], where that does not: it was exported for inputs with x\.size\(\)\[1\] == 7; it"
    with pytest.raises(LoadFailed, match=told):
        built("torch", tmp_path / "m.pt2", open_length, "recurrent")


class Failing:
    def __init__(self, error: BackendError) -> None:
        self._error = error

    def run(self, inputs: Any, parameters: Any) -> Any:
        raise self._error

    def close(self) -> None:
        pass


def test_an_artifact_that_fails_where_its_module_runs_is_told_with_the_shapes(tmp_path: Path) -> None:
    from backends.module_to_build import module_to_build

    declared = spec("x", "more less")
    module = module_to_build(tmp_path / "m", declared, f"{__file__}:named", {}, rows=3, length=7)
    told = r"m: the export of .*:named fails on x \[2, 4\], where that does not: no such size; it seems to have kept"
    with pytest.raises(LoadFailed, match=told):
        module.compare(
            Failing(ExecutionFailed("no such size. It says more")),
            {"x": np.ones((2, 4), np.float32)},
            Likeness(("more", "less")),
        )
    told = r"fails on x \[2, 4\], .* with x\.size\(\)\[1\] <= 3; PyTorch found this bound: set `max_rows`"
    with pytest.raises(LoadFailed, match=told):
        module.compare(
            Failing(exported_for("x.size()[1] <= 3")), {"x": np.ones((2, 4), np.float32)}, Likeness(("more", "less"))
        )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("onnxruntime", "m.onnx"), ("torch", "m.pt2")])
def test_what_cannot_be_exported_is_told_in_one_line(
    kind: str, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LoadFailed) as raised:
        built(kind, tmp_path / name, spec("x", "y"), "branching")
    assert re.search(r"cannot export .*:branching \(test_builds\.py:\d+\): .*; where `forward` branches on", str(raised.value))
    assert "\n" not in str(raised.value)
    assert "def forward" not in "".join(capfd.readouterr())


def test_bf16_is_refused_for_onnx_before_it_is_exported(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="ONNX Runtime does not pass BF16, which 'x' is"):
        built("onnxruntime", tmp_path / "m.onnx", spec("x", "more less", datatype="BF16"), "named")


def beyond_within() -> Any:
    """A factory: fp16 holds what comes out, not what is between."""

    class Squared(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x, (x * 400) * (x * 400) / 1000

    return Squared()


def beyond_at_the_end() -> Any:
    """A factory of a module with a constant that fp16 does not hold."""

    class Scaled(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x, x * 1e6

    return Scaled()


def undefined() -> Any:
    """A factory: the logarithm, NaN of numbers below 0; and nothing but 0."""

    class Logarithm(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.log(x), x * 0

    return Logarithm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("beyond_at_the_end", "fp16 changes output 'z' of .* by 0.93 of its length, more than 0.05"),
        ("beyond_within", "fp16 gives NaN or infinity in output 'z' where .* gives none"),
    ],
)
def test_what_fp16_cannot_hold_is_not_put_in_place(factory: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=message):
        built("onnxruntime", tmp_path / "m.onnx", spec("x", "y z"), factory, precision="fp16")
    assert list(tmp_path.iterdir()) == []


def resized_beyond_within() -> Any:
    """A factory, of a network for images."""

    class Resized(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            x = torch.nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear")
            return (x * 400) * (x * 400) / 1000

    return Resized()


@pytest.mark.slow
def test_what_fp16_cannot_hold_within_is_seen_also_where_an_image_is_resized(tmp_path: Path) -> None:
    declared = ModelSpec("", (TensorSpec("x", "FP32", (-1, 3, 8, 8)),), (TensorSpec("y", "FP32", (-1, 3, 16, 16)),), 4)
    with pytest.raises(LoadFailed, match=r"fp16 gives NaN or infinity in output 'y' where .* gives none"):
        built("onnxruntime", tmp_path / "m.onnx", declared, "resized_beyond_within", precision="fp16")


@pytest.mark.slow
def test_nan_and_zeros_that_the_module_gives_as_well_do_not_keep_fp16_away(tmp_path: Path) -> None:
    assert "fp16 from" in built("onnxruntime", tmp_path / "m.onnx", spec("x", "y z"), "undefined", precision="fp16")


@pytest.mark.parametrize(
    ("want", "got", "difference", "relative", "cosine"),
    [
        ([3, 4], [6, 8], 4, 1.0, 1.0),
        ([np.nan, 4], [np.nan, 4], 0, 0.0, 1.0),
        ([np.nan, 4], [3, 4], np.inf, np.inf, 1.0),
        ([3, 4], [np.nan, 4], np.inf, np.inf, 1.0),
        ([np.inf, 4], [-np.inf, 4], np.inf, np.inf, 1.0),
        ([0, 0], [0, 0], 0, 0.0, 1.0),
        ([0, 0], [0, 1], 1, 1.0, 0.0),
        ([], [], 0, 0.0, 1.0),
    ],
)
def test_likeness_sees_scale_and_what_is_no_number(
    want: list[float], got: list[float], difference: float, relative: float, cosine: float
) -> None:
    like = Likeness(["y"])
    like.add("y", np.array(want), np.array(got))
    assert (like.difference, like.relative, like.cosine) == (difference, (relative, "y"), cosine)


@pytest.mark.parametrize(("kind", "name"), ARTIFACTS)
def test_an_optional_input_is_not_built_into_what_takes_all(kind: str, name: str, tmp_path: Path, neuron_double: Path) -> None:
    x, bias = spec("x bias", "y").inputs
    declared = ModelSpec("", (x, replace(bias, optional=True)), spec("x", "y").outputs, 4)
    with pytest.raises(LoadFailed, match="input 'bias' is optional, but the file takes it in every request"):
        built(kind, tmp_path / name, declared, "optional_between")


def test_neuron_refuses_an_open_dimension_that_is_not_padded(tmp_path: Path, neuron_double: Path) -> None:
    declared = ModelSpec("", (TensorSpec("x", "FP32", (-1, 3, -1)),), spec("x", "y").outputs, 4)
    with pytest.raises(LoadFailed, match=r"input 'x' is open behind its second dimension, \[-1, 3, -1\]"):
        built("neuron", tmp_path / "m", declared, "named", lengths=(4, 8))
