"""What has become of a model on Triton that was loaded there anew, since it was loaded here."""

from collections.abc import Iterator

from backends.base import ModelSpec, TensorSpec


def changes(loaded: ModelSpec, found: ModelSpec) -> list[str]:
    """What makes calls that fit the one not fit the other, in words. An output or optional input more does not."""
    return [
        *_tensors("input", loaded.inputs, found.inputs),
        *_tensors("output", loaded.outputs, tuple(tensor for tensor in found.outputs if tensor.name in loaded.output_by_name)),
        *([f"it takes {found.max_rows} rows at most, and took {loaded.max_rows}"] if found.max_rows < loaded.max_rows else ()),
        *(
            ["it answers in parts now, and did not" if found.decoupled else "it answers in parts no more"]
            if found.decoupled != loaded.decoupled
            else ()
        ),
    ]


def _tensors(what: str, loaded: tuple[TensorSpec, ...], found: tuple[TensorSpec, ...]) -> Iterator[str]:
    before, now = ({tensor.name: tensor for tensor in tensors} for tensors in (loaded, found))
    for name in {**before, **now}:
        was, is_ = before.get(name), now.get(name)
        if was != is_ and not (was is None and is_ is not None and is_.optional):
            yield f"{what} {name!r} is {_shown(is_)}, and was {_shown(was)}"


def _shown(tensor: TensorSpec | None) -> str:
    if tensor is None:
        return "missing"
    return f"{'optional ' if tensor.optional else ''}{tensor.datatype} {list(tensor.shape)}"
