"""YAML read as `yaml.safe_load` reads it, with the line of every key.

What YAML would let pass to everybody's surprise is a fault here: a key that is set twice, of which the last would count; a
document that its own anchors blow up, or that contains itself; one that is nested or long beyond all sense.
"""

import errno
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import yaml

from backends.regular_file import absent
from gateway.documents.faults import ConfigFaults, Fault, Location, cut, nearest, path_of, shown
from gateway.documents.sums import altered
from gateway.turns import pause

STANDARD_INPUT: Final = "-"
PACKED: Final = "gateway.yaml"  # in a folder that is served by it
STANDARD_INPUT_NAME: Final = "<stdin>"
_MOST_BYTES: Final = 4 << 20
_MOST_NODES: Final = 100_000  # anchors filled in
_DEEPEST: Final = 64
_NODES_AT_ONCE: Final = 8  # a millisecond
_MERGE: Final = "tag:yaml.org,2002:merge"
_NO_SPACE: Final = re.compile(r"^\s*(?:- +)?([\w.-]+):([^\s:/].*)$")


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed file. source: what messages call it. node: None for what was no text. faults: keys that are set twice.

    folder: where relative paths in it count from; None: from the working directory. misspelt: where a key was probably meant to
    stand -> the key that does; places of faults are given as they were meant, and told as they are.
    """

    source: str
    value: Any
    node: yaml.Node | None = field(default=None, repr=False)
    faults: tuple[Fault, ...] = ()
    folder: Path | None = None
    misspelt: Mapping[Location, str] = field(default_factory=dict)

    def written(self, location: Location) -> Location:
        """A place that was meant, as it stands there."""
        return tuple(self.misspelt.get(location[: count + 1], part) for count, part in enumerate(location))

    def line(self, location: Location) -> int | None:
        """Of a key or an item, from 1; of what is around it where it is not there; None if this was no text."""
        if self.node is None:
            return None
        node, line = self.node, self.node.start_mark.line
        for part in self.written(location):
            child = _child(node, part)
            if child is None:
                break
            line, node = child
        return int(line) + 1

    def at(self, location: Location) -> Any:
        """What stands there; None, if nothing does."""
        value = self.value
        for part in self.written(location):
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def text(self, location: Location) -> str:
        """A value as it is written: YAML reads `off` as false, 1.10 as 1.1, 010 as 8. As `shown`, where that is not known."""
        value, node = self.at(location), self.node
        if value is None or isinstance(value, str | list | dict):
            return shown(value)
        for part in self.written(location):
            child = _child(node, part) if node is not None else None
            node = child[1] if child is not None else None
        return str(node.value) if isinstance(node, yaml.ScalarNode) and not node.style else shown(value)

    def fault(self, location: Location, found: str = "", *, expected: str = "", remedy: str = "", value: bool = True) -> Fault:
        """A fault at a place. value: whether to show what stands there, unless it is a mapping or a list of them."""
        stands = self.at(location)
        nested = isinstance(stands, dict) or (
            isinstance(stands, list) and any(isinstance(item, dict | list) for item in stands)
        )
        there = value and not nested and _stands(self, location)
        return Fault(
            self.source,
            path_of(self.written(location)),
            cut(self.text(location)) if there else "",
            found,
            expected,
            remedy,
            self.line(location),
        )


def configuration_in(path: str | Path) -> Path | None:
    """The configuration of a folder that is served by it; None: it is none such."""
    inside = Path(path, PACKED)
    return inside if str(path) and os.path.isfile(inside) else None  # which also takes what is too long for a path


def elsewhere(what: str | Path) -> Fault | None:
    """What is wrong with a URL where a path is expected; None: it is none, or a path all the same."""
    if "://" not in str(what) or os.path.lexists(what):
        return None
    return Fault(str(what), expected="a path on this machine", remedy="download it, and name the file or folder")


def read(path: str | Path) -> Document:
    """Read a file, standard input if it is called "-", or the configuration in a folder.

    Of a package all files are held to its SHA256SUMS. Raises: ConfigFaults.
    """
    path = configuration_in(path) or path
    try:
        if str(path) == STANDARD_INPUT:
            source, data = STANDARD_INPUT_NAME, standard_input(_MOST_BYTES + 1)
        else:
            source = str(path)
            with Path(path).open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as exc:  # ValueError: no path may have a null byte
        raise ConfigFaults([elsewhere(path) or _unreadable(Path(path), exc)]) from exc
    if len(data) > _MOST_BYTES:
        raise ConfigFaults([Fault(source, found=f"longer than {_MOST_BYTES >> 20} MiB", expected="a configuration in YAML")])
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        fault = Fault(
            source, found=f"cannot be read: byte {exc.start} is no UTF-8", expected="a configuration in YAML, as text"
        )
        raise ConfigFaults([fault]) from exc
    folder = Path()
    if source != STANDARD_INPUT_NAME:
        folder = Path(path).parent
        if faults := [*altered(Path(path))]:
            raise ConfigFaults(faults)
    return replace(parse(text, source=source), folder=folder.absolute())


def standard_input(most_bytes: int = -1) -> bytes:
    """To its end, or so many bytes of it. Raises: OSError."""
    if sys.stdin is None:  # what Python makes of a closed one
        raise OSError(errno.EBADF, "standard input is closed")
    return sys.stdin.buffer.read(most_bytes)


def parse(text: str, *, source: str) -> Document:
    """Raises: ConfigFaults."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            faults = tuple(_twice(node, source)) if node is not None else ()
            value = loader.construct_document(node) if node is not None else None
        finally:
            loader.dispose()
    except yaml.YAMLError as exc:
        raise ConfigFaults([_not_yaml(exc, text, source)]) from exc
    return Document(source, value, node, faults)


class _Unreasonable(yaml.MarkedYAMLError):
    """YAML, but such as nobody writes a configuration. problem, note: what is wrong and what to do, said as they are."""


class _Loader(yaml.SafeLoader):
    """A safe loader that measures nodes, anchors filled in, while it composes them."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        # id -> the node itself, so that no other gets its id; how many nodes it has; how deep it is.
        self._measured: dict[int, tuple[yaml.Node, int, int]] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # yaml's
        if not len(self._measured) % _NODES_AT_ONCE:
            pause()
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _Unreasonable(problem=f"nested more than {_DEEPEST} deep", note="nest less", problem_mark=mark)
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None or id(node) in self._measured:
            return node
        if is_alias:
            raise _Unreasonable(problem="an anchor that contains itself", note="remove its alias", problem_mark=mark)
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            children = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        measures = [self._measured[id(child)] for child in children]
        nodes = 1 + sum(nodes for _, nodes, _ in measures)
        depth = 1 + max((depth for _, _, depth in measures), default=0)
        if nodes > _MOST_NODES or depth > _DEEPEST:
            fault = f"has more than {_MOST_NODES} values" if nodes > _MOST_NODES else f"nested more than {_DEEPEST} deep"
            raise _Unreasonable(problem=f"{fault}, its anchors filled in", note="use fewer anchors", problem_mark=mark)
        self._measured[id(node)] = (node, nodes, depth)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError, LookupError, AttributeError) as exc:  # a date of month 13; `!!int ""`, `!!bool x`
            problem = "looks like a date or a number, and is none"
            raise _Unreasonable(problem=problem, note="put text in quotes", problem_mark=node.start_mark) from exc


def _child(node: yaml.Node, part: str | int) -> tuple[int, yaml.Node] | None:
    """The line of a key or an item, and what it holds."""
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part].start_mark.line, node.value[part]
    if isinstance(node, yaml.MappingNode):
        # Reversed: of a key that is set twice the last counts, and what `<<` brought in stands in front.
        for key, value in reversed(node.value):
            if key.value == str(part):
                return key.start_mark.line, value
    return None


def _stands(document: Document, location: Location) -> bool:
    around = document.at(location[:-1])
    if not location or isinstance(around, list):
        return bool(location)
    return isinstance(around, dict) and document.written(location)[-1] in around


def _twice(root: yaml.Node, source: str) -> Iterator[Fault]:
    """Each key that its mapping has already, anywhere."""
    seen: set[int] = set()
    rest: list[tuple[yaml.Node, Location]] = [(root, ())]
    while rest:
        node, location = rest.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            rest += [(item, (*location, index)) for index, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            first: dict[tuple[str, str], int] = {}
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue  # which no mapping of Python takes: told when it is constructed
                line = key.start_mark.line
                if (key.tag, key.value) in first and key.tag != _MERGE:
                    yield Fault(
                        source,
                        path_of((*location, key.value)),
                        shown(value.value) if isinstance(value, yaml.ScalarNode) else "",
                        f"set twice, first in line {first[key.tag, key.value] + 1}",
                        "each key once",
                        "remove one of the two: the last would count",
                        line + 1,
                    )
                first.setdefault((key.tag, key.value), line)
                rest.append((value, (*location, key.value)))


def _unreadable(path: Path, exc: OSError | ValueError) -> Fault:
    remedy = ""
    if isinstance(exc, FileNotFoundError):
        beside = [file.name for file in path.absolute().parent.glob("*.y*ml")] if path.absolute().parent.is_dir() else []
        near = nearest(path.name, beside) if not path.is_symlink() else ""
        remedy = f"did you mean `{path.with_name(near)}`?" if near else f"it was looked for at {path.absolute()}"
    known: dict[type[Exception], str] = {FileNotFoundError: absent(path), IsADirectoryError: "a directory"}
    found = known.get(type(exc)) or getattr(exc, "strerror", None) or str(exc)
    return Fault(str(path), found=f"cannot be read: {found}", expected="a configuration in YAML", remedy=remedy)


def _not_yaml(exc: yaml.YAMLError, text: str, source: str) -> Fault:
    """Where the parser stopped, and what most often brings it there."""
    if isinstance(exc, yaml.reader.ReaderError):
        before = text[: exc.position]
        found, expected = f"not YAML: the character {text[exc.position]!r}", "a configuration in YAML, as text"
        place = before.count("\n") + 1, len(before) - before.rfind("\n")
        return Fault(source, found=found, expected=expected, line=place[0], column=place[1])
    assert isinstance(exc, yaml.MarkedYAMLError)  # all others are
    mark = exc.problem_mark or exc.context_mark
    assert mark is not None  # one of the two is always there
    if isinstance(exc, _Unreasonable):
        remedy = str(exc.note)
        return Fault(source, found=str(exc.problem), remedy=remedy, line=mark.line + 1, column=mark.column + 1)
    lines = text.splitlines() or [""]
    at = min(mark.line, len(lines) - 1)
    found, remedy, line = _cause(exc, lines, at, mark.column)
    column = mark.column + 1 if line == at else len(lines[line]) - len(lines[line].lstrip()) + 1
    return Fault(
        source, value=shown(lines[line].strip()), found=f"not YAML: {found}", remedy=remedy, line=line + 1, column=column
    )


def _cause(exc: yaml.MarkedYAMLError, lines: list[str], at: int, column: int) -> tuple[str, str, int]:
    """What is wrong, what to do, and in which line, from 0. Known by the parser's words, and by what stands there."""
    problem, context = str(exc.problem or ""), str(exc.context or "")
    opened = exc.context_mark.line if exc.context_mark else at
    stands = lines[at][column : column + 1]
    begins = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    if "\t" in begins or stands == "\t":
        return "a tab", "YAML is indented with spaces: replace the tab by spaces", at
    if "undefined alias" in problem:
        return f"{problem.removeprefix('found ')}", "define it before, with `&`; a text that begins with * needs quotes", at
    if "expected a single document" in problem or "expected a single document" in context:
        return "a second document begins", "keep one: remove the line `---` and what does not belong", at
    if "could not determine a constructor" in problem:
        return "a tag that is not known here", "remove the word with `!`; a text that begins with ! needs quotes", at
    if "unhashable key" in problem:
        return "a key that is a list or a mapping", "write a text as the key; text with braces or brackets needs quotes", at
    if "cannot start any token" in problem:
        return f"no value begins with {stands}", "put the text in quotes", at
    if "quoted scalar" in context:
        return "a quotation mark that is never closed", "close it, or remove it", opened
    if "flow" in context and ("stream end" in problem or "expected ',' or" in problem):
        bracket = "a bracket [" if "sequence" in context else "a brace {" if "mapping" in context else "a bracket or brace"
        return f"{bracket} is not closed, or a comma is missing", f"it was opened in line {opened + 1}", at
    for near in dict.fromkeys((at, at - 1, opened)):
        if 0 <= near < len(lines) and (match := _NO_SPACE.match(lines[near])):
            return "a space is missing after the colon", f"write `{match[1]}: {match[2]}`", near
    if "mapping values are not allowed" in problem:
        return _misplaced_key(lines, at, column)
    if "could not find expected ':'" in problem:
        return "a key without a colon", "write `key: value`", min(opened, at)
    if "block" in context:
        return "this line is indented unlike those it belongs to", f"indent it as the lines beside it (line {opened + 1})", at
    return problem, "text that begins with one of & * ! | > % @ ` needs quotes", at


def _misplaced_key(lines: list[str], at: int, column: int) -> tuple[str, str, int]:
    """A key stands where none can: behind another, below a text that was to be a key, or deeper than those beside it."""
    if ": " in lines[at][:column]:
        return "a second colon in one line", "put text that holds `: ` in quotes, and each key on a line of its own", at
    above = next((line for line in range(at - 1, -1, -1) if lines[line].partition("#")[0].strip()), at)
    if ":" not in lines[above]:
        return "a colon is missing", "write `key: value`", above
    return "this line is indented deeper than those it belongs to", f"indent it as the lines beside it (line {above + 1})", at
