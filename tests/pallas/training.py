"""Compiles a training step of hawk_1.3b for eight v5e chips, which the machine need not have.

    python -m tests.pallas.training

The step is forward, backward and Adam, in bfloat16 with weights in float32 and recomputed blocks.
It prints JSON. Weights get no values: in a stateless scope, Keras leaves variables empty.
"""

import json

from tests.pallas import targets  # isort: skip  (sets the compiler's environment)

import jax
import jax.numpy as jnp
import keras

from keras_recurrent.models import GriffinBackbone, GriffinCausalLM

TOPOLOGY, MESH = "v5e:2x4", (4, 2)  # batch, model
B, T = 8, 2048


def make_step(model, optimizer):
    """A function of the values of variables, of tokens and of labels."""

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

    optimizer = keras.optimizers.Adam(1e-4)  # Its scalars get values, on the CPU.
    with (
        distribution.scope(),
        keras.StatelessScope(initialize_variables=False),
        keras.RematScope(mode="full"),
    ):
        options = {"load_weights": False, "preprocessor": None, "compile": False}
        model = GriffinCausalLM.from_preset("hawk_1.3b", dtype="mixed_bfloat16", **options)
        for variable in model.variables:
            variable._initialize_layout()  # The moments get the layouts of their variables.
        optimizer.build(model.trainable_variables)
        variables = (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
        )
        batch = jax.NamedSharding(mesh.backend_mesh, jax.P("batch"))
        tokens = jax.ShapeDtypeStruct((B, T), "int32", sharding=batch)
        step = jax.jit(make_step(model, optimizer), donate_argnums=(0, 2))
        executable = step.lower(*jax.tree.map(shape, variables), tokens, tokens).compile()
    return targets.report(executable) | {"parameters": model.count_params()}


if __name__ == "__main__":
    print(json.dumps(report()))
