"""`gateway compile` makes what is missing or changed, once, and nothing else."""

import contextlib
import errno
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import backends
from backends.base import LoadFailed, ModelSpec
from backends.model_folders import forget_code
from backends.source import load_object
from gateway.cli import main
from gateway.commands.compile import compile_config
from gateway.config import Config, parse_config
from gateway.errors import ConfigError

pytest.importorskip("onnxscript", reason="onnxscript is not installed: pip install 'serving-gateway[onnx]'")


def config(tmp_path: Path, **build: Any) -> Config:
    document = f"""
models:
  - name: linear
    inputs: [{{name: INPUT0, datatype: FP32, shape: [-1, 16]}}]
    outputs: [{{name: OUTPUT0, datatype: FP32, shape: [-1, 4]}}]
    backends:
      - {{kind: onnxruntime, model: {tmp_path}/linear.onnx, build: {yaml.safe_dump(build, default_flow_style=True)} }}
  - {{name: other, backends: [{{kind: synthetic}}]}}
"""
    return parse_config(yaml.safe_load(document), source="x.yaml")


def compiled(what: Config, *names: str) -> list[str]:
    lines: list[str] = []
    compile_config(what, names=names, report=lines.append)
    return lines


@pytest.mark.slow
def test_it_builds_once_and_again_when_the_code_or_the_options_change(tmp_path: Path) -> None:
    code = tmp_path / "model.py"
    text = Path("configs/examples/linear.py").read_text()
    code.write_text(text)
    source = f"{code}:linear"
    assert compiled(config(tmp_path, source=source))[0].startswith(
        f"{tmp_path}/linear.onnx: fp32 from {source}, max abs difference"
    )
    assert compiled(config(tmp_path, source=source)) == [f"{tmp_path}/linear.onnx: up to date"]
    code.write_text(text + "\n")
    assert "fp32 from" in compiled(config(tmp_path, source=source))[0]
    record = tmp_path / "linear.onnx.build.json"
    of_before = json.loads(record.read_text())
    del of_before["fused"]
    record.write_text(json.dumps(of_before))
    assert "fp32 from" in compiled(config(tmp_path, source=source))[0]
    assert "int8 from" in compiled(config(tmp_path, source=source, precision="int8"))[0]


def test_a_factory_that_cannot_be_found_is_named_with_its_model(tmp_path: Path) -> None:
    for source in ("nothing_of_this_name:f", "nothing_of_this_name.inner:f", f"{tmp_path}/absent.py:f"):
        with pytest.raises(ConfigError, match=r"linear: onnxruntime: .*(nothing_of_this_name|absent\.py)"):
            compiled(config(tmp_path, source=source))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("factory", "told"), [("ends", r"raised SystemExit: no GPU \(.*m\.py:5\)"), ("Ends", "SystemExit: no row")]
)
def test_a_factory_or_module_that_ends_the_program_is_told(tmp_path: Path, factory: str, told: str) -> None:
    (tmp_path / "m.py").write_text(
        "import sys\nimport torch\n\ndef ends():\n    sys.exit('no GPU')\n\n"
        "class Ends(torch.nn.Module):\n    def forward(self, x): sys.exit('no row')\n"
    )
    with pytest.raises(ConfigError, match=rf"linear: onnxruntime: .*m\.py:{factory}: {told}"):
        compiled(config(tmp_path, source=f"{tmp_path}/m.py:{factory}"))


def test_an_unknown_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model nothing in the configuration"):
        compiled(config(tmp_path, source="m:f"), "nothing")


def test_where_nothing_is_to_be_built_that_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compiled(config(tmp_path, source="m:f"), "other") == ["nothing to build: no backend has `build`"]
    (tmp_path / "area.py").write_text("def predict(width: float) -> float:\n    return width\n")
    assert main(["compile", f"{tmp_path}/area.py"]) == 2
    told = capsys.readouterr().err
    assert told.endswith(f"; of a model, `gateway init {tmp_path}/area.py` writes a configuration\n")
    (tmp_path / "area.yaml").touch()
    assert main(["compile", f"{tmp_path}/are"]) == 2
    assert capsys.readouterr().err.endswith(f"; did you mean `{tmp_path}/area.yaml`?\n")


def test_a_broken_record_is_built_anew_rather_than_trusted(tmp_path: Path) -> None:
    (tmp_path / "linear.onnx").write_bytes(b"half")
    (tmp_path / "linear.onnx.build.json").write_text("{")
    with pytest.raises(ConfigError, match="nothing_of_this_name"):
        compiled(config(tmp_path, source="nothing_of_this_name:f"))


def test_the_inputs_to_verify_with_are_checked_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"build\.integers_below names INPUT0, expected integer inputs of the model"):
        compiled(config(tmp_path, source="configs/examples/linear.py:linear", integers_below={"INPUT0": 9}))
    assert list(tmp_path.iterdir()) == []


def test_an_int8_that_changes_the_answers_is_not_put_in_place(tmp_path: Path) -> None:
    """One weight far beyond the others leaves them no steps of their own; the error names what its inputs were."""
    code = tmp_path / "code" / "model.py"
    code.parent.mkdir()
    code.write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.rows = torch.nn.Parameter(torch.randn(100, 4, generator=torch.Generator().manual_seed(0)))\n"
        "    def forward(self, tokens):\n"
        "        rows = self.rows[tokens]\n"
        "        return rows * torch.tensor([1.0, 1.0, 1.0, 1e4]) @ torch.diag(torch.tensor([1.0, 1.0, 1.0, 1e-9]))\n"
        "def model():\n"
        "    return Model()\n"
    )
    document = f"""
models:
  - name: tokens
    inputs: [{{name: tokens, datatype: INT64, shape: [-1, -1]}}]
    outputs: [{{name: rows, datatype: FP32, shape: [-1, -1, 4]}}]
    backends:
      - {{kind: onnxruntime, model: {tmp_path}/tokens.onnx, build: {{source: "{code}:model", precision: int8}}}}
"""
    with pytest.raises(ConfigError, match=r"int8 keeps a cosine of .* name likelier tokens in build\.integers_below"):
        compiled(parse_config(yaml.safe_load(document), source="x.yaml"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code"]


def test_one_file_that_two_models_build_in_two_ways_is_refused(tmp_path: Path) -> None:
    def of(**other: str) -> dict[str, Any]:
        build = {"source": "m.py:one"} | other
        return {
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}],
            "backends": [{"kind": "onnxruntime", "model": f"{tmp_path}/m.onnx", "build": build}],
        }

    parse_config({"models": [{"name": "a", **of()}, {"name": "b", **of()}]}, source="x.yaml")
    with pytest.raises(ConfigError, match=r"models\[1\].backends\[0\].model.*'a' builds the same file in another way"):
        parse_config({"models": [{"name": "a", **of()}, {"name": "b", **of(source="m.py:two")}]}, source="x.yaml")


def test_an_output_called_as_an_input_is_refused_where_an_onnx_file_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = tmp_path / "code.py"
    code.write_text(
        "import torch\n"
        "class State(torch.nn.Module):\n"
        "    def forward(self, x, h):\n"
        "        return x + h, 2 * h\n"
        "def state():\n"
        "    return State()\n"
    )
    (tmp_path / "gateway.yaml").write_text(f"""
models:
  - name: state
    inputs: [{{name: x, datatype: FP32, shape: [-1, 4]}}, {{name: h, datatype: FP32, shape: [-1, 4]}}]
    outputs: [{{name: y, datatype: FP32, shape: [-1, 4]}}, {{name: h, datatype: FP32, shape: [-1, 4]}}]
    backends: [{{kind: onnxruntime, model: {tmp_path}/state.onnx, build: {{source: "{code}:state"}}}}]
""")
    said = "an input has this name, and an ONNX file has each name once"
    assert main(["check", str(tmp_path / "gateway.yaml")]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if said in line]
    assert "models[0].outputs[1].name: 'h'" in line
    assert main(["compile", str(tmp_path / "gateway.yaml")]) == 2
    assert f"state: onnxruntime: {tmp_path}/state.onnx: output 'h': {said}" in capsys.readouterr().err


def test_all_that_can_be_built_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(kind: str, artifact: Path, spec: ModelSpec, **how: Any) -> str:
        if artifact.name == "b.onnx":
            artifact.write_bytes(b"built")
            return "built"
        raise LoadFailed(f"{artifact.name} cannot be")

    monkeypatch.setattr(backends, "build", build)
    models = [
        {"name": name, "backends": [{"kind": "onnxruntime", "model": f"{tmp_path}/{name}.onnx", "build": {"source": "m:f"}}]}
        for name in "abc"
    ]
    what, lines = parse_config({"models": models}, source="x.yaml"), list[str]()
    with pytest.raises(ConfigError, match=r"(?s)a: onnxruntime: a.onnx cannot be\nc: onnxruntime: c.onnx cannot be$"):
        compile_config(what, report=lines.append)
    assert lines == ["built"]


@pytest.mark.parametrize("fails", [True, False])
def test_ctrl_c_ends_it_also_where_a_build_makes_something_else_of_it(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: Any, **__: Any) -> str:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        if fails:
            raise LoadFailed("cannot be exported")
        return "built"

    monkeypatch.setattr(backends, "build", build)
    with pytest.raises(KeyboardInterrupt):
        compile_config(config(tmp_path, source="m:f"))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def own_linear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Compile a model whose code has a neighbour, `code/half_NAME.py`, with a builder that takes no time."""
    name = f"half_{tmp_path.name}".replace("-", "_")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / f"{name}.py").write_text("HALF = 0.5\n")
    (tmp_path / "code" / "model.py").write_text(f"import {name}\n\ndef linear(): ...\n")

    def build(kind: str, artifact: Path, spec: ModelSpec, *, source: str, **how: Any) -> str:
        load_object(source)
        artifact.write_bytes(b"built")
        return "built"

    monkeypatch.setattr(backends, "build", build)
    yield lambda: compiled(config(tmp_path, source=f"{tmp_path}/code/model.py:linear"))[0].rpartition(": ")[2]
    forget_code(tmp_path)


def test_it_builds_again_when_a_neighbour_of_the_code_or_the_artifact_changes(
    own_linear: Callable[[], str], tmp_path: Path
) -> None:
    assert [own_linear(), own_linear()] == ["built", "up to date"]
    (neighbour,) = (tmp_path / "code").glob("half_*.py")
    neighbour.write_text("HALF = 0.25\n")
    assert [own_linear(), own_linear()] == ["built", "up to date"]
    (tmp_path / "linear.onnx").write_bytes(b"")
    assert [own_linear(), own_linear()] == ["built", "up to date"]


def test_what_was_built_before_its_record_could_be_written_is_built_again(
    own_linear: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = backends.build

    def full(*given: Any, **how: Any) -> str:
        built(*given, **how)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "linear.onnx.build.json"))

    with monkeypatch.context() as patched:
        patched.setattr(backends, "build", full)
        with pytest.raises(ConfigError, match=r"linear: onnxruntime: .*linear\.onnx\.build\.json: No space left"):
            own_linear()
    assert own_linear() == "built"


def test_the_order_in_which_rows_were_written_once_builds_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(kind: str, artifact: Path, *_: Any, **__: Any) -> str:
        artifact.mkdir()
        return "built"

    monkeypatch.setattr(backends, "build", build)
    backend = {"kind": "neuron", "model": f"{tmp_path}/m", "build": {"source": "m:f", "row_sizes": [4, 1, 8]}}
    what = parse_config({"models": [{"name": "m", "backends": [backend]}]}, source="x.yaml")
    assert compiled(what) == ["built"]
    record = tmp_path / "m.build.json"
    of_before = json.loads(record.read_text())
    of_before["build"]["row_sizes"] = [4, 1, 8, 8]
    record.write_text(json.dumps(of_before))
    assert compiled(what) == [f"{tmp_path}/m: up to date"]
