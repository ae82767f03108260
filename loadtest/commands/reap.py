"""`loadtest reap [RUN]`: removes what a search has left on AWS."""

import argparse
import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from gateway.process.command_line import add_command
from gateway.process.console import words
from loadtest.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from loadtest.lab.launchers.aws.door import Aws


def add_parser(subparsers: Any) -> None:  # argparse's own type is private
    """Add `reap`."""
    parser = add_command(
        subparsers,
        "reap",
        "remove what a search that was killed has left on AWS",
        "loadtest reap",
        "loadtest reap 1f2e3d4c --region us-east-1 --bucket my-models --yes",
        more="Finds endpoints, their configurations, models and logs, machines, disks, security groups and roles by the tags "
        "of the search, packages and results in --bucket as well. "
        "Without RUN: of every search whose time is over. Shows them; removes them with --yes.",
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="of one search, whether or not its time is over")
    parser.add_argument("--region", default="us-east-1", help="default us-east-1")
    bucket = "where packages may be; may be repeated"
    parser.add_argument("--bucket", dest="buckets", action="append", default=[], metavar="NAME", help=bucket)
    parser.add_argument("--yes", action="store_true", help="remove them")
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    from loadtest.lab.launchers.aws.door import Aws

    if arguments.run is not None and (not arguments.run or set(arguments.run) - set("0123456789abcdef")):
        raise UsageError(f"reap: {arguments.run!r}: expected the run that `loadtest recommend` told, such as 1f2e3d4c")
    return asyncio.run(reap(Aws(arguments.region), arguments.run, arguments.buckets, yes=arguments.yes))


async def reap(aws: "Aws", run: str | None, buckets: Sequence[str], *, yes: bool) -> int:
    """Show what is left, and remove it if `yes`. Raises: NotRemoved, once everything was tried."""
    from loadtest.lab.launchers.aws.endpoints import TAG_CANDIDATE, TAG_EXPIRES
    from loadtest.lab.launchers.aws.removal import NotRemoved, left_over, remove

    left = await left_over(aws, datetime.now(UTC), run=run, buckets=buckets)
    for place, why in left.unseen.items():
        words.warning("%s was not looked at: %s", place, why)
    unanswered = [place for place, why in left.unseen.items() if not why.forbidden]
    for piece in left.pieces:
        told = ", ".join(piece.tags[tag] for tag in (TAG_CANDIDATE, TAG_EXPIRES) if tag in piece.tags)
        print(f"{piece}{f' ({told})' if told else ''}")
    if left.pieces and yes:
        await remove(aws, left.pieces)
        print(f"removed all {len(left.pieces)}")
    elif left.pieces:
        words.info("nothing was removed: add --yes to do it")
    elif not unanswered:
        print(f"nothing {f'of run {run}' if run else 'whose time is over'} is left in {aws.region}")
    if not buckets:
        words.info("packages and results were not looked for: name the spec's bucket with --bucket")
    if unanswered:
        raise NotRemoved(f"{', '.join(unanswered)}: what is left there is not known: the same command looks again")
    return ExitCode.MET
