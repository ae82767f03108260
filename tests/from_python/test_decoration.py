"""`@gateway.model`: what it leaves as it was, what it says, and which mistakes it tells at once."""

from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pytest

import gateway
from gateway.configuring.guess import guess
from tests.from_python.models import Letters, double


def test_what_is_marked_is_called_and_tested_as_before() -> None:
    assert double(np.ones((1, 2), np.float32)).tolist() == [[2, 2]]
    assert Letters().predict(np.array([[b"abc"]], object)).tolist() == [[3]]
    assert (double.__name__, Letters.__doc__) == ("double", "Counts them.")


def test_name_and_rows_are_as_it_says() -> None:
    (model,) = guess("tests.from_python.models:Letters").document["models"]
    assert (model["name"], model["max_rows"]) == ("letters", 8)
    assert [tensor["datatype"] for tensor in (*model["inputs"], *model["outputs"])] == ["BYTES", "INT64"]


def test_the_marked_one_of_a_file_needs_no_name(tmp_path: Path) -> None:
    code = """
from gateway import model, model as marked
import gateway
import gateway as gw
import gateway.testing
assigned = gateway.model

def helper(x: float) -> float:
    return x

class Unmarked:
    def predict(self, x: float) -> float:
        return x

def predict(x: float) -> float:
    return x

@{decorator}
def {name}(x: float) -> float:
    return helper(x)
"""
    named = 'gateway.model(name="three")'
    marks = {"one": "gateway.model", "two": "model", "any": named, "four": "gw.model", "six": "marked", "seven": "assigned"}
    for name, decorator in marks.items():
        (tmp_path / f"{name}.py").write_text(code.format(decorator=decorator, name=name))
        (found,) = guess(str(tmp_path / f"{name}.py")).document["models"]
        assert found["backends"][0]["model"] == f"{tmp_path}/{name}.py:{name}"
        assert found["name"] == ("three" if name == "any" else name)
    assert [found["name"] for found in guess(str(tmp_path)).document["models"]] == [
        "three",
        "four",
        "one",
        "seven",
        "six",
        "two",
    ]


def test_of_several_marked_ones_one_is_to_be_named(tmp_path: Path) -> None:
    marked = "import gateway\n" + "".join(f"@gateway.model\ndef {name}(x: float) -> float: return x\n" for name in "ab")
    (tmp_path / "both.py").write_text(marked)
    with pytest.raises(gateway.ConfigError, match=r"which of both.py:a, both.py:b\? Name one, or mark one alone with"):
        gateway.load(tmp_path / "both.py")


def test_hints_that_contradict_each_other_are_told_where_they_stand() -> None:
    with pytest.raises(gateway.ConfigError, match=r"@gateway\.model: .*mixed: parameters y take one row's value"):

        @gateway.model
        def mixed(x: Annotated[npt.NDArray[np.float32], (-1, 4)], y: float) -> float:
            return y


def test_what_is_neither_class_nor_function_is_refused() -> None:
    with pytest.raises(gateway.ConfigError, match="expected a class with a method `predict"):
        gateway.model(int)
    with pytest.raises(gateway.ConfigError, match=r"@gateway.model: .*expected a class"):
        gateway.model("model.onnx")  # type: ignore[type-var]  # the mistake


def test_a_subclass_is_marked_for_itself() -> None:
    from gateway.configuring.decoration import mark_of

    assert mark_of(type("Sub", (Letters,), {})).name is None
