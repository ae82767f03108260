"""What goes wrong with a lane, made on purpose, and what it is to be called."""

from gateway.why.causes import Cause
from tests.why.recorded import Scene, slowed

LENGTHS = {"pad": {"x": 0.0}, "buckets": (4, 64)}
COMPILED = {"row_sizes": (1, 16), "max_rows": 16, "slo_ns": 45_000_000, "policy": "greedy"}
GPU = {"slo_ns": 20_000_000, "max_rows": 64, "model_rows": 64}

SCENES: dict[str, tuple[Cause, Scene]] = {
    "overload": (Cause.QUEUE, Scene(rps=230.0)),
    "overload of two sessions": (Cause.QUEUE, Scene(rps=430.0, workers=2, seconds=6.0)),
    "overload with noise": (Cause.QUEUE, Scene(rps=230.0, noise=0.15)),
    "overload of a fast model": (
        Cause.QUEUE,
        Scene(fixed_ms=2, row_ms=0.15, rps=8000.0, seconds=0.6, noise=0.1, settings=GPU),
    ),
    "overload of short and long requests": (
        Cause.QUEUE,
        Scene(rps=420.0, seconds=5.0, probed=False, lengths=(4, 64), settings={"ragged": LENGTHS}),
    ),
    "stall": (Cause.STALL, Scene(takes=slowed([200, 400], 700.0))),
    "stall of one of two sessions": (Cause.STALL, Scene(rps=190.0, workers=2, seconds=8.0, takes=slowed([300, 301], 600.0))),
    "a slow second": (Cause.STALL, Scene(takes=slowed(range(300, 306), 200.0))),
    "stall of a fast model": (
        Cause.STALL,
        Scene(fixed_ms=2, row_ms=0.15, rps=2000.0, seconds=1.0, takes=slowed([100], 120.0), settings=GPU),
    ),
    "cold start, first run slow": (Cause.COLD_START, Scene(probed=False, takes=slowed([0], 900.0))),
    "cold start, first run slow although probed": (Cause.COLD_START, Scene(takes=slowed([0], 900.0))),
    "cold start, first runs of two sessions slow": (
        Cause.COLD_START,
        Scene(rps=200.0, workers=2, seconds=6.0, probed=False, takes=slowed([0, 1], 1000.0)),
    ),
    "cold start, no session yet": (Cause.COLD_START, Scene(away_s=(0.0, 1.5))),
    "cold start, scaled from zero": (Cause.COLD_START, Scene(away_s=(5.0, 6.0))),
    "wrong cap, too long a delay": (Cause.BATCH, Scene(rps=60.0, settings={"policy": "fixed", "max_delay_ms": 80.0})),
    "wrong cap, too small": (
        Cause.BATCH,
        Scene(fixed_ms=2, row_ms=0.15, rps=1500.0, seconds=1.5, settings=GPU | {"max_rows": 2}),
    ),
    "wrong cap, too large": (
        Cause.BATCH,
        Scene(rps=145.0, settings={"policy": "fixed", "max_delay_ms": 300.0, "max_rows": 24}),
    ),
    "cut-off by the client": (Cause.CUT_OFF, Scene(rps=40.0, timeout_ms=5.0, timeout_share=0.2)),
    "cut-off by the SLO": (Cause.CUT_OFF, Scene(rps=40.0, settings={"slo_ns": 8_000_000})),
    "padding": (Cause.PADDING, Scene(fixed_ms=1, row_ms=3, rps=70.0, settings=COMPILED)),
}
