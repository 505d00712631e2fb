"""Portable implementations for exporters: the forward pass in operators that every format has.

A file is an operation, as in `backends/`, with the same arguments and results. It is written in
`keras.ops` for all Keras backends, and uses only operators that ONNX, LiteRT, OpenVINO and
`torch.export` all have: arithmetic, exponentials, matrix products, slices and concatenations. There
are no custom operators, no custom gradients and no in-place writes. Batch and time may be dynamic;
a graph with dynamic time has a loop over time, a graph of known length has none.

Keras's `model.export` uses them (see `export/exporters.py`). For other tools, enter
`with keras_recurrent.implementation("portable"):`. They are slower than the files of `backends/`
and need more memory.
"""
