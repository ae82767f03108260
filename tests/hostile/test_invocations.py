"""What clients can do to others by SageMaker's /invocations, with bodies as long as SageMaker lets them be."""

import base64
import contextlib
import http.client
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.hostile.bench import Address, Bench, attacked
from tests.hostile.test_rest import MIB, filled
from tests.npy import npy

pytestmark = pytest.mark.slow

BODY_BYTES = 25 * MIB  # SageMaker's limit
JSON, CSV, TEXT, NPY, RAW = "application/json", "text/csv", "text/plain", "application/x-npy", "application/octet-stream"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with attacked(tmp_path_factory.mktemp("hostile")) as bench:
        yield bench


def invoke(address: Address, model: str, media: str, body: bytes, accept: str) -> int:
    """The status of the answer."""
    headers = {"X-Amzn-SageMaker-Target-Model": model, "Content-Type": media, "Accept": accept}
    with contextlib.closing(http.client.HTTPConnection(*address, timeout=60)) as connection:
        connection.request("POST", "/invocations", body, headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status


def long(begin: bytes, element: bytes, end: bytes) -> bytes:
    return filled(begin, element, end, BODY_BYTES)


ROW = b"[" + b",".join([b"0.5"] * 1024) + b"]"
FLOATS = BODY_BYTES // 4

# What is sent, and in which form its answer is asked for.
BODIES: dict[str, tuple[str, str, Callable[[], bytes], str]] = {
    "rows": ("wide", JSON, lambda: long(b'{"instances":[', ROW, b"]}"), NPY),
    "rows of one": ("wide", JSON, lambda: long(b'{"instances":[', b"[1]", b"]}"), JSON),
    "rows of objects": ("pair", JSON, lambda: long(b'{"instances":[', b'{"A":[1],"B":[2]}', b"]}"), JSON),
    "columns": ("wide", JSON, lambda: long(b'{"inputs":[', ROW, b"]}"), JSON),
    "NaN": ("wide", JSON, lambda: long(b'{"instances":[[', b"NaN", b"]]}"), JSON),
    "depth": ("wide", JSON, lambda: b'{"instances":' + b"[" * BODY_BYTES, JSON),
    "texts": ("text", JSON, lambda: long(b'{"instances":[', b'["a text of some length"]', b"]}"), JSON),
    "b64": ("image", JSON, lambda: b'{"instances":[[{"b64":"%b"}]]}' % base64.b64encode(bytes(BODY_BYTES * 3 // 4)), JSON),
    "much b64": ("image", JSON, lambda: long(b'{"instances":[', b'[{"b64":"AAECAwQFBgcICQoL"}]', b"]}"), JSON),
    "CSV": ("wide", CSV, lambda: (b",".join([b"0.5"] * 1024) + b"\n") * (BODY_BYTES // 4096), CSV),
    "CSV of one column": ("wide", CSV, lambda: b"1\n" * (BODY_BYTES // 2), CSV),
    "CSV of one line": ("wide", CSV, lambda: b"1," * (BODY_BYTES // 2) + b"1", CSV),
    "CSV of texts": ("text", CSV, lambda: b'"a ""text"""\n' * (BODY_BYTES // 13), CSV),
    "CSV that never ends": ("wide", CSV, lambda: b'"' + b"1," * (BODY_BYTES // 2), CSV),
    "one text": ("text", TEXT, lambda: b"text " * (BODY_BYTES // 5), JSON),
    "one image": ("image", "image/png", lambda: bytes(BODY_BYTES), JSON),
    "one image, raw": ("image", "image/png", lambda: bytes(BODY_BYTES), RAW),
    "raw": ("wide", RAW, lambda: bytes(BODY_BYTES), RAW),
    "npy": ("wide", NPY, lambda: npy(np.zeros((1024, FLOATS // 1024), np.float32)), NPY),
    "npy to JSON": ("wide", NPY, lambda: npy(np.zeros((1024, FLOATS // 1024), np.float32)), JSON),
    "npy to JSON of one column": ("wide", NPY, lambda: npy(np.zeros((FLOATS, 1), np.float32)), JSON),
    "npy to CSV": ("wide", NPY, lambda: npy(np.zeros((1024, FLOATS // 1024), np.float32)), CSV),
    "npy to CSV of one column": ("wide", NPY, lambda: npy(np.zeros((FLOATS, 1), np.float32)), CSV),
    "npy to events": ("wide", NPY, lambda: npy(np.zeros((1024, FLOATS // 1024), np.float32)), "text/event-stream"),
    "npy of wide integers": ("wide", NPY, lambda: npy(np.zeros((1024, FLOATS // 2048), np.int64)), RAW),
    "npy by column": ("wide", NPY, lambda: npy(np.zeros((FLOATS // 1024, 1024), np.float32).T), NPY),
    "npy of bytes": ("wide", NPY, lambda: npy(np.zeros((1024, FLOATS // 256), np.int8)), NPY),
    "npy of texts": ("text", NPY, lambda: npy(np.full((BODY_BYTES // 32, 1), b"a" * 32)), JSON),
    "npy of too many texts": ("text", NPY, lambda: npy(np.full((BODY_BYTES, 1), b"a")), JSON),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_a_long_body_to_invocations(bench: Bench, name: str) -> None:
    model, media, made, accept = BODIES[name]
    body = made()

    def attack(http: Address, grpc: Address) -> None:
        assert invoke(http, model, media, body, accept) in (200, 400, 413)

    bench.withstands(attack)
