"""What Triton, KServe, TorchServe, BentoML, LitServe, numpy and PyTorch call what the configuration has another name for."""

from collections.abc import Mapping
from typing import Final

from backends.datatypes import NUMPY

# key here -> what to write, and the names that it, or what does its work, has elsewhere
_KEYS: Final = {
    "max_rows": (
        "write `max_rows` at the model: the most rows that one execution takes",
        "max_batch_size batch_size max_batch preferred_batch_size",
    ),
    "p99_ms": (
        "no delay is set here: write `slo: {p99_ms: …}` at the model",
        "max_queue_delay_microseconds max_batch_delay max_latency_ms max_latency batch_timeout max_delay dynamic_batching",
    ),
    "max_queue_rows": ("write `batching: {max_queue_rows: …}` at the model", "max_queue_size job_queue_size queue_size"),
    "sessions": (
        "write `sessions` at the backend: so many batches run at once",
        "instance_group instance_count workers num_workers workers_per_device min_workers max_workers concurrency",
    ),
    "autoscaling": (
        "write `placement: replicas` and `autoscaling: {min_replicas: …, max_replicas: …}` at the backend",
        "minReplicas maxReplicas scale_target num_replicas",
    ),
    "device": ("write `device` at the backend, such as `device: cuda`", "accelerator devices device_type gpu gpus gpu_id"),
    "model": (
        "write `model` at the backend: the file, or path/to/file.py:Class",
        "storage_uri model_uri model_path model_file default_model_filename handler",
    ),
    "kind": ("write `kind` at the backend, such as `kind: onnxruntime`", "platform framework runtime model_format"),
    "class_options": ("write `class_options` at a python backend", "parameters model_args"),
    "datatype": ("write `datatype`, such as FP32", "data_type dtype type"),
    "shape": ("write `shape`, with -1 in front for the batch", "dims dimensions"),
    "hang_timeout_s": ("write `hang_timeout_s` at the backend", "timeout timeout_s response_timeout timeout_seconds"),
    "canary_share": ("write `canary_share` at the backend, above 0 to 1", "canary_traffic_percent canary_traffic traffic"),
    "load_at_start": ("write `load_at_start` at the model", "load_on_startup preload lazy"),
    "version": ("list the model once for each `version`", "version_policy versions"),
}  # fmt: skip


def plain(name: str) -> str:
    """The same for max_batch_size, maxBatchSize and max-batch-size."""
    return "".join(char for char in name.lower() if char.isalnum())


KEYS: Final[Mapping[str, tuple[str, str]]] = {
    plain(other): (key, remedy) for key, (remedy, others) in _KEYS.items() for other in others.split()
}
"""Plain name of a key elsewhere -> the key here, and what to write."""

DATATYPES: Final = {
    **{dtype.name: name for name, dtype in NUMPY.items()},
    "float": "FP32", "half": "FP16", "double": "FP64", "long": "INT64", "int": "INT32", "short": "INT16",
    "str": "BYTES", "string": "BYTES", "text": "BYTES", "object": "BYTES", "bool_": "BOOL", "boolean": "BOOL",
}  # fmt: skip
