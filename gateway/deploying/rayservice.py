"""The gateway on KubeRay: a head that runs nothing, pods of ingress replicas, and pods of backends' replicas, one for each.

Source: RayService of KubeRay 1.7, and what its operator makes of one.
"""

import json
import math
import re
from dataclasses import replace
from typing import Final

from gateway.deploying.contents import Contents, as_yaml
from gateway.deploying.kubernetes import disruption_budget, monitored, service
from gateway.deploying.needs import Needs
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
    leaving,
    metadata,
    mounts,
    placing,
    ports,
    probe,
    ray_drains_s,
    resources,
    security,
    volumes,
)
from gateway.deploying.ray_groups import (
    AGENT_PORT,
    CLIENT_PORT,
    DASHBOARD_PORT,
    GCS_PORT,
    HEAD,
    LISTENS,
    RAY_VERSION,
    ReplicaGroup,
    application,
    check_fit,
    ingress_needs,
    offered,
    offered_to_ingress,
    replica_groups,
)
from gateway.errors import ConfigError

_SERVE: Final = "serve"  # the port by which KubeRay knows that a pod answers requests
# It makes the head's Service of what the head lists, and asks the dashboard there.
_OF_HEAD: Final = {"gcs-server": GCS_PORT, "dashboard": DASHBOARD_PORT, "client": CLIENT_PORT}
_COMPONENT: Final = "app.kubernetes.io/component"
# In a name: it ends the shell's quotes, is taken for a variable by Kubernetes, or dropped by the autoscaler's reader.
_UNREADABLE: Final = re.compile(r"""['"\\$\x00-\x1f]""")
# As docs/deploy.md has it of nodes; Ray writes below its home.
_ENVIRONMENT: Final = {"HOME": "/tmp", "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}


def rayservice(held: Contents, rollout: Rollout) -> list[Manifest]:
    """Raises: ConfigError."""
    check_fit(held, ", or --no-ray")
    apart = replica_groups(held, rollout.memory_bytes)
    groups = [_ingress_group(held, rollout), *(_group(group, held, rollout) for group in apart)]
    grown = {"enableInTreeAutoscaling": True, "autoscalerOptions": {"securityContext": dict(SECURITY)}} if apart else {}
    of_head = ports(held, _SERVE) + [{"name": name, "containerPort": port} for name, port in _OF_HEAD.items()]
    cluster = {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token"},
        **grown,
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},  # KubeRay's operator asks there
            "template": _pod(held, rollout, "head", HEAD, {"ports": of_head}, token=bool(apart)),
        },
        "workerGroupSpecs": groups,
    }
    spec = {
        "excludeHeadPodFromServeSvc": True,
        "serveConfigV2": as_yaml(application(held, rollout.replicas)),
        "rayClusterConfig": cluster,
    }
    selected = _labels(rollout) | {_COMPONENT: "ingress"}
    return [
        {"apiVersion": "ray.io/v1", "kind": "RayService", "metadata": metadata(rollout), "spec": spec},
        service(held, rollout, selected),
        _network_policy(held, rollout),
        # Of pods whose owner has no scale, only a number that is to stay can be asked for.
        disruption_budget(rollout, selected, {"minAvailable": rollout.replicas - 1}),
        *monitored(held, rollout, selected, _SERVE),
    ]


def _labels(rollout: Rollout) -> dict[str, str]:
    """As `labels`. Their `app.kubernetes.io/name` is KubeRay's, whose Services select by it."""
    return {"app.kubernetes.io/part-of": "serving-gateway", "app.kubernetes.io/instance": rollout.name}


def _network_policy(held: Contents, rollout: Rollout) -> Manifest:
    """Ray's own ports are for its nodes: who reaches them with the token runs code there. The operator asks the dashboard."""
    open_to_all = [port["containerPort"] for port in ports(held)] + [DASHBOARD_PORT]
    spec = {
        "podSelector": {"matchLabels": _labels(rollout)},
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": {"matchLabels": _labels(rollout)}}]},
            {"ports": [{"port": port, "protocol": "TCP"} for port in open_to_all]},
        ],
    }
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata(rollout), "spec": spec}


def _ingress_group(held: Contents, rollout: Rollout) -> Manifest:
    needs = ingress_needs(held, rollout.memory_bytes)
    ready = {"readinessProbe": probe(held, READY, failures=1, port=_SERVE), "ports": ports(held, _SERVE)}
    return {
        "groupName": LISTENS,
        "replicas": rollout.replicas,
        "minReplicas": rollout.replicas,
        "maxReplicas": rollout.replicas,
        "rayStartParams": _params(0, needs, offered_to_ingress(held.config)),
        "template": _pod(held, rollout, "ingress", needs, ready, cpu=rollout.cpu),
    }


def _group(group: ReplicaGroup, held: Contents, rollout: Rollout) -> Manifest:
    return {
        "groupName": group.name,
        "replicas": group.least,
        "minReplicas": group.least,
        "maxReplicas": group.most,
        "rayStartParams": _params(math.ceil(group.stated["num_cpus"]), group.needs, offered(group.stated)),
        "template": _pod(held, rollout, "backend", group.needs, {"readinessProbe": _node_probe()}),
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
    told = _labels(rollout) | {_COMPONENT: component}
    listens, serves = component == "ingress", component != "head"  # which holds Ray's state, and runs none of ours
    rights = security(held, rollout if serves else replace(rollout, service_account=""))
    if token:
        del rights["automountServiceAccountToken"]
    drains = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(ray_drains_s(held))}
    variables = _ENVIRONMENT | (drains if serves else {})
    own_container = {
        "name": "ray",
        "image": rollout.image,
        **(environment(held, rollout, **variables) if listens else environment_of(variables)),
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
    asked = {"path": "/api/healthz", "port": AGENT_PORT}
    return {"httpGet": asked, "initialDelaySeconds": 10, "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 24}


def _params(cores: int, needs: Needs, own: dict[str, int]) -> dict[str, str]:
    """What `ray start` is given in a shell, and Ray's autoscaler reads. Raises: ConfigError.

    Memory and GPUs are known by what the pod asks for; NeuronCores to KubeRay alone.
    """
    if unreadable := [key for key in own if _UNREADABLE.search(key)]:
        expected = "expected a name without quotes, backslashes, '$' and control characters"
        raise ConfigError(f"resources: {', '.join(map(repr, unreadable))}: {expected}, as KubeRay and Ray's autoscaler read it")
    named = {"neuron_cores": needs.neuron_cores} if needs.neuron_cores else {}
    named |= {key: count for key, count in own.items() if key != "memory"}
    text = f"'{json.dumps(named, ensure_ascii=False)}'"
    return {"num-cpus": str(cores)} | ({"resources": text} if named else {})
