"""Asserts that weights in 16 bits that are split over devices are updated as on one device."""

import jax
import keras
import numpy as np

from keras_recurrent.optimizers import AdamW

NUM_STEPS = 3


def train(layouts):
    """Returns weights after some steps; `layouts`: axes of the mesh for each weight."""
    generator, mesh = np.random.default_rng(0), jax.make_mesh((2,), ("model",))
    variables = [
        keras.Variable(generator.normal(size=(8, 6)), dtype=dtype)
        for dtype in ("bfloat16", "float16")
    ]
    optimizer = AdamW(1e-2, weight_decay=0.1, global_clipnorm=1.0)
    optimizer.build(variables)
    weights, slots = [v.value for v in variables], [v.value for v in optimizer.variables]
    shardings = [
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in layouts
    ]
    weights = [jax.device_put(w, s) for w, s in zip(weights, shardings, strict=True)]
    update = jax.jit(optimizer.stateless_apply, out_shardings=(shardings, None))
    for _ in range(NUM_STEPS):
        gradients = [jax.numpy.asarray(generator.normal(size=(8, 6)), w.dtype) for w in weights]
        gradients = [jax.device_put(g, s) for g, s in zip(gradients, shardings, strict=True)]
        weights, slots = update(slots, gradients, weights)
    assert [w.sharding for w in weights] == shardings
    return [np.asarray(w, "float32") for w in weights]


if __name__ == "__main__":
    expected = train([(), ()])
    for layouts in ([("model",), (None, "model")], [(None, "model"), ("model",)]):
        for found, one_device in zip(train(layouts), expected, strict=True):
            # The norm of the gradients is a sum in another order, which may cross a bound.
            assert np.mean(found != one_device) < 0.05
            np.testing.assert_allclose(found, one_device, rtol=2.0**-7)
