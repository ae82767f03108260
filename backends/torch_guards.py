"""The conditions on open sizes under which the code that was compiled of an exported program is right, such as `a < b`.

PyTorch calls them guards, and checks them where the program itself runs. An AOTInductor package has none of them but those on
one size alone.
"""

from typing import Any

import torch
from torch.utils._sympy.printers import PythonPrinter

from backends.base import LoadFailed
from backends.size_expressions import condition


def guards(what: str, program: torch.export.ExportedProgram) -> list[str]:
    """Of a program that has been compiled, since Inductor adds some of its own. Each size is called `s{input}_{axis}`.

    `ExportedProgram._guards_code` is made of the same before that, and `aot_inductor.metadata`, which AOTInductor writes into a
    package, is given to the compilation: neither could have Inductor's (torch 2.13).

    Raises: LoadFailed, for a condition of something else than sizes of inputs, or that is not known here.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    shapes = [getattr(values[name], "shape", ()) for name in program.graph_signature.user_inputs]
    sizes = {(index, axis): size for index, shape in enumerate(shapes) for axis, size in enumerate(shape)}
    open_sizes = {place: size.node for place, size in sizes.items() if isinstance(size, torch.SymInt)}
    names = {node.expr: f"s{index}_{axis}" for (index, axis), node in open_sizes.items()}
    printer = _Printer(names)
    found: dict[str, None] = {}
    for env in {node.shape_env: None for node in open_sizes.values()}:
        for guard in env.guards:
            expression = env.replace(guard.expr)  # with one symbol of those that are equal, to which the code itself says so
            try:
                text = printer.doprint(expression)
                condition(text, dict.fromkeys(names.values()))
            except Exception as exc:  # as a printer raises for what it does not know
                raise LoadFailed(
                    f"{what}: PyTorch makes a condition of sizes that is not known here, and without which a client could read "
                    f"past an input: {expression}; serve the module itself, with `kind: torch` and the factory as its `model`"
                ) from exc
            found[text] = None
    return [text for text in found if text != "True"]


class _Printer(PythonPrinter):
    def __init__(self, names: dict[Any, str]) -> None:
        super().__init__()
        self._names = names

    def _print_Symbol(self, symbol: Any) -> str:
        return self._names[symbol]
