"""Do the alerts fire, and the dashboards show something? A real Prometheus watches a real gateway in trouble.

    python -m benchmarks.observability                  all scenarios, some ten minutes: burn rates clear slowly
    python -m benchmarks.observability --only ejected   one of them

Starts a gateway on Ray with two ingress processes and a replica, a second one where a scenario wants it, and Prometheus with
the rules of configs/prometheus, every duration in them divided by 60. Each scenario makes one kind of trouble: its alerts must
fire, no others, and they must clear. Before, between and after, all is well and none may fire. Meanwhile every query of the
dashboards and every recording rule is asked: each must give data some time, and never what is not finite.

Needs `prometheus` (Debian has it).
"""

import argparse
import contextlib
import http.client
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.ports import free_port

ROOT: Final = Path(__file__).parent.parent
_RULES: Final = ("recording.yml", "budget.yml", "alerts.yml")
_FASTER: Final = 60
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_FAIL, _EXIT, _SLOW = 666.0, 667.0, 668.0  # values of an input that bring something about

# Fails, while there is a file; takes long for some requests.
_MODEL: Final = """
import time
from pathlib import Path

import numpy as np


class Steered:
    inputs = (("INPUT0", "FP32", (-1, 16)),)
    outputs = (("OUTPUT0", "FP32", (-1, 16)),)

    def __init__(self, flag):
        self._flag = Path(flag)

    def predict(self, inputs):
        if self._flag.exists():
            raise RuntimeError("the flag is there")
        time.sleep(0.15 if (inputs["INPUT0"] == 668.0).any() else 0.01)
        return {"OUTPUT0": inputs["INPUT0"]}
"""
_PARTS: Final = """
import numpy as np


class Parts:
    inputs = (("INPUT0", "FP32", (-1, 16)),)
    outputs = (("OUTPUT0", "FP32", (-1, 16)),)

    def predict(self, inputs):
        for _ in range(5):
            yield {"OUTPUT0": inputs["INPUT0"]}
"""


def faster(text: str, by: int = _FASTER) -> str:
    """Rules or a query with every duration divided. In milliseconds, so that none becomes 0."""

    def shorter(found: re.Match[str]) -> str:
        return f"{found[1]}{int(found[2]) * _SECONDS[found[3]] * 1000 // by}ms{found[4]}"

    return re.sub(r"(\[|\b(?:for|interval): )(\d+)([smhd])(\]?)", shorter, text)


@dataclass(slots=True)
class Told:
    """What Prometheus has said so far. silent: questions that have not yet had data. odd: those whose data was not finite."""

    questions: dict[str, str]
    fired: set[tuple[str, str]] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    odd: set[str] = field(default_factory=set)


class Prometheus:
    def __init__(self, port: int) -> None:
        self._port = port

    def ask(self, query: str, at_s: float | None = None) -> list[dict[str, Any]]:
        """at_s: since 1970; None: now."""
        asked = {"query": query} if at_s is None else {"query": query, "time": str(at_s)}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)) as connection:
            connection.request("GET", "/api/v1/query?" + urllib.parse.urlencode(asked))
            found = json.loads(connection.getresponse().read())
        if found["status"] != "success":
            raise SystemExit(f"{query}: {found}")
        result: list[dict[str, Any]] = found["data"]["result"]
        return result

    def firing(self) -> set[tuple[str, str]]:
        """Alert and model."""
        found = self.ask('ALERTS{alertstate="firing"}')
        return {(one["metric"]["alertname"], one["metric"].get("model", "")) for one in found}

    def calm(self) -> bool:
        """No alert fires, nor is about to."""
        return not self.ask("ALERTS")


def questions() -> dict[str, str]:
    """Every recording rule, and every query of the dashboards but loadtest's, by where it stands."""
    found = {}
    for group in yaml.safe_load((ROOT / "configs/prometheus/recording.yml").read_text())["groups"]:
        found |= {rule["record"]: rule["record"] for rule in group["rules"]}
    for path in sorted((ROOT / "configs/grafana/dashboards").glob("*.json")):
        if path.stem != "loadtest":
            found |= {name: faster(query) for name, query in queries(path, "5m").items()}
    return found


def queries(dashboard: Path, interval: str) -> dict[str, str]:
    """Of its panels, with all that its variables offer. interval: Grafana's `$__rate_interval`."""
    return {
        f"{dashboard.stem}: {panel['title']} ({target['legendFormat']})": re.sub(
            r'"\$\w+"', '".*"', target["expr"].replace("$__rate_interval", interval)
        )
        for panel in json.loads(dashboard.read_text())["panels"]
        for target in panel.get("targets", ())
    }


class Load:
    """Requests to one model, so many a second, until it is stopped. What they answer is Prometheus's business."""

    def __init__(
        self, port: int, model: str, rate: float, *, odd: float = 1.0, every: int = 0, threads: int = 1, path: str = "infer"
    ) -> None:
        """odd: the value of every so many-th request; 0: of none."""
        self._port, self._model, self._odd, self._every, self._path = port, model, odd, every, path
        self._pause_s = threads / rate
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._send, daemon=True) for _ in range(threads)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        number = 0
        while not self._over.wait(self._pause_s):
            number += 1
            value = self._odd if self._every and number % self._every == 0 else 1.0
            infer(self._port, self._model, value, self._path)


def infer(port: int, model: str, value: float, path: str = "infer") -> None:
    """The answer, also an error's, is read and forgotten. A new connection each time: any ingress process may get it."""
    tensor = {"name": "INPUT0", "shape": [1, 16], "datatype": "FP32", "data": [value] * 16}
    body = json.dumps({"inputs": [tensor]} if path == "infer" else {"INPUT0": [value] * 16})
    with contextlib.suppress(OSError, http.client.HTTPException):
        post(port, f"/v2/models/{model}/{path}", body)


def post(port: int, path: str, body: str = "{}") -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("POST", path, body)
        return connection.getresponse().read()
    finally:
        connection.close()


@dataclass(frozen=True, slots=True)
class Stage:
    """What scenarios play on. targets: the file of addresses that Prometheus scrapes."""

    port: int
    folder: Path
    targets: Path
    told: Told
    prometheus: Prometheus

    def scrape(self, *ports: int) -> None:
        written = self.targets.with_suffix(".new")
        written.write_text(yaml.safe_dump([{"targets": [f"127.0.0.1:{port}" for port in ports]}] if ports else []))
        written.replace(self.targets)

    def until(self, what: str, holds: Callable[[set[tuple[str, str]]], bool], within_s: float) -> float:
        """Looks at everything meanwhile. Seconds that it took. Raises: SystemExit, when it is too long."""
        began = time.monotonic()
        while True:
            firing = self.prometheus.firing()
            self.told.fired |= firing
            look(self.told, self.prometheus)
            if holds(firing):
                return time.monotonic() - began
            if time.monotonic() - began > within_s:
                raise SystemExit(f"{what}: not within {within_s} s; firing: {sorted(firing)}")
            time.sleep(0.5)


def look(told: Told, prometheus: Prometheus) -> None:
    for name, query in told.questions.items():
        for one in prometheus.ask(query):
            if math.isfinite(float(one["value"][1])):
                told.silent.discard(name)
            else:
                told.odd.add(name)


@contextlib.contextmanager
def overloaded(stage: Stage) -> Iterator[None]:
    with Load(stage.port, "busy", 80, threads=16):
        yield


@contextlib.contextmanager
def ejected(stage: Stage) -> Iterator[None]:
    flag = stage.folder / "flag"
    flag.touch()
    yield
    flag.unlink()


@contextlib.contextmanager
def failing(stage: Stage) -> Iterator[None]:
    with Load(stage.port, "failing", 10, odd=_FAIL, every=2):
        yield


@contextlib.contextmanager
def drifting(stage: Stage) -> Iterator[None]:
    with Load(stage.port, "drifting", 10, odd=_SLOW, every=4):
        yield


@contextlib.contextmanager
def lost(stage: Stage) -> Iterator[None]:
    """The sessions of both ingress processes end, and take their time to open anew, while requests wait."""
    with Load(stage.port, "fragile", 20, odd=_EXIT, every=1, threads=10), Load(stage.port, "fragile", 5, threads=5):
        yield


@contextlib.contextmanager
def unloaded(stage: Stage) -> Iterator[None]:
    post(stage.port, "/v2/repository/models/spare/unload")
    yield
    post(stage.port, "/v2/repository/models/spare/load")


@contextlib.contextmanager
def dear(stage: Stage) -> Iterator[None]:
    with gateway(stage.folder / "dear.yaml", "--no-ray") as (_, port):
        stage.scrape(stage.port, port)
        yield
        stage.scrape(stage.port)


@contextlib.contextmanager
def down(stage: Stage) -> Iterator[None]:
    stage.scrape(stage.port, free_port())
    yield
    stage.scrape(stage.port)


@contextlib.contextmanager
def absent(stage: Stage) -> Iterator[None]:
    stage.scrape()
    yield
    stage.scrape(stage.port)


_BURNS: Final = tuple(f"GatewayBudgetGoneIn{days}Days" for days in (2, 5, 10, 30))


@dataclass(frozen=True, slots=True)
class Scenario:
    """expected: alert and model that must fire. beside: alerts that may, as they are of the same trouble."""

    play: Callable[[Stage], contextlib.AbstractContextManager[None]]
    expected: tuple[tuple[str, str], ...]
    beside: tuple[str, ...] = ()


SCENARIOS: Final = {
    "absent": Scenario(absent, (("GatewayAbsent", ""),)),
    "down": Scenario(down, (("GatewayDown", ""),)),
    "dear": Scenario(dear, (("GatewayCostAboveBudget", ""),), ("GatewayDown",)),
    "unloaded": Scenario(unloaded, (("GatewayModelNotReady", "spare"),)),
    "ejected": Scenario(ejected, (("GatewayBackendEjected", "pair"),), ("GatewayExecutionsFail",)),
    "failing": Scenario(failing, (("GatewayExecutionsFail", "failing"),)),
    "lost": Scenario(lost, (("GatewayNoSession", "fragile"),), ("GatewayExecutionsFail",)),
    "drifting": Scenario(drifting, (("GatewayServiceModelDrifts", "drifting"),)),
    # Last: what it does to the long windows takes six minutes to pass.
    "overloaded": Scenario(
        overloaded, (*((burn, "busy") for burn in _BURNS), ("GatewayNoCapacityLeft", "busy"), ("GatewaySaturated", "busy"))
    ),
}


def write(folder: Path, names: Sequence[str]) -> None:
    """What the scenarios of these names need."""
    (folder / "model.py").write_text(_MODEL)
    (folder / "parts.py").write_text(_PARTS)

    def synthetic(name: str, backend: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"name": name, "backends": [{"kind": "synthetic", "fixed_ms": 10, "usd_per_hour": 0.1, **backend}], **more}

    steered = {"kind": "python", "model": f"{folder}/model.py:Steered", "usd_per_hour": 0.1}
    pair = [
        {**steered, "name": "flaky", "class_options": {"flag": f"{folder}/flag"}},
        {"kind": "synthetic", "fixed_ms": 10, "usd_per_hour": 0.5},
    ]
    models = [
        {"name": "pair", "slo": {"p99_ms": 1000}, "backends": pair},
        # Tight only where it is to be overloaded: beside other work on this machine it would be so by itself.
        synthetic(
            "busy",
            {"placement": "replicas", "fixed_ms": 30, "row_ms": 20},
            slo={"p99_ms": 150 if "overloaded" in names else 2000},
        ),
        {
            "name": "drifting",
            "slo": {"p99_ms": 2000},
            "batching": {"max_rows": 1},
            "backends": [{**steered, "class_options": {"flag": f"{folder}/none"}}],
        },
        synthetic("fragile", {"isolation": "process", "load_ms": 8000 if "lost" in names else 0, "faults": {"exit": _EXIT}}),
        synthetic("failing", {"faults": {"fail": _FAIL}}),
        synthetic("spare", {}),
        synthetic("asleep", {"placement": "replicas", "autoscaling": {"min_replicas": 0, "max_replicas": 1}}),
        {"name": "parts", "backends": [{"kind": "python", "model": f"{folder}/parts.py:Parts"}]},
    ]
    server = {"ingress_replicas": 2, "model_control": True, "instance_type": "c7i.xlarge"}
    (folder / "gateway.yaml").write_text(yaml.safe_dump({"server": server, "models": models}))
    (folder / "dear.yaml").write_text(yaml.safe_dump({"models": [synthetic("dear", {"usd_per_hour": 50})]}))
    for name in _RULES:
        (folder / name).write_text(faster((ROOT / "configs/prometheus" / name).read_text()))
    scrape = {"job_name": "gateway", "file_sd_configs": [{"files": ["targets.yml"], "refresh_interval": "1s"}]}
    times = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    told = {"global": times, "rule_files": list(_RULES), "scrape_configs": [scrape]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(told))


@contextlib.contextmanager
def gateway(config: Path, *options: str) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """The process and its HTTP port."""
    ports = ["--http-port", str(free_port()), "--grpc-port", str(free_port())]
    command = [sys.executable, "-m", "gateway.cli", "serve", str(config), *ports, *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    log = config.with_suffix(".log").open("w")
    with log, subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True) as server:
        assert server.stdout is not None
        try:
            ready = re.search(r"http=[\d.]+:(\d+)", server.stdout.readline())
            if ready is None:
                raise SystemExit(f"the gateway did not start: {config.with_suffix('.log').read_text()}")
            yield server, int(ready[1])
        finally:
            server.send_signal(signal.SIGTERM)
            server.stdout.read()


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[Prometheus]:
    port = free_port()
    command = ["prometheus", "--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "prometheus.log").open("w") as log:
        server = subprocess.Popen([*command, "--storage.tsdb.path=data"], cwd=folder, stdout=log, stderr=log)
    try:
        until = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                Prometheus(port).ask("up")
                break
            if time.monotonic() > until or server.poll() is not None:
                raise SystemExit(f"Prometheus did not start: {(folder / 'prometheus.log').read_text()}")
            time.sleep(0.2)
        yield Prometheus(port)
    finally:
        server.terminate()
        server.wait()


def play(stage: Stage, name: str, clear_s: float) -> None:
    scenario = SCENARIOS[name]
    stage.told.fired.clear()
    expected = set(scenario.expected)
    with scenario.play(stage):
        fired_s = stage.until(f"{name}: {sorted(expected)} fire", lambda firing: expected <= stage.told.fired, 60)
    cleared_s = stage.until(f"{name}: they clear", lambda firing: stage.prometheus.calm(), clear_s)
    others = {one for one in stage.told.fired - expected if one[0] not in scenario.beside}
    beside = sorted(stage.told.fired - expected - others)
    print(f"{name:12} fired after {fired_s:5.1f} s, cleared after {cleared_s:5.1f} s  {beside or ''}", flush=True)
    if others:
        raise SystemExit(f"{name}: fired as well: {sorted(others)}")


def run(names: list[str], well_s: float, clear_s: float) -> Told:
    """Raises: SystemExit, where an alert is silent that should fire, or the other way round."""
    asked = questions()
    told = Told(asked, silent=set(asked))
    with tempfile.TemporaryDirectory(prefix="observed-") as made, contextlib.ExitStack() as stack:
        folder = Path(made)
        write(folder, names)
        (folder / "targets.yml").write_text("[]")
        _, port = stack.enter_context(gateway(folder / "gateway.yaml", "--ray-address", "local"))
        prometheus = stack.enter_context(watched(folder))
        stage = Stage(port, folder, folder / "targets.yml", told, prometheus)
        stage.scrape(port)
        for model in ("pair", "busy", "drifting", "failing", "spare"):
            stack.enter_context(Load(port, model, 8))
        stack.enter_context(Load(port, "parts", 2, path="generate_stream"))
        began = time.monotonic()
        stage.until("gateway is scraped", lambda firing: bool(prometheus.ask("gateway_info")), 20)
        stage.until("nothing fires at the start", lambda firing: not firing, 20)
        while time.monotonic() - began < well_s:
            stage.until("all is well", lambda firing: not firing, 0)
        print(f"all is well for {time.monotonic() - began:.0f} s: nothing fires", flush=True)
        for name in names:
            play(stage, name, clear_s)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SCENARIOS, action="append", help="may be given several times")
    parser.add_argument("--well", type=float, default=20, metavar="S", help="how long all must be well before")
    arguments = parser.parse_args()
    told = run(arguments.only or list(SCENARIOS), arguments.well, clear_s=500)
    print(f"{len(told.questions) - len(told.silent)} of {len(told.questions)} queries had data")
    for name in sorted(told.silent):
        print(f"  never: {name}")
    for name in sorted(told.odd):
        print(f"  not finite: {name}")
    print("  not asked: the dashboard of loadtest; tests/monitoring/test_loadtest_dashboard.py does")
    if told.odd or (told.silent and not arguments.only):
        raise SystemExit("some query has had no data, or not a finite one")


if __name__ == "__main__":
    main()
