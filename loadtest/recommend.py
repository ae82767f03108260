"""`loadtest recommend SPEC` and `loadtest plan SPEC`."""

import argparse
import asyncio
import datetime
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadtest.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from loadtest.events import Question
    from loadtest.interrupts import Interruption
    from loadtest.launchers import Launcher
    from loadtest.recommendation import Recommendation
    from loadtest.spec import Spec


def add_parser(subparsers: Any) -> None:
    recommend = subparsers.add_parser("recommend", help="find the cheapest candidate that meets an SLO")
    recommend.set_defaults(execute=_recommend)
    recommend.add_argument(
        "--out", type=Path, metavar="DIR", help="for reports, runs and journal (default: loadtest-results/NAME)"
    )
    recommend.add_argument("--fresh", action="store_true", help="measure anew, even if an interrupted search could be resumed")
    recommend.add_argument("--resume", action="store_true", help="go on where the last search ended, --budget-minutes more")
    plan = subparsers.add_parser("plan", help="what `recommend` would start, for how long, at what cost; starts nothing")
    plan.set_defaults(execute=_plan)
    for parser in (recommend, plan):
        parser.add_argument("spec", type=Path, metavar="SPEC", help="a YAML file, see configs/loadtests/")
        parser.add_argument("--budget-minutes", type=float, metavar="N", help="instead of budget.minutes")
        parser.add_argument(
            "--max-usd", type=float, metavar="N", help="instead of budget.usd; without it nothing paid is started"
        )
        parser.add_argument(
            "--target-rps", type=float, metavar="N", help="instead of target_rps: the rate a fleet is wanted for"
        )
        parser.add_argument("--instances", type=Path, metavar="FILE", help="another catalogue than the one that comes along")


def _recommend(arguments: argparse.Namespace) -> int:
    import uvloop

    from loadtest.interrupts import interruption
    from loadtest.launchers import launcher_of
    from loadtest.recommender import question_of
    from loadtest.report import output, show, write_all

    spec = _read(arguments)
    console = output()
    launcher = launcher_of(spec.launcher)
    launcher.preflight(spec.candidates)
    question = question_of(spec, paid=launcher.paid)
    if launcher.paid and question.max_usd is None:
        _show_plan(spec, question, launcher, console)
        console.print("Nothing was started: these candidates cost money. Set --max-usd to allow it.")
        return ExitCode.USAGE
    folder = arguments.out or Path("loadtest-results") / arguments.spec.stem
    with interruption() as interrupted:
        try:
            found = uvloop.run(_search(spec, question, launcher, folder, arguments, console, interrupted))
        except asyncio.CancelledError:
            console.print(f"interrupted: what was measured is kept in {folder}; the same command goes on from there")
            return interrupted.exit_code
    written = write_all(found, folder)
    show(found, console)
    console.print("written: " + ", ".join(str(path) for path in written), soft_wrap=True)
    return found.exit_code


def _plan(arguments: argparse.Namespace) -> int:
    from loadtest.launchers import launcher_of
    from loadtest.recommender import question_of
    from loadtest.report import output

    spec = _read(arguments)
    launcher = launcher_of(spec.launcher)
    launcher.preflight(spec.candidates)
    _show_plan(spec, question_of(spec, paid=launcher.paid), launcher, output())
    return ExitCode.MET


def _read(arguments: argparse.Namespace) -> "Spec":
    from loadtest.catalogue import BUNDLED, load_catalogue
    from loadtest.live_prices import current_catalogue
    from loadtest.recommender import limited, price_by_metadata
    from loadtest.spec import load_spec

    own = arguments.instances
    now = datetime.datetime.now(datetime.UTC)
    catalogue = load_catalogue(own) if own else current_catalogue(now, instances=BUNDLED)
    spec = load_spec(arguments.spec, catalogue)
    spec = limited(spec, minutes=arguments.budget_minutes, usd=arguments.max_usd, target_rps=arguments.target_rps)
    return asyncio.run(price_by_metadata(spec, catalogue))


def _show_plan(spec: "Spec", question: "Question", launcher: "Launcher", console: "Console") -> None:
    from rich.table import Table

    from loadtest.events import EXPECTED
    from loadtest.search import AGREE_MOST, FINALISTS, OVERLOAD, SAFE, SHORTLIST, agree_seconds, profile_seconds

    groups = {candidate.group for candidate in spec.candidates}
    grid = Table(title=f"{spec.model} within {spec.slo}, launcher {spec.launcher.kind}", title_justify="left", box=None)
    for column in ("candidate", "USD/h", "price"):
        grid.add_column(column, justify="right" if column == "USD/h" else "left")
    today = datetime.datetime.now(datetime.UTC).date()
    sources = set()
    for candidate in spec.candidates:
        price = candidate.price
        assert price is not None  # _read priced them
        grid.add_row(candidate.name, f"{price.usd_per_hour:.4g}", ", ".join((candidate.basis, *price.flags(today))))
        sources.add(f"{candidate.basis}: {price.source}, {price.date or 'undated'}")
    console.print(grid)
    for source in sorted(sources):
        console.print(f"prices, {source}", style="dim")
    if spec.comparison is not None:
        kinds = len({candidate.numerics for candidate in spec.candidates})
        against = spec.comparison.reference
        console.print(
            f"First the answers of {kinds} kind{'s' * (kinds > 1)} of candidates are compared with "
            f"{against if against == EXPECTED else f'those of {against}'}: for seconds on a quiet machine, at most "
            f"{agree_seconds(question.seconds):.0f} s each, and {AGREE_MOST:.0%} of the time in all."
        )
    loaded = min(SHORTLIST, len(spec.candidates))
    each = profile_seconds(question, len(groups))
    console.print(
        f"{len(spec.candidates)} candidates share {len(groups)} profiles of {each:.0f} s; up to {loaded} see real load, "
        f"{min(FINALISTS, loaded)} up to their peak. A start takes about {launcher.start_s:.0f} s. "
        f"All in all {question.seconds / 60:g} minutes, {OVERLOAD:g} and {SAFE:g} times the winner's peak included."
    )
    if launcher.paid:
        dearest = max(candidate.usd_per_hour for candidate in spec.candidates) * question.seconds / 3600
        bound = dearest if question.max_usd is None else min(dearest, question.max_usd)
        console.print(f"Costs at most ${bound:.2f}.")
    else:
        console.print("Costs nothing: what is measured runs already, or runs here.")
    for line in spec.warnings:
        console.print(f"! {line}", style="yellow")


async def _search(
    spec: "Spec",
    question: "Question",
    launcher: "Launcher",
    folder: Path,
    arguments: argparse.Namespace,
    console: "Console",
    interrupted: "Interruption",
) -> "Recommendation":
    from loadtest.display import Display
    from loadtest.generator import measure
    from loadtest.journal import Journal
    from loadtest.recommendation import build
    from loadtest.recommender import Lab, extended, run_search
    from loadtest.wording import differences

    journal = Journal(folder / "journal.jsonl", question, fresh=arguments.fresh, resume=arguments.resume)
    if journal.events:
        console.print(f"resuming after {len(journal.events)} steps found in {folder / 'journal.jsonl'}")
    if arguments.resume:
        question = extended(question, journal.events)
    names = dict(zip((candidate.name for candidate in spec.candidates), differences(spec.candidates), strict=True))
    display = Display(console, question, names, paid=launcher.paid)
    lab = Lab(spec, launcher, measure, runs=folder / "runs", on_progress=display.on_progress if console.is_terminal else None)
    task = asyncio.current_task()
    assert task is not None  # this is a coroutine

    def cancel() -> None:
        task.cancel()

    try:
        with interrupted.calls(cancel):
            outcome = await run_search(question, lab, journal, on_step=display.on_step)
    finally:
        display.clear()
        journal.close()
    now = datetime.datetime.now(datetime.UTC)
    return build(spec, question, outcome, now=now, machine=machine(), paid=launcher.paid, out=arguments.out)


def machine() -> str:
    """What this machine is, in a few words."""
    cores = len(os.sched_getaffinity(0))
    return f"{platform.machine()} with {cores} cores, Python {platform.python_version()}"
