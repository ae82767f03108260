"""What PyTorch chooses as it exports and compiles, chosen otherwise here.

- Bounds that it sets to open sizes for choices of its own, where all sizes are right with what it chose, are left out.
- A loop that checks an index runs on one thread: what it raises on one of several ends the process.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import _C as core
from torch._inductor.codegen.cpp import CppKernel, KernelGroup
from torch._inductor.virtualized import V

from backends.aot_inductor import on_one_thread


def _choice_of_convolution(choose: Callable[..., Any]) -> Callable[..., Any]:
    """ATen's code for a convolution depends on its rows: torch/_subclasses/fake_impls.py, line 1811, which takes no more of it
    than how the result lies in memory."""

    def unbounded_choice(given: torch.Tensor, *rest: Any, **named: Any) -> Any:
        sizes: Iterable[Any] = given.shape
        open_size = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
        with open_size.node.shape_env.suppress_guards() if open_size is not None else contextlib.nullcontext():
            return choose(given, *rest, **named)

    return unbounded_choice


def _choice_of_sum(in_parts: Callable[..., Any]) -> Callable[..., Any]:
    """Floats are summed in parts if they are more than 4096: torch/_inductor/codegen/cpp.py, line 2273."""

    def unbounded_choice(kernel: CppKernel, *rest: Any) -> Any:
        with V.graph.sizevars.shape_env.suppress_guards():
            return in_parts(kernel, *rest)

    return unbounded_choice


def _choice_of_threads(generate: Callable[..., str]) -> Callable[..., str]:
    """Of a kernel's C++: torch/_inductor/codegen/cpp.py, line 5759."""
    return lambda group, *rest: on_one_thread(generate(group, *rest))


_CHOICES: Final = (
    (core, "_select_conv_backend", _choice_of_convolution),
    (CppKernel, "need_use_acc_helper", _choice_of_sum),
    (KernelGroup, "codegen_group", _choice_of_threads),
)


@contextlib.contextmanager
def own_choices() -> Iterator[None]:
    """Around an export and its compilation, one at a time in a process. (torch 2.13)"""
    with contextlib.ExitStack() as stack:
        for owner, name, own_choice in _CHOICES:
            choose = getattr(owner, name)
            stack.callback(setattr, owner, name, choose)
            setattr(owner, name, own_choice(choose))
        yield
