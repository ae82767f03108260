"""One model version as its process serves it: its state, and the lanes that its requests may be in."""

import asyncio
from dataclasses import KW_ONLY, dataclass, field

from backends.base import ModelSpec
from gateway.batching.recording import given_up
from gateway.config import ModelSection, Ragged
from gateway.engine.dispatcher import Dispatcher
from gateway.engine.lane import Lane


@dataclass(slots=True, eq=False)
class ServedModel:
    """One model version. wanted: whether it should be loaded. lanes, dispatcher: empty and None unless READY.

    leaving: lanes that get no new requests, and answer those they have.
    generation: the repository's, when it was loaded last; 0: it never was.
    missing: backends that could not be loaded, by label, and why; each is tried again by one of `joining`.
    """

    config: ModelSection
    _: KW_ONLY
    wanted: bool = False
    state: str = "UNAVAILABLE"
    reason: str = ""
    spec: ModelSpec = field(default_factory=lambda: ModelSpec("", (), (), 0))
    lanes: tuple[Lane, ...] = ()
    dispatcher: Dispatcher | None = None
    leaving: tuple[Lane, ...] = ()
    generation: int = 0
    missing: dict[str, str] = field(default_factory=dict)
    joining: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def serves(self) -> bool:
        """Whether a request sent here can be expected to be run."""
        return self.state == "READY" and any(lane.available for lane in self.lanes)

    @property
    def all_lanes(self) -> tuple[Lane, ...]:
        """Wherever a request of it may be."""
        return self.lanes + self.leaving

    @property
    def unrecorded(self) -> dict[str, str]:
        """Backends whose decisions are recorded no more, and why; under an empty name the routing."""
        found = {lane.name.rsplit("/", 1)[1]: given_up(lane.batcher) for lane in self.lanes}
        if self.dispatcher is not None:
            found[""] = given_up(self.dispatcher.router)
        return {label: reason for label, reason in found.items() if reason}

    @property
    def version(self) -> str:
        return self.config.version

    @property
    def ragged(self) -> Ragged | None:
        return self.config.ragged
