"""Model sizes from the papers: one table `{name: Preset}` per family."""

import dataclasses
import pathlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class Preset:
    """One row of a table.

    Attributes:
        description: string.
        backbone_arguments: a dictionary of arguments of the backbone.
        parameters: integer, the resulting number of parameters.
        weights: the address of published weights, such as "hf://google/recurrentgemma-2b"; a file
            in this folder, written by `save_weights` of the backbone, such as
            "griffin_tiny_text.weights.h5"; or None.
        preprocessor_arguments: a dictionary, without the tokenizer.
        config_defaults: a dictionary of keys that `config.json` of the published weights lacks.
        chat_template: string, for checkpoints without one.
    """

    description: str
    backbone_arguments: dict[str, Any]
    parameters: int
    weights: str | None = None
    preprocessor_arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    config_defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    chat_template: str | None = None


def language_model(
    label, arguments, parameters, weights=None, license=None, sequence_length=1024, **further
):
    """Returns the `Preset` of a language model.

    Args:
        label: string, the beginning of the description.
        arguments, parameters, weights: as in `Preset`.
        license: string, the license of the weights, as their authors name it.
        sequence_length: integer, tokens per sequence in the preprocessor.
        **further: other attributes of `Preset`.
    """
    description = (
        f"{label} with {arguments['num_layers']} blocks of width {arguments['hidden_dim']} and a "
        f"vocabulary of {arguments['vocabulary_size']:,}. {describe_weights(weights)}"
        + (f" License of the weights: {license}." if license else "")
    )
    preprocessor = {"sequence_length": sequence_length}
    return Preset(description, arguments, parameters, weights, preprocessor, **further)


def describe_weights(weights):
    """The last sentence of a description."""
    if weights:
        return f"Weights: {weights if '://' in weights else 'in this package'}."
    return "Starts from fresh initialization: no weights are published."


def path_of_weights(name):
    """The path of a weights file that is included in this package."""
    return pathlib.Path(__file__).with_name(name)
