"""What tests take for sockets is what they say."""

import socket

import pytest

from benchmarks.ports import free_port


def test_a_free_port_is_given_to_nobody_else_and_servers_that_share_it_may_listen_there() -> None:
    port = free_port()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port))
    with (
        socket.create_server(("127.0.0.1", port), reuse_port=True) as first,
        socket.create_server(("127.0.0.1", port), reuse_port=True) as second,
    ):
        for each in (first, second):
            each.setblocking(False)
        for _ in range(20):  # none comes to the socket that keeps it
            with socket.create_connection(("127.0.0.1", port)):
                pass
        taken = 0
        for each in (first, second):
            while True:
                try:
                    each.accept()[0].close()
                except BlockingIOError:
                    break
                taken += 1
        assert taken == 20
