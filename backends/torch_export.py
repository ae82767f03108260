"""A factory's nn.Module to an AOTInductor package (.pt2): compiled code for this machine's CPU, with open rows and lengths."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backends.aot_inductor import Compiled, HeldPackage, compiled_for, named_sizes, shown, write_sizes
from backends.base import NO_OPTIONS, LoadFailed, ModelSpec, example_inputs
from backends.likeness import Likeness
from backends.module_to_build import ModuleToBuild, arguments, check_declared, exporting, module_to_build, random_inputs
from backends.size_expressions import condition, drawn_sizes, keeps_few_out
from backends.torch_choices import own_choices
from backends.torch_guards import guards

TOLERANCE = 1e-4  # between the module and its package, element by element
_SMALL = 9  # above the small sizes that are tried, each
_LARGE = 2048  # the most that is tried of large ones, which take memory
_MOST_NUMBERS = 1 << 22  # in the inputs of one that is tried
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
            lengths = lengths or trial.lengths(artifact)
            write_sizes(unverified, *trial.held(lengths))
            compiled = compiled_for(unverified)
        difference = _difference(module, unverified, declared, lengths)
        if not difference <= TOLERANCE:
            raise LoadFailed(f"{artifact}: the package differs from {source} by {difference:.2g}, more than {TOLERANCE:g}")
        unverified.replace(artifact)
    finally:
        unverified.unlink(missing_ok=True)
    bounds = _bounds(compiled, declared) if compiled else []
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

    def lengths(self, artifact: Path) -> tuple[int, int]:
        """To verify with: 5 and 16, or what is nearest to them of sizes that are open, and no rows. Raises: LoadFailed."""
        first = 1 if self._declared.max_rows else 0
        limits = [limit for each in self._compiled.inputs for axis, limit in each.limits.items() if axis >= first]
        least = max((least for least, _ in limits), default=0)
        most = min((most for _, most in limits if most), default=max(least, _LARGE))
        broken = {length: self._broken(1, length, {}) for length in range(least, min(most, max(least, _LARGE)) + 1)}
        fit = [length for length, guards in broken.items() if all(map(keeps_few_out, guards))]
        if not fit:
            of = f"as {broken[least][0]}" if least in broken else f"from {least} to {most}"
            raise LoadFailed(
                f"{artifact}: PyTorch makes conditions of the open sizes that no length fulfils for all of them, {of}, where "
                "s{input}_{axis} is a size: state some sizes in `inputs` instead of -1, or serve the module itself"
            )
        return min(fit, key=lambda length: abs(length - 5)), min(fit, key=lambda length: abs(length - 16))

    def held(self, lengths: Sequence[int]) -> tuple[dict[tuple[int, int], list[int]], list[str]]:
        """Open sizes below the least that are right, by input and axis, and the conditions without those that only keep out
        what is right.

        PyTorch takes every open size for 2 or more, and keeps 1, and sizes that are equal, apart from others. Either goes only
        where each time that it was broken, alone or with others, the package gave what the module does.
        """
        right: dict[tuple[int, int] | str, list[bool]] = defaultdict(list)
        every, rows = range(len(self._axes)), sorted({1, min(3, self._declared.max_rows or 3)})

        def attempt(chosen: Iterable[int], size: int, length: int = lengths[0]) -> None:
            sizes = {place: size for index in chosen for place in self._axes[index]}
            small = [(index, size) for index in chosen if size < self._least(index)]
            for count in rows:
                broken = self._broken(count, length, sizes)
                if not broken and any(self._least(index) > 2 for index, _ in small):
                    return  # by a bound of the module's own, which may take another way
                if (broken or small) and all(map(keeps_few_out, broken)):
                    same = self._same(count, length, sizes)
                    keys: list[tuple[int, int] | str] = [*small, *broken]
                    for key in keys:
                        right[key].append(same)

        for length in lengths:
            attempt((), 0, length)
        for size in range(1, _SMALL):
            for index in every:
                attempt((index,), size)
            attempt([index for index in every if size >= self._least(index) or _all_of(right[index, size])], size)
        for chosen in dict.fromkeys((*((index,) for index in every), tuple(every))):
            for size in sorted(self._apart(chosen, lengths[0])):
                attempt(chosen, size)
        sizes = {
            place: [size for size in range(1, _SMALL) if _all_of(right[index, size])]
            for index in every
            for place in self._axes[index]
        }
        return sizes, [guard for guard in self._guards if not _all_of(right[guard])]

    def _apart(self, chosen: Iterable[int], length: int) -> set[int]:
        """For each condition that only keeps sizes apart, the first size of these axes from _SMALL on that breaks it."""
        limits = [self._compiled.inputs[of].limits[axis] for index in chosen for of, axis in self._axes[index]]
        least, most = max((least for least, _ in limits), default=0), min((most for _, most in limits if most), default=_LARGE)
        found: dict[str, int] = {}
        for size in range(max(least, _SMALL), min(most, _LARGE) + 1):
            for guard in self._broken(1, length, {place: size for index in chosen for place in self._axes[index]}):
                if keeps_few_out(guard):
                    found.setdefault(guard, size)
        return set(found.values())

    def _least(self, index: int) -> int:
        return max(self._compiled.inputs[of].limits[axis][0] for of, axis in self._axes[index])

    def _broken(self, rows: int, length: int, sizes: Mapping[tuple[int, int], int]) -> list[str]:
        every = [size for tensor in self._sized(rows, length, sizes).inputs for size in tensor.shape]
        return [guard for guard, holds in self._guards.items() if not holds(every)]

    def _sized(self, rows: int, length: int, sizes: Mapping[tuple[int, int], int]) -> ModelSpec:
        """With no open size. sizes: by input and axis, others are length."""
        declared = self._declared
        shapes = [
            [rows if declared.max_rows and not axis else sizes.get((index, axis), length) if size < 0 else size
             for axis, size in enumerate(tensor.shape)]
            for index, tensor in enumerate(declared.inputs)
        ]  # fmt: skip
        inputs = (replace(tensor, shape=tuple(shape)) for tensor, shape in zip(declared.inputs, shapes, strict=True))
        return replace(declared, inputs=tuple(inputs))

    def _same(self, rows: int, length: int, sizes: Mapping[tuple[int, int], int]) -> bool:
        like, random = Likeness(tensor.name for tensor in self._declared.outputs), np.random.default_rng(0)
        declared = self._sized(rows, length, sizes)
        if sum(math.prod(tensor.shape) for tensor in declared.inputs) > _MOST_NUMBERS:
            return False
        try:
            self._module.compare(self._session, example_inputs(declared, rows), like)
            for _ in range(_DRAWS):
                self._module.compare(self._session, random_inputs(declared, rows, 1, self._integers_below, random), like)
        except Exception:  # whatever the module raises, of a size that it does not take
            return False
        return like.difference <= TOLERANCE


def _bounds(compiled: Compiled, declared: ModelSpec) -> list[str]:
    """Limits, and the conditions that are found broken by sizes within them."""
    names, of_rows = [tensor.name for tensor in declared.inputs], declared.max_rows > 0
    places = [(index, axis) for index, each in enumerate(compiled.inputs) for axis in range(len(each.sizes))]
    equal = [axes for axes in compiled.equal_axes() if not (of_rows and axes[0][1] == 0)]
    equal += [[place for place in places if place[1] == 0]] if of_rows else []
    holds = {guard: condition(guard, None) for guard in compiled.guards or ()}
    broken: dict[str, None] = {}
    for drawn in drawn_sizes([f"s{index}_{axis}" for index, axis in places]):
        for index, axis in places:
            each, name = compiled.inputs[index], f"s{index}_{axis}"
            least, most = each.limits_of(axis, of_rows) if axis in each.limits else (each.sizes[axis],) * 2
            drawn[name] = min(least + drawn[name] - 1, most or drawn[name] + least)
        for (index, axis), *others in equal:
            drawn |= dict.fromkeys((f"s{of}_{at}" for of, at in others), drawn[f"s{index}_{axis}"])
        broken |= dict.fromkeys([guard for guard in holds if not holds[guard](drawn)][:1])  # others need not be told
    return [*compiled.bounds(names, of_rows), *(shown(guard, compiled.named(names)) for guard in broken)]


def _all_of(trials: Sequence[bool]) -> bool:
    return bool(trials) and all(trials)


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
