"""What is measured: whatever changes what a rate means that was measured of a candidate, as one digest."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from backends.artifacts import ONNX, identify
from backends.files_below import files_below
from backends.onnx_file import damage, weights_beside
from loadtest.load.digests import digest_of_file, digests_of_files
from loadtest.question.spec import SearchSpec

# Of a launcher: where and how long it starts candidates. Their cores are a candidate's own.
_WHEREABOUTS: Final = {
    *("cpus", "stands_for", "start_timeout_s", "parallel", "spot"),
    *("region", "bucket", "role_arn", "subnet", "subnets", "security_groups", "instance_profile"),
}


def subject_of(spec: SearchSpec) -> str:
    """Equal where the same requests are answered by the same, and judged alike: then what was measured counts for both.

    Raises: UsageError, if a file cannot be read.
    """
    test = spec.agreement_test
    told = {
        "slo": asdict(spec.slo),
        "model": spec.model,
        "payload": {**spec.payload.model_dump(mode="json"), "files": digests_of_files(spec.payload.files)},
        "pad": spec.pad,
        "launcher": spec.launcher.model_dump(mode="json", exclude=_WHEREABOUTS),
        "candidates": {candidate.name: [candidate.url, candidate.document] for candidate in spec.candidates},
        "files": {str(path): digest_of_file(path) for path in sorted({*named(spec)})},
        "agreement": [digests_of_files(test.files), test.statistics, test.batched] if test is not None else None,
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


def named(spec: SearchSpec) -> Iterator[Path]:
    """The files that the spec names: candidates' models, the code of some, and that of statistics."""
    if spec.agreement_test is not None:
        yield from (Path(name.rpartition(":")[0]) for name in spec.agreement_test.statistics.values() if ":" in name)
    for candidate in spec.candidates:
        for model in candidate.document.get("models", ()):
            for backend in model["backends"]:
                yield from _files(backend)


def _files(options: Mapping[str, Any]) -> Iterator[Path]:
    for key, value in options.items():
        if isinstance(value, str):
            path = Path(value.partition(".py:")[0] + ".py" if ".py:" in value else value)  # FILE.py:NAME is code
            if path.is_file():
                yield path
                if key == "model":
                    yield from _weights(path)
            elif key == "model" and options["kind"] != "triton" and path.is_dir():  # of Triton it is a name
                yield from files_below(path)


def _weights(path: Path) -> list[Path]:
    """Those that an ONNX file keeps beside it."""
    try:
        whole = identify(path) == ONNX and damage(path) is None
        return [path.parent / name for name in weights_beside(path)] if whole else []
    except OSError:  # `digest_of_file` tells
        return []
