"""The command line: what it says, and with which exit code."""

import argparse
import contextlib
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from gateway.cli import parser
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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def test_it_tells_its_version() -> None:
    done = gateway("--version")
    assert (done.returncode, done.stdout) == (0, f"gateway {version('serving-gateway')}\n")


def helps(command: argparse.ArgumentParser) -> Iterator[str]:
    yield command.format_help()
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from helps(child)


def test_every_help_has_examples_that_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    own = [told for told in helps(parser()) if "usage: gateway route [" not in told]  # which only has `explain`
    assert len(own) >= 5
    for told in own:
        examples = re.findall(r"^  (gateway .*)$", told.partition("\nexamples:\n")[2], re.MULTILINE)
        assert examples, told
        for example in examples:
            with contextlib.suppress(SystemExit):  # --help
                arguments = parser().parse_args(shlex.split(example)[1:])
                assert not hasattr(arguments, "config") or (ROOT / arguments.config).exists()
    assert "error" not in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_is_told_how_to_complete_it(shell: str) -> None:
    done = gateway("--print-completion", shell)
    assert done.returncode == 0
    assert "--grpc-port" in done.stdout
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)


def test_in_json_the_reason_why_it_ends_is_an_object_too(tmp_path: Path) -> None:
    done = gateway("check", "--log-format", "json", str(tmp_path / "none.yaml"))
    assert done.returncode == 2
    assert json.loads(done.stderr)["message"].startswith(f"{tmp_path}/none.yaml: cannot be read")


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    many = "models: [" + ", ".join(f"{{name: m{i}, backends: [{{kind: synthetic}}]}}" for i in range(2000)) + "]"
    command = [sys.executable, "-m", "gateway.cli", "check", written(tmp_path, many)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("m0 version 1")
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""


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
