"""Questions of what stands. Those that may not be asked are noted, and the others asked all the same."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from gateway.aws.client import RIGHTS, Platform
from gateway.errors import PlatformRefused

_Answer = TypeVar("_Answer")


class Questions:
    """Life: those of one look. Each gives None where who asks has not the right to. Raises: PlatformRefused, ConfigError."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._unseen: dict[str, None] = {}

    @property
    def unseen(self) -> tuple[str, ...]:
        """What could not be looked at, and why."""
        return tuple(self._unseen)

    def call(self, service: str, operation: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        return self._answer(lambda: self._platform.call(service, operation, parameters))

    def items(self, service: str, operation: str, parameters: Mapping[str, Any], key: str) -> list[dict[str, Any]] | None:
        """Under a key, of all pages."""
        return self._answer(lambda: list(self._platform.pages(service, operation, parameters, key)), parameters.get("Bucket"))

    def _answer(self, ask: Callable[[], _Answer], where: str | None = None) -> _Answer | None:
        try:
            return ask()
        except PlatformRefused as exc:
            if exc.reason not in RIGHTS:
                raise
            self._unseen[f"s3://{where}: {exc.message}" if where else exc.message] = None
        return None
