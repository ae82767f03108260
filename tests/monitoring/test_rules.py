"""Rules, alerts and the scrape configuration: Prometheus's own promtool takes them, and they name what there is."""

import re
import subprocess
from pathlib import Path

import pytest

from gateway.engine.metric_table import BY_NAME, TABLE
from tests.monitoring.prometheus import PROMETHEUS, ROOT, RULES, rules

SERIES = {*BY_NAME, *(f"{metric.name}_{end}" for metric in TABLE for end in ("bucket", "sum", "count"))}
ALERTS = rules("alerts.yml")


@pytest.mark.debian("prometheus")
@pytest.mark.parametrize("command", ["check config prometheus.yml", f"check rules {' '.join(RULES)}"])
def test_promtool_finds_no_fault(command: str) -> None:
    done = subprocess.run(["promtool", *command.split()], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.debian("prometheus")
@pytest.mark.parametrize("scenarios", ["alerts_test.yml", "burns_test.yml"])
def test_each_alert_fires_in_its_own_trouble_and_in_no_other(scenarios: str) -> None:
    command = ["promtool", "test", "rules", scenarios]
    done = subprocess.run(command, cwd=ROOT / "tests" / "monitoring", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.debian("prometheus")
def test_the_parts_of_the_configuration_that_are_commented_out_are_valid(tmp_path: Path) -> None:
    text = (PROMETHEUS / "prometheus.yml").read_text()
    path = tmp_path / "prometheus.yml"
    text = re.sub(r"(?m)^  # (?=- job_name|  )", "  ", text).replace("[recording.yml, budget.yml, alerts.yml]", "[]")
    # Debian's Prometheus has no discovery by Kubernetes; what is made of its labels is checked.
    path.write_text(text.replace("kubernetes_sd_configs:\n      - role: pod", "static_configs: []"))
    done = subprocess.run(["promtool", "check", "config", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert path.read_text().count("\n  - job_name") == 5


def test_rules_read_only_metrics_and_rules_that_there_are() -> None:
    recorded = {rule["record"] for name in RULES for rule in rules(name) if "record" in rule}
    for name in RULES:
        for rule in rules(name):
            named = set(re.findall(r"(?:\w+:)?\bgateway_\w+(?::\w+)?", rule["expr"]))
            assert named <= SERIES | recorded, rule


def test_every_recording_rule_and_alert_is_explained() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    for rule in ALERTS:
        assert rule["annotations"]["runbook_url"] == f"docs/monitoring.md#{rule['alert'].lower()}"
        assert f"\n### {rule['alert']}\n" in page
    for rule in rules("recording.yml"):
        assert f"`{re.sub('(5m|30m|1h|2h|6h|1d|3d)$', '', rule['record'])}" in page, rule["record"]


def test_every_alert_has_a_made_up_scenario() -> None:
    scenarios = "".join(path.read_text() for path in (ROOT / "tests" / "monitoring").glob("*_test.yml"))
    for rule in ALERTS:
        assert f'alertname="{rule["alert"]}"' in scenarios
