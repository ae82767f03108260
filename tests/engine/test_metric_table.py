"""The table of metrics is what is exposed, what docs/metrics.md says, and what Prometheus's conventions ask for."""

import re
import runpy
from pathlib import Path

from gateway.engine.metric_blocks import FIELDS, LABELS
from gateway.engine.metric_table import BY_NAME, STATIONS, TABLE, TRITON_TABLE

ROOT = Path(__file__).parent.parent.parent


def test_the_page_has_the_table_as_it_is() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "metrics_page.py"))
    page = script["PAGE"].read_text()
    assert page == script["written"](page), "python scripts/metrics_page.py writes it"


def test_every_metric_is_recorded_with_the_labels_of_the_table() -> None:
    recorded: dict[str, set[str]] = {}
    for kind, fields in FIELDS.items():
        for field in fields:
            if field.name:
                labels = {*LABELS[kind], *field.inner, *(name for name, _ in field.fixed)}
                recorded.setdefault(field.name, set()).update(labels)
    assert recorded == {metric.name: set(metric.labels) for metric in TABLE}


def test_names_units_and_stations_are_as_prometheus_asks() -> None:
    assert len(BY_NAME) == len(TABLE)
    for metric in TABLE:
        assert re.fullmatch(r"gateway_[a-z_]+", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert metric.unit in ("", "rows") or metric.name.removesuffix("_total").endswith(f"_{metric.unit}"), metric.name
        assert metric.station in STATIONS
        assert not re.search(r'\.$|["\\]|^$', metric.meaning)
    assert all(metric.name.startswith("nv_inference_") for metric in TRITON_TABLE)


def test_documents_name_no_metric_that_is_not_there() -> None:
    known = set(BY_NAME) | {f"{metric.name}{end}" for metric in TABLE for end in ("_bucket", "_sum", "_count")}
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        named = set(re.findall(r"\bgateway_[a-z_]+(?:_total|_seconds|_usd|_rows|_ejected|_workers)\b", path.read_text()))
        assert named <= known, path.name
