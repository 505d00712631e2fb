"""Fused decoding steps on simulated devices, compared with layers on one. Prints JSON.

Runs in a separate process, which has several devices. Arguments: a family or "all", and the number
of devices. Fused operations have kernels on GPUs; here they are plain JAX.
"""

import json
import sys

import jax
import keras
import numpy as np

from keras_recurrent import dispatch, which_generation
from keras_recurrent.generation.device_state import DeviceState
from keras_recurrent.generation.sampling import features_of, next_tokens, option_arrays
from keras_recurrent.generation.sampling_params import SamplingParams
from keras_recurrent.layers.decoding import decoding_scope
from tests.devices.jax_layouts import SIZES
from tests.devices.programs import collectives
from tests.models.tiny import FAMILIES, HYBRID, set_weights

PROMPT, LENGTH, BATCH = 6, 20, 3
CANDIDATES = 8  # of a `top_k` of 5
SAMPLING = {
    "greedy": SamplingParams(temperature=0),
    "top_k": SamplingParams(top_k=5, seed=1),
    "random": SamplingParams(top_p=0.9, seed=2),
}
# {family: arguments of its backbone, and those of its layout map}
CASES: dict = {
    "griffin": ({"block_types": ("recurrent", "local_attention")}, {}),
    "hgrn2": ({**HYBRID, "num_key_value_heads": 4}, {"num_key_value_heads": 4}),
    "lightning_hybrid": ({}, {"attention_layers": (1,)}),
}


def make(family):
    of, (sizes, _) = FAMILIES[family], CASES[family]
    model = of.causal_lm(of.backbone(**{**SIZES[family], **sizes}))
    set_weights(model, seed=0)
    return model


def generate(model, names):
    """`{name in SAMPLING: tokens}`"""
    tokens = np.random.default_rng(0).integers(1, 160, (BATCH, LENGTH)).astype("int32")
    x = {"token_ids": tokens, "padding_mask": np.arange(LENGTH) < PROMPT + np.zeros((BATCH, 1))}
    return {
        name: np.asarray(
            model.generate(x, stop_token_ids=None, sampling=SAMPLING[name])["token_ids"]
        )
        for name in names
    }


def messages(model, params):
    """The collectives of the program of one token."""
    params, size = [params] * BATCH, model.backbone.vocabulary_size
    features, options = features_of(params, size), option_arrays(params, [[1]] * BATCH, size)
    state = model.backbone.get_initial_state(BATCH, LENGTH)

    def step(weights, token, state, uniform):
        with keras.StatelessScope(zip(model.variables, weights, strict=True)), decoding_scope():
            logits, _, state = model.call_with_cache(token, state)
        sequences = DeviceState(*[None] * 5)
        return next_tokens(features, logits[:, 0], sequences, uniform, (), options)[0], state

    weights, token = [v.value for v in model.variables], np.ones((BATCH, 1), "int32")
    arguments = weights, token, state, np.zeros(BATCH, "float32")
    return collectives(jax.jit(step).lower(*arguments).compile().as_text())


def unplanned(model, names, count):
    """Messages of a token besides two sums per block, that of the embedding, and the sampling."""
    width, vocabulary = model.backbone.hidden_dim, model.backbone.vocabulary_size
    blocks, found = len(model.backbone.transformer_layers), []
    samples = {
        "greedy": [BATCH * count] * 2,  # the largest logit of each device, and its token
        "top_k": [BATCH * count * (2 * CANDIDATES + 1)],
        "random": [BATCH * vocabulary],
    }
    for name in names:
        sizes = samples[name]
        for sent in messages(model, SAMPLING[name]):
            if sent.kind == "all-gather" and np.prod(sent.shape) in sizes:
                sizes.remove(np.prod(sent.shape))
            elif sent.kind == "all-reduce" and sent.shape[-1] in (width, width + 1):
                sizes.append("sum")
            else:
                found.append((name, *sent))
        if sizes != ["sum"] * (2 * blocks + 1):
            found.append((name, sizes))
    return found


def compare(family, count):
    # Compiling takes most of the time, and sampling does not depend on the family.
    names = list(SAMPLING) if (family, count) == ("griffin", 2) else ["greedy"]
    expected = generate(make(family), names)
    dispatch.decodes_with_kernels = lambda tensor: True
    mesh = keras.distribution.DeviceMesh((1, count), ("batch", "model"))
    layout_map = FAMILIES[family].backbone.get_layout_map(mesh, **CASES[family][1])
    with keras.distribution.ModelParallel(layout_map=layout_map).scope():
        model = make(family)
        found = generate(model, names)
        report = {"unfused": which_generation(model).unfused}
        report["unplanned"] = unplanned(model, names, count)
    dispatch.decodes_with_kernels = lambda tensor: False
    same = {name: bool((tokens == expected[name]).all()) for name, tokens in found.items()}
    return {**report, "same tokens": same}


def main(family, count):
    families = CASES if family == "all" else [family]
    print(json.dumps({family: compare(family, int(count)) for family in families}))


if __name__ == "__main__":
    main(*sys.argv[1:])
