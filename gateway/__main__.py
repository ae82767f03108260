"""The command `gateway`, from its first moment: importing the rest takes a while, in which Ctrl-C must end it well too."""

import os
import signal
import sys

_ENDED_AT_ONCE = 130  # gateway.process.interrupts has it, which would have to be imported


def main() -> int:
    """Gives one of gateway.cli.EXIT_CODES."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # else whoever started this wants it otherwise: nohup
        signal.signal(signal.SIGINT, _end)
    from gateway.cli import main as run

    signal.signal(signal.SIGINT, usual)
    return run()


def _end(_number: int, _frame: object) -> None:
    os.write(2, b"gateway: ended by Ctrl-C\n")
    os._exit(_ENDED_AT_ONCE)


if __name__ == "__main__":
    sys.exit(main())
