"""What of a configuration only Ray can do, so who starts a gateway can choose or refuse."""

from gateway.config import Config
from gateway.configuring.ingresses import side_by_side
from gateway.errors import ConfigError


def need_of_ray(config: Config) -> tuple[str, str]:
    """What of a configuration only Ray can do, and what to write instead of it; two empty texts: nothing."""
    if config.server.ingresses > 1 and not side_by_side(config):
        return f"server.ingress_replicas is {config.server.ingresses}", "set server.ingress_replicas: 1"
    for model in config.models:
        for backend in model.backends:
            if backend.placement == "replicas":
                return f"model '{model.name}': backend {backend.label} has placement replicas", "set placement: embedded"
    return "", ""


def uses_ray(config: Config, *, asked: bool, refused: bool) -> bool:
    """asked, refused: by who starts the gateway. Raises: ConfigError, if it is refused and the configuration needs it."""
    need, instead = need_of_ray(config)
    if refused and need:
        raise ConfigError(f"{need}, which needs Ray: start without --no-ray, or {instead}")
    return not refused and (asked or bool(need) or config.ray.address is not None)
