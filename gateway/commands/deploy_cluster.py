"""`gateway deploy ec2 --cluster DIR`: what `ray up` needs to make a Ray cluster of unlike machines. Nobody is asked."""

import argparse
import datetime
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Final

from gateway.commands.deploy_options import GROUP, REGION, named
from gateway.commands.ec2_options import MachineOptions
from gateway.config import Config
from gateway.configuring.need_of_ray import need_of_ray
from gateway.deploying.contents import as_yaml, contents
from gateway.deploying.ec2 import PACKAGE
from gateway.deploying.packing import partial_of, write
from gateway.deploying.price import HOURS_A_MONTH, dated, hourly, usd
from gateway.deploying.ray_cluster import MODEL, RayOnEc2, cluster, groups, kinds_on, lock_of, texts
from gateway.deploying.ray_groups import LISTENS, check_fit, without_surge
from gateway.documents.faults import ConfigFaults
from gateway.documents.reader import Document
from gateway.documents.whole_file import asked_by, write_whole
from gateway.errors import ConfigError
from gateway.instances.facts import bundled
from gateway.process.console import step, words

_SUBNETS: Final = 16
_FILES: Final = "gateway"  # the folder, in DIR, that every machine gets


def write_cluster(arguments: argparse.Namespace, document: Document, config: Config) -> int:
    """Raises: ConfigError; OSError."""
    _refuse_unfit(arguments, document, config)
    with step("packing"):
        held = contents(document, MODEL, whole=True)
    check_fit(held, "")
    looked = MachineOptions(arguments)
    chosen = {group: name for group, _, name in (text.partition("=") for text in arguments.nodes)}
    found = groups(held, chosen, bundled(), looked.memory_bytes())
    out: Path = arguments.cluster / _FILES
    wheel = looked.wheel()
    asked = RayOnEc2(
        name=named(arguments.name, config),
        region=looked.fits("--region", arguments.region, *REGION),
        subnets=looked.subnets(_SUBNETS),
        security_group=looked.fits("--security-group", arguments.security_group, *GROUP),
        folder=str(out.absolute()),
        wheel=wheel.name,
        groups=found,
        profile=arguments.instance_profile,
    )
    devices = dict.fromkeys(group.device for group in found)
    locks = {device: looked.lock(kinds_on(device, held, found), device) for device in devices}
    looked.check()
    copies = {lock_of(device): lock.path.read_bytes() for device, lock in locks.items()}
    copies[wheel.name] = wheel.path.read_bytes()
    copies |= {name: text.encode() for name, text in texts(held, asked)}
    path = arguments.cluster / "cluster.yaml"
    package = held.package.without((path, partial_of(out / PACKAGE), *(out / name for name in (PACKAGE, *copies))))
    told = "".join(f"# {line}\n" for line in _prices(asked))
    with asked_by("--cluster", folder=True):
        out.mkdir(parents=True, exist_ok=True)
        for name, data in copies.items():
            write_whole(out / name, data)
        with step(f"writing {out / PACKAGE}"):
            packed = write(package, out / PACKAGE)
        write_whole(path, f"{told}{as_yaml(cluster(held, asked))}")
    for each in (path, *sorted(out.iterdir())):
        print(each)
    print(told, end="")
    words.info("%s: %s", PACKAGE, packed)
    if note := without_surge(config, config.server.ingresses):
        words.info("%s", note)
    if not asked.profile:
        words.info("Note: `ray up` makes a role of all rights on EC2 and S3 for the head, unless --instance-profile names one.")
    made = f"ray get-auth-token --generate >/dev/null && ray up {quote(str(path))}"
    words.info("Nothing is called. `%s` makes it, `ray down` ends it.", made)
    return 0


def _refuse_unfit(arguments: argparse.Namespace, document: Document, config: Config) -> None:
    if not need_of_ray(config)[0]:
        raise ConfigError("--cluster: the configuration needs no Ray: expected none: one machine serves it; leave it out")
    for flag in ("allow", "secrets", "spot", "bucket", "volume_gib", "instance_type", "yes"):
        if value := getattr(arguments, flag):
            name = f"--{flag.replace('secrets', 'secret').replace('_', '-')}"
            raise ConfigError(f"{name}: {value}: expected none with --cluster: leave it out")
    found, remedy = "is not brought onto a cluster", "leave it to a load balancer before it"
    faults = [
        document.fault(("server", key), found, remedy=remedy, value=False)
        for key in ("tls", "access")
        if getattr(config.server, key) is not None
    ]
    if faults:
        raise ConfigFaults(faults)


def _prices(asked: RayOnEc2) -> Iterator[str]:
    """Of each kind of machine, and of all: at least what always runs, at most what replicas may ask for."""
    types, today = bundled(), datetime.datetime.now(tz=datetime.UTC).date()
    least = most = 0.0
    for group in asked.groups:
        price = hourly(group.instance_type, types, "ec2")
        counts = (1 + group.least, 1 + group.most) if group.name == LISTENS else (group.least, group.most)
        of_it = f"{group.name}: {counts[0]} to {counts[1]} × {group.instance_type}"
        if price is None:
            yield f"{of_it}: the price is not known here; https://aws.amazon.com/ec2/pricing/on-demand/ has it."
            continue
        spot = types.instances[group.instance_type].spot
        cheaper = f"; on spot {spot.saving_percent:g} % less on average" if group.replicas is not None and spot else ""
        yield f"{of_it}, {usd(price.usd_per_hour)} an hour each{cheaper}. Source: {price.source}, {dated(price, today)}."
        least, most = least + counts[0] * price.usd_per_hour, most + counts[1] * price.usd_per_hour
    month = f"{usd(least * HOURS_A_MONTH)} to {usd(most * HOURS_A_MONTH)}"
    yield f"A month, on demand: {month}. Disks, addresses and what is sent over the network come on top."
    if asked.region != types.region:
        yield f"These are prices of {types.region}; {asked.region} has its own."
