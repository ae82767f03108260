"""What the command lines of this project have in common: version, completion, examples, how much is said, and how they end."""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from gateway import __version__
from gateway.documents.faults import did_you_mean
from gateway.errors import ConfigError, GatewayError
from gateway.process.completion import SHELLS, PrintCompletion, completed_by_files
from gateway.process.console import FORMATS, LEVELS, Speech, words
from gateway.process.interrupts import ended_by
from gateway.process.prints import never_raise, printed

FAULTY: Final = 2  # as argparse ends
UNREAD: Final = 141  # as a shell tells of what SIGPIPE ended
_ADDRESS: Final = re.compile(r"[\w.-]+:\d+")


class _Parser(argparse.ArgumentParser):
    """Ends a faulty command with 2, whether or not its fault can be told, as argparse of later versions does.

    What a command does not take it refuses itself: argparse leaves that to the root, whose usage says nothing of it.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            # An option first: what follows it is often its value, and by that another argument is one too many.
            typed = takewhile(lambda word: word != "--", sys.argv[1:] if args is None else args)
            options = {word for word in typed if word.startswith("-") and word != "-"} - {*self._option_string_actions}
            if option := next((word.partition("=")[0] for word in unknown if word in options), ""):
                meant = did_you_mean(option, self._option_string_actions)
                self.error("; ".join(filter(None, (f"{option}: unknown option", meant))))
            self.error(f"{unknown[0]}: one argument too many")
        return found, unknown

    def _print_message(self, message: str, file: Any = None) -> None:
        with contextlib.suppress(OSError):
            super()._print_message(message, file)


def program(name: str, does: str, *commands: str, exit_codes: Mapping[int, str]) -> argparse.ArgumentParser:
    """The root of a command line. commands: examples, as they are typed. exit_codes: each with what it means."""
    codes = "\n  ".join(("exit codes:", *(f"{code:<4} {meaning}" for code, meaning in exit_codes.items())))
    root = _Parser(prog=name, description=does, epilog=f"{examples(*commands)}\n\n{codes}", formatter_class=Paragraphs)
    root.add_argument("--version", action="version", version=f"{name} {__version__}")
    # argparse puts the shells' names behind it.
    root.add_argument(
        "--print-completion",
        choices=SHELLS,
        action=PrintCompletion,
        help=f"print what completes this command, and exit: source <({name} --print-completion bash)",
    )
    return root


def add_command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, does: str, *typed: str, more: str = ""
) -> argparse.ArgumentParser:
    """Add one command. does: in a few words, beginning small. typed: examples. more: further paragraphs for its help."""
    return commands.add_parser(
        name,
        help=does,
        description="\n\n".join(filter(None, (f"{does[0].upper()}{does[1:]}.", more))),
        epilog=examples(*typed),
        formatter_class=Paragraphs,
    )


def url_of(where: str) -> str:
    """The URL of a server that is named by it or by host:port, with no slash at its end; empty of all else, such as a file.

    Raises: ConfigError, for a URL of another scheme.
    """
    scheme, is_url, rest = (f"http://{where}" if _ADDRESS.fullmatch(where) else where).partition("://")
    if not is_url:
        return ""
    if scheme.lower() not in ("http", "https"):
        raise ConfigError(f"{where}: expected the address of a server's HTTP port, such as http://127.0.0.1:8000")
    return f"{scheme.lower()}://{rest}".rstrip("/")


def add_speech(root: argparse.ArgumentParser, *, quiet: str) -> None:
    """Give every command the options that say how much it says, completion to those of files, and a refusal of empty words.

    quiet: what is said then.
    """
    for command in leaves(root):
        group = command.add_argument_group("what it says, on standard error")
        group.add_argument("--quiet", action="store_true", help=quiet)
        group.add_argument("--log-level", choices=LEVELS, help="least severe log lines to show (info; with --quiet warning)")
        group.add_argument("--log-format", choices=FORMATS, default="text", help="json: one object a line (text)")
        for action in command._actions:
            if action.type is Path:
                completed_by_files(action)
                action.type = _path
            elif not action.option_strings and action.type is None:
                action.type = not_empty


def not_empty(text: str, expected: str = "a value") -> str:
    """Raises: argparse.ArgumentTypeError, for nothing, which as a path would name the folder that one is in."""
    if not text:
        raise argparse.ArgumentTypeError(f"'': expected {expected}: a variable that is not set may stand there")
    return text


def _path(text: str) -> Path:
    return Path(not_empty(text, "a path"))


def speech(arguments: argparse.Namespace) -> Speech:
    """What the options of `add_speech` say."""
    level = arguments.log_level or ("warning" if arguments.quiet else "info")
    return Speech(level, arguments.log_format, arguments.quiet)


def ended(name: str, run: Callable[[], int], *, failed: int, for_good: bool = False) -> int:
    """Run a command and give its exit code, also where an error ended it, which is told.

    failed: the code for most errors. for_good: the process ends with it.

    Raises: SystemExit, as argparse does.
    """
    try:
        with printed(for_good=for_good):
            return run()
    except BrokenPipeError:  # whoever read it has seen enough
        return UNREAD
    except ConfigError as exc:
        words.error(exc.message)
        return FAULTY
    except GatewayError as exc:
        words.error("%s: %s", name, exc.message)
        return failed
    except OSError as exc:
        if exc.filename is None and not _has_folder():
            words.error("%s: the folder that this was started in was removed: expected one that is there: cd to it", name)
            return failed
        words.error("%s", "\n".join(f"{name}: {line}" for line in str(exc).splitlines()))
        return failed
    except KeyboardInterrupt as exc:
        what, code = ended_by(exc)
        words.error("%s: ended by %s", name, what)
        return code
    finally:
        if for_good:
            never_raise(waits=True)  # else Python would, at its end, and change the exit code


def _has_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def leaves(command: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The commands that have no commands below them."""
    below = [action for action in command._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield command
    for action in below:
        for child in action.choices.values():
            yield from leaves(child)


def examples(*commands: str) -> str:
    """The epilog that shows what can be typed."""
    return "\n  ".join(("examples:", *commands))


class Paragraphs(argparse.RawDescriptionHelpFormatter):
    """Fills each paragraph of a description, and leaves what begins with "examples:" as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("examples:"):
            return super()._fill_text(text, width, indent)
        fill = argparse.HelpFormatter._fill_text
        return "\n\n".join(fill(self, paragraph, width, indent) for paragraph in text.split("\n\n"))
