"""Portable implementations in `keras.ops`: for exporters, decoding steps, TensorFlow and JAX.

A file is an operation, as in `backends/`, with the same arguments and results. It serves all Keras
backends. Decoding steps aside, which are never exported, it uses only operators that ONNX, LiteRT,
OpenVINO and `torch.export` all have: arithmetic, exponentials, matrix products, slices and
concatenations. There are no custom operators, no custom gradients and no in-place writes. Batch and
time may be dynamic; a graph with dynamic time has a loop over time, a graph of known length none.

Keras's `model.export` uses them (see `export/exporters.py`). For other tools, enter
`with keras_recurrent.implementation("portable"):`. They are slower than the files of `backends/`
and need more memory. They also train models if `backends/jax` or `backends/tensorflow` has no file
for an operation, so their gradients must be numerically accurate. The file `_time_groups.py` of
these folders limits the memory.
"""
