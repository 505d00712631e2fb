"""Attention of cuDNN on JAX: its residuals, padding and fallback to Triton, and supported calls.

On a CPU, plain attention replaces both cuDNN and the Triton kernels, and `tests/triton/lowered.py`
lowers the programs that contain them.
"""

import types

import keras
import numpy as np
import pytest

if keras.config.backend() != "jax":
    pytest.skip("runs on JAX", allow_module_level=True)
pytest.importorskip("triton")

import jax
import jax.numpy as jnp

from keras_recurrent import dispatch
from keras_recurrent.backends import cudnn
from keras_recurrent.backends.cudnn import _jax_attention
from keras_recurrent.backends.cudnn import sliding_window_attention as module
from keras_recurrent.backends.jax import _gpu
from keras_recurrent.backends.jax import sliding_window_attention as plain
from tests.gpu import has_gpu
from tests.ops.cases import Case, align, draw
from tests.ops.judge import check

OPERATION = "sliding_window_attention"
LENGTH = 640 if has_gpu() else 24  # cuDNN is used from 512 tokens on
POSITION = np.arange(LENGTH)
CASE = Case(2, LENGTH, 64, "bfloat16", values=64) if has_gpu() else Case(2, LENGTH, 3)
# {name: token kinds, and the implementation that must not compute their batch}
KINDS = {
    "padding after tokens": (np.where(POSITION >= [[17], [0]], 2, 0), "triton"),
    "padding before tokens": (np.where(POSITION < [[5], [9]], 2, 0), "triton"),
    "one start": (np.where(POSITION == 0, [[0], [1]], 0), "triton"),
    "documents": (np.where(POSITION == [[3], [20]], 1, 0), "cudnn"),
    "documents and padding": (np.where(POSITION >= 20, 2, POSITION == [[0], [9]]), "cudnn"),
}
FAST = "padding after tokens", "documents and padding"


def visible_weights(q, k, sums, window):
    """The weights [B, H, T, T] of attention, of which `sums` are the logarithms of the sums."""
    logits = jnp.einsum("bthk,bshk->bhts", q, k)
    distance = POSITION[:, None] - POSITION
    visible = (distance >= 0) & (distance < (window or LENGTH))
    logits = jnp.where(visible, logits, -jnp.inf)
    sums = jax.nn.logsumexp(logits, axis=-1) if sums is None else sums
    return jnp.exp(logits - sums[..., None]), sums


def repeat(x, q):
    """Keys or values [B, T, G, K] for each query head."""
    return jnp.repeat(x, q.shape[2] // x.shape[2], axis=2)


def attend(q, k, v, window):
    weights, sums = visible_weights(q, repeat(k, q), None, window)
    return jnp.einsum("bhts,bshv->bthv", weights, repeat(v, q)), sums


def attend_backward(q, k, v, sums, output, d_output, window):
    weights, _ = visible_weights(q, repeat(k, q), sums, window)
    d_weights = jnp.einsum("bthv,bshv->bhts", d_output, repeat(v, q))
    mean = jnp.sum(d_output * output, axis=-1).transpose(0, 2, 1)
    d_logits = weights * (d_weights - mean[..., None])
    d_q = jnp.einsum("bhts,bshk->bthk", d_logits, repeat(k, q))
    d_k = jnp.einsum("bhts,bthk->bshk", d_logits, q)
    d_v = jnp.einsum("bhts,bthv->bshv", weights, d_output)
    total = (
        jnp.sum(d.reshape(*x.shape[:3], -1, x.shape[3]), axis=3) for d, x in ((d_k, k), (d_v, v))
    )
    return d_q, *total


def forward(*arguments, **options):
    """Plain attention with residuals like those of Triton."""
    output, (highest, _) = plain.forward(*arguments, **options)
    return output, [output, jnp.zeros(output.shape, jnp.int8), highest, None]


def to_nan(function):
    """Returns NaN in place of numbers, so that a test fails if these are used."""

    def run(*arguments, **options):
        results = function(*arguments, **options)
        return jax.tree.map(lambda x: x * jnp.nan if x.dtype == jnp.float32 else x, results)

    return run


@pytest.fixture
def judge(monkeypatch):
    """Judges results; on a CPU, one of the implementations "cudnn" and "triton" returns NaN."""

    if has_gpu():
        return lambda drawn, wrong: check(OPERATION, "cudnn", drawn)

    def run(drawn, wrong):
        def replace(name, function):
            return to_nan(function) if name == wrong else function

        for function in (attend, attend_backward):
            monkeypatch.setattr(_jax_attention, function.__name__, replace("cudnn", function))
        kernels = types.SimpleNamespace(
            forward=replace("triton", forward), backward=replace("triton", plain.backward)
        )
        monkeypatch.setattr(_jax_attention, "triton_kernels", kernels)
        passes = _jax_attention.forward, _jax_attention.backward
        kernel = plain.sliding_window_attention.replace_passes(*passes)  # not yet traced
        monkeypatch.setitem(dispatch.IMPLEMENTATIONS[OPERATION], "cudnn", kernel)
        check(OPERATION, "cudnn", drawn)

    return run


@pytest.mark.nightly
@pytest.mark.parametrize(("heads", "window"), [((4, 1), None), ((4, 2), 5)])
def test_cudnn_without_token_kinds_matches_definition(judge, heads, window):
    """Heads, the window or the residuals of cuDNN are arranged wrongly."""
    judge(draw(OPERATION, CASE._replace(heads=heads, window=window)), wrong="triton")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.nightly) for n in KINDS]
)
def test_cudnn_computes_batches_of_one_document_and_triton_others(judge, name):
    """A wrong implementation runs, gets a wrong residual, or NaN in padding reaches a result."""
    kind, wrong = KINDS[name]
    drawn = draw(OPERATION, CASE._replace(window=7))
    tensors = {n: np.where(align(kind == 2, t), np.nan, t) for n, t in drawn.tensors.items()}
    judge(drawn._replace(tensors=tensors, token_kind=kind.astype("int8")), wrong)


def reason(length=1024, channels=256, values=None, dtype="bfloat16", **given):
    q, k, v = (
        jax.ShapeDtypeStruct((2, length, heads, size), dtype)
        for heads, size in ((4, channels), (1, channels), (1, values or channels))
    )
    return module.unsupported(q, k, v, **{"sliding_window": 100, **given})


@pytest.mark.parametrize(
    ("message", "capability", "call"),
    [
        (None, 90, {"token_kind": jax.ShapeDtypeStruct((2, 1024), "int8")}),
        (None, 100, {"channels": 128}),
        ("up to 128, values like keys; got 256", 100, {}),
        ("capability 9.0 or later, got one of 8.0", 80, {}),
        ("`initial_state`", 90, {"initial_state": {}}),
        ("sequences of 512 tokens or more, got 100", 90, {"length": 100}),
        ("float32", 90, {"dtype": "float32"}),
        ("got 100 and 100", 90, {"channels": 100}),
        ("got 256 and 128", 90, {"values": 128}),
    ],
)
def test_cudnn_gives_the_reason_why_a_call_is_unsupported(message, capability, call, monkeypatch):
    monkeypatch.setattr(_gpu, "capability", lambda: capability)
    found = reason(**call)
    assert found is None if message is None else message in found


def test_interpreted_triton_is_the_reason(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "interpreter" in cudnn.unavailable()
