"""Which requests of a lane may share a batch: those of one group, which wait in one queue."""

from collections.abc import Hashable, Sequence
from typing import Final

from gateway.batching.batch import bucket_of, ragged_length
from gateway.batching.queue import LengthGroup
from gateway.config import Ragged
from gateway.types import InferRequest

_LENGTHS: Final = tuple(sorted({round(8 * 2 ** (step / 6)) for step in range(139)}))
"""Bucket edges for models that take any length, up to texts of 64 MiB. A batch wastes a tenth at most; whether it may waste
more, the policy says."""
FURTHER_LENGTH: Final = 64
"""That nearly all models take."""
_FURTHER_ROWS: Final = 16  # of it, at most: the largest batch may take seconds


def further_rows(ragged: Ragged | None, sizes: Sequence[int], slo_ns: int | None) -> tuple[int, ...]:
    """Of the runs of `FURTHER_LENGTH` before traffic, which tell what a length costs where no buckets say which ones come.

    Without them, hundreds of requests are served by what the shortest length takes: many too late, where anything is promised.
    sizes: of batches, ascending.
    """
    if ragged is None or ragged.buckets or slo_ns is None:
        return ()
    return tuple(dict.fromkeys((*sizes[:2], max([rows for rows in sizes if rows <= _FURTHER_ROWS], default=sizes[0]))))


class Groups:
    """Alike in shape; and where it is wanted, also in length, up to a bucket."""

    __slots__ = ("_ragged", "by_length")

    def __init__(self, ragged: Ragged | None, *, by_length: bool) -> None:
        """ragged: None, for a model whose requests have no length."""
        self._ragged = ragged
        self.by_length = by_length and ragged is not None

    @property
    def lengths(self) -> tuple[int, ...]:
        """The buckets by their upper edges. Beyond the last, each length that comes is one of its own."""
        return (self._ragged.buckets if self._ragged is not None else ()) or _LENGTHS

    def of(self, request: InferRequest) -> Hashable:
        if not self.by_length:
            return request.shape_key
        return LengthGroup(request.shape_key, bucket_of(ragged_length(request, self._ragged), self.lengths))
