"""What the user's own class or function takes and gives, and whether its rows share a batch: `backends.python` serves it.

A class that states all its tensors is not made here: some may be made only once in a process, as they take a port, a lock or a
name among metrics. A function that does is run, on rows that it may not be meant for: so not for long, and on a copy of this
process, where it may be in the middle of its first call, which loads its model.
"""

import inspect
import json
import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any, Final

import numpy as np

from backends.base import NO_OPTIONS, BackendError, ExecutionFailed, LoadFailed, ModelSpec, Tensors, TensorSpec, words_of
from backends.company import MOST_ROWS
from backends.copied_process import CopyFailed, in_copy
from backends.datatypes import NUMPY, as_requested, normalised, of_floats
from backends.discovery import Found, from_example, from_ones, from_shapes, untried
from backends.early_failure import EarlyFailure
from backends.python import PythonModel, PythonSession, called_as, hinted_by, load_code, stated_by
from backends.signatures import ANY_OUTPUT, FORM
from backends.source import example_of

_EXACT: Final = 1 << 53  # FP64 has all whole numbers up to that
_LIMIT_S: Final = 5.0  # by the clock, for trying the rows of a function: on drawn numbers its loops may have no end
_OF_CLASS: Final = untried("as it is a class", "mark it with @gateway.model(max_rows=0)")
_OF_INT8: Final = (
    "an int8 model shows the same where its scales are those of the batch: if nothing else changes its answers, set "
    f"max_rows: {MOST_ROWS}"
)
_UNKNOWN: Final = ModelSpec("python", (), (), 0)


def read(
    *,
    model: str,
    example: Mapping[str, object] | None = None,
    try_rows: bool = True,
    class_options: Mapping[str, Any] = NO_OPTIONS,
) -> Found:
    """What the class or function takes and gives: stated by it, told by its type hints, or seen by running it.

    example: one request; None: the attribute `example` of the class, the function or its module, if there is one. try_rows:
    False: somebody knows whether they are independent, and what states its inputs and outputs is not run.
    Raises: LoadFailed, with what to write where that does not suffice.
    """
    code = load_code(model)
    of_class = inspect.isclass(code)
    signature = called_as(model, code)
    inputs = stated_by(model, code, "inputs") or hinted_by(model, signature, "inputs")
    stated = stated_by(model, code, "outputs") or ()
    outputs = stated or hinted_by(model, signature, "outputs")
    notes = (f"no inputs, as they have a default: {', '.join(signature.defaults)}",) if signature.defaults else ()
    of_rows = signature.style == "rows"
    try_rows = try_rows and not of_rows and not signature.in_parts  # else no call has rows of several requests
    if inputs and outputs:
        found = from_shapes(inputs, outputs)
        found = replace(found, notes=found.notes + notes)
        if of_rows and signature.in_parts:
            return replace(found, max_rows=min(found.max_rows, 1))
        if not try_rows or found.max_rows <= 1:
            return found
        if of_class:
            return replace(found, notes=(_OF_CLASS, *found.notes))
        if example is None:
            example = example_of(model, code, {tensor.name for tensor in inputs})
        return _of_function(PythonSession(code, None, signature, _UNKNOWN), found, example)
    if example is None:
        example = example_of(model, code)
    signature = called_as(model, code, example or ())
    given = _as_said({name: hint.datatype for name, hint in signature.inputs.items() if hint}, example)
    if given is None and not inputs:
        shapeless = [name for name, hint in signature.inputs.items() if hint is not None and hint.shape is None]
        if shapeless:
            raise LoadFailed(
                f"{model}: the type hint of {', '.join(shapeless)} says no shape: write one, {FORM}, or give `predict` an "
                "`example` beside it, a dict of one array for each input"
            )
        raise LoadFailed(
            f"{model}: {signature.untold or 'nothing says its inputs'}: give `predict` type hints, {FORM} of a batch or "
            "`text: str` of one row, or beside it an `example`, a dict of one array for each input"
        )
    session = PythonModel(model, _UNKNOWN, code, dict(class_options), signature).open_session(0)
    fractions: set[str] = set()  # outputs that had some in a run

    def run(arrays: Tensors) -> Tensors:
        try:
            outputs = run_once(arrays)
        except SystemExit as exc:  # it may end with sys.exit()
            raise ExecutionFailed(words_of(exc, traced=True)) from exc
        floats = {name: array for name, array in outputs.items() if getattr(array, "dtype", None) == np.float64}
        fractions.update(name for name, array in floats.items() if (array != np.floor(array)).any())
        return outputs

    def run_once(arrays: Tensors) -> Tensors:
        arrays = {name: array.copy() for name, array in arrays.items()}  # which are needed again
        if not signature.in_parts:
            return session.run(arrays, {})
        with closing(session.stream(arrays, {})) as parts:
            first = next(parts, None)
        if first is None:
            raise ExecutionFailed("predict yielded nothing")
        if isinstance(first, EarlyFailure):
            raise first.error
        return first

    try:
        if given is not None:
            if of_rows:
                given = {name: np.atleast_1d(value) for name, value in given.items()}
            given = as_requested(given)
            found = from_example(run, given, of_lists=signature.of_lists, stated=inputs)
            whole = [tensor for tensor in found.outputs if tensor.datatype == "INT64" and tensor.name in fractions]
            if whole and signature.style != "dict":
                # A list is of the floats that are declared, also where all are whole; an array is of what it says.
                floats = {tensor.name: replace(tensor, datatype="FP64") for tensor in whole}
                session.declare({**{tensor.name: tensor for tensor in found.outputs}, **floats})
                made = {name: array for name, array in run(given).items() if name in floats and of_floats(array)}
                floats = {name: floats[name] for name, array in made.items() if not (np.abs(array) > _EXACT).any()}
                found = replace(found, outputs=tuple(floats.get(tensor.name, tensor) for tensor in found.outputs))
        else:
            assert inputs is not None  # as just seen
            one_row = signature.in_parts and of_rows
            found = from_ones(run, inputs, max_rows=1 if one_row else MOST_ROWS, of_lists=signature.of_lists)
            if try_rows and found.max_rows > 1:
                found = replace(found, notes=(_OF_CLASS, *found.notes)) if of_class else _of_function(session, found)
        hinted = {name: hint.datatype for name, hint in (signature.outputs or {}).items() if hint.datatype}
        outputs = tuple(replace(t, datatype=hinted.get(t.name, t.datatype)) for t in found.outputs)
        if signature.in_parts:  # the first part says nothing of the sizes of others
            sizes = {name: hint.shape for name, hint in (signature.outputs or {}).items()} | {t.name: t.shape for t in stated}
            of_lists = {name: hint.shape for name, hint in signature.of_lists.items()}

            def sized(tensor: TensorSpec) -> tuple[int, ...]:
                of_list = of_lists.get(tensor.name) or of_lists.get(ANY_OUTPUT) or ()
                seen = of_list if len(of_list) == len(tensor.shape) else (-1,) * len(tensor.shape)
                return sizes.get(tensor.name) or sizes.get(ANY_OUTPUT) or seen

            outputs = tuple(replace(tensor, shape=sized(tensor)) for tensor in outputs)
        return replace(found, outputs=outputs, notes=found.notes + notes)
    except BackendError as exc:
        raise LoadFailed(f"{model}: {exc}") from exc
    finally:
        session.close()


def _of_function(session: PythonSession, found: Found, example: Mapping[str, object] | None = None) -> Found:
    """What is found of a function whose tensors are known, with whether its rows share a batch, tried on those of the example.

    example: None: they are drawn.
    """
    rows_of = "drawn ones" if example is None else "those of its example"
    differ_alone = False

    def quantises() -> bool:  # asked only where a row alone is answered otherwise than in any batch
        nonlocal differ_alone
        differ_alone = True
        return False

    def run(arrays: Tensors) -> Tensors:
        try:
            return normalised(session.run({name: array.copy() for name, array in arrays.items()}, {}))
        except SystemExit as exc:
            raise ExecutionFailed(words_of(exc)) from exc

    def tried() -> str:
        given = _as_said({tensor.name: tensor.datatype for tensor in found.inputs}, example)
        if given is None:
            shown = from_shapes(found.inputs, found.outputs, run, network=False, quantises=quantises)
        else:
            shown = from_example(run, given, stated=found.inputs, outputs_stated=found.outputs, quantises=quantises)
        return json.dumps([asdict(shown), differ_alone])

    if threading.current_thread() is not threading.main_thread():
        why = "as that is done in the main thread only"
    else:
        try:
            told = in_copy(tried, _LIMIT_S)
        except CopyFailed:  # whatever it makes of these rows
            why = f"as it fails on {rows_of}"
        else:
            if told is not None:
                plain, alone = json.loads(told)
                of_int8 = (_OF_INT8,) if alone and not plain["max_rows"] else ()
                inputs, outputs = (tuple(TensorSpec(**_fixed(each)) for each in plain[key]) for key in ("inputs", "outputs"))
                return Found(inputs, outputs, plain["max_rows"], (*found.notes, *plain["notes"], *of_int8))
            why = f"as it does not end on {rows_of} in {_LIMIT_S:g} s"
    return replace(found, notes=(*found.notes, untried(why)))


def _fixed(plain: Mapping[str, Any]) -> dict[str, Any]:
    """With tuples in the place of lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in plain.items()}


def _as_said(said: Mapping[str, str | None], example: Mapping[str, object] | None) -> Tensors | None:
    """An example in the datatypes that the type hints or the stated tensors say."""
    if example is None:
        return None
    dtypes = {name: NUMPY[datatype] for name, datatype in said.items() if datatype and datatype != "BYTES"}
    return normalised({name: np.asarray(value, dtypes[name]) if name in dtypes else value for name, value in example.items()})
