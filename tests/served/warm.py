"""Commands in processes of their own that begin with the slow libraries imported: a fork each, of one process that has them.

Python's own `forkserver`. It takes the seconds of these imports once, not for every command.
"""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_WARM = ["pytest", "gateway.cli", "gateway.ingress", "onnxruntime", "sklearn.linear_model", "tokenizers", "torch._dynamo"]


def started(words: Sequence[str], folder: Path, *, stdout: Path, stderr: Path) -> ForkServerProcess:
    """Run `gateway …`, `python FILE …` or `python -m MODULE …` in a folder; both files are there when this returns."""
    for path in (stdout, stderr):
        path.write_bytes(b"")
    _CONTEXT.set_forkserver_preload(_WARM)  # here: others have other ideas of what is slow
    process = _CONTEXT.Process(target=_run, args=(list(words), folder, stdout, stderr), daemon=True)
    process.start()
    return process


def _run(words: list[str], folder: Path, stdout: Path, stderr: Path) -> None:
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.chdir(folder)
    program, *rest = words
    if program == "python" and rest[0] == "-m":
        sys.argv = rest[1:]
        sys.path.insert(0, str(folder))
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    elif program == "python":
        sys.argv = rest
        sys.path.insert(0, str(Path(rest[0]).parent.absolute()))
        runpy.run_path(rest[0], run_name="__main__")
    else:
        from gateway import cli

        sys.exit(cli.main(rest))
