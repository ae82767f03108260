"""`loadtest recover FILE.live`: what a run had measured when it was killed.

While `loadtest run` is asked to write a file (--json, --log), what it measures lives in FILE.live beside it, which a run that
ends removes. After one that was killed it is still there.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from gateway.process.command_line import add_command
from loadtest.commands.outputs import check_outputs, give, write
from loadtest.commands.run import add_json, add_log
from loadtest.errors import ExitCode, UsageError


def add_parser(subparsers: Any) -> None:  # argparse's own type is private
    """Add `recover`."""
    parser = add_command(
        subparsers,
        "recover",
        "what a run that was killed had measured",
        "loadtest recover new.json.live --json new.json",
        more=str(__doc__).partition("\n\n")[2],
    )
    parser.add_argument("file", type=Path, metavar="FILE.live", help="what the run has left; it stays as it is")
    add_json(parser, "the result, marked PARTIAL")
    add_log(parser)
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> ExitCode:
    import numpy as np

    from loadtest.commands.run import exit_code
    from loadtest.load import live_log
    from loadtest.load.patterns import was_scheduled
    from loadtest.load.request_log import CUT, PENDING, UNSENT, write_csv
    from loadtest.reports.consoles import results
    from loadtest.reports.terminal import print_run
    from loadtest.results import to_json
    from loadtest.verdict.analysis import Ended, summarise

    printed = check_outputs(args, "json", "log", reads=(("FILE.live", args.file),))
    description, log = live_log.read(args.file)
    spec = description.spec
    times = np.array(log.intended)  # all of an open loop's, which were laid out ahead
    plan = was_scheduled(spec.pattern, times, rate_rps=spec.rate_rps, duration_s=spec.duration_s, seed=spec.seed)
    status, dispatched, done = np.asarray(log.status), np.asarray(log.dispatched), np.asarray(log.done)
    indices = np.flatnonzero((dispatched > 0) & (status != UNSENT))
    nothing = f"{args.file}: the run was killed before anything was answered: there is nothing to recover"
    if len(indices) == 0:
        raise UsageError(nothing)
    last_ns = int(max(dispatched.max(initial=0), done.max(initial=0)))  # that it lived
    waiting = indices[status[indices] == PENDING]
    done[waiting], status[waiting] = last_ns, CUT
    indices = indices[np.argsort(np.asarray(log.intended)[indices], kind="stable")]
    elapsed_ns = min(plan.duration_ns, last_ns)
    indices = indices[np.asarray(log.intended)[indices] < elapsed_ns]
    ended_at = datetime.fromisoformat(description.started_at) + timedelta(microseconds=elapsed_ns // 1000)
    ended = Ended(description.started_at, ended_at.isoformat(timespec="milliseconds"), elapsed_ns, partial=True)
    result = replace(summarise(spec, plan, log, indices, (), ended, None, None), digests=description.digests)
    if result.requests + result.warmup_requests == 0:
        raise UsageError(nothing)
    writes: list[Callable[[], None]] = []
    if args.log:
        writes.append(lambda: write_csv(args.log, log, used=indices))
    if args.json:
        writes.append(lambda: write(args.json, to_json(result) + "\n"))
    give(lambda: print_run(result, results(hidden=args.quiet or printed)), writes)
    return exit_code(result)
