"""The gateway.yaml of a container in which SageMaker loads and unloads the models: all but these."""

from pydantic import Field

from gateway.config.fields import Strict
from gateway.config.file import Config, located
from gateway.config.server import MetricsSection, ServerSection
from gateway.config.tracing import Tracing
from gateway.documents.faults import ConfigFaults
from gateway.documents.lenient import as_far_as_valid
from gateway.documents.reader import Document


class MultiModelSection(Strict):
    """From where models are loaded, and when memory does not suffice for one more."""

    root: str = "/opt/ml/models"  # no model is loaded from outside of it
    memory_bytes: int | None = Field(default=None, ge=1)  # what models may need together; None: what the container has
    session_bytes: int = Field(default=256 << 20, ge=0)  # what a process for a model's own code needs, beside its files
    spare_bytes: int = Field(default=256 << 20, ge=0)  # of the container's memory, for requests


class MultiModelFile(Strict):
    """All of it."""

    multi_model: MultiModelSection = MultiModelSection()
    server: ServerSection = ServerSection()
    metrics: MetricsSection = MetricsSection()
    tracing: Tracing | None = None


def multi_model_of(document: Document) -> tuple[Config, MultiModelSection]:
    """A configuration without a model, and what is said of those that will be loaded.

    Relative paths count from the document's folder. Raises: ConfigFaults.
    """
    folder = document.folder
    seen = as_far_as_valid(
        MultiModelFile, document, (lambda value: value) if folder is None else lambda value: located(value, folder)
    )
    if seen.faults:
        raise ConfigFaults(seen.faults)
    file = seen.found
    server = file.server.model_copy(update={"model_control": False})  # the platform has it
    # Not validated: a file has a model at least.
    return Config.model_construct(server=server, metrics=file.metrics, tracing=file.tracing, models=()), file.multi_model
