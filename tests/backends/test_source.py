"""Code that is named by its file."""

import sys
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
