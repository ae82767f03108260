"""What server reflection tells: the services, and the files of messages that they are made of, with all that those import.

Source: grpc/reflection/v1alpha/reflection.proto; v1 has the same messages, field by field.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any, Final

from google.protobuf.descriptor_pool import Default, DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2 as pb

from gateway.wire.grpc_headers import CallStatus

SERVICES: Final = ("grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection")
_OF_V1: Final = ("grpc.reflection.v1.", "grpc_reflection/v1/")  # symbols and files


class Reflection:
    """Answers of a server that has these services."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = sorted(services)

    def reply(self, request: Any) -> Any:
        """To a ServerReflectionRequest, a ServerReflectionResponse."""
        reply = pb.ServerReflectionResponse(original_request=request)
        try:
            self._fill(reply, request)
        except KeyError:
            self._refuse(reply, CallStatus.NOT_FOUND, "not found")
        return reply

    def _fill(self, reply: Any, request: Any) -> None:
        """Raises: KeyError, for what there is not."""
        asked = request.WhichOneof("message_request")
        if asked == "list_services":
            reply.list_services_response.service.extend(pb.ServiceResponse(name=name) for name in self._services)
        elif asked == "file_by_filename":
            _tell_files(reply, _pool_of(request.file_by_filename).FindFileByName(request.file_by_filename))
        elif asked == "file_containing_symbol":
            _tell_files(reply, _file_of(request.file_containing_symbol))
        elif asked == "file_containing_extension":
            extension = request.file_containing_extension
            pool = _pool_of(extension.containing_type)
            extended = pool.FindMessageTypeByName(extension.containing_type)
            found = pool.FindExtensionByNumber(extended, extension.extension_number)
            _tell_files(reply, pool.FindFileContainingSymbol(found.full_name))
        elif asked == "all_extension_numbers_of_type":
            pool = _pool_of(request.all_extension_numbers_of_type)
            extended = pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
            reply.all_extension_numbers_response.base_type_name = extended.full_name
            numbers = sorted(each.number for each in pool.FindAllExtensions(extended))
            reply.all_extension_numbers_response.extension_number.extend(numbers)
        else:
            self._refuse(reply, CallStatus.INVALID_ARGUMENT, "invalid argument")

    def _refuse(self, reply: Any, status: CallStatus, text: str) -> None:
        reply.error_response.error_code = status
        reply.error_response.error_message = text


def _pool_of(name: str) -> Any:
    """Which knows the file, or symbol, if any does."""
    return _pool_of_v1() if name.startswith(_OF_V1) else Default()


@cache
def _pool_of_v1() -> DescriptorPool:
    """Of its own: what else is in this process may have v1 from elsewhere, and two that register it clash."""
    from google.protobuf import text_format
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    file = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    text = text_format.MessageToString(file).replace("v1alpha", "v1")
    pool = DescriptorPool()
    pool.Add(text_format.Parse(text, FileDescriptorProto()))
    return pool


def _file_of(symbol: str) -> Any:
    """Raises: KeyError."""
    pool = _pool_of(symbol)
    try:
        return pool.FindFileContainingSymbol(symbol)
    except KeyError:  # so it is of methods
        return pool.FindMethodByName(symbol).containing_service.file


def _tell_files(reply: Any, file: Any) -> None:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto  # a megabyte, which few ask for

    seen = {file.name: file}
    waiting = [file]
    while waiting:
        for each in waiting.pop().dependencies:
            if each.name not in seen:
                seen[each.name] = each
                waiting.append(each)
    for each in seen.values():
        proto = FileDescriptorProto()
        each.CopyToProto(proto)
        reply.file_descriptor_response.file_descriptor_proto.append(proto.SerializeToString())
