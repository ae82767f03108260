"""What the section `tracing` and the OTEL_* environment variables say together: the section goes before the environment.

Here is what this gateway itself reads of them; where spans are sent, with which headers, certificates and timeouts, the SDK's
exporter reads. Source: OpenTelemetry specification, "Environment Variables" and "OTLP Exporter Configuration".
"""

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from gateway.config import Tracing
from gateway.config.tracing import is_url
from gateway.errors import ConfigError

DEFAULT_RATIO: Final = 0.01

_DISABLED: Final = "OTEL_SDK_DISABLED"
_SAMPLER: Final = "OTEL_TRACES_SAMPLER"
_SAMPLER_RATIO: Final = "OTEL_TRACES_SAMPLER_ARG"
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL: Final[dict[str, Literal["grpc", "http"]]] = {"grpc": "grpc", "http/protobuf": "http"}
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_FIXED: Final = {"always_on": 1.0, "always_off": 0.0}
_PARENT_BASED: Final = "parentbased_"
_BY_RATIO: Final = "traceidratio"


class Settings(NamedTuple):
    """ratio: of the requests that are traced; parent_based: where no caller has decided, who is followed; else of all.

    endpoint: None leaves it to the exporter. queued_spans, sent_spans: at most so many wait, and leave at once.
    """

    ratio: float
    parent_based: bool
    protocol: Literal["grpc", "http"]
    endpoint: str | None
    queued_spans: int
    sent_spans: int
    delay_s: float


def settings(tracing: Tracing | None, environ: Mapping[str, str]) -> Settings | None:
    """None: nothing is traced. Raises: ConfigError, for a variable that cannot be followed."""
    if tracing is None or environ.get(_DISABLED, "").strip().lower() == "true":
        return None
    ratio, parent_based = _sampling(tracing.sample_ratio, environ)
    protocol = tracing.protocol or _protocol(environ)
    if tracing.endpoint is None and protocol == "http":  # gRPC has other forms as well
        _look_at_endpoint(environ)
    queued_spans = _count(environ, "OTEL_BSP_MAX_QUEUE_SIZE", 8192)
    return Settings(
        ratio,
        parent_based,
        protocol,
        tracing.endpoint,
        queued_spans,
        min(queued_spans, _count(environ, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 2048)),
        _count(environ, "OTEL_BSP_SCHEDULE_DELAY", 5000) / 1e3,
    )


def _sampling(ratio: float | None, environ: Mapping[str, str]) -> tuple[float, bool]:
    if ratio is not None:
        return ratio, True
    sampler = environ.get(_SAMPLER, "").strip().lower()
    if not sampler:
        return DEFAULT_RATIO, True
    kind = sampler.removeprefix(_PARENT_BASED)
    parent_based = kind != sampler
    if kind in _FIXED:
        return _FIXED[kind], parent_based
    if kind != _BY_RATIO:
        known = [f"{prefix}{kind}" for prefix in ("", _PARENT_BASED) for kind in (*_FIXED, _BY_RATIO)]
        raise ConfigError(f"{_SAMPLER}: got {sampler!r}, expected one of {', '.join(known)}; or set tracing.sample_ratio")
    text = environ.get(_SAMPLER_RATIO, "").strip() or "1"
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"{_SAMPLER_RATIO}: got {text!r}, expected a number from 0 to 1")
    return share, parent_based


def _protocol(environ: Mapping[str, str]) -> Literal["grpc", "http"]:
    for name in _PROTOCOLS:
        text = environ.get(name, "").strip().lower()
        if text in _PROTOCOL:
            return _PROTOCOL[text]
        if text:
            raise ConfigError(f"{name}: got {text!r}, expected one of {', '.join(_PROTOCOL)}; or set tracing.protocol")
    return "grpc"


def _look_at_endpoint(environ: Mapping[str, str]) -> None:
    for name in _ENDPOINTS:
        text = environ.get(name, "").strip()
        if text and not is_url(text):
            raise ConfigError(f"{name}: got {text!r}, expected a URL such as http://collector:4318; or set tracing.endpoint")
        if text:
            return


def _count(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 1 << 31:
        raise ConfigError(f"{name}: got {text!r}, expected a whole number from 1")
    return int(text)
