"""The simulator itself, and the adaptive policy in situations that one decision does not show."""

from collections import Counter

import numpy as np
import pytest

from gateway.batching.adaptive import Adaptive
from gateway.batching.batch import Batch
from gateway.batching.batcher import Batcher
from gateway.batching.policies import POLICIES, Fixed, Greedy
from gateway.batching.policy import Decision, Policy
from gateway.batching.queue import Queue, State
from gateway.config import Batching, Ragged
from gateway.types import InferRequest
from loadtest.search.simulator import SHED, Affine, Simulated, simulate

MS = 1_000_000
S = 1_000 * MS
BERT = Affine(4 * MS, 6 * MS)
GPU = Affine(2 * MS, 0.15 * MS)


def poisson(rate_rps: float, seconds: float, seed: int = 0, start_ns: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return start_ns + np.cumsum(rng.exponential(1e9 / rate_rps, round(rate_rps * seconds))).astype(np.int64)


def batcher_of(policy: Policy, *, workers: int = 1, slo_ms: float | None = 100, max_rows: int = 32) -> Batcher:
    slo_ns = None if slo_ms is None else round(slo_ms * MS)
    return Batcher(policy, max_rows=max_rows, workers=workers, max_queue_rows=1 << 30, slo_ns=slo_ns)


def test_one_request_at_a_time_takes_its_service_time() -> None:
    outcome = simulate(batcher_of(Greedy()), np.array([0, 50 * MS, 100 * MS]), BERT, workers=1)
    assert outcome.latencies_ns.tolist() == [10 * MS] * 3
    assert (outcome.batch_rows, outcome.busy_ns) == ((1, 1, 1), 30 * MS)


def test_what_comes_while_the_worker_is_busy_shares_the_next_batch() -> None:
    outcome = simulate(batcher_of(Greedy()), np.array([0, 1 * MS, 2 * MS]), BERT, workers=1)
    assert outcome.batch_rows == (1, 2)
    assert outcome.latencies_ns.tolist() == [10 * MS, (10 + 16 - 1) * MS, (10 + 16 - 2) * MS]


def test_a_fixed_delay_is_waited_for() -> None:
    outcome = simulate(batcher_of(Fixed(5 * MS)), np.array([0, 3 * MS]), BERT, workers=1)
    assert outcome.latencies_ns.tolist() == [(5 + 16) * MS, (2 + 16) * MS]


def test_large_requests_end_when_their_last_part_does() -> None:
    def large(index: int, arrival_ns: int) -> InferRequest:
        return InferRequest("m", "1", "", {}, 20, arrival_ns)

    batcher = batcher_of(Greedy(), max_rows=8, slo_ms=None)
    outcome = simulate(batcher, np.array([0]), BERT, workers=1, request_of=large)
    assert outcome.batch_rows == (8, 8, 4)
    assert outcome.latencies_ns.tolist() == [(52 + 52 + 28) * MS]


def test_the_same_seed_gives_the_same_outcome() -> None:
    first, second = (simulate(batcher_of(Adaptive()), poisson(120, 5), BERT, workers=1).latencies_ns.tolist() for _ in range(2))
    assert first == second


def test_the_figures_of_an_outcome() -> None:
    outcome = simulate(batcher_of(Greedy(), slo_ms=15), np.array([0, 1 * MS, 90 * MS, 100 * MS]), BERT, workers=1)
    assert outcome.latencies_ns.tolist()[:2] == [10 * MS, 19 * MS]
    assert outcome.attainment(15 * MS) == 0.75
    assert outcome.goodput_rps(15 * MS) == pytest.approx(30)  # 3 in 100 ms
    assert outcome.percentile_ms(50) == 10
    assert outcome.mean_ms() == pytest.approx(12.25)
    assert len(outcome.after(0.5).latencies_ns) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "workers", "slo_ms", "capacity_rps"), [(BERT, 1, 100, 150), (GPU, 4, 12, 20_000)])
def test_after_an_overload_the_slo_holds_again_within_two_slos(
    profile: Affine, workers: int, slo_ms: int, capacity_rps: float
) -> None:
    slo_ns = slo_ms * MS
    calm = poisson(0.5 * capacity_rps, 40 * slo_ms / 1000)
    storm = poisson(3 * capacity_rps, 20 * slo_ms / 1000, seed=1, start_ns=int(calm[-1]))
    after = poisson(0.5 * capacity_rps, 40 * slo_ms / 1000, seed=2, start_ns=int(storm[-1]))
    outcome = simulate(
        batcher_of(Adaptive(), workers=workers, slo_ms=slo_ms, max_rows=64),
        np.concatenate([calm, storm, after]),
        profile,
        workers=workers,
    )
    late = (outcome.latencies_ns == SHED) | (outcome.latencies_ns > slo_ns)
    recovered = outcome.arrivals_ns > storm[-1] + 2 * slo_ns
    in_storm = (outcome.arrivals_ns > calm[-1] + 2 * slo_ns) & (outcome.arrivals_ns <= storm[-1])
    assert late[recovered].mean() < 0.01
    assert 1 - late[in_storm].mean() > 0.28  # of 3 times the capacity, nearly the capacity


@pytest.mark.slow
def test_a_worker_that_turns_slow_is_learned_and_nothing_is_late() -> None:
    def slower(batch: Batch, busy: int, now_ns: int) -> int:
        return round(BERT(batch, busy, now_ns) * (1 if now_ns < 20 * S else 2))

    outcome = simulate(batcher_of(Adaptive(), workers=2), poisson(200, 60), slower, workers=2)
    answered = outcome.latencies_ns[outcome.arrivals_ns > 25 * S]
    answered = answered[answered >= 0]
    assert np.mean(answered > 100 * MS) < 0.01  # what is executed is in time
    assert len(answered) / 35 > 100  # of some 140 per second that two such workers can do


@pytest.mark.parametrize("policy", POLICIES)
def test_the_requests_of_a_dead_worker_run_once_more_alone(policy: str) -> None:
    died: list[Batch] = []

    def dies(batch: Batch, now_ns: int) -> bool:
        if now_ns > S and not died:
            died.append(batch)
            return True
        return False

    batcher = batcher_of(POLICIES[policy](Batching()), workers=2, slo_ms=None)
    outcome = simulate(batcher, poisson(100, 3), BERT, workers=2, fails=dies)
    assert np.all(outcome.latencies_ns >= 0)
    assert outcome.reasons["retry"] == len(died[0].parts)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_that_fails_again_is_given_up(policy: str) -> None:
    batcher = batcher_of(POLICIES[policy](Batching()), slo_ms=None)
    outcome = simulate(batcher, np.array([0, 1 * MS]), BERT, workers=1, fails=lambda batch, now_ns: True)
    assert outcome.latencies_ns.tolist() == [SHED, SHED]
    assert outcome.reasons["retry"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_ten_thousand_that_wait_are_all_served(policy: str) -> None:
    batcher = batcher_of(POLICIES[policy](Batching()), slo_ms=None, workers=4, max_rows=64)
    outcome = simulate(batcher, np.full(10_000, 1), GPU, workers=4)
    assert np.all(outcome.latencies_ns >= 0)
    assert outcome.latencies_ns.max() < 10_000 / 64 / 4 * GPU.rows_ns(64) * 1.3


@pytest.mark.slow
def test_ten_thousand_at_once_are_decided_upon_without_delay() -> None:
    batcher = batcher_of(Adaptive(), slo_ms=100, workers=4, max_rows=64)
    outcome = simulate(batcher, np.concatenate([poisson(5000, 1), np.full(10_000, S + 1)]), GPU, workers=4)
    burst = outcome.latencies_ns[-10_000:]
    ceiling = 4 * 64 / GPU.rows_ns(64) * 100 * MS
    assert np.sum((burst >= 0) & (burst <= 100 * MS)) > 0.8 * ceiling


@pytest.mark.slow
def test_without_tuning_it_beats_fixed_settings_where_they_collapse() -> None:
    arrivals = poisson(1.5 * 152, 40)
    adaptive = simulate(batcher_of(Adaptive()), arrivals, BERT, workers=1).goodput_rps(100 * MS)
    ceiling = 160
    assert adaptive > 0.89 * ceiling
    fixed = simulate(batcher_of(Fixed(10 * MS), slo_ms=None), arrivals, BERT, workers=1).goodput_rps(100 * MS)
    assert fixed < 0.1 * ceiling


@pytest.mark.slow
@pytest.mark.parametrize(("fixed_ms", "token_ms", "rate_rps"), [(2, 0.03, 520), (20, 0.005, 850)], ids=["cpu", "accelerator"])
def test_mixed_lengths_share_batches_only_where_that_saves_time(fixed_ms: float, token_ms: float, rate_rps: float) -> None:
    ragged = Ragged(pad={"ids": 0})
    lengths = np.random.default_rng(1).integers(8, 65, 2000)

    def request(index: int, arrival_ns: int) -> InferRequest:
        inputs = {"ids": np.zeros((1, lengths[index]), dtype=np.int8)}
        return InferRequest("m", "1", "", inputs, 1, arrival_ns)

    def service(batch: Batch, busy: int, now_ns: int) -> int:
        longest = max(part.request.inputs["ids"].shape[1] for part in batch.parts)
        return round((fixed_ms + token_ms * batch.rows * longest) * MS)

    # On the CPU, a queue that pads all to the longest answers a third of this in time.
    batcher = Batcher(Adaptive(), max_rows=32, max_queue_rows=1 << 30, slo_ns=150 * MS, ragged=ragged)
    outcome = simulate(batcher, poisson(rate_rps, 2000 / rate_rps), service, workers=1, request_of=request)
    assert outcome.after(0.2).attainment(150 * MS) > 0.98


def test_a_request_that_gets_no_result_is_neither_fast_nor_in_time() -> None:
    outcome = simulate(batcher_of(Adaptive(), slo_ms=12), np.zeros(200, np.int64), BERT, workers=1)
    lost = np.count_nonzero(outcome.latencies_ns == SHED)
    assert SHED < 0 < lost < 200
    assert outcome.attainment(10**12) == pytest.approx(1 - lost / 200)
    assert outcome.mean_ms() == outcome.percentile_ms(50) > 0


def test_an_answer_in_no_time_is_an_answer() -> None:
    nothing = Simulated(np.array([0, 5]), np.array([0, 0]), (1, 1), Counter(), 0, 1, np.array([-1, -1]))
    assert (nothing.attainment(0), nothing.mean_ms(), nothing.goodput_rps(0)) == (1.0, 0.0, 4e8)
    assert np.isnan(simulate(batcher_of(Greedy()), np.empty(0, np.int64), BERT, workers=1).mean_ms())


def test_a_service_is_told_how_many_workers_run_and_when() -> None:
    told: list[tuple[int, int]] = []

    def service(batch: Batch, busy: int, now_ns: int) -> int:
        told.append((busy, now_ns))
        return 10

    simulate(batcher_of(Greedy(), workers=3, max_rows=1), np.array([0, 1, 2, 3]), service, workers=3)
    assert told == [(1, 0), (2, 1), (3, 2), (3, 10)]


def test_a_profile_says_how_long_a_batch_takes() -> None:
    assert Affine(2 * MS, 3 * MS, factor=1.5).rows_ns(4) == 21 * MS


class Never(Greedy):
    """Closes no batch and asks for no wake-up."""

    def decide(self, queue: Queue, state: State, now_ns: int, free_slots: int) -> Decision:
        return Decision(0)


def test_a_policy_that_waits_for_nothing_is_named() -> None:
    with pytest.raises(RuntimeError, match="waits for nothing"):
        simulate(batcher_of(Never(), slo_ms=None), np.array([0]), BERT, workers=1)
