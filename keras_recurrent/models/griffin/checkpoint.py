"""Checkpoint layout of RecurrentGemma, a variant of Griffin.

Botev et al. 2024, arXiv:2404.07839. Numbers in the file and here differ: its `intermediate_size`
counts both branches of the gated MLP; its `recurrent_param` is -Λ.

`attention_window_size` has two meanings. The published models were trained with DeepMind's code,
where with a window of 2048 a token attends to 2048 tokens before itself, so to 2049 including
itself, the `sliding_window` here. In transformers the number includes the token itself: beyond the
window it omits a token that the model was trained with. Published files are therefore read with
DeepMind's meaning. Exported files have the number with which transformers reproduces the model,
and the key `window_includes_current_token`, which transformers keeps and ignores. Add this key to a
model that was trained in transformers on texts longer than its window.
"""

import warnings

from keras_recurrent.checkpoints.config_reader import REQUIRED
from keras_recurrent.checkpoints.layout import Layout
from keras_recurrent.checkpoints.tensor_table import BLOCK_BIAS, DEPTHWISE, NEGATED
from keras_recurrent.presets.griffin import embedding_scale

BLOCK_TYPES = {"recurrent": "recurrent", "attention": "local_attention"}
COUNTS_ITSELF = "window_includes_current_token"
TAPS = 4  # taps of the temporal convolution


class RecurrentGemma(Layout):
    """`GriffinBackbone` from and to transformers' `RecurrentGemmaForCausalLM`."""

    model_type = "recurrent_gemma"
    architecture = "RecurrentGemmaForCausalLM"
    tokenizer_class = "GemmaTokenizer"
    final_norm = "model.final_norm.weight"
    unused = ("w_init_variance_scale", "final_w_init_variance_scale")  # initialization only

    keys = {
        "vocabulary_size": ("vocab_size", REQUIRED),
        "num_layers": ("num_hidden_layers", REQUIRED),
        "hidden_dim": ("hidden_size", REQUIRED),
        "lru_width": ("lru_width", "hidden_dim"),
        "num_query_heads": ("num_attention_heads", REQUIRED),
        # A missing number means as many as queries in transformers, but 1 in the published files.
        "num_key_value_heads": ("num_key_value_heads", 1),
        "final_logit_soft_cap": ("logits_soft_cap", 30.0),
        "layer_norm_epsilon": ("rms_norm_eps", 1e-6),
    }
    constants = {"recurrence": "rg_lru", "scale_first_input": False}
    fixed = {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "conv1d_width": (TAPS,),
        "attention_bias": (False,),
        "tie_word_embeddings": (True,),
    }

    def read_further_arguments(self, config, arguments):
        hidden_dim, heads = arguments["hidden_dim"], arguments["num_query_heads"]
        rope = config.section("rope_parameters")
        rope.fixed("rope_type", "default")
        rotary = config.rope_number(rope, "partial_rotary_factor", 0.5, maximum=1)
        theta = config.rope_number(rope, "rope_theta", 10_000.0)
        rope.check_all_read()
        pattern = config.name_list(
            "block_types", BLOCK_TYPES, default=("recurrent", "recurrent", "attention")
        )
        head_dim = config.integer("head_dim", default=hidden_dim // heads)
        config.fixed("_block_types", list(pattern))  # a copy of `block_types`
        config.fixed("attention_dropout", 0.0, 0)
        config.fixed("embeddings_scale_by_sqrt_dim", True)
        config.fixed("rope_scaling", None)
        mixers = pattern[: arguments["num_layers"]]
        if "attention" in mixers:
            _check_attention(config, arguments, rotary, head_dim)
        if "recurrent" in mixers and arguments["lru_width"] % heads:
            # The gates have a block for each head.
            wanted = f"a multiple of 'num_attention_heads', {heads}"
            raise config.unsupported_error("lru_width", arguments["lru_width"], wanted)
        return {
            "intermediate_dim": config.integer("intermediate_size", multiple_of=2) // 2,
            "num_blocks": heads,
            "block_types": tuple(BLOCK_TYPES[name] for name in pattern),
            "head_dim": head_dim,
            "sliding_window": config.integer("attention_window_size", default=2048)
            + (0 if config.flag(COUNTS_ITSELF, default=False) else 1),
            "rope_max_wavelength": theta,
            "partial_rotary_factor": rotary,
            "embedding_scale": embedding_scale(hidden_dim),
        }

    def requirements(self, arguments):
        heads, scale = arguments["num_query_heads"], embedding_scale(arguments["hidden_dim"])
        types = BLOCK_TYPES.values()
        is_square_root = arguments["embedding_scale"] == scale
        square_root = f"{scale}, which is sqrt(hidden_dim) rounded to bfloat16"
        return {
            **super().requirements(arguments),
            "sliding_window": (arguments["sliding_window"] is not None, "a number"),
            "num_blocks": (arguments["num_blocks"] == heads, f"`num_query_heads`, {heads}"),
            "block_types": (
                set(arguments["block_types"]) <= set(types),
                f"of {' and '.join(map(repr, types))}",
            ),
            "embedding_scale": (is_square_root, square_root),
            "partial_rotary_factor": (arguments["partial_rotary_factor"] > 0, "above 0"),
        }

    def write_config(self, arguments):
        names = {ours: theirs for theirs, ours in BLOCK_TYPES.items()}
        rope = {
            "rope_theta": arguments["rope_max_wavelength"],
            "partial_rotary_factor": arguments["partial_rotary_factor"],
        }
        return {
            **super().write_config(arguments),
            "intermediate_size": 2 * arguments["intermediate_dim"],
            "block_types": [names[name] for name in arguments["block_types"]],
            "head_dim": arguments["head_dim"],
            "attention_window_size": arguments["sliding_window"],
            COUNTS_ITSELF: True,
            # transformers 5 reads the first form, earlier versions the second.
            "rope_parameters": {"rope_type": "default", **rope},
            **rope,
        }

    def block_tensors(self, i, block, arguments):
        d, m = arguments["hidden_dim"], arguments["intermediate_dim"]
        pattern = arguments["block_types"]
        is_recurrent = pattern[i % len(pattern)] == "recurrent"
        yield block.tensor("temporal_pre_norm.weight", (d,), "temporal_norm/scale")
        yield from (_recurrent if is_recurrent else _attention)(block, arguments)
        yield block.tensor("channel_pre_norm.weight", (d,), "channel_norm/scale")
        yield from block.mlp("mlp_block", d, m, bias=True)


def _check_attention(config, arguments, rotary, head_dim):
    """Raises an error for unsupported sizes of attention, and warns of an ambiguous window."""
    if int(rotary * head_dim) % 2:
        wanted = f"fractions of 'head_dim', {head_dim}, with an even number of channels"
        raise config.unsupported_error("partial_rotary_factor", rotary, wanted)
    shared = "num_key_value_heads", arguments["num_key_value_heads"]
    config.check_divides(*shared, "num_attention_heads", arguments["num_query_heads"])
    if config.config.get(COUNTS_ITSELF) is None:
        warnings.warn(
            f"{config.source} does not say whether 'attention_window_size' includes the "
            f"current token. Set {COUNTS_ITSELF!r} there: to false, which is assumed, for "
            "Google's models, or to true for a model that was trained in transformers on texts "
            "longer than the window.",
            stacklevel=2,
        )


def _recurrent(block, arguments):
    d, r, n = arguments["hidden_dim"], arguments["lru_width"], arguments["num_blocks"]
    for name in ("linear_x", "linear_y"):
        yield from block.linear(f"temporal_block.{name}", d, r, f"temporal_block/{name}", True)
    theirs, ours = "temporal_block.conv_1d", "temporal_block/conv1d"
    yield block.tensor(f"{theirs}.weight", (r, 1, TAPS), f"{ours}/kernel", transform=DEPTHWISE)
    yield block.tensor(f"{theirs}.bias", (r,), f"{ours}/bias")
    theirs, ours = "temporal_block.rg_lru", "temporal_block/rg_lru"
    yield block.tensor(f"{theirs}.recurrent_param", (r,), f"{ours}/a_logit", transform=NEGATED)
    for gate, layer in (("recurrent", "recurrence"), ("input", "input")):
        name, layer = f"{theirs}.{gate}_gate", f"{ours}/{layer}_gate"
        yield block.tensor(f"{name}_weight", (n, r // n, r // n), f"{layer}/kernel")
        yield block.tensor(f"{name}_bias", (n, r // n), f"{layer}/bias", transform=BLOCK_BIAS)
    yield from block.linear("temporal_block.linear_out", r, d, "temporal_block/linear_out", True)


def _attention(block, arguments):
    return block.attention("temporal_block", "temporal_block", arguments, output_bias=True)
