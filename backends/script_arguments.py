"""What `forward` of a TorchScript file takes, and what of it no tensor of a request can be."""

import ast
import pickletools
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from backends.artifacts import ARCHIVE_FAULTS

WAY: Final = "script a forward whose inputs are tensors"
_NESTED: Final = ("Dict", "List", "Tuple")


@dataclass(frozen=True, slots=True)
class Argument:
    """type: in TorchScript's words. is_nested: it is no tensor, but holds something."""

    name: str
    type: str
    has_default: bool
    is_nested: bool


def nested(arguments: Sequence[Argument], inputs: Iterable[str]) -> Argument | None:
    """The first nested one that must be given, or is by one of these inputs."""
    inputs, names = list(inputs), [argument.name for argument in arguments]
    given = inputs if set(inputs) <= set(names) else names[: len(inputs)]
    return next((each for each in arguments if each.is_nested and (each.name in given or not each.has_default)), None)


def script_arguments(module: Any) -> list[Argument]:
    """Of the `forward` of a scripted module, without the module itself."""
    return [
        Argument(each.name, str(each.type), each.has_default_value(), each.type.kind() in ("DictType", "ListType", "TupleType"))
        for each in module.forward.schema.arguments[1:]
    ]


def stated_arguments(path: Path) -> list[Argument]:
    """From the code in the file, without PyTorch; empty, if it does not tell."""
    try:
        with zipfile.ZipFile(path) as archive:
            root = next(name for name in archive.namelist() if name.endswith("/data.pkl")).removesuffix("/data.pkl")
            operations = pickletools.genops(archive.read(f"{root}/data.pkl"))
            module, name = next(str(value).split(" ") for operation, value, _ in operations if operation.name == "GLOBAL")
            code = ast.parse(archive.read(f"{root}/code/{module.replace('.', '/')}.py"))
    except (StopIteration, LookupError, SyntaxError, ValueError, RecursionError):
        return []  # of another form
    except ARCHIVE_FAULTS:
        return []  # damaged
    classes = (node for node in code.body if isinstance(node, ast.ClassDef) and node.name == name)
    forward = (node for each in classes for node in each.body if isinstance(node, ast.FunctionDef) and node.name == "forward")
    return [argument for function in forward for argument in _arguments(function.args)]


def _arguments(of: ast.arguments) -> list[Argument]:
    first_default = len(of.args) - len(of.defaults)
    found = []
    for index, each in enumerate(of.args):
        stated = ast.unparse(each.annotation) if each.annotation else ""
        found.append(Argument(each.arg, stated, index >= first_default, stated.partition("[")[0] in _NESTED))
    return found[1:]  # without the module itself
