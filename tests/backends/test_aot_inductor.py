"""What an AOTInductor package was compiled for is what it takes: its code reads all else past its end, or as something else.

The packages have their source alone, which takes no compiler, and what runs in place of its code would take anything; the
contract and `test_builds` run real ones.
"""

import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import backends
from backends.aot_inductor import compiled_for
from backends.base import InputRefused, LoadFailed, ModelSpec, TensorSpec
from backends.check import checked
from backends.mistakes import Wanted
from backends.torch_unbounded import unbounded

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.slow


class Encoder(torch.nn.Module):
    """Of up to 12 tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(100, 8)
        self.register_buffer("positions", torch.ones(12, 8))

    def forward(self, ids: Any, mask: Any) -> Any:
        return (self.words(ids) + self.positions[: ids.shape[1]]) * mask[:, :, None]


class Less(torch.nn.Module):
    """`less` has one row less than `x`."""

    def forward(self, x: Any, less: Any) -> Any:
        return x[1:] + less


class Halves(torch.nn.Module):
    """Which a length of an odd number would be rounded down for, if the code were asked."""

    def forward(self, x: Any) -> Any:
        return x.view(x.shape[0], -1, 2).sum(2)


class Second(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x[:, 1] * 2


class Convolved(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: Any) -> Any:
        return self.layer(x).sum(2)


class Loaded:
    """In place of the code of a package."""

    def __init__(self, call: Callable[..., Any], device: str = "cpu") -> None:
        self._call, self._device = call, device

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def get_metadata(self) -> dict[str, str]:
        return {"AOTI_DEVICE_KEY": self._device}


def compiled(path: Path, module: Any, example: tuple[Any, ...], sizes: Any) -> Path:
    program = torch.export.export(module, example, dynamic_shapes=sizes)
    source = {"aot_inductor.package_cpp_only": True}
    torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=source)
    return path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 5 rows at most, and of as many tokens as it has positions, which PyTorch finds."""
    rows, auto = torch.export.Dim("rows", max=5), torch.export.Dim.AUTO
    example = (torch.ones(3, 7, dtype=torch.int64), torch.ones(3, 7))
    return compiled(tmp_path_factory.mktemp("encoder") / "encoder.pt2", Encoder(), example, ({0: rows, 1: auto},) * 2)


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    auto = torch.export.Dim.AUTO
    return compiled(tmp_path_factory.mktemp("halves") / "halves.pt2", Halves(), (torch.ones(3, 8),), ({0: auto, 1: auto},))


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """Has packages loaded as what is given."""

    def loads(call: Callable[..., Any], device: str = "cpu") -> None:
        monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path, device_index=-1: Loaded(call, device))

    return loads


def of_tokens(ids: str = "INT64", width: int = -1, max_rows: int = 0) -> ModelSpec:
    inputs = (TensorSpec("ids", ids, (-1, width)), TensorSpec("mask", "FP32", (-1, width)))
    return ModelSpec("", inputs, (TensorSpec("out", "FP32", (-1, -1, 8)),), max_rows)


def of(*names: str, shape: tuple[int, ...] = (-1, 4), max_rows: int = 0) -> ModelSpec:
    return ModelSpec("", tuple(TensorSpec(name, "FP32", shape) for name in names), (TensorSpec("y", "FP32", shape),), max_rows)


def refused(session: Any, **inputs: np.ndarray) -> str:
    with pytest.raises(InputRefused) as raised:
        session.run(inputs, {})
    return str(raised.value).removeprefix("it was exported for inputs with ")


def test_requests_that_a_package_was_not_compiled_for_are_refused(encoder: Path, loads: Any) -> None:
    loads(Encoder())
    model = backends.load("torch", {"model": str(encoder)}, of_tokens(max_rows=50))
    assert model.spec.max_rows == 5
    session = model.open_session(0)

    def sizes(ids: tuple[int, ...], mask: tuple[int, ...]) -> dict[str, np.ndarray]:
        return {"ids": np.ones(ids, np.int64), "mask": np.ones(mask, np.float32)}

    for rows, length in (1, 2), (5, 12):
        assert session.run(sizes((rows, length), (rows, length)), {})["out"].shape == (rows, length, 8)
    assert refused(session, **sizes((1, 1), (1, 1))) == "ids.size()[1] >= 2"
    assert refused(session, **sizes((6, 3), (6, 3))) == "ids.size()[0] <= 5"
    assert refused(session, **sizes((1, 13), (1, 13))) == "ids.size()[1] <= 12"
    assert refused(session, **sizes((1, 4), (1, 3))) == "mask.size()[1] == ids.size()[1]"
    assert refused(session, **sizes((1, 4, 1), (1, 4))) == "ids of INT64 [-1, -1]"
    assert refused(session, ids=np.ones((1, 4), np.int32), mask=np.ones((1, 4), np.float32)) == "ids of INT64 [-1, -1]"


def test_more_rows_than_a_package_was_compiled_for_are_refused_where_they_are_set(encoder: Path, loads: Any) -> None:
    loads(Encoder())
    with pytest.raises(LoadFailed, match=r"encoder\.pt2: exported for 5 rows at most, and max_rows is 50: set max_rows: 5, or"):
        backends.load("torch", {"model": str(encoder)}, replace(of_tokens(max_rows=50), rows_wanted=6))


def test_what_is_declared_otherwise_than_a_package_has_it_is_refused(encoder: Path, loads: Any) -> None:
    loads(Encoder())
    for declared, told in [
        (of_tokens("FP32"), "input 'ids': the model has INT64 [-1, -1], the configuration says FP32 [-1, -1]"),
        (replace(of_tokens(), inputs=of_tokens().inputs[:1]), "it has 2 inputs, 1 are listed"),
    ]:
        with pytest.raises(LoadFailed) as raised:
            backends.load("torch", {"model": str(encoder)}, declared)
        assert str(raised.value) == f"{encoder}: {told}"
        options = backends.defaults("torch") | {"model": str(encoder)}
        wanted = Wanted("torch", options, here=True, thorough=True, inputs=declared.inputs, outputs=declared.outputs)
        assert [mistake.at[0] for mistake in checked(wanted)] == ["inputs"]


def test_an_example_shows_the_rows_that_a_package_was_compiled_for(encoder: Path, loads: Any) -> None:
    loads(Encoder())
    ids, mask = np.arange(6).reshape(2, 3), np.ones((2, 3), np.float32)
    found = backends.read("torch", str(encoder), example={"ids": ids, "mask": mask})
    assert (found.max_rows, found.notes[-1]) == (5, "it was exported for 5 rows at most")
    assert backends.tried("torch", str(encoder), of_tokens(max_rows=8)).max_rows == 5
    with pytest.raises(
        LoadFailed, match=r"it fails on the example .*: it was exported for inputs with ids of INT64 \[-1, -1\]"
    ):
        backends.read("torch", str(encoder), example={"ids": ids.astype(np.int32), "mask": mask})


def test_sizes_that_depend_on_each_other_are_held_to_it(tmp_path: Path, loads: Any) -> None:
    auto, example = torch.export.Dim.AUTO, (torch.ones(4, 4), torch.ones(3, 4))
    model = compiled(tmp_path / "less.pt2", Less(), example, ({0: auto}, {0: auto}))
    loads(Less())
    session = backends.load("torch", {"model": str(model)}, of("x", "less")).open_session(0)
    x = np.ones((4, 4), np.float32)
    assert session.run({"x": x[:3], "less": x[:2]}, {})["y"].shape == (2, 4)
    assert refused(session, x=x, less=x) == "less.size()[0] == ((-1) + x.size()[0])"
    assert refused(session, x=x[:2], less=x[:1]) == "x.size()[0] >= 3"  # since these are no rows


def test_what_a_package_has_fixed_is_no_row(tmp_path: Path, loads: Any) -> None:
    model = compiled(tmp_path / "fixed.pt2", torch.nn.Linear(4, 4), (torch.ones(6, 4),), None)
    loads(torch.nn.Linear(4, 4))
    with pytest.raises(
        LoadFailed, match=r"fixed\.pt2: max_rows 8 needs a first dimension that is open .* 'x' has \[6, 4\]: ex"
    ):
        backends.load("torch", {"model": str(model)}, of("x", max_rows=8))
    session = backends.load("torch", {"model": str(model)}, of("x", shape=(-1, -1))).open_session(0)
    assert refused(session, x=np.ones((1, 4), np.float32)) == "x.size()[0] == 6"
    loads(torch.nn.Linear(4, 4), "cuda")
    with pytest.raises(LoadFailed, match=r"fixed\.pt2: compiled for device cuda, not cpu: set device: cuda"):
        backends.load("torch", {"model": str(model)}, of("x"))


def test_a_package_of_which_this_cannot_be_known_is_refused(tmp_path: Path, loads: Any) -> None:
    loads(torch.nn.Linear(4, 4))
    turned = compiled(tmp_path / "turned.pt2", torch.nn.ReLU(), (torch.ones(4, 3).T,), ({0: torch.export.Dim.AUTO},))
    with pytest.raises(LoadFailed, match=r"turned\.pt2: compiled for an input 'x' whose numbers lie in another order"):
        backends.load("torch", {"model": str(turned)}, of("x"))
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        without = compiled(tmp_path / "without.pt2", torch.nn.ReLU(), (torch.ones(3, 4),), ({0: torch.export.Dim.AUTO},))
    with pytest.raises(
        LoadFailed, match=r"without\.pt2: compiled for open sizes of 'x' without their bounds, past which it may"
    ):
        backends.load("torch", {"model": str(without)}, of("x"))
    with zipfile.ZipFile(tmp_path / "bare.pt2", "w") as archive:
        archive.writestr("bare/data/aotinductor/model/x.wrapper.so", b"")
    with pytest.raises(LoadFailed, match=r"bare\.pt2: an AOTInductor package that does not say what it was compiled for, as"):
        backends.load("torch", {"model": str(tmp_path / "bare.pt2")}, of("x"))


def test_a_bound_that_compiling_has_found_is_told(
    encoder: Path, loads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads(Encoder())

    def package(program: Any, package_path: str) -> None:
        Path(package_path).write_bytes(encoder.read_bytes())

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", package)
    told = backends.build("torch", tmp_path / "m.pt2", of_tokens(max_rows=5), source=f"{__file__}:Encoder", options={})
    bounds = ", ".join(f"{name}.size()[{bound}" for name in ("ids", "mask") for bound in ("0] <= 5", "1] <= 12"))
    assert told.endswith(f"max abs difference 0.0e+00, only for inputs with {bounds}")
    session = backends.load("torch", {"model": str(tmp_path / "m.pt2")}, of_tokens(max_rows=5)).open_session(0)
    token = np.ones((1, 1), np.int64), np.ones((1, 1), np.float32)
    assert session.run({"ids": token[0], "mask": token[1]}, {})["out"].shape == (1, 1, 8)  # compared with the module
    assert refused(session, ids=token[0][:, :0], mask=token[1][:, :0]) == "ids.size()[1] >= 1"


def test_a_length_that_a_module_does_not_take_is_not_verified(
    halves: Path, loads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads(Second())

    def package(program: Any, package_path: str) -> None:
        Path(package_path).write_bytes(halves.read_bytes())

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", package)
    second = ModelSpec("", (TensorSpec("x", "FP32", (-1, -1)),), (TensorSpec("y", "FP32", (-1,)),), 8)
    told = backends.build("torch", tmp_path / "m.pt2", second, source=f"{__file__}:Second", options={})
    assert told.endswith(", only for inputs with x.size()[1] >= 2")
    session = backends.load("torch", {"model": str(tmp_path / "m.pt2")}, second).open_session(0)
    assert refused(session, x=np.ones((2, 1), np.float32)) == "x.size()[1] >= 2"


def test_rows_whose_length_is_no_multiple_of_what_divides_it_run_alone(halves: Path, loads: Any) -> None:
    shapes: list[tuple[int, ...]] = []

    def run(x: Any) -> list[Any]:
        shapes.append(tuple(x.shape))
        return [x * 2]

    loads(run)
    session = backends.load("torch", {"model": str(halves)}, of("x", shape=(-1, -1), max_rows=8)).open_session(0)
    for length in 4, 5:
        x = np.arange(3 * length, dtype=np.float32).reshape(3, length)
        assert np.array_equal(session.run({"x": x}, {})["y"], x * 2)
    assert shapes == [(3, 4), *[(1, 5)] * 3]


def test_what_compiling_chooses_by_sizes_sets_no_bound(tmp_path: Path, loads: Any) -> None:
    auto, example = torch.export.Dim.AUTO, (torch.ones(3, 4, 7),)
    elsewhere = compiled_for(compiled(tmp_path / "elsewhere.pt2", Convolved(), example, ({0: auto, 2: auto},)))
    with unbounded():
        here = compiled_for(compiled(tmp_path / "here.pt2", Convolved(), example, ({0: auto, 2: auto},)))
    assert elsewhere
    assert elsewhere.bounds(["x"], True) == ["x.size()[2] >= 2", "x.size()[2] <= 4096"]
    assert here
    assert here.bounds(["x"], True) == ["x.size()[2] >= 2"]


def test_a_package_for_channels_last_gets_its_numbers_so(tmp_path: Path, loads: Any) -> None:
    example = torch.ones(5, 2, 4, 5).to(memory_format=torch.channels_last)
    model = compiled(tmp_path / "m.pt2", torch.nn.ReLU(), (example,), ({0: torch.export.Dim("rows", min=4)},))
    order: list[bool] = []

    def run(x: Any) -> Any:
        order.append(x.is_contiguous(memory_format=torch.channels_last))
        return x

    loads(run)
    image = of("x", shape=(-1, 2, 4, 5))
    session = backends.load("torch", {"model": str(model)}, image).open_session(0)
    x = np.arange(160, dtype=np.float32).reshape(4, 2, 4, 5)
    assert np.array_equal(session.run({"x": x}, {})["y"], x)
    assert order == [True]
    with pytest.raises(
        LoadFailed, match=r"m\.pt2: exported for 4 rows at least, and max_rows is 8, where one may come alone: set"
    ):
        backends.load("torch", {"model": str(model)}, replace(image, max_rows=8))
