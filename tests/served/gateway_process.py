"""A real `gateway serve` as a user starts it, in a process of its own, on free ports."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent


class Served(NamedTuple):
    """A running gateway. http, grpc: "host:port"."""

    http: str
    grpc: str
    process: "subprocess.Popen[str]"


@contextlib.contextmanager
def served(config: str | Path, *options: str) -> Iterator[Served]:
    """Run a gateway, on a Ray of its own if on any, until it is ready; ended by SIGTERM, and it must end well."""
    own = ["--http-port", "0", "--grpc-port", "0", "--ray-address", "local"]
    command = [sys.executable, "-m", "gateway.cli", "serve", str(config), *own, *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("gateway ready"), f"the gateway did not start: {line}"
        addresses = dict(part.split("=") for part in line.split()[2:])
        yield Served(addresses["http"], addresses["grpc"], process)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            process.stdout.close()
    assert process.returncode == 0
