"""What the options of every `gateway deploy` have in common."""

import re
from typing import Final

from gateway.config import Config
from gateway.errors import ConfigError

_NAME: Final = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")


def named(name: str | None, config: Config) -> str:
    """What a deployment is called: as --name says, or the first model. Raises: ConfigError."""
    if name is None:
        name = re.sub(r"[^a-z0-9]+", "-", config.models[0].name.lower()).strip("-")[:40].rstrip("-")
    return fits("--name", name, _NAME, "1 to 40 of a-z, 0-9 and -, a letter first, no - at the end")


def fits(flag: str, value: str, form: "re.Pattern[str]", expected: str) -> str:
    """The value. Raises: ConfigError, if it has not that form."""
    if not form.fullmatch(value):
        raise ConfigError(f"{flag}: {value!r}: expected {expected}")
    return value
