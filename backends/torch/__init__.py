"""The operations in plain torch, on any device, without a compiler.

Each operation over time, and `token_crossentropy`, is a custom operator
(`torch.ops.keras_recurrent.<operation>`) with a backward operator. `torch.compile` traces each as
one node: no graph breaks, no unrolled loops, one graph for all lengths. `loss.backward()`,
`torch.autograd.grad`, and `grad`, `vjp`, `jacrev` and `vmap` of `torch.func` work (`vmap` computes
one sequence after another); forward mode and gradients of gradients raise an error
(`_autograd.py`). The other operations without a state are functions that torch differentiates, in
both modes and repeatedly.
"""
