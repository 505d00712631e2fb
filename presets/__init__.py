"""Model sizes from the papers: one table per family.

A table is `{name: row}`. A row has `description`, `parameters` (their number),
`backbone_arguments`, `preprocessor_arguments` (without the tokenizer) and `weights`: the address of
published weights, such as "hf://google/recurrentgemma-2b"; a file in this folder, written by
`save_weights` of the backbone, such as "griffin_tiny_text.weights.h5"; or None. A row may
have `chat_template`, for checkpoints without one.
"""

import pathlib


def path_of_weights(name):
    """The path of a weights file that is included in this package."""
    return pathlib.Path(__file__).with_name(name)


def describe_language_model(label, size):
    """The description of a language model named `label`, with any license of its weights."""
    license = getattr(size, "license", None)
    return (
        f"{label} with {size.num_layers} blocks of width {size.hidden_dim} and a vocabulary of "
        f"{size.vocabulary_size:,}. {describe_weights(size.weights)}"
        + (f" License of the weights: {license}." if license else "")
    )


def describe_weights(weights):
    """The last sentence of a description."""
    if weights:
        return f"Weights: {weights if '://' in weights else 'in this package'}."
    return "Starts from fresh initialization: no weights are published."
