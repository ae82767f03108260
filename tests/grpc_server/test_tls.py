"""TLS on the gRPC listener, as grpc's own client speaks it."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from gateway.config import TlsSection
from gateway.process.certificates import Certificates
from tests.certificates import Authority
from tests.grpc_server.serving import CONTROLLED, MODELS, infer_request, on_loop, serving


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def certificates(authority: Authority, *, mutual: bool = False) -> Certificates:
    certificate, key = authority.issue("server")
    client_ca = str(authority.path) if mutual else None
    return Certificates(TlsSection(certificate=str(certificate), key=str(key), client_ca=client_ca))


def credentials(authority: Authority, shown: tuple[Path, Path] | None = None) -> grpc.ChannelCredentials:
    certificate, key = shown or (None, None)
    return grpc.ssl_channel_credentials(
        authority.path.read_bytes(), key and key.read_bytes(), certificate and certificate.read_bytes()
    )


@on_loop
async def test_calls_of_any_size_are_answered_and_streams_flow(authority: Authority) -> None:
    async with serving(CONTROLLED + MODELS, certificates=certificates(authority), credentials=credentials(authority)) as served:
        small = await served.stub.ModelInfer(infer_request(value=3))
        assert len(small.raw_output_contents[0]) == 16
        long = pb.ModelInferRequest(model_name="later", raw_input_contents=[])
        await served.repository.load("later", {})
        text = b"x" * (8 << 20)
        long.inputs.add(name="INPUT0", datatype="BYTES", shape=[1])
        long.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
        channel = grpc.aio.secure_channel(served.url, credentials(authority), options=[("grpc.max_receive_message_length", -1)])
        async with channel:
            infer = channel.unary_unary(
                "/inference.GRPCInferenceService/ModelInfer",
                request_serializer=pb.ModelInferRequest.SerializeToString,
                response_deserializer=pb.ModelInferResponse.FromString,
            )
            assert (await infer(long)).raw_output_contents[0][4:] == text

        async def requests() -> AsyncIterator[pb.ModelInferRequest]:
            for number in range(300):
                yield infer_request(value=number, request_id=str(number))

        ids = [reply.infer_response.id async for reply in served.stub.ModelStreamInfer(requests())]
        assert ids == [str(number) for number in range(300)]


@on_loop
async def test_clients_without_tls_or_with_another_authority_are_refused(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path)
    async with serving(certificates=certificates(authority), credentials=credentials(other)) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.ServerLive(pb.ServerLiveRequest(), timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.insecure_channel(served.url) as plain:
            live = plain.unary_unary("/inference.GRPCInferenceService/ServerLive")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await live(b"", timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@on_loop
async def test_mutual_tls_serves_those_of_the_authority_only(authority: Authority, tmp_path: Path) -> None:
    shown = authority.issue("client", client=True)
    asked = certificates(authority, mutual=True)
    async with serving(certificates=asked, credentials=credentials(authority, shown)) as served:
        assert (await served.stub.ServerLive(pb.ServerLiveRequest())).live
        for stranger in (None, Authority(tmp_path).issue("stranger", client=True)):
            async with grpc.aio.secure_channel(served.url, credentials(authority, stranger)) as channel:
                live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await live(b"", timeout=5)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
