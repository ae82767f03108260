from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.batching.leases import Demand, Lease, Leases, share

MS = 1_000_000
HORIZON_NS = 50 * MS


def test_slots_follow_the_load() -> None:
    assert share(8, [Demand(3.0, 0), Demand(1.0, 0)], HORIZON_NS) == (6, 2)


def test_what_waits_counts_as_load() -> None:
    assert share(4, [Demand(1.0, 0), Demand(1.0, 100 * MS)], HORIZON_NS) == (1, 3)


def test_who_has_anything_to_do_gets_a_slot_and_who_has_nothing_gets_none() -> None:
    assert share(4, [Demand(3.9, 0), Demand(0.01, 0), Demand(0, 0)], HORIZON_NS) == (3, 1, 0)


def test_too_few_slots_go_where_the_most_work_waits() -> None:
    assert share(1, [Demand(0.5, 1 * MS), Demand(0.1, 90 * MS)], HORIZON_NS) == (0, 1)


def test_an_idle_gateway_spreads_them() -> None:
    assert share(5, [Demand(0, 0)] * 2, HORIZON_NS) == (3, 2)


def test_a_lease_that_is_about_right_stays() -> None:
    assert share(4, [Demand(1.15, 0, held=2), Demand(0.85, 0, held=2)], HORIZON_NS) == (2, 2)  # ideal 2.3 and 1.7


@given(
    slots=st.integers(1, 40),
    demands=st.lists(st.builds(Demand, st.floats(0, 20), st.floats(0, 1e10), held=st.integers(0, 40)), min_size=1, max_size=10),
)
def test_every_slot_is_leased_once_and_nobody_with_work_is_left_out(slots: int, demands: list[Demand]) -> None:
    given_slots = share(slots, demands, HORIZON_NS)
    assert sum(given_slots) == slots
    assert min(given_slots) >= 0
    active = [i for i, demand in enumerate(demands) if demand.arriving + demand.waiting_ns / HORIZON_NS > 0]
    if len(active) <= slots:
        assert all(given_slots[i] >= 1 for i in active)


def test_among_equals_who_holds_a_slot_keeps_it_and_else_the_first_gets_it() -> None:
    assert share(2, [Demand(1, 0), Demand(1, 0, held=1), Demand(1, 0, held=1)], HORIZON_NS) == (0, 1, 1)
    assert share(2, [Demand(1, 0)] * 3, HORIZON_NS) == (1, 1, 0)
    assert share(3, [Demand(1, 0)] * 2, HORIZON_NS) == (2, 1)
    assert share(3, [Demand(9, 0), Demand(1, 0), Demand(1, 0)], HORIZON_NS) == (1, 1, 1)


def test_what_is_left_of_a_slot_goes_where_most_is_missing() -> None:
    assert share(10, [Demand(2.1, 0), Demand(4.6, 0), Demand(3.3, 0)], HORIZON_NS) == (2, 5, 3)
    assert share(10, [Demand(2.6, 0), Demand(4.7, 0), Demand(2.7, 0)], HORIZON_NS) == (2, 5, 3)


def test_a_lease_moves_when_it_is_off_by_more_than_three_quarters() -> None:
    assert share(8, [Demand(4.75, 0, held=4), Demand(3.25, 0, held=4)], HORIZON_NS) == (4, 4)
    assert share(8, [Demand(4.76, 0, held=4), Demand(3.24, 0, held=4)], HORIZON_NS) == (5, 3)
    assert share(8, [Demand(1.0, 0, held=5), Demand(7.0, 0, held=3)], HORIZON_NS) == (1, 7)


def test_of_more_leases_than_slots_those_furthest_above_their_part_end() -> None:
    assert share(4, [Demand(1.3, 0, held=2), Demand(1.35, 0, held=2), Demand(1.35, 0, held=2)], HORIZON_NS) == (1, 2, 1)
    assert share(5, [Demand(3.9, 0, held=4), Demand(0.05, 0), Demand(1.05, 0, held=1)], HORIZON_NS) == (3, 1, 1)


def test_an_idle_process_gives_its_slots_up() -> None:
    assert share(4, [Demand(0, 0, held=3), Demand(0.1, 0, held=1)], HORIZON_NS) == (0, 4)
    assert share(4, [Demand(0, 1 * MS), Demand(0, 0)], HORIZON_NS) == (4, 0)
    assert share(7, [Demand(0, 0)] * 3, HORIZON_NS) == (3, 2, 2)


EVENTS = ("want", "begin", "astray", "end", "read", "wait")


class World:
    """One replica and processes that know what they were told `delay` events later, in simulated time.

    Checks after every event that no batch lacks a session.
    """

    def __init__(self, slots: int, *names: str, ordered: bool = True) -> None:
        self.leases = Leases(HORIZON_NS)
        self.slots = slots
        self.now_ns = 0
        self.running: list[tuple[str, Lease, bool]] = []
        self.mail: dict[str, list[tuple[int, int]]] = {name: [] for name in names}  # told, number, not read yet
        self.believed = dict.fromkeys(names, 0)
        self.again_ns: int | None = None
        for name in names:
            self.leases.enter(name, 0)
            self.leases.of[name].ordered = ordered
        self.deal()
        self.now_ns = 1000 * MS

    def deal(self) -> None:
        if self.leases.count_due(self.now_ns):
            self.leases.count(self.now_ns)
        changed, self.again_ns = self.leases.deal(self.slots, len(self.running), self.now_ns)
        for name in changed:
            self.mail[name].append((self.leases.of[name].told, self.leases.of[name].number))
        assert sum(lease.told for lease in self.leases.of.values()) <= self.slots

    def busy(self, name: str) -> int:
        return sum(of == name for of, _, _ in self.running)

    def read(self, name: str) -> None:
        """Everything it was told, and then its word that it knows."""
        for told, number in self.mail[name]:
            self.believed[name] = told
            self.leases.know(name, number)
        self.mail[name].clear()
        self.deal()

    def want(self, name: str, batches: float = 1.0) -> None:
        self.leases.of[name].wants = batches
        self.deal()

    def begin(self, name: str, left: float = 0.0, *, astray: bool = False) -> None:
        assert self.busy(name) < self.believed[name], "the process has no slot that it knows of"
        assert len(self.running) < self.slots, "a batch without a session"
        lease = self.leases.begin(name, left, self.now_ns, astray=astray)
        self.running.append((name, lease, astray))
        self.deal()

    def end(self, name: str, took_ns: int = 10 * MS) -> None:
        index = next(i for i, (of, _, _) in enumerate(self.running) if of == name)
        _, lease, astray = self.running.pop(index)
        self.now_ns += took_ns
        lease.spent_ns += took_ns
        self.leases.end(lease, took_ns, self.now_ns, astray=astray)
        self.deal()
        if not astray:
            self.read(name)  # what it was told before the answer comes before it

    def play(self, events: list[tuple[int, str, int]]) -> None:
        """Those of them that can happen."""
        names = list(self.mail)
        for index, event, amount in events:
            name = names[index % len(names)]
            for other, mail in self.mail.items():
                if mail and self.now_ns - self.leases.of[other].told_ns >= 400 * MS:
                    self.read(other)  # after a second it would count as frozen
            self.now_ns += 100_000
            if event == "want":
                self.want(name, amount)
            elif event == "read":
                self.read(name)
            elif event == "wait":
                self.now_ns += amount * 100 * MS
                self.deal()
            elif event in ("begin", "astray") and self.busy(name) < self.believed[name]:
                self.begin(name, amount, astray=event == "astray")
            elif event == "end" and self.busy(name):
                self.end(name)

    def told(self) -> tuple[int, ...]:
        return tuple(lease.told for lease in self.leases.of.values())


def test_a_process_alone_has_every_slot() -> None:
    world = World(3, "a")
    assert world.told() == (3,)


def test_a_slot_passes_once_its_process_knows() -> None:
    world = World(1, "a", "b")
    world.read("a")
    world.want("b")
    assert world.told() == (0, 0)  # a may have sent a batch by now
    world.read("a")
    assert world.told() == (0, 1)


def test_a_slot_passes_when_its_batch_ends_and_its_process_need_not_say_that_it_knows() -> None:
    world = World(1, "a", "b")
    world.read("a")
    world.begin("a")
    world.want("b")
    assert world.told() == (0, 0)
    name, lease, _ = world.running.pop()
    world.leases.end(lease, 10 * MS, world.now_ns)
    world.deal()
    assert (name, world.told()) == ("a", (0, 1))


def test_a_slot_of_a_process_that_is_told_late_passes_only_when_it_says_that_it_knows() -> None:
    world = World(1, "a", "b", ordered=False)
    world.read("a")
    world.begin("a")
    world.want("b")
    _, lease, _ = world.running.pop()
    world.leases.end(lease, 10 * MS, world.now_ns)
    world.deal()
    assert world.told() == (0, 0)
    world.read("a")
    assert world.told() == (0, 1)


def test_a_slot_passes_late_when_its_batch_came_by_another_way_than_what_its_process_is_told() -> None:
    world = World(1, "a", "b")
    world.read("a")
    world.begin("a", astray=True)
    world.want("b")
    world.end("a")  # whose answer may be there before that it has no slot any more
    assert world.told() == (0, 0)
    world.begin("a")
    world.end("a")
    assert world.told() == (0, 1)


def test_one_slot_goes_round_among_all_that_have_work() -> None:
    names = ("a", "b", "c")
    world = World(1, *names)
    for name in names:
        world.want(name, 9.0)
    order = []
    for _ in range(12):
        for name in names:
            world.read(name)
            if not world.believed[name]:
                world.want(name, 9.0)
        (name,) = [name for name in names if world.believed[name]]
        world.begin(name, 9.0)
        order.append(name)
        world.end(name)
    assert "".join(order) == "bac" * 4  # a has not used what it had


def test_a_slot_that_is_not_used_goes_on_after_a_moment_and_does_not_come_back_unasked() -> None:
    world = World(1, "a", "b", "c")
    world.read("a")
    world.want("b")
    world.want("c")
    world.read("a")
    assert world.told() == (0, 1, 0)
    world.now_ns += 100 * MS
    world.deal()
    assert world.told() == (0, 1, 0)  # b may not know yet
    world.read("b")
    assert world.told() == (0, 0, 0)
    world.read("b")
    assert world.told() == (0, 0, 1)
    world.read("c")
    world.begin("c")
    world.end("c")
    assert world.told() == (0, 0, 1)


def test_an_idle_process_keeps_a_slot_where_there_are_plenty_and_none_where_the_others_need_them() -> None:
    world = World(4, "a", "b")
    for name in ("a", "b"):
        world.read(name)
    world.now_ns += 1000 * MS
    for _ in range(30):
        world.begin("a")
        world.end("a")
        world.read("b")
    assert world.told() == (3, 1)
    for _ in range(40):
        while world.busy("a") < world.believed["a"]:
            world.begin("a", 4.0)
        world.end("a", 5 * MS)
    assert world.told() == (3, 0)  # b does not know yet
    world.read("b")
    assert world.told() == (4, 0)


def test_a_slot_that_its_process_may_fill_in_a_moment_stays_for_that_moment() -> None:
    world = World(1, "a", "b")
    world.read("a")
    world.want("b")
    world.read("a")
    world.read("b")
    world.want("a")
    assert world.told() == (0, 1)
    assert world.again_ns is not None
    world.now_ns = world.again_ns
    world.deal()
    world.read("b")
    assert world.told() == (1, 0)


def test_of_a_process_that_never_says_that_it_knows_no_more_is_expected_after_a_second() -> None:
    world = World(1, "a", "b")
    world.want("b")
    assert (world.told(), world.again_ns) == ((0, 0), 2000 * MS)
    world.now_ns = 2000 * MS
    world.deal()
    assert world.told() == (0, 1)


def test_what_a_process_runs_that_has_left_still_takes_its_session() -> None:
    world = World(2, "a", "b")
    world.read("a")
    world.begin("a")
    world.leases.leave("a")
    world.mail.pop("a")
    world.deal()
    assert world.told() == (1,)
    _, lease, _ = world.running.pop()
    world.leases.end(lease, MS, world.now_ns)
    world.deal()
    assert world.told() == (2,)


def test_a_lost_session_takes_a_lease_with_it() -> None:
    world = World(2, "a")
    world.read("a")
    world.slots = 1
    world.deal()
    assert world.told() == (1,)
    world.slots = 0
    world.deal()
    assert world.told() == (0,)
    world.slots = 1
    world.deal()
    assert world.told() == (1,)


def test_who_waits_behind_its_batch_gets_a_slot_that_another_has_just_used_once_that_rests() -> None:
    world = World(2, "a", "b")
    for name in ("a", "b"):
        world.read(name)
        world.begin(name)
    world.end("b", 300 * MS)  # its load counts as one slot
    world.want("a")
    assert (world.told(), world.again_ns) == ((1, 1), world.now_ns + 5 * MS)  # b may fill it in a moment
    world.now_ns += 5 * MS
    world.deal()
    world.read("b")
    assert world.told() == (2, 0)


def test_two_that_are_busy_and_want_more_leave_each_other_their_slots() -> None:
    world = World(2, "a", "b")
    for name in ("a", "b"):
        world.read(name)
        world.begin(name)
    numbers = [lease.number for lease in world.leases.of.values()]
    for _ in range(200):
        for name in ("a", "b"):
            world.want(name)
            world.end(name)
            world.now_ns += MS  # less than it takes until a slot rests
            world.begin(name)
    assert [lease.number for lease in world.leases.of.values()] == numbers


def test_who_comes_to_want_a_slot_in_a_batch_that_lasts_has_it_at_its_end() -> None:
    world = World(1, "a", "b")
    world.read("a")
    world.begin("a")
    world.now_ns += 100 * MS
    world.deal()
    world.want("b")
    world.end("a", 100 * MS)
    assert world.told() == (0, 1)


def test_beside_a_batch_that_lasts_the_others_take_turns() -> None:
    world = World(2, "a", "b", "c")
    world.want("a")
    while not world.believed["a"]:
        for name in world.mail:
            world.read(name)
    world.begin("a")
    world.want("b")
    order = []
    for _ in range(12):
        for name in ("b", "c"):
            if not world.believed[name]:
                world.want(name)
        for name in (*world.mail, *world.mail):  # one may be told only once the other has read
            world.read(name)
        name = max(("b", "c"), key=world.believed.__getitem__)
        world.now_ns += MS
        world.begin(name, 1.0 if name == "b" else 0.0)
        order.append(name)
        world.end(name, 20 * MS)
    assert "".join(order[4:]) in ("bc" * 4, "cb" * 4)


FEWER = settings(max_examples=40)
PLAY = {
    "slots": st.integers(1, 5),
    "processes": st.integers(1, 4),
    "ordered": st.booleans(),
    "events": st.lists(st.tuples(st.integers(0, 3), st.sampled_from(EVENTS), st.integers(0, 5)), max_size=80),
}


@FEWER
@given(**PLAY)
def test_nobody_waits_for_long_beside_a_session_that_nobody_uses(
    slots: int, processes: int, ordered: bool, events: list[tuple[int, str, int]]
) -> None:
    names = [str(index) for index in range(processes)]
    world = World(slots, *names, ordered=ordered)
    world.play(events)
    waiting, *others = names
    for name in names:
        world.read(name)
    for name in others:  # they begin nothing any more
        world.want(name, 0.0)
    while world.busy(waiting) < world.believed[waiting]:
        world.begin(waiting)
    world.want(waiting)
    until_ns = world.now_ns + 20 * MS
    while True:
        for name in names * 2:  # one may be told only once the other has read
            world.read(name)
        if world.again_ns is None or world.again_ns > until_ns:
            break
        assert world.again_ns > world.now_ns
        world.now_ns = world.again_ns
        world.deal()
    assert len(world.running) == slots or world.busy(waiting) < world.believed[waiting]


@FEWER
@given(**PLAY)
def test_no_batch_ever_lacks_a_session_and_whoever_wants_gets_one(
    slots: int, processes: int, ordered: bool, events: list[tuple[int, str, int]]
) -> None:
    names = [str(index) for index in range(processes)]
    world = World(slots, *names, ordered=ordered)
    world.play(events)
    for name in names:  # everybody has work from now on, and does it
        world.want(name, 1.0)
    served: set[str] = set()
    for _ in range(60):
        for name in names:
            world.read(name)
            world.want(name)
            if world.busy(name) < world.believed[name]:
                world.begin(name, 1.0)
                served.add(name)
        if world.running:
            world.end(world.running[0][0])
        world.now_ns += 6 * MS
        world.deal()
    assert served == set(names)
