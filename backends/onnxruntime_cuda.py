"""Runs of an ONNX Runtime session on CUDA: plain, or as recorded CUDA graphs, one per batch shape over tensors that stay.

Source: ONNX Runtime's documentation of its CUDA execution provider (`enable_cuda_graph`, the run option `gpu_graph_id`).
"""

import logging
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from backends.base import Tensors, words_of
from backends.cuda_graphs import MOST_GRAPHS, recording, running

_UNRECORDED: Final = -1

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _BoundGraph:
    """inputs, outputs: OrtValues, bound for good. options: name the graph."""

    binding: Any
    inputs: dict[str, Any]
    outputs: list[Any]
    options: Any


class PlainRuns:
    """In place of `InferenceSession.run`, for one session."""

    def __init__(self, session: Any, names: list[str]) -> None:
        """names: of the outputs."""
        self._session = session
        self._names = names

    def run(self, feeds: Tensors) -> list[np.ndarray]:
        """The outputs in order of their names. Raises: what ONNX Runtime raises."""
        with running():
            results: list[np.ndarray] = self._session.run(self._names, feeds)
            return results


class GraphRuns:
    """In place of `InferenceSession.run`, for one session. The shapes of the outputs must follow from those of the inputs."""

    def __init__(self, session: Any, names: list[str], device: str = "cuda") -> None:
        """session: opened with `enable_cuda_graph`. names: of the outputs."""
        self._session = session
        self._names = names
        self._device = device
        self._graphs: dict[Hashable, _BoundGraph | None] = {}  # by shapes; None: they could not be recorded
        self._unrecorded = _options(_UNRECORDED)

    def run(self, feeds: Tensors) -> list[np.ndarray]:
        """The outputs in order of their names. The first run of a shape records it. Raises: what ONNX Runtime raises."""
        shapes = tuple((name, array.shape) for name, array in sorted(feeds.items()))
        graph = self._graphs.get(shapes)
        if graph is None:
            with running():
                results: list[np.ndarray] = self._session.run(self._names, feeds, self._unrecorded)
            if shapes not in self._graphs and len(self._graphs) < MOST_GRAPHS:
                with recording() as alone:
                    if alone:
                        self._graphs[shapes] = self._recorded(feeds, results)
            return results
        with running():
            for name, array in feeds.items():
                graph.inputs[name].update_inplace(np.ascontiguousarray(array))
            self._session.run_with_iobinding(graph.binding, graph.options)
            return [value.numpy() for value in graph.outputs]

    def _recorded(self, feeds: Tensors, results: list[np.ndarray]) -> _BoundGraph | None:
        """None, and a warning, if it fails: the batch has its answer, and the next run tells whether the device is lost."""
        try:
            graph = self._bind(feeds, results)
            self._session.run_with_iobinding(graph.binding, graph.options)
            return graph
        except Exception as exc:
            shapes = {name: list(array.shape) for name, array in feeds.items()}
            log.warning("batches of %s stay unrecorded, and are slower: %s", shapes, words_of(exc))
            return None

    def _bind(self, feeds: Tensors, results: list[np.ndarray]) -> _BoundGraph:
        from onnxruntime import OrtValue

        binding = self._session.io_binding()
        inputs = {
            name: OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), self._device, 0) for name, array in feeds.items()
        }
        outputs = [OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype, self._device, 0) for array in results]
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in zip(self._names, outputs, strict=True):
            binding.bind_ortvalue_output(name, value)
        return _BoundGraph(binding, inputs, outputs, _options(len(self._graphs) + 1))


def _options(graph: int) -> Any:
    from onnxruntime import RunOptions

    options = RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph))
    return options
