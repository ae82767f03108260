"""`gateway examples`: what comes along to begin with: configurations, the code that they name, the reference with every key.

They are the files of `configs/`, and are written under that name, so that the commands in them and in the documents can be
typed where they were written.
"""

import argparse
import itertools
import json
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

from gateway.documents.whole_file import asked_by, write_whole
from gateway.errors import ConfigError, instead, shortened
from gateway.process.command_line import add_command

_FOLDER: Final = "configs"
_REFERENCE: Final = "gateway.yaml"
_SUFFIXES: Final = (".yaml", ".py", ".txt")
_INDENT: Final = "   "  # of a command in a comment
_NAMED: Final = re.compile(r"[\w./-]+\.(?:yaml|py|txt)")


@dataclass(frozen=True, slots=True)
class Example:
    """title: its first sentence. commands: what it says to type. files: itself, then what it names; paths below `configs`."""

    name: str
    title: str
    commands: tuple[str, ...]
    files: tuple[str, ...]


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `examples` to the command line."""
    command = add_command(
        commands,
        "examples",
        "list the examples that come along, or write some here",
        "gateway examples",
        "gateway examples iris",
        "gateway examples reference minilm --out DIR",
        more="An example is written with the code that it names, below `configs`. No other file is ever replaced.",
    )
    command.add_argument("names", metavar="NAME", nargs="*", help="which to write; none: list them")
    command.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where `configs` goes (the working directory)")
    command.add_argument("--json", action="store_true", help="as JSON, for programs")
    command.set_defaults(run=_examples)


def _examples(arguments: argparse.Namespace) -> int:
    known = bundled()
    if not arguments.names:
        if arguments.json:
            print(json.dumps([{"name": each.name, "title": each.title} for each in known.values()], indent=2))
        else:
            width = max(map(len, known))
            print("\n".join(f"{each.name:{width}}  {each.title}" for each in known.values()))
        return 0
    chosen = []
    for name in dict.fromkeys(arguments.names):
        if name not in known:
            raise ConfigError(f"NAME: no example '{shortened(name)}'{instead(name, known, 'examples')}")
        chosen.append(known[name])
    with asked_by("--out", folder=True):
        written = write(chosen, arguments.out)
    if arguments.json:
        print(json.dumps({"files": [str(path) for path in written]}, indent=2))
        return 0
    print("\n".join(str(path) for path in written))
    typed = [command for each in chosen for command in each.commands]
    if typed:
        where = "" if arguments.out == Path() else f", in {arguments.out}"
        print("\n  ".join((f"\nto type{where}:", *typed)))
    return 0


def bundled() -> dict[str, Example]:
    """All there are, by name, the reference first."""
    texts = {path: file.read_text(encoding="utf-8") for path, file in _walk(files("gateway") / _FOLDER, "")}
    found = {}
    for path in sorted((path for path in texts if path.endswith(".yaml")), key=lambda path: (path != _REFERENCE, path)):
        name = "reference" if path == _REFERENCE else posixpath.basename(path).removesuffix(".yaml")
        told = [line[1:] for line in itertools.takewhile(lambda line: line.startswith("#"), texts[path].splitlines())]
        title = " ".join(line.strip() for line in told if not line.startswith(_INDENT))
        typed = [
            line.strip() for line in told if line.startswith(_INDENT) and path != _REFERENCE
        ]  # which has forms of commands
        found[name] = Example(name, re.split(r"(?<=[.?])(?:\s|$)", title)[0], tuple(typed), tuple(_needed(path, texts)))
    return found


def write(examples: list[Example], folder: Path) -> list[Path]:
    """Write their files below the folder, and tell where they are. Raises: ConfigError, if another file stands there."""
    source = files("gateway") / _FOLDER
    texts = {folder / _FOLDER / path: source.joinpath(path).read_bytes() for each in examples for path in each.files}
    for path, text in texts.items():
        if path.exists() and (not path.is_file() or path.read_bytes() != text):
            raise ConfigError(f"--out: {path.absolute()}: exists, and is another file: name another DIR, or remove it")
    for path, text in texts.items():
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
    return list(texts)


def _walk(folder: Traversable, below: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        path = posixpath.join(below, entry.name)
        if entry.is_dir():
            yield from _walk(entry, path)
        elif path.endswith(_SUFFIXES):
            yield path, entry


def _needed(path: str, texts: dict[str, str]) -> list[str]:
    """The file, then those that it names, and those that they name: from their own folder, or from where `configs` is."""
    found = [path]
    for each in found:  # which grows
        for name in _NAMED.findall(texts[each]):
            own = posixpath.normpath(posixpath.join(posixpath.dirname(each), name))
            found += [known for known in (own, name.removeprefix(f"{_FOLDER}/")) if known in texts and known not in found][:1]
    return found
