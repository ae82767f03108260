"""The images: what their scripts do, run as processes; and that the files beside them agree with each other.

No container engine is at hand where these tests run: docs/deploy.md says what that leaves untried.
"""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement

import gateway.cli
from benchmarks.ports import free_port
from tests.served.gateway_process import AS_ANYBODY

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
SYNTHETIC = "models: [{name: m, max_rows: 4, backends: [{kind: synthetic, output: echo}]}]"
REQUEST = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "data": [*range(16)]}]}


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """The entry point, with a program of each name that prints its arguments, and the platforms' folders below this one."""
    (tmp_path / "bin").mkdir()
    for name in ("gateway", "loadtest"):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    text = (DOCKER / "entrypoint.sh").read_text()
    moved = text.replace("/opt/ml", f"{tmp_path}/opt/ml").replace("/mnt/models", f"{tmp_path}/mnt/models")
    assert moved.count(f"{tmp_path}/opt/ml") == text.count("/opt/ml") >= 1
    (tmp_path / "entrypoint.sh").write_text(moved)
    (tmp_path / "opt" / "ml" / "model").mkdir(parents=True)
    (tmp_path / "mnt" / "models").mkdir(parents=True)
    return tmp_path


def entered(places: Path, *arguments: str, within: Sequence[str] = (), **variables: str) -> "subprocess.CompletedProcess[str]":
    """within: a command that becomes the one that follows it."""
    environment = {"PATH": f"{places / 'bin'}:/usr/bin:/bin", **variables}
    command = [*within, "sh", str(places / "entrypoint.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)


MOUNTED = "gateway serve --host 0.0.0.0 {} --http-port {} --grpc-port {}"
SAGEMAKER = "gateway sagemaker serve --model {}"


@pytest.mark.parametrize(
    ("mounted", "arguments", "variables", "becomes"),
    [
        ("opt/ml/model", ["serve"], {}, SAGEMAKER.format("{}/opt/ml/model")),
        ("opt/ml/model", ["serve", "--host", "127.0.0.1"], {}, SAGEMAKER.format("{}/opt/ml/model") + " --host 127.0.0.1"),
        ("mnt/models", ["serve"], {}, MOUNTED.format("{}/mnt/models", 8080, 9000)),
        ("own/x.yaml", ["serve"], {"GATEWAY_MODEL": "{}/own"}, MOUNTED.format("{}/own", 8080, 9000)),
        ("own/x.yaml", ["serve"], {"GATEWAY_MODEL": "{}/own/x.yaml"}, MOUNTED.format("{}/own/x.yaml", 8080, 9000)),
        ("mnt/models", ["serve"], {"GATEWAY_MODEL": "/absent"}, MOUNTED.format("/absent", 8080, 9000)),
        ("", ["serve"], {"SAGEMAKER_MULTI_MODEL": "true"}, SAGEMAKER.format("{}/opt/ml/model")),
        ("mnt/models", ["serve"], {"SAGEMAKER_MULTI_MODEL": "false"}, MOUNTED.format("{}/mnt/models", 8080, 9000)),
        ("base/model", ["serve"], {"SAGEMAKER_BASE_DIR": "{}/base"}, SAGEMAKER.format("{}/base/model")),
        (
            "mnt/models",
            ["serve", "--no-ray", "--host", "127.0.0.1"],
            {},
            f"{MOUNTED.format('{}/mnt/models', 8080, 9000)} --no-ray --host 127.0.0.1",
        ),
        ("", ["serve", "x.yaml"], {}, "gateway serve --host 0.0.0.0 x.yaml"),
        ("", ["serve", "x.yaml", "--host=::1"], {}, "gateway serve --host 0.0.0.0 x.yaml --host=::1"),
        ("", ["serve", "a b.yaml", "--ray"], {}, "gateway serve --host 0.0.0.0 a b.yaml --ray"),
        ("", ["serve", "--help"], {}, "gateway serve --help"),
        ("", ["gateway", "serve", "x.yaml"], {}, "gateway serve --host 0.0.0.0 x.yaml"),
        ("", ["check", "x.yaml"], {}, "gateway check x.yaml"),
        ("", ["--version"], {}, "gateway --version"),
        ("", ["loadtest", "selfcheck"], {}, "loadtest selfcheck"),
    ],
)
def test_the_entry_becomes_the_program_that_is_asked_for(
    mounted: str, arguments: list[str], variables: Mapping[str, str], becomes: str, places: Path
) -> None:
    if mounted:
        folder = places / mounted
        folder = folder.parent if folder.suffix else folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "x.yaml").write_text(SYNTHETIC)
    done = entered(places, *arguments, **{name: value.format(places) for name, value in variables.items()})
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, becomes.format(places), "")


@pytest.mark.parametrize("spelt", ["--host 127.0.0.1", "--host=127.0.0.1", "--hos 127.0.0.1"])
def test_the_address_that_is_asked_for_wins_over_that_of_the_entry(spelt: str, places: Path) -> None:
    _, *typed = entered(places, "serve", "x.yaml", *spelt.split()).stdout.split()
    assert gateway.cli.parser("serve").parse_args(typed).host == "127.0.0.1"


def test_without_a_model_the_entry_says_where_one_belongs(places: Path) -> None:
    done = entered(places, "serve")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"entrypoint: no model: nothing is in {places}/opt/ml/model (SageMaker)" in done.stderr
    assert "mount one there, or name it: serve MODEL" in done.stderr


def test_a_volume_without_a_model_is_empty(places: Path) -> None:
    (places / "mnt" / "models" / "lost+found").mkdir()
    done = entered(places, "serve")
    assert (done.returncode, done.stdout) == (2, "")
    assert "entrypoint: no model: nothing is in " in done.stderr


@pytest.mark.parametrize("mode", [0o300, 0o600])
def test_the_entry_says_who_may_not_read_what_is_mounted(mode: int, places: Path) -> None:
    (places / "mnt" / "models" / "x.yaml").write_text(SYNTHETIC)
    (places / "mnt" / "models").chmod(mode)
    done = entered(places, "serve", within=AS_ANYBODY)
    (places / "mnt" / "models").chmod(0o700)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"entrypoint: {places}/mnt/models: cannot be read by user {os.geteuid()}: expected a folder")


@pytest.mark.slow
def test_it_serves_as_sagemaker_starts_it_and_ends_on_its_signal(tmp_path: Path) -> None:
    """A read-only model directory, SageMaker's environment, one process from start to end."""
    model = tmp_path / "ml" / "model"
    model.mkdir(parents=True)
    (model / "gateway.yaml").write_text(SYNTHETIC)
    model.chmod(0o555)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "gateway"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m gateway.cli "$@"\n')
    program.chmod(0o755)
    port = free_port()
    variables = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "SAGEMAKER_BASE_DIR": str(tmp_path / "ml"),
        "SAGEMAKER_BIND_TO_PORT": str(port),
        "SAGEMAKER_SAFE_PORT_RANGE": f"{free_port()}-65535",
    }
    command = [DOCKER / "entrypoint.sh", "serve", "--host", "127.0.0.1"]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith(f"gateway ready http=127.0.0.1:{port}")
            assert (Path("/proc") / str(process.pid) / "cmdline").read_bytes().split(b"\0")[1:3] == [b"-m", b"gateway.cli"]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ping") as response:
                assert response.status == 200
            body = json.dumps(REQUEST).encode()
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/m/infer", body) as response:
                assert json.load(response)["outputs"][0]["data"] == [*range(16)]
            assert f"127.0.0.1:{port}" in health().claimed(Path("/proc/net/unix").read_text())
            assert health().main([f"127.0.0.1:{port}"]) == 0
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    assert health().main([f"127.0.0.1:{port}"]) == 1


def health() -> ModuleType:
    spec = importlib.util.spec_from_file_location("health", DOCKER / "health.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Pinged(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/ping" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def answering(status: int, context: ssl.SSLContext | None = None) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Other", (Pinged,), {"status": status}))
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_container_is_healthy_while_every_listener_of_it_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(200) as ready, answering(503) as loading:
        assert health().main([ready]) == 0
        assert capsys.readouterr().out == f"{ready}: 200\n"
        assert health().main([ready, loading]) == 1
        assert f"{loading}: 503" in capsys.readouterr().out
    assert health().main([ready]) == 1
    assert "ConnectionRefusedError" in capsys.readouterr().out


def test_it_is_asked_with_tls_where_it_speaks_that(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=other"
    subprocess.run([*make.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with answering(200, context) as address:
        assert health().main([address]) == 0


def test_the_addresses_are_those_that_gateways_have_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "0000000000000000: 00000002 00000000 00000000 0002 01 1234 @serving-gateway:{}:{}:{}:0f:7:ab\n"
    every = line.format(8080, "00000000", "http") + line.format(9000, "00000000", "grpc")
    assert [*health().claimed(every)] == ["127.0.0.1:8080"]
    two = line.format(80, "00" * 16, "http") + line.format(81, "7f000002", "http") + line.format(81, "7f000002", "http")
    assert [*health().claimed(two)] == ["[::1]:80", "127.0.0.2:81"]
    monkeypatch.setattr(Path, "read_text", lambda path: "Num RefCount\n")
    assert health().main([]) == 1


def test_a_gateway_without_http_is_healthy_while_it_listens_for_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        claim = f"0: 2 0 0 2 01 1 @serving-gateway:{listener.getsockname()[1]}:7f000001:grpc:0f:7:ab\n"
        with_http = "0: 2 0 0 2 01 1 @serving-gateway:81:7f000002:{}:1e:8:cd\n"
        monkeypatch.setattr(Path, "read_text", lambda path: claim)
        assert health().main([]) == 0
        other = claim + with_http.format("grpc") + with_http.format("http").replace("81", "80")
        assert [*health().claimed(other)] == [f"127.0.0.1:{listener.getsockname()[1]}", "127.0.0.2:80"]
    assert health().main([]) == 1


@pytest.mark.slow
def test_an_environment_takes_nothing_but_the_wheel_and_what_the_lock_has_by_its_hash(tmp_path: Path) -> None:
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    about = {
        "METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\nRequires-Dist: absent\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "SIZE = 1\n")
        for name, text in about.items():
            archive.writestr(f"tiny-1.0.dist-info/{name}", text)
    variables = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path),
    }  # fmt: skip
    variables.pop("PYTHONPATH", None)

    def install(folder: str, lock: str) -> "subprocess.CompletedProcess[str]":
        (tmp_path / "lock").write_text(lock)
        command = [DOCKER / "install.sh", tmp_path / folder, tmp_path / "lock", wheel]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)

    done = install("environment", "# nothing\n")
    assert done.returncode == 0, done.stderr
    python = tmp_path / "environment" / "bin" / "python"
    asked = [python, "-c", "import tiny; print(tiny.SIZE, tiny.__cached__)"]
    size, cached = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    assert size == "1"
    assert Path(cached).read_bytes()[4:8] == b"\1\0\0\0"  # PEP 552: by hash, and not compared
    assert {path.name.partition("-")[0] for path in Path(cached).parent.parent.glob("*.dist-info")} == {"pip", "tiny"}
    refused = install("other", "tiny==1.0\n")
    assert refused.returncode != 0
    assert "hash" in (refused.stdout + refused.stderr).lower()


INSTRUCTION = re.compile(r"^([A-Z]+)\s+((?:.*\\\n)*.*)$", re.MULTILINE)


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE)
    return [(found[1], found[2].replace("\\\n", " ")) for found in INSTRUCTION.finditer(text)]


def test_every_base_is_pinned_by_its_version() -> None:
    bases = {name: value for key, given in instructions() if key == "ARG" for name, _, value in [given.partition("=")]}
    stages = set()
    for given in (given for key, given in instructions() if key == "FROM"):
        base, _, stage = given.partition(" AS ")
        image = bases.get(base[2:-1], base)
        assert image in stages or re.search(r":\d+\.\d+\.\d+", image), given
        stages.add(stage)
    assert {"cpu", "cuda", "neuron"} <= stages


def test_what_is_copied_is_there_and_reaches_the_builder() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [given.split()[:-1] for key, given in instructions() if key == "COPY" and "--from" not in given]
    for name in (name for names in copied for name in names):
        assert (ROOT / name).exists(), name
        assert name.split("/")[0] in allowed, f"{name} is not in .dockerignore's list"
    assert all((ROOT / name).exists() for name in allowed)


def test_the_scripts_can_be_run_and_are_what_a_shell_takes() -> None:
    scripts = sorted(DOCKER.glob("*.sh"))
    assert len(scripts) == 4
    for path in (*scripts, DOCKER / "health.py"):
        assert os.access(path, os.X_OK), path
    for path in scripts:
        subprocess.run(["sh", "-n", path], check=True)


def test_each_image_ends_as_a_platform_wants_it() -> None:
    """The entry point in exec form, so that signals reach it; a health check; no rights, where the device allows it."""
    stages: dict[str, dict[str, str]] = {}
    own: dict[str, str] = {}
    for key, given in instructions():
        if key == "FROM":
            base, _, stage = given.partition(" AS ")
            own = stages[stage] = dict(stages.get(base, {}))
        else:
            own[key] = given
    for image in ("cpu", "cuda", "neuron"):
        assert json.loads(stages[image]["ENTRYPOINT"]) == ["tini", "--", "entrypoint.sh"]
        assert json.loads(stages[image]["CMD"]) == ["serve"]
        assert stages[image]["HEALTHCHECK"].endswith('CMD ["health.py"]')
        assert 'sagemaker.capabilities.accept-bind-to-port="true"' in stages[image]["LABEL"]
        assert ('sagemaker.capabilities.multi-models="true"' in stages[image]["LABEL"]) is (image != "neuron")
        assert stages[image].get("USER") == (None if image == "neuron" else "1000:1000")


def test_compose_mounts_what_is_there_at_the_addresses_that_the_files_name() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    for service in services.values():
        image = service.get("image", "")
        assert not image or re.search(r":v?\d+\.\d+", image), image
        for volume in service.get("volumes", ()):
            source = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", volume).partition(":")[0]
            assert not source.startswith("../configs") or (DOCKER / source).exists(), source
    assert (ROOT / "configs" / "examples" / "iris.yaml").is_file()  # what it serves if nothing is said
    scraped = yaml.safe_load((ROOT / "configs/prometheus/prometheus.yml").read_text())["scrape_configs"][0]["static_configs"]
    source = yaml.safe_load((ROOT / "configs/grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    assert (scraped[0]["targets"], source["url"]) == (["127.0.0.1:8000"], "http://127.0.0.1:9090")
    assert services["prometheus"]["network_mode"] == services["grafana"]["network_mode"] == "service:gateway"
    command = services["gateway"]["command"]
    assert command[command.index("--http-port") + 1] == "8000"
    published = [port.rpartition(":")[2] for port in services["gateway"]["ports"]]
    assert published == ["8000", "8001", "9090", "3000"]
    assert all(port.startswith("127.0.0.1:") for port in services["gateway"]["ports"])


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CORE, EXTRAS = PROJECT["dependencies"], PROJECT["optional-dependencies"]
LOCKS = {
    "cpu": [*CORE, *EXTRAS["onnx"]],
    "cuda": [*CORE, *EXTRAS["torch"], "torch==2.13.0", "onnxruntime-gpu>=1.23", "onnx>=1.18"],
    "neuron": [each for each in CORE if not each.startswith("numpy")],
    "aws": EXTRAS["aws"],
    "build": ["setuptools>=77"],
    "sbom": ["cyclonedx-bom"],
}


def locked(name: str) -> dict[str, Requirement]:
    text = (DOCKER / f"requirements-{name}.lock").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    assert not re.search(r"https?:|file:|@ |^-|/", text, re.MULTILINE), "names a host, a path or an option"
    found = {}
    for line in text.replace("\\\n", "").splitlines():
        requirement, *hashes = line.split("--hash=")
        assert hashes, f"{name}: {requirement}: no hash"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each.strip()) for each in hashes), requirement
        parsed = Requirement(requirement.strip())
        found[canonical(parsed.name)] = parsed
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_what_the_project_asks_for_by_hash_and_names_no_registry(name: str) -> None:
    found = locked(name)
    for wanted in map(Requirement, LOCKS[name]):
        pinned = found.get(canonical(wanted.name))
        assert pinned is not None, f"{name}: lacks {wanted}: make locks"
        (version,) = pinned.specifier
        assert version.operator == "=="
        assert wanted.specifier.contains(version.version, prereleases=True), f"{name}: {pinned}, expected {wanted}: make locks"


def test_the_image_for_onnx_has_no_torch_and_the_one_for_cuda_one_onnxruntime() -> None:
    assert "torch" not in locked("cpu")
    assert {"onnxruntime", "onnxruntime-gpu"} & set(locked("cuda")) == {"onnxruntime-gpu"}
    assert {"torch", "numpy"}.isdisjoint(locked("neuron"))
