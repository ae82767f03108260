"""Who starts Ray Serve on a cluster, who ends it, and that nobody deploys on one that is ending."""

import contextlib
import io
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorAlreadyExistsError, ActorDiedError

from gateway.cluster import serve_instance as module
from gateway.cluster.head import Head
from gateway.cluster.serve_instance import serve_instance
from gateway.cluster.stopping import Stop, StopAsked

pytestmark = pytest.mark.ray


class OneCluster:
    """What the module asks of Ray and Serve. `meanwhile` is called for each time that passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.controllers = 0  # that there have been
        self.runs = False
        self.jobs = {b"other": SimpleNamespace(is_dead=False)}
        self.job = b""  # who asks
        self.marks: dict[str, bytes] = {}
        self.status: Callable[[], SimpleNamespace] = lambda: SimpleNamespace(applications={})
        self.now_s = 0.0
        self.meanwhile: Callable[[], None] = lambda: None
        self.sys = SimpleNamespace(stdout=io.StringIO())  # which is put elsewhere
        context = SimpleNamespace(get_job_id=lambda: self.job.hex())
        monkeypatch.setattr(module, "ray", SimpleNamespace(get_actor=self.get_actor, get_runtime_context=lambda: context))
        monkeypatch.setattr(module, "serve", SimpleNamespace(start=self.start, shutdown=self.end, status=lambda: self.status()))
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.sleep))
        monkeypatch.setattr(module, "sys", self.sys)
        gcs = SimpleNamespace(get_all_job_info=lambda **_: self.jobs)
        monkeypatch.setattr(module, "global_worker", SimpleNamespace(gcs_client=gcs))
        monkeypatch.setattr(module, "_internal_kv_get", self.marks.get)
        monkeypatch.setattr(module, "_internal_kv_list", lambda prefix: [key.encode() for key in self.marks if prefix in key])
        monkeypatch.setattr(module, "_internal_kv_put", self.put)
        monkeypatch.setattr(module, "_internal_kv_del", lambda key: self.marks.pop(key, None))

    def put(self, key: str, value: str | bytes) -> None:
        self.marks[key] = value if isinstance(value, bytes) else value.encode()

    def get_actor(self, _name: str, **_: str) -> str:
        if not self.runs:
            raise ValueError
        return f"controller {self.controllers}"

    def start(self, **_: object) -> None:
        if self.runs:
            raise ActorAlreadyExistsError("")
        self.controllers += 1
        self.runs = True

    def end(self) -> None:
        self.runs = False

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.meanwhile()

    def join(self, job: bytes) -> None:
        """As a `gateway serve`, whose process lives on."""
        self.jobs[job] = SimpleNamespace(is_dead=False)
        self.marks[module._JOINED + job.hex()] = b""

    def mark_ending(self, job: bytes) -> str:
        """As a `gateway serve` that is about to end it."""
        self.jobs[job] = SimpleNamespace(is_dead=False)
        mark = f"{module._ENDING}controller {self.controllers} {job.hex()}"
        self.marks[mark] = b""
        return mark


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[OneCluster]:
    cluster = OneCluster(monkeypatch)
    yield cluster
    cluster.sys.stdout.close()


def use(cluster: OneCluster, job: bytes = b"first") -> list[str]:
    """As one `gateway serve` does, from joining to its end. Gives what it tells."""
    told: list[str] = []
    cluster.jobs[job] = SimpleNamespace(is_dead=False)
    cluster.job = job
    with serve_instance(Head(told.append), told.append, Stop(), own=False):
        assert cluster.runs
    return told


LEFT = ["left Ray Serve may be left on the Ray cluster"]


def test_what_the_first_gateway_has_started_is_ended_by_the_last(cluster: OneCluster) -> None:
    cluster.join(b"second")  # it may be about to deploy
    assert use(cluster) == LEFT
    assert cluster.runs
    assert use(cluster, b"second") == LEFT
    assert (cluster.runs, cluster.controllers) == (False, 1)


def test_it_is_left_to_no_gateway_that_has_not_told_of_what_it_may_leave(cluster: OneCluster) -> None:
    seen: list[bool] = []

    def tell(_: str) -> None:
        seen.append(any(key.startswith(module._JOINED) for key in cluster.marks))

    with serve_instance(Head(tell), tell, Stop(), own=False):
        assert seen == [False]


def test_a_gateway_that_is_stopped_as_it_joins_ends_what_was_left_to_it(cluster: OneCluster) -> None:
    cluster.join(b"second")
    use(cluster)
    stop = Stop()
    stop.hear(0, None)
    cluster.job = b"second"
    with pytest.raises(StopAsked), serve_instance(Head(pytest.fail), lambda _: None, stop, own=False):
        pytest.fail("deployed")
    assert not cluster.runs


def test_a_gateway_that_was_killed_keeps_it_no_longer(cluster: OneCluster) -> None:
    cluster.join(b"killed")
    cluster.jobs[b"killed"].is_dead = True
    use(cluster)
    assert not cluster.runs


def test_what_others_have_started_is_left(cluster: OneCluster) -> None:
    cluster.start()
    assert use(cluster) == []
    assert cluster.runs


def test_what_fails_as_it_starts_is_ended(cluster: OneCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**_: object) -> None:
        cluster.start()
        raise TimeoutError

    monkeypatch.setattr(module.serve, "start", start)
    with pytest.raises(TimeoutError):
        use(cluster)
    assert (cluster.runs, cluster.controllers) == (False, 1)


def test_who_joins_while_another_is_ending_it_waits_and_starts_it_anew(cluster: OneCluster) -> None:
    cluster.start()
    cluster.mark_ending(b"another")
    cluster.meanwhile = cluster.end
    use(cluster)
    assert cluster.controllers == 2


def test_who_joins_after_another_was_killed_before_it_has_ended_it_goes_on_with_what_there_is(cluster: OneCluster) -> None:
    cluster.start()
    cluster.mark_ending(b"killed")
    alive = cluster.mark_ending(b"alive")
    cluster.jobs[b"killed"].is_dead = True
    use(cluster)
    assert (cluster.runs, cluster.controllers, cluster.marks) == (True, 1, {alive: b""})


@pytest.mark.parametrize("error", [None, ActorDiedError(), TimeoutError()])
def test_who_does_not_end_it_takes_back_no_mark_but_its_own(cluster: OneCluster, error: Exception | None) -> None:
    kept: list[str] = []

    def status() -> SimpleNamespace:
        kept.append(cluster.mark_ending(b"another"))
        if error is not None:
            raise error
        return SimpleNamespace(applications={"of another": ""})

    cluster.status = status
    with pytest.raises(TimeoutError) if isinstance(error, TimeoutError) else contextlib.nullcontext():
        use(cluster)
    assert cluster.runs
    assert [key for key in cluster.marks if key.startswith(module._ENDING)] == kept


def test_two_that_start_it_at_once_use_the_same(cluster: OneCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**_: object) -> None:
        cluster.start()
        cluster.start()

    monkeypatch.setattr(module.serve, "start", start)
    use(cluster)
    assert (cluster.runs, cluster.controllers) == (True, 1)
