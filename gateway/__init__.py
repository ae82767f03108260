"""Models served, or called, from Python: docs/python.md shows how.

    gateway.load("model.onnx").predict({"x": [[1, 2, 3, 4]]})     a model in this process
    with gateway.run("gateway.yaml") as server: ...               a server in this process, on free ports
    with gateway.TestClient("gateway.yaml") as client: ...        the same without ports
    @gateway.model                                                a class or function as a model

Names are looked up when they are first used: `import gateway` alone loads nothing.
"""

TYPE_CHECKING = False  # typing's own would have to be imported
if TYPE_CHECKING:
    from backends.base import TensorSpec
    from backends.parameters import Parameters
    from gateway import errors
    from gateway.config import Config
    from gateway.configuring.decoration import model
    from gateway.errors import ConfigError, GatewayError
    from gateway.from_python.loaded import LoadedModel, load
    from gateway.from_python.running import Server, run
    from gateway.testing import TestClient

__version__ = "0.1.0"

__all__ = (
    "Config",
    "ConfigError",
    "GatewayError",
    "LoadedModel",
    "Parameters",
    "Server",
    "TensorSpec",
    "TestClient",
    "__version__",
    "errors",
    "load",
    "model",
    "run",
)

_HOMES = {
    "Config": "gateway.config",
    "ConfigError": "gateway.errors",
    "GatewayError": "gateway.errors",
    "LoadedModel": "gateway.from_python.loaded",
    "Parameters": "backends.parameters",
    "Server": "gateway.from_python.running",
    "TensorSpec": "backends.base",
    "TestClient": "gateway.testing",
    "load": "gateway.from_python.loaded",
    "model": "gateway.configuring.decoration",
    "run": "gateway.from_python.running",
}

if not TYPE_CHECKING:  # for a type checker every name would exist

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name == "errors":
            return import_module("gateway.errors")
        if name not in _HOMES:
            raise AttributeError(f"module 'gateway' has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
