"""What an AOTInductor package (.pt2) was compiled for, and the checks that hold its inputs to it.

The code in a package reads each input as one of the datatype and the sizes that it was compiled for, whatever it is given, also
past its end. Its own checks run only where AOTI_RUNTIME_CHECK_INPUTS is set in the process, and then refuse one row, too, where
the rows are open. So they are read from the C++ source that stands beside the code, and made here before each run.
Source: torch/_inductor/codegen/cpp_wrapper_cpu.py, generate_input_output_runtime_checks and codegen_inputs, of torch 2.13.
"""

import ast
import math
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, Final

from backends.base import LoadFailed, ModelSpec, SpecMismatch, TensorSpec, agree
from backends.required import check_required
from backends.torch_tensors import DATATYPES, exported_for

if TYPE_CHECKING:
    import torch

_LEAST_OF_OPEN: Final = 2  # that torch.export takes every open size for; the code runs with less (torch 2.13)

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
_SIZES: Final = re.compile(r'assert_size_stride\((\w+), \{(.*?)\}, \{.*?\}, "input"\)')
_ARITHMETIC: Final = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.USub, ast.Name, ast.Load,
                      ast.Constant)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CompiledInput:
    """datatype: as PyTorch calls it. sizes: -1 is open. limits: the least and the most of open ones, by axis; 0: any."""

    datatype: str
    sizes: tuple[int, ...]
    limits: Mapping[int, tuple[int, int]]
    in_order: bool  # its numbers lie in the order of its dimensions

    def open_axes(self) -> list[int]:
        return [axis for axis, size in enumerate(self.sizes) if size < 0]

    def named(self, name: str) -> TensorSpec:
        return TensorSpec(name, DATATYPES.get(f"torch.{self.datatype}", self.datatype), self.sizes)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the code reads its inputs as.

    symbols: what it calls sizes by, in its order: of an input and axis, or computed of others. relations: what the size of an
    input and axis has to be, computed of these.
    """

    inputs: tuple[CompiledInput, ...]
    symbols: tuple[tuple[str, tuple[int, int] | str], ...]
    relations: tuple[tuple[int, int, str], ...]

    def bounds(self, names: Sequence[str]) -> list[str]:
        """The limits of open sizes, by the names of the inputs."""
        found = []
        for name, each in zip(names, self.inputs, strict=True):
            for axis, (least, most) in each.limits.items():
                found += [f"{name}.size()[{axis}] >= {least}"] if least else []
                found += [f"{name}.size()[{axis}] <= {most}"] if most else []
        return found


def compiled_for(path: Path) -> Compiled | None:
    """None, if the package does not say it as it is known here."""
    try:
        with zipfile.ZipFile(path) as archive:
            sources = [archive.read(name).decode() for name in archive.namelist() if _SOURCE.search(name)]
        return _read(next(source for source in sources if _COUNT.search(source)))
    except (StopIteration, LookupError, ValueError, SyntaxError):
        return None  # of another version
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError):
        return None  # damaged


def _read(source: str) -> Compiled:
    """Raises: LookupError, ValueError or SyntaxError, for what is not known."""
    checks = _CHECK.findall(source)
    count, run = _COUNT.search(source), source[source.index("::run_impl(") :]
    sizes_of = dict(_SIZES.findall(run))
    if count is None or len(checks) != int(count[1]):
        raise ValueError("not all inputs are checked")
    places = {_NAME.findall(check)[0]: index for index, check in enumerate(checks)}
    symbols: list[tuple[str, tuple[int, int] | str]] = []
    for symbol, name, axis, computed in _SYMBOL.findall(run[: run.index("inputs.clear();")]):
        symbols.append((symbol, (places[name], int(axis)) if name else _python(computed)))
    relations = {
        (places[name], axis): computed
        for name, sizes in sizes_of.items()
        for axis, size in enumerate(filter(None, sizes.split(", ")))
        if name in places and not (computed := _python(size)).isdigit()  # others are inputs of a part of it
    }
    inputs = tuple(
        _read_input(check, {axis: computed for (of, axis), computed in relations.items() if of == index})
        for index, check in enumerate(checks)
    )
    known = {of for _, of in symbols if isinstance(of, tuple)}
    if not sizes_of and any((index, axis) not in known for index, each in enumerate(inputs) for axis in each.open_axes()):
        raise ValueError("compiled without TORCHINDUCTOR_SIZE_ASSERTS")
    return Compiled(inputs, tuple(symbols), tuple((*place, computed) for place, computed in relations.items()))


def _read_input(check: str, computed: Mapping[int, str]) -> CompiledInput:
    """computed: of which symbols the sizes are, by axis, as far as it is known."""
    sizes = [-1] * (1 + max(map(int, _AXIS.findall(check)), default=-1))
    for size, axis in _FIXED.findall(check):
        sizes[int(axis)] = int(size)
    limits: dict[int, tuple[int, int]] = {}
    for axis, sign, limit in _LIMIT.findall(check):
        least, most = limits.get(int(axis), (0, 0))
        limits[int(axis)] = (int(limit), most) if sign == "<" else (least, int(limit))
    for axis, (least, most) in limits.items():
        size = computed.get(axis, "s0")
        if least == _with_all(size, _LEAST_OF_OPEN):
            limits[axis] = (_with_all(size, 0), most)
    strides = [(int(axis), int(stride)) for stride, axis in _STRIDE.findall(check)]
    in_order = all(sizes[axis] == 1 or stride == _stride_in_order(sizes[axis + 1 :]) for axis, stride in strides)
    return CompiledInput(_DATATYPE.findall(check)[0], tuple(sizes), limits, in_order)


def _stride_in_order(sizes: Sequence[int]) -> int:
    """Of the dimension before these; -1: no number says it."""
    return -1 if -1 in sizes else math.prod(sizes)


def _python(expression: str) -> str:
    """C++ arithmetic of sizes, as Python's. Raises: ValueError or SyntaxError, for what is no more than that."""
    text = re.sub(r"\b(\d+)L\b", r"\1", expression)
    if not all(isinstance(node, _ARITHMETIC) for node in ast.walk(ast.parse(text, mode="eval"))):
        raise ValueError(expression)
    return text


class HeldPackage:
    """A package to be called with what it was compiled for, and no other. Raises, as it is called: InputRefused."""

    def __init__(self, path: Path, package: Any, names: Iterable[str], device: str) -> None:
        """names: of the inputs, as far as they are known. device: its type. Raises: LoadFailed."""
        import torch

        compiled = compiled_for(path)
        if compiled is None:
            raise LoadFailed(
                f"{path.absolute()}: an AOTInductor package that does not say what it was compiled for, as those of PyTorch "
                f"2.13 do, and reads past inputs of other sizes: compile it again with PyTorch {torch.__version__}"
            )
        made_for = package.get_metadata().get("AOTI_DEVICE_KEY", device)
        if made_for != device:
            raise LoadFailed(f"{path.absolute()}: compiled for device {made_for}, not {device}: set device: {made_for}")
        self._package, self._inputs = package, compiled.inputs
        self._names = list(names) or [f"input_{index}" for index in range(len(compiled.inputs))]
        if len(self._names) != len(self._inputs):
            raise SpecMismatch(f"{path.absolute()}: it has {len(self._inputs)} inputs, {len(self._names)} are listed")
        for name, each in zip(self._names, self._inputs, strict=True):
            if not each.in_order:
                raise LoadFailed(
                    f"{path.absolute()}: compiled for an input {name!r} whose numbers lie in another order than its dimensions "
                    "say: export it with `.contiguous()` examples"
                )
        self._datatypes = [getattr(torch, each.datatype) for each in self._inputs]
        shown: dict[str, str] = {}
        self._symbols: list[tuple[str, tuple[int, int] | CodeType]] = []
        for symbol, of in compiled.symbols:
            where = f"({_shown(of, shown)})" if isinstance(of, str) else f"{self._names[of[0]]}.size()[{of[1]}]"
            shown[symbol] = where
            self._symbols.append((symbol, compile(of, str(path), "eval") if isinstance(of, str) else of))
        self._relations = [
            (index, axis, compile(size, str(path), "eval"), _shown(size, shown))
            for index, axis, size in compiled.relations
            if shown.get(size) != f"{self._names[index]}.size()[{axis}]"  # which is so by what it is called
        ]

    def __call__(self, *arguments: "torch.Tensor") -> Any:
        self._check(arguments)
        return self._package(*arguments)

    def _check(self, arguments: Sequence["torch.Tensor"]) -> None:
        shapes: list[tuple[int, ...]] = []
        for name, compiled, datatype, argument in zip(self._names, self._inputs, self._datatypes, arguments, strict=True):
            if argument is None or argument.dtype != datatype or argument.dim() != len(compiled.sizes):
                expected = compiled.named(name)
                raise exported_for(f"{name} of {expected.datatype} {list(expected.shape)}")
            shape = tuple(argument.shape)
            for axis, (size, own) in enumerate(zip(shape, compiled.sizes, strict=True)):
                if own not in (-1, size):
                    raise exported_for(f"{name}.size()[{axis}] == {own}")
            for axis, (least, most) in compiled.limits.items():
                if shape[axis] < least:
                    raise exported_for(f"{name}.size()[{axis}] >= {least}")
                if 0 < most < shape[axis]:
                    raise exported_for(f"{name}.size()[{axis}] <= {most}")
            shapes.append(shape)
        known: dict[str, Any] = {}
        for symbol, of in self._symbols:
            known[symbol] = shapes[of[0]][of[1]] if isinstance(of, tuple) else int(_computed(of, known))
        for index, axis, of_symbols, text in self._relations:
            if shapes[index][axis] != _computed(of_symbols, known):
                raise exported_for(f"{self._names[index]}.size()[{axis}] == {text}")

    def rows(self) -> tuple[int, int]:
        """The least and the most that first dimensions of the inputs may be, where they are rows; 0: any."""
        limits = [(0, 1) if each.sizes[:1] == (1,) else each.limits.get(0, (0, 0)) for each in self._inputs]
        return max((least for least, _ in limits), default=0), min((most for _, most in limits if most), default=0)

    def check_declared(self, path: Path, declared: ModelSpec) -> None:
        """Raises: LoadFailed, for inputs that are declared otherwise than the package has them."""
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


def _computed(expression: CodeType, known: dict[str, Any]) -> Any:
    return eval(expression, {"__builtins__": {}}, known)  # noqa: S307  # arithmetic, by _python


def _with_all(expression: str, value: int) -> int:
    """With each symbol of that value."""
    return int(eval(re.sub(r"\b[A-Za-z_]\w*", str(value), expression), {"__builtins__": {}}))  # noqa: S307  # as above


def _shown(expression: str, known: Mapping[str, str]) -> str:
    return re.sub(r"[A-Za-z_]\w*", lambda found: known.get(found[0], found[0]), expression)
