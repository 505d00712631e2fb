"""Checkpoint layout of the dense models of LFM2 and LFM2.5.

Liquid AI 2025, arXiv:2511.23404. Default values are those of transformers. One tensor has the
projections to both gates and the input of a convolution, concatenated along axis 0. The final norm
is named `embedding_norm`. Older files list the indices of attention blocks in `full_attn_idxs`.
"""

from keras_recurrent.checkpoints.layout import Layout
from keras_recurrent.checkpoints.tensor_table import DEPTHWISE, stacked
from keras_recurrent.models.lfm2.lfm2_backbone import ATTENTION, CONVOLUTION

BLOCK_TYPES = {"conv": CONVOLUTION, "full_attention": ATTENTION}


class LFM2Layout(Layout):
    """`LFM2Backbone` from and to transformers' `Lfm2ForCausalLM`."""

    model_type = "lfm2"
    architecture = "Lfm2ForCausalLM"
    final_norm = "model.embedding_norm.weight"
    unused = (
        *("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init"),
        *("conv_use_xavier_init", "model_name", "theta"),
    )

    keys = {
        "vocabulary_size": ("vocab_size", 65_536),
        "num_layers": ("num_hidden_layers", 32),
        "hidden_dim": ("hidden_size", 2560),
        "num_query_heads": ("num_attention_heads", 32),
        "num_key_value_heads": ("num_key_value_heads", 8),
        "conv_size": ("conv_L_cache", 3),
        "use_conv_bias": ("conv_bias", False),
        "max_position_embeddings": ("max_position_embeddings", None),
        "layer_norm_epsilon": ("norm_eps", 1e-5),
    }

    def read_further_arguments(self, config, arguments):
        hidden_dim, heads = arguments["hidden_dim"], arguments["num_query_heads"]
        shared = "num_key_value_heads", arguments["num_key_value_heads"]
        config.check_divides(*shared, "num_attention_heads", heads)
        head_dim = config.integer("head_dim", default=None, multiple_of=2)
        if head_dim is None:
            if hidden_dim % (2 * heads):
                wanted = f"heads of an even size, in equal parts of 'hidden_size', {hidden_dim}"
                raise config.unsupported_error("num_attention_heads", heads, wanted)
            head_dim = hidden_dim // heads
        rope = config.section("rope_parameters")
        rope.fixed("rope_type", "default")
        theta = config.number("rope_theta", default=1_000_000.0)
        theta = rope.number("rope_theta", default=theta)
        rope.check_all_read()
        config.fixed("rope_scaling", None)
        # transformers does not read these keys. Other values would mean another architecture.
        for key in ("conv_dim", "conv_dim_out", "block_dim"):
            config.fixed(key, hidden_dim, source="the value of 'hidden_size'")
        config.fixed("num_heads", heads, source="the value of 'num_attention_heads'")
        epsilon = arguments["layer_norm_epsilon"]
        config.fixed("block_norm_eps", epsilon, source="the value of 'norm_eps'")
        config.fixed("block_use_swiglu", True)
        config.fixed("use_pos_enc", True)
        is_tied = config.flag("tie_word_embeddings", default=True)
        return {
            "intermediate_dim": _read_intermediate_dim(config),
            "block_types": _read_block_types(config, arguments["num_layers"]),
            "head_dim": head_dim,
            "rope_max_wavelength": theta,
            "tie_word_embeddings": config.flag("tie_embedding", default=is_tied),
        }

    def write_config(self, arguments):
        names = {ours: theirs for theirs, ours in BLOCK_TYPES.items()}
        types = [names[block_type] for block_type in arguments["block_types"]]
        width, theta = arguments["intermediate_dim"], arguments["rope_max_wavelength"]
        is_tied = arguments["tie_word_embeddings"]
        return {
            **super().write_config(arguments),
            "intermediate_size": width,
            "block_ff_dim": width,
            "block_auto_adjust_ff_dim": False,
            "layer_types": types,
            "full_attn_idxs": [i for i, name in enumerate(types) if name == names[ATTENTION]],
            "head_dim": arguments["head_dim"],
            # transformers 5 reads the first form, earlier versions the second.
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "rope_theta": theta,
            "tie_embedding": is_tied,
            "tie_word_embeddings": is_tied,
        }

    def block_tensors(self, i, block, arguments):
        d, m = arguments["hidden_dim"], arguments["intermediate_dim"]
        has_attention = arguments["block_types"][i] == ATTENTION
        yield block.tensor("operator_norm.weight", (d,), "temporal_norm/scale")
        yield from (_attention if has_attention else _convolution)(block, arguments)
        yield block.tensor("ffn_norm.weight", (d,), "channel_norm/scale")
        yield from block.mlp("feed_forward", d, m, names=("w1", "w3", "w2"))


def _attention(block, arguments):
    yield from block.attention("self_attn", "temporal_block", arguments, "out_proj")
    for name in "qk":
        theirs, ours = f"self_attn.{name}_layernorm.weight", f"temporal_block/{name}_norm/scale"
        yield block.tensor(theirs, (arguments["head_dim"],), ours)


def _convolution(block, arguments):
    d, taps, bias = (arguments[name] for name in ("hidden_dim", "conv_size", "use_conv_bias"))
    ours, projections = "temporal_block/conv1d", [f"temporal_block/{name}_proj" for name in "bcu"]
    kernels, biases = ([f"{p}/{name}" for p in projections] for name in ("kernel", "bias"))
    yield block.tensor("conv.in_proj.weight", (3 * d, d), *kernels, transform=stacked(3))
    yield block.tensor("conv.conv.weight", (d, 1, taps), f"{ours}/kernel", transform=DEPTHWISE)
    if bias:
        yield block.tensor("conv.in_proj.bias", (3 * d,), *biases, transform=stacked(3))
        yield block.tensor("conv.conv.bias", (d,), f"{ours}/bias")
    yield from block.linear("conv.out_proj", d, d, "temporal_block/o_proj", bias)


def _read_intermediate_dim(config):
    """Returns the width inside the SwiGLU; some files give the width before an adjustment."""
    width = config.integer("intermediate_size", default=12_288)
    width = config.integer("block_ff_dim", default=width)
    multiple = config.integer("block_multiple_of", default=256)
    # transformers fails if the key is null.
    is_missing = "block_ffn_dim_multiplier" not in config.config
    default = {"default": 1.0} if is_missing else {}
    multiplier = config.number("block_ffn_dim_multiplier", **default)
    if not config.flag("block_auto_adjust_ff_dim", default=True):
        return width
    return -(-int(multiplier * int(2 * width / 3)) // multiple) * multiple


def _read_block_types(config, num_layers):
    indices = range(num_layers)
    if config.config.get("full_attn_idxs") is not None:
        maximum, source = num_layers - 1, "'num_hidden_layers' minus 1"
        indices = config.integer_list("full_attn_idxs", maximum, source)
    config.ignore("full_attn_idxs")
    default = ["full_attention" if i in indices else "conv" for i in range(num_layers)]
    names = config.name_list("layer_types", BLOCK_TYPES, default, num_layers)
    return tuple(BLOCK_TYPES[name] for name in names)
