"""Sizes of the models, as the papers print them: one table a family.

A table is `{name: row}`. A row has `description`, `parameters` (how many the model has),
`backbone_arguments`, `preprocessor_arguments` (all but the tokenizer) and `weights`: where they are
published, such as "hf://google/recurrentgemma-2b"; the file beside the table that has them, as
`save_weights` of the backbone writes it, such as "griffin_tiny_text.weights.h5"; or None.
"""

import pathlib


def path_of_weights(name):
    """The path of a file of weights that comes with this package."""
    return pathlib.Path(__file__).with_name(name)


def describe_language_model(label, size):
    """The description of a row of a language model, called `label`."""
    return (
        f"{label} with {size.num_layers} blocks of width {size.hidden_dim} and a vocabulary of "
        f"{size.vocabulary_size:,}. {describe_weights(size.weights)}"
    )


def describe_weights(weights):
    """The last sentence of a description."""
    if weights:
        return f"Weights: {weights if '://' in weights else 'in this package'}."
    return "Starts from fresh initialization: no weights are published."
