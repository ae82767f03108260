"""The policy `adaptive`, told only the SLO, beside hand-set `fixed` ones on the real minilm: goodput by offered load.

    python -m benchmarks.batching_real                                 about 12 minutes
    python -m benchmarks.batching_real --seconds 5 --rows 8,32 --delays 0,10
    python -m benchmarks.batching_real --slo-t1 2 --lengths 64-128 --arrivals poisson,bursts --repeats 3 --keep FILE

One gateway process (core 0) serves the model once per setting, under as many names; only one is loaded at a time, settings in
turn within each load, so that the machine's mood is shared. Open loop from this process (core 1): Poisson, or bursts, which
change between half and one and a half times the rate, after ten SLOs in the mean; the same arrivals for every setting.
Capacity is the throughput of a closed loop on the largest batches. Last, where the SLO is stated in ms, the model becomes
twice as slow in mid-run.

With --slo-t1 the SLO is so many times what a lone request takes, the median of the lengths. A run counts only if the load
generator was on time and nothing else took its core, as `loadtest` judges it; else it is repeated, and left out if that does
not help. Whatever a run found is kept in FILE, and not measured again.
"""

import argparse
import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from loadtest.measuring.generator import measure
from loadtest.results import LoadSpec, RunResult, SloSpec

VALUES = ("input_ids=1000:29000", "attention_mask=1:1")
OURS: Final = "adaptive"
SLOWER: Final = "slower"  # a load: half the capacity, of a model that is twice as slow from half time
_TRIES: Final = 3  # of a run, until it is valid
_T: Final = {2: 12.7, 3: 4.3, 4: 3.2, 5: 2.8, 6: 2.6}  # of so many repeats, two-sided 95 %


def settings(rows: list[int], delays_ms: list[float]) -> dict[str, dict[str, Any]]:
    """Batching section by name."""
    found: dict[str, dict[str, Any]] = {"adaptive": {"policy": "adaptive"}, "greedy": {"policy": "greedy"}}
    for most in rows:
        for delay_ms in delays_ms:
            found[f"fixed-{most}-{delay_ms:g}ms"] = {"policy": "fixed", "max_rows": most, "max_delay_ms": delay_ms}
    return found


def configuration(batching: dict[str, dict[str, Any]], slo_ms: float | None, flag: Path) -> dict[str, Any]:
    """And `capacity`, which promises nothing. slo_ms: None: only that."""
    backend = {
        "kind": "python",
        "model": str(Path("benchmarks/slowable.py").resolve()) + ":SlowableEmbedder",
        "class_options": {"model": "models/minilm.onnx", "flag": str(flag)},
    }
    common = {"max_rows": 32, "ragged": {"pad": {"input_ids": 0, "attention_mask": 0}}, "backends": [backend]}
    models = [common | {"name": "capacity", "batching": {"policy": "greedy"}}]
    if slo_ms is not None:
        models += [common | {"name": name, "slo": {"p99_ms": slo_ms}, "batching": each} for name, each in batching.items()]
    return {"models": models}


@contextmanager
def gateway(config: dict[str, Any], folder: Path) -> Iterator[str]:
    """Where it listens. It has the first core, this process gets the last."""
    path = folder / "x.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "gateway.cli", "serve", "--no-ray", "--quiet", "--log-level", "error", str(path)]
    command += ["--http-port", "0", "--grpc-port", "0"]
    cores = sorted(os.sched_getaffinity(0))
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.sched_setaffinity(0, {cores[0]})
    )
    os.sched_setaffinity(0, {cores[-1]})
    assert process.stdout is not None
    try:
        ready = process.stdout.readline()
        if not ready.startswith("gateway ready"):
            raise SystemExit(f"the gateway did not start: {ready}")
        yield dict(part.split("=") for part in ready.split()[2:])["http"]
    finally:
        os.sched_setaffinity(0, set(cores))
        process.terminate()
        process.wait(60)


class Bench:
    """What is asked of one gateway. It promises slo_ms; None: nothing."""

    def __init__(self, target: str, slo_ms: float | None, arguments: argparse.Namespace, flag: Path) -> None:
        self._target = target
        self._slo_ms = slo_ms
        self._arguments = arguments
        self._flag = flag

    async def closed(self, users: int, seconds: float) -> RunResult:
        """Without a promise, in the largest batches."""
        return await measure(self._spec("capacity", seconds, pattern=f"users:count={users}", warmup_s=1.0))

    async def open(self, model: str, arrivals: str, load: str, most: float, repeat: int) -> dict[str, Any]:
        """A run until it is valid, or has been tried so often. most: the capacity."""
        assert self._slo_ms is not None
        seconds, slower = self._arguments.seconds, load == SLOWER
        share, length_s = (0.5, 2 * seconds) if slower else (float(load), seconds)
        dwell_s = self._slo_ms / 100
        spec = self._spec(
            model,
            length_s,
            pattern="poisson" if arrivals == "poisson" else f"burst:factor=3,on={dwell_s:.3f},off={dwell_s:.3f}",
            rate_rps=share * most,
            seed=round(share * 10) + 100 * repeat,
            slo=SloSpec.parse(f"p99<{self._slo_ms:g}ms"),
            warmup_s=min(1.0, length_s / 5),
            timeout_s=max(2.0, 5 * self._slo_ms / 1e3),
        )
        for _ in range(_TRIES):
            if slower:
                asyncio.get_running_loop().call_later(seconds, self._flag.touch)
            result = await measure(spec)
            if slower:
                await asyncio.to_thread(self._flag.unlink)
            if result.valid:
                break
        return {
            "goodput_share": result.goodput_rps / most,
            "p50_ms": result.latency.p50,
            "p99_ms": result.latency.p99,
            "lag_p99_ms": result.generator.send_lag_p99_ms,
            "errors": result.errors,
            "valid": result.valid,
            "reasons": result.reasons,
        }

    def _spec(self, model: str, seconds: float, **more: Any) -> LoadSpec:
        return LoadSpec(
            target=f"http://{self._target}",
            protocol="rest-binary",
            model=model,
            duration_s=seconds,
            length=self._arguments.lengths,
            values=VALUES,
            **more,
        )


def measured(
    slo: float, batching: dict[str, dict[str, Any]], found: dict[str, Any], arguments: argparse.Namespace, folder: Path
) -> None:
    """Measure what is not in `found` yet. slo: times t(1), or in ms."""
    flag = folder / "slow"
    if "capacity_rps" not in found:
        with gateway(configuration(batching, None, flag), folder) as target:
            bench = Bench(target, None, arguments, flag)
            found["t1_ms"] = asyncio.run(bench.closed(1, 3.0)).latency.p50
            # Without the SLO's shedding, a saturated closed loop on the largest batches is what the machine can do.
            found["capacity_rps"] = asyncio.run(bench.closed(64, max(4.0, arguments.seconds))).succeeded_rps
    most, slo_ms = found["capacity_rps"], slo * found["t1_ms"] if arguments.slo_t1 else slo
    print(
        f"t(1) {found['t1_ms']:.1f} ms, SLO {slo_ms:.1f} ms, 100 % are {most:.1f}/s; goodput, p50, p99 and the generator's lag"
    )
    with gateway(configuration(batching, slo_ms, flag), folder) as target:
        bench = Bench(target, slo_ms, arguments, flag)
        for repeat in range(arguments.repeats):
            for arrivals in arguments.arrivals.split(","):
                for load in loads(arguments):
                    for name in batching:
                        key = f"{slo:g} {arrivals} {load} {name} {repeat}"
                        if key in found:
                            continue
                        found[key] = asyncio.run(bench.open(name, arrivals, load, most, repeat))
                        print(f"  {arrivals:8} {load:6} {name:14} {line(found[key])}", flush=True)
                        if arguments.keep:
                            arguments.keep.write_text(json.dumps(found, indent=1))


def loads(arguments: argparse.Namespace) -> list[str]:
    return [*arguments.loads.split(","), *([] if arguments.slo_t1 else [SLOWER])]


def line(found: dict[str, Any]) -> str:
    invalid = "" if found["valid"] else f"  INVALID: {found['reasons'][0]}"
    times = " ".join(f"{found[name]:7.1f}" for name in ("p50_ms", "p99_ms", "lag_p99_ms"))
    return f"{found['goodput_share']:6.1%} {times}  {found['errors']}{invalid}"


def summary(slo: float, names: list[str], found: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Ours beside the setting that did best over all repeats that were valid for both; the interval is of their ratios."""
    print(f"\nSLO {slo:g}: arrivals, load, best other and its goodput, ours, their ratio, 95 % of the mean of ratios, repeats")
    for arrivals in arguments.arrivals.split(","):
        for load in loads(arguments):
            runs = {
                name: {
                    repeat: run["goodput_share"]
                    for repeat in range(arguments.repeats)
                    if (run := found.get(f"{slo:g} {arrivals} {load} {name} {repeat}")) and run["valid"]
                }
                for name in names
            }
            ours = runs.pop(OURS)
            means = {name: statistics.mean(each.values()) for name, each in runs.items() if each.keys() & ours.keys()}
            if not means:
                print(f"{arrivals:8} {load:6} no valid runs")
                continue
            best = max(means, key=means.__getitem__)
            both = sorted(ours.keys() & runs[best].keys())
            mine, theirs = [ours[at] for at in both], [runs[best][at] for at in both]
            ratios = [one / other for one, other in zip(mine, theirs, strict=True) if other]  # none where the other had 0
            count = len(ratios)
            half = _T.get(count, 2.4) * statistics.stdev(ratios) / math.sqrt(count) if count > 1 else math.nan
            ratio = sum(mine) / sum(theirs) if sum(theirs) else math.inf
            print(
                f"{arrivals:8} {load:6} {best:14} {statistics.mean(theirs):6.1%} {statistics.mean(mine):6.1%} {ratio:7.1%} "
                f"± {half:.1%}, {len(both)} of {arguments.repeats}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run")
    parser.add_argument("--slo-ms", type=float, default=150.0)
    parser.add_argument("--slo-t1", type=float, nargs="+", default=[], help="SLOs in times what a lone request takes, instead")
    parser.add_argument("--lengths", default="8-64", help="of the sentences, in tokens")
    parser.add_argument("--arrivals", default="poisson", help="poisson,bursts")
    parser.add_argument("--loads", default="0.3,0.6,0.8,1,1.5")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--rows", default="4,8,16,32")
    parser.add_argument("--delays", default="0,5,20")
    parser.add_argument("--keep", type=Path, help="the figures as JSON; what it has already is not measured again")
    arguments = parser.parse_args()
    batching = settings([int(n) for n in arguments.rows.split(",")], [float(n) for n in arguments.delays.split(",")])
    found: dict[str, Any] = {"settings": {"lengths": arguments.lengths, "seconds": arguments.seconds}}
    if arguments.keep and arguments.keep.exists():
        kept = json.loads(arguments.keep.read_text())
        if kept.get("settings") != found["settings"]:
            parser.error(f"{arguments.keep}: is of {kept.get('settings')}, expected {found['settings']}: name another file")
        found = kept
    with tempfile.TemporaryDirectory() as temporary:
        for slo in arguments.slo_t1 or [arguments.slo_ms]:
            measured(slo, batching, found, arguments, Path(temporary))
            summary(slo, list(batching), found, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
