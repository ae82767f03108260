"""Reflection tells what grpcio's own servicer tells of the same services."""

from typing import Any

import pytest
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha import reflection_pb2 as pb

from gateway.edges.reflection import Reflection

SERVICES = ("inference.GRPCInferenceService", "grpc.health.v1.Health")
ASKED: dict[str, dict[str, Any]] = {
    "services": {"list_services": ""},
    "a file": {"file_by_filename": "grpc_service.proto"},
    "no file": {"file_by_filename": "no.proto"},
    "a service": {"file_containing_symbol": "inference.GRPCInferenceService"},
    "a message": {"file_containing_symbol": "inference.ModelConfig"},
    "no symbol": {"file_containing_symbol": "inference.Nothing"},
    "an extension": {"file_containing_extension": {"containing_type": "google.protobuf.MessageOptions", "extension_number": 1}},
    "an extension of nothing": {"file_containing_extension": {"containing_type": "no.Message", "extension_number": 1}},
    "extensions": {"all_extension_numbers_of_type": "google.protobuf.FieldOptions"},
    "extensions of nothing": {"all_extension_numbers_of_type": "no.Message"},
    "nothing": {},
}


def theirs(request: Any) -> Any:
    servicer: Any = reflection.ReflectionServicer(SERVICES)
    (reply,) = servicer.ServerReflectionInfo(iter([request]), None)
    return reply


def told(reply: Any) -> Any:
    """The files in the order of their bytes: all are told, whichever came first."""
    files = sorted(reply.file_descriptor_response.file_descriptor_proto)
    reply.file_descriptor_response.ClearField("file_descriptor_proto")
    return reply, files


@pytest.mark.parametrize("asked", ASKED)
def test_it_tells_what_the_library_of_grpc_tells(asked: str) -> None:
    request = pb.ServerReflectionRequest(host="h", **ASKED[asked])
    assert told(Reflection(SERVICES).reply(request)) == told(theirs(request))
