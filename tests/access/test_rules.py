"""Who may ask what."""

import pytest

from gateway.access.rules import (
    ADMIN,
    INFER,
    METRICS,
    MODELS,
    OPEN,
    STATUS,
    ApiKey,
    check,
    digest_of,
    known_key,
    shown_key,
    veiled,
)
from gateway.errors import Forbidden, NotFound, Overloaded, Unauthenticated

SECRET = b"gwk_secret"
NOBODY = Unauthenticated("no key")


def key(*scopes: str, models: set[str] | None = None, expires_s: float | None = None) -> ApiKey:
    return ApiKey("k", digest_of(SECRET), frozenset(scopes or (INFER,)), models and frozenset(models), expires_s)


@pytest.mark.parametrize(
    ("headers", "shown"),
    [
        ({}, None),
        ({b"authorization": b"Bearer abc"}, b"abc"),
        ({b"authorization": b"bearer  abc "}, b"abc"),
        ({b"authorization": b"Basic abc"}, None),
        ({b"authorization": b"Basic abc", b"x-api-key": b"def"}, b"def"),
        ({b"authorization": b"Bearer abc", b"x-api-key": b"def"}, b"abc"),
    ],
)
def test_where_a_key_is_shown(headers: dict[bytes, bytes], shown: bytes | None) -> None:
    assert shown_key(headers) == shown


def test_a_key_is_known_by_its_digest_until_it_expires() -> None:
    own = key(expires_s=1000.0)
    keys = {own.digest: own}
    assert known_key(SECRET, keys, 999.9) is own
    for secret, now_s, words in (
        (None, 0.0, "a key is asked for"),
        (b"gwk_other", 0.0, "none that is known"),
        (b"", 0.0, "none that is known"),
        (SECRET, 1000.0, "the key 'k' expired at 1970-01-01T00:16:40Z"),
    ):
        fault = known_key(secret, keys, now_s)
        assert isinstance(fault, Unauthenticated)
        assert words in fault.message
        assert "gwk_" not in fault.message


@pytest.mark.parametrize("scope", [INFER, MODELS, METRICS, STATUS, ADMIN])
def test_without_a_key_nothing_is_told_but_what_is_open(scope: str) -> None:
    check(NOBODY, OPEN, "", ())
    with pytest.raises(Unauthenticated):
        check(NOBODY, scope, "", ())
    assert NOBODY.__traceback__ is None, "or who asks, who holds it, and the frames that refused him would hold each other"
    if scope != ADMIN:
        check(NOBODY, scope, "m", (INFER if scope == MODELS else scope,))


@pytest.mark.parametrize("scope", [INFER, METRICS, STATUS, ADMIN])
def test_a_key_is_for_its_scopes_and_admin_for_all(scope: str) -> None:
    for asked in (INFER, METRICS, STATUS, ADMIN):
        check(key(ADMIN), asked, "m", ())
        if asked == scope or scope == ADMIN:
            check(key(scope), asked, "m", ())
        else:
            with pytest.raises(Forbidden, match=f"the key 'k' is for {scope}: expected one for {asked}"):
                check(key(scope), asked, "m", ())


def test_a_key_of_certain_models_is_for_no_other_and_hears_of_none() -> None:
    own = key(models={"mine"})
    check(own, INFER, "mine", ())
    check(own, INFER, "", ())
    with pytest.raises(Forbidden, match="not for model 'other'"):
        check(own, INFER, "other", ())
    with pytest.raises(Forbidden, match="this tells of all"):
        check(own, MODELS, "", ())
    check(key(), MODELS, "", ())
    check(key(INFER, METRICS, models={"mine"}), METRICS, "", ())


def test_errors_that_name_models_are_for_those_who_may_know_them() -> None:
    naming = NotFound("models here: 'a', 'b'")
    assert veiled(naming, key(), ()) is naming
    assert isinstance(veiled(naming, NOBODY, ()), Unauthenticated)
    assert "'a'" not in veiled(naming, key(models={"a"}), ()).message
    assert veiled(naming, NOBODY, (INFER,)) is naming
    other = Overloaded("busy")
    assert veiled(other, NOBODY, ()) is other
