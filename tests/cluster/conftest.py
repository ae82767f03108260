"""A real Ray cluster on this machine, shared by the tests of a file, and a client that keeps a gateway busy."""

import functools
import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle

from benchmarks.ports import free_port
from gateway.cluster import application
from gateway.config import Config, parse_config
from tests.cluster.load import infer_body

APPLICATION = "gateway"
# Not 127.0.0.1: ray.init would take that for the address of the machine's network card.
LOOPBACK = "127.0.0.2"
# What a batch takes where a load asks on and on: requests are in flight all the time, and the cores are free for Ray.
BUSY_MS = 20.0
_MEMORY_BYTES = 100 << 20
_HEAD = {
    "num_cpus": 2,
    "object_store_memory": _MEMORY_BYTES,
    "node_ip_address": LOOPBACK,
    "include_dashboard": False,
    "no_monitor": True,  # nothing scales the nodes
    "resources": {"head": 1.0},
}
# Of each further node. Nobody reads what its log monitor would copy, which takes a second of CPU time to start.
NODE: dict[str, Any] = {
    "object_store_memory": _MEMORY_BYTES,
    "node_ip_address": LOOPBACK,
    "include_log_monitor": False,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head node with Serve on it, and nothing deployed."""
    cluster = Cluster(initialize_head=True, head_node_args=_HEAD)
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
    yield cluster
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


class Gateway:
    """An application that is deployed, and what tests do to it."""

    def __init__(self, config: Config) -> None:
        self.handle = _run(config)
        self.http_port, self.grpc_port = self.handle.ports.remote().result(timeout_s=20)

    def upgrade(self, config: Config) -> None:
        """Deploy another configuration in its place; returns when that runs."""
        _run(config)

    def pids(self, deployment: str) -> list[int]:
        """Of the processes of a deployment's running replicas."""
        return [replica["pid"] for replica in self._replicas(deployment) if replica["state"] == "RUNNING"]

    def settled(self, deployment: str, replicas: int) -> bool:
        """Whether it has as many, all running: none of before is ending."""
        return [replica["state"] for replica in self._replicas(deployment)] == ["RUNNING"] * replicas

    def _replicas(self, deployment: str) -> list[dict[str, Any]]:
        details = _get_global_client().get_serve_details()
        replicas: list[dict[str, Any]] = details["applications"][APPLICATION]["deployments"][deployment]["replicas"]
        return replicas

    def infer(self, model: str, rows: list[list[float]]) -> tuple[int, Any]:
        return request(self.http_port, "POST", f"/v2/models/{model}/infer", infer_body(rows))


def _run(config: Config) -> DeploymentHandle[Any]:
    try:
        return serve.run(application(config), name=APPLICATION, route_prefix=None)
    except RuntimeError as exc:  # which names the deployments that failed, not why
        deployments = serve.status().applications[APPLICATION].deployments
        exc.add_note("\n".join(f"{name}: {deployment.message}" for name, deployment in deployments.items()))
        raise


@functools.cache
def usual() -> Config:
    """What several tests deploy one after the other, which changes nothing then."""
    faults = {"fail": 101.0, "lose": 102.0}
    return config(port=free_port(), ingress_replicas=2, replicas=2, sessions=2, fixed_ms=BUSY_MS, faults=faults)


def request(
    port: int, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    """One request on a connection of its own: status and decoded body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers or {})
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    return response.status, json.loads(text) if text else None


def config(
    *,
    port: int = 0,
    grpc_port: int = 0,
    ingress_replicas: int = 1,
    model: dict[str, Any] | None = None,
    embedded: dict[str, Any] | None = None,
    tracing: dict[str, Any] | None = None,
    **backend: Any,
) -> Config:
    """A synthetic model `m` in replicas. port: of HTTP; gRPC gets a free one too if it is not 0. embedded: one more backend."""
    document = {
        "server": {
            "http_port": port,
            "grpc_port": grpc_port or (free_port() if port else 0),
            "ingress_replicas": ingress_replicas,
            "drain_timeout_s": 10,
            "model_control": True,
        },
        **({"tracing": tracing} if tracing else {}),
        "models": [
            {
                "name": "m",
                "max_rows": 16,
                "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 16]}],
                "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 16]}],
                "backends": [{"kind": "synthetic", "placement": "replicas", **backend}],
                **(model or {}),
            },
            *([{"name": "embedded", "max_rows": 16, "backends": [embedded]}] if embedded else []),
        ],
    }
    return parse_config(document, source="test")
