"""MODEL or CONFIG, as whoever starts a gateway names it: told apart without what guessing a configuration takes."""

import os
from pathlib import Path
from typing import Final

from gateway.documents.reader import configuration_in
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
    path = Path(what)
    if os.path.lexists(path) and is_archive(path):
        from gateway.configuring.archive import unpacked

        folder = unpacked(path.absolute(), kept())
        if configuration_in(folder) is not None:
            return str(folder)
    return what


def kept() -> Path:
    """Where what is made for packages stays for the next start: this user's own folder. Raises: ConfigError."""
    return private_directory(shared_run_dir("packages"))
