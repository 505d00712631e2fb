"""Decoding mode of the last call of `generate` or `stream`, and why faster modes were not used."""

from typing import NamedTuple

MODES = {
    "cuda_graph": "each step is one CUDA graph launch, which includes sampling",
    "compiled": "each token is a step compiled by torch's compiler",
    "traced": "each token is a step that was traced once and runs kernel by kernel",
    "program": "a compiled program of the framework generates a few tokens at a time",
    "eager": "each token runs through Keras's layers",
}

RUN_EAGERLY = "`compile` got `run_eagerly=True`"  # reason for `"eager"`


class GenerationMode(NamedTuple):
    """Result of `which_generation`, which describes the attributes."""

    name: str
    refused: dict[str, str]
    unfused: dict[str, str]

    def __str__(self):
        refused = "".join(f"\n  not {name}: {reason}" for name, reason in self.refused.items())
        unfused = "".join(
            f"\n  {block} runs layer by layer: {reason}" for block, reason in self.unfused.items()
        )
        return f"{self.name}: {MODES[self.name]}{refused}{unfused}"


def which_generation(model):
    """Reports the decoding mode of the last call, and why faster modes were not used.

    The modes are

    - `"cuda_graph"`: on torch and an NVIDIA GPU, each step is one launch of a CUDA graph, which
      includes sampling but not the choices of beam search;
    - `"compiled"`: on torch and CPUs, the step was compiled by torch's compiler;
    - `"traced"`: on torch, the step was traced once and runs kernel by kernel;
    - `"program"`: on JAX and TensorFlow, a compiled program generates a few tokens at a time;
    - `"eager"`: each token runs through Keras's layers, because of `compile(run_eagerly=True)` or,
      on torch, a module with a hook.

    Args:
        model: a language model of this package.

    Returns:
        A named tuple, or None before the first call after `compile`. `name` is the mode,
        `refused` a dictionary of faster modes and reasons, and `unfused` a dictionary of the blocks
        whose steps do not run as fused operations and reasons, such as a LoRA adapter. `unfused`
        is empty except on NVIDIA GPUs, where such operations exist.

    Raises:
        TypeError: `model` is not a language model of this package.

    Example:

    >>> import keras_recurrent
    >>> model = keras_recurrent.models.GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
    >>> model.compile(sampler="greedy", run_eagerly=True)
    >>> text = model.generate("a", max_length=4)
    >>> keras_recurrent.which_generation(model).name
    'eager'
    """
    if not hasattr(model, "prefill"):
        raise TypeError(
            "`model` must be a language model of keras_recurrent, such as `HGRN2CausalLM`; got "
            f"{type(model).__name__}."
        )
    return getattr(model._decoding_programs, "mode", None)
