"""The section `tracing`: how many requests are traced, and where their spans go."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field

from gateway.config.fields import Strict
from gateway.documents.faults import Unfit


def _endpoint(value: object) -> object:
    if not isinstance(value, str):
        return value  # which pydantic refuses
    if not is_url(value):
        remedy = f"write http://{value}" if "://" not in value and value else ""
        raise Unfit(expected="a URL such as http://collector:4317", remedy=remedy)
    return value


def is_url(text: str) -> bool:
    """Whether a collector can be asked there."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        return False


Endpoint = Annotated[str, BeforeValidator(_endpoint)]


class Tracing(Strict):
    """Spans to an OpenTelemetry collector. What is None is as the OTEL_* environment variables say."""

    endpoint: Endpoint | None = None
    protocol: Literal["grpc", "http"] | None = None
    sample_ratio: float | None = Field(default=None, ge=0, le=1)  # of the requests of which no caller has decided
