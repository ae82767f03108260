"""The gateway as a container of SageMaker beside AWS's own Ray Serve container, in one run of some nine minutes.

    python -m benchmarks.sagemaker
    python -m benchmarks.sagemaker --source CHECKOUT --peer ENV        with the peer's files and environment at hand
    python -m benchmarks.sagemaker --rounds 1 --models linear          shorter

    gateway     `gateway sagemaker`, of a folder with the model's file and nothing else
    aws         AWS's entry script and adapter as they are, of the image `ray` of deep-learning-containers, with a plain Ray
                Serve application behind them: onnxruntime and `@serve.batch`. In their text only folders, ports and the address
                change

AWS's files are read from its public repository at one commit, into a temporary folder. Their environment, if ENV is not there,
is made with what the image pins. Each server is process 1 of a namespace of its own, as in a container: so are signals.
In each round the servers take turns, started anew; the first answer counts from the command. Load: h2load over HTTP/1.1, closed
loop, so many requests as take about --seconds, none left out. CPU is of all processes of a container. Then the forms of a body
take turns at the gateway, and last each server gets SIGTERM under load, and SIGKILL 30 s later. Client and server share the
machine, so only ratios of this run mean something. Nothing is run on AWS. Needs `h2load` (Debian: nghttp2-client), git, root.
"""

import argparse
import contextlib
import http.client
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnxruntime
import psutil

from benchmarks.overhead import PATH, bodies
from benchmarks.ports import free_port, ray_port
from benchmarks.processor_time import cpu_s

SOURCE: Final = "https://github.com/aws/deep-learning-containers"
COMMIT: Final = "e0ecedea6a1c56d6b5914f9cfb2fec5c548e67e0"  # 2026-08-21: version 1.4 of the image, Ray 2.57
FILES: Final = ("scripts/docker/ray", "docker/ray/pyproject.toml")
NEEDED: Final = ("ray[serve]", "fastapi", "httpx", "uvicorn[standard]", "boto3", "pyyaml")
OF_OTHERS: Final = ("starlette==1.3.1", "jinja2==3.1.6")  # which the image has by its lock, the latter by way of torch
CONNECTIONS: Final = (1, 64, 256)
GIVE_UP_S: Final = 180.0
KILLED_S: Final = 30.0  # behind SIGTERM
TURNS: Final = 4  # of each form of a body, in a round
TOKENS: Final = 32
INVOCATIONS: Final = "/invocations"
JSON: Final = {"Content-Type": "application/json"}
FORMS: Final = ("v2 JSON", "v2 binary", "invocations v2 JSON", "invocations v2 binary", "invocations raw")

APPLICATION: Final = """import numpy as np
import onnxruntime
from ray import serve


@serve.deployment(max_ongoing_requests=256)
class Model:
    def __init__(self):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = {threads}
        self.session = onnxruntime.InferenceSession({model!r}, options, providers=["CPUExecutionProvider"])
        kinds = {{"tensor(float)": np.float32, "tensor(int64)": np.int64}}
        self.dtypes = {{each.name: kinds[each.type] for each in self.session.get_inputs()}}

    # As Ray's documentation of dynamic batching has it; no wait, which is the best setting for latency here.
    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.0)
    async def predict(self, rows):
        if not isinstance(rows[0], dict):
            (name,) = self.dtypes
            rows = [{{name: row}} for row in rows]
        feeds = {{name: np.array([row[name] for row in rows], dtype) for name, dtype in self.dtypes.items()}}
        return self.session.run(None, feeds)[0].tolist()

    async def __call__(self, request):
        (row,) = (await request.json())["instances"]
        return {{"predictions": [await self.predict(row)]}}


app = Model.bind()
"""
CONFIGURATION: Final = "applications:\n  - {name: model, route_prefix: /, import_path: 'deployment:app'}\n"


@dataclass(frozen=True)
class Case:
    """A model. row: of `instances`. threads: of the peer's session; 0: as many as cores."""

    name: str
    row: Any
    threads: int

    @property
    def body(self) -> bytes:
        return json.dumps({"instances": [self.row]}).encode()

    def expected(self) -> list[float]:
        session = onnxruntime.InferenceSession(f"models/{self.name}.onnx")
        rows = self.row if isinstance(self.row, dict) else {session.get_inputs()[0].name: self.row}
        kinds = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
        feeds = {each.name: np.array([rows[each.name]], kinds[each.type]) for each in session.get_inputs()}
        return np.ravel(session.run(None, feeds)[0]).tolist()


CASES: Final = (
    Case("linear", np.linspace(-1, 1, 16, dtype=np.float32).tolist(), 1),
    Case("minilm", {"input_ids": [101, *range(2000, 1998 + TOKENS), 102], "attention_mask": [1] * TOKENS}, 0),
)


@dataclass(frozen=True)
class Figure:
    """Of one load. Percentiles are of all its requests. errors: of them, those without status 200."""

    model: str
    server: str
    form: str
    connections: int
    requests: int
    rps: float
    p50_ms: float
    p99_ms: float
    errors: int
    cpu_us: float  # per request, of all the server's processes


@dataclass(frozen=True)
class Ending:
    """What became of requests that were sent whole, some of them behind SIGTERM. gone_s: until the server was."""

    server: str
    answered: int
    other_status: int
    lost: int
    gone_s: float


@dataclass(frozen=True)
class Server:
    name: str
    port: int
    process: "subprocess.Popen[bytes]"
    first_s: float  # from the command to the first right answer

    def inside(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


# the peer


def fetched(source: str, folder: Path) -> Path:
    """AWS's files at the commit. source: a URL or a path of its repository."""
    for command in (
        ["init", "-q"],
        ["fetch", "-q", "--depth", "1", source, COMMIT],
        ["checkout", "-q", COMMIT, "--", *FILES],
    ):
        subprocess.run(["git", "-C", str(folder), *command], check=True)
    return folder


def pins(dependencies: list[str]) -> list[str]:
    """Of what the image pins, what the adapter and the application take. Raises: SystemExit, if one is not pinned."""
    found = [each for each in dependencies if each.partition("==")[0] in NEEDED]
    if len(found) != len(NEEDED):
        raise SystemExit(f"the image pins {found}, expected each of {NEEDED}")
    return found


def make_environment(environment: Path, source: Path) -> None:
    project = tomllib.loads((source / "docker/ray/pyproject.toml").read_text())["project"]
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [str(environment / "bin/python"), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, *pins(project["dependencies"]), *OF_OTHERS, f"onnxruntime=={onnxruntime.__version__}"], check=True)


def replaced(text: str, changes: Mapping[str, str]) -> str:
    """Raises: SystemExit, if something is not there to be replaced: then it is another text than was read."""
    for old, new in changes.items():
        if old not in text:
            raise SystemExit(f"AWS's file has no {old!r}")
        text = text.replace(old, new)
    return text


def peer_command(case: Case, source: Path, folder: Path, port: int, *, sleeps: bool) -> list[str]:
    """Write what the container has. sleeps: leave the pauses of the entry script in."""
    scripts, package = source / "scripts/docker/ray", folder / "model"
    package.mkdir(parents=True)
    model = str(Path(f"models/{case.name}.onnx").resolve())
    (package / "deployment.py").write_text(APPLICATION.format(model=model, threads=case.threads))
    (package / "config.yaml").write_text(CONFIGURATION)
    serve_port = str(free_port())
    adapter = replaced((scripts / "sagemaker_serve.py").read_text(), {"port=8080": f"port={port}", '"0.0.0.0"': '"127.0.0.1"'})
    (folder / "sagemaker_serve.py").write_text(adapter)
    changes = {
        "/opt/ml/model": str(package),
        "/app/sagemaker_serve.py": f"{folder}/sagemaker_serve.py",
        "--port=6379": f"--port={ray_port()}",
        "--http-host=0.0.0.0 --http-port=8000": f"--http-host=127.0.0.1 --http-port={serve_port}",
        "localhost:8000": f"127.0.0.1:{serve_port}",
    }
    entry = replaced((scripts / "sagemaker_entrypoint.sh").read_text(), changes | ({} if sleeps else {"sleep 5": "true"}))
    (folder / "entry.sh").write_text(entry)
    return ["env", f"RAYSERVE_BACKEND_URL=http://127.0.0.1:{serve_port}", "bash", str(folder / "entry.sh"), "serve"]


# a run


@contextlib.contextmanager
def contained(
    name: str, command: list[str], variables: Mapping[str, str], port: int, log: Path, ready: Callable[[], bool]
) -> Iterator[Server]:
    """Run a command as process 1 of a namespace, wait until it is ready, and kill all in it in the end.

    variables: beside this process's own. ready: whether the first answer is right; not, while there is none.
    Raises: SystemExit, if it ends before, or takes longer than GIVE_UP_S, with the end of its log.
    """
    own = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "PYTHON", "VIRTUAL_ENV"))}
    began = time.perf_counter()
    with log.open("w+b") as said:
        process = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *command],
            env={**own, "SAGEMAKER_BIND_TO_PORT": str(port), **variables}, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
        )  # fmt: skip
        try:
            while not ready():
                if process.poll() is not None or time.perf_counter() - began > GIVE_UP_S:
                    said.seek(0)
                    raise SystemExit(f"{name}: no right answer\n{said.read().decode(errors='replace')[-4000:]}")
                time.sleep(0.01)
            yield Server(name, port, process, time.perf_counter() - began)
        finally:
            process.kill()  # and so all that is inside
            process.wait()


def gateway_command(model: Path) -> tuple[list[str], dict[str, str]]:
    """The command that serves a folder, and what it needs in the environment."""
    command = [sys.executable, "-m", "gateway.cli", "sagemaker", "serve", "--host", "127.0.0.1", "--model", str(model)]
    return command, {"PYTHONPATH": str(Path.cwd())}


def running(name: str, case: Case, folder: Path, source: Path, environment: Path) -> contextlib.AbstractContextManager[Server]:
    """A server from its start to its end, ready. name: "aws, no pauses" as well."""
    port, place = free_port(), Path(tempfile.mkdtemp(dir=folder))
    if name == "gateway":
        (place / "model").mkdir()
        shutil.copyfile(f"models/{case.name}.onnx", place / f"model/{case.name}.onnx")
        command, variables = gateway_command(place / "model")
    else:
        variables = {"RAY_TMPDIR": str(place), "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
        variables["PATH"] = f"{environment.absolute() / 'bin'}:{os.environ['PATH']}"
        command = peer_command(case, source, place / "app", port, sleeps=name == "aws")
    expected = case.expected()
    return contained(name, command, variables, port, place / "log", lambda: right(port, case.body, expected))


def right(port: int, body: bytes, expected: list[float]) -> bool:
    """Whether the answer is. Not, while there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("POST", INVOCATIONS, body, JSON)
        answer = json.load(connection.getresponse())
    except (OSError, ValueError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    rows = answer.get("predictions") if isinstance(answer, dict) else None
    return rows is not None and np.allclose(np.ravel(rows), expected, atol=1e-4)


def load(
    server: Server, case: Case, connections: int, seconds: float, directory: Path, *, form: str = "instances",
    path: str = INVOCATIONS, body: bytes | None = None, headers: Mapping[str, str] = JSON, answer_bytes: int | None = None,
) -> Figure:  # fmt: skip
    """As many requests as take about so long. Shorter loads in front tell how many that is, and warm.

    answer_bytes: of each answer's body. Where it is given, errors are told by it, and not by the status: h2load reads none in a
    line without a reason, which TorchServe sends.
    """
    data, log = directory / "body", directory / "h2load.log"
    data.write_bytes(case.body if body is None else body)
    requests = min(4 * connections, 768)
    while True:
        log.unlink(missing_ok=True)
        command = ["h2load", "--h1", "-t1", "-m1", f"-c{connections}", f"-n{requests}", "-d", str(data), f"--log-file={log}"]
        for key, value in headers.items():
            command += ["-H", f"{key}: {value}"]
        before = cpu_s(server.inside())
        done = subprocess.run(
            [*command, f"http://127.0.0.1:{server.port}{path}"], capture_output=True, text=True, timeout=GIVE_UP_S, check=False
        )
        used_s = cpu_s(server.inside()) - before
        if done.returncode:
            raise SystemExit(f"h2load: {done.stdout}{done.stderr}")
        took_s, percentiles, errors = logged(log.read_text(), requests)
        if answer_bytes is not None:
            errors = 0 if received(done.stdout) == requests * answer_bytes else requests
        if took_s >= 0.7 * seconds:
            p50, p99 = percentiles
            each_us = used_s / requests * 1e6
            return Figure(case.name, server.name, form, connections, requests, requests / took_s, p50, p99, errors, each_us)
        requests = math.ceil(requests * min(20.0, seconds / took_s))


def logged(text: str, requests: int) -> tuple[float, tuple[float, float], int]:
    """Seconds from the first request to the last answer, p50 and p99 in ms, and how many had no status 200.

    text: h2load's: a line for each request: its start in µs, the status, its duration in µs. Raises: SystemExit, if some are
    missing.
    """
    rows = np.array([[int(field) for field in line.split("\t")[:3]] for line in text.splitlines()], np.int64).reshape(-1, 3)
    if len(rows) != requests:
        raise SystemExit(f"h2load tells of {len(rows)} requests, sent {requests}")
    p50, p99 = np.percentile(rows[:, 2], (50, 99)) / 1e3
    took_us = int((rows[:, 0] + rows[:, 2]).max() - rows[:, 0].min())
    return took_us / 1e6, (float(p50), float(p99)), int((rows[:, 1] != 200).sum())


def received(text: str) -> int:
    """Bytes of all bodies, as h2load tells them."""
    found = re.search(r"^traffic: .* \((\d+)\) data$", text, re.MULTILINE)
    if found is None:
        raise SystemExit(f"h2load tells no bytes: {text}")
    return int(found[1])


def forms() -> dict[str, tuple[str, bytes, Mapping[str, str]]]:
    """Path, body and headers of one row of linear, in the forms of FORMS."""
    (text, of_text), (binary, of_binary) = bodies()["rest-json"], bodies()["rest-binary"]
    row = np.asarray(CASES[0].row, np.float32).tobytes()
    octets = "application/octet-stream"
    asked = (
        (PATH, text, of_text),
        (PATH, binary, of_binary),
        (INVOCATIONS, text, of_text),
        (INVOCATIONS, binary, of_binary),
        (INVOCATIONS, row, {"Content-Type": octets, "Accept": octets}),
    )
    return dict(zip(FORMS, asked, strict=True))


def asking(port: int, body: bytes, begun: threading.Semaphore) -> Counter[str] | None:
    """Ask over one connection until the server closes it, and tell `begun` of each answer. None: it takes none.

    Counts "answered", of them "other" than 200, and "lost": sent, and not answered.
    """
    told: Counter[str] = Counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2 * KILLED_S)
    try:
        connection.connect()
    except OSError:
        return None
    with contextlib.closing(connection):
        while True:
            try:
                connection.request("POST", INVOCATIONS, body, JSON)
            except OSError:
                return told  # not accepted
            try:
                answer = connection.getresponse()
                answer.read()
            except (OSError, http.client.HTTPException):
                told["lost"] += 1
                return told
            told["answered"] += 1
            told["other"] += answer.status != 200
            begun.release()
            if answer.will_close:
                return told


def end_under_load(server: Server, case: Case) -> Ending:
    """SIGTERM to the container's first process while 64 connections ask, and SIGKILL 30 s later, as SageMaker does."""
    found: Counter[str] = Counter()
    begun, killed = threading.Semaphore(0), threading.Event()

    def send() -> None:
        while not killed.is_set() and (told := asking(server.port, case.body, begun)) is not None:
            found.update(told)

    senders = [threading.Thread(target=send) for _ in range(64)]
    for sender in senders:
        sender.start()
    for _ in range(4 * len(senders)):
        begun.acquire()
    (first,) = psutil.Process(server.process.pid).children()
    asked_s = time.monotonic()
    first.send_signal(signal.SIGTERM)
    try:
        server.process.wait(KILLED_S)
    except subprocess.TimeoutExpired:
        killed.set()  # what connects from now on was not accepted
        first.kill()
        server.process.wait()
    gone_s = time.monotonic() - asked_s
    for sender in senders:
        sender.join()
    return Ending(server.name, found["answered"], found["other"], found["lost"], gone_s)


# what is told


def medians(figures: list[Figure]) -> dict[tuple[str, str, str, int], Figure]:
    """Of each number its own, over the rounds. By model, server, form and connections."""
    runs: dict[tuple[str, str, str, int], list[Figure]] = defaultdict(list)
    for each in figures:
        runs[each.model, each.server, each.form, each.connections].append(each)
    numbers = ("rps", "p50_ms", "p99_ms", "cpu_us")
    return {
        key: Figure(
            *key[:4], sum(each.requests for each in of), errors=sum(each.errors for each in of),
            **{name: statistics.median(getattr(each, name) for each in of) for name in numbers},
        )
        for key, of in runs.items()
    }  # fmt: skip


def ratio(figures: list[Figure], ours: tuple[str, str, str, int], theirs: tuple[str, str, str, int], number: str) -> float:
    """The median of ours to theirs, turn by turn."""
    of = [
        [getattr(each, number) for each in figures if (each.model, each.server, each.form, each.connections) == key]
        for key in (ours, theirs)
    ]
    return statistics.median(one / other for one, other in zip(*of, strict=True))


def report(figures: list[Figure], firsts: dict[tuple[str, str], list[float]], endings: list[Ending]) -> None:
    print(f"\n{os.cpu_count()} cores, client included; {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC. Not run on AWS.\n")
    print("| model | connections | server | body | requests | errors | requests/s | p50 ms | p99 ms | µs CPU per request |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    found = medians(figures)
    for key in sorted(found, key=lambda key: (key[0], key[2] != "instances", key[3], key[1])):
        one = found[key]
        print(
            f"| {one.model} | {one.connections} | {one.server} | {one.form} | {one.requests} | {one.errors} | {one.rps:.0f} "
            f"| {one.p50_ms:.2f} | {one.p99_ms:.2f} | {one.cpu_us:.0f} |"
        )
    print()
    for model, server, form, connections in found:
        if server == "gateway" and form == "instances" and (model, "aws", form, connections) in found:
            keys = ((model, server, form, connections), (model, "aws", form, connections))
            rate, p50, p99 = (ratio(figures, *keys, number) for number in ("rps", "p50_ms", "p99_ms"))
            print(
                f"{model}, {connections} connections: {rate:.2f} times the requests/s of aws, "
                f"1/{1 / p50:.1f} of its p50, 1/{1 / p99:.1f} of its p99"
            )
    of_v2 = ("linear", "gateway", "v2 binary", 64)
    for form in FORMS:
        if of_v2 in found and form != "v2 binary":
            share = ratio(figures, ("linear", "gateway", form, 64), of_v2, "rps")
            print(f"linear, 64 connections, {form}: {share:.2f} of the requests/s of v2 binary")
    for (model, server), seconds in firsts.items():
        told = ", ".join(f"{each:.2f}" for each in seconds)
        print(f"{model}, first right answer of {server}: {statistics.median(seconds):.2f} s ({told})")
    for end in endings:
        print(
            f"SIGTERM under load, {end.server}: {end.answered} answered, {end.other_status} of them not with 200; "
            f"{end.lost} accepted and lost; gone in {end.gone_s:.1f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default=SOURCE, metavar="REPOSITORY", help="AWS's, as git takes it: %(default)s")
    parser.add_argument(
        "--peer", type=Path, metavar="ENV", help="its environment, made if it is not there; left out: for this run"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load")
    parser.add_argument("--connections", default=",".join(map(str, CONNECTIONS)))
    parser.add_argument("--models", default=",".join(case.name for case in CASES))
    parser.add_argument("--servers", default="gateway,aws")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    arguments = parser.parse_args()
    for tool in ("h2load", "git", "unshare"):
        if shutil.which(tool) is None:
            parser.error(f"{tool} is not installed (Debian: nghttp2-client, git, util-linux)")
    began = time.monotonic()
    figures: list[Figure] = []
    firsts: dict[tuple[str, str], list[float]] = defaultdict(list)
    endings: list[Ending] = []
    with tempfile.TemporaryDirectory(prefix="sm-", ignore_cleanup_errors=True) as temporary:  # short: Ray's sockets are in it
        folder = Path(temporary)
        (folder / "aws").mkdir()
        source, environment = fetched(arguments.source, folder / "aws"), arguments.peer or folder / "env"
        if not environment.exists():
            make_environment(environment, source)

        def told(figure: Figure) -> None:
            figures.append(figure)
            print(
                f"{figure.model:7} {figure.server:8} {figure.form:22} {figure.connections:4} conns {figure.requests:7} sent "
                f"{figure.rps:8.0f}/s p50 {figure.p50_ms:8.2f} p99 {figure.p99_ms:8.2f} ms {figure.cpu_us:7.0f} µs CPU  "
                f"{figure.errors} errors",
                flush=True,
            )

        models = arguments.models.split(",")
        for number in range(arguments.rounds):
            for case in CASES:
                for name in arguments.servers.split(",") if case.name in models else ():
                    with running(name, case, folder, source, environment) as server:
                        firsts[case.name, name].append(server.first_s)
                        for connections in map(int, arguments.connections.split(",")):
                            told(load(server, case, connections, arguments.seconds, folder))
                        if name == "gateway" and case is CASES[0]:
                            for _ in range(TURNS):
                                for form, (path, body, headers) in forms().items():
                                    told(load(server, case, 64, 1.0, folder, form=form, path=path, body=body, headers=headers))
                        if case is CASES[0] and number == arguments.rounds - 1:
                            endings.append(end_under_load(server, case))
        if "aws" in arguments.servers and "linear" in models:
            with running("aws, no pauses", CASES[0], folder, source, environment) as server:
                firsts["linear", "aws without the pauses of its entry script"].append(server.first_s)
    report(figures, firsts, endings)
    print(f"took {time.monotonic() - began:.0f} s")
    if arguments.json:
        said = {"figures": [asdict(each) for each in figures], "endings": [asdict(each) for each in endings]}
        arguments.json.write_text(json.dumps(said | {"first_s": {", ".join(key): of for key, of in firsts.items()}}, indent=1))


if __name__ == "__main__":
    main()
