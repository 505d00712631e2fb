"""TensorFlow's own versions of some operations, on any device.

`keras_recurrent/portable` implements the others. An operation has a file here if its portable
version is missing, is slower, needs more memory, or has gradients that lose digits.
`_time_groups.py` calls portable operations over time for one group of tokens after another.

The operations run eagerly, in `tf.function` with unknown batch and length, and with
`jit_compile=True`, where XLA recompiles for each length. The number of channels must be static.
"""
