"""`gateway batch`: files of rows through a model, each row once, with the batching that a server has."""

import argparse
import contextlib
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, TextIO, cast

import uvloop
from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from backends.artifact_digests import artifact_digest, file_digest, weights_of
from backends.artifacts import MODEL_FILES
from backends.source import is_source
from gateway.commands.serve import take_neuron_cores
from gateway.config import Backend, Config, ModelSection, Neuron, Triton
from gateway.errors import ConfigError
from gateway.process.command_line import add_command
from gateway.process.completion import completed_by_files
from gateway.process.console import step, words
from gateway.process.prints import apart, log_stream, logged_to

if TYPE_CHECKING:
    from gateway.from_python.loaded import LoadedModel
    from gateway.transform.asking import Asker

_CHUNK_ROWS: Final = 512
_TOLD_EVERY_S: Final = 10.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `batch` to the command line."""
    batch = add_command(
        commands,
        "batch",
        "files of rows through a model, each row once",
        "gateway batch configs/examples/minilm.yaml minilm-text configs/loadtests/sentences.txt embeddings.parquet",
        "gateway batch configs/examples/linear.yaml linear 'rows/*.parquet' s3://bucket/answers.jsonl",
        "gateway batch configs/examples/linear.yaml linear rows.csv answers.csv --column INPUT0=features --keep id",
        more="The model is loaded here, without its SLO: nothing is shed. INPUT is .jsonl, .csv, .txt (a line is a row) or "
        ".parquet, a folder or a pattern of such files; OUTPUT is .jsonl, .csv or .parquet; both also as s3://…. A row of the "
        "output has its number (_row), the columns that are no inputs, and the outputs. Rows without an answer are in "
        "OUTPUT.bad.jsonl, with the reason. Broken off, the same command goes on where it was.",
    )
    config = batch.add_argument("config", metavar="CONFIG", help="what `gateway serve` takes")
    completed_by_files(config)
    batch.add_argument("model", metavar="MODEL")
    batch.add_argument("input", metavar="INPUT")
    batch.add_argument("output", metavar="OUTPUT")
    batch.add_argument("--version", default="", help="of the model; without it the highest")
    batch.add_argument(
        "--column", action="append", default=[], metavar="INPUT=COLUMN", help="an input is that column; may be repeated"
    )
    batch.add_argument("--keep", metavar="COLUMN,…", help="go into the output, instead of all that are no inputs; '': none")
    batch.add_argument("--bad", metavar="FILE", help="for rows without an answer, instead of OUTPUT.bad.jsonl")
    batch.add_argument(
        "--chunk-rows",
        type=int,
        default=_CHUNK_ROWS,
        metavar="N",
        help=f"that are done again at most when broken off ({_CHUNK_ROWS})",
    )
    batch.add_argument("--restart", action="store_true", help="begin anew, whatever was done before")
    batch.set_defaults(run=_batch)


def _batch(arguments: argparse.Namespace) -> int:
    with apart() as results:
        print(_done(arguments), file=results)
    return 0


def _done(arguments: argparse.Namespace) -> str:
    """Returns: what was done, in words."""
    from gateway.transform.rows import format_of
    from gateway.transform.storage import Store
    from gateway.transform.work import Files, RowsWork, alone, bad_before, begin, job_of

    if not 1 <= arguments.chunk_rows <= 1_000_000:
        raise ConfigError(f"--chunk-rows: {arguments.chunk_rows}: expected 1 to 1000000")
    columns = dict(_pair(text) for text in arguments.column)
    keep = None if arguments.keep is None else [name for name in arguments.keep.split(",") if name]
    source, output = Store.at(arguments.input), Store.at(arguments.output)
    bad = Store.at(arguments.bad or f"{arguments.output}.bad.jsonl")
    config = _promising_nothing(arguments.config, arguments.model, arguments.version)
    job = job_of(source, _digest(config), chunk_rows=arguments.chunk_rows, output=arguments.output, columns=columns, keep=keep)
    files = Files(output, bad)
    with alone(files):
        done = begin(files, job, restart=arguments.restart)
        before = bad_before(files, done)
        if done:
            words.info("%d chunks of %d rows are done already", len(done), job.chunk_rows)
        from gateway.from_python.loaded import LoadedModel

        take_neuron_cores(config.models[0].backends)
        with step(f"loading {arguments.model}"):
            model = LoadedModel(config)
        if model.spec.decoupled:
            model.close()
            raise ConfigError(f"model '{arguments.model}' answers in parts: expected one that gives one answer")
        with model, _Progress(quiet=arguments.quiet) as progress:
            from_text = format_of(job.inputs[0].path) == "csv"
            asker = asker_of(config.models[0], model, from_text=from_text)
            uvloop.run(RowsWork(job, source, files, model.spec, asker, done, progress.add).run())
    told = progress.told() + (f", and {before} without an answer before" if before else "")
    return f"{arguments.output}: {told}" + (f"; why: {arguments.bad or bad.path}" if progress.bad or before else "")


def asker_of(section: ModelSection, model: "LoadedModel", *, from_text: bool) -> "Asker":
    """Keeps the sessions of a model busy. Requests of several batches, which the gateway cuts, cost less than one each."""
    from gateway.transform.asking import Asker

    in_flight = max(1, min(section.batching.max_queue_rows // 2, 16 * max(1, model.spec.max_rows)))
    request_rows = max(1, min(in_flight // 4, 4 * model.spec.max_rows))
    return Asker(model.spec, model.predict_async, from_text=from_text, request_rows=request_rows, in_flight=in_flight)


def _pair(text: str) -> tuple[str, str]:
    name, equals, column = text.partition("=")
    if not (name and equals and column):
        raise ConfigError(f"--column: {text}: expected INPUT=COLUMN")
    return name, column


def _promising_nothing(config: str, model: str, version: str) -> Config:
    """One model, without an SLO, by which requests would be shed. Raises: ConfigError."""
    from gateway.from_python.hosted import configuration, only

    found = only(configuration(config, whole=False), model, version)
    return found.model_copy(update={"models": (found.models[0].model_copy(update={"slo": None}),)})


def _digest(config: Config) -> str:
    """Of all that makes a model's answers, as far as files say it."""
    model = config.models[0]
    whole = hashlib.sha256(f"{model.model_dump_json()}{model.rows_stated}".encode())
    for backend in model.backends:
        for path in _files(backend):
            with contextlib.suppress(OSError):
                if isinstance(backend, Neuron):
                    whole.update(artifact_digest(path).encode())
                elif path.is_file():
                    # The file's own first, and no more where there are no weights: so jobs that an older gateway began go on.
                    digests = map(file_digest, (path, *weights_of(path)))
                    whole.update("".join(filter(None, digests)).encode())
    return whole.hexdigest()


def _files(backend: Backend) -> Iterator[Path]:
    """What a backend's configuration names: of its options, files of models alone, for the model may write others."""
    model = None if isinstance(backend, Triton) else getattr(backend, "model", None)  # a Triton's is a name there
    if model is not None and is_source(model):
        model = model.rpartition(":")[0]
        model = model if model.endswith(".py") else None  # a module that is installed
    if model is not None:
        yield Path(model)
    options = {**getattr(backend, "class_options", {}), **getattr(backend, "factory_options", {})}
    yield from (Path(name) for name in options.values() if isinstance(name, str) and name.endswith(MODEL_FILES))


class _Progress:
    """Counts rows, and says how far it is: by a bar in a terminal, else by a line every ten seconds."""

    def __init__(self, *, quiet: bool) -> None:
        self._rows = self.bad = 0
        self._begun_s = self._told_s = time.monotonic()
        self._console = console = Console(file=log_stream(), stderr=True, highlight=False)
        self._redrawn = console.is_terminal and not console.is_dumb_terminal and not quiet
        columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not self._redrawn)
        self._share = 0.0
        self._task = self._bar.add_task("reading", total=1.0)
        self._shown = contextlib.ExitStack()

    def __enter__(self) -> "_Progress":
        if self._redrawn:  # a log line goes above the bar
            self._shown.enter_context(logged_to(cast("TextIO", FileProxy(self._console, self._console.file))))
        self._shown.enter_context(self._bar)
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()

    def add(self, rows: int, bad: int, share: float) -> None:
        """A chunk is done. share: of the input, that was read for it and those before it."""
        self._rows += rows
        self.bad += bad
        self._share = max(self._share, share)
        self._bar.update(self._task, completed=self._share, description=self.told())
        now_s = time.monotonic()
        if not self._redrawn and now_s - self._told_s >= _TOLD_EVERY_S:
            self._told_s = now_s
            words.info("%.0f %%, %s", 100 * self._share, self.told())

    def told(self) -> str:
        took_s = time.monotonic() - self._begun_s
        bad = f", {self.bad} without an answer" if self.bad else ""
        return f"{self._rows} rows{bad}, {self._rows / took_s:.0f}/s"
