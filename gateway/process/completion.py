"""What completes a command line, by shtab, which is imported when a shell asks for it: that takes a tenth of a start."""

import argparse
from collections.abc import Sequence
from typing import Any, Final

# `shtab.SUPPORTED_SHELLS` and `shtab.FILE`, which tests/test_command_lines.py holds these to.
SHELLS: Final = ("bash", "zsh", "tcsh", "fish", "powershell")
FILES: Final = {
    "bash": "_shtab_compgen_files",
    "zsh": "_files",
    "tcsh": "f",
    "fish": "(__fish_complete_path (commandline -ct))",
    "powershell": "_shtab_powershell_compgen_files",
}


class PrintCompletion(argparse.Action):
    """Prints what completes the whole command line in a shell, and ends."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        import shtab

        print(shtab.complete(parser, str(values)))
        parser.exit(0)


def completed_by_files(action: argparse.Action) -> None:
    action.complete = FILES  # type: ignore[attr-defined]  # how shtab is told
