"""What is wrong in a file that somebody wrote: where, what stands there, what was expected, and how to mend it."""

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

from gateway.errors import ConfigError

Location = tuple[str | int, ...]
"""The keys and numbers of items that lead to a place in a document."""

_SHOWN_CHARS: Final = 60


@dataclass(frozen=True, slots=True)
class Fault:
    """One mistake.

    source: the file, as the user called it. line, column: from 1; None: not known.
    path: as `path_of` writes it; empty: the whole file. value: what stands there, as `shown`; empty: nothing, or too much.
    found: what is wrong, where value and expected do not say it. expected, remedy: empty where they would say nothing new.
    """

    source: str
    path: str = ""
    value: str = ""
    found: str = ""
    expected: str = ""
    remedy: str = ""
    line: int | None = None
    _: KW_ONLY
    column: int | None = None

    def __str__(self) -> str:
        where = ":".join(str(part) for part in (self.source, self.line, self.column) if part is not None)
        expected = f"expected {self.expected}" if self.expected else ""
        what = "; ".join(filter(None, (", ".join(filter(None, (self.found, expected))), self.remedy)))
        return ": ".join(filter(None, (where, self.path, self.value, what)))


class ConfigFaults(ConfigError):
    """All faults of a file. message: one line for each."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(dict.fromkeys(faults))
        text = "\n".join(map(str, self.faults))
        super().__init__(text)
        # Not cut, as what is sent to clients is: it is for the one who wrote the file.
        self.message = text.encode(errors="replace").decode()

    def __reduce__(self) -> tuple[type["ConfigFaults"], tuple[tuple[Fault, ...]]]:
        return ConfigFaults, (self.faults,)  # so that it survives pickling between Ray processes


class Unfit(ValueError):
    """What a validator of ours refuses. at: the place, below the one the validator stands at. The rest as in `Fault`.

    fits_in_quotes: of a value that is no text, whether what is written there would do in quotes; None: it is not the quotes.
    """

    def __init__(
        self,
        found: str = "",
        *,
        expected: str = "",
        remedy: str = "",
        at: Location = (),
        fits_in_quotes: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__(found or expected)
        self.found = found
        self.expected = expected
        self.remedy = remedy
        self.at = at
        self.fits_in_quotes = fits_in_quotes


class Refused(ValueError):
    """Several of these at once."""

    def __init__(self, unfit: Iterable[Unfit]) -> None:
        self.unfit = tuple(unfit)
        super().__init__("; ".join(map(str, self.unfit)))


def path_of(location: Location) -> str:
    """models[0].backends[1].model"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def shown(value: Any) -> str:
    """A value as it would stand in a file, cut where it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float) and not math.isfinite(value):
        return f".{value}".replace(".-", "-.")
    return cut(repr(value))


def cut(text: str) -> str:
    """A text as a message shows it."""
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def nearest(word: object, known: Iterable[str]) -> str:
    """The known word that was probably meant, whatever its case; empty: none is near."""
    by_lower = {name.lower(): name for name in known}
    wanted = str(word).lower()
    near = difflib.get_close_matches(wanted, by_lower, n=1)
    begun = [name for name in by_lower if name.startswith(wanted)] if len(wanted) > 2 else []
    found = near or (begun if len(begun) == 1 else [])
    return by_lower[found[0]] if found else ""


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """A remedy; empty: none is near."""
    near = nearest(word, known)
    return f"did you mean `{near}`?" if near else ""
