"""The id by which a client and the log speak of one request: the header `x-request-id`, over HTTP as over gRPC.

The client's own is kept, if it can stand in a header and a log as it is. Else one is made when it is asked for: some digits
that no other process has, and a number.
"""

import itertools
import os
import re
from typing import Final

NAME: Final = b"x-request-id"

MADE: Final = os.urandom(5).hex().encode() + b"-%x"
"""What one that is made looks like: to be formatted with the next of the `numbers`."""
numbers: Final = itertools.count(1)

OTHER_EACH_TIME: Final = frozenset(
    (
        NAME, b"traceparent", b"tracestate", b"x-correlation-id", b"x-amzn-trace-id", b"b3", b"x-b3-traceid", b"x-b3-spanid",
        b"x-b3-parentspanid", b"x-cloud-trace-context", b"x-datadog-trace-id", b"x-datadog-parent-id", b"x-datadog-tags",
    )
)  # fmt: skip
"""Headers in which proxies and clients that are traced tell each request's ids, mostly of one length.

They are those of W3C, Envoy, AWS, Zipkin, Google and Datadog.
"""

_SANE: Final = re.compile(rb"[!-~]{1,128}")


def request_id(given: bytes | None) -> bytes:
    """given: by the client; None: it gave none. Another call makes another one."""
    if given is not None and _SANE.fullmatch(given) is not None:
        return given
    return MADE % next(numbers)
