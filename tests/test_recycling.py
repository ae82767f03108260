"""Connections end in order so that all processes of a port get their share, and none grows older than it may."""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.edges.recycling import Recycler, surplus
from gateway.engine.metric_files import NodeFiles

EVERY_S = 0.01  # of looks, where files make a test real


class Client:
    """A connection that asks all the time, or never; told to leave, its client opens another."""

    def __init__(self, on_leave: "Callable[[Client], None]", *, busy: bool = True) -> None:
        self.busy = busy
        self._on_leave = on_leave

    def asked(self, since_s: float) -> bool:
        return self.busy

    def leave(self) -> None:
        self._on_leave(self)


class Process:
    """Who listens."""

    def __init__(self) -> None:
        self.open_connections: set[Client] = set()


class Looked:
    """The same, that counts looks at it."""

    def __init__(self, connections: set[Client]) -> None:
        self.looks = 0
        self._connections = connections

    @property
    def open_connections(self) -> set[Client]:
        self.looks += 1
        return self._connections


@pytest.mark.parametrize(
    ("own", "others", "ends"),
    [
        (5, [], 0),
        (2, [0], 1),
        (3, [2], 0),
        (35, [29], 0),  # within a tenth
        (40, [24], 8),
        (64, [0, 0, 0], 48),
        (1, [0, 0, 0], 0),
        (24, [40], 0),
        (0, [0], 0),
    ],
)
def test_a_process_ends_what_is_above_its_share(own: int, others: list[int], ends: int) -> None:
    assert surplus(own, others) == ends


@pytest.mark.parametrize("processes", [2, 4, 16])
@pytest.mark.parametrize("connections", [16, 64, 4096])
def test_chance_evens_out_within_some_looks(processes: int, connections: int) -> None:
    drawn = random.Random(processes * connections)
    counts = [0] * processes
    counts[0] = connections  # the others have just begun
    for _ in range(25):
        seen = list(counts)
        for own in range(processes):
            ends = surplus(counts[own], [*seen[:own], *seen[own + 1 :]])
            counts[own] -= ends
            for _ in range(ends):
                counts[drawn.randrange(processes)] += 1
    share = connections / processes
    assert max(counts) <= share + max(1.0, 0.1 * share)


@contextmanager
def looking(*recyclers: Recycler) -> Iterator[Callable[[Callable[[], bool]], None]]:
    """They look until the block ends; gives how to wait for something."""
    with asyncio.Runner() as runner:

        async def wait_for(condition: Callable[[], bool]) -> None:
            tasks = [asyncio.create_task(each.keep_looking(EVERY_S)) for each in recyclers]
            async with asyncio.timeout(10):
                while not condition():  # noqa: ASYNC110  # looks have no event
                    await asyncio.sleep(EVERY_S)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        yield lambda condition: runner.run(wait_for(condition))


def test_a_process_that_comes_later_gets_its_share_of_those_that_ask_and_idle_ones_stay(tmp_path: Path) -> None:
    old, new = Process(), Process()
    drawn = random.Random(1)
    gone: list[Client] = []

    def leave(client: Client) -> None:
        gone.append(client)
        old.open_connections.discard(client)
        new.open_connections.discard(client)
        drawn.choice((old, new)).open_connections.add(Client(leave))

    idle = {Client(leave, busy=False) for _ in range(30)}
    old.open_connections |= idle | {Client(leave) for _ in range(20)}
    recyclers = [Recycler({"http": process}, age_s=0.0, files=NodeFiles(tmp_path), drawn=drawn) for process in (old, new)]
    with looking(*recyclers) as wait_for:
        wait_for(lambda: 9 <= len(new.open_connections) <= 11)
    assert idle <= old.open_connections
    assert not idle.intersection(gone)


def test_those_of_a_process_that_has_ended_do_not_count(tmp_path: Path) -> None:
    ended = NodeFiles(tmp_path)
    list(ended.publish([("connections", ("http",), (0,))]))
    ended.close()
    left: list[Client] = []
    process = Looked({Client(left.append) for _ in range(8)})
    files, beside = NodeFiles(tmp_path), NodeFiles(tmp_path)
    list(beside.publish([("connections", ("http",), (8,))]))
    with looking(Recycler({"http": process}, age_s=0.0, files=files)) as wait_for:
        wait_for(lambda: process.looks > 3)
    assert left == []
    files = NodeFiles(tmp_path)
    files.forget_ended()
    assert len(list(tmp_path.glob("*.blocks"))) == 1  # of the one that lives


def test_no_connection_grows_older_than_it_may_and_each_is_told_once() -> None:
    left: list[Client] = []
    process = Process()
    process.open_connections |= {Client(left.append, busy=False) for _ in range(50)}  # they stay open: nothing is asked
    with looking(Recycler({"grpc": process}, age_s=2.1, files=None)) as wait_for:
        wait_for(lambda: len(left) == 50)
    assert set(left) == process.open_connections
