"""What the listeners show and ask for by TLS: certificates of files, which are read again when they change."""

import logging
import re
import ssl
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Final, NamedTuple

from backends.regular_file import file_bytes
from gateway.config import TlsSection
from gateway.errors import ConfigError
from gateway.process.watched_files import WatchedFiles
from gateway.process.x509 import certificates

HTTP: Final = "http/1.1"
HTTP2: Final = "h2"
# Of TLS 1.2: keys of a session that the certificate's does not give away, and encryption that notices what was changed. All of
# TLS 1.3's are like that.
_CIPHERS: Final = "@SECLEVEL=2:ECDHE+AESGCM:ECDHE+CHACHA20"
_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_REASONS: Final = {  # of a certificate
    "EE_KEY_TOO_SMALL": "its key is too short: expected RSA of 2048 bits or more, or an elliptic curve",
    "CA_MD_TOO_WEAK": "it is signed by a weak digest: expected SHA-256 or better",
}
_HELD: Final = {  # by key: what its file holds, and the labels of that (RFC 7468)
    "certificate": ("certificate", re.compile(rb"-----BEGIN [A-Z0-9 ]*CERTIFICATE-----")),
    "key": ("private key", re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----")),
    "client_ca": ("certificate", re.compile(rb"-----BEGIN [A-Z0-9 ]*CERTIFICATE-----")),
}
_UNTIL_RENEWED: Final = {
    "certificate": "clients refuse this server",
    "client_ca": "clients that this authority vouches for are refused",
}

log = logging.getLogger(__name__)


class Usable(NamedTuple):
    """What can be made of the files. contexts: by protocol. expiry_s: by key, when the first certificate of its file expires,
    since 1970.
    """

    contexts: Mapping[str, ssl.SSLContext]
    expiry_s: Mapping[str, float]


class Certificates:
    """Of both listeners of a process, on its event loop."""

    def __init__(
        self, section: TlsSection, clock: Callable[[], int] = time.monotonic_ns, wall_s: Callable[[], float] = time.time
    ) -> None:
        """Raises: ConfigError, if the files cannot be used."""
        self._asks_clients = section.client_ca is not None
        self._wall_s = wall_s
        paths = [path for key in _HELD if (path := getattr(section, key)) is not None]
        self._files = WatchedFiles(paths, lambda: usable(section, wall_s), name="certificates", clock=clock)

    def context(self, protocol: str) -> ssl.SSLContext:
        """For a connection that begins. protocol: HTTP or HTTP2."""
        return self._files.current().contexts[protocol]

    def expiry_s(self) -> Mapping[str, float]:
        """See `Usable`."""
        return self._files.current().expiry_s

    def look_again(self, session: ssl.SSLObject) -> None:
        """Raise ssl.SSLError if a client takes up a session again, and its certificate of then has expired.

        OpenSSL looks at a certificate only when it is shown, and TLS 1.3 makes a session younger each time.
        """
        if self._asks_clients and session.session_reused:
            shown = session.getpeercert() or {}
            if ssl.cert_time_to_seconds(str(shown["notAfter"])) < self._wall_s():
                expired = ssl.SSLCertVerificationError()
                expired.reason, expired.verify_message = "CERTIFICATE_VERIFY_FAILED", "certificate has expired"
                raise expired


def usable(section: TlsSection, wall_s: Callable[[], float] = time.time) -> Usable:
    """What has expired, or is not valid yet, is used, as other servers do, and told. Raises: ConfigError, if they cannot be."""
    for key, (what, label) in _HELD.items():
        path = getattr(section, key)
        if path is not None:
            try:
                held = label.search(file_bytes(path))
            except OSError as exc:
                raise ConfigError(f"server.tls.{key}: '{path}': cannot be read: {exc.strerror}") from exc
            if held is None:
                raise ConfigError(f"server.tls.{key}: '{path}': it holds no {what}: expected one in PEM")
    contexts = {protocol: _context(section, protocol) for protocol in (HTTP, HTTP2)}
    now = datetime.fromtimestamp(wall_s(), UTC)
    ends = {key: _ends(key, path, now) for key in _UNTIL_RENEWED if (path := getattr(section, key))}
    return Usable(contexts, {key: min(moments).timestamp() for key, moments in ends.items() if moments})


def _ends(key: str, path: str, now: datetime) -> list[datetime]:
    """When the certificates of a file expire. Tells of those that are not valid now."""
    found = list(certificates(file_bytes(path)))
    for number, (begins, ends, _) in enumerate(found, 1):
        if begins <= now <= ends:
            continue
        title = "it" if len(found) == 1 else f"certificate {number} of it"
        if ends < now:
            what, way = f"has expired, on {ends:%Y-%m-%d %H:%M} UTC: ", "put a renewed one there, which needs no restart"
        else:
            what, way = f"is not valid before {begins:%Y-%m-%d %H:%M} UTC: until then ", "is this machine's clock right?"
        log.warning("server.tls.%s: '%s': %s %s%s: %s", key, path, title, what, _UNTIL_RENEWED[key], way)
    return [ends for _, ends, _ in found]


def _context(section: TlsSection, protocol: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[section.minimum_version]
    context.set_ciphers(_CIPHERS)
    # A client that asks for new keys without end would cost us more than itself.
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE | ssl.OP_NO_COMPRESSION
    # The one curve that every client must know (RFC 8446, section 9.1). Among the groups of OpenSSL's choice are finite fields
    # of 8192 bits: a client names one in a message of 1300 bytes that it need not even compute, and to answer took 160 ms
    # (2026-11-23, OpenSSL 3.0). A client that guesses another curve is asked once more, which takes it a round trip.
    context.set_ecdh_curve("prime256v1")
    context.set_alpn_protocols([protocol])
    try:
        context.load_cert_chain(section.certificate, section.key, partial(_no_passphrase, section.key))
    except ssl.SSLError as exc:
        raise _unusable(section, exc) from exc
    if section.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(section.client_ca)
        except ssl.SSLError as exc:
            raise ConfigError(f"server.tls.client_ca: '{section.client_ca}': {_unread(exc)}") from exc
    return context


def _unusable(section: TlsSection, exc: ssl.SSLError) -> ConfigError:
    """Of which of the two files OpenSSL speaks, it does not say."""
    if exc.reason == "KEY_VALUES_MISMATCH":
        return ConfigError(f"server.tls.key: '{section.key}': it is not the key of the certificate in '{section.certificate}'")
    if exc.reason in _REASONS:
        return ConfigError(f"server.tls.certificate: '{section.certificate}': {_REASONS[exc.reason]}")
    key = "key" if any(certificates(file_bytes(section.certificate))) else "certificate"
    return ConfigError(f"server.tls.{key}: '{getattr(section, key)}': {_unread(exc)}")


def _no_passphrase(path: str) -> str:
    """Else OpenSSL would ask for one on the terminal."""
    raise ConfigError(
        f"server.tls.key: '{path}': it is encrypted: expected one without a passphrase, which only this user can read"
    )


def _unread(exc: ssl.SSLError) -> str:
    why = f" ({exc.reason.lower().replace('_', ' ')})" if exc.reason else ""
    return f"OpenSSL cannot read it{why}: expected PEM, as it was issued"
