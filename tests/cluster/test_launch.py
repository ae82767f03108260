"""How `gateway serve` on Ray deploys, and what it says of a deployment that did not start."""

from typing import Any

import pytest

from gateway.cluster import launch, leaving
from gateway.cluster.deployments import INGRESS
from gateway.cluster.head import Head
from gateway.cluster.launch import _failure  # of Serve's status message
from gateway.cluster.stopping import StopAsked
from gateway.process.supervisor import ENDING
from tests.cluster.conftest import config

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


def deployed(by: str, status: str) -> dict[str, Any]:
    """An application, as Serve's controller tells of it."""
    return {"status": status, "deployments": {INGRESS: {"deployment_config": {"user_config": {"deployed_by": by}}}}}


def test_what_is_deployed_is_told_as_ours_before_anybody_asks_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve's controller goes on to tell of what was there, or of nothing, until its next turn."""
    watch = launch._ApplicationWatch("gateway", pytest.fail)
    listed = deployed(watch.token, "DEPLOYING")
    turns = iter([listed | {"deployments": {}}] * 4 + [listed] * 3)
    monkeypatch.setattr(launch.serve, "run_many", lambda *_, **__: ["handle"])
    monkeypatch.setattr(watch, "details", lambda: next(turns))
    assert watch._deploy(None) == "handle"  # type: ignore[arg-type]  # an application
    assert watch.ours()


@pytest.mark.parametrize("status", ["RUNNING", "DEPLOY_FAILED"])
def test_who_is_replaced_while_it_loads_ends_and_is_not_ready_as_the_other_is(
    status: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    watch = launch._ApplicationWatch("gateway", told.append)
    turns = iter([deployed(watch.token, "DEPLOYING"), deployed("another", "DEPLOYING"), deployed("another", status)])
    monkeypatch.setattr(launch, "_WATCH_S", 0.0)
    monkeypatch.setattr(watch, "_deploy", lambda _: "handle")
    monkeypatch.setattr(watch, "details", lambda: next(turns))
    with pytest.raises(StopAsked):
        watch.run(None)  # type: ignore[arg-type]  # an application
    assert (watch.lost, told) == (True, [ENDING])
    assert caplog.messages == [
        "the application gateway was replaced by another that somebody has deployed under its name: ending"
    ]


def test_what_somebody_deletes_as_it_loads_over_what_no_gateway_deployed_leaves_no_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch = launch._ApplicationWatch("gateway", pytest.fail)
    watch.deployed = True
    cleared: list[str] = []
    monkeypatch.setattr(watch, "details", lambda: None)
    monkeypatch.setattr(launch, "replicas_of", lambda _: set())
    monkeypatch.setattr(launch, "end_control", lambda _: None)
    monkeypatch.setattr(launch, "clear_run_dirs", lambda name, *_, **__: cleared.append(name))
    launch._delete(config(), Head(pytest.fail), watch, "of the application", "")
    assert (cleared, caplog.messages) == (["of the application"], [])


def test_what_waits_for_a_node_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    watch = launch._ApplicationWatch("gateway", pytest.fail)
    looks = iter([False, False, True])
    for name, value in (("_WAITS_S", -1.0), ("_WATCH_S", 0.0), ("waiting", lambda _: ["ingress: 1 of 2 replicas wait"])):
        monkeypatch.setattr(launch, name, value)
    for name, value in (("_deploy", lambda _: None), ("_runs", lambda: next(looks)), ("details", lambda: None)):
        monkeypatch.setattr(watch, name, value)
    watch.run(Any)  # type: ignore[arg-type]  # nothing is deployed
    assert caplog.messages == ["ingress: 1 of 2 replicas wait"]


def test_models_that_close_for_longer_than_the_drain_are_left_once_no_ingress_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = launch._ApplicationWatch("gateway", pytest.fail)
    watch.deployed = True
    there = {f"SERVE_REPLICA::gateway#{name}#x" for name in (INGRESS, "m-1-python")}
    looks = iter([there, there, there - {f"SERVE_REPLICA::gateway#{INGRESS}#x"}, set(), set()])
    killed: list[str] = []
    monkeypatch.setattr(launch, "_TOLD_S", -1000.0)  # the drain is over
    monkeypatch.setattr(launch, "_DELETED_S", 2000.0)
    monkeypatch.setattr(watch, "details", lambda: None if killed else deployed(watch.token, "DELETING"))
    monkeypatch.setattr(watch, "ours", lambda: True)
    monkeypatch.setattr(launch.serve, "delete", lambda *_, **__: None)
    monkeypatch.setattr(launch, "replicas_of", lambda _: next(looks))
    monkeypatch.setattr(launch, "end_silent", lambda replicas, _: replicas)
    monkeypatch.setattr(launch, "end_control", lambda _: None)
    monkeypatch.setattr(leaving, "_kill", killed.append)
    launch._delete(config(), Head(pytest.fail), watch, None, None)
    assert killed == ["SERVE_REPLICA::gateway#m-1-python#x"]
