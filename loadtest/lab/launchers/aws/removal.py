"""Removes what a run has made, whoever is left to do it: the run itself, on every way out, or `loadtest reap` after it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

from gateway.deploying.sagemaker import PREFIX as KEYS
from gateway.deploying.sagemaker import Hosting, PackedModel
from loadtest.errors import LoadtestError, UsageError
from loadtest.lab.launchers.aws.door import Aws, AwsRefused
from loadtest.lab.launchers.aws.endpoints import LOGS, OURS, TAG_RUN, due, run_in

Kind = Literal["endpoint", "configuration", "model", "package", "logs"]

_ORDER: Final[tuple[Kind, ...]] = ("endpoint", "configuration", "model", "package", "logs")  # what costs most goes first
_TRIES: Final = 90
_PAUSE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Piece:
    """One thing that is there. name: a package's key. bucket: of a package."""

    kind: Kind
    name: str
    bucket: str = ""
    tags: dict[str, str] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return f"{self.kind} s3://{self.bucket}/{self.name}" if self.bucket else f"{self.kind} {self.name}"


class NotRemoved(LoadtestError):
    """Something is left, and may cost money."""


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
    """Remove what is there of these, and see that endpoints are gone. What is not there is no fault.

    Raises: NotRemoved, once everything was tried, with what is left and why.
    """
    left = []
    for piece in sorted(pieces, key=lambda piece: _ORDER.index(piece.kind)):
        try:
            await _remove(aws, piece)
        except AwsRefused as exc:
            left.append(f"{piece}: {exc}")
    if left:
        raise NotRemoved("could not be removed: " + "; ".join(left))


async def _remove(aws: Aws, piece: Piece) -> None:
    for tries in range(_TRIES, -1, -1):
        try:
            await aws.change(*_deletion(piece)[:2], **_deletion(piece)[2])
            break
        except AwsRefused as exc:
            if exc.missing:
                return
            if not ((exc.busy or exc.throttled) and tries):
                raise
        await aws.pause(_PAUSE_S)
    for _ in range(_TRIES if piece.kind == "endpoint" else 0):
        try:
            await aws.call("sagemaker", "describe_endpoint", EndpointName=piece.name)
        except AwsRefused as exc:
            if exc.missing:
                return
            if not exc.throttled:
                raise
        await aws.pause(_PAUSE_S)


def _deletion(piece: Piece) -> tuple[str, str, dict[str, Any]]:
    name = piece.name
    calls: dict[Kind, tuple[str, str, dict[str, Any]]] = {
        "endpoint": ("sagemaker", "delete_endpoint", {"EndpointName": name}),
        "configuration": ("sagemaker", "delete_endpoint_config", {"EndpointConfigName": name}),
        "model": ("sagemaker", "delete_model", {"ModelName": name}),
        "package": ("s3", "delete_object", {"Bucket": piece.bucket, "Key": name}),
        "logs": ("logs", "delete_log_group", {"logGroupName": name}),
    }
    return calls[piece.kind]


async def left_over(aws: Aws, now: datetime, *, run: str | None = None, buckets: Sequence[str] = ()) -> list[Piece]:
    """What is there of a run; of None: of all whose time is over. buckets: where packages may be. Raises: AwsRefused."""
    found: list[Piece] = []
    for kind, operation, key, name, arn in _LISTED:
        async for entry in _pages(aws, "sagemaker", operation, key, NameContains=OURS):
            if run_in(entry[name]):
                told = await aws.call("sagemaker", "list_tags", ResourceArn=entry[arn])
                found.append(Piece(kind, entry[name], tags={tag["Key"]: tag["Value"] for tag in told["Tags"]}))
    for bucket in buckets:
        async for entry in _pages(aws, "s3", "list_objects_v2", "Contents", Bucket=bucket, Prefix=f"{KEYS}/{OURS}"):
            told = await aws.call("s3", "get_object_tagging", Bucket=bucket, Key=entry["Key"])
            tags = {tag["Key"]: tag["Value"] for tag in told["TagSet"]}
            found.append(Piece("package", entry["Key"], bucket, tags))
    mine = [piece for piece in found if due(piece.tags, now, run)]
    gone = {piece.tags[TAG_RUN] for piece in mine} | ({run} if run else set())
    async for entry in _pages(aws, "logs", "describe_log_groups", "logGroups", logGroupNamePrefix=LOGS + OURS):
        if run_in(entry["logGroupName"]) in gone:  # they take no tags from us, and stay behind their endpoint
            mine.append(Piece("logs", entry["logGroupName"]))
    return mine


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
}


async def _pages(aws: Aws, service: str, operation: str, key: str, **parameters: Any) -> Any:
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
        async for quota in _pages(aws, "service-quotas", "list_service_quotas", "Quotas", ServiceCode="sagemaker"):
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
        raise
    there = found.get("BucketRegion", aws.region)
    if there != aws.region:
        raise UsageError(f"launcher.bucket: {bucket}: is in {there}: expected one in launcher.region {aws.region}")
