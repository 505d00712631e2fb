"""Plain PyTorch kernels: chunked, differentiable, any device, no compiler needed.

Each operation is an opaque custom operator (`torch.ops.keras_recurrent.<op>`) with a backward operator of
its own, so `torch.compile` takes it as one node: no graph breaks, no unrolled loops, any length.
Two limits come with that: gradients of gradients raise, and so does `torch.func.grad`
(`loss.backward()` and `torch.autograd.grad` work).
"""
