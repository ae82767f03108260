"""Which lane a request goes to: the cheapest that can run it."""

from collections.abc import Sequence

from gateway.lane import Lane


def choose(lanes: Sequence[Lane]) -> Lane:
    """The first available of a model's lanes, which are in order of price; the first, if none is: its error says why."""
    for lane in lanes:
        if lane.available:
            return lane
    return lanes[0]
