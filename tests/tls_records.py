"""Bytes of TLS 1.3 (RFC 8446) that no library sends: first messages with any group, and requests for new keys without end."""

import hashlib
import hmac
import os
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

P256: Final = 0x0017
FFDHE8192: Final = 0x0104
_REQUEST: Final = b"\x18\0\0\1\1" + b"\x16"  # a KeyUpdate that asks for one, and what it is inside of its record


def _vector(content: bytes, size: int = 2) -> bytes:
    return len(content).to_bytes(size) + content


def _extension(kind: int, content: bytes) -> bytes:
    return kind.to_bytes(2) + _vector(content)


def client_hello(group: int) -> bytes:
    """The first message of a client that knows one group."""
    if group == P256:
        share = ec.generate_private_key(ec.SECP256R1()).public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)
    else:
        share = b"\x55" * 1024  # a number of that field, as good as any
    named = group.to_bytes(2)
    extensions = (
        _extension(43, _vector(b"\x03\x04", 1))
        + _extension(10, _vector(named))
        + _extension(13, _vector(b"\x04\x03\x08\x04\x08\x07"))
        + _extension(51, _vector(named + _vector(share)))
    )
    body = b"\x03\x03" + os.urandom(32) + _vector(os.urandom(32), 1) + _vector(b"\x13\x01\x13\x02") + b"\x01\x00"
    return b"\x16\x03\x01" + _vector(b"\x01" + _vector(body + _vector(extensions), 3))


def key_updates(keylog: Path, count: int) -> bytes:
    """Requests for new keys, of a client that has sent nothing yet. keylog: of its context, as SSLKEYLOGFILE."""
    lines = [line.split() for line in keylog.read_text().splitlines()]
    secret = next(bytes.fromhex(line[2]) for line in lines if line[0] == "CLIENT_TRAFFIC_SECRET_0")
    digest = hashlib.sha384 if len(secret) == 48 else hashlib.sha256
    head = b"\x17\x03\x03" + (len(_REQUEST) + 16).to_bytes(2)

    def derived(label: bytes, size: int) -> bytes:
        info = size.to_bytes(2) + _vector(b"tls13 " + label, 1) + b"\0" + b"\1"
        return hmac.new(secret, info, digest).digest()[:size]

    records = []
    for _ in range(count):
        key, nonce = derived(b"key", 32 if len(secret) == 48 else 16), derived(b"iv", 12)
        records.append(head + AESGCM(key).encrypt(nonce, _REQUEST, head))
        secret = derived(b"traffic upd", len(secret))
    return b"".join(records)
