"""Tiny models of KerasHub's families, and the axes of key and value heads in their weights.

A row is the arguments of a backbone with four key and value heads in its decoder, and
`{part of a weight's path: axis of the heads}` of all weights that are pooled.
"""

import keras_hub

from tests.gqa.oracle import set_weights

HEADS, VOCABULARY = 4, 23
SIZES = {"vocabulary_size": VOCABULARY, "num_layers": 1, "hidden_dim": 32, "intermediate_dim": 8}
MULTI_HEAD = {**SIZES, "num_heads": HEADS}
POSITIONS = {**MULTI_HEAD, "max_sequence_length": 12}
QUERIES = {**SIZES, "num_query_heads": HEADS, "num_key_value_heads": HEADS}
HEAD_DIM = {**QUERIES, "head_dim": 8}
MOE = {"num_experts": 2, "top_k": 1, "moe_intermediate_dim": 8}

KEY_VALUE = {"/key/kernel": 1, "/value/kernel": 1, "/key/bias": 0, "/value/bias": 0}
FIRST_AXIS = {"/key/kernel": 0, "/value/kernel": 0}  # [heads, width, size]
DENSE = {"key_dense/kernel": 1, "value_dense/kernel": 1, "key_dense/bias": 0, "value_dense/bias": 0}
FLAT = {"k_proj/kernel": 1, "v_proj/kernel": 1, "k_proj/bias": 0, "v_proj/bias": 0}


def decoder_only(prefix, axes):
    """`axes` of the layers in a decoder, whose paths begin with `prefix`."""
    return {f"{prefix}{part}": axis for part, axis in axes.items()}


def both_attentions(axes):
    """`axes` of self- and cross-attention in the two layers of a decoder."""
    parts = {}
    for i in range(2):
        for attention in ("self_attention", "cross_attention"):
            parts |= decoder_only(f"transformer_decoder_layer_{i}/{attention}", axes)
    return parts


# Families whose attention layers are replaced by layers of this package.
CAUSAL = {
    "GPT2": ({**POSITIONS, "num_layers": 2}, KEY_VALUE),
    "OPT": (POSITIONS, KEY_VALUE),
    # Queries, keys and values share one kernel: see `share_fused`. Half of a head is rotated.
    "GPTNeoX": ({**POSITIONS, "rotary_percentage": 0.5, "rotary_max_wavelength": 100}, None),
    "Bloom": (MULTI_HEAD, DENSE),
}
SEQ2SEQ = {
    # The second layer of T5 gets positions and mask from the first.
    "Bart": ({**POSITIONS, "num_layers": 2}, both_attentions(KEY_VALUE)),
    "T5": (
        {**MULTI_HEAD, "num_layers": 2},
        both_attentions({"/key_projector": 1, "/value_projector": 1}),
    ),
}

T5GEMMA = {
    **{
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {
            "hidden_dim": 32,
            "intermediate_dim": 8,
            "num_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "head_dim": 8,
            "layer_types": ["full_attention"],
        }.items()
    },
    "vocabulary_size": VOCABULARY,
    "query_pre_attn_scalar": 8,
}
QWEN3_5 = {  # every second layer has linear attention, whose heads are not pooled
    **HEAD_DIM,
    "num_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}

# Families with a number of key and value heads in their configuration.
CONFIGURED = {
    **dict.fromkeys(("Llama", "Llama3", "Mistral", "Phi3", "Qwen"), (QUERIES, KEY_VALUE)),
    "Mixtral": ({**QUERIES, "num_experts": 2, "top_k": 1}, KEY_VALUE),
    "Gemma": (HEAD_DIM, FIRST_AXIS),
    "Gemma3": ({**HEAD_DIM, "image_size": 16, "vision_encoder": None}, FIRST_AXIS),
    "Gemma3n": (
        {
            "text_vocab_size": VOCABULARY,
            "text_hidden_size": 32,
            "num_hidden_layers": 3,
            "pad_token_id": 0,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "head_dim": 8,
            "intermediate_size": [8, 8, 8],
            "hidden_activation": "gelu_approximate",
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "num_kv_shared_layers": 1,  # the last layer reads keys and values of the one before
            "sliding_window": 4,
            "rope_theta": 10_000.0,
            "max_position_embeddings": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 4,
            "altup_num_inputs": 2,
            "laurel_rank": 2,
        },
        FLAT,
    ),
    "Gemma4": (  # the keys of the second layer are its values, too
        {
            **HEAD_DIM,
            "num_layers": 2,
            "image_size": 16,
            "sliding_window_pattern": 2,
            "num_global_key_value_heads": HEADS,
        },
        FIRST_AXIS,
    ),
    "PaliGemma": (
        {
            **HEAD_DIM,
            "image_size": 16,
            "vit_patch_size": 8,
            "vit_num_heads": 2,
            "vit_hidden_dim": 8,
            "vit_intermediate_dim": 8,
            "vit_num_layers": 1,
        },
        FIRST_AXIS,
    ),
    "T5Gemma": (
        T5GEMMA,
        decoder_only("decoder_layer_0/self_attention", KEY_VALUE)
        | decoder_only("decoder_layer_0/cross_attention", KEY_VALUE),
    ),
    "T5Gemma2": (T5GEMMA, decoder_only("decoder_layer_0/merged_attention", KEY_VALUE)),
    "Qwen3": (HEAD_DIM, KEY_VALUE),
    "Qwen3_5": (QWEN3_5, KEY_VALUE),
    "QwenMoe": ({**QUERIES, **MOE, "shared_expert_intermediate_dim": 8}, KEY_VALUE),
    "Qwen3Moe": ({**HEAD_DIM, **MOE}, KEY_VALUE),
    "Qwen3_5Moe": (
        {
            **{name: value for name, value in QWEN3_5.items() if name != "intermediate_dim"},
            **MOE,
            "shared_expert_intermediate_size": 8,
        },
        KEY_VALUE,
    ),
    "GptOss": ({**QUERIES, "num_experts": 2, "top_k": 2}, KEY_VALUE),
    "SmolLM3": (
        {
            **SIZES,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "attention_bias": True,
            "attention_dropout": 0.0,
            "rope_layer_enabled_list": [True],
            "layer_types": ["attention"],
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 12,
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 1.0,
        },
        FLAT,
    ),
}


def make_backbone(name, **changes):
    sizes = {**CAUSAL, **SEQ2SEQ, **CONFIGURED}[name][0]
    backbone = getattr(keras_hub.models, f"{name}Backbone")(**sizes | changes)
    set_weights(backbone)
    return backbone


# Backbones with a task that generates text, which `convert_to_gqa` does not support.
UNSUPPORTED = {
    "BLIP2",  # its language model is a layer that its configuration does not open
    "EdRec",  # EdRecDecoderBlock
    "Falcon",  # FalconAttention
    "Moonshine",  # MoonshineMultiHeadAttention
    "PARSeq",  # reads the few characters of one image
    "RWKV7",  # recurrent state
}
