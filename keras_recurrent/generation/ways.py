"""By which way the last call of `generate` or `stream` wrote, and why not by a faster one."""

import weakref
from typing import NamedTuple

from keras_recurrent.layers.decoding import unfused_blocks

WAYS = {
    "cuda_graph": "each token is one launch of a CUDA graph",
    "compiled": "torch's compiler made each step of the graph that was traced once",
    "traced": "each step runs a graph that was traced once, kernel by kernel",
    "program": "all tokens are one program of the framework",
    "steps": "each token is a program of the framework",
    "sampler": "the sampler's own loop, compiled where KerasHub compiles it",
    "eager": "each step runs through Keras's layers",
}

_last: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class Way(NamedTuple):
    """How a call of `generate` wrote, and why not by the ways before it."""

    name: str
    refused: dict[str, str]
    unfused: dict[str, str]

    def __str__(self):
        refused = "".join(f"\n  not {name}: {reason}" for name, reason in self.refused.items())
        unfused = "".join(
            f"\n  {block} runs layer by layer: {reason}" for block, reason in self.unfused.items()
        )
        return f"{self.name}: {WAYS[self.name]}{refused}{unfused}"


def which_generation(model):
    """Tell by which way the last call of `generate` or `stream` wrote, and why not by a faster one.

    Args:
        model: a language model of this package.

    Returns:
        A named tuple of `name`; `refused`, a dictionary of faster ways and reasons; and `unfused`,
        a dictionary of the blocks whose steps do not run by fused operations, and reasons, such as
        a LoRA adapter (on NVIDIA GPUs; it is empty where there are no such operations). None
        before the first call. The names are `"cuda_graph"` (torch on an NVIDIA GPU: each token is
        one launch), `"compiled"` (torch's compiler, on CPUs), `"traced"` (torch: a graph that was
        traced once; also in the loop of a sampler such as beam search), `"program"` (JAX and
        TensorFlow: all tokens are one program), `"steps"` (JAX and TensorFlow, of a `stream`: each
        token is a program), `"sampler"` (JAX and TensorFlow: the loop of a sampler such as beam
        search) and `"eager"` (`compile(run_eagerly=True)`, a subclass with a `generate_step` of its
        own or, on torch, a module that has a hook).

    Raises:
        TypeError: `model` is no language model of this package.

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
    return _last.get(model)


def record_mode(model, name, refused=None):
    """Sets what `which_generation` answers."""
    _last[model] = Way(name, refused or {}, unfused_blocks(model))
