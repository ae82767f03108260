"""MODEL or CONFIG, as whoever starts a gateway names it: told apart without what guessing a configuration takes."""

import os
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Final

from gateway.documents.faults import ConfigFaults
from gateway.documents.reader import Document, configuration_in, elsewhere, read
from gateway.process.run_dir import private_directory, shared_run_dir

CONFIGURATIONS: Final = (".yaml", ".yml")
ARCHIVES: Final = (".tar.gz", ".tgz")


def is_configuration(what: str) -> bool:
    """Whether it is a configuration file, or a folder that has one, which nothing is guessed of."""
    return what == "-" or what.lower().endswith(CONFIGURATIONS) or configuration_in(what) is not None


def is_archive(path: Path) -> bool:
    return path.is_file() and path.name.lower().endswith(ARCHIVES)


def opened(what: str) -> str:
    """MODEL as it was named; of an archive as `gateway package` makes it, which says itself how it is served, the folder that
    it is unpacked in. Raises: ConfigError.
    """
    if fault := elsewhere(what):
        raise ConfigFaults([fault])
    path = Path(what)
    if os.path.lexists(path) and is_archive(path):
        from gateway.configuring.archive import unpacked

        folder = unpacked(path.absolute(), kept())
        if configuration_in(folder) is not None:
            return str(folder)
    return what


def document_of(what: str) -> Document:
    """As `read`, of CONFIG, for which a model may have been named. Raises: ConfigFaults."""
    try:
        return read(what)
    except ConfigFaults as exc:
        if is_configuration(what) or not os.path.lexists(what):
            raise
        remedy = f"of a model, `gateway init {quote(what)}` writes a configuration"
        raise ConfigFaults([replace(exc.faults[0], remedy=remedy)]) from exc


def kept() -> Path:
    """Where what is made for packages stays for the next start: this user's own folder. Raises: ConfigError."""
    return private_directory(shared_run_dir("packages"))
