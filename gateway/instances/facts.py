"""Instance types and their prices, as instances.yaml beside it has them. A type or a price that is not there is not guessed."""

import datetime
import functools
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Annotated, Final, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from gateway.documents.faults import Refused, Unfit

BUNDLED: Final[Traversable] = files("gateway.instances") / "instances.yaml"
STALE_AFTER_DAYS: Final = 90
SAGEMAKER: Final = "ml."  # in front of an EC2 type's name, it is SageMaker's

PriceBasis = Literal["ec2", "spot", "sagemaker"]
PositiveUsd = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Fact(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Price(_Fact):
    """What one instance costs in an hour, and how far that can be believed.

    source: where it was read. date: when it was true, None if the source does not say. estimated: nobody quoted it.
    """

    usd_per_hour: PositiveUsd
    source: str = Field(min_length=1)
    date: datetime.date | None
    estimated: bool = False

    def flags(self, today: datetime.date) -> tuple[str, ...]:
        """What a reader must know before he trusts it: "estimated", "undated", "n days old", "in the future"."""
        flags = ["estimated"] if self.estimated else []
        if self.date is None:
            flags.append("undated")
        elif (age := (today - self.date).days) > STALE_AFTER_DAYS:
            flags.append(f"{age} days old")
        elif age < -1:  # it may be tomorrow elsewhere
            flags.append("in the future")
        return tuple(flags)


class Spot(_Fact):
    """The mean saving of spot capacity on the on-demand price, and how often it was taken back in a month."""

    saving_percent: float = Field(ge=0, lt=100)
    interruption: str
    source: str = Field(min_length=1)
    date: datetime.date | None


class Accelerator(_Fact):
    """All accelerators of one instance. count: below 1 for a share of one. memory_gib: of all. cores: NeuronCores of all."""

    name: str
    vendor: Literal["nvidia", "aws", "amd"]
    count: float = Field(gt=0)
    memory_gib: float = Field(gt=0)
    cores: int | None = None


class InstanceType(_Fact):
    """One EC2 type. Its SageMaker name is the same behind `ml.`."""

    vcpu: int = Field(ge=1)
    memory_gib: float = Field(gt=0)
    architecture: Literal["amd64", "arm64"]
    cpu: str
    accelerator: Accelerator | None = None
    prices: dict[PriceBasis, Price]
    spot: Spot | None = None


class InstanceTypes(_Fact):
    """All known types of one region. sources: short name -> where the prices under it were read.

    ec2_only: families, such as c7a, of which SageMaker hosts no type. endpoint_only: families and types that it hosts, but not
    for batch transform jobs. Everywhere `ml.c7i.xlarge` is the same as `c7i.xlarge`.
    """

    region: str
    sources: dict[str, str]
    ec2_only: tuple[str, ...] = ()
    endpoint_only: tuple[str, ...] = ()
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

    def hosted(self, name: str) -> bool:
        """Whether SageMaker has it."""
        return name.removeprefix(SAGEMAKER).partition(".")[0] not in self.ec2_only

    def transforms(self, name: str) -> bool:
        """Whether SageMaker takes it for batch transform jobs."""
        name = name.removeprefix(SAGEMAKER)
        return self.hosted(name) and not {name, name.partition(".")[0]} & set(self.endpoint_only)

    def quoted(self, name: str, basis: PriceBasis) -> Price | None:
        """The price that stands here, its source spelled out; None, if none does. name: of a known type."""
        price = self.instances[name.removeprefix(SAGEMAKER)].prices.get(basis)
        return None if price is None else price.model_copy(update={"source": self.sources[price.source]})


@functools.cache
def bundled() -> InstanceTypes:
    return InstanceTypes.model_validate(bundled_values())


def bundled_values() -> object:
    """As the file has them. Ours has no fault: so it needs no reader that tells of them, by line, which takes half a second."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(BUNDLED.read_text(encoding="utf-8"), loader)
