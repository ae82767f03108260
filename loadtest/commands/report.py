"""`loadtest report FILE`: a finished recommendation or run again, in another form."""

import argparse
import io
from pathlib import Path
from typing import Any, Final

from gateway.process.command_line import add_command
from loadtest.commands.outputs import check_outputs, write
from loadtest.errors import UsageError
from loadtest.reports.forms import FORMATS

_OPENMETRICS: Final = "openmetrics"


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "report",
        "a finished recommendation or run in another form",
        "loadtest report loadtest-results/minilm-local/report.json",
        "loadtest report loadtest-results/minilm-local/report.json --format md",
        "loadtest report new.json --format html --out new.html",
        "loadtest report new.json --format openmetrics --out new.om",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="report.json of `recommend`, or what `run --json` wrote")
    parser.add_argument(
        "--format", choices=(*FORMATS, _OPENMETRICS), default="text", help="default text; of a run not md, csv and junit"
    )
    parser.add_argument("--json", action="store_const", dest="format", const="json", help="the same as --format json")
    parser.add_argument("--out", type=Path, metavar="PATH", help="write there instead of to standard output")
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    from loadtest.reports.consoles import results
    from loadtest.reports.forms import render, show
    from loadtest.reports.recommendation import read

    check_outputs(arguments, "out", reads=(("FILE", arguments.file),))
    shown = arguments.format == "text" and arguments.out is None
    if _is_run(arguments.file):
        if shown:
            from loadtest.reports.terminal import print_run
            from loadtest.results import read_run

            print_run(read_run(arguments.file), results())
            return 0
        text = _render_run(arguments.file, arguments.format)
    else:
        found = read(arguments.file)
        if arguments.format == _OPENMETRICS:
            from loadtest.reports import openmetrics

            folder = arguments.file.absolute().parent
            check_outputs(arguments, "out", reads=(("runs", folder / "runs"),))
            if not (runs := openmetrics.kept(folder, found)):
                raise UsageError(f"--format openmetrics: no runs in {folder / 'runs'}, where a search keeps them")
            return _give(openmetrics.render(runs), arguments.out)
        if shown:
            show(found, results())
            return 0
        text = render(found, arguments.format)
    return _give(text, arguments.out)


def _give(text: str, out: Path | None) -> int:
    if out is None:
        print(text, end="")
        return 0
    write(out, text)
    return 0


def _is_run(path: Path) -> bool:
    """Whether the file says that it is a run's result."""
    import msgspec

    from loadtest.results import SCHEMA

    try:
        document = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path}: cannot be read: {exc}") from exc
    return isinstance(document, dict) and document.get("schema") == SCHEMA


def _render_run(path: Path, form: str) -> str:
    from rich.console import Console

    from loadtest.reports import openmetrics
    from loadtest.reports.consoles import WIDTH
    from loadtest.reports.run_page import render as page
    from loadtest.reports.terminal import print_run
    from loadtest.results import read_run, to_json

    result = read_run(path)
    if form == "html":
        return page(result)
    if form == "json":
        return to_json(result) + "\n"
    if form == _OPENMETRICS:
        return openmetrics.render([openmetrics.named(result)])
    if form != "text":
        raise UsageError(
            f"--format {form}: a single run has text, html, json and openmetrics; `loadtest compare` has md and junit"
        )
    out = io.StringIO()
    print_run(result, Console(file=out, width=WIDTH))
    return out.getvalue()
