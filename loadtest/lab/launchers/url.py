"""Servers that somebody else started, and goes on paying for."""

import asyncio
import json
import urllib.error
from collections.abc import Sequence
from dataclasses import replace
from http.client import HTTPException
from typing import Any, Final
from urllib.parse import quote, urlsplit, urlunsplit

from gateway.errors import GatewayError
from gateway.process.credentials import NOTHING_SHOWN, Credentials, reason, with_status
from loadtest.errors import TargetError
from loadtest.lab.launchers.launcher import StartFailed, Unpaid, Usage
from loadtest.load.target import SENT_AS_THEY_ARE
from loadtest.prices.catalogue import Catalogue
from loadtest.question.candidates import CandidateSetup, priced
from loadtest.question.preflight import Refusals
from loadtest.question.spec import SearchSpec

_TIMEOUT_S: Final = 5.0


class Url(Unpaid):
    """Checks that the server is ready; leaves it as it was."""

    start_s = 0.0

    def __init__(self, shown: Credentials = NOTHING_SHOWN) -> None:
        self._shown = shown

    def preflight(self, candidates: Sequence[CandidateSetup]) -> Refusals:
        return {}  # whether a server is there shows when it is asked

    async def start(self, candidate: CandidateSetup) -> "RunningUrl":
        try:
            await asyncio.to_thread(get_json, f"{candidate.url}/v2/health/ready", self._shown)
        except TargetError as exc:
            raise StartFailed(str(exc)) from exc
        return RunningUrl(candidate.url)


class RunningUrl:
    """A server that is not ours: nothing to see of its machine, nothing to stop."""

    grpc = invocations = sigv4 = name = ""

    def __init__(self, rest: str) -> None:
        self.rest = rest

    def failure(self) -> str:
        return ""  # a server that goes away is seen by its answers

    async def look(self) -> None:
        """What ends it shows without."""

    def usage(self) -> Usage:
        return Usage()

    async def stop(self) -> None:
        return


async def instance_type_of(url: str, shown: Credentials = NOTHING_SHOWN) -> str:
    """Ask a gateway on which instance type it runs. Raises: TargetError, if it does not say."""
    metadata = await asyncio.to_thread(get_json, f"{url}/v2", shown)
    found = metadata.get("instance_type")
    if not isinstance(found, str) or not found:
        raise TargetError(
            f"{url} does not say which instance type it runs on: set `instances` or `usd_per_hour` on the candidate"
        )
    return found


async def price_by_metadata(spec: SearchSpec, catalogue: Catalogue, shown: Credentials = NOTHING_SHOWN) -> SearchSpec:
    """Ask running servers without a stated instance type for it, so that every candidate has a price.

    Raises: TargetError, UsageError.
    """
    candidates = []
    names: dict[str, str] = {}  # that change, as they begin with the instance type
    for candidate in spec.candidates:
        if candidate.price is None and candidate.url:
            known = priced(candidate, await instance_type_of(candidate.url, shown), catalogue, spec.basis)
            names[candidate.name] = known.name
            candidate = known
        candidates.append(candidate)
    test = spec.agreement_test
    if test is not None:
        reference = names.get(test.reference, test.reference)
        stand_ins = tuple(names.get(name, name) for name in test.stand_ins)
        test = replace(test, reference=reference, stand_ins=stand_ins)
    return replace(spec, candidates=tuple(candidates), agreement_test=test)


def get_json(url: str, shown: Credentials = NOTHING_SHOWN) -> dict[str, Any]:
    """The JSON object at an address; empty for an empty answer. Blocks for at most 5 s. Raises: TargetError."""
    if not url.startswith(("http://", "https://")):
        raise TargetError(f"{url}: expected an address that begins with http:// or https://")
    try:
        scheme, place, path, *rest = urlsplit(url)
        asked = urlunsplit((scheme, place, quote(path, safe=SENT_AS_THEY_ARE), *rest))  # as by `Address.of`
        with shown.opened(asked, timeout_s=_TIMEOUT_S) as answer:
            body = answer.read()
        found = json.loads(body) if body else {}
    except urllib.error.HTTPError as exc:
        with exc:  # it holds the connection
            words = with_status(exc.code, exc.read())
        raise TargetError(f"{url}: {words}") from exc
    except GatewayError as exc:  # its words begin with the address
        raise TargetError(exc.message) from exc
    except (OSError, ValueError, HTTPException) as exc:  # URLError is an OSError; others where it does not speak HTTP
        raise TargetError(f"{url}: {reason(exc)}") from exc
    if not isinstance(found, dict):
        raise TargetError(f"{url}: expected a JSON object")
    return found
