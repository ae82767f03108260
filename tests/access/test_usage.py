"""What keys have asked, of several processes together."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.access.limits import FULL, Limit
from gateway.access.rules import digest_of
from gateway.access.usage import OwnUsage, SharedUsage, Usage
from tests.served.gateway_process import ROOT
from tests.served.small_disk import fill, small_disk

S = 1_000_000_000
A, B = digest_of(b"a"), digest_of(b"b")
USAGES: dict[str, Callable[[Path], Usage]] = {"own": lambda folder: OwnUsage(), "shared": lambda folder: SharedUsage(folder, 1)}


@pytest.mark.parametrize("kind", USAGES)
def test_each_key_has_its_own_standing(kind: str, tmp_path: Path) -> None:
    usage, limit = USAGES[kind](tmp_path), Limit(S, 2, 2)
    assert [usage.enter(A, limit, S) for _ in range(3)] == [0, 0, FULL]
    assert usage.enter(B, limit, S) == 0
    usage.leave(A)
    assert usage.enter(A, limit, S) == S
    assert usage.enter(A, limit, 2 * S) == 0


def test_processes_of_a_node_grant_together_what_one_would(tmp_path: Path) -> None:
    one, two = SharedUsage(tmp_path, 2), SharedUsage(tmp_path, 2)
    rate = Limit(S // 10, 10)
    granted = [usage.enter(A, rate, S) for _ in range(10) for usage in (one, two)]
    assert granted.count(0) == 10
    most = Limit(0, 1, 3)
    assert [one.enter(B, most, S), two.enter(B, most, S), one.enter(B, most, S), two.enter(B, most, S)] == [0, 0, 0, FULL]
    one.leave(B)
    assert two.enter(B, most, S) == 0


def test_a_process_that_has_just_come_counts_at_once(tmp_path: Path) -> None:
    first = SharedUsage(tmp_path, 2)
    assert first.enter(A, Limit(0, 1, 8), S) == 0
    second = SharedUsage(tmp_path, 2)
    limit = Limit(0, 1, 4)
    assert [second.enter(A, limit, S) for _ in range(4)] == [0, 0, 0, FULL]
    assert first.enter(A, limit, S) == FULL


def test_a_node_grants_its_part_of_what_all_nodes_do(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    one, two, other = SharedUsage(here, 4), SharedUsage(here, 4), SharedUsage(there, 4)
    limit = Limit(0, 1, 8)
    two.enter(A, limit, 0)
    two.leave(A)
    granted = [usage.enter(A, limit, 2 * S) for usage in (one, two, other) for _ in range(8)]
    assert [granted[:16].count(0), granted[16:].count(0)] == [4, 2]  # two of four processes are here, one is there


def test_what_a_process_had_in_flight_is_over_when_it_ends(tmp_path: Path) -> None:
    limit = Limit(0, 1, 4)
    one, two = SharedUsage(tmp_path, 2), SharedUsage(tmp_path, 2)
    assert [two.enter(A, limit, 0) for _ in range(4)] == [0] * 4
    assert one.enter(A, limit, 0) == FULL
    two.close()
    assert one.enter(A, limit, 2 * S) == 0  # looked at anew, a second later
    assert one.enter(A, limit, 2 * S) == 0
    assert one.enter(A, limit, 2 * S) == FULL  # one of two processes lives: half
    three = SharedUsage(tmp_path, 2)
    assert three.enter(A, limit, 4 * S) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["limits", "process-0", "process-1"]


def _hold(folder: Path, ready: Any) -> None:
    usage = SharedUsage(folder, 1)
    ready.send([usage.enter(A, Limit(0, 1, 2), 0) for _ in range(2)])
    signal.pause()


@pytest.mark.slow
def test_a_process_that_is_killed_holds_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(tmp_path, theirs), daemon=True)
    process.start()
    assert ours.recv() == [0, 0]
    usage = SharedUsage(tmp_path, 1)
    assert usage.enter(A, Limit(0, 1, 2), 0) == FULL
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(10)
    assert usage.enter(A, Limit(0, 1, 2), 2 * S) == 0
    ours.close()
    theirs.close()


def _ask(folder: Path, count: int, results: Any) -> None:
    usage = SharedUsage(folder, 2)
    results.put(sum(usage.enter(A, Limit(S, 1000), S) == 0 for _ in range(count)))


@pytest.mark.slow
def test_no_request_is_granted_twice_where_two_processes_ask_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    asking = [context.Process(target=_ask, args=(tmp_path, 3000, results)) for _ in range(2)]
    for process in asking:
        process.start()
    granted = [results.get(timeout=60) for _ in asking]
    for process in asking:
        process.join(10)
    assert 500 <= sum(granted) <= 1000
    results.close()


@pytest.mark.slow
def test_a_disk_without_room_is_told_at_start_and_ends_no_process_later(tmp_path: Path) -> None:
    """A page that a file has no room for would end the process that writes to it by SIGBUS."""
    told = subprocess.run(
        [*small_disk(tmp_path), sys.executable, "-m", "tests.access.test_usage", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (told.returncode, told.stdout.split()) == (0, ["ENOSPC"]), told.stderr


def test_files_in_use_are_kept_young_for_those_who_clear_tmp(tmp_path: Path) -> None:
    one, two = SharedUsage(tmp_path, 2), SharedUsage(tmp_path, 2)
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    one.enter(A, Limit(S, 1, 1), 7200 * S)
    assert two.enter(A, Limit(S, 1, 1), 7200 * S) == FULL
    assert all(path.stat().st_atime for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 3


def _come_and_ask(folder: Path) -> str:
    try:
        usage = SharedUsage(folder, 1)
    except OSError as exc:
        return errno.errorcode[exc.errno or 0]
    fill(folder)
    for number in range(100):
        usage.enter(digest_of(b"%d" % number), Limit(S, 1, 1), S)
    return "asked"


def test_rows_of_keys_that_ask_nothing_are_given_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.access.usage._ROWS", 8)
    usage = SharedUsage(tmp_path, 1)
    limit = Limit(S, 1, 1)
    assert usage.enter(A, limit, 0) == 0  # and goes on
    for number in range(50):
        digest = digest_of(b"%d" % number)
        assert usage.enter(digest, limit, 10 * S * (number + 1)) == 0
        assert usage.enter(digest, limit, 10 * S * (number + 1)) == FULL
        usage.leave(digest)
    assert usage.enter(A, limit, 1000 * S) == FULL
    usage.leave(A)
    assert usage.enter(A, limit, 1000 * S) == 0


if __name__ == "__main__":
    print(_come_and_ask(Path(sys.argv[1])))
