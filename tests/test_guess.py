"""`gateway serve MODEL`: what kind of thing MODEL is, and the configuration that says it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import gateway
from gateway.cli import main
from gateway.config import load_config, parse_config
from gateway.configuring.argument import is_configuration
from gateway.configuring.check import check
from gateway.configuring.guess import guess, read_example, written
from gateway.configuring.triton_repository import read_model
from gateway.errors import ConfigError

CODE = """
from typing import Annotated
import numpy as np
import numpy.typing as npt
from neighbour_of_guess import FACTOR

class Scaled:
    inputs = [("x", "FP32", (-1, 2))]
    outputs = [("y", "FP32", (-1, 2))]
    def predict(self, inputs):
        return {"y": inputs["x"] * np.float32(FACTOR)}

class ByHints:
    def predict(self, x: Annotated[npt.NDArray[np.float32], (-1, 4)]):
        return x.sum(axis=1, keepdims=True).astype(np.int64)

class ByExample:
    example = {"x": np.ones((1, 3), np.float32), "y": np.ones((1, 3), np.float32)}
    def predict(self, inputs):
        return {"sum": inputs["x"] + inputs["y"]}

class Unsaid:
    def predict(self, inputs):
        return inputs

def area(width: float, height: float) -> float:
    return width * height

def lengths(texts: Annotated[np.ndarray, "BYTES", (-1,)]):
    return np.array([len(text) for text in texts])

class Exits:
    example = {"x": np.ones((1, 3), np.float32)}
    def __init__(self):
        raise SystemExit("no licence")
    def predict(self, inputs):
        return inputs

def fails(x: Annotated[npt.NDArray[np.float32], (-1, 4)]):
    raise ValueError("no ones")

def shapeless(x: npt.NDArray[np.float32]):
    return x

NUMBER = 3
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "neighbour_of_guess.py").write_text("FACTOR = 2\n")
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


def model(what: str, **options: Any) -> dict[str, Any]:
    document = guess(what, **options).document
    parse_config(document, source="guess")
    (only,) = document["models"]
    return dict(only)


def fault(what: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        guess(what, **options)
    return caught.value.message


def tensor(name: str, datatype: str, *shape: int) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}


@pytest.mark.parametrize(
    ("name", "inputs", "outputs"),
    [
        ("Scaled", [tensor("x", "FP32", -1, 2)], [tensor("y", "FP32", -1, 2)]),
        ("ByHints", [tensor("x", "FP32", -1, 4)], [tensor("output", "INT64", -1, 1)]),
        ("ByExample", [tensor("x", "FP32", -1, 3), tensor("y", "FP32", -1, 3)], [tensor("sum", "FP32", -1, 3)]),
        ("area", [tensor("width", "FP64", -1), tensor("height", "FP64", -1)], [tensor("output", "FP64", -1)]),
        ("lengths", [tensor("texts", "BYTES", -1)], [tensor("output", "INT64", -1)]),
    ],
)
def test_a_class_or_a_function_says_its_tensors(code: Path, name: str, inputs: Any, outputs: Any) -> None:
    backends = [{"kind": "python", "model": f"{code}:{name}"}]
    assert model(f"{code}:{name}") == {
        "name": "mine", "inputs": inputs, "outputs": outputs, "max_rows": 32, "backends": backends,
    }  # fmt: skip


def test_the_only_function_of_a_file_is_its_model(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    path.write_text("def area(width: float, height: float) -> float:\n    return width * height\n\n\ndef _unit() -> str: ...\n")
    served = model(str(path))
    assert (served["name"], served["backends"][0]["model"]) == ("one", f"{path}:area")
    path.write_text(path.read_text() + "\n\nclass _Scale:\n    def predict(self): ...\n")
    assert model(str(path))["backends"][0]["model"] == f"{path}:area"
    path.write_text(path.read_text() + "\n\ndef girth(width: float) -> float:\n    return 4 * width\n")
    assert fault(str(path)).endswith("which of one.py:area, one.py:girth? Name one, or mark one alone with `@gateway.model`")


HELPER = "def helper(x: float) -> float: return x\n"
PREDICT = "def predict(x: float) -> float: return 3 * x\n"
TREE = "class Tree:\n    def predict(self, x: float) -> float: return x\n"
SCALE = "class Scale:\n    def by(self, x: float) -> float: return 3 * x\n"


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    import absent_of_guess\nexcept ImportError:\n    " + PREDICT,
        "if True:\n    " + PREDICT,
        PREDICT + "before = predict\n" + PREDICT,
        SCALE + "predict = Scale().by\n",
        "from neighbour_of_predict import tripled as predict\n",
        "predict = lambda x: 3 * x\nexample = {'x': [1.0]}\n",
        "from functools import partial\npredict = partial(lambda by, x: by * x, 3)\nexample = {'x': [1.0]}\n",
        "from functools import partial\ndef _by(n: float, x: float) -> float: return n * x\npredict = partial(_by, 3)\n",
        "class Scale:\n    def __call__(self, x: float) -> float: return 3 * x\npredict = Scale()\n",
        PREDICT + "if __name__ == '__main__':\n    " + TREE.replace("\n", "\n    ").rstrip(" "),
        PREDICT + "if '__main__' == __name__ and True:\n    " + TREE.replace("\n", "\n    ").rstrip(" "),
        PREDICT + "class Config:\n    predict = True\n",
        PREDICT + "from dataclasses import dataclass, field\n@dataclass\nclass A:\n    predict: float = field(default=0.0)\n",
        PREDICT + "from enum import Enum, auto\nclass Mode(Enum):\n    predict = auto()\n",
        PREDICT + "class Lists:\n    for predict in (1, 2): ...\n",
        TREE.replace("x\n", "3 * x\n")
        + "predict = None\nfor predict in (): ...\nfrom . import neighbour_of_predict as predict\n",
        PREDICT + "from typing import Protocol\nclass Predicts(Protocol):\n    predict: object\n",
    ],
)
def test_what_a_file_calls_predict_is_its_model_however_it_comes_about(tmp_path: Path, text: str) -> None:
    (tmp_path / "neighbour_of_predict.py").write_text("def tripled(x: float) -> float: return 3 * x\n")
    (tmp_path / "m.py").write_text(text + HELPER)
    with gateway.load(tmp_path / "m.py") as model:
        assert model.predict({"x": [2]})["output"].tolist() == [6]


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        (TREE + PREDICT, "m.py:Tree, m.py:predict"),
        (TREE + "class Tuned(Tree): ...\n", "m.py:Tree, m.py:Tuned"),
        (TREE + "class _Own(Tree): ...\nclass Tuned(_Own): ...\n", "m.py:Tree, m.py:Tuned"),
        (TREE + "if True:\n    class Model:\n        def run(self): ...\n        predict = run\n", "m.py:Tree, m.py:Model"),
    ],
)
def test_a_file_that_may_mean_one_or_the_other_asks_which(tmp_path: Path, text: str, choice: str) -> None:
    (tmp_path / "m.py").write_text(text + HELPER)
    assert fault(str(tmp_path / "m.py")).endswith(f"which of {choice}? Name one, or mark one alone with `@gateway.model`")


def test_a_class_that_may_inherit_from_a_file_beside_it_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "base_of_guess.py").write_text(TREE)
    for start, base in {
        "from base_of_guess import Tree": "Tree",
        "from .base_of_guess import Tree as T": "T",
        "import base_of_guess as b": "b.Tree",
    }.items():
        (tmp_path / "m.py").write_text(f"{start}\nclass Own({base}): ...\nclass Tuned(Own): ...\n{HELPER}")
        assert "which of m.py:Own, m.py:Tuned, m.py:helper?" in fault(str(tmp_path / "m.py"))
    (tmp_path / "m.py").write_text(f"from argparse import Action\nclass Own(Action): ...\n{HELPER}")
    assert model(str(tmp_path / "m.py"))["backends"][0]["model"].endswith(":helper")


def test_a_tokeniser_of_its_natural_form_gives_as_many_numbers_as_its_text_has(tmp_path: Path) -> None:
    (tmp_path / "tok.py").write_text("def predict(text: str) -> list[int]:\n    return [len(word) for word in text.split()]\n")
    found = guess(str(tmp_path / "tok.py"))
    assert found.document["models"][0]["outputs"] == [{"name": "output", "datatype": "INT64", "shape": [-1, -1]}]
    assert "each request runs alone" in found.notes[0]
    with gateway.load(str(tmp_path / "tok.py")) as model:
        assert model.predict({"text": ["one word"]})["output"].tolist() == [[3, 4]]
        with pytest.raises(gateway.GatewayError, match="other sizes for one row than for another: send one row a request"):
            model.predict({"text": ["one word", "one"]})


FUNCTIONS = """
from functools import wraps
import numpy as np

def kept(function):
    @wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner

def by_keyword(*, x: float) -> float:
    return 2 * x

@kept
def wrapped(x: float) -> float:
    return 2 * x

def any_names(**inputs):
    return {"output": inputs["x"] * 2}
any_names.example = {"x": np.ones(2)}
"""


@pytest.mark.parametrize("name", ["by_keyword", "wrapped", "any_names"])
def test_a_function_that_takes_inputs_is_no_factory_however_it_takes_them(tmp_path: Path, name: str) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    served = model(f"{tmp_path}/functions.py:{name}")
    assert (served["backends"][0]["kind"], served["inputs"]) == ("python", [tensor("x", "FP64", -1)])
    with gateway.load(f"{tmp_path}/functions.py:{name}") as loaded:
        assert loaded.predict({"x": [1, 2]})["output"].tolist() == [2, 4]


def test_parameters_that_keep_their_defaults_are_noted(tmp_path: Path) -> None:
    for outputs in ("-> str", ""):
        (tmp_path / "many.py").write_text(f"def predict(text: str, n: int = 2, end='') {outputs}:\n    return text * n + end\n")
        found = guess(str(tmp_path / "many.py"))
        assert found.document["models"][0]["inputs"] == [tensor("text", "BYTES", -1)]
        assert found.notes == ("many: no inputs, as they have a default: n, end",)


HINTS_OF_NO_TENSOR = """
from datetime import date
from functools import partial

class Asked: ...

class OfTexts:
    def predict(self, texts: list[str]) -> list[str]:
        return texts

def of_maybe(text: str | None, day: date) -> str: ...

class OfDefaults:
    def predict(self, text: str = "an example", n: int = 1, other=None) -> str: ...

def of_asked(asked: Asked) -> int: ...

def unread(x: "Absent"): ...

bound = partial(lambda x, y: x, y=1)
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("OfTexts", "the hint of texts, list[str], is of no tensor"),
        ("of_maybe", "the hint of text, str | None, is of no tensor; the hint of day, datetime.date, is of no tensor"),
        ("of_asked", "the hint of asked, Asked, is of no tensor"),
        ("OfDefaults", "text has a default, so it is no input (leave the default out); n has a default"),
        ("bound", "nothing says its inputs"),
        ("unread", "its type hints cannot be read (NameError: name 'Absent' is not defined)"),
    ],
)
def test_a_hint_that_is_of_no_tensor_is_named(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "hints.py").write_text(HINTS_OF_NO_TENSOR)
    place = f"{tmp_path / 'hints.py'}:{name}"
    said = fault(place)
    assert said.startswith(f"{place}: {words}")
    assert ": give `predict` type hints, such as `x: Annotated" in said


def test_code_that_does_not_say_enough_is_told_what_to_write(code: Path) -> None:
    assert "nothing says its inputs: give `predict` type hints, such as `x: Annotated" in fault(f"{code}:Unsaid")
    assert "the type hint of x says no shape: write one, such as `x: Annotated" in fault(f"{code}:shapeless")
    assert "it fails on ones (x [2, 4]): ValueError: no ones" in fault(f"{code}:fails")
    assert "expected a class with a method `predict(inputs)`, or a function, got int" in fault(f"{code}:NUMBER")
    assert "has no 'nothing'; it has Scaled, ByHints, ByExample, Unsaid, area, lengths, " in fault(f"{code}:nothing")
    assert "has no 'scaled'; did you mean `Scaled`?" in fault(f"{code}:scaled")
    assert fault(f"{code}:Exits") == f"{code}:Exits: raised SystemExit: no licence ({code}:35)"
    assert ": which of mine.py:Scaled, mine.py:ByHints, mine.py:ByExample, mine.py:Unsaid, mine.py:Exits? " in fault(str(code))


@pytest.mark.parametrize(
    ("returned", "given"), [("Out", "Out(x, 1)"), ("'Out'", "Out(x, 1)"), ("object", "Out(x, 1)"), ("object", "[None, x]")]
)
def test_what_is_neither_number_nor_text_is_no_output(tmp_path: Path, returned: str, given: str) -> None:
    (tmp_path / "m.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Out:\n    a: float\n    b: int\n"
        f"def predict(x: float) -> {returned}: return {given}\n"
    )
    with pytest.raises(ConfigError, match=r"'output' is of (Out|NoneType), .*: expected numbers or texts; .* TypedDict"):
        guess(str(tmp_path / "m.py"))


def test_a_file_that_is_not_there_is_named_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert fault("model.onnx").startswith(f"{tmp_path}/model.onnx: no such file; expected an .onnx")
    (tmp_path / "models.py").touch()
    assert fault("model.py:Model") == f"{tmp_path}/model.py: no such file; did you mean `models.py`, which is there?"
    assert (
        fault("models.py:")
        == "models.py:: no name behind the colon: expected models.py:Class, models.py:function, or models.py"
    )
    (tmp_path / "model.onnx").symlink_to("gone.onnx")
    assert fault("model.onnx").startswith(f"{tmp_path}/model.onnx: a link to gone.onnx, which is not there; expected an .onnx")


def test_a_file_that_is_not_python_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "typo.py").write_text("import os\ndef predict(x)\n    return x\n")
    assert fault(f"{tmp_path}/typo.py") == f"{tmp_path}/typo.py:2: not Python: expected ':'; correct that line"


@pytest.mark.parametrize("url", ["https://example.com/m.onnx", "s3://b/m.onnx", "s3://b/gateway.yaml", "file:///report.json"])
@pytest.mark.parametrize("command", ["serve", "init", "check", "compile", "package", "deploy kubernetes"])
def test_a_url_is_no_path_on_this_machine(command: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    needed = ["--image", "i", "--models", "image:/m"] if command == "deploy kubernetes" else []
    assert main([*command.split(), url, *needed]) == 2
    told, *_ = capsys.readouterr().err.splitlines()
    assert told == f"{url}: expected a path on this machine; download it, and name the file or folder"


def test_no_name_is_not_the_folder_that_it_was_started_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gateway.yaml").write_text("models: [{name: m, backends: [{kind: synthetic}]}]")
    assert not is_configuration("")
    assert fault("").startswith("MODEL: '': expected an .onnx")


def test_a_file_that_is_no_model_is_named_for_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    assert fault(f"{tmp_path}/weights.safetensors").startswith(
        f"{tmp_path}/weights.safetensors: weights (safetensors) without the code of a model: serve FILE.py:make, a function "
    )


def test_a_configuration_of_another_name_is_told_what_to_be_called(tmp_path: Path) -> None:
    (tmp_path / "gateway.conf").write_text("models: []")
    assert fault(f"{tmp_path}/gateway.conf").endswith("; the name of a configuration ends in .yaml")


def test_an_example_is_a_request_or_arrays(code: Path, tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    tensors = [{**tensor("x", "FP32", 1, 2), "data": [[1, 2]]}, {**tensor("t", "BYTES", 1), "data": ["ü"]}]
    request.write_text(json.dumps({"inputs": tensors}), encoding="utf-8-sig")  # as some editors write it
    found = read_example(request)
    assert (found["x"].tolist(), found["x"].dtype, found["t"].tolist()) == ([[1, 2]], np.float32, ["ü".encode()])
    np.savez(tmp_path / "request.npz", x=np.ones((2, 3), np.float32))
    served = model(f"{code}:Unsaid", example=tmp_path / "request.npz")
    assert (served["inputs"], served["outputs"]) == ([tensor("x", "FP32", -1, 3)], [tensor("x", "FP32", -1, 3)])
    request.write_text('{"x": [["red", 3, 0.5]]}')
    assert model(f"{code}:Unsaid", example=request)["inputs"] == [tensor("x", "BYTES", -1, 3)]
    request.write_text('{"x": [["red", null]]}')
    assert "x: neither numbers nor text" in fault(f"{code}:Unsaid", example=request)
    request.write_text('{"inputs": [{"name": "x", "datatype": "F32", "shape": [1], "data": [1]}]}')
    assert "request.json: no example (ValueError: datatype 'F32' is none of BOOL" in fault(f"{code}:Unsaid", example=request)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("numbers.json", b'{"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": [1]}]}', "AttributeError"),
        ("large.json", b'{"inputs": [{"name": "x", "datatype": "UINT8", "shape": [1], "data": [300]}]}', "300"),
        ("deep.json", b"[" * 100_000, "RecursionError"),
        ("empty.npz", b"", "EOFError"),
        ("cut.npz", b"PK\x03\x04cut", "BadZipFile"),
    ],
)
def test_a_file_that_is_no_example_is_told_with_what_one_is(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_example(tmp_path / name)
    assert caught.value.message.startswith(f"{tmp_path / name}: no example (")
    assert told in caught.value.message
    assert 'expected a request, {"inputs": [' in caught.value.message


def test_an_example_that_is_not_there_is_no_file(code: Path, tmp_path: Path) -> None:
    assert fault(f"{code}:Unsaid", example=tmp_path / "no.json") == (
        f"{tmp_path}/no.json: no such file; expected one request, as the example"
    )


def test_what_is_written_is_a_configuration_that_says_the_same(code: Path, tmp_path: Path) -> None:
    found = guess(f"{code}:ByExample")
    folder = tmp_path / "configs"
    folder.mkdir()
    text = written(found, folder)
    assert text.startswith(
        "# mine: sizes are those of the example: write -1 for those that may differ between requests\nmodels:\n"
    )
    assert "      - {name: x, datatype: FP32, shape: [-1, 3]}\n" in text
    assert "      - {kind: python, model: '../mine.py:ByExample'}\n" in text
    (folder / "gateway.yaml").write_text(text)
    assert load_config(folder / "gateway.yaml") == parse_config(found.document, source="guess")


def test_check_finds_no_fault_in_what_is_written(code: Path, tmp_path: Path) -> None:
    triton_model(tmp_path / "repository" / "scaled", PBTXT, v1="model.py")
    for what in (f"{code}:ByExample", f"{code}:area", str(tmp_path / "repository")):
        (tmp_path / "gateway.yaml").write_text(written(guess(what), tmp_path))
        assert check(tmp_path / "gateway.yaml").faults == ()


def test_a_name_that_ends_like_yaml_is_a_configuration() -> None:
    assert [is_configuration(name) for name in ("a.yaml", "A.YML", "-", "a.onnx", "a.py:yaml")] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_two_files_of_one_name_are_both_told_before_anything_is_loaded(tmp_path: Path) -> None:
    for name in ("net.onnx", "net.ort"):
        (tmp_path / name).write_bytes(b"\x08\x07\x12\x16which cannot be loaded")
    assert fault(str(tmp_path)) == (
        f"{tmp_path}/net.ort: a second model named 'net', beside net.onnx: rename one of them or move it away"
    )


def test_what_is_written_repeats_what_is_alike(code: Path, tmp_path: Path) -> None:
    found = guess(f"{code}:Scaled")
    found.document["models"].append(found.document["models"][0])
    text = written(found, tmp_path)
    assert "&" not in text
    assert text.count("[-1, 2]") == 4


def test_a_folder_is_its_models_and_what_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "area.py").write_text("def predict(width: float) -> float:\n    return width\n")
    (tmp_path / "scale.py").write_text("class Scale:\n    def predict(self, x: float) -> float:\n        return x\n")
    (tmp_path / "shared.py").write_text("from area import predict\ndef other():\n    pass\n")
    (tmp_path / "data.pkl").write_bytes(b"\x80\x04.")
    (tmp_path / "scale.pkl").write_bytes(b"\x80\x04.")  # which scale.py loads
    (tmp_path / "README.md").write_text("these are my models")
    (tmp_path / "old").mkdir()
    (tmp_path / "__pycache__").mkdir()
    found = guess(str(tmp_path))
    assert [entry["name"] for entry in found.document["models"]] == ["area", "scale"]
    assert [note.partition(":")[0] for note in found.notes] == [
        "data.pkl is left aside, it is a pickle",
        "left aside, without a class with `predict` or a `predict` of their own",
        "left aside, folders",
    ]
    assert "shared.py;" in found.notes[1]
    assert "old/;" in found.notes[2]
    (tmp_path / "area.py").unlink()
    (tmp_path / "scale.py").unlink()
    assert fault(str(tmp_path)).splitlines()[0].startswith(f"{tmp_path}: no model in this folder")


def test_a_damaged_model_in_a_folder_is_a_fault_and_not_left_aside(tmp_path: Path) -> None:
    (tmp_path / "area.py").write_text("def predict(width: float) -> float:\n    return width\n")
    (tmp_path / "net.onnx").write_text("version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "LICENSE").touch()
    assert fault(str(tmp_path)) == (
        f"{tmp_path}/net.onnx: a pointer of Git LFS, not the file itself: `git lfs pull` brings the file"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "max_rows", "told"),
    [(["n", 4], 32, None), ([1, 4], 1, "every row runs alone"), ([2, 4], 0, "each request runs alone and has exactly that")],
)
def test_an_onnx_file_says_its_tensors_and_whether_it_takes_batches(
    tmp_path: Path, shape: list[Any], max_rows: int, told: str | None
) -> None:
    path = onnx_file(tmp_path / "net.onnx", shape)
    found = guess(str(path))
    rows = -1 if max_rows else 2
    assert found.document["models"] == [
        {
            "name": "net", "inputs": [tensor("x", "FP32", rows, 4)], "outputs": [tensor("y", "FP32", rows, 3)],
            "max_rows": max_rows, "backends": [{"kind": "onnxruntime", "model": str(path)}],
        }
    ]  # fmt: skip
    assert [told in note for note in found.notes] == ([True] if told else [])


def test_a_file_of_onnx_runtimes_own_format_is_served_like_its_onnx_file(tmp_path: Path) -> None:
    library = pytest.importorskip("onnxruntime")
    source, path = onnx_file(tmp_path / "net.onnx", ["n", 4]), tmp_path / "net.ort"
    options = library.SessionOptions()
    options.optimized_model_filepath = str(path)
    options.add_session_config_entry("session.save_model_format", "ORT")
    library.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    assert model(str(path)) == model(str(source)) | {"backends": [{"kind": "onnxruntime", "model": str(path)}]}
    (tmp_path / "gateway.yaml").write_text(written(guess(str(path)), tmp_path))
    assert check(tmp_path / "gateway.yaml").faults == ()


def onnx_graph(path: Path, nodes: list[tuple[str, list[str], list[str]]], **constants: Any) -> Path:
    """A file with one input and one output, x and y, both [n, m]."""
    onnx = pytest.importorskip("onnx")
    tensors = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", "m"]) for name in ("x", "y")]
    weights = [onnx.numpy_helper.from_array(np.array(value), name) for name, value in constants.items()]
    graph = onnx.helper.make_graph([onnx.helper.make_node(*node) for node in nodes], "g", tensors[:1], tensors[1:], weights)
    opset = [onnx.helper.make_opsetid("", 18)]
    onnx.save(onnx.helper.make_model(graph, ir_version=10, opset_imports=opset), str(path))
    return path


def test_an_onnx_file_with_time_in_front_runs_each_request_alone(tmp_path: Path) -> None:
    path = onnx_graph(tmp_path / "sums.onnx", [("CumSum", ["x", "axis"], ["y"])], axis=0)
    found = guess(str(path))
    assert found.document["models"][0]["max_rows"] == 0
    assert found.notes == (
        "sums: the other rows of a batch change a row's answer in 'y', so each request runs alone and whole; "
        "if you know that its rows are independent, set max_rows: 32",
    )


def test_an_onnx_file_that_gives_a_tensor_twice_has_it_listed_once(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    path = onnx_graph(tmp_path / "twice.onnx", [("Neg", ["x"], ["y"])])
    file = onnx.load(str(path))
    file.graph.output.append(file.graph.output[0])
    onnx.save(file, str(path))
    found = guess(str(path))
    assert [tensor["name"] for tensor in found.document["models"][0]["outputs"]] == ["y"]
    assert found.notes == ("twice: the file gives 'y' more than once, which is listed once",)
    (tmp_path / "gateway.yaml").write_text(written(found, tmp_path))
    assert check(tmp_path / "gateway.yaml").faults == ()
    with gateway.load(str(path)) as served:
        assert served.predict({"x": np.ones((1, 2), np.float32)})["y"].tolist() == [[-1, -1]]


def test_an_onnx_file_that_states_one_row_of_an_output_and_gives_more_is_served_in_batches(tmp_path: Path) -> None:
    helper = pytest.importorskip("onnx").helper
    path = tmp_path / "label.onnx"
    x, label = helper.make_tensor_value_info("x", 1, ["n", 4]), helper.make_tensor_value_info("label", 7, [1])
    graph = helper.make_graph([helper.make_node("ArgMax", ["x"], ["label"], axis=1, keepdims=0)], "g", [x], [label])
    path.write_bytes(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)]).SerializeToString())
    found = guess(str(path))
    assert found.notes == (
        "label: the file says that the first dimension of 'label' is 1, but it is seen to be that of the inputs",
    )
    (tmp_path / "gateway.yaml").write_text(written(found, tmp_path))
    assert check(tmp_path / "gateway.yaml").faults == ()
    with gateway.load(str(path)) as loaded:
        assert loaded.predict({"x": np.eye(3, 4, dtype=np.float32)})["label"].tolist() == [0, 1, 2]


def test_an_onnx_file_that_is_quantised_by_the_range_of_its_batch_is_served_in_batches(tmp_path: Path) -> None:
    quantise = ("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"])
    path = onnx_graph(tmp_path / "int8.onnx", [quantise, ("DequantizeLinear", ["q", "scale", "zero"], ["y"])])
    assert model(str(path))["max_rows"] == 32


def test_what_an_onnx_file_does_not_take_is_not_told_by_onnx_runtime(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = onnx_graph(tmp_path / "fives.onnx", [("Reshape", ["x", "shape"], ["y"])], shape=[-1, 5])
    assert model(str(path))["max_rows"] == 32
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_pytorch_file_with_time_in_front_runs_each_request_alone(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Sums(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x.cumsum(0)

    dims = {0: torch.export.Dim("time"), 1: torch.export.Dim("row")}
    torch.export.save(torch.export.export(Sums(), (torch.ones(3, 2),), dynamic_shapes=(dims,)), tmp_path / "sums.pt2")
    torch.jit.trace(Sums(), torch.ones(3, 2)).save(str(tmp_path / "traced.pt"))
    for name in ("sums.pt2", "traced.pt"):
        found = guess(str(tmp_path / name))
        assert found.document["models"][0]["max_rows"] == 0
        assert "so each request runs alone" in found.notes[0]


def onnx_file(path: Path, shape: list[Any]) -> Path:
    """y = x @ ones(4, 3)"""
    onnx = pytest.importorskip("onnx")
    floats = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [onnx.helper.make_tensor_value_info("x", floats, shape)],
        [onnx.helper.make_tensor_value_info("y", floats, [shape[0], 3])],
        [onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "w")],
    )
    opset = [onnx.helper.make_opsetid("", 18)]
    onnx.save(onnx.helper.make_model(graph, ir_version=10, opset_imports=opset), str(path))
    return path


@pytest.mark.slow
def test_pytorch_models_say_what_they_can_and_ask_for_the_rest(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(4, 3).eval()
    rows = torch.export.Dim("rows")
    for name, dims in (("open", ({0: rows},)), ("fixed", None)):
        program = torch.export.export(module, (torch.ones(2 if dims else 1, 4),), dynamic_shapes=dims)
        torch.export.save(program, tmp_path / f"{name}.pt2")
    torch.jit.script(module).save(str(tmp_path / "script.pt"))
    torch.jit.trace(module, torch.ones(1, 4)).save(str(tmp_path / "traced.pt"))
    served = model(f"{tmp_path}/traced.pt")
    assert (served["inputs"], served["max_rows"]) == ([tensor("input", "FP32", -1, 4)], 32)
    for name, max_rows in (("open", 32), ("fixed", 1)):
        served = model(f"{tmp_path}/{name}.pt2")
        assert (served["inputs"], served["outputs"]) == ([tensor("input", "FP32", -1, 4)], [tensor("output", "FP32", -1, 3)])
        assert served["max_rows"] == max_rows
    assert "script.pt: the model does not say what its inputs are (input): give one request" in fault(f"{tmp_path}/script.pt")
    assert "import.cpp" not in capfd.readouterr().err  # where PyTorch warns of shapes that were not stored
    np.savez(tmp_path / "script.example.npz", input=np.ones((1, 4), np.float32))
    served = model(f"{tmp_path}/script.pt")
    assert (served["inputs"], served["outputs"], served["max_rows"]) == (
        [tensor("input", "FP32", -1, 4)], [tensor("output", "FP32", -1, 3)], 32,
    )  # fmt: skip
    np.savez(tmp_path / "wrong.npz", x=np.ones((1, 4), np.float32))
    assert "the example has x, but the inputs are input" in fault(f"{tmp_path}/script.pt", example=tmp_path / "wrong.npz")
    (tmp_path / "factory.py").write_text(
        "import numpy as np\n"
        "def make():\n    import torch\n    return torch.nn.Linear(4, 3)\n"
        "make.example = {'input': np.ones((1, 4), np.float32)}\n"
    )
    served = model(f"{tmp_path}/factory.py:make")
    assert (served["backends"][0]["kind"], served["max_rows"]) == ("torch", 32)
    (tmp_path / "in_file.py").write_text(
        "import numpy as np\n"
        "example = {'input': np.ones((1, 4), np.float32)}\n"
        "def make():\n    import torch\n    return torch.nn.Linear(4, 3)\n"
    )
    assert model(f"{tmp_path}/in_file.py:make")["max_rows"] == 32
    (note,) = guess(f"{tmp_path}/traced.pt").notes
    assert note == "traced: sizes are those that it was traced on: write -1 for those that may differ between requests"


FACTORIES = """
def single():
    import torch
    return torch.nn.Linear(2, 1)

def double():
    return single().double()

def half():
    return single().bfloat16()

def without_weights():
    import torch
    return torch.nn.ReLU()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "datatype"), [("single", "FP32"), ("double", "FP64"), ("half", "BF16"), ("without_weights", "FP32")]
)
def test_decimals_of_an_example_are_for_a_pytorch_model_as_its_weights_are(tmp_path: Path, name: str, datatype: str) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "factories.py").write_text(FACTORIES)
    (tmp_path / "factories.example.json").write_text('{"input": [[0.5, 1]]}')
    factory = f"{tmp_path}/factories.py:{name}"
    for found in (model(factory), model(factory, example={"input": [[0.5, 1]]})):
        assert (found["inputs"][0]["datatype"], found["outputs"][0]["datatype"]) == (datatype, datatype)
    script = tmp_path / "script.pt"
    torch.jit.script(torch.nn.Linear(2, 1)).save(script)
    assert model(str(script), example={"input": [[0.5, 1]]})["inputs"] == [tensor("input", "FP32", -1, 2)]
    wrong = {"input": np.ones((1, 2))}  # which says its datatype
    assert fault(str(script), example=wrong).startswith(
        f"{script}: it fails on the example (input float64 [1, 2]): RuntimeError: mat1 and mat2 must have the same dtype"
    )


PBTXT = """
name: "scaled"
backend: "python"
max_batch_size: 8
input [{ name: "x" data_type: TYPE_FP32 dims: [4] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [4] label_filename: "labels.txt" }]
instance_group [{ count: 2 kind: KIND_CPU }]
dynamic_batching { max_queue_delay_microseconds: 100 }
parameters: { key: "factor" value: { string_value: "3" } }
"""

MODEL_PY = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.factor = float(config["parameters"]["factor"]["string_value"])
        self.dtype = pb_utils.triton_string_to_numpy(pb_utils.get_output_config_by_name(config, "y")["data_type"])

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            if (x < 0).any():
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("negative")))
                continue
            tensor = pb_utils.Tensor("y", (x * self.factor).astype(self.dtype))
            responses.append(pb_utils.InferenceResponse(output_tensors=[tensor]))
        return responses
"""


def triton_model(folder: Path, pbtxt: str, **versions: str) -> Path:
    for version, file in versions.items():
        path = folder / version.removeprefix("v") / file
        path.parent.mkdir(parents=True)
        path.write_text(MODEL_PY)
    (folder / "config.pbtxt").write_text(pbtxt)
    (folder / "labels.txt").write_text("cat\ndog\n")
    return folder


def test_a_triton_repository_is_read_with_its_versions(tmp_path: Path) -> None:
    triton_model(tmp_path / "scaled", PBTXT, v1="model.py", v2="model.py")
    triton_model(
        tmp_path / "net",
        'platform: "pytorch_libtorch" version_policy { all {} }\n'
        'input [{ name: "INPUT__1" data_type: TYPE_INT64 dims: [2] }]\n'
        'input [{ name: "INPUT__0" data_type: TYPE_STRING dims: [-1, 3] }]\n'
        'output [{ name: "OUTPUT__0" data_type: TYPE_BOOL dims: [2] }]\ninstance_group [{ kind: KIND_GPU }]',
        v1="model.pt",
        v3="model.pt",
    )
    (tmp_path / "notes").mkdir()
    found = guess(str(tmp_path))
    parse_config(found.document, source="guess")
    first, third, scaled = found.document["models"]
    assert scaled == {
        "name": "scaled", "version": "2", "inputs": [tensor("x", "FP32", -1, 4)],
        "outputs": [{**tensor("y", "FP32", -1, 4), "labels": ["cat", "dog"]}], "max_rows": 8,
        "backends": [{"kind": "python", "model": f"{tmp_path}/scaled/2/model.py:TritonPythonModel", "sessions": 2}],
    }  # fmt: skip
    assert (first["name"], first.get("version"), third["version"], first["max_rows"]) == ("net", None, "3", 0)
    assert first["inputs"] == [tensor("INPUT__0", "BYTES", -1, 3), tensor("INPUT__1", "INT64", 2)]
    assert first["backends"] == [
        {"kind": "torch", "device": "cuda", "model": f"{tmp_path}/net/1/model.pt", "output_indices": [0]}
    ]
    assert [note.partition(":")[0] for note in found.notes] == [
        f"{tmp_path}/notes is left aside",
        "scaled",
    ]


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("a\u2028b\nc\x85\x0cd\n", ["a\u2028b", "c\x85\x0cd"]),
        ("a\r\nb\r\n", ["a", "b"]),
        ("a\n\nc", ["a", "", "c"]),
        ("a\n\n", ["a", ""]),
        ("", []),
    ],
)
def test_a_label_of_triton_ends_where_its_line_does(tmp_path: Path, text: str, labels: list[str]) -> None:
    folder = triton_model(tmp_path / "scaled", PBTXT, v1="model.py")
    (folder / "labels.txt").write_bytes(text.encode())
    assert model(str(folder))["outputs"][0].get("labels") == labels


@pytest.mark.slow
def test_a_triton_model_of_pytorch_gets_inputs_by_the_names_of_its_arguments(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Less(torch.nn.Module):
        def forward(
            self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None, d: torch.Tensor | None = None
        ) -> torch.Tensor:
            b = b if c is None else b * c
            return a - b if d is None else a - b - d

    def repository(*inputs: str, output: str = "y") -> str:
        listed = [
            f'{{ name: "{name}" data_type: TYPE_FP32 dims: [ 2 ] optional: {str(name == "c").lower()} }}' for name in inputs
        ]
        given = f'output [{{ name: "{output}" data_type: TYPE_FP32 dims: [2] }}]'
        pbtxt = f'platform: "pytorch_libtorch" input [{", ".join(listed)}] {given}'
        (tmp_path / "less" / "config.pbtxt").write_text(pbtxt)
        return str(tmp_path)

    (tmp_path / "less" / "1").mkdir(parents=True)
    torch.jit.script(Less()).save(str(tmp_path / "less/1/model.pt"))
    with gateway.load(repository("b", "a")) as less:
        assert less.predict({"a": [10.0, 10.0], "b": [1.0, 1.0]})["y"].tolist() == [9.0, 9.0]
    assert [each["name"] for each in model(repository("c", "b", "a"))["inputs"]] == ["a", "b", "c"]
    assert [each["name"] for each in model(repository("second", "first"))["inputs"]] == ["second", "first"]
    with gateway.load(repository("d", "b", "a")) as less:
        assert less.predict({"a": [10.0, 10.0], "b": [1.0, 1.0], "d": [2.0, 2.0]})["y"].tolist() == [7.0, 7.0]
    assert "config.pbtxt: input: 'b': missing, which `forward(a, b, c, d)` of " in fault(repository("c", "a"))
    assert "takes before 'c': state it" in fault(repository("c", "a"))
    assert [each["name"] for each in model(repository("x__1", "x__0"))["inputs"]] == ["x__0", "x__1"]
    assert "input: x__1, x__3: expected the places of the arguments, 0 to 1, at the" in fault(repository("x__1", "x__3"))
    assert "output_indices" not in model(repository("a", "b"))["backends"][0]
    folder = repository("a", "b", output="y__0")
    assert model(folder)["backends"][0]["output_indices"] == [0]
    assert "output_indices: [0]}" in written(guess(folder), tmp_path)
    with (tmp_path / "less" / "config.pbtxt").open("a") as file:
        file.write(" max_batch_size: 4")
    assert guess(folder).notes == ()  # its rows were tried


@pytest.mark.parametrize(
    ("pbtxt", "told"),
    [
        ('platform: "ensemble" ensemble_scheduling {}', "platform: 'ensemble': not supported: put the steps into one class"),
        ('backend: "tensorflow"', "backend: 'tensorflow': not one that is read here (onnxruntime, pytorch, "),
        ("backend: python", "config.pbtxt: not a model configuration of Triton: 1:10"),
        ('backend: "python"', "config.pbtxt: input, output: missing: state them"),
        ('backend: "python" max_batch_size: -1', "max_batch_size: -1: expected the most rows of a batch, or 0"),
        ('backend: "python" sequence_batching {}', "or serve it on Triton, whose clients call it directly"),
        ('platform: "pytorch_libtorch" model_transaction_policy { decoupled: true }',
         "decoupled: not supported: of the models that are read here only Python ones answer in parts"),
        ('backend: "onnxruntime"', "no file "),
        ('backend: "python" batch_input [{ kind: BATCH_ELEMENT_COUNT }]', "batch_input: not supported: compute it"),
        ('backend: "python" batch_output [{ target_name: ["y"] }]', "batch_output: not supported"),
        ('backend: "python" model_operations { op_library_filename: "ops.so" }', "model_operations: not supported"),
        ('backend: "python" model_repository_agents { agents [{ name: "decrypt" }] }', "model_repository_agents: not"),
        ('platform: "pytorch_libtorch" runtime: "model.py"', "runtime: 'model.py': not supported: name what makes the module"),
        ('platform: "pytorch_libtorch" input [{ name: "x" data_type: TYPE_FP32 dims: [-1] allow_ragged_batch: true }]',
         "x: allow_ragged_batch is not supported: a configuration's `ragged` pads requests"),
        ('backend: "python" input [{ name: "x" data_type: TYPE_INT32 dims: [1] is_shape_tensor: true }]',
         "x: is_shape_tensor is not supported"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_as_triton_does_is_refused_by_name(tmp_path: Path, pbtxt: str, told: str) -> None:
    triton_model(tmp_path / "m", pbtxt, v1="model.py")
    assert told in fault(str(tmp_path))
    assert told in fault(str(tmp_path / "m"))


TENSORS = """
input [{ name: "x" data_type: TYPE_FP32 dims: [4] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [4] }]
"""


@pytest.mark.parametrize(
    ("pbtxt", "told"),
    [
        ("", []),
        ("default_model_filename: 'model.pt' version_policy { latest { num_versions: 1 } }", []),
        ("dynamic_batching {}", ["dynamic_batching is left aside: batches are formed to the SLO (`slo`)"]),
        (
            "dynamic_batching { preferred_batch_size: [4] default_queue_policy { max_queue_size: 9 } priority_levels: 3 "
            "preserve_ordering: true }",
            [
                "dynamic_batching (preferred_batch_size, preserve_ordering, priority_levels, default_queue_policy) is left "
                "aside: batches are formed to the SLO (`slo`), each request is answered when it is done, a request's "
                "`priority` counts from 1 to 4, `batching.max_queue_rows` and a request's `timeout` bound the queue"
            ],
        ),
        (
            "optimization { cuda { graphs: true } input_pinned_memory { enable: true } }",
            [
                "optimization (cuda, input_pinned_memory) is left aside: a backend has `cuda_graphs` and `precision`; "
                "`kind: tensorrt` runs an ONNX file"
            ],
        ),
        (
            'model_warmup [{ name: "a" batch_size: 1 }]',
            ["model_warmup is left aside: every model is run before traffic, on inputs of ones"],
        ),
        (
            "response_cache { enable: true }",
            ["response_cache (enable) is left aside: every request is computed; cache at the client"],
        ),
        ("response_cache {}", []),
        (
            'metric_tags { key: "a" value: "b" }',
            ["metric_tags is left aside: metrics have the labels model, version and backend"],
        ),
        (
            'parameters { key: "INFERENCE_MODE" value { string_value: "true" } }',
            ["parameters (INFERENCE_MODE) is left aside: what tunes a backend are keys of it"],
        ),
        ('parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "2" } }', []),
        (
            'parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "0" } }',  # all cores
            ["parameters (INTRA_OP_THREAD_COUNT) is left aside: what tunes a backend are keys of it"],
        ),
        (
            'instance_group [{ rate_limiter { priority: 2 } host_policy: "numa" }]',
            ["instance_group (rate_limiter, host_policy) is left aside: `server.shared_workers` limits what runs at once"],
        ),
        (
            "instance_group [{ count: 300 }]",
            ["instance_group (count: 300) is left aside: a backend has 256 `sessions` at most, and gets them"],
        ),
        (
            "instance_group [{ kind: KIND_GPU gpus: [0, 1] }]",
            ["instance_group (gpus) is left aside: it is on one GPU here: write a backend for each, with `device: cuda:1`"],
        ),
    ],
)
def test_what_only_tunes_triton_is_told_with_what_to_use_here(tmp_path: Path, pbtxt: str, told: list[str]) -> None:
    triton_model(tmp_path / "m", f'platform: "pytorch_libtorch" {TENSORS} {pbtxt}', v1="model.pt")
    found = guess(str(tmp_path))
    parse_config(found.document, source="guess")
    assert list(found.notes) == [f"m: {note}" for note in told]


ALONE = "m: the other rows of a batch change a row's answer in 'y', so each request runs alone and whole; if you know that its "
UNTRIED = "m: its rows are taken to be independent, and not tried, as it "


def test_a_python_model_is_not_run_as_its_repository_is_read(tmp_path: Path) -> None:
    version = triton_model(tmp_path / "m", f'backend: "python" max_batch_size: 8 {TENSORS}', v1="model.py") / "1"
    (version / "model.py").write_text("raise SystemExit")
    found = guess(str(tmp_path))
    assert (found.document["models"][0]["max_rows"], found.notes) == (8, ())


@pytest.mark.parametrize(
    ("pbtxt", "max_rows", "told"),
    [
        ("max_batch_size: 8", 0, [ALONE + "rows are independent, set max_rows: 8"]),
        ("max_batch_size: 8 dynamic_batching {}", 8, []),
        (
            "max_batch_size: 3",
            3,
            [UNTRIED + "takes 3 at once, and four are tried; if they change each other's answers, set max_rows: 0"],
        ),
    ],
)
@pytest.mark.parametrize("platform", ["onnxruntime_onnx", pytest.param("pytorch_libtorch", marks=pytest.mark.slow)])
def test_files_that_triton_merges_no_requests_of_are_batched_only_where_rows_are_independent(
    tmp_path: Path, platform: str, pbtxt: str, max_rows: int, told: list[str]
) -> None:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    if platform == "onnxruntime_onnx":
        helper = pytest.importorskip("onnx").helper
        x, y = (helper.make_tensor_value_info(name, 1, ["n", 4]) for name in "xy")
        graph = helper.make_graph([helper.make_node("Softmax", ["x"], ["y"], axis=0)], "g", [x], [y])
        made = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
        (version / "model.onnx").write_bytes(made.SerializeToString())
    else:
        torch = pytest.importorskip("torch")
        torch.jit.script(torch.nn.Softmax(0)).save(str(version / "model.pt"))
    tensors = TENSORS.replace('"x"', '"input"') if platform == "pytorch_libtorch" else TENSORS
    (tmp_path / "m" / "config.pbtxt").write_text(f'platform: "{platform}" {pbtxt} {tensors}')
    found = guess(str(tmp_path))
    assert found.document["models"][0]["max_rows"] == max_rows
    assert [note for note in found.notes if "dynamic_batching is left" not in note] == told


def test_a_model_that_triton_would_put_on_a_gpu_is_told_to_be_on_the_cpu(tmp_path: Path) -> None:
    folder = triton_model(tmp_path / "m", f'platform: "pytorch_libtorch" {TENSORS}', v1="model.pt")
    assert read_model(folder, gpus=0)[1] == []
    assert read_model(folder, gpus=1)[1] == [
        "m: instance_group (KIND_AUTO) is left aside: without KIND_GPU it is on the CPU; `device: cuda` puts it on a GPU"
    ]


def test_a_size_that_no_configuration_may_state_is_told_of_the_file(tmp_path: Path) -> None:
    helper = pytest.importorskip("onnx").helper
    x, y = (helper.make_tensor_value_info(name, 1, ["n", 1 << 40]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    made = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    with pytest.raises(
        ConfigError, match=r"/m\.onnx: inputs\[0\]\.shape\[1\]: 1099511627776: expected a whole number from -1 to"
    ):
        guess(f"{tmp_path}/m.onnx")


@pytest.mark.parametrize(
    ("pbtxt", "fault"),
    [
        ('name: "a/b"', "name: 'a/b': expected 1 to 128 characters, none of them '/' or a control character"),
        (
            "max_batch_size: 2147483647 dynamic_batching {}",
            "max_batch_size: 2147483647: expected a whole number from 0 to 1048576",
        ),
        ('input [{ name: "x" data_type: TYPE_FP32 dims: [2] }]', "input[0].name: 'x': listed twice"),
        (
            'max_batch_size: 8 dynamic_batching {} input [{ name: "z" data_type: TYPE_FP32 dims: [2, -2] }]',
            "input[1].dims[1]: -2: expected a whole number from -1 to 2147483647",
        ),
        (
            'parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "99999" } }',
            "parameters (INTRA_OP_THREAD_COUNT): 99999: expected a whole number from 1 to 4096",
        ),
    ],
)
def test_what_no_configuration_may_say_is_told_by_the_fields_of_the_pbtxt(tmp_path: Path, pbtxt: str, fault: str) -> None:
    triton_model(tmp_path / "m", f'platform: "pytorch_libtorch" {TENSORS} {pbtxt}', v1="model.pt")
    with pytest.raises(ConfigError) as raised:
        guess(str(tmp_path))
    assert str(raised.value) == f"{tmp_path}/m/config.pbtxt: {fault}"


@pytest.mark.parametrize(
    ("pbtxt", "backend"),
    [
        ("instance_group [{ kind: KIND_GPU gpus: [1] count: 2 }]", {"device": "cuda:1", "sessions": 2}),
        ("instance_group [{ count: 2 }, { count: 3 passive: true }]", {"sessions": 2}),
        ('parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "2" } }', {"threads": 2}),
        ('parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "0" } }', {}),
    ],
)
def test_what_has_an_equal_here_is_served_with_it(tmp_path: Path, pbtxt: str, backend: dict[str, Any]) -> None:
    triton_model(tmp_path / "m", f'platform: "pytorch_libtorch" {TENSORS} {pbtxt}', v1="model.pt")
    (served,) = model(str(tmp_path))["backends"]
    assert served == {"kind": "torch", "model": f"{tmp_path}/m/1/model.pt", **backend}


def test_a_python_model_of_tritons_is_told_what_of_its_surroundings_is_not_there(tmp_path: Path) -> None:
    pbtxt = (
        PBTXT
        + 'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "env.tar.gz" } } instance_group [{ kind: KIND_GPU }]'
    )
    triton_model(tmp_path / "scaled", pbtxt, v1="model.py")
    assert list(guess(str(tmp_path)).notes)[1:] == [
        "scaled: instance_group (KIND_GPU) is left aside: `initialize` is told that it is on a CPU",
        "scaled: parameters (EXECUTION_ENV_PATH) is left aside: install what the model imports beside the gateway",
    ]


def test_a_model_of_tritons_python_backend_answers(tmp_path: Path) -> None:
    import backends
    from backends.base import ExecutionFailed

    triton_model(tmp_path / "scaled", PBTXT, v1="model.py")
    config = parse_config(guess(str(tmp_path)).document, source="guess").models[0]
    loaded = backends.load("python", config.backends[0].options(), config.declared())
    assert loaded.spec.reads_parameters
    session = loaded.open_session(0)
    assert session.run({"x": np.ones((2, 4), np.float32)}, {})["y"].tolist() == [[3] * 4] * 2
    with pytest.raises(ExecutionFailed, match=r"^negative$"):
        session.run({"x": -np.ones((2, 4), np.float32)}, {})
    session.close()
    loaded.close()


COMPLETES = """
    @staticmethod
    def auto_complete_config(config):
        said = config.as_dict()
        assert said["name"] == "m" and said["max_batch_size"] < 8
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [4]})
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [4]})
        if "w" not in [each["name"] for each in said["input"]]:
            config.add_input({"name": "w", "data_type": "TYPE_INT64", "dims": [-1], "optional": True})
        config.set_max_batch_size(8)
        config.set_dynamic_batching()
        config.set_model_transaction_policy({"decoupled": True})
        return config
"""


def completing(folder: Path, pbtxt: str | None, method: str = COMPLETES) -> Path:
    triton_model(folder, pbtxt or "", v1="model.py")
    (folder / "1" / "model.py").write_text(MODEL_PY + method)
    if pbtxt is None:
        (folder / "config.pbtxt").unlink()
    return folder


@pytest.mark.parametrize("pbtxt", [None, "", 'backend: "python" max_batch_size: 4', TENSORS])
def test_a_model_of_tritons_python_backend_completes_its_configuration(tmp_path: Path, pbtxt: str | None) -> None:
    import backends

    found = model(str(completing(tmp_path / "m", pbtxt)))
    assert found["inputs"] == [tensor("x", "FP32", -1, 4), {**tensor("w", "INT64", -1, -1), "optional": True}]
    assert found["outputs"] == [tensor("y", "FP32", -1, 4)]
    assert found["max_rows"] == 8
    config = parse_config({"models": [found]}, source="guess").models[0]
    loaded = backends.load("python", config.backends[0].options(), config.declared())
    assert loaded.spec.decoupled
    loaded.close()


def test_a_configuration_is_completed_also_by_a_class_of_a_file_beside(tmp_path: Path) -> None:
    version = completing(tmp_path / "m", TENSORS) / "1"
    (version / "model.py").rename(version / "inner.py")
    (version / "model.py").write_text("from inner import TritonPythonModel\n")
    assert model(str(tmp_path / "m"))["max_rows"] == 8


@pytest.mark.parametrize(
    ("pbtxt", "body", "told"),
    [
        (TENSORS, 'config.add_input({"name": "x", "data_type": "TYPE_FP64", "dims": [4]}); return config',
         "ValueError: add_input: 'x': data_type: got TYPE_FP64, the configuration says TYPE_FP32 ("),
        (TENSORS, 'config.add_output({"name": "y"}); return config', "add_output: 'y': got name, expected name, data_type,"),
        (TENSORS, 'import sys; sys.exit("needs a GPU")', "auto_complete_config raised SystemExit: needs a GPU ("),
        ("max_batch_size: 9", "config.set_max_batch_size(8)", "set_max_batch_size: got 8, the configuration says 9"),
        (TENSORS, "pass", "auto_complete_config: expected the ModelConfig that it was given, got NoneType"),
        (TENSORS, 'config.as_dict()["rows"] = 8; return config', "auto_complete_config: not a model configuration of Triton: "),
        ("", "return config", "input, output: missing: state them in a config.pbtxt, or by auto_complete_config in "),
    ],
)  # fmt: skip
def test_how_a_model_fails_to_complete_its_configuration_is_told(tmp_path: Path, pbtxt: str, body: str, told: str) -> None:
    method = f"    @staticmethod\n    def auto_complete_config(config): {body}\n"
    assert told in fault(str(completing(tmp_path / "m", pbtxt, method)))


@pytest.mark.parametrize("pbtxt", [None, 'backend: "onnxruntime"', f'backend: "onnxruntime" max_batch_size: 8 {TENSORS}'])
def test_an_onnx_model_of_triton_may_be_a_folder_with_its_weights(tmp_path: Path, pbtxt: str | None) -> None:
    onnx = pytest.importorskip("onnx")
    path = tmp_path / "m" / "1" / "model.onnx" / "model.onnx"
    path.parent.mkdir(parents=True)
    helper = onnx.helper
    weights = onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32) * 2, "w")
    x, y = (helper.make_tensor_value_info(name, 1, ["n", 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [weights])
    made = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])
    onnx.save(made, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    if pbtxt is not None:
        (tmp_path / "m" / "config.pbtxt").write_text(pbtxt)
    found = model(str(tmp_path / "m"))
    assert found["inputs"] == [tensor("x", "FP32", -1, 4)]
    assert found["outputs"] == [tensor("y", "FP32", -1, 4)]
    assert found["max_rows"] == (8 if pbtxt and "max_batch_size" in pbtxt else 32)
    with gateway.load(str(tmp_path / "m")) as loaded:
        assert loaded.predict({"x": [[1.0, 2.0, 3.0, 4.0]]})["y"].tolist() == [[2.0, 4.0, 6.0, 8.0]]


def test_a_decoupled_model_of_tritons_python_backend_is_read_as_one(tmp_path: Path) -> None:
    import backends

    triton_model(tmp_path / "scaled", PBTXT + "model_transaction_policy { decoupled: true }", v1="model.py")
    config = parse_config(guess(str(tmp_path)).document, source="guess").models[0]
    loaded = backends.load("python", config.backends[0].options(), config.declared())
    assert loaded.spec.decoupled
    loaded.close()


def test_the_written_configuration_is_yaml_without_surprises(code: Path) -> None:
    document = yaml.safe_load(written(guess(f"{code}:area"), code.parent))
    assert document["models"][0]["backends"] == [{"kind": "python", "model": "mine.py:area"}]


def test_a_file_whose_model_is_async_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("async def predict(x: float) -> float:\n    return x\n")
    with pytest.raises(ConfigError, match=r"waits\.py:predict: predict is async: write a plain function"):
        guess(str(tmp_path / "waits.py"))


def test_an_example_file_may_hold_the_elements_by_name(tmp_path: Path) -> None:
    (tmp_path / "free.py").write_text("def predict(x):\n    return x * 2\n")
    (tmp_path / "free.example.json").write_text('{"x": [[1.0, 2.0]]}')
    (model,) = guess(str(tmp_path / "free.py")).document["models"]
    assert model["inputs"] == [{"name": "x", "datatype": "FP64", "shape": [-1, 2]}]
    for text in ("[]", "{}", '{"x": [[1], [2, 3]]}', '{"x": null}'):
        (tmp_path / "free.example.json").write_text(text)
        with pytest.raises(ConfigError, match="no example"):
            guess(str(tmp_path / "free.py"))


def test_only_a_like_name_is_taken_for_the_one_that_was_meant(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(ConfigError, match=r"nothere\.py: no such file; there is only `train\.py`"):
        guess(str(tmp_path / "nothere.py"))
    with pytest.raises(ConfigError, match=r"did you mean `train\.py`"):
        guess(str(tmp_path / "trian.py"))
