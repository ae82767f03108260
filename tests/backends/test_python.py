"""What the python backend does beyond the contract."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import backends
from backends.base import ExecutionFailed, LoadFailed, ModelSpec, SessionLost, Tensors, TensorSpec, words_of

UNSTATED = ModelSpec("", (), (), 8)
STATED = ModelSpec("", (TensorSpec("x", "FP32", (-1,)),), (TensorSpec("y", "FP32", (-1,)),), 8)


class Scaled:
    inputs = (("x", "FP32", (-1,)),)
    outputs = (("y", "FP32", (-1,)),)

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor
        self.loaded = False

    def load(self) -> None:
        self.loaded = True

    def predict(self, inputs: Tensors, parameters: dict[str, Any]) -> Tensors:
        assert self.loaded
        return {"y": inputs["x"] * np.float32(parameters.get("factor", self.factor))}


class Unstated:
    def predict(self, inputs: Tensors) -> Any:
        if inputs["x"][0] == 1:
            raise ValueError("no ones")
        if inputs["x"][0] == 2:
            raise MemoryError("no twos")
        if inputs["x"][0] == 3:
            return [inputs["x"]]
        return {"y": inputs["x"]}


class Unloadable:
    inputs = outputs = (("x", "FP32", (-1,)),)

    def load(self) -> None:
        raise OSError("no weights")

    def predict(self, inputs: Tensors) -> Tensors:
        return inputs


def load(name: str, spec: ModelSpec = UNSTATED, **options: Any) -> backends.Model:
    return backends.load("python", {"model": f"{__file__}:{name}", "class_options": options}, spec)


def x(*values: float) -> Tensors:
    return {"x": np.array(values, np.float32)}


def test_the_class_states_its_tensors_and_gets_options_and_parameters() -> None:
    model = load("Scaled", factor=3.0)
    assert [tensor.name for tensor in (*model.spec.inputs, *model.spec.outputs)] == ["x", "y"]
    session = model.open_session(0)
    assert session.run(x(1, 2), {})["y"].tolist() == [3, 6]
    assert session.run(x(1, 2), {"factor": 10})["y"].tolist() == [10, 20]


def test_each_session_is_an_instance_that_is_closed_once(tmp_path: Path) -> None:
    file, log = tmp_path / "model.py", tmp_path / "log"
    file.write_text(
        "class Model:\n    def predict(self, inputs): return {'y': inputs['x']}\n"
        f"    def close(self):\n        with open({str(log)!r}, 'a') as log: log.write('closed ')\n"
    )
    model = backends.load("python", {"model": f"{file}:Model"}, STATED)
    for session in (model.open_session(0), model.open_session(1)):
        session.close()
        session.close()
    assert log.read_text() == "closed closed "


def test_tensors_that_nobody_states_are_asked_for() -> None:
    with pytest.raises(LoadFailed, match="set `inputs` of the model"):
        load("Unstated")


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (1, ExecutionFailed, r"ValueError: no ones \(.*test_python\.py:\d+\)"),
        (2, SessionLost, "no twos"),
        (3, ExecutionFailed, "expected a dict of arrays by output name, got list"),
    ],
)
def test_what_the_class_raises_is_told_with_its_line(value: float, error: type[Exception], message: str) -> None:
    session = load("Unstated", STATED).open_session(0)
    with pytest.raises(error, match=message):
        session.run(x(value), {})
    assert session.run(x(0, 5), {})["y"].tolist() == [0, 5]


def test_a_class_that_cannot_load_fails_the_opening() -> None:
    with pytest.raises(LoadFailed, match="OSError: no weights"):
        load("Unloadable").open_session(0)


def test_a_class_without_predict_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("class Model: pass")
    with pytest.raises(LoadFailed, match=r"expected a class with a method `predict\(inputs\)`"):
        backends.load("python", {"model": f"{tmp_path}/model.py:Model"}, STATED)


def test_a_file_that_fails_to_import_is_told_and_can_be_mended(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("import nothing_of_this_name")
    with pytest.raises(LoadFailed, match="nothing_of_this_name"):
        backends.load("python", {"model": f"{file}:Model"}, STATED)
    file.write_text("class Model:\n    def predict(self, inputs): return {'y': inputs['x']}")
    assert backends.load("python", {"model": f"{file}:Model"}, STATED).open_session(0).run(x(4), {})["y"].tolist() == [4]


@pytest.mark.parametrize("source", ["model.py", ":Model", "model:", "model:not-a-name"])
def test_what_names_no_code_is_refused(source: str) -> None:
    with pytest.raises(LoadFailed, match="expected `module:name` or"):
        backends.load("python", {"model": source}, STATED)


class Worded:
    """BYTES in and out, without a batch dimension."""

    inputs = (("x", "FP32", (-1,)),)
    outputs = (("text", "BYTES", (-1, 2)), ("fixed", "FP32", (3,)))

    def predict(self, inputs: Tensors) -> Any:
        case = int(inputs["x"][0])
        text = np.array([[b"a", "b"], ["ü", np.str_("d")]], object)
        fixed = np.zeros(3, np.float32)
        if case == 1:
            text = np.array([["a", "b"]])  # fixed-width text would lose what ends in NUL
        elif case == 2:
            text = np.array([[b"a", bytearray(b"b")]], object)
        elif case == 3:
            text = text.T[:1]  # a view that is not contiguous
        elif case == 4:
            fixed = fixed[:2]
        elif case == 5:
            text = np.empty((0, 2), object)
        elif case == 6:
            return {"text": text, "fixed": fixed, 7: fixed}
        return {"text": text, "fixed": fixed}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (1, "output 'text': expected BYTES, the model gave <U1"),
        (2, "output 'text': expected bytes or str in BYTES, the model gave bytearray"),
        (4, r"output 'fixed': expected shape \[3\], the model gave shape \[2\]"),
        (6, r"the model gave \['7'\] beside its outputs \['fixed', 'text'\]: declare or omit them"),
    ],
)
def test_outputs_of_a_model_without_a_batch_dimension_are_held_to_what_is_declared(case: int, message: str) -> None:
    session = load("Worded", ModelSpec("", (), (), 0)).open_session(0)
    with pytest.raises(ExecutionFailed, match=message):
        session.run(x(case), {})


@pytest.mark.parametrize(("case", "shape"), [(0, (2, 2)), (3, (1, 2)), (5, (0, 2))])
def test_text_may_be_bytes_or_str_in_any_layout(case: int, shape: tuple[int, ...]) -> None:
    session = load("Worded", ModelSpec("", (), (), 0)).open_session(0)
    assert session.run(x(case), {})["text"].shape == shape


class Wordless(Exception):
    def __str__(self) -> str:
        raise SystemExit("not even this")


@pytest.mark.parametrize(
    ("exc", "words"),
    [
        (ValueError("odd"), "ValueError: odd"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (ExecutionFailed("no"), "no"),
        (Wordless(), "Wordless: (its __str__ raised SystemExit)"),
        (ValueError("\ud800"), "ValueError: \\ud800"),
        (ExecutionFailed("x" * 2500), "x" * 2500),
        (ExecutionFailed("x" * 2501), "x" * 2000 + "… (cut, of 2501 characters)"),
    ],
)
def test_the_words_of_an_exception_can_be_sent_on(exc: BaseException, words: str) -> None:
    assert words_of(exc) == words


def test_the_log_has_more_of_a_message_that_was_cut(caplog: pytest.LogCaptureFixture) -> None:
    words_of(ValueError("x" * 10_000))
    (record,) = caplog.records
    assert record.getMessage().count("x") > 9_000
    words_of(ValueError("x" * 5_000_000))
    assert len(caplog.records[1].getMessage()) < 20_000
