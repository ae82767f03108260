"""What traces the requests of one process."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gateway.config import Tracing
from gateway.tracing.settings import settings

if TYPE_CHECKING:
    from gateway.tracing.exporter import Exporter
    from gateway.tracing.sampler import Sampler


class Tracer:
    """Life: made -> sampler.begin … -> close. But for `close`, on the event loop's thread."""

    def __init__(self, sampler: "Sampler", exporter: "Exporter") -> None:
        self.sampler = sampler
        self.ended = exporter.put
        self.close = exporter.close
        self.spans = exporter.spans


def open_tracer(tracing: Tracing | None, environ: Mapping[str, str]) -> Tracer | None:
    """None: nothing is traced, and nothing imported for it. Raises: ConfigError."""
    found = settings(tracing, environ)
    if found is None:
        return None
    from gateway.tracing.exporter import Exporter
    from gateway.tracing.sampler import Sampler

    exporter = Exporter(found)
    return Tracer(Sampler(found.ratio, exporter.put, parent_based=found.parent_based), exporter)
