"""What processes need of a machine: cores, memory and accelerators, as the configuration says them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.config import Backend, Config, Neuron, OnnxRuntime, Torch, Triton
from gateway.errors import ConfigError

GIB: Final = 1 << 30
_PROCESS_BYTES: Final = GIB  # docs/deploy.md has what was measured: a process with models of this size keeps within it
_COPIES: Final = 2  # of an artifact, for each session: its file's bytes, and what a library makes of them
# Of each session's own process (isolation: process). At rest one took 150 MiB with PyTorch on CPU, 33 with ONNX Runtime.
_SESSION_BYTES: Final = 64 << 20
_TORCH_SESSION_BYTES: Final = 256 << 20
_STEP: Final = 256 << 20
_FIRST_FREE_PORT: Final = 1024  # of Linux, unless net.ipv4.ip_unprivileged_port_start says another: ip(7)


@dataclass(frozen=True, slots=True)
class Needs:
    """gpus, neuron_cores: whole ones."""

    cores: int
    memory_bytes: int
    gpus: int = 0
    neuron_cores: int = 0


def needs_low_port(config: Config) -> bool:
    """Whether it listens where only root may, or who has CAP_NET_BIND_SERVICE."""
    return any(0 < (port or 0) < _FIRST_FREE_PORT for port in (config.server.http_port, config.server.grpc_port))


def of_ingress(config: Config, sizes: Sequence[Sequence[int | None]], memory_bytes: int | None) -> Needs:
    """Of a process that listens, with the backends that it embeds. sizes, memory_bytes: as in `memory`."""
    embedded = [
        (model.name, backend, size)
        for model, known in zip(config.models, sizes, strict=True)
        for backend, size in zip(model.backends, known, strict=True)
        if backend.placement == "embedded"
    ]
    backends = [backend for _, backend, _ in embedded]
    cores = sum(map(cores_of, backends))
    if config.server.shared_workers is not None:
        cores = min(cores, config.server.shared_workers * max(map(_threads, backends), default=0))
    return Needs(
        1 + cores,  # its own, for what listens
        memory(embedded, memory_bytes),
        max([math.ceil(sum(backend.resources.get("num_gpus", 0) for backend in backends)), *map(_gpus, backends)]),
        sum(map(neuron_cores_of, backends)),
    )


def of_all(config: Config, sizes: Sequence[Sequence[int | None]], memory_bytes: int | None) -> Needs:
    """Of one machine that runs everything: what listens, and all replicas of backends. sizes, memory_bytes: as in `memory`."""
    parts = [of_ingress(config, sizes, memory_bytes)] * config.server.ingresses
    for model, known in zip(config.models, sizes, strict=True):
        for backend, size in zip(model.backends, known, strict=True):
            if backend.placement == "replicas":
                count = backend.autoscaling.max_replicas if backend.autoscaling is not None else backend.replicas
                parts += [of_replica(model.name, backend, size, memory_bytes)] * count
    return Needs(
        sum(part.cores for part in parts),
        memory_bytes if memory_bytes is not None else sum(part.memory_bytes for part in parts),
        sum(part.gpus for part in parts),
        sum(part.neuron_cores for part in parts),
    )


def of_replica(model: str, backend: Backend, size: int | None, memory_bytes: int | None) -> Needs:
    """Of one replica of a backend. Stated resources go first; the rest as for `of_ingress`."""
    stated = backend.resources
    return Needs(
        max(1, math.ceil(stated.get("num_cpus", cores_of(backend)))),
        int(stated["memory"]) if "memory" in stated else memory([(model, backend, size)], memory_bytes),
        gpus_of(backend),
        neuron_cores_of(backend),
    )


def memory(held: Iterable[tuple[str, Backend, int | None]], given_bytes: int | None) -> int:
    """What a process takes at most. held: names of models, backends, and the bytes of their artifacts; None: not known.

    Raises: ConfigError, if it was not given and cannot be told.
    """
    if given_bytes is not None:
        return given_bytes
    total = _PROCESS_BYTES
    for model, backend, size in held:
        if size is None:
            expected = "expected an amount such as 4Gi"
            raise ConfigError(f"--memory: model '{model}': what backend {backend.label} takes cannot be told here; {expected}")
        each = _COPIES * size
        if backend.isolation == "process":
            each += _TORCH_SESSION_BYTES if isinstance(backend, Torch) else _SESSION_BYTES
        total += each * backend.sessions
    return math.ceil(total / _STEP) * _STEP


def cores_of(backend: Backend) -> int:
    """Cores that its sessions keep busy."""
    return 0 if isinstance(backend, Triton) else backend.sessions * _threads(backend)


def gpus_of(backend: Backend) -> int:
    return max(math.ceil(backend.resources.get("num_gpus", 0)), _gpus(backend))


def neuron_cores_of(backend: Backend) -> int:
    stated = int(backend.resources.get("neuron_cores", 0))
    return stated or (backend.sessions if isinstance(backend, Neuron) else 0)


def _threads(backend: Backend) -> int:
    return backend.threads if isinstance(backend, Torch | OnnxRuntime) and not _gpus(backend) else 1


def _gpus(backend: Backend) -> int:
    """So many that the one it names is among them; several backends may share one."""
    return 0 if backend.gpu is None else backend.gpu + 1
