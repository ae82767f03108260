"""A real `gateway serve` as a user starts it, in a process of its own, on free ports."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
AS_ANYBODY = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
"""Before a command: root's, too, is held to the modes of files."""


class Served(NamedTuple):
    """A running gateway. http, grpc: "host:port"."""

    http: str
    grpc: str
    process: "subprocess.Popen[str]"


@contextlib.contextmanager
def served(config: str | Path, *options: str, within: Sequence[str] = (), log: Path | None = None) -> Iterator[Served]:
    """Run a gateway, on a Ray of its own unless --no-ray is among the options, until it is ready; ended by SIGTERM, and it
    must end well.

    within: a command that becomes the one that follows it. log: gets standard error.
    """
    own = ["--http-port", "0", "--grpc-port", "0", *(() if "--no-ray" in options else ("--ray-address", "local"))]
    command = [*within, sys.executable, "-m", "gateway.cli", "serve", str(config), *own, *options]
    with log.open("w") if log else contextlib.nullcontext() as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)
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
