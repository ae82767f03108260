"""Which batches a session with `cuda_graphs` records: few enough that all of them are recorded before traffic."""

from typing import Final

MOST_GRAPHS: Final = 128
"""A session's; batch shapes beyond run unrecorded."""


def recorded_rows(max_rows: int) -> tuple[int, ...]:
    """The sizes that batches are padded to, ascending up to max_rows: powers of two, and from 16 on the middles between them.

    Empty where max_rows is 0. A row of padding costs what a row costs, and a batch that is not recorded a launch per kernel.
    """
    sizes, size = [], 1
    while size < max_rows:
        sizes.append(size)
        if size >= 16 and size * 3 // 2 < max_rows:
            sizes.append(size * 3 // 2)
        size *= 2
    return (*sizes, max_rows) if max_rows else ()
