"""A configuration on a Ray cluster of unlike nodes: the nodes each replica needs, and the application that is put onto them.

What leads a replica to its node are resources: nodes that listen have `gateway_ingress`; a backend that runs in replicas of its
own states what it takes, and a node of it has just that.

One ingress runs on each node that listens, of each version. The application is deployed before all nodes are there, and Serve
spreads replicas only over those that are: without that bound, all would end on the first. An upgrade starts the new one beside
the old, on the same ports: no client has to find another node, and none has to be had. So a node that listens has room for two,
but not devices for two: where an ingress asks for a whole one, the old one ends first.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any, Final

from gateway.config import AnyBackend, Backend, Config
from gateway.deploying.contents import Contents
from gateway.deploying.needs import GIB, Needs, cores_of, gpus_of, neuron_cores_of, of_ingress, of_replica
from gateway.errors import ConfigError

RAY_VERSION: Final = "2.60.0"  # of pyproject.toml
INGRESS_RESOURCE: Final = "gateway_ingress"  # a resource of the nodes that may run ingress replicas
LISTENS: Final = "ingress"  # the group of nodes that do; on machines, the head as well
GCS_PORT, CLIENT_PORT, DASHBOARD_PORT = 6379, 10001, 8265
AGENT_PORT: Final = 52365  # Ray's agent on each node, which tells whether the node is well
HEAD: Final = Needs(cores=1, memory_bytes=4 * GIB)
# GCS, Ray's metrics as KubeRay starts them, dashboard, agent; Ray's clients and workers (docs.ray.io, Configuring Ray: Ports).
_PORTS: Final = frozenset((GCS_PORT, 8080, DASHBOARD_PORT, AGENT_PORT, *range(CLIENT_PORT, 20000)))
_QUIET: Final = {"log_level": "WARNING", "enable_access_log": False}


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Nodes of one backend, each of which runs one replica of it. stated: the resources that it asks Ray for."""

    name: str
    backend: AnyBackend
    needs: Needs
    least: int
    most: int
    stated: dict[str, float]


def check_fit(held: Contents, instead: str) -> None:
    """Refuse what nodes have already, or are not made for. instead of ports: what else would do. Raises: ConfigError."""
    if (per_node := held.config.server.ingress_replicas_per_node) not in (None, 1):
        remedy = "ingress_replicas makes more nodes that listen"
        raise ConfigError(
            f"server.ingress_replicas_per_node: {per_node}: expected 1 or null, as nodes are made for one: {remedy}"
        )
    given = [("server.ingress_resources", held.config.server.ingress_resources)]
    for model in held.config.models:
        given += [(f"model '{model.name}': backend {each.label}: resources", each.resources) for each in model.backends]
    for key, name in ((key, name) for key, resources in given for name in resources):
        if name == INGRESS_RESOURCE or name.startswith("node:"):  # which Ray gives
            raise ConfigError(f"{key}: '{name}': is a name that nodes have by themselves: expected another")
    for key in ("http_port", "grpc_port"):
        port = getattr(held.config.server, key)
        if port in _PORTS:
            raise ConfigError(f"server.{key}: {port}: Ray's own on its nodes: expected another, such as 8000{instead}")


def ingress_needs(held: Contents, memory_bytes: int | None) -> Needs:
    """Of a node that listens. memory_bytes: None: as it needs. Raises: ConfigError."""
    needs = of_ingress(held.config, held.bytes, memory_bytes)
    beside = 2 if surges(held.config) else 1
    asked = asked_by_ingress(held.config)
    own_bytes = needs.memory_bytes if memory_bytes is not None else beside * needs.memory_bytes
    return _with_ray(
        Needs(
            needs.cores,
            max(own_bytes, math.ceil(beside * asked.get("memory", 0))),
            max(needs.gpus, math.ceil(asked.get("num_gpus", 0))),
            max(needs.neuron_cores, int(asked.get("neuron_cores", 0))),
        ),
        memory_bytes,
    )


def replica_groups(held: Contents, memory_bytes: int | None) -> list[ReplicaGroup]:
    """Of all backends in replicas of their own. Raises: ConfigError."""
    found: list[ReplicaGroup] = []
    for model, sizes in zip(held.config.models, held.bytes, strict=True):
        for backend, size in zip(model.backends, sizes, strict=True):
            if backend.placement != "replicas":
                continue
            scaling = backend.autoscaling
            least, most = (scaling.min_replicas, scaling.max_replicas) if scaling is not None else (backend.replicas,) * 2
            needs = _with_ray(of_replica(model.name, backend, size, memory_bytes), memory_bytes)
            plain = _plain(f"{model.name}-{model.version}-{backend.label}")
            used = {LISTENS, *(group.name for group in found)}
            names = chain([plain], (f"{plain}-{number}" for number in count(2)))
            name = next(name for name in names if name not in used)
            # An upgrade starts the new replica beside the old.
            found.append(ReplicaGroup(name, backend, needs, least, most + (1 if backend.surge else 0), stated_by(backend)))
    return found


def application(held: Contents, ingress_replicas: int) -> dict[str, Any]:
    """The Serve configuration: what it states as resources leads each replica to the nodes that were made for it."""
    models = [
        {**raw, "backends": [_placed(entry, backend) for entry, backend in zip(raw["backends"], model.backends, strict=True)]}
        for raw, model in zip(held.value["models"], held.config.models, strict=True)
    ]
    surge = surges(held.config)
    server = held.value["server"] | {
        "ingress_replicas": ingress_replicas,
        "ingress_replicas_per_node": 1,
        "ingress_resources": asked_by_ingress(held.config) | {INGRESS_RESOURCE: 0.5 if surge else 1.0},
        "ingress_surge": surge,
    }
    return {
        "proxy_location": "Disabled",
        "logging_config": dict(_QUIET),
        "applications": [
            {
                "name": held.config.ray.application,
                "route_prefix": None,
                "import_path": "gateway.app:build",
                "args": held.value | {"server": server, "models": models},
            }
        ],
    }


def asked_by_ingress(config: Config) -> dict[str, float]:
    """With all that it embeds. No cores, of which its node is made: of a GPU, Ray must know, which hides it from others."""
    embedded = [backend for model in config.models for backend in model.backends if backend.placement == "embedded"]
    found = dict(config.server.ingress_resources)
    for backend in embedded:
        cores = neuron_cores_of(backend)
        for key, value in (({"neuron_cores": cores} if cores else {}) | backend.resources).items():
            found[key] = found.get(key, 0) + value
    # Backends that do not say how much of a GPU they take share those that they name.
    named = max((gpus_of(backend) for backend in embedded if "num_gpus" not in backend.resources), default=0)
    if named:
        found["num_gpus"] = max(found.get("num_gpus", 0), named)
    if found.get("num_gpus", 0) > 1:  # of which Ray gives no parts
        found["num_gpus"] = math.ceil(found["num_gpus"])
    return {key: value for key, value in found.items() if key != "num_cpus"}


def room_for_two(config: Config, memory_bytes: int | None) -> str:
    """What to tell of what a node that listens is to have, if that is more than one ingress takes; else ""."""
    if memory_bytes is not None or not surges(config):
        return ""
    return " (for two ingresses, which an upgrade runs side by side; with server.ingress_surge: false for one)"


def surges(config: Config) -> bool:
    """Whether an upgrade starts each ingress beside the old one, on its node."""
    asked = asked_by_ingress(config)
    embedded = [backend for model in config.models for backend in model.backends if backend.placement == "embedded"]
    shared = asked.get("num_gpus", 0) <= 0.5 and not asked.get("neuron_cores")
    return shared and config.server.ingress_surge and all(backend.surge for backend in embedded)


def without_surge(config: Config, ingress_replicas: int) -> str:
    """What to tell of upgrades where they have no room for a second ingress on a node; "": they have."""
    if surges(config):
        return ""
    left = ingress_replicas - max(1, ingress_replicas // 5)  # of Serve's rolling_update_percentage
    return (
        f"Note: an upgrade ends ingresses before it starts their successors, so that {left} of {ingress_replicas} answer"
        " meanwhile: `surge` or server.ingress_surge is false, or a node has no second device."
    )


def offered_to_ingress(config: Config) -> dict[str, int]:
    """What a node that listens has, as `offered`."""
    beside = 2 if surges(config) else 1
    return {INGRESS_RESOURCE: 1} | offered({key: beside * value for key, value in asked_by_ingress(config).items()})


def offered(asked: Mapping[str, float]) -> dict[str, int]:
    """What a node for this has, beside cores and devices: whole numbers, of which replicas may ask for parts."""
    return {key: math.ceil(value) for key, value in asked.items() if key not in ("num_cpus", "num_gpus", "neuron_cores")}


def stated_by(backend: Backend) -> dict[str, float]:
    """What each replica of it is to ask for."""
    counts = (("num_gpus", gpus_of(backend)), ("neuron_cores", neuron_cores_of(backend)))
    cores = math.ceil(backend.resources.get("num_cpus", cores_of(backend)))
    # All that its node has: no second one fits beside it.
    return {key: count for key, count in counts if count} | backend.resources | {"num_cpus": max(1, cores)}


def _plain(label: str) -> str:
    """Of the characters that names of nodes have."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")[:36].rstrip("-")


def _placed(entry: dict[str, Any], backend: Backend) -> dict[str, Any]:
    if backend.placement == "embedded":  # for which the ingress asks
        return {key: value for key, value in entry.items() if key != "resources"}
    return entry | {"resources": stated_by(backend)}


def _with_ray(needs: Needs, memory_bytes: int | None) -> Needs:
    """Ray's processes on the node come on top, unless the memory was given."""
    return needs if memory_bytes is not None else replace(needs, memory_bytes=needs.memory_bytes + GIB)
