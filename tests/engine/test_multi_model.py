"""Models that a platform loads and unloads by name: each call is answered once and in its turn, and memory decides."""

import asyncio
import fcntl
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.base import ModelSpec
from gateway.clock import LoopClock
from gateway.config import Backend, Config, ModelSection, parse_config
from gateway.config.multi_model import MultiModelSection, multi_model_of
from gateway.documents.reader import Document
from gateway.engine.lane_opener import LaneOpener
from gateway.engine.metrics import Metrics
from gateway.engine.multi_model import MultiModel
from gateway.engine.repository import Repository
from gateway.engine.shared_memory import SharedMemoryRegions
from gateway.engine.workers import WorkerPool
from gateway.errors import (
    AlreadyExists,
    BackendFailed,
    ConfigError,
    GatewayError,
    InvalidArgument,
    NotFound,
    NotReady,
    Overloaded,
)
from gateway.process.kept_folders import take
from gateway.types import InferRequest, InferResponse

TIMEOUT_S = 20.0
GIB = 1 << 30
FILE_BYTES = 1000
FAST = {"kind": "synthetic", "fixed_ms": 0, "row_ms": 0}


def sections(*models: dict[str, Any]) -> tuple[ModelSection, ...]:
    """What a package says. Each model is synthetic, where it says nothing else."""
    tensors = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}],
    }
    listed = [{"name": "m", "batching": {"probe_s": 0.001}, "backends": [FAST], **tensors, **model} for model in models]
    return parse_config({"models": listed}, source="package").models


class Lab:
    """Folders `root/NAME` of one file each, read as `packages` says; `blocked` ones only when they are released."""

    def __init__(self, tmp_path: Path, **section: Any) -> None:
        self.root = tmp_path / "models"
        self.root.mkdir()
        self.packages: dict[str, Sequence[ModelSection] | BaseException] = {}
        self.blocked: dict[str, threading.Event] = {}
        self.begun = asyncio.Event()  # one that is blocked
        self.left_bytes = GIB
        self._loop = asyncio.get_running_loop()
        clock = LoopClock(asyncio.get_running_loop())

        def open_runner(model: ModelSection, backend: Backend, declared: ModelSpec) -> WorkerPool:
            return WorkerPool(backend, declared, name=f"{model.name}/{backend.label}", clock=clock)

        self.metrics = Metrics()
        config, _ = multi_model_of(Document("", {}))
        regions = SharedMemoryRegions(tmp_path / "regions")
        opener = LaneOpener(open_runner, metrics=self.metrics, clock=clock)
        self.repository = Repository(config, opener=opener, metrics=self.metrics, clock=clock, regions=regions)
        given = MultiModelSection(**{"root": str(self.root), "spare_bytes": 0, "session_bytes": 0, **section})
        self.models = MultiModel(self.repository, given, self.read, lambda: self.left_bytes)

    def read(self, folder: Path) -> Sequence[ModelSection]:
        if folder.name in self.blocked:
            self._loop.call_soon_threadsafe(self.begun.set)
            assert self.blocked[folder.name].wait(TIMEOUT_S)
        package = self.packages.get(folder.name, sections({}))
        if isinstance(package, BaseException):
            raise package
        return package

    def block(self, name: str) -> threading.Event:
        return self.blocked.setdefault(name, threading.Event())

    def load(self, name: str, target: str = "") -> "asyncio.Task[None]":
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        (folder / "weights").write_bytes(bytes(FILE_BYTES))
        return asyncio.ensure_future(self.models.load(name, str(folder), target))

    def unload(self, name: str) -> "asyncio.Task[None]":
        return asyncio.ensure_future(self.models.unload(name))

    def infer(self, name: str) -> "asyncio.Future[InferResponse | GatewayError]":
        """Hand a request to a loaded model."""
        served = self.repository.model(name)
        array = np.ones((1, 2), np.float32)
        request = InferRequest(name, served.version, "", {"x": array}, 1, LoopClock(asyncio.get_running_loop()).now_ns())
        answered: asyncio.Future[InferResponse | GatewayError] = asyncio.get_running_loop().create_future()
        self.repository.infer(served, request, answered.set_result)
        return answered

    @property
    def names(self) -> list[str]:
        return [listed.name for listed in self.models.page()[0]]


def lab(tmp_path: Path, main: Callable[[Lab], Coroutine[Any, Any, None]], **section: Any) -> None:
    async def run() -> None:
        made = Lab(tmp_path, **section)
        try:
            await asyncio.wait_for(main(made), TIMEOUT_S)
        finally:
            for event in made.blocked.values():
                event.set()
            made.models.end_loads()
            await made.repository.close()

    asyncio.run(run())


async def outcomes(*changes: "asyncio.Task[None]") -> list[type[BaseException] | None]:
    ends = await asyncio.gather(*changes, return_exceptions=True)
    return [None if end is None else type(end) for end in ends]


def test_calls_for_one_name_are_answered_in_their_order(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        released = lab.block("a")
        calls = [lab.load("a"), lab.load("a"), lab.unload("a"), lab.unload("a"), lab.load("a")]
        await asyncio.sleep(0)
        assert not any(call.done() for call in calls)
        assert lab.names == []
        released.set()
        assert await outcomes(*calls) == [None, AlreadyExists, None, NotFound, None]
        assert lab.names == ["a"]
        assert not lab.models._turns  # whose names come from clients

    lab(tmp_path, main)


def test_another_name_is_loaded_and_unloaded_while_one_is_read(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        released = lab.block("slow")
        slow = lab.load("slow")
        assert await outcomes(lab.load("a")) == [None]
        assert isinstance(await lab.infer("a"), InferResponse)
        assert await outcomes(lab.unload("a")) == [None]
        assert not slow.done()
        released.set()
        assert await outcomes(slow) == [None]

    lab(tmp_path, main)


def test_an_unload_waits_until_what_was_accepted_is_answered(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        lab.packages["a"] = sections({"backends": [{"kind": "synthetic", "fixed_ms": 50}], "max_rows": 1})
        await lab.load("a")
        answers = [lab.infer("a") for _ in range(4)]
        unloading = lab.unload("a")
        await asyncio.sleep(0)
        assert await outcomes(unloading) == [None]
        assert all(answer.done() and isinstance(answer.result(), InferResponse) for answer in answers)
        with pytest.raises(NotFound):
            lab.repository.model("a")

    lab(tmp_path, main)


@pytest.mark.parametrize(
    ("package", "raised"),
    [
        (sections({"backends": [{**FAST, "fail_opens": 9}]}), BackendFailed),
        (sections({"version": "1"}, {"version": "2", "backends": [{**FAST, "fail_opens": 9}]}), BackendFailed),
        (ConfigError("no model in it"), InvalidArgument),
        (sections({"name": "a"}, {"name": "b"}), InvalidArgument),
        (RuntimeError("broken"), BackendFailed),
        (MemoryError(), Overloaded),
    ],
)
def test_a_load_that_fails_leaves_nothing(
    tmp_path: Path, package: Sequence[ModelSection] | BaseException, raised: type[GatewayError]
) -> None:
    async def main(lab: Lab) -> None:
        lab.packages["a"] = package
        assert await outcomes(lab.load("a"), lab.load("a")) == [raised, raised]
        assert (lab.names, lab.repository.all_models(), lab.repository.pending) == ([], [], 0)
        assert lab.repository.ready()
        del lab.packages["a"]
        assert await outcomes(lab.load("a")) == [None]

    lab(tmp_path, main)


def test_the_versions_of_one_model_are_one_model(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        lab.packages["a"] = sections({"version": "1", "load_at_start": False}, {"version": "2"})
        await lab.load("a")
        assert [(served.name, served.version, served.state) for served in lab.repository.all_models()] == [
            ("a", "1", "READY"),
            ("a", "2", "READY"),
        ]

    lab(tmp_path, main)


def test_memory_that_is_declared_is_shared_by_what_is_here(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        assert await outcomes(lab.load("a"), lab.load("b")) == [None, None]
        assert await outcomes(lab.load("c")) == [Overloaded]
        await lab.unload("a")
        assert await outcomes(lab.load("c")) == [None]
        assert lab.names == ["b", "c"]

    lab(tmp_path, main, memory_bytes=2 * FILE_BYTES)


def test_what_the_container_has_left_is_promised_once(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        lab.left_bytes = 2 * FILE_BYTES - 1 + 500
        released = lab.block("a")
        loading = lab.load("a")
        await lab.begun.wait()
        with pytest.raises(Overloaded, match=r"model 'b' needs 0.0 MiB .* left, without 0.0 for requests"):
            await lab.load("b")
        released.set()
        await loading  # from now on it is seen in what is left
        assert await outcomes(lab.load("b")) == [None]

    lab(tmp_path, main, spare_bytes=500)


def test_a_process_needs_memory_beside_the_files(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        lab.packages["a"] = sections({"backends": [{**FAST, "isolation": "process", "sessions": 2}]})
        with pytest.raises(Overloaded, match=r"2 processes of 0\.0"):
            await lab.load("a")
        assert await outcomes(lab.load("b")) == [None]

    lab(tmp_path, main, memory_bytes=1500, session_bytes=300)


@pytest.mark.parametrize(
    "words",
    [
        "requirements.txt: pip cannot install it: ERROR: [Errno 28] No space left on device",
        "requirements.txt: cannot be installed: [Errno 122] Disk quota exceeded: '/tmp/gateway-0/packages/making-a'",
        "requirements.txt: cannot be read: Too many open files",
        "inference.py: model_fn raised RuntimeError: can't start new thread",
        "inference.py: model_fn raised BlockingIOError: [Errno 11] Resource temporarily unavailable",
        "inference.py: model_fn raised MemoryError",
    ],
)
def test_whatever_is_used_up_is_told_so_that_others_are_unloaded(tmp_path: Path, words: str) -> None:
    async def main(lab: Lab) -> None:
        for lab.packages["a"] in (ConfigError(words), BackendFailed(words)):
            with pytest.raises(
                Overloaded, match="model 'a' could not be loaded for want of memory, disk or the like: "
            ) as told:
                await lab.load("a")
            assert "gateway-0" not in told.value.message
        assert lab.names == []

    lab(tmp_path, main)


def in_use(folder: Path) -> bool:
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(opened)
    return False


def test_what_was_made_of_a_package_is_let_go_with_the_last_model_of_it(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()

    async def main(lab: Lab) -> None:
        def read(folder: Path) -> Sequence[ModelSection]:
            assert take(kept)
            return lab.read(folder)

        models = MultiModel(lab.repository, MultiModelSection(root=str(lab.root), spare_bytes=0), read, lambda: GIB)
        (lab.root / "m").mkdir()
        for name in "ab":
            await models.load(name, str(lab.root / "m"))
        lab.packages["m"] = ConfigError("no model")
        with pytest.raises(InvalidArgument):
            await models.load("c", str(lab.root / "m"))
        await models.unload("a")
        assert in_use(kept)
        await models.unload("b")
        assert not in_use(kept)

    lab(tmp_path, main)


def test_at_the_end_of_the_server_a_package_that_is_read_holds_nobody_up(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        lab.block("a")
        calls = [lab.load("a"), lab.load("a"), lab.unload("a")]
        await lab.begun.wait()
        lab.models.end_loads()
        assert await outcomes(*calls) == [NotReady, NotReady, NotFound]

    lab(tmp_path, main)


@pytest.mark.parametrize("name", ["", "a/b", "a\nb", "x" * 129])
def test_names_are_held_to_what_a_model_may_be_called(tmp_path: Path, name: str) -> None:
    async def main(lab: Lab) -> None:
        with pytest.raises(InvalidArgument, match=r"model_name: got .* expected 1 to 128 characters"):
            await lab.models.load(name, str(lab.root))

    lab(tmp_path, main)


def test_no_folder_from_outside_of_the_root_is_loaded(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (lab.root / "link").symlink_to(outside)
        (lab.root / "loop").symlink_to("loop")
        (lab.root / "file").write_text("")
        for url, said in {
            str(outside): "expected a folder in",
            f"{lab.root}/../outside": "expected a folder in",
            f"{lab.root}/link": "expected a folder in",
            str(lab.root): "expected a folder in",
            f"{lab.root}/file": "no folder",
            f"{lab.root}/absent": "nothing there",
            f"{lab.root}/loop": "nothing there",
            f"{lab.root}/loop/a": "nothing there",
            f"{lab.root}/{'a' * 1000}": "nothing there",
            "models/a": "expected the path of a folder",
            f"{lab.root}/a\0b": "expected the path of a folder",
            f"{lab.root}/{'a' * 5000}": "expected the path of a folder",
            "": "expected the path of a folder",
        }.items():
            with pytest.raises(InvalidArgument, match=said):
                await lab.models.load("a", url)

    lab(tmp_path, main)


def test_pages_are_by_name_and_models_may_go_between_them(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        for name in "edcba":
            await lab.load(name)
        page, behind = lab.models.page(most=2)
        assert ([listed.name for listed in page], behind) == (["a", "b"], "b")
        await lab.unload("b")
        page, behind = lab.models.page(behind, most=2)
        assert ([listed.name for listed in page], behind) == (["c", "d"], "d")
        page, behind = lab.models.page(behind, most=2)
        assert ([listed.name for listed in page], behind) == (["e"], "")

    lab(tmp_path, main)


def test_a_target_is_the_model_that_was_loaded_for_it_last(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        await lab.load("old", "t.tar.gz")
        await lab.load("new", "t.tar.gz")
        assert lab.models.named("t.tar.gz") == "new"
        await lab.unload("new")
        assert (lab.models.named("t.tar.gz"), lab.models.named("other")) == ("old", "other")

    lab(tmp_path, main)


@pytest.mark.slow
def test_the_series_of_models_that_are_gone_are_bounded(tmp_path: Path) -> None:
    async def main(lab: Lab) -> None:
        lab.packages = {f"{index:03}": sections({"slo": {"p99_ms": 77}}) for index in range(80)}
        for name in lab.packages:
            await lab.load(name)
            lab.metrics.endpoint(name, "1", "rest")
            await lab.unload(name)
        lab.packages["000"] = ConfigError("for now")
        assert await outcomes(lab.load("000"), lab.load("000")) == [InvalidArgument] * 2
        lab.packages["000"] = sections({"slo": {"p99_ms": 7}})
        await lab.load("000")  # it comes back, and stays
        assert isinstance(await lab.infer("000"), InferResponse)
        lab.metrics.endpoint("000", "1", "rest")
        labels = {key.labels[0] for key in await lab.metrics.counted() if key.kind in ("edge", "lane", "model", "cost")}
        assert labels == {"000", *(f"{index:03}" for index in range(16, 80))}
        assert len(lab.metrics._slo_ns) == len(labels)

    lab(tmp_path, main)


def test_a_configuration_of_it_names_no_models() -> None:
    config, section = multi_model_of(Document("x", {"server": {"model_control": True}, "multi_model": {"memory_bytes": 5}}))
    assert isinstance(config, Config)
    assert (config.models, config.server.model_control, section.memory_bytes) == ((), False, 5)
    with pytest.raises(ConfigError, match="models"):
        multi_model_of(Document("x", {"models": []}))
