"""`loadtest`: the only reader of arguments. Each command is a module with `add_parser(subparsers)`.

`add_parser` adds its parser, with examples as its epilog, and sets the default `execute`, a function of the parsed arguments
that returns an `ExitCode`. What it returns for people goes to standard output, where --json is given as JSON and nothing else;
what goes on meanwhile to standard error. Command modules import what is heavy within `execute`, so that `loadtest --help` stays
quick.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Final

from gateway.process.command_line import add_speech, ended, program, speech
from gateway.process.console import set_up, words
from loadtest.errors import EXIT_CODES, ExitCode, LoadtestError

_COMMANDS: Final = ("run", "recover", "recommend", "report", "compare", "selfcheck", "prices", "reap", "serve_jobs")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, one of EXIT_CODES."""
    return ended("loadtest", lambda: _run(argv), failed=ExitCode.USAGE, for_good=argv is None)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    root = program(
        "loadtest",
        "Which backend, on which instance, serves this traffic within this SLO for the least money?",
        'loadtest run http://127.0.0.1:8000 --model minilm --rate 50 --slo "p99<250ms"',
        "loadtest recommend configs/loadtests/minilm-local.yaml",
        "loadtest run --help",
        exit_codes=EXIT_CODES,
    )
    subparsers = root.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        importlib.import_module(f"loadtest.commands.{command}").add_parser(subparsers)
    add_speech(root, quiet="only warnings and errors: no progress, and no summary of what was measured")
    return root


def _run(argv: Sequence[str] | None) -> int:
    arguments = parser().parse_args(argv)
    set_up(speech(arguments))
    try:
        return int(arguments.execute(arguments))
    except LoadtestError as exc:
        words.error("loadtest: %s", exc)
        return int(exc.exit_code)


if __name__ == "__main__":
    sys.exit(main())
