"""What the documents print: commands, and fenced blocks."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONVENTIONS.md", "Makefile")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "configs").rglob("*.yaml")),
]

# What a command begins with, where it does not stand in a block of shell. A lone word is a name.
_COMMAND = re.compile(r"(\w+=\S+ )*(\.|gateway|loadtest|make|serve|ray|python|pip|curl|export) \S|\.ci/run$")


# A block may have a comment before it that says why it is not run, and a title, which is the name of a file.
_FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+?) -->\n)?```(?P<language>\w*)(?: title=\"(?P<title>.+?)\")?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block. title: the file that the reader puts it in. not_run: why it cannot be run here; both may be empty."""

    language: str
    text: str
    title: str
    not_run: str
    line: int

    def commands(self) -> list[str]:
        """Of a block of shell."""
        return _commands(self.text)


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a document, from top to bottom."""
    text = path.read_text()
    return [
        Block(
            found["language"],
            found["text"],
            found["title"] or "",
            found["reason"] or "",
            text.count("\n", 0, found.start()) + 1,
        )
        for found in _FENCE.finditer(text)
    ]


def printed(path: Path, *, fenced: bool = True) -> list[str]:
    """The commands of one document, each on one line and without its comment. fenced: those in blocks of shell as well."""
    text = path.read_text()
    if path.name == "Makefile":
        return [line.split("  ")[0] for line in re.findall(r'@echo "(.*)"', text)]
    quoted = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
    if path.suffix == ".yaml":  # there, two spaces set a comment apart
        lines = [line.split("  ")[0] for line in re.findall(r"^# +(\S.*)$", text, re.MULTILINE)]
        return [line for line in (*lines, *quoted) if _COMMAND.match(line)]
    shell = [each for each in blocks(path) if each.language == "sh"] if fenced else []
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in re.findall(r"^    (\S.*)$", rest, re.MULTILINE) if _COMMAND.match(line)]
    return [
        *(command for each in shell for command in each.commands()),
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
