"""The operations in plain TensorFlow, on any device.

They run eagerly, in `tf.function` with unknown batch and length, and with `jit_compile=True`, where
XLA recompiles for each length. The number of channels must be static. Only operations without a
state have second derivatives.
"""
