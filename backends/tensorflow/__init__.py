"""The operations in plain TensorFlow, on any device.

They run eagerly, in `tf.function` with unknown batch and length, and with `jit_compile=True`, where
XLA compiles again for each length. The number of channels must be known. Only operations without
a state have gradients of gradients.
"""
