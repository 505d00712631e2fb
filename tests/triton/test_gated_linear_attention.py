"""Chunks of gated linear attention whose pairs take one reference, several, or halves alone."""

import keras
import numpy as np
import pytest

if keras.config.backend() != "torch":
    pytest.skip("runs on torch", allow_module_level=True)

import torch

from keras_recurrent.backends.constants import CONTINUES, PADDING, STARTS
from keras_recurrent.backends.triton import gated_linear_attention
from keras_recurrent.backends.triton._linear_attention import (
    gated_levels,
    gated_operands,
    gated_output,
    linear_attention,
)
from keras_recurrent.backends.triton._runtime import torch_operators
from tests.ops import judge, native
from tests.ops.cases import Case, draw, round_to

nightly = pytest.mark.nightly
OPERATION = "gated_linear_attention"
CHUNK = 64
# The lowest sums of logarithms that one reference serves: of a chunk forwards, and of its weights.
LOWEST = gated_operands.LOWEST_SUM.value
LOWEST_OF_PAIRS = -2 * gated_levels.RADIUS.value


def drawn_with(log_f, case):
    """Inputs of a case with these logarithms: [T], or [T, channels]."""
    drawn = draw(OPERATION, case._replace(batch=1, length=len(log_f)))
    shape = drawn.tensors["log_f"].shape
    log_f = np.reshape(log_f, (1, len(log_f), 1, -1))
    drawn.tensors["log_f"][...] = round_to(drawn.dtypes["log_f"], np.broadcast_to(log_f, shape))
    return drawn


def set_kinds(drawn, starts=slice(0), padding=slice(0)):
    """Makes the tokens one document, in which others start, and padding, which has no gradient."""
    drawn.token_kind[:] = CONTINUES
    drawn.token_kind[:, starts] = STARTS
    drawn.token_kind[:, padding] = PADDING
    drawn.d_output[:, padding] = 0


def flags(drawn):
    """For each chunk of the first head whether the weights of its pairs are stored."""
    tensors = {n: None if t is None else native.tensor(t, drawn.dtypes[n])
               for n, t in drawn.tensors.items()}  # fmt: skip
    kind = drawn.token_kind
    sizes = linear_attention.sizes_of(*(tensors[name] for name in "qkv"))
    with native.interpreted("triton"):
        prepared = gated_operands.prepare(
            sizes, tensors["q"], tensors["k"], log_f=tensors["log_f"],
            token_kind=None if kind is None else native.tensor(kind, "int8"), parts=2,
        )  # fmt: skip
    return (prepared.flags[0, 0] != 0).any(-1).int().tolist()


def stretches(*means, channels=1):
    """Logarithms about these means, a chunk for each."""
    rng = np.random.default_rng(3)
    noise = rng.uniform(0.5, 1.5, size=(len(means), CHUNK, channels))
    return (np.reshape(means, (-1, 1, 1)) * noise).reshape(-1, channels)


CHUNK_MEANS = -5, -0.5, -3000, -0.01
CHUNK_FLAGS = [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("decay_dtype", "tied", "kinds"),
    [
        ("bfloat16", True, True),
        ("float32", False, False),
        pytest.param("bfloat16", True, False, marks=nightly),
        pytest.param("float32", False, True, marks=nightly),
    ],
)
def test_flagged_and_unflagged_chunks_in_one_sequence(decay_dtype, tied, kinds):
    log_f = stretches(*CHUNK_MEANS, channels=20)[:-10]
    case = Case(1, 0, 20, "bfloat16", decay_dtype, kinds=kinds, state=True, tied=tied)
    drawn = drawn_with(log_f, case)
    if kinds:  # else many documents start, whose first decays do not count
        set_kinds(drawn, [5, 64, 100, 101], [20, 150, 151, 200])
    assert flags(drawn) == ([1, 1, 1, 0] if kinds else CHUNK_FLAGS)
    judge.check(OPERATION, "triton", drawn)


BFLOAT16, STATE = (Case(1, 0, 18, "bfloat16", d, state=True) for d in (None, "float32"))
# {name: logarithms of decays, case, flags of the chunks or None}
SEQUENCES = {
    "few tokens": (np.full(5, LOWEST / 5 * 0.99), STATE, [0]),
    "heads of more keys than `gated_output.py` supports": (
        *(stretches(-0.01, -5), BFLOAT16._replace(channels=gated_output.MAX_KEYS + 2, values=18)),
        None,
    ),
    # On both sides of a threshold, forwards in a chunk, its weights, backwards, and in 8 tokens.
    **{
        f"{tokens} tokens at {'a' if lowest == LOWEST else 'the pairs'} threshold": (
            np.repeat(lowest / tokens * np.array([0.999, 1.001]), CHUNK),
            *(STATE, [int(lowest != LOWEST), 1]),
        )
        for tokens, lowest in ((CHUNK, LOWEST), *((n, LOWEST_OF_PAIRS) for n in (CHUNK, 32, 8)))
    },
    # A chunk's first token sees the last one before it, however far both chunks decay.
    **{
        f"three chunks of {mean:.2f}": (np.full(3 * CHUNK, mean), STATE._replace(state=False), None)
        for mean in (LOWEST / CHUNK * 0.999, -1.95)
    },
    # The last chunk ends in either half.
    **{
        f"{tokens} tokens": (stretches(-4, -4, channels=18)[:tokens], BFLOAT16, None)
        for tokens in (5, 20, 40, 64 + 20, 64 + 40)
    },
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=nightly if i % 2 else ()) for i, n in enumerate(SEQUENCES)],
)
def test_one_document_of_fast_decays_matches_definition(name):
    """A result is wrong at a threshold of decays, between chunks, or in an incomplete chunk."""
    log_f, case, expected = SEQUENCES[name]
    drawn = drawn_with(log_f, case)
    assert expected is None or flags(drawn) == expected
    judge.check(OPERATION, "triton", drawn)


@pytest.mark.parametrize("lowest", [LOWEST, LOWEST_OF_PAIRS])
@pytest.mark.parametrize("side", ["first", "last"])
def test_fast_decays_in_one_half_of_a_chunk(side, lowest):
    """An exponent exceeds its bound where one side of the reference has most of the decay."""
    log_f = np.zeros((CHUNK, 18))
    log_f[slice(8) if side == "first" else slice(-8, None)] = lowest / 8 * 0.999
    drawn = drawn_with(log_f, Case(1, 0, 18, "bfloat16", "float32", state=True))
    drawn.tensors["q"][...] = round_to("bfloat16", drawn.tensors["q"] * 1e-6)
    drawn.tensors["k"][...] = round_to("bfloat16", drawn.tensors["k"] * 1e6)
    assert flags(drawn) == [int(lowest != LOWEST)]
    judge.check(OPERATION, "triton", drawn)


def test_documents_start_inside_a_chunk():
    """Their pairs are stored, and what happens before them does not matter."""
    drawn = drawn_with(
        stretches(-0.1, -0.1, -0.1, channels=18), Case(1, 0, 18, "bfloat16", kinds=True, state=True)
    )
    set_kinds(drawn, slice(3, 120, 9))
    drawn.tensors["log_f"][:, 3:120:9] = -np.inf
    assert flags(drawn) == [1, 1, 0]
    judge.check(OPERATION, "triton", drawn)


def test_time_segments_with_flagged_and_unflagged_chunks(monkeypatch):
    monkeypatch.setattr(linear_attention, "_SHORTEST_SEGMENT", 1)
    drawn = drawn_with(
        stretches(*CHUNK_MEANS, channels=18),
        Case(1, 0, 18, "bfloat16", kinds=True, state=True),
    )
    judge.check(OPERATION, "triton", drawn)


@pytest.mark.parametrize("tied", [pytest.param(True, marks=nightly), False])
def test_flagged_and_unflagged_tiles_in_one_chunk(tied):
    """The last 16 of 80 channels read the flag of the others, or their gradients do."""
    log_f = stretches(-0.3, -0.02, channels=80)
    log_f[:, 64:] *= 20
    case = Case(1, 0, 80, "bfloat16", "float32", values=34, state=True, tied=tied)
    judge.check(OPERATION, "triton", drawn_with(log_f, case))


def test_pairs_of_flagged_chunks_are_computed_once(monkeypatch):
    """The backward takes them from the forward."""
    kernels, run = [], torch_operators.run
    monkeypatch.setattr(
        torch_operators, "run", lambda launch: kernels.append(launch.kernel) or run(launch)
    )
    drawn = drawn_with(stretches(-5, channels=18), Case(1, 0, 18, "bfloat16"))
    judge.run(OPERATION, "triton", drawn)
    assert kernels.count(gated_operands.prepare_kernel) == 2
    assert kernels.count(gated_operands.pairs_kernel) == 1


@pytest.mark.parametrize(
    "starts", [[32], [10, 40], *(pytest.param(s, marks=nightly) for s in ([], [70]))]
)
def test_documents_cross_the_halves_of_a_chunk(starts):
    """Fast and slow decays: pairs of both halves meet within a document, and only there."""
    log_f = stretches(-4, -0.1, channels=18)
    drawn = drawn_with(log_f, Case(1, 0, 18, "bfloat16", "float32", kinds=True, state=True))
    set_kinds(drawn, starts, slice(100, None))
    judge.check(OPERATION, "triton", drawn)


@pytest.mark.parametrize(
    ("place", "channels"),
    [(40, 16), (70, 16)]
    # 20: in a chunk's first half; 160: by the kernel of 32 tokens
    + [pytest.param(*case, marks=nightly) for case in ((20, 16), (20, 160), (40, 160), (70, 160))],
)
def test_gradients_of_a_document_stay_in_the_document(place, channels):
    """Decays before it whose outputs are not used have gradients of 0, not rounding errors."""
    drawn = drawn_with(np.full(128, -0.05), Case(1, 128, channels, "bfloat16", "float32"))
    drawn.d_output[:, :place] = 0
    kind = np.full((1, 128), CONTINUES, "int8")
    kind[:, place] = STARTS
    found = judge.run(OPERATION, "triton", drawn._replace(token_kind=kind))
    assert not np.any(found["gradient of log_f"][:, :place])
    drawn.tensors["log_f"][:, place] = -np.inf  # as a document does, a decay of 0 cuts
    found = judge.run(OPERATION, "triton", drawn)
    assert not np.any(found["gradient of log_f"][:, :place])


def test_gradients_with_fast_decays_are_as_exact_as_operands():
    drawn = drawn_with(np.full(128, -3), Case(1, 128, 32, "bfloat16", "float32"))
    found = judge.run(OPERATION, "triton", drawn)["gradient of log_f"]
    truth = judge.reference(OPERATION, drawn, "float64")["gradient of log_f"]
    assert np.sqrt(np.mean((found - truth) ** 2)) < 4e-3 * np.sqrt(np.mean(truth**2))


@pytest.mark.parametrize(
    ("tied", "mean"),
    [
        (True, -5),
        (False, -0.05),
        pytest.param(True, -0.05, marks=nightly),
        pytest.param(False, -5, marks=nightly),
    ],
)
def test_gradients_with_infinite_padding_are_finite(mean, tied):
    """Values of padding change other gradients, or padding has gradients."""
    case = Case(1, 0, 18, "bfloat16", kinds=True, state=True, tied=tied)
    drawn = drawn_with(stretches(mean, mean, channels=18), case)
    padding = [0, 7, 31, 32, 63, 64, 100, *range(120, 128)]
    set_kinds(drawn, padding=padding)
    found = []
    for filling in (0.0, np.nan):
        for tensor in (*drawn.tensors.values(), drawn.d_output):
            if tensor is not None:
                tensor[:, padding] = filling
        found.append(judge.run(OPERATION, "triton", drawn))
    for name, zeros in found[0].items():
        np.testing.assert_array_equal(found[1][name], zeros, err_msg=name)
        if name.startswith("gradient") and "state" not in name:
            assert not zeros[:, padding].any(), name


def test_contents_of_padding_do_not_matter():
    """NaN in a sequence of padding alone reaches its state, which should stay 0."""
    drawn = draw(OPERATION, Case(2, 5, 8, dtype="bfloat16", kinds=True))
    tensors = {name: native.tensor(drawn.tensors[name], drawn.dtypes[name]) for name in "qkv"}
    log_f = native.tensor(drawn.tensors["log_f"], drawn.dtypes["log_f"])
    kind = np.full((2, 5), CONTINUES, "int8")
    kind[1] = PADDING
    for tensor in (*tensors.values(), log_f):
        tensor[1] = float("nan")
    token_kind = native.tensor(kind, "int8")
    _, state = gated_linear_attention.gated_linear_attention(
        **tensors, log_f=log_f, token_kind=token_kind
    )
    assert np.isfinite(keras.ops.convert_to_numpy(state)).all()
    assert not keras.ops.convert_to_numpy(state)[1].any()


@pytest.mark.parametrize(
    ("dtype", "starts", "limit"), [("float32", [], 1e-6), ("bfloat16", [100], 1e-2)]
)
def test_effect_on_state_matches_the_final_state(monkeypatch, dtype, starts, limit):
    """Shards exchange states that lack a segment, padding that decays, or another gradient."""
    monkeypatch.setattr(linear_attention, "_SHORTEST_SEGMENT", 1)
    case = Case(1, 0, 18, dtype, "float32", kinds=True, tied=bool(starts))
    drawn = drawn_with(stretches(-0.01, -0.1, -0.03, channels=18)[:-10], case)
    set_kinds(drawn, starts, [0, 20, 70, 150])
    tokens = {n: None if t is None else native.tensor(t, drawn.dtypes[n])
              for n, t in drawn.tensors.items()}  # fmt: skip
    tokens["token_kind"] = native.tensor(drawn.token_kind, "int8")
    v = tokens["v"]
    first = torch.ones(1, 2, 18, v.shape[3], device=v.device, requires_grad=True)
    output, final = gated_linear_attention.gated_linear_attention(**tokens, initial_state=first)
    d_output = output.detach().cos()
    d_output[tokens["token_kind"] == PADDING] = 0
    d_final = torch.full_like(final, 0.5)
    (d_first,) = torch.autograd.grad((output, final), first, (d_output, d_final))
    of_state = gated_linear_attention.effect_on_state(**tokens)
    of_gradient = gated_linear_attention.effect_on_state(**tokens, d_output=d_output)
    for (decay, total), before, after in (
        (of_state, first, final),
        (of_gradient, d_final, d_first),
    ):
        found = decay[..., None] * before + total
        assert (found - after).abs().max() < limit * after.abs().max()
