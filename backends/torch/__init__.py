"""The operations in plain torch, on any device, without a compiler.

Each operation over time is a custom operator (`torch.ops.keras_recurrent.<operation>`) with a
backward operator of its own, and so is `token_crossentropy`. `torch.compile` takes each as one
node: no graph breaks, no unrolled loops, one graph for all lengths. `loss.backward()`,
`torch.autograd.grad`, and `grad`, `vjp`, `jacrev` and `vmap` of `torch.func` work, `vmap` row by
row; forward mode and gradients of gradients raise an error (`_autograd.py`). The other operations
without a state are functions that torch differentiates in every way.
"""
