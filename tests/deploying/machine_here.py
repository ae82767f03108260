"""A machine of `gateway deploy ec2` as a folder: all that cloud-init writes, below it; its script, run as a process.

What only AWS has is replaced at its edges: the metadata service, S3 and Secrets Manager are on loopback, and `systemctl` is a
program that starts what the unit says.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gateway.deploying.on_machine import moved
from gateway.deploying.packing import packed, write
from gateway.documents.reader import read
from tests.deploying.fake_metadata import FakeAws, fake_aws
from tests.deploying.planned_ec2 import BUCKET

UNIT = "/etc/systemd/system/gateway.service"

# As far as the script uses it: `enable --now` of a unit of Type=notify returns when that is ready.
SYSTEMCTL = """#!{python}
import os, shlex, socket, subprocess, sys
open("{folder}/systemctl-asked", "a").write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1] != "enable":
    sys.exit(0)
settings = [line.partition("=") for line in open("{folder}/gateway.service").read().splitlines()]
(command,) = (value for key, _, value in settings if key == "ExecStart")
environment = dict(value.split("=", 1) for key, _, value in settings if key == "Environment")
environment |= {{"NOTIFY_SOCKET": "{folder}/notify", "PATH": "/usr/bin:/bin"}}
watched = ["sh", "-c", '"$@" & echo $! >{folder}/pid; wait $!; echo $? >{folder}/code', "sh", *shlex.split(command)]
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told, open("{folder}/said", "w") as said:
    told.bind("{folder}/notify")
    told.settimeout(60)
    process = subprocess.Popen(watched, env=environment, stdout=said, stderr=said)
    open("{folder}/watcher", "w").write(str(process.pid))
    while told.recv(4096) != b"READY=1":
        pass
"""


def written(user_data: str) -> dict[str, str]:
    """What cloud-init writes, by path."""
    return {file["path"]: file["content"] for file in yaml.safe_load(user_data)["write_files"]}


@dataclass
class Here:
    """folder: of the machine. aws: what it asks. settings: what its script is told."""

    folder: Path
    aws: FakeAws
    settings: dict[str, Any]

    def set_up(self) -> "subprocess.CompletedProcess[str]":
        """Run the script, as cloud-init does."""
        path = self.folder / "settings.json"
        path.write_text(json.dumps(self.settings))
        own = {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "PIP_NO_INDEX": "1", "PIP_NO_COMPILE": "1"}
        command = [sys.executable, self.folder / "machine_setup.py", path]
        return subprocess.run(command, env=own | self.aws.variables, capture_output=True, text=True, timeout=100, check=False)

    def said(self, name: str) -> str:
        return (self.folder / name).read_text().strip()

    def stopped(self, within_s: float) -> int:
        """As systemd stops it. Its exit code."""
        watcher = os.pidfd_open(int(self.said("watcher")))
        os.kill(int(self.said("pid")), signal.SIGTERM)
        with os.fdopen(watcher, "rb", buffering=0):
            assert select.select([watcher], [], [], within_s)[0], self.said("said")
        return int(self.said("code"))


@contextlib.contextmanager
def machine(folder: Path, config: Path, user_data: str, *files: Path) -> Iterator[Here]:
    """files: what is put into the bucket beside the package."""
    (folder / "bin").mkdir(parents=True)
    package = folder / "model.tar.gz"
    write(packed(moved(read(str(config)), "c7i.large")), package)
    found = written(user_data)
    (settings,) = (json.loads(content) for path, content in found.items() if path.endswith(".json"))
    contents = {path.name: path.read_bytes() for path in (package, *files)}
    objects = {f"{BUCKET}/{file['key']}": contents[file["name"]] for file in settings["files"]}
    (script,) = (content for path, content in found.items() if path.endswith(".py"))
    (folder / "machine_setup.py").write_text(script)
    home = str(folder / "home")
    settings |= {
        "home": home,
        "secrets_in": str(folder / "secrets"),
        "python": sys.executable,
        "beside": sysconfig.get_path("purelib"),
    }
    (folder / "gateway.service").write_text(found[UNIT].replace("/opt/gateway", home).replace("/var/lib/gateway", str(folder)))
    systemctl = folder / "bin" / "systemctl"
    systemctl.write_text(SYSTEMCTL.format(python=sys.executable, folder=folder))
    systemctl.chmod(0o755)
    with fake_aws(objects) as aws:
        try:
            yield Here(folder, aws, settings)
        finally:
            if (folder / "pid").exists() and not (folder / "code").exists():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
