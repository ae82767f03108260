"""The sections `server`, `metrics` and `ray`: the listeners, the processes that own them, what they count, and Ray."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field, model_validator

from gateway.config.fields import (
    AllowedHost,
    Application,
    FilePath,
    Host,
    Port,
    Resource,
    Seconds,
    SecondsOrZero,
    Strict,
    is_loopback,
    no_parts,
)
from gateway.documents.faults import Unfit

BODIES_OF_ONE_REQUEST: Final = 4  # what it may hold, in bodies of the longest kind
_Ingresses = Annotated[int, Field(ge=1, le=64)]


class Limits(Strict):
    """What one client may ask of the listeners."""

    header_bytes: int = Field(default=32 << 10, ge=256, le=(1 << 32) - 1)  # which HTTP/2 can tell
    header_count: int = Field(default=100, ge=1)
    body_bytes: int = Field(default=64 << 20, ge=1)
    header_timeout_s: Seconds = 10.0
    body_timeout_s: Seconds = 60.0
    idle_timeout_s: Seconds = 120.0
    connections: int = Field(default=10_000, ge=1)
    pipelined_requests: int = Field(default=64, ge=1)
    requests_per_connection: int = Field(default=0, ge=0)  # 0: never recycled
    connection_age_s: SecondsOrZero = 0.0  # it is closed between half of that and that; 0: never
    json_depth: int = Field(default=32, ge=1, le=256)
    memory_bytes: int | None = Field(default=None, ge=1)  # None: a quarter of the machine's, or of the cgroup's

    def together(self) -> Iterable[Iterator[Unfit]]:
        """For `gateway.documents.lenient`, as all of this name."""
        return (self._memory_of_one_request(),)

    def _memory_of_one_request(self) -> Iterator[Unfit]:
        least = BODIES_OF_ONE_REQUEST * self.body_bytes
        if self.memory_bytes is not None and self.memory_bytes < least:
            expected = f"at least {least}, which is {BODIES_OF_ONE_REQUEST} times body_bytes"
            remedy = "one request may take so much: lower body_bytes as well"
            yield Unfit("is too little", expected=expected, remedy=remedy, at=("memory_bytes",))


def _as_text(value: object) -> object:
    return str(value) if isinstance(value, float) else value  # 1.3 without quotes


class TlsSection(Strict):
    """TLS on both listeners. The files are PEM, and read again when they change."""

    certificate: FilePath  # the server's, and behind it those that vouch for it
    key: FilePath  # its private key
    client_ca: FilePath | None = None  # authorities: clients must show a certificate of one of them; None: none is asked for
    minimum_version: Annotated[Literal["1.2", "1.3"], BeforeValidator(_as_text)] = "1.2"


class AccessSection(Strict):
    """Who may ask what: each request shows a key, of a file that `gateway key` makes lines for."""

    keys: FilePath | None = None  # the file; read again when it changes
    keys_variable: str | None = None  # an environment variable that holds what such a file does
    open: tuple[Literal["infer", "metrics", "status"], ...] = ()  # what needs no key

    def together(self) -> Iterable[Iterator[Unfit]]:
        """For `gateway.documents.lenient`, as all of this name."""
        return (self._no_keys(),)

    def _no_keys(self) -> Iterator[Unfit]:
        if self.keys is None and self.keys_variable is None:
            remedy = "name one; `gateway key NAME` prints what to write into it"
            yield Unfit("there are no keys", expected="a file, or keys_variable", remedy=remedy, at=("keys",))


class ServerSection(Strict):
    """The listeners and the processes that own them."""

    host: Host = "127.0.0.1"
    http_port: Port | None = 8000  # None: no such listener; 0: any free port
    grpc_port: Port | None = 8001
    ingress_replicas: _Ingresses | Literal["auto"] = 1  # auto: see `gateway.configuring.ingresses`
    ingress_resources: dict[str, Resource] = Field(default={})  # of one, on Ray; as of a backend
    ingress_replicas_per_node: _Ingresses | None = None  # on Ray, of one version; None: any number
    ingress_surge: bool = True  # as of a backend
    shared_workers: int | None = Field(default=None, ge=1)  # batches that run at once in a process, of all embedded backends
    drain_timeout_s: SecondsOrZero = 20.0
    run_dir: FilePath | None = None  # metrics and region files of this node; None: a fresh temporary directory
    state_dir: FilePath | None = None  # what was learned of the backends' speed, kept between restarts; None: learned anew
    instance_type: str | None = None  # what this runs on, such as c7i.xlarge: told to loadtest, which prices it
    system_shared_memory: bool = True
    model_control: bool = False  # repository load and unload by clients
    status_page: bool | Literal["auto"] = "auto"  # at / for browsers; auto: where only who is on this machine can reach it
    allowed_hosts: tuple[AllowedHost, ...] = ()  # by which it may be asked, and whose pages may ask; "*": by any name
    tls: TlsSection | None = None  # None: neither listener speaks TLS
    access: AccessSection | None = None  # None: no key is asked for
    limits: Limits = Limits()

    @property
    def ingresses(self) -> int:
        """How many processes listen; `auto` is one where nobody has decided."""
        return 1 if self.ingress_replicas == "auto" else self.ingress_replicas

    @property
    def shows_page(self) -> bool:
        """Whether browsers get the status page: where the setting does not say, if nobody but this machine reaches it."""
        return is_loopback(self.host) if self.status_page == "auto" else self.status_page

    @property
    def trusts_all_here(self) -> bool:
        """Whether only this machine reaches it, and everybody there may ask, be it some things alone."""
        return is_loopback(self.host) and (self.access is None or bool(self.access.open))

    def together(self) -> Iterable[Iterator[Unfit]]:
        """For `gateway.documents.lenient`, as all of this name."""
        return self._same_port(), self._no_port(), no_parts(self.ingress_resources, "ingress_resources")

    def _same_port(self) -> Iterator[Unfit]:
        if self.http_port and self.http_port == self.grpc_port:
            yield Unfit("http_port has it too", expected="another port", remedy="0 is any free one", at=("grpc_port",))

    def _no_port(self) -> Iterator[Unfit]:
        if self.http_port is None and self.grpc_port is None:
            found = "grpc_port is null too, and nobody could ask"
            yield Unfit(found, expected="a port in one of them", remedy="left out, it is 8000", at=("http_port",))


class MetricsSection(Strict):
    """What is counted and shown at /metrics."""

    enabled: bool = True  # False, or `metrics: off`: nothing is counted, and there is no /metrics
    triton_names: bool = False  # Triton's nv_inference_* beside ours, for dashboards that were made for it

    @model_validator(mode="before")
    @classmethod
    def _switch(cls, value: object) -> object:
        """`off` and `on`, which YAML reads as false and true."""
        return {"enabled": value} if isinstance(value, bool) else value


class Ray(Strict):
    """Ray, when `gateway serve` starts or joins it."""

    address: str | None = None  # None: join a running cluster of this node if there is one, else start one
    dashboard: bool = False
    application: Application = "gateway"
    channel_host: str | None = None  # where replicas take batches of other nodes; None: at the node's address in the cluster
