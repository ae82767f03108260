"""Several processes without Ray, in front of a server elsewhere: they share ports, load, counts and limits, and come and go."""

import contextlib
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
import yaml

from gateway.access.rules import digest_of
from gateway.config import parse_config
from gateway.errors import ConfigError
from gateway.from_python import running
from tests import waiting
from tests.cluster.load import GrpcLoad, Load, infer_body
from tests.served.gateway_process import Served, served

pytestmark = pytest.mark.slow

ROW = [float(column) for column in range(16)]
TENSORS = {
    "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 16]}],
    "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 16]}],
}
MODULE = "gateway.commands.side_by_side"

until = partial(waiting.until, every_s=0.05)  # what is asked for looks at every process


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """What speaks Triton's protocol: a gateway with the model in its process."""
    path = tmp_path_factory.mktemp("behind") / "x.yaml"
    backend = {"kind": "synthetic", "fixed_ms": 0.2, "row_ms": 0}
    path.write_text(yaml.safe_dump({"models": [{"name": "m", "max_rows": 64, **TENSORS, "backends": [backend]}]}))
    with served(path, "--no-ray") as gateway:
        yield gateway


def written(path: Path, behind: Served, processes: int = 2, **server: Any) -> Path:
    backend = {"kind": "triton", "url": behind.grpc, "model": "m"}
    document = {
        "server": {"ingress_replicas": processes, "drain_timeout_s": 5, **server},
        "models": [{"name": "m", "max_rows": 64, "backends": [backend]}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


def processes_of(gateway: Served) -> list[psutil.Process]:
    children = psutil.Process(gateway.process.pid).children()
    return [child for child in children if child.status() != psutil.STATUS_ZOMBIE and MODULE in child.cmdline()]


def connections_of(gateway: Served, port: int) -> list[int]:
    return sorted(
        sum(one.status == psutil.CONN_ESTABLISHED and one.laddr.port == port for one in process.net_connections("tcp"))
        for process in processes_of(gateway)
    )


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def listening(gateway: Served) -> int:
    """Processes that do."""
    port = port_of(gateway.http)
    return sum(
        any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in process.net_connections("tcp"))
        for process in processes_of(gateway)
    )


@contextlib.contextmanager
def side_by_side(path: Path, processes: int = 2, log: Path | None = None) -> Iterator[Served]:
    with served(path, "--no-ray", log=log) as gateway:
        until(lambda: listening(gateway) == processes)
        children = processes_of(gateway)
        yield gateway
    _, alive = psutil.wait_procs(children, 5)
    assert alive == []


def count(gateway: Served) -> int:
    """Of inferences answered, as a scrape has it."""
    with urllib.request.urlopen(f"http://{gateway.http}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    found = re.findall(r'^gateway_requests_total\{code="ok",model="m".*\} (\d+)$', text, re.MULTILINE)
    return sum(map(int, found))


def test_they_share_the_ports_and_the_load_and_count_as_one(tmp_path: Path, behind: Served) -> None:
    with side_by_side(written(tmp_path / "x.yaml", behind)) as gateway:
        port = port_of(gateway.http)
        with Load(port, "m", connections=24) as load, GrpcLoad(port_of(gateway.grpc), "m") as calls:
            until(lambda: sum(connections_of(gateway, port)) == 24 and connections_of(gateway, port)[0] >= 9)
            until(lambda: calls.outcomes["ok"] >= 20)
        assert load.outcomes.keys() == {200}
        assert calls.outcomes.keys() == {"ok"}
        sent = load.outcomes[200] + calls.outcomes["ok"]
        until(lambda: count(gateway) == sent)  # each tells the others once a second
        for _ in range(8):  # whoever is asked
            assert count(gateway) == sent
        with triton.InferenceServerClient(gateway.grpc) as client:
            tensor = triton.InferInput("INPUT0", [1, 16], "FP32").set_data_from_numpy(np.array([ROW], np.float32))
            assert client.infer("m", [tensor]).as_numpy("OUTPUT0").shape == (1, 16)


def test_one_that_is_asked_to_end_is_replaced_and_no_request_is_lost(tmp_path: Path, behind: Served) -> None:
    log = tmp_path / "log"
    with side_by_side(written(tmp_path / "x.yaml", behind), log=log) as gateway:
        port = port_of(gateway.http)
        with Load(port, "m", connections=16) as load, GrpcLoad(port_of(gateway.grpc), "m") as calls:
            for ending in (1, 1, 2):  # the last time all of them at once
                before = processes_of(gateway)[:ending]
                for process in before:
                    process.terminate()
                assert psutil.wait_procs(before, 20)[1] == []
                until(lambda: listening(gateway) == 2)
                load.wait_for(200)
                until(lambda: connections_of(gateway, port)[0] >= 5)
        assert load.outcomes.keys() == {200}
        assert calls.outcomes.keys() == {"ok"}
    assert len(re.findall(r"process \d+ ends: another takes its place", log.read_text())) == 4


def test_one_that_is_killed_is_replaced_and_costs_its_own_connections_only(tmp_path: Path, behind: Served) -> None:
    log = tmp_path / "log"
    with side_by_side(written(tmp_path / "x.yaml", behind), log=log) as gateway:
        port = port_of(gateway.http)
        with Load(port, "m", connections=16) as load:
            load.wait_for(200)
            killed = processes_of(gateway)[0]
            had = sum(one.laddr.port == port and one.status == "ESTABLISHED" for one in killed.net_connections("tcp"))
            killed.kill()
            load.wait_for(200)
            until(lambda: listening(gateway) == 2)
            load.wait_for(200)
        broken = sum(each for outcome, each in load.outcomes.items() if outcome != 200)
        assert broken <= had + 8  # those that its listener had just taken
        assert load.outcomes.keys() - {200} <= {"broken: IncompleteReadError", "broken: ConnectionResetError"}
    assert "was ended by SIGKILL: another takes its place" in log.read_text()


def test_all_are_ready_or_not_with_what_is_behind_them_and_drain_together(tmp_path: Path, behind: Served) -> None:
    with side_by_side(written(tmp_path / "x.yaml", behind)) as gateway, Load(port_of(gateway.http), "m", connections=8) as load:
        load.wait_for(100)
        for _ in range(8):
            with urllib.request.urlopen(f"http://{gateway.http}/v2/health/ready", timeout=20) as answer:
                assert answer.status == 200
        gateway.process.terminate()
        assert gateway.process.wait(10) == 0
        answered = {outcome for outcome in load.outcomes if not str(outcome).startswith("broken: Connection")}
        assert answered == {200}


def test_they_end_with_who_began_them(tmp_path: Path, behind: Served) -> None:
    with contextlib.suppress(AssertionError), side_by_side(written(tmp_path / "x.yaml", behind)) as gateway:
        children = processes_of(gateway)
        assert len(children) == 2
        gateway.process.kill()
        _, alive = psutil.wait_procs(children, 5)
        assert alive == []


def test_a_fault_of_the_first_is_told_once_and_ends_it_all(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    nobody = Served("", "127.0.0.1:9", subprocess.Popen(["true"], text=True))
    nobody.process.wait()
    written(path, nobody, http_port=0, grpc_port=0)
    ended = subprocess.run(
        [sys.executable, "-m", "gateway.cli", "serve", str(path)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.count("gateway: ") == 1, ended.stderr


def test_what_a_key_may_ask_holds_over_all_of_them(tmp_path: Path, behind: Served) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{name: few, hash: 'sha256:{digest_of(b'few').hex()}', requests_per_s: 0.001, burst: 20}}]")
    with side_by_side(written(tmp_path / "x.yaml", behind, access={"keys": str(keys)})) as gateway:
        url, headers = f"http://{gateway.http}/v2/models/m/infer", {"X-Api-Key": "few"}
        body = json.dumps(infer_body([ROW])).encode()

        def ask() -> int:
            try:
                with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=20) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as exc:
                exc.close()
                return exc.code

        # Each has a connection of its own, so that both processes get some.
        assert Counter(ask() for _ in range(60)) == {200: 20, 429: 40}


def test_python_code_that_asks_for_several_is_told_that_it_is_one_process() -> None:
    document = {
        "server": {"ingress_replicas": 2},
        "models": [{"name": "m", "backends": [{"kind": "triton", "url": "h:1", "model": "m"}]}],
    }
    with pytest.raises(ConfigError, match=r"needs as many processes: use `gateway serve`, or set server.ingress_replicas: 1"):
        running.run(parse_config(document, source="test"))
