"""Who watches the processes of Ray: what is told when they go, and when another comes in their place."""

import logging
import socket
import threading
import time

import pytest

from gateway.cluster.head import Head
from gateway.cluster.launch import _deleted
from gateway.config import ServerSection
from tests.waiting import until


def listening(port: int = 0) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def gone(process: socket.socket) -> None:
    """End it, with the connection that watches it."""
    connection, _ = process.accept()
    process.close()
    connection.close()


def test_a_head_that_comes_back_is_lost_no_longer(caplog: pytest.LogCaptureFixture) -> None:
    head = Head(pytest.fail)
    process = listening()
    port = process.getsockname()[1]
    head.watch("head", f"127.0.0.1:{port}")
    gone(process)
    until(lambda: head.lost)
    assert head.may_return
    assert head.fault == f"Ray's head at 127.0.0.1:{port} is gone"
    with listening(port):
        until(lambda: not head.lost)
        head.forget()
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]
    assert "is gone: still serving" in caplog.records[0].message


@pytest.mark.slow
def test_a_deletion_has_the_time_of_a_drain_for_a_head_that_is_away() -> None:
    server = ServerSection(drain_timeout_s=0.1)
    head = Head(pytest.fail)
    stays = threading.Event()
    deleting = threading.Thread(target=stays.wait, daemon=True)
    deleting.start()
    head.left = True
    began_s = time.monotonic()
    assert not _deleted(deleting, head, server)
    assert 1.0 < time.monotonic() - began_s < 3.0
    stays.set()
    deleting.join()
    assert not _deleted(deleting, head, server)  # it has ended as Ray did not answer
    assert _deleted(deleting, Head(pytest.fail), server)
