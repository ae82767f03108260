"""`loadtest serve-jobs`: the load generator that a search on EC2 has beside its candidates."""

import argparse
import asyncio
from typing import Any

from gateway.process.command_line import add_command
from loadtest.errors import ExitCode


def add_parser(subparsers: Any) -> None:  # argparse's own type is private
    """Add `serve-jobs`."""
    parser = add_command(
        subparsers,
        "serve-jobs",
        "do the load runs that a search puts into a bucket; its machine on EC2 runs this",
        "loadtest serve-jobs --region us-east-1 --bucket my-models --base serving-gateway/loadtest-1f2e3d4c-ec2 --most-s 7200",
        more="Nobody reaches it: jobs come as objects of S3, and so do their results go. Each is done once.",
    )
    parser.add_argument("--region", required=True)
    parser.add_argument("--bucket", required=True, metavar="NAME", help="where jobs are looked for")
    parser.add_argument("--base", required=True, metavar="PREFIX", help="of their keys")
    parser.add_argument("--most-s", type=float, required=True, metavar="S", help="it ends after that")
    parser.add_argument("--tagging", default="", metavar="TAGS", help="of what is put there, such as loadtest%%3Arun=1f2e3d4c")
    parser.set_defaults(execute=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    from loadtest.lab.launchers.aws.agent import Agent
    from loadtest.lab.launchers.aws.door import Aws
    from loadtest.lab.launchers.aws.post import Post

    agent = Agent(Aws(arguments.region), Post(arguments.bucket, arguments.base), tagging=arguments.tagging)
    asyncio.run(agent.serve(arguments.most_s))
    return ExitCode.MET
