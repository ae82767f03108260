"""Calls of a platform's API as plain data: what is asked of whom, in which order, why, and what takes it back."""

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Final

from gateway.deploying.contents import as_yaml

ANY: Final = "*"  # other answer
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class FromFile:
    """A parameter that is sent from a file."""

    path: Path
    bytes: int

    def __str__(self) -> str:
        return f"the file {self.path.name}, {self.bytes / _MIB:.1f} MiB"


@dataclass(frozen=True, slots=True)
class Answered:
    """A parameter that an earlier call of the plan answers. call: as `Call.named`. path: keys and positions in its answer."""

    call: str
    path: tuple[str | int, ...]

    def __str__(self) -> str:
        return f"<{'.'.join(map(str, self.path))} of {self.call}>"


@dataclass(frozen=True, slots=True)
class Until:
    """A question that is asked again until its answer says one of `done`. failed: answers that end it otherwise.

    key: where the state stands in the answer, keys and positions with dots between. done: none: until what is asked for is not
    there any more. reason: where the answer says why it failed. look: where else to look then. within: the state is a text
    that only has one of them in it. most_s: how long it is asked.
    leave: what was made before is not taken back when this fails, as it may be in use; keep: nor once this has succeeded.
    """

    key: str
    done: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    reason: str = "FailureReason"
    _: KW_ONLY
    look: str = ""
    within: bool = False
    most_s: float = 3600.0
    leave: bool = False
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """service, operation, parameters: as boto3 names them. why: what for, as a sentence in the imperative.

    until: it is a question, asked again and again. undo: what takes it back, in this order; none: nothing does.
    already: what the platform answers where all that it makes is there, just so: then nothing was made, and all is well.
    again: what it answers while it does not know yet what was made, or undone, a moment ago.
    sought: where its answer was lost, and `undo` needs that: the question that finds what it has made, and where in the answer
    to it the lost one stands.
    restores: what takes it back puts there what was there before: also where it is not known whether the call did anything.
    told: the questions behind it tell whether it was done: they do where its answer was lost, and where it is said to be under
    way, as of a call that the client has repeated.
    as_of: what of its parameters holds when it is made; it gives None where there is nothing to do any more.
    alone: nothing needs it: the calls behind it are made also where it fails.
    label: tells it from others of its operation whose answers are needed too.
    """

    service: str
    operation: str
    parameters: Mapping[str, Any]
    why: str
    _: KW_ONLY
    until: Until | None = None
    undo: "tuple[Call, ...]" = ()
    already: str = ""
    again: tuple[str, ...] = ()
    sought: "tuple[Call, tuple[str | int, ...]] | None" = None
    restores: bool = False
    told: bool = False
    as_of: Callable[[Mapping[str, Any], datetime.datetime], Mapping[str, Any] | None] | None = None
    alone: bool = False
    label: str = ""

    @property
    def named(self) -> str:
        return f"{self.service}.{self.operation}{self.label and f' {self.label}'}"


def found_at(answer: Any, path: Sequence[str | int]) -> Any:
    """What stands at keys and positions of an answer; None, if nothing does."""
    for part in path:
        try:
            answer = answer[int(part) if isinstance(answer, list) else part]
        except (KeyError, IndexError, TypeError):
            return None
    return answer


def with_answers(value: Any, answers: Mapping[str, Any]) -> Any:
    """Parameters, with what earlier calls have answered in its place. answers: by `Call.named`."""
    if isinstance(value, Mapping):
        return {key: with_answers(part, answers) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [with_answers(part, answers) for part in value]
    return found_at(answers.get(value.call), value.path) if isinstance(value, Answered) else value


def as_text(calls: Sequence[Call]) -> str:
    """A document in YAML: a list of calls, each with what it is for."""
    return "\n".join(_text(number, call) for number, call in enumerate(calls, 1))


def _text(number: int, call: Call) -> str:
    again = ""
    if call.until is not None:
        states = " or ".join(call.until.done)
        verb = "has" if call.until.within else "is"
        again = f": ask until {f'{call.until.key} {verb} {states}' if states else 'it is not there any more'}"
    return f"# {number}. {call.why}{again}.\n{as_yaml([{call.named: _plain(call.parameters)}])}"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, FromFile | Answered) else value
