"""tritonclient's protobuf messages of the inference service, without its client.

`tritonclient.grpc` imports grpcio, which takes memory and time that a gateway without a Triton needs for nothing: the listener
is our own. So where nobody has imported that package yet, another of its name stands in its place while the two modules of
messages are imported, as they are, from its folder. Whoever imports the package afterwards gets all of it, with these modules:
no second copy of the `inference` protobuf package comes to be, which could not be registered beside the first.
"""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any, Final

_PACKAGE: Final = "tritonclient.grpc"
_MESSAGES: Final = f"{_PACKAGE}.service_pb2"


def _imported() -> Any:
    if _MESSAGES in sys.modules or _PACKAGE in sys.modules:
        return importlib.import_module(_MESSAGES)
    found = importlib.util.find_spec(_PACKAGE)  # which imports tritonclient, and not this
    assert found is not None
    assert found.submodule_search_locations is not None
    place = ModuleType(_PACKAGE)
    place.__path__ = list(found.submodule_search_locations)
    sys.modules[_PACKAGE] = place
    try:
        return importlib.import_module(_MESSAGES)
    finally:
        del sys.modules[_PACKAGE]
        parent = sys.modules[_PACKAGE.partition(".")[0]]
        if getattr(parent, "grpc", None) is place:
            del parent.grpc


pb: Final = _imported()
"""The module `tritonclient.grpc.service_pb2`."""
