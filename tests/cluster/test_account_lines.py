"""A replica tells what it counts to an ingress of another node, by real sockets: whose metrics show it then."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gateway.cluster import account_lines
from gateway.cluster.account_lines import AccountKeeper, AccountTeller
from gateway.cluster.accounts import GIVE_UP_NS, ReplicaAccount
from gateway.cluster.channel import Answer, ChannelServer, Running, Tell, Tenant
from gateway.engine.metric_files import Block, read
from gateway.engine.metrics import Metrics
from gateway.wire.tensors import Buffer
from tests.cluster.test_accounts import COST, PROCESS, cost, process
from tests.engine.pools import until_true

pytestmark = pytest.mark.ray  # the package imports it

HOST = "127.0.0.1"


class Replica:
    """Its end, and the node's."""

    def __init__(self) -> None:
        self.teller = AccountTeller()
        self.server = ChannelServer(self._run, self._enter, self.teller.keep)
        self.own: list[Block] = []

    async def reached_by(self, keeper: AccountKeeper) -> None:
        keeper.keep(self.server.token, HOST, (await self.server.start(HOST)).port)

    def tick(self, number: int) -> None:
        about = ("node", (), (None, None))  # as each process tells
        self.own = self.teller.divide(lambda: False, [(*COST, cost(number)), (*PROCESS, process(number)), about])

    def _run(self, frame: Buffer, answer: Answer, part: Answer) -> Running:
        raise AssertionError

    def _enter(self, ingress: str, tell: Tell) -> Tenant:
        raise AssertionError


def told(metrics: Metrics) -> str:
    text = metrics.expose()[1].decode()
    return "".join(line for line in text.splitlines(keepends=True) if line.startswith(("gateway_cost", "gateway_replicas")))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_an_ingress_shows_what_a_replica_tells_it_also_after_its_end(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def test() -> None:
        keeper, metrics, replica = AccountKeeper(), Metrics(), Replica()
        metrics.watch_told(keeper)
        await replica.reached_by(keeper)
        await replica.reached_by(keeper)  # as each of its links says
        keeper.start()
        await until_true(lambda: (replica.tick(40), bool(told(metrics)))[1])
        assert 'state="busy",version="1"} 1.3\n' in told(metrics)
        assert 'state="idle",version="1"} 2.7\n' in told(metrics)
        assert 'backend="synthetic",model="m",version="1"} 1\n' in told(metrics)
        await asyncio.wait_for(replica.server.close(), 5)  # which lets this connection live
        replica.tick(50)
        await until_true(lambda: 'state="busy",version="1"} 1.6\n' in told(metrics))
        for connection in list(replica.server._connections):
            connection.abort()  # as the end of the process does
        await until_true(lambda: "gateway_replicas{" not in told(metrics))
        assert 'state="busy",version="1"} 1.6\n' in told(metrics)
        await keeper.close()

    run(asyncio.wait_for(test(), 20))


@pytest.mark.slow
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_replica_whose_node_vanishes_without_a_word_is_shown_no_longer_until_it_tells_again(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def test() -> None:
        keeper, metrics, replica = AccountKeeper(silent_s=0.02), Metrics(), Replica()
        metrics.watch_told(keeper)
        await replica.reached_by(keeper)
        keeper.start()
        for number in (40, 50):
            await until_true(lambda number=number: (replica.tick(number), "gateway_replicas{" in told(metrics))[1])
            await until_true(lambda: "gateway_replicas{" not in told(metrics))
            assert 'state="busy",version="1"} 1.' in told(metrics)
        await keeper.close()
        await replica.server.close()

    run(asyncio.wait_for(test(), 20))


@pytest.mark.parametrize("how", [Metrics.flush, Metrics.expose])
def test_an_ingress_says_what_it_has_published_and_so_it_counts_once_if_the_ingress_is_killed(
    tmp_path: Path, how: Callable[[Metrics], object]
) -> None:
    async def test() -> None:
        keeper, metrics, replica = AccountKeeper(), Metrics(directory=tmp_path), Replica()
        metrics.watch_told(keeper)
        await replica.reached_by(keeper)
        keeper.start()
        await until_true(lambda: (replica.tick(40), bool(told(metrics)))[1])
        account = next(iter(replica.teller._division._accounts.values()))
        number = max(account.sent)
        await until_true(lambda: (how(metrics), min(account.sent) == number)[1])
        await keeper.close()
        await replica.server.close()

    asyncio.run(asyncio.wait_for(test(), 20))


@pytest.mark.parametrize("first", ["reads", "publishes"])
def test_an_ingress_that_stood_still_leaves_what_waits_to_others_and_says_what_it_has(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(account_lines, "_RETRY_S", 0.0)

    async def test() -> None:
        keeper, metrics, replica = AccountKeeper(), Metrics(), Replica()
        metrics.watch_told(keeper)
        await replica.reached_by(keeper)
        keeper.start()
        await until_true(lambda: (replica.tick(40), bool(told(metrics)))[1])
        (account,), (line,) = keeper._accounts.values(), replica.teller._tell.values()
        account.said_ns -= 2 * GIVE_UP_NS
        if first == "publishes":
            metrics.flush()
        replica.tick(50)
        await until_true(lambda: replica.teller._tell and line not in replica.teller._tell.values())
        assert account.blocks[COST][0] == cost(40)[0]
        (known,) = replica.teller._division._accounts.values()
        assert max(known.sent) == account.number
        await until_true(lambda: (replica.tick(60), 'state="busy",version="1"} 2.0\n' in told(metrics))[1])
        await keeper.close()
        await replica.server.close()

    asyncio.run(asyncio.wait_for(test(), 20))


@pytest.mark.parametrize("how", [Metrics._publish, Metrics._blocks])
def test_what_is_told_between_slices_is_either_published_and_said_to_be_so_or_neither(
    tmp_path: Path, how: Callable[[Metrics], Iterator[None]]
) -> None:
    keeper, metrics, account = AccountKeeper(), Metrics(directory=tmp_path), ReplicaAccount()
    metrics.watch_told(keeper)
    metrics.endpoint("m", "1", "rest")  # of which a slice is before
    keeper._accounts[b"replica"] = account
    account.told(1, {COST: cost(10)})
    for _ in how(metrics):
        account.told(account.number + 1, {COST: cost(10 * account.number + 10)})
    (file,) = tmp_path.glob("*.blocks")
    published = {(kind, tuple(labels)): state for kind, labels, state in read(file.read_bytes()) or ()}
    assert account.number > account.published
    assert published[COST][0] == cost(10 * account.published)[0]


def test_a_replica_knows_whether_an_ingress_lives_on_its_node(tmp_path: Path) -> None:
    replica, another = (Metrics(directory=tmp_path, role="replica") for _ in range(2))
    assert not replica.ingress_lives
    ingress = Metrics(directory=tmp_path)
    assert replica.ingress_lives
    assert another.ingress_lives
    assert ingress._files is not None
    ingress._files.close()  # as its end does
    assert not replica.ingress_lives


def test_a_replica_of_another_format_is_not_listened_to() -> None:
    async def test() -> None:
        keeper, metrics, replica = AccountKeeper(), Metrics(), Replica()
        metrics.watch_told(keeper)
        await replica.reached_by(keeper)
        keeper.start()
        await until_true(lambda: bool(replica.teller._tell))
        next(iter(replica.teller._tell.values()))(1, (b"\x92\x01\x90",))
        await until_true(lambda: not replica.teller._tell)
        assert told(metrics) == ""
        await keeper.close()
        await replica.server.close()

    asyncio.run(asyncio.wait_for(test(), 20))
