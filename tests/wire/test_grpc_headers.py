"""What gRPC asks of the headers of a call."""

import hpack
import pytest

from gateway.wire.grpc_headers import fault, refusal


@pytest.mark.parametrize("name", [b"x", b"x.y_z-1", b":path", b":authority", b"grpc-trace-bin"])
def test_names_that_grpc_has(name: bytes) -> None:
    assert fault({name: b""}) == ""


@pytest.mark.parametrize("name", [b"", b"X", b"x y", b"x\n", b"\xe9", b":foo", b"x:y", b"x/y", b"x\0"])
def test_other_names_are_told(name: bytes) -> None:
    assert "illegal header name" in fault({b":method": b"POST", name: b""})


@pytest.mark.parametrize("value", [b"", b"AA", b"AA==", b"AAA", b"AAA=", b"AAAA", b"AAAAAA", b"AAAA,AA==,AAA", b"AA, AA"])
def test_binary_values_are_base64(value: bytes) -> None:
    assert fault({b"x-bin": value}) == ""


@pytest.mark.parametrize("value", [b"A", b"AAAAA", b"AA=", b"AA==AA", b"A-_A", b"AA A", b"====", b"\0", b"AAAA\n"])
def test_other_binary_values_are_told(value: bytes) -> None:
    assert "is not base64" in fault({b"x-bin": value})
    assert fault({b"x": value}) == ""


def test_only_trailers_are_a_te() -> None:
    assert fault({b"te": b"trailers"}) == ""
    assert "expected 'trailers'" in fault({b"te": b"gzip"})


def test_a_refusal_can_be_read_whatever_it_is_about() -> None:
    name = bytes(range(256)) * 9
    fields = dict(hpack.Decoder().decode(refusal(13, fault({name: b"100%"}), b"own")))
    assert fields[":status"] == "200"
    assert fields["content-type"] == "application/grpc"
    assert fields["grpc-status"] == "13"
    assert fields["x-request-id"] == "own"
    assert fields["grpc-message"].isascii()
    assert fields["grpc-message"].isprintable()
    assert len(fields["grpc-message"]) < 600
