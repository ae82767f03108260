"""What people get wrong in configurations and models is told at once, with line, field, value, expectation and remedy."""

import importlib.util
import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from backends.check import gpus
from gateway.cli import main
from tests.mistakes import MISTAKES, Mistake, message_of, one, onnx, prepare, told

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
WITHIN_S = 3.0


def lacks(mistake: Mistake) -> str:
    """What this machine must have, or lack, to be told of a mistake."""
    for need in mistake.needs:
        if need == "no GPU":
            there = gpus() == 0
        elif need == "no Neuron":
            there = not list(Path("/dev").glob("neuron*"))
        else:
            there = importlib.util.find_spec(need) is not None
        if not there:
            return need
    return ""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the files that the mistakes are made with."""
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_forty_and_more() -> None:
    assert len(MISTAKES) >= 40


@pytest.mark.parametrize("title", MISTAKES)
def test_a_mistake_is_told_with_its_line_its_field_and_what_to_do(title: str, folder: Path) -> None:
    mistake = MISTAKES[title]
    if need := lacks(mistake):
        pytest.skip(f"needs {need}")
    begun_s = time.process_time()
    said = told(mistake, folder)
    took_s = time.process_time() - begun_s
    # Inputs that nothing states are told, and outputs too.
    paths = list(dict.fromkeys(fault["path"] for fault in said["faults"] if not fault["path"].endswith(".outputs")))
    fault = said["faults"][0]
    assert (paths, fault["line"]) == ([mistake.path], mistake.at_line), [fault["message"] for fault in said["faults"]]
    assert fault["file"] == "gateway.yaml"
    assert fault["remedy"]
    place = "gateway.yaml" + (f":{fault['line']}" if fault["line"] else "")
    assert fault["message"].startswith(place)
    for part in mistake.says:
        assert part in fault["message"]
    assert took_s < WITHIN_S
    assert f"# {title}\n{message_of(said, folder)}\n" in PAGE, "python -m tests.mistakes docs/troubleshooting.md"


def test_the_page_lists_every_mistake_once() -> None:
    assert sorted(line[2:] for line in PAGE.splitlines() if line.startswith("# ") and line[2:] in MISTAKES) == sorted(MISTAKES)


def test_faults_of_every_kind_are_told_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "gateway.yaml").write_text(
        "server: {http_port: 70000}\n"
        "models:\n"
        "  - name: a\n"
        "    max_row: 3\n"
        "    backends:\n"
        "      - {kind: onnxruntime, model: absent.onnx}\n"
        "      - {kind: python, model: 'code.py:Ecko', sesions: 2}\n"
        "  - name: b\n"
        "    max_rows: 3\n"
        "    max_rows: 4\n"
        "    backends: [{kind: python, model: 'code.py:Echo'}]\n"
    )
    assert main(["check", "gateway.yaml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[:2] for line in lines[:-1]] == [
        ["gateway.yaml:1", "server.http_port"],
        ["gateway.yaml:4", "models[0].max_row"],
        ["gateway.yaml:6", "models[0].backends[0].model"],
        ["gateway.yaml:7", "models[0].backends[1].sesions"],
        ["gateway.yaml:7", "models[0].backends[1].model"],
        ["gateway.yaml:10", "models[1].max_rows"],
        ["gateway.yaml:11", "models[1].backends[0].class_options.factor"],
    ]
    assert lines[-1] == "gateway.yaml: 7 faults"


def test_what_comes_from_an_anchor_is_told_where_it_stands(folder: Path) -> None:
    text = (
        "models:\n"
        "  - name: a\n"
        "    inputs: &tensors\n"
        "      - {name: x, datatype: FP31, shape: [-1]}\n"
        "    backends: [{kind: synthetic}]\n"
        "  - name: b\n"
        "    inputs: *tensors\n"
        "    backends: [{kind: synthetic}]\n"
    )
    said = told(Mistake("", text, "", ()), folder)
    assert [(fault["path"][:9], fault["line"]) for fault in said["faults"]] == [("models[0]", 4), ("models[1]", 4)]


def test_what_is_misspelt_behind_an_anchor_is_told_at_each_place(folder: Path) -> None:
    text = (
        "models:\n"
        "  - name: a\n"
        "    backends: &backends\n"
        "      - {kind: synthetic, sesions: two}\n"
        "  - {name: b, backends: *backends}\n"
    )
    faults = told(Mistake("", text, "", ()), folder)["faults"]
    assert {(fault["path"], fault["line"], fault["value"]) for fault in faults} == {
        (f"models[{index}].backends[0].sesions", 4, "'two'") for index in (0, 1)
    }
    assert len(faults) == 4  # of each the key and what it holds


ODD = {
    "a file that is no Python, without a name": (one("model: broken.py", kind="python"), "'broken.py': does not name a class"),
    "a package that raises": (one("model: raising.part:M", kind="python"), "'raising' cannot be imported: ValueError: no"),
    "a package that exits": (one("model: exiting.part:M", kind="python"), "'exiting' cannot be imported: SystemExit: 3"),
    "a package that lacks another": (one("model: lacking.part:M", kind="python"), "No module named 'absent_library'"),
    "a package without the module": (one("model: whole.part:M", kind="python"), "there is no module 'whole.part'"),
    "a file that exits": (one("model: exits.py:M", kind="python"), "cannot be imported: SystemExit: 3 ("),
    "a secret for a class": (one("model: whole:KEY", kind="python"), "'KEY' is a str, expected a class"),
    "a name too long for a file": (one(f"model: {'x' * 300}", kind="onnxruntime"), "cannot be looked at: File name too long"),
    "a name too long for a directory": (
        f"server: {{state_dir: {'x' * 300}}}\n{one()}",
        "cannot be looked at: File name too long",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD)
def test_what_cannot_even_be_looked_at_is_a_fault_like_others(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    for package, content in (
        ("raising", "raise ValueError('no licence')"), ("exiting", "raise SystemExit(3)"),
        ("lacking", "import absent_library"), ("whole", "KEY = 'sk-123'"),
    ):  # fmt: skip
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text(content)
    (folder / "exits.py").write_text("class M: ...\nraise SystemExit(3)\n")
    text, says = ODD[case]
    said = told(Mistake(case, text, "", ()), folder)
    (fault,) = said["faults"]
    assert says in fault["message"]
    assert fault["remedy"]
    assert "sk-123" not in fault["message"]


@pytest.mark.parametrize(("kind", "key"), [("python", "class_options"), ("torch", "factory_options")])
def test_values_of_options_which_may_be_secrets_are_not_told(kind: str, key: str, folder: Path) -> None:
    (folder / "own.py").write_text("class Echo: ...\n\ndef factory(hidden=8): ...\n")
    code = "own.py:Echo" if kind == "python" else "own.py:factory"
    said = told(Mistake("", one(f"model: {code}", f"{key}: {{token: sk-123}}", kind=kind), "", ()), folder)
    assert f"models[0].backends[0].{key}.token" in [fault["path"] for fault in said["faults"]]
    assert "sk-123" not in json.dumps(said)


def test_what_is_right_is_valid(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "gateway.yaml").write_text(one("model: code.py:Echo", "class_options: {factor: 2}", kind="python"))
    assert main(["check", "gateway.yaml", "--load"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "m version 1: no SLO, policy adaptive, on python (embedded, 1 session), loaded and run",
        "gateway.yaml: valid",
    ]


ONE_ROW = """
class Model:
    inputs = [("x", "FP32", (-1, 4))]
    outputs = [("y", "FP32", (-1, 4))]

    def predict(self, inputs):
        time.sleep(0.01)
        BODY

import time
"""


def test_check_loads_a_model_as_serve_does_with_its_largest_batch(folder: Path) -> None:
    (folder / "one_row.py").write_text(ONE_ROW.replace("BODY", "return {'y': inputs['x'][:1]}"))
    said = told(Mistake("", one("model: one_row.py:Model", kind="python"), "", (), arguments=("--load",)), folder)
    (fault,) = said["faults"]
    assert "every batch of 32 rows would fail" in fault["message"]
    assert "set max_rows: 1" in fault["message"]


def test_what_a_shape_begins_with_is_left_to_a_triton_where_nobody_states_rows(folder: Path) -> None:
    pytest.importorskip("tritonclient")
    tensors = [f"    {tensors.replace('-1, 3', '3')}\n" for tensors in TENSORS]
    text = one("model: m", "url: h:8001", kind="triton").replace("    backends", f"{''.join(tensors)}    backends")
    assert told(Mistake("", text, "", ()), folder)["faults"] == []
    mistaken = told(Mistake("", text + "        timeout_s: -1\n", "", ()), folder)
    assert [fault["path"] for fault in mistaken["faults"]] == ["models[0].backends[0].timeout_s"]
    stated = told(Mistake("", text.replace("    inputs", "    max_rows: 32\n    inputs"), "", ()), folder)
    assert [fault["path"] for fault in stated["faults"]] == ["models[0].inputs[0].shape", "models[0].outputs[0].shape"]


def test_check_loads_all_backends_of_a_model_to_tell_which_is_unlike_the_others(folder: Path) -> None:
    (folder / "one.py").write_text(ONE_ROW.replace("BODY", "return {'y': inputs['x']}"))
    (folder / "other.py").write_text(
        ONE_ROW.replace("BODY", "return {'y': inputs['x']}").replace('"FP32", (-1, 4))]', '"FP64", (-1, 4))]', 1)
    )
    (folder / "parts.py").write_text(ONE_ROW.replace("BODY", "yield {'y': inputs['x']}"))
    names = ("one", "one", "other", "parts")
    kinds = [f"{{kind: python, name: b{at}, model: '{name}.py:Model'}}" for at, name in enumerate(names)]
    text = f"models: [{{name: m, max_rows: 8, backends: [{', '.join(kinds)}]}}]"
    unlike, decoupled = told(Mistake("", text, "", (), arguments=("--load",)), folder)["faults"]
    assert unlike["path"] == "models[0].backends[2]"
    assert "backend b2 is unlike m:1/b0: input x is FP64 [-1, 4] here, FP32 [-1, 4] there: all backends" in unlike["message"]
    assert decoupled["path"] == "models[0].backends[3]"
    assert "backend b3 is decoupled (it answers in parts), and m:1/b0 is not" in decoupled["message"]


def test_check_says_last_which_models_failed_when_they_were_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "raises.py").write_text(ONE_ROW.replace("BODY", "raise ValueError('no')"))
    (folder / "gateway.yaml").write_text(one("model: raises.py:Model", kind="python"))
    assert main(["check", "gateway.yaml", "--load"]) == 0
    line, last = capsys.readouterr().out.splitlines()
    assert line.endswith(", loaded, but it raised when it was run")
    assert last == "gateway.yaml: valid, but m fails on made-up input (see the warning above)"
    said = told(Mistake("", one("model: raises.py:Model", kind="python"), "", (), arguments=("--load",)), folder)
    assert (said["valid"], said["failing"]) == (True, ["m"])


def test_a_folder_that_is_misspelt_is_named_also_without_the_file_in_it(folder: Path) -> None:
    for model, says in (
        ("exportd/other.onnx", "did you mean `exported`?"),
        ("artifcts/exportd/linear.onnx", "there is no directory"),
        (f"{folder}/exportd/linear.onnx", "did you mean `exported/linear.onnx`, which is there?"),
    ):
        (fault,) = told(Mistake("", onnx(model=model), "", ()), folder)["faults"]
        assert says in fault["remedy"]


def test_standard_input_is_a_file_like_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"models:\n  - name: m\n    backends: {}\n")))
    assert main(["check", "-"]) == 2
    assert capsys.readouterr().err.splitlines()[0].startswith("<stdin>:3: models[0].backends: expected a list")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (
            "gatway.yaml",
            "gatway.yaml: cannot be read: no such file, expected a configuration in YAML; did you mean `gateway.yaml`?",
        ),
        ("models", "models: cannot be read: a directory, expected a configuration in YAML"),
        ("linear.onnx", "linear.onnx: "),
    ],
)
def test_what_is_no_configuration_is_named(folder: Path, path: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "gateway.yaml").write_text(one())
    (folder / "models").mkdir()
    (folder / "linear.onnx").write_bytes(b"\x08\x08\xff\x00")
    assert main(["check", path]) == 2
    assert capsys.readouterr().err.startswith(says)


@pytest.mark.slow
@pytest.mark.parametrize("way", [("--no-ray",), ()])
def test_serve_refuses_the_same_before_it_starts_anything(folder: Path, way: tuple[str, ...]) -> None:
    pytest.importorskip("onnxruntime")
    (folder / "gateway.yaml").write_text(
        onnx(model="lineer.onnx") + "  - name: n\n    backends: [{kind: python, model: a.py:A}]\n"
    )
    command = [sys.executable, "-m", "gateway.cli", "serve", "gateway.yaml", *way]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first.startswith("gateway.yaml:5: models[0].backends[0].model: 'lineer.onnx': no such file (")
    assert second.startswith("gateway.yaml:7: models[1].backends[0].model: 'a.py:A': no such file (")


def test_a_backend_that_another_stands_in_for_keeps_nothing_from_starting(folder: Path) -> None:
    from gateway.configuring.check import servable

    pytest.importorskip("onnxruntime")
    (folder / "gateway.yaml").write_text(onnx(model="lineer.onnx") + "      - {kind: synthetic}\n")
    assert servable("gateway.yaml", here=True).models[0].name == "m"
    (folder / "gateway.yaml").write_text(onnx("load_at_start: false", model="lineer.onnx"))
    assert servable("gateway.yaml", here=True).models[0].name == "m"


TENSORS = ("inputs: [{name: x, datatype: FP32, shape: [-1, 3]}]", "outputs: [{name: y, datatype: FP32, shape: [-1, 3]}]")


@pytest.mark.parametrize(
    ("content", "says", "remedy"),
    [
        (b"\x80\x02}q\x00.", "'weights.pt': a pickle (", "write a class that loads it"),
        (b"\x08\x0a\x12\x07pytorch", "'weights.pt': an ONNX model (", "set kind: onnxruntime"),
    ],
)
def test_a_file_that_pytorch_cannot_load_is_told_as_a_load_would_tell_it(
    content: bytes, says: str, remedy: str, folder: Path
) -> None:
    pytest.importorskip("torch")
    (folder / "weights.pt").write_bytes(content)
    text = onnx(*TENSORS, model="weights.pt").replace("kind: onnxruntime", "kind: torch")
    (fault,) = told(Mistake("", text, "", ()), folder)["faults"]
    assert (fault["path"], fault["line"]) == ("models[0].backends[0].model", 7)
    assert says in fault["message"]
    assert remedy in fault["remedy"]


def test_a_model_of_tritons_python_backend_is_checked_as_it_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tritonclient")
    monkeypatch.delitem(sys.modules, "triton_python_backend_utils", raising=False)
    (folder / "triton" / "1").mkdir(parents=True)
    (folder / "triton" / "1" / "model.py").write_text(
        "import triton_python_backend_utils as pb_utils\n\n\nclass TritonPythonModel:\n"
        "    def initialize(self, args):\n        raise KeyError('weights')\n\n    def execute(self, requests): ...\n"
    )
    text = onnx(*TENSORS, model="triton/1/model.py:TritonPythonModel").replace("kind: onnxruntime", "kind: python")
    assert told(Mistake("", text, "", ()), folder)["faults"] == []
    (fault,) = told(Mistake("", text, "", (), arguments=("--load",)), folder)["faults"]
    assert f"raised KeyError: 'weights' ({folder}/triton/1/model.py:6)" in fault["message"]


@pytest.mark.slow
def test_tensors_of_an_exported_program_are_held_against_the_file(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    rows = torch.export.Dim("rows")
    program = torch.export.export(torch.nn.Linear(3, 2).eval(), (torch.ones(4, 3),), dynamic_shapes=({0: rows},))
    torch.export.save(program, folder / "linear.pt2")
    tensors = ("inputs: [{name: x, datatype: FP64, shape: [-1, 4]}]", "outputs: [{name: y, datatype: FP32, shape: [-1, 2]}]")
    text = onnx(*tensors, model="linear.pt2").replace("kind: onnxruntime", "kind: torch")
    said = told(Mistake("", text, "", ()), folder)
    assert [(fault["path"], fault["expected"]) for fault in said["faults"]] == [
        ("models[0].inputs[0].datatype", "FP32, as in the file"),
        ("models[0].inputs[0].shape", "[-1, 3], as in the file"),
    ]
    right = text.replace("FP64", "FP32").replace("[-1, 4]", "[-1, 3]")
    assert told(Mistake("", right, "", ()), folder)["valid"]


def test_json_has_the_parts_of_each_fault(folder: Path) -> None:
    said = told(MISTAKES["misspelt key"], folder)
    assert json.loads(json.dumps(said)) == said
    assert said["faults"] == [
        {
            "file": "gateway.yaml",
            "line": 5,
            "column": None,
            "path": "models[0].backends[0].sesions",
            "value": "2",
            "found": "unknown key",
            "expected": "",
            "remedy": "did you mean `sessions`?",
            "message": "gateway.yaml:5: models[0].backends[0].sesions: 2: unknown key; did you mean `sessions`?",
        }
    ]
