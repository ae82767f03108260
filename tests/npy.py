"""Arrays as `.npy` files have them."""

import io
from typing import Any

import numpy as np


def npy(array: np.ndarray, **options: Any) -> bytes:
    """options: of np.save."""
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()
