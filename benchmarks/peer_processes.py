"""Processes of peers that are installed in an environment of their own: how they are set up, started and ended."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from benchmarks.peer_servers import Installed
from benchmarks.ports import free_port


def set_up(name: str, peer: Installed, folder: Path) -> bool:
    """Make an environment of its own, if there is no whole one. Gives whether there is one now."""
    place = folder / name
    if whole(name, peer, folder):
        return True
    venv.create(place, clear=True, with_pip=True)
    done = subprocess.run([place / "bin" / "pip", "install", "--quiet", *peer.packages], timeout=900, check=False)
    if done.returncode:
        print(f"{name}: pip could not install {', '.join(peer.packages)}", file=sys.stderr)
        return False
    (place / "whole").write_text("\n".join(peer.packages))
    return True


def whole(name: str, peer: Installed, folder: Path) -> bool:
    """Whether its environment is there, with just these packages asked for."""
    found = folder / name / "whole"
    return found.exists() and found.read_text() == "\n".join(peer.packages)


@contextlib.contextmanager
def launched(
    name: str,
    peer: Installed,
    environments: Path,
    directory: Path,
    port: int,
    variables: Mapping[str, str],
    *,
    rows: int = 0,
    folder: Path | None = None,
) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
    """Its process, with the file of what it says, until the block ends.

    folder: where it runs; None: where its files are, a temporary one in `directory`.
    """
    with tempfile.TemporaryDirectory(dir=directory) as fresh:
        filled = {"port": port, "grpc": free_port(), "metrics": free_port(), "rows": rows}
        for file, text in peer.files.items():
            Path(fresh, file).write_text(text.format(**filled) if file == "settings.json" else text)
        place = (environments / name / "bin").absolute()
        command = [str(place / "python"), *(word.format(**filled) for word in peer.command)]
        environment = os.environ | variables | {"PATH": f"{place}:{os.environ['PATH']}", "PYTHONPATH": fresh}
        log = Path(fresh, "log")
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=folder or fresh, env=environment, stdout=output, stderr=output, start_new_session=True
            )
        try:
            yield process, log
        finally:
            end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """It and all that it started."""
    with contextlib.suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        _, left = psutil.wait_procs([psutil.Process(process.pid), *family], 10)
        for each in left:
            with contextlib.suppress(psutil.Error):
                each.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
