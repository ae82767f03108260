"""Code that is named by its file."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backends.model_folders import forget_code
from backends.source import load_object


def test_code_that_is_forgotten_is_imported_anew_with_its_neighbours(tmp_path: Path) -> None:
    folder, beside = tmp_path / "model", tmp_path / "model-2"
    for made in (folder, beside):
        made.mkdir()
        (made / f"own_{made.name[-1]}.py").write_text("VALUE = 1\n")
        (made / "main.py").write_text(f"from own_{made.name[-1]} import VALUE\n")
        assert load_object(f"{made}/main.py:VALUE") == 1
    (folder / "own_l.py").write_text("VALUE = 2222\n")
    assert load_object(f"{folder}/main.py:VALUE") == 1
    forget_code(folder)
    assert (str(folder) in sys.path, str(beside) in sys.path) == (False, True)
    assert load_object(f"{folder}/main.py:VALUE") == 2222
    assert "own_2" in sys.modules
    for made in (folder, beside):
        forget_code(made)
    assert not {"own_l", "own_2"} & sys.modules.keys()


def test_files_whose_names_differ_by_a_dot_are_two(tmp_path: Path) -> None:
    for name in ("m.v1", "m_v1"):
        (tmp_path / f"{name}.py").write_text(f"NAME = {name!r}")
    assert [load_object(f"{tmp_path}/{name}.py:NAME") for name in ("m.v1", "m_v1")] == ["m.v1", "m_v1"]


@pytest.mark.parametrize("lines", [("{wait}", "class Model: ..."), ("class Model: ...", "{wait}")])
def test_two_threads_that_load_a_file_at_once_get_it_whole(tmp_path: Path, lines: tuple[str, ...]) -> None:
    begun, go_on = os.pipe(), os.pipe()
    wait = f"os.write({begun[1]}, b'x'), os.read({go_on[0]}, 1)"
    (tmp_path / "slow.py").write_text("\n".join(["import os", *lines, "whole = True"]).format(wait=wait))

    def loaded() -> tuple[object, bool]:
        found = load_object(f"{tmp_path}/slow.py:Model")
        return found, hasattr(sys.modules[found.__module__], "whole")

    try:
        with ThreadPoolExecutor(2) as threads:
            one = threads.submit(loaded)
            os.read(begun[0], 1)
            other = threads.submit(loaded)
            # Once the other has looked; where it has not yet, this tests less.
            threading.Timer(0.1, os.write, (go_on[1], b"x")).start()
            assert one.result() == other.result() == (one.result()[0], True)
    finally:
        for end in (*begun, *go_on):
            os.close(end)


def test_a_file_that_loads_itself_from_another_thread_gets_what_it_has_by_then(tmp_path: Path) -> None:
    path = tmp_path / "itself.py"
    path.write_text(
        "from concurrent.futures import ThreadPoolExecutor\nfrom backends.source import load_object\nclass Model: ...\n"
        f"with ThreadPoolExecutor(1) as threads:\n    found = threads.submit(load_object, {f'{path}:Model'!r}).result()\n"
    )
    assert load_object(f"{path}:found") is load_object(f"{path}:Model")
