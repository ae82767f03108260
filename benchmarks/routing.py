"""Routing over unlike backends: share in SLO and busy cost against the usual rules.

    python -m benchmarks.routing            in simulated time, some minutes on one core
    python -m benchmarks.routing --quick    shorter runs, under a minute
    python -m benchmarks.routing --real     a real fleet on this machine: see benchmarks/routing_real.py

Simulated are only clock and sessions; dispatcher, router, lanes and batchers are the gateway's own. Service times in ms for n
rows, with list prices in us-east-1, SLO 60 ms:

    cpu    4 + 6 n                   c7i.xlarge    143 requests/s in batches of 4: what fits in 0.55 of the SLO
    inf2   2 + n,  n of 1, 4, 8      inf2.xlarge   800 in batches of 8
    gpu    2 + 0.15 n                g6.xlarge     6200 in batches of 206

Busy cost is what sessions cost while they run batches; the rest of their time is what scaling down could save.
"""

import argparse
from collections.abc import Sequence
from typing import Any, Final

from gateway.errors import BackendFailed, BackendUnreachable
from tests.router.fleet import CPU, FLEET, INF2, MS, Event, Fault, Kind, Result, S, failing, poisson, simulate, slower

POLICIES: Final[dict[str, dict[str, Any]]] = {
    "round robin": {"policy": "round_robin"},
    "power of two choices": {"policy": "power_of_two"},
    "shortest queue": {"policy": "shortest_queue"},
    "least eta": {"policy": "least_eta"},
    "spill at 0.85": {"policy": "cheapest", "spill_share": 0.85},
    "cheapest in time": {"policy": "cheapest"},
}
# Its GPU is half as fast and Inferentia twice: 6000/s are 88 % of what it can do, and no backend can do half of it.
TIGHT: Final = (CPU,) * 4 + (Kind("inf2", 1.0, 0.5, 0.7582, (1, 4, 8)),) * 2 + (Kind("gpu", 3.0, 0.3, 0.8048),)
# A cheap backend, one of middling price, and one that is fast and dear: 500, 1700 and 5600 requests/s.
STEPPED: Final = (Kind("cheap", 4.0, 2.0, 0.1785, sessions=1), INF2, INF2, Kind("dear", 2.0, 0.16, 3.06))
CHEAP_RPS: Final = 14 / 0.032  # 4 + 2 · 14 = 32 ms
GPU: Final = 6
LYING: Final[Fault] = (BackendFailed("says it is ready"), False, 1 * S)  # as Triton with a dead python stub
BROKEN: Final[Fault] = (BackendFailed("wrong model"), False, 3 * MS)
GONE: Final[Fault] = (BackendUnreachable("connection refused"), True, 1 * MS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--real", action="store_true")
    arguments = parser.parse_args()
    if arguments.real:
        from benchmarks.routing_real import measure

        measure(quick=arguments.quick)
        return
    seconds = 2.0 if arguments.quick else 10.0
    for name, fleet in (("4 CPU, 2 Inf2, 1 GPU", FLEET), ("the same with a slower GPU and faster Inf2", TIGHT)):
        print(f"\n{name}: 6000 requests/s, Poisson, {seconds:g} s")
        for policy, routing in POLICIES.items():
            print(line(policy, simulate(fleet, poisson(lambda second: 6000.0, seconds, 1), routing=routing)), flush=True)
        if arguments.quick:
            break
    steps(1.0 if arguments.quick else 4.0)
    troubles(1.0 if arguments.quick else 3.0)


def line(name: str, result: Result) -> str:
    shares = " ".join(f"{kind} {share:.0%}" for kind, share in result.shares.items())
    return (
        f"{name:21} in SLO {result.in_slo():7.2%}  p50 {result.percentile_ms(50):5.1f} p99 {result.percentile_ms(99):5.1f} ms  "
        f"busy {result.usd_per_million:7.4f} USD per million  {shares}"
    )


def steps(step_s: float) -> None:
    """Load stepped from 0.3 to 2 times the cheap backend's capacity and back, in one run: does it recover at each step?"""
    loads = (0.3, 0.6, 0.9, 1.2, 1.6, 2.0, 0.9, 0.3)
    print(f"\nSteps of {step_s:g} s, of the cheap backend's {CHEAP_RPS:.0f} requests/s; in SLO per step")
    print(" " * 21 + "".join(f"{load:8.1f}" for load in loads))
    arrivals = poisson(lambda second: CHEAP_RPS * loads[min(int(second / step_s), len(loads) - 1)], step_s * len(loads), 2)
    for policy, routing in POLICIES.items():
        result = simulate(STEPPED, arrivals, routing=routing)
        shares = "".join(f"{result.in_slo(index * step_s, (index + 1) * step_s):8.1%}" for index in range(len(loads)))
        kinds = " ".join(f"{kind} {share:.0%}" for kind, share in result.shares.items())
        print(f"{policy:21}{shares}  busy {result.usd_per_million:.3f} USD per million  {kinds}", flush=True)


def troubles(span_s: float) -> None:
    """What goes wrong with the GPU after one span and is over after three: before, first span, second, after, rest."""
    cases: Sequence[tuple[str, float, Sequence[tuple[float, Any]], bool]] = (
        ("gpu 5 times slower", 1500.0, ((1, slower(GPU, 5.0)), (3, slower(GPU, 1.0))), False),
        ("gpu 30 times slower", 1500.0, ((1, slower(GPU, 30.0)), (3, slower(GPU, 1.0))), False),
        ("gpu fails after 1 s", 1500.0, ((1, failing(GPU, LYING)), (3, failing(GPU, None))), False),
        ("gpu fails at once", 1500.0, ((1, failing(GPU, BROKEN)), (3, failing(GPU, None))), False),
        ("gpu is gone", 1500.0, ((1, failing(GPU, GONE)), (3, failing(GPU, None))), False),
        ("overload, 2 times", 5000.0, (), True),
    )
    print(f"\nTrouble after {span_s:g} s, for {2 * span_s:g} s; in SLO per {span_s:g} s, and requests without a result")
    for name, rps, events, overload in cases:
        for policy in ("least eta", "cheapest in time"):

            def rate(second: float, rps: float = rps, overload: bool = overload) -> float:
                return 16000.0 if overload and span_s <= second < 3 * span_s else rps

            times: list[Event] = [(second * span_s, what) for second, what in events]
            result = simulate(FLEET, poisson(rate, 6 * span_s, 3), times, routing=POLICIES[policy])
            shares = "".join(f"{result.in_slo(span * span_s, (span + 1) * span_s):9.2%}" for span in range(6))
            print(f"{name:21}{policy:18}{shares}  without result {result.lost():6}  gpu {result.shares['gpu']:.0%}", flush=True)


if __name__ == "__main__":
    main()
