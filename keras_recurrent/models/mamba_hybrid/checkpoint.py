"""Checkpoint layouts of Nemotron-H, Granite 4.0 H, Falcon-H1 and Mamba-2.

Default values are those of the configuration classes of transformers 5.24.
"""

import functools
import math
from typing import Any

import numpy as np

from keras_recurrent.checkpoints.config_reader import REQUIRED
from keras_recurrent.checkpoints.layout import Layout, solve
from keras_recurrent.checkpoints.tensor_table import Transform, stacked
from keras_recurrent.models.mamba_hybrid.mamba_hybrid_backbone import (
    ATTENTION,
    MAMBA,
    MLP,
    PARALLEL,
    SQUARED_RELU,
    SWIGLU,
)

# Arguments of each kind of layer, which a network without such a layer ignores.
MAMBA_SIZES = ("num_mamba_heads", "mamba_head_dim", "mamba_state_dim", "num_mamba_groups")
ATTENTION_SIZES = ("num_query_heads", "num_key_value_heads", "head_dim")
USES = {
    (*MAMBA_SIZES, "mamba_conv_size", "use_mamba_conv_bias"): {MAMBA, PARALLEL},
    ATTENTION_SIZES: {ATTENTION, PARALLEL},
    ("intermediate_dim",): {MLP},
}
RESIDUAL_SCALES = ("mamba_scale", "attention_scale", "mlp_scale")
NO_SCALES = dict.fromkeys(
    (
        *("embedding_scale", "output_scale", *RESIDUAL_SCALES, "mlp_gate_scale"),
        "mamba_projection_scales",
    )
)
# Keys of Nemotron-H and Mamba-2.
NORMS_AND_BIAS: dict[str, tuple[str, Any]] = {
    "layer_norm_epsilon": ("layer_norm_epsilon", 1e-5),
    "use_mamba_conv_bias": ("use_conv_bias", True),
    "tie_word_embeddings": ("tie_word_embeddings", False),
}
# Keys of Granite and Falcon-H1.
MAMBA_KEYS: dict[str, tuple[str, Any]] = {
    "num_mamba_heads": ("mamba_n_heads", 128),
    "mamba_state_dim": ("mamba_d_state", 256),
    "num_mamba_groups": ("mamba_n_groups", 1),
    "mamba_conv_size": ("mamba_d_conv", 4),
    "use_mamba_conv_bias": ("mamba_conv_bias", True),
    "tie_word_embeddings": ("tie_word_embeddings", False),
}
# Layers that mix tokens in a block, {block type: {layer: its path}}.
MIXERS = {
    MAMBA: {MAMBA: "temporal_block"},
    ATTENTION: {ATTENTION: "temporal_block"},
    PARALLEL: {MAMBA: "temporal_block/mamba", ATTENTION: "temporal_block/attention"},
    MLP: {},
}
UNLIMITED = 1e9  # an upper limit of time steps that has no effect
# The names of block types in lists, old and new.
MAMBA_NAMES, ATTENTION_NAMES = ("mamba", "linear_attention"), ("attention", "full_attention")
NAMES = {**dict.fromkeys(MAMBA_NAMES, MAMBA), **dict.fromkeys(ATTENTION_NAMES, ATTENTION)}
IGNORED_BY_ALL = (
    *("time_step_min", "time_step_max", "time_step_floor", "time_step_rank"),
    *("chunk_size", "mamba_chunk_size", "rescale_prenorm_residual", "use_mamba_kernels"),
    *("num_logits_to_keep", "logits_to_keep", "attention_dropout", "hidden_dropout"),
)


class MambaHybridLayout(Layout):
    """Base class of the layouts of Nemotron-H, Granite 4.0 H, Falcon-H1 and Mamba-2.

    Attributes:
        block_types: tuple of strings, the block types that a checkpoint can have.
        scales: `{argument: key}` of factors with the default 1.
        mixers: `{MAMBA or ATTENTION: name of the layer}` in the names of tensors.
        temporal_norm, channel_norm: strings, the norms before layers that mix tokens and channels,
            in the names of tensors.
    """

    block_types: tuple[str, ...]
    scales: dict[str, str] = {}
    mixers: dict[str, str] = {MAMBA: "mamba", ATTENTION: "self_attn"}
    temporal_norm, channel_norm = "input_layernorm", "pre_ff_layernorm"

    def read_config(self, config):
        config.ignore(*IGNORED_BY_ALL)
        _check_time_step_limit(config)
        arguments = super().read_config(config)
        for ours, theirs in self.scales.items():
            arguments[ours] = _scale(config.number(theirs, default=1.0))
        for name in _unused_sizes(arguments):
            arguments.pop(name, None)
        for heads, groups in (MAMBA_SIZES[::3], ATTENTION_SIZES[:2]):
            if heads in arguments:
                keys = self.keys[groups][0], self.keys[heads][0]
                config.check_divides(keys[0], arguments[groups], keys[1], arguments[heads])
        return arguments

    def requirements(self, arguments):
        types, unused = " and ".join(map(repr, self.block_types)), _unused_sizes(arguments)
        requirements = super().requirements(arguments)
        return {
            "block_types": (set(arguments["block_types"]) <= {*self.block_types}, types),
            **{name: wanted for name, wanted in requirements.items() if name not in unused},
        }

    def write_config(self, arguments):
        scales = {theirs: arguments[ours] or 1.0 for ours, theirs in self.scales.items()}
        return {**super().write_config(arguments), **scales}

    def block_tensors(self, i, block, arguments):
        d, block_type = arguments["hidden_dim"], arguments["block_types"][i]
        if block_type != MLP:
            yield block.tensor(f"{self.temporal_norm}.weight", (d,), "temporal_norm/scale")
        for layer, ours in MIXERS[block_type].items():
            theirs = self.mixers[layer]
            if layer == MAMBA:
                yield from _mamba(block, theirs, ours, arguments)
            else:
                yield from block.attention(theirs, ours, arguments)
        if arguments["use_mlp"] or block_type == MLP:
            yield block.tensor(f"{self.channel_norm}.weight", (d,), "channel_norm/scale")
            yield from self.mlp_tensors(block, d, arguments["intermediate_dim"])

    def mlp_tensors(self, block, d, m):
        """Returns the tensors of the layer that mixes channels, of the widths d and m inside."""
        raise NotImplementedError


class NemotronH(MambaHybridLayout):
    """`MambaHybridBackbone` from and to `NemotronHForCausalLM`, without experts."""

    model_type = "nemotron_h"
    architecture = "NemotronHForCausalLM"
    embedding = "backbone.embeddings.weight"
    final_norm = "backbone.norm_f.weight"
    blocks = "backbone.layers"
    block_types = MAMBA, ATTENTION, MLP
    mixers = {MAMBA: "mixer", ATTENTION: "mixer"}
    temporal_norm = channel_norm = "norm"
    keys = {
        "vocabulary_size": ("vocab_size", 131_072),
        "hidden_dim": ("hidden_size", 4096),
        "intermediate_dim": ("intermediate_size", 21_504),
        "num_mamba_heads": ("mamba_num_heads", 128),
        "mamba_head_dim": ("mamba_head_dim", 64),
        "mamba_state_dim": ("ssm_state_size", 128),
        "num_mamba_groups": ("n_groups", 8),
        "mamba_conv_size": ("conv_kernel", 4),
        "num_query_heads": ("num_attention_heads", 32),
        "num_key_value_heads": ("num_key_value_heads", 8),
        "head_dim": ("head_dim", 128),
        **NORMS_AND_BIAS,
    }
    constants = {
        **NO_SCALES,
        "use_mlp": False,
        "mlp": SQUARED_RELU,
        "tie_word_embeddings": False,  # the original never ties them
        "mamba_norm_position": "after_gate",
        "query_scale": None,
        "rope_max_wavelength": None,
    }
    fixed = {
        **dict.fromkeys(("use_bias", "mlp_bias", "attention_bias", "mamba_proj_bias"), (False,)),
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu",),
        "sliding_window": (None,),
        "residual_in_fp32": (False,),
    }
    unused = (
        *("expand", "mamba_ssm_cache_dtype"),
        *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"),
        *("n_routed_experts", "n_shared_experts", "n_group", "topk_group", "num_experts_per_tok"),
        *("norm_topk_prob", "routed_scaling_factor", "num_nextn_predict_layers"),
    )
    characters = {"M": MAMBA, "*": ATTENTION, "-": MLP}

    def canonical_name(self, name):
        if name.startswith("mtp."):  # multi-token prediction heads
            return None
        return f"backbone.{name.removeprefix('model.')}" if name.startswith("model.") else name

    def read_further_arguments(self, config, arguments):
        config.ignore(*(k for k in config.config if k.startswith(("moe_", "mtp_"))))
        for key in ("rms_norm_eps", "norm_eps"):
            source = "the value of 'layer_norm_epsilon'"
            config.fixed(key, arguments["layer_norm_epsilon"], source=source)
        others = {}
        # Older files have another name for the size of a head.
        older = config.integer("attention_head_dim", default=arguments["head_dim"])
        if config.config.get("head_dim") is None:
            others["head_dim"] = older
        types = _read_types(config, {**NAMES, "mlp": MLP})
        config.ignore("hybrid_override_pattern")
        source = "the length of the list of block types"
        if types is None:
            source = "the length of 'hybrid_override_pattern'"
            pattern = config.config.get("hybrid_override_pattern")
            is_known = isinstance(pattern, str) and set(pattern) <= set(self.characters)
            if not pattern or not is_known:
                wanted = f"a string of {', '.join(map(repr, self.characters))}, without experts"
                raise config.unsupported_error("hybrid_override_pattern", pattern, wanted)
            types = tuple(self.characters[character] for character in pattern)
        config.fixed("num_hidden_layers", len(types), source=source)
        return {**others, "block_types": types, "num_layers": len(types)}

    def write_config(self, arguments):
        characters = {block_type: character for character, block_type in self.characters.items()}
        pattern = [characters[block_type] for block_type in arguments["block_types"]]
        return {
            **super().write_config(arguments),
            "hybrid_override_pattern": "".join(pattern),
            "num_hidden_layers": arguments["num_layers"],
        }

    def mlp_tensors(self, block, d, m):
        up = block.linear("mixer.up_proj", d, m, "mlp/up_proj")
        return up + block.linear("mixer.down_proj", m, d, "mlp/down_proj")


class Granite(MambaHybridLayout):
    """`MambaHybridBackbone` from and to `GraniteMoeHybridForCausalLM`, without experts."""

    model_type = "granitemoehybrid"
    architecture = "GraniteMoeHybridForCausalLM"
    block_types = MAMBA, ATTENTION
    channel_norm = "post_attention_layernorm"
    keys = {
        "vocabulary_size": ("vocab_size", REQUIRED),
        "hidden_dim": ("hidden_size", REQUIRED),
        "intermediate_dim": ("shared_intermediate_size", 1024),
        "num_layers": ("num_hidden_layers", REQUIRED),
        **MAMBA_KEYS,
        "num_query_heads": ("num_attention_heads", 32),
        "num_key_value_heads": ("num_key_value_heads", "num_query_heads"),
        "layer_norm_epsilon": ("rms_norm_eps", 1e-6),
    }
    scales = {
        "embedding_scale": "embedding_multiplier",
        **dict.fromkeys(RESIDUAL_SCALES, "residual_multiplier"),
    }
    constants = {
        "use_mlp": True,
        "mlp": SWIGLU,
        "mlp_gate_scale": None,
        "mamba_norm_position": "after_gate",
        "mamba_projection_scales": None,
        "rope_max_wavelength": None,
    }
    fixed = {
        **dict.fromkeys(("attention_bias", "mamba_proj_bias"), (False,)),
        "hidden_act": ("silu",),
        "position_embedding_type": ("nope", None),
        "normalization_function": ("rmsnorm",),
    }
    unused = (
        *("intermediate_size", "num_experts_per_tok", "output_router_logits", "init_method"),
        *("router_aux_loss_coef", "router_jitter_noise"),
        *("rope_theta", "rope_scaling", "rope_parameters"),
    )

    def read_further_arguments(self, config, arguments):
        num_experts = config.config.get("num_local_experts", 8)
        config.ignore("num_local_experts")
        if num_experts != 0 or isinstance(num_experts, bool):
            wanted = "0, a model without experts"
            raise config.unsupported_error("num_local_experts", num_experts, wanted)
        hidden_dim, heads = arguments["hidden_dim"], arguments["num_query_heads"]
        types = _read_types(config, NAMES, default=["mamba"] * arguments["num_layers"])
        if len(types) != arguments["num_layers"]:
            wanted = f"the length of 'layer_types', {len(types)}"
            raise config.unsupported_error("num_hidden_layers", arguments["num_layers"], wanted)
        config.check_divides("num_attention_heads", heads, "hidden_size", hidden_dim)
        inner = config.integer("mamba_expand", default=2) * hidden_dim
        attention = config.number("attention_multiplier", default=1.0)
        return {
            "block_types": types,
            "mamba_head_dim": _read_mamba_head_dim(
                config, arguments, inner, "'mamba_expand' * 'hidden_size'"
            ),
            "head_dim": hidden_dim // heads,
            "query_scale": None if attention == (hidden_dim // heads) ** -0.5 else attention,
            "output_scale": _scale(1 / config.number("logits_scaling", default=1.0)),
        }

    def requirements(self, arguments):
        scale = arguments["mamba_scale"]
        requirements = {
            **super().requirements(arguments),
            **_multiple_of_width(arguments),
            **{name: (arguments[name] == scale, f"{scale}") for name in RESIDUAL_SCALES},
        }
        if ATTENTION in arguments["block_types"]:
            size = arguments["hidden_dim"] // arguments["num_query_heads"]
            requirements["head_dim"] = arguments["head_dim"] == size, f"{size}"
        return requirements

    def write_config(self, arguments):
        output_scale = arguments["output_scale"] or 1.0
        names = {MAMBA: MAMBA_NAMES[0], ATTENTION: ATTENTION_NAMES[0]}
        return {
            **super().write_config(arguments),
            "layer_types": [names[block_type] for block_type in arguments["block_types"]],
            "num_local_experts": 0,
            "mamba_d_head": arguments["mamba_head_dim"],
            "mamba_expand": _inner_dim(arguments) // arguments["hidden_dim"],
            "attention_multiplier": arguments["query_scale"] or arguments["head_dim"] ** -0.5,
            "logits_scaling": solve(lambda scale: 1 / scale, output_scale, 1 / output_scale),
        }

    def mlp_tensors(self, block, d, m):
        kernels = "mlp/gate_proj/kernel", "mlp/up_proj/kernel"
        name = "shared_mlp.input_linear.weight"
        yield block.tensor(name, (2 * m, d), *kernels, transform=stacked(2))
        yield from block.linear("shared_mlp.output_linear", m, d, "mlp/down_proj")


class Mamba2Layout(MambaHybridLayout):
    """`MambaHybridBackbone` from and to transformers' `Mamba2ForCausalLM`."""

    model_type = "mamba2"
    architecture = "Mamba2ForCausalLM"
    embedding = "backbone.embeddings.weight"
    final_norm = "backbone.norm_f.weight"
    blocks = "backbone.layers"
    block_types = (MAMBA,)
    mixers = {MAMBA: "mixer"}
    temporal_norm = "norm"
    keys = {
        "vocabulary_size": ("vocab_size", 32_768),
        "hidden_dim": ("hidden_size", 4096),
        "num_layers": ("num_hidden_layers", 64),
        "num_mamba_heads": ("num_heads", 128),
        "mamba_head_dim": ("head_dim", 64),
        "mamba_state_dim": ("state_size", 128),
        "num_mamba_groups": ("n_groups", 8),
        "mamba_conv_size": ("conv_kernel", 4),
        **NORMS_AND_BIAS,
    }
    constants = {**NO_SCALES, "use_mlp": False, "mamba_norm_position": "after_gate"}
    fixed = {"use_bias": (False,), "hidden_act": ("silu",)}
    # The norm always follows the gate. The residual stream has the compute dtype here.
    unused = ("norm_before_gate", "rms_norm", "residual_in_fp32")

    def canonical_name(self, name):
        return self.embedding if name == "backbone.embedding.weight" else name

    def read_further_arguments(self, config, arguments):
        inner = config.integer("expand", default=2) * arguments["hidden_dim"]
        if _inner_dim(arguments) != inner:
            wanted = f"'expand' * 'hidden_size' / 'num_heads', of {inner} channels"
            raise config.unsupported_error("head_dim", arguments["mamba_head_dim"], wanted)
        source = "'expand' * 'hidden_size'"
        config.fixed("intermediate_size", inner, source=source)  # only in some files
        return {"block_types": (MAMBA,) * arguments["num_layers"]}

    def requirements(self, arguments):
        return {**super().requirements(arguments), **_multiple_of_width(arguments)}

    def write_config(self, arguments):
        expand = _inner_dim(arguments) // arguments["hidden_dim"]
        return {**super().write_config(arguments), "expand": expand}


class FalconH1(MambaHybridLayout):
    """`MambaHybridBackbone` from and to `FalconH1ForCausalLM`.

    The multiplier of a linear layer's inputs is merged into the multiplier of its outputs, and
    written as 1.
    """

    model_type = "falcon_h1"
    architecture = "FalconH1ForCausalLM"
    block_types = (PARALLEL,)
    final_norm = "model.final_layernorm.weight"
    keys = {
        "vocabulary_size": ("vocab_size", REQUIRED),
        "hidden_dim": ("hidden_size", REQUIRED),
        "intermediate_dim": ("intermediate_size", REQUIRED),
        "num_layers": ("num_hidden_layers", REQUIRED),
        **MAMBA_KEYS,
        "num_query_heads": ("num_attention_heads", REQUIRED),
        "num_key_value_heads": ("num_key_value_heads", 8),
        "layer_norm_epsilon": ("rms_norm_eps", 1e-5),
        "max_position_embeddings": ("max_position_embeddings", None),
    }
    scales = {
        "embedding_scale": "embedding_multiplier",
        "output_scale": "lm_head_multiplier",
        "mamba_scale": "ssm_out_multiplier",
    }
    constants = {"use_mlp": True, "mlp": SWIGLU}
    fixed = {
        **dict.fromkeys(("attention_bias", "mlp_bias"), (False,)),
        **dict.fromkeys(("projectors_bias", "mamba_proj_bias"), (False,)),
        "hidden_act": ("silu",),
        "rope_scaling": (None,),
        "attn_layer_indices": (None,),
    }
    unused = ("mamba_use_mlp", "mlp_expansion_factor", "mamba_expand")

    def read_further_arguments(self, config, arguments):
        hidden_dim, heads = arguments["hidden_dim"], arguments["num_query_heads"]
        has_size = config.config.get("head_dim") is not None or hidden_dim % heads
        size = config.integer("head_dim", **({} if has_size else {"default": hidden_dim // heads}))
        source, inner = "'mamba_d_ssm'", config.integer("mamba_d_ssm", default=1024)
        if "mamba_d_ssm" in config.config and config.config["mamba_d_ssm"] is None:
            source = "'mamba_expand' * 'hidden_size'"
            inner = config.integer("mamba_expand", default=2) * hidden_dim
        rope = config.section("rope_parameters")
        rope.fixed("rope_type", "default")
        theta = config.rope_number(rope, "rope_theta", default=None)
        rope.check_all_read()
        before_gate = config.flag("mamba_norm_before_gate", default=True)
        position = "before_gate" if before_gate else "after_gate"
        number = functools.partial(config.number, default=1.0)
        into_attention, into_mamba = (
            number(f"{name}_in_multiplier") for name in ("attention", "ssm")
        )
        query_scale = into_attention**2 * number("key_multiplier") * size**-0.5
        projections = config.number_list("ssm_multipliers", 5, default=(1.0,) * 5)
        gate, down = config.number_list("mlp_multipliers", 2, default=(1.0,) * 2)
        return {
            "block_types": (PARALLEL,) * arguments["num_layers"],
            "head_dim": size,
            "mamba_head_dim": _read_mamba_head_dim(config, arguments, inner, source),
            "mamba_norm_position": position if config.flag("mamba_rms_norm", False) else None,
            "rope_max_wavelength": theta,
            "query_scale": None if query_scale == size**-0.5 else query_scale,
            "mamba_projection_scales": _scale(tuple(into_mamba * s for s in projections)),
            "attention_scale": _scale(into_attention * number("attention_out_multiplier")),
            "mlp_scale": _scale(down),
            "mlp_gate_scale": _scale(gate),
        }

    def requirements(self, arguments):
        return {
            **super().requirements(arguments),
            "rope_max_wavelength": (arguments["rope_max_wavelength"] is not None, "a number"),
        }

    def write_config(self, arguments):
        position, size = arguments["mamba_norm_position"], arguments["head_dim"]
        query_scale = arguments["query_scale"] or size**-0.5
        key = solve(lambda key: 1.0 * key * size**-0.5, query_scale, query_scale * size**0.5)
        return {
            **super().write_config(arguments),
            "head_dim": size,
            "mamba_d_ssm": _inner_dim(arguments),
            "mamba_d_head": arguments["mamba_head_dim"],
            "mamba_rms_norm": position is not None,
            "mamba_norm_before_gate": position == "before_gate",
            "rope_theta": arguments["rope_max_wavelength"],
            "attention_in_multiplier": 1.0,
            "attention_out_multiplier": arguments["attention_scale"] or 1.0,
            "key_multiplier": key,
            "ssm_in_multiplier": 1.0,
            "ssm_multipliers": list(arguments["mamba_projection_scales"] or (1.0,) * 5),
            "mlp_multipliers": [arguments[name] or 1.0 for name in ("mlp_gate_scale", "mlp_scale")],
        }

    def mlp_tensors(self, block, d, m):
        return block.mlp("feed_forward", d, m)


def _unused_sizes(arguments):
    """Returns the names of the sizes of layers that no block has."""
    types = {*arguments["block_types"], *([MLP] if arguments["use_mlp"] else [])}
    return [name for names, users in USES.items() if not users & types for name in names]


def _read_mamba_head_dim(config, arguments, inner, source):
    """Returns the size of a Mamba-2 head, where all heads together have `inner` channels.

    `source` describes the keys that determine `inner`.
    """
    heads = arguments["num_mamba_heads"]
    if config.config.get("mamba_d_head", "auto") == "auto" and inner % heads == 0:
        config.ignore("mamba_d_head")
        return inner // heads
    size = config.integer("mamba_d_head")
    if size * heads != inner:
        wanted = f"{inner / heads:g}, {source} / 'mamba_n_heads' of {inner} channels"
        raise config.unsupported_error("mamba_d_head", size, wanted)
    return size


def _multiple_of_width(arguments):
    """Returns the requirement that the width of all Mamba-2 heads is a multiple of `hidden_dim`."""
    d, heads = arguments["hidden_dim"], arguments["num_mamba_heads"]
    fits = heads is None or _inner_dim(arguments) % d == 0
    return {"mamba_head_dim": (fits, f"a multiple of `hidden_dim`, {d}, divided by {heads}")}


def _read_types(config, names, default=None):
    """Returns the block types in a list of names, or None without such a list and a `default`."""
    known = "layers_block_type", "layer_types"
    config.ignore(*known)
    keys = [key for key in known if config.config.get(key) is not None]
    if not keys and default is None:
        return None
    keys = keys or ["layer_types"]
    types = [tuple(names[name] for name in config.name_list(key, names, default)) for key in keys]
    if types[-1] != types[0]:
        raise config.unsupported_error(keys[1], config.config[keys[1]], f"the value of {keys[0]!r}")
    return types[0]


def _check_time_step_limit(config):
    """Raises an error if time steps have limits, which the original ignores in decoding."""
    config.ignore("time_step_limit")
    limit = config.config.get("time_step_limit")
    if limit is None:
        return
    numbers = list(limit) if isinstance(limit, (list, tuple)) else [limit]
    if len(numbers) == 2 and isinstance(numbers[1], dict):  # infinity, as transformers 5 saves it
        numbers[1] = math.inf if numbers[1] == {"__float__": "Infinity"} else None
    is_number = all(type(number) in (int, float) for number in numbers)
    if len(numbers) != 2 or not is_number or numbers[0] != 0 or not numbers[1] >= UNLIMITED:
        raise config.unsupported_error("time_step_limit", limit, "[0.0, Infinity], no limits")


def _scale(multiplier):
    """Returns a multiplier, or several, as an argument of the backbone: None if all are 1."""
    return None if multiplier in (1, (1,) * 5) else multiplier


def _mamba(block, theirs, ours, arguments):
    """Yields the tensors of Mamba-2 named `theirs` in the file and `ours` in the block."""
    heads, inner = arguments["num_mamba_heads"], _inner_dim(arguments)
    channels = inner + 2 * arguments["num_mamba_groups"] * arguments["mamba_state_dim"]
    d, taps = arguments["hidden_dim"], arguments["mamba_conv_size"]

    def tensor(name, shape, *weights, **kwargs):
        paths = [f"{ours}/{weight}" for weight in weights]
        return block.tensor(f"{theirs}.{name}", shape, *paths, **kwargs)

    kernels = [f"{name}_proj/kernel" for name in ("z", "x", "bc", "dt")]
    rows = _fused_rows(arguments, (inner, inner, channels - inner, heads))
    yield tensor("in_proj.weight", (inner + channels + heads, d), *kernels, transform=rows)
    rows, convolutions = _fused_rows(arguments, (inner, channels - inner)), ("x", "bc")
    kernels = [f"{name}_conv1d/kernel" for name in convolutions]
    depthwise = Transform(
        lambda tensor: rows.to_weights(tensor[:, 0]),
        lambda *weights: rows.to_tensor(*weights)[:, None],
    )
    yield tensor("conv1d.weight", (channels, 1, taps), *kernels, transform=depthwise)
    if arguments["use_mamba_conv_bias"]:
        biases = [f"{name}_conv1d/bias" for name in convolutions]
        yield tensor("conv1d.bias", (channels,), *biases, transform=rows)
    for name, weight in (("A_log", "a_log"), ("D", "skip"), ("dt_bias", "dt_bias")):
        yield tensor(name, (heads,), weight)
    if arguments["mamba_norm_position"] is not None:
        yield tensor("norm.weight", (inner,), "norm/scale")
    yield from block.linear(f"{theirs}.out_proj", inner, d, f"{ours}/o_proj")


def _fused_rows(arguments, sizes):
    """Returns the `Transform` from rows (z, x, BC, dt), or (x, BC), to weights of these sizes.

    A file has B of all groups, then C of all groups. The layer has B and C of the first group, then
    B and C of the next.
    """
    groups, state_dim = arguments["num_mamba_groups"], arguments["mamba_state_dim"]
    place = {4: 2, 2: 1}[len(sizes)]  # index of BC

    def regroup(rows, first, second):
        return rows.reshape(first, second, state_dim, -1).swapaxes(0, 1).reshape(rows.shape)

    def to_weights(tensor):
        parts = np.split(tensor, np.cumsum(sizes)[:-1])
        parts[place] = regroup(parts[place], 2, groups)
        return tuple(part.T for part in parts)

    def to_tensor(*weights):
        parts = [weight.T for weight in weights]
        parts[place] = regroup(parts[place], groups, 2)
        return np.concatenate(parts)

    return Transform(to_weights, to_tensor)


def _inner_dim(arguments):
    return arguments["num_mamba_heads"] * arguments["mamba_head_dim"]
