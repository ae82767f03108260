"""The command line: what it says, and with which exit code."""

import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from benchmarks.ports import free_port
from tests.served.gateway_process import ROOT, served

pytestmark = pytest.mark.slow

SYNTHETIC = "models: [{name: m, backends: [{kind: synthetic}]}]"


def gateway(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "gateway.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    return str(path)


def test_ray_and_no_ray_exclude_each_other(tmp_path: Path) -> None:
    done = gateway("serve", "--no-ray", "--ray-address", "local", written(tmp_path, SYNTHETIC))
    assert done.returncode == 2
    assert "--ray-address: local: not with --no-ray" in done.stderr


def test_check_says_what_would_be_served(tmp_path: Path) -> None:
    done = gateway("check", written(tmp_path, SYNTHETIC))
    assert done.returncode == 0
    assert done.stdout.startswith("m version 1: no SLO")


def test_a_faulty_configuration_exits_2_before_anything_starts(tmp_path: Path) -> None:
    path = written(tmp_path, "models: [{name: m, backends: [{kind: synthetic, sesions: 2}]}]")
    for command in (("check",), ("serve", "--no-ray"), ("serve",), ("compile",)):
        done = gateway(*command, path)
        assert done.returncode == 2
        fault = f"{path}:1: models[0].backends[0].sesions: 2: unknown key; did you mean `sessions`?"
        assert done.stderr.splitlines()[0] == fault


def test_every_model_that_cannot_load_is_named_with_its_reason(tmp_path: Path) -> None:
    broken = "backends: [{kind: synthetic, fail_opens: 1}]"
    path = written(
        tmp_path, f"models: [{{name: m, {broken}}}, {{name: well, backends: [{{kind: synthetic}}]}}, {{name: n, {broken}}}]"
    )
    done = gateway("serve", "--no-ray", path, "--http-port", "0", "--grpc-port", "0")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == [
        f"{start}failed to load '{name}' version 1: {name}:1/synthetic: failed to load: session 0: told to fail by `fail_opens`"
        for start, name in (("gateway: ", "m"), ("", "n"))
    ]
    assert done.stderr.count("; the other models are loaded, to name all that fail") == 1  # once m has failed
    assert "Traceback" not in done.stderr


RAY = pytest.param(("--ray-address", "local"), marks=pytest.mark.ray, id="ray")
WAYS = pytest.mark.parametrize("way", [pytest.param(("--no-ray",), id="no-ray"), RAY])


@WAYS
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_port_that_is_taken_is_named_before_anything_is_loaded(tmp_path: Path, way: tuple[str, ...], protocol: str) -> None:
    never = "models: [{name: m, backends: [{kind: synthetic, load_ms: 100000}]}]"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ports = {"http": "0", "grpc": "0"} | {protocol: port}
        options = ["--http-port", ports["http"], "--grpc-port", ports["grpc"]]
        done = gateway("serve", "--quiet", *way, written(tmp_path, never), *options)
    assert done.returncode == 1
    assert done.stderr.strip() == (
        f"gateway: server.{protocol}_port: {port}: taken by another process (127.0.0.1:{port}); "
        f"end it, or choose another (--{protocol}-port)"
    )


@WAYS
def test_two_ports_that_are_taken_are_named_at_once(tmp_path: Path, way: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as http, socket.create_server(("127.0.0.1", 0)) as grpc:
        ports = [str(taken.getsockname()[1]) for taken in (http, grpc)]
        path = written(tmp_path, "models: [{name: m, backends: [{kind: synthetic}]}]")
        done = gateway("serve", "--quiet", *way, path, "--http-port", ports[0], "--grpc-port", ports[1])
    assert done.returncode == 1
    assert [line.partition(": taken by another process (")[0] for line in done.stderr.splitlines()] == [
        f"gateway: server.http_port: {ports[0]}",
        f"gateway: server.grpc_port: {ports[1]}",
    ]


@WAYS
def test_a_second_gateway_on_the_same_ports_is_refused_while_the_first_still_loads(
    tmp_path: Path, way: tuple[str, ...]
) -> None:
    port = str(free_port())
    options = ["--http-port", port, "--grpc-port", "0"]
    never = written(tmp_path, "models: [{name: m, backends: [{kind: synthetic, load_ms: 100000}]}]")
    command = [sys.executable, "-m", "gateway.cli", "serve", "--no-ray", never, *options]
    with subprocess.Popen(command, cwd=ROOT) as first:
        try:
            until = time.monotonic() + 30
            while f"serving-gateway:{port}:" not in Path("/proc/net/unix").read_text():
                assert time.monotonic() < until, "the first gateway claims no port"
                time.sleep(0.05)
            done = gateway("serve", *way, never, *options)
        finally:
            first.kill()
    assert done.returncode == 1
    assert f"server.http_port: {port}: taken by another gateway, process {first.pid} (127.0.0.1:{port})" in done.stderr


def test_replicas_without_ray_are_refused_with_what_to_do(tmp_path: Path) -> None:
    path = written(tmp_path, "models: [{name: m, backends: [{kind: synthetic, placement: replicas}]}]")
    done = gateway("serve", "--no-ray", path, "--http-port", "0", "--grpc-port", "0")
    assert done.returncode == 2
    assert "needs Ray: start without --no-ray" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_well(tmp_path: Path, number: signal.Signals) -> None:
    with served(written(tmp_path, SYNTHETIC), "--no-ray") as gateway_process:
        with urllib.request.urlopen(f"http://{gateway_process.http}/v2/health/ready", timeout=10) as response:
            assert response.status == 200
        gateway_process.process.send_signal(number)
        assert gateway_process.process.wait(30) == 0


def test_ctrl_c_while_it_is_being_imported_ends_it_in_one_line() -> None:
    code = """
import os, signal, sys
class Pressed:
    def find_spec(self, name, path=None, target=None):
        if name == "gateway.commands":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Pressed())
from gateway.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "gateway: ended by Ctrl-C\n")


def test_the_same_press_twice_ends_it_well(tmp_path: Path) -> None:
    with served(written(tmp_path, SYNTHETIC), "--no-ray") as gateway_process:
        gateway_process.process.send_signal(signal.SIGINT)
        time.sleep(0.01)
        gateway_process.process.send_signal(signal.SIGINT)
        assert gateway_process.process.wait(30) == 0
