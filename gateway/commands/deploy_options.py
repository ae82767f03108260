"""What the options of every `gateway deploy` have in common."""

import argparse
import re
from dataclasses import dataclass, field
from typing import Final

from gateway.config import Config
from gateway.deploying.preflight import BUCKET
from gateway.errors import ConfigError

PLACES: Final = ("sagemaker", "ec2")

# For `fits`: the form, what it is, and where to get one.
_NAME: Final = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?"), "1 to 40 of a-z, 0-9 and -, a letter first, no - at the end"
_BUCKET: Final = re.compile(BUCKET), "the name of a bucket of S3"
MEMORY: Final = re.compile(r"[1-9]\d*(Mi|Gi)", re.ASCII), "an amount such as 512Mi or 4Gi"
REGION: Final = re.compile(r"[a-z]{2}(-[a-z]+)+-\d"), "a region of AWS, such as us-east-1"
SUBNET: Final = re.compile(r"subnet-[0-9a-f]{8,17}"), "subnet-ID", "`aws ec2 describe-subnets` shows them"
GROUP: Final = re.compile(r"sg-[0-9a-f]{8,17}"), "sg-ID", "`aws ec2 describe-security-groups` shows them"


def named(name: str | None, config: Config) -> str:
    """What a deployment is called: as --name says, or the first model. Raises: ConfigError."""
    if name is None:
        name = re.sub(r"[^a-z0-9]+", "-", config.models[0].name.lower()).strip("-")[:40].rstrip("-")
    return fits("--name", name, *_NAME)


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
    return fits("NAME", name, *_NAME)


def memory_bytes(amount: str) -> int:
    """Of one that fits MEMORY."""
    return int(amount[:-2]) * {"Mi": 1 << 20, "Gi": 1 << 30}[amount[-2:]]


@dataclass(slots=True)
class Options:
    """As they are looked at. faults: all that is missing or malformed, each with where to get it."""

    given: argparse.Namespace
    faults: list[str] = field(default_factory=list, init=False)
    notes: list[str] = field(default_factory=list, init=False)

    def check(self) -> None:
        """Raises: ConfigError, with a line for each fault."""
        if self.faults:
            raise ConfigError("\n".join(dict.fromkeys(self.faults)))

    def refuse(self, flag: str, value: object, expected: str, where: str = "") -> None:
        """value: None: not given."""
        found = "not given" if value is None else repr(value) if isinstance(value, str) else str(value)
        self.faults.append(": ".join(filter(None, (flag, found, f"expected {expected}", where))))

    def fits(self, flag: str, value: str | None, form: "re.Pattern[str]", expected: str, where: str = "") -> str:
        if value is None or not form.fullmatch(value):
            self.refuse(flag, value, expected, where)
        return value or ""

    def bucket(self, region: str) -> str:
        made = f"`aws s3 mb s3://NAME --region {region or 'REGION'}` makes one"
        return self.fits("--bucket", self.given.bucket, *_BUCKET, made)

    def memory_bytes(self) -> int | None:
        """None: not given. 0: it does not fit."""
        given: str | None = self.given.memory
        if given is None:
            return None
        self.fits("--memory", given, *MEMORY)
        return memory_bytes(given) if MEMORY[0].fullmatch(given) else 0
