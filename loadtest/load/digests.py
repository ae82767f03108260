"""What a run sends, as digests: equal for the same, whatever its files are called. None tells what may be a secret."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from loadtest.errors import UsageError
from loadtest.load.patterns import read_trace, traces
from loadtest.load.payload_limits import shape_of
from loadtest.load.payloads import paths_of
from loadtest.results import LoadSpec

# Headers whose values count. Of others a digest would let a short key be guessed.
_NO_SECRETS: Final = frozenset({
    "accept", "accept-encoding", "content-encoding", "content-type",
    "x-amzn-sagemaker-target-model", "x-amzn-sagemaker-target-variant",
})  # fmt: skip


def digests_of(spec: LoadSpec, inputs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """As in `RunResult`. inputs: of the model's metadata, where requests are made of them. Raises: UsageError."""
    payloads = paths_of(spec.payloads) if spec.payloads else []
    replayed = traces(spec.pattern)
    headers = sorted((name.lower(), value if name.lower() in _NO_SECRETS else "") for name, value in spec.headers)
    found = {"headers": _digest(headers)}
    if not payloads:
        found["requests"] = _digest([[str(each["name"]), str(each["datatype"]), shape_of(each, -1, -1)] for each in inputs])
    for kind, files in (("requests", payloads), ("traces", [Path(each["file"]) for each in replayed])):
        if files and all(file.is_file() for file in files):  # a pipe cannot be read again
            found[kind] = _digest([(file.suffix, digest_of_file(file)) for file in files])
    if "traces" in found:
        found["arrivals"] = _digest([_microseconds(read_trace(each["file"], each.get("column"))) for each in replayed])
    return found


def digests_of_files(names: Iterable[str]) -> list[str]:
    """Of each of these files, and of those in folders. Raises: UsageError."""
    return [digest_of_file(path) for path in paths_of(names)] if names else []


def digest_of_file(path: Path) -> str:
    """SHA-256 in hexadecimal. Raises: UsageError."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        raise UsageError(f"{path}: cannot be read: {exc.strerror}") from exc


def _microseconds(times_s: np.ndarray) -> str:
    """As a digest. Of a date, seconds since 1970 have no digits beyond microseconds."""
    return hashlib.sha256(np.rint(times_s * 1e6).astype("<i8").tobytes()).hexdigest()


def _digest(told: object) -> str:
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()
