"""What stands of a deployment anywhere on AWS, for who may look at one service and not at another."""

import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from gateway.aws.client import RIGHTS, Platform
from gateway.aws.machine_standing import machine_standing
from gateway.aws.standing import standing
from gateway.deploying.calls import Call
from gateway.deploying.ec2_standing import StandingMachine, machine_removal, told_of_machine
from gateway.deploying.sagemaker_standing import Deployed, removal, told
from gateway.errors import PlatformRefused
from gateway.instances.facts import bundled

_Found = TypeVar("_Found", Deployed, StandingMachine)


@dataclass(frozen=True, slots=True)
class AllStanding:
    """unseen: what could not be looked at, and why."""

    endpoint: Deployed
    machine: StandingMachine
    unseen: tuple[str, ...]

    @property
    def nothing(self) -> bool:
        return self.endpoint.nothing and self.machine.nothing

    @property
    def untagged(self) -> tuple[str, ...]:
        return (*self.endpoint.untagged, *self.machine.untagged)

    def calls(self) -> list[Call]:
        """What removes it."""
        return [*removal(self.endpoint), *machine_removal(self.machine)]

    def lines(self, now: datetime.datetime) -> Iterator[str]:
        """For people."""
        if not self.endpoint.nothing or self.machine.nothing:
            yield from told(self.endpoint, bundled(), now)
        if not self.machine.nothing:
            yield from told_of_machine(self.machine, bundled(), now)


def all_standing(platform: Platform, name: str, bucket: str | None) -> AllStanding:
    """Raises: PlatformRefused, ConfigError."""
    unseen: list[PlatformRefused] = []

    def looked(find: Callable[[Platform, str, str | None], _Found], else_: _Found) -> _Found:
        try:
            return find(platform, name, bucket)
        except PlatformRefused as exc:
            if exc.reason not in RIGHTS or unseen:
                raise
            unseen.append(exc)
            return else_

    endpoint = looked(standing, Deployed(name=name, region=platform.region))
    machine = looked(machine_standing, StandingMachine(name=name, region=platform.region))
    return AllStanding(endpoint, machine, tuple(exc.message for exc in unseen))
