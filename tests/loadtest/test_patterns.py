import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from loadtest.errors import UsageError
from loadtest.load.patterns import payload_choice, read_trace, schedule

OPEN = [
    "constant",
    "poisson",
    "burst",
    "ramp:from=0,to=400",
    "stairs:from=100,to=300,steps=3",
    "diurnal:low=0.5,period=10",
    "poisson:duration=40;constant:rate=50,duration=5;ramp:from=50,to=500,duration=15",
]


def seconds(pattern: str, rate_rps: float = 200, duration_s: float = 60, seed: int = 0) -> np.ndarray:
    return schedule(pattern, rate_rps=rate_rps, duration_s=duration_s, seed=seed).intended_ns / 1e9


def write_trace(path: Path, times: np.ndarray) -> str:
    path.write_text("timestamp\n" + "\n".join(f"{time:.6f}" for time in times))
    return str(path)


@pytest.mark.parametrize("pattern", OPEN)
def test_send_times_ascend_within_the_run(pattern: str) -> None:
    plan = schedule(pattern, rate_rps=200, duration_s=60, seed=0)
    assert np.all(np.diff(plan.intended_ns) >= 0)
    assert plan.intended_ns[0] >= 0
    assert plan.intended_ns[-1] < plan.duration_ns == 60e9


@pytest.mark.parametrize("pattern", OPEN)
def test_the_seed_decides_everything(pattern: str) -> None:
    assert np.array_equal(seconds(pattern, seed=3), seconds(pattern, seed=3))


@pytest.mark.parametrize("pattern", [pattern for pattern in OPEN if pattern != "constant"])
def test_another_seed_gives_other_times(pattern: str) -> None:
    assert not np.array_equal(seconds(pattern, seed=0), seconds(pattern, seed=1))


@pytest.mark.parametrize("pattern", ["constant", "poisson", "burst:on=0.1,off=0.4", "diurnal:low=0.3,period=10"])
def test_the_mean_rate_is_the_asked_one(pattern: str) -> None:
    assert len(seconds(pattern, rate_rps=1000, duration_s=100)) == pytest.approx(100_000, rel=0.03)


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.diff(seconds("poisson", rate_rps=1000))
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.02)


def test_a_burst_is_as_many_times_as_busy_as_the_quiet() -> None:
    counts = np.histogram(seconds("burst:factor=10,on=2,off=2", rate_rps=1100), np.arange(0, 60.1, 0.1))[0]
    # 2 · 1100 / (10 + 1) = 200 quiet, 2000 in bursts, per 0.1 s
    assert np.percentile(counts, 10) == pytest.approx(20, rel=0.4)
    assert np.percentile(counts, 90) == pytest.approx(200, rel=0.2)


def test_a_ramp_grows_linearly() -> None:
    counts = np.histogram(seconds("ramp:from=0,to=1000", duration_s=100), 10, (0, 100))[0]
    assert counts == pytest.approx([500 + 1000 * step for step in range(10)], rel=0.1)


def test_stairs_rise_in_equal_steps() -> None:
    counts = np.histogram(seconds("stairs:from=100,to=300,steps=3", duration_s=90), 3, (0, 90))[0]
    assert counts == pytest.approx([3000, 6000, 9000], rel=0.06)


def test_phases_follow_each_other_with_their_own_rate_and_duration() -> None:
    plan = schedule("constant:rate=10,duration=2;constant:rate=100,duration=1", rate_rps=0, duration_s=99, seed=0)
    assert plan.phases == ((0.0, 2.0, "constant"), (2.0, 3.0, "constant"))
    assert np.count_nonzero(plan.intended_ns < 2e9) == 20
    assert len(plan.intended_ns) == 120
    assert not plan.stationary


def test_a_trace_is_replayed_as_it_is_without_a_rate(tmp_path: Path) -> None:
    file = write_trace(tmp_path / "t.csv", np.array([100.0, 100.5, 102.0]))
    assert seconds(f"trace:file={file}", rate_rps=0) == pytest.approx([0, 0.5, 2.0])


@pytest.mark.parametrize("factor", [0.4, 1.0, 2.5])
def test_a_scaled_trace_keeps_its_shape(tmp_path: Path, factor: float) -> None:
    rng = np.random.default_rng(0)
    times = np.sort(np.concatenate([rng.uniform(0, 10, 3000), rng.uniform(20, 30, 1000)]))  # busy, silent, quiet
    file = write_trace(tmp_path / "t.csv", times)
    natural_rps = 4000 / (times[-1] - times[0])
    found = seconds(f"trace:file={file}", rate_rps=natural_rps * factor, duration_s=31)
    busy, silent, quiet = (
        np.count_nonzero((found >= start) & (found < end)) for start, end in ((0, 9.95), (10, 19.95), (20, 30))
    )
    assert busy == pytest.approx(3000 * factor, rel=0.1)
    assert silent <= 3  # the copies in the one long gap
    assert quiet == pytest.approx(1000 * factor, rel=0.15)


def test_traces_may_have_iso_times_or_no_header(tmp_path: Path) -> None:
    (tmp_path / "iso.csv").write_text("id,at\n1,2026-01-01T00:00:01\n2,2026-01-01T00:00:00\n")
    (tmp_path / "bare.csv").write_text("5.5\n6.5\n")
    assert read_trace(tmp_path / "iso.csv", "at") == pytest.approx([0, 1])
    assert read_trace(tmp_path / "bare.csv") == pytest.approx([0, 1])
    (tmp_path / "bom.csv").write_text("timestamp\n5.5\n6.5\n", encoding="utf-8-sig")  # as Excel writes it
    assert read_trace(tmp_path / "bom.csv") == pytest.approx([0, 1])


def test_times_of_a_trace_without_a_zone_are_no_local_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.csv").write_text("at\n2026-03-29T02:30:00\n2026-03-29T03:30:00\n")
    monkeypatch.setenv("TZ", "Europe/Berlin")  # where that night's 02:30 is 03:30
    time.tzset()
    try:
        assert read_trace(tmp_path / "t.csv", "at") == pytest.approx([0, 3600])
    finally:
        monkeypatch.undo()
        time.tzset()


def test_users_think_with_the_asked_mean() -> None:
    plan = schedule("users:count=8,think=0.2", rate_rps=0, duration_s=5, seed=0)
    assert (plan.users, len(plan.intended_ns)) == (8, 0)
    assert plan.think_ns is not None
    assert plan.think_ns.mean() == pytest.approx(0.2e9, rel=0.02)


def test_payload_choice_does_not_depend_on_arrivals() -> None:
    assert np.array_equal(payload_choice(10, 64, 7), payload_choice(20, 64, 7)[:10])


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "empty"),
        ("sine", "'sine'"),
        ("poisson:speed=3", "'speed=3'"),
        ("poisson:rate", "'rate'"),
        ("poisson:rate=fast", "rate=fast"),
        ("poisson:rate=0", "--rate"),
        ("poisson:rate=nan", "rate"),
        ("poisson:duration=0", "duration"),
        ("burst:factor=0.5", "factor"),
        ("burst:on=0.0009", "at least 0.001 s"),
        ("burst:off=0.0009", "at least 0.001 s"),
        ("diurnal:low=1.01", "low"),
        ("diurnal:period=0", "period"),
        ("stairs:steps=0", "steps"),
        ("stairs:steps=1e10", "steps=1e\\+10, expected 1 to 2,000,000"),
        ("diurnal:period=0.0005", "period=0.0005, expected 0.001 s at least in 10 s"),
        ("burst:on=0.001,off=0.001,duration=4000", "on=0.001 and off=0.001, expected 0.004 s together at least in 4000 s"),
        ("users:think=1e10", "think=1e\\+10, expected 86400 s at most"),
        ("users:duration=1e10", "duration=1e\\+10, expected above 0 s, and 86400 at most"),
        ("diurnal:low=2", "low"),
        ("users:count=0", "count"),
        ("users:count=2.9", "pattern users: count=2.9, expected a whole number"),
        ("stairs:steps=2.7", "pattern stairs: steps=2.7, expected a whole number"),
        ("stairs:to=1e308", "to=1e\\+308, expected a number of at least 0, and 1e\\+12 at most"),
        ("burst:off=1e300", "off=1e\\+300, expected a number"),
        ("users:count=3,count=4", "pattern users: count is given twice: leave one of them out"),
        ("users;poisson", "closed loop"),
        ("trace", "file="),
        ("trace:file=/nowhere.csv", "cannot be read"),
        ("poisson:rate=1e9", "20,000,000"),
        ("constant:rate=1e9", "20,000,000"),
        ("ramp:to=1e9", "20,000,000"),
        ("poisson:rate=0.0001", "sends nothing"),
    ],
)
def test_a_wrong_pattern_is_refused_with_the_part_that_is_wrong(pattern: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        schedule(pattern, rate_rps=100, duration_s=10, seed=1)


@pytest.mark.parametrize(
    ("text", "message"), [("", "empty"), ("timestamp\n", "no arrivals"), ("1\nx\n", "line 2"), ("1\ninf\n", "line 2")]
)
def test_a_broken_trace_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_trace(tmp_path / "t.csv")


def test_a_column_that_was_asked_for_and_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("5.5,1\n6.5,2\n")
    with pytest.raises(UsageError, match=r"its first line names no column 'nosuch': '5\.5,1'"):
        seconds(f"trace:file={tmp_path / 't.csv'},column=nosuch", rate_rps=0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("constant", 600),
        ("poisson", 600),
        ("burst", 600),
        ("burst:on=100,off=100", 600),
        ("diurnal:low=0.2,period=20", 600),
        ("ramp:from=0,to=20", 600),
        ("stairs:from=5,to=15,steps=3", 600),
        ("poisson:duration=10;constant:rate=50,duration=2", 200),
    ],
)
def test_as_many_requests_are_sent_as_are_asked_whatever_the_seed(pattern: str, count: int, seed: int) -> None:
    assert len(seconds(pattern, rate_rps=10, duration_s=60, seed=seed)) == count


@pytest.mark.parametrize("factor", [0.37, 1.0, 2.63])
def test_a_scaled_trace_sends_as_many_as_are_asked(tmp_path: Path, factor: float) -> None:
    times = np.linspace(0, 10, 1000)
    file = write_trace(tmp_path / "t.csv", times)
    found = seconds(f"trace:file={file}", rate_rps=100 * factor, duration_s=30)
    assert len(found) == round(1000 * factor)


def test_counts_of_blocks_vary_as_those_of_a_poisson_process_given_its_total() -> None:
    counts = np.array(
        [np.histogram(seconds("poisson", rate_rps=100, duration_s=10, seed=seed), 10, (0, 10))[0] for seed in range(300)]
    )
    assert counts.mean() == pytest.approx(100)
    assert counts.var() == pytest.approx(100 * 0.9, rel=0.1)  # n · (1 - part)
    neighbours = np.corrcoef(counts[:, 0], counts[:, 1])[0, 1]
    assert neighbours == pytest.approx(-1 / 9, abs=0.15)


def test_a_burst_keeps_its_factor_where_the_run_has_more_or_less_of_it() -> None:
    for seed in range(6):
        times = seconds("burst:factor=10,on=5,off=5", rate_rps=1000, duration_s=20, seed=seed)
        counts = np.histogram(times, np.arange(0, 20.1, 0.25))[0]
        busy = counts > counts.max() / 3
        if busy.all() or counts.min() > counts.max() / 5:
            continue  # one kind of stretch only
        assert np.percentile(counts[busy], 50) / np.percentile(counts[~busy], 50) == pytest.approx(10, rel=0.25)


def passed(at_s: np.ndarray, rate: Callable[[np.ndarray], np.ndarray], until_s: float) -> np.ndarray:
    """How much of the rate's integral lies before each time, as a share of all of it."""
    grid = np.linspace(0, until_s, 200_001)
    integral = np.concatenate([[0], np.cumsum(rate((grid[1:] + grid[:-1]) / 2))])
    return np.interp(at_s, grid, integral / integral[-1])


@pytest.mark.parametrize(
    ("pattern", "rate"),
    [
        ("ramp:from=0,to=2", lambda t: t / 1000),
        ("ramp:from=3,to=1", lambda t: 3 - t / 1000),
        ("stairs:from=1,to=4,steps=4", lambda t: 1 + t // 500),
        ("diurnal:low=0.2,period=500", lambda t: 0.2 + 0.8 * (1 - np.cos(2 * np.pi * t / 500)) / 2),
        ("diurnal:low=1", lambda t: np.ones_like(t)),
    ],
)
def test_arrivals_are_poisson_along_the_rate(pattern: str, rate: Callable[[np.ndarray], np.ndarray]) -> None:
    # Mapped through the integral of the rate they are uniform.
    times = seconds(pattern, rate_rps=2, duration_s=2000)
    assert stats.kstest(passed(times, rate, 2000), "uniform").pvalue > 0.01


def test_a_run_may_begin_in_a_burst_as_often_as_one_lasts() -> None:
    counts = [len(seconds("burst:factor=5,on=1,off=4", rate_rps=100, duration_s=0.2, seed=seed)) for seed in range(400)]
    assert np.mean(counts) == pytest.approx(20, rel=0.15)


def test_of_a_trace_made_denser_every_arrival_keeps_its_moment(tmp_path: Path) -> None:
    times = np.round(np.sort(np.random.default_rng(0).uniform(0, 10, 200)), 6)
    file = write_trace(tmp_path / "t.csv", times)
    found = seconds(f"trace:file={file}", rate_rps=60, duration_s=11)  # three times as many
    assert len(found) == pytest.approx(600, rel=0.1)
    assert set(np.round(times - times[0], 6)) <= set(np.round(found, 6))


def test_the_rate_of_a_trace_is_that_until_its_last_arrival(tmp_path: Path) -> None:
    file = write_trace(tmp_path / "t.csv", np.array([*np.linspace(0, 5, 999), 20.0]))
    assert len(seconds(f"trace:file={file}", rate_rps=100, duration_s=60)) == pytest.approx(2000, rel=0.02)


def test_a_schedule_tells_its_mean_rate() -> None:
    assert schedule("constant:rate=10,duration=2;constant:rate=100,duration=1", rate_rps=0, duration_s=9, seed=0).rate_rps == 40
    assert schedule("users:count=2", rate_rps=0, duration_s=9, seed=0).rate_rps == 0


def test_stairs_have_five_steps_up_to_the_rate_unless_told_otherwise() -> None:
    counts = np.histogram(seconds("stairs", rate_rps=500, duration_s=50), 5, (0, 50))[0]
    assert counts == pytest.approx([1000, 2000, 3000, 4000, 5000], rel=0.1)
