"""Many HTTP/1.1 streams through the connection without I/O: read alike however they are cut, answered in order, bounded.

    python -m benchmarks.fuzz_http1 --cases 100000

Streams are well-formed, mutated or random, each from its seed, which a failure names: `tests/wire/fuzzing.py` says what must
hold. Memory must stay flat: exit status 1 if resident memory grows by more than --most-mb behind the tenth part of the cases.
"""

import argparse
import itertools
import logging
import sys
import time

import psutil

from tests.wire.fuzzing import check_conversation, check_reading


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--most-mb", type=float, default=10.0)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    process = psutil.Process()
    began_s, began_mb = time.monotonic(), 0.0
    for number, check in zip(range(arguments.cases), itertools.cycle((check_reading, check_conversation)), strict=False):
        if number == arguments.cases // 10:
            began_mb = process.memory_info().rss / 1e6
        check(arguments.first + number)
    grown_mb = process.memory_info().rss / 1e6 - began_mb
    seconds = time.monotonic() - began_s
    print(f"{arguments.cases} cases in {seconds:.0f} s, none failed; {began_mb:.1f} MB, grown by {grown_mb:.1f} MB")
    return int(grown_mb > arguments.most_mb)


if __name__ == "__main__":
    sys.exit(main())
