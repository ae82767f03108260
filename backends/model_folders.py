"""The folders in which models have their code, and whose helper a name means.

Such a folder is put at the end of the import path, so that the code finds its neighbours; nothing that is installed, nor the
gateway itself, is hidden by one. Python keeps one module for each name: of two models that both have a `helper.py` beside
their code, the second would compute with the helper of the first. So where two folders have a name in common, `import` looks
at who asks, and gives code what its own folder has. The first folder on the path keeps the plain name in `sys.modules`, as if
it were alone; a module of another is in a package that stands for its folder, such as `code_0123abcd.helper`. A model's own
file, which is executed under a name that no import makes, is what the code beside it gets by `import` of it (`serve_as`).

The folder of a Triton model's version has the model's folder behind it, as Triton has it on the path: what is in either is its
own, and no module of another version.

That holds whenever `import` runs, within a request as well. It cannot hold for who imports in the name of that code and takes
what `sys.modules` then has, as pickle does: that is refused, and a model's own file is put there, where the name is free and
would find it. `importlib.import_module` is not seen; it finds the first, and executes a model's own file once more.
"""

import builtins
import contextlib
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, all_suffixes
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final

_SUFFIXES: Final = tuple(all_suffixes())
_VARIABLE: Final = "PYTHONPATH"
_lock: Final = threading.Lock()
_packages: Final[dict[str, str]] = {}  # the folder that a package stands for, by the package
_places: Final[dict[str, list[str]]] = {}  # where code in a folder finds its own: in it and those behind it, by the folder
_whose: Final[dict[str, str]] = {}  # the folder that a plain name in such a place is for: the first of several
_names: Final[dict[str, frozenset[str]]] = {}  # what may be imported from a folder, by the folder
_shared: Final[set[str]] = set()  # the names that several folders have, or had: what was imported for one stays its own
_served: Final[dict[str, dict[str, tuple[str, bool]]]] = {}  # by a file's stem and folder: its module, and whether it is whole
_put: Final[set[str]] = set()  # the folders that were not on the import path before
_plain: Callable[..., ModuleType] = builtins.__import__  # what was there before `_import`
_looks = False  # whether that is there


def put_on_path(folder: Path, *behind: Path) -> None:
    """Let the code in a folder find its neighbours, and what is in those behind it, whatever other folders have."""
    place = str(folder)
    places = [place, *map(str, behind)]
    names: set[str] = set()
    for each in places:
        with contextlib.suppress(OSError):  # Python finds nothing there either
            entries = [entry.name for entry in os.scandir(each) if entry.is_dir() or entry.name.endswith(_SUFFIXES)]
            names |= {name for entry in entries if (name := entry.partition(".")[0]).isidentifier() and name != "__pycache__"}
    with _lock:
        for each in places:
            if each not in sys.path:
                sys.path.append(each)
                _put.add(each)
            if each == place or each in _put:  # else it counts as installed
                _whose.setdefault(each, place)
        found = _places.setdefault(place, [])
        found += [each for each in places if each not in found]
        package = package_of(folder)
        if package not in _packages:
            spec = ModuleSpec(package, None, is_package=True)
            spec.submodule_search_locations = found
            sys.modules[package] = module_from_spec(spec)
            _packages[package] = place
        _names[place] = _names.get(place, frozenset()) | names
        _share()


def package_of(folder: Path | str) -> str:
    """The name of the package that stands for a folder."""
    return f"code_{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"


def serve_as(path: Path, module: str, *, whole: bool) -> None:
    """Have code beside a file, whose folder was put on the path, get the module of this name where it imports the file.

    Not where the process imported the file before. whole: it was executed to its end. Until then code gets this module only
    where it has all names that are asked for: else the file is executed once more, so that imports in a circle end.
    """
    global _plain, _looks
    stem, folder = path.stem, str(path.parent)
    with _lock:
        modules = _served.setdefault(stem, {})
        if whole:
            if folder in modules and module in sys.modules:
                sys.modules.setdefault(f"{package_of(folder)}.{stem}", sys.modules[module])  # for `from . import model`
                modules[folder] = module, True
            return
        if getattr(sys.modules.get(stem), "__name__", "") == module:  # put there by `_import`, of an execution that failed
            del sys.modules[stem]
        found, before = PathFinder.find_spec(stem, [folder]), sys.modules.get(stem)
        if found is None or found.origin != str(path) or (before and Path(_place(before)).resolve() == path):
            return
        modules[folder] = module, False
        if not _looks:
            _plain, builtins.__import__, _looks = builtins.__import__, _import, True


def forget_code(folder: Path) -> None:
    """What was imported from a folder is imported anew when it is asked for; nothing in this process runs it any more."""
    within = str(folder.resolve()) + os.sep
    with _lock:
        sys.path[:] = [path for path in sys.path if not (path + os.sep).startswith(within)]
        modules = [(name, _place(module)) for name, module in list(sys.modules.items())]  # parents are needed to tell
        for name in [name for name, place in modules if place.startswith(within)]:
            del sys.modules[name]
        for package, place in [each for each in _packages.items() if (each[1] + os.sep).startswith(within)]:
            sys.modules.pop(package, None)
            del _packages[package], _places[place], _names[place]
            for served in _served.values():
                served.pop(place, None)
        for each in [each for each, place in _whose.items() if place not in _places]:
            del _whose[each]
        _put.difference_update([place for place in _put if (place + os.sep).startswith(within)])


def path_without() -> list[str]:
    """The import path without these folders, for a process that puts its own there: handed on, they would seem installed."""
    return [path for path in sys.path if path not in _put]


def with_path() -> dict[str, str]:
    """The environment of a Python process that is to find what this one does without these folders."""
    return os.environ | {_VARIABLE: os.pathsep.join(path or os.getcwd() for path in path_without())}


def own_path() -> tuple[list[str], str | None]:
    """What a process that was started `with_path` is told, for `take_path`."""
    return path_without(), os.environ.get(_VARIABLE)


def take_path(path: list[str], variable: str | None) -> None:
    """Have the import path, and the variable that names it to what is started from here, as who told it has them."""
    sys.path[:] = path
    if variable is None:
        del os.environ[_VARIABLE]
    else:
        os.environ[_VARIABLE] = variable


def _share() -> None:
    """Have `import` look at who asks once there is a name that several folders have."""
    global _plain, _looks
    seen: set[str] = set()
    for names in _names.values():
        _shared.update(names & seen)
        seen |= names
    if _shared and not _looks:
        _plain, builtins.__import__, _looks = builtins.__import__, _import, True


def _import(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    if name in _served and globals is not None and (served := _served_to(globals, name, fromlist, level)) is not None:
        return served
    top = name.partition(".")[0]
    if level or (top not in _shared and name not in _served):
        return _plain(name, globals, locals, fromlist, level)
    frame = sys._getframe(1)
    own = _folder_of(frame.f_globals if globals is None else globals)
    if (asks := own or _asking(frame)) is None or (first := _whose.get(_home_of(top))) is None:  # nothing installed is hidden
        return _plain(name, globals, locals, fromlist, level)
    # Whether who calls takes what `sys.modules` has, and not what it is given here: C code, and pickle's Python code.
    by_name = fromlist == [] or (globals is None and own is None)
    if by_name and first == asks and (module := _served.get(name, {}).get(asks, ("", False))[0]) in sys.modules:
        sys.modules.setdefault(name, sys.modules[module])  # else the file would be executed once more, with classes of its own
    if top not in _shared:
        return _plain(name, globals, locals, fromlist, level)
    package = package_of(asks)
    made = f"{package}.{top}" in sys.modules
    of_other = first != asks and (made or PathFinder.find_spec(top, _places.get(asks, [])) is not None)
    if by_name:
        if of_other:
            raise ImportError(
                f"{name!r} is asked for by its name, as pickle does, for the code in {asks}, which has its own; in this "
                f"process the name is for the code in {first}: rename one, or set `isolation: process` for one of the models",
                name=name,
            )
        return _plain(name, globals, locals, fromlist, level)
    # The plain name may have become its own since, once who had it is forgotten.
    if not of_other and (top in sys.modules or not made):
        return _plain(name, globals, locals, fromlist, level)
    found = _plain(f"{package}.{name}", globals, locals, fromlist, 0)
    return found if fromlist else sys.modules[f"{package}.{top}"]


def _served_to(asks: Mapping[str, object], name: str, fromlist: Sequence[str] | None, level: int) -> ModuleType | None:
    """The module that a file is served as, for the code beside it that imports it."""
    folder = _packages.get(str(asks.get("__package__"))) if level == 1 else None if level else _folder_of(asks)
    module, whole = _served[name].get(folder or "", ("", False))
    # Nothing installed is hidden; and pickle, which asks for no names, takes what `sys.modules` has.
    if module not in sys.modules or fromlist == [] or (not level and _home_of(name) not in _whose):
        return None
    found = sys.modules[module]
    return found if whole or (fromlist and vars(found).keys() >= set(fromlist)) else None


def _folder_of(module: Mapping[str, Any]) -> str | None:
    """The folder of models' code that a module is from, by its globals."""
    top = str(module.get("__name__")).partition(".")[0]
    return _packages.get(top) or _whose.get(_home(getattr(sys.modules.get(top), "__spec__", None)))


def _asking(frame: FrameType | None) -> str | None:
    """The folder of the innermost code of a model that runs in this thread."""
    while frame is not None and (folder := _folder_of(frame.f_globals)) is None:
        frame = frame.f_back
    return None if frame is None else folder


def _home_of(top: str) -> str:
    """The folder in which the module of a plain name lies."""
    try:
        return _home(find_spec(top))
    except ValueError:  # it was made without a file
        return ""


def _home(spec: ModuleSpec | None) -> str:
    """The folder in which a module or package lies; empty: it is in none."""
    try:
        places = getattr(spec, "submodule_search_locations", None) or [getattr(spec, "origin", None)]
        return os.path.dirname(str(next(iter(places)) or ""))
    except KeyError:  # a package without a file looks for its parent, which is gone
        return ""


def _place(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or os.path.join(_home(getattr(module, "__spec__", None)), "")
