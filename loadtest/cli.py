"""`loadtest`: the only reader of arguments. Each command is a module with `add_parser(subparsers)`.

`add_parser` adds its parser and sets the default `execute`, a function of the parsed arguments that returns an `ExitCode`.
Command modules import what is heavy within `execute`, so that `loadtest --help` stays quick.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Final

from loadtest.errors import LoadtestError

COMMANDS: Final = ("run", "recover", "recommend", "report", "compare", "selfcheck", "prices")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (`ExitCode`)."""
    parser = argparse.ArgumentParser(
        prog="loadtest",
        description="Which backend, on which instance, serves this traffic within this SLO for the least money?",
        epilog="Exit codes: 0 met, 1 SLO missed or undecided, 2 usage, 3 INVALID run, 4 regression.",
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        importlib.import_module(f"loadtest.{command}").add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        return int(args.execute(args))
    except LoadtestError as exc:
        print(f"loadtest: {exc}", file=sys.stderr)
        return int(exc.exit_code)
    except KeyboardInterrupt:
        return 128 + 2  # as a shell reports SIGINT; a measurement under way handles it itself and keeps its result


if __name__ == "__main__":
    sys.exit(main())
