"""Multi-head attention to grouped-query attention, for whole models."""

import keras

from keras_recurrent.gqa.graphs import convert_graph
from keras_recurrent.gqa.hub import convert_hub, is_hub
from keras_recurrent.gqa.pooling import POOLINGS, Pooling
from keras_recurrent.gqa.sites import check_groups, is_graph


def convert_to_gqa(model, num_key_value_heads, pooling="mean", where=None, seed=0):
    """A model like `model` whose query heads share `num_key_value_heads` key and value heads.

    With N query heads and G groups, query head n attends with key and value head ⌊n · G / N⌋. The
    key and value projections of a group are made of those of its N / G heads:

        W_g = mean of W_h, h = g·N/G … (g + 1)·N/G − 1

    Everything else stays as it is, and nothing is trained: see `uptraining`. The given model is
    untouched. A functional or sequential model is compiled like the given one, with an optimizer
    that starts anew; compile a KerasHub task yourself.

    Source: Ainslie et al. 2023, "GQA: Training Generalized Multi-Query Transformer Models from
    Multi-Head Checkpoints", arXiv:2305.13245, §2.

    Args:
        model: a functional or sequential Keras model, models and layers of other classes in it
            included; or a backbone or a generating task of KerasHub: those with a number of key
            and value heads (Llama, Mistral, Mixtral, Gemma, PaliGemma, T5Gemma, Phi-3, Qwen,
            GPT-OSS, SmolLM3), of which only decoders change, and GPT-2, OPT, GPT-NeoX, Bloom, BART
            and T5. Caches shrink by N / G. Layers that are grouped already can be grouped further.
        num_key_value_heads: int, G, which divides the key and value heads that there are. 1 is
            multi-query attention; the number that there are already changes no output.
        pooling: "mean"; "first", the first head of each group; or "random", heads drawn anew by
            the layer's initializer.
        where: the attention layers to convert: their names or paths, or a function that takes such
            a layer and gives a bool. None: self-attention that is called causally, by
            `use_causal_mask` or a triangular mask in the graph, and cross-attention (queries and
            values are different tensors); no other self-attention, as that of encoders.
        seed: int, for "random".

    Returns:
        A new model, of the same class but where its attention is to be of another one:
        `keras.layers.MultiHeadAttention` becomes `keras.layers.GroupQueryAttention`.
        Weights are pooled in float32 and stored in the dtype that they had.

    Raises:
        TypeError: `model` is not such a model.
        ValueError: G does not divide the heads; the model or a chosen layer cannot be
            converted, is quantized or has LoRA weights; there is nothing to convert; or the graph
            cannot tell what a layer of another class does with its attention, and there is no
            `where`. All of it is raised before anything is built.

    Example:

    >>> import keras
    >>> from keras_recurrent.conversion import convert_to_gqa
    >>> inputs = keras.Input((None, 32))
    >>> attention = keras.layers.MultiHeadAttention(num_heads=8, key_dim=4, name="attention")
    >>> model = keras.Model(inputs, attention(inputs, inputs, use_causal_mask=True))
    >>> grouped = convert_to_gqa(model, num_key_value_heads=2)
    >>> [tuple(w.shape) for w in grouped.weights if w.path == "attention/key/kernel"]
    [(32, 2, 4)]
    """
    check_groups(num_key_value_heads)
    if pooling not in POOLINGS:
        raise ValueError(
            f"`pooling` must be one of {', '.join(map(repr, POOLINGS))}; got {pooling!r}."
        )
    heads = Pooling(pooling, num_key_value_heads, seed)
    if is_hub(model):
        return convert_hub(model, heads, where)
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a Keras model; got a {type(model).__name__}.")
    if not is_graph(model):
        raise ValueError(
            f"A {type(model).__name__} has no graph that tells how it calls its layers. Convert "
            "`keras.Model(inputs, outputs)` of symbolic inputs and the model's outputs for them."
        )
    if not model.built:
        raise ValueError("`model` has no weights yet. Call or build it first.")
    return convert_graph(model, heads, where)
