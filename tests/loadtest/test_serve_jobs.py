"""The load generator of a search on EC2 as a process: it gets jobs from S3, loads a real gateway, and gives back results."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest

from loadtest.errors import TargetError
from loadtest.lab.generating import AnswersJob, GeneratorLost, LoadJob
from loadtest.lab.jobs import Order, read, written
from loadtest.lab.launchers.aws.agent import Agent
from loadtest.lab.launchers.aws.beside import Beside
from loadtest.lab.launchers.aws.door import Aws
from loadtest.lab.launchers.aws.post import Post
from loadtest.lab.launchers.local import Local, RunningLocal
from loadtest.measuring.progress import Progress
from loadtest.results import LoadSpec, SloSpec
from tests.loadtest.examples import example_spec
from tests.loadtest.fake_aws import BUCKET, REGION
from tests.loadtest.fake_s3 import FakeS3, fake_s3

TAGGING = "loadtest%3Arun=abc1&loadtest%3Aexpires=2026-11-24T12%3A00%3A00%2B00%3A00"
POST = Post(BUCKET, "serving-gateway/loadtest-abc1-ec2")


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    """Whom boto3 asks here, and in processes that are started."""
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    with fake_s3() as fake:
        for name, value in fake.variables.items():
            monkeypatch.setenv(name, value)
        yield fake


@asynccontextmanager
async def generator() -> AsyncIterator[Beside]:
    """`loadtest serve-jobs` as its machine runs it."""
    command = [sys.executable, "-m", "loadtest.cli", "serve-jobs", "--region", REGION, "--bucket", BUCKET]
    command += ["--base", POST.base, "--most-s", "100", "--tagging", TAGGING]

    async def look() -> None:
        assert process.returncode is None, "it ended"

    process = await asyncio.create_subprocess_exec(*command)
    try:
        yield Beside(Aws(REGION, pause=soon), POST, tagging=TAGGING, up=lambda: True, look=look)
    finally:
        process.terminate()
        await process.wait()


async def soon(seconds: float) -> None:
    await asyncio.sleep(seconds / 10)


@asynccontextmanager
async def gateway() -> AsyncIterator[RunningLocal]:
    launcher = {"kind": "local", "stands_for": {"c7i.large": [min(os.sched_getaffinity(0))]}}
    candidates = [{"instances": ["c7i.large"], "backend": {"kind": "synthetic", "fixed_ms": 2}}]
    slo = {"p99_ms": 900}  # a request that cannot be answered by then is refused, and a busy machine may take long
    (candidate,) = example_spec(slo=slo, launcher=launcher, candidates=candidates).candidates
    running = await Local(start_timeout_s=60).start(candidate)
    try:
        yield running
    finally:
        await running.stop()


@pytest.mark.slow
def test_jobs_are_done_beside_the_gateway_and_give_back_valid_results(s3: FakeS3, tmp_path: Path) -> None:
    rows = [{"name": "x", "datatype": "FP32", "shape": [1, 4]}]
    requests = tmp_path / "requests.jsonl"
    requests.write_text("".join(f"{json.dumps({'inputs': [{**rows[0], 'data': [n, 2, 3, 4]}]})}\n" for n in range(20)))
    seen: list[Progress] = []

    async def work() -> tuple[Any, ...]:
        async with gateway() as running, generator() as beside:
            spec = LoadSpec(running.rest, "rest-binary", "adder", slo=SloSpec.parse("p99<900ms"), timeout_s=5)
            load = LoadJob(
                LoadSpec(**{**as_keys(spec), "rate_rps": 60.0, "duration_s": 1.5, "payloads": (str(requests),)}), running.rest
            )
            loaded = await beside.load(load, stop=asyncio.Event(), on_progress=seen.append)
            answers = await beside.answers(AnswersJob(spec, (str(requests),), 20))
            nobody = LoadSpec(**{**as_keys(spec), "target": "http://127.0.0.1:9", "rate_rps": 60.0})
            with pytest.raises(TargetError, match="cannot be asked"):
                await beside.load(LoadJob(nobody), stop=asyncio.Event())
            return loaded, answers

    loaded, answers = asyncio.run(work())
    result = loaded.result
    assert result.requests == 90  # 60/s · 1.5 s
    assert result.succeeded == result.requests, result
    assert result.spec.target.startswith("http://127.0.0.1:")
    assert sum(count for count, _ in loaded.batches.by_rows.values()) > 0
    assert seen
    assert len(answers) == 20
    assert all(np.array_equal(answer["y"], np.array([[n, 2, 3, 4]], np.float32)) for n, answer in enumerate(answers))
    assert {POST.job(1), POST.result(1), POST.taken(1), POST.ready} <= {key.removeprefix(f"{BUCKET}/") for key in s3.tags}
    assert set(s3.tags.values()) == {TAGGING}


def as_keys(spec: LoadSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in LoadSpec.__dataclass_fields__}


# One job at a time, by a process that only says what it was told to.

SAYS = "import sys; line = sys.stdin.readline(); print({!r}, flush=True); {}"
VALUE = '{"outcome": {"value": 5}}'
JOB = LoadJob(LoadSpec("http://127.0.0.1:9", duration_s=1))


def agent(program: str) -> Agent:
    return Agent(Aws(REGION), POST, tagging=TAGGING, poll_s=0.01, command=(sys.executable, "-c", program))


def result_of(s3: FakeS3, program: str, job: bytes, number: int = 1) -> Any:
    """What a new agent puts there for a job."""
    s3.objects[f"{BUCKET}/{POST.job(number)}"] = job
    place = f"{BUCKET}/{POST.result(number)}"

    async def work() -> None:
        serving = asyncio.create_task(agent(program).serve(20))
        async with asyncio.timeout(20):
            while place not in s3.objects:  # noqa: ASYNC110  # another thread puts it there
                await asyncio.sleep(0.01)
        serving.cancel()
        await asyncio.wait([serving])

    asyncio.run(work())
    return json.loads(s3.objects[place])


def test_each_job_is_done_once_also_by_who_comes_after(s3: FakeS3, tmp_path: Path) -> None:
    done = tmp_path / "done"
    program = SAYS.format(VALUE, f"open({str(done)!r}, 'a').write('1')")
    assert result_of(s3, program, written(Order(JOB, 10, {}))) == {"value": 5}
    assert result_of(s3, program, written(Order(JOB, 10, {})), number=2) == {"value": 5}  # by another agent
    assert done.read_text() == "11"


def test_a_job_that_somebody_else_began_is_not_begun_again(s3: FakeS3) -> None:
    s3.objects[f"{BUCKET}/{POST.taken(1)}"] = b""
    assert result_of(s3, SAYS.format(VALUE, ""), written(Order(JOB, 10, {})))["error"] == "GeneratorLost"


@pytest.mark.parametrize(
    ("program", "most_s", "told"),
    [
        (SAYS.format("{}", "sys.stdin.read()"), 0.2, "the job did not end within 0.2 s"),
        ("raise SystemExit(3)", 10, "the job's process ended with code 3 before it told anything"),
        (SAYS.format("no JSON", ""), 10, "the job's process told no JSON"),
    ],
)
def test_a_job_that_does_not_end_well_is_told_as_the_generators_fault(
    s3: FakeS3, program: str, most_s: float, told: str
) -> None:
    answer = result_of(s3, program, written(Order(JOB, most_s, {})))
    assert answer["error"] == "GeneratorLost"
    assert told in answer["message"]


@pytest.mark.parametrize(("wish", "ends"), [(b"stop", True), (b"drop", False)])
def test_a_job_ends_when_it_is_told_to(s3: FakeS3, wish: bytes, ends: bool) -> None:
    s3.objects[f"{BUCKET}/{POST.stops(1)}"] = wish
    program = f"import sys; sys.stdin.readline(); assert sys.stdin.readline(); print({VALUE!r}, flush=True)"
    assert (result_of(s3, program, written(Order(JOB, 20, {}))) == {"value": 5}) is ends


def test_a_job_that_is_none_is_told_so(s3: FakeS3) -> None:
    assert result_of(s3, "", b'{"kind": "dance"}')["error"] == "UsageError"


def test_who_is_cancelled_or_waits_too_long_has_the_job_dropped(s3: FakeS3) -> None:
    async def look() -> None:
        raise GeneratorLost("it is gone")

    async def nothing(seconds: float) -> None:
        await asyncio.sleep(0)

    beside = Beside(Aws(REGION, pause=nothing), POST, tagging=TAGGING, up=lambda: False, look=look)

    async def work() -> None:
        assert await beside.limit_rps("grpc") == 5000  # while it is not there
        with pytest.raises(GeneratorLost, match="it is gone"):
            await beside.load(JOB, stop=asyncio.Event())

    asyncio.run(work())
    assert s3.objects[f"{BUCKET}/{POST.stops(1)}"] == b"drop"
    assert read(s3.objects[f"{BUCKET}/{POST.job(1)}"]).job == JOB
