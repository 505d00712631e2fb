"""Compile a whole training step of hawk_1.3b for eight v5e, which need not be there. Prints JSON.

Forward, backward and Adam's update, in bfloat16 with weights in float32; blocks recompute. No
weight is ever made: in a stateless scope Keras leaves variables empty.
"""

import json

from tests.pallas import targets  # isort: skip  (sets the compiler's environment)

import jax
import jax.numpy as jnp
import keras

from keras_recurrent.models import GriffinBackbone, GriffinCausalLM

TOPOLOGY, MESH = "v5e:2x4", (4, 2)  # batch, model
B, T = 8, 2048


def step_of(model, optimizer):
    """A step, as a function of the values of its variables, tokens and labels."""

    def step(trainable, others, moments, token_ids, labels):
        x = {"token_ids": token_ids, "padding_mask": token_ids > 0}

        def loss(trainable):
            logits, _ = model.stateless_call(trainable, others, x, training=True)
            return jnp.mean(
                keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            )

        value, gradients = jax.value_and_grad(loss)(trainable)
        return value, *optimizer.stateless_apply(moments, gradients, trainable)

    return step


def report():
    devices = targets.topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices
    mesh = keras.distribution.DeviceMesh(MESH, ("batch", "model"), list(devices))
    distribution = keras.distribution.ModelParallel(
        layout_map=GriffinBackbone.get_layout_map(mesh), batch_dim_name="batch"
    )

    def shape(variable):
        layout = distribution.get_variable_layout(variable).backend_layout
        return jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=layout)

    optimizer = keras.optimizers.Adam(1e-4)  # its own few numbers are made, and lie on the CPU
    with (
        distribution.scope(),
        keras.StatelessScope(initialize_variables=False),
        keras.RematScope(mode="full"),
    ):
        model = GriffinCausalLM.from_preset(
            "hawk_1.3b",
            load_weights=False,
            preprocessor=None,
            compile=False,
            dtype="mixed_bfloat16",
        )
        for variable in model.variables:
            variable._initialize_layout()  # as if it had a value: the moments are laid out alike
        optimizer.build(model.trainable_variables)
        variables = (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
        )
        rows = jax.NamedSharding(mesh.backend_mesh, jax.P("batch"))
        tokens = jax.ShapeDtypeStruct((B, T), "int32", sharding=rows)
        step = jax.jit(step_of(model, optimizer), donate_argnums=(0, 2))
        executable = step.lower(*jax.tree.map(shape, variables), tokens, tokens).compile()
    return targets.report(executable) | {"parameters": model.count_params()}


if __name__ == "__main__":
    print(json.dumps(report()))
