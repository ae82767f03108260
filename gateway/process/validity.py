"""From when until when certificates are valid. Python tells it only of a certificate that its peer has shown."""

import base64
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final, NamedTuple

_PEM: Final = re.compile(rb"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----(.+?)-----END", re.DOTALL)
_VERSION: Final = 0xA0
_BEFORE_VALIDITY: Final = ("serial number", "signature's algorithm", "issuer")
_UTC_TIME: Final = 0x17  # with a year of two digits


class Validity(NamedTuple):
    """Of one certificate."""

    begins: datetime
    ends: datetime


def validities(pem: bytes) -> Iterator[Validity]:
    """Of the certificates in a text, in their order. Raises: ValueError, IndexError, for what is none."""
    return (_validity(base64.b64decode(found[1])) for found in _PEM.finditer(pem))


def _validity(certificate: bytes) -> Validity:
    """RFC 5280, section 4.1."""
    _, at, _ = _element(certificate, 0)
    _, at, _ = _element(certificate, at)
    if certificate[at] == _VERSION:
        at = _element(certificate, at)[2]
    for _ in _BEFORE_VALIDITY:
        at = _element(certificate, at)[2]
    _, at, _ = _element(certificate, at)
    begins, at = _moment(certificate, at)
    ends, _ = _moment(certificate, at)
    return Validity(begins, ends)


def _moment(data: bytes, at: int) -> tuple[datetime, int]:
    """With where it ends. RFC 5280, section 4.1.2.5."""
    kind, begins, ends = _element(data, at)
    text = data[begins:ends].decode("ascii")
    if kind == _UTC_TIME:
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC), ends


def _element(data: bytes, at: int) -> tuple[int, int, int]:
    """An element of DER: its kind, and where its content begins and ends. ITU-T X.690, section 8.1."""
    kind, size, at = data[at], data[at + 1], at + 2
    if size & 0x80:
        of_size = size & 0x7F
        size, at = int.from_bytes(data[at : at + of_size]), at + of_size
    return kind, at, at + size
