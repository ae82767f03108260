"""YAML is read as yaml.safe_load reads it, with lines; what is no sensible YAML is told with its place and its usual cause."""

import random
import re
from pathlib import Path

import pytest
import yaml

from gateway.config.fields import ModelName, Strict, Version
from gateway.documents.faults import ConfigFaults
from gateway.documents.lenient import validated
from gateway.documents.reader import Document, parse, read

REFERENCE = Path(__file__).parent.parent / "configs" / "gateway.yaml"
BLOW_UP = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcde", "bcdef", strict=True)
)
MERGE_UP = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 10)}]}}\n" for before, name in zip("abcdefg", "bcdefgh", strict=True)
)
CHAIN = "x0: &x0 [1]\n" + "".join(f"x{n}: &x{n} [*x{n - 1}]\n" for n in range(1, 2000))

UNREADABLE = {
    "tab": ("a:\n\tb: 1\n", 2, "a tab"),
    "tab in braces": ("a: {b: 1,\n\tc: 2}\n", 2, "a tab"),
    "no space after a colon": ("a:\n  host:x\n  port: 1\n", 2, "write `host: x`"),
    "no colon": ("a\n  - b: 1\n", 1, "a colon is missing"),
    "two colons": ("a: b: c\n", 1, "a second colon in one line"),
    "too deep a line": ("a: 1\n  b: 2\n", 2, "indented deeper"),
    "a line between two depths": ("a:\n    b: 1\n  c: 2\n", 3, "indented unlike"),
    "open bracket": ("a: [1, 2\nb: 3\n", 2, "a bracket [ is not closed"),
    "open brace": ("a: {b: 1\nc: 3\n", 2, "a brace { is not closed"),
    "open quotation": ('a: "b\nc: d\n', 1, "never closed"),
    "unknown anchor": ("a: *b\n", 1, "undefined alias 'b'"),
    "two documents": ("a: 1\n---\nb: 2\n", 2, "a second document"),
    "unknown tag": ("a: !b c\n", 1, "a tag that is not known"),
    "tag of Python": ("a: !!python/object/apply:os.system [ls]\n", 1, "a tag that is not known"),
    "mapping as a key": ("{{a: 1}: 2}\n", 1, "a key that is a list or a mapping"),
    "reserved character": ("a: @b\n", 1, "no value begins with @"),
    "zero byte": ("a: 1\nb: \x00\n", 2, "the character '\\x00'"),
    "no date": ("a: 2020-13-45\n", 1, "looks like a date"),
    "no number": ("a: " + "9" * 5000 + "\n", 1, "looks like a date or a number"),
    "tagged as a number": ("a: 1\nb: !!int ''\n", 2, "looks like a date or a number"),
    "tagged as a truth value": ("a: !!bool x\n", 1, "looks like a date or a number"),
    "tagged as a date": ("a: !!timestamp x\n", 1, "looks like a date or a number"),
    "depth": ("[" * 10_000, 1, "nested more than 64 deep"),
    "depth by anchors": (CHAIN, 64, "nested more than 64 deep, its anchors filled in"),
    "growth by anchors": (BLOW_UP, 5, "more than 100000 values"),
    "growth by merging": (MERGE_UP, 6, "more than 100000 values"),
    "itself": ("a: &a [1, *a]\n", 1, "contains itself"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_read_is_told_with_its_line_and_cause(case: str) -> None:
    text, line, says = UNREADABLE[case]
    with pytest.raises(ConfigFaults) as caught:
        parse(text, source="x.yaml")
    (fault,) = caught.value.faults
    assert (fault.line, says in str(fault)) == (line, True), str(fault)


@pytest.mark.parametrize("path", sorted(REFERENCE.parent.rglob("*.yaml")), ids=lambda path: path.name)
def test_what_can_be_read_is_read_as_safe_load_reads_it(path: Path) -> None:
    assert read(path).value == yaml.safe_load(path.read_text())


def test_each_key_has_its_line_merged_and_repeated_ones_too() -> None:
    text = "base: &base\n  one: 1\n  two: 2\nown:\n  <<: *base\n  two: 3\nlist:\n  - a\n  - {b: 1,\n     c: 2}\n"
    document = parse(text, source="x.yaml")
    lines = {
        ("base", "two"): 3, ("own",): 4, ("own", "one"): 2, ("own", "two"): 6, ("list", 0): 8, ("list", 1, "c"): 10,
        ("own", "absent"): 4, ("list", 7): 7, (): 1,
    }  # fmt: skip
    assert {location: document.line(location) for location in lines} == lines
    assert document.faults == ()
    assert Document("args", document.value).line(("own",)) is None


def test_a_key_that_is_set_twice_is_a_fault_wherever_it_stands() -> None:
    document = parse("a: 1\nb:\n  - {c: 1, c: 2}\n'a': 3\n", source="x.yaml")
    assert sorted((fault.path, fault.line, fault.value) for fault in document.faults) == [("a", 4, "'3'"), ("b[0].c", 3, "'2'")]


@pytest.mark.slow
def test_whatever_is_written_is_read_or_told() -> None:
    text = "a: &a [1, 'x', {b: 2}]\nc:\n  - d: !!str 3\n    e: *a\n  - <<: {f: 1}\n    g: |\n      text\n# end\n"
    chance = random.Random(0)
    for _ in range(500):
        at = chance.randrange(len(text))
        odd = text[:at] + chance.choice(":{}[]&*!|>'\"%@`#-\t\n ,?\x00~<=") + text[at + chance.randrange(3) :]
        document, faults = None, ()
        try:
            document = parse(odd, source="x.yaml")
        except ConfigFaults as exc:
            faults = exc.faults
        if document is None:
            assert [fault.line for fault in faults if fault.line is None] == []
        else:
            assert document.value == yaml.safe_load(odd)


def test_a_link_to_nowhere_is_told_as_one(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.symlink_to("other.yaml")
    with pytest.raises(ConfigFaults, match=r"cannot be read: a link to other\.yaml, which is not there, expected") as caught:
        read(path)
    assert "did you mean" not in caught.value.message


def test_a_file_of_no_sensible_length_or_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    for content, says in ((b"a: 1\n" * (1 << 20), "longer than 4 MiB"), (b"a: \xff", "byte 3 is no UTF-8")):
        path.write_bytes(content)
        with pytest.raises(ConfigFaults, match=says):
            read(path)
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read(path).value == {"a": 1}


class Named(Strict):
    name: ModelName
    version: Version = "1"
    files: tuple[str, ...] = ()


@pytest.mark.parametrize("text", ["off", "1.10", "010", "0x10", "2024-01-02", "12:30", "Yes", ".5", "1_000"])
def test_text_that_yaml_reads_otherwise_is_to_be_put_in_quotes_as_it_stands(text: str) -> None:
    with pytest.raises(ConfigFaults) as caught:
        validated(Named, parse(f"name: {text}\nfiles: {text}\n", source="x"))
    assert caught.value.message == (
        f'x:1: name: {text}: expected text; put it in quotes: "{text}"\n'
        f"x:2: files: {text}: expected a list, each item text; write it as a list: [{text}]"
    )
    assert validated(Named, parse(f'name: "{text}"\n', source="x")).name == text


@pytest.mark.parametrize(("text", "item"), [("*", '"*"'), ("a, b", '"a, b"'), ("1", '"1"'), ("a.b", "a.b"), ("é", "é")])
def test_text_where_a_list_belongs_is_told_as_an_item_that_is_that_text(text: str, item: str) -> None:
    with pytest.raises(ConfigFaults, match=re.escape(f"write it as a list: [{item}]")):
        validated(Named, parse(f'name: n\nfiles: "{text}"\n', source="x"))
    assert validated(Named, parse(f"name: n\nfiles: [{item}]\n", source="x")).files == (text,)


@pytest.mark.parametrize(("text", "remedy"), [("010", '; write "010"'), ("0x10", ""), ("1.10", ""), ("null", "")])
def test_a_version_is_to_be_written_as_it_stands_where_that_makes_one(text: str, remedy: str) -> None:
    with pytest.raises(ConfigFaults) as caught:
        validated(Named, parse(f"name: m\nversion: {text}\n", source="x"))
    assert caught.value.message == f"x:2: version: {text}: expected a number of 1 to 18 digits, in quotes{remedy}"
