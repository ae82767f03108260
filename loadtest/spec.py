"""The file behind `loadtest recommend SPEC`: a YAML that names the model, the SLO, the candidates and the budget.

Everything that can be known to be wrong is found here, with one line per fault, before anything is started. Every key with its
meaning: docs/loadtest.md and configs/loadtests/.
"""

import datetime
import difflib
import itertools
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.config import parse_config
from gateway.errors import ConfigError
from loadtest.catalogue import Catalogue, Price, PriceBasis
from loadtest.errors import UsageError
from loadtest.results import Protocol, Slo

MIN_AGREEMENT = 0.999  # of a cosine: a model in bf16 keeps 0.9999 and more, one quantised to int8 may have 0.94
BATCHING_SETTINGS = ("max_rows", "policy", "max_delay_ms")
ARCHITECTURES = {"x86_64": "amd64", "AMD64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Payload(_Strict):
    """What is sent; as in `loadtest run`."""

    protocol: Protocol = "rest-binary"
    rows: int = Field(default=1, ge=1)
    length: str = "16"
    values: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


class LocalLauncher(_Strict):
    """This machine: each candidate in fresh processes, pinned to cores.

    cpus: the cores of candidates without an instance type; None: all. stands_for: instance type -> the cores that stand for it.
    nice: how far the candidate gives way to the load generator, which shares the machine.
    """

    kind: Literal["local"]
    cpus: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    stands_for: dict[str, tuple[Annotated[int, Field(ge=0)], ...]] = {}
    start_timeout_s: float = Field(default=90.0, gt=0, le=600)
    nice: int = Field(default=10, ge=0, le=19)


class UrlLauncher(_Strict):
    """Servers that already run: every candidate names its `url`."""

    kind: Literal["url"]


class CandidateSpec(_Strict):
    """One line of candidates: instances × settings, on one backend.

    backend: a backend of a gateway configuration, or the name of one in the file under `gateway`.
    settings: key -> values to try: any key of the backend, and max_rows, policy, max_delay_ms of batching.
    usd_per_hour: a price of one's own (contract, reservation, electricity); needs price_source.
    max_count: the most instances of this kind that can be had.
    """

    instances: tuple[str, ...] = ()
    backend: str | dict[str, Any] | None = None
    settings: dict[str, tuple[Any, ...]] = {}
    url: str | None = None
    usd_per_hour: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    price_source: str | None = None
    price_date: datetime.date | None = None
    max_count: int | None = Field(default=None, ge=1)


class BudgetSpec(_Strict):
    """minutes: of measuring, starts included. usd: the most that paid candidates may cost; None: nothing paid is started."""

    minutes: float = Field(default=45.0, gt=0, le=24 * 60)
    usd: float | None = Field(default=None, ge=0)


class SpecFile(_Strict):
    """The file as it is written. model: a model of a gateway configuration, or the name of one in the file under `gateway`."""

    model: str | dict[str, Any]
    gateway: str | None = None
    slo: Any  # read by Slo.from_yaml, which has its own messages
    target_rps: float | None = Field(default=None, gt=0)
    price: PriceBasis = "ec2"
    launcher: Annotated[LocalLauncher | UrlLauncher, Field(discriminator="kind")]
    payload: Payload = Payload()
    candidates: tuple[CandidateSpec, ...] = Field(min_length=1)
    budget: BudgetSpec = BudgetSpec()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration on one kind of instance, ready to be started and priced.

    group: candidates of one group differ only in sessions and batch cap, so that one profile t(n, k) serves them all.
    numerics: candidates of one numerics compute the same, as far as can be known: same file or code, same precision.
    document: the gateway configuration that serves it; empty for a server that already runs.
    cpus: the cores it is pinned to; empty: all.
    price: None only for a `url` candidate whose instance type is still to be asked from the server.
    """

    name: str
    group: str
    instance_type: str
    price: Price | None
    basis: str
    backend: str
    settings: dict[str, Any]
    sessions: int
    max_rows: int
    document: dict[str, Any]
    url: str = ""
    cpus: tuple[int, ...] = ()
    max_count: int | None = None
    numerics: str = ""

    @property
    def usd_per_hour(self) -> float:
        assert self.price is not None  # priced before the search begins: recommender.price_by_metadata
        return self.price.usd_per_hour


@dataclass(frozen=True, slots=True)
class Spec:
    """A checked spec. warnings: what is odd about it but not wrong."""

    source: str
    model: str
    slo: Slo
    target_rps: float | None
    basis: PriceBasis
    launcher: LocalLauncher | UrlLauncher
    payload: Payload
    candidates: tuple[Candidate, ...]
    budget: BudgetSpec
    seed: int
    warnings: tuple[str, ...]


def load_spec(path: Path, catalogue: Catalogue) -> Spec:
    """Read and check a file. Raises: UsageError, with one line per fault."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise UsageError(f"{path}: cannot be read: {exc}") from exc
    return parse_spec(document, catalogue, source=str(path))


def parse_spec(document: object, catalogue: Catalogue, *, source: str) -> Spec:
    """Check a parsed document. source: what messages call it. Raises: UsageError, with one line per fault."""
    if not isinstance(document, dict):
        raise UsageError(f"{source}: expected a mapping with `model`, `slo`, `launcher` and `candidates`")
    try:
        file = SpecFile.model_validate(document)
    except ValidationError as exc:
        # pydantic also calls a list too short if its items are at fault: that is told already.
        at_fault = [error["loc"] for error in exc.errors() if error["type"] != "too_short"]
        told = [
            e for e in exc.errors() if e["type"] != "too_short" or all(loc[: len(e["loc"])] != e["loc"] for loc in at_fault)
        ]
        raise UsageError("\n".join(_describe(error, source) for error in told)) from exc
    faults: list[str] = []
    slo = _collect(faults, source, lambda: Slo.from_yaml(file.slo))
    model = _collect(faults, source, lambda: _model(file))
    candidates: list[Candidate] = []
    for index, wanted in enumerate(file.candidates):
        if slo is not None and model is not None:
            expand = _Expansion(file, wanted, model, slo, catalogue, f"{source}: candidates[{index}]")
            candidates += _collect(faults, "", expand.candidates) or []
    names = [candidate.name for candidate in candidates]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        faults.append(f"{source}: candidates: listed twice: {', '.join(twice)}")
    if faults or slo is None or model is None:
        raise UsageError("\n".join(faults))
    if slo.tightest_ms is None:
        raise UsageError(f"{source}: slo: a recommendation needs a latency objective such as p99_ms: 50")
    return Spec(
        source=source,
        model=model["name"],
        slo=slo,
        target_rps=file.target_rps,
        basis=file.price,
        launcher=file.launcher,
        payload=file.payload,
        candidates=tuple(candidates),
        budget=file.budget,
        seed=file.seed,
        warnings=tuple(_warnings(file, candidates, catalogue)),
    )


def priced(candidate: Candidate, instance_type: str, catalogue: Catalogue, basis: PriceBasis) -> Candidate:
    """A `url` candidate, its instance type now known. Raises: UsageError, if that has no price."""
    price = catalogue.price(instance_type, basis)
    return replace(candidate, name=f"{instance_type} {candidate.name}", instance_type=instance_type, price=price, basis=basis)


def _collect(faults: list[str], prefix: str, step: Any) -> Any:
    """The step's value, or None and its faults, so that the user sees all of them at once."""
    try:
        return step()
    except UsageError as exc:
        faults.extend(f"{prefix}: {line}" if prefix else line for line in str(exc).splitlines())
        return None


def _gateway_file(file: SpecFile) -> dict[str, Any]:
    if file.gateway is None:
        raise UsageError("gateway: missing, expected the configuration that the names of model and backend refer to")
    try:
        document = yaml.safe_load(Path(file.gateway).read_text(encoding="utf-8"))
        parse_config(document, source=file.gateway)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise UsageError(f"gateway: {file.gateway}: cannot be read: {exc}") from exc
    except ConfigError as exc:
        raise UsageError(exc.message) from exc
    assert isinstance(document, dict)  # parse_config accepts nothing else
    return document


def _model(file: SpecFile) -> dict[str, Any]:
    """The model's part of a gateway configuration, backends included if a gateway file names some."""
    if isinstance(file.model, dict):
        if "name" not in file.model:
            raise UsageError("model: name: missing, expected a value")
        return file.model
    if isinstance(file.launcher, UrlLauncher) and file.gateway is None:
        return {"name": file.model}
    models: list[dict[str, Any]] = _gateway_file(file)["models"]
    for model in models:
        if model["name"] == file.model:
            return model
    raise UsageError(f"model: {file.gateway} has no model {file.model!r}, it has {', '.join(m['name'] for m in models)}")


@dataclass(frozen=True, slots=True)
class _Expansion:
    """One entry of `candidates`, and all it needs to become candidates."""

    file: SpecFile
    wanted: CandidateSpec
    model: dict[str, Any]
    slo: Slo
    catalogue: Catalogue
    at: str

    def candidates(self) -> list[Candidate]:
        if isinstance(self.file.launcher, UrlLauncher):
            return self._running()
        if self.wanted.url is not None:
            raise UsageError(f"{self.at}: url: only for `launcher: {{kind: url}}`")
        backend = self._backend()
        found: list[Candidate] = []
        for instance_type in self.wanted.instances or ("",):
            price, basis = self._price(instance_type)
            cpus = self._cpus(instance_type)
            for values in itertools.product(*self.wanted.settings.values()):
                settings = dict(zip(self.wanted.settings, values, strict=True))
                found.append(self._candidate(instance_type, price, basis, backend, settings, cpus))
        return found

    def _running(self) -> list[Candidate]:
        if self.wanted.url is None:
            raise UsageError(f"{self.at}: url: missing, expected the address of the running server")
        if len(self.wanted.instances) > 1 or self.wanted.settings or self.wanted.backend:
            raise UsageError(f"{self.at}: a running server has one instance type, and its backend and settings are its own")
        price, basis, instance_type = None, self.file.price, ""
        if self.wanted.instances or self.wanted.usd_per_hour is not None:
            instance_type = self.wanted.instances[0] if self.wanted.instances else ""
            price, basis = self._price(instance_type)  # type: ignore[assignment]  # a price of one's own has its own basis
        name = " ".join(filter(None, (instance_type, self.wanted.url)))
        return [
            Candidate(
                name=name,
                group=name,
                instance_type=instance_type,
                price=price,
                basis=basis,
                backend="running",
                settings={},
                sessions=1,
                max_rows=int(self.model.get("max_rows", 32)),
                document={},
                url=self.wanted.url.rstrip("/"),
                max_count=self.wanted.max_count,
            )
        ]

    def _backend(self) -> dict[str, Any]:
        if isinstance(self.wanted.backend, dict):
            return self.wanted.backend
        if self.wanted.backend is None:
            raise UsageError(f"{self.at}: backend: missing, expected a mapping with `kind`")
        known: dict[str, dict[str, Any]] = {b.get("name", b["kind"]): b for b in self.model.get("backends", ())}
        if self.wanted.backend not in known:
            near = difflib.get_close_matches(self.wanted.backend, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f", it has {', '.join(known) or 'none'}"
            raise UsageError(f"{self.at}: backend: the model has no backend {self.wanted.backend!r}{hint}")
        return known[self.wanted.backend]

    def _price(self, instance_type: str) -> tuple[Price, str]:
        if instance_type:
            try:
                self.catalogue.instance(instance_type)
            except UsageError as exc:
                raise UsageError(f"{self.at}: instances: {exc}") from exc
        if self.wanted.usd_per_hour is not None:
            if not self.wanted.price_source:
                raise UsageError(
                    f"{self.at}: price_source: missing, expected where {self.wanted.usd_per_hour:g} USD/h comes from"
                )
            own = Price(usd_per_hour=self.wanted.usd_per_hour, source=self.wanted.price_source, date=self.wanted.price_date)
            return own, "own"
        if not instance_type:
            raise UsageError(f"{self.at}: no price: name `instances`, or set `usd_per_hour` and `price_source`")
        try:
            return self.catalogue.price(instance_type, self.file.price), self.file.price
        except UsageError as exc:
            raise UsageError(f"{self.at}: instances: {exc}") from exc

    def _cpus(self, instance_type: str) -> tuple[int, ...]:
        launcher = self.file.launcher
        assert isinstance(launcher, LocalLauncher)
        if not instance_type:
            return launcher.cpus or ()
        bare = instance_type.removeprefix("ml.")
        if bare not in launcher.stands_for:
            raise UsageError(
                f"{self.at}: instances: {bare} is not measured by running on this machine: choose its launcher, "
                f"or say that this machine stands for it with `launcher: {{stands_for: {{{bare}: [0, 1]}}}}`"
            )
        return launcher.stands_for[bare]

    def _candidate(
        self,
        instance_type: str,
        price: Price,
        basis: str,
        backend: dict[str, Any],
        settings: dict[str, Any],
        cpus: tuple[int, ...],
    ) -> Candidate:
        batching = {key: value for key, value in settings.items() if key in BATCHING_SETTINGS}
        own = {key: value for key, value in settings.items() if key not in BATCHING_SETTINGS}
        document = {
            "models": [
                {
                    **self.model,
                    "slo": {"p99_ms": self.slo.tightest_ms or 1000.0},
                    "batching": {**self.model.get("batching", {}), **batching},
                    "backends": [{**backend, **own, "usd_per_hour": price.usd_per_hour}],
                }
            ]
        }
        try:
            model = parse_config(document, source=self.at).models[0]
        except ConfigError as exc:
            raise UsageError(exc.message.replace("models[0].backends[0].", "settings: ")) from exc
        parsed = model.backends[0]
        self._check_device(instance_type, parsed.options().get("device", "cpu"))
        self._check_file(instance_type, parsed.options().get("model"))
        label = ", ".join(f"{key} {value}" for key, value in settings.items())
        group = {key: value for key, value in settings.items() if key not in ("sessions", *BATCHING_SETTINGS)}
        return Candidate(
            name=" ".join(filter(None, (instance_type, parsed.label, f"({label})" if label else ""))),
            group=f"{instance_type} {parsed.label} {group} {cpus}",
            instance_type=instance_type,
            price=price,
            basis=basis,
            backend=parsed.label,
            settings=settings,
            sessions=parsed.sessions,
            max_rows=model.batching.max_rows or model.max_rows or 1,
            document=document,
            cpus=cpus,
            max_count=self.wanted.max_count,
        )

    def _check_device(self, instance_type: str, device: str) -> None:
        if not instance_type or device == "cpu":
            return
        accelerator = self.catalogue.instance(instance_type).accelerator
        needs = "nvidia" if device.startswith("cuda") else "aws"
        if accelerator is None or accelerator.vendor != needs:
            raise UsageError(f"{self.at}: {instance_type} has no device {device!r}: {accelerator or 'no accelerator'}")

    def _check_file(self, instance_type: str, model: object) -> None:
        if not isinstance(model, str) or ":" in model:
            return  # a factory: its size is known when it is loaded
        if not Path(model).exists():
            raise UsageError(f"{self.at}: backend: no file {model!r}; paths are relative to the working directory")
        size_gib = Path(model).stat().st_size / (1 << 30)
        if instance_type and size_gib > (memory_gib := self.catalogue.instance(instance_type).memory_gib):
            raise UsageError(f"{self.at}: {model} has {size_gib:.1f} GiB, {instance_type} only {memory_gib:g} GiB of memory")


def _warnings(file: SpecFile, candidates: list[Candidate], catalogue: Catalogue) -> list[str]:
    found = []
    if isinstance(file.launcher, LocalLauncher):
        here = ARCHITECTURES.get(platform.machine(), platform.machine())
        used = {candidate.instance_type.removeprefix("ml.") for candidate in candidates}
        stands_for = {name: cpus for name, cpus in file.launcher.stands_for.items() if name in used}
        for cpus in dict.fromkeys(stands_for.values()):
            names = ", ".join(name for name, cores in stands_for.items() if cores == cpus)
            cores = ", ".join(map(str, cpus))
            found.append(f"{names}: not measured; by the spec's word this machine stands for it (cores {cores})")
        for name, cpus in stands_for.items():
            instance = catalogue.instance(name)
            if len(cpus) != instance.vcpu:
                found.append(f"{name} has {instance.vcpu} vCPU; cores that stand for it: {len(cpus)}")
            if instance.architecture != here:
                found.append(f"{name} is {instance.architecture}, this machine is {here}")
    precisions = {str(candidate.settings.get("precision", "fp32")) for candidate in candidates} - {"fp32"}
    if precisions:
        found.append(f"precision {', '.join(sorted(precisions))} changes the model's outputs: accuracy is not measured here")
    crowded = [c for c in candidates if c.cpus and c.sessions * int(c.settings.get("threads", 1)) > len(c.cpus)]
    if crowded:
        found.append(f"{len(crowded)} of {len(candidates)} candidates have more threads of work than cores")
    return found


def _describe(error: Any, source: str) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    if error["type"] == "missing":
        return f"{source}: {path}: missing, expected a value"
    if error["type"] == "extra_forbidden":
        models: dict[str, type[BaseModel]] = {
            "candidates": CandidateSpec, "budget": BudgetSpec, "payload": Payload, "local": LocalLauncher, "url": UrlLauncher,
        }  # fmt: skip
        owner = next((models[part] for part in reversed(error["loc"][:-1]) if part in models), SpecFile)
        near = difflib.get_close_matches(str(error["loc"][-1]), owner.model_fields, n=1)
        return f"{source}: {path}: unknown key" + (f"; did you mean `{near[0]}`?" if near else "")
    value = "" if isinstance(error["input"], dict | list) else f"{error['input']!r}: "
    return f"{source}: {path or '(top level)'}: {value}{error['msg'].removeprefix('Value error, ')}"
