"""What all connections of a process hold together, and who gives way where that is too much.

Theory of operation
-------------------
A connection holds up to `FREE_BYTES` without a word: a small request costs nothing here. Beyond them it asks before it holds
more, in steps. It does not tell what it has let go: where memory is short, all who were granted some are asked what they hold
now, and keep as much.

If it is short even so, the connection that was granted most, of those that are reading a body, gives way: it refuses that
request, which was not accepted and may be sent again. Who asks is refused itself unless another has more. So a client that asks
for little gets its answer while others fill the memory.

Answers have to be held (`owe`). Where no body is left to give way to them, the client that has left its answers untaken for
longest is cut off.
"""

from typing import Final, Protocol

FREE_BYTES: Final = 256 << 10
STEP_BYTES: Final = 256 << 10
_LOOKED_AT_A_TIME: Final = 32  # connections, for each that asks in vain
UNLIMITED: Final = 1 << 62
NO_MEMORY: Final = "all requests together hold as much memory as they may (server.limits.memory_bytes): try again"


class Holder(Protocol):
    """A connection, as the memory of its process knows it."""

    def held(self) -> int:
        """Bytes that it holds now, or may hold without asking."""

    def unfinished(self) -> int:
        """Of these, those of requests that are not whole."""

    def unread(self) -> int:
        """Of these, those of answers that its client has not taken."""

    def give_way(self) -> None:
        """Refuse the largest request that is not whole."""

    def cut(self) -> None:
        """Close at once: the client takes none of its answers."""


class Memory:
    """Of a process.

    most_bytes: what is granted stays below it; what is owed goes beyond it only where nobody is left to cut.
    """

    def __init__(self, most_bytes: int = UNLIMITED) -> None:
        self.most_bytes = most_bytes
        self.granted_bytes = 0
        self._accounts: dict[Account, None] = {}  # that were granted more than is free
        self._patience = 0  # so many who ask are refused without a look, since the last look was in vain
        self._unread: dict[Account, None] = {}  # whose answers wait for their clients; the first for longest

    def __repr__(self) -> str:
        return f"<Memory: {self.granted_bytes} of {self.most_bytes} bytes, {len(self._accounts)} connections>"

    def open(self, holder: Holder) -> "Account":
        """Begin to count what a connection holds."""
        return Account(self, holder)

    def grant(self, account: "Account", size: int) -> bool:
        """For `Account.ask`."""
        more = _counted(size) - account.counted
        if self.granted_bytes + more > self.most_bytes and not self._make_room(account, size):
            return False
        self.count(account, size)
        return True

    def owe(self, account: "Account", size: int) -> None:
        """For `Account.owe`."""
        self.count(account, size)
        if account.counted:
            self._unread.setdefault(account)
        if self.granted_bytes > self.most_bytes:
            self._relieve(account)

    def _relieve(self, owing: "Account") -> None:
        """Have bodies give way to answers, then those who do not take theirs."""
        if self._patience:
            self._patience -= 1
            return
        self._look()
        while self.granted_bytes > self.most_bytes and self._one_gives_way(owing, 0):
            pass
        for oldest in [each for each in self._unread if each is not owing]:
            if self.granted_bytes <= self.most_bytes:
                return
            self._unread.pop(oldest, None)
            if oldest.holder is not None and oldest.holder.unread() > 0:
                self.count(oldest, 0)
                oldest.holder.cut()
        if self.granted_bytes > self.most_bytes:
            self._patience = len(self._accounts) // _LOOKED_AT_A_TIME

    def paid(self, account: "Account") -> None:
        """For `Account.paid`."""
        self._unread.pop(account, None)

    def forget(self, account: "Account") -> None:
        """It holds nothing, or will not soon."""
        self.count(account, 0)
        self._unread.pop(account, None)

    def count(self, account: "Account", size: int) -> None:
        """Count so many bytes as granted."""
        counted = _counted(size)
        self.granted_bytes += counted - account.counted
        account.counted = counted
        account.granted = max(counted, FREE_BYTES)
        if counted:
            self._accounts[account] = None
        else:
            self._accounts.pop(account, None)

    def _look(self) -> None:
        """See what was let go."""
        for account in list(self._accounts):
            self.count(account, account.held())

    def _make_room(self, asker: "Account", size: int) -> bool:
        if self._patience:
            self._patience -= 1
            return False
        self._look()
        wanted = _counted(size)
        while self.granted_bytes - asker.counted + wanted > self.most_bytes:
            if not self._one_gives_way(asker, wanted):
                self._patience = len(self._accounts) // _LOOKED_AT_A_TIME
                return False
        return True

    def _one_gives_way(self, asker: "Account", wanted: int) -> bool:
        """Whether memory became free. wanted: by the asker, who is not worth more than others."""
        for account in sorted(self._accounts, key=lambda each: each.counted, reverse=True):
            if account.counted <= wanted:
                return False
            holder = account.holder
            if account is not asker and holder is not None and holder.unfinished() > 0:
                before = account.counted
                holder.give_way()
                self.count(account, account.held())
                if account.counted < before:
                    return True
        return False


class Account:
    """What one connection was granted.

    granted: it may hold so much. counted: of that, what the process counts. holder: the connection, until it is gone.
    """

    __slots__ = ("_memory", "counted", "granted", "holder")

    def __init__(self, memory: Memory, holder: Holder) -> None:
        self.granted = FREE_BYTES
        self.counted = 0
        self.holder: Holder | None = holder
        self._memory = memory

    def ask(self, size: int) -> bool:
        """Whether the connection may hold so many bytes in all."""
        return size <= self.granted or (self.holder is not None and self._memory.grant(self, size))

    def owe(self, size: int) -> None:
        """The connection holds so many bytes in all, answers among them that its client does not take."""
        if self.holder is not None:
            self._memory.owe(self, max(size, self.counted))

    def held(self) -> int:
        """What the connection holds now."""
        return 0 if self.holder is None else self.holder.held()

    def paid(self) -> None:
        """The client has taken its answers."""
        self._memory.paid(self)

    def close(self) -> None:
        """The connection is gone."""
        self._memory.forget(self)
        self.holder = None  # it refers to this: free both now, not when the collector comes by


def _counted(size: int) -> int:
    return -(-size // STEP_BYTES) * STEP_BYTES if size > FREE_BYTES else 0
