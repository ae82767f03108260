"""How many connections a run may open, and whose fault it is if they are too few."""

import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.errors import UsageError
from loadtest.measuring import connections
from loadtest.measuring.connections import settled, waited
from loadtest.results import GeneratorReport, LoadSpec

REST, GRPC = LoadSpec("http://x", pattern="users:count=600"), LoadSpec("grpc://x", protocol="grpc")
REPORT = GeneratorReport(0.01, 0.02, 0.5, 0.1, 200.0, 256, 0.1, 1)


def allow(monkeypatch: pytest.MonkeyPatch, more: int, hard: int) -> list[tuple[int, int]]:
    """Let this process open so many more files; gives what was set."""
    held = [(len(os.listdir("/dev/fd")) + more, len(os.listdir("/dev/fd")) + hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: held[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, limit: held.append(limit))
    return held


@pytest.mark.parametrize(
    ("spec", "users", "processes", "most"),
    [
        (REST, 0, 1, 256), (REST, 10, 1, 256), (REST, 600, 1, 600), (REST, 601, 2, 301), (GRPC, 0, 1, 4), (GRPC, 600, 1, 4),
        (replace(REST, connections=700), 600, 1, 700), (replace(GRPC, connections=64), 0, 1, 64),
    ],
)  # fmt: skip
def test_every_user_has_a_connection_unless_one_carries_many(spec: LoadSpec, users: int, processes: int, most: int) -> None:
    assert settled(replace(spec, processes=processes), users).connections == most


def test_fewer_connections_than_users_are_refused_over_rest() -> None:
    with pytest.raises(UsageError, match=r"--connections 64: 600 users .* ask for 600"):
        settled(replace(REST, connections=64), 600)


def test_the_soft_limit_of_open_files_is_raised_as_far_as_the_connections_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    held = allow(monkeypatch, 100, 10_000)
    settled(REST, 600)
    assert 600 < held[-1][0] - len(os.listdir("/dev/fd")) < 800
    settled(REST, 0)
    assert len(held) == 2  # enough


@pytest.mark.parametrize(
    ("spec", "users", "words"),
    [
        (REST, 600, r"--pattern users:count=600: this process may open \d+ connections, 600 are needed: .*ulimit -Hn"),
        (replace(REST, connections=256), 0, "--connections 256: this process may open"),
        (replace(GRPC, connections=256), 0, "--connections 256: this process may open"),
    ],
)
def test_what_the_hard_limit_does_not_allow_is_refused(
    spec: LoadSpec, users: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow(monkeypatch, 100, 100)
    with pytest.raises(UsageError, match=words):
        settled(spec, users)


def test_an_open_loop_that_asks_for_no_number_takes_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, 100, 100)
    assert 20 < (settled(REST, 0).connections or 0) < 100


def test_more_connections_than_this_machine_has_ports_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = tmp_path / "ports"
    ports.write_text("32768\t32867\n")
    monkeypatch.setattr(connections, "_PORTS", ports)
    with pytest.raises(UsageError, match="users:count=600: this machine has ports for 100 connections"):
        settled(REST, 600)


def test_a_wait_for_a_connection_is_told_where_all_were_in_use() -> None:
    spec = replace(REST, connections=256)
    (words,) = waited(spec, REPORT)
    assert words.startswith("requests waited for a connection of the generator (p99 200 ms), all 256 were in use")
    assert waited(spec, replace(REPORT, connections=200)) == ()  # they were being opened
    assert waited(spec, replace(REPORT, connection_wait_p99_ms=0.1)) == ()
