"""`gateway deploy ec2`: one machine of a configuration, made by cloud-init and run by systemd. Dry, until --yes."""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gateway.commands.deploy_cluster import write_cluster
from gateway.commands.deploy_on_aws import archive, now, of_ours
from gateway.commands.ec2_options import PAGE, add_options, wanted
from gateway.config import config_of
from gateway.deploying.calls import Call, as_text
from gateway.deploying.ec2 import AGENT_POLICY, PACKAGE, Machine, creation, readable
from gateway.deploying.ec2_standing import told_of_machine
from gateway.deploying.on_machine import moved, unfit
from gateway.deploying.packing import secrets_here
from gateway.deploying.price import monthly
from gateway.deploying.report import document_of
from gateway.documents.faults import ConfigFaults
from gateway.errors import ConfigError
from gateway.instances.facts import bundled
from gateway.process.command_line import add_command
from gateway.process.completion import completed_by_files
from gateway.process.console import words
from gateway.process.interrupts import ending_in_order


def add_parser(places: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `deploy ec2` to the command line."""
    named = (
        "--region us-east-1 --subnet subnet-0123456789abcdef0 --bucket BUCKET --wheel serving_gateway-0.1.0-py3-none-any.whl "
        "--lock docker/requirements-cpu.lock"
    )
    command = add_command(
        places,
        "ec2",
        "make a machine of EC2",
        f"gateway deploy ec2 configs/examples/iris.yaml --instance-type c7i.large {named}",
        f"gateway deploy ec2 configs/examples/iris.yaml --instance-type c7g.large --allow 10.0.0.0/16 {named}",
        "gateway deploy ec2 configs/examples/fleet.yaml --cluster cluster --memory 4Gi --security-group sg-0123456789abcdef0 "
        "--region us-east-1 --subnet subnet-0123456789abcdef0 --wheel serving_gateway-0.1.0-py3-none-any.whl --lock docker",
        more="Prints every call that it would make, in their order, with all that the machine is told (its user data), and "
        "what it would cost; nobody is asked. With --yes it makes them, and waits until the gateway answers. "
        f"{PAGE} says what you need, and what is made. No port is open unless --allow says so, and nobody logs in by ssh: "
        "sessions of AWS Systems Manager reach it.",
    )
    config = command.add_argument(
        "config",
        metavar="CONFIG|REPORT",
        help="a YAML file (`gateway examples` has some), or the report.json of `loadtest recommend`: on its winner's type",
    )
    completed_by_files(config)
    command.add_argument("--yes", action="store_true", help="make the calls; without it they are printed")
    add_options(command)
    command.set_defaults(run=_ec2)


@ending_in_order()
def _ec2(arguments: argparse.Namespace) -> int:
    document, measured = document_of(arguments.config)
    config = config_of(document)
    if measured is not None:
        if arguments.instance_type is None and arguments.cluster is None and measured.instance_types:
            arguments.instance_type = measured.instance_types[0]
        for caveat in measured.caveats:
            words.info("Note: %s.", caveat)
        if arguments.cluster is None and (measured.count or 1) > 1:
            words.info("Note: the fleet is of %d machines: this is one of them, each needs its own --name.", measured.count)
    if arguments.cluster is not None:
        return write_cluster(arguments, document, config)
    if faults := [*unfit(document, config, reached=bool(arguments.allow))]:
        raise ConfigFaults(faults)
    asked = wanted(arguments, document, config)
    with tempfile.TemporaryDirectory(prefix="gateway-deploy-") as folder:
        there = moved(document, asked.machine.instance_type)
        package = archive(there, Path(folder) / PACKAGE, apart=secrets_here(document))
        machine = replace(asked.machine, package=package)
        for note in asked.notes:
            words.info("Note: %s.", note)
        if machine.profile:
            may = f"open sessions ({AGENT_POLICY}), and this"
            words.info("Note: the role in %s must be allowed to %s:\n%s", machine.profile, may, readable(machine))
        calls = creation(machine)
        if not arguments.yes:
            print(as_text(calls))
            print("\n".join(f"# {line}" for line in (*_price(machine), *_reached(machine, "INSTANCE"))))
            words.info("Nothing was called: --yes makes these calls.")
            return 0
        _carry_out(machine, calls)
    return 0


def _carry_out(machine: Machine, calls: Sequence[Call]) -> None:
    """Raises: ConfigError, if something of this name stands there already; PlatformRefused."""
    from gateway.aws.client import Aws
    from gateway.aws.deployment import Deploying
    from gateway.aws.machine_standing import machine_standing
    from gateway.aws.standing import check_bucket

    platform = Aws(machine.region)
    check_bucket(platform, machine.bucket)
    remove = f"`gateway undeploy {machine.name} --region {machine.region} --on ec2 --bucket {machine.bucket} --yes`"
    found = of_ours(machine_standing(platform, machine.name, profile=machine.profile))
    if found.elsewhere:
        taken = ", ".join(found.elsewhere)
        raise ConfigError(f"--name: {machine.name}: taken by {taken}: choose another")
    if not found.nothing:
        stands = "\n  ".join(told_of_machine(found, bundled(), now()))
        raise ConfigError(f"--name: {machine.name}: stands already: {remove} removes it, or choose another\n  {stands}")
    for line in _price(machine):
        words.info("%s", line)
    Deploying(platform).carry_out(calls, remedy=remove)
    found = machine_standing(platform, machine.name)
    print("\n".join(told_of_machine(found, bundled(), now())))
    for each in found.instances:
        print("\n".join(_reached(machine, each.number)))
    words.info("%s removes it.", remove)


def _price(machine: Machine) -> Iterator[str]:
    types = bundled()
    yield from monthly([machine.instance_type], 1, 1, types, region=machine.region, today=now().date(), basis="ec2")
    spot = types.instances[machine.instance_type].spot
    if machine.spot and spot is not None:
        source = f"{types.sources[spot.source]}, {spot.date or 'of no known date'}"
        rate = f"{spot.saving_percent:g} % less on average; taken back within a month: {spot.interruption}"
        yield f"On spot {rate}. Source: {source}."
    yield f"Its disk ({machine.volume_gib} GiB of gp3), a public address and what is sent over the network come on top."


def _reached(machine: Machine, number: str) -> Iterator[str]:
    """How to speak to it."""
    if machine.allow:
        yield f"{', '.join(map(str, machine.allow))} will reach it at ports {', '.join(map(str, machine.ports))}."
    elif port := machine.config.server.http_port:
        asked = f'{{"portNumber":["{port}"],"localPortNumber":["{port}"]}}'
        yield "Only the machine itself will reach it; this brings its port here, for who may open sessions:"
        yield (
            f"  aws ssm start-session --region {machine.region} --target {number}"
            f" --document-name AWS-StartPortForwardingSession --parameters '{asked}'"
        )
