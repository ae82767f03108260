"""A folder that is served as it is: as SageMaker unpacks it, and by convention."""

from collections.abc import Mapping
from pathlib import Path

from gateway.config import Config, parse_config
from gateway.configuring.argument import opened
from gateway.configuring.check import servable
from gateway.configuring.guess import guess, written
from gateway.documents.reader import configuration_in
from gateway.process.console import words


def packaged(folder: Path, environment: Mapping[str, str]) -> Config:
    """Its gateway.yaml; without one, what is guessed of the models in it, and told. Raises: ConfigError.

    environment: in which SAGEMAKER_ variables may say more of a package.
    """
    folder = Path(opened(str(folder)))
    if configuration_in(folder) is not None:
        return servable(folder, here=True)
    found = guess(str(folder), environment=environment)
    words.info("# %s is served as this configuration says:\n%s", folder, written(found, folder))
    return parse_config(found.document, source=str(folder))
