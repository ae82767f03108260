"""The one configuration object: a YAML file, read and validated once, passed down from there.

Every key with its meaning and default stands in configs/gateway.yaml. How faults are told: `gateway.documents`. What can only
be seen beside the file, such as whether a model's file is there: `gateway.configuring.check`.
"""

from gateway.config.backends import (
    AnyBackend,
    Autoscaling,
    Backend,
    Build,
    Neuron,
    NeuronBuild,
    OnnxRuntime,
    Python,
    Synthetic,
    TensorRt,
    Torch,
    Triton,
)
from gateway.config.file import (
    Config,
    config_as_far_as_valid,
    config_of,
    listening,
    load_config,
    located,
    located_backend,
    parse_config,
)
from gateway.config.model import Batching, DeclaredTensor, Ejection, ModelSection, Ragged, Routing, Slo, tensor_specs
from gateway.config.server import AccessSection, Limits, MetricsSection, Ray, ServerSection, TlsSection
from gateway.config.tracing import Tracing

__all__ = [
    "AccessSection",
    "AnyBackend",
    "Autoscaling",
    "Backend",
    "Batching",
    "Build",
    "Config",
    "DeclaredTensor",
    "Ejection",
    "Limits",
    "MetricsSection",
    "ModelSection",
    "Neuron",
    "NeuronBuild",
    "OnnxRuntime",
    "Python",
    "Ragged",
    "Ray",
    "Routing",
    "ServerSection",
    "Slo",
    "Synthetic",
    "TensorRt",
    "TlsSection",
    "Torch",
    "Tracing",
    "Triton",
    "config_as_far_as_valid",
    "config_of",
    "listening",
    "load_config",
    "located",
    "located_backend",
    "parse_config",
    "tensor_specs",
]
