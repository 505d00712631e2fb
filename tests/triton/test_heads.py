"""Heads of the sizes that models have, in every configuration that a search may choose.

Only on a GPU: the tests show whether they are compiled correctly.
"""

import keras
import pytest

if keras.config.backend() != "torch":
    pytest.skip("runs on torch", allow_module_level=True)

import torch

if not torch.cuda.is_available():
    pytest.skip("compiles for a GPU", allow_module_level=True)

from keras_recurrent.backends.triton._runtime import search
from tests.ops import judge
from tests.ops.cases import Case, draw

HEADS = [(16, 16), (64, 64), (96, 96), (128, 128), (64, 128), (256, 256), (64, 66), (130, 136)]
MOST_CANDIDATES = 5
OPERATIONS = ["gated_linear_attention", "lightning_attention", "sliding_window_attention"]
# The dtypes of the tensors and of their decays, and whether the tokens have kinds.
SITUATIONS = [
    ("bfloat16", "bfloat16", True),
    ("bfloat16", "bfloat16", False),
    ("bfloat16", "float32", True),
    ("bfloat16", "float32", False),
    ("float32", "float32", True),
]


@pytest.mark.parametrize("number", range(MOST_CANDIDATES))
@pytest.mark.parametrize("situation", SITUATIONS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_heads(operation, heads, situation, number, monkeypatch):
    taken = 0  # the largest number of a candidate

    def run(kernel, candidates, launch, tensors, sizes):
        nonlocal taken
        chosen = min(number, len(candidates) - 1)
        taken = max(taken, chosen)
        try:
            return launch(candidates[chosen])
        except search._OUT_OF_RESOURCES:  # a search would not choose it
            return launch(candidates[0])

    monkeypatch.setattr(search, "run", run)
    keys, values = heads
    dtype, decay_dtype, kinds = situation
    # Long enough to be cut along time, where that does not take the reference too long.
    length = 1040 if keys <= 64 else 140
    case = Case(
        *(1, length, keys, dtype, decay_dtype),
        kinds=kinds,
        state=kinds,
        window=100,
        values=values,
    )
    judge.check(operation, "triton", draw(operation, case))
    if taken < number:
        pytest.skip("no kernel has so many candidates")
