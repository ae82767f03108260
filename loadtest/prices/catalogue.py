"""Instance types and their prices, read from instances.yaml beside it: facts with a source and a date.

An unknown type or a missing price is an error, never a zero and never a guess. Estimated, undated and old prices are usable,
but carry a flag that every report prints.
"""

import datetime
import difflib
import functools
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from gateway.documents.faults import ConfigFaults, Refused, Unfit
from gateway.documents.lenient import validated
from gateway.documents.reader import parse
from loadtest.errors import UsageError

BUNDLED: Traversable = files("loadtest.prices") / "instances.yaml"
STALE_AFTER_DAYS = 90

PriceBasis = Literal["ec2", "spot", "sagemaker"]
PositiveUsd = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _CatalogueEntry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Price(_CatalogueEntry):
    """What one instance costs in an hour, and how far that can be believed.

    source: where it was read. date: when it was true, None if the source does not say. estimated: nobody quoted it.
    """

    usd_per_hour: PositiveUsd
    source: str = Field(min_length=1)
    date: datetime.date | None
    estimated: bool = False

    def flags(self, today: datetime.date) -> tuple[str, ...]:
        """What a reader must know before he trusts it: "estimated", "undated", "n days old"."""
        flags = ["estimated"] if self.estimated else []
        if self.date is None:
            flags.append("undated")
        elif (age := (today - self.date).days) > STALE_AFTER_DAYS:
            flags.append(f"{age} days old")
        return tuple(flags)


class Spot(_CatalogueEntry):
    """The mean saving of spot capacity on the on-demand price, and how often it was taken back in a month."""

    saving_percent: float = Field(ge=0, lt=100)
    interruption: str
    source: str = Field(min_length=1)
    date: datetime.date | None


class Accelerator(_CatalogueEntry):
    """All accelerators of one instance. count: below 1 for a share of one. memory_gib: of all. cores: NeuronCores of all."""

    name: str
    vendor: Literal["nvidia", "aws", "amd"]
    count: float = Field(gt=0)
    memory_gib: float = Field(gt=0)
    cores: int | None = None


class InstanceType(_CatalogueEntry):
    """One EC2 type. Its SageMaker name is the same behind `ml.`."""

    vcpu: int = Field(ge=1)
    memory_gib: float = Field(gt=0)
    architecture: Literal["amd64", "arm64"]
    cpu: str
    accelerator: Accelerator | None = None
    prices: dict[PriceBasis, Price]
    spot: Spot | None = None


class Catalogue(_CatalogueEntry):
    """All known types of one region. sources: short name -> where the prices under it were read.

    ec2_only: families, such as c7a, of which SageMaker hosts no type.
    """

    region: str
    sources: dict[str, str]
    ec2_only: tuple[str, ...] = ()
    instances: dict[str, InstanceType]

    @model_validator(mode="after")
    def _sourced(self) -> Self:
        unfit = []
        for name, instance in self.instances.items():
            used = {price.source for price in instance.prices.values()} | ({instance.spot.source} if instance.spot else set())
            for source in sorted(used - set(self.sources)):
                found = f"source {source!r} is not among `sources`"
                unfit.append(Unfit(found, remedy="add it there", at=("instances", name)))
        if unfit:
            raise Refused(unfit)
        return self

    def instance(self, name: str) -> InstanceType:
        """Look up `c7i.xlarge`; SageMaker's `ml.c7i.xlarge` is the same. Raises: UsageError that names the nearest."""
        bare = name.removeprefix("ml.")
        if bare not in self.instances:
            near = difflib.get_close_matches(bare, self.instances, n=3, cutoff=0.5)
            hint = f"; the nearest are {', '.join(near)}" if near else ""
            raise UsageError(f"unknown instance type {name!r}{hint}: `loadtest prices list` shows all {len(self.instances)}")
        return self.instances[bare]

    def hosted(self, name: str) -> bool:
        """Whether SageMaker has it."""
        return name.removeprefix("ml.").partition(".")[0] not in self.ec2_only

    def price(self, name: str, basis: PriceBasis) -> Price:
        """The hourly price on a basis, its source spelled out. Raises: UsageError if it is not known."""
        instance = self.instance(name)
        bare = name.removeprefix("ml.")
        if basis in instance.prices:
            price = instance.prices[basis]
            return price.model_copy(update={"source": self.sources[price.source]})
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
    """Ours has no fault: so it needs no reader that tells of them, by line, which takes half a second."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return Catalogue.model_validate(yaml.load(BUNDLED.read_text(encoding="utf-8"), loader))
