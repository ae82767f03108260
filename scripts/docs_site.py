"""The documentation site beyond mkdocs.yml: a hook of MkDocs, and an extension of griffe, which reads the docstrings.

docs/ is the source. README is the first page, and a file elsewhere that a page links to is a page as well: so no link leads out
of the site, and nothing is written twice.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final

from griffe import Extension, Function
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parent.parent
_PAGES: Final = ("README.md", "CHANGELOG.md", "CONVENTIONS.md")
_LINK: Final = re.compile(r"(?<=\]\()(?!https?://)([^)\s#]+)(?=[#)])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in _beside_docs():
        text = (ROOT / path).read_text()
        if path.suffix != ".md":
            text = f"# {path}\n\n````{path.suffix[1:]}\n{text}````\n"
        files.append(File.generated(config, _place(path), content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links count from the file's place in the repository: here, from the page's place in the site."""
    source = _source(page.file.src_uri)

    def on_site(found: re.Match[str]) -> str:
        target = _target(source, found[1])
        return found[1] if target is None else os.path.relpath(_place(target), PurePosixPath(page.file.src_uri).parent)

    return _LINK.sub(on_site, markdown)


def _beside_docs() -> list[PurePosixPath]:
    """What is no part of docs/ and becomes a page: those of _PAGES, and what pages link to."""
    found = {PurePosixPath(name) for name in _PAGES}
    unread = [*found, *(PurePosixPath(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
    while unread:
        new = {path for path in _linked(unread.pop()) if path.parts[0] != "docs"} - found
        found |= new
        unread += (path for path in new if path.suffix == ".md")
    return sorted(found)


def _linked(source: PurePosixPath) -> Iterator[PurePosixPath]:
    for target in _LINK.findall((ROOT / source).read_text()):
        path = _target(source, target)
        if path is not None:
            yield path


def _target(source: PurePosixPath, link: str) -> PurePosixPath | None:
    """The file that a link in another names, both from the root; None: there is none."""
    path = PurePosixPath(os.path.normpath(source.parent / link))
    return path if (ROOT / path).is_file() else None


def _place(path: PurePosixPath) -> str:
    """The source of the page in the site that shows a file of the repository."""
    if path.parts[0] == "docs":
        return str(path.relative_to("docs"))
    if path.name == "README.md":
        return str(path.with_name("index.md"))
    return str(path) if path.suffix == ".md" else f"{path}.md"


def _source(place: str) -> PurePosixPath:
    """Undoes _place."""
    for path in _beside_docs():
        if _place(path) == place:
            return path
    return PurePosixPath("docs", place)


class Listed(Extension):
    """Makes a list of what a docstring says of parameters and of errors (`name: what it is`, `Raises: …`)."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        if func.docstring is not None:
            names = "|".join((*(re.escape(parameter.name) for parameter in func.parameters), "Raises", "Returns"))
            said = re.compile(rf"(?:^|(?<=\.) )((?:{names})(?:, (?:{names}))*): ", re.MULTILINE)
            func.docstring.value = said.sub(r"\n- `\1`: ", func.docstring.value)
