"""`gateway route explain`: why a request would go where, as a running gateway sees it now."""

import argparse
import json
from typing import Any, Final
from urllib.parse import quote

from gateway.config import Config, ModelSection, config_of
from gateway.configuring.argument import document_of
from gateway.errors import BackendUnreachable, ConfigError
from gateway.process.announcement import own_url
from gateway.process.command_line import add_command, url_of
from gateway.process.console import printable, printable_lines
from gateway.process.credentials import NOTHING_SHOWN, Credentials, add_credentials, credentials

_MOST_ROWS: Final = 9_999_999  # that a gateway is asked about
_TIMEOUT_S: Final = 10.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `route explain` to the command line."""
    route = commands.add_parser("route", help="why requests go to which backend").add_subparsers(
        required=True, metavar="COMMAND"
    )
    explain = add_command(
        route,
        "explain",
        "where a request would go now, and what each backend was predicted to do",
        "gateway route explain http://127.0.0.1:8000 minilm --rows 8",
        "gateway route explain configs/examples/fleet.yaml minilm",
    )
    explain.add_argument("where", metavar="CONFIG|URL", help="host:port or URL of a gateway, or the configuration it runs with")
    explain.add_argument("model", metavar="MODEL")
    explain.add_argument("--version", default="", help="of the model; without it the highest")
    explain.add_argument("--rows", type=int, default=1, help="of the request (1)")
    explain.add_argument("--json", action="store_true", help="all that is known, for programs")
    add_credentials(explain)
    explain.set_defaults(run=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.rows <= _MOST_ROWS:
        raise ConfigError(f"--rows: {arguments.rows}: expected 1 to {_MOST_ROWS}")
    shown = credentials(arguments)
    if url := url_of(arguments.where):
        told = ask(url, arguments.model, arguments.version, arguments.rows, shown)
    else:
        config = config_of(document_of(arguments.where))
        model = _model(config, arguments.model, arguments.version)
        try:
            told = ask(_url(config), arguments.model, arguments.version, arguments.rows, shown)
        except BackendUnreachable as exc:
            print(f"{printable(exc.message)}; this is what the configuration says:")
            print(render_configured(model))
            return 0
    print(json.dumps(told, indent=2) if arguments.json else printable_lines(render(told)))
    return 0


def ask(url: str, model: str, version: str, rows: int, shown: Credentials = NOTHING_SHOWN) -> dict[str, Any]:
    """What GET /v2/models/MODEL/route says. Raises: NotFound; BackendUnreachable, if nothing answers there."""
    path = f"/v2/models/{quote(model, safe='')}" + (f"/versions/{quote(version, safe='')}" if version else "")
    address = f"{url.rstrip('/')}{path}/route?rows={rows}"
    body = shown.asked(address, timeout_s=_TIMEOUT_S)
    try:
        told: dict[str, Any] = json.loads(body)
        if not isinstance(told, dict) or "lanes" not in told:
            raise ValueError("it answers otherwise")
        return told
    except ValueError as exc:
        raise BackendUnreachable(f"what answers at {address} is no gateway of this kind") from exc


def render(told: dict[str, Any]) -> str:
    """A table of what `ask` gave."""
    slo = (
        "no SLO"
        if told["slo_ms"] is None
        else f"SLO {told['slo_ms']:g} ms, spill at {told['slo_ms'] * told['spill_share']:g} ms"
    )
    size = f"{told['rows']} row{'s' * (told['rows'] != 1)}"
    lines = [f"{told['model']} version {told['version']}, {size}, policy {told['policy']}, {slo}"]
    lines.append(f"-> {told['backend'] or 'nowhere'} ({told['reason']})")
    head = ("backend", "role", "$/1M rows", "batch", "eta ms", "cold", "wait", "ahead", "own", "sessions", "pending", "health")
    rows: list[tuple[str, ...]] = [head]
    for lane in told["lanes"]:
        price, batch = lane["usd_per_million_rows"], lane["usual_batch_rows"]
        parts = [lane[key] for key in ("eta_ms", "cold_start_ms", "wait_ms", "ahead_ms", "own_ms")]
        health = lane["health"] if lane["available"] else "unavailable"
        numbers = ["unknown" if part is None else f"{part:.1f}" for part in parts]
        rows.append(
            (
                lane["backend"],
                lane["role"],
                "unknown" if price is None else f"{price:.4g}",
                "unknown" if batch is None else f"{batch:g}",
                *numbers,
                str(lane["sessions"]),
                str(lane["pending"]),
                health,
            )
        )
    missing = [f"{label} is missing: {reason}" for label, reason in told["missing"].items()]
    return "\n".join(lines + _table(rows) + missing)


def render_configured(model: ModelSection) -> str:
    """What can be said of a model without a gateway that runs it."""
    slo = (
        f"SLO {model.slo.p99_ms:g} ms, spill at {model.slo.p99_ms * model.routing.spill_share:g} ms" if model.slo else "no SLO"
    )
    lines = [f"{model.name} version {model.version}, policy {model.routing.policy}, {slo}"]
    rows: list[tuple[str, ...]] = [("backend", "role", "$/hour and session", "sessions", "stands in for")]
    groups = model.routing.equivalent or (tuple(backend.label for backend in model.backends),)
    for backend in sorted(model.backends, key=lambda backend: (backend.usd_per_hour or 0.0) / backend.sessions):
        role = "regular"
        if backend.canary_share:
            role = f"canary {backend.canary_share:.0%}"
        if backend.shadow_share:
            role = f"shadow {backend.shadow_share:.0%}"
        others = {label for group in groups if backend.label in group for label in group} - {backend.label}
        price = (backend.usd_per_hour or 0.0) / backend.sessions
        rows.append((backend.label, role, f"{price:.4g}", str(backend.sessions), ", ".join(sorted(others)) or "none"))
    lines.append("prices per row depend on the speed that each backend shows while it serves")
    return "\n".join(lines + _table(rows))


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _model(config: Config, name: str, version: str) -> ModelSection:
    found = [model for model in config.models if model.name == name and version in ("", model.version)]
    if not found:
        raise ConfigError(f"model '{name}' version {version or 'any'} is not in the configuration")
    return max(found, key=lambda model: int(model.version))


def _url(config: Config) -> str:
    server = config.server
    if not server.http_port:
        raise BackendUnreachable("server.http_port names no port to ask")
    return own_url(server, server.http_port)
