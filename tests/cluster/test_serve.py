"""`gateway serve` as a process: it starts Ray, answers, drains on a signal, and leaves nothing behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client

from benchmarks.ports import free_port
from gateway.cluster import application
from gateway.cluster.control import control_name
from gateway.cluster.run_dirs import clear_run_dirs
from gateway.config import parse_config
from gateway.process.run_dir import shared_run_dir
from tests import waiting
from tests.cluster.conftest import NODE, Gateway, config, request
from tests.cluster.load import infer_body

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .metrics_interval_s. field"),  # deployments._scale
]

until = partial(waiting.until, every_s=0.1)  # what is asked for looks at every process


def serving(path: Path, document: dict[str, Any], **environment: str) -> "subprocess.Popen[str]":
    path.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "gateway.cli", "serve", str(path)]
    return subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def start(path: Path, document: dict[str, Any], **environment: str) -> tuple["subprocess.Popen[str]", int]:
    """The process, and its HTTP port once it answers. environment: beside what is there."""
    process = serving(path, document, **environment)
    assert process.stdout is not None
    # Ray may have something to say as well, of a cluster that was there before.
    ready = next((line for line in process.stdout if line.startswith("gateway ready")), None)
    if ready is None:
        pytest.fail(process.communicate(timeout=10)[1])
    return process, int(ready.split()[2].rpartition(":")[2])


def run_dirs(application: str) -> set[Path]:
    """Of any life of it, on this machine."""
    return set(shared_run_dir("").glob(f"session_*-{application}*"))


@contextmanager
def segment() -> Iterator[str]:
    """The key of a shared memory object."""
    path = Path(f"/dev/shm/gateway-test-{uuid.uuid4().hex}")
    path.write_bytes(bytes(64))
    try:
        yield f"/{path.name}"
    finally:
        path.unlink()


@pytest.fixture
def ray_directory() -> Iterator[Path]:
    """Where Ray leaves its address and its sockets, whose paths have to be short."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def end(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)


def test_serve_joins_a_cluster_and_takes_back_only_its_application(cluster: Cluster, tmp_path: Path) -> None:
    document = config().model_dump(mode="json", exclude_none=True)
    document["ray"] = {"address": cluster.address, "application": "joined"}
    process, port = start(tmp_path / "gateway.yaml", document)
    try:
        assert request(port, "POST", "/v2/models/m/infer", infer_body([[1.0] * 16]))[0] == 200
        assert serve.status().applications["joined"].status == "RUNNING"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert "joined" not in serve.status().applications  # and Serve still answers
    finally:
        end(process)


def test_who_is_deployed_after_one_that_was_deleted_has_none_of_its_regions_and_counts(
    cluster: Cluster, tmp_path: Path
) -> None:
    document = config().model_dump(mode="json", exclude_none=True)
    document["ray"] = {"address": cluster.address, "application": "anew"}
    before = run_dirs("anew")
    with segment() as key:
        for _ in range(2):
            process, port = start(tmp_path / "gateway.yaml", document)
            try:
                assert request(port, "GET", "/v2/systemsharedmemory/status") == (200, [])
                (model,) = request(port, "GET", "/v2/status")[1]["models"]
                assert model["requests"] == {"ok": 0}
                assert request(port, "POST", "/v2/models/m/infer", infer_body([[1.0] * 16]))[0] == 200
                body = {"key": key, "byte_size": 64}
                assert request(port, "POST", "/v2/systemsharedmemory/region/r/register", body)[0] == 200
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 0
                assert run_dirs("anew") == before
            finally:
                end(process)


def test_a_replica_that_is_frozen_holds_no_end_up(cluster: Cluster, tmp_path: Path) -> None:
    document = config().model_dump(mode="json", exclude_none=True)
    document["server"]["drain_timeout_s"] = 1.0
    document["ray"] = {"address": cluster.address, "application": "frozen"}
    process, _ = start(tmp_path / "gateway.yaml", document)
    try:
        application = _get_global_client().get_serve_details()["applications"]["frozen"]
        (replica,) = application["deployments"]["m-1-synthetic"]["replicas"]
        os.kill(replica["pid"], signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=30)
        assert process.returncode == 0
        assert f"replica {replica['actor_name']} has not answered for 1.5 s, and is to end: killing it" in told
        assert "frozen" not in serve.status().applications
    finally:
        end(process)


def test_who_is_followed_at_once_by_another_ends_with_its_own_replicas_and_leaves_no_files(
    cluster: Cluster, tmp_path: Path
) -> None:
    document = config(port=free_port(), fixed_ms=4000.0).model_dump(mode="json", exclude_none=True)
    document["ray"] = {"address": cluster.address, "application": "followed"}
    before = run_dirs("followed")
    first, port = start(tmp_path / "first.yaml", document)
    try:
        asking = threading.Thread(target=request, args=(port, "POST", "/v2/models/m/infer", infer_body([[1.0] * 16])))
        asking.start()
        time.sleep(0.5)  # it now runs in the replica, for some seconds more: so long the first is being deleted
        first.send_signal(signal.SIGTERM)
        document["models"][0]["backends"][0]["fixed_ms"] = 1.0
        second, _ = start(tmp_path / "second.yaml", document)
        try:
            _, told = first.communicate(timeout=20)
            assert first.returncode == 0
            assert "still being deleted" not in told
            assert len(run_dirs("followed") - before) == 1  # the second's
            assert request(port, "POST", "/v2/models/m/infer", infer_body([[1.0] * 16]))[0] == 200
            second.send_signal(signal.SIGTERM)
            assert second.wait(30) == 0
            assert run_dirs("followed") == before
            asking.join()
        finally:
            end(second)
    finally:
        end(first)


FAILING = """
class Failing:
    def __init__(self):
        raise RuntimeError("no weights here")
    def predict(self, inputs):
        return inputs
"""


def test_who_was_replaced_ends_and_deletes_nothing_and_who_fails_to_replace_leaves_what_runs(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    document = config(port=free_port()).model_dump(mode="json", exclude_none=True)
    document["ray"] = {"address": cluster.address, "application": "twice"}
    before = run_dirs("twice")
    first, port = start(tmp_path / "first.yaml", document)
    try:
        document["models"][0]["slo"] = {"p99_ms": 500}
        second, _ = start(tmp_path / "second.yaml", document)
        try:
            _, told = first.communicate(timeout=30)
            assert first.returncode == 1
            assert "the application twice was replaced by another that somebody has deployed under its name: ending" in told
            document["models"][0] |= {"version": "2", "backends": [{"kind": "python", "model": "failing.py:Failing"}]}
            third = serve_in_vain(tmp_path / "third.yaml", document)
            assert third.returncode == 1
            assert "the application twice is left on the Ray cluster: what ran there before goes on answering" in third.stderr
            assert request(port, "POST", "/v2/models/m/infer", infer_body([[1.0] * 16]))[0] == 200
            assert second.poll() is None
            serve.delete("twice")
            _, told = second.communicate(timeout=30)
            assert second.returncode == 1
            assert "the application twice was deleted by somebody else: ending" in told
            assert run_dirs("twice") == before
        finally:
            end(second)
    finally:
        end(first)


SLOW = """
import time
class Slow:
    def __init__(self):
        time.sleep(3)
    def predict(self, inputs):
        return inputs
"""


def test_ctrl_c_while_models_load_on_a_busy_cluster_leaves_it_as_it_was_and_says_nothing_of_ray(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW.replace("sleep(3)", "sleep(100)"))
    tensor = {"name": "x", "datatype": "FP32", "shape": [-1, 4]}
    model = {"name": "slow", "inputs": [tensor], "outputs": [tensor], "backends": [{"kind": "python", "model": "slow.py:Slow"}]}
    document = {
        "server": {"http_port": 0, "grpc_port": 0},
        "ray": {"address": cluster.address, "application": "loading"},
        "models": [model],
    }
    path = tmp_path / "gateway.yaml"
    path.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "gateway.cli", "serve", str(path)]
    controller = ray.get(_get_global_client()._controller.get_pid.remote())
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any("loading slow" in line for line in iter(process.stderr.readline, "") if line.startswith("(ServeReplica"))
        os.kill(controller, signal.SIGSTOP)
        time.sleep(1.5)  # until it asks the controller, as it does once a second
        process.send_signal(signal.SIGINT)
        time.sleep(1.5)  # Ray looks once a second whether signals have come
        os.kill(controller, signal.SIGCONT)
        _, told = process.communicate(timeout=60)
        assert (process.returncode, told) == (0, "stopping\n")
        assert "loading" not in serve.status().applications
    finally:
        os.kill(controller, signal.SIGCONT)
        end(process)


def test_the_end_while_a_replica_waits_for_a_resource_that_no_node_has_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    nowhere = config(replicas=1, resources={"nowhere": 1}).model_dump(mode="json", exclude_none=True)
    nowhere["server"] |= {"ingress_replicas": 2, "http_port": free_port(), "grpc_port": free_port(), "drain_timeout_s": 1.0}
    nowhere["ray"] = {"address": cluster.address, "application": "waiting"}
    before = run_dirs("waiting")
    process = serving(tmp_path / "gateway.yaml", nowhere)
    try:
        assert process.stderr is not None
        assert any("loading m" in line for line in iter(process.stderr.readline, "") if line.startswith("(ServeReplica"))
        until(lambda: run_dirs("waiting") > before)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "Traceback" not in told
        assert "could not be deleted" not in told
        assert "has not answered" not in told
        assert "waiting" not in serve.status().applications
        assert run_dirs("waiting") == before
        until(lambda: not has_control("waiting"))
    finally:
        end(process)


def test_what_an_application_that_is_gone_has_left_is_removed_on_every_node(cluster: Cluster, tmp_path: Path) -> None:
    node = cluster.add_node(**NODE, env_vars={"TMPDIR": str(tmp_path)})  # nodes have no directory in common
    try:
        left = tmp_path / f"gateway-{os.geteuid()}" / "gone"
        left.mkdir(parents=True, mode=0o700)
        clear_run_dirs("gone", None, unused_s=20.0)
        assert not left.exists()
    finally:
        cluster.remove_node(node)


def test_a_node_that_is_frozen_holds_no_end_up_for_what_it_has_left(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    node = cluster.add_node(**NODE)
    raylet = node.all_processes["raylet"][0].process.pid
    os.kill(raylet, signal.SIGSTOP)
    try:
        began = time.monotonic()
        clear_run_dirs("gone", None, unused_s=0.0)
        assert time.monotonic() - began < 5
        assert "/gone may be left on nodes that did not clear it within 2.0 s: 127.0.0.2" in caplog.text
    finally:
        os.kill(raylet, signal.SIGCONT)
        cluster.remove_node(node)


def test_a_node_that_dies_is_named_for_what_it_has_left(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    node = cluster.add_node(**NODE)
    raylet = node.all_processes["raylet"][0].process.pid
    os.kill(raylet, signal.SIGSTOP)  # so it is at it still
    dies = threading.Timer(0.5, os.kill, (raylet, signal.SIGKILL))
    dies.start()
    try:
        clear_run_dirs("gone", None, unused_s=3.0)
        assert "/gone may be left on nodes that did not clear it within 5.0 s: 127.0.0.2" in caplog.text
    finally:
        dies.join()
        cluster.remove_node(node)


def test_ctrl_c_before_anything_is_deployed_ends_at_once(cluster: Cluster, tmp_path: Path) -> None:
    document = config().model_dump(mode="json", exclude_none=True)
    document["ray"] = {"address": cluster.address, "application": "before"}

    def drivers() -> int:
        return len(ray._private.state.state.job_table())

    before = drivers()
    controller = ray.get(_get_global_client()._controller.get_pid.remote())
    os.kill(controller, signal.SIGSTOP)  # so that nothing is deployed
    process = serving(tmp_path / "gateway.yaml", document)
    try:
        until(lambda: drivers() > before)
        time.sleep(2)  # until it asks the controller, which nothing tells of; sooner, this tests less
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=15)
        assert process.returncode == 0
        assert told.endswith("stopping\n")
    finally:
        os.kill(controller, signal.SIGCONT)
        end(process)


def has_control(application: str) -> bool:
    return any(actor["name"] == control_name(application) for actor in ray.util.list_named_actors(all_namespaces=True))


def test_ctrl_c_of_an_upgrade_gives_the_application_back_to_whom_it_was_to_replace_or_deletes_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW.replace("sleep(3)", "sleep(100)"))
    document = config(port=free_port()).model_dump(mode="json", exclude_none=True)
    document["ray"] = {"address": cluster.address, "application": "upgraded"}
    slow = {"kind": "python", "model": "slow.py:Slow"}
    backends = [slow | {"placement": "replicas"}, slow | {"name": "embedded"}]
    upgrade = document | {"models": [document["models"][0] | {"version": "2", "backends": backends}]}

    def status() -> str:
        return serve.status().applications["upgraded"].status.value

    def upgrading() -> "subprocess.Popen[str]":
        process = serving(tmp_path / "upgrade.yaml", upgrade)
        assert process.stderr is not None
        told = (line for line in iter(process.stderr.readline, "") if line.startswith("(ServeReplica:upgraded:ingress"))
        assert any("loading m" in line for line in told)
        return process

    first, port = start(tmp_path / "first.yaml", document)
    second = upgrading()
    try:
        second.send_signal(signal.SIGINT)
        _, told = second.communicate(timeout=30)
        assert second.returncode == 0
        assert "the application upgraded is left on the Ray cluster: what ran there before goes on answering" in told
        until(lambda: status() == "RUNNING")
        assert request(port, "POST", "/v2/models/m/infer", infer_body([[1.0] * 16]))[0] == 200
        second = upgrading()
        first.send_signal(signal.SIGTERM)
        _, told = first.communicate(timeout=30)
        assert first.returncode == 0
        assert "the application upgraded was to be replaced, in vain: deployed again" in told
        assert "Traceback" not in told
        second.send_signal(signal.SIGINT)
        _, told = second.communicate(timeout=30)
        assert second.returncode == 0
        assert "goes on answering" not in told
        assert "upgraded" not in serve.status().applications
    finally:
        end(second)
        end(first)


def test_serve_starts_ray_answers_what_is_in_flight_on_a_signal_and_ends_what_it_started(
    ray_directory: Path, tmp_path: Path
) -> None:
    document = config(fixed_ms=1500.0).model_dump(mode="json", exclude_none=True)
    document["ray"] = {"application": "alone"}
    before = run_dirs("alone")
    process, port = start(tmp_path / "gateway.yaml", document, RAY_TMPDIR=str(ray_directory))  # no Ray's address is there
    try:
        started = psutil.Process(process.pid).children(recursive=True)
        assert any("raylet" in child.name() for child in started)
        answers: list[tuple[int, Any]] = []
        body = infer_body([[1.0] * 16])
        asking = threading.Thread(target=lambda: answers.append(request(port, "POST", "/v2/models/m/infer", body)))
        asking.start()
        time.sleep(0.5)  # it now runs in the replica, for a second more
        for each in (psutil.Process(process.pid), *started):  # as systemd does
            each.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stdout is not None
        assert process.stderr is not None
        out, told = process.stdout.read(), process.stderr.read()
        asking.join()
        assert [status for status, _ in answers] == [200]
        assert run_dirs("alone") == before
        # One whose parent ended before it has ended, too, until init looks.
        assert not [each for each in started if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        models, page, how, command = out.splitlines()
        assert (models, page, how) == ("models: m", f"what goes on, in a browser: http://127.0.0.1:{port}/", "try it:")
        assert command.startswith(f"  curl -sS http://127.0.0.1:{port}/v2/models/m/infer -d ")
        assert "stopping: requests in flight have up to 10 s; Ctrl-C again ends at once" in told.splitlines()
        assert "model m version 1 is ready on m:1/synthetic" in told  # an ingress replica's
        replica = r"\(ServeReplica:\S+ pid=\d+\) "
        steps = "loading|starting|importing|looking for|stopping"
        ours = rf"{replica}\S+ \S+ (INFO|WARNING) (gateway|backends)\.|({replica})?({steps})"
        assert not [line for line in told.splitlines() if not re.match(ours, line)]
    finally:
        end(process)


@pytest.mark.parametrize("lost", ["gcs_server", "raylet"])
def test_a_lost_ray_is_told_at_once_and_what_is_in_flight_is_answered(lost: str, ray_directory: Path, tmp_path: Path) -> None:
    document = config(fixed_ms=1500.0).model_dump(mode="json", exclude_none=True)
    (ray_directory / "ray").mkdir()
    (ray_directory / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{free_port()}")  # of one that is long gone
    process, port = start(tmp_path / "gateway.yaml", document, RAY_TMPDIR=str(ray_directory))
    try:
        answers: list[tuple[int, Any]] = []
        body = infer_body([[1.0] * 16])
        asking = threading.Thread(target=lambda: answers.append(request(port, "POST", "/v2/models/m/infer", body)))
        asking.start()
        time.sleep(0.5)  # it now runs in the replica, for a second more
        next(child for child in psutil.Process(process.pid).children(recursive=True) if lost in child.name()).kill()
        _, told = process.communicate(timeout=45)  # Ray itself waits for a minute
        asking.join()
        assert process.returncode == 1
        assert [status for status, _ in answers] == [200]
        assert "starting another cluster" in told
        name = "head process (GCS)" if lost == "gcs_server" else "raylet"
        assert f"Ray's {name} at " in told
        assert "is gone: answering what is in flight, then ending" in told
    finally:
        end(process)


@pytest.fixture
def lasting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster whose head may be killed and started again: it goes on where it was."""
    monkeypatch.setenv("RAY_gcs_storage", "rocksdb")
    monkeypatch.setenv("RAY_gcs_storage_path", str(tmp_path / "head"))
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "300")
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    yield cluster
    cluster.shutdown()


def test_what_runs_on_a_cluster_whose_head_is_away_is_left_and_named_and_a_lost_raylet_ends_who_has_joined_there(
    lasting: Cluster, tmp_path: Path
) -> None:
    document = config(port=free_port(), ingress_replicas=2).model_dump(mode="json", exclude_none=True)
    document["server"]["drain_timeout_s"] = 1.0
    document["ray"] = {"address": lasting.address, "application": "lasting"}
    head: Any = lasting.head_node
    body = infer_body([[1.0] * 16])
    process, port = start(tmp_path / "gateway.yaml", document)
    try:
        head.kill_gcs_server()
        assert process.stderr is not None
        assert any("is gone: still serving" in line for line in iter(process.stderr.readline, ""))
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=15)
        assert process.returncode == 1
        gone = r"the application lasting may be left on the Ray cluster: Ray's head process \(GCS\) at \S+:\d+ is gone"
        assert re.search(gone, told), told
        head.start_gcs_server()
        process, _ = start(tmp_path / "gateway.yaml", document)
        assert {request(port, "POST", "/v2/models/m/infer", body)[0] for _ in range(20)} == {200}
        head.kill_raylet()
        _, told = process.communicate(timeout=15)
        assert process.returncode == 1
        assert re.search(r"Ray's raylet at \S+:\d+ is gone: ending", told), told
    finally:
        end(process)


NOWHERE = "127.0.0.1:1"


@pytest.mark.parametrize(
    ("address", "environment", "code", "message"),
    [
        (NOWHERE, None, 1, f"ray.address: '{NOWHERE}': no Ray cluster answers there"),
        (None, NOWHERE, 1, f"RAY_ADDRESS: '{NOWHERE}': no Ray cluster answers there"),
        ("ray://127.0.0.1:10001", None, 2, "ray.address: 'ray://127.0.0.1:10001': expected host:port, auto or local"),
        (None, "somewhere", 2, "RAY_ADDRESS: 'somewhere': expected host:port, auto or local"),
    ],
)
def test_serve_does_not_wait_for_a_cluster_that_is_not_there(
    address: str | None, environment: str | None, code: int, message: str, tmp_path: Path
) -> None:
    document = config().model_dump(mode="json", exclude_none=True)
    document["ray"] = {"address": address} if address else {}
    finished = serve_in_vain(tmp_path / "gateway.yaml", document, **({"RAY_ADDRESS": environment} if environment else {}))
    assert finished.returncode == code
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr


def test_an_address_that_something_else_answers_at_is_no_cluster(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        document = config().model_dump(mode="json", exclude_none=True)
        document["ray"] = {"address": f"127.0.0.1:{silent.getsockname()[1]}"}
        finished = serve_in_vain(tmp_path / "gateway.yaml", document)
    assert finished.returncode == 1
    assert "no Ray cluster answers there" in finished.stderr


def test_a_ray_that_does_not_start_is_told_in_a_line(ray_directory: Path, tmp_path: Path) -> None:
    document = config().model_dump(mode="json", exclude_none=True)
    impatient = {"RAY_TMPDIR": str(ray_directory), "RAY_gcs_server_port_wait_time_s": "0"}
    finished = serve_in_vain(tmp_path / "gateway.yaml", document, **impatient)
    assert finished.returncode == 1
    assert finished.stderr.splitlines()[-1].startswith("gateway: Ray did not start on this machine, which may be too busy: ")
    assert "Traceback" not in finished.stderr


def test_another_application_does_not_get_the_ports_of_the_first(cluster: Cluster, tmp_path: Path) -> None:
    first = Gateway(config(port=free_port()))
    document = config(port=first.http_port, grpc_port=first.grpc_port).model_dump(mode="json", exclude_none=True)
    for address in (cluster.address, "local"):  # another application, another cluster
        document["ray"] = {"address": address, "application": "second"}
        finished = serve_in_vain(tmp_path / "gateway.yaml", document)
        assert finished.returncode == 1
        assert f"server.http_port: {first.http_port}: taken by another gateway, process" in finished.stderr
    # Nor one that is deployed past `gateway serve`.
    with pytest.raises(RuntimeError):
        serve.run(application(parse_config(document, source="test")), name="second", route_prefix=None)
    faults = [deployment.message for deployment in serve.status().applications["second"].deployments.values()]
    assert any(f"server.http_port: {first.http_port}: taken by another gateway" in fault for fault in faults)
    serve.delete("second")
    assert first.infer("m", [[1.0] * 16])[0] == 200


def serve_in_vain(path: Path, document: dict[str, Any], **environment: str) -> "subprocess.CompletedProcess[str]":
    path.write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "gateway.cli", "serve", str(path)]
    variables = os.environ | environment
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
