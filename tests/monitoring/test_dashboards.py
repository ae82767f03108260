"""The dashboards and what provisions them: as their generator writes them, as Grafana's schema has them, and readable."""

import json
import os
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gateway.engine.metric_table import BY_NAME, TABLE
from tests.monitoring.prometheus import ROOT, rules

GRAFANA = ROOT / "configs" / "grafana"
FILES = sorted((GRAFANA / "dashboards").glob("*.json"))
SERIES = {*BY_NAME, *(f"{metric.name}_{end}" for metric in TABLE for end in ("bucket", "sum", "count"))}
SCHEMAS = Path(os.environ.get("GRAFANA_SCHEMAS", "/usr/share/grafana/jsonschema"))


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def panels(path: Path) -> list[dict[str, Any]]:
    return [panel for panel in read(path)["panels"] if panel["type"] != "row"]


def test_files_are_as_their_generator_writes_them() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "dashboards.py"))
    written = {dashboard.uid: script["written"](dashboard) for dashboard in script["DASHBOARDS"]}
    assert {read(path)["uid"]: path.read_text() for path in FILES} == written, "python scripts/dashboards.py writes them"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_panel_has_a_unit_a_description_and_a_legend(path: Path) -> None:
    for panel in panels(path):
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all(target["legendFormat"] for target in panel["targets"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_panels_lie_beside_each_other(path: Path) -> None:
    taken = set()
    for panel in read(path)["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not taken & cells
        taken |= cells


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_queries_read_metrics_and_variables_that_there_are(path: Path) -> None:
    recorded = {rule["record"] for rule in rules("recording.yml")}
    variables = {variable["name"] for variable in read(path)["templating"]["list"]}
    for panel in panels(path):
        for target in panel["targets"]:
            named = set(re.findall(r"(?:\w+:)?\bgateway_\w+(?::\w+)?", target["expr"]))
            assert named <= SERIES | recorded, panel["title"]
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables | {"__rate_interval"}, panel["title"]


@pytest.mark.debian("prometheus")
def test_a_million_costs_what_it_does_where_another_model_has_no_price(tmp_path: Path) -> None:
    priced, free = (f'model="m", version="{version}"' for version in (1, 2))
    hourly = f'gateway_cost_usd_total{{job="g", {priced}, backend="cpu", state="idle"}}'
    counted = [f'gateway_requests_total{{job="g", {model}, protocol="rest", code="ok"}}' for model in (priced, free)]
    series = [{"series": name, "values": f"0+{step}x90"} for name, step in zip([hourly, *counted], (1, 100, 900), strict=True)]
    found = [panel for panel in panels(GRAFANA / "dashboards" / "overview.json") if panel["title"] == "Cost of a million"]
    asked = [re.sub(r"\$(job|model)", ".*", target["expr"]) for panel in found for target in panel["targets"]]
    labels = ["{}", '{model="m"}']
    expected = [
        {"expr": expr.replace("$__rate_interval", "5m"), "eval_time": "80m", "exp_samples": [{"labels": of, "value": 1e4}]}
        for expr, of in zip(asked, labels, strict=True)  # 1 USD / 100 requests
    ]
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": expected}]}))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_provisioned_source_and_folder_are_those_that_the_dashboards_want() -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "gateway.yml").read_text())["providers"]
    assert source["type"] == "prometheus"
    assert provider["type"] == "file"
    for path in FILES:
        first, *_ = read(path)["templating"]["list"]
        assert (first["type"], first["query"]) == ("datasource", source["type"])


@pytest.mark.skipif(not SCHEMAS.is_dir(), reason="GRAFANA_SCHEMAS is not set: jsonschema/ of grafana/grafana-foundation-sdk")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_grafanas_published_schema_takes_it(path: Path) -> None:
    judge(read(path), "dashboard")
    for panel in panels(path):
        judge(panel["options"], panel["type"], "Options")
        if panel["type"] != "stat":  # has no drawing of its own
            judge(panel["fieldConfig"]["defaults"]["custom"], panel["type"], "FieldConfig")
        for target in panel["targets"]:
            judge(target, "prometheus")


def judge(found: Any, kind: str, part: str = "") -> None:
    schema = json.loads((SCHEMAS / f"{kind}.jsonschema.json").read_text())
    jsonschema.Draft7Validator(schema | ({"$ref": f"#/definitions/{part}"} if part else {})).validate(found)
