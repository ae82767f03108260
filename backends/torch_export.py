"""A factory's nn.Module to an AOTInductor package (.pt2): compiled code for this machine's CPU, with open rows and lengths."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from backends.aot_inductor import Compiled, HeldPackage, compiled_for, write_verified
from backends.base import NO_OPTIONS, LoadFailed, ModelSpec, Session, example_inputs
from backends.likeness import Likeness
from backends.module_to_build import ModuleToBuild, arguments, check_declared, exporting, module_to_build
from backends.torch_unbounded import unbounded

TOLERANCE = 1e-4  # between the module and its package, element by element
_TRIED_BELOW = 9  # of the sizes below a least one


def build(
    artifact: Path,
    declared: ModelSpec,
    *,
    source: str,
    options: Mapping[str, Any],
    precision: str = "fp32",
    opset: int = 0,
    integers_below: Mapping[str, int] = NO_OPTIONS,
    lengths: tuple[int, ...] = (),
) -> str:
    """Compile, verify, and only then put the file in its place. Answers with one line for the operator.

    The package holds code for this CPU: build it on the kind of machine that will run it.
    opset, integers_below: of no meaning here.
    """
    if artifact.suffix != ".pt2":
        raise LoadFailed(f"{artifact}: an AOTInductor package ends with .pt2")
    if precision != "fp32":
        raise LoadFailed(f"{artifact}: precision {precision} is not built here, only fp32")
    check_declared(artifact, declared)
    rows, length = 3, 7  # sizes that differ, so that none is taken for a constant or for another
    module = module_to_build(artifact, declared, source, options, rows=rows, length=length)
    example = arguments(declared, example_inputs(declared, rows, length))
    open_sizes = tuple({axis: torch.export.Dim.AUTO for axis, size in enumerate(t.shape) if size < 0} for t in declared.inputs)
    artifact.parent.mkdir(parents=True, exist_ok=True)
    unverified = artifact.with_name(f"unverified-{artifact.name}")
    try:
        with torch.inference_mode(), unbounded():
            with exporting(artifact, source):
                program = torch.export.export(module, example, dynamic_shapes=(open_sizes,))
            torch._inductor.aoti_compile_and_package(program, package_path=str(unverified))
        compiled = compiled_for(unverified)
        lengths = lengths or _lengths(compiled, declared)
        if compiled and (smaller := _verified(module, unverified, declared, compiled, lengths[0])):
            write_verified(unverified, smaller)
            compiled = compiled_for(unverified)
        difference = _difference(module, unverified, declared, lengths)
        if not difference <= TOLERANCE:
            raise LoadFailed(f"{artifact}: the package differs from {source} by {difference:.2g}, more than {TOLERANCE:g}")
        unverified.replace(artifact)
    finally:
        unverified.unlink(missing_ok=True)
    bounds = compiled.bounds([tensor.name for tensor in declared.inputs], declared.max_rows > 0) if compiled else []
    only = f", only for inputs with {', '.join(bounds)}" if bounds else ""
    return f"{artifact}: AOTInductor from {source}, max abs difference {difference:.1e}{only}"


def _lengths(compiled: Compiled | None, declared: ModelSpec) -> tuple[int, int]:
    """To verify with: 5 and 16, or what is nearest to them of sizes that are open, and no rows."""
    first = 1 if declared.max_rows else 0
    inputs = compiled.inputs if compiled else ()
    limits = [limit for each in inputs for axis, limit in each.limits.items() if axis >= first]
    least = max((least for least, _ in limits), default=0)
    most = min((most for _, most in limits if most), default=max(16, least))
    return min(max(5, least), most), min(max(16, least), most)


def _verified(
    module: ModuleToBuild, package: Path, declared: ModelSpec, compiled: Compiled, length: int
) -> dict[tuple[int, int], list[int]]:
    """Open sizes below the least that PyTorch took them for, with which the package gives what the module does, too."""
    from backends.torch import CpuSession, load_callable

    held, *_ = load_callable(torch, str(package), {}, torch.device("cpu"), "fp32", [each.name for each in declared.inputs])
    assert isinstance(held, HeldPackage)
    session = CpuSession(declared, held.package, False)
    rows = min(3, declared.max_rows or 3)
    verified: dict[tuple[int, int], list[int]] = {}
    for axes in compiled.equal_axes():
        if declared.max_rows and any(axis == 0 for _, axis in axes):
            continue
        least = max(compiled.inputs[index].limits[axis][0] for index, axis in axes)
        sizes = [
            size
            for size in range(1, min(least, _TRIED_BELOW))
            if _same(module, session, declared, rows, length, dict.fromkeys(axes, size))
        ]
        verified |= dict.fromkeys(axes, sizes) if sizes else {}
    smallest = {axis: min(sizes) for axis, sizes in verified.items()}
    together = verified and all(_same(module, session, declared, each, length, smallest) for each in {1, rows})
    return verified if together else {}


def _same(
    module: ModuleToBuild, session: Session, declared: ModelSpec, rows: int, length: int, sizes: Mapping[tuple[int, int], int]
) -> bool:
    """Whether a package gives what the module gives, on inputs with these sizes, by input and axis."""
    inputs = example_inputs(declared, rows, length)
    for (index, axis), size in sizes.items():
        name = declared.inputs[index].name
        inputs[name] = inputs[name][(slice(None),) * axis + (slice(size),)]
    like = Likeness(tensor.name for tensor in declared.outputs)
    try:
        module.compare(session, inputs, like)
    except Exception:  # whatever the module raises, of a size that it does not take
        return False
    return like.difference <= TOLERANCE


def _difference(module: ModuleToBuild, package: Path, declared: ModelSpec, lengths: tuple[int, ...]) -> float:
    from backends.torch import load

    model = load(declared, model=str(package))
    session = model.open_session(0)
    like = Likeness(tensor.name for tensor in declared.outputs)
    for rows in {1, max(model.spec.max_rows, 1)}:
        for length in lengths:
            inputs = example_inputs(declared, rows, length)
            module.compare(session, inputs, like)
    return like.difference
