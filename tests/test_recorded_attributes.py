"""What a recording names is told by its format: one of another release is refused as such, not called broken."""

import json
import random
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from gateway.batching.recorded_file import packed, unpacked
from gateway.batching.recording import FORMAT
from tests.batching import test_recording as batching
from tests.router import test_routing_recording as routing
from tests.router.fleet import Fleet, drive, poisson
from tests.simulation import SimulatedClock, run_simulated

PINNED = Path(__file__).with_name("recorded_attributes.json")


def test_a_recording_of_another_format_names_other_attributes() -> None:
    named: dict[str, list[str]] = {}
    for state in (*states_of_batchers(), *states_of_routers()):
        named.update(attributes(state))
    pinned = json.loads(PINNED.read_text())
    renamed = {kind: names for kind, names in named.items() if pinned["attributes"].get(kind) != names}
    assert not renamed, f"raise FORMAT, and write it and these to {PINNED}"
    assert pinned == {"format": FORMAT, "attributes": named}


def states_of_batchers() -> Iterator[Any]:
    for case, settings in batching.CASES.items():
        batcher = batching.recorder(**settings)
        batcher.record()
        driver = batching.Driver(batcher, random.Random(0), lengths="lengths" in case)
        for _ in range(18):
            driver.drive(10)
            yield batcher._frozen()


def states_of_routers() -> Iterator[Any]:
    for kinds, rps, _, options in routing.CASES.values():

        async def main(clock: SimulatedClock, kinds: Any = kinds, rps: float = rps, options: Any = options) -> bytes:
            fleet = Fleet(clock, kinds, **options)
            await drive(fleet, poisson(lambda second: rps / 10, 0.2, 3))
            ring = fleet.dispatcher.ring
            return packed("m", "1", [], process="p", processes=1, now_ns=0, unix_s=0.0, routing=ring)

        (told,) = unpacked(run_simulated(main), "here")
        assert told.routing is not None
        yield from (segment["state"] for segment in told.routing["segments"])


def attributes(frozen: Any) -> Iterator[tuple[str, list[str]]]:
    """Of each kind of object in a state, as `freeze` gives it."""
    match frozen:
        case ["k", int(), str(name), [*names], [*_]]:
            yield name, sorted(names)
        case ["n", str(name), [*_]]:
            module, _, kind = name.partition(":")
            yield name, list(getattr(import_module(module), kind)._fields)
    if isinstance(frozen, list | tuple):
        for each in frozen:
            yield from attributes(each)
