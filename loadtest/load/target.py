"""What is under test: its address, and what can be asked of it before and after a run (metadata, statistics).

One small blocking client per protocol, used outside the measured time and off the event loop.
"""

import base64
import contextlib
import http.client
import ipaddress
import json
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import quote, urlsplit

import psutil

from gateway.process.credentials import NOTHING_SHOWN, Credentials, reason, told
from gateway.wire.http2_frames import PREFACE, settings
from loadtest.errors import TargetError, UsageError
from loadtest.load.dialler import host_and_port
from loadtest.results import LoadSpec

if TYPE_CHECKING:
    import grpc

_ASK_TIMEOUT_S: Final = 5.0
_MAX_ANSWER_BYTES: Final = 16 << 20
REFUSED: Final = (401, 403, 429)
_REFUSED_BY_GRPC: Final = {16: 401, 7: 403}  # UNAUTHENTICATED, PERMISSION_DENIED; what is exhausted may be something else
_CLOSED: Final = (http.client.RemoteDisconnected, http.client.BadStatusLine, ConnectionResetError)
_SCHEMES: Final = {"http": (False, 80), "https": (True, 443), "grpc": (False, 8001), "grpcs": (True, 443)}
SENT_AS_THEY_ARE: Final = "!$%&'()*+,/:;=?@[]~"  # of a path and its query, by curl and requests too


@dataclass(frozen=True, slots=True)
class Address:
    """Where requests go, and how they get in.

    path: the URL's, without a slash at the end; for invocations the whole resource with its query; percent-encoded. shown: no
    part of a spec, as those are written down.
    """

    host: str
    port: int
    tls: bool
    path: str
    shown: Credentials = NOTHING_SHOWN

    @classmethod
    def of(cls, spec: LoadSpec, shown: Credentials = NOTHING_SHOWN) -> Self:
        """Raises: UsageError, if the target is no URL that fits the protocol."""
        scheme = "grpc" if spec.protocol == "grpc" else "http"
        target = spec.target if "://" in spec.target else f"{scheme}://{spec.target}"
        if "@" in re.split(r"[/?#]", target.partition("://")[2], maxsplit=1)[0]:  # which results, and messages, would tell
            expected = "leave them out; `loadtest run` sends them by --header 'Authorization: Basic ...'"
            raise UsageError(f"target: a user and password in a URL are not sent: {expected}")
        try:
            url = urlsplit(target)
            host, port = url.hostname or "", url.port
            host = host if host.isascii() else host.encode("idna").decode()
        except ValueError as exc:
            raise UsageError(f"target {spec.target!r}: {exc}") from exc
        path, query = (quote(part, safe=SENT_AS_THEY_ARE) for part in (url.path, url.query))
        if spec.protocol == "invocations":
            path = ("/invocations" if path in ("", "/") else path) + (f"?{query}" if query else "")
        else:
            path = path.rstrip("/")
        known = url.scheme in _SCHEMES and url.scheme.startswith(scheme) and host
        if not known or (query and spec.protocol != "invocations") or (path and spec.protocol == "grpc"):
            raise UsageError(f"target {spec.target!r}: expected {scheme}://HOST:PORT for protocol {spec.protocol}")
        tls, default_port = _SCHEMES[url.scheme]
        return cls(host, default_port if port is None else port, tls, path, shown)

    @property
    def place(self) -> str:
        """host:port."""
        return host_and_port(self.host, self.port)

    @property
    def authority(self) -> str:
        """As in a Host header: a scheme's own port is left out."""
        return self.place.rpartition(":")[0] if self.port == (443 if self.tls else 80) else self.place

    @property
    def url(self) -> str:
        """Without its path."""
        return f"http{'s' * self.tls}://{self.place}"

    def is_here(self) -> bool:
        """Whether it is this machine's: a loopback address, one of its interfaces, or its name. No other name is looked up."""
        host = self.host.rstrip(".")
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(host)
            address = getattr(address, "ipv4_mapped", None) or address
            if address.is_loopback or address.is_unspecified:
                return True
        own = {address.address for found in psutil.net_if_addrs().values() for address in found}
        return host.endswith(".localhost") or host in {"localhost", socket.gethostname().lower(), *own}

    def headers(self, spec: LoadSpec, own: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
        """What a request says: what it has of its own, and what all say, the key included; the spec's replace others.

        Where requests are signed, a signature stands where the key would.
        """
        asked = {name.lower() for name, _ in spec.headers}
        ours = {**own, **(self.shown.headers if not spec.sigv4 else {})}
        made = {name: value for name, value in ours.items() if name.lower() not in asked}
        return made | dict(spec.headers)

    def metadata(self, spec: LoadSpec) -> list[tuple[str, str]]:
        """The same of a gRPC call, as it is sent: what is binary in base64, and each of several values for itself."""
        return [
            (name, value)
            for name, text in ((name.lower(), text) for name, text in self.headers(spec).items())
            for value in (binary_values(text) if name.endswith("-bin") else (text,))
        ]

    def call_metadata(self, spec: LoadSpec) -> list[tuple[str, str | bytes]]:
        """The same for grpcio, which encodes what is binary."""
        return [(name, from_base64(text) if name.endswith("-bin") else text) for name, text in self.metadata(spec)]

    def http_connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """A blocking one, not connected yet."""
        if not self.tls:
            return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        return http.client.HTTPSConnection(self.host, self.port, timeout=timeout_s, context=self.shown.context())

    def grpc_channel(self) -> "grpc.Channel":
        """A blocking one."""
        import grpc

        if not self.tls:
            return grpc.insecure_channel(self.place)
        self.shown.context()  # which says what is wrong with the files
        names = (self.shown.ca, self.shown.certificate_key or self.shown.certificate, self.shown.certificate)
        files = (Path(name).read_bytes() if name else None for name in names)
        return grpc.secure_channel(self.place, grpc.ssl_channel_credentials(*files))

    def model_path(self, model: str, version: str) -> str:
        """The v2 path of a model."""
        suffix = f"/versions/{quote(version, safe='')}" if version else ""
        return f"{self.path}/v2/models/{quote(model, safe='')}{suffix}"


def binary_values(text: str) -> list[str]:
    """Those of binary metadata, which a comma joins (gRPC over HTTP/2, "Custom-Metadata"); many servers would not part them."""
    return [value.strip() for value in text.split(",")]


def from_base64(text: str) -> bytes:
    """With its padding or without, as gRPC takes it. Raises: ValueError."""
    return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)


@dataclass(frozen=True, slots=True)
class ServerStatistics:
    """Totals of the statistics extension for one model. Only differences of two mean anything."""

    requests: int
    queue_ns: int
    compute_ns: int
    rows: int
    executions: int

    def since(self, before: "ServerStatistics") -> "ServerStatistics":
        return ServerStatistics(
            self.requests - before.requests,
            self.queue_ns - before.queue_ns,
            self.compute_ns - before.compute_ns,
            self.rows - before.rows,
            self.executions - before.executions,
        )

    @property
    def began_anew(self) -> bool:
        """Of a difference: the two are not totals of one server since one start."""
        return min(self.requests, self.queue_ns, self.compute_ns, self.rows, self.executions) < 0


def model_name(spec: LoadSpec, address: Address) -> str:
    """The spec's model, or the only one the server has ready. Raises: TargetError, UsageError."""
    if spec.model:
        return spec.model
    if spec.protocol == "grpc":
        entries = _ask_grpc(address, spec, "RepositoryIndex").get("models", [])
    else:
        entries = _ask_http(address, "POST", f"{address.path}/v2/repository/index", spec)
    names = sorted({str(entry["name"]) for entry in entries if entry.get("state", "READY") == "READY"})
    if len(names) != 1:
        raise UsageError(f"{spec.target} serves {', '.join(names) or 'no model'}: say which with --model")
    return names[0]


def model_metadata(spec: LoadSpec, address: Address, model: str) -> dict[str, Any]:
    """The v2 metadata of the model: {"inputs": [{name, datatype, shape}], ...}. Raises: TargetError."""
    if spec.protocol == "grpc":
        return _ask_grpc(address, spec, "ModelMetadata", name=model, version=spec.version)
    answer = _ask_http(address, "GET", address.model_path(model, spec.version), spec)
    if not isinstance(answer, dict):
        raise TargetError(f"{spec.target}: the metadata of model {model!r} is no JSON object")
    return answer


def server_statistics(spec: LoadSpec, address: Address, model: str) -> ServerStatistics | None:
    """The server's totals for the model; None if it has no statistics extension (or does not answer)."""
    if not model or spec.sigv4:  # AWS lets nothing through but invocations
        return None
    try:
        if spec.protocol == "grpc":
            answer = _ask_grpc(address, spec, "ModelStatistics", name=model, version=spec.version)
        else:
            answer = _ask_http(address, "GET", address.model_path(model, spec.version) + "/stats", spec)
        return _totals(answer["model_stats"])
    except (TargetError, KeyError, TypeError, ValueError, AttributeError):
        return None


def _totals(models: list[Mapping[str, Any]]) -> ServerStatistics:
    # gRPC's JSON form has 64-bit numbers as text and leaves zeros out.
    def total(name: str, key: str) -> int:
        return sum(int(model.get("inference_stats", {}).get(name, {}).get(key, 0)) for model in models)

    return ServerStatistics(
        requests=total("success", "count"),
        queue_ns=total("queue", "ns"),
        compute_ns=sum(total(f"compute_{part}", "ns") for part in ("input", "infer", "output")),
        rows=sum(int(model.get("inference_count", 0)) for model in models),
        executions=sum(int(model.get("execution_count", 0)) for model in models),
    )


def _ask_http(address: Address, method: str, path: str, spec: LoadSpec) -> Any:
    where = f"{address.place}{path}"
    with contextlib.closing(address.http_connection(_ASK_TIMEOUT_S)) as connection:
        try:
            connection.request(method, path, headers=address.headers(spec))
            response = connection.getresponse()
            body = response.read(_MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as exc:
            # A port of gRPC ends what is not HTTP/2, or answers it with frames.
            other = "; if it is a port of gRPC, add --protocol grpc" if isinstance(exc, _CLOSED) else ""
            if isinstance(exc, OSError) and (words := address.shown.failed(exc, address.url)):
                raise TargetError(f"{words}{other if not address.tls else ''}") from exc
            unread = isinstance(exc, http.client.BadStatusLine) and not isinstance(exc, http.client.RemoteDisconnected)
            why = "it does not answer in HTTP/1.1" if unread else reason(exc)
            raise TargetError(f"{where} cannot be asked: {why}{other}") from exc
    if response.status in REFUSED:
        raise TargetError(f"{address.url}: {address.shown.refusal(response.status, told(body.decode(errors='replace')))}")
    if response.status != 200:
        words = _told(response.headers.get_content_type(), body)
        raise TargetError(f"{where} answered {response.status}{words}{_address_alone(address)}")
    try:
        return json.loads(body)
    except ValueError as exc:
        raise TargetError(f"{where} answered no JSON: {exc}") from exc


def _told(content_type: str, body: bytes) -> str:
    """What a server says of an error, in one line; a page for browsers says nothing here."""
    if content_type == "text/html" or body.lstrip().startswith(b"<"):
        return " with a page of HTML: is it a server of the Open Inference Protocol v2?"
    text = told(body.decode(errors="replace"))
    return f": {text}" if text else ""


def _address_alone(address: Address) -> str:
    """What to do where the target was not the server's address but the URL of something on it."""
    before, slash, _ = f"{address.path}/".partition("/v2/")
    if not slash:
        return ""
    return f"; give the address alone: {address.url}{before}"


def _ask_grpc(address: Address, spec: LoadSpec, method: str, **fields: str) -> dict[str, Any]:
    import grpc
    from google.protobuf.json_format import MessageToDict
    from tritonclient.grpc import service_pb2, service_pb2_grpc

    where = address.place
    with address.grpc_channel() as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            request = getattr(service_pb2, f"{method}Request")(**fields)
            answer = getattr(stub, method)(request, timeout=_ASK_TIMEOUT_S, metadata=address.call_metadata(spec))
        except grpc.RpcError as exc:
            if status := _REFUSED_BY_GRPC.get(exc.code().value[0]):
                raise TargetError(f"{where}: {address.shown.refusal(status, exc.details() or '')}") from exc
            # A gateway tells by HTTP/1 that it speaks TLS.
            unlike = not address.tls and any(word in str(exc.details()) for word in ("closed", "http1.x"))
            other = f"; if it speaks TLS, write grpcs://{where}" if unlike else ""
            raise TargetError(f"{where} {method}: {exc.code().name}: {exc.details()}{other}") from exc
    found: dict[str, Any] = MessageToDict(answer, preserving_proto_field_name=True)
    return found


def shake_hands(address: Address) -> None:
    """See whether TLS comes about for gRPC, whose library does not tell why not. Raises: TargetError, ConfigError."""
    context = address.shown.context()
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((address.host, address.port), _ASK_TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=address.host) as secured,
        ):
            with contextlib.suppress(OSError):  # if it hung up, what it has sent tells why
                secured.sendall(PREFACE + settings({}))  # before which it may say nothing
            secured.recv(1)  # its settings; by TLS 1.3 it refuses our certificate only now
    except OSError as exc:
        if words := address.shown.failed(exc, f"grpcs://{address.place}"):
            raise TargetError(words) from exc
