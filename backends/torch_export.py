"""A factory's nn.Module to an AOTInductor package (.pt2): compiled code for this machine's CPU, with open rows and lengths."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from backends.aot_inductor import Compiled, HeldPackage, compiled_for, named_sizes, shown, write_sizes
from backends.base import NO_OPTIONS, LoadFailed, ModelSpec, example_inputs
from backends.likeness import TOLERANCE, Likeness
from backends.module_to_build import ModuleToBuild, arguments, check_declared, exporting, loaded_module, random_inputs
from backends.size_expressions import Function, condition, drawn_sizes, keeps_few_out
from backends.torch import UNBOUNDED
from backends.torch_choices import own_choices
from backends.torch_guards import guards

_ROWS: Final = 3  # of examples: not a length of theirs
_WIDE: Final = 4  # times an example size, as a table may be: PyTorch's own bounds are up to 2 times
_SMALL: Final = 9  # above the small sizes that are tried, each
_LARGE: Final = 2048  # the most that is tried of large ones, which take memory
_MOST_NUMBERS: Final = 1 << 22  # in the inputs of one that is tried
_DRAWS: Final = 3  # of numbers, for each beside ones: of these, what is read in a wrong place is as right


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
    module = loaded_module(artifact, declared, source, options)
    artifact.parent.mkdir(parents=True, exist_ok=True)
    unverified = artifact.with_name(f"unverified-{artifact.name}")
    try:
        with torch.inference_mode(), own_choices():
            program = _exported(module, declared, artifact, source)
            torch._inductor.aoti_compile_and_package(program, package_path=str(unverified))
        compiled = compiled_for(unverified)
        if compiled is not None:
            trial = _SizeTrial(module, unverified, declared, compiled, guards(str(artifact), program), integers_below)
            sizes, held = trial.held(lengths or trial.lengths(artifact))
            write_sizes(unverified, sizes, held)
            lengths = lengths or trial.lengths(artifact, held)
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


def _exported(module: ModuleToBuild, declared: ModelSpec, artifact: Path, source: str) -> torch.export.ExportedProgram:
    """Of the example sizes that leave the open ones the widest limits. Raises: LoadFailed, or what the module raises.

    PyTorch takes what holds of an example for what holds always, where a way in the model depends on it: that sizes are equal,
    or that an image of 7 × 7 has one place left behind three layers that halve it.
    """
    open_sizes = tuple({axis: torch.export.Dim.AUTO for axis, size in enumerate(t.shape) if size < 0} for t in declared.inputs)
    found: list[tuple[float, torch.export.ExportedProgram]] = []
    failed: Exception | None = None
    examples = _examples(declared)
    while examples:
        inputs = example_inputs(examples.pop(0), _ROWS)
        try:
            module.check_outputs(inputs)
            with exporting(artifact, source):
                program = torch.export.export(module, arguments(declared, inputs), dynamic_shapes=(open_sizes,))
            width = _width(declared, program, guards(str(artifact), program))
        except Exception as exc:
            failed = failed if isinstance(failed, LoadFailed) else exc
            continue
        found.append((width, program))
        if width >= _WIDE:
            break
        if not width:
            examples = examples[-1:]  # of a loop, which is the shorter the sooner it is compiled
    if failed is not None and not found:
        raise failed
    return max(reversed(found), key=lambda each: each[0])[1]


def _examples(declared: ModelSpec) -> list[ModelSpec]:
    """With no open size: where each differs, what comes first may have to be more than others, or less. Then where all are
    equal, as those of ids and mask are."""
    places = [
        (index, axis)
        for index, tensor in enumerate(declared.inputs)
        for axis, size in enumerate(tensor.shape)
        if size < 0 and (axis or not declared.max_rows)
    ]
    many = range(len(places))
    differing = [[61 + 22 * place for place in many], [17 + 6 * place for place in many], [96 * (place + 1) for place in many]]
    lists = [each for sizes in differing for each in (sizes, sizes[::-1])] + [[size] * len(places) for size in (61, 17, 96, 7)]
    found = {tuple(sizes): _sized(declared, _ROWS, 0, dict(zip(places, sizes, strict=True))) for sizes in lists}
    *others, last = found.values()
    return [each for each in others if _numbers(each) <= _MOST_NUMBERS] + [last]


def _width(declared: ModelSpec, program: torch.export.ExportedProgram, found: Iterable[str]) -> float:
    """How many times its example the least of the open sizes may be; 0: one is no longer open; 1: if none may be equal.

    found: the conditions that PyTorch made of sizes.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    shapes = [values[name].shape for name in program.graph_signature.user_inputs]
    places = named_sizes(shapes)
    conditions = {guard: condition(guard, places) for guard in found}
    few_out = _few_out(declared)
    if not any(all(map(few_out, _broken(declared, conditions, 1, length, {}))) for length in range(5, 300)):
        return 1
    widths = [math.inf]
    for tensor, shape in zip(declared.inputs, shapes, strict=True):
        for size, own in zip(shape, tensor.shape, strict=True):
            if own < 0 and (isinstance(size, int) or size.node.expr.is_number):
                return 0
            limits = program.range_constraints.get(size.node.expr) if own < 0 else None  # None: it is computed of others
            if limits is not None and limits.upper < UNBOUNDED:
                widths.append(int(limits.upper) / size.node.hint)
    return min(widths)


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
        self._few_out = _few_out(declared)
        self._axes = [axes for axes in compiled.equal_axes() if not (declared.max_rows and any(axis == 0 for _, axis in axes))]

    def lengths(self, artifact: Path, held: Collection[str] = ()) -> tuple[int, int]:
        """To verify with: 5 and 16, or what is nearest to them of sizes that are open, and no rows. Raises: LoadFailed.

        held: conditions that a length has to fulfil, also those that keep few out.
        """
        first = 1 if self._declared.max_rows else 0
        limits = [limit for each in self._compiled.inputs for axis, limit in each.limits.items() if axis >= first]
        least = max((least for least, _ in limits), default=0)
        most = min((most for _, most in limits if most), default=max(least, _LARGE))
        possible = range(least, min(most, max(least, _LARGE)) + 1)

        def nearest(wanted: int) -> int:
            for length in sorted(possible, key=lambda length: abs(length - wanted)):
                if all(self._few_out(guard) and guard not in held for guard in self._broken(1, length, {})):
                    return length
            named = self._compiled.named([tensor.name for tensor in self._declared.inputs])
            of = f"as {shown(self._broken(1, least, {})[0], named)}" if possible else f"from {least} to {most}"
            raise LoadFailed(
                f"{artifact}: PyTorch makes conditions that no length fulfils for all open sizes, {of}: state some in `inputs` "
                "instead of -1, or serve the module itself, with `kind: torch` and the factory as its `model`"
            )

        return nearest(5), nearest(16)

    def held(self, lengths: Sequence[int]) -> tuple[dict[tuple[int, int], list[int]], list[str]]:
        """Open sizes below the least that are right, by input and axis, and the conditions without those that only keep out
        what is right.

        PyTorch takes every open size for 2 or more, and keeps 1, and sizes that are equal, apart from others. Either goes only
        where each time that it was broken, alone or with others, the package gave what the module does.
        """
        right: dict[tuple[int, int] | str, list[bool]] = defaultdict(list)
        every, rows = range(len(self._axes)), sorted({1, min(3, self._declared.max_rows or 3)})

        def attempt(chosen: Collection[int], size: int, length: int = lengths[0]) -> None:
            taken = {index: size if index in chosen else length for index in every}
            if any(0 < self._most(index) < size for index, size in taken.items()):
                return
            small = [(index, size) for index, size in taken.items() if size < self._least(index)]
            for count in rows:
                broken = self._broken(count, length, self._places(chosen, size))
                if not broken and any(self._least(index) > 2 for index, _ in small):
                    return  # by a bound of the module's own, which may take another way
                if (broken or small) and all(map(self._few_out, broken)):
                    same = self._same(count, length, self._places(chosen, size))
                    keys: list[tuple[int, int] | str] = [*small, *broken]
                    for key in keys:
                        right[key].append(same)

        def may_join(index: int, size: int) -> bool:
            tried = right[index, size]
            return all(tried) and (bool(tried) or self._least(index) <= 2)

        for length in lengths:
            attempt((), 0, length)
        for size in range(1, _SMALL):
            for index in every:
                attempt((index,), size)
            attempt([index for index in every if size >= self._least(index) or may_join(index, size)], size)
        for chosen in dict.fromkeys((*((index,) for index in every), tuple(every))):
            for size in sorted(self._apart(chosen, lengths[0])):
                attempt(chosen, size)
        kept = [guard for guard in self._guards if not _all_of(right[guard])]
        sizes: dict[tuple[int, int], list[int]] = {}
        for index in every:
            for size in range(1, self._least(index)):
                # Of larger ones, the conditions that they break were tried.
                broken = self._broken(rows[-1], lengths[0], self._places((index,), size)) if size >= _SMALL else []
                if _all_of(right[index, size]) or (all(right[index, size]) and broken and not {*broken} & {*kept}):
                    for place in self._axes[index]:
                        sizes.setdefault(place, []).append(size)
        return sizes, kept

    def _apart(self, chosen: Collection[int], length: int) -> set[int]:
        """For each condition that only keeps sizes apart, the first size of these axes from _SMALL on that breaks it; and what
        is one less than an axis takes."""
        most = min((self._most(index) or _LARGE for index in chosen), default=0)
        guards = {guard: holds for guard, holds in self._guards.items() if self._few_out(guard)}
        found: dict[str, int] = {}
        for size in range(_SMALL, min(most, _LARGE) + 1):
            for guard in _broken(self._declared, guards, 1, length, self._places(chosen, size)):
                found.setdefault(guard, size)
                del guards[guard]
        return {*found.values(), *(self._least(index) - 1 for index in chosen if self._least(index) > _SMALL)}

    def _places(self, chosen: Collection[int], size: int) -> dict[tuple[int, int], int]:
        return {place: size for index in chosen for place in self._axes[index]}

    def _least(self, index: int) -> int:
        return max(self._compiled.inputs[of].limits[axis][0] for of, axis in self._axes[index])

    def _most(self, index: int) -> int:
        """0: any."""
        limits = [self._compiled.inputs[of].limits[axis] for of, axis in self._axes[index]]
        return min((most for _, most in limits if most), default=0)

    def _broken(self, rows: int, length: int, sizes: Mapping[tuple[int, int], int]) -> list[str]:
        return _broken(self._declared, self._guards, rows, length, sizes)

    def _same(self, rows: int, length: int, sizes: Mapping[tuple[int, int], int]) -> bool:
        like, random = Likeness(tensor.name for tensor in self._declared.outputs), np.random.default_rng(0)
        declared = _sized(self._declared, rows, length, sizes)
        if _numbers(declared) > _MOST_NUMBERS:
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


def _shapes(declared: ModelSpec, rows: int, length: int, sizes: Mapping[tuple[int, int], int]) -> Iterator[tuple[int, ...]]:
    """Of the inputs. sizes: of open ones, by input and axis; others are length."""
    for index, tensor in enumerate(declared.inputs):
        shape = [sizes.get((index, axis), length) if size < 0 else size for axis, size in enumerate(tensor.shape)]
        yield (rows, *shape[1:]) if declared.max_rows else tuple(shape)


def _sized(declared: ModelSpec, rows: int, length: int, sizes: Mapping[tuple[int, int], int]) -> ModelSpec:
    """With no open size. sizes: as of `_shapes`."""
    shapes = zip(declared.inputs, _shapes(declared, rows, length, sizes), strict=True)
    return replace(declared, inputs=tuple(replace(tensor, shape=shape) for tensor, shape in shapes))


def _few_out(declared: ModelSpec) -> Callable[[str], bool]:
    """`keeps_few_out`, of a model whose inputs have the same rows, if it has any."""
    rows = range(len(declared.inputs)) if declared.max_rows else ()
    return partial(keeps_few_out, alike=frozenset(f"s{index}_0" for index in rows))


def _broken(
    declared: ModelSpec, conditions: Mapping[str, Function], rows: int, length: int, sizes: Mapping[tuple[int, int], int]
) -> list[str]:
    every = [size for shape in _shapes(declared, rows, length, sizes) for size in shape]
    return [text for text, holds in conditions.items() if not holds(every)]


def _numbers(declared: ModelSpec) -> int:
    return sum(math.prod(tensor.shape) for tensor in declared.inputs)


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
