"""What a machine on EC2 is told once, its user data: what it fetches and installs, and the service that it then runs. Pure.

A machine that is to be there for a while only ends itself: a timer of systemd, set before anything else, and a shutdown planned
once that can be. Its owner has EC2 terminate a machine that shuts itself down.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from gateway.deploying.contents import as_yaml
from gateway.errors import ConfigError

HOME: Final = "/opt/gateway"
SECRETS: Final = "/etc/gateway/secrets"
_SETUP: Final = "/usr/local/lib/gateway-setup"
_MOST_USER_DATA_BYTES: Final = 16384  # of EC2, before it is encoded
_ENDS: Final = "loadtest-ends"  # the timer's name


@dataclass(frozen=True, slots=True)
class Sent:
    """A file that is put into the bucket, and from there onto the machine. name: there. sha256: in hexadecimal."""

    path: Path
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """files: by their keys in the bucket. package: the one of them that is unpacked; "": none is. beside: libraries that the
    image brings. secrets: names -> secretsmanager:NAME or ssm:NAME. unit, service: of systemd, its name and its text.

    lasts_s: it ends itself so long after it began to run; None: it does not.
    """

    region: str
    bucket: str
    files: Mapping[str, Sent]
    wheel: str
    locks: tuple[str, ...]
    unit: str
    service: str
    package: str = ""
    beside: str = ""
    secrets: Mapping[str, str] = field(default_factory=dict)
    lasts_s: float | None = None


def sent(path: Path, name: str) -> Sent:
    """Raises: OSError."""
    with path.open("rb") as file:
        return Sent(path, name, path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def setup_program() -> str:
    return (files("gateway.deploying") / "machine_setup.py").read_text(encoding="utf-8")


def told(setup: Setup) -> str:
    """A document for cloud-init that holds no secret. Raises: ConfigError, if it is too long."""
    settings = {
        "home": HOME,
        "region": setup.region,
        "bucket": setup.bucket,
        "files": [{"name": file.name, "key": key, "sha256": file.sha256} for key, file in setup.files.items()],
        "package": setup.package,
        "wheel": setup.wheel,
        "locks": list(setup.locks),
        "python": "/usr/bin/python3",
        "beside": setup.beside,
        "secrets": dict(setup.secrets),
        "secrets_in": SECRETS,
        "unit": setup.unit,
    }
    document: dict[str, Any] = {
        "package_update": True,
        "packages": ["python3-venv"],
        "write_files": [
            {"path": f"/etc/systemd/system/{setup.unit}", "content": setup.service, "permissions": "0644"},
            {"path": f"{_SETUP}/settings.json", "content": json.dumps(settings, indent=1), "permissions": "0644"},
            {"path": f"{_SETUP}/machine_setup.py", "content": setup_program(), "permissions": "0755"},
        ],
        "runcmd": [["/usr/bin/python3", f"{_SETUP}/machine_setup.py", f"{_SETUP}/settings.json"]],
    }
    if setup.lasts_s is not None:
        seconds = math.ceil(setup.lasts_s)
        timer = ["systemd-run", f"--unit={_ENDS}", f"--on-active={seconds}", "systemctl", "poweroff"]
        # shutdown(8) asks logind, which does not run yet where bootcmd does.
        planned = ["shutdown", "-P", f"+{math.ceil(seconds / 60)}"]
        document = {"bootcmd": [timer], **document, "runcmd": [planned, *document["runcmd"]]}
    text = f"#cloud-config\n{as_yaml(document)}"
    if (size := len(text.encode())) > _MOST_USER_DATA_BYTES:
        expected = f"{_MOST_USER_DATA_BYTES} at most, as EC2 takes it: give shorter names"
        raise ConfigError(f"user data: {size} bytes: expected {expected}")
    return text
