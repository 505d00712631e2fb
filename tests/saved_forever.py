"""Saves a model with equal weights, whose value increases, until the process is killed.

Usage: python -m tests.saved_forever FOLDER
"""

import itertools
import pathlib
import sys

import numpy as np

from tests.models.tiny import tiny_causal_lm

if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    model = tiny_causal_lm(family="hgrn2", vocabulary_size=259)
    for value in itertools.count():
        for weight in model.weights:
            weight.assign(np.full(weight.shape, value % 100))
        model.save_to_preset(folder / "preset")
        model.save(folder / "model.keras")
        print(value, flush=True)
