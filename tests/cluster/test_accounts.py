"""Who counts what a replica counts, in simulated time: each piece once, whoever ends and whatever is lost on the way."""

import random
from collections.abc import Iterator

import pytest

from gateway.cluster.accounts import GIVE_UP_NS, Blocks, Division, ReplicaAccount
from gateway.engine.metric_blocks import FIELDS, Key, State, place

pytestmark = pytest.mark.ray  # the package imports it

COST = Key("cost", ("m", "1", "synthetic"))
PROCESS = Key("process", ("replica",))
TICK_NS = 100_000_000
TICK_S = TICK_NS / 1e9
_PUBLISH_TICKS = 10


class Ingress:
    """On another node than the replica. published: what of its account outlives it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.account = ReplicaAccount()
        self.published: Blocks = {}
        self.lives = True
        self.reached = False
        self.hangs = False
        self.said = 0  # the number of it, as the replica has heard
        self.heard = True  # what it says arrives, by this connection
        self.coming: list[tuple[int, Blocks]] = []

    @property
    def blocks(self) -> Blocks:
        return self.account.blocks if self.lives else self.published


class Nodes:
    """A replica that costs a dollar a second, and the ingresses that may count it. Time passes by `run`."""

    def __init__(self, *names: str) -> None:
        self.division = Division()
        self.ingresses = {name: Ingress(name) for name in names}
        self.own: Blocks = {}  # what its own node has of it
        self.at_home = False  # an ingress lives there
        self.replica_lives = True
        self.ticks = 0

    @property
    def now_ns(self) -> int:
        return self.ticks * TICK_NS

    @property
    def spent(self) -> float:
        return self.ticks * TICK_S

    @property
    def counted(self) -> float:
        return sum(map(usd, [self.own, *(ingress.blocks for ingress in self.ingresses.values())]))

    def connect(self, *names: str) -> None:
        for name in names:
            ingress = self.ingresses[name]
            ingress.heard = True
            ingress.reached = self.division.connected(name, ingress.account.number, self.now_ns)
            if ingress.reached:
                self._say(ingress)

    def break_off(self, name: str) -> None:
        """What is on its way is lost."""
        ingress = self.ingresses[name]
        if ingress.reached:
            ingress.reached = False
            ingress.coming.clear()
            ingress.account.disconnected()
            self.division.disconnected(name)

    def kill(self, name: str) -> None:
        self.ingresses[name].lives = False
        self.break_off(name)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            if self.replica_lives:
                self._tick()
            for number, ingress in enumerate(self.ingresses.values()):
                if ingress.lives and not ingress.hangs:
                    if ingress.reached and ingress.account.lapsed(self.now_ns):
                        self.break_off(ingress.name)
                        self.connect(ingress.name)
                    for telling in ingress.coming:
                        ingress.account.told(*telling)
                    ingress.coming.clear()
                    if (self.ticks + number) % _PUBLISH_TICKS == 0:
                        self._publish(ingress)

    def _tick(self) -> None:
        self.ticks += 1
        total = {COST: cost(self.ticks), PROCESS: process(self.ticks)}
        self.own, told = self.division.divide(total, ingress_lives=self.at_home, now_ns=self.now_ns)
        for telling in told:
            assert self.ingresses[telling.account].reached
            self.ingresses[telling.account].coming.append((telling.number, telling.blocks))

    def _publish(self, ingress: Ingress) -> None:
        ingress.published, ingress.account.published = ingress.account.blocks, ingress.account.number
        if ingress.reached:
            self._say(ingress)

    def _say(self, ingress: Ingress) -> None:
        ingress.account.said_ns = self.now_ns
        if ingress.heard:
            ingress.said = ingress.account.published
            self.division.published(ingress.name, ingress.said, self.now_ns)


def cost(ticks: int) -> State:
    busy = ticks // 3
    return {"busy": busy * TICK_S, "idle": (ticks - busy) * TICK_S}, 3600.0, 1


def process(ticks: int) -> State:
    return 1, ticks * TICK_NS, 1000, 5.0, (ticks, 0, ticks * 7), {"exported": ticks} if ticks > 20 else None, None


def usd(blocks: Blocks) -> float:
    state = blocks.get(COST)
    return sum(state[0].values()) if state is not None else 0.0


def replicas(blocks: Blocks) -> int:
    state = blocks.get(COST)
    return (state[place("cost", "gateway_replicas")] or 0) if state is not None else 0


def numbers(blocks: Blocks) -> Iterator[tuple[str, float]]:
    """Its counters, each with a name."""
    for key, state in blocks.items():
        for field, value in zip(FIELDS[key.kind], state, strict=True):
            if field.metric is not None and field.metric.kind != "gauge" and value is not None:
                inner = (
                    dict(enumerate(value)) if isinstance(value, tuple) else value if isinstance(value, dict) else {"": value}
                )
                yield from ((f"{key} {field.name} {name}", number) for name, number in inner.items())


def test_what_comes_before_anybody_is_there_goes_to_the_first_and_all_of_it() -> None:
    nodes = Nodes("a", "b")
    nodes.run(20)  # its model loads
    assert nodes.counted == pytest.approx(20)  # in its file, which an ingress of its node would find
    nodes.connect("a", "b")
    nodes.run(10)
    assert usd(nodes.ingresses["a"].blocks) == pytest.approx(30)
    assert nodes.counted == pytest.approx(30)
    assert [replicas(ingress.blocks) for ingress in nodes.ingresses.values()] == [1, 0]
    assert replicas(nodes.own) == 0
    assert dict(numbers(nodes.ingresses["a"].blocks)) == dict(numbers({COST: cost(300), PROCESS: process(300)}))


def test_an_answer_that_is_lost_counts_nothing_twice() -> None:
    nodes = Nodes("a", "b")
    nodes.connect("a", "b")
    nodes.run(5)
    nodes.ingresses["a"].heard = False
    nodes.run(3)  # told, and published, and the replica does not know
    nodes.break_off("a")
    nodes.run(1)
    nodes.connect("a")
    nodes.run(1)
    assert nodes.counted == pytest.approx(10)
    assert usd(nodes.ingresses["b"].blocks) == pytest.approx(2)  # what came since


def test_what_was_told_again_changes_nothing() -> None:
    account = ReplicaAccount()
    account.told(2, {COST: cost(2)})
    account.told(2, {COST: cost(2)})
    account.told(1, {COST: cost(1)})
    assert usd(account.blocks) == pytest.approx(0.2)


def test_what_an_ingress_has_published_counts_after_its_kill_and_the_next_has_the_rest() -> None:
    nodes = Nodes("a", "b")
    nodes.connect("a", "b")
    nodes.run(10.4)
    nodes.kill("a")
    nodes.run(GIVE_UP_NS / 1e9 + 2)
    assert 9 < usd(nodes.ingresses["a"].blocks) < 10.4
    assert nodes.counted == pytest.approx(nodes.spent)
    assert replicas(nodes.ingresses["b"].blocks) == 1


def test_an_ingress_that_has_published_all_and_goes_has_a_successor_at_once() -> None:
    nodes = Nodes("a", "b")
    nodes.connect("a", "b")
    nodes.run(10)
    nodes.break_off("a")
    nodes.run(TICK_S)
    assert (usd(nodes.ingresses["a"].blocks), usd(nodes.ingresses["b"].blocks)) == (pytest.approx(10), pytest.approx(TICK_S))


def test_a_silent_ingress_that_comes_back_is_made_up_for() -> None:
    nodes = Nodes("a", "b")
    nodes.connect("a", "b")
    nodes.run(10)
    nodes.ingresses["a"].hangs = True
    nodes.run(20)
    assert nodes.counted == pytest.approx(nodes.spent)  # b has all of it
    nodes.ingresses["a"].hangs = False  # and has been told 5 s more, which b was told as well
    nodes.run(1)
    assert nodes.counted == pytest.approx(nodes.spent)
    assert [replicas(ingress.blocks) for ingress in nodes.ingresses.values()] == [0, 1]


@pytest.mark.parametrize("after_s", [0.2, 2])
def test_of_a_replica_that_ends_soon_after_its_ingress_all_is_counted_but_what_was_not_published(after_s: float) -> None:
    nodes = Nodes("a", "b")
    nodes.connect("a", "b")
    nodes.run(10.9)
    nodes.kill("a")
    nodes.run(after_s)
    assert nodes.counted == pytest.approx(nodes.spent - 0.9)
    assert replicas(nodes.ingresses["b"].blocks) == 1


def test_an_ingress_of_its_own_node_has_what_comes_while_it_lives() -> None:
    nodes = Nodes("a")
    nodes.connect("a")
    nodes.run(10)
    nodes.at_home = True
    nodes.run(5)
    assert (usd(nodes.own), usd(nodes.ingresses["a"].blocks)) == (pytest.approx(5), pytest.approx(10))
    assert (replicas(nodes.own), replicas(nodes.ingresses["a"].blocks)) == (1, 0)
    nodes.at_home = False
    nodes.run(2)
    assert (usd(nodes.own), usd(nodes.ingresses["a"].blocks)) == (pytest.approx(5), pytest.approx(12))
    assert replicas(nodes.own) == 0


def test_of_a_killed_replica_what_was_told_last_counts_on_and_it_no_longer_lives() -> None:
    nodes = Nodes("a")
    nodes.connect("a")
    nodes.run(10)
    nodes.replica_lives = False
    nodes.break_off("a")
    nodes.run(60)
    assert nodes.counted == pytest.approx(10)
    assert replicas(nodes.ingresses["a"].blocks) == 0


def test_an_account_that_was_forgotten_is_refused_and_another_is_opened() -> None:
    nodes = Nodes("a", "again")
    nodes.connect("a")
    nodes.run(10)
    nodes.break_off("a")
    nodes.run(200)
    nodes.connect("a")
    assert not nodes.ingresses["a"].reached
    nodes.connect("again")
    nodes.run(1)
    assert nodes.counted == pytest.approx(nodes.spent, abs=1.1)  # it had been told so much that it did not publish
    assert usd(nodes.ingresses["again"].blocks) > 200


@pytest.mark.parametrize("seed", range(15))
def test_whatever_happens_no_counter_goes_back_and_in_the_end_all_is_counted_once(seed: int) -> None:
    chance = random.Random(seed)
    nodes = Nodes("a", "b", "c", "last")
    nodes.connect("a", "b", "c")
    before: dict[str, dict[str, float]] = {name: {} for name in nodes.ingresses}
    for _ in range(60):
        ingress = nodes.ingresses[chance.choice("abc")]
        match chance.randrange(8):
            case 0:
                nodes.break_off(ingress.name)
            case 1 | 2 if ingress.lives and not ingress.hangs:
                nodes.break_off(ingress.name)
                nodes.connect(ingress.name)
            case 3 if ingress.reached:
                ingress.heard = not ingress.heard
            case 4:
                nodes.at_home = not nodes.at_home
            case 5:
                ingress.hangs = not ingress.hangs
            case 6 if ingress.said == ingress.account.published and chance.random() < 0.1:
                nodes.kill(ingress.name)
                before[ingress.name] = {}
        for _ in range(chance.randrange(20)):
            nodes.run(TICK_S)
            for name, each in nodes.ingresses.items():
                now = dict(numbers(each.blocks))
                assert not each.lives or all(now[counter] >= value for counter, value in before[name].items())
                before[name] = now
        # What is told and not known to be published is counted twice at most.
        assert nodes.spent - 1e-6 <= nodes.counted + unheard(nodes)
        assert nodes.counted <= nodes.spent + 3 * (GIVE_UP_NS / 1e9 + 1)
    for ingress in nodes.ingresses.values():
        if ingress.lives:
            ingress.hangs = False
            nodes.break_off(ingress.name)
            nodes.connect(ingress.name)
    nodes.at_home = False
    nodes.run(60)
    assert nodes.counted == pytest.approx(nodes.spent, abs=1e-6)


def unheard(nodes: Nodes) -> float:
    """What ingresses were told and have not taken yet, or not published before they were killed."""
    told = 0.0
    for name, ingress in nodes.ingresses.items():
        account = nodes.division._accounts.get(name)
        if account is not None:
            told += max(0.0, usd(account.sent[max(account.sent)]) - usd(ingress.blocks))
    return told
