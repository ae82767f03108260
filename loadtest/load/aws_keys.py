"""AWS's keys as every tool finds them: environment, profile, single sign-on, role of the machine. The door of botocore here.

Those of a session end. They are refreshed from a thread, well before that, and requests are signed with whatever counts when
they are sent.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from loadtest.errors import LoadtestError, UsageError
from loadtest.load.blocking import NotAnswered, in_thread
from loadtest.load.signing import Keys

FIRST_S: Final = 20.0  # for the first: a role of another account, a browser's session
_PERIOD_S: Final = 30.0  # botocore renews what ends within a quarter of an hour


class AwsKeys:
    """Life: find once, then `current` any number of times, on any thread, while `keep` runs where the keys end."""

    def __init__(self, source: Any) -> None:
        """source: botocore's credentials."""
        self._source = source
        self._current = _frozen(source)

    @classmethod
    def find(cls) -> "AwsKeys":
        """Blocks. Raises: UsageError, if there are none; LoadtestError, if botocore is not installed."""
        try:
            from botocore.exceptions import BotoCoreError
            from botocore.session import Session
        except ImportError as exc:
            raise LoadtestError("requests to AWS need botocore: pip install 'serving-gateway[aws]'") from exc
        logging.getLogger("botocore").setLevel(logging.WARNING)  # it tells where it found them
        try:
            source = Session().get_credentials()
            if source is not None:
                return cls(source)
        except BotoCoreError as exc:
            raise UsageError(f"AWS credentials cannot be had: {exc}") from exc
        raise UsageError("no AWS credentials were found: set AWS_PROFILE, or log in with `aws configure` or `aws sso login`")

    def current(self) -> Keys:
        return self._current

    @property
    def ends(self) -> bool:
        """Whether they are a session's, to be renewed."""
        return hasattr(self._source, "refresh_needed")

    async def keep(self, *, period_s: float = _PERIOD_S, told: Callable[[str], None] = lambda why: None) -> None:
        """Renew them for as long as this runs. told: why they could not be; AWS refuses requests once they have ended."""
        while True:
            await asyncio.sleep(period_s)
            try:
                fresh = await in_thread(_frozen, self._source, timeout_s=FIRST_S)
            except Exception as exc:  # whatever a provider raises: those that are there may still count
                told(str(exc) if not isinstance(exc, NotAnswered) else f"no new credentials: {exc}")
                continue
            if fresh != self._current:
                self._current = fresh


def _frozen(source: Any) -> Keys:
    frozen = source.get_frozen_credentials()
    return Keys(frozen.access_key, frozen.secret_key, frozen.token or "")
