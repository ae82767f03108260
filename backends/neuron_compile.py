"""A factory's nn.Module to a directory of Neuron artifacts, one for each rows × length."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.base import LoadFailed, ModelSpec, TensorSpec, example_inputs
from backends.module_to_build import arguments, check_declared, module_to_build
from backends.neuron import MANIFEST, check_padded, library, platform


def build(
    artifact: Path,
    declared: ModelSpec,
    *,
    source: str,
    options: Mapping[str, Any],
    row_sizes: tuple[int, ...],
    target: str,
    compiler_arguments: tuple[str, ...] = (),
    lengths: tuple[int, ...] = (),
) -> str:
    """Compile on any machine, for the device that `target` names. Answers with one line for the operator.

    lengths: of the inputs with an open second dimension; empty is right only where there is none.
    """
    module = library(target)
    check_padded(str(artifact), declared.inputs)
    ragged = any(-1 in tensor.shape[1:] for tensor in declared.inputs)
    if ragged and not lengths:
        raise LoadFailed(f"{artifact}: inputs of open length are compiled for fixed ones: set ragged.buckets of the model")
    check_declared(artifact, declared)
    network = module_to_build(artifact, declared, source, options, rows=row_sizes[0], length=lengths[0] if ragged else 0)
    artifacts: dict[str, str] = {}
    place = Path(os.path.realpath(artifact))  # a link stays one
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".neuron-") as private:
        folder = Path(private) / "new"
        folder.mkdir()  # which others may read, as far as the umask lets them
        for rows in row_sizes:
            for length in lengths if ragged else (0,):
                key = f"{rows}x{length}"
                example = arguments(declared, example_inputs(declared, rows, length))
                _trace(module, network, example, target, compiler_arguments).save(str(folder / f"{key}.pt"))
                artifacts[key] = f"{key}.pt"
        manifest = {
            "platform": platform(module),
            "target": target,
            "inputs": [_plain(tensor) for tensor in declared.inputs],
            "outputs": [_plain(tensor) for tensor in declared.outputs],
            "row_sizes": list(row_sizes),
            "lengths": list(lengths) if ragged else [0],
            "artifacts": artifacts,
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        if place.exists():
            place.rename(Path(private) / "old")
        folder.rename(place)
    return f"{artifact}: {len(artifacts)} artifacts of {source} for {platform(module)} {target}"


def _trace(module: Any, network: Any, example: tuple[Any, ...], target: str, arguments: tuple[str, ...]) -> Any:
    if target == "inf1":
        return module.trace(network, example, compiler_args=list(arguments))
    # cpu_backend compiles without a device, and then must be told for which.
    program = module.trace(network, example, compiler_args=["--target", target, *arguments], cpu_backend=True)
    module.lazy_load(program)  # onto no core before the session has said which
    return program


def _plain(tensor: TensorSpec) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
