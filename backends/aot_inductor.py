"""What an AOTInductor package (.pt2) was compiled for, and the checks that hold its inputs to it.

The code in a package reads each input as one of the datatype and the sizes that it was compiled for, whatever it is given, also
past its end. Its own checks run only where AOTI_RUNTIME_CHECK_INPUTS is set in the process. So they are read from the C++
source that stands beside the code, and made here before each run.
Source: torch/_inductor/codegen/cpp_wrapper_cpu.py, generate_input_output_runtime_checks and codegen_inputs, of torch 2.13.

They say more or less than the code needs:
- torch.export takes every open size for 2 or more. One row is as right, since no row of a batch reads another. A length of 1
  may not be: `x[:, 1]` then reads the next row. `gateway compile` tries smaller sizes, and writes those that were right into
  the package.
- Rows are bounded by 15, or from 16 on, for the choice of ATen's code for a convolution, which Inductor makes no use of.
- No check says how sizes go together, as `x[:, : y.shape[1]]` and `x.view(rows, -1, 4)` need. The code reads past x, or divides
  a length, rounds down, and reads a row where another ends. `gateway compile` writes these conditions (`backends.torch_guards`)
  into the package. Of others they are not known, but that a length is divided: then the rows run one by one.
"""

import json
import math
import re
import zipfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from backends.artifacts import ARCHIVE_FAULTS
from backends.base import LoadFailed, ModelSpec, SpecMismatch, TensorSpec, agree
from backends.required import check_required
from backends.size_expressions import Function, condition, function
from backends.torch_tensors import DATATYPES, exported_for

if TYPE_CHECKING:
    import torch

_LEAST_OF_OPEN: Final = 2
_HEURISTIC_ROWS: Final = 16  # aten/src/ATen/native/Convolution.cpp, use_mkldnn: more than 15, or not (torch 2.13)
_PRIMES: Final = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157)  # sizes that no two strides are the same of
_EXTRA: Final = "extra/gateway_sizes.json"  # in a package's folder; PyTorch leaves what is in `extra` to others
_MOST_GUARDS: Final = 1000
_MOST_BYTES: Final = 1 << 23  # of _EXTRA
_SIZE: Final = re.compile(r"\bs\d+_\d+\b")  # as of named_sizes

_SOURCE: Final = re.compile(r"(^|/)data/aotinductor/model/[^/]+\.cpp$")
_COUNT: Final = re.compile(r"steal_from_raw_handles_to_raii_handles\(input_handles, (\d+)\)")
_CHECK: Final = re.compile(r"static void check_input_\d+\(.*?\n\}", re.DOTALL)
_NAME: Final = re.compile(r"ConstantHandle (\w+) = ConstantHandle\(input_handles")
_DATATYPE: Final = re.compile(r"_expected_dtype = aoti_torch_dtype_(\w+)\(\)")
_FIXED: Final = re.compile(r"\((\d+) != \w+_size\[(\d+)\]\)")
_STRIDE: Final = re.compile(r"\((\d+) != \w+_stride\[(\d+)\]\)")
_LIMIT: Final = re.compile(r"\(\w+_size\[(\d+)\] ([<>]) (\d+)\)")
_AXIS: Final = re.compile(r"_(?:size|stride)\[(\d+)\]")
_SYMBOL: Final = re.compile(r"^ +int64_t (\w+) = (?:(\w+)_size\[(\d+)\]|(.+));$", re.MULTILINE)
_SIZES: Final = re.compile(r'assert_size_stride\((\w+), \{(.*?)\}, \{(.*?)\}, "input"\)')
_CONVOLUTION: Final = re.compile(r"aoti_torch_\w*convolution\w*\(")
# Of a size, `s27` or in a kernel `ks0`, and not of an index. Without what stands before it: a loop over all of a size ends at
# `16L*(` to take 16 at once, and goes on with what `(-16L)*x1*(` leaves.
_DIVIDED: Final = re.compile(
    r"(\dL\*\(c10::|\(-\d+L\)\*(?:\w+\*)*\(c10::)?"
    r"div_floor_integer\(static_cast<int64_t>\(k?s\d+\), static_cast<int64_t>\((\d+)L\)\)"
)

# As torch/_inductor/codegen/cpp.py writes loops on several threads, and in them checks of an index and of what a model asserts.
_PARALLEL: Final = re.compile(r"^( *)#pragma omp parallel\b[^\n]*\n\1\{.*?^\1\}", re.DOTALL | re.MULTILINE)
_RAISES: Final = re.compile(r"\bTORCH_CHECK\(|_TORCH_CHECK\(|\bthrow\b")
_SHARED: Final = re.compile(r"^ *#pragma omp (?:parallel|for|single)\b.*\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CompiledInput:
    """datatype: as PyTorch calls it. sizes: -1 is open.

    limits: the least and the most of open ones, by axis; 0: any. rows: the same of the first one, where that is rows.
    verified: sizes below the least that are as right, by axis. order: of its numbers, a memory format of PyTorch; empty: none.
    """

    datatype: str
    sizes: tuple[int, ...]
    limits: Mapping[int, tuple[int, int]]
    rows: tuple[int, int]
    verified: Mapping[int, Collection[int]]
    order: str

    def open_axes(self) -> list[int]:
        return [axis for axis, size in enumerate(self.sizes) if size < 0]

    def limits_of(self, axis: int, of_rows: bool) -> tuple[int, int]:
        """Between which all sizes are right. of_rows: first dimensions are rows."""
        least, most = self.rows if of_rows and axis == 0 else self.limits[axis]
        while least - 1 in self.verified.get(axis, ()):
            least -= 1
        return least, most

    def named(self, name: str) -> TensorSpec:
        return TensorSpec(name, DATATYPES.get(f"torch.{self.datatype}", self.datatype), self.sizes)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the code reads its inputs as.

    symbols: what it calls sizes by, in its order: of an input and axis, or computed of others. relations: what the size of an
    input and axis has to be, computed of these. divisors: what it divides sizes by. guards: what else has to hold of sizes, by
    the names of `named_sizes`; None: not known. ends: it may end the process, by what it raises on one of several threads.
    """

    inputs: tuple[CompiledInput, ...]
    symbols: tuple[tuple[str, tuple[int, int] | str], ...]
    relations: tuple[tuple[int, int, str], ...]
    divisors: frozenset[int]
    guards: tuple[str, ...] | None
    ends: bool

    def bounds(self, names: Sequence[str], of_rows: bool) -> list[str]:
        """The limits of open sizes, by the names of the inputs. of_rows: as of `CompiledInput.limits_of`."""
        found = []
        for name, each in zip(names, self.inputs, strict=True):
            for axis in each.limits:
                least, most = each.limits_of(axis, of_rows)
                found += [f"{name}.size()[{axis}] >= {least}"] if least > 1 else []
                found += [f"{name}.size()[{axis}] <= {most}"] if most else []
        return found

    def named(self, names: Sequence[str]) -> dict[str, str]:
        """What a client calls each size, by what guards call it."""
        return {
            f"s{index}_{axis}": f"{name}.size()[{axis}]"
            for index, (name, each) in enumerate(zip(names, self.inputs, strict=True))
            for axis in range(len(each.sizes))
        }

    def equal_axes(self) -> list[list[tuple[int, int]]]:
        """The open axes of inputs, those together whose sizes have to be the same. Without those computed of others."""
        together: dict[str, list[tuple[int, int]]] = {symbol: [of] for symbol, of in self.symbols if isinstance(of, tuple)}
        for index, axis, symbol in self.relations:
            if symbol in together and (index, axis) not in together[symbol]:
                together[symbol].append((index, axis))
        return list(together.values())

    def warnings(self, names: Sequence[str], of_rows: bool) -> list[str]:
        """Of what requests may do, since it cannot be held to what it needs. of_rows: as for `bounds`."""
        ends = (
            "an AOTInductor package that checks an index on several threads: a request with one out of range, as past a table, "
            "ends the gateway: make the package by `gateway compile`, or set `isolation: process`, so that it ends a session"
        )
        untold = self._untold(names, of_rows)
        return [warning for warning, due in ((untold, untold), (ends, self.ends)) if due]

    def _untold(self, names: Sequence[str], of_rows: bool) -> str:
        """Empty, if it says how its open sizes go together."""
        axes = [equal for equal in self.equal_axes() if not of_rows or all(axis for _, axis in equal)]
        if self.guards is not None or len(axes) < 2:
            return ""
        listed = ", ".join(" = ".join(f"{names[index]}.size()[{axis}]" for index, axis in equal) for equal in axes)
        return (
            f"an AOTInductor package that does not say how its open sizes go together ({listed}): a request whose sizes do not "
            "may read other memory of the gateway, or end it: make the package by `gateway compile`, or serve the .pt2 of "
            "torch.export"
        )


def on_one_thread(source: str) -> str:
    """C++ of a kernel whose loops on several threads raise nothing: what is raised there ends the process."""
    return _PARALLEL.sub(lambda loops: _SHARED.sub("", loops[0]) if _RAISES.search(loops[0]) else loops[0], source)


def named_sizes(inputs: Iterable[Sequence[int]]) -> dict[str, int]:
    """The sizes of these shapes by what guards call them, each with its place in a list of all."""
    names = (f"s{index}_{axis}" for index, shape in enumerate(inputs) for axis in range(len(shape)))
    return {name: place for place, name in enumerate(names)}


def compiled_for(path: Path, *, own: bool = True) -> Compiled | None:
    """None, if the package does not say it as it is known here. own: with what `gateway compile` has written into it."""
    try:
        with zipfile.ZipFile(path) as archive:
            sources = [archive.read(name).decode() for name in archive.namelist() if _SOURCE.search(name)]
            extra = next((name for name in archive.namelist() if own and name.endswith(f"/{_EXTRA}")), None)
            if extra and archive.getinfo(extra).file_size > _MOST_BYTES:
                raise ValueError("too large")
            verified, guards = _own_sizes(json.loads(archive.read(extra))) if extra else ({}, None)
        return _read(sources, verified, guards)
    except (StopIteration, LookupError, ValueError, SyntaxError, TypeError, ArithmeticError):
        return None  # of another version
    except (*ARCHIVE_FAULTS, MemoryError):
        return None  # damaged


def write_sizes(path: Path, verified: Mapping[tuple[int, int], Collection[int]], guards: Collection[str]) -> None:
    """Write into a package, once, what holds of its sizes beside what its source says: `CompiledInput.verified`, by input and
    axis, and `Compiled.guards`. Raises: LoadFailed, for more than is read."""
    if len(guards) > _MOST_GUARDS:
        many = f"PyTorch makes {len(guards)} conditions of its open sizes, {_MOST_GUARDS} can be held"
        raise LoadFailed(f"{path}: {many}: state some sizes in `inputs` instead of -1")
    with zipfile.ZipFile(path, "a") as archive:
        folder = archive.namelist()[0].partition("/")[0]
        own = {"verified": [(*place, sorted(sizes)) for place, sizes in verified.items()], "guards": list(guards)}
        archive.writestr(f"{folder}/{_EXTRA}", json.dumps(own))


def _own_sizes(own: Any) -> tuple[dict[tuple[int, int], frozenset[int]], list[str]]:
    """What `write_sizes` has written. Raises: ValueError, LookupError or TypeError, for anything else."""
    if not isinstance(own["guards"], list) or not all(isinstance(guard, str) for guard in own["guards"]):
        raise ValueError("guards that are no text")
    verified = {(index, axis): frozenset(sizes) for index, axis, sizes in own["verified"]}
    if not all(type(size) is int and size > 0 for sizes in verified.values() for size in sizes):
        raise ValueError("verified sizes that are none")
    return verified, own["guards"]


def _read(
    sources: Sequence[str], verified: Mapping[tuple[int, int], Collection[int]], guards: Sequence[str] | None
) -> Compiled:
    """Raises: StopIteration, or as `function`, for what is not known."""
    source = next(source for source in sources if _COUNT.search(source))
    checks = _CHECK.findall(source)
    count, run = _COUNT.search(source), source[source.index("::run_impl(") :]
    asserted = {name: (_parts(sizes), _parts(strides)) for name, sizes, strides in _SIZES.findall(run)}
    if count is None or len(checks) != int(count[1]):
        raise ValueError("not all inputs are checked")
    names = [_NAME.findall(check)[0] for check in checks]
    places = {name: index for index, name in enumerate(names)}
    symbols: list[tuple[str, tuple[int, int] | str]] = []
    for symbol, name, axis, computed in _SYMBOL.findall(run[: run.index("inputs.clear();")]):
        symbols.append((symbol, (places[name], int(axis)) if name else _python(computed)))
    relations = {
        (places[name], axis): computed
        for name, (sizes, _) in asserted.items()
        for axis, size in enumerate(sizes)
        if name in places and not (computed := _python(size)).isdigit()  # others are inputs of a part of it
    }
    values: dict[str, Any] = {}
    for prime, (symbol, of) in enumerate(symbols):
        values[symbol] = _PRIMES[prime % len(_PRIMES)] if isinstance(of, tuple) else _computed(of, values)
    inputs = tuple(
        _read_input(
            check,
            {axis: computed for (of, axis), computed in relations.items() if of == index},
            {axis: sizes for (of, axis), sizes in verified.items() if of == index},
            _order(check, *([_value(part, values) for part in parts] for parts in asserted.get(names[index], ((), ())))),
            convolution=_CONVOLUTION.search(run) is not None,
        )
        for index, check in enumerate(checks)
    )
    known = {of for _, of in symbols if isinstance(of, tuple)}
    if not asserted and any((index, axis) not in known for index, each in enumerate(inputs) for axis in each.open_axes()):
        raise ValueError("compiled without TORCHINDUCTOR_SIZE_ASSERTS")
    divisors = frozenset(int(divisor) for each in sources for rest, divisor in _DIVIDED.findall(each) if not rest)
    if len(guards or ()) > _MOST_GUARDS:
        raise ValueError("too many guards")
    for guard in guards or ():
        condition(guard, named_sizes(each.sizes for each in inputs))
    conditions = tuple((*place, computed) for place, computed in relations.items())
    ends = any(on_one_thread(each) != each for each in sources)
    return Compiled(inputs, tuple(symbols), conditions, divisors, None if guards is None else tuple(guards), ends)


def _parts(listed: str) -> list[str]:
    return [part for part in listed.split(", ") if part]


def _fixed_sizes(check: str) -> list[int]:
    sizes = [-1] * (1 + max(map(int, _AXIS.findall(check)), default=-1))
    for size, axis in _FIXED.findall(check):
        sizes[int(axis)] = int(size)
    return sizes


def _read_input(
    check: str, computed: Mapping[int, str], verified: Mapping[int, Collection[int]], order: str, *, convolution: bool
) -> CompiledInput:
    """computed: of which symbols the sizes are, by axis, as far as it is known. convolution: the package has one."""
    sizes = _fixed_sizes(check)
    limits = {axis: (_LEAST_OF_OPEN, 0) for axis, size in enumerate(sizes) if size < 0}
    for axis, sign, limit in _LIMIT.findall(check):
        least, most = limits[int(axis)]
        limits[int(axis)] = (int(limit), most) if sign == "<" else (least, int(limit))
    least, most = limits.get(0, (0, 0))
    if least == _with_all(computed.get(0, "s0"), _LEAST_OF_OPEN) or (convolution and least == _HEURISTIC_ROWS):
        least = _with_all(computed.get(0, "s0"), 1)
    rows = (least, 0 if convolution and most == _HEURISTIC_ROWS - 1 else most)
    return CompiledInput(_DATATYPE.findall(check)[0], tuple(sizes), limits, rows, verified, order)


def _order(check: str, sizes: Sequence[int | None], strides: Sequence[int | None]) -> str:
    """sizes, strides: with symbols of some size each, None where that is not known; empty where they are not listed."""
    found = {int(axis): int(stride) for stride, axis in _STRIDE.findall(check)}
    found |= {axis: stride for axis, stride in enumerate(strides) if stride is not None}
    own = [size if size >= 0 else _PRIMES[-1] for size in _fixed_sizes(check)]
    for axis, size in enumerate(sizes):
        own[axis] = own[axis] if size is None else size
    orders = {"contiguous_format": [math.prod(own[axis + 1 :]) for axis in range(len(own))]}
    if len(own) == 4:
        _, channels, height, width = own
        orders["channels_last"] = [channels * height * width, 1, width * channels, channels]
    for name, expected in orders.items():
        if all(own[axis] == 1 or stride == expected[axis] for axis, stride in found.items()):
            return name
    return ""


def _value(expression: str, known: Mapping[str, Any]) -> int | None:
    """None: it is more than arithmetic."""
    try:
        return int(_computed(_python(expression), known))
    except (ValueError, SyntaxError):
        return None


def _python(expression: str) -> str:
    """C++ arithmetic of sizes, as Python's. Raises: as of `function`, for what is no more than that."""
    text = re.sub(r"\b(\d+)L\b", r"\1", expression)
    function(text)
    return text


@dataclass(frozen=True, slots=True)
class _Guard:
    """holds: of all sizes. text, sizes: as a client reads it, and the places of the sizes that it names."""

    holds: Function
    text: str
    sizes: Mapping[str, int]


class HeldPackage:
    """A package to be called with what it was compiled for, and no other. Raises, as it is called: InputRefused."""

    def __init__(self, path: Path, package: Any, names: Iterable[str], device: str) -> None:
        """names: of the inputs, as far as they are known. device: its type. Raises: LoadFailed."""
        import torch

        compiled = compiled_for(path)
        if compiled is None and compiled_for(path, own=False) is not None:
            raise LoadFailed(
                f"{path.absolute()}: its {_EXTRA} is not as this gateway writes it: make the package anew by `gateway compile`"
            )
        if compiled is None:
            raise LoadFailed(
                f"{path.absolute()}: an AOTInductor package that does not say what it was compiled for, as those of PyTorch "
                f"2.13 do, and reads past inputs of other sizes: compile it again with PyTorch {torch.__version__}"
            )
        made_for = package.get_metadata().get("AOTI_DEVICE_KEY", device)
        if made_for != device:
            raise LoadFailed(f"{path.absolute()}: compiled for device {made_for}, not {device}: set device: {made_for}")
        self.package, self._inputs = package, compiled.inputs  # as PyTorch loads it, to be called with anything
        self.compiled = compiled
        self._names = list(names) or [f"input_{index}" for index in range(len(compiled.inputs))]
        if len(self._names) != len(self._inputs):
            raise SpecMismatch(f"{path.absolute()}: it has {len(self._inputs)} inputs, {len(self._names)} are listed")
        for name, each in zip(self._names, self._inputs, strict=True):
            if not each.order:
                raise LoadFailed(
                    f"{path.absolute()}: compiled for an input {name!r} whose numbers lie in another order than its dimensions "
                    "say: export it with `.contiguous()` examples"
                )
            if not all(least for least, _ in each.limits.values()):  # from 0 on: then PyTorch finds no bounds of tables, either
                raise LoadFailed(
                    f"{path.absolute()}: compiled for open sizes of {name!r} without their bounds, past which it may read: "
                    "export it with `torch.export.Dim`, and without unbacked dimensions or `backed_size_oblivious`"
                )
        self._orders = [getattr(torch, each.order) for each in self._inputs]
        self._divisors = compiled.divisors
        self.max_rows: int | None = None  # as of a model; None: whether first dimensions are rows is being found out
        self._datatypes = [getattr(torch, each.datatype) for each in self._inputs]
        places = named_sizes(each.sizes for each in self._inputs)
        count, named = len(places), compiled.named(self._names)
        self._told = compiled.guards is not None
        self._guards = [
            _Guard(condition(guard, places), shown(guard, named), {named[name]: places[name] for name in _SIZE.findall(guard)})
            for guard in compiled.guards or ()
        ]
        self._rows = [places[f"s{index}_0"] for index, each in enumerate(self._inputs) if each.sizes]
        self._lengths = [
            places[f"s{index}_{axis}"] for index, each in enumerate(self._inputs) for axis in each.open_axes() if axis > 0
        ]
        self._computed: list[Function] = []  # what is computed of sizes, in a list of these and then of each
        for symbol, of in compiled.symbols:
            if isinstance(of, str):
                self._computed.append(function(of, places))
                named[symbol], places[symbol] = f"({shown(of, named)})", count + len(self._computed) - 1
            else:
                own = f"s{of[0]}_{of[1]}"
                named[symbol], places[symbol] = named[own], places[own]
        self._relations = [
            (places[own], function(size, places), f"{named[own]} == {shown(size, named)}")
            for own, size in ((f"s{index}_{axis}", size) for index, axis, size in compiled.relations)
            if places.get(size) != places[own]  # which is so by what it is called
        ]

    def __call__(self, *arguments: "torch.Tensor") -> Any:
        if self._run_together(self._checked(arguments)):
            return self._run(arguments)
        import torch
        from torch.utils._pytree import tree_map

        alone = [self._run([each[row : row + 1] for each in arguments]) for row in range(len(arguments[0]))]
        return tree_map(lambda *results: torch.cat(results) if results[0].shape[:1] == (1,) else results[0], *alone)

    def _run_together(self, sizes: list[int]) -> bool:
        """Whether the rows can; else each can alone. Raises: InputRefused, where neither is right. sizes: may be changed."""
        rows = sizes[self._rows[0]] if self.max_rows else 1
        if not self._told:
            return rows == 1 or not any(sizes[place] % divisor for divisor in self._divisors for place in self._lengths)
        broken = self._broken(sizes)
        if broken is not None and rows > 1:
            for place in self._rows:
                sizes[place] = 1
            if (broken := self._broken(sizes)) is None:
                return False
        if broken is not None:
            given = ", ".join(f"{size} is {sizes[place]}" for size, place in broken.sizes.items())
            raise exported_for(f"{broken.text}: {given}")
        return True

    def _broken(self, sizes: Sequence[int]) -> "_Guard | None":
        return next((guard for guard in self._guards if not guard.holds(sizes)), None)

    def _run(self, arguments: Sequence["torch.Tensor"]) -> Any:
        ordered = (argument.contiguous(memory_format=order) for argument, order in zip(arguments, self._orders, strict=True))
        return self.package(*ordered)

    def _checked(self, arguments: Sequence["torch.Tensor"]) -> list[int]:
        """All sizes, and what is computed of them. Raises: InputRefused."""
        sizes: list[int] = []
        for name, compiled, datatype, argument in zip(self._names, self._inputs, self._datatypes, arguments, strict=True):
            if argument is None or argument.dtype != datatype or argument.dim() != len(compiled.sizes):
                expected = compiled.named(name)
                raise exported_for(f"{name} of {expected.datatype} {list(expected.shape)}")
            shape = tuple(argument.shape)
            for axis, (size, own) in enumerate(zip(shape, compiled.sizes, strict=True)):
                if own not in (-1, size):
                    raise exported_for(f"{name}.size()[{axis}] == {own}")
            for axis in compiled.limits:
                least, most = compiled.limits_of(axis, self.max_rows != 0)
                if shape[axis] < least and shape[axis] not in compiled.verified.get(axis, ()):
                    raise exported_for(f"{name}.size()[{axis}] >= {least}")
                if 0 < most < shape[axis]:
                    raise exported_for(f"{name}.size()[{axis}] <= {most}")
            sizes += shape
        for compute in self._computed:
            sizes.append(int(_bounded(compute(sizes))))
        for place, of, text in self._relations:
            if sizes[place] != _bounded(of(sizes)):
                raise exported_for(text)
        return sizes

    def rows(self) -> tuple[int, int]:
        """The least and the most that first dimensions of the inputs may be, where they are rows; 0: any."""
        limits = [(0, 1) if each.sizes[:1] == (1,) else each.rows for each in self._inputs]
        return max((least for least, _ in limits), default=0), min((most for _, most in limits if most), default=0)

    def check_declared(self, path: Path, declared: ModelSpec) -> None:
        """Raises: LoadFailed, for inputs and rows that are declared otherwise than the package has them."""
        check_required(str(path.absolute()), declared.inputs)
        for tensor, compiled in zip(declared.inputs, self._inputs, strict=True):
            own = compiled.named(tensor.name)
            if not agree(tensor, own):
                raise SpecMismatch(
                    f"{path.absolute()}: input {tensor.name!r}: the model has {own.datatype} {list(own.shape)}, "
                    f"the configuration says {tensor.datatype} {list(tensor.shape)}"
                )
            if declared.max_rows and own.shape[:1] not in ((-1,), (1,)):
                raise SpecMismatch(
                    f"{path.absolute()}: max_rows {declared.max_rows} needs a first dimension that is open in every input, "
                    f"{tensor.name!r} has {list(own.shape)}: export it so, or set max_rows to 0"
                )
        least, _ = self.rows()
        if declared.max_rows and min(declared.row_sizes, default=1) < least:
            raise SpecMismatch(
                f"{path.absolute()}: exported for {least} rows at least, and max_rows is {declared.max_rows}, where one may "
                "come alone: set max_rows: 0, or export it for fewer"
            )


def _computed(expression: str, known: Mapping[str, Any]) -> Any:
    return _bounded(function(expression)(known))


def _bounded(value: Any) -> Any:
    if abs(value) >= 1 << 63:
        raise ValueError("more than a size may be")
    return value


def _with_all(expression: str, value: int) -> int:
    """With each symbol of that value."""
    return int(_computed(expression, defaultdict(lambda: value)))


def shown(expression: str, known: Mapping[str, str]) -> str:
    return re.sub(r"[A-Za-z_]\w*", lambda found: known.get(found[0], found[0]), expression)
