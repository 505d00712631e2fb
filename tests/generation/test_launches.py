"""Number of kernel launches of a decoding step: each takes microseconds on the host."""

import pytest

import keras_recurrent
from keras_recurrent import dispatch
from keras_recurrent.layers import decoding
from tests.models.tiny import HYBRID, tiny_causal_lm

if dispatch.BACKEND != "torch" or "triton" not in dispatch.serving():
    pytest.skip("runs on torch with Triton, if only interpreted", allow_module_level=True)
if isinstance(dispatch.IMPLEMENTATIONS["hgrn2_step"]["triton"], str):
    pytest.skip("needs triton", allow_module_level=True)

import torch

from keras_recurrent.backends.constants import max_fused_rows
from keras_recurrent.backends.triton import norm_linear
from keras_recurrent.backends.triton._decoding import norm_linear_tiles
from keras_recurrent.backends.triton._runtime import torch_operators


@pytest.fixture
def launches(monkeypatch):
    """Returns a list of the names of launched kernels, which do not run."""
    found = []

    def run(launch):
        found.append(launch.kernel.__name__)
        return torch_operators.make_outputs(launch, in_place=False)

    def product(a, b, dtype, multiply=norm_linear.matrix_product):
        found.append("product")
        return multiply(a, b, dtype)

    monkeypatch.setattr(torch_operators, "run", run)
    monkeypatch.setattr(norm_linear, "matrix_product", product)
    # Programs share the channels of a down projection, as in large models.
    for name in ("_SPLIT_ROW_CHANNELS", "_SPLIT_ROWS_CHANNELS"):
        monkeypatch.setattr(norm_linear_tiles, name, 40)
    monkeypatch.setattr(norm_linear_tiles, "_FLOAT32_ROW_BLOCK_K", 16)
    for name in ("_FLOAT32_ROWS_TILE", "_ROWS_TILE"):
        monkeypatch.setitem(getattr(norm_linear_tiles, name), "BLOCK_K", 16)
    return found


# {blocks: the family and its sizes, launches of each block's step of 1, 3 and 17 rows}. In float32,
# a separate launch computes each product of 17 rows.
MODELS = {
    "hgrn2, attention, hgrn2": ("hgrn2", HYBRID, {1: (6, 7, 6), 3: (7, 8, 7), 17: (11, 15, 12)}),
    # The window is so short that one program reads a sequence's buffer.
    "recurrent, window, attention": (
        *("griffin", {}),
        {1: (6, 6, 7), 3: (7, 7, 8), 17: (12, 12, 13)},
    ),
    "lightning, attention": ("lightning_hybrid", {}, {1: (6, 7), 3: (7, 8), 17: (13, 13)}),
}


@pytest.mark.parametrize(("family", "sizes", "block_launches"), MODELS.values(), ids=MODELS)
def test_fused_step_of_a_block_has_few_launches(family, sizes, block_launches, launches):
    """A norm, a gate or a residual sum takes a separate launch in a fused step."""

    def run_step(dtype, rows):
        model = tiny_causal_lm(family=family, **sizes, intermediate_dim=40, dtype=dtype)
        cache = model.backbone.get_initial_state(rows, max_length=40)
        token_ids = torch.ones(rows, 1, dtype=torch.int32)
        launches.clear()
        with torch.no_grad(), keras_recurrent.implementation("triton"), decoding.decoding_scope():
            model.backbone.hidden_states(token_ids, cache=cache)
        return list(launches)

    for rows, counts in block_launches.items():
        # Other launches are the embedding, the first norm of several rows, and the final norm.
        expected = sum(counts) + (2 if rows == 1 else 3)
        found = run_step("float32", rows)
        assert len(found) == expected, (rows, found)
    assert run_step("bfloat16", 17) == run_step("bfloat16", 16)


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize(("capability", "kilobytes"), [((8, 0), 163), ((8, 9), 99), ((9, 0), 227)])
def test_tiles_fit_into_shared_memory(capability, kilobytes, gate):
    """Triton keeps the loads of all stages, on GPUs before Hopper of all stages but one."""
    sizes = 2048, 8192, "bfloat16"
    for rows in (2, 16, 17, 64, 65, max_fused_rows("bfloat16")):
        tile = norm_linear_tiles.tile_options(rows, *sizes, gate, False, capability)
        columns = tile["BLOCK_N"] * (2 if gate else 1)  # a gate needs two weights
        stage = 2 * tile["BLOCK_K"] * (tile["BLOCK_B"] + columns)
        assert (tile["STAGES"] - (capability < (9, 0))) * stage <= 1024 * kilobytes
