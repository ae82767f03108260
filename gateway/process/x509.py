"""What certificates say of themselves: from when until when they are valid, and for which names."""

import base64
import contextlib
import ipaddress
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final, NamedTuple

_PEM: Final = re.compile(rb"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----(.+?)-----END", re.DOTALL)
_UTC_TIME: Final = 0x17  # with a year of two digits
_VERSION: Final = 0xA0
_EXTENSIONS: Final = 0xA3
_ALTERNATIVE_NAMES: Final = bytes.fromhex("551d11")
_DNS_NAME: Final = 0x82
_IP_ADDRESS: Final = 0x87

_Element = tuple[int, bytes]  # of DER: its kind and its content


class Certificate(NamedTuple):
    """names: of hosts, and addresses."""

    begins: datetime
    ends: datetime
    names: tuple[str, ...]


def certificates(pem: bytes) -> Iterator[Certificate]:
    """Those in a text, in their order, but for what cannot be read."""
    for found in _PEM.finditer(pem):
        with contextlib.suppress(ValueError, IndexError):
            yield _certificate(base64.b64decode(found[1]))


def _certificate(der: bytes) -> Certificate:
    """RFC 5280, section 4.1."""
    ((_, whole),) = _elements(der, 1)
    ((_, told),) = _elements(whole, 1)
    parts = [(kind, content) for kind, content in _elements(told) if kind != _VERSION]
    _serial_number, _algorithm, _issuer, (_, valid), *others = parts
    begins, ends = map(_moment, _elements(valid))
    names = tuple(name for kind, extensions in others if kind == _EXTENSIONS for name in _names(extensions))
    return Certificate(begins, ends, names)


def _names(extensions: bytes) -> Iterator[str]:
    """RFC 5280, section 4.2.1.6."""
    ((_, each),) = _elements(extensions)
    for _, extension in _elements(each):
        (_, name), *_critical, (_, value) = _elements(extension)
        if name == _ALTERNATIVE_NAMES:
            ((_, names),) = _elements(value)
            for kind, content in _elements(names):
                if kind == _DNS_NAME:
                    yield content.decode("ascii", "replace")
                elif kind == _IP_ADDRESS and len(content) in (4, 16):
                    yield str(ipaddress.ip_address(content))


def _moment(element: _Element) -> datetime:
    """RFC 5280, section 4.1.2.5."""
    kind, content = element
    text = content.decode("ascii")
    if kind == _UTC_TIME:
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _elements(data: bytes, most: int = -1) -> Iterator[_Element]:
    """ITU-T X.690, section 8.1. most: so many of them; negative: all."""
    at = 0
    while at < len(data) and most:
        kind, size, at = data[at], data[at + 1], at + 2
        if size & 0x80:
            of_size = size & 0x7F
            size, at = int.from_bytes(data[at : at + of_size]), at + of_size
        yield kind, data[at : at + size]
        at, most = at + size, most - 1
