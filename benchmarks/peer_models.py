"""Builds baseline models with the sizes of this package's presets, in bfloat16.

Requires `pip install flash-linear-attention transformers`. `sizes` are the arguments of this
package's backbone; weights are random.
"""

import torch


def fla_hgrn2(sizes, use_cache=False):
    """Builds flash-linear-attention's HGRN2."""
    from fla.models import HGRN2Config, HGRN2ForCausalLM

    config = HGRN2Config(
        hidden_size=sizes["hidden_dim"],
        num_hidden_layers=sizes["num_layers"],
        expand_ratio=sizes["expand_ratio"],
        intermediate_size=sizes["intermediate_dim"],
        vocab_size=sizes["vocabulary_size"],
        tie_word_embeddings=False,
        use_cache=use_cache,
    )
    return build_on_gpu(HGRN2ForCausalLM, config)


def transformers_gemma(sizes, use_cache=False):
    """Builds transformers' RecurrentGemma, with sizes other than its defaults."""
    import transformers

    config = transformers.RecurrentGemmaConfig(
        num_hidden_layers=sizes["num_layers"],
        vocab_size=sizes["vocabulary_size"],
        hidden_size=sizes["hidden_dim"],
        lru_width=sizes["lru_width"],
        num_attention_heads=sizes["num_query_heads"],
        num_key_value_heads=sizes.get("num_key_value_heads", 1),
        intermediate_size=2 * sizes["intermediate_dim"],
        attention_window_size=sizes["sliding_window"],
        use_cache=use_cache,
    )
    return build_on_gpu(transformers.RecurrentGemmaForCausalLM, config)


def build_on_gpu(family, config):
    with torch.device("cuda"):  # billions of random numbers, which are slow on a CPU
        model = family(config)
    return model.to("cuda", torch.bfloat16)
