"""What a server and its models are, in the names of the v2 protocol and of Triton's extensions, as JSON has it.

Both protocols answer with these: REST as they are, gRPC as the protobuf messages of the same names.
"""

from typing import Any, Final
from urllib.parse import quote

from backends.base import ModelSpec, TensorSpec
from backends.datatypes import config_datatype
from gateway import __version__
from gateway.config import ModelSection
from gateway.engine.model_statistics import ModelStatistics, Total

# Only what works is advertised. Source: Triton docs/protocol/extension_*.md.
EXTENSIONS: Final = (
    "classification",
    "model_repository",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "generate",
)


def describe_server(instance_type: str | None) -> dict[str, Any]:
    """The answer to a server metadata request; `instance_type` is ours, and only there if the operator stated it."""
    known = {"name": "serving-gateway", "version": __version__, "extensions": list(EXTENSIONS)}
    return known | ({"instance_type": instance_type} if instance_type else {})


def describe_models(index: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every model, by name, with the state of each version; a model's is that of its best one. index: the repository's."""
    states: dict[str, list[dict[str, Any]]] = {}
    for row in index:
        states.setdefault(row.pop("name"), []).append(row)
    return [
        {
            "name": name,
            "state": "READY" if any(row["state"] == "READY" for row in rows) else rows[-1]["state"],
            "versions": rows,
            "url": f"/v2/models/{quote(name, safe='')}",
        }
        for name, rows in states.items()
    ]


def describe_welcome(models: list[dict[str, Any]], *, metrics: bool) -> dict[str, Any]:
    """What is here, for whoever asks for `/`. models: as `Repository.models` lists them. metrics: whether there is /metrics."""
    known = describe_server(None)
    return {
        "status": "alive",  # which KServe's client of v1 asks for
        "name": known["name"],
        "version": known["version"],
        "protocol": "Open Inference Protocol v2",
        "models": models,
        "links": {
            "server": "/v2",
            "models": "/v2/models",
            "status": "/v2/status",
            "ready": "/v2/health/ready",
            "openapi": "/openapi.json",
            **({"metrics": "/metrics"} if metrics else {}),
        },
    }


def describe_metadata(name: str, spec: ModelSpec, versions: list[str]) -> dict[str, Any]:
    """The answer to a metadata request of a model. versions: the one that was asked for, or those that are ready."""

    def plain(tensor: TensorSpec) -> dict[str, Any]:
        return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}

    return {
        "name": name,
        "versions": sorted(versions, key=int),
        "platform": spec.platform,
        "inputs": [plain(tensor) for tensor in spec.inputs],
        "outputs": [plain(tensor) for tensor in spec.outputs],
    }


def describe_config(model: ModelSection, spec: ModelSpec, versions: list[str]) -> dict[str, Any]:
    """Triton's ModelConfig in its JSON form, as far as it has a meaning here. versions: all that are configured."""
    batching = model.batching
    batched = spec.max_rows > 0

    def plain(tensor: TensorSpec) -> dict[str, Any]:
        dims = tensor.shape[1:] if batched else tensor.shape
        return {"name": tensor.name, "data_type": config_datatype(tensor.datatype), "dims": list(dims)}

    config: dict[str, Any] = {
        "name": model.name,
        "platform": spec.platform,
        "backend": model.backends[0].label,
        "version_policy": {"specific": {"versions": [int(known) for known in sorted(versions, key=int)]}},
        "max_batch_size": spec.max_rows,
        "input": [plain(tensor) | ({"optional": True} if tensor.optional else {}) for tensor in spec.inputs],
        "output": [plain(tensor) for tensor in spec.outputs],
        "instance_group": [
            {"name": backend.label, "kind": "KIND_CPU", "count": backend.sessions} for backend in model.backends
        ],
        "default_model_filename": "",
        "parameters": {"batching_policy": {"string_value": "greedy" if spec.decoupled else batching.policy}},
    }
    if spec.decoupled:
        config["model_transaction_policy"] = {"decoupled": True}
    elif batched:
        config["dynamic_batching"] = {
            "preferred_batch_size": list(spec.row_sizes),
            "max_queue_delay_microseconds": round(batching.max_delay_ms * 1000) if batching.policy == "fixed" else 0,
        }
    return config


def describe_statistics(name: str, version: str, found: ModelStatistics) -> dict[str, Any]:
    """One model version's entry of the statistics extension.

    Source of what each part means: Triton's docs/protocol/extension_statistics.md. A request has one response here, so the
    response statistics have the one index 0.
    """

    def duration(total: Total) -> dict[str, int]:
        return timed(total.count, total.ns)

    def timed(count: int, ns: int) -> dict[str, int]:
        return {"count": count, "ns": ns}

    nothing = duration(Total())
    stages = found.stages
    compute, encode = stages["compute"], stages["encode"]
    return {
        "name": name,
        "version": version,
        "last_inference": round(found.last_inference_s * 1000),
        "inference_count": found.rows,
        "execution_count": sum(total.count for total in found.executions_by_rows.values()),
        "inference_stats": {
            "success": duration(found.success),
            "fail": duration(found.failed),
            "queue": duration(stages["queue"]),
            "compute_input": duration(stages["batch_wait"]),
            "compute_infer": duration(compute),
            "compute_output": duration(encode),
            "cache_hit": nothing,
            "cache_miss": nothing,
        },
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": timed(executions.count, executions.to_worker_ns),
                "compute_infer": timed(executions.count, executions.compute_ns),
                "compute_output": timed(executions.count, executions.from_worker_ns),
            }
            for rows, executions in sorted(found.executions_by_rows.items())
        ],
        "response_stats": {
            "0": {
                "compute_infer": duration(compute),
                "compute_output": duration(encode),
                "success": timed(found.success.count, compute.ns + encode.ns),
                "fail": timed(found.failed.count - found.cancelled, found.failed.ns),
                "empty_response": nothing,
                "cancel": timed(found.cancelled, 0),
            }
        },
    }
