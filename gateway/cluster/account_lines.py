"""What a replica counts, told to an ingress of another node: both ends of it, around `accounts`."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from gateway.cluster.accounts import GIVE_UP_NS, Blocks, Division, ReplicaAccount, added
from gateway.cluster.channel import Channel, ChannelLost, Keeper, TellAccount
from gateway.engine.metric_blocks import FIELDS, Key, State, merge
from gateway.engine.metric_files import Block, read, written
from gateway.wire.tensors import Buffer

_RETRY_S: Final = 0.5
# An ingress looks so long for a replica: then it has ended, or gets another account.
_LOOK_S: Final = 30.0
_KINDS: Final = ("cost", "process")  # that a replica counts and its ingresses do not


class AccountTeller:
    """The replica's end. ingress_lives: whether one lives on this node, which counts what is published there."""

    def __init__(self) -> None:
        self._division = Division()
        self._tell: dict[str, TellAccount] = {}

    def keep(self, account: str, held: int, tell: TellAccount) -> Keeper | None:
        """An ingress keeps an account: as `ChannelServer` calls it."""
        if not self._division.connected(account, held, time.monotonic_ns()):
            return None
        self._tell[account] = tell
        return Keeper(partial(self._published, account, tell), partial(self._gone, account, tell))

    def divide(self, ingress_lives: Callable[[], bool], blocks: list[Block]) -> list[Block]:
        """Tell what is counted elsewhere, and give what is counted on this node. ingress_lives: there."""
        total: dict[Key, State] = {}
        for kind, labels, state in blocks:
            if kind in _KINDS:
                key = Key(kind, labels)
                total[key] = merge(kind, total[key], state) if key in total else state
        own, told = self._division.divide(total, ingress_lives=ingress_lives(), now_ns=time.monotonic_ns())
        for telling in told:
            self._tell[telling.account](telling.number, (written(_listed(telling.blocks)),))
        return [*_listed(own), *(block for block in blocks if block[0] not in _KINDS)]

    def _published(self, account: str, tell: TellAccount, number: int) -> None:
        if self._tell.get(account) is tell:
            self._division.published(account, number, time.monotonic_ns())

    def _gone(self, account: str, tell: TellAccount) -> None:
        if self._tell.get(account) is tell:  # and has not come back by another connection
            del self._tell[account]
            self._division.disconnected(account)


class AccountKeeper:
    """The ingress's end: what its metrics are told (`metrics.Told`). Life: keep … -> start -> keep … -> close."""

    def __init__(self, *, silent_s: float = GIVE_UP_NS / 1e9) -> None:
        """silent_s: a replica that has told nothing for so long may have gone, with its node and without a word."""
        self._silent_s = silent_s
        self._accounts: dict[bytes, ReplicaAccount] = {}
        self._lines: dict[bytes, Channel] = {}
        self._ended: Blocks = {}  # of replicas that have ended
        self._holding: dict[bytes, asyncio.Task[None]] = {}
        self._started = asyncio.Event()

    def start(self) -> None:
        """From now on this process publishes: whoever tells it something waits for that."""
        self._started.set()

    def keep(self, token: bytes, host: str, port: int) -> None:
        """Be told what a replica counts, if it wants to tell it; may be called again."""
        if token not in self._holding:
            task = self._holding[token] = asyncio.get_running_loop().create_task(self._hold(token, host, port))
            task.add_done_callback(lambda task: self._holding.pop(token))

    async def close(self) -> None:
        for task in list(self._holding.values()):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    # metrics.Told

    def states(self) -> Iterable[tuple[Key, State]]:
        return [*self._ended.items(), *(item for account in self._accounts.values() for item in account.blocks.items())]

    def taken(self) -> Callable[[], None]:
        return partial(self._published, [(token, account, account.number) for token, account in self._accounts.items()])

    def _published(self, taken: list[tuple[bytes, ReplicaAccount, int]]) -> None:
        for token, account, number in taken:
            account.published = max(account.published, number)
            if token in self._lines and not _ended_as_lapsed(self._lines[token], account):
                self._say(self._lines[token], account)

    def _say(self, line: Channel, account: ReplicaAccount) -> None:
        line.published(account.published)
        account.said_ns = time.monotonic_ns()

    async def _hold(self, token: bytes, host: str, port: int) -> None:
        await self._started.wait()
        loop = asyncio.get_running_loop()
        name, account = secrets.token_hex(16), ReplicaAccount()
        self._accounts[token] = account
        lost_s = loop.time()
        while loop.time() - lost_s < _LOOK_S:
            try:
                line = await Channel.connect(token, host=host, port=port)
            except ChannelLost:
                await asyncio.sleep(_RETRY_S)
                continue
            opened_s, over = loop.time(), loop.create_future()
            line.on_end = partial(_end, over)
            if not line.is_open:
                _end(over)
            line.on_told = partial(self._told, line, account)
            line.keep(name, account.number)
            self._say(line, account)  # of which the replica may not have heard
            self._lines[token] = line
            try:
                await self._silence(account, over)
            finally:
                del self._lines[token]
                line.abort()
                account.disconnected()
            if loop.time() - opened_s > _RETRY_S:
                lost_s = loop.time()
            await asyncio.sleep(_RETRY_S)
        self._ended = added(self._ended, self._accounts.pop(token).blocks)

    async def _silence(self, account: ReplicaAccount, over: "asyncio.Future[None]") -> None:
        """Wait until the line is over, or the replica silent. It tells this account nothing while another is told all."""
        number = -1
        while not over.done() and not (account.number == number and account.shows):
            number = account.number
            await asyncio.wait((over,), timeout=self._silent_s)

    def _told(self, line: Channel, account: ReplicaAccount, number: int, content: Buffer) -> None:
        if _ended_as_lapsed(line, account):
            return
        blocks = read(content)
        if blocks is None or any(kind not in _KINDS or len(state) != len(FIELDS[kind]) for kind, _, state in blocks):
            line.abort()  # of another version: it tells another one
            return
        account.told(number, {Key(kind, labels): state for kind, labels, state in blocks})


def _ended_as_lapsed(line: Channel, account: ReplicaAccount) -> bool:
    """End the line of an account that has lapsed, and with it what waits there: the next says how much of it was taken."""
    lapsed = account.lapsed(time.monotonic_ns())
    if lapsed:
        line.abort()
    return lapsed


def _end(over: "asyncio.Future[None]") -> None:
    if not over.done():
        over.set_result(None)


def _listed(blocks: Blocks) -> list[Block]:
    return [(key.kind, key.labels, state) for key, state in blocks.items()]
