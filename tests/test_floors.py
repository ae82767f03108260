"""Imports go strictly down, nowhere in a circle, and each third party has one door. Source: docs/architecture.md."""

import ast
import functools
import gc
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the ground up, a line per floor: a room may import those of the lines before its own, and itself.
GATEWAY = (
    ("__version__", "types", "errors", "clock", "garbage", "turns"),
    ("documents",),
    ("config", "instances"),
    ("wire",),
    ("batching", "protocols"),
    ("process", "routing", "tracing"),
    ("access",),
    ("configuring", "deploying", "engine", "why"),
    ("aws", "edges"),
    ("ingress",),
    ("cluster", "from_python"),
    ("app", "testing", "transform"),
    ("commands",),
    ("cli",),
    ("__main__",),
)
LOADTEST = (
    ("errors", "wording"),
    ("results",),
    ("load", "prices"),
    ("verdict",),
    ("measuring", "search"),
    ("question",),
    ("lab",),
    ("reports",),
    ("commands",),
    ("cli",),
)
FLOORS = {
    f"{package}.{room}": floor
    for package, floors in (("gateway", GATEWAY), ("loadtest", LOADTEST))
    for floor, rooms in enumerate(floors)
    for room in rooms
}

# The bytes of tensors, and what is wrong with them: they stand on `backends.datatypes` alone.
BACKENDS_MAY_IMPORT = {"gateway.wire.tensors", "gateway.errors"}
# The pure floors, the simulator's real batcher, and how a command line looks and speaks.
LOADTEST_MAY_IMPORT = (
    "gateway.types", "gateway.errors", "gateway.clock", "gateway.documents", "gateway.config", "gateway.wire",
    "gateway.instances", "gateway.deploying", "gateway.aws", "gateway.batching", "gateway.process.console",
    "gateway.process.command_line", "gateway.process.credentials", "gateway.process.interrupts", "gateway.process.machine",
)  # fmt: skip

# third party -> the modules that may import it
DOORS = {
    "ray": {"gateway.cluster", "gateway.app"},
    "pydantic": {
        "gateway.config",
        "gateway.documents.lenient",
        "gateway.documents.validation",
        "gateway.instances.facts",
        "loadtest.question.spec_file",
        "loadtest.prices.live_prices",
    },
    "httptools": {"gateway.wire.requests", "loadtest.load.http_client", "loadtest.load.nullserver"},
    "torch": {"backends"},
    "onnxruntime": {"backends.onnxruntime", "backends.onnxruntime_cuda", "backends.onnx_export"},
    "prometheus_client": {"loadtest.reports.openmetrics"},  # and the tests, which read with its parser
    "jinja2": {"loadtest.reports.pages"},
    "opentelemetry": {"gateway.tracing.opentelemetry"},
    "boto3": {"gateway.aws.client", "loadtest.prices.live_prices"},
    "botocore": {"gateway.aws.client", "loadtest.load.aws_keys", "loadtest.prices.live_prices"},
    "pyarrow": {"gateway.transform"},
    "fsspec": {"gateway.transform.storage"},
}


@functools.cache
def modules() -> dict[str, ast.Module]:
    # Garbage found while a tree is made may run code that makes one as well: the traceback of a finaliser does. CPython before
    # 3.11.8 counts the depth of both in one place, and ends the first with a SystemError (gh-106905).
    found = {}
    gc.disable()
    try:
        for package in ("backends", "gateway", "loadtest"):
            for path in sorted((ROOT / package).rglob("*.py")):
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
                found[name] = ast.parse(path.read_text())
    finally:
        gc.enable()
    return found


@functools.cache
def imports(module: str) -> frozenset[str]:
    """Dotted names imported anywhere in it, also within functions and under TYPE_CHECKING: modules, and names of packages."""
    names: set[str] = set()
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = (f"{node.module}.{alias.name}" for alias in node.names)
            names |= {name if name in modules() or node.module == "gateway" else node.module for name in whole}
    return frozenset(names)


def room(name: str) -> str:
    return ".".join(name.split(".")[:2])


def crossings(package: str) -> Iterator[tuple[str, str]]:
    """Each module with what it imports from other rooms of its package. The package itself looks its names up when asked."""
    for module in modules():
        if module.startswith(f"{package}."):
            assert room(module) in FLOORS, f"{module} stands on no floor: place {room(module)} in docs/architecture.md and here"
            yield from (
                (module, name) for name in imports(module) if name.startswith(f"{package}.") and room(name) != room(module)
            )


@pytest.mark.parametrize("package", ["gateway", "loadtest"])
def test_imports_go_strictly_down(package: str) -> None:
    for module, name in crossings(package):
        assert FLOORS[room(name)] < FLOORS[room(module)], f"{module} imports {name}"


def test_no_module_imports_itself_by_way_of_others() -> None:
    below = {module: imports(module) & modules().keys() for module in modules() if module != "gateway"}
    assert list(TopologicalSorter(below).static_order())


def test_backends_import_nobody_of_ours_but_the_ground() -> None:
    for module in modules():
        if module.split(".")[0] == "backends":
            used = {name for name in imports(module) if name.split(".")[0] in ("gateway", "loadtest")}
            assert used <= BACKENDS_MAY_IMPORT, module


def test_the_gateway_does_not_know_loadtest_which_uses_its_pure_floors_only() -> None:
    for module in modules():
        package = module.split(".")[0]
        if package == "gateway":
            assert not {name for name in imports(module) if name.split(".")[0] == "loadtest"}, module
        if package == "loadtest":
            for name in imports(module):
                allowed = any(name == ours or name.startswith(f"{ours}.") for ours in LOADTEST_MAY_IMPORT)
                assert allowed or name.split(".")[0] != "gateway", f"{module} imports {name}"


@pytest.mark.parametrize("library", DOORS)
def test_each_third_party_has_its_doors(library: str) -> None:
    for module in modules():
        used = {name for name in imports(module) if name.split(".")[0] == library}
        allowed = any(module == door or module.startswith(f"{door}.") for door in DOORS[library])
        assert not used or allowed, f"{module} imports {library}"
