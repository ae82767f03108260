"""A pipe of which the gateway holds one end: when that closes, however the gateway ends, a group of processes is killed.

    python lifeline.py FD COMMAND …

runs a command in a group that ends so. It imports nothing of ours: the command gets the environment as it is.
"""

import fcntl
import os
import select
import signal
import subprocess
import sys
import threading


def end_with(lifeline: int) -> None:
    """Have this process group killed when the other end of the pipe closes, which only the gateway holds.

    By the kernel where it can: a thread would wait for a run that holds the GIL. PR_SET_PDEATHSIG would spare what the model
    started, and strike when the gateway's thread that forked ends.
    """
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
        if select.select([lifeline], [], [], 0)[0]:  # it closed before
            os._exit(1)
    else:
        threading.Thread(target=_end_after, args=(lifeline,), daemon=True).start()


def _end_after(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    end_with(int(sys.argv[1]))
    sys.exit(subprocess.call(sys.argv[2:]))
