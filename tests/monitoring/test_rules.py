"""Rules, alerts and the scrape configuration: Prometheus's own promtool takes them, and they name what there is."""

import re
import subprocess

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
def test_each_alert_fires_in_its_own_trouble_and_in_no_other() -> None:
    command = ["promtool", "test", "rules", "alerts_test.yml"]
    done = subprocess.run(command, cwd=ROOT / "tests" / "monitoring", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


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
    scenarios = (ROOT / "tests" / "monitoring" / "alerts_test.yml").read_text()
    for rule in ALERTS:
        assert f'alertname="{rule["alert"]}"' in scenarios
