"""Why a model does not take a request, by the names that whoever runs its sessions has for it."""

from typing import Literal

Refusal = Literal[
    "invalid_argument",
    "unsupported_media_type",  # of the content, or that is asked for
    "not_found",
    "already_exists",
    "unsupported",
    "cancelled",
    "limited",  # who asks has asked as much as he may
    "backend_unreachable",  # not now, or not here: another backend may take it
]
