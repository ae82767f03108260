"""The tables of docs/metrics.md, from the table of metrics: `python scripts/metrics_page.py` writes them anew."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gateway.engine.metric_table import STATIONS, TABLE, TRITON_TABLE

PAGE: Final = Path(__file__).parent.parent / "docs" / "metrics.md"
_BEGIN: Final = "<!-- written by scripts/metrics_page.py -->\n"
_END: Final = "<!-- end -->\n"


def written(page: str) -> str:
    """The page with the tables as they should be."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}{''.join(_tables())}{_END}{after}"


def _tables() -> Iterator[str]:
    yield "\n| metric | type | unit | labels | station | |\n|---|---|---|---|---|---|\n"
    for metric in TABLE:
        station = metric.station if metric.station in ("cost", "process") else f"{metric.station} {STATIONS[metric.station]}"
        labels = ", ".join(metric.labels)
        yield f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {station} | {metric.meaning} |\n"
    yield "\nWith `metrics: {triton_names: true}`:\n\n| metric | type | labels | |\n|---|---|---|---|\n"
    for name in TRITON_TABLE:
        yield f"| `{name.name}` | {name.kind} | {', '.join(name.labels)} | {name.meaning} |\n"
    yield "\n"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
