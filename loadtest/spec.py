"""The file behind `loadtest recommend SPEC`: a YAML that names the model, the SLO, the candidates and the budget.

Everything that can be known to be wrong is found here, with one line per fault, before anything is started. Every key with its
meaning: docs/loadtest.md and configs/loadtests/.
"""

import copy
import datetime
import difflib
import itertools
import os
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.config import config_of, located, located_backend, parse_config
from gateway.documents.faults import ConfigFaults
from gateway.documents.reader import Document, read
from gateway.documents.validation import faults_of
from gateway.errors import ConfigError
from loadtest.agreement import LEAST_INPUTS, compare_of
from loadtest.catalogue import Catalogue, Price, PriceBasis
from loadtest.errors import UsageError
from loadtest.events import EXPECTED
from loadtest.numerics import full_precision, numerics_of
from loadtest.payloads import distinct, read_requests
from loadtest.results import Protocol, Slo

MIN_AGREEMENT = 0.999  # of a cosine: a model in bf16 keeps 0.9999 and more, one quantised to int8 may have 0.94
_ANY_SLO = Slo.parse("p99<1s")
BATCHING_SETTINGS = ("max_rows", "policy", "max_delay_ms")
_AGREEMENT = re.compile(r"agreement\s*>=?\s*(\d+(?:\.\d+)?)")
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


class AgreementSpec(_Strict):
    """How candidates' answers are compared with the reference's, where they do not all compute the same.

    reference: a candidate's name, or its backend's; None: the requests' expected answers, else the first of full precision.
    requests: files to compare on; none: the payload's.
    statistic: of `loadtest.agreement`, for all outputs or by output; none: what fits the datatype.
    """

    reference: str | None = None
    requests: tuple[str, ...] = ()
    statistic: str | dict[str, str] = {}


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
    slo: Any  # read by _slo, which has its own messages
    target_rps: float | None = Field(default=None, gt=0)
    price: PriceBasis = "ec2"
    launcher: Annotated[LocalLauncher | UrlLauncher, Field(discriminator="kind")]
    payload: Payload = Payload()
    agreement: AgreementSpec = AgreementSpec()
    candidates: tuple[CandidateSpec, ...] = Field(min_length=1)
    budget: BudgetSpec = BudgetSpec()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration on one kind of instance, ready to be started and priced.

    group: candidates of one group differ only in sessions and batch cap, so that one profile t(n, k) serves them all.
    numerics: candidates of one numerics compute the same, as far as can be known: same file or code, same precision.
    full_precision: whether it computes with the model's own floats; None if that cannot be known.
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
    full_precision: bool | None = None

    @property
    def usd_per_hour(self) -> float:
        assert self.price is not None  # priced before the search begins: recommender.price_by_metadata
        return self.price.usd_per_hour


@dataclass(frozen=True, slots=True)
class Comparison:
    """Which requests the candidates' answers are compared on, and how: see `loadtest.agreement`.

    reference: a candidate's name, or search.EXPECTED. stand_ins: candidates that may take its place.
    """

    files: tuple[str, ...]
    statistics: dict[str, str]
    batched: bool
    reference: str
    stand_ins: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Spec:
    """A checked spec. warnings: what is odd about it but not wrong.

    min_agreement: what a candidate's answers must reach; None: they may be anything. comparison: None if nothing is compared.
    pad: as in LoadSpec: how requests of different lengths are joined.
    """

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
    min_agreement: float | None = MIN_AGREEMENT
    comparison: Comparison | None = None
    pad: tuple[str, ...] = ()


def load_spec(path: Path, catalogue: Catalogue) -> Spec:
    """Read and check a file, whose relative paths count from its folder. Raises: UsageError, with one line per fault."""
    try:
        document = read(path)
    except ConfigFaults as exc:
        raise UsageError(exc.message) from exc
    return _spec_of(replace(document, value=_located(document.value, path.absolute().parent)), catalogue)


def _located(document: object, folder: Path) -> object:
    """A spec as it was read, with its relative paths counted from `folder`; what is not as it should be stays."""
    if not isinstance(document, dict):
        return document

    def counted(path: object) -> object:
        return os.path.normpath(folder / path) if isinstance(path, str) else path

    found = dict(document)
    if "gateway" in found:
        found["gateway"] = counted(found["gateway"])
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


def parse_spec(document: object, catalogue: Catalogue, *, source: str) -> Spec:
    """Check a parsed document. source: what messages call it. Raises: UsageError, with one line per fault."""
    return _spec_of(Document(source, document), catalogue)


def _spec_of(document: Document, catalogue: Catalogue) -> Spec:
    source = document.source
    if not isinstance(document.value, dict):
        raise UsageError(f"{source}: expected a mapping with `model`, `slo`, `launcher` and `candidates`")
    faults = list(map(str, document.faults))
    file, bad, incomplete = _validated(document, faults)
    slo, min_agreement = (None, None) if "slo" in bad else _slo(file.slo, source, faults)
    model = None
    if not bad & {"model", "gateway"} and not ("launcher" in bad and isinstance(file.model, str) and file.gateway is None):
        model = _collect(faults, source, partial(_model, file))
    candidates: list[Candidate] = []
    whole = model is not None and "candidates" not in bad and not incomplete
    if model is not None and "candidates" not in bad:
        for index, wanted in enumerate(file.candidates):
            # An SLO at fault is told already: any other does to check the candidates.
            expand = _Expansion(file, wanted, model, slo or _ANY_SLO, catalogue, f"{source}: candidates[{index}]")
            own: list[str] = []
            candidates += _collect(own, "", expand.candidates) or []
            faults += [line for line in own if not _follows(line, index in incomplete, "launcher" in bad)]
            whole = whole and not own
    names = [candidate.name for candidate in candidates]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        faults.append(f"{source}: candidates: listed twice: {', '.join(twice)}")
    if isinstance(file.launcher, UrlLauncher) and file.payload.protocol == "grpc":
        faults.append(f"{source}: payload.protocol: grpc: servers that run already are asked over REST")
    comparison: Comparison | None = None
    doubts: list[str] = []
    if model is not None and not bad & {"slo", "payload", "agreement"}:
        batched = model.get("max_rows") != 0
        comparison, doubts = _comparison(
            file, candidates, source, faults, whole=whole, batched=batched, min_agreement=min_agreement
        )
    if faults or slo is None or model is None:
        raise UsageError("\n".join(dict.fromkeys(faults)))
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
        warnings=(*_warnings(file, candidates, catalogue), *doubts),
        min_agreement=min_agreement,
        comparison=comparison,
        pad=tuple(f"{name}={value:g}" for name, value in ((model.get("ragged") or {}).get("pad") or {}).items()),
    )


def priced(candidate: Candidate, instance_type: str, catalogue: Catalogue, basis: PriceBasis) -> Candidate:
    """A `url` candidate, its instance type now known. Raises: UsageError, if that has no price."""
    price = catalogue.price(instance_type, basis)
    return replace(candidate, name=f"{instance_type} {candidate.name}", instance_type=instance_type, price=price, basis=basis)


def _validated(document: Document, faults: list[str]) -> tuple[SpecFile, set[str], set[int]]:
    """The file without what is at fault in it, so that the rest can be checked too; which of its keys that concerns, and which
    candidates, by number.
    """
    try:
        return SpecFile.model_validate(document.value), set(), set()
    except ValidationError as exc:
        errors = exc.errors()
    faults += map(str, faults_of(errors, SpecFile, document))
    # pydantic also calls a list too short if its items are at fault.
    at_fault = [error["loc"] for error in errors if error["type"] != "too_short"]
    told = [e for e in errors if e["type"] != "too_short" or all(loc[: len(e["loc"])] != e["loc"] for loc in at_fault)]
    mended = copy.deepcopy(document.value)
    for error in errors:
        _drop(mended, error["loc"])
    for key, stand_in in {"model": "", "slo": {}, "launcher": {"kind": "local"}}.items():
        mended.setdefault(key, stand_in)
    if not mended.get("candidates"):
        mended["candidates"] = [{}]
    bad = {str(loc[0]) for loc in at_fault if loc[0] != "candidates" or len(loc) == 1}
    bad |= {"candidates"} if any(error["type"] == "too_short" for error in told) else set()
    incomplete = {loc[1] for loc in at_fault if loc[0] == "candidates" and len(loc) > 1 and isinstance(loc[1], int)}
    return SpecFile.model_validate(mended), bad, incomplete


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


def _follows(line: str, incomplete: bool, no_launcher: bool) -> bool:
    """Whether a fault only follows from one that is told already: what is missing may be what was left out for it."""
    return (incomplete and ("missing, expected" in line or "no price: " in line)) or (no_launcher and "launcher" in line)


def _slo(value: object, source: str, faults: list[str]) -> tuple[Slo | None, float | None]:
    """The latency and error objectives, and the agreement that is asked, which is no property of a single run."""
    min_agreement: float | None = MIN_AGREEMENT
    whole: object = value
    parts: list[object] = [value]
    if isinstance(value, dict):
        whole = {key: number for key, number in value.items() if key != "min_agreement"}
        parts = [{key: number} for key, number in whole.items()]
        asked = value.get("min_agreement", MIN_AGREEMENT)
        if asked is None or (isinstance(asked, int | float) and not isinstance(asked, bool) and 0 <= asked <= 1):
            min_agreement = asked
        else:
            faults.append(f"{source}: slo: min_agreement: {asked!r}: expected 0 to 1, or null to allow any answers")
    elif isinstance(value, str):
        texts = [part.strip() for part in value.split(",")]
        for text in texts:
            if (match := _AGREEMENT.fullmatch(text)) and float(match[1]) <= 1:
                min_agreement = float(match[1])
            elif text.startswith("agreement"):
                faults.append(
                    f'{source}: slo: cannot read "{text}", expected such as "agreement>={MIN_AGREEMENT:g}", at most 1'
                )
        parts = [text for text in texts if not text.startswith("agreement")]
        whole = ",".join(map(str, parts))
    before = len(faults)
    for part in parts:  # each alone, so that all faults are told
        _collect(faults, source, partial(Slo.from_yaml, part))
    slo = _collect(faults, source, partial(Slo.from_yaml, whole)) if len(faults) == before else None
    if slo is not None and slo.tightest_ms is None:
        faults.append(f"{source}: slo: a recommendation needs a latency objective such as p99_ms: 50")
    return slo, min_agreement


def _comparison(
    file: SpecFile,
    candidates: Sequence[Candidate],
    source: str,
    faults: list[str],
    *,
    whole: bool,
    batched: bool,
    min_agreement: float | None,
) -> tuple[Comparison | None, list[str]]:
    """On what the candidates are compared, None if nothing is to be; and what is odd about it.

    whole: whether these are all candidates: else the name of a reference cannot be judged yet.
    """
    before = len(faults)
    wanted = file.agreement
    statistics = {"": wanted.statistic} if isinstance(wanted.statistic, str) else wanted.statistic
    for name in statistics.values():
        _collect(faults, f"{source}: agreement.statistic", partial(compare_of, name))
    sent = _collect(faults, source, partial(read_requests, file.payload.files)) if file.payload.files else []
    if batched and (odd := next((request for request in sent or () if request.rows != 1), None)):
        faults.append(
            f"{source}: payload.files: {odd.source}: expected requests of one row, got {odd.rows}: payload.rows joins them"
        )
    if wanted.requests:
        asked = _collect(faults, source, partial(read_requests, wanted.requests))
        files = wanted.requests
    else:
        asked, files = sent, file.payload.files
    if asked is None:
        return None, []
    requests = distinct(asked)
    without = next((request for request in requests if request.expected is None), None)
    if without and any(request.expected is not None for request in requests):
        faults.append(f"{source}: {without.source}: expected an `expected` answer, as other requests have one")
    expected = bool(requests) and without is None and wanted.reference is None
    chosen = _collect(faults, source, partial(_reference, wanted.reference if whole else None, candidates))
    kinds = len({candidate.numerics for candidate in candidates})
    if chosen is None or len(faults) > before or (kinds < 2 and not expected):
        return None, []
    why = f"{kinds} kinds of candidates compute differently (precision, file or backend)"
    if expected:
        why = "answers are to be compared with the expected ones"
    if len(requests) >= LEAST_INPUTS:
        if expected:
            return Comparison(files, statistics, batched, EXPECTED, ()), []
        reference, stand_ins = chosen
        unsure = (
            "no candidate is known to compute in full precision: answers are compared with those of the first, " + reference
        )
        named = wanted.reference is not None or any(candidate.full_precision for candidate in candidates)
        return Comparison(files, statistics, batched, reference, stand_ins), [] if named else [unsure]
    if min_agreement is None:
        return None, [f"{why}; they were not compared, as that takes {LEAST_INPUTS} real requests"]
    found = (
        f"{len(requests)} different requests are in {', '.join(files)}, {LEAST_INPUTS} are needed"
        if files
        else f"made-up requests cannot tell whether their answers agree: name files of at least {LEAST_INPUTS} real requests"
    )
    what = "agreement.requests" if wanted.requests else "payload.files"
    faults.append(f"{source}: {what}: {why}, and {found}; or allow any answers with slo: {{min_agreement: null}}")
    return None, []


def _reference(wanted: str | None, candidates: Sequence[Candidate]) -> tuple[str, tuple[str, ...]] | None:
    """The candidate whose answers count as right, and who may stand in for it."""
    if not candidates:
        return None
    if wanted is not None:
        for names in ([c.name for c in candidates], [c.backend for c in candidates]):
            if wanted in names:
                return candidates[names.index(wanted)].name, ()
        known = list(dict.fromkeys(name for c in candidates for name in (c.backend, c.name)))
        near = difflib.get_close_matches(wanted, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f": {', '.join(known)}"
        raise UsageError(f"agreement.reference: {wanted!r}: expected the name of a candidate or of its backend{hint}")
    likely = {True: 0, None: 1, False: 2}
    first: dict[str, Candidate] = {}
    for candidate in candidates:
        first.setdefault(candidate.numerics, candidate)
    ranked = sorted(first.values(), key=lambda candidate: likely[candidate.full_precision])
    alike = [candidate.name for candidate in ranked if candidate.full_precision == ranked[0].full_precision]
    return alike[0], tuple(alike[1:])


def _collect(faults: list[str], prefix: str, step: Callable[[], Any]) -> Any:
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
        document = read(file.gateway)
        config_of(document)
    except ConfigFaults as exc:
        raise UsageError("\n".join(f"gateway: {line}" for line in exc.message.splitlines())) from exc
    found = located(document.value, Path(file.gateway).absolute().parent)
    assert isinstance(found, dict)  # config_of accepts nothing else
    return found


def _model(file: SpecFile) -> dict[str, Any]:
    """The model's part of a gateway configuration, backends included if a gateway file names some."""
    if isinstance(file.model, dict):
        try:
            parse_config({"models": [{**file.model, "backends": [{"kind": "synthetic"}]}]}, source="model")
        except ConfigError as exc:
            raise UsageError(exc.message.replace("models[0].", "")) from exc
        return file.model
    if isinstance(file.launcher, UrlLauncher) and file.gateway is None:
        return {"name": file.model}
    models: list[dict[str, Any]] = _gateway_file(file)["models"]
    for model in models:
        if model["name"] == file.model:
            return model
    raise UsageError(f"model: {file.gateway} has no model {file.model!r}, it has {', '.join(m['name'] for m in models)}")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a candidate runs, and for how much."""

    instance_type: str
    price: Price
    basis: str
    cpus: tuple[int, ...]


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
        """Raises: UsageError, with one line per fault."""
        if isinstance(self.file.launcher, UrlLauncher):
            return self._running()
        if self.wanted.url is not None:
            raise UsageError(f"{self.at}: url: only for `launcher: {{kind: url}}`")
        faults: list[str] = []
        backend = _collect(faults, "", self._backend)
        places = [_collect(faults, "", partial(self._place, name)) for name in self.wanted.instances or ("",)]
        # Settings are checked even where no place is well, on one of no name.
        sound = [place for place in places if place is not None] or [
            _Place("", Price(usd_per_hour=1, source="-", date=None), "own", ())
        ]
        found: list[Candidate] = []
        for place, values in itertools.product(sound, itertools.product(*self.wanted.settings.values())):
            settings = dict(zip(self.wanted.settings, values, strict=True))
            if backend is not None:
                found.append(_collect(faults, "", partial(self._candidate, place, backend, settings)))
        if faults:
            raise UsageError("\n".join(dict.fromkeys(faults)))
        return found

    def _place(self, instance_type: str) -> "_Place":
        price, basis = self._price(instance_type)
        return _Place(instance_type, price, basis, self._cpus(instance_type))

    def _running(self) -> list[Candidate]:
        faults: list[str] = []
        if self.wanted.url is None:
            faults.append(f"{self.at}: url: missing, expected the address of the running server")
        if len(self.wanted.instances) > 1 or self.wanted.settings or self.wanted.backend:
            faults.append(f"{self.at}: a running server has one instance type, and its backend and settings are its own")
        price, basis, instance_type = None, self.file.price, ""
        if self.wanted.instances or self.wanted.usd_per_hour is not None:
            instance_type = self.wanted.instances[0] if self.wanted.instances else ""
            price, basis = _collect(faults, "", partial(self._price, instance_type)) or (None, basis)
        if faults or self.wanted.url is None:
            raise UsageError("\n".join(faults))
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
                numerics=self.wanted.url.rstrip("/"),
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

    def _candidate(self, place: "_Place", backend: dict[str, Any], settings: dict[str, Any]) -> Candidate:
        batching = {key: value for key, value in settings.items() if key in BATCHING_SETTINGS}
        own = {key: value for key, value in settings.items() if key not in BATCHING_SETTINGS}
        document = {
            "models": [
                {
                    **self.model,
                    "slo": {"p99_ms": self.slo.tightest_ms or 1000.0},
                    "batching": {**self.model.get("batching", {}), **batching},
                    "backends": [{**backend, **own, "usd_per_hour": place.price.usd_per_hour}],
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
        _collect(faults, "", partial(self._check_device, place.instance_type, options.get("device", "cpu")))
        _collect(faults, "", partial(self._check_file, place.instance_type, options.get("model")))
        if faults:
            raise UsageError("\n".join(faults))
        label = ", ".join(f"{key} {value}" for key, value in settings.items())
        group = {key: value for key, value in settings.items() if key not in ("sessions", *BATCHING_SETTINGS)}
        return Candidate(
            name=" ".join(filter(None, (place.instance_type, parsed.label, f"({label})" if label else ""))),
            group=f"{place.instance_type} {parsed.label} {group} {place.cpus}",
            instance_type=place.instance_type,
            price=place.price,
            basis=place.basis,
            backend=parsed.label,
            settings=settings,
            sessions=parsed.sessions,
            max_rows=model.batching.max_rows or model.max_rows or 1,
            document=document,
            cpus=place.cpus,
            max_count=self.wanted.max_count,
            numerics=numerics_of(parsed.kind, options),
            full_precision=full_precision(parsed.kind, options),
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
            raise UsageError(f"{self.at}: backend: no file {model!r}; paths count from the spec's folder")
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
    crowded = [c for c in candidates if c.cpus and c.sessions * int(c.settings.get("threads", 1)) > len(c.cpus)]
    if crowded:
        crowd = f"{len(crowded)} of {len(candidates)} candidates have more threads of work than cores"
        found.append(f"{crowd}: with fewer `sessions` or `threads` they may be faster")
    return found
