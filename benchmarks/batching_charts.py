"""The comparison of batching rules as one HTML file that needs nothing else: goodput by load, one chart per case."""

from collections.abc import Mapping, Sequence
from html import escape

from loadtest.reports import pages
from loadtest.reports.charts import Axis, Chart, Line, Point, Series, draw

Curves = Mapping[str, Sequence[tuple[float, float]]]
"""By rule: offered load in % of z, goodput in % of c."""


def page(cases: Mapping[str, Curves], foot: str) -> str:
    """The whole file. cases: by name, with the same rules in each; as many as the palette has colours."""
    rules = list(next(iter(cases.values())))
    swatch = "display:inline-block;width:12px;height:12px;margin:0 5px 0 12px"
    legend = "".join(f'<i class="b{colour}" style="{swatch}"></i>{escape(rule)}' for colour, rule in enumerate(rules))
    about = "Answered within the SLO, by what is offered."
    charts = "".join(
        f'<figure class="card"><figcaption><h3>{escape(name)}</h3><p>{about}</p></figcaption>{_chart(curves)}</figure>'
        for name, curves in cases.items()
    )
    notes = (
        "<p>z is the fluid capacity without a miss, c the ceiling that no rule can pass (docs/batching-figures.md). Every rule"
        " sees the same arrivals. Its marks tell their numbers when pointed at.</p>"
    )
    frame = pages.render("page.html", title="batching rules in simulation", foot=foot)
    return frame.replace("<footer>", f'<p>{legend}</p><div class="charts">{charts}</div>{notes}<footer>', 1)


def _chart(curves: Curves) -> str:
    series = [
        Series(colour, [Point(load, good, f"{rule}: {good:.1f} % of c at {load:.0f} % of z") for load, good in points])
        for colour, (rule, points) in enumerate(curves.items())
    ]
    return draw(Chart(Axis("offered load, % of z"), Axis("goodput, % of c"), series, [Line(100, "c")]))
