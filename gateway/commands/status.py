"""`gateway status`: what runs of a deployment, since when, on what, and what it costs. AWS is asked; nothing is changed."""

import argparse
import datetime

from gateway.commands.deploy_options import add_deployed, deployed
from gateway.process.command_line import add_command


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `status` to the command line."""
    command = add_command(
        commands,
        "status",
        "tell what runs of a deployment on AWS, and what it costs",
        "gateway status iris",
        "gateway status iris --region eu-central-1",
        more="Of what `gateway deploy sagemaker --yes` or `gateway deploy ec2 --yes` made: its tags tell it. Ends with 1 "
        "if there is nothing of that name.",
    )
    add_deployed(command)
    command.set_defaults(run=_status)


def _status(arguments: argparse.Namespace) -> int:
    from gateway.aws.client import Aws
    from gateway.commands.all_standing import all_standing

    found = all_standing(Aws(arguments.region), deployed(arguments.name), arguments.bucket, arguments.on)
    print("\n".join(found.lines(datetime.datetime.now(tz=datetime.UTC))))
    for each in (*found.unseen, *found.endpoint.unseen_scaling):
        print(f"  not looked at: {each}")
    for each in found.elsewhere:
        print(f"  not in this region: {each}")
    for each in found.untagged:
        print(f"  not ours: {each}, which has not the tag")
    return 1 if found.nothing else 0
