"""What the adaptive policy rehearses, and that it serves by what did best."""

import numpy as np
import pytest

from benchmarks.cases import TUNING, Backend, DrawnCase, draw
from benchmarks.contest import Contender, goodput, ours, run
from gateway.batching.adaptive import Adaptive
from gateway.batching.batch import Batch
from gateway.batching.batcher import Batcher
from gateway.batching.recording import LaneSettings, RecordedBatcher, Ring
from gateway.batching.replay import replay
from gateway.batching.stances import AT_ONCE, PLANNED, Stance
from gateway.types import InferRequest
from loadtest.search.simulator import Affine, Simulated, simulate
from tests.batching.test_recording import read, same

MS = 1_000_000


class Noisy:
    """Flat and noisy: t = 7 + .2·rows ms, times e^N(0, .3)."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(5)

    def __call__(self, batch: Batch, busy: int, now_ns: int) -> int:
        return round((7 + 0.2 * batch.padded_rows) * MS * float(np.exp(self._random.normal(-0.045, 0.3))))


def arrivals_ns(rate: float, count: int) -> np.ndarray:
    return np.cumsum(np.random.default_rng(3).exponential(1e9 / rate, count)).astype(np.int64)


def served(stance: Stance | None, slo_ns: int, rate: float) -> Simulated:
    policy = Adaptive(stance)
    batcher = Batcher(policy, max_rows=32, slo_ns=slo_ns)
    for rows in batcher.probe_rows:
        policy.service.probe(None, rows, [round((7 + 0.2 * rows) * MS)] * 2)
    return simulate(batcher, arrivals_ns(rate, 8000), Noisy(), workers=1)


def test_where_another_rule_does_better_it_is_followed() -> None:
    slo_ns = 18 * MS
    planned = served(PLANNED, slo_ns, 1800)
    rehearsed = served(None, slo_ns, 1800)
    assert rehearsed.attainment(slo_ns) > planned.attainment(slo_ns) + 0.05


def followed(runs: Noisy | Affine, workers: int, came_ns: np.ndarray, slo_ns: int = 18 * MS) -> list[Stance]:
    """The stance that each request finds followed."""
    policy = Adaptive()
    batcher = Batcher(policy, max_rows=32, workers=workers, slo_ns=slo_ns)
    for rows in batcher.probe_rows:
        policy.service.probe(None, rows, [round((7 + 0.2 * rows) * MS)] * 2)
    found: list[Stance] = []

    def asked(_: int, arrival_ns: int) -> InferRequest:
        found.append(policy.stance)
        return InferRequest("m", "1", "", {}, 1, arrival_ns)

    simulate(batcher, came_ns, runs, workers=workers, request_of=asked)
    return found


def test_until_a_rehearsal_has_told_one_worker_whose_times_scatter_goes_at_once() -> None:
    came_ns = arrivals_ns(1800, 200)  # too few to have told anything
    assert followed(Noisy(), 1, came_ns)[100:] == [AT_ONCE] * 100
    assert set(followed(Affine(7 * MS, MS // 5), 1, came_ns)) == {PLANNED}
    assert set(followed(Noisy(), 2, came_ns)) == {PLANNED}
    assert set(followed(Noisy(), 1, came_ns, 30 * MS)) == {PLANNED}  # there is time to collect while a batch runs


def test_a_load_that_was_not_rehearsed_finds_the_stance_of_the_least_unlike() -> None:
    usual_ns = arrivals_ns(1800, 4000)
    more_ns = usual_ns[-1] + arrivals_ns(3600, 200)
    stances = followed(Noisy(), 2, np.concatenate([usual_ns, more_ns]))
    assert stances[4000] != PLANNED
    assert set(stances[4000:]) == {stances[4000]}


def test_without_luck_several_workers_hold_until_the_last_moment_where_that_serves_more() -> None:
    slo_ns, backend = round(11.7 * MS), Affine(6 * MS, 0.93 * MS)
    missed: dict[Stance | None, float] = {}
    stance: Stance | None
    for stance in (PLANNED, None):
        policy = Adaptive(stance)
        batcher = Batcher(policy, max_rows=32, workers=2, slo_ns=slo_ns)
        for rows in batcher.probe_rows:
            policy.service.probe(None, rows, [backend.rows_ns(rows)] * 2)
        outcome = simulate(batcher, arrivals_ns(150, 6000), backend, workers=2)
        missed[stance] = 1 - outcome.attainment(slo_ns)
    assert missed[None] < 0.5 * missed[PLANNED]


def test_with_time_enough_nothing_is_rehearsed() -> None:
    slo_ns = 80 * MS
    planned = served(PLANNED, slo_ns, 2000)
    rehearsed = served(None, slo_ns, 2000)
    assert np.array_equal(rehearsed.latencies_ns, planned.latencies_ns)


def test_what_is_rehearsed_is_replayed() -> None:
    """Begun in the middle of one, too: a recording begins with none."""
    made = LaneSettings(slo_ns=18 * MS, max_rows=32, model_rows=32, sessions=1)
    batcher = made.batcher(Ring(600_000, made))
    assert isinstance(batcher, RecordedBatcher)
    batcher.record()
    simulate(batcher, arrivals_ns(1500, 8000), Noisy(), workers=1)
    recorded = read(batcher)
    assert len(recorded["segments"]) > 2
    same(replay(recorded))


def mixed_lengths(stance: Stance | None, case: DrawnCase) -> float:
    """Goodput at 1.5 times the load."""

    def batcher(case: DrawnCase) -> Batcher:
        policy, backend = Adaptive(stance), case.backend
        found = Batcher(policy, max_rows=backend.max_rows, workers=backend.workers, slo_ns=case.slo_ns, ragged=backend.ragged)
        for rows in found.probe_rows:
            asked = InferRequest("m", "1", "", {"ids": np.zeros((rows, 1), np.int8)}, rows, 0)
            policy.service.probe(found.probe(asked, 0).group, rows, [round(backend.time_ns(rows, 1))] * 2)
        return found

    return goodput(case, run(case, Contender(batcher), 1.5, 1500, 0))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_lengths_that_are_decided_on_apart_are_rehearsed_too(workers: int) -> None:
    lengths = (8, 16, 24, 32, 48, 64, 96, 320)
    backend = Backend(fixed_ns=6 * MS, row_ns=0.4 * MS, workers=workers, max_rows=16, noise=0.15, lengths=lengths)
    case = DrawnCase("mixed", backend, 15 * MS, "poisson", TUNING, 902)
    assert mixed_lengths(None, case) > mixed_lengths(PLANNED, case) + 10


def test_what_is_rehearsed_of_lengths_is_replayed() -> None:
    made = LaneSettings(
        slo_ns=18 * MS, max_rows=32, model_rows=32, sessions=2, ragged={"pad": {"ids": 0}, "buckets": [16, 32, 64]}
    )
    batcher = made.batcher(Ring(600_000, made))
    assert isinstance(batcher, RecordedBatcher)
    batcher.record()
    lengths = np.random.default_rng(4).choice([8, 20, 60], 8000).tolist()
    arrays = {length: {"ids": np.zeros((1, length), np.int8)} for length in set(lengths)}
    policy = batcher.policy
    assert isinstance(policy, Adaptive)
    followed: set[Stance] = set()

    def asked(index: int, arrival_ns: int) -> InferRequest:
        followed.add(policy.stance)
        return InferRequest("m", "1", "", arrays[lengths[index]], 1, arrival_ns)

    simulate(batcher, arrivals_ns(3000, 8000), Noisy(), workers=2, request_of=asked)
    assert len(followed) > 1
    recorded = read(batcher)
    assert len(recorded["segments"]) > 2
    same(replay(recorded))


@pytest.mark.slow
def test_who_has_fallen_behind_is_left_for_who_makes_up_for_it() -> None:
    # Planned, each of 16 lengths gathers a batch of its own: while little waits they join, once much does hardly any can.
    case = draw(2, 298)
    outcome = run(case, Contender(ours), 0.55, 6000, 0)
    in_time = outcome.latencies_ns <= case.limit_ns
    in_time &= outcome.latencies_ns >= 0
    assert np.mean(in_time[-2000:]) > 0.99
