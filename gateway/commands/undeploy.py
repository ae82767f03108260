"""`gateway undeploy`: removes a deployment, and nothing else. Dry, until --yes."""

import argparse
import datetime
from collections.abc import Sequence
from itertools import chain

from gateway.commands.deploy_options import add_deployed, deployed
from gateway.deploying.calls import as_text
from gateway.process.command_line import add_command
from gateway.process.console import words
from gateway.process.interrupts import ending_in_order


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `undeploy` to the command line."""
    command = add_command(
        commands,
        "undeploy",
        "remove a deployment from AWS",
        "gateway undeploy iris",
        "gateway undeploy iris --on ec2 --yes",
        more="Asks AWS what stands there of `gateway deploy sagemaker` or `ec2`, and prints the calls that remove it; with "
        "--yes it makes them. Only what has the tag of this name is removed, and also what is left of a deployment that was "
        "cut short. Ends with 1 if something that may stand could not be looked at.",
    )
    add_deployed(command)
    command.add_argument("--yes", action="store_true", help="make the calls; without it they are printed")
    command.set_defaults(run=_undeploy)


@ending_in_order()
def _undeploy(arguments: argparse.Namespace) -> int:
    from gateway.aws.client import Aws
    from gateway.aws.deployment import Deploying
    from gateway.commands.all_standing import all_standing

    name = deployed(arguments.name)
    platform = Aws(arguments.region)
    found = all_standing(platform, name, arguments.bucket, arguments.on)
    for each in found.unseen:
        words.warning("Not looked at: %s", each)
    for each in found.untagged:
        words.info("Left alone: %s, which has not the tag.", each)
    for each in found.elsewhere:
        words.info("Left alone: %s.", each)
    if found.nothing and found.unseen:
        words.info("%s: nothing was seen of it in %s. What was not looked at may stand.", name, platform.region)
        return 1
    if found.nothing:
        words.info("%s: nothing stands of it in %s.", name, platform.region)
        return 0
    for line in found.lines(datetime.datetime.now(tz=datetime.UTC)):
        words.info("%s", line)
    if not arguments.yes:
        print(as_text([*chain.from_iterable(found.removals())]))
        words.info("Nothing was removed: --yes makes these calls.")
        return 1 if found.unseen else 0
    Deploying(platform).remove(*found.removals(), remedy=_again(arguments, found.buckets, platform.region))
    if found.unseen:
        words.info("What was seen of %s is removed from %s. What was not looked at may stand.", name, platform.region)
        return 1
    words.info("%s is removed from %s. What a container of SageMaker said stays in CloudWatch's logs.", name, platform.region)
    return 0


def _again(arguments: argparse.Namespace, buckets: Sequence[str], region: str) -> str:
    """The same command: what named the bucket may be removed by then."""
    on = f" --on {arguments.on}" if arguments.on else ""
    bucket = f" --bucket {buckets[0]}" if buckets else ""
    return f"`gateway undeploy {arguments.name} --region {region}{on}{bucket} --yes`"
