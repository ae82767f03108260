"""What is deployed for a configuration, without a cluster: names, versions, resources, and when to scale."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from ray import serve
from ray.serve.config import AutoscalingContext
from ray.serve.schema import ServeDeploySchema

from gateway.app import build
from gateway.cluster import application
from gateway.cluster.deployments import check_room, desired_replicas, waiting
from gateway.cluster.leaving import succeeded
from gateway.config import Config, parse_config
from gateway.errors import ConfigError
from gateway.process.console import Speech
from tests.cluster.conftest import config

pytestmark = pytest.mark.ray
EXAMPLE = Path(__file__).parents[2] / "configs" / "examples" / "serve.yaml"


def deployments(app: serve.Application) -> dict[str, serve.Deployment]:
    from ray.serve._private.build_app import build_app

    return {deployment.name: deployment for deployment in build_app(app, name="gateway").deployments}


def desired(busy: Mapping[str, float], queued: Mapping[str, float], target: float) -> float:
    metrics = {"busy": busy, "queued": queued}
    context = SimpleNamespace(aggregated_metrics=metrics, config=SimpleNamespace(target_ongoing_requests=target))
    replicas, state = desired_replicas(cast(AutoscalingContext, context))
    assert state == {}
    return replicas


def test_the_example_for_serve_is_valid_and_builds() -> None:
    schema = ServeDeploySchema.model_validate(yaml.safe_load(EXAMPLE.read_text()))
    (app,) = schema.applications
    assert app.import_path == "gateway.app:build"
    assert set(deployments(build(app.args))) == {"ingress", "linear-1-onnxruntime"}


def test_build_takes_a_path_and_names_the_fault_of_what_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(yaml.safe_dump(config().model_dump(mode="json", exclude_none=True)))
    assert set(deployments(build({"config": str(path)}))) == {"ingress", "m-1-synthetic"}
    with pytest.raises(ConfigError, match=r"args: modles: \[\]: unknown key; did you mean `models`"):
        build({"modles": []})


def test_only_what_changed_is_restarted_by_a_deploy() -> None:
    def versions(**changes: Any) -> tuple[str | None, str | None]:
        found = deployments(application(config(**changes)))
        return found["ingress"].version, found["m-1-synthetic"].version

    ingress, backend = versions()
    assert versions() == (ingress, backend)
    other_ingress, same_backend = versions(ingress_replicas=1, port=4711)
    assert other_ingress != ingress
    assert same_backend == backend
    assert versions(fixed_ms=3.0)[1] != backend
    scaling, wider = (versions(autoscaling={"max_replicas": most})[1] for most in (2, 3))
    assert scaling == wider != versions(replicas=2)[1] == backend
    for terms in ({"usd_per_hour": 7.0}, {"model": {"slo": {"p99_ms": 100}}}):
        assert versions(**terms)[1] == backend
    document = config().model_dump(mode="json", exclude_none=True)
    left_out = document["models"][0]
    del left_out["max_rows"]
    made = [parse_config({"models": [model]}, source="test") for model in (left_out, left_out | {"max_rows": 32})]
    assert made[0] == made[1]
    assert len({deployments(application(each))["ingress"].version for each in made}) == 2  # for Triton it is not the same


def test_prices_and_objectives_reach_replicas_that_run_and_where_and_how_these_tell_restarts_them() -> None:
    document = config().model_dump(mode="json", exclude_none=True)
    model = document["models"][0]

    def backend(speech: Speech | None = None, **changes: Any) -> serve.Deployment:
        return deployments(application(parse_config(document | changes, source="test"), speech))["m-1-synthetic"]

    priced = model | {"slo": {"p99_ms": 100}, "backends": [model["backends"][0] | {"usd_per_hour": 7.0}]}
    terms = backend(models=[priced])._deployment_config.user_config
    assert terms == {"usd_per_hour": 7.0, "slo_p99_ms": 100.0, "drain_s": 70.0}  # max(2 * 10, 60) + 10
    run_dirs = [document["server"] | {"run_dir": name} for name in ("/run/a", "/run/b")]
    off = {"metrics": {"enabled": False}}
    told = [backend(), backend(Speech(format="json")), backend(**off), *(backend(server=server) for server in run_dirs)]
    assert len({each.version for each in told}) == 5
    assert backend(**off, server=run_dirs[0]).version == backend(**off).version


def test_serve_kills_no_replica_that_ingresses_still_use_for_the_time_that_its_successor_takes() -> None:
    timeout_s = deployments(application(config()))["m-1-synthetic"]._deployment_config.graceful_shutdown_timeout_s
    assert timeout_s > 7 * 86400


def test_ingresses_may_be_held_to_nodes_of_their_own() -> None:
    held = config(embedded={"kind": "synthetic", "resources": {"num_gpus": 1}}).model_dump(exclude_unset=True)
    held["server"]["ingress_resources"] = {"gateway_ingress": 0.001, "num_gpus": 0.5}
    options = deployments(build(held))["ingress"].ray_actor_options
    assert options is not None
    assert (options["num_gpus"], options["resources"]) == (2, {"gateway_ingress": 0.001})  # of several GPUs Ray gives no parts


def test_a_node_has_one_ingress_of_each_version() -> None:
    """Ray has 1 of such a resource on every node, without being told of it."""

    def asked(**server: Any) -> dict[str, float]:
        held = config().model_dump(exclude_unset=True)
        held["server"] |= {"ingress_replicas_per_node": 1, **server}
        options = deployments(build(held))["ingress"].ray_actor_options
        assert options is not None
        return dict(options["resources"])

    (one, other) = (asked(), asked(drain_timeout_s=7))
    assert [*one.values()] == [*other.values()] == [1.0]
    assert all(key.startswith("node:__internal_implicit_resource_ingress-") for key in (*one, *other))
    assert one == asked() != other  # an upgrade's new ingress stands beside the old
    assert [*asked(ingress_replicas_per_node=6).values()] == [0.1666]  # of which Ray would make 0.1667: room for five


def test_an_ingress_that_is_deployed_ends_those_of_other_versions_on_its_node() -> None:
    nodes = {"old": "a", "new": "a", "elsewhere": "b"}
    there = [{"actor_name": name, "node_id": node, "state": "RUNNING"} for name, node in nodes.items()]
    there += [{"actor_name": "waits", "node_id": None, "state": "STARTING"}]
    details = {"deployments": {"ingress": {"required_resources": {"CPU": 0, "version 2": 1.0}, "replicas": there}}}
    assert succeeded(details, "ingress", "new", "version 2") == {"old"}
    assert succeeded(details, "ingress", "old", "version 1") == set()
    assert succeeded(details, "ingress", "elsewhere", "version 2") == set()
    assert succeeded(details, "ingress", "waits", "version 2") == set()
    assert succeeded({}, "ingress", "new", "version 2") == set()  # it is being deleted


def test_more_ingresses_than_the_nodes_run_are_refused_and_those_that_wait_are_told() -> None:
    def two(**server: Any) -> Config:
        held = config(ingress_replicas=2).model_dump(exclude_unset=True)
        return parse_config(held | {"server": held["server"] | server}, source="x")

    check_room(two(), 1)
    check_room(two(ingress_replicas_per_node=1), 2)
    expected = r"^server\.ingress_replicas: 2: expected 1 at most, as server\.ingress_replicas_per_node is 1 and nodes are 1"
    with pytest.raises(ConfigError, match=expected):
        check_room(two(ingress_replicas_per_node=1), 1)
    with pytest.raises(ConfigError, match=r"server\.ingress_replicas_per_node: 65: .* 64"):
        two(ingress_replicas_per_node=65)
    resources = {"CPU": 0, "front": 0.5, "node:__internal_implicit_resource_ingress-1": 1.0}
    states = [{"state": "RUNNING", "node_id": "a"}, {"state": "STARTING", "node_id": None}]
    ingress = {"required_resources": resources, "target_num_replicas": 2, "replicas": states}
    loads = {"required_resources": {}, "target_num_replicas": 1, "replicas": [{"state": "STARTING", "node_id": "a"}]}
    assert waiting({"deployments": {"ingress": ingress, "m-1-synthetic": loads}}) == [
        "ingress: 1 of 2 replicas wait for a node that has front 0.5, and fewer ingresses than server.ingress_replicas_per_node"
    ]


def test_resources_reserve_what_is_stated_and_nothing_else() -> None:
    stated = deployments(application(config(resources={"num_cpus": 2, "num_gpus": 0.5, "neuron_cores": 1}, surge=False)))
    options = stated["m-1-synthetic"].ray_actor_options
    assert (options["num_cpus"], options["num_gpus"], options["resources"]) == (2, 0.5, {"neuron_cores": 1})
    assert stated["ingress"].ray_actor_options["num_cpus"] == 0
    assert stated["m-1-synthetic"]._deployment_config.max_surge_percent == 0
    embedded = deployments(application(config(embedded={"kind": "synthetic", "resources": {"num_gpus": 1}})))
    assert embedded["ingress"].ray_actor_options["num_gpus"] == 1
    assert embedded["ingress"]._deployment_config.max_surge_percent == 100
    held = config().model_dump(exclude_unset=True)
    held["server"]["ingress_surge"] = False
    assert deployments(build(held))["ingress"]._deployment_config.max_surge_percent == 0


def test_names_that_serve_does_not_take_are_told_apart() -> None:
    names = {
        next(name for name in deployments(application(config(model={"name": model}))) if name != "ingress")
        for model in ("größe", "grüße", "a b", "a_b")
    }
    assert len(names) == 4
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-") for name in names)


def test_backends_whose_names_would_be_the_same_are_told_apart_and_others_keep_theirs() -> None:
    backend = {"kind": "synthetic", "placement": "replicas"}
    one = {"name": "m", "backends": [{**backend, "name": "2-gpu"}, {**backend, "name": "cpu"}]}
    other = {"name": "m-1", "version": "2", "backends": [{**backend, "name": "gpu"}]}
    names = set(deployments(application(parse_config({"models": [one, other]}, source="x"))))
    assert len(names) == 4
    assert {"ingress", "m-1-cpu"} < names
    assert all(name.startswith("m-1-2-gpu-") for name in names - {"ingress", "m-1-cpu"})


def test_what_cannot_be_deployed_is_refused_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"server\.ingress_replicas: 2"):
        application(config(ingress_replicas=2))


def test_replicas_follow_what_runs_and_what_waits() -> None:
    # 2 sessions at 0.7 each: 1.4 batches per replica
    assert desired({"a": 0.0}, {"a": 0.0}, target=1.4) == 0
    assert desired({"a": 1.4}, {"a": 0.0}, target=1.4) == 1
    assert desired({"a": 2.0, "b": 2.0}, {"a": 1.0, "b": 3.0}, target=1.4) == pytest.approx((2 + 2 + 3) / 1.4)


def test_a_replica_that_starts_is_kept_until_it_has_told_that_nobody_needs_it() -> None:
    for metrics in ({}, None, {"some_of_serves": {"a": 1.0}}):
        context = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=1)
        assert desired_replicas(cast(AutoscalingContext, context)) == (1, {})
