"""A process of its own: Ray's nodes as KubeRay would start them from a RayService, on this machine, and what runs on which.

    raylets.py MANIFEST OUT

Writes {node: [classes of its actors]} to OUT, and asks each model of the configuration once.
"""

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster
from ray.util.state import list_actors

from gateway.app import build

ROW = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}).encode()


def main(manifest: str, out: str) -> None:
    spec = yaml.safe_load(Path(manifest).read_text())["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    groups = spec["rayClusterConfig"]["workerGroupSpecs"]
    cluster = Cluster(initialize_head=True, head_node_args=options(spec["rayClusterConfig"]["headGroupSpec"]))
    names = {cluster.head_node.node_id: "head"}
    for group in groups:
        for _ in range(group["replicas"]):
            names[cluster.add_node(**options(group)).node_id] = group["groupName"]
    ray.init(address=cluster.address)
    try:
        serve.start(proxy_location="Disabled")
        try:
            serve.run(build(application["args"]), name=application["name"], route_prefix=None)
        except RuntimeError:  # which does not say why
            print(serve.status().applications, file=sys.stderr)
            raise
        found: dict[str, list[str]] = {}
        for actor in list_actors(detail=True, filters=[("state", "=", "ALIVE")]):
            found.setdefault(names[actor.node_id], []).append(actor.class_name.rpartition(":")[2])
        port = application["args"]["server"]["http_port"]
        for model in application["args"]["models"]:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/{model['name']}/infer", ROW, timeout=30).close()
        Path(out).write_text(json.dumps(found))
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def options(group: dict[str, Any]) -> dict[str, Any]:
    """What `ray start` is given, as this library takes it."""
    params = group["rayStartParams"]
    return {"num_cpus": int(params["num-cpus"]), "resources": json.loads(params.get("resources", "{}").strip("'"))}


if __name__ == "__main__":
    main(*sys.argv[1:])
