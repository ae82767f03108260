"""Is a rate proven within the budget, how near the peak is it, and does a longer run say the same?

    pip install scikit-learn
    python -m benchmarks.searches --out DIR [--stop-after-minutes N] [NAME …]

Each search is `loadtest recommend SPEC` in a process of its own, as a user types it, on models that the search was not tuned
on: `tiny` (one MatMul of 4 by 3: the load generator is the limit), `mlp` (eight layers of 1024², four candidates), `forest`
(50 trees of scikit-learn in a Python class), `slow` (takes 300 ms, where 100 are asked: no candidate), and `minilm`
(configs/loadtests/minilm-local.yaml). Ten in all, and `slow`. The last search of each goes on by `--resume --budget-minutes`.
Budgets are what a proof takes, and one more that raises it (docs/loadtest.md, "How long a search needs"): 75 minutes in all.
What was measured stays in DIR: interrupted, or stopped after N minutes, the benchmark goes on when it is called again.

Printed for each: the state, the rate claimed for the winner, what share that is of its peak, how much dearer it is than the
longer run's winner, and the seconds it took. **The peak is what was measured**: of all valid runs of all searches of that
model, the longer one and the overloads included, the share in time is made to fall with the rate (isotonic regression, weighted
by requests). The peak is the geometric middle between the highest rate that keeps the SLO and the lowest that does not; where
none misses it, it is the highest that was run. Beside it: the highest rate that any run proved, and the lowest that failed.

Exit code 1, unless 9 of 10 are proven at 0.85 of the peak or more, each ended within its budget plus 30 s, the longer runs find
the same states, and none finds a winner for `slow`.
"""

import argparse
import itertools
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import yaml
from onnx import TensorProto, helper, numpy_helper

from loadtest.verdict.statistics import falling

GOOD = 0.85  # of the peak
REQUIRED = 0.99  # share in time: every model here is asked for p99
GRACE_S = 30.0  # beyond the budget
OF_ALL = 0.9
TIMES = {"tiny": 3, "mlp": 2, "forest": 3, "minilm": 2, "slow": 1}  # searches of each
MINUTES = {"tiny": 8.0, "mlp": 4.0, "forest": 5.0, "minilm": 8.0, "slow": 1.5}  # of each search
LONGER_MINUTES = 3.0
PYTHON_MODELS = '''\
import time

import numpy as np


class Forest:
    """A random forest of scikit-learn on four features."""

    inputs = (("x", "FP32", (-1, 4)),)
    outputs = (("y", "FP32", (-1, 1)),)

    def __init__(self):
        from sklearn.ensemble import RandomForestRegressor

        x = np.random.default_rng(0).standard_normal((2000, 4)).astype(np.float32)
        self.model = RandomForestRegressor(50, n_jobs=1, random_state=0).fit(x, x.sum(1))

    def predict(self, inputs):
        return {"y": self.model.predict(inputs["x"]).astype(np.float32)[:, None]}


class Slow:
    """Takes 300 ms, whatever it is asked."""

    inputs = (("x", "FP32", (-1, 4)),)
    outputs = (("y", "FP32", (-1, 1)),)

    def predict(self, inputs):
        time.sleep(0.3)
        return {"y": inputs["x"][:, :1]}
'''


def _dense(path: Path, widths: list[int]) -> None:
    """An ONNX file of layers of these widths, with ReLU between them."""
    random = np.random.default_rng(0)
    nodes, weights, tensor = [], [], "x"
    for layer, (wide, next_wide) in enumerate(itertools.pairwise(widths)):
        values = (random.standard_normal((wide, next_wide)) / math.sqrt(wide)).astype(np.float32)
        weights.append(numpy_helper.from_array(values, f"w{layer}"))
        last = layer == len(widths) - 2
        nodes.append(helper.make_node("MatMul", [tensor, f"w{layer}"], ["y" if last else f"h{layer}"]))
        if not last:
            nodes.append(helper.make_node("Relu", [f"h{layer}"], [f"r{layer}"]))
            tensor = f"r{layer}"
    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width])]
        for name, width in (("x", widths[0]), ("y", widths[-1]))
    )
    graph = helper.make_graph(nodes, "dense", inputs, outputs, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))


def _spec(name: str, widths: tuple[int, int], backend: dict[str, Any], p99_ms: float, **settings: list[int]) -> dict[str, Any]:
    return {
        "model": {
            "name": name,
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, widths[0]]}],
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, widths[1]]}],
            "max_rows": 32,
        },
        "slo": {"p99_ms": p99_ms},
        "launcher": {"kind": "local"},
        "candidates": [{"backend": backend, "settings": settings, "usd_per_hour": 0.05, "price_source": "made up"}],
        "budget": {"minutes": MINUTES[name]},
    }  # fmt: skip


def specs(folder: Path) -> dict[str, Path]:
    """Writes models and specs there."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    _dense(folder / "tiny.onnx", [4, 3])
    _dense(folder / "mlp.onnx", [1024] * 9)
    (folder / "own.py").write_text(PYTHON_MODELS)
    own = {name: {"kind": "python", "model": f"{folder / 'own.py'}:{name}"} for name in ("Forest", "Slow")}
    ours = {name: {"kind": "onnxruntime", "model": str(folder / f"{name}.onnx")} for name in ("tiny", "mlp")}
    documents = {
        "tiny": _spec("tiny", (4, 3), ours["tiny"], 50),
        "mlp": _spec("mlp", (1024, 1024), ours["mlp"], 50, sessions=[1, 2], threads=[1, 2]),
        "forest": _spec("forest", (4, 1), own["Forest"], 100, sessions=[1, 2]),
        "slow": _spec("slow", (4, 1), own["Slow"], 100, sessions=[1, 2]),
    }
    for name, document in documents.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    return {name: folder / f"{name}.yaml" for name in documents} | {"minilm": Path("configs/loadtests/minilm-local.yaml")}


def recommended(spec: Path, out: Path, *more: str) -> tuple[dict[str, Any], float]:
    """The report, and the seconds it took; those of an earlier call, if there are any.

    Raises: RuntimeError, with what was said, if there is no report.
    """
    path, took = out / "report.json", out / "seconds.txt"
    if not took.exists():
        began = time.monotonic()
        command = [sys.executable, "-m", "loadtest.cli", "recommend", str(spec), "--out", str(out), *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not path.exists():
            raise RuntimeError(f"{spec} ended with {done.returncode}: {done.stdout[-1000:]} {done.stderr[-1000:]}")
        took.write_text(str(time.monotonic() - began))
    report: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return report, float(took.read_text())


def longer_one(spec: Path, short: Path, out: Path) -> dict[str, Any]:
    """What the last search says after LONGER_MINUTES more."""
    if not (out / "seconds.txt").exists():
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(short, out, ignore=shutil.ignore_patterns("report.*", "seconds.txt"))
    return recommended(spec, out, "--resume", "--budget-minutes", str(LONGER_MINUTES))[0]


@dataclass(frozen=True, slots=True)
class Peak:
    """Of one candidate, by all its runs. rps: as in the module's text. proven_rps: 0 if none is. failed_rps: may be inf."""

    rps: float
    proven_rps: float
    failed_rps: float


def peak_of(name: str, reports: Sequence[dict[str, Any]]) -> Peak:
    """By reports that share no runs, at least one of which has run the candidate."""
    runs = [run for report in reports for run in _candidate(report, name)["runs"]]
    runs = sorted((run for run in runs if run["valid"] and not run["failure"] and run["blocks"]), key=lambda run: run["rps"])
    requests = [sum(sent for sent, _ in run["blocks"]) for run in runs]
    met = [sum(met for _, met in run["blocks"]) for run in runs]
    shares = falling(np.divide(met, requests), requests)
    rates = np.array([run["rps"] for run in runs])
    kept, missed = rates[shares >= REQUIRED], rates[shares < REQUIRED]
    rps = math.sqrt(kept[-1] * missed[0]) if len(kept) and len(missed) else (kept[-1] if len(kept) else missed[0])
    return Peak(
        float(rps),
        max((run["rps"] for run in runs if run["verdict"] == "pass" and run["purpose"] == "peak"), default=0.0),
        min((run["rps"] for run in runs if run["verdict"] == "fail"), default=math.inf),
    )


def compared(short: dict[str, Any], long: dict[str, Any], reports: Sequence[dict[str, Any]]) -> tuple[str, float]:
    """In words, and the share of its peak that was proven of the winner. reports: of the model, as for `peak_of`."""
    if not short["winner"]:
        return f"{short['state']}: {short['answer']}", 0.0
    before, after = (_candidate(report, short["winner"]) for report in (short, long))
    peak = peak_of(short["winner"], reports)
    share = before["max_rps"] / peak.rps
    text = (
        f"{short['state']}: {short['winner']} at {before['max_rps'] or before['held_rps']:.4g}/s, {share:.2f} of its peak "
        f"({peak.rps:.4g}/s; proven up to {peak.proven_rps:.4g}/s, fails from {peak.failed_rps:.4g}/s on)"
    )
    if long["winner"] and after["cost_per_million_usd"]:
        dearer = after["cost_per_million_usd"] / _candidate(long, long["winner"])["cost_per_million_usd"] - 1
        text += f"; {dearer:+.1%} over {long['winner']}"
    return text, share


def misled(name: str, short: dict[str, Any], long: dict[str, Any]) -> bool:
    """Whether a search says what it must not: something else than the longer one, or a winner where there is none."""
    return short["state"] != long["state"] or (name == "slow" and bool(short["winner"] or long["winner"]))


def _candidate(report: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in report["candidates"] if one["name"] == name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of the models; default: all")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stop-after-minutes", type=float, default=math.inf)
    arguments = parser.parse_args()
    began = time.monotonic()
    every = specs(arguments.out)
    good = total = faults = 0
    for name in arguments.names or TIMES:
        shorts = []
        for number in range(1, TIMES[name] + 1):
            if time.monotonic() - began > 60 * arguments.stop_after_minutes:
                print("stopped: call again")
                return 0
            budget = ("--budget-minutes", str(MINUTES[name]))  # as minilm's spec is the demo's, and has its own
            short, seconds = recommended(every[name], arguments.out / f"{name}-{number}", "--fresh", *budget)
            shorts.append(short)
            late = seconds > short["seconds_budget"] + GRACE_S
            faults += late
            told = f"{short['state']}, {seconds:.0f} s of {short['seconds_budget']:.0f} s{', too late' if late else ''}"
            print(f"{name} {number}: {told}", flush=True)
        long = longer_one(every[name], arguments.out / f"{name}-{TIMES[name]}", arguments.out / f"{name}-longer")
        print(f"{name}, {LONGER_MINUTES:g} minutes more: {long['state']}: {long['answer']}", flush=True)
        for number, short in enumerate(shorts, 1):
            text, share = compared(short, long, [*shorts[:-1], long])  # the longer one holds the last
            print(f"  {number}: {text}", flush=True)
            faults += misled(name, short, long)
            if name != "slow":
                total, good = total + 1, good + (share >= GOOD)
    print(f"proven at {GOOD:g} of the peak or more: {good} of {total}; other faults: {faults}")
    return 0 if good >= OF_ALL * total and not faults else 1


if __name__ == "__main__":
    sys.exit(main())
