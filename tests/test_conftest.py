"""What conftest.py does for all tests."""

import asyncio

import pytest
import uvloop


def test_a_loop_on_which_a_listener_was_left_open_is_closed_and_says_so() -> None:
    loop = uvloop.new_event_loop()
    loop.run_until_complete(loop.create_server(asyncio.Protocol, "127.0.0.1", 0))
    with pytest.raises(ResourceWarning, match="unclosed resource <TCPServer"):
        loop.close()
    assert loop.is_closed()
