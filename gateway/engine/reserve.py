"""What answering takes of an SLO, after the batch."""

from typing import Final

from gateway.batching.queue import MOST_WEIGHT

_SHARE: Final = 0.2  # of the SLO, at most
_SMOOTHING: Final = 1 / 16


class Reserve:
    """How much of the SLO is set aside for answering: learned of the first answer of each batch, at most a fifth.

    Only the first, the one with the least time left: each further one takes less to answer than it arrived later, or the
    process could not keep up with the arrivals at all. Set aside are mean and two deviations, as TCP bounds a round trip
    (RFC 6298, with four).

    Places in line are by the SLO less this, times the weight of the class. Were it to rise faster than time passes, who comes
    later would be first: so it does not. By that sequences, whose requests a client sends ahead, keep their order.
    """

    __slots__ = ("_deviation_ns", "_front_ns", "_learned_ns", "_mean_ns", "most_ns")

    def __init__(self, slo_ns: int | None) -> None:
        """slo_ns: None or 0: nothing is promised, and nothing is set aside."""
        self.most_ns = _SHARE * (slo_ns or 0)
        self._mean_ns = self._deviation_ns = 0.0
        self._learned_ns = 0
        self._front_ns = 0  # the latest of all: arrival, less what was set aside times the most that a class multiplies it by

    def learn(self, took_ns: int) -> None:
        """Of a batch: how long after its return its first answer was written."""
        most_ns = self.most_ns
        off_ns = (took_ns if took_ns < most_ns else most_ns) - self._mean_ns
        self._mean_ns += _SMOOTHING * off_ns
        self._deviation_ns += _SMOOTHING * (abs(off_ns) - self._deviation_ns)
        self._learned_ns = round(min(self._mean_ns + 2 * self._deviation_ns, most_ns))

    def take_ns(self, arrival_ns: int) -> int:
        """Of the SLO of a request that comes: no place in line is by this before that of one of its class that came earlier."""
        reserved_ns = self._learned_ns
        if (most_ns := (arrival_ns - self._front_ns) // MOST_WEIGHT) < reserved_ns:
            reserved_ns = most_ns if most_ns > 0 else 0
        if (front_ns := arrival_ns - MOST_WEIGHT * reserved_ns) > self._front_ns:
            self._front_ns = front_ns
        return reserved_ns
