"""What asks for keys: the rules, with the keys of a file that is read again when it changes, and what they have asked."""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from backends.regular_file import special
from gateway.access.limits import FULL, Limit
from gateway.access.rules import OPEN, ApiKey, check, is_open, known_key, shown_key, veiled
from gateway.access.usage import OwnUsage, Usage
from gateway.config import AccessSection
from gateway.config.keys import PREFIX, KeyFile, KeySection
from gateway.documents.faults import ConfigFaults, Fault
from gateway.documents.lenient import validated
from gateway.documents.reader import parse, read
from gateway.errors import ConfigError, GatewayError, Limited, Unauthenticated
from gateway.process.watched_files import LOOK_S, WatchedFiles

_KEY: Final = re.compile(rf"{PREFIX}[\w-]+")
_FULL_S: Final = 1.0  # when to try again, where nothing says when a request in flight will be over


class Visitor(Protocol):
    """Who asks. key: its own, or why it has none; once `Doors.meet` has looked."""

    key: ApiKey | Unauthenticated

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        """Names in lower case."""


class Doors:
    """See the module. Of the listeners of a process, on its event loop."""

    def __init__(
        self,
        section: AccessSection,
        environment: Mapping[str, str],
        usage: Usage | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """environment: of which keys_variable is one. usage: None: of this process alone. Raises: ConfigError."""
        self._open = frozenset(section.open)
        self._usage = usage or OwnUsage()
        self._clock = clock
        self._wall_s = wall_s
        files = [section.keys] if section.keys is not None else []
        self._keys = WatchedFiles(files, partial(keys_of, section, environment), name="keys")

    async def keep_looking(self, every_s: float = LOOK_S) -> None:
        """At the file of keys, until it is cancelled. Before somebody asks: 4096 keys are read for seconds."""
        await self._keys.keep_looking(every_s)

    def meet(self, visitor: Visitor) -> None:
        """See whose key it shows."""
        visitor.key = known_key(shown_key(visitor.headers), self._keys.made, self._wall_s())

    def check(self, visitor: Visitor, scope: str, model: str = "") -> None:
        """Whether it may ask that, of a model if one is named. Raises: Unauthenticated, Forbidden."""
        key = visitor.key
        # A stream's next request comes long after it was met: the key may have been taken back, be over, or be there again.
        if not isinstance(key, ApiKey) or self._keys.made.get(key.digest) is not key or key.expired(self._wall_s()):
            self.meet(visitor)
        check(visitor.key, scope, model, self._open)

    def needs(self, scope: str) -> str:
        """The scope, if a key is asked for it; else OPEN."""
        return OPEN if is_open(scope, self._open) else scope

    def veiled(self, visitor: Visitor, error: GatewayError) -> GatewayError:
        """An error as it may read it."""
        return veiled(error, visitor.key, self._open)

    def enter(self, visitor: Visitor) -> Callable[[], None] | None:
        """Count one more request of its key. What this returns is called when the request is over. Raises: Limited."""
        key = visitor.key
        if not isinstance(key, ApiKey) or key.limit is None:
            return None
        verdict = self._usage.enter(key.digest, key.limit, self._clock())
        if not verdict:
            return partial(self._usage.leave, key.digest)
        if verdict == FULL:
            raise Limited(f"the key '{key.name}' has {key.limit.most} requests in flight, and may not have more", _FULL_S)
        rate = 1e9 / key.limit.interval_ns
        after_s = verdict / 1e9
        raise Limited(f"the key '{key.name}' may ask {rate:g} requests/s: there is room again in {after_s:.3g} s", after_s)


def keys_of(section: AccessSection, environment: Mapping[str, str]) -> dict[bytes, ApiKey]:
    """The keys of file and environment, by digest. Raises: ConfigError."""
    listed: list[KeySection] = []
    try:
        if section.keys is not None:
            if what := special(section.keys):  # which `read` takes: of who names one for once
                raise ConfigError(f"server.access.keys: '{section.keys}': {what}")
            listed += validated(KeyFile, read(section.keys)).keys
        if section.keys_variable is not None:
            text = environment.get(section.keys_variable)
            if text is None:
                raise ConfigError(f"server.access.keys_variable: {section.keys_variable}: the environment has no such variable")
            listed += validated(KeyFile, parse(text, source=section.keys_variable)).keys
    except ConfigFaults as exc:  # a key may stand where something else should
        raise ConfigFaults(map(_veiled, exc.faults)) from None
    found: dict[bytes, ApiKey] = {}
    for each in listed:
        digest = bytes.fromhex(each.hash.removeprefix("sha256:"))
        if digest in found:
            raise ConfigError(f"the key '{each.name}' is in the file and in the environment: leave one of them out")
        models = None if each.models is None else frozenset(each.models)
        expires_s = None if each.expires is None else each.expires.timestamp()
        limit = Limit.of(each.requests_per_s, each.burst, each.concurrent)
        found[digest] = ApiKey(each.name, digest, frozenset(each.scopes), models, expires_s, limit)
    return found


def _veiled(fault: Fault) -> Fault:
    """Without what stands there, and without any key."""
    path, found, expected, remedy = (
        _KEY.sub(f"{PREFIX}…", text) for text in (fault.path, fault.found, fault.expected, fault.remedy)
    )
    return replace(fault, value="", path=path, found=found, expected=expected, remedy=remedy)
