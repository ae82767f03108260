"""The policy `adaptive`, told only the SLO, beside hand-set `fixed` ones on the real minilm: goodput by offered load.

    python benchmarks/batching_real.py                                 about 12 minutes
    python benchmarks/batching_real.py --seconds 5 --rows 8,32 --delays 0,10

One gateway process (core 0) serves the model once per setting, under as many names; only one is loaded at a time, settings in
turn within each load, so that the machine's mood is shared. Open loop (Poisson) from this process (core 1), sentences of 8 to
64 tokens. Capacity is the throughput of a closed loop on the largest batches. Last, the model becomes twice as slow in mid-
run.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from loadtest.measuring.generator import measure
from loadtest.results import LoadSpec, RunResult, SloSpec

LOADS = (0.3, 0.6, 0.8, 1.0, 1.5)
LENGTHS = "8-64"
VALUES = ("input_ids=1000:29000", "attention_mask=1:1")


def settings(rows: list[int], delays_ms: list[float]) -> dict[str, dict[str, Any]]:
    """Batching section by name."""
    found: dict[str, dict[str, Any]] = {"adaptive": {"policy": "adaptive"}, "greedy": {"policy": "greedy"}}
    for most in rows:
        for delay_ms in delays_ms:
            found[f"fixed-{most}-{delay_ms:g}ms"] = {"policy": "fixed", "max_rows": most, "max_delay_ms": delay_ms}
    return found


def configuration(batching: dict[str, dict[str, Any]], slo_ms: float, flag: Path) -> dict[str, Any]:
    backend = {
        "kind": "python",
        "model": str(Path("benchmarks/slowable.py").resolve()) + ":SlowableEmbedder",
        "class_options": {"model": "models/minilm.onnx", "flag": str(flag)},
    }
    ragged = {"pad": {"input_ids": 0, "attention_mask": 0}, "buckets": [16, 32, 64]}
    models = [
        {"name": name, "slo": {"p99_ms": slo_ms}, "max_rows": 32, "ragged": ragged, "batching": section, "backends": [backend]}
        for name, section in batching.items()
    ]
    return {"models": models}


async def run(target: str, model: str, rate_rps: float, seconds: float, slo_ms: float, seed: int) -> RunResult:
    spec = LoadSpec(
        target=f"http://{target}",
        protocol="rest-binary",
        model=model,
        rate_rps=rate_rps,
        duration_s=seconds,
        seed=seed,
        slo=SloSpec.parse(f"p99<{slo_ms:g}ms"),
        warmup_s=min(1.0, seconds / 5),
        length=LENGTHS,
        values=VALUES,
        timeout_s=max(2.0, 5 * slo_ms / 1e3),
    )
    return await measure(spec)


async def capacity(target: str, model: str, seconds: float) -> float:
    spec = LoadSpec(
        target=f"http://{target}",
        protocol="rest-binary",
        model=model,
        pattern="users:count=64",
        duration_s=seconds,
        length=LENGTHS,
        values=VALUES,
        warmup_s=1.0,
    )
    return (await measure(spec)).succeeded_rps


async def compare(target: str, names: list[str], arguments: argparse.Namespace, flag: Path) -> dict[str, Any]:
    # Without the SLO's shedding, a saturated closed loop on the largest batches is what the machine can do.
    most = await capacity(target, "capacity", arguments.seconds)
    print(f"capacity {most:.0f}/s; goodput of each setting in % of it, and p99 in ms, by offered load", flush=True)
    table: dict[str, dict[str, Any]] = {name: {} for name in names}
    for load in LOADS:
        for name in names:
            result = await run(target, name, load * most, arguments.seconds, arguments.slo_ms, seed=round(load * 10))
            table[name][f"{load:g}"] = figures(result, most)
            print(f"  {load:4.1f}  {name:16} {line(table[name][f'{load:g}'])}", flush=True)
    for name in names:
        loop = asyncio.get_running_loop()
        loop.call_later(arguments.seconds, flag.touch)
        result = await run(target, name, 0.5 * most, 2 * arguments.seconds, arguments.slo_ms, seed=5)
        await asyncio.to_thread(flag.unlink)
        table[name]["slower"] = figures(result, most)
        print(f"  0.5, twice as slow from half time  {name:16} {line(table[name]['slower'])}", flush=True)
    return {"capacity_rps": most, "settings": table}


def figures(result: RunResult, most: float) -> dict[str, Any]:
    return {
        "goodput_share": result.goodput_rps / most,
        "p50_ms": result.latency.p50,
        "p99_ms": result.latency.p99,
        "errors": result.errors,
        "valid": result.valid,
    }


def line(found: dict[str, Any]) -> str:
    valid = "" if found["valid"] else "  generator not valid"
    return f"{found['goodput_share']:6.1%}  p50 {found['p50_ms']:7.1f}  p99 {found['p99_ms']:7.1f}  {found['errors']}{valid}"


def summary(found: dict[str, Any]) -> None:
    table = found["settings"]
    print("\nload   best fixed or greedy           adaptive, in % of the best")
    for load in (*(f"{load:g}" for load in LOADS), "slower"):
        others = {name: row[load]["goodput_share"] for name, row in table.items() if name != "adaptive"}
        best = max(others, key=lambda name: others[name])
        share = table["adaptive"][load]["goodput_share"]
        print(f"{load:6} {best:16} {others[best]:6.1%}   {share:6.1%} of capacity, {share / others[best]:6.1%} of the best")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run")
    parser.add_argument("--slo-ms", type=float, default=150.0)
    parser.add_argument("--rows", default="4,8,16,32")
    parser.add_argument("--delays", default="0,5,20")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    arguments = parser.parse_args()
    batching = settings([int(n) for n in arguments.rows.split(",")], [float(n) for n in arguments.delays.split(",")])
    with tempfile.TemporaryDirectory() as temporary:
        path, flag = Path(temporary, "x.yaml"), Path(temporary, "slow")
        config = configuration(batching, arguments.slo_ms, flag)
        config["models"].append(config["models"][0] | {"name": "capacity", "batching": {"policy": "greedy"}, "slo": None})
        path.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "gateway.cli", "serve", "--no-ray", str(path), "--http-port", "0", "--grpc-port", "0"]
        cores = sorted(os.sched_getaffinity(0))
        gateway = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.sched_setaffinity(0, {cores[0]})
        )
        os.sched_setaffinity(0, {cores[-1]})
        assert gateway.stdout is not None
        try:
            ready = gateway.stdout.readline()
            if not ready.startswith("gateway ready"):
                raise SystemExit(f"the gateway did not start: {ready}")
            target = dict(part.split("=") for part in ready.split()[2:])["http"]
            found = asyncio.run(compare(target, list(batching), arguments, flag))
        finally:
            gateway.terminate()
            gateway.wait(60)
    summary(found)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
