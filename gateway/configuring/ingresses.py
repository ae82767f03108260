"""How many processes listen where the configuration leaves that to the machine, and whether they can do without Ray."""

from typing import Final

from gateway.config import Config

_CORES_EACH: Final = 2  # the other is for what runs beside it: replicas, a Triton, the kernel's part of a request
_MOST: Final = 16


def decided(config: Config, cores: int) -> Config:
    """The same with a number in place of `server.ingress_replicas: auto`. cores: of the machine that serves.

    One for every two cores, and one where a model runs in the ingresses: each would have it, its memory and its threads.
    """
    if config.server.ingress_replicas != "auto":
        return config
    number = 1 if _computes_here(config) else min(_MOST, max(1, cores // _CORES_EACH))
    return config.model_copy(update={"server": config.server.model_copy(update={"ingress_replicas": number})})


def side_by_side(config: Config) -> bool:
    """Whether several processes are asked for that need no Ray: all models are on servers elsewhere, and stay as they are."""
    placements = {backend.placement for model in config.models for backend in model.backends}
    without = "replicas" not in placements and not _computes_here(config) and not config.server.model_control
    return config.server.ingresses > 1 and without


def _computes_here(config: Config) -> bool:
    return any(
        backend.placement == "embedded" and backend.computes_here for model in config.models for backend in model.backends
    )
