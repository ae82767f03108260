"""How our own commands enter a gateway whose doors are locked: whom they trust, and what they show.

The key comes from the environment or from a file, never from the command line, which others on the machine can read. It is in
no text that is made here, and does not follow a redirection to another server.
"""

import argparse
import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import BadStatusLine, HTTPException, RemoteDisconnected
from pathlib import Path
from typing import Any, Final

from gateway.errors import BackendUnreachable, ConfigError, Forbidden, GatewayError, Limited, NotFound, Unauthenticated
from gateway.process.console import printable

VARIABLE: Final = "GATEWAY_API_KEY"
_HOW: Final = f"put it into the environment's {VARIABLE}, or name its file with --api-key-file"
# X509_V_ERR_… of OpenSSL's x509_vfy.h
_NOT_YET: Final = 9
_EXPIRED: Final = 10
_NAMES: Final = (62, 64)
_TOLD_CHARS: Final = 1000  # of a server's words
_REFUSED: Final[dict[int, type[GatewayError]]] = {401: Unauthenticated, 403: Forbidden, 429: Limited}


def add_credentials(command: argparse.ArgumentParser) -> None:
    """Give a command that asks a gateway the options that `credentials` reads."""
    group = command.add_argument_group("where a gateway's doors are locked (docs/security.md)")
    group.add_argument("--ca", type=Path, metavar="FILE", help="authorities that vouch for the server, in PEM (this machine's)")
    group.add_argument("--cert", type=Path, metavar="FILE", help="a certificate to show, in PEM, for mutual TLS")
    group.add_argument("--key", type=Path, metavar="FILE", help="its private key, where --cert does not hold that too")
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"holds the API key to show; without it the environment's {VARIABLE} is shown, if it is set",
    )


@dataclass(frozen=True, slots=True)
class Credentials:
    """What the options say; files are paths, empty for none.

    ca: without it those count that this machine trusts. api_key_from: what messages call its place.
    """

    ca: str = ""
    certificate: str = ""
    certificate_key: str = ""
    api_key: str = field(default="", repr=False)
    api_key_from: str = VARIABLE

    @property
    def headers(self) -> dict[str, str]:
        """What each request says besides."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def context(self) -> ssl.SSLContext:
        """Of a client's connections by TLS. Raises: ConfigError, naming the option."""
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
        except OSError as exc:
            raise ConfigError(f"--ca: {self.ca}: expected certificates in PEM: {_said(exc)}") from exc
        if self.certificate:
            try:
                context.load_cert_chain(self.certificate, self.certificate_key or None, _no_passphrase)
            except OSError as exc:
                self._check_certificate()
                files = self.certificate + (f" and --key: {self.certificate_key}" if self.certificate_key else "")
                raise ConfigError(f"--cert: {files}: expected a certificate and its key, in PEM: {_said(exc)}") from exc
        return context

    def _check_certificate(self) -> None:
        """Tell what the files lack, which OpenSSL does not. Raises: ConfigError, naming the option."""
        with suppress(OSError):
            if "CERTIFICATE-----" not in _text(self.certificate):
                raise ConfigError(f"--cert: {self.certificate}: expected a certificate, in PEM: it holds none")
            if "PRIVATE KEY-----" in _text(self.certificate_key or self.certificate):
                return
            if not self.certificate_key:
                raise ConfigError(f"--cert: {self.certificate}: it does not hold the private key too: name that with --key")
            raise ConfigError(f"--key: {self.certificate_key}: expected a private key, in PEM: it holds none")

    def check_plain(self, url: str) -> None:
        """Of a server that is asked without TLS. Raises: ConfigError, if there are files for it."""
        for option, file in (("--ca", self.ca), ("--cert", self.certificate)):
            if file:
                scheme, _, rest = url.rpartition("://")
                secure = f"{'grpcs' if scheme == 'grpc' else 'https'}://{rest}"
                raise ConfigError(f"{option}: {file}: {url} is asked without TLS, for which it is: write {secure}")

    @contextmanager
    def opened(
        self, url: str, *, body: bytes | None = None, headers: Mapping[str, str] | None = None, timeout_s: float
    ) -> Iterator[Any]:
        """The answer of a URL; body: None: GET.

        Raises: Unauthenticated, Forbidden, Limited, if it is refused by its key; BackendUnreachable, if TLS fails; ConfigError;
        and what urllib does.
        """
        secure = url.startswith("https:")
        if not secure:
            self.check_plain("/".join(url.split("/")[:3]))
        context = self.context() if secure else None
        request = urllib.request.Request(url, body, dict(headers or {}))
        for name, value in self.headers.items():
            request.add_unredirected_header(name, value)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s, context=context) as answer:
                yield answer
        except urllib.error.HTTPError as exc:
            if exc.code not in _REFUSED:
                raise
            with exc:
                raise self.refused(url, exc.code, exc.read().decode(errors="replace")) from exc
        except OSError as exc:
            if words := self.failed(exc, "/".join(url.split("/")[:3])):
                raise BackendUnreachable(words) from exc
            raise

    def asked(self, url: str, *, timeout_s: float) -> bytes:
        """What a gateway answers at a URL.

        Raises: as `opened`; NotFound or another GatewayError, with its words; BackendUnreachable, if nothing answers in HTTP.
        """
        try:
            with self.opened(url, timeout_s=timeout_s) as answer:
                body: bytes = answer.read()
                return body
        except urllib.error.HTTPError as exc:
            with exc:
                words = with_status(exc.code, exc.read())
            raise (NotFound if exc.code == 404 else GatewayError)(f"{url}: {words}") from exc
        except (OSError, ValueError, HTTPException) as exc:  # the latter two of what is no URL, or no HTTP
            raise unanswered(exc, "/".join(url.split("/")[:3]), timeout_s) from exc

    def refused(self, url: str, status: int, answer: str) -> GatewayError:
        """Of an answer with 401, 403 or 429. answer: its body."""
        return _REFUSED[status](f"{url}: {self.refusal(status, told(answer))}")

    def refusal(self, status: int, words: str) -> str:
        """What 401, 403 or 429 means here, as the end of a sentence. words: the server's own."""
        said = f" ({words})" if words else ""
        key = f"the key of {self.api_key_from}"
        if status == 429:
            return f"429: {key if self.api_key else 'who asks'} has asked as much as it may{said}"
        if not self.api_key:
            return f"{status}: it asks for a key: {_HOW}{said}"
        return f"401: it does not take {key}{said}" if status == 401 else f"403: {key} is not for this{said}"

    def failed(self, exc: OSError, where: str) -> str:
        """What TLS failed of, as a sentence that begins with the address; empty, if it was not TLS. where: such as https://…."""
        cause = exc.reason if isinstance(exc, urllib.error.URLError) and isinstance(exc.reason, OSError) else exc
        plain, tls = where.partition(":")[0] in ("http", "grpc"), where.partition(":")[0] in ("https", "grpcs")
        if plain and isinstance(cause, RemoteDisconnected):
            return f"{where}: it ended the connection without an answer: if it speaks TLS, write {where.replace(':', 's:', 1)}"
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"{where}: {self._distrust(cause)}"
        broken = isinstance(cause, ConnectionResetError | BrokenPipeError | ssl.SSLEOFError | ssl.SSLZeroReturnError)
        if tls and (broken or getattr(cause, "reason", None) == "SSLV3_ALERT_HANDSHAKE_FAILURE"):
            if self.certificate:
                return f"{where}: it ended the connection: it may not accept the certificate of --cert {self.certificate}"
            how = "it may speak no TLS; if it asks for a client's certificate, name one with --cert and --key"
            return f"{where}: it ended the connection: {how}"
        if not isinstance(cause, ssl.SSLError):
            return ""
        reason = cause.reason or ""
        if "ALERT" in reason and ("CERTIFICATE" in reason or "CA" in reason.split("_")):
            if not self.certificate:
                return f"{where}: it asks for a client's certificate: name one with --cert and --key"
            return f"{where}: it does not accept the certificate of --cert {self.certificate}: {_said(cause)}"
        if reason in ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"):
            return f"{where}: it speaks no TLS: write {where.replace('s:', ':', 1)}"
        return f"{where}: TLS failed: {_said(cause)}"

    def _distrust(self, exc: ssl.SSLCertVerificationError) -> str:
        if exc.verify_code == _EXPIRED:
            return "its certificate has expired: whoever runs it must renew it (server.tls.certificate)"
        if exc.verify_code == _NOT_YET:
            return "its certificate is not valid yet: is this machine's clock right?"
        if exc.verify_code in _NAMES:
            return f"its certificate is of another name: ask by one that it has ({exc.verify_message})"
        trusted = f"--ca {self.ca} has none" if self.ca else "this machine knows none: name one with --ca"
        return f"its certificate needs an authority that vouches for it, and {trusted} ({exc.verify_message})"


NOTHING_SHOWN: Final = Credentials()


def credentials(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Credentials:
    """What the options of `add_credentials` say. Raises: ConfigError, naming the option, and never the key."""
    if arguments.key is not None and arguments.cert is None:
        raise ConfigError(f"--key: {arguments.key}: it is the key of a certificate: name that with --cert")
    place: Path | None = arguments.api_key_file
    if place is None:
        source, text = VARIABLE, environment.get(VARIABLE, "")
    else:
        source = f"--api-key-file {place}"
        try:
            text = place.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else "it holds more than ASCII"
            raise ConfigError(f"--api-key-file: {why}: expected a file that holds the key, in one line") from exc
    shown = text.strip()
    if (place is not None and not shown) or not (shown.isascii() and shown.isprintable()) or " " in shown:
        raise ConfigError(f"{source}: expected a key, in one line, and nothing else")
    ca, certificate, key = (str(path) if path is not None else "" for path in (arguments.ca, arguments.cert, arguments.key))
    return Credentials(ca, certificate, key, shown, source)


def unanswered(exc: Exception, url: str, timeout_s: float) -> BackendUnreachable:
    """What is told of a gateway that was asked in HTTP in vain, with what to do. timeout_s: after which it was given up."""
    cause = exc.reason if isinstance(exc, urllib.error.URLError) else exc
    if isinstance(cause, TimeoutError):
        return BackendUnreachable(f"{url}: no answer within {timeout_s:g} s: is it overloaded, or the address wrong?")
    if isinstance(cause, BadStatusLine | ConnectionResetError):
        return BackendUnreachable(f"{url}: no answer in HTTP: name the HTTP port (8000 unless set; 8001 is gRPC)")
    return BackendUnreachable(
        f"{url}: no gateway answers ({reason(exc)}): start one, `gateway serve CONFIG`, or name the address of one that runs"
    )


def reason(exc: Exception) -> str:
    """Why something could not be asked, without the words of Python around it."""
    cause = exc.reason if isinstance(exc, urllib.error.URLError) else exc
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__


def told(answer: str) -> str:
    """A server's words of an error, in one printable line of bounded length; its own JSON has them under `error`."""
    with suppress(ValueError, KeyError, TypeError):
        answer = str(json.loads(answer)["error"])
    return "" if answer.lstrip().startswith("<") else printable(" ".join(answer[:_TOLD_CHARS].split()))


def with_status(status: int, answer: bytes) -> str:
    """`404: not found`; the status alone where the server has no words for it, or a page for browsers."""
    words = told(answer.decode(errors="replace"))
    return f"{status}: {words}" if words else str(status)


def _said(exc: Exception) -> str:
    if isinstance(exc, ssl.SSLError):
        return (exc.reason or str(exc)).lower().replace("_", " ")
    return getattr(exc, "strerror", None) or str(exc)


def _text(path: str) -> str:
    return Path(path).read_text(encoding="ascii", errors="replace")


def _no_passphrase() -> str:
    """Else OpenSSL would ask for one on the terminal."""
    raise ConfigError("--key: the key is encrypted: expected one without a passphrase")
