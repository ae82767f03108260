"""AWS by boto3, which is an extra: every call of every service goes through here, and its errors become ours."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Final, Protocol

from gateway.deploying.calls import FromFile
from gateway.errors import ConfigError, PlatformRefused

_ABSENT: Final = (
    "ObjectNotFoundException",
    "ResourceNotFound",
    "ResourceNotFoundException",
    "NoSuchKey",
    "NoSuchBucket",
    "NoSuchEntity",
    "InvalidGroup.NotFound",
    "InvalidInstanceID.NotFound",
    "InvalidVolume.NotFound",
    "404",
)
THROTTLED: Final = frozenset(
    ("Throttling", "ThrottlingException", "ThrottledException", "TooManyRequestsException", "RequestLimitExceeded", "SlowDown")
)
RIGHTS: Final = ("AccessDeniedException", "AccessDenied", "UnauthorizedOperation", "403")
UNSAID: Final = {  # why head_bucket is refused: HEAD has no body, so S3 gives its status, and no reason
    "400": "the credentials may have expired: sign in again, as by `aws sso login`",
    "403": "expected a bucket of yours, credentials that are valid, and the right s3:ListBucket for it",
}
_NO_ROOM: Final = ("Insufficient", "Capacity")  # InsufficientInstanceCapacity and like it, which are 500 of EC2
_REMEDIES: Final = {
    "InsufficientInstanceCapacity": "name another instance type, a subnet of another zone, or try again later",
    "ResourceLimitExceeded": "ask for more in the console of Service Quotas, Amazon SageMaker, or choose another type",
    "ExpiredTokenException": "sign in again, as by `aws sso login`",
    "ExpiredToken": "sign in again, as by `aws sso login`",
}
_CREDENTIALS: Final = frozenset(  # errors of botocore, whichever of them this one has, where it found no valid ones to ask with
    (
        "CredentialRetrievalError",
        "LoginError",
        "NoCredentialsError",
        "PartialCredentialsError",
        "RefreshWithMFAUnsupportedError",
        "SSOError",
        "TokenRetrievalError",
    )
)


class Platform(Protocol):
    """Services that are called by boto3's names. region: where. Raises: PlatformRefused; ConfigError, without credentials."""

    region: str

    def call(self, service: str, operation: str, parameters: Mapping[str, Any]) -> dict[str, Any]: ...

    def pages(self, service: str, operation: str, parameters: Mapping[str, Any], key: str) -> Iterator[dict[str, Any]]:
        """The items under a key, of all pages."""
        ...


class Aws:
    """By boto3's default session: its credentials and its region are those that `aws` has, unless a region is named."""

    def __init__(self, region: str | None = None) -> None:
        """Raises: ConfigError, if boto3 is missing, or no region is known."""
        try:
            import boto3
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError
        except ImportError as exc:
            raise ConfigError("boto3 is not installed: expected it for AWS: pip install 'serving-gateway[aws]'") from exc
        # A part of an upload may take its time; whether a call that is not answered was done is not known, so few are repeated.
        self._config = Config(connect_timeout=10, read_timeout=120, retries={"mode": "standard", "total_max_attempts": 4})
        self._clients: dict[str, Any] = {}
        logging.getLogger("botocore").setLevel(logging.WARNING)  # it tells of each credential and each address that it finds
        try:
            session = boto3.DEFAULT_SESSION or boto3.session.Session()
            found = region or session.region_name
        except BotoCoreError as exc:  # such as a profile that there is not
            raise ConfigError(f"AWS: {exc}") from exc
        if not found:
            raise ConfigError("--region: not given: expected a region, here or as AWS_DEFAULT_REGION, or by `aws configure`")
        self.region: str = found
        self._client = session.client

    def address(self, service: str) -> str:
        """Where a service of this region is asked: as its partition, the profile and the environment have it."""
        return str(self._of(service).meta.endpoint_url)

    def call(self, service: str, operation: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        with ExitStack() as opened:
            sent = {
                key: opened.enter_context(value.path.open("rb")) if isinstance(value, FromFile) else value
                for key, value in parameters.items()
            }
            return self._ask(service, operation, sent)

    def pages(self, service: str, operation: str, parameters: Mapping[str, Any], key: str) -> Iterator[dict[str, Any]]:
        token: dict[str, Any] = {}
        while True:
            found = self._ask(service, operation, {**parameters, **token})
            yield from found.get(key, ())
            if "NextToken" in found:
                token = {"NextToken": found["NextToken"]}
            elif "NextContinuationToken" in found:  # S3's
                token = {"ContinuationToken": found["NextContinuationToken"]}
            else:
                return

    def _of(self, service: str) -> Any:
        if service not in self._clients:
            self._clients[service] = self._client(service, region_name=self.region, config=self._config)
        return self._clients[service]

    def _ask(self, service: str, operation: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

        what = f"AWS: {service}.{operation}"
        try:
            answer: dict[str, Any] = getattr(self._of(service), operation)(**parameters)
            return answer
        except ClientError as exc:
            reason = str(exc.response.get("Error", {}).get("Code", ""))
            told = str(exc.response.get("Error", {}).get("Message", "")) or str(exc)
            status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400)
            page = "docs/deploy-ec2.md" if service in ("ec2", "iam") else "docs/deploy-sagemaker.md"
            remedy = f"{page} has the rights that it takes" if reason in RIGHTS else _REMEDIES.get(reason)
            told = ": ".join(filter(None, (what, reason, told, remedy)))
            # What a server fails at, it may have done; not what it throttles, which is 503 of EC2 and S3, or has no room for.
            answered = status < 500 or reason in THROTTLED or all(part in reason for part in _NO_ROOM)
            raise PlatformRefused(told, reason if answered else "") from exc
        except ParamValidationError as exc:
            raise PlatformRefused(f"{what}: {exc}", type(exc).__name__) from exc
        except BotoCoreError as exc:
            kinds = {kind.__name__ for kind in type(exc).__mro__}
            if kinds & _CREDENTIALS:  # nobody was asked, and nobody will be until somebody signs in
                found = "no credentials" if "NoCredentialsError" in kinds else str(exc)
                remedy = "`aws configure`, `aws sso login`, or AWS_PROFILE"
                raise ConfigError(f"{what}: {found}: expected those of an account: {remedy}") from exc
            raise PlatformRefused(f"{what}: {exc}", "") from exc


def absent(reason: str, message: str) -> bool:
    """Whether what was asked for is not there. SageMaker has no word of its own for that: it says so in a sentence."""
    return reason in _ABSENT or (reason == "ValidationException" and "Could not find" in message)
