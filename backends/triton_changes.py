"""What has become of a model on Triton that was loaded there anew, since it was loaded here."""

from collections.abc import Iterable, Iterator

from backends.base import ModelSpec, TensorSpec, agree


def changes(loaded: ModelSpec, found: ModelSpec) -> list[str]:
    """What makes calls or answers that fit the one not fit the other, in words. An output or optional input more does not."""
    return [
        *_tensors("input", loaded.inputs, found.inputs),
        *_tensors("output", loaded.outputs, (tensor for tensor in found.outputs if tensor.name in loaded.output_by_name)),
        *_rows(loaded.max_rows, found.max_rows),
        *(
            ["it answers in parts now, and did not" if found.decoupled else "it answers in parts no more"]
            if found.decoupled != loaded.decoupled
            else ()
        ),
    ]


def _tensors(what: str, loaded: Iterable[TensorSpec], found: Iterable[TensorSpec]) -> Iterator[str]:
    before, now = ({tensor.name: tensor for tensor in tensors} for tensors in (loaded, found))
    for name in {**before, **now}:
        was, is_ = before.get(name), now.get(name)
        if was is None or is_ is None:
            fits = is_ is not None and is_.optional
        else:
            fits = _holds(is_, was) if what == "input" else agree(was, is_)  # each answer is held against what it was
        if not fits:
            yield f"{what} {name!r} is {_shown(is_)}, and was {_shown(was)}"


def _holds(wide: TensorSpec, narrow: TensorSpec) -> bool:
    """Whether each tensor that fits the one fits the other: an open size holds any."""
    if (wide.datatype, len(wide.shape)) != (narrow.datatype, len(narrow.shape)):
        return False
    sizes = zip(wide.shape, narrow.shape, strict=True)
    return wide.optional >= narrow.optional and all(held in (-1, size) for held, size in sizes)


def _rows(loaded: int, found: int) -> Iterator[str]:
    if bool(loaded) != bool(found):
        yield "it has a batch dimension now, and had none" if found else "it has no batch dimension any more"
    elif found < loaded:
        yield f"it takes {found} rows at most, and took {loaded}"


def _shown(tensor: TensorSpec | None) -> str:
    if tensor is None:
        return "missing"
    return f"{'optional ' if tensor.optional else ''}{tensor.datatype} {list(tensor.shape)}"
