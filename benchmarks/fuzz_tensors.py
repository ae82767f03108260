"""Many requests through the decoders of tensors: REST's JSON and bytes, generate, and gRPC's messages.

    python -m benchmarks.fuzz_tensors --cases 100000

Requests are well-formed, mutated or random, each from its seed, which a failure names: `tests/protocols/fuzzing.py` says what
must hold. Memory must stay flat: exit status 1 if it grows by more than 10 MB in the second half of the cases.
"""

import sys

from benchmarks.fuzzing import fuzz
from tests.protocols.fuzzing import check

if __name__ == "__main__":
    sys.exit(fuzz(str(__doc__), check))
