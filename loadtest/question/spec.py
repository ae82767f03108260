"""The file behind `loadtest recommend SPEC`: a YAML that names the model, the SLO, the candidates and the budget.

Everything that can be known to be wrong is found here, with one line per fault, before anything is started.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from zipfile import is_zipfile

from gateway.config import config_of, located, parse_config
from gateway.deploying.preflight import BUCKET
from gateway.documents.faults import ConfigFaults, shown
from gateway.documents.reader import Document, read
from gateway.errors import ConfigError
from gateway.instances.facts import PriceBasis
from loadtest.errors import UsageError
from loadtest.load.payload_limits import check_size, range_of, values_of
from loadtest.load.payloads import check_joined, distinct, read_requests
from loadtest.measuring.asked import check_limits
from loadtest.prices.catalogue import Catalogue
from loadtest.question.candidates import CandidateSetup, Expansion, collect, oddities, told_apart
from loadtest.question.preflight import Refusals
from loadtest.question.spec_file import (
    AnyLauncher,
    BudgetSpec,
    Ec2Launcher,
    PayloadSpec,
    SageMakerLauncher,
    SpecFile,
    UrlLauncher,
    check_option,
    read_file,
    validated,
)
from loadtest.results import SloSpec
from loadtest.search.events import EXPECTED
from loadtest.search.standing import Name, Sentence
from loadtest.verdict.agreement import LEAST_INPUTS, compare_of

MIN_AGREEMENT: Final = 0.999  # of a cosine: a model in bf16 keeps 0.9999 and more, one quantised to int8 may have 0.94
UNSURE: Final = "no candidate is known to compute in full precision: answers are compared with those of the first, "
_LENGTH: Final = PayloadSpec.model_fields["length"].default
_ANY_SLO: Final = SloSpec.parse("p99<1s")
_AGREEMENT: Final = re.compile(r"agreement\s*>=?\s*(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class AgreementTest:
    """Which requests the candidates' answers are compared on, and how: see `loadtest.verdict.agreement`.

    reference: a candidate's name, or events.EXPECTED. stand_ins: candidates that may take its place. unsure: nobody has named
    it, and none is known to compute in full precision.
    """

    files: tuple[str, ...]
    statistics: dict[str, str]
    batched: bool
    reference: str
    stand_ins: tuple[str, ...]
    unsure: bool = False


@dataclass(frozen=True, slots=True)
class RefusedCandidate:
    """One that is not started, as it cannot work. reasons: a sentence each."""

    name: str
    instance_type: str
    backend: str
    settings: dict[str, Any]
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SearchSpec:
    """A checked spec. odd: what is odd about it but not wrong, of no single candidate. refused: were among its candidates.

    min_agreement: what a candidate's answers must reach; None: they may be anything. agreement_test: None, if none is needed.
    pad: as in LoadSpec: how requests of different lengths are joined. reads: files and folders that it names, by its keys.
    """

    source: str
    model: str
    slo: SloSpec
    target_rps: float | None
    basis: PriceBasis
    launcher: AnyLauncher
    payload: PayloadSpec
    candidates: tuple[CandidateSetup, ...]
    budget: BudgetSpec
    seed: int
    odd: tuple[str, ...]
    min_agreement: float | None = MIN_AGREEMENT
    agreement_test: AgreementTest | None = None
    pad: tuple[str, ...] = ()
    refused: tuple[RefusedCandidate, ...] = ()
    reads: tuple[tuple[str, str], ...] = ()

    @property
    def warnings(self) -> tuple[Sentence, ...]:
        """All that is odd about it."""
        test = self.agreement_test
        unsure = [(UNSURE, Name(test.reference))] if test is not None and test.unsure else []
        return (*((each,) for each in self.odd), *unsure)


def without(spec: SearchSpec, refusals: Refusals) -> SearchSpec:
    """The spec without candidates that cannot work. Raises: UsageError, if nobody is left, or none that others' answers are
    compared with.
    """
    kept = tuple(candidate for candidate in spec.candidates if not refusals.get(candidate.name))
    refused = tuple(
        RefusedCandidate(c.name, c.instance_type, c.backend, c.settings, tuple(map(str, refusals[c.name])))
        for c in spec.candidates
        if c not in kept
    )
    if not kept:
        lines = (f"{spec.source}: {c.name}: {reason}" for c in refused for reason in c.reasons)
        raise UsageError("\n".join((f"{spec.source}: candidates: none can work where it is to be launched", *lines)))
    test = spec.agreement_test
    if test is not None and test.reference != EXPECTED:
        names = {candidate.name for candidate in kept}
        able = [name for name in (test.reference, *test.stand_ins) if name in names]
        if not able:
            raise UsageError(f"{spec.source}: agreement.reference: {test.reference!r} cannot work: name another")
        test = replace(test, reference=able[0], stand_ins=tuple(able[1:]))
    return replace(spec, candidates=kept, refused=refused, agreement_test=test)


def read_search_spec(path: Path, catalogue: Catalogue) -> SearchSpec:
    """Read and check a file, whose relative paths count from its folder. Raises: UsageError, with one line per fault."""
    try:
        document = read_file(path)
    except ConfigFaults as exc:
        raise UsageError(exc.message) from exc
    return _spec_of(document, catalogue)


def limited(spec: SearchSpec, *, minutes: float | None, usd: float | None, target_rps: float | None) -> SearchSpec:
    """The spec with what the command line says instead. Raises: UsageError."""
    check_option("--budget-minutes", minutes, BudgetSpec, "minutes")
    check_option("--max-usd", usd, BudgetSpec, "usd")
    check_option("--target-rps", target_rps, SpecFile, "target_rps")
    budget = spec.budget.model_copy(update={k: v for k, v in (("minutes", minutes), ("usd", usd)) if v is not None})
    return replace(spec, budget=budget, target_rps=target_rps or spec.target_rps)


def parse_search_spec(document: object, catalogue: Catalogue, *, source: str) -> SearchSpec:
    """Check a parsed document. source: what messages call it. Raises: UsageError, with one line per fault."""
    return _spec_of(Document(source, document), catalogue)


def _spec_of(document: Document, catalogue: Catalogue) -> SearchSpec:
    source = document.source
    if not isinstance(document.value, dict):
        raise UsageError(f"{source}: expected a mapping with `model`, `slo`, `launcher` and `candidates`")
    faults = list(map(str, document.faults))
    file, bad, incomplete = validated(document, faults)
    slo, min_agreement = (None, None) if "slo" in bad else _slo(file.slo, source, faults)
    model = None
    if not bad & {"model", "gateway"} and not ("launcher" in bad and isinstance(file.model, str) and file.gateway is None):
        model = collect(faults, source, partial(_model, file))
    candidates: list[CandidateSetup] = []
    doors = collect(faults, source, partial(_doors, file)) or {}
    whole = model is not None and "candidates" not in bad and not incomplete
    if model is not None and "candidates" not in bad:
        for index, wanted in enumerate(file.candidates):
            # An SLO at fault is told already: any other does to check the candidates.
            at = f"{source}: candidates[{index}]"
            expand = Expansion(file, wanted, model, slo or _ANY_SLO, catalogue, at, doors)
            own: list[str] = []
            candidates += collect(own, "", expand.candidates) or []
            faults += [line for line in own if not _follows(line, index in incomplete, "launcher" in bad)]
            whole = whole and not own
    candidates = told_apart(candidates)
    names = [candidate.name for candidate in candidates]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        faults.append(f"{source}: candidates: listed twice: {', '.join(twice)}")
    if "payload" not in bad:
        faults += [f"{source}: {line}" for line in _of_payload(file.payload, (model or {}).get("inputs") or ())]
    if isinstance(file.launcher, UrlLauncher) and file.payload.protocol == "grpc":
        faults.append(f"{source}: payload.protocol: grpc: servers that run already are asked over REST")
    if isinstance(file.launcher, SageMakerLauncher):
        faults += [f"{source}: {line}" for line in _of_endpoints(file, model)]
    if isinstance(file.launcher, Ec2Launcher):
        faults += [f"{source}: {line}" for line in _of_machines(file, file.launcher, catalogue)]
    agreement_test: AgreementTest | None = None
    doubts: list[str] = []
    if model is not None and not bad & {"slo", "payload", "agreement"}:
        batched = model.get("max_rows") != 0
        agreement_test, doubts = _agreement_test(
            file, candidates, source, faults, whole=whole, batched=batched, min_agreement=min_agreement
        )
    if faults or slo is None or model is None:
        raise UsageError("\n".join(dict.fromkeys(faults)))
    return SearchSpec(
        source=source,
        model=model["name"],
        slo=slo,
        target_rps=file.target_rps,
        basis=file.basis,
        launcher=file.launcher,
        payload=file.payload,
        candidates=tuple(candidates),
        budget=file.budget,
        seed=file.seed,
        odd=(*oddities(file, candidates, catalogue, tuple(doors)), *doubts),
        min_agreement=min_agreement,
        agreement_test=agreement_test,
        reads=tuple(_reads(file, doors)),
        pad=tuple(f"{name}={value:g}" for name, value in ((model.get("ragged") or {}).get("pad") or {}).items()),
    )


def _reads(file: SpecFile, doors: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if file.gateway is not None:
        yield "gateway", file.gateway
    yield from (("gateway", path) for part in doors.values() for path in part.values() if str(path).startswith("/"))
    yield from (("payload.files", path) for path in file.payload.files)
    yield from (("agreement.requests", path) for path in file.agreement.requests)
    if isinstance(file.launcher, Ec2Launcher):
        yield from (("launcher.wheel", file.launcher.wheel), ("launcher.locks", file.launcher.locks))


def _of_payload(payload: PayloadSpec, inputs: Sequence[dict[str, Any]]) -> list[str]:
    """What requests cannot be made of. inputs: that the model declares."""
    faults: list[str] = []
    if payload.files:
        unused = {"values": list(payload.values), "length": payload.length if payload.length != _LENGTH else ""}
        why = "requests of payload.files are sent as they are: leave one of them out"
        return [f"payload.{key}: {shown(value)}: {why}" for key, value in unused.items() if value]
    length = collect(faults, "", partial(range_of, "payload.length:", payload.length))
    collect(faults, "", partial(values_of, "payload.values:", payload.values, inputs))
    if length is not None:
        collect(faults, "", partial(check_size, "payload.rows:", payload.rows, length[1], inputs))
    return faults


def _of_endpoints(file: SpecFile, model: dict[str, Any] | None) -> Iterator[str]:
    """What no endpoint of SageMaker can do, whichever candidate it is of."""
    if file.payload.protocol == "grpc":
        yield "payload.protocol: grpc: an endpoint is asked over HTTP: expected rest-json or rest-binary"
    if model is not None and not file.payload.files and not model.get("inputs"):
        yield "payload.files: missing: an endpoint does not tell what its model takes: name some, or declare its `inputs`"
    if file.price not in (None, "sagemaker"):
        yield f"price: {file.price}: an endpoint costs SageMaker's price: expected sagemaker"
    wanted = file.launcher
    assert isinstance(wanted, SageMakerLauncher)
    role = r"arn:aws[a-z-]*:iam::\d{12}:role/.+", "a role, such as arn:aws:iam::123456789012:role/NAME"
    yield from _formed({"role_arn": (wanted.role_arn, *role), **_anywhere(wanted)})
    if not wanted.images:
        such = "{uri: 123456789012.dkr.ecr.us-east-1.amazonaws.com/gateway:cpu}"
        yield f"launcher.images: missing, expected at least one, such as {such}"
    if bool(wanted.subnets) != bool(wanted.security_groups):
        yield "launcher: expected subnets and security_groups, or neither: SageMaker takes them together"


def _of_machines(file: SpecFile, wanted: Ec2Launcher, catalogue: Catalogue) -> Iterator[str]:
    """What no machine of EC2 can do, whichever candidate it is of."""
    if file.price not in (None, basis := "spot" if wanted.spot else "ec2"):
        yield f"price: {file.price}: machines{' on spot' * wanted.spot} cost EC2's price: expected {basis}"
    subnet = r"subnet-[0-9a-f]{8,17}", "subnet-ID, with a way to S3, PyPI and Ubuntu's archive"
    profile = r"[\w+=,.@-]{0,128}", "the name of an instance profile"
    yield from _formed(
        {"subnet": (wanted.subnet, *subnet), "instance_profile": (wanted.instance_profile, *profile), **_anywhere(wanted)}
    )
    wheel = Path(wanted.wheel)
    if not re.fullmatch(r"serving_gateway-[\w.]+-py3-none-any\.whl", wheel.name) or not is_zipfile(wheel):
        expected = "the gateway's wheel: `pip wheel --no-deps .` in its source makes it"
        yield f"launcher.wheel: {f'{wanted.wheel!r}: ' if wanted.wheel else 'missing, '}expected {expected}"
    missing = [name for name in ("cpu", "aws") if not (Path(wanted.locks) / f"requirements-{name}.lock").is_file()]
    if not wanted.locks or missing:
        found = f"{wanted.locks!r}: no requirements-{missing[0]}.lock: " if wanted.locks else "missing, "
        yield f"launcher.locks: {found}expected the folder docker of the gateway's source"
    if wanted.generator not in catalogue.instances:
        yield f"launcher.generator: {wanted.generator!r}: expected a type such as c7i.xlarge: `loadtest prices list` shows all"
    elif "ec2" not in catalogue.instance(wanted.generator).prices:
        yield f"launcher.generator: {wanted.generator!r}: no price on demand is known, expected a type that has one"


def _anywhere(wanted: SageMakerLauncher | Ec2Launcher) -> dict[str, tuple[str, str, str]]:
    """Keys that both have: their values, their form, and what that is."""
    return {
        "bucket": (wanted.bucket, BUCKET, "the name of a bucket of S3 for packages"),
        "region": (wanted.region, r"[a-z]{2,}(-[a-z]+)+-\d+", "a region of AWS, such as us-east-1"),
    }


def _formed(keys: dict[str, tuple[str, str, str]]) -> Iterator[str]:
    for key, (value, pattern, expected) in keys.items():
        if not re.fullmatch(pattern, value):
            yield f"launcher.{key}: {f'{value!r}: ' if value else 'missing, '}expected {expected}"


def _follows(line: str, incomplete: bool, no_launcher: bool) -> bool:
    """Whether a fault only follows from one that is told already: what is missing may be what was left out for it."""
    return (incomplete and ("missing, expected" in line or "no price: " in line)) or (no_launcher and "launcher" in line)


def _slo(value: object, source: str, faults: list[str]) -> tuple[SloSpec | None, float | None]:
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
        collect(faults, source, partial(_objectives, part))
    slo = collect(faults, source, partial(_objectives, whole)) if len(faults) == before else None
    if slo is not None and slo.tightest_ms is None:
        faults.append(f"{source}: slo: a recommendation needs a latency objective such as p99_ms: 50")
    return slo, min_agreement


def _objectives(value: object) -> SloSpec:
    slo = SloSpec.from_yaml(value)
    check_limits(slo)
    return slo


def _agreement_test(
    file: SpecFile,
    candidates: Sequence[CandidateSetup],
    source: str,
    faults: list[str],
    *,
    whole: bool,
    batched: bool,
    min_agreement: float | None,
) -> tuple[AgreementTest | None, list[str]]:
    """On what the candidates are compared, None if nothing is to be; and what is odd about it.

    whole: whether these are all candidates: else the name of a reference cannot be judged yet.
    """
    before = len(faults)
    wanted = file.agreement
    statistics = {"": wanted.statistic} if isinstance(wanted.statistic, str) else wanted.statistic
    for name in statistics.values():
        collect(faults, f"{source}: agreement.statistic", partial(compare_of, name))
    sent = collect(faults, source, partial(read_requests, file.payload.files)) if file.payload.files else []
    collect(faults, source, partial(check_joined, "payload.rows:", file.payload.rows, sent or ()))
    if batched and (odd := next((request for request in sent or () if request.rows != 1), None)):
        faults.append(
            f"{source}: payload.files: {odd.source}: expected requests of one row, got {odd.rows}: payload.rows joins them"
        )
    if wanted.requests:
        asked = collect(faults, source, partial(read_requests, wanted.requests))
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
    chosen = collect(faults, source, partial(_reference, wanted.reference if whole else None, candidates))
    kinds = len({candidate.numerics for candidate in candidates})
    if chosen is None or len(faults) > before or (kinds < 2 and not expected):
        return None, []
    why = f"{kinds} kinds of candidates compute differently (precision, file or backend)"
    if expected:
        why = "answers are to be compared with the expected ones"
    if len(requests) >= LEAST_INPUTS:
        if expected:
            return AgreementTest(files, statistics, batched, EXPECTED, ()), []
        reference, stand_ins = chosen
        named = wanted.reference is not None or any(candidate.full_precision for candidate in candidates)
        return AgreementTest(files, statistics, batched, reference, stand_ins, unsure=not named), []
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


def _reference(wanted: str | None, candidates: Sequence[CandidateSetup]) -> tuple[str, tuple[str, ...]] | None:
    """The candidate whose answers count as right, and who may stand in for it."""
    if not candidates:
        return None
    if wanted is not None:
        for names in ([c.name for c in candidates], [c.backend for c in candidates], [c.called for c in candidates]):
            if wanted in names:
                return candidates[names.index(wanted)].name, ()
        known = list(dict.fromkeys(name for c in candidates for name in (c.backend, c.name)))
        near = difflib.get_close_matches(wanted, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f": {', '.join(known)}"
        raise UsageError(f"agreement.reference: {wanted!r}: expected the name of a candidate or of its backend{hint}")
    likely = {True: 0, None: 1, False: 2}
    first: dict[str, CandidateSetup] = {}
    for candidate in candidates:
        first.setdefault(candidate.numerics, candidate)
    ranked = sorted(first.values(), key=lambda candidate: likely[candidate.full_precision])
    alike = [candidate.name for candidate in ranked if candidate.full_precision == ranked[0].full_precision]
    return alike[0], tuple(alike[1:])


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


def _doors(file: SpecFile) -> dict[str, Any]:
    """What locks the doors of the gateway that is named, as its candidates' are: they are measured, and deployed, with it."""
    if file.gateway is None or isinstance(file.launcher, UrlLauncher):
        return {}
    server = _gateway_file(file).get("server") or {}
    return {part: server[part] for part in ("tls", "access") if server.get(part)}


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
