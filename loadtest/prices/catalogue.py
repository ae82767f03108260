"""Instance types and their prices, read from gateway/instances/instances.yaml: facts with a source and a date.

An unknown type or a missing price is an error, never a zero and never a guess. Estimated, undated and old prices are usable,
but carry a flag that every report prints.
"""

import difflib
import functools
from importlib.resources.abc import Traversable

from gateway.documents.faults import ConfigFaults
from gateway.documents.lenient import validated
from gateway.documents.reader import parse
from gateway.instances.facts import BUNDLED, SAGEMAKER, InstanceType, InstanceTypes, Price, PriceBasis, bundled_values
from loadtest.errors import UsageError


class Catalogue(InstanceTypes):
    """The same, to look things up in, with what to do where one is not there."""

    def instance(self, name: str) -> InstanceType:
        """Look up `c7i.xlarge`; SageMaker's `ml.c7i.xlarge` is the same. Raises: UsageError that names the nearest."""
        bare = name.removeprefix(SAGEMAKER)
        if bare not in self.instances:
            near = difflib.get_close_matches(bare, self.instances, n=3, cutoff=0.5)
            hint = f"; the nearest are {', '.join(near)}" if near else ""
            raise UsageError(f"unknown instance type {name!r}{hint}: `loadtest prices list` shows all {len(self.instances)}")
        return self.instances[bare]

    def price(self, name: str, basis: PriceBasis) -> Price:
        """The hourly price on a basis, its source spelled out. Raises: UsageError if it is not known."""
        instance = self.instance(name)
        bare = name.removeprefix(SAGEMAKER)
        if (quoted := self.quoted(bare, basis)) is not None:
            return quoted
        if basis == "spot" and instance.spot is not None:
            spot, on_demand = instance.spot, self.price(bare, "ec2")
            source = f"{self.sources[spot.source]}: {spot.saving_percent:g} % below on demand"
            usd_per_hour = on_demand.usd_per_hour * (1 - spot.saving_percent / 100)
            return Price(usd_per_hour=usd_per_hour, source=source, date=spot.date, estimated=True)
        if basis == "sagemaker" and not self.hosted(bare):
            raise UsageError(f"SageMaker does not host {bare}, which is on EC2 only: choose another type, or `price: ec2`")
        raise UsageError(f"no {basis} price is known for {bare}: set `usd_per_hour` and `price_source` on the candidate")

    def with_prices(self, live: dict[tuple[str, PriceBasis], Price]) -> "Catalogue":
        """A copy in which live prices (their sources spelled out) replace the bundled ones of the same types."""
        sources, instances = dict(self.sources), dict(self.instances)
        for (name, basis), price in live.items():
            if name in instances:
                sources[price.source] = price.source
                prices = {**instances[name].prices, basis: price}
                instances[name] = instances[name].model_copy(update={"prices": prices})
        return self.model_copy(update={"sources": sources, "instances": instances})

    def elsewhere(self, region: str) -> "Catalogue":
        """The same types in another region, of which no price is known yet."""
        instances = {
            name: instance.model_copy(update={"prices": {}, "spot": None}) for name, instance in self.instances.items()
        }
        return self.model_copy(update={"region": region, "instances": instances})


def load_catalogue(path: Traversable = BUNDLED) -> Catalogue:
    """Read an instances file. Raises: UsageError, with one line per fault."""
    if path == BUNDLED:
        return _bundled()
    try:
        return validated(Catalogue, parse(path.read_text(encoding="utf-8"), source=str(path)))
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"{path}: cannot be read: {exc}") from exc
    except ConfigFaults as exc:
        raise UsageError(exc.message) from exc


@functools.cache
def _bundled() -> Catalogue:
    return Catalogue.model_validate(bundled_values())
