"""How `gateway serve` on Ray deploys, and what it says of a deployment that did not start."""

import pytest

from gateway.cluster import launch
from gateway.cluster.deployments import INGRESS
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


def test_what_is_deployed_is_told_as_ours_before_anybody_asks_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's controller goes on to tell of what was there, or of nothing, until its next turn."""
    watch = launch._ApplicationWatch("gateway", pytest.fail)
    listed = {INGRESS: {"deployment_config": {"user_config": {"deployed_by": watch.token}}}}
    turns = iter([{}, {}, {}, {}, listed, listed, listed])
    monkeypatch.setattr(launch.serve, "run_many", lambda *_, **__: ["handle"])
    monkeypatch.setattr(watch, "details", lambda: {"status": "DEPLOYING", "deployments": next(turns)})
    assert watch._deploy(None) == "handle"  # type: ignore[arg-type]  # an application
    assert watch.ours()
