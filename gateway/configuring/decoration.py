"""`@gateway.model`: says beside the code of a class or function that it is a model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar, overload

from backends.base import LoadFailed
from backends.python import called_as
from gateway.errors import ConfigError

_Code = TypeVar("_Code", bound=Callable[..., Any])

_MARK: Final = "__serving__"


@dataclass(frozen=True, slots=True)
class Mark:
    """What was said. name, max_rows: as of a model in a configuration; None: what `gateway serve` finds."""

    name: str | None = None
    max_rows: int | None = None


@overload
def model(code: _Code, /) -> _Code: ...


@overload
def model(*, name: str | None = None, max_rows: int | None = None) -> Callable[[_Code], _Code]: ...


def model(code: Any = None, /, *, name: str | None = None, max_rows: int | None = None) -> Any:
    """Mark a class with `predict`, or a function, as a model; it is given back as it was, to be called and tested as before.

    `gateway serve FILE.py` then needs no name, and `gateway.load` and `gateway.run` take the class or function itself. Its
    inputs and outputs are its type hints: docs/models.md. name: of the model, instead of the file's or the function's.
    max_rows: the most rows of one call; 0: no batches. Raises: ConfigError, for hints that contradict each other.
    """
    if code is None:
        return lambda decorated: _marked(decorated, Mark(name, max_rows))
    return _marked(code, Mark())


def mark_of(code: object) -> Mark:
    """Of its own, not of a class that it inherits from."""
    found: Mark = getattr(code, "__dict__", {}).get(_MARK, Mark())
    return found


def _marked(code: Any, mark: Mark) -> Any:
    place = f"{getattr(code, '__module__', '?')}:{getattr(code, '__qualname__', code)}"
    try:
        called_as(place, code)
        setattr(code, _MARK, mark)
    except LoadFailed as exc:
        raise ConfigError(f"@gateway.model: {exc}") from exc
    except AttributeError as exc:
        raise ConfigError(f"@gateway.model: {place}: expected a class or function, got {type(code).__name__}") from exc
    return code
