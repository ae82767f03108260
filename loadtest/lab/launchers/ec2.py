"""Candidates on EC2: a machine each, made as `gateway deploy ec2` makes it, and one beside them that loads them.

One load generator serves the whole search: candidates are asked one at a time, its start is paid once, and all are measured
from the same place. It is on demand, whatever the candidates are: what measures must not be taken back. Nobody reaches these
machines but they themselves; all that goes between them and here goes through the bucket.

A start that fails, is throttled, or is interrupted ends what it had begun, and `close` removes what is left of the run. What a
killed process leaves behind ends itself at its expiry; `loadtest reap` finds it by its tags before that, and the rest.
"""

import asyncio
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, Final

from gateway.config import parse_config
from gateway.deploying.ec2 import FAILED, PACKAGE, READY
from gateway.deploying.machine_data import Sent, sent
from gateway.deploying.packing import secrets_here
from gateway.deploying.preflight import bare
from gateway.documents.reader import Document
from gateway.errors import GatewayError
from gateway.process.console import words
from loadtest.errors import LoadtestError
from loadtest.lab.generating import GeneratorLost
from loadtest.lab.launchers.aws.beside import Beside
from loadtest.lab.launchers.aws.door import Aws, AwsRefused, seen_through
from loadtest.lab.launchers.aws.endpoints import Run
from loadtest.lab.launchers.aws.latencies import PlatformLatency, Window
from loadtest.lab.launchers.aws.machine_account import machine_named, offered_in, vcpu_quotas_of, zone_of
from loadtest.lab.launchers.aws.machines import (
    GRPC_PORT,
    HTTP_PORT,
    Kit,
    Site,
    Wanted,
    candidate_machine,
    generator_machine,
    group,
    opened,
    role,
    upload,
)
from loadtest.lab.launchers.aws.packing import Pack, packed
from loadtest.lab.launchers.aws.removal import Piece, check_bucket, cleared, costly, machines_left
from loadtest.lab.launchers.launcher import GENERATOR, Quota, StartFailed, TakenAway, Usage
from loadtest.prices.catalogue import Catalogue
from loadtest.prices.purse import Purse
from loadtest.question.candidates import CandidateSetup
from loadtest.question.machine_preflight import Machines, machine_reasons, share_of
from loadtest.question.preflight import Refusals, check_time, device_of
from loadtest.question.spec_file import BudgetSpec, Ec2Launcher
from loadtest.search.budget import LEAST_SECONDS

START_S: Final = 300.0  # of a machine with the libraries for CPUs: an estimate; measured anew by the first start
_POLL_S: Final = 10.0
_LAST_LINES: Final = 3
_PROFILE_TRIES: Final = 12  # EC2 learns of an instance profile some seconds after IAM has it
_UNANSWERED_TRIES: Final = 2
_SPOT_ENDED: Final = "Server.SpotInstance"  # how the reasons of a spot machine's end begin
_SPOT_LEAVING: Final = "marked-for-termination"  # the notice, two minutes before


@dataclass(frozen=True, slots=True)
class _Started:
    """A machine that answers. request: of spot capacity; "": it is on demand."""

    name: str
    instance: str
    request: str
    address: str


class Ec2:
    """Starts a machine per candidate. aws, pack, clock: what only tests override."""

    paid = True
    start_s = START_S

    def __init__(
        self,
        wanted: Ec2Launcher,
        catalogue: Catalogue,
        budget: BudgetSpec,
        *,
        aws: Aws | None = None,
        pack: Pack = packed,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises: OSError, if wheel or locks cannot be read."""
        self._wanted = wanted
        self._catalogue = catalogue
        self._budget = budget
        self._aws = aws or Aws(wanted.region)
        self._pack = pack
        self._place: Machines | None = None  # as preflight saw it
        self._number = 0
        self.left_behind: list[str] = []
        self._left: dict[str, list[Piece]] = {}  # machines that could not be removed, and so count on
        self.parallel = wanted.parallel
        self.purse = Purse(budget.usd, clock=clock)
        self.beside_usd_per_hour = catalogue.price(wanted.generator, "ec2").usd_per_hour
        run = Run.lasting(secrets.token_hex(4), datetime.now(UTC), budget.minutes * 60)
        self._site = Site(
            run=run,
            region=wanted.region,
            subnet=wanted.subnet,
            bucket=wanted.bucket,
            kit=_kit(wanted),
            profile=wanted.instance_profile,
        )
        # what its candidates share, once the first is started
        self._sharing = asyncio.Lock()
        self._group_id = ""
        self._generator: asyncio.Task[_Started] | None = None
        self._made: list[Piece] = []
        self.generating = Beside(
            self._aws, self._site.post, tagging=self._site.tagging(GENERATOR), up=self._generator_is_up, look=self._look
        )

    def __repr__(self) -> str:
        return f"<Ec2 run {self.run_id} in {self._aws.region}, {self._number} starts, {self.purse!r}>"

    @property
    def run_id(self) -> str:
        return self._site.run.id

    @property
    def reaped_by(self) -> str:
        """The command that removes what this run leaves behind, if it is killed."""
        return f"loadtest reap {self.run_id} --region {self._aws.region} --bucket {self._wanted.bucket} --yes"

    def preflight(self, candidates: Sequence[CandidateSetup]) -> Refusals:
        return asyncio.run(self._preflight(candidates))

    def admit(self) -> None:
        asyncio.run(check_bucket(self._aws, self._wanted.bucket))

    def quota(self, candidate: CandidateSetup) -> Quota | None:
        if self._place is None:
            return None
        share = share_of(bare(candidate.instance_type), self._catalogue, self._place)
        return None if share is None else Quota(share.quota.name, share.left, share.takes)

    async def latencies(self, windows: Sequence[Window]) -> list[PlatformLatency | None]:
        return [None] * len(windows)

    async def start(self, candidate: CandidateSetup) -> "RunningMachine":
        self._number += 1
        name = self._site.run.named(self._number)
        await seen_through(self._share())
        with tempfile.TemporaryDirectory(prefix="loadtest-") as folder:
            # The load generator alone reaches it: it has no doors to lock, nor what locks them.
            document = {**candidate.document, "server": {"http_port": HTTP_PORT, "grpc_port": GRPC_PORT}}
            apart = secrets_here(Document(candidate.name, candidate.document))
            await self._pack(document, Path(folder), self._wanted.bucket, apart)
            package = await asyncio.to_thread(sent, Path(folder) / PACKAGE, PACKAGE)
            pieces = [Piece("package", self._site.key(package), self._wanted.bucket)]
            try:
                await self._aws.change("s3", "put_object", **upload(self._site, package, candidate.name))
                asked = self._machine(name, candidate, document, package)
                self.purse.begin(name, candidate.usd_per_hour)
                started = await self._rented(name, asked, pieces)
                await self._loads()
            except BaseException as exc:
                await seen_through(self.removed(name, pieces))
                if isinstance(exc, AwsRefused | GatewayError):
                    raise StartFailed(str(exc)) from exc
                raise
        return RunningMachine(self, started, pieces)

    async def removed(self, name: str, pieces: Sequence[Piece]) -> None:
        """Remove a machine and what is its own. What cannot be removed is told, and kept in `left_behind`."""
        if left := costly(await cleared(self._aws, pieces, self.left_behind, self.reaped_by)):
            self._left[name] = left
        else:
            self.purse.end(name)

    async def close(self) -> None:
        if self._group_id or self._generator or self._made or self._number or self._left:
            await seen_through(self._swept())

    async def seen(self, started: _Started) -> str:
        """Why a machine no longer runs; "": it does, as far as is known. Raises: TakenAway."""
        try:
            found = await self._described(started.instance)
            if found is not None and (ended := _ended(found)):
                return ended
            if started.request:
                asked = [started.request]
                told = await self._aws.call("ec2", "describe_spot_instance_requests", SpotInstanceRequestIds=asked)
                if any(each.get("Status", {}).get("Code") == _SPOT_LEAVING for each in told["SpotInstanceRequests"]):
                    raise TakenAway("EC2 takes its spot machine back, and has given two minutes' notice")
        except AwsRefused as exc:
            words.warning("loadtest: whether %s still runs could not be asked: %s", started.name, exc)
        return ""

    # What its candidates share.

    async def _share(self) -> None:
        """Make it, once. Raises: GeneratorLost, as without it nobody can be measured."""
        async with self._sharing:
            if self._generator is not None:
                return
            try:
                await self._make_group()
                if not self._site.profile:
                    self._made += [Piece("instance profile", self._site.name), Piece("role", self._site.name)]
                    for operation, parameters in role(self._site):
                        await self._aws.change("iam", operation, **parameters)
                for file in (self._site.kit.wheel, *self._site.kit.locks.values()):
                    await self._aws.change("s3", "put_object", **upload(self._site, file, ""))
            except AwsRefused as exc:
                raise GeneratorLost(f"what all machines share could not be made: {exc}") from exc
            self._generator = asyncio.create_task(self._start_generator())

    async def _make_group(self) -> None:
        told = await self._aws.call("ec2", "describe_subnets", SubnetIds=[self._wanted.subnet])
        asked = group(self._site, told["Subnets"][0]["VpcId"])

        async def make() -> None:
            made = await self._aws.call("ec2", "create_security_group", **asked)
            self._group_id = made["GroupId"]
            self._made.append(Piece("security group", self._group_id))

        await seen_through(make())
        await self._aws.change("ec2", "authorize_security_group_ingress", **opened(self._group_id))

    async def _start_generator(self) -> _Started:
        """Raises: GeneratorLost."""
        name = f"{self._site.name}-{GENERATOR}"
        instance = self._catalogue.instance(self._wanted.generator)
        asked = generator_machine(
            self._site, bare(self._wanted.generator), instance.architecture, group_id=self._group_id, lasts_s=self._lasts_s
        )
        self.purse.begin(GENERATOR, self.beside_usd_per_hour)
        try:
            started = await self._rented(name, asked, self._made)
            due_s = self._aws.clock() + self._wanted.start_timeout_s
            while not await self._waits_for_jobs():
                if self._aws.clock() >= due_s:
                    raise GeneratorLost("the load generator started, and does not ask for jobs")
                await self._aws.pause(_POLL_S)
        except (AwsRefused, StartFailed, TakenAway) as exc:
            raise GeneratorLost(f"the load generator did not start: {exc}") from exc
        return started

    async def _waits_for_jobs(self) -> bool:
        try:
            await self._aws.call("s3", "head_object", Bucket=self._wanted.bucket, Key=self._site.post.ready)
        except AwsRefused as exc:
            if exc.missing or exc.passing:
                return False
            raise
        return True

    async def _loads(self) -> None:
        """Wait for the load generator. Who is cancelled leaves it to the others."""
        assert self._generator is not None
        await asyncio.shield(self._generator)

    def _generator_is_up(self) -> bool:
        task = self._generator
        return task is not None and task.done() and not task.cancelled() and task.exception() is None

    async def _look(self) -> None:
        """Raises: GeneratorLost, if it ended."""
        if self._generator is not None and self._generator_is_up() and (why := await self.seen(self._generator.result())):
            raise GeneratorLost(f"the load generator's {why}")

    async def _swept(self) -> None:
        """Remove all that is left of the run."""
        if self._generator is not None:
            self._generator.cancel()
            with suppress(asyncio.CancelledError, LoadtestError):
                await self._generator
        found = await machines_left(self._aws, self.run_id, self._wanted.bucket)
        self.left_behind.clear()
        for place, why in found.unseen.items():
            self.left_behind.append(f"what is left in {place} could not be listed: {why}: `{self.reaped_by}` tries again")
            words.error("loadtest: %s", self.left_behind[-1])
        counted = {GENERATOR: costly(self._made), **self._left}
        pieces = dict.fromkeys([*self._made, *chain.from_iterable(counted.values()), *found.pieces])
        left = await cleared(self._aws, pieces, self.left_behind, self.reaped_by)
        self._left = {name: machines for name, machines in counted.items() if set(machines) & set(left)}
        for name in counted.keys() - self._left.keys():
            self.purse.end(name)
        self._generator, self._group_id, self._number = None, "", 0
        self._made.clear()

    # One machine.

    @property
    def _lasts_s(self) -> float:
        return max(60.0, (self._site.run.expires - datetime.now(UTC)).total_seconds())

    def _machine(self, name: str, candidate: CandidateSetup, document: dict[str, Any], package: Sent) -> dict[str, Any]:
        config = parse_config(document, source=candidate.name)
        instance_type = bare(candidate.instance_type)
        asked = Wanted(
            name=name,
            candidate=candidate.name,
            instance_type=instance_type,
            architecture=self._catalogue.instance(instance_type).architecture,
            device=device_of(config.models[0].backends[0]),
            config=config,
            package=package,
            spot=self._wanted.spot,
        )
        return candidate_machine(self._site, asked, group_id=self._group_id, lasts_s=self._lasts_s)

    async def _rented(self, name: str, asked: dict[str, Any], pieces: list[Piece]) -> _Started:
        """Start it, and wait until it says that it is ready. pieces: it is added to them once it is there.

        Raises: AwsRefused, StartFailed, TakenAway.
        """
        made: dict[str, Any] = {}

        async def run() -> None:
            made.update(await self._run(asked))
            pieces.insert(0, Piece("instance", made["InstanceId"]))

        for left in range(_PROFILE_TRIES, -1, -1):
            try:
                await seen_through(run())
                break
            except AwsRefused as exc:
                if not (exc.code == "InvalidParameterValue" and "rofile" in str(exc) and left):
                    raise
            await self._aws.pause(_POLL_S)
        address = await self._answering(made["InstanceId"])
        return _Started(name, made["InstanceId"], made.get("SpotInstanceRequestId", ""), address)

    async def _run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Ask for a machine; again, if that is not answered: it may run, and its ClientToken gets the same one.

        One that is never answered for is looked for by its name, which is its token: it would run on, and nobody would count
        it. Raises: AwsRefused.
        """
        unanswered = False
        for left in range(_UNANSWERED_TRIES, -1, -1):
            try:
                told = await self._aws.call("ec2", "run_instances", **asked)
                found: dict[str, Any] = told["Instances"][0]
                return found
            except AwsRefused as exc:
                unanswered |= not exc.code
                if exc.code or not left:
                    if unanswered and (running := await machine_named(self._aws, asked["ClientToken"])):
                        return running
                    raise
            await self._aws.pause(_POLL_S)
        raise AssertionError("the last one returns or raises")

    async def _answering(self, instance: str) -> str:
        """Its address, once its console says that it is ready. Raises: StartFailed, TakenAway."""
        due_s = self._aws.clock() + self._wanted.start_timeout_s
        while True:
            found = None
            try:
                found = await self._described(instance)
            except AwsRefused as exc:
                if not exc.passing:
                    raise
            if found is not None:
                if ended := _ended(found):
                    raise StartFailed(f"its {ended}{_last_lines(await self._console(instance))}")
                if found["State"]["Name"] == "running":
                    said = await self._console(instance)
                    if READY in said:
                        return str(found["PrivateIpAddress"])
                    if FAILED in said:
                        raise StartFailed(f"its setup failed{_last_lines(said)}")
            if self._aws.clock() >= due_s:
                told = f"did not answer within launcher.start_timeout_s {self._wanted.start_timeout_s:g}"
                raise StartFailed(f"{told}{_last_lines(await self._console(instance))}")
            await self._aws.pause(_POLL_S)

    async def _described(self, instance: str) -> dict[str, Any] | None:
        """None: EC2 does not know of it yet, or any more."""
        try:
            told = await self._aws.call("ec2", "describe_instances", InstanceIds=[instance])
        except AwsRefused as exc:
            if exc.missing:
                return None
            raise
        found = [each for held in told["Reservations"] for each in held["Instances"]]
        return found[0] if found else None

    async def _console(self, instance: str) -> str:
        try:
            told = await self._aws.call("ec2", "get_console_output", InstanceId=instance, Latest=True)
        except AwsRefused:
            return ""
        return str(told.get("Output", ""))

    async def _preflight(self, candidates: Sequence[CandidateSetup]) -> Refusals:
        least_s = self.start_s + LEAST_SECONDS
        check_time(self._budget.minutes, least_s)
        zone = await zone_of(self._aws, self._wanted.subnet)
        self._place = place = Machines(
            region=self._aws.region,
            zone=zone,
            offered=await offered_in(self._aws, zone),
            quotas=await vcpu_quotas_of(self._aws, spot=self._wanted.spot),
            locks={name: lock.path.read_text(encoding="utf-8") for name, lock in self._site.kit.locks.items()},
            spot=self._wanted.spot,
            generator=self._wanted.generator,
            generator_usd_per_hour=self.beside_usd_per_hour,
            least_s=least_s,
            max_usd=self._budget.usd,
        )
        return {candidate.name: machine_reasons(candidate, self._catalogue, place) for candidate in candidates}


class RunningMachine:
    """A machine whose gateway answers, to those in its security group alone."""

    invocations = sigv4 = name = ""

    def __init__(self, launcher: Ec2, started: _Started, pieces: Sequence[Piece]) -> None:
        self._launcher = launcher
        self._started = started
        self._pieces = pieces
        self._failure = ""
        self._stopped = False
        self.rest = f"http://{started.address}:{HTTP_PORT}"
        self.grpc = f"{started.address}:{GRPC_PORT}"

    def __repr__(self) -> str:
        return f"<RunningMachine {self._started.name} {self._started.instance}{' stopped' * self._stopped}>"

    def failure(self) -> str:
        return self._failure

    async def look(self) -> None:
        try:
            if ended := await self._launcher.seen(self._started):
                self._failure = f"its {ended}"
        except TakenAway as exc:
            self._failure = str(exc)
            raise

    def usage(self) -> Usage:
        return Usage()

    async def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            await seen_through(self._launcher.removed(self._started.name, self._pieces))


def _kit(wanted: Ec2Launcher) -> Kit:
    wheel = Path(wanted.wheel)
    names = ("cpu", "cuda", "neuron", "aws")
    paths = {name: Path(wanted.locks) / f"requirements-{name}.lock" for name in names}
    return Kit(sent(wheel, wheel.name), {name: sent(path, path.name) for name, path in paths.items() if path.is_file()})


def _ended(instance: dict[str, Any]) -> str:
    """Of a machine that EC2 describes: how it ended; "": it did not. Raises: TakenAway."""
    state = instance["State"]["Name"]
    if state in ("pending", "running"):
        return ""
    reason = instance.get("StateReason", {})
    told = reason.get("Message") or instance.get("StateTransitionReason") or "EC2 does not say why"
    if str(reason.get("Code", "")).startswith(_SPOT_ENDED):
        raise TakenAway(f"EC2 took its spot machine back: {told}")
    return f"machine is {state}: {told}"


def _last_lines(said: str) -> str:
    """Of a console, as the end of a message."""
    lines = [line.strip() for line in said.splitlines() if line.strip()][-_LAST_LINES:]
    return f": {' / '.join(lines)}" if lines else ""
