"""How `gateway top` looks: one table for each gateway, as wide as the terminal has room. Pure.

Whatever a gateway tells is shown as printable text: no name moves the cursor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.text import Text

from gateway.commands.rates import BackendFigures, Figures, Told
from gateway.process.console import printable

NONE: Final = "–"
_GAP: Final = 2
_LONGEST_NAME: Final = 28  # cells; more only where there is room beside the columns that are shown
_GOOD, _OPEN, _BAD = "green", "yellow", "bold red"
_STATES: Final = {
    "READY": ("ready", _GOOD),
    "LOADING": ("loading", _OPEN),
    "UNLOADING": ("unloading", _OPEN),
    "UNAVAILABLE": ("not loaded", _BAD),
}
_BACKEND_STATES: Final = {"live": _GOOD, "ejected": _BAD, "down": _BAD, "missing": _BAD}
_IN_TIME: Final = 0.99

Cell = tuple[str, str]
"""Text and style."""

# Column -> how soon it is left out where there is no room for all: the highest first; 0 never.
_COLUMNS: Final = {
    "MODEL, backend": 0, "STATE": 1, "REQ/S": 0, "FAIL/S": 2, "SHARE": 8, "P50": 7, "P99": 0, "SLO": 5, "IN TIME": 6,
    "WAIT": 3, "ROWS/B": 10, "BATCH": 11, "BUSY": 4, "$/H": 9, "$/1M": 12,
}  # fmt: skip
_LEFT: Final = ("MODEL, backend", "STATE")
_OF_BACKENDS: Final = ("SHARE", "BATCH")


@dataclass(frozen=True, slots=True)
class Shown:
    """A gateway as it is to be shown. status: the last; None: it never answered. silent_s: how long it has not."""

    url: str
    status: Told | None
    models: Sequence[tuple[Told, Figures | None]]
    error: str
    silent_s: float


def screen(seen: Sequence[Shown], span_s: float, width: int, height: int) -> Group:
    """All of them, and which keys there are, in so many columns and lines."""
    lines: list[Text] = []
    for each in seen:
        lines += _gateway(each, width)
        lines.append(Text())
    room = max(1, height - 1)
    if len(lines) > room:
        hidden = len(lines) - room + 1
        lines = [*lines[: room - 1], Text(f"… {hidden} more lines: make the window higher; --once prints all", _OPEN)]
    other = "last minute" if span_s < 60 else "last 10 s"
    said = "last 10 s" if span_s < 60 else "last minute"
    foot = Text(f"{said}, each second anew   q: end   w: {other}", "dim")
    for line in (*lines, foot):
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return Group(*lines, *(Text() for _ in range(room - len(lines))), foot)


def table(seen: Shown) -> str:
    """One of them as plain text, whatever width it takes."""
    return "\n".join(line.plain.rstrip() for line in _gateway(seen, None))


def _gateway(seen: Shown, width: int | None) -> list[Text]:
    lines = [_head(seen)]
    if seen.error:
        lines += _wrapped(printable(seen.error.removeprefix(f"{seen.url}: ")), width, _BAD)
        if seen.status is not None:
            lines.append(Text(f"no answer for {seconds(seen.silent_s)}; the figures are those from before", _BAD))
    if seen.status is None:
        return lines
    rows = [row for model, figures in seen.models for row in _rows(model, figures)]
    lines += _table(rows, width, dim=bool(seen.error))
    if not seen.models:
        lines.append(Text("the configuration has no models", _OPEN))
    elif not seen.status["counted"]:
        lines.append(Text("nothing is counted: the configuration says `metrics: off`", _OPEN))
    elif not any(sum(model["requests"].values()) for model, _ in seen.models):
        lines.append(Text("no requests yet", _OPEN))
    for model, _ in seen.models:
        if model["reason"]:
            lines += _wrapped(f"{printable(model['name'])}: {printable(model['reason'])}", width, _BAD)
        for backend in model["backends"]:
            if backend["detail"]:
                said = f"{model['name']}/{backend['name']}: {backend['state']}: {backend['detail']}"
                lines += _wrapped(printable(said), width, _style_of(backend))
    return lines


def _head(seen: Shown) -> Text:
    line = Text(printable(seen.url), "bold")
    status = seen.status
    if status is None:
        return line if seen.error else line.append("  asking …", _OPEN)
    if seen.error:
        line.append("  does not answer", _BAD)
    elif status["ready"]:
        line.append("  serving", _GOOD)
    else:
        line.append("  not ready", _OPEN)
    processes = status["processes"]
    who = f"process {status['process']}" if processes == 1 else f"{processes} processes"
    hourly = [model["usd_per_hour"] for model, _ in seen.models if model["usd_per_hour"] is not None]
    cost = f", {usd(sum(hourly))}/hour" if hourly else ""
    return line.append(f"  version {printable(status['version'])}, {who} on {printable(status['host'])}{cost}", "not bold")


def _rows(model: Told, figures: Figures | None) -> list[dict[str, Cell]]:
    state, style = _STATES.get(model["state"], (printable(model["state"]).lower(), _OPEN))
    slo_ms, backends = model["slo_ms"], model["backends"]
    version = "" if model["version"] == "1" else f" {model['version']}"
    hourly = model["usd_per_hour"]
    row: dict[str, Cell] = {
        "MODEL, backend": (printable(model["name"]) + printable(version), "bold"),
        "STATE": (state, style),
        "SLO": (ms(slo_ms) if slo_ms is not None else "none", ""),
        "WAIT": (short(sum(backend["queue_requests"] for backend in backends)), ""),
        "BUSY": _busy(sum(backend["busy"] for backend in backends), sum(backend["sessions"] for backend in backends)),
        "$/H": (usd(hourly) if hourly is not None else NONE, ""),
    }
    by_name: dict[str, BackendFigures] = {}
    if figures is not None:
        judged = "" if figures.in_time is None else _GOOD if figures.in_time >= _IN_TIME else _BAD
        p99_ms = figures.p99_ms
        p99_judged = "" if slo_ms is None or p99_ms is None else _GOOD if p99_ms <= slo_ms else _BAD
        above = model["latency"]["bounds_ms"][-1] if model["latency"]["bounds_ms"] else None
        row |= {
            "REQ/S": (short(figures.requests_per_s), ""),
            "FAIL/S": (short(figures.failed_per_s), _BAD if figures.failed_per_s else ""),
            "P50": (ms(figures.p50_ms, above), ""),
            "P99": (ms(p99_ms, above), p99_judged),
            "IN TIME": (percent(figures.in_time), judged),
            "ROWS/B": (_known(figures.rows_per_batch), ""),
            "$/1M": (usd(figures.usd_per_million), ""),
        }
        by_name = {each.name: each for each in figures.backends}
    return [row, *(_backend(backend, by_name.get(backend["name"])) for backend in backends)]


def _backend(backend: Told, figures: BackendFigures | None) -> dict[str, Cell]:
    role = "" if backend["role"] == "regular" else f" ({printable(backend['role'])})"
    row: dict[str, Cell] = {
        "MODEL, backend": (f"  {printable(backend['name'])}{role}", ""),
        "STATE": (printable(backend["state"]), _style_of(backend)),
        "REQ/S": ("", ""),
        "FAIL/S": ("", ""),
        "P50": ("", ""),
        "P99": ("", ""),
        "SLO": ("", ""),
        "IN TIME": ("", ""),
        "WAIT": (short(backend["queue_requests"]), ""),
        "BUSY": _busy(backend["busy"], backend["sessions"]),
        "$/H": (usd(backend["usd_per_hour"]) if backend["usd_per_hour"] is not None else NONE, ""),
        "$/1M": ("", ""),
    }
    if figures is not None:
        row |= {
            "SHARE": (percent(figures.share), ""),
            "ROWS/B": (_known(figures.rows_per_batch), ""),
            "BATCH": (ms(figures.batch_ms), ""),
        }
    return row


def _style_of(backend: Told) -> str:
    if backend["state"] == "live" and backend["detail"]:  # another process has it ejected
        return _OPEN
    return _BACKEND_STATES.get(backend["state"], _OPEN)


def _busy(busy: int, sessions: int) -> Cell:
    return f"{busy}/{sessions}", _OPEN if sessions and busy >= sessions else ""


def _table(rows: Sequence[dict[str, Cell]], width: int | None, *, dim: bool) -> list[Text]:
    """rows: by column; what is missing is not known, but of a model it has no share."""
    unknown: dict[str, Cell] = {column: ("" if column in _OF_BACKENDS else NONE, "") for column in _COLUMNS}
    full = [unknown | row for row in rows]
    widths = {column: max([cell_len(column), *(cell_len(row[column][0]) for row in full)]) for column in _COLUMNS}
    if width is not None:
        longest = widths["MODEL, backend"]
        least = widths["MODEL, backend"] = min(longest, _LONGEST_NAME)
        for column in sorted(filter(_COLUMNS.__getitem__, _COLUMNS), key=_COLUMNS.__getitem__, reverse=True):
            if _wide(widths) <= width:
                break
            del widths[column]
        widths["MODEL, backend"] = min(longest, max(least, least + width - _wide(widths)))
        full = [row | {"MODEL, backend": _shortened(*row["MODEL, backend"], widths["MODEL, backend"])} for row in full]
    lines = [_line({column: (column, "dim") for column in widths}, widths)]
    lines += [_line(row, widths) for row in full]
    for line in lines if dim else ():
        line.stylize("dim")
    return lines


def _wide(widths: dict[str, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def _shortened(text: str, style: str, width: int) -> Cell:
    """Without its middle: what tells names apart, a version among it, mostly stands at an end."""
    if cell_len(text) <= width:
        return text, style
    head = (width - 1) // 2
    return f"{set_cell_size(text, head)}…{set_cell_size(text[::-1], width - 1 - head)[::-1]}", style


def _line(row: dict[str, Cell], widths: dict[str, int]) -> Text:
    line = Text()
    for index, (column, width) in enumerate(widths.items()):
        text, style = row[column]
        cell = Text(text, style)
        cell.truncate(width, overflow="ellipsis")
        space = " " * (width - cell.cell_len)
        line.append(" " * _GAP if index else "")
        line = line.append_text(cell).append(space) if column in _LEFT else line.append(space).append_text(cell)
    return line


def _wrapped(text: str, width: int | None, style: str) -> list[Text]:
    if width is None:
        return [Text(text, style)]
    lines, line = [], ""
    for word in text.split():
        if line and cell_len(line) + 1 + cell_len(word) > width:
            lines.append(Text(line, style))
            line = word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, Text(line, style)]


def short(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.1g}" if value < 0.1 else f"{value:.1f}" if value < 10 else f"{value:,.0f}"


def ms(value: float | None, above: float | None = None) -> str:
    """above: the histogram's last bound, for what lies beyond it."""
    if value is None:
        return NONE
    if value == inf:
        return f">{ms(above)}"
    if value < 1:
        return f"{value:.2g}ms"
    return f"{value:.1f}ms" if value < 10 else f"{value:.0f}ms" if value < 1000 else f"{value / 1000:.1f}s"


def percent(value: float | None) -> str:
    if value is None:
        return NONE
    if value in (0, 1):
        return f"{value:.0%}"
    return ">99.9%" if value > 0.999 else "<0.1%" if value < 0.001 else f"{value:.1%}"


def usd(value: float | None) -> str:
    if value is None:
        return NONE
    if value == 0:
        return "$0"
    return f"${value:.2g}" if value < 0.01 else f"${value:.2f}" if value < 100 else f"${value:,.0f}"


def seconds(value: float) -> str:
    return f"{value:.0f} s" if value < 120 else f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.0f} h"


def _known(value: float | None) -> str:
    return NONE if value is None else short(value)
