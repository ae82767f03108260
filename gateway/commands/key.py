"""`gateway key`: make an API key, and the line of a file of keys by which it is known. The key itself is told once."""

import argparse
import json
import re
import secrets
import sys
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

from gateway.access.rules import digest_of
from gateway.config.keys import PREFIX, KeySection
from gateway.documents.lenient import validated
from gateway.documents.reader import Document
from gateway.errors import ConfigError
from gateway.process.command_line import add_command

_BYTES: Final = 32  # so random that SHA-256 alone keeps it


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `key` to the command line."""
    command = add_command(
        commands,
        "key",
        "make an API key, and the line of a file of keys that knows it",
        "gateway key team-a",
        "gateway key team-b --model iris --expires 90d --requests-per-s 100 --concurrent 8",
        "gateway key prometheus --scope metrics",
        more="Standard output gets the line, which goes below `keys:` in the file that `server.access.keys` names: it holds "
        "what the key is known by, and not the key. Standard error gets the key, once: nobody can find it out again.",
    )
    command.add_argument("name", metavar="NAME", help="in messages and logs: whose it is")
    command.add_argument("--model", action="append", dest="models", metavar="MODEL", help="that it may ask; none: all")
    command.add_argument(
        "--scope", action="append", dest="scopes", metavar="SCOPE", help="infer, metrics, status or admin, which is all (infer)"
    )
    command.add_argument("--expires", metavar="DATE", help="from when on it is none: 2027-01-31, or 90d: in so many days")
    command.add_argument("--requests-per-s", type=float, metavar="N", help="that it may ask for")
    command.add_argument("--burst", type=int, metavar="N", help="of them at once, after a pause (those of a second)")
    command.add_argument("--concurrent", type=int, metavar="N", help="requests that it may have in flight")
    command.set_defaults(run=_key)


def _key(arguments: argparse.Namespace) -> int:
    secret = PREFIX + secrets.token_urlsafe(_BYTES)
    given: dict[str, Any] = {"name": arguments.name, "hash": f"sha256:{digest_of(secret.encode()).hex()}"}
    for option in ("models", "scopes", "requests_per_s", "burst", "concurrent"):
        if (value := getattr(arguments, option)) is not None:
            given[option] = value
    if arguments.expires is not None:
        given["expires"] = _day(arguments.expires)
    validated(KeySection, Document("gateway key", given))
    print("- " + json.dumps(given, default=str))  # which is YAML
    print(secret, file=sys.stderr)
    return 0


def _day(text: str) -> date:
    """From when on the key is none. Raises: ConfigError, also if it is none already."""
    today = datetime.now(UTC).date()
    try:
        day = today + timedelta(days=int(text[:-1])) if re.fullmatch(r"\d{1,5}d", text) else date.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"--expires: {text!r}: expected a date such as 2027-01-31, or days such as 90d") from None
    if day <= today:
        raise ConfigError(
            f"--expires: {text!r}: the key would be none from the start, as {day} (UTC) has begun: expected a later day"
        )
    return day
