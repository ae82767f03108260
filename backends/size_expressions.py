"""Arithmetic of sizes that stands in a file, made into functions: nothing that a file says is run as code.

A file may come from anywhere. So what is read is bounded in length and depth, and has no power.
"""

import ast
import functools
import math
import operator
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

Function = Callable[[Any], Any]  # of sizes, each at its place

_LONGEST: Final = 4000  # characters
_DEEPEST: Final = 100
_DRAWS: Final = 400

_OPERATORS: Final[Mapping[type, Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
# What torch.utils._sympy.printers.PythonPrinter writes (torch 2.13).
_CALLS: Final[Mapping[str, Callable[..., Any]]] = {
    "max": max, "min": min, "math.floor": math.floor, "math.ceil": math.ceil, "math.trunc": math.trunc,
    "torch.sym_float": float,
}  # fmt: skip


def function(text: str, places: Mapping[str, Any] | None = None) -> Function:
    """What computes a text of sizes. places: where each stands in these, by its name; None: under its name.

    Raises: ValueError, SyntaxError, LookupError, RecursionError or MemoryError, for what is not known here.
    """
    return _function(_parsed(text), places, _DEEPEST)


def condition(text: str, places: Mapping[str, Any] | None) -> Function:
    """As `function`, of what has to hold. Where it cannot be computed, as divided by 0, it does not."""
    compute = function(text, places)

    def holds(sizes: Any) -> bool:
        try:
            return bool(compute(sizes))
        except (ArithmeticError, ValueError):
            return False

    return holds


@functools.cache
def keeps_few_out(text: str, alike: frozenset[str] = frozenset()) -> bool:
    """Whether a condition keeps out only sizes that are equal, and those of 1 and less.

    So PyTorch's conditions are where it chose a way for what is no 1, or differs, and another may give the same. With one row,
    `rows * size > size` keeps out what is equal, as no drawn sizes make it less. `size % 8 != 0` counts as well, though it
    keeps out each eighth: a model that fills up to a multiple makes it, mostly for no need. So several sizes are to be tried.
    alike: the names of sizes that are equal in each request, as rows are, though the condition may have them apart.
    """
    return _keeps_few_out(_parsed(text), alike)


def _keeps_few_out(node: ast.expr, alike: frozenset[str]) -> bool:
    match node:
        case ast.BoolOp(values=parts):
            return all(_keeps_few_out(part, alike) for part in parts)
        case ast.Compare(ops=[ast.NotEq()]):
            return True
        case (
            ast.Compare(ops=[ast.Gt() | ast.GtE() as op], comparators=[ast.Constant(value=int(least))])
            | ast.Compare(ops=[ast.Lt() | ast.LtE() as op], left=ast.Constant(value=int(least)))
        ) if least + isinstance(op, ast.Gt | ast.Lt) <= 2:
            return True
        case (
            ast.Compare(left=more, ops=[ast.Gt()], comparators=[less])
            | ast.Compare(left=less, ops=[ast.Lt()], comparators=[more])
        ):
            holds = condition(f"({ast.unparse(more)}) >= ({ast.unparse(less)})", None)
            names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
            return all(holds(drawn | dict.fromkeys(alike, drawn[""])) for drawn in drawn_sizes({*names, ""}))
    return False


def drawn_sizes(names: Collection[str]) -> Iterator[dict[str, int]]:
    """Each by its name: the same ones each time, small and large."""
    draw = random.Random(0)
    for most in (5, 40) * (_DRAWS // 2):
        yield {name: int(2 ** draw.uniform(0, most)) for name in sorted(names)}


def _parsed(text: str) -> ast.expr:
    if len(text) > _LONGEST:
        raise ValueError("too long")
    return ast.parse(text, mode="eval").body


def _function(node: ast.expr, places: Mapping[str, Any] | None, deep: int) -> Function:
    if not deep:
        raise ValueError("too deep")

    def made(part: ast.expr) -> Function:
        return _function(part, places, deep - 1)

    match node:
        case ast.Constant(value=value) if isinstance(value, int | float) and math.isfinite(value):
            return lambda sizes: value
        case ast.Name(id=name):
            return operator.itemgetter(name if places is None else places[name])
        case ast.UnaryOp(op=ast.USub() | ast.Not() as op, operand=part):
            of, invert = made(part), operator.neg if isinstance(op, ast.USub) else operator.not_
            return lambda sizes: invert(of(sizes))
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]) if (
            type(op) in _OPERATORS
        ):
            combine, one, other = _OPERATORS[type(op)], made(left), made(right)
            return lambda sizes: combine(one(sizes), other(sizes))
        case ast.BoolOp(op=op, values=values):
            decide, parts = all if isinstance(op, ast.And) else any, [made(part) for part in values]
            return lambda sizes: decide(part(sizes) for part in parts)
        case ast.Call(func=called, args=[_, *more] as given, keywords=[]) if (call := _CALLS.get(ast.unparse(called))) and (
            bool(more) == (call in (max, min))
        ):
            arguments = [made(part) for part in given]
            return lambda sizes: call(*(argument(sizes) for argument in arguments))
    raise ValueError(f"{ast.unparse(node)} is not known here")
