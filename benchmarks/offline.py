"""`gateway batch` beside the bare sessions: rows per second with the same files, chunks and parts, in turns.

    python -m benchmarks.offline configs/examples/linear.yaml linear --rows 100000
    python -m benchmarks.offline configs/examples/minilm.yaml minilm-text --rows 5000 --text configs/loadtests/sentences.txt

What is bare is the sessions alone, each on a thread of its own, with requests of one full batch each; nothing of the gateway is
between. What both share is the reading, the grouping by shape and the writing. Counted is from the first row read to the output
joined; models are loaded before.
"""

import argparse
import asyncio
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import uvloop

import backends
from backends.base import ModelSpec, Session, example_inputs
from gateway.commands.batch import asker_of
from gateway.config import Config
from gateway.from_python.hosted import configuration, only
from gateway.from_python.loaded import LoadedModel
from gateway.transform.asking import Asker
from gateway.transform.storage import Store
from gateway.transform.work import Files, RowsWork, begin, job_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--text", type=Path, help="its lines, over and over, are the rows; else they are drawn")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    config = only(configuration(arguments.config, whole=False), arguments.model)
    config = config.model_copy(update={"models": (config.models[0].model_copy(update={"slo": None}),)})
    with tempfile.TemporaryDirectory() as name, LoadedModel(config) as model, Bare(config) as bare:
        folder = Path(name)
        source = _text(folder, arguments) if arguments.text else _drawn(folder, model.spec, arguments.rows)
        ratios, rows = [], max(1, model.spec.max_rows)
        for number in range(arguments.rounds):
            ways = [
                ("gateway", asker_of(config.models[0], model, from_text=False)),
                ("bare", Asker(model.spec, bare.ask, from_text=False, request_rows=rows, in_flight=16 * rows)),
            ]
            rates = {}
            for way, asker in ways if number % 2 == 0 else ways[::-1]:
                rates[way] = arguments.rows / _run(asker, model.spec, source, folder / f"{way}{number}.jsonl")
            ratios.append(rates["gateway"] / rates["bare"])
            told = ", ".join(f"{way} {rate:.0f}/s" for way, rate in rates.items())
            print(f"round {number + 1}: {told}, ratio {ratios[-1]:.3f}", flush=True)
        print(f"median ratio {statistics.median(ratios):.3f}")


class Bare:
    """The sessions of a model, without a gateway."""

    def __init__(self, config: Config) -> None:
        (section,) = config.models
        backend: Any = section.backends[0]
        self._model = backends.load(backend.kind, backend.options(), section.declared())
        self._own = threading.local()
        self._sessions: list[Session] = []
        self._pool = ThreadPoolExecutor(backend.sessions, initializer=self._open)

    def _open(self) -> None:
        self._own.session = self._model.open_session(0)
        self._sessions.append(self._own.session)

    async def ask(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: _array(value) for name, value in inputs.items()}
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._run, given)

    def _run(self, given: dict[str, np.ndarray]) -> dict[str, Any]:
        return dict(self._own.session.run(given, {}))

    def __enter__(self) -> "Bare":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        for session in self._sessions:
            session.close()
        self._model.close()


def _array(value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    array = np.array(value)
    return (
        np.array([each.encode() for each in array.ravel()], object).reshape(array.shape) if array.dtype.kind == "U" else array
    )


def _run(asker: Asker, spec: ModelSpec, source: Path, output: Path) -> float:
    """Seconds."""
    store, files = Store.at(str(source)), Files(Store.at(str(output)), Store.at(f"{output}.bad"))
    job = job_of(store, "", chunk_rows=512, output=str(output), columns={}, keep=None)
    done = begin(files, job, restart=True)
    begun_s = time.perf_counter()
    uvloop.run(RowsWork(job, store, files, spec, asker, done, lambda *_: None).run())
    return time.perf_counter() - begun_s


def _drawn(folder: Path, spec: ModelSpec, rows: int) -> Path:
    path = folder / "rows.jsonl"
    inputs = example_inputs(spec, rows, 16)
    rng = np.random.default_rng(0)
    columns = {name: rng.normal(size=array.shape).astype(array.dtype) for name, array in inputs.items()}
    with path.open("wb") as file:
        for index in range(rows):
            row = {name: array[index] for name, array in columns.items()}
            file.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
    return path


def _text(folder: Path, arguments: argparse.Namespace) -> Path:
    lines = arguments.text.read_text().splitlines()
    path = folder / "rows.txt"
    path.write_text("\n".join(itertools.islice(itertools.cycle(lines), arguments.rows)))
    return path


if __name__ == "__main__":
    main()
