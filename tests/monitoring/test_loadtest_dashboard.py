"""A run of loadtest in a real Prometheus, beside what the gateway counted meanwhile: every panel of its dashboard has data."""

import math
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from benchmarks.observability import queries, watched
from gateway.engine.metrics import OPENMETRICS
from tests.monitoring.prometheus import ROOT
from tests.served.gateway_process import served

SECONDS = 4
MODEL = {
    "name": "m",
    "slo": {"p99_ms": 200},
    "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 16]}],
    "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 16]}],
    "backends": [{"kind": "synthetic", "fixed_ms": 5}],
}


@contextmanager
def scraped(url: str) -> Iterator[list[tuple[float, str]]]:
    """When, and what was told: as Prometheus would, but more often."""
    found: list[tuple[float, str]] = []
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(0.3):
            request = urllib.request.Request(url, headers={"Accept": OPENMETRICS})
            with urllib.request.urlopen(request, timeout=10) as answer:
                found.append((time.time(), answer.read().decode()))

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def with_times(scrapes: list[tuple[float, str]]) -> str:
    """Several scrapes as one file, whose samples say when they were taken."""
    heads: dict[str, list[str]] = defaultdict(list)
    samples: dict[str, list[str]] = defaultdict(list)
    for at_s, text in scrapes:
        family = ""
        for line in text.removesuffix("# EOF\n").splitlines():
            if not line.startswith("#"):
                samples[family].append(f"{line} {at_s:.3f}")
                continue
            family = line.split()[2]
            if line not in heads[family]:
                heads[family].append(line)
    return "\n".join(line for family in heads for line in (*heads[family], *samples[family])) + "\n# EOF\n"


@pytest.mark.slow
@pytest.mark.debian("prometheus")
def test_every_panel_has_data_at_the_end_of_a_run_that_was_taken_in(tmp_path: Path) -> None:
    config, run, meanwhile, data = (tmp_path / name for name in ("gateway.yaml", "run.om", "meanwhile.om", "data"))
    config.write_text(yaml.safe_dump({"models": [MODEL]}))
    command = [sys.executable, "-m", "loadtest.cli", "run", "--model", "m", "--rate", "50", "--duration", str(SECONDS)]
    command += ["--warmup", "0", "--slo", "p99<200ms", "--label", "mine", "--openmetrics", str(run)]
    with served(config, "--no-ray") as gateway, scraped(f"http://{gateway.http}/metrics") as scrapes:
        subprocess.run([*command, f"http://{gateway.http}"], cwd=ROOT, capture_output=True, check=False, timeout=60)
    meanwhile.write_text(with_times(scrapes))
    for file in (run, meanwhile):
        make = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(file), str(data)]
        made = subprocess.run(make, capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
    (tmp_path / "prometheus.yml").write_text("global: {}\n")
    end_s = max(float(line.split()[-1]) for line in run.read_text().splitlines() if not line.startswith("#"))
    asked = queries(ROOT / "configs" / "grafana" / "dashboards" / "loadtest.json", f"{SECONDS}s")
    with watched(tmp_path) as prometheus:
        answers = {name: prometheus.ask(query, end_s) for name, query in asked.items()}
        (info,) = prometheus.ask("loadtest_run_info", end_s)
    assert (info["metric"]["run"], info["metric"]["model"]) == ("mine", "m")
    assert [name for name, found in answers.items() if not found] == []
    odd = [name for name, found in answers.items() for one in found if not math.isfinite(float(one["value"][1]))]
    assert odd == []
    assert len(asked) >= 15
