"""Reflection tells what grpcio's own servicer tells of the same services, and of methods and v1, which that does not know."""

from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha import reflection_pb2 as pb

from gateway.edges.reflection import SERVICES as REFLECTED
from gateway.edges.reflection import Reflection
from gateway.protocols.messages import pb as inference

SERVICES = [each.full_name for file in (inference, health_pb2) for each in file.DESCRIPTOR.services_by_name.values()]
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


def files(**asked: str) -> list[FileDescriptorProto]:
    reply = Reflection(SERVICES).reply(pb.ServerReflectionRequest(**asked))
    return [FileDescriptorProto.FromString(each) for each in reply.file_descriptor_response.file_descriptor_proto]


def test_a_method_is_in_the_file_of_its_service() -> None:
    found = files(file_containing_symbol="inference.GRPCInferenceService.ModelInfer")
    assert found == files(file_containing_symbol="inference.GRPCInferenceService") != []
    assert not files(file_containing_symbol="inference.GRPCInferenceService.Nothing")
    assert not files(file_containing_symbol="inference.ModelInferRequest.Nothing")


@pytest.mark.parametrize("service", REFLECTED)
def test_each_service_of_reflection_is_described(service: str) -> None:
    package = service.rpartition(".")[0]
    for symbol in (service, f"{service}.ServerReflectionInfo", f"{package}.ServerReflectionRequest"):
        (file,) = files(file_containing_symbol=symbol)
        assert files(file_by_filename=file.name) == [file]
        assert file.package == package
    pool = DescriptorPool()
    pool.Add(file)  # type: ignore[no-untyped-call]
    method = pool.FindServiceByName(service).methods_by_name["ServerReflectionInfo"]  # type: ignore[no-untyped-call]
    assert method.input_type.full_name == f"{package}.ServerReflectionRequest"
    assert method.input_type.fields_by_name.keys() == pb.ServerReflectionRequest.DESCRIPTOR.fields_by_name.keys()
