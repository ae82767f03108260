"""What `gateway serve` on Ray says of a deployment that did not start."""

import pytest

from gateway.cluster.launch import _failure  # of Serve's status message

TRACE = "The deployment failed to start 3 times in a row. Error:\nray::Replica.initialize()\n  File 'x.py', line 1, in start\n"


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (
            f"{TRACE}gateway.errors.BackendFailed: failed to load 'a'\nfailed to load 'b'\n",
            "failed to load 'a'\nfailed to load 'b'",
        ),
        (f"{TRACE}gateway.errors.NotReady: first\n\nDuring handling:\n{TRACE}gateway.errors.BackendFailed: second", "second"),
        (f"{TRACE}ValueError: not ours", "ValueError: not ours"),
        ("no trace", "no trace"),
    ],
)
def test_all_lines_of_an_error_of_ours_are_told_else_the_last(message: str, told: str) -> None:
    assert _failure(message) == told
