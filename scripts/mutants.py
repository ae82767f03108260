"""`make mutants`: change the code at sampled places, one at a time, and see which changes no test notices.

cosmic-ray finds the places, makes the changes and runs the tests; here is what it lacks: a sample by seed, removed statements,
which tests concern a module, and copies of the tree, so that a run that is broken off leaves nothing behind. Places are drawn,
not changes: an operator with eleven possible changes counts once. Of the tests that concern a module its namesake runs first.

EQUIVALENT holds the changes that no behaviour can tell, each with its reason; they are drawn as well, named, and not counted.
docs/testing.md has results.
"""

import argparse
import ast
import multiprocessing
import os
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import cosmic_ray.plugins
import parso
from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.testing import run_tests
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".venv" / "bin" / "python"
EQUIVALENT = ROOT / "scripts" / "equivalent_mutants.txt"

_OF_LOADTEST = {
    "verdict/agreement": "agreement",
    "verdict/analysis": "analysis warnings validity stalls results generator",
    "question/candidates": "spec spec_details spec_agreement",
    "prices/catalogue": "catalogue prices",
    "commands/compare": "compare",
    "verdict/comparison": "comparison compare",
    "reports/conclusion": "recommendation_figures recommendation recommendation_agreement outputs golden",
    "prices/costs": "costs",
    "search/curves": "curves recommendation",
    "verdict/disturbance": "analysis stalls",
    "search/events": "events search search_rules",
    "prices/fleet": "fleet",
    "reports/headline": "outputs recommendation_figures recommendation recommendation_agreement",
    "prices/live_prices": "prices_command prices",
    "question/numerics": "spec_agreement",
    "load/patterns": "patterns",
    "load/payloads": "payloads payload_limits",
    "search/prediction": "prediction",
    "commands/prices": "prices_command prices",
    "lab/profiling": "profiling",
    "search/ranking": "ranking golden search search_limits",
    "reports/recommendation": "recommendation_figures recommendation recommendation_agreement outputs golden",
    "verdict/blocks": "analysis warnings validity stalls results",
    "search/strategy": "search search_rules search_answers search_agreement search_limits",
    "search/simulator": "simulator",
    "question/spec": "spec spec_details spec_agreement",
    "question/spec_file": "spec spec_details spec_agreement",
    "verdict/stalls": "stalls delays analysis",
    "search/standing": "standing search search_rules search_agreement",
    "verdict/statistics": "statistics",
    "verdict/decision": "verdict statistics",
    "wording": "wording outputs",
}
"""Its pure modules, and the names of the test files that concern each."""

_OF_LANES = (
    "tests/engine/test_lane.py",
    "tests/engine/test_lane_bounds.py",
    "tests/engine/test_lane_faults.py",
    "tests/engine",
    "tests/router",
)
_OF_WORKERS = (
    "tests/engine/test_workers.py",
    "tests/engine/test_workers_bounds.py",
    "tests/engine",
    "tests/backends/test_contract.py",
)
TESTS = {
    "gateway/batching": ("tests/batching", "tests/engine/test_lane.py", "tests/engine/test_shared_workers.py", "tests/router"),
    "gateway/routing": ("tests/router",),
    "gateway/engine/dispatcher.py": ("tests/router",),
    "gateway/engine/pair.py": ("tests/router",),
    "gateway/engine/killers.py": ("tests/engine/test_killers.py",),
    "gateway/engine/lane.py": _OF_LANES,
    "gateway/engine/runs.py": _OF_LANES,
    "gateway/engine/worker.py": _OF_WORKERS,
    "gateway/engine/workers.py": _OF_WORKERS,
    **{
        f"loadtest/{module}.py": tuple(f"tests/loadtest/test_{name}.py" for name in f"{tests} values".split())
        for module, tests in _OF_LOADTEST.items()
    },
}
"""Each group of modules, and the tests that concern it. What no quick one notices is shown to the slow ones of the first.

None of them needs a server beside ours.
"""

HANGS_S = 20  # a test that takes longer will not end: an endless loop is the commonest of what a change does
_BITS = {"BitOr", "BitAnd", "BitXor", "LShift", "RShift"}
_IDENTITY = {"Is", "IsNot"}
_LARGE = 100
MEMORY_BYTES = 12 << 30  # of address space: a loop that never ends must not take the machine's


class RemovedStatement(Operator):
    """Leaves out a call, an assignment to what outlives the function, an `x += y`, a raise; `return x` becomes `return None`.

    Not what `__init__` assigns: without the attribute nothing runs, and any test notices.
    """

    def mutation_positions(self, node: parso.tree.NodeOrLeaf) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        function = node.search_ancestor("funcdef")
        if node.parent is None or node.parent.type != "simple_stmt" or function is None:
            return
        match node.type:
            case "expr_stmt":
                augmented = node.children[1].type == "operator" and node.children[1] != "="
                outlives = node.children[0].type in ("atom_expr", "power") and function.name.value != "__init__"
                if augmented or outlives:
                    yield node.start_pos, node.end_pos
            case "return_stmt":
                if node.children[1:] and node.children[1].get_code(include_prefix=False) not in ("None", "False"):
                    yield node.start_pos, node.end_pos
            case "atom_expr" | "power" | "raise_stmt" | "del_stmt":
                yield node.start_pos, node.end_pos

    def mutate(self, node: parso.tree.NodeOrLeaf, index: int) -> parso.tree.NodeOrLeaf:
        left = "return None" if node.type == "return_stmt" else "pass"
        return parso.python.tree.Name(left, node.start_pos, prefix=node.get_first_leaf().prefix)

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("def f():\n    g()\n", "def f():\n    pass\n"),)


class DoubledNumber(Operator):
    """A number above a hundred twice as large: one more, as cosmic-ray makes it, is beneath what anybody promises."""

    def mutation_positions(self, node: parso.tree.NodeOrLeaf) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        if node.type == "number" and _number(node.value) > _LARGE:
            yield node.start_pos, node.end_pos

    def mutate(self, node: parso.tree.NodeOrLeaf, index: int) -> parso.tree.NodeOrLeaf:
        return parso.python.tree.Number(str(2 * _number(node.value)), node.start_pos, prefix=node.prefix)

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("x = 1_000", "x = 2000"),)


cosmic_ray.plugins.OPERATOR_PROVIDERS["ours"] = {"RemovedStatement": RemovedStatement, "DoubledNumber": DoubledNumber}


@dataclass(frozen=True, slots=True, eq=False)
class Mutant:
    """One change. group: a key of TESTS."""

    group: str
    spec: MutationSpec


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What became of it. took_s: of the tests. diff: unified, without its head."""

    mutant: Mutant
    outcome: TestOutcome | None
    took_s: float
    diff: tuple[str, ...]


def annotations(path: Path) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where types are written: a change there says nothing of behaviour."""
    found: list[ast.expr | None] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.arg, ast.AnnAssign)):
            found.append(node.annotation)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.append(node.returns)
    return [
        ((expression.lineno, expression.col_offset), (expression.end_lineno or 0, expression.end_col_offset or 0))
        for expression in found
        if expression is not None
    ]


def is_likely(spec: MutationSpec) -> bool:
    """Whether it is a slip that somebody could make: not `a | b` for `a + b`, nor `is` for `<`, nor `~1` for `-1`."""
    operator = spec.operator_name.partition("/")[2]
    (row, start), (_, end) = spec.start_pos, spec.end_pos
    line = (ROOT / spec.module_path).read_text().splitlines()[row - 1]
    if line[start : end + 1] == "*,":  # in a signature, where cosmic-ray takes it for a product
        return False
    if operator.startswith("ReplaceUnaryOperator"):
        return "_Delete_" in operator or operator.endswith("_UAdd")
    if operator == "NumberReplacer":
        return _number(line[start:end]) <= _LARGE
    old, new = operator.split("_")[-2:] if operator.count("_") > 1 else ("", "")
    return (new in _BITS) <= (old in _BITS) and (new in _IDENTITY) == (old in _IDENTITY)


def _number(literal: str) -> float:
    return ast.literal_eval(literal)


def sampled(group: str, rng: random.Random, most: int) -> list[Mutant]:
    """So many places of a group, each with one of the changes possible there. Raises: SystemExit, if it is not there."""
    path = ROOT / group
    if not path.exists():
        raise SystemExit(f"{group}: a key of TESTS, but no file or folder")
    modules = [path] if path.is_file() else sorted(path.glob("*.py"))
    with tempfile.TemporaryDirectory() as folder, use_db(f"{folder}/session", WorkDB.Mode.create) as db:
        init([module.relative_to(ROOT) for module in modules], db, {})
        specs = [spec for item in db.work_items for spec in item.mutations]
    types = {module: annotations(ROOT / module) for module in {spec.module_path for spec in specs}}
    places: dict[tuple[Path, tuple[int, int]], list[MutationSpec]] = {}
    for spec in sorted(specs, key=lambda spec: (spec.module_path, spec.start_pos, spec.operator_name, spec.occurrence)):
        in_type = any(start <= spec.start_pos < end for start, end in types[spec.module_path])
        if not in_type and spec.definition_name != "__repr__" and is_likely(spec):
            places.setdefault((spec.module_path, spec.start_pos), []).append(spec)
    drawn = rng.sample(sorted(places), min(most, len(places)))
    return [Mutant(group, rng.choice(places[place])) for place in drawn]


def command(group: str, module: Path) -> str:
    """Runs the tests that concern a module."""
    concerned = TESTS[group]
    namesakes = [str(test.relative_to(ROOT)) for test in (ROOT / "tests").glob(f"*/test_{module.stem}.py")]
    tests = [test for test in namesakes if test.startswith(concerned)] + list(concerned)
    pytest = [str(PYTHON), "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--assert=plain", "--hypothesis-seed=0"]
    pytest += ["-o", f"faulthandler_timeout={HANGS_S}", "-o", "faulthandler_exit_on_timeout=true"]
    quick = shlex.join([*pytest, "-m", "not slow and not triton and not ray", *tests])
    slow = shlex.join([*pytest, "-m", "slow and not triton and not ray", concerned[0]])
    return shlex.join(["bash", "-c", f"{quick} && {{ {slow}; rc=$?; [ $rc = 5 ] || exit $rc; }}"])  # 5: none is slow


def enter_copy(parent: str) -> None:
    """Work in a copy of the tree from here on."""
    copy = Path(tempfile.mkdtemp(dir=parent))
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True
    ).stdout
    for name in listed.decode().rstrip("\0").split("\0"):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    os.environ["HOME"] = str(copy)  # what a change makes of a user's own files (prices, caches) goes with the copy
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    subprocess.run([PYTHON, "-m", "compileall", "-q", "backends", "gateway", "loadtest", "tests"], check=False)


def unchanged(group: str) -> float:
    """Seconds that a group's tests take. Raises: SystemExit, if they fail as it is."""
    began = time.monotonic()
    outcome, output = run_tests(command(group, Path(group)), 600)
    if outcome is not TestOutcome.SURVIVED:
        raise SystemExit(f"the tests of {group} fail without any change:\n{output}")
    return time.monotonic() - began


def tried(mutant: Mutant, limit_s: float) -> Result:
    began = time.monotonic()
    result = mutate_and_test([mutant.spec], command(mutant.group, mutant.spec.module_path), limit_s)
    diff = tuple(line for line in (result.diff or result.output or "").splitlines() if line[:3] not in ("---", "+++"))
    return Result(mutant, result.test_outcome, time.monotonic() - began, diff)


def equivalent(result: Result, known: dict[tuple[str, str, str], str]) -> str | None:
    """The reason why nothing can tell, if there is one."""
    spec = result.mutant.spec
    place = f"{spec.module_path} {spec.definition_name or ''}"
    gone, come = ("".join(line[1:] for line in result.diff if line.startswith(sign)) for sign in "-+")
    return known.get(_unspaced(place, gone, come)) or known.get(_unspaced(place, gone, "*"))


def equivalents() -> dict[tuple[str, str, str], str]:
    """Four lines each: module and function, what stands there, what stood there instead (*: anything), why nothing can tell."""
    blocks = [block.splitlines() for block in EQUIVALENT.read_text().strip().split("\n\n")]
    return {_unspaced(place, gone, come): reason for place, gone, come, reason in blocks}


def _unspaced(place: str, gone: str, come: str) -> tuple[str, str, str]:
    return "".join(place.split()), "".join(gone.split()), "".join(come.split())


def report(results: Sequence[Result], seed: int, known: dict[tuple[str, str, str], str]) -> str:
    """As markdown: the rates, then what survived as diffs, what is equivalent, and all that was drawn."""
    lines = [f"# Mutants, seed {seed}", "", "| group | drawn | equivalent | killed | of the others |", "|---|---|---|---|---|"]
    survived = [result for result in results if result.outcome is TestOutcome.SURVIVED]
    reasons = {result: reason for result in survived if (reason := equivalent(result, known))}
    equal, survived = list(reasons), [result for result in survived if result not in reasons]
    for group in dict.fromkeys(result.mutant.group for result in results):
        drawn, even, alive = (sum(result.mutant.group == group for result in some) for some in (results, equal, survived))
        rate = (drawn - even - alive) / max(1, drawn - even)
        lines.append(f"| {group} | {drawn} | {even} | {drawn - even - alive} | {rate:.1%} |")
    for title, some in (("Survived", survived), ("Equivalent", equal)):
        lines += ["", f"## {title}"]
        for result in some:
            reason = f": {reasons[result]}" if result in reasons else ""
            lines += ["", f"{_place(result.mutant)}{reason}", "", "```diff", *result.diff, "```"]
    lines += ["", "## Drawn", ""]
    lines += [
        f"- {_place(result.mutant)}: {result.outcome and result.outcome.value}, {result.took_s:.1f} s" for result in results
    ]
    return "\n".join(lines) + "\n"


def _place(mutant: Mutant) -> str:
    spec = mutant.spec
    return f"{spec.module_path}:{spec.start_pos[0]} {spec.definition_name or ''} {spec.operator_name.partition('/')[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sample", type=int, default=60, help="places for each group (60)")
    parser.add_argument("--modules", nargs="+", default=list(TESTS), choices=TESTS, metavar="GROUP", help=", ".join(TESTS))
    parser.add_argument("--workers", type=int, default=1, help="processes at once (1)")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "mutants.md", help="where the report goes (build/mutants.md)"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended from outside, it removes its copies as well
    os.chdir(ROOT)
    mutants = [
        mutant
        for group in arguments.modules
        for mutant in sampled(group, random.Random(f"{arguments.seed} {group}"), arguments.sample)
    ]
    known = equivalents()
    results = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(
            arguments.workers, multiprocessing.get_context("spawn"), initializer=enter_copy, initargs=(folder,)
        ) as pool,
    ):
        usual_s = dict(zip(arguments.modules, pool.map(unchanged, arguments.modules), strict=True))
        limits_s = [5 * usual_s[mutant.group] + 10 for mutant in mutants]
        for count, result in enumerate(pool.map(tried, mutants, limits_s), 1):
            results.append(result)
            print(f"{count}/{len(mutants)} {_place(result.mutant)}: {result.outcome and result.outcome.value}", flush=True)
            if result.outcome is TestOutcome.SURVIVED:
                print(*result.diff, sep="\n", flush=True)
    told = report(results, arguments.seed, known)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(told)
    print("\n" + told.partition("\n## ")[0].strip(), f"\n{arguments.out}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
