"""What the fuzzers have in common: cases by their seeds, and memory that must stay flat."""

import argparse
import gc
import logging
import sys
import time
from collections.abc import Callable
from typing import Final

import psutil

MOST_MB: Final = 10.0  # that resident memory may grow by in the second half of the cases


def fuzz(description: str, check: Callable[[int], None]) -> int:
    """Check as many cases as the command line says. check: gets a seed; raises what is wrong. Returns the exit status."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    process = psutil.Process()
    began_s, middle_mb = time.monotonic(), 0.0
    for number in range(arguments.cases):
        if number == arguments.cases // 2:
            gc.collect()
            middle_mb = process.memory_info().rss / 1e6
            print(f"{number} cases, {time.monotonic() - began_s:.0f} s, {middle_mb:.1f} MB", flush=True)
        try:
            check(arguments.first + number)
        except BaseException:
            print(f"the case of seed {arguments.first + number}", file=sys.stderr)
            raise
    gc.collect()
    grown_mb = process.memory_info().rss / 1e6 - middle_mb
    seconds = time.monotonic() - began_s
    print(f"{arguments.cases} cases in {seconds:.0f} s: nothing undeclared raised; grown by {grown_mb:.1f} MB since the middle")
    return int(grown_mb > MOST_MB)
