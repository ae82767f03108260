"""What a comparison reckons, against SciPy's tests, and what it says."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy import stats

from loadtest.errors import UsageError
from loadtest.load.patterns import schedule
from loadtest.results import Block, Interval, ObjectiveResult, RunResult, Verdict
from loadtest.verdict.comparison import ComparedMetric, cells, compare, junit, markdown
from tests.loadtest.test_compare import SPEC, levels, made


def metric(name: str, verdict: str = "same", number: float | None = 0.0123) -> ComparedMetric:
    return ComparedMetric(name, number, number, number, number, number, 0.05, verdict)  # type: ignore[arg-type]


def settled_later(result: RunResult, warmup: int) -> RunResult:
    return replace(result, blocks=tuple(replace(block, warmup=block.index < warmup) for block in result.blocks))


def other_seed(result: RunResult) -> RunResult:
    return replace(result, spec=replace(result.spec, seed=1))


def differing(values: np.ndarray) -> np.ndarray:
    """In an order in which neighbours differ: nothing says that they depend on each other."""
    ordered = np.sort(values)
    return np.stack((ordered[::2], ordered[1::2][::-1]), axis=1).ravel()


def test_paired_blocks_are_compared_by_students_test_on_the_logarithm() -> None:
    new = levels() * differing(np.random.default_rng(1).lognormal(0.05, 0.1, 22))
    found = compare(made(levels()), made(new)).metrics[0]
    expected = stats.ttest_rel(np.log(new[2:]), np.log(levels()[2:])).confidence_interval(1 - 0.05 / 5)
    assert (found.lower, found.upper) == pytest.approx((np.expm1(expected.low), np.expm1(expected.high)))
    assert found.change == pytest.approx(np.expm1(np.mean(np.log(new[2:] / levels()[2:]))))


def test_runs_that_cannot_be_paired_are_compared_by_welchs_test() -> None:
    # Blocks 2 to 21 of one against 8 to 21 of the other, of which the second is steadier.
    old, new = differing(levels()), differing(np.random.default_rng(5).lognormal(2.2, 0.1, 22))
    comparison = compare(made(old), settled_later(other_seed(made(new)), 8))
    found = comparison.metrics[0]
    expected = stats.ttest_ind(np.log(new[8:]), np.log(old[2:]), equal_var=False).confidence_interval(1 - 0.05 / 5)
    assert (found.lower, found.upper) == pytest.approx((np.expm1(expected.low), np.expm1(expected.high)))
    assert (comparison.paired, comparison.blocks) == (False, 14)


def test_pairs_begin_where_both_runs_have_settled() -> None:
    slow_start = np.where(np.arange(22) < 6, 50.0, 1.0) * levels()
    for base, new in ((made(levels()), made(slow_start)), (made(slow_start), made(levels()))):
        comparison = compare(settled_later(base, 6), settled_later(new, 2))
        assert (comparison.verdict, comparison.paired, comparison.blocks) == ("same", True, 16)
        comparison = compare(settled_later(base, 2), settled_later(new, 6))
        assert (comparison.verdict, comparison.paired, comparison.blocks) == ("same", True, 16)


def test_runs_whose_blocks_differ_are_not_paired() -> None:
    base, longer = made(levels()), made(levels(blocks=23))
    wider = replace(base, blocks=tuple(replace(block, duration_s=1.5) for block in base.blocks))
    for one, other in ((base, longer), (longer, base), (base, wider), (wider, base)):
        assert not compare(one, other).paired


def test_blocks_without_an_answer_have_no_latency_to_compare() -> None:
    base = made(levels())
    silent = replace(base, blocks=tuple(replace(block, p50_ms=None) if block.index == 9 else block for block in base.blocks))
    assert compare(base, silent).metrics[0].change == 0
    assert compare(other_seed(silent), base).metrics[0].change == pytest.approx(0, abs=0.2)
    dead = replace(base, latency=replace(base.latency, count=0))
    assert [metric.new for metric in compare(base, dead).metrics[:3]] == [None, None, None]
    assert [metric.base for metric in compare(dead, base).metrics[:3]] == [None, None, None]


def test_five_blocks_are_enough_and_four_are_not() -> None:
    for change in (lambda result: result, other_seed):
        five, four = (compare(made(levels(blocks=n)), change(made(levels(blocks=n)))) for n in (7, 6))
        assert all(metric.change is not None for metric in five.metrics)
        assert all(metric.change is None and metric.verdict == "undecided" for metric in four.metrics)


def test_runs_of_one_block_or_none_are_undecided() -> None:
    alone = made(levels(blocks=1))
    assert compare(alone, alone).verdict == "undecided"
    assert compare(replace(alone, blocks=()), replace(alone, blocks=())).verdict == "undecided"


def test_an_interval_that_leaves_the_tolerance_on_one_side_is_undecided() -> None:
    for sign in (1, -1):
        changes = np.exp(sign * (0.04 + np.where(np.arange(22) % 2, 0.06, -0.06)))
        comparison = compare(made(levels()), made(levels() * changes))
        assert comparison.metrics[0].verdict == "undecided"


def test_no_difference_is_the_same_without_any_tolerance() -> None:
    assert compare(made(levels()), made(levels()), tolerance=0, share_tolerance=0).verdict == "same"


def test_more_in_time_is_an_improvement_and_less_a_regression_beyond_the_tolerance_of_shares() -> None:
    less = compare(made(levels()), made(levels(), met=0.98))
    assert less.metrics[3].verdict == "regression"
    assert less.metrics[3].change == pytest.approx(-0.02)
    assert compare(made(levels()), made(levels(), met=0.98), share_tolerance=0.021).verdict == "same"
    assert compare(made(levels(), met=0.98), made(levels())).verdict == "improvement"


def test_a_change_of_just_the_tolerance_is_not_beyond_it() -> None:
    # 0.99 - 0.995 is -0.0050000000000000044.
    worse = compare(made(levels(), met=0.995), made(levels(), met=0.99))
    assert worse.metrics[3].verdict == "same"
    assert compare(made(levels(), met=0.995), made(levels(), met=0.985)).metrics[3].verdict == "regression"
    slower = compare(made(levels()), made(levels() * 1.1), tolerance=0.1)  # 1.1 - 1 is more than 0.1
    assert [metric.verdict for metric in slower.metrics] == ["same"] * 5


def failing(result: RunResult, failed: int) -> RunResult:
    """So many of each block's 200 requests fail, and nobody judges."""
    blocks = tuple(replace(block, met=200 - failed, failed=failed) for block in result.blocks)
    succeeded = round(result.requests * (1 - failed / 200))
    return replace(result, blocks=blocks, succeeded=succeeded, attainment=None, verdict=None, spec=replace(SPEC, slo=None))


def test_what_fails_fast_is_a_regression_also_where_nobody_asked_for_an_slo() -> None:
    base, new = failing(made(levels()), 0), failing(made(levels() * 0.5), 94)
    found = compare(base, new)
    assert found.verdict == "regression"
    assert cells(found.metrics[-1]) == (
        "succeeded", "100.000%", "53.000%", "-47.00 points", "-47.00 points to -47.00 points", "regression",
    )  # fmt: skip
    assert compare(new, base).metrics[-1].verdict == "improvement"
    assert compare(base, failing(made(levels()), 1)).verdict == "same"  # 0.5 % are the tolerance


def outages(down: np.ndarray, *, slo: bool = False) -> RunResult:
    """down: of each block of a second, the share of its 200 requests that failed. The first two are warm-up."""
    failed = np.rint(200 * down).astype(int)
    blocks = tuple(
        replace(block, met=200 - lost, failed=lost, p50_ms=block.p50_ms if lost < 200 else None)
        for block, lost in zip(made(levels(blocks=len(down))).blocks, failed.tolist(), strict=True)
    )
    requests = 200 * (len(down) - 2)
    result = replace(made(levels()), blocks=blocks, requests=requests, succeeded=requests - int(failed[2:].sum()))
    return result if slo else replace(result, attainment=None, verdict=None, spec=replace(SPEC, slo=None))


@pytest.mark.parametrize("change", [lambda result: result, other_seed], ids=["paired", "of another seed"])
@pytest.mark.parametrize("blocks", [24, 60, 160])
def test_an_open_loop_that_fails_for_a_third_of_the_time_or_more_is_a_regression(
    blocks: int, change: Callable[[RunResult], RunResult]
) -> None:
    up = np.zeros(2 + blocks)
    for share in (1 / 3, 0.5, 2 / 3, 0.9):
        for begins in (0.0, 0.5, 1.0):  # of the time that is left beside it
            down, first = up.copy(), 2 + round(begins * (1 - share) * blocks)
            down[first : first + math.ceil(share * blocks)] = 1
            found = compare(outages(up), change(outages(down)))
            assert (found.verdict, found.metrics[-1].verdict) == ("regression", "regression"), (share, begins)
            assert compare(change(outages(down)), outages(up)).verdict == "improvement"


@pytest.mark.parametrize(("blocks", "burst_s", "share"), [(24, 1, 0.05), (24, 2, 0.01), (60, 2, 0.05), (160, 5, 0.05)])
def test_equal_servers_whose_errors_come_in_bursts_are_seldom_told_apart(blocks: int, burst_s: int, share: float) -> None:
    rng = np.random.default_rng(3)

    def bursts() -> RunResult:
        down, at = np.zeros((2 + blocks) * 20), 0.0
        while (at := at + rng.exponential(burst_s / share)) < 2 + blocks:
            lasts = rng.exponential(burst_s)
            down[int(at * 20) : int((at + lasts) * 20) + 1] = 1
            at += lasts
        return outages(down.reshape(-1, 20).mean(axis=1))

    assert sum(compare(bursts(), bursts()).metrics[-1].verdict in ("regression", "improvement") for _ in range(200)) <= 10


@pytest.mark.slow
@pytest.mark.parametrize(("utilisation", "at_most"), [(0.7, 0.05), (0.9, 0.05), (0.95, 0.1)])
def test_equal_servers_are_seldom_told_apart_however_slowly_their_queues_drain(utilisation: float, at_most: float) -> None:
    told = sum(
        compare(*(queued(utilisation, seed, part) for part in (1, 2))).verdict in ("regression", "improvement")
        for seed in range(200)
    )
    assert told / 200 <= at_most  # of blocks that are taken for independent: 3, 12 and 50 %


def test_a_server_that_is_slower_is_told_apart_near_its_knee() -> None:
    assert all(compare(queued(0.9, seed, 1), queued(0.95, seed, 2)).verdict == "regression" for seed in range(5))


def queued(utilisation: float, seed: int, part: int) -> RunResult:
    """200 requests/s for 60 s at one server, in blocks of a second. seed: of the arrivals, and with part of the service."""
    arrivals = schedule("poisson", rate_rps=200, duration_s=60, seed=seed).intended_ns / 1e6
    service = np.random.default_rng([seed, part]).lognormal(np.log(utilisation * 1e3 / 200), 0.3, len(arrivals))
    # Lindley's recursion: what is ahead in the queue is the sum less its least value so far.
    ahead = np.concatenate(([0.0], np.cumsum(service[:-1] - np.diff(arrivals))))
    latency = ahead - np.minimum.accumulate(ahead) + service
    block = (arrivals / 1e3).astype(int)
    figures = [(*np.percentile(latency[block == index], (50, 99)), latency[block == index]) for index in range(60)]
    blocks = tuple(
        Block(i, i, 1.0, len(each), int((each <= 50).sum()), 0, float(p50), float(p99), float(each.mean()), warmup=False)
        for i, (p50, p99, each) in enumerate(figures)
    )
    return replace(made(levels()), blocks=blocks)


def test_attainment_is_compared_where_both_have_one() -> None:
    with_slo, without = made(levels()), replace(made(levels()), attainment=None)
    names = [[metric.name for metric in compare(*pair).metrics] for pair in ((with_slo, without), (without, with_slo))]
    assert names == [["latency p50 (ms)", "latency p99 (ms)", "latency mean (ms)", "succeeded"]] * 2


@pytest.mark.parametrize("pattern", ["users:count=4", "; users:count=4"])
def test_closed_loops_are_compared_by_what_was_answered_and_never_paired(pattern: str) -> None:
    spec = replace(SPEC, pattern=pattern)
    base = made(levels(), spec=spec)
    busier = tuple(replace(block, requests=100, met=100, failed=20 * (block.index % 2)) for block in base.blocks)
    comparison = compare(base, replace(base, blocks=busier, succeeded_rps=90))
    answered = comparison.metrics[-1]
    assert (answered.name, answered.base, answered.new, answered.verdict) == ("answered (1/s)", 100, 90, "regression")
    assert answered.change == pytest.approx(90 / 200 - 1)
    assert not comparison.paired
    assert comparison.notes[0] == "not paired: users send when they are answered, so differences in traffic count as noise"


def in_blocks(counts: list[tuple[int, int]]) -> RunResult:
    """A closed loop of 22 s. counts: of each block, how many were answered and failed."""
    blocks = tuple(
        replace(block, requests=answered + failed, met=answered, failed=failed, p50_ms=block.p50_ms if answered else None)
        for block, (answered, failed) in zip(made(levels()).blocks, counts, strict=True)
    )
    counted = counts[2:]  # behind the warm-up
    answered, requests = sum(each for each, _ in counted), sum(map(sum, counted))
    spec = replace(SPEC, pattern="users:count=4", slo=None)
    return replace(
        made(levels(), spec=spec), blocks=blocks, requests=requests, succeeded=answered, succeeded_rps=answered / 20,
        attainment=None, verdict=None,
    )  # fmt: skip


def test_a_closed_loop_that_was_answered_for_half_of_the_time_is_a_regression() -> None:
    steady = in_blocks([(156, 0), (152, 0)] * 11)
    dead = in_blocks([(156, 0), (152, 0)] * 6 + [(0, 4), *[(0, 0)] * 9])
    found = compare(steady, dead)
    assert found.verdict == "regression"
    succeeded, answered = found.metrics[-2:]
    assert (answered.verdict, answered.change, answered.base, answered.new) == ("regression", pytest.approx(-0.5), 154, 77)
    assert answered.lower is not None
    assert answered.lower >= -1
    # Four requests of 1544 failed, whatever share they were of their block.
    assert (succeeded.change, succeeded.new) == (pytest.approx(-4 / 1544), pytest.approx(1 - 4 / 1544))
    assert compare(dead, steady).metrics[-1].change == pytest.approx(1)
    assert compare(dead, steady).verdict == "improvement"


def test_a_closed_loop_that_was_never_answered_is_a_regression_and_nothing_is_relative_to_it() -> None:
    steady, silent = in_blocks([(156, 0), (152, 0)] * 11), in_blocks([(0, 0)] * 22)
    assert cells(compare(steady, silent).metrics[-1])[3:] == ("-100.0%", "-100.0% to -99.1%", "regression")
    assert cells(compare(silent, steady).metrics[-1])[3:] == ("-", "- to -", "undecided")


def test_shares_are_compared_within_what_a_share_can_be() -> None:
    few = in_blocks([(1, 0), (0, 1)] * 11)
    shares = compare(in_blocks([(1, 0)] * 22), few).metrics[-2]
    assert shares.lower is not None
    assert shares.upper is not None
    assert (shares.change, shares.lower >= -1, shares.upper <= 1) == (-0.5, True, True)


def objective(attained: float, verdict: Verdict, name: str = "p99<50ms") -> ObjectiveResult:
    interval = Interval(attained, 0.9, 1, 0.95)
    return ObjectiveResult(name, 0.99, interval, interval, 1, verdict, None)


def missing(misses: Sequence[int], verdict: Verdict) -> RunResult:
    """Of each block's 200 requests so many miss the limit."""
    result = made(levels())
    blocks = tuple(replace(block, met=200 - late) for block, late in zip(result.blocks, (0, 0, *misses), strict=True))
    attained = 1 - sum(misses) / 4000
    return replace(result, blocks=blocks, verdict=verdict, objectives=(objective(attained, verdict),), attainment=None)


KEPT, OUTAGE = [1] * 20, [200] * 4 + [1] * 16


def test_an_slo_that_held_and_fails_now_is_a_regression_and_the_reverse_an_improvement() -> None:
    failed = missing(OUTAGE, "fail")
    for change in (lambda result: result, other_seed):
        for verdict in ("pass", "undecided"):
            held = missing(KEPT, verdict)
            lost = compare(held, change(failed))
            assert lost.verdict == "regression"
            assert compare(change(failed), held).verdict == "improvement"
            assert lost.lost_slo == f"the SLO's verdict was {verdict} and is fail"
            assert lost.lost_slo in lost.notes
    lost = compare(missing(KEPT, "pass"), failed)
    suite = ElementTree.fromstring(junit(lost))
    assert [suite.get(key) for key in ("tests", "failures", "skipped")] == ["5", "1", "0"]
    case = suite.findall("testcase")[-1]
    assert (case.get("name"), case[0].tag, case[0].get("message")) == ("SLO", "failure", lost.lost_slo)
    assert {case.get("classname") for case in suite} == {"loadtest.compare"}


def test_what_chance_may_have_done_or_nobody_knows_is_no_lost_slo() -> None:
    held, failed = missing(KEPT, "undecided"), missing(OUTAGE, "fail")
    one_burst = missing([100] + [1] * 19, "fail")
    short = [replace(result, blocks=result.blocks[:6]) for result in (held, failed)]
    unknown, missed = replace(held, objectives=()), missing([3] * 20, "undecided")
    for base, new in ((held, one_burst), (unknown, failed), (missed, failed), (failed, failed), (short[0], short[1])):
        assert compare(base, new).lost_slo == ""
    assert compare(held, held).notes == ()
    for base, new, name in ((replace(held, partial=True), failed, "base"), (held, replace(failed, partial=True), "new")):
        found = compare(base, new)
        assert (found.verdict, found.lost_slo) == ("same", "")
        assert f"{name} is PARTIAL: it ended early, so whether its SLO was lost is not told" in found.notes


def test_a_lost_error_rate_is_one_of_what_failed() -> None:
    # Two limits: what misses the first hides in the share that met all of them what failed.
    late = missing([40, 0] * 10, "undecided")
    down = replace(
        late,
        blocks=tuple(replace(block, failed=6 * (block.index % 2)) for block in late.blocks),
        objectives=(objective(0.985, "fail", "errors<1%"),),
        verdict="fail",
    )
    held = replace(late, objectives=(objective(1.0, "pass", "errors<1%"),))
    assert compare(held, down).lost_slo


def test_equal_servers_that_miss_in_bursts_seldom_lose_their_slo() -> None:
    rng = np.random.default_rng(0)

    def run() -> RunResult:
        misses = np.minimum(rng.poisson(0.15, 20) * rng.exponential(30, 20), 200).astype(int)  # a burst in 7 s, as it comes
        share = misses.sum() / 4000
        return missing(misses.tolist(), "fail" if share > 0.015 else "undecided")

    pairs = [(run(), other_seed(run())) for _ in range(200)]
    turned = [new.verdict == "fail" and base.objectives[0].overrun <= 1 for base, new in pairs]
    assert sum(turned) > 20
    assert sum(bool(compare(*pair).lost_slo) for pair in pairs) <= 10


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        *((name, "7", "7") for name in ("model", "version", "connections", "processes", "lengths")),
        ("protocol", "grpc", "grpc"),
        ("payloads", ("a.json", "b.json"), "a.json, b.json"),
        ("content_type", "text/csv", "text/csv"),
        ("pad", ("x=0",), "x=0"),
        ("timeout_s", 0.5, "0.5"),
    ],
)
def test_what_differs_but_is_no_load_is_noted(name: str, value: object, told: str) -> None:
    base = made(levels())
    new = replace(base, spec=replace(base.spec, **{name: value}))
    old = getattr(base.spec, name) or "(none)"
    assert compare(base, new).notes == (f"{name} differs: {old} and {told}",)
    assert compare(new, base).notes == (f"{name} differs: {told} and {old}",)


@pytest.mark.parametrize(
    ("name", "other", "told"),
    [
        ("pattern", "constant", "constant"),
        ("duration_s", 7.0, "7.0"),
        ("rows", "2", "2"),
        ("length", "9", "9"),
        ("slo", None, "(none)"),
        ("values", ("x=0:9", "y=0:1"), "x=0:9, y=0:1"),
    ],
)
def test_another_load_is_named(name: str, other: object, told: str) -> None:
    base = made(levels())
    with pytest.raises(UsageError, match=f"{name} .* and {re.escape(told)}$"):
        compare(base, replace(base, spec=replace(base.spec, **{name: other})))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("requests", r"payloads q\.json and q\.json \(with other requests in them\)$"),
        ("traces", r"pattern trace:file=t\.csv and trace:file=t\.csv \(with requests due at other times\)$"),
    ],
)
def test_a_file_of_the_same_name_with_another_content_is_another_load(kind: str, told: str) -> None:
    spec = replace(SPEC, pattern="trace:file=t.csv", payloads=("q.json",))
    base = replace(made(levels(), spec=spec), digests={"requests": "a", "traces": "b"})
    assert compare(base, base).notes == ()
    assert compare(base, replace(base, digests={})).paired  # of a result that does not tell
    moved = replace(base, spec=replace(spec, pattern="trace:file=a/t.csv"))
    assert compare(base, moved).notes == ("pattern differs: trace:file=t.csv and trace:file=a/t.csv",)
    other = replace(base, spec=replace(spec, pattern=" trace:column=b,file=u.csv"))
    arrived = [
        replace(each, digests={**each.digests, "traces": name, "arrivals": "c"}) for each, name in ((base, "t"), (other, "u"))
    ]
    assert compare(*arrived).notes == ("pattern differs: trace:file=t.csv and  trace:column=b,file=u.csv",)
    assert compare(
        arrived[0], replace(arrived[0], digests={"requests": "a", "traces": "t"})
    ).verdict  # of before there were arrivals
    with pytest.raises(UsageError, match=r"with requests due at other times\)$"):
        compare(arrived[0], replace(arrived[1], digests={**arrived[0].digests, "arrivals": "d"}))
    with pytest.raises(UsageError, match=r"pattern trace:file=t\.csv and trace:file=a/t\.csv,column=b$"):
        compare(base, replace(base, spec=replace(spec, pattern="trace:file=a/t.csv,column=b")))
    for seed in (0, 1):
        new = replace(base, spec=replace(spec, seed=seed), digests={**base.digests, kind: "c"})
        with pytest.raises(UsageError, match=told):
            compare(base, new)


def test_blocks_that_asked_for_other_numbers_of_requests_are_another_load() -> None:
    def asking(*asked: int) -> RunResult:
        base = made(levels())
        blocks = (replace(block, asked=count) for block, count in zip(base.blocks, asked * 22, strict=False))
        return replace(base, blocks=tuple(blocks))

    base, new = asking(200, 180), asking(200, 181)
    with pytest.raises(UsageError, match=r"pattern poisson and poisson \(with requests due at other times\)$"):
        compare(base, new)
    assert compare(base, asking(0)).paired  # an older result does not tell
    assert not compare(base, other_seed(new)).paired
    last = replace(new.blocks[-1], asked=7, duration_s=0.5)  # cut short
    assert compare(base, replace(base, blocks=(*base.blocks[:-1], last))).paired


def test_other_inputs_of_a_model_and_other_headers_are_noted() -> None:
    base = replace(made(levels()), digests={"requests": "a", "headers": "b"})
    comparison = compare(base, replace(base, digests={"requests": "c", "headers": "b"}))
    assert not comparison.paired
    assert comparison.notes[1:] == ("requests differ: the models state other inputs",)
    spec = replace(SPEC, headers=(("X-Key", "secret"), ("accept", "text/csv")))
    comparison = compare(base, replace(base, spec=spec, digests={"requests": "a", "headers": "c"}))
    assert comparison.paired
    assert comparison.notes == ("headers differ, or what they say: (none) and X-Key, accept",)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("rows", "1", "1-1"),
        ("length", "16", "16-16"),
        ("values", ("x=0:1", "y=-1:1e3"), ("y=-1.0:1000", "x=0.0:1.0")),
        ("values", ("x=0:9", "x=0:1"), ("x=0:1",)),  # the last one counts
    ],
)
def test_a_load_that_is_written_in_another_way_is_the_same(name: str, one: object, other: object) -> None:
    base = made(levels())
    asked, again = (replace(base, spec=replace(base.spec, **{name: value})) for value in (one, other))
    assert compare(asked, again).notes == ()


def test_cells_say_what_they_count() -> None:
    assert cells(metric("latency p50 (ms)")) == ("latency p50 (ms)", "0.012", "0.012", "+1.2%", "+1.2% to +1.2%", "same")
    assert cells(metric("attainment"))[1:5] == ("1.230%", "1.230%", "+1.23 points", "+1.23 points to +1.23 points")
    assert cells(metric("latency mean (ms)", number=None))[1:5] == ("-", "-", "-", "- to -")


def test_markdown_is_a_table_with_its_notes() -> None:
    base, new = replace(made(levels()), spec=replace(SPEC, label="before")), other_seed(made(levels()))
    lines = markdown(compare(base, new), base, new).splitlines()
    assert lines[2] == "`before` → `http://base`, 20 blocks, not paired"
    odd = replace(base, spec=replace(SPEC, label="`a` and ``b"))
    assert markdown(compare(odd, base), odd, base).splitlines()[2].startswith("``` `a` and ``b ``` → `before`, ")
    assert lines[4].count("|") == lines[5].count("|") == lines[6].count("|") == 7
    assert lines[-1].startswith("- not paired: seeds, blocks or requests differ")
    paired = markdown(compare(base, base), base, base)
    assert "20 blocks, paired" in paired
    assert paired.endswith("| same |\n")


def test_junit_skips_the_undecided_and_shows_the_rest() -> None:
    comparison = replace(
        compare(made(levels()), made(levels())),
        metrics=(metric("a", "undecided"), metric("b", "regression"), metric("c", "same")),
    )
    suite = ElementTree.fromstring(junit(comparison))
    assert [suite.get(key) for key in ("tests", "failures", "skipped", "errors")] == ["3", "1", "1", "0"]
    assert [[child.tag for child in case] for case in suite] == [["skipped"], ["failure"], ["system-out"]]
    told = suite[0][0].get("message"), suite[1][0].get("message"), suite[2][0].text
    assert told == tuple(
        f"0.012 | 0.012 | +1.2% | +1.2% to +1.2% | {verdict}" for verdict in ("undecided", "regression", "same")
    )
