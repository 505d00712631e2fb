"""Checkpoint layouts of HypeNet and MiniCPM-SALA.

HypeNet's default values are those of its configuration class, in which norms and gates are off.
MiniCPM-SALA's are the published values.
"""

import math

from keras_recurrent.checkpoints.config_reader import REQUIRED
from keras_recurrent.checkpoints.layout import Layout, solve
from keras_recurrent.models.lightning_hybrid.lightning_hybrid_backbone import GLOBAL, LIGHTNING

LIGHTNING_NAMES = ("lightning-attn", "lightning_attn", "lightning")
# Numbers of block-sparse attention, which are read and written but never used.
SPARSE = {
    "kernel_size": 32,
    "kernel_stride": 16,
    "init_blocks": 1,
    "block_size": 64,
    "window_size": 2048,
    "topk": 64,
    "use_nope": False,
}
# Arguments that HypeNet does not have.
UNUSED_ARGUMENTS = ("embedding_scale", "residual_scale", "output_scale", "dense_length")
LOGIT_SCALING = "hype"  # `attn_logits_scaling` is null, "hype" or "hype" and a number
LOGIT_SCALING_DEFAULT = 362.0


def _query_scales(arguments):
    """Returns `{lightning_scale: lightning_query_scale}`."""
    head_dim = arguments["lightning_head_dim"] or 1
    return {"1/sqrt(d)": head_dim**-0.5, "1/d": 1 / head_dim, "1": None}


class LightningHybridLayout(Layout):
    """Base class: what both configurations have in common.

    Attributes:
        attention: string, the name of attention in `mixer_types`.
        flags: `{key: (default, supported value)}` of booleans.
    """

    attention: str
    flags: dict[str, tuple[bool, bool]]
    keys = {
        "vocabulary_size": ("vocab_size", REQUIRED),
        "hidden_dim": ("hidden_size", REQUIRED),
        "intermediate_dim": ("intermediate_size", REQUIRED),
        "num_layers": ("num_hidden_layers", REQUIRED),
        "num_query_heads": ("num_attention_heads", REQUIRED),
        "num_key_value_heads": ("num_key_value_heads", REQUIRED),
        "head_dim": ("head_dim", 128),
        "num_lightning_heads": ("lightning_nh", "num_query_heads"),
        "num_lightning_key_value_heads": ("lightning_nkv", "num_key_value_heads"),
        "lightning_head_dim": ("lightning_head_dim", "head_dim"),
        "rope_max_wavelength": ("rope_theta", 10_000.0),
        "layer_norm_epsilon": ("rms_norm_eps", 1e-6),
        "tie_word_embeddings": ("tie_word_embeddings", False),
    }
    fixed = {"hidden_act": ("silu",), "attention_bias": (False,)}

    def read_further_arguments(self, config, arguments):
        config.integer("lightning_head_dim", arguments["head_dim"], multiple_of=2)
        for kind in ("", "lightning_"):
            heads = "num_lightning_heads" if kind else "num_query_heads"
            shared = f"num_{kind}key_value_heads"
            keys = self.keys[shared][0], self.keys[heads][0]
            config.check_divides(keys[0], arguments[shared], keys[1], arguments[heads])
        scales = _query_scales(arguments)
        for key, (default, supported) in self.flags.items():
            if config.flag(key, default) is not supported:
                raise config.unsupported_error(key, not supported, f"{supported}")
        config.fixed("attention_dropout", 0.0, 0)
        config.fixed("rope_scaling", None)
        return {
            "block_types": self._block_types(config, arguments["num_layers"]),
            "lightning_query_scale": scales[config.fixed("lightning_scale", *scales)],
        }

    def _block_types(self, config, num_layers):
        if config.config.get("mixer_types") == []:
            config.ignore("mixer_types")
            return (GLOBAL,) * num_layers
        choices = self.attention, *LIGHTNING_NAMES
        names = config.name_list("mixer_types", choices, num_layers=num_layers)
        return tuple(GLOBAL if name == self.attention else LIGHTNING for name in names)

    def requirements(self, arguments):
        scales = _query_scales(arguments).values()
        scale = arguments["lightning_query_scale"]
        return {
            **super().requirements(arguments),
            "lightning_query_scale": (scale in scales, f"one of {list(scales)}"),
        }

    def write_config(self, arguments):
        names = {GLOBAL: self.attention, LIGHTNING: LIGHTNING_NAMES[0]}
        scales = {scale: name for name, scale in _query_scales(arguments).items()}
        return {
            **super().write_config(arguments),
            "mixer_types": [names[name] for name in arguments["block_types"]],
            "lightning_scale": scales[arguments["lightning_query_scale"]],
            **{key: supported for key, (_, supported) in self.flags.items()},
        }

    def block_tensors(self, i, block, arguments):
        d, m = arguments["hidden_dim"], arguments["intermediate_dim"]
        is_lightning = arguments["block_types"][i] == LIGHTNING
        kind, heads = ("lightning_", "lightning") if is_lightning else ("", "query")
        gate = ("z_proj", "u_proj") if is_lightning else ("o_gate", "gate_proj")
        size = arguments[f"{kind}head_dim"]
        inner = arguments[f"num_{heads}_heads"] * size
        keys = arguments[f"num_{kind}key_value_heads"] * size
        yield block.tensor("input_layernorm.weight", (d,), "temporal_norm/scale")
        layers = {"q_proj": inner, "k_proj": keys, "v_proj": keys}
        for theirs, ours, width in [*((n, n, w) for n, w in layers.items()), (*gate, inner)]:
            yield from block.linear(f"self_attn.{theirs}", d, width, f"temporal_block/{ours}")
        yield from block.linear("self_attn.o_proj", inner, d, "temporal_block/o_proj")
        norms = {"q_norm": size, "k_norm": size} if is_lightning or arguments["use_qk_norm"] else {}
        for name, width in {**norms, **({"o_norm": inner} if is_lightning else {})}.items():
            ours = f"temporal_block/{name.removeprefix('o_')}/scale"
            yield block.tensor(f"self_attn.{name}.weight", (width,), ours)
        yield block.tensor("post_attention_layernorm.weight", (d,), "channel_norm/scale")
        yield from block.mlp("mlp", d, m)


class HypeNet(LightningHybridLayout):
    """`LightningHybridBackbone` from and to `HypeNetForCausalLM`."""

    model_type = "hypenet"
    architecture = "HypeNetForCausalLM"
    attention = "attn"
    unused = ("expand_kv_proj", "loss_fn", "rand_init", "fused_ce_loss", "shift_labels")
    flags = {
        "attn_use_rope": (True, False),
        "attn_use_output_gate": (False, True),
        "lightning_use_rope": (True, True),
        "lightning_use_qk_norm": (False, True),
        "lightning_use_output_norm": (False, True),
        "lightning_use_output_gate": (False, True),
        "lightning_use_short_conv": (False, False),
    }

    constants = {**dict.fromkeys(UNUSED_ARGUMENTS), "use_qk_norm": True}
    fixed = {**LightningHybridLayout.fixed, "lightning_rope_scaling": (None,)}

    def read_further_arguments(self, config, arguments):
        # Numbers of layers that `mixer_types` cannot name here.
        config.ignore(*(k for k in config.config if k.startswith(("gdn_", "kda_", "mamba2_"))))
        others = super().read_further_arguments(config, arguments)
        return {**others, "attention_logit_scaling": _read_logit_scaling(config)}

    def write_config(self, arguments):
        scaling = arguments["attention_logit_scaling"]
        return {
            **super().write_config(arguments),
            "attn_logits_scaling": None if scaling is None else f"{LOGIT_SCALING} {scaling}",
        }


class MiniCPMSALA(LightningHybridLayout):
    """`LightningHybridBackbone` from and to `MiniCPMSALAForCausalLM`."""

    model_type = "minicpm_sala"
    architecture = "MiniCPMSALAForCausalLM"
    attention = "minicpm4"
    unused = ("mup_denominator", "rand_init", "shift_labels")
    flags = {
        "attn_use_rope": (False, False),
        "attn_use_output_gate": (True, True),
        "lightning_use_rope": (True, True),
        "qk_norm": (True, True),
        "use_output_norm": (True, True),
        "use_output_gate": (True, True),
    }

    constants = {"use_qk_norm": False, "attention_logit_scaling": None}

    def read_further_arguments(self, config, arguments):
        others = super().read_further_arguments(config, arguments)
        hidden_dim, num_layers = arguments["hidden_dim"], arguments["num_layers"]
        heads, head_dim = arguments["num_query_heads"], arguments["head_dim"]
        if heads * head_dim != hidden_dim:
            wanted = f"'hidden_size' / 'num_attention_heads', {hidden_dim / heads:g}"
            raise config.unsupported_error("head_dim", head_dim, wanted)
        # The original reads the first of each pair for both kinds of layers.
        config.fixed("lightning_nh", heads)
        config.fixed("lightning_head_dim", head_dim)
        if others["block_types"][0] != GLOBAL:
            wanted = f"{self.attention!r} as the first name"
            raise config.unsupported_error("mixer_types", config.config["mixer_types"], wanted)
        config.fixed("pretraining_tp", 1)
        return {
            **others,
            "embedding_scale": config.number("scale_emb", default=12.0),
            "residual_scale": config.number("scale_depth", default=1.4) / math.sqrt(num_layers),
            "output_scale": config.integer("dim_model_base", default=256) / hidden_dim,
            "dense_length": _read_dense_length(config),
        }

    def requirements(self, arguments):
        heads, d = arguments["num_query_heads"], arguments["hidden_dim"]
        size, scale = arguments["head_dim"], arguments["output_scale"]
        fraction = f"an integer divided by `hidden_dim`, {d}"
        return {
            **super().requirements(arguments),
            "embedding_scale": (arguments["embedding_scale"] is not None, "a number"),
            "residual_scale": (arguments["residual_scale"] is not None, "a number"),
            "output_scale": (scale is not None and round(scale * d) / d == scale > 0, fraction),
            "head_dim": (size * heads == d, "`hidden_dim / num_query_heads`"),
            "num_lightning_heads": (arguments["num_lightning_heads"] == heads, f"{heads}"),
            "lightning_head_dim": (arguments["lightning_head_dim"] == size, f"{size}"),
            "block_types": (arguments["block_types"][0] == GLOBAL, f"{GLOBAL!r} at first"),
        }

    def write_config(self, arguments):
        length, scale = arguments["dense_length"], arguments["residual_scale"]
        root = math.sqrt(arguments["num_layers"])
        return {
            **super().write_config(arguments),
            "scale_emb": arguments["embedding_scale"],
            "scale_depth": solve(lambda depth: depth / root, scale, scale * root),
            "dim_model_base": round(arguments["output_scale"] * arguments["hidden_dim"]),
            "sparse_config": None if length is None else {**SPARSE, "dense_len": length},
        }


def _read_logit_scaling(config):
    config.ignore("attn_logits_scaling")
    value = config.config.get("attn_logits_scaling")
    words = value.split() if isinstance(value, str) else []
    try:
        a = float(words[-1]) if len(words) > 1 else LOGIT_SCALING_DEFAULT
    except ValueError:
        a = 0.0
    if value is not None and (words[:1] != [LOGIT_SCALING] or not 2 <= a < math.inf):
        wanted = f"null, or {LOGIT_SCALING!r} and a number of at least 2, as in 'hype 500'"
        raise config.unsupported_error("attn_logits_scaling", value, wanted)
    return None if value is None else a


def _read_dense_length(config):
    """Returns `dense_len` of `sparse_config`, or None for a model without sparse attention."""
    sparse = config.section("sparse_config")
    if config.config.get("sparse_config") is None:
        return None
    for key, value in SPARSE.items():
        sparse.fixed(key, value)
    dense_length = sparse.integer("dense_len")
    sparse.check_all_read()
    return dense_length
