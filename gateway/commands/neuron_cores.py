"""Which NeuronCores a process without Ray takes: the runtime, told nothing, takes all of the machine."""

import os
from collections.abc import Iterable

from gateway.config import Backend, Neuron


def take_neuron_cores(backends: Iterable[Backend]) -> None:
    """A core for each session of these, which this process opens, unless somebody has said which are ours, or how many.

    Where only the number was said, the backend refuses: of that many, the runtime takes any.
    """
    here = list(backends)
    if any(isinstance(backend, Neuron) for backend in here):
        from backends.neuron import NUM_CORES, VISIBLE_CORES
        from gateway.deploying.needs import neuron_cores_of  # which most processes do without

        if NUM_CORES not in os.environ:
            last = sum(map(neuron_cores_of, here)) - 1
            os.environ.setdefault(VISIBLE_CORES, f"0-{last}" if last else "0")
