"""A factory's nn.Module to an AOTInductor package (.pt2): compiled code for this machine's CPU, with open rows and lengths."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backends.aot_inductor import Compiled, HeldPackage, compiled_for, named_sizes, write_sizes
from backends.base import NO_OPTIONS, LoadFailed, ModelSpec, Tensors, example_inputs
from backends.likeness import Likeness
from backends.module_to_build import ModuleToBuild, arguments, check_declared, exporting, module_to_build, random_inputs
from backends.size_expressions import condition, keeps_few_out
from backends.torch_choices import own_choices
from backends.torch_guards import guards

TOLERANCE = 1e-4  # between the module and its package, element by element
_SMALL = 9  # above the sizes that are tried
_DRAWS = 3  # of numbers, for each beside ones: of these, what is read in a wrong place is as right


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
    opset: of no meaning here. integers_below: by integer input, above the values to try small sizes with; else 0 and 1.
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
        with torch.inference_mode(), own_choices():
            with exporting(artifact, source):
                program = torch.export.export(module, example, dynamic_shapes=(open_sizes,))
            torch._inductor.aoti_compile_and_package(program, package_path=str(unverified))
        compiled = compiled_for(unverified)
        if compiled is not None:
            trial = _SizeTrial(module, unverified, declared, compiled, guards(str(artifact), program), integers_below)
            lengths = lengths or trial.lengths()
            write_sizes(unverified, *trial.held(lengths))
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


class _SizeTrial:
    """What holds of the sizes that a package takes, found by running it on small ones beside its module."""

    def __init__(
        self,
        module: ModuleToBuild,
        package: Path,
        declared: ModelSpec,
        compiled: Compiled,
        found: Sequence[str],
        integers_below: Mapping[str, int],
    ) -> None:
        """found: the conditions that PyTorch made of sizes."""
        from backends.torch import CpuSession, load_callable

        held, *_ = load_callable(torch, str(package), {}, torch.device("cpu"), "fp32", [each.name for each in declared.inputs])
        assert isinstance(held, HeldPackage)
        self._session = CpuSession(declared, held.package, False)
        self._module, self._declared, self._compiled, self._integers_below = module, declared, compiled, integers_below
        places = named_sizes(each.sizes for each in compiled.inputs)
        self._guards = {guard: condition(guard, places) for guard in found}
        self._axes = [axes for axes in compiled.equal_axes() if not (declared.max_rows and any(axis == 0 for _, axis in axes))]

    def lengths(self) -> tuple[int, int]:
        """To verify with: 5 and 16, or what is nearest to them of sizes that are open, and no rows."""
        first = 1 if self._declared.max_rows else 0
        limits = [limit for each in self._compiled.inputs for axis, limit in each.limits.items() if axis >= first]
        least = max((least for least, _ in limits), default=0)
        most = min((most for _, most in limits if most), default=max(16, least) + 16)
        fit = [
            length
            for length in range(least, min(most, max(16, least) + 16) + 1)
            if all(map(keeps_few_out, self._broken(self._inputs(1, length, {}))))
        ] or [least]
        return min(fit, key=lambda length: abs(length - 5)), min(fit, key=lambda length: abs(length - 16))

    def held(self, lengths: Sequence[int]) -> tuple[dict[tuple[int, int], list[int]], list[str]]:
        """Open sizes of 1 that are right, by input and axis, and the conditions without those that only keep out what is right.

        PyTorch takes every open size for 2 or more, and keeps 1 apart from others. Either goes only where each time that it was
        broken, alone or with others, the package gave what the module does.
        """
        right: dict[int | str, list[bool]] = defaultdict(list)
        every, rows = range(len(self._axes)), {1, min(3, self._declared.max_rows or 3)}

        def attempt(chosen: Iterable[int], size: int, length: int = lengths[0]) -> None:
            sizes = {place: size for index in chosen for place in self._axes[index]}
            small = [index for index in chosen if size < self._least(index)]
            if any(self._least(index) > 2 for index in small):  # by which the module may take another way
                return
            for count in rows:
                broken = self._broken(self._inputs(count, length, sizes))
                if (broken or small) and all(map(keeps_few_out, broken)):
                    same = self._same(count, length, sizes)
                    keys: list[int | str] = [*small, *broken]
                    for key in keys:
                        right[key].append(same)

        for length in lengths:
            attempt((), 0, length)
        for size in range(1, min(_SMALL, lengths[0])):
            for index in every:
                attempt((index,), size)
            attempt(every if size > 1 else [index for index in every if right[index] and all(right[index])], size)
        sizes = {place: [1] for index in every if right[index] and all(right[index]) for place in self._axes[index]}
        return sizes, [guard for guard in self._guards if not (right[guard] and all(right[guard]))]

    def _least(self, index: int) -> int:
        return max(self._compiled.inputs[of].limits[axis][0] for of, axis in self._axes[index])

    def _broken(self, inputs: Tensors) -> list[str]:
        sizes = [size for tensor in self._declared.inputs for size in inputs[tensor.name].shape]
        return [guard for guard, holds in self._guards.items() if not holds(sizes)]

    def _inputs(
        self, rows: int, length: int, sizes: Mapping[tuple[int, int], int], random: np.random.Generator | None = None
    ) -> Tensors:
        """sizes: by input and axis, no more than length. random: None: ones."""
        inputs = example_inputs(self._declared, rows, length)
        if random is not None:
            inputs = random_inputs(self._declared, rows, length, self._integers_below, random)
        for (index, axis), size in sizes.items():
            name = self._declared.inputs[index].name
            inputs[name] = inputs[name][(slice(None),) * axis + (slice(size),)]
        return inputs

    def _same(self, rows: int, length: int, sizes: Mapping[tuple[int, int], int]) -> bool:
        like, random = Likeness(tensor.name for tensor in self._declared.outputs), np.random.default_rng(0)
        try:
            for draw in (None, *[random] * _DRAWS):
                self._module.compare(self._session, self._inputs(rows, length, sizes, draw), like)
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
