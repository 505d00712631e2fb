"""Checkpoint layout of HGRN2 in flash-linear-attention.

In that library, the norm inside a layer that mixes tokens has ε = 1e-5 for any `norm_eps`, the
gate's activation is silu and the input has none. The paper (Qin et al. 2024, arXiv:2404.07904) has
a sigmoid for the gate and silu for the input.
"""

import numpy as np

from keras_recurrent.checkpoints.config_reader import REQUIRED
from keras_recurrent.checkpoints.layout import Layout
from keras_recurrent.checkpoints.tensor_table import DEPTHWISE, SAME, Tensor, Transform
from keras_recurrent.models.hgrn2.hgrn2_backbone import bounded_layers

# As `Layout.keys`, of the object `attn` for blocks of softmax attention.
ATTENTION_KEYS = {
    "num_query_heads": ("num_heads", REQUIRED),
    "num_key_value_heads": ("num_kv_heads", "num_query_heads"),
    "sliding_window": ("window_size", None),
    "rope_max_wavelength": ("rope_theta", 10_000.0),
    "use_qkv_bias": ("qkv_bias", False),
}


class HGRN2Layout(Layout):
    """`HGRN2Backbone` from and to flash-linear-attention's `HGRN2ForCausalLM`."""

    model_type = "hgrn2"
    architecture = "HGRN2ForCausalLM"
    embedding = "model.embeddings.weight"
    # These keys choose kernels of that library and do not change the model.
    unused = (
        *("attn_mode", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy"),
        *("fuse_linear_cross_entropy", "use_l2warp"),
    )

    keys = {
        "vocabulary_size": ("vocab_size", REQUIRED),
        "num_layers": ("num_hidden_layers", REQUIRED),
        "hidden_dim": ("hidden_size", REQUIRED),
        "use_lower_bounds": ("use_lower_bound", True),
        "tie_word_embeddings": ("tie_word_embeddings", False),
        "layer_norm_epsilon": ("norm_eps", 1e-6),
    }
    constants = {"gate_activation": "silu", "input_activation": "linear"}
    fixed = {"hidden_act": ("swish", "silu"), "elementwise_affine": (True,)}

    def read_further_arguments(self, config, arguments):
        hidden_dim = arguments["hidden_dim"]
        # Heads are given by number or by size; the size has precedence.
        num_heads = config.integer("num_heads", default=max(1, hidden_dim // 128))
        expand_ratio = config.integer("expand_ratio", default=hidden_dim // num_heads)
        config.check_divides("expand_ratio", expand_ratio, "hidden_size", hidden_dim)
        hidden_ratio = config.integer("hidden_ratio", default=4)
        third = int(hidden_dim * hidden_ratio * 2 / 3)
        has_convolutions = config.flag("use_short_conv", default=False)
        conv_size = config.integer("conv_size", default=4)
        # An early version could share one convolution between the three projections.
        config.fixed("share_conv_kernel", *([False] if has_convolutions else [False, True]))
        config.fixed("attnres_block_size", None)
        return {
            "intermediate_dim": config.integer("intermediate_size", default=-(-third // 256) * 256),
            "expand_ratio": expand_ratio,
            "conv_size": conv_size if has_convolutions else None,
            **_read_attention(config, hidden_dim, arguments["num_layers"]),
        }

    def write_config(self, arguments):
        layers = arguments["attention_layers"]
        attention = {key: arguments[argument] for argument, (key, _) in ATTENTION_KEYS.items()}
        return {
            **super().write_config(arguments),
            **({"attn": {"layers": layers, **attention}} if layers else {}),
            "intermediate_size": arguments["intermediate_dim"],
            "expand_ratio": arguments["expand_ratio"],
            "num_heads": arguments["hidden_dim"] // arguments["expand_ratio"],
            "use_short_conv": arguments["conv_size"] is not None,
            "conv_size": arguments["conv_size"] or 4,
        }

    def tensors(self, arguments):
        embedding, *tensors = super().tensors(arguments)
        if not arguments["use_lower_bounds"]:
            return [embedding, *tensors]
        layers, d = arguments["num_layers"], arguments["hidden_dim"]
        # If no block has a bound, the model has no weight for the table of the file.
        unused = Transform(lambda tensor: (), lambda: np.zeros((layers, d), "float32"))
        has_bounds = bounded_layers(layers, arguments["attention_layers"])
        weights, transform = (("lower_bounds/logits",), SAME) if has_bounds else ((), unused)
        bounds = Tensor("model.lower_bounds", (layers, d), weights, transform)
        return [embedding, bounds, *tensors]

    def block_tensors(self, i, block, arguments):
        d, m = arguments["hidden_dim"], arguments["intermediate_dim"]
        has_attention = i in arguments["attention_layers"]
        yield block.tensor("attn_norm.weight", (d,), "temporal_norm/scale")
        yield from (_attention if has_attention else _hgrn2)(block, arguments)
        yield block.tensor("mlp_norm.weight", (d,), "channel_norm/scale")
        yield from block.mlp("mlp", d, m)


def _hgrn2(block, arguments):
    d, taps = arguments["hidden_dim"], arguments["conv_size"]
    for name in ("q_proj", "f_proj", "i_proj", "o_proj"):
        yield from block.linear(f"attn.{name}", d, d, f"temporal_block/{name}")
    for name in ("q_conv1d", "f_conv1d", "i_conv1d") if taps is not None else ():
        shape, weight = (d, 1, taps), f"temporal_block/{name}/kernel"
        yield block.tensor(f"attn.{name}.weight", shape, weight, transform=DEPTHWISE)
    yield block.tensor("attn.g_norm.weight", (d,), "temporal_block/norm/scale")


def _attention(block, arguments):
    d, bias = arguments["hidden_dim"], arguments["use_qkv_bias"]
    keys = d // arguments["num_query_heads"] * arguments["num_key_value_heads"]
    for name, size in (("q_proj", d), ("k_proj", keys), ("v_proj", keys)):
        yield from block.linear(f"attn.{name}", d, size, f"temporal_block/{name}", bias)
    yield from block.linear("attn.o_proj", d, d, "temporal_block/o_proj")


def _read_attention(config, hidden_dim, num_layers):
    """Returns the arguments of the blocks with attention, from the object or objects of `attn`."""
    layers, settings = [], []
    for section in config.sections("attn"):
        # Stored in some files, and not read by that library.
        section.ignore("qk_norm")
        layers += section.integer_list("layers", maximum=num_layers - 1)
        values = section.values(ATTENTION_KEYS)
        num_heads, shared = values["num_query_heads"], values["num_key_value_heads"]
        if hidden_dim % (2 * num_heads):
            wanted = f"heads of an even size, in equal parts of 'hidden_size', {hidden_dim}"
            raise section.unsupported_error("num_heads", num_heads, wanted)
        section.check_divides("num_kv_heads", shared, "num_heads", num_heads)
        section.check_all_read()
        settings.append(values)
    if any(others != settings[0] for others in settings) or len(set(layers)) != len(layers):
        wanted = "objects that differ only in 'layers', each layer in one of them"
        raise config.unsupported_error("attn", config.config["attn"], wanted)
    return {"attention_layers": tuple(sorted(layers)), **(settings[0] if settings else {})}
