"""Questions of what stands. Those that may not be asked are noted, and the others asked all the same."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from gateway.aws.client import RIGHTS, Platform, absent
from gateway.errors import PlatformRefused

_Answer = TypeVar("_Answer")


class Questions:
    """Life: those of one look. Each gives None of what is not there, or not for who asks. Raises: PlatformRefused, ConfigError.

    elsewhere: what was left out as it is another region's, in words.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._unseen: dict[str, None] = {}
        self.elsewhere: list[str] = []

    @property
    def unseen(self) -> tuple[str, ...]:
        """What could not be looked at, and why."""
        return tuple(self._unseen)

    def call(self, service: str, operation: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        return self._answer(lambda: self._platform.call(service, operation, parameters), parameters.get("Bucket"))

    def items(self, service: str, operation: str, parameters: Mapping[str, Any], key: str) -> list[dict[str, Any]] | None:
        """Under a key, of all pages."""
        return self._answer(lambda: list(self._platform.pages(service, operation, parameters, key)), parameters.get("Bucket"))

    def objects(self, bucket: str, prefix: str) -> Iterator[tuple[str, list[dict[str, str]] | None]]:
        """Keys, and their tags. None of a bucket of another region: no endpoint and no machine of this one reads it."""
        found = self.call("s3", "head_bucket", {"Bucket": bucket})
        if found is None:
            return
        if (there := found.get("BucketRegion", self._platform.region)) != self._platform.region:
            self.elsewhere.append(f"s3://{bucket}, which is in {there}")
            return
        for each in self.items("s3", "list_objects_v2", {"Bucket": bucket, "Prefix": prefix}, "Contents") or ():
            tagged = self.call("s3", "get_object_tagging", {"Bucket": bucket, "Key": each["Key"]})
            yield each["Key"], None if tagged is None else tagged["TagSet"]

    def _answer(self, ask: Callable[[], _Answer], where: str | None = None) -> _Answer | None:
        try:
            return ask()
        except PlatformRefused as exc:
            if exc.reason in RIGHTS:
                self._unseen[f"s3://{where}: {exc.message}" if where else exc.message] = None
            elif not absent(exc.reason, exc.message):  # a bucket that was removed, or what was listed a moment ago
                raise
        return None
