"""What a run is asked: refused before anything is sent, if it makes no sense or nothing would come of it."""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from loadtest.errors import UsageError
from loadtest.load.patterns import parse, uses_rate
from loadtest.load.signing import check_signed
from loadtest.load.target import binary_values, from_base64
from loadtest.measuring import connections
from loadtest.results import LoadSpec, SloSpec

_FRAMING: Final = ("content-length", "transfer-encoding")
_TOKEN: Final = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)  # RFC 9110, 5.6.2
_GRPC_NAME: Final = re.compile(r"[0-9a-z_.-]+")  # gRPC over HTTP/2, "Custom-Metadata"; it is sent in lower case
_DAY_S: Final = 86_400
_LENGTH: Final = LoadSpec.__dataclass_fields__["length"].default


def check(spec: LoadSpec) -> None:
    """Raises: UsageError, for a number that makes no sense. Asks nobody."""
    bounds = {
        "duration": (spec.duration_s, 0.1, _DAY_S),
        "connections": (1 if spec.connections is None else spec.connections, 1, connections.MOST),
        "processes": (spec.processes, 1, 64),
        "timeout": (spec.timeout_s, 0.001, 3600),
        "rate": (spec.rate_rps, 0, 10_000_000),
        "seed": (spec.seed, 0, 1 << 62),
        "warmup": (spec.warmup_s or 0, 0, spec.duration_s),
    }
    for name, (value, low, high) in bounds.items():
        if not low <= value <= high:
            given = f"{value:g}" if isinstance(value, float) else str(value)  # an int may be no float
            raise UsageError(f"--{name} {given}: expected {low:g} to {high:g}")
    for name, text in spec.headers:
        if not name.isprintable() or not text.isprintable() or not (name + text).isascii():
            raise UsageError(f"--header {name!r}: a header must be one line of ASCII")
        if not _TOKEN.fullmatch(name):
            raise UsageError(f"--header {name!r}: expected a name of letters, digits and !#$%&'*+-.^_`|~")
        if name.lower() in _FRAMING:
            raise UsageError(f"--header {name!r}: it says how long a request is, which is known: leave it out")
        if spec.protocol == "grpc":
            _check_metadata(name, text)
    repeated = [name for name, count in Counter(name.lower() for name, _ in spec.headers).items() if count > 1]
    if repeated:
        raise UsageError(f"--header {repeated[0]!r}: given more than once: expected once, with all its values")
    if spec.slo is not None:
        check_limits(spec.slo)
    if spec.sigv4:
        check_signed(spec)


def check_limits(slo: SloSpec) -> None:
    """Raises: UsageError, for one that no run takes long enough for; a result that is read may have it."""
    for objective in slo.objectives:
        if objective.limit_ms > 1e3 * _DAY_S:
            raise UsageError(f"SLO: {objective}: expected a limit of a day at most")


def _check_metadata(name: str, text: str) -> None:
    if not _GRPC_NAME.fullmatch(name.lower()):
        raise UsageError(f"--header {name!r}: expected for gRPC a name of letters, digits and _ - .")
    if name.lower().endswith("-bin"):
        try:
            for value in binary_values(text):
                from_base64(value)
        except ValueError:
            raise UsageError(f"--header {name!r}: expected base64, as gRPC takes it for a name that ends with -bin") from None


def check_used(spec: LoadSpec, options: Collection[str], *, until_decided: bool) -> None:
    """Raises: UsageError, for what was asked and would change nothing. options: the fields that the command line names."""
    phases = parse(spec.pattern, rate_rps=spec.rate_rps, duration_s=spec.duration_s)
    if spec.rate_rps and not uses_rate(phases):
        raise UsageError(f"--rate {spec.rate_rps:g}: the pattern {spec.pattern} has its own, or none: leave one of them out")
    if "duration_s" in options and all("duration" in phase.options for phase in phases):
        raise UsageError(f"--duration {spec.duration_s:g}: the pattern {spec.pattern} has its own: leave one of them out")
    if until_decided and spec.slo is None:
        raise UsageError("--until-decided: there is nothing to decide without an SLO: add --slo")
    if until_decided and (len(phases) > 1 or not phases[0].stationary_open):
        raise UsageError(
            f"--until-decided: {spec.pattern} is judged at its end alone: ask for a steady --rate, or leave it out"
        )
    if spec.payloads and (spec.values or spec.length != _LENGTH):
        option = f"--values {spec.values[0]}" if spec.values else f"--length {spec.length}"
        raise UsageError(f"{option}: requests of --payload are sent as they are: leave one of them out")
    if spec.content_type and not (spec.payloads and spec.protocol == "invocations"):
        raise UsageError(f"--content-type {spec.content_type}: it is of --payload by --protocol invocations alone")
    if spec.content_type and any(name.lower() == "content-type" for name, _ in spec.headers):
        raise UsageError(f"--content-type {spec.content_type}: --header has one of its own: leave one of them out")


def check_shapes(spec: LoadSpec, inputs: Sequence[Mapping[str, Any]]) -> None:
    """Raises: UsageError, for rows or a length that no input of the model has a place for. inputs: its v2 metadata."""
    shapes = {str(each["name"]): [int(size) for size in each["shape"]] for each in inputs}
    told = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    if spec.rows not in {"1", *(str(shape[0]) for shape in shapes.values() if shape)} and all(
        not shape or shape[0] >= 0 for shape in shapes.values()
    ):
        raise UsageError(f"--rows {spec.rows}: the first dimension of every input is fixed ({told}): leave it out")
    if spec.length != _LENGTH and all(size >= 0 for shape in shapes.values() for size in shape[1:]):
        raise UsageError(f"--length {spec.length}: every dimension but the first is fixed ({told}): leave it out")
