"""The images' entry point, run as a platform runs it, in a tree like the image's.

Namespaces stand in for a container engine: everything is read-only but /tmp, which is new; the program is below /opt/gateway,
the model at its platform's place; the user is 1000, without capabilities, and without a home. The environment is the image's
and what the platform adds, nothing else. The network is the machine's, so options name loopback and free ports.
"""

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).parent.parent.parent
SAGEMAKER, KSERVE = "/opt/ml/model", "/mnt/models"
LOOPBACK = ("--host", "127.0.0.1")
# As the Dockerfile has them, and what SageMaker is known to add.
OF_THE_IMAGE = {
    "PATH": "/opt/gateway/bin:/usr/local/bin:/usr/bin:/bin", "PYTHONUNBUFFERED": "1", "RAY_USAGE_STATS_ENABLED": "0",
    "HOME": "/home/gateway",
}  # fmt: skip
OF_SAGEMAKER = {
    "AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1", "HOSTNAME": "container-0.local",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/_container_credentials/none", "SAGEMAKER_SAFE_PORT_RANGE": "21000-21999",
    "SAGEMAKER_BIND_TO_PORT": "0", "SAGEMAKER_REGION": "us-east-1", "SAGEMAKER_CONTAINER_LOG_LEVEL": "20",
}  # fmt: skip
IMAGE = os.environ.get("GATEWAY_IMAGE", "")  # the environment that `make sbom` has made; "": that of the tests
KILLED_S = 30.0  # behind SIGTERM

_TREE = """
mount --make-rprivate /
mount -t tmpfs tmpfs /opt
mount -t tmpfs tmpfs /mnt
mkdir -p /opt/gateway/bin {place}
cp {program} /opt/gateway/bin/gateway
mount --bind {model} {place}
mount -o remount,bind,ro {place}
{configured}mount -o remount,ro /opt
mount -o remount,ro /mnt
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -o remount,bind,ro /
cd /
exec unshare --user --map-user=1000 --map-group=1000 env --ignore-environment {variables} sh {entry} {arguments}
"""

# A folder at /etc/gateway, which the machine itself has not.
_CONFIGURED = """
cp -r /etc /opt/etc 2>/dev/null || true
cp -r {configuration} /opt/etc/gateway
mount --bind /opt/etc /etc
"""


@cache
def lacking() -> str:
    """Why there is no such tree here; "" if there is one."""
    for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix)):
        if path.is_relative_to("/opt") or path.is_relative_to("/tmp") or path.is_relative_to("/mnt"):
            return f"{path} would be hidden"
    make = "mount -t tmpfs tmpfs /opt && mount -o remount,bind,ro / && unshare --user --map-user=1000 true"
    try:
        done = subprocess.run([*_namespaces(), make], capture_output=True, text=True, timeout=20, check=False)
    except OSError as exc:
        return str(exc)
    return "" if done.returncode == 0 else f"no namespaces of users and mounts: {done.stderr.strip()}"


def _namespaces() -> list[str]:
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-euc"]


class Container(NamedTuple):
    """A process that runs the entry point. said: its standard error, so far."""

    process: "subprocess.Popen[str]"
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text()

    def addresses(self) -> dict[str, tuple[str, int]]:
        """Wait until it is ready. Returns: of each protocol where it is to be had."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("gateway ready"), f"{line}{self.said}"
        found = (part.partition("=") for part in line.split()[2:])
        return {name: (address.rpartition(":")[0], int(address.rpartition(":")[2])) for name, _, address in found}


@contextlib.contextmanager
def started(
    directory: Path,
    model: Path,
    arguments: Sequence[str],
    *,
    place: str = SAGEMAKER,
    variables: Mapping[str, str] | None = None,
    configuration: Path | None = None,
) -> Iterator[Container]:
    """directory: for what the process says, and its program. model: what is mounted at `place`, read-only.

    configuration: a folder that is at /etc/gateway, likewise; None: there is none.
    """
    given = OF_THE_IMAGE | (OF_SAGEMAKER if place == SAGEMAKER else {}) | dict(variables or {})
    program = directory / "gateway-program"
    paths = "" if IMAGE else f"PYTHONPATH={ROOT} "
    python = f"{IMAGE}/bin/python" if IMAGE else sys.executable
    program.write_text(f'#!/bin/sh\n{paths}exec {python} -m gateway.cli "$@"\n')
    program.chmod(0o755)
    model.chmod(0o555)
    tree = _TREE.format(
        program=program, model=shlex.quote(str(model)), place=place, entry=ROOT / "docker" / "entrypoint.sh",
        configured=_CONFIGURED.format(configuration=shlex.quote(str(configuration))) if configuration is not None else "",
        variables=shlex.join(f"{name}={value}" for name, value in given.items()), arguments=shlex.join(arguments),
    )  # fmt: skip
    log = directory / "said"
    with log.open("w") as stderr:
        process = subprocess.Popen([*_namespaces(), tree], stdout=subprocess.PIPE, stderr=stderr, text=True, cwd="/")
    try:
        yield Container(process, log)
    finally:
        process.kill()
        process.wait()
        output: IO[str] | None = process.stdout
        assert output is not None
        output.close()
