"""One archive of a configuration and of all that it names, as SageMaker takes it.

In it are `gateway.yaml`, whose paths count from there, the artifacts and the code, each where it stood beside the others, and
`SHA256SUMS`, by which whoever serves the folder sees that it came whole (`gateway.documents.sums`). The same files make the
same bytes.
"""

import ast
import contextlib
import gzip
import hashlib
import io
import os
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import IO, Any, Final

import yaml

from backends.artifacts import ONNX, identify
from backends.digests import digest
from backends.files_below import files_below
from backends.near_file import near_file
from backends.onnx_file import weights_beside
from backends.regular_file import absent
from backends.source import is_source, not_python
from gateway.config import config_of, located
from gateway.deploying.on_machine import SECRETS
from gateway.documents.faults import ConfigFaults, Fault, Location
from gateway.documents.reader import PACKED, Document
from gateway.documents.sums import SUMS, as_text
from gateway.errors import ConfigError

_LEVEL: Final = 1  # of gzip: weights hardly get smaller by more
_OPTIONS: Final = ("class_options", "factory_options")
_IMPORTED: Final = (".py", ".pyc", ".so")  # what Python imports
_TRITON: Final = "TritonPythonModel"  # whose config.pbtxt is two folders up
_HANDLERS: Final = "SageMakerHandlers"  # whose `model_dir` that is, unless it is named
_APART: Final = "a file that no package holds: one that `server` or --without names, or the archive itself"


@dataclass(frozen=True, slots=True)
class Package:
    """value: its gateway.yaml. files: what else is in it, by name there. root: the folder here that names count from."""

    value: dict[str, Any]
    files: Mapping[str, Path]
    root: Path

    @property
    def configuration(self) -> str:
        return _as_yaml(self.value)

    def without(self, written: Iterable[Path]) -> "Package":
        """written: files that a command makes of it, perhaps in a folder that goes along."""
        real = {*map(os.path.realpath, written)}
        return replace(self, files={name: path for name, path in self.files.items() if os.path.realpath(path) not in real})


def packed(document: Document, beside: Sequence[Path] = (), *, apart: Iterable[Path] = ()) -> Package:
    """What a configuration names. beside: files and folders that go along. apart: files that never do, as those that `server`
    names: of a folder, and of what code names, all others go; where one is asked for by itself, it is refused.

    Raises: ConfigError, with all that cannot be packed.
    """
    config_of(document)
    found = _Contents(document, apart=apart)
    for path in beside:
        if found.is_apart(path):
            raise ConfigError(f"--with: {path}: {_APART}: leave it out")
        if not found.take(Path(os.path.normpath(path.absolute()))):
            raise ConfigError(f"--with: {path}: no such file, or an empty folder")
    if found.faults:
        raise ConfigFaults(found.faults)
    package = found.package()
    for name, path in package.files.items():
        if name in (PACKED, SUMS):
            raise ConfigError(f"{path}: the package has a {name} of its own: rename this one, or move it away")
        if not name.isprintable() or "\\" in name:
            raise ConfigError(f"{str(path)!r}: a name with a backslash, or what cannot be printed: rename it")
    return package


def relative_of(document: Document, apart: Iterable[Path] = ()) -> Package:
    """As a valid one would be packed, but for absolute paths, which stay as they are: they are those of an image.

    What is not here is taken for a file that is there.
    """
    return _Contents(document, relative_only=True, apart=apart).package()


def secrets_here(document: Document) -> list[Path]:
    """The files that a section `server` names: of a machine that serves, and some are secrets."""
    folder = (document.folder or Path()).absolute()
    server = document.value.get("server") or {}
    named = [(server.get(section) or {}).get(key) for section, key in SECRETS]
    return [folder / part for part in named if part is not None]


class _Contents:
    """What a configuration names, as far as it was looked at. Paths are absolute.

    value: the configuration. files: all that goes along. around: the folders that they keep their places in. places: where a
    path stands in an entry of the configuration: the entry, the key, the path, and what follows it there. faults: what cannot
    be packed. relative_only: as `relative_of` has it. apart: as `packed` has it.
    """

    def __init__(self, document: Document, *, relative_only: bool = False, apart: Iterable[Path] = ()) -> None:
        self.files: set[Path] = set()
        self.around: set[Path] = set()
        self.places: list[tuple[dict[str, Any], str, Path, str]] = []
        self.faults: list[Fault] = []
        self._document = document
        self._folder = (document.folder or Path()).absolute()
        self._relative_only = relative_only
        self._apart = {*map(os.path.realpath, (*apart, *secrets_here(document)))}
        value: Any = located(document.value, self._folder)
        elsewhere: Any = located(document.value, self._folder / "elsewhere")
        self.value: dict[str, Any] = value
        self._look_at_server(value.get("server", {}), elsewhere.get("server", {}))
        for index, model in enumerate(value["models"]):
            for number, backend in enumerate(model["backends"]):
                if backend["kind"] != "triton":  # whose model is on another server
                    at = ("models", index, "backends", number)
                    self._look_at_backend(at, backend, elsewhere["models"][index]["backends"][number])

    def package(self) -> Package:
        around = self.around | {path.parent for _, _, path, _ in self.places}
        files = self.files | {path for _, _, path, _ in self.places if not path.exists()}
        root = Path(os.path.commonpath(around)) if around else self._folder
        for entry, key, path, name in self.places:
            entry[key] = path.relative_to(root).as_posix() + name
        named = {path.relative_to(root).as_posix(): path for path in files}
        return Package(self.value, dict(sorted(named.items())), root)

    def _look_at_server(self, server: Mapping[str, Any], elsewhere: Mapping[str, Any]) -> None:
        """Its paths are of a machine, and may hold secrets. elsewhere: the same, were the configuration in another folder."""
        for key, value in server.items():
            if value != elsewhere[key]:
                found = "a path beside the configuration, which a package does not hold"
                self._refuse(("server", key), found, "leave it out, or name an absolute path of where it is going to be served")

    def _look_at_backend(self, at: Location, backend: dict[str, Any], elsewhere: Mapping[str, Any]) -> None:
        """elsewhere: the same, were the configuration in another folder."""
        build = backend.pop("build", None)  # what it makes is packed
        engines = backend.pop("engines", None)
        absolute = engines == elsewhere.get("engines")
        goes = engines and not (absolute and self._relative_only)
        if goes and (self.take(Path(engines)) or self._relative_only):
            self.places.append((backend, "engines", Path(engines), ""))
        elif engines and absolute:  # a place of the machine that serves it; a relative one was not built yet
            backend["engines"] = engines
        model: str | None = backend.get("model")
        if model is None or (self._relative_only and model == elsewhere["model"]):
            return
        place, _, name = model.rpartition(":")
        self._hold_to_digest(at, model, backend.get("sha256"))
        if not is_source(model):
            self._look_at_artifact((*at, "model"), Path(model), built=build is not None)
            self.places.append((backend, "model", Path(model), ""))
        elif place.endswith(".py"):
            whole = name == _TRITON or (name == _HANDLERS and not (backend.get("class_options") or {}).get("model_dir"))
            self._look_at_code((*at, "model"), Path(place), whole=whole)
            self.places.append((backend, "model", Path(place), f":{name}"))
            for key in _OPTIONS:
                self._look_at_option((*at, key), backend.get(key), Path(place).parent)
        else:
            found = "an installed module, which a package does not hold"
            self._refuse((*at, "model"), found, f"name a file, FILE.py:{name}, that has it or imports it")

    def _hold_to_digest(self, at: Location, model: str, sha256: str | None) -> None:
        """A file that is not there is refused elsewhere."""
        with contextlib.suppress(OSError):
            if sha256 is not None and (found := digest(model)) != sha256:
                remedy = "put the file at `model` that is meant, or correct this"
                self._refuse((*at, "sha256"), f"another file: its SHA-256 is {found}", remedy)

    def take(self, path: Path) -> bool:
        """A file, or all that is in a folder, but what is apart; False, if there is nothing."""
        files = [each for each in _below(path) if not self.is_apart(each)]
        self.files.update(files)
        if files:
            self.around.add(path.parent)
        return bool(files)

    def is_apart(self, path: Path) -> bool:
        return os.path.isfile(path) and os.path.realpath(path) in self._apart

    def _look_at_artifact(self, at: Location, path: Path, *, built: bool) -> None:
        if self.is_apart(path):
            self._refuse(at, _APART, "name another")
        elif not self.take(path):
            remedy = f"`gateway compile {quote(self._document.source)}` makes it" if built else near_file(path)
            self._refuse(at, absent(path), remedy)
        elif path.is_file():
            artifact = identify(path)
            if artifact.damaged:
                self._refuse(at, artifact.what, artifact.way)
            elif artifact == ONNX:
                for name in weights_beside(path):
                    self.take(Path(os.path.normpath(path.parent / name)))

    def _look_at_code(self, at: Location, code: Path, *, whole: bool) -> None:
        """whole: with the folder above that of the file."""
        if not code.is_file():
            self._refuse(at, absent(code), near_file(code))
            return
        if self.is_apart(code):
            self._refuse(at, _APART, "name another")
            return
        self.take(code)
        if whole:
            self.take(code.parent.parent)
        read, unread = {code}, [code]
        while unread:
            file = unread.pop()
            try:
                named = [*_named_in(file, code.parent)]
            except (SyntaxError, ValueError) as exc:
                if file == code:
                    self._refuse(at, not_python(file, exc), "")
                continue  # of another, such as a template, nobody knows that it is imported
            for path in named:
                self.take(path)
                unread += (each for each in _below(path) if each.suffix == ".py" and each not in read)
                read.update(unread)

    def _look_at_option(self, at: Location, value: Any, folder: Path) -> None:
        """A text may be a path, which only the code knows: in a package it is right where it counts from the code itself."""
        if isinstance(value, dict | list):
            for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                self._look_at_option((*at, key), part, folder)
        elif isinstance(value, str) and value:
            path = Path(os.path.normpath(folder / value))
            if not os.path.isabs(value):
                if self.is_apart(path):
                    self._refuse(at, _APART, "leave it out, or name another")
                elif not folder.is_relative_to(path):  # "." may mean anything
                    self.take(path)
            elif os.path.isfile(path) or (os.path.isdir(path) and path.name):
                remedy = "count it from the code, as Path(__file__).parent / … does, or name it by an environment variable"
                self.faults.append(self._document.fault(at, "an absolute path of this machine", remedy=remedy, value=False))

    def _refuse(self, at: Location, found: str, remedy: str) -> None:
        self.faults.append(self._document.fault(at, found, remedy=remedy))


def _below(path: Path) -> Iterator[Path]:
    """A file itself; of a folder every file that is neither hidden nor a cache of Python's. Raises: OSError."""
    if os.path.isfile(path):
        yield path
    elif os.path.isdir(path):
        yield from files_below(path, _is_shown)


def _is_shown(path: Path) -> bool:
    return not path.name.startswith(".") and path.name != "__pycache__"


def _named_in(file: Path, folder: Path) -> Iterator[Path]:
    """What a file of Python imports from `folder`, and the files beside it whose names stand in it as text.

    Raises: SyntaxError, ValueError.
    """
    for node in ast.walk(ast.parse(file.read_bytes(), str(file))):
        match node:
            case ast.Import():
                modules = [alias.name for alias in node.names]
            case ast.ImportFrom(module=str(module), level=0):
                modules = [module]
            case ast.ImportFrom(level=1):
                modules = []
                for name in [node.module.partition(".")[0]] if node.module else [alias.name for alias in node.names]:
                    yield from _imported(name, file.parent)
            case ast.Constant(value=str(text)):
                modules = []
                path = file.parent / text
                inside = not os.path.isabs(text) and not any(part.startswith(".") for part in Path(text).parts)  # nor hidden
                if text and inside and os.path.isfile(path):
                    yield path
            case _:
                modules = []
        for name in {module.partition(".")[0] for module in modules} - sys.stdlib_module_names:
            yield from _imported(name, folder)


def _imported(name: str, folder: Path) -> Iterator[Path]:
    """Where Python finds a module, in its order: a package, files, compiled for any machine, a folder without __init__.py."""
    inside = folder / name
    files = [folder / f"{name}{ending}" for ending in _IMPORTED]
    found = [path for path in (*files, *folder.glob(f"{name}.*.so")) if path.is_file()]
    if any(inside.glob("__init__.*")) or not found:
        found = [inside] if any(path.suffix in _IMPORTED for path in _below(inside)) else []
    yield from found


class _PackageDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # the package is read by people too
        return True


def _as_yaml(document: Any) -> str:
    return yaml.dump(document, Dumper=_PackageDumper, sort_keys=False, allow_unicode=True, width=10_000)


def partial_of(out: Path) -> Path:
    """Where an archive is written until it is whole."""
    return out.with_name(f"{out.name}.partial")


def write(package: Package, out: Path) -> str:
    """Write the archive, whole or not at all, and tell what is in it: its size, and a line for each name.

    Raises: OSError, by the name of the archive; ConfigError, by that of a file that cannot be packed.
    """
    partial = partial_of(out)
    hashes = {}
    configuration = package.configuration.encode()
    try:
        with (
            partial.open("wb") as file,
            gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) as compressed,
            tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            hashes[PACKED] = _add(archive, PACKED, io.BytesIO(configuration), len(configuration))
            for name, path in package.files.items():
                with path.open("rb") as opened:
                    time_s = _time_of(opened) if name.endswith(".py") else 0
                    hashes[name] = _add(archive, name, opened, path.stat().st_size, time_s)
            sums = as_text(hashes).encode()
            _add(archive, SUMS, io.BytesIO(sums), len(sums))
        partial.replace(out)
    except OSError as exc:
        if exc.filename is None or Path(exc.filename) == partial:
            raise OSError(exc.errno, exc.strerror, str(out)) from exc
        raise ConfigError(f"{exc.filename}: cannot be packed: {exc.strerror}: expected a file that may be read") from exc
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    names = (*hashes, SUMS)
    return "\n  ".join((f"{out.stat().st_size / (1 << 20):.1f} MiB, {len(names)} files", *names))


def _time_of(code: IO[bytes]) -> int:
    """Another for other code. Python knows by time and size whether what it has compiled is of this file: where all have one
    time, it would run code of the package that was unpacked there before.
    """
    digest = hashlib.file_digest(code, "sha256").digest()  # type: ignore[arg-type]  # a file that is open
    code.seek(0)
    return int.from_bytes(digest[:4]) >> 1


def _add(archive: tarfile.TarFile, name: str, file: IO[bytes], size_bytes: int, time_s: int = 0) -> str:
    """Of nobody, at no time that means something; gives the SHA-256 of what was written."""
    entry = tarfile.TarInfo(name)  # whose owner and group are 0
    entry.size = size_bytes
    entry.mtime = time_s
    read_by = _Hashed(file)
    archive.addfile(entry, read_by)
    return read_by.sha256.hexdigest()


class _Hashed:
    """A file that is read once, and hashed meanwhile."""

    def __init__(self, file: IO[bytes]) -> None:
        self.sha256 = hashlib.sha256()
        self._file = file

    def read(self, size_bytes: int = -1) -> bytes:
        data = self._file.read(size_bytes)
        self.sha256.update(data)
        return data
