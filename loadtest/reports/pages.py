"""The HTML pages: Jinja2 templates, the only door to Jinja2. What is not Markup is escaped, a missing name is an error."""

from functools import cache
from importlib.resources import files
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

PALETTE: Final = 8  # colours in the style sheet; further series share the last


def render(template: str, **context: object) -> str:
    """One file that needs no other: style and charts are in it, and it has no script."""
    return _environment().get_template(template).render(style=_style(), **context)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("loadtest.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["rows"] = lambda columns: zip(*(column.cells for column in columns), strict=True)
    return environment


@cache
def _style() -> Markup:
    """The style sheet, and one class per colour: c fills, s strokes, b is a background."""
    sheet = files("loadtest.reports").joinpath("report.css").read_text(encoding="utf-8")
    colours = (f".c{i}{{fill:var(--p{i})}}.s{i}{{stroke:var(--p{i})}}.b{i}{{background:var(--p{i})}}" for i in range(PALETTE))
    return Markup("".join((sheet, *colours)))  # ours, and no user's text in it
