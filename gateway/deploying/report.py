"""What `loadtest recommend` found, as far as a deployment needs it: read from its report.json, whose schema is published."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from gateway.documents.reader import Document, read
from gateway.errors import ConfigError

NAME: Final = "report.json"  # in the folder that `loadtest recommend` writes
_SCHEMA: Final = "loadtest.recommendation/1"  # docs/schemas/recommendation.json


class ReportedCandidate(msgspec.Struct, frozen=True):
    """Of one kind of machine. max_rps: proven of it; 0: none is."""

    name: str
    instance_type: str
    max_rps: float


class ReportedFleet(msgspec.Struct, frozen=True):
    """The cheapest fleet for the rate that was asked for. counts: candidates in it -> how many."""

    counts: dict[str, int]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Of the whole document what follows; the rest is for people.

    state: proven, not proven, or why there is no winner. configuration_of: whose the configuration is; None: the winner's.
    autoscaling_invocations_per_minute: for one instance of that candidate.
    """

    schema: str
    state: str
    winner: str | None
    autoscaling_invocations_per_minute: float | None
    fleet: ReportedFleet | None
    candidates: tuple[ReportedCandidate, ...]
    configuration: dict[str, Any]
    launcher: str
    machine: str
    configuration_of: str | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured, and is now to be deployed.

    configuration: as a file of it would have it. instance_types: its candidate's first, then the others of the fleet.
    count: instances of that fleet; None: no rate was asked for. invocations_per_minute: to scale
    one instance at. caveats: what to know of it.
    """

    source: str
    configuration: dict[str, Any]
    instance_types: tuple[str, ...]
    count: int | None
    invocations_per_minute: float | None
    caveats: tuple[str, ...]


def document_of(path: str | Path) -> tuple[Document, Measured | None]:
    """The configuration to deploy: a path's own, or that of the report it names, with what is known of it.

    Raises: ConfigError.
    """
    report = report_in(path)
    if report is None:
        return read(path), None
    measured = read_report(report)
    return Document(measured.source, measured.configuration, folder=report.parent.absolute()), measured


def report_in(path: str | Path) -> Path | None:
    """The report that a path names: itself, or the one in a folder; None: it names none. Raises: OSError."""
    path = Path(path)
    if path.is_dir():
        return path / NAME if (path / NAME).is_file() else None
    return path if path.suffix == ".json" and path.is_file() and not _is_configuration(path) else None


def _is_configuration(path: Path) -> bool:
    """As YAML has JSON in it, one may be written so."""
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return isinstance(found, dict) and "models" in found


def read_report(path: Path) -> Measured:
    """Raises: ConfigError, if it is no report, or names nothing that could be deployed; OSError."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Report)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: {exc}: expected a report of `loadtest recommend`, or a configuration in YAML") from exc
    if found.schema != _SCHEMA:
        raise ConfigError(f"{path}: schema: {found.schema}: expected {_SCHEMA}: measure again with this version's loadtest")
    if found.winner is None:
        raise ConfigError(f"{path}: state: {found.state}: expected a winner: name the configuration to deploy instead")
    if not found.configuration:
        expected = "a configuration, and a server that ran already was measured"
        raise ConfigError(f"{path}: configuration: empty: expected {expected}: name its configuration instead")
    by_name = {candidate.name: candidate for candidate in found.candidates}
    counts = found.fleet.counts if found.fleet is not None else {}
    ranked = dict.fromkeys((found.configuration_of or found.winner, *counts))
    if unknown := ranked.keys() - by_name.keys():
        raise ConfigError(f"{path}: candidates: no {', '.join(sorted(unknown))}: expected it, as it is of the fleet")
    return Measured(
        str(path),
        found.configuration,
        tuple(dict.fromkeys(by_name[name].instance_type for name in ranked if by_name[name].instance_type)),
        sum(counts.values()) or None,
        found.autoscaling_invocations_per_minute,
        tuple(_caveats(found)),
    )


def _caveats(found: Report) -> list[str]:
    caveats = []
    proven = any(candidate.max_rps for candidate in found.candidates if candidate.name == found.winner)
    if found.state != "proven" and proven:
        caveats.append("the fleet is not proven: the rates that are do not carry what was asked for")
    elif found.state != "proven":
        caveats.append(f"the rate is {found.state}: it held in the sample only")
    if found.fleet is not None and len(found.fleet.counts) > 1:
        mix = " + ".join(f"{count} × {name}" for name, count in found.fleet.counts.items())
        whose = found.configuration_of or found.winner
        caveats.append(f"the fleet is {mix}, each with its own configuration: this is that of {whose}")
    if found.launcher == "local":
        caveats.append(f"the rate was measured on {found.machine}, which stood for the instance type")
    return caveats
