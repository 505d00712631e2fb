"""Plain TensorFlow kernels: a tree of short chunks, differentiable, any device.

They run eagerly, in `tf.function` with an unknown batch and length, and with `jit_compile=True` (XLA then compiles
anew for each length). The number of channels must be known. Gradients of gradients are not supported.
"""
