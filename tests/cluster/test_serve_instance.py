"""Who starts Ray Serve on a cluster, who ends it, and that nobody deploys on one that is ending."""

import io
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorAlreadyExistsError

from gateway.cluster import serve_instance as module
from gateway.cluster.head import Head
from gateway.cluster.serve_instance import serve_instance

pytestmark = pytest.mark.ray


class OneCluster:
    """What the module asks of Ray and Serve. `meanwhile` is called for each time that passes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.controllers = 0  # that there have been
        self.runs = False
        self.jobs = {b"other": SimpleNamespace(is_dead=False, config=SimpleNamespace(metadata={}))}
        self.job = b""  # who asks
        self.marks: dict[str, bytes] = {}
        self.now_s = 0.0
        self.meanwhile: Callable[[], None] = lambda: None
        self.sys = SimpleNamespace(stdout=io.StringIO())  # which is put elsewhere
        context = SimpleNamespace(get_job_id=lambda: self.job.hex())
        monkeypatch.setattr(module, "ray", SimpleNamespace(get_actor=self.get_actor, get_runtime_context=lambda: context))
        monkeypatch.setattr(module, "serve", SimpleNamespace(start=self.start, shutdown=self.end, status=self.status))
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.sleep))
        monkeypatch.setattr(module, "sys", self.sys)
        gcs = SimpleNamespace(get_all_job_info=lambda **_: self.jobs)
        monkeypatch.setattr(module, "global_worker", SimpleNamespace(gcs_client=gcs))
        monkeypatch.setattr(module, "_internal_kv_get", self.marks.get)
        monkeypatch.setattr(module, "_internal_kv_exists", self.marks.__contains__)
        monkeypatch.setattr(module, "_internal_kv_put", self.marks.__setitem__)
        monkeypatch.setattr(module, "_internal_kv_del", self.marks.pop)

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

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(applications={})

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.meanwhile()

    def join(self, job: bytes) -> None:
        """As a `gateway serve`, whose process lives on."""
        self.jobs[job] = SimpleNamespace(is_dead=False, config=module.JOB)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[OneCluster]:
    cluster = OneCluster(monkeypatch)
    yield cluster
    cluster.sys.stdout.close()


def use(cluster: OneCluster, job: bytes = b"first") -> list[str]:
    """As one `gateway serve` does, from joining to its end. Gives what it tells."""
    told: list[str] = []
    cluster.join(job)
    cluster.job = job
    with serve_instance(Head(told.append), told.append, own=False):
        assert cluster.runs
    return told


def test_what_the_first_gateway_has_started_is_ended_by_the_last(cluster: OneCluster) -> None:
    cluster.join(b"second")  # it may be about to deploy
    assert use(cluster) == ["left Ray Serve is left on the Ray cluster"]
    assert cluster.runs
    assert use(cluster, b"second") == []
    assert (cluster.runs, cluster.controllers) == (False, 1)


def test_a_gateway_that_was_killed_keeps_it_no_longer(cluster: OneCluster) -> None:
    cluster.join(b"killed")
    cluster.jobs[b"killed"].is_dead = True
    use(cluster)
    assert not cluster.runs


def test_what_others_have_started_is_left(cluster: OneCluster) -> None:
    cluster.start()
    use(cluster)
    assert cluster.runs


def test_who_joins_while_another_is_ending_it_waits_and_starts_it_anew(cluster: OneCluster) -> None:
    cluster.start()
    cluster.marks[module._ENDING] = b"controller 1"
    cluster.meanwhile = cluster.end
    use(cluster)
    assert cluster.controllers == 2


def test_who_joins_after_another_was_killed_before_it_has_ended_it_goes_on_with_what_there_is(cluster: OneCluster) -> None:
    cluster.start()
    cluster.marks[module._ENDING] = b"controller 1"
    use(cluster)
    assert (cluster.runs, cluster.controllers, cluster.marks) == (True, 1, {})


def test_two_that_start_it_at_once_use_the_same(cluster: OneCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**_: object) -> None:
        cluster.start()
        cluster.start()

    monkeypatch.setattr(module.serve, "start", start)
    use(cluster)
    assert (cluster.runs, cluster.controllers) == (True, 1)
