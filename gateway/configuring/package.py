"""A folder that is served as it is: as SageMaker unpacks it, and by convention."""

from pathlib import Path
from typing import Final

from gateway.config import Config, parse_config
from gateway.configuring.check import servable
from gateway.configuring.guess import guess, written
from gateway.process.console import words

CONFIGURATION: Final = ("gateway.yaml", "gateway.yml")


def read_package(folder: Path) -> Config:
    """Its gateway.yaml; without one, what is guessed of the models in it, and told. Raises: ConfigError."""
    for name in CONFIGURATION:
        if (folder / name).is_file():
            return servable(folder / name, here=True)
    found = guess(str(folder))
    words.info("# %s is served as this configuration says:\n%s", folder, written(found, folder))
    return parse_config(found.document, source=str(folder))
