"""`loadtest report FILE`: a finished recommendation or run again, in another form. Also what `recommend` writes at its end.

text    for the terminal              html    the page, one file
md      for a pull request            junit   for CI: one test case per candidate, and the SLO
csv     one line per candidate        json    the document itself
"""

import argparse
import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree

from loadtest.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from loadtest.recommendation import CandidateReport, Recommendation

FORMATS: Final = ("text", "html", "md", "csv", "junit", "json")
METRICS: Final = ("CostPerInference", "MaxInvocations", "ModelLatency", "CpuUtilization", "MemoryUtilization")
COLUMNS = ("candidate", "", "USD/h", "predicted/s", "max/s", "fails at/s", "peak about/s", "p99 ms", "USD/million", "why not")
FILES: Final = {
    "json": "report.json",
    "html": "report.html",
    "md": "report.md",
    "csv": "report.csv",
    "junit": "junit.xml",
    "yaml": "gateway.yaml",
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("report", help="a finished recommendation or run in another form")
    parser.add_argument("file", type=Path, metavar="FILE", help="report.json of `recommend`, or what `run --json` wrote")
    parser.add_argument("--format", choices=FORMATS, default="text")
    parser.add_argument("--out", type=Path, metavar="PATH", help="write there instead of to standard output")
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    from loadtest.recommendation import read

    if _is_run(arguments.file):
        text = _render_run(arguments.file, arguments.format)
    else:
        found = read(arguments.file)
        if arguments.format == "text" and arguments.out is None:
            from rich.console import Console

            show(found, Console())
            return 0
        text = render(found, arguments.format)
    if arguments.out is None:
        print(text, end="")
        return 0
    try:
        arguments.out.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"--out: {arguments.out} cannot be written: {exc}") from exc
    return 0


def _is_run(path: Path) -> bool:
    """Whether the file says that it is a run's result."""
    import msgspec

    from loadtest.results import SCHEMA

    try:
        document = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError) as exc:
        raise UsageError(f"{path}: cannot be read: {exc}") from exc
    return isinstance(document, dict) and document.get("schema") == SCHEMA


def _render_run(path: Path, form: str) -> str:
    from rich.console import Console

    from loadtest.results import read_run, to_json
    from loadtest.run_page import render as page
    from loadtest.terminal import print_run

    result = read_run(path)
    if form == "html":
        return page(result)
    if form == "json":
        return to_json(result) + "\n"
    if form != "text":
        raise UsageError(f"--format {form}: a single run has text, html and json; `loadtest compare` has md and junit")
    out = io.StringIO()
    print_run(result, Console(file=out, width=160))
    return out.getvalue()


def render(found: "Recommendation", form: str) -> str:
    """The document in one of FORMATS."""
    if form == "html":
        from loadtest.html import render as page

        return page(found)
    if form == "json":
        from loadtest.recommendation import to_json

        return to_json(found) + "\n"
    if form == "text":
        from rich.console import Console

        console = Console(file=io.StringIO(), width=160)
        show(found, console)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]  # the StringIO above
        return text
    return {"md": markdown, "csv": table, "junit": junit}[form](found)


def write_all(found: "Recommendation", folder: Path) -> list[Path]:
    """Every form as a file, and the configuration to deploy. Returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for form, name in FILES.items():
        path = folder / name
        if form == "yaml":
            if not found.configuration:
                path.unlink(missing_ok=True)  # of an earlier search
                continue
            path.write_text(configuration(found), encoding="utf-8")
        else:
            path.write_text(render(found, form), encoding="utf-8")
        written.append(path)
    return written


def configuration(found: "Recommendation") -> str:
    """The gateway configuration to deploy, with where it comes from as a comment."""
    import yaml

    why = "".join(f"# {line}\n" for line in (found.answer, f"{found.created_at}, {found.source}, on {found.machine}."))
    return why + yaml.safe_dump(found.configuration, sort_keys=False, allow_unicode=True)


def show(found: "Recommendation", console: "Console") -> None:
    """The summary for people."""
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    good = found.winner is not None and found.proven
    title = found.winner or "no candidate"
    console.print(Panel(Text(found.answer), title=f"[bold]{title}", border_style="green" if good else "red", padding=(1, 2)))
    kept = range(len(COLUMNS)) if console.width >= 120 else (0, 1, 4, 8)
    grid = Table(title=f"{found.model} within {found.slo}", title_justify="left", box=None, pad_edge=False)
    for number in kept:
        grid.add_column(COLUMNS[number], justify="right" if 1 < number < 9 else "left", no_wrap=number not in (0, 9))
    for candidate in found.candidates:
        style = {"winner": "bold green", "runner-up": "cyan", "rejected": "red"}.get(candidate.status, "")
        cells = (candidate.name, candidate.status, *_cells(candidate), candidate.out)
        grid.add_row(*(cells[number] for number in kept), style=style)
    console.print(grid)
    for fleet in [found.fleet] if found.fleet else []:
        for name, per_minute in fleet.autoscaling_per_minute.items():
            console.print(f"autoscaling of {name}: {per_minute:,.0f} invocations per instance and minute, to begin with")
    for line in (*found.warnings, *found.notes):
        console.print(Text(f"! {line}", style="yellow"))
    spent = f"{found.seconds_spent / 60:.1f} of {found.seconds_budget / 60:g} minutes"
    console.print(f"[dim]spent {spent}" + (f", ${found.usd_spent:.2f}" if found.usd_spent else "") + "[/dim]")


def markdown(found: "Recommendation") -> str:
    lines = [f"### {found.model} within {found.slo}", "", found.answer, ""]
    lines += [f"| {' | '.join(COLUMNS)} |", f"|---|---|{'--:|' * (len(COLUMNS) - 3)}---|"]
    for candidate in found.candidates:
        name = f"**{candidate.name}**" if candidate.status == "winner" else candidate.name
        lines.append(f"| {' | '.join((name, candidate.status, *_cells(candidate), candidate.out))} |")
    notes = [f"- {line}" for line in (*found.warnings, *found.notes)]
    return "\n".join([*lines, "", *notes]).rstrip() + "\n"


def table(found: "Recommendation") -> str:
    """CSV, one line per candidate; AWS's names where AWS has one."""
    aws = {entry.RecommendationId: entry for entry in found.InferenceRecommendations}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    own = "candidate status InstanceType backend settings CostPerHour price_basis price_source price_date price_flags"
    rates_and_costs = "predicted_rps max_rps failing_rps estimated_rps cost_per_million_usd requests_per_dollar"
    writer.writerow((*own.split(), *rates_and_costs.split(), *METRICS, "out"))
    for c in found.candidates:
        metrics = aws[c.name].Metrics if c.name in aws else None
        settings = ";".join(f"{key}={value}" for key, value in c.settings.items())
        price = (c.price.usd_per_hour, c.price.basis, c.price.source, c.price.date, ";".join(c.price.flags))
        rates = (c.predicted_rps, c.max_rps, c.failing_rps, c.estimated_rps, c.cost_per_million_usd, c.requests_per_dollar)
        measured = tuple(getattr(metrics, name) if metrics else None for name in METRICS)
        writer.writerow((c.name, c.status, c.instance_type, c.backend, settings, *price, *rates, *measured, c.out))
    return out.getvalue()


def junit(found: "Recommendation") -> str:
    """One test case for the question, one per candidate: measured ones pass or fail, the others are skipped."""
    failed = found.winner is None or not found.proven
    suite = ElementTree.Element("testsuite", name=f"loadtest {found.model}", time=f"{found.seconds_spent:.1f}")
    whole = ElementTree.SubElement(suite, "testcase", classname="loadtest", name=f"a candidate meets {found.slo}")
    if failed:
        ElementTree.SubElement(whole, "failure", message=found.answer)
    failures, skipped = int(failed), 0
    for candidate in found.candidates:
        case = ElementTree.SubElement(suite, "testcase", classname="loadtest.candidates", name=candidate.name)
        if candidate.max_rps:
            ElementTree.SubElement(case, "system-out").text = f"passes at {candidate.max_rps:.4g}/s"
        else:
            skipped += 1
            ElementTree.SubElement(case, "skipped", message=candidate.out or "not measured")
    suite.attrib |= {"tests": str(1 + len(found.candidates)), "failures": str(failures), "skipped": str(skipped)}
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _cells(candidate: "CandidateReport") -> tuple[str, ...]:
    rate = candidate.max_rps or candidate.held_rps
    return (
        f"{candidate.price.usd_per_hour:.4g}" + ("*" if candidate.price.flags else ""),
        f"{candidate.predicted_rps:.4g}" if candidate.predicted_rps else "",
        (f"{rate:.4g}" if candidate.max_rps else f"({rate:.4g})") if rate else "",
        f"{candidate.failing_rps:.4g}" if candidate.failing_rps else "",
        f"{candidate.estimated_rps:.4g}" if rate else "",
        f"{candidate.p99_ms_at_max:.3g}" if candidate.p99_ms_at_max else "",
        f"{candidate.cost_per_million_usd:.4g}" if candidate.cost_per_million_usd else "",
    )
