"""`gateway serve`: in one plain process, in several, or on Ray where that is needed or asked for."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from gateway.commands.one_process import MakeMultiModel, run
from gateway.config import Backend, Config, Neuron
from gateway.garbage import leave_out
from gateway.process.announcement import announcer
from gateway.process.console import Speech
from gateway.process.prints import apart
from gateway.process.run_dir import forget_regions, fresh_run_dir, make_run_dir


def serve(config: Config, *, on_ray: bool, speech: Speech, multi_model: MakeMultiModel = None) -> int:
    """Serve until a signal ends it. Call on the main thread. Returns the exit code. Raises: GatewayError, OSError.

    multi_model: makes what SageMaker loads and unloads by, not on Ray; None: it does not.
    """
    if on_ray:
        from gateway.commands.on_ray import serve_on_ray  # with what a command line needs, which `gateway.run` does without

        return serve_on_ray(config, speech)
    own = config.server.run_dir
    with contextlib.nullcontext(own) if own else fresh_run_dir() as directory:
        run_dir = Path(directory)
        make_run_dir(run_dir)
        forget_regions(run_dir)
        if config.server.ingresses > 1:
            from gateway.commands.side_by_side import serve_side_by_side

            return serve_side_by_side(config, speech, run_dir)
        take_neuron_cores(b for model in config.models for b in model.backends if b.placement == "embedded")
        with apart() as results:
            run(config, run_dir, announcer(config, results, quiet=speech.quiet), multi_model=multi_model)
    leave_out()  # at its end the interpreter would go through all that was loaded: with PyTorch for over a second
    return 0


def take_neuron_cores(backends: Iterable[Backend]) -> None:
    """A core for each session of these, which this process opens, unless somebody has said which are ours, or how many.

    The runtime, told nothing, takes all of the machine. Where only the number was said, the backend refuses: of that many, the
    runtime takes any.
    """
    here = list(backends)
    if any(isinstance(backend, Neuron) for backend in here):
        from backends.neuron import NUM_CORES, VISIBLE_CORES
        from gateway.deploying.needs import neuron_cores_of  # which most processes do without

        if NUM_CORES not in os.environ:
            last = sum(map(neuron_cores_of, here)) - 1
            os.environ.setdefault(VISIBLE_CORES, f"0-{last}" if last else "0")
