"""Which models a Python file holds: it is read, and not run."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from backends.source import not_python
from gateway.errors import ConfigError

_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)  # the latter is refused in words when it is loaded
_DEFINITIONS: Final = (*_FUNCTIONS, ast.ClassDef)
# What a branch holds that does not run where a file is imported.
_NOT_IMPORTED: Final = ("__name__ == '__main__'", "'__main__' == __name__", "TYPE_CHECKING", "typing.TYPE_CHECKING")
_NEVER_CALLED: Final = (ast.Constant, ast.UnaryOp, ast.Compare, ast.JoinedStr, ast.Dict)
_OF_FIELDS: Final = ("auto", "field", "Field")  # what is given to a member of an Enum, or a field of a dataclass


def models_of(path: Path, *, in_folder: bool = False) -> list[str]:
    """The models of a file: what is marked `@gateway.model`; else what it calls `predict`, and its classes that have one.

    Else its functions, and its classes that may inherit one from a file beside it. None of these is private.
    in_folder: functions of other names, and a `predict` that is another file's, are none. Raises: ConfigError.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror}") from exc
    except (SyntaxError, ValueError) as exc:
        raise ConfigError(not_python(path, exc)) from exc
    nodes = list(_of_scope(tree))
    defined = [node for node in nodes if isinstance(node, _DEFINITIONS)]
    marks: set[str] = set()
    for node in nodes:
        marks.update(_marks(node, marks))
    if marked := [node.name for node in defined if not marks.isdisjoint(map(_called_by, node.decorator_list))]:
        return [*dict.fromkeys(marked)]
    models: list[str] = []
    with_predict: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            inherits = any(isinstance(base, ast.Name) and base.id in with_predict for base in node.bases)
            if inherits or any("predict" in _bound(part) for part in _of_scope(node)):
                with_predict.add(node.name)
                models.append(node.name)
        elif "predict" in _bound(node) and not (in_folder and isinstance(node, ast.ImportFrom)):
            models.append("predict")
    functions = [] if in_folder else _public([node.name for node in defined if isinstance(node, _FUNCTIONS)])
    return _public(models) or (functions and [*_public(_heirs(path, nodes)), *functions])


def _heirs(path: Path, nodes: list[ast.AST]) -> list[str]:
    """The classes with a base that is from a file beside this one, which is not read."""
    from_beside: set[str] = set()
    heirs: list[str] = []
    for node in nodes:
        match node:
            case ast.Import(names=names):
                from_beside.update(alias.asname or alias.name for alias in names if _is_beside(path, alias.name))
            case ast.ImportFrom(module=module, level=level) if level or _is_beside(path, str(module)):
                from_beside.update(_imported(node))
            case ast.ClassDef(name=name, bases=bases):
                of_bases = [ast.unparse(base).partition("[")[0] for base in bases]
                if any(of in from_beside or of.rpartition(".")[0] in from_beside for of in of_bases):
                    from_beside.add(name)
                    heirs.append(name)
    return heirs


def _is_beside(path: Path, module: str) -> bool:
    beside = path.with_name(module.partition(".")[0])
    return beside.with_suffix(".py").is_file() or (beside / "__init__.py").is_file()


def _public(names: list[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if not name.startswith("_")]


def _of_scope(node: ast.AST) -> Iterator[ast.AST]:
    """What runs where a module or the body of a class runs, in order: that of branches, but not of functions and classes.

    Of expressions, what they are assigned to.
    """
    children = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and _only_elsewhere(node.test):
        children = iter(node.orelse)
    of_loop = isinstance(node, ast.For | ast.AsyncFor | ast.withitem)  # an element of something, or what is opened
    for child in children:
        read = isinstance(child, ast.expr) and (of_loop or not isinstance(getattr(child, "ctx", None), ast.Store))
        if read or (isinstance(child, ast.Assign | ast.AnnAssign) and _never_called(child.value)):
            continue  # neither binds a model's name
        yield child
        if not isinstance(child, _DEFINITIONS):
            yield from _of_scope(child)


def _only_elsewhere(test: ast.expr) -> bool:
    """Whether a condition does not hold where a file is imported."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(map(_only_elsewhere, test.values))
    return ast.unparse(test) in _NOT_IMPORTED


def _never_called(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return _called_by(value).rpartition(".")[2] in _OF_FIELDS
    return value is None or isinstance(value, _NEVER_CALLED)


def _bound(node: ast.AST) -> list[str]:
    """The names that a part of a scope binds. `import x` and `from . import x` are left out, which bind modules."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Name(id=name, ctx=ast.Store()):
            return [name]
        case ast.ImportFrom(module=str()):
            return _imported(node)
    return []


def _imported(node: ast.ImportFrom) -> list[str]:
    return [alias.asname or alias.name for alias in node.names]


def _marks(node: ast.AST, known: set[str]) -> list[str]:
    """What `gateway.model` is called once an import or an assignment has run. known: by what ran before."""
    match node:
        case ast.Import(names=names):
            tops = [(alias.asname or "gateway", alias) for alias in names if alias.name.partition(".")[0] == "gateway"]
            return [f"{name}.model" for name, alias in tops if alias.name == "gateway" or not alias.asname]
        case ast.Assign(targets=targets, value=ast.Name() | ast.Attribute() | ast.Call() as value) if (
            _called_by(value) in known
        ):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.ImportFrom(module="gateway", names=names):
            return [alias.asname or "model" for alias in names if alias.name in ("model", "*")]
    return []


def _called_by(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
