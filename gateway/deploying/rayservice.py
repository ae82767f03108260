"""The gateway on KubeRay: a head that runs nothing, pods of ingress replicas, and pods of backends' replicas, one for each.

Source: RayService of KubeRay 1.7, and what its operator makes of one.
"""

import json
import math
import re
from collections.abc import Container
from dataclasses import replace
from itertools import chain, count
from typing import Any, Final

from gateway.config import Backend
from gateway.deploying.contents import Contents, as_yaml
from gateway.deploying.kubernetes import disruption_budget, monitored, service
from gateway.deploying.needs import GIB, Needs, cores_of, gpus_of, neuron_cores_of, of_ingress, of_replica
from gateway.deploying.pod import (
    READY,
    SCRATCH,
    SCRATCH_MOUNT,
    SECURITY,
    Manifest,
    Rollout,
    environment,
    environment_of,
    fetching,
    grace_s,
    labels,
    leaving,
    metadata,
    mounts,
    placing,
    ports,
    probe,
    resources,
    security,
    volumes,
)
from gateway.errors import ConfigError

RAY_VERSION: Final = "2.60.0"  # of pyproject.toml
_SERVE: Final = "serve"  # the port by which KubeRay knows that a pod answers requests
_INGRESS: Final = "gateway_ingress"  # a resource of the pods that may run ingress replicas
_COMPONENT: Final = "app.kubernetes.io/component"
_AGENT_PORT: Final = 52365  # Ray's agent on each node, which tells whether the node is well
_DASHBOARD_PORT: Final = 8265
# GCS, Ray's metrics as KubeRay starts them, dashboard, agent; Ray's clients and workers (docs.ray.io, Configuring Ray: Ports).
_PORTS_OF_RAY: Final = frozenset((6379, 8080, _DASHBOARD_PORT, _AGENT_PORT, *range(10001, 20000)))
_HEAD: Final = Needs(cores=1, memory_bytes=4 * GIB)
# As docs/deploy.md has it of nodes; Ray writes below its home.
_ENVIRONMENT: Final = {"HOME": "/tmp", "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
_QUIET: Final = {"log_level": "WARNING", "enable_access_log": False}


def rayservice(held: Contents, rollout: Rollout) -> list[Manifest]:
    """Raises: ConfigError."""
    _check_ports(held)
    apart = [
        (model, backend, size)
        for model, sizes in zip(held.config.models, held.bytes, strict=True)
        for backend, size in zip(model.backends, sizes, strict=True)
        if backend.placement == "replicas"
    ]
    groups = [_ingress_group(held, rollout)]
    for model, backend, size in apart:
        needs = _with_ray(of_replica(model.name, backend, size, rollout.memory_bytes), rollout)
        name = _group_name(f"{model.name}-{model.version}-{backend.label}", {group["groupName"] for group in groups})
        groups.append(_group(name, backend, needs, held, rollout))
    grown = {"enableInTreeAutoscaling": True, "autoscalerOptions": {"securityContext": dict(SECURITY)}} if apart else {}
    cluster = {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token"},
        **grown,
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},  # KubeRay's operator asks there
            "template": _pod(held, rollout, "head", _HEAD, {"ports": ports(held, _SERVE)}, token=bool(apart)),
        },
        "workerGroupSpecs": groups,
    }
    spec = {
        "excludeHeadPodFromServeSvc": True,
        "serveConfigV2": as_yaml(_application(held, rollout)),
        "rayClusterConfig": cluster,
    }
    selected = labels(rollout) | {_COMPONENT: "ingress"}
    return [
        {"apiVersion": "ray.io/v1", "kind": "RayService", "metadata": metadata(rollout), "spec": spec},
        service(held, rollout, selected),
        _network_policy(held, rollout),
        # Of pods whose owner has no scale, only a number that is to stay can be asked for.
        disruption_budget(rollout, selected, {"minAvailable": rollout.replicas - 1}),
        *monitored(held, rollout, selected, _SERVE),
    ]


def _check_ports(held: Contents) -> None:
    for key in ("http_port", "grpc_port"):
        port = getattr(held.config.server, key)
        if port in _PORTS_OF_RAY:
            raise ConfigError(f"server.{key}: {port}: Ray's own on its nodes: expected another, such as 8000, or --no-ray")


def _network_policy(held: Contents, rollout: Rollout) -> Manifest:
    """Ray's own ports are for its nodes: who reaches them with the token runs code there. The operator asks the dashboard."""
    open_to_all = [port["containerPort"] for port in ports(held)] + [_DASHBOARD_PORT]
    spec = {
        "podSelector": {"matchLabels": labels(rollout)},
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": {"matchLabels": labels(rollout)}}]},
            {"ports": [{"port": port, "protocol": "TCP"} for port in open_to_all]},
        ],
    }
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata(rollout), "spec": spec}


def _with_ray(needs: Needs, rollout: Rollout) -> Needs:
    """Ray's processes on the node come on top, unless the memory was given."""
    return needs if rollout.memory_bytes is not None else replace(needs, memory_bytes=needs.memory_bytes + GIB)


def _ingress_group(held: Contents, rollout: Rollout) -> Manifest:
    needs = _with_ray(of_ingress(held.config, held.bytes, rollout.memory_bytes), rollout)
    ready = {"readinessProbe": probe(held, READY, failures=1, port=_SERVE), "ports": ports(held, _SERVE)}
    return {
        "groupName": "ingress",
        "replicas": rollout.replicas,
        "minReplicas": rollout.replicas,
        "maxReplicas": rollout.replicas,
        "rayStartParams": {"num-cpus": "0", "resources": _quoted({_INGRESS: 1})},
        "template": _pod(held, rollout, "ingress", needs, ready, cpu=rollout.cpu),
    }


def _group_name(label: str, taken: Container[str]) -> str:
    """Of a backend, of the characters that names of pods have; no other group has it."""
    plain = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")[:36].rstrip("-")
    return next(name for name in chain([plain], (f"{plain}-{number}" for number in count(2))) if name not in taken)


def _group(name: str, backend: Backend, needs: Needs, held: Contents, rollout: Rollout) -> Manifest:
    scaling = backend.autoscaling
    least = scaling.min_replicas if scaling is not None else backend.replicas
    most = scaling.max_replicas if scaling is not None else backend.replicas
    stated = _stated(backend)
    own = {key: value for key, value in stated.items() if key not in ("num_cpus", "num_gpus", "memory", "neuron_cores")}
    params = {"num-cpus": str(stated["num_cpus"])} | ({"resources": _quoted(own)} if own else {})
    return {
        "groupName": name,
        "replicas": least,
        "minReplicas": least,
        "maxReplicas": most + (1 if backend.surge else 0),  # an upgrade starts the new replica beside the old
        "rayStartParams": params,
        "template": _pod(held, rollout, "backend", needs, {"readinessProbe": _node_probe()}),
    }


def _pod(
    held: Contents,
    rollout: Rollout,
    component: str,
    needs: Needs,
    own: Manifest,
    *,
    cpu: str | None = None,
    token: bool = False,
) -> Manifest:
    """own: of its container. token: the cluster's autoscaler runs in it, which speaks to Kubernetes."""
    told = labels(rollout) | {_COMPONENT: component}
    listens, serves = component == "ingress", component != "head"  # which holds Ray's state, and runs none of ours
    rights = security(rollout if serves else replace(rollout, service_account=""))
    if token:
        del rights["automountServiceAccountToken"]
    own_container = {
        "name": "ray",
        "image": rollout.image,
        **(environment(held, rollout, **_ENVIRONMENT) if listens else environment_of(_ENVIRONMENT)),
        "livenessProbe": _node_probe(),
        "lifecycle": leaving(),
        "resources": resources(needs, cpu),
        "securityContext": dict(SECURITY),
        "volumeMounts": (mounts(held, rollout, configuration=False, secrets=listens) if serves else [dict(SCRATCH_MOUNT)]),
        **own,
    }
    spec = {
        **rights,
        "terminationGracePeriodSeconds": grace_s(held, on_ray=True),
        **placing(needs, told),
        **(fetching(rollout) if serves else {}),
        "containers": [own_container],
        "volumes": volumes(held, rollout, configuration=False, secrets=listens) if serves else [dict(SCRATCH)],
    }
    return {"metadata": {"labels": told}, "spec": spec}


def _node_probe() -> Manifest:
    """Whether Ray's processes of the node are well: Serve itself looks after those of the gateway."""
    asked = {"path": "/api/healthz", "port": _AGENT_PORT}
    return {"httpGet": asked, "initialDelaySeconds": 10, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 24}


def _application(held: Contents, rollout: Rollout) -> Manifest:
    """The Serve configuration: what it states as resources leads each replica to the pods that were made for it."""
    models = [
        {**raw, "backends": [_placed(entry, backend) for entry, backend in zip(raw["backends"], model.backends, strict=True)]}
        for raw, model in zip(held.value["models"], held.config.models, strict=True)
    ]
    on_ingress = dict(held.config.server.ingress_resources) | {_INGRESS: 0.001}
    server = held.value["server"] | {"ingress_replicas": rollout.replicas, "ingress_resources": on_ingress}
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


def _placed(entry: dict[str, Any], backend: Backend) -> dict[str, Any]:
    return entry | ({"resources": stated} if (stated := _stated(backend)) else {})


def _stated(backend: Backend) -> dict[str, float]:
    """What it is to state. A pod is the cores of what it embeds: of a GPU, Ray must know, which hides it from others."""
    devices = {
        key: count for key, count in (("num_gpus", gpus_of(backend)), ("neuron_cores", neuron_cores_of(backend))) if count
    }
    if backend.placement == "embedded":
        return devices | {key: value for key, value in backend.resources.items() if key != "num_cpus"}
    cores = math.ceil(backend.resources.get("num_cpus", cores_of(backend)))
    return devices | backend.resources | {"num_cpus": max(1, cores)}  # all that its pod has: no second one fits beside it


def _quoted(own: dict[str, float]) -> str:
    """As `ray start` is given it in a shell."""
    return f"'{json.dumps(own)}'"
