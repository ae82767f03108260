"""The gateway on a real Ray cluster: what it answers, and that nothing is lost when parts of it go."""

import contextlib
import json
import os
import signal
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import tritonclient.grpc as triton
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from benchmarks.ports import free_port
from gateway.access.rules import digest_of
from gateway.config import parse_config
from gateway.engine.metrics import OPENMETRICS
from tests import waiting
from tests.cluster.conftest import BUSY_MS, NODE, Gateway, config, request, usual
from tests.cluster.lives import Lives, told
from tests.cluster.load import GrpcLoad, Load, infer_body
from tests.tracing.collector import CLIENT, SERVER, collecting

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .metrics_interval_s. field"),  # deployments._scale
]

BACKEND = "m-1-synthetic"
ROW = [float(column) for column in range(16)]

until = partial(waiting.until, every_s=0.1)  # what is asked for looks at every process


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_a_failing_batch_and_a_lost_session_end_as_embedded(cluster: Cluster) -> None:
    gateway = Gateway(usual())
    assert gateway.infer("m", [[101.0] * 16])[0] == 500
    assert gateway.infer("m", [[102.0] * 16])[0] == 503
    assert gateway.infer("m", [ROW])[0] == 200


def test_a_killed_backend_replica_costs_no_request(cluster: Cluster) -> None:
    gateway = Gateway(usual())
    with Load(gateway.http_port, "m") as load:
        load.wait_for(200)
        victim, survivor = gateway.pids("m-1-synthetic")
        kill(victim)
        load.wait_for(500)
        until(lambda: len(gateway.pids("m-1-synthetic")) == 2, within_s=30)
        load.wait_for(200)
    assert set(load.outcomes) == {200}, load.errors[:3]
    assert load.slowest_s < 3.0
    assert survivor in gateway.pids("m-1-synthetic")


def test_a_killed_ingress_breaks_only_its_connections(cluster: Cluster) -> None:
    gateway = Gateway(usual())
    with Load(gateway.http_port, "m", connections=16) as load:
        load.wait_for(200)
        kill(gateway.pids("ingress")[0])
        load.wait_for(500)
        until(lambda: len(gateway.pids("ingress")) == 2, within_s=30)
        load.wait_for(200)
    broken = sum(count for outcome, count in load.outcomes.items() if outcome != 200)
    assert broken <= 16, load.outcomes
    assert load.slowest_s < 5.0


def test_an_ingress_that_has_closed_is_replaced(cluster: Cluster) -> None:
    gateway = Gateway(usual())
    before = set(gateway.pids("ingress"))
    gateway.handle.close.remote().result(timeout_s=20)
    until(lambda: len(pids := gateway.pids("ingress")) == 2 and set(pids) != before, within_s=30)
    assert len(before & set(gateway.pids("ingress"))) == 1
    assert {gateway.infer("m", [ROW])[0] for _ in range(20)} == {200}


def test_unload_and_load_reach_every_ingress_and_the_replica_which_reads_the_model_anew_and_frees_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    def write(adds: str) -> None:
        (tmp_path / "adds.py").write_text(
            f"class Adds:\n    inputs = (('INPUT0', 'FP32', (-1, 16)),)\n    outputs = (('OUTPUT0', 'FP32', (-1, 16)),)\n\n"
            f"    adds = {adds}\n\n"
            "    def predict(self, inputs):\n        return {'OUTPUT0': inputs['INPUT0'] + self.adds}\n"
        )

    write("1")
    port = free_port()
    # Sessions in processes of their own, so that the model can be seen to go, and takes new code.
    backend = {"kind": "python", "model": f"{tmp_path}/adds.py:Adds", "isolation": "process", "placement": "replicas"}
    gateway = Gateway(config(port=port, ingress_replicas=2, model={"backends": [backend]}))
    (pid,) = gateway.pids("m-1-python")

    def ask(change: str) -> int:
        return request(port, "POST", f"/v2/repository/models/m/{change}", {})[0]

    def seen() -> set[int]:
        # Each request has a connection of its own, so that both ingresses get some.
        return {request(port, "GET", "/v2/models/m/ready")[0] for _ in range(20)}

    def answers() -> set[float]:
        return {gateway.infer("m", [[0.0] * 16])[1]["outputs"][0]["data"][0] for _ in range(20)}

    def sessions() -> int:
        return len(psutil.Process(pid).children())

    assert (seen(), answers()) == ({200}, {1.0})
    loaded = sessions()
    assert loaded > 0
    with Load(port, "m") as load:
        write("2")
        assert (ask("load"), answers()) == (200, {2.0})
        write("broken")
        assert (ask("load"), answers()) == (500, {2.0})
        load.wait_for(50)
    assert set(load.outcomes) == {200}, load.errors[:3]
    until(lambda: sessions() == loaded, within_s=10)
    write("3")
    assert ask("unload") == 200
    assert seen().isdisjoint({200})
    until(lambda: sessions() < loaded, within_s=10)
    assert ask("load") == 200
    assert (seen(), answers()) == ({200}, {3.0})
    assert sessions() == loaded


def test_an_ingress_that_starts_later_loads_what_clients_have_loaded_once_and_nothing_that_they_unloaded(
    cluster: Cluster, tmp_path: Path
) -> None:
    opened = tmp_path / "opened"
    (tmp_path / "opens.py").write_text(
        f"class Opens:\n    inputs = outputs = (('X', 'FP32', (-1, 1)),)\n\n"
        f"    def __init__(self):\n        open('{opened}', 'a').write('.')\n\n"
        "    def predict(self, inputs):\n        return inputs\n"
    )
    port = free_port()
    embedded = {"kind": "python", "model": f"{tmp_path}/opens.py:Opens"}
    gateway = Gateway(config(port=port, ingress_replicas=2, replicas=1, embedded=embedded))
    for change, status in (("load", 200), ("unload", 400)):
        assert request(port, "POST", f"/v2/repository/models/embedded/{change}", {})[0] == 200
        (victim, _) = gateway.pids("ingress")
        kill(victim)
        until(lambda gone=victim: gone not in (two := gateway.pids("ingress")) and len(two) == 2, within_s=60)
        assert {request(port, "GET", "/v2/models/embedded/ready")[0] for _ in range(20)} == {status}
        assert len(opened.read_text()) == 5  # two at the start, two for the client, and one that came for a killed one


def test_what_clients_have_loaded_stays_so_through_the_loss_of_who_keeps_that_and_an_upgrade(cluster: Cluster) -> None:
    port = free_port()
    document = config(port=port, ingress_replicas=2, replicas=1).model_dump(mode="json", exclude_none=True)
    later = {"name": "later", "max_rows": 16, "load_at_start": False, "backends": [{"kind": "synthetic"}]}
    document["models"].append(later)
    gateway = Gateway(parse_config(document, source="test"))
    before = gateway.pids("ingress")
    assert request(port, "POST", "/v2/repository/models/later/load", {})[0] == 200
    keeper = ray.get_actor("gateway:gateway", namespace="serve")
    ray.kill(keeper)

    def kept() -> list[str]:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            actor: Any = ray.get_actor("gateway:gateway", namespace="serve")
            return [change.model for change in ray.get(actor.asked.remote())[1] if change.loaded]
        return []

    until(lambda: "later" in kept(), within_s=20)  # what tests before have asked for is kept too
    later["max_rows"] = 8
    gateway.upgrade(parse_config(document, source="test"))
    until(lambda: gateway.settled("ingress", 2) and not set(before) & set(gateway.pids("ingress")), within_s=30)
    assert {request(port, "GET", "/v2/models/later/ready")[0] for _ in range(20)} == {200}


def test_an_ingress_in_the_place_of_a_killed_one_gets_its_share_of_the_connections(cluster: Cluster) -> None:
    port = free_port()
    gateway = Gateway(config(port=port, ingress_replicas=2, replicas=1))

    def connections() -> list[int]:
        found = []
        for pid in gateway.pids("ingress"):
            with contextlib.suppress(psutil.NoSuchProcess):
                open_now = psutil.Process(pid).net_connections("tcp")
                found.append(sum(one.laddr.port == port and one.status == psutil.CONN_ESTABLISHED for one in open_now))
        return sorted(found)

    with Load(port, "m", connections=24) as load:
        load.wait_for(100)
        kill(gateway.pids("ingress")[0])
        until(lambda: len(connections()) == 2 and sum(connections()) == 24 and connections()[0] >= 9, within_s=60)
        before = sum(load.outcomes.values()) - load.outcomes[200]
        load.wait_for(500)
        assert sum(load.outcomes.values()) - load.outcomes[200] == before  # to spread them has cost nothing


def test_what_a_key_may_ask_holds_over_both_ingresses(cluster: Cluster, tmp_path: Path) -> None:
    port, keys = free_port(), tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{name: few, hash: 'sha256:{digest_of(b'few').hex()}', requests_per_s: 0.001, burst: 20}}]")
    document = config(port=port, ingress_replicas=2, replicas=1).model_dump(mode="json", exclude_none=True)
    document["server"]["access"] = {"keys": str(keys)}
    Gateway(parse_config(document, source="test"))
    ask = partial(request, port, "POST", "/v2/models/m/infer", infer_body([ROW]), {"X-Api-Key": "few"})
    # Each has a connection of its own, so that both ingresses get some.
    assert Counter(ask()[0] for _ in range(60)) == {200: 20, 429: 40}
    assert request(port, "GET", "/v2/models/m")[0] == 401


def test_what_a_key_may_ask_holds_over_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    # Nodes have no directory in common, as those of one machine would: so the second has another for what is temporary.
    elsewhere = {"TMPDIR": str(tmp_path)}
    node = cluster.add_node(num_cpus=2, **NODE, env_vars=elsewhere)
    port, keys = free_port(), tmp_path / "keys.yaml"
    listed = [
        {"name": "rate", "hash": f"sha256:{digest_of(b'rate').hex()}", "requests_per_s": 0.001, "burst": 20},
        {"name": "flight", "hash": f"sha256:{digest_of(b'flight').hex()}", "concurrent": 6},
    ]
    keys.write_text(json.dumps({"keys": listed}))
    try:
        # A processor each: two ingresses fit on a node.
        embedded = {"kind": "synthetic", "fixed_ms": 4000, "resources": {"num_cpus": 1}}
        made = config(port=port, ingress_replicas=4, embedded=embedded, replicas=1)
        document = made.model_dump(mode="json", exclude_none=True)
        document["server"]["access"] = {"keys": str(keys)}
        gateway = Gateway(parse_config(document, source="test"))
        # Serve may replace one that is slow to start; until that has ended, its node counts it, and grants its part as well.
        until(lambda: gateway.settled("ingress", 4), within_s=60)
        folders = [Path(f"/proc/{pid}/environ").read_bytes().count(b"TMPDIR=") for pid in gateway.pids("ingress")]
        assert sorted(folders) == [0, 0, 1, 1]
        ask = partial(request, port, "POST", "/v2/models/m/infer", infer_body([ROW]), {"X-Api-Key": "rate"})
        # Each has a connection of its own, which the kernel gives to any of the four.
        assert Counter(ask()[0] for _ in range(200)) == {200: 20, 429: 180}
        slow = partial(request, port, "POST", "/v2/models/embedded/infer", infer_body([ROW]), {"X-Api-Key": "flight"})
        with ThreadPoolExecutor(60) as threads:
            assert Counter(answer[0] for answer in threads.map(lambda _: slow(), range(60))) == {200: 6, 429: 54}
    finally:
        serve.delete("gateway")
        cluster.remove_node(node)


def test_a_rolling_upgrade_loses_no_request(cluster: Cluster) -> None:
    port = free_port()
    gateway = Gateway(config(port=port, replicas=1, sessions=2, fixed_ms=BUSY_MS))
    before = gateway.pids("ingress") + gateway.pids("m-1-synthetic")
    wider = {  # other inputs, so neither configuration's ingress may use the replicas of the other
        "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, -1]}],
        "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, -1]}],
    }
    with Load(port, "m", connections=16) as load, GrpcLoad(gateway.grpc_port, "m") as grpc_load:
        load.wait_for(200)
        gateway.upgrade(config(port=port, grpc_port=gateway.grpc_port, replicas=1, sessions=2, fixed_ms=BUSY_MS, model=wider))
        until(lambda: not set(before) & {*gateway.pids("ingress"), *gateway.pids("m-1-synthetic")}, within_s=30)
        load.wait_for(500)
    assert set(load.outcomes) == {200}, load.errors[:3]
    assert set(grpc_load.outcomes) == {"ok"}
    assert request(port, "POST", "/v2/models/m/infer", infer_body([[1.0, 2.0]]))[0] == 200


def test_an_upgrade_that_fails_leaves_the_old_replicas_for_good_and_going_back_ends_them(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "failing.py").write_text(
        "class Failing:\n    def __init__(self):\n        raise RuntimeError('no weights here')\n"
    )
    port = free_port()
    document = config(port=port, replicas=1, hang_timeout_s=5.0, fixed_ms=BUSY_MS).model_dump(mode="json", exclude_none=True)
    document["server"]["drain_timeout_s"] = 1.0
    gateway = Gateway(parse_config(document, source="test"))
    (before,) = gateway.pids(BACKEND)
    failing = [{"kind": "python", "model": f"{tmp_path}/failing.py:Failing", "placement": "replicas"}]
    model = document["models"][0] | {"version": "2", "backends": failing}
    with Load(port, "m") as load:
        load.wait_for(100)
        with pytest.raises(RuntimeError):
            gateway.upgrade(parse_config(document | {"models": [model]}, source="test"))
        time.sleep(15)  # together with the upgrade that failed, longer than batches and clients have to end
        load.wait_for(100)
        assert psutil.pid_exists(before)
        gateway.upgrade(parse_config(document, source="test"))
        until(lambda: not psutil.pid_exists(before), within_s=30)
        load.wait_for(100)
    assert set(load.outcomes) == {200}, load.errors[:3]


def test_a_replica_that_is_frozen_is_ended_by_an_upgrade(cluster: Cluster) -> None:
    port = free_port()
    gateway = Gateway(config(port=port, replicas=1))
    (frozen,) = gateway.pids(BACKEND)
    os.kill(frozen, signal.SIGSTOP)
    gateway.upgrade(config(port=port, grpc_port=gateway.grpc_port, replicas=1, fixed_ms=1.0))
    until(lambda: not psutil.pid_exists(frozen), within_s=60)
    assert gateway.infer("m", [ROW])[0] == 200


def test_a_replica_that_is_frozen_is_ended_also_where_the_ingress_that_has_used_it_has_died(cluster: Cluster) -> None:
    gateway = Gateway(config(port=free_port(), replicas=1, resources={"head": 1}))  # which its successor needs
    (frozen,) = gateway.pids(BACKEND)
    os.kill(frozen, signal.SIGSTOP)
    until(lambda: not gateway.pids(BACKEND), within_s=40)
    kill(gateway.pids("ingress")[0])
    until(lambda: not psutil.pid_exists(frozen), within_s=60)
    until(lambda: gateway.settled(BACKEND, 1) and gateway.settled("ingress", 1), within_s=30)
    assert gateway.infer("m", [ROW])[0] == 200


def test_a_replica_that_is_frozen_is_ended_also_where_its_ingress_has_died_and_an_upgrade_has_removed_its_deployment(
    cluster: Cluster,
) -> None:
    port = free_port()
    gateway = Gateway(config(port=port, replicas=1))
    (frozen,) = gateway.pids(BACKEND)
    os.kill(frozen, signal.SIGSTOP)
    kill(gateway.pids("ingress")[0])
    gateway.upgrade(config(port=port, grpc_port=gateway.grpc_port, replicas=1, model={"version": "2"}))
    until(lambda: not psutil.pid_exists(frozen), within_s=60)
    assert gateway.infer("m", [ROW])[0] == 200


def test_a_changed_price_reaches_the_replicas_that_run(cluster: Cluster) -> None:
    port = free_port()
    gateway = Gateway(config(port=port, replicas=1, usd_per_hour=1.0))
    before = gateway.pids(BACKEND)
    until(lambda: told(port, "gateway_cost_usd_per_hour", model="m") == 1.0, within_s=10)
    gateway.upgrade(config(port=port, grpc_port=gateway.grpc_port, replicas=1, usd_per_hour=7.0))
    until(lambda: told(port, "gateway_cost_usd_per_hour", model="m") == 7.0, within_s=10)
    assert gateway.pids(BACKEND) == before


def test_the_only_backend_replica_killed_is_waited_for(cluster: Cluster) -> None:
    gateway = Gateway(config(replicas=1, fixed_ms=BUSY_MS))
    with Load(gateway.http_port, "m") as load:
        load.wait_for(50)
        kill(gateway.pids("m-1-synthetic")[0])
        time.sleep(0.5)
        load.wait_for(50)
    assert set(load.outcomes) == {200}, load.errors[:3]


def test_rest_and_grpc_reach_replicas_and_frames_may_be_large(cluster: Cluster) -> None:
    # 300 000 columns of float32: 1.2 MB a row, 7.2 MB a request, over Serve's own limit of 4 MiB
    wide = {
        "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, -1]}],
        "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, -1]}],
    }
    gateway = Gateway(config(model=wide, replicas=1))
    status, answer = gateway.infer("m", [ROW, ROW])
    assert (status, answer["outputs"][0]["shape"], answer["outputs"][0]["data"]) == (200, [2, 16], ROW + ROW)
    sent = np.arange(6 * 300_000, dtype=np.float32).reshape(6, -1)
    tensor = triton.InferInput("INPUT0", list(sent.shape), "FP32")
    tensor.set_data_from_numpy(sent)
    client = triton.InferenceServerClient(f"127.0.0.1:{gateway.grpc_port}")
    received = client.infer("m", [tensor]).as_numpy("OUTPUT0")
    client.close()
    np.testing.assert_array_equal(received, sent)


def test_replicas_follow_the_load_up_and_down(cluster: Cluster) -> None:
    scaling = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 0.5, "downscale_delay_s": 2.0}
    gateway = Gateway(config(fixed_ms=BUSY_MS, autoscaling=scaling))
    assert len(gateway.pids("m-1-synthetic")) == 1
    with Load(gateway.http_port, "m", connections=32) as load:
        until(lambda: len(gateway.pids("m-1-synthetic")) == 2, within_s=30)
        load.wait_for(100)
    until(lambda: len(gateway.pids("m-1-synthetic")) == 1, within_s=30)
    assert set(load.outcomes) == {200}, load.errors[:3]


def test_an_idle_backend_scales_to_zero_and_a_request_brings_it_back(cluster: Cluster) -> None:
    scaling = {"min_replicas": 0, "downscale_delay_s": 1.5}
    others = {"kind": "synthetic", "fixed_ms": BUSY_MS}
    gateway = Gateway(config(autoscaling=scaling, embedded=others))
    path = "/v2/models/m/infer"
    (first,) = gateway.pids(BACKEND)  # which told the model's tensors
    until(lambda: not psutil.pid_exists(first), within_s=30)
    assert request(gateway.http_port, "GET", "/v2/health/ready")[0] == 200

    with Load(gateway.http_port, "embedded", connections=2) as load:
        load.wait_for(10)
        hurried = infer_body([ROW]) | {"parameters": {"timeout": 100_000}}  # microseconds
        status, answer = request(gateway.http_port, "POST", path, hurried)
        assert (status, "is starting" in answer["error"]) == (503, True)
        until(lambda: len(gateway.pids(BACKEND)) == 1, within_s=30)  # on its way though nobody waits
        (second,) = gateway.pids(BACKEND)
        until(lambda: not psutil.pid_exists(second), within_s=30)

        assert gateway.infer("m", [ROW])[0] == 200  # can wait, and does
        (third,) = gateway.pids(BACKEND)
        assert request(gateway.http_port, "POST", "/v2/repository/models/m/unload", {})[0] == 200
        assert gateway.infer("m", [ROW])[0] == 503
        until(lambda: not psutil.pid_exists(third), within_s=30)
        assert request(gateway.http_port, "POST", "/v2/repository/models/m/load", {})[0] == 200
        assert gateway.infer("m", [ROW])[0] == 200
        load.wait_for(10)
    assert set(load.outcomes) == {200}, load.errors[:3]


def test_requests_and_cost_are_what_clients_and_the_operating_system_count_through_a_kill_a_reload_and_no_replica(
    cluster: Cluster,
) -> None:
    port = free_port()
    scaling = {"min_replicas": 0, "max_replicas": 1, "downscale_delay_s": 1.0}
    with Lives("priced-1-synthetic").watched() as lives:
        backend = {"sessions": 2, "usd_per_hour": 3600.0, "autoscaling": scaling, "fixed_ms": BUSY_MS}
        Gateway(config(port=port, ingress_replicas=2, model={"name": "priced"}, **backend))
        with Load(port, "priced", connections=8) as load:
            load.wait_for(400)
            (victim,) = lives.alive
            kill(victim)
            load.wait_for(400, within_s=60)
        for ask in ("unload", "load"):
            assert request(port, "POST", f"/v2/repository/models/priced/{ask}", {})[0] == 200
        with Load(port, "priced", connections=8) as more:
            more.wait_for(100, within_s=60)
            until(lambda: told(port, "gateway_workers", model="priced") == 2, within_s=5)
            # By whichever ingress, and whoever has the sessions at that moment.
            workers = {told(port, "gateway_workers", model="priced") for _ in range(30)}
            more.wait_for(100)
        outcomes = load.outcomes + more.outcomes
        assert set(outcomes) <= {200, 503}  # while no replica is there
        assert workers == {2}
        until(lambda: told(port, "gateway_requests_total", model="priced") == outcomes.total(), within_s=5)
        assert told(port, "gateway_requests_total", model="priced", code="ok") == outcomes[200]
        assert told(port, "gateway_request_duration_seconds_count", model="priced") == outcomes[200]
        assert told(port, "gateway_rows_total", model="priced") == outcomes[200]
        until(lambda: not lives.alive, within_s=60)  # idle: scaled to zero
        assert told(port, "gateway_processes", role="ingress") == 2
        until(lambda: told(port, "gateway_replicas", model="priced") == 0, within_s=30)  # told a moment later
        until(lambda: told(port, "gateway_cost_usd_per_hour", model="priced") == 0, within_s=30)
        busy, idle = (told(port, "gateway_cost_usd_total", model="priced", state=state) for state in ("busy", "idle"))
        spent = lives.all_s()  # a dollar a second
        assert busy > 1
        # 1 %; of a life what comes after it has told last.
        assert 0.99 * spent - 0.3 - lives.late_s < busy + idle < 1.01 * spent


def test_cost_of_replicas_on_a_node_without_an_ingress_is_what_the_operating_system_counts(
    cluster: Cluster, tmp_path: Path
) -> None:
    # Nodes have no directory in common, as those of one machine would: so the second has another for what is temporary.
    elsewhere: dict[str, Any] = {"env_vars": {"TMPDIR": str(tmp_path)}, "resources": {"elsewhere": 1.0}}
    node = cluster.add_node(num_cpus=2, **NODE, **elsewhere)
    port = free_port()
    scaling = {"min_replicas": 0, "max_replicas": 1, "downscale_delay_s": 1.0}
    on_head = {"kind": "synthetic", "resources": {"head": 0.1}}  # which keeps the ingresses there
    backend = {"sessions": 2, "usd_per_hour": 3600.0, "autoscaling": scaling, "fixed_ms": BUSY_MS}
    backend["resources"] = {"elsewhere": 0.1}
    try:
        with Lives("far-1-synthetic").watched() as lives:
            gateway = Gateway(config(port=port, ingress_replicas=2, embedded=on_head, model={"name": "far"}, **backend))
            ask = partial(request, port, "POST", "/v2/models/far/infer", infer_body([ROW]))
            with Load(port, "far", connections=8) as load:
                load.wait_for(200)
                (victim,) = lives.alive
                assert str(tmp_path) in Path(f"/proc/{victim}/environ").read_text()
                kill(victim)
                load.wait_for(400, within_s=60)
                until(lambda: lives.alive and lives.alive != [victim], within_s=60)
                until(lambda: told(port, "gateway_replicas", model="far") == 1, within_s=10)
                assert told(port, "gateway_processes", role="replica") == 1
                for ingress in gateway.pids("ingress"):  # the one that counts, sooner or later
                    kill(ingress)
                    until(lambda gone=ingress: gone not in (two := gateway.pids("ingress")) and len(two) == 2, within_s=60)
                load.wait_for(200, within_s=60)
            for change in ("unload", "load"):
                assert request(port, "POST", f"/v2/repository/models/far/{change}", {})[0] == 200
            until(lambda: ask()[0] == 200, within_s=60)
            until(lambda: not lives.alive, within_s=60)  # idle: scaled to zero
            until(lambda: ask()[0] == 200, within_s=60)  # and back
            until(lambda: not lives.alive, within_s=60)
            until(lambda: told(port, "gateway_replicas", model="far") == 0, within_s=30)
            until(lambda: told(port, "gateway_cost_usd_per_hour", model="far") == 0, within_s=30)
            busy, idle = (told(port, "gateway_cost_usd_total", model="far", state=state) for state in ("busy", "idle"))
            spent = lives.all_s()  # a dollar a second
        assert busy > 1
        # 1 %; of three lives what comes after each has told last.
        assert 0.99 * spent - 0.3 - lives.late_s < busy + idle < 1.01 * spent
    finally:
        serve.delete("gateway")
        cluster.remove_node(node)


def test_a_configuration_file_of_serve_deploys_the_gateway(cluster: Cluster) -> None:
    port = free_port()
    document = config(port=port).model_dump(mode="json", exclude_none=True)
    app = {"name": "from-file", "route_prefix": None, "import_path": "gateway.app:build", "args": document}
    schema = ServeDeploySchema.model_validate({"applications": [app]})
    _get_global_client().deploy_apps(schema)
    until(lambda: serve.status().applications["from-file"].status == "RUNNING", within_s=40)
    assert request(port, "POST", "/v2/models/m/infer", infer_body([ROW]))[0] == 200
    serve.delete("from-file")


def test_a_killed_node_leaves_the_rest_working(cluster: Cluster) -> None:
    node = cluster.add_node(num_cpus=2, **NODE)
    port = free_port()
    # 1.5 of the 2 processors each: one backend replica per node. What the embedded backend needs keeps the ingress on the head.
    on_head = {"kind": "synthetic", "resources": {"head": 0.1}}
    gateway = Gateway(config(port=port, embedded=on_head, replicas=2, fixed_ms=BUSY_MS, resources={"num_cpus": 1.5}))
    with Load(port, "m") as load:
        load.wait_for(200)
        cluster.remove_node(node, allow_graceful=False)
        load.wait_for(500)
        until(lambda: len(gateway.pids("m-1-synthetic")) == 1, within_s=20)  # there is no room for the other
        load.wait_for(200)
    assert set(load.outcomes) == {200}, load.errors[:3]
    assert load.slowest_s < 5.0


def test_a_trace_joins_a_client_to_the_session_in_a_replica(cluster: Cluster) -> None:
    sent = {"grpc": "a" * 32, "rest": "b" * 32}
    headers = {protocol: {"traceparent": f"00-{trace}-{'c' * 16}-01"} for protocol, trace in sent.items()}
    with collecting("grpc") as collector:
        tracing = {"endpoint": collector.url, "sample_ratio": 0.0}
        gateway = Gateway(config(port=free_port(), tracing=tracing, isolation="process", sessions=1))
        with triton.InferenceServerClient(f"127.0.0.1:{gateway.grpc_port}") as client:
            tensor = triton.InferInput("INPUT0", [1, 16], "FP32")
            tensor.set_data_from_numpy(np.array([ROW], np.float32))
            client.infer("m", [tensor], headers=headers["grpc"])
        url = f"http://127.0.0.1:{gateway.http_port}/v2/models/m/infer"
        body = json.dumps(infer_body([ROW])).encode()
        with urllib.request.urlopen(urllib.request.Request(url, body, headers["rest"]), timeout=10) as answer:
            assert answer.headers["traceresponse"].startswith(f"00-{sent['rest']}-")
        scrape = urllib.request.Request(f"http://127.0.0.1:{gateway.http_port}/metrics", headers={"Accept": OPENMETRICS})
        with urllib.request.urlopen(scrape, timeout=10) as answer:
            exposed = answer.read().decode()
        (replica_pid,), (ingress_pid,) = gateway.pids(BACKEND), gateway.pids("ingress")
        serve.delete("gateway")  # they send what they have
        all_spans = collector.wait_for(lambda spans: len(spans) == 16)
    for trace in sent.values():
        assert f'# {{trace_id="{trace}"}} ' in exposed
        spans = {span.name: span for span in all_spans if span.trace_id == trace}
        (server,) = (span for span in spans.values() if span.parent_id == "c" * 16)
        batch, replica, session = (spans[name] for name in ("batch", "replica", "compute"))
        assert [batch.parent_id, replica.parent_id, session.parent_id] == [server.span_id, batch.span_id, replica.span_id]
        assert (batch.kind, replica.kind) == (CLIENT, SERVER)
        assert {spans[name].process for name in ("decode", "queue", "batch_wait", "encode")} == {ingress_pid}
        assert (batch.process, replica.process, session.process) == (ingress_pid, replica_pid, replica_pid)
        assert replica.start_ns <= session.start_ns <= session.end_ns <= replica.end_ns
