"""Another client that takes a region's name while a request runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gateway.engine.repository import Repository


@contextmanager
def registered_anew_meanwhile(repository: Repository, name: str, key: str, byte_size: int) -> Iterator[None]:
    """Whatever is asked of the repository: once it is decoded, and before it runs, the name is another object's."""
    infer = repository.infer

    def meanwhile(*asked: Any) -> Any:
        repository.regions.unregister(name)
        repository.regions.register(name, key, 0, byte_size)
        return infer(*asked)

    repository.infer = meanwhile  # type: ignore[method-assign]  # what it does is the same
    try:
        yield
    finally:
        del repository.infer
