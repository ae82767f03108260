"""`loadtest selfcheck`: how much load can this machine offer, honestly?"""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gateway.process.command_line import add_command
from gateway.process.credentials import Credentials
from loadtest.errors import ExitCode, UsageError
from loadtest.measuring.generator_limit import keeps_up, null_server
from loadtest.results import LoadSpec, Protocol, RunResult, SloSpec

_RATES: Final = (500, 1000, 2000, 4000, 6000, 8000, 10_000, 12_000, 15_000, 20_000, 25_000, 30_000, 40_000)
_FAILURES: Final = 2  # in a row: then no higher rate is tried
_PROTOCOLS: Final[tuple[Protocol, ...]] = ("rest-json", "grpc")


def add_parser(subparsers: Any) -> None:  # argparse's own type is private
    """Add `selfcheck`."""
    parser = add_command(
        subparsers,
        "selfcheck",
        "how much load this machine can offer",
        "loadtest selfcheck",
        'loadtest selfcheck --slo "p99<10ms" --protocol grpc --rates 1000,5000 --require 5000',
        more="It is offered to a null server beside it, which takes a core of its own: a machine that only sends can offer at "
        "least this much.",
    )
    parser.add_argument("--slo", default="p99<50ms", help="whose 1 %% bounds the send lag, default p99<50ms")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each run, default 2")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--protocol", choices=_PROTOCOLS, help="only this one")
    parser.add_argument("--rates", metavar="R,R,...", help="requests/s to try, rising")
    parser.add_argument("--require", type=float, metavar="RPS", help="exit 3 if less can be sent")
    parser.add_argument(
        "--tls", type=Path, nargs=2, metavar=("CERT", "KEY"), help="by TLS: what the null server shows, for 127.0.0.1, in PEM"
    )
    parser.add_argument("--ca", type=Path, metavar="FILE", help="with --tls: authorities that vouch for CERT (this machine's)")
    parser.add_argument("--json", action="store_true", help="as JSON, and nothing else")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> ExitCode:
    import msgspec
    import uvloop
    from rich.table import Table

    from loadtest.reports.consoles import results as output

    slo = SloSpec.parse(args.slo)
    rates = _RATES if args.rates is None else _parse_rates(args.rates)
    console = output(hidden=args.json)
    enough = True
    told = []
    shown = Credentials(ca=str(args.ca or ""))
    with null_server(*(args.tls or ())) as server:
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
            results = uvloop.run(_climb(spec, rates, shown))
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
            told.append(
                {
                    "protocol": protocol,
                    "processes": args.processes,
                    "send_lag_limit_ms": limit_ms,
                    "valid_rps": valid,
                    "kept_rps": kept,
                    "runs": [
                        {
                            "asked_rps": result.asked_rps,
                            "sent_rps": result.sent_rps,
                            "send_lag_p50_ms": result.generator.send_lag_p50_ms,
                            "send_lag_p99_ms": result.generator.send_lag_p99_ms,
                            "p50_ms": result.latency.p50,
                            "p99_ms": result.latency.p99,
                            "cpu_cores": result.generator.cpu_cores,
                            "valid": result.valid,
                        }
                        for result in results
                    ],
                }
            )
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(told)).decode())
    return ExitCode.MET if enough else ExitCode.INVALID


def _parse_rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--rates {text!r}: expected numbers such as 1000,2000") from None


async def _climb(spec: LoadSpec, rates: Sequence[float], shown: Credentials) -> list[RunResult]:
    from loadtest.measuring.generator import measure

    results: list[RunResult] = []
    failures = 0
    for rate in rates:
        result = await measure(replace(spec, rate_rps=rate), shown=shown)
        results.append(result)
        failures = 0 if keeps_up(result) else failures + 1
        if failures == _FAILURES:
            break
        await asyncio.sleep(0.1)  # so that one run's closing connections are not the next one's lag
    return results
