"""The loss of hidden states, against its definition, and beside the loss of logits."""

import importlib
import os
from typing import NamedTuple

import keras
import numpy as np
import pytest

from keras_recurrent import dispatch, ops
from keras_recurrent.backends.reference import linear_crossentropy as reference
from tests.ops import native
from tests.ops.cases import round_to, unit
from tests.ops.judge import (
    NEIGHBORS,
    elementary_functions_of_the_gpu,
    kernels,
    longer_than,
    moved,
)
from tests.processes import fresh_process

BACKEND = keras.config.backend()
PLAIN = importlib.import_module(f"keras_recurrent.backends.{BACKEND}.linear_crossentropy")


every_implementation = pytest.mark.parametrize(
    "implementation", [name for _, name in kernels(["linear_crossentropy"])]
)


class Case(NamedTuple):
    shape: tuple
    width: int = 5
    vocabulary: int = 11
    dtype: str = "float32"
    weighted: bool = True
    soft_cap: float | None = None
    scale: float = 1.0
    growing: bool = False  # from one word to the next, beyond what one origin of exponentials bears


CASES = {
    "one token": Case((), weighted=False),
    "a vector": Case((7,), vocabulary=1),
    "rows": Case((3, 13)),
    "four axes, a cap": Case((2, 1, 6), soft_cap=3.0),
    # Logits of moderate size, or the rounding of a single one would be the error of all.
    "wide": Case((2, 9), 40, 300, weighted=False, scale=0.3),
    "large logits": Case((2, 9), scale=300.0),
    "large logits, a cap": Case((2, 9), scale=30.0, soft_cap=30.0),
    "bfloat16": Case((2, 13), 24, 70, "bfloat16", soft_cap=30.0),
    "float16": Case((2, 5), dtype="float16"),
    "float64": Case((2, 5), dtype="float64", soft_cap=2.0),
    # A kernel goes through such rows in tiles, whose largest logits grow.
    "many words, growing logits": Case((3,), 6, 20_000, growing=True),
    "many words, a cap, bfloat16": Case((3,), 6, 8192, "bfloat16", soft_cap=5.0),
    "many words, growing logits, bfloat16": Case((2, 2), 6, 12_345, "bfloat16", growing=True),
}


def draw(case, seed=0):
    """Tensors, those with gradients first, and what is neither."""
    rng = np.random.default_rng(seed)
    tensors = {
        "x": case.scale * rng.normal(size=(*case.shape, case.width)),
        "embedding": rng.normal(size=(case.vocabulary, case.width)),
    }
    if case.growing:
        tensors["embedding"] *= np.linspace(1, 120, case.vocabulary)[:, None]
    tensors = {name: round_to(case.dtype, t) for name, t in tensors.items()}
    tokens = rng.integers(0, case.vocabulary, case.shape)
    if case.weighted:
        weights = rng.normal(size=case.shape) * (rng.random(case.shape) < 0.7)
        tensors["sample_weight"] = round_to("float32", weights)
        tokens = np.where(weights == 0, -100, tokens)
    return tensors, {"tokens": tokens}


def run(tensors, integers, dtype, d_loss, implementation, **options):
    """The results, and the gradients of the loss."""
    options["implementation"] = implementation
    dtypes = dict.fromkeys(tensors, dtype) | {"sample_weight": "float32"}
    of_loss = "float64" if dtype == "float64" else "float32"

    def call(tensors, integers):
        loss, best = ops.linear_crossentropy(**tensors, **integers, **options)
        assert (native.dtype(loss), native.dtype(best)) == (of_loss, "int32")
        return [loss], {"best": best}

    with native.precision(dtype):
        given = {name: native.tensor(t, dtypes[name]) for name, t in tensors.items()}
        integers = {name: native.tensor(t, "int32") for name, t in integers.items()}
        module = dispatch.IMPLEMENTATIONS["linear_crossentropy"][implementation]
        if reason := native.refusal(module, given | integers):
            pytest.skip(f"{implementation} refuses: {reason}")
        cotangents = [native.tensor(d_loss, of_loss)]
        (loss,), aside, found = native.gradients(call, given, integers, cotangents)
        assert {n: native.dtype(g) for n, g in found.items()} == {n: dtypes[n] for n in found}
        found = {f"gradient of {name}": native.to_numpy(g) for name, g in found.items()}
        return {"loss": native.to_numpy(loss), **found}, native.to_numpy(aside["best"])


def defined(tensors, integers, d_loss, dtype, **options):
    arguments = tensors | integers | options | {"dtype": dtype}
    with elementary_functions_of_the_gpu():
        loss, best = reference.linear_crossentropy(**arguments)
        gradients = reference.linear_crossentropy_gradient(d_loss, **arguments)
    names = [*tensors][:2] + ["tokens"] + [*tensors][2:]
    found = zip(names, gradients, strict=False)
    return {"loss": loss} | {f"gradient of {n}": g for n, g in found if n in tensors}, best


def check(case, reduction, implementation, seed=0):
    tensors, integers = draw(case, seed)
    rng = np.random.default_rng(1)
    d_loss = round_to("float32", rng.normal(size=() if reduction == "sum" else case.shape))
    options = {"soft_cap": case.soft_cap, "reduction": reduction}
    results, best = run(tensors, integers, case.dtype, d_loss, implementation, **options)
    exact, precision = longer_than(case.dtype), "float64" if case.dtype == "float64" else "float32"
    truth, expected = defined(tensors, integers, d_loss, exact, **options)
    np.testing.assert_array_equal(best, expected)
    each, _ = reference.linear_crossentropy(**tensors, **integers, **options | {"reduction": None})

    def allowed(tensors):
        right, _ = defined(tensors, integers, d_loss, exact, **options)
        loop, _ = defined(tensors, integers, d_loss, precision, **options)
        for name, value in right.items():
            of_x = name in ("gradient of x", "gradient of embedding")
            # A sum is as exact as what is summed, whose signs differ.
            size = np.abs(each).sum() if name == "loss" else np.abs(value).max(initial=0)
            of_loop = np.abs(loop[name] - value).max(initial=0)
            yield name, 2 * of_loop + 2 * unit(case.dtype if of_x else "float32", size)

    # As in `judge.compare`, inputs beside the given ones count where the loop was lucky with these.
    bounds, rng = dict(allowed(tensors)), np.random.default_rng(2)
    wrong = {name: np.abs(results[name] - truth[name]).max(initial=0) for name in results}
    for _ in range(NEIGHBORS):
        if all(wrong[name] <= bounds[name] for name in wrong):
            break
        near = {name: moved(rng, t, case.dtype) for name, t in tensors.items()}
        bounds = {name: max(bounds[name], bound) for name, bound in allowed(near)}
    for name in wrong:
        assert wrong[name] <= bounds[name], (
            f"{name}: error {wrong[name]:.3g}, allowed {bounds[name]:.3g}"
        )


@every_implementation
@pytest.mark.parametrize("reduction", ["sum", None])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_loss_and_gradients(case, reduction, implementation):
    check(case, reduction, implementation)


@pytest.fixture
def small_pieces(monkeypatch):
    if BACKEND == "torch":
        monkeypatch.setattr(PLAIN, "GRADIENTS", 8 * 31)  # of 8 tokens, whose logits are made by 3
        monkeypatch.setattr(PLAIN, "LOGITS", 3 * 31)
    else:
        monkeypatch.setattr(PLAIN, "CROSSENTROPY_CHUNK", 8)


@every_implementation
@pytest.mark.parametrize("reduction", ["sum", None])
@pytest.mark.parametrize("shape", [(23,), (3, 17), (2, 3, 5), (16,)])
def test_pieces(small_pieces, shape, reduction, implementation):
    """More tokens than a piece holds, and more rows than that; shapes of no other test."""
    check(Case(shape, 6, 31, soft_cap=5.0), reduction, implementation)


@pytest.mark.nightly
@pytest.mark.skipif(BACKEND != "jax", reason="Keras splits operations over devices on JAX alone")
def test_devices_share_rows_tokens_and_the_vocabulary():
    flags = " ".join((os.environ["XLA_FLAGS"], "--xla_force_host_platform_device_count=8"))
    reports = fresh_process(
        "-m", "tests.ops.crossentropy_shards", XLA_FLAGS=flags, JAX_PLATFORMS="cpu"
    )
    assert len(reports) == 12
    for case, report in reports.items():
        assert report["error"] < 2e-6, (case, report)
        assert report["same"], case


def test_it_is_the_crossentropy_of_logits():
    tensors, integers = draw(Case((3, 7), weighted=False))
    x, embedding = (t.astype("float32") for t in tensors.values())
    tokens = integers["tokens"].astype("int32")
    logits = keras.ops.matmul(x, embedding.T)
    losses, best = ops.linear_crossentropy(x, embedding, tokens, reduction=None)
    expected = ops.token_crossentropy(logits, tokens)
    losses, expected = map(keras.ops.convert_to_numpy, (losses, expected))
    np.testing.assert_allclose(losses, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(best), keras.ops.convert_to_numpy(logits).argmax(-1)
    )


@every_implementation
@pytest.mark.parametrize("reduction", ["sum", None])
def test_a_token_that_the_vocabulary_lacks(reduction, implementation):
    """NaN for it and what it is summed with; nothing at all where its weight is 0."""
    case = Case((4,), weighted=False)
    tensors, _ = draw(case)
    tokens = {"tokens": np.array([1, -1, 11, 2])}
    d_loss = np.ones(() if reduction == "sum" else 4)
    results, _ = run(tensors, tokens, "float32", d_loss, implementation, reduction=reduction)
    lacks = [False, True, True, False]
    np.testing.assert_array_equal(np.isnan(results["gradient of x"]).all(-1), lacks)
    np.testing.assert_array_equal(np.isnan(results["loss"]), True if reduction else lacks)
    weighted = tensors | {"sample_weight": np.array([1.0, 0, 0, 1])}
    results, _ = run(weighted, tokens, "float32", d_loss, implementation, reduction=reduction)
    assert all(np.isfinite(r).all() for r in results.values())
    assert not results["gradient of x"][1:3].any()


@pytest.mark.skipif(BACKEND != "torch", reason="elsewhere zeros stand for missing gradients")
@every_implementation
@pytest.mark.parametrize("reduction", ["sum", None])
def test_no_gradient_arrives_at_all(reduction, implementation):
    kernel = dispatch.IMPLEMENTATIONS["linear_crossentropy"][implementation]
    x, embedding = (native.tensor(np.ones((n, 5)), "float32").requires_grad_() for n in (4, 11))
    tokens = native.tensor(np.arange(4), "int32")
    loss, _ = kernel.function(x, embedding, tokens, reduction=reduction)
    native.ends(loss).sum().backward()
    assert not any(t.grad.any() for t in (x, embedding) if t.grad is not None)


def test_a_node_of_a_graph():
    x, embedding = keras.Input((None, 5)), keras.Input((), batch_size=11)
    del embedding
    tokens = keras.Input((None,), dtype="int32")
    weights = np.random.default_rng(0).normal(size=(11, 5)).astype("float32")
    loss, best = ops.linear_crossentropy(x, weights, tokens, reduction=None)
    assert (loss.shape, best.shape, best.dtype) == ((None, None), (None, None), "int32")
    model = keras.Model([x, tokens], [loss, best])
    given = np.ones((2, 3, 5), "float32"), np.ones((2, 3), "int32")
    found = model.predict(list(given), verbose=0)
    expected = ops.linear_crossentropy(given[0], weights, given[1], reduction=None)
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(f, keras.ops.convert_to_numpy(e), rtol=1e-6)


@pytest.mark.once
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"soft_cap": 0}, "`soft_cap` must be a finite number above 0.*got 0"),
        ({"soft_cap": float("nan")}, "`soft_cap` must be a finite number above 0"),
        ({"reduction": "mean"}, "`reduction` must be 'sum', or None.*got 'mean'"),
        ({"embedding": np.ones((0, 5), "float32")}, "vocabulary of at least one token"),
        ({"embedding": np.ones((11, 4), "float32")}, "`embedding` must have the shape"),
        ({"tokens": np.ones(3, "float32")}, "`tokens` must be integers"),
        ({"sample_weight": np.ones((2,), "float32")}, "`sample_weight` must have the shape"),
    ],
)
def test_what_does_not_fit_is_an_error(changed, message):
    given = {
        "x": np.ones((3, 5), "float32"),
        "embedding": np.ones((11, 5), "float32"),
        "tokens": np.zeros(3, "int32"),
    }
    with pytest.raises(ValueError, match=message):
        ops.linear_crossentropy(**(given | changed))


def test_gradients_of_the_definition_are_its_slopes():
    case = Case((2, 3), soft_cap=2.0, dtype="float64")
    tensors, integers = draw(case)
    options = {**integers, "soft_cap": case.soft_cap}

    def loss(tensors):
        return reference.linear_crossentropy(**tensors, **options)[0]

    found = reference.linear_crossentropy_gradient(1.0, **tensors, **options)
    for name, gradient in zip(
        ("x", "embedding", "sample_weight"), (*found[:2], found[3]), strict=True
    ):
        for index in np.ndindex(tensors[name].shape):
            if name == "sample_weight" and tensors[name][index] == 0:
                continue  # its token is not looked at
            step = np.zeros_like(tensors[name])
            step[index] = 1e-5
            ahead, behind = (loss({**tensors, name: tensors[name] + s * step}) for s in (1, -1))
            assert gradient[index] == pytest.approx((ahead - behind) / 2e-5, rel=1e-6, abs=1e-8)


def test_it_has_an_implementation_everywhere():
    assert not isinstance(dispatch.IMPLEMENTATIONS["linear_crossentropy"][BACKEND], str)
