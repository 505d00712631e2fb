"""Plain PyTorch kernels: chunked, differentiable, any device, no compiler needed.

Each operation over time is an opaque operator (`torch.ops.keras_recurrent.<op>`) with a backward
operator of its own, so `torch.compile` takes it as one node: no graph breaks, no unrolled loops,
any length. The price: gradients of gradients and the transforms of `torch.func` (`grad`, `vmap`)
raise; `loss.backward()` and `torch.autograd.grad` work. So is `token_crossentropy`, which walks
through blocks of rows; the other operations without a state are plain torch.
"""
