"""What a pod holds: the configuration as it stands there, and the files that it names, below one folder.

Relative paths of a configuration lead to what is put in the pod's folder of models, each where it stood beside the others.
Absolute ones are left alone: they are the image's. Of secrets only the places are written; nobody reads them.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from backends.artifacts import ONNX, identify
from backends.onnx_file import weights_beside
from backends.source import is_source
from gateway.config import Config, config_of, located_backend
from gateway.documents.faults import ConfigFaults, Fault, Location
from gateway.documents.reader import Document

CONFIGURATION: Final = "/etc/gateway/gateway.yaml"
TLS: Final = "/etc/gateway-tls"
KEYS: Final = "/etc/gateway-keys"
KEY_FILE: Final = "keys.yaml"
MODELS: Final = "/mnt/models"  # as KServe has it
_SCRATCH: Final = "/tmp"  # all that a pod may write to
_OPTIONS: Final = ("class_options", "factory_options")


@dataclass(frozen=True, slots=True)
class Contents:
    """config: as it was read. value: as it stands in the pod. root: the folder here whose files the pod's has, if it has any.

    names: those of them that the configuration names, from there. bytes: of each model's backends, what its artifact takes on
    disk; None: that cannot be told.
    """

    config: Config
    value: dict[str, Any]
    root: Path
    names: tuple[str, ...]
    bytes: tuple[tuple[int | None, ...], ...]

    @property
    def text(self) -> str:
        return as_yaml(self.value)


def as_yaml(value: object) -> str:
    return yaml.dump(value, Dumper=_Plain, sort_keys=False, width=1 << 16, allow_unicode=True)


def contents(document: Document, models: str = MODELS) -> Contents:
    """models: the pod's folder of models. Raises: ConfigFaults."""
    config = config_of(document)
    if faults := [*_unfit(document, config)]:
        raise ConfigFaults(faults)
    found = _Moved((document.folder or Path()).absolute(), models)
    value = {key: section for key, section in document.value.items() if key not in ("server", "ray", "models")}
    server = _server(document.value.get("server") or {}, config)
    served = [
        {**model, "backends": [found.backend(backend) for backend in model["backends"]]} for model in document.value["models"]
    ]
    found.settle()
    kept = {"server": server, **value, "models": served}
    return Contents(config, kept, found.root, found.names, artifact_sizes(document))


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


def _server(section: dict[str, Any], config: Config) -> dict[str, Any]:
    # Its pods are the processes that listen: as many in each of them would share the cores and the memory of one.
    found = {key: value for key, value in section.items() if key not in ("run_dir", "state_dir", "ingress_replicas")}
    found |= {"host": "0.0.0.0", "http_port": config.server.http_port, "grpc_port": config.server.grpc_port}
    if config.server.state_dir is not None:
        found["state_dir"] = f"{_SCRATCH}/state"
    if config.server.tls is not None:
        found["tls"] = section["tls"] | {"certificate": f"{TLS}/tls.crt", "key": f"{TLS}/tls.key"}
    if config.server.access is not None and config.server.access.keys is not None:
        found["access"] = section["access"] | {"keys": f"{KEYS}/{KEY_FILE}"}
    return found


@dataclass(slots=True)
class _Moved:
    """Backends whose paths become the pod's, once all were seen.

    _places: where one is to be written: in what, its key, and what follows it there. _beside: files that options name.
    """

    folder: Path
    models: str
    root: Path = Path()
    names: tuple[str, ...] = ()
    _places: list[tuple[dict[str, Any], str, Path, str]] = field(default_factory=list)
    _beside: list[Path] = field(default_factory=list)

    def backend(self, backend: dict[str, Any]) -> dict[str, Any]:
        counted, elsewhere = (located_backend(backend, folder) for folder in (self.folder, self.folder / "elsewhere"))
        found = {key: value for key, value in backend.items() if key != "build"}
        for key in ("model", "engines"):
            if counted.get(key) != elsewhere.get(key):
                place, _, name = counted[key].rpartition(":") if is_source(counted[key]) else (counted[key], "", "")
                self._places.append((found, key, Path(place), f":{name}" if name else ""))
                for option in _OPTIONS:
                    self._beside += _named(found.get(option), Path(place).parent)
        if found["kind"] == "tensorrt" and not found.get("engines"):
            found["engines"] = f"{_SCRATCH}/engines"  # beside the file nothing can be written
        return found

    def settle(self) -> None:
        files = [*(path for _, _, path, _ in self._places), *self._beside]
        self.root = Path(os.path.commonpath([path.parent for path in files])) if files else self.folder
        self.names = tuple(dict.fromkeys(path.relative_to(self.root).as_posix() for path in files))
        for backend, key, path, rest in self._places:
            backend[key] = f"{self.models}/{path.relative_to(self.root).as_posix()}{rest}"


def _named(value: Any, folder: Path) -> Iterator[Path]:
    """The files that options name from the code's folder, as `gateway package` takes them."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _named(part, folder)
    elif isinstance(value, str) and value and not os.path.isabs(value):
        path = Path(os.path.normpath(folder / value))
        if not folder.is_relative_to(path) and path.exists():
            yield path


def _bytes(backend: dict[str, Any], folder: Path) -> int | None:
    if backend["kind"] in ("synthetic", "triton"):
        return 0
    if is_source(backend["model"]):
        return None
    path = folder / str(backend["model"])
    if path.is_file():
        beside = weights_beside(path) if identify(path) == ONNX else ()
        return sum(file.stat().st_size for file in (path, *(path.parent / name for name in beside)) if file.is_file())
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) or None


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
