"""What the options of every `gateway deploy` have in common."""

import argparse
import re
from typing import Final

from gateway.config import Config
from gateway.errors import ConfigError

_NAME: Final = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
PLACES: Final = ("sagemaker", "ec2")
_NAMED: Final = "1 to 40 of a-z, 0-9 and -, a letter first, no - at the end"


def named(name: str | None, config: Config) -> str:
    """What a deployment is called: as --name says, or the first model. Raises: ConfigError."""
    if name is None:
        name = re.sub(r"[^a-z0-9]+", "-", config.models[0].name.lower()).strip("-")[:40].rstrip("-")
    return fits("--name", name, _NAME, _NAMED)


def fits(flag: str, value: str, form: "re.Pattern[str]", expected: str) -> str:
    """The value. Raises: ConfigError, if it has not that form."""
    if not form.fullmatch(value):
        raise ConfigError(f"{flag}: {value!r}: expected {expected}")
    return value


def add_deployed(command: argparse.ArgumentParser) -> None:
    """The arguments that name a deployment on AWS."""
    command.add_argument("name", metavar="NAME", help="of the deployment, as --name said")
    command.add_argument("--region", help="of AWS (as AWS_DEFAULT_REGION or `aws configure` says)")
    command.add_argument("--bucket", help="look for packages there too, also where no model names it any more")
    command.add_argument("--on", choices=PLACES, help="look at what `gateway deploy` made there alone (both)")


def deployed(name: str) -> str:
    """The name of a deployment. Raises: ConfigError."""
    return fits("NAME", name, _NAME, _NAMED)
