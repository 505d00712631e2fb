"""Times training steps of whole models on a CUDA GPU on JAX.

    python -m benchmarks.gpu_models_on_jax hgrn2           # or recurrentgemma

A step is one program with donated weights and slots, as in Keras's trainer on JAX. Prints a table
line in the layout of `benchmarks.gpu_models`.
"""

import os
import sys
import time

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras

from keras_recurrent.models import GriffinCausalLM, HGRN2CausalLM, TokenCrossentropy

RUNS = 3
MODELS = {
    "hgrn2": (HGRN2CausalLM, "hgrn2_1.3b_100b", {"batch": 8, "length": 2048, "repeats": 10}),
    "recurrentgemma": (
        GriffinCausalLM,
        "recurrentgemma_2b",
        {"batch": 1, "length": 2048, "repeats": 10},
    ),
}


def training_step(model, optimizer, loss):
    """Returns a program from weights, optimizer variables and tokens to new ones and the loss."""

    def loss_of(weights, others, token_ids):
        mask = jnp.ones(token_ids.shape, bool)
        inputs = {"token_ids": token_ids, "padding_mask": mask}
        logits, others = model.stateless_call(weights, others, inputs, training=True)
        return loss(jnp.roll(token_ids, -1, 1), logits), others

    def step(weights, others, slots, token_ids):
        (value, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(
            weights, others, token_ids
        )
        weights, slots = optimizer.stateless_apply(slots, gradients, weights)
        return weights, others, slots, value

    return jax.jit(step, donate_argnums=(0, 1, 2))


def measure(name, profile=None):
    family, preset, work = MODELS[name]
    model = family.from_preset(preset, load_weights=False, preprocessor=None, dtype="bfloat16")
    # In bfloat16, 0.999 rounds to 1, and Keras's AdamW changes no weight.
    optimizer = keras.optimizers.AdamW(1e-4, beta_2=0.99)
    optimizer.build(model.trainable_variables)
    vocabulary = model.backbone.get_config()["vocabulary_size"]
    step = training_step(model, optimizer, TokenCrossentropy())
    state = [
        [v.value for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
        )
    ]
    parameters = sum(w.size for w in state[0])
    tokens = work["batch"], work["length"]
    token_ids = jax.random.randint(jax.random.key(0), tokens, 0, vocabulary)

    def run(state):
        *state, value = step(*state, token_ids)
        return state, value

    start = time.perf_counter()
    state, value = run(state)
    jax.block_until_ready(value)
    first = time.perf_counter() - start
    speeds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        for _ in range(work["repeats"]):
            state, value = run(state)
        jax.block_until_ready((state, value))
        speeds.append(
            work["repeats"] * work["batch"] * work["length"] / (time.perf_counter() - start)
        )
    peak = jax.local_devices()[0].memory_stats()["peak_bytes_in_use"] / 2**30
    if profile:
        with jax.profiler.trace(profile):
            state, value = run(state)
            jax.block_until_ready((state, value))
    return [
        name,
        f"{parameters:,}",
        "×".join(map(str, tokens)),
        f"{min(speeds):,.0f} to {max(speeds):,.0f}",
        f"{peak:.1f}",
        f"{first:.1f}",
    ]


if __name__ == "__main__":
    print(f"| {' | '.join(measure(*sys.argv[1:]))} |", flush=True)
