"""The Neuron backend on a double of torch_neuronx (platform `neuron-double`). Nothing here speaks of a real device."""

import asyncio
import errno
import inspect
import json
import os
import runpy
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest

import backends
from backends.base import ExecutionFailed, LoadFailed, ModelSpec, SessionLost, TensorSpec
from backends.check import checked
from backends.mistakes import Wanted
from backends.neuron import NeuronSession, visible_cores
from gateway.cli import main
from gateway.commands.trial import tried
from gateway.config import NeuronBuild, config_of
from gateway.documents.reader import read
from tests.backends.contract import LINEAR, SPEC, expected

pytest.importorskip("torch", reason="torch is not installed")

RAGGED = ModelSpec("", (TensorSpec("x", "FP32", (-1, -1)),), (TensorSpec("sum", "FP32", (-1,)),), 4)
ROOT = Path(__file__).parent.parent.parent


def summed() -> Any:
    """A factory: each row's sum."""
    import torch

    class Summed(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(1)

    return Summed()


@pytest.fixture(autouse=True)
def free_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever sessions other tests have left open."""
    monkeypatch.setattr("backends.neuron._cores", WeakKeyDictionary())


@pytest.fixture(scope="module")
def ragged(neuron_double: Path) -> Path:
    artifact = neuron_double / "summed"
    how = {"source": f"{__file__}:summed", "options": {}, "row_sizes": (1, 4), "target": "inf2", "lengths": (8, 16)}
    backends.build("neuron", artifact, RAGGED, **how)
    return artifact


@pytest.mark.parametrize(
    ("value", "cores"), [("3", (3,)), ("0,1", (0, 1)), ("0-3", (0, 1, 2, 3)), ("3-5,6", (3, 4, 5, 6)), (" 4 , 5 ", (4, 5))]
)
def test_visible_cores_are_read_as_the_runtime_reads_them(value: str, cores: tuple[int, ...]) -> None:
    assert visible_cores(value) == cores


@pytest.mark.parametrize(
    ("value", "message"),
    [(None, "unset"), ("", "empty"), ("all", "expected core numbers")]
    + [(value, "expected consecutive, increasing core numbers") for value in ("0,2-3", "1,0", "0,0", "3-2")],
)
def test_without_cores_it_refuses(value: str | None, message: str) -> None:
    with pytest.raises(LoadFailed, match=message):
        visible_cores(value)


def test_a_process_that_was_given_no_cores_does_not_load(ragged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES")
    with pytest.raises(LoadFailed, match=r"resources: \{neuron_cores: 1\}"):
        backends.load("neuron", {"model": str(ragged)}, RAGGED)
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "2")
    with pytest.raises(LoadFailed, match="NEURON_RT_NUM_CORES='2' does not say which cores"):
        backends.load("neuron", {"model": str(ragged)}, RAGGED)


@pytest.mark.parametrize("more", [{"sessions": 2}, {"placement": "replicas", "resources": {"neuron_cores": 1}}])
def test_check_and_batch_take_the_cores_that_they_need(
    more: dict[str, Any], ragged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = {"kind": "neuron", "model": str(ragged), **more}
    tensors = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}]}
    tensors["outputs"] = [{"name": "sum", "datatype": "FP32", "shape": [-1]}]
    model = {"name": "m", "max_rows": 4, **tensors, "ragged": {"pad": {"x": 0}, "buckets": [8, 16]}, "backends": [backend]}
    (tmp_path / "m.yaml").write_text(json.dumps({"models": [model]}))
    (tmp_path / "rows.jsonl").write_text('{"x": [1, 2]}\n')
    backends.load("neuron", {"model": str(ragged)}, RAGGED).open_session(0).close()  # the process holds two from here on
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES")
    document = read(tmp_path / "m.yaml")
    assert asyncio.run(tried(document, config_of(document))) == ((), ())
    assert os.environ.pop("NEURON_RT_VISIBLE_CORES") == "0"
    assert main(["batch", str(tmp_path / "m.yaml"), "m", str(tmp_path / "rows.jsonl"), str(tmp_path / "sums.jsonl")]) == 0
    assert json.loads((tmp_path / "sums.jsonl").read_text())["sum"] == 3
    assert os.environ.pop("NEURON_RT_VISIBLE_CORES") == ("0-1" if "sessions" in more else "0")


def test_there_is_an_artifact_for_each_rows_and_length(ragged: Path) -> None:
    assert sorted(file.name for file in ragged.glob("*.pt")) == ["1x16.pt", "1x8.pt", "4x16.pt", "4x8.pt"]
    model = backends.load("neuron", {"model": str(ragged)}, RAGGED)
    assert (model.spec.platform, model.spec.row_sizes, model.spec.max_rows) == ("neuron-double", (1, 4), 4)
    session = model.open_session(0)
    for rows in (1, 4):
        for length in (8, 16):
            x = np.random.default_rng(0).random((rows, length), np.float32)
            np.testing.assert_allclose(session.run({"x": x}, {})["sum"], x.sum(1), rtol=1e-5)


@pytest.mark.parametrize(("rows", "length"), [(2, 8), (4, 9)])
def test_a_shape_that_was_not_compiled_fails_its_batch_and_names_those_that_were(ragged: Path, rows: int, length: int) -> None:
    session = backends.load("neuron", {"model": str(ragged)}, RAGGED).open_session(0)
    with pytest.raises(ExecutionFailed, match="1 × 8, 1 × 16, 4 × 8, 4 × 16"):
        session.run({"x": np.zeros((rows, length), np.float32)}, {})


def test_another_datatype_than_was_compiled_is_refused(ragged: Path) -> None:
    session = backends.load("neuron", {"model": str(ragged)}, RAGGED).open_session(0)
    with pytest.raises(ExecutionFailed, match="Incorrect tensor data type"):
        session.run({"x": np.zeros((4, 8), np.int64)}, {})


def test_row_sizes_are_in_order_whatever_the_order_that_they_are_written_in(neuron_double: Path) -> None:
    artifact = neuron_double / "unordered"
    backends.build("neuron", artifact, SPEC, source=LINEAR, options={}, row_sizes=(2, 8, 4), target="inf2")
    spec = backends.load("neuron", {"model": str(artifact)}, SPEC).spec
    assert (spec.row_sizes, spec.max_rows) == ((2, 4, 8), 8)
    assert NeuronBuild(source="m:f", row_sizes=(8, 1, 4, 4)).row_sizes == (1, 4, 8)


def test_row_sizes_above_max_rows_are_left_out(ragged: Path) -> None:
    spec = ModelSpec("", RAGGED.inputs, RAGGED.outputs, 3)
    assert backends.load("neuron", {"model": str(ragged)}, spec).spec.row_sizes == (1,)


def test_each_session_gets_the_core_that_fewest_have(ragged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_neuronx

    placed: list[int] = []
    monkeypatch.setattr(torch_neuronx, "set_neuron_cores", lambda trace, start_nc, nc_count: placed.append(start_nc))
    monkeypatch.setattr(NeuronSession, "run", lambda *_: {})
    models = [backends.load("neuron", {"model": str(ragged)}, RAGGED) for _ in range(2)]
    first, second = (model.open_session(0) for model in models)
    assert placed[::4] == [0, 1]
    first.close()
    third = models[1].open_session(1)  # of the same backend as the second
    assert placed[8::4] == [0]
    third.close()
    with monkeypatch.context() as full:
        full.setattr(torch_neuronx, "set_neuron_cores", raises)
        with pytest.raises(LoadFailed, match="core 2: RuntimeError: full"):
            models[0].open_session(0)
    fourth = models[0].open_session(0)
    assert placed[12::4] == [0]
    for session in (second, fourth):
        session.close()


def raises(*_: object, **__: object) -> None:
    raise RuntimeError("full")


def test_sessions_are_placed_by_a_library_of_before_sdk_2_25(ragged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_neuronx

    placed: list[int] = []
    real = torch_neuronx.set_neuron_cores

    def set_neuron_cores(trace: Any, start_nc: int = -1, nc_count: int = -1) -> None:
        placed.append(start_nc)
        real(trace, start_nc, nc_count)

    monkeypatch.delattr(torch_neuronx, "set_neuron_cores")
    monkeypatch.setattr(torch_neuronx, "experimental", SimpleNamespace(set_neuron_cores=set_neuron_cores), raising=False)
    backends.load("neuron", {"model": str(ragged)}, RAGGED).open_session(1)
    assert placed == [1] * 4


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ("", "no compiled model here, `gateway compile` makes one"),
        ("[]", r"manifest\.json: damaged, `gateway compile` makes it anew: TypeError"),
        ('{"row_sizes": [1], "lengths": [0]}', r"manifest\.json: damaged, `gateway compile` makes it anew: KeyError: 'inputs'"),
        (None, r"4x8\.pt is missing: copy the folder whole, or `gateway compile` it again"),
    ],
)
def test_a_damaged_directory_is_told(ragged: Path, tmp_path: Path, manifest: str | None, message: str) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(ragged, copied)
    if manifest is None:
        (copied / "4x8.pt").unlink()
    else:
        (copied / "manifest.json").write_text(manifest)
    with pytest.raises(LoadFailed, match=message):
        backends.load("neuron", {"model": str(copied)}, RAGGED)


def test_a_folder_that_may_not_be_read_is_told_as_such(ragged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("backends.neuron.file_bytes", denied)
    with pytest.raises(LoadFailed, match=r"manifest\.json: Permission denied: let the user that serves read") as raised:
        backends.load("neuron", {"model": str(ragged)}, RAGGED)
    assert "compile" not in str(raised.value)


def test_others_may_read_what_was_compiled_as_far_as_the_umask_lets_them(ragged: Path) -> None:
    os.umask(umask := os.umask(0o077))
    assert stat.S_IMODE(ragged.stat().st_mode) == 0o777 & ~umask
    assert {stat.S_IMODE(file.stat().st_mode) for file in ragged.iterdir()} == {0o666 & ~umask}


def test_a_folder_that_is_compiled_again_is_replaced_where_its_link_leads(neuron_double: Path, tmp_path: Path) -> None:
    (tmp_path / "disk" / "m").mkdir(parents=True)
    (tmp_path / "disk" / "m" / "of_before.pt").touch()
    link = tmp_path / "m"
    link.symlink_to(tmp_path / "disk" / "m")
    backends.build("neuron", link, SPEC, source=LINEAR, options={}, row_sizes=(2,), target="inf2")
    assert sorted(file.name for file in (tmp_path / "disk" / "m").iterdir()) == ["2x0.pt", "manifest.json"]
    assert link.is_symlink()
    assert sorted(file.name for folder in (tmp_path, tmp_path / "disk") for file in folder.iterdir()) == ["disk", "m", "m"]


def test_a_compilation_that_fails_leaves_what_was_there(
    neuron_double: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch_neuronx

    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "of_before.pt").touch()
    monkeypatch.setattr(torch_neuronx, "trace", raises)
    with pytest.raises(Exception, match="full"):
        backends.build("neuron", tmp_path / "m", SPEC, source=LINEAR, options={}, row_sizes=(2,), target="inf2")
    assert [str(file.relative_to(tmp_path)) for file in sorted(tmp_path.rglob("*"))] == ["m", "m/of_before.pt"]


def test_open_lengths_need_buckets(neuron_double: Path) -> None:
    how = {"source": f"{__file__}:summed", "options": {}, "row_sizes": (1,), "target": "inf2"}
    with pytest.raises(LoadFailed, match=r"ragged\.buckets"):
        backends.build("neuron", neuron_double / "x", RAGGED, **how)


def two_ways() -> Any:
    """A factory: what a row of one input has more than one of the other, and their sum."""
    import torch

    class TwoWays(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return a - b, a + b

    return TwoWays()


def test_tensors_are_those_of_their_names_in_whatever_order_they_are_declared(neuron_double: Path) -> None:
    a, b, more, both = (TensorSpec(name, "FP32", (-1, 1)) for name in ("a", "b", "more", "both"))
    artifact = neuron_double / "two_ways"
    how = {"source": f"{__file__}:two_ways", "options": {}, "row_sizes": (1,), "target": "inf2"}
    backends.build("neuron", artifact, ModelSpec("", (a, b), (more, both), 1), **how)
    for outputs in ((both, more), (both,)):
        session = backends.load("neuron", {"model": str(artifact)}, ModelSpec("", (b, a), outputs, 1)).open_session(0)
        answer = session.run({"b": np.array([[1]], np.float32), "a": np.array([[5]], np.float32)}, {})
        assert [(name, value.item()) for name, value in answer.items()] == [("both", 6), ("more", 4)][: len(outputs)]
        session.close()


def test_a_core_whose_memory_is_full_fails_the_load(ragged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_neuronx

    monkeypatch.setattr(torch_neuronx, "MEMORY_BYTES", 1000)
    with pytest.raises(LoadFailed, match=r"core 2: .*status=4 message=Allocation Failure"):
        backends.load("neuron", {"model": str(ragged)}, RAGGED).open_session(0)


def test_a_row_with_nan_fails_its_batch_and_the_session_runs_the_next(ragged: Path) -> None:
    session = backends.load("neuron", {"model": str(ragged)}, RAGGED).open_session(0)
    with pytest.raises(ExecutionFailed) as raised:
        session.run({"x": np.full((1, 8), np.nan, np.float32)}, {})
    assert str(raised.value) == "RuntimeError: Failed to execute the model status=1003 message=Numerical Error"
    assert session.run({"x": np.ones((1, 8), np.float32)}, {})["sum"] == 8


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("Failed to execute the model status=1002 message=Bad Input", ExecutionFailed),
        ("Failed to execute the model status=1006 message=Out of Bound", ExecutionFailed),
        ("nrt_execute: NRT_EXEC_COMPLETED_WITH_NUM_ERR", ExecutionFailed),
        ("NRT_EXEC_BAD_INPUT", ExecutionFailed),
        ("Incorrect tensor shape at input tensor #0", ExecutionFailed),
        ("Failed to execute the model status=101 message=Execution Unit Unrecoverable", SessionLost),
        ("Failed to execute the model status=1202 message=Hardware Error", SessionLost),
        ("Failed to execute the model status=4 message=Allocation Failure", SessionLost),
        ("nrt_execute: NRT_EXEC_HW_ERR_NC_UE", SessionLost),
        ("NRT:nrt_tensor_read failed", SessionLost),
        ("nrt_infodump status=1\nFailed to execute the model status=1003 message=Numerical Error", ExecutionFailed),
        ("nrt_execute failed\nsee the log for what came before", SessionLost),
    ],
)
def test_what_the_runtime_says_is_the_inputs_fault_or_the_devices(said: str, error: type[Exception]) -> None:
    def program(*_: object) -> None:
        raise RuntimeError(said)

    with pytest.raises(error, match=said[-20:]):
        NeuronSession(RAGGED, RAGGED, {(1, 8): program}).run({"x": np.zeros((1, 8), np.float32)}, {})


@pytest.mark.slow
def test_a_core_has_one_owner(ragged: Path, neuron_double: Path) -> None:
    owner = backends.load("neuron", {"model": str(ragged)}, RAGGED).open_session(1)  # takes cores 2 and 3
    assert "another process owns it" in in_another_process(ragged, "3")
    assert in_another_process(ragged, "0-1").strip() == "opened on core 0"
    owner.close()


def in_another_process(model: Path, cores: str) -> str:
    code = (
        "import sys, backends\n"
        "from tests.backends.test_neuron import RAGGED\n"
        "try:\n"
        "    model = backends.load('neuron', {'model': sys.argv[1]}, RAGGED)\n"
        "    model.open_session(0)\n"
        "    print('opened on core', model.device.index)\n"
        "except backends.LoadFailed as exc:\n"
        "    print(exc)\n"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "neuron_double")])
    env = {**os.environ, "NEURON_RT_VISIBLE_CORES": cores, "PYTHONPATH": path}
    ended = subprocess.run([sys.executable, "-c", code, str(model)], env=env, capture_output=True, text=True, timeout=60)
    return ended.stdout + ended.stderr


@pytest.mark.parametrize(
    "code",
    ["raise ImportError('placeholder: see the Neuron documentation')", "__version__ = '1.0'"],
    ids=["raises", "is empty"],
)
def test_a_placeholder_package_is_recognised(
    tmp_path: Path, neuron_double: Path, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch_neuron.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    how = {"source": LINEAR, "options": {}, "row_sizes": (1,), "target": "inf1"}
    told = "AWS's last torch-neuron is for Python 3.10.*placeholder" if "raise" in code else "placeholder"
    with pytest.raises(LoadFailed, match=told):
        backends.build("neuron", tmp_path / "x", SPEC, **how)
    sys.modules.pop("torch_neuron", None)


def test_what_the_double_compiled_is_not_taken_for_a_device(ragged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_neuronx

    monkeypatch.setattr(torch_neuronx, "PLATFORM", "neuron")
    with pytest.raises(LoadFailed, match="compiled for neuron-double, but torch_neuronx is neuron"):
        backends.load("neuron", {"model": str(ragged)}, RAGGED)


def test_inf1_goes_through_its_own_library(neuron_double: Path) -> None:
    how = {"source": LINEAR, "options": {}, "row_sizes": (2,), "target": "inf1"}
    backends.build("neuron", neuron_double / "linear-inf1", SPEC, **how)
    model = backends.load("neuron", {"model": str(neuron_double / "linear-inf1")}, SPEC)
    assert sys.modules["torch_neuron"].traced == 1
    x = np.random.default_rng(0).random((2, 16), np.float32)
    np.testing.assert_allclose(model.open_session(0).run({"INPUT0": x}, {})["OUTPUT0"], expected(x), rtol=1e-5, atol=1e-5)


def test_a_check_says_that_no_library_for_inf1_is_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.check._installed", lambda name: name != "torch_neuron")
    for target, places in (("inf1", [("build", "target")]), ("inf2", [])):
        wanted = Wanted("neuron", {"model": "m"}, here=False, thorough=False, build={"target": target}, inputs=())
        assert [mistake.at for mistake in checked(wanted) if mistake.at != ("model",)] == places


# From the AWS Neuron documentation, SDK 2.32: api-torch-neuronx-{trace, core-placement, async-lazy-load, data-parallel}.
SIGNATURES = {
    "trace": "(func, example_inputs, *_, input_output_aliases={}, compiler_workdir=None, compiler_args=None, "
    "partitioner_config=None, inline_weights_to_neff=True, cpu_backend=False)",
    "set_neuron_cores": "(trace, start_nc=-1, nc_count=-1)",
    "lazy_load": "(trace, enable_lazy_load=True)",
    "async_load": "(trace, enable_async_load=True)",
    "DataParallel": "(model, device_ids=None, dim=0, set_dynamic_batching=True)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_double_has_the_documented_signatures(name: str, neuron_double: Path) -> None:
    import torch_neuronx

    signature = inspect.signature(getattr(torch_neuronx, name))
    bare = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]


def test_the_linear_model_computes_what_it_should(neuron_double: Path) -> None:
    how = {"source": LINEAR, "options": {}, "row_sizes": (4,), "target": "trn1", "compiler_arguments": ("--auto-cast=none",)}
    line = backends.build("neuron", neuron_double / "linear4", SPEC, **how)
    assert line.endswith("1 artifacts of configs/examples/linear.py:linear for neuron-double trn1")
    session = backends.load("neuron", {"model": str(neuron_double / "linear4")}, SPEC).open_session(0)
    x = np.random.default_rng(0).random((4, 16), np.float32)
    np.testing.assert_allclose(session.run({"INPUT0": x}, {})["OUTPUT0"], expected(x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_hardware_check_passes_on_the_double_and_says_so(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "neuron_double")])
    env = {**os.environ, "NEURON_DOUBLE_DIR": str(tmp_path), "NEURON_RT_VISIBLE_CORES": "0,1", "PYTHONPATH": path}
    command = [sys.executable, "scripts/neuron_hardware_check.py", "--folder", str(tmp_path / "models")]
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "NOTE: this is a double of the library, not a device" in ended.stdout
    assert ended.stdout.count("\nok ") == 4, ended.stdout
    assert "\nskipped sessions run in parallel, each on its core: their answers are right, but" in ended.stdout


def test_the_hardware_check_takes_no_other_fault_for_a_refusal(ragged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "neuron_hardware_check.py")))
    arguments = SimpleNamespace(model="linear", target="inf2", folder=ragged)
    for code, said in ((0, ""), (1, "disk full"), (check.REFUSED, "m: no compiled model here")):
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], code, said, ""))  # noqa: B023
        with pytest.raises(AssertionError, match="a second process"):
            check.a_core_has_one_owner(arguments)
    with pytest.raises(LoadFailed, match="no compiled model here"):
        check.no_cores_refuses(ragged / "absent", RAGGED)


def test_the_hardware_check_tells_sessions_that_share_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    check = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "neuron_hardware_check.py")))
    given = iter([(100.0, [np.ones(4)]), (195.0, [np.ones(4)] * 2)])
    check.sessions_run_in_parallel.__globals__["run_at_once"] = lambda *_: next(given)
    spec = ModelSpec("neuron", SPEC.inputs, SPEC.outputs, 4, (4,))
    model = SimpleNamespace(spec=spec, open_session=lambda index: None)
    with pytest.raises(AssertionError, match="they share a core"):
        check.sessions_run_in_parallel(model, ())
