"""`loadtest selfcheck`: how much load can this machine offer, honestly? Against a null server beside it.

The null server takes a core of its own, so a machine that only sends can offer at least this much.
"""

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from loadtest.errors import ExitCode, LoadtestError, UsageError
from loadtest.results import LoadSpec, Protocol, RunResult, Slo

_RATES: Final = (500, 1000, 2000, 4000, 6000, 8000, 10_000, 12_000, 15_000, 20_000, 25_000, 30_000, 40_000)
_FAILURES: Final = 2  # in a row: then no higher rate is tried
_PROTOCOLS: Final[tuple[Protocol, ...]] = ("rest-json", "grpc")


@dataclass(frozen=True, slots=True)
class NullServer:
    """Where it listens."""

    http_port: int
    grpc_port: int

    def target(self, protocol: Protocol) -> str:
        return f"127.0.0.1:{self.grpc_port}" if protocol == "grpc" else f"http://127.0.0.1:{self.http_port}"


@contextmanager
def null_server() -> Iterator[NullServer]:
    """Run the null server as a process of its own."""
    command = [sys.executable, "-m", "loadtest.nullserver"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ports = process.stdout.readline().split()
        if len(ports) != 2:
            raise LoadtestError("the null server did not start: see its message above")
        yield NullServer(int(ports[0]), int(ports[1]))
        # Leaving closes its standard input, which ends it.


def add_parser(subparsers: Any) -> None:  # argparse's own type is private
    """Add `selfcheck`."""
    parser = subparsers.add_parser("selfcheck", help="how much load this machine can offer", description=__doc__)
    parser.add_argument("--slo", default="p99<50ms", help="whose 1 %% bounds the send lag, default p99<50ms")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each run, default 2")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--protocol", choices=_PROTOCOLS, help="only this one")
    parser.add_argument("--rates", metavar="R,R,...", help="requests/s to try, rising")
    parser.add_argument("--require", type=float, metavar="RPS", help="exit 3 if less can be sent")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> ExitCode:
    import uvloop
    from rich.console import Console
    from rich.table import Table

    slo = Slo.parse(args.slo)
    rates = _parse_rates(args.rates) if args.rates else _RATES
    console = Console(highlight=False)
    enough = True
    with null_server() as server:
        for protocol in (args.protocol,) if args.protocol else _PROTOCOLS:
            spec = LoadSpec(
                server.target(protocol),
                protocol=protocol,
                model="null",
                slo=slo,
                duration_s=args.seconds,
                processes=args.processes,
                warmup_s=0.0,
            )
            results = uvloop.run(_climb(spec, rates))
            table = Table(
                "asked 1/s", "sent 1/s", "lag p50 ms", "lag p99 ms", "p50 ms", "p99 ms", "cores", "", box=None, pad_edge=False
            )
            for result in results:
                own = result.generator
                table.add_row(
                    f"{result.asked_rps:,.0f}",
                    f"{result.sent_rps:,.0f}",
                    f"{own.send_lag_p50_ms:.3f}",
                    f"{own.send_lag_p99_ms:.3f}",
                    f"{result.latency.p50:.3f}",
                    f"{result.latency.p99:.3f}",
                    f"{own.cpu_cores:.2f}",
                    "valid" if result.valid else "INVALID",
                )
            console.print(f"[bold]{protocol}[/bold], {args.processes} process(es)")
            console.print(table)
            valid = max((result.sent_rps for result in results if result.valid), default=0.0)
            kept = max((result.succeeded_rps for result in results if keeps_up(result)), default=0.0)
            limit_ms = results[0].generator.send_lag_limit_ms
            console.print(
                f"can offer {valid:,.0f}/s with a send lag p99 of at most {limit_ms:.3g} ms, {kept:,.0f}/s at any lag\n"
            )
            enough &= kept >= (args.require or 0)
    return ExitCode.MET if enough else ExitCode.INVALID


def _parse_rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--rates {text!r}: expected numbers such as 1000,2000") from None


def keeps_up(result: RunResult) -> bool:
    """Whether what was asked was sent and answered without a growing backlog, however late each request was."""
    backlog_s = result.latency.p99 / 1e3
    return (
        result.sent_rps >= 0.99 * result.asked_rps and result.succeeded == result.requests and backlog_s < 0.2 * result.window_s
    )


async def _climb(spec: LoadSpec, rates: Sequence[float]) -> list[RunResult]:
    from loadtest.generator import measure

    results: list[RunResult] = []
    failures = 0
    for rate in rates:
        result = await measure(replace(spec, rate_rps=rate))
        results.append(result)
        failures = 0 if keeps_up(result) else failures + 1
        if failures == _FAILURES:
            break
        await asyncio.sleep(0.1)  # so that one run's closing connections are not the next one's lag
    return results
