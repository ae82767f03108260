"""What a package's requirements.txt asks for, in a folder of its own: pip is asked once, and what is installed stays as it is.

Pip runs for a fresh environment that sees all that is installed here, so what is there already is not fetched once more, and
what is not comes into the folder alone. It may ask whom its own settings name (PIP_INDEX_URL, pip.conf).
"""

import contextlib
import hashlib
import importlib.metadata
import os
import re
import shutil
import site
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from backends.regular_file import file_bytes
from gateway.errors import ConfigError
from gateway.process.child import run
from gateway.process.console import step
from gateway.process.kept_folders import making, put_in_place, take

_LONGEST_S: Final = 600.0
_MOST_FILES: Final = 64
_NAMED: Final = re.compile(
    rb"^[ \t]*(?:-[rc]|--(?:requirement|constraint)(?=[ \t=]))[ \t=]*(.+?)[ \t]*(?:[ \t]#.*)?\r?$", re.MULTILINE
)
_WORDS: Final = 400  # of pip's own


def installed(requirements: Path, kept: Path, *, longest_s: float = _LONGEST_S) -> Path | None:
    """The folder in `kept` that has what is asked for and not installed; None: all is.

    It is filled once, until the file is another, or one that it names. Raises: ConfigError, where that fails, takes too long,
    or another version of something is asked for than the gateway itself runs with.
    """
    try:
        asked = file_bytes(requirements)
    except OSError as exc:
        raise ConfigError(f"{requirements}: cannot be read: {exc.strerror}") from exc
    if not any(line.strip() and not line.lstrip().startswith(b"#") for line in asked.splitlines()):
        return None
    here = "\0".join((sys.version, sys.prefix, str(requirements.parent))).encode("utf-8", "surrogateescape")
    named = b"".join(_named_in(requirements, asked))
    folder = kept / f"{hashlib.sha256(here).hexdigest()[:16]}-{hashlib.sha256(asked + named).hexdigest()[:16]}"
    try:
        if not take(folder):
            with making(kept) as made:
                with step(f"installing what {requirements} asks for"):
                    _install(requirements, made, longest_s)
                _refuse_others(requirements, made / "packages")
                put_in_place(made, folder)
    except OSError as exc:
        raise ConfigError(f"{requirements}: cannot be installed: {exc}") from exc
    packages = folder / "packages"
    return packages if any(packages.iterdir()) else None


def _named_in(requirements: Path, asked: bytes) -> Iterator[bytes]:
    """What is in the files that it names by -r and -c, and these in turn; of what cannot be read, pip tells."""
    waiting, seen = [(requirements, asked)], {requirements}
    while waiting:
        file, content = waiting.pop()
        for name in _NAMED.findall(content):
            named = Path(os.path.normpath(file.parent / os.fsdecode(name)))
            if named not in seen and len(seen) < _MOST_FILES:
                seen.add(named)
                with contextlib.suppress(OSError, ValueError):
                    more = file_bytes(named)
                    waiting.append((named, more))
                    yield more


def _install(requirements: Path, made: Path, longest_s: float) -> None:
    """Into `packages` of a folder. Raises: ConfigError, OSError."""
    environment = made / "environment"
    venv.create(environment, system_site_packages=True, symlinks=True)
    paths = {"base": str(environment), "platbase": str(environment)}
    packages = Path(sysconfig.get_path("purelib", "venv", paths))
    # An environment made from another one sees the system's packages only.
    seen = [path for path in (*site.getsitepackages(), *sys.path) if os.path.isdir(path) and path.endswith("-packages")]
    (packages / "gateway.pth").write_text("".join(f"{path}\n" for path in dict.fromkeys(seen)), encoding="utf-8")
    command = [
        *(sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "--no-input", "--quiet"),
        *("--disable-pip-version-check", "install", "--retries", "1", "--timeout", "15", "-r", str(requirements)),
    ]
    try:
        status, told = run(command, cwd=requirements.parent, longest_s=longest_s)
    except TimeoutError:
        raise ConfigError(f"{requirements}: pip has not installed it within {longest_s:g} s: {_WAY}") from None
    if status:
        said = " ".join(told.decode(errors="replace").split())
        said = f"…{said[-_WORDS:]}" if len(said) > _WORDS else said
        raise ConfigError(f"{requirements}: pip cannot install it: {said}: {_WAY}")
    (packages / "gateway.pth").unlink()
    os.rename(packages, made / "packages")
    shutil.rmtree(environment)


_WAY: Final = "give pip an index (PIP_INDEX_URL), put wheels beside it (`--find-links`), or install it in the image"


def _refuse_others(requirements: Path, packages: Path) -> None:
    """Raises: ConfigError, for what is installed here in another version, which would go before the one that is asked for."""
    here: dict[str, str] = {}
    for name, version in _versions(sys.path):
        here.setdefault(name, version)
    others = [
        f"{name} {version} (here it is {here[name]})"
        for name, version in sorted(_versions([str(packages)]))
        if here.get(name, version) != version
    ]
    if others:
        raise ConfigError(
            f"{requirements}: asks for other versions than the gateway runs with: {', '.join(others)}: allow those, or serve "
            "it with a gateway in an environment of its own"
        )


def _versions(path: list[str]) -> Iterator[tuple[str, str]]:
    for found in importlib.metadata.distributions(path=path):
        if name := found.metadata["Name"]:
            yield re.sub(r"[-_.]+", "-", name).lower(), found.version
