"""Sizes of HypeNet and MiniCPM-SALA, hybrids of Lightning Attention and softmax attention.

HypeNet: Chen et al. 2026, arXiv:2601.22156, and the configurations of
https://github.com/thunlp/hybrid-linear-attention (Apache-2.0), whose weights are listed in the
collection https://huggingface.co/collections/chen-yingfa/hypenet. The preset of a size is without
its weights: `from_preset("hf://owner/repository")` loads them. MiniCPM-SALA: MiniCPM Team 2026,
arXiv:2602.11761, and https://huggingface.co/openbmb/MiniCPM-SALA (Apache-2.0).

A row is one preset. `parameters` is the resulting number, which a test verifies. A name is the
publication's label, not a count.
"""

from keras_recurrent.presets import language_model

GLOBAL, LIGHTNING = "global_attention", "lightning_attention"


def arguments(depth, attention, width, mlp_width, heads, vocabulary, **further):
    """Returns the arguments of a backbone with blocks of attention at the indices `attention`.

    `heads` are the number of query heads in both kinds of blocks, the number of key and value heads
    in attention, and the size of a head.
    """
    query_heads, key_value_heads, head_dim = heads
    return {
        "vocabulary_size": vocabulary,
        "num_layers": depth,
        "hidden_dim": width,
        "intermediate_dim": mlp_width,
        "block_types": tuple(GLOBAL if i in attention else LIGHTNING for i in range(depth)),
        "num_query_heads": query_heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head_dim,
        "num_lightning_heads": query_heads,
        "num_lightning_key_value_heads": query_heads,
        "lightning_head_dim": head_dim,
        "lightning_query_scale": head_dim**-0.5,
        "rope_max_wavelength": 1_000_000.0,
        "tie_word_embeddings": True,
        **further,
    }


MINICPM_SALA = {
    "use_qk_norm": False,
    "embedding_scale": 12.0,
    "residual_scale": 1.4 / 32**0.5,
    "output_scale": 256 / 4096,
    "dense_length": 8192,
    "rope_max_wavelength": 10_000.0,
    "tie_word_embeddings": False,
}

SIZES = {
    # name: label, depth, attention blocks, D, SwiGLU, heads, vocabulary, parameters
    "hypenet_tiny": language_model("HypeNet",
        arguments(4, (2,), 128, 352, (4, 2, 32), 259), 886_912),
    "hypenet_2b": language_model("HypeNet",
        arguments(28, (2, 3, 6, 8, 9, 21, 25), 2048, 6144, (16, 8, 128), 151_936), 1_926_138_880),
    "hypenet_5b": language_model("HypeNet",
        arguments(36, (0, 1, 7, 14, 15, 22, 24, 31, 33), 2560, 9728, (32, 8, 128), 151_936),
        4_824_739_328),
    "hypenet_9b": language_model("HypeNet",
        arguments(36, (1, 2, 4, 6, 7, 10, 24, 33, 34), 4096, 12_288, (32, 8, 128), 151_936),
        8_851_973_120),
    "minicpm_sala": language_model("MiniCPM-SALA",
        arguments(32, (0, 9, 16, 17, 22, 29, 30, 31), 4096, 16_384, (32, 2, 128), 73_448,
            **MINICPM_SALA),
        9_477_203_968, "hf://openbmb/MiniCPM-SALA", "Apache-2.0"),
}  # fmt: skip
