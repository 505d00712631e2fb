"""Plain TensorFlow kernels: a tree of short chunks, differentiable, any device.

They run eagerly, in `tf.function` with batch and length unknown, and with `jit_compile=True`, where
XLA compiles anew for each length. The number of channels must be known. Gradients of gradients
are not supported, but by the operations without a state.
"""
