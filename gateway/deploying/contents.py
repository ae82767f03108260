"""What a pod holds: the configuration as it stands there, and the files that it names, below one folder.

Paths of a configuration lead to what is put in the pod's folder of models, each where `gateway package` puts it. Of secrets
only the places are written; nobody reads them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from backends.artifact_sizes import artifact_bytes
from backends.source import is_source
from gateway.config import Config, config_of, located
from gateway.deploying.packing import Package, packed, relative_of, secrets_here
from gateway.documents.faults import ConfigFaults, Fault, Location
from gateway.documents.reader import Document

CONFIGURATION: Final = "/etc/gateway/gateway.yaml"
TLS: Final = "/etc/gateway-tls"
KEYS: Final = "/etc/gateway-keys"
KEY_FILE: Final = "keys.yaml"
MODELS: Final = "/mnt/models"  # as KServe has it
_SCRATCH: Final = "/tmp"  # all that a pod may write to


@dataclass(frozen=True, slots=True)
class Contents:
    """config: as it was read. value: as it stands in the pod. package: the files here that the pod's folder of models has.

    bytes: of each model's backends, what its artifact takes on disk; None: that cannot be told.
    """

    config: Config
    value: dict[str, Any]
    package: Package
    bytes: tuple[tuple[int | None, ...], ...]

    @property
    def text(self) -> str:
        return as_yaml(self.value)


def as_yaml(value: object) -> str:
    return yaml.dump(value, Dumper=_Plain, sort_keys=False, width=1 << 16, allow_unicode=True)


def contents(document: Document, models: str = MODELS, *, whole: bool = False) -> Contents:
    """models: the pod's folder of models. whole: its package is unpacked there; else absolute paths are those of its image.

    Raises: ConfigError.
    """
    config = config_of(document)
    if faults := [*_unfit(document, config)]:
        raise ConfigFaults(faults)
    server = _server(document.value.get("server") or {}, config)
    kept = {key: section for key, section in document.value.items() if key not in ("server", "ray", "models")}
    there = replace(document, value={"server": server, **kept, "models": document.value["models"]})
    apart = secrets_here(document)
    package = packed(there, apart=apart) if whole else relative_of(there, apart)
    value: Any = located(package.value, Path(models))
    for model in value["models"]:
        for backend in model["backends"]:
            if backend["kind"] == "tensorrt" and not backend.get("engines"):
                backend["engines"] = f"{_SCRATCH}/engines"  # beside the file nothing can be written
    return Contents(config, value, package, artifact_sizes(document))


def artifact_sizes(document: Document) -> tuple[tuple[int | None, ...], ...]:
    """Of each model's backends, what their files take on disk; None: that cannot be told."""
    folder = (document.folder or Path()).absolute()
    return tuple(tuple(_bytes(backend, folder) for backend in model["backends"]) for model in document.value["models"])


def _unfit(document: Document, config: Config) -> Iterator[Fault]:
    """What can be served elsewhere, and not in a pod."""
    server = config.server
    if not server.http_port:
        remedy = "that is where a cluster asks for health and metrics"
        yield document.fault(("server", "http_port"), expected="a port, 1 to 65535", remedy=remedy)
    if server.grpc_port == 0:
        yield document.fault(("server", "grpc_port"), expected="a port, 1 to 65535, or null")
    if server.tls is not None and server.tls.client_ca is not None:
        found = "the cluster's probes show no certificate"
        yield document.fault(
            ("server", "tls", "client_ca"), found, remedy="ask for keys (`server.access`), or leave it to a mesh"
        )
    for number, model in enumerate(config.models):
        for index, backend in enumerate(model.backends):
            at: Location = ("models", number, "backends", index)
            if backend.kind == "triton" and backend.shared_memory:
                found = "a Triton elsewhere, which this pod's memory does not reach"
                yield document.fault((*at, "shared_memory"), found, remedy="leave it out")


def in_scratch(server: dict[str, Any]) -> dict[str, Any]:
    """A section `server`, whose folders are moved to where a container may write."""
    found = {key: value for key, value in server.items() if key != "run_dir"}
    return found | {"state_dir": f"{_SCRATCH}/state"} if found.get("state_dir") else found


def _server(section: dict[str, Any], config: Config) -> dict[str, Any]:
    # Its pods are the processes that listen: as many in each of them would share the cores and the memory of one.
    found = {key: value for key, value in in_scratch(section).items() if key != "ingress_replicas"}
    found |= {"host": "0.0.0.0", "http_port": config.server.http_port, "grpc_port": config.server.grpc_port}
    if config.server.tls is not None:
        found["tls"] = section["tls"] | {"certificate": f"{TLS}/tls.crt", "key": f"{TLS}/tls.key"}
    if config.server.access is not None and config.server.access.keys is not None:
        found["access"] = section["access"] | {"keys": f"{KEYS}/{KEY_FILE}"}
    return found


def _bytes(backend: dict[str, Any], folder: Path) -> int | None:
    if backend["kind"] in ("synthetic", "triton"):
        return 0
    if is_source(backend["model"]):
        return None
    return artifact_bytes(folder / str(backend["model"]))


class _Plain(yaml.SafeDumper):
    """Texts of several lines as they are, and nothing by reference."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _text)
# Texts that readers of another YAML than PyYAML's take for something else: go-yaml, which is Kubernetes' (it leaves underscores
# out before it looks for a number, and knows y and n), and those of YAML 1.2. A tag that no value has makes them quoted.
_Plain.add_implicit_resolver("!elsewhere", re.compile(r"[yYnN]$"), [*"yYnN"])
_Plain.add_implicit_resolver(
    "!elsewhere",
    re.compile(
        r"""[-+_]*(0_*[xX][\da-fA-F_]+|0_*[oO][0-7_]+|0_*[bB][01_]+
        |(\d[\d_]*(\.[\d_]*)?|\.[\d_]+)([eE][-+_]*\d[\d_]*)?
        |\d[\d_]*(:\d[\d_]*)+(\.[\d_]*)?  # of base 60
        |\d{4}-\d\d?-\d\d?([Tt\s].*)?)$""",
        re.ASCII | re.VERBOSE,
    ),
    [*"-+.0123456789"],
)
