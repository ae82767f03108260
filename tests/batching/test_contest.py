"""The contest of batching rules: its cases, its rivals on hand-made arrivals, and what it calls ahead."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.batching import Case, clairvoyant
from benchmarks.cases import JUDGING, MS, TUNING, Backend, DrawnCase, Luck, draw, kinds_of, seed_of
from benchmarks.contest import (
    OURS,
    Contender,
    capacity,
    choices,
    fates,
    goodput,
    leads,
    lower_bound,
    main,
    measure,
    ours,
    overloaded,
    run,
    tables,
)
from benchmarks.peer_rules import Clipper, Nexus, Symphony
from gateway.batching.batcher import Batcher
from gateway.batching.policy import Policy
from loadtest.search.simulator import SHED, Affine, Simulated, simulate

PROFILE = Affine(4 * MS, 1 * MS)
PLAIN = DrawnCase("plain", Backend(fixed_ns=4 * MS, row_ns=6 * MS, workers=1, max_rows=32), 100 * MS, "poisson", JUDGING, 0)


def served(policy: Policy, arrivals_ms: list[float], *, max_rows: int = 8, workers: int = 1) -> Simulated:
    batcher = Batcher(policy, max_rows=max_rows, workers=workers)
    return simulate(batcher, np.array([round(at * MS) for at in arrivals_ms]), PROFILE, workers=workers)


def test_no_seed_of_tuning_is_one_of_judging() -> None:
    assert TUNING != JUDGING
    for what in range(4):
        for number in range(3):
            one, other = (np.random.SeedSequence(seed_of(stream, what, number)) for stream in (TUNING, JUDGING))
            assert one.generate_state(4).tolist() != other.generate_state(4).tolist()
    names = [{draw(stream, number).name for number in range(64)} for stream in (TUNING, JUDGING)]
    assert not names[0] & names[1]
    assert not np.array_equal(*(PLAIN.arrivals_ns(1.0, 10, 0, stream) for stream in (TUNING, JUDGING)))


def test_sixty_cases_hold_every_kind_and_are_the_same_each_time() -> None:
    cases = [draw(JUDGING, number) for number in range(60)]
    assert [case.name for case in cases] == [draw(JUDGING, number).name for number in range(60)]
    assert len({kind for case in cases for kind in kinds_of(case)}) == 4 + 3 + 2 + 2 + 2 + 2 + 1 + 1 + 3
    promised = [case.slo_ns / case.backend.rows_ns(1) for case in cases if case.slo_ns]
    assert 1.5 <= min(promised) < 2
    assert 15 < max(promised) <= 20
    assert {case.backend.workers for case in cases} == {1, 2, 3, 4, 8}
    assert all(case.unit_rps > 0 for case in cases)


def test_every_rule_meets_the_same_requests_and_stalls() -> None:
    case = next(case for case in (draw(JUDGING, number) for number in range(60)) if len(case.backend.lengths) > 1)
    one, other = (case.requests_of(50, 3, JUDGING, by_shape=by_shape) for by_shape in (True, False))
    lengths = [[make(index, 0).inputs["ids"].shape[1] for index in range(50)] for make in (one, other)]
    assert lengths[0] == lengths[1]
    assert len(set(lengths[0])) > 1
    assert [one(index, 0).shape_key for index in range(50)] == lengths[0]
    assert other(0, 0).shape_key is None


def test_a_stall_lengthens_what_runs_then_and_nothing_else() -> None:
    backend = replace(PLAIN.backend, stall_every_ns=1e9, stall_ns=50.0 * MS)
    batch = Batcher(Contender(ours).batcher(PLAIN).policy, max_rows=1).probe(
        PLAIN.requests_of(1, 0, 0, by_shape=False)(0, 0), 0
    )
    luck = Luck(replace(PLAIN, backend=backend), 100_000 * MS, 0, JUDGING)
    times = {at: luck(batch, 1, at * MS) for at in range(0, 30_000, 5)}
    assert min(times.values()) == 10 * MS
    assert 55 * MS < max(times.values()) <= 60 * MS
    assert sum(time > 10 * MS for time in times.values()) == pytest.approx(30 * 60 / 5, rel=0.5)


def test_the_zero_loss_capacity_is_that_of_the_largest_batch_of_which_two_fit() -> None:
    assert PLAIN.unit_rps == pytest.approx(7 / 0.046)  # 2·(4 + 6·7) <= 100 < 2·(4 + 6·8)
    assert PLAIN.ceiling_rps == pytest.approx(16 / 0.1)
    assert replace(PLAIN, slo_ns=None).unit_rps == pytest.approx(32 / 0.196)
    assert replace(PLAIN, slo_ns=15 * MS).unit_rps == pytest.approx(100 / 2)  # not even two single ones fit: half of c


@pytest.mark.parametrize(("slo_ms", "load"), [(100, 1.2), (50, 1.2), (50, 1.5)])
def test_ours_comes_near_the_known_optimum_of_one_worker_without_luck(slo_ms: int, load: float) -> None:
    case, shares = replace(PLAIN, slo_ns=slo_ms * MS), []
    for seed in range(3):
        arrivals = case.arrivals_ns(load, 1500, seed, JUDGING)
        best = clairvoyant(Case("", 4, 6, 1, slo_ms, 32), arrivals)
        shares.append(run(case, Contender(ours), load, 1500, seed).attainment(slo_ms * MS) * 1500 / best)
    assert max(shares) <= 1
    assert np.mean(shares) >= 0.97


MIXED = DrawnCase(
    "mixed",
    Backend(fixed_ns=1.5 * MS, row_ns=0.12 * MS, workers=2, max_rows=16, lengths=tuple(range(8, 129, 8))),
    6 * MS,
    "poisson",
    TUNING,
    900,
)


@pytest.mark.slow
@pytest.mark.parametrize("load", [2, 5])
def test_lengths_that_are_left_out_are_refused_on_arrival_and_few_are_late(load: int) -> None:
    found = overloaded(MIXED, Contender(ours), load, 300, range(1))
    assert found["refused_early"] >= 70
    assert found["late"] <= 3
    assert found["goodput"] >= 80


@pytest.mark.slow
def test_lengths_that_hardly_matter_are_gathered_together_before_a_batch_each_takes_all_workers() -> None:
    flat = replace(MIXED.backend, fixed_ns=6.0 * MS, row_ns=0.05 * MS, workers=8)  # apart: 16 batches of 6 ms within 12 ms
    case = replace(MIXED, backend=flat, slo_ns=12 * MS)
    for load in (0.2, 0.4):
        assert run(case, Contender(ours), load, 500, 0).attainment(12 * MS) >= 0.99


@pytest.mark.slow
def test_a_run_that_ends_when_the_load_is_lost_finds_the_same_capacity() -> None:
    for rule in (Contender(ours), choices(PLAIN)["BentoML"][0], choices(PLAIN)["Triton, default"][0]):
        found = [
            capacity(lambda load, rule=rule, bound=bound: run(PLAIN, rule, load, 200, 0, bound=bound).attainment(100 * MS))
            for bound in (False, True)
        ]
        assert found[0] == found[1]


def test_ours_alone_has_a_table_without_leads() -> None:
    result = {"seeds": 1, "requests": 60, "date": "2026-01-01", "cases": [measure(replace(PLAIN, slo_ns=None), 60, [0], {})]}
    assert leads(result) == []
    assert "| plain |" in tables(result)
    assert "are lost" not in tables(result)


def test_a_case_is_measured_by_its_number_and_ours_alone_is_not_taken_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    alone = ["--only", "23", "--ours", "--seeds", "1", "--requests", "50"]
    main(alone)
    (out,) = tmp_path.iterdir()
    assert out.name == "contest-seeds-1-requests-50-ours.json"
    assert [case["name"][:3] for case in json.loads(out.read_text())["cases"]] == ["23:"]
    assert "| 23:" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="is of other settings"):
        main([*(word for word in alone if word != "--ours"), "--out", str(out)])


def test_rivals_that_are_known_are_not_measured_again() -> None:
    known = {"other": {"capacity": [1.0], "goodput": [2.0]}}
    measured = measure(replace(PLAIN, slo_ns=None), 60, [0], known)
    assert measured["rules"]["other"] == known["other"]
    assert set(measured["rules"]) == {"other", OURS}


def test_symphony_closes_at_the_last_moment_at_which_one_more_would_fit() -> None:
    # t(1) = 5, t(2) = 6, t(3) = 7: two that wait since 0 and 1 go at 20 - 7, when a third could no longer join.
    outcome = served(Symphony(20 * MS, PROFILE, 1), [0, 1])
    assert outcome.latencies_ns.tolist() == [19 * MS, 18 * MS]
    assert outcome.batch_rows == (2,)


def test_symphony_goes_at_once_when_full() -> None:
    assert served(Symphony(100 * MS, PROFILE, 1), [0, 1], max_rows=2).latencies_ns.tolist() == [7 * MS, 6 * MS]


def test_nexus_drops_from_the_front_until_its_target_fits() -> None:
    # Target: 2·(4 + n) <= 12, n = 2. At 11 ms, the end of the second batch, who came at 0.1 ms has no time for a batch of two.
    outcome = served(Nexus(12 * MS, PROFILE), [0, 0.1, 0.1, 0.1, 6, 6])
    assert outcome.batch_rows == (1, 2, 2)
    assert outcome.refused_ns.tolist() == [SHED, SHED, SHED, round(10.9 * MS), SHED, SHED]


def test_clipper_runs_alone_whose_time_has_passed() -> None:
    outcome = served(Clipper(3 * MS), [0, 0.1, 0.1, 0.1])
    assert outcome.batch_rows == (1, 1, 1, 1)
    assert SHED not in outcome.latencies_ns.tolist()


def test_every_rule_ends_every_request_of_a_hard_case() -> None:
    for number in (0, 7):  # lengths, tails; and one without an SLO
        case = draw(JUDGING, number)
        for settings in (*choices(case).values(), [Contender(ours)]):
            outcome = run(case, settings[-1], 1.5, 120, 0)
            assert np.all((outcome.latencies_ns >= 0) != (outcome.refused_ns >= 0))
    assert not {name for name in choices(draw(JUDGING, 7)) if "Nexus" in name or "Symphony" in name}


def test_tuned_rivals_may_run_small_batches_too() -> None:
    plain = replace(PLAIN, backend=replace(PLAIN.backend, max_rows=64))
    compiled = replace(plain, backend=replace(plain.backend, row_sizes=(1, 4, 16, 64)))
    for case, sizes in ((plain, {1, 2, 4, 8, 16, 32, 64}), (compiled, {1, 4, 16, 64})):
        assert {rule.batcher(case).max_rows for rule in choices(case)["Triton, tuned"]} == sizes
        assert len(choices(case)["Ray Serve, tuned"]) == 3 * len(sizes)


def test_a_run_lasts_twenty_limits_unless_that_takes_too_many_requests() -> None:
    assert len(PLAIN.arrivals_ns(1.0, 10, 0, JUDGING)) == math.ceil(20 * 0.1 * PLAIN.unit_rps)
    assert len(PLAIN.arrivals_ns(50.0, 10, 0, JUDGING)) == 4000
    assert len(PLAIN.arrivals_ns(1.0, 5000, 0, JUDGING)) == 5000


def test_goodput_counts_what_is_in_time_while_requests_come_after_the_first_limit() -> None:
    arrivals = np.arange(0, 301, 10) * MS  # one in 10 ms, for three limits
    latencies = np.full(31, 90 * MS)
    latencies[5], latencies[6] = 120 * MS, SHED
    outcome = Simulated(arrivals, latencies, (), Counter(), 0, 1, np.full(31, SHED))
    # Those of 10 to 200 ms end from 100 to 290: 20, of which one is late and one refused.
    assert goodput(PLAIN, outcome) == pytest.approx(100 * 18 / 0.2 / PLAIN.unit_rps)
    assert goodput(replace(PLAIN, slo_ns=None), outcome) > 0


def test_each_quarter_of_the_lengths_has_its_own_fates() -> None:
    lengths = MIXED.lengths_of(400, 3, JUDGING)  # 8 to 128 in steps of 8
    made = MIXED.requests_of(400, 3, JUDGING, by_shape=False)
    assert lengths.tolist() == [made(index, 0).inputs["ids"].shape[1] for index in range(400)]
    quarters = [lengths <= 32, (lengths > 32) & (lengths <= 64), (lengths > 64) & (lengths <= 96), lengths > 96]
    latencies = np.select(quarters, [6 * MS, SHED, SHED, 6 * MS + 1])  # the SLO is 6 ms
    refused = np.select(quarters, [SHED, 0, 1, SHED])
    outcome = Simulated(np.arange(400), latencies, (), Counter(), 0, 2, refused)
    assert fates(MIXED, outcome, 3).tolist() == np.diag([quarter.sum() for quarter in quarters]).tolist()


def test_quartiles_are_of_cases_with_lengths_and_an_slo_and_a_file_of_theirs_is_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    short = ["--only", "1", "7", "13", "--grid", "tuning", "--ours", "--seeds", "2", "--requests", "50", "--out", str(out)]
    main([*short, "--quartiles"])  # 1 has no lengths, 7 no SLO
    (case,) = json.loads(out.read_text())["cases"]
    drawn = draw(TUNING, 13)
    assert case["name"] == drawn.name
    requests = sum(len(drawn.arrivals_ns(1.5, 50, seed, JUDGING)) for seed in range(2))
    counts = np.array(case["rules"][OURS])
    assert counts.sum() == requests
    assert counts[0, 0] / counts[0].sum() > counts[3, 0] / counts[3].sum()
    printed = capsys.readouterr().out
    main(["--table", str(out)])
    assert capsys.readouterr().out == printed
    with pytest.raises(SystemExit, match="is of other settings"):
        main(short)


def test_a_capacity_is_found_to_a_hundredth_or_so() -> None:
    assert capacity(lambda load: 1.0 if load <= 0.7 else 0.0) == pytest.approx(70, abs=1.2)
    assert capacity(lambda load: 0.0) == 0


def test_the_bound_is_students_and_one_sided() -> None:
    assert lower_bound([1.0, 2.0, 3.0]) == pytest.approx(2 - 2.92 / math.sqrt(3), abs=0.001)
    assert lower_bound([5.0]) == -math.inf


def test_who_leads_by_more_than_two_points_for_certain_is_named() -> None:
    steady, shaky = [60.0, 61.0, 62.0], [70.0, 30.0, 90.0]
    mine = [50.0, 51.0, 52.0]
    rules = {
        OURS: {"capacity": mine, "goodput": mine},
        "steady": {"capacity": steady, "goodput": mine},
        "shaky": {"capacity": shaky, "goodput": [value - 9 for value in mine]},
    }
    case = {"name": "a case", "kinds": ["tight"], "unit_rps": 1.0, "rules": rules, "overload": {}}
    result = {"seeds": 3, "requests": 9, "date": "2026-01-01", "cases": [case]}
    first, second = leads(result)
    assert (first.rule, first.figure, first.mean, first.bound) == ("steady", "capacity", 10.0, 10.0)
    assert (second.rule, second.bound) == ("steady", 0.0)
    text = tables(result)
    assert "1 figures of 1 cases are lost" in text
    assert "| a case | capacity | steady | 10.0 | 10.0 |" in text
    assert "| a case | goodput (close) | steady | 0.0 | 0.0 |" in text
    assert "| tight | 1 | 1, 0 | 10.0, - |" in text
