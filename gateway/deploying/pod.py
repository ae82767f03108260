"""A pod of the gateway on Kubernetes: its container, what is mounted, how it is asked, how it ends, and what it may do."""

import hashlib
import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

from gateway.deploying import contents
from gateway.deploying.contents import Contents
from gateway.deploying.needs import Needs, needs_low_port

Manifest = dict[str, Any]

LIVE, READY, METRICS = "/v2/health/live", "/v2/health/ready", "/metrics"
HTTP, GRPC = "http", "grpc"  # ports, by name
_USER: Final = 1000  # of docker/Dockerfile
# Until a pod that is to end has left everybody's lists: its address is taken off them while SIGTERM is on its way.
_LEAVES_S: Final = 5
_ENDS_S: Final = 5  # at most 3 after the drain: docs/deploy.md
STARTS_S: Final = 600  # models to be loaded
_PERIOD_S: Final = 5

SECURITY: Final = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
POD_SECURITY: Final = {
    "runAsNonRoot": True,
    "runAsUser": _USER,
    "runAsGroup": _USER,
    "fsGroup": _USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
SCRATCH: Final[Manifest] = {"name": "scratch", "emptyDir": {}}
SCRATCH_MOUNT: Final = {"name": "scratch", "mountPath": "/tmp"}
# One of the safe sysctls, which every cluster lets a pod set. Some runtimes set it themselves: containerd since 2.0.
_LOW_PORTS: Final = {"sysctls": [{"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}]}
_GPU, _NEURON = "nvidia.com/gpu", "aws.amazon.com/neuroncore"
_TAINTS: Final = {_GPU: "nvidia.com/gpu", _NEURON: "aws.amazon.com/neuron"}


@dataclass(frozen=True, slots=True)
class Models:
    """How models get into a pod.

    kind: "image": they are in it, at `place`; "pvc": `place` is a claim, `folder` one in it; "s3": a URL, from where
    a container of the image `fetcher` copies them before the gateway starts; "kserve": a URI, from where KServe does.
    """

    kind: str
    place: str
    folder: str = ""
    fetcher: str = ""


@dataclass(frozen=True, slots=True)
class Rollout:
    """What is to run. memory_bytes, cpu: None: as the configuration needs. namespace, service_account: "": none is named.

    replicas: pods that listen, up to max_replicas: scaled by requests_per_second of one; None: by how busy it is.
    """

    name: str
    image: str
    models: Models
    replicas: int
    max_replicas: int
    _: KW_ONLY
    requests_per_second: float | None = None
    memory_bytes: int | None = None
    cpu: str | None = None
    namespace: str = ""
    service_account: str = ""


def labels(rollout: Rollout) -> dict[str, str]:
    """By which the pods of one deployment are told from all others."""
    return {"app.kubernetes.io/name": "serving-gateway", "app.kubernetes.io/instance": rollout.name}


def metadata(rollout: Rollout, name: str = "", **more: Any) -> Manifest:
    namespace = {"namespace": rollout.namespace} if rollout.namespace else {}
    return {"name": name or rollout.name, **namespace, "labels": labels(rollout), **more}


def config_map(held: Contents, rollout: Rollout) -> Manifest:
    data = {contents.CONFIGURATION.rpartition("/")[2]: held.text}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(rollout, f"{rollout.name}-config"), "data": data}


def digest(held: Contents) -> dict[str, str]:
    """An annotation by which pods are replaced when their configuration changes."""
    return {"serving-gateway/configuration": hashlib.sha256(held.text.encode()).hexdigest()[:16]}


def security(held: Contents, rollout: Rollout) -> Manifest:
    """Of a pod. A service account's own projected tokens, such as a cloud's, are not its token for this cluster."""
    account = {"serviceAccountName": rollout.service_account} if rollout.service_account else {}
    low_ports = _LOW_PORTS if needs_low_port(held.config) else {}
    return {"automountServiceAccountToken": False, **account, "securityContext": {**POD_SECURITY, **low_ports}}


def container(name: str, held: Contents, rollout: Rollout, needs: Needs) -> Manifest:
    """The gateway in one process, as docker/entrypoint.sh starts it."""
    return {
        "name": name,
        "image": rollout.image,
        "args": ["serve", contents.CONFIGURATION, "--no-ray"],
        "ports": ports(held),
        **environment(held, rollout),
        "startupProbe": probe(held, LIVE, failures=STARTS_S // _PERIOD_S),
        "livenessProbe": probe(held, LIVE, failures=3, period_s=10),
        "readinessProbe": probe(held, READY, failures=1),
        "lifecycle": leaving(),
        "resources": resources(needs, rollout.cpu),
        "securityContext": dict(SECURITY),
        "volumeMounts": mounts(held, rollout),
    }


def ports(held: Contents, http: str = HTTP) -> list[Manifest]:
    """http: the name of that port."""
    server = held.config.server
    found = [{"name": http, "containerPort": server.http_port}]
    return found + ([{"name": GRPC, "containerPort": server.grpc_port}] if server.grpc_port is not None else [])


def environment(held: Contents, rollout: Rollout, **more: str) -> Manifest:
    """more: variables beside the one that holds keys, if the configuration names it."""
    access = held.config.server.access
    found: list[Manifest] = environment_of(more)["env"]
    if access is not None and access.keys_variable is not None:
        key = {"name": f"{rollout.name}-keys", "key": contents.KEY_FILE}
        found.append({"name": access.keys_variable, "valueFrom": {"secretKeyRef": key}})
    return {"env": found} if found else {}


def environment_of(variables: dict[str, str]) -> Manifest:
    return {"env": [{"name": name, "value": value} for name, value in variables.items()]}


def probe(held: Contents, path: str, *, failures: int, period_s: int = _PERIOD_S, port: int | str = HTTP) -> Manifest:
    scheme = {"scheme": "HTTPS"} if held.config.server.tls is not None else {}
    asked = {"path": path, "port": port, **scheme}
    return {"httpGet": asked, "periodSeconds": period_s, "timeoutSeconds": 2, "failureThreshold": failures}


def leaving() -> Manifest:
    return {"preStop": {"exec": {"command": ["sleep", str(_LEAVES_S)]}}}


def grace_s(held: Contents, *, on_ray: bool = False) -> int:
    """How long a pod may take to end: see docs/deploy.md."""
    drain_s = held.config.server.drain_timeout_s
    return math.ceil(_LEAVES_S + (2 * drain_s + 10 + _ENDS_S if on_ray else drain_s + _ENDS_S))


def ray_drains_s(held: Contents) -> int:
    """How long `ray start` may let what runs on its node end, at SIGTERM: 30 s unless it is told."""
    return grace_s(held, on_ray=True) - _LEAVES_S - _ENDS_S


def resources(needs: Needs, cpu: str | None = None) -> Manifest:
    """Memory is held to what is asked for; cores are not, as a batch that waits for its share of a core is late."""
    memory = f"{math.ceil(needs.memory_bytes / (1 << 20))}Mi"
    devices = {key: count for key, count in ((_GPU, needs.gpus), (_NEURON, needs.neuron_cores)) if count}
    return {
        "requests": {"cpu": cpu or str(needs.cores), "memory": memory, **devices},
        "limits": {"memory": memory, **devices},
    }


def placing(needs: Needs, selected: dict[str, str]) -> Manifest:
    """Pods on nodes of their own, where there are some, and on those with the devices. selected: labels of what is spread."""
    devices = [taint for key, taint in _TAINTS.items() if (needs.gpus if key == _GPU else needs.neuron_cores)]
    tolerations = [{"key": taint, "operator": "Exists", "effect": "NoSchedule"} for taint in devices]
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selected},
    }
    return {"topologySpreadConstraints": [spread], **({"tolerations": tolerations} if tolerations else {})}


def mounts(held: Contents, rollout: Rollout, *, configuration: bool = True, secrets: bool = True) -> list[Manifest]:
    """configuration, secrets: whether the file itself, and what it names of secrets, are among them."""
    folder = contents.CONFIGURATION.rpartition("/")[0]
    found = [{"name": "configuration", "mountPath": folder, "readOnly": True}] if configuration else []
    found.append(dict(SCRATCH_MOUNT))
    if rollout.models.kind in ("pvc", "s3"):
        sub_path = {"subPath": rollout.models.folder} if rollout.models.kind == "pvc" and rollout.models.folder else {}
        found.append({"name": "models", "mountPath": contents.MODELS, "readOnly": True, **sub_path})
    return found + [{"name": name, "mountPath": place, "readOnly": True} for name, place in _secrets(held) if secrets]


def volumes(held: Contents, rollout: Rollout, *, configuration: bool = True, secrets: bool = True) -> list[Manifest]:
    """What `mounts` names."""
    found: list[Manifest] = []
    if configuration:
        found.append({"name": "configuration", "configMap": {"name": f"{rollout.name}-config"}})
    found.append(dict(SCRATCH))
    if rollout.models.kind == "pvc":
        found.append({"name": "models", "persistentVolumeClaim": {"claimName": rollout.models.place, "readOnly": True}})
    elif rollout.models.kind == "s3":
        found.append({"name": "models", "emptyDir": {}})
    return found + [{"name": name, "secret": {"secretName": f"{rollout.name}-{name}"}} for name, _ in _secrets(held) if secrets]


def fetching(rollout: Rollout) -> Manifest:
    """The container that copies models from S3 before the gateway starts."""
    if rollout.models.kind != "s3":
        return {}
    fetch = {
        "name": "models",
        "image": rollout.models.fetcher,
        "command": ["aws"],
        # In arguments Kubernetes takes $(NAME) for a variable, and $$ for $.
        "args": ["s3", "cp", "--recursive", "--only-show-errors", rollout.models.place.replace("$", "$$"), contents.MODELS],
        "env": [{"name": "HOME", "value": "/tmp"}],
        "resources": {"requests": {"cpu": "1", "memory": "512Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": dict(SECURITY),
        "volumeMounts": [dict(SCRATCH_MOUNT), {"name": "models", "mountPath": contents.MODELS}],
    }
    return {"initContainers": [fetch]}


def _secrets(held: Contents) -> list[tuple[str, str]]:
    """The secrets that are mounted, without the deployment's name, and where."""
    server = held.config.server
    found = [("tls", contents.TLS)] if server.tls is not None else []
    return found + ([("keys", contents.KEYS)] if server.access is not None and server.access.keys is not None else [])
