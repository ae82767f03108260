"""What `scripts/mutants.py` names is there. It is not imported: cosmic-ray is in an environment of its own."""

import ast
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "mutants.py"
EQUIVALENT = ROOT / "scripts" / "equivalent_mutants.txt"


def groups() -> list[str]:
    """The keys of TESTS."""
    names: dict[str, Any] = {}
    for statement in ast.parse(SCRIPT.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]).startswith(("_OF_", "TESTS")):
            exec(ast.unparse(statement), names)
    return list(names["TESTS"])


@cache
def texts(module: Path) -> dict[str, str]:
    """Of each function or class, those of one name together; of the whole module, as ""."""
    text = module.read_text()
    lines, found = text.splitlines(), {"": text}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = "\n".join([found.get(node.name, ""), *lines[node.lineno - 1 : node.end_lineno]])
    return found


def unspaced(text: str) -> str:
    return "".join(text.split())


def test_every_group_is_a_file_or_a_folder() -> None:
    assert [group for group in groups() if not (ROOT / group).exists()] == []


def test_what_is_said_to_be_equivalent_stands_in_the_function_it_names_of_a_module_that_is_drawn_from() -> None:
    drawn = {module for group in groups() for module in (ROOT / group, *(ROOT / group).glob("*.py"))}
    stale = []
    for block in EQUIVALENT.read_text().strip().split("\n\n"):
        place, gone, _, _ = block.splitlines()
        module, _, name = place.partition(" ")
        if ROOT / module not in drawn or unspaced(gone) not in unspaced(texts(ROOT / module).get(name, "")):
            stale.append(block)
    assert not stale, "\n\n".join(stale)
