"""Triton kernels: PyTorch on NVIDIA GPUs. What is read is read once, what is written once.

Each operation is an operator of its own with a backward operator, as in `backends/torch`: one
node for `torch.compile`, no graph breaks, the same limits. Nothing is tuned at run time: sizes
come from shapes by a fixed rule, so the same inputs give the same bits, and a new shape costs one
compilation a kernel. All arithmetic is float32 and there are no matrix products here, so TF32
does not come in.

With TRITON_INTERPRET=1, set before the first import of triton, the same kernels run on a CPU, in
NumPy and very slowly: that is for tests.
"""
