"""What exporters take: each operation, forward alone, in operators that every format has.

A file is an operation, as in `backends/`, and takes and returns what the files there do. It is
written in `keras.ops` for all Keras backends at once, and in what ONNX, LiteRT, OpenVINO and
`torch.export` all have: arithmetic, exponentials, products of matrices, slices and concatenations.
There is no custom operator and no custom gradient, and nothing is written in place. Batch and time
may be unknown when a graph is made, and a graph then holds for all of them, with a loop over time;
where the length is known, there is no loop either.

Keras's `model.export` takes these (see `export/exporters.py`), and so does everything inside
`with keras_recurrent.implementation("portable"):`, for tools of one's own. They are slower than the
files of `backends/`, and hold more memory.
"""
