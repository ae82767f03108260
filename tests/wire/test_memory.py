"""What connections hold together: small ones are never asked, the largest reader gives way, answers are owed."""

from collections.abc import Callable

import pytest

from gateway.wire.memory import FREE_BYTES, STEP_BYTES, Account, Memory

MIB = 1 << 20


class Connection:
    """Holds what it is told to. body, answers: bytes."""

    def __init__(self, memory: Memory) -> None:
        self.account: Account = memory.open(self)
        self.body = self.answers = 0
        self.refused = self.was_cut = False
        self.looks = 0

    def read(self, size: int) -> bool:
        may = self.account.ask(self.answers + size)
        if may:
            self.body = size
        return may

    def answer(self, size: int) -> None:
        self.answers = size
        self.account.owe(self.held())

    def held(self) -> int:
        self.looks += 1
        return self.body + self.answers

    def unfinished(self) -> int:
        return self.body

    def unread(self) -> int:
        return self.answers

    def give_way(self) -> None:
        self.refused, self.body = True, 0

    def cut(self) -> None:
        self.was_cut, self.answers = True, 0


@pytest.fixture
def memory() -> Memory:
    return Memory(8 * MIB)


@pytest.fixture
def connect(memory: Memory) -> Callable[[], Connection]:
    return lambda: Connection(memory)


def test_what_is_small_is_not_counted(memory: Memory, connect: Callable[[], Connection]) -> None:
    hog = connect()
    assert hog.read(8 * MIB)
    others = [connect() for _ in range(1000)]
    assert all(each.read(FREE_BYTES) for each in others)
    assert not hog.refused
    assert memory.granted_bytes == 8 * MIB


def test_a_body_beyond_what_all_may_hold_is_refused(connect: Callable[[], Connection]) -> None:
    one = connect()
    assert one.read(8 * MIB)
    assert not one.read(8 * MIB + 1)
    assert not one.refused, "it is told so by the answer"


def test_the_largest_reader_gives_way_to_one_that_asks_for_less(connect: Callable[[], Connection]) -> None:
    small, large, asker = connect(), connect(), connect()
    assert small.read(2 * MIB)
    assert large.read(6 * MIB)
    assert asker.read(MIB)
    assert (small.refused, large.refused, asker.refused) == (False, True, False)


def test_who_asks_for_more_than_any_other_has_is_refused(connect: Callable[[], Connection]) -> None:
    readers = [connect() for _ in range(4)]
    assert all(each.read(2 * MIB) for each in readers)
    asker = connect()
    assert not asker.read(2 * MIB)
    assert not any(each.refused for each in readers)
    assert asker.read(MIB), "and who has less gets it"
    assert sum(each.refused for each in readers) == 1


def test_what_was_let_go_is_found_when_memory_is_short(memory: Memory, connect: Callable[[], Connection]) -> None:
    done = connect()
    assert done.read(8 * MIB)
    done.body = 0
    other = connect()
    assert other.read(8 * MIB)
    assert not done.refused
    assert memory.granted_bytes == 8 * MIB


def test_what_is_whole_does_not_give_way(connect: Callable[[], Connection]) -> None:
    whole = connect()
    assert whole.read(8 * MIB)
    whole.body, whole.answers = 0, 8 * MIB  # it is with the handler
    assert not connect().read(MIB)
    assert not whole.was_cut


def test_answers_are_never_refused_and_bodies_give_way_to_them(memory: Memory, connect: Callable[[], Connection]) -> None:
    reader, answered = connect(), connect()
    assert reader.read(7 * MIB)
    answered.answer(4 * MIB)
    assert reader.refused
    assert memory.granted_bytes == 4 * MIB


def test_the_client_that_takes_nothing_for_longest_is_cut_off_for_an_answer(
    memory: Memory, connect: Callable[[], Connection]
) -> None:
    first, second, last = connect(), connect(), connect()
    first.answer(4 * MIB)
    second.answer(4 * MIB)
    first.account.paid()
    first.answer(4 * MIB)
    done = connect()
    done.answer(MIB)
    done.answers = 0  # without a word
    last.answer(4 * MIB)
    assert (first.was_cut, second.was_cut, done.was_cut, last.was_cut) == (False, True, False, False)
    last.answer(20 * MIB)
    assert first.was_cut
    assert not last.was_cut, "its own answer is longer than all may be"
    assert memory.granted_bytes == 20 * MIB


def test_a_connection_that_is_gone_holds_nothing(memory: Memory, connect: Callable[[], Connection]) -> None:
    one = connect()
    assert one.read(5 * MIB)
    one.answer(2 * MIB)
    one.account.close()
    assert memory.granted_bytes == 0
    one.account.owe(MIB)
    assert not one.account.ask(8 * MIB)
    assert memory.granted_bytes == 0


def test_who_asks_in_vain_costs_little_however_many_hold_memory() -> None:
    memory = Memory(320 * 2 * STEP_BYTES)
    holding = [Connection(memory) for _ in range(320)]
    assert all(each.read(2 * STEP_BYTES) for each in holding)
    looks = holding[0].looks
    assert not any(Connection(memory).read(2 * STEP_BYTES) for _ in range(110))
    assert holding[0].looks - looks == 10
    holding[0].body = 0
    assert any(Connection(memory).read(2 * STEP_BYTES) for _ in range(11)), "what is let go is found soon"


def test_it_is_asked_in_steps(memory: Memory, connect: Callable[[], Connection]) -> None:
    one = connect()
    assert one.read(FREE_BYTES + 1)
    assert memory.granted_bytes == one.account.granted == 2 * STEP_BYTES
