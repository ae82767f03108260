"""Code that a configuration names: `module:name`, or `path/to/file.py:name` for a file that is in no package.

Such a file finds its neighbours: `model_folders`.
"""

import difflib
import hashlib
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

from backends.base import BackendError, LoadFailed, words_of
from backends.model_folders import package_of, put_on_path, serve_as
from backends.regular_file import absent

_EXECUTED_S: Final = 30.0  # the most that another thread is waited for
# But it may wait for us, where the file's own code loads it: then so many looks in a row find it waiting.
_LOOK_S: Final = 0.02
_LOOKS: Final = 5
PARAMETERS: Final = ("parameters", "params")
_WAITING: Final = frozenset({"threading", "asyncio", "selectors", "uvloop"})  # in whose code a thread is that waits for another

_looking: Final = threading.Lock()  # for a module, and for who executes its file; also while that begins, and ends
_executing: Final[dict[str, tuple[int, threading.Event]]] = {}  # of a module: the thread that executes its file, and its end


def is_source(model: str) -> bool:
    """Whether `model` names code rather than an artifact's path."""
    place, colon, name = model.rpartition(":")
    return bool(colon) and bool(place) and name.isidentifier()


def not_python(file: Path, exc: SyntaxError | ValueError) -> str:
    """What is told of a file that could not be parsed."""
    if isinstance(exc, SyntaxError) and exc.lineno:
        return f"{file}:{exc.lineno}: not Python: {exc.msg}; correct that line"
    return f"{file}: not Python: {exc}"


def load_object(source: str, *behind: Path) -> Any:
    """The object `source` names. A file is executed once per process. Raises: LoadFailed.

    behind: folders in which the file finds what is not beside it.
    """
    place, _, name = source.rpartition(":")
    if not is_source(source):
        raise LoadFailed(f"{source!r}: expected `module:name` or `path/to/file.py:name`")
    try:
        module = _module_of_file(Path(place), name, behind) if place.endswith(".py") else import_module(place)
    except (LoadFailed, KeyboardInterrupt):
        raise
    except BaseException as exc:  # a script may end with sys.exit()
        line = line_of(exc, str(Path(place).resolve()))
        raise LoadFailed(f"{source!r}: cannot be imported: {words_of(exc)} ({line})") from exc
    try:
        return getattr(module, name)
    except AttributeError as exc:
        own = [known for known, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        near = difflib.get_close_matches(name, own, n=1)
        hint = f"; did you mean `{near[0]}`?" if near else f"; it has {', '.join(own)}" if own else ""
        what = "the file" if place.endswith(".py") else "the module"
        raise LoadFailed(f"{source!r}: {what} has no {name!r}{hint}") from exc


def made_from(source: str, options: Mapping[str, Any], *, key: str) -> Any:
    """What the factory `source` names returns. key: under which its options stand. Raises: LoadFailed."""
    return make(source, load_object(source), options, key=key)


def make(source: str, code: Any, options: Mapping[str, Any], *, key: str) -> Any:
    """Call a class or factory with its options. Raises: LoadFailed, which points at its line and at the key."""
    check_options(source, code, options, key=key)
    try:
        return code(**options)
    except (BackendError, KeyboardInterrupt):
        raise
    except BaseException as exc:  # it may end with sys.exit()
        given = f"; {key}: {', '.join(options)}" if options else ""  # without the values, which may be secrets
        raise LoadFailed(f"{source}: raised {words_of(exc)} ({line_of(exc, code)}){given}") from exc


def check_options(source: str, code: Any, options: Mapping[str, Any], *, key: str) -> None:
    """Hold options to what a class or factory takes, without calling it. Raises: LoadFailed, likewise."""
    for misfit in misfits(code, options, key=key):
        at = f"{key}.{misfit.option}" if misfit.option else key
        raise LoadFailed(f"{source}: {at}: {misfit.found}; {misfit.remedy} ({place_of(code)})")


@dataclass(frozen=True, slots=True)
class Misfit:
    """option: which one; empty: none by name."""

    option: str
    found: str
    remedy: str


def misfits(code: Any, options: Mapping[str, Any], *, key: str) -> Iterator[Misfit]:
    """Options that a class or a factory does not take, and those that it cannot do without. key: under which they stand."""
    try:
        parameters = inspect.signature(code).parameters.values()
    except (TypeError, ValueError):  # it does not tell
        return
    kind = inspect.Parameter
    named = {p.name: p for p in parameters if p.kind in (kind.POSITIONAL_OR_KEYWORD, kind.KEYWORD_ONLY)}
    any_name = any(p.kind is kind.VAR_KEYWORD for p in parameters)
    name = getattr(code, "__name__", "it")
    for option in options:
        if option not in named and not any_name:
            near = difflib.get_close_matches(str(option), named, n=1)
            takes = f"it takes {', '.join(named)}" if named else "it takes none"
            yield Misfit(option, f"{name} takes no such option", f"did you mean `{near[0]}`?" if near else takes)
    for option, parameter in named.items():
        if parameter.default is kind.empty and option not in options:
            yield Misfit(option, f"missing: {name} needs it", f"add `{key}: {{{option}: …}}`, or give it a default")
    unnamed = [p.name for p in parameters if p.kind is kind.POSITIONAL_ONLY and p.default is kind.empty]
    if unnamed:
        yield Misfit("", f"{name} takes {', '.join(unnamed)} by position only", "options are given by name: remove the `/`")


def line_of(exc: BaseException, code: Any) -> str:
    """FILE:LINE of the last line of the code's own file that an exception passed; of the last of all, where it passed none.

    code: a class or function, or its file.
    """
    if isinstance(exc, SyntaxError) and exc.filename:
        return f"{exc.filename}:{exc.lineno}"
    own = code if isinstance(code, str) else getattr(sys.modules.get(getattr(code, "__module__", "")), "__file__", None)
    frames = traceback.extract_tb(exc.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
    return f"{frame.filename}:{frame.lineno}"


def takes(function: Any, arguments: int) -> bool:
    """Whether a function can be called with so many arguments by position; with one, where it does not tell."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return arguments == 1
    try:
        signature.bind(*(None for _ in range(arguments)))
    except TypeError:
        return False
    return True


def takes_parameters(function: Any, place: int) -> bool:
    """Whether a function may be called with arguments up to this place, with the parameters of a request there: not where
    something else than a mapping, as a threshold, is its default, unless it is named as they are.
    """
    if not takes(function, place):
        return False
    of_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [each for each in inspect.signature(function).parameters.values() if each.kind in of_position]
    if len(named) < place:
        return True  # it is one of *args
    name, default = named[place - 1].name, named[place - 1].default
    return name in PARAMETERS or default is None or default is inspect.Parameter.empty or isinstance(default, Mapping)


def place_of(code: Any) -> str:
    """FILE:LINE of a function, of a class's constructor, or of the class if it has none."""
    for place in (code.__init__, code) if inspect.isclass(code) else (code,):
        try:
            return f"{inspect.getsourcefile(place)}:{inspect.getsourcelines(place)[1]}"
        except (TypeError, OSError):  # inherited from object, or made without a file
            continue
    return str(getattr(code, "__module__", "?"))


def check_unchanged(model: str) -> None:
    """Raises: LoadFailed, where a process imports code once and this one has: the file that `model` names, or a file beside it
    that was imported with it, says something else now.
    """
    place = model.rpartition(":")[0]
    name = _module_name(Path(place).resolve())
    for file, then in _digests.get(name, {}).items() if place.endswith(".py") and name in sys.modules else ():
        if _digest(file) != then:
            raise LoadFailed(
                f"{file}: has changed since this process imported it: restart the process, or set `isolation: process`"
            )


_digests: Final[dict[str, dict[str, str]]] = {}  # by the name of the module that was run: of its file and those beside it


def _digest(file: str) -> str:
    """Empty: there is no such file."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""


def _module_name(path: Path) -> str:
    """Two files of one name are two modules; and a class in one can be found again by its name (pickle, dataclasses).

    A module of its folder's package, from which it may import by `from .helper`; by a name that no import of a file makes.
    """
    return f"{package_of(path.parent)}.{path.stem.replace('.', '_')}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def _module_of_file(path: Path, wanted: str, behind: Sequence[Path]) -> ModuleType:
    """wanted: what it is to have, where another thread executes the file and is not waited for to its end."""
    path = path.resolve()
    if not path.is_file():
        raise LoadFailed(f"{path}: {absent(path)}")
    name = _module_name(path)
    spec = spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
    if spec is None or spec.loader is None:
        raise LoadFailed(f"{path}: not a Python file")
    here, executed = threading.get_ident(), threading.Event()
    while True:
        with _looking:
            module = sys.modules.get(name)
            if module is None:
                module = sys.modules[name] = module_from_spec(spec)
                _executing[name] = here, executed
                break
            thread, end = _executing.get(name, (here, executed))
        if thread == here or not _has_ended(thread, end, module, wanted):
            return module
    whole = False
    try:
        behind = [folder.resolve() for folder in behind]
        put_on_path(path.parent, *behind)
        serve_as(path, name, whole=False)
        before = set(sys.modules)
        spec.loader.exec_module(module)
        serve_as(path, name, whole=True)
        whole = True
    finally:
        with _looking:
            _executing.pop(name, None)
            if not whole:
                sys.modules.pop(name, None)
        executed.set()
    for imported in [sys.modules.get(each) for each in set(sys.modules) - before]:
        file = vars(imported).get("__file__") if type(imported) is ModuleType else None
        if isinstance(file, str) and any(map(Path(file).is_relative_to, (path.parent, *behind))):
            _digests[name][file] = _digest(file)
    return module


def _has_ended(thread: int, end: threading.Event, module: ModuleType, wanted: str) -> bool:
    """Wait until another thread has executed the file of a module, as long as it does not wait while we have what is wanted."""
    until_s, waits = time.monotonic() + _EXECUTED_S, 0
    while time.monotonic() < until_s and not (waits >= _LOOKS and hasattr(module, wanted)):
        if end.wait(_LOOK_S):
            return True
        waits = waits + 1 if _waits(thread) else 0
    return False


def _waits(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _WAITING


class _FromSource(SourceFileLoader):
    """Compiles what the file says now. A cache beside it holds what another of its size and time said: archives give all files
    the same time, and a digest is of the file.
    """

    def get_code(self, fullname: str) -> CodeType:
        data = self.get_data(self.path)
        _digests[fullname] = {self.path: hashlib.sha256(data).hexdigest()}
        return self.source_to_code(data, self.path)


def example_of(model: str, code: Any, names: Set[str] = frozenset()) -> Mapping[str, object] | None:
    """The attribute `example` of a class or function, else of what `model` names it in, else of the module that it is from.

    A function that makes one is called. names: of the inputs, where they and the outputs are known, so that none is needed:
    then only a dict of these is one, whatever else is called so. Raises: LoadFailed, if it is no dict.
    """
    place = model.rpartition(":")[0]
    beside = _module_name(Path(place).resolve()) if place.endswith(".py") else place
    owners = (code, sys.modules.get(beside), sys.modules.get(code.__module__))
    found = next((own for owner in owners if (own := getattr(owner, "example", None)) is not None), None)
    if names:
        return dict(found) if isinstance(found, Mapping) and found.keys() == names else None
    if inspect.isroutine(found):
        found = found()
    if found is not None and not isinstance(found, Mapping):
        raise LoadFailed(f"{model}: `example`: expected a dict of one array for each input, got {type(found).__name__}")
    return None if found is None else dict(found)
