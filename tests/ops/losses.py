"""Random inputs of `linear_crossentropy`: `CASES` has situations, `draw` makes the inputs."""

from typing import NamedTuple

import numpy as np

from tests.ops.cases import Drawn, round_to


class Case(NamedTuple):
    shape: tuple  # of the tokens
    width: int = 5
    vocabulary: int = 11
    dtype: str = "float32"
    weighted: bool = True
    soft_cap: float | None = None
    scale: float = 1.0
    growing: bool = False  # Logits grow along the vocabulary until exponentials overflow.
    reduction: str | None = "sum"


CASES = {
    "one token": Case((), weighted=False),
    "a vector": Case((7,), vocabulary=1),
    "rows": Case((3, 13)),
    "four axes, a cap": Case((2, 1, 6), soft_cap=3.0),
    # With large logits, the rounding of a single one would exceed all other errors.
    "wide": Case((2, 9), 40, 300, weighted=False, scale=0.3),
    "large logits": Case((2, 9), scale=300.0),
    "large logits, a cap": Case((2, 9), scale=30.0, soft_cap=30.0),
    "bfloat16": Case((2, 13), 24, 70, "bfloat16", soft_cap=30.0),
    "float16": Case((2, 5), dtype="float16"),
    "float64": Case((2, 5), dtype="float64", soft_cap=2.0),
    # A kernel computes these in tiles of the vocabulary, whose largest logits grow.
    "growing logits": Case((3,), 6, 20_000, growing=True),
    "many words, a cap, bfloat16": Case((3,), 6, 8192, "bfloat16", soft_cap=5.0),
    "growing logits, bfloat16": Case((2, 2), 6, 12_345, "bfloat16", growing=True),
}


def draw(case, seed=0):
    rng = np.random.default_rng(seed)
    tensors = {
        "x": case.scale * rng.normal(size=(*case.shape, case.width)),
        "embedding": rng.normal(size=(case.vocabulary, case.width)),
    }
    if case.growing:
        tensors["embedding"] *= np.linspace(1, 120, case.vocabulary)[:, None]
    tensors = {name: round_to(case.dtype, t) for name, t in tensors.items()}
    tokens, weights = rng.integers(0, case.vocabulary, case.shape), None
    if case.weighted:
        weights = rng.normal(size=case.shape) * (rng.random(case.shape) < 0.7)
        weights = round_to("float32", weights)
        tokens = np.where(weights == 0, -100, tokens)
    tensors |= {"tokens": tokens, "sample_weight": weights}
    shape = () if case.reduction == "sum" else case.shape
    d_output = round_to("float32", np.random.default_rng(1).normal(size=shape))
    dtypes = {"x": case.dtype, "embedding": case.dtype, "tokens": "int32"}
    dtypes |= {"sample_weight": "float32"} if case.weighted else {}
    loss_dtype = "float64" if case.dtype == "float64" else "float32"
    options = {"soft_cap": case.soft_cap, "reduction": case.reduction}
    result_dtypes = {"output": loss_dtype, "best": "int32"}
    return Drawn(tensors, options, dtypes, result_dtypes, name_loss, d_output)


def name_loss(results):
    loss, best = results
    return {"output": loss, "best": best}
