"""The file behind `loadtest recommend SPEC` as it is written, and what can be read of one that has faults.

Every key with its meaning: docs/loadtest.md and configs/loadtests/.
"""

import copy
import datetime
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gateway.config import located_backend
from gateway.documents.reader import Document, read
from gateway.documents.validation import FaultPlace, faults_of, flags_of, value_fault, without_short_lists
from gateway.instances.facts import PriceBasis
from loadtest.errors import UsageError
from loadtest.load.payload_limits import MOST_SIZE
from loadtest.results import Protocol
from loadtest.search.budget import MOST_MINUTES

_MOST: Final = 1_000_000_000  # of a rate, a price or a number of instances: what they come to is counted exactly


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PayloadSpec(_Section):
    """What is sent; as in `loadtest run`."""

    protocol: Protocol = "rest-binary"
    rows: int = Field(default=1, ge=1, le=MOST_SIZE)
    length: str = "16"
    values: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


class AgreementSpec(_Section):
    """How candidates' answers are compared with the reference's, where they do not all compute the same.

    reference: a candidate's name, or its backend's; None: the requests' expected answers, else the first of full precision.
    requests: files to compare on; none: the payload's.
    statistic: of `loadtest.verdict.agreement`, for all outputs or by output; none: what fits the datatype.
    """

    reference: str | None = None
    requests: tuple[str, ...] = ()
    statistic: str | dict[str, str] = {}


_Cores = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]


class LocalLauncher(_Section):
    """This machine: each candidate in fresh processes, pinned to cores.

    cpus: the cores of candidates without an instance type; None: all. stands_for: instance type -> the cores that stand for it.
    nice: how far the candidate gives way to the load generator, which shares the machine.
    """

    kind: Literal["local"]
    cpus: _Cores | None = None
    stands_for: dict[str, _Cores] = {}
    start_timeout_s: float = Field(default=90.0, gt=0, le=600)
    nice: int = Field(default=10, ge=0, le=19)


class UrlLauncher(_Section):
    """Servers that already run: every candidate names its `url`."""

    kind: Literal["url"]


class ImageSpec(_Section):
    """A container image of the gateway in Amazon ECR. cuda: of the libraries in it; "" where it has none."""

    uri: str
    architecture: Literal["amd64", "arm64"] = "amd64"
    device: Literal["cpu", "cuda", "neuron"] = "cpu"
    cuda: str = ""


class SageMakerLauncher(_Section):
    """An endpoint of SageMaker for each candidate, with one instance.

    role_arn: what the container may do. bucket: for the packages. ami: InferenceAmiVersion; "": the family's own. parallel: how
    many may be up at once. start_timeout_s: from its creation until it is in service.
    """

    kind: Literal["sagemaker"]  # what is wrong of the others, `loadtest.question.spec` says
    role_arn: str = ""
    bucket: str = ""
    images: tuple[ImageSpec, ...] = ()
    region: str = "us-east-1"
    ami: str = ""
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    parallel: int = Field(default=1, ge=1, le=20)
    start_timeout_s: float = Field(default=1800.0, gt=0, le=7200)


class Ec2Launcher(_Section):
    """A machine of EC2 for each candidate, and one that loads them, beside them.

    subnet: of all of them. bucket: for what they run, and for what comes back. wheel: of the gateway. locks: the folder with
    the requirements-*.lock that belong to it. instance_profile: one that is there already; "": one is made. spot: candidates
    are spare capacity. generator: the type that loads. parallel: how many candidates may be up at once. start_timeout_s: from
    a machine's start until its gateway answers.
    """

    kind: Literal["ec2"]  # what is wrong of the others, `loadtest.question.spec` says
    region: str = "us-east-1"
    subnet: str = ""
    bucket: str = ""
    wheel: str = ""
    locks: str = ""
    instance_profile: str = ""
    spot: bool = False
    generator: str = "c7i.xlarge"
    parallel: int = Field(default=1, ge=1, le=20)
    start_timeout_s: float = Field(default=1800.0, gt=0, le=7200)


AnyLauncher = LocalLauncher | UrlLauncher | SageMakerLauncher | Ec2Launcher


class CandidateSpec(_Section):
    """One line of candidates: instances × settings, on one backend.

    backend: a backend of a gateway configuration, or the name of one in the file under `gateway`.
    settings: key -> values to try: any key of the backend, and max_rows, policy, max_delay_ms of batching.
    usd_per_hour: a price of one's own (contract, reservation, electricity); needs price_source.
    max_count: the most instances that can be had of each of `instances`, whatever their settings.
    """

    instances: tuple[str, ...] = ()
    backend: str | dict[str, Any] | None = None
    settings: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = {}
    url: str | None = None
    usd_per_hour: float | None = Field(default=None, gt=0, le=_MOST)
    price_source: str | None = None
    price_date: datetime.date | None = None
    max_count: int | None = Field(default=None, ge=1, le=_MOST)


class BudgetSpec(_Section):
    """minutes: of measuring, starts included. usd: the most that paid candidates may cost; None: nothing paid is started."""

    minutes: float = Field(default=45.0, gt=0, le=MOST_MINUTES)
    usd: float | None = Field(default=None, ge=0)


class SpecFile(_Section):
    """The file as it is written. model: a model of a gateway configuration, or the name of one in the file under `gateway`."""

    model: str | dict[str, Any]
    gateway: str | None = None
    slo: Any  # read by _slo, which has its own messages
    target_rps: float | None = Field(default=None, gt=0, le=_MOST)
    price: PriceBasis | None = None
    launcher: Annotated[AnyLauncher, Field(discriminator="kind")]
    payload: PayloadSpec = PayloadSpec()
    agreement: AgreementSpec = AgreementSpec()
    candidates: tuple[CandidateSpec, ...] = Field(min_length=1)
    budget: BudgetSpec = BudgetSpec()
    seed: int = Field(default=0, ge=0, le=1 << 62)

    @property
    def basis(self) -> PriceBasis:
        """Of the prices: as the file says, else what its launcher costs."""
        if self.price is not None:
            return self.price
        if isinstance(self.launcher, Ec2Launcher):
            return "spot" if self.launcher.spot else "ec2"
        return "sagemaker" if isinstance(self.launcher, SageMakerLauncher) else "ec2"


def check_option(option: str, value: float | None, section: type[_Section], key: str) -> None:
    """Hold what the command line says instead of a key to what that takes. Raises: UsageError."""
    metadata = tuple(section.model_fields[key].metadata)
    try:
        TypeAdapter(Annotated[float | None, *metadata], config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError:
        raise UsageError(str(value_fault(FaultPlace((), float, metadata), Document(option, value)))) from None


def read_file(path: Path) -> Document:
    """The file as it stands there, its relative paths counted from its folder. Raises: ConfigFaults."""
    document = read(path)
    return replace(document, value=_located(document.value, path.absolute().parent))


def validated(document: Document, faults: list[str]) -> tuple[SpecFile, set[str], set[int]]:
    """The file without what is at fault in it, so that the rest can be checked too; which of its keys that concerns, and which
    candidates, by number.
    """
    mended = copy.deepcopy(document.value)
    flags = list(flags_of(mended, FaultPlace((), SpecFile)))
    for place in flags:
        faults.append(str(value_fault(place, document)))
        if _has(mended, place.location):  # else it went with its list
            _drop(mended, place.location)
    errors: list[Any] = []
    try:
        found = SpecFile.model_validate(mended)
    except ValidationError as exc:
        errors = exc.errors()
    if not errors and not flags:
        return found, set(), set()
    no_slo = document.fault(("slo",), "missing", expected="what is asked", remedy="add `slo: p99<50ms`", value=False)
    for fault in faults_of(errors, SpecFile, document):
        faults.append(str(no_slo if fault.path == "slo" and fault.found == "missing" else fault))
    at_fault = [*(place.location for place in flags), *(error["loc"] for error in without_short_lists(errors))]
    for error in errors:
        _drop(mended, error["loc"])
    for key, stand_in in {"model": "", "slo": {}, "launcher": {"kind": "local"}}.items():
        mended.setdefault(key, stand_in)
    if not mended.get("candidates"):
        mended["candidates"] = [{}]
    bad = {str(loc[0]) for loc in at_fault if loc[0] != "candidates" or len(loc) == 1}
    incomplete = {loc[1] for loc in at_fault if loc[0] == "candidates" and len(loc) > 1 and isinstance(loc[1], int)}
    return SpecFile.model_validate(mended), bad, incomplete


def _has(document: Any, location: tuple[int | str, ...]) -> bool:
    try:
        for part in location:
            document = document[part]
    except LookupError:
        return False
    return True


def _drop(document: dict[Any, Any], location: tuple[int | str, ...]) -> None:
    """Take away what is at a place that pydantic names, which also names the types that it tried there."""
    node: Any = document
    holder: Any = None
    key: Any = None
    for part in location:
        if (isinstance(node, dict) and part in node) or (isinstance(node, list) and isinstance(part, int) and part < len(node)):
            holder, key, node = node, part, node[part]  # type: ignore[index]  # an int where it is a list, as just seen
    if isinstance(holder, dict):
        holder.pop(key, None)
    elif isinstance(key, int) and location[0] == "candidates" and len(location) == 2:
        document["candidates"][key] = {}  # in place, as others are known by their number
    elif isinstance(key, int):
        _drop(document, location[:-1])  # with its list


def _located(document: object, folder: Path) -> object:
    """A spec as it was read, with its relative paths counted from `folder`; what is not as it should be stays."""
    if not isinstance(document, dict):
        return document

    def counted(path: object) -> object:
        return os.path.normpath(folder / path) if isinstance(path, str) else path

    found = dict(document)
    if "gateway" in found:
        found["gateway"] = counted(found["gateway"])
    if isinstance(launcher := found.get("launcher"), dict):
        found["launcher"] = launcher | {key: counted(launcher[key]) for key in ("wheel", "locks") if launcher.get(key)}
    for part, key in (("payload", "files"), ("agreement", "requests")):
        held = found.get(part)
        if isinstance(held, dict) and isinstance(held.get(key), list):
            found[part] = held | {key: [counted(path) for path in held[key]]}
    if isinstance(agreement := found.get("agreement"), dict) and "statistic" in agreement:
        found["agreement"] = agreement | {"statistic": _located_statistic(agreement["statistic"], counted)}
    if isinstance(found.get("candidates"), list):
        found["candidates"] = [
            candidate | {"backend": located_backend(candidate["backend"], folder)}
            if isinstance(candidate, dict) and "backend" in candidate
            else candidate
            for candidate in found["candidates"]
        ]
    return found


def _located_statistic(statistic: object, counted: Callable[[object], object]) -> object:
    """A statistic, or one for each output: a name stays, `path/to/file.py:function` is counted."""
    if isinstance(statistic, dict):
        return {name: _located_statistic(own, counted) for name, own in statistic.items()}
    return counted(statistic) if isinstance(statistic, str) and ".py:" in statistic else statistic
