"""Instructions that a stretch of a Python program takes, by valgrind's callgrind: steady where CPU time wanders.

The program is started by `command`, and calls `start`, `stop`, and `told` for what was between them. These are requests to
valgrind, which only C can make: a few lines that gcc compiles. What is not counted runs at a tenth of its speed, the rest at a
fiftieth. Needs `valgrind` and `gcc` (Debian has both).
"""

import ctypes
import subprocess
from pathlib import Path
from typing import Final

_SOURCE: Final = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; }
void stop(void) { CALLGRIND_STOP_INSTRUMENTATION; }
void dump(const char *name) { CALLGRIND_DUMP_STATS_AT(name); }
"""
_LIBRARY: Final = "requests.so"


def command(folder: Path, program: list[str]) -> list[str]:
    """What starts a program that counts. folder: empty; for what is compiled, and what valgrind writes."""
    source = folder / "requests.c"
    source.write_text(_SOURCE)
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", str(folder / _LIBRARY), str(source)], check=True)
    return [
        "valgrind", "--tool=callgrind", "--instr-atstart=no", "--dump-line=no", f"--callgrind-out-file={folder}/counted",
        f"--log-file={folder}/log", *program,
    ]  # fmt: skip


class Counter:
    """Within a program that `command` has started. Counts all threads; nothing until `start`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._library = ctypes.CDLL(str(folder / _LIBRARY))

    def start(self) -> None:
        self._library.start()

    def stop(self) -> None:
        self._library.stop()

    def told(self, name: str) -> int:
        """Instructions since `start`, or since this was called last."""
        before = set(self._folder.iterdir())
        self._library.dump(name.encode())
        written = set(self._folder.iterdir()) - before
        lines = [line for file in written for line in file.read_text(errors="replace").splitlines()]
        return sum(int(line.split()[1]) for line in lines if line.startswith("totals:"))
