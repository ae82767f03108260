"""Models of one process that have files of the same names beside their code: each computes with its own."""

import inspect
import json
import multiprocessing
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import backends
from backends.base import LoadFailed, ModelSpec, TensorSpec
from backends.model_folders import forget_code, path_without
from backends.source import load_object, made_from
from gateway.engine.session_process import ProcessModel

FLOAT = ModelSpec("", (TensorSpec("x", "FP32", (-1, 1)),), (TensorSpec("y", "FP32", (-1, 1)),), 4)
ONE = {"x": np.ones((1, 1), np.float32)}

CLASS = """
import helper
class Model:
    inputs, outputs = [("x", "FP32", (-1, 1))], [("y", "FP32", (-1, 1))]
    def predict(self, arrays):
        import late
        return {"y": arrays["x"] * helper.K + late.K}
"""
TRITON = """
import triton_python_backend_utils as pb_utils
import helper
class TritonPythonModel:
    def execute(self, requests):
        import late
        given = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x * helper.K + late.K)]) for x in given]
"""
TORCH = """
import torch
from helper import K
class Net(torch.nn.Module):
    def forward(self, x):
        import late
        return x * K + late.K
"""
FUNCTION = """
import numpy as np, numpy.typing as npt
from typing import Annotated
import helper
Rows = Annotated[npt.NDArray[np.float32], (-1, 1)]
def predict(x: Rows) -> Rows:
    import late
    return x * helper.K + late.K
"""
HANDLERS = """
from helper import K
def model_fn(model_dir): return K
def input_fn(body, content_type): return float(body)
def predict_fn(data, model):
    import late
    return data * model + late.K
def output_fn(prediction, accept): return str(prediction)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    forget_code(tmp_path)


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def two(folder: Path, files: Callable[[str], dict[str, str]]) -> list[Path]:
    return [write(folder / each / "1", files(each)) for each in "ab"]


def run(model: str, spec: ModelSpec | None = None) -> float:
    session = backends.load("python", {"model": model}, spec).open_session(0)
    try:
        (answer,) = session.run(ONE, {}).values()
        return float(answer.item())
    finally:
        session.close()


def read_and_run(model: str) -> float:
    backends.read("python", model)
    return run(model)


def handled(model: str) -> float:
    session = backends.load("python", {"model": model}, ModelSpec("", (), (), 0)).open_session(0)
    given = {"body": b"1", "content_type": b"text/plain", "accept": b""}
    return float(session.run({name: np.array([value], object) for name, value in given.items()}, {})["body"].item())


def built(model: str) -> float:
    import torch

    return float(made_from(model, {}, key="build.options")(torch.ones(1, 1)).item())


WAYS: dict[str, tuple[str, str, Callable[[str], float]]] = {
    "class": (CLASS, "Model", run),
    "function": (FUNCTION, "predict", read_and_run),
    "triton": (TRITON, "TritonPythonModel", lambda model: run(model, FLOAT)),
    "sagemaker": (HANDLERS, "SageMakerHandlers", handled),
    "torch": (TORCH, "Net", built),
}


@pytest.mark.parametrize("way", WAYS)
def test_models_with_helpers_of_one_name_compute_with_their_own(folder: Path, way: str) -> None:
    code, name, answer = WAYS[way]
    values = {"a": (2, 10), "b": (3, 20)}
    made = two(folder, lambda of: {"m.py": code, "helper.py": f"K = {values[of][0]}", "late.py": f"K = {values[of][1]}"})
    assert [answer(f"{each}/m.py:{name}") for each in made] == [12, 23]  # 1 * 2 + 10, 1 * 3 + 20
    assert [answer(f"{each}/m.py:{name}") for each in reversed(made)] == [23, 12]


RELATIVE = """
from . import near
from .helper import K
import behind, alone_OF as alone, triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        import late
        from .near import K as again
        given = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        values = [K, near.K, again, behind.K, alone.near(), late.K]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x * 0 + values)]) for x in given]
"""
ALONE = """
from concurrent.futures import ThreadPoolExecutor
from near import K
def one():
    import near
    return near.K
def near():
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(one).result() + K
"""
SIX = ModelSpec("", (TensorSpec("x", "FP32", (-1, 1)),), (TensorSpec("y", "FP64", (-1, 6)),), 4)


def test_code_of_triton_imports_by_its_package_and_from_the_folder_of_its_model(folder: Path) -> None:
    made = {
        of: write(
            folder / of,
            {
                "1/m.py": RELATIVE.replace("OF", of),
                "1/plain.py": "",
                "1/helper.py": "from .near import K",
                "1/near.py": f"K = {value}",
                "behind.py": f"K = {value}0",
                f"alone_{of}.py": ALONE,
                "late.py": f"K = {value * 100}",
                "1/late.py": f"K = {value * 1000}",
            },
        )
        for of, value in {"a": 2, "b": 3}.items()
    }

    def answer(of: str) -> list[float]:
        load_object(f"{made[of]}/1/plain.py:__name__")  # which has nothing behind it
        session = backends.load("python", {"model": f"{made[of]}/1/m.py:TritonPythonModel"}, SIX).open_session(0)
        with closing(session):
            values: list[float] = session.run(ONE, {})["y"][0].tolist()
            return values

    assert [answer("a"), answer("b"), answer("a")] == [
        [2, 2, 2, 20, 4, 2000], [3, 3, 3, 30, 6, 3000], [2, 2, 2, 20, 4, 2000],
    ]  # fmt: skip
    (made["b"] / "behind.py").write_text("K = 40")
    with pytest.raises(LoadFailed, match=r"/b/behind.py: has changed since this process imported it"):
        answer("b")


def test_versions_share_no_module_of_the_folder_behind_them(folder: Path) -> None:
    files = {"1/m.py": "import scaled", "1/tables.py": "K = 1", "2/m.py": "import scaled", "2/tables.py": "K = 2"}
    write(folder, files | {"scaled.py": "from tables import K"})
    assert [load_object(f"{folder}/{each}/m.py:scaled", folder).K for each in "12"] == [1, 2]


def test_a_process_of_its_own_is_told_nothing_of_other_models_folders(folder: Path) -> None:
    made = two(folder, lambda of: {"m.py": CLASS, "helper.py": f"K = {ord(of)}", "late.py": "K = 0"})
    assert run(f"{made[0]}/m.py:Model") == ord("a")
    assert str(made[0]) in sys.path
    assert str(made[0]) not in path_without()
    model = ProcessModel("python", {"model": f"{made[1]}/m.py:Model"}, FLOAT)
    session = model.open_session(0)
    try:
        assert session.run(ONE, {})["y"].item() == ord("b")
    finally:
        session.close()


def packaged(of: str) -> dict[str, str]:
    return {
        "m.py": (
            "import parts.sub.core, parts.sub.core as core\nfrom parts import near\nfrom parts.sub import core as other\n"
            "import loose.leaf\nfrom one import ONE\n"
            "SEEN = [parts.sub.core.K, core.K, other.K, near.K, loose.leaf.K, ONE]\n"
        ),
        "parts/__init__.py": "",
        "parts/near.py": "from .sub import core\nfrom . import sub\nK = core.K",
        "parts/sub/__init__.py": "from .core import K",
        "parts/sub/core.py": "import leaf\nfrom ..value import K",
        "parts/value.py": f"K = {of!r}",
        "leaf.py": "",
        "loose/leaf.py": f"K = {of!r}",
        "one.py": f"import other\nONE = {of!r}\ndef both(): return other.TWO + ONE",
        "other.py": "import one\nTWO = 'x'\ndef both(): return one.ONE",
    }


def test_packages_relative_imports_and_circles_are_those_of_the_folder(folder: Path) -> None:
    made = two(folder, packaged)
    assert [load_object(f"{each}/m.py:SEEN") for each in made] == [["a"] * 6, ["b"] * 6]


def test_code_of_one_folder_shares_its_modules(folder: Path) -> None:
    made = two(folder, lambda of: {"m.py": "import helper", "n.py": "import helper", "helper.py": ""})
    for each in made:
        assert load_object(f"{each}/m.py:helper") is load_object(f"{each}/n.py:helper")
    assert load_object(f"{made[0]}/m.py:helper") is sys.modules["helper"]


def test_a_file_is_the_module_that_its_helpers_import(folder: Path) -> None:
    asks = "def near():\n    from .itself import Own\n    return Own\ndef plain():\n    from itself import Own\n    return Own"
    for each in two(folder, lambda of: {"itself.py": "class Own: ...\nfrom .asker import near, plain", "asker.py": asks}):
        own, near, plain = (load_object(f"{each}/itself.py:{name}") for name in ("Own", "near", "plain"))
        assert (near(), plain(), sys.modules[own.__module__].Own) == (own, own, own)


@pytest.mark.parametrize(
    ("start", "asks"),
    [
        ("import asker", "from itself import LATE"),
        ("import asker", "import itself\nLATE = itself.LATE"),
        ("from . import asker", "from .itself import LATE"),
    ],
)
def test_a_file_and_its_helper_may_import_each_other(folder: Path, start: str, asks: str) -> None:
    code = start + "\nLATE = {!r}\ndef seen(): return asker.LATE"
    for each in two(folder, lambda of: {"itself.py": code.format(of), "asker.py": asks}):
        assert load_object(f"{each}/itself.py:seen")() == load_object(f"{each}/itself.py:LATE")


def test_a_file_leaves_its_plain_name_to_the_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, {"own/of_both.py": "def itself(): import of_both; return of_both", "installed/of_both.py": ""})
    itself = load_object(f"{folder}/own/of_both.py:itself")
    assert itself().itself is itself
    assert sys.modules[itself.__module__].__loader__.get_source(itself.__module__)  # type: ignore[union-attr]
    monkeypatch.syspath_prepend(folder / "installed")
    import of_both  # type: ignore[import-not-found]  # the process's own

    assert of_both.__file__ == f"{folder}/installed/of_both.py"


@pytest.mark.slow
def test_what_a_helper_defines_runs_in_spawned_processes(folder: Path) -> None:
    write(folder, {"spawns.py": "from spawn_helper import work", "spawn_helper.py": "def work(x): return 2 * x"})
    work = load_object(f"{folder}/spawns.py:work")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply_async(work, (2,)).get(timeout=20) == 4


def test_what_is_installed_hides_a_helper(folder: Path) -> None:
    code = "import json, numpy\nfrom .json import json as again"
    made = two(folder, lambda of: {"m.py": code, "json.py": "import json", "numpy/__init__.py": ""})
    assert [load_object(f"{each}/m.py:numpy") for each in made] == [np, np]
    for name in ("m.py:json", "m.py:again", "json.py:json"):
        assert [load_object(f"{each}/{name}") for each in made] == [json, json]


def test_what_was_imported_stays_once_another_folder_has_the_name_and_once_it_is_forgotten(folder: Path) -> None:
    code = "from .helper import K\nimport helper\ndef late():\n    import helper\n    return helper"
    made = two(folder, lambda of: {"m.py": code, "helper.py": f"K = {of!r}"})
    (first, plain), (second, own) = [[load_object(f"{each}/m.py:{name}") for name in ("late", "helper")] for each in made]
    assert (first(), second()) == (plain, own)
    forget_code(made[0])
    assert second() is own


def test_a_folder_without_the_helper_has_none(folder: Path) -> None:
    made = two(folder, lambda of: {"m.py": "import nowhere_to_be_found", "helper.py": ""})
    for each in made:
        with pytest.raises(LoadFailed, match="No module named 'nowhere_to_be_found'"):
            load_object(f"{each}/m.py:helper")


def test_threads_that_import_at_once_get_their_own(folder: Path) -> None:
    code = "def late():\n    import helper\n    return helper.K"
    made = two(folder, lambda of: {"m.py": code, "helper.py": f"import runs\nK = {of!r}", "runs.py": "COUNT = []"})
    functions = [load_object(f"{each}/m.py:late") for each in made] * 4
    together = threading.Barrier(len(functions))

    def asked(late: Callable[[], str]) -> str:
        together.wait()
        return late()

    with ThreadPoolExecutor(len(functions)) as pool:
        assert list(pool.map(asked, functions)) == ["a", "b"] * 4


@pytest.mark.parametrize("unpickler", ["pickle.load", "pickle._Unpickler"])
def test_a_pickle_finds_the_class_of_the_first_and_is_refused_to_others(folder: Path, unpickler: str) -> None:
    call = "pickle.load(file)" if unpickler == "pickle.load" else "pickle._Unpickler(file).load()"
    code = f"import pickle\nfrom helper import Kept\ndef load(path):\n    with open(path, 'rb') as file:\n        return {call}"
    made = two(folder, lambda of: {"m.py": code, "helper.py": "class Kept: pass"})
    first, second = (load_object(f"{each}/m.py:load") for each in made)
    kept: list[type[Any]] = [load_object(f"{each}/m.py:Kept") for each in made]
    (folder / "kept").write_bytes(pickle.dumps(kept[0]()))
    assert type(first(folder / "kept")) is kept[0] is not kept[1]
    with pytest.raises(ImportError, match=r"'helper' is asked for by its name.*/b/1.*/a/1.*isolation: process"):
        second(folder / "kept")
    assert type(pickle.loads(pickle.dumps(kept[1]()))) is kept[1]  # noqa: S301  # our own, by the name that it has in this process


@pytest.mark.parametrize("unpickler", ["pickle.load", "pickle._Unpickler"])
@pytest.mark.parametrize("early", [False, True])
def test_a_pickle_finds_the_class_of_the_file_that_is_served(folder: Path, unpickler: str, early: bool) -> None:
    call = "pickle.load(file)" if unpickler == "pickle.load" else "pickle._Unpickler(file).load()"
    code = "import pickle, runs_of_keeps\nruns_of_keeps.COUNT.append(1)\nclass Kept: pass\n"
    code += f"def load(path):\n    with open(path, 'rb') as file:\n        return {call}\n"
    (folder / "kept").write_bytes(b"ckeeps_own\nKept\n)R.")
    code += f"EARLY = load({str(folder / 'kept')!r})\n" if early else ""
    write(folder, {"keeps_own.py": code + "raise KeyError", "runs_of_keeps.py": "COUNT = []"})
    with pytest.raises(LoadFailed, match="KeyError"):
        load_object(f"{folder}/keeps_own.py:load")
    write(folder, {"keeps_own.py": code})
    load, kept = (load_object(f"{folder}/keeps_own.py:{name}") for name in ("load", "Kept"))
    assert type(load(folder / "kept")) is kept
    assert not early or type(load_object(f"{folder}/keeps_own.py:EARLY")) is kept
    assert len(load_object(f"{folder}/keeps_own.py:runs_of_keeps").COUNT) == 2  # the one that failed, and the other


def test_a_helper_shows_its_lines(folder: Path) -> None:
    helper = "def fail():\n    raise ValueError('told')\n"
    made = two(folder, lambda of: {"m.py": "from helper import fail", "helper.py": helper + f"# {of}\n"})
    for each in made:
        fail = load_object(f"{each}/m.py:fail")
        assert inspect.getsource(fail) == helper
        with pytest.raises(ValueError, match="told") as raised:
            fail()
        last = traceback.extract_tb(raised.value.__traceback__)[-1]
        assert (last.filename, last.line) == (str(each / "helper.py"), "raise ValueError('told')")


def test_code_in_a_string_and_a_call_of_import_get_their_own_too(folder: Path) -> None:
    code = (
        "space = {}\nexec('import helper', space)\nEXEC = space['helper'].K\n"
        "CALL = [__import__('helper').K, __import__('helper', fromlist=['K']).K]\n"
        "def within():\n    return __import__('helper', globals(), locals(), ['K'], 0).K\nSEEN = [EXEC, *CALL, within()]"
    )
    made = two(folder, lambda of: {"m.py": code, "helper.py": f"K = {of!r}"})
    assert load_object(f"{made[0]}/m.py:SEEN") == ["a"] * 4
    assert load_object(f"{made[1]}/m.py:SEEN") == ["b"] * 4


def test_what_was_forgotten_is_no_hindrance(folder: Path) -> None:
    before = {name for name in sys.modules if name.startswith("code_")}  # of other tests in this process
    made = two(folder, packaged)
    load_object(f"{made[0]}/m.py:SEEN")
    load_object(f"{made[1]}/m.py:SEEN")
    forget_code(made[0])
    forget_code(made[1])
    assert not {"parts", "parts.near", "loose", "one"} & sys.modules.keys()
    assert {name for name in sys.modules if name.startswith("code_")} <= before
    assert load_object(f"{made[1]}/m.py:SEEN") == ["b"] * 6
    assert sys.modules["parts"].__file__ == str(made[1] / "parts" / "__init__.py")


def test_a_folder_in_another_has_helpers_of_its_own(folder: Path) -> None:
    outer = write(folder, {"m.py": "import inner.m, helper\nSEEN = [helper.K, inner.m.K]", "helper.py": "K = 'outer'"})
    inner = write(folder / "inner", {"m.py": "from helper import K", "helper.py": "K = 'inner'"})
    assert load_object(f"{outer}/m.py:SEEN") == ["outer", "outer"]  # there `inner` is a package
    assert load_object(f"{inner}/m.py:K") == "inner"


def test_the_order_of_loading_is_no_matter(folder: Path) -> None:
    made = two(folder, lambda of: {"m.py": "def late():\n    import helper\n    return helper.K", "helper.py": f"K = {of!r}"})
    first, second = (load_object(f"{each}/m.py:late") for each in made)
    assert second() == "b"  # before the first has imported its own
    assert (first(), second()) == ("a", "b")
    assert sys.modules["helper"].__file__ == str(made[0] / "helper.py")
