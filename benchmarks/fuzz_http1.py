"""Many HTTP/1.1 streams through the connection without I/O: read alike however they are cut, answered in order, bounded.

    python -m benchmarks.fuzz_http1 --cases 100000

Streams are well-formed, mutated or random, each from its seed, which a failure names: `tests/wire/fuzzing.py` says what must
hold. Memory must stay flat: exit status 1 if it grows by more than 10 MB in the second half of the cases.
"""

import sys

from benchmarks.fuzzing import fuzz
from tests.wire.fuzzing import check_conversation, check_reading


def check(seed: int) -> None:
    (check_conversation if seed % 2 else check_reading)(seed)


if __name__ == "__main__":
    sys.exit(fuzz(str(__doc__), check))
