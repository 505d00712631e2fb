"""Asserts that fused decoding steps on simulated devices match layers on one device.

Arguments: a family or "all", and the number of devices. Fused operations have kernels on GPUs; here
they are plain JAX.
"""

import sys

import jax
import keras
import numpy as np

from keras_recurrent import dispatch, which_generation
from keras_recurrent.generation.sampling import features_of, next_tokens, option_arrays
from keras_recurrent.generation.sampling_params import SamplingParams
from keras_recurrent.generation.sequence import DeviceState
from keras_recurrent.layers.decoding import decoding_scope
from tests.devices.jax_layouts import SIZES
from tests.devices.meshes import device_mesh, model_parallel
from tests.devices.programs import collectives
from tests.models.tiny import FAMILIES, HYBRID, set_weights

PROMPT, LENGTH, BATCH = 6, 20, 3
CANDIDATES = 8  # of a `top_k` of 5
SAMPLING = {
    "greedy": SamplingParams(temperature=0),
    "top_k": SamplingParams(top_k=5, seed=1),
    "random": SamplingParams(top_p=0.9, seed=2),
}
# {family: arguments of its backbone, arguments of its layout map}
CASES: dict = {
    "griffin": ({"block_types": ("recurrent", "local_attention")}, {}),
    "hgrn2": ({**HYBRID, "num_key_value_heads": 4}, {"num_key_value_heads": 4}),
    "lightning_hybrid": ({}, {"attention_layers": (1,)}),
    "lfm2": ({"use_conv_bias": True}, {}),
}


def make_model(family):
    row, (sizes, _) = FAMILIES[family], CASES[family]
    model = row.causal_lm(row.backbone(**{**SIZES[family], **sizes}))
    set_weights(model, seed=0)
    return model


def generate(model, names):
    """Returns {name in `SAMPLING`: tokens}."""
    tokens = np.random.default_rng(0).integers(1, 160, (BATCH, LENGTH)).astype("int32")
    x = {"token_ids": tokens, "padding_mask": np.arange(LENGTH) < PROMPT + np.zeros((BATCH, 1))}
    options = {"stop_token_ids": None}
    return {
        name: np.asarray(model.generate(x, sampling=SAMPLING[name], **options)["token_ids"])
        for name in names
    }


def messages_per_token(model, params):
    """The collectives of the program of one decoding step."""
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


def assert_messages(model, name, count):
    """Asserts that a step sends two sums per block, one of the embedding, and the sampler's."""
    width, vocabulary = model.backbone.hidden_dim, model.backbone.vocabulary_size
    gathered_sizes = {
        "greedy": [BATCH * count] * 2,  # the largest logit of each device, and its token
        "top_k": [BATCH * count * (2 * CANDIDATES + 1)],
        "random": [BATCH * vocabulary],
    }
    sums, gathered = 0, []
    for message in messages_per_token(model, SAMPLING[name]):
        if message.kind == "all-reduce" and message.shape[-1] in (width, width + 1):
            sums += 1
        else:
            assert message.kind == "all-gather", message
            gathered.append(np.prod(message.shape))
    assert sums == 2 * len(model.backbone.transformer_layers) + 1
    assert sorted(gathered) == gathered_sizes[name]


def compare(family, count):
    # Compiling takes most of the time, and sampling does not depend on the family.
    names = list(SAMPLING) if (family, count) == ("griffin", 2) else ["greedy"]
    expected = generate(make_model(family), names)
    dispatch.uses_triton_kernels = lambda tensor: True
    mesh = device_mesh(1, count)
    layout_map = FAMILIES[family].backbone.get_layout_map(mesh, **CASES[family][1])
    with model_parallel(layout_map):
        model = make_model(family)
        tokens = generate(model, names)
        assert which_generation(model).unfused == {}
        for name in names:
            np.testing.assert_array_equal(tokens[name], expected[name])
            assert_messages(model, name, count)
    dispatch.uses_triton_kernels = lambda tensor: False


if __name__ == "__main__":
    family, count = sys.argv[1:]
    for name in CASES if family == "all" else [family]:
        compare(name, int(count))
