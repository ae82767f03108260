"""The summary of a run that a person reads."""

from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadtest.load.patterns import is_closed
from loadtest.results import Interval, ObjectiveResult, RunResult

_SHORT_OF_TIME: Final = 0.7  # of a core: a process that sends and needs more is near its own limit
_LEAST_LAG_MS: Final = 0.1  # what a wake-up takes on a quiet machine
_UNBOUNDED: Final = 10_000  # columns
_COLOURS: Final = {"pass": "green", "fail": "red", "undecided": "yellow"}


def print_run(result: RunResult, console: Console) -> None:
    """Print what matters first: is it valid, is the SLO met; then the figures."""
    spec = result.spec
    title = " · ".join(filter(None, (spec.label, spec.target, spec.model, spec.protocol, spec.pattern)))
    console.print(f"[bold]{escape(title)}[/bold]")
    if result.partial:
        console.print("[yellow]PARTIAL: ended early; the figures are of what was done until then[/yellow]")
    if not result.valid:
        why = "the machine was busy with other work" if result.disturbed else "the generator did not do what was asked"
        console.print(f"[bold red]INVALID: {why}; the figures say nothing of the target[/bold red]")
        for reason in result.reasons:
            console.print(f"  {escape(reason)}", style="red")
        console.print(f"  what to do: {escape(remedy(result))}", style="red")
    for warning in result.warnings:
        console.print(f"  note: {escape(warning)}", style="yellow")
    if result.verdict is not None:
        colour = _COLOURS[result.verdict]
        console.print(f"SLO [bold {colour}]{result.verdict.upper()}[/bold {colour}] at 95 % confidence")
    for objective in result.objectives if result.valid else ():
        console.print(f"  {escape(_objective(objective))}", style=_COLOURS[objective.verdict])

    console.print(_latencies(result, console))
    console.print("latency counts from the intended send time, service from the real one", style="dim")

    closed = is_closed(spec.pattern)
    warmup = f"; {result.warmup_s:.1f} s of warm-up, {result.warmup_requests:,} requests, left out" if result.warmup_s else ""
    console.print(
        ("" if closed else f"asked {result.asked_rps:,.1f}/s; ")
        + f"in the {result.window_s:.1f} s measured: sent {result.sent_rps:,.1f}/s, answered {result.succeeded_rps:,.1f}/s, "
        f"goodput {result.goodput_rps:,.1f}/s{warmup}"
    )
    overdue = f", {result.overdue:,} cut off beyond a limit" if result.overdue else ""
    console.print(
        f"{result.requests:,} requests, {result.failed:,} failed ({result.error_rate:.3%}){overdue}, "
        f"{result.excluded:,} cut off{' sooner' if overdue else ''}"
    )
    for kind, count in result.errors.items():
        sample = result.error_samples.get(kind, "")
        console.print(escape(f"  {count:,} × {kind}" + (f": {sample}" if sample else "")), style="red")
    if result.server is not None:
        server = result.server
        # Several processes tell their counts once a second: the last may be missing.
        of_all = f" of the {server.requests:,} requests that it counted, warm-up included" if result.warmup_requests else ""
        console.print(
            f"server: queue {server.queue_ms:.3f} ms, compute {server.compute_ms:.3f} ms, overhead {server.overhead_ms:.3f} ms "
            f"(means{of_all}), {server.rows_per_execution:.1f} rows per execution"
        )
    own = result.generator
    console.print(
        f"generator: send lag p50 {own.send_lag_p50_ms:.3f} ms, p99 {own.send_lag_p99_ms:.3f} ms (at most "
        f"{own.send_lag_limit_ms:.3g}), waited for a connection p99 {own.connection_wait_p99_ms:.3f} ms, "
        f"{own.connections} connections, {own.cpu_cores:.2f} cores in {own.processes} process(es)",
        style="dim",
    )


def _latencies(result: RunResult, console: Console) -> Table:
    """Latency and service in a line each; where there is no room for that, a line for each percentile."""
    rows: list[tuple[str, ...]] = [("ms", "mean", "p50", "p90", "p95", "p99", "p99.9", "max")]
    for name, values in (("latency", result.latency), ("service", result.service)):
        figures = (values.mean, values.p50, values.p90, values.p95, values.p99, values.p999, values.max)
        rows.append((name, *(_figure(figure) if values.count else "-" for figure in figures)))
    wide = _table(rows)
    needed = console.measure(wide, options=console.options.update(width=_UNBOUNDED)).maximum
    return wide if needed <= console.width else _table(list(zip(*rows, strict=True)))


def _table(rows: Sequence[Sequence[str]]) -> Table:
    """The first row is the heading, the first column names the others."""
    first, *headings = rows[0]
    table = Table(box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*row)
    return table


def _figure(value_ms: float) -> str:
    """At most seven characters, below a few hours."""
    return f"{value_ms:.{3 if value_ms < 999.9995 else 1 if value_ms < 99_999.95 else 0}f}"


def remedy(result: RunResult) -> str:
    """What to do about an invalid run, in the options of `loadtest run`."""
    own = result.generator
    if result.partial and not result.requests:
        return "run it again"
    if result.disturbed:
        return "end what else runs on this machine, or use a quiet one; then run it again"
    if own.send_lag_limit_ms < _LEAST_LAG_MS:
        return (
            f"a limit of {own.send_lag_limit_ms * 100:.3g} ms wants a lag below {own.send_lag_limit_ms * 1e3:.3g} µs, "
            "which hardly any machine keeps: ask for a longer limit in --slo"
        )
    if own.cpu_cores / max(own.processes, 1) >= _SHORT_OF_TIME:
        spare = own.cores > own.processes
        more = f"more processes (--processes {own.processes + 1})" if spare else "more machines: this one has no core to spare"
        return f"a lower --rate, or {more}; `loadtest selfcheck` finds what one process can send here"
    return (
        f"the generator needed {own.cpu_cores:.2f} cores and did not get them in time: stop what else runs on this machine, "
        "or send from another one; then run it again"
    )


def _objective(result: ObjectiveResult) -> str:
    line = f"{result.objective}: {_interval(result.attainment)} of requests, {result.required:.3%} required: {result.verdict}"
    if result.design_effect > 1:
        line += f"; {result.design_effect:.1f} requests weigh as one independent (if 1: {_interval(result.binomial)})"
    if result.verdict != "undecided":
        return line
    if result.requests_needed is None:
        return f"{line}; too close to be decided by more requests"
    return f"{line}; about {result.requests_needed:,} more requests would decide"


def _interval(interval: Interval) -> str:
    return f"{interval.estimate:.3%} ({interval.lower:.3%} to {interval.upper:.3%})"
