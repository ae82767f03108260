"""`loadtest recommend SPEC` and `loadtest plan SPEC`."""

import argparse
import asyncio
import datetime
import platform
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gateway.process.command_line import add_command
from gateway.process.console import words
from gateway.process.credentials import Credentials, add_credentials, credentials
from loadtest.commands.outputs import check_outputs, give, write
from loadtest.commands.run import add_openmetrics
from loadtest.errors import ExitCode, LoadtestError

if TYPE_CHECKING:
    from rich.console import Console

    from loadtest.commands.interrupts import Interruption
    from loadtest.lab.launchers.launcher import Launcher
    from loadtest.prices.catalogue import Catalogue
    from loadtest.question.spec import SearchSpec
    from loadtest.reports.recommendation import Recommendation
    from loadtest.search.events import Question

_JOURNAL: Final = "journal.jsonl"

T = TypeVar("T")


def add_parser(subparsers: Any) -> None:
    recommend = add_command(
        subparsers,
        "recommend",
        "find the cheapest candidate that meets an SLO",
        "loadtest recommend configs/loadtests/minilm-local.yaml",
        "loadtest recommend configs/loadtests/minilm-local.yaml --budget-minutes 10 --out results",
        more="Writes a report, a table of evidence, and the gateway configuration of the winner. A search that was interrupted "
        "goes on where it ended.",
    )
    recommend.set_defaults(execute=_recommend)
    recommend.add_argument(
        "--out", type=Path, metavar="DIR", help="for reports, runs and journal (default: loadtest-results/NAME)"
    )
    begins = recommend.add_mutually_exclusive_group()
    begins.add_argument("--fresh", action="store_true", help="measure anew, even if an interrupted search could be resumed")
    begins.add_argument(
        "--resume", action="store_true", help="go on where the last search ended, --budget-minutes and --max-usd more"
    )
    add_openmetrics(recommend, "every run")
    recommend.add_argument("--json", action="store_true", help="the report as JSON to standard output, and nothing else there")
    plan = add_command(
        subparsers,
        "plan",
        "what `recommend` would start, for how long, at what cost; starts nothing",
        "loadtest plan configs/loadtests/minilm-local.yaml",
        "loadtest plan configs/loadtests/running-servers.yaml --target-rps 500",
    )
    plan.add_argument("--json", action="store_true", help="as JSON, and nothing else")
    plan.set_defaults(execute=_plan)
    for parser in (recommend, plan):
        parser.add_argument("spec", type=Path, metavar="SPEC", help="a YAML file: `gateway examples minilm-local` writes one")
        parser.add_argument("--budget-minutes", type=float, metavar="N", help="instead of budget.minutes")
        parser.add_argument(
            "--max-usd", type=float, metavar="N", help="instead of budget.usd; without it nothing paid is started"
        )
        parser.add_argument(
            "--target-rps", type=float, metavar="N", help="instead of target_rps: the rate a fleet is wanted for"
        )
        parser.add_argument("--instances", type=Path, metavar="FILE", help="another catalogue than the one that comes along")
        add_credentials(parser)


def _recommend(arguments: argparse.Namespace) -> int:
    import uvloop

    from loadtest.commands.interrupts import interruption
    from loadtest.commands.plan import plan_of
    from loadtest.commands.plan import show as show_plan
    from loadtest.lab.launchers import launcher_of
    from loadtest.question.spec import without
    from loadtest.question.subject import named, subject_of
    from loadtest.reports import openmetrics
    from loadtest.reports.consoles import meanwhile, results
    from loadtest.reports.forms import FILES, show, write_all
    from loadtest.reports.recommendation import to_json
    from loadtest.wording import usd

    folder = arguments.out or Path("loadtest-results") / arguments.spec.stem
    shown = credentials(arguments)
    spec, catalogue = _read(arguments, shown)
    reads = (("SPEC", arguments.spec), ("--instances", arguments.instances), *spec.reads)
    models = (("candidates", path) for path in named(spec))
    ours = (("--out", folder / name) for name in (_JOURNAL, *FILES.values()))
    printed = check_outputs(arguments, "json", "openmetrics", reads=(*reads, *models), writes=ours)
    console = results(hidden=arguments.quiet or printed)
    launcher = launcher_of(spec, catalogue, shown)
    spec = without(spec, launcher.preflight(spec.candidates))
    question = _question(spec, launcher)
    if launcher.paid and question.max_usd is None:
        show_plan(plan_of(spec, question, launcher, _today()), console)
        words.error("loadtest: nothing was started: these candidates cost money; set --max-usd to allow it")
        return ExitCode.USAGE
    question = replace(question, subject=subject_of(spec))
    launcher.admit()
    if launcher.paid:
        words.info("run %s: should this command be killed, end it with: %s", launcher.run_id, launcher.reaped_by)
    with interruption() as interrupted:
        try:
            found = uvloop.run(_search(spec, question, launcher, folder, arguments, meanwhile(arguments), interrupted, shown))
        except asyncio.CancelledError:
            if launcher.paid:
                words.warning("loadtest: %s were spent, and %s", usd(launcher.purse.usd), _removed(launcher))
            return interrupted.exit_code
        except LoadtestError:
            if launcher.paid:
                words.warning("loadtest: %s were spent, and %s", usd(launcher.purse.usd), _removed(launcher))
            raise
    written: list[Path] = []

    def show_all() -> None:
        show(found, console)
        if arguments.json:
            print(to_json(found))

    def write_openmetrics() -> None:
        write(arguments.openmetrics, openmetrics.render(openmetrics.kept(folder, found)))
        written.append(arguments.openmetrics)

    writes = [lambda: written.extend(write_all(found, folder)), *([write_openmetrics] if arguments.openmetrics else ())]
    give(show_all, writes)
    console.print("written: " + ", ".join(str(path) for path in written), soft_wrap=True)
    return found.exit_code


def _plan(arguments: argparse.Namespace) -> int:
    from loadtest.commands.plan import as_json, plan_of, show
    from loadtest.lab.launchers import launcher_of
    from loadtest.question.spec import without
    from loadtest.reports.consoles import results

    spec, catalogue = _read(arguments, credentials(arguments))
    launcher = launcher_of(spec, catalogue)
    spec = without(spec, launcher.preflight(spec.candidates))
    plan = plan_of(spec, _question(spec, launcher), launcher, _today())
    if arguments.json:
        print(as_json(plan))
    else:
        show(plan, results())
    return ExitCode.MET


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()


def _question(spec: "SearchSpec", launcher: "Launcher") -> "Question":
    from loadtest.lab.recommender import question_of

    question = question_of(spec, paid=launcher.paid, parallel=launcher.parallel, start_s=launcher.start_s)
    return replace(question, beside_usd_per_hour=launcher.beside_usd_per_hour)


def _removed(launcher: "Launcher") -> str:
    return f"this is left: {'; '.join(launcher.left_behind)}" if launcher.left_behind else "everything was removed"


def _read(arguments: argparse.Namespace, shown: Credentials) -> "tuple[SearchSpec, Catalogue]":
    from loadtest.lab.launchers.url import price_by_metadata
    from loadtest.prices.catalogue import load_catalogue
    from loadtest.prices.live_prices import current_catalogue
    from loadtest.question.spec import limited, read_search_spec

    own = arguments.instances
    now = datetime.datetime.now(datetime.UTC)
    catalogue = load_catalogue(own) if own else current_catalogue(now)
    spec = read_search_spec(arguments.spec, catalogue)
    spec = limited(spec, minutes=arguments.budget_minutes, usd=arguments.max_usd, target_rps=arguments.target_rps)
    return asyncio.run(price_by_metadata(spec, catalogue, shown)), catalogue


async def _search(
    spec: "SearchSpec",
    question: "Question",
    launcher: "Launcher",
    folder: Path,
    arguments: argparse.Namespace,
    console: "Console",
    interrupted: "Interruption",
    shown: Credentials,
) -> "Recommendation":
    from loadtest.lab.driver import extended, run_search
    from loadtest.lab.journal import Journal
    from loadtest.lab.platform import with_platform, with_requests
    from loadtest.lab.recommender import Lab
    from loadtest.measuring.generator import measure
    from loadtest.reports.conclusion import build
    from loadtest.reports.display import Display
    from loadtest.wording import counted, differences

    journal = Journal(folder / _JOURNAL, question, fresh=arguments.fresh, resume=arguments.resume)
    if journal.events:
        console.print(f"resuming after {counted(len(journal.events), 'step')} found in {folder / _JOURNAL}")
    if arguments.resume:
        question = extended(question, journal.events)
        launcher.purse.max_usd = question.max_usd
    if launcher.paid:
        spec = with_requests(spec, folder)  # now that the folder is this search's
    names = dict(zip((candidate.name for candidate in spec.candidates), differences(spec.candidates), strict=True))
    display = Display(console, question, names, paid=launcher.paid)
    lab = Lab(
        spec,
        launcher,
        partial(measure, shown=shown),
        runs=folder / "runs",
        on_progress=display.on_progress if console.is_terminal else None,
        shown=shown,
    )
    task = asyncio.current_task()
    assert task is not None  # this is a coroutine

    def cancel() -> None:
        task.cancel()

    try:
        with interrupted.calls(cancel):
            outcome = await run_search(question, lab, journal, on_step=display.on_step)
    except asyncio.CancelledError:
        display.clear()
        again = "the same command" + " without --fresh" * arguments.fresh
        kept = f": what was measured is kept in {folder}; {again} goes on from there"
        words.warning("loadtest: interrupted%s", " before anything was measured" if journal.is_empty else kept)
        raise
    finally:
        display.clear()
        journal.close()
    outcome = await unless_interrupted(with_platform(outcome, launcher), interrupted, outcome)
    if launcher.left_behind:
        outcome = replace(outcome, notes=(*outcome.notes, *((each,) for each in launcher.left_behind)))
    now = datetime.datetime.now(datetime.UTC)
    again = asked_with(arguments)
    return build(spec, question, outcome, now=now, machine=machine(), paid=launcher.paid, asked_with=again)


def asked_with(arguments: argparse.Namespace) -> list[str]:
    """The options that asked this question here; the budget is for who goes on."""
    kept = ("out", "target_rps", "instances", "openmetrics", "ca", "cert", "key", "api_key_file")
    given = ((name, getattr(arguments, name)) for name in kept)
    return [part for name, value in given if value is not None for part in (f"--{name.replace('_', '-')}", str(value))]


async def unless_interrupted(work: Coroutine[Any, Any, T], interrupted: "Interruption", otherwise: T) -> T:
    """What it gives; `otherwise`, if the user will not wait for it."""
    task = asyncio.ensure_future(work)

    def cancel() -> None:
        task.cancel()

    with interrupted.calls(cancel):
        await asyncio.wait((task,))
    return otherwise if task.cancelled() else task.result()


def machine() -> str:
    """What this machine is, in a few words."""
    from gateway.process.machine import cores
    from loadtest.wording import counted

    return f"{platform.machine()} with {counted(cores(), 'core')}, Python {platform.python_version()}"
