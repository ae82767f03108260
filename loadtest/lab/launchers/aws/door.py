"""The door to AWS: plain calls in, plain answers out.

Calls that change something are never abandoned half-way: who is cancelled waits until AWS has answered, so that nothing comes
to be that nobody knows of. Throttling is waited out.
"""

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar

from gateway.aws import client as platform
from gateway.errors import GatewayError, PlatformRefused
from loadtest.errors import LoadtestError
from loadtest.load.blocking import NotAnswered, in_thread

T = TypeVar("T")
_CALL_S: Final = 900.0  # of one call, an upload's included
_BUSY: Final = frozenset(("ResourceInUse", "ConflictException", "DependencyViolation", "DeleteConflict", "VolumeInUse"))
_NOT_ASKED: Final = "NotAsked"
_PATIENCE: Final = 6  # times that a throttled call is made again, after botocore's own
_FIRST_PAUSE_S: Final = 2.0
_LONGEST_PAUSE_S: Final = 30.0


class AwsRefused(LoadtestError):
    """AWS answered with an error. code: its name there, such as ResourceLimitExceeded; "": what was asked may be done.

    "NotAsked": it was not, and will not be until the user has mended something.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message, code)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def throttled(self) -> bool:
        return self.code in platform.THROTTLED

    @property
    def passing(self) -> bool:
        """The same question may be answered later."""
        return not self.code or self.throttled

    @property
    def missing(self) -> bool:
        """What was named is not there."""
        return platform.absent(self.code, str(self))

    @property
    def made_before(self) -> bool:
        """What SageMaker was asked to make is there."""
        return self.code == "ValidationException" and "already existing" in str(self)

    @property
    def forbidden(self) -> bool:
        """Who asked has not the right to."""
        return self.code in platform.RIGHTS

    @property
    def busy(self) -> bool:
        """What was named is being made or changed, and may be asked again later."""
        return self.code in _BUSY or (self.code == "ValidationException" and "in-progress" in str(self))


class Asked(Protocol):
    """Makes one call of boto3's, by its names, and blocks until it is answered. Raises: AwsRefused."""

    def __call__(self, service: str, operation: str, parameters: Mapping[str, Any]) -> dict[str, Any]: ...


class Aws:
    """Life: any number of calls, on one event loop. asked, pause, clock: what only tests override."""

    def __init__(
        self,
        region: str,
        *,
        asked: Asked | None = None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.region = region
        self._asked = asked or Boto(region)
        self.pause = pause
        self.clock = clock

    def address(self, service: str) -> str:
        """Where boto3 would ask a service. From any thread; blocks for a tenth of a second. Raises: AwsRefused."""
        try:
            return platform.Aws(self.region).address(service)
        except GatewayError as exc:
            raise AwsRefused(exc.message, _NOT_ASKED) from exc

    async def call(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """Ask. Raises: AwsRefused."""
        pause_s = _FIRST_PAUSE_S
        for left in range(_PATIENCE, -1, -1):
            try:
                return await in_thread(self._asked, service, operation, parameters, timeout_s=_CALL_S)
            except NotAnswered as exc:
                raise AwsRefused(f"{service}.{operation}: {exc}") from exc
            except AwsRefused as exc:
                if not (exc.throttled and left):
                    raise
            await self.pause(random.uniform(0.5, 1) * pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise AssertionError("the last one returns or raises")

    async def change(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        """As `call`, of what changes something: it is seen to its end, also by who is cancelled meanwhile."""
        return await seen_through(self.call(service, operation, **parameters))

    async def read(self, bucket: str, key: str) -> bytes | None:
        """An object of S3; None, if it is not there. Raises: AwsRefused; also without the bucket, where none will ever be."""
        try:
            told = await self.call("s3", "get_object", Bucket=bucket, Key=key)
        except AwsRefused as exc:
            if exc.missing and exc.code != "NoSuchBucket":
                return None
            raise
        body: bytes = await asyncio.to_thread(told["Body"].read)
        return body


async def seen_through(work: Coroutine[Any, Any, T]) -> T:
    """Do it to its end, and be cancelled only then."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError, Exception):
                await asyncio.shield(task)
        if not task.cancelled():
            task.exception()  # it was seen: it is the caller's end that counts
        raise


class Boto:
    """boto3, as the gateway's own commands ask by it. From any thread."""

    def __init__(self, region: str) -> None:
        self._region = region
        self._platform: platform.Aws | None = None
        self._asked: set[str] = set()
        self._first = threading.Lock()  # boto3 makes its clients on one thread at a time

    def __call__(self, service: str, operation: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        try:
            if service in self._asked and self._platform is not None:
                return self._platform.call(service, operation, parameters)
            with self._first:
                self._platform = self._platform or platform.Aws(self._region)
                answer = self._platform.call(service, operation, parameters)
                self._asked.add(service)
                return answer
        except PlatformRefused as exc:
            raise AwsRefused(exc.message, exc.reason) from exc
        except GatewayError as exc:  # no boto3, no credentials
            raise AwsRefused(exc.message, _NOT_ASKED) from exc
