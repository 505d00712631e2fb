"""`config.json` of each published layout: presets, defaults and unsupported values."""

import inspect

import numpy as np
import pytest

from keras_recurrent.models.griffin.checkpoint import RecurrentGemma
from keras_recurrent.models.hgrn2.checkpoint import HGRN2Layout
from keras_recurrent.models.lfm2.checkpoint import LFM2Layout
from keras_recurrent.models.lightning_hybrid.checkpoint import HypeNet, MiniCPMSALA
from keras_recurrent.models.mamba_hybrid.checkpoint import (
    FalconH1,
    Granite,
    Mamba2Layout,
    NemotronH,
)
from keras_recurrent.models.transnormer.checkpoint import TransNormer
from keras_recurrent.presets import griffin, hgrn2, lfm2, transnormer
from tests.checkpoints import golden
from tests.layers.table import assert_rejects
from tests.models.test_presets import SIZES
from tests.models.tiny import FAMILIES

pytestmark = pytest.mark.once


LAYOUTS = {
    "recurrent_gemma": RecurrentGemma(),
    "hgrn2": HGRN2Layout(),
    "transnormer": TransNormer(),
    "hypenet": HypeNet(),
    "minicpm_sala": MiniCPMSALA(),
    "nemotron_h": NemotronH(),
    "granite": Granite(),
    "mamba2": Mamba2Layout(),
    "falcon_h1": FalconH1(),
    "lfm2": LFM2Layout(),
}
CONFIGS = {
    name: golden.read_config(golden.DATA / f"{name.replace('_gemma', 'gemma')}_tiny")
    for name in LAYOUTS
}


def recurrent_gemma_config(hidden_size, layers, heads):
    """Returns the file as transformers 4 wrote it, with keys of that time."""
    config = golden.read_config()
    for key in ("rope_parameters", "dtype", "tie_word_embeddings", "window_includes_current_token"):
        del config[key]
    return config | {
        "attention_window_size": 2048,
        "_block_types": config["block_types"],
        "embeddings_scale_by_sqrt_dim": True,
        "head_dim": 256,
        "hidden_size": hidden_size,
        "intermediate_size": 6 * hidden_size,
        "lru_width": hidden_size,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": None,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
        "vocab_size": 256000,
    }


def hgrn2_config(hidden_size, layers):
    """Returns the file of the Hub: heads by their size, and no inner width."""
    return CONFIGS["hgrn2"] | {
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "expand_ratio": 128,
        "num_heads": hidden_size // 128,
        "intermediate_size": None,
        "vocab_size": 32000,
    }


def transnormer_config(arguments):
    """Returns the file as the published code writes it, with keys that are not read."""
    return CONFIGS["transnormer"] | {
        "_name_or_path": "transnormer",
        "add_bos_token": False,
        "auto_map": {"AutoConfig": "configuration_transnormer.TransnormerConfig"},
        "decoder_attention_heads": arguments["num_heads"],
        "decoder_embed_dim": arguments["hidden_dim"],
        "decoder_layers": arguments["num_layers"],
        "glu_dim": arguments["intermediate_dim"],
        "hidden_dim": arguments["hidden_dim"],
        "linear_act_fun": "swish",
        "linear_use_lrpe_list": [1, *[0] * (arguments["num_layers"] - 1)],
        "vocab_size": arguments["vocabulary_size"],
    }


def lfm2_config(arguments, **changes):
    """Returns the file of the Hub: a width before its adjustment, and no size of a head."""
    width, heads = arguments["hidden_dim"], arguments["num_query_heads"]
    types = {"global_attention": "full_attention", "gated_short_conv": "conv"}
    return CONFIGS["lfm2"] | {
        **{"block_dim": width, "conv_dim": width, "num_heads": heads},
        "block_multiple_of": 256,
        "hidden_size": width,
        "layer_types": [types[name] for name in arguments["block_types"]],
        "num_attention_heads": heads,
        "num_hidden_layers": arguments["num_layers"],
        "num_key_value_heads": 8,
        "vocab_size": arguments["vocabulary_size"],
        **changes,
    }


# {name: (model type, published configuration, the preset's size)}
PUBLISHED = {
    f"recurrentgemma_{name}": (
        "recurrent_gemma",
        recurrent_gemma_config(*sizes) | griffin.SIZES[f"recurrentgemma_{name}"].config_defaults,
        griffin.SIZES[f"recurrentgemma_{name}"],
    )
    for name, *sizes in (("2b", 2560, 26, 10), ("9b", 4096, 38, 16))
}
for name, *sizes in (("hgrn2_1.3b_100b", 2048, 24), ("hgrn2_2.7b_100b", 2560, 32)):
    PUBLISHED[name] = ("hgrn2", hgrn2_config(*sizes), hgrn2.SIZES[name])
for name in ("tnl_385m", "tnl_1b", "tnl_7b"):
    size = transnormer.SIZES[name]
    PUBLISHED[name] = ("transnormer", transnormer_config(size.backbone_arguments), size)


OLDER = {
    "full_attn_idxs": list(lfm2.BLOCKS_16),
    **{"layer_types": None, "rope_parameters": None, "rope_theta": 1000000.0},
}
LARGE_ROPE = {"rope_theta": 10000000.0, "rope_type": "default"}
for name, changes in {
    "lfm2_350m": {"block_ff_dim": 6656, **OLDER},
    "lfm2_700m": {"block_ff_dim": 10240},
    "lfm2_1.2b": {"block_ff_dim": 12288},
    "lfm2.5_230m": {"block_ff_dim": 2560, "block_auto_adjust_ff_dim": False},
    "lfm2.5_2.6b": {
        **{"block_ff_dim": None, "block_auto_adjust_ff_dim": False, "intermediate_size": 10752},
        "rope_parameters": LARGE_ROPE,
    },
}.items():
    size = lfm2.SIZES[name]
    PUBLISHED[name] = ("lfm2", lfm2_config(size.backbone_arguments, **changes), size)


DROP = object()  # in place of a value: the configuration does not have the key


def read(model_type, **changes):
    """Returns the backbone's arguments for a configuration with changes."""
    config = {k: v for k, v in {**CONFIGS[model_type], **changes}.items() if v is not DROP}
    return LAYOUTS[model_type].backbone_arguments(config, "config.json")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_reads_as_the_preset(name):
    model_type, config, size = PUBLISHED[name]
    arguments = LAYOUTS[model_type].backbone_arguments(config, "config.json")
    preset = size.backbone_arguments
    assert {key: preset.get(key, arguments[key]) for key in arguments} == arguments


# {family, or the first word of a preset's name: layout}
PRESET_LAYOUTS = {"griffin": "recurrent_gemma", "hgrn2": "hgrn2", "transnormer": "transnormer"}
PRESET_LAYOUTS |= {"lightning_hybrid": "hypenet", "minicpm": "minicpm_sala", "lfm2": "lfm2"}
PRESET_LAYOUTS |= {"nemotron": "nemotron_h", "falcon": "falcon_h1", "mamba": "mamba2"}
PRESET_LAYOUTS |= {name: name for name in ("granite", "mamba2")}
PRESETS = [(family, name) for family, sizes in SIZES.items() for name in sizes]


def read_preset(family, name):
    """Returns the size, the layout and all arguments of the backbone of a preset."""
    size, first = SIZES[family][name], name.split("_")[0]
    layout = LAYOUTS[PRESET_LAYOUTS[first if first in PRESET_LAYOUTS else family]]
    parameters = inspect.signature(FAMILIES[family].backbone.__init__).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return size, layout, {**defaults, **size.backbone_arguments}


@pytest.mark.parametrize(("family", "name"), PRESETS)
def test_preset_has_as_many_parameters_as_its_size_lists(family, name):
    size, layout, arguments = read_preset(family, name)
    listed = FAMILIES[family].causal_lm.presets[name]["metadata"]["params"]
    counted = sum(int(np.prod(tensor.shape)) for tensor in layout.tensors(arguments))
    assert listed == size.parameters == counted


@pytest.mark.parametrize(
    ("family", "name"), [row for row in PRESETS if row[0] in ("lightning_hybrid", "mamba_hybrid")]
)
def test_config_written_from_preset_reads_as_the_preset(family, name):
    """A multiplier loses a digit."""
    _, layout, arguments = read_preset(family, name)
    config = layout.config(arguments)
    if name == "minicpm_sala":
        published = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
        assert config.items() >= published.items()
        assert config["sparse_config"]["dense_len"] == 8192


UNSUPPORTED = [
    ("hgrn2", "hidden_act", "gelu"),
    ("hgrn2", "elementwise_affine", False),
    ("hgrn2", "expand_ratio", 48),
    ("hgrn2", "num_hidden_layers", 10**7),
    ("hgrn2", "norm_eps", float("inf")),
    ("hypenet", "lightning_use_short_conv", True),
    ("hypenet", "lightning_use_qk_norm", False),
    ("hypenet", "lightning_use_output_norm", False),
    ("hypenet", "lightning_use_output_gate", False),
    ("hypenet", "attn_use_output_gate", False),
    ("hypenet", "attn_use_rope", True),
    ("hypenet", "rope_scaling", {"type": "yarn"}),
    ("hypenet", "lightning_rope_scaling", {"type": "yarn"}),
    ("hypenet", "attention_bias", True),
    ("hypenet", "hidden_act", "gelu"),
    ("hypenet", "mixer_types", ["gdn"] * 4),
    ("hypenet", "mixer_types", ["attn"] * 3),
    ("hypenet", "attn_logits_scaling", 2.0),
    ("hypenet", "attn_logits_scaling", "hype 1"),
    ("hypenet", "num_key_value_heads", 3),
    ("hypenet", "lightning_nkv", 3),
    ("hypenet", "lightning_head_dim", 23),
    ("minicpm_sala", "qk_norm", False),
    ("minicpm_sala", "attn_use_rope", True),
    ("minicpm_sala", "lightning_nh", 8),
    ("minicpm_sala", "lightning_head_dim", 8),
    ("minicpm_sala", "head_dim", 8),
    ("minicpm_sala", "pretraining_tp", 2),
    ("minicpm_sala", "mixer_types", ["lightning-attn"] * 4),
    ("lfm2", "layer_types", ["conv"] * 4),
    ("lfm2", "layer_types", ["conv"] * 4 + ["sliding_attention"]),
    ("lfm2", "block_norm_eps", 1e-6),
    ("lfm2", "block_dim", 32),
    ("lfm2", "conv_dim_out", 32),
    ("lfm2", "num_heads", 8),
    ("lfm2", "num_attention_heads", 64),
    ("lfm2", "num_key_value_heads", 3),
    ("lfm2", "block_use_swiglu", False),
    ("lfm2", "use_pos_enc", False),
    ("lfm2", "rope_scaling", {"type": "yarn"}),
    ("lfm2", "head_dim", 15),
    ("transnormer", "linear_use_lrpe_list", [0] * 3),
    ("transnormer", "linear_use_lrpe_list", [1]),
    ("transnormer", "linear_act_fun", "relu"),
    ("transnormer", "norm_type", "layernorm"),
    ("transnormer", "no_scale_embedding", True),
    ("transnormer", "bias", True),
    ("transnormer", "tie_word_embeddings", True),
    ("transnormer", "glu_dim", -2),
    ("transnormer", "hidden_dim", 1001),
    ("transnormer", "decoder_layers", 0),
    ("nemotron_h", "hybrid_override_pattern", "M-E"),
    ("nemotron_h", "hybrid_override_pattern", ""),
    ("nemotron_h", "layers_block_type", ["mamba", "moe"]),
    ("nemotron_h", "num_hidden_layers", 9),
    ("nemotron_h", "rms_norm_eps", 1e-6),
    ("nemotron_h", "mlp_hidden_act", "silu"),
    ("nemotron_h", "sliding_window", 8),
    ("nemotron_h", "residual_in_fp32", True),
    ("nemotron_h", "n_groups", 3),
    *(("nemotron_h", key, True) for key in ("use_bias", "mlp_bias", "attention_bias")),
    *(
        ("nemotron_h", "time_step_limit", limit)
        for limit in ([0.001, 1e30], [0.0, 0.1], [0.0], 1.0, [0.0, {"__float__": "NaN"}], [0, None])
    ),
    ("granite", "num_local_experts", 8),
    ("granite", "position_embedding_type", "rope"),
    ("granite", "mamba_d_head", 16),
    ("granite", "layer_types", ["mamba", "moe"]),
    ("granite", "num_hidden_layers", 3),
    ("granite", "num_attention_heads", 3),
    ("granite", "normalization_function", "layernorm"),
    ("granite", "attention_bias", True),
    ("mamba2", "head_dim", 16),
    ("mamba2", "use_bias", True),
    ("mamba2", "hidden_act", "gelu"),
    ("falcon_h1", "rope_scaling", {"type": "yarn"}),
    ("falcon_h1", "attn_layer_indices", [0]),
    ("falcon_h1", "ssm_multipliers", [1.0] * 4),
    ("falcon_h1", "mamba_d_head", 16),
    *(("falcon_h1", key, True) for key in ("projectors_bias", "mamba_proj_bias", "mlp_bias")),
]


@pytest.mark.parametrize(("model_type", "key", "value"), UNSUPPORTED)
def test_config_with_unsupported_value_names_the_key(model_type, key, value):
    with pytest.raises(ValueError, match=f"'{key}' is .* in config.json; this version supports"):
        read(model_type, **{key: value})


@pytest.mark.parametrize(
    ("model_type", "changes", "argument", "value"),
    [
        ("hgrn2", {}, "intermediate_dim", 96),
        ("hgrn2", {}, "conv_size", None),
        ("hgrn2", {"use_short_conv": True}, "conv_size", 4),
        *(
            ("hgrn2", {"hidden_size": size, "intermediate_size": None}, "intermediate_dim", width)
            for size, width in ((64, 256), (768, 2048), (1024, 2816), (2560, 6912))
        ),
        (
            "hgrn2",
            {"hidden_size": 768, "intermediate_size": DROP, "hidden_ratio": 8},
            "intermediate_dim",
            4096,
        ),
        # Heads by their size, which takes precedence, or by their count.
        ("hgrn2", {}, "expand_ratio", 32),
        ("hgrn2", {"expand_ratio": None}, "expand_ratio", 32),
        ("hgrn2", {"expand_ratio": 16}, "expand_ratio", 16),
        ("hgrn2", {"expand_ratio": DROP, "num_heads": DROP}, "expand_ratio", 64),
        ("hgrn2", {"fuse_norm": True, "share_conv_kernel": True}, "hidden_dim", 64),
        # The width of the network replaces a negative width of gated units.
        ("transnormer", {"glu_dim": -1, "hidden_dim": 512}, "intermediate_dim", 64),
        ("transnormer", {"glu_dim": -1, "hidden_dim": 512}, "head_dim", 128),
        ("hypenet", {"mixer_types": []}, "block_types", ("global_attention",) * 4),
        ("hypenet", {"attn_logits_scaling": "hype 500"}, "attention_logit_scaling", 500),
        ("hypenet", {"attn_logits_scaling": "hype"}, "attention_logit_scaling", 362),
        ("hypenet", {"lightning_scale": "1/d"}, "lightning_query_scale", 1 / 24),
        ("minicpm_sala", {"sparse_config": None}, "dense_length", None),
        # The list of block types takes precedence over the pattern.
        *(
            (
                "nemotron_h",
                {"layer_types": [*names, "mlp"], "num_hidden_layers": 3},
                "block_types",
                ("mamba", "attention", "mlp"),
            )
            for names in (("mamba", "attention"), ("linear_attention", "full_attention"))
        ),
        ("nemotron_h", {"head_dim": None, "attention_head_dim": 24}, "head_dim", 24),
        ("nemotron_h", {"attention_head_dim": 24}, "head_dim", 16),
        ("nemotron_h", {"num_hidden_layers": DROP}, "num_layers", 10),
        *(
            ("nemotron_h", {"time_step_limit": limit}, "num_mamba_heads", 4)
            for limit in ([0.0, {"__float__": "Infinity"}], [0, 1e30], None)
        ),
        ("nemotron_h", {"moe_latent_size": 8, "mtp_layers": 1}, "num_layers", 10),
        ("granite", {"mamba_d_head": "auto"}, "mamba_head_dim", 32),
        ("granite", {"layer_types": DROP}, "block_types", ("mamba",) * 4),
        ("granite", {"attention_multiplier": 0.25}, "query_scale", None),
        ("granite", {"attention_multiplier": DROP}, "query_scale", 1.0),
        ("granite", {"residual_multiplier": DROP}, "mlp_scale", None),
        ("granite", {"shared_intermediate_size": 72}, "intermediate_dim", 72),
        ("falcon_h1", {"mamba_rms_norm": True}, "mamba_norm_position", "after_gate"),
        (
            "falcon_h1",
            {"mamba_rms_norm": True, "mamba_norm_before_gate": DROP},
            "mamba_norm_position",
            "before_gate",
        ),
        ("falcon_h1", {"mamba_d_ssm": None, "mamba_d_head": 32}, "mamba_head_dim", 32),
        ("falcon_h1", {"attention_in_multiplier": 2.0}, "attention_scale", 1.875),
        ("falcon_h1", {"attention_in_multiplier": 2.0}, "query_scale", 0.39),
        (
            "falcon_h1",
            {"rope_theta": DROP, "rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}},
            "rope_max_wavelength",
            5.0,
        ),
        ("falcon_h1", {"head_dim": DROP}, "head_dim", 16),
        ("lfm2", {}, "max_position_embeddings", 128_000),
        ("lfm2", {"max_position_embeddings": DROP}, "max_position_embeddings", None),
        ("falcon_h1", {}, "max_position_embeddings", 16_384),
        ("lfm2", {}, "intermediate_dim", 96),
        ("lfm2", {"block_auto_adjust_ff_dim": False}, "intermediate_dim", 130),
        ("lfm2", {"block_ffn_dim_multiplier": 1.2}, "intermediate_dim", 128),
        ("lfm2", {"head_dim": 32}, "head_dim", 32),
        ("lfm2", {"layer_types": None}, "block_types", ("global_attention",) * 5),
        ("lfm2", {"rope_theta": 500.0}, "rope_max_wavelength", 1_000_000),
        ("lfm2", {"rope_theta": 500.0, "rope_parameters": None}, "rope_max_wavelength", 500),
        (
            "lfm2",
            {"tie_embedding": False, "tie_word_embeddings": True},
            "tie_word_embeddings",
            False,
        ),
    ],
)
def test_config_sets_the_argument(model_type, changes, argument, value):
    assert read(model_type, **changes)[argument] == value


ATTENTION = {"layers": [2, 0], "num_heads": 4}  # the object 'attn' of a hybrid HGRN2


def read_attention(attn, **changes):
    """Returns the arguments of attention layers in a hybrid HGRN2 of four blocks."""
    names = ("attention_layers", "num_query_heads", "num_key_value_heads", "sliding_window")
    names += ("rope_max_wavelength", "use_qkv_bias")
    arguments = read("hgrn2", num_hidden_layers=4, attn=attn, **changes)
    return {name: arguments[name] for name in names if name in arguments}


def test_hgrn2_attention_keys_have_the_defaults_of_flash_linear_attention():
    expected = {
        "attention_layers": (0, 2),
        "num_query_heads": 4,
        "num_key_value_heads": 4,
        "sliding_window": None,
        "rope_max_wavelength": 10_000.0,
        "use_qkv_bias": False,
    }
    assert read_attention(None) == read_attention([]) == {"attention_layers": ()}
    assert read_attention(ATTENTION) == expected
    assert read_attention({**ATTENTION, "window_size": None, "qk_norm": False}) == expected
    assert read_attention([{**ATTENTION, "layers": [i]} for i in (2, 0)]) == expected
    values = {"num_kv_heads": 2, "window_size": 7, "rope_theta": 500.0, "qkv_bias": True}
    arguments = read_attention({**ATTENTION, **values})
    assert list(arguments.values()) == [(0, 2), 4, *values.values()]


@pytest.mark.parametrize(
    ("attn", "match"),
    [
        (
            {**ATTENTION, "layers": [4]},
            "'layers' is .* in 'attn' of config.json.* integers from 0 to 3",
        ),
        ({**ATTENTION, "layers": []}, "'layers'"),
        ({**ATTENTION, "layers": [True]}, "'layers'"),
        ({**ATTENTION, "layers": [0, 0]}, "'attn' is .*each layer in one of them"),
        ({**ATTENTION, "num_heads": 3}, "'num_heads' is 3 .*'hidden_size', 64"),
        ({**ATTENTION, "num_heads": 64}, "'num_heads' is 64 .*heads of an even size"),
        ({**ATTENTION, "num_kv_heads": 3}, "'num_kv_heads' is 3 .*a divisor of 'num_heads', 4"),
        ({**ATTENTION, "window_size": 0}, "'window_size' is 0"),
        ({**ATTENTION, "qkv_bias": 1}, "'qkv_bias' is 1"),
        ({**ATTENTION, "sinks": 4}, "'attn' of config.json has 'sinks'"),
        ("all", "'attn' is 'all' .*an object or a list of objects"),
        ({"num_heads": 4}, "'attn' of config.json has no 'layers'"),
        ({"layers": [1]}, "'attn' of config.json has no 'num_heads'"),
        (
            [ATTENTION, {**ATTENTION, "layers": [1], "window_size": 8}],
            "'attn' .* differ only in 'layers'",
        ),
    ],
)
def test_hgrn2_attention_with_unsupported_value_names_the_key(attn, match):
    assert_rejects(match, read_attention, attn)


SPARSE = CONFIGS["minicpm_sala"]["sparse_config"]
TRANSNORMER_SIZES = ["decoder_embed_dim", "decoder_layers", "decoder_attention_heads", "vocab_size"]
REQUIRED = {
    "recurrent_gemma": ("hidden_size",),
    "hgrn2": ("hidden_size",),
    "transnormer": TRANSNORMER_SIZES,
}


@pytest.mark.parametrize(
    ("model_type", "changes", "keys"),
    [
        *(("lfm2", {key: 32}, (key, "hidden_size")) for key in ("block_dim", "conv_dim")),
        ("lfm2", {"num_heads": 8}, ("num_heads", "num_attention_heads")),
        ("lfm2", {"block_norm_eps": 1e-6}, ("block_norm_eps", "norm_eps")),
        (
            "lfm2",
            {"layer_types": None, "full_attn_idxs": [5]},
            ("full_attn_idxs", "num_hidden_layers"),
        ),
        ("nemotron_h", {"num_hidden_layers": 9}, ("num_hidden_layers", "hybrid_override_pattern")),
        ("nemotron_h", {"rms_norm_eps": 1e-6}, ("rms_norm_eps", "layer_norm_epsilon")),
        ("granite", {"mamba_d_head": 16}, ("mamba_d_head", "mamba_expand", "mamba_n_heads")),
        ("granite", {"num_hidden_layers": 3}, ("num_hidden_layers", "layer_types")),
        ("falcon_h1", {"mamba_d_head": 16}, ("mamba_d_head", "mamba_d_ssm", "mamba_n_heads")),
        ("mamba2", {"intermediate_size": 96}, ("intermediate_size", "expand", "hidden_size")),
    ],
)
def test_config_with_inconsistent_keys_names_all(model_type, changes, keys):
    """An error names one of the keys that disagree, so users change the wrong one."""
    assert_rejects(".*".join(map(repr, keys)), read, model_type, **changes)


def test_config_that_contradicts_a_default_names_the_default():
    """An error gives a value that is not in the file, without saying that it is a default."""
    match = "'block_dim' is 64 in config.json; .* Keys .* config.json lacks .*'hidden_size' is 2560"
    assert_rejects(match, read, "lfm2", hidden_size=DROP, conv_dim=DROP)


@pytest.mark.parametrize(
    ("model_type", "changes", "match"),
    [
        *((name, {key: DROP}, f"has no '{key}'") for name in REQUIRED for key in REQUIRED[name]),
        ("hgrn2", {"rotary": 7}, "has 'rotary', which this version does not know"),
        ("nemotron_h", {"dt_scale": 2}, "has 'dt_scale', which this version does not know"),
        ("nemotron_h", {"hybrid_override_pattern": DROP}, "'hybrid_override_pattern' is missing"),
        ("granite", {"num_local_experts": DROP}, "'num_local_experts' is 8"),
        ("falcon_h1", {"rope_theta": DROP}, "has no 'rope_theta'"),
        ("transnormer", {"window": 7}, "has 'window', which this version does not know"),
        ("hgrn2", {"use_short_conv": True, "share_conv_kernel": True}, "'share_conv_kernel'"),
        ("hgrn2", {"attn": {**ATTENTION, "layers": [0]}, "attnres_block_size": 4}, "size' is 4"),
        ("lfm2", {"quantization_config": {"bits": 4}}, "has 'quantization_config', which this"),
        ("lfm2", {"block_ffn_dim_multiplier": None}, "has no 'block_ffn_dim_multiplier'"),
        ("lfm2", {"rope_parameters": {"rope_type": "yarn"}}, "'rope_type' is 'yarn' in 'rope_par"),
        # Norms and gates are off by default.
        ("hypenet", {"lightning_use_qk_norm": DROP}, "'lightning_use_qk_norm' is False"),
        ("hypenet", {"attn_use_output_gate": DROP}, "'attn_use_output_gate' is False"),
        (
            "minicpm_sala",
            {"sparse_config": {**SPARSE, "use_nope": True}},
            "'use_nope' is True in 'sparse_config'",
        ),
    ],
)
def test_config_with_missing_unknown_or_unsupported_key_names_it(model_type, changes, match):
    assert_rejects(match, read, model_type, **changes)
