"""Why an answer in parts has no more of them, told while its model still works."""

from backends.base import Tensors


class EarlyFailure(Tensors):
    """In a part's place, the last thing that a `StreamingSession` gives: whoever asks for more waits until the model has ended.

    error: which the session raises then; for it that is a BackendError that leaves it alive, from its worker on a GatewayError.
    first_part_ns: told by its worker, as of the `Execution`.
    """

    def __init__(self, error: Exception, first_part_ns: int | None = None) -> None:
        super().__init__()
        self.error = error
        self.first_part_ns = first_part_ns
