"""What is told of a run while it goes on."""

import numpy as np
import pytest

from loadtest.load.patterns import Schedule
from loadtest.load.request_log import OK, PENDING, REFUSED, RESET, RequestLog
from loadtest.measuring.progress import Follower

S = 10**9


def followed(status: dict[int, int], *looks_s: float) -> list[float]:
    """How long nobody was there by each look, of ten requests per second that end at once, but for those that are PENDING."""
    intended = np.arange(200, dtype=np.int64) * S // 10
    log = RequestLog(len(intended))
    follower = Follower(log, Schedule(intended, 20 * S, (), True), 1)
    told = []
    for look_s in looks_s:
        for row in range(round(look_s * 10)):
            log.intended[row] = log.dispatched[row] = log.sent[row] = log.done[row] = intended[row]
            log.status[row] = status.get(row, OK)
        told.append(follower.look(round(look_s * S)).gone_s)
    return told


def test_it_is_told_how_long_every_request_found_nobody() -> None:
    gone = {row: RESET if row < 60 else REFUSED for row in range(50, 200)}
    assert followed(gone, 5, 5.5, 6.5, 10.1) == pytest.approx([0, 0.4, 1.4, 5.0])
    assert followed(gone, 10.1) == pytest.approx([5.0])
    assert followed(gone | {51: PENDING}, 5.5, 10.1) == pytest.approx([0.4, 5.0])  # one that waits tells nothing


def test_a_request_that_finds_somebody_ends_it() -> None:
    gone = dict.fromkeys(range(50, 200), REFUSED)
    assert followed(gone | {90: OK}, 9.0, 9.1, 9.2, 12.0) == pytest.approx([3.9, 0, 0, 2.8])
    assert followed(gone | {90: 503}, 9.0, 12.0) == pytest.approx([3.9, 2.8])
    assert followed(gone | {51: OK}, 9.0) == pytest.approx([3.7])
