"""What a recommendation can come to, and how each is told."""

from dataclasses import dataclass
from typing import Final, Literal

from loadtest.errors import ExitCode

RecommendationState = Literal["proven", "not proven", "no candidate", "invalid"]


@dataclass(frozen=True, slots=True)
class Signal:
    """How a state is told. word: in every output. style: of the page and the terminal. junit: the element of its test case."""

    word: str
    style: Literal["good", "open", "bad"]
    exit_code: ExitCode
    junit: Literal["", "failure", "error"]


SIGNALS: Final[dict[RecommendationState, Signal]] = {
    "proven": Signal("PROVEN", "good", ExitCode.MET, ""),
    "not proven": Signal("NOT PROVEN YET", "open", ExitCode.MISSED, "failure"),
    "no candidate": Signal("NO CANDIDATE", "bad", ExitCode.MISSED, "failure"),
    "invalid": Signal("INVALID", "bad", ExitCode.INVALID, "error"),
}
