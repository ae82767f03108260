"""The gateway on Ray Serve. The only part that imports ray.

Serve starts, places, scales, health-checks, drains, upgrades and restarts; requests do not pass through it. An ingress replica
owns its listeners (`deployments`), forms batches, and sends each in one call to a replica of the backend (`remote` ->
`replica`). `control` carries a client's load or unload to all ingress replicas, `launch` is `gateway serve`.
"""

from gateway.cluster.deployments import application
from gateway.cluster.launch import run_on_ray

__all__ = ["application", "run_on_ray"]
