"""The dashboards of configs/grafana, from the panels below: `python scripts/dashboards.py` writes them anew.

A panel is a question, its unit, and the queries that answer it. Queries read raw metrics, so that dashboards work without
recording rules; only burn rates read those. Grafana fills in `$job` and the other variables, and `$__rate_interval`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent.parent / "configs" / "grafana" / "dashboards"
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS: Final = 24


@dataclass(frozen=True, slots=True)
class Panel:
    """queries: (PromQL, legend). unit: Grafana's name. kind: of the panel; a stat shows the last value. most: of the axis."""

    title: str
    unit: str
    description: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Dashboard:
    """rows: title and panels. variables: name -> the query of its values; each offers All, unless it is in `single`."""

    uid: str
    title: str
    description: str
    variables: dict[str, str]
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    single: tuple[str, ...] = ()


_JOB: Final = {"job": "label_values(gateway_info, job)"}
_MODEL: Final = {"model": 'label_values(gateway_model_ready{job=~"$job"}, model)'}
_BACKEND: Final = {"backend": 'label_values(gateway_workers{job=~"$job", model=~"$model"}, backend)'}
_INSTANCE: Final = {"instance": 'label_values(gateway_info{job=~"$job"}, instance)'}


def _rate(name: str, by: str, where: str) -> str:
    return f"sum by ({by}) (rate({name}{{{where}}}[$__rate_interval]))"


def _ratio(above: str, below: str) -> str:
    """No value, rather than a division by 0, of what nobody asks."""
    return f"{above} / ({below} > 0)"


def _quantile(share: float, name: str, by: str, where: str) -> str:
    found = f"histogram_quantile({share}, {_rate(f'{name}_bucket', f'{by}, le', where)})"
    return f"{found} and {_rate(f'{name}_count', by, where)} > 0"


def _mean(name: str, by: str, where: str) -> str:
    return _ratio(_rate(f"{name}_sum", by, where), _rate(f"{name}_count", by, where))


def _slo_share(by: str, where: str) -> str:
    met = _rate("gateway_slo_requests_total", by, f'{where}, result="met"')
    return _ratio(met, _rate("gateway_slo_requests_total", by, where))


def _busy_share(by: str, where: str) -> str:
    workers = f"sum by ({by}) (avg_over_time(gateway_workers{{{where}}}[$__rate_interval]))"
    return _ratio(_rate("gateway_worker_busy_seconds_total", by, where), workers)


def _drift(by: str, where: str) -> str:
    name = "gateway_service_seconds_total"
    return _ratio(_rate(name, by, f'{where}, time="actual"'), _rate(name, by, f'{where}, time="expected"'))


def _paid_for(where: str, span: str) -> str:
    """Successful requests to what has a price: those to the rest would make a million look cheap."""
    priced = f"rate(gateway_cost_usd_total{{{where}}}[{span}])"
    return f'rate(gateway_requests_total{{{where}, code="ok"}}[{span}]) and on (job, model, version) {priced}'


_F: Final = 'job=~"$job"'  # the fleet
_M: Final = f'{_F}, model=~"$model"'
_B: Final = f'{_M}, backend=~"$backend"'
_I: Final = f'{_F}, instance=~"$instance"'

OVERVIEW: Final = Dashboard(
    "gateway-overview",
    "Gateway: overview",
    "Is what was promised kept, what comes, and what does it cost?",
    _JOB | _MODEL,
    (
        ("Now", (
            Panel("Requests", "reqps", "Answered per second, with success or not.",
                  ((f"sum(rate(gateway_requests_total{{{_M}}}[$__rate_interval]))", "requests"),), "stat", 4),
            Panel("Within the SLO", "percentunit", "Of the requests to models with an SLO. 99 % is promised.",
                  ((_ratio(f'sum(rate(gateway_slo_requests_total{{{_M}, result="met"}}[$__rate_interval]))',
                           f"sum(rate(gateway_slo_requests_total{{{_M}}}[$__rate_interval]))"), "met"),), "stat", 4, most=1),
            Panel("Cost", "currencyUSD", "USD per hour, of all backends that have a price.",
                  ((f"sum(gateway_cost_usd_per_hour{{{_M}}})", "USD per hour"),), "stat", 4),
            Panel("Cost of a million", "currencyUSD", "USD per million successful requests of the last hour, idle time too. "
                  "Of the models that have a price.",
                  ((_ratio(f"1e6 * sum(rate(gateway_cost_usd_total{{{_M}}}[1h]))", f"sum({_paid_for(_M, '1h')})"),
                    "USD per million"),), "stat", 4),
            Panel("Nodes", "short", "That answer Prometheus.", ((f"sum(up{{{_F}}})", "nodes"),), "stat", 4),
            Panel("Alerts", "short", "That fire now.",
                  (('count(ALERTS{alertname=~"Gateway.*", alertstate="firing"}) or vector(0)', "alerts"),), "stat", 4),
        )),
        ("SLO", (
            Panel("Within the SLO", "percentunit", "By model. Late, shed, expired and failed requests have missed it.",
                  ((_slo_share("model, version", _M), "{{model}} {{version}}"),), most=1),
            Panel("Burn rate", "short", "1: the error budget of 30 days lasts 30 days. 14.4 in an hour wakes somebody up. "
                  "Needs the recording rules.",
                  ((f"model:gateway_slo_missed:ratio_rate1h{{{_M}}} / 0.01", "{{model}} {{version}}, 1 h"),
                   (f"model:gateway_slo_missed:ratio_rate6h{{{_M}}} / 0.01", "{{model}} {{version}}, 6 h"))),
            Panel("p99 by SLO", "percentunit", "The p99 of successful requests as a share of the SLO: above 1 it is missed.",
                  ((f"({_quantile(0.99, 'gateway_request_duration_seconds', 'model, version', _M)}) / on (model, version) "
                    f"max by (model, version) (gateway_slo_seconds{{{_M}}})", "{{model}} {{version}}"),)),
        )),
        ("Traffic", (
            Panel("Requests", "reqps", "By model.", ((_rate("gateway_requests_total", "model", _M), "{{model}}"),)),
            Panel("Errors", "reqps", "By model and code. overloaded: refused, because it would have been late.",
                  ((_rate("gateway_requests_total", "model, code", f'{_M}, code!="ok"'), "{{model}} {{code}}"),)),
            Panel("Latency", "s", "p50 and p99 of successful requests, at the gateway.",
                  tuple((_quantile(share, "gateway_request_duration_seconds", "model", _M), f"{{{{model}}}} p{share * 100:.0f}")
                        for share in (0.5, 0.99))),
            Panel("Requests by protocol", "reqps", "REST, gRPC and the others.",
                  ((_rate("gateway_requests_total", "protocol", _M), "{{protocol}}"),), stacked=True),
            Panel("Busy sessions", "percentunit", "Share of the sessions' time with a batch. Above 0.9 little is left.",
                  ((_busy_share("model, backend", _M), "{{model}} {{backend}}"),), most=1),
            Panel("Ejected backends", "short", "Ingress processes that send it nothing. Without requests nothing tries it.",
                  ((f"sum by (model, backend) (gateway_ejected{{{_M}}})", "{{model}} {{backend}}"),)),
        )),
        ("Cost", (
            Panel("Cost by model", "currencyUSD", "USD per hour.",
                  ((f"sum by (model, backend) (gateway_cost_usd_per_hour{{{_M}}})", "{{model}} {{backend}}"),), stacked=True),
            Panel("Idle share", "percentunit", "Of the cost: time in which sessions had nothing to do.",
                  ((_ratio(_rate("gateway_cost_usd_total", "model", f'{_M}, state="idle"'),
                           _rate("gateway_cost_usd_total", "model", _M)), "{{model}}"),), most=1),
            Panel("Cost of a million", "currencyUSD", "USD per million successful requests, idle time included.",
                  ((_ratio(f"1e6 * {_rate('gateway_cost_usd_total', 'model', _M)}",
                           f"sum by (model) ({_paid_for(_M, '$__rate_interval')})"), "{{model}}"),)),
        )),
    ),
)  # fmt: skip

MODEL: Final = Dashboard(
    "gateway-model",
    "Gateway: one model",
    "Where the time of its requests goes, how they are batched, and which backend serves them.",
    _JOB | _MODEL | _BACKEND,
    (
        ("Requests", (
            Panel("Requests", "reqps", "By the code of the answer.",
                  ((_rate("gateway_requests_total", "code", _M), "{{code}}"),), stacked=True),
            Panel("Latency", "s", "Of successful requests, with the SLO: 99 of 100 are promised to be below it.",
                  (*((_quantile(share, "gateway_request_duration_seconds", "model", _M), f"p{share * 100:.0f}")
                     for share in (0.5, 0.9, 0.99)), (f"max by (model) (gateway_slo_seconds{{{_M}}})", "SLO"))),
            Panel("Within the SLO", "percentunit", "Late, shed, expired and failed requests have missed it.",
                  ((_slo_share("model", _M), "met"),), most=1),
        )),
        ("Stages", (
            Panel("Mean time by stage", "s", "decode, queue, batch_wait (closed, not yet with a worker), compute, encode.",
                  ((_mean("gateway_stage_duration_seconds", "stage", _M), "{{stage}}"),), stacked=True),
            Panel("p99 by stage", "s", "The slowest of 100, of each stage alone: they do not add up to the p99 of the whole.",
                  ((_quantile(0.99, "gateway_stage_duration_seconds", "stage", _M), "{{stage}}"),)),
            Panel("To and from the workers", "s", "Mean per batch: from its close to its run, from its end to outputs here.",
                  ((_ratio(_rate("gateway_to_worker_seconds_total", "backend", _B),
                           _rate("gateway_executions_total", "backend", _B)), "to {{backend}}"),
                   (_ratio(_rate("gateway_from_worker_seconds_total", "backend", _B),
                           _rate("gateway_executions_total", "backend", _B)), "from {{backend}}"))),
        )),
        ("Batching", (
            Panel("Rows of a batch", "short", "Mean, without padding.",
                  ((_mean("gateway_batch_rows", "backend", _B), "{{backend}}"),)),
            Panel("Why batches close", "ops", "idle: low load. full, cap: near capacity. deadline: tight SLO. overload: shed.",
                  ((_rate("gateway_batches_total", "reason", _B), "{{reason}}"),), stacked=True),
            Panel("Padding", "percentunit", "Share of the executed rows that belongs to no request.",
                  ((_ratio(_rate("gateway_padding_rows_total", "backend", _B),
                           f"({_rate('gateway_padding_rows_total', 'backend', _B)} + "
                           f"{_rate('gateway_batch_rows_sum', 'backend', _B)})"), "{{backend}}"),), most=1),
            Panel("Queue", "short", "Requests that wait.",
                  ((f"sum by (backend) (gateway_queue_requests{{{_B}}})", "{{backend}}"),)),
            Panel("Age of the queue", "s", "How long the oldest request has waited.",
                  ((f"max by (backend) (gateway_queue_age_seconds{{{_B}}})", "{{backend}}"),)),
            Panel("Rows inferred", "rowsps", "With success.", ((_rate("gateway_rows_total", "backend", _B), "{{backend}}"),)),
        )),
        ("Backends", (
            Panel("Where requests go", "reqps", "By backend and why: cheapest, spill, fastest, … Only of several backends.",
                  ((_rate("gateway_routed_total", "backend, reason", _B), "{{backend}} {{reason}}"),), stacked=True),
            Panel("Ejected", "short", "Ingress processes that send it nothing.",
                  ((f"sum by (backend) (gateway_ejected{{{_B}}})", "{{backend}}"),)),
            Panel("Copies", "reqps", "Sent besides: probe (of an ejected backend), learn, wake, shadow; and their result.",
                  ((_rate("gateway_copies_total", "backend, why, result", _B), "{{backend}} {{why}} {{result}}"),)),
            Panel("Busy sessions", "percentunit", "Share of the sessions' time with a batch.",
                  ((_busy_share("backend", _B), "{{backend}}"),), most=1),
            Panel("Learned time of a batch", "s", "Of 1 row and of the most rows: expected, and p90.",
                  ((f"max by (backend, rows, estimate) (gateway_service_time_seconds{{{_B}}})",
                    "{{backend}} {{rows}} rows, {{estimate}}"),)),
            Panel("Drift", "short", "Time of batches by what was expected. 1: as learned; 2: twice as slow, not followed yet.",
                  ((_drift("backend", _B), "{{backend}}"),)),
            Panel("Failures", "ops", "Batches that failed, requests run a second time, outputs that nobody waited for.",
                  ((_rate("gateway_failed_executions_total", "backend", _B), "{{backend}} failed batches"),
                   (_rate("gateway_retries_total", "backend", _B), "{{backend}} retried requests"),
                   (_rate("gateway_dropped_outputs_total", "backend", _B), "{{backend}} dropped outputs"))),
            Panel("Sudden changes of speed", "short", "That the learned times have followed, in the last hour.",
                  ((f"sum by (backend) (increase(gateway_service_shifts_total{{{_B}}}[1h]))", "{{backend}}"),)),
            Panel("Cost", "currencyUSD", "USD per hour, by what sessions did meanwhile.",
                  ((f"3600 * {_rate('gateway_cost_usd_total', 'backend, state', _B)}", "{{backend}} {{state}}"),),
                  stacked=True),
        )),
        ("Parts of a decoupled model's answers", (
            Panel("Parts", "ops", "Sent per second.",
                  ((_rate("gateway_parts_total", "protocol", _M), "{{protocol}}"),), width=12),
            Panel("Gap between parts", "s", "p50 and p99, from one part to the next.",
                  tuple((_quantile(share, "gateway_part_gap_seconds", "protocol", _M), f"{{{{protocol}}}} p{share * 100:.0f}")
                        for share in (0.5, 0.99)), width=12),
        )),
    ),
    single=("model",),
)  # fmt: skip

FLEET: Final = Dashboard(
    "gateway-fleet",
    "Gateway: fleet",
    "Nodes and their processes, replicas, workers, and what each costs.",
    _JOB | _INSTANCE,
    (
        ("Nodes", (
            Panel("What runs", "short", "Version, Python, Ray, and the type of machine that was configured.",
                  ((f"max by (instance, version, python, ray, instance_type) (gateway_info{{{_I}}})", "{{instance}}"),),
                  "table", 12),
            Panel("Up", "short", "1: answers Prometheus.", ((f"up{{{_I}}}", "{{instance}}"),), width=6, most=1),
            Panel("Scrape", "s", "How long /metrics takes.", ((f"scrape_duration_seconds{{{_I}}}", "{{instance}}"),), width=6),
            Panel("Requests", "reqps", "By node.", ((_rate("gateway_requests_total", "instance", _I), "{{instance}}"),)),
            Panel("Cost", "currencyUSD", "USD per hour, by node.",
                  ((f"sum by (instance) (gateway_cost_usd_per_hour{{{_I}}})", "{{instance}}"),), stacked=True),
            Panel("Idle share", "percentunit", "Of the node's cost.",
                  ((_ratio(_rate("gateway_cost_usd_total", "instance", f'{_I}, state="idle"'),
                           _rate("gateway_cost_usd_total", "instance", _I)), "{{instance}}"),), most=1),
        )),
        ("Processes", (
            Panel("Processes", "short", "That live: ingress, replica (of a backend), session (isolation: process).",
                  ((f"sum by (instance, role) (gateway_processes{{{_I}}})", "{{instance}} {{role}}"),)),
            Panel("Processor", "short", "Cores in use, by role.",
                  ((_rate("gateway_process_cpu_seconds_total", "instance, role", _I), "{{instance}} {{role}}"),)),
            Panel("Memory", "bytes", "Resident, by role.",
                  ((f"sum by (instance, role) (gateway_process_resident_memory_bytes{{{_I}}})", "{{instance}} {{role}}"),)),
            Panel("Lag of the event loop", "s", "p99 of how much later than asked it calls back. More than a few "
                  "milliseconds: the processor is short, or something blocks it.",
                  ((_quantile(0.99, "gateway_loop_lag_seconds", "instance, role", _I), "{{instance}} {{role}}"),)),
            Panel("Uptime", "s", "Of the youngest process of each role: it falls when one was started anew.",
                  ((f"time() - max by (instance, role) (gateway_process_start_time_seconds{{{_I}}})",
                    "{{instance}} {{role}}"),)),
            Panel("Models that serve", "short", "1: every process of the node serves it.",
                  ((f"min by (instance, model, version) (gateway_model_ready{{{_I}}})", "{{instance}} {{model}} {{version}}"),),
                  most=1),
        )),
        ("Replicas and workers", (
            Panel("Replicas", "short", "Of each backend with `placement: replicas`.",
                  ((f"sum by (model, backend) (gateway_replicas{{{_I}}})", "{{model}} {{backend}}"),)),
            Panel("Sessions", "short", "That can run batches, and that run one now.",
                  ((f"sum by (model, backend) (gateway_workers{{{_I}}})", "{{model}} {{backend}}"),
                   (f"sum by (model, backend) (gateway_busy_workers{{{_I}}})", "{{model}} {{backend}}, busy"))),
            Panel("Busy sessions", "percentunit", "Share of the sessions' time with a batch.",
                  ((_busy_share("model, backend", _I), "{{model}} {{backend}}"),), most=1),
            Panel("Cold start", "s", "How long the last start from zero took.",
                  ((f"max by (model, backend) (gateway_cold_start_seconds{{{_I}}})", "{{model}} {{backend}}"),)),
            Panel("Ejections", "short", "Of backends that failed, in the last hour.",
                  ((f"sum by (model, backend) (increase(gateway_ejections_total{{{_I}}}[1h]))", "{{model}} {{backend}}"),)),
            Panel("Cost by backend", "currencyUSD", "USD per hour.",
                  ((f"sum by (model, backend) (gateway_cost_usd_per_hour{{{_I}}})", "{{model}} {{backend}}"),), stacked=True),
        )),
    ),
)  # fmt: skip

_R: Final = 'run=~"$run"'
_S: Final = 'model=~"$model"'

LOADTEST: Final = Dashboard(
    "gateway-loadtest",
    "Gateway: one loadtest run",
    "What clients saw, and what the gateway did meanwhile. Runs come in by `loadtest report RUN.json --format openmetrics`.",
    {"model": "label_values(loadtest_run_info, model)", "run": 'label_values(loadtest_run_info{model=~"$model"}, run)'},
    (
        ("Clients and server", (
            Panel("p99", "s", "The client's lies above the gateway's by the network, the client's queue, and how late it sent.",
                  ((_quantile(0.99, "loadtest_request_duration_seconds", "run", _R), "client, {{run}}"),
                   (_quantile(0.99, "gateway_request_duration_seconds", "model", _S), "gateway, {{model}}"),
                   (f"max by (objective) (loadtest_slo_seconds{{{_R}}})", "{{objective}}")), width=12),
            Panel("p50", "s", "As the p99.",
                  ((_quantile(0.5, "loadtest_request_duration_seconds", "run", _R), "client, {{run}}"),
                   (_quantile(0.5, "gateway_request_duration_seconds", "model", _S), "gateway, {{model}}")), width=12),
            Panel("Rate", "reqps", "Asked by the schedule, answered as clients counted, and as the gateway did.",
                  ((f"max by (run) (loadtest_target_requests_per_second{{{_R}}})", "asked, {{run}}"),
                   (_rate("loadtest_requests_total", "run, outcome", _R), "{{run}} {{outcome}}"),
                   (_rate("gateway_requests_total", "model", _S), "gateway, {{model}}")), width=12),
            Panel("Within the SLO", "percentunit", "By the run's objectives, as clients saw it, and by the gateway's own SLO.",
                  ((_ratio(_rate("loadtest_slo_requests_total", "run", f'{_R}, result="met"'),
                           _rate("loadtest_slo_requests_total", "run", _R)), "client, {{run}}"),
                   (_slo_share("model", _S), "gateway, {{model}}")), width=12, most=1),
            Panel("Exact percentiles", "s", "Of each block of the run, without buckets.",
                  ((f"max by (run, percentile) (loadtest_request_duration_percentile_seconds{{{_R}}})",
                    "{{run}} p{{percentile}}"),),
                  width=12),
            Panel("Misses that the machine made", "reqps", "Missed the SLO because of other work on the client's machine.",
                  ((_rate("loadtest_marked_requests_total", "run", _R), "{{run}}"),), width=12),
        )),
        ("The gateway meanwhile", (
            Panel("Mean time by stage", "s", "decode, queue, batch_wait, compute, encode.",
                  ((_mean("gateway_stage_duration_seconds", "stage", _S), "{{stage}}"),), stacked=True),
            Panel("Rows of a batch", "short", "Mean, without padding.",
                  ((_mean("gateway_batch_rows", "backend", _S), "{{backend}}"),)),
            Panel("Busy sessions", "percentunit", "Share of the sessions' time with a batch.",
                  ((_busy_share("backend", _S), "{{backend}}"),), most=1),
        )),
    ),
    single=("model",),
)  # fmt: skip

DASHBOARDS: Final = (OVERVIEW, MODEL, FLEET, LOADTEST)


def written(dashboard: Dashboard) -> str:
    """As Grafana's JSON."""
    document = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["gateway"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "annotations": {"list": []},
        "links": [_link()],
        "templating": {"list": [_datasource(), *(_variable(name, dashboard) for name in dashboard.variables)]},
        "panels": list(_panels(dashboard)),
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _link() -> dict[str, Any]:
    return {
        "title": "Gateway", "type": "dashboards", "tags": ["gateway"], "asDropdown": True, "includeVars": True,
        "keepTime": True, "icon": "external link", "tooltip": "", "targetBlank": False,
    }  # fmt: skip


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _variable(name: str, dashboard: Dashboard) -> dict[str, Any]:
    query = dashboard.variables[name]
    every = name not in dashboard.single
    return {
        "name": name, "label": name.capitalize(), "type": "query", "datasource": _SOURCE, "definition": query,
        "query": query, "refresh": 2, "sort": 1, "multi": every, "includeAll": every,
        **({"allValue": ".*", "current": {"text": "All", "value": "$__all"}} if every else {}),
    }  # fmt: skip


def _panels(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    """Left to right, in rows under their titles."""
    numbers = count(1)
    top = 0
    for title, panels in dashboard.rows:
        at = _at(0, top, _COLUMNS, 1)
        yield {"id": next(numbers), "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": at}
        top += 1
        left = 0
        for panel in panels:
            if left + panel.width > _COLUMNS:
                left, top = 0, top + _height(panel)
            yield {"id": next(numbers), **_panel(panel), "gridPos": _at(left, top, panel.width, _height(panel))}
            left += panel.width
        top += _height(panels[-1])


def _height(panel: Panel) -> int:
    return 4 if panel.kind == "stat" else 8


def _at(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": _drawn(panel)}
    if panel.most is not None:
        defaults["max"] = panel.most
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel),
        "targets": [_target(panel, place, *query) for place, query in enumerate(panel.queries)],
    }


def _drawn(panel: Panel) -> dict[str, Any]:
    if panel.kind == "table":
        return {"align": "auto", "inspect": False}
    if panel.kind == "stat":
        return {}
    if panel.stacked:
        return {"fillOpacity": 20, "stacking": {"mode": "normal", "group": "A"}}
    return {"fillOpacity": 0}


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        return {
            "reduceOptions": {"calcs": ["lastNotNull"], "values": False, "fields": ""}, "graphMode": "area",
            "colorMode": "none",
            "justifyMode": "auto", "textMode": "auto", "wideLayout": True, "showPercentChange": False,
            "percentChangeColorMode": "standard", "orientation": "auto",
        }  # fmt: skip
    if panel.kind == "table":
        return {"frameIndex": 0, "showHeader": True, "cellHeight": "sm"}
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _target(panel: Panel, place: int, query: str, legend: str) -> dict[str, Any]:
    told = {"refId": "ABCDEFGH"[place], "datasource": _SOURCE, "expr": query, "legendFormat": legend}
    if panel.kind == "table":
        return told | {"instant": True, "range": False, "format": "table"}
    return told | {"range": True}


if __name__ == "__main__":
    for each in DASHBOARDS:
        (FOLDER / f"{each.uid.removeprefix('gateway-')}.json").write_text(written(each))
