"""Manifests of a gateway on Kubernetes: a Deployment, KubeRay's RayService, or KServe's runtime, with what belongs to each.

Sources: the APIs of Kubernetes 1.37, of KServe 0.20 (ServingRuntime, InferenceService) and of prometheus-operator 0.93
(PodMonitor). docs/kubernetes.md tells what is printed, and what a cluster must have for it.
"""

from typing import Final

from gateway.deploying.contents import Contents, as_yaml
from gateway.deploying.needs import of_ingress
from gateway.deploying.pod import (
    GRPC,
    HTTP,
    METRICS,
    STARTS_S,
    Manifest,
    Rollout,
    config_map,
    container,
    digest,
    fetching,
    grace_s,
    labels,
    metadata,
    placing,
    security,
    volumes,
)
from gateway.errors import ConfigError

BUSY_SHARE: Final = 0.7  # as autoscaling.target_utilisation of the configuration
FORMAT: Final = "serving-gateway"  # what InferenceServices call models that this runtime serves
_SCRAPE: Final = "15s"
_WINDOW: Final = "1m"
# Name of the metric that the autoscaler asks for -> (series by which the adapter finds the pods, what it asks Prometheus).
_RULES: Final = {
    "gateway_busy_share": (
        "gateway_worker_busy_seconds_total",
        f"sum(rate(gateway_worker_busy_seconds_total{{<<.LabelMatchers>>}}[{_WINDOW}])) by (<<.GroupBy>>)"
        " / sum(gateway_workers{<<.LabelMatchers>>}) by (<<.GroupBy>>)",
    ),
    "gateway_requests_per_second": (
        "gateway_requests_total",
        f"sum(rate(gateway_requests_total{{<<.LabelMatchers>>}}[{_WINDOW}])) by (<<.GroupBy>>)",
    ),
}


def deployment(held: Contents, rollout: Rollout) -> list[Manifest]:
    """Pods of one plain process each. The configuration must not need Ray. Raises: ConfigError."""
    needs = of_ingress(held.config, held.bytes, rollout.memory_bytes)
    pod = {
        **security(held, rollout),
        "terminationGracePeriodSeconds": grace_s(held),
        **placing(needs, labels(rollout)),
        **fetching(rollout),
        "containers": [container("gateway", held, rollout, needs)],
        "volumes": volumes(held, rollout),
    }
    scaler = autoscaler(held, rollout, rollout.name)
    spec = {
        **({} if scaler else {"replicas": rollout.replicas}),  # to which each `kubectl apply` would put it back
        # Without it 600, in which the image is pulled and models are copied as well: a pod that may still start had failed.
        "progressDeadlineSeconds": 2 * STARTS_S,
        "selector": {"matchLabels": labels(rollout)},
        "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": {"metadata": {"labels": labels(rollout), "annotations": digest(held)}, "spec": pod},
    }
    return [
        config_map(held, rollout),
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata(rollout), "spec": spec},
        service(held, rollout, labels(rollout)),
        disruption_budget(rollout, labels(rollout), {"maxUnavailable": 1}),
        *monitored(held, rollout, labels(rollout)),
        *scaler,
    ]


def kserve(held: Contents, rollout: Rollout) -> list[Manifest]:
    """A runtime of KServe, and an InferenceService that uses it; KServe makes its Deployment and its Service.

    Raises: ConfigError.
    """
    needs = of_ingress(held.config, held.bytes, rollout.memory_bytes)
    protocols = ["v2", *(["grpc-v2"] if held.config.server.grpc_port is not None else [])]
    runtime = {
        "annotations": {"prometheus.kserve.io/port": str(held.config.server.http_port), "prometheus.kserve.io/path": METRICS},
        "supportedModelFormats": [{"name": FORMAT, "version": "1", "autoSelect": False}],
        "protocolVersions": protocols,
        "containers": [container("kserve-container", held, rollout, needs)],
        "volumes": volumes(held, rollout),
    }
    predictor = {
        **security(held, rollout),
        "terminationGracePeriodSeconds": grace_s(held),
        "annotations": digest(held),
        "minReplicas": rollout.replicas,
        "maxReplicas": rollout.max_replicas,
        "model": {
            "modelFormat": {"name": FORMAT, "version": "1"},
            "runtime": rollout.name,
            "protocolVersion": "v2",
            "storageUri": rollout.models.place,
        },
    }
    selected = {"serving.kserve.io/inferenceservice": rollout.name}
    # Its Deployment is scaled by the autoscaler below, on our own metrics; without one KServe keeps to minReplicas.
    scaled = held.config.metrics.enabled and rollout.max_replicas > rollout.replicas
    annotations = {
        "serving.kserve.io/deploymentMode": "Standard",
        "serving.kserve.io/autoscalerClass": "external" if scaled else "none",
    }
    return [
        config_map(held, rollout),
        {
            "apiVersion": "serving.kserve.io/v1alpha1",
            "kind": "ServingRuntime",  # of a namespace: one of the cluster would be that of every deployment of its name
            "metadata": metadata(rollout),
            "spec": runtime,
        },
        {
            "apiVersion": "serving.kserve.io/v1beta1",
            "kind": "InferenceService",
            "metadata": metadata(rollout, annotations=annotations),
            "spec": {"predictor": predictor | placing(needs, selected)},
        },
        disruption_budget(rollout, selected, {"maxUnavailable": 1}),
        *monitored(held, rollout, selected),
        *autoscaler(held, rollout, f"{rollout.name}-predictor"),
    ]


def service(held: Contents, rollout: Rollout, selected: dict[str, str]) -> Manifest:
    server = held.config.server
    ports: list[Manifest] = [{"name": HTTP, "port": server.http_port, "targetPort": server.http_port}]
    if server.grpc_port is not None:
        plain = {} if server.tls is not None else {"appProtocol": "kubernetes.io/h2c"}
        ports.append({"name": GRPC, "port": server.grpc_port, "targetPort": server.grpc_port, **plain})
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(rollout),
        "spec": {"type": "ClusterIP", "selector": selected, "ports": ports},
    }


def disruption_budget(rollout: Rollout, selected: dict[str, str], allowed: Manifest) -> Manifest:
    spec = {**allowed, "selector": {"matchLabels": selected}, "unhealthyPodEvictionPolicy": "AlwaysAllow"}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata(rollout), "spec": spec}


def monitored(held: Contents, rollout: Rollout, selected: dict[str, str], port: str = HTTP) -> list[Manifest]:
    """What prometheus-operator makes Prometheus ask; nothing, where metrics are off. port: its name in the pods."""
    server = held.config.server
    if not held.config.metrics.enabled:
        return []
    # configs/prometheus sums by job, and takes those whose name begins so.
    job = {"action": "replace", "targetLabel": "job", "replacement": f"gateway-{rollout.name}"}
    asked: Manifest = {"port": port, "path": METRICS, "interval": _SCRAPE, "relabelings": [job]}
    if server.tls is not None:
        authority = {"secret": {"name": f"{rollout.name}-tls", "key": "ca.crt"}}
        asked |= {"scheme": "https", "tlsConfig": {"ca": authority, "serverName": rollout.name}}
    if server.access is not None and "metrics" not in server.access.open:
        credentials = {"name": f"{rollout.name}-metrics-key", "key": "key"}
        asked["authorization"] = {"type": "Bearer", "credentials": credentials}
    spec = {"selector": {"matchLabels": selected}, "podMetricsEndpoints": [asked]}
    return [{"apiVersion": "monitoring.coreos.com/v1", "kind": "PodMonitor", "metadata": metadata(rollout), "spec": spec}]


def autoscaler(held: Contents, rollout: Rollout, target: str) -> list[Manifest]:
    """target: the Deployment that it scales, by what `adapter_rules` make of the gateway's metrics.

    Nothing, where replicas and max_replicas are the same. Raises: ConfigError, if there are no metrics.
    """
    if rollout.max_replicas == rollout.replicas:
        return []
    if not held.config.metrics.enabled:
        remedy = f"set that, or --max-replicas {rollout.replicas}"
        raise ConfigError(f"metrics: off: expected on, as the autoscaler reads them; {remedy}")
    value = rollout.requests_per_second
    average = f"{round(1000 * (BUSY_SHARE if value is None else value))}m"
    metric = {"metric": {"name": _metric(rollout)}, "target": {"type": "AverageValue", "averageValue": average}}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": target},
        "minReplicas": rollout.replicas,
        "maxReplicas": rollout.max_replicas,
        "metrics": [{"type": "Pods", "pods": metric}],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
    }
    kind = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler"}
    return [{**kind, "metadata": metadata(rollout), "spec": spec}]


def adapter_rules(rollout: Rollout) -> Manifest:
    """What prometheus-adapter's configuration must have for `autoscaler`."""
    series, query = _RULES[_metric(rollout)]
    rule = {
        "seriesQuery": f'{series}{{namespace!="",pod!=""}}',
        "resources": {"overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}},
        "name": {"as": _metric(rollout)},
        "metricsQuery": query,
    }
    return {"rules": [rule]}


def _metric(rollout: Rollout) -> str:
    return "gateway_busy_share" if rollout.requests_per_second is None else "gateway_requests_per_second"


def files(manifests: list[Manifest], rollout: Rollout) -> dict[str, str]:
    """What a folder of them holds, by name: a file for each, and what kustomize reads."""
    named = {f"{manifest['kind'].lower()}.yaml": as_yaml(manifest) for manifest in manifests}
    kind = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    found = {**named, "kustomization.yaml": as_yaml({**kind, "resources": [*named]})}
    if "horizontalpodautoscaler.yaml" in named:
        found["prometheus-adapter-rules.yaml"] = as_yaml(adapter_rules(rollout))
    return found


def stream(manifests: list[Manifest], rollout: Rollout) -> str:
    """All of them as one text, for `kubectl apply --filename -`."""
    texts = []
    for manifest in manifests:
        text = as_yaml(manifest)
        if manifest["kind"] == "HorizontalPodAutoscaler":
            rules = "".join(f"# {line}\n" for line in as_yaml(adapter_rules(rollout)).splitlines())
            text = f"# What it asks for is made by prometheus-adapter, whose configuration must have:\n{rules}{text}"
        texts.append(text)
    return "---\n".join(texts)
