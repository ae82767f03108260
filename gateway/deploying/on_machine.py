"""A configuration as a machine of its own has it: secrets where systemd puts them, its state where the service may write."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from email import message_from_bytes
from pathlib import Path
from typing import Any, Final
from zipfile import ZipFile

from backends import BACKENDS
from gateway.config import Config
from gateway.deploying.preflight import Obstacle
from gateway.deploying.systemd_unit import CREDENTIALS, STATE
from gateway.documents.faults import Fault
from gateway.documents.reader import Document

# Section and key of a file that is a secret, or belongs to one -> its name on the machine.
SECRETS: Final = {
    ("tls", "certificate"): "tls.crt",
    ("tls", "key"): "tls.key",
    ("tls", "client_ca"): "client-ca.crt",
    ("access", "keys"): "keys.yaml",
}


def secrets_of(config: Config) -> dict[str, str]:
    """Names of the files that it reads as secrets -> the keys that name them."""
    sections = {"tls": config.server.tls, "access": config.server.access}
    return {
        name: f"server.{section}.{key}"
        for (section, key), name in SECRETS.items()
        if getattr(sections[section], key, None) is not None
    }


def unfit(document: Document, config: Config, *, reached: bool) -> Iterator[Fault]:
    """What such a machine cannot serve. reached: from elsewhere."""
    server = config.server
    if server.access is not None and server.access.keys_variable is not None:
        found = "a variable that the service does not have"
        yield document.fault(("server", "access", "keys_variable"), found, remedy="name `keys` instead")
    if reached:
        for key in ("http_port", "grpc_port"):
            if getattr(server, key) == 0:
                found = "no port that could be opened in advance"
                yield document.fault(("server", key), found, expected="a port, 1 to 65535, or null")
    for number, model in enumerate(config.models):
        for index, backend in enumerate(model.backends):
            if backend.kind == "triton" and backend.shared_memory:
                found = "a Triton elsewhere, which this machine's memory does not reach"
                at = ("models", number, "backends", index, "shared_memory")
                yield document.fault(at, found, remedy="leave it out")


def moved(document: Document, instance_type: str) -> Document:
    """The same, as it stands on the machine. Whose files are packed keep their paths.

    Beside them nothing can be written: TensorRT's engines, unless they are named, are kept with the state.
    """
    value: dict[str, Any] = document.value
    given: Mapping[str, Any] = value.get("server") or {}
    server = {key: part for key, part in given.items() if key != "run_dir"}
    if server.get("state_dir"):
        server["state_dir"] = f"{STATE}/state"
    server.setdefault("instance_type", instance_type)
    for (section, key), name in SECRETS.items():
        if isinstance(part := server.get(section), dict) and part.get(key) is not None:
            server[section] = part | {key: f"{CREDENTIALS}/{name}"}
    models = [{**model, "backends": [*map(_with_engines, model["backends"])]} for model in value["models"]]
    return replace(document, value=value | {"server": server, "models": models})


def _with_engines(backend: dict[str, Any]) -> dict[str, Any]:
    if backend["kind"] != "tensorrt" or backend.get("engines"):
        return backend
    return backend | {"engines": f"{STATE}/engines"}


def required_by(wheel: Path) -> list[str]:
    """The libraries that a wheel requires by itself, as it calls them."""
    with ZipFile(wheel) as archive:
        texts = [archive.read(name) for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    told = [each for text in texts for each in message_from_bytes(text).get_all("Requires-Dist", [])]
    return [re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in told if "extra ==" not in each]


def lacking(kinds: Iterable[str], lock: str, *, neuron: bool, required: Iterable[str] = ()) -> Iterator[Obstacle]:
    """Libraries that the lock does not install.

    kinds: of backend, that run there. neuron: its image brings PyTorch, and the NumPy of that. required: by the wheel.
    """
    lines = [line for line in lock.replace("\\\n", " ").splitlines() if "==" in line and not line.lstrip().startswith("#")]
    named = {_bare(line.partition("==")[0]) for line in lines}
    own = "docker/locks.sh makes one of your own"
    remedy = f"docker/requirements-cuda.lock has PyTorch and ONNX Runtime, {own}"
    for kind in sorted(set(kinds)):
        library = BACKENDS[kind].library[0]
        brought = neuron and library.startswith("torch")
        if library and not brought and not {library, f"{library}-gpu"} & named:
            yield Obstacle("--lock", f"installs no {library}", f"it, for the backends of kind {kind}", remedy)
    if missing := [name for name in required if _bare(name) not in named and not (neuron and name == "numpy")]:
        yield Obstacle("--lock", f"installs no {', '.join(missing)}", "what the gateway's wheel requires", own)
    if any("--hash=" not in line for line in lines):
        yield Obstacle("--lock", "names libraries without their hashes", "--hash=sha256:… of each", own)


def _bare(name: str) -> str:
    """As all spellings of a project's name are compared (PEP 503); without extras."""
    return re.sub(r"[-_.]+", "-", name.partition("[")[0].strip()).lower()
