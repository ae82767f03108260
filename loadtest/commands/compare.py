"""`loadtest compare BASE NEW`: has it become slower? Two results of `loadtest run --json` of the same load.

Runs of the same seed are compared block by block: each block of both was offered the very same requests. A change counts if its
95 % interval excludes zero and its estimate is beyond the tolerance. Exit code 4 is a regression.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gateway.process.command_line import add_command
from gateway.process.console import words
from loadtest.commands.outputs import check_outputs, give, write
from loadtest.commands.run import add_json
from loadtest.errors import ExitCode, UsageError
from loadtest.results import read_run


def add_parser(subparsers: Any) -> None:  # argparse's own type is private
    """Add `compare`."""
    parser = add_command(
        subparsers,
        "compare",
        "two results of the same load: regression, improvement or same",
        "loadtest compare base.json new.json",
        "loadtest compare base.json new.json --junit compare.xml --markdown -",
        more=str(__doc__).partition("\n\n")[2],
    )
    parser.add_argument("base", type=Path, help="result of `loadtest run --json`")
    parser.add_argument("new", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.05, metavar="SHARE", help="relative change that is fine (0.05)")
    parser.add_argument(
        "--share-tolerance",
        type=float,
        default=0.005,
        metavar="SHARE",
        help="of the shares that succeeded and met the SLO (0.005)",
    )
    add_json(parser, "the comparison")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write it for a pull request; -: to standard output")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write it for CI; -: to standard output")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> ExitCode:
    import msgspec
    from rich.table import Table

    from loadtest.reports.consoles import results
    from loadtest.verdict.comparison import cells, compare, junit, markdown

    printed = check_outputs(args, "json", "markdown", "junit", reads=(("BASE", args.base), ("NEW", args.new)))
    for option, share in (("--tolerance", args.tolerance), ("--share-tolerance", args.share_tolerance)):
        if not 0 <= share < math.inf:
            raise UsageError(f"{option} {share:g}: expected a number of at least 0")
    base, new = read_run(args.base), read_run(args.new)
    for path, result in ((args.base, base), (args.new, new)):
        if not result.valid:
            why = "; ".join(result.reasons)
            words.error("loadtest: %s: INVALID, nothing can be compared: %s. Measure it again.", path, why)
            return ExitCode.INVALID
    comparison = compare(base, new, tolerance=args.tolerance, share_tolerance=args.share_tolerance)
    writes: list[Callable[[], None]] = []
    if args.json:
        document = msgspec.json.format(msgspec.json.encode(asdict(comparison)), indent=2).decode() + "\n"
        writes.append(lambda: write(args.json, document))
    if args.junit:
        writes.append(lambda: write(args.junit, junit(comparison)))
    if args.markdown:
        writes.append(lambda: write(args.markdown, markdown(comparison, base, new)))

    def show() -> None:
        table = Table("metric", "base", "new", "change of blocks", "95 % interval", "verdict", box=None, pad_edge=False)
        for metric in comparison.metrics:
            table.add_row(*cells(metric))
        console = results(hidden=args.quiet or printed)
        console.print(table)
        for note in comparison.notes:
            console.print(f"note: {note}", style="yellow", markup=False)
        console.print(f"[bold]{comparison.verdict}[/bold]")

    give(show, writes)
    return ExitCode.REGRESSION if comparison.verdict == "regression" else ExitCode.MET
