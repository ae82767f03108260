"""The folders in which models have their code, and whose helper a name means.

Such a folder is put at the end of the import path, so that the code finds its neighbours; nothing that is installed, nor the
gateway itself, is hidden by one. Python keeps one module for each name: of two models that both have a `helper.py` beside
their code, the second would compute with the helper of the first. So where two folders have a name in common, `import` looks
at who asks, and gives code what its own folder has. The first folder on the path keeps the plain name in `sys.modules`, as if
it were alone; a module of another is in a package that stands for its folder, such as `code_0123abcd.helper`.

That holds whenever `import` runs, within a request as well. It cannot hold for who imports in the name of that code and takes
what `sys.modules` then has, as pickle does: that is refused. `importlib.import_module` is not seen; it finds the first.

Where a file has changed since it was imported, the next import of code in its folder takes all of the folder anew. What runs
already keeps what it had, also where it imports within a request: its modules know each other by `_Replaced`.
"""

import builtins
import hashlib
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec, resolve_name
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final

from backends.base import LoadFailed

_lock: Final = threading.Lock()
_packages: Final[dict[str, str]] = {}  # what stands for a folder, by the folder
_names: Final[dict[str, frozenset[str]]] = {}  # what may be imported from a folder, by the folder
_shared: set[str] = set()  # the names that several folders have
_put: Final[set[str]] = set()  # the folders that were not on the import path before
_of_others: Final[dict[str, frozenset[str]]] = {}  # modules that were there before, by the folder
_imported: Final[dict[str, "_Imported"]] = {}  # by the folder
_plain: Callable[..., ModuleType] = builtins.__import__  # what was there before `_import`
_looks = False  # whether that is there


class _Imported:
    """Of a folder: when its code was first run, and what its files were then, as far as that is known, by the file."""

    def __init__(self, since_ns: int) -> None:
        self.since_ns = since_ns
        self.stamps: dict[str, tuple[int, ...]] = {}


class _Replaced(dict[str, ModuleType]):
    """What was imported together, by the names that it has for each other. As `loader_state` of a module's spec: the module has
    been imported anew since, and code that still runs in it finds these.
    """

    def found(
        self, name: str, globals: Mapping[str, object] | None, fromlist: Sequence[str] | None, level: int
    ) -> ModuleType | None:
        """What `import` gives; None: it was not imported then."""
        if level:
            package = str((globals or {}).get("__package__"))
            stand_in, _, own = package.partition(".")
            name = resolve_name("." * level + name, own if stand_in in _packages.values() else package)
        module = self.get(name)
        if module is None or not all(hasattr(module, each) for each in fromlist or ()):
            return None
        return module if fromlist else self.get(name.partition(".")[0])


@contextmanager
def importing(folder: Path, mains: Collection[str] = ()) -> Iterator[None]:
    """Around the import of code in a folder: it finds its neighbours, and all are as their files are now.

    If it fails, what was imported before stays, and nothing else. mains: names of modules that nobody imports, which stay in
    `sys.modules` where they are replaced. Raises: LoadFailed, for a changed file that a process imports only once.
    """
    put_on_path(folder)
    importlib.invalidate_caches()
    place, began_ns = str(folder), time.time_ns()
    before = _modules_from(place)
    compiled = {_own_name(name, place).partition(".")[0] for name, module in before.items() if not _is_source(module)}
    stays = {name for name in before if _own_name(name, place).partition(".")[0] in compiled}
    changed = {name for name, module in before.items() if not is_replaced(module) and _has_changed(module, place)}
    if fixed := sorted(changed & stays):
        raise LoadFailed(
            f"{before[fixed[0]].__file__}: has changed since this process imported it, and what has compiled code is imported "
            "once: restart the gateway, or set `isolation: process`"
        )
    old: dict[str, ModuleType] = {}
    if changed:
        old = {name: module for name, module in before.items() if name not in stays and not is_replaced(module)}
        _replace(old, place, mains)
    try:
        yield
    except BaseException:
        for name, module in _modules_from(place).items():
            if before.get(name) is not module:
                del sys.modules[name]
        sys.modules.update(before)
        _mark(old, None)
        raise
    kept = None if changed else _imported.get(place)
    now = _imported[place] = kept or _Imported(began_ns)
    for module in _modules_from(place).values():
        stamp = _stamp(module)
        # A file that changes while it is imported may have said something else: it is not known what was run.
        if stamp and stamp[0] <= began_ns and not is_replaced(module):
            now.stamps.setdefault(str(module.__file__), stamp)


def is_replaced(module: ModuleType) -> bool:
    """Whether a module was imported before a file of its folder changed, and is to be imported anew."""
    return isinstance(getattr(module.__spec__, "loader_state", None), _Replaced)


def _replace(old: Mapping[str, ModuleType], place: str, mains: Collection[str]) -> None:
    _mark(old, _Replaced({_own_name(name, place): module for name, module in old.items()}))
    for name in old.keys() - set(mains):
        del sys.modules[name]
    with _lock:
        _look()


def _mark(modules: Mapping[str, ModuleType], replaced: _Replaced | None) -> None:
    for module in modules.values():
        if module.__spec__ is not None:
            module.__spec__.loader_state = replaced


def _modules_from(place: str) -> dict[str, ModuleType]:
    """What models' code in a folder is and has imported from it, by its names in `sys.modules`."""
    package, others = _packages[place], _of_others[place]
    homes: dict[str, str] = {}
    found: dict[str, ModuleType] = {}
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        if top not in homes:
            homes[top] = _home(getattr(sys.modules.get(top), "__spec__", None))
        if homes[top] == place and name != package and top not in others:
            found[name] = module
    return found


def _own_name(name: str, place: str) -> str:
    """The name that code in a folder has for what is in it."""
    return name.removeprefix(f"{_packages[place]}.")


def _is_source(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is None or file.endswith(".py")


def _has_changed(module: ModuleType, place: str) -> bool:
    file, then = getattr(module, "__file__", None), _imported.get(place)
    if file is None or then is None:  # it is a folder, or was imported by what failed
        return False
    stamp, known = _stamp(module), then.stamps.get(file)
    if stamp is None or known is not None:
        return stamp != known
    return stamp[0] > then.since_ns  # it was imported later, within a request


def _stamp(module: ModuleType) -> tuple[int, ...] | None:
    """What changes with a module's file; None: there is none. Archives give all files the same `st_mtime`."""
    try:
        found = os.stat(str(getattr(module, "__file__", "")))
    except OSError:
        return None
    return found.st_ctime_ns, found.st_mtime_ns, found.st_size, found.st_ino


def put_on_path(folder: Path) -> None:
    """Let the code in a folder find its neighbours, whatever other folders have."""
    place = str(folder)
    try:
        names = frozenset(entry.partition(".")[0] for entry in os.listdir(place))
    except OSError:  # Python finds nothing there either
        names = frozenset()
    with _lock:
        if place not in sys.path:
            sys.path.append(place)
            _put.add(place)
        if place not in _packages:
            package = f"code_{hashlib.sha256(place.encode()).hexdigest()[:8]}"
            spec = ModuleSpec(package, None, is_package=True)
            spec.submodule_search_locations = [os.path.join(place, "")]  # so that `_home` is the folder itself
            sys.modules[package] = module_from_spec(spec)
            _packages[place], _of_others[place] = package, frozenset()
            _of_others[place] = frozenset(_modules_from(place))
        _names[place] = names
        _share()


def forget_code(folder: Path) -> None:
    """What was imported from a folder is imported anew when it is asked for; nothing in this process runs it any more."""
    within = str(folder.resolve()) + os.sep
    with _lock:
        sys.path[:] = [path for path in sys.path if not (path + os.sep).startswith(within)]
        modules = [(name, _place(module)) for name, module in list(sys.modules.items())]  # parents are needed to tell
        for name in [name for name, place in modules if place.startswith(within)]:
            del sys.modules[name]
        for place in [place for place in _packages if (place + os.sep).startswith(within)]:
            sys.modules.pop(_packages.pop(place), None)
            del _names[place], _of_others[place]
            _imported.pop(place, None)
            _put.discard(place)
        _share()


def path_without() -> list[str]:
    """The import path without these folders, for a process that puts its own there: handed on, they would seem installed."""
    return [path for path in sys.path if path not in _put]


def _share() -> None:
    """Have `import` look at who asks once there is a name that several folders have."""
    global _shared
    seen: set[str] = set()
    shared: set[str] = set()
    for names in _names.values():
        shared |= names & seen
        seen |= names
    _shared = shared
    if shared:
        _look()


def _look() -> None:
    global _plain, _looks
    if not _looks:
        _plain, builtins.__import__, _looks = builtins.__import__, _import, True


def _import(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    top = name.partition(".")[0]
    replaced = getattr((globals or {}).get("__spec__"), "loader_state", None)
    if isinstance(replaced, _Replaced) and (module := replaced.found(name, globals, fromlist, level)):
        return module
    if level or top not in _shared:
        return _plain(name, globals, locals, fromlist, level)
    frame = sys._getframe(1)
    own = _folder_of(frame.f_globals if globals is None else globals)
    if (asks := own or _asking(frame)) is None:
        return _plain(name, globals, locals, fromlist, level)
    # Whether who calls takes what `sys.modules` has, and not what it is given here: C code, and pickle's Python code.
    if fromlist == [] or (globals is None and own is None):
        if other := _other_of(top, asks):
            raise ImportError(
                f"{name!r} is asked for by its name, as pickle does, for the code in {asks}, which has its own; in this "
                f"process the name is of that in {other}: rename one, or set `isolation: process` for one of the models",
                name=name,
            )
        return _plain(name, globals, locals, fromlist, level)
    package = _packages[asks]
    if f"{package}.{top}" not in sys.modules and not _other_of(top, asks):
        return _plain(name, globals, locals, fromlist, level)
    found = _plain(f"{package}.{name}", globals, locals, fromlist, 0)
    return found if fromlist else sys.modules[f"{package}.{top}"]


def _folder_of(module: Mapping[str, Any]) -> str | None:
    """The folder of models' code that a module is from, by its globals."""
    top = str(module.get("__name__")).partition(".")[0]
    home = _home(getattr(sys.modules.get(top), "__spec__", None))
    return home if home in _packages else None


def _asking(frame: FrameType | None) -> str | None:
    """The folder of the innermost code of a model that runs in this thread."""
    while frame is not None and (folder := _folder_of(frame.f_globals)) is None:
        frame = frame.f_back
    return None if frame is None else folder


def _other_of(top: str, folder: str) -> str:
    """The folder that has the plain name of what this folder has too; empty: it is for this one, or is something installed."""
    try:
        home = _home(find_spec(top))
    except ValueError:  # it was made without a file
        return ""
    if home == folder or home not in _packages or PathFinder.find_spec(top, [folder]) is None:
        return ""
    return home


def _home(spec: ModuleSpec | None) -> str:
    """The folder in which a module or package lies; empty: it is in none."""
    try:
        places = getattr(spec, "submodule_search_locations", None) or [getattr(spec, "origin", None)]
        return os.path.dirname(str(next(iter(places)) or ""))
    except KeyError:  # a package without a file looks for its parent, which is gone
        return ""


def _place(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or os.path.join(_home(getattr(module, "__spec__", None)), "")
