"""`loadtest run TARGET`: one load test, judged."""

import argparse
import asyncio
import csv
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote
from typing import IO, TYPE_CHECKING, Any, Final, get_args

from gateway.process.command_line import add_command
from gateway.process.console import words
from gateway.process.credentials import add_credentials, credentials
from loadtest.commands.interrupts import Interruption, interruption
from loadtest.commands.outputs import STDOUT, NotWritten, check_outputs, give, write
from loadtest.errors import ExitCode, Interrupted, UsageError
from loadtest.results import LoadSpec, Protocol, RunResult, SloSpec, read_load_spec, to_json

if TYPE_CHECKING:
    import numpy as np

    from loadtest.load.request_log import RequestLog
    from loadtest.measuring.progress import Progress

_DEFAULT_USERS: Final = 10  # as wrk's connections: where nothing says how much to send
_OPTIONS: Final = {"payloads": "payload"}  # where a field's is another name
_NO_COLUMNS: Final = ("errors", "latency_counts")  # of a block: no single values


def add_parser(subparsers: Any) -> None:  # argparse's own type is private
    """Add `run`."""
    parser = add_command(
        subparsers,
        "run",
        "one load test of a server that runs, with a verdict",
        "loadtest run http://127.0.0.1:8000 --model minilm",
        'loadtest run http://127.0.0.1:8000 --model minilm --rate 200 --slo "p99<50ms,errors<0.1%" --json new.json',
        'loadtest run 127.0.0.1:8001 --protocol grpc --model minilm --rate 200 --slo "p99<50ms" --until-decided',
    )
    parser.add_argument(
        "target",
        nargs="?",
        help="http[s]:// or grpc[s]://host:port; host:port alone goes by --protocol, or is REST; for invocations the whole URL",
    )
    add_load_options(parser)
    parser.add_argument("--spec", type=Path, metavar="FILE", help="all of this from a JSON file; options here win")
    parser.add_argument(
        "--until-decided", action="store_true", help="of a steady rate: end as soon as the SLO is decided; a pass takes 30 s"
    )
    add_log(parser)
    add_json(parser, "the result, for compare and report")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the blocks; -: to standard output")
    add_openmetrics(parser, "the run")
    add_credentials(parser)
    parser.set_defaults(execute=execute)


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --json to a command that also has other things to write. what: goes to the file."""
    help = f"write {what}; without FILE to standard output, and nothing else there"
    parser.add_argument("--json", type=Path, nargs="?", const=STDOUT, metavar="FILE", help=help)


def add_log(parser: argparse.ArgumentParser) -> None:
    """Add --log."""
    help = "write every request: intended, sent, done, status; -: to standard output"
    parser.add_argument("--log", type=Path, metavar="CSV", help=help)


def add_openmetrics(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --openmetrics. what: goes to the file."""
    help = f"write {what} as OpenMetrics with timestamps, for Prometheus to take in; -: to standard output"
    parser.add_argument("--openmetrics", type=Path, metavar="FILE", help=help)


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add what describes the load: one option per field of `LoadSpec`. Left-out options are None."""
    parser.add_argument("--protocol", choices=get_args(Protocol), help="default rest-json, or grpc for a grpc[s]:// target")
    parser.add_argument("--model", help="default: the server's only one")
    parser.add_argument("--version")
    parser.add_argument(
        "--pattern", help="default poisson with a --rate; phases joined by ';', such as ramp:to=500;constant:rate=500"
    )
    parser.add_argument(
        "--rate",
        type=float,
        dest="rate_rps",
        metavar="RPS",
        help=f"mean offered requests/s; without it (and --pattern) {_DEFAULT_USERS} users who each wait for their answer",
    )
    parser.add_argument("--duration", type=float, dest="duration_s", metavar="S", help="default 30, or as long as a trace")
    parser.add_argument("--slo", metavar="TEXT", help='such as "p99<50ms,errors<0.1%%"')
    parser.add_argument("--seed", type=int, help="default 0")
    parser.add_argument("--connections", type=int, metavar="N", help="the most per process; default 256, or the users; gRPC 4")
    parser.add_argument("--processes", type=int, metavar="N", help="that send, default 1")
    parser.add_argument("--timeout", type=float, dest="timeout_s", metavar="S", help="default 10")
    parser.add_argument("--warmup", type=float, dest="warmup_s", metavar="S", help="default: found (MSER-5)")
    parser.add_argument("--rows", metavar="N[-M]", help="rows of a request, default 1; joins those of --payload")
    parser.add_argument("--length", metavar="N[-M]", help="what else is -1 in the model's shapes, default 16")
    parser.add_argument(
        "--payload", action="append", dest="payloads", metavar="PATH", help=".json, .jsonl or a folder of requests"
    )
    parser.add_argument("--content-type", metavar="TYPE", help="of --payload for invocations")
    parser.add_argument("--values", action="append", metavar="NAME=LOW:HIGH", help="range of a synthetic input")
    parser.add_argument(
        "--header",
        action="append",
        dest="headers",
        metavar="NAME:VALUE",
        help="sent with every request, in place of ours of that name",
    )
    parser.add_argument(
        "--sigv4", metavar="REGION", help="sign each request for SageMaker there, with this machine's AWS credentials"
    )
    parser.add_argument("--label", help="what tables and reports call this run")


def _asked(args: argparse.Namespace) -> LoadSpec:
    """The spec that the options describe. Raises: UsageError."""
    from loadtest.load.patterns import trace_length_s
    from loadtest.measuring.asked import check_used

    given: dict[str, Any] = {
        name: getattr(args, name)
        for name in LoadSpec.__dataclass_fields__
        if name not in ("slo", "headers") and getattr(args, name, None) is not None
    }
    for name, value in given.items():  # a label of nothing is none; what would be the target is told with what it takes
        if name not in ("label", "target") and (value == "" or (isinstance(value, list) and "" in value)):
            option = _OPTIONS.get(name, name.replace("_", "-"))
            raise UsageError(f"--{option} '': expected a value: a variable that is not set may stand there")
    for name in ("payloads", "values"):
        if name in given:
            given[name] = tuple(given[name])
    if args.slo is not None:
        given["slo"] = SloSpec.parse(args.slo)
    if args.headers:
        given["headers"] = tuple(_header(text) for text in args.headers)
    told = frozenset(given)
    if args.spec:
        spec, fields = read_load_spec(args.spec)
        spec, told = replace(spec, **given), told | fields
    elif "target" not in given:
        took = f"; --json took {str(args.json)!r} as its FILE: put --json last" if args.json not in (None, STDOUT) else ""
        raise UsageError(f"run: needs a TARGET (or --spec FILE){took}")
    else:
        spec = LoadSpec(**given)
    if "protocol" not in told and spec.target.partition("://")[0].lower() in ("grpc", "grpcs"):
        spec = replace(spec, protocol="grpc")
    if "pattern" not in given and "rate_rps" not in given and spec.pattern == "poisson" and not spec.rate_rps:
        spec = replace(spec, pattern=f"users:count={_DEFAULT_USERS}")
    check_used(spec, given, until_decided=args.until_decided)
    if "duration_s" not in told and (length_s := trace_length_s(spec.pattern)):
        spec = replace(spec, duration_s=length_s)
    return spec


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise UsageError(f"--header {text!r}: expected NAME:VALUE")
    return name.strip(), value.strip()


def execute(args: argparse.Namespace) -> int:
    import uvloop

    from loadtest.load.patterns import traces

    spec = _asked(args)
    live = _live_file(args)
    reads = [("--spec", args.spec), *(("--payload", path) for path in spec.payloads)]
    reads += (("--pattern", trace.get("file")) for trace in traces(spec.pattern))
    printed = check_outputs(args, "json", "csv", "openmetrics", "log", reads=reads, writes=(("FILE.live", live),))
    writes: list[Callable[[], None]] = []

    def keep_log(log: "RequestLog", used: "np.ndarray") -> None:
        from loadtest.load.request_log import write_csv

        writes.append(lambda: write_csv(args.log, log, used=used))

    with interruption() as interrupted, ExitStack() as opened:
        keep = (lambda: opened.enter_context(_opened(live))) if live else None
        try:
            result = uvloop.run(_measure(spec, args, interrupted, keep, keep_log if args.log else None))
        except Interrupted as exc:
            words.error("loadtest: %s", exc)
            return interrupted.exit_code
        from loadtest.reports import openmetrics
        from loadtest.reports.consoles import results
        from loadtest.reports.terminal import print_run

        if args.json:
            writes.append(lambda: write(args.json, to_json(result) + "\n"))
        if args.csv:
            writes.append(lambda: write(args.csv, blocks_csv(result)))
        if args.openmetrics:
            writes.append(lambda: write(args.openmetrics, openmetrics.render([openmetrics.named(result)])))
        give(lambda: print_run(result, results(hidden=args.quiet or printed)), writes)
    return exit_code(result)


def _live_file(args: argparse.Namespace) -> Path | None:
    """Where what is measured is kept meanwhile, if something is to be kept: beside it."""
    from loadtest.load.live_log import SUFFIX

    for path in (args.json, args.log):
        if path is not None and path != STDOUT and (path.is_file() or not path.exists()):
            return Path(f"{path}{SUFFIX}")
    return None


@contextmanager
def _opened(live: Path) -> Iterator[IO[bytes]]:
    """Removed at the end, unless it has what could not be written. Raises: UsageError."""
    from loadtest.load import live_log

    with live_log.create(live) as file:
        try:
            yield file
        except NotWritten as exc:
            raise NotWritten(f"{exc}; what was measured is kept: `loadtest recover {quote(str(live))}` reads it") from exc
        except BaseException:
            live.unlink(missing_ok=True)
            raise
        live.unlink(missing_ok=True)


def exit_code(result: RunResult) -> ExitCode:
    if not result.valid:
        return ExitCode.INVALID
    if result.verdict is None:
        return ExitCode.MET if result.succeeded else ExitCode.MISSED
    return ExitCode.MET if result.verdict == "pass" else ExitCode.MISSED


async def _measure(
    spec: LoadSpec,
    args: argparse.Namespace,
    interrupted: Interruption,
    keep: Callable[[], IO[bytes]] | None,
    on_log: "Callable[[RequestLog, np.ndarray], None] | None",
) -> RunResult:
    from loadtest.load.target import Address
    from loadtest.measuring.generator import measure
    from loadtest.reports.consoles import meanwhile

    stop = asyncio.Event()
    if spec.sigv4 and args.api_key_file:
        raise UsageError("--api-key-file: --sigv4 signs each request instead: leave one of them out")
    keys = credentials(args)
    if not Address.of(spec).tls:
        scheme = "grpc" if spec.protocol == "grpc" else "http"
        keys.check_plain(spec.target if "://" in spec.target else f"{scheme}://{spec.target}")
    shown = meanwhile(args).is_terminal
    if spec.pattern == f"users:count={_DEFAULT_USERS}" and not args.pattern:
        Address.of(spec)  # what is wrong is told first, and alone
        words.info(
            "no --rate: %d users send as fast as each is answered; to offer a load of your own, add --rate RPS", _DEFAULT_USERS
        )

    def show(progress: "Progress") -> None:
        # Not rich's live display: its thread would hold the interpreter while requests are due.
        _tell(
            f"{progress.elapsed_s:5.0f} s of {spec.duration_s:g}   {progress.rate_rps:,.0f}/s   "
            f"p50 {progress.p50_ms:.2f} ms   p99 {progress.p99_ms:.2f} ms   {progress.sent:,} sent   {progress.failed:,} failed"
        )

    def end() -> None:
        stop.set()
        if shown:
            _tell("ending; what was measured is kept. Once more ends at once.")

    with interrupted.calls(end):
        result = await measure(
            spec,
            until_decided=args.until_decided,
            stop=stop,
            on_progress=show if shown else None,
            on_log=on_log,
            keep=keep,
            shown=keys,
            strict=True,
        )
    if shown:
        _tell("")
    return result


def _tell(line: str) -> None:
    """Replace the line that shows the progress; a terminal that is gone is no reason to end a run."""
    with suppress(OSError):
        sys.stderr.write(f"\r\x1b[2K{line}")
        sys.stderr.flush()


def blocks_csv(result: RunResult) -> str:
    """The blocks of a run as CSV."""
    text = io.StringIO()
    rows = [{key: value for key, value in asdict(block).items() if key not in _NO_COLUMNS} for block in result.blocks]
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
