"""How long each part of a search may take, out of its budget, and how long it must last to tell anything."""

from typing import Final

from loadtest.search.events import Question

MOST_MINUTES: Final = 24 * 60  # a budget
LEAST_SECONDS: Final = 4.0  # a shorter run tells nothing
BLOCKS, BLOCK_SLOS, BLOCK_REQUESTS = 20, 10, 200  # a decisive trial: 20 blocks of at least 10 SLOs and 200 requests
_WARMED_BLOCKS: Final = 25  # with a fifth of the run dropped as warm-up
AGREE_SECONDS, AGREE_SHARE = 60.0, 0.2  # at most, of one comparison: in all, and of what is left; a quiet machine takes a few
LONGER: Final = 2.0  # times one that was too short, the next one lasts
AGREE_MOST: Final = 0.5  # of the budget, after which nobody new is compared: who has been must still be measured
PROFILE_MOST: Final = 0.4  # of the budget, after which a group that has a profile gets no other: to prove something comes first
SCOUT_SECONDS, SCOUT_SHARE = 20.0, 0.03  # of a candidate's first short run: at most, and of the budget
_VERIFY_SHARE: Final = 0.05  # of the budget, for each of the two runs that check the winner


def decisive_seconds(limit_ms: float, rps: float) -> float:
    """How long a trial must last before it can pass."""
    return _WARMED_BLOCKS * max(BLOCK_SLOS * limit_ms / 1e3, BLOCK_REQUESTS / rps)


def agree_seconds(left_s: float, short_s: float = 0.0) -> float:
    """How long one comparison of answers may take, with so much of the budget left. short_s: so much was too short for it."""
    return min(max(AGREE_SECONDS, LONGER * short_s), max(LEAST_SECONDS, AGREE_SHARE * left_s))


def profile_seconds(question: Question, profiles: int) -> float:
    """Of each of so many profiles: together a tenth of the budget. Beyond 30 s a profile gets no better."""
    return min(30.0, max(2.0, question.seconds / 10 / max(1, profiles)))


def scout_seconds(question: Question) -> float:
    """Of a candidate's first short run."""
    return min(SCOUT_SECONDS, max(LEAST_SECONDS, SCOUT_SHARE * question.seconds))


def verify_seconds(question: Question) -> float:
    """Of each of the two runs that check the winner."""
    return max(LEAST_SECONDS, min(20.0, _VERIFY_SHARE * question.seconds))
