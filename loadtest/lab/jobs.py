"""What a load generator elsewhere is asked, and what it answers, as JSON: jobs in, `Loaded` and the like out."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import numpy as np

from backends.base import Tensors
from backends.datatypes import datatype_of
from gateway.errors import GatewayError
from gateway.wire.tensors import tensor_from_bytes, tensor_to_bytes
from loadtest.errors import Interrupted, LoadtestError, TargetError, UsageError
from loadtest.lab.generating import AnswersJob, Generating, GeneratorLost, Loaded, LoadJob, ProfileFound, ProfileJob
from loadtest.lab.profiling import ProfileFailed
from loadtest.measuring.progress import Progress
from loadtest.results import Protocol


@dataclass(frozen=True, slots=True)
class LimitJob:
    """Find out which rate this generator can offer honestly."""

    protocol: Protocol


Job = LoadJob | ProfileJob | AnswersJob | LimitJob
_JOBS: Final[Mapping[str, type[Job]]] = {"load": LoadJob, "profile": ProfileJob, "answers": AnswersJob, "limit": LimitJob}
_NAMES: Final = {kind: name for name, kind in _JOBS.items()}
_ERRORS: Final[Mapping[str, type[Exception]]] = {
    each.__name__: each for each in (UsageError, TargetError, Interrupted, ProfileFailed, LoadtestError)
}


@dataclass(frozen=True, slots=True)
class Order:
    """A job on its way. most_s: it is ended after that. files: what the job calls a file or a folder -> keys in the bucket.

    tagging: of all that comes back, as S3 takes it.
    """

    job: Job
    most_s: float
    files: Mapping[str, tuple[str, ...]]
    tagging: str = ""


def files_of(job: Job) -> tuple[str, ...]:
    """Files and folders that it names, as its maker has them."""
    named = () if isinstance(job, LimitJob) else job.spec.payloads
    return tuple(dict.fromkeys((*named, *(job.files if isinstance(job, AnswersJob) else ()))))


def moved(job: Job, places: Mapping[str, Sequence[str]]) -> Job:
    """The same with files that stand elsewhere."""

    def there(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(place for name in names for place in places[name])

    if isinstance(job, LimitJob):
        return job
    job = replace(job, spec=replace(job.spec, payloads=there(job.spec.payloads)))
    return replace(job, files=there(job.files)) if isinstance(job, AnswersJob) else job


def written(order: Order) -> bytes:
    return msgspec.json.encode(
        {
            "kind": _NAMES[type(order.job)],
            "job": order.job,
            "most_s": order.most_s,
            "files": order.files,
            "tagging": order.tagging,
        }
    )


def read(text: bytes) -> Order:
    """Raises: UsageError."""
    try:
        told = msgspec.json.decode(text)
        job: Job = msgspec.convert(told["job"], _JOBS[told["kind"]], str_keys=True)
        files = {str(name): tuple(map(str, keys)) for name, keys in told["files"].items()}
        return Order(job, float(told["most_s"]), files, str(told["tagging"]))
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, AttributeError) as exc:
        raise UsageError(f"no job for a load generator: {exc}") from exc


# What comes back.


def value(text: bytes, job: Job) -> Any:
    """What the job came to. Raises: what the job raised; GeneratorLost, if it says nothing."""
    try:
        told = msgspec.json.decode(text)
        if "error" in told:
            raise _ERRORS.get(told["error"], GeneratorLost)(told["message"])
        if isinstance(job, LoadJob):
            return msgspec.convert(told["value"], Loaded, str_keys=True)
        if isinstance(job, ProfileJob):
            return msgspec.convert(told["value"], ProfileFound, str_keys=True)
        if isinstance(job, AnswersJob):
            return [each and {name: _tensor(name, kept) for name, kept in each.items()} for each in told["value"]]
        return float(told["value"])
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, AttributeError, GatewayError) as exc:
        raise GeneratorLost(f"the load generator's answer cannot be read: {exc}") from exc


def told_value(found: object) -> bytes:
    if isinstance(found, list):
        found = [None if each is None else {name: _kept(array) for name, array in each.items()} for each in found]
    return msgspec.json.encode({"value": found})


def told_error(exc: Exception) -> bytes:
    name = type(exc).__name__ if type(exc).__name__ in _ERRORS else "LoadtestError"
    return msgspec.json.encode({"error": name, "message": str(exc) or type(exc).__name__})


def told_lost(message: str) -> bytes:
    """That the generator itself failed."""
    return msgspec.json.encode({"error": GeneratorLost.__name__, "message": message})


def progress(text: bytes) -> Progress | None:
    """None: it says nothing yet."""
    try:
        return msgspec.json.decode(text, type=Progress)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _kept(array: np.ndarray) -> tuple[str, tuple[int, ...], str]:
    return datatype_of(array), array.shape, base64.b64encode(bytes(tensor_to_bytes(array))).decode()


def _tensor(name: str, kept: Sequence[Any]) -> np.ndarray:
    datatype, shape, text = kept
    return tensor_from_bytes(name, datatype, shape, base64.b64decode(text))


async def done(job: Job, generating: Generating, **options: Any) -> Any:
    """Do it. options: of `Generating.load`. Raises: as that does."""
    if isinstance(job, LoadJob):
        return await generating.load(job, **options)
    if isinstance(job, ProfileJob):
        return await generating.profile(job)
    if isinstance(job, AnswersJob):
        answers: list[Tensors | None] = await generating.answers(job)
        return answers
    return await generating.limit_rps(job.protocol)
