"""Who counts what a replica has counted: its own node, or one ingress of another; each piece once.

All that a replica has counted is parted among accounts. One is a file on its own node, which the ingresses of that node read.
While none lives there, what comes is told to the account of an ingress elsewhere. That is told its running total, with a
number, so that to tell it again changes nothing; and it says which number it has published, so that it stays counted if the
ingress is killed. What it has not said so of is taken to be counted as long as it is heard of now and then; not any more, once
it was silent for `GIVE_UP_NS`: then it goes to the next, or stays in the file. What comes does so as soon as its connection has
ended. An ingress that was silent for so long drops what waits for it, and says what it has; the others get so much less of what
comes. So nothing but what it took between two of its sayings is counted twice, and for no longer than that takes, unless the
replica ends before, or the ingress published it in the moment it was killed, and could not say.

Both halves are pure: they get what happened, and when.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gateway.engine.metric_blocks import Key, State, counters_only, less, merge, most

GIVE_UP_NS: Final = 5_000_000_000
"""An ingress says each second what it has published."""
_FORGET_NS: Final = 120_000_000_000

Blocks = Mapping[Key, State]

_NOTHING: Final[Blocks] = {}


class Telling(NamedTuple):
    """What an account is told. blocks: its running total, and the gauges, if it is to show them."""

    account: str
    number: int
    blocks: Blocks


@dataclass(slots=True)
class _Account:
    """At an ingress. sent: what it was told, by number, from what it has published on. shows: the gauges."""

    alive_ns: int
    connected: bool = True
    sent: dict[int, Blocks] = field(default_factory=lambda: {0: _NOTHING})
    shows: bool = False

    def given_up(self, now_ns: int) -> bool:
        return now_ns - self.alive_ns > GIVE_UP_NS

    def counted(self, now_ns: int) -> Blocks:
        """As far as is known."""
        return self.sent[min(self.sent) if self.given_up(now_ns) else max(self.sent)]


class Division:
    """The replica's half: what its own node counts, and what whom else."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._current: str | None = None
        self._own: Blocks = _NOTHING  # what an ingress of this node has seen
        self._settled: Blocks = _NOTHING  # counted by accounts that are gone for good
        self._number = 0

    def connected(self, account: str, held: int, now_ns: int) -> bool:
        """An ingress can be told from now on; False: it is to open another account. held: what it was told last; 0: nothing."""
        if account not in self._accounts and held:
            return False  # forgotten
        known = self._accounts.setdefault(account, _Account(now_ns))
        known.alive_ns, known.connected = now_ns, True
        known.sent = {number: blocks for number, blocks in known.sent.items() if number <= max(held, min(known.sent))}
        return True

    def disconnected(self, account: str) -> None:
        """It may come back."""
        self._accounts[account].connected = self._accounts[account].shows = False

    def published(self, account: str, number: int, now_ns: int) -> None:
        """An ingress has published what it was told with this number."""
        known = self._accounts[account]
        known.alive_ns = now_ns
        if number in known.sent:
            known.sent = {later: blocks for later, blocks in known.sent.items() if later >= number}

    def divide(self, total: Blocks, *, ingress_lives: bool, now_ns: int) -> tuple[Blocks, list[Telling]]:
        """What goes into the file of this node, and what is told. ingress_lives: on this node, and reads the file."""
        self._forget(now_ns)
        self._choose(ingress_lives, now_ns)
        told = []
        for name, account in self._accounts.items():
            if name == self._current and account.connected:
                others = [other.counted(now_ns) for other in self._accounts.values() if other is not account]
                left = _left(total, [self._settled, self._own, *others])
                told.append(self._tell(name, account, _most(left, account.sent[max(account.sent)])))
            elif account.connected and account.shows:
                account.shows = False
                last = account.sent[max(account.sent)]
                told.append(Telling(name, self._next(account, last), last))
        counted = [account.counted(now_ns) for account in self._accounts.values()]
        own = _most(_left(total, [self._settled, *counted]), self._own)
        if ingress_lives:
            self._own = _counters(own)
        return _counters(own) if self._current is not None else own, told

    def _choose(self, ingress_lives: bool, now_ns: int) -> None:
        if ingress_lives:
            self._current = None
            return
        current = self._accounts.get(self._current or "")
        if current is None or not current.connected or current.given_up(now_ns):
            usable = (name for name, one in self._accounts.items() if one.connected and not one.given_up(now_ns))
            self._current = next(usable, None)

    def _tell(self, name: str, account: _Account, blocks: Blocks) -> Telling:
        account.shows = True
        return Telling(name, self._next(account, _counters(blocks)), blocks)

    def _next(self, account: _Account, counters: Blocks) -> int:
        self._number += 1
        account.sent[self._number] = counters
        return self._number

    def _forget(self, now_ns: int) -> None:
        for name, account in list(self._accounts.items()):
            if not account.connected and now_ns - account.alive_ns > _FORGET_NS:
                self._settled = added(self._settled, account.counted(now_ns))
                del self._accounts[name]


class ReplicaAccount:
    """The ingress's half: what one replica has told. number: of the last; published: of the last that is published.

    said_ns: when it last told the replica so.
    """

    def __init__(self) -> None:
        self.number = self.published = self.said_ns = 0
        self.blocks: Blocks = _NOTHING

    def lapsed(self, now_ns: int) -> bool:
        """Whether the replica may have given it up, and told another what waits here: this process stood still."""
        return now_ns - self.said_ns > GIVE_UP_NS

    def told(self, number: int, blocks: Blocks) -> None:
        """What was told before is in it, and what was told already changes nothing."""
        if number > self.number:
            self.number, self.blocks = number, blocks

    @property
    def shows(self) -> bool:
        """Whether the replica tells this account its gauges, over and over."""
        return self.blocks != _counters(self.blocks)

    def disconnected(self) -> None:
        """The replica may have ended: what it counted counts on."""
        self.blocks = _counters(self.blocks)


def added(one: Blocks, other: Blocks) -> Blocks:
    found = dict(one)
    for key, state in other.items():
        found[key] = merge(key.kind, found[key], state) if key in found else state
    return found


def _counters(blocks: Blocks) -> Blocks:
    return {key: counters_only(key.kind, state) for key, state in blocks.items()}


def _left(total: Blocks, counted: Iterable[Blocks]) -> Blocks:
    """Of a total, what is counted nowhere."""
    all_counted = _NOTHING
    for blocks in counted:
        all_counted = added(all_counted, blocks)
    return {key: less(key.kind, state, all_counted[key]) if key in all_counted else state for key, state in total.items()}


def _most(blocks: Blocks, least: Blocks) -> Blocks:
    """A counter never goes back."""
    return {**least, **{key: most(key.kind, state, least[key]) if key in least else state for key, state in blocks.items()}}
