"""What is compared: one entry of `candidates` becomes a candidate for each of its instances and settings, with its price."""

import difflib
import itertools
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from backends.artifact_sizes import artifact_bytes
from backends.check import checked
from backends.mistakes import Wanted
from backends.source import is_source
from gateway.config import parse_config
from gateway.documents.faults import shown
from gateway.errors import ConfigError
from gateway.instances.facts import Price, PriceBasis
from loadtest.errors import UsageError
from loadtest.load.target import Address
from loadtest.prices.catalogue import Catalogue
from loadtest.question.numerics import full_precision, numerics_of
from loadtest.question.spec_file import CandidateSpec, Ec2Launcher, LocalLauncher, SageMakerLauncher, SpecFile, UrlLauncher
from loadtest.results import LoadSpec, SloSpec
from loadtest.search.events import Entrant
from loadtest.wording import counted

_BATCHING_SETTINGS: Final = ("max_rows", "policy", "max_delay_ms")
_NO_PART: Final = ("name", "sessions", "usd_per_hour")  # keys of a backend that change nothing of what a batch takes
ARCHITECTURES: Final = {"x86_64": "amd64", "AMD64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


@dataclass(frozen=True, slots=True)
class CandidateSetup:
    """One configuration on one kind of instance, ready to be started and priced.

    group: candidates of one group differ only in sessions and batch cap, so that one profile t(n, k) serves them all.
    numerics: candidates of one numerics compute the same, as far as can be known: same file or code, same precision.
    full_precision: whether it computes with the model's own floats; None if that cannot be known.
    document: the gateway configuration that serves it; empty for a server that already runs.
    cpus: the cores it is pinned to; empty: all.
    price: None for a `url` candidate whose instance type is still to be asked from the server, and where none is known of one
    that is to be launched, which `preflight` refuses.
    artifact_bytes: of the model's files; None if it is code, or elsewhere.
    pool: candidates of one pool share their max_count: same entry, same instance type; "": none but itself.
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
    full_precision: bool | None = None
    artifact_bytes: int | None = None
    pool: str = ""

    @property
    def called(self) -> str:
        """Its backend's own name or kind, which others may have too."""
        backend = self.document["models"][0]["backends"][0] if self.document else {"kind": self.backend}
        return str(backend.get("name") or backend["kind"])

    @property
    def usd_per_hour(self) -> float:
        assert self.price is not None  # priced before the search begins: launchers.url.price_by_metadata
        return self.price.usd_per_hour

    @property
    def entrant(self) -> Entrant:
        """What the search must know of it."""
        price, most = self.usd_per_hour, self.max_count
        return Entrant(self.name, self.group, price, self.sessions, self.max_rows, self.numerics, most, self.pool)


def priced(candidate: CandidateSetup, instance_type: str, catalogue: Catalogue, basis: PriceBasis) -> CandidateSetup:
    """A `url` candidate, its instance type now known. Raises: UsageError, if that has no price."""
    price = catalogue.price(instance_type, basis)
    return replace(candidate, name=f"{instance_type} {candidate.name}", instance_type=instance_type, price=price, basis=basis)


@dataclass(frozen=True, slots=True)
class _PricedInstance:
    """Where a candidate runs, and for how much."""

    instance_type: str
    price: Price | None
    basis: str
    cpus: tuple[int, ...]

    @property
    def costs(self) -> dict[str, float]:
        """The key of a backend that says so."""
        return {} if self.price is None else {"usd_per_hour": self.price.usd_per_hour}


@dataclass(frozen=True, slots=True)
class Expansion:
    """One entry of `candidates`, and all it needs to become candidates. doors: of a gateway's `server`, what locks them."""

    file: SpecFile
    wanted: CandidateSpec
    model: dict[str, Any]
    slo: SloSpec
    catalogue: Catalogue
    at: str
    doors: dict[str, Any]

    def candidates(self) -> list[CandidateSetup]:
        """Raises: UsageError, with one line per fault."""
        if isinstance(self.file.launcher, UrlLauncher):
            return self._running()
        if self.wanted.url is not None:
            raise UsageError(f"{self.at}: url: only for `launcher: {{kind: url}}`")
        faults = list(self._misplaced())
        backend = collect(faults, "", self._backend)
        instances = [collect(faults, "", partial(self._instance, name)) for name in self.wanted.instances or ("",)]
        # Settings are checked even where no instance type is well, on one of no name.
        sound = [instance for instance in instances if instance is not None] or [
            _PricedInstance("", Price(usd_per_hour=1, source="-", date=None), "own", ())
        ]
        found: list[CandidateSetup] = []
        for instance, values in itertools.product(sound, itertools.product(*self.wanted.settings.values())):
            settings = dict(zip(self.wanted.settings, values, strict=True))
            if backend is not None:
                found.append(collect(faults, "", partial(self._candidate, instance, backend, settings)))
        if faults:
            raise UsageError("\n".join(dict.fromkeys(faults)))
        return found

    def _misplaced(self) -> Iterator[str]:
        """Keys that say nothing where they stand."""
        told = {key: getattr(self.wanted, key) for key in ("price_source", "price_date")}
        if self.wanted.usd_per_hour is None and (lone := [f"{key}: {each}" for key, each in told.items() if each is not None]):
            yield f"{self.at}: usd_per_hour: missing, expected the price that is told of by {' and '.join(lone)}"
        own = self.wanted.backend if isinstance(self.wanted.backend, dict) else {}
        settings = {key: list(values) for key, values in self.wanted.settings.items()}
        for place, keys in (("settings", settings), ("backend", own)):
            if "usd_per_hour" in keys:
                value = shown(keys["usd_per_hour"])
                yield f"{self.at}: {place}.usd_per_hour: {value}: expected beside `{place}`: it is the candidate's price"
        if "name" in settings:
            value = shown(settings["name"])
            yield f"{self.at}: settings.name: {value}: expected one name, in `backend`: another name makes no other candidate"

    def _instance(self, instance_type: str) -> _PricedInstance:
        if self._launched:
            return self._launched_instance(instance_type)
        price, basis = self._price(instance_type)
        return _PricedInstance(instance_type, price, basis, self._cpus(instance_type))

    @property
    def _launched(self) -> bool:
        """On a machine that is paid for: what cannot work there, `preflight` tells of each candidate."""
        return isinstance(self.file.launcher, SageMakerLauncher | Ec2Launcher)

    def _launched_instance(self, instance_type: str) -> _PricedInstance:
        if not instance_type:
            raise UsageError(f"{self.at}: instances: missing, expected the types to launch, such as [c7i.xlarge]")
        own = self.wanted.usd_per_hour is not None
        found, basis = self.catalogue.instance(instance_type), self.file.basis
        known = basis in found.prices or (basis == "spot" and found.spot is not None and "ec2" in found.prices)
        price, told = self._price(instance_type) if own or known else (None, basis)
        return _PricedInstance(instance_type, price, told, ())

    def _running(self) -> list[CandidateSetup]:
        faults = list(self._misplaced())
        if self.wanted.url is None:
            faults.append(f"{self.at}: url: missing, expected the address of the running server")
        elif collect(faults, f"{self.at}: url", partial(Address.of, LoadSpec(self.wanted.url))) is None:
            pass  # it is told
        elif not self.wanted.url.startswith(("http://", "https://")):
            faults.append(f"{self.at}: url: {self.wanted.url!r}: expected an address that begins with http:// or https://")
        if len(self.wanted.instances) > 1 or self.wanted.settings or self.wanted.backend:
            faults.append(f"{self.at}: a running server has one instance type, and its backend and settings are its own")
        price, basis, instance_type = None, self.file.basis, ""
        if self.wanted.instances or self.wanted.usd_per_hour is not None:
            instance_type = self.wanted.instances[0] if self.wanted.instances else ""
            price, basis = collect(faults, "", partial(self._price, instance_type)) or (None, basis)
        if faults or self.wanted.url is None:
            raise UsageError("\n".join(faults))
        url = self.wanted.url.rstrip("/")
        name = " ".join(filter(None, (instance_type, url)))
        return [
            CandidateSetup(
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
                url=url,
                max_count=self.wanted.max_count,
                numerics=url,
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
            return self.catalogue.price(instance_type, self.file.basis), self.file.basis
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

    def _candidate(self, instance: _PricedInstance, backend: dict[str, Any], settings: dict[str, Any]) -> CandidateSetup:
        batching = {key: value for key, value in settings.items() if key in _BATCHING_SETTINGS}
        own = {key: value for key, value in settings.items() if key not in _BATCHING_SETTINGS}
        document: dict[str, Any] = {"server": self.doors} if self.doors else {}
        document |= {
            "models": [
                {
                    **self.model,
                    "slo": {"p99_ms": self.slo.strictest.limit_ms if self.slo.strictest else 1000.0},
                    "batching": {**self.model.get("batching", {}), **batching},
                    "backends": [{**backend, **own, **instance.costs}],
                }
            ]
        }
        try:
            model = parse_config(document, source=self.at).models[0]
        except ConfigError as exc:
            raise UsageError(exc.message.replace("models[0].backends[0].", "settings: ")) from exc
        parsed = model.backends[0]
        options = parsed.options()
        faults: list[str] = []
        collect(faults, "", partial(self._check_device, instance.instance_type, options.get("device", "cpu")))
        collect(faults, "", partial(self._check_file, instance.instance_type, options.get("model")))
        collect(faults, "", partial(self._check_code, parsed.kind, options))
        if faults:
            raise UsageError("\n".join(faults))
        name, group = _called(instance.instance_type, parsed.label, settings, instance.cpus)
        return CandidateSetup(
            name=name,
            group=group,
            instance_type=instance.instance_type,
            price=instance.price,
            basis=instance.basis,
            backend=parsed.label,
            settings=settings,
            sessions=parsed.sessions,
            max_rows=model.batching.max_rows or model.max_rows or 1,
            document=document,
            cpus=instance.cpus,
            max_count=self.wanted.max_count,
            numerics=numerics_of(parsed.kind, options),
            full_precision=full_precision(parsed.kind, options),
            artifact_bytes=None if parsed.kind == "triton" else _size(options.get("model")),  # where it is a name
            pool=f"{self.at} {instance.instance_type}",
        )

    def _check_device(self, instance_type: str, device: str) -> None:
        if not instance_type or device == "cpu" or self._launched:
            return
        accelerator = self.catalogue.instance(instance_type).accelerator
        needs = "nvidia" if device.startswith("cuda") else "aws"
        if accelerator is None or accelerator.vendor != needs:
            raise UsageError(f"{self.at}: {instance_type} has no device {device!r}: {accelerator or 'no accelerator'}")

    def _check_file(self, instance_type: str, model: object) -> None:
        if not isinstance(model, str) or ":" in model:
            return  # code: its size is known when it is loaded
        if not Path(model).exists():
            built = any(backend.get("model") == model and backend.get("build") for backend in self.model.get("backends", ()))
            remedy = f"`gateway compile {self.file.gateway}` makes it" if built else "paths count from the spec's folder"
            raise UsageError(f"{self.at}: backend: no file {model!r}; {remedy}")
        size_gib = (_size(model) or 0) / (1 << 30)
        if self._launched or not instance_type:
            return
        if size_gib > (memory_gib := self.catalogue.instance(instance_type).memory_gib):
            raise UsageError(f"{self.at}: {model} has {size_gib:.1f} GiB, {instance_type} only {memory_gib:g} GiB of memory")

    def _check_code(self, kind: str, options: dict[str, Any]) -> None:
        """That the file is there whose code a model names, and has it; none of it is run."""
        if not isinstance(model := options.get("model"), str) or not is_source(model) or ".py:" not in model:
            return
        wanted = Wanted(kind, options, here=False, thorough=False)
        if mistakes := [mistake for mistake in checked(wanted) if mistake.at == ("model",)]:
            mistake = mistakes[0]
            told = "; ".join(filter(None, (mistake.found, mistake.expected and f"expected {mistake.expected}", mistake.remedy)))
            raise UsageError(f"{self.at}: backend.model: {model!r}: {told}; paths count from the spec's folder")


def _called(instance_type: str, backend: str, settings: Mapping[str, Any], cpus: tuple[int, ...]) -> tuple[str, str]:
    """The name and the group of a candidate that a gateway serves."""
    told = ", ".join(f"{key} {value}" for key, value in settings.items())
    computing = {key: value for key, value in settings.items() if key not in ("sessions", *_BATCHING_SETTINGS)}
    name = " ".join(filter(None, (instance_type, backend, f"({told})" if told else "")))
    return name, f"{instance_type} {backend} {computing} {cpus}"


def told_apart(candidates: Sequence[CandidateSetup]) -> list[CandidateSetup]:
    """The same; backends of one label that compute differently, as unnamed ones of one kind may, called by what differs.

    Where none does, names and groups stay, and a journal of before goes on.
    """
    own: dict[str, list[dict[str, Any]]] = {}
    for candidate in candidates:
        if candidate.document and (computing := _computing(candidate)) not in own.setdefault(candidate.backend, []):
            own[candidate.backend].append(computing)
    found = []
    for candidate in candidates:
        alike = own[candidate.backend] if candidate.document else []
        mine = _computing(candidate) if candidate.document else {}
        label = candidate.backend
        for key in (key for key in mine if any(each.get(key) != mine[key] for each in alike)):
            models = [each[key] for each in alike if key in each]
            label += f" {_brief(mine[key], models)}" if key == "model" else f" {key} {mine[key]}"
        if label != candidate.backend:
            name, group = _called(candidate.instance_type, label, candidate.settings, candidate.cpus)
            candidate = replace(candidate, name=name, group=group, backend=label)
        found.append(candidate)
    return found


def _computing(candidate: CandidateSetup) -> dict[str, Any]:
    """What its backend says besides its settings of what a batch takes."""
    backend = candidate.document["models"][0]["backends"][0]
    return {key: value for key, value in backend.items() if key not in {*_NO_PART, *candidate.settings}}


def _brief(model: object, others: Sequence[object]) -> str:
    """Without its folder, where that tells it from the others."""
    names = {Path(str(other)).name for other in others}
    return Path(str(model)).name if len(names) == len(set(map(str, others))) else str(model)


def _size(model: object) -> int | None:
    """With weights beside it; None: of code."""
    return artifact_bytes(Path(model)) if isinstance(model, str) and ":" not in model else None


def oddities(file: SpecFile, candidates: list[CandidateSetup], catalogue: Catalogue, locked: Sequence[str] = ()) -> list[str]:
    """What is odd about candidates but not wrong, one sentence each. locked: how the file's own gateway locks its doors."""
    found = []
    if isinstance(file.launcher, LocalLauncher):
        here = ARCHITECTURES.get(platform.machine(), platform.machine())
        used = {candidate.instance_type.removeprefix("ml.") for candidate in candidates}
        stands_for = {name: cpus for name, cpus in file.launcher.stands_for.items() if name in used}
        for cpus in dict.fromkeys(stands_for.values()):
            names = ", ".join(name for name, cores in stands_for.items() if cores == cpus)
            cores = ", ".join(map(str, cpus))
            found.append(
                f"{names}: not measured itself: by `stands_for` of the spec this machine's cores {cores} stand for it; "
                "measure there before you rely on it"
            )
        for name, cpus in stands_for.items():
            instance = catalogue.instance(name)
            if len(cpus) != instance.vcpu:
                told = f"{len(cpus)} {'core stands' if len(cpus) == 1 else 'cores stand'} for it"
                found.append(f"{name} has {instance.vcpu} vCPU, {told}: name as many in `stands_for`, if this machine has them")
            if instance.architecture != here:
                found.append(f"{name} is {instance.architecture}, this machine is {here}: its rates will differ; measure there")
    if isinstance(file.launcher, Ec2Launcher) and locked:
        found.append(
            f"{' and '.join(f'server.{key}' for key in locked)} of {file.gateway}: left out on EC2, where the load generator "
            "alone reaches candidates: what they cost a request is not measured"
        )
    crowded = [c for c in candidates if c.cpus and c.sessions * int(c.settings.get("threads", 1)) > len(c.cpus)]
    if crowded:
        have, they = ("has", "it") if len(crowded) == 1 else ("have", "they")
        crowd = f"{len(crowded)} of {counted(len(candidates), 'candidate')} {have} more threads of work than cores"
        found.append(f"{crowd}: with fewer `sessions` or `threads` {they} may be faster")
    return found


def collect(faults: list[str], prefix: str, step: Callable[[], Any]) -> Any:
    """The step's value, or None and its faults, so that the user sees all of them at once."""
    try:
        return step()
    except UsageError as exc:
        faults.extend(f"{prefix}: {line}" if prefix else line for line in str(exc).splitlines())
        return None
