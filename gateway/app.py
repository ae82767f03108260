"""The gateway as an application of Ray Serve's own configuration files, `import_path: gateway.app:build`.

See configs/examples/serve.yaml and docs/deploy.md.
"""

from ray import serve

from gateway.cluster import application
from gateway.config import load_config, parse_config


def build(args: dict[str, object]) -> serve.Application:
    """args: {config: path of a configuration file on the node that builds} or the keys of such a file themselves.

    Raises: ConfigError.
    """
    if set(args) == {"config"}:
        return application(load_config(str(args["config"])))
    return application(parse_config(args, source="args"))
