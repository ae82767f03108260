"""How large the parts may be, how many values something is made of by position, and who reaches into whom."""

import ast
from collections import Counter
from collections.abc import Iterator

from tests.test_floors import modules

MODULE_LINES, CLASS_LINES, BY_POSITION, REACHES = 500, 400, 7, 30


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for module, tree in modules().items():
        yield from ((module, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def written(cls: ast.ClassDef) -> int:
    """How many values a class's own constructor takes by position."""
    made = [
        node.args for node in cls.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "__init__"
    ]
    return max((len(each.posonlyargs) + len(each.args) - 1 for each in made), default=0)


def generated(cls: ast.ClassDef) -> int:
    """The same of a record, whose constructor is made of its fields."""
    about = [ast.unparse(node) for node in (*cls.bases, *cls.decorator_list, *(word.value for word in cls.keywords))]
    if not any(text.startswith(("dataclass", "NamedTuple", "msgspec.")) for text in about):
        return 0
    if any("kw_only=True" in text for text in about) or any(word.arg == "kw_only" for word in cls.keywords):
        return 0
    fields = [node for node in cls.body if isinstance(node, ast.AnnAssign)]
    kinds = [ast.unparse(node.annotation) for node in fields]
    fields = fields[: kinds.index("KW_ONLY")] if "KW_ONLY" in kinds else fields
    return sum("init=False" not in ast.unparse(node) for node in fields)


def reaches(tree: ast.Module) -> Iterator[str]:
    """Underscore names of objects that this module does not define: public ones, such as `os._exit`, count too."""
    nodes = list(ast.walk(tree))
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    own |= {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    own |= {node.attr for node in attributes if ast.unparse(node.value) in ("self", "cls")}
    for node in attributes:
        if node.attr.startswith("_") and not node.attr.startswith("__") and node.attr not in own:
            yield ast.unparse(node)


def test_no_module_and_no_class_is_too_long_to_be_read_at_once() -> None:
    for module, tree in modules().items():
        lines = max((node.end_lineno or 0 for node in tree.body), default=0)
        assert lines <= MODULE_LINES, f"{module}: {lines} lines, expected at most {MODULE_LINES}"
    for module, cls in classes():
        lines = (cls.end_lineno or 0) - cls.lineno + 1
        assert lines <= CLASS_LINES, f"{module}.{cls.name}: {lines} lines, expected at most {CLASS_LINES}"


def test_nothing_is_made_of_more_than_seven_values_by_position() -> None:
    for module, cls in classes():
        # Records of loadtest are not held to it.
        record = 0 if module.startswith("loadtest.") else generated(cls)
        assert max(written(cls), record) <= BY_POSITION, f"{module}.{cls.name}: give the others by name"


def test_few_reach_into_what_another_module_keeps_to_itself() -> None:
    found = [f"{module}: {reach}" for module, tree in modules().items() for reach in reaches(tree)]
    assert len(found) <= REACHES, "\n".join(found)


def test_a_class_of_the_gateway_or_its_backends_has_its_name_to_itself() -> None:
    trees = [tree for module, tree in modules().items() if not module.startswith("loadtest.")]
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == set()
