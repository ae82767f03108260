"""Declared tensors, held against what a file or code says of them."""

import difflib
from collections.abc import Iterable, Iterator, Set
from dataclasses import replace

from backends.base import TensorSpec, shape_in_batches, shapes_agree
from backends.datatypes import NUMPY
from backends.mistakes import Mistake, Place, Wanted
from backends.not_known import NOT_KNOWN, as_far_as_known
from backends.onnx_file import way_without


def closed_rows(wanted: Wanted, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> Iterator[Mistake]:
    """A file that takes other batches than are declared. Outputs that are not listed may be as they are."""
    given = _asked_for(wanted, "outputs", outputs)
    odd = {tensor.shape[0] if tensor.shape else None for tensor in (*inputs, *given)} - {-1, wanted.max_rows}
    if wanted.max_rows and odd:
        expected = "an open first dimension in every tensor"
        fixed = next((size for size in odd if size), None)
        remedy = "export the file so" + (f", or set max_rows: {fixed}" if fixed else ", or set max_rows: 0")
        yield Mistake(("max_rows",), f"the file has {_listed((*inputs, *(given or outputs)))}", expected, remedy, of_model=True)


def ranked(found: tuple[TensorSpec, ...], declared: tuple[TensorSpec, ...], unknown: Set[str]) -> tuple[TensorSpec, ...]:
    """What a file has, of which it does not say some ranks: as declared there, else of rows alone. unknown: their names."""
    shapes = {tensor.name: tensor.shape for tensor in declared if tensor.name is not NOT_KNOWN}
    return tuple(replace(t, shape=shapes.get(t.name, (-1,))) if t.name in unknown else t for t in found)


def not_passed(wanted: Wanted, key: str, found: tuple[TensorSpec, ...]) -> Iterator[Mistake]:
    """What ONNX Runtime or the protocol cannot pass, at the tensor where it is listed."""
    listed = [tensor.name for tensor in dict(wanted.tensors)[key]]
    for tensor in _asked_for(wanted, key, found) if key == "outputs" else found:
        if tensor.datatype in NUMPY and (tensor.datatype, wanted.kind) != ("BF16", "onnxruntime"):
            continue
        at: Place = (key, listed.index(tensor.name), "datatype") if tensor.name in listed else ("model",)
        remedy = way_without(tensor.datatype, of_input=key == "inputs")
        yield Mistake(
            at, f"{tensor.name} is {tensor.datatype} in the file, which cannot pass", remedy=remedy, of_model=len(at) > 1
        )


def _asked_for(wanted: Wanted, key: str, found: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Of the file's tensors those that are listed; all where none are."""
    names = [tensor.name for tensor in dict(wanted.tensors)[key] if tensor.name is not NOT_KNOWN]
    return tuple(tensor for tensor in found if not names or tensor.name in names)


def unlike_file(wanted: Wanted, key: str, declared: tuple[TensorSpec, ...], found: tuple[TensorSpec, ...]) -> Iterator[Mistake]:
    """What is declared, and differs from what the file states by name."""
    by_name = {tensor.name: tensor for tensor in found}
    names = [tensor.name for tensor in declared]
    known = [name for name in names if name is not NOT_KNOWN]
    missing = [tensor.name for tensor in found if tensor.name not in known]
    for index, (name, tensor) in enumerate(zip(names, declared, strict=True)):
        if name is NOT_KNOWN:
            continue
        if name in by_name:
            yield from as_far_as_known(unlike(key, index, tensor, by_name[name], wanted.max_rows))
            continue
        near = difflib.get_close_matches(name, missing or by_name, n=1) or missing[:1]
        hint = f"did you mean `{near[0]}`?" if near else f"remove it, or leave out all {key}: they are read from the file"
        expected = f"one of the file's {key}, {', '.join(by_name)}"
        yield Mistake((key, index, "name"), expected=expected, remedy=hint, of_model=True)
    if names and key == "inputs" and len(missing) > sum(name is NOT_KNOWN or name not in by_name for name in names):
        remedy = f"add {', '.join(missing)}, or leave out all inputs: they are read from the file"
        yield Mistake((key,), f"the file also needs {', '.join(missing)}", remedy=remedy, of_model=True)


def unlike(key: str, index: int, ours: TensorSpec, theirs: TensorSpec, max_rows: int, where: str = "file") -> Iterator[Mistake]:
    return as_far_as_known(
        _unlike_datatype((key, index, "datatype"), ours, theirs, where),
        _unlike_shape((key, index, "shape"), ours, theirs, max_rows, where),
    )


def _unlike_datatype(at: Place, ours: TensorSpec, theirs: TensorSpec, where: str) -> Iterator[Mistake]:
    if ours.datatype != theirs.datatype:
        yield Mistake(at, expected=f"{theirs.datatype}, as in the {where}", remedy=f"write {theirs.datatype}", of_model=True)


def _unlike_shape(at: Place, ours: TensorSpec, theirs: TensorSpec, max_rows: int, where: str) -> Iterator[Mistake]:
    shape = shape_in_batches(theirs, max_rows)
    if not shapes_agree(ours.shape, shape):
        remedy = f"write {list(shape)}; -1 stands for any size"
        yield Mistake(at, expected=f"{list(shape)}, as in the {where}", remedy=remedy, of_model=True)


def _listed(tensors: Iterable[TensorSpec]) -> str:
    return ", ".join(f"{tensor.name} {tensor.datatype} {list(tensor.shape)}" for tensor in tensors)


def unlike_program(
    wanted: Wanted, key: str, declared: tuple[TensorSpec, ...], found: tuple[TensorSpec, ...]
) -> Iterator[Mistake]:
    """Held against a file of torch.export by position: names are the configuration's own."""
    if not declared:
        return
    if key == "outputs" and (indices := wanted.options["output_indices"]):
        if len(indices) != len(declared):
            return  # which is told for itself
        for place, index in enumerate(indices):
            if index >= len(found):
                expected = f"0 to {len(found) - 1}, in the order of the file: {_listed(found)}"
                yield Mistake(("output_indices", place), expected=expected)
                return
        found = tuple(found[index] for index in indices)
    if len(found) != len(declared):
        expected = f"{len(found)}, in the order of the file: {_listed(found)}"
        yield Mistake((key,), f"{len(declared)} are listed", expected, f"list all {key}", of_model=True)
        return
    for index, (theirs, ours) in enumerate(zip(found, declared, strict=True)):
        yield from unlike(key, index, ours, theirs, wanted.max_rows)
