"""The operations in plain TensorFlow, on any device.

They run eagerly, in `tf.function` with unknown batch and length, and with `jit_compile=True`, where
XLA recompiles for each length. The number of channels must be static.

Gradients compute parts of an operation again. `keras_recurrent/portable` in their place took 2.6 to
3.9 times as long for a training step of `RecurrentBlock(256)` and `HGRN2` as gradients with their
own formulas, with XLA 1.4 to 1.6 times (8x512x256 and 1x4096x256, float32, one CPU core); those
were 1.1 to 1.3 times as fast as the gradients here.
"""
