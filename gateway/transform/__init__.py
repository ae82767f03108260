"""`gateway batch`: files of rows through a model of this process, each row once, to be gone on with where it was broken off."""

from gateway.errors import ConfigError

try:
    import pyarrow  # noqa: F401  # which the modules here begin with
except ImportError as exc:
    raise ConfigError(f"pyarrow cannot be imported ({exc}): pip install 'serving-gateway[batch]'") from exc
