"""What stands of a deployment anywhere on AWS."""

import datetime
from collections.abc import Iterator
from dataclasses import dataclass

from gateway.aws.client import Platform
from gateway.aws.machine_standing import machine_standing
from gateway.aws.standing import standing
from gateway.deploying.calls import Call
from gateway.deploying.ec2_standing import StandingMachine, machine_removal, told_of_machine
from gateway.deploying.sagemaker_standing import Deployed, removal, told
from gateway.instances.facts import bundled


@dataclass(frozen=True, slots=True)
class AllStanding:
    endpoint: Deployed
    machine: StandingMachine

    @property
    def nothing(self) -> bool:
        return self.endpoint.nothing and self.machine.nothing

    @property
    def untagged(self) -> tuple[str, ...]:
        return (*self.endpoint.untagged, *self.machine.untagged)

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """What is of another region, in words."""
        return tuple(dict.fromkeys((*self.endpoint.elsewhere, *self.machine.elsewhere)))

    @property
    def unseen(self) -> tuple[str, ...]:
        """What could not be looked at, and why, and may stand."""
        return (*self.endpoint.unseen, *self.machine.unseen)

    @property
    def buckets(self) -> tuple[str, ...]:
        """That something of it is in."""
        return tuple(dict.fromkeys(bucket for bucket, _ in (*self.endpoint.objects, *self.machine.objects)))

    def removals(self) -> list[list[Call]]:
        """What removes it, of each place."""
        return [removal(self.endpoint), machine_removal(self.machine)]

    def lines(self, now: datetime.datetime) -> Iterator[str]:
        """For people."""
        if not self.endpoint.nothing or self.machine.nothing:
            yield from told(self.endpoint, bundled(), now)
        if not self.machine.nothing:
            yield from told_of_machine(self.machine, bundled(), now)


def all_standing(platform: Platform, name: str, bucket: str | None, on: str | None) -> AllStanding:
    """on: of `PLACES`, where alone is looked; None: at both. Raises: PlatformRefused, ConfigError."""
    nothing = AllStanding(Deployed(name=name, region=platform.region), StandingMachine(name=name, region=platform.region))
    return AllStanding(
        nothing.endpoint if on == "ec2" else standing(platform, name, bucket),
        nothing.machine if on == "sagemaker" else machine_standing(platform, name, bucket),
    )
