"""Who may ask what: a key, what it allows, and what is said to whom it is refused. Pure."""

import hashlib
import hmac
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from gateway.access.limits import Limit
from gateway.errors import Forbidden, GatewayError, NotFound, Unauthenticated, shortened

INFER: Final = "infer"  # a model, or of models what names none
MODELS: Final = "models"  # what names all models: for keys of all of them
METRICS: Final = "metrics"
STATUS: Final = "status"
ADMIN: Final = "admin"
OPEN: Final = ""

_BEARER: Final = b"bearer "


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as it is known. digest: SHA-256 of it. models: None for all. expires_s: since 1970. limit: None for none."""

    name: str
    digest: bytes
    scopes: frozenset[str]
    models: frozenset[str] | None = None
    expires_s: float | None = None
    limit: Limit | None = None

    def expired(self, now_s: float) -> bool:
        return self.expires_s is not None and now_s >= self.expires_s

    def allows(self, scope: str) -> bool:
        return scope in self.scopes or ADMIN in self.scopes or (scope == MODELS and INFER in self.scopes)


def digest_of(secret: bytes) -> bytes:
    """What a key is known by. Keys are random, so it need not be slow."""
    return hashlib.sha256(secret).digest()


def shown_key(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The key that a request shows; None: it shows none."""
    authorization = headers.get(b"authorization")
    if authorization is not None and authorization[: len(_BEARER)].lower() == _BEARER:
        return authorization[len(_BEARER) :].strip()
    return headers.get(b"x-api-key")


def known_key(secret: bytes | None, keys: Mapping[bytes, ApiKey], now_s: float) -> ApiKey | Unauthenticated:
    """Whose it is, or why it is nobody's. secret: None, if no key was shown."""
    if secret is None:
        return Unauthenticated("a key is asked for: send `Authorization: Bearer KEY`, or `X-Api-Key: KEY`")
    digest = digest_of(secret)
    key = keys.get(digest)
    if key is None or not hmac.compare_digest(key.digest, digest):
        return Unauthenticated("the key is none that is known here: ask for one")
    if key.expired(now_s):
        moment = datetime.fromtimestamp(key.expires_s or 0, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        return Unauthenticated(f"the key '{key.name}' expired at {moment}: ask for another")
    return key


def is_open(scope: str, open_scopes: Collection[str]) -> bool:
    """Whether no key is asked for it."""
    return scope == OPEN or scope in open_scopes or (scope == MODELS and INFER in open_scopes)


def check(key: ApiKey | Unauthenticated, scope: str, model: str, open_scopes: Collection[str]) -> None:
    """Whether it allows that. model: empty where none is asked. open_scopes: for which no key is needed.

    Raises: Unauthenticated, Forbidden.
    """
    if is_open(scope, open_scopes):
        return
    if isinstance(key, Unauthenticated):
        raise Unauthenticated(key.message)  # not itself: whoever asks holds it, and its frames would hold him
    if not key.allows(scope):
        needed = INFER if scope == MODELS else scope
        raise Forbidden(f"the key '{key.name}' is for {', '.join(sorted(key.scopes))}: expected one for {needed}")
    if key.models is None or scope not in (INFER, MODELS):
        return
    if scope == MODELS:
        raise Forbidden(f"the key '{key.name}' is for certain models, and this tells of all: expected a key for all")
    if model and model not in key.models:
        raise Forbidden(f"the key '{key.name}' is not for model '{shortened(model)}': ask for one that is")


def veiled(error: GatewayError, key: ApiKey | Unauthenticated, open_scopes: Collection[str]) -> GatewayError:
    """The error as this client may read it: what exists instead of what it asked is for those who may know all models."""
    if isinstance(error, NotFound):
        try:
            check(key, MODELS, "", open_scopes)
        except Unauthenticated as exc:
            return exc.without_frames()
        except Forbidden:
            return NotFound("Not Found: no such path, and no such model or version that this key is for")
    return error
