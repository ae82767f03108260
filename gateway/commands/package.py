"""`gateway package CONFIG`: one archive of a configuration and of all that it names (`gateway.deploying.packing`)."""

import argparse
from pathlib import Path
from typing import Final

from gateway.deploying.packing import packed, partial_of, write
from gateway.documents.reader import read
from gateway.documents.whole_file import asked_by
from gateway.errors import ConfigError
from gateway.process.command_line import add_command
from gateway.process.completion import completed_by_files
from gateway.process.console import step

_ENDINGS: Final = (".tar.gz", ".tgz")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `package` to the command line."""
    command = add_command(
        commands,
        "package",
        "make the archive of a configuration and of all that it names",
        "gateway package configs/examples/iris.yaml",
        "gateway package configs/examples/linear.yaml --out linear.tar.gz",
        "gateway package configs/examples/iris.yaml --with LICENSE",
        more="The archive is a model.tar.gz of SageMaker; unpacked, it is a folder that `gateway serve` takes, and holds to "
        "its hashes. Of code, the modules beside it that it imports are packed, and the files beside it whose names stand in "
        "it; --with adds what else it reads. What `server` names (keys, certificates) is not packed. The same files make the "
        "same bytes.",
    )
    config = command.add_argument("config", metavar="CONFIG", help="a YAML file")
    completed_by_files(config)
    out = "the archive (model.tar.gz); replaced, if it exists"
    command.add_argument("--out", type=Path, default=Path("model.tar.gz"), metavar="FILE", help=out)
    beside = "this file or folder too; may be repeated"
    command.add_argument("--with", dest="beside", type=Path, action="append", default=[], metavar="PATH", help=beside)
    apart = "not this file, though it is in a folder that is packed, or code names it; may be repeated"
    command.add_argument("--without", dest="apart", type=Path, action="append", default=[], metavar="FILE", help=apart)
    command.set_defaults(run=_package)


def _package(arguments: argparse.Namespace) -> int:
    out: Path = arguments.out
    if not out.name.endswith(_ENDINGS):
        raise ConfigError(f"--out: {out}: expected a name that ends in {' or '.join(_ENDINGS)}")
    for path in arguments.apart:
        if not path.is_file():
            raise ConfigError(f"--without: {path}: no such file")
    package = packed(read(arguments.config), arguments.beside, apart=(out, partial_of(out), *arguments.apart))
    with asked_by("--out"), step(f"writing {out}"):
        told = write(package, out)
    print(f"{out}: {told}")
    return 0
