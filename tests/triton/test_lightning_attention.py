"""Time cut into segments and pieces, of which only what is remembered is read.

Decays are constant, as in `lightning_attention`, or of each token.
"""

import itertools

import keras
import numpy as np
import pytest

if keras.config.backend() != "torch":
    pytest.skip("runs on torch", allow_module_level=True)

import triton.language as tl

from keras_recurrent.backends.constants import CONTINUES, PADDING, STARTS
from keras_recurrent.backends.triton import scalar_decay_attention
from keras_recurrent.backends.triton._linear_attention import linear_attention
from keras_recurrent.backends.triton._linear_attention.linear_attention import TimeSplit
from tests.ops import judge
from tests.ops.cases import Case, draw, round_to

# Triton's interpreter computes both sides of `tl.where`, of which one is 0 * -inf.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")

nightly = pytest.mark.nightly
OPERATION = "lightning_attention"
HEADS = (3, 1)
DECAYS = [(0, -np.inf, -1.5), (-2.6, -1e-9, -20), (-1e4, -0.5, -1e-38)]
# Of float32 16 tokens are a chunk, of bfloat16 64. Pieces of one chunk and of several; the last
# segment is not full, and neither is its last chunk.
SITUATIONS = [
    ("none", "float32", 139, TimeSplit(3, 4, 2)),
    ("one document", "float32", 139, TimeSplit(3, 4, 2)),
    ("documents", "float32", 107, TimeSplit(4, 2, 2)),
    ("one document", "bfloat16", 347, TimeSplit(2, 4, 2)),
]


def split_by(split, monkeypatch):
    """Returns a list that fills with the totals of the pieces, [pieces, B, H, K, V]."""
    found, run = [], linear_attention.run

    def recorded(launch):
        results = run(launch)
        if launch.outputs[-4] is None:  # no output, but totals
            found.append(keras.ops.convert_to_numpy(results[0]))
        return results

    monkeypatch.setattr(scalar_decay_attention, "_choose_split", lambda *_, **__: split)
    monkeypatch.setattr(linear_attention, "run", recorded)
    return found


def drawn_with(log_decay, case):
    """Draws a case with these decays, and tokens that continue one document."""
    drawn = draw(OPERATION, case)
    dtype = drawn.dtypes["log_decay"]
    drawn.tensors["log_decay"][:] = round_to(dtype, np.array(log_decay, "float64"))
    if drawn.token_kind is not None:
        drawn.token_kind[:] = CONTINUES
    return drawn


def pad(drawn, *places):
    for place in places:
        drawn.token_kind[:, place] = PADDING
        drawn.d_output[:, place] = 0


@pytest.mark.parametrize(
    ("kinds", "dtype", "length", "split", "log_decay"),
    [
        pytest.param(*situation, decay, marks=() if (i - j) % len(DECAYS) == 0 else nightly)
        for i, situation in enumerate(SITUATIONS)
        for j, decay in enumerate(DECAYS)
    ],
)
def test_heads_with_different_decays_match_the_reference(
    kinds, dtype, length, split, log_decay, monkeypatch
):
    batch = 2 if kinds == "documents" else 1
    options = {"kinds": kinds != "none", "state": True, "heads": HEADS}
    case = Case(batch, length, 6, dtype, "float32", **options)
    drawn = drawn_with(log_decay, case)
    if kinds != "none":
        # Single tokens, whole chunks, and across the bounds of segments.
        pad(drawn, slice(7, 60, 9), slice(60, 69), slice(78, 97), slice(120, 195), slice(250, 300))
    if kinds == "documents":
        drawn.token_kind[0, [3, 40, 70, 100]] = STARTS
        drawn.token_kind[1, 64] = STARTS
    found = split_by(split, monkeypatch)
    judge.check(OPERATION, "triton", drawn)
    assert len(found) == 4  # of the output and of three gradients


SLOW_IN_NUMPY = nightly if judge.INTERPRETED else ()


@pytest.mark.parametrize("at_once", [128, pytest.param(4096, marks=SLOW_IN_NUMPY)])
def test_token_kinds_loaded_in_several_blocks(at_once, monkeypatch):
    """A block of padding at the end of a segment is not counted as padding."""
    if judge.INTERPRETED:  # compiled kernels keep the number that they were compiled with
        monkeypatch.setattr(scalar_decay_attention, "_KINDS", tl.constexpr(at_once))
    elif at_once != scalar_decay_attention._KINDS.value:
        pytest.skip("programs are compiled for 4,096 kinds at once")
    segment = 5 * at_once // 2  # of two, and of the second one 100 tokens
    case = Case(1, segment + 100, 4, "bfloat16", "float32", kinds=True, heads=HEADS)
    drawn = drawn_with((-0.3, -0.5, -0.4), case)
    pad(drawn, slice(50, segment))
    found = split_by(TimeSplit(2, segment // 64, 5), monkeypatch)
    judge.check(OPERATION, "triton", drawn)
    assert len(found) == 4


def empty(totals):
    """For each piece, whether it leaves nothing in the states of the first row's heads."""
    return (~totals[:, 0].any((2, 3))).tolist()


def test_sums_of_subsegments_skip_forgotten_tokens(monkeypatch):
    """A launch reads tokens whose decay up to the end of the segment is 0 in float32."""
    found = split_by(TimeSplit(2, 6, 3), monkeypatch)
    judge.run(OPERATION, "triton", drawn_with((0, -5, -2.6), Case(1, 192, 6, heads=HEADS)))
    never, quick, slow = [False] * 3, [True, True, False], [True, False, False]
    expected = [list(heads) for heads in zip(never, quick, slow, strict=True)]
    assert [empty(launch) for launch in found] == [expected] * 4


DECAYS_OF_TOKENS = {
    "slow": ("float32", 139, TimeSplit(3, 4, 2), lambda t: -0.01),
    "fast": ("float32", 139, TimeSplit(3, 4, 2), lambda t: -8.0),
    "at once": ("bfloat16", 347, TimeSplit(2, 4, 2), lambda t: -np.inf if t % 45 == 20 else -0.2),
    "near the end": (
        "bfloat16",
        347,
        TimeSplit(2, 4, 2),
        lambda t: -3.0 if 150 < t < 240 else -0.1,
    ),
}


@pytest.mark.parametrize(
    "name", ["slow", "near the end", *(pytest.param(n, marks=nightly) for n in ("fast", "at once"))]
)
def test_decays_of_tokens_in_segments_match_the_reference(name, monkeypatch):
    """A subsegment skips tokens that are remembered, or a decay between segments is wrong."""
    dtype, length, split, log_decay = DECAYS_OF_TOKENS[name]
    case = Case(1, length, 6, dtype, "float32", kinds=True, state=True, heads=(2, 1))
    drawn = draw("scalar_decay_attention", case)
    decays = [log_decay(t) for t in range(length)]
    drawn.tensors["log_decay"][:] = round_to("float32", np.array(decays))[:, None]
    drawn.token_kind[:] = CONTINUES
    if name == "at once":
        drawn.token_kind[:, 100] = STARTS
    pad(drawn, slice(7, 60, 9), slice(120, 130))
    found = split_by(split, monkeypatch)
    judge.check("scalar_decay_attention", "triton", drawn)
    assert len(found) == 4
    assert (name != "slow") == any(np.any(empty(launch)) for launch in found)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=nightly), "bfloat16"])
def test_gradients_of_decays_in_several_spans_match_the_reference(dtype, monkeypatch):
    """The terms of a pair of tokens in two spans are lost, or counted twice."""
    monkeypatch.setattr(scalar_decay_attention, "_SPAN", 64)
    case = Case(1, 150, 6, dtype, "float32", kinds=True, state=True, decays="near one")
    drawn = draw("scalar_decay_attention", case)
    drawn.token_kind[drawn.token_kind == STARTS] = CONTINUES
    drawn.token_kind[:, 90] = STARTS
    judge.check("scalar_decay_attention", "triton", drawn)


@pytest.mark.parametrize("programs", [1, 3, 16, 32, 40, 48, 64, 80, 96, 127, 128, 4096])
def test_time_splits_cover_all_chunks(programs):
    for chunks, concurrent in itertools.product((1, 7, 16, 130, 512, 2048, 20_000), (1, 2)):
        split = scalar_decay_attention._choose_split(programs, chunks, concurrent)
        before_last = (split.segments - 1) * split.segment_chunks
        assert before_last < chunks <= before_last + split.segment_chunks
        assert split.segment_chunks % split.subsegments == 0
        assert split.segments == 1 or (programs < 128 and chunks >= 16)


def test_time_split_fills_multiprocessors_once():
    """16 heads of 128 channels are 32 programs a row."""
    assert scalar_decay_attention._choose_split(32, 2048) == TimeSplit(4, 512, 8)
    assert scalar_decay_attention._choose_split(64, 1024) == TimeSplit(2, 512, 16)
    assert scalar_decay_attention._choose_split(80, 1024).segments == 3  # two turns
    assert scalar_decay_attention._choose_split(96, 1024).segments == 1
    assert scalar_decay_attention._choose_split(32, 2048, concurrent=2) == TimeSplit(8, 256, 4)
    assert scalar_decay_attention._choose_split(64, 1024, concurrent=2) == TimeSplit(4, 256, 8)
    assert scalar_decay_attention._choose_split(80, 1024, concurrent=2).segments == 3
    assert scalar_decay_attention._choose_split(128, 1024, concurrent=2).segments == 1
    assert scalar_decay_attention._choose_split(128, 1024, 2, full=256) == TimeSplit(2, 512, 16)
