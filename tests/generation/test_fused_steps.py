"""Fused decoding steps of blocks: their results, launches, and the blocks that are not fused."""

import pathlib

import keras
import numpy as np
import pytest
from keras import ops
from keras.layers import Dense
from keras.quantizers import Int4QuantizationConfig, Int8QuantizationConfig

import keras_recurrent
from keras_recurrent import dispatch
from keras_recurrent.layers import (
    HGRN2,
    LightningAttention,
    LocalAttention,
    Mamba2,
    RecurrentBlock,
    decoding,
)
from keras_recurrent.layers import reversible_embedding as embeddings
from keras_recurrent.models import GriffinResidualBlock, HGRN2ResidualBlock, LightningHybridCausalLM
from keras_recurrent.models.mamba_hybrid.mamba_hybrid_backbone import ParallelMixers
from keras_recurrent.models.residual_block import ResidualBlock
from tests.generation.tokens import generate
from tests.layers.table import assert_close
from tests.models.tiny import HYBRID, tiny_causal_lm

if dispatch.BACKEND != "torch" or "triton" not in dispatch.BACKEND_PREFERENCE:
    pytest.skip("runs on torch with Triton, if only interpreted", allow_module_level=True)
if isinstance(dispatch.IMPLEMENTATIONS["hgrn2_step"]["triton"], str):
    pytest.skip("needs triton", allow_module_level=True)

import torch

from keras_recurrent.backends.constants import max_fused_rows
from keras_recurrent.backends.torch._states import inplace_states
from keras_recurrent.backends.triton import norm_linear
from keras_recurrent.backends.triton._decoding import norm_linear_tiles
from keras_recurrent.backends.triton._runtime import torch_operators

DATA = pathlib.Path(__file__).parents[1] / "data"
LENGTHS, TOTAL = (4, 6), 7


@pytest.fixture
def fused(monkeypatch):
    """Returns a list of the blocks whose fused steps were called."""
    found, step = [], ResidualBlock.step

    def record(self, *args, **kwargs):
        found.append(self)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(ResidualBlock, "step", record)
    return found


def generate_with(name, model, lengths, total=TOTAL):
    """Returns the tokens that `generate` returns with an implementation."""
    model.compile(sampler="greedy")
    with keras_recurrent.implementation(name):
        return generate(model, lengths, total)["token_ids"]


# Further arguments of a tiny "mamba_hybrid": the blocks of Nemotron-H.
NEMOTRON = {
    "block_types": ("mamba", "mlp", "attention"),
    "mlp": "squared_relu",
    **dict.fromkeys(("query_scale", "rope_max_wavelength", "mlp_gate_scale")),
}


@pytest.mark.parametrize(
    ("family", "lengths", "sizes"),
    [
        ("griffin", LENGTHS, {}),
        pytest.param("hgrn2", (5,), {}, marks=pytest.mark.nightly),
        pytest.param("lfm2", LENGTHS, {}, marks=pytest.mark.nightly),
        pytest.param("mamba_hybrid", LENGTHS, {}, marks=pytest.mark.nightly),
        pytest.param("mamba_hybrid", LENGTHS, NEMOTRON, marks=pytest.mark.nightly),
        pytest.param("hgrn2", LENGTHS * 9, HYBRID, marks=pytest.mark.nightly),
    ],
)
def test_fused_steps_generate_the_tokens_of_layers(family, lengths, sizes, fused):
    check_tokens(tiny_causal_lm(family=family, **sizes), lengths, fused)


def check_step(backbone, rows, fused):
    """Asserts that all blocks are fused, and compute the hidden states and cache of layers."""
    rng, shape = np.random.default_rng(0), (rows, 3)
    prompt, token_ids = (torch.asarray(rng.integers(1, 61, n)) for n in (shape, (rows, 1)))
    with torch.no_grad():
        _, cache = backbone.hidden_states(prompt, max_length=8, return_cache=True)
        expected = backbone.hidden_states(token_ids, cache=cache)
        assert not fused
        with keras_recurrent.implementation("triton"), decoding.decoding_scope():
            found = backbone.hidden_states(token_ids, cache=cache)
    assert len(fused) == len(backbone.transformer_layers)
    assert_close(found, expected)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("hgrn2", HYBRID), ("mamba_hybrid", {}), ("mamba_hybrid", NEMOTRON)],
    ids=["HGRN2 and attention", "Falcon-H1", "Nemotron-H"],
)
def test_fused_step_computes_the_hidden_states_and_cache_of_layers(family, sizes, fused):
    """A step loses an input of a convolution, the skip of the inputs or the norm by groups.

    Of mixers in parallel, the second reads the sum of the first, or a factor is ignored.
    """
    check_step(tiny_causal_lm(family=family, **sizes).backbone, 2, fused)


def test_unfused_step_of_lightning_attention_overwrites_its_memory():
    """A step allocates a second memory for each block, or ignores positions or decays."""
    backbone, rng = tiny_causal_lm(family="transnormer").backbone, np.random.default_rng(0)
    prompt, token_ids = (torch.asarray(rng.integers(1, 61, (2, n))) for n in (3, 1))
    with torch.no_grad():
        _, cache = backbone.hidden_states(prompt, return_cache=True)
        expected = backbone.hidden_states(token_ids, cache=cache)
        with keras_recurrent.implementation("triton"), decoding.decoding_scope(), inplace_states():
            found = backbone.hidden_states(token_ids, cache=cache)
    assert_close(found, expected)
    for before, after in zip(cache["blocks"], found[1]["blocks"], strict=True):
        assert after["temporal_block"]["memory"] is before["temporal_block"]["memory"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["hypenet_tiny", "minicpm_sala_tiny"])
def test_fused_steps_of_checkpoints_generate_the_tokens_of_layers(name, fused):
    """A fused step has wrong positions after a prompt, or ignores a scale of outputs."""
    check_tokens(LightningHybridCausalLM.from_preset(str(DATA / name)), LENGTHS, fused)


def check_tokens(model, lengths, fused):
    """Asserts that fused steps generate the tokens of layers, and that all blocks are fused."""
    expected = generate_with("torch", model, lengths)
    assert not fused
    np.testing.assert_array_equal(generate_with("triton", model, lengths), expected)
    assert len(fused) == len(model.backbone.transformer_layers)


QUANTIZATIONS = {
    "int8": Int8QuantizationConfig(),
    "int8, weights alone": Int8QuantizationConfig(activation_quantizer=None),
    "int4": Int4QuantizationConfig(block_size=16),
    "int4, columns": Int4QuantizationConfig(block_size=-1),
}


@pytest.mark.parametrize(
    ("config", "rows"),
    [*((config, 1) for config in QUANTIZATIONS.values()), (Int8QuantizationConfig(), 2)],
    ids=[*QUANTIZATIONS, "int8, rows"],
)
def test_fused_steps_of_quantized_layers_compute_the_hidden_states_of_layers(config, rows, fused):
    model = tiny_causal_lm(family="hgrn2", num_layers=1, intermediate_dim=24)
    model.quantize(config=config)
    check_step(model.backbone, rows, fused)


def make_user_class(cls):
    """Returns a subclass, as a user defines it."""
    return type(f"User{cls.__name__}", (cls,), {})


CUSTOM_INT8 = Int8QuantizationConfig(
    activation_quantizer=make_user_class(keras.quantizers.AbsMaxQuantizer)(axis=-1)
)


@pytest.mark.parametrize("rows", [3, 20])
def test_linear_under_autocast_of_torch_is_bit_identical(rows):
    x, dense = keras.random.normal((rows, 8), seed=0), Dense(8, use_bias=False)
    dense.build((None, 8))
    with torch.no_grad(), keras_recurrent.implementation("triton"):
        expected = decoding.linear(x, [dense])[0]
        with torch.autocast(x.device.type, torch.bfloat16):
            found = decoding.linear(x, [dense])[0]
    assert found.dtype is torch.float32
    assert torch.equal(found, expected)


# {name: (quantization, arguments of the embedding, number of rows, True if it is fused)}
LOGITS = {
    "int8": (Int8QuantizationConfig(), {}, 1, True),
    "weights alone": (Int8QuantizationConfig(activation_quantizer=None), {}, 1, True),
    "soft cap": (Int8QuantizationConfig(), {"logit_soft_cap": 2.0}, 1, True),
    "several rows": (Int8QuantizationConfig(), {}, 2, False),
    "tied": (Int8QuantizationConfig(), {"tie_weights": True}, 1, False),
    "odd": (Int8QuantizationConfig(), {"vocabulary_size": 62}, 1, False),
    "int4": (Int4QuantizationConfig(block_size=16), {}, 1, False),
    "a custom quantizer": (CUSTOM_INT8, {}, 1, False),
}


@pytest.mark.parametrize(("config", "options", "rows", "fused"), LOGITS.values(), ids=LOGITS)
def test_fused_logits_of_a_quantized_embedding_match_the_layer(
    config, options, rows, fused, monkeypatch
):
    calls, linear = [], embeddings.norm_quantized_linear
    monkeypatch.setattr(
        embeddings, "norm_quantized_linear", lambda *a, **k: calls.append(a) or linear(*a, **k)
    )
    layer = embeddings.reversible_embedding(
        **{"vocabulary_size": 64, "hidden_dim": 32, "tie_weights": False, "dtype": "float32"}
        | options
    )
    layer.build()
    layer.quantize(config.mode, config=config)
    hidden_states = keras.random.normal((rows, 1, 32), seed=0)
    with torch.no_grad(), keras_recurrent.implementation("triton"):
        expected = layer(hidden_states, reverse=True)
        assert not calls  # outside of a decoding step
        with decoding.decoding_scope():
            found = layer(hidden_states, reverse=True)
    assert len(calls) == fused
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


GATED = {"query_key_activation": "linear", "gate_activation": "sigmoid", "use_norm_weight": True}
HEADS = {"head_dim": 4, "num_key_value_heads": 1, "use_qk_norm": True}
MIXERS = {
    "lightning, all options": lambda dtype: LightningAttention(
        *(2,),
        **{"rope_max_wavelength": 100.0, "query_scale": 0.3, "decay_schedule": "alibi"},
        # Without ε, the norm would cancel the scale of the queries.
        layer_norm_epsilon=0.1,
        **{**HEADS, **GATED, "dtype": dtype},
    ),
    "lightning": lambda dtype: LightningAttention(2, head_dim=4, dtype=dtype, **GATED),
    "attention, all options": lambda dtype: LocalAttention(
        *(2,),
        **{"max_length": 9, "use_qkv_bias": True, "bias_initializer": "normal"},
        **{"use_output_gate": True, "use_output_bias": False, "logit_scaling": 2.5},
        query_scale=0.2,
        **{**HEADS, "dtype": dtype},
    ),
    "attention": lambda dtype: LocalAttention(
        2, head_dim=4, max_length=9, partial_rotary_factor=0, use_output_gate=True, dtype=dtype
    ),
    "mamba, all options": lambda dtype: Mamba2(
        *(4,),
        **{"head_dim": 3, "state_dim": 6, "num_groups": 2, "use_conv_bias": False},
        **{"norm_position": "before_gate", "projection_scales": (0.5, 1.5, 1.2, 0.8, 1.1)},
        **{"layer_norm_epsilon": 0.1, "dtype": dtype},
    ),
    "in parallel": lambda dtype: ParallelMixers(
        Mamba2(2, head_dim=4, state_dim=6, dtype=dtype),
        LocalAttention(2, head_dim=4, max_length=9, dtype=dtype),
        attention_scale=0.5,
        dtype=dtype,
    ),
    "hgrn2": lambda dtype: HGRN2(expand_ratio=4, dtype=dtype),
    "recurrent block": lambda dtype: RecurrentBlock(8, num_blocks=2, dtype=dtype),
}
# {name: (number of rows, maximum number of rows of kernels, dtype)}
ROWS = {
    "row": (1, 16, "float32"),
    "rows": (3, 16, "float32"),
    "rows of torch": (3, 2, "float32"),
    "rows of layers": (3, 2, "float16"),
    "row, bfloat16": (1, 16, "bfloat16"),
    "rows, mixed_bfloat16": (3, 16, "mixed_bfloat16"),
}


# The number of rows selects the matrix product, for any mixer: one mixer runs with all numbers.
STEPS = [("mamba, all options", rows) for rows in ROWS]
STEPS += [(mixer, "rows, mixed_bfloat16") for mixer in MIXERS if mixer != "mamba, all options"]
STEPS += [(mixer, "row") for mixer in ("lightning, all options", "attention, all options")]


@pytest.mark.parametrize(("mixer", "name"), STEPS)
def test_fused_steps_with_options_match_layers(mixer, name, fused, monkeypatch):
    """A fused step ignores an option of a layer, or the scale of the residual branches."""
    rows, most, dtype = ROWS[name]
    for module in (decoding, norm_linear):
        monkeypatch.setattr(module, "max_fused_rows", lambda dtype: most)
    keras.utils.set_random_seed(0)
    block = GriffinResidualBlock(MIXERS[mixer](dtype), 24, residual_scale=0.3, dtype=dtype)
    block.build((None, None, 8))
    rng = np.random.default_rng(0)
    for weight in block.trainable_variables:  # norms too, whose weights are otherwise all equal
        weight.assign(weight + 0.2 * rng.normal(size=weight.shape))
    x, results = ops.cast(rng.normal(size=(rows, 2, 8)), block.compute_dtype), []
    for context in (decoding.decoding_scope, lambda: keras_recurrent.implementation("torch")):
        state = block.get_initial_state(rows)
        with keras_recurrent.implementation("triton"), context(), torch.no_grad():
            for t in range(2):
                y, state = block(x[:, t : t + 1], initial_state=state, return_state=True)
        results.append((y, state))
    assert len(fused) == 2
    tolerance = 1e-5 if dtype == "float32" else 0.02
    for found, expected in zip(*map(keras.tree.flatten, results), strict=True):
        assert found.dtype == expected.dtype
        bound = tolerance * expected.abs().max()
        torch.testing.assert_close(found, expected, rtol=0, atol=float(bound))


def replace_class(layer):
    layer.__class__ = make_user_class(type(layer))


def quantize_in_blocks(layer, size, reverse=False):
    layer.quantize("int4", config=Int4QuantizationConfig(block_size=size))
    if reverse:
        layer.g_idx.assign(keras.ops.flip(layer.g_idx))


NARROW_INT8 = Int8QuantizationConfig(
    activation_quantizer=keras.quantizers.AbsMaxQuantizer(value_range=(-63, 63))
)
# {reason: a change of a block}
REASONS = {
    "`gate_proj` has a LoRA adapter": lambda b: b.mlp.gate_proj.enable_lora(2),
    "`gate_proj` and `up_proj` share one operation, but have different quantization": (
        lambda b: b.mlp.up_proj.quantize("int8")
    ),
    "`up_proj` is quantized (float8)": lambda b: b.mlp.up_proj.quantize("float8"),
    "`down_proj` is quantized in blocks of 24 channels": (
        lambda b: quantize_in_blocks(b.mlp.down_proj, 24)
    ),
    "the channels of a block of `down_proj` are not consecutive": (
        lambda b: quantize_in_blocks(b.mlp.down_proj, 16, reverse=True)
    ),
    "`down_proj` quantizes its inputs with another": (
        lambda b: b.mlp.down_proj.quantize("int8", config=NARROW_INT8)
    ),
    "`down_proj` has a custom `call`": (
        lambda b: setattr(b.mlp.down_proj, "call", b.mlp.down_proj.call)
    ),
    "`temporal_block` has a custom `call`": (
        lambda b: setattr(b.temporal_block, "call", b.temporal_block.call)
    ),
    "`temporal_norm` is of class UserRMSNorm": lambda b: replace_class(b.temporal_norm),
    "`up_proj` is of class UserDense": lambda b: replace_class(b.mlp.up_proj),
    "`gate_proj` has an activation": (
        lambda b: setattr(b.mlp.gate_proj, "activation", keras.activations.relu)
    ),
}


@pytest.mark.parametrize("reason", REASONS)
def test_block_with_changed_layer_is_not_fused(reason):
    family = "griffin" if "temporal" in reason else "hgrn2"
    block = tiny_causal_lm(family=family, num_layers=1).backbone.transformer_layers[0]
    assert block.unfused_reason() is None
    REASONS[reason](block)
    assert reason in block.unfused_reason()


def test_change_of_the_order_of_quantization_blocks_ends_fused_steps():
    """A step ignores the order of weights that were loaded after an earlier call."""
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    block = model.backbone.transformer_layers[0]
    block.mlp.down_proj.quantize("int4", config=Int4QuantizationConfig(block_size=16))
    model.compile(sampler="greedy")
    for in_order in (True, False):
        assert (block.unfused_reason() is None) == in_order
        found = []
        for name in ("triton", "torch"):
            with keras_recurrent.implementation(name):
                found.append(generate(model, (2,), 5)["token_ids"])
        np.testing.assert_array_equal(*found)
        block.mlp.down_proj.g_idx.assign(keras.ops.flip(block.mlp.down_proj.g_idx))


def test_which_generation_names_blocks_that_are_not_fused():
    model = tiny_causal_lm(family="hgrn2", num_layers=2)
    model.backbone.transformer_layers[1].mlp.up_proj.enable_lora(2)
    generate_with("triton", model, (2,), total=3)
    found = keras_recurrent.which_generation(model)
    name = model.backbone.transformer_layers[1].name
    assert found.unfused == {name: "`up_proj` has a LoRA adapter"}
    assert f"{name} runs layer by layer" in str(found)


# {reason: arguments of a layer that mixes tokens}
VARIANTS = {
    "has convolutions": {"conv_size": 2},
    "has a bias of the forget gates": {"f_bias_initializer": "ones"},
    "must have a silu output gate": {"gate_activation": "sigmoid"},
    "scales a document's first input": {"scale_first_input": True},
    "is of class CGLRU": {"recurrence": "cg_lru"},
}


@pytest.mark.parametrize("reason", VARIANTS)
def test_block_of_a_variant_is_not_fused(reason):
    options = VARIANTS[reason]
    if options.keys() & {"scale_first_input", "recurrence"}:
        block = GriffinResidualBlock(RecurrentBlock(8, num_blocks=2, **options), 24)
    else:
        block = HGRN2ResidualBlock(HGRN2(expand_ratio=4, **options), 24)
    block.build((None, None, 8))
    assert reason in block.unfused_reason()


def test_call_with_cache_runs_layers(fused):
    model = tiny_causal_lm(family="hgrn2", num_layers=1)
    cache = model.backbone.get_initial_state(1)
    with keras_recurrent.implementation("triton"):
        model.call_with_cache(np.array([[3]]), cache)
    assert not fused


# === Launches ===


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
    "mamba, multilayer perceptron, attention": (
        *("mamba_hybrid", NEMOTRON),
        {1: (5, 3, 4), 3: (6, 3, 4), 17: (9, 4, 8)},
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
