"""Code that a configuration names: is it there, can it be imported, does it take its options, and have those tensors."""

import ast
import contextlib
import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import backends.python
from backends import sagemaker
from backends.base import BackendError, TensorSpec, words_of
from backends.check_tensors import unlike
from backends.datatypes import NUMPY
from backends.mistakes import Mistake, Place, Wanted
from backends.near_file import near_file
from backends.not_known import NOT_KNOWN, NotKnown, as_far_as_known
from backends.regular_file import absent, file_bytes
from backends.signatures import Signature
from backends.source import is_source, load_object, misfits

_IMPORTABLE: Final = "what it imports must be installed, and work, here"
CLASS: Final = "a class or function"
FACTORY: Final = "a factory of an nn.Module"


def python_code(wanted: Wanted) -> Iterator[Mistake]:
    code: list[Any] = []
    yield from named_code(wanted, ("model",), wanted.model, CLASS, loaded=code.append)
    if code:
        yield from as_far_as_known(_of_object(wanted, code[0]))


def _of_object(wanted: Wanted, code: Any) -> Iterator[Mistake]:
    yield from as_far_as_known(_python_options(wanted, code))
    stated = [mistake for key, tensors in wanted.tensors for mistake in as_far_as_known(_stated(key, tensors, code))]
    yield from stated
    if stated:
        return
    try:
        listed = (tensor.name for key, tensors in wanted.tensors if key == "inputs" for tensor in tensors)
        known = as_far_as_known(name for name in listed if name is not NOT_KNOWN)
        signature = backends.python.called_as(wanted.model, code, known)
    except BackendError as exc:
        yield _of_code(wanted, exc)
        return
    for key, tensors in wanted.tensors:
        yield from as_far_as_known(
            _denied(wanted, signature, key, tensors), _told_nowhere(wanted, signature, key, tensors, code)
        )


def _python_options(wanted: Wanted, code: Any) -> Iterator[Mistake]:
    options = wanted.options["class_options"]
    if inspect.isclass(code):
        yield from _misfits(code, options, ("class_options",))
    elif options:
        yield Mistake(("class_options",), "only a class takes options, this is a function", remedy="remove them")


def _told_nowhere(
    wanted: Wanted, signature: Signature, key: str, declared: tuple[TensorSpec, ...], code: Any
) -> Iterator[Mistake]:
    """Tensors that nothing says, and inputs that the code does not take."""
    try:
        tensors = backends.python.tensors_of(wanted.model, key, declared, code, signature, wanted.max_rows)
        if key == "inputs":
            backends.python.check_parameters(wanted.model, signature, tensors)
        else:
            backends.python.check_keys(wanted.model, signature, tensors)
    except BackendError as exc:
        yield _of_code(wanted, exc)


def _of_code(wanted: Wanted, exc: BackendError) -> Mistake:
    found = str(exc).removeprefix(f"{wanted.model}: ")
    return Mistake(("model",), found, remedy="correct the code, or what is said of it here")


def _denied(wanted: Wanted, signature: Signature, key: str, ours: tuple[TensorSpec, ...]) -> Iterator[Mistake]:
    """What is declared, and type hints say otherwise."""
    for index, tensor in enumerate(ours):
        with contextlib.suppress(NotKnown):
            for theirs in filter(None, backends.python.said_of(signature, key, (tensor,))):
                yield from unlike(key, index, tensor, theirs, wanted.max_rows, "code")


def _stated(key: str, declared: tuple[TensorSpec, ...], code: Any) -> Iterator[Mistake]:
    """What a class says of its tensors, where nothing is declared."""
    stated = getattr(code, key, None)
    if declared or not stated:
        return
    for entry in stated if isinstance(stated, list | tuple) else [stated]:
        try:
            name, datatype, shape, *_ = entry
            fits = isinstance(name, str) and datatype in NUMPY and all(isinstance(size, int) for size in shape)
        except (TypeError, ValueError):
            fits = False
        if not fits:
            expected = f"(name, datatype, shape) in `{key}` of the class, the datatype one of {', '.join(NUMPY)}"
            yield Mistake(("model",), f"its `{key}` have {entry!r}", expected, "correct the class")


def named_code(
    wanted: Wanted,
    at: Place,
    source: str,
    what: str,
    options_at: Place = (),
    loaded: Callable[[Any], object] = lambda _: None,
    *,
    static: bool = False,
) -> Iterator[Mistake]:
    """Of `module:name` or `path/to/file.py:name`.

    options_at: where the options stand that it is called with; empty: they are not looked at. loaded: gets the object, if it is
    imported. static: it never is.
    """
    name_of = "Class" if what == CLASS else "factory"
    place, _, name = source.rpartition(":")
    if not is_source(source):
        if source.endswith(".py") and not Path(source).is_file():
            remedy = near_file(Path(source).absolute())
            yield Mistake(at, f"{absent(source)} ({Path(source).absolute()})", remedy=remedy)
        remedy = (
            f"add `:{offered(Path(source), what) or name_of}`" if source.endswith(".py") else "name the code, or another kind"
        )
        yield Mistake(at, f"does not name {what}", f"path/to/file.py:{name_of} or module:{name_of}", remedy)
        return
    file: Path | None
    if place.endswith(".py"):
        file = Path(place).absolute()
        if not file.is_file():
            yield Mistake(at, f"{absent(file)} ({file})", remedy=near_file(file))
            return
    else:
        # To find what is in a package, the package is imported: a first look is for the package itself.
        looked = place if wanted.thorough else place.partition(".")[0]
        try:
            found = importlib.util.find_spec(looked)
        except KeyboardInterrupt:
            raise
        except BaseException as exc:  # of the package's own code, unless it is the module that is not found
            not_there = isinstance(exc, ModuleNotFoundError) and f"{looked}.".startswith(f"{exc.name}.")
            if looked and not looked.startswith(".") and not not_there:
                package = looked.rpartition(".")[0] or looked
                yield Mistake(at, f"{package!r} cannot be imported: {words_of(exc)}", remedy=_IMPORTABLE)
                return
            found = None
        if found is None:
            remedy = f"install it in {sys.prefix}, or name the file: path/to/{place.rpartition('.')[2]}.py:{name}"
            yield Mistake(at, f"there is no module {place!r}", remedy=remedy)
            return
        file = Path(found.origin) if looked == place and found.origin and found.origin.endswith(".py") else None
    if file is not None:
        try:
            known = _names_in(file)
        except (SyntaxError, ValueError) as exc:
            line = f":{exc.lineno}" if isinstance(exc, SyntaxError) else ""
            yield Mistake(at, f"not Python: {getattr(exc, 'msg', exc)} ({file}{line})", remedy="correct that line")
            return
        if known and name not in known and not source.endswith(sagemaker.CLASS):
            near = difflib.get_close_matches(name, known, n=1)
            others = [each for each, is_class in known.items() if is_class == (what == CLASS)]
            hint = f"did you mean `{near[0]}`?" if near else f"it has {', '.join(others)}" if others else f"write {what} there"
            yield Mistake(at, f"{file} has no {name!r}", remedy=hint)
            return
    if not wanted.thorough or static:
        return
    try:
        code = backends.python.load_code(source) if what == CLASS else load_object(source)
    except BackendError as exc:
        yield Mistake(at, str(exc).removeprefix(f"{source!r}: "), remedy=_IMPORTABLE)
        return
    if not callable(code):
        yield Mistake(at, f"{name!r} is a {type(code).__name__}", expected=what, remedy="name another")
        return
    loaded(code)
    if options_at:
        options: Any = wanted.options
        for key in options_at:
            options = options[key]
        yield from _misfits(code, options, options_at)


def _misfits(code: Callable[..., Any], options: Mapping[str, Any], at: Place) -> Iterator[Mistake]:
    for misfit in misfits(code, options, key=str(at[-1])):
        yield Mistake((*at, misfit.option) if misfit.option else at, misfit.found, remedy=misfit.remedy)


def offered(file: Path, what: str) -> str:
    """The first class or function that a file defines at its top for others; of the two what is wanted, if there is any."""
    try:
        tree = ast.parse(file_bytes(file))
    except (OSError, SyntaxError, ValueError):  # told once it is named
        return ""
    defined = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")]
    wanted = [node for node in defined if isinstance(node, ast.ClassDef) == (what == CLASS)]
    return next((node.name for node in wanted or defined), "")


def _names_in(file: Path) -> dict[str, bool]:
    """The names that a file binds at its top, and whether each is a class; empty if only running it would tell.

    Raises: SyntaxError; ValueError, for what is no text.
    """
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except OSError:
        return {}
    found: dict[str, bool] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            return {}
        if isinstance(node, ast.ImportFrom | ast.Import):
            found |= {(alias.asname or alias.name).partition(".")[0]: False for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.setdefault(node.id, False)
    for node in ast.walk(tree):  # within `if` and `try` as well
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = isinstance(node, ast.ClassDef)
    return {} if "__getattr__" in found or "globals" in {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} else found
