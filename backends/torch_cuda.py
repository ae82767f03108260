"""Sessions of a PyTorch module on a CUDA device: a stream and pinned staging buffers each, and recorded graphs per batch shape.

Life of a run: array -> pinned buffer -> device (its own stream) -> module, or replay of its graph -> pinned output -> array.
Only the last step waits, so k sessions overlap copies with each other's kernels.
Run on an H200 with torch 2.11 (2026-11): docs/backends.md.
"""

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from backends.base import BackendError, ExecutionFailed, ModelSpec, SessionLost, Tensors
from backends.cuda_graphs import MOST_GRAPHS, capturing, running
from backends.torch_tensors import mapped, ordered_outputs, to_array, to_tensor

_WARM_RUNS: Final = 2  # before a capture: lazy initialisation (cuBLAS handles, autotuning) must not be recorded


@dataclass(frozen=True, slots=True)
class _TorchGraph:
    """A recorded run: inputs are copied into `arguments`, and results appear in `results`."""

    graph: torch.cuda.CUDAGraph
    arguments: list[torch.Tensor | None]
    results: list[torch.Tensor]


class CudaSession:
    def __init__(
        self,
        spec: ModelSpec,
        call: Callable[..., Any],
        device: torch.device,
        *,
        autocast: bool,
        graphs: bool,
        output_indices: Sequence[int],
    ) -> None:
        self._spec = spec
        self._output_indices = output_indices
        self._call: Callable[..., Any] | None = call
        self._device = device
        self._autocast = autocast
        self._records = graphs
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch 2.13
        self._pool = torch.cuda.graph_pool_handle() if graphs else None
        self._graphs: dict[Hashable, _TorchGraph] = {}
        self._staging: dict[str, torch.Tensor] = {}  # pinned bytes by input, grown as needed

    def run(self, inputs: Tensors, parameters: Mapping[str, object]) -> Tensors:
        if self._call is None:
            raise SessionLost("the session is closed")
        precision = (
            torch.autocast("cuda", torch.bfloat16, cache_enabled=not self._records)
            if self._autocast
            else contextlib.nullcontext()
        )
        try:
            with running(), torch.cuda.device(self._device), torch.cuda.stream(self._stream), torch.inference_mode(), precision:
                staged = [self._staged(tensor.name, inputs.get(tensor.name)) for tensor in self._spec.inputs]
                results = self._replayed(staged) if self._records else self._called(self._call, staged)
                pinned = [torch.empty(result.shape, dtype=result.dtype, pin_memory=True) for result in results]
                for target, result in zip(pinned, results, strict=True):
                    target.copy_(result, non_blocking=True)
                self._stream.synchronize()
                return {tensor.name: to_array(result) for tensor, result in zip(self._spec.outputs, pinned, strict=True)}
        except BackendError:
            raise
        except Exception as exc:
            raise mapped(exc) from exc

    def close(self) -> None:
        with running():
            self._call = None
            self._graphs.clear()
            self._staging.clear()

    def _staged(self, name: str, array: Any) -> torch.Tensor | None:
        """The array in pinned memory. The buffer is free again once the stream was waited for, which every run does."""
        if array is None:
            return None
        source = to_tensor(array)
        needed = source.numel() * source.element_size()
        buffer = self._staging.get(name)
        if buffer is None or buffer.numel() < needed:
            buffer = self._staging[name] = torch.empty(max(needed, 1), dtype=torch.uint8, pin_memory=True)
        pinned = buffer[:needed].view(source.dtype).view(source.shape)
        pinned.copy_(source)
        return pinned

    def _called(self, call: Callable[..., Any], staged: list[torch.Tensor | None]) -> list[torch.Tensor]:
        arguments = [None if tensor is None else tensor.to(self._device, non_blocking=True) for tensor in staged]
        return ordered_outputs(self._spec, call(*arguments), self._output_indices)

    def _replayed(self, staged: list[torch.Tensor | None]) -> list[torch.Tensor]:
        assert self._call is not None
        key = tuple(None if tensor is None else tensor.shape for tensor in staged)
        recorded = self._graphs.get(key)
        if recorded is None:
            if len(self._graphs) == MOST_GRAPHS:
                return self._called(self._call, staged)
            recorded = self._graphs[key] = self._recorded(self._call, staged)
        for argument, tensor in zip(recorded.arguments, staged, strict=True):
            if argument is not None and tensor is not None:
                argument.copy_(tensor, non_blocking=True)
        recorded.graph.replay()
        return recorded.results

    def _recorded(self, call: Callable[..., Any], staged: list[torch.Tensor | None]) -> _TorchGraph:
        arguments = [None if tensor is None else tensor.to(self._device) for tensor in staged]
        with capturing:
            for _ in range(_WARM_RUNS):
                call(*arguments)
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # thread_local: other sessions go on working while this one captures.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                results = ordered_outputs(self._spec, call(*arguments), self._output_indices)
        if any(result.device.type != "cuda" for result in results):
            raise ExecutionFailed("the module gives outputs on the CPU, which no CUDA graph can: set cuda_graphs to false")
        return _TorchGraph(graph, arguments, results)
