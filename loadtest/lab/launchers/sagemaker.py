"""Candidates on SageMaker: an endpoint each, made as `gateway deploy sagemaker` makes it, and removed on every way out.

A start that fails, is throttled, or is interrupted removes what it had made. What a process that was killed leaves behind has
tags with an expiry, and `loadtest reap` finds it.
"""

import asyncio
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from gateway.config import parse_config
from gateway.deploying.calls import Call
from gateway.deploying.sagemaker import Hosting, PackedModel
from gateway.deploying.sagemaker_ways import Instances, RealTime
from loadtest.errors import LoadtestError
from loadtest.lab.launchers.aws.door import Aws, AwsRefused, seen_through
from loadtest.lab.launchers.aws.endpoints import LOGS, Run, calls_of
from loadtest.lab.launchers.aws.latencies import PlatformLatency, Window, latencies
from loadtest.lab.launchers.aws.packing import Pack, packed
from loadtest.lab.launchers.aws.removal import Piece, check_bucket, cleared, costly, made_by, pieces_of, quotas_of
from loadtest.lab.launchers.launcher import Quota, StartFailed, Usage
from loadtest.prices.catalogue import Catalogue
from loadtest.prices.purse import Purse
from loadtest.question.candidates import CandidateSetup
from loadtest.question.preflight import Account, Image, Place, Refusals, check_time, device_of, image_for, reasons
from loadtest.question.spec_file import BudgetSpec, SageMakerLauncher
from loadtest.search.budget import LEAST_SECONDS

START_S: Final = 420.0  # of an endpoint with one CPU instance, as users report it; measured anew by the first start
_POLL_S: Final = 10.0
_LAST_LINES: Final = 3


class SageMaker:
    """Starts an endpoint per candidate. aws, pack, clock: what only tests override."""

    paid = True
    start_s = START_S
    generating = None
    beside_usd_per_hour = 0.0

    def __init__(
        self,
        wanted: SageMakerLauncher,
        catalogue: Catalogue,
        budget: BudgetSpec,
        *,
        aws: Aws | None = None,
        pack: Pack = packed,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wanted = wanted
        self._catalogue = catalogue
        self._budget = budget
        self._aws = aws or Aws(wanted.region)
        self._images = [Image(image.uri, image.architecture, image.device, image.cuda) for image in wanted.images]
        self._pack = pack
        self._number = 0
        self._quotas: dict[str, int] | None = None
        self.left_behind: list[str] = []
        self._left: dict[str, list[Piece]] = {}  # of endpoints, which are tried again
        self.parallel = wanted.parallel
        self.purse = Purse(budget.usd, clock=clock)
        self._run = Run.lasting(secrets.token_hex(4), datetime.now(UTC), budget.minutes * 60)

    def __repr__(self) -> str:
        return f"<SageMaker run {self._run.id} in {self._aws.region}, {self._number} starts, {self.purse!r}>"

    @property
    def run_id(self) -> str:
        return self._run.id

    @property
    def reaped_by(self) -> str:
        """The command that removes what this run leaves behind, if it is killed."""
        return f"loadtest reap {self._run.id} --region {self._aws.region} --bucket {self._wanted.bucket} --yes"

    def preflight(self, candidates: Sequence[CandidateSetup]) -> Refusals:
        least_s = self.start_s + LEAST_SECONDS
        check_time(self._budget.minutes, least_s)
        self._quotas = asyncio.run(quotas_of(self._aws))
        place = Place(Account(self._aws.region, quotas=self._quotas), self._images, self._wanted.ami, least_s, self._budget.usd)
        return {candidate.name: reasons(candidate, self._catalogue, place) for candidate in candidates}

    def quota(self, candidate: CandidateSetup) -> Quota | None:
        name = _hosted(candidate)
        return None if self._quotas is None or name not in self._quotas else Quota(name, self._quotas[name], 1)

    def admit(self) -> None:
        asyncio.run(check_bucket(self._aws, self._wanted.bucket))

    async def start(self, candidate: CandidateSetup) -> "RunningEndpoint":
        self._number += 1
        name = self._run.named(self._number)
        made: list[Piece] = []
        runtime = await asyncio.to_thread(self._aws.address, "sagemaker-runtime")
        with tempfile.TemporaryDirectory(prefix="loadtest-") as folder:
            hosting = self._hosting(
                name, candidate, await self._pack(candidate.document, Path(folder), self._wanted.bucket, ())
            )
            try:
                await self._create(hosting, candidate, made)
            except BaseException as exc:
                last_words = await seen_through(self._given_up(hosting, made, asked=isinstance(exc, StartFailed)))
                if isinstance(exc, LoadtestError):
                    raise StartFailed(f"{exc}{last_words}") from exc
                raise
        return RunningEndpoint(self, hosting, runtime)

    async def removed(self, name: str, pieces: Sequence[Piece]) -> None:
        """Remove what is there of an endpoint. What cannot be removed is told, and kept in `left_behind`."""
        if left := await cleared(self._aws, pieces, self.left_behind, self.reaped_by):
            self._left[name] = left
        if not costly(left):  # else it counts on
            self.purse.end(name)

    async def close(self) -> None:
        """Its candidates share nothing: only what is left of them is tried again."""
        if self._left:
            await seen_through(self._swept())

    async def _swept(self) -> None:
        left, self._left = self._left, {}
        self.left_behind.clear()
        for name, pieces in left.items():
            await self.removed(name, pieces)

    async def latencies(self, windows: Sequence[Window]) -> list[PlatformLatency | None]:
        return await latencies(self._aws, windows)

    def _hosting(self, name: str, candidate: CandidateSetup, package: PackedModel) -> Hosting:
        backend = parse_config(candidate.document, source=candidate.name).models[0].backends[0]
        image, _ = image_for(self._catalogue.instance(candidate.instance_type), backend, self._images)
        if image is None:
            raise StartFailed("no image fits it")  # preflight refuses it
        ami = self._wanted.ami if device_of(backend) == "cuda" else ""
        instances = Instances((_hosted(candidate),), 1, 1, ami)
        return Hosting(
            name=name,
            region=self._aws.region,
            image=image.uri,
            role_arn=self._wanted.role_arn,
            package=package,
            way=RealTime(instances),
            subnets=self._wanted.subnets,
            security_groups=self._wanted.security_groups,
        )

    async def _create(self, hosting: Hosting, candidate: CandidateSetup, made: list[Piece]) -> None:
        """made: takes what is there, or may be. Raises: AwsRefused, StartFailed."""
        for call in calls_of(hosting, self._run.tags_of(candidate.name)):
            if call.until is not None:
                await self._wait(call)
                continue
            if call.operation == "create_endpoint":
                self.purse.begin(hosting.name, candidate.usd_per_hour)
            pieces = made_by(call.operation, hosting)
            made += pieces
            try:
                await self._aws.change(call.service, call.operation, **call.parameters)
            except AwsRefused as exc:
                if (call.already and exc.code == call.already) or exc.made_before:
                    continue  # nobody else has names of this run: boto3 asks again where an answer was lost
                if not exc.passing:  # else nobody knows whether it was done, by the first of several tries
                    del made[len(made) - len(pieces) :]
                raise

    async def _wait(self, call: Call) -> None:
        until = call.until
        assert until is not None
        timeout_s = self._wanted.start_timeout_s
        due_s = self._aws.clock() + timeout_s
        while True:
            unasked = ""
            answer: dict[str, Any] = {}
            try:
                answer = await self._aws.call(call.service, call.operation, **call.parameters)
            except AwsRefused as exc:
                if not exc.passing:
                    raise
                unasked = f": {exc}"  # a network that is away for a while costs no candidate
            state = answer.get(until.key)
            if state in until.done:
                return
            if state in until.failed:
                raise StartFailed(f"{until.key} {state}: {answer.get(until.reason) or 'it does not say why'}")
            if self._aws.clock() >= due_s:
                raise StartFailed(f"not in service within launcher.start_timeout_s {timeout_s:g}{unasked}")
            await self._aws.pause(_POLL_S)

    async def _given_up(self, hosting: Hosting, made: Sequence[Piece], *, asked: bool) -> str:
        """Its last words, if they are asked for; then it is removed."""
        last_words = await self._last_words(hosting.name) if asked else ""
        await self.removed(hosting.name, made)
        return last_words

    async def _last_words(self, name: str) -> str:
        """The last lines of its log, as the end of a message."""
        group = LOGS + name
        try:
            streams = await self._aws.call("logs", "describe_log_streams", logGroupName=group, limit=1, descending=True)
            stream = streams["logStreams"][0]["logStreamName"]
            told = await self._aws.call(
                "logs", "get_log_events", logGroupName=group, logStreamName=stream, limit=_LAST_LINES, startFromHead=False
            )
        except (AwsRefused, LookupError):
            return ""
        lines = " / ".join(event["message"].strip() for event in told["events"])
        return f": {lines}" if lines else ""


def _hosted(candidate: CandidateSetup) -> str:
    """Its type, as SageMaker calls it."""
    return f"ml.{candidate.instance_type.removeprefix('ml.')}"


class RunningEndpoint:
    """An endpoint in service: asked for nothing but invocations, which are signed."""

    rest = grpc = ""

    def __init__(self, launcher: SageMaker, hosting: Hosting, runtime: str) -> None:
        self._launcher = launcher
        self._hosting = hosting
        self._stopped = False
        self.name = hosting.name
        self.sigv4 = hosting.region
        self.invocations = f"{runtime}/endpoints/{hosting.name}/invocations"

    def __repr__(self) -> str:
        return f"<RunningEndpoint {self.name}{' stopped' * self._stopped}>"

    def failure(self) -> str:
        return ""  # what ends it is seen by its answers

    async def look(self) -> None:
        """What ends it shows without."""

    def usage(self) -> Usage:
        return Usage()

    async def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            await seen_through(self._launcher.removed(self.name, pieces_of(self._hosting)))
