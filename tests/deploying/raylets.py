"""A process of its own: Ray's nodes as KubeRay would start them from a RayService, on this machine, and what runs on which.

    raylets.py MANIFEST OUT

The application is deployed before the nodes join, as KubeRay does, and upgraded when it runs; then once more, while the last
node that listens is lost. Of before and after each upgrade, writes [{node: [classes of its actors]}] to OUT. Asks each model of
the configuration once.
"""

import json
import sys
import time
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
    name, args = application["name"], application["args"]
    versions = [args, *(args | {"server": args["server"] | {"drain_timeout_s": drain_s}} for drain_s in (3, 2))]
    cluster = Cluster(initialize_head=True, head_node_args=options(spec["rayClusterConfig"]["headGroupSpec"]))
    names = {cluster.head_node.node_id: "head"}
    ray.init(address=cluster.address)
    try:
        serve.start(proxy_location="Disabled")
        deploy(args, name)
        nodes = {}
        for group in spec["rayClusterConfig"]["workerGroupSpecs"]:
            for number in range(group["replicas"]):
                node = nodes[group["groupName"]] = cluster.add_node(**options(group))
                names[node.node_id] = f"{group['groupName']}-{number}"
        found = []
        for version in versions[:2]:
            serve.run(build(version), name=name, route_prefix=None)
            found.append(actors(names))
        cluster.remove_node(nodes["ingress"])
        old = ingresses()
        deploy(versions[2], name)
        until = time.monotonic() + 60
        while (not (there := ingresses()) or there & old) and time.monotonic() < until:
            time.sleep(0.2)
        found.append(actors(names))
        port = args["server"]["http_port"]
        for model in args["models"]:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/{model['name']}/infer", ROW, timeout=30).close()
        Path(out).write_text(json.dumps(found))
    except RuntimeError:  # which does not say why
        print(serve.status().applications, file=sys.stderr)
        raise
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def deploy(args: dict[str, Any], name: str) -> None:
    """And do not wait for it."""
    target = serve.RunTarget(build(args), name=name, route_prefix=None)
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def ingresses() -> set[str]:
    alive = list_actors(filters=[("state", "=", "ALIVE")])
    return {actor.actor_id for actor in alive if actor.class_name.endswith(":ingress")}


def actors(names: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for actor in list_actors(detail=True, filters=[("state", "=", "ALIVE")]):
        if actor.class_name != "ControlState":  # which may be anywhere
            found.setdefault(names[actor.node_id], []).append(actor.class_name.rpartition(":")[2])
    return found


def options(group: dict[str, Any]) -> dict[str, Any]:
    """What `ray start` is given, as this library takes it."""
    params = group["rayStartParams"]
    return {"num_cpus": int(params["num-cpus"]), "resources": json.loads(params.get("resources", "{}").strip("'"))}


if __name__ == "__main__":
    main(*sys.argv[1:])
