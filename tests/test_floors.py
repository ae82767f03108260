"""Imports go strictly down, and each third party has one door. Source: docs/architecture.md."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Floor of each module of the gateway; a module may import modules of lower floors, and of its own package.
FLOORS = {
    "__version__": -2, "types": -1, "errors": -1, "clock": -1, "console": -1,
    "documents": 0,
    "config": 1, "run_dir": 1, "interrupts": 1, "garbage": 1,
    "protocols": 2, "batching": 2, "ports": 2, "check": 2, "command_line": 2, "announcement": 3, "supervisor": 2,
    "need_of_ray": 2, "triton_repository": 2, "decoration": 2, "guess": 4, "examples": 3,
    "wire": 3, "frames": 3, "child": 3, "killers": 3, "failure_log": 3, "runner": 3, "shared_memory": 3,
    "prometheus_internals": 3, "model_statistics": 3, "session_process": 4, "long_bodies": 4, "metrics": 4,
    "workers": 5, "lane": 5, "probes": 5,
    "routing": 6,
    "lane_opener": 6, "descriptions": 6, "openapi": 6,
    "repository": 7, "inference": 8,
    "http_server": 8, "http2": 8, "compile": 8, "trial": 8, "rest_routes": 9, "grpc_call": 9,
    "grpc_inference": 10, "grpc_services": 10,
    "grpc_server": 11, "ingress": 12, "cluster": 13, "app": 14, "on_ray": 14, "serving": 15, "check_command": 14,
    "rest_in_memory": 9, "grpc_in_memory": 12, "hosted": 13, "loaded": 14, "testing": 14, "running": 16, "predict": 16,
    "cli": 17, "__main__": 18,
}  # fmt: skip

# What loadtest may use of the gateway: the pure floors, the simulator's real batcher, and how a command line looks and speaks.
LOADTEST_MAY_IMPORT = {
    "types", "errors", "documents", "config", "clock", "batching", "protocols", "console", "command_line", "wire",
}  # fmt: skip

# third party -> the modules that may import it
DOORS = {
    "ray": {"gateway.cluster", "gateway.app"},
    "pydantic": {
        "gateway.config",
        "gateway.documents.lenient",
        "gateway.documents.validation",
        "loadtest.catalogue",
        "loadtest.spec_file",
        "loadtest.live_prices",
    },
    "httptools": {"gateway.wire.requests", "loadtest.http_client", "loadtest.nullserver"},
    "torch": {"backends"},
    "onnxruntime": {"backends.onnxruntime", "backends.onnxruntime_cuda", "backends.onnx_export"},
    "prometheus_client": {"gateway.metrics", "gateway.prometheus_internals"},
    "jinja2": {"loadtest.pages"},
}


@functools.cache
def modules(package: str) -> list[tuple[str, ast.Module]]:
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found.append((name, ast.parse(path.read_text())))
    return found


@functools.cache
def imports(tree: ast.Module) -> set[str]:
    """Dotted names imported anywhere in a module, also within functions and under TYPE_CHECKING."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def floor(module: str) -> int:
    part = module.split(".")[1]
    assert part in FLOORS, f"{module} stands on no floor: place it in docs/architecture.md and here"
    return FLOORS[part]


def gateway_imports(tree: ast.Module) -> set[str]:
    return {name for name in imports(tree) if name.startswith("gateway.")}


def test_backends_import_nobody_of_ours() -> None:
    for module, tree in modules("backends"):
        assert not {name for name in imports(tree) if name.split(".")[0] in ("gateway", "loadtest")}, module


def test_gateway_imports_go_strictly_down() -> None:
    for module, tree in modules("gateway"):
        if module == "gateway":
            continue
        assert not {name for name in imports(tree) if name.startswith("loadtest")}, module
        own = module.split(".")[1]
        for name in gateway_imports(tree):
            if name.split(".")[1] != own:
                assert floor(name) < floor(module), f"{module} imports {name}"


def test_batching_and_protocols_do_not_know_each_other() -> None:
    for package, other in (("batching", "protocols"), ("protocols", "batching")):
        for module, tree in modules(f"gateway/{package}"):
            assert not {name for name in gateway_imports(tree) if name.split(".")[1] == other}, module


def test_loadtest_uses_only_the_pure_floors() -> None:
    for module, tree in modules("loadtest"):
        for name in gateway_imports(tree):
            assert name.split(".")[1] in LOADTEST_MAY_IMPORT, f"{module} imports {name}"


@pytest.mark.parametrize("library", DOORS)
def test_each_third_party_has_its_doors(library: str) -> None:
    for package in ("backends", "gateway", "loadtest"):
        for module, tree in modules(package):
            used = {name for name in imports(tree) if name.split(".")[0] == library}
            allowed = any(module == door or module.startswith(f"{door}.") for door in DOORS[library])
            assert not used or allowed, f"{module} imports {library}"
