"""Removes what a run has made, whoever is left to do it: the run itself, on every way out, or `loadtest reap` after it."""

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal, get_args

from gateway.aws.client import UNSAID
from gateway.deploying.sagemaker import PREFIX as KEYS
from gateway.deploying.sagemaker import Hosting, PackedModel
from gateway.process.console import words
from loadtest.errors import LoadtestError, UsageError
from loadtest.lab.launchers.aws.door import Aws, AwsRefused
from loadtest.lab.launchers.aws.endpoints import LOGS, OURS, PATH, TAG_RUN, due, run_in

Kind = Literal[
    "instance", "endpoint", "volume", "security group", "instance profile", "role", "configuration", "model", "package", "logs"
]

_ORDER: Final[tuple[Kind, ...]] = get_args(Kind)  # what costs most goes first, and nothing before what needs it
_ENDED: Final = ("terminated",)
_STANDING: Final = ("pending", "running", "shutting-down", "stopping", "stopped")
_TRIES: Final = 90
_PAUSE_S: Final = 10.0
_UNSEEN_TRIES: Final = 6  # a minute
_UNANSWERED_S: Final = 180.0  # how long a removal asks again where nobody answers


@dataclass(frozen=True, slots=True)
class Piece:
    """One thing that is there. name: EC2's own of an instance, a volume or a group; a key in a bucket. bucket: of that."""

    kind: Kind
    name: str
    bucket: str = ""
    tags: dict[str, str] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return f"{self.kind} s3://{self.bucket}/{self.name}" if self.bucket else f"{self.kind} {self.name}"


@dataclass(slots=True, eq=False)
class Left:
    """What there is of a run, or of several. unseen: what was not looked at to its end, such as EC2 -> why."""

    pieces: list[Piece] = field(default_factory=list)
    unseen: dict[str, AwsRefused] = field(default_factory=dict)

    async def add(self, place: str, listed: AsyncIterator[Piece]) -> None:
        """All of a listing; of one that breaks off, what came before."""
        try:
            async for piece in listed:
                self.pieces.append(piece)
        except AwsRefused as exc:
            self.unseen[place] = exc


class NotRemoved(LoadtestError):
    """Something is left, or may be, and may cost money. pieces: what of it is known."""

    def __init__(self, message: str, pieces: Sequence[Piece] = ()) -> None:
        super().__init__(message, pieces)
        self.pieces = pieces

    def __str__(self) -> str:
        return str(self.args[0])


def made_by(operation: str, hosting: Hosting) -> list[Piece]:
    """What a call of its creation makes."""
    if operation == "put_object" and isinstance(hosting.package, PackedModel):
        return [Piece("package", hosting.key, hosting.package.bucket)]
    made = {
        "create_model": [Piece("model", hosting.state)],
        "create_endpoint_config": [Piece("configuration", hosting.state)],
        "create_endpoint": [Piece("endpoint", hosting.name), Piece("logs", LOGS + hosting.name)],
    }
    return made.get(operation, [])


def pieces_of(hosting: Hosting) -> list[Piece]:
    """All that it consists of."""
    operations = ("put_object", "create_model", "create_endpoint_config", "create_endpoint")
    return [piece for operation in operations for piece in made_by(operation, hosting)]


async def remove(aws: Aws, pieces: Iterable[Piece]) -> None:
    """Remove what is there of these, and see that endpoints and machines are gone. What is not there is no fault.

    Raises: NotRemoved, once everything was tried, with what is left and why.
    """
    left, whys, due_s = [], [], aws.clock() + _UNANSWERED_S
    for piece in sorted(pieces, key=lambda piece: _ORDER.index(piece.kind)):
        try:
            await _remove(aws, piece, due_s)
        except (AwsRefused, NotRemoved) as exc:
            left.append(piece)
            whys.append(f"{piece}: {exc}")
    if left:
        raise NotRemoved("could not be removed: " + "; ".join(whys), left)


async def cleared(aws: Aws, pieces: Iterable[Piece], left_behind: list[str], reaped_by: str) -> list[Piece]:
    """The same for a launcher: what cannot be removed is told, also to `left_behind`, and given back."""
    try:
        await remove(aws, pieces)
    except NotRemoved as exc:
        left_behind.append(f"{exc}: `{reaped_by}` tries again")
        words.error("loadtest: %s", left_behind[-1])
        return [*exc.pieces]
    return []


def costly(pieces: Iterable[Piece]) -> list[Piece]:
    """Those that cost by the hour."""
    return [piece for piece in pieces if piece.kind in ("endpoint", "instance")]


async def _remove(aws: Aws, piece: Piece, due_s: float) -> None:
    """due_s: by its clock, with calls that nobody answers. Raises: AwsRefused; NotRemoved, if it does not go."""
    for service, operation, parameters in _deletion(piece):
        for tries in range(_TRIES, -1, -1):
            try:
                await aws.change(service, operation, **parameters)
                break
            except AwsRefused as exc:
                # EC2 knows of a machine some seconds after it has started it.
                unseen = exc.missing and piece.kind == "instance" and tries > _TRIES - _UNSEEN_TRIES
                if exc.missing and not unseen:
                    break
                unanswered = not exc.code and aws.clock() < due_s
                if not ((exc.busy or exc.throttled or unseen or unanswered) and tries):
                    raise
            await aws.pause(_PAUSE_S)
    if not costly([piece]):
        return
    for _ in range(_TRIES):
        try:
            if await _gone(aws, piece):
                return
        except AwsRefused as exc:
            if exc.missing:
                return
            if not (exc.throttled or (not exc.code and aws.clock() < due_s)):
                raise
        await aws.pause(_PAUSE_S)
    raise NotRemoved(f"is still there after {_TRIES * _PAUSE_S / 60:.0f} min: expected it gone")


async def _gone(aws: Aws, piece: Piece) -> bool:
    if piece.kind == "endpoint":
        await aws.call("sagemaker", "describe_endpoint", EndpointName=piece.name)
        return False
    told = await aws.call("ec2", "describe_instances", InstanceIds=[piece.name])
    return all(each["State"]["Name"] in _ENDED for held in told["Reservations"] for each in held["Instances"])


def _deletion(piece: Piece) -> list[tuple[str, str, dict[str, Any]]]:
    """What takes it away, in this order. A role and an instance profile of ours have one name, as the role's policy."""
    name = piece.name
    if piece.kind == "instance profile":
        profile = {"InstanceProfileName": name}
        return [
            ("iam", "remove_role_from_instance_profile", {**profile, "RoleName": name}),
            ("iam", "delete_instance_profile", profile),
        ]
    if piece.kind == "role":
        role = {"RoleName": name}
        return [("iam", "delete_role_policy", {**role, "PolicyName": name}), ("iam", "delete_role", role)]
    calls: dict[Kind, tuple[str, str, dict[str, Any]]] = {
        "instance": ("ec2", "terminate_instances", {"InstanceIds": [name]}),
        "volume": ("ec2", "delete_volume", {"VolumeId": name}),
        "security group": ("ec2", "delete_security_group", {"GroupId": name}),
        "endpoint": ("sagemaker", "delete_endpoint", {"EndpointName": name}),
        "configuration": ("sagemaker", "delete_endpoint_config", {"EndpointConfigName": name}),
        "model": ("sagemaker", "delete_model", {"ModelName": name}),
        "package": ("s3", "delete_object", {"Bucket": piece.bucket, "Key": name}),
        "logs": ("logs", "delete_log_group", {"logGroupName": name}),
    }
    return [calls[piece.kind]]


async def left_over(aws: Aws, now: datetime, *, run: str | None = None, buckets: Sequence[str] = ()) -> Left:
    """What is there of a run; of None: of all whose time is over. buckets: where packages may be."""
    found = Left()
    await found.add("SageMaker", _endpoints(aws, run))
    await found.add("EC2", _machines(aws))
    await found.add("IAM", _roles(aws, run))
    for bucket in buckets:
        await found.add(f"s3://{bucket}", _objects(aws, bucket, run))
    mine = Left([piece for piece in found.pieces if due(piece.tags, now, run)], found.unseen)
    gone = {piece.tags[TAG_RUN] for piece in mine.pieces} | ({run} if run else set())
    await mine.add("CloudWatch Logs", _logs(aws, gone))
    return mine


async def machines_left(aws: Aws, run: str, bucket: str) -> Left:
    """The same of a run on EC2, but for role and instance profile: whoever makes them knows their names before."""
    found = Left()
    await found.add("EC2", _machines(aws))
    await found.add(f"s3://{bucket}", _objects(aws, bucket, run))
    return Left([piece for piece in found.pieces if piece.tags.get(TAG_RUN) == run], found.unseen)


async def _endpoints(aws: Aws, run: str | None) -> AsyncIterator[Piece]:
    for kind, operation, key, name, arn in _LISTED:
        async for entry in pages(aws, "sagemaker", operation, key, NameContains=_beginning(run)):
            if run_in(entry[name]) and (told := await _still(aws, "sagemaker", "list_tags", ResourceArn=entry[arn])):
                yield Piece(kind, entry[name], tags=_tags(told["Tags"]))


async def _machines(aws: Aws) -> AsyncIterator[Piece]:
    tagged = {"Name": "tag-key", "Values": [TAG_RUN]}
    standing = [tagged, {"Name": "instance-state-name", "Values": [*_STANDING]}]
    async for held in pages(aws, "ec2", "describe_instances", "Reservations", Filters=standing):
        for each in held["Instances"]:
            yield Piece("instance", each["InstanceId"], tags=_tags(each["Tags"]))
    async for each in pages(aws, "ec2", "describe_volumes", "Volumes", Filters=[tagged]):
        yield Piece("volume", each["VolumeId"], tags=_tags(each["Tags"]))
    async for each in pages(aws, "ec2", "describe_security_groups", "SecurityGroups", Filters=[tagged]):
        yield Piece("security group", each["GroupId"], tags=_tags(each["Tags"]))


async def _roles(aws: Aws, run: str | None) -> AsyncIterator[Piece]:
    async for each in pages(aws, "iam", "list_instance_profiles", "InstanceProfiles", PathPrefix=PATH):
        name = each["InstanceProfileName"]
        if not name.startswith(_beginning(run)):
            continue
        if told := await _still(aws, "iam", "get_instance_profile", InstanceProfileName=name):
            yield Piece("instance profile", name, tags=_tags(told["InstanceProfile"].get("Tags", ())))
    async for each in pages(aws, "iam", "list_roles", "Roles", PathPrefix=PATH):
        name = each["RoleName"]
        if name.startswith(_beginning(run)) and (told := await _still(aws, "iam", "get_role", RoleName=name)):
            yield Piece("role", name, tags=_tags(told["Role"].get("Tags", ())))


async def _objects(aws: Aws, bucket: str, run: str | None) -> AsyncIterator[Piece]:
    async for entry in pages(aws, "s3", "list_objects_v2", "Contents", Bucket=bucket, Prefix=f"{KEYS}/{_beginning(run)}"):
        if told := await _still(aws, "s3", "get_object_tagging", Bucket=bucket, Key=entry["Key"]):
            yield Piece("package", entry["Key"], bucket, _tags(told["TagSet"]))


async def _logs(aws: Aws, runs: Collection[str]) -> AsyncIterator[Piece]:
    """They take no tags from us, and stay behind their endpoint."""
    async for entry in pages(aws, "logs", "describe_log_groups", "logGroups", logGroupNamePrefix=LOGS + OURS):
        if run_in(entry["logGroupName"]) in runs:
            yield Piece("logs", entry["logGroupName"])


async def _still(aws: Aws, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
    """What AWS tells of something that was listed; nothing, if it is gone since. Raises: AwsRefused."""
    try:
        return await aws.call(service, operation, **parameters)
    except AwsRefused as exc:
        if exc.missing:
            return {}
        raise


def _beginning(run: str | None) -> str:
    """Of the names of a run; of None: of any. Tags are asked one by one, so names are looked at first."""
    return f"{OURS}{run or ''}"


def _tags(listed: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in listed}


_LISTED: Final[tuple[tuple[Kind, str, str, str, str], ...]] = (
    ("endpoint", "list_endpoints", "Endpoints", "EndpointName", "EndpointArn"),
    ("configuration", "list_endpoint_configs", "EndpointConfigs", "EndpointConfigName", "EndpointConfigArn"),
    ("model", "list_models", "Models", "ModelName", "ModelArn"),
)
_TOKENS: Final = {
    "sagemaker": ("NextToken", "NextToken"),
    "logs": ("nextToken", "nextToken"),
    "s3": ("ContinuationToken", "NextContinuationToken"),
    "service-quotas": ("NextToken", "NextToken"),
    "ec2": ("NextToken", "NextToken"),
    "iam": ("Marker", "Marker"),
}


async def pages(aws: Aws, service: str, operation: str, key: str, **parameters: Any) -> Any:
    """Every entry of a listing, page by page."""
    asked, told = _TOKENS[service]
    while True:
        page = await aws.call(service, operation, **parameters)
        for entry in page.get(key, ()):
            yield entry
        if not page.get(told):
            return
        parameters[asked] = page[told]


async def quotas_of(aws: Aws) -> dict[str, int] | None:
    """SageMaker's types -> how many instances of each endpoints may have here; None, if this may not be asked."""
    found: dict[str, int] = {}
    suffix = " for endpoint usage"
    try:
        async for quota in pages(aws, "service-quotas", "list_service_quotas", "Quotas", ServiceCode="sagemaker"):
            if quota["QuotaName"].endswith(suffix):
                found[quota["QuotaName"].removesuffix(suffix)] = int(quota["Value"])
    except AwsRefused:
        return None
    return found or None


async def check_bucket(aws: Aws, bucket: str) -> None:
    """The first call of a search, so it tells of credentials as well. Raises: UsageError; AwsRefused."""
    try:
        found = await aws.call("s3", "head_bucket", Bucket=bucket)
    except AwsRefused as exc:
        if exc.missing:
            made = f"`aws s3 mb s3://{bucket} --region {aws.region}` makes it"
            raise UsageError(f"launcher.bucket: {bucket}: there is no such bucket: {made}") from exc
        if exc.code in UNSAID:
            raise UsageError(f"launcher.bucket: {bucket}: S3 answered {exc.code}: {UNSAID[exc.code]}") from exc
        raise
    there = found.get("BucketRegion", aws.region)
    if there != aws.region:
        raise UsageError(f"launcher.bucket: {bucket}: is in {there}: expected one in launcher.region {aws.region}")
