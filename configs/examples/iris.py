"""Irises by four measurements: a model of one's own that needs nothing but numpy."""

import numpy as np

SPECIES = np.array([b"setosa", b"versicolor", b"virginica"])

# Logistic regression on the 150 irises of Fisher (1936), fitted by scikit-learn: right for 146 of them.
WEIGHTS = np.array([[-0.42, 0.97, -2.52, -1.08], [0.53, -0.32, -0.20, -0.94], [-0.11, -0.65, 2.72, 2.03]], np.float32)
BIAS = np.array([9.84, 2.22, -12.07], np.float32)


class Iris:
    """Length and width of sepal and petal in cm in, the species and how sure that is out."""

    inputs = (("measurements", "FP32", (-1, 4)),)
    outputs = (("species", "BYTES", (-1, 1)), ("probability", "FP32", (-1, 1)))

    def predict(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """All arrays have a row for each flower, whatever requests they came with."""
        scores = inputs["measurements"] @ WEIGHTS.T + BIAS
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        return {
            "species": SPECIES[odds.argmax(axis=1, keepdims=True)].astype(object),
            "probability": odds.max(axis=1, keepdims=True) / odds.sum(axis=1, keepdims=True),
        }
