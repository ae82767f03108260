"""Code that is named by its file."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


def test_two_threads_that_load_a_file_at_once_get_it_whole(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()
    (tmp_path / "slow.py").write_text("import threading\nthreading.begun.set(), threading.go_on.wait(10)\nclass Model: ...\n")
    threading.begun, threading.go_on = begun, go_on  # type: ignore[attr-defined]
    try:
        with ThreadPoolExecutor(2) as threads:
            one = threads.submit(load_object, f"{tmp_path}/slow.py:Model")
            assert begun.wait(10)
            other = threads.submit(load_object, f"{tmp_path}/slow.py:Model")
            threading.Timer(0.1, go_on.set).start()  # once the other has looked; where it has not yet, this tests less
            assert one.result() is other.result()
    finally:
        del threading.begun, threading.go_on  # type: ignore[attr-defined]


def test_a_file_that_loads_itself_from_another_thread_gets_what_it_has_by_then(tmp_path: Path) -> None:
    path = tmp_path / "itself.py"
    path.write_text(
        "from concurrent.futures import ThreadPoolExecutor\nfrom backends.source import load_object\nclass Model: ...\n"
        f"with ThreadPoolExecutor(1) as threads:\n    found = threads.submit(load_object, {f'{path}:Model'!r}).result()\n"
    )
    assert load_object(f"{path}:found") is load_object(f"{path}:Model")
