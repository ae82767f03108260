"""What server reflection tells: the services, and the files of messages that they are made of, with all that those import.

Source: grpc/reflection/v1alpha/reflection.proto; v1 has the same messages, field by field.
"""

from collections.abc import Iterable
from typing import Any, Final

from google.protobuf.descriptor_pool import Default
from grpc_reflection.v1alpha import reflection_pb2 as pb

from gateway.wire.grpc_headers import CallStatus

SERVICES: Final = ("grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection")


class Reflection:
    """Answers of a server that has these services."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = sorted(services)
        self._pool = Default()

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
        pool, asked = self._pool, request.WhichOneof("message_request")
        if asked == "list_services":
            reply.list_services_response.service.extend(pb.ServiceResponse(name=name) for name in self._services)
        elif asked == "file_by_filename":
            _tell_files(reply, pool.FindFileByName(request.file_by_filename))
        elif asked == "file_containing_symbol":
            _tell_files(reply, pool.FindFileContainingSymbol(request.file_containing_symbol))
        elif asked == "file_containing_extension":
            extension = request.file_containing_extension
            extended = pool.FindMessageTypeByName(extension.containing_type)
            found = pool.FindExtensionByNumber(extended, extension.extension_number)
            _tell_files(reply, pool.FindFileContainingSymbol(found.full_name))
        elif asked == "all_extension_numbers_of_type":
            extended = pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
            reply.all_extension_numbers_response.base_type_name = extended.full_name
            numbers = sorted(each.number for each in pool.FindAllExtensions(extended))
            reply.all_extension_numbers_response.extension_number.extend(numbers)
        else:
            self._refuse(reply, CallStatus.INVALID_ARGUMENT, "invalid argument")

    def _refuse(self, reply: Any, status: CallStatus, text: str) -> None:
        reply.error_response.error_code = status
        reply.error_response.error_message = text


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
