"""The commands that the documents print."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONVENTIONS.md", "Makefile")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "configs").rglob("*.yaml")),
]

# What a command begins with, where it does not stand in a block of shell. A lone word is a name.
_COMMAND = re.compile(r"(\w+=\S+ )*(\.|gateway|loadtest|make|serve|ray|python|pip|curl|export) \S|\.ci/run$")


def printed(path: Path) -> list[str]:
    """The commands of one document, each on one line and without its comment."""
    text = path.read_text()
    if path.name == "Makefile":
        return [line.split("  ")[0] for line in re.findall(r'@echo "(.*)"', text)]
    quoted = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
    if path.suffix == ".yaml":  # there, two spaces set a comment apart
        lines = [line.split("  ")[0] for line in re.findall(r"^# +(\S.*)$", text, re.MULTILINE)]
        return [line for line in (*lines, *quoted) if _COMMAND.match(line)]
    shell = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in re.findall(r"^    (\S.*)$", rest, re.MULTILINE) if _COMMAND.match(line)]
    return [
        *(command for block in shell for command in _commands(block)),
        *(command for line in lines for command in _commands(line)),
        *(each for each in quoted if _COMMAND.match(each)),
    ]


def block(path: Path, language: str) -> str:
    """The first fenced block of a language."""
    found = re.search(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{path.name} has no block of {language}"
    return found[1]


def _commands(block: str) -> list[str]:
    """What a shell would run one after the other: an open quotation, or a backslash, goes on in the next line."""
    commands, begun = [], ""
    for line in block.splitlines():
        begun += re.sub(r"(^|\s+)#.*$", "", line).removesuffix("\\") + ("" if line.endswith("\\") else "\n")
        try:
            whole = bool(shlex.split(begun)) and begun.endswith("\n")
        except ValueError:
            continue
        if whole:
            commands.append(" ".join(begun.split()))
        if whole or not begun.strip():
            begun = ""
    return commands
