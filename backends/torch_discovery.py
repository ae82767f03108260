"""What a PyTorch model takes and gives: a program of torch.export says it, all others are run on an example.

A traced TorchScript file keeps the shapes that it was traced on. A scripted one has the names of its inputs only; AOTInductor
and a factory's module not even all of these.
"""

import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, Final

import numpy as np

from backends.aot_inductor import HeldPackage
from backends.artifacts import EXPORTED, TORCHSCRIPT, identify
from backends.base import (
    NO_OPTIONS,
    BackendError,
    ExecutionFailed,
    LoadFailed,
    ModelSpec,
    OutputsRefused,
    Tensors,
    TensorSpec,
)
from backends.company import MOST_ROWS, Run, without_nan
from backends.datatypes import NUMPY, datatype_of, fields_of, normalised
from backends.discovery import Found, from_example, from_shapes
from backends.script_arguments import Argument, script_arguments
from backends.source import example_of, is_source, load_object
from backends.torch import CpuSession, by_name, load_callable, parameters_of, rows_taken, unloadable
from backends.torch_tensors import DATATYPES, check_tensor, mapped, to_array, to_tensor
from backends.trial_rows import drawn

_NAMES: Final = 3  # so many buffers are named, the rest are counted
_RUNS_OF_MEMOS: Final = 3  # two batches, and one row
_DYNAMIC: Final = re.compile(r"quantized::\w*dynamic|quantized_(?:lstm|gru)|DynamicQuantized")  # of graphs, and of modules


def read(*, model: str, example: Mapping[str, object] | None = None, factory_options: Mapping[str, Any] = NO_OPTIONS) -> Found:
    """model: as of the torch backend. example: one request by input name; of a factory,
    its attribute `example` or that of its file will do.

    Raises: LoadFailed, with an example to write where one is needed and none is given.
    """
    torch = _torch()
    artifact = None if is_source(model) else identify(Path(model))
    if artifact == EXPORTED:
        with unloadable(Path(model), EXPORTED):
            program = torch.export.load(model)
        return _of_program(model, program)
    call, *_ = load_callable(torch, model, dict(factory_options), torch.device("cpu"), "fp32", example or ())
    names = parameters_of(call)
    if artifact is None and example is None:
        example = example_of(model, load_object(model))
    sizes_of = "of the example"
    examples: Sequence[Mapping[str, object]] = [] if example is None else [example]
    if example is None and artifact == TORCHSCRIPT:
        sizes_of, examples = "that it was traced on", _traced_on(torch, model, names)
    if not examples:
        name, known = (names[0], f" ({', '.join(names)})") if names else ("x", "")
        raise LoadFailed(
            f"{model}: the model does not say what its inputs are{known}: give one request as an "
            f'example, `--example request.json`, such as {{"inputs": [{{"name": "{name}", "datatype": "FP32", "shape": [1, 4], '
            '"data": [0, 0, 0, 0]}]}; or export it with torch.export, whose .pt2 says it'
        )
    unknown = sorted(set(examples[0]) - set(names)) if names else []
    if unknown:
        raise LoadFailed(f"{model}: the example has {', '.join(unknown)}, but the inputs are {', '.join(names)}")
    order = [name for name in names if name in examples[0]] or list(examples[0])
    others: dict[str, str] = {}
    watched = _Watched(_runner(by_name(call, order), order, others), call)
    for index, each in enumerate(examples, 1):
        arrays = normalised({name: _as_weights(call, each[name]) for name in order})
        try:
            trial = watched.run if index == len(examples) else without_nan(watched.run)
            found = from_example(trial, arrays, sizes_of=sizes_of, network=True, quantises=lambda: _quantises(call))
            break
        except OutputsRefused:
            raise
        except ExecutionFailed as exc:
            failed = exc
    else:
        named = ", ".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in arrays.items())
        raise LoadFailed(f"{model}: it fails on the example ({named}): {failed}") from failed
    found = _without_changed_buffers(_within(found, *_rows_of(call)), watched.changed())
    if not others:
        return found
    named = ", ".join(f"{name} ({kind})" for name, kind in sorted(others.items()))
    return replace(found, notes=(*found.notes, f"what it gives beside tensors is left out: {named}"))


def tried(*, model: str, stated: ModelSpec, output_indices: Sequence[int] = ()) -> Found:
    """As of `backends.tried`, on the CPU. output_indices: as of `backends.torch.load`."""
    torch = _torch()
    names = [tensor.name for tensor in stated.inputs]
    call, *_ = load_callable(torch, model, {}, torch.device("cpu"), "fp32", names)
    if isinstance(call, HeldPackage):
        call.check_declared(Path(model), stated)
    least, most = _rows_of(call)
    session = CpuSession(stated, by_name(call, names), False, output_indices)
    found = from_shapes(
        stated.inputs,
        stated.outputs,
        lambda arrays: session.run(arrays, {}),
        stated_rows=min(filter(None, (stated.max_rows, most)), default=0),
        quantises=lambda: _quantises(call),
    )
    return _within(found, least, most)


def _rows_of(call: Callable[..., Any]) -> tuple[int, int]:
    """As `rows_taken`, of what `load_callable` gives."""
    return call.rows() if isinstance(call, HeldPackage) else (0, 0)


def _as_weights(call: Callable[..., Any], value: object) -> object:
    """Floats that come without a datatype, in that of the module's weights; where it has none in FP32, as PyTorch would."""
    if hasattr(value, "dtype") or np.asarray(value).dtype != np.float64:
        return value
    weights = call.parameters() if hasattr(call, "parameters") else ()
    datatype = next((DATATYPES.get(str(weight.dtype)) for weight in weights if weight.is_floating_point()), None)
    return np.asarray(value, NUMPY[datatype or "FP32"])


def _runner(call: Callable[..., Any], order: list[str], others: dict[str, str]) -> Run:
    """others: gets the types of what a mapping has beside tensors, by name."""
    torch = _torch()

    def run(arrays: Tensors) -> Tensors:
        try:
            with torch.inference_mode():
                results = call(*(to_tensor(arrays[name].copy()) for name in order))
                if isinstance(results, Mapping):
                    results, left_out = _parted(results)
                    others.update(left_out)
                return _named(results)
        except BackendError:
            raise
        except Exception as exc:
            raise mapped(exc) from exc

    return run


class _Watched:
    """A module whose runs are watched for what they change in its buffers.

    What the first run writes and all others leave is a memo, as a table of positions, and no state, if other numbers write the
    same: in the end some of the later runs are done once more, with these buffers as they were before the first.
    """

    def __init__(self, run: Run, call: Callable[..., Any]) -> None:
        """call: the module that `run` runs, or a compiled package, which shows no buffers."""
        self._run, self._call = run, call
        self._runs = 0
        self._later: list[Tensors] = []
        self._before = {name: buffer.clone() for name, buffer in self._buffers()}
        self._memos: dict[str, Any] = {}
        self._changed: dict[str, None] = {}

    def run(self, arrays: Tensors) -> Tensors:
        answers = self._run(arrays)
        self._runs += 1
        if 1 < self._runs <= 1 + _RUNS_OF_MEMOS:
            self._later.append(arrays)
        for name, buffer in self._buffers():
            if name not in self._before or _equal(self._memos.get(name, self._before[name]), buffer):
                continue
            if self._runs == 1:
                self._memos[name] = buffer.clone()
            else:
                self._changed[name] = None
        return answers

    def changed(self) -> list[str]:
        """Names. Where there was one run only, what it has changed."""
        if self._runs == 1:
            return list(self._memos)
        for arrays in self._later if self._memos.keys() - self._changed.keys() else ():
            for name in self._memos:
                *owners, leaf = name.split(".")
                setattr(reduce(getattr, owners, self._call), leaf, self._before[name].clone())
            try:
                self._run(arrays)
            except BackendError:  # it knows elsewhere that the memo was written
                continue
            for name, buffer in self._buffers():
                if name in self._memos and not _equal(self._memos[name], buffer) and not _equal(self._before[name], buffer):
                    self._changed[name] = None
        return list(self._changed)

    def _buffers(self) -> Iterable[tuple[str, Any]]:
        return self._call.named_buffers() if hasattr(self._call, "named_buffers") else ()


def _without_changed_buffers(found: Found, changed: list[str]) -> Found:
    """What was found, without batches if the runs that found it have changed a buffer."""
    if not changed:
        return found
    more = f" and {len(changed) - _NAMES} more" if len(changed) > _NAMES else ""
    note = (
        f"its forward changes {', '.join(map(repr, changed[:_NAMES]))}{more}, so what it answers may depend on the requests "
        "and the warm-up before, and each request runs alone; export it in eval mode, or with such state as inputs and outputs"
    )
    return replace(found, max_rows=1 if found.max_rows == 1 else 0, notes=(*found.notes, note))


def _equal(one: Any, other: Any) -> bool:
    """Buffers, where NaN is as good as a number. Those that PyTorch cannot compare count as equal."""
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    try:
        with _torch().inference_mode():  # in which a run may have made them
            return all(
                part.shape == of_other.shape and bool(part.isclose(of_other, rtol=0, atol=0, equal_nan=True).all())
                for part, of_other in zip(_comparable(one), _comparable(other), strict=True)
            )
    except RuntimeError:
        return True


def _comparable(buffer: Any) -> tuple[Any, ...]:
    """Dense tensors that say all that it holds; of a sparse one, which may be far larger when dense, indices and values."""
    if buffer.is_quantized:
        return (buffer.dequantize(),)
    if buffer.layout == _torch().strided:
        return (buffer,)
    sparse = buffer.to_sparse_coo().coalesce()
    return sparse.indices(), sparse.values()


def _quantises(call: Callable[..., Any]) -> bool:
    """Whether Linear or recurrent layers take their scales from all that they are given."""
    return _DYNAMIC.search(str(getattr(call, "inlined_graph", call))) is not None


def forward_arguments(model: str) -> list[Argument]:
    """What the `forward` of a TorchScript file takes, in its order. Raises: LoadFailed."""
    torch = _torch()
    return script_arguments(load_callable(torch, model, {}, torch.device("cpu"), "fp32")[0])


def _torch() -> Any:
    try:
        import torch
    except ImportError as exc:
        raise LoadFailed(f"PyTorch cannot be imported ({exc}): pip install 'serving-gateway[torch]'") from exc
    return torch


def _traced_on(torch: Any, model: str, names: list[str]) -> list[Tensors]:
    """Of the shapes that a module was traced on, which a traced file keeps, drawn numbers, and ones, which most models take.

    None of a scripted one.
    """
    with zipfile.ZipFile(model) as archive:
        if not any("traced_inputs/" in name for name in archive.namelist()):
            return []  # of which PyTorch would warn in words of its own
    module = torch.jit.load(model, map_location="cpu", _restore_shapes=True)
    ones: Tensors = {}
    for name, value in zip(names, list(module.forward.graph.inputs())[1:], strict=True):
        kind = value.type()
        if kind.kind() != "TensorType" or kind.sizes() is None or kind.dtype() is None:
            return []
        ones[name] = to_array(torch.ones(kind.sizes(), dtype=kind.dtype()))
    if not ones or any(array.dtype not in NUMPY.values() for array in ones.values()):
        return [ones] if ones else []
    random = np.random.default_rng(0)
    return [{name: drawn(datatype_of(array), array.shape, random) for name, array in ones.items()}, ones]


def _named(results: Any) -> Tensors:
    """What a module gives, by the names that the backend expects them under. Raises: OutputsRefused, if one is no tensor."""
    if isinstance(results, Mapping):
        named = {str(name): result for name, result in results.items()}
    elif isinstance(results, tuple | list):
        named = dict(zip(fields_of(results) or (f"output_{index}" for index in range(len(results))), results, strict=True))
    else:
        named = {"output": results}
    for name, result in named.items():
        check_tensor(name, result)
    return {name: to_array(tensor) for name, tensor in named.items()}


def _parted(results: Mapping[Any, Any]) -> tuple[Mapping[Any, Any], dict[str, str]]:
    """The tensors of a mapping, and the types of what else is in it. Of one without tensors, all of it and nothing."""
    import torch

    tensors = {name: result for name, result in results.items() if isinstance(result, torch.Tensor)}
    if not tensors:
        return results, {}
    return tensors, {str(name): type(result).__name__ for name, result in results.items() if name not in tensors}


def _of_program(model: str, program: Any) -> Found:
    """Raises: LoadFailed, if its inputs are no flat list of tensors, or its outputs none and no dict of them."""
    from torch.utils._pytree import tree_unflatten

    signature, spec = program.graph_signature, program.call_spec
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    inputs = [TensorSpec(name, *_type(model, name, values.get(name))) for name in signature.user_inputs]
    positional, named = tree_unflatten(list(range(len(inputs))), spec.in_spec)
    if named or list(positional) != list(range(len(inputs))):
        raise LoadFailed(f"{model}: its inputs are nested or by keyword: export a forward whose inputs are tensors by position")
    for index, name in enumerate(signature.user_outputs):
        if name not in values:  # it is what is given itself
            raise LoadFailed(f"{model}: result {index} of `forward` is {name!r}: export a forward that returns tensors only")
    types = [_type(model, name, values.get(name)) for name in signature.user_outputs]
    tree = tree_unflatten(list(range(len(types))), spec.out_spec)
    if isinstance(tree, Mapping) and all(isinstance(index, int) for index in tree.values()):
        names = {index: str(name) for name, index in tree.items()}
    elif tree == 0:
        names = {0: "output"}
    elif isinstance(tree, tuple | list) and list(tree) == list(range(len(types))):
        names = dict(enumerate(fields_of(tree) or (f"output_{index}" for index in range(len(types)))))
    else:
        raise LoadFailed(
            f"{model}: its outputs are nested: export a forward that returns a tensor, a tuple or a dict of tensors"
        )
    outputs = tuple(TensorSpec(names[index], *types[index]) for index in range(len(types)))
    module = program.module()
    watched = _Watched(_runner(module, [tensor.name for tensor in inputs], {}), module)
    least, most = rows_taken(program)
    found = from_shapes(tuple(inputs), outputs, watched.run, stated_rows=most if most < MOST_ROWS else 0)
    return _without_changed_buffers(_within(found, least, most), watched.changed())


def _within(found: Found, least: int, most: int) -> Found:
    """What was found, with the rows that it was exported for. least, most: of them, 0: any."""
    if found.max_rows and least > 1:
        rows = f"{least} to {most} rows" if most else f"{least} rows and more"
        return replace(found, max_rows=0, notes=(f"it was exported for {rows}, so each request runs alone",))
    if found.max_rows > 1 and 0 < most <= found.max_rows:
        return replace(found, max_rows=most, notes=(*found.notes, f"it was exported for {most} rows at most"))
    return found


def _type(model: str, name: str, value: Any) -> tuple[str, tuple[int, ...]]:
    datatype = DATATYPES.get(str(getattr(value, "dtype", None)))
    if datatype is None:
        kind = getattr(value, "dtype", type(value).__name__)
        raise LoadFailed(f"{model}: {name!r} is {kind}, no tensor that the protocol can carry: {', '.join(NUMPY)}")
    return datatype, tuple(size if isinstance(size, int) else -1 for size in value.shape)
