"""What an AOTInductor package was compiled for is what it takes: its code reads all else past its end, or as something else.

The packages have their source alone, which takes no compiler, and what runs in place of its code would take anything; the
contract and `test_builds` run real ones.
"""

import functools
import json
import logging
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import backends
from backends.aot_inductor import compiled_for, write_sizes
from backends.base import ExecutionFailed, InputRefused, LoadFailed, ModelSpec, TensorSpec
from backends.check import checked
from backends.mistakes import Wanted
from backends.size_expressions import keeps_few_out
from backends.torch_choices import own_choices
from backends.torch_guards import guards

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


class Turned(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x.transpose(1, 2).contiguous()


class Related(torch.nn.Module):
    """Of whose inputs each needs a size that goes with another."""

    def forward(self, x: Any, y: Any) -> Any:
        return x[:, : y.shape[1]] + y


class Attended(torch.nn.Module):
    """Of whose conditions some know the rows of each input as sizes of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = torch.nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Any, y: Any) -> Any:
        of_x, of_y = (each.unsqueeze(2).expand(-1, -1, 32) for each in (x, y))
        return self.attention(of_x, of_y, of_y, need_weights=False)[0].sum(2)


class Fours(torch.nn.Module):
    """Of which no bound says that a length and one more is a multiple of 4."""

    def forward(self, x: Any) -> Any:
        return torch.cat([x, x[:, :1]], 1).view(x.shape[0], -1, 4).sum(2)


class Masked(torch.nn.Module):
    """Of up to 32, where PyTorch keeps 32 apart: then nothing is cut off."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(32, 32)))

    def forward(self, x: Any) -> Any:
        length = x.shape[1]
        return (x[:, :, None] * self.mask[:length, :length]).sum(2)


class Padded(torch.nn.Module):
    """To a multiple of 4, of which PyTorch keeps one row apart."""

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.pad(x, (0, -x.shape[1] % 4)).view(x.shape[0], -1, 4).sum(2)


class Subsampled(torch.nn.Module):
    """Of which PyTorch keeps a result of 1 apart, and with it lengths below 17."""

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.avg_pool1d(x[:, None], 1, stride=16).mean(2)


class First(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x[:, 0] * 2


class Chosen(torch.nn.Module):
    """Which takes another way for shorter ones."""

    def forward(self, x: Any) -> Any:
        return x[:, 0] * 2 if x.shape[1] >= 4 else x[:, 0] + x[:, 0]


class Sevens(torch.nn.Module):
    """Which takes another way for each seventh length, that gives the same for the first of them."""

    def forward(self, x: Any) -> Any:
        return x.view(x.shape[0], 7, -1).sum(2) if x.shape[1] % 7 == 0 else x[:, :7]


class Filled(torch.nn.Module):
    """To a multiple of 4, by a way that PyTorch takes for none of 4 itself."""

    def forward(self, x: Any) -> Any:
        return self.fill(x) if x.shape[1] % 4 else x.view(x.shape[0], -1, 4).sum(1)

    def fill(self, x: Any) -> Any:
        return torch.nn.functional.pad(x, (0, 4 - x.shape[1] % 4)).view(x.shape[0], -1, 4).sum(1)


class Second(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x[:, 1] * 2


class Convolved(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: Any) -> Any:
        return self.layer(x).sum(2)


class Wide(torch.nn.Module):
    """Of which two rows are work for two threads."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(10, 8192)

    def forward(self, ids: Any) -> Any:
        return self.words(ids) + 1


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


@pytest.fixture(scope="module")
def related(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As it is made elsewhere."""
    rows, auto, example = torch.export.Dim("rows"), torch.export.Dim.AUTO, (torch.ones(3, 9), torch.ones(3, 5))
    return compiled(tmp_path_factory.mktemp("related") / "related.pt2", Related(), example, ({0: rows, 1: auto},) * 2)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has packages built without compiling their source."""
    package, source = torch._inductor.aoti_compile_and_package, {"aot_inductor.package_cpp_only": True}
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", functools.partial(package, inductor_configs=source))


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


def test_what_is_raised_in_a_package_is_told_without_where(encoder: Path, loads: Any) -> None:
    def run(*_: Any) -> None:
        raise RuntimeError("index out of bounds: 0 <= tmp2 < 100L\nException raised from k at k.cpp:25\nframe #0: f (0x7f)\n")

    loads(run)
    session = backends.load("torch", {"model": str(encoder)}, of_tokens(max_rows=5)).open_session(0)
    with pytest.raises(ExecutionFailed) as raised:
        session.run({"ids": np.ones((1, 2), np.int64), "mask": np.ones((1, 2), np.float32)}, {})
    assert str(raised.value) == "RuntimeError: index out of bounds: 0 <= tmp2 < 100L"


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


def test_sizes_that_go_together_otherwise_are_refused(related: Path, loads: Any, tmp_path: Path) -> None:
    shutil.copy(related, tmp_path / "m.pt2")
    write_sizes(tmp_path / "m.pt2", {}, ["s1_1 <= s0_1"])
    loads(Related())
    session = backends.load("torch", {"model": str(tmp_path / "m.pt2")}, of("x", "y", shape=(-1, -1), max_rows=8)).open_session(
        0
    )
    x = np.ones((2, 9), np.float32)
    assert session.run({"x": x, "y": x[:, :5]}, {})["y"].shape == (2, 5)
    assert refused(session, x=x[:, :5], y=x) == "y.size()[1] <= x.size()[1]: y.size()[1] is 9, x.size()[1] is 5"


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


def test_a_bound_that_compiling_has_found_is_told(builds: None, loads: Any, tmp_path: Path) -> None:
    loads(Encoder())
    told = backends.build("torch", tmp_path / "m.pt2", of_tokens(max_rows=5), source=f"{__file__}:Encoder", options={})
    bounds = "ids.size()[1] <= 12, mask.size()[1] <= 12"
    assert told.endswith(f"max abs difference 0.0e+00, only for inputs with {bounds}")
    session = backends.load("torch", {"model": str(tmp_path / "m.pt2")}, of_tokens(max_rows=5)).open_session(0)
    token = np.ones((1, 1), np.int64), np.ones((1, 1), np.float32)
    assert session.run({"ids": token[0], "mask": token[1]}, {})["out"].shape == (1, 1, 8)  # compared with the module
    assert refused(session, ids=token[0][:, :0], mask=token[1][:, :0]) == "ids.size()[1] >= 1"


@pytest.mark.parametrize(
    ("source", "code", "least"),
    [
        ("Second", Second(), 2),  # the module does not take 1
        ("First", lambda x: [x[:, 0] * 2 if x.shape[1] > 1 else x[:, 0] * 0 + 2], 2),  # what it gives is right of ones
        ("Chosen", Chosen(), 4),  # of a bound that is the module's own
    ],
)
def test_a_length_that_need_not_be_right_is_not_verified(
    source: str, code: Any, least: int, builds: None, loads: Any, tmp_path: Path
) -> None:
    loads(code)
    second = ModelSpec("", (TensorSpec("x", "FP32", (-1, -1)),), (TensorSpec("y", "FP32", (-1,)),), 8)
    told = backends.build("torch", tmp_path / "m.pt2", second, source=f"{__file__}:{source}", options={})
    assert told.endswith(f", only for inputs with x.size()[1] >= {least}")
    session = backends.load("torch", {"model": str(tmp_path / "m.pt2")}, second).open_session(0)
    assert refused(session, x=np.ones((2, least - 1), np.float32)) == f"x.size()[1] >= {least}"


def test_a_package_that_is_built_says_how_its_sizes_go_together(builds: None, loads: Any, tmp_path: Path) -> None:
    loads(Fours())
    declared, model = of("x", shape=(-1, -1), max_rows=8), tmp_path / "m.pt2"
    told = backends.build("torch", model, declared, source=f"{__file__}:Fours", options={})
    session = backends.load("torch", {"model": str(model)}, declared).open_session(0)
    for length in 3, 11:  # of 3, the module makes a 1, which PyTorch keeps apart; it was compared
        assert session.run({"x": np.ones((2, length), np.float32)}, {})["y"].shape == (2, (length + 1) // 4)
    condition = "((x.size()[0]*(1 + x.size()[1])) % (4*x.size()[0])) == 0"
    assert refused(session, x=np.ones((2, 9), np.float32)) == f"{condition}: x.size()[0] is 1, x.size()[1] is 9"
    assert told.endswith(f", only for inputs with x.size()[1] >= 2, {condition}")


@pytest.mark.parametrize(
    ("source", "code", "lengths", "only"),
    [
        ("Masked", Masked(), (1, 31, 32), ", only for inputs with x.size()[1] <= 32"),
        ("Padded", Padded(), (1, 4, 5, 16), ""),
        ("Subsampled", Subsampled(), (1, 12, 16, 17, 200), ""),
        ("Filled", Filled().fill, (1, 4, 5, 16), ""),
    ],
)
def test_a_size_that_compiling_keeps_apart_is_taken_where_it_is_right(
    source: str, code: Any, lengths: tuple[int, ...], only: str, builds: None, loads: Any, tmp_path: Path
) -> None:
    loads(code)
    declared = ModelSpec("", of("x", shape=(-1, -1)).inputs, (TensorSpec("y", "FP32", (-1, -1)),), 8)
    told = backends.build("torch", tmp_path / "m.pt2", declared, source=f"{__file__}:{source}", options={})
    assert told.endswith(f"max abs difference 0.0e+00{only}")
    session = backends.load("torch", {"model": str(tmp_path / "m.pt2")}, declared).open_session(0)
    for length in lengths:
        for rows in 1, 2:
            assert session.run({"x": np.ones((rows, length), np.float32)}, {})["y"].shape[0] == rows


def test_sizes_that_need_not_be_equal_are_exported_so(builds: None, loads: Any, tmp_path: Path) -> None:
    loads(Related())
    declared = of("x", "y", shape=(-1, -1), max_rows=8)
    told = backends.build("torch", tmp_path / "m.pt2", declared, source=f"{__file__}:Related", options={})
    assert told.endswith(", only for inputs with y.size()[1] <= x.size()[1]")


def test_a_way_for_each_so_many_sizes_is_held_to_more_than_the_first(builds: None, loads: Any, tmp_path: Path) -> None:
    loads(lambda x: [x[:, :7]])
    declared = ModelSpec("", of("x", shape=(-1, -1)).inputs, (TensorSpec("y", "FP32", (-1, -1)),), 8)
    told = backends.build("torch", tmp_path / "m.pt2", declared, source=f"{__file__}:Sevens", options={})
    assert told.endswith(", only for inputs with x.size()[1] >= 7, (x.size()[1] % 7) != 0")


def test_one_of_what_is_attended_to_is_taken(builds: None, loads: Any, tmp_path: Path) -> None:
    code = Attended().eval()
    loads(code)
    declared = of("x", "y", shape=(-1, -1), max_rows=8)
    told = backends.build("torch", tmp_path / "m.pt2", declared, source=f"{__file__}:Attended", options={})
    assert "only for inputs" not in told
    session = backends.load("torch", {"model": str(tmp_path / "m.pt2")}, declared).open_session(0)
    for rows, length, attended in ((1, 1, 1), (1, 7, 1), (3, 7, 1), (2, 1, 13), (8, 5, 5)):
        x, y = (np.linspace(0, 1, rows * each, dtype=np.float32).reshape(rows, each) for each in (length, attended))
        with torch.no_grad():
            expected = code(torch.from_numpy(x), torch.from_numpy(y)).numpy()
        np.testing.assert_allclose(session.run({"x": x, "y": y}, {})["y"], expected, atol=1e-5)


def test_sizes_that_are_equal_in_each_request_are_judged_so() -> None:
    apart = "32*s0_0 < 32*s1_1*s1_0"
    assert keeps_few_out(apart, frozenset(("s0_0", "s1_0")))
    assert not keeps_few_out(apart)
    assert not keeps_few_out("s1_1 < s0_1", frozenset(("s0_0", "s1_0")))


def test_a_condition_that_is_not_known_is_refused_as_a_package_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    auto = torch.export.Dim.AUTO
    program = torch.export.export(Fours(), (torch.ones(3, 7),), dynamic_shapes=({0: auto, 1: auto},))
    monkeypatch.setattr("backends.size_expressions._CALLS", {})  # as of a PyTorch that calls another function
    with pytest.raises(LoadFailed, match=r"m\.pt2: PyTorch makes a condition of sizes that is not known here, .*: Eq\(Max\(1"):
        guards("m.pt2", program)


def test_open_sizes_that_need_not_go_together_are_warned_of(
    related: Path, encoder: Path, loads: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loads(Related())
    declared, options = of("x", "y", shape=(-1, -1), max_rows=8), backends.defaults("torch") | {"model": str(related)}
    wanted = Wanted(
        "torch", options, here=True, thorough=True, inputs=declared.inputs, outputs=declared.outputs, max_rows=declared.max_rows
    )
    warned = (
        "related.pt2: an AOTInductor package that does not say how its open sizes go together (x.size()[1], y.size()[1]): a re"
    )
    backends.load("torch", {"model": str(related)}, declared)
    assert checked(wanted) == []
    loads(Encoder())
    backends.load("torch", {"model": str(encoder)}, of_tokens(max_rows=5))  # of one length
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [warned in each for each in told] == [True, True]


def test_what_ends_the_process_is_warned_of_and_built_without(
    tmp_path: Path, loads: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows, example = torch.export.Dim("rows"), (torch.ones(4, 3, dtype=torch.int64),)
    with torch._inductor.config.patch({"cpp.threads": 2}):
        elsewhere = compiled(tmp_path / "elsewhere.pt2", Wide(), example, ({0: rows},))
        with own_choices():
            here = compiled(tmp_path / "here.pt2", Wide(), example, ({0: rows},))
    loads(Wide())
    declared = ModelSpec("", (TensorSpec("ids", "INT64", (-1, 3)),), (TensorSpec("y", "FP32", (-1, 3, 8192)),), 8)
    for model in elsewhere, here:
        backends.load("torch", {"model": str(model)}, declared)
    [told] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "elsewhere.pt2: an AOTInductor package that checks an index on several threads: a request with one out of" in told


def test_rows_that_do_not_go_together_run_alone(halves: Path, loads: Any, tmp_path: Path) -> None:
    shapes: list[tuple[int, ...]] = []

    def run(x: Any) -> list[Any]:
        shapes.append(tuple(x.shape))
        return [x * 2]

    loads(run)
    shutil.copy(halves, tmp_path / "m.pt2")
    floats = "not (math.trunc(0.5*torch.sym_float(s0_1)) != 2 and s0_1 == 7)"  # as of an interpolation
    write_sizes(tmp_path / "m.pt2", {}, ["s0_0*s0_1 < 12", "9 % (s0_1 - 6) < 9", floats])
    session = backends.load("torch", {"model": str(tmp_path / "m.pt2")}, of("x", shape=(-1, -1), max_rows=8)).open_session(0)
    for rows, length in (2, 5), (3, 5), (3, 4):
        x = np.arange(rows * length, dtype=np.float32).reshape(rows, length)
        assert np.array_equal(session.run({"x": x}, {})["y"], x * 2)
    assert shapes == [(2, 5), *[(1, 5)] * 3, *[(1, 4)] * 3]
    assert refused(session, x=np.ones((1, 13), np.float32)) == (
        "x.size()[0]*x.size()[1] < 12: x.size()[0] is 1, x.size()[1] is 13"
    )
    assert refused(session, x=np.ones((3, 6), np.float32)) == "9 % (x.size()[1] - 6) < 9: x.size()[1] is 6"
    assert refused(session, x=np.ones((1, 7), np.float32)).endswith(": x.size()[1] is 7")


@pytest.mark.parametrize(
    "guard",
    ["__import__('os').getpid() > 0", "s0_0.real > 0", "s0_0 ** s0_1 > 0", "s9_9 > 0", "max(*[s0_0]) > 0", "1e999 > s0_0",
     "'a' * s0_0 > 0", "s0_0 > 0 > s0_1", "(lambda: 1)() > 0", "-" * 3990 + "s0_0", "s0_0" + "+s0_0" * 500, "(" * 300, "",
     "max(s0_0) > 0", "math.floor(s0_0, 2) > 0"],
)  # fmt: skip
def test_a_package_of_other_conditions_than_of_sizes_is_not_read(guard: str, halves: Path, tmp_path: Path) -> None:
    shutil.copy(halves, tmp_path / "m.pt2")
    write_sizes(tmp_path / "m.pt2", {}, [guard])
    assert compiled_for(tmp_path / "m.pt2") is None


@pytest.mark.parametrize(
    ("verified", "guards"),
    [([[0, 1, "abc"]], []), ([[0, 1, [-1]]], []), ([[0, 1, 5]], []), ([], "s0_1 > 1"), ([], [5]), ([], [" " * (1 << 23)])],
)
def test_a_package_of_other_values_than_sizes_is_not_read(verified: Any, guards: Any, halves: Path, tmp_path: Path) -> None:
    shutil.copy(halves, tmp_path / "m.pt2")
    with zipfile.ZipFile(tmp_path / "m.pt2", "a") as archive:
        archive.writestr("halves/extra/gateway_sizes.json", json.dumps({"verified": verified, "guards": guards}))
    assert compiled_for(tmp_path / "m.pt2") is None
    with pytest.raises(LoadFailed, match=r"gateway_sizes.json is not as this gateway writes it: .* by `gateway compile`"):
        backends.load("torch", {"model": str(tmp_path / "m.pt2")}, of("x"))


def test_rows_whose_length_is_no_multiple_of_what_divides_it_run_alone(halves: Path, loads: Any, tmp_path: Path) -> None:
    auto, example = torch.export.Dim.AUTO, torch.ones(3, 7, 16)
    turned = compiled(tmp_path / "turned.pt2", Turned(), (example,), ({0: auto, 1: auto},))  # it takes 16 at once, and the rest
    shapes: list[tuple[int, ...]] = []

    def run(x: Any) -> list[Any]:
        shapes.append(tuple(x.shape))
        return [x * 2]

    loads(run)
    for model, shape in (halves, (4,)), (halves, (5,)), (turned, (5, 16)):
        declared = of("x", shape=(-1, -1, 16)[: 1 + len(shape)], max_rows=8)
        session = backends.load("torch", {"model": str(model)}, declared).open_session(0)
        x = np.ones((3, *shape), np.float32)
        assert np.array_equal(session.run({"x": x}, {})["y"], x * 2)
    assert shapes == [(3, 4), *[(1, 5)] * 3, (3, 5, 16)]


def test_what_compiling_chooses_by_sizes_sets_no_bound(tmp_path: Path, loads: Any) -> None:
    auto, example = torch.export.Dim.AUTO, (torch.ones(3, 4, 7),)
    elsewhere = compiled_for(compiled(tmp_path / "elsewhere.pt2", Convolved(), example, ({0: auto, 2: auto},)))
    with own_choices():
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
