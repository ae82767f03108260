"""`gateway undeploy`: removes a deployment, and nothing else. Dry, until --yes."""

import argparse
import datetime

from gateway.commands.deploy_options import add_deployed, deployed
from gateway.deploying.calls import as_text
from gateway.deploying.sagemaker_standing import removal, told
from gateway.instances.facts import bundled
from gateway.process.command_line import add_command
from gateway.process.console import words


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Add `undeploy` to the command line."""
    command = add_command(
        commands,
        "undeploy",
        "remove a deployment from AWS",
        "gateway undeploy iris",
        "gateway undeploy iris --yes",
        more="Asks AWS what stands there of `gateway deploy sagemaker --yes`, and prints the calls that remove it; with --yes "
        "it makes them. Only what has the tag of this name is removed, and also what a deployment left that was cut short.",
    )
    add_deployed(command)
    command.add_argument("--yes", action="store_true", help="make the calls; without it they are printed")
    command.set_defaults(run=_undeploy)
    return command


def _undeploy(arguments: argparse.Namespace) -> int:
    from gateway.aws.client import Aws
    from gateway.aws.deployment import Deploying
    from gateway.aws.standing import standing

    name = deployed(arguments.name)
    platform = Aws(arguments.region)
    found = standing(platform, name, arguments.bucket)
    for each in found.untagged:
        words.info("Left alone: %s, which has not the tag.", each)
    calls = removal(found)
    if found.nothing:
        words.info("%s: nothing stands of it in %s.", name, platform.region)
        return 0
    for line in told(found, bundled(), datetime.datetime.now(tz=datetime.UTC)):
        words.info("%s", line)
    if not arguments.yes:
        print(as_text(calls))
        words.info("Nothing was removed: --yes makes these calls.")
        return 0
    Deploying(platform).remove(calls)
    words.info("%s is removed from %s. What its container said stays in CloudWatch's logs.", name, platform.region)
    return 0
